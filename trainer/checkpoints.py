"""Native checkpoints: ``checkpoint.pt`` (step, model, optimizer) and ``journal.json`` (every step so far).

The journal names the SHA-256 of ``checkpoint.pt``, so the two belong together and damage is told from absence. A
checkpoint that does not load is refused with a message that says which and why.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.fs as pafs
import torch

from trainer import storage

if TYPE_CHECKING:
    from ray.train import Checkpoint

STATE = "checkpoint.pt"
JOURNAL = "journal.json"
# Everything else about a recipe shapes the parameters, and a run resumed under another one would be neither.
MAY_CHANGE = ("steps", "checkpoint_interval")


class CheckpointDamaged(RuntimeError):
    """A checkpoint does not load; the message says which and why."""


class CheckpointForeign(RuntimeError):
    """A checkpoint loads, but is not of this training; the message says in what it differs."""


class Made(Protocol):
    """Which checkpoint it is, and what it was made with."""

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def recipe(self) -> Mapping[str, Any]: ...
    @property
    def world_size(self) -> int: ...


@dataclass(frozen=True)
class Restored:
    """What a checkpoint holds: state dictionaries on the CPU, and the journal of steps 1..step."""

    name: str
    step: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    steps: tuple[dict[str, Any], ...]
    recipe: dict[str, Any]
    world_size: int


def write(
    directory: Path,
    *,
    step: int,
    model: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    recipe: Mapping[str, Any],
    world_size: int,
) -> None:
    """Write both files into ``directory``."""
    buffer = io.BytesIO()
    torch.save({"step": step, "model": dict(model), "optimizer": dict(optimizer)}, buffer)
    state = buffer.getvalue()
    journal = {
        "schema": 1,
        "step": step,
        "checkpoint_sha256": hashlib.sha256(state).hexdigest(),
        "recipe": dict(recipe),
        "world_size": world_size,
        "steps": list(steps),
    }
    (directory / STATE).write_bytes(state)
    (directory / JOURNAL).write_text(json.dumps(journal), encoding="utf-8")


def load(store: pafs.FileSystem, path: str) -> Restored:
    """The checkpoint under ``path`` (a directory, Arrow's notation).

    Raises CheckpointDamaged when it is incomplete or altered; OSError where storage does not answer, which says
    nothing about the checkpoint.
    """
    name = path.rstrip("/").rsplit("/", 1)[-1]
    journal = _journal(name, _bytes(store, path, name, JOURNAL))
    raw = _bytes(store, path, name, STATE)
    digest = hashlib.sha256(raw).hexdigest()
    if digest != journal["checkpoint_sha256"]:
        raise CheckpointDamaged(
            f"checkpoint damaged: {name}/{STATE} ({len(raw)} bytes) is truncated or altered: its SHA-256 is "
            f"{digest[:12]}…, the journal names {journal['checkpoint_sha256'][:12]}…"
        )
    try:
        state = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        step, model, optimizer = state["step"], dict(state["model"]), dict(state["optimizer"])
    except Exception as error:
        raise CheckpointDamaged(f"checkpoint damaged: {name}/{STATE} does not load: {_one_line(error)}") from error
    if step != journal["step"]:
        raise CheckpointDamaged(f"checkpoint damaged: {name}: state of step {step}, journal of step {journal['step']}")
    return Restored(name, step, model, optimizer, tuple(journal["steps"]), journal["recipe"], journal["world_size"])


def save_state(directory: Path, state: Mapping[str, Any]) -> None:
    """Write ``state`` (what ``torch.load`` takes with ``weights_only``: tensors, numbers, texts, in dicts and lists) as
    a checkpoint of any application, for ``load_state``."""
    torch.save(dict(state), directory / STATE)


def load_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What ``save_state`` wrote, onto the CPU.

    Raises CheckpointDamaged when it is incomplete or altered; OSError where storage does not answer.
    """
    name = checkpoint.path.rstrip("/").rsplit("/", 1)[-1]
    raw = _bytes(checkpoint.filesystem, checkpoint.path, name, STATE)
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            # torch.load does not compare the checksums the archive carries.
            broken = archive.testzip()
        if broken is None:
            return dict(torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True))
    except Exception as error:
        raise CheckpointDamaged(f"checkpoint damaged: {name}/{STATE} does not load: {_one_line(error)}") from error
    raise CheckpointDamaged(f"checkpoint damaged: {name}/{STATE}: its part {broken} differs from its checksum")


def must_match(made: Made, recipe: Mapping[str, Any], world_size: int) -> None:
    """Raise CheckpointForeign unless the checkpoint is of the same training as ``recipe``; only the number of steps and
    the checkpoint interval may differ."""
    different = [
        f"{key} {made.recipe.get(key)!r} there, {value!r} here"
        for key, value in recipe.items()
        if key not in MAY_CHANGE and made.recipe.get(key) != value
    ]
    if made.world_size != world_size:
        different.append(f"world size {made.world_size} there, {world_size} here")
    if different:
        raise CheckpointForeign(
            f"{made.name} is of another training ({'; '.join(different)}); resume with the recipe and the number "
            "of hosts it was made with (steps and checkpoint_interval may change)"
        )
    if made.step > recipe["steps"]:
        raise CheckpointForeign(
            f"{made.name} is of step {made.step}, past the recipe's last ({recipe['steps']}); "
            "raise workload.recipe.steps"
        )


def _bytes(store: pafs.FileSystem, path: str, name: str, file: str) -> bytes:
    try:
        return storage.read(store, storage.join(path, file))
    except FileNotFoundError:
        raise CheckpointDamaged(f"checkpoint damaged: {name} has no {file}; its upload never finished") from None
    except pa.ArrowInvalid as error:
        raise CheckpointDamaged(f"checkpoint damaged: {name}/{file} cannot be read: {_one_line(error)}") from None


def _journal(name: str, raw: bytes) -> dict[str, Any]:
    try:
        journal = json.loads(raw)
        step, steps = journal["step"], journal["steps"]
        numbers = [entry["step"] for entry in steps]
        known = journal["schema"] == 1
        complete = all(isinstance(journal[key], kind) for key, kind in _JOURNAL_KEYS.items())
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"checkpoint damaged: {name}/{JOURNAL} is no journal: {_one_line(error)}") from None
    if not known or not complete:
        raise CheckpointDamaged(f"checkpoint damaged: {name}/{JOURNAL} is not of schema 1")
    if numbers != list(range(1, step + 1)):
        raise CheckpointDamaged(f"checkpoint damaged: {name}/{JOURNAL} does not hold each of the steps 1..{step} once")
    return dict(journal)


_JOURNAL_KEYS: dict[str, type] = {
    "step": int,
    "checkpoint_sha256": str,
    "recipe": dict,
    "world_size": int,
    "steps": list,
}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
