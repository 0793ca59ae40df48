"""Killed workers: how soon another one goes on, how long ten kills make a history, how soon a terminated run is
released."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest

from bench.figure import Experiment, Figure, at_most, middle
from bench.guarded import GuardedRun, release_began
from bench.lab import Lab, Trouble
from worker import stack
from worker.settings import CHECKOUT
from workflows.activity_names import WATCH
from workflows.timeouts import HEARTBEAT, WATCH_QUEUE

ENDLESS: Final = {"steps": 200_000, "checkpoint_interval": 2000}
LONG: Final = {"steps": 16_000, "checkpoint_interval": 8}
"""Minutes: each interval takes a report, about a second."""
DRILL: Final = {"kind": "worker", "after_step": 400}
KILLS: Final = 10
APPEARS_WITHIN_S: Final = 180.0
LOOK_S: Final = 0.1
TAKEOVER_BAR_S: Final = HEARTBEAT.total_seconds() + 5.0
"""Nobody but the server can know that a worker is gone, and it knows by the heartbeat that does not come."""


@dataclass(frozen=True)
class Taken:
    heartbeat_s: float
    """From the worker's last heartbeat before its kill to the other worker's first, as Temporal dates both."""
    takeover_s: float
    """From the kill to the other worker's first heartbeat."""
    release_s: float
    """From the request to terminate to the start of custody's release activity."""


@dataclass(frozen=True)
class Watcher:
    """Who has the watch, as Temporal shows it."""

    identity: str
    attempt: int
    heartbeat: float
    """When its last heartbeat arrived; Unix seconds, 0 before the first."""

    @property
    def pid(self) -> int:
        """The SDK's identity is pid@host."""
        return int(self.identity.partition("@")[0])


async def taken_over(lab: Lab, _index: int) -> Taken:
    """With two workers, SIGKILL the one that has the watch; then terminate the run."""
    async with second_worker(lab):
        run = await lab.start("taken-over", ENDLESS)
        before = await watched(run, lambda each: each.heartbeat > 0)
        await asyncio.sleep(2.0)
        before = await watched(run, lambda each: each.heartbeat > 0)
        killed = time.time()
        os.kill(before.pid, signal.SIGKILL)
        after = await watched(run, lambda each: each.identity != before.identity and each.heartbeat > before.heartbeat)
        asked = time.time()
        await run.handle.terminate("the bench has seen enough")
        custody = await run.custody_after_terminate()
    return Taken(
        heartbeat_s=round(after.heartbeat - before.heartbeat, 3),
        takeover_s=round(after.heartbeat - killed, 3),
        release_s=round(release_began(custody) - asked, 3),
    )


@dataclass(frozen=True)
class Killed:
    kills: int
    run_events: int
    custody_events: int


async def killed_ten_times(lab: Lab, _index: int) -> Killed:
    """A drilled run whose only worker is killed again and again, each time once its successor has the watch."""
    # The stack gives up on a worker that dies that often, which is what is wanted here.
    with mock.patch.object(stack, "RESTART_WINDOW_S", 1.0):
        run = await lab.start("killed", LONG, DRILL)
        last = ""
        for kills in range(KILLS):
            try:
                holder = await watched(run, lambda each, last=last: each.identity != last and each.heartbeat > 0)
            except (Trouble, RuntimeError) as trouble:
                raise Trouble(f"after {kills} kills: {trouble}") from trouble
            await asyncio.sleep(1.0)
            os.kill(holder.pid, signal.SIGKILL)
            last = holder.identity
        ended = await run.end()
    return Killed(KILLS, len(ended.history), len(ended.custody_history))


async def watched(run: GuardedRun, wanted: Any) -> Watcher:
    """Look until somebody has the watch who is as wanted. Raises Trouble when the run ends, or nobody comes."""
    deadline = time.monotonic() + APPEARS_WITHIN_S
    while time.monotonic() < deadline:
        told = await run.handle.describe()
        if told.close_time is not None:
            await run.end()  # raises where it failed, saying how
            raise Trouble(f"{run.workflow_id} ended before it was seen")
        for each in told.raw_description.pending_activities:
            if each.activity_type.name == WATCH and each.last_worker_identity:
                beat = each.last_heartbeat_time.ToNanoseconds() / 1e9
                began = each.last_started_time.ToNanoseconds() / 1e9
                # A new attempt shows the last heartbeat of the one before until its own comes.
                found = Watcher(each.last_worker_identity, each.attempt, beat if beat > began else 0.0)
                if wanted(found):
                    return found
        await asyncio.sleep(LOOK_S)
    raise Trouble(f"{run.workflow_id} is not watched as wanted within {APPEARS_WITHIN_S:.0f} s")


@contextlib.asynccontextmanager
async def second_worker(lab: Lab) -> AsyncIterator[None]:
    """Another worker beside the stack's own, for as long as the block lasts."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker", "run"),
        cwd=CHECKOUT,
        env=lab.environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + APPEARS_WITHIN_S
        while not await polls(lab, process.pid):
            if process.returncode is not None or time.monotonic() > deadline:
                raise Trouble("the second worker does not poll")
            await asyncio.sleep(LOOK_S)
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def polls(lab: Lab, pid: int) -> bool:
    """Whether this process asks for watches."""
    answer = await lab.client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=lab.client.namespace,
            task_queue=TaskQueue(name=WATCH_QUEUE),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        )
    )
    return any(poller.identity.startswith(f"{pid}@") for poller in answer.pollers)


def explain_takeover(samples: Sequence[Taken]) -> str:
    return (
        f"the heartbeat timeout is {HEARTBEAT.total_seconds():.0f} s, counted by the server from the last heartbeat: "
        "only then it gives the watch to the other worker; "
        f"heartbeat to heartbeat {middle([each.heartbeat_s for each in samples])} s"
    )


TAKEOVER: Final = Experiment(
    sample=taken_over,
    figures=(
        Figure(
            name="worker-killed-to-proceeding",
            what="worker killed → the watch's heartbeat from another worker that is alive",
            unit="s",
            bar=at_most(TAKEOVER_BAR_S),
            value=lambda samples: middle([each.takeover_s for each in samples]),
            explain=explain_takeover,
            shows=lambda each: {"from_kill_s": each.takeover_s, "from_heartbeat_s": each.heartbeat_s},
        ),
        Figure(
            name="terminate-to-release",
            what="terminate → custody's release has started",
            unit="s",
            bar=at_most(2.0),
            value=lambda samples: middle([each.release_s for each in samples]),
            explain=lambda samples: "the server cancels custody when the run closes",
            shows=lambda each: each.release_s,
        ),
    ),
)
KILLED: Final = Experiment(
    sample=killed_ten_times,
    once=True,
    figures=(
        Figure(
            name="ten-kills-run-events",
            what="events in the history of a drilled run whose worker was killed ten times",
            unit="events",
            bar=at_most(350),
            value=lambda samples: samples[0].run_events,
            explain=lambda samples: (
                "an attempt that is lost leaves no event of its own; a lost workflow task leaves two"
            ),
            shows=lambda each: each.run_events,
        ),
        Figure(
            name="ten-kills-custody-events",
            what="events in its custody's",
            unit="events",
            bar=at_most(250),
            value=lambda samples: samples[0].custody_events,
            explain=lambda samples: f"{samples[0].kills} kills",
            shows=lambda each: each.custody_events,
        ),
    ),
)
