"""Source is delivered by content; one submission id is one job; what is silent is unknown, and nothing else is ours."""

from __future__ import annotations

import os
import zipfile
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from temporalio.exceptions import ApplicationError

from activities import jobs as module
from activities import submission as submitting
from activities.jobs import Endpoint, Jobs, JobsError, JobsUnreachable, Package, package
from activities.submission import Submission
from tests.activities.jobs_api import DRIVER, SUPERVISOR, TOKEN, JobsApi, actor, group, listed, served
from tests.activities.orders import HOSTS, IDENTITY, JOB
from tests.activities.stand_ins import NOWHERE, CustodyStandIn, HostsStandIn, Objects, environment
from workflows.evidence import RecordsOrder

ID = JOB.submission_id


def source(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def names(packed: Package) -> list[str]:
    return zipfile.ZipFile(BytesIO(packed.body)).namelist()


# The package.


def test_the_same_content_has_the_same_bytes_and_name(tmp_path: Path) -> None:
    first = source(tmp_path / "a", train="one", model__net="two")
    second = source(tmp_path / "b", model__net="two", train="one")
    os.utime(second / "train", (1, 1))
    (second / "train").chmod(0o700)
    assert package({"": first}) == package({"": second})
    assert package({"": first}).name.startswith("_ray_pkg_")
    assert names(package({"": first})) == ["model/net", "train"]
    (second / "train").write_text("other")
    assert package({"": first}).uri != package({"": second}).uri
    assert package({"": first}).uri != package({"trainer": first}).uri


@pytest.mark.parametrize("target", ["train.py", "model", "nowhere"], ids=["a file", "a directory", "nothing"])
def test_links_are_refused_by_name(tmp_path: Path, target: str) -> None:
    source(tmp_path, **{"train.py": "", "model__net.py": ""})
    (tmp_path / "shortcut").symlink_to(tmp_path / target)
    with pytest.raises(ValueError, match="shortcut is a link"):
        package({"": tmp_path})


def test_what_is_no_source_is_not_even_looked_at(tmp_path: Path) -> None:
    """A checkout brings its environment along: tens of thousands of files, links among them."""
    source(tmp_path, **{"train.py": "", ".venv__bin__python": "", "pkg__c.pyc": ""})
    (tmp_path / ".venv/bin/python3").symlink_to("python")
    assert names(package({"": tmp_path})) == ["train.py"]


def test_the_first_fault_is_told_before_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory of `/`, say."""
    source(tmp_path, **{"z__deep__train.py": ""})
    (tmp_path / "bin").symlink_to("z")
    looked: list[str] = []
    listed = os.scandir

    def look(path: str) -> Any:
        looked.append(str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", look)
    with pytest.raises(ValueError, match="bin is a link"):
        package({"": tmp_path})
    assert looked == [str(tmp_path)]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no plain file"):
        package({"": tmp_path})


def test_what_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(2**40)  # a hole: reading it would take the machine's memory
    with pytest.raises(ValueError, match="more than 50 MiB; deliver code, not data"):
        package({"": tmp_path})


def test_many_small_files_are_too_large_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PACKAGE", 2**20)
    for index in range(3):
        (tmp_path / f"{index}.py").write_bytes(b"#" * 400_000)
    with pytest.raises(ValueError, match="more than 1 MiB"):
        package({"": tmp_path})
    (tmp_path / "2.py").unlink()
    assert len(names(package({"": tmp_path}))) == 2


def test_junk_stays_here(tmp_path: Path) -> None:
    junk = ("__pycache__", ".git", ".venv", "node_modules", ".mypy_cache", ".pytest_cache")
    for name in ("train.py", "model/net.py", "model/net.pyc", *(f"model/{each}/x" for each in junk)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "model/.venv/python").symlink_to("/usr/bin/python3")
    assert names(package({"": tmp_path})) == ["model/net.py", "train.py"]


def test_no_directory_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing does not exist"):
        package({"": tmp_path / "missing"})


# The API.


@pytest.fixture
def api() -> JobsApi:
    return JobsApi()


@pytest.fixture
async def url(api: JobsApi) -> AsyncIterator[str]:
    async with served(api) as where:
        yield where


@pytest.fixture
async def jobs(url: str) -> AsyncIterator[Jobs]:
    async with Jobs.at(Endpoint(url, TOKEN)) as found:
        yield found


async def test_a_job_is_submitted_with_everything_it_was_given(api: JobsApi, jobs: Jobs, tmp_path: Path) -> None:
    packed = package({"": source(tmp_path, train="x")})
    await jobs.deliver(packed)
    await jobs.deliver(packed)
    assert api.packages == {packed.name: packed.body}
    assert api.count("PUT") == 1
    await jobs.submit(ID, "python train.py", env={"LANYARD_JOB": "{}"}, source=packed, metadata={"lanyard_run": "w"})
    assert api.orders == [
        {
            "entrypoint": "python train.py",
            "submission_id": ID,
            "runtime_env": {"env_vars": {"LANYARD_JOB": "{}"}, "working_dir": packed.uri},
            "metadata": {"lanyard_run": "w"},
            "entrypoint_num_cpus": 0,
        }
    ]
    info = await jobs.info(ID)
    assert info
    assert (info.status, info.terminal, info.ray_job_id, info.metadata) == (
        "PENDING",
        False,
        None,
        {"lanyard_run": "w"},
    )


async def test_the_endpoint_is_the_one_given_whatever_the_environment_says(
    url: str, api: JobsApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, NOWHERE)
    async with Jobs.at(Endpoint(url, TOKEN)) as jobs:
        assert await jobs.info(ID) is None
    assert api.asked == [f"GET /api/jobs/{ID}"]


async def test_absent_silent_and_refused_are_told_apart(api: JobsApi, url: str, jobs: Jobs) -> None:
    assert await jobs.info(ID) is None
    assert await jobs.raw(ID) is None
    assert await jobs.logs(ID) == ""
    api.silent = True
    with pytest.raises(JobsUnreachable, match=f"GET /api/jobs/{ID}"):
        await jobs.info(ID)
    async with Jobs.at(Endpoint(NOWHERE, TOKEN)) as nobody:
        with pytest.raises(JobsUnreachable):
            await nobody.info(ID)
    api.silent = False
    async with Jobs.at(Endpoint(url, "another")) as stranger:
        with pytest.raises(JobsError, match=r"refuses the run's token \(403\)") as refused:
            await stranger.info(ID)
    assert not isinstance(refused.value, JobsUnreachable)
    assert "another" not in str(refused.value)
    api.instead[f"/api/jobs/{ID}"] = lambda: web.Response(status=401)
    with pytest.raises(JobsError, match=r"token \(401\)"):
        await jobs.info(ID)


def test_an_endpoint_does_not_show_its_token() -> None:
    assert TOKEN not in repr(Endpoint("http://x", TOKEN))


async def test_an_error_names_the_request_and_the_end_of_what_was_said(api: JobsApi, jobs: Jobs) -> None:
    api.add(ID)
    with pytest.raises(JobsError, match=r"^POST /api/jobs/: 500 ValueError: Job with submission_id .* already exists"):
        await jobs.submit(ID, "true")


NONSENSE: dict[str, Any] = {
    "a proxy's page": web.Response,
    "no object": lambda: web.json_response([]),
    "an empty object": lambda: web.json_response({}),
    "null": lambda: web.json_response(None),
    "no status": lambda: web.json_response({"status": None}),
    "too deep": lambda: web.Response(text="[" * 100_000),
}


@pytest.mark.parametrize("answer", NONSENSE)
async def test_nonsense_is_no_answer(api: JobsApi, jobs: Jobs, answer: str) -> None:
    for path in (f"/api/jobs/{ID}", "/api/v0/actors"):
        api.instead[path] = NONSENSE[answer]
    for asked in (jobs.info(ID), jobs.state("actors"), jobs.remains(ID, DRIVER)):
        with pytest.raises(JobsError):
            await asked


@pytest.mark.parametrize(
    "answer",
    [
        listed([], total=1),
        listed([], partial_failure_warning="1 of 2 sources failed"),
        {"result": False, "msg": "Failed to query GCS", "data": {"result": None}},
        {"result": True, "msg": "", "data": {"result": {"result": None, "total": 0}}},
    ],
    ids=["cut short", "partial", "failed", "no list"],
)
async def test_what_a_list_leaves_out_is_unknown_not_absent(api: JobsApi, jobs: Jobs, answer: dict[str, Any]) -> None:
    api.instead["/api/v0/placement_groups"] = lambda: web.json_response(answer)
    with pytest.raises(JobsError, match="placement_groups"):
        await jobs.remains(ID, DRIVER)


async def test_logs_are_kept_from_their_end(api: JobsApi, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOG", 5)
    api.add(ID)
    assert await jobs.logs(ID) == ""
    api.logs[ID] = "first line\nlast\n"
    assert await jobs.logs(ID) == "last\n"
    api.add(ID, "PENDING", driver_node_id=None)
    assert await jobs.logs(ID) == ""


# Stopping.


async def test_a_running_job_is_stopped_once_and_seen_terminal(api: JobsApi, jobs: Jobs) -> None:
    api.add(ID)
    info = await jobs.stop_to_terminal(ID)
    assert info
    assert (info.status, info.ray_job_id) == ("STOPPED", DRIVER)
    assert api.count(f"POST /api/jobs/{ID}/stop") == 1


@pytest.mark.parametrize("status", ["SUCCEEDED", "FAILED", "STOPPED"])
async def test_a_terminal_job_is_left_alone(api: JobsApi, jobs: Jobs, status: str) -> None:
    api.add(ID, status)
    info = await jobs.stop_to_terminal(ID)
    assert info
    assert info.status == status
    assert api.count("POST") == 0
    assert await jobs.stop_to_terminal("unknown") is None


async def test_a_pending_job_whose_stop_says_true_is_not_taken_for_stopped(api: JobsApi, jobs: Jobs) -> None:
    api.add(ID, "PENDING")
    with pytest.raises(JobsError, match="still PENDING"):
        await jobs.stop_to_terminal(ID, within_s=0.1)


async def test_a_stop_is_asked_for_again_until_it_works(
    api: JobsApi, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_AGAIN_S", 0.1)
    job = api.add(ID, "PENDING")

    def start_late() -> None:
        if api.count("POST") == 2:
            job["status"] = "RUNNING"

    api.before_status = start_late
    info = await jobs.stop_to_terminal(ID)
    assert info
    assert info.status == "STOPPED"
    assert api.count("POST") == 3


# What a terminal job left.

CLEANER = "PlacementGroupCleaner"
RUNTIME = f'{{"env_vars": {{"LANYARD_JOB": "{{\\"submission_id\\": \\"{ID}\\"}}"}}}}'


@pytest.mark.parametrize(
    ("actors", "groups", "left"),
    [
        ([], [], []),
        ([actor("RayTrainWorker", "DEAD")], [group("REMOVED")], []),
        ([actor("RayTrainWorker")], [], ["actor RayTrainWorker"]),
        ([actor("RayTrainWorker", "PENDING_CREATION")], [], ["actor RayTrainWorker"]),
        ([actor("RayTrainWorker", "RESTARTING")], [], ["actor RayTrainWorker"]),
        ([actor("TrainController", job_id="03000000")], [group("CREATED", creator_job_id="03000000")], []),
        ([actor("_AutoscalingCoordinatorActor", is_detached=True)], [], []),
        (
            [actor("_AutoscalingCoordinatorActor", is_detached=True), actor(CLEANER, is_detached=True)],
            [],
            [f"actor {CLEANER}"],
        ),
        ([], [group("CREATED")], ["placement group"]),
        ([], [group("PENDING"), group("RESCHEDULING")], ["placement group", "placement group"]),
        ([], [group("CREATED", creator_job_id="03000000")], []),
        (
            [actor("JobSupervisor", job_id=SUPERVISOR, name=f"_ray_internal_job_actor_{ID}")],
            [group("CREATED", creator_job_id=SUPERVISOR)],
            ["actor JobSupervisor"],
        ),
        ([actor("JobSupervisor", job_id=SUPERVISOR, name="_ray_internal_job_actor_other-train")], [], []),
    ],
    ids=[
        "nothing",
        "all ended",
        "a worker",
        "one being created",
        "one restarting",
        "another job's",
        "Ray's singleton",
        "the detached cleaner",
        "a group",
        "groups not placed",
        "another job's group",
        "the supervisor, whose groups are the agent's",
        "another's supervisor",
    ],
)
async def test_only_what_is_the_job_s_and_not_ended_remains(
    api: JobsApi, jobs: Jobs, actors: list[dict[str, Any]], groups: list[dict[str, Any]], left: list[str]
) -> None:
    api.state.update(actors=actors, placement_groups=groups)
    found = await jobs.remains(ID, DRIVER)
    assert len(found) == len(left)
    assert all(told.startswith(each) for told, each in zip(found, left, strict=True))


async def test_what_is_the_job_s_is_known_by_its_runtime_environment_where_the_driver_is_not(
    api: JobsApi, jobs: Jobs
) -> None:
    cleaner = actor(CLEANER, "DEAD", is_detached=True, serialized_runtime_env=RUNTIME)
    api.state.update(actors=[cleaner], placement_groups=[group("CREATED")])
    assert [each.split(" 0b")[0] for each in await jobs.remains(ID, None)] == ["placement group"]
    api.state["actors"] = []
    assert await jobs.remains(ID, None) == []


async def test_dead_nodes_are_not_alive(api: JobsApi, jobs: Jobs) -> None:
    api.state["nodes"] = [{"node_id": "a", "state": "ALIVE"}, {"node_id": "b", "state": "DEAD"}]
    assert list(await jobs.alive_nodes()) == ["a"]


# Submitting as an activity.


def submission(url: str, custody: CustodyStandIn, trainer: Path, storage: Any = None) -> Submission:
    client: Any = custody
    return Submission(client, storage, HostsStandIn(url).providers(), source(trainer, **{"application.py": ""}))


async def test_sent_twice_there_is_one_job(api: JobsApi, url: str, tmp_path: Path) -> None:
    custody = CustodyStandIn()
    submit = submission(url, custody, tmp_path).submit_job
    first = await environment().run(submit, JOB)
    again = await environment(attempt=2).run(submit, JOB)
    assert (first.adopted, again.adopted) == (False, True)
    assert len(api.orders) == 1
    assert [each.id for each in custody.claims] == [f"job/{ID}"] * 2
    assert custody.settled == [["settle", f"job/{ID}", "test.1"], ["settle", f"job/{ID}", "test.2"]]


async def test_a_lost_answer_is_looked_up_and_adopted(api: JobsApi, url: str, tmp_path: Path) -> None:
    api.lost = 1
    told = await environment().run(submission(url, CustodyStandIn(), tmp_path).submit_job, JOB)
    assert told.adopted
    assert len(api.orders) == 1


async def test_a_submission_that_failed_is_not_settled_and_tried_again(api: JobsApi, url: str, tmp_path: Path) -> None:
    custody = CustodyStandIn()
    api.instead["/api/jobs/"] = lambda: web.Response(status=500, text="No available agent to submit job")
    with pytest.raises(JobsError, match="No available agent"):
        await environment().run(submission(url, custody, tmp_path).submit_job, JOB)
    assert custody.settled == []


async def test_a_job_of_that_id_that_is_another_s_is_left_alone(api: JobsApi, url: str, tmp_path: Path) -> None:
    api.add(ID, metadata={"lanyard_run": "another"})
    with pytest.raises(ApplicationError, match="not this run's; it is left alone") as caught:
        await environment().run(submission(url, CustodyStandIn(), tmp_path).submit_job, JOB)
    assert caught.value.non_retryable
    assert api.jobs[ID]["status"] == "RUNNING"
    assert api.count("POST") == 0


async def test_a_refused_claim_sends_nothing(api: JobsApi, url: str, tmp_path: Path) -> None:
    custody = CustodyStandIn()
    custody.refusing = ApplicationError("custody is releasing", type="ClaimRefused", non_retryable=True)
    with pytest.raises(ApplicationError, match="releasing"):
        await environment().run(submission(url, custody, tmp_path).submit_job, JOB)
    assert api.asked == []


async def test_past_its_send_window_nothing_is_sent(
    api: JobsApi, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitting, "SEND_WINDOW_S", -1.0)
    with pytest.raises(ApplicationError, match="claiming again") as caught:
        await environment().run(submission(url, CustodyStandIn(), tmp_path).submit_job, JOB)
    assert not caught.value.non_retryable
    assert api.asked == [f"GET /api/jobs/{ID}"]


async def test_source_that_cannot_be_delivered_is_refused_before_anything_is_claimed(
    api: JobsApi, url: str, tmp_path: Path
) -> None:
    custody = CustodyStandIn()
    order = JOB.model_copy(update={"working_dir": str(tmp_path / "gone")})
    with pytest.raises(ApplicationError, match=r"^Rejected: workload\.working_dir: .*gone") as caught:
        await environment().run(submission(url, custody, tmp_path / "trainer").submit_job, order)
    assert caught.value.non_retryable
    assert custody.claims == []
    assert api.asked == []


async def test_records_are_saved_of_the_jobs_that_were(api: JobsApi, url: str, tmp_path: Path) -> None:
    api.add(ID, "SUCCEEDED")
    api.logs[ID] = "done\n"
    store = Objects()
    api.add("broken", "FAILED", driver_node_id=None)
    api.instead["/api/jobs/broken"] = lambda: web.Response(status=500, text="out of order")
    order = RecordsOrder(hosts=HOSTS, submissions=("broken", ID, "never-was"))
    with pytest.raises(ApplicationError, match="500 out of order"):
        await environment().run(submission(url, CustodyStandIn(), tmp_path, store).save_records, order)
    assert store.objects.keys() == {
        f"{IDENTITY.storage}/logs/{name}" for name in (f"{ID}.log", f"{ID}.status.json", "never-was.log")
    }
    assert store.objects[f"{IDENTITY.storage}/logs/{ID}.log"] == b"done\n"
    assert b'"status": "SUCCEEDED"' in store.objects[f"{IDENTITY.storage}/logs/{ID}.status.json"]
