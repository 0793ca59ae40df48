"""`make demo`: one guarded run on the embedded stack, started as a user would, watched, and judged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from botocore.exceptions import BotoCoreError, ClientError
from rich.console import Console
from rich.live import Live
from rich.text import Text
from temporalio.client import Client
from temporalio.service import RPCError

from worker.environment import worker_environment
from worker.home import Home
from worker.interrupts import Interrupts
from worker.lending import Services, lent_services
from worker.observation import Run, Sight, wait_closed
from worker.rendering import change, duration, final_cleanup, line, panel, verdict_table
from worker.services import binary, s3_client
from worker.settings import DEFAULT_NAMESPACE, Settings
from worker.stack import StackError
from workflows.timeouts import RUN_QUEUE

_POLL_S: Final = 1.0
_SILENCE_S: Final = 90.0
"""Temporal may be restarted by its supervisor; after this long without an answer the demo gives up."""
_CUSTODY_S: Final = 900.0
"""How long the demo waits for custody's last word after the run has spoken: the default `limits.teardown`."""


async def run_demo(settings: Settings, run_file: Path) -> int:
    """One run from start to verdict. Returns 0 only for outcome succeeded and cleanup clean.

    Raises StackError, ServiceError, SetupError, SettingsError where the services do not come up.
    """
    console = Console(highlight=False, soft_wrap=True)
    if not run_file.is_file():
        raise StackError(f"{run_file} is not a file. Name a run.json: make demo RUN=path/to/run.json")
    interrupts = Interrupts()
    home = Home(settings.home)

    def say(text: str) -> None:
        console.print(Text(f"stack: {text}", style="dim"))

    async with lent_services(settings, home, say, interrupts) as services:
        if services is None:
            return 130
        return await _Demo(console, home, services, interrupts).carry(run_file)


class _Demo:
    def __init__(self, console: Console, home: Home, services: Services, interrupts: Interrupts) -> None:
        self._console = console
        self._home = home
        self._services = services
        self._interrupts = interrupts

    def _tell(self, text: str, style: str = "") -> None:
        # A style given to print would also colour the live view that is drawn again below.
        self._console.print(Text(text, style=style))

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
        self._tell(f"\n$ {shlex.join(command)}", "bold")
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
            self._tell(f"The CLI refused it; nothing was started.\n{out}{err}".rstrip())
            return None
        self._tell(out.rstrip(), "dim")
        found = re.search(r"^\s*RunId\s+(\S+)", out, re.MULTILINE)
        if found is None:
            raise StackError(f"`temporal workflow start` answered without a RunId:\n{out}")
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
                    if live is None:
                        self._tell(word)
                if self._services.failed.done():
                    raise StackError(f"the services failed: {self._services.failed.result()}")
                try:
                    seen = await self._look(run, told)
                    if seen is None:
                        continue
                    sight, answered = seen, time.monotonic()
                except RPCError as error:
                    silent = time.monotonic() - answered
                    if silent > _SILENCE_S:
                        raise StackError(f"Temporal has not answered for {silent:.0f} s: {error.message}") from error
                    sight = Sight(open=True, progress=sight.progress, trouble="Temporal does not answer")
                elapsed = time.monotonic() - began
                events_seen = self._tell_events(sight, events_seen)
                if live is not None:
                    live.update(panel(sight, elapsed, page, word))
                elif (now := change(sight)) != shown:
                    shown = now
                    self._tell(line(sight, elapsed))
                    if sight.trouble:
                        self._tell(f"    {sight.trouble}")
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
                return (
                    "Ctrl-C: the run is told to abort; its hosts are released first. Once its training is over, it "
                    "only finishes. Ctrl-C again says what is left."
                )
            async with asyncio.timeout(10):
                held = await run.claims()
                custody = await run.custody()
        except (RPCError, TimeoutError) as error:
            return f"custody does not answer now ({error}); it goes on releasing. A third Ctrl-C leaves at once."
        if not (held and custody.open):
            return "nothing is held any more; waiting for the run's last words. A third Ctrl-C leaves at once."
        left = "; ".join(held)
        trouble = f" It struggles: {custody.trouble}." if custody.trouble else ""
        return f"still being released: {left}.{trouble} Waiting for it. A third Ctrl-C leaves at once."

    def _tell_events(self, sight: Sight, seen: float) -> float:
        """Print the run's new milestones, so that they stay on the screen."""
        for event in sight.progress.get("events") or []:
            at = event.get("at") if isinstance(event, dict) else None
            if isinstance(at, int | float) and at > seen:
                seen = float(at)
                clock = time.strftime("%H:%M:%S", time.localtime(at))
                self._tell(f"{clock}  {event.get('what', '')}")
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
            self._tell(f"\nThe run was rejected: {verdict.get('message', '')}", "bold red")
        self._console.print()
        self._console.print(verdict_table(verdict, custody))
        if verdict.get("outcome") != "rejected":
            await self._fetch_reports(verdict)
        good = outcome == "succeeded" and cleanup == "clean"
        self._tell(f"{outcome}, {cleanup}", "bold green" if good else "bold yellow")
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
                self._tell(await self._interrupt(run, 2), "bold yellow")
            if self._services.failed.done():
                waiting.cancel()
                raise StackError(f"the services failed: {self._services.failed.result()}")
            await self._pause(told)
        try:
            custody = waiting.result()
        except RPCError as error:
            self._tell(f"custody's last word is not known: {error.message}", "yellow")
            return {}
        if custody.open:
            self._tell(
                f"custody is still releasing after {duration(_CUSTODY_S)}: {custody.trouble or 'see its page'}",
                "yellow",
            )
        elif custody.trouble:
            self._tell(f"custody ended without a last word: {custody.trouble}", "red")
        return custody.final

    def _leave(self, run: Run) -> None:
        custody = run.custody_id or "custody-..."
        self._tell(
            "Leaving. What is not released yet is custody's: start the services again with `make stack`, and it goes "
            f"on. To look:\n  . {self._home.env}\n  temporal workflow describe --workflow-id {custody}\n"
            f"  temporal workflow query --workflow-id {custody} --type claims",
            "bold yellow",
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
                self._tell(f"{name}: not in {storage} ({error})", "yellow")
            else:
                self._tell(f"{name}: {path}")


def _workflow_id(run_file: Path) -> str:
    """`demo-<name>-<UTC time>`, with the name from run.json where it has one. A file that cannot be read as JSON is the
    CLI's to refuse."""
    name: object = None
    with contextlib.suppress(ValueError, OSError):
        content = json.loads(run_file.read_text())
        name = content.get("name") if isinstance(content, dict) else None
    stem = re.sub(r"[^a-z0-9]+", "-", str(name or run_file.stem).lower()).strip("-")[:24] or "run"
    return f"demo-{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
