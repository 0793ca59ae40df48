"""Plumbing shared by the workflows: outliving a cancel, and stopping a story between its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from temporalio import workflow

T = TypeVar("T")


async def outlive(task: asyncio.Task[T], on_cancel: Callable[[], None]) -> T:
    """Wait for `task` to its end, however often the workflow is cancelled meanwhile.

    The task is never awaited directly, so a cancel reaches only the wait: `asyncio.shield` does not survive a second
    cancel (sdk-python #1600). `on_cancel` is called for each.
    """
    while not task.done():
        try:
            await workflow.wait_condition(task.done)
        except asyncio.CancelledError:
            on_cancel()
    return task.result()
