"""The JSON Schema of run.json, generated from the model that checks it."""

from __future__ import annotations

import json

from workflows.spec import RunSpec


def render() -> str:
    """The schema's text, exactly as schema/run.schema.json holds it."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Lanyard run.json",
        **RunSpec.model_json_schema(),
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
