"""A fake Jobs API for tests of what talks to one."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

TOKEN = "the-run's-token"
DRIVER = "02000000"
"""The driver's own id, as Ray counts them (01000000 is the agent's)."""
SUPERVISOR = "01000000"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class JobsApi:
    """Fake, because a real one takes half a minute to start and cannot be told to stop nothing, to fall silent, to
    forget, or to answer nonsense at a given moment. Paths, status codes and answers have the shape of Ray 2.58.0's."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.packages: dict[str, bytes] = {}
        self.state: dict[str, list[dict[str, Any]]] = {"nodes": [], "actors": [], "placement_groups": []}
        self.orders: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.open = False
        """Asks for no token."""
        self.silent = False
        """Drops every connection."""
        self.lost = 0
        """Drops the answers to so many submissions, after acting on them."""
        self.instead: dict[str, Callable[[], web.Response]] = {}
        """Answers given instead, by path."""
        self.before_status: Callable[[], None] = lambda: None

    def add(self, submission_id: str, status: str = "RUNNING", **changes: Any) -> dict[str, Any]:
        """A job as `JobDetails` has it."""
        self.jobs[submission_id] = {
            "type": "SUBMISSION",
            "job_id": DRIVER,
            "submission_id": submission_id,
            "driver_info": {"id": DRIVER, "node_ip_address": "127.0.0.2", "pid": "4711"},
            "status": status,
            "entrypoint": "python -m trainer.application",
            "message": "Job is currently running.",
            "error_type": None,
            "start_time": 1796000000000,
            "end_time": None,
            "metadata": {},
            "runtime_env": {},
            "driver_agent_http_address": "http://127.0.0.2:52365",
            "driver_node_id": "ab" * 28,
            "driver_exit_code": None,
            **changes,
        }
        return self.jobs[submission_id]

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._gate], client_max_size=2**28)
        app.router.add_get("/api/version", self._version)
        app.router.add_get("/api/jobs/", self._all)
        app.router.add_post("/api/jobs/", self._submit)
        app.router.add_get("/api/jobs/{id}", self._info)
        app.router.add_post("/api/jobs/{id}/stop", self._stop)
        app.router.add_get("/api/packages/gcs/{name}", self._package)
        app.router.add_put("/api/packages/gcs/{name}", self._upload)
        app.router.add_get("/api/v0/logs/file", self._logs)
        app.router.add_get("/api/v0/{what}", self._list)
        return app

    def count(self, asked: str) -> int:
        return sum(each.startswith(asked) for each in self.asked)

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.silent:
            return self._dropped(request)
        self.asked.append(f"{request.method} {request.path}")
        told = request.headers.get("Authorization")
        if told != f"Bearer {TOKEN}" and not self.open:
            return web.Response(status=403 if told else 401, text="Unauthorized: Missing or invalid token")
        instead = self.instead.get(request.path)
        return instead() if instead else await handler(request)

    def _dropped(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "4", "ray_version": "2.58.0", "session_name": "session_2026"})

    async def _all(self, request: web.Request) -> web.Response:
        return web.json_response(list(self.jobs.values()))

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        order = await request.json()
        name = order["submission_id"]
        self.orders.append(order)
        if name in self.jobs:
            said = f"ValueError: Job with submission_id {name} already exists. Please use a different submission_id."
            return web.Response(status=500, text=f"Traceback (most recent call last):\n  File …\n{said}\n")
        self.add(name, "PENDING", metadata=order["metadata"], entrypoint=order["entrypoint"], driver_info=None)
        if self.lost:
            self.lost -= 1
            return self._dropped(request)
        return web.json_response({"job_id": name, "submission_id": name})

    async def _info(self, request: web.Request) -> web.Response:
        self.before_status()
        job = self.jobs.get(request.match_info["id"])
        return web.json_response(job) if job else self._unknown(request)

    async def _logs(self, request: web.Request) -> web.Response:
        """Ray wants to be told the node, although the job's own facts name it."""
        name = request.query["submission_id"]
        if name not in self.jobs:
            return self._unknown(request)
        if request.query.get("node_id") != self.jobs[name]["driver_node_id"]:
            return web.Response(status=500, text="500 Internal Server Error\n\nServer got itself in trouble")
        return web.Response(text=self.logs.get(name, ""))

    async def _stop(self, request: web.Request) -> web.Response:
        """A PENDING job's stop says True and stops nothing (ray #58353)."""
        job = self.jobs.get(request.match_info["id"])
        if job is None:
            return self._unknown(request)
        stopped = job["status"] in ("PENDING", "RUNNING")
        if job["status"] == "RUNNING":
            job.update(status="STOPPED", message="Job was intentionally stopped.")
        return web.json_response({"stopped": stopped})

    async def _package(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        return web.Response() if name in self.packages else web.Response(status=404, text=f"Package {name} …")

    async def _upload(self, request: web.Request) -> web.Response:
        self.packages[request.match_info["name"]] = await request.read()
        return web.Response()

    async def _list(self, request: web.Request) -> web.Response:
        assert request.query["detail"] == "true"
        return web.json_response(listed(self.state[request.match_info["what"]]))

    def _unknown(self, request: web.Request) -> web.Response:
        return web.Response(status=404, text=f"Job {request.match_info.get('id')} does not exist")


def listed(items: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """The state API's answer: `ListApiResponse` in an envelope."""
    answer = {
        "total": len(items),
        "num_after_truncation": len(items),
        "num_filtered": len(items),
        "result": items,
        "partial_failure_warning": "",
        "warnings": None,
    }
    return {"result": True, "msg": "", "data": {"result": {**answer, **changes}}}


def actor(class_name: str, state: str = "ALIVE", **changes: Any) -> dict[str, Any]:
    """An actor as the state API lists it in detail."""
    return {
        "actor_id": "0a" * 16,
        "class_name": class_name,
        "state": state,
        "job_id": DRIVER,
        "name": "",
        "node_id": "ab" * 28,
        "pid": 4712,
        "ray_namespace": "default",
        "serialized_runtime_env": "{}",
        "is_detached": False,
        "placement_group_id": None,
        **changes,
    }


def group(state: str, *bundles: dict[str, float], **changes: Any) -> dict[str, Any]:
    """A placement group as the state API lists it in detail."""
    return {
        "placement_group_id": "0b" * 18,
        "name": "",
        "creator_job_id": DRIVER,
        "state": state,
        "bundles": [
            {"bundle_id": {"bundle_index": i}, "unit_resources": want, "node_id": ""} for i, want in enumerate(bundles)
        ],
        "is_detached": False,
        **changes,
    }


def node(address: str, state: str = "ALIVE", **resources: float) -> dict[str, Any]:
    """A node as the state API lists it."""
    return {
        "node_id": f"node-{address}",
        "node_ip": address,
        "is_head_node": address.endswith(".2"),
        "state": state,
        "resources_total": {"CPU": 2.0, **copy.deepcopy(resources)},
    }


@asynccontextmanager
async def served(api: JobsApi) -> AsyncIterator[str]:
    """The API's address, for as long as the block lasts."""
    runner = web.AppRunner(api.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
