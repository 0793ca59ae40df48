"""Results are added to, merged, and shown; what is recorded is not run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.__main__ import main
from tests.chaos.carrying import Row
from tests.chaos.results import Results
from tests.chaos.scenarios import light


def row(name: str, seed: int = 0, **changes: Any) -> dict[str, Any]:
    _, where, victim, ending = name.split("/")
    made = Row(id=name, slice="light", where=where, victim=victim, ending=ending, seed=seed)
    return {**made.json(), "outcome": "succeeded", "cleanup": "clean", **changes}


def test_rows_are_added_and_replaced_and_the_page_shows_what_is_wrong_first(tmp_path: Path) -> None:
    results = Results(tmp_path / "chaos.json")
    results.add([row("light/a/worker/succeeds"), row("light/b/worker/abort", leaks=["process 7 <sleep>"])])
    told = results.add([row("light/a/worker/succeeds", outcome="failed", wrong=["outcome failed"])])
    assert (told["scenarios"], told["leaks"], told["wrong_verdicts"]) == (2, 1, 1)
    assert json.loads((tmp_path / "chaos.json").read_text()) == told
    page = (tmp_path / "chaos.html").read_text()
    assert "process 7 &lt;sleep&gt;" in page
    assert "http" not in page.replace("http-equiv", "")


def test_shards_merge_without_what_is_no_scenario_any_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, merged = (tmp_path / f"{name}.json" for name in ("one", "two", "merged"))
    first, second = (each.id for each in light(0)[:2])
    [other, *_] = (each.id for each in light(1))
    Results(one).add([row(first), row("light/an_activity_that_is_gone:half/worker/succeeds", trouble="stuck")])
    Results(two).add([row(second), row(other, seed=1)])
    assert main(["--results", str(merged), "--merge", str(one), str(two)]) == 0
    assert set(Results(merged).rows()) == {(first, 0), (second, 0), (other, 1)}


def test_what_is_recorded_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chaos.json"
    Results(file).add([row(each.id) for each in light(0)])
    assert main(["--results", str(file)]) == 0
    assert "0 scenarios to run" in capsys.readouterr().out


def test_a_recorded_wrong_stays_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chaos.json"
    [first, *rest] = [each.id for each in light(0)]
    Results(file).add([row(first, wrong=["a wrong verdict"]), *(row(each) for each in rest)])
    assert main(["--results", str(file)]) == 1


def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chaos.json"
    file.write_text("[]")
    assert main(["--results", str(file)]) == 2
    assert file.read_text() == "[]"
    assert "holds no results" in capsys.readouterr().err


def test_the_list_names_what_the_filter_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "temporal abort"]) == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    assert lines
    assert all("temporal" in line and "abort" in line for line in lines)
