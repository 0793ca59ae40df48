"""Hosts that stay: the cluster asks for its token and has nodes enough; a job that cannot be asked for is not gone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web

from activities.hosts import AbsenceUnknown, HostsError, HostsFailed, HostsNotReady, WrongContext
from activities.hosts.existing import ExistingHosts
from tests.activities.jobs_api import TOKEN, JobsApi, actor, group, node, served
from tests.activities.orders import HOSTS, JOB
from tests.activities.stand_ins import NOWHERE, claim
from workflows.evidence import Claim, HostsOrder, Inventory

T = TypeVar("T")
PROVIDER = ExistingHosts()


def no_progress(note: str) -> None:
    pass


@pytest.fixture
def api() -> JobsApi:
    made = JobsApi()
    made.state["nodes"] = [node("127.0.0.3"), node("127.0.0.2"), node("127.0.0.4", "DEAD")]
    return made


@pytest.fixture
async def url(api: JobsApi) -> AsyncIterator[str]:
    async with served(api) as found:
        yield found


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    made = tmp_path / "token"
    made.touch(mode=0o600)
    made.write_text(f"{TOKEN}\n")
    return made


@pytest.fixture
def order(url: str, token_file: Path) -> HostsOrder:
    return ordered(url, token_file)


def ordered(url: str, token_file: Path, **changes: Any) -> HostsOrder:
    options = {
        "endpoint": url,
        "token_file": str(token_file),
        "require_distinct_hosts": False,
        "require_distinct_devices": False,
    }
    return HOSTS.model_copy(update={"provider": "existing", "options": options, **changes})


def job(order: HostsOrder) -> Claim:
    return claim("job", JOB.submission_id, provider="existing", context=PROVIDER.context(order))


async def called(what: Callable[..., T], *args: Any) -> T:
    """As the worker calls a provider: in a thread."""
    return await asyncio.to_thread(what, *args)


async def test_a_cluster_that_can_carry_the_run_is_accepted_and_nothing_of_it_is_claimed(order: HostsOrder) -> None:
    assert await called(PROVIDER.check, order) == []
    assert PROVIDER.claims(order) == []
    assert PROVIDER.inventory(10) == Inventory()
    hosts = await called(PROVIDER.prove, order, no_progress)
    assert [(each.index, each.role, each.address) for each in hosts.hosts] == [
        (0, "head", "127.0.0.2"),
        (1, "worker", "127.0.0.3"),
    ]


def bad_token(text: str) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        path.write_text(text)

    return spoil


def link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (Path.unlink, "does not exist"),
        (lambda path: path.chmod(0o640), "chmod 0600"),
        (link, "link is refused"),
        (pipe, "not a regular file"),
        (bad_token(""), "must hold one token in one line"),
        (bad_token("two\nlines"), "must hold one token in one line"),
        (bad_token("naïve"), "must hold one token in one line"),
        (bad_token("x" * 10_000), "must hold one token in one line"),
        (bad_token("another-token"), "refuses the token of hosts.token_file (403)"),
    ],
)
async def test_a_token_that_cannot_be_used_is_refused_and_not_repeated(
    order: HostsOrder, token_file: Path, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(token_file)
    [problem] = await called(PROVIDER.check, order)
    assert words in problem
    assert "another-token" not in problem
    assert TOKEN not in problem


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/api/version", lambda: web.json_response({"ray_version": "2.60.0"}), "runs Ray 2.60.0; a run needs 2.58.0"),
        ("/api/version", lambda: web.Response(text="<html>"), "not Ray's dashboard"),
        ("/api/version", lambda: web.json_response([]), "not Ray's dashboard"),
        ("/api/version", lambda: web.Response(status=502), "does not answer as Ray does (502)"),
        ("/api/v0/nodes", lambda: web.Response(status=500, text="no"), "500 no"),
    ],
)
async def test_what_answers_otherwise_than_the_ray_that_is_needed_is_refused(
    api: JobsApi, order: HostsOrder, path: str, answer: Callable[[], web.Response], words: str
) -> None:
    api.instead[path] = answer
    [problem] = await called(PROVIDER.check, order)
    assert words in problem


async def test_a_cluster_that_asks_for_no_token_is_refused(api: JobsApi, order: HostsOrder) -> None:
    api.open = True
    [problem] = await called(PROVIDER.check, order)
    assert "answers without a token; start its Ray with RAY_AUTH_MODE=token" in problem


async def test_too_few_nodes_are_refused_and_waited_for_once_the_run_began(api: JobsApi, order: HostsOrder) -> None:
    api.state["nodes"][0]["state"] = "DEAD"
    [problem] = await called(PROVIDER.check, order)
    assert "has 1 of the 2 nodes" in problem
    with pytest.raises(HostsNotReady, match="has 1 of 2 nodes alive"):
        await called(PROVIDER.prove, order, no_progress)


async def test_gpus_are_needed_on_as_many_nodes_as_there_are_workers(api: JobsApi, url: str, token_file: Path) -> None:
    order = ordered(url, token_file, device="cuda")
    api.state["nodes"] = [node("127.0.0.2", GPU=8.0), node("127.0.0.3")]
    assert ["does not offer a GPU on 2 of its nodes" in each for each in await called(PROVIDER.check, order)] == [True]
    api.state["nodes"] = [node("127.0.0.2", GPU=1.0), node("127.0.0.3", GPU=1.0)]
    assert await called(PROVIDER.check, order) == []


async def test_nothing_that_answers_is_one_clear_problem(token_file: Path) -> None:
    [problem] = await called(PROVIDER.check, ordered(NOWHERE, token_file))
    assert f"the cluster at {NOWHERE}: it does not answer (ConnectError); is the tunnel open?" == problem


async def test_a_job_is_gone_with_its_actors_and_placement_groups_and_not_before(
    api: JobsApi, order: HostsOrder
) -> None:
    assert await called(PROVIDER.remaining, job(order), order) == []
    told = api.add(JOB.submission_id)
    api.state["actors"] = [actor("TrainController")]
    api.state["placement_groups"] = [group("CREATED", {"CPU": 1.0})]
    left = await called(PROVIDER.remaining, job(order), order)
    assert [each.split()[0] for each in left] == ["job", "actor", "placement"]
    told["status"] = "STOPPED"
    assert len(await called(PROVIDER.remaining, job(order), order)) == 2
    api.state["actors"] = [actor("TrainController", "DEAD"), actor("Somebody", job_id="07000000")]
    api.state["placement_groups"] = [group("REMOVED"), group("CREATED", creator_job_id="07000000")]
    assert await called(PROVIDER.remaining, job(order), order) == []


async def test_what_cannot_be_asked_is_not_gone(api: JobsApi, order: HostsOrder, token_file: Path) -> None:
    api.add(JOB.submission_id, "STOPPED")
    mine = job(order)
    with pytest.raises(WrongContext):
        await called(PROVIDER.remaining, mine.model_copy(update={"context": "https://elsewhere"}), order)
    api.silent = True
    with pytest.raises(AbsenceUnknown):
        await called(PROVIDER.remaining, mine, order)
    api.silent = False
    token_file.unlink()
    with pytest.raises(AbsenceUnknown):
        await called(PROVIDER.remaining, mine, order)


async def test_hosts_are_never_touched(api: JobsApi, order: HostsOrder) -> None:
    PROVIDER.launch(order, lambda: None, no_progress)
    with pytest.raises(HostsError):
        PROVIDER.release(
            claim("cluster", "x", provider="existing", context=PROVIDER.context(order)), order, no_progress
        )
    assert api.asked == []


def test_options_of_another_provider_are_refused() -> None:
    with pytest.raises(HostsFailed, match=r"hosts\."):
        PROVIDER.context(HOSTS.model_copy(update={"options": {"endpoint": "http://127.0.0.1:8265"}}))
