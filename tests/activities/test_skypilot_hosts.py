"""Hosts that SkyPilot rents: what is asked of it, whose jobs are whose, and release with whatever still answers.

SkyPilot and Slurm are scripted here, because what is tested is what they do seldom: lose a request, forget a cluster,
die, keep a job of another owner. What they do usually is tested on the real ones, in tests/hosts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from activities.hosts import AbsenceUnknown, HostsFailed, HostsNotReady, WrongContext
from activities.hosts.skypilot import provider, task
from activities.hosts.skypilot.bridge import VERSION, BridgeError, NoSkyPilot, SkyPilot
from activities.hosts.skypilot.infrastructure import SEPARATOR, known_slurms, parse, slurm_of, sort
from activities.hosts.skypilot.provider import SkyPilotHosts
from activities.token import run_token
from tests.activities.orders import HOSTS, IDENTITY
from workflows.evidence import HostsOrder, Mark

OPTIONS = {"infra": "slurm/netns", "cpus": "2", "memory": "4"}
ORDER = HOSTS.model_copy(update={"provider": "skypilot", "options": OPTIONS})
CLUSTER = task.cluster_name(IDENTITY.run_key)
SERVICE = task.service_name(IDENTITY.run_key)
MARK = task.mark_text(IDENTITY)
SECRET = b"the deployment's secret, of enough bytes"
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "canary", "AWS_ENDPOINT_URL": "http://10.0.0.1:9000"}


def say(note: str) -> None:
    pass


def job(number: str = "7", state: str = "RUNNING", *, name: str = f"{CLUSTER}-0a1b2c3d", comment: str = MARK) -> str:
    return SEPARATOR.join((number, state, name, "n[1-2]", comment or "(null)"))


@dataclass
class Cluster:
    """Slurm: its queue, and what was asked of it. `down` answers nothing."""

    jobs: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    down: bool = False

    def run(self, command: Sequence[str]) -> str:
        if self.down:
            raise AbsenceUnknown("the login node does not answer")
        self.asked.append(" ".join(command[:1] if command[0] == "squeue" else command))
        if "--steps" in command:
            return "\n".join(self.steps)
        if command[0] == "scancel" and "." in command[-1]:
            self.steps = [each for each in self.steps if each.split(SEPARATOR)[0] != command[-1]]
        elif command[0] == "scancel":
            self.jobs = [each for each in self.jobs if each.split(SEPARATOR)[0] != command[-1]]
        return "\n".join(self.jobs)


class Scripted(SkyPilot):
    """SkyPilot: an answer for each command, or an error, or what is done when it is asked."""

    def __init__(self, answers: dict[str, Any], home: Path) -> None:
        super().__init__(python=Path("/nowhere/python"), home=home, environ={})
        object.__setattr__(self, "answers", answers)
        object.__setattr__(self, "asked", [])

    def call(self, command: str, *, limit_s: float, note: Callable[[str], None] = say, **asked: Any) -> Any:
        self.asked.append((command, asked))  # type: ignore[attr-defined]
        answer = self.answers[command]  # type: ignore[attr-defined]
        if callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            note(answer)
        return answer

    @property
    def commands(self) -> list[str]:
        return [command for command, _ in self.asked]  # type: ignore[attr-defined]


@dataclass
class World:
    slurm: Cluster
    sky: Scripted
    hosts: SkyPilotHosts
    objects: dict[str, bytes]
    sent: list[str]

    def answers(self, **more: Any) -> None:
        self.sky.answers.update(more)  # type: ignore[attr-defined]

    def may_send(self) -> None:
        self.sent.append("launch")


def row(**more: Any) -> dict[str, Any]:
    return {"status": "UP", "autodown_minutes": task.AUTODOWN_MINUTES, "nodes": 2, "on_cloud": "x", "word": "", **more}


def look(*, up: bool = True, service: str = "RUNNING", launches: Sequence[str] = ()) -> dict[str, Any]:
    over = service not in ("RUNNING", "PENDING", "INIT", "SETTING_UP")
    queue = [{"id": 1, "name": SERVICE, "status": service, "over": over}] if up and service else []
    return {"version": VERSION, "row": row() if up else None, "queue": queue, "launches": list(launches)}


@pytest.fixture
def world(tmp_path: Path) -> World:
    tmp_path.chmod(0o700)
    objects: dict[str, bytes] = {}
    slurm, sky = Cluster(), Scripted({}, tmp_path / "sky")
    (tmp_path / "sky/.slurm").mkdir(parents=True)
    (tmp_path / "sky/.slurm/config").write_text("Host netns\n  HostName login\nHost *\n")
    hosts = SkyPilotHosts(
        tmp_path / "home",
        SECRET,
        sky,
        read=objects.get,
        write=objects.__setitem__,
        slurm=lambda cluster: slurm.run,
        environ=KEYS,
    )
    return World(slurm, sky, hosts, objects, [])


def launches(world: World) -> None:
    """SkyPilot as it is when all goes well."""

    def appear() -> dict[str, Any]:
        world.slurm.jobs.append(job())
        world.answers(look=look())
        return {"status": "SUCCEEDED", "message": ""}

    world.answers(look=look(up=False), launch={"request": "r1"}, follow=appear, ssh={"config": "x", "key": "y"})


# -- names and the task


def test_a_cluster_name_is_accepted_everywhere_and_unique() -> None:
    long = "nightly-regression-of-the-whole-t-0123456789"
    assert task.cluster_name(long) == "ly-nightly-regressi-0123456789"
    assert task.cluster_name("7-x-0123456789") == "ly-7-x-0123456789"
    for key in (long, "7-x-0123456789", "a-b-c-d-e-f-g-h-i-j-0123456789"):
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", task.cluster_name(key))
        assert len(task.cluster_name(key)) <= 30
        assert re.fullmatch("[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*", task.service_name(key))
        assert len(task.stem(key)) == 13
        assert 20_000 <= task.first_port(key) <= 31_980


def test_no_secret_is_in_what_skypilot_records_and_the_mark_has_no_blank(world: World, tmp_path: Path) -> None:
    launches(world)
    world.hosts.launch(ORDER, world.may_send, say)
    [(_, asked)] = [each for each in world.sky.asked if each[0] == "launch"]  # type: ignore[attr-defined]
    text = json.dumps(asked)
    assert run_token(SECRET, IDENTITY.run_key) not in text
    assert "canary" not in text
    assert asked["task"]["config"]["slurm"]["sbatch_options"]["comment"] == MARK
    assert not re.search(r"\s", MARK)
    assert "envs" not in asked["task"]
    assert "exec python3" in asked["task"]["run"]
    [brought] = asked["task"]["file_mounts"].values()
    assert json.loads(Path(brought, "storage.json").read_bytes()) == KEYS
    assert Path(brought, "token").read_text() == run_token(SECRET, IDENTITY.run_key)
    assert Path(brought, "trainer", "rented_host.py").is_file()
    private = [Path(brought), *(Path(brought, name) for name in ("host.json", "storage.json", "token"))]
    assert [each.stat().st_mode & 0o777 for each in private] == [0o700, 0o600, 0o600, 0o600]


# -- whose


@pytest.mark.parametrize(
    ("line", "whose"),
    [
        (job(), "ours"),
        (job(comment=""), "unmarked"),
        (job(comment=MARK + "x"), "foreign"),
        (job(comment="mine"), "foreign"),
        (job(comment=task.mark_text(IDENTITY.model_copy(update={"deployment": "another"}))), "foreign"),
        (job(name=CLUSTER), ""),
        (job(name=f"x{CLUSTER}-0a1b2c3d"), ""),
        (job(name=CLUSTER.replace("9", "8") + "-0a1b2c3d"), ""),
    ],
)
def test_a_job_is_ours_by_its_name_and_its_mark_together(line: str, whose: str) -> None:
    found = sort(parse(line), ORDER)
    assert [name for name in ("ours", "unmarked", "foreign") if getattr(found, name)] == ([whose] if whose else [])


@pytest.mark.parametrize("line", ["7", "x\x1fRUNNING\x1fn\x1fr\x1fc", job() + "\x1fmore"])
def test_a_line_that_cannot_be_read_is_not_nothing(line: str) -> None:
    with pytest.raises(AbsenceUnknown, match="cannot be read"):
        parse(line)


def test_where_slurm_is_is_read_from_skypilots_own_file(tmp_path: Path) -> None:
    assert known_slurms(tmp_path) == []
    (tmp_path / ".slurm").mkdir()
    (tmp_path / ".slurm/config").write_text("host a b\n  HostName x\nHost *\n Host c?\n")
    assert known_slurms(tmp_path) == ["a", "b"]
    assert [slurm_of(each) for each in ("slurm/a", "slurm/a/gpu", "slurm", "k8s/a", "aws")] == [
        "a",
        "a",
        None,
        None,
        None,
    ]


# -- before anything is paid for


def fine(world: World) -> None:
    world.answers(
        server={"client": VERSION, "server": VERSION},
        enabled={"enabled": True, "clouds": ["slurm"]},
        plan={"accelerators": {}},
    )


def test_a_place_that_is_ready_has_no_problem(world: World) -> None:
    fine(world)
    assert world.hosts.check(ORDER) == []


@pytest.mark.parametrize(
    ("answers", "options", "words"),
    [
        ({"server": {"client": VERSION, "server": "0.15.0"}}, {}, "server 0.15.0"),
        ({"server": NoSkyPilot("Timeout", "it did not answer")}, {}, "SkyPilot does not answer: it did not answer"),
        ({"enabled": {"enabled": False, "clouds": []}}, {}, "slurm not enabled (nothing is)"),
        ({"plan": BridgeError("ResourcesUnavailableError", "no B300")}, {}, "no B300"),
        ({"plan": {"accelerators": {"B200": 1.0}}}, {"accelerators": "b200:1"}, "b200 is spelled B200"),
        ({}, {"infra": "nebius"}, "use slurm/<cluster>"),
        ({}, {"infra": "slurm/other"}, "other is not in"),
    ],
)
def test_what_is_wrong_is_said_before_anything_exists(
    world: World, answers: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    fine(world)
    world.answers(**answers)
    [problem] = world.hosts.check(ORDER.model_copy(update={"options": {**OPTIONS, **options}}))
    assert words in problem
    assert world.objects == {}
    assert "launch" not in world.sky.commands


def test_a_name_that_is_taken_and_an_infrastructure_that_is_silent_are_problems(world: World) -> None:
    fine(world)
    world.slurm.jobs = [job(comment="somebody")]
    assert "has this run's name and is not marked as its own" in world.hosts.check(ORDER)[0]
    world.slurm.jobs = [job()]
    assert world.hosts.check(ORDER) == []
    world.slurm.down = True
    assert "without it nothing could be proved released" in world.hosts.check(ORDER)[0]


def test_storages_keys_and_an_address_that_hosts_reach_are_needed(world: World, tmp_path: Path) -> None:
    fine(world)
    for keys, words in (
        ({}, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY must be in"),
        ({**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}, "on this machine's loopback"),
    ):
        hosts = SkyPilotHosts(tmp_path, SECRET, world.sky, slurm=lambda cluster: world.slurm.run, environ=keys)
        [problem] = hosts.check(ORDER)
        assert words in problem


# -- launch


def test_a_launch_is_marked_first_sent_once_and_believed_only_when_seen(world: World) -> None:
    launches(world)
    world.hosts.launch(ORDER, world.may_send, say)
    assert world.sent == ["launch"]
    assert Mark.model_validate_json(world.objects[task.mark_uri(IDENTITY.storage)]).hosts == ORDER
    world.hosts.launch(ORDER, world.may_send, say)
    assert world.sent == ["launch"]
    assert world.sky.commands.count("launch") == 1


def test_a_launch_under_way_is_followed_and_not_sent_again(world: World) -> None:
    launches(world)
    world.answers(look=look(up=False, launches=["r0"]))
    world.hosts.launch(ORDER, world.may_send, say)
    assert world.sent == []
    assert [asked["request"] for command, asked in world.sky.asked if command == "follow"] == ["r0"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        ({"follow": {"status": "FAILED", "message": "ResourcesUnavailableError: no\n quota"}}, HostsFailed, "no quota"),
        ({"follow": {"status": "CANCELLED", "message": ""}}, HostsFailed, "cancelled"),
        ({"follow": {"status": "UNKNOWN", "message": "forgotten"}}, HostsNotReady, "lost the launch"),
        ({"follow": {"status": "SUCCEEDED", "message": ""}}, HostsNotReady, "does not run its service"),
        ({"look": NoSkyPilot("Timeout", "silent")}, HostsNotReady, "SkyPilot does not answer: silent"),
        (
            {"look": look(service="FAILED"), "log": {"text": "a\nrefused: x"}},
            HostsFailed,
            "ended .FAILED.: a / ref",
        ),
        ({"look": {**look(), "version": "0.13.0"}}, HostsFailed, "is 0.13.0"),
    ],
)
def test_a_launch_that_fails_says_why_in_skypilots_own_words(
    world: World, answers: dict[str, Any], error: type[Exception], words: str
) -> None:
    launches(world)
    world.answers(**answers)
    with pytest.raises(error, match=words):
        world.hosts.launch(ORDER, world.may_send, say)


def test_what_slurm_will_never_start_is_not_waited_for(world: World) -> None:
    launches(world)
    world.answers(follow="Launching (pending: PartitionNodeLimit; partition: main)")
    with pytest.raises(HostsFailed, match=r"never start .*PartitionNodeLimit.*fewer"):
        world.hosts.launch(ORDER, world.may_send, say)


@pytest.mark.parametrize("comment", ["", "somebody"])
def test_a_cluster_of_our_name_that_is_not_marked_as_ours_is_not_adopted(world: World, comment: str) -> None:
    launches(world)
    world.slurm.jobs = [job(comment=comment)]
    with pytest.raises(HostsFailed, match="it is not touched"):
        world.hosts.launch(ORDER, world.may_send, say)
    assert "launch" not in world.sky.commands


def test_without_autodown_or_mark_a_launch_is_no_success(world: World) -> None:
    launches(world)

    def unmarked() -> dict[str, Any]:
        world.slurm.jobs.append(job(comment=""))
        world.answers(look=look())
        return {"status": "SUCCEEDED", "message": ""}

    world.answers(follow=unmarked)
    with pytest.raises(HostsFailed, match="not its mark"):
        world.hosts.launch(ORDER, world.may_send, say)
    world.slurm.jobs = [job()]
    world.answers(look={**look(), "row": row(autodown_minutes=-1)})
    with pytest.raises(HostsFailed, match="did not set autodown"):
        world.hosts.launch(ORDER, world.may_send, say)


# -- up


@pytest.mark.parametrize(
    ("jobs", "steps", "service", "words"),
    [
        ([], [], "RUNNING", "no longer has the run's hosts"),
        ([job(state="NODE_FAIL")], [], "RUNNING", "NODE_FAIL .*Slurm has ended the run's hosts"),
        ([job()], [], "FAILED", r"the service task 1 has ended \(FAILED\): refused"),
        ([job()], [], "RUNNING", ""),
        ([job()], ["7.1\x1fsky-1"], "FAILED", ""),
    ],
)
def test_waiting_for_hosts_ends_where_it_is_in_vain(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    jobs: list[str],
    steps: list[str],
    service: str,
    words: str,
) -> None:
    monkeypatch.setattr(provider, "LOOK_AT_SERVICE_S", 0.0)
    world.slurm.jobs, world.slurm.steps = jobs, steps
    world.answers(look=look(service=service), log={"text": "refused"})
    with pytest.raises(HostsFailed if words else HostsNotReady, match=words or "host 0 has not written its receipt"):
        world.hosts.prove(ORDER, say)
    world.slurm.down = True
    with pytest.raises(HostsNotReady if service == "RUNNING" else HostsFailed):
        world.hosts.prove(ORDER, say)


# -- release


def claim(world: World, kind: str, order: HostsOrder = ORDER) -> Any:
    return next(each for each in world.hosts.claims(order) if each.kind == kind)


def going_down(world: World) -> dict[str, Any]:
    world.slurm.jobs = []
    return {"known": True, "status": "SUCCEEDED", "message": ""}


def hosts_end(world: World) -> None:
    """The hosts, which find the word in storage."""
    inner = world.slurm.run

    def run(command: Sequence[str]) -> str:
        if task.end_uri(IDENTITY.storage) in world.objects:
            world.slurm.steps = []
        return inner(command)

    world.slurm.run = run  # type: ignore[method-assign]


def test_release_goes_from_the_task_to_the_cluster_and_forgets_the_secrets(world: World, tmp_path: Path) -> None:
    launches(world)
    world.hosts.launch(ORDER, world.may_send, say)
    world.slurm.steps = [f"7.3{SEPARATOR}sky-1"]
    hosts_end(world)
    world.answers(
        cancel_launches={"cancelled": []},
        down=lambda: going_down(world),
    )
    steps = [world.hosts.release(each, ORDER, say) for each in reversed(world.hosts.claims(ORDER))]
    assert [each.ok for each in steps] == [True, True]
    assert [each.claim.partition("/")[0] for each in steps] == ["service", "cluster"]
    assert world.slurm.asked.count("squeue") > 0
    assert not any(each.startswith("scancel") for each in world.slurm.asked)
    for each in world.hosts.claims(ORDER):
        assert world.hosts.remaining(each, ORDER) == []
    assert not (tmp_path / "home/skypilot-runs" / IDENTITY.run_key).exists()


def test_with_skypilot_dead_the_exact_step_and_job_are_ended_at_slurm_and_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = NoSkyPilot("ApiServerConnectionError", "refused")
    world.answers(cancel_service=dead, cancel_launches=dead, down=dead)
    others = [job("8", comment="somebody"), job("9", name="train"), job("10", name="ly-x-0123456780-0a1b2c3d")]
    world.slurm.jobs = [job("7"), *others]
    world.slurm.steps = [SEPARATOR.join(each) for each in (("7.3", "sky-1"), ("7.batch", "batch"), ("8.3", "sky-1"))]
    monkeypatch.setattr(provider, "ASKED_S", 0.0)
    monkeypatch.setattr(provider, "CANCELLED_S", 0.0)
    task_ended = world.hosts.release(claim(world, "service"), ORDER, say)
    assert task_ended.ok
    assert task.end_uri(IDENTITY.storage) in world.objects
    assert "Slurm told to end step 7.3" in task_ended.detail
    assert len(world.slurm.steps) == 2
    step = world.hosts.release(claim(world, "cluster"), ORDER, say)
    assert step.ok, step
    assert "Slurm told to end job 7" in step.detail
    assert world.slurm.jobs == others
    ended = [each for each in world.slurm.asked if each.startswith("scancel")]
    assert ended == ["scancel 7.3", f"scancel --name={CLUSTER}-0a1b2c3d 7"]


def test_skypilot_is_not_asked_to_take_down_what_has_our_name_and_is_not_ours(world: World) -> None:
    world.answers(cancel_launches={"cancelled": []}, down=lambda: pytest.fail("it goes by the name"))
    world.slurm.jobs = [job("7"), job("8", comment="somebody")]
    step = world.hosts.release(claim(world, "cluster"), ORDER, say)
    assert step.ok
    assert world.slurm.jobs == [job("8", comment="somebody")]


def test_what_cannot_be_told_is_not_absent(world: World) -> None:
    mine = claim(world, "cluster")
    world.slurm.jobs = [job(comment="")]
    with pytest.raises(AbsenceUnknown, match="no mark"):
        world.hosts.remaining(mine, ORDER)
    world.slurm.down = True
    with pytest.raises(AbsenceUnknown):
        world.hosts.remaining(mine, ORDER)
    with pytest.raises(AbsenceUnknown):
        world.hosts.release(mine, ORDER, say)
    with pytest.raises(WrongContext):
        world.hosts.remaining(mine.model_copy(update={"context": "elsewhere"}), ORDER)


@pytest.mark.parametrize(("state", "left"), [("RUNNING", 1), ("PENDING", 1), ("COMPLETING", 1), ("CANCELLED", 0)])
def test_a_job_is_left_until_slurm_has_ended_it(world: World, state: str, left: int) -> None:
    world.slurm.jobs = [job(state=state)]
    assert len(world.hosts.remaining(claim(world, "cluster"), ORDER)) == left


# -- inventory


def test_the_inventory_is_what_slurm_has_with_the_mark_that_storage_keeps(world: World) -> None:
    mark = Mark(context=world.hosts.context(ORDER), hosts=ORDER)
    world.objects[task.mark_uri(IDENTITY.storage)] = mark.model_dump_json().encode()
    other = IDENTITY.model_copy(update={"run_key": "y-0000000000", "storage": "s3://bucket/runs/y-0000000000"})
    world.slurm.jobs = [
        job(),
        job("8", name="train", comment=""),
        job("9", name="ly-z-0123456780-0a1b2c3d", comment=""),
        job("10", name="ly-y-0000000000-0a1b2c3d", comment=task.mark_text(other)),
        job("11", name="stolen", comment=MARK),
        job("12", state="CANCELLED"),
    ]
    found = world.hosts.inventory(10)
    assert found.marked == (mark,)
    assert [each.split()[3] for each in found.unmarked] == ["9"]
    assert [re.findall(r"job (\d+)", each)[0] for each in found.unreadable] == ["10", "11"]
    world.slurm.down = True
    assert world.hosts.inventory(10).unreadable == ("slurm/netns: the login node does not answer",)
