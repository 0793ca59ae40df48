"""Processes known by pid *and* start time, so that a reused pid is never taken for ours."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict


class ProcessIdentity(BaseModel):
    """One process of one boot of this machine."""

    model_config = ConfigDict(frozen=True)

    pid: int
    start_time: int
    """Clock ticks since boot: field 22 of /proc/<pid>/stat."""
    boot_id: str


def boot_id() -> str:
    """This boot of this machine's kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of the live process `pid`, or None where there is none (a zombie is none)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in parentheses, may itself hold blanks and parentheses: read after the last one.
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in ("Z", "X", "x"):
        return None
    return ProcessIdentity(pid=pid, start_time=int(fields[19]), boot_id=boot_id())


def alive(identity: ProcessIdentity) -> bool:
    """Whether exactly this process still runs."""
    return identify(identity.pid) == identity


def end(identity: ProcessIdentity, grace_s: float) -> bool:
    """End exactly this process: SIGTERM, and SIGKILL after `grace_s` seconds. Blocks.

    Returns whether it had to be ended (False: it was gone already). A pidfd is taken before the identity is
    compared, so a pid that is reused in between is never signalled. Raises PermissionError, and TimeoutError
    for a process that even SIGKILL does not end within 10 s (stuck in the kernel).
    """
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        if not alive(identity):
            return False
        for number, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
            try:
                signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                return True
            if _wait(descriptor, identity, patience):
                return True
        raise TimeoutError(f"process {identity.pid} does not end, even by SIGKILL")
    finally:
        os.close(descriptor)


def _wait(descriptor: int, identity: ProcessIdentity, seconds: float) -> bool:
    """Whether the process ended within `seconds`; a pidfd turns readable then, also for a zombie."""
    deadline = time.monotonic() + seconds
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if poller.poll(left * 1000) or not alive(identity):
            return True
    return not alive(identity)


def listens(pid: int, port: int) -> bool:
    """Whether process `pid` itself holds the listening TCP socket of `port` (not somebody who took the port)."""
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port for c in connections)
