"""What is tried: where a run is struck, what is killed there, how the run ends; and what must then be true.

The list is made from the enumerated points and a seed, and is the same for the same seed. Expectations follow from the
ending, and from what a victim means for it; nothing here looks at a result.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tests.chaos.points import IN_FLIGHT, LONG_LIVED, Point, activity_points, gaps
from workflows import activity_names as names

Slice = Literal["light", "real"]

TRAINING: Final = Point("training", "GuardedTrain")
"""After a commit beyond the drill's, a random moment later."""
WITHSTOOD: Final = Point("training", "failed release")
"""While a release is tried again because something withstood the one before."""

OPERATOR: Final = (
    "worker",
    "temporal",
    "s3",
    "network",
    "disk full",
    "everything of the operator",
    "worker gone long",
    "two workers",
    "newer code",
    "empty home",
    "threads blocked",
)
CLUSTER: Final = ("dashboard", "raylet", "driver", "training worker", "hosting service")
NOBODY: Final = "nobody"
"""A mutation is in flight, and the ending itself is what happens to it."""
VICTIMS: Final = (*OPERATOR, *CLUSTER, NOBODY)

NATURAL: Final = ("succeeds", "training fails", "stalls", "out of time", "execution timeout")
"""These come by themselves."""
RESETS: Final = ("reset to the start", "reset in the middle", "reset to the last task")
ACTIONS: Final = (
    "abort",
    "cancel",
    "cancel twice",
    "terminate",
    *RESETS,
    "reset, then cancelled",
    "reset, then terminated",
    "started twice",
    "custody cancelled",
    "task fails for ever",
    "non-determinism",
)
"""These are done to the run."""
ENDINGS: Final = (*NATURAL, *ACTIONS)

OUTCOME: Final = {
    "succeeds": "succeeded",
    "started twice": "succeeded",
    "abort": "aborted",
    "cancel": "cancelled",
    "cancel twice": "cancelled",
    "terminate": "terminated",
    "execution timeout": "timed_out",
    "reset, then terminated": "terminated",
}
"""What the verdict must be; of all other endings: failed."""
STATUS: Final = {
    "succeeded": "COMPLETED",
    "aborted": "COMPLETED",
    "failed": "FAILED",
    "rejected": "FAILED",
    "cancelled": "CANCELED",
    "terminated": "TERMINATED",
    "timed_out": "TIMED_OUT",
}
"""How Temporal shows each outcome."""

_EARLY: Final = (names.ORIENT, names.PREFLIGHT)
EARLY_GAPS: Final = 3
"""Workflow tasks until preflight is over."""
_HOSTED: Final = (names.SUBMIT, names.WATCH, names.CHOOSE, names.STRIKE)
"""Activities of a run that has its hosts."""
_COMMON: Final = (*_EARLY, names.LAUNCH, names.PROVE_HOSTS, *_HOSTED, names.KEEP, names.RELEASE)
CLOSING: Final = (names.SAVE_RECORDS, names.RELEASE, names.VERIFY, names.REPORT, names.REPORT_UNSPOKEN)
"""Activities after the training: what ends it has to happen before them."""
_UNSPOKEN: Final = ("terminate", "execution timeout", "reset, then terminated")


@dataclass(frozen=True)
class Scenario:
    """One way to strike one run."""

    slice: Slice
    where: Point
    victim: str
    ending: str

    @functools.cached_property
    def id(self) -> str:
        """Its name: slice, where, victim, ending."""
        return "/".join(re.sub(r"[^a-z0-9:_]+", "-", part.lower()) for part in self._parts)

    @property
    def _parts(self) -> tuple[str, str, str, str]:
        return self.slice, str(self.where), self.victim, self.ending

    def chances(self, seed: int) -> random.Random:
        """Where this scenario's own accidents come from: moments, ranks, which comes first."""
        return random.Random(hashlib.sha256(f"{seed} {self.id}".encode()).digest())

    @property
    def acts_early(self) -> bool:
        """Whether the ending is brought about in training, and the point comes after it."""
        closing = self.where.of in (*CLOSING, "failed release") or str(self.where) == f"{names.KEEP}:after"
        return closing or (self.where.of == "Custody" and self.where.nth > 3)

    @property
    def expected(self) -> frozenset[str]:
        """The outcomes that would be true."""
        natural = OUTCOME.get(self.ending, "failed")
        told = {natural}
        early = self.where.of in _EARLY or (self.where.kind == "gap" and self.where.nth <= EARLY_GAPS)
        if self.victim in ("s3", "disk full", "everything of the operator") and early:
            told.add("rejected")  # preflight tries storage, and says when it cannot be used
        if self.ending in ("succeeds", "started twice") and not self.acts_early:
            if self.victim in ("dashboard", "raylet", "driver"):
                told = {"failed"}
            if self.victim in ("training worker", "hosting service"):
                told.add("failed")
        if self.victim in CLUSTER and self.ending in ("execution timeout",):
            told.add("failed")
        if self.ending in RESETS and self.where.of == names.PROVE:
            told.add("succeeded")  # trained and exported: what is left needs no claim, and is proved and verified anew
        if self.ending == "reset, then cancelled":
            told.add("cancelled")  # whichever comes first: the cancel, or the refused claim
        return frozenset(told)

    @property
    def takes_s(self) -> float:
        """About how long, for shards of equal length."""
        base = 20.0 if self.slice == "light" else 110.0
        waits = {"out of time": 20.0, "task fails for ever": 50.0, "execution timeout": 15.0}
        return base + waits.get(self.ending, 0.0)


def reaches(ending: str, activity: str) -> bool:
    """Whether a light run with this ending comes to this activity (a drill is part of every light run)."""
    if activity in _COMMON:
        return activity != names.ORIENT or ending not in (*RESETS, "reset, then cancelled", "reset, then terminated")
    match activity:
        case names.PROVE:
            return ending in ("succeeds", *ACTIONS)
        case names.VERIFY:
            return ending in ("succeeds", "started twice")
        case names.SAVE_RECORDS:
            return ending not in (*_UNSPOKEN, *RESETS, "reset, then cancelled", "non-determinism")
        case names.REPORT:
            return ending not in (*_UNSPOKEN, "non-determinism")
        case names.REPORT_UNSPOKEN:
            return ending in _UNSPOKEN
    return False


def fits(scenario: Scenario) -> bool:
    """Whether this can happen at all, and means something."""
    where, victim, ending = scenario.where, scenario.victim, scenario.ending
    if where.kind in ("before", "half", "after", "heartbeat") and not reaches(ending, where.of):
        return False
    hosted = where in (TRAINING, WITHSTOOD) or where.of in (*_HOSTED, names.PROVE, names.RELEASE)
    if victim in CLUSTER:
        # It has to be alive, and training.
        training = where == TRAINING or (where.of in (names.CHOOSE,) and where.kind != "after")
        return training and ending not in ("execution timeout", "reset, then terminated")
    if victim in ("network", "empty home", "threads blocked") and not (hosted or where.of == names.SAVE_RECORDS):
        return False
    if victim in ("empty home", "threads blocked") and where.kind == "gap":
        return False
    if ending.startswith("reset") and where.kind == "gap":
        return False  # a reset before the first of its tasks is none
    if ending in ("task fails for ever", "non-determinism"):
        # What goes wrong is the worker's own code: it cannot be replaced by another at the same time.
        return victim in ("temporal", "s3", "worker", *CLUSTER) and where in (TRAINING, *_points_of(names.WATCH))
    if ending == "started twice" and where.of in _EARLY:
        return where.kind != "gap"
    if ending == "custody cancelled" and where.of == names.ORIENT:
        return False
    if where == WITHSTOOD:
        return ending in ("succeeds", "training fails", "abort", "cancel", "terminate", "custody cancelled")
    return True


def _points_of(activity: str) -> list[Point]:
    return [point for point in activity_points() if point.of == activity]


def light(seed: int) -> list[Scenario]:
    """The light slice, in a stable order."""
    found: dict[str, Scenario] = {}

    def add(*scenarios: Scenario) -> None:
        for each in scenarios:
            if fits(each):
                found.setdefault(each.id, each)

    for point in activity_points():
        ending = next(each for each in ("succeeds", "terminate") if reaches(each, point.of))
        add(Scenario("light", point, "worker", ending))
    add(*(Scenario("light", gap, "worker", "succeeds") for gap in gaps()))
    for name in LONG_LIVED:
        add(Scenario("light", Point("heartbeat", name, 2), "worker", "succeeds"))
    for name in (names.WATCH, names.KEEP):
        add(Scenario("light", Point("heartbeat", name, 3), "temporal", "abort"))
    for name, call in IN_FLIGHT.items():
        for ending in ("terminate", "abort", "custody cancelled", "reset to the last task"):
            add(Scenario("light", Point("half", name, call=call), NOBODY, ending))
    for victim, ending in zip(
        ("worker", "temporal", "s3", "everything of the operator", "worker gone long", "worker", "two workers"),
        ("succeeds", "terminate", "abort", "training fails", "cancel", "custody cancelled", "terminate"),
        strict=True,
    ):
        add(Scenario("light", WITHSTOOD, victim, ending))
    add(*_spread("light", seed, per_victim=9, ending_at_least=6, found=found.values()))
    return list(found.values())


def real(seed: int) -> list[Scenario]:
    """The real slice: every victim and every ending, at points spread over a run."""
    found: dict[str, Scenario] = {}
    for each in _spread("real", seed, per_victim=3, ending_at_least=3, found=()):
        found.setdefault(each.id, each)
    return list(found.values())


def _spread(
    which: Slice, seed: int, *, per_victim: int, ending_at_least: int, found: Iterable[Scenario]
) -> Iterator[Scenario]:
    """Scenarios until every victim has so many of these, and every ending so many of all; endings and points that were
    used least come first, ties are broken by the seed."""
    chances = random.Random(seed)
    endings: Counter[str] = Counter(each.ending for each in found)
    points: Counter[Point] = Counter()
    taken = {each.id for each in found}
    candidates = list(_candidates(which))
    chances.shuffle(candidates)

    def take(wanted: Callable[[Scenario], bool]) -> Scenario | None:
        left = [each for each in candidates if each.id not in taken and wanted(each)]
        if not left:
            return None
        chosen = min(left, key=lambda each: (endings[each.ending], points[each.where]))
        endings[chosen.ending] += 1
        points[chosen.where] += 1
        taken.add(chosen.id)
        return chosen

    for victim in (each for each in VICTIMS if each != NOBODY):
        for _ in range(per_victim):
            if chosen := take(lambda each, victim=victim: each.victim == victim):  # type: ignore[misc]
                yield chosen
    for ending in ENDINGS:
        while endings[ending] < ending_at_least and (
            chosen := take(lambda each, ending=ending: each.ending == ending)  # type: ignore[misc]
        ):
            yield chosen


def _candidates(which: Slice) -> Iterator[Scenario]:
    points = [TRAINING, *activity_points()]
    for where, victim, ending in itertools.product(points, VICTIMS, ENDINGS):
        scenario = Scenario(which, where, victim, ending)
        if victim != NOBODY and fits(scenario) and (which == "light" or _real_too(scenario)):
            yield scenario


def _real_too(scenario: Scenario) -> bool:
    """A real run without a drill where it is to fail or stall: those applications of the tests do no drill."""
    drilled = scenario.where.of not in (names.CHOOSE, names.STRIKE)
    return drilled or scenario.ending not in ("training fails", "stalls")


def shard(scenarios: Sequence[Scenario], text: str) -> list[Scenario]:
    """The k-th of n shards, `k/n`, of about equal length. Raises ValueError for what is no shard."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"a shard is k/n with 1 <= k <= n, not {text!r}")
    index, count = int(match[1]) - 1, int(match[2])
    loads = [0.0] * count
    chosen: list[Scenario] = []
    for each in sorted(scenarios, key=lambda each: (-each.takes_s, each.id)):
        least = loads.index(min(loads))
        loads[least] += each.takes_s
        if least == index:
            chosen.append(each)
    return sorted(chosen, key=[*scenarios].index)
