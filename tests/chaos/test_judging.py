"""The judge finds each kind of wrong when it is planted, and nothing where all is right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.chaos.judging import Ended, Left, judge
from tests.chaos.lane import Lane
from tests.chaos.runs import PREFIX
from tests.chaos.scenarios import TRAINING, Scenario

KEY = "x-0123456789"
EXPORTS = f"exports/{KEY}-train"


class NoSuchKey(Exception):
    pass


class Objects:
    """Storage, as boto3 answers for it."""

    exceptions = SimpleNamespace(NoSuchKey=NoSuchKey)

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def get_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:
        name = Key.removeprefix(f"{PREFIX}/{KEY}/")
        if name not in self.objects:
            raise NoSuchKey
        return {"Body": SimpleNamespace(read=lambda: self.objects[name])}


class World:
    """A run that succeeded, in every respect; tests spoil one."""

    def __init__(self, home: Path) -> None:
        self.s3 = Objects()
        self.hosts = home / "hosts" / KEY
        (self.hosts / "0").mkdir(parents=True)
        self.scenario = Scenario("light", TRAINING, "worker", "succeeds")
        claims = [{"kind": "cluster"}]
        self.ended = Ended(
            status="COMPLETED",
            verdict={"outcome": "succeeded", "drill": {"proved": True}},
            custody={"cleanup": "clean", "claims": claims},
        )
        digest = hashlib.sha256(b"state").hexdigest()
        self.s3.objects = {
            f"{EXPORTS}/state.pt": b"state",
            f"{EXPORTS}/SHA256SUMS": f"{digest}  state.pt\n".encode(),
            "release.json": b'{"cleanup": "clean"}',
            "report.json": b'{"outcome": "succeeded", "artifacts": {"ok": true}}',
        }
        self.jobs(f"{KEY}-train", f"{KEY}-strike", f"{KEY}-train SUCCEEDED")
        for index in (0, 1):
            (self.hosts / f"{index}.log").write_text("2026 preparing\n2026 ready\n")

    def jobs(self, *lines: str) -> None:
        (self.hosts / "0" / "jobs.log").write_text("".join(f"{line}\n" for line in lines))

    def judged(self) -> tuple[str, list[str]]:
        lane = SimpleNamespace(s3=self.s3, home=SimpleNamespace(root=self.hosts.parents[1]))
        return judge(self.scenario, self.ended, Left(cast(Lane, lane), KEY))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_run_that_is_right_in_every_respect_is_right(world: World) -> None:
    assert world.judged() == ("succeeded", [])


def _half(world: World) -> None:
    world.s3.objects[f"{EXPORTS}/state.pt"] = b"sta"


def _missing(world: World) -> None:
    del world.s3.objects[f"{EXPORTS}/state.pt"]


def _absent(world: World) -> None:
    del world.s3.objects[f"{EXPORTS}/SHA256SUMS"]


def _unproved(world: World) -> None:
    world.ended.verdict["drill"]["proved"] = False


def _job_twice(world: World) -> None:
    world.jobs(f"{KEY}-train", f"{KEY}-train")


def _host_twice(world: World) -> None:
    (world.hosts / "1.log").write_text("2026 preparing\n2026 preparing\n")


def _custody_open(world: World) -> None:
    world.ended.custody_open = True


def _not_clean(world: World) -> None:
    assert world.ended.custody
    world.ended.custody["cleanup"] = "unproved"


def _no_release_record(world: World) -> None:
    del world.s3.objects["release.json"]


def _no_report(world: World) -> None:
    del world.s3.objects["report.json"]


def _called_failed(world: World) -> None:
    world.ended.status, world.ended.message = "FAILED", "cleanup struggled"
    world.ended.verdict = {"outcome": "failed"}
    world.s3.objects["report.json"] = b'{"outcome": "failed"}'


def _status_differs(world: World) -> None:
    world.ended.status = "FAILED"


PLANTED: list[tuple[Callable[[World], None], str]] = [
    (_half, "half and called whole"),
    (_missing, "half and called whole"),
    (_absent, "succeeded without artifacts"),
    (_unproved, "without the proof of its drill"),
    (_job_twice, "was submitted 2 times"),
    (_host_twice, "was begun 2 times"),
    (_custody_open, "custody has not closed"),
    (_not_clean, "last word is unproved"),
    (_no_release_record, "release.json does not say clean"),
    (_no_report, "report.json says None"),
    (_called_failed, "the run is called failed"),
    (_status_differs, "but Temporal shows FAILED"),
]


@pytest.mark.parametrize(("plant", "found"), PLANTED)
def test_each_planted_wrong_is_found(world: World, plant: Callable[[World], None], found: str) -> None:
    plant(world)
    _, wrong = world.judged()
    assert any(found in each for each in wrong), wrong


def test_artifacts_called_verified_in_the_report_of_a_run_that_could_not_speak_are_wrong(world: World) -> None:
    world.scenario = Scenario("light", TRAINING, "worker", "terminate")
    world.ended.status, world.ended.verdict = "TERMINATED", {}
    world.s3.objects["report.json"] = b'{"outcome": "terminated", "artifacts": {"ok": true}}'
    outcome, wrong = world.judged()
    assert outcome == "terminated"
    assert wrong == ["the report of a run that could not speak calls artifacts verified"]
