"""Reaping: one look at everything the providers have, and at who guards it."""

from __future__ import annotations

import asyncio
import hashlib
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionDescription
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities.heartbeat import beating, in_thread
from activities.hosts import HostsProvider
from activities.hosts.reach import Providers
from activities.keeper import CLOSED
from activities.storage import Storage, StorageError
from workflows import activity_names
from workflows.evidence import Deployment, Mark, ReaperOrder, Suspect, Sweep

MOST_ITEMS: Final = 2000
"""Of a kind and provider in one look. Describing a custody takes milliseconds."""
MOST_SUSPECTS: Final = 40
"""In one look. Each can become a child of the reaper (about five events), and its order is in the history twice. Those
beyond are next: an orphan that was handed over has an open custody, and is no suspect any more."""
MOST_NOTES: Final = 20
AT_ONCE: Final = 20
"""Custodies that are asked for at the same time."""
ASK: Final = timedelta(seconds=10)


@dataclass
class _Seen:
    """What the providers have: ours, each with its provider, and the rest, a line each."""

    ours: list[tuple[HostsProvider, Mark]] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    left_out: int = 0


class Reaping:
    def __init__(
        self, client: Client, storage: Storage, providers: Providers, deployment: Deployment, threads: Executor
    ) -> None:
        self._client = client
        self._storage = storage
        self._providers = providers
        self._deployment = deployment
        self._threads = threads

    @activity.defn(name=activity_names.SWEEP)
    async def sweep(self, order: ReaperOrder) -> Sweep:
        """Inventory first, then the custody of each thing that is ours: what begins in between has its custody before
        there is anything of it. Changes nothing. What cannot be read is counted, and never a suspect."""
        if order.deployment != self._deployment.deployment:
            raise ApplicationError(
                f"this worker is of deployment {self._deployment.deployment} and sweeps for no other; workers of "
                f"{order.deployment} poll the same task queues: give all of them one LANYARD_DEPLOYMENT, or each a "
                "namespace of its own",
                type="OtherDeployment",
            )
        async with beating(note="reading the inventory") as heart:
            seen = await self._inventory()
            heart.say(note=f"asking for {len(seen.ours)} custodies")
            gate = asyncio.Semaphore(AT_ONCE)

            async def look(provider: HostsProvider, mark: Mark) -> Suspect | Exception | None:
                async with gate:
                    try:
                        return await self._suspect(provider, mark)
                    except (RPCError, StorageError) as unknown:
                        return unknown

            looks = await asyncio.gather(*(look(*each) for each in seen.ours))
        suspects = [each for each in looks if isinstance(each, Suspect)]
        unreadable = seen.unreadable + [
            f"custody of {mark.hosts.identity.run_key}: {unknown}"
            for (_, mark), unknown in zip(seen.ours, looks, strict=True)
            if isinstance(unknown, Exception)
        ]
        return Sweep(
            found=len(seen.ours),
            held=sum(each is None for each in looks),
            suspects=tuple(suspects[:MOST_SUSPECTS]),
            foreign=len(seen.foreign),
            unreadable=len(unreadable),
            left_out=seen.left_out + max(0, len(suspects) - MOST_SUSPECTS),
            notes=tuple(
                [f"unreadable: {each[:300]}" for each in unreadable[:MOST_NOTES]]
                + [f"foreign: {each[:300]}" for each in seen.foreign[:MOST_NOTES]]
            ),
            search_attributes=self._deployment.search_attributes,
        )

    async def _inventory(self) -> _Seen:
        """What all providers have. One that cannot tell hides nothing of the others."""
        seen = _Seen()
        for provider in self._providers.every():
            try:
                found = await in_thread(self._threads, provider.inventory, MOST_ITEMS)
            except Exception as error:
                seen.unreadable.append(f"the inventory of {provider.name}: {error}")
                continue
            for mark in found.marked:
                if whose := self._another(mark, provider.name, provider.context(mark.hosts)):
                    seen.foreign.append(f"{mark.hosts.identity.run_key}: {whose}")
                else:
                    seen.ours.append((provider, mark))
            seen.foreign += [f"{each}: no mark" for each in found.unmarked]
            seen.unreadable += found.unreadable
            seen.left_out += found.left_out
        return seen

    def _another(self, mark: Mark, provider: str, here: str) -> str:
        """Whose it is, where it is not ours; "" where it is. One deployment's custody is in one namespace, and only a
        worker at the place of a claim can release it."""
        identity = mark.hosts.identity
        if identity.deployment != self._deployment.deployment:
            return f"of deployment {identity.deployment}"
        if identity.namespace != self._client.namespace:
            return f"of namespace {identity.namespace or '(none)'}"
        if (mark.hosts.provider, mark.context) != (provider, here):
            return f"made at {mark.hosts.provider} {mark.context}"
        return ""

    async def _suspect(self, provider: HostsProvider, mark: Mark) -> Suspect | None:
        """None where custody is open, or in a state that is not known to be closed. Raises RPCError, StorageError where
        it cannot be told."""
        identity = mark.hosts.identity
        custody, run_id = "absent", ""
        try:
            told: WorkflowExecutionDescription = await self._client.get_workflow_handle(identity.custody_id).describe(
                rpc_timeout=ASK
            )
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
        else:
            if told.status not in CLOSED:
                return None
            custody, run_id = CLOSED[told.status].replace("_", " "), told.run_id
        lease = await self._storage.get(f"{identity.storage}/custody/lease.json")
        return Suspect(
            hosts=mark.hosts,
            claims=tuple(provider.claims(mark.hosts)),
            custody=custody,
            custody_run_id=run_id,
            lease=hashlib.sha256(lease.body or b"").hexdigest()[:16] if lease else "",
        )
