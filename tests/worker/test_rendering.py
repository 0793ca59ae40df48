from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live

from tests.worker.conftest import squeezed
from worker.observation import Sight
from worker.rendering import duration, line, panel, verdict_table

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["step", "ok", "name"]), inner),
    max_leaves=5,
)
_NAMES = [
    *("outcome", "cleanup", "message", "run_key", "storage", "steps", "phases", "commits", "victim", "strike", "drill"),
    *("artifacts", "release", "not_proved", "hosts", "resume_from"),
]


_WORD = (
    "still being released: cluster nightly-regression-0123456789 (local); "
    "service nightly-regression-0123456789 (local); job nightly-regression-0123456789-train (local). "
    "Waiting for it. A third Ctrl-C leaves at once."
)
_UI = "http://127.0.0.1:23456/namespaces/default/workflows/demo-nightly-regression-20260101-000000/0123-456-789/history"


def live(renderable: Any, columns: int, rows: int) -> str:
    """The live view on a screen of this size, on a console like the demo's, without white space."""
    console = Console(width=columns, height=rows, soft_wrap=True, force_terminal=True, record=True, file=io.StringIO())
    with Live(console=console, auto_refresh=False) as view:
        console.export_text()
        view.update(renderable, refresh=True)
        drawn = console.export_text()
    assert all(len(row) <= columns for row in drawn.splitlines())
    return squeezed(drawn)


def shown(renderable: Any) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


@given(st.dictionaries(st.sampled_from(_NAMES), _JSON), st.dictionaries(st.sampled_from(_NAMES), _JSON))
def test_any_verdict_can_be_shown(verdict: dict[str, Any], custody: dict[str, Any]) -> None:
    assert "outcome" in shown(verdict_table(verdict, custody))


@given(
    st.dictionaries(
        st.sampled_from(["phase", "step", "steps", "loss", "deadline", "note"]),
        st.none() | st.integers(0, 2_000_000_000) | st.floats(0, 1e9) | st.text(max_size=5),
    )
)
def test_any_progress_can_be_shown(progress: dict[str, Any]) -> None:
    sight = Sight(open=True, progress=progress)
    assert "phase" in shown(panel(sight, 1.0, "http://ui", "a word"))
    assert line(sight, 1.0)


def test_custody_has_the_last_word_on_cleanup() -> None:
    text = shown(verdict_table({"outcome": "succeeded", "cleanup": "releasing"}, {"cleanup": "clean"}))
    assert "clean" in text
    assert "releasing" not in text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (-3, "0:00"), (61.9, "1:01"), (3723, "1:02:03")])
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(
    st.integers(60, 200),
    st.text("ab -/", max_size=300).map(lambda more: f"{_WORD} {more} end"),
    st.text("ab -/", max_size=300),
    st.text("ab -/", max_size=100),
)
def test_the_live_view_crops_nothing(columns: int, word: str, trouble: str, note: str) -> None:
    sight = Sight(open=True, progress={"phase": "train", "note": note}, trouble=trouble)
    seen = live(panel(sight, 1.0, _UI, word), columns, rows=30)
    for text in (word, trouble, note, _UI):
        assert squeezed(text) in seen.replace("TemporalUI", "")


def test_on_a_low_screen_what_needs_attention_is_what_stays() -> None:
    sight = Sight(open=True, progress={"phase": "train"}, trouble="Temporal does not answer")
    seen = live(panel(sight, 1.0, _UI, _WORD), 80, rows=8)
    assert squeezed(_WORD) in seen
    assert squeezed(sight.trouble) in seen
