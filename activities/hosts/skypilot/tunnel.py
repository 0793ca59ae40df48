"""An SSH tunnel to a cluster's head, from a loopback port here to a port on the head's own loopback.

Through SkyPilot's generated ssh entry, for as long as it is used: a thread keeps it, opens it anew on the same port
where it broke, and the kernel ends the ssh process together with that thread. A port counts as the tunnel's only when
exactly that ssh process listens on it: what is sent there is the run's token.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from activities.hosts import HostsNotReady
from activities.hosts.plan import free_ports
from trainer.processes import descendants, dies_with_parent, send

LOOPBACK: Final = "127.0.0.1"
OPEN_S: Final = 60.0
"""Measured: 5 to 12 s, through SkyPilot's API server and an `srun` on the node."""
LOOK_S: Final = 0.1
AGAIN_S: Final = 2.0
"""Between two tries to open a tunnel that broke."""
END_S: Final = 5.0


@dataclass(frozen=True)
class Entry:
    """How the head is reached: SkyPilot's files, and the environment of its proxy command."""

    host: str
    config: Path
    key: Path
    known_hosts: Path
    """The host's key, as it was at the first sight. Another one is refused."""
    environment: Mapping[str, str] = field(repr=False)

    def command(self, port: int, remote_port: int) -> list[str]:
        options = {
            "BatchMode": "yes",
            "IdentitiesOnly": "yes",
            "ExitOnForwardFailure": "yes",
            "ConnectTimeout": "60",
            "ServerAliveInterval": "10",
            "ServerAliveCountMax": "3",
            "ControlMaster": "no",
            "ControlPath": "none",
            # SkyPilot's entry checks no key at all; the first value that ssh gets is the one that counts.
            "StrictHostKeyChecking": "accept-new",
            "UserKnownHostsFile": str(self.known_hosts),
            "GlobalKnownHostsFile": "/dev/null",
            "HostKeyAlias": self.host,
        }
        return [
            shutil.which("ssh") or "/usr/bin/ssh",
            *("-F", str(self.config), "-i", str(self.key), "-N"),
            *(part for name, value in options.items() for part in ("-o", f"{name}={value}")),
            *("-L", f"{LOOPBACK}:{port}:{LOOPBACK}:{remote_port}", self.host),
        ]


@contextlib.contextmanager
def tunnel(
    entry: Entry, remote_port: int, *, open_s: float = OPEN_S, revive: Callable[[], object] = lambda: None
) -> Iterator[int]:
    """The local port, for the length of the block. Raises HostsNotReady where it does not open in time.

    ``revive`` is called, in the tunnel's own thread, when the tunnel broke: it may bring back what is on the way.
    """
    keeper = _Keeper(entry, remote_port, revive)
    keeper.start()
    try:
        yield keeper.wait(open_s)
    finally:
        keeper.stop()


class _Keeper(threading.Thread):
    def __init__(self, entry: Entry, remote_port: int, revive: Callable[[], object]) -> None:
        super().__init__(name=f"tunnel-{entry.host}", daemon=True)
        self._entry, self._remote_port, self._revive = entry, remote_port, revive
        self._port = free_ports(1)[0]
        self._opened, self._stopped = threading.Event(), threading.Event()
        self._word = ""
        self._refused = False

    def wait(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while not self._opened.wait(LOOK_S):
            if self._refused or not self.is_alive() or time.monotonic() > deadline:
                self.stop()
                raise HostsNotReady(f"no tunnel to {self._entry.host}: {self._word or 'it does not open'}")
        return self._port

    def stop(self) -> None:
        self._stopped.set()
        if self.is_alive():
            self.join(2 * END_S)

    def run(self) -> None:
        while not self._stopped.is_set() and not self._refused:
            with tempfile.TemporaryFile() as said:
                try:
                    self._once(said)
                except OSError as error:
                    self._word = str(error)
            if not self._stopped.wait(AGAIN_S) and not self._refused:
                self._revive()

    def _once(self, said: Any) -> None:
        """One ssh process, from its start to its end."""
        process = subprocess.Popen(
            # From this thread, with which it ends.
            [*dies_with_parent(), *self._entry.command(self._port, self._remote_port)],
            env=dict(self._entry.environment),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
        try:
            while process.poll() is None and not self._stopped.wait(LOOK_S):
                if not self._opened.is_set() and listens(process.pid, self._port):
                    self._opened.set()
        finally:
            _end(process)
            self._word = _last_words(said) or self._word
            if "HOST IDENTIFICATION HAS CHANGED" in self._word or "Host key verification failed" in self._word:
                self._refused = True
                self._word = (
                    f"the host's key is not the one of before, so it may be another machine. If you know why, remove "
                    f"{self._entry.known_hosts}"
                )
            if not self._opened.is_set() and "cannot listen to port" in self._word:
                self._port = free_ports(1)[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End ssh and the proxy command that it started, exactly."""
    below = descendants(process.pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
    for each in below:
        send(each, signal.SIGTERM)


def _last_words(said: Any) -> str:
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - 2000))
    lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    text = " / ".join(lines)
    return text if "HOST IDENTIFICATION" in text else " / ".join(lines[-2:])[-400:]


def listens(pid: int, port: int) -> bool:
    """Whether exactly this process listens on this port of 127.0.0.1."""
    wanted = f"0100007F:{port:04X}"
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == wanted and fields[3] == "0A":
            inodes.add(fields[9])
    if not inodes:
        return False
    try:
        links = [os.readlink(f"/proc/{pid}/fd/{each}") for each in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return any((found := re.fullmatch(r"socket:\[(\d+)\]", link)) and found[1] in inodes for link in links)
