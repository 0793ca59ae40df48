"""Which processes and sockets of this machine belong to a run: found by the run's mark, ended by exact identity."""

from __future__ import annotations

import ipaddress
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from activities.hosts import AbsenceUnknown
from trainer.processes import Process, every_process, is_alive, send
from trainer.ray_node import CUSTODY_MARK


@dataclass(frozen=True)
class Marked:
    """A process of the run."""

    process: Process
    command: str

    def __str__(self) -> str:
        return f"process {self.process.pid} (started at tick {self.process.start_time}): {self.command[:100]}"


def marked(run_key: str, since_tick: int | None) -> list[Marked]:
    """Every running process that carries the run's mark in its environment, or has a parent that does.

    ``since_tick``: nothing of the run can be older. A process of ours that began later and whose environment the
    kernel will not show raises AbsenceUnknown: it could be one. Other users' processes cannot be ours.
    """
    wanted = f"{CUSTODY_MARK}={run_key}".encode()
    me = os.geteuid()
    everything = {process.pid: process for process in every_process() if process.running}
    found: set[int] = set()
    for process in everything.values():
        place = Path(f"/proc/{process.pid}")
        try:
            if place.stat().st_uid != me and me != 0:
                continue
            if wanted in (place / "environ").read_bytes().split(b"\0"):
                found.add(process.pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError as error:
            if (
                since_tick is not None
                and process.start_time >= since_tick
                and is_alive(process.pid, process.start_time)
            ):
                raise AbsenceUnknown(f"the environment of process {process.pid} cannot be read: {error}") from error
    grown = True
    while grown:
        children = {each.pid for each in everything.values() if each.parent in found} - found
        found |= children
        grown = bool(children)
    return [Marked(everything[pid], _command(pid)) for pid in sorted(found)]


def end_all(
    run_key: str,
    since_tick: int | None,
    first: list[Process],
    progress: Callable[[str], None],
    *,
    patience_s: float,
    limit_s: float,
) -> tuple[list[Marked], int]:
    """SIGTERM to ``first`` (the hosting services, which end what is theirs), ``patience_s`` seconds for that, then
    SIGKILL to each marked process that is left, for at most ``limit_s`` seconds.

    Returns what withstood, and how many were killed.
    """
    for process in first:
        send(process, signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    while left := marked(run_key, since_tick):
        still = [each for each in first if is_alive(each.pid, each.start_time)]
        if not still or time.monotonic() > deadline:
            break
        progress(f"{len(left)} processes of the hosts are ending")
        time.sleep(0.25)
    killed = 0
    deadline = time.monotonic() + limit_s
    while left := marked(run_key, since_tick):
        if time.monotonic() > deadline:
            return left, killed
        for each in left:
            killed += send(each.process, signal.SIGKILL)
        progress(f"killing {len(left)} processes that were left over")
        time.sleep(0.1)
    return [], killed


def listeners(addresses: list[str]) -> list[str]:
    """Listening TCP sockets bound to one of these addresses. Raises AbsenceUnknown when the kernel will not say."""
    wanted = {_kernel_form(each) for each in addresses}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except FileNotFoundError:
            continue  # no IPv6 in this kernel
        except OSError as error:
            raise AbsenceUnknown(f"{table} cannot be read: {error}") from error
        for line in lines:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == "0A" and address[-8:] in wanted:
                found.append(f"port {int(port, 16)} at {_address(address[-8:])}")
    return sorted(set(found))


def _kernel_form(address: str) -> str:
    return int.from_bytes(ipaddress.IPv4Address(address).packed, "little").to_bytes(4, "big").hex().upper()


def _address(kernel_form: str) -> str:
    return str(ipaddress.IPv4Address(bytes.fromhex(kernel_form)[::-1]))


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
