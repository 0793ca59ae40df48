"""The runs that these tests start, and what is read of them afterwards."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from tests.integration.stack import BUCKET, Stack, Started

STEPS = 64
INTERVAL = 4
DRILL_AFTER = 16
PREFIX = "runs/integration"
"""Below the bucket."""
WORKLOAD = "tests/integration/workload"
"""Relative to where the worker was started: the checkout."""


def regression(name: str, **more: Any) -> dict[str, Any]:
    """A run.json with the recipe that every run of these tests trains: equal recipes end in equal parameters."""
    return {
        "name": name,
        "hosts": {"provider": "local", "count": 2},
        "storage": {"uri": f"s3://{BUCKET}/{PREFIX}"},
        "workload": {"kind": "regression", "recipe": {"steps": STEPS, "checkpoint_interval": INTERVAL}},
        **more,
    }


def script(name: str, what: str, **more: Any) -> dict[str, Any]:
    """A run.json whose workload misbehaves in the way named."""
    workload = {
        "kind": "script",
        "working_dir": WORKLOAD,
        "entrypoint": ["python", "train.py", what],
        "steps": STEPS,
        "checkpoint_interval": INTERVAL,
    }
    return {**regression(name), "workload": workload, **more}


@dataclass(frozen=True)
class Left:
    """What a run left in storage, read with boto3 alone."""

    stack: Stack
    key: str

    @property
    def root(self) -> str:
        return f"{PREFIX}/{self.key}"

    @property
    def uri(self) -> str:
        return f"s3://{BUCKET}/{self.root}"

    def names(self, below: str = "") -> list[str]:
        return [each.removeprefix(f"{self.root}/") for each in self.stack.names(f"{self.root}/{below}")]

    def raw(self, name: str) -> bytes:
        return self.stack.get(f"{self.root}/{name}")

    def document(self, name: str) -> Any:
        return json.loads(self.raw(name))

    def exported(self, name: str) -> Any:
        return self.document(f"exports/{self.key}-train/{name}")

    def committed_steps(self) -> list[int]:
        """Steps in Ray Train's own record, ascending."""
        record = self.document("train/main/checkpoint_manager_snapshot.json")
        return sorted(int(each["metrics"]["step"]) for each in record["checkpoint_results"])

    def evidence(self, attempt: int, what: str) -> list[dict[str, Any]]:
        """`start`, `first-step` or `final` of both ranks."""
        return [self.document(f"evidence/main/attempt-{attempt:03d}/rank-{rank}.{what}.json") for rank in (0, 1)]

    def checksums_hold(self) -> bool:
        """Whether SHA256SUMS lists exactly the four exports, and each has that checksum."""
        folder = f"exports/{self.key}-train"
        lines = self.raw(f"{folder}/SHA256SUMS").decode().splitlines()
        listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
        four = {"state.pt", "metrics.json", "metrics.rrd", "result.json"}
        return set(listed) == four and all(
            hashlib.sha256(self.raw(f"{folder}/{name}")).hexdigest() == digest for name, digest in listed.items()
        )


def left_by(stack: Stack, run: Started) -> Left:
    return Left(stack, stack.key_of(run))
