"""GuardedTrain on a real server: every ending, in every phase, and what is left afterwards: nothing."""

from __future__ import annotations

import pytest

from tests.workflows.conftest import Keep, Temporal
from tests.workflows.stand_ins import DRILLED, FULL, PLAIN, World, custodys_word, ending_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_run_without_a_drill_succeeds_and_leaves_nothing(world: World, keep_history: Keep) -> None:
    run = await world.start(PLAIN)
    ending = await ending_of(run)
    print(ending)
    record = await custodys_word(world)
    print(record, world.story())
