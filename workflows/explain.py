"""From pydantic's validation errors to sentences that name the field of run.json and the remedy.

No sentence repeats text from the input, save short plain words where a choice is expected and the names of
fields: whatever else is there may be a secret. A sentence is at most `SENTENCE_MAX` characters long.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

PROBLEMS_MAX = 5
SENTENCE_MAX = 360
# Shorter than any key that a service hands out.
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,15}")
_FIELD_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_-]{0,39}")
_LATER = ("host", "driver", "preemption")

_TYPES = {
    "int_type": "must be a whole number, without quotation marks",
    "float_type": "must be a number, without quotation marks",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false, without quotation marks",
    "string_type": "must be text in quotation marks",
    "string_unicode": "must be text of valid Unicode characters",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
}
_BOUNDS = {
    "greater_than": ("gt", "must be above"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be below"),
    "less_than_equal": ("le", "must be at most"),
}


class FieldError(ValueError):
    """A rule between fields is broken: names the field, relative to its model, that has to change."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field


def plain(text: str, limit: int = 80) -> str:
    """The text without anything that could break a line or a quotation, at most `limit` characters long."""
    kept = re.sub(r"[^A-Za-z0-9 ./_:,()+-]", "?", text[:limit])
    return kept if len(text) <= limit else kept[: limit - 3] + "..."


def explain(error: ValidationError, root: type[BaseModel]) -> tuple[list[str], int]:
    """The first faults that pydantic found in a value of the model `root`, a sentence each, and their number.

    At most `PROBLEMS_MAX` sentences are made: 2 MB can hold more faults than a workflow task has time for.
    """
    found = error.errors(include_url=False)
    told = [_sentence(detail, _Place(root, detail["loc"]))[:SENTENCE_MAX] for detail in found[:PROBLEMS_MAX]]
    return told, len(found)


class _Place:
    """Where a fault is: its path in run.json, the field, and the model that should have known it."""

    def __init__(self, root: type[BaseModel], loc: Sequence[int | str]) -> None:
        names: list[str] = []
        self.parent: type[BaseModel] | None = root
        self.siblings: dict[str, type[BaseModel]] = {}
        self.field: FieldInfo | None = None
        self.models: dict[str, type[BaseModel]] = {"": root}
        self.model: type[BaseModel] | None = root
        for part in loc:
            # pydantic puts the discriminator's value into the location; run.json has no such level.
            if self.model is None and part in self.models:
                self.model = self.models[str(part)]
                continue
            odd = isinstance(part, str) and not _FIELD_NAME.fullmatch(part)
            names.append("(an unusual name)" if odd else str(part))
            self.parent, self.siblings = self.model, self.models
            self.field = fields_of(self.model).get(str(part)) if self.model else None
            self.models = models_of(self.field) if self.field else {}
            self.model = next(iter(self.models.values())) if len(self.models) == 1 else None
        self.path = ".".join(names)
        self.last = str(loc[-1]) if loc else ""

    def example(self) -> str:
        """The field's own example, if it has one."""
        examples = self.field.examples if self.field else None
        return f" (example: {json.dumps(examples[0])})" if examples else ""


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The model's fields by the name they have in run.json."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def models_of(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """The models a field can hold, by the value of its discriminator."""
    pending, found = [field.annotation, field], []
    while pending:
        item = pending.pop(0)
        if isinstance(item, type) and issubclass(item, BaseModel):
            found.append(item)
        else:
            pending.extend(get_args(item))
    key = field.discriminator
    if isinstance(key, str):
        return {str(get_args(model.model_fields[key].annotation)[0]): model for model in found}
    return {str(index): model for index, model in enumerate(found)}


def _sentence(detail: ErrorDetails, place: _Place) -> str:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail.get("input")
    path = place.path or "run.json"
    if kind == "extra_forbidden":
        return _unknown(path, place)
    if kind == "missing":
        return f"{path} is missing: add it{place.example()}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return _choice(path, place, value)
    if kind == "literal_error":
        return _literal(path, context, value)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{path} must be a JSON object{place.example()}"
    if kind in _BOUNDS:
        return _bound(path, kind, context, value, place)
    cause = context.get("error")
    if isinstance(cause, FieldError):
        return f"{place.path}.{cause.field} {cause}" if place.path else f"{cause.field} {cause}"
    if isinstance(cause, ValueError):
        return f"{path} {cause}{place.example()}"
    if kind == "string_too_long":
        return f"{path} must have at most {context['max_length']} characters{place.example()}"
    if kind == "int_type" and isinstance(value, float):
        return f"{path} must be a whole number, written without point and exponent{place.example()}"
    return f"{path} {_TYPES.get(kind, 'has a value that is not allowed')}{place.example()}"


def _unknown(path: str, place: _Place) -> str:
    known = fields_of(place.parent) if place.parent else {}
    spelled = place.last[:40].lower().replace("-", "_")
    close = difflib.get_close_matches(spelled, known, n=1, cutoff=0.6)
    if close and close[0] != place.last:
        return f"{path} is not a field of run.json: did you mean {close[0]}?"
    owners = [tag for tag, model in place.siblings.items() if place.last in fields_of(model)]
    if owners:
        return f'{path} is a field of "{owners[0]}" only: remove it'
    return f"{path} is not a field of run.json: remove it (known here: {', '.join(known)})"


def _choice(path: str, place: _Place, value: object) -> str:
    key = str(place.field.discriminator) if place.field else "kind"
    allowed = ", ".join(f'"{tag}"' for tag in place.models)
    if isinstance(value, dict) and key not in value:
        return f"{path}.{key} is missing: add one of {allowed}"
    given = value.get(key) if isinstance(value, dict) else None
    return f"{path}.{key} must be one of {allowed}{_not(given)}{_meant(given, list(place.models))}"


def _literal(path: str, context: dict[str, Any], value: object) -> str:
    allowed = str(context.get("expected", "")).replace("'", '"')
    if path == "drill.kind" and value in _LATER:
        return f'{path} "{value}" is not supported yet on this version: use "worker"'
    return f"{path} must be {allowed}{_not(value)}"


def _bound(path: str, kind: str, context: dict[str, Any], value: object, place: _Place) -> str:
    key, words = _BOUNDS[kind]
    if path == "hosts.count" and kind == "greater_than_equal":
        words = f"must be more than one host{_not(value)}, because a guarded run is multi-node: at least"
        return f"{path} {words} {context[key]}{place.example()}"
    return f"{path} {words} {context[key]}{_not(value)}{place.example()}"


def _not(value: object) -> str:
    """The refused value, where it cannot be a secret: a number of usual size, or a short plain word."""
    if isinstance(value, bool):
        return f", not {json.dumps(value)}"
    if isinstance(value, int | float) and abs(value) < 10**18:
        return f", not {value}"
    if isinstance(value, str) and _WORD.fullmatch(value):
        return f', not "{value}"'
    return ""


def _meant(value: object, allowed: list[str]) -> str:
    close = difflib.get_close_matches(value.lower(), allowed, n=1) if isinstance(value, str) else []
    return f": did you mean {json.dumps(close[0])}?" if close else ""
