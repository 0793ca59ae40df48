"""One hosting service ends everything it started, for every reason there is, and starts nothing it must not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainer import hosting, ray_node
from trainer.private import NotPrivate
from trainer.processes import look_up

ROOT = Path(__file__).parents[2]
LIGHT_HOST = Path(__file__).with_name("light_host.py")


def wait_for(condition: Callable[[], Any], what: str, limit_s: float = 20.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not come within {limit_s} s"
        time.sleep(0.02)
    return found


def running(pid: int) -> bool:
    found = look_up(pid)
    return found is not None and found.running


@dataclass
class Host:
    """One host below a fresh directory, run in the foreground of a child process."""

    root: Path
    order: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def private(self) -> Path:
        return Path(self.order["private_dir"])

    @property
    def storage(self) -> Path:
        return self.root / "storage"

    @property
    def state(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.private / "service.json").read_bytes())
        except FileNotFoundError:
            return {"state": ""}
        return found

    @property
    def pids(self) -> list[int]:
        light = json.loads((self.private / "light.json").read_bytes())
        return [light["ray"], light["stubborn"], light["orphan"], light["silent"]]

    @property
    def log(self) -> str:
        return (self.root / "host.log").read_text()

    def lease(self, sequence: int = 1, duration_s: float = 3600.0) -> None:
        (self.storage / "custody").mkdir(parents=True, exist_ok=True)
        whole = self.storage / "custody/lease.tmp"
        whole.write_text(json.dumps({"schema": 1, "sequence": sequence, "duration_s": duration_s}))
        whole.rename(self.storage / "custody/lease.json")

    def tombstone(self) -> None:
        (self.storage / "custody").mkdir(parents=True, exist_ok=True)
        (self.storage / "custody/tombstone.json").write_text("{}")

    def start(self) -> None:
        path = self.root / "order.json"
        path.write_text(json.dumps(self.order))
        path.chmod(0o600)
        with (self.root / "host.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(LIGHT_HOST), "--order", str(path)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
                stdout=log,
                stderr=log,
            )

    def start_and_wait(self) -> None:
        self.start()
        wait_for(lambda: self.state["state"] == "ready", "ready")

    def ended(self, limit_s: float = 20.0) -> int:
        assert self.process is not None
        return self.process.wait(limit_s)

    def nothing_left(self) -> bool:
        places = [self.order["temp_dir"], self.order["shared_memory_dir"], str(ray_node.token_path(self.order))]
        return not any(map(running, self.pids)) and not any(map(os.path.lexists, places))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    probes = [socket.socket() for _ in range(5)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    short = f"/tmp/lt-{os.getpid()}-{ports[0]}"
    token = tmp_path / "token"
    token.write_text("a-token")
    token.chmod(0o600)
    order = {
        "schema": 1,
        "run_key": "test-0123456789",
        "index": 0,
        "role": "head",
        "device": "cpu",
        "storage": f"file://{tmp_path}/storage",
        "private_dir": str(tmp_path / "private"),
        "temp_dir": short,
        "shared_memory_dir": f"/dev/shm/{Path(short).name}",
        "token_file": str(token),
        "address": "127.77.0.2",
        "interface": "lo",
        "gpus": [],
        "environments": "",
        "not_after_s": 3600,
        "ray": {
            "head_address": "127.77.0.2",
            "gcs_port": ports[0],
            "dashboard_host": "127.77.0.2",
            "dashboard_port": ports[1],
            "agent_port": ports[2],
            "client_port": ports[3],
            "runtime_env_port": ports[4],
            "worker_ports": [0, 0],
            "num_cpus": 2,
            "object_store_bytes": 200_000_000,
        },
    }
    made = Host(tmp_path, order)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.terminate()
        made.process.wait(20)


def test_told_to_end_it_ends_every_descendant_and_removes_what_it_made(host: Host) -> None:
    host.lease()
    host.start_and_wait()
    assert all(map(running, host.pids))
    assert host.process is not None
    host.process.send_signal(signal.SIGTERM)
    assert host.ended() == 0
    assert host.nothing_left()
    assert (host.state["state"], host.state["reason"]) == ("ended", "told")


def test_an_orphan_becomes_the_service_s_own_child(host: Host) -> None:
    host.lease()
    host.start_and_wait()
    assert host.process is not None
    orphan = look_up(host.pids[2])
    assert orphan is not None
    assert orphan.parent == host.process.pid


def test_state_and_receipt_name_the_process_exactly(host: Host) -> None:
    host.lease()
    host.start_and_wait()
    receipt = json.loads((host.storage / "hosts/0/receipt.json").read_bytes())
    assert host.process is not None
    me = look_up(host.process.pid)
    assert me is not None
    assert (host.state["pid"], host.state["start_time"]) == (me.pid, me.start_time)
    assert (receipt["process"]["pid"], receipt["process"]["start_time"]) == (me.pid, me.start_time)
    assert receipt["ray"] == {
        "node_id": "node0",
        "dashboard_url": ray_node.dashboard_url(host.order),
        "version": "2.58.0",
    }
    assert (host.private / "service.json").stat().st_mode & 0o777 == 0o600


def test_without_a_lease_nothing_is_started(host: Host) -> None:
    host.start()
    assert host.ended() == 0
    assert (host.state["state"], host.state["reason"]) == ("ended", "no_lease")
    assert not (host.private / "light.json").exists()
    assert not os.path.lexists(host.order["temp_dir"])


def test_a_tombstone_found_at_the_start_stops_it_at_once(host: Host) -> None:
    host.lease()
    host.tombstone()
    host.start()
    assert host.ended() == 0
    assert host.state["reason"] == "tombstone"
    assert not (host.private / "light.json").exists()


def test_a_tombstone_raised_later_ends_everything(host: Host) -> None:
    host.lease()
    host.start_and_wait()
    host.tombstone()
    assert host.ended(10) == 0
    assert host.state["reason"] == "tombstone"
    assert host.nothing_left()


def test_a_running_host_leaves_a_release_the_time_for_its_order(host: Host) -> None:
    host.environment["LIGHT_TIMING"] = json.dumps({"tombstone_grace_s": 2.0})
    host.lease()
    host.start_and_wait()
    host.tombstone()
    time.sleep(1.0)
    assert all(map(running, host.pids))
    assert host.ended(10) == 0
    assert host.state["reason"] == "tombstone"


def test_with_the_tombstone_a_word_in_storage_ends_a_host_at_once_and_without_it_nothing(host: Host) -> None:
    """As a signal does, where nobody can send one."""
    host.environment["LIGHT_TIMING"] = json.dumps({"tombstone_grace_s": 60.0})
    host.lease()
    host.start_and_wait()
    word = host.storage / hosting.END
    word.parent.mkdir(exist_ok=True)
    word.write_bytes(b"{}")
    time.sleep(1.0)
    assert all(map(running, host.pids))
    host.tombstone()
    assert host.ended(10) == 0
    assert (host.state["reason"], host.state["detail"]) == ("told", "told to end by a word in storage")
    assert host.nothing_left()


def test_a_lease_that_is_not_renewed_ends_everything(host: Host) -> None:
    host.lease(duration_s=3.0)
    host.start_and_wait()
    assert host.ended(10) == 0
    assert host.state["reason"] == "lease_expired"
    assert host.nothing_left()


def test_a_renewed_lease_and_an_outage_shorter_than_it_stop_nothing(host: Host) -> None:
    host.lease(1, 3.0)
    host.start_and_wait()
    host.lease(2, 6.0)
    time.sleep(0.5)
    (host.storage / "outage").write_text("")
    time.sleep(3.5)
    assert host.state["state"] == "ready"
    (host.storage / "outage").unlink()
    host.lease(3, 3600.0)
    time.sleep(3.0)
    assert host.state["state"] == "ready"


def test_an_outage_longer_than_the_lease_ends_everything(host: Host) -> None:
    host.lease(1, 3.0)
    host.start_and_wait()
    (host.storage / "outage").write_text("")
    assert host.ended(10) == 0
    assert host.state["reason"] == "lease_expired"
    assert host.nothing_left()


def test_the_hard_end_comes_whatever_the_lease_says(host: Host) -> None:
    host.lease()
    host.order["not_after_s"] = 3
    host.start()
    assert host.ended(10) == 0
    assert host.state["reason"] == "not_after"


def test_ray_s_death_is_a_failure_with_its_last_words_and_leaves_nothing(host: Host) -> None:
    host.lease()
    host.start_and_wait()
    (host.private / "die").write_text("")
    assert host.ended() == 1
    assert (host.state["state"], host.state["reason"]) == ("failed", "ray_ended")
    assert "ended with 3" in host.state["detail"]
    assert "something exploded" in host.state["detail"]
    assert host.nothing_left()


def test_a_ray_that_fails_to_start_is_tried_once_more_with_nothing_left_of_the_first(host: Host) -> None:
    host.storage.mkdir(exist_ok=True)
    (host.storage / "die-once").write_text("")
    host.lease()
    host.start_and_wait()
    first = json.loads((host.private / "light-once.json").read_bytes())
    assert not any(running(first[kind]) for kind in ("ray", "stubborn", "orphan", "silent"))
    assert all(map(running, host.pids))
    assert "something exploded" in host.log


def test_a_second_sigterm_during_the_end_changes_nothing(host: Host) -> None:
    host.environment["LIGHT_TIMING"] = json.dumps({"grace_s": 2.0})
    host.lease()
    host.start_and_wait()
    assert host.process is not None
    for _ in range(5):
        host.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert host.ended() == 0
    assert host.nothing_left()


def test_when_the_service_is_killed_its_ray_dies_with_it(host: Host) -> None:
    host.lease()
    host.start_and_wait()
    ray, *others = host.pids
    assert host.process is not None
    host.process.kill()
    wait_for(lambda: not running(ray), "the end of ray", 5)
    for pid in others:  # what release then finds by the run's mark
        os.kill(pid, signal.SIGKILL)
    for place in ("temp_dir", "shared_memory_dir"):
        subprocess.run(["rm", "-r", host.order[place]], check=True)


def test_a_slow_receipt_is_a_failure_that_says_why(host: Host) -> None:
    host.environment["LIGHT_TIMING"] = json.dumps({"receipt_s": 1.0})
    host.lease()
    (host.storage / "hosts").write_text("a file where a directory is needed")
    host.start()
    assert host.ended() == 1
    assert host.state["reason"] == "receipt"
    assert "Error" in host.state["detail"]
    assert host.nothing_left()


def test_ray_s_environment_holds_nothing_that_leads_elsewhere(host: Host) -> None:
    host.environment |= {
        "RAY_ADDRESS": "http://elsewhere:1",
        "RAY_NAMESPACE": "x",
        "TEMPORAL_API_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "VIRTUAL_ENV": "/nowhere",
    }
    host.lease()
    host.start_and_wait()
    names = json.loads((host.private / "light.json").read_bytes())["environment"]
    assert not {"RAY_ADDRESS", "RAY_NAMESPACE", "TEMPORAL_API_KEY", "PYTHONPATH", "VIRTUAL_ENV"} & set(names)
    assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "LANYARD_CUSTODY", "AWS_REGION"} <= set(names)


@pytest.mark.parametrize("kind", ["directory", "file", "link", "dangling link"])
def test_a_private_directory_that_is_already_there_is_refused_and_left(host: Host, kind: str) -> None:
    target = host.root / "target"
    if kind == "directory":
        host.private.mkdir(mode=0o700)
        (host.private / "evidence").write_text("earlier")
    elif kind == "file":
        host.private.write_text("earlier")
    else:
        if kind == "link":
            target.mkdir(mode=0o700)
        host.private.symlink_to(target)
    before = os.lstat(host.private)
    host.lease()
    host.start()
    assert host.ended() == hosting.REFUSED
    assert "refused" in host.log
    after = os.lstat(host.private)
    # Not the time of access: whoever looks around on the machine moves it.
    for fact in ("st_mode", "st_ino", "st_uid", "st_size", "st_mtime_ns", "st_ctime_ns"):
        assert getattr(after, fact) == getattr(before, fact), fact
    assert not (target / "service.json").exists()


def test_a_temporary_directory_that_is_already_there_is_a_failure_and_left(host: Host) -> None:
    place = Path(host.order["temp_dir"])
    place.mkdir(mode=0o700)
    (place / "theirs").write_text("x")
    host.lease()
    host.start()
    assert host.ended() == 1
    assert host.state["reason"] == "directory"
    assert (place / "theirs").exists()
    (place / "theirs").unlink()
    place.rmdir()


def test_a_token_that_others_can_read_is_refused(host: Host) -> None:
    Path(host.order["token_file"]).chmod(0o644)
    host.lease()
    host.start()
    assert host.ended() == 1
    assert "chmod 0600" in host.state["detail"]


def test_a_worker_waits_for_its_head_and_says_so(host: Host) -> None:
    host.order["role"] = "worker"
    host.lease()
    host.start()
    wait_for(lambda: host.state.get("reason") == "head", "waiting for the head")
    assert not (host.private / "light.json").exists()
    host.tombstone()
    assert host.ended() == 0


def _without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda order: order.pop(name)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_without("storage"), "lacks storage"),
        (lambda order: order.update(index="0"), "index has the wrong type"),
        (lambda order: order.update(surprise=1), "unknown fields: surprise"),
        (lambda order: order["ray"].pop("gcs_port"), "lacks ray.gcs_port"),
        (lambda order: order.update(role="king"), "role head or worker"),
        (lambda order: order.update(schema=2), "schema must be 1"),
        (lambda order: order.update(temp_dir="/tmp/" + "x" * 40), "choose a shorter one"),
    ],
)
def test_a_bad_order_is_refused_with_one_clear_message(
    host: Host, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    change(host.order)
    path = host.root / "order.json"
    path.write_text(json.dumps(host.order))
    path.chmod(0o600)
    with pytest.raises(hosting.BadOrder, match=says):
        hosting.read_order(path)
    assert hosting.main(["--order", str(path)]) == hosting.REFUSED


def test_an_order_that_others_can_read_is_refused(host: Host) -> None:
    path = host.root / "order.json"
    path.write_text(json.dumps(host.order))
    path.chmod(0o644)
    with pytest.raises(NotPrivate, match="others may read it"):
        hosting.read_order(path)


def test_the_longest_temporary_directory_leaves_room_for_every_socket_path() -> None:
    # The longest socket Ray makes below it was measured: sockets/dash_MetricsHead, 24 characters.
    session = "session_2026-11-30_13-30-47_188905_4194304"
    assert hosting.LONGEST_TEMP_DIR + len(f"/r/{session}/sockets/dash_MetricsHead") < 108
