"""Whatever run.json may say, the training application takes: what it would refuse is refused before hosts exist."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.activities.orders import IDENTITY
from trainer import job
from workflows.evidence import ResumePoint
from workflows.orders import MAIN, PARITY, hosts_order, job_order
from workflows.spec import SpecError, parse_run
from workflows.workloads import Recipe


def edges(field: str) -> st.SearchStrategy[Any]:
    """A recipe's field: its bounds first of all, and everything between them."""
    schema = Recipe.model_json_schema()["properties"][field]
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema["maximum"]
    if schema["type"] == "integer":
        return st.sampled_from([low, high]) | st.integers(low, high)
    open_below = "exclusiveMinimum" in schema
    return st.sampled_from([high, 1e-300 if open_below else low]) | st.floats(low, high, exclude_min=open_below)


@given(
    st.fixed_dictionaries({}, optional={field: edges(field) for field in Recipe.model_fields}),
    st.booleans(),
    st.sampled_from([MAIN, PARITY]),
)
def test_every_recipe_that_is_accepted_is_one_the_application_takes(
    recipe: dict[str, Any], resumed: bool, train_name: str
) -> None:
    run = {
        "name": "edges",
        "hosts": {"provider": "local"},
        "storage": {"uri": "s3://bucket/runs"},
        "workload": {"kind": "regression", "recipe": recipe},
    }
    try:
        spec = parse_run((run,))
    except SpecError:
        return  # rules between fields
    point = ResumePoint(source="s3://bucket/earlier", checkpoint="s3://bucket/earlier/train/main/c", step=1)
    order = job_order(spec, IDENTITY, hosts_order(spec, IDENTITY), train_name, point if resumed else None).order
    told = job.parse(json.dumps(order))
    assert told.recipe.steps == spec.workload.total_steps
