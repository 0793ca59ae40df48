"""The operator, Temporal and S3 are killed together: hosts stop by themselves, and who comes back is told the truth."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.integration.census import Census
from tests.integration.runs import left_by, regression
from tests.integration.stack import BUCKET, PATIENCE, Stack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1500)]

LONG = {"kind": "regression", "recipe": {"steps": 4000, "checkpoint_interval": 4}}
LEASE_S = 120.0
"""The shortest there is."""
GRACE_S = 40.0
"""Looks at the lease, Ray's SIGTERM, SIGKILL, directories."""


def test_hosts_stop_by_themselves_and_the_returning_operator_says_lease_expired(tmp_path: Path) -> None:
    """With a lease of two minutes, SIGKILL of supervisor, worker, Temporal and S3 in training: within lease and grace
    no process, port or directory of the run is left, and each host's own record says why it ended. Started again, the
    run ends Failed with "lease expired" and the commit to resume from, custody clean."""
    tmp_path.chmod(0o700)
    stack = Stack(tmp_path)
    stack.start()
    census = Census(
        mark=stack.mark,
        home=stack.home,
        scratch=stack.scratch,
        services=stack.services,
        client=lambda: stack.env,
        namespaces=lambda: stack.namespaces,
        s3=stack.s3,
        bucket=BUCKET,
    )
    try:
        run = stack.train("lease", regression("lease", workload=LONG, limits={"lease": "2m"}))
        stack.wait_for(run, "a commit", lambda told: told["step"] > 0, 150)
        key = stack.key_of(run)
        for pid in stack.services():
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        while census.hosts_left():
            assert time.monotonic() - killed < LEASE_S + GRACE_S * PATIENCE, census.hosts_left()
            time.sleep(0.5)
        assert time.monotonic() - killed > LEASE_S / 4, "they did not wait for their lease"
        for index in (0, 1):
            told = json.loads((stack.home / "hosts" / key / str(index) / "service.json").read_bytes())
            assert (told["state"], told["reason"]) == ("ended", "lease_expired")

        stack.start()
        stack.wait(run, 240)
        assert stack.status(run) == "FAILED"
        _, message, verdict = stack.failure(run)
        left = left_by(stack, run)
        assert "lease" in message
        assert "expired" in message
        assert f"step {left.committed_steps()[-1]}" in message
        assert f'"resume": {{"from": "{left.uri}"}}' in message
        assert verdict["cleanup"] == "clean"
        assert stack.last_word(run)["cleanup"] == "clean"
        found = census.take()
        assert (found.processes, found.ports, found.entries, found.uploads) == ((), (), (), ())
    finally:
        stack.end_runs()
        assert stack.stop() == 0
        ended = census.end_leftovers()
        census.close()
    assert ended == []
