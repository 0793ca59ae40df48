"""Putting a worker together: one process, three workers, each with its own task queue, slots and threads."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Final

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from activities.checkpoints import Checkpoints
from activities.drill import Drill
from activities.hosts import HostsProvider
from activities.hosts.existing import ExistingHosts
from activities.hosts.local import LocalHosts
from activities.hosts.reach import Providers
from activities.hosts.skypilot.bridge import SkyPilot
from activities.hosts.skypilot.provider import SkyPilotHosts
from activities.jobs import package
from activities.keeper import Keeper
from activities.preflight import Preflight
from activities.proof import Proving
from activities.provision import Provision
from activities.reaping import Reaping
from activities.releasing import Releasing
from activities.reporting import Reporting
from activities.storage import Storage
from activities.submission import Submission
from activities.token import secret_fingerprint
from activities.verification import Application, Verification
from worker.connect import connect
from worker.settings import CHECKOUT, Settings
from worker.setup import SEARCH_ATTRIBUTES
from workflows.custody import Custody
from workflows.evidence import Deployment
from workflows.guarded_train import GuardedTrain
from workflows.reaper import Reaper
from workflows.timeouts import RELEASE_QUEUE, RUN_QUEUE, WATCH_QUEUE

LAUNCH_THREADS: Final = 16
"""Launches and other blocking calls of runs that are starting."""
RELEASE_THREADS: Final = 16
"""Releases have threads of their own: launches that hang take none of these."""
WATCH_SLOTS: Final = 4000
"""Two waiting activities for each of a thousand runs, and room."""
HEARTBEAT_THROTTLE: Final = timedelta(seconds=1)
"""How long a heartbeat may be held back. The default holds it for 24 s of a 30 s timeout."""
GRACE: Final = timedelta(seconds=10)
"""What a stopping worker gives its activities; they are resumed elsewhere."""


async def run_worker(settings: Settings) -> None:
    """Work until SIGINT or SIGTERM, then stop taking tasks, give activities their grace, and return.

    Raises SettingsError, ConnectError.
    """
    deployment_id = settings.require_deployment()
    secret = settings.read_secret()
    client = await connect(settings, metrics=True)
    storage_at = settings.storage
    async with AsyncExitStack() as opened:
        storage = await opened.enter_async_context(Storage.open(storage_at.endpoint_url, storage_at.region))
        launch_threads = opened.enter_context(ThreadPoolExecutor(LAUNCH_THREADS, "launch"))
        release_threads = opened.enter_context(ThreadPoolExecutor(RELEASE_THREADS, "release"))
        deployment = Deployment(
            deployment=deployment_id,
            search_attributes=await _known_search_attributes(client),
            secret_fingerprint=secret_fingerprint(secret),
            application_source=package({"trainer": CHECKOUT / "trainer"}).name,
        )
        providers = _providers(settings, secret)
        application = Application(CHECKOUT)
        provision = Provision(client, providers, launch_threads)
        submission = Submission(client, storage, providers, CHECKOUT / "trainer")
        preflight = Preflight(storage, providers, application, deployment, launch_threads)
        drill = Drill(client, storage, providers, submission)
        reporting = Reporting(storage)
        checkpoints = Checkpoints(storage, providers)
        keeper = Keeper(client, storage)
        workers = [
            Worker(
                client,
                task_queue=RUN_QUEUE,
                workflows=[GuardedTrain, Custody, Reaper],
                activities=[
                    preflight.orient,
                    preflight.preflight,
                    provision.launch_hosts,
                    submission.submit_job,
                    submission.save_records,
                    drill.choose_victim,
                    drill.strike_victim,
                    Proving(storage).prove,
                    Verification(application).verify_artifacts,
                    reporting.write_report,
                ],
                workflow_runner=SandboxedWorkflowRunner(
                    restrictions=SandboxRestrictions.default.with_passthrough_modules(
                        "pydantic", "pydantic_core", "annotated_types", "workflows"
                    )
                ),
                max_concurrent_activities=200,
                max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
                default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
                graceful_shutdown_timeout=GRACE,
            ),
            Worker(
                client,
                task_queue=WATCH_QUEUE,
                activities=[checkpoints.watch_training, keeper.keep, provision.prove_hosts],
                max_concurrent_activities=WATCH_SLOTS,
                max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
                default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
                graceful_shutdown_timeout=GRACE,
            ),
            Worker(
                client,
                task_queue=RELEASE_QUEUE,
                activities=[
                    Releasing(storage, providers, release_threads).release,
                    Reaping(client, storage, providers, deployment, release_threads).sweep,
                    reporting.report_unspoken,
                ],
                max_concurrent_activities=200,
                max_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
                default_heartbeat_throttle_interval=HEARTBEAT_THROTTLE,
                graceful_shutdown_timeout=GRACE,
            ),
        ]
        for worker in workers:
            await opened.enter_async_context(worker)
        print(f"worker ready: deployment {deployment_id}, {client.namespace}, pid {os.getpid()}", flush=True)
        await _until_told_to_stop()


def _providers(settings: Settings, secret: bytes) -> Providers:
    found: dict[str, HostsProvider] = {"local": LocalHosts(settings.home, secret), "existing": ExistingHosts()}
    if sky := settings.skypilot:
        found["skypilot"] = SkyPilotHosts(
            settings.home,
            secret,
            SkyPilot(sky.python, sky.home, sky.endpoint, sky.port),
            environments=sky.environments,
        )
    return Providers(found)


async def _known_search_attributes(client: Client) -> tuple[str, ...]:
    """Those of ours that the namespace knows as keywords. None where it cannot be asked; runs go on without them."""
    try:
        listed = await client.operator_service.list_search_attributes(
            ListSearchAttributesRequest(namespace=client.namespace)
        )
    except RPCError:
        return ()
    keyword = IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD
    return tuple(name for name in SEARCH_ATTRIBUTES if listed.custom_attributes.get(name) == keyword)


async def _until_told_to_stop() -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()
