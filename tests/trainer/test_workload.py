"""What a script is written with keeps the contract: its order, its attempts, its checkpoints, what it exports."""

from __future__ import annotations

import json
import pickle
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
import ray.train
import torch
from ray.train import Checkpoint, CheckpointConsistencyMode

from tests.trainer.test_job import ORDER
from trainer import inspect_results, last_commit, storage, workload
from trainer.inspection.evidence import NO_MOMENTUM
from trainer.job import parse_script
from trainer.lease_keeper import EXIT_EXPIRED, EXIT_NO_LEASE, EXIT_TOMBSTONE, EXIT_USAGE

CONTRACT = (Path(__file__).parents[2] / "docs" / "workload-contract.md").read_text()
VERSIONS = {"torch": str(torch.__version__), "ray": ray.__version__}
SCRIPT: dict[str, Any] = {
    **ORDER,
    "workload": {"kind": "script", "steps": 12, "checkpoint_interval": 4},
    "pins": {**ORDER["pins"], **VERSIONS},
    "drill": {"after_step": 4, "hold_s": 5},
    "world_size": 1,
}
"""One rank, so that nobody is waited for."""


def order(**changes: Any) -> workload.Order:
    return parse_script(json.dumps({**SCRIPT, **changes}))


# The order.


def test_a_scripts_order_is_read() -> None:
    read = workload.load_order({"LANYARD_JOB": json.dumps({**SCRIPT, "world_size": 2})})
    assert (read.steps, read.checkpoint_interval, read.world_size) == (12, 4, 2)
    assert read.root == "lanyard/runs/demo-0123456789"
    assert [step for step in range(1, 13) if read.is_boundary(step)] == [4, 8, 12]
    assert order(workload={"kind": "script", "steps": 10, "checkpoint_interval": 4}).is_boundary(10)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"workload": ORDER["workload"]}, "workload.kind"),
        ({"workload": {"kind": "script", "steps": 12}}, "workload.checkpoint_interval"),
        ({"workload": {"kind": "script", "steps": 0, "checkpoint_interval": 1}}, "workload.steps"),
        ({"workload": {**SCRIPT["workload"], "recipe": {}}}, "workload.recipe"),
        ({"drill": {"after_step": 12, "hold_s": 1}}, "drill.after_step"),
        ({"drill": {"after_step": 5, "hold_s": 1}}, "drill.after_step"),
        ({"schema": 2}, "schema"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_what_is_wrong_with_a_scripts_order_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(workload.JobError, match=re.escape(named)):
        order(**changes)


def test_the_order_becomes_rays_configuration_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-8a41")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    run = workload.run_config(order())
    assert (run.name, run.storage_path) == ("main", "lanyard/runs/demo-0123456789/train")
    assert (run.failure_config.max_failures, run.failure_config.controller_failure_limit) == (2, 1)
    assert b"canary-8a41" not in pickle.dumps(run.storage_filesystem)
    scaling = workload.scaling_config(order(world_size=2, device="cuda"))
    assert (scaling.num_workers, scaling.use_gpu, scaling.placement_strategy) == (2, True, "STRICT_SPREAD")
    assert workload.torch_config(order(device="cuda")).backend == "nccl"
    assert workload.torch_config(order()).backend == "gloo"


# Checkpoints and hashes.


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_a_state_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    model, optimizer = trained(2)
    workload.save_state(tmp_path, {"step": 2, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
    state = workload.load_state(Checkpoint(str(tmp_path), pafs.LocalFileSystem()))
    assert state["step"] == 2
    assert workload.model_sha256(state["model"]) == workload.model_sha256(model.state_dict())
    assert workload.optimizer_sha256(state["optimizer"]) == workload.optimizer_sha256(optimizer.state_dict())


def cut(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def flipped(raw: bytes) -> bytes:
    at = raw.index(b"\x00\x00\x80\x3f")  # within a tensor's own bytes
    return raw[:at] + b"\x01" + raw[at + 1 :]


@pytest.mark.parametrize("damage", [cut, flipped, lambda raw: b"", lambda raw: None])
def test_a_damaged_state_is_told_from_one_that_loads(tmp_path: Path, damage: Callable[[bytes], bytes | None]) -> None:
    workload.save_state(tmp_path, {"step": 1, "model": {"weight": torch.ones(16)}})
    file = tmp_path / "checkpoint.pt"
    bytes_left = damage(file.read_bytes())
    file.unlink()
    if bytes_left is not None:
        file.write_bytes(bytes_left)
    with pytest.raises(workload.CheckpointDamaged, match=f"{tmp_path.name}"):
        workload.load_state(Checkpoint(str(tmp_path), pafs.LocalFileSystem()))


def test_the_optimizers_hash_sees_all_that_any_optimizer_keeps() -> None:
    assert workload.optimizer_sha256(trained(0)[1].state_dict()) == NO_MOMENTUM
    state = trained(2)[1].state_dict()
    before = workload.optimizer_sha256(state)
    assert before == workload.optimizer_sha256(trained(2)[1].state_dict())
    for name in ("step", "exp_avg", "exp_avg_sq"):
        other = trained(2)[1].state_dict()
        other["state"][1][name] = other["state"][1][name] + 1
        assert workload.optimizer_sha256(other) != before


# Attempts, with Ray Train's own answers made up.


class Train:
    """Ray Train as one rank sees it: reports are committed at once, below ``root`` as Ray would have them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reported: list[tuple[str, dict[str, Any]]] = []
        self.committing = True
        self.asked = 0
        self.starting = False

    def report(self, metrics: dict[str, Any], checkpoint: Checkpoint, checkpoint_dir_name: str) -> None:
        target = self.root / "train" / "main" / checkpoint_dir_name
        checkpoint.to_directory(str(target))
        self.reported.append((checkpoint_dir_name, dict(metrics)))
        results = [{"checkpoint_dir_name": name, "metrics": told} for name, told in self.reported]
        snapshot = {
            "checkpoint_results": results,
            "checkpoint_report_indices": list(range(len(results))),
            "latest_checkpoint_result": results[-1],
            "current_report_index": len(results),
        }
        (target.parent / "checkpoint_manager_snapshot.json").write_text(json.dumps(snapshot))

    def checkpoint(self, name: str) -> Checkpoint:
        return Checkpoint(f"lanyard/runs/demo-0123456789/train/main/{name}", storage.filesystem())

    def get_checkpoint(self) -> Checkpoint | None:
        return self.checkpoint(self.reported[-1][0]) if self.reported else None

    def get_all(self, consistency_mode: CheckpointConsistencyMode, timeout_s: float) -> list[Any]:
        assert consistency_mode is CheckpointConsistencyMode.COMMITTED
        self.asked += 1
        return [types.SimpleNamespace(checkpoint=self.checkpoint(name)) for name, _ in self.reported]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    root = tmp_path / "lanyard" / "runs" / "demo-0123456789"
    root.mkdir(parents=True)
    made = Train(root)
    context = types.SimpleNamespace(
        get_world_rank=lambda: 0, get_world_size=lambda: 1, get_local_rank=lambda: 0, get_node_id=lambda: "ab" * 28
    )
    store = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    put_once = storage.put_once

    def put(there: pafs.FileSystem, path: str, data: bytes) -> bool:
        # A local disk, unlike S3, has directories that must be there first.
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        return put_once(there, path, data)

    monkeypatch.setattr("trainer.storage.filesystem", lambda: store)
    monkeypatch.setattr("trainer.storage.put_once", put)
    monkeypatch.setattr("trainer.standby.keep_one_ready", lambda: setattr(made, "starting", True))
    monkeypatch.setattr("trainer.standby.wait_until_ready", lambda _limit_s: True)
    monkeypatch.setattr("ray.train.get_context", lambda: context)
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.2")
    monkeypatch.setattr("ray.train.report", made.report)
    monkeypatch.setattr("ray.train.get_checkpoint", made.get_checkpoint)
    monkeypatch.setattr("ray.train.get_all_reported_checkpoints", made.get_all)
    monkeypatch.setattr("trainer.attempt.time.sleep", lambda _s: None)
    return made


def save(step: int) -> Callable[[Path], None]:
    return lambda directory: workload.save_state(directory, {"step": step, "model": {"weight": torch.ones(step)}})


def run(asked: workload.Order, until: int) -> workload.Attempt[dict[str, Any]]:
    """An attempt that trains to ``until``; at the last step it ends as it should, before that it is killed."""
    with workload.Attempt.begin(asked, workload.load_state) as attempt:
        start = attempt.restored["step"] if attempt.restored else 0
        attempt.start(start, f"{start:064x}", f"{start:064x}")
        for step in range(start + 1, until + 1):
            attempt.stepped(step)
            if asked.is_boundary(step):
                attempt.report(step, 1 / step, save(step))
        if until == asked.steps:
            attempt.final(f"{until:064x}", f"{until:064x}")
    return attempt


def evidence(train: Train, number: int, kind: str) -> dict[str, Any]:
    path = train.root / "evidence" / "main" / f"attempt-{number:03d}" / f"rank-0.{kind}.json"
    return dict(json.loads(path.read_bytes()))


def test_an_attempt_goes_on_after_the_last_commit_and_says_so(train: Train) -> None:
    assert run(order(drill=None), 9).number == 1
    second = run(order(drill=None), 12)
    assert second.number == 2
    assert second.restored_from == "checkpoint_step-000000008_attempt-001"
    assert evidence(train, 2, "start")["restored_step"] == 8
    assert evidence(train, 2, "first-step")["step"] == 9
    assert evidence(train, 2, "final")["step"] == 12
    steps = [(told["step"], told["attempt"], told["steps"]) for _, told in train.reported]
    assert steps == [(4, 1, 12), (8, 1, 12), (12, 2, 12)]
    assert train.starting


def test_a_damaged_commit_is_passed_over_for_the_one_before(train: Train) -> None:
    run(order(drill=None), 9)
    (train.root / "train/main/checkpoint_step-000000008_attempt-001/checkpoint.pt").write_bytes(b"PK\x03\x04")
    assert run(order(drill=None), 12).restored_from == "checkpoint_step-000000004_attempt-001"


def test_no_commit_that_loads_is_an_error_and_not_a_fresh_start(train: Train) -> None:
    run(order(drill=None), 5)
    (train.root / "train/main/checkpoint_step-000000004_attempt-001/checkpoint.pt").unlink()
    with pytest.raises(workload.CheckpointDamaged, match="no commit of this run loads"):
        run(order(drill=None), 12)


def test_a_run_that_resumes_begins_with_the_earlier_runs_checkpoint(train: Train) -> None:
    earlier = train.root.parent / "old-1" / "train" / "main" / "checkpoint_x"
    earlier.mkdir(parents=True)
    save(8)(earlier)
    address = "s3://lanyard/runs/old-1/train/main/checkpoint_x"
    run(order(drill=None, resume={"checkpoint": address}), 12)
    start = evidence(train, 1, "start")
    assert (start["restored_step"], start["restored_from"]) == (8, address)


@pytest.mark.parametrize(("begun_before", "holds"), [(True, True), (False, False)])
def test_only_an_attempt_from_before_the_drills_step_holds(
    train: Train, capsys: pytest.CaptureFixture[str], begun_before: bool, holds: bool
) -> None:
    if not begun_before:
        run(order(drill=None), 5)
    capsys.readouterr()
    run(order(), 12)
    said = capsys.readouterr().out
    assert ("checkpoint_step-000000004_attempt-001 is committed; holding" in said) is holds
    assert ("nobody killed this rank" in said) is holds


def test_a_hold_looks_again_until_the_commit_is_there(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(**asked: Any) -> list[Any]:
        known = train.get_all(**asked)
        return known if train.asked > 2 else []

    monkeypatch.setattr("ray.train.get_all_reported_checkpoints", late)
    run(order(), 12)
    assert train.asked == 3
    assert "is committed; holding" in capsys.readouterr().out


def test_reports_elsewhere_and_without_a_start_are_refused(train: Train) -> None:
    with workload.Attempt.begin(order(), workload.load_state) as attempt:
        with pytest.raises(RuntimeError, match="call start"):
            attempt.stepped(1)
        with pytest.raises(RuntimeError, match="call start"):
            attempt.report(4, 0.5, save(4))
        attempt.start(0, "0" * 64, "0" * 64)
        with pytest.raises(ValueError, match="step 5 is no checkpoint boundary"):
            attempt.report(5, 0.5, save(5))
    assert not train.reported


@pytest.mark.parametrize(("changes", "why"), [({"world_size": 2}, "1 ranks were started"), ({"pins": {}}, "pins")])
def test_a_worker_that_is_not_as_ordered_does_not_begin(train: Train, changes: dict[str, Any], why: str) -> None:
    pins = {"pins": {**SCRIPT["pins"], "torch": "1.0"}} if "pins" in changes else changes
    with pytest.raises(RuntimeError, match=why):
        workload.Attempt.begin(order(**pins), workload.load_state)


# Exports, and what the inspector says of such a run.


def result(train: Train) -> Any:
    name, metrics = train.reported[-1]
    return types.SimpleNamespace(checkpoint=train.checkpoint(name), metrics=metrics)


def inspected(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: Any = SCRIPT) -> dict[str, Any]:
    expected = tmp_path / "order.json"
    expected.write_text(json.dumps(asked))
    capsys.readouterr()
    inspect_results.main(
        [str(train.root), "--submission", ORDER["submission_id"], "--expect", str(expected), "--json", "-"]
    )
    return dict(json.loads(capsys.readouterr().out))


def failures(document: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["detail"] for check in document["checks"] if not check["ok"]}


def test_a_script_that_keeps_the_contract_is_verified(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(order(), 9)
    run(order(), 12)
    place = workload.publish_exports(order(), result(train), {"notes.txt": b"all well"})
    assert place == "s3://lanyard/runs/demo-0123456789/exports/demo-0123456789-train"
    exported = train.root / "exports" / ORDER["submission_id"]
    assert sorted(path.name for path in exported.iterdir()) == ["SHA256SUMS", "notes.txt", "result.json"]
    found = inspected(train, tmp_path, capsys)
    assert failures(found) == {}
    assert found["ok"]
    assert {"manifest", "ranks", "first steps", "result", "commit", "checkpoint"} <= {
        c["name"] for c in found["checks"]
    }
    assert {"steps", "scalars", "rrd verify", "held-out loss"} <= {c["name"] for c in found["not_applicable"]}
    # An export that is published again is the same, byte for byte.
    assert workload.publish_exports(order(), result(train), {"notes.txt": b"all well"}) == place


def test_a_script_need_not_export(train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(order(), 12)
    found = inspected(train, tmp_path, capsys)
    assert found["ok"], failures(found)
    assert "manifest" in {c["name"] for c in found["not_applicable"]}


def test_an_attempt_killed_after_its_last_step_has_nothing_left_to_do(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(order(), 12)
    assert run(order(), 12).number == 2
    found = inspected(train, tmp_path, capsys)
    assert found["ok"], failures(found)


def test_a_script_that_ends_early_or_otherwise_than_ordered_is_not_verified(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(order(), 12)
    longer = {**SCRIPT, "workload": {**SCRIPT["workload"], "steps": 16}}
    assert "ended at step 12, not 16" in failures(inspected(train, tmp_path, capsys, longer))["final state of ranks"]
    resumed = {**SCRIPT, "resume": {"checkpoint": "s3://lanyard/runs/old/train/main/checkpoint_x"}}
    assert "restored state" in failures(inspected(train, tmp_path, capsys, resumed))


def test_a_training_that_did_not_reach_its_end_is_not_exported(train: Train) -> None:
    run(order(), 9)
    with pytest.raises(workload.ExportError, match="ended at step 8 of 12"):
        workload.publish_exports(order(), result(train), {})
    assert not (train.root / "exports").exists()


@pytest.mark.parametrize("name", ["a/b", "../x", "result.json", "SHA256SUMS", "", ".hidden"])
def test_a_name_that_nobody_would_read_is_not_exported(train: Train, name: str) -> None:
    run(order(), 12)
    with pytest.raises(ValueError, match="cannot be exported"):
        workload.publish_exports(order(), result(train), {name: b""})


def test_a_later_run_finds_a_scripts_last_commit_that_loads(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    run(order(drill=None), 9)
    newest = train.root / "train/main/checkpoint_step-000000008_attempt-001/checkpoint.pt"
    newest.write_bytes(cut(newest.read_bytes()))
    capsys.readouterr()
    assert last_commit.main([str(train.root), "--workload", "script"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["checkpoint"].endswith("/checkpoint_step-000000004_attempt-001")
    assert told["step"] == 4
    assert len(told["skipped"]) == 1


# The page.


def test_the_pages_example_is_short_and_uses_what_there_is() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", CONTRACT, re.DOTALL)
    assert len(example.splitlines()) < 120
    compile(example, "train.py", "exec")
    used = set(re.findall(r"workload\.(\w+)", example))
    assert used <= set(workload.__all__)
    for name in re.findall(r"(?:attempt|order)\.(\w+)", example):
        known = {*dir(workload.Attempt), *dir(workload.Order), *workload.Order.__dataclass_fields__}
        assert name in known | {"restored", "rank", "world_size", "device"}


def test_the_page_names_every_helper_and_every_status() -> None:
    assert [name for name in workload.__all__ if not re.search(rf"\b{name}\b", CONTRACT)] == []
    for status in (EXIT_USAGE, EXIT_NO_LEASE, EXIT_TOMBSTONE, EXIT_EXPIRED):
        assert re.search(rf"\b{status}\b", CONTRACT)


def test_the_pages_order_is_one() -> None:
    orders = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", CONTRACT, re.DOTALL) if "pins" in block]
    (shown,) = orders
    assert parse_script(json.dumps(shown)).steps == 40
