"""metrics.json: every optimizer step exactly once, every scalar what it must be, and learning that happened.

The shape is ``{"schema":1, "run":{..}, "workload", "recipe":{..}, "world_size", "device", "steps":[{"step",
"loss", "gradient_norm", "parameter_change", "learning_rate", "samples_per_second", "attempt"}],
"attempts":[..], "held_out":{"initial_loss", "final_loss"}}``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from trainer.inspection.checklist import Failed, fields, require
from trainer.inspection.storage import number

SCALARS = ("loss", "gradient_norm", "parameter_change", "learning_rate", "samples_per_second")
DETERMINED = SCALARS[:4]
"""What the recipe determines; how long a step took it does not."""
SAME_STEP = 1e-6
"""Two makings of one step agree to this, also where the second was made on another kind of processor."""

FIELDS = ("schema", "run", "workload", "recipe", "world_size", "device", "steps", "attempts", "held_out")
RUN_FIELDS = ("run_key", "submission_id", "train_name")
RECIPE_FIELDS = (
    "steps",
    "samples_per_rank",
    "checkpoint_interval",
    "learning_rate",
    "momentum",
    "features",
    "batch_size",
    "seed",
)
ROW_FIELDS = ("step", *SCALARS, "attempt")
ATTEMPT_FIELDS = ("attempt", "restored_step", "ranks")
HELD_OUT_FIELDS = ("initial_loss", "final_loss")
ROW_KEYS = frozenset(ROW_FIELDS)

# Bounds on what the inspector will compute for a recipe it has only read: far above any real one.
COUNTS = {
    "steps": 10_000_000,
    "samples_per_rank": 100_000_000,
    "checkpoint_interval": 10_000_000,
    "features": 65_536,
    "batch_size": 100_000_000,
}


def recipe_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe, with its counts and rates in range. Raises Failed."""
    recipe = metrics.get("recipe")
    if not isinstance(recipe, dict):
        raise Failed(["metrics.json holds no recipe"])
    problems = []
    for name, most in COUNTS.items():
        value = recipe.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            problems.append(f"recipe.{name} is {value!r}, no whole number from 1 to {most:,}")
    rate, momentum, seed = (number(recipe.get(name)) for name in ("learning_rate", "momentum", "seed"))
    if rate is None or not 0 < rate < math.inf:
        problems.append(f"recipe.learning_rate is {recipe.get('learning_rate')!r}, no positive number")
    if momentum is None or not 0 <= momentum < 1:
        problems.append(f"recipe.momentum is {recipe.get('momentum')!r}, no number from 0 to below 1")
    if seed is None or not isinstance(recipe.get("seed"), int):
        problems.append(f"recipe.seed is {recipe.get('seed')!r}, no whole number")
    require(problems)
    return recipe


def rows_of(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The journal's rows that are objects with a whole number for a step, in the order they stand."""
    rows = metrics.get("steps")
    if not isinstance(rows, list):
        return []
    return [row for row in rows if isinstance(row, dict) and type(row.get("step")) is int]


def unknown_fields(metrics: Mapping[str, Any]) -> list[str]:
    """A problem for each field that metrics.json has beyond its own, or lacks, at any depth."""
    problems = fields("metrics.json", FIELDS, metrics)
    parts = {"run": RUN_FIELDS, "recipe": RECIPE_FIELDS, "held_out": HELD_OUT_FIELDS}
    for name, known in parts.items():
        if isinstance(part := metrics.get(name), dict):
            problems += fields(f"metrics.json, {name}", known, part)
    for row in rows_of(metrics):
        if row.keys() != ROW_KEYS:
            problems += fields(f"metrics.json, step {row['step']}", ROW_FIELDS, row)
    listed = metrics.get("attempts")
    for attempt in listed if isinstance(listed, list) else ():
        if isinstance(attempt, dict):
            problems += fields(f"metrics.json, attempt {attempt.get('attempt')}", ATTEMPT_FIELDS, attempt)
    return problems


def differing(kept: Iterable[Mapping[str, Any]], exported: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The steps whose row in a commit's journal is not the ``exported`` one.

    A step that a later attempt made again took another time then; what the recipe determines is the same.
    """
    return [row["step"] for row in kept if not _same_row(row, exported.get(row["step"], {}))]


def _same_row(kept: Mapping[str, Any], exported: Mapping[str, Any]) -> bool:
    if kept == exported:
        return True
    made, again = (row.get("attempt") for row in (kept, exported))
    if not (type(made) is int and type(again) is int and 0 < made < again) or kept.keys() != exported.keys():
        return False
    values = ((number(kept[name]), number(exported[name])) for name in DETERMINED)
    return all(a is not None and b is not None and math.isclose(a, b, rel_tol=SAME_STEP) for a, b in values)


def check_steps(metrics: Mapping[str, Any]) -> str:
    """Every optimizer step from 1 to the recipe's last exactly once and in order. Raises Failed."""
    total = recipe_of(metrics)["steps"]
    rows = rows_of(metrics)
    problems = []
    listed = metrics.get("steps")
    if not isinstance(listed, list) or len(rows) != len(listed):
        problems.append("a row of steps is no object with a whole number for its step")
    numbers = [row["step"] for row in rows]
    counts = Counter(numbers)
    missing = [step for step in range(1, total + 1) if step not in counts]
    extra = sorted(step for step in counts if not 1 <= step <= total)
    doubled = sorted(step for step, count in counts.items() if count > 1)
    if missing:
        problems.append(f"missing step {spans(missing)} of {total}")
    if extra:
        problems.append(f"extra step {spans(extra)}: the recipe has {total}")
    if doubled:
        problems.append(f"duplicate step {spans(doubled)}")
    if not problems and numbers != sorted(numbers):
        late = next(step for step, before in zip(numbers[1:], numbers, strict=False) if step < before)
        problems.append(f"step {late} is out of order")
    require(problems)
    return f"steps 1 to {total}, each exactly once"


def check_scalars(metrics: Mapping[str, Any]) -> str:
    """Every scalar of every step finite and positive, the learning rate the recipe's. Raises Failed."""
    rate = float(recipe_of(metrics)["learning_rate"])
    first: dict[tuple[str, str], str] = {}
    also: dict[tuple[str, str], list[int]] = {}
    rows = rows_of(metrics)
    for row in rows:
        for name in SCALARS:
            if told := _wrong(name, row.get(name), rate):
                kind, text = told
                if (name, kind) in first:
                    also.setdefault((name, kind), []).append(row["step"])
                else:
                    first[name, kind] = f"step {row['step']}: {name} {text}"
    # A training that has converged stops changing at every step from then on: one finding, not hundreds.
    problems = [text + (f", and so at step {spans(also[at])}" if at in also else "") for at, text in first.items()]
    if not rows:
        problems.append("there are no steps")
    require(problems)
    return f"{len(rows) * len(SCALARS)} values finite and positive, learning rate {rate!r}"


def _wrong(name: str, told: Any, rate: float) -> tuple[str, str] | None:
    """What is wrong with one scalar: the kind of fault, and its words."""
    value = number(told)
    if value is None:
        return "no number", f"is {told!r}, no number"
    if not math.isfinite(value):
        return "not finite", f"is not finite ({value})"
    if value <= 0:
        return "not positive", f"is not positive ({value!r})"
    if name == "learning_rate" and value != rate:
        return "other rate", f"is {value!r}, the recipe's is {rate!r}"
    return None


def check_learning(metrics: Mapping[str, Any]) -> str:
    """The loss fell, in training and on the held-out samples. Raises Failed.

    Momentum makes the loss swing, so it is the median of the last quarter of the steps that must lie below
    the first.
    """
    problems = []
    losses = [number(row.get("loss")) or math.nan for row in rows_of(metrics)]
    held_out = metrics.get("held_out")
    initial, final = (
        number(held_out.get(name)) if isinstance(held_out, dict) else None for name in ("initial_loss", "final_loss")
    )
    if len(losses) < 2:
        problems.append("fewer than two steps: no learning can be seen")
    else:
        last = median(losses[-max(1, len(losses) // 4) :])
        if not last < losses[0]:
            problems.append(f"no learning: the loss went from {losses[0]!r} to {last!r}")
    if initial is None or final is None or not 0 < final < math.inf:
        problems.append(f"held_out holds no two losses: {held_out!r}")
    elif not final < initial:
        problems.append(f"no learning: the held-out loss went from {initial!r} to {final!r}")
    require(problems)
    return f"loss {losses[0]:.6g} to {losses[-1]:.6g}, held out {initial:.6g} to {final:.6g}"


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers in rising order as ``3, 5-8``."""
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:20]]
    return ", ".join(shown) + (", ..." if len(runs) > 20 else "")
