"""A list of named checks in which no failure, expected or not, keeps the next one from running."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from trainer.inspection.storage import Unanswered, Unreadable

Value = TypeVar("Value")

MOST_PROBLEMS = 20


class Failed(Exception):
    """A check does not hold. ``problems`` are sentences that each name the thing that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        shown = "; ".join(self.problems[:MOST_PROBLEMS])
        if len(self.problems) > MOST_PROBLEMS:
            shown += f"; and {len(self.problems) - MOST_PROBLEMS} more"
        super().__init__(shown)


class NotApplicable(Exception):
    """A check has no object in this run; the message says why."""


class Blocked(Exception):
    """A check could not be run because of what an earlier one found; the message says what."""


@dataclass(frozen=True)
class Check:
    """One check's outcome. ``detail`` says what was seen, or everything that is wrong."""

    name: str
    ok: bool
    detail: str


@dataclass
class Checklist:
    """Outcomes in the order they were reached, and the figures found on the way."""

    checks: list[Check] = field(default_factory=list)
    not_applicable: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    unanswered: list[str] = field(default_factory=list)
    """What storage did not answer: with any of it, a failure proves nothing."""

    @property
    def ok(self) -> bool:
        """Whether there was a check and every one of them holds."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Run one check, which returns what it saw or raises."""
        try:
            self.checks.append(Check(name, True, check()))
        except NotApplicable as reason:
            self.not_applicable.append(Check(name, True, str(reason)))
        except Blocked as reason:
            self.checks.append(Check(name, False, f"not run: {reason}"))
        except Unanswered as silence:
            self.unanswered.append(str(silence))
            self.checks.append(Check(name, False, f"not run: {silence}"))
        except (Failed, Unreadable) as problem:
            self.checks.append(Check(name, False, str(problem)))
        except Exception as error:  # what is inspected is untrusted: no shape of it may end the inspection
            reason_text = " ".join(str(error).split())[:300]
            self.checks.append(Check(name, False, f"cannot be checked: {type(error).__name__}: {reason_text}"))


def require(problems: Sequence[str]) -> None:
    """Raise Failed if there is any problem."""
    if problems:
        raise Failed(problems)


def compare(what: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """A problem for each key of ``expected`` whose value in ``found`` is another."""
    return [
        f"{what}: {key} is {found.get(key)!r}, not {value!r}"
        for key, value in expected.items()
        if found.get(key) != value
    ]


def fields(what: str, expected: Collection[str], found: Mapping[str, Any]) -> list[str]:
    """A problem for each field that ``found`` has beyond ``expected``, or lacks: what nobody reads, nobody checks."""
    problems = [f"{what}: {name!r} is no field of it" for name in sorted(map(str, found.keys() - set(expected)))]
    return problems + [f"{what}: {name} is missing" for name in expected if name not in found]


class Once:
    """A value that several checks need: made at first use, and its failure told in full by one check only."""

    def __init__(self, what: str, make: Callable[[], Any]) -> None:
        self._what = what
        self._make = make
        self._made: tuple[Any] | None = None
        self._why: Exception | None = None

    def own(self) -> Any:
        """The value, for the check whose own object it is. Raises what making it raised."""
        if self._made is None and self._why is None:
            try:
                self._made = (self._make(),)
            except Exception as error:
                self._why = error
        if self._made is None:
            raise self._why or Blocked(self._what)
        return self._made[0]

    def get(self) -> Any:
        """The value, for any other check. Raises Blocked."""
        try:
            return self.own()
        except (Blocked, Unanswered):
            raise
        except Exception as error:
            raise Blocked(f"{self._what} cannot be used ({error})") from None
