"""One guarded run, started as a user does and seen from outside."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, WorkflowExecutionStatus

from worker.observation import Run, wait_closed
from workflows.activity_names import RELEASE
from workflows.names import custody_id, run_key, run_root
from workflows.timeouts import RUN_QUEUE

RUN_LIMIT_S: Final = 1200.0
CUSTODY_LIMIT_S: Final = 300.0
_WORKFLOW_TASK: Final = (
    EventType.EVENT_TYPE_WORKFLOW_TASK_SCHEDULED,
    EventType.EVENT_TYPE_WORKFLOW_TASK_STARTED,
    EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED,
)


@dataclass(frozen=True)
class Ended:
    """A guarded run that is over, its custody too."""

    verdict: Mapping[str, Any]
    seconds: float
    """From the `temporal workflow start` command to the verdict."""
    history: tuple[HistoryEvent, ...]
    custody_history: tuple[HistoryEvent, ...]
    release: Mapping[str, Any]
    """Custody's last word."""

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase, summed where a phase comes twice."""
        found: dict[str, float] = {}
        for phase in self.verdict["phases"]:
            taken = (phase["ended"] or phase["started"]) - phase["started"]
            found[phase["name"]] = found.get(phase["name"], 0.0) + taken
        return found


class GuardedRun:
    """A run that was started. All times are of this machine's clock, which every part of the bench shares."""

    def __init__(self, client: Client, workflow_id: str, run_id: str, began: float) -> None:
        self._client, self._began = client, began
        self.workflow_id, self.run_id = workflow_id, run_id
        self.key = run_key(workflow_id, client.namespace, run_id)
        self.handle = client.get_workflow_handle(workflow_id, run_id=run_id)
        self._custody = client.get_workflow_handle(custody_id(self.key))
        self._run = Run(client, workflow_id, run_id)
        self._run.custody_id = custody_id(self.key)

    @classmethod
    async def start(
        cls, client: Client, temporal: str, environment: Mapping[str, str], file: Path, workflow_id: str
    ) -> Self:
        """`temporal workflow start`. Raises RuntimeError when the CLI refuses."""
        command = ("workflow", "start", "--type", "GuardedTrain", "--task-queue", RUN_QUEUE)
        began = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            temporal,
            *(*command, "--workflow-id", workflow_id, "--input-file", str(file)),
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out = (await process.communicate())[0].decode(errors="replace")
        found = re.search(r"^\s*RunId\s+(\S+)", out, re.MULTILINE)
        if process.returncode != 0 or found is None:
            raise RuntimeError(f"temporal workflow start: {out}")
        return cls(client, workflow_id, found[1], began)

    def root(self, storage: str) -> str:
        """The run's own root in storage."""
        return run_root(storage, self.key)

    async def end(self, outcome: str = "succeeded") -> Ended:
        """Wait for the verdict and for custody's last word. Raises RuntimeError for another outcome, or a cleanup that
        is not clean; TimeoutError."""
        async with asyncio.timeout(RUN_LIMIT_S):
            verdict = await self._run.verdict()
        seconds = time.monotonic() - self._began
        custody = await wait_closed(self._run, CUSTODY_LIMIT_S)
        if verdict.get("outcome") != outcome or custody.open or custody.final.get("cleanup") != "clean":
            cleanup = custody.final.get("cleanup", custody.trouble or "open")
            raise RuntimeError(
                f"{self.workflow_id} ended {verdict.get('outcome')}, {cleanup}: {str(verdict.get('message'))[:600]}"
            )
        history = await self.handle.fetch_history()
        custody_history = await self._custody.fetch_history()
        return Ended(verdict, seconds, tuple(history.events), tuple(custody_history.events), custody.final)

    async def custody_after_terminate(self) -> tuple[HistoryEvent, ...]:
        """Wait for custody's last word on a run that can say none itself; custody's history. Raises RuntimeError for a
        cleanup that is not clean."""
        custody = await wait_closed(self._run, CUSTODY_LIMIT_S)
        if custody.open or custody.final.get("cleanup") != "clean":
            raise RuntimeError(f"{self.workflow_id}: {custody.final.get('cleanup', custody.trouble or 'open')}")
        return tuple((await self._custody.fetch_history()).events)

    async def abort(self) -> None:
        """The signal `abort`."""
        await self._run.abort("the bench has seen enough")

    async def put_away(self, limit_s: float) -> bool:
        """Abort it if it is open; whether custody has released everything within ``limit_s`` seconds."""
        if (await self.handle.describe()).status == WorkflowExecutionStatus.RUNNING:
            await self.abort()
        custody = await wait_closed(self._run, limit_s)
        return not custody.open and custody.final.get("cleanup", "clean") == "clean"


def decisions(history: Sequence[HistoryEvent]) -> int:
    """Events without workflow tasks, of which there is one more or less as answers happen to come together."""
    return sum(event.event_type not in _WORKFLOW_TASK for event in history)


def release_began(custody_history: Sequence[HistoryEvent]) -> float:
    """When custody's (last) release activity was started, Unix seconds. Raises ValueError when it never was."""
    scheduled: dict[int, str] = {}
    began = 0.0
    for event in custody_history:
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            scheduled[event.event_id] = event.activity_task_scheduled_event_attributes.activity_type.name
        elif event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED:
            of = event.activity_task_started_event_attributes.scheduled_event_id
            if scheduled.get(of) == RELEASE:
                began = event.event_time.ToNanoseconds() / 1e9
    if not began:
        raise ValueError("custody released nothing")
    return began
