"""The histories of each kind of ending still replay: a running run survives an upgrade of its worker.

They were recorded by `python -m pytest tests/workflows --record-histories`. A history that no longer replays says that
runs which are under way would break: either the change is made compatible (`workflow.patched`), or, while nothing has
been released, the histories are recorded anew.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from tests.workflows.conftest import HISTORIES
from tests.workflows.server import WORKFLOWS, runner
from workflows import activity_names
from workflows.decoding import data_converter

RECORDED = sorted(HISTORIES.glob("*.json"))
ENDINGS = {
    "run-succeeded",
    "run-with-drill-and-parity-succeeded",
    "run-failed",
    "run-rejected",
    "run-rejected-by-preflight",
    "run-aborted",
    "run-cancelled",
    "run-terminated",
    "run-that-timed-out",
    "run-that-lost-its-hosts",
    "run-reset-to-before-custodys-start",
    "run-reset-to-after-custodys-start",
    "run-extended-twenty-times",
    "run-past-its-teardown-limit",
    "run-too-late-launch",
    "run-too-late-run-limit-in-train",
    "custody-of-a-run-that-succeeded",
    "custody-of-a-run-with-drill-and-parity",
    "custody-of-a-terminated-run",
    "custody-of-a-timed-out-run",
    "custody-cancelled-while-releasing",
    "custody-past-its-deadline",
    "custody-that-struggled",
    "custody-extended-twenty-times",
    "custody-of-an-orphan",
    "reaper-with-an-orphan",
    "reaper-with-nothing-to-do",
}


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
async def test_a_recorded_history_replays(path: Path) -> None:
    await replay(path)


async def replay(path: Path, within_s: float = 30.0) -> None:
    """Raises when the workflows of today do something else than this history says."""
    recorded = WorkflowHistory.from_json("", path.read_text())
    # Every name of a run derives from its workflow id and namespace.
    workflow_id = recorded.events[0].workflow_execution_started_event_attributes.workflow_id
    replayer = Replayer(
        workflows=WORKFLOWS, workflow_runner=runner(), data_converter=data_converter, namespace="default"
    )
    # The replayer of SDK 1.35 does not always return from a history that does not replay.
    await asyncio.wait_for(replayer.replay_workflow(WorkflowHistory(workflow_id, recorded.events)), within_s)


async def test_a_history_of_another_story_does_not_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_names, "LAUNCH", "launch_something_else")
    with pytest.raises((NondeterminismError, asyncio.TimeoutError)):
        await replay(HISTORIES / "run-succeeded.json", within_s=5.0)


def test_each_kind_of_ending_has_its_history() -> None:
    assert {path.stem for path in RECORDED} >= ENDINGS


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_history_names_no_machine(path: Path) -> None:
    text = path.read_text()
    assert "stackTrace" not in text
    for event in json.loads(text)["events"]:
        for attributes in (part for part in event.values() if isinstance(part, dict)):
            assert attributes.get("identity", "test") in ("test", "history-service", "temporal-system"), event
