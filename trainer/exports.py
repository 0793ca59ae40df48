"""Exports: what a run leaves for people, under ``exports/<submission id>/``, complete and checked or not there.

``state.pt``, ``metrics.json``, ``metrics.rrd``, ``result.json``, and ``SHA256SUMS`` last. Each object is read back and
compared. Bytes that differ are never overwritten; an interrupted upload is finished with the same bytes.
"""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.fs as pafs
import rerun
import torch

from trainer import checkpoints, evidence, publishing, storage, synthetic
from trainer.checkpoints import Restored
from trainer.hashing import model_sha256, momentum_sha256
from trainer.job import Job
from trainer.publishing import ExportError

if TYPE_CHECKING:
    from ray.train import Result

APPLICATION_ID = "lanyard"
SERIES = ("loss", "gradient_norm", "parameter_change", "learning_rate", "samples_per_second")


def export(job: Job, result: Result) -> str:
    """Build and store the exports of a finished training; returns their ``s3://`` place.

    Raises ExportError when the evidence contradicts itself, DifferingBytes when another export is in the place, and
    OSError when storage stays away.
    """
    if result.checkpoint is None:
        raise ExportError("training ended without a commit; look at the workers' logs")
    store = storage.filesystem()
    restored = checkpoints.load(store, result.checkpoint.path)
    if restored.step != job.steps:
        raise ExportError(f"training ended at step {restored.step} of {job.steps}")
    attempts = _attempts(job, store)
    committed = {"model_sha256": model_sha256(restored.model), "momentum_sha256": momentum_sha256(restored.optimizer)}
    ranks_final = publishing.final_ranks(job, store, attempts[-1]["attempt"], committed, restored.name)
    return publishing.publish(job, store, build(job, restored, attempts, ranks_final))


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
    outcome = publishing.result_document(
        job,
        restored.name,
        restored.steps[-1]["loss"],
        ranks_final,
        held_out_loss=final,
        parameters_sha256=model_sha256(restored.model),
        momentum_sha256=momentum_sha256(restored.optimizer),
    )
    files = {
        "state.pt": _state(job, restored),
        "metrics.json": publishing.json_bytes(metrics),
        "metrics.rrd": recording(job.submission_id, restored.steps),
        publishing.RESULT: publishing.json_bytes(outcome),
    }
    return publishing.with_manifest(files)


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


def _attempts(job: Job, store: pafs.FileSystem) -> list[dict[str, Any]]:
    found = []
    for attempt in evidence.attempts(store, job.root, job.train_name):
        ranks = evidence.starts(store, job.root, job.train_name, attempt)
        if ranks:
            found.append({"attempt": attempt, "restored_step": ranks[0]["restored_step"], "ranks": ranks})
    if not found:
        raise ExportError("no rank left evidence of having started")
    return found


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
