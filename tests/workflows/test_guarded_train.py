"""GuardedTrain on a real server: its story, its failures, and the input it refuses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.exceptions import ApplicationError

import workflows.guarded_train
from tests.workflows.conftest import Keep
from tests.workflows.server import Temporal
from tests.workflows.stand_ins import (
    DRILLED,
    FULL,
    LONGEST_CUSTODY,
    LONGEST_RUN,
    PLAIN,
    Behaviour,
    Usual,
    World,
    a_proof,
    answers,
    custodys_word,
    encoded,
    ending_of,
    events_of,
    fails,
    loses_the_first_answer,
    watched,
)
from worker.setup import SEARCH_ATTRIBUTES
from workflows import activity_names as names
from workflows.evidence import Artifacts, Check
from workflows.orders import PARITY

pytestmark = pytest.mark.asyncio(loop_scope="session")

# The story -----------------------------------------------------------------------------------------------------------


async def test_a_run_without_a_drill_succeeds_and_leaves_nothing(world: World, keep_history: Keep) -> None:
    run = await world.start(PLAIN)
    ending = await ending_of(run)
    verdict = ending.verdict
    assert verdict
    assert (ending.status, verdict.outcome, verdict.cleanup) == ("completed", "succeeded", "clean")
    assert (verdict.run_key, verdict.run_id) == (world.key, world.first_run_id)
    assert verdict.storage == f"s3://lanyard/runs/{world.key}"
    assert (verdict.commits[-1].step, verdict.steps) == (32, 32)
    assert verdict.strike is None
    assert verdict.artifacts
    assert "recovery: no drill was asked for" in verdict.not_proved
    told = [name for name in world.story() if name != names.WATCH]
    assert told == [
        names.ORIENT,
        names.PREFLIGHT,
        names.LAUNCH,
        names.PROVE_HOSTS,
        names.SUBMIT,
        names.PROVE,
        names.SAVE_RECORDS,
        names.VERIFY,
        names.REPORT,
    ]
    record = await custodys_word(world)
    assert record.cleanup == "clean"
    assert world.touched == [f"cluster/{world.key}", f"job/{world.key}-train"]
    assert world.released == world.touched[::-1]
    assert world.orders(names.REPORT_UNSPOKEN) == []
    await keep_history(run, "run-succeeded")
    await keep_history(world.custody, "custody-of-a-run-that-succeeded")


async def test_a_run_with_drill_and_parity_kills_one_worker_after_the_commit_and_proves_recovery(
    world: World, keep_history: Keep
) -> None:
    world.search_attributes = SEARCH_ATTRIBUTES
    run = await world.start(FULL)
    ending = await ending_of(run)
    verdict = ending.verdict
    assert verdict
    assert (verdict.outcome, verdict.cleanup) == ("succeeded", "clean")
    assert verdict.victim
    assert verdict.drill
    assert (verdict.victim.commit.step, verdict.drill.resumed_step, verdict.drill.parity) == (8, 9, "equal")
    assert not any(said.startswith("recovery") for said in verdict.not_proved)
    [choice], [blow] = world.orders(names.CHOOSE), world.orders(names.STRIKE)
    assert (choice.victim, blow.victim) == (None, verdict.victim)
    main, parity = world.orders(names.SUBMIT)
    assert (main.order["drill"]["after_step"], parity.order["drill"]) == (8, None)
    assert (main.train_name, parity.train_name) == ("main", PARITY)
    [proof] = world.orders(names.PROVE)
    assert (proof.victim, proof.strike, proof.parity) == (verdict.victim, verdict.strike, True)
    assert {c.checkpoint for c in verdict.commits} == {f"checkpoint_{step:06d}" for step in range(4, 33, 4)}
    [verified] = world.orders(names.VERIFY)
    assert verified.submission_id == f"{world.key}-train"
    [saved] = world.orders(names.SAVE_RECORDS)
    assert saved.submissions == (f"{world.key}-train", f"{world.key}-parity")
    phases = [phase.name for phase in verdict.phases]
    assert phases == [
        "preflight",
        "provision",
        "serve",
        "submit",
        "train",
        "drill",
        "recover",
        "train",
        "parity",
        "prove",
        "save records",
        "release",
        "verify",
        "report",
    ]
    assert all(phase.ended is not None for phase in verdict.phases)
    record = await custodys_word(world)
    assert world.released == [f"{name}" for name in world.touched[::-1]]
    assert [c.kind for c in record.claims] == ["cluster", "job", "job", "job"]
    assert len(await events_of(run)) <= LONGEST_RUN
    assert len(await events_of(world.custody)) <= LONGEST_CUSTODY
    print(f"drill and parity: {len(await events_of(run))} events, custody {len(await events_of(world.custody))}")
    await keep_history(run, "run-with-drill-and-parity-succeeded")
    await keep_history(world.custody, "custody-of-a-run-with-drill-and-parity")


async def test_a_history_stays_small_and_is_as_long_for_a_run_ten_times_longer(
    temporal: Temporal, world: World
) -> None:
    lengths = []
    for steps in (320, 3200):
        one = temporal.stand_ins.world(f"{steps} steps".replace(" ", "-"))
        spec = {**DRILLED, "workload": {"kind": "regression", "recipe": {"steps": steps, "checkpoint_interval": 4}}}
        # A long run's watch goes through many attempts: they cost nothing.
        one.script[names.WATCH] = fails_the_first(2)
        one.search_attributes = SEARCH_ATTRIBUTES
        run = await one.start(spec)
        ending = await ending_of(run)
        assert ending.verdict
        assert ending.verdict.outcome == "succeeded"
        await custodys_word(one)
        lengths.append((decided(await events_of(run)), decided(await events_of(one.custody))))
        assert len(await events_of(run)) <= LONGEST_RUN
        assert len(await events_of(one.custody)) <= LONGEST_CUSTODY
        print(f"{steps} steps: {len(await events_of(run))} events, custody {len(await events_of(one.custody))}")
    assert lengths[0] == lengths[1]


def fails_the_first(times: int) -> Behaviour:
    """Fail this often in all, then do the usual."""
    left = iter(range(times))

    async def behave(order: Any, usual: Usual) -> Any:
        if next(left, None) is not None:
            raise ApplicationError("the worker went away")
        return await usual()

    return behave


def decided(events: list[HistoryEvent]) -> Counter[str]:
    """What a history is made of. Left out are workflow tasks and cancels, of which there is one more or less as answers
    happen to come together."""
    kinds = (EventType.Name(event.event_type).removeprefix("EVENT_TYPE_") for event in events)
    return Counter(kind for kind in kinds if "WORKFLOW_TASK" not in kind and "CANCEL" not in kind)


@pytest.mark.parametrize("activity", [names.LAUNCH, names.SUBMIT, names.STRIKE])
async def test_an_effect_whose_answer_was_lost_is_adopted_and_not_made_twice(world: World, activity: str) -> None:
    world.script[activity] = loses_the_first_answer()
    ending = await ending_of(await world.start(DRILLED))
    assert ending.verdict
    assert ending.verdict.outcome == "succeeded"
    assert len(world.orders(activity)) == 2
    assert len(world.touched) == len(set(world.touched)) == 3
    record = await custodys_word(world)
    assert [c.id for c in record.claims] == world.touched


# Failures ------------------------------------------------------------------------------------------------------------

BEFORE_RELEASE = {
    names.ORIENT: [],
    names.PREFLIGHT: [],
    names.LAUNCH: [],
    names.PROVE_HOSTS: ["cluster/{}"],
    names.SUBMIT: ["cluster/{}"],
    names.WATCH: ["cluster/{}", "job/{}-train"],
    names.CHOOSE: ["cluster/{}", "job/{}-train"],
    names.STRIKE: ["cluster/{}", "job/{}-train"],
    names.PROVE: ["cluster/{}", "job/{}-train", "job/{}-strike", "job/{}-parity"],
}


@pytest.mark.parametrize("activity", BEFORE_RELEASE)
async def test_whatever_fails_the_run_ends_failed_with_its_words_and_releases_what_it_claimed(
    world: World, activity: str
) -> None:
    world.script[activity] = fails("out of sockets; bring more")
    ending = await ending_of(await world.start(FULL))
    assert (ending.status, ending.kind) == ("failed", "failed")
    assert ending.message.startswith("failed: out of sockets; bring more")
    assert ending.verdict
    assert (ending.verdict.outcome, ending.verdict.cleanup) == ("failed", "clean")
    claims = [name.format(world.key) for name in BEFORE_RELEASE[activity]]
    if activity != names.ORIENT:
        record = await custodys_word(world)
        assert [c.id for c in record.claims] == claims
        assert world.released == claims[::-1]
    assert names.VERIFY not in world.story()
    assert (names.SAVE_RECORDS in world.story()) == (len(claims) > 1)


async def test_what_was_created_by_a_launch_that_failed_is_released(world: World, keep_history: Keep) -> None:
    async def half(order: Any, usual: Usual) -> Any:
        await usual()
        await fails("one of two hosts came up")(order, usual)

    world.script[names.LAUNCH] = half
    run = await world.start(PLAIN)
    ending = await ending_of(run)
    assert ending.message == "failed: one of two hosts came up"
    await custodys_word(world)
    assert world.released == [f"cluster/{world.key}"]
    await keep_history(run, "run-failed")


async def test_a_preflight_that_refuses_ends_the_run_rejected_with_nothing_touched(
    world: World, keep_history: Keep
) -> None:
    world.script[names.PREFLIGHT] = fails("storage.uri: this prefix already holds a run", kind="Rejected")
    run = await world.start(PLAIN)
    ending = await ending_of(run)
    assert (ending.status, ending.kind) == ("failed", "rejected")
    assert ending.message == "rejected: storage.uri: this prefix already holds a run"
    assert ending.verdict
    assert (ending.verdict.outcome, ending.verdict.cleanup) == ("rejected", "clean")
    await custodys_word(world)
    assert world.touched == []
    assert names.REPORT not in world.story()
    await keep_history(run, "run-rejected-by-preflight")


@pytest.mark.parametrize("activity", [names.SAVE_RECORDS, names.REPORT])
async def test_records_and_a_report_that_cannot_be_written_change_no_outcome(world: World, activity: str) -> None:
    world.script[activity] = fails("the storage is full")
    run = await world.start(PLAIN)
    ending = await ending_of(run)
    assert ending.verdict
    assert (ending.verdict.outcome, ending.verdict.cleanup) == ("succeeded", "clean")
    told = await run.query("progress")
    assert any("the storage is full" in event["what"] for event in told["events"])
    await custodys_word(world)


async def test_artifacts_that_cannot_be_verified_fail_the_run_and_leave_it_clean(world: World) -> None:
    world.script[names.VERIFY] = fails("the bucket is gone")
    ending = await ending_of(await world.start(PLAIN))
    assert ending.message.startswith("failed: artifacts could not be verified: the bucket is gone")
    assert ending.verdict
    assert (ending.verdict.outcome, ending.verdict.cleanup) == ("failed", "clean")
    await custodys_word(world)


async def test_artifacts_that_do_not_hold_fail_the_run_with_the_check_that_failed(world: World) -> None:
    checks = (
        Check(name="checksums", ok=True, detail=""),
        Check(name="recording", ok=False, detail="step 7 is missing"),
    )
    world.script[names.VERIFY] = answers(Artifacts(ok=False, submission_id="x", checks=checks, figures={}))
    ending = await ending_of(await world.start(PLAIN))
    assert "artifacts do not hold after teardown: recording: step 7 is missing" in ending.message
    assert "checksums" not in ending.message
    assert ending.verdict
    assert ending.verdict.artifacts
    await custodys_word(world)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("failed", "training failed (job FAILED); rank 1 raised; out of memory"),
        ("stalled", "training stalled: no new commit within limits.stall; rank 1 raised; out of memory"),
        ("lost", "the job's endpoint was lost; rank 1 raised; out of memory"),
    ],
)
async def test_a_job_that_ends_badly_fails_the_run_with_the_diagnosis_and_the_way_on(
    world: World, end: Any, words: str
) -> None:
    async def behave(order: Any, usual: Usual) -> Any:
        if order.seen is None:
            return await usual()
        return watched(end, 4, job_status="FAILED", message="rank 1 raised", diagnosis="out of memory")

    world.script[names.WATCH] = behave
    ending = await ending_of(await world.start(PLAIN))
    assert ending.message == (
        f'failed: {words} (the last commit is step 4; go on from it with "resume": '
        f'{{"from": "s3://lanyard/runs/{world.key}"}})'
    )
    assert ending.verdict
    assert ending.verdict.resume_from == f"s3://lanyard/runs/{world.key}"
    assert names.SAVE_RECORDS in world.story()
    await custodys_word(world)


async def test_a_drill_whose_recovery_is_not_proved_fails_the_run_and_says_why(world: World) -> None:
    async def behave(order: Any, usual: Usual) -> Any:
        return a_proof(order, problems=("rank 1 restored nothing", "momentum differs"))

    world.script[names.PROVE] = behave
    ending = await ending_of(await world.start(DRILLED))
    assert "the drill failed: rank 1 restored nothing; momentum differs" in ending.message
    assert ending.verdict
    assert ending.verdict.drill
    assert not ending.verdict.drill.proved
    await custodys_word(world)


async def test_a_training_that_finishes_before_the_drill_fails_the_run(world: World) -> None:
    world.script[names.WATCH] = answers(watched("finished", 32))
    ending = await ending_of(await world.start(DRILLED))
    assert "the drill was not done: training finished before a commit at step 8 was seen" in ending.message
    await custodys_word(world)


async def test_a_bug_in_the_story_ends_the_run_failed_and_releases(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(workflows.guarded_train, "milestones", broken)
    ending = await ending_of(await world.start(PLAIN))
    assert ending.message == "failed: unexpected ZeroDivisionError: a bug"
    assert ending.verdict
    assert (ending.verdict.outcome, ending.verdict.cleanup) == ("failed", "clean")
    await custodys_word(world)
    assert len(world.released) == 2


async def test_a_bug_in_the_closing_ends_the_run_failed_and_custody_releases(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **more: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(workflows.guarded_train, "RecordsOrder", broken)
    ending = await ending_of(await world.start(PLAIN))
    assert (ending.status, ending.kind) == ("failed", "ZeroDivisionError")
    assert (await custodys_word(world)).cleanup == "clean"
    assert len(world.released) == 2


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "no input was given"),
        ([PLAIN, PLAIN], "2 inputs were given"),
        ([None], "the input is null"),
        (["text"], "the input is text"),
        ([[PLAIN]], "the input is a list"),
        ([{}], "name is missing"),
        ([{**PLAIN, "hosts": {"provider": "local", "count": 1}}], "hosts.count must be more than one host"),
        ([{**PLAIN, "colour": "red"}], "colour is not a field of run.json"),
        ([{**DRILLED, "drill": {"after_step": 9}}], "drill.after_step must be a multiple of checkpoint_interval"),
        ([encoded(b"x", encoding=b"binary/encrypted")], "cannot be decoded"),
        ([encoded(b"{", encoding=b"json/plain")], "cannot be decoded"),
        ([encoded(b"{}")], "cannot be decoded"),
    ],
)
async def test_bad_input_ends_the_run_rejected_before_anything_is_asked_or_started(
    world: World, inputs: list[Any], words: str
) -> None:
    run = await world.start(*inputs)
    ending = await ending_of(run)
    assert (ending.status, ending.kind) == ("failed", "rejected")
    assert words in ending.message
    assert world.asked == []
    kinds = {event.event_type for event in await events_of(run)}
    assert EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED not in kinds
    assert EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED not in kinds
    assert await run.query("verdict") is None


async def test_a_rejected_runs_history_is_kept_for_replay(world: World, keep_history: Keep) -> None:
    run = await world.start({})
    assert (await ending_of(run)).kind == "rejected"
    await keep_history(run, "run-rejected")
