"""The local provider adopts or creates, proves, and releases exactly what is the run's, whoever died in between.

Hosting services are the real ones with a light process in place of Ray (`tests/trainer/light_host.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from activities.hosts import AbsenceUnknown, HostsFailed, HostsNotReady, WrongContext
from activities.hosts.census import listeners
from activities.hosts.local import LocalHosts
from activities.hosts.plan import free_ports, make_plan, read_plan
from activities.token import run_token, secret_fingerprint
from trainer.processes import is_alive, look_up
from workflows.evidence import Hosts, HostsOrder, Identity

ROOT = Path(__file__).parents[2]
LIGHT_HOST = ROOT / "tests/trainer/light_host.py"
SECRET = b"a deployment secret of the tests"


class Refused(Exception):
    pass


def say(note: str) -> None:
    pass


def yes() -> None:
    pass


def no() -> None:
    raise Refused


def order_for(tmp_path: Path, run_key: str, **changes: Any) -> HostsOrder:
    storage = tmp_path / "storage" / run_key
    (storage / "custody").mkdir(parents=True, exist_ok=True)
    lease = {"schema": 1, "sequence": 1, "duration_s": 3600}
    (storage / "custody/lease.json").write_text(json.dumps(lease))
    identity = Identity(
        workflow_id="w",
        run_id="r",
        original_run_id="r",
        run_key=run_key,
        custody_id=f"custody-{run_key}",
        deployment="tests",
        storage=f"file://{storage}",
    )
    facts = {"identity": identity, "provider": "local", "count": 2, "device": "cpu", "lease_s": 3600}
    return HostsOrder.model_validate({**facts, "not_after_s": 3600, **changes})


def read(uri: str) -> bytes | None:
    path = Path(uri.removeprefix("file://"))
    return path.read_bytes() if path.exists() else None


def provider(tmp_path: Path, **environ: str) -> LocalHosts:
    return LocalHosts(
        tmp_path / "home",
        SECRET,
        read=read,
        service=[sys.executable, str(LIGHT_HOST)],
        environ={**os.environ, **environ},
    )


@pytest.fixture
def place(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.fixture
def run_key(request: pytest.FixtureRequest) -> str:
    return f"t-{os.getpid()}-{abs(hash(request.node.name)) % 10**10:010d}"


@pytest.fixture
def order(place: Path, run_key: str) -> Iterator[HostsOrder]:
    made = order_for(place, run_key)
    yield made
    hosts = provider(place)
    for claim in reversed(hosts.claims(made)):
        hosts.release(claim, made, say)
    assert mine(run_key) == []


def mine(run_key: str) -> list[int]:
    """An independent census: every process with the run's mark, by reading /proc here."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            if f"LANYARD_CUSTODY={run_key}".encode() in (each / "environ").read_bytes().split(b"\0"):
                found.append(int(each.name))
        except (OSError, ValueError):
            continue
    return sorted(found)


def prove(hosts: LocalHosts, order: HostsOrder, limit_s: float = 30.0) -> Hosts:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return hosts.prove(order, say)
        except HostsNotReady:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def services(place: Path, order: HostsOrder) -> list[dict[str, Any]]:
    directory = place / "home/hosts" / order.identity.run_key
    return [json.loads((directory / str(index) / "service.json").read_bytes()) for index in range(order.count)]


def release(hosts: LocalHosts, order: HostsOrder) -> None:
    for claim in reversed(hosts.claims(order)):
        step = hosts.release(claim, order, say)
        assert step.ok, step.detail
    for claim in hosts.claims(order):
        assert hosts.remaining(claim, order) == []


def test_hosts_come_up_are_proved_and_leave_nothing(place: Path, order: HostsOrder) -> None:
    hosts = provider(place)
    hosts.launch(order, yes, say)
    found = prove(hosts, order)
    assert [(each.index, each.role, each.node_id) for each in found.hosts] == [
        (0, "head", "node0"),
        (1, "worker", "node1"),
    ]
    assert found.hosts[0].address != found.hosts[1].address
    assert len(mine(order.identity.run_key)) == 2 + 2 * 3
    plan = read_plan(place / "home/hosts" / order.identity.run_key)
    assert plan is not None
    cluster, service = hosts.claims(order)
    assert hosts.remaining(service, order) != []
    assert any("directory /tmp/" in each for each in hosts.remaining(cluster, order))
    release(hosts, order)
    assert mine(order.identity.run_key) == []
    assert not any(os.path.lexists(each) for each in plan.directories)
    assert [each["state"] for each in services(place, order)] == ["ended", "ended"]  # kept as evidence


def test_release_twice_is_fine_and_so_is_release_of_what_never_was(place: Path, order: HostsOrder) -> None:
    hosts = provider(place)
    release(hosts, order)
    release(hosts, order)


def test_after_release_a_late_launch_starts_nothing(place: Path, order: HostsOrder) -> None:
    hosts = provider(place)
    release(hosts, order)
    with pytest.raises(HostsFailed, match="was released"):
        hosts.launch(order, yes, say)
    assert mine(order.identity.run_key) == []


def test_a_second_launch_adopts_what_is_there(place: Path, order: HostsOrder) -> None:
    provider(place).launch(order, yes, say)
    prove(provider(place), order)
    before = services(place, order)
    provider(place).launch(order, no, say)  # asks for nothing
    assert services(place, order) == before


def test_launches_at_once_start_one_service_for_each_host(place: Path, order: HostsOrder) -> None:
    errors: list[BaseException] = []

    def launch() -> None:
        try:
            provider(place).launch(order, yes, say)
        except BaseException as error:
            errors.append(error)

    attempts = [threading.Thread(target=launch) for _ in range(4)]
    for each in attempts:
        each.start()
    for each in attempts:
        each.join()
    assert errors == []
    prove(provider(place), order)
    assert len(mine(order.identity.run_key)) == 2 + 2 * 3


def test_a_send_deadline_that_passed_sends_nothing(place: Path, order: HostsOrder) -> None:
    with pytest.raises(Refused):
        provider(place).launch(order, no, say)
    assert mine(order.identity.run_key) == []


def test_hosts_outlive_the_worker_that_launched_them(place: Path, order: HostsOrder) -> None:
    (place / "order.json").write_text(order.model_dump_json())
    code = (
        "import os, sys, signal; from pathlib import Path\n"
        "from tests.activities import test_local_hosts as t\n"
        "order = t.HostsOrder.model_validate_json((Path(sys.argv[1]) / 'order.json').read_bytes())\n"
        "t.provider(Path(sys.argv[1])).launch(order, t.yes, t.say)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    worker = subprocess.run([sys.executable, "-c", code, str(place)], cwd=ROOT, stdin=subprocess.DEVNULL)
    assert worker.returncode == -signal.SIGKILL
    hosts = provider(place)
    hosts.launch(order, no, say)
    assert len(prove(hosts, order).hosts) == 2
    release(hosts, order)


def test_a_worker_killed_between_two_hosts_is_continued(place: Path, order: HostsOrder) -> None:
    calls: list[None] = []

    def once() -> None:
        if calls:
            raise Refused
        calls.append(None)

    with pytest.raises(Refused):
        provider(place).launch(order, once, say)
    hosts = provider(place)
    hosts.launch(order, yes, say)
    assert len(prove(hosts, order).hosts) == 2


def test_a_dead_service_is_a_failure_and_never_started_again(place: Path, order: HostsOrder) -> None:
    hosts = provider(place)
    hosts.launch(order, yes, say)
    prove(hosts, order)
    os.kill(services(place, order)[1]["pid"], signal.SIGKILL)
    _until(lambda: look_up(services(place, order)[1]["pid"]) is None)
    for attempt in (lambda: hosts.prove(order, say), lambda: hosts.launch(order, yes, say)):
        with pytest.raises(HostsFailed, match="host 1 is dead without a word"):
            attempt()
    light = json.loads((place / "home/hosts" / order.identity.run_key / "1/light.json").read_bytes())
    orphans = [light["stubborn"], light["orphan"], light["silent"]]
    assert all(_runs(pid) for pid in orphans)  # nobody's children any more, the last one even without the mark
    release(hosts, order)
    assert not any(_runs(pid) for pid in orphans)
    assert mine(order.identity.run_key) == []


def test_a_failed_host_says_why(place: Path, order: HostsOrder) -> None:
    hosts = provider(place)
    hosts.launch(order, yes, say)
    prove(hosts, order)
    (place / "home/hosts" / order.identity.run_key / "0" / "die").write_text("")
    _until(lambda: services(place, order)[0]["state"] == "failed")
    with pytest.raises(HostsFailed, match=r"host 0 has failed \(ray_ended\).*something exploded"):
        hosts.prove(order, say)


def test_a_service_that_a_look_misses_while_it_replaces_its_program_is_not_given_up(
    place: Path, order: HostsOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an exec, /proc shows a process without arguments and environment for a moment."""
    hosts = provider(place)
    began = time.monotonic()
    coming, state = hosts._coming, hosts._state
    monkeypatch.setattr(hosts, "_state", lambda *of: state(*of) if time.monotonic() > began + 1.5 else None)
    monkeypatch.setattr(hosts, "_coming", lambda *of: coming(*of) if time.monotonic() > began + 1.5 else False)
    hosts.launch(order, yes, say)
    monkeypatch.undo()
    assert len(prove(hosts, order).hosts) == order.count


def test_a_private_directory_that_was_there_before_is_a_failure(place: Path, order: HostsOrder) -> None:
    (place / "home/hosts" / order.identity.run_key / "1").mkdir(parents=True)
    for each in (place / "home", place / "home/hosts", place / "home/hosts" / order.identity.run_key):
        each.chmod(0o700)
    with pytest.raises(HostsFailed, match=r"host 1 did not come to life: refused: .* already exists"):
        provider(place).launch(order, yes, say)


def test_a_node_that_is_no_host_of_the_run_fails_the_proof(place: Path, order: HostsOrder) -> None:
    hosts = provider(place)
    hosts.launch(order, yes, say)
    prove(hosts, order)
    nodes = Path(order.identity.storage.removeprefix("file://")) / "nodes"
    (nodes / "9.json").write_text(json.dumps({"node_id": "x", "node_ip": "127.9.9.9", "state": "ALIVE"}))
    with pytest.raises(HostsFailed, match=r"no host of this run are alive: 127\.9\.9\.9"):
        hosts.prove(order, say)
    (nodes / "9.json").unlink()
    gone = json.loads((nodes / "1.json").read_bytes())
    (nodes / "1.json").write_text(json.dumps({**gone, "state": "DEAD"}))
    with pytest.raises(HostsNotReady, match="does not show"):
        hosts.prove(order, say)


def test_another_secret_is_told_apart(place: Path, order: HostsOrder) -> None:
    hosts = provider(place)
    hosts.launch(order, yes, say)
    prove(hosts, order)
    other = LocalHosts(place / "home", b"another secret", read=read)
    with pytest.raises(HostsFailed, match="LANYARD_SECRET_FILE"):
        other.prove(order, say)


def test_a_claim_made_elsewhere_is_refused(place: Path, order: HostsOrder) -> None:
    hosts, elsewhere = provider(place), LocalHosts(place / "other", SECRET)
    for claim in elsewhere.claims(order):
        with pytest.raises(WrongContext, match="Run a worker there"):
            hosts.release(claim, order, say)
        with pytest.raises(WrongContext):
            hosts.remaining(claim, order)


def test_the_neighbour_s_run_and_bystanders_are_not_touched(place: Path, order: HostsOrder) -> None:
    hosts = provider(place)
    neighbour = order_for(place, order.identity.run_key + "x")
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", order.identity.run_key],
        cwd=place,
        env={**os.environ, "LANYARD_CUSTODY": order.identity.run_key + "y", "NOTE": order.identity.run_key},
    )
    (place / "home/hosts" / order.identity.run_key).mkdir(mode=0o700, parents=True)
    for directory in (place / "home", place / "home/hosts"):
        directory.chmod(0o700)
    person = subprocess.Popen(["sleep", "60"], cwd=place / "home/hosts" / order.identity.run_key)
    try:
        hosts.launch(order, yes, say)
        hosts.launch(neighbour, yes, say)
        prove(hosts, order)
        prove(hosts, neighbour)
        before = mine(neighbour.identity.run_key)
        release(hosts, order)
        assert mine(neighbour.identity.run_key) == before
        assert len(prove(hosts, neighbour).hosts) == 2
        assert bystander.poll() is None
        assert person.poll() is None
    finally:
        release(hosts, neighbour)
        for each in (bystander, person):
            each.kill()
            each.wait()


def test_a_process_that_hides_its_environment_makes_absence_unknown(
    place: Path, order: HostsOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = provider(place)
    make_plan_of(place, order)
    hidden = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if str(path) == f"/proc/{hidden.pid}/environ":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    try:
        with pytest.raises(AbsenceUnknown, match=f"process {hidden.pid}"):
            hosts.remaining(hosts.claims(order)[1], order)
    finally:
        monkeypatch.undo()
        hidden.kill()
        hidden.wait()


def test_an_unreadable_plan_makes_absence_unknown(place: Path, order: HostsOrder) -> None:
    hosts = provider(place)
    make_plan_of(place, order)
    plan = place / "home/hosts" / order.identity.run_key / "plan.json"
    before = plan.read_bytes()
    plan.write_text("{")
    with pytest.raises(AbsenceUnknown, match=r"plan\.json"):
        hosts.remaining(hosts.claims(order)[0], order)
    assert not hosts.release(hosts.claims(order)[0], order, say).ok
    plan.write_bytes(before)


def test_no_secret_of_the_worker_reaches_a_host_except_storage_s(place: Path, order: HostsOrder) -> None:
    hosts = provider(place, TEMPORAL_API_KEY="canary", AWS_SECRET_ACCESS_KEY="storage", LANYARD_SECRET_FILE="/s")
    hosts.launch(order, yes, say)
    prove(hosts, order)
    token = run_token(SECRET, order.identity.run_key)
    for pid in mine(order.identity.run_key):
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"canary" not in environ
        assert b"LANYARD_SECRET_FILE" not in environ
        assert b"AWS_SECRET_ACCESS_KEY=storage" in environ
        assert token.encode() not in environ + Path(f"/proc/{pid}/cmdline").read_bytes()
    release(hosts, order)
    left = [each for each in (place / "home").rglob("*") if each.is_file()]
    assert left
    assert not any(token.encode() in each.read_bytes() or b"canary" in each.read_bytes() for each in left)
    assert not any(each.stat().st_mode & 0o077 for each in left)


def test_a_worker_inside_a_run_launches_nothing(place: Path, order: HostsOrder) -> None:
    inside = provider(place, LANYARD_CUSTODY="another-run")
    with pytest.raises(HostsFailed, match="LANYARD_CUSTODY"):
        inside.launch(order, yes, say)
    assert any("LANYARD_CUSTODY" in each for each in inside.check(order))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"options": {"cpus": 0}}, "hosts.cpus"),
        ({"options": {"surprise": 1}}, "hosts.surprise"),
        ({"options": {"object_store_mb": 900_000}}, "GB of memory"),
        ({"device": "cuda"}, r"CUDA need a GPU each|CUDA profile"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_started(
    place: Path, run_key: str, changes: dict[str, Any], says: str
) -> None:
    import re

    problems = provider(place).check(order_for(place, run_key, **changes))
    assert any(re.search(says, each) for each in problems), problems


def test_a_home_that_others_can_write_is_said_before_anything_is_started(place: Path, order: HostsOrder) -> None:
    (place / "home").mkdir()
    (place / "home").chmod(0o777)
    assert any("others can write" in each for each in provider(place).check(order))
    with pytest.raises(HostsFailed, match="others can write"):
        provider(place).launch(order, yes, say)
    (place / "home").chmod(0o700)


def test_a_plan_is_made_once_and_runs_differ(place: Path, order: HostsOrder) -> None:
    first = make_plan_of(place, order)
    assert make_plan_of(place, order) == first
    other = order_for(place, order.identity.run_key + "x")
    second = make_plan_of(place, other)
    assert not set(first.addresses) & set(second.addresses)
    assert not set(first.directories) & set(second.directories)
    assert "127.0.0.1" not in first.addresses
    assert all(len(each) <= 30 for each in first.temp_dirs)


def test_a_listener_on_a_run_s_address_is_seen() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.66.5.4", 0))
        taken.listen()
        assert listeners(["127.66.5.4"]) == [f"port {taken.getsockname()[1]} at 127.66.5.4"]
        assert taken.getsockname()[1] not in free_ports(3)
    assert listeners(["127.66.5.4"]) == []


def test_tokens_differ_by_run_and_secret_and_a_fingerprint_shows_neither() -> None:
    tokens = {run_token(secret, key) for secret in (b"a", b"b") for key in ("x", "y")}
    assert len(tokens) == 4
    assert all(len(each) == 64 for each in tokens)
    assert secret_fingerprint(b"a") != secret_fingerprint(b"b")
    assert not any(secret_fingerprint(b"a") in each for each in tokens)


def make_plan_of(place: Path, order: HostsOrder) -> Any:
    directory = place / "home/hosts" / order.identity.run_key
    for each in (place / "home", place / "home/hosts", directory):
        each.mkdir(mode=0o700, exist_ok=True)
    return make_plan(directory, order)


def _runs(pid: int) -> bool:
    found = look_up(pid)
    return found is not None and found.running


def _until(condition: Callable[[], bool], limit_s: float = 15.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_exact_identity_survives_pid_reuse() -> None:
    me = look_up(os.getpid())
    assert me is not None
    assert is_alive(me.pid, me.start_time)
    assert not is_alive(me.pid, me.start_time + 1)
