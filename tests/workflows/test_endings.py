"""Abort, cancel, terminate, time-out and reset of a run, in every phase: how it ends, and that nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle

from tests.workflows.conftest import Keep
from tests.workflows.server import Temporal
from tests.workflows.stand_ins import (
    FULL,
    PLAIN,
    Hold,
    World,
    custodys_word,
    ending_of,
    soon,
    until,
)
from workflows import activity_names as names
from workflows.orders import PARITY

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass(frozen=True)
class Phase:
    """A moment of a full run: the activity that is running, and what is claimed by then."""

    activity: str
    claimed: tuple[str, ...] = ()
    when: Callable[[Any], bool] = lambda order: True
    after: bool = False


CLUSTER, TRAIN, STRIKE, SECOND = "cluster/{}", "job/{}-train", "job/{}-strike", "job/{}-parity"
PHASES = {
    "orient": Phase(names.ORIENT),
    "preflight": Phase(names.PREFLIGHT),
    "before the launch's claim": Phase(names.LAUNCH),
    "launch": Phase(names.LAUNCH, (CLUSTER,), after=True),
    "prove hosts": Phase(names.PROVE_HOSTS, (CLUSTER,)),
    "submit": Phase(names.SUBMIT, (CLUSTER, TRAIN), after=True),
    "train": Phase(names.WATCH, (CLUSTER, TRAIN)),
    "choose": Phase(names.CHOOSE, (CLUSTER, TRAIN)),
    "strike": Phase(names.STRIKE, (CLUSTER, TRAIN, STRIKE), after=True),
    "recover": Phase(
        names.WATCH, (CLUSTER, TRAIN, STRIKE), when=lambda order: bool(order.seen and order.seen.step > 8)
    ),
    "parity's submit": Phase(
        names.SUBMIT,
        (CLUSTER, TRAIN, STRIKE, SECOND),
        when=lambda order: bool(order.train_name == PARITY),
        after=True,
    ),
    "parity": Phase(
        names.WATCH, (CLUSTER, TRAIN, STRIKE, SECOND), when=lambda order: bool(order.job.train_name == PARITY)
    ),
    "prove": Phase(names.PROVE, (CLUSTER, TRAIN, STRIKE, SECOND)),
}
in_every_phase = pytest.mark.parametrize("phase", PHASES)


async def held_in(world: World, phase: Phase, **options: Any) -> tuple[WorkflowHandle[Any, Any], Hold]:
    """A full run, held in this phase."""
    hold = Hold(phase.when, after=phase.after)
    world.script[phase.activity] = hold
    run = await world.start(FULL, **options)
    await soon(hold.reached.wait())
    return run, hold


def claimed(world: World, phase: Phase) -> list[str]:
    return [name.format(world.key) for name in phase.claimed]


async def released_exactly(world: World, phase: Phase) -> None:
    """Custody released what was claimed by then, all of it and nothing else, and closed."""
    if phase.activity == names.ORIENT:
        return
    record = await custodys_word(world)
    assert record.cleanup == "clean"
    assert [c.id for c in record.claims] == claimed(world, phase)
    assert world.released == claimed(world, phase)[::-1]
    assert len(world.orders(names.RELEASE)) == (1 if phase.claimed else 0)


# Abort, cancel and terminate in every phase ---------------------------------------------------------------------------

STOPS: dict[str, Callable[[WorkflowHandle[Any, Any]], Coroutine[Any, Any, None]]] = {
    "abort": lambda run: run.signal("abort", "enough"),
    "cancel": lambda run: run.cancel(),
    "terminate": lambda run: run.terminate("by hand"),
}
AT_ONCE = 8
Stopped = dict[tuple[str, str], tuple[World, WorkflowHandle[Any, Any]]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stopped(temporal: Temporal) -> Stopped:
    """A run held in each phase and then stopped, in each way; many at once, because they mostly wait."""
    room = asyncio.Semaphore(AT_ONCE)

    async def stop(how: str, phase: str) -> tuple[World, WorkflowHandle[Any, Any]]:
        world = temporal.stand_ins.world(f"{how}-{phase}".replace(" ", "-").replace("'", ""))
        async with room:
            run, _ = await held_in(world, PHASES[phase])
            await STOPS[how](run)
            with contextlib.suppress(WorkflowFailureError):
                await soon(run.result(follow_runs=False))
            return world, run

    ways = list(itertools.product(STOPS, PHASES))
    return dict(zip(ways, await asyncio.gather(*(stop(*way) for way in ways)), strict=True))


@in_every_phase
async def test_an_abort_ends_completed_as_aborted_with_everything_released(
    stopped: Stopped, phase: str, keep_history: Keep
) -> None:
    world, run = stopped["abort", phase]
    ending = await ending_of(run)
    assert ending.status == "completed"
    assert ending.verdict
    assert ending.verdict.outcome == "aborted"
    assert ending.verdict.message.startswith("aborted as asked: enough")
    assert ending.verdict.cleanup == "clean"
    await released_exactly(world, PHASES[phase])
    if phase == "recover":
        await keep_history(run, "run-aborted")


@in_every_phase
async def test_a_cancel_ends_canceled_with_everything_released(stopped: Stopped, phase: str) -> None:
    world, run = stopped["cancel", phase]
    ending = await ending_of(run)
    assert ending.status == "canceled"
    assert ending.verdict
    assert (ending.verdict.outcome, ending.verdict.cleanup) == ("cancelled", "clean")
    await released_exactly(world, PHASES[phase])


@in_every_phase
async def test_after_a_terminate_custody_releases_and_writes_the_report(stopped: Stopped, phase: str) -> None:
    world, _ = stopped["terminate", phase]
    await released_exactly(world, PHASES[phase])
    assert names.REPORT not in world.story()
    if phase != "orient":  # before custody nothing is claimed, and nobody is left to report
        [order] = world.orders(names.REPORT_UNSPOKEN)
        assert (order.status, order.release.cleanup) == ("terminated", "clean")
        assert order.identity.run_id == world.first_run_id


async def test_a_run_that_has_spent_its_budget_ends_aborted_and_says_so(world: World, keep_history: Keep) -> None:
    """Held in training, at a price at which its budget lasts for two seconds."""
    world.price_per_hour = 3600.0
    world.script[names.WATCH] = hold = Hold()
    run = await world.start({**FULL, "limits": {"budget": 2}})
    await soon(hold.reached.wait())
    ending = await ending_of(run)
    assert (ending.status, ending.verdict and ending.verdict.outcome) == ("completed", "aborted")
    assert ending.verdict
    assert ending.verdict.message.startswith("aborted as asked: the budget of 2 US dollars is spent")
    assert ending.verdict.cleanup == "clean"
    await custodys_word(world)
    await keep_history(run, "run-budget-spent")
    await keep_history(world.custody, "custody-budget-spent")


# Twice, and too late -------------------------------------------------------------------------------------------------


async def test_cancelled_twice_and_then_aborted_it_is_cancelled(world: World) -> None:
    run, _ = await held_in(world, PHASES["train"])
    slow = world.script[names.RELEASE] = Hold()
    await run.cancel()
    await run.cancel()
    await soon(slow.reached.wait())
    await run.signal("abort")
    slow.go.set()
    assert (await ending_of(run)).status == "canceled"
    await released_exactly(world, PHASES["train"])


async def test_aborted_and_then_cancelled_it_is_aborted(world: World) -> None:
    run, _ = await held_in(world, PHASES["train"])
    slow = world.script[names.RELEASE] = Hold()
    await run.signal("abort")
    await soon(slow.reached.wait())
    await run.cancel()
    slow.go.set()
    ending = await ending_of(run)
    assert (ending.status, ending.verdict and ending.verdict.outcome) == ("completed", "aborted")
    await released_exactly(world, PHASES["train"])


async def test_cancels_during_the_release_change_nothing(world: World, keep_history: Keep) -> None:
    run, _ = await held_in(world, PHASES["train"])
    slow = world.script[names.RELEASE] = Hold()
    await run.cancel()
    await soon(slow.reached.wait())
    for _ in range(3):
        await run.cancel()
        await world.custody.cancel()
    assert (await world.custody.query("state"))["state"] == "releasing"
    assert not slow.cancelled.is_set()
    slow.go.set()
    ending = await ending_of(run)
    assert ending.status == "canceled"
    assert ending.verdict
    assert ending.verdict.cleanup == "clean"
    await released_exactly(world, PHASES["train"])
    await keep_history(run, "run-cancelled")
    await keep_history(world.custody, "custody-cancelled-while-releasing")


@pytest.mark.parametrize("activity", [names.SAVE_RECORDS, names.RELEASE, names.VERIFY, names.REPORT])
@pytest.mark.parametrize("stop", ["abort", "cancel"])
async def test_once_training_has_ended_a_stop_comes_too_late_and_the_outcome_stands(
    world: World, activity: str, stop: str
) -> None:
    hold = world.script[activity] = Hold()
    run = await world.start(PLAIN)
    await soon(hold.reached.wait())
    await (run.signal("abort") if stop == "abort" else run.cancel())
    hold.go.set()
    ending = await ending_of(run)
    assert ending.verdict
    assert (ending.status, ending.verdict.outcome, ending.verdict.cleanup) == ("completed", "succeeded", "clean")
    assert ending.verdict.artifacts
    assert (await custodys_word(world)).cleanup == "clean"
    assert world.story()[-1] == names.REPORT
    # It is told, and custody's own word of the release is not taken for one.
    told = [event["what"] for event in (await run.query("progress"))["events"]]
    late = [what for what in told if "too late" in what]
    assert len(late) == 1
    assert ("aborted" if stop == "abort" else "cancelled") in late[0]


async def test_a_cancel_that_comes_with_the_end_of_an_activity_is_not_swallowed(
    temporal: Temporal, world: World
) -> None:
    run, hold = await held_in(world, PHASES["prove"])
    await temporal.stop_run_worker()  # which ends the activity too; it is tried again
    await run.cancel()
    hold.go.set()
    await temporal.start_run_worker()
    ending = await ending_of(run)
    assert ending.status == "canceled"
    await released_exactly(world, PHASES["prove"])


# Terminate and time-out ----------------------------------------------------------------------------------------------


async def test_a_terminate_during_the_release_does_not_touch_it(world: World, keep_history: Keep) -> None:
    slow = world.script[names.RELEASE] = Hold()
    run = await world.start(PLAIN)
    await soon(slow.reached.wait())
    await run.terminate("by hand")
    await until_cancelled_by_the_server(world)
    assert not slow.cancelled.is_set()
    slow.go.set()
    record = await custodys_word(world)
    assert (record.cleanup, record.reason) == ("clean", "the run succeeded")
    [order] = world.orders(names.REPORT_UNSPOKEN)
    assert order.status == "terminated"
    await keep_history(run, "run-terminated")
    await keep_history(world.custody, "custody-of-a-terminated-run")


async def until_cancelled_by_the_server(world: World) -> None:
    async def cancelled() -> bool:
        asked = EventType.EVENT_TYPE_WORKFLOW_EXECUTION_CANCEL_REQUESTED
        return any(e.event_type == asked for e in (await world.custody.fetch_history()).events)

    await until(cancelled, "the server cancels custody when its run closes")


@pytest.mark.parametrize("activity", [names.LAUNCH, names.SUBMIT])
async def test_an_activity_that_outlives_its_terminated_run_is_refused_its_claim(world: World, activity: str) -> None:
    """Terminating a run does not stop its running activity. Here one goes on after custody has closed clean."""
    hold = world.script[activity] = Hold(stubborn=True)
    run = await world.start(PLAIN)
    await soon(hold.reached.wait())
    await run.terminate("by hand")
    assert (await custodys_word(world)).cleanup == "clean"
    touched = list(world.touched)
    hold.go.set()
    await soon(hold.left.wait())
    assert "claim refused, nothing was touched" in str(hold.error)
    assert world.touched == touched
    assert world.exists == set()


async def test_an_activity_that_outlives_its_run_is_refused_while_custody_releases(world: World) -> None:
    world.script[names.SUBMIT] = late = Hold(stubborn=True)
    world.script[names.RELEASE] = slow = Hold()
    run = await world.start(PLAIN)
    await soon(late.reached.wait())
    await run.terminate("by hand")
    await soon(slow.reached.wait())
    late.go.set()
    await soon(late.left.wait())
    assert "claim refused, nothing was touched" in str(late.error)
    slow.go.set()
    record = await custodys_word(world)
    assert [c.kind for c in record.claims] == ["cluster"]


async def test_a_run_whose_execution_times_out_is_released_and_reported_by_custody(
    world: World, keep_history: Keep
) -> None:
    phase = PHASES["launch"]
    run, _ = await held_in(world, phase, execution_timeout=timedelta(seconds=5))
    await released_exactly(world, phase)
    [order] = world.orders(names.REPORT_UNSPOKEN)
    assert order.status == "timed_out"
    await keep_history(run, "run-that-timed-out")
    await keep_history(world.custody, "custody-of-a-timed-out-run")


# Custody gone --------------------------------------------------------------------------------------------------------


async def test_when_custody_is_cancelled_by_hand_the_run_ends_failed_with_its_reason(
    world: World, keep_history: Keep
) -> None:
    run, _ = await held_in(world, PHASES["recover"])
    await world.custody.cancel()
    ending = await ending_of(run)
    assert ending.status == "failed"
    assert "custody released the hosts: the run closed, or custody was cancelled" in ending.message
    assert '"resume": {"from": "s3://lanyard/runs/' in ending.message
    assert ending.verdict
    assert (ending.verdict.outcome, ending.verdict.cleanup) == ("failed", "clean")
    await released_exactly(world, PHASES["recover"])
    assert world.orders(names.REPORT_UNSPOKEN) == []
    await keep_history(run, "run-that-lost-its-hosts")


async def test_when_custody_was_terminated_by_hand_nothing_more_is_touched_and_nothing_is_called_clean(
    world: World,
) -> None:
    hold = world.script[names.SUBMIT] = Hold()
    run = await world.start(PLAIN)
    await soon(hold.reached.wait())
    await world.custody.terminate("by hand")
    hold.go.set()
    ending = await ending_of(run)
    assert ending.status == "failed"
    assert "claim refused, nothing was touched: custody has closed" in ending.message
    assert ending.verdict
    assert ending.verdict.cleanup == "unproved"
    assert len(world.touched) == 1


# Reset ---------------------------------------------------------------------------------------------------------------


async def reset(world: World, run: WorkflowHandle[Any, Any], to: int) -> WorkflowHandle[Any, Any]:
    """Reset the run to its nth completed workflow task."""
    completed = EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
    done = [e.event_id for e in (await run.fetch_history()).events if e.event_type == completed]
    answer = await world.client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=world.client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=run.id, run_id=world.first_run_id),
            reason="test",
            workflow_task_finish_event_id=done[to],
            request_id=f"reset-{run.id}",
        )
    )
    return world.client.get_workflow_handle(run.id, run_id=answer.run_id)


RESET = "reset after release; start again with resume"


@pytest.mark.parametrize("phase", ["preflight", "launch", "train", "recover"])
@pytest.mark.parametrize("to", [0, -1], ids=["before custody's start", "after custody's start"])
async def test_a_reset_run_ends_failed_and_leaves_nothing(
    world: World, phase: str, to: int, keep_history: Keep
) -> None:
    run, hold = await held_in(world, PHASES[phase])
    again = await reset(world, run, to)
    hold.go.set()
    ending = await ending_of(again)
    assert ending.status == "failed"
    assert RESET in ending.message
    record = await custodys_word(world)
    assert record.cleanup == "clean"
    assert sorted(world.touched) == sorted(c.id for c in record.claims)
    assert ending.verdict
    assert ending.verdict.cleanup in ("clean", "unproved")
    if phase == "train":
        where = "before" if to == 0 else "after"
        await keep_history(again, f"run-reset-to-{where}-custodys-start", races=True)


@pytest.mark.parametrize("to", [0, -1], ids=["before custody's start", "after custody's start"])
async def test_a_run_reset_in_preflight_and_then_terminated_leaves_no_custody_open(world: World, to: int) -> None:
    run, hold = await held_in(world, PHASES["preflight"])
    again = await reset(world, run, to)
    await again.terminate("by hand")
    hold.go.set()
    record = await custodys_word(world)
    assert (record.cleanup, record.claims) == ("clean", ())
    assert world.touched == []


async def test_a_run_reset_after_all_was_released_ends_failed_and_touches_nothing(world: World) -> None:
    run = await world.start(PLAIN)
    assert (await ending_of(run)).status == "completed"
    await custodys_word(world)
    touched, releases = list(world.touched), len(world.orders(names.RELEASE))
    launched = world.story().index(names.LAUNCH)
    again = await reset(world, run, launched)
    ending = await ending_of(again)
    assert ending.status == "failed"
    assert RESET in ending.message
    assert world.touched == touched
    assert world.exists == set()
    assert len(world.orders(names.RELEASE)) == releases


async def test_a_run_reset_to_its_verification_verifies_again_and_succeeds(world: World) -> None:
    """Nothing is claimed any more by then, and what it does is only read."""
    run = await world.start(PLAIN)
    assert (await ending_of(run)).status == "completed"
    await custodys_word(world)
    again = await reset(world, run, -1)
    ending = await ending_of(again)
    assert ending.verdict
    assert (ending.verdict.outcome, ending.verdict.cleanup) == ("succeeded", "clean")
    assert world.exists == set()


# A worker that goes away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["launch", "train", "recover", "parity"])
async def test_a_run_goes_on_when_its_worker_went_away_and_came_back(
    temporal: Temporal, world: World, phase: str
) -> None:
    run, hold = await held_in(world, PHASES[phase])
    await temporal.stop_run_worker()
    hold.go.set()
    await temporal.start_run_worker()
    ending = await ending_of(run)
    assert ending.verdict
    assert (ending.verdict.outcome, ending.verdict.cleanup) == ("succeeded", "clean")
    record = await custodys_word(world)
    assert world.touched == [c.id for c in record.claims]


async def test_a_run_that_was_terminated_while_no_worker_was_there_is_released_when_one_comes(
    temporal: Temporal, world: World
) -> None:
    run, _ = await held_in(world, PHASES["recover"])
    await temporal.stop_run_worker()
    await run.terminate("by hand")
    assert (await run.describe()).status == WorkflowExecutionStatus.TERMINATED
    assert world.exists != set()
    await temporal.start_run_worker()
    await released_exactly(world, PHASES["recover"])
    assert [order.status for order in world.orders(names.REPORT_UNSPOKEN)] == ["terminated"]
