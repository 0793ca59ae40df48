"""One scenario, from its start to its row: start the run, hold it at the point, strike, end it, mend, wait, judge."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError, CancelledError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from tests.chaos.judging import BUCKET, Ended, Left, judge
from tests.chaos.lane import Lane
from tests.chaos.runs import PACES, run_json
from tests.chaos.scenarios import ACTIONS, CLUSTER, NOBODY, TRAINING, WITHSTOOD, Scenario
from tests.chaos.striking import NoVictim, Striker
from tests.integration.census import Census
from workflows.names import custody_id, run_key
from workflows.timeouts import RUN_QUEUE

LOOK_S: Final = 0.25
SETTLE_S: Final = 6.0
"""How long processes that were killed may take to be gone from /proc, and visibility to follow."""
BREAKS_THE_WORKER: Final = ("task fails for ever", "non-determinism")
"""Endings that are a worker with other code."""
SERVER_DIES: Final = ("temporal", "everything of the operator")
RESPAWN: Final = """
import os, subprocess, sys, time
while os.getppid() == int(sys.argv[1]):
    child = subprocess.Popen(["sleep", "600"], env={**os.environ, "LANYARD_CUSTODY": sys.argv[2]}, cwd="/")
    child.wait()
"""
"""Something of the run's that is there again whenever it is killed. It is not the run's itself."""


class Stuck(Exception):
    """The scenario did not come to its end; the message says where."""


@dataclass
class Row:
    """What came of one scenario."""

    id: str
    slice: str
    where: str
    victim: str
    ending: str
    seed: int
    outcome: str = ""
    expected: list[str] = field(default_factory=list)
    status: str = ""
    cleanup: str = ""
    leaks: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    trouble: str = ""
    """Why it could not be carried out; empty when it was."""
    seconds: float = 0.0
    released_s: float | None = None
    """From the moment things were mended until custody had released everything."""
    message: str = ""
    told: str = ""
    """The end of the worker's log, of a scenario that went wrong."""

    @property
    def good(self) -> bool:
        return not (self.leaks or self.wrong or self.trouble)

    def json(self) -> dict[str, Any]:
        return asdict(self)


async def carry(lane: Lane, scenario: Scenario, seed: int) -> Row:
    """Carry one scenario out. Never raises for what the run does; leaves the lane ready for the next."""
    row = Row(
        id=scenario.id,
        slice=scenario.slice,
        where=str(scenario.where),
        victim=scenario.victim,
        ending=scenario.ending,
        seed=seed,
        expected=sorted(scenario.expected),
    )
    began = time.monotonic()
    one = _One(lane, scenario, seed)
    try:
        await one.carry(row)
    except (Stuck, NoVictim, RPCError, OSError) as error:
        row.trouble = f"{type(error).__name__}: {error}"[:600]
    finally:
        await asyncio.shield(one.close(row))
    row.seconds = round(time.monotonic() - began, 1)
    if not row.good:
        row.told = lane.tail()
    return row


class _One:
    def __init__(self, lane: Lane, scenario: Scenario, seed: int) -> None:
        self.lane, self.scenario = lane, scenario
        self.chances = scenario.chances(seed)
        self.name = f"x{os.urandom(4).hex()}"
        """Begins the run key, and so marks every process of the run."""
        self.pace = PACES[scenario.slice]
        assert lane.client
        self.client = lane.client
        self.census = Census(
            mark=self.name,
            home=lane.home.root,
            scratch=lane.scratch,
            services=lane.pids,
            client=lane.client_environment,
            namespaces=lambda: ["default"],
            s3=lane.s3,
            bucket=BUCKET,
        )
        self.run_id = ""
        self.key = ""
        self.mended = 0.0
        self.finished = False
        self.blind = False
        self.respawner: subprocess.Popen[bytes] | None = None

    # -- the story

    async def carry(self, row: Row) -> None:
        scenario = self.scenario
        striker = Striker(self.lane, self.census, "", self.chances)
        await striker.prepare(scenario.victim)
        if scenario.where.kind != "training":
            self.lane.plan.arm(self.name, scenario.where.told())
        await self._start()
        self.left = Left(self.lane, self.key)
        striker = Striker(self.lane, self.census, self.key, self.chances)
        if scenario.where == WITHSTOOD:
            self._respawn()
        if scenario.acts_early and scenario.ending in ACTIONS:
            await self._until(self._trains, "training before the ending")
            await self._act()
        await self._until(self._there, f"the point {scenario.where}")
        await self._meet(striker)
        await self._wait_for_the_end(striker)
        row.released_s = await self._released_s()
        ended = await self._ended()
        row.status, row.message = ended.status, ended.message[:500]
        row.cleanup = str((ended.custody or {}).get("cleanup", "")) or ("nothing claimed" if not ended.custody else "")
        row.outcome, row.wrong = await asyncio.to_thread(judge, scenario, ended, self.left)
        if self.blind:
            row.wrong.append("custody called it released while no worker could see its hosts")
        row.leaks = (await asyncio.to_thread(self.census.settled, SETTLE_S)).lines()
        self.finished = True

    async def _meet(self, striker: Striker) -> None:
        """At the point: the ending and the strike, in the order that chance gave them; then everything goes on."""
        scenario = self.scenario
        acts = scenario.ending in ACTIONS and not scenario.acts_early
        first = self.chances.choice(("ending", "victim")) if scenario.victim != NOBODY else "ending"
        if scenario.victim in CLUSTER and scenario.ending == "cancel twice":
            first = "victim"  # between the two cancels release ends what is to be struck
        if scenario.victim == "worker" and scenario.ending in BREAKS_THE_WORKER:
            first = "victim"  # else the strike would be on the worker that is the ending
        if scenario.where == TRAINING:
            await asyncio.sleep(self.chances.random())
        if scenario.victim in CLUSTER:
            await striker.aim(scenario.victim)
        if acts and first == "ending":
            await self._act()
        if scenario.victim == NOBODY:
            await self._until(self._releasing, "release begins")
        await striker.strike(scenario.victim)
        if acts and first == "victim" and scenario.victim not in SERVER_DIES:
            await self._act()
        self.lane.plan.disarm(self.name)
        if not self._worker_is_ours:
            await striker.mend(scenario.victim)
        self.mended = time.time()
        if acts and first == "victim" and scenario.victim in SERVER_DIES:
            await self._act()
        self._stop_respawning()

    @property
    def _worker_is_ours(self) -> bool:
        """Whether the ending has put a worker of its own in place: then that is what mends the strike."""
        return self.scenario.victim == "worker" and self.lane.alive("worker")

    async def _wait_for_the_end(self, striker: Striker) -> None:
        if self.scenario.victim == "empty home":
            if not await self._custody_open() and await self._claimed():
                self.blind = True
            await striker.home_again()
            self.mended = time.time()
        if self.scenario.ending == "task fails for ever":
            await self._until(self._custody_closed, "custody releases a run whose task fails for ever")
            await self.lane.kill("worker")
            await self.lane.start_worker()
        await self._until(self._run_closed, "the run closes")
        await self._until(self._custody_closed, "custody closes")

    # -- starting and ending

    async def _start(self) -> None:
        timeout = self.pace.execution_timeout if self.scenario.ending == "execution timeout" else None
        handle = await self.client.start_workflow(
            "GuardedTrain",
            run_json(self.scenario),
            id=f"{self.name}-run",
            task_queue=RUN_QUEUE,
            execution_timeout=timeout,
        )
        self.run_id = str(handle.result_run_id)
        self.key = run_key(handle.id, self.client.namespace, self.run_id)

    def _handle(self, run_id: str | None = None) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(f"{self.name}-run", run_id=run_id)

    @property
    def _custody(self) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(custody_id(self.key))

    async def _act(self) -> None:
        """Bring the ending about."""
        match self.scenario.ending:
            case "abort":
                await self._handle().signal("abort", "the machine says so")
            case "cancel":
                await self._handle().cancel()
            case "cancel twice":
                await self._handle().cancel()
                await asyncio.sleep(self.chances.random())
                await self._handle().cancel()
            case "terminate":
                await self._handle().terminate("the machine says so")
            case "custody cancelled":
                await self._custody.cancel()
            case "started twice":
                await self._start_again()
            case "task fails for ever":
                await self.lane.kill("worker")
                await self.lane.start_worker(variant=self.chances.choice(("typeless", "deadlocked")))
                await self._handle().signal("a word that nobody knows")
            case "non-determinism":
                await self.lane.kill("worker")
                await self.lane.start_worker(variant="changed")
                await self._handle().signal("a word that nobody knows")  # what makes a task, and so a replay
            case ending:
                again = await self._reset(ending)
                if ending.endswith("cancelled"):
                    await self._handle(again).cancel()
                elif ending.endswith("terminated"):
                    await self._handle(again).terminate("the machine says so")

    async def _start_again(self) -> None:
        try:
            await self.client.start_workflow(
                "GuardedTrain", run_json(self.scenario), id=f"{self.name}-run", task_queue=RUN_QUEUE
            )
        except WorkflowAlreadyStartedError:
            return
        raise Stuck("a second start under the same id was accepted")

    async def _reset(self, ending: str) -> str:
        """Reset the run to one of its workflow tasks; the new run's id."""
        done = [
            event.event_id
            async for event in self._handle(self.run_id).fetch_history_events()
            if event.HasField("workflow_task_completed_event_attributes")
        ]
        place = {"reset to the start": 0, "reset in the middle": len(done) // 2}.get(ending, len(done) - 1)
        answer = await self.client.workflow_service.reset_workflow_execution(
            ResetWorkflowExecutionRequest(
                namespace=self.client.namespace,
                workflow_execution=WorkflowExecution(workflow_id=f"{self.name}-run", run_id=self.run_id),
                reason="the machine says so",
                workflow_task_finish_event_id=done[place],
                request_id=str(uuid.uuid4()),
            )
        )
        return str(answer.run_id)

    # -- waiting

    async def _until(self, holds: Any, what: str) -> None:
        deadline = time.monotonic() + self.pace.closes_within_s
        problem = ""
        while time.monotonic() < deadline:
            try:
                if await holds():
                    return
            except RPCError as error:
                problem = f" ({error.status.name})"
            await asyncio.sleep(LOOK_S)
        raise Stuck(f"not within {self.pace.closes_within_s:.0f} s: {what}{problem}")

    async def _there(self) -> bool:
        """Whether the run has come to the point. Raises Stuck when it ended without."""
        where = self.scenario.where
        if where == TRAINING:
            there = await self._trains()
        elif where == WITHSTOOD:
            there = await self._release_is_tried_again()
        else:
            there = self.lane.plan.reached(self.name) is not None
        if not there and await self._run_closed() and await self._custody_closed():
            there = self.lane.plan.reached(self.name) is not None
            if not there:
                ended = await self._ended()
                raise Stuck(f"the run ended ({ended.status}) without coming to {where}: {ended.message}")
        return there

    async def _trains(self) -> bool:
        return await asyncio.to_thread(self.left.committed) >= self.pace.training

    async def _releasing(self) -> bool:
        """Release has begun, or nothing was claimed and custody closed."""
        if await self._custody_closed():
            return True
        told = await self._custody.describe()
        return any(each.activity_type.name == "release" for each in told.raw_description.pending_activities)

    async def _release_is_tried_again(self) -> bool:
        try:
            told = await self._custody.describe()
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return False
            raise
        pending = told.raw_description.pending_activities
        return any(each.activity_type.name == "release" and each.attempt > 1 for each in pending)

    async def _run_closed(self) -> bool:
        return (await self._handle().describe()).status != WorkflowExecutionStatus.RUNNING

    async def _custody_open(self) -> bool:
        return not await self._custody_closed()

    async def _custody_closed(self) -> bool:
        try:
            return (await self._custody.describe()).status != WorkflowExecutionStatus.RUNNING
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return True
            raise

    async def _claimed(self) -> bool:
        return (self.lane.home.root / "hosts" / self.key).exists()

    # -- the end

    async def _released_s(self) -> float | None:
        try:
            closed = (await self._custody.describe()).close_time
        except RPCError:
            return None
        return round(closed.timestamp() - self.mended, 1) if closed and self.mended else None

    async def _ended(self) -> Ended:
        told = await self._handle().describe()
        ended = Ended(status=told.status.name if told.status else "OPEN")
        try:
            ended.verdict = dict(await self._handle(told.run_id).result(rpc_timeout=None) or {})
            ended.message = str(ended.verdict.get("message", ""))
        except WorkflowFailureError as failure:
            ended.message = str(failure.cause)
            if isinstance(failure.cause, ApplicationError) and failure.cause.details:
                ended.verdict = dict(failure.cause.details[0])
                ended.message = str(ended.verdict.get("message", ended.message))
            elif isinstance(failure.cause, CancelledError):
                ended.verdict = {"outcome": "cancelled"}
        try:
            described = await self._custody.describe()
            ended.custody_open = described.status == WorkflowExecutionStatus.RUNNING
            if not ended.custody_open:
                ended.custody = dict(await self._custody.result())
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
        except WorkflowFailureError as failure:
            ended.custody = {"cleanup": f"custody failed: {failure.cause}", "claims": [True]}
        return ended

    def _respawn(self) -> None:
        self.respawner = subprocess.Popen([sys.executable, "-c", RESPAWN, str(os.getpid()), self.key], cwd="/")

    def _stop_respawning(self) -> None:
        if self.respawner is not None:
            self.respawner.kill()
            self.respawner.wait()
            self.respawner = None

    async def close(self, row: Row) -> None:
        """Whatever happened: nothing of the run is left, and the lane can take the next one."""
        self.lane.plan.disarm(self.name)
        self._stop_respawning()
        if self.scenario.ending in BREAKS_THE_WORKER:
            await self.lane.kill("worker")
        await Striker(self.lane, self.census, self.key, self.chances).leave(self.scenario.victim)
        if self.key and not self.finished:
            await self._put_away(row)
        for each in self.census.end_leftovers():
            row.leaks.append(f"ended at last: {each}")
        for path in self.census.used():
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
        self.census.close()

    async def _put_away(self, row: Row) -> None:
        """End what is still open after a scenario that got stuck or was interrupted, the way a person would."""
        try:
            if not await self._run_closed():
                await self._handle().terminate("the scenario got stuck")
            await self._until(self._custody_closed, "custody closes after a terminate")
        except (RPCError, Stuck) as error:
            row.wrong.append(f"could not be put away: {error}")
