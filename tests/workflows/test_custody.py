"""Custody on a real server: what it accepts, when it releases, and that it never ends before everything is gone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from temporalio import activity
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import WorkflowExecutionStatus, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError

from tests.workflows.conftest import Keep
from tests.workflows.server import Temporal
from tests.workflows.stand_ins import Hold, Usual, World, a_claim, custodys_word, fails, soon, until
from workflows import activity_names as names
from workflows import presentation, timeouts
from workflows.custody import Custody
from workflows.evidence import Claim, CustodyOrder, HostsOrder, Identity, Release
from workflows.names import custody_id, run_root
from workflows.orders import MAX_EXTENSION_S
from workflows.timeouts import RUN_QUEUE

pytestmark = pytest.mark.asyncio(loop_scope="session")

NOBODY = "nobody-polls-this"
LONGEST = 150


@dataclass(frozen=True)
class Guarded:
    """A custody started by itself, for a run that is open and does nothing: nobody works on it."""

    world: World
    run: WorkflowHandle[Any, Any]
    custody: WorkflowHandle[Custody, Release]
    identity: Identity
    hosts: HostsOrder

    async def claim(self, kind: Any = "cluster", name: str = "c", **changes: Any) -> Claim:
        wanted = a_claim(self.identity, kind, name, **changes)
        held: Claim = await self.custody.execute_update("claim", wanted, result_type=Claim)
        self.world.exists.add(held.id)
        return held

    async def refused(self, **changes: Any) -> str:
        with pytest.raises(WorkflowUpdateFailedError) as failed:
            await self.custody.execute_update(Custody.claim, a_claim(self.identity, **changes))
        assert isinstance(failed.value.cause, ApplicationError)
        return failed.value.cause.message

    async def state(self) -> dict[str, Any]:
        told: dict[str, Any] = await self.custody.query(Custody.state)
        return told

    async def events(self) -> list[HistoryEvent]:
        return list((await self.custody.fetch_history()).events)

    async def word(self) -> Release:
        """The run closes too, and with it custody."""
        await self.run.terminate("the test is over")
        return await custodys_word(self.world)


async def guard(world: World, *, lasts_s: float = 3600.0, queue: str = NOBODY, budget: float | None = None) -> Guarded:
    begun = await world.client.start_workflow("Nothing", id=world.workflow_id, task_queue=queue)
    assert begun.first_execution_run_id is not None
    world.first_run_id = begun.first_execution_run_id
    identity = Identity(
        workflow_id=world.workflow_id,
        run_id=world.first_run_id,
        original_run_id=world.first_run_id,
        run_key=world.key,
        custody_id=custody_id(world.key),
        deployment="test",
        namespace=world.client.namespace,
        storage=run_root("s3://lanyard/runs", world.key),
    )
    hosts = HostsOrder(identity=identity, provider="local", count=2, device="cpu", lease_s=3600, not_after_s=7200)
    order = CustodyOrder(identity=identity, hosts=hosts, deadline=time.time() + lasts_s, budget=budget)
    custody = await world.client.start_workflow(Custody.run, order, id=identity.custody_id, task_queue=RUN_QUEUE)
    run = world.client.get_workflow_handle(world.workflow_id, run_id=world.first_run_id)
    return Guarded(world, run, custody, identity, hosts)


@pytest_asyncio.fixture(loop_scope="session")
async def guarded(world: World) -> Guarded:
    return await guard(world)


# Claims --------------------------------------------------------------------------------------------------------------


async def test_a_claim_is_written_down_with_the_time_until_which_it_may_appear(guarded: Guarded) -> None:
    before = time.time()
    held = await guarded.claim("cluster", "a", send_window_s=40.0, longest_request_s=20.0)
    assert before + 60 - 1 <= held.may_appear_until <= time.time() + 60 + 1
    await guarded.claim("job", "b")
    claims = await guarded.custody.query("claims", result_type=list[Claim])
    assert [c.id for c in claims] == ["cluster/a", "job/b"]
    assert (await guarded.state())["state"] == "held"
    record = await guarded.word()
    assert [c.id for c in record.claims] == ["cluster/a", "job/b"]
    assert guarded.world.released == ["job/b", "cluster/a"]


async def test_claimed_again_a_resource_is_held_once_for_its_longest_window(guarded: Guarded) -> None:
    first = await guarded.claim(name="a", send_window_s=600.0, attempt="3.1")
    again = await guarded.claim(name="a", send_window_s=1.0, attempt="3.2")
    assert again.may_appear_until >= first.may_appear_until
    await guarded.custody.signal("settle", args=["cluster/a", "3.1"])

    async def shorter() -> bool:
        [held] = await guarded.custody.query("claims", result_type=list[Claim])
        return bool(held.may_appear_until < first.may_appear_until - 60)

    await until(shorter, "the settled attempt's window ends")
    await guarded.custody.signal("settle", args=["cluster/a", "3.2"])
    record = await guarded.word()
    assert [c.id for c in record.claims] == ["cluster/a"]


async def test_an_attempt_whose_answer_was_lost_keeps_its_window_when_the_next_one_settles(guarded: Guarded) -> None:
    lost = await guarded.claim(name="a", send_window_s=600.0, attempt="3.1")
    await guarded.claim(name="a", send_window_s=600.0, attempt="3.2")
    await guarded.custody.signal("settle", args=["cluster/a", "3.2"])
    record = await guarded.word()
    assert record.claims[0].may_appear_until == lost.may_appear_until


async def test_the_keeper_is_there_from_the_start_and_only_once(guarded: Guarded) -> None:
    await keeping(guarded)
    await guarded.claim(name="a")
    await guarded.claim(name="b")
    record = await guarded.word()
    first, last = guarded.world.orders(names.KEEP)
    assert (first.renew, last.renew) == (True, False)
    assert record.reason == "the run closed (terminated)"


async def test_a_run_that_closed_before_it_claimed_anything_is_noticed_by_the_keeper(guarded: Guarded) -> None:
    """As after a reset: the server's own cancel of the child does not come."""
    await keeping(guarded)
    record = await guarded.word()
    assert (record.cleanup, record.claims, record.reason) == ("clean", (), "the run closed (terminated)")


async def test_no_lease_is_lent_before_the_first_claim(guarded: Guarded) -> None:
    """The keeper renews while custody's memo has a deadline. A run that is refused leaves nothing in storage."""
    await keeping(guarded)

    async def deadline() -> float | None:
        kept: float | None = await (await guarded.custody.describe()).memo_value("deadline", default=None)
        return kept

    moved = (await guarded.state())["deadline"] + 60
    await guarded.custody.signal(Custody.move_deadline, moved)

    async def has_moved() -> bool:
        return bool((await guarded.state())["deadline"] == moved)

    await until(has_moved, "the deadline moves")
    assert await deadline() is None
    await guarded.claim()
    assert await deadline() == moved
    await guarded.word()


async def keeping(guarded: Guarded) -> None:
    async def asked() -> bool:
        return bool(guarded.world.orders(names.KEEP))

    await until(asked, "the keeper is asked")


async def test_a_claim_of_another_run_is_refused(guarded: Guarded) -> None:
    assert "custody guards another run of this workflow id" in await guarded.refused(run_id="another")
    assert await guarded.custody.query("claims") == []
    await guarded.custody.cancel()
    record = await guarded.word()
    assert (record.cleanup, record.claims) == ("clean", ())
    assert guarded.world.orders(names.RELEASE) == []


async def test_no_claim_is_accepted_once_release_began(guarded: Guarded) -> None:
    await guarded.claim()
    slow = guarded.world.script[names.RELEASE] = Hold()
    await guarded.custody.signal(Custody.release, "the run failed")
    await soon(slow.reached.wait())
    assert "custody is releasing (the run failed)" in await guarded.refused(name="late")
    assert "custody is releasing (the run failed)" in await guarded.refused(name="c", kind="cluster")
    slow.go.set()
    record = await guarded.word()
    assert [c.id for c in record.claims] == ["cluster/c"]


@pytest.mark.parametrize(
    "inputs",
    [
        [],
        [None],
        ["cluster/c"],
        [{}],
        [{"kind": "cluster", "name": "c"}],
        [1, 2],
        [RawValue(Payload(metadata={"encoding": b"other"}, data=b"x"))],
    ],
    ids=str,
)
async def test_a_claim_that_makes_no_sense_is_refused_and_custody_goes_on(guarded: Guarded, inputs: list[Any]) -> None:
    with pytest.raises(WorkflowUpdateFailedError):
        await guarded.custody.execute_update("claim", args=inputs)
    await guarded.claim()
    record = await guarded.word()
    assert [c.id for c in record.claims] == ["cluster/c"]


# When it releases ----------------------------------------------------------------------------------------------------


async def test_it_releases_when_the_run_asks(guarded: Guarded) -> None:
    await guarded.claim()
    await guarded.custody.signal(Custody.release, "the run succeeded")
    record = await guarded.word()
    assert (record.cleanup, record.reason) == ("clean", "the run succeeded")


async def test_it_releases_when_it_is_cancelled(guarded: Guarded) -> None:
    await guarded.claim()
    await guarded.custody.cancel()
    record = await guarded.word()
    assert (record.cleanup, record.reason) == ("clean", "the run closed, or custody was cancelled")
    assert (await guarded.custody.describe()).status == WorkflowExecutionStatus.COMPLETED


async def test_it_releases_when_its_keeper_sees_the_exact_run_closed(guarded: Guarded) -> None:
    """Nobody cancels it: as after a reset, or where it was started by hand."""
    await guarded.claim()
    await keeping(guarded)
    await guarded.run.terminate("by hand")
    other = await guarded.world.client.start_workflow("Nothing", id=guarded.world.workflow_id, task_queue=NOBODY)
    record = await custodys_word(guarded.world)
    assert record.reason == "the run closed (terminated)"
    assert [order.status for order in guarded.world.orders(names.REPORT_UNSPOKEN)] == ["terminated"]
    await other.terminate()


@pytest.mark.parametrize("claims", [0, 1])
async def test_it_releases_when_its_own_deadline_passes(world: World, claims: int) -> None:
    guarded = await guard(world, lasts_s=2.0)
    for name in range(claims):
        await guarded.claim(name=str(name))

    async def due() -> bool:
        return bool((await guarded.state())["state"] == "clean")

    await until(due, "the deadline passes")
    record = await guarded.word()
    assert (record.reason, len(record.claims)) == ("custody's own deadline passed", claims)


async def test_it_releases_at_its_deadline_though_the_run_is_stuck_failing_its_task_for_ever(
    world: World, keep_history: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is of a type that its worker does not know, which fails each of its workflow tasks."""
    monkeypatch.setattr("workflows.custody.KEEPER_GRACE_S", 1.0)
    guarded = await guard(world, lasts_s=3.0, queue=RUN_QUEUE)
    await guarded.claim()
    record = await custodys_word(world)  # closes though the run never does
    assert (record.cleanup, record.reason) == ("clean", "custody's own deadline passed")
    assert (await guarded.run.describe()).status == WorkflowExecutionStatus.RUNNING
    assert world.orders(names.REPORT_UNSPOKEN) == []
    await keep_history(guarded.custody, "custody-past-its-deadline")
    await guarded.run.terminate()


async def aborts_sent_to(guarded: Guarded) -> list[str]:
    told = [event.workflow_execution_signaled_event_attributes for event in (await guarded.run.fetch_history()).events]
    return [each.input.payloads[0].data.decode() for each in told if each.signal_name == "abort"]


async def test_a_run_whose_budget_is_spent_is_told_to_abort_and_released_when_it_does_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is spent before hosts are claimed; claiming again, or a job, begins no new budget."""
    monkeypatch.setattr("workflows.custody.BUDGET_GRACE_S", 3.0)
    guarded = await guard(world, budget=2.0)
    assert (await guarded.state())["budget_spent_at"] is None
    await guarded.claim(price_per_hour=3600.0)
    spent_at = (await guarded.state())["budget_spent_at"]
    assert time.time() < spent_at <= time.time() + 2
    await guarded.claim(price_per_hour=1.0)
    await guarded.claim("job", "j")
    assert (await guarded.state())["budget_spent_at"] == spent_at

    async def told() -> bool:
        return bool(await aborts_sent_to(guarded))

    await until(told, "the run is told")
    assert time.time() >= spent_at
    assert (await guarded.state())["state"] == "held"
    assert await aborts_sent_to(guarded) == ['"the budget of 2 US dollars is spent"']

    async def due() -> bool:
        return bool((await guarded.state())["state"] == "clean")

    await until(due, "the run had its time")
    assert (await guarded.word()).reason == "the budget of 2 US dollars is spent"


async def test_hosts_that_cost_nothing_spend_no_budget(world: World) -> None:
    guarded = await guard(world, budget=0.001)
    await guarded.claim()
    assert (await guarded.state())["budget_spent_at"] is None
    await guarded.word()


async def test_a_moved_deadline_counts_and_is_kept_in_the_memo_for_the_lease(world: World) -> None:
    guarded = await guard(world, lasts_s=3.0)
    await guarded.claim()
    first = (await guarded.state())["deadline"]
    await guarded.custody.signal(Custody.move_deadline, first + 3600)

    async def moved() -> bool:
        return bool((await guarded.state())["deadline"] == first + 3600)

    await until(moved, "the deadline moves")
    assert await (await guarded.custody.describe()).memo_value("deadline") == first + 3600

    async def fired() -> bool:
        return any(e.event_type == EventType.EVENT_TYPE_TIMER_FIRED for e in await guarded.events())

    await until(fired, "the first deadline passes")
    assert (await guarded.state())["state"] == "held"
    assert (await guarded.word()).reason == "the run closed (terminated)"


async def test_signals_that_make_no_sense_change_nothing_and_fail_no_task(guarded: Guarded) -> None:
    await guarded.claim()
    deadline = (await guarded.state())["deadline"]
    raw = RawValue(Payload(metadata={"encoding": b"other"}, data=b"x"))
    too_far = deadline + MAX_EXTENSION_S + 60
    for inputs in ([], ["soon"], [None], [True], [deadline - 60], [0], [too_far], [1e300], [1, 2], [[1]], [raw]):
        await guarded.custody.signal("move_deadline", args=inputs)
    for inputs in ([], ["cluster/c"], [1, 2], ["cluster/x", "3.1"], [raw, raw], ["cluster/c", "3.1", 4]):
        await guarded.custody.signal("settle", args=inputs)
    await guarded.custody.signal("no-such-signal", args=[1, 2])
    state = await guarded.state()
    assert (state["state"], state["deadline"]) == ("held", deadline)
    await guarded.custody.signal("release")  # by hand, without a reason
    record = await guarded.word()
    assert (record.cleanup, record.reason) == ("clean", "asked for by a signal")
    kinds = {event.event_type for event in await guarded.events()}
    assert EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED not in kinds


@pytest.mark.parametrize("inputs", [["because", "of", "this"], [{"why": "because"}], [None], [7]], ids=str)
async def test_a_release_asked_for_in_any_form_is_done(guarded: Guarded, inputs: list[Any]) -> None:
    await guarded.claim()
    await guarded.custody.signal("release", args=inputs)
    assert (await guarded.word()).cleanup == "clean"


async def test_handed_claims_to_begin_with_it_releases_them_at_once_and_accepts_no_more(world: World) -> None:
    first = await guard(world)
    await first.custody.terminate()
    held = a_claim(first.identity, "cluster", "c", attempt="3.1", may_appear_until=time.time() + 60)
    order = CustodyOrder(
        identity=first.identity, hosts=first.hosts, deadline=time.time(), claims=(held,), due="found by the reaper"
    )
    world.exists.add(held.id)
    slow = world.script[names.RELEASE] = Hold()
    custody = await world.client.start_workflow(Custody.run, order, id=first.identity.custody_id, task_queue=RUN_QUEUE)
    await soon(slow.reached.wait())
    guarded = Guarded(world, first.run, custody, first.identity, first.hosts)
    assert "custody is releasing (found by the reaper)" in await guarded.refused(name="late")
    # A launch that was under way when the first custody was lost settles with this one.
    await custody.signal("settle", args=[held.id, "3.2"])
    assert [c.may_appear_until for c in await custody.query(Custody.claims)] == [held.may_appear_until]
    slow.go.set()
    record = await guarded.word()
    assert (record.reason, [c.id for c in record.claims]) == ("found by the reaper", [held.id])
    assert [order.renew for order in world.orders(names.KEEP)] == [False]  # no lease to keep
    kinds = {event.event_type for event in await guarded.events()}
    assert EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED not in kinds


# How it releases -----------------------------------------------------------------------------------------------------


async def test_cancelled_again_and_again_while_it_releases_it_releases_once(guarded: Guarded) -> None:
    await guarded.claim()
    slow = guarded.world.script[names.RELEASE] = Hold()
    await guarded.custody.cancel()
    await soon(slow.reached.wait())
    for _ in range(5):
        await guarded.custody.cancel()
        await guarded.custody.signal(Custody.release, "again")
    assert (await guarded.state())["state"] == "releasing"
    assert not slow.cancelled.is_set()
    slow.go.set()
    record = await guarded.word()
    assert (record.cleanup, record.reason) == ("clean", "the run closed, or custody was cancelled")
    assert len(guarded.world.orders(names.RELEASE)) == 1


async def test_what_cannot_be_proved_gone_is_tried_for_as_long_as_it_takes_and_never_called_clean(
    guarded: Guarded, keep_history: Keep
) -> None:
    there = {"still": True}

    async def struggle(order: Any, usual: Usual) -> Any:
        if there["still"]:
            raise ApplicationError("still there: cluster/c: 1 process", type="StillThere")
        return await usual()

    guarded.world.script[names.RELEASE] = struggle
    await guarded.claim()
    await guarded.custody.signal(Custody.release, "the run failed")

    async def more_than_the_first_tries() -> bool:
        assert (await guarded.state())["state"] == "releasing"
        return await tried(guarded, 6)

    await until(more_than_the_first_tries, "the release is tried beyond its first five attempts")
    state = await guarded.state()
    assert state["reason"] == "the run failed"
    assert "still there: cluster/c: 1 process" in state["struggle"]
    page = (await guarded.custody.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)).current_details
    assert "### releasing — the run failed" in page
    assert "still there: cluster/c: 1 process" in page
    [pending] = (await guarded.custody.describe()).raw_description.pending_activities
    assert "still there: cluster/c: 1 process" in pending.last_failure.message
    struggling = len(await guarded.events())
    await until(lambda: tried(guarded, 8), "more attempts")
    assert len(await guarded.events()) == struggling  # retries write no history
    assert guarded.world.exists == {"cluster/c"}
    there["still"] = False
    record = await guarded.word()
    assert (record.cleanup, record.remaining) == ("clean", ())
    assert len(await guarded.events()) <= LONGEST
    await keep_history(guarded.custody, "custody-that-struggled")


async def tried(guarded: Guarded, times: int) -> bool:
    return len(guarded.world.orders(names.RELEASE)) > times


async def test_a_release_that_succeeds_within_its_first_tries_needs_no_second_activity(guarded: Guarded) -> None:
    guarded.world.script[names.RELEASE] = fails("still there", times=4)
    await guarded.claim()
    await guarded.custody.signal(Custody.release, "the run failed")
    record = await guarded.word()
    assert record.cleanup == "clean"
    assert len(guarded.world.orders(names.RELEASE)) == 5
    assert timeouts.RELEASE_FIRST.maximum_attempts == 5
    begun = [e for e in await guarded.events() if e.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED]
    kinds = [e.activity_task_scheduled_event_attributes.activity_type.name for e in begun]
    assert kinds.count(names.RELEASE) == 1


async def test_a_release_that_a_bug_ends_for_good_is_asked_for_again(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "RELEASE_AGAIN", timedelta(milliseconds=200))
    ends = iter(range(3))

    async def behave(order: Any, usual: Usual) -> Any:
        if next(ends, None) is not None:
            raise ApplicationError("a bug", non_retryable=True)
        return await usual()

    guarded.world.script[names.RELEASE] = behave
    await guarded.claim()
    await guarded.custody.signal(Custody.release, "the run failed")
    record = await guarded.word()
    assert record.cleanup == "clean"
    assert len(guarded.world.orders(names.RELEASE)) == 4


async def test_a_bug_in_custody_waits_for_a_fix_and_then_everything_is_released(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    await guarded.claim()
    with monkeypatch.context() as broken:
        broken.setattr(presentation, "custody_details", lambda *told: 1 / 0)
        await guarded.custody.signal(Custody.release, "the run failed")

        async def failed() -> bool:
            kinds = [e.event_type for e in await guarded.events()]
            return EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED in kinds

        await until(failed, "the workflow task fails")
        assert (await guarded.custody.describe()).status == WorkflowExecutionStatus.RUNNING
    record = await guarded.word()
    assert (record.cleanup, record.reason) == ("clean", "the run failed")


async def test_the_worker_of_custody_comes_back_while_it_releases(temporal: Temporal, guarded: Guarded) -> None:
    await guarded.claim()
    slow = guarded.world.script[names.RELEASE] = Hold()
    await guarded.custody.signal(Custody.release, "the run failed")
    await soon(slow.reached.wait())
    await temporal.stop_run_worker()
    slow.go.set()
    await guarded.custody.cancel()
    await temporal.start_run_worker()
    record = await guarded.word()
    assert (record.cleanup, record.reason) == ("clean", "the run failed")
    assert len(guarded.world.orders(names.RELEASE)) == 1


async def test_a_report_that_cannot_be_written_does_not_change_custodys_word(guarded: Guarded) -> None:
    guarded.world.script[names.REPORT_UNSPOKEN] = fails("the storage is full")
    await guarded.claim()
    assert (await guarded.word()).cleanup == "clean"
    assert len(guarded.world.orders(names.REPORT_UNSPOKEN)) == 1


async def test_while_the_run_is_open_a_finished_custody_waits_for_it_and_answers(guarded: Guarded) -> None:
    await guarded.claim()
    await guarded.custody.signal(Custody.release, "the run succeeded")

    async def released() -> bool:
        return bool((await guarded.state())["state"] == "clean")

    await until(released, "custody releases")
    assert (await guarded.custody.describe()).status == WorkflowExecutionStatus.RUNNING
    assert "custody is releasing" in await guarded.refused()
    for _ in range(3):
        await guarded.custody.cancel()
    assert (await guarded.word()).cleanup == "clean"


async def test_a_failed_attempt_of_the_keeper_costs_no_history(guarded: Guarded) -> None:
    async def behave(order: Any, usual: Usual) -> Any:
        if activity.info().attempt < 3:
            raise ApplicationError("Temporal did not answer")
        return await usual()

    guarded.world.script[names.KEEP] = behave
    await guarded.claim()
    await until(lambda: kept(guarded, 3), "the keeper is tried again")
    record = await guarded.word()
    assert record.reason == "the run closed (terminated)"
    assert len(await guarded.events()) <= 60


async def kept(guarded: Guarded, times: int) -> bool:
    return len(guarded.world.orders(names.KEEP)) >= times
