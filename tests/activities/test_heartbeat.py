"""Heartbeats go on while threads block, stop with the block, and carry what the next attempt needs (PostHog #39938)."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from activities import heartbeat, submission
from activities.heartbeat import beating, in_thread
from activities.jobs import Package
from activities.provision import _progress
from activities.submission import Submission
from tests.activities.jobs_api import JobsApi, served
from tests.activities.orders import JOB
from tests.activities.stand_ins import CustodyStandIn, HostsStandIn, environment, until

BLOCKED_S = 0.5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)


class Ticks(list[float]):
    """When each heartbeat was sent; an environment's `beats`."""

    def append(self, beat: Any) -> None:
        super().append(time.monotonic())

    def longest_silence(self, end: float) -> float:
        times: list[float] = [*self, end]
        return max(later - earlier for earlier, later in pairwise(times))


async def test_beats_go_on_while_a_thread_blocks() -> None:
    beats: list[dict[str, Any]] = []
    released = threading.Event()

    async def work() -> str:
        with ThreadPoolExecutor(1) as threads:
            async with beating(note="working"):
                blocked = asyncio.ensure_future(in_thread(threads, released.wait, 60))
                await until(lambda: len(beats) >= 10)
                assert not blocked.done()
                released.set()
                return str(await blocked)

    assert await environment(beats).run(work) == "True"
    assert beats[:10] == [{"note": "working"}] * 10


async def test_a_blocked_loop_is_silent_which_is_why_there_are_threads() -> None:
    """The control: the same work on the loop silences every heartbeat, so the tests here would notice it."""
    ticks = Ticks()
    beats: Any = ticks

    async def work() -> None:
        async with beating():
            await asyncio.sleep(0.05)
            time.sleep(BLOCKED_S)  # noqa: ASYNC251 - the mistake itself
            await asyncio.sleep(0)

    await environment(beats).run(work)
    assert ticks.longest_silence(time.monotonic()) >= BLOCKED_S


async def test_packing_the_source_does_not_silence_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packing, packed = threading.Event(), threading.Event()

    def slow(trees: dict[str, Path]) -> Package:
        packing.set()
        assert packed.wait(60)
        return Package("gcs://_ray_pkg_x.zip", b"")

    monkeypatch.setattr(submission, "package", slow)
    client: Any = CustodyStandIn()
    storage: Any = None
    beats: list[dict[str, Any]] = []
    async with served(JobsApi()) as url:
        submit = Submission(client, storage, HostsStandIn(url).providers(), tmp_path).submit_job
        running = asyncio.ensure_future(environment(beats).run(submit, JOB))
        await until(lambda: packing.is_set() and len(beats) >= 5)
        packed.set()
        assert (await running).adopted is False


async def test_what_a_thread_says_is_a_heartbeat() -> None:
    beats: list[dict[str, Any]] = []

    async def work() -> None:
        with ThreadPoolExecutor(1) as threads:
            async with beating(note="begin") as heart:
                await in_thread(threads, _progress(heart), "host 1 is up")
                await asyncio.sleep(0.05)

    await environment(beats).run(work)
    assert {"note": "host 1 is up"} in beats


async def test_details_add_up_and_nothing_is_said_after_the_end() -> None:
    beats: list[dict[str, Any]] = []

    async def work() -> None:
        async with beating(a=1) as heart:
            heart.say(b=2)
            heart.say(a=3)
        told = len(beats)
        heart.say(late=True)
        await asyncio.sleep(0.1)
        assert len(beats) == told

    await environment(beats).run(work)
    assert beats[-1] == {"a": 3, "b": 2}
    assert not any("late" in beat for beat in beats)


async def test_beats_end_also_when_the_work_fails_or_is_cancelled() -> None:
    beats: list[dict[str, Any]] = []

    async def fail() -> None:
        async with beating():
            await asyncio.sleep(0.03)
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await environment(beats).run(fail)

    async def wait() -> None:
        async with beating():
            await asyncio.sleep(60)

    env = environment(beats)
    waiting = asyncio.ensure_future(env.run(wait))
    await asyncio.sleep(0.05)
    env.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    told = len(beats)
    await asyncio.sleep(0.1)
    assert len(beats) == told


async def test_a_cancel_ends_the_wait_for_a_thread_and_not_the_thread() -> None:
    released, ended = threading.Event(), threading.Event()

    def work() -> None:
        released.wait(60)
        ended.set()

    with ThreadPoolExecutor(1) as threads:

        async def wait() -> None:
            async with beating():
                await in_thread(threads, work)

        env = environment()
        waiting = asyncio.ensure_future(env.run(wait))
        await asyncio.sleep(0.05)
        env.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not ended.is_set()
        released.set()
    assert ended.is_set()


@pytest.mark.parametrize(("before", "known"), [([], {}), ([{"step": 4}], {"step": 4}), (["a text"], {}), ([None], {})])
async def test_the_next_attempt_reads_what_the_last_one_said(before: list[Any], known: dict[str, Any]) -> None:
    async def work() -> dict[str, Any]:
        async with beating() as heart:
            return heart.last()

    assert await environment(attempt=2, before=before).run(work) == known
