"""Two hosts on a real Slurm through a real SkyPilot: launched, proved, reached, released; nothing is left on a node."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest

from activities.hosts import HostsFailed, HostsNotReady, WrongContext
from activities.hosts.skypilot import task
from activities.hosts.skypilot.bridge import SkyPilot
from activities.hosts.skypilot.provider import SkyPilotHosts
from activities.token import run_token
from tests.hosts.site import INFRA, Site
from workflows.evidence import Hosts, HostsOrder, Identity, StepTaken

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1200)]

SECRET = b"secret of the hosts tests, long enough"
OPTIONS = {
    "infra": INFRA,
    "cpus": "2",
    "memory": "4",
    "require_distinct_hosts": False,
    "require_distinct_devices": False,
}


class Said:
    """What a provider said while it worked, with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.notes: list[str] = []

    def __call__(self, note: str) -> None:
        line = f"{time.monotonic() - self._began:6.1f} s  {note}"
        if not self.notes or not self.notes[-1].endswith(note):
            self.notes.append(line)
            print(line, flush=True)


@pytest.fixture
def storage(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    yield client
    client.close()


def ordered(slug: str, count: int = 2) -> HostsOrder:
    key = f"{slug}-{os.urandom(5).hex()}"
    identity = Identity(
        workflow_id=slug,
        run_id="r",
        original_run_id="r",
        run_key=key,
        custody_id=f"custody-{key}",
        deployment="hosts-tests",
        namespace="default",
        storage=f"s3://lanyard/runs/{key}",
    )
    return HostsOrder(
        identity=identity,
        provider="skypilot",
        count=count,
        device="cpu",
        options=OPTIONS,
        lease_s=900,
        not_after_s=1800,
    )


def tombstone(storage: Any, order: HostsOrder) -> None:
    """As custody raises it before it releases."""
    storage.put_object(
        Bucket="lanyard", Key=f"runs/{order.identity.run_key}/custody/tombstone.json", Body=b'{"schema": 1}'
    )


def release(hosts: SkyPilotHosts, storage: Any, order: HostsOrder, say: Said) -> list[StepTaken]:
    """As custody does: last first, each step tried, then the proof that nothing is left."""
    tombstone(storage, order)
    steps = []
    for claim in reversed(hosts.claims(order)):
        steps.append(hosts.release(claim, order, say))
        say(f"released {claim.kind}: {steps[-1].seconds:.1f} s, {steps[-1].detail}")
    assert [hosts.remaining(claim, order) for claim in hosts.claims(order)] == [[], []]
    return steps


def nothing_is_left(site: Site, hosts: SkyPilotHosts, say: Said) -> None:
    assert site.queue() == []
    assert site.wait_until_clean(30) == {}
    assert site.shared() == []
    assert hosts.inventory(10).marked == ()
    say("clean")


def lease(storage: Any, order: HostsOrder) -> None:
    storage.put_object(
        Bucket="lanyard",
        Key=f"runs/{order.identity.run_key}/custody/lease.json",
        Body=json.dumps({"schema": 1, "sequence": 1, "duration_s": 900}).encode(),
    )


def until_proved(hosts: SkyPilotHosts, order: HostsOrder, say: Said) -> Hosts:
    deadline = time.monotonic() + 300
    while True:
        try:
            return hosts.prove(order, say)
        except HostsNotReady as waiting:
            say(str(waiting))
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def test_two_hosts_up_proved_reached_and_released_with_nothing_left(site: Site, storage: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    order, say = ordered("two-hosts"), Said()
    lease(storage, order)
    hosts = SkyPilotHosts(tmp_path / "home", SECRET, site.sky, environments=site.environments)
    name = task.cluster_name(order.identity.run_key)
    try:
        say("check")
        assert hosts.check(order) == []
        say("launch")
        hosts.launch(order, lambda: None, say)
        say("launched")
        found = until_proved(hosts, order, say)
        say("proved")
        assert [each.role for each in found.hosts] == ["head", "worker"]
        assert [each.address for each in found.hosts] == [f"{site.subnet}.2", f"{site.subnet}.3"]
        assert found.hosts[0].node_id != found.hosts[1].node_id
        assert found.hosts[0].hostname != found.hosts[1].hostname
        assert found.hosts[0].host_fingerprint == found.hosts[1].host_fingerprint  # one kernel, and they say so
        [job] = site.queue()
        assert f"{name}-" in job
        assert job.endswith(task.mark_text(order.identity))
        assert [each.hosts for each in hosts.inventory(10).marked] == [order]

        say("sent again, it is adopted")
        hosts.launch(order, lambda: pytest.fail("it is there already"), say)
        say("adopted")
        token = run_token(SECRET, order.identity.run_key)
        with hosts.endpoint(order) as endpoint:
            assert endpoint.token == token
            assert httpx.get(f"{endpoint.url}/api/jobs/", trust_env=False).status_code == 401
            right = {"Authorization": f"Bearer {token}"}
            assert httpx.get(f"{endpoint.url}/api/jobs/", headers=right, trust_env=False, timeout=30).status_code == 200
        say("reached")
        # Only through the tunnel.
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://{site.subnet}.2:{task.first_port(order.identity.run_key) + 1}/", trust_env=False)
        commands = "\n".join(line for what, lines in site.left().items() if "processes" in what for line in lines)
        assert "trainer.hosting" in commands
        for secret in (token, os.environ["AWS_SECRET_ACCESS_KEY"]):
            assert secret not in commands
            assert _files_with(site.base / "home", secret) == []

        elsewhere = SkyPilotHosts(tmp_path / "home", SECRET, SkyPilot(site.python, tmp_path / "other"))
        with pytest.raises(WrongContext):
            elsewhere.release(hosts.claims(order)[0], order, say)
        known = tmp_path / "home/skypilot-runs/known_hosts" / name
        before = known.read_text()
        known.write_text(f"{name} {(site.base / 'home/.ssh/slurm_ed25519.pub').read_text()}")
        with pytest.raises(HostsNotReady, match="not the one of before"), hosts.endpoint(order):
            pass
        known.write_text(before)
        say("another host key refused")
    finally:
        steps = release(hosts, storage, order, say)
    assert all(step.ok for step in steps), steps
    assert steps[0].detail == "the hosts ended themselves"
    left = site.epilog()
    print(left)
    # What SkyPilot leaves to a site's epilog is one thing; of ours there is evidence, and nothing in memory.
    assert "/dev/shm/ly-" not in left
    nothing_is_left(site, hosts, say)


def test_a_launch_that_is_given_up_half_way_ends_and_leaves_nothing(site: Site, storage: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    order, say = ordered("given-up"), Said()
    lease(storage, order)
    hosts = SkyPilotHosts(tmp_path / "home", SECRET, site.sky, environments=site.environments)
    with ThreadPoolExecutor(1) as pool:
        launching = pool.submit(hosts.launch, order, lambda: None, say)
        deadline = time.monotonic() + 120
        while not site.queue():
            assert time.monotonic() < deadline
            assert not launching.done(), launching.exception()
            time.sleep(0.2)
        say("Slurm has the job")
        steps = release(hosts, storage, order, say)
        with pytest.raises(HostsFailed, match=r"could not launch .*cancelled"):
            launching.result(60)
    assert all(step.ok for step in steps), steps
    assert "1 launches cancelled" in steps[1].detail
    nothing_is_left(site, hosts, say)


def test_hosts_that_cannot_be_placed_are_given_up_with_the_reason(site: Site, storage: Any, tmp_path: Path) -> None:
    """Three of them, on two nodes."""
    tmp_path.chmod(0o700)
    order, say = ordered("too-many", count=3), Said()
    lease(storage, order)
    hosts = SkyPilotHosts(tmp_path / "home", SECRET, site.sky, environments=site.environments)
    say(f"check: {hosts.check(order)}")
    try:
        with pytest.raises(HostsFailed, match=r"will never start .* \(PartitionNodeLimit\)"):
            hosts.launch(order, lambda: None, say)
        say("given up")
    finally:
        steps = release(hosts, storage, order, say)
    assert all(step.ok for step in steps), steps
    nothing_is_left(site, hosts, say)


def test_with_the_api_server_killed_release_ends_by_itself(site: Site, storage: Any, tmp_path: Path) -> None:
    """Its whole tree while a tunnel leads through it, then the next one's main process alone."""
    tmp_path.chmod(0o700)
    order, say = ordered("server-dead"), Said()
    lease(storage, order)
    hosts = SkyPilotHosts(tmp_path / "home", SECRET, site.sky, environments=site.environments)
    try:
        hosts.launch(order, lambda: None, say)
        until_proved(hosts, order, say)
        with hosts.endpoint(order) as endpoint:
            right = {"Authorization": f"Bearer {endpoint.token}"}
            say(f"{site.kill_api_server(whole=True)} processes of the API server killed")
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{endpoint.url}/api/jobs/", headers=right, trust_env=False, timeout=10)
            deadline = time.monotonic() + 120
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    httpx.get(f"{endpoint.url}/api/jobs/", headers=right, trust_env=False).raise_for_status()
                    break
                assert time.monotonic() < deadline
                time.sleep(0.5)
            say("the tunnel is open again")
        say(f"{site.kill_api_server(whole=False)} process of the API server killed, its executors live on")
    finally:
        steps = release(hosts, storage, order, say)
    assert all(step.ok for step in steps), steps
    nothing_is_left(site, hosts, say)


def _files_with(place: Path, secret: str) -> list[str]:
    files = (each for each in place.rglob("*") if each.is_file() and not each.is_symlink())
    return [str(each) for each in files if secret.encode() in each.read_bytes()]
