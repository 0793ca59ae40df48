"""A small run as its files in storage: really trained, killed after a commit, resumed from it, exported, recorded.

One process takes both ranks' part: it averages the gradients of both shards, as DDP does, and writes each rank's
evidence. Written from the contract, not with the application's own exporter, so that the two are compared.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rerun
import torch

from trainer.hashing import model_sha256, momentum_sha256
from trainer.synthetic import batch, build_model, build_optimizer, held_out_loss, shard

RUN_KEY = "small-0123456789"
SUBMISSION = f"{RUN_KEY}-train"
RUN = {"run_key": RUN_KEY, "submission_id": SUBMISSION, "train_name": "main"}
RECIPE: dict[str, Any] = {
    "steps": 24,
    "samples_per_rank": 256,
    "checkpoint_interval": 4,
    "learning_rate": 0.05,
    "momentum": 0.9,
    "features": 8,
    "batch_size": 64,
    "seed": 7,
}
WORLD_SIZE = 2
KILLED_AT = 8
VERSIONS = {"torch": str(torch.__version__), "ray": "2.58.0", "python": platform.python_version()}
SCALARS = ("loss", "gradient_norm", "parameter_change", "learning_rate", "samples_per_second")

ORDER: dict[str, Any] = {
    "schema": 1,
    **RUN,
    "storage": f"s3://bucket/runs/{RUN_KEY}",
    "workload": {"kind": "regression", "recipe": RECIPE},
    "world_size": WORLD_SIZE,
    "device": "cpu",
    "pins": {"torch": VERSIONS["torch"], "ray": "2.58.0", "rerun-sdk": "0.31.4", "pillow": "12.3.0"},
    "drill": {"after_step": KILLED_AT, "hold_s": 180},
    "resume": None,
    "failures": {"worker": 2, "controller": 1, "preemption": 1},
}


def commit_name(step: int, attempt: int) -> str:
    """The folder of a checkpoint, as the application names it."""
    return f"checkpoint_step-{step:09d}_attempt-{attempt:03d}"


FINAL_COMMIT = commit_name(RECIPE["steps"], 2)


@dataclass(frozen=True)
class SmallRun:
    """The files of one run below ``root``."""

    root: Path

    @property
    def export(self) -> Path:
        """The folder of the export."""
        return self.root / "exports" / SUBMISSION

    @property
    def checkpoint(self) -> Path:
        """The folder of the final checkpoint."""
        return self.root / "train" / "main" / FINAL_COMMIT

    def evidence(self, attempt: int, rank: int, kind: str = "start") -> Path:
        """One file of evidence."""
        return self.root / "evidence" / "main" / f"attempt-{attempt:03d}" / f"rank-{rank}.{kind}.json"

    def edit(self, path: Path | str, change: Callable[[Any], object]) -> None:
        """Change a JSON document in place; a bare name is a file of the export."""
        place = self.export / path if isinstance(path, str) else path
        document = json.loads(place.read_text())
        change(document)
        place.write_text(json.dumps(document))

    def seal(self) -> None:
        """Write the manifest anew over what the export holds."""
        names = sorted(path.name for path in self.export.iterdir() if path.name != "SHA256SUMS")
        lines = [f"{hashlib.sha256((self.export / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
        (self.export / "SHA256SUMS").write_text("".join(lines))

    def resave(self, path: Path, change: Callable[[Any], object]) -> None:
        """Change what ``torch.save`` wrote, in place; beside a journal, the journal's checksum follows."""
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)
        journal = path.with_name("journal.json")
        if journal.exists():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            self.edit(journal, lambda document: document.update(checkpoint_sha256=digest))


def record(path: Path, steps: list[dict[str, Any]], recording_id: str = SUBMISSION) -> None:
    """Write metrics.rrd from a journal."""
    stream = rerun.RecordingStream("lanyard", recording_id=recording_id)
    stream.save(path)
    for row in steps:
        stream.set_time("step", sequence=row["step"])
        for name in SCALARS:
            stream.log(f"/train/{name}", rerun.Scalars(row[name]))
    stream.flush()
    stream.disconnect()


class _Training:
    """Both ranks of the run, attempt after attempt, writing as it goes."""

    def __init__(self, run: SmallRun) -> None:
        self.run = run
        self.commits: list[tuple[str, int]] = []
        self.reported: list[dict[str, Any]] = []
        self.attempts: list[dict[str, Any]] = []
        self.shards = [shard(RECIPE, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]

    def attempt(self, number: int, last_step: int) -> tuple[torch.nn.Module, torch.optim.SGD, list[dict[str, Any]]]:
        model = build_model(RECIPE)
        optimizer = build_optimizer(RECIPE, model)
        rows: list[dict[str, Any]] = []
        restored_from = None
        if self.commits:
            restored_from = self.commits[-1][0]
            folder = self.run.root / "train" / "main" / restored_from
            content = torch.load(folder / "checkpoint.pt", weights_only=True)
            model.load_state_dict(content["model"])
            optimizer.load_state_dict(content["optimizer"])
            rows = json.loads((folder / "journal.json").read_text())["steps"]
        restored = len(rows)
        self._start_evidence(number, restored, restored_from, model, optimizer)
        for step in range(restored + 1, last_step + 1):
            rows.append(self._step(step, number, model, optimizer))
            if step == restored + 1:
                for rank in range(WORLD_SIZE):
                    self._write(number, rank, "first-step", {"step": step})
            if step % RECIPE["checkpoint_interval"] == 0:
                self._commit(step, number, model, optimizer, rows)
        return model, optimizer, rows

    def _step(self, step: int, attempt: int, model: torch.nn.Module, optimizer: torch.optim.SGD) -> dict[str, Any]:
        began = time.perf_counter()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        losses = [
            torch.nn.functional.mse_loss(model(inputs), targets)
            for inputs, targets in (batch(RECIPE, samples, rank, step) for rank, samples in enumerate(self.shards))
        ]
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        changes = [after.detach() - old for after, old in zip(model.parameters(), before, strict=True)]
        return {
            "step": step,
            "loss": float(loss.item()),
            "gradient_norm": _norm(gradients),
            "parameter_change": _norm(changes),
            "learning_rate": RECIPE["learning_rate"],
            "samples_per_second": RECIPE["batch_size"] * WORLD_SIZE / (time.perf_counter() - began),
            "attempt": attempt,
        }

    def _commit(
        self,
        step: int,
        attempt: int,
        model: torch.nn.Module,
        optimizer: torch.optim.SGD,
        rows: list[dict[str, Any]],
    ) -> None:
        name = commit_name(step, attempt)
        folder = self.run.root / "train" / "main" / name
        folder.mkdir(parents=True)
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "checkpoint.pt")
        journal = {
            "schema": 1,
            "step": step,
            "checkpoint_sha256": hashlib.sha256((folder / "checkpoint.pt").read_bytes()).hexdigest(),
            "recipe": RECIPE,
            "world_size": WORLD_SIZE,
            "steps": rows,
        }
        (folder / "journal.json").write_text(json.dumps(journal))
        self.commits.append((name, step))
        hashes = {
            "model_sha256": model_sha256(model.state_dict()),
            "momentum_sha256": momentum_sha256(optimizer.state_dict()),
        }
        told = {name: rows[-1][name] for name in ("step", "loss", "samples_per_second")}
        told |= {**hashes, "attempt": attempt, "steps": RECIPE["steps"]}
        self.reported.append({"version": 0, "checkpoint_dir_name": name, "metrics": told})
        results = self.reported
        snapshot = {
            "ray_version": "2.58.0",
            "checkpoint_results": results,
            "checkpoint_report_indices": list(range(len(results))),
            "latest_checkpoint_result": results[-1],
            "pending_training_results": [],
            "pending_validation_specs": [],
            "current_report_index": len(results),
            "validated_checkpoint_dir_names": [],
            "timed_out_validation_checkpoint_dir_names": [],
            "failed_validation_checkpoint_dir_names": [],
        }
        (folder.parent / "checkpoint_manager_snapshot.json").write_text(json.dumps(snapshot))

    def _start_evidence(
        self,
        attempt: int,
        restored: int,
        restored_from: str | None,
        model: torch.nn.Module,
        optimizer: torch.optim.SGD,
    ) -> None:
        ranks = []
        for rank in range(WORLD_SIZE):
            mark = hashlib.sha256(b"the only host").hexdigest()
            facts = {
                "train_name": "main",
                "submission_id": SUBMISSION,
                "world_size": WORLD_SIZE,
                "local_rank": 0,
                "device": {"type": "cpu", "name": "CPU", "fingerprint": mark},
                "host": {"fingerprint": mark, "hostname": "one"},
                "ray": {"node_id": f"node{rank}", "address": f"127.0.0.{rank + 2}"},
                "process": {"pid": 100 * attempt + rank, "start_time": 5000 + attempt, "boot_id": "b"},
                "versions": VERSIONS,
                "restored_step": restored,
                "restored_from": restored_from,
                "model_sha256": model_sha256(model.state_dict()),
                "momentum_sha256": momentum_sha256(optimizer.state_dict()),
            }
            ranks.append(self._write(attempt, rank, "start", facts))
        self.attempts.append({"attempt": attempt, "restored_step": restored, "ranks": ranks})

    def _write(self, attempt: int, rank: int, kind: str, facts: dict[str, Any]) -> dict[str, Any]:
        at = "2026-11-30T12:00:00Z"
        document = {"schema": 1, "attempt": attempt, "rank": rank, **facts, "at": at}
        path = self.run.evidence(attempt, rank, kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))
        return document

    def finish(
        self, attempt: int, model: torch.nn.Module, optimizer: torch.optim.SGD, rows: list[dict[str, Any]]
    ) -> None:
        """Final evidence and the export."""
        hashes = {
            "model_sha256": model_sha256(model.state_dict()),
            "momentum_sha256": momentum_sha256(optimizer.state_dict()),
        }
        for rank in range(WORLD_SIZE):
            self._write(attempt, rank, "final", {"step": len(rows), **hashes})
        export = self.run.export
        export.mkdir(parents=True)
        held_out = {
            "initial_loss": held_out_loss(RECIPE, build_model(RECIPE)),
            "final_loss": held_out_loss(RECIPE, model),
        }
        state = {"schema": 1, "step": len(rows), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "run": RUN}, export / "state.pt")
        metrics = {
            "schema": 1,
            "run": RUN,
            "workload": "regression",
            "recipe": RECIPE,
            "world_size": WORLD_SIZE,
            "device": "cpu",
            "steps": rows,
            "attempts": self.attempts,
            "held_out": held_out,
        }
        (export / "metrics.json").write_text(json.dumps(metrics))
        record(export / "metrics.rrd", rows)
        result = {
            "schema": 1,
            "status": "succeeded",
            "run": RUN,
            "final_step": len(rows),
            "final_loss": rows[-1]["loss"],
            "held_out_loss": held_out["final_loss"],
            "parameters_sha256": hashes["model_sha256"],
            "momentum_sha256": hashes["momentum_sha256"],
            "checkpoint": f"train/main/{self.commits[-1][0]}",
            "ranks_final": [{"rank": rank, **hashes} for rank in range(WORLD_SIZE)],
            "versions": {**VERSIONS, "rerun-sdk": "0.31.4", "pillow": "12.3.0"},
        }
        (export / "result.json").write_text(json.dumps(result))
        self.run.seal()


def train(root: Path) -> SmallRun:
    """Train the run below ``root``: attempt 1 killed after the commit of step 8, attempt 2 from there to the end."""
    training = _Training(SmallRun(root))
    # The kill: attempt 1 takes two more steps after its last commit, and they are lost with its process.
    training.attempt(1, KILLED_AT + 2)
    training.finish(2, *training.attempt(2, RECIPE["steps"]))
    (root / "owner.json").write_text(json.dumps({"schema": 1, "run_key": RUN_KEY}))
    return training.run


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.sqrt(sum((tensor.double().square().sum() for tensor in tensors), torch.tensor(0.0))).item())
