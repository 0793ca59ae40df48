"""The first program on a rented host: which host it is, what it was brought, and a fresh directory or none at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer import hosting, ray_node, rented_host
from trainer.private import NotPrivate

CHECKOUT = Path(__file__).resolve().parents[2]
STEM = f"ly-{os.getpid():010x}"
HOST: dict[str, Any] = {
    "schema": 1,
    "run_key": f"x-{os.getpid():010x}",
    "stem": STEM,
    "count": 1,
    "device": "cpu",
    "storage": "s3://bucket/runs/x",
    "environments": "/nowhere",
    "not_after_s": 60.0,
    "first_port": 21000,
}
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "canary"}


def write(place: Path, name: str, what: Any, mode: int = 0o600) -> Path:
    path = place / name
    path.write_text(what if isinstance(what, str) else json.dumps(what))
    path.chmod(mode)
    return path


def test_rank_and_addresses_are_skypilots_and_part_of_a_cluster_is_refused() -> None:
    both = {"SKYPILOT_NODE_IPS": "10.0.0.2\n10.0.0.3\n", "SKYPILOT_NODE_RANK": "1"}
    assert rented_host.whoami(both, 2) == (1, ["10.0.0.2", "10.0.0.3"])
    for spoiled, words in (
        ({**both, "SKYPILOT_NODE_IPS": "10.0.0.2"}, "wants 2 hosts"),
        ({**both, "SKYPILOT_NODE_IPS": "10.0.0.2 10.0.0.2"}, "wants 2 hosts"),
        ({**both, "SKYPILOT_NODE_RANK": "2"}, "wants 2 hosts"),
        ({**both, "SKYPILOT_NODE_RANK": ""}, "not set"),
        ({}, "not set"),
    ):
        with pytest.raises(rented_host.BadHost, match=words):
            rented_host.whoami(spoiled, 2)


def test_the_order_it_makes_is_one_that_the_hosting_service_takes(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    base = Path("/tmp") / f"{STEM}-0"
    order = rented_host.host_order(HOST, 0, ["127.0.0.1"], base, tmp_path / "token")
    assert hosting.read_order(write(tmp_path, "order.json", order)) == order
    assert order["interface"] == "lo"
    ports = [order["ray"][name] for name in order["ray"] if name.endswith("_port")]
    assert sorted(ports) == list(range(21000, 21000 + rented_host.PORTS))
    assert order["ray"]["dashboard_host"] == "127.0.0.1"
    assert order["ray"]["object_store_bytes"] >= 80 * 10**6


def test_an_address_that_is_not_this_hosts_is_refused() -> None:
    with pytest.raises(rented_host.BadHost, match="no interface here"):
        rented_host.interface_of("192.0.2.1")


def test_cpus_are_the_allocations_where_slurm_says_so() -> None:
    assert rented_host.cpus({"SLURM_CPUS_ON_NODE": "7"}) == 7
    assert rented_host.cpus({}) == max(2, len(os.sched_getaffinity(0)))
    assert rented_host.gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-1"}) == ["3", "GPU-1"]


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ("{", rented_host.BadHost),
        ([], rented_host.BadHost),
        ({**HOST, "more": 1}, rented_host.BadHost),
        ({**HOST, "count": True}, rented_host.BadHost),
        ({**HOST, "schema": 2}, rented_host.BadHost),
        ({**HOST, "stem": "../x"}, rented_host.BadHost),
        ({name: value for name, value in HOST.items() if name != "storage"}, rented_host.BadHost),
    ],
)
def test_an_order_that_says_something_else_is_refused(tmp_path: Path, told: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        rented_host.read_host(write(tmp_path, "host.json", told))


def test_keys_that_others_can_read_or_that_are_no_keys_are_refused_and_not_repeated(tmp_path: Path) -> None:
    assert rented_host.read_keys(write(tmp_path, "storage.json", KEYS)) == KEYS
    with pytest.raises(NotPrivate, match="0640"):
        rented_host.read_keys(write(tmp_path, "storage.json", KEYS, 0o640))
    for spoiled in ({**KEYS, "PATH": "canary"}, {**KEYS, "AWS_REGION": 1}):
        with pytest.raises(rented_host.BadHost) as refused:
            rented_host.read_keys(write(tmp_path, "storage.json", spoiled))
        assert "canary" not in str(refused.value)


@pytest.fixture
def brought(tmp_path: Path) -> Path:
    """What SkyPilot brings."""
    tmp_path.chmod(0o700)
    (tmp_path / "trainer").symlink_to(CHECKOUT / "trainer")
    write(tmp_path, "host.json", HOST)
    write(tmp_path, "storage.json", KEYS)
    write(tmp_path, "token", "the-token")
    return tmp_path


def run(brought: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-B", "-m", "trainer.rented_host"],
        cwd=brought,
        env={"PATH": os.environ["PATH"], "SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NODE_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("kind", ["directory", "link", "file"])
def test_a_directory_that_is_there_already_is_refused_and_left_as_it_is(brought: Path, kind: str) -> None:
    base = Path("/tmp") / f"{STEM}-0"
    if kind == "directory":
        base.mkdir(mode=0o700)
    elif kind == "link":
        base.symlink_to(brought)
    else:
        base.touch()
    try:
        done = run(brought)
        assert done.returncode == hosting.REFUSED
        assert "already exists" in done.stderr
    finally:
        base.rmdir() if kind == "directory" else base.unlink()


def test_it_becomes_the_hosting_service_and_says_no_secret(brought: Path) -> None:
    """Which then ends, because no such application environment can be made."""
    base = Path("/tmp") / f"{STEM}-0"
    write(brought, "host.json", {**HOST, "environments": str(brought / "token" / "x")})
    try:
        done = run(brought)
        assert done.returncode == 1, done.stderr
        assert "host 0 of 1: 127.0.0.1 on lo" in done.stdout
        assert json.loads((base / "p/service.json").read_bytes())["reason"] == "environment"
        assert base.stat().st_mode & 0o777 == 0o700
        for secret in ("the-token", "canary"):
            assert secret not in done.stdout + done.stderr
            assert not [each for each in base.rglob("*") if each.is_file() and secret in each.read_text()]
    finally:
        subprocess.run(["rm", "-rf", str(base)], check=True)


def test_a_worker_asks_the_gcs_where_the_dashboard_is_on_the_heads_loopback(tmp_path: Path) -> None:
    order = rented_host.host_order(HOST, 0, ["127.0.0.1"], tmp_path, tmp_path / "token")
    apart = {**order, "role": "worker", "address": "10.0.0.3", "private_dir": str(tmp_path)}
    assert not isinstance(ray_node.asker(order, Path(sys.executable)), ray_node.GcsAsker)
    assert not isinstance(ray_node.asker({**order, "role": "worker"}, Path(sys.executable)), ray_node.GcsAsker)
    asker = ray_node.asker(apart, Path(sys.executable))
    assert isinstance(asker, ray_node.GcsAsker)


@pytest.mark.parametrize(("said", "found"), [("abc\n", "abc"), ("", None), ("refused\n", PermissionError)])
def test_what_the_lookup_says_is_read_without_waiting_for_it(tmp_path: Path, said: str, found: Any) -> None:
    asker = ray_node.GcsAsker({"ray": {"head_address": "127.0.0.1", "gcs_port": 1}}, Path("/nowhere"))
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    asker.output = reading
    assert asker("token") is None
    os.write(writing, said.encode())
    assert asker("token") is None
    os.close(writing)
    if found is PermissionError:
        with pytest.raises(PermissionError, match="refuses this run's token"):
            asker("token")
    else:
        assert asker("token") == found
    assert asker.output is None
