"""GuardedTrain on a real server: its deadlines, what may be said to it, and what it says."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import WorkflowHandle, WorkflowUpdateFailedError
from temporalio.common import RawValue, SearchAttributeKey
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from tests.workflows.conftest import Keep
from tests.workflows.server import Temporal
from tests.workflows.stand_ins import (
    DRILLED,
    FULL,
    LONGEST_CUSTODY,
    LONGEST_RUN,
    PLAIN,
    Behaviour,
    Hold,
    Usual,
    World,
    a_release,
    custodys_word,
    encoded,
    ending_of,
    events_of,
    fails,
    soon,
    until,
)
from worker.setup import SEARCH_ATTRIBUTES
from workflows import activity_names as names
from workflows import timeouts
from workflows.evidence import Identity, Verdict
from workflows.timeouts import RUN_QUEUE

pytestmark = pytest.mark.asyncio(loop_scope="session")

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
        # While the report is written there is a verdict already, and it is what counts.
        assert page.startswith("### succeeded\n" if name == names.REPORT else f"### {phase}\n")
        assert f"| committed step | {seen} of 32 |" in page
        gate.through()
    assert (await ending_of(run)).status == "completed"
    verdict = await run.query("verdict", result_type=Verdict)
    assert (verdict.outcome, verdict.cleanup) == ("succeeded", "clean")
    assert (await run.query("progress"))["step"] == 32
    assert (await run.query("claims"))["owned"] == []
    page = await page_of(run)
    assert page.startswith("### succeeded\n\ntrained, exported and verified\n\n| | |")
    assert "| cleanup | clean |" in page
    assert "deadline" not in page
    assert "| drill | rank 1 killed after commit 8 at " in page
    await custodys_word(world)


async def test_the_page_of_a_stopped_run_has_the_line_to_go_on_with_ready_to_copy(world: World) -> None:
    """The UI makes typographic quotes of plain ones everywhere but in code, and those are no JSON."""
    hold = world.script[names.WATCH] = Hold(lambda order: order.seen is not None)
    run = await world.start(PLAIN)
    await soon(hold.reached.wait())
    assert "(`extend` moves it)" in await page_of(run)
    await run.signal("abort", "enough for today")
    verdict = (await ending_of(run)).verdict
    assert verdict
    page = await page_of(run)
    head, code, _ = page.split("```")
    assert head.startswith("### aborted\n\naborted as asked: enough for today (the last commit is step ")
    assert '"' not in head
    assert json.loads("{" + code + "}") == {"resume": {"from": verdict.storage}}
    assert code.strip() in verdict.message
    assert "(`extend` moves it)" not in page
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
