"""A report is one page that needs nothing else, says what it could not find, and repeats nothing as markup."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from temporalio.testing import ActivityEnvironment

from activities.report_chart import Mark, loss_chart
from activities.report_material import MAX_POINTS, Found, distil, thin
from activities.report_page import duration, recovery, render
from activities.reporting import UNSPOKEN, Reporting, report
from activities.storage import Fetched
from tests.activities import sample_run as sample
from tests.activities.sample_run import ROOT, TRAIN, MemoryStorage
from workflows.evidence import Outcome, Verdict

HOSTILE = (
    "</title></style></pre><script>alert(1)</script>",
    '" onmouseover="alert(1)" x="',
    "' onload='alert(1)",
    "<!-- <img src=https://evil.example/x>",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;script&gt;&#60;b&#62;",
    "javascript:alert(1)",
    "nul\x00, bell\x07, half a pair \ud800, right to left \u202e",
)
VOID = {"meta", "link", "br", "hr", "img", "input", "col"}


class Page(HTMLParser):
    """The structure of a page: what a browser would build from it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.shape: list[tuple[str, ...]] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.problems: list[str] = []
        self.said: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"{tag} is not closed" for tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.shape.append((tag, *(name for name, _ in attrs)))
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        self.said.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.said).split())


async def written(store: MemoryStorage, verdict: Verdict) -> tuple[dict[str, Any], str]:
    """Both files as the activity writes them."""
    await ActivityEnvironment().run(Reporting(store).write_report, verdict)
    return json.loads(store.objects[f"{ROOT}/report.json"]), store.objects[f"{ROOT}/report.html"].decode()


def found(objects: dict[str, bytes]) -> Found:
    return Found({uri.removeprefix(f"{ROOT}/"): body for uri, body in objects.items()})


def as_ended(outcome: Outcome) -> Verdict:
    return sample.succeeded() if outcome == "succeeded" else sample.ended(outcome, f"it was {outcome}")


@pytest.mark.parametrize("outcome", sample.ENDINGS)
async def test_every_ending_makes_a_well_formed_page_that_leads_with_outcome_and_cleanup(outcome: Outcome) -> None:
    told, text = await written(MemoryStorage(sample.objects()), as_ended(outcome))
    page = Page(text)
    assert page.problems == []
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert all(
        target in ids for _, name, value in page.attributes if name == "aria-labelledby" for target in value.split()
    )
    assert told["schema"] == 1
    assert told["outcome"] == outcome
    first = page.text[: page.text.index("What this run did not prove")]
    assert outcome.replace("_", " ") in first
    assert "clean" in first


@pytest.mark.parametrize("outcome", sample.ENDINGS)
async def test_a_page_needs_no_network_and_runs_no_script(outcome: Outcome) -> None:
    _, text = await written(MemoryStorage(sample.objects()), as_ended(outcome))
    page = Page(text)
    assert not {"script", "img", "iframe", "object", "embed", "base", "form"} & {shape[0] for shape in page.shape}
    assert "http:" not in text
    assert "https:" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name in ("src", "srcset", "action")]
    assert [value for _, name, value in page.attributes if name == "href"] == ["data:,"]
    assert "default-src 'none'" in text


def replaced(value: Any, by: str, key: str = "") -> Any:
    """The report with every text in it replaced, but for the few words that are the program's own."""
    if isinstance(value, dict):
        names = key in ("versions", "figures", "first_steps")
        return {(f"{k}{by}" if names else k): replaced(v, by, k) for k, v in value.items()}
    if isinstance(value, list):
        return [replaced(item, by, key) for item in value]
    if isinstance(value, str) and key not in ("outcome", "parity", "train", "cleanup"):
        return by
    return value


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_no_text_from_outside_becomes_markup(outcome: Outcome, hostile: str) -> None:
    verdict = as_ended(outcome)
    release = sample.release().model_copy(update={"cleanup": "releasing", "remaining": ("something",)})
    verdict = verdict.model_copy(update={"cleanup": "releasing", "release": release, "resumed": None})
    told = report(verdict, Found(found(sample.objects()).objects, {"evidence/main/x": "why", "exports/y": "why"}))
    told["material"]["release"] |= {"cleanup": "releasing", "remaining": ["something"]}
    harmless, harmed = (Page(render(replaced(told, by))) for by in ("harmless words", hostile))
    assert harmed.shape == harmless.shape
    assert harmed.problems == []
    render(replaced(told, hostile)).encode("utf-8", "replace")


@given(st.text(st.characters(blacklist_characters="\r"), max_size=80))
def test_a_message_is_shown_as_it_is(message: str) -> None:
    shown = Page(render(report(sample.succeeded(), Found({})) | {"message": message}))
    assert shown.problems == []
    # What HTML has no way to hold is not asked for.
    if message.isprintable():
        assert " ".join(message.split()) in shown.text


async def test_the_same_material_gives_the_same_bytes() -> None:
    files = []
    for order in (1, -1):
        objects = dict(list(sample.objects().items())[::order])
        store = MemoryStorage(objects)
        for _ in range(2):
            await written(store, sample.succeeded())
            files.append((objects[f"{ROOT}/report.json"], objects[f"{ROOT}/report.html"]))
    assert all(pair == files[0] for pair in files)


@pytest.mark.parametrize("gone", sorted(sample.objects()))
async def test_a_missing_object_is_never_a_failure(gone: str) -> None:
    objects = sample.objects()
    del objects[gone]
    _, text = await written(MemoryStorage(objects), sample.succeeded())
    assert Page(text).problems == []


DAMAGE = (b"", b"{", b"null", b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000, b"{}", b'{"steps": 7}', b"1e999")


@pytest.mark.parametrize("damage", DAMAGE, ids=[repr(d[:12]) for d in DAMAGE])
async def test_damaged_objects_are_never_a_failure(damage: bytes) -> None:
    store = MemoryStorage(dict.fromkeys(sample.objects(), damage))
    told, text = await written(store, sample.succeeded())
    assert Page(text).problems == []
    said = {item["what"] for item in told["material"]["not_available"]}
    assert f"exports/{TRAIN}/metrics.json" in said
    assert "not available" in Page(text).text


@pytest.mark.parametrize(
    "spoil",
    [
        lambda value: None,
        lambda value: "text",
        lambda value: [value],
        lambda value: float("nan"),
        lambda value: float("inf"),
        lambda value: -(10**400),
        lambda value: {"": value},
    ],
)
async def test_fields_of_another_kind_are_never_a_failure(spoil: Callable[[Any], Any]) -> None:
    def spoiled(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: spoiled(v) for k, v in value.items()}
        if isinstance(value, list):
            return [spoiled(v) for v in value]
        return spoil(value)

    objects = {
        name: json.dumps(spoiled(json.loads(body))).encode() if name.endswith(".json") else body
        for name, body in sample.objects().items()
    }
    _, text = await written(MemoryStorage(objects), sample.succeeded())
    assert Page(text).problems == []


async def test_what_cannot_be_read_is_said_with_its_reason() -> None:
    store = MemoryStorage(sample.objects(), unreadable=("metrics.json", "hosts/"))
    told, text = await written(store, sample.succeeded())
    said = {item["what"]: item["why"] for item in told["material"]["not_available"]}
    assert "SlowDown" in said[f"exports/{TRAIN}/metrics.json"]
    assert "SlowDown" in said["hosts/"]
    assert told["material"]["loss"]["source"] == "commits"
    assert "Losses at commits only" in Page(text).text


async def test_curve_shows_commits_kill_and_resume_and_the_table_names_the_victim() -> None:
    told, text = await written(MemoryStorage(sample.objects()), sample.succeeded())
    page = Page(text)
    assert len(told["material"]["loss"]["points"]) == sample.STEPS
    assert "rank 1 killed after step 8" in page.text
    assert "resumed from step 8" in page.text
    assert text.count("commit at step") == 2 * len(sample.commits())
    assert text.count('class="struck"') == 1
    assert "7.0 s" in page.text


async def test_a_verdict_that_is_not_clean_says_where_to_look_and_custodys_later_word_counts() -> None:
    waiting = sample.release().model_copy(update={"cleanup": "releasing", "ended": None, "remaining": ("cluster/x",)})
    verdict = sample.succeeded().model_copy(update={"cleanup": "releasing", "release": waiting})
    objects = sample.objects()
    told, text = await written(MemoryStorage(dict(objects)), verdict)
    assert told["cleanup"] == "releasing"
    assert "this was still “releasing”" in Page(text).text
    del objects[f"{ROOT}/release.json"]
    _, text = await written(MemoryStorage(objects), verdict)
    assert f"temporal workflow describe --workflow-id custody-{sample.KEY}" in Page(text).text
    assert "cluster/x" in Page(text).text


async def test_another_runs_release_is_not_taken_for_this_ones() -> None:
    objects = sample.objects()
    other = sample.release().model_copy(update={"run_key": "other-0000000000", "cleanup": "unproved"})
    objects[f"{ROOT}/release.json"] = other.model_dump_json().encode()
    told, _ = await written(MemoryStorage(objects), sample.succeeded())
    assert told["material"]["release"]["cleanup"] == "clean"
    assert {"what": "release.json", "why": "it is another run's"} in told["material"]["not_available"]


async def test_artifacts_can_be_checked_as_printed_also_when_the_embedded_server_has_stopped() -> None:
    _, text = await written(MemoryStorage(sample.objects()), sample.succeeded())
    said = Page(text).text
    assert (
        said.index("make stack")
        < said.index(". ${LANYARD_HOME:-.lanyard}/env")
        < said.index(f"make inspect RUN={ROOT}")
    )


async def test_a_run_that_did_not_finish_says_how_to_go_on() -> None:
    store = MemoryStorage(sample.objects(12, 1, exported=False))
    _, text = await written(store, sample.ended("aborted", "aborted as asked"))
    assert f'"resume": {{"from": "{ROOT}"}}' in Page(text).text
    _, text = await written(MemoryStorage({}), sample.ended("failed", "no hosts", until=0))
    assert "Nothing was committed" in Page(text).text
    _, text = await written(MemoryStorage(sample.objects()), sample.ended("failed", "the drill failed", until=32))
    assert "Every step was trained and committed" in Page(text).text


@pytest.mark.parametrize("status", ["terminated", "timed_out"])
async def test_a_run_that_could_not_speak_is_reported_from_storage(status: str) -> None:
    store = MemoryStorage(sample.objects(20, 2, exported=False))
    await ActivityEnvironment().run(Reporting(store).report_unspoken, sample.unspoken_order(status))
    told = json.loads(store.objects[f"{ROOT}/report.json"])
    page = Page(store.objects[f"{ROOT}/report.html"].decode())
    assert page.problems == []
    assert (told["outcome"], told["cleanup"], told["artifacts"]) == (status, "clean", None)
    assert told["resume_from"] == ROOT
    assert told["steps"] == sample.STEPS
    assert [c["step"] for c in told["commits"]] == [4, 8, 12, 16, 20]
    assert told["not_proved"][0].startswith("artifacts: not verified")
    assert [p["name"] for p in told["phases"]] == ["training, attempt 1", "training, attempt 2", "release"]
    assert "the last commit is step 20" in page.text


@pytest.mark.parametrize("first", sorted(set(sample.ENDINGS) - set(UNSPOKEN)))
async def test_a_reset_run_never_writes_over_what_an_earlier_execution_said(first: Outcome) -> None:
    store = MemoryStorage(sample.objects())
    said, _ = await written(store, as_ended(first))
    reset = as_ended("failed").model_copy(update={"run_id": "fedcba98-reset"})
    await ActivityEnvironment().run(Reporting(store).write_report, reset)
    assert json.loads(store.objects[f"{ROOT}/report.json"]) == said
    assert json.loads(store.objects[f"{ROOT}/report-fedcba98.json"])["run_id"] == reset.run_id
    assert f"{ROOT}/report-fedcba98.html" in store.objects
    again, _ = await written(store, as_ended(first))
    assert again == said


async def test_what_custody_wrote_for_a_run_that_was_reset_gives_way_in_either_order() -> None:
    order = sample.unspoken_order()
    reset = as_ended("failed").model_copy(update={"run_id": "fedcba98-reset"})
    before, after = MemoryStorage(sample.objects()), MemoryStorage(sample.objects())
    await ActivityEnvironment().run(Reporting(before).report_unspoken, order)
    for store in (before, after):
        await ActivityEnvironment().run(Reporting(store).write_report, reset)
        assert json.loads(store.objects[f"{ROOT}/report.json"])["run_id"] == reset.run_id
    await ActivityEnvironment().run(Reporting(after).report_unspoken, order)
    assert json.loads(after.objects[f"{ROOT}/report.json"])["run_id"] == reset.run_id


WRITER: ContextVar[str] = ContextVar("writer")


class Turns(MemoryStorage):
    """Storage in which two writers of one report take turns as they are told, operation by operation."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.waiting: dict[str, asyncio.Future[None]] = {}

    async def _turn(self, uri: str) -> None:
        if uri.startswith(f"{ROOT}/report"):
            turn = self.waiting[WRITER.get()] = asyncio.get_running_loop().create_future()
            await turn

    async def get(self, uri: str, unless: str | None = None) -> Fetched | None:
        await self._turn(uri)
        return await super().get(uri, unless)

    async def put(self, uri: str, body: bytes, *, only_if_absent: bool = False) -> None:
        await self._turn(uri)
        await super().put(uri, body, only_if_absent=only_if_absent)

    async def names(self, prefix_uri: str, limit: int = 1000) -> list[str]:
        await self._turn(prefix_uri)
        return await super().names(prefix_uri, limit)


async def in_turns(store: Turns, writers: dict[str, Callable[[], Awaitable[None]]], turns: list[str]) -> None:
    """Both at once; after the turns that are told, one after the other."""

    async def write(name: str) -> None:
        WRITER.set(name)
        await writers[name]()

    tasks = {name: asyncio.create_task(write(name)) for name in writers}
    while not all(task.done() for task in tasks.values()):
        for name, task in tasks.items():
            while not (task.done() or name in store.waiting):  # noqa: ASYNC110 (what the other task does is waited for)
                await asyncio.sleep(0)
        ready = sorted(store.waiting)
        wanted = turns.pop(0) if turns else ""
        if ready:
            store.waiting.pop(wanted if wanted in ready else ready[0]).set_result(None)
    for task in tasks.values():
        task.result()


@pytest.mark.parametrize("first", ["custody", "run"])
@pytest.mark.parametrize("one", range(8))
async def test_custody_and_a_reset_run_that_write_at_once_leave_the_run_s_word(first: str, one: int) -> None:
    """At each step of the one the other does any number of its own: no storage of ours has conditional writes."""
    other = "run" if first == "custody" else "custody"
    reset = as_ended("failed").model_copy(update={"run_id": "fedcba98-reset"})
    for some in (0, 1, 2, 4, 7):
        store = Turns(sample.objects())
        reporting = Reporting(store)
        writers: dict[str, Callable[[], Awaitable[None]]] = {
            "custody": lambda reporting=reporting: ActivityEnvironment().run(  # type: ignore[misc]
                reporting.report_unspoken, sample.unspoken_order()
            ),
            "run": lambda reporting=reporting: ActivityEnvironment().run(reporting.write_report, reset),  # type: ignore[misc]
        }
        await in_turns(store, writers, [first] * one + [other] * some + [first] * 9)
        assert json.loads(store.objects[f"{ROOT}/report.json"])["run_id"] == reset.run_id
        assert store.objects[f"{ROOT}/report.html"] == store.objects[f"{ROOT}/report-fedcba98.html"]


async def test_a_run_that_was_not_reset_leaves_one_report() -> None:
    store = MemoryStorage(sample.objects())
    await written(store, sample.succeeded())
    assert {uri.rsplit("/", 1)[1] for uri in store.objects if "/report" in uri} == {"report.json", "report.html"}


async def test_a_run_that_could_not_speak_and_left_nothing_is_reported_too() -> None:
    store = MemoryStorage({}, unreadable=("release.json",))
    await ActivityEnvironment().run(Reporting(store).report_unspoken, sample.unspoken_order())
    told = json.loads(store.objects[f"{ROOT}/report.json"])
    assert told["resume_from"] is None
    assert "resume" not in told["message"]
    assert Page(store.objects[f"{ROOT}/report.html"].decode()).problems == []


async def test_no_secret_of_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    canary = "canary-5e1f0c2b"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "TEMPORAL_API_KEY", "HOME"):
        monkeypatch.setenv(name, canary)
    store = MemoryStorage(sample.objects(), unreadable=("metrics.json",))
    await written(store, sample.succeeded())
    assert not [uri for uri, body in store.objects.items() if canary.encode() in body]


def test_a_million_steps_make_a_report_of_bounded_size() -> None:
    steps = 1_000_000
    rows = ",".join(f'{{"step":{step},"loss":{1 + 1 / step:.6f}}}' for step in range(1, steps + 1))
    results = [
        {"checkpoint_dir_name": sample.checkpoint(step, 1), "metrics": {"step": step, "loss": 0.5}}
        for step in range(50, steps + 1, 50)
    ]
    record = {"checkpoint_results": results, "latest_checkpoint_result": results[-1], "current_report_index": 1}
    objects = {
        f"exports/{TRAIN}/metrics.json": f'{{"steps":[{rows}]}}'.encode(),
        "train/main/checkpoint_manager_snapshot.json": json.dumps(record).encode(),
    }
    told = report(sample.succeeded(), Found(objects))
    loss = told["material"]["loss"]
    assert loss["steps"] == steps
    assert len(loss["points"]) <= MAX_POINTS
    assert loss["points"][0][0] == 1
    assert loss["points"][-1][0] == steps
    assert told["material"]["commits_total"] == len(results) + len(sample.commits())
    assert len(json.dumps(told)) < 400_000
    assert len(render(told)) < 400_000


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=300), st.integers(4, 60))
def test_thinning_keeps_order_ends_and_extremes(losses: list[float], limit: int) -> None:
    points: list[list[float]] = [[step, loss] for step, loss in enumerate(losses, start=1)]
    kept = thin(points, limit)
    assert len(kept) <= limit
    assert kept == sorted(kept, key=lambda p: p[0])
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert min(p[1] for p in kept) == min(losses)
    assert max(p[1] for p in kept) == max(losses)


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.integers(-5, 2**53),
    st.booleans(),
)
@example([0.0] * 5, 2**53 - 1, False)
def test_everything_drawn_lies_inside_the_chart(losses: list[float], first: int, marked: bool) -> None:
    points: list[list[float]] = [[first + i, loss] for i, loss in enumerate(losses)]
    commits = [(points[-1][0], None), (points[0][0], losses[0])]
    marks = [Mark("kill", points[0][0], "kill"), Mark("resume", points[0][0] + 1, "resume")] if marked else []
    chart = loss_chart("wide", points, commits, marks, 860, 340)
    assert chart is not None
    pairs = [tuple(map(float, pair.split())) for pair in chart.path[1:].split("L")]
    pairs += [(dot.x, dot.y) for dot in chart.dots]
    assert all(chart.left - 1 <= x <= chart.right + 1 and chart.top - 1 <= y <= chart.bottom + 1 for x, y in pairs)
    assert all(chart.left - 1 <= tick.at <= chart.right + 1 for tick in chart.x_ticks)
    assert all(math.isfinite(tick.at) for tick in (*chart.x_ticks, *chart.y_ticks))
    assert len(chart.y_ticks) <= 25


@pytest.mark.parametrize("around", [0.009054, 3.0, 1e-9, 123456.0])
@pytest.mark.parametrize("apart", [1e-1, 1e-4, 1e-8])
def test_each_tick_of_a_flat_loss_is_told_from_the_next_and_has_its_room(around: float, apart: float) -> None:
    points: list[list[float]] = [[step, around * (1 + apart * step / 20)] for step in range(20)]
    chart = loss_chart("narrow", points, [], [], 390, 300)
    assert chart is not None
    labels = [tick.label for tick in chart.y_ticks]
    assert len(set(labels)) == len(labels) >= 2
    assert all(7 * len(label) < chart.left for label in labels)


def attempt(number: int, started: float, first_step_at: float | None) -> dict[str, Any]:
    return {"train": "main", "attempt": number, "started": started, "first_step_at": first_step_at}


@pytest.mark.parametrize(
    ("outcome", "attempts", "value"),
    [
        ("succeeded", [attempt(1, 10.0, 12.0)], "none"),
        ("succeeded", [attempt(1, 10.0, 12.0), attempt(2, 50.0, 53.0)], "over 3.0 s"),
        ("succeeded", [attempt(1, 10.0, 12.0), attempt(2, 50.0, 53.0), attempt(3, 60.0, 61.0)], "over 4.0 s"),
        ("failed", [attempt(1, 10.0, 12.0), attempt(2, 50.0, None)], "not recovered"),
        ("failed", [attempt(1, 10.0, 12.0)], "not recovered"),
        ("failed", [], "none"),
        ("aborted", [attempt(1, 10.0, 12.0)], "none"),
    ],
)
def test_time_lost_is_what_the_evidence_says_and_no_more(
    outcome: str, attempts: list[dict[str, Any]], value: str
) -> None:
    told = {"outcome": outcome, "drill": None, "steps": 100}
    assert recovery(told, 40, attempts)["value"] == value


def test_a_verdict_alone_still_makes_material() -> None:
    alone = distil(sample.succeeded(), Found({}))
    assert [c["step"] for c in alone["commits"]] == [c.step for c in sample.commits()]
    assert len(alone["placement"]) == 4
    assert alone["release"]["cleanup"] == "clean"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "—"),
        (-1.0, "0 s"),
        (0.004, "0.00 s"),
        (12.34, "12.3 s"),
        (59.97, "1 min 00 s"),
        (3725, "1 h 02 min"),
        (200_000, "2 d 07 h"),
        (float("nan"), "—"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said
