"""The keeper: renews a run's lease while Temporal answers, and notices when the exact run closes."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import timedelta
from typing import Final

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.heartbeat import Heart, beating
from activities.storage import Storage, StorageError
from workflows import activity_names
from workflows.evidence import Identity, KeepOrder, RunClosed, RunStatus
from workflows.policy import lease_renewal_s

LOOK_S: Final = 10.0
"""How often a run's status is asked for. The server's own cancel of custody is faster; this covers a reset."""
FIRST_LOOK_S: Final = 0.5
"""How often custody is looked at for its first claim: through preflight, seconds."""
CLOSING_LOOK_S: Final = 1.0
"""After release the run closes within seconds."""
ASK: Final = timedelta(seconds=10)

CLOSED: Final[dict[WorkflowExecutionStatus, RunStatus]] = {
    WorkflowExecutionStatus.COMPLETED: "completed",
    WorkflowExecutionStatus.FAILED: "failed",
    WorkflowExecutionStatus.CANCELED: "canceled",
    WorkflowExecutionStatus.TERMINATED: "terminated",
    WorkflowExecutionStatus.TIMED_OUT: "timed_out",
    WorkflowExecutionStatus.CONTINUED_AS_NEW: "continued_as_new",
}


class Keeper:
    def __init__(self, client: Client, storage: Storage) -> None:
        self._client = client
        self._storage = storage

    @activity.defn(name=activity_names.KEEP)
    async def keep(self, order: KeepOrder) -> RunClosed:
        """Return when the exact run id is closed. Async, one cheap request every few seconds."""
        async with beating(note="keeping the lease" if order.renew else "waiting for the run to close") as heart:
            renewal = asyncio.create_task(self._renew(order, heart)) if order.renew else None
            try:
                while True:
                    if renewal and renewal.done():
                        # It never ends by itself. Hosts must not run out of their lease because nobody looked.
                        renewal.result()
                    closed = await self._closed(order.identity, heart)
                    if closed:
                        return RunClosed(status=closed)
                    await asyncio.sleep(LOOK_S if order.renew else CLOSING_LOOK_S)
            finally:
                if renewal:
                    renewal.cancel()

    async def _closed(self, identity: Identity, heart: Heart) -> RunStatus | None:
        """The exact run's closing status; None while it is open or nobody answers (unknown is not closed)."""
        handle = self._client.get_workflow_handle(identity.workflow_id, run_id=identity.run_id)
        try:
            told = await handle.describe(rpc_timeout=ASK)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return "gone"
            heart.say(note=f"Temporal does not answer: {error.status.name}")
            return None
        return CLOSED.get(told.status) if told.status else None

    async def _renew(self, order: KeepOrder, heart: Heart) -> None:
        """Renew after each answer of Temporal about custody, never past custody's deadline."""
        uri = f"{order.identity.storage}/custody/lease.json"
        every = lease_renewal_s(order.lease_s)
        sequence: int | None = None
        # Custody's deadline is of the server's clock, which no worker can turn.
        epoch = activity.info().started_time.timestamp() - time.monotonic()
        while True:
            try:
                told = await self._client.get_workflow_handle(order.identity.custody_id).describe(rpc_timeout=ASK)
                duration = min(order.lease_s, await _left(told, epoch + time.monotonic()))
                if duration > 0:
                    sequence = await self._write(uri, sequence, duration)
                    heart.say(lease=sequence, renewed_at=time.time())
                else:
                    # Before the first claim: right after it hosts wait for their lease.
                    await asyncio.sleep(min(every, FIRST_LOOK_S))
                    continue
            except (RPCError, StorageError) as error:
                heart.say(note=f"the lease was not renewed: {error}")
                await asyncio.sleep(min(every, 5.0))
                continue
            await asyncio.sleep(every)

    async def _write(self, uri: str, sequence: int | None, duration_s: float) -> int:
        """Sequences only go up, also when another worker takes over."""
        if sequence is None:
            got = await self._storage.get(uri)
            sequence = 0 if got is None else _sequence_in(got.body or b"")
        renewed = {"schema": 1, "sequence": sequence + 1, "duration_s": duration_s}
        await self._storage.put(uri, json.dumps(renewed).encode())
        return sequence + 1


def _sequence_in(lease: bytes) -> int:
    """The sequence that a lease holds. A damaged one tells nothing, and hosts only believe one that is higher than what
    they saw: seconds since 1970 are."""
    try:
        told = json.loads(lease)["sequence"]
    except (ValueError, LookupError, TypeError, RecursionError):
        told = None
    return told if isinstance(told, int) and not isinstance(told, bool) and told >= 0 else int(time.time())


async def _left(custody: WorkflowExecutionDescription, now: float) -> float:
    """Seconds from ``now``, of the server's clock, until custody's own deadline, which custody keeps in its memo from
    its first claim on; none before that, and none once it closed."""
    if custody.status != WorkflowExecutionStatus.RUNNING:
        return 0.0
    deadline = await custody.memo_value("deadline", default=None)
    return float(deadline) - now if deadline is not None else 0.0
