"""GuardedTrain on a real server: its story, its failures, its deadlines, and what it says on the way."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import WorkflowHandle, WorkflowUpdateFailedError
from temporalio.common import RawValue, SearchAttributeKey
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.service import RPCError

import workflows.guarded_train
from tests.workflows.conftest import Keep
from tests.workflows.server import Temporal
from tests.workflows.stand_ins import (
    DRILLED,
    FULL,
    PLAIN,
    Behaviour,
    Hold,
    Usual,
    World,
    a_proof,
    a_release,
    answers,
    custodys_word,
    ending_of,
    fails,
    loses_the_first_answer,
    soon,
    until,
    watched,
)
from worker.setup import SEARCH_ATTRIBUTES
from workflows import activity_names as names
from workflows import timeouts
from workflows.evidence import Artifacts, Check, Identity, Verdict
from workflows.orders import PARITY
from workflows.timeouts import RUN_QUEUE

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONGEST_RUN, LONGEST_CUSTODY = 250, 150
"""Events that a history may have, however long the run trains (design: History and cost)."""


async def events_of(handle: WorkflowHandle[Any, Any]) -> list[HistoryEvent]:
    return list((await handle.fetch_history()).events)


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


def encoded(data: bytes, **metadata: bytes) -> RawValue:
    return RawValue(Payload(metadata=metadata, data=data))


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


# Deadlines -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Late:
    """A run with something that never ends, and limits as short as they may be."""

    activity: str
    limits: dict[str, str]
    claims: int
    words: str


LATE = {
    "launch": Late(names.LAUNCH, {"provision": "10s"}, 1, "provision took longer than 0.166667 minutes"),
    "prove hosts": Late(names.PROVE_HOSTS, {"provision": "10s"}, 1, "provision took longer than 0.166667 minutes"),
    "run limit in preflight": Late(names.PREFLIGHT, {"run": "30s", "stall": "30s"}, 0, "limit of 0.5 minutes"),
    "run limit in train": Late(names.WATCH, {"run": "30s", "stall": "30s"}, 2, "limit of 0.5 minutes"),
    "run limit in prove": Late(names.PROVE, {"run": "30s", "stall": "30s"}, 2, "limit of 0.5 minutes"),
    "extended": Late(names.WATCH, {"run": "30s", "stall": "30s"}, 2, "aborted as asked"),
    "teardown": Late(names.RELEASE, {"teardown": "30s"}, 2, ""),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session", autouse=True)
async def late(temporal: Temporal) -> dict[str, tuple[World, WorkflowHandle[Any, Any], Hold]]:
    """These runs wait in earnest, from the module's start, and are looked at when its other tests are done: a server
    that skips time skips none while an activity runs or a child is open."""
    begun = {}
    for name, told in LATE.items():
        world = temporal.stand_ins.world(f"late-{name}".replace(" ", "-"))
        hold = world.script[told.activity] = Hold(after=told.activity == names.LAUNCH)
        begun[name] = (world, await world.start({**PLAIN, "limits": told.limits}), hold)
        await soon(hold.reached.wait())
    _, run, _ = begun["extended"]
    await run.execute_update("extend", 600)
    return begun


async def test_an_activity_that_gives_no_answer_in_its_time_fails_the_run_with_its_last_words(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "PREFLIGHT", timedelta(seconds=2))
    world.script[names.PREFLIGHT] = fails("the endpoint does not answer", again_in=timedelta(milliseconds=500))
    ending = await ending_of(await world.start(PLAIN))
    assert ending.kind == "failed"
    assert "the endpoint does not answer" in ending.message
    await custodys_word(world)


# What the outside may say --------------------------------------------------------------------------------------------


async def held_in_training(world: World, spec: dict[str, Any] = PLAIN) -> tuple[WorkflowHandle[Any, Any], Hold]:
    hold = Hold()
    world.script[names.WATCH] = hold
    run = await world.start(spec)
    await soon(hold.reached.wait())
    return run, hold


async def test_an_extension_moves_the_deadline_of_the_run_and_of_custody(world: World, keep_history: Keep) -> None:
    run, hold = await held_in_training(world)
    before, custodys = (await run.query("progress"))["deadline"], (await world.custody.query("state"))["deadline"]
    for minutes in [*range(1, 20), 0.5 + 19.5]:
        answer = await run.execute_update("extend", minutes)
        assert answer.endswith("UTC")
    assert (await run.query("progress"))["deadline"] == pytest.approx(before + 210 * 60)
    assert (await world.custody.query("state"))["deadline"] == pytest.approx(custodys + 210 * 60)
    assert await (await world.custody.describe()).memo_value("deadline") == pytest.approx(custodys + 210 * 60)
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await run.execute_update("extend", 1)
    assert "extended 20 times already" in str(refused.value.cause)
    hold.go.set()
    assert (await ending_of(run)).status == "completed"
    await custodys_word(world)
    # Each extension has its price, and there are at most twenty.
    assert len(await events_of(run)) <= LONGEST_RUN + 20 * 10
    assert len(await events_of(world.custody)) <= LONGEST_CUSTODY + 20 * 5
    print(f"extended: {len(await events_of(run))} events, custody {len(await events_of(world.custody))}")
    await keep_history(run, "run-extended-twenty-times")
    await keep_history(world.custody, "custody-extended-twenty-times")


async def test_an_extension_before_custody_began_is_passed_on_to_it(world: World) -> None:
    hold = world.script[names.ORIENT] = Hold()
    training = world.script[names.WATCH] = Hold()
    run = await world.start({**PLAIN, "limits": {"teardown": "10m"}})
    await soon(hold.reached.wait())
    await run.execute_update("extend", 60)
    hold.go.set()
    await soon(training.reached.wait())
    deadline = (await run.query("progress"))["deadline"]
    assert (await world.custody.query("state"))["deadline"] == pytest.approx(deadline + 600)
    training.go.set()
    assert (await ending_of(run)).status == "completed"
    await custodys_word(world)


async def test_an_extension_that_makes_no_sense_is_refused_and_moves_nothing(world: World) -> None:
    run, _ = await held_in_training(world)
    before = (await run.query("progress"))["deadline"]
    wrong: list[list[Any]] = [[], [0], [0.5], [-5], [1441], ["ten"], [True], [None], [[5]], [{"minutes": 5}], [5, 5]]
    wrong += [[encoded(b"NaN", encoding=b"json/plain")], [encoded(b"x", encoding=b"other")], [float("inf")]]
    for inputs in wrong:
        with pytest.raises(WorkflowUpdateFailedError):
            await run.execute_update("extend", args=inputs)
    assert (await run.query("progress"))["deadline"] == before
    await run.signal("abort")
    assert (await ending_of(run)).status == "completed"
    with pytest.raises(RPCError):
        await run.execute_update("extend", 5)
    await custodys_word(world)


async def test_a_run_that_is_ending_is_not_extended(world: World) -> None:
    slow = world.script[names.RELEASE] = Hold()
    run = await world.start(PLAIN)
    await soon(slow.reached.wait())
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await run.execute_update("extend", 5)
    assert "this run is ending" in str(refused.value.cause)
    slow.go.set()
    assert (await ending_of(run)).status == "completed"
    await custodys_word(world)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([], "aborted as asked"),
        (["enough"], "aborted as asked: enough"),
        ([7], "aborted as asked: 7"),
        ([{"why": "enough"}], "aborted as asked: {'why': 'enough'}"),
        ([None], "aborted as asked"),
        (["enough", "really"], "aborted as asked: enough"),
        ([RawValue(Payload(metadata={"encoding": b"other"}, data=b"x"))], "aborted as asked"),
    ],
    ids=str,
)
async def test_an_abort_takes_any_reason_or_none(world: World, inputs: list[Any], said: str) -> None:
    run, _ = await held_in_training(world)
    await run.signal("abort", args=inputs)
    ending = await ending_of(run)
    assert ending.verdict
    assert (ending.status, ending.verdict.outcome) == ("completed", "aborted")
    assert ending.verdict.message.startswith(said)
    await custodys_word(world)


async def test_signals_and_updates_that_make_no_sense_change_nothing(world: World) -> None:
    run, hold = await held_in_training(world)
    stranger = Identity(
        workflow_id="other",
        run_id="other",
        original_run_id="other",
        run_key="other-0123456789",
        custody_id="custody-other-0123456789",
        deployment="test",
        storage="s3://lanyard/runs/other-0123456789",
    )
    nonsense: list[list[Any]] = [[], ["clean"], [{}], [{"run_key": world.key}], [None], [1, 2], [a_release(stranger)]]
    for inputs in [*nonsense, [encoded(b"x", encoding=b"other")]]:
        await run.signal("released", args=inputs)
    await run.signal("no-such-signal", args=[1, 2])
    with pytest.raises(WorkflowUpdateFailedError):
        await run.execute_update("no-such-update")
    assert (await run.query("progress"))["phase"] == "train"
    hold.go.set()
    ending = await ending_of(run)
    assert ending.verdict
    assert (ending.verdict.outcome, ending.verdict.cleanup) == ("succeeded", "clean")
    await custodys_word(world)
    kinds = {event.event_type for event in await events_of(run)}
    assert EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED not in kinds


# What it says --------------------------------------------------------------------------------------------------------


class Turnstile:
    """Lets the activities of a run through one at a time."""

    def __init__(self) -> None:
        self.there: asyncio.Queue[str] = asyncio.Queue()
        self._open = asyncio.Semaphore(0)

    def through(self) -> None:
        self._open.release()

    def at(self, name: str) -> Behaviour:
        async def behave(order: Any, usual: Usual) -> Any:
            self.there.put_nowait(name)
            await self._open.acquire()
            return await usual()

        return behave


async def test_the_queries_and_the_page_say_in_every_phase_and_after_the_close_what_is_going_on(world: World) -> None:
    gate = Turnstile()
    story = [
        (names.ORIENT, "starting", 0),
        (names.PREFLIGHT, "preflight", 0),
        (names.LAUNCH, "provision", 0),
        (names.PROVE_HOSTS, "serve", 1),
        (names.SUBMIT, "submit", 1),
        *[(names.WATCH, "train", 2)] * 2,
        (names.CHOOSE, "drill", 2),
        (names.STRIKE, "drill", 2),
        (names.WATCH, "recover", 2),
        *[(names.WATCH, "train", 2)] * 5,
        (names.SUBMIT, "parity", 2),
        *[(names.WATCH, "parity", 3)] * 8,
        (names.PROVE, "prove", 3),
        (names.SAVE_RECORDS, "save records", 3),
        (names.RELEASE, "release", 3),
        (names.VERIFY, "verify", 0),
        (names.REPORT, "report", 0),
    ]
    world.script.update({name: gate.at(name) for name, _, _ in story})
    run = await world.start(FULL)
    seen = 0
    for name, phase, owned in story:
        assert await soon(gate.there.get()) == name
        told, claims = await run.query("progress"), await run.query("claims")
        assert told["phase"] == phase
        assert (told["steps"], told["run_key"]) == (32, world.key)
        assert told["step"] >= seen
        seen = told["step"]
        assert len(claims["owned"]) == owned
        assert await run.query("verdict") is None or name == names.REPORT
        page = await page_of(run)
        assert f"### {phase}" in page
        assert f"| committed step | {seen} of 32 |" in page
        gate.through()
    assert (await ending_of(run)).status == "completed"
    verdict = await run.query("verdict", result_type=Verdict)
    assert (verdict.outcome, verdict.cleanup) == ("succeeded", "clean")
    assert (await run.query("progress"))["step"] == 32
    assert (await run.query("claims"))["owned"] == []
    page = await page_of(run)
    assert "succeeded: trained, exported and verified" in page
    assert "| drill | rank 1 killed after commit 8 at " in page
    await custodys_word(world)


async def page_of(handle: WorkflowHandle[Any, Any]) -> str:
    """The current details, as the UI asks for them."""
    told: WorkflowMetadata = await handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    return told.current_details


async def test_every_activity_timer_and_child_has_a_summary_for_the_runs_page(world: World) -> None:
    run = await world.start(FULL)
    assert (await ending_of(run)).status == "completed"
    await custodys_word(world)
    shown = (
        EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED,
        EventType.EVENT_TYPE_TIMER_STARTED,
        EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED,
    )
    for handle in (run, world.custody):
        events = [event for event in await events_of(handle) if event.event_type in shown]
        assert len(events) >= 3
        for event in events:
            assert event.user_metadata.HasField("summary"), event
            assert len(event.user_metadata.summary.data) > len('""')


async def test_search_attributes_that_the_deployment_knows_tell_the_list_view(world: World) -> None:
    world.search_attributes = SEARCH_ATTRIBUTES
    run, hold = await held_in_training(world, DRILLED)
    found = (await run.describe()).typed_search_attributes
    assert found.get(SearchAttributeKey.for_keyword("LanyardPhase")) == "train"
    hold.go.set()
    assert (await ending_of(run)).status == "completed"
    found = (await run.describe()).typed_search_attributes
    shown = {name: found.get(SearchAttributeKey.for_keyword(name)) for name in SEARCH_ATTRIBUTES}
    assert shown == {
        "LanyardPhase": "report",
        "LanyardRunKey": world.key,
        "LanyardStep": "32/32",
        "LanyardOutcome": "succeeded",
        "LanyardCleanup": "clean",
        "LanyardProvider": "local",
    }
    await custodys_word(world)
    assert len(await events_of(run)) <= LONGEST_RUN
    assert len(await events_of(world.custody)) <= LONGEST_CUSTODY
    held = (await world.custody.describe()).typed_search_attributes
    assert held.get(SearchAttributeKey.for_keyword("LanyardCleanup")) == "clean"


async def test_where_search_attributes_are_not_known_the_run_goes_on_without_them(world: World) -> None:
    world.search_attributes = ("LanyardPhase",)
    run = await world.start(PLAIN)
    assert (await ending_of(run)).status == "completed"
    found = (await run.describe()).typed_search_attributes
    assert found.get(SearchAttributeKey.for_keyword("LanyardPhase")) == "report"
    assert found.get(SearchAttributeKey.for_keyword("LanyardStep")) is None
    await custodys_word(world)


async def test_the_same_workflow_id_twice_is_refused_while_the_first_runs_and_shares_nothing_after(
    world: World,
) -> None:
    run, _ = await held_in_training(world)
    with pytest.raises(WorkflowAlreadyStartedError):
        await world.client.start_workflow("GuardedTrain", PLAIN, id=world.workflow_id, task_queue=RUN_QUEUE)
    await run.signal("abort")
    await ending_of(run)
    await custodys_word(world)
    first, touched = world.key, list(world.touched)
    world.script.clear()
    second = await world.start(PLAIN)
    assert (await ending_of(second)).status == "completed"
    await custodys_word(world)
    assert world.key != first
    assert set(world.touched[len(touched) :]).isdisjoint(touched)


# Deadlines that came meanwhile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in LATE if name not in ("extended", "teardown")])
async def test_what_takes_too_long_fails_at_its_limit_and_is_released(
    late: dict[str, tuple[World, WorkflowHandle[Any, Any], Hold]], name: str, keep_history: Keep
) -> None:
    (world, run, hold), told = late[name], LATE[name]
    ending = await ending_of(run)
    assert (ending.status, ending.kind) == ("failed", "failed")
    assert told.words in ending.message
    record = await custodys_word(world)
    assert len(record.claims) == told.claims
    assert world.released == world.touched[::-1]
    await soon(hold.cancelled.wait())
    if name in ("launch", "run limit in train"):
        await keep_history(run, f"run-too-late-{name.replace(' ', '-')}")


async def test_an_extended_run_outlives_its_first_deadline(
    late: dict[str, tuple[World, WorkflowHandle[Any, Any], Hold]],
) -> None:
    world, run, hold = late["extended"]

    async def fired() -> bool:
        return any(e.event_type == EventType.EVENT_TYPE_TIMER_FIRED for e in await events_of(run))

    await until(fired, "the first deadline passes")
    assert (await run.query("progress"))["phase"] == "train"
    assert not hold.cancelled.is_set()
    await run.signal("abort")
    ending = await ending_of(run)
    assert ending.verdict
    assert ending.verdict.outcome == "aborted"
    await custodys_word(world)


async def test_past_the_teardown_limit_the_run_closes_and_says_that_custody_goes_on(
    late: dict[str, tuple[World, WorkflowHandle[Any, Any], Hold]], keep_history: Keep
) -> None:
    world, run, hold = late["teardown"]
    ending = await ending_of(run)
    assert ending.verdict
    assert (ending.status, ending.verdict.outcome, ending.verdict.cleanup) == ("completed", "succeeded", "releasing")
    assert (await world.custody.query("state"))["state"] == "releasing"
    assert not hold.cancelled.is_set()
    assert world.exists != set()
    hold.go.set()
    assert (await custodys_word(world)).cleanup == "clean"
    await keep_history(run, "run-past-its-teardown-limit")
