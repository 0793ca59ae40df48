"""`make stack`: the embedded stack in the foreground, until Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.service import RPCError

from worker.home import Home
from worker.interrupts import listen
from worker.services import Addresses, worker_service
from worker.settings import Settings
from worker.stack import MakeWorker, Stack, StackError


async def run_stack(settings: Settings, make_worker: MakeWorker = worker_service) -> int:
    """Run the stack until it is asked to stop; returns the exit status. Raises what `Stack.start` raises."""
    stack = Stack(Home(settings.home), settings, say, make_worker)
    asked = asyncio.Event()

    def on_asked(count: int) -> None:
        asked.set()
        if count == 2:
            say(f"still stopping: {stack.stopping_now()}. Once more ends everything at once (its state is on disk)")
        elif count > 2:
            stack.hurry()

    listen(on_asked)
    starting = asyncio.create_task(stack.start())
    stop_asked = asyncio.create_task(asked.wait())
    await asyncio.wait({starting, stop_asked}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        say("stopping before everything was up")
        starting.cancel()
        await asyncio.wait({starting})
        return 130
    starting.result()
    try:
        _introduce(stack.addresses, Home(settings.home))
        waiting: set[asyncio.Future[Any]] = {stop_asked, stack.failed}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if asked.is_set():
            say("stopping: worker, then S3, then Temporal")
        await tell_open_runs(stack.addresses.temporal)
    finally:
        stop_asked.cancel()
        await stack.stop()
    if stack.failed.done():
        raise StackError(stack.failed.result())
    say("stopped")
    return 0


def _introduce(addresses: Addresses, home: Home) -> None:
    """Say where everything is, and how to use it."""
    print(
        f"\n  Temporal   {addresses.temporal}   UI {addresses.ui}\n"
        f"  S3         {addresses.s3}   bucket lanyard\n"
        f"  logs       {home.logs}\n"
        f"\nIn another shell:  . {home.env}\n"
        "then:  temporal workflow start --type GuardedTrain --task-queue ray-train --workflow-id NAME "
        "--input-file examples/local.json\n"
        "Ctrl-C here stops all of it.\n",
        flush=True,
    )


async def tell_open_runs(address: str) -> None:
    """Say which runs are left open when the services stop, because their hosts live on for as long as their lease."""
    try:
        async with asyncio.timeout(5):
            client = await Client.connect(address)
            count = await client.count_workflows(
                "WorkflowType = 'Custody' AND ExecutionStatus = 'Running'", rpc_timeout=timedelta(seconds=3)
            )
    except (RPCError, RuntimeError, TimeoutError):
        return  # a farewell, not a check
    if count.count:
        say(
            f"{count.count} run(s) are not finished: they go on when the stack is started again. Until then their "
            "hosts run on and stop by themselves when their lease runs out; a training that commits waits for storage "
            "for about a minute and a half, and fails then"
        )


def say(line: str) -> None:
    """One line of the stack's own."""
    print(f"stack: {line}", file=sys.stdout, flush=True)
