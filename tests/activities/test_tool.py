"""The application environment's tools end with whoever runs them, and leave nothing of a worker that was killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from activities.verification import SCRATCH, Application
from trainer.processes import descendants, is_alive, this_process

CHECKOUT = Path(__file__).parents[2]
RUNS_A_TOOL = """
import asyncio, sys
from pathlib import Path
from activities.verification import Application
asyncio.run(Application(Path(sys.argv[1])).tool("http.server", "--bind", "127.0.0.1", "0"))
"""


def wait_for_tool(worker: subprocess.Popen[bytes], root: Path) -> None:
    deadline = time.monotonic() + 60
    while not (descendants(worker.pid) and any(root.glob(f"{SCRATCH}*"))):
        assert time.monotonic() < deadline
        assert worker.poll() is None
        time.sleep(0.05)


def test_a_killed_worker_leaves_no_tool_and_the_next_one_removes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    worker = subprocess.Popen([sys.executable, "-c", RUNS_A_TOOL, str(CHECKOUT)], cwd=CHECKOUT)
    try:
        wait_for_tool(worker, tmp_path)
        tools = descendants(worker.pid)
    finally:
        worker.kill()
        worker.wait()
    deadline = time.monotonic() + 10
    while any(is_alive(each.pid, each.start_time) for each in tools):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    [left] = tmp_path.glob(f"{SCRATCH}*")
    me = this_process()
    of_a_live_one = tmp_path / f"{SCRATCH}{me.pid}-{me.start_time}-xy-z_"
    foreign = tmp_path / f"{SCRATCH}of-somebody"
    for each in (of_a_live_one, foreign):
        each.mkdir()
    fresh = Path(Application(CHECKOUT)._scratch())
    assert fresh.stat().st_mode & 0o077 == 0
    assert sorted(tmp_path.glob(f"{SCRATCH}*")) == sorted([of_a_live_one, foreign, fresh])
    assert left not in (of_a_live_one, foreign, fresh)


async def test_a_tool_is_given_its_input_and_its_end_is_told() -> None:
    code, out, err = await Application(CHECKOUT).tool("json.tool", "--compact", given='{"a": 1}')
    assert (code, out.strip(), err) == (0, '{"a":1}', "")
    code, out, err = await Application(CHECKOUT).tool("json.tool", given="{")
    assert code == 1
    assert err
