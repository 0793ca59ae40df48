from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.client import WorkflowExecutionStatus
from temporalio.converter import DataConverter

from worker.observation import Run, Sight

PHASES = ["submit", "train", "drill", "recover", "prove", "release"]
COMMITS = st.integers(0, 9).map(lambda step: {"step": step, "loss": step / 10})
ANSWERS = st.builds(lambda phase, commit: {"phase": phase, "steps": 9, **commit}, st.sampled_from(PHASES), COMMITS)
BEATS = st.builds(lambda commit, **more: {**commit, **more}, COMMITS, phase=st.sampled_from(PHASES), note=st.text())


class Outside:
    """What Temporal tells of one run at one look: its answer to `progress`, where a worker is there, and what its
    activities said last."""

    def __init__(self) -> None:
        self.data_converter = DataConverter.default
        self.answer: dict[str, Any] | None = None
        self.beats: list[dict[str, Any]] = []

    def get_workflow_handle(self, *_: Any, **__: Any) -> Outside:
        return self

    async def describe(self, **_: Any) -> Any:
        pending = []
        for beat in self.beats:
            pending.append(PendingActivityInfo(attempt=1))
            pending[-1].heartbeat_details.payloads.extend(await self.data_converter.encode([beat]))
        raw = SimpleNamespace(pending_activities=pending, pending_children=[])
        return SimpleNamespace(status=WorkflowExecutionStatus.RUNNING, raw_description=raw)

    async def query(self, *_: Any, **__: Any) -> Any:
        if self.answer is None:
            raise RuntimeError("no worker")
        return self.answer


LOOKS = st.lists(st.tuples(st.none() | ANSWERS, st.lists(BEATS, max_size=2)), min_size=1, max_size=5)


def seen(looks: list[tuple[dict[str, Any] | None, list[dict[str, Any]]]]) -> list[Sight]:
    async def look() -> list[Sight]:
        outside: Any = Outside()
        run = Run(outside, "run", "id")
        sights = []
        for outside.answer, outside.beats in looks:
            sights.append(await run.look())
        return sights

    return asyncio.run(look())


@given(LOOKS)
def test_the_phase_is_what_the_run_answered_last_whatever_its_activities_say(looks: Any) -> None:
    known = ""
    for (answer, _), sight in zip(looks, seen(looks), strict=True):
        known = answer["phase"] if answer else known
        assert sight.text("phase") == known
        assert bool(sight.trouble) == (answer is None)


@given(LOOKS)
def test_the_commit_is_the_furthest_that_anybody_told_of(looks: Any) -> None:
    furthest: dict[str, Any] = {}
    for (answer, beats), sight in zip(looks, seen(looks), strict=True):
        told = [furthest, *([answer] if answer else []), *beats]
        furthest = max(told, key=lambda commit: commit.get("step", -1))
        assert (sight.number("step"), sight.number("loss")) == (furthest.get("step"), furthest.get("loss"))
