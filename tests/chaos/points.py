"""Where a run can be struck: points enumerated from the operator's own code.

The activities are those that `worker/wiring.py` registers, read from its source, so that a new one is found; where the
half of each lies is said here, once, and a test fails for an activity that has no entry.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import activities
from worker import wiring
from workflows import activity_names as names

Kind = Literal["before", "half", "after", "heartbeat", "gap", "training"]


@dataclass(frozen=True)
class Call:
    """One call that the operator makes to the outside: which, its n-th time, just before or just after."""

    name: str
    nth: int = 1
    done: bool = False


@dataclass(frozen=True)
class Point:
    """One instant of a run. ``of`` is an activity's name, or a workflow's for a gap between two of its tasks."""

    kind: Kind
    of: str
    nth: int = 1
    """Which gap, or which heartbeat."""
    call: Call | None = None

    def __str__(self) -> str:
        return f"{self.of}:{self.kind}" + (f"-{self.nth}" if self.kind in ("gap", "heartbeat") else "")

    def told(self) -> dict[str, Any]:
        """As the worker is told."""
        return asdict(self)


HALFWAY: Final[Mapping[str, Call | None]] = {
    names.ORIENT: None,  # answers from memory: there is no half of it
    names.PREFLIGHT: Call("storage.delete"),  # the probe is written and not deleted
    names.LAUNCH: Call("start host 1"),  # one host of two is up
    names.PROVE_HOSTS: Call("read receipt 1"),
    names.SUBMIT: Call("POST jobs", done=True),  # the cluster has the job, the operator has no answer
    names.WATCH: Call("GET job", nth=2),
    names.CHOOSE: Call("storage.get rank-1.start.json"),
    names.STRIKE: Call("POST jobs", done=True),  # the helper is on its way
    names.PROVE: Call("storage.get rank-1.start.json"),
    names.SAVE_RECORDS: Call("storage.put .status.json", done=True),  # status saved, log not
    names.VERIFY: Call("tool"),
    names.REPORT: Call("storage.put report.json", done=True),  # one file of two
    names.KEEP: Call("storage.put lease.json"),
    names.RELEASE: Call("release service"),  # the job is stopped, the hosts are up
    names.REPORT_UNSPOKEN: Call("storage.put report.json", done=True),
}
"""The half of each activity: between two of its effects, or between an effect and its answer."""

OF_NO_RUN: Final[Mapping[str, str]] = {
    # Its schedule is left out here: it would tidy up what is to be found.
    names.SWEEP: "tests/workflows/test_reaper.py",
}
"""Activities that no run comes to, and the tests in which their worker dies."""

IN_FLIGHT: Final[Mapping[str, Call]] = {
    names.LAUNCH: Call("start host 0"),
    names.SUBMIT: Call("POST jobs"),
    names.STRIKE: Call("POST jobs"),
}
"""Mutations that are on their way when the run ends: claimed and permitted, and not sent yet."""

LONG_LIVED: Final = (names.LAUNCH, names.PROVE_HOSTS, names.WATCH, names.KEEP, names.RELEASE)
"""Activities that beat more than once in a light run."""

RUN_GAPS: Final = 20
CUSTODY_GAPS: Final = 6
"""How many workflow tasks of each are followed by a gap that is tried. A light run with a drill has a few more."""


@dataclass(frozen=True)
class Registered:
    """An activity that a worker takes."""

    name: str
    method: str
    module: str


@functools.cache
def registered() -> tuple[Registered, ...]:
    """What `worker/wiring.py` registers, by activity name. Raises LookupError for a method that defines no activity."""
    defined = {each.method: each for each in _defined()}
    found = [defined[method] for method in _methods_in(Path(inspect.getfile(wiring)))]
    return tuple(sorted(found, key=lambda each: each.name))


@functools.cache
def activity_points() -> tuple[Point, ...]:
    """Before, half and after each registered activity."""
    points = []
    for each in registered():
        if each.name in OF_NO_RUN:
            continue
        half = HALFWAY[each.name]
        points.append(Point("before", each.name))
        if half is not None:
            points.append(Point("half", each.name, call=half))
        points.append(Point("after", each.name))
    return tuple(points)


def gaps() -> list[Point]:
    """Between workflow task k and the next one, of the run and of its custody."""
    return [Point("gap", "GuardedTrain", k) for k in range(1, RUN_GAPS + 1)] + [
        Point("gap", "Custody", k) for k in range(1, CUSTODY_GAPS + 1)
    ]


def _defined() -> Iterator[Registered]:
    for module in pkgutil.walk_packages(activities.__path__, "activities."):
        for _, owner in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            for method, function in inspect.getmembers(owner, inspect.isfunction):
                definition = getattr(function, "__temporal_activity_definition", None)
                if definition is not None:
                    yield Registered(definition.name, method, owner.__module__)


def _methods_in(source: Path) -> list[str]:
    """The method names in each `Worker(..., activities=[...])`."""
    found = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Worker":
            for keyword in node.keywords:
                if keyword.arg == "activities" and isinstance(keyword.value, ast.List):
                    found += [each.attr for each in keyword.value.elts if isinstance(each, ast.Attribute)]
    return found
