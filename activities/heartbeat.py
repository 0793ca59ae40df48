"""The one heartbeat: a context that beats by itself and carries what a person wants to see."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from temporalio import activity

BEAT_S = 5.0
"""Well inside the heartbeat timeout (30 s), and cheap for a thousand watchers."""

T = TypeVar("T")


class Heart:
    """Details of the running activity, shown in the UI and read by the next attempt."""

    def __init__(self) -> None:
        self.details: dict[str, Any] = {}
        self._stopped = False

    def say(self, **details: Any) -> None:
        """Update the details and beat now."""
        self.details.update(details)
        if not self._stopped:
            activity.heartbeat(dict(self.details))

    def last(self) -> dict[str, Any]:
        """The details of the attempt before this one; empty on the first."""
        found = activity.info().heartbeat_details
        return dict(found[0]) if found and isinstance(found[0], dict) else {}

    def stop(self) -> None:
        self._stopped = True


@asynccontextmanager
async def beating(**details: Any) -> AsyncIterator[Heart]:
    """Beat every few seconds until the block ends. Blocking work inside belongs in `in_thread`."""
    heart = Heart()

    async def beat() -> None:
        while True:
            heart.say()
            await asyncio.sleep(BEAT_S)

    heart.details.update(details)
    task = asyncio.create_task(beat())
    try:
        yield heart
    finally:
        heart.stop()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def in_thread(threads: Executor, work: Callable[..., T], *args: Any) -> T:
    """Run blocking work in one of `threads`, so that heartbeats go on. A cancel ends the wait, not the thread: what
    the thread may still do is bounded by the send window of its claim. Releases have threads of their own."""
    return await asyncio.get_running_loop().run_in_executor(threads, work, *args)
