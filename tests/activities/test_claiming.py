"""Claim before touch: what custody refuses touches nothing, and what may still be sent is known to the second."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from temporalio.client import WorkflowUpdateFailedError, WorkflowUpdateRPCTimeoutOrCancelledError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities import custody as module
from activities.custody import Permit, claimed, holder
from tests.activities.orders import IDENTITY
from tests.activities.stand_ins import CustodyStandIn, claim, environment
from workflows.evidence import Claim

CLUSTER, JOB = claim("cluster", "w-0123456789"), claim("job", "w-0123456789-train")


class Work:
    """What an activity does within its claims; `touched` counts what it did to the outside."""

    def __init__(self, *wanted: Claim, error: Exception | None = None) -> None:
        self.wanted = wanted or (CLUSTER,)
        self.error = error
        self.touched = 0
        self.permit: Permit | None = None
        self.custody = CustodyStandIn()

    async def do(self) -> None:
        client: Any = self.custody
        async with claimed(client, IDENTITY, *self.wanted) as permit:
            self.permit = permit
            permit.check()
            self.touched += 1
            if self.error:
                raise self.error


async def test_a_claim_is_written_down_before_anything_is_touched_and_settled_after() -> None:
    work = Work(CLUSTER, JOB)
    untouched: list[int] = []
    work.custody.on_ask = lambda: untouched.append(work.touched)
    await environment().run(work.do)
    assert untouched == [0, 0]
    assert work.touched == 1
    assert [each.id for each in work.custody.claims] == ["cluster/w-0123456789", "job/w-0123456789-train"]
    assert work.custody.settled == [["settle", each.id, "test.1"] for each in work.custody.claims]
    assert {name for name, _ in work.custody.asked} == {IDENTITY.custody_id, "claim"}
    assert work.permit
    assert all(each.may_appear_until == 1.0 for each in work.permit.claims)  # as custody wrote it down


async def test_each_attempt_asks_anew_with_an_update_id_of_its_own() -> None:
    ids = []
    for attempt in (1, 2):
        work = Work()
        await environment(attempt=attempt).run(work.do)
        [(_, options)] = [each for each in work.custody.asked if each[0] == "claim"]
        ids.append(options["id"])
        assert work.custody.claims[0].attempt == f"test.{attempt}"
    assert ids == ["cluster/w-0123456789@test.1", "cluster/w-0123456789@test.2"]


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (WorkflowUpdateFailedError(ApplicationError("custody is releasing (abort)")), "custody is releasing (abort)"),
        (RPCError("workflow not found", RPCStatusCode.NOT_FOUND, b""), "custody has closed"),
    ],
    ids=["releasing", "closed"],
)
async def test_a_refusal_touches_nothing_and_is_not_tried_again(refusal: Exception, says: str) -> None:
    work = Work()
    work.custody.refusing = refusal
    with pytest.raises(ApplicationError) as caught:
        await environment().run(work.do)
    assert says in str(caught.value)
    assert "nothing was touched" in str(caught.value)
    assert (caught.value.type, caught.value.non_retryable) == ("ClaimRefused", True)
    assert (work.touched, work.custody.settled) == (0, [])


async def test_a_refusal_of_the_second_claim_touches_nothing_either() -> None:
    work = Work(CLUSTER, JOB)
    refused = WorkflowUpdateFailedError(ApplicationError("custody is releasing"))

    def refuse_the_second() -> None:
        work.custody.refusing = refused if work.custody.claims else None

    work.custody.on_ask = refuse_the_second
    with pytest.raises(ApplicationError, match="nothing was touched"):
        await environment().run(work.do)
    assert (work.touched, work.custody.settled) == (0, [])


@pytest.mark.parametrize(
    "silence",
    [RPCError("down", RPCStatusCode.UNAVAILABLE, b""), WorkflowUpdateRPCTimeoutOrCancelledError()],
    ids=["no server", "no answer"],
)
async def test_no_answer_is_no_claim_and_is_asked_again(silence: BaseException) -> None:
    work = Work()
    work.custody.refusing = silence
    with pytest.raises(type(silence)) as caught:
        await environment().run(work.do)
    assert not getattr(caught.value, "non_retryable", False)
    assert (work.touched, work.custody.settled) == (0, [])


async def test_when_the_work_fails_the_window_stands() -> None:
    work = Work(error=OSError("the answer was lost"))
    with pytest.raises(OSError, match="lost"):
        await environment().run(work.do)
    assert work.touched == 1
    assert work.custody.settled == []


async def test_a_final_no_is_an_answer_and_settles() -> None:
    work = Work(error=ApplicationError("there is no such machine", type="HostsFailed", non_retryable=True))
    with pytest.raises(ApplicationError, match="no such machine"):
        await environment().run(work.do)
    assert len(work.custody.settled) == 1
    unsure = Work(error=ApplicationError("ask again", type="SendWindowPassed"))
    with pytest.raises(ApplicationError, match="ask again"):
        await environment().run(unsure.do)
    assert unsure.custody.settled == []


async def test_a_cancelled_work_leaves_the_window_standing() -> None:
    custody = CustodyStandIn()
    client: Any = custody

    async def wait() -> None:
        async with claimed(client, IDENTITY, CLUSTER):
            await asyncio.sleep(60)

    env = environment()
    waiting = asyncio.ensure_future(env.run(wait))
    await asyncio.sleep(0.05)
    env.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(custody.claims) == 1
    assert custody.settled == []


async def test_a_settling_that_is_lost_costs_only_time() -> None:
    class Deaf(CustodyStandIn):
        async def signal(self, name: str, *, args: list[str], **_: Any) -> None:
            raise RPCError("down", RPCStatusCode.UNAVAILABLE, b"")

    work = Work()
    work.custody = Deaf()
    await environment().run(work.do)
    assert work.touched == 1


async def test_the_window_is_counted_from_before_the_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    class Clock:
        monotonic = staticmethod(lambda: now)

    monkeypatch.setattr(module, "time", Clock)

    def slowly() -> None:
        nonlocal now
        now += 20.0

    work = Work(CLUSTER, JOB.model_copy(update={"send_window_s": 30.0}))
    work.custody.on_ask = slowly
    await environment().run(work.do)
    assert work.permit
    # 60 s from 100.0, and 30 s from 120.0, when the second was asked for: the shorter counts for both.
    assert work.permit.until == 150.0
    now = 150.0
    work.permit.check()
    now = 150.1
    with pytest.raises(ApplicationError, match=r"send window of cluster/w-0123456789 passed") as caught:
        work.permit.check()
    assert (caught.value.type, caught.value.non_retryable) == ("SendWindowPassed", False)


async def test_an_answer_that_came_too_late_sends_nothing() -> None:
    work = Work(CLUSTER.model_copy(update={"send_window_s": 0.05}))
    work.custody.on_ask = lambda: time.sleep(0.1)
    with pytest.raises(ApplicationError, match="claiming again"):
        await environment().run(work.do)
    assert (work.touched, work.custody.settled) == (0, [])


async def test_who_holds_a_claim_is_said_for_people() -> None:
    async def who() -> str:
        return holder()

    assert await environment(attempt=3).run(who) == "unknown attempt 3"
