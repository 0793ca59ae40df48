"""Hosts that somebody else prepared: a Ray cluster that was there before the run and stays after it.

The run owns its jobs here and nothing else, so nothing is launched and nothing but jobs is released. When the operator
is gone for good, each job ends by itself: its entrypoint runs under the lease keeper.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx
from pydantic import ValidationError

from activities.hosts import (
    AbsenceUnknown,
    HostsError,
    HostsFailed,
    HostsNotReady,
    MaySend,
    Offer,
    Progress,
    WrongContext,
)
from activities.jobs import Endpoint, Jobs, JobsError
from trainer.private import NotPrivate, read_private_file
from workflows.evidence import Claim, Frozen, HostFacts, Hosts, HostsOrder, Inventory, StepTaken
from workflows.spec import COMMON_PINS

T = TypeVar("T")

ASK_S: Final = 10.0
LONGEST_TOKEN: Final = 4096


class ExistingOptions(Frozen):
    """The `existing` provider's own part of `hosts` in run.json."""

    endpoint: str
    token_file: str
    require_distinct_hosts: bool
    require_distinct_devices: bool


class ExistingHosts:
    """The provider `existing`."""

    name = "existing"

    def context(self, order: HostsOrder) -> str:
        """The cluster's endpoint: job ids mean something there only."""
        return _options(order).endpoint

    def check(self, order: HostsOrder) -> list[str]:
        """See `HostsProvider.check`: the token, the cluster's answer to it and to none, its version and its nodes."""
        options = _options(order)
        try:
            with self.endpoint(order) as endpoint:
                problems = _token_needed(endpoint)
                nodes = _ask(endpoint, Jobs.alive_nodes)
        except (HostsError, JobsError) as error:
            where = "" if str(error).startswith("hosts.") else f"the cluster at {options.endpoint}: "
            return [f"{where}{error}"]
        if len(nodes) < order.count:
            problems.append(
                f"the cluster at {options.endpoint} has {len(nodes)} of the {order.count} nodes that the run needs, "
                "each with one training worker; add nodes, or ask for fewer"
            )
        if order.device == "cuda" and len([each for each in nodes.values() if _gpus(each)]) < order.count:
            problems.append(f"the cluster at {options.endpoint} does not offer a GPU on {order.count} of its nodes")
        return problems

    def offer(self, order: HostsOrder) -> Offer:
        """See `HostsProvider.offer`. What somebody else's hosts cost is theirs."""
        return Offer(f"{order.count} workers on the cluster at {_options(order).endpoint}, {order.device}")

    def claims(self, order: HostsOrder) -> list[Claim]:
        """None: the hosts are somebody else's."""
        return []

    def launch(self, order: HostsOrder, may_send: MaySend, progress: Progress) -> None:
        """Nothing is to be created."""

    def prove(self, order: HostsOrder, progress: Progress) -> Hosts:
        """See `HostsProvider.prove`. What the hosts are they prove in the training itself, rank by rank."""
        progress("asking the cluster for its nodes")
        with self.endpoint(order) as endpoint:
            try:
                nodes = _ask(endpoint, Jobs.alive_nodes)
            except JobsError as error:
                raise HostsNotReady(f"the cluster at {endpoint.url}: {error}") from error
        if len(nodes) < order.count:
            raise HostsNotReady(f"the cluster at {endpoint.url} has {len(nodes)} of {order.count} nodes alive")
        # The head first, the others by address.
        alive = sorted(nodes.items(), key=lambda each: (not each[1].get("is_head_node"), str(each[1].get("node_ip"))))
        return Hosts(
            provider=self.name,
            context=self.context(order),
            cluster=endpoint.url,
            hosts=tuple(
                HostFacts(
                    index=index,
                    role="head" if node.get("is_head_node") else "worker",
                    address=str(node.get("node_ip")),
                    node_id=node_id,
                    host_fingerprint="",
                    hostname=str(node.get("node_name") or ""),
                    versions={},
                    environment="",
                )
                for index, (node_id, node) in enumerate(alive)
            ),
        )

    @contextlib.contextmanager
    def endpoint(self, order: HostsOrder) -> Iterator[Endpoint]:
        """The endpoint of run.json, with the token of its file, read anew each time."""
        options = _options(order)
        try:
            token = read_private_file(Path(options.token_file), "the token's file").decode().strip()
        except (NotPrivate, OSError, UnicodeDecodeError) as error:
            raise HostsFailed(
                f"hosts.token_file: {error}; put the cluster's token there, mode 0600, on every worker's machine"
            ) from error
        if not (0 < len(token) <= LONGEST_TOKEN and token.isascii() and token.isprintable() and " " not in token):
            raise HostsFailed(f"hosts.token_file: {options.token_file} must hold one token in one line, nothing else")
        yield Endpoint(url=options.endpoint, token=token)

    def release(self, claim: Claim, order: HostsOrder, progress: Progress) -> StepTaken:
        """Nothing of the hosts is the run's; its jobs are stopped through the Jobs API, as everywhere."""
        raise WrongContext(f"{claim.id}: a run on existing hosts owns its jobs only")

    def remaining(self, claim: Claim, order: HostsOrder) -> list[str]:
        """See `HostsProvider.remaining`: the exact job, its actors and its placement groups, as the cluster tells."""

        async def left(jobs: Jobs) -> list[str]:
            if (info := await jobs.info(claim.name)) is None:
                return []
            running = [] if info.terminal else [f"job {claim.name} is {info.status}"]
            return running + await jobs.remains(claim.name, info.ray_job_id)

        if claim.provider != self.name or claim.context != self.context(order):
            raise WrongContext(f"{claim.id} was claimed at {claim.provider} {claim.context}")
        try:
            with self.endpoint(order) as endpoint:
                return _ask(endpoint, left)
        except (HostsError, JobsError) as error:
            raise AbsenceUnknown(f"the cluster at {claim.context}: {error}") from error

    def inventory(self, limit: int) -> Inventory:
        """Empty: what runs on clusters that no open run names is not looked for, and ends with its lease."""
        return Inventory()


def _options(order: HostsOrder) -> ExistingOptions:
    try:
        return ExistingOptions.model_validate(order.options)
    except ValidationError as error:
        first = error.errors()[0]
        raise HostsFailed(f"hosts.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _ask(endpoint: Endpoint, what: Callable[[Jobs], Awaitable[T]]) -> T:
    """One question to the cluster, from a thread."""

    async def ask() -> T:
        async with Jobs.at(endpoint) as jobs:
            return await what(jobs)

    return asyncio.run(ask())


def _token_needed(endpoint: Endpoint) -> list[str]:
    """Whoever reaches a cluster without a token owns it, and every storage credential on it."""
    problems = []
    try:
        with httpx.Client(base_url=endpoint.url, timeout=ASK_S, trust_env=False) as client:
            if client.get("/api/jobs/").status_code not in (401, 403):
                problems.append(
                    f"the cluster at {endpoint.url} answers without a token; start its Ray with RAY_AUTH_MODE=token"
                )
            answer = client.get("/api/version", headers={"Authorization": f"Bearer {endpoint.token}"})
            answer.raise_for_status()
            version = answer.json()["ray_version"]
    except httpx.HTTPStatusError as error:
        said = error.response.status_code
        refused = "refuses the token of hosts.token_file" if said in (401, 403) else "does not answer as Ray does"
        raise HostsFailed(f"it {refused} ({said})") from error
    except httpx.HTTPError as error:
        raise HostsNotReady(f"it does not answer ({type(error).__name__}); is the tunnel open?") from error
    except (ValueError, KeyError, TypeError) as error:
        raise HostsFailed("what answers there is not Ray's dashboard") from error
    if version != COMMON_PINS["ray"]:
        problems.append(f"the cluster at {endpoint.url} runs Ray {version}; a run needs {COMMON_PINS['ray']}")
    return problems


def _gpus(node: dict[str, Any]) -> float:
    total = node.get("resources_total")
    return float(total.get("GPU", 0)) if isinstance(total, dict) else 0.0
