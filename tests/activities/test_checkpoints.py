"""Progress is what Ray Train recorded as committed; what cannot be read is unknown, and ends nothing by itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from activities import checkpoints
from activities.checkpoints import Checkpoints, DamagedRecord, commits_of, committed, record_uri
from activities.hosts import HostsFailed
from tests.activities.jobs_api import JobsApi, group, node, served
from tests.activities.orders import IDENTITY, JOB
from tests.activities.stand_ins import NOWHERE, HostsStandIn, Objects, environment, until
from workflows.evidence import Commit, WatchOrder, WatchResult

ID = JOB.submission_id
RECORD = record_uri(IDENTITY.storage, "main")


def record(*steps: int, latest: int | None = None, **changes: Any) -> bytes:
    """A record as Ray 2.58.0 writes it."""
    results = [_result(step) for step in steps]
    last = results[-1] if results else None
    told = {
        "ray_version": "2.58.0",
        "checkpoint_results": results,
        "checkpoint_report_indices": list(range(len(results))),
        "latest_checkpoint_result": _result(latest) if latest is not None else last,
        "pending_training_results": [],
        "pending_validation_specs": [],
        "current_report_index": len(results),
        "validated_checkpoint_dir_names": [],
        "timed_out_validation_checkpoint_dir_names": [],
        "failed_validation_checkpoint_dir_names": [],
    }
    return json.dumps(told | changes).encode()


def _result(step: int, **changes: Any) -> dict[str, Any]:
    metrics = {"step": step, "loss": 1.0 / step}
    return {"version": 0, "checkpoint_dir_name": f"checkpoint_{step}", "metrics": metrics} | changes


def commit(step: int) -> Commit:
    return Commit(checkpoint=f"checkpoint_{step}", step=step, loss=1.0 / step, index=step // 4)


# The record.


def test_commits_are_read_oldest_first() -> None:
    assert [(c.step, c.checkpoint, c.loss, c.index) for c in commits_of(record(4, 8))] == [
        (4, "checkpoint_4", 0.25, 2),
        (8, "checkpoint_8", 0.125, 2),
    ]
    assert commits_of(record()) == []


def test_the_latest_counts_also_where_only_the_best_are_kept() -> None:
    assert [c.step for c in commits_of(record(8, 4, latest=12))] == [4, 8, 12]


def test_a_report_that_is_pending_is_no_commit() -> None:
    assert commits_of(record(pending_training_results=[_result(4)], current_report_index=1)) == []


@pytest.mark.parametrize("loss", [None, "low", [1.0], float("nan"), float("inf")])
def test_a_report_needs_no_loss_and_a_diverged_one_harms_no_heartbeat(loss: Any) -> None:
    told = commits_of(record(4, 8, checkpoint_results=[_result(4, metrics={"step": 4, "loss": loss})]))
    assert [(c.step, c.loss) for c in told] == [(4, None), (8, 0.125)]


DAMAGES: dict[str, bytes] = {
    "empty": b"",
    "cut short": record(4, 8)[:-40],
    "binary": b"\x80\x02\xff",
    "an error page": b"<html>503</html>",
    "a list": b"[]",
    "null": b"null",
    "an empty object": b"{}",
    "too deep": b"[" * 100_000,
    "results null": record(checkpoint_results=None),
    "results a text": record(checkpoint_results="checkpoint_4"),
    "a result null": record(checkpoint_results=[None]),
    "a result a list": record(checkpoint_results=[[4]]),
    "no metrics": record(checkpoint_results=[{"checkpoint_dir_name": "checkpoint_4"}]),
    "metrics null": record(checkpoint_results=[_result(4, metrics=None)]),
    "metrics a list": record(checkpoint_results=[_result(4, metrics=[4])]),
    "no step": record(checkpoint_results=[_result(4, metrics={})]),
    "step a text": record(checkpoint_results=[_result(4, metrics={"step": "4"})]),
    "step a float": record(checkpoint_results=[_result(4, metrics={"step": 4.0})]),
    "step true": record(checkpoint_results=[_result(4, metrics={"step": True})]),
    "loss beyond a float": record(checkpoint_results=[_result(4, metrics={"step": 4, "loss": 10**400})]),
    "no name": record(checkpoint_results=[_result(4, checkpoint_dir_name=None)]),
    "an empty name": record(checkpoint_results=[_result(4, checkpoint_dir_name="")]),
    "half a character": record(checkpoint_results=[_result(4)]).replace(b"checkpoint_4", b"\\ud800"),
    "no index": record(4, current_report_index=None),
    "index infinite": record(4, current_report_index=1).replace(b'_index": 1,', b'_index": 1e999,'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_says_so(damage: str) -> None:
    with pytest.raises(DamagedRecord, match="the commit record is damaged"):
        commits_of(DAMAGES[damage])


def is_told_or_damaged(raw: bytes) -> None:
    try:
        found = commits_of(raw)
    except DamagedRecord:
        return
    assert all(isinstance(each, Commit) and each.checkpoint for each in found)


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["step", "loss", "x"]), inner),
    max_leaves=6,
)


@given(st.binary(max_size=64))
def test_no_bytes_are_anything_but_told_or_damaged(raw: bytes) -> None:
    is_told_or_damaged(raw)


@given(st.integers(0, len(record(4, 8, 12))), st.integers(0, 200), st.binary(max_size=3))
def test_no_splice_is_anything_but_told_or_damaged(at: int, out: int, put: bytes) -> None:
    whole = record(4, 8, 12)
    is_told_or_damaged(whole[:at] + put + whole[at + out :])


FIELDS = ("checkpoint_results", "latest_checkpoint_result", "current_report_index")


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([*FIELDS, "checkpoint_dir_name", "metrics"]), json_values)
def test_no_value_in_any_place_is_anything_but_told_or_damaged(place: str, value: Any) -> None:
    told = {place: value} if place in FIELDS else {"checkpoint_results": [_result(4, **{place: value})]}
    is_told_or_damaged(record(4, 8, **told))


# The watch.


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "STATUS_EVERY_S", 0.02)
    monkeypatch.setattr(checkpoints, "poll_s", lambda between: 0.02)


@pytest.fixture
def api() -> JobsApi:
    made = JobsApi()
    made.add(ID)
    made.state["nodes"] = [node("127.0.0.2"), node("127.0.0.3")]
    return made


@pytest.fixture
async def url(api: JobsApi) -> AsyncIterator[str]:
    async with served(api) as where:
        yield where


def order(*milestones: int, stall_s: float = 60.0, seen: Commit | None = None) -> WatchOrder:
    return WatchOrder(job=JOB, steps=32, stall_s=stall_s, milestones=milestones, seen=seen)


class Watching:
    """A watch that runs while the test goes on."""

    def __init__(
        self,
        store: Objects,
        url: str,
        order: WatchOrder,
        before: dict[str, Any] | None = None,
        hosts: HostsStandIn | None = None,
    ) -> None:
        self.beats: list[dict[str, Any]] = []
        self.env = environment(self.beats, attempt=2 if before else 1, before=[before] if before else [])
        watch = Checkpoints(store, (hosts or HostsStandIn(url)).providers()).watch_training
        self.task: asyncio.Task[WatchResult] = asyncio.ensure_future(self.env.run(watch, order))

    async def until(self, said: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first heartbeat of which `said` is true."""
        async with asyncio.timeout(30):
            while True:
                for beat in self.beats:
                    if said(beat):
                        return beat
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)

    async def result(self) -> WatchResult:
        async with asyncio.timeout(60):
            return await self.task

    async def cancel(self) -> None:
        self.env.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task


async def test_it_returns_at_the_next_milestone_and_not_before(url: str) -> None:
    store = Objects({RECORD: record(4)})
    watch = Watching(store, url, order(8, 16))
    first = await watch.until(lambda beat: beat.get("step") == 4)
    assert first["loss"] == 0.25
    store.objects[RECORD] = record(4, 8)
    told = await watch.result()
    assert (told.end, told.commit, told.job_status) == ("milestone", commits_of(record(4, 8))[-1], "RUNNING")
    assert told.message == told.diagnosis == ""


async def test_uploaded_objects_without_a_record_are_no_commit(url: str, api: JobsApi) -> None:
    store = Objects({f"{IDENTITY.storage}/train/main/checkpoint_8/checkpoint.pt": b"x"})
    watch = Watching(store, url, order(4))
    await watch.until(lambda beat: beat.get("job") == "RUNNING")
    api.jobs[ID]["status"] = "SUCCEEDED"
    told = await watch.result()
    assert (told.end, told.commit) == ("finished", None)


async def test_a_job_that_finished_has_its_record_read_once_more(url: str, api: JobsApi) -> None:
    store = Objects({RECORD: record(4)})

    def finish() -> None:
        store.objects[RECORD] = record(4, 8)
        api.jobs[ID]["status"] = "SUCCEEDED"

    api.before_status = finish  # between the look at the record and the answer of the job
    told = await Watching(store, url, order(28)).result()
    assert (told.end, told.job_status) == ("finished", "SUCCEEDED")
    assert told.commit
    assert told.commit.step == 8


async def test_a_job_that_failed_is_told_with_the_last_error(url: str, api: JobsApi) -> None:
    api.add(ID, "FAILED", message="Job entrypoint command failed with exit code 1")
    api.logs[ID] = "step 5\nTraceback (most recent call last):\n  File x\nValueError: no such column\nbye\n"
    told = await Watching(Objects({RECORD: record(4)}), url, order(8)).result()
    assert (told.end, told.job_status, told.message) == ("failed", "FAILED", "ValueError: no such column")
    assert told.commit
    assert told.commit.step == 4


@pytest.mark.parametrize("status", ["STOPPED", "FAILED"])
async def test_only_the_native_status_says_that_it_succeeded(url: str, api: JobsApi, status: str) -> None:
    api.add(ID, status, driver_exit_code=0)
    assert (await Watching(Objects(), url, order(8)).result()).end == "failed"


async def test_a_stall_comes_with_a_diagnosis(url: str, api: JobsApi) -> None:
    api.state["placement_groups"] = [group("PENDING", {"CPU": 1.0, "GPU": 8.0})]
    told = await Watching(Objects({RECORD: record(4)}), url, order(8, stall_s=0.2)).result()
    assert (told.end, told.job_status) == ("stalled", "RUNNING")
    assert "no node can meet GPU 8" in told.diagnosis
    assert told.commit
    assert told.commit.step == 4


async def test_each_commit_puts_the_stall_off(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    # No wall clock: one that is put forward or back changes nothing.
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now))
    began = time.time()
    store = Objects({RECORD: record(1)})
    watch = Watching(store, url, order(32, stall_s=10.0))
    for step in range(1, 4):
        store.objects[RECORD] = record(step)
        await watch.until(lambda beat, step=step: beat.get("step") == step)  # type: ignore[misc]
        now += 9.0
    now += 2.0
    told = await watch.result()
    assert told.end == "stalled"
    assert told.at - began == pytest.approx(29.0, abs=5.0)
    assert told.commit
    assert told.commit.step == 3


async def test_a_short_silence_is_survived_and_a_long_one_is_a_loss(
    url: str, api: JobsApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Objects({RECORD: record(4)})
    watch = Watching(store, url, order(8))
    await watch.until(lambda beat: beat.get("job") == "RUNNING")
    api.silent = True
    await watch.until(lambda beat: "silent" in beat.get("note", ""))
    api.silent = False
    await asyncio.sleep(0.2)
    assert not watch.task.done()
    monkeypatch.setattr(checkpoints, "LOST_AFTER_S", 0.3)
    api.silent = True
    told = await watch.result()
    assert (told.end, told.job_status) == ("lost", "RUNNING")
    assert "the Jobs API has been silent" in told.message
    assert told.commit
    assert told.commit.step == 4


async def test_a_cluster_that_never_answers_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "LOST_AFTER_S", 0.2)
    told = await Watching(Objects(), NOWHERE, order(8)).result()
    assert (told.end, told.job_status, told.commit) == ("lost", "UNKNOWN", None)


async def test_a_cluster_that_forgot_the_job_lost_it(url: str, api: JobsApi) -> None:
    api.jobs.clear()
    told = await Watching(Objects(), url, order(8)).result()
    assert (told.end, told.message) == ("lost", "the cluster no longer knows the job")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, "every host says that it is up"),
        (HostsFailed("host 1 ended: lease expired"), "host 1 ended: lease expired"),
        (RuntimeError("a bug"), "what became of the hosts is unknown (a bug)"),
    ],
)
async def test_a_loss_comes_with_the_hosts_own_word(url: str, api: JobsApi, error: Exception | None, told: str) -> None:
    api.jobs.clear()
    hosts = HostsStandIn(url)
    if error:
        hosts.failing["prove"] = error
    result = await Watching(Objects(), url, order(8), hosts=hosts).result()
    assert (result.end, result.diagnosis) == ("lost", told)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (None, "ray.train.ControllerError: no node can place it"),
        (HostsFailed("host 1 is dead"), "host 1 is dead"),
        (
            RuntimeError("a bug"),
            "what became of the hosts is unknown (a bug); ray.train.ControllerError: no node can place it",
        ),
    ],
)
async def test_a_failure_by_a_dead_host_is_told_by_the_host_alone(
    url: str, api: JobsApi, error: Exception | None, told: str
) -> None:
    """What Ray says of it is long, and only that a node is missing."""
    api.add(ID, "FAILED")
    api.logs[ID] = "ray.train.ControllerError: no node can place it"
    hosts = HostsStandIn(url)
    if error:
        hosts.failing["prove"] = error
    result = await Watching(Objects(), url, order(8), hosts=hosts).result()
    assert (result.end, result.message) == ("failed", told)


async def test_a_refused_token_is_not_silence(url: str, api: JobsApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "LOST_AFTER_S", 0.0)
    api.instead[f"/api/jobs/{ID}"] = lambda: web.Response(status=401)
    told = await Watching(Objects(), url, order(8, stall_s=0.3)).result()
    assert told.end == "stalled"
    assert "refuses the run's token (401)" in told.message


async def test_an_outage_of_storage_shorter_than_the_stall_is_survived(url: str) -> None:
    store = Objects({RECORD: record(4)})
    watch = Watching(store, url, order(8))
    await watch.until(lambda beat: beat.get("step") == 4)
    store.down = True
    beat = await watch.until(lambda beat: "EndpointConnectionError" in beat.get("note", ""))
    assert beat["step"] == 4
    store.objects[RECORD] = b"{"
    store.down = False
    await watch.until(lambda beat: "damaged" in beat.get("note", ""))
    store.objects[RECORD] = record(4, 8)
    assert (await watch.result()).end == "milestone"


async def test_an_outage_of_storage_as_long_as_the_stall_is_one_and_says_why(url: str) -> None:
    store = Objects()
    store.down = True
    told = await Watching(store, url, order(8, stall_s=0.3, seen=commit(4))).result()
    assert (told.end, told.commit) == ("stalled", commit(4))
    assert "EndpointConnectionError" in told.message


async def test_an_unchanged_record_is_not_read_whole_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[bytes] = []

    def counted(raw: bytes) -> list[Commit]:
        reads.append(raw)
        return commits_of(raw)

    monkeypatch.setattr(checkpoints, "commits_of", counted)
    store = Objects({RECORD: record(4)})
    watch = Watching(store, url, order(8))
    await watch.until(lambda beat: beat.get("step") == 4)
    looks = len(store.done)
    await until(lambda: len(store.done) >= looks + 5)
    await watch.cancel()
    assert reads == [record(4)]


async def test_the_next_attempt_goes_on_from_what_the_last_one_knew(url: str) -> None:
    store = Objects({RECORD: record(4)})
    first = Watching(store, url, order(8))
    await first.until(lambda beat: beat.get("step") == 4)
    await first.cancel()
    store.down = True
    known = {**first.beats[-1], "progress_at": time.time() - 100.0}
    # Neither the commit nor how long there was none is forgotten, though storage answers nothing.
    told = await Watching(store, url, order(8, stall_s=90.0), before=known).result()
    assert told.end == "stalled"
    assert told.commit
    assert told.commit.step == 4


async def test_an_attempt_that_dies_at_once_passes_on_what_it_was_told() -> None:
    known = {"commit": commit(4).model_dump(mode="json"), "progress_at": 1234.5, "step": 4}
    watch = Watching(Objects(), NOWHERE, order(8, stall_s=1e12), before=known)
    await asyncio.sleep(0)
    await watch.until(lambda beat: True)
    await watch.cancel()
    assert all(beat["commit"] == known["commit"] and beat["progress_at"] == 1234.5 for beat in watch.beats)


async def test_what_is_committed_is_read_as_it_is_now() -> None:
    assert await committed(Objects(), JOB) == []
    assert [c.step for c in await committed(Objects({RECORD: record(4, 8)}), JOB)] == [4, 8]
