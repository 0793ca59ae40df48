"""The driver: ``python -m trainer.application``. Trains what LANYARD_JOB orders with Ray Train V2, then exports.

Exit status 0 only when training ended and every export was stored and read back; otherwise 1 and a last line that says
what happened.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from trainer import job
from trainer.job import Job

if TYPE_CHECKING:
    from ray.train import Result


def main() -> int:
    """Train and export; returns the exit status."""
    started = time.monotonic()
    try:
        order = job.from_environment()
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
    """Train to the end, recovering as often as the order allows. Raises PinError, ray.train.TrainingFailedError."""
    from ray.train.torch import TorchTrainer

    from trainer import training, workload

    workload.prepare(order)
    trainer = TorchTrainer(
        training.train,
        train_loop_config={"order": os.environ[job.VARIABLE]},
        torch_config=workload.torch_config(order),
        scaling_config=workload.scaling_config(order),
        run_config=workload.run_config(order),
    )
    return trainer.fit()


def _reason(error: BaseException) -> str:
    """The last line's text: the innermost known cause, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{type(error).__name__}: {text}"[:1500]


if __name__ == "__main__":
    sys.exit(main())
