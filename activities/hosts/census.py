"""Which processes and sockets of this machine belong to a run: found by the run's mark, ended by exact identity."""

from __future__ import annotations

import ipaddress
import os
import signal
import time
from collections.abc import Callable, Iterable
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


@dataclass(frozen=True)
class Sight:
    """What the kernel shows of a process that may be of some run."""

    process: Process
    marks: frozenset[bytes] = frozenset()
    """Run keys in its environment."""
    works_in: str = ""
    """Its working directory, where its environment is not there any more."""
    hidden: str = ""
    """Why it cannot be looked at."""


def sights() -> list[Sight]:
    """One look at every running process that may be of some run. What hides comes last: it only counts where nothing
    else tells."""
    seen = (_sight(each) for each in every_process() if each.running)
    return sorted((each for each in seen if each), key=lambda each: bool(each.hidden))


@dataclass(frozen=True)
class Census:
    """How a run's processes are told from all others.

    A process is the run's when its environment carries the run's mark; or when its environment is not there any more
    (programs that set their own title overwrite it: measured, Ray's agents and the dashboard's modules do) and it
    works below one of the run's own directories; or when its parent is the run's. A person who looks around in those
    directories has a shell with an environment, and is left alone.
    """

    run_key: str
    places: tuple[str, ...]
    """The run's own directories, absolute."""
    since_tick: int | None
    """No process of the run is older (ticks of this boot); None: not known, or none can be left."""

    def take(self) -> list[Marked]:
        """Every running process of the run, by pid.

        A process of ours that began later than ``since_tick`` and that the kernel will not show raises AbsenceUnknown:
        it could be one. Other users' processes cannot be ours.
        """
        everything = {process.pid: process for process in every_process() if process.running}
        found = {pid for pid, process in everything.items() if (seen := _sight(process)) and self._is_ours(seen)}
        grown = True
        while grown:
            children = {each.pid for each in everything.values() if each.parent in found} - found
            found |= children
            grown = bool(children)
        return [Marked(everything[pid], _command(pid)) for pid in sorted(found)]

    def own(self, seen: Iterable[Sight]) -> bool:
        """Whether one of these is the run's. Raises AbsenceUnknown as `take` does."""
        return any(self._is_ours(each) for each in seen)

    def end_all(
        self, first: list[Process], progress: Callable[[str], None], *, patience_s: float, limit_s: float
    ) -> tuple[list[Marked], int]:
        """SIGTERM to ``first`` (the hosting services, which end what is theirs), ``patience_s`` seconds for that, then
        SIGKILL to each process of the run that is left, for at most ``limit_s`` seconds.

        Returns what withstood, and how many were killed.
        """
        # A process that is ending has neither environment nor directory any more and cannot be told to be the run's, so
        # everything that was ever seen is waited for by its identity.
        known = {each.process.pid: each.process for each in self.take()}
        for process in first:
            send(process, signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if not any(is_alive(each.pid, each.start_time) for each in first):
                break
            progress("the hosting services are ending what they started")
            time.sleep(0.25)
        killed = 0
        deadline = time.monotonic() + limit_s
        while True:
            left = self.take()
            known |= {each.process.pid: each.process for each in left}
            ending = [each for each in known.values() if is_alive(each.pid, each.start_time)]
            if not left and not ending:
                return [], killed
            if time.monotonic() > deadline:
                withstood = {each.pid: Marked(each, _command(each.pid)) for each in ending}
                return list((withstood | {each.process.pid: each for each in left}).values()), killed
            for each in left:
                killed += send(each.process, signal.SIGKILL)
            progress(f"killing {len(left)} processes that were left over, {len(ending)} have not ended yet")
            time.sleep(0.1)

    def _is_ours(self, seen: Sight) -> bool:
        if seen.hidden:
            process = seen.process
            older = self.since_tick is None or process.start_time < self.since_tick
            if older or not is_alive(process.pid, process.start_time):
                return False
            raise AbsenceUnknown(f"process {process.pid} cannot be looked at: {seen.hidden}")
        at = seen.works_in
        return self.run_key.encode() in seen.marks or any(
            at == each or at.startswith((f"{each}/", f"{each} (")) for each in self.places
        )


def _sight(process: Process) -> Sight | None:
    """None for one that is gone, is another user's, or has an environment without a mark."""
    place = Path(f"/proc/{process.pid}")
    me = os.geteuid()
    try:
        if me not in (0, place.stat().st_uid):
            return None
        environ = (place / "environ").read_bytes().split(b"\0")
        prefix = f"{CUSTODY_MARK}=".encode()
        if marks := frozenset(entry[len(prefix) :] for entry in environ if entry.startswith(prefix)):
            return Sight(process, marks=marks)
        if any(entry.startswith(b"PATH=") for entry in environ):
            return None
        # No environment left to ask, as with kernel threads, which work in /.
        return Sight(process, works_in=str((place / "cwd").readlink()))
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError as error:
        return Sight(process, hidden=str(error))


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
