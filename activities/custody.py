"""Claiming: the mutating activity asks custody right before it touches anything."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

from temporalio import activity
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from workflows.evidence import Claim, Identity

ASK = timedelta(seconds=20)
"""How long one ask may take; the activity is retried when custody's worker does not answer."""


@dataclass(frozen=True)
class Permit:
    """Claims that custody holds, and the moment after which nothing more may be sent on them.

    The window is counted on this process's own monotonic clock from *before* the claim was asked for, so it ends
    before custody's `may_appear_until` does, and no wall clocks are compared.
    """

    claims: tuple[Claim, ...]
    until: float

    def check(self) -> None:
        """Call right before every request that changes something. Raises a retryable error once the window passed."""
        if time.monotonic() > self.until:
            raise ApplicationError(
                f"the send window of {self.claims[0].id} passed before the request was sent; claiming again",
                type="SendWindowPassed",
            )


@asynccontextmanager
async def claimed(client: Client, identity: Identity, *wanted: Claim) -> AsyncIterator[Permit]:
    """Claim, and tell custody at the end that every request was answered. When the block fails, the send window stands:
    what was sent may still appear. A non-retryable error is an answer, and nothing is under way after it."""
    permits = [await _claim(client, identity, each) for each in wanted]
    try:
        yield Permit(tuple(p.claims[0] for p in permits), min(p.until for p in permits))
    except ApplicationError as error:
        if error.non_retryable:
            await _settle(client, identity, permits)
        raise
    await _settle(client, identity, permits)


async def _settle(client: Client, identity: Identity, permits: Sequence[Permit]) -> None:
    custody = client.get_workflow_handle(identity.custody_id)
    for permit in permits:
        held = permit.claims[0]
        # Lost, this signal costs only time: the window then runs its length.
        with contextlib.suppress(RPCError):
            await custody.signal("settle", args=[held.id, held.attempt], rpc_timeout=ASK)


async def _claim(client: Client, identity: Identity, wanted: Claim) -> Permit:
    """Have custody write the claim down. Raises a non-retryable ApplicationError when custody refuses.

    Each attempt asks anew: the answer to an earlier attempt's update would be replayed by the server even after
    release began.
    """
    info = activity.info()
    attempt = f"{info.activity_id}.{info.attempt}"
    began = time.monotonic()
    handle = client.get_workflow_handle(identity.custody_id)
    try:
        held = await handle.execute_update(
            "claim",
            wanted.model_copy(update={"attempt": attempt}),
            id=f"{wanted.id}@{attempt}",
            result_type=Claim,
            rpc_timeout=ASK,
        )
    except WorkflowUpdateFailedError as refused:
        raise ApplicationError(
            f"claim refused, nothing was touched: {refused.cause}", type="ClaimRefused", non_retryable=True
        ) from refused
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            raise ApplicationError(
                "claim refused, nothing was touched: custody has closed", type="ClaimRefused", non_retryable=True
            ) from error
        raise
    return Permit((held,), began + wanted.send_window_s)


def holder() -> str:
    """Who asks, for people."""
    info = activity.info()
    return f"{info.activity_type} attempt {info.attempt}"
