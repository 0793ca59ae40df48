"""The order is read whole or refused by the name of the field."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from trainer.job import Drill, Failures, JobError, Recipe, from_environment, parse, storage_in

ORDER: dict[str, Any] = {
    "schema": 1,
    "run_key": "demo-0123456789",
    "submission_id": "demo-0123456789-train",
    "train_name": "main",
    "storage": "s3://lanyard/runs/demo-0123456789",
    "workload": {
        "kind": "regression",
        "recipe": {
            "steps": 32,
            "samples_per_rank": 1024,
            "checkpoint_interval": 4,
            "learning_rate": 0.1,
            "momentum": 0.9,
            "features": 16,
            "batch_size": 128,
            "seed": 7,
        },
    },
    "world_size": 2,
    "device": "cpu",
    "pins": {"torch": "2.13.0+cpu", "ray": "2.58.0", "rerun-sdk": "0.31.4", "pillow": "12.3.0"},
    "drill": {"after_step": 8, "hold_s": 180},
    "resume": None,
    "failures": {"worker": 2, "controller": 1, "preemption": 1},
}


def changed(path: str, value: Any) -> str:
    order = copy.deepcopy(ORDER)
    *parents, last = path.split(".")
    place = order
    for parent in parents:
        place = place[parent]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return json.dumps(order)


def test_a_whole_order_is_read() -> None:
    job = from_environment({"LANYARD_JOB": json.dumps(ORDER)})
    assert job.recipe == Recipe(32, 1024, 4, 0.1, 0.9, 16, 128, 7)
    assert job.recipe.mapping() == ORDER["workload"]["recipe"]
    assert job.drill == Drill(8, 180.0)
    assert job.resume is None
    assert job.failures == Failures(2, 1, 1)
    assert job.world_size == 2
    assert job.run == {"run_key": "demo-0123456789", "submission_id": "demo-0123456789-train", "train_name": "main"}


def test_drill_and_resume_are_optional() -> None:
    resume = {"checkpoint": "s3://lanyard/runs/old/train/main/checkpoint_1/"}
    assert parse(changed("drill", None)).drill is None
    assert parse(changed("resume", resume)).resume == "s3://lanyard/runs/old/train/main/checkpoint_1"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", 2),
        ("schema", KeyError),
        ("run_key", ""),
        ("run_key", "a/b"),
        ("submission_id", 7),
        ("train_name", "other"),
        ("storage", "file:///tmp/x"),
        ("storage", "s3://bucket"),
        ("storage", "s3://key:secret@bucket/p"),
        ("storage", "s3://bucket/a/../b"),
        ("storage", "s3://bucket/a?b"),
        ("workload.kind", "script"),
        ("workload.recipe.steps", 0),
        ("workload.recipe.steps", True),
        ("workload.recipe.steps", 1.5),
        ("workload.recipe.learning_rate", 0),
        ("workload.recipe.learning_rate", "0.1"),
        ("workload.recipe.momentum", 1.0),
        ("workload.recipe.batch_size", 2048),
        ("workload.recipe.seed", -1),
        ("workload.recipe.features", KeyError),
        ("workload.recipe.nesterov", True),
        ("world_size", 0),
        ("device", "tpu"),
        ("pins.torch", KeyError),
        ("pins.numpy", "2"),
        ("drill.after_step", 9),
        ("drill.after_step", 32),
        ("drill.hold_s", -1),
        ("resume", {"checkpoint": "/tmp/x"}),
        ("failures.worker", -1),
        ("failures", KeyError),
        ("surprise", 1),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any) -> None:
    with pytest.raises(JobError) as caught:
        parse(changed(path, value))
    assert path.rsplit(".", 1)[-1] in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_what_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="LANYARD_JOB"):
        from_environment({"LANYARD_JOB": text})


def test_the_storage_of_another_workloads_order_is_read_too() -> None:
    order = changed("workload", {"kind": "script", "steps": 10, "checkpoint_interval": 2})
    assert storage_in({"LANYARD_JOB": order}) == ORDER["storage"]
