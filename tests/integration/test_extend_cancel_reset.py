"""What a person does to a run with the `temporal` CLI while it trains: extend, ask, cancel, reset."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.census import Census
from tests.integration.runs import left_by, regression
from tests.integration.stack import Stack, Started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

LONG = {"kind": "regression", "recipe": {"steps": 4000, "checkpoint_interval": 4}}
"""Far from done when the test is."""


def extended(stack: Stack, run: Started, minutes: str) -> tuple[bool, str]:
    done = stack.cli(
        "workflow", "update", "execute", *stack.at(run), "--name", "extend", "--input", minutes, check=False
    )
    return done.returncode == 0, done.stdout + done.stderr


def nothing_left(census: Census) -> bool:
    found = census.take()
    return (found.processes, found.ports, found.entries, found.uploads) == ((), (), (), ())


def test_a_run_is_extended_asked_and_cancelled(stack: Stack, census: Census) -> None:
    """`extend` moves the run's deadline and custody's, and refuses nonsense in words; a cancel ends
    it Canceled with everything released and the last commit named."""
    run = stack.train("extend", regression("extend", workload=LONG))
    stack.wait_for(run, "a commit", lambda told: told["step"] > 0, 150)
    before = stack.query(run, "progress")["deadline"]
    custody = stack.custody(run)
    custody_before = stack.query(custody, "state")["deadline"]
    accepted, said = extended(stack, run, "30")
    assert accepted, said
    assert stack.query(run, "progress")["deadline"] == pytest.approx(before + 1800)
    assert stack.query(custody, "state")["deadline"] == pytest.approx(custody_before + 1800)
    for minutes in ("0", "1441", '"soon"', "true", "null"):
        accepted, said = extended(stack, run, minutes)
        assert not accepted
        assert "extend takes a number of minutes from 1 to 1440" in said

    held = stack.query(custody, "claims")
    assert [each["kind"] for each in held] == ["cluster", "service", "job"]

    stack.cli("workflow", "cancel", *stack.at(run))
    stack.cli("workflow", "cancel", *stack.at(run), check=False)
    stack.wait(run, 120)
    assert stack.status(run) == "CANCELED"
    assert stack.last_word(run)["cleanup"] == "clean"
    assert nothing_left(census)
    left = left_by(stack, run)
    verdict: dict[str, Any] = stack.query(run, "verdict")
    assert (verdict["outcome"], verdict["cleanup"]) == ("cancelled", "clean")
    assert f"step {left.committed_steps()[-1]}" in verdict["message"]
    assert left.document("report.json")["outcome"] == "cancelled"


def test_a_reset_run_touches_nothing_more_and_says_how_to_go_on(stack: Stack, census: Census) -> None:
    """`temporal workflow reset` in training: custody sees the old execution closed and releases; the new one's claims
    are refused and it ends Failed, with resume; the report is the one of the execution that spoke."""
    run = stack.train("reset", regression("reset", workload=LONG))
    stack.wait_for(run, "a commit", lambda told: told["step"] > 0, 150)
    custody = stack.custody(run)
    told = stack.asked(
        "workflow", "reset", *stack.at(run), "--type", "LastWorkflowTask", "--reason", "the test says so"
    )
    again = Started(run.workflow_id, told["runId"], run.namespace)
    assert again.run_id != run.run_id

    stack.wait(again, 150)
    assert (stack.status(run), stack.status(again)) == ("TERMINATED", "FAILED")
    kind, message, verdict = stack.failure(again)
    assert kind == "failed"
    assert "reset after release; start again with resume" in message
    stack.wait(custody, 60)
    assert stack.result(custody)["cleanup"] == "clean"
    assert nothing_left(census)
    left = left_by(stack, run)
    assert f'"resume": {{"from": "{left.uri}"}}' in message
    assert left.document("report.json")["run_id"] == verdict["run_id"] == again.run_id
