"""A run that is terminated cannot speak or clean up: custody does both."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from tests.integration.census import Census
from tests.integration.runs import left_by, regression
from tests.integration.stack import Stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]


def when(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["eventTime"][:26].rstrip("Z") + "+00:00").timestamp()


def test_a_terminate_in_training_releases_at_once_and_is_reported_by_custody(stack: Stack, census: Census) -> None:
    """`temporal workflow terminate` after a commit: release is scheduled within 2 s of it, nothing is left when
    custody closes, and custody writes the report of outcome `terminated` with the commit to go on from."""
    run = stack.train("terminate", regression("terminate"))
    stack.wait_for(run, "a commit", lambda told: told["step"] > 0, 120)
    left = left_by(stack, run)
    custody = stack.custody(run)
    stack.cli("workflow", "terminate", *stack.at(run), "--reason", "the test says so")

    stack.wait(custody, 120)
    assert census.take().lines() == []
    assert stack.status(run) == "TERMINATED"
    release = stack.result(custody)
    assert (release["cleanup"], release["remaining"]) == ("clean", [])
    assert [each for each in release["steps"] if not each["ok"]] == []

    ended = stack.events(run)[-1]
    assert ended["eventType"] == "EVENT_TYPE_WORKFLOW_EXECUTION_TERMINATED"
    history = stack.events(custody)
    assert len(history) <= 150
    began = next(
        each
        for each in history
        if each.get("activityTaskScheduledEventAttributes", {}).get("activityType", {}).get("name") == "release"
    )
    assert when(began) - when(ended) <= 2.0

    steps = left.committed_steps()
    report = left.document("report.json")
    assert (report["outcome"], report["cleanup"]) == ("terminated", "clean")
    assert report["resume_from"] == left.uri
    assert f"step {steps[-1]}" in report["message"]
    assert left.uri in report["message"]
    assert any(each.startswith("artifacts") for each in report["not_proved"])
    assert left.document("release.json")["cleanup"] == "clean"
    assert b"terminated" in left.raw("report.html")
    assert not [name for name in left.names("exports/") if name.endswith("SHA256SUMS")]
