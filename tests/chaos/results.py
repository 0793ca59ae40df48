"""The table of results: `bench/chaos.json` for programs, `bench/chaos.html` for people. Written after each scenario."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import jinja2

from worker.settings import CHECKOUT

RESULTS: Final = CHECKOUT / "bench" / "chaos.json"
TEMPLATE: Final = Path(__file__).with_name("results.html.j2")

Stored = dict[str, Any]


class Results:
    """Rows by scenario and seed. Several shards may add to one file at once."""

    def __init__(self, path: Path = RESULTS) -> None:
        self._path = path

    def rows(self) -> dict[tuple[str, int], Stored]:
        """What is recorded. Raises ValueError for a file that is none of ours."""
        try:
            told = json.loads(self._path.read_bytes())
            return {(row["id"], row["seed"]): row for row in told["rows"]}
        except FileNotFoundError:
            return {}
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{self._path} holds no results of the crash machine: {error}") from error

    def add(self, rows: Iterable[Stored]) -> dict[str, Any]:
        """Record these over what is there, and write both files; returns the summary."""
        with self._alone():
            kept = self.rows()
            kept |= {(row["id"], row["seed"]): row for row in rows}
            ordered = [kept[key] for key in sorted(kept)]
            told = {**summary(ordered), "rows": ordered}
            _replace(self._path, json.dumps(told, indent=1) + "\n")
            _replace(self._path.with_suffix(".html"), page(told))
        return told

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        # The lock file stays: removing it would let two in.


def good(row: Mapping[str, Any]) -> bool:
    """Whether nothing is wrong with a scenario."""
    return not (row["leaks"] or row["wrong"] or row["trouble"])


def summary(rows: list[Stored]) -> dict[str, Any]:
    """The figures that the bars are about, and how long things took."""
    released = sorted(row["released_s"] for row in rows if row["released_s"] is not None and row["released_s"] >= 0)
    return {
        "scenarios": len({row["id"] for row in rows}),
        "leaks": sum(bool(row["leaks"]) for row in rows),
        "wrong_verdicts": sum(bool(row["wrong"]) for row in rows),
        "not_carried_out": sum(bool(row["trouble"]) for row in rows),
        "slices": dict(Counter(row["slice"] for row in rows)),
        "victims": dict(Counter(row["victim"] for row in rows)),
        "endings": dict(Counter(row["ending"] for row in rows)),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "released_median_s": median(released) if released else None,
        "released_worst_s": released[-1] if released else None,
    }


def page(told: Mapping[str, Any]) -> str:
    """A page that opens from disk with no network."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    rows = sorted(told["rows"], key=lambda row: (good(row), row["id"]))
    return environment.from_string(TEMPLATE.read_text()).render(told=told, rows=rows, good=good)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
