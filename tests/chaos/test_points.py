"""The points come from the code: an activity without points, a constant that is gone, fail here."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import pytest

from tests.chaos import tempo
from tests.chaos.points import HALFWAY, OF_NO_RUN, activity_points, registered
from tests.chaos.runs import run_json
from tests.chaos.scenarios import (
    CLUSTER,
    ENDINGS,
    NOBODY,
    OPERATOR,
    TRAINING,
    VICTIMS,
    Scenario,
    light,
    real,
    shard,
)
from workflows import activity_names
from workflows.spec import parse_run

NAMES = {value for name, value in vars(activity_names).items() if name.isupper()}


def test_every_activity_that_a_worker_takes_has_points() -> None:
    """A new activity needs its half in `points.HALFWAY`, or a reason to have none."""
    taken = [each.name for each in registered()]
    assert sorted(taken) == sorted(NAMES)
    assert set(HALFWAY) | set(OF_NO_RUN) == NAMES
    kinds = Counter(point.of for point in activity_points())
    assert all(kinds[name] == (3 if HALFWAY[name] else 2) for name in HALFWAY)
    for name, elsewhere in OF_NO_RUN.items():
        assert name not in HALFWAY
        assert name in Path(elsewhere).read_text().lower()


@pytest.mark.parametrize("name", tempo.LIGHT)
def test_the_light_slice_only_shortens_durations_that_exist(name: str) -> None:
    now, then = tempo.current(name), tempo.LIGHT[name]
    assert type(now) is type(then)
    assert then < now


def test_every_point_and_every_victim_and_every_ending_is_in_the_light_slice() -> None:
    found = light(0)
    assert len({each.id for each in found}) == len(found) >= 160
    assert {str(each.where) for each in found} >= {str(point) for point in activity_points()}
    victims, endings = Counter(each.victim for each in found), Counter(each.ending for each in found)
    assert set(victims) == set(VICTIMS)
    assert set(endings) == set(ENDINGS)


def test_both_slices_together_reach_the_numbers_that_are_asked_for() -> None:
    """At least 200 scenarios, 10 of each victim, 5 of each ending; 40 on the real stack with every kind among them."""
    found = [*light(0), *real(0)]
    assert len({(str(each.where), each.victim, each.ending) for each in found}) >= 200
    victims, endings = Counter(each.victim for each in found), Counter(each.ending for each in found)
    assert min(victims.values()) >= 10
    assert min(endings.values()) >= 5
    on_real = real(0)
    assert len(on_real) >= 40
    assert {each.victim for each in on_real} == {*OPERATOR, *CLUSTER}
    assert NOBODY not in {each.victim for each in on_real}
    assert {each.ending for each in on_real} == set(ENDINGS)


def test_a_seed_gives_the_same_scenarios_and_accidents_and_another_gives_others() -> None:
    assert light(3) == light(3)
    assert {each.id for each in light(3)} != {each.id for each in light(4)}
    [first, *_] = light(3)
    assert first.chances(3).random() == first.chances(3).random() != first.chances(4).random()


@pytest.mark.parametrize("count", [1, 3, 7])
def test_shards_share_all_scenarios_out(count: int) -> None:
    everything = light(0)
    parts = [shard(everything, f"{k}/{count}") for k in range(1, count + 1)]
    assert sorted(each.id for part in parts for each in part) == sorted(each.id for each in everything)
    lengths = [sum(each.takes_s for each in part) for part in parts]
    assert max(lengths) - min(lengths) <= max(each.takes_s for each in everything)


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", ""])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a shard is"):
        shard(light(0), text)


def test_expectations_follow_from_the_ending_alone() -> None:
    """A victim of the operator's side changes no outcome, but where storage is tried before anything exists."""
    for each in [*light(0), *real(0)]:
        if each.victim in (*OPERATOR, NOBODY) and len(each.expected) > 1:
            early_or_late = each.where.of in (activity_names.ORIENT, activity_names.PREFLIGHT, activity_names.PROVE)
            assert early_or_late or each.ending == "reset, then cancelled", each.id


@pytest.mark.parametrize("which", ["light", "real"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_has_a_run_json_that_is_accepted(which: Literal["light", "real"], ending: str) -> None:
    assert parse_run((run_json(Scenario(which, TRAINING, "worker", ending)),))


def test_a_name_is_one_word_of_four_parts() -> None:
    assert all(each.id.count("/") == 3 and " " not in each.id for each in [*light(0), *real(0)])
