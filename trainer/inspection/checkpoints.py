"""Ray Train's commit record and the native checkpoints it names, reloaded into real modules.

``train/<name>/checkpoint_manager_snapshot.json`` is Ray Train's own record: a checkpoint it does not list was
never committed, whatever lies in storage. ``checkpoint.pt`` is ``{"step", "model", "optimizer"}``, and
``state.pt`` of an export holds the same and more. ``journal.json`` beside checkpoint.pt is ``{"schema":1,
"step", "checkpoint_sha256", "recipe", "world_size", "steps"}``. What is reported with a commit is in Ray's record.
"""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.hashing import model_sha256, momentum_sha256
from trainer.inspection.checklist import Failed, compare, fields
from trainer.inspection.manifest import file_sha256
from trainer.inspection.storage import BARE_NAME, BLOB_LIMIT, Root, Unanswered, Unreadable, read_object
from trainer.synthetic import build_model, build_optimizer, held_out_loss

SNAPSHOT = "checkpoint_manager_snapshot.json"
NATIVE_FILE = "checkpoint.pt"
JOURNAL_FILE = "journal.json"
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt")


class Damaged(Failed):
    """A checkpoint's bytes are not usable; the message says which and why."""

    def __init__(self, which: str, why: str) -> None:
        super().__init__([f"checkpoint damaged: {which}: {why}"])


# The fields of what the regression writes, and of nothing else.
STATE_FIELDS = ("step", "model", "optimizer")
JOURNAL_FIELDS = ("schema", "step", "checkpoint_sha256", "recipe", "world_size", "steps")
OPTIMIZER_FIELDS = ("state", "param_groups")
MOMENTUM = "momentum_buffer"


@dataclass(frozen=True)
class Commit:
    """One committed checkpoint: its folder's name, and the metrics reported with it."""

    name: str
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class Reloaded:
    """A checkpoint that came back to life: hashes as in trainer/hashing.py, loss on the held-out samples."""

    step: int
    model_sha256: str
    momentum_sha256: str
    held_out_loss: float


def read_commits(root: Root, train_name: str) -> tuple[Commit, ...]:
    """The committed checkpoints, newest first.

    Raises Failed where there is no sound record of any, Unreadable.
    """
    path = record_path(train_name)
    snapshot = read_object(root, path)
    results, indices = snapshot.get("checkpoint_results"), snapshot.get("checkpoint_report_indices")
    if not isinstance(results, list) or not all(_is_result(result) for result in results):
        raise Failed([f"{path} lists no checkpoint_results: it is not Ray Train's commit record"])
    commits = [Commit(result["checkpoint_dir_name"], result.get("metrics") or {}) for result in results]
    if isinstance(indices, list) and len(indices) == len(commits) and all(type(index) is int for index in indices):
        # Ray may order the list by score; the report index is always the order of time.
        commits = [commit for _, commit in sorted(zip(indices, commits, strict=True), key=lambda pair: pair[0])]
    if not commits:
        raise Failed([f"{path} lists no checkpoint: nothing was committed"])
    return tuple(reversed(commits))


def record_path(train_name: str) -> str:
    """Where Ray Train's commit record lies below the root."""
    return f"train/{train_name}/{SNAPSHOT}"


def _is_result(result: Any) -> bool:
    name = result.get("checkpoint_dir_name") if isinstance(result, dict) else None
    return isinstance(name, str) and BARE_NAME.fullmatch(name) is not None


def load_archive(root: Root, path: str) -> dict[str, Any]:
    """The dictionary that ``torch.save`` wrote at ``path``, loaded weights-only onto the CPU.

    Raises Damaged.
    """
    file = _fetch(root, path)
    _verify_archive(path, file)
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's own, of many kinds
        raise Damaged(path, f"torch cannot load it: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(content, dict):
        raise Damaged(path, f"it holds {type(content).__name__} where a dictionary belongs")
    if extra := _unread_parts(file, content):
        raise Damaged(path, f"it holds {', '.join(extra)}, which torch does not read")
    return content


def _unread_parts(file: Path, content: dict[str, Any]) -> list[str]:
    """What the archive holds beyond what torch writes of its ``content``: loading it passes over them."""
    written = io.BytesIO()
    torch.save(content, written)
    with zipfile.ZipFile(file) as stored, zipfile.ZipFile(written) as needed:
        # Each name is below a folder, which is called as the file was when it was written.
        extra = Counter(stored.namelist())
        folder = stored.namelist()[0].partition("/")[0]
        extra -= Counter(f"{folder}/{name.partition('/')[2]}" for name in needed.namelist())
    return sorted(extra)


def _fetch(root: Root, path: str) -> Path:
    try:
        return root.fetch(path, BLOB_LIMIT)
    except Unanswered:
        raise
    except Unreadable as error:
        raise Damaged(path, _without(path, error)) from None


def _without(path: str, error: Unreadable) -> str:
    """What the error says of ``path``, without naming it again."""
    said = str(error)
    return f"it {said.removeprefix(path).strip()}" if said.startswith(path) else said


def _verify_archive(path: str, file: Path) -> None:
    size = file.stat().st_size
    try:
        with zipfile.ZipFile(file) as archive:
            # torch.load does not compare the checksums the archive carries.
            broken = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError):
        raise Damaged(path, f"it is truncated or no torch archive ({size:,} bytes, no whole archive in them)") from None
    if broken is not None:
        raise Damaged(path, f"its part {broken} differs from its checksum")


def reload(path: str, content: Mapping[str, Any], recipe: Mapping[str, Any]) -> Reloaded:
    """Load model and optimizer into real torch modules of the recipe. Raises Damaged.

    Beside them ``content`` may hold what is its file's own to check.
    """
    step = _step_of(path, content)
    model = build_model(recipe)
    optimizer = build_optimizer(recipe, model)
    try:
        model.load_state_dict(content["model"])
    except Exception as error:
        raise Damaged(path, f"its model does not fit the recipe: {' '.join(str(error).split())[:200]}") from None
    check_momentum(path, content["optimizer"], list(model.state_dict().values()))
    try:
        optimizer.load_state_dict(content["optimizer"])
    except Exception as error:
        raise Damaged(path, f"its optimizer does not fit the model: {' '.join(str(error).split())[:200]}") from None
    for name, tensor in model.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise Damaged(path, f"its parameter {name} is not finite")
    _check_optimizer(path, content["optimizer"], build_optimizer(recipe, model).state_dict())
    return Reloaded(
        step,
        # Of what was stored, not of what loading it made of it: a cast would go unnoticed.
        model_sha256(content["model"]),
        momentum_sha256(content["optimizer"]),
        held_out_loss(recipe, model),
    )


def _check_optimizer(path: str, stored: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """The stored optimizer has every setting of the one ``made`` from the recipe, and nothing beside its momentum."""
    problems = fields(f"{path}, optimizer", OPTIMIZER_FIELDS, stored)
    for index, (group, wanted) in enumerate(zip(stored["param_groups"], made["param_groups"], strict=True)):
        what = f"{path}, optimizer group {index}"
        problems += fields(what, tuple(wanted), group) + compare(what, wanted, group)
    for index, entry in stored["state"].items():
        # Whether the momentum is there was looked at already; an optimizer that has none may keep None.
        problems += fields(f"{path}, state of parameter {index}", (), {k: v for k, v in entry.items() if k != MOMENTUM})
    if problems:
        raise Failed([f"checkpoint damaged: {problem}" for problem in problems])


def _step_of(path: str, content: Mapping[str, Any]) -> int:
    missing = [key for key in ("step", "model", "optimizer") if key not in content]
    if missing:
        raise Damaged(path, f"it holds no {', no '.join(missing)}")
    step = content["step"]
    if type(step) is not int or step < 0:
        raise Damaged(path, f"its step is {step!r}")
    if not isinstance(content["model"], dict) or not isinstance(content["optimizer"], dict):
        raise Damaged(path, "its model or its optimizer is no state dictionary")
    return step


def check_momentum(path: str, optimizer: Mapping[str, Any], parameters: list[torch.Tensor]) -> None:
    """One finite momentum buffer of the right shape per parameter, where the optimizer has momentum. Raises
    Damaged.

    torch itself loads an optimizer without them and silently begins with none.
    """
    state, groups = optimizer.get("state"), optimizer.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list) or not all(_is_group(group) for group in groups):
        raise Damaged(path, "its optimizer is no state dictionary of torch.optim.SGD")
    indices = [index for group in groups for index in group["params"]]
    if sorted(map(repr, indices)) != sorted(map(repr, range(len(parameters)))):
        raise Damaged(path, f"its optimizer knows {len(indices)} parameters, the model has {len(parameters)}")
    if extra := sorted(set(map(repr, state)) - set(map(repr, indices))):
        raise Damaged(path, f"its momentum names parameter {', '.join(extra)}, which the optimizer does not know")
    for index in [index for group in groups if group["momentum"] for index in group["params"]]:
        entry = state.get(index)
        buffer = entry.get(MOMENTUM) if isinstance(entry, dict) else None
        if not isinstance(buffer, torch.Tensor):
            raise Damaged(path, f"its momentum is incomplete: parameter {index} of {len(parameters)} has no buffer")
        if buffer.shape != parameters[index].shape or buffer.dtype != parameters[index].dtype:
            found = f"{list(buffer.shape)} {buffer.dtype}"
            wanted = f"{list(parameters[index].shape)} {parameters[index].dtype}"
            raise Damaged(path, f"its momentum of parameter {index} is {found}, the parameter {wanted}")
        if not bool(torch.isfinite(buffer).all()):
            raise Damaged(path, f"its momentum of parameter {index} is not finite")


def _is_group(group: Any) -> bool:
    return (
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(type(index) is int for index in group["params"])
        and isinstance(group.get("momentum"), (int, float))
    )


def check_journal(root: Root, folder: str, step: int) -> dict[str, Any]:
    """The journal beside a checkpoint.pt of ``step``, having checked that the two belong together.

    Raises Damaged.
    """
    path = f"{folder}/{JOURNAL_FILE}"
    try:
        document = read_object(root, path)
    except Unanswered:
        raise
    except Unreadable as error:
        raise Damaged(path, _without(path, error)) from None
    if document.get("schema") != 1 or not isinstance(document.get("recipe"), dict):
        raise Damaged(path, "it is no journal of schema 1")
    if document.get("step") != step:
        raise Damaged(path, f"it is of step {document.get('step')!r}, {NATIVE_FILE} of step {step}")
    rows = document.get("steps")
    numbers = [row.get("step") for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if not isinstance(rows, list) or len(numbers) != len(rows) or numbers != list(range(1, step + 1)):
        raise Damaged(path, f"it does not hold each of the steps 1 to {step} once")
    digest = file_sha256(_fetch(root, f"{folder}/{NATIVE_FILE}"))
    if document.get("checkpoint_sha256") != digest:
        raise Damaged(path, f"it names another {NATIVE_FILE} than the one beside it (SHA-256 {digest[:16]}...)")
    return document


def check_kept(root: Root, folder: str, commit: Commit, recipe: Mapping[str, Any]) -> None:
    """A commit of the regression's is one of this recipe, and holds the model and momentum whose hashes were reported
    with it.

    Raises Failed.
    """
    path = f"{folder}/{NATIVE_FILE}"
    content = load_archive(root, path)
    problems = fields(path, STATE_FIELDS, content)
    names = {entry.name for entry in root.entries(folder)}
    problems += [f"{folder}/{name} is no file of a commit" for name in sorted(names - {NATIVE_FILE, JOURNAL_FILE})]
    if problems:
        raise Failed(problems)
    held = reload(path, content, recipe)
    check_journal(root, folder, held.step)
    told = commit.metrics.get("model_sha256"), commit.metrics.get("momentum_sha256")
    stored = held.model_sha256, held.momentum_sha256
    differing = [what for what, a, b in zip(("model", "momentum"), told, stored, strict=True) if a != b]
    if differing:
        raise Damaged(path, f"its {' and its '.join(differing)} differ from what was reported at its commit")


def check_loads(root: Root, folder: str, native: bool) -> int | None:
    """That the checkpoint in ``folder`` is whole, without knowing its recipe; its step where its bytes say
    it.

    ``native`` says that this project's regression wrote it: ``checkpoint.pt`` with model, optimizer and
    complete momentum, and its journal. Of another application's checkpoint only this can be said: that it
    holds files, none of them empty, and that those that look like torch's are whole archives. Raises Damaged.
    """
    if native:
        path = f"{folder}/{NATIVE_FILE}"
        content = load_archive(root, path)
        step = _step_of(path, content)
        tensors = list(content["model"].values())
        if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise Damaged(path, "its model holds something else than tensors, or nothing")
        check_momentum(path, content["optimizer"], tensors)
        check_journal(root, folder, step)
        return step
    files = [entry for entry in root.entries(folder) if entry.kind != "folder"]
    if not any(entry.size for entry in files):
        raise Damaged(folder, "it holds no bytes")
    for entry in files:
        path = f"{folder}/{entry.name}"
        if entry.kind != "file":
            raise Damaged(path, f"it is a {entry.kind}")
        if entry.name.endswith(TORCH_SUFFIXES):
            _verify_archive(path, _fetch(root, path))
    return None
