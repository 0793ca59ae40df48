"""The one full run that several tests look at: carried once, with everything noted that is gone afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.integration.canary import Canaries, files
from tests.integration.census import Census, Findings
from tests.integration.runs import DRILL_AFTER, Left, left_by, regression
from tests.integration.stack import Stack, Started


@dataclass
class Carried:
    """The full run, from its start until nothing of it was left, and what was seen on the way."""

    run: Started
    custody: Started
    left: Left
    verdict: dict[str, Any]
    last_word: dict[str, Any]
    right_after: Findings
    """The census at the moment custody had closed."""
    canaries: Canaries
    second_start: Started
    """What the CLI answered to a second start under the same id, with another input, while the run was going on."""
    third_start: tuple[int, str]
    """Exit status and what was said of a third, with --fail-existing."""
    jobs: bytes
    """`GET /api/jobs/` while it trained."""
    on_hosts: list[str] = field(default_factory=list)
    """Secrets found in Ray's directories (logs, session, object store) while the hosts were up."""
    hosts_files: int = 0


def carry(stack: Stack, census: Census) -> Carried:
    """The full run, and looks at it from all sides while it lives."""
    run = stack.train("full", regression("full-run", drill={"kind": "worker", "after_step": DRILL_AFTER}))
    stack.wait_for(run, "training begins", lambda told: told["phase"] == "train", 60)
    joined = stack.begin("full", json.dumps(regression("another-run")))
    start = ("workflow", "start", "--type", "GuardedTrain", "--task-queue", "ray-train", "--fail-existing")
    refused = stack.cli(*start, "--workflow-id", run.workflow_id, "--input", "{}", check=False)
    stack.wait_for(run, "the worker is killed", lambda told: told["phase"] in ("recover", "train"), 90)
    left = left_by(stack, run)
    token = (stack.home / "hosts" / left.key / "0.token").read_text().strip()
    canaries = Canaries(
        {
            "AWS_SECRET_ACCESS_KEY": stack.env["AWS_SECRET_ACCESS_KEY"],
            "AWS_ACCESS_KEY_ID": stack.env["AWS_ACCESS_KEY_ID"],
            "the deployment secret": (stack.home / "secret").read_text().strip(),
            "the run's token": token,
        }
    )
    dashboard = left.document("hosts/0/receipt.json")["ray"]["dashboard_url"]
    jobs = httpx.get(
        f"{dashboard}/api/jobs/", headers={"Authorization": f"Bearer {token}"}, trust_env=False, timeout=60
    )
    jobs.raise_for_status()
    places = [place for path in census.used() if (place := Path(path)).name.startswith("ly-")]
    seen = [each for place in places for each in files(place)]
    on_hosts = canaries.search(seen)

    stack.wait(run, 180)
    custody = stack.custody(run)
    stack.wait(custody, 60)
    right_after = census.take()
    return Carried(
        run=run,
        custody=custody,
        left=left,
        verdict=stack.result(run),
        last_word=stack.result(custody),
        right_after=right_after,
        canaries=canaries,
        second_start=joined,
        third_start=(refused.returncode, refused.stderr),
        jobs=jobs.content,
        on_hosts=on_hosts,
        hosts_files=len(seen),
    )
