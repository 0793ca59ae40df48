"""The strike: exactly one process dies, however often it is sent, and only the process that was chosen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.drill import Drill, _answer, _command
from activities.hosts.reach import Providers
from activities.jobs import Endpoint
from activities.submission import Submission
from tests.activities.orders import drill_order
from workflows.evidence import Claim, Commit, HostsOrder, Strike, Victim

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])


@pytest.fixture
def victim_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "120"])
    yield process
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait()


def victim(process: subprocess.Popen[bytes], **changed: Any) -> Victim:
    told: dict[str, Any] = {
        "rank": 1,
        "node_id": "n2",
        "address": "127.0.0.3",
        "attempt": 1,
        "pid": process.pid,
        "start_time": start_time(process.pid),
        "boot_id": BOOT,
        "commit": Commit(checkpoint="checkpoint_8", step=8, index=2),
    }
    return Victim(**(told | changed))


def strike(target: Victim) -> str:
    """Run what the helper job runs; its outcome."""
    return str(json.loads(run(_command(target)).partition("LANYARD_STRIKE ")[2])["outcome"])


def run(command: str) -> str:
    return subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=20, check=True).stdout


def test_the_chosen_process_dies_by_sigkill_and_a_second_strike_finds_it_gone(
    victim_process: subprocess.Popen[bytes],
) -> None:
    target = victim(victim_process)
    assert strike(target) == "killed"
    assert victim_process.wait(10) == -signal.SIGKILL
    assert strike(target) == "already_gone"


@pytest.mark.parametrize(
    "changed", [{"start_time": 1}, {"boot_id": "11111111-2222-3333-4444-555555555555"}], ids=["start time", "boot"]
)
def test_another_process_with_the_same_pid_is_spared(
    victim_process: subprocess.Popen[bytes], changed: dict[str, Any]
) -> None:
    assert strike(victim(victim_process, **changed)) == "already_gone"
    time.sleep(0.2)
    assert victim_process.poll() is None


def test_the_echo_of_the_entrypoint_in_the_log_is_no_answer(victim_process: subprocess.Popen[bytes]) -> None:
    """Seen on a real run: the log held the program, which contains the words, and not yet what it printed."""
    echo = f"Running entrypoint for job x: {_command(victim(victim_process))}\n"
    with pytest.raises(ApplicationError, match=r"holds no answer \(yet\)") as refused:
        _answer(echo, "x-strike", "Job finished successfully.")
    assert not refused.value.non_retryable
    answered = _answer(echo + 'LANYARD_STRIKE {"outcome": "killed", "at": 12.5}\n', "x-strike", "")
    assert (answered.outcome, answered.at) == ("killed", 12.5)


class JobsOfOneNode:
    """A fake Jobs API, because a real one cannot be made to lose an answer when asked: it runs each entrypoint once,
    for real, and drops the answers to the first `lost` submissions. Its answers have the shape of Ray 2.58's."""

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.submitted: list[str] = []
        self.logs: dict[str, str] = {}

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/api/jobs/", self.submit)
        app.router.add_get("/api/jobs/{id}", self.info)
        app.router.add_get("/api/v0/logs/file", self.log)
        return app

    async def submit(self, request: web.Request) -> web.StreamResponse:
        order = await request.json()
        name = order["submission_id"]
        if name in self.logs:
            return web.Response(status=500, text=f"ValueError: Job with submission_id {name} already exists.")
        self.submitted.append(name)
        self.logs[name] = await asyncio.to_thread(run, order["entrypoint"])
        if self.lost:
            self.lost -= 1
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"submission_id": name})

    async def info(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name not in self.logs:
            return web.Response(status=404, text=f"Job {name} does not exist")
        said = {"status": "SUCCEEDED", "message": "Job finished successfully.", "entrypoint": ""}
        return web.json_response({**said, "driver_node_id": "ab" * 28})

    async def log(self, request: web.Request) -> web.Response:
        return web.Response(text="Runtime env is setting up.\n" + self.logs[request.query["submission_id"]])


class OneProvider:
    name = "local"

    def __init__(self, url: str) -> None:
        self.url = url

    def context(self, order: HostsOrder) -> str:
        return "here"

    @contextmanager
    def endpoint(self, order: HostsOrder) -> Iterator[Endpoint]:
        yield Endpoint(self.url, "token")


class Custodian:
    """Stands in for custody: accepts claims and remembers them. Claiming itself is tested on a real server."""

    def __init__(self) -> None:
        self.claims: list[str] = []
        self.settled: list[str] = []

    def get_workflow_handle(self, workflow_id: str) -> Custodian:
        return self

    async def execute_update(self, name: str, claim: Claim, **_: Any) -> Claim:
        self.claims.append(claim.id)
        return claim

    async def signal(self, name: str, *, args: list[str], **_: Any) -> None:
        self.settled.append(args[0])


@asynccontextmanager
async def served(jobs: JobsOfOneNode) -> AsyncIterator[str]:
    runner = web.AppRunner(jobs.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("lost", [0, 1], ids=["answered", "answer lost"])
async def test_struck_twice_it_is_claimed_first_submitted_once_and_killed_once(
    victim_process: subprocess.Popen[bytes], lost: int
) -> None:
    jobs, custodian = JobsOfOneNode(lost), Custodian()
    async with served(jobs) as url:
        providers: Any = Providers({"local": OneProvider(url)})  # type: ignore[dict-item]
        client: Any = custodian
        storage: Any = None
        drill = Drill(client, storage, providers, Submission(client, storage, providers, Path()))
        order = drill_order(victim(victim_process))
        first: Strike = await ActivityEnvironment().run(drill.strike_victim, order)
        again: Strike = await ActivityEnvironment().run(drill.strike_victim, order)
    assert victim_process.wait(10) == -signal.SIGKILL
    assert first == again
    assert first.outcome == "killed"
    assert len(jobs.submitted) == 1
    helper = f"job/{jobs.submitted[0]}"
    assert custodian.claims == [helper, helper]
    assert custodian.settled == [helper, helper]
