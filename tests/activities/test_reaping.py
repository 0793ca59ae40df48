"""A sweep reads inventory first and custodies after, changes nothing, and takes nothing unknown for absent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.client import WorkflowExecutionStatus
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities import reaping
from activities.hosts import AbsenceUnknown
from activities.hosts.reach import Providers
from activities.keeper import CLOSED
from activities.reaping import Reaping
from tests.activities.orders import HOSTS, IDENTITY
from tests.activities.stand_ins import HostsStandIn, Objects, environment
from workflows.evidence import Deployment, Inventory, Mark, ReaperOrder, Sweep

LEASE = f"{IDENTITY.storage}/custody/lease.json"
DEPLOYMENT = Deployment(
    deployment="tests", search_attributes=("LanyardRunKey",), secret_fingerprint="f" * 16, application_source="a" * 64
)
NOT_FOUND = RPCError("no such workflow", RPCStatusCode.NOT_FOUND, b"")
SILENT = RPCError("connection refused", RPCStatusCode.UNAVAILABLE, b"")


class Temporal:
    """Answers describes: for each custody what was put there, and NOT_FOUND for all others."""

    namespace = "default"

    def __init__(self, done: list[str]) -> None:
        self.custodies: dict[str, Any] = {}
        self._done = done

    def get_workflow_handle(self, workflow_id: str) -> Any:
        async def describe(rpc_timeout: Any) -> Any:
            self._done.append(f"describe {workflow_id}")
            told = self.custodies.get(workflow_id, NOT_FOUND)
            if isinstance(told, Exception):
                raise told
            return SimpleNamespace(status=told, run_id="its-run-id")

        return SimpleNamespace(describe=describe)


class Sweeping:
    """One provider, a client, a storage, and one record of what was asked of them, in order."""

    def __init__(self) -> None:
        self.hosts = HostsStandIn()
        self.temporal = Temporal(self.hosts.done)
        self.store = Objects()
        self.providers: dict[str, Any] = {"local": self.hosts}

    def has(self, *marks: Mark, **found: Any) -> None:
        self.hosts.has = Inventory(marked=marks, **found)

    async def sweep(self, deployment: str = "tests") -> Sweep:
        client: Any = self.temporal
        with ThreadPoolExecutor(1) as threads:
            activity = Reaping(client, self.store, Providers(self.providers), DEPLOYMENT, threads).sweep
            done: Sweep = await environment().run(activity, ReaperOrder(deployment=deployment))
        return done


@pytest.fixture
def one() -> Sweeping:
    return Sweeping()


def a_mark(number: int = 0, *, context: str = "here", provider: str = "local", **changes: Any) -> Mark:
    key = f"{IDENTITY.run_key}-{number}"
    identity = IDENTITY.model_copy(update={"run_key": key, "custody_id": f"custody-{key}", **changes})
    return Mark(context=context, hosts=HOSTS.model_copy(update={"identity": identity, "provider": provider}))


async def test_inventory_is_read_before_any_custody_is_asked_for(one: Sweeping) -> None:
    """So that what begins in between, which has its custody first, is never taken for an orphan."""
    one.has(a_mark(0), a_mark(1))
    await one.sweep()
    first, *rest = one.hosts.done
    assert first == "inventory"
    assert sorted(rest) == [f"describe custody-{IDENTITY.run_key}-{n}" for n in (0, 1)]


async def test_a_sweep_releases_and_writes_nothing(one: Sweeping) -> None:
    one.has(a_mark())
    assert len((await one.sweep()).suspects) == 1
    assert one.hosts.done == ["inventory", f"describe custody-{IDENTITY.run_key}-0"]
    assert one.store.done == [f"read {LEASE}"]


async def test_what_has_no_custody_is_a_suspect_with_its_claims(one: Sweeping) -> None:
    one.has(a_mark())
    seen = await one.sweep()
    [suspect] = seen.suspects
    assert (suspect.custody, suspect.custody_run_id, suspect.lease) == ("absent", "", "")
    assert [claim.id for claim in suspect.claims] == [f"cluster/{IDENTITY.run_key}-0"]
    assert suspect.hosts == a_mark().hosts
    assert (seen.found, seen.held, seen.search_attributes) == (1, 0, ("LanyardRunKey",))


@pytest.mark.parametrize("status", CLOSED, ids=lambda status: status.name)
async def test_a_custody_that_closed_in_any_way_guards_nothing(one: Sweeping, status: WorkflowExecutionStatus) -> None:
    one.has(a_mark())
    one.temporal.custodies[f"custody-{IDENTITY.run_key}-0"] = status
    [suspect] = (await one.sweep()).suspects
    assert suspect.custody == CLOSED[status].replace("_", " ")
    assert suspect.custody_run_id == "its-run-id"


@pytest.mark.parametrize("status", [WorkflowExecutionStatus.RUNNING, 8, None], ids=str)
async def test_a_custody_that_is_open_or_in_a_state_not_known_here_guards(one: Sweeping, status: Any) -> None:
    one.has(a_mark())
    one.temporal.custodies[f"custody-{IDENTITY.run_key}-0"] = status
    seen = await one.sweep()
    assert (seen.found, seen.held, seen.suspects, seen.unreadable) == (1, 1, (), 0)


async def test_a_custody_that_nobody_answers_for_is_unknown_and_not_absent(one: Sweeping) -> None:
    one.has(a_mark(0), a_mark(1))
    one.temporal.custodies[f"custody-{IDENTITY.run_key}-0"] = SILENT
    seen = await one.sweep()
    assert (seen.found, seen.held, seen.unreadable) == (2, 0, 1)
    assert [each.hosts.identity.run_key for each in seen.suspects] == [f"{IDENTITY.run_key}-1"]
    assert any(IDENTITY.run_key in note and "connection refused" in note for note in seen.notes)


async def test_a_lease_that_cannot_be_read_may_be_renewed_by_somebody(one: Sweeping) -> None:
    one.has(a_mark())
    one.store.down = True
    seen = await one.sweep()
    assert (seen.suspects, seen.unreadable) == ((), 1)


async def test_a_lease_is_told_by_its_bytes(one: Sweeping) -> None:
    one.has(a_mark())
    told = []
    for body in (b'{"sequence": 1}', b'{"sequence": 1}', b'{"sequence": 2}', b"damaged"):
        one.store.objects[LEASE] = body
        told.append((await one.sweep()).suspects[0].lease)
    assert told[0] == told[1]
    assert len({"", *told}) == 4


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        (a_mark(deployment="tests-2"), "of deployment tests-2"),
        (a_mark(deployment="test"), "of deployment test"),
        (a_mark(deployment="TESTS"), "of deployment TESTS"),
        (a_mark(namespace="default2"), "of namespace default2"),
        (a_mark(namespace=""), "of namespace (none)"),
        (a_mark(context="there"), "made at local there"),
        (a_mark(provider="skypilot"), "made at skypilot here"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
async def test_another_s_mark_is_foreign_and_its_custody_is_not_asked_for(one: Sweeping, mark: Mark, says: str) -> None:
    one.has(mark)
    seen = await one.sweep()
    assert (seen.found, seen.foreign, seen.suspects) == (0, 1, ())
    assert seen.notes == (f"foreign: {IDENTITY.run_key}-0: {says}",)
    assert one.hosts.done == ["inventory"]


async def test_a_provider_that_cannot_tell_hides_nothing_of_the_others(one: Sweeping) -> None:
    broken = HostsStandIn()
    broken.name = "broken"
    broken.failing["inventory"] = AbsenceUnknown("the API does not answer")
    one.providers["broken"] = broken
    one.has(a_mark(), unmarked=("a",), unreadable=("b is damaged",), left_out=3)
    seen = await one.sweep()
    assert (seen.found, seen.foreign, seen.unreadable, seen.left_out) == (1, 1, 2, 3)
    assert "unreadable: the inventory of broken: the API does not answer" in seen.notes
    assert len(seen.suspects) == 1


async def test_what_is_found_is_bounded_however_much_there_is(one: Sweeping) -> None:
    marks = [a_mark(number) for number in range(1000)]
    one.has(*marks, unmarked=("x" * 5000,) * 1000, unreadable=("y" * 5000,) * 1000)
    seen = await one.sweep()
    assert (seen.found, seen.foreign, seen.unreadable) == (1000, 1000, 1000)
    assert (len(seen.suspects), seen.left_out) == (reaping.MOST_SUSPECTS, 1000 - reaping.MOST_SUSPECTS)
    assert len(seen.model_dump_json()) < 150_000


async def test_an_order_for_another_deployment_is_refused_before_anything_is_looked_at(one: Sweeping) -> None:
    one.has(a_mark())
    with pytest.raises(ApplicationError, match="LANYARD_DEPLOYMENT"):
        await one.sweep("team-b")
    assert one.hosts.done == []
