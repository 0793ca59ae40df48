"""The lease counts on the reader's own clock, and what cannot be read neither renews nor ends it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from trainer.lease import UNREADABLE, Lease, LeaseError, LeaseWatch, Observation, Tombstone, boot_clock, parse_lease


def lease(sequence: int, duration_s: float = 100.0) -> bytes:
    return json.dumps({"schema": 1, "sequence": sequence, "duration_s": duration_s}).encode()


class Place:
    """Storage and clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.lease: object = None
        self.tombstone: Tombstone = "absent"
        self.read_takes = 0.0

    def read(self) -> Observation:
        self.now += self.read_takes
        if isinstance(self.lease, Exception):
            raise self.lease
        return Observation(self.lease, self.tombstone)  # type: ignore[arg-type]

    def watch(self) -> LeaseWatch:
        return LeaseWatch(lambda: self.now, self.read)


@pytest.fixture
def place() -> Place:
    return Place()


def test_nothing_starts_before_a_lease_was_seen(place: Place) -> None:
    watch = place.watch()
    assert watch.standing().state == "waiting"
    assert watch.look().state == "waiting"
    assert not watch.standing().may_start


def test_a_lease_lives_for_its_duration_from_first_sight(place: Place) -> None:
    watch = place.watch()
    place.lease = lease(1)
    assert watch.look().state == "live"
    assert watch.standing().may_start
    place.now += 99.9
    assert watch.standing().state == "live"
    place.now += 0.2
    assert watch.standing().state == "expired"


def test_the_same_sequence_seen_again_renews_nothing(place: Place) -> None:
    watch = place.watch()
    place.lease = lease(7)
    watch.look()
    place.now += 60
    watch.look()
    place.now += 41
    assert watch.look().state == "expired"


def test_a_lower_sequence_is_a_stale_read(place: Place) -> None:
    watch = place.watch()
    place.lease = lease(7)
    watch.look()
    place.lease = lease(6, 10_000)
    watch.look()
    place.now += 101
    assert watch.look().state == "expired"


def test_each_new_sequence_counts_from_its_own_first_sight(place: Place) -> None:
    watch = place.watch()
    for sequence in range(1, 6):
        place.lease = lease(sequence)
        assert watch.look().state == "live"
        place.now += 90
    assert watch.standing().sequence == 5
    place.now += 11
    assert watch.standing().state == "expired"


def test_a_renewal_can_shorten_the_lease(place: Place) -> None:
    watch = place.watch()
    place.lease = lease(1, 1000)
    watch.look()
    place.lease = lease(2, 5)
    watch.look()
    place.now += 6
    assert watch.standing().state == "expired"


def test_a_renewal_after_expiry_makes_it_live_again(place: Place) -> None:
    watch = place.watch()
    place.lease = lease(1)
    watch.look()
    place.now += 200
    place.lease = lease(2)
    assert watch.look().state == "live"


def test_an_outage_shorter_than_the_lease_stops_nothing_and_a_longer_one_does(place: Place) -> None:
    watch = place.watch()
    place.lease = lease(1)
    watch.look()
    place.lease, place.tombstone = UNREADABLE, "unreadable"
    for _ in range(9):
        place.now += 10
        assert watch.look().state == "live"
        assert not watch.standing().may_start
    place.now += 11
    assert watch.look().state == "expired"


def test_a_reader_that_raises_is_an_outage(place: Place) -> None:
    watch = place.watch()
    place.lease = lease(1)
    watch.look()
    place.lease = OSError("no route to host")
    standing = watch.look()
    assert standing.state == "live"
    assert "no route to host" in standing.detail


def test_a_slow_read_shortens_the_lease_and_never_lengthens_it(place: Place) -> None:
    watch = place.watch()
    place.lease, place.read_takes = lease(1), 30.0
    assert watch.look().remaining_s == pytest.approx(70)


def test_a_lease_object_that_vanishes_goes_on_counting(place: Place) -> None:
    watch = place.watch()
    place.lease = lease(1)
    watch.look()
    place.lease = None
    assert watch.look().state == "live"
    place.now += 101
    assert watch.standing().state == "expired"


def test_a_tombstone_ends_a_live_lease_at_once_and_for_good(place: Place) -> None:
    watch = place.watch()
    place.lease, place.tombstone = lease(1), "present"
    assert watch.look().state == "tombstoned"
    place.lease, place.tombstone = lease(2), "absent"
    assert watch.look().state == "tombstoned"
    assert not watch.standing().may_start


def test_nothing_starts_where_the_tombstone_is_unknown(place: Place) -> None:
    watch = place.watch()
    place.lease, place.tombstone = lease(1), "unreadable"
    assert watch.look().state == "live"
    assert not watch.standing().may_start


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"schema":2,"sequence":1,"duration_s":60}',
        b'{"schema":1,"duration_s":60}',
        b'{"schema":1,"sequence":true,"duration_s":60}',
        b'{"schema":1,"sequence":1.5,"duration_s":60}',
        b'{"schema":1,"sequence":-1,"duration_s":60}',
        b'{"schema":1,"sequence":1,"duration_s":"60"}',
        b'{"schema":1,"sequence":1,"duration_s":NaN}',
        b'{"schema":1,"sequence":1,"duration_s":Infinity}',
        b'{"schema":1,"sequence":1,"duration_s":0}',
        b'{"schema":1,"sequence":1,"duration_s":86401}',
    ],
)
def test_what_is_no_lease_renews_nothing(place: Place, raw: bytes) -> None:
    with pytest.raises(LeaseError):
        parse_lease(raw)
    watch = place.watch()
    place.lease = lease(1)
    watch.look()
    place.lease = raw
    place.now += 50
    assert watch.look().remaining_s == pytest.approx(50)


def test_a_lease_is_read_as_written() -> None:
    assert parse_lease(lease(3, 120)) == Lease(3, 120.0)


def test_the_boot_clock_goes_forward_and_ignores_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    before = boot_clock()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= boot_clock() - before < 5


def test_the_decision_needs_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import trainer.lease, trainer.constants, trainer.machine, trainer.job; "
        "heavy = {'ray', 'torch', 'pyarrow', 'numpy', 'rerun'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
