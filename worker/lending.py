"""The services that a demo uses: a stack of its own, or one that was there."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from worker.environment import client_variables
from worker.foreground import tell_open_runs
from worker.home import Home
from worker.interrupts import Interrupts
from worker.services import Addresses
from worker.settings import Settings
from worker.stack import Stack, StackError, StackRecord, StackRunning, is_held

_OTHERS_START_S: Final = 180.0
"""How long another's stack may take to come up."""


@dataclass(frozen=True)
class Services:
    """The stack this demo uses: its own, or one that was there."""

    addresses: Addresses
    variables: Mapping[str, str]
    failed: asyncio.Future[str]


@contextlib.asynccontextmanager
async def lent_services(
    settings: Settings, home: Home, say: Callable[[str], None], interrupts: Interrupts
) -> AsyncIterator[Services | None]:
    """The stack to use. One that was there is left alone at the end; None when interrupted before it was up."""

    stack = Stack(home, settings, say)
    starting = asyncio.create_task(stack.start())
    pressed = asyncio.create_task(interrupts.beyond(0))
    await asyncio.wait({starting, pressed}, return_when=asyncio.FIRST_COMPLETED)
    pressed.cancel()
    if not starting.done():
        say("stopping before everything was up")
        starting.cancel()
        await asyncio.wait({starting})
        yield None
        return
    if isinstance(starting.exception(), StackRunning):
        with _guest(home):
            addresses = await _others(home)
            say(f"using the stack that runs in {home.root}")
            variables = client_variables(home, addresses, home.credentials(), settings)
            yield Services(addresses, variables, asyncio.get_running_loop().create_future())
        return
    starting.result()
    try:
        variables = client_variables(home, stack.addresses, home.credentials(), settings)
        yield Services(stack.addresses, variables, stack.failed)
        await _wait_for_guests(home, say, interrupts)
    finally:
        await tell_open_runs(stack.addresses.temporal)
        say("stopping: worker, then S3, then Temporal")
        if interrupts.count >= 3:
            stack.hurry()
        await stack.stop()


async def _others(home: Home) -> Addresses:
    """Where the stack that holds this home is, once it is up."""
    deadline = time.monotonic() + _OTHERS_START_S
    while time.monotonic() < deadline:
        record = StackRecord.read(home)
        if record is not None and record.state == "up":
            return Addresses(record.ports)
        if not is_held(home):
            raise StackError(f"the stack that held {home.root} has ended before it was up; start the demo again")
        await asyncio.sleep(0.5)
    raise StackError(f"the stack that holds {home.root} did not come up within {_OTHERS_START_S:.0f} s")


@contextlib.contextmanager
def _guest(home: Home) -> Iterator[None]:
    """Holds a shared lock while this demo uses somebody else's stack, so that its owner waits before it stops it."""
    descriptor = os.open(home.guests, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


async def _wait_for_guests(home: Home, say: Callable[[str], None], interrupts: Interrupts) -> None:
    descriptor = os.open(home.guests, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    said = False
    count = interrupts.count
    try:
        while interrupts.count == count:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not said:
                    said = True
                    say("another demo uses these services; they stop when it is done (Ctrl-C stops them now)")
            await asyncio.sleep(0.5)
    finally:
        os.close(descriptor)
