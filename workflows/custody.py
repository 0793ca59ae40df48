"""Custody: holds a run's claims, and releases them however the run ends.

A run starts its custody first, as a child that the server cancels when the run closes. A claim is an Update that the
mutating activity sends right before it touches anything; once release began, no claim is accepted. Release begins on
whichever comes first: the run asks, the run closes, the keeper sees that exact run closed, custody's own deadline
passes, or the hosts have cost what they may. It ends when the absence of everything claimed was proved twice, for as
long as that takes.

The reaper starts it too, for what a custody that is gone has left: with the claims it found, to be released at once.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from workflows import presentation, timeouts
    from workflows.activity_names import KEEP, RELEASE, REPORT_UNSPOKEN
    from workflows.evidence import (
        Claim,
        CustodyOrder,
        HostsOrder,
        Identity,
        KeepOrder,
        Release,
        ReleaseOrder,
        RunClosed,
        UnspokenOrder,
    )
    from workflows.orders import MAX_EXTENSION_S
    from workflows.policy import BUDGET_GRACE_S, KEEPER_GRACE_S, budget_lasts_s
    from workflows.stories import outlive

KEPT_FROM_THE_START = "kept-from-the-start"
"""A patch. Before it the keeper began with the first claim: custody of a run that was reset before that, and terminated
afterwards, stayed open until its own deadline."""


@workflow.defn(name="Custody")
class Custody:
    """No run timeout and no failure exception types: a bug here waits for a fix, it does not close."""

    # Untyped: an input that does not decode would fail the workflow task, which is retried for ever.
    @workflow.init
    def __init__(self, *told: Any) -> None:
        self._order, self._refusal = _understood(told)
        self._claims = {claim.id: claim for claim in self._order.claims}
        self._windows = {claim.id: {claim.attempt: claim.may_appear_until} for claim in self._order.claims}
        self._deadline = self._order.deadline
        self._due: str | None = self._refusal or self._order.due or None
        self._keeper: asyncio.Task[None] | None = None
        self._lends = False
        self._spent_at: float | None = None
        self._record: Release | None = None
        self._struggle = ""

    @workflow.run
    async def run(self, *told: Any) -> Release:
        if self._refusal:
            raise ApplicationError(self._refusal, type="Rejected")
        kept = self._due is None and workflow.patched(KEPT_FROM_THE_START)
        if kept and self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())
        elif not self._lends:
            self._remember_the_deadline()
        self._show()
        await self._until_release_is_due()
        self._record = await outlive(asyncio.create_task(self._release()), self._note_cancel)
        await outlive(asyncio.create_task(self._see_the_run_close(self._record)), self._note_cancel)
        await workflow.wait_condition(workflow.all_handlers_finished)
        return self._record

    # What the outside may say and ask

    @workflow.update
    async def claim(self, claim: Claim) -> Claim:
        """Write a claim down. Claiming the same thing again only moves `may_appear_until`."""
        until = workflow.time() + claim.send_window_s + claim.longest_request_s
        self._windows.setdefault(claim.id, {})[claim.attempt] = until
        held = self._claims[claim.id] = self._with_window(claim)
        lasts = budget_lasts_s(self._order.budget, claim.price_per_hour)
        if lasts is not None and self._spent_at is None:
            self._spent_at = workflow.time() + lasts
        if self._keeper is None:  # before KEPT_FROM_THE_START, or claimed in custody's first task
            self._keeper = asyncio.create_task(self._keep())
        elif not self._lends:
            self._remember_the_deadline()
        self._show()
        return held

    @claim.validator
    def _may_claim(self, claim: Claim) -> None:
        if self._due is not None:
            raise ApplicationError(
                f"custody is releasing ({self._due}); nothing may be touched any more", type="ClaimRefused"
            )
        if claim.run_id != self._order.identity.run_id:
            raise ApplicationError(
                "custody guards another run of this workflow id (reset after release; start again with resume)",
                type="ClaimRefused",
            )

    # A handler that is called with more or less than it takes fails the workflow task, which is retried for ever.
    # Signals are sent by hand too: they take anything.

    @workflow.signal
    def settle(self, *told: Any) -> None:
        """A claim's id and an attempt, whose request was answered: nothing of it can still appear. Windows of other
        attempts stay."""
        claim_id, attempt = told if len(told) == 2 else (None, None)
        if isinstance(claim_id, str) and isinstance(attempt, str) and claim_id in self._claims:
            self._windows[claim_id].pop(attempt, None)
            self._claims[claim_id] = self._with_window(self._claims[claim_id])
            self._show()

    @workflow.signal
    def release(self, *reason: Any) -> None:
        """The run is done with everything it claimed."""
        self._due = self._due or (str(reason[0])[:500] if reason and reason[0] else "asked for by a signal")

    @workflow.signal
    def move_deadline(self, *deadline: Any) -> None:
        """`extend` on the run moves custody's deadline too. Ignored once release began, and unless it is a later time
        that `extend` can reach."""
        [to] = deadline if len(deadline) == 1 else [None]
        if self._due is not None or not isinstance(to, int | float):
            return
        if self._deadline < to <= self._order.deadline + MAX_EXTENSION_S:
            self._deadline = float(to)
            if self._lends:
                self._remember_the_deadline()

    @workflow.query
    def claims(self) -> list[Claim]:
        return list(self._claims.values())

    @workflow.query
    def state(self) -> dict[str, Any]:
        """`held`, `releasing` or the final word, with the reason and what struggles."""
        return {
            "state": self._record.cleanup if self._record else ("releasing" if self._due else "held"),
            "reason": self._due,
            "deadline": self._deadline,
            "budget_spent_at": self._spent_at,
            "struggle": self._struggle,
        }

    # The three rings' first: the saga

    def _with_window(self, claim: Claim) -> Claim:
        until = max(self._windows[claim.id].values(), default=0.0)
        return claim.model_copy(update={"may_appear_until": until})

    async def _until_release_is_due(self) -> None:
        spending = asyncio.create_task(self._mind_the_budget())
        try:
            await self._until_due_by_time()
        finally:
            spending.cancel()

    async def _mind_the_budget(self) -> None:
        """Have the run aborted when its hosts have cost what they may; a run that does not follow is released."""
        await workflow.wait_condition(lambda: self._spent_at is not None)
        assert self._spent_at is not None
        await workflow.sleep(max(0.0, self._spent_at - workflow.time()), summary="the budget")
        spent = f"the budget of {self._order.budget:g} US dollars is spent"
        identity = self._order.identity
        run = workflow.get_external_workflow_handle(identity.workflow_id, run_id=identity.run_id)
        try:
            await run.signal("abort", spent)
            await workflow.sleep(BUDGET_GRACE_S, summary="for the run to end by itself")
        except FailureError:
            workflow.logger.info("the run closed before it could be told that its budget is spent")
        self._due = self._due or spent

    async def _until_due_by_time(self) -> None:
        while self._due is None:
            left = self._deadline - workflow.time()
            if left <= 0:
                self._due = "custody's own deadline passed"
                return
            try:
                # A deadline only moves to later: looking again when the first one passes saves a timer each time.
                await workflow.wait_condition(
                    lambda: self._due is not None, timeout=left, timeout_summary="custody's own deadline"
                )
            except TimeoutError:
                continue
            except asyncio.CancelledError:
                self._note_cancel()

    def _remember_the_deadline(self) -> None:
        """Where the keeper reads it, which renews no lease without: there is none before the first claim."""
        self._lends = True
        workflow.upsert_memo({"deadline": self._deadline})

    def _note_cancel(self) -> None:
        self._due = self._due or "the run closed, or custody was cancelled"

    async def _keep(self) -> None:
        """Notice when the exact run closes, and renew its lease from the first claim on."""
        closed = await self._watch_run(renew=True)
        self._due = self._due or f"the run closed ({closed.status})"

    async def _watch_run(self, *, renew: bool) -> RunClosed:
        closed: RunClosed = await workflow.execute_activity(
            KEEP,
            KeepOrder(identity=self._order.identity, lease_s=self._order.hosts.lease_s, renew=renew),
            result_type=RunClosed,
            task_queue=timeouts.WATCH_QUEUE,
            start_to_close_timeout=timeouts.LONG,
            heartbeat_timeout=timeouts.HEARTBEAT,
            retry_policy=timeouts.KEEPER,
            summary="keep the lease; notice when the run closes" if renew else "see how the run closes",
        )
        return closed

    async def _release(self) -> Release:
        if self._keeper:
            self._keeper.cancel()
        began = workflow.time()
        self._show()
        if not self._claims:
            record = presentation.nothing_claimed(self._order.identity.run_key, self._due or "", began)
        else:
            order = ReleaseOrder(
                identity=self._order.identity,
                hosts=self._order.hosts,
                claims=tuple(self._claims.values()),
                reason=self._due or "",
                began=began,
            )
            try:
                record = await self._release_activity(order, timeouts.RELEASE_FIRST, "release everything claimed")
            except ActivityError as failed:
                self._struggle = presentation.first_line(failed.cause or failed)
                self._show()
                record = await self._release_for_ever(order)
                self._struggle = ""
        self._record = record
        self._show()
        await self._tell_the_run(record)
        return record

    async def _release_for_ever(self, order: ReleaseOrder) -> Release:
        """One activity with unlimited retries. Should it end all the same, a bug or a wrong worker did that, and
        custody must not end with it: asked again, slowly."""
        while True:
            try:
                return await self._release_activity(
                    order, timeouts.RELEASE_FOR_EVER, f"still releasing: {self._struggle}"[:200]
                )
            except ActivityError as failed:
                self._struggle = presentation.first_line(failed.cause or failed)
                self._show()
                await workflow.sleep(timeouts.RELEASE_AGAIN, summary="before releasing is tried again")

    async def _release_activity(self, order: ReleaseOrder, retry: Any, summary: str) -> Release:
        record: Release = await workflow.execute_activity(
            RELEASE,
            order,
            result_type=Release,
            task_queue=timeouts.RELEASE_QUEUE,
            start_to_close_timeout=timeouts.RELEASE_ATTEMPT,
            heartbeat_timeout=timeouts.HEARTBEAT,
            retry_policy=retry,
            summary=summary,
        )
        return record

    async def _tell_the_run(self, record: Release) -> None:
        """The run may be closed, or another run may have its id: then nobody listens, and that is fine."""
        try:
            await workflow.get_external_workflow_handle(self._order.identity.workflow_id).signal("released", record)
        except FailureError:
            workflow.logger.info("the run closed before custody could tell it of its release")

    async def _see_the_run_close(self, record: Release) -> None:
        """A run that was terminated or timed out cannot write its report: custody does."""
        watching = asyncio.create_task(self._watch_run(renew=False))
        wait = max(self._deadline - workflow.time(), 0.0) + KEEPER_GRACE_S
        try:
            await workflow.wait_condition(
                watching.done, timeout=timedelta(seconds=wait), timeout_summary="for the run to close by itself"
            )
        except TimeoutError:
            watching.cancel()
            return
        status = watching.result().status
        if status not in ("terminated", "timed_out"):
            return
        try:
            await workflow.execute_activity(
                REPORT_UNSPOKEN,
                UnspokenOrder(identity=self._order.identity, hosts=self._order.hosts, status=status, release=record),
                task_queue=timeouts.RELEASE_QUEUE,
                start_to_close_timeout=timeouts.REPORT,
                heartbeat_timeout=timeouts.HEARTBEAT,
                retry_policy=timeouts.FEW,
                summary=f"write the report of a run that was {status.replace('_', ' ')}",
            )
        except ActivityError as failed:
            workflow.logger.warning("the report could not be written: %s", presentation.first_line(failed))

    def _show(self) -> None:
        state = self._record.cleanup if self._record else ("releasing" if self._due else "held")
        workflow.set_current_details(
            presentation.custody_details(
                self._order,
                tuple(self._claims.values()),
                state,
                self._due,
                self._struggle,
                self._record,
                self._spent_at,
            )
        )
        presentation.show_attributes(
            self._order.search_attributes,
            {"LanyardCleanup": state, "LanyardRunKey": self._order.identity.run_key},
        )


def _understood(told: tuple[Any, ...]) -> tuple[CustodyOrder, str]:
    """The order, and why it cannot be followed ("" when it can)."""
    try:
        [order] = told
        return CustodyOrder.model_validate(order), ""
    except ValueError:
        nobody = Identity.model_construct(run_key="", run_id="", workflow_id="", custody_id="", storage="")
        hosts = HostsOrder.model_construct(identity=nobody)
        return (
            CustodyOrder.model_construct(identity=nobody, hosts=hosts, deadline=0.0, search_attributes=()),
            "custody is started by a run and takes the order that the run makes; start GuardedTrain instead",
        )
