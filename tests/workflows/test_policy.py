"""Pure decisions: milestones, deadlines, renewals, names, and what is said of a failure."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType

from tests.activities.orders import HOSTS, IDENTITY
from tests.activities.stand_ins import claim
from tests.workflows.stand_ins import a_commit, watched
from workflows import presentation, timeouts
from workflows.evidence import NotApplicable, Suspect, Sweep
from workflows.names import custody_id, run_key, run_root, submission_id
from workflows.policy import (
    MILESTONES,
    custody_deadline,
    handed_over,
    lease_renewal_s,
    milestones,
    next_milestones,
    not_checked,
    not_proved,
    orphans,
    poll_s,
)

MOST = 20
"""Times that a watch may return (design: History and cost)."""


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, int, tuple[int, ...]]:
    """Steps, interval, and the commits a drill waits for."""
    interval = draw(st.integers(1, 500))
    steps = draw(st.integers(interval, 2_000 * interval))
    commits = steps // interval
    if commits < 3 or draw(st.booleans()):
        return steps, interval, ()
    after = draw(st.integers(1, commits - 2)) * interval
    return steps, interval, (after, after + interval)


@given(runs())
def test_milestones_are_commits_inside_the_run_in_order_and_few(run: tuple[int, int, tuple[int, ...]]) -> None:
    steps, interval, wanted = run
    marks = milestones(steps, interval, wanted)
    assert list(marks) == sorted(set(marks))
    assert all(0 < mark < steps and mark % interval == 0 for mark in marks)
    assert set(wanted) <= set(marks)
    assert len(marks) < MILESTONES <= MOST


@given(runs())
def test_no_more_than_half_of_a_run_passes_without_a_milestone(run: tuple[int, int, tuple[int, ...]]) -> None:
    steps, interval, wanted = run
    edges = [0, *milestones(steps, interval, wanted), steps]
    assert max(after - before for before, after in itertools.pairwise(edges)) <= steps / 2 + interval


@given(st.integers(8, 200), st.integers(1, 100), st.integers(2, 50), st.data())
def test_a_longer_run_has_as_many_milestones(commits: int, interval: int, times: int, data: st.DataObject) -> None:
    after = data.draw(st.integers(1, commits - 2)) * interval
    wanted = (after, after + interval)
    short = milestones(commits * interval, interval, wanted)
    assert len(milestones(times * commits * interval, interval, wanted)) == len(short)
    assert len(milestones(times * commits * interval, times * interval)) == len(
        milestones(commits * interval, interval)
    )


@pytest.mark.parametrize(
    ("steps", "interval", "wanted", "marks"),
    [
        (32, 4, (8, 12), (4, 8, 12, 16, 20, 24, 28)),
        (320, 4, (8, 12), (8, 12, 80, 160, 200, 240, 280)),
        (320, 40, (), (40, 80, 120, 160, 200, 240, 280)),
        (8, 4, (), (4,)),
        (4, 4, (), ()),
        (10, 4, (), (4, 8)),
        (32, 4, (0, 32, 64), (4, 8, 12, 16, 20, 24, 28)),
    ],
)
def test_milestones_of_some_runs(steps: int, interval: int, wanted: tuple[int, ...], marks: tuple[int, ...]) -> None:
    assert milestones(steps, interval, wanted) == marks


@given(runs(), st.integers(0, 10**6))
def test_the_next_milestones_are_those_ahead_and_a_watch_gets_to_the_end(
    run: tuple[int, int, tuple[int, ...]], seen: int
) -> None:
    marks = milestones(*run)
    assert next_milestones(marks, None) == marks
    ahead = next_milestones(marks, a_commit(max(seen, 1)))
    assert ahead == tuple(mark for mark in marks if mark > max(seen, 1))
    if marks:
        assert next_milestones(marks, a_commit(marks[-1])) == ()


@given(st.floats(120, 24 * 3600))
def test_a_lease_is_renewed_so_often_that_many_renewals_may_be_lost(lease_s: float) -> None:
    every = lease_renewal_s(lease_s)
    assert 5 <= every <= 60
    assert lease_s / every >= 19.9


@given(st.floats(0, 2e9), st.floats(30, 21600))
def test_custody_outlasts_the_run_by_its_teardown(run_deadline: float, teardown_s: float) -> None:
    assert custody_deadline(run_deadline, teardown_s) == pytest.approx(run_deadline + teardown_s)


@given(st.none() | st.floats(0, 1e6))
def test_a_commit_is_looked_for_at_least_every_second_and_a_half_and_not_in_a_loop(between: float | None) -> None:
    assert 0.4 <= poll_s(between) <= 1.5


def test_two_ranks_on_one_machine_are_not_called_multi_node() -> None:
    [nodes, quality] = not_proved(1, 2, 2, "regression")
    assert nodes.startswith("multi-node: 2 ranks ran on 1 physical host(s) (2 Ray node(s))")
    assert quality.startswith("model quality")
    assert not_proved(2, 2, 2, "script") == ()


def test_what_was_not_checked_is_told_once_for_each_reason() -> None:
    skipped = [NotApplicable(name=name, why=why) for name, why in (("a", "x"), ("b", "y"), ("c", "x"))]
    assert not_checked(skipped) == ("not checked: a, c (x)", "not checked: b (y)")
    assert not_checked([]) == ()


# Names ---------------------------------------------------------------------------------------------------------------


@given(st.text(max_size=300), st.text(min_size=1, max_size=20), st.uuids())
def test_a_run_key_is_safe_in_every_name_made_from_it(workflow_id: str, namespace: str, run_id: Any) -> None:
    key = run_key(workflow_id, namespace, str(run_id))
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?-[0-9a-f]{10}", key)
    for name in (custody_id(key), submission_id(key, "train")):
        assert re.fullmatch(r"[a-z0-9-]+", name)
    assert run_root("s3://bucket/prefix/", key) == run_root("s3://bucket/prefix", key) == f"s3://bucket/prefix/{key}"


def test_runs_differ_by_namespace_by_id_and_by_their_first_run_id_only() -> None:
    keys = {
        run_key("a", "default", "1"),
        run_key("a", "default", "2"),
        run_key("a", "other", "1"),
        run_key("A", "default", "1"),
        run_key("a ", "default", "1"),
    }
    assert len(keys) == 5
    assert run_key("a", "default", "1") == run_key("a", "default", "1")


# Words ---------------------------------------------------------------------------------------------------------------


def failed(cause: BaseException | None) -> ActivityError:
    error = ActivityError(
        "Activity task failed",
        scheduled_event_id=1,
        started_event_id=2,
        identity="test",
        activity_type="submit_job",
        activity_id="1",
        retry_state=None,
    )
    error.__cause__ = cause
    return error


def timed_out(last: BaseException | None) -> TimeoutError:
    error = TimeoutError("activity timeout", type=TimeoutType.SCHEDULE_TO_CLOSE, last_heartbeat_details=[])
    error.__cause__ = last
    return error


def raised(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (ApplicationError("bring more", type="Broken", non_retryable=True), "bring more"),
        (ApplicationError("'x'", type="KeyError"), "KeyError: 'x'"),
        (
            raised(ApplicationError("claim refused", type="ClaimRefused", non_retryable=True), ValueError("inner")),
            "claim refused",
        ),
        (timed_out(None), "submit_job gave no answer in time (schedule_to_close)"),
        (timed_out(ApplicationError("no quota", type="NotYet")), "NotYet: no quota"),
        (timed_out(timed_out(None)), "submit_job gave no answer in time (schedule_to_close)"),
    ],
    ids=str,
)
def test_a_failure_is_told_in_the_words_that_a_person_can_act_on(cause: BaseException, words: str) -> None:
    assert presentation.cause_of(failed(cause)) == words


def test_a_failures_words_are_bounded() -> None:
    long = ApplicationError("x" * 100_000, non_retryable=True)
    assert len(presentation.cause_of(failed(long))) == 2000
    assert len(presentation.first_line(long)) == 300
    assert presentation.first_line(ValueError("one\ntwo")) == "one"
    assert presentation.first_line(ValueError()) == "ValueError"


def test_only_what_refuses_the_input_is_a_rejection() -> None:
    assert presentation.outcome_of(failed(ApplicationError("no", type="Rejected"))) == "rejected"
    assert presentation.outcome_of(failed(ApplicationError("no", type="Broken"))) == "failed"
    assert presentation.outcome_of(failed(timed_out(None))) == "failed"


def test_a_job_that_ended_badly_is_told_with_what_is_known() -> None:
    assert presentation.job_ended_badly(watched("lost", 0)) == "the job's endpoint was lost"
    told = presentation.job_ended_badly(watched("failed", 4, job_status="FAILED", message="m", diagnosis="d"))
    assert told == "training failed (job FAILED); m; d"


def a_sweep(*suspects: Suspect) -> Sweep:
    return Sweep(
        found=len(suspects),
        held=0,
        suspects=suspects,
        foreign=0,
        unreadable=0,
        left_out=0,
        notes=(),
        search_attributes=(),
    )


def a_suspect(name: str = "a", **changes: Any) -> Suspect:
    identity = IDENTITY.model_copy(update={"custody_id": f"custody-{name}"})
    told = {"hosts": HOSTS.model_copy(update={"identity": identity}), "claims": (), "custody": "terminated"}
    return Suspect.model_validate({**told, "custody_run_id": "r", "lease": "l", **changes})


def test_an_orphan_is_the_same_suspect_on_both_looks_whichever_worker_looked() -> None:
    before = a_suspect(claims=(claim("cluster", "c", holder="worker 1"),))
    after = a_suspect(claims=(claim("cluster", "c", holder="worker 2"),))
    assert orphans(a_sweep(before, a_suspect("b")), a_sweep(after)) == (after,)


@pytest.mark.parametrize("changed", [{"custody": "absent"}, {"custody_run_id": "s"}, {"lease": "m"}, {"name": "b"}])
def test_where_something_changed_between_the_looks_nobody_is_an_orphan(changed: dict[str, Any]) -> None:
    assert orphans(a_sweep(a_suspect()), a_sweep(a_suspect(**changed))) == ()
    assert orphans(a_sweep(), a_sweep(a_suspect())) == ()
    assert orphans(a_sweep(a_suspect()), a_sweep()) == ()


def test_an_orphan_s_claims_may_appear_for_their_whole_window_from_when_its_custody_was_seen_closed() -> None:
    held = a_suspect(claims=(claim("cluster", "c", send_window_s=120.0, longest_request_s=30.0),))
    assert [each.may_appear_until for each in handed_over(held, 1000.0)] == [1150.0]
    assert lease_renewal_s(24 * 3600) < timeouts.BETWEEN_LOOKS.total_seconds()  # a lease that is kept has changed
