"""Finding a run's provider, and reaching its Jobs API the way the provider does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

from temporalio.exceptions import ApplicationError

from activities.hosts import HostsProvider
from activities.jobs import Endpoint
from workflows.evidence import HostsOrder

HINTS: Final = {"skypilot": ". Build SkyPilot's environment with `make skypilot` and start the worker again"}


class Providers:
    """The hosts providers this worker has, by name."""

    def __init__(self, providers: Mapping[str, HostsProvider]) -> None:
        self._providers = dict(providers)

    def of(self, order: HostsOrder) -> HostsProvider:
        """Raises a non-retryable ApplicationError of type Rejected for a provider this worker does not have."""
        found = self._providers.get(order.provider)
        if found is None:
            raise ApplicationError(
                f"hosts.provider: {order.provider!r} is not available on this worker; "
                f"it has {', '.join(sorted(self._providers))}{HINTS.get(order.provider, '')}",
                type="Rejected",
                non_retryable=True,
            )
        return found

    def every(self) -> list[HostsProvider]:
        """All of them, by name."""
        return [self._providers[name] for name in sorted(self._providers)]


@asynccontextmanager
async def reach(providers: Providers, order: HostsOrder) -> AsyncIterator[Endpoint]:
    """The run's Jobs API for the length of the block. Opening may start a tunnel, so it happens in a thread."""
    opened = providers.of(order).endpoint(order)
    endpoint = await asyncio.to_thread(opened.__enter__)
    try:
        yield endpoint
    finally:
        await asyncio.to_thread(opened.__exit__, None, None, None)
