"""Claiming: the mutating activity asks custody right before it touches anything."""

from __future__ import annotations

import time
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
    """A claim that custody holds, and the moment after which nothing more may be sent on it.

    The window is counted on this process's own monotonic clock from *before* the claim was asked for, so it ends
    before custody's `may_appear_until` does, and no wall clocks are compared.
    """

    claim: Claim
    until: float

    def check(self) -> None:
        """Call right before every request that changes something. Raises a retryable error once the window passed."""
        if time.monotonic() > self.until:
            raise ApplicationError(
                f"the send window of {self.claim.id} passed before the request was sent; claiming again",
                type="SendWindowPassed",
            )


async def claim(client: Client, identity: Identity, wanted: Claim) -> Permit:
    """Have custody write the claim down. Raises a non-retryable ApplicationError when custody refuses.

    Each attempt asks anew: the answer to an earlier attempt's update would be replayed by the server even after
    release began.
    """
    info = activity.info()
    began = time.monotonic()
    handle = client.get_workflow_handle(identity.custody_id)
    try:
        held = await handle.execute_update(
            "claim",
            wanted,
            id=f"{wanted.id}@{info.activity_id}.{info.attempt}",
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
    return Permit(held, began + wanted.send_window_s)


def holder() -> str:
    """Who asks, for people."""
    info = activity.info()
    return f"{info.activity_type} attempt {info.attempt}"
