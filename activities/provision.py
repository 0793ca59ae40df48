"""Provisioning: claim, then create or adopt the hosts; then wait until each has proved itself."""

from __future__ import annotations

import asyncio
import contextvars
from concurrent.futures import Executor
from typing import Final

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from activities.custody import claimed
from activities.heartbeat import Heart, beating, in_thread
from activities.hosts import HostsFailed, HostsNotReady, Progress
from activities.hosts.reach import Providers
from workflows import activity_names
from workflows.evidence import Hosts, HostsOrder

LOOK_S: Final = 0.5
"""How often hosts that are coming up are looked at."""


class Provision:
    def __init__(self, client: Client, providers: Providers, threads: Executor) -> None:
        self._client = client
        self._providers = providers
        self._threads = threads

    @activity.defn(name=activity_names.LAUNCH)
    async def launch_hosts(self, order: HostsOrder) -> None:
        """Claim everything that launching touches, then create or adopt it by its exact name."""
        provider = self._providers.of(order)
        async with (
            beating(note=f"claiming {order.count} {order.provider} hosts") as heart,
            claimed(self._client, order.identity, *provider.claims(order)) as permit,
        ):
            try:
                await in_thread(self._threads, provider.launch, order, permit.check, _progress(heart))
            except HostsFailed as error:
                raise ApplicationError(str(error), type="HostsFailed", non_retryable=True) from error

    @activity.defn(name=activity_names.PROVE_HOSTS)
    async def prove_hosts(self, order: HostsOrder) -> Hosts:
        """Hosts count only when all are up, each has proved itself, and the count is right."""
        provider = self._providers.of(order)
        async with beating(note="waiting for the hosts") as heart:
            while True:
                try:
                    return await in_thread(self._threads, provider.prove, order, _progress(heart))
                except HostsNotReady as waiting:
                    if str(waiting) != heart.details.get("note"):
                        heart.say(note=str(waiting))
                except HostsFailed as error:
                    raise ApplicationError(str(error), type="HostsFailed", non_retryable=True) from error
                await asyncio.sleep(LOOK_S)


def _progress(heart: Heart) -> Progress:
    """Progress from a thread: handed to the loop, because a heartbeat belongs to the activity's own context."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()

    def say(note: str) -> None:
        loop.call_soon_threadsafe(lambda: heart.say(note=note), context=context)

    return say
