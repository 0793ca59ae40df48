"""Being asked to stop: Ctrl-C, SIGTERM, or a terminal that was closed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def listen(asked: Callable[[int], None]) -> None:
    """Call `asked` in the running loop with how often this process was asked to stop by now, each time it is.

    A terminal that closes asks once: the kernel and the shells above send a SIGHUP each, and nobody means "at once" by
    it. Under nohup, which ignores SIGHUP, it does not ask at all.
    """
    count = 0

    def on_signal(number: signal.Signals) -> None:
        nonlocal count
        if number == signal.SIGHUP and count:
            return
        count += 1
        asked(count)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal, number)


class Interrupts:
    """How often this process was asked to stop, and a way to wait for the next time."""

    def __init__(self) -> None:
        self.count = 0
        self._pressed = asyncio.Event()
        listen(self._press)

    def _press(self, count: int) -> None:
        self.count = count
        self._pressed.set()

    async def beyond(self, known: int) -> None:
        """Wait for one more than `known`."""
        while self.count <= known:
            self._pressed.clear()
            await self._pressed.wait()
