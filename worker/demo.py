"""`make demo`: one guarded run on the embedded stack, started as a user would, watched, and judged."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from botocore.exceptions import BotoCoreError, ClientError
from rich.console import Console
from rich.live import Live
from temporalio.client import Client
from temporalio.service import RPCError

from worker.environment import client_variables, worker_environment
from worker.foreground import tell_open_runs
from worker.home import Home
from worker.observation import Run, Sight, wait_closed
from worker.rendering import change, duration, final_cleanup, line, panel, verdict_table
from worker.services import Addresses, binary, s3_client
from worker.settings import DEFAULT_NAMESPACE, Settings
from worker.stack import Stack, StackError, StackRecord, StackRunning, is_held
from workflows.timeouts import RUN_QUEUE

_POLL_S: Final = 1.0
_SILENCE_S: Final = 90.0
"""Temporal may be restarted by its supervisor; after this long without an answer the demo gives up."""
_OTHERS_START_S: Final = 180.0
_CUSTODY_S: Final = 900.0
"""How long the demo waits for custody's last word after the run has spoken: the default `limits.teardown`."""


class DemoError(StackError):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True)
class Services:
    """The stack this demo uses: its own, or one that was there."""

    addresses: Addresses
    variables: Mapping[str, str]
    failed: asyncio.Future[str]


class Interrupts:
    """Ctrl-C, counted. The first aborts the run, the second says what is still being released, the third leaves."""

    def __init__(self) -> None:
        self.count = 0
        self._pressed = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._press)

    def _press(self) -> None:
        self.count += 1
        self._pressed.set()

    async def beyond(self, known: int) -> None:
        """Wait for one more than `known`."""
        while self.count <= known:
            self._pressed.clear()
            await self._pressed.wait()


async def run_demo(settings: Settings, run_file: Path) -> int:
    """One run from start to verdict. Returns 0 only for outcome succeeded and cleanup clean.

    Raises StackError, ServiceError, SetupError, SettingsError where the services do not come up.
    """
    console = Console(highlight=False, soft_wrap=True)
    if not run_file.is_file():
        raise DemoError(f"{run_file} is not a file. Name a run.json: make demo RUN=path/to/run.json")
    interrupts = Interrupts()
    home = Home(settings.home)
    async with _services(settings, home, console, interrupts) as services:
        if services is None:
            return 130
        return await _Demo(console, home, services, interrupts).carry(run_file)


class _Demo:
    def __init__(self, console: Console, home: Home, services: Services, interrupts: Interrupts) -> None:
        self._console = console
        self._home = home
        self._services = services
        self._interrupts = interrupts

    async def carry(self, run_file: Path) -> int:
        workflow_id = _workflow_id(run_file)
        run_id = await self._start(run_file, workflow_id)
        if run_id is None:
            return 1
        client = await Client.connect(self._services.addresses.temporal, namespace=DEFAULT_NAMESPACE)
        run = Run(client, workflow_id, run_id)
        page = (
            f"{self._services.addresses.ui}/namespaces/{DEFAULT_NAMESPACE}/workflows/"
            f"{quote(workflow_id, safe='')}/{run_id}/history"
        )
        self._console.print(f"Temporal UI: {page}\n")
        if not await self._follow(run, page):
            self._leave(run)
            return 130
        verdict = await run.verdict()
        return await self._conclude(run, verdict)

    async def _start(self, run_file: Path, workflow_id: str) -> str | None:
        """Start the run by the CLI, as a user would; the run id, or None when the CLI refused."""
        command = (
            *("temporal", "workflow", "start", "--type", "GuardedTrain", "--task-queue", RUN_QUEUE),
            *("--workflow-id", workflow_id, "--input-file", str(run_file)),
        )
        self._console.print(f"\n$ {shlex.join(command)}", style="bold")
        process = await asyncio.create_subprocess_exec(
            binary("temporal"),
            *command[1:],
            env=worker_environment(self._services.variables),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = (part.decode(errors="replace") for part in await process.communicate())
        if process.returncode != 0:
            self._console.print(f"The CLI refused it; nothing was started.\n{out}{err}".rstrip(), markup=False)
            return None
        self._console.print(out.rstrip(), style="dim", markup=False)
        found = re.search(r"^\s*RunId\s+(\S+)", out, re.MULTILINE)
        if found is None:
            raise DemoError(f"`temporal workflow start` answered without a RunId:\n{out}")
        return found[1]

    async def _follow(self, run: Run, page: str) -> bool:
        """Show the run until it closes; False when told to leave before that."""
        began = answered = time.monotonic()
        shown: tuple[object, ...] | None = None
        told = 0
        events_seen = 0.0
        word = ""
        sight = Sight(open=True)
        live = Live(console=self._console, refresh_per_second=4, transient=True) if self._console.is_terminal else None
        with live or contextlib.nullcontext():
            while True:
                while told < min(self._interrupts.count, 3):
                    told += 1
                    if told == 3:
                        return False
                    word = await self._interrupt(run, told)
                    self._console.print(word, style="bold yellow", markup=False)
                if self._services.failed.done():
                    raise DemoError(f"the services failed: {self._services.failed.result()}")
                try:
                    seen = await self._look(run, told)
                    if seen is None:
                        continue
                    sight, answered = seen, time.monotonic()
                except RPCError as error:
                    silent = time.monotonic() - answered
                    if silent > _SILENCE_S:
                        raise DemoError(f"Temporal has not answered for {silent:.0f} s: {error.message}") from error
                    sight = Sight(open=True, progress=sight.progress, trouble="Temporal does not answer")
                elapsed = time.monotonic() - began
                events_seen = self._tell_events(sight, events_seen)
                if live is not None:
                    live.update(panel(sight, elapsed, page, word))
                elif (now := change(sight)) != shown:
                    shown = now
                    self._console.print(line(sight, elapsed), markup=False)
                    if sight.trouble:
                        self._console.print(f"    {sight.trouble}", markup=False)
                if not sight.open:
                    return True
                await self._pause(told)

    async def _look(self, run: Run, told: int) -> Sight | None:
        """One look at the run, or None when Ctrl-C comes first: it is never kept waiting for an answer."""
        looking = asyncio.create_task(run.look())
        pressed = asyncio.create_task(self._interrupts.beyond(told))
        await asyncio.wait({looking, pressed}, return_when=asyncio.FIRST_COMPLETED)
        pressed.cancel()
        if looking.done():
            return looking.result()
        looking.cancel()
        return None

    async def _interrupt(self, run: Run, count: int) -> str:
        """Act on Ctrl-C and say what is done."""
        try:
            if count == 1:
                await run.abort("Ctrl-C")
                return "Ctrl-C: the run is told to abort; its hosts are released first. Ctrl-C again says what is left."
            async with asyncio.timeout(10):
                held = await run.claims()
                custody = await run.custody()
        except (RPCError, TimeoutError) as error:
            return f"custody does not answer now ({error}); it goes on releasing. A third Ctrl-C leaves at once."
        left = "; ".join(held) if held and custody.open else "nothing that is known"
        trouble = f" It struggles: {custody.trouble}." if custody.trouble else ""
        return f"still being released: {left}.{trouble} Waiting for it. A third Ctrl-C leaves at once."

    def _tell_events(self, sight: Sight, seen: float) -> float:
        """Print the run's new milestones, so that they stay on the screen."""
        for event in sight.progress.get("events") or []:
            at = event.get("at") if isinstance(event, dict) else None
            if isinstance(at, int | float) and at > seen:
                seen = float(at)
                clock = time.strftime("%H:%M:%S", time.localtime(at))
                self._console.print(f"{clock}  {event.get('what', '')}", markup=False)
        return seen

    async def _pause(self, told: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._interrupts.beyond(told)

    async def _conclude(self, run: Run, verdict: Mapping[str, Any]) -> int:
        """Wait for custody's last word, show the verdict, fetch the report; the exit status."""
        custody = await self._last_word(run)
        outcome, cleanup = str(verdict.get("outcome", "unknown")), final_cleanup(verdict, custody)
        if outcome == "rejected":
            self._console.print(f"\nThe run was rejected: {verdict.get('message', '')}", style="bold red", markup=False)
        self._console.print()
        self._console.print(verdict_table(verdict, custody))
        await self._fetch_reports(verdict)
        good = outcome == "succeeded" and cleanup == "clean"
        self._console.print(f"{outcome}, {cleanup}", style="bold green" if good else "bold yellow")
        return 0 if good else 1

    async def _last_word(self, run: Run) -> Mapping[str, Any]:
        waiting = asyncio.create_task(wait_closed(run, _CUSTODY_S))
        told = self._interrupts.count
        began = time.monotonic()
        said = False
        while not waiting.done():
            if not said and time.monotonic() - began > 3:
                said = True
                self._console.print("The run has ended; waiting for custody's last word on what it released ...")
            if self._interrupts.count > told:
                told = self._interrupts.count
                if told >= 3:
                    waiting.cancel()
                    self._leave(run)
                    return {}
                self._console.print(await self._interrupt(run, 2), style="bold yellow", markup=False)
            if self._services.failed.done():
                waiting.cancel()
                raise DemoError(f"the services failed: {self._services.failed.result()}")
            await self._pause(told)
        try:
            custody = waiting.result()
        except RPCError as error:
            self._console.print(f"custody's last word is not known: {error.message}", style="yellow", markup=False)
            return {}
        if custody.open:
            self._console.print(
                f"custody is still releasing after {duration(_CUSTODY_S)}: {custody.trouble or 'see its page'}",
                style="yellow",
                markup=False,
            )
        elif custody.trouble:
            self._console.print(f"custody ended without a last word: {custody.trouble}", style="red", markup=False)
        return custody.final

    def _leave(self, run: Run) -> None:
        custody = run.custody_id or "custody-..."
        self._console.print(
            "Leaving. What is not released yet is custody's: start the services again with `make stack`, and it goes "
            f"on. To look:\n  . {self._home.env}\n  temporal workflow describe --workflow-id {custody}\n"
            f"  temporal workflow query --workflow-id {custody} --type claims",
            style="bold yellow",
            markup=False,
        )

    async def _fetch_reports(self, verdict: Mapping[str, Any]) -> None:
        storage, run_key = verdict.get("storage"), verdict.get("run_key")
        if not isinstance(storage, str) or not isinstance(run_key, str) or not storage.startswith("s3://"):
            return
        bucket, _, prefix = storage.removeprefix("s3://").partition("/")
        folder = self._home.reports / run_key
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        credentials = self._home.credentials()

        def download(name: str) -> Path:
            client = s3_client(self._services.addresses.s3, credentials)
            body = client.get_object(Bucket=bucket, Key=f"{prefix.strip('/')}/{name}")["Body"].read()
            path = folder / name
            path.touch(mode=0o600)
            path.write_bytes(body)
            return path

        for name in ("report.json", "report.html"):
            try:
                path = await asyncio.to_thread(download, name)
            except (ClientError, BotoCoreError) as error:
                self._console.print(f"{name}: not in {storage} ({error})", style="yellow", markup=False)
            else:
                self._console.print(f"{name}: {path}", markup=False)


@contextlib.asynccontextmanager
async def _services(
    settings: Settings, home: Home, console: Console, interrupts: Interrupts
) -> AsyncIterator[Services | None]:
    """The stack to use. One that was there is left alone at the end; None when interrupted before it was up."""

    def say(text: str) -> None:
        console.print(f"stack: {text}", style="dim", markup=False)

    stack = Stack(home, settings, say)
    starting = asyncio.create_task(stack.start())
    pressed = asyncio.create_task(interrupts.beyond(0))
    await asyncio.wait({starting, pressed}, return_when=asyncio.FIRST_COMPLETED)
    pressed.cancel()
    if not starting.done():
        say("stopping before everything was up")
        starting.cancel()
        await asyncio.wait({starting})
        yield None
        return
    if isinstance(starting.exception(), StackRunning):
        with _guest(home):
            addresses = await _others(home)
            say(f"using the stack that runs in {home.root}")
            variables = client_variables(home, addresses, home.credentials(), settings)
            yield Services(addresses, variables, asyncio.get_running_loop().create_future())
        return
    starting.result()
    try:
        variables = client_variables(home, stack.addresses, home.credentials(), settings)
        yield Services(stack.addresses, variables, stack.failed)
        await _wait_for_guests(home, say, interrupts)
    finally:
        await tell_open_runs(stack.addresses.temporal)
        say("stopping: worker, then S3, then Temporal")
        if interrupts.count >= 3:
            stack.hurry()
        await stack.stop()


async def _others(home: Home) -> Addresses:
    """Where the stack that holds this home is, once it is up."""
    deadline = time.monotonic() + _OTHERS_START_S
    while time.monotonic() < deadline:
        record = StackRecord.read(home)
        if record is not None and record.state == "up":
            return Addresses(record.ports)
        if not is_held(home):
            raise DemoError(f"the stack that held {home.root} has ended before it was up; start the demo again")
        await asyncio.sleep(0.5)
    raise DemoError(f"the stack that holds {home.root} did not come up within {_OTHERS_START_S:.0f} s")


@contextlib.contextmanager
def _guest(home: Home) -> Iterator[None]:
    """Holds a shared lock while this demo uses somebody else's stack, so that its owner waits before it stops it."""
    descriptor = os.open(home.guests, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


async def _wait_for_guests(home: Home, say: Callable[[str], None], interrupts: Interrupts) -> None:
    descriptor = os.open(home.guests, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    said = False
    count = interrupts.count
    try:
        while interrupts.count == count:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not said:
                    said = True
                    say("another demo uses these services; they stop when it is done (Ctrl-C stops them now)")
            await asyncio.sleep(0.5)
    finally:
        os.close(descriptor)


def _workflow_id(run_file: Path) -> str:
    """`demo-<name>-<UTC time>`, with the name from run.json where it has one. A file that cannot be read as JSON is the
    CLI's to refuse."""
    name: object = None
    with contextlib.suppress(ValueError, OSError):
        content = json.loads(run_file.read_text())
        name = content.get("name") if isinstance(content, dict) else None
    stem = re.sub(r"[^a-z0-9]+", "-", str(name or run_file.stem).lower()).strip("-")[:24] or "run"
    return f"demo-{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
