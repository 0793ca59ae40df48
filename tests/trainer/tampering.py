"""What may have been done to a run's artifacts, each as a function of the run; and how the inspector is asked."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch

from tests.trainer.small_run import (
    KILLED_AT,
    RECIPE,
    SUBMISSION,
    SmallRun,
    commit_name,
    record,
)
from trainer import inspect_results
from trainer.hashing import model_sha256, momentum_sha256

Tamper = Callable[[SmallRun], object]

OTHER = "0" * 64
"""A hash of nothing that was trained."""
STEPS = RECIPE["steps"]


def inspected(
    run: SmallRun, tmp_path: Path, *options: str, order: dict[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """The exit status and the JSON outcome of the command."""
    out = tmp_path / "outcome.json"
    arguments = [str(run.root), "--json", str(out), *options]
    if order is not None:
        (tmp_path / "order.json").write_text(json.dumps(order))
        arguments += ["--expect", str(tmp_path / "order.json")]
    status = inspect_results.main(arguments)
    return status, json.loads(out.read_text())


def failures(outcome: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["detail"] for check in outcome["checks"] if not check["ok"]}


def metrics(change: Callable[[dict[str, Any]], object], *, recorded: bool = False) -> Tamper:
    """Change metrics.json, seal the manifest over it again and, if ``recorded``, the recording as well."""

    def tamper(run: SmallRun) -> None:
        run.edit("metrics.json", change)
        if recorded:
            record(run.export / "metrics.rrd", json.loads((run.export / "metrics.json").read_text())["steps"])
        run.seal()

    return tamper


def result(change: Callable[[dict[str, Any]], object]) -> Tamper:
    def tamper(run: SmallRun) -> None:
        run.edit("result.json", change)
        run.seal()

    return tamper


def _change_rank(attempt: int, rank: int, change: Callable[[dict[str, Any]], object], document: dict[str, Any]) -> None:
    change(document["attempts"][attempt - 1]["ranks"][rank])


def evidence(
    attempt: int, ranks: tuple[int, ...], change: Callable[[dict[str, Any]], object], kind: str = "start"
) -> Tamper:
    """Change ranks' evidence and, with it, what metrics.json repeats of it."""

    def tamper(run: SmallRun) -> None:
        for rank in ranks:
            run.edit(run.evidence(attempt, rank, kind), change)
            if kind == "start":
                run.edit("metrics.json", partial(_change_rank, attempt, rank, change))
        run.seal()

    return tamper


def row(step: int, /, **values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["steps"][step - 1].update(values)


def manifest(change: Callable[[str], str]) -> Tamper:
    def tamper(run: SmallRun) -> None:
        place = run.export / "SHA256SUMS"
        place.write_text(change(place.read_text()))

    return tamper


def replaced(name: str) -> Callable[[str], str]:
    """The manifest's first line with another name."""
    return lambda text: text[:66] + name + "\n" + text.split("\n", 1)[1]


def links_state(run: SmallRun) -> None:
    (run.export / "state.pt").rename(run.root / "elsewhere.pt")
    (run.export / "state.pt").symlink_to(run.root / "elsewhere.pt")


def links_checkpoint(run: SmallRun) -> None:
    run.checkpoint.rename(run.root / "moved")
    run.checkpoint.symlink_to(run.root / "moved")


def flips(name: str) -> Tamper:
    def tamper(run: SmallRun) -> None:
        data = bytearray((run.export / name).read_bytes())
        data[len(data) // 2] ^= 1
        (run.export / name).write_bytes(bytes(data))

    return tamper


def records(change: Callable[[list[dict[str, Any]]], object], recording_id: str = SUBMISSION) -> Tamper:
    """Record a changed journal, metrics.json staying as it is."""

    def tamper(run: SmallRun) -> None:
        steps = json.loads((run.export / "metrics.json").read_text())["steps"]
        change(steps)
        record(run.export / "metrics.rrd", steps, recording_id)
        run.seal()

    return tamper


def truncates(*places: Callable[[SmallRun], Path]) -> Tamper:
    def tamper(run: SmallRun) -> None:
        for place in places:
            data = place(run).read_bytes()
            place(run).write_bytes(data[: len(data) * 2 // 3])
        run.seal()

    return tamper


def resaves(place: Callable[[SmallRun], Path], change: Callable[[dict[str, Any]], object]) -> Tamper:
    def tamper(run: SmallRun) -> None:
        run.resave(place(run), change)
        run.seal()

    return tamper


def state(run: SmallRun) -> Path:
    return run.export / "state.pt"


def native(run: SmallRun) -> Path:
    return run.checkpoint / "checkpoint.pt"


def restored_commit(run: SmallRun) -> Path:
    return run.root / "train" / "main" / commit_name(KILLED_AT, 1) / "checkpoint.pt"


def snapshot(change: Callable[[dict[str, Any]], object]) -> Tamper:
    return lambda run: run.edit(run.root / "train" / "main" / "checkpoint_manager_snapshot.json", change)


def flips_inside_checkpoint(run: SmallRun) -> None:
    data = bytearray(native(run).read_bytes())
    at = data.index(torch.load(native(run), weights_only=True)["model"]["weight"].numpy().tobytes())
    data[at + 2] ^= 1
    native(run).write_bytes(bytes(data))


def kept_commit(run: SmallRun) -> Path:
    """One that is neither restored nor the last."""
    return run.root / "train" / "main" / commit_name(16, 2) / "checkpoint.pt"


def changes_kept_commit(run: SmallRun) -> None:
    run.resave(kept_commit(run), lambda content: content["model"]["weight"].add_(1e-3))


def reshapes_kept_commit(run: SmallRun) -> None:
    """Another model, and the record made to fit."""
    held: dict[str, Any] = {}

    def change(content: dict[str, Any]) -> None:
        content["model"] = {"weight": torch.zeros(3), "bias": torch.zeros(1)}
        for entry, tensor in zip(content["optimizer"]["state"].values(), content["model"].values(), strict=True):
            entry["momentum_buffer"] = torch.zeros_like(tensor)
        held.update(content)

    run.resave(kept_commit(run), change)
    hashes = {"model_sha256": model_sha256(held["model"]), "momentum_sha256": momentum_sha256(held["optimizer"])}
    reported(**hashes)(run)


def packs(place: Callable[[SmallRun], Path], name: str) -> Tamper:
    """Put a part more into an archive, which torch would pass over; its journal's checksum follows."""

    def tamper(run: SmallRun) -> None:
        with zipfile.ZipFile(place(run), "a") as archive:
            archive.writestr(f"{archive.namelist()[0].partition('/')[0]}/{name}", b"payload")
        if place(run).name == "checkpoint.pt":
            digest = hashlib.sha256(place(run).read_bytes()).hexdigest()
            run.edit(place(run).with_name("journal.json"), methodcaller("update", {"checkpoint_sha256": digest}))
        run.seal()

    return tamper


def truncates_kept_commit(run: SmallRun) -> None:
    place = kept_commit(run)
    place.write_bytes(place.read_bytes()[:-40])


def forgets_momentum(content: dict[str, Any]) -> None:
    del content["optimizer"]["state"][1]


def doubles_rank(run: SmallRun) -> None:
    run.edit(
        "metrics.json", lambda document: document["attempts"][1]["ranks"].append(document["attempts"][1]["ranks"][0])
    )
    run.seal()


def placed(*ranks: tuple[str, str, str]) -> Tamper:
    """Each rank's device type, device and host, in every attempt."""

    def tamper(run: SmallRun) -> None:
        for rank, (kind, device, host) in enumerate(ranks):
            told = {"device": {"type": kind, "name": "", "fingerprint": device}, "host": {"fingerprint": host}}
            for attempt in (1, 2):
                evidence(attempt, (rank,), methodcaller("update", told))(run)

    return tamper


def loses_rank(run: SmallRun) -> None:
    run.evidence(2, 1).unlink()
    run.edit("metrics.json", lambda document: document["attempts"][1]["ranks"].pop())
    run.seal()


def same_process(run: SmallRun) -> None:
    first = json.loads(run.evidence(2, 0).read_text())
    copied = {key: first[key] for key in ("process", "ray", "host")}
    evidence(2, (1,), lambda document: document.update(copied))(run)


def unlearns(document: dict[str, Any]) -> None:
    for entry in document["steps"]:
        entry["loss"] = 1.0 + entry["step"] / 100


def drops_step(number: int) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["steps"].pop(number - 1)


def repeats_step(number: int) -> Callable[[dict[str, Any]], object]:
    return lambda document: document["steps"].insert(number, copy.deepcopy(document["steps"][number - 1]))


def adds_step(document: dict[str, Any]) -> None:
    document["steps"].append({**document["steps"][-1], "step": RECIPE["steps"] + 1})


def swaps_steps(document: dict[str, Any]) -> None:
    document["steps"][4], document["steps"][5] = document["steps"][5], document["steps"][4]


def blanks_commit_of_attempt_one(document: dict[str, Any]) -> None:
    for key in ("checkpoint_results", "checkpoint_report_indices"):
        del document[key][1]


def journal_of_kept(change: Callable[[dict[str, Any]], object]) -> Tamper:
    return lambda run: run.edit(kept_commit(run).with_name("journal.json"), change)


def deletes_kept_commit(run: SmallRun) -> None:
    shutil.rmtree(kept_commit(run).parent)


def record_with(**values: Any) -> Tamper:
    return snapshot(methodcaller("update", values))


def put_beside(place: Callable[[SmallRun], Path]) -> Tamper:
    return lambda run: place(run).with_name("note.bin").write_bytes(b"x")


def reported(**values: Any) -> Tamper:
    """Change what was reported with the commit of step 16."""
    return snapshot(lambda document: document["checkpoint_results"][3]["metrics"].update(values))


def drops_commit(number: int, deleted: bool, renumbered: bool = False) -> Tamper:
    """Take a commit out of the record and, if ``deleted``, out of storage; Ray's count may be made to fit."""

    def tamper(run: SmallRun) -> None:
        place = run.root / "train" / "main" / "checkpoint_manager_snapshot.json"

        def change(document: dict[str, Any]) -> None:
            name = document["checkpoint_results"].pop(number)["checkpoint_dir_name"]
            document["checkpoint_report_indices"].pop(number)
            if renumbered:
                left = len(document["checkpoint_results"])
                document.update(checkpoint_report_indices=list(range(left)), current_report_index=left)
            if deleted:
                shutil.rmtree(place.parent / name)

        run.edit(place, change)

    return tamper
