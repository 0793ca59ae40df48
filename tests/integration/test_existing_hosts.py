"""Runs on a Ray cluster that somebody else prepared and uses: they own their jobs there, and leave all else alone."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.census import Census
from tests.integration.runs import DRILL_AFTER, left_by, regression
from tests.integration.stack import CHECKOUT, PATIENCE, Stack, bare
from trainer import environment
from trainer.processes import descendants

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

OURS = ("trainer.application", "trainer.lease_keeper", "RayTrainWorker", "TrainController")
LONG = {"kind": "regression", "recipe": {"steps": 4000, "checkpoint_interval": 4}}
LEASE_S = 120.0
"""The shortest there is."""
GRACE_S = 30.0


@dataclass(frozen=True)
class Prepared:
    """The cluster, asked with nothing of the operator's."""

    pid: int
    endpoint: str
    token_file: Path
    job: str

    def hosts(self) -> dict[str, Any]:
        return {"provider": "existing", "endpoint": self.endpoint, "token_file": str(self.token_file)}

    def ask(self, path: str) -> Any:
        answer = httpx.get(
            f"{self.endpoint}{path}",
            headers={"Authorization": f"Bearer {self.token_file.read_text().strip()}"},
            timeout=30,
            trust_env=False,
        )
        answer.raise_for_status()
        return answer.json()

    def nodes(self) -> set[str]:
        listed = self.ask("/api/v0/nodes")["data"]["result"]["result"]
        return {each["node_id"] for each in listed if each["state"] == "ALIVE"}

    def jobs(self) -> dict[str, str]:
        """Status by submission id."""
        return {each["submission_id"]: each["status"] for each in self.ask("/api/jobs/")}

    def working_for_runs(self) -> list[str]:
        """Commands of the cluster's processes that train."""
        found = []
        for process in descendants(self.pid):
            with contextlib.suppress(OSError):
                command = (
                    Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                found += [command] if any(each in command for each in OURS) else []
        return found


@pytest.fixture(scope="module")
def prepared(stack: Stack) -> Iterator[Prepared]:
    """Its storage credentials are in its nodes' environment, as its owner put them there."""
    # Not pytest's own directory: the sockets below it need a short path.
    scratch = Path("/tmp", f"pc-{secrets.token_hex(4)}")
    scratch.mkdir(mode=0o700)
    storage = {name: value for name, value in stack.env.items() if name.startswith("AWS_")}
    python = str(environment.interpreter(environment.path()))
    with (scratch / "program.log").open("wb") as log:
        program = subprocess.Popen(
            [python, "-B", "-m", "tests.integration.prepared_cluster", str(scratch)],
            cwd=CHECKOUT,
            env={**bare(), **storage},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert program.stdout
    try:
        line = program.stdout.readline()
        assert line, (scratch / "program.log").read_text()
        told = json.loads(line)
        yield Prepared(program.pid, told["endpoint"], Path(told["token_file"]), told["job"])
    finally:
        program.send_signal(signal.SIGTERM)
        program.wait(60 * PATIENCE)
        shutil.rmtree(scratch)


def test_a_run_with_a_drill_takes_only_its_jobs(stack: Stack, census: Census, prepared: Prepared) -> None:
    """Succeeded and clean, recovery proved; claimed and released: jobs. The nodes, and the job of somebody else, are
    there as before, and nothing of the run is."""
    nodes = prepared.nodes()
    drill = {"kind": "worker", "after_step": DRILL_AFTER}
    run = stack.train("existing", regression("existing", hosts=prepared.hosts(), drill=drill))
    stack.wait(run, 200)
    verdict = stack.result(run)
    assert (verdict["outcome"], verdict["cleanup"]) == ("succeeded", "clean"), verdict["message"]
    assert verdict["drill"]["proved"]
    release = stack.last_word(run)
    assert {each["kind"] for each in release["claims"]} == {"job"}
    assert [each for each in release["steps"] if not each["ok"]] == []
    asked = [each.get("activityTaskScheduledEventAttributes", {}) for each in stack.events(run)]
    assert "launch_hosts" not in [each["activityType"]["name"] for each in asked if each]
    assert prepared.working_for_runs() == []
    assert prepared.nodes() == nodes
    assert prepared.jobs()[prepared.job] == "RUNNING"
    token = prepared.token_file.read_text().strip()
    assert not [name for name in left_by(stack, run).names() if token.encode() in left_by(stack, run).raw(name)]
    assert token not in json.dumps(stack.events(run))


def test_a_terminate_stops_the_job_and_nothing_else(stack: Stack, census: Census, prepared: Prepared) -> None:
    """After a commit: the exact job is stopped, with its actors and placement groups; custody closes clean."""
    nodes = prepared.nodes()
    run = stack.train("existing-terminated", regression("existing", hosts=prepared.hosts(), workload=LONG))
    stack.wait_for(run, "a commit", lambda told: told["step"] > 0, 120)
    assert prepared.working_for_runs()
    stack.cli("workflow", "terminate", *stack.at(run))
    assert stack.last_word(run)["cleanup"] == "clean"
    assert prepared.working_for_runs() == []
    assert prepared.jobs()[f"{stack.key_of(run)}-train"] == "STOPPED"
    assert prepared.jobs()[prepared.job] == "RUNNING"
    assert prepared.nodes() == nodes


def test_the_job_ends_by_itself_when_the_operator_is_gone(stack: Stack, census: Census, prepared: Prepared) -> None:
    """With a lease of two minutes, the only worker killed in training: nobody hosts the job for us, and its own lease
    keeper ends it, within lease and grace. A worker that comes back ends the run Failed, with the commit to resume
    from, and custody clean."""
    namespace = "operator-gone"
    with stack.another_worker(namespace):
        limits = {"lease": "2m"}
        run = stack.train(
            "existing-gone", regression("existing", hosts=prepared.hosts(), workload=LONG, limits=limits), namespace
        )
        stack.wait_for(run, "a commit", lambda told: told["step"] > 0, 120)
        os.kill(stack.services()[-1], signal.SIGKILL)
        killed = time.monotonic()
        while working := prepared.working_for_runs():
            assert time.monotonic() - killed < LEASE_S + GRACE_S * PATIENCE, working
            time.sleep(0.5)
        assert time.monotonic() - killed > LEASE_S / 4, "it did not wait for its lease"
    with stack.another_worker(namespace):
        stack.wait(run, 120)
        assert stack.status(run) == "FAILED"
        _, message, verdict = stack.failure(run)
        left = left_by(stack, run)
        assert "lease expired" in message
        assert f'"resume": {{"from": "{left.uri}"}}' in message
        assert verdict["cleanup"] == "clean"
        # Custody outlives the run by a moment, and needs this worker for it.
        assert stack.last_word(run)["cleanup"] == "clean"
    assert prepared.jobs()[prepared.job] == "RUNNING"
