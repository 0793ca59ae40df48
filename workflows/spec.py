"""run.json: the models, the rules between their fields, and the one refusal a person reads.

Pure: no I/O, no clock, no environment. Workflow code parses its raw decoded inputs with `parse_run`, so that
bad input ends a run Failed with one message, never a workflow task that is retried for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator

from workflows.explain import FieldError, explain, plain
from workflows.fields import Name, S3Uri, Strict, duration
from workflows.hosts import Device, ExistingHosts, LocalHosts, SkyPilotHosts
from workflows.workloads import RegressionWorkload, ScriptWorkload

__all__ = [
    "Device",
    "Drill",
    "ExistingHosts",
    "Limits",
    "LocalHosts",
    "RegressionWorkload",
    "Resume",
    "RunSpec",
    "ScriptWorkload",
    "SkyPilotHosts",
    "SpecError",
    "Storage",
    "Undecodable",
    "parse_run",
    "run_schema",
]

# The torch build is part of the pin: the wrong build would train all the same, on the wrong device.
TORCH_PINS: Mapping[Device, str] = {"cpu": "2.13.0+cpu", "cuda": "2.13.0+cu130"}
COMMON_PINS: Mapping[str, str] = {"ray": "2.58.0", "rerun-sdk": "0.31.4", "pillow": "12.3.0"}

_START = "temporal workflow start --type GuardedTrain --task-queue ray-train --workflow-id NAME --input-file run.json"


class Storage(Strict):
    """Where checkpoints, evidence and exports go; endpoint and keys come from the environment."""

    uri: S3Uri = Field(
        description="The bucket and prefix below which the run makes its own. Never with credentials.",
        examples=["s3://lanyard/runs"],
    )


class Drill(Strict):
    """The kill-and-resume exercise."""

    kind: Literal["worker"] = Field(
        default="worker", description="What is killed: one training worker.", examples=["worker"]
    )
    after_step: int = Field(
        ge=1,
        le=1_000_000,
        description="The commit to wait for: a multiple of checkpoint_interval, with a commit after it.",
        examples=[8],
    )


class Limits(Strict):
    """How long each part may take, as text such as "1h30m", and what all of it may cost."""

    # Seconds in Python; run.json and everything that is serialized have the text.

    provision: Annotated[int, *duration("10s", "6h")] = Field(
        default=20 * 60,
        description='From the first claim until every host has proved itself; "10s" to "6h".',
        examples=["20m"],
        json_schema_extra={"default": "20m"},
    )
    stall: Annotated[int, *duration("10s", "6h")] = Field(
        default=5 * 60,
        description='Without a new commit before the run counts as stalled; "10s" to "6h".',
        examples=["5m"],
        json_schema_extra={"default": "5m"},
    )
    run: Annotated[int, *duration("30s", "30d")] = Field(
        default=60 * 60,
        description='From start to the end of the export; "30s" to "30d". The update `extend` moves it.',
        examples=["60m", "1h30m"],
        json_schema_extra={"default": "60m"},
    )
    teardown: Annotated[int, *duration("30s", "6h")] = Field(
        default=15 * 60,
        description='For the release before it counts as late (it is never given up); "30s" to "6h".',
        examples=["15m"],
        json_schema_extra={"default": "15m"},
    )
    lease: Annotated[int, *duration("2m", "24h")] = Field(
        default=60 * 60,
        description='How long hosts go on by themselves when the operator is gone; "2m" to "24h".',
        examples=["60m"],
        json_schema_extra={"default": "60m"},
    )
    budget: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="US dollars that the hosts may cost, at the provider's price, from their claim on. When they are "
        "spent the run is aborted; its last commit stays. Absent: no limit but the other ones.",
        examples=[40],
    )


class Resume(Strict):
    """Where to go on from."""

    from_: S3Uri = Field(
        alias="from",
        description="The prefix of an earlier run (the message of its ending names it): its last commit that "
        "loads is restored.",
        examples=["s3://lanyard/runs/regression-0123456789"],
    )


def _unread(_: str | None) -> None:
    """Two runs that differ only in where an editor finds the schema are the same run."""


class RunSpec(Strict):
    """One guarded training run."""

    model_config = ConfigDict(title="Lanyard run")

    editor_schema: Annotated[str | None, AfterValidator(_unread)] = Field(
        default=None,
        alias="$schema",
        exclude=True,
        description="Tells an editor where this schema is; not read.",
        examples=["../schema/run.schema.json"],
    )
    name: Name = Field(
        description="What people call the run: 1 to 40 lower-case letters, digits and '-', a letter first.",
        examples=["regression"],
    )
    hosts: Annotated[LocalHosts | SkyPilotHosts | ExistingHosts, Field(discriminator="provider")] = Field(
        description="Where the training workers run.", examples=[{"provider": "local", "count": 2}]
    )
    storage: Storage = Field(description="Where everything that is kept goes.", examples=[{"uri": "s3://lanyard/runs"}])
    workload: Annotated[RegressionWorkload | ScriptWorkload, Field(discriminator="kind")] = Field(
        description="What is trained.", examples=[{"kind": "regression", "recipe": {"steps": 32}}]
    )
    drill: Drill | None = Field(
        default=None,
        description="The kill-and-resume exercise. Absent: none.",
        examples=[{"kind": "worker", "after_step": 8}],
    )
    parity: bool = Field(
        default=False,
        description="After the drill, train the same recipe again without interruption; the final parameters "
        "must be equal by hash. Needs a drill and the regression workload.",
        examples=[True],
    )
    limits: Limits = Field(
        default_factory=Limits,
        description="How long each part may take, and what the hosts may cost.",
        examples=[{"run": "60m", "stall": "5m"}],
    )
    resume: Resume | None = Field(
        default=None,
        description="Go on from an earlier run's last commit. Absent: from the beginning.",
        examples=[{"from": "s3://lanyard/runs/regression-0123456789"}],
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.drill is not None:
            _check_drill(self.drill.after_step, self.workload.total_steps, self.workload.commit_interval)
        if self.parity and not isinstance(self.workload, RegressionWorkload):
            raise FieldError("parity", 'is for the "regression" workload only: remove it')
        if self.parity and self.drill is None:
            raise FieldError(
                "parity", "compares a drilled run with an uninterrupted one: add a drill, or remove parity"
            )
        if self.limits.stall > self.limits.run:
            raise FieldError("limits.stall", "must be at most limits.run, or no stall is ever seen")
        return self

    def pins(self) -> dict[str, str]:
        """The exact versions that the driver and every worker enforce, by distribution name."""
        return {"torch": TORCH_PINS[self.hosts.device], **COMMON_PINS}


def _check_drill(after_step: int, steps: int, interval: int) -> None:
    latest = (steps - interval) // interval * interval
    if latest < interval:
        raise FieldError(
            "drill",
            f"needs a run of two commits: {steps} steps with checkpoint_interval {interval} are too few",
        )
    if after_step > latest:
        raise FieldError(
            "drill.after_step",
            f"must be at most {latest}, not {after_step}, so that a later commit can prove recovery",
        )
    if after_step % interval:
        lower = after_step // interval * interval
        nearest = lower if lower else interval
        raise FieldError(
            "drill.after_step",
            f"must be a multiple of checkpoint_interval ({interval}), not {after_step}: such as {nearest}",
        )


@dataclass(frozen=True)
class Undecodable:
    """An input that no converter could decode: what its payload called itself, and why in one clause."""

    encoding: str
    why: str


class SpecError(ValueError):
    """run.json is refused. The message is for a person; `problems` has a sentence for each fault told."""

    def __init__(self, *problems: str, found: int = 1) -> None:
        self.problems = problems
        if found == 1:
            text = f"run.json is refused: {problems[0]}"
        else:
            more = [f"and {found - len(problems)} more"] if found > len(problems) else []
            text = "\n- ".join([f"run.json is refused for {found} reasons:", *problems, *more])
        super().__init__(text)


def parse_run(args: tuple[object, ...]) -> RunSpec:
    """The run that a workflow's raw decoded inputs describe; SpecError, and nothing else, if they do not."""
    if len(args) != 1:
        given = f"{len(args)} inputs were given" if args else "no input was given"
        raise SpecError(f"{given}; exactly one is needed, a JSON object: {_START}")
    [value] = args
    # By name: the converter lives outside the workflow's sandbox, which may have its own copy of the class.
    if type(value).__name__ == Undecodable.__name__:
        encoding, why = plain(str(getattr(value, "encoding", ""))), plain(str(getattr(value, "why", "")))
        raise SpecError(
            f'the input, of encoding "{encoding}", cannot be decoded: {why}. '
            f"Send one JSON object with the default encoding, json/plain: {_START}"
        )
    if not isinstance(value, dict):
        raise SpecError(f"the input is {_kind(value)}, but must be one JSON object: {_START}")
    try:
        return RunSpec.model_validate(value)
    except ValidationError as error:
        told, found = explain(error, RunSpec)
    raise SpecError(*told, found=found)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text (JSON inside quotation marks is text, not an object)"
    if isinstance(value, bytes | bytearray):
        return "raw bytes"
    if isinstance(value, list | tuple):
        return "a list"
    return "neither JSON nor bytes"


def run_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of run.json; the rules between fields are in the descriptions."""
    schema = RunSpec.model_json_schema()
    # These two first: whoever opens the file sees what it is.
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": schema["title"]}
    return {**head, **schema}
