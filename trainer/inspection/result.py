"""result.json and state.pt: what the driver claims of the run, against the journal, the ranks and the
bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from trainer.inspection.checklist import Failed, compare, fields, require
from trainer.inspection.checkpoints import STATE_FIELDS, Reloaded
from trainer.inspection.evidence import Attempt
from trainer.inspection.journal import RUN_FIELDS, recipe_of, rows_of
from trainer.inspection.storage import number
from trainer.synthetic import build_model, held_out_loss

RESULT_FIELDS = (
    "schema",
    "status",
    "run",
    "final_step",
    "final_loss",
    "held_out_loss",
    "parameters_sha256",
    "momentum_sha256",
    "checkpoint",
    "ranks_final",
    "versions",
)
"""Of the regression's result.json; a script's may say more."""
RANK_FIELDS = ("rank", "model_sha256", "momentum_sha256")
VERSION_FIELDS = ("torch", "ray", "rerun-sdk", "pillow", "python")
EXPORTED_STATE_FIELDS = ("schema", *STATE_FIELDS, "run")

CHECKPOINT = re.compile(r"train/([A-Za-z0-9_-]{1,64})/(checkpoint_[A-Za-z0-9._-]{1,200})")

# The held-out loss is computed in float64 from the stored parameters: two machines agree far below this.
SAME_PARAMETERS = 1e-9
# Initial parameters are drawn anew on each machine and rounded to float32, where the last bit may differ.
SAME_SEED = 1e-6


def check_identity(document: Mapping[str, Any], what: str, run: Mapping[str, Any]) -> list[str]:
    """A problem for each of the run's names that ``document`` gives another value."""
    named = document.get("run")
    return compare(f"{what}, run", run, named if isinstance(named, dict) else {})


def checkpoint_name(result: Mapping[str, Any], train_name: str) -> str:
    """The folder name of the checkpoint that result.json names. Raises Failed."""
    claimed = result.get("checkpoint")
    match = CHECKPOINT.fullmatch(claimed) if isinstance(claimed, str) else None
    if match is None or match[1] != train_name:
        raise Failed([f"result.json names the checkpoint {claimed!r}, not train/{train_name}/checkpoint_..."])
    return match[2]


def check_result(
    result: Mapping[str, Any], run: Mapping[str, Any], metrics: Mapping[str, Any] | None, last: Attempt | None
) -> str:
    """result.json claims success, of this run, with the journal's last figures. Raises Failed."""
    problems = compare("result.json", {"status": "succeeded"}, result)
    problems += check_identity(result, "result.json", run)
    if metrics is not None:
        problems += fields("result.json", RESULT_FIELDS, result) + _unknown_fields(result)
        rows = rows_of(metrics)
        held_out = metrics.get("held_out")
        expected = {
            "final_step": recipe_of(metrics)["steps"],
            "final_loss": rows[-1].get("loss") if rows else None,
            "held_out_loss": held_out.get("final_loss") if isinstance(held_out, dict) else None,
        }
        problems += compare("result.json", expected, result)
        problems += [
            f"result.json: {name} is {result.get(name)!r}, no finite number"
            for name in ("final_loss", "held_out_loss")
            if not math.isfinite(number(result.get(name)) or math.nan)
        ]
    try:
        checkpoint_name(result, str(run["train_name"]))
    except Failed as failure:
        problems += failure.problems
    if last is not None:
        ran = last.start.get(0, {}).get("versions")
        claimed = result.get("versions")
        if not isinstance(claimed, dict):
            problems.append("result.json names no versions")
        elif isinstance(ran, dict):
            shared = {name: version for name, version in ran.items() if name in claimed}
            problems += compare("result.json, versions", shared, claimed)
    require(problems)
    return f"succeeded at step {result.get('final_step')}, checkpoint {result.get('checkpoint')}"


def _unknown_fields(result: Mapping[str, Any]) -> list[str]:
    """A problem for each field that a rank's row or the versions in the regression's result.json have beyond their own,
    or lack.
    """
    problems = []
    listed, versions = result.get("ranks_final"), result.get("versions")
    for row in listed if isinstance(listed, list) else ():
        if isinstance(row, dict):
            problems += fields(f"result.json, rank {row.get('rank')}", RANK_FIELDS, row)
    if isinstance(versions, dict):
        problems += fields("result.json, versions", VERSION_FIELDS, versions)
    return problems


def check_state(
    reloaded: Reloaded, content: Mapping[str, Any], result: Mapping[str, Any], run: Mapping[str, Any]
) -> str:
    """state.pt holds what result.json claims: step, and the hashes of parameters and momentum.

    Raises Failed.
    """
    problems = fields("state.pt", EXPORTED_STATE_FIELDS, content)
    problems += compare("state.pt", {"schema": 1}, content) + check_identity(content, "state.pt", run)
    problems += fields("state.pt, run", RUN_FIELDS, content["run"] if isinstance(content.get("run"), dict) else {})
    claims = {"final_step": "step", "parameters_sha256": "model_sha256", "momentum_sha256": "momentum_sha256"}
    for claim, attribute in claims.items():
        found = getattr(reloaded, attribute)
        if result.get(claim) != found:
            problems.append(f"state.pt: {attribute} is {found!r}, result.json claims {result.get(claim)!r} ({claim})")
    require(problems)
    hashes = f"parameters {reloaded.model_sha256[:16]}..., momentum {reloaded.momentum_sha256[:16]}..."
    return f"step {reloaded.step}, {hashes}"


def check_same_state(path: str, checkpoint: Reloaded, state: Reloaded) -> str:
    """The native checkpoint holds the exported state, bit for bit. Raises Failed."""
    expected = {key: getattr(state, key) for key in ("step", "model_sha256", "momentum_sha256")}
    found = {key: getattr(checkpoint, key) for key in expected}
    require([f"{problem} as in state.pt" for problem in compare(path, expected, found)])
    return f"{path} reloaded, equal to state.pt"


def check_held_out(metrics: Mapping[str, Any], reloaded: Mapping[str, Reloaded]) -> str:
    """The held-out losses recomputed equal the exported ones: of ``reloaded``, by file name, and of the recipe's
    initial parameters, from which a continued run started too, if not in this run. Raises Failed.
    """
    recipe = recipe_of(metrics)
    held_out = metrics.get("held_out")
    exported = {
        name: number(held_out.get(name)) if isinstance(held_out, dict) else None
        for name in ("initial_loss", "final_loss")
    }
    problems = []
    for what, state in reloaded.items():
        if not _close(exported["final_loss"], state.held_out_loss, SAME_PARAMETERS):
            problems.append(
                f"the held-out loss recomputed from {what} is {state.held_out_loss!r}, "
                f"metrics.json says {exported['final_loss']!r}"
            )
    initial = held_out_loss(recipe, build_model(recipe))
    if not _close(exported["initial_loss"], initial, SAME_SEED):
        problems.append(
            f"the held-out loss of the initial parameters is {initial!r}, "
            f"metrics.json says {exported['initial_loss']!r}"
        )
    require(problems)
    return f"{exported['final_loss']!r}, recomputed from {' and '.join(reloaded)}"


def _close(exported: float | None, recomputed: float, tolerance: float) -> bool:
    return exported is not None and math.isclose(exported, recomputed, rel_tol=tolerance)
