"""Exactly what was claimed is ended, last first; each thing is proved absent twice, and unknown is not absent."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from temporalio.exceptions import ApplicationError

from activities import releasing
from activities.hosts import AbsenceUnknown, HostsNotReady
from activities.jobs import Jobs, JobsError
from activities.releasing import Releasing
from tests.activities import sample_run as sample
from tests.activities.jobs_api import DRIVER, JobsApi, actor, group, served
from tests.activities.orders import HOSTS, IDENTITY, JOB
from tests.activities.stand_ins import HostsStandIn, Objects, claim, environment, until
from workflows.evidence import Claim, Release, ReleaseOrder

CLUSTER = claim("cluster", IDENTITY.run_key)
SERVICE = claim("service", f"{IDENTITY.run_key}-host-0")
TRAIN = claim("job", JOB.submission_id)
CLAIMS = (CLUSTER, SERVICE, TRAIN)
TOMBSTONE = f"{IDENTITY.storage}/custody/tombstone.json"
RECORD = f"{IDENTITY.storage}/release.json"


@pytest.fixture
def api() -> JobsApi:
    made = JobsApi()
    made.add(JOB.submission_id)
    return made


@pytest.fixture
async def hosts(api: JobsApi) -> AsyncIterator[HostsStandIn]:
    async with served(api) as url:
        yield HostsStandIn(url)


@pytest.fixture
def store() -> Objects:
    return Objects()


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What a release wanted to wait for, in seconds; it does not wait."""
    told: list[float] = []

    async def sleep(seconds: float) -> None:
        told.append(seconds)
        await asyncio.sleep(0.01)

    monkeypatch.setattr(releasing, "asyncio", SimpleNamespace(sleep=sleep))
    return told


def order(*claims: Claim) -> ReleaseOrder:
    return ReleaseOrder(identity=IDENTITY, hosts=HOSTS, claims=claims or CLAIMS, reason="abort: tired", began=5.0)


async def release(
    hosts: HostsStandIn, store: Objects, *claims: Claim, started: datetime | None = None, beats: Any = None
) -> Release:
    env = environment(beats)
    if started:
        env.info = dataclasses.replace(env.info, started_time=started)
    with ThreadPoolExecutor(1) as threads:
        return await env.run(Releasing(store, hosts.providers(), threads).release, order(*claims))


async def still_there(hosts: HostsStandIn, store: Objects, *claims: Claim) -> str:
    with pytest.raises(ApplicationError) as caught:
        await release(hosts, store, *claims)
    assert (caught.value.type, caught.value.non_retryable) == ("StillThere", False)
    assert RECORD not in store.objects
    return caught.value.message


def asked_of(hosts: HostsStandIn, what: str) -> list[str]:
    return [each.removeprefix(f"{what} ") for each in hosts.done if each.startswith(what)]


async def test_last_first_then_twice_absent_then_written_down(
    hosts: HostsStandIn, store: Objects, api: JobsApi, slept: list[float]
) -> None:
    beats: list[dict[str, Any]] = []
    told = await release(hosts, store, beats=beats)
    ids = [each.id for each in CLAIMS]
    assert hosts.done == [
        "endpoint",
        f"release {SERVICE.id}",
        f"release {CLUSTER.id}",
        *[f"remaining {each}" for each in ids],
        *[f"remaining {each}" for each in ids],
    ]
    assert api.jobs[JOB.submission_id]["status"] == "STOPPED"
    assert (told.cleanup, told.remaining, told.reason, told.began) == ("clean", (), "abort: tired", 5.0)
    assert [(each.action, each.claim, each.ok) for each in told.steps] == [
        ("tombstone", "custody", True),
        ("stop", TRAIN.id, True),
        ("release", SERVICE.id, True),
        ("release", CLUSTER.id, True),
        ("first proof of absence", "all", True),
        ("end unfinished uploads", "storage", True),
        ("second proof of absence", "all", True),
    ]
    assert told.steps[1].detail == "STOPPED; no actor and no placement group left"
    assert json.loads(store.objects[TOMBSTONE]) == {"schema": 1, "reason": "abort: tired"}
    assert Release.model_validate_json(store.objects[RECORD]) == told
    assert slept == [pytest.approx(2.0)]
    assert {f"releasing {each}" for each in ids} < {beat["note"] for beat in beats}


async def test_the_tombstone_comes_before_everything(hosts: HostsStandIn, store: Objects) -> None:
    def look(done: str) -> None:
        assert TOMBSTONE in store.objects, done

    hosts.after = look
    assert (await release(hosts, store)).cleanup == "clean"


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("endpoint", HostsNotReady("there are no hosts on this machine")),
        ("endpoint", AbsenceUnknown("plan.json cannot be read")),
        ("endpoint", RuntimeError("a bug")),
        (f"release {SERVICE.id}", HostsNotReady("a process withstood")),
        (f"release {SERVICE.id}", OSError("disk full")),
        (f"release {SERVICE.id}", KeyError("a bug")),
    ],
    ids=repr,
)
async def test_each_step_is_tried_though_the_one_before_failed(
    hosts: HostsStandIn, store: Objects, what: str, error: Exception
) -> None:
    hosts.failing[what] = error
    told = await release(hosts, store)
    assert asked_of(hosts, "release") == [SERVICE.id, CLUSTER.id]
    [failed] = [each for each in told.steps if not each.ok]
    assert failed.claim == (TRAIN.id if what == "endpoint" else SERVICE.id)
    assert str(error.args[0]) in failed.detail
    # The infrastructure says that nothing is left, and its word counts: twice.
    assert told.cleanup == "clean"


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "nonsense"])
async def test_a_jobs_api_that_is_no_help_does_not_hold_the_hosts(
    hosts: HostsStandIn, store: Objects, api: JobsApi, silent: bool
) -> None:
    api.silent = silent
    api.instead[f"/api/jobs/{JOB.submission_id}"] = lambda: web.Response(text="<html>")
    told = await release(hosts, store)
    assert not told.steps[1].ok
    assert asked_of(hosts, "release") == [SERVICE.id, CLUSTER.id]


async def test_a_pending_job_that_does_not_stop_is_left_to_the_hosts_release(
    hosts: HostsStandIn, store: Objects, api: JobsApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def still_pending(jobs: Jobs, submission_id: str, within_s: float = 0.2) -> Any:
        return await stop(jobs, submission_id, within_s)

    stop = Jobs.stop_to_terminal
    monkeypatch.setattr(Jobs, "stop_to_terminal", still_pending)
    api.jobs[JOB.submission_id]["status"] = "PENDING"
    told = await release(hosts, store)
    assert "still PENDING" in told.steps[1].detail
    assert asked_of(hosts, "release") == [SERVICE.id, CLUSTER.id]


async def test_a_terminal_status_is_not_enough_while_its_actors_and_groups_are_there(
    hosts: HostsStandIn, store: Objects, api: JobsApi, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    api.state.update(actors=[actor("PlacementGroupCleaner", is_detached=True)], placement_groups=[group("CREATED")])
    real = Jobs.remains
    looks = 0

    async def go_by_and_by(jobs: Jobs, submission_id: str, ray_job_id: str | None) -> list[str]:
        nonlocal looks
        looks += 1
        assert ray_job_id == DRIVER
        if looks == 3:
            api.state.update(actors=[], placement_groups=[group("REMOVED")])
        return await real(jobs, submission_id, ray_job_id)

    monkeypatch.setattr(Jobs, "remains", go_by_and_by)
    told = await release(hosts, store)
    assert told.steps[1].ok
    assert looks == 3
    monkeypatch.setattr(releasing, "REMAINS_S", 0.0)
    api.state["actors"] = [actor("PlacementGroupCleaner", is_detached=True)]
    told = await release(hosts, store)
    assert told.steps[1].detail.startswith("STOPPED, but left actor PlacementGroupCleaner")
    assert not told.steps[1].ok


async def test_a_job_that_never_was_is_fine(hosts: HostsStandIn, store: Objects, api: JobsApi) -> None:
    api.jobs.clear()
    told = await release(hosts, store)
    assert (told.steps[1].ok, told.steps[1].detail) == (True, "the cluster knows no such job")


# Absence.


async def test_a_claim_made_elsewhere_is_refused_and_never_called_absent(hosts: HostsStandIn, store: Objects) -> None:
    elsewhere = CLUSTER.model_copy(update={"context": "kube/other"})
    said = await still_there(hosts, store, elsewhere, SERVICE)
    assert f"{CLUSTER.id}: in kube/other, which this worker cannot see" in said
    assert "run a worker there" in said
    assert asked_of(hosts, "release") == [SERVICE.id]
    assert CLUSTER.id not in asked_of(hosts, "remaining")


async def test_a_claim_of_another_provider_is_not_this_one_s(hosts: HostsStandIn, store: Objects) -> None:
    other = TRAIN.model_copy(update={"provider": "slurm"})
    assert "which this worker cannot see" in await still_there(hosts, store, other)
    assert hosts.done == []


@pytest.mark.parametrize("error", [AbsenceUnknown("process 7 hides"), RuntimeError("a bug")], ids=repr)
async def test_unknown_is_not_absent(hosts: HostsStandIn, store: Objects, error: Exception) -> None:
    hosts.failing[f"remaining {SERVICE.id}"] = error
    assert f"{SERVICE.id}: unknown ({error})" in await still_there(hosts, store)
    assert CLUSTER.id in asked_of(hosts, "remaining")


async def test_what_is_left_is_told_with_what_failed(hosts: HostsStandIn, store: Objects) -> None:
    hosts.failing[f"release {SERVICE.id}"] = HostsNotReady("process 7 withstood SIGKILL")
    hosts.there[SERVICE.id] = ["process 7"]
    said = await still_there(hosts, store)
    assert said == f"still there: process 7 (failed: release {SERVICE.id}: process 7 withstood SIGKILL)"


async def test_what_appears_between_the_two_proofs_is_not_clean(
    hosts: HostsStandIn, store: Objects, slept: list[float]
) -> None:
    def appear(done: str) -> None:
        if len(slept) == 1:
            hosts.there[CLUSTER.id] = ["a machine that was created late"]

    hosts.after = appear
    assert "a machine that was created late" in await still_there(hosts, store, CLUSTER)
    assert asked_of(hosts, "remaining") == [CLUSTER.id] * 2
    # The next attempt releases it too.
    hosts.after = lambda done: None
    assert (await release(hosts, store, CLUSTER)).cleanup == "clean"


@pytest.mark.parametrize("wrong_by", [timedelta(0), timedelta(hours=3), timedelta(hours=-3)], ids=str)
async def test_the_second_proof_waits_until_nothing_can_appear_any_more_on_the_server_s_clock(
    hosts: HostsStandIn, store: Objects, slept: list[float], wrong_by: timedelta
) -> None:
    server_says = datetime.now(UTC) + wrong_by  # and the worker's own clock is wrong by so much
    late = SERVICE.model_copy(update={"may_appear_until": server_says.timestamp() + 90.0})
    early = CLUSTER.model_copy(update={"may_appear_until": server_says.timestamp() - 90.0})
    await release(hosts, store, early, late, started=server_says)
    [pause] = slept
    assert 60.0 < pause <= 90.0  # less what the release itself took
    slept.clear()
    await release(hosts, store, early, started=server_says)
    assert slept == [2.0]


def test_two_proofs_lie_two_seconds_apart_at_least() -> None:
    assert releasing.BETWEEN_PROOFS_S >= 2.0


# Storage.


async def test_storage_that_is_down_does_not_hold_the_hosts(hosts: HostsStandIn, store: Objects) -> None:
    store.down = True
    told = await release(hosts, store)
    assert asked_of(hosts, "release") == [SERVICE.id, CLUSTER.id]
    assert told.cleanup == "clean"
    assert [(each.action, each.ok) for each in told.steps if not each.ok] == [
        ("tombstone", False),
        ("end unfinished uploads", False),
        ("release.json", False),
    ]
    assert told.last_commit is None


async def test_uploads_are_ended_only_when_whoever_could_finish_them_is_gone(
    hosts: HostsStandIn, store: Objects
) -> None:
    hosts.there[CLUSTER.id] = ["a rank that still writes"]
    hosts.failing[f"release {CLUSTER.id}"] = HostsNotReady("it withstood")
    await still_there(hosts, store)
    assert not any(each.startswith("end uploads") for each in store.done)
    hosts.failing.clear()
    await release(hosts, store)
    assert store.done.count(f"end uploads below {IDENTITY.storage}/") == 1


async def test_the_last_commit_is_told(hosts: HostsStandIn, store: Objects) -> None:
    name = "train/main/checkpoint_manager_snapshot.json"
    store.objects[f"{IDENTITY.storage}/{name}"] = sample.objects(12)[f"{sample.ROOT}/{name}"]
    told = await release(hosts, store)
    assert told.last_commit
    assert told.last_commit.step == 12
    store.objects[f"{IDENTITY.storage}/{name}"] = b"{"
    assert (await release(hosts, store)).last_commit is None


async def test_released_twice_is_fine(hosts: HostsStandIn, store: Objects) -> None:
    first = await release(hosts, store)
    again = await release(hosts, store)
    assert first.cleanup == again.cleanup == "clean"


async def test_a_worker_without_the_provider_releases_nothing_and_is_asked_again(
    hosts: HostsStandIn, store: Objects
) -> None:
    hosts.name = "slurm"
    with pytest.raises(ApplicationError, match=r"nothing was released: .*'local' is not available") as caught:
        await release(hosts, store)
    assert not caught.value.non_retryable
    assert hosts.done == store.done == []


async def test_a_cancel_ends_it_and_is_no_finding(hosts: HostsStandIn, store: Objects, api: JobsApi) -> None:
    api.jobs[JOB.submission_id]["status"] = "PENDING"
    with ThreadPoolExecutor(1) as threads:
        env = environment()
        running = asyncio.ensure_future(env.run(Releasing(store, hosts.providers(), threads).release, order()))
        await until(lambda: api.count("POST") > 0)
        env.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert asked_of(hosts, "release") == []


def test_errors_of_jobs_are_no_hosts_errors() -> None:
    """Why a step catches every exception: the two families are unrelated, and `reach` raises both."""
    assert not issubclass(HostsNotReady, JobsError)
