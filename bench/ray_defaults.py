"""The drill with Ray's default settings: the same application without one setting or preparation for recovery.

    python -m bench.ray_defaults --scratch DIR --source DIR --storage s3://… --recipe JSON --pins JSON \
        --after-step N --settle-s S

``--source`` holds a copy of `trainer` in which `bench.ray_overrides` was applied. The job holds after the commit of
``--after-step``, as a guarded run's does; S seconds later the highest rank gets SIGKILL, as in a guarded run. Prints
one JSON line: the seconds from the kill to the last rank's first step after the restart. Runs in the application's
Python.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import pyarrow.fs as pafs

from bench.plain_ray import PlainCluster, Trouble, arguments, end_on_sigterm, order
from trainer import storage
from trainer.processes import look_up

T = TypeVar("T")

COMMIT_LIMIT_S = 300.0
RESUME_LIMIT_S = 300.0
HOLD_S = 240.0


def main() -> int:
    """One drill; returns the exit status."""
    parser = arguments(__doc__)
    parser.add_argument("--after-step", type=int, required=True)
    parser.add_argument("--settle-s", type=float, required=True)
    options = parser.parse_args()
    end_on_sigterm()
    job = order(f"defaults-{secrets.token_hex(5)}", options.storage, options.recipe, options.pins)
    job["drill"] = {"after_step": options.after_step, "hold_s": HOLD_S}
    store = storage.filesystem()
    root = job["storage"].removeprefix("s3://")
    cluster = PlainCluster(options.scratch)
    try:
        cluster.start()
        entrypoint = ["python", "-m", "trainer.application"]
        cluster.submit_only(job["submission_id"], entrypoint, options.source, {"LANYARD_JOB": json.dumps(job)})
        wait(COMMIT_LIMIT_S, "the commit", lambda: committed(store, root) >= options.after_step)
        time.sleep(options.settle_s)
        struck = strike(store, root)
        firsts = wait(RESUME_LIMIT_S, "both ranks to go on", lambda: first_steps(store, root))
        if any(step != options.after_step + 1 for step, _ in firsts):
            raise Trouble(f"ranks went on at steps {[step for step, _ in firsts]}, not at {options.after_step + 1}")
        cluster.stop_job(job["submission_id"])
    finally:
        cluster.stop()
    print(json.dumps({"seconds": round(max(at for _, at in firsts) - struck, 3)}))
    return 0


def committed(store: pafs.FileSystem, root: str) -> int:
    """The last committed step, by Ray's own record; 0 before the first."""
    record = document(store, f"{root}/train/main/checkpoint_manager_snapshot.json")
    latest = record and record["latest_checkpoint_result"]
    return int(latest["metrics"]["step"]) if latest else 0


def strike(store: pafs.FileSystem, root: str) -> float:
    """SIGKILL to exactly the process of rank 1, the rank that an operator's drill chooses too; returns when."""
    told = document(store, f"{root}/evidence/main/attempt-001/rank-1.start.json")
    if told is None:
        raise Trouble("rank 1 left no evidence of its start")
    found = look_up(told["process"]["pid"])
    if found is None or found.start_time != told["process"]["start_time"]:
        raise Trouble("rank 1 is gone already")
    os.kill(found.pid, signal.SIGKILL)
    return time.time()


def first_steps(store: pafs.FileSystem, root: str) -> list[tuple[int, float]] | None:
    """Step and time of both ranks' first step of the second attempt, once both are there."""
    told = [document(store, f"{root}/evidence/main/attempt-002/rank-{rank}.first-step.json") for rank in (0, 1)]
    if not all(told):
        return None
    return [(each["step"], datetime.fromisoformat(each["at"]).timestamp()) for each in told if each]


def document(store: pafs.FileSystem, path: str) -> dict[str, Any] | None:
    """A JSON object in storage; None while there is none, or half of one."""
    try:
        return dict(json.loads(storage.read_optional(store, path) or b""))
    except ValueError:
        return None


def wait(limit_s: float, what: str, look: Callable[[], T | None]) -> T:
    """The first answer of ``look`` that is true. Raises Trouble after ``limit_s`` seconds."""
    deadline = time.monotonic() + limit_s
    while not (answer := look()):
        if time.monotonic() > deadline:
            raise Trouble(f"{limit_s:.0f} s passed waiting for {what}")
        time.sleep(0.1)
    return answer


if __name__ == "__main__":
    sys.exit(main())
