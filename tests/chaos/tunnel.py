"""The operator's way to a cluster's Jobs API, as a tunnel of the worker's own that can be cut and mended.

A rented head is reached through `ssh -L`, which ends in the worker; so does this. While the file `cut` exists, what is
open breaks and what is new is refused.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LOOK_S: Final = 0.05


class Tunnel:
    """Forwards to one far end."""

    def __init__(self, far: tuple[str, int], cut: Path) -> None:
        self._far, self._cut = far, cut
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(LOOK_S)
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """The near end's, on 127.0.0.1."""
        return int(self._server.getsockname()[1])

    def close(self) -> None:
        self._closed = True
        self._server.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._server.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if self._cut.exists():
                near.close()
                continue
            threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        with near:
            try:
                far = socket.create_connection(self._far, timeout=5)
            except OSError:
                return
            with far:
                ended = threading.Event()
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=_copy, args=(one, other, ended), daemon=True).start()
                while not (ended.is_set() or self._cut.exists() or self._closed):
                    time.sleep(LOOK_S)
                for each in (near, far):
                    with contextlib.suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)


def _copy(one: socket.socket, other: socket.socket, ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    # What is left in the other direction has a moment; the API closes after its answer.
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_WR)
    time.sleep(LOOK_S)
    ended.set()


@contextlib.contextmanager
def tunnel(far: tuple[str, int], cut: Path) -> Iterator[int]:
    """The near end's port, for as long as the block lasts."""
    made = Tunnel(far, cut)
    try:
        yield made.port
    finally:
        made.close()
