"""The lease is renewed only while Temporal answers for custody, never past its deadline, and never with a lower one."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities import heartbeat, keeper
from activities.keeper import CLOSED, Keeper
from tests.activities.orders import IDENTITY
from tests.activities.stand_ins import Objects, environment
from workflows.evidence import KeepOrder, RunClosed

LEASE = f"{IDENTITY.storage}/custody/lease.json"
RUNNING = WorkflowExecutionStatus.RUNNING


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "LOOK_S", 0.02)
    monkeypatch.setattr(keeper, "CLOSING_LOOK_S", 0.02)
    monkeypatch.setattr(keeper, "lease_renewal_s", lambda lease_s: 0.02)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)


class Temporal:
    """Answers describes of the run and of custody. What it answers can change while the keeper runs."""

    def __init__(self) -> None:
        self.run: WorkflowExecutionStatus | Exception = RUNNING
        self.custody: WorkflowExecutionStatus | Exception = RUNNING
        self.deadline: Any = time.time() + 3600.0
        self.described: list[tuple[str, str | None]] = []

    def get_workflow_handle(self, workflow_id: str, *, run_id: str | None = None) -> Any:
        async def describe(rpc_timeout: Any) -> Any:
            self.described.append((workflow_id, run_id))
            told = self.custody if workflow_id == IDENTITY.custody_id else self.run
            if isinstance(told, Exception):
                raise told

            async def memo_value(key: str, default: Any) -> Any:
                assert key == "deadline"
                return self.deadline if self.deadline is not None else default

            return SimpleNamespace(status=told, memo_value=memo_value)

        return SimpleNamespace(describe=describe)


class Keeping:
    """A keeper that keeps while the test goes on."""

    def __init__(self, temporal: Temporal, store: Objects | None = None, *, lease_s: float = 120.0, renew: bool = True):
        client: Any = temporal
        self.store = store if store is not None else Objects()
        self.beats: list[dict[str, Any]] = []
        self.env = environment(self.beats)
        order = KeepOrder(identity=IDENTITY, lease_s=lease_s, renew=renew)
        self.task: asyncio.Task[RunClosed] = asyncio.ensure_future(self.env.run(Keeper(client, self.store).keep, order))

    def lease(self) -> dict[str, Any]:
        found = self.store.objects.get(LEASE)
        return dict(json.loads(found)) if found else {}

    def renewals(self) -> int:
        return self.store.done.count(f"write {LEASE}")

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not true():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)

    async def renews(self, times: int = 2) -> None:
        before = self.renewals()
        await self.until(lambda: self.renewals() >= before + times)

    async def end(self) -> None:
        self.env.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


def down() -> RPCError:
    return RPCError("no connection", RPCStatusCode.UNAVAILABLE, b"")


async def test_a_lease_is_renewed_while_temporal_answers_for_custody() -> None:
    keeping = Keeping(Temporal())
    await keeping.renews(3)
    told = keeping.lease()
    assert told == {"schema": 1, "sequence": keeping.renewals(), "duration_s": 120.0}
    await keeping.until(lambda: any(beat.get("lease", 0) >= 3 for beat in keeping.beats))
    await keeping.end()


async def test_nothing_is_renewed_before_temporal_answered_and_it_goes_on_when_it_does() -> None:
    temporal = Temporal()
    temporal.custody = temporal.run = down()
    keeping = Keeping(temporal)
    await keeping.until(lambda: len(temporal.described) > 6)
    assert keeping.renewals() == 0
    await keeping.until(lambda: any("does not answer: UNAVAILABLE" in beat["note"] for beat in keeping.beats))
    temporal.custody = temporal.run = RUNNING
    await keeping.renews()
    temporal.custody = down()
    await keeping.until(lambda: any("the lease was not renewed" in beat["note"] for beat in keeping.beats))
    before, asked = keeping.renewals(), len(temporal.described)
    await keeping.until(lambda: len(temporal.described) > asked + 6)
    assert keeping.renewals() == before
    await keeping.end()


async def test_an_answer_about_the_run_alone_renews_nothing() -> None:
    temporal = Temporal()
    temporal.custody = RPCError("slow", RPCStatusCode.DEADLINE_EXCEEDED, b"")
    keeping = Keeping(temporal)
    await keeping.until(lambda: temporal.described.count((IDENTITY.workflow_id, IDENTITY.run_id)) > 4)
    assert keeping.renewals() == 0
    await keeping.end()


@pytest.mark.parametrize("wrong_by_s", [0.0, 86_400.0, -86_400.0])
async def test_no_lease_reaches_past_custody_s_deadline(monkeypatch: pytest.MonkeyPatch, wrong_by_s: float) -> None:
    """Which is of the server's clock, as the attempt's start is: the worker's own may be a day off."""
    passed = 0.0
    clocks = SimpleNamespace(time=lambda: time.time() + wrong_by_s, monotonic=lambda: passed)
    monkeypatch.setattr(keeper, "time", clocks)
    temporal = Temporal()
    keeping = Keeping(temporal)
    began = keeping.env.info.started_time.timestamp()
    temporal.deadline = began + 50.0
    await keeping.renews()
    assert keeping.lease()["duration_s"] == pytest.approx(50.0)
    passed = 50.0
    asked = len(temporal.described)
    await keeping.until(lambda: len(temporal.described) > asked + 6)
    before, asked = keeping.renewals(), len(temporal.described)
    await keeping.until(lambda: len(temporal.described) > asked + 6)
    assert keeping.renewals() == before
    temporal.deadline = began + 5000.0  # extended
    await keeping.renews()
    assert keeping.lease()["duration_s"] == 120.0
    await keeping.end()


@pytest.mark.parametrize("status", [each for each in WorkflowExecutionStatus if each != RUNNING])
async def test_a_custody_that_closed_renews_nothing(status: WorkflowExecutionStatus) -> None:
    temporal = Temporal()
    temporal.custody = status
    keeping = Keeping(temporal)
    await keeping.until(lambda: len(temporal.described) > 6)
    assert keeping.renewals() == 0
    await keeping.end()


async def test_a_custody_that_names_no_deadline_renews_nothing() -> None:
    temporal = Temporal()
    temporal.deadline = None
    keeping = Keeping(temporal)
    await keeping.until(lambda: len(temporal.described) > 6)
    assert keeping.renewals() == 0
    await keeping.end()


async def test_the_next_keeper_goes_on_from_the_last_one_s_number() -> None:
    store = Objects()
    seen = []
    for _ in range(3):
        keeping = Keeping(Temporal(), store)
        await keeping.renews()
        await keeping.end()
        seen.append(keeping.lease()["sequence"])
    assert seen == sorted(set(seen))
    assert seen[-1] == store.done.count(f"write {LEASE}")  # one number each, none left out, none twice


DAMAGED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"7",
    b"\xff\xfe",
    b"{}",
    b'{"sequence": null}',
    b'{"sequence": "7"}',
    b'{"sequence": 7.5}',
    b'{"sequence": 1e999}',
    b'{"sequence": true}',
    b'{"sequence": -7}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=[repr(each[:20]) for each in DAMAGED])
async def test_a_damaged_lease_is_followed_by_a_higher_number_than_any_counted_one(damaged: bytes) -> None:
    keeping = Keeping(Temporal(), Objects({LEASE: damaged}))
    await keeping.renews()
    assert keeping.lease()["sequence"] > 1_700_000_000
    await keeping.end()


async def test_storage_that_is_down_is_tried_again() -> None:
    keeping = Keeping(Temporal())
    await keeping.renews()
    before = keeping.lease()["sequence"]
    keeping.store.down = True
    await keeping.until(lambda: any("EndpointConnectionError" in beat["note"] for beat in keeping.beats))
    keeping.store.down = False
    await keeping.renews()
    assert keeping.lease()["sequence"] > before
    await keeping.end()


async def test_a_renewal_that_broke_ends_the_keeper_and_is_not_missed_in_silence() -> None:
    temporal = Temporal()
    temporal.deadline = "never"  # a bug: what is no number
    with pytest.raises(ValueError, match="never"):
        await asyncio.wait_for(Keeping(temporal).task, 30)


@pytest.mark.parametrize(
    "status",
    [
        each
        for each in WorkflowExecutionStatus
        if each.name in {"COMPLETED", "FAILED", "CANCELED", "TERMINATED", "TIMED_OUT", "CONTINUED_AS_NEW"}
    ],
)
@pytest.mark.parametrize("renew", [True, False])
async def test_every_way_of_closing_is_told(status: WorkflowExecutionStatus, renew: bool) -> None:
    temporal = Temporal()
    temporal.run = status
    keeping = Keeping(temporal, renew=renew)
    assert (await asyncio.wait_for(keeping.task, 30)).status == status.name.lower()
    assert set(temporal.described) - {(IDENTITY.custody_id, None)} == {(IDENTITY.workflow_id, IDENTITY.run_id)}


async def test_a_run_that_temporal_does_not_know_is_gone() -> None:
    temporal = Temporal()
    temporal.run = RPCError("not found", RPCStatusCode.NOT_FOUND, b"")
    assert (await asyncio.wait_for(Keeping(temporal).task, 30)).status == "gone"


async def test_a_silent_temporal_closes_no_run() -> None:
    temporal = Temporal()
    temporal.run = down()
    keeping = Keeping(temporal, renew=False)
    await keeping.until(lambda: len(temporal.described) > 5)
    temporal.run = RUNNING
    asked = len(temporal.described)
    await keeping.until(lambda: len(temporal.described) > asked + 5)
    assert keeping.renewals() == 0
    temporal.run = WorkflowExecutionStatus.TERMINATED
    assert (await asyncio.wait_for(keeping.task, 30)).status == "terminated"


async def test_the_renewal_ends_with_the_keeper() -> None:
    temporal = Temporal()
    keeping = Keeping(temporal)
    await keeping.renews()
    temporal.run = WorkflowExecutionStatus.COMPLETED
    await asyncio.wait_for(keeping.task, 30)
    before = keeping.renewals()
    await asyncio.sleep(0.1)
    assert keeping.renewals() == before


def test_each_closed_status_has_a_name() -> None:
    """One that is not known counts as open, which keeps hosts until custody's deadline: be told when there is one."""
    assert {each.name for each in WorkflowExecutionStatus} - {each.name for each in CLOSED} <= {"RUNNING", "PAUSED"}
