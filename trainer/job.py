"""The job's order: what the operator asks of a training application, in the environment variable LANYARD_JOB.

JSON of schema 1 without secrets. Everything is checked before Ray is touched; what is wrong is refused with the
field's name and the remedy.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

VARIABLE: Final = "LANYARD_JOB"
PINNED: Final = ("torch", "ray", "rerun-sdk", "pillow")
TRAIN_NAMES: Final = ("main", "parity")

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class JobError(ValueError):
    """The order cannot be followed; the message names the field and what to do."""


@dataclass(frozen=True)
class Recipe:
    """The synthetic regression. All counts are at least 1; ``batch_size`` is per rank."""

    steps: int
    samples_per_rank: int
    checkpoint_interval: int
    learning_rate: float
    momentum: float
    features: int
    batch_size: int
    seed: int

    def mapping(self) -> dict[str, Any]:
        """The recipe as run.json has it."""
        return asdict(self)


@dataclass(frozen=True)
class Drill:
    """Hold after the commit of ``after_step``, at most ``hold_s`` seconds, for the operator's SIGKILL."""

    after_step: int
    hold_s: float


@dataclass(frozen=True)
class Failures:
    """How many failures of each kind are recovered from before the run fails."""

    worker: int
    controller: int
    preemption: int


@dataclass(frozen=True)
class Order:
    """What is asked of any application. ``storage`` is the run's own root, ``s3://bucket/prefix/<run key>``."""

    run_key: str
    submission_id: str
    train_name: str
    storage: str
    steps: int
    """Steps of the whole run."""
    checkpoint_interval: int
    """Steps from one commit to the next; the last step is one too."""
    world_size: int
    device: Literal["cpu", "cuda"]
    pins: Mapping[str, str]
    drill: Drill | None
    resume: str | None
    """URI of a checkpoint directory of another run, or None."""
    failures: Failures

    @property
    def run(self) -> dict[str, str]:
        """The run's names, as every exported document carries them."""
        return {"run_key": self.run_key, "submission_id": self.submission_id, "train_name": self.train_name}

    @property
    def root(self) -> str:
        """``storage`` as Arrow's ``bucket/prefix/<run key>``."""
        return storage_path("storage", self.storage)[1]

    def is_boundary(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` is to be reported."""
        return step % self.checkpoint_interval == 0 or step == self.steps


@dataclass(frozen=True)
class Job(Order):
    """An order for the built-in application."""

    recipe: Recipe


def from_environment(environ: Mapping[str, str] | None = None) -> Job:
    """The built-in application's order in LANYARD_JOB. Raises JobError."""
    return parse(_text_in(environ))


def script_from_environment(environ: Mapping[str, str] | None = None) -> Order:
    """A script's order in LANYARD_JOB. Raises JobError."""
    return parse_script(_text_in(environ))


def storage_in(environ: Mapping[str, str]) -> str:
    """Only the storage root of the order in LANYARD_JOB, for readers that need nothing else of it (any workload).

    Raises JobError.
    """
    return storage_path("storage", _decoded(_text_in(environ)).get("storage"))[0]


def parse(text: str) -> Job:
    """The built-in application's order in ``text``. Raises JobError, naming the field."""
    order, workload = _opened(text, "regression")
    recipe = _recipe(workload.fields("recipe"))
    workload.finish()
    return Job(recipe=recipe, **_common(order, recipe.steps, recipe.checkpoint_interval))


def parse_script(text: str) -> Order:
    """A script's order in ``text``. Raises JobError, naming the field."""
    order, workload = _opened(text, "script")
    steps = workload.integer("steps", 1, 10**9)
    interval = workload.integer("checkpoint_interval", 1, 10**9)
    workload.finish()
    return Order(**_common(order, steps, interval))


def _text_in(environ: Mapping[str, str] | None) -> str:
    text = (os.environ if environ is None else environ).get(VARIABLE)
    if not text:
        raise JobError(f"{VARIABLE} is not set; submit the job through the operator, which sets it")
    return text


def _opened(text: str, kind: str) -> tuple[_Fields, _Fields]:
    order = _Fields("", _decoded(text))
    if order.take("schema") != 1:
        raise JobError("schema: only 1 is known; deliver the trainer source of the operator's own version")
    workload = order.fields("workload")
    ordered = workload.text("kind")
    if ordered != kind:
        raise JobError(f"workload.kind: {ordered!r} is not this application's; it trains {kind!r}")
    return order, workload


def _common(order: _Fields, steps: int, interval: int) -> dict[str, Any]:
    """The fields of Order, and that there are no others."""
    world_size = order.integer("world_size", 1, 4096)
    device = order.text("device")
    if device not in ("cpu", "cuda"):
        raise JobError(f"device: {device!r} is neither 'cpu' nor 'cuda'")
    train_name = order.text("train_name")
    if train_name not in TRAIN_NAMES:
        raise JobError(f"train_name: {train_name!r} is neither of {', '.join(TRAIN_NAMES)}")
    common = {
        "run_key": order.name("run_key"),
        "submission_id": order.name("submission_id"),
        "train_name": train_name,
        "storage": storage_path("storage", order.take("storage"))[0],
        "steps": steps,
        "checkpoint_interval": interval,
        "world_size": world_size,
        "device": device,
        "pins": _pins(order.fields("pins")),
        "drill": _drill(order.optional("drill"), steps, interval),
        "resume": _resume(order.optional("resume")),
        "failures": _failures(order.fields("failures")),
    }
    order.finish()
    return common


def storage_path(field: str, uri: Any) -> tuple[str, str]:
    """``uri`` without a trailing slash, and as Arrow's ``bucket/prefix``. Raises JobError naming ``field``."""
    if not isinstance(uri, str) or not uri.startswith("s3://"):
        raise JobError(f"{field}: write it as s3://<bucket>/<prefix>")
    bucket, _, prefix = uri[len("s3://") :].rstrip("/").partition("/")
    if "@" in bucket:
        # Not repeated: it may hold a key.
        raise JobError(f"{field}: it holds credentials; leave them to the environment of the hosts")
    if not _BUCKET.fullmatch(bucket) or not prefix:
        raise JobError(f"{field}: write it as s3://<bucket>/<prefix>")
    if any(part in ("", ".", "..") for part in prefix.split("/")) or "?" in prefix or "#" in prefix:
        raise JobError(f"{field}: the prefix must have no empty or dotted part, '?' or '#'")
    return f"s3://{bucket}/{prefix}", f"{bucket}/{prefix}"


def _decoded(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise JobError(f"{VARIABLE} is not JSON ({error}); submit the job through the operator") from None
    if not isinstance(document, dict):
        raise JobError(f"{VARIABLE} is not a JSON object; submit the job through the operator")
    return document


def _recipe(fields: _Fields) -> Recipe:
    recipe = Recipe(
        steps=fields.integer("steps", 1, 10**9),
        samples_per_rank=fields.integer("samples_per_rank", 1, 10**8),
        checkpoint_interval=fields.integer("checkpoint_interval", 1, 10**9),
        learning_rate=fields.number("learning_rate", 0.0, 1e6, exclusive=True),
        momentum=fields.number("momentum", 0.0, 0.9999),
        features=fields.integer("features", 1, 10**6),
        batch_size=fields.integer("batch_size", 1, 10**8),
        seed=fields.integer("seed", 0, 2**63 - 1),
    )
    fields.finish()
    if recipe.batch_size > recipe.samples_per_rank:
        raise JobError("workload.recipe.batch_size: it exceeds samples_per_rank; lower it or give more samples")
    return recipe


def _drill(value: Any, steps: int, interval: int) -> Drill | None:
    if value is None:
        return None
    fields = _Fields("drill", value)
    drill = Drill(fields.integer("after_step", 1, 10**9), fields.number("hold_s", 0.0, 86400.0))
    fields.finish()
    if drill.after_step % interval or drill.after_step >= steps:
        raise JobError(
            f"drill.after_step: {drill.after_step} is no checkpoint before the last step; give a multiple of "
            f"{interval} below {steps}"
        )
    return drill


def _resume(value: Any) -> str | None:
    if value is None:
        return None
    fields = _Fields("resume", value)
    uri = storage_path("resume.checkpoint", fields.take("checkpoint"))[0]
    fields.finish()
    return uri


def _failures(fields: _Fields) -> Failures:
    failures = Failures(
        worker=fields.integer("worker", 0, 10**6),
        controller=fields.integer("controller", 0, 10**6),
        preemption=fields.integer("preemption", 0, 10**6),
    )
    fields.finish()
    return failures


def _pins(fields: _Fields) -> dict[str, str]:
    pins = {name: fields.text(name) for name in PINNED}
    fields.finish()
    return pins


class _Fields:
    """One JSON object, read field by field; what is left over at the end is an error."""

    def __init__(self, path: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise JobError(f"{path or VARIABLE}: an object belongs here")
        self._path = path
        self._left = dict(value)

    def _at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise JobError(f"{self._at(name)}: missing; the operator's and the trainer's versions differ")
        return self._left.pop(name)

    def optional(self, name: str) -> Any:
        return self._left.pop(name, None)

    def fields(self, name: str) -> _Fields:
        return _Fields(self._at(name), self.take(name))

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not value:
            raise JobError(f"{self._at(name)}: a text belongs here")
        return value

    def name(self, name: str) -> str:
        value = self.text(name)
        if not _NAME.fullmatch(value):
            raise JobError(f"{self._at(name)}: {value!r} may hold only letters, digits, '.', '_' and '-'")
        return value

    def integer(self, name: str, low: int, high: int) -> int:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise JobError(f"{self._at(name)}: {value!r} is no whole number within {low}..{high}")
        return value

    def number(self, name: str, low: float, high: float, *, exclusive: bool = False) -> float:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise JobError(f"{self._at(name)}: {value!r} is no finite number")
        if not low <= value <= high or (exclusive and value == low):
            raise JobError(f"{self._at(name)}: {value!r} is not within {low:g}..{high:g}")
        return float(value)

    def finish(self) -> None:
        if self._left:
            names = ", ".join(self._at(name) for name in sorted(self._left))
            raise JobError(f"{names}: unknown; the operator's and the trainer's versions differ")
