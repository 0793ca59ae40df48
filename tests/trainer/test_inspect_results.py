"""The inspector accepts a sound run and refuses every tampered one, naming what is wrong."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
import torch

from tests.trainer.small_run import (
    FINAL_COMMIT,
    KILLED_AT,
    ORDER,
    RECIPE,
    RUN_KEY,
    SUBMISSION,
    SmallRun,
    commit_name,
    record,
    train,
)
from trainer import inspect_results, last_commit
from trainer.hashing import model_sha256, momentum_sha256
from trainer.inspection import evidence as evidence_module
from trainer.inspection import record as record_module
from trainer.inspection import recording, storage
from trainer.inspection.checklist import Failed
from trainer.storage import HASTY_ATTEMPTS, PATIENT_ATTEMPTS
from trainer.synthetic import build_model, build_optimizer, held_out_loss, shard

Tamper = Callable[[SmallRun], object]


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return train(tmp_path_factory.mktemp("sound") / RUN_KEY)


@pytest.fixture
def run(sound: SmallRun, tmp_path: Path) -> SmallRun:
    shutil.copytree(sound.root, tmp_path / RUN_KEY)
    return SmallRun(tmp_path / RUN_KEY)


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


def test_sound_run_passes_every_check(run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, outcome = inspected(run, tmp_path, order=ORDER)
    assert failures(outcome) == {}
    assert status == 0
    assert outcome["ok"] is True
    assert outcome["schema"] == 1
    assert outcome["figures"]["steps"] == RECIPE["steps"]
    assert outcome["figures"]["restored_steps"] == [0, KILLED_AT]
    metrics = json.loads((run.export / "metrics.json").read_text())
    assert outcome["figures"]["held_out_loss_recomputed"] == metrics["held_out"]["final_loss"]
    assert [check["name"] for check in outcome["not_applicable"]] == ["distinct devices", "distinct hosts"]
    assert (outcome["figures"]["distinct_devices"], outcome["figures"]["distinct_hosts"]) == (1, 1)
    table = capsys.readouterr().out
    assert "all 27 checks hold" in table
    assert "FAILED" not in table


def test_inspection_changes_nothing(run: SmallRun, sound: SmallRun, tmp_path: Path) -> None:
    inspected(run, tmp_path)
    for path in sound.root.rglob("*"):
        if path.is_file():
            assert (run.root / path.relative_to(sound.root)).read_bytes() == path.read_bytes()
    assert len(list(run.root.rglob("*"))) == len(list(sound.root.rglob("*")))


@pytest.mark.parametrize("by", [timedelta(days=-1), timedelta(days=1)], ids=["set back", "put forward"])
@pytest.mark.parametrize("kind", ["first-step", "final"])
def test_host_clock_may_be_a_day_off_from_one_step_to_the_next(
    run: SmallRun, tmp_path: Path, kind: str, by: timedelta
) -> None:
    def moved(document: dict[str, Any]) -> None:
        document["at"] = (datetime.fromisoformat(document["at"]) + by).isoformat()

    evidence(2, (0, 1), moved, kind)(run)
    status, outcome = inspected(run, tmp_path, order=ORDER)
    assert (status, failures(outcome)) == (0, {})


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


OTHER = "0" * 64
STEPS = RECIPE["steps"]

EXTRA_METRICS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("metrics.json", lambda document: document.update(note="x")),
    ("metrics.json, run", lambda document: document["run"].update(note="x")),
    ("metrics.json, recipe", lambda document: document["recipe"].update(note="x")),
    ("metrics.json, step 5", row(5, note="x")),
    ("metrics.json, attempt 2", lambda document: document["attempts"][1].update(note="x")),
    ("metrics.json, held_out", lambda document: document["held_out"].update(note="x")),
]
EXTRA_STATE: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("the top", lambda content: content.update(note="x"), "'note' is no field of it"),
    ("the model", lambda content: content["model"].update(note=torch.zeros(1)), "its model does not fit the recipe"),
    ("the optimizer", lambda content: content["optimizer"].update(note="x"), "optimizer: 'note'"),
    (
        "the optimizer's settings",
        lambda content: content["optimizer"]["param_groups"][0].update(note="x"),
        "optimizer group 0: 'note'",
    ),
    (
        "a parameter's state",
        lambda content: content["optimizer"]["state"][1].update(note=torch.zeros(1)),
        "state of parameter 1: 'note'",
    ),
]

# What is done to the run, the check that must fail, and what its message must name.
TAMPERED: list[tuple[str, Tamper, str, str]] = [
    # The manifest.
    ("metrics byte", flips("metrics.json"), "manifest", "metrics.json differs from its checksum"),
    ("state byte", flips("state.pt"), "manifest", "state.pt differs from its checksum"),
    ("recording byte", flips("metrics.rrd"), "manifest", "metrics.rrd differs from its checksum"),
    ("result byte", flips("result.json"), "manifest", "result.json differs from its checksum"),
    ("path outside", manifest(replaced("../state.pt")), "manifest", "'../state.pt', which is not a bare file name"),
    ("absolute path", manifest(replaced("/etc/passwd")), "manifest", "'/etc/passwd', which is not a bare file name"),
    ("path below", manifest(replaced("sub/state.pt")), "manifest", "'sub/state.pt', which is not a bare file name"),
    ("dots", manifest(replaced("..")), "manifest", "'..', which is not a bare file name"),
    ("backslash", manifest(replaced("..\\state.pt")), "manifest", "not a bare file name"),
    ("listed twice", manifest(lambda text: text + text.split("\n")[0] + "\n"), "manifest", "listed twice"),
    ("manifest cut", manifest(lambda text: text[:-20]), "manifest", "cut off"),
    ("manifest empty", manifest(lambda text: ""), "manifest", "lists nothing"),
    ("manifest garbage", manifest(lambda text: text + "hello\n"), "manifest", "line 5 of SHA256SUMS"),
    ("lists itself", manifest(lambda text: text + OTHER + "  SHA256SUMS\n"), "manifest", "lists itself"),
    ("no manifest", lambda run: (run.export / "SHA256SUMS").unlink(), "manifest", "SHA256SUMS is missing"),
    ("unlisted file", lambda run: (run.export / "extra.bin").write_text("x"), "manifest", "extra.bin is not listed"),
    ("folder", lambda run: (run.export / "more").mkdir(), "manifest", "more is a folder"),
    ("missing file", lambda run: (run.export / "state.pt").unlink(), "manifest", "state.pt is missing"),
    ("line dropped", manifest(lambda text: text.split("\n", 1)[1]), "manifest", "metrics.json is not listed"),
    ("link", links_state, "manifest", "state.pt is a link"),
    ("link not read", links_state, "state.pt", "links are not followed"),
    ("fifo", lambda run: os.mkfifo(run.export / "pipe"), "manifest", "pipe is a other"),
    # The journal.
    ("missing step", metrics(drops_step(13), recorded=True), "steps", f"missing step 13 of {STEPS}"),
    ("missing last", metrics(drops_step(STEPS), recorded=True), "steps", f"missing step {STEPS} of {STEPS}"),
    ("extra step", metrics(adds_step, recorded=True), "steps", f"extra step {STEPS + 1}"),
    ("step zero", metrics(row(1, step=0)), "steps", "extra step 0"),
    ("duplicate step", metrics(repeats_step(9), recorded=True), "steps", "duplicate step 9"),
    ("out of order", metrics(swaps_steps), "steps", "step 5 is out of order"),
    ("step no number", metrics(row(3, step="3")), "steps", "no object with a whole number"),
    ("steps no list", metrics(lambda document: document.update(steps={})), "steps", "missing step 1-24"),
    ("nan", metrics(row(5, loss=math.nan)), "scalars", "step 5: loss is not finite (nan)"),
    ("infinity", metrics(row(6, gradient_norm=math.inf)), "scalars", "step 6: gradient_norm is not finite (inf)"),
    ("negative", metrics(row(7, loss=-0.5)), "scalars", "step 7: loss is not positive (-0.5)"),
    ("no change", metrics(row(8, parameter_change=0.0)), "scalars", "step 8: parameter_change is not positive"),
    (
        "converged",
        metrics(lambda document: [row(step, parameter_change=0.0)(document) for step in (4, 6, 7)]),
        "scalars",
        "step 4: parameter_change is not positive (0.0), and so at step 6-7",
    ),
    ("no speed", metrics(row(9, samples_per_second=0)), "scalars", "step 9: samples_per_second is not positive"),
    ("text", metrics(row(2, loss="1.0")), "scalars", "step 2: loss is '1.0', no number"),
    ("truth value", metrics(row(2, loss=True)), "scalars", "step 2: loss is True, no number"),
    ("no scalar", metrics(lambda document: document["steps"][1].pop("loss")), "scalars", "step 2: loss is None"),
    ("learning rate", metrics(row(4, learning_rate=0.06)), "scalars", "step 4: learning_rate is 0.06"),
    ("no learning", metrics(unlearns, recorded=True), "learning", "no learning: the loss went from"),
    (
        "held-out rose",
        metrics(lambda document: document["held_out"].update(final_loss=1e6)),
        "learning",
        "no learning: the held-out loss went from",
    ),
    ("not JSON", lambda run: (run.export / "metrics.json").write_text("{"), "metrics.json", "is not JSON"),
    (
        "repeated key",
        lambda run: (run.export / "metrics.json").write_text('{"schema":1,"schema":1}'),
        "metrics.json",
        "'schema' is given twice",
    ),
    ("other schema", metrics(lambda document: document.update(schema=2)), "metrics.json", "schema 2"),
    (
        "other run",
        metrics(lambda document: document["run"].update(submission_id="other-train")),
        "metrics.json",
        "submission_id is 'other-train'",
    ),
    (
        "metrics of another run's key",
        metrics(lambda document: document["run"].update(run_key="other-0123456789")),
        "metrics.json",
        "run_key is 'other-0123456789'",
    ),
    ("recipe", metrics(lambda document: document["recipe"].update(features=0)), "steps", "recipe.features is 0"),
    ("credited", metrics(row(10, attempt=1)), "journal and evidence", "step 10 is credited to attempt 1, not 2"),
    ("doubled rank", doubles_rank, "journal and evidence", "rank 0 is doubled"),
    (
        "journal rank differs",
        metrics(lambda document: document["attempts"][1]["ranks"][1].update(local_rank=1)),
        "journal and evidence",
        "rank 1 differs from its own evidence in local_rank",
    ),
    (
        "attempt missing",
        metrics(lambda document: document["attempts"].pop(0)),
        "journal and evidence",
        "attempt 1 is missing",
    ),
    # The ranks' evidence.
    ("rank missing", loses_rank, "ranks", "attempt 2: rank 1 is missing (world size 2)"),
    (
        "world size",
        evidence(2, (1,), lambda document: document.update(world_size=3)),
        "ranks",
        "world_size is 3, not 2",
    ),
    ("rank renamed", evidence(2, (1,), lambda document: document.update(rank=0)), "ranks", "rank is 0, not 1"),
    ("same process", same_process, "ranks", "rank 1 is the same process as rank 0"),
    (
        "extra rank",
        lambda run: shutil.copy(run.evidence(2, 1), run.evidence(2, 2)),
        "ranks",
        "attempt 2: rank 2 is outside the world of 2",
    ),
    (
        "attempt gone",
        lambda run: shutil.rmtree(run.evidence(1, 0).parent),
        "ranks",
        "attempts are numbered 2, not 1 to 1",
    ),
    ("no evidence", lambda run: shutil.rmtree(run.root / "evidence"), "ranks", "the ranks left no evidence"),
    (
        "restored apart",
        evidence(2, (1,), lambda document: document.update(restored_step=4)),
        "restored state",
        "ranks differ in restored_step (rank 0: 8, rank 1: 4)",
    ),
    (
        "model apart",
        evidence(2, (1,), lambda document: document.update(model_sha256=OTHER)),
        "restored state",
        "ranks differ in model_sha256",
    ),
    (
        "momentum apart",
        evidence(2, (0,), lambda document: document.update(momentum_sha256=OTHER)),
        "restored state",
        "ranks differ in momentum_sha256",
    ),
    (
        "nothing restored",
        evidence(2, (0, 1), lambda document: document.update(momentum_sha256=momentum_sha256({"state": {}}))),
        "restored state",
        "rank 0: restored step 8 without any momentum",
    ),
    (
        "momentum from nowhere",
        evidence(1, (0, 1), lambda document: document.update(momentum_sha256=OTHER)),
        "restored state",
        "restored step 0, yet",
    ),
    (
        "other state restored",
        evidence(2, (0, 1), lambda document: document.update(model_sha256=OTHER)),
        "restored from commits",
        f"as in {commit_name(KILLED_AT, 1)}",
    ),
    (
        "uncommitted restored",
        snapshot(blanks_commit_of_attempt_one),
        "restored from commits",
        "which was never committed",
    ),
    ("restored truncated", truncates(restored_commit), "restored from commits", "checkpoint damaged: train/main/"),
    (
        "first step skipped",
        evidence(2, (1,), lambda document: document.update(step=10), "first-step"),
        "first steps",
        "rank 1: its first step is 10, not 9, the step after the restored one",
    ),
    ("first step missing", lambda run: run.evidence(2, 0, "first-step").unlink(), "first steps", "is not recorded"),
    (
        "parameters apart",
        evidence(2, (1,), lambda document: document.update(model_sha256=OTHER), "final"),
        "final state of ranks",
        "ranks ended with different parameters",
    ),
    (
        "final momentum apart",
        evidence(2, (1,), lambda document: document.update(momentum_sha256=OTHER), "final"),
        "final state of ranks",
        "ranks ended with different momentum",
    ),
    (
        "no final",
        lambda run: run.evidence(2, 1, "final").unlink(),
        "final state of ranks",
        "rank 1 left no final evidence",
    ),
    (
        "ended early",
        evidence(2, (0, 1), lambda document: document.update(step=20), "final"),
        "final state of ranks",
        "rank 0 ended at step 20, not 24",
    ),
    (
        "versions apart",
        evidence(2, (1,), lambda document: document["versions"].update(ray="2.57.0")),
        "versions",
        "ray is '2.57.0', not '2.58.0'",
    ),
    (
        "device type",
        evidence(2, (0, 1), lambda document: document["device"].update(type="cuda")),
        "versions",
        "trained on 'cuda', not on 'cpu'",
    ),
    ("evidence no JSON", lambda run: run.evidence(2, 0).write_text("]"), "ranks", "rank-0.start.json is not JSON"),
    # The recording.
    ("recording short", records(lambda steps: steps.pop()), "recording", f"/train/loss lacks step {STEPS}"),
    (
        "recording long",
        records(lambda steps: steps.append({**steps[-1], "step": STEPS + 1})),
        "recording",
        f"/train/loss holds step {STEPS + 1}, which metrics.json does not",
    ),
    ("recording doubled", records(lambda steps: steps.append(steps[3])), "recording", "/train/loss holds step 4 twice"),
    ("recording of another run", records(lambda steps: None, "other-train"), "recording", "it belongs to another run"),
    (
        "journal unlike the recording",
        metrics(lambda document: row(11, loss=document["steps"][10]["loss"] * (1 + 1e-12))(document)),
        "recording",
        "/train/loss, step 11: recorded",
    ),
    ("recording truncated", truncates(lambda run: run.export / "metrics.rrd"), "rrd verify", "refuses the recording"),
    (
        "recording garbage",
        lambda run: (run.export / "metrics.rrd").write_bytes(b"RRF2" + b"\0" * 64),
        "recording",
        "metrics.rrd",
    ),
    # The result, the state and the checkpoint.
    ("status", result(lambda document: document.update(status="failed")), "result", "status is 'failed'"),
    ("final loss", result(lambda document: document.update(final_loss=0.5)), "result", "final_loss is 0.5"),
    ("held-out claim", result(lambda document: document.update(held_out_loss=0.5)), "result", "held_out_loss is 0.5"),
    (
        "checkpoint outside",
        result(lambda document: document.update(checkpoint="train/main/../../x")),
        "result",
        "names the checkpoint 'train/main/../../x'",
    ),
    (
        "parameters claim",
        result(lambda document: document.update(parameters_sha256=OTHER)),
        "state.pt",
        "(parameters_sha256)",
    ),
    (
        "momentum claim",
        result(lambda document: document.update(momentum_sha256=OTHER)),
        "state.pt",
        "(momentum_sha256)",
    ),
    (
        "rank claim",
        result(lambda document: document["ranks_final"][1].update(model_sha256=OTHER)),
        "final state of ranks",
        "result.json, rank 1: model_sha256",
    ),
    (
        "rank claim missing",
        result(lambda document: document["ranks_final"].pop()),
        "final state of ranks",
        "does not list rank 0-1",
    ),
    (
        "state of other parameters",
        resaves(state, lambda content: content["model"]["weight"].add_(1e-3)),
        "state.pt",
        "(parameters_sha256)",
    ),
    (
        "held-out figure",
        metrics(lambda document: document["held_out"].update(final_loss=document["held_out"]["final_loss"] * 1.001)),
        "held-out loss",
        "the held-out loss recomputed from state.pt is",
    ),
    (
        "initial figure",
        metrics(lambda document: document["held_out"].update(initial_loss=1e3)),
        "held-out loss",
        "the held-out loss of the initial parameters is",
    ),
    ("state momentum", resaves(state, forgets_momentum), "state.pt", "momentum is incomplete: parameter 1 of 2"),
    ("state truncated", truncates(state), "state.pt", "checkpoint damaged: exports/"),
    ("momentum incomplete", resaves(native, forgets_momentum), "checkpoint", "momentum is incomplete: parameter 1"),
    (
        "momentum gone",
        resaves(native, lambda content: content["optimizer"]["state"].clear()),
        "checkpoint",
        "momentum is incomplete: parameter 0 of 2 has no buffer",
    ),
    (
        "momentum shape",
        resaves(native, lambda content: content["optimizer"]["state"][0].update(momentum_buffer=torch.zeros(3))),
        "checkpoint",
        "momentum of parameter 0 is [3]",
    ),
    (
        "momentum nan",
        resaves(native, lambda content: content["optimizer"]["state"][0]["momentum_buffer"].fill_(math.nan)),
        "checkpoint",
        "momentum of parameter 0 is not finite",
    ),
    (
        "momentum altered",
        resaves(native, lambda content: content["optimizer"]["state"][0]["momentum_buffer"].mul_(1.5)),
        "checkpoint",
        "momentum_sha256",
    ),
    ("other step", resaves(native, lambda content: content.update(step=20)), "checkpoint", "step is 20, not 24"),
    ("no optimizer", resaves(native, lambda content: content.pop("optimizer")), "checkpoint", "holds no optimizer"),
    (
        "model shape",
        resaves(native, lambda content: content["model"].update(weight=torch.zeros(1, 3))),
        "checkpoint",
        "its model does not fit the recipe",
    ),
    (
        "optimizer rate",
        resaves(native, lambda content: content["optimizer"]["param_groups"][0].update(lr=1.0)),
        "checkpoint",
        "lr is 1.0, not 0.05",
    ),
    (
        "checkpoint truncated",
        truncates(native),
        "checkpoint",
        f"checkpoint damaged: train/main/{FINAL_COMMIT}/checkpoint.pt",
    ),
    ("checkpoint empty", lambda run: native(run).write_bytes(b""), "checkpoint", "it is truncated or no torch archive"),
    ("checkpoint byte", flips_inside_checkpoint, "checkpoint", "differs from its checksum"),
    ("checkpoint missing", lambda run: native(run).unlink(), "checkpoint", "it is missing"),
    (
        "uncommitted checkpoint",
        snapshot(lambda document: [document[key].pop() for key in ("checkpoint_results", "checkpoint_report_indices")]),
        "commit",
        f"{FINAL_COMMIT} is not in Ray Train's commit record",
    ),
    (
        "older checkpoint",
        result(lambda document: document.update(checkpoint=f"train/main/{commit_name(20, 2)}")),
        "commit",
        f"is not the newest commit, which is {FINAL_COMMIT}",
    ),
    (
        "no commit record",
        lambda run: (run.root / "train" / "main" / "checkpoint_manager_snapshot.json").unlink(),
        "commit",
        "checkpoint_manager_snapshot.json is missing",
    ),
    (
        "checkpoint journal",
        lambda run: run.edit(run.checkpoint / "journal.json", row(3, loss=9.0)),
        "checkpoint journal",
        "differs from metrics.json in step 3",
    ),
    (
        "a kept commit is not what was reported",
        changes_kept_commit,
        "kept commits",
        "its model differ from what was reported at its commit",
    ),
    (
        "a kept commit is truncated",
        truncates_kept_commit,
        "kept commits",
        "truncated",
    ),
    (
        "a kept optimizer's rate",
        resaves(kept_commit, lambda content: content["optimizer"]["param_groups"][0].update(lr=0.5)),
        "kept commits",
        "optimizer group 0: lr is 0.5, not 0.05",
    ),
    (
        "a kept optimizer's other setting",
        resaves(kept_commit, lambda content: content["optimizer"]["param_groups"][0].update(nesterov=True)),
        "kept commits",
        "optimizer group 0: nesterov is True, not False",
    ),
    (
        "a tensor more in a kept optimizer",
        resaves(kept_commit, lambda content: content["optimizer"]["state"][0].update(note=torch.zeros(3))),
        "kept commits",
        "state of parameter 0: 'note' is no field of it",
    ),
    ("a kept model's shape", reshapes_kept_commit, "kept commits", "its model does not fit the recipe"),
    (
        "checkpoint linked",
        links_checkpoint,
        "checkpoint",
        "reached through a link",
    ),
    # The commits kept, and Ray's record of them.
    (
        "a kept journal's loss",
        journal_of_kept(row(3, loss=9.0)),
        "kept journals",
        f"{commit_name(16, 2)}/journal.json differs from metrics.json in step 3",
    ),
    (
        "a kept journal's last row",
        journal_of_kept(row(16, gradient_norm=9.0)),
        "kept journals",
        "differs from metrics.json in step 16",
    ),
    (
        "a kept journal's recipe",
        journal_of_kept(lambda document: document["recipe"].update(seed=8)),
        "kept journals",
        "recipe is",
    ),
    (
        "a kept journal's attempt",
        journal_of_kept(row(12, attempt=1, loss=9.0)),
        "kept journals",
        "differs from metrics.json in step 12",
    ),
    (
        "a field more in a kept journal",
        journal_of_kept(lambda document: document.update(note="x")),
        "kept journals",
        "'note' is no field of it",
    ),
    (
        "a field more in a kept row",
        journal_of_kept(row(5, note="x")),
        "kept journals",
        "differs from metrics.json in step 5",
    ),
    ("a kept commit is gone", deletes_kept_commit, "commit record", f"{commit_name(16, 2)} is listed as committed"),
    (
        "the last commit is gone",
        lambda run: shutil.rmtree(run.checkpoint),
        "commit record",
        "nothing of it is in storage",
    ),
    ("loss reported", reported(loss=9.0), "kept journals", f"{commit_name(16, 2)}: loss is 9.0"),
    ("speed reported", reported(samples_per_second=9.0), "kept journals", "samples_per_second is 9.0"),
    ("step reported", reported(step=12), "kept journals", "step is 12, not 16"),
    ("attempt reported", reported(attempt=1), "kept journals", "attempt is 1, not 2"),
    ("steps reported", reported(steps=25), "kept journals", "steps is 25, not 24"),
    ("a field more reported", reported(note="x"), "kept journals", "'note' is no field of it"),
    ("hash reported", reported(model_sha256=OTHER), "kept commits", "its model differ from what was reported"),
    ("no hash reported", reported(momentum_sha256=None), "kept commits", "its momentum differ from what was reported"),
    (
        "last loss reported",
        snapshot(lambda document: document["latest_checkpoint_result"]["metrics"].update(loss=9.0)),
        "commit record",
        "latest_checkpoint_result is not the newest commit",
    ),
    *(
        (f"commit {number} dropped, {how}", drops_commit(number, deleted), "commits in order", words)
        for how, deleted in (("its folder left", False), ("and deleted", True))
        for number, words in (
            (0, f"the record lists 5 commits, from {commit_name(8, 1)} on"),
            (1, "the commit of step 8 is not listed"),
            (2, "the commit of step 12 is not listed"),
            (3, "the commit of step 16 is not listed"),
        )
    ),
    (
        "dropped and counted anew",
        drops_commit(3, True, renumbered=True),
        "commits in order",
        "the commit of step 16 is not listed",
    ),
    (
        "listed twice",
        snapshot(lambda document: document["checkpoint_results"].insert(3, document["checkpoint_results"][3])),
        "commit record",
        f"lists {commit_name(16, 2)} 2 times",
    ),
    (
        "order of commits",
        snapshot(lambda document: document["checkpoint_report_indices"].reverse()),
        "commits in order",
        "is not listed",
    ),
    (
        "no order of commits",
        snapshot(lambda document: document.update(checkpoint_report_indices=None)),
        "commit record",
        "gives no order to its commits",
    ),
    (
        "commits to come",
        snapshot(lambda document: document.update(current_report_index=3)),
        "commit record",
        "current_report_index is 3",
    ),
    # What no check would read.
    (
        "root of another run",
        lambda run: run.edit(run.root / "owner.json", methodcaller("update", {"run_key": "other-0123456789"})),
        "owner",
        "run_key is 'other-0123456789', not",
    ),
    (
        "step of a rank's claim",
        result(lambda document: document["ranks_final"][0].update(step=3)),
        "final state of ranks",
        "result.json, rank 0: step is 3, not 24",
    ),
    *(
        (f"a field more in {where} of the result", result(change), "result", f"{where}: 'note' is no field of it")
        for where, change in (
            ("rank 1", lambda document: document["ranks_final"][1].update(note="x")),
            ("versions", lambda document: document["versions"].update(note="x")),
        )
    ),
    ("another Ray's record", record_with(ray_version="9.9.9"), "commit record", "ray_version is '9.9.9', not '2.58.0'"),
    ("a field more in the record", record_with(note="x"), "commit record", "'note' is no field of it"),
    (
        "a field more in a listed commit",
        snapshot(lambda document: document["checkpoint_results"][1].update(note="x")),
        "commit record",
        f"{commit_name(8, 1)}: 'note' is no field of it",
    ),
    ("a commit awaits nothing", record_with(pending_training_results={"x": 1}), "commit record", "pending_training"),
    (
        "commits that there never were",
        record_with(current_report_index=999),
        "commit record",
        "current_report_index is 999, which its commits do not lead up to",
    ),
    (
        "commits that were never dropped",
        record_with(checkpoint_report_indices=list(range(10, 16)), current_report_index=16),
        "commit record",
        "current_report_index is 16, which its commits do not lead up to",
    ),
    *(
        (
            f"a field more in {kind} evidence",
            evidence(2, (0,), methodcaller("update", {"note": "x"}), kind),
            check,
            words,
        )
        for kind, check, words in (
            ("first-step", "first steps", "attempt 2, rank 0, first-step: 'note' is no field of it"),
            ("final", "final state of ranks", "attempt 2, rank 0, final: 'note' is no field of it"),
        )
    ),
    *(
        (f"time of {kind} evidence, {at}", evidence(2, (1,), methodcaller("update", {"at": at}), kind), check, words)
        for kind, check in (("first-step", "first steps"), ("final", "final state of ranks"))
        for at, words in (
            ("1999-01-01T00:00:00Z", "before the attempt began"),
            ("2026-11-30T12:00:00", "no time in UTC"),
            ("today", "no time in UTC"),
        )
    ),
    *(
        (f"a file more in {what}", put_beside(place), "kept commits", "note.bin is no file of a commit")
        for what, place in (("a kept commit", kept_commit), ("the last commit", native))
    ),
    *(
        (f"{name} in {what}", packs(place, name), check, f"{name}, which torch does not read")
        for what, place, check in (
            ("a kept commit", kept_commit, "kept commits"),
            ("the last commit", native, "checkpoint"),
            ("state.pt", state, "state.pt"),
        )
        for name in ("data/note", "data/4")
    ),
    (
        "a kept row of an attempt that never made it",
        journal_of_kept(row(10, attempt=1, samples_per_second=1.0)),
        "kept journals",
        "step 10 is credited to attempt 1, not 2",
    ),
    *(
        (f"a field more in {where}", metrics(change), "metrics.json", f"{where}: 'note' is no field of it")
        for where, change in EXTRA_METRICS
    ),
    ("a field less", metrics(lambda document: document.pop("device")), "metrics.json", "device is missing"),
    (
        "a field more in a rank of the journal",
        metrics(lambda document: document["attempts"][1]["ranks"][0].update(note="x")),
        "journal and evidence",
        "differs from its own evidence in note",
    ),
    ("a field more in the result", result(lambda document: document.update(note="x")), "result", "'note' is no field"),
    *(
        (f"a field more in {what} of state.pt", resaves(state, change), "state.pt", words)
        for what, change, words in (*EXTRA_STATE, ("the run", lambda d: d["run"].update(note="x"), "run: 'note'"))
    ),
    *(
        (f"a field more in {what} of checkpoint.pt", resaves(native, change), "checkpoint", words)
        for what, change, words in EXTRA_STATE[1:]
    ),
    (
        "a field more in a kept checkpoint.pt",
        resaves(kept_commit, lambda content: content.update(note="x")),
        "kept commits",
        "checkpoint.pt: 'note' is no field of it",
    ),
    (
        "an optimizer's other setting",
        resaves(state, lambda content: content["optimizer"]["param_groups"][0].update(weight_decay=0.5)),
        "state.pt",
        "weight_decay is 0.5, not 0",
    ),
]


@pytest.mark.parametrize(
    ("tamper", "check", "words"), [case[1:] for case in TAMPERED], ids=[case[0] for case in TAMPERED]
)
def test_tampered_run_is_refused_by_name(run: SmallRun, tmp_path: Path, tamper: Tamper, check: str, words: str) -> None:
    tamper(run)
    status, outcome = inspected(run, tmp_path)
    assert status == 1
    assert outcome["ok"] is False
    found = failures(outcome)
    assert check in found, found
    assert words in found[check], found[check]
    # Everything else was still tried.
    assert len(outcome["checks"]) + len(outcome["not_applicable"]) == 29
    assert not [detail for detail in found.values() if detail.startswith("cannot be checked")], found


ORDERED: list[tuple[str, dict[str, Any], str, str]] = [
    ("recipe", {"workload": {"kind": "regression", "recipe": {**RECIPE, "seed": 8}}}, "order", "seed is 7, not 8"),
    ("device", {"device": "cuda"}, "order", "device is 'cpu', not 'cuda'"),
    ("world size", {"world_size": 4}, "ranks", "rank 2-3 is missing (world size 4)"),
    ("torch build", {"pins": {"torch": "2.13.0+cu130"}}, "versions", "not '2.13.0+cu130'"),
    ("run key", {"run_key": "other-0123456789"}, "metrics.json", "not 'other-0123456789'"),
    (
        "resume",
        {"resume": {"checkpoint": "s3://bucket/runs/earlier/train/main/checkpoint_1"}},
        "restored state",
        "attempt 1 restored nothing",
    ),
]


@pytest.mark.parametrize(
    ("change", "check", "words"), [case[1:] for case in ORDERED], ids=[case[0] for case in ORDERED]
)
def test_run_that_is_not_the_ordered_one_is_refused(
    run: SmallRun, tmp_path: Path, change: dict[str, Any], check: str, words: str
) -> None:
    status, outcome = inspected(run, tmp_path, order={**ORDER, **change})
    assert status == 1
    assert words in failures(outcome)[check]


PLACED: list[tuple[str, tuple[tuple[str, str, str], tuple[str, str, str]], int]] = [
    ("two Ray nodes of one machine", (("cpu", "node a", "host"), ("cpu", "node b", "host")), 1),
    ("two machines", (("cpu", "a", "host a"), ("cpu", "b", "host b")), 2),
    ("two machines of one kind", (("cpu", "a", "host a"), ("cpu", "a", "host b")), 2),
    ("two GPUs of one machine", (("cuda", "a", "host"), ("cuda", "b", "host")), 2),
    ("one GPU", (("cuda", "a", "host"), ("cuda", "a", "host")), 1),
]


@pytest.mark.parametrize(("ranks", "devices"), [case[1:] for case in PLACED], ids=[case[0] for case in PLACED])
def test_devices_are_distinct_where_no_two_ranks_can_share_one(
    run: SmallRun, tmp_path: Path, ranks: tuple[tuple[str, str, str], ...], devices: int
) -> None:
    placed(*ranks)(run)
    outcome = inspected(run, tmp_path)[1]
    assert outcome["figures"]["distinct_devices"] == devices
    found = failures(inspected(run, tmp_path, "--require-distinct-devices")[1])
    assert ("distinct devices" in found) == (devices == 1)
    if devices == 1:
        assert "attempt 2: ranks 0-1 share one device" in found["distinct devices"]


def test_two_ranks_on_one_machine_are_not_two_hosts(run: SmallRun, tmp_path: Path) -> None:
    status, outcome = inspected(run, tmp_path, "--require-distinct-hosts")
    assert status == 1
    assert "ranks 0-1 share one host" in failures(outcome)["distinct hosts"]


def test_optimizer_without_momentum_restores_none(run: SmallRun, tmp_path: Path) -> None:
    none = momentum_sha256({"state": {}})
    evidence(2, (0, 1), lambda document: document.update(momentum_sha256=none))(run)
    assert "without any momentum" in failures(inspected(run, tmp_path)[1])["restored state"]
    metrics(lambda document: document["recipe"].update(momentum=0.0))(run)
    assert "restored state" not in failures(inspected(run, tmp_path)[1])


def renumbers_commits(run: SmallRun, numbers: dict[int, int]) -> None:
    """Number the attempts anew in commits, record, journals and export. Those that become 0 were an earlier run's."""
    folder = run.root / "train" / "main"

    def attempt(name: str) -> int:
        return numbers[int(name.rpartition("-")[2])]

    def renamed(name: str) -> str:
        return f"{name.rpartition('-')[0]}-{attempt(name):03d}"

    def rows(document: dict[str, Any]) -> None:
        for entry in document["steps"]:
            entry["attempt"] = numbers[entry["attempt"]]

    def record_of(document: dict[str, Any]) -> None:
        listed = [each for each in document["checkpoint_results"] if attempt(each["checkpoint_dir_name"])]
        for each in (*listed, document["latest_checkpoint_result"]):
            each["metrics"]["attempt"] = attempt(each["checkpoint_dir_name"])
            each["checkpoint_dir_name"] = renamed(each["checkpoint_dir_name"])
        indices = list(range(len(listed)))
        document.update(checkpoint_results=listed, checkpoint_report_indices=indices, current_report_index=len(listed))

    snapshot(record_of)(run)
    for place in list(folder.glob("checkpoint_step-*")):
        run.edit(place / "journal.json", rows)
        if attempt(place.name):
            place.rename(place.with_name(renamed(place.name)))
        else:
            shutil.rmtree(place)
    run.edit("metrics.json", rows)
    run.edit("result.json", lambda document: document.update(checkpoint=renamed(document["checkpoint"])))
    run.seal()


def test_attempt_that_never_took_a_step_is_set_aside(run: SmallRun, tmp_path: Path) -> None:
    """A crash while the worker group starts leaves the evidence of some ranks and nothing in the result."""
    crashed = run.root / "evidence" / "main"
    (crashed / "attempt-002").rename(crashed / "attempt-003")
    (crashed / "attempt-002").mkdir()
    for rank in (0, 1):
        for kind in ("start", "first-step", "final"):
            run.edit(run.evidence(3, rank, kind), lambda document: document.update(attempt=3))
    shutil.copy(run.evidence(3, 0), run.evidence(2, 0))
    run.edit(run.evidence(2, 0), lambda document: document.update(attempt=2))

    def renumber(document: dict[str, Any]) -> None:
        document["attempts"][1]["attempt"] = 3
        for rank in document["attempts"][1]["ranks"]:
            rank["attempt"] = 3
        started = {**document["attempts"][1]["ranks"][0], "attempt": 2}
        document["attempts"].insert(1, {"attempt": 2, "restored_step": KILLED_AT, "ranks": [started]})

    run.edit("metrics.json", renumber)
    renumbers_commits(run, {1: 1, 2: 3})
    status, outcome = inspected(run, tmp_path)
    assert failures(outcome) == {}
    assert status == 0
    ranks = next(check for check in outcome["checks"] if check["name"] == "ranks")
    assert "attempt 2 never took a step" in ranks["detail"]


def keeps(run: SmallRun, count: int, deleted: int) -> None:
    """Drop all but the newest ``count`` commits from the record as Ray does, having deleted the oldest ``deleted``."""

    def change(document: dict[str, Any]) -> None:
        dropped = document["checkpoint_results"][:-count]
        for key in ("checkpoint_results", "checkpoint_report_indices"):
            document[key] = document[key][-count:]
        for commit in dropped[:deleted]:
            shutil.rmtree(run.root / "train" / "main" / commit["checkpoint_dir_name"])

    snapshot(change)(run)


@pytest.mark.parametrize("deleted", [2, 3])
def test_commits_that_ray_dropped_are_no_fault(
    run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: int
) -> None:
    """Ray deletes what it dropped after it wrote the record: a driver that dies in between leaves the folder."""
    monkeypatch.setattr(record_module, "COMMITS_KEPT", 3)
    keeps(run, 3, deleted)
    status, outcome = inspected(run, tmp_path)
    assert failures(outcome) == {}
    assert status == 0


def test_upload_that_was_never_committed_is_no_fault(run: SmallRun, tmp_path: Path) -> None:
    shutil.copytree(kept_commit(run).parent, kept_commit(run).parent.with_name(commit_name(12, 1)))
    assert failures(inspected(run, tmp_path)[1]) == {}


def test_step_made_again_is_compared_in_what_the_recipe_determines(run: SmallRun, tmp_path: Path) -> None:
    """A commit that a later attempt could not load stays in the record, with another time for the steps after it."""
    made_again = run.root / "train" / "main" / commit_name(12, 2)
    first_made = made_again.with_name(commit_name(12, 1))
    shutil.copytree(made_again, first_made)

    def commits(document: dict[str, Any]) -> None:
        results = document["checkpoint_results"]
        results.insert(2, {**copy.deepcopy(results[2]), "checkpoint_dir_name": first_made.name})
        results[2]["metrics"]["attempt"] = 1
        document.update(checkpoint_report_indices=list(range(len(results))), current_report_index=len(results))

    def by_attempt_one(document: dict[str, Any]) -> None:
        for entry in document["steps"][KILLED_AT:]:
            entry["attempt"] = 1

    snapshot(commits)(run)
    journal = first_made / "journal.json"
    run.edit(journal, by_attempt_one)
    before = journal.read_text()

    def again(**values: Any) -> dict[str, str]:
        journal.write_text(before)
        run.edit(journal, row(10, **values))
        return failures(inspected(run, tmp_path)[1])

    assert again(samples_per_second=1.0) == {}
    for changed in ({"loss": 9.0}, {"gradient_norm": 9.0}, {"parameter_change": 9.0}, {"learning_rate": 9.0}):
        assert "differs from metrics.json in step 10" in again(**changed)["kept journals"]
    assert "step 10 is credited to attempt 2, not 1" in again(attempt=2)["kept journals"]


def test_restored_checkpoint_that_is_no_longer_kept_is_said_not_refused(
    run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "COMMITS_KEPT", 3)
    keeps(run, 3, 3)
    status, outcome = inspected(run, tmp_path)
    assert failures(outcome) == {}
    assert status == 0
    detail = next(check["detail"] for check in outcome["checks"] if check["name"] == "restored from commits")
    assert "no longer kept and was not compared" in detail


def resumed(run: SmallRun, source: str) -> None:
    """Make the run one that continues an earlier run's checkpoint of step 8."""
    shutil.rmtree(run.evidence(1, 0).parent)
    folder = run.root / "evidence" / "main"
    (folder / "attempt-002").rename(folder / "attempt-001")
    for rank in (0, 1):
        for kind in ("start", "first-step", "final"):
            run.edit(run.evidence(1, rank, kind), lambda document: document.update(attempt=1))
        run.edit(run.evidence(1, rank), lambda document: document.update(restored_from=source))

    ranks = [json.loads(run.evidence(1, rank).read_text()) for rank in (0, 1)]
    attempts = [{"attempt": 1, "restored_step": KILLED_AT, "ranks": ranks}]
    run.edit("metrics.json", lambda document: document.update(attempts=attempts))
    renumbers_commits(run, {1: 0, 2: 1})


def test_run_continued_from_an_earlier_one_passes_under_its_order_only(run: SmallRun, tmp_path: Path) -> None:
    source = f"s3://bucket/runs/earlier-0123456789/train/main/{commit_name(KILLED_AT, 1)}"
    resumed(run, source)
    status, outcome = inspected(run, tmp_path)
    assert failures(outcome) == {}
    assert status == 0
    assert "lies elsewhere and was not compared" in json.dumps(outcome["checks"])

    _, outcome = inspected(run, tmp_path, order=ORDER)
    assert "although the run was to start afresh" in failures(outcome)["restored state"]

    other = {**ORDER, "resume": {"checkpoint": source.replace("earlier", "another")}}
    assert (
        "the order says s3://bucket/runs/another"
        in failures(inspected(run, tmp_path, order=other)[1])["restored from commits"]
    )


def test_continued_run_is_compared_with_the_checkpoint_it_came_from(
    run: SmallRun, sound: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"s3://bucket/runs/earlier-0123456789/train/main/{commit_name(KILLED_AT, 1)}"
    resumed(run, source)
    opened: list[str] = []
    really = storage.open_root

    def open_root(location: str, scratch: Path, patient: bool) -> Any:
        opened.append(location)
        return really(str(sound.root) if location.startswith("s3://") else location, scratch)

    monkeypatch.setattr(inspect_results, "open_root", open_root)
    order = {**ORDER, "resume": {"checkpoint": source}}
    _, outcome = inspected(run, tmp_path, order=order)
    assert failures(outcome) == {}
    assert opened[1:] == ["s3://bucket/runs/earlier-0123456789"]
    evidence(1, (0, 1), lambda document: document.update(model_sha256=OTHER))(run)
    assert "model_sha256" in failures(inspected(run, tmp_path, order=order)[1])["restored from commits"]


@pytest.fixture
def script(run: SmallRun) -> SmallRun:
    """The same training as another application would leave it: a result and a file of its own, no journal."""
    for name in ("metrics.json", "metrics.rrd", "state.pt"):
        (run.export / name).unlink()
    (run.export / "weights.bin").write_bytes(b"weights")
    run.edit("result.json", lambda document: document.update(workload="script"))
    run.seal()
    return run


SCRIPT_ORDER = {**ORDER, "workload": {"kind": "script", "steps": RECIPE["steps"], "checkpoint_interval": 4}}


def test_script_workload_is_asked_only_what_its_contract_promises(script: SmallRun, tmp_path: Path) -> None:
    for order in (None, SCRIPT_ORDER):
        status, outcome = inspected(script, tmp_path, order=order)
        assert failures(outcome) == {}
        assert status == 0
        assert {"manifest", "ranks", "restored state", "first steps", "commit", "checkpoint"} <= {
            check["name"] for check in outcome["checks"]
        }
        assert {"steps", "scalars", "learning", "recording", "held-out loss"} <= {
            check["name"] for check in outcome["not_applicable"]
        }


def test_script_workload_may_say_more(script: SmallRun, tmp_path: Path) -> None:
    """What the contract asks for must be there; what else a script or another Ray adds is their own affair."""
    more = methodcaller("update", {"note": "x"})
    for kind in ("first-step", "final"):
        script.edit(script.evidence(2, 0, kind), more)
    script.edit(
        "result.json", lambda document: [more(part) for part in (document["versions"], *document["ranks_final"])]
    )
    script.seal()
    record_with(note="x", ray_version="2.60.0", current_report_index=999)(script)
    put_beside(kept_commit)(script)
    packs(kept_commit, "data/note")(script)
    assert failures(inspected(script, tmp_path, order=SCRIPT_ORDER)[1]) == {}


def test_application_alone_leaves_no_owner(run: SmallRun, tmp_path: Path) -> None:
    (run.root / "owner.json").unlink()
    assert failures(inspected(run, tmp_path)[1]) == {}


def test_script_workload_may_export_nothing(script: SmallRun, tmp_path: Path) -> None:
    shutil.rmtree(script.root / "exports")
    status, outcome = inspected(script, tmp_path, order=SCRIPT_ORDER)
    assert failures(outcome) == {}
    assert "this workload exported nothing" in json.dumps(outcome["not_applicable"])
    assert status == 0


@pytest.mark.parametrize(
    ("tamper", "check", "words"),
    [
        (flips("weights.bin"), "manifest", "weights.bin differs"),
        (lambda run: run.evidence(2, 1).unlink(), "ranks", "rank 1 is missing"),
        (lambda run: native(run).write_bytes(b"PK\3\4"), "checkpoint", "checkpoint damaged"),
        (lambda run: native(run).write_bytes(b""), "checkpoint", "checkpoint damaged"),
        (
            snapshot(lambda document: document["checkpoint_results"].clear()),
            "commit",
            "nothing was committed",
        ),
    ],
)
def test_tampered_script_workload_is_refused(
    script: SmallRun, tmp_path: Path, tamper: Tamper, check: str, words: str
) -> None:
    tamper(script)
    status, outcome = inspected(script, tmp_path, order=SCRIPT_ORDER)
    assert status == 1
    assert words in failures(outcome)[check]


def test_run_without_a_word_on_its_workload_is_asked_everything(script: SmallRun, tmp_path: Path) -> None:
    """Removing the journal must not turn a regression into something that has none."""
    script.edit("result.json", lambda document: document.pop("workload"))
    script.seal()
    status, outcome = inspected(script, tmp_path)
    assert status == 1
    assert failures(outcome)["metrics.json"].endswith("metrics.json is missing")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/at/all"], "is not a directory; give the run's root"),
        (["gs://bucket/run"], "only s3:// addresses and local directories"),
        (["s3://key:secret@bucket/run"], "leave them to the environment"),
        (["s3://bucket"], "write it as s3://<bucket>/<prefix>/<run key>"),
        (["s3://bucket/a/../b"], "dotted parts"),
        (["s3://bucket/run?x=1"], "remove the part after"),
        (["{root}", "--submission", "../x"], "is no submission id"),
        (["{root}", "--submission", "other"], f"there are: {SUBMISSION}"),
        (["{root}/train"], "holds no exports/"),
        (["{root}", "--expect", "/nowhere.json"], "cannot be read"),
        (["{root}", "--expect", "{root}/exports"], "cannot be read"),
        (["{root}", "--json", "/nowhere/x.json"], "cannot be written"),
    ],
)
def test_unusable_input_is_one_line_with_the_remedy(
    sound: SmallRun, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    status = inspect_results.main([argument.replace("{root}", str(sound.root)) for argument in arguments])
    said = capsys.readouterr().err
    assert status == 2
    assert words in said
    assert said.count("\n") == 1
    assert "secret" not in said


def test_unreachable_storage_is_unusable_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    assert inspect_results.main(["s3://bucket/prefix/run"]) == 2
    said = capsys.readouterr().err
    assert "AWS_ENDPOINT_URL" in said
    assert "canary" not in said


@pytest.mark.parametrize("main", [inspect_results.main, last_commit.main])
def test_a_shell_without_the_embedded_servers_variables_is_told_so_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int]
) -> None:
    """The report's line, typed where nobody sourced them: AWS is asked, which may be right, or cannot be."""
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    asked: list[int] = []

    class Unresolved:
        def get_file_info(self, path: str) -> Any:
            raise OSError("AWS Error NETWORK_CONNECTION: curlCode: 6, Couldn't resolve host name")

    def filesystem(*, attempts: int) -> Any:
        asked.append(attempts)
        return Unresolved()

    monkeypatch.setattr(storage, "filesystem", filesystem)
    assert main(["s3://lanyard/runs/run"]) == 2
    said = capsys.readouterr().err
    assert "AWS_ENDPOINT_URL is not set" in said
    assert "`. .lanyard/env`" in said
    assert said.count("\n") == 1
    assert main(["s3://lanyard/runs/run", "--patient"]) == 2
    assert asked == [HASTY_ATTEMPTS, PATIENT_ATTEMPTS]


def test_a_runs_own_export_is_inspected_beside_that_of_its_parity_training(
    run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line in a run's report names no submission."""
    parity = f"{RUN_KEY}-parity"
    shutil.copytree(run.export, run.root / "exports" / parity)
    status, outcome = inspected(run, tmp_path)
    assert (status, outcome["submission_id"]) == (0, SUBMISSION)
    said = capsys.readouterr()
    assert f"inspecting the run's own export, {SUBMISSION}; for another use --submission: {parity}" in said.err
    assert inspected(run, tmp_path, "--submission", parity)[1]["submission_id"] == parity


def test_several_exports_are_listed_to_choose_from(
    run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.export, run.root / "exports" / "other-train")
    assert inspect_results.main([str(run.root)]) == 2
    said = capsys.readouterr().err
    assert "other-train" in said
    assert SUBMISSION in said
    assert inspected(run, tmp_path, "--submission", SUBMISSION)[0] == 0


def test_copied_export_under_another_id_is_refused(run: SmallRun, tmp_path: Path) -> None:
    shutil.copytree(run.export, run.root / "exports" / "other-train")
    status, outcome = inspected(run, tmp_path, "--submission", "other-train")
    assert status == 1
    assert {"metrics.json", "ranks", "recording", "result", "state.pt"} <= set(failures(outcome))


def test_command_runs_alone_and_prints_json(sound: SmallRun) -> None:
    command = [sys.executable, "-m", "trainer.inspect_results", str(sound.root), "--json", "-"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["ok"] is True
    loaded = "import sys, trainer.inspect_results; print(sorted(m.split('.')[0] for m in sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    for foreign in ("'ray'", "'workflows'", "'activities'", "'worker'", "'temporalio'"):
        assert foreign not in modules


def test_tool_that_hangs_is_ended(sound: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "rerun"
    program.write_text("#!/bin/sh\nsleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(recording, "TOOL_TIMEOUT_S", 0.3)
    with pytest.raises(Failed, match="did not end within"):
        recording.check_tool(sound.export / "metrics.rrd", "verify")


def test_outcome_speaks_to_no_terminal(run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest(lambda text: text + "\x1b[2J\n")(run)
    inspected(run, tmp_path)
    assert "\x1b" not in capsys.readouterr().out


# From object storage, whose place a directory takes here.


@pytest.fixture
def bucket(run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallRun:
    place = tmp_path / "objects" / "bucket" / "runs" / RUN_KEY
    shutil.copytree(run.root, place)
    objects = pafs.SubTreeFileSystem(str(tmp_path / "objects"), pafs.LocalFileSystem())
    monkeypatch.setattr(storage, "filesystem", lambda **_: objects)
    return SmallRun(place)


def objects_of(bucket: SmallRun) -> Any:
    return pafs.SubTreeFileSystem(str(bucket.root.parents[2]), pafs.LocalFileSystem())


ADDRESS = f"s3://bucket/runs/{RUN_KEY}"


def test_run_is_inspected_from_storage_alone(bucket: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_results.main([ADDRESS + "/", "--json", "-"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["location"] == ADDRESS
    flips("state.pt")(bucket)
    assert inspect_results.main([ADDRESS, "--json", "-"]) == 1
    assert "state.pt differs from its checksum" in failures(json.loads(capsys.readouterr().out))["manifest"]


def test_the_runs_own_export_is_told_by_its_address(bucket: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(bucket.export, bucket.root / "exports" / "other-train")
    assert inspect_results.main([ADDRESS, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["submission_id"] == SUBMISSION


def test_run_copied_under_another_key_is_refused(bucket: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    bucket.root.rename(bucket.root.with_name("other-9876543210"))
    assert inspect_results.main(["s3://bucket/runs/other-9876543210", "--json", "-"]) == 1
    found = failures(json.loads(capsys.readouterr().out))
    assert {"metrics.json", "result", "state.pt"} <= set(found)
    assert "run_key is 'small-0123456789', not 'other-9876543210'" in found["result"]


def test_empty_prefix_is_unusable_input(bucket: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_results.main(["s3://bucket/runs/nothing"]) == 2
    assert "nothing is stored under s3://bucket/runs/nothing" in capsys.readouterr().err
    # For a resume that is an answer: there is no commit.
    assert last_commit.main(["s3://bucket/runs/nothing"]) == 3


def test_object_over_its_limit_is_not_downloaded(
    bucket: SmallRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence_module, "EVIDENCE_LIMIT", 100)
    assert inspect_results.main([ADDRESS, "--json", "-"]) == 1
    assert "over the limit of 100" in failures(json.loads(capsys.readouterr().out))["ranks"]


class Falters:
    """Object storage that does not answer for what ends in ``word``."""

    def __init__(self, objects: Any, word: str) -> None:
        self._objects, self._word = objects, word

    def get_file_info(self, what: Any) -> Any:
        return self._objects.get_file_info(what)

    def open_input_stream(self, path: str) -> Any:
        if path.endswith(self._word):
            raise OSError("AWS Error NETWORK_CONNECTION")
        return self._objects.open_input_stream(path)


@pytest.mark.parametrize("word", ["state.pt", "metrics.json", "rank-1.start.json", "snapshot.json", "SHA256SUMS"])
def test_storage_that_does_not_answer_proves_nothing(
    bucket: SmallRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    faltering = Falters(objects_of(bucket), word)
    monkeypatch.setattr(storage, "filesystem", lambda **_: faltering)
    assert inspect_results.main([ADDRESS]) == 2
    said = capsys.readouterr()
    assert "storage did not answer" in said.err
    assert word in said.err
    # The table is still shown, with all that could be seen.
    assert "rrd verify" in said.out


@pytest.mark.parametrize("word", ["snapshot.json", f"{FINAL_COMMIT}/checkpoint.pt", f"{FINAL_COMMIT}/journal.json"])
def test_silent_storage_is_not_taken_for_a_damaged_commit(
    bucket: SmallRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    faltering = Falters(objects_of(bucket), word)
    monkeypatch.setattr(storage, "filesystem", lambda **_: faltering)
    assert last_commit.main([ADDRESS]) == 2
    assert "storage did not answer" in capsys.readouterr().err


def test_last_commit_is_found_in_storage(bucket: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    truncates(native)(bucket)
    assert last_commit.main([ADDRESS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"] == f"{ADDRESS}/train/main/{commit_name(20, 2)}"
    assert found["step"] == STEPS - 4
    assert found["skipped"][0]["checkpoint"] == f"{ADDRESS}/train/main/{FINAL_COMMIT}"


# The newest commit that loads.


def last(root: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    status = last_commit.main([str(root), *options])
    said = capsys.readouterr()
    return status, json.loads(said.out) if said.out else {}, said.err


def test_newest_commit_is_found(sound: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    status, found, _ = last(sound.root, capsys)
    assert status == 0
    assert found == {
        "schema": 1,
        "checkpoint": f"{sound.root}/train/main/{FINAL_COMMIT}",
        "step": STEPS,
        "skipped": [],
    }


def test_damaged_commits_are_skipped_and_named(run: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    truncates(native)(run)
    folder = run.root / "train" / "main"
    run.resave(folder / commit_name(20, 2) / "checkpoint.pt", forgets_momentum)
    shutil.rmtree(folder / commit_name(16, 2))
    run.edit(folder / commit_name(12, 2) / "journal.json", lambda document: document.update(checkpoint_sha256=OTHER))
    status, found, _ = last(run.root, capsys)
    assert status == 0
    assert found["step"] == KILLED_AT
    whys = [skipped["why"] for skipped in found["skipped"]]
    assert ["truncated" in whys[0], "incomplete" in whys[1], "missing" in whys[2], "names another" in whys[3]] == [
        True
    ] * 4


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({}, ""),
        ({"recipe": {"steps": 2000, "checkpoint_interval": 100}}, ""),
        *(({"recipe": {key: RECIPE[key] + 1}}, f"{key} ") for key in RECIPE.keys() - {"steps", "checkpoint_interval"}),
        ({"world_size": 3}, "world size 2 there, 3 here"),
        ({"recipe": {"steps": STEPS - 1}}, "raise steps"),
    ],
    ids=str,
)
def test_a_commit_of_another_training_is_no_start_of_this_one(
    sound: SmallRun, capsys: pytest.CaptureFixture[str], training: dict[str, Any], says: str
) -> None:
    """What the training would refuse on its hosts is refused before there are any."""
    wanted = {"recipe": {**RECIPE, **training.get("recipe", {})}, "world_size": training.get("world_size", 2)}
    status, _, said = last(sound.root, capsys, "--for", json.dumps(wanted))
    assert (status, says in said, bool(said)) == ((3, True, True) if says else (0, True, False))


def test_newest_is_by_report_not_by_position(run: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot(lambda document: document["checkpoint_results"].insert(0, document["checkpoint_results"].pop()))(run)
    snapshot(
        lambda document: document["checkpoint_report_indices"].insert(0, document["checkpoint_report_indices"].pop())
    )(run)
    assert last(run.root, capsys)[1]["step"] == STEPS


def test_no_commit_that_loads_is_status_three(run: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    for checkpoint in run.root.glob("train/main/*/checkpoint.pt"):
        checkpoint.write_bytes(b"")
    status, _, said = last(run.root, capsys)
    assert status == 3
    assert "none of the 6 commits" in said


def test_root_without_commits_is_status_three(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, said = last(tmp_path, capsys)
    assert status == 3
    assert "has no commit to continue from" in said
    assert last(tmp_path / "nowhere", capsys)[0] == 2


def test_script_commit_that_is_whole_is_found(run: SmallRun, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in run.root.glob("train/main/checkpoint_*/"):
        (folder / "checkpoint.pt").unlink()
        (folder / "journal.json").rename(folder / "model.json")
    assert last(run.root, capsys)[0] == 3
    (run.checkpoint / "model.json").write_bytes(b"")
    status, found, _ = last(run.root, capsys, "--workload", "script")
    assert status == 0
    assert found["step"] == STEPS - 4
    assert "holds no bytes" in found["skipped"][0]["why"]


# What training and inspection share.


def test_exports_of_the_application_itself_pass(run: SmallRun, tmp_path: Path) -> None:
    """The files it builds, from the checkpoint it wrote, are those that the inspector asks for."""
    # Imported here: the inspector itself must load no Ray, and a test above looks.
    from trainer import checkpoints, exports, job

    held = torch.load(native(run), weights_only=True)
    journal = json.loads((run.checkpoint / "journal.json").read_text())["steps"]
    checkpoints.write(
        run.checkpoint,
        step=held["step"],
        model=held["model"],
        optimizer=held["optimizer"],
        steps=journal,
        recipe=RECIPE,
        world_size=2,
    )
    restored = checkpoints.load(
        pafs.SubTreeFileSystem(str(run.root), pafs.LocalFileSystem()), f"train/main/{FINAL_COMMIT}"
    )
    attempts = json.loads((run.export / "metrics.json").read_text())["attempts"]
    ranks_final = json.loads((run.export / "result.json").read_text())["ranks_final"]
    files = exports.build(job.parse(json.dumps(ORDER)), restored, attempts, ranks_final)
    for name, data in files.items():
        (run.export / name).write_bytes(data)
    status, outcome = inspected(run, tmp_path, order=ORDER)
    assert failures(outcome) == {}
    assert status == 0


def test_hash_sees_every_bit_name_type_and_shape() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    changed = tensor.clone()
    changed[1, 2] = torch.nextafter(changed[1, 2], torch.tensor(math.inf))
    hashes = {
        model_sha256(state)
        for state in (
            {"a": tensor},
            {"b": tensor},
            {"a": changed},
            {"a": tensor.double()},
            {"a": tensor.reshape(3, 2)},
            {"a": tensor.t()},
            {"a": tensor, "b": tensor},
            {"a": tensor.bfloat16()},
        )
    }
    assert len(hashes) == 8
    assert model_sha256({"a": tensor.t().contiguous()}) == model_sha256({"a": tensor.t()})
    assert model_sha256({"a": tensor, "b": changed}) == model_sha256({"b": changed, "a": tensor})
    with pytest.raises(TypeError, match="a is str"):
        model_sha256({"a": "tensor"})


def test_hash_is_the_same_on_every_machine() -> None:
    written = b'["w","torch.float32",[1,2]]\n' + struct.pack("<ff", 1.0, -2.5)
    assert model_sha256({"w": torch.tensor([[1.0, -2.5]])}) == hashlib.sha256(written).hexdigest()
    fresh = build_optimizer(RECIPE, build_model(RECIPE)).state_dict()
    assert momentum_sha256(fresh) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_synthetic_data_is_a_function_of_the_recipe() -> None:
    first, again = shard(RECIPE, 0, 2), shard(RECIPE, 0, 4)
    assert torch.equal(first[0], again[0])
    assert first[0].shape == (RECIPE["samples_per_rank"], RECIPE["features"])
    assert not torch.equal(first[0], shard(RECIPE, 1, 2)[0])
    assert not torch.equal(first[0], shard({**RECIPE, "seed": 8}, 0, 2)[0])
    assert held_out_loss(RECIPE, build_model(RECIPE)) == held_out_loss(RECIPE, build_model(RECIPE))
    with pytest.raises(ValueError, match="rank 2 does not exist"):
        shard(RECIPE, 2, 2)
