"""Trainings that fail and trainings that stall: Failed with the reason, everything saved and released."""

from __future__ import annotations

import time

import pytest

from tests.integration.census import Census
from tests.integration.runs import INTERVAL, Left, left_by, script
from tests.integration.stack import Stack, Started

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

COMMITTED = 2 * INTERVAL
STALL_S = 75
"""From the submission to the first commit it takes about 30 s on two quiet cores."""


def ended_failed(stack: Stack, run: Started) -> tuple[str, Left]:
    """The message of a Failed run, whose verdict, report, logs and release are as they must be."""
    stack.wait(run, 240)
    assert stack.status(run) == "FAILED"
    kind, message, verdict = stack.failure(run)
    left = left_by(stack, run)
    assert kind == "failed"
    assert (verdict["outcome"], verdict["cleanup"]) == ("failed", "clean"), message
    assert message == f"failed: {verdict['message']}"
    assert stack.last_word(run)["cleanup"] == "clean"
    report = left.document("report.json")
    assert (report["outcome"], report["cleanup"], report["message"]) == ("failed", "clean", verdict["message"])
    assert left.raw(f"logs/{left.key}-train.log")
    assert left.document(f"logs/{left.key}-train.status.json")["submission_id"] == f"{left.key}-train"
    return message, left


def test_a_training_that_fails_ends_with_its_error_its_logs_and_the_commit_to_go_on_from(
    stack: Stack, census: Census
) -> None:
    """A script workload raises after its second commit: the message has its words, not Ray's around them."""
    run = stack.train("fail", script("fail", "fail"))
    message, left = ended_failed(stack, run)
    found = census.take()
    assert (found.processes, found.ports, found.entries, found.uploads) == ((), (), (), ())
    assert "training failed" in message
    assert f"the samples of step {COMMITTED + 1} are damaged" in message
    assert f"the samples of step {COMMITTED + 1} are damaged" in left.raw(f"logs/{left.key}-train.log").decode()
    assert left.document(f"logs/{left.key}-train.status.json")["status"] == "FAILED"
    assert left.committed_steps() == [INTERVAL, COMMITTED]
    assert f"step {COMMITTED}" in message
    assert left.uri in message


def test_two_stalled_trainings_side_by_side_each_end_with_their_own_diagnosis(stack: Stack, census: Census) -> None:
    """One stops reporting after two commits; one asks for CPUs that no node has. Both run at once on one worker, each
    on hosts of its own: both end Failed within the limit, each diagnosis is its own, neither release hurts the other,
    and nothing is left of either."""
    limits = {"stall": f"{STALL_S}s"}
    quiet = stack.train("stall", script("stall", "stall", limits=limits))
    greedy = stack.train("greedy", script("greedy", "greedy", limits=limits))
    stack.wait_for(quiet, "two commits", lambda told: told["step"] == COMMITTED, 200)
    committed = time.monotonic()

    message, left = ended_failed(stack, quiet)
    assert time.monotonic() - committed >= STALL_S
    assert "stalled" in message
    assert "limits.stall" in message
    assert "every node is alive and nothing waits for resources" in message
    assert f"step {COMMITTED}" in message
    assert left.document(f"logs/{left.key}-train.status.json")["status"] == "RUNNING"  # as it was before the release

    message, left = ended_failed(stack, greedy)
    assert "stalled" in message
    assert "no node can meet CPU 64" in message
    assert "resume" not in message
    found = census.take()
    assert (found.processes, found.ports, found.entries, found.uploads) == ((), (), (), ())
