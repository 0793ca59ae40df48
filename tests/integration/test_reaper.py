"""A run and its custody that both vanish the hard way leave orphans: the reaper finds and releases them."""

from __future__ import annotations

import pytest

from tests.integration.census import Census
from tests.integration.runs import left_by, regression
from tests.integration.stack import Stack, Started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


def test_what_a_terminated_custody_left_is_found_by_the_schedule_and_released(stack: Stack, census: Census) -> None:
    """`temporal workflow terminate` of custody and then of the run, in training; then `temporal schedule trigger`. Two
    looks, two minutes apart, and everything is gone, by a custody of the same id."""
    run = stack.train("orphan", regression("orphan"))
    stack.wait_for(run, "a commit", lambda told: told["step"] > 0, 120)
    left = left_by(stack, run)
    custody = stack.custody(run)
    stack.cli("workflow", "terminate", *stack.at(custody), "--reason", "the test says so")
    stack.cli("workflow", "terminate", *stack.at(run), "--reason", "the test says so")
    assert stack.status(custody) == stack.status(run) == "TERMINATED"
    assert census.take().processes  # nobody has released anything

    stack.reap()
    again = stack.reopened(custody, 180)
    stack.wait(again, 120)
    assert census.settled(30).lines() == []
    release = stack.result(again)
    assert (release["cleanup"], release["remaining"]) == ("clean", [])
    assert release["reason"] == "found by the reaper: its custody was terminated"
    assert [each for each in release["steps"] if not each["ok"]] == []
    assert len(stack.events(again)) <= 150
    assert left.document("release.json")["cleanup"] == "clean"
    report = left.document("report.json")
    assert (report["outcome"], report["cleanup"]) == ("terminated", "clean")

    parent = stack.describe(again)["workflowExecutionInfo"]["parentExecution"]
    reaper = Started(parent["workflowId"], parent["runId"], run.namespace)
    assert reaper.workflow_id.startswith(f"reaper-{stack.env['LANYARD_DEPLOYMENT']}-")
    stack.wait(reaper, 60)
    done = stack.result(reaper)
    assert done["orphans"] == [{"custody_id": custody.workflow_id, "custody": "terminated", "handed_over": True}]
    assert (done["foreign"], done["unreadable"]) == (0, 0)
    assert len(stack.events(reaper)) <= 60
