"""The inspector and the search for the last commit, from object storage alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

from tests.trainer.small_run import (
    FINAL_COMMIT,
    RUN_KEY,
    SUBMISSION,
    SmallRun,
    commit_name,
)
from tests.trainer.tampering import (
    STEPS,
    failures,
    flips,
    native,
    truncates,
)
from trainer import inspect_results, last_commit
from trainer.inspection import evidence as evidence_module
from trainer.inspection import storage

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
