"""The stack's processes, known by pid, start time and boot, so that a reused pid is never taken for ours."""

from __future__ import annotations

import signal
import time
from typing import Final

import psutil
from pydantic import BaseModel, ConfigDict

from trainer.machine import boot_id
from trainer.processes import is_alive, look_up, send

_POLL_S: Final = 0.05
_KILL_PATIENCE_S: Final = 10.0


class ProcessIdentity(BaseModel):
    """One process of one boot of this machine."""

    model_config = ConfigDict(frozen=True)

    pid: int
    start_time: int
    """Clock ticks since boot: field 22 of /proc/<pid>/stat."""
    boot_id: str


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of the live process `pid`, or None where there is none (a zombie is none)."""
    found = look_up(pid)
    if found is None or not found.running:
        return None
    return ProcessIdentity(pid=pid, start_time=found.start_time, boot_id=boot_id())


def alive(identity: ProcessIdentity) -> bool:
    """Whether exactly this process still runs."""
    return is_alive(identity.pid, identity.start_time, identity.boot_id)


def end(identity: ProcessIdentity, grace_s: float) -> bool:
    """End exactly this process: SIGTERM, and SIGKILL after `grace_s` seconds. Blocks.

    Returns whether it had to be ended (False: it was gone already). Raises PermissionError, and TimeoutError for a
    process that even SIGKILL does not end within 10 s (stuck in the kernel).
    """
    process = look_up(identity.pid)
    if process is None or not alive(identity) or process.start_time != identity.start_time:
        return False
    for number, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_PATIENCE_S)):
        send(process, number)
        deadline = time.monotonic() + patience
        while alive(identity) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not alive(identity):
            return True
    raise TimeoutError(f"process {identity.pid} does not end, even by SIGKILL")


def listens(pid: int, port: int) -> bool:
    """Whether process `pid` itself holds the listening TCP socket of `port` (not somebody who took the port)."""
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return False
    return any(c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port for c in connections)
