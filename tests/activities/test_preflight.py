"""Everything that can fail is tried before anything is paid for, and is refused in one message with its remedy."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.hosts import Offer
from activities.preflight import AMBIENT, Preflight
from activities.storage import Fetched, StorageError
from activities.verification import Application
from tests.activities.stand_ins import HostsStandIn, Objects, environment
from tests.activities.test_script_runs import Tools
from workflows.evidence import Cleared, Deployment, Identity, PreflightOrder
from workflows.orders import MAIN, hosts_order, job_order
from workflows.spec import parse_run

KEY = "mine-0123456789"
ROOT = f"s3://lanyard/team/runs/{KEY}"
IDENTITY = Identity(
    workflow_id="mine",
    run_id="0199aa54-second",
    original_run_id="0199aa54-first",
    run_key=KEY,
    custody_id=f"custody-{KEY}",
    deployment="here",
    namespace="default",
    storage=ROOT,
)
HERE = Deployment(deployment="here", search_attributes=(), secret_fingerprint="0123", application_source="s")
RUN: dict[str, Any] = {
    "name": "mine",
    "hosts": {"provider": "local", "count": 2},
    "storage": {"uri": "s3://lanyard/team/runs"},
    "workload": {"kind": "regression", "recipe": {"steps": 32, "checkpoint_interval": 4}},
}
EARLIER = "s3://lanyard/team/runs/earlier-0123456789"


async def preflight(
    store: Objects,
    *,
    hosts: HostsStandIn | None = None,
    tools: Application | None = None,
    worker: Deployment = HERE,
    recorded: Deployment = HERE,
    environ: dict[str, str] | None = None,
    **changes: Any,
) -> Cleared:
    spec = parse_run(({**RUN, **changes},))
    with ThreadPoolExecutor(1) as threads:
        checks = Preflight(
            store,
            (hosts or HostsStandIn()).providers(),
            tools or Tools(1, "", "not asked"),
            worker,
            threads,
            environment=environ or {},
        )
        order = PreflightOrder(identity=IDENTITY, spec=spec, hosts=hosts_order(spec, IDENTITY), deployment=recorded)
        return await environment().run(checks.preflight, order)


async def refused(store: Objects, **how: Any) -> str:
    """The refusal, which leaves no claim on the prefix."""
    with pytest.raises(ApplicationError) as caught:
        await preflight(store, **how)
    assert (caught.value.type, caught.value.non_retryable) == ("Rejected", True)
    assert IDENTITY.run_id.encode() not in store.objects.get(f"{ROOT}/owner.json", b"")
    return caught.value.message


async def test_a_run_that_can_go_is_cleared_and_leaves_its_mark_alone() -> None:
    store = Objects()
    told = await preflight(store)
    assert told.plan == "2 local hosts, cpu"
    assert told.resume is None
    [(uri, body)] = store.objects.items()
    assert uri == f"{ROOT}/owner.json"
    assert json.loads(body) == {
        "schema": 1,
        "custody_id": f"custody-{KEY}",
        "run_key": KEY,
        "workflow_id": "mine",
        "run_id": "0199aa54-second",
        "deployment": "here",
        "namespace": "default",
    }


# Where the worker runs.


@pytest.mark.parametrize("name", AMBIENT)
async def test_an_address_in_the_environment_is_refused_before_anything_is_asked(name: str) -> None:
    store, hosts = Objects(), HostsStandIn()
    said = await refused(store, hosts=hosts, environ={name: "http://10.0.0.1:8265"})
    assert f"{name} is set" in said
    assert "unset it and restart the worker" in said
    assert store.done == hosts.done == []


async def test_an_empty_variable_is_not_set() -> None:
    assert await preflight(Objects(), environ={"RAY_ADDRESS": ""})


async def test_workers_with_different_secrets_are_told_apart() -> None:
    store = Objects()
    said = await refused(store, worker=HERE.model_copy(update={"secret_fingerprint": "4567"}))
    assert said.startswith("LANYARD_SECRET_FILE: ")
    assert "0123 and 4567" in said
    assert store.done == []


async def test_workers_of_different_deployments_are_told_apart() -> None:
    said = await refused(Objects(), recorded=HERE.model_copy(update={"deployment": "there"}))
    assert said.startswith("LANYARD_DEPLOYMENT: workers of there and of here")


async def test_another_version_of_the_source_is_no_reason_to_refuse() -> None:
    assert await preflight(Objects(), worker=HERE.model_copy(update={"application_source": "t"}))


async def test_what_this_deployment_is_is_told_as_it_was_set() -> None:
    with ThreadPoolExecutor(1) as threads:
        checks = Preflight(Objects(), HostsStandIn().providers(), Tools(1, ""), HERE, threads)
        assert await environment().run(checks.orient) == HERE


# The prefix.


@pytest.mark.parametrize("above", ["s3://lanyard/team", "s3://lanyard/team/runs"])
async def test_no_run_is_put_inside_another_at_any_depth(above: str) -> None:
    store = Objects({f"{above}/owner.json": b'{"custody_id": "custody-other"}'})
    said = await refused(store)
    assert said.startswith(f"storage.uri: {above} already holds a run")
    assert f'"resume": {{"from": "{above}"}}' in said
    assert not any(each.startswith("write") for each in store.done)


async def test_runs_beside_it_are_no_reason_to_refuse() -> None:
    store = Objects({f"{EARLIER}/owner.json": b"{}", f"{EARLIER}/train/main/x.tfstate": b""})
    before = dict(store.objects)
    assert await preflight(store)
    assert before.items() <= store.objects.items()


@pytest.mark.parametrize("name", ["terraform.tfstate", "prod.tfstate", "x.tfstate.lock.info", ".terraform.lock.hcl"])
async def test_another_project_s_state_is_left_alone(name: str) -> None:
    store = Objects({f"s3://lanyard/team/runs/{name}": b"{}"})
    said = await refused(store)
    assert "looks like another project's state" in said
    assert name in said
    assert list(store.objects) == [f"s3://lanyard/team/runs/{name}"]


OWNERS: dict[str, bytes] = {
    "another's": b'{"custody_id": "custody-other"}',
    "no json": b"{",
    "no object": b"[]",
    "binary": b"\xff\xfe",
    "empty": b"",
}


@pytest.mark.parametrize("owner", OWNERS)
async def test_a_root_that_is_a_stranger_s_is_refused(owner: str) -> None:
    store = Objects({f"{ROOT}/owner.json": OWNERS[owner]})
    assert f"{ROOT} already holds owner.json and is not this run's" in await refused(store)
    assert store.objects == {f"{ROOT}/owner.json": OWNERS[owner]}


async def test_foreign_objects_in_the_root_are_refused() -> None:
    store = Objects({f"{ROOT}/weights.bin": b"precious"})
    assert f"{ROOT} already holds weights.bin" in await refused(store)
    assert store.objects == {f"{ROOT}/weights.bin": b"precious"}


async def test_a_reset_run_meets_its_own_mark_and_goes_on() -> None:
    store = Objects()
    await preflight(store)
    mine = json.loads(store.objects[f"{ROOT}/owner.json"])
    store.objects[f"{ROOT}/owner.json"] = json.dumps({**mine, "run_id": "0199aa54-first"}).encode()
    store.objects[f"{ROOT}/train/main/checkpoint_4/x"] = b"kept"
    assert await preflight(store)
    assert json.loads(store.objects[f"{ROOT}/owner.json"])["run_id"] == "0199aa54-second"
    assert store.objects[f"{ROOT}/train/main/checkpoint_4/x"] == b"kept"


async def test_a_probe_left_by_a_worker_that_died_is_no_stranger_and_is_removed() -> None:
    store = Objects({f"{ROOT}/probe-0a1b2c3d": b"x"})
    assert await preflight(store)
    assert not any("probe-" in uri for uri in store.objects)


# The probe: a list proves nothing.


class Conditional(Objects):
    """Storage with conditional writes, as AWS has them."""

    code = "PreconditionFailed"

    async def put(self, uri: str, body: bytes, *, only_if_absent: bool = False) -> None:
        if only_if_absent and uri in self.objects:
            raise StorageError(f"cannot write {uri}: {self.code}", self.code)
        await super().put(uri, body)


class WithoutConditions(Conditional):
    """Storage that refuses the condition itself, and not because of what is there."""

    code = "NotImplemented"


class Altering(Objects):
    async def get(self, uri: str, unless: str | None = None) -> Fetched | None:
        got = await super().get(uri, unless)
        return Fetched(got.body[:-1], "x") if got and got.body and "probe-" in uri else got


class Forgetting(Objects):
    async def put(self, uri: str, body: bytes, *, only_if_absent: bool = False) -> None:
        self.done.append(f"write {uri}")


class Keeping(Objects):
    async def delete(self, uri: str) -> None:
        self.done.append(f"delete {uri}")


class Denying(Objects):
    """Lists, and denies one thing."""

    denied = ""

    def _look(self, what: str, uri: str) -> None:
        if what == self.denied:
            raise StorageError(f"cannot {what} {uri}: AccessDenied; give the worker's credentials …", "AccessDenied")
        super()._look(what, uri)


async def test_conditional_writes_are_recognised_both_ways() -> None:
    assert (await preflight(Conditional())).conditional_writes is True
    assert (await preflight(Objects())).conditional_writes is False
    assert (await preflight(WithoutConditions())).conditional_writes is False


@pytest.mark.parametrize("storage", [Altering, Forgetting])
async def test_what_does_not_read_back_as_it_was_written_cannot_be_used(storage: type[Objects]) -> None:
    store = storage()
    assert "does not read back what was written; this storage cannot be used" in await refused(store)
    assert not any("probe-" in uri for uri in store.objects)


async def test_a_delete_that_does_not_delete_is_seen() -> None:
    assert "is still there after it was deleted" in await refused(Keeping())


@pytest.mark.parametrize("denied", ["write", "read", "delete", "list"])
async def test_each_right_that_is_missing_is_named(denied: str) -> None:
    store = Denying()
    store.denied = denied
    said = await refused(store)
    assert said.startswith(f"storage.uri: cannot {denied} s3://lanyard/team")
    assert "AccessDenied" in said


async def test_storage_that_is_down_is_said_to_be() -> None:
    store = Objects()
    store.down = True
    assert "EndpointConnectionError" in await refused(store)


# Hosts, source, resume.


async def test_all_problems_of_the_hosts_are_told_at_once() -> None:
    hosts = HostsStandIn()
    hosts.problems = ["hosts.cpus: 0 is too few", "hosts.count: 9 is too many"]
    assert await refused(Objects(), hosts=hosts) == "hosts: hosts.cpus: 0 is too few; hosts.count: 9 is too many"


@pytest.mark.parametrize(
    ("price", "limits", "words"),
    [
        (120.0, {"budget": 30}, "30 US dollars last 15 minutes at 120.00 an hour (2 of 8), less than limits.provision"),
        (120.0, {"budget": 40}, ""),
        (120.0, {"budget": 30, "provision": "10m"}, ""),
        (120.0, {}, ""),
        (0.0, {"budget": 0.01}, ""),
    ],
)
async def test_a_budget_must_last_until_the_hosts_are_there(price: float, limits: dict[str, Any], words: str) -> None:
    hosts = HostsStandIn()
    hosts.offered = Offer("2 of 8", price)
    if words:
        assert words in await refused(Objects(), hosts=hosts, limits=limits)
    else:
        cleared = await preflight(Objects(), hosts=hosts, limits=limits)
        assert (cleared.plan, cleared.price_per_hour) == ("2 of 8", price)


async def test_a_provider_that_this_worker_does_not_have_is_refused() -> None:
    hosts = HostsStandIn()
    hosts.name = "slurm"
    assert "hosts.provider: 'local' is not available on this worker; it has slurm" in await refused(
        Objects(), hosts=hosts
    )


async def test_source_that_could_not_be_delivered_is_refused_now_and_not_after_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "train.py").symlink_to("/etc/passwd")
    script = {
        "kind": "script",
        "working_dir": str(tmp_path),
        "entrypoint": ["python", "train.py"],
        "steps": 40,
        "checkpoint_interval": 5,
    }
    hosts = HostsStandIn()
    said = await refused(Objects(), hosts=hosts, workload=script)
    assert said.startswith("workload.working_dir: ")
    assert "is a link" in said
    assert hosts.done == []
    (tmp_path / "train.py").unlink()
    said = await refused(Objects(), hosts=hosts, workload=script)
    assert said.startswith("workload.entrypoint: train.py is no file in ")
    (tmp_path / "train.py").touch()
    assert await preflight(Objects(), hosts=hosts, workload=script)


def last_commit(step: int) -> Tools:
    told = {"schema": 1, "checkpoint": f"{EARLIER}/train/main/checkpoint_{step}", "step": step, "skipped": []}
    return Tools(0, "a warning\n" + json.dumps(told) + "\n")


RESUME: dict[str, Any] = {"resume": {"from": EARLIER}, "drill": {"after_step": 16}}


async def test_a_commit_that_loads_is_where_it_starts() -> None:
    tools = last_commit(12)
    told = await preflight(Objects(), tools=tools, **RESUME)
    assert told.resume
    assert (told.resume.source, told.resume.step) == (EARLIER, 12)
    assert told.resume.checkpoint == f"{EARLIER}/train/main/checkpoint_12"
    *asked, training = tools.asked
    assert asked == ["trainer.last_commit", EARLIER, "--patient", "--workload", "regression", "--for"]
    # As the training itself is told, which is what it holds the commit against.
    spec = parse_run(({**RUN, **RESUME},))
    job = job_order(spec, IDENTITY, hosts_order(spec, IDENTITY), MAIN, told.resume).order
    assert json.loads(training) == {"recipe": job["workload"]["recipe"], "world_size": job["world_size"]}


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (16, "drill.after_step: must be more than 16"),
        (20, "drill.after_step: must be more than 20"),
        (32, "workload.recipe.steps: must be more than 32, the step of the commit to resume from; raise it"),
    ],
)
async def test_a_commit_that_leaves_no_drill_or_no_work_is_refused(step: int, says: str) -> None:
    assert says in await refused(Objects(), tools=last_commit(step), **RESUME)


async def test_a_run_without_a_commit_that_loads_is_refused_and_a_silent_storage_is_not_its_fault() -> None:
    said = await refused(Objects(), tools=Tools(3, "", "last_commit: none loads"), **RESUME)
    assert said == "resume.from: none loads"
    with pytest.raises(ApplicationError, match="cannot be read") as caught:
        await preflight(Objects(), tools=Tools(2, "", "last_commit: cannot be read"), **RESUME)
    assert not caught.value.non_retryable
