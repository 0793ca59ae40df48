"""Who this machine and this process are, in terms that outlive names: machine id, boot id, pid and start time."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

_MACHINE_ID = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that no other can be mistaken for: pid, start time in clock ticks since boot, and the boot's id."""

    pid: int
    start_time: int
    boot_id: str


def boot_id() -> str:
    """The kernel's id of the current boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def host_fingerprint() -> str:
    """SHA-256 (hex) of machine id and boot id: equal on one boot of one machine, whatever it is called.

    A machine without a machine id (some containers) is told apart by its boot id and host name.
    """
    for path in _MACHINE_ID:
        try:
            machine = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if machine:
            break
    else:
        machine = f"hostname:{socket.gethostname()}"
    return hashlib.sha256(f"{machine}\n{boot_id()}\n".encode()).hexdigest()


def start_time(pid: int) -> int:
    """Clock ticks since boot at which process ``pid`` started. Raises ProcessLookupError when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process {pid}") from None
    # The command's name may hold blanks and brackets; the fields proper follow its last bracket, from the third on.
    return int(stat.rpartition(")")[2].split()[19])


def this_process() -> ProcessIdentity:
    """The identity of the calling process."""
    pid = os.getpid()
    return ProcessIdentity(pid, start_time(pid), boot_id())


def cpu_name() -> str:
    """The processor's model name, or its architecture where the kernel gives none."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return os.uname().machine
