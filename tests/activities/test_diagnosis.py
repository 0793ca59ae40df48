"""Why a training failed or stalled, in a person's words; never an exception, and never slow."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from activities.diagnosis import LONGEST_LINE, diagnose, last_error
from activities.jobs import Endpoint, Jobs
from tests.activities.jobs_api import TOKEN, JobsApi, actor, group, node, served
from tests.activities.orders import JOB
from tests.activities.stand_ins import NOWHERE

ID = JOB.submission_id
HEALTHY = "every node is alive and nothing waits for resources: see the training's own log, s3://bucket/runs/w-0123456789/logs/w-0123456789-train.log"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", ""),
        ("\n \n", ""),
        ("a\nb\n", "a | b"),
        ("ValueError: first\nKeyError: 'second'\nbye", "KeyError: 'second'"),
        ("  ray.exceptions.ActorDiedError: the actor died\n", "ray.exceptions.ActorDiedError: the actor died"),
        ("torch.OutOfMemoryError: CUDA out of memory", "torch.OutOfMemoryError: CUDA out of memory"),
        ("(Worker pid=7) error: no space left\nbye", "(Worker pid=7) error: no space left"),
        ("SystemExit: 3\nbye", "SystemExit: 3"),
        (
            "ValueError: x\nlease keeper: stopped: lease expired: not renewed for 120 s\nConnectionError: bye",
            "lease keeper: stopped: lease expired: not renewed for 120 s",
        ),
        ("(Worker pid=7) lease keeper: stopped: no\nKeyError: 1", "KeyError: 1"),
        ("no errors so far\nstep 5", "no errors so far | step 5"),
        ("1\n2\n3\n4\n5\n6\n7", "2 | 3 | 4 | 5 | 6 | 7"),
    ],
)
def test_the_last_line_that_names_an_error_else_the_last_lines(log: str, said: str) -> None:
    assert last_error(log) == said


@pytest.mark.parametrize(
    "line", ["." * 5_000, "a." * 5_000, "1.2" * 5_000, "_" * 5_000, "x" * 9_000_000, "error " * 5_000]
)
def test_no_line_of_a_log_keeps_the_watcher_busy(line: str) -> None:
    began = time.process_time()
    told = last_error(f"{line}\n" * 20 if len(line) < 10**6 else line)
    assert time.process_time() - began < 2.0
    assert len(told) <= LONGEST_LINE


@pytest.fixture
def api() -> JobsApi:
    made = JobsApi()
    made.add(ID)
    made.state["nodes"] = [node("127.0.0.2"), node("127.0.0.3")]
    return made


@pytest.fixture
async def jobs(api: JobsApi) -> AsyncIterator[Jobs]:
    async with served(api) as url, Jobs.at(Endpoint(url, TOKEN)) as found:
        yield found


async def test_nothing_wrong_with_the_cluster_is_said_too(jobs: Jobs) -> None:
    assert await diagnose(jobs, JOB, None, "") == ("", HEALTHY)


@pytest.mark.parametrize(
    ("log", "state", "found"),
    [
        ("Worker exit type: NODE_OUT_OF_MEMORY", {}, "a worker ran out of memory"),
        ("torch.OutOfMemoryError: CUDA out of memory", {}, "a worker ran out of memory"),
        ("2 worker(s) were killed due to the node running low on memory.", {}, "a worker ran out of memory"),
        ("numpy: MemoryError: Unable to allocate 8. TiB", {}, "a worker ran out of memory"),
        ("ray.exceptions.ObjectStoreFullError: x", {}, "Ray's object store was full"),
        ("", {"nodes": [node("127.0.0.2"), node("127.0.0.3", "DEAD")]}, "only 1 of 2 Ray nodes are alive"),
        ("", {"nodes": []}, "only 0 of 2 Ray nodes are alive"),
        (
            "",
            {"placement_groups": [group("PENDING", {"CPU": 1.0}, {"CPU": 64.0, "GPU": 1.0})]},
            "waits for 2 bundle(s); no node can meet CPU 64, GPU 1",
        ),
        ("", {"placement_groups": [group("RESCHEDULING", {"CPU": 1.0})]}, "waits for 1 bundle(s)"),
        ("", {"actors": [actor("Trainer", "PENDING_CREATION")]}, "1 actor(s) wait to be created, first Trainer"),
    ],
)
async def test_each_cause_is_found(
    api: JobsApi, jobs: Jobs, log: str, state: dict[str, list[dict[str, Any]]], found: str
) -> None:
    api.logs[ID] = log
    api.state.update(state)
    assert found in (await diagnose(jobs, JOB, None, ""))[1]


@pytest.mark.parametrize(
    "log",
    [
        # Ray's words on a worker and on a raylet that were killed, Ray 2.58.
        "Potential root causes: (1) The process is killed by SIGKILL by OOM killer due to high memory usage.",
        "Some common causes include: (1) the process was killed by the OOM killer due to high memory usage",
        "(raylet) SIGKILL by the user or system OOM killer",
        "The actor's node died: raylet crashes unexpectedly (OOM, etc.)",
    ],
)
async def test_what_ray_says_of_every_hard_death_is_no_word_on_memory(api: JobsApi, jobs: Jobs, log: str) -> None:
    api.logs[ID] = log
    assert "memory" not in (await diagnose(jobs, JOB, None, ""))[1]


async def test_groups_and_actors_that_have_their_place_are_no_cause(api: JobsApi, jobs: Jobs) -> None:
    api.state["placement_groups"] = [group("CREATED", {"CPU": 64.0}), group("REMOVED", {"CPU": 64.0})]
    api.state["actors"] = [actor("RayTrainWorker"), actor("RayTrainWorker", "DEAD")]
    assert (await diagnose(jobs, JOB, None, ""))[1] == HEALTHY


async def test_where_there_is_no_log_the_job_s_own_message_counts(api: JobsApi, jobs: Jobs) -> None:
    api.add(ID, "FAILED", message="Job supervisor actor died: the node was lost")
    said, _ = await diagnose(jobs, JOB, await jobs.info(ID), "storage is slow")
    assert said == "Job supervisor actor died: the node was lost; storage is slow"


async def test_what_cannot_be_asked_is_said_to_be_unknown(api: JobsApi) -> None:
    async with Jobs.at(Endpoint(NOWHERE, TOKEN)) as nobody:
        said, found = await diagnose(nobody, JOB, None, "")
    assert said.startswith("its log cannot be read: GET /api/jobs/")
    assert found.startswith("the cluster's state cannot be read (GET /api/v0/nodes")


async def test_nonsense_from_the_cluster_is_unknown_as_well(api: JobsApi, jobs: Jobs) -> None:
    api.instead[f"/api/jobs/{ID}"] = api.instead["/api/v0/actors"] = web.Response
    said, found = await diagnose(jobs, JOB, None, "")
    assert "its log cannot be read" in said
    assert "the cluster's state cannot be read" in found


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Job entrypoint command failed with exit code 137, last available logs", "killed by SIGKILL (exit code 137)"),
        ("Job entrypoint command failed with exit code -15, last available logs", "killed by SIGTERM (exit code -15)"),
        ("Job entrypoint command failed with exit code 1, last available logs", ""),
        ("Job supervisor actor died", ""),
    ],
)
async def test_a_driver_that_was_killed_is_said_to_be(api: JobsApi, jobs: Jobs, message: str, said: str) -> None:
    api.add(ID, "FAILED", message=message)
    api.logs[ID] = "at: Che;\nstep 12 loss 0.1\n"
    told, _ = await diagnose(jobs, JOB, await jobs.info(ID), "")
    assert said in told
    assert told.startswith("the driver was killed") == bool(said)
