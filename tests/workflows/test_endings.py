"""Abort, cancel, terminate, time-out and reset of a run, in every phase: how it ends, and that nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import ResetWorkflowExecutionRequest
from temporalio.client import WorkflowExecutionStatus, WorkflowHandle

from tests.workflows.conftest import Keep
from tests.workflows.server import Temporal
from tests.workflows.stand_ins import (
    FULL,
    PLAIN,
    Hold,
    World,
    custodys_word,
    ending_of,
    soon,
    until,
)
from workflows import activity_names as names
from workflows.orders import PARITY

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass(frozen=True)
class Phase:
    """A moment of a full run: the activity that is running, and what is claimed by then."""

    activity: str
    claimed: tuple[str, ...] = ()
    when: Callable[[Any], bool] = lambda order: True
    after: bool = False


CLUSTER, TRAIN, STRIKE, SECOND = "cluster/{}", "job/{}-train", "job/{}-strike", "job/{}-parity"
PHASES = {
    "orient": Phase(names.ORIENT),
    "preflight": Phase(names.PREFLIGHT),
    "before the launch's claim": Phase(names.LAUNCH),
    "launch": Phase(names.LAUNCH, (CLUSTER,), after=True),
    "prove hosts": Phase(names.PROVE_HOSTS, (CLUSTER,)),
    "submit": Phase(names.SUBMIT, (CLUSTER, TRAIN), after=True),
    "train": Phase(names.WATCH, (CLUSTER, TRAIN)),
    "choose": Phase(names.CHOOSE, (CLUSTER, TRAIN)),
    "strike": Phase(names.STRIKE, (CLUSTER, TRAIN, STRIKE), after=True),
    "recover": Phase(names.WATCH, (CLUSTER, TRAIN, STRIKE), when=lambda order: bool(order.seen and order.seen.step > 8)),
    "parity's submit": Phase(
        names.SUBMIT,
        (CLUSTER, TRAIN, STRIKE, SECOND),
        when=lambda order: bool(order.train_name == PARITY),
        after=True,
    ),
    "parity": Phase(
        names.WATCH, (CLUSTER, TRAIN, STRIKE, SECOND), when=lambda order: bool(order.job.train_name == PARITY)
    ),
    "prove": Phase(names.PROVE, (CLUSTER, TRAIN, STRIKE, SECOND)),
}
in_every_phase = pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES.keys())
in_every_phase_with_custody = pytest.mark.parametrize(
    "phase", [p for name, p in PHASES.items() if name != "orient"], ids=[name for name in PHASES if name != "orient"]
)


async def held_in(world: World, phase: Phase, **options: Any) -> tuple[WorkflowHandle[Any, Any], Hold]:
    """A full run, held in this phase."""
    hold = Hold(phase.when, after=phase.after)
    world.script[phase.activity] = hold
    run = await world.start(FULL, **options)
    await soon(hold.reached.wait())
    return run, hold


def claimed(world: World, phase: Phase) -> list[str]:
    return [name.format(world.key) for name in phase.claimed]


async def released_exactly(world: World, phase: Phase) -> None:
    """Custody released what was claimed by then, all of it and nothing else, and closed."""
    if phase.activity == names.ORIENT:
        return
    record = await custodys_word(world)
    assert record.cleanup == "clean"
    assert [c.id for c in record.claims] == claimed(world, phase)
    assert world.released == claimed(world, phase)[::-1]
    assert len(world.orders(names.RELEASE)) == (1 if phase.claimed else 0)


# Abort and cancel ----------------------------------------------------------------------------------------------------


@in_every_phase
async def test_an_abort_ends_completed_as_aborted_with_everything_released(world: World, phase: Phase) -> None:
    run, _ = await held_in(world, phase)
    await run.signal("abort", "enough")
    ending = await ending_of(run)
    assert ending.status == "completed"
    assert ending.verdict
    assert ending.verdict.outcome == "aborted"
    assert ending.verdict.message.startswith("aborted as asked: enough")
    await released_exactly(world, phase)


@in_every_phase
async def test_a_cancel_ends_canceled_with_everything_released(world: World, phase: Phase) -> None:
    run, _ = await held_in(world, phase)
    await run.cancel()
    ending = await ending_of(run)
    assert ending.status == "canceled"
    assert ending.verdict
    assert ending.verdict.outcome == "cancelled"
    await released_exactly(world, phase)
