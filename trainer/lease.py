"""The lease, as whoever depends on it reads it: live, expired, or over for good.

A lease is ``{"schema":1,"sequence":int,"duration_s":float}`` in the run's storage. A sequence higher than any seen
means: live for ``duration_s`` seconds, counted from the moment this reader first saw it, on its own clock. No wall
clocks are compared, so neither a wrong one nor a step of it matters. A tombstone beside it ends everything at once.

Unknown is not absent: what cannot be read neither renews nor ends anything, and starting needs both facts known.
Only the standard library is used, so the hosting service can run this outside the application environment.
"""

from __future__ import annotations

import enum
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

LONGEST_LEASE_S: Final = 24 * 3600.0
"""No lease counts for longer, whatever it says (the bounds of run.json end there too)."""


class Unreadable(enum.Enum):
    """Storage did not answer, or what it answered is no lease."""

    UNREADABLE = "unreadable"


UNREADABLE: Final = Unreadable.UNREADABLE

Tombstone = Literal["present", "absent", "unreadable"]
State = Literal["waiting", "live", "expired", "tombstoned"]


@dataclass(frozen=True)
class Observation:
    """One look at storage: the lease object's bytes (None where there is none) and whether a tombstone stands."""

    lease: bytes | Unreadable | None
    tombstone: Tombstone


@dataclass(frozen=True)
class Standing:
    """What follows from everything seen so far.

    ``waiting``: no lease seen yet. ``live``: ``remaining_s`` seconds are left. ``expired``: the last lease ran out.
    ``tombstoned``: release has begun; this never changes again.
    """

    state: State
    sequence: int | None
    remaining_s: float
    detail: str
    may_start: bool
    """Live, and the latest look found no tombstone: the only state in which something new may begin."""


class LeaseError(ValueError):
    """The bytes are no lease; the message says what is wrong with them."""


@dataclass(frozen=True)
class Lease:
    """A renewal: its number and how many seconds it is good for."""

    sequence: int
    duration_s: float


def boot_clock() -> float:
    """Seconds since boot, suspended time included (CLOCK_BOOTTIME). Setting the wall clock does not move it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def parse_lease(raw: bytes) -> Lease:
    """The lease in ``raw``. Raises LeaseError for anything else, as a half-written or foreign object is."""
    try:
        document = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise LeaseError(f"not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != 1:
        raise LeaseError("not an object of schema 1")
    sequence, duration = document.get("sequence"), document.get("duration_s")
    if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 0:
        raise LeaseError("sequence is not a whole number")
    if isinstance(duration, bool) or not isinstance(duration, (int, float)):
        raise LeaseError("duration_s is not a number")
    if not math.isfinite(duration) or not 0 < duration <= LONGEST_LEASE_S:
        raise LeaseError(f"duration_s is not within 0..{LONGEST_LEASE_S:.0f}")
    return Lease(sequence, float(duration))


class LeaseWatch:
    """Decides from a clock and a reader whether the lease is live.

    ``look()`` reads storage and may block for as long as the reader does; ``standing()`` never blocks, so a process
    can look from one thread and decide from another. Both are safe to call from any thread.
    """

    def __init__(self, clock: Callable[[], float], read: Callable[[], Observation]) -> None:
        """``clock`` returns seconds that only go forward (`boot_clock`); ``read`` should not raise, and what it raises
        counts as unreadable."""
        self._clock = clock
        self._read = read
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._ends: float = -math.inf
        self._tombstoned = False
        self._latest_tombstone: Tombstone = "unreadable"
        self._note = "not looked yet"

    def look(self) -> Standing:
        """Read storage once and return what follows."""
        # The count begins before the read: a slow answer shortens the lease and never lengthens it.
        asked = self._clock()
        try:
            seen = self._read()
        except Exception as error:
            seen = Observation(UNREADABLE, "unreadable")
            note = f"storage cannot be read: {' '.join(str(error).split())[:200]}"
        else:
            note = ""
        with self._lock:
            self._take(seen, asked, note)
        return self.standing()

    def standing(self) -> Standing:
        """What follows from the looks so far, at this moment of the clock."""
        now = self._clock()
        with self._lock:
            remaining = self._ends - now
            sequence = None if self._lease is None else self._lease.sequence
            if self._tombstoned:
                return Standing("tombstoned", sequence, 0.0, "a tombstone stands: release of the run has begun", False)
            if self._lease is None:
                return Standing("waiting", None, 0.0, self._note, False)
            if remaining <= 0:
                detail = f"lease {sequence} of {self._lease.duration_s:g} s ran out {-remaining:.1f} s ago" + (
                    f"; {self._note}" if self._note else ""
                )
                return Standing("expired", sequence, 0.0, detail, False)
            may_start = self._latest_tombstone == "absent"
            return Standing("live", sequence, remaining, self._note, may_start)

    def _take(self, seen: Observation, asked: float, note: str) -> None:
        self._latest_tombstone = seen.tombstone
        if seen.tombstone == "present":
            self._tombstoned = True
        if isinstance(seen.lease, Unreadable):
            self._note = note or "the lease cannot be read"
            return
        if seen.lease is None:
            self._note = "there is no lease object"
            return
        try:
            lease = parse_lease(seen.lease)
        except LeaseError as error:
            self._note = f"the lease object is {error}"
            return
        self._note = "" if seen.tombstone != "unreadable" else "the tombstone's place cannot be read"
        # A lower number is a stale read, an equal one the renewal already counted.
        if self._lease is None or lease.sequence > self._lease.sequence:
            self._lease = lease
            self._ends = asked + lease.duration_s
