"""The inspector accepts every sound run, refuses what it was not asked for, and says so in one line."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
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
)
from tests.trainer.tampering import (
    OTHER,
    Tamper,
    evidence,
    failures,
    flips,
    inspected,
    kept_commit,
    manifest,
    metrics,
    native,
    packs,
    placed,
    put_beside,
    record_with,
    row,
    snapshot,
)
from trainer import inspect_results, last_commit
from trainer.hashing import momentum_sha256
from trainer.inspection import record as record_module
from trainer.inspection import recording, storage
from trainer.inspection.checklist import Failed
from trainer.storage import HASTY_ATTEMPTS, PATIENT_ATTEMPTS


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

    metrics(lambda document: document["held_out"].update(initial_loss=15.0))(run)
    assert "metrics.json says 15.0" in json.dumps(failures(inspected(run, tmp_path)[1]))


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


def test_rerun_says_why_it_refuses_and_nothing_of_its_own_statistics(sound: SmallRun, tmp_path: Path) -> None:
    short = tmp_path / "short.rrd"
    short.write_bytes((sound.export / "metrics.rrd").read_bytes()[:-40])
    with pytest.raises(Failed) as refused:
        recording.check_tool(short, "verify")
    assert "analytics" not in str(refused.value)
    assert "RRD" in str(refused.value)


def test_outcome_speaks_to_no_terminal(run: SmallRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest(lambda text: text + "\x1b[2J\n")(run)
    inspected(run, tmp_path)
    assert "\x1b" not in capsys.readouterr().out


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
