"""One child and everything that comes of it: started, reaped, and ended exactly. Standard library only.

The supervising process is a child subreaper: whatever a descendant leaves behind (a daemon, a job's shell whose parent
died) is re-parented to it, so its descendants are exactly what it started, with no name or pattern involved.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.processes import Process, become_subreaper, descendants, dies_with_parent, look_up, send

LOG_LIMIT_BYTES = 4 * 2**20
LOG_TAIL_BYTES = 64 * 2**10


class Supervisor:
    """Owns one child command and all of its descendants. Use it from the main thread."""

    def __init__(self) -> None:
        become_subreaper()
        self._child: Process | None = None
        self._status: int | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str], directory: Path, log: Path) -> Process:
        """Start ``command`` (its first word an absolute path) in a session of its own, output appended to ``log``.

        The kernel kills the child when this process ends without having ended it. Raises OSError.
        """
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # Never waited for through this object: `reap` collects every child, and only one may collect each.
            started = subprocess.Popen(
                [*dies_with_parent(), *command],
                env=dict(environment),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        found = look_up(started.pid)
        assert found is not None  # not reaped yet, so at least a zombie has the pid
        started.returncode = 0  # keeps Popen from waiting for it, or warning about it, later
        self._child, self._status = found, None
        return found

    def reap(self) -> int | None:
        """Collect everything that ended; return the child's exit status once it has one (negative: a signal)."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if self._child is not None and pid == self._child.pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def end(self, grace_s: float, limit_s: float) -> list[Process]:
        """End everything: SIGTERM to the child, ``grace_s`` seconds for it to take its own down, SIGKILL to the rest.

        Returns what still runs after ``limit_s`` more seconds (stuck in the kernel), normally nothing.
        """
        if self._child is not None:
            send(self._child, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self._below() and time.monotonic() < deadline:
            if self._status is not None:
                # The child is gone: what it left will not end by itself any faster.
                break
            time.sleep(0.05)
        deadline = time.monotonic() + limit_s
        while left := self._below():
            for process in left:
                send(process, signal.SIGKILL)
            if time.monotonic() > deadline:
                return left
            time.sleep(0.05)
        return []

    def _below(self) -> list[Process]:
        self.reap()
        return descendants(os.getpid())


def bound_log(log: Path, limit: int = LOG_LIMIT_BYTES) -> None:
    """Cut an append-mode log that outgrew ``limit`` down to its tail, in place (writers go on at the new end)."""
    try:
        if log.stat().st_size <= limit:
            return
        tail = read_tail(log, LOG_TAIL_BYTES)
        with log.open("r+b") as file:
            file.truncate(0)
        with log.open("ab") as file:
            file.write(b"[cut here: the log outgrew its bound]\n" + tail)
    except FileNotFoundError:
        return


def read_tail(log: Path, size: int = 4096) -> bytes:
    """The last ``size`` bytes of a file, empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read()
    except OSError:
        return b""
