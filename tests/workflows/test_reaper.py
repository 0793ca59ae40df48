"""The reaper on a real server, with its real activity: what has no open custody on two looks is given one, and nothing
else is touched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from temporalio.api.enums.v1 import EventType
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError

from activities.reaping import MOST_SUSPECTS
from tests.workflows.conftest import Keep
from tests.workflows.server import Temporal
from tests.workflows.stand_ins import (
    PLAIN,
    Hold,
    Place,
    World,
    custodys_word,
    ending_of,
    events_of,
    nothing_first,
    soon,
    until,
)
from tests.workflows.test_custody import Guarded, guard
from workflows import activity_names as names
from workflows import timeouts
from workflows.evidence import CustodyOrder, HostsOrder, Mark, Reaped
from workflows.names import custody_id
from workflows.timeouts import RUN_QUEUE

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONGEST = 250
ORDER = {"deployment": "test"}


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "BETWEEN_LOOKS", timedelta(seconds=0.5))


@pytest.fixture
def unhurried(soon_again: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time enough between the looks for something to happen, also on a loaded machine."""
    monkeypatch.setattr(timeouts, "BETWEEN_LOOKS", timedelta(seconds=3))


@pytest.fixture
def place(temporal: Temporal) -> Iterator[Place]:
    """Where everything of these tests lies; empty again afterwards."""
    yield temporal.place
    for name, value in vars(Place()).items():
        setattr(temporal.place, name, value)


@pytest_asyncio.fixture(loop_scope="session")
async def guarded(world: World, place: Place) -> AsyncIterator[Guarded]:
    """A run that is open, whose hosts are there, and whose custody guards them."""
    made = await guard(world)
    place.put(world, made.hosts)
    yield made
    for each in (made.run, made.custody):
        if (await each.describe()).status == WorkflowExecutionStatus.RUNNING:
            await each.terminate()


async def reap(world: World, order: Any = ORDER) -> WorkflowHandle[Any, Reaped]:
    return await world.client.start_workflow(
        "Reaper", order, id=f"reaper-test-{uuid4().hex[:8]}", task_queue=RUN_QUEUE, result_type=Reaped
    )


async def reaped(world: World) -> Reaped:
    done: Reaped = await soon((await reap(world)).result())
    return done


async def lost(guarded: Guarded) -> None:
    """The hard way: the run and its custody are terminated, and nobody releases anything."""
    await guarded.custody.terminate()
    await guarded.run.terminate()


async def between_the_looks(reaper: WorkflowHandle[Any, Any]) -> None:
    async def waits() -> bool:
        return any(e.event_type == EventType.EVENT_TYPE_TIMER_STARTED for e in await events_of(reaper))

    await until(waits, "the timer between the looks")


# What is an orphan ---------------------------------------------------------------------------------------------------


async def test_what_a_lost_custody_left_is_released_by_a_new_one_after_two_looks(
    guarded: Guarded, place: Place, keep_history: Keep
) -> None:
    await lost(guarded)
    reaper = await reap(guarded.world)
    done = await soon(reaper.result())
    assert place.looks == 2
    assert (done.found, done.held, done.suspects) == (1, 0, 1)
    [orphan] = done.orphans
    assert (orphan.custody_id, orphan.custody, orphan.handed_over) == (guarded.identity.custody_id, "terminated", True)
    record = await custodys_word(guarded.world)
    assert (record.cleanup, record.reason) == ("clean", "found by the reaper: its custody was terminated")
    assert guarded.world.released == [f"cluster/{guarded.identity.run_key}"]
    [report] = guarded.world.orders(names.REPORT_UNSPOKEN)
    assert report.status == "terminated"
    custody = guarded.world.client.get_workflow_handle(guarded.identity.custody_id)
    assert (await custody.describe()).run_id != guarded.custody.first_execution_run_id
    await keep_history(reaper, "reaper-with-an-orphan")
    await keep_history(custody, "custody-of-an-orphan")


async def test_a_custody_that_is_absent_makes_an_orphan_too(world: World, place: Place) -> None:
    run = await world.client.start_workflow("Nothing", id=world.workflow_id, task_queue="nobody-polls-this")
    assert run.first_execution_run_id is not None
    world.first_run_id = run.first_execution_run_id
    place.put(world, hosts_of(world))
    await run.terminate()
    [orphan] = (await reaped(world)).orphans
    assert (orphan.custody, orphan.handed_over) == ("absent", True)
    assert (await custodys_word(world)).reason == "found by the reaper: its custody was absent"


def hosts_of(world: World, **changes: str) -> HostsOrder:
    identity = {
        "workflow_id": world.workflow_id,
        "run_id": world.first_run_id,
        "original_run_id": world.first_run_id,
        "run_key": world.key,
        "custody_id": custody_id(world.key),
        "deployment": "test",
        "namespace": world.client.namespace,
        "storage": "s3://lanyard/runs/x",
        **changes,
    }
    return HostsOrder.model_validate(
        {
            "identity": identity,
            "provider": "local",
            "count": 2,
            "device": "cpu",
            "lease_s": 3600,
            "not_after_s": 7200,
        }
    )


async def test_what_may_still_appear_of_an_orphan_is_waited_for_from_when_its_custody_was_seen_closed(
    guarded: Guarded, place: Place
) -> None:
    await lost(guarded)
    await reaped(guarded.world)
    record = await custodys_word(guarded.world)
    [claim] = record.claims
    custody = guarded.world.client.get_workflow_handle(guarded.identity.custody_id)
    started = (await custody.describe()).start_time.timestamp()
    window = claim.send_window_s + claim.longest_request_s
    assert started + window - 30 < claim.may_appear_until < started + window


async def test_an_open_custody_is_left_alone_and_one_look_is_enough(
    guarded: Guarded, place: Place, keep_history: Keep
) -> None:
    reaper = await reap(guarded.world)
    done = await soon(reaper.result())
    assert (done.found, done.held, done.suspects, done.orphans) == (1, 1, 0, ())
    assert place.looks == 1
    assert len(await events_of(reaper)) <= 12
    assert (await guarded.state())["state"] == "held"
    await keep_history(reaper, "reaper-with-nothing-to-do")


async def test_a_run_that_is_just_starting_is_left_alone_with_and_without_anything_there(
    world: World, place: Place
) -> None:
    guarded = await guard(world)
    await guarded.claim("cluster", guarded.identity.run_key)
    assert (await reaped(world)).found == 0  # claimed, and nothing there yet
    place.put(world, guarded.hosts)
    done = await reaped(world)
    assert (done.found, done.held, done.orphans) == (1, 1, ())
    assert world.released == []
    await guarded.word()


@pytest.mark.usefixtures("unhurried")
async def test_a_custody_that_closes_between_the_looks_is_for_the_next_time(
    guarded: Guarded, temporal: Temporal, place: Place
) -> None:
    other = await guard(temporal.stand_ins.world("another"))
    place.put(other.world, other.hosts)
    await lost(other)
    reaper = await reap(guarded.world)
    await between_the_looks(reaper)
    await lost(guarded)
    done = await soon(reaper.result())
    assert done.suspects == 1
    assert [each.custody_id for each in done.orphans] == [other.identity.custody_id]
    assert guarded.world.released == []
    await custodys_word(other.world)
    assert [each.custody_id for each in (await reaped(guarded.world)).orphans] == [guarded.identity.custody_id]
    await custodys_word(guarded.world)


@pytest.mark.usefixtures("unhurried")
async def test_a_custody_that_opens_between_the_looks_guards(guarded: Guarded, place: Place) -> None:
    await lost(guarded)
    reaper = await reap(guarded.world)
    await between_the_looks(reaper)
    again = await open_custody(guarded)
    done = await soon(reaper.result())
    assert (done.suspects, done.held, done.orphans) == (1, 1, ())
    await again.terminate()


async def open_custody(guarded: Guarded) -> WorkflowHandle[Any, Any]:
    """A custody of the same id that guards, for as long as nobody ends it: its keeper does not see that the run has
    closed."""
    guarded.world.script[names.KEEP] = Hold()
    order = CustodyOrder(identity=guarded.identity, hosts=guarded.hosts, deadline=2e9)
    return await guarded.world.client.start_workflow(
        "Custody", order, id=guarded.identity.custody_id, task_queue=RUN_QUEUE
    )


@pytest.mark.usefixtures("unhurried")
async def test_a_custody_that_came_and_went_between_the_looks_is_for_the_next_time(
    guarded: Guarded, place: Place
) -> None:
    await lost(guarded)
    reaper = await reap(guarded.world)
    await between_the_looks(reaper)
    await (await open_custody(guarded)).terminate()
    done = await soon(reaper.result())
    assert (done.suspects, done.orphans) == (1, ())
    assert guarded.world.released == []


@pytest.mark.usefixtures("unhurried")
async def test_what_is_gone_at_the_second_look_is_no_orphan(guarded: Guarded, place: Place) -> None:
    await lost(guarded)
    reaper = await reap(guarded.world)
    await between_the_looks(reaper)
    guarded.world.exists.clear()
    done = await soon(reaper.result())
    assert (done.found, done.suspects, done.orphans) == (0, 1, ())


@pytest.mark.usefixtures("unhurried")
async def test_a_lease_that_somebody_renews_is_no_orphan_s(guarded: Guarded, place: Place) -> None:
    """Such as a custody in another Temporal service, whose operator gave it the same deployment and namespace."""
    await lost(guarded)
    lease = f"{guarded.identity.storage}/custody/lease.json"
    place.leases[lease] = b'{"sequence": 1}'
    reaper = await reap(guarded.world)
    await between_the_looks(reaper)
    place.leases[lease] = b'{"sequence": 2}'
    done = await soon(reaper.result())
    assert (done.suspects, done.orphans) == (1, ())
    assert guarded.world.released == []
    assert len((await reaped(guarded.world)).orphans) == 1  # nobody renews it any more
    await custodys_word(guarded.world)


# What is never touched -----------------------------------------------------------------------------------------------


async def test_another_s_mark_or_none_and_what_cannot_be_read_is_told_and_never_touched(
    world: World, place: Place
) -> None:
    world.first_run_id = "none"
    ours = hosts_of(world)
    for changed in ({"deployment": "test-2"}, {"deployment": "tes"}, {"namespace": "another"}, {"namespace": ""}):
        place.put(world, hosts_of(world, **changed))
    place.there.append((world, Mark(context="another machine", hosts=ours)))
    place.unmarked = ("/somewhere/unmarked",)
    place.unreadable = ("/somewhere/mark.json is damaged",)
    reaper = await reap(world)
    done = await soon(reaper.result())
    assert (done.found, done.foreign, done.unreadable, done.suspects, done.orphans) == (0, 6, 1, 0, ())
    assert place.looks == 1
    assert world.released == []
    page = (await reaper.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)).current_details
    assert "| another's, or without a mark | 6 |" in page
    assert "of deployment test-2" in page
    assert "made at local another machine" in page
    assert "/somewhere/mark.json is damaged" in page


async def test_a_custody_that_somebody_opens_first_makes_the_start_fail_harmlessly(
    guarded: Guarded, place: Place
) -> None:
    """After the second look described it, and before the reaper starts its own."""
    await lost(guarded)
    reads = iter(range(10))
    opened: list[WorkflowHandle[Any, Any]] = []

    async def open_at_the_second() -> None:
        if next(reads) == 1:
            opened.append(await open_custody(guarded))

    place.before_a_lease = open_at_the_second
    done = await reaped(guarded.world)
    [orphan] = done.orphans
    assert not orphan.handed_over
    place.before_a_lease = nothing_first
    assert (await opened[0].query("state"))["state"] == "held"
    assert guarded.world.released == []
    await opened[0].terminate()


async def test_two_reapers_at_once_start_one_custody(guarded: Guarded, place: Place) -> None:
    await lost(guarded)
    slow = guarded.world.script[names.RELEASE] = Hold()
    both = await asyncio.gather(reaped(guarded.world), reaped(guarded.world))
    slow.go.set()
    handed_over = [each.handed_over for done in both for each in done.orphans]
    assert handed_over.count(True) == 1
    assert (await custodys_word(guarded.world)).cleanup == "clean"
    assert len(guarded.world.orders(names.RELEASE)) == 1


async def test_a_run_that_lost_only_its_custody_is_told_and_ends(world: World, place: Place) -> None:
    world.script[names.WATCH] = training = Hold()
    run = await world.start(PLAIN)
    await soon(training.reached.wait())
    place.put(world, hosts_of(world))
    await world.custody.terminate()
    [orphan] = (await reaped(world)).orphans
    assert orphan.handed_over
    ended = await ending_of(run)
    assert ended.status == "failed"
    assert "custody released the hosts: found by the reaper: its custody was terminated" in ended.message
    world.exists.discard(f"job/{world.key}-train")  # a stand-in's job does not end with its cluster
    assert (await custodys_word(world)).cleanup == "clean"


# What may happen to it -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unhurried")
async def test_its_worker_dies_between_the_looks_and_the_next_one_goes_on(
    guarded: Guarded, temporal: Temporal, place: Place
) -> None:
    await lost(guarded)
    reaper = await reap(guarded.world)
    await between_the_looks(reaper)
    await temporal.stop_run_worker()
    await asyncio.sleep(1)
    await temporal.start_run_worker()
    done = await soon(reaper.result())
    assert [each.handed_over for each in done.orphans] == [True]
    assert place.looks == 2
    assert (await custodys_word(guarded.world)).cleanup == "clean"


async def test_a_thousand_orphans_are_handed_over_in_bounded_parts(world: World, place: Place) -> None:
    run = await world.client.start_workflow("Nothing", id=world.workflow_id, task_queue="nobody-polls-this")
    assert run.first_execution_run_id is not None
    world.first_run_id = run.first_execution_run_id
    await run.terminate()
    for number in range(1000):
        key = f"{world.key}-{number:04d}"
        place.put(world, hosts_of(world, run_key=key, custody_id=custody_id(key)))
    reaper = await reap(world)
    done = await asyncio.wait_for(reaper.result(), 120)
    assert (done.found, done.suspects, len(done.orphans)) == (1000, MOST_SUSPECTS, MOST_SUSPECTS)
    assert done.left_out == 1000 - MOST_SUSPECTS
    events = await events_of(reaper)
    assert len(events) <= LONGEST
    assert sum(each.ByteSize() for each in events) < 1_000_000

    async def released() -> bool:
        return len(world.released) == MOST_SUSPECTS

    await until(released, "the first forty are released")
    place.there = place.there[MOST_SUSPECTS : MOST_SUSPECTS + 45]
    again = await asyncio.wait_for(reaped(world), 120)
    assert (again.found, len(again.orphans), again.left_out) == (45, MOST_SUSPECTS, 5)


async def test_a_worker_of_another_deployment_refuses_to_sweep(world: World, place: Place) -> None:
    with pytest.raises(WorkflowFailureError) as failed:
        await soon((await reap(world, {"deployment": "another"})).result())
    assert "this worker is of deployment test" in str(getattr(failed.value.cause, "cause", ""))
    assert place.looks == 0


@pytest.mark.parametrize("told", [None, {}, {"deployment": 1}, {"deployment": "test", "all": True}, "test"], ids=str)
async def test_an_order_that_makes_no_sense_ends_it_failed(world: World, place: Place, told: Any) -> None:
    with pytest.raises(WorkflowFailureError) as failed:
        await soon((await reap(world, told)).result())
    assert isinstance(failed.value.cause, ApplicationError)
    assert "python -m worker setup" in failed.value.cause.message
    assert place.looks == 0
