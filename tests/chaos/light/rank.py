"""One light training worker: `python -m trainer.rank`, started by a raylet, led by the driver line by line.

Trains nothing: the state after a step is a digest of the step and the seed, so that what was restored, and from where,
can be told as of a real model. Leaves the evidence of docs/workload-contract.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import time
from datetime import UTC, datetime
from typing import Any

from trainer import machine, storage

ROOT_ONLY = 0
"""The rank that writes checkpoints."""


def digest(what: str, step: int) -> str:
    """The hash of the `model` or `momentum` that every rank has after a step."""
    return hashlib.sha256(f"{what} after step {step}".encode()).hexdigest()


def commit_name(step: int, attempt: int) -> str:
    """A checkpoint's folder, as the application names it."""
    return f"checkpoint_step-{step:09d}_attempt-{attempt:03d}"


class Rank:
    """One rank of one attempt. ``told`` holds order, rank, attempt, restored (step, name), node, address."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.order, self.rank, self.attempt = told["order"], int(told["rank"]), int(told["attempt"])
        self.told = told
        self.store = storage.filesystem()
        self.root = self.order["storage"].removeprefix("s3://")
        self.started = int(told["restored_step"])

    def start(self) -> None:
        """Say who starts where and from what."""
        me = machine.this_process()
        self.record(
            "start",
            train_name=self.order["train_name"],
            submission_id=self.order["submission_id"],
            world_size=self.order["world_size"],
            local_rank=0,
            device={"type": "cpu", "name": "CPU", "fingerprint": machine.host_fingerprint()},
            ray={"node_id": self.told["node_id"], "address": self.told["address"]},
            restored_step=self.started,
            restored_from=self.told["restored_from"],
            model_sha256=digest("model", self.started),
            momentum_sha256=digest("momentum", self.started),
            host={"fingerprint": machine.host_fingerprint(), "hostname": socket.gethostname()},
            process={"pid": me.pid, "start_time": me.start_time, "boot_id": me.boot_id},
            versions={"torch": "2.13.0+cpu", "ray": "2.58.0", "python": platform.python_version()},
        )

    def step(self, step: int, seconds: float) -> None:
        """One step; the first of the attempt leaves evidence."""
        time.sleep(seconds)
        if step == self.started + 1:
            self.record("first-step", step=step)

    def checkpoint(self, step: int) -> None:
        """Rank 0 uploads, before anybody reports."""
        if self.rank == ROOT_ONLY:
            content = {"step": step, "model_sha256": digest("model", step), "momentum_sha256": digest("momentum", step)}
            folder = f"{self.root}/train/{self.order['train_name']}/{commit_name(step, self.attempt)}"
            self.store.put(f"{folder}/checkpoint.pt", json.dumps(content).encode())

    def final(self, step: int) -> None:
        """Say where this rank ended."""
        hashes = {f"{what}_sha256": digest(what, step) for what in ("model", "momentum")}
        self.record("final", step=step, **hashes)

    def record(self, kind: str, **facts: Any) -> None:
        """Write one evidence object."""
        at = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        document = {"schema": 1, "attempt": self.attempt, "rank": self.rank, **facts, "at": at}
        folder = f"{self.root}/evidence/{self.order['train_name']}/attempt-{self.attempt:03d}"
        storage.put_once(self.store, f"{folder}/rank-{self.rank}.{kind}.json", json.dumps(document, indent=1).encode())


def main() -> None:
    """Serve the driver until it hangs up."""
    told = json.loads(os.environ["LIGHT_RANK"])
    rank = Rank(told)
    with socket.create_connection(tuple(told["driver"]), timeout=30) as line:
        line.settimeout(None)
        stream = line.makefile("rwb")
        _say(stream, {"rank": rank.rank, "pid": os.getpid()})
        for raw in stream:
            order = json.loads(raw)
            try:
                getattr(rank, order.pop("do"))(**order)
            except OSError as error:
                _say(stream, {"failed": str(error)})
                continue
            _say(stream, {"done": True})


def _say(stream: Any, told: dict[str, Any]) -> None:
    stream.write(json.dumps(told).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the driver is gone
