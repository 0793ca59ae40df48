"""Drilled runs: kill to first step after resume against Ray's default settings, and how long the histories get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any, Final

from rich.markup import escape

from bench.figure import EQUAL, Experiment, Figure, at_most, middle
from bench.guarded import Ended, decisions
from bench.lab import Lab, Trouble, source
from bench.ray_overrides import without_preparation

RECIPE: Final = {"steps": 320, "checkpoint_interval": 4}
DRILL: Final = {"kind": "worker", "after_step": 8}
SETTLE_S: Final = 5.0
"""From commit to kill with Ray's defaults; about what an operator takes to choose and to strike."""


@dataclass(frozen=True)
class Pair:
    guarded_s: float
    defaults_s: float | None
    """None where that one could not be measured; the guarded run's history counts all the same."""
    spare_had_s: float
    """From the ranks' start to the kill: what each host's spare process had to become ready in."""
    started_s: float
    """From the kill to the start of the last rank of the next attempt; the rest of `guarded_s` is its first step."""
    run_events: int
    custody_events: int

    @property
    def ratio(self) -> float | None:
        return self.guarded_s / self.defaults_s if self.defaults_s else None


async def drilled(lab: Lab, recipe: dict[str, Any]) -> Ended:
    """One guarded run with a drill."""
    ended = await (await lab.start("drilled", recipe, DRILL)).end()
    lab.drilled.append(ended)
    return ended


async def pair(lab: Lab, index: int) -> Pair:
    """One of each, in turns first."""

    async def defaults() -> float | None:
        with source(without_preparation) as package:
            try:
                told = await lab.peer(
                    "bench.ray_defaults",
                    RECIPE,
                    package,
                    *("--after-step", str(DRILL["after_step"]), "--settle-s", str(SETTLE_S)),
                )
            except Trouble as trouble:
                lab.say(escape(f"with Ray's defaults: {trouble}"))
                return None
        return float(told["seconds"])

    if index % 2:
        theirs = await defaults()
        ours = await drilled(lab, RECIPE)
    else:
        ours = await drilled(lab, RECIPE)
        theirs = await defaults()
    struck = ours.verdict["strike"]["at"]
    return Pair(
        guarded_s=round(ours.verdict["drill"]["seconds_to_resume"], 3),
        defaults_s=theirs,
        spare_had_s=round(struck - last_start(ours, attempt=1), 3),
        started_s=round(last_start(ours, attempt=2) - struck, 3),
        run_events=len(ours.history),
        custody_events=len(ours.custody_history),
    )


def last_start(ended: Ended, attempt: int) -> float:
    """When the last rank of an attempt began, Unix seconds, by its own evidence."""
    ranks = ended.verdict["placement"]["ranks"]
    return max(datetime.fromisoformat(each["at"]).timestamp() for each in ranks if each["attempt"] == attempt)


def explain(pairs: Sequence[Pair]) -> str:
    defaults = [each.defaults_s for each in pairs if each.defaults_s is not None]
    return (
        f"kill to first step {median(each.guarded_s for each in pairs):.1f} s guarded, "
        f"{f'{median(defaults):.1f} s' if defaults else 'not measured'} with Ray's defaults; of the guarded "
        f"ones {median(each.started_s for each in pairs):.1f} s until the last rank began (noticing, the old group's "
        "end, new processes, rendezvous); the spare processes had "
        f"{median(each.spare_had_s for each in pairs):.1f} s to get ready before the kill"
    )


EXPERIMENT: Final = Experiment(
    sample=pair,
    figures=(
        Figure(
            name="recovery-ratio",
            what="kill → first step after resume ÷ the same with Ray's default settings",
            unit="",
            bar=at_most(0.5),
            value=lambda pairs: middle(found) if (found := [r for e in pairs if (r := e.ratio)]) else None,
            explain=explain,
            shows=lambda each: {
                "ratio": each.ratio and round(each.ratio, 3),
                "guarded_s": each.guarded_s,
                "defaults_s": each.defaults_s,
                "spare_had_s": each.spare_had_s,
                "started_s": each.started_s,
            },
        ),
        Figure(
            name="run-history-events",
            what="events in a drilled run's history (the longest seen)",
            unit="events",
            bar=at_most(250),
            value=lambda pairs: max(each.run_events for each in pairs),
            explain=lambda pairs: (
                f"{RECIPE['steps']} steps, {RECIPE['steps'] // RECIPE['checkpoint_interval']} commits"
            ),
            shows=lambda each: each.run_events,
        ),
        Figure(
            name="custody-history-events",
            what="events in its custody's history (the longest seen)",
            unit="events",
            bar=at_most(150),
            value=lambda pairs: max(each.custody_events for each in pairs),
            explain=lambda pairs: "four claims: cluster, service, job, the strike's helper",
            shows=lambda each: each.custody_events,
        ),
    ),
)


@dataclass(frozen=True)
class Lengths:
    """Events of a run and its custody; ``decided``: without workflow tasks."""

    steps: int
    run: int
    run_decided: int
    custody: int
    custody_decided: int

    @classmethod
    def of(cls, steps: int, ended: Ended) -> Lengths:
        run, custody = ended.history, ended.custody_history
        return cls(steps, len(run), decisions(run), len(custody), decisions(custody))


@dataclass(frozen=True)
class Longer:
    short: Lengths
    long: Lengths

    @property
    def difference(self) -> int:
        """Events that the longer run has more, or less, of, workflow tasks aside."""
        run = abs(self.long.run_decided - self.short.run_decided)
        return run + abs(self.long.custody_decided - self.short.custody_decided)


async def ten_times_longer(lab: Lab, _index: int) -> Longer:
    """The same run with ten times the steps, and so ten times the commits."""
    short = lab.drilled[0] if lab.drilled else await drilled(lab, RECIPE)
    steps = RECIPE["steps"] * 10
    long = await drilled(lab, {**RECIPE, "steps": steps})
    return Longer(Lengths.of(RECIPE["steps"], short), Lengths.of(steps, long))


def compare(samples: Sequence[Longer]) -> str:
    [each] = samples
    return (
        f"{each.short.steps} and {each.long.steps} steps: run {each.short.run} and {each.long.run} events, custody "
        f"{each.short.custody} and {each.long.custody}; compared without workflow tasks, of which there is one more or "
        f"less as answers happen to come together: {each.short.run_decided} and {each.long.run_decided}, "
        f"{each.short.custody_decided} and {each.long.custody_decided}"
    )


LONGER: Final = Experiment(
    sample=ten_times_longer,
    once=True,
    figures=(
        Figure(
            name="history-ten-times-longer",
            what="the same for a run ten times longer: difference",
            unit="events",
            bar=EQUAL,
            value=lambda samples: samples[0].difference,
            explain=compare,
            shows=lambda each: each,
        ),
    ),
)
