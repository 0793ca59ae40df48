"""The real server of these tests, and the workers of production with stand-ins as activities."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

from temporalio.client import Client
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from activities.hosts.reach import Providers
from activities.reaping import Reaping
from tests.workflows.stand_ins import Place, StandIns
from workflows import timeouts
from workflows.custody import Custody
from workflows.evidence import Deployment
from workflows.guarded_train import GuardedTrain
from workflows.reaper import Reaper

WORKFLOWS: Final[list[type]] = [GuardedTrain, Custody, Reaper]
THROTTLE: Final = timedelta(milliseconds=100)


class Temporal:
    """The server, a client of it, and the three workers of one process."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.stand_ins = StandIns(client)
        self.place = Place()
        self._run_worker: Worker | None = None

    def _worker(self, queue: str, activities: list[Callable[..., Any]], workflows: list[type]) -> Worker:
        return Worker(
            self.client,
            task_queue=queue,
            workflows=workflows,
            activities=activities,
            workflow_runner=runner(),
            max_heartbeat_throttle_interval=THROTTLE,
            default_heartbeat_throttle_interval=THROTTLE,
            graceful_shutdown_timeout=timedelta(0),
        )

    async def start_run_worker(self) -> None:
        """The worker of workflows and short activities, with nothing in its cache."""
        made = self._worker(timeouts.RUN_QUEUE, self.stand_ins.of_the_run_queue(), WORKFLOWS)
        await made.__aenter__()
        self._run_worker = made

    async def stop_run_worker(self) -> None:
        if self._run_worker is not None:
            await self._run_worker.__aexit__(None, None, None)
            self._run_worker = None

    def others(self) -> list[Worker]:
        return [
            self._worker(timeouts.WATCH_QUEUE, self.stand_ins.of_the_watch_queue(), []),
            self._worker(timeouts.RELEASE_QUEUE, [*self.stand_ins.of_the_release_queue(), self._reaping().sweep], []),
        ]

    def _reaping(self) -> Reaping:
        place: Any = self.place
        deployment = Deployment(
            deployment="test", search_attributes=(), secret_fingerprint="f" * 16, application_source="a" * 64
        )
        return Reaping(self.client, place, Providers({"local": place}), deployment, ThreadPoolExecutor(2))


def runner() -> SandboxedWorkflowRunner:
    """The sandbox of the production worker."""
    return SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_modules(
            "pydantic", "pydantic_core", "annotated_types", "workflows"
        )
    )
