"""What can be seen of a run from outside: describe, its queries, its end, and its custody's last word."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import (
    Client,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
)
from temporalio.exceptions import ApplicationError, CancelledError, FailureError, TerminatedError, TimeoutError
from temporalio.service import RPCError, RPCStatusCode

_RPC: Final = timedelta(seconds=5)
_LIVE: Final = ("steps", "note")
"""What an activity's heartbeat may tell beside the commit. Which phase the run is in only the run knows: the same watch
goes on through several."""


@dataclass(frozen=True)
class Sight:
    """One look at a run. Everything is optional: a run that has just begun, or whose worker is away, tells less."""

    open: bool
    progress: Mapping[str, Any] = field(default_factory=dict)
    """The answer of the query `progress`, overlaid with what heartbeats say."""
    trouble: str = ""
    """Why what is shown may be old: no worker, no answer, a failing activity."""

    def text(self, name: str) -> str:
        value = self.progress.get(name)
        return "" if value is None else str(value)

    def number(self, name: str) -> float | None:
        value = self.progress.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


class Run:
    """One exact run of GuardedTrain, watched by a client that holds nothing of it."""

    def __init__(self, client: Client, workflow_id: str, run_id: str) -> None:
        self._client = client
        self.workflow_id = workflow_id
        self.run_id = run_id
        self._handle: WorkflowHandle[Any, Any] = client.get_workflow_handle(workflow_id, run_id=run_id)
        self._progress: dict[str, Any] = {}
        self._furthest: dict[str, Any] = {}
        self.custody_id: str | None = None

    async def look(self) -> Sight:
        """Look once. Raises RPCError when Temporal itself does not answer."""
        description = await self._handle.describe(rpc_timeout=_RPC)
        for child in description.raw_description.pending_children:
            if child.workflow_id.startswith("custody-"):
                self.custody_id = child.workflow_id
        is_open = description.status == WorkflowExecutionStatus.RUNNING
        trouble = ""
        if is_open:
            trouble = await self._ask()
        beats = await self._heartbeats(description)
        return Sight(
            open=is_open,
            progress=self._overlaid(beats),
            trouble=trouble or _failing(description.raw_description.pending_activities),
        )

    async def abort(self, reason: str) -> None:
        """Send the signal `abort`. A run that has ended meanwhile needs none."""
        try:
            await self._handle.signal("abort", reason, rpc_timeout=_RPC)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise

    async def verdict(self) -> dict[str, Any]:
        """The verdict of a closed run: its result, or its failure's details, or as much as can be known."""
        try:
            result = await self._handle.result(follow_runs=False)
        except WorkflowFailureError as failure:
            return await self._verdict_of_failure(failure.cause)
        return result if isinstance(result, dict) else {"outcome": "succeeded", "message": repr(result)}

    async def custody(self) -> CustodySight:
        """Custody's state now. `final` is its result once it has closed."""
        if self.custody_id is None:
            return CustodySight(open=False)
        handle: WorkflowHandle[Any, Any] = self._client.get_workflow_handle(self.custody_id)
        try:
            description = await handle.describe(rpc_timeout=_RPC)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return CustodySight(open=False)
            raise
        if description.status == WorkflowExecutionStatus.RUNNING:
            return CustodySight(open=True, trouble=_failing(description.raw_description.pending_activities))
        try:
            final = await handle.result()
        except WorkflowFailureError as failure:
            return CustodySight(open=False, trouble=str(failure.cause))
        return CustodySight(open=False, final=final if isinstance(final, dict) else {})

    async def claims(self) -> list[str]:
        """What custody still holds, a line each, as its query `claims` answers; nothing once all is proved absent."""
        if self.custody_id is None:
            return []
        custody = self._client.get_workflow_handle(self.custody_id)
        state = await custody.query("state", rpc_timeout=_RPC)
        if isinstance(state, dict) and state.get("state") == "clean":
            return []
        answer = await custody.query("claims", rpc_timeout=_RPC)
        return [_claim(item) for item in answer] if isinstance(answer, list) else [str(answer)]

    def _overlaid(self, beats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The run's own answer with what heartbeats tell beyond it. A commit stays committed, whoever told of it, and
        either may be the older: between milestones the answer, and after one the heartbeat."""
        seen = dict(self._progress)
        for beat in beats:
            seen.update({key: beat[key] for key in _LIVE if beat.get(key) is not None})
        for told in (self._progress, *beats):
            if "step" in told and _step(told) >= _step(self._furthest):
                self._furthest = {key: told.get(key) for key in ("step", "loss")}
        return {**seen, **self._furthest}

    async def _ask(self) -> str:
        try:
            answer = await self._handle.query("progress", rpc_timeout=_RPC)
        except Exception as error:
            return f"the run does not answer ({_short(error)}); is a worker there?"
        if isinstance(answer, dict):
            self._progress = answer
            custody_id = answer.get("custody")
            if isinstance(custody_id, str):
                self.custody_id = custody_id
        return ""

    async def _heartbeats(self, description: WorkflowExecutionDescription) -> list[dict[str, Any]]:
        """What the pending activities said last."""
        beats: list[dict[str, Any]] = []
        for activity in description.raw_description.pending_activities:
            if activity.heartbeat_details.payloads:
                details = await self._client.data_converter.decode(activity.heartbeat_details.payloads)
                beats += [detail for detail in details if isinstance(detail, dict)]
        return beats

    async def _verdict_of_failure(self, cause: BaseException) -> dict[str, Any]:
        if isinstance(cause, ApplicationError) and cause.details and isinstance(cause.details[0], dict):
            return {"message": cause.message, **cause.details[0]}
        outcome = "failed"
        if isinstance(cause, CancelledError):
            outcome = "cancelled"
        elif isinstance(cause, TerminatedError):
            outcome = "terminated"
        elif isinstance(cause, TimeoutError):
            outcome = "timed_out"
        # A cancelled run's failure has no room for the verdict; the run still answers for it.
        told: Any = None
        if outcome == "cancelled":
            try:
                told = await self._handle.query("verdict", rpc_timeout=_RPC)
            except Exception:
                told = None
        if isinstance(told, dict):
            return told
        message = cause.message if isinstance(cause, FailureError) else str(cause)
        known = {key: self._progress.get(key) for key in ("run_key", "storage")}
        return {"outcome": outcome, "message": message, **known}


@dataclass(frozen=True)
class CustodySight:
    """One look at a run's custody."""

    open: bool
    trouble: str = ""
    final: Mapping[str, Any] = field(default_factory=dict)


async def wait_closed(run: Run, within_s: float) -> CustodySight:
    """Custody once it has closed, or as it is after `within_s` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        sight = await run.custody()
        if not sight.open or loop.time() > deadline:
            return sight
        await asyncio.sleep(1)


def _failing(pending: Any) -> str:
    """What the pending activities that are being retried say, the longest struggle first."""
    activities: list[PendingActivityInfo] = sorted(pending, key=lambda activity: -activity.attempt)
    for activity in activities:
        if activity.attempt > 1 and activity.last_failure.message:
            name = activity.activity_type.name
            return f"{name}, attempt {activity.attempt}: {activity.last_failure.message.splitlines()[0][:200]}"
    return ""


def _step(seen: Mapping[str, Any]) -> int:
    step = seen.get("step")
    return step if isinstance(step, int) else 0


def _claim(item: Any) -> str:
    if isinstance(item, dict):
        return f"{item.get('kind', 'claim')} {item.get('name', '?')} ({item.get('provider', '?')})"
    return str(item)


def _short(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]
