"""A drill is proved by evidence or not at all, and each way in which it is not has a name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.proof import Proving, evidence_in, placement, recovery
from tests.activities import sample_run as sample
from tests.activities.orders import IDENTITY
from tests.activities.stand_ins import Objects, environment
from workflows.evidence import Commit, ProofOrder, Strike, Victim

Told = dict[str, dict[str, Any]]

COMMITTED = sample.KILLED_AFTER
VICTIM = Victim(
    rank=1,
    node_id="n",
    address="127.0.0.3",
    attempt=1,
    pid=41101,
    start_time=991123,
    boot_id="b",
    commit=Commit(
        checkpoint=sample.checkpoint(COMMITTED, 1),
        step=COMMITTED,
        index=1,
        model_sha256=sample.sha("model", COMMITTED),
        momentum_sha256=sample.sha("momentum", COMMITTED),
    ),
)
STRIKE = Strike(outcome="killed", at=sample.BEGAN + 27.6, helper="w-strike")


def order(**changes: Any) -> ProofOrder:
    told: dict[str, Any] = {
        "identity": IDENTITY,
        "world_size": 2,
        "victim": VICTIM,
        "strike": STRIKE,
        "parity": True,
    }
    return ProofOrder(**(told | changes))


def evidence(attempts: int = 2) -> Told:
    """What two ranks left: struck after step 8, restored there, finished."""
    prefix = f"{sample.ROOT}/evidence/main/"
    objects = sample.objects(attempts=attempts)
    return {uri.removeprefix(prefix): json.loads(raw) for uri, raw in objects.items() if uri.startswith(prefix)}


def uninterrupted() -> Told:
    return evidence(attempts=1)


SECOND = "attempt-002/rank-{}.{}.json"


def test_the_proved_one() -> None:
    told = recovery(order(), evidence(), uninterrupted())
    assert told.proved
    assert told.problems == ()
    assert (told.committed_step, told.resumed_step, told.first_steps) == (8, 9, {"0": 9, "1": 9})
    assert (told.attempts, told.parity) == (2, "equal")
    assert told.model_sha256 == sample.sha("model", 8)
    assert told.momentum_sha256 == sample.sha("momentum", 8)
    assert told.seconds_to_resume == pytest.approx(34.6 - 27.6)


def test_a_later_attempt_changes_nothing_about_the_one_after_the_strike() -> None:
    told = evidence()
    later = {
        name.replace("attempt-002", "attempt-003"): {**each, "attempt": 3, "restored_step": 12, "step": 13}
        for name, each in told.items()
        if name.startswith("attempt-002") and "final" not in name
    }
    judged = recovery(order(), told | later, uninterrupted())
    assert judged.proved
    assert judged.attempts == 3


def test_parity_that_was_not_asked_for_is_not_judged() -> None:
    told = {name: each for name, each in evidence().items() if "final" not in name}
    judged = recovery(order(parity=False), told, {})
    assert (judged.proved, judged.parity) == (True, "not_asked")


def test_parity_alone_is_judged_without_a_drill() -> None:
    judged = recovery(order(victim=None, strike=None), uninterrupted(), uninterrupted())
    assert (judged.proved, judged.parity, judged.committed_step, judged.resumed_step) == (True, "equal", 0, None)


def each_rank(kind: str, **changes: Any) -> Callable[[Told], None]:
    def change(told: Told) -> None:
        for rank in range(2):
            told[SECOND.format(rank, kind)].update(changes)

    return change


def one_rank(kind: str, **changes: Any) -> Callable[[Told], None]:
    return lambda told: told[SECOND.format(1, kind)].update(changes)


def without(*names: str) -> Callable[[Told], None]:
    def drop(told: Told) -> None:
        for name in names:
            del told[name]

    return drop


def without_second_attempt(told: Told) -> None:
    for name in [each for each in told if each.startswith("attempt-002")]:
        del told[name]


def a_third_rank(told: Told) -> None:
    for kind in ("start", "first-step"):
        told[SECOND.format(2, kind)] = {**told[SECOND.format(1, kind)], "rank": 2}


@pytest.mark.parametrize(
    ("spoil", "problems"),
    [
        (
            each_rank("start", restored_step=4),
            ["rank 0 resumed from an earlier commit, step 4, not from step 8", "rank 1 resumed from an earlier commit"],
        ),
        (
            each_rank("start", restored_step=12),
            ["rank 0 resumed from a later commit, step 12, not from step 8", "rank 1 resumed from a later commit"],
        ),
        (
            each_rank("start", restored_step=0, restored_from=None),
            ["rank 0 restored nothing; it started from scratch", "rank 1 restored nothing"],
        ),
        (one_rank("start", restored_from=None), ["rank 1 restored nothing"]),
        (
            one_rank("start", momentum_sha256="x"),
            ["rank 1 went on with another momentum than the commit of step 8 holds", "ranks restored different moment"],
        ),
        (
            one_rank("start", model_sha256="x"),
            ["rank 1 went on with another model than the commit of step 8 holds", "ranks restored different model st"],
        ),
        (
            each_rank("start", momentum_sha256="of a fresh optimizer"),
            ["rank 0 went on with another momentum than", "rank 1 went on with another momentum than"],
        ),
        (one_rank("first-step", step=10), ["rank 1 went on at step 10, not at 9"]),
        (one_rank("first-step", step=8), ["rank 1 went on at step 8, not at 9"]),
        (
            each_rank("first-step", step=1),
            ["rank 0 went on at step 1, not at 9", "rank 1 went on at step 1, not at 9"],
        ),
        (without(SECOND.format(1, "first-step")), ["rank 1 made no step after the restart"]),
        (
            without(*(SECOND.format(1, kind) for kind in ("start", "first-step", "final"))),
            [
                "ranks after the restart were [0], not 0..1 once each",
                "rank 1 made no step after the restart",
                "final evidence is missing, so parity",
            ],
        ),
        (a_third_rank, ["ranks after the restart were [0, 1, 2], not 0..1 once each"]),
        (
            without_second_attempt,
            ["training did not start again after attempt 1", "final evidence is missing, so parity"],
        ),
        (each_rank("final", model_sha256="x"), ["final parameters differ from the uninterrupted run's"]),
        (each_rank("final", momentum_sha256="x"), ["final parameters differ from the uninterrupted run's"]),
        (one_rank("final", model_sha256="x"), ["final parameters differ from the uninterrupted run's"]),
        (without(SECOND.format(1, "final")), ["final evidence is missing, so parity"]),
    ],
    ids=[
        "an earlier commit",
        "a later commit",
        "nothing restored",
        "one rank restored nothing",
        "momentum differs",
        "model differs",
        "momentum lost on every rank",
        "a rank skipped a step",
        "a rank repeated a step",
        "from the start",
        "a rank made no step",
        "a rank is missing",
        "a rank too many",
        "no second attempt",
        "parity: model",
        "parity: momentum",
        "parity: one rank",
        "parity: one rank's end is missing",
    ],
)
def test_each_way_in_which_a_drill_is_not_proved_is_named(spoil: Callable[[Told], None], problems: list[str]) -> None:
    told = evidence()
    spoil(told)
    judged = recovery(order(), told, uninterrupted())
    assert not judged.proved
    assert len(judged.problems) == len(problems), judged.problems
    for said, wanted in zip(judged.problems, problems, strict=True):
        assert said.startswith(wanted)
    assert judged.parity == ("different" if any("parity" in p or "final" in p for p in problems) else "equal")


@pytest.mark.parametrize("strike", [None, STRIKE.model_copy(update={"outcome": "already_gone"})])
def test_a_victim_that_was_gone_already_shows_nothing(strike: Strike | None) -> None:
    judged = recovery(order(strike=strike), evidence(), uninterrupted())
    assert judged.problems == ("the victim was gone before it was struck; nothing was shown by a kill",)
    assert not judged.proved


def test_no_parity_run_is_not_parity() -> None:
    judged = recovery(order(), evidence(), {})
    assert judged.problems == ("final evidence is missing, so parity with the uninterrupted run cannot be judged",)
    assert judged.parity == "different"


def test_hashes_that_differ_are_not_told_as_one() -> None:
    told = evidence()
    told[SECOND.format(1, "start")]["momentum_sha256"] = "x"
    judged = recovery(order(), told, uninterrupted())
    assert (judged.momentum_sha256, judged.model_sha256) == (None, sample.sha("model", 8))


# Placement.


def test_placement_counts_the_newest_attempt_and_lists_them_all() -> None:
    starts = [each for name, each in evidence().items() if name.endswith("start.json")]
    told = placement(starts)
    assert (told.distinct_hosts, told.distinct_nodes, told.distinct_devices) == (1, 2, 1)
    assert [(each["attempt"], each["rank"]) for each in told.ranks] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    # After a host died both ranks can land on one, and training succeeds: SPREAD is soft.
    for each in starts:
        if each["attempt"] == 2:
            each.update(ray={"node_id": "one", "address": "127.0.0.2"}, device={"fingerprint": "one"})
    told = placement(starts)
    assert (told.distinct_nodes, told.distinct_devices) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "hosts", "devices", "counted"),
    [("cpu", ("a", "a"), ("x", "y"), 1), ("cpu", ("a", "b"), ("x", "x"), 2), ("cuda", ("a", "a"), ("x", "y"), 2)],
)
def test_a_cpu_is_counted_by_its_machine_and_not_by_its_ray_node(
    kind: str, hosts: tuple[str, str], devices: tuple[str, str], counted: int
) -> None:
    starts = [each for name, each in evidence().items() if name.endswith("start.json")]
    for each in starts:
        rank = each["rank"]
        each.update(host={"fingerprint": hosts[rank]}, device={"type": kind, "fingerprint": devices[rank]})
    told = placement(starts)
    assert (told.distinct_nodes, told.distinct_devices) == (2, counted)


# Reading it from storage.


def stored(main: Told, parity: Told | None = None) -> Objects:
    found = {f"{IDENTITY.storage}/evidence/main/{name}": each for name, each in main.items()}
    found |= {f"{IDENTITY.storage}/evidence/parity/{name}": each for name, each in (parity or {}).items()}
    return Objects({uri: json.dumps(each).encode() for uri, each in found.items()})


async def test_the_proof_is_read_from_storage_alone() -> None:
    told = await environment().run(Proving(stored(evidence(), uninterrupted())).prove, order())
    assert told.recovery
    assert told.recovery.proved
    assert told.placement.distinct_nodes == 2


async def test_a_run_without_a_drill_has_a_placement_only() -> None:
    plain = order(victim=None, strike=None, parity=False)
    told = await environment().run(Proving(stored(uninterrupted())).prove, plain)
    assert told.recovery is None
    assert len(told.placement.ranks) == 2


async def test_no_evidence_is_no_proof() -> None:
    with pytest.raises(ApplicationError, match="left no evidence of where its ranks ran") as caught:
        await environment().run(Proving(Objects()).prove, order())
    assert caught.value.non_retryable


@pytest.mark.parametrize("kind", ["start", "first-step", "final"])
def test_each_fact_that_is_relied_on_is_missed_by_name(kind: str) -> None:
    whole = evidence()[SECOND.format(0, kind)]
    assert evidence_in(f"rank-0.{kind}.json", json.dumps(whole).encode()) == whole
    needed = {
        "start": {"attempt", "rank", "world_size", "restored_step", "model_sha256", "momentum_sha256", "at"},
        "first-step": {"attempt", "rank", "step", "at"},
        "final": {"attempt", "rank", "step", "model_sha256", "momentum_sha256", "at"},
    }
    for fact in needed[kind]:
        spoiled = {name: value for name, value in whole.items() if name != fact}
        with pytest.raises(ValueError, match=f"^{fact} is None"):
            evidence_in(f"rank-0.{kind}.json", json.dumps(spoiled).encode())
