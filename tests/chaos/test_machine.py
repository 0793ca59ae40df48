"""A handful of light scenarios on real parts, and the light cluster held to the real one's recorded answers."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.chaos.answers import RECORDED, of_a_run
from tests.chaos.carrying import carry
from tests.chaos.lane import Lane
from tests.chaos.points import HALFWAY, IN_FLIGHT, Point
from tests.chaos.scenarios import NOBODY, TRAINING, Scenario
from workflows import activity_names as names

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

SCENARIOS = [
    Scenario("light", Point("half", names.SUBMIT, call=HALFWAY[names.SUBMIT]), "worker", "succeeds"),
    Scenario("light", Point("half", names.LAUNCH, call=IN_FLIGHT[names.LAUNCH]), NOBODY, "terminate"),
    Scenario("light", Point("before", names.RELEASE), "temporal", "abort"),
    Scenario("light", TRAINING, "dashboard", "succeeds"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lane() -> AsyncIterator[Lane]:
    root = Path(tempfile.mkdtemp(prefix="lt-"))
    made = Lane(root, "light", print)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()
        shutil.rmtree(root)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.id)
async def test_nothing_is_left_and_the_verdict_is_true(lane: Lane, scenario: Scenario) -> None:
    row = await carry(lane, scenario, seed=0)
    assert (row.leaks, row.wrong, row.trouble) == ([], [], ""), row.told


async def test_the_light_cluster_answers_as_the_real_one_did(lane: Lane) -> None:
    """Every answer has the recorded status; what it holds has a recorded name and type, or is a Ray's own word."""
    recorded = json.loads(RECORDED.read_text())
    found = await of_a_run(lane)
    assert found.keys() == recorded.keys()
    for request, told in found.items():
        assert _differs(told, recorded[request]) == [], request


def _differs(light: Any, real: Any, place: str = "") -> list[str]:
    """Where the light answer holds what the real one does not."""
    if isinstance(light, dict) and isinstance(real, dict):
        strange = [f"{place}.{name} is not in the real answer" for name in light.keys() - real.keys()]
        return strange + [
            each for name in light.keys() & real.keys() for each in _differs(light[name], real[name], f"{place}.{name}")
        ]
    if isinstance(light, list) and isinstance(real, list):
        return [each for member in light for each in min((_differs(member, one, place) for one in real), key=len)]
    if light == real or "null" in (light, real):
        return []
    own_word = place.endswith((".status", ".state", ".type", ".class_name")) and isinstance(light, str)
    return [] if own_word or (light, real) == ("float", "int") else [f"{place} is {light}, not {real}"]
