"""Whatever becomes of stdout and stderr, what prints goes on, and the exit status is its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.worker.conftest import Terminal
from worker.settings import CHECKOUT

PROGRAM = """
import contextlib, logging, sys, threading, traceback
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from worker.__main__ import leave
from worker.output import outlive_readers

outlive_readers()
print("ready", flush=True)
with contextlib.suppress(OSError, AttributeError):
    sys.stdin.readline()
lock = open(sys.argv[1] + ".lock", "w")
console = Console(soft_wrap=True)
with Live(console=console, refresh_per_second=50) as live:
    for number in range(50):
        live.update(Text("—" * 10_000))
        console.print("—" * 10_000)
        print("—" * 10_000)
        print("—" * 10_000, file=sys.stderr, flush=True)
        logging.error("logged")
try:
    raise ValueError
except ValueError:
    traceback.print_exc()
threading.Thread(target=lambda: 1 / 0).start()
assert Path(lock.name).stat().st_size == 0, "printed into another file"
Path(sys.argv[1]).write_text("done")
leave(7)
"""


def reader_gone(command: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdin
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    return process


def terminal_closed(command: list[str]) -> subprocess.Popen[bytes]:
    # SIGHUP, which comes with it, is the concern of who is asked to stop.
    terminal = Terminal(["bash", "-c", 'trap "" HUP; exec "$@"', "bash", *command], os.environ)
    terminal.read_until("ready")
    terminal.close()
    return terminal.process


def shell(line: str) -> Callable[[list[str]], subprocess.Popen[bytes]]:
    def start(command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", "-c", f"exec {line}", "bash", *command], cwd=CHECKOUT)

    return start


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(reader_gone, id="the reader is gone"),
        pytest.param(terminal_closed, id="the terminal was closed"),
        pytest.param(shell('"$@" </dev/null >/dev/full 2>&1'), id="the disk is full"),
        pytest.param(shell('"$@" </dev/null >/dev/null 2>/dev/full'), id="stderr's disk is full"),
        pytest.param(shell('"$@" <&- >&- 2>&-'), id="all closed from the start"),
        pytest.param(shell('"$@" </dev/null >&-'), id="stdout closed from the start"),
        pytest.param(shell('"$@" </dev/null 2>&-'), id="stderr closed from the start"),
        pytest.param(shell('env PYTHONIOENCODING=ascii "$@" </dev/null >/dev/null 2>&1'), id="characters are missing"),
    ],
)
def test_nothing_depends_on_output_being_taken(
    start: Callable[[list[str]], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    process = start([sys.executable, "-c", PROGRAM, str(mark)])
    try:
        assert process.wait(60) == 7
    finally:
        process.kill()
        process.wait()
    assert mark.read_text() == "done"


def test_what_is_read_comes_whole_and_in_order() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from worker.output import *; outlive_readers(); print(*range(100_000), sep='\\n')"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [str(number) for number in range(100_000)]


def test_the_schema_is_not_lost_in_silence() -> None:
    """Here the output is the work: `make schema` must not keep half of it."""
    done = subprocess.run(
        ["bash", "-c", '"$1" -m worker schema > /dev/full', "bash", sys.executable],
        cwd=CHECKOUT,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode != 0
