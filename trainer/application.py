"""The driver: ``python -m trainer.application``. Trains what LANYARD_JOB orders with Ray Train V2, then exports.

Exit status 0 only when training ended and every export was stored and read back; otherwise 1 and a last line that says
what happened.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from trainer import constants, job, pins
from trainer.job import Job

if TYPE_CHECKING:
    from ray.train import Result


def main() -> int:
    """Train and export; returns the exit status."""
    started = time.monotonic()
    constants.apply_train_settings(os.environ)
    try:
        order = job.from_environment()
        # Versions only: the driver of a CUDA profile holds no GPU; its workers check that they do.
        pins.enforce(order.pins, "cpu", "the driver")
        result = fit(order)
        print(f"trained in {time.monotonic() - started:.1f} s; exporting", flush=True)
        # Imported here: Rerun is needed only now, and a worker never needs it.
        from trainer import exports

        place = exports.export(order, result)
    except Exception as error:
        import traceback

        traceback.print_exc()
        print(f"lanyard: failed: {_reason(error)}", file=sys.stderr, flush=True)
        return 1
    print(f"lanyard: succeeded: {place}", flush=True)
    return 0


def fit(order: Job) -> Result:
    """Train to the end, recovering as often as the order allows. Raises ray.train.TrainingFailedError."""
    import ray
    import ray.train
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from trainer import standby, storage, training

    # Ray takes the hook for the whole job only; it does nothing in a process without standby's mark.
    ray.init(log_to_driver=True, runtime_env={"worker_process_setup_hook": standby.HOOK})
    root = job.storage_path("storage", order.storage)[1]
    cuda = order.device == "cuda"
    trainer = TorchTrainer(
        training.train,
        train_loop_config={"order": os.environ[job.VARIABLE]},
        torch_config=TorchConfig(backend="nccl" if cuda else "gloo", timeout_s=constants.COLLECTIVE_TIMEOUT_S),
        scaling_config=ScalingConfig(
            num_workers=order.world_size,
            use_gpu=cuda,
            resources_per_worker={"CPU": 1, **({"GPU": 1} if cuda else {})},
            # SPREAD is only a wish: after a host's death both ranks could land on one and the run would "succeed".
            placement_strategy="STRICT_SPREAD",
        ),
        run_config=RunConfig(
            name=order.train_name,
            storage_path=storage.join(root, "train"),
            storage_filesystem=storage.filesystem(),
            failure_config=FailureConfig(
                max_failures=order.failures.worker,
                controller_failure_limit=order.failures.controller,
                max_preemption_failures=order.failures.preemption,
            ),
            checkpoint_config=CheckpointConfig(num_to_keep=constants.COMMITS_KEPT),
            worker_runtime_env={"env_vars": {standby.MARK: "1"}},
        ),
    )
    return trainer.fit()


def _reason(error: BaseException) -> str:
    """The last line's text: the innermost known cause, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:1500]


if __name__ == "__main__":
    sys.exit(main())
