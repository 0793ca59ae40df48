"""What an application is written with, so that Lanyard can run, watch, drill, verify and resume it.

The driver: ``load_order``, ``prepare``, ``scaling_config``, ``run_config``, ``torch_config``, and after ``fit``
``publish_exports``. The training function on each rank: ``load_order``, ``Attempt``, ``save_state`` and ``load_state``,
the hashes. These names are stable; docs/workload-contract.md says what each must do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

import ray
from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig

from trainer import constants, pins, publishing, standby, storage
from trainer.attempt import Attempt
from trainer.checkpoints import CheckpointDamaged, load_state, save_state
from trainer.hashing import model_sha256, momentum_sha256, optimizer_sha256
from trainer.job import JobError, Order
from trainer.job import script_from_environment as load_order
from trainer.publishing import ExportError

__all__ = [
    "Attempt",
    "CheckpointDamaged",
    "ExportError",
    "JobError",
    "Order",
    "load_order",
    "load_state",
    "model_sha256",
    "momentum_sha256",
    "optimizer_sha256",
    "prepare",
    "publish_exports",
    "run_config",
    "save_state",
    "scaling_config",
    "torch_config",
]

# The inspector reads no other name.
_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


def prepare(order: Order) -> None:
    """Set Ray Train up in the driver, check the pins, and connect to the run's cluster. Raises PinError."""
    constants.apply_train_settings(os.environ)
    # Versions only: the driver of a CUDA profile holds no GPU; its workers check that they do.
    pins.enforce(order.pins, "cpu", "the driver")
    # Ray takes the hook for the whole job only; it does nothing in a process without standby's mark.
    environment: dict[str, Any] = {"worker_process_setup_hook": standby.HOOK}
    # Ray's job supervisor tells the driver alone. Where a second Ray runs on the machine, Train's placement-group
    # cleaner cannot tell which is its own, and neither removes a group nor ends.
    if "RAY_ADDRESS" in os.environ:
        environment["env_vars"] = {"RAY_ADDRESS": os.environ["RAY_ADDRESS"]}
    ray.init(log_to_driver=True, runtime_env=environment)


def scaling_config(order: Order) -> ScalingConfig:
    """One rank on each host, with the order's device."""
    cuda = order.device == "cuda"
    return ScalingConfig(
        num_workers=order.world_size,
        use_gpu=cuda,
        resources_per_worker={"CPU": 1, **({"GPU": 1} if cuda else {})},
        # SPREAD is only a wish: after a host's death both ranks could land on one and the run would "succeed".
        placement_strategy="STRICT_SPREAD",
    )


def run_config(order: Order) -> RunConfig:
    """Name, storage, failure limits and commits kept. No key is in it: the filesystem reads the environment."""
    return RunConfig(
        name=order.train_name,
        storage_path=storage.join(order.root, "train"),
        storage_filesystem=storage.filesystem(),
        failure_config=FailureConfig(
            max_failures=order.failures.worker,
            controller_failure_limit=order.failures.controller,
            max_preemption_failures=order.failures.preemption,
        ),
        checkpoint_config=CheckpointConfig(num_to_keep=constants.COMMITS_KEPT),
        worker_runtime_env={"env_vars": {standby.MARK: "1"}},
    )


def torch_config(order: Order) -> TorchConfig:
    """NCCL on CUDA, gloo on CPU, and a collective that waits for no one for ever."""
    return TorchConfig(backend="nccl" if order.device == "cuda" else "gloo", timeout_s=constants.COLLECTIVE_TIMEOUT_S)


def publish_exports(order: Order, result: Result, files: Mapping[str, bytes]) -> str:
    """Store ``files``, ``result.json`` and the manifest of a script's finished training; returns their ``s3://`` place.

    ``files`` are by bare name, and the same bytes each time. Raises ExportError when training did not reach the last
    step or its evidence contradicts itself, ValueError for a name that cannot be exported, DifferingBytes when another
    export is in the place, and OSError when storage stays away.
    """
    for name in files:
        if not _FILE.fullmatch(name) or name in (publishing.RESULT, publishing.MANIFEST):
            raise ValueError(f"{name!r} cannot be exported: give bare file names other than result.json and SHA256SUMS")
    metrics: Mapping[str, Any] = result.metrics or {}
    if result.checkpoint is None or metrics.get("step") != order.steps:
        raise ExportError(
            f"training ended at step {metrics.get('step', 0)} of {order.steps}; look at the workers' logs"
        )
    store = storage.filesystem()
    ranks = publishing.final_ranks(order, store, publishing.last_attempt(order, store))
    name = result.checkpoint.path.rstrip("/").rsplit("/", 1)[-1]
    document = publishing.result_document(order, name, metrics["loss"], ranks, workload="script")
    told = {**files, publishing.RESULT: publishing.json_bytes(document)}
    return publishing.publish(order, store, publishing.with_manifest(told))
