"""The bench's place: an embedded stack in a temporary LANYARD_HOME, the peers' processes, and what must not remain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from temporalio.client import Client
from temporalio.service import RPCError

from bench.guarded import GuardedRun
from trainer import environment
from trainer.processes import Process, every_process, send
from worker.environment import client_variables, worker_environment
from worker.home import Home
from worker.services import bare_environment, binary, s3_client
from worker.settings import CHECKOUT, Settings
from worker.stack import Stack, StackRecord
from workflows.spec import RunSpec

MARK: Final = "LANYARD_BENCH"
"""Every process of a peer carries this variable, by inheritance, so that none can be left behind unseen."""
PEER_LIMIT_S: Final = 900.0
PEER_GRACE_S: Final = 120.0
"""From SIGTERM to the end of a peer: it stops its nodes first."""
RELEASE_LIMIT_S: Final = 300.0
STORAGE: Final = "s3://lanyard/bench"


class Trouble(Exception):
    """A sample could not be taken; the message says why."""


class Lab:
    """What every experiment uses."""

    def __init__(self, home: Home, stack: Stack, client: Client, say: Callable[[str], None]) -> None:
        self._home, self._stack, self.client, self.say = home, stack, client, say
        settings = _settings(home.root)
        self.environment = worker_environment(client_variables(home, stack.addresses, home.credentials(), settings))
        self.s3 = s3_client(stack.addresses.s3, home.credentials())
        self.application = environment.path()
        self.drilled: list[Any] = []
        """Drilled runs so far, for the experiment that compares a longer one with them."""
        self._open: list[GuardedRun] = []

    @property
    def worker_pid(self) -> int:
        """The operator's worker process."""
        record = StackRecord.read(self._home)
        if record is None:
            raise Trouble("the stack has no record of its worker")
        return record.services["worker"].process.pid

    async def start(self, name: str, recipe: Mapping[str, Any], drill: Mapping[str, Any] | None = None) -> GuardedRun:
        """Start a guarded run as a user does: a file and the `temporal` CLI. Raises Trouble."""
        spec: dict[str, Any] = {
            "name": name,
            "hosts": {"provider": "local", "count": 2},
            "storage": {"uri": f"{STORAGE}/guarded"},
            "workload": {"kind": "regression", "recipe": dict(recipe)},
        }
        if drill:
            spec["drill"] = dict(drill)
        file = self._home.root / "run.json"
        file.write_text(json.dumps(spec))
        try:
            run = await GuardedRun.start(
                self.client, binary("temporal"), self.environment, file, f"bench-{name}-{secrets.token_hex(3)}"
            )
        except RuntimeError as error:
            raise Trouble(str(error)) from error
        self._open.append(run)
        return run

    async def peer(self, module: str, recipe: Mapping[str, Any], source: Path, *more: str) -> dict[str, Any]:
        """Run a peer in the application's Python and return the JSON of its last line. Raises Trouble."""
        with scratch() as place:
            return await self.program(
                *("-m", module, "--scratch", str(place), "--source", str(source)),
                *("--storage", f"{STORAGE}/peers", "--recipe", json.dumps(complete(recipe))),
                *("--pins", json.dumps(pins()), *more),
                # Workers that are killed leave their temporary files.
                variables={"TMPDIR": str(place)},
            )

    async def program(
        self, *arguments: str, name: str = "python", variables: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run a program of the application environment to its end; the same."""
        mark = secrets.token_hex(8)
        process = await asyncio.create_subprocess_exec(
            str(self.application / "bin" / name),
            *arguments,
            cwd=CHECKOUT,
            env={
                **self.environment,
                MARK: mark,
                "PYTHONPATH": str(CHECKOUT),
                "PYTHONDONTWRITEBYTECODE": "1",
                **(variables or {}),
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(PEER_LIMIT_S):
                out, err = await process.communicate()
        except TimeoutError:
            raise Trouble(f"{arguments[1]} took longer than {PEER_LIMIT_S:.0f} s") from None
        finally:
            if process.returncode is None:
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PEER_GRACE_S):
                        await process.communicate()
            left = await asyncio.to_thread(sweep, mark)
            if left:
                self.say(f"{left} processes that {arguments[1]} left were ended")
        try:
            told = json.loads(out.decode().strip().splitlines()[-1])
        except (ValueError, IndexError):
            told = None
        if process.returncode != 0 or not isinstance(told, dict):
            raise Trouble(
                f"{arguments[1]} ended with {process.returncode}: {err.decode(errors='replace').strip()[-500:]}"
            )
        return {**told, "left": left}

    async def release_everything(self) -> bool:
        """Abort what is open and wait until custody has released it. False where it has not."""
        for run in list(self._open):
            try:
                if await run.put_away(RELEASE_LIMIT_S):
                    self._open.remove(run)
            except RPCError as error:
                self.say(f"{run.workflow_id}: {error.message}")
        return not self._open

    def healthy(self) -> None:
        """Raises Trouble when the services have failed for good."""
        if self._stack.failed.done():
            raise Trouble(f"the services failed: {self._stack.failed.result()}")


@contextlib.asynccontextmanager
async def lab(say: Callable[[str], None]) -> AsyncIterator[Lab]:
    """A lab, and nothing of it afterwards. Raises StackError, and what Stack.start raises."""
    root = Path(tempfile.mkdtemp(prefix="lanyard-bench-"))
    home = Home(root)
    stack = Stack(home, _settings(root), say)
    clean = True
    try:
        await stack.start()
        place = Lab(home, stack, await Client.connect(stack.addresses.temporal), say)
        try:
            yield place
        finally:
            clean = await asyncio.shield(place.release_everything())
    finally:
        await asyncio.shield(stack.stop())
        if clean:
            shutil.rmtree(root)
        else:
            say(f"not everything is released; LANYARD_HOME={root} make stack goes on with it, then remove it")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A private directory with a short path, removed at the end."""
    place = Path(tempfile.mkdtemp(prefix="lb-", dir="/tmp"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def source(change: Callable[[Path], None] | None = None) -> Iterator[Path]:
    """A directory with a copy of the training application, as somebody would submit it."""
    with scratch() as place:
        shutil.copytree(
            CHECKOUT / "trainer", place / "trainer", ignore=shutil.ignore_patterns("__pycache__", "requirements*")
        )
        if change:
            change(place / "trainer")
        yield place


def complete(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with its defaults, as a run.json that has this one means it."""
    found: dict[str, Any] = _spec(recipe).workload.model_dump(mode="json")["recipe"]
    return found


def pins() -> dict[str, str]:
    """The versions that a run enforces."""
    return _spec({}).pins()


def sweep(mark: str) -> int:
    """End every process that carries the mark of a peer that has ended; returns how many there were."""
    found: set[tuple[int, int]] = set()
    deadline = time.monotonic() + 20
    while (left := [each for each in every_process() if _carries(each, mark)]) and time.monotonic() < deadline:
        for process in left:
            found.add((process.pid, process.start_time))
            send(process, signal.SIGKILL)
        time.sleep(0.2)
    return len(found)


def _carries(process: Process, mark: str) -> bool:
    if not process.running or process.pid == os.getpid():
        return False
    try:
        variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{MARK}={mark}".encode() in variables


def _spec(recipe: Mapping[str, Any]) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "bench",
            "hosts": {"provider": "local", "count": 2},
            "storage": {"uri": STORAGE},
            "workload": {"kind": "regression", "recipe": dict(recipe)},
        }
    )


def _settings(root: Path) -> Settings:
    # Nothing of a cloud account or another deployment that this shell may be set up for.
    kept = {name: os.environ[name] for name in ("LANYARD_ENVIRONMENTS",) if name in os.environ}
    return Settings.load({**bare_environment(), **kept, "LANYARD_HOME": str(root)})
