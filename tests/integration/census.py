"""What a run has left behind, found with nothing of the program's own eyes: /proc, the `temporal` CLI and boto3.

Imports nothing of activities, worker, workflows or trainer. A process counts as a run's when its environment carries
the run's mark, when it descends from such a process, when it was seen to do either at any time before (programs that
set their own title overwrite their environment), or when its working directory, executable or arguments point into the
home under test and it is none of the known services. A file under /tmp or /dev/shm counts when such a process was seen
to use it and it was not there before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SHARED = (Path("/tmp"), Path("/dev/shm"))
SAMPLE_S = 0.7
_ENTRY = re.compile(rb"/(?:tmp|dev/shm)/[^/\0\s:=,;'\"]+")
_LISTEN = "0A"


@dataclass(frozen=True)
class Proc:
    """One look at one process."""

    pid: int
    parent: int
    start: int
    environ: bytes = field(repr=False)
    command: bytes
    cwd: str
    exe: str
    files: tuple[str, ...] = field(repr=False)

    @property
    def who(self) -> tuple[int, int]:
        return self.pid, self.start

    def __str__(self) -> str:
        return f"process {self.pid} {self.command.replace(bytes(1), b' ').decode(errors='replace')[:160]} in {self.cwd}"


@dataclass(frozen=True)
class Findings:
    """What was found; all empty means nothing is left."""

    processes: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    workflows: tuple[str, ...] = ()
    uploads: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        return [*self.processes, *self.ports, *self.entries, *self.workflows, *self.uploads]


class Census:
    """Watches from its creation until `close`, so that what renamed or re-parented itself is still known at the end.

    ``mark`` begins every run key of this test session; ``services`` gives the pids that belong to the stack itself;
    ``client`` is the environment of a client of the stack; ``s3`` a boto3 client; ``scratch`` the TMPDIR of the stack,
    in which everything is a leftover.
    """

    def __init__(
        self,
        *,
        mark: str,
        home: Path,
        scratch: Path,
        services: Callable[[], Collection[int]],
        client: Callable[[], Mapping[str, str]],
        namespaces: Callable[[], Collection[str]],
        s3: Any,
        bucket: str,
    ) -> None:
        self._mark = f"LANYARD_CUSTODY={mark}".encode()
        self._prefix = mark
        self._home = str(home)
        self._scratch = scratch
        self._services = services
        self._client = client
        self._namespaces = namespaces
        self._s3 = s3
        self._bucket = bucket
        self._before = {place: set(os.listdir(place)) for place in SHARED}
        self._seen: dict[tuple[int, int], str] = {}
        self._used: set[str] = set()
        self.commands: set[bytes] = set()
        """The arguments of every process of this machine that was seen."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="census", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._stop.set()
        self._watcher.join(30)

    def take(self) -> Findings:
        """One look, now."""
        ours = self._look()
        return Findings(
            processes=tuple(str(each) for each in ours.values()),
            ports=tuple(sorted(_listeners(ours))),
            entries=tuple(self._entries()),
            workflows=tuple(self._open_workflows()),
            uploads=tuple(self._uploads()),
        )

    def hosts_left(self) -> list[str]:
        """Processes, ports and entries of runs, asking no service: for when none is there."""
        ours = self._look()
        return [*map(str, ours.values()), *_listeners(ours), *self._entries()]

    def settled(self, within_s: float = 0.0) -> Findings:
        """The first empty look, or the last one after ``within_s`` seconds."""
        ends = time.monotonic() + within_s
        while (found := self.take()).lines() and time.monotonic() < ends:
            time.sleep(0.3)
        return found

    def seen_processes(self) -> dict[tuple[int, int], str]:
        """Every process of a run that was ever seen, (pid, start time) to what it was."""
        with self._lock:
            return dict(self._seen)

    def used(self) -> list[str]:
        """Everything directly under /tmp and /dev/shm that a process of a run was seen to use and that was not there
        before."""
        with self._lock:
            return [path for path in sorted(self._used) if self._is_new(path)]

    def end_leftovers(self) -> list[str]:
        """SIGKILL to each marked process that is left, by pid and start time. For a test that has failed already."""
        ended = []
        for each in self._look().values():
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(each.pid)
                try:
                    if _start_of(each.pid) == each.start:
                        os.kill(each.pid, 9)
                        ended.append(str(each))
                finally:
                    os.close(handle)
        return ended

    # -- processes

    def living(self) -> list[Proc]:
        """The processes of runs that live now, by pid."""
        return list(self._look().values())

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._look()

    def _look(self) -> dict[int, Proc]:
        """The processes of runs that live now; remembers them and what they use."""
        with self._lock:
            living = {each.pid: each for each in _living()}
            self.commands.update(each.command for each in living.values())
            services = set(self._services())
            spared = {os.getpid(), *services}
            known = {pid for pid, each in living.items() if each.who in self._seen or self._mark in each.environ}
            found = _with_descendants(known, living)
            ancestors = _ancestors(os.getpid(), living)
            of_services = _with_descendants(services, living)
            found |= {
                pid
                for pid, each in living.items()
                if pid not in of_services and pid not in ancestors and self._points_home(each)
            }
            found -= spared
            for pid in found:
                each = living[pid]
                self._seen[each.who] = str(each)
                self._used |= _entries_of(each)
            return {pid: living[pid] for pid in sorted(found)}

    def _points_home(self, each: Proc) -> bool:
        home = self._home
        inside = (place == home or place.startswith((f"{home}/", f"{home} (")) for place in (each.cwd, each.exe))
        return any(inside) or home.encode() in each.command

    # -- files

    def _entries(self) -> Iterable[str]:
        for path in self.used():
            if os.path.lexists(path):
                yield f"entry {path}"
        for left in sorted(self._scratch.iterdir()):
            yield f"entry {left}"

    def _is_new(self, path: str) -> bool:
        place, name = os.path.split(path)
        return name not in self._before[Path(place)]

    # -- services

    def _open_workflows(self) -> Iterable[str]:
        for namespace in self._namespaces():
            # The reaper is the deployment's, as the worker is: no run leaves it behind.
            left = "ExecutionStatus = 'Running' AND WorkflowType != 'Reaper'"
            asked = ["temporal", "workflow", "list", "--query", left, "-o", "json"]
            done = subprocess.run(
                [*asked, "--namespace", namespace],
                env=dict(self._client()),
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            for each in json.loads(done.stdout or "[]"):
                yield f"open workflow {namespace}/{each['execution']['workflowId']}"

    def _uploads(self) -> Iterable[str]:
        answer = self._s3.list_multipart_uploads(Bucket=self._bucket)
        for each in answer.get("Uploads", ()):
            yield f"unfinished upload {each['Key']}"


def _living() -> Iterable[Proc]:
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        try:
            told = (place / "stat").read_text().rpartition(")")[2].split()
            if told[0] in ("Z", "X"):
                continue
            yield Proc(
                pid=int(place.name),
                parent=int(told[1]),
                start=int(told[19]),
                environ=_content(place / "environ"),
                command=(place / "cmdline").read_bytes(),
                cwd=_target(place / "cwd"),
                exe=_target(place / "exe"),
                files=tuple(_links(place / "fd")),
            )
        except (OSError, IndexError):
            continue  # it ended while it was looked at


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # a kernel thread's, or another user's


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _links(folder: Path) -> Iterable[str]:
    with contextlib.suppress(OSError):
        for each in folder.iterdir():
            yield _target(each)


def _start_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _with_descendants(roots: Collection[int], living: Mapping[int, Proc]) -> set[int]:
    found = {pid for pid in roots if pid in living}
    while more := {pid for pid, each in living.items() if each.parent in found} - found:
        found |= more
    return found


def _ancestors(pid: int, living: Mapping[int, Proc]) -> set[int]:
    found = set()
    while pid in living and pid not in found:
        found.add(pid)
        pid = living[pid].parent
    return found


def _entries_of(each: Proc) -> set[str]:
    text = b"\0".join([each.command, each.environ, each.cwd.encode(), *(path.encode() for path in each.files)])
    return {found.decode(errors="replace") for found in _ENTRY.findall(text)}


def _listeners(ours: Mapping[int, Proc]) -> Iterable[str]:
    sockets: dict[str, int] = {}
    for pid, each in ours.items():
        for path in each.files:
            if path.startswith("socket:["):
                sockets[path[8:-1]] = pid
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in sockets:
                yield f"port {int(fields[1].rpartition(':')[2], 16)} of process {sockets[fields[9]]}"
