"""A script run is ordered, watched, proved, verified and resumed like any other; what is not proved of it is said."""

from __future__ import annotations

import copy
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.checkpoints import DamagedRecord, commits_of
from activities.drill import Drill
from activities.hosts import Offer
from activities.hosts.reach import Providers
from activities.jobs import package
from activities.preflight import Preflight
from activities.proof import Proving, evidence_in
from activities.report_material import Found
from activities.report_page import render
from activities.reporting import report
from activities.verification import Application, Verification
from tests.activities import sample_run as sample
from tests.activities.sample_run import MemoryStorage
from workflows.evidence import (
    Artifacts,
    Cleared,
    Commit,
    Deployment,
    DrillOrder,
    Identity,
    NotApplicable,
    PreflightOrder,
    ProofOrder,
    VerifyOrder,
)
from workflows.orders import MAIN, hosts_order, job_order
from workflows.policy import not_checked
from workflows.spec import parse_run

CONTRACT = (Path(__file__).parents[2] / "docs" / "workload-contract.md").read_text()
KEY = "mine-0123456789"
IDENTITY = Identity(
    workflow_id="mine",
    run_id="0199aa54-7f0e-7d3a-9a53-0c7e4f2b1c11",
    original_run_id="0199aa54-7f0e-7d3a-9a53-0c7e4f2b1c11",
    run_key=KEY,
    custody_id=f"custody-{KEY}",
    deployment="test",
    storage=f"s3://lanyard/runs/{KEY}",
)
RUN: dict[str, Any] = {
    "name": "mine",
    "hosts": {"provider": "local", "count": 2},
    "storage": {"uri": "s3://lanyard/runs"},
    "workload": {
        "kind": "script",
        "working_dir": "examples/mine",
        "entrypoint": ["python", "train.py"],
        "steps": 40,
        "checkpoint_interval": 5,
    },
    "drill": {"after_step": 10},
}
EARLIER = "s3://lanyard/runs/earlier-0123456789"


def documents(kind: str) -> list[dict[str, Any]]:
    """The JSON objects that the page shows, of those that have a key."""
    blocks = re.findall(r"```json\n(.*?)```|^`(\{.*?\})`$", CONTRACT, re.DOTALL | re.MULTILINE)
    return [json.loads(block or line) for block, line in blocks if kind in (block or line)]


# The order.


def test_the_pages_run_json_is_one_and_becomes_the_pages_order() -> None:
    (shown,) = documents('"working_dir"')
    (ordered,) = documents('"pins"')
    spec = parse_run((shown,))
    job = job_order(spec, IDENTITY, hosts_order(spec, IDENTITY), MAIN, None)
    assert job.order == ordered
    assert job.entrypoint == "python -m trainer.lease_keeper -- python train.py"


def test_a_working_directory_with_a_trainer_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "mine.py").write_text("")
    with pytest.raises(ValueError, match="rename yours"):
        package({"": tmp_path})
    assert package({"trainer": tmp_path / "trainer"})


# Watching.


def test_a_report_without_a_step_is_told_as_such() -> None:
    record = {
        "checkpoint_results": [{"checkpoint_dir_name": "checkpoint_x", "metrics": {"loss": 1.0}}],
        "latest_checkpoint_result": None,
        "current_report_index": 1,
    }
    with pytest.raises(DamagedRecord, match=r"`step` \(see docs/workload-contract\.md\)"):
        commits_of(json.dumps(record).encode())


# Evidence.


def start(**changes: Any) -> dict[str, Any]:
    (shown,) = documents('"restored_from": null')
    return {**copy.deepcopy(shown), **changes}


def test_the_pages_evidence_is_accepted() -> None:
    assert evidence_in("attempt-001/rank-0.start.json", json.dumps(start()).encode())["rank"] == 0
    for kind in ("first-step", "final"):
        line = re.search(rf"`rank-<r>\.{kind}\.json`.*?`(\{{.*?\}})`", CONTRACT, re.DOTALL)
        assert line
        shown = line[1].replace('"at": "…"', '"at": "2026-11-30T12:00:00Z"')
        assert evidence_in(f"attempt-001/rank-0.{kind}.json", shown.encode())["attempt"] == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"process": {"pid": "4242", "start_time": 1, "boot_id": "x"}}, "process.pid is '4242'"),
        ({"process": None}, "process.pid is None"),
        ({"restored_step": None}, "restored_step is None"),
        ({"restored_step": True}, "restored_step is True"),
        ({"host": {"hostname": "x"}}, "host.fingerprint is None"),
        ({"model_sha256": 7}, "model_sha256 is 7"),
        ({"at": "yesterday"}, "yesterday"),
    ],
)
def test_evidence_that_cannot_be_relied_on_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        evidence_in("attempt-001/rank-0.start.json", json.dumps(start(**changes)).encode())


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null", b"7"])
def test_what_is_no_evidence_at_all_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"attempt is None|Expecting"):
        evidence_in("attempt-001/rank-0.start.json", body)
    with pytest.raises(ValueError, match="no name of a rank's evidence"):
        evidence_in("attempt-001/notes.json", b"{}")


async def test_damaged_evidence_ends_the_proof_and_the_choice_with_its_name() -> None:
    place = f"{IDENTITY.storage}/evidence/main/attempt-001/rank-0.start.json"
    store = MemoryStorage({place: json.dumps(start(process=None, world_size=1)).encode()})
    proof = ProofOrder(identity=IDENTITY, world_size=1, victim=None, strike=None, parity=False)
    spec = parse_run((RUN,))
    job = job_order(spec, IDENTITY, hosts_order(spec, IDENTITY), MAIN, None)
    drill = DrillOrder(job=job, commit=Commit(checkpoint="checkpoint_x", step=10, index=1))
    anything: Any = None
    for asked in (
        ActivityEnvironment().run(Proving(store).prove, proof),
        ActivityEnvironment().run(Drill(anything, store, Providers({}), anything).choose_victim, drill),
    ):
        with pytest.raises(ApplicationError, match=r"rank-0\.start\.json: process\.pid is None") as caught:
            await asked
        assert caught.value.non_retryable


# Verification.


class Tools(Application):
    """The application environment's tools, with their answers made up."""

    def __init__(self, code: int, out: str, err: str = "") -> None:
        super().__init__(Path())
        self.answer = (code, out, err)
        self.asked: tuple[str, ...] = ()
        self.expected: Any = None

    async def tool(self, module: str, *args: str, given: str = "") -> tuple[int, str, str]:
        self.asked = (module, *args)
        if given:
            self.expected = json.loads(given)
        return self.answer


def verify_order() -> VerifyOrder:
    spec = parse_run((RUN,))
    return VerifyOrder(
        identity=IDENTITY,
        submission_id=f"{KEY}-train",
        distinct_hosts=False,
        distinct_devices=False,
        expect=job_order(spec, IDENTITY, hosts_order(spec, IDENTITY), MAIN, None).order,
    )


async def test_the_inspector_is_told_the_order_and_what_it_skipped_is_kept() -> None:
    why = "a script workload promises nothing of the kind"
    told = {
        "ok": True,
        "checks": [{"name": "ranks", "ok": True, "detail": "2 ranks"}],
        "not_applicable": [{"name": "steps", "why": why}],
        "figures": {"workload": "script"},
    }
    tools = Tools(0, json.dumps(told))
    found = await ActivityEnvironment().run(Verification(tools).verify_artifacts, verify_order())
    assert tools.expected == verify_order().expect
    assert tools.expected["workload"]["kind"] == "script"
    assert tools.asked[-2:] == ("--expect", "-")
    assert found == Artifacts(
        ok=True,
        submission_id=f"{KEY}-train",
        checks=found.checks,
        not_applicable=(NotApplicable(name="steps", why=why),),
        figures={"workload": "script"},
    )


def test_what_was_not_checked_is_said_once_a_reason() -> None:
    found = (("steps", "why"), ("order", "none given"), ("scalars", "why"), ("devices", "devices were not asked for"))
    assert not_checked([NotApplicable(name=name, why=why) for name, why in found]) == (
        "not checked: steps, scalars (why)",
        "not checked: order (none given)",
        "not checked: devices were not asked for",
    )
    assert not_checked(()) == ()


def test_the_report_shows_what_was_not_checked() -> None:
    verdict = sample.succeeded()
    assert verdict.artifacts
    skipped = (NotApplicable(name="held-out loss", why="a script promises <nothing>"),)
    artifacts = verdict.artifacts.model_copy(update={"not_applicable": skipped})
    told = report(verdict.model_copy(update={"artifacts": artifacts}), Found(sample.objects()))
    assert told["artifacts"]["not_applicable"] == [{"name": "held-out loss", "why": "a script promises <nothing>"}]
    text = render(told)
    assert re.search(
        r"held-out loss</th>\s*<td>not checked</td><td class=\"long\">a script promises &lt;nothing&gt;", text
    )


# Resume.


class Probed(MemoryStorage):
    async def delete(self, uri: str) -> None:
        del self.objects[uri]


class Ready:
    """A hosts provider that has nothing against it."""

    def check(self, order: Any) -> list[str]:
        return []

    def offer(self, order: Any) -> Offer:
        return Offer("hosts")


async def cleared(tools: Tools, tmp_path: Path, **changes: Any) -> Cleared:
    (tmp_path / "train.py").write_text("")
    workload = {**RUN["workload"], "working_dir": str(tmp_path)}
    spec = parse_run(({**RUN, "workload": workload, "resume": {"from": EARLIER}, **changes},))
    providers: Any = {"local": Ready()}
    place = Deployment(deployment="test", search_attributes=(), secret_fingerprint="", application_source="")
    with ThreadPoolExecutor(1) as threads:
        preflight = Preflight(Probed({}), Providers(providers), tools, place, threads, environment={})
        order = PreflightOrder(identity=IDENTITY, spec=spec, hosts=hosts_order(spec, IDENTITY), deployment=place)
        return await ActivityEnvironment().run(preflight.preflight, order)


def last_commit(step: int | None) -> str:
    return json.dumps({"schema": 1, "checkpoint": f"{EARLIER}/train/main/checkpoint_x", "step": step, "skipped": []})


async def test_a_scripts_last_commit_is_looked_for_as_a_scripts(tmp_path: Path) -> None:
    tools = Tools(0, last_commit(5))
    found = await cleared(tools, tmp_path)
    assert tools.asked == ("trainer.last_commit", EARLIER, "--patient", "--workload", "script")
    assert found.resume
    assert (found.resume.step, found.resume.checkpoint) == (5, f"{EARLIER}/train/main/checkpoint_x")


async def test_a_commit_that_says_no_step_is_taken(tmp_path: Path) -> None:
    found = await cleared(Tools(0, last_commit(None)), tmp_path)
    assert found.resume
    assert found.resume.step is None


@pytest.mark.parametrize(
    ("code", "final", "type_"), [(3, True, "Rejected"), (2, False, "ResumeUnknown"), (1, False, "ResumeUnknown")]
)
async def test_no_commit_is_refused_and_silence_is_asked_again(
    tmp_path: Path, code: int, final: bool, type_: str
) -> None:
    with pytest.raises(ApplicationError, match=r"resume\.from: so it is") as caught:
        await cleared(Tools(code, "", "a warning\nlast_commit: so it is\n"), tmp_path)
    assert (caught.value.non_retryable, caught.value.type) == (final, type_)


@pytest.mark.parametrize(("step", "field"), [(40, "workload"), (10, "drill.after_step")])
async def test_a_commit_that_leaves_nothing_to_do_is_refused(tmp_path: Path, step: int, field: str) -> None:
    with pytest.raises(ApplicationError, match=re.escape(field)) as caught:
        await cleared(Tools(0, last_commit(step)), tmp_path)
    assert caught.value.type == "Rejected"
