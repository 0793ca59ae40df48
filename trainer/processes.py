"""Processes by exact identity on one Linux machine. Standard library only.

A process is its pid *and* its start time (law 2): a pid alone is reused. Signals go through a pidfd that was opened
before the start time was compared, so that the process signalled is the one that was looked at.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.machine import boot_id

PR_SET_CHILD_SUBREAPER = 36

# Run as a program of its own, because code between fork and exec is unsafe in a process that has threads. The signal
# survives the exec.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "os.execv(sys.argv[2], sys.argv[2:])"
)

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """One process, exactly."""

    pid: int
    start_time: int
    """Clock ticks since boot: /proc/<pid>/stat, field 22."""
    parent: int
    state: str
    """One letter of /proc/<pid>/stat; Z is a zombie, which runs no more."""

    @property
    def running(self) -> bool:
        return self.state not in ("Z", "X", "x")


def look_up(pid: int) -> Process | None:
    """The process that has ``pid`` now, or None."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may itself hold blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    return Process(pid=pid, start_time=int(fields[19]), parent=int(fields[1]), state=fields[0])


def is_alive(pid: int, start_time: int, boot: str | None = None) -> bool:
    """Whether exactly this process still runs (a zombie does not)."""
    if boot is not None and boot != boot_id():
        return False
    found = look_up(pid)
    return found is not None and found.start_time == start_time and found.running


def this_process() -> Process:
    """The calling process."""
    found = look_up(os.getpid())
    assert found is not None
    return found


def every_process() -> Iterator[Process]:
    """Every process there is now; one that ends while we look is left out."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (found := look_up(int(name))) is not None:
            yield found


def descendants(root: int) -> list[Process]:
    """Everything below ``root``, zombies left out, children before grandchildren."""
    children: dict[int, list[Process]] = {}
    for process in every_process():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    level = [root]
    while level:
        below = [process for parent in level for process in children.get(parent, [])]
        found += [process for process in below if process.running]
        level = [process.pid for process in below]
    return found


def send(process: Process, number: signal.Signals) -> bool:
    """Send a signal to exactly this process. False when it is gone (or its pid is another's by now)."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        found = look_up(process.pid)
        if found is None or found.start_time != process.start_time or not found.running:
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def dies_with_parent() -> list[str]:
    """What to put before a command (its first word an absolute path) so that the kernel kills it when this process
    ends, however that happens. Start it from the main thread: it is that thread's end that counts."""
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]


def become_subreaper() -> None:
    """Have orphaned descendants re-parented to this process instead of to init. Raises OSError."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")
