"""The embedded stack: Temporal's dev server, an S3 server and a worker, supervised on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from temporalio.client import Client

from worker import ports, processes
from worker.environment import client_variables, profile_file, shell_file, worker_environment
from worker.home import Home, write_private
from worker.processes import ProcessIdentity
from worker.services import (
    S3_PORTS,
    TEMPORAL_PORTS,
    Addresses,
    Service,
    ServiceError,
    format_volume,
    s3_service,
    temporal_service,
    worker_service,
)
from worker.settings import Settings
from worker.setup import setup

RESTART_DELAYS_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""A service that dies is started again after these waits; one more death within the window ends the stack."""
RESTART_WINDOW_S: Final = 600.0
_CHECK_EVERY_S: Final = 0.1
_ONE_CHECK_S: Final = 10.0
_TAIL_LINES: Final = 15
_LAUNCHER: Final = Path(__file__).with_name("launcher.py")

MakeWorker = Callable[[Mapping[str, str], Addresses], Service]


class StackError(Exception):
    """The stack cannot start or go on; the message says why and what to do."""


class ServiceRecord(BaseModel):
    """One service as stack.json remembers it."""

    model_config = ConfigDict(frozen=True)

    process: ProcessIdentity
    log: str
    restarts: int = 0


class StackRecord(BaseModel):
    """LANYARD_HOME/stack.json: what runs now, or ran last. The next start begins by reading it."""

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    state: Literal["starting", "up", "stopping", "stopped"]
    supervisor: ProcessIdentity
    ports: dict[str, int]
    services: dict[str, ServiceRecord] = {}

    @classmethod
    def read(cls, home: Home) -> Self | None:
        """The record, or None where there is none that can be read."""
        try:
            return cls.model_validate_json(home.record.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None


class StackRunning(StackError):
    """Another supervisor holds this LANYARD_HOME."""

    def __init__(self, home: Home, record: StackRecord | None) -> None:
        self.record = record
        who = f" (process {record.supervisor.pid}, {record.state})" if record else ""
        where = f" Temporal UI: {Addresses(record.ports).ui}." if record and record.state == "up" else ""
        super().__init__(
            f"A stack is already running in {home.root}{who}.{where} Use it (. {home.env}), stop it with Ctrl-C where "
            "it runs, or start another with a LANYARD_HOME of its own."
        )


class Stack:
    """One supervisor of the embedded services. `start`, then wait for `failed` or a signal, then `stop`."""

    def __init__(
        self, home: Home, settings: Settings, say: Callable[[str], None], make_worker: MakeWorker = worker_service
    ) -> None:
        self._home = home
        self._settings = settings
        self._say = say
        self._make_worker = make_worker
        self._lock: int | None = None
        self._record: StackRecord | None = None
        self._running: dict[str, tuple[Service, asyncio.subprocess.Process]] = {}
        self._log_starts: dict[str, int] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._hurry = asyncio.Event()
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set to the reason when a service has died too often."""

    @property
    def addresses(self) -> Addresses:
        """Where the services are. Raises StackError before `start` has chosen."""
        if self._record is None:
            raise StackError("the stack has not been started")
        return Addresses(self._record.ports)

    async def start(self) -> None:
        """Bring everything up, or leave nothing behind. Raises StackRunning, StackError, SettingsError, SetupError."""
        self._home.prepare()
        self._lock = _lock(self._home.lock)
        before = StackRecord.read(self._home)
        if self._lock is None:
            raise StackRunning(self._home, before)
        try:
            await self._start(before)
        except BaseException as error:
            await asyncio.shield(self.stop())
            if isinstance(error, (ServiceError, OSError)):
                raise StackError(str(error)) from error
            raise

    async def stop(self) -> None:
        """The worker first, then S3, then Temporal; each gets SIGTERM and time. Safe to call twice."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        self._home.env.unlink(missing_ok=True)
        self._note(state="stopping")
        for name in ("worker", "s3", "temporal"):
            await self._end(name)
        self._note(state="stopped")
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def hurry(self) -> None:
        """Do not wait for anything graceful any more."""
        self._hurry.set()

    def stopping_now(self) -> str:
        """What a `stop` in progress is waiting for, for people."""
        return ", ".join(self._running) or "nothing"

    async def _start(self, before: StackRecord | None) -> None:
        self._home.env.unlink(missing_ok=True)  # left by a stack that died: its addresses may be wrong
        if before is not None:
            await self._clear(before)
        me = processes.identify(os.getpid())
        if me is None:
            raise StackError("/proc does not show this process; the embedded stack needs Linux with /proc")
        self._record = StackRecord(
            state="starting",
            supervisor=me,
            ports=ports.choose(self._home.root, TEMPORAL_PORTS + S3_PORTS, before.ports if before else {}),
        )
        if before is not None:
            self._say_moved(before)
        credentials = self._home.credentials()
        variables = client_variables(self._home, self.addresses, credentials, self._settings)
        await asyncio.to_thread(format_volume, self._home)
        write_private(self._home.profiles, profile_file(self.addresses))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._bring_up(temporal_service(self._home, self.addresses)))
                group.create_task(self._bring_up(s3_service(self._home, self.addresses, credentials)))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        async for line in setup(await Client.connect(self.addresses.temporal), variables["LANYARD_DEPLOYMENT"]):
            self._say(line)
        await self._bring_up(self._make_worker(worker_environment(variables), self.addresses))
        write_private(self._home.env, shell_file(variables))
        self._note(state="up")

    async def _clear(self, before: StackRecord) -> None:
        """End what a stack that died has left: exactly those processes, by pid, start time and boot."""
        for name, service in before.services.items():
            try:
                ended = await asyncio.to_thread(processes.end, service.process, 10.0)
            except (OSError, TimeoutError) as error:
                raise StackError(f"{name} of an earlier stack (process {service.process.pid}): {error}") from error
            if ended:
                self._say(f"ended {name} of an earlier stack (process {service.process.pid}); its data is kept")

    def _say_moved(self, before: StackRecord) -> None:
        for name, what in (("temporal", "Temporal"), ("s3", "S3")):
            was, now = before.ports.get(name), self.addresses.ports[name]
            if was is not None and was != now:
                self._say(
                    f"{what} moves from port {was} to {now}, because something else took the old one: hosts of earlier "
                    "runs cannot reach it any more and stop when their lease runs out"
                )

    async def _bring_up(self, service: Service) -> None:
        began = time.monotonic()
        process = await self._spawn(service)
        await self._until_ready(service, process)
        self._say(f"{service.name} is up ({time.monotonic() - began:.1f} s)")
        self._keepers.append(asyncio.create_task(self._keep(service, process), name=f"keep {service.name}"))

    async def _spawn(self, service: Service) -> asyncio.subprocess.Process:
        log = self._home.open_log(service.name)
        self._log_starts[service.name] = os.lseek(log, 0, os.SEEK_END)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid())),
                *service.command,
                env=dict(service.environment),
                cwd=service.directory,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C goes to the supervisor alone, which stops in order
            )
        finally:
            os.close(log)
        self._running[service.name] = service, process
        identity = processes.identify(process.pid)
        if identity is not None and self._record is not None:
            known = self._record.services.get(service.name)
            record = ServiceRecord(
                process=identity,
                log=str(self._home.log(service.name)),
                restarts=known.restarts + 1 if known else 0,
            )
            self._note(services={**self._record.services, service.name: record})
        return process

    async def _until_ready(self, service: Service, process: asyncio.subprocess.Process) -> None:
        deadline = time.monotonic() + service.ready_within_s
        problem = "it has not answered"
        while time.monotonic() < deadline:
            if process.returncode is not None:
                raise ServiceError(
                    f"{service.name} ended with {process.returncode} before it was ready{self._tail(service.name)}"
                )
            try:
                async with asyncio.timeout(_ONE_CHECK_S):
                    for name, port in service.ports.items():
                        if not processes.listens(process.pid, port):
                            raise ServiceError(f"it does not listen on port {port} ({name})")
                    await service.ready(process.pid)
                return
            except Exception as error:
                problem = str(error) or type(error).__name__
            await asyncio.sleep(_CHECK_EVERY_S)
        raise ServiceError(
            f"{service.name} was not ready within {service.ready_within_s:.0f} s: {problem}{self._tail(service.name)}"
        )

    async def _keep(self, service: Service, process: asyncio.subprocess.Process) -> None:
        """Start the service again each time it dies, a bounded number of times; its state is on disk."""
        deaths: deque[float] = deque()
        while True:
            await process.wait()
            problem = f"ended with {process.returncode}"
            while True:
                now = time.monotonic()
                deaths.append(now)
                while deaths[0] < now - RESTART_WINDOW_S:
                    deaths.popleft()
                if len(deaths) > len(RESTART_DELAYS_S):
                    if not self.failed.done():
                        self.failed.set_result(
                            f"{service.name} {problem}, {len(deaths)} times within "
                            f"{RESTART_WINDOW_S / 60:.0f} minutes{self._tail(service.name)}"
                        )
                    return
                delay = RESTART_DELAYS_S[len(deaths) - 1]
                self._say(f"{service.name} {problem}; starting it again in {delay:g} s (its state is on disk)")
                await asyncio.sleep(delay)
                process = await self._spawn(service)
                try:
                    await self._until_ready(service, process)
                except ServiceError as error:
                    problem = str(error).partition("\n")[0].removeprefix(f"{service.name} ")
                    await self._end(service.name)
                    continue
                self._say(f"{service.name} is up again")
                break

    async def _end(self, name: str) -> None:
        if name not in self._running:
            return
        service, process = self._running[name]
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            hurry = asyncio.create_task(self._hurry.wait())
            done = asyncio.create_task(process.wait())
            await asyncio.wait({hurry, done}, timeout=service.grace_s, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            if process.returncode is None:
                self._say(f"{name} does not stop by itself; ending it")
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await done
        self._running.pop(name, None)

    def _note(self, **changes: object) -> None:
        """Change the record, in memory and on disk."""
        if self._record is None:
            return
        self._record = self._record.model_copy(update=changes)
        write_private(self._home.record, json.dumps(self._record.model_dump(), indent=1) + "\n")

    def _tail(self, name: str) -> str:
        path = self._home.log(name)
        try:
            with path.open("rb") as file:
                file.seek(self._log_starts.get(name, 0))  # not what an earlier start has said
                lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError:
            return ""
        return "\n".join((f". The end of {path}:", *(f"    {line[:300]}" for line in lines)))


def is_held(home: Home) -> bool:
    """Whether a supervisor holds this home now."""
    descriptor = _lock(home.lock)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def _lock(path: Path) -> int | None:
    """The lock's descriptor, or None where another process holds it. The kernel lets go when the holder dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
