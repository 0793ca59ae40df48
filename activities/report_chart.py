"""The geometry of the loss curve: from points, commits and marks to what an SVG needs. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from activities.report_material import thin

LOG_FROM: Final = 10.0
"""A loss that falls by more than this factor is drawn on a logarithmic axis: a linear one would show a flat line."""
LABEL_DIGIT: Final = 7.0
"""The width of a tick's digit, in the SVG's units."""
MAX_DOTS: Final = 80
"""Commits are drawn as dots on the curve up to this many, and as ticks below it beyond."""
MAX_TICKS: Final = 400

HUGE: Final = 1e300
"""Losses are drawn as if no larger, and on a logarithmic axis only above 1/HUGE: within, no difference overflows."""

MarkKind = Literal["kill", "resume"]


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step, told by a line and a word."""

    kind: MarkKind
    step: float
    label: str


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    title: str


@dataclass(frozen=True)
class Flag:
    """A mark's place: its line at `x`, its word at `text_x`, `text_y`."""

    kind: MarkKind
    x: float
    text_x: float
    text_y: float
    anchor: Literal["start", "end"]
    label: str


@dataclass(frozen=True)
class Chart:
    """All coordinates in the SVG's own units; the plot is the box `left`, `top`, `right`, `bottom`."""

    name: str
    width: int
    height: int
    left: float
    top: float
    right: float
    bottom: float
    path: str
    log: bool
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    dots: tuple[Dot, ...]
    bars: tuple[float, ...]
    """x of the commits that are too many to be dots."""
    flags: tuple[Flag, ...]
    lonely: Dot | None
    """The only point there is, which no line shows."""


def loss_chart(
    name: str,
    points: Sequence[list[float]],
    commits: Sequence[tuple[float, float | None]],
    marks: Sequence[Mark],
    width: int,
    height: int,
) -> Chart | None:
    """A chart of `points` ([step, loss], by step) with commits (step, loss) and marks; None without points."""
    if not points:
        return None
    points = [[step, min(max(loss, -HUGE), HUGE)] for step, loss in points]
    right, top, bottom = width - 28.0, 20.0 + 16.0 * len(marks), height - 40.0
    steps = [p[0] for p in points] + [c[0] for c in commits] + [m.step for m in marks]
    losses = [p[1] for p in points]
    lowest, highest = min(losses), max(losses)
    log = lowest > 1 / HUGE and highest / lowest > LOG_FROM
    x_low, x_high = _room(min(steps), max(steps), 1.0)
    y_low, y_high = _log_room(lowest, highest) if log else _linear_room(lowest, highest)
    rounded = _decades(y_low, y_high) if log else _ticks(y_low, y_high, 5)
    labels = _labels(rounded)
    left = max(58.0, 16.0 + LABEL_DIGIT * max((len(label) for label in labels), default=0))

    def x(step: float) -> float:
        return round(left + (step - x_low) / (x_high - x_low) * (right - left), 1)

    def y(loss: float) -> float:
        value = math.log10(loss) if log else loss
        return round(bottom - (value - y_low) / (y_high - y_low) * (bottom - top), 1)

    drawn = thin(points, 2 * width)
    at_commits = [(step, _near(points, step) if loss is None else loss) for step, loss in commits]
    inside = [(step, min(max(loss, lowest), highest)) for step, loss in at_commits]
    few = len(inside) <= MAX_DOTS
    return Chart(
        name=name,
        width=width,
        height=height,
        left=left,
        top=top,
        right=right,
        bottom=bottom,
        path="M" + "L".join(f"{x(step)} {y(loss)}" for step, loss in drawn),
        log=log,
        x_ticks=tuple(Tick(x(at), f"{at:,.0f}") for at in _whole_ticks(x_low, x_high, max(4, width // 110))),
        y_ticks=tuple(Tick(y(at), label) for at, label in zip(rounded, labels, strict=True)),
        dots=tuple(Dot(x(s), y(v), f"commit at step {s:g}, loss {v:.6g}") for s, v in inside) if few else (),
        bars=() if few else tuple(sorted({x(step) for step, _ in inside}))[:MAX_TICKS],
        flags=tuple(_flag(mark, row, x(mark.step), left, right) for row, mark in enumerate(marks)),
        lonely=Dot(x(points[0][0]), y(points[0][1]), f"step {points[0][0]:g}") if len(points) == 1 else None,
    )


def _flag(mark: Mark, row: int, at: float, left: float, right: float) -> Flag:
    # A word each in a row of its own, on the side where there is room.
    after = at < (left + right) / 2
    return Flag(mark.kind, at, at + (7 if after else -7), 24.0 + 16.0 * row, "start" if after else "end", mark.label)


def _near(points: Sequence[list[float]], step: float) -> float:
    index = bisect_left(points, step, key=lambda p: p[0])
    return points[min(index, len(points) - 1)][1]


def _room(low: float, high: float, least: float) -> tuple[float, float]:
    return (low, high) if high - low >= least else (low - least / 2, low + least / 2)


def _linear_room(low: float, high: float) -> tuple[float, float]:
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    # An axis of losses starts at zero when zero is near.
    return (0.0 if 0 <= low < (high - low) * 0.5 else low - pad), high + pad


def _log_room(low: float, high: float) -> tuple[float, float]:
    return math.log10(low) - 0.08, math.log10(high) + 0.08


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers within, about so many."""
    raw = (high - low) / about
    if not (math.isfinite(raw) and raw > 0):
        return [low]
    size = 10.0 ** math.floor(math.log10(raw))
    step = size * next(factor for factor in (1, 2, 2.5, 5, 10) if raw <= size * factor * 1.0001)
    first = math.ceil(low / step - 1e-9)
    return [(first + i) * step for i in range(about + 2) if (first + i) * step <= high + step * 1e-9]


def _labels(ticks: Sequence[float]) -> list[str]:
    """As many digits as it takes to tell one tick from the next: a loss that has become flat has many."""
    told: list[str] = []
    for digits in range(4, 16):
        told = [f"{at:.{digits}g}" for at in ticks]
        if len(set(told)) == len(told):
            break
    return told


def _whole_ticks(low: float, high: float, about: int) -> list[float]:
    # Beyond 2**53 the arithmetic of ticks rounds past the ends, which comparing does not.
    return [at for at in _ticks(low, high, about) if at == int(at) and low <= at <= high]


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten between two logarithms, thinned when many, with 2 and 5 between when few."""
    first, last = math.ceil(low), math.floor(high)
    every = max(1, (last - first) // 6)
    decades = [10.0**power for power in range(first, last + 1, every)]
    if len(decades) > 3:
        return decades
    between = [m * 10.0**power for power in range(math.floor(low), math.ceil(high)) for m in (1, 2, 5)]
    return [at for at in between if low <= math.log10(at) <= high]
