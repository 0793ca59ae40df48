"""What a cluster's REST interface answers to the requests that the operator makes, as shapes without a value in them.

    python -m tests.chaos.answers      records the real one's, from one run on the real stack

The light stand-in is held to them by a test.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from tests.chaos.lane import Lane
from tests.chaos.runs import run_json
from tests.chaos.scenarios import TRAINING, Scenario
from workflows.names import run_key
from workflows.timeouts import RUN_QUEUE

RECORDED: Final = Path(__file__).parent / "recorded" / "jobs_api.json"
TOLD: Final = frozenset({"status", "state", "type", "class_name"})
"""Words of Ray's own, which are kept as they are."""
GONE: Final = "no-such-job"
PATIENCE_S: Final = 300.0


def shape(value: Any, name: str = "") -> Any:
    """The value's shape: names and types. Lists have the shape of each different member."""
    if isinstance(value, Mapping):
        # Names in these are data: resources, variables, labels.
        if name in ("resources_total", "env_vars", "labels", "metadata", "required_resources", "stats"):
            return "object"
        return {key: shape(each, key) for key, each in sorted(value.items())}
    if isinstance(value, list):
        members: list[Any] = []
        for each in value:
            if (found := shape(each)) not in members:
                members.append(found)
        return members
    if isinstance(value, str):
        return value if name in TOLD else "text"
    return "null" if value is None else type(value).__name__


async def answers(url: str, token: str, submission: str) -> dict[str, Any]:
    """Status and shape of each answer while ``submission`` runs: the ones that change nothing, and two refusals."""
    asked: list[tuple[str, str, Any]] = [
        ("GET", f"/api/jobs/{submission}", None),
        ("GET", f"/api/jobs/{GONE}", None),
        ("GET", "/api/v0/nodes?detail=true&limit=10000", None),
        ("GET", "/api/v0/actors?detail=true&limit=10000", None),
        ("GET", "/api/v0/placement_groups?detail=true&limit=10000", None),
        ("POST", "/api/jobs/", {"submission_id": submission, "entrypoint": "true", "runtime_env": {}, "metadata": {}}),
        ("POST", f"/api/jobs/{GONE}/stop", {}),
        ("GET", "/api/packages/gcs/_ray_pkg_0123456789abcdef.zip", None),
    ]
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        bare = await client.get("/api/jobs/")
        wrong = await client.get("/api/jobs/", headers={"Authorization": "Bearer wrong"})
        found["without a token"], found["with a wrong token"] = bare.status_code, wrong.status_code
        for method, path, body in asked:
            told = await client.request(method, path, json=body, headers={"Authorization": f"Bearer {token}"})
            kind = told.headers.get("content-type", "").partition(";")[0]
            content = shape(told.json()) if kind == "application/json" else "text"
            name = f"{method} {path.partition('?')[0].replace(submission, 'JOB')}"
            name += " without its node" if "logs/file" in path and "node_id" not in path else ""
            found[name] = {"status": told.status_code, "answer": content}
            if name == "GET /api/jobs/JOB":
                asked += _of_logs(submission, told.json()["driver_node_id"])
    return found


def _of_logs(submission: str, node_id: str) -> list[tuple[str, str, None]]:
    """With the node, and without it."""
    path = f"/api/v0/logs/file?submission_id={submission}&lines=10"
    return [("GET", f"{path}&node_id={node_id}", None), ("GET", path, None)]


async def of_a_run(lane: Lane) -> dict[str, Any]:
    """Start a run in this lane, ask while it trains, and abort it."""
    assert lane.client
    scenario = Scenario("light" if lane.which == "light" else "real", TRAINING, "nobody", "abort")
    handle = await lane.client.start_workflow(
        "GuardedTrain", run_json(scenario), id=f"answers-{lane.which}", task_queue=RUN_QUEUE
    )
    key = run_key(handle.id, lane.client.namespace, str(handle.result_run_id))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while (await handle.query("progress"))["step"] < 8:  # noqa: ASYNC110 (a query is asked, nothing tells)
                await asyncio.sleep(0.3)
        place = lane.home.root / "hosts" / key
        plan = json.loads((place / "plan.json").read_bytes())
        url = f"http://{plan['addresses'][0]}:{plan['ports'][1]}"
        return await answers(url, (place / "0" / "token").read_text().strip(), f"{key}-train")
    finally:
        await handle.signal("abort")
        await handle.result()
        await lane.client.get_workflow_handle(f"custody-{key}").result()


async def record() -> None:
    """Write RECORDED."""
    root = Path(tempfile.mkdtemp(prefix="la-"))
    lane = Lane(root, "real", print)
    try:
        await lane.start()
        RECORDED.write_text(json.dumps(await of_a_run(lane), indent=1) + "\n")
        print(f"wrote {RECORDED}")
    finally:
        await lane.stop()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    asyncio.run(record())
