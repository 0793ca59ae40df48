"""One lane: a Temporal server, an S3 server and workers of its own, each of which can be killed and started again.

The servers are started as `worker/services.py` starts them. One scenario runs in a lane at a time, so what is found in
it is that scenario's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from temporalio.client import Client

from tests.chaos.plan import Plan
from worker import ports, processes
from worker.environment import client_variables, worker_environment
from worker.home import Home, write_private
from worker.services import (
    S3_PORTS,
    TEMPORAL_PORTS,
    Addresses,
    Service,
    bare_environment,
    format_volume,
    s3_client,
    s3_service,
    temporal_service,
)
from worker.settings import CHECKOUT, Settings
from worker.setup import setup
from workflows.decoding import data_converter
from workflows.names import reaper_id

LAUNCHER: Final = CHECKOUT / "worker" / "launcher.py"
READY_S: Final = 90.0
SMALL_DISK: Final = {"light": "48m", "real": "512m"}
"""The size of the disk that is to be filled."""
_IN_A_SMALL_DISK: Final = """
set -eu
mount -t tmpfs -o "size=$1,mode=0700" none "$2"
cp -a "$3/." "$2/"
cd "$2"
shift 3
exec "$@"
"""


class LaneError(Exception):
    """A part of the lane did not come up; the message holds the end of its log."""


@dataclass
class Running:
    """One process of the lane."""

    process: asyncio.subprocess.Process
    log: Path
    since: int
    """Where its own lines begin in the log."""

    def said(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self.since)
            return file.read().decode(errors="replace")


class Lane:
    """Where scenarios run. `start` it; `stop` it, and nothing of it is left."""

    def __init__(self, root: Path, which: str, say: Callable[[str], None]) -> None:
        self.root, self.which, self.say = root, which, say
        self.home = Home(root / "home")
        self.scratch = root / "scratch"
        self.folder = root / "plan"
        self.plan = Plan(self.folder)
        self.client: Client | None = None
        self.cut = self.folder / "cut"
        self._running: dict[str, Running] = {}
        self._variables: dict[str, str] = {}
        self._addresses: Addresses | None = None
        self._spawned = 0

    # -- up and down

    async def start(self) -> None:
        """Bring up servers and a worker. Raises LaneError."""
        for folder in (self.root, self.scratch, self.folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.home.prepare()
        secret = self.root / "secret"
        write_private(secret, os.urandom(32).hex())
        self._addresses = Addresses(ports.choose(self.root, TEMPORAL_PORTS + S3_PORTS, {}))
        settings = Settings.load(
            {"LANYARD_HOME": str(self.home.root), "LANYARD_SECRET_FILE": str(secret), "LANYARD_DEPLOYMENT": "chaos"}
        )
        self._variables = client_variables(self.home, self._addresses, self.home.credentials(), settings)
        await asyncio.to_thread(format_volume, self.home)
        await asyncio.gather(self.start_temporal(), self.start_s3())
        self.client = await Client.connect(self._addresses.temporal, data_converter=data_converter)
        # Without the reaper: it would tidy up what is to be found.
        async for _ in setup(self.client, settings.require_deployment()):
            pass
        await self.client.get_schedule_handle(reaper_id(settings.require_deployment())).delete()
        await self.start_worker()

    async def stop(self) -> None:
        """End everything, workers first."""
        order = [*(name for name in self._running if name.startswith("worker")), "spare", "s3", "temporal"]
        for name in order:
            if name in self._running:
                await self.end(name)

    def pids(self) -> list[int]:
        """The lane's own processes."""
        return [each.process.pid for each in self._running.values() if each.process.returncode is None]

    def alive(self, name: str) -> bool:
        return name in self._running and self._running[name].process.returncode is None

    def pid(self, name: str = "worker") -> int:
        return self._running[name].process.pid

    def client_environment(self) -> dict[str, str]:
        """Of a shell that is a client of the lane."""
        return worker_environment(self._variables)

    @functools.cached_property
    def s3(self) -> Any:
        """A boto3 client of the lane's S3 server."""
        assert self._addresses
        return s3_client(self._addresses.s3, self.home.credentials())

    # -- the servers

    async def start_temporal(self) -> None:
        """Temporal's server, on the file it had."""
        assert self._addresses
        await self._serve(temporal_service(self.home, self._addresses))

    async def start_s3(self, *, small: bool = False) -> None:
        """The S3 server, on the files it had; `small` on a copy of them on a disk that can be filled."""
        assert self._addresses
        service = s3_service(self.home, self._addresses, self.home.credentials())
        if small:
            copy = self.root / "s3-copy"
            shutil.copytree(self.home.s3, copy, dirs_exist_ok=True)
            rights = () if os.geteuid() == 0 else ("--map-root-user",)
            command = (
                *("unshare", "--mount", *rights, "sh", "-c", _IN_A_SMALL_DISK, "sh", SMALL_DISK[self.which]),
                *(str(self.home.s3), str(copy), *service.command),
            )
            service = dataclasses.replace(service, command=(str(shutil.which("unshare")), *command[1:]))
        await self._serve(service)

    def fill_disk(self) -> None:
        """Fill the small disk under the S3 server to the last byte."""
        with contextlib.suppress(OSError), self._ballast().open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**20))
        with contextlib.suppress(OSError), self._ballast().open("ab", buffering=0) as file:
            while True:
                file.write(bytes(512))

    def free_disk(self) -> None:
        """Make room again."""
        self._ballast().unlink(missing_ok=True)

    def _ballast(self) -> Path:
        # The disk is mounted in the server's own mount namespace.
        return Path(f"/proc/{self.pid('s3')}/root{self.home.s3}/ballast")

    async def _serve(self, service: Service) -> None:
        running = await self._spawn(service.name, service.command, service.environment, service.directory)
        deadline = time.monotonic() + READY_S
        problem = "it has not answered"
        while time.monotonic() < deadline and running.process.returncode is None:
            try:
                async with asyncio.timeout(10):
                    for name, port in service.ports.items():
                        if not processes.listens(running.process.pid, port):
                            raise LaneError(f"it does not listen on port {port} ({name})")
                    await service.ready(running.process.pid)
                return
            except Exception as error:
                problem = str(error) or type(error).__name__
            await asyncio.sleep(0.1)
        raise LaneError(f"{service.name} is not ready: {problem}\n{running.said()[-2000:]}")

    # -- workers

    async def start_worker(self, name: str = "worker", variant: str = "", home: Path | None = None) -> None:
        """A worker that polls. The spare becomes it where there is one and nothing special is asked for."""
        spare = self._running.pop("spare", None) if not variant and home is None else None
        if spare is not None and spare.process.returncode is None:
            assert spare.process.stdin
            spare.process.stdin.write(b"go\n")
            spare.process.stdin.close()
            self._running[name] = spare
        else:
            await self._worker_process(name, variant, home, spare=False)
        await self._until_polling(self._running[name])

    async def keep_a_spare(self) -> None:
        """Have a worker process ready that has everything imported, so that a restart takes no seconds."""
        if not self.alive("spare"):
            await self._worker_process("spare", "", None, spare=True)

    async def _worker_process(self, name: str, variant: str, home: Path | None, *, spare: bool) -> None:
        environment = {**worker_environment(self._variables), "TMPDIR": str(self.scratch)}
        if home is not None:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            environment["LANYARD_HOME"] = str(home)
        command = [sys.executable, "-m", "tests.chaos.worker", str(self.folder), self.which]
        command += [*([variant] if variant else []), *(["--spare"] if spare else [])]
        await self._spawn(name, command, environment, CHECKOUT, stdin=asyncio.subprocess.PIPE if spare else None)

    async def _until_polling(self, running: Running) -> None:
        deadline = time.monotonic() + READY_S
        while "worker ready" not in running.said():
            if running.process.returncode is not None or time.monotonic() > deadline:
                raise LaneError(f"the worker is not ready:\n{running.said()[-2000:]}")
            await asyncio.sleep(0.05)

    # -- violence

    async def kill(self, *names: str) -> None:
        """SIGKILL, all at once."""
        for name in names:
            if self.alive(name):
                self._running[name].process.kill()
        for name in names:
            if name in self._running:
                await self._running.pop(name).process.wait()

    def send(self, number: signal.Signals, name: str = "worker") -> None:
        """A signal to one process of the lane."""
        self._running[name].process.send_signal(number)

    async def end(self, name: str) -> None:
        """SIGTERM, and SIGKILL where that takes long."""
        running = self._running[name]
        if running.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                running.process.terminate()
                running.process.send_signal(signal.SIGCONT)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(20):
                    await running.process.wait()
        await self.kill(name)

    def tail(self, lines: int = 12) -> str:
        """The end of the newest worker's log, for a row that went wrong; results go elsewhere and name no directory of
        this machine."""
        logs = sorted(self.home.logs.glob("worker-*.log"), key=lambda path: path.stat().st_mtime)
        told = "\n".join(logs[-1].read_text(errors="replace").splitlines()[-lines:]) if logs else ""
        for place, name in ((self.root, "LANE"), (CHECKOUT, "."), (sys.base_prefix, "PYTHON"), (Path.home(), "~")):
            told = told.replace(str(place), name)
        return told

    async def _spawn(
        self,
        name: str,
        command: Any,
        environment: Mapping[str, str],
        directory: Path,
        stdin: int | None = None,
    ) -> Running:
        # A log of its own for each worker process: whether it is ready is read there.
        self._spawned += 1
        path = self.home.log(name if name in ("temporal", "s3") else f"worker-{self._spawned}")
        log = self.home.open_log(path.stem)
        since = os.lseek(log, 0, os.SEEK_END)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid())),
                *command,
                env=dict(environment),
                cwd=directory,
                stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._running[name] = Running(process, path, since)
        return self._running[name]


def small_disks_possible() -> bool:
    """Whether this user can make a disk that can be filled."""
    import subprocess

    rights = [] if os.geteuid() == 0 else ["--map-root-user"]
    tried = ["unshare", "--mount", *rights, "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        return subprocess.run(tried, capture_output=True, timeout=10, env=bare_environment()).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
