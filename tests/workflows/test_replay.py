"""The histories of each kind of ending still replay: a running run survives an upgrade of its worker.

They were recorded by `python -m pytest tests/workflows --record-histories`, which keeps those of earlier versions. A
history that no longer replays says that runs which are under way would break: the change is made compatible
(`workflow.patched`). A change of what is commanded fails where the history is made (`keep_history`).
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from tests.workflows.conftest import HISTORIES, recorded_events
from tests.workflows.fingerprints import change, fingerprint, patches
from tests.workflows.server import WORKFLOWS, runner
from workflows import activity_names
from workflows.decoding import data_converter

RECORDED = sorted(HISTORIES.rglob("*.json"))
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


def test_a_fingerprint_tells_every_command_more_less_or_renamed() -> None:
    events = recorded_events(HISTORIES / "run-succeeded.json")
    usual = fingerprint(events)
    commands = [event for event in events if fingerprint([event])]
    assert usual.total() == len(commands) > 20
    for event in commands:
        [name] = fingerprint([event])
        without = fingerprint(each for each in events if each is not event)
        assert change(usual, without) == [f"-1 {name}"]
        assert change(usual, fingerprint([*events, event])) == [f"+1 {name}"]
    [renamed] = json.loads(json.dumps([commands[1]]).replace('"orient"', '"preflight"'))
    assert len(change(fingerprint([commands[1]]), fingerprint([renamed]))) == 2


def test_a_patch_is_no_command_of_its_own() -> None:
    events = recorded_events(HISTORIES / "custody-of-a-run-that-succeeded.json")
    assert len(patches(events)) == 1
    marked = [event for event in events if patches([event])]
    assert fingerprint(marked).total() == 0


def test_each_kind_of_ending_has_its_history() -> None:
    assert {path.stem for path in RECORDED if path.parent == HISTORIES} >= ENDINGS


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_history_names_no_machine(path: Path) -> None:
    text = path.read_text()
    assert "stackTrace" not in text
    for event in json.loads(text)["events"]:
        for attributes in (part for part in event.values() if isinstance(part, dict)):
            assert attributes.get("identity", "test") in ("test", "history-service", "temporal-system"), event
