"""The reaper: finds what nobody guards any more, and hands it over to a new custody.

Started by a schedule, one execution at a time. A look reads the inventory first and asks for custodies after. What has
no open custody on two looks, with a durable timer between them, is an orphan: `Custody` is started for it under the
same id, with its claims, to release them at once. There is no second way to delete anything. Where somebody else's
start of that custody comes first, it guards, and nothing is done.
"""

from __future__ import annotations

import asyncio
from typing import Any

from temporalio import workflow
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.workflow import ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from workflows import presentation, timeouts
    from workflows.activity_names import SWEEP
    from workflows.custody import Custody
    from workflows.evidence import CustodyOrder, Orphan, Reaped, ReaperOrder, Suspect, Sweep
    from workflows.policy import handed_over, orphans


@workflow.defn(name="Reaper", failure_exception_types=[Exception])
class Reaper:
    """A bug here ends one execution Failed; the schedule starts the next."""

    @workflow.run
    async def run(self, *told: Any) -> Reaped:
        order = _understood(told)
        first = last = await self._sweep(order, "first look")
        closed_by = workflow.time()
        reaped: tuple[Orphan, ...] = ()
        if first.suspects:
            waiting = presentation.reaped(first, first, ())
            workflow.set_current_details(presentation.reaper_details(waiting, "waiting to look again"))
            await workflow.sleep(timeouts.BETWEEN_LOOKS, summary="an orphan is one on two looks, apart in time")
            last = await self._sweep(order, "second look")
            found = orphans(first, last)
            reaped = tuple(await asyncio.gather(*(self._hand_over(each, last, closed_by) for each in found)))
        done = presentation.reaped(first, last, reaped)
        workflow.set_current_details(presentation.reaper_details(done, "done"))
        _measure(done)
        return done

    async def _sweep(self, order: ReaperOrder, what: str) -> Sweep:
        seen: Sweep = await workflow.execute_activity(
            SWEEP,
            order,
            result_type=Sweep,
            # What nobody guards costs money: it does not wait behind launches.
            task_queue=timeouts.RELEASE_QUEUE,
            start_to_close_timeout=timeouts.SWEEP,
            heartbeat_timeout=timeouts.HEARTBEAT,
            retry_policy=timeouts.FEW,
            summary=f"{what}: inventory, then custodies",
        )
        return seen

    async def _hand_over(self, orphan: Suspect, seen: Sweep, closed_by: float) -> Orphan:
        identity = orphan.hosts.identity
        order = CustodyOrder(
            identity=identity,
            hosts=orphan.hosts,
            deadline=workflow.time(),
            search_attributes=seen.search_attributes,
            claims=handed_over(orphan, closed_by),
            due=f"found by the reaper: its custody was {orphan.custody}",
        )
        try:
            await workflow.start_child_workflow(
                Custody.run,
                order,
                id=identity.custody_id,
                task_queue=timeouts.RUN_QUEUE,
                # It outlives the reaper, for as long as the release takes.
                parent_close_policy=ParentClosePolicy.ABANDON,
                cancellation_type=workflow.ChildWorkflowCancellationType.ABANDON,
                # The id of a custody that has closed; one that is open is never touched.
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
                static_summary=f"custody of {identity.workflow_id}, found by the reaper",
            )
        except WorkflowAlreadyStartedError:
            return Orphan(custody_id=identity.custody_id, custody=orphan.custody, handed_over=False)
        return Orphan(custody_id=identity.custody_id, custody=orphan.custody, handed_over=True)


def _understood(told: tuple[Any, ...]) -> ReaperOrder:
    try:
        [order] = told
        return ReaperOrder.model_validate(order)
    except ValueError:
        raise ApplicationError(
            "the reaper is started by its schedule (python -m worker setup) and takes the deployment it sweeps for: "
            '{"deployment": "..."}',
            type="Rejected",
        ) from None


def _measure(found: Reaped) -> None:
    """What this execution found, as gauges; what was handed over, as a counter."""
    meter = workflow.metric_meter()
    for name, value in (
        ("found", found.found),
        ("orphans", len(found.orphans)),
        ("unreadable", found.unreadable),
        ("foreign", found.foreign),
        ("left_out", found.left_out),
    ):
        meter.create_gauge(f"lanyard_reaper_{name}").set(value)
    meter.create_counter("lanyard_reaper_released").add(sum(each.handed_over for each in found.orphans))
