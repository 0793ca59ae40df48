"""What `python -m worker setup` registers, on a real server: once, again, and where it may not."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import (
    Client,
    ScheduleActionExecutionStartWorkflow,
    ScheduleActionStartWorkflow,
    ScheduleDescription,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    ScheduleUpdate,
    ScheduleUpdateInput,
    WorkflowExecutionStatus,
)
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import WorkflowEnvironment

from tests.worker.test_cli import worker
from worker.setup import SetupError, setup
from workflows.timeouts import RUN_QUEUE

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(Path(sys.executable).with_name("temporal")), dev_server_log_level="error"
    )
    async with environment:
        yield environment.client


async def said(client: Client, deployment: str) -> list[str]:
    return [line async for line in setup(client, deployment)]


async def schedule(client: Client, deployment: str) -> ScheduleDescription:
    return await client.get_schedule_handle(f"reaper-{deployment}").describe()


async def test_it_registers_the_reaper_every_five_minutes_one_at_a_time(client: Client) -> None:
    [first, _] = await said(client, "one")
    assert first == "schedule reaper-one in namespace default: created, every 5 minutes"
    found = (await schedule(client, "one")).schedule
    assert [each.every for each in found.spec.intervals] == [timedelta(minutes=5)]
    assert found.policy.overlap == ScheduleOverlapPolicy.SKIP
    assert found.policy.catchup_window == timedelta(minutes=1)
    assert isinstance(found.action, ScheduleActionStartWorkflow)
    assert (found.action.workflow, found.action.id, found.action.task_queue) == ("Reaper", "reaper-one", RUN_QUEUE)


async def test_again_it_changes_the_action_and_keeps_what_a_person_has_set(client: Client) -> None:
    await said(client, "again")
    handle = client.get_schedule_handle("reaper-again")
    await handle.pause(note="not tonight")

    def older(told: ScheduleUpdateInput) -> ScheduleUpdate:
        changed = told.description.schedule
        assert isinstance(changed.action, ScheduleActionStartWorkflow)
        changed.action.workflow = "OlderReaper"
        changed.spec.intervals = [ScheduleIntervalSpec(every=timedelta(hours=1))]
        changed.policy.overlap = ScheduleOverlapPolicy.ALLOW_ALL
        return ScheduleUpdate(changed)

    await handle.update(older)
    for _ in range(2):
        [line, _] = await said(client, "again")
        assert line == "schedule reaper-again in namespace default: brought up to date; its times are kept"
        found = (await schedule(client, "again")).schedule
        assert isinstance(found.action, ScheduleActionStartWorkflow)
        assert found.action.workflow == "Reaper"
        assert found.policy.overlap == ScheduleOverlapPolicy.SKIP
        assert [each.every for each in found.spec.intervals] == [timedelta(hours=1)]
        assert (found.state.paused, found.state.note) == (True, "not tonight")


async def test_each_deployment_of_a_namespace_has_its_own(client: Client) -> None:
    await said(client, "team-a")
    await said(client, "team-b")
    for deployment in ("team-a", "team-b"):
        action = (await schedule(client, deployment)).schedule.action
        assert isinstance(action, ScheduleActionStartWorkflow)
        [order] = await client.data_converter.decode(action.args)
        assert order == {"deployment": deployment}


async def test_a_sweep_that_no_worker_takes_is_not_joined_by_others(client: Client) -> None:
    await said(client, "idle")
    handle = client.get_schedule_handle("reaper-idle")
    for _ in range(3):
        await handle.trigger()
    told = await handle.describe()
    while told.info.num_actions + told.info.num_actions_skipped_overlap < 3:
        await asyncio.sleep(0.2)
        told = await handle.describe()
    assert (told.info.num_actions, told.info.num_actions_skipped_overlap) == (1, 2)
    [running] = told.info.running_actions
    assert isinstance(running, ScheduleActionExecutionStartWorkflow)
    waiting = await client.get_workflow_handle(running.workflow_id).describe()
    assert waiting.status == WorkflowExecutionStatus.RUNNING
    assert running.workflow_id.startswith("reaper-idle-")


class Refusing:
    """A client that may do everything but this."""

    def __init__(self, client: Client, status: RPCStatusCode) -> None:
        self._client = client
        self._status = status

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def create_schedule(self, *told: Any) -> None:
        raise RPCError("no", self._status, b"")


@pytest.mark.parametrize(
    "status", [RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNAUTHENTICATED, RPCStatusCode.UNIMPLEMENTED]
)
async def test_where_schedules_are_not_permitted_it_says_so_and_goes_on(client: Client, status: RPCStatusCode) -> None:
    refusing: Any = Refusing(client, status)
    [first, second] = await said(refusing, "refused")
    assert f"not permitted ({status.name}: no)" in first
    assert second.startswith("search attributes in namespace default: ")


async def test_a_service_that_fails_otherwise_ends_the_setup_with_one_message(client: Client) -> None:
    refusing: Any = Refusing(client, RPCStatusCode.UNAVAILABLE)
    with pytest.raises(SetupError, match="schedule reaper-x in namespace default could not be registered"):
        await said(refusing, "x")


async def test_the_command_says_what_it_did_a_line_each(client: Client) -> None:
    address = client.service_client.config.target_host
    lines = []
    for _ in range(2):
        done = worker("setup", TEMPORAL_ADDRESS=address, LANYARD_DEPLOYMENT="by-hand")
        assert done.returncode == 0, done.stderr
        lines.append(done.stdout.splitlines()[0])
    assert lines == [
        "schedule reaper-by-hand in namespace default: created, every 5 minutes",
        "schedule reaper-by-hand in namespace default: brought up to date; its times are kept",
    ]
