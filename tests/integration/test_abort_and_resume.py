"""A run aborted by signal, and one that goes on from its last commit while its worker is killed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.integration.census import Census
from tests.integration.full_run import Carried
from tests.integration.runs import STEPS, Left, left_by, regression
from tests.integration.stack import Stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

STEPS_MIDWAY = STEPS // 4
SLOWLY = {"kind": "regression", "recipe": {"steps": STEPS, "checkpoint_interval": 1}}
"""The same training, with four times the commits: what is done to it half-way has the time of as many reports."""


@pytest.fixture(scope="module")
def aborted(stack: Stack, census: Census) -> Left:
    """Aborted in training. Its workflow id has characters that neither Ray's Jobs API nor S3 keys would bear."""
    run = stack.train("abort me/ü%2F", regression("aborted", workload=SLOWLY))
    stack.wait_for(run, "commits", lambda told: told["step"] >= STEPS_MIDWAY, 150)
    stack.cli("workflow", "signal", *stack.at(run), "--name", "abort", "--input", '"enough is known"')
    stack.wait(run, 120)
    assert stack.status(run) == "COMPLETED"
    verdict = stack.result(run)
    left = left_by(stack, run)
    steps = left.committed_steps()
    assert (verdict["outcome"], verdict["cleanup"]) == ("aborted", "clean"), verdict["message"]
    assert "enough is known" in verdict["message"]
    assert STEPS_MIDWAY <= steps[-1] < STEPS
    # The message names where to go on from, and the commit that is really the last.
    assert f'"resume": {{"from": "{left.uri}"}}' in verdict["message"]
    assert f"step {steps[-1]}" in verdict["message"]
    assert verdict["resume_from"] == left.uri

    assert stack.last_word(run)["cleanup"] == "clean"
    found = census.take()
    assert (found.processes, found.ports, found.entries, found.uploads) == ((), (), (), ())
    report = left.document("report.json")
    assert (report["outcome"], report["cleanup"]) == ("aborted", "clean")
    assert b"aborted" in left.raw("report.html")
    assert f"logs/{left.key}-train.log" in left.names("logs/")
    return left


def test_abort_by_signal_completes_the_run_released_reported_and_ready_to_resume(aborted: Left) -> None:
    """Completed; aborted and clean; report and logs written; the message names the last commit in storage."""
    assert aborted.committed_steps()


def test_a_resumed_run_survives_its_workers_sigkill_and_ends_equal_to_an_uninterrupted_one(
    aborted: Left, full: Carried, stack: Stack, census: Census
) -> None:
    """Goes on at the aborted run's commit + 1; the worker is SIGKILLed in training, its successor takes over the
    watch; succeeded and clean; the final parameters are the full run's, bit for bit (same recipe, same seed)."""
    commit = aborted.committed_steps()[-1]
    # The session's own stack restarts the worker; a second start finds the run where it was.
    run = stack.train("resume", regression("resumed", workload=SLOWLY, resume={"from": aborted.uri}))
    stack.wait_for(run, "a commit of its own", lambda told: told["phase"] == "train" and told["step"] > commit, 150)
    before = stack.worker_pid()
    os.kill(before, signal.SIGKILL)
    killed = time.time()

    stack.wait(run, 240)
    assert stack.worker_pid() != before
    verdict = stack.result(run)
    assert (verdict["outcome"], verdict["cleanup"]) == ("succeeded", "clean"), verdict["message"]
    assert verdict["artifacts"]["ok"]
    assert verdict["resumed"]["step"] == commit
    assert verdict["resumed"]["source"] == aborted.uri
    # It was still at work when its worker died: nothing else ended it.
    assert verdict["phases"][-1]["ended"] > killed
    assert next(each for each in verdict["phases"] if each["name"] == "release")["started"] > killed
    assert stack.last_word(run)["cleanup"] == "clean"
    found = census.take()
    assert (found.processes, found.ports, found.entries, found.uploads) == ((), (), (), ())

    left = left_by(stack, run)
    assert [each["restored_step"] for each in left.evidence(1, "start")] == [commit, commit]
    assert all(each["restored_from"].startswith(aborted.uri) for each in left.evidence(1, "start"))
    assert [each["step"] for each in left.evidence(1, "first-step")] == [commit + 1, commit + 1]
    metrics = left.exported("metrics.json")
    assert [each["step"] for each in metrics["steps"]] == list(range(1, STEPS + 1))
    assert left.checksums_hold()
    ours, uninterrupted = left.exported("result.json"), full.left.exported("result.json")
    for what in ("parameters_sha256", "momentum_sha256", "final_step"):
        assert ours[what] == uninterrupted[what], what
    assert len(stack.events(run)) <= 250
