"""A guarded run without drill against the same by hand: the ratio, and the seconds added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from bench.figure import Experiment, Figure, at_most, middle, seconds
from bench.lab import Lab, source

RECIPE: Final = {"steps": 32, "checkpoint_interval": 4}
"""The demo's."""
PARTS: Final = {
    "start the nodes": ("preflight", "provision", "serve"),
    "job": ("submit", "train", "prove", "save records"),
    "stop the nodes": ("release",),
    "download, inspect, rrd verify, reload": ("verify",),
    "report": ("report",),
}
"""By hand, and the phases of a guarded run that do the same."""


@dataclass(frozen=True)
class Pair:
    guarded_s: float
    by_hand_s: float
    guarded_phases: dict[str, float]
    by_hand_steps: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.guarded_s / self.by_hand_s


async def pair(lab: Lab, index: int) -> Pair:
    """One of each, in turns first."""

    async def by_hand() -> dict[str, Any]:
        with source() as package:
            return await lab.peer("bench.by_hand", RECIPE, package)

    if index % 2:
        hand = await by_hand()
        guarded = await (await lab.start("plain", RECIPE)).end()
    else:
        guarded = await (await lab.start("plain", RECIPE)).end()
        hand = await by_hand()
    return Pair(
        guarded_s=round(guarded.seconds, 3),
        by_hand_s=hand["seconds"],
        guarded_phases={name: round(taken, 3) for name, taken in guarded.phases.items()},
        by_hand_steps=hand["steps"],
    )


def explain(pairs: Sequence[Pair]) -> str:
    """Where the guarded run spends more."""
    more: dict[str, float] = {}
    known = 0.0
    for by_hand, phases in PARTS.items():
        ours = median(sum(each.guarded_phases.get(name, 0.0) for name in phases) for each in pairs)
        theirs = median(sum(each.by_hand_steps.get(name, 0.0) for name in by_hand.split(", ")) for each in pairs)
        more["/".join(phases)] = ours - theirs
        known += ours
    more["CLI, claims, between phases"] = median(each.guarded_s for each in pairs) - known
    added = {name: value for name, value in more.items() if value > 0}
    saved = {name: -value for name, value in more.items() if value < 0}
    return (
        f"guarded {median(each.guarded_s for each in pairs):.1f} s, by hand "
        f"{median(each.by_hand_s for each in pairs):.1f} s; more in {seconds(added)}; less in {seconds(saved)}"
    )


def shows(each: Pair) -> dict[str, Any]:
    return {"ratio": round(each.ratio, 3), "added_s": round(each.guarded_s - each.by_hand_s, 3), **asdict(each)}


EXPERIMENT: Final = Experiment(
    sample=pair,
    figures=(
        Figure(
            name="guarded-run-ratio",
            what="guarded run without drill ÷ the same by hand",
            unit="",
            bar=at_most(1.15),
            value=lambda pairs: middle([each.ratio for each in pairs]),
            explain=explain,
            shows=shows,
        ),
        Figure(
            name="guarded-run-seconds-added",
            what="seconds that the guard adds to such a run",
            unit="s",
            bar=None,
            value=lambda pairs: middle([each.guarded_s - each.by_hand_s for each in pairs]),
            explain=explain,
            shows=shows,
        ),
    ),
)
