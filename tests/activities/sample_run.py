"""What a run leaves, in small: verdicts of every ending and the objects that lie in storage beside them."""

from __future__ import annotations

import hashlib
import json
import math
from datetime import UTC, datetime
from typing import Any

from activities.storage import Fetched, Storage, StorageError
from workflows.evidence import (
    Artifacts,
    Check,
    Claim,
    Commit,
    HostsOrder,
    Identity,
    Outcome,
    Phase,
    Placement,
    Recovery,
    Release,
    StepTaken,
    Strike,
    UnspokenOrder,
    Verdict,
    Victim,
)
from workflows.names import run_key

RUN_ID = "0199aa54-7f0e-7d3a-9a53-0c7e4f2b1c11"
WORKFLOW_ID = "nightly-regression"
KEY = run_key(WORKFLOW_ID, "default", RUN_ID)
ROOT = f"s3://lanyard/runs/{KEY}"
TRAIN = f"{KEY}-train"
BEGAN = 1_790_000_000.0
STEPS, EVERY, KILLED_AFTER = 32, 4, 8
ENDINGS: tuple[Outcome, ...] = (
    "succeeded",
    "failed",
    "rejected",
    "aborted",
    "cancelled",
    "terminated",
    "timed_out",
)


class MemoryStorage(Storage):
    """Objects by their address; some cannot be read."""

    def __init__(self, objects: dict[str, bytes], unreadable: tuple[str, ...] = ()) -> None:
        super().__init__(client=None)
        self.objects = objects
        self.unreadable = unreadable

    async def get(self, uri: str, unless: str | None = None) -> Fetched | None:
        if any(part in uri for part in self.unreadable):
            raise StorageError(f"cannot read {uri}: SlowDown")
        return Fetched(self.objects[uri], "etag") if uri in self.objects else None

    async def put(self, uri: str, body: bytes, *, only_if_absent: bool = False) -> None:
        self.objects[uri] = body

    async def names(self, prefix_uri: str, limit: int = 1000) -> list[str]:
        if any(part in prefix_uri for part in self.unreadable):
            raise StorageError(f"cannot list {prefix_uri}: SlowDown")
        return sorted(uri[len(prefix_uri) :] for uri in self.objects if uri.startswith(prefix_uri))[:limit]


def sha(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def at(seconds: float) -> str:
    """An ISO time so many seconds after the run began."""
    return datetime.fromtimestamp(BEGAN + seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def loss(step: int) -> float:
    """A loss that falls from about 9 to its floor, with some noise."""
    return 9.3 * math.exp(-step / 5.5) + 0.0102 + 0.004 * math.sin(step * 2.1) * math.exp(-step / 40)


def checkpoint(step: int, attempt: int) -> str:
    return f"checkpoint_step-{step:09d}_attempt-{attempt:03d}"


def commits(until: int = STEPS) -> tuple[Commit, ...]:
    return tuple(
        Commit(
            checkpoint=checkpoint(step, 1 if step <= KILLED_AFTER else 2),
            step=step,
            loss=loss(step),
            index=step // EVERY - 1,
        )
        for step in range(EVERY, until + 1, EVERY)
    )


def start(rank: int, attempt: int) -> dict[str, Any]:
    restored = 0 if attempt == 1 else KILLED_AFTER
    return {
        "schema": 1,
        "train_name": "main",
        "submission_id": TRAIN,
        "attempt": attempt,
        "rank": rank,
        "world_size": 2,
        "local_rank": 0,
        "device": {"type": "cpu", "name": "AMD EPYC 9V74", "fingerprint": sha("device")},
        "host": {"fingerprint": sha("host"), "hostname": "bench-01"},
        "ray": {"node_id": sha("node", rank)[:56], "address": f"127.0.0.{rank + 2}"},
        "process": {"pid": 41000 + attempt * 100 + rank, "start_time": 991122 + attempt, "boot_id": sha("boot")[:32]},
        "versions": {"torch": "2.13.0+cpu", "ray": "2.58.0", "python": "3.11.9"},
        "restored_step": restored,
        "restored_from": checkpoint(restored, 1) if restored else None,
        "model_sha256": sha("model", restored),
        "momentum_sha256": sha("momentum", restored),
        "at": at(19.0 if attempt == 1 else 33.5),
    }


def objects(until: int = STEPS, attempts: int = 2, *, exported: bool = True) -> dict[str, bytes]:
    """Everything a report reads, by address. `until` is the last committed step."""
    found: dict[str, Any] = {}
    for attempt in range(1, attempts + 1):
        for rank in range(2):
            stem = f"evidence/main/attempt-{attempt:03d}/rank-{rank}"
            first = 1 if attempt == 1 else KILLED_AFTER + 1
            found[f"{stem}.start.json"] = start(rank, attempt)
            found[f"{stem}.first-step.json"] = {
                "schema": 1,
                "attempt": attempt,
                "rank": rank,
                "step": first,
                "at": at(20.1 + rank * 0.2 if attempt == 1 else 34.4 + rank * 0.2),
            }
            if exported and attempt == attempts:
                found[f"{stem}.final.json"] = {
                    "schema": 1,
                    "attempt": attempt,
                    "rank": rank,
                    "step": STEPS,
                    "model_sha256": sha("model", STEPS),
                    "momentum_sha256": sha("momentum", STEPS),
                    "at": at(41.0),
                }
    if until:
        results = [
            {
                "checkpoint_dir_name": c.checkpoint,
                "metrics": {"step": c.step, "loss": c.loss, "steps": STEPS, "attempt": 1},
            }
            for c in commits(until)
        ]
        found["train/main/checkpoint_manager_snapshot.json"] = {
            "ray_version": "2.58.0",
            "checkpoint_results": results,
            "latest_checkpoint_result": results[-1],
            "current_report_index": len(results) - 1,
        }
    for index in range(2):
        found[f"hosts/{index}/receipt.json"] = {
            "schema": 1,
            "run_key": KEY,
            "index": index,
            "role": "worker" if index else "head",
            "address": f"127.0.0.{index + 2}",
            "host": {"fingerprint": sha("host"), "hostname": "bench-01"},
            "process": {"pid": 40000 + index, "start_time": 99, "boot_id": sha("boot")[:32]},
            "ray": {"node_id": sha("node", index)[:56], "dashboard_url": None, "version": "2.58.0"},
            "versions": {"python": "3.11.9", "torch": "2.13.0+cpu", "ray": "2.58.0", "rerun-sdk": "0.31.4"},
            "environment": sha("environment")[:16],
            "freeze_sha256": sha("freeze"),
            "at": at(12.0 + index),
        }
    found["release.json"] = release().model_dump(mode="json")
    if exported:
        found[f"exports/{TRAIN}/metrics.json"] = metrics(STEPS)
    raw = {f"{ROOT}/{name}": json.dumps(value).encode() for name, value in found.items()}
    if exported:
        files = ("metrics.json", "metrics.rrd", "result.json", "state.pt")
        sums = "".join(f"{sha(name)}  {name}\n" for name in files)
        raw[f"{ROOT}/exports/{TRAIN}/SHA256SUMS"] = sums.encode()
    return raw


def metrics(steps: int) -> dict[str, Any]:
    return {
        "schema": 1,
        "recipe": {"steps": steps},
        "steps": [
            {
                "step": step,
                "loss": loss(step),
                "gradient_norm": 0.5,
                "parameter_change": 0.01,
                "learning_rate": 0.1,
                "samples_per_second": 81234.5,
                "attempt": 1,
            }
            for step in range(1, steps + 1)
        ],
        "held_out": {"initial_loss": 9.8812, "final_loss": 0.010441},
    }


def claims() -> tuple[Claim, ...]:
    kinds = (("cluster", KEY), ("service", f"{KEY}-host-0"), ("service", f"{KEY}-host-1"), ("job", TRAIN))
    return tuple(
        Claim(
            kind=kind,  # type: ignore[arg-type]
            name=name,
            provider="local",
            context="bench-01/engineer",
            run_id="0199aa54-run",
            holder="worker 4711@bench-01",
            send_window_s=30.0,
            longest_request_s=10.0,
            may_appear_until=BEGAN + 50,
        )
        for kind, name in kinds
    )


def release() -> Release:
    steps = [
        StepTaken(claim="custody", action="tombstone", ok=True, detail="raised", seconds=0.02),
        StepTaken(
            claim=f"job/{TRAIN}",
            action="stop",
            ok=True,
            detail="SUCCEEDED; no actor and no placement group left",
            seconds=0.61,
        ),
        StepTaken(claim=f"cluster/{KEY}", action="stop", ok=True, detail="2 services ended, ports free", seconds=4.2),
        StepTaken(claim="all", action="first proof of absence", ok=True, detail="nothing left", seconds=0.1),
        StepTaken(claim="all", action="second proof of absence", ok=True, detail="nothing left", seconds=0.1),
    ]
    return Release(
        run_key=KEY,
        cleanup="clean",
        reason="the run succeeded",
        claims=claims(),
        steps=tuple(steps),
        remaining=(),
        began=BEGAN + 44,
        ended=BEGAN + 52.4,
    )


def phases(*named: tuple[str, float]) -> tuple[Phase, ...]:
    made, now = [], BEGAN
    for name, seconds in named:
        made.append(Phase(name=name, started=now, ended=now + seconds))
        now += seconds
    return tuple(made)


def succeeded() -> Verdict:
    """A run with a drill that was proved."""
    checks = (
        ("manifest", "SHA256SUMS names 4 files, all there, all equal"),
        ("journal", "32 steps, each exactly once, all scalars finite and positive"),
        ("recording", "every step and scalar of metrics.rrd equals metrics.json; rrd verify holds"),
        ("ranks", "2 ranks, world size 2, equal parameters and momentum by hash"),
        ("checkpoint", "native checkpoint loads; held-out loss recomputed 0.010441"),
    )
    return Verdict(
        outcome="succeeded",
        cleanup="clean",
        message="trained, exported and verified",
        run_key=KEY,
        storage=ROOT,
        workflow_id=WORKFLOW_ID,
        run_id=RUN_ID,
        steps=STEPS,
        phases=phases(
            ("preflight", 1.8),
            ("provision", 7.4),
            ("serve", 5.1),
            ("submit", 1.3),
            ("train", 10.2),
            ("drill", 2.1),
            ("recover", 14.4),
            ("prove", 0.3),
            ("save records", 0.9),
            ("release", 8.6),
            ("verify", 6.2),
            ("report", 0.02),
        ),
        commits=commits(),
        victim=Victim(
            rank=1,
            node_id=sha("node", 1)[:56],
            address="127.0.0.3",
            attempt=1,
            pid=41101,
            start_time=991123,
            boot_id=sha("boot")[:32],
            commit=commits()[1],
        ),
        strike=Strike(outcome="killed", at=BEGAN + 27.6, helper=f"{KEY}-strike"),
        drill=Recovery(
            proved=True,
            problems=(),
            committed_step=8,
            resumed_step=9,
            first_steps={"0": 9, "1": 9},
            attempts=2,
            seconds_to_resume=7.02,
            model_sha256=sha("model", 8),
            momentum_sha256=sha("momentum", 8),
            parity="equal",
        ),
        artifacts=Artifacts(
            ok=True,
            submission_id=TRAIN,
            checks=tuple(Check(name=name, ok=True, detail=detail) for name, detail in checks),
            figures={
                "steps": 32,
                "first_loss": loss(1),
                "final_loss": loss(32),
                "held_out_loss": {"initial_loss": 9.8812, "final_loss": 0.010441},
                "restored_steps": [0, 8],
            },
        ),
        placement=Placement(
            ranks=tuple(start(rank, attempt) for attempt in (1, 2) for rank in range(2)),
            distinct_hosts=1,
            distinct_nodes=2,
            distinct_devices=1,
        ),
        release=release(),
        resume_from=ROOT,
        not_proved=(
            "multi-node: 2 ranks ran on 1 physical host(s) (2 Ray node(s)); separate machines were not shown",
            "model quality: a synthetic regression proves execution and recovery, nothing about a policy",
        ),
        versions={"python": "3.11.9", "torch": "2.13.0+cpu", "ray": "2.58.0"},
    )


def ended(outcome: Outcome, message: str, until: int = 12) -> Verdict:
    """A run that did not succeed; `until` is its last committed step."""
    return succeeded().model_copy(
        update={
            "outcome": outcome,
            "message": message,
            "commits": commits(until) if until else (),
            "resume_from": ROOT if until else None,
            "drill": None,
            "artifacts": None,
            "placement": None,
            "victim": None,
            "strike": None,
            "not_proved": ("artifacts: not verified, because the run did not succeed",),
        }
    )


def unspoken_order(status: Any = "terminated") -> UnspokenOrder:
    identity = Identity(
        workflow_id=WORKFLOW_ID,
        run_id=RUN_ID,
        original_run_id=RUN_ID,
        run_key=KEY,
        custody_id=f"custody-{KEY}",
        deployment="demo",
        storage=ROOT,
    )
    hosts = HostsOrder(identity=identity, provider="local", count=2, device="cpu", lease_s=3600, not_after_s=90000)
    return UnspokenOrder(identity=identity, hosts=hosts, status=status, release=release())
