from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

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
