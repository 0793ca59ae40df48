"""Small stand-ins for what single activities talk to: storage that can be told to fail, hosts that keep a record of
what was done to them, and a client whose custody accepts or refuses."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from temporalio.testing import ActivityEnvironment

from activities.hosts import Offer, Progress
from activities.hosts.reach import Providers
from activities.jobs import Endpoint
from activities.storage import Fetched, StorageError
from tests.activities.jobs_api import TOKEN
from tests.activities.sample_run import MemoryStorage
from workflows.evidence import Claim, ClaimKind, Hosts, HostsOrder, Inventory, StepTaken

NOWHERE = "http://127.0.0.1:9"
"""Nothing listens there."""


class Objects(MemoryStorage):
    """Objects in memory, with entity tags, and a record of what was done; `down` answers nothing."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        super().__init__(dict(objects or {}))
        self.done: list[str] = []
        self.down = False

    def _look(self, what: str, uri: str) -> None:
        if self.down:
            raise StorageError(f"cannot {what} {uri}: EndpointConnectionError", "EndpointConnectionError")
        self.done.append(f"{what} {uri}")

    async def get(self, uri: str, unless: str | None = None) -> Fetched | None:
        self._look("read", uri)
        body = self.objects.get(uri)
        if body is None:
            return None
        tag = hashlib.sha256(body).hexdigest()
        return Fetched(None if tag == unless else body, tag)

    async def put(self, uri: str, body: bytes, *, only_if_absent: bool = False) -> None:
        self._look("write", uri)
        self.objects[uri] = body

    async def delete(self, uri: str) -> None:
        self._look("delete", uri)
        self.objects.pop(uri, None)

    async def abort_uploads(self, prefix_uri: str) -> int:
        self._look("end uploads below", prefix_uri)
        return 2

    async def names(self, prefix_uri: str, limit: int = 1000) -> list[str]:
        self._look("list", prefix_uri)
        return await super().names(prefix_uri, limit)


class HostsStandIn:
    """A hosts provider: `there` is what exists of each claim, and `done` what was asked, in order."""

    name = "local"

    def __init__(self, url: str = NOWHERE) -> None:
        self.url = url
        self.done: list[str] = []
        self.there: dict[str, list[str]] = {}
        self.problems: list[str] = []
        self.offered = Offer("2 local hosts, cpu")
        self.failing: dict[str, Exception] = {}
        """What is raised, by `release <claim>`, `remaining <claim>`, `endpoint`, `prove` or `inventory`."""
        self.has = Inventory()
        self.after: Callable[[str], None] = lambda done: None

    def providers(self) -> Providers:
        mine: Any = {self.name: self}
        return Providers(mine)

    def context(self, order: HostsOrder) -> str:
        return "here"

    def check(self, order: HostsOrder) -> list[str]:
        self._do("check")
        return self.problems

    def offer(self, order: HostsOrder) -> Offer:
        return self.offered

    @contextmanager
    def endpoint(self, order: HostsOrder) -> Iterator[Endpoint]:
        self._do("endpoint")
        yield Endpoint(self.url, TOKEN)

    def prove(self, order: HostsOrder, progress: Progress) -> Hosts:
        self._do("prove")
        return Hosts(provider=self.name, context=self.context(order), cluster="c", hosts=())

    def claims(self, order: HostsOrder) -> list[Claim]:
        return [claim("cluster", order.identity.run_key)]

    def inventory(self, limit: int) -> Inventory:
        self._do("inventory")
        return self.has

    def release(self, claim: Claim, order: HostsOrder, progress: Progress) -> StepTaken:
        self._do(f"release {claim.id}")
        self.there.pop(claim.id, None)
        return StepTaken(claim=claim.id, action="release", ok=True, detail="ended", seconds=0.0)

    def remaining(self, claim: Claim, order: HostsOrder) -> list[str]:
        self._do(f"remaining {claim.id}")
        return self.there.get(claim.id, [])

    def _do(self, what: str) -> None:
        self.done.append(what)
        if what in self.failing:
            raise self.failing[what]
        self.after(what)


class CustodyStandIn:
    """A client whose custody writes claims down. Claiming on a real server is tested in tests/workflows."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.claims: list[Claim] = []
        self.settled: list[list[str]] = []
        self.refusing: BaseException | None = None
        self.on_ask: Callable[[], None] = lambda: None

    def get_workflow_handle(self, workflow_id: str) -> CustodyStandIn:
        self.asked.append((workflow_id, {}))
        return self

    async def execute_update(self, name: str, claim: Claim, **options: Any) -> Claim:
        self.asked.append((name, options))
        self.on_ask()
        if self.refusing:
            raise self.refusing
        self.claims.append(claim)
        return claim.model_copy(update={"may_appear_until": 1.0})

    async def signal(self, name: str, *, args: list[str], **_: Any) -> None:
        self.settled.append([name, *args])


def environment(
    beats: list[dict[str, Any]] | None = None, *, attempt: int = 1, before: Sequence[Any] = ()
) -> ActivityEnvironment:
    """An activity's environment whose heartbeats are kept in `beats`; `before` are those of the attempt before."""
    made = ActivityEnvironment()
    made.info = dataclasses.replace(
        made.info, attempt=attempt, heartbeat_details=list(before), started_time=datetime.now(UTC)
    )
    if beats is not None:
        made.on_heartbeat = lambda *told: beats.append(told[0])
    return made


async def until(true: Callable[[], bool]) -> None:
    """Wait until it is, for half a minute at most."""
    async with asyncio.timeout(30):
        while True:
            if true():
                return
            await asyncio.sleep(0.01)


def claim(kind: ClaimKind, name: str, **changes: Any) -> Claim:
    told: dict[str, Any] = {
        "kind": kind,
        "name": name,
        "provider": "local",
        "context": "here",
        "run_id": "r",
        "holder": "a test",
        "send_window_s": 60.0,
        "longest_request_s": 30.0,
    }
    return Claim(**(told | changes))
