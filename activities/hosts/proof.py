"""The proof that hosts are up, the same for every provider: receipts in storage, and Ray's own list of nodes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import boto3
import httpx
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from activities.hosts import HostsFailed, HostsNotReady
from activities.jobs import Endpoint
from workflows.evidence import HostFacts, Hosts, HostsOrder

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

ReadObject = Callable[[str], bytes | None]
"""Reads an `s3://` object; None where there is none."""


@contextlib.contextmanager
def _storage() -> Iterator[S3Client]:
    client = boto3.client(
        "s3",
        region_name=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1",
        config=Config(connect_timeout=5, read_timeout=10, retries={"max_attempts": 2}),
    )
    try:
        yield client
    finally:
        client.close()


def write_object(uri: str, body: bytes) -> None:
    """One small S3 object, with endpoint and credentials from the environment. Raises HostsNotReady."""
    parts = urlsplit(uri)
    try:
        with _storage() as client:
            client.put_object(Bucket=parts.netloc, Key=parts.path.lstrip("/"), Body=body)
    except (ClientError, BotoCoreError) as error:
        raise HostsNotReady(f"{uri} cannot be written: {error}") from error


def read_object(uri: str) -> bytes | None:
    """One small S3 object, with endpoint and credentials from the environment. Raises HostsNotReady."""
    parts = urlsplit(uri)
    try:
        with _storage() as client:
            return bytes(client.get_object(Bucket=parts.netloc, Key=parts.path.lstrip("/"))["Body"].read())
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") in ("NoSuchKey", "404"):
            return None
        raise HostsNotReady(f"{uri} cannot be read: {error}") from error
    except BotoCoreError as error:
        raise HostsNotReady(f"{uri} cannot be read: {error}") from error


def alive_nodes(endpoint: Endpoint) -> dict[str, str]:
    """Node id to address of every node that Ray itself calls ALIVE. Raises HostsNotReady or HostsFailed."""
    try:
        answer = httpx.get(
            f"{endpoint.url}/api/v0/nodes",
            headers={"Authorization": f"Bearer {endpoint.token}"},
            timeout=10.0,
            trust_env=False,
        )
    except httpx.HTTPError as error:
        raise HostsNotReady(f"Ray at {endpoint.url} does not answer: {error}") from error
    if answer.status_code in (401, 403):
        raise HostsFailed(
            f"Ray at {endpoint.url} refuses this run's token ({answer.status_code}): the hosts were started with "
            "another deployment secret; give every worker the same LANYARD_SECRET_FILE"
        )
    try:
        answer.raise_for_status()
        nodes = answer.json()["data"]["result"]["result"]
        return {str(each["node_id"]): str(each["node_ip"]) for each in nodes if each["state"] == "ALIVE"}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise HostsNotReady(f"Ray at {endpoint.url} gave no list of nodes: {error}") from error


@dataclass(frozen=True)
class Receipt:
    """What a host wrote about itself once it was prepared and its Ray answered."""

    facts: HostFacts
    freeze_sha256: str


def receipts(order: HostsOrder, read: ReadObject) -> list[Receipt]:
    """Every host's preparation receipt, by index. Raises HostsNotReady for one that is missing, HostsFailed for one
    that cannot be understood or is not this run's."""
    found = []
    for index in range(order.count):
        uri = f"{order.identity.storage}/hosts/{index}/receipt.json"
        raw = read(uri)
        if raw is None:
            raise HostsNotReady(f"host {index} has not written its receipt yet")
        try:
            written = json.loads(raw)
            whose = written["run_key"], written["index"]
            receipt = Receipt(
                HostFacts(
                    index=written["index"],
                    role=written["role"],
                    address=written["address"],
                    node_id=written["ray"]["node_id"],
                    host_fingerprint=written["host"]["fingerprint"],
                    hostname=written["host"]["hostname"],
                    versions=written["versions"],
                    environment=written["environment"],
                ),
                str(written["freeze_sha256"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise HostsFailed(f"{uri} is no receipt: {error}") from error
        if whose != (order.identity.run_key, index):
            raise HostsFailed(f"{uri} is the receipt of host {whose[1]} of {whose[0]}")
        found.append(receipt)
    return found


def prove(
    order: HostsOrder, *, provider: str, context: str, cluster: str, endpoint: Endpoint, read: ReadObject
) -> Hosts:
    """All `order.count` hosts have written receipts that agree, and Ray shows exactly their nodes alive.

    Raises HostsNotReady while something is missing, HostsFailed for what can only get worse: hosts prepared
    differently, or a node alive that is not of this run.
    """
    written = receipts(order, read)
    if len({(each.facts.environment, each.freeze_sha256) for each in written}) != 1:
        raise HostsFailed("the hosts' application environments differ; build them from one trainer/requirements.txt")
    wanted = {each.facts.node_id: each.facts.address for each in written}
    if len(wanted) != order.count:
        raise HostsFailed(f"{order.count} hosts, but {len(wanted)} different Ray node ids in their receipts")
    alive = alive_nodes(endpoint)
    if missing := wanted.keys() - alive.keys():
        raise HostsNotReady(f"Ray does not show {', '.join(sorted(wanted[each] for each in missing))} alive")
    if extra := alive.keys() - wanted.keys():
        strangers = ", ".join(sorted(alive[each] for each in extra))
        raise HostsFailed(f"nodes that are no host of this run are alive: {strangers}")
    return Hosts(provider=provider, context=context, cluster=cluster, hosts=tuple(each.facts for each in written))
