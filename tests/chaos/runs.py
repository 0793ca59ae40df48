"""The runs that scenarios strike: their run.json by slice and ending."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from tests.chaos.scenarios import Scenario
from workflows.activity_names import PROVE

PREFIX: Final = "chaos"
STORAGE: Final = f"s3://lanyard/{PREFIX}"
INTERVAL: Final = 4
DRILL_AFTER: Final = 4
ENDLESS: Final = 4000
"""Steps of a run that something else ends."""


@dataclass(frozen=True)
class Pace:
    """What differs between the slices."""

    steps: int
    training: int
    """A commit that shows the training in its stride, after the drill where there is one."""
    run_limit: str
    """Of a run that is to run out of time."""
    stuck_limits: tuple[str, str]
    """limits.run and limits.teardown of a run whose task fails for ever: custody's own deadline is their sum."""
    execution_timeout: timedelta
    stall: str
    closes_within_s: float
    """From the last thing that was done to a run until it and its custody have closed."""
    workload: str


PACES: Final = {
    "light": Pace(
        steps=20,
        training=8,
        run_limit="30s",
        stuck_limits=("30s", "30s"),
        execution_timeout=timedelta(seconds=25),
        stall="10s",
        closes_within_s=120.0,
        workload="tests/chaos/light/workload",
    ),
    "real": Pace(
        steps=64,
        training=8,
        run_limit="2m",
        stuck_limits=("2m", "1m"),
        execution_timeout=timedelta(seconds=120),
        stall="30s",
        closes_within_s=600.0,
        workload="tests/integration/workload",
    ),
}


def run_json(scenario: Scenario) -> dict[str, Any]:
    """What a person would start."""
    pace, ending = PACES[scenario.slice], scenario.ending
    comes_to_its_end = ending in ("succeeds", "started twice") or scenario.where.of == PROVE
    steps = pace.steps if comes_to_its_end else ENDLESS
    spec: dict[str, Any] = {
        "name": "chaos",
        "hosts": {"provider": "local", "count": 2},
        "storage": {"uri": STORAGE},
        "workload": {"kind": "regression", "recipe": {"steps": steps, "checkpoint_interval": INTERVAL}},
        "drill": {"kind": "worker", "after_step": DRILL_AFTER},
        "limits": {"stall": pace.stall if ending == "stalls" else "5m"},
    }
    if ending in ("training fails", "stalls"):
        what = "fail" if ending == "training fails" else "stall"
        entrypoint = ["python", "train.py", what]
        spec["workload"] = {
            "kind": "script",
            "working_dir": pace.workload,
            "entrypoint": entrypoint,
            "steps": steps,
            "checkpoint_interval": INTERVAL,
        }
        if scenario.slice == "real":
            del spec["drill"]  # the real application that misbehaves does no drill
    if ending == "out of time":
        spec["limits"] = {"run": pace.run_limit, "stall": pace.run_limit}
    if ending == "task fails for ever":
        run, teardown = pace.stuck_limits
        spec["limits"] = {"run": run, "stall": run, "teardown": teardown}
    return spec
