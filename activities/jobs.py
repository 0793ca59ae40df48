"""Native Ray Jobs over their REST API: submit or adopt, status, logs, stop to a terminal state, what is left.

Every client names its endpoint explicitly; RAY_ADDRESS and RAY_API_SERVER_ADDRESS play no part (ray #27954).
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import httpx

REQUEST_S: Final = 30.0
"""The longest one request may take. Submitting takes about 4 s on a loaded two-core machine."""
STOP_AGAIN_S: Final = 10.0
"""A stop is asked for again after this long, until the job is terminal."""
TERMINAL: Final = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
MAX_LOG: Final = 8 * 1024 * 1024
"""Logs are read from their end, at most this many bytes and LOG_LINES lines of it."""
LOG_LINES: Final = 100_000
MAX_PACKAGE: Final = 50 * 1024 * 1024
"""Pure-Python source is small; more is data or an environment, and belongs elsewhere."""
CLUSTER_ACTORS: Final = frozenset({"_AutoscalingCoordinatorActor"})
"""Ray's own singletons: Train creates them detached, they hold nothing, and they end with the cluster."""
DELIVERED: Final = "trainer"
"""The package that every job carries beside its working directory."""
_SKIP: Final = frozenset({"__pycache__", ".git", ".venv", "node_modules", ".mypy_cache", ".pytest_cache"})


class JobsError(Exception):
    """The Jobs API answered with an error; the message says which request and what it said."""


class JobsUnreachable(JobsError):
    """Nothing answered: the state of the job is unknown, which is not the same as absent."""


@dataclass(frozen=True)
class Endpoint:
    """A Jobs API, as its hosts provider reaches it."""

    url: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class JobInfo:
    status: str
    ray_job_id: str | None
    """The driver's own id in Ray's state; None for an entrypoint that never connected."""
    node_id: str | None
    """Where the entrypoint was started; None before."""
    message: str
    entrypoint: str
    metadata: dict[str, str]

    @property
    def terminal(self) -> bool:
        return self.status in TERMINAL


@dataclass(frozen=True)
class Package:
    """Source to deliver: a zip whose bytes, and so whose name, depend on its content alone."""

    uri: str
    body: bytes = field(repr=False)

    @property
    def name(self) -> str:
        return self.uri.removeprefix("gcs://")


def package(trees: dict[str, Path]) -> Package:
    """Zip the pure-Python source of `trees` ({path inside: directory}). Raises ValueError when it is not small, or
    holds a link (what it points to may be anything). Reads files: call it in a thread."""
    files: dict[str, Path] = {}
    size = 0
    for inside, root in trees.items():
        if not root.is_dir():
            raise ValueError(
                f"the working directory {root.absolute()} does not exist or is no directory on the worker's machine; "
                "correct the path, or put your source there"
            )
        for path in _plain_files(root):
            parts = path.relative_to(root).parts
            name = "/".join((inside, *parts)) if inside else "/".join(parts)
            if parts[0] == DELIVERED and not inside:
                raise ValueError(f"{path} is in the way of {DELIVERED}/, which every job brings along; rename yours")
            # Counted before anything is read: it may be larger than memory.
            size += path.stat().st_size
            if size > MAX_PACKAGE:
                raise ValueError(f"the source holds more than {MAX_PACKAGE // 2**20} MiB; deliver code, not data")
            files[name] = path
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, files[name].read_bytes())
    digest = hashlib.sha256(packed.getvalue()).hexdigest()[:32]
    return Package(f"gcs://_ray_pkg_{digest}.zip", packed.getvalue())


def _plain_files(root: Path) -> Iterator[Path]:
    """Every file below that is source, folder by folder: the first fault is told before the rest is looked at. Raises
    ValueError."""

    def unreadable(error: OSError) -> NoReturn:
        raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = sorted(name for name in folders if _is_source(name))
        for path in (Path(folder, name) for name in (*folders, *sorted(filter(_is_source, names)))):
            if path.is_symlink():
                raise ValueError(f"{path} is a link; source is delivered as plain files")
            if path.is_file():
                yield path
            elif not path.is_dir():
                raise ValueError(f"{path} is no plain file; keep pipes, sockets and devices elsewhere")


def _is_source(name: str) -> bool:
    return name not in _SKIP and not name.endswith(".pyc")


class Jobs:
    """One cluster's Jobs API. All methods raise JobsError, and JobsUnreachable when nothing answered."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def at(cls, endpoint: Endpoint) -> AsyncIterator[Jobs]:
        async with httpx.AsyncClient(
            base_url=endpoint.url,
            headers={"Authorization": f"Bearer {endpoint.token}"},
            timeout=httpx.Timeout(REQUEST_S, connect=5.0),
            # The endpoint is explicit; a proxy from the environment must not see the token.
            trust_env=False,
        ) as client:
            yield cls(client)

    async def submit(
        self,
        submission_id: str,
        entrypoint: str,
        *,
        env: dict[str, str] | None = None,
        source: Package | None = None,
        resources: dict[str, float] | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        """Send one submission. The id already taken is an error here; look first, and look again after it."""
        runtime: dict[str, Any] = {"env_vars": env or {}}
        if source:
            runtime["working_dir"] = source.uri
        order = {
            "entrypoint": entrypoint,
            "submission_id": submission_id,
            "runtime_env": runtime,
            "metadata": metadata or {},
            "entrypoint_num_cpus": 0,
        }
        if resources:
            order["entrypoint_resources"] = resources
        await self._ask("POST", "/api/jobs/", json=order)

    async def deliver(self, source: Package) -> None:
        """Upload the source unless it is there."""
        path = f"/api/packages/gcs/{source.name}"
        if await self._ask("GET", path, missing_ok=True) is None:
            await self._ask("PUT", path, content=source.body)

    async def info(self, submission_id: str) -> JobInfo | None:
        """The job's native status; None when the API says that it knows no such job."""
        answer = await self._ask("GET", f"/api/jobs/{submission_id}", missing_ok=True)
        if answer is None:
            return None
        told = _object(answer)
        if not isinstance(told.get("status"), str):
            raise JobsError(f"GET /api/jobs/{submission_id}: the answer names no status")
        return JobInfo(
            status=told["status"],
            ray_job_id=told.get("job_id") if told.get("driver_info") else None,
            node_id=told.get("driver_node_id"),
            message=str(told.get("message") or ""),
            entrypoint=str(told.get("entrypoint") or ""),
            metadata=told.get("metadata") or {},
        )

    async def raw(self, submission_id: str) -> bytes | None:
        """The native status as the API gives it."""
        answer = await self._ask("GET", f"/api/jobs/{submission_id}", missing_ok=True)
        return answer.content if answer is not None else None

    async def logs(self, submission_id: str) -> str:
        """The driver's log, its end if it is long; empty when there is none.

        From the state API: that of Jobs reads files of the head only, and whole ones.
        """
        info = await self.info(submission_id)
        if info is None or info.node_id is None:
            return ""
        path, tail = "/api/v0/logs/file", bytearray()
        # Without the node Ray answers 500, although it knows it (2.58.0).
        asked = {"submission_id": submission_id, "node_id": info.node_id, "lines": str(LOG_LINES)}
        try:
            async with self._client.stream("GET", path, params=asked) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    _refuse_error(answer, f"GET {path}")
                async for chunk in answer.aiter_bytes():
                    tail += chunk
                    if len(tail) > 2 * MAX_LOG:
                        del tail[:-MAX_LOG]
        except httpx.HTTPError as error:
            raise JobsUnreachable(f"GET {path}: {type(error).__name__}") from error
        return tail[-MAX_LOG:].decode(errors="replace")

    async def stop(self, submission_id: str) -> None:
        """Ask for a stop. True or False, the answer proves nothing (ray #58353): watch `info`."""
        await self._ask("POST", f"/api/jobs/{submission_id}/stop", missing_ok=True)

    async def stop_to_terminal(self, submission_id: str, within_s: float = 60.0) -> JobInfo | None:
        """Stop and poll until the native status is terminal. Raises JobsError when it is not in time."""
        deadline = asyncio.get_running_loop().time() + within_s
        asked = -STOP_AGAIN_S
        while True:
            info = await self.info(submission_id)
            if info is None or info.terminal:
                return info
            now = asyncio.get_running_loop().time()
            if now > deadline:
                raise JobsError(f"job {submission_id} is still {info.status} {within_s:.0f} s after the stop")
            if now - asked > STOP_AGAIN_S:
                # Asked again, because a stop of a PENDING job says True and stops nothing.
                await self.stop(submission_id)
                asked = now
            await asyncio.sleep(0.3)

    async def state(self, what: str) -> list[dict[str, Any]]:
        """Ray's own state of `nodes`, `actors`, `placement_groups` or `workers`, in detail."""
        answer = await self._ask("GET", f"/api/v0/{what}", params={"detail": "true", "limit": "10000"})
        assert answer is not None
        told = _object(answer)
        if not told.get("result"):
            raise JobsError(f"the cluster could not list its {what}: {str(told.get('msg'))[:300]}")
        try:
            listed = told["data"]["result"]
            found, total = list(listed["result"]), int(listed["total"])
        except (KeyError, TypeError, ValueError) as error:
            raise JobsError(f"the cluster's list of {what} is no list: {type(error).__name__}: {error}") from error
        # What is left out of a list is unknown, not absent.
        if listed.get("partial_failure_warning") or len(found) < total:
            raise JobsError(f"the cluster listed only {len(found)} of its {total} {what}")
        return found

    async def alive_nodes(self) -> dict[str, dict[str, Any]]:
        """Nodes that are ALIVE, by node id (dead ones stay in cluster status; here they are told apart)."""
        return {str(n["node_id"]): n for n in await self.state("nodes") if n.get("state") == "ALIVE"}

    async def remains(self, submission_id: str, ray_job_id: str | None) -> list[str]:
        """What a terminal job left: its actors that are not DEAD and its placement groups that are not REMOVED.

        Train's detached placement-group cleaner carries the job's runtime environment like every other actor of the
        job, and must be gone before a release is a release (ray #62753, #61689).
        """
        actors = [a for a in await self.state("actors") if _is_of(a, submission_id, ray_job_id)]
        drivers = {ray_job_id, *(a["job_id"] for a in actors if "JobSupervisor" not in str(a.get("class_name")))}
        groups = [g for g in await self.state("placement_groups") if g.get("creator_job_id") in drivers]
        return [
            *(f"actor {a['class_name']} {a['actor_id']} {a['state']}" for a in actors if a["state"] != "DEAD"),
            *(f"placement group {g['placement_group_id']} {g['state']}" for g in groups if g["state"] != "REMOVED"),
        ]

    async def _ask(self, method: str, path: str, *, missing_ok: bool = False, **args: Any) -> httpx.Response | None:
        try:
            answer = await self._client.request(method, path, **args)
        except httpx.HTTPError as error:
            raise JobsUnreachable(f"{method} {path}: {type(error).__name__}") from error
        if answer.status_code == 404 and missing_ok:
            return None
        _refuse_error(answer, f"{method} {path}")
        return answer


def _refuse_error(answer: httpx.Response, asked: str) -> None:
    if answer.status_code in (401, 403):
        raise JobsError(f"{asked}: the cluster refuses the run's token ({answer.status_code})")
    if answer.status_code >= 400:
        said = answer.text.strip().splitlines()
        raise JobsError(f"{asked}: {answer.status_code} {said[-1][:300] if said else ''}")


def _object(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object that was answered. Raises JobsError: anything else, a proxy's page say, is no answer of Ray."""
    try:
        told = answer.json()
    except (ValueError, RecursionError) as error:
        raise JobsError(f"{answer.request.url.path}: the answer is no JSON: {answer.text[:100]!r}") from error
    if not isinstance(told, dict):
        raise JobsError(f"{answer.request.url.path}: the answer is no JSON object: {answer.text[:100]!r}")
    return told


def _is_of(actor: dict[str, Any], submission_id: str, ray_job_id: str | None) -> bool:
    if actor.get("class_name") in CLUSTER_ACTORS:
        return False
    return actor["job_id"] == ray_job_id or submission_id in json.dumps(
        [actor.get("name"), actor.get("serialized_runtime_env")]
    )
