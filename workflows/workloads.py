"""The workloads of a run: what is trained, and how often it commits."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from workflows.explain import FieldError
from workflows.fields import DirectoryPath, Entrypoint, Strict

# Each commit costs a report (0.2 to 2 s) and rewrites Ray's snapshot, which lists all of them.
MAX_COMMITS = 2_000
# float32 inputs of one rank: 1 GiB.
MAX_VALUES = 2**28


class Recipe(Strict):
    """The built-in synthetic linear regression, trained by SGD with momentum over all ranks."""

    steps: int = Field(
        default=32,
        ge=2,
        le=1_000_000,
        description="Optimizer steps; at least 2, or no learning can be seen.",
        examples=[32],
    )
    samples_per_rank: int = Field(
        default=1_024, ge=1, le=10_000_000, description="Samples that each rank makes.", examples=[1024]
    )
    checkpoint_interval: int = Field(
        default=4,
        ge=1,
        le=1_000_000,
        description=f"Optimizer steps from one commit to the next; at most {MAX_COMMITS} commits a run.",
        examples=[4],
    )
    learning_rate: float = Field(default=0.1, gt=0, le=10, description="Learning rate of SGD.", examples=[0.1])
    momentum: float = Field(
        default=0.9,
        gt=0,
        le=0.9999,
        description="Momentum of SGD; above 0, because its recovery is part of the drill's proof.",
        examples=[0.9],
    )
    features: int = Field(default=16, ge=1, le=4_096, description="Inputs of the regression.", examples=[16])
    batch_size: int = Field(
        default=128,
        ge=1,
        le=1_000_000,
        description="Samples of a rank in one optimizer step.",
        examples=[128],
    )
    seed: int = Field(default=7, ge=0, le=2**31 - 1, description="Seed of data and model.", examples=[7])

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_commits(self.steps, self.checkpoint_interval)
        if self.batch_size > self.samples_per_rank:
            raise FieldError(
                "batch_size",
                f"must be at most samples_per_rank ({self.samples_per_rank}), not {self.batch_size}",
            )
        if self.samples_per_rank * self.features > MAX_VALUES:
            raise FieldError(
                "samples_per_rank",
                f"times features must be at most {MAX_VALUES} values (1 GiB a rank): lower one of them",
            )
        return self


class RegressionWorkload(Strict):
    """The built-in application."""

    kind: Literal["regression"] = Field(description="The built-in application.", examples=["regression"])
    recipe: Recipe = Field(default_factory=Recipe, description="What to train.", examples=[{"steps": 32}])

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.recipe.steps

    @property
    def commit_interval(self) -> int:
        """Optimizer steps from one commit to the next."""
        return self.recipe.checkpoint_interval


class ScriptWorkload(Strict):
    """A Ray Train V2 application of yours that keeps the workload contract."""

    kind: Literal["script"] = Field(description="A Ray Train V2 application of yours.", examples=["script"])
    working_dir: DirectoryPath = Field(
        description="Directory of pure-Python source on the worker's machine, absolute or relative to where "
        "the worker was started, without '..'. It is uploaded with the job: keep keys out of it.",
        examples=["examples/digits"],
    )
    entrypoint: Entrypoint = Field(
        description="The program and its arguments, run in the working directory: a list, or one line "
        "without shell syntax. Everybody who sees the job sees it: never a key.",
        examples=[["python", "train.py"], "python train.py"],
    )
    steps: int = Field(ge=1, le=1_000_000, description="Steps that the application makes.", examples=[200])
    checkpoint_interval: int = Field(
        ge=1,
        le=1_000_000,
        description=f"Steps from one commit to the next; at most {MAX_COMMITS} commits a run.",
        examples=[20],
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_commits(self.steps, self.checkpoint_interval)
        return self

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.steps

    @property
    def commit_interval(self) -> int:
        """Steps from one commit to the next."""
        return self.checkpoint_interval


def _check_commits(steps: int, interval: int) -> None:
    if interval > steps:
        raise FieldError("checkpoint_interval", f"must be at most steps ({steps}), not {interval}")
    if -(-steps // interval) > MAX_COMMITS:
        least = -(-steps // MAX_COMMITS)
        raise FieldError(
            "checkpoint_interval",
            f"must be at least {least} for {steps} steps, not {interval}, for at most {MAX_COMMITS} commits",
        )
