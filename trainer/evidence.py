"""Evidence: facts recorded by each rank where they happened, under ``evidence/<train name>/attempt-<NNN>/``.

An attempt is one start of the worker group. Objects are written once and never change.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import socket
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pyarrow.fs as pafs
import ray
import torch

from trainer import machine, storage
from trainer.job import Order

_ATTEMPT = re.compile(r"attempt-(\d{3,})")
_START = re.compile(r"rank-(\d+)\.start\.json")


def now() -> str:
    """The time as ISO 8601 in UTC, to the microsecond."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def folder(root: str, train_name: str) -> str:
    """Where the evidence of a training lies; ``root`` is ``bucket/prefix/<run key>``."""
    return storage.join(root, "evidence", train_name)


def next_attempt(store: pafs.FileSystem, root: str, train_name: str) -> int:
    """One more than the highest attempt that left evidence; 1 for the first. Raises OSError."""
    return max(attempts(store, root, train_name), default=0) + 1


def attempts(store: pafs.FileSystem, root: str, train_name: str) -> list[int]:
    """The attempts that left evidence, ascending. Raises OSError."""
    found = (_ATTEMPT.fullmatch(name) for name in storage.names(store, folder(root, train_name)))
    return sorted(int(match[1]) for match in found if match)


def attempt_folder(root: str, train_name: str, attempt: int) -> str:
    """Where one attempt's evidence lies."""
    return storage.join(folder(root, train_name), f"attempt-{attempt:03d}")


def starts(store: pafs.FileSystem, root: str, train_name: str, attempt: int) -> list[dict[str, Any]]:
    """The start evidence of an attempt's ranks, by rank. Raises OSError, and ValueError for what is no JSON."""
    place = attempt_folder(root, train_name, attempt)
    ranks = sorted(int(match[1]) for name in storage.names(store, place) if (match := _START.fullmatch(name)))
    return [json.loads(storage.read(store, storage.join(place, f"rank-{rank}.start.json"))) for rank in ranks]


def final(store: pafs.FileSystem, root: str, train_name: str, attempt: int, rank: int) -> dict[str, Any] | None:
    """One rank's final evidence of an attempt, None where it left none. Raises OSError and ValueError."""
    place = attempt_folder(root, train_name, attempt)
    raw = storage.read_optional(store, storage.join(place, f"rank-{rank}.final.json"))
    return None if raw is None else dict(json.loads(raw))


def host() -> dict[str, str]:
    """Which machine this is."""
    return {"fingerprint": machine.host_fingerprint(), "hostname": socket.gethostname()}


def device_facts(device: torch.device) -> dict[str, str]:
    """Type, name and fingerprint of a rank's device.

    A GPU is known by its UUID, a CPU by its machine: ranks on one machine share it, whatever Ray nodes they run on.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        mark = f"cuda\n{properties.uuid}\n"
        name = str(properties.name)
    else:
        mark = f"cpu\n{machine.host_fingerprint()}\n"
        name = machine.cpu_name()
    return {"type": device.type, "name": name, "fingerprint": hashlib.sha256(mark.encode()).hexdigest()}


def versions() -> dict[str, str]:
    """What this process really runs."""
    return {"torch": str(torch.__version__), "ray": str(ray.__version__), "python": platform.python_version()}


class Recorder:
    """One rank's evidence of one attempt, written by a thread of its own so that no step waits for storage.

    What could not be written is an error at the next ``settle()``: a commit without evidence of who made it is not
    reported.
    """

    def __init__(self, store: pafs.FileSystem, root: str, order: Order, attempt: int, rank: int) -> None:
        self._store = store
        self._folder = attempt_folder(root, order.train_name, attempt)
        self._order = order
        self._attempt = attempt
        self._rank = rank
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="evidence")
        self._writing: list[Future[bool]] = []

    def start(self, context: Mapping[str, Any]) -> None:
        """Record who starts where and from what; ``context`` holds the facts only the training knows."""
        document = {
            "schema": 1,
            "train_name": self._order.train_name,
            "submission_id": self._order.submission_id,
            "attempt": self._attempt,
            "rank": self._rank,
            **context,
            "host": host(),
            "process": asdict(machine.this_process()),
            "versions": versions(),
            "at": now(),
        }
        self._write("start", document)

    def first_step(self, step: int) -> None:
        """Record the first optimizer step of this attempt, just taken."""
        self._write("first-step", {"schema": 1, **self._who, "step": step, "at": now()})

    def final(self, step: int, model_sha256: str, momentum_sha256: str) -> None:
        """Record where this rank ended."""
        hashes = {"model_sha256": model_sha256, "momentum_sha256": momentum_sha256}
        self._write("final", {"schema": 1, **self._who, "step": step, **hashes, "at": now()})

    def settle(self) -> None:
        """Wait until everything recorded so far is stored. Raises what writing it raised."""
        writing, self._writing = self._writing, []
        for written in writing:
            written.result()

    def close(self) -> None:
        """Settle, and end the thread."""
        try:
            self.settle()
        finally:
            self._writer.shutdown(wait=False)

    @property
    def _who(self) -> dict[str, int]:
        return {"attempt": self._attempt, "rank": self._rank}

    def _write(self, kind: str, document: Mapping[str, Any]) -> None:
        path = storage.join(self._folder, f"rank-{self._rank}.{kind}.json")
        data = json.dumps(document, indent=1).encode() + b"\n"
        self._writing.append(self._writer.submit(storage.put_once, self._store, path, data))
