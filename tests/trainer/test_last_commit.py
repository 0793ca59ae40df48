"""The newest commit that loads is found, and each that does not is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.small_run import (
    FINAL_COMMIT,
    KILLED_AT,
    RECIPE,
    SmallRun,
    commit_name,
)
from tests.trainer.tampering import (
    OTHER,
    STEPS,
    forgets_momentum,
    native,
    snapshot,
    truncates,
)
from trainer import last_commit

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
        ({"recipe": {"steps": STEPS - 1}}, "raise workload.recipe.steps"),
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
