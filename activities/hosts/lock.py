"""One launch of a run at a time on this machine, whichever worker tries."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from activities.hosts import HostsNotReady

LOOK_S = 0.05


@contextlib.contextmanager
def locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock file, which the kernel gives back when its holder ends. Raises HostsNotReady after ``wait_s``."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HostsNotReady(f"another launch has held {path} for {wait_s:.0f} s") from None
                time.sleep(LOOK_S)
        yield
    finally:
        os.close(descriptor)
