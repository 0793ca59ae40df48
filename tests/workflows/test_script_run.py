"""A script run is told to its own inspector as what it was ordered to be, and its verdict says what was not checked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workflows.stand_ins import PLAIN, World, answers, ending_of
from workflows import activity_names as names
from workflows.evidence import Artifacts, Check, NotApplicable, ResumePoint

pytestmark = pytest.mark.asyncio(loop_scope="session")

SCRIPT: dict[str, Any] = {
    **PLAIN,
    "workload": {
        "kind": "script",
        "working_dir": "examples/mine",
        "entrypoint": "python train.py",
        "steps": 40,
        "checkpoint_interval": 5,
    },
    "drill": {"after_step": 10},
}
WHY = "a script workload promises nothing of the kind"


async def test_a_script_is_verified_by_the_order_that_its_job_was_given(world: World) -> None:
    world.script[names.VERIFY] = answers(
        Artifacts(
            ok=True,
            submission_id=f"{world.key}-train",
            checks=(Check(name="ranks", ok=True, detail="2 ranks"),),
            not_applicable=tuple(NotApplicable(name=name, why=WHY) for name in ("steps", "scalars")),
            figures={},
        )
    )
    ending = await ending_of(await world.start(SCRIPT))
    assert ending.verdict
    assert ending.verdict.outcome == "succeeded"
    assert f"not checked: steps, scalars ({WHY})" in ending.verdict.not_proved
    [verified], [submitted] = world.orders(names.VERIFY), world.orders(names.SUBMIT)
    assert verified.expect == submitted.order
    assert verified.expect["workload"] == {"kind": "script", "steps": 40, "checkpoint_interval": 5}
    assert submitted.working_dir == "examples/mine"


async def test_what_a_run_resumes_from_is_expected_of_it(world: World) -> None:
    earlier = "s3://lanyard/runs/earlier-0123456789"
    point = ResumePoint(source=earlier, checkpoint=f"{earlier}/train/main/checkpoint_x", step=None)

    async def resuming(order: Any, usual: Any) -> Any:
        return (await usual()).model_copy(update={"resume": point})

    world.script[names.PREFLIGHT] = resuming
    ending = await ending_of(await world.start({**SCRIPT, "drill": None, "resume": {"from": earlier}}))
    assert ending.verdict
    assert ending.verdict.resumed == point
    assert world.orders(names.VERIFY)[0].expect["resume"] == {"checkpoint": point.checkpoint}
