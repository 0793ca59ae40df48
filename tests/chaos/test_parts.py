"""The machine's own small parts: the plan that holds one worker once, the tunnel that can be cut."""

from __future__ import annotations

import http.server
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.answers import shape
from tests.chaos.plan import Plan
from tests.chaos.points import HALFWAY, Point
from tests.chaos.tunnel import tunnel
from tests.chaos.worker import Holder
from workflows import activity_names as names


def test_a_point_holds_the_first_that_comes_and_lets_all_others_pass(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    assert plan.armed() is None
    plan.arm("one", Point("before", names.LAUNCH).told())
    first, second = Holder(tmp_path), Holder(tmp_path)
    assert first.wanted("after", names.LAUNCH) is None
    assert first.wanted("before", names.KEEP) is None
    assert first.wanted("before", names.LAUNCH) == "one"
    assert plan.reached("one") is not None
    assert second.wanted("before", names.LAUNCH) is None
    assert not plan.may_go("one")
    plan.disarm("one")
    assert plan.may_go("one")
    assert plan.armed() is None


def test_a_half_is_met_at_its_call_and_side_and_count(tmp_path: Path) -> None:
    plan = Plan(tmp_path)
    plan.arm("records", Point("half", names.SAVE_RECORDS, call=HALFWAY[names.SAVE_RECORDS]).told())
    holder = Holder(tmp_path)
    call = "storage.put x-0123456789-train.status.json"
    assert holder.wanted("half", names.SAVE_RECORDS, call) is None
    assert holder.wanted("half", names.SAVE_RECORDS, "storage.put x.log", done=True) is None
    assert holder.wanted("half", names.SAVE_RECORDS, call, done=True) == "records"
    plan.arm("watch", Point("half", names.WATCH, call=HALFWAY[names.WATCH]).told())
    assert holder.wanted("half", names.WATCH, "GET job") is None
    assert holder.wanted("half", names.WATCH, "GET job") == "watch"


class _Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def far() -> Iterator[tuple[str, int]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hello)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield "127.0.0.1", server.server_address[1]
    server.shutdown()
    server.server_close()


def test_a_tunnel_forwards_until_it_is_cut_and_again_once_it_is_mended(far: tuple[str, int], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    with tunnel(far, cut) as port:

        def ask() -> bytes:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
                return bytes(answer.read())

        assert ask() == b"hello"
        cut.touch()
        with pytest.raises((OSError, urllib.error.URLError)):
            ask()
        cut.unlink()
        assert ask() == b"hello"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"status": "RUNNING", "token": "abc"}, {"status": "RUNNING", "token": "text"}),
        ({"env_vars": {"SECRET": "x"}}, {"env_vars": "object"}),
        ([{"a": 1}, {"a": 2}, {"a": None}], [{"a": "int"}, {"a": "null"}]),
    ],
)
def test_a_shape_holds_no_value(value: Any, expected: Any) -> None:
    assert shape(value) == expected
