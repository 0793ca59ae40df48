"""What a benchmark says: figures with a value, a bar and whether it holds; and how they are shown and written."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from bench.lab import Lab


@dataclass(frozen=True)
class Bar:
    """What a value is held against."""

    text: str
    holds: Callable[[float], bool]


def at_most(limit: float) -> Bar:
    """The value may not exceed ``limit``."""
    return Bar(f"≤ {limit:g}", lambda value: value <= limit)


def at_least(limit: float) -> Bar:
    """The value may not fall below ``limit``."""
    return Bar(f"≥ {limit:g}", lambda value: value >= limit)


EQUAL = Bar("equal", lambda value: value == 0)
"""The value is a difference."""


@dataclass(frozen=True)
class Figure:
    """One figure of an experiment. ``value`` and ``explain`` look at all of the experiment's samples."""

    name: str
    what: str
    unit: str
    bar: Bar | None
    """None: reported only."""
    value: Callable[[Sequence[Any]], float | None]
    explain: Callable[[Sequence[Any]], str]
    """One sentence from the samples: where the time goes, which is what limits a bar that is not met."""
    shows: Callable[[Any], Any]
    """What of a sample is kept in results.json."""


@dataclass(frozen=True)
class Experiment:
    """What is done to measure one or more figures."""

    figures: tuple[Figure, ...]
    sample: Callable[[Lab, int], Awaitable[Any]]
    """Takes one sample (a pair, where there is a peer); the number lets pairs change their order."""
    once: bool = False
    """One sample is enough: what is counted does not vary with the machine."""


@dataclass(frozen=True)
class Measured:
    """A figure's outcome."""

    figure: Figure
    value: float | None
    """None: no sample tells it."""
    samples: tuple[Any, ...]
    explanation: str
    least: int
    """How many samples it takes to judge it."""

    @property
    def holds(self) -> bool | None:
        """None for a figure without a bar, or with too few samples to say."""
        if self.figure.bar is None or len(self.samples) < self.least:
            return None
        return self.value is not None and self.figure.bar.holds(self.value)


def judge(figure: Figure, samples: Sequence[Any], trouble: Sequence[str], least: int) -> Measured:
    """The figure from its experiment's samples. What could not be measured is no value, and says why; a bar is said to
    hold by at least ``least`` samples."""
    said = [f"not measured: {each}" for each in trouble]
    if not samples:
        return Measured(figure, None, (), "; ".join(said) or "not measured", least)
    return Measured(
        figure,
        figure.value(samples),
        tuple(figure.shows(each) for each in samples),
        "; ".join([figure.explain(samples), *said]),
        least,
    )


def table(measured: Sequence[Measured], console: Console) -> None:
    """Print all figures for people."""
    grid = Table(box=box.SIMPLE_HEAD, show_lines=True)
    for name, options in (
        ("figure", {"ratio": 3}),
        ("value", {"justify": "right", "no_wrap": True}),
        ("bar", {"no_wrap": True}),
        ("holds", {"no_wrap": True}),
        ("n", {"justify": "right"}),
        ("from the samples", {"ratio": 5}),
    ):
        grid.add_column(name, **options)
    marks = {True: "[green]yes[/]", False: "[bold red]no[/]", None: "–"}
    for each in measured:
        value = "–" if each.value is None else f"{plain(each.value)} {each.figure.unit}".rstrip()
        limits = "limited by: " if each.holds is False and each.value is not None else ""
        grid.add_row(
            each.figure.what,
            value,
            each.figure.bar.text if each.figure.bar else "reported",
            marks[each.holds],
            str(len(each.samples)),
            limits + each.explanation,
        )
    console.print(grid)


def write(measured: Sequence[Measured], path: Path) -> None:
    """Write a list of {figure, value, unit, bar, holds, samples}."""
    _write(_rows(measured), path)


def update(measured: Sequence[Measured], path: Path, order: Sequence[str]) -> None:
    """Replace these figures in results.json and keep the others, in this order; figures that are no more are left
    out."""
    old = json.loads(path.read_text()) if path.exists() else []
    rows = {row["figure"]: row for row in (*old, *_rows(measured))}
    _write([rows[name] for name in order if name in rows], path)


def _rows(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    return [
        {
            "figure": each.figure.name,
            "value": each.value,
            "unit": each.figure.unit,
            "bar": each.figure.bar.text if each.figure.bar else None,
            "holds": each.holds,
            "samples": [asdict(s) if is_dataclass(s) and not isinstance(s, type) else s for s in each.samples],
        }
        for each in measured
    ]


def _write(rows: Sequence[dict[str, Any]], path: Path) -> None:
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def plain(value: float) -> str:
    """A number with three digits that count, or all of an integer."""
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"


def middle(values: Sequence[float]) -> float:
    """The median, rounded to a thousandth."""
    return round(median(values), 3)


def seconds(parts: dict[str, float]) -> str:
    """`a 1.2 s, b 3 s` from the largest to the smallest, without what is below 0.1 s."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {value:.1f} s" for name, value in ordered if value >= 0.1)
