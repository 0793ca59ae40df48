"""Exports: what a run leaves for people, under ``exports/<submission id>/``, complete and checked or not there.

``state.pt``, ``metrics.json``, ``metrics.rrd``, ``result.json``, and ``SHA256SUMS`` last. Each object is read back and
compared. Bytes that differ are never overwritten; an interrupted upload is finished with the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.fs as pafs
import rerun
import torch

from trainer import checkpoints, evidence, pins, storage, synthetic
from trainer.checkpoints import Restored
from trainer.hashing import model_sha256, momentum_sha256
from trainer.job import Job, storage_path

if TYPE_CHECKING:
    from ray.train import Result

MANIFEST = "SHA256SUMS"
APPLICATION_ID = "lanyard"
SERIES = ("loss", "gradient_norm", "parameter_change", "learning_rate", "samples_per_second")
UPLOAD_TRIES = 5


class ExportError(RuntimeError):
    """The training cannot be exported as proved; the message says what does not hold."""


def export(job: Job, result: Result) -> str:
    """Build and store the exports of a finished training; returns their ``s3://`` place.

    Raises ExportError when the evidence contradicts itself, DifferingBytes when another export is in the place, and
    OSError when storage stays away.
    """
    if result.checkpoint is None:
        raise ExportError("training ended without a commit; look at the workers' logs")
    store = storage.filesystem()
    root = storage_path("storage", job.storage)[1]
    restored = checkpoints.load(store, result.checkpoint.path)
    if restored.step != job.recipe.steps:
        raise ExportError(f"training ended at step {restored.step} of {job.recipe.steps}")
    attempts = _attempts(job, store, root)
    ranks_final = _final_ranks(job, store, root, attempts, restored)
    files = build(job, restored, attempts, ranks_final)
    upload(store, storage.join(root, "exports", job.submission_id), files)
    return f"{job.storage}/exports/{job.submission_id}"


def build(
    job: Job, restored: Restored, attempts: Sequence[Mapping[str, Any]], ranks_final: Sequence[Mapping[str, Any]]
) -> dict[str, bytes]:
    """The bytes of the four files and of the manifest, by name, in upload order."""
    recipe = job.recipe.mapping()
    model = synthetic.build_model(recipe)
    initial = synthetic.held_out_loss(recipe, model)
    model.load_state_dict(restored.model)
    final = synthetic.held_out_loss(recipe, model)
    if not (math.isfinite(initial) and math.isfinite(final)):
        raise ExportError("the held-out loss is not finite; lower the learning rate")
    metrics = {
        "schema": 1,
        "run": job.run,
        "workload": "regression",
        "recipe": recipe,
        "world_size": job.world_size,
        "device": job.device,
        "steps": list(restored.steps),
        "attempts": list(attempts),
        "held_out": {"initial_loss": initial, "final_loss": final},
    }
    outcome = {
        "schema": 1,
        "status": "succeeded",
        "run": job.run,
        "final_step": restored.step,
        "final_loss": restored.steps[-1]["loss"],
        "held_out_loss": final,
        "parameters_sha256": model_sha256(restored.model),
        "momentum_sha256": momentum_sha256(restored.optimizer),
        "checkpoint": f"train/{job.train_name}/{restored.name}",
        "ranks_final": list(ranks_final),
        "versions": {**pins.installed(list(job.pins)), "python": evidence.versions()["python"]},
    }
    files = {
        "state.pt": _state(job, restored),
        "metrics.json": _json(metrics),
        "metrics.rrd": recording(job.submission_id, restored.steps),
        "result.json": _json(outcome),
    }
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())]
    return {**files, MANIFEST: "".join(lines).encode()}


def upload(store: pafs.FileSystem, folder: str, files: Mapping[str, bytes]) -> None:
    """Store ``files`` in their order (the manifest last), each read back; what is there already must be the same.

    Tried again with the same bytes while storage does not answer. Raises DifferingBytes at once, OSError at last.
    """
    for name, data in files.items():
        for attempt in range(1, UPLOAD_TRIES + 1):
            try:
                storage.put_once(store, storage.join(folder, name), data)
                break
            except OSError as error:
                if attempt == UPLOAD_TRIES:
                    raise
                print(f"storing {name} failed ({' '.join(str(error).split())[:200]}); trying again", flush=True)
                time.sleep(2.0**attempt)


def recording(recording_id: str, steps: Sequence[Mapping[str, Any]]) -> bytes:
    """A Rerun recording of the journal: one series per scalar, float64, on the timeline ``step``."""
    with tempfile.TemporaryDirectory(prefix="lanyard-recording-") as directory:
        path = Path(directory) / "metrics.rrd"
        stream = rerun.RecordingStream(APPLICATION_ID, recording_id=recording_id)
        stream.save(path)
        timeline = rerun.TimeColumn("step", sequence=[entry["step"] for entry in steps])
        for name in SERIES:
            values = [float(entry[name]) for entry in steps]
            rerun.send_columns(
                f"/train/{name}", [timeline], rerun.Scalars.columns(scalars=values), recording=stream, strict=True
            )
        stream.flush()
        stream.disconnect()
        return path.read_bytes()


def _attempts(job: Job, store: pafs.FileSystem, root: str) -> list[dict[str, Any]]:
    found = []
    for attempt in evidence.attempts(store, root, job.train_name):
        ranks = evidence.starts(store, root, job.train_name, attempt)
        if ranks:
            found.append({"attempt": attempt, "restored_step": ranks[0]["restored_step"], "ranks": ranks})
    if not found:
        raise ExportError("no rank left evidence of having started")
    return found


def _final_ranks(
    job: Job, store: pafs.FileSystem, root: str, attempts: Sequence[Mapping[str, Any]], restored: Restored
) -> list[dict[str, Any]]:
    """Where each rank of the last attempt ended. Raises ExportError unless all ended with the committed state."""
    attempt = attempts[-1]["attempt"]
    wanted = {"model_sha256": model_sha256(restored.model), "momentum_sha256": momentum_sha256(restored.optimizer)}
    ranks = []
    for rank in range(job.world_size):
        document = evidence.final(store, root, job.train_name, attempt, rank)
        if document is None:
            raise ExportError(f"rank {rank} of attempt {attempt} left no final evidence")
        different = [key for key, value in wanted.items() if document.get(key) != value]
        if document.get("step") != restored.step or different:
            raise ExportError(
                f"rank {rank} of attempt {attempt} ended at step {document.get('step')} with "
                f"{' and '.join(different) or 'the state'} unlike the commit {restored.name}; the ranks trained apart"
            )
        ranks.append({"rank": rank, **wanted})
    return ranks


def _state(job: Job, restored: Restored) -> bytes:
    buffer = io.BytesIO()
    state = {
        "schema": 1,
        "step": restored.step,
        "model": restored.model,
        "optimizer": restored.optimizer,
        "run": job.run,
    }
    torch.save(state, buffer)
    return buffer.getvalue()


def _json(document: Mapping[str, Any]) -> bytes:
    # A number that is not finite is no JSON and no result.
    return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"
