"""A Ray Train V2 application that commits twice and then misbehaves: `fail`, `stall`, or from the start `greedy`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "900"

import ray.train
from ray.train import Checkpoint, CheckpointConsistencyMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from trainer import storage

COMMITS = 2


def train(config: dict[str, Any]) -> None:
    """One rank: two commits, then what was asked for."""
    rank = ray.train.get_context().get_world_rank()
    for commit in range(1, COMMITS + 1):
        step = commit * config["interval"]
        metrics = {"step": step, "loss": 1.0 / step}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "state.json").write_text(json.dumps(metrics))
            own = Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report(metrics, checkpoint=own, checkpoint_dir_name=f"checkpoint_{step:06d}")
    # A report that returned is not a commit yet, and what fails before it loses it.
    while len(ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)) < COMMITS:
        time.sleep(0.1)
    if config["what"] == "fail":
        raise ValueError(f"the samples of step {step + 1} are damaged")
    time.sleep(3600)


def main(what: str) -> None:
    order = json.loads(os.environ["LANYARD_JOB"])
    cpus = 64 if what == "greedy" else 1
    DataParallelTrainer(
        train,
        train_loop_config={"what": what, "interval": order["workload"]["checkpoint_interval"]},
        scaling_config=ScalingConfig(
            num_workers=order["world_size"], resources_per_worker={"CPU": cpus}, placement_strategy="STRICT_SPREAD"
        ),
        run_config=RunConfig(
            name=order["train_name"],
            storage_path=order["storage"].removeprefix("s3://") + "/train",
            storage_filesystem=storage.filesystem(),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0),
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
