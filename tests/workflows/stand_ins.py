"""Stand-ins for the activities: the real names, scripted behaviour, and a small world outside that can leak.

The workflows and the server are real. What an activity would touch is a set of names in a `World`; what it claims, it
claims from the real custody through `activities.custody`, as the real activities do. A test scripts a world, starts a
run in it, and looks afterwards at what was asked, what was touched and what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal
from uuid import uuid4

from temporalio import activity
from temporalio.api.common.v1 import Payload
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
)
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError, CancelledError

from activities.custody import claimed
from activities.storage import Fetched
from workflows import activity_names as names
from workflows.evidence import (
    Artifacts,
    Check,
    Claim,
    ClaimKind,
    Cleared,
    Commit,
    Deployment,
    DrillOrder,
    HostFacts,
    Hosts,
    HostsOrder,
    Identity,
    Inventory,
    JobOrder,
    KeepOrder,
    Mark,
    Placement,
    PreflightOrder,
    Proof,
    ProofOrder,
    RecordsOrder,
    Recovery,
    Release,
    ReleaseOrder,
    RunClosed,
    RunStatus,
    Strike,
    SubmittedJob,
    UnspokenOrder,
    Verdict,
    VerifyOrder,
    Victim,
    WatchOrder,
    WatchResult,
)
from workflows.names import custody_id, run_key, submission_id
from workflows.timeouts import RUN_QUEUE

PATIENCE_S = 60.0
"""How long a test waits for what must happen; a loaded machine gets there in a few seconds."""
BEAT_S = 0.1

LONGEST_RUN, LONGEST_CUSTODY = 250, 150
"""Events that a history may have, however long the run trains (design: History and cost)."""

PLAIN: dict[str, Any] = {
    "name": "regression",
    "hosts": {"provider": "local", "count": 2},
    "storage": {"uri": "s3://lanyard/runs"},
    "workload": {"kind": "regression", "recipe": {"steps": 32, "checkpoint_interval": 4}},
}
DRILLED: dict[str, Any] = {**PLAIN, "drill": {"kind": "worker", "after_step": 8}}
FULL: dict[str, Any] = {**DRILLED, "parity": True}

Usual = Callable[[], Awaitable[Any]]
Behaviour = Callable[[Any, Usual], Awaitable[Any]]
"""What an activity does instead: given its order, and the usual thing to do."""


# Behaviours ----------------------------------------------------------------------------------------------------------


def fails(
    message: str, *, kind: str = "Broken", times: int | None = None, again_in: timedelta | None = None
) -> Behaviour:
    """Fail for good; or with `times`, so often and then do the usual; or with `again_in`, retry that much later."""

    async def behave(order: Any, usual: Usual) -> Any:
        if times is not None and activity.info().attempt > times:
            return await usual()
        for_good = times is None and again_in is None
        raise ApplicationError(message, type=kind, non_retryable=for_good, next_retry_delay=again_in)

    return behave


def answers(value: Any) -> Behaviour:
    """Answer with this."""

    async def behave(order: Any, usual: Usual) -> Any:
        return value

    return behave


def loses_the_first_answer() -> Behaviour:
    """Do the usual, then fail, once: the effect happened and its answer was lost."""

    async def behave(order: Any, usual: Usual) -> Any:
        done = await usual()
        if activity.info().attempt == 1:
            raise ApplicationError("the answer was lost")
        return done

    return behave


class Hold:
    """Stop in the activity until the test says `go`; `reached` tells it that the activity is there.

    `when` picks the calls that are held; `after` does the usual first and holds back the answer; `stubborn` goes on
    though it is cancelled, as a thread does.
    """

    def __init__(
        self, when: Callable[[Any], bool] = lambda order: True, *, after: bool = False, stubborn: bool = False
    ) -> None:
        self.reached = asyncio.Event()
        self.go = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.left = asyncio.Event()
        self.error: BaseException | None = None
        self._when, self._after, self._stubborn = when, after, stubborn

    async def __call__(self, order: Any, usual: Usual) -> Any:
        if not self._when(order):
            return await usual()
        done = await usual() if self._after else None
        self.reached.set()
        try:
            await self._wait()
            return done if self._after else await usual()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.left.set()

    async def _wait(self) -> None:
        while not self.go.is_set():
            try:
                with contextlib.suppress(RuntimeError):  # no heartbeat for an activity whose workflow has closed
                    activity.heartbeat("held")
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.go.wait(), BEAT_S)
            except asyncio.CancelledError:
                self.cancelled.set()
                if not self._stubborn:
                    raise


# The world outside ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """How a run ended, as its starter sees it."""

    status: Literal["completed", "failed", "canceled"]
    kind: str = ""
    message: str = ""
    verdict: Verdict | None = None


@dataclass
class World:
    """What lies outside one run: the things that exist, what was asked of activities, and what they are to do."""

    client: Client
    workflow_id: str
    script: dict[str, Behaviour] = field(default_factory=dict)
    search_attributes: tuple[str, ...] = ()
    asked: list[tuple[str, Any]] = field(default_factory=list)
    exists: set[str] = field(default_factory=set)
    touched: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    first_run_id: str = ""
    price_per_hour: float = 0.0

    @property
    def key(self) -> str:
        return run_key(self.workflow_id, self.client.namespace, self.first_run_id)

    @property
    def custody(self) -> WorkflowHandle[Any, Release]:
        return self.client.get_workflow_handle(custody_id(self.key), result_type=Release)

    def orders(self, name: str) -> list[Any]:
        """The orders that this activity was given, attempts included."""
        return [order for asked, order in self.asked if asked == name]

    def story(self) -> list[str]:
        """The names of the run's activities in the order they were asked; custody's own are left out."""
        return [name for name, _ in self.asked if name not in (names.KEEP, names.RELEASE, names.REPORT_UNSPOKEN)]

    async def start(self, *inputs: Any, **options: Any) -> WorkflowHandle[Any, Any]:
        """Start the run as a person would: by its type's name, with whatever inputs; answers its exact run."""
        handle = await self.client.start_workflow(
            "GuardedTrain", args=inputs, id=self.workflow_id, task_queue=RUN_QUEUE, **options
        )
        assert handle.first_execution_run_id is not None
        self.first_run_id = handle.first_execution_run_id
        return self.client.get_workflow_handle(self.workflow_id, run_id=self.first_run_id)

    async def play(self, name: str, order: Any, usual: Usual) -> Any:
        self.asked.append((name, order))
        behave = self.script.get(name)
        return await behave(order, usual) if behave else await usual()

    async def touch(self, identity: Identity, kind: ClaimKind, name: str, **changes: Any) -> None:
        """Claim, then create or adopt: what every mutating activity does."""
        wanted = a_claim(identity, kind, name, **changes)
        async with claimed(self.client, identity, wanted) as permit:
            permit.check()
            if wanted.id not in self.exists:
                self.exists.add(wanted.id)
                self.touched.append(wanted.id)


async def nothing_first() -> None:
    """What happens before a lease is read, usually."""


def a_claim(identity: Identity, kind: ClaimKind = "job", name: str = "job", **changes: Any) -> Claim:
    """A claim as the local provider makes it, with windows short enough for a test."""
    return Claim(
        kind=kind,
        name=name,
        provider="local",
        context="test",
        run_id=identity.run_id,
        holder="stand-in",
        send_window_s=30.0,
        longest_request_s=5.0,
    ).model_copy(update=changes)


@dataclass
class Place:
    """A hosts provider as the reaper sees it: what lies there, of which world, and what else is found. The reaper's
    own activity is the real one."""

    name: str = "local"
    there: list[tuple[World, Mark]] = field(default_factory=list)
    unmarked: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    looks: int = 0
    leases: dict[str, bytes] = field(default_factory=dict)
    before_a_lease: Callable[[], Awaitable[None]] = field(default=nothing_first)
    """Awaited when a look asks for a lease: after its inventory was read and the custody described."""

    def context(self, order: HostsOrder) -> str:
        return "test"

    def claims(self, order: HostsOrder) -> list[Claim]:
        return [a_claim(order.identity, "cluster", order.identity.run_key)]

    def inventory(self, limit: int) -> Inventory:
        self.looks += 1
        left = [mark for world, mark in self.there if f"cluster/{mark.hosts.identity.run_key}" in world.exists]
        return Inventory(marked=tuple(left[:limit]), unmarked=self.unmarked, unreadable=self.unreadable)

    def put(self, world: World, hosts: HostsOrder) -> None:
        """Hosts of this order are there, with their mark."""
        world.exists.add(f"cluster/{hosts.identity.run_key}")
        self.there.append((world, Mark(context="test", hosts=hosts)))

    async def get(self, uri: str) -> Fetched | None:
        """Storage: leases alone."""
        await self.before_a_lease()
        return Fetched(self.leases[uri], "") if uri in self.leases else None


# The activities ------------------------------------------------------------------------------------------------------

_CLOSED: dict[WorkflowExecutionStatus, RunStatus] = {
    WorkflowExecutionStatus.COMPLETED: "completed",
    WorkflowExecutionStatus.FAILED: "failed",
    WorkflowExecutionStatus.CANCELED: "canceled",
    WorkflowExecutionStatus.TERMINATED: "terminated",
    WorkflowExecutionStatus.TIMED_OUT: "timed_out",
}


class StandIns:
    """One set for all tests of a session; each call is played in the world of its run."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._worlds: dict[str, World] = {}

    def world(self, name: str) -> World:
        """A new world for one run; `name` makes its workflow id readable."""
        made = World(self._client, f"{name[:40]}-{uuid4().hex[:8]}")
        self._worlds[made.workflow_id] = made
        return made

    async def _play(self, name: str, order: Any, workflow_id: str, usual: Callable[[World], Awaitable[Any]]) -> Any:
        world = self._worlds[workflow_id]
        return await world.play(name, order, lambda: usual(world))

    # of the run

    @activity.defn(name=names.ORIENT)
    async def orient(self) -> Deployment:
        async def usual(world: World) -> Deployment:
            return Deployment(
                deployment="test",
                search_attributes=world.search_attributes,
                secret_fingerprint="f" * 16,
                application_source="a" * 64,
            )

        workflow_id = activity.info().workflow_id
        assert workflow_id is not None
        done: Deployment = await self._play(names.ORIENT, None, workflow_id, usual)
        return done

    @activity.defn(name=names.PREFLIGHT)
    async def preflight(self, order: PreflightOrder) -> Cleared:
        async def usual(world: World) -> Cleared:
            return Cleared(conditional_writes=True, price_per_hour=world.price_per_hour, plan="2 local hosts")

        done: Cleared = await self._play(names.PREFLIGHT, order, order.identity.workflow_id, usual)
        return done

    @activity.defn(name=names.LAUNCH)
    async def launch(self, order: HostsOrder) -> None:
        async def usual(world: World) -> None:
            key, price = order.identity.run_key, order.price_per_hour
            await world.touch(order.identity, "cluster", key, price_per_hour=price)

        await self._play(names.LAUNCH, order, order.identity.workflow_id, usual)

    @activity.defn(name=names.PROVE_HOSTS)
    async def prove_hosts(self, order: HostsOrder) -> Hosts:
        async def usual(world: World) -> Hosts:
            return Hosts(
                provider=order.provider,
                context="test",
                cluster=order.identity.run_key,
                hosts=tuple(a_host(index) for index in range(order.count)),
            )

        done: Hosts = await self._play(names.PROVE_HOSTS, order, order.identity.workflow_id, usual)
        return done

    @activity.defn(name=names.SUBMIT)
    async def submit(self, order: JobOrder) -> SubmittedJob:
        async def usual(world: World) -> SubmittedJob:
            there = f"job/{order.submission_id}" in world.exists
            await world.touch(order.identity, "job", order.submission_id)
            return SubmittedJob(submission_id=order.submission_id, adopted=there)

        done: SubmittedJob = await self._play(names.SUBMIT, order, order.identity.workflow_id, usual)
        return done

    @activity.defn(name=names.WATCH)
    async def watch(self, order: WatchOrder) -> WatchResult:
        async def usual(world: World) -> WatchResult:
            if order.milestones:
                return watched("milestone", order.milestones[0])
            return watched("finished", order.steps)

        done: WatchResult = await self._play(names.WATCH, order, order.job.identity.workflow_id, usual)
        return done

    @activity.defn(name=names.CHOOSE)
    async def choose(self, order: DrillOrder) -> Victim:
        async def usual(world: World) -> Victim:
            return Victim(
                rank=1,
                node_id="node-1",
                address="127.0.0.3",
                attempt=1,
                pid=4711,
                start_time=123456,
                boot_id="boot",
                commit=order.commit,
            )

        done: Victim = await self._play(names.CHOOSE, order, order.job.identity.workflow_id, usual)
        return done

    @activity.defn(name=names.STRIKE)
    async def strike(self, order: DrillOrder) -> Strike:
        async def usual(world: World) -> Strike:
            helper = submission_id(order.job.identity.run_key, "strike")
            await world.touch(order.job.identity, "job", helper)
            return Strike(outcome="killed", at=time.time(), helper=helper)

        done: Strike = await self._play(names.STRIKE, order, order.job.identity.workflow_id, usual)
        return done

    @activity.defn(name=names.PROVE)
    async def prove(self, order: ProofOrder) -> Proof:
        async def usual(world: World) -> Proof:
            return a_proof(order)

        done: Proof = await self._play(names.PROVE, order, order.identity.workflow_id, usual)
        return done

    @activity.defn(name=names.SAVE_RECORDS)
    async def save_records(self, order: RecordsOrder) -> None:
        await self._play(names.SAVE_RECORDS, order, order.hosts.identity.workflow_id, nothing)

    @activity.defn(name=names.VERIFY)
    async def verify(self, order: VerifyOrder) -> Artifacts:
        async def usual(world: World) -> Artifacts:
            return Artifacts(
                ok=True,
                submission_id=order.submission_id,
                checks=(Check(name="checksums", ok=True, detail="4 files"),),
                figures={"final_loss": 0.01},
            )

        done: Artifacts = await self._play(names.VERIFY, order, order.identity.workflow_id, usual)
        return done

    @activity.defn(name=names.REPORT)
    async def report(self, verdict: Verdict) -> None:
        await self._play(names.REPORT, verdict, verdict.workflow_id, nothing)

    # of custody

    @activity.defn(name=names.KEEP)
    async def keep(self, order: KeepOrder) -> RunClosed:
        async def usual(world: World) -> RunClosed:
            handle = self._client.get_workflow_handle(order.identity.workflow_id, run_id=order.identity.run_id)
            while True:
                told: WorkflowExecutionDescription = await handle.describe()
                if told.status in _CLOSED:
                    return RunClosed(status=_CLOSED[told.status])
                activity.heartbeat("keeping")
                await asyncio.sleep(BEAT_S)

        done: RunClosed = await self._play(names.KEEP, order, order.identity.workflow_id, usual)
        return done

    @activity.defn(name=names.RELEASE)
    async def release(self, order: ReleaseOrder) -> Release:
        async def usual(world: World) -> Release:
            for held in reversed(order.claims):
                world.exists.discard(held.id)
                world.released.append(held.id)
            return a_release(order.identity, reason=order.reason, claims=order.claims, began=order.began)

        done: Release = await self._play(names.RELEASE, order, order.identity.workflow_id, usual)
        return done

    @activity.defn(name=names.REPORT_UNSPOKEN)
    async def report_unspoken(self, order: UnspokenOrder) -> None:
        await self._play(names.REPORT_UNSPOKEN, order, order.identity.workflow_id, nothing)

    def of_the_run_queue(self) -> list[Callable[..., Any]]:
        return [
            self.orient,
            self.preflight,
            self.launch,
            self.submit,
            self.choose,
            self.strike,
            self.prove,
            self.save_records,
            self.verify,
            self.report,
        ]

    def of_the_watch_queue(self) -> list[Callable[..., Any]]:
        return [self.watch, self.keep, self.prove_hosts]

    def of_the_release_queue(self) -> list[Callable[..., Any]]:
        return [self.release, self.report_unspoken]


async def nothing(world: World) -> None:
    """The usual thing of an activity that only writes."""


# Facts ---------------------------------------------------------------------------------------------------------------


def a_host(index: int) -> HostFacts:
    return HostFacts(
        index=index,
        role="head" if index == 0 else "worker",
        address=f"127.0.0.{index + 2}",
        node_id=f"node-{index}",
        host_fingerprint="h" * 64,
        hostname="host",
        versions={"python": "3.11.7", "torch": "2.13.0+cpu", "ray": "2.58.0"},
        environment="e" * 16,
    )


def a_commit(step: int) -> Commit:
    return Commit(checkpoint=f"checkpoint_{step:06d}", step=step, loss=1.0 / step, index=step)


def watched(end: Literal["milestone", "finished", "failed", "stalled", "lost"], step: int, **told: str) -> WatchResult:
    return WatchResult(
        end=end,
        commit=a_commit(step) if step else None,
        job_status=told.get("job_status", "SUCCEEDED" if end == "finished" else "RUNNING"),
        message=told.get("message", ""),
        diagnosis=told.get("diagnosis", ""),
        at=time.time(),
    )


def a_proof(order: ProofOrder, problems: Sequence[str] = ()) -> Proof:
    recovery = None
    if order.victim is not None:
        step = order.victim.commit.step
        recovery = Recovery(
            proved=not problems,
            problems=tuple(problems),
            committed_step=step,
            resumed_step=step + 1,
            first_steps={"0": step + 1, "1": step + 1},
            attempts=2,
            seconds_to_resume=12.5,
            model_sha256="1" * 64,
            momentum_sha256="2" * 64,
            parity="equal" if order.parity else "not_asked",
        )
    ranks = tuple({"rank": rank, "node_id": f"node-{rank}"} for rank in range(order.world_size))
    return Proof(
        placement=Placement(ranks=ranks, distinct_hosts=1, distinct_nodes=2, distinct_devices=1), recovery=recovery
    )


def a_release(identity: Identity, **told: Any) -> Release:
    known = {"reason": "", "claims": (), "steps": (), "remaining": (), "began": time.time(), "ended": time.time()}
    return Release(run_key=identity.run_key, cleanup="clean", **{**known, **told})


# Looking at a run ----------------------------------------------------------------------------------------------------


async def soon(awaited: Awaitable[Any]) -> Any:
    """The result of what must happen within `PATIENCE_S`."""
    return await asyncio.wait_for(awaited, PATIENCE_S)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for a condition of the world that nobody announces."""
    deadline = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(0.05)


async def ending_of(handle: WorkflowHandle[Any, Any]) -> Ending:
    """How this exact run ended: its status, the failure's words, and the verdict wherever it is carried."""
    try:
        result = await soon(handle.result(follow_runs=False))
    except WorkflowFailureError as failure:
        error = failure.cause
        if isinstance(error, CancelledError):
            return Ending("canceled", verdict=await handle.query("verdict", result_type=Verdict))
        assert isinstance(error, ApplicationError), repr(error)
        carried = error.details[0] if error.details else None
        spoken = Verdict.model_validate(carried) if isinstance(carried, dict) and "run_key" in carried else None
        return Ending("failed", error.type or "", error.message, spoken)
    return Ending("completed", verdict=Verdict.model_validate(result))


async def custodys_word(world: World) -> Release:
    """Custody's result, once it has closed; then nothing of the run may be left."""
    record: Release = await soon(world.custody.result())
    assert world.exists == set()
    return record


async def events_of(handle: WorkflowHandle[Any, Any]) -> list[HistoryEvent]:
    """The history of this exact run."""
    return list((await handle.fetch_history()).events)


def encoded(data: bytes, **metadata: bytes) -> RawValue:
    """A payload of these very bytes."""
    return RawValue(Payload(metadata=metadata, data=data))
