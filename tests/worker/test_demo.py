from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.worker.conftest import StackProcess, Terminal
from worker.settings import CHECKOUT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def command(run_file: Path) -> list[str]:
    return [sys.executable, "-m", "worker", "demo", "--run", str(run_file)]


def begin(of: StackProcess, run_file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(run_file),
        cwd=CHECKOUT,
        env={**of.environment, "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_file(folder: Path, name: str) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"name": name}))
    return path


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came:\n{seen}")


def test_a_run_that_succeeds_and_is_released_exits_0_and_leaves_the_report(
    shared_stack: StackProcess, tmp_path: Path
) -> None:
    path = run_file(tmp_path, "succeed")
    process = begin(shared_stack, path)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert "$ temporal workflow start --type GuardedTrain --task-queue ray-train --workflow-id demo-succeed-" in out
    assert f"--input-file {path}" in out
    assert "/namespaces/default/workflows/demo-succeed-" in out
    assert "step 0 of 6" in out
    assert re.search(r"step [1-6] of 6  loss [01]", out), f"the heartbeat was never shown:\n{out}"
    after = out.partition("recover began")[2]
    assert "recover  step" in after
    assert "train  step" not in after, "the run knows its phase, not the watch that it goes through"
    assert "recovery" in out
    report = shared_stack.home.reports / "stand-in-0123456789" / "report.html"
    assert str(report) in out
    assert report.read_bytes() == b"report.html"
    assert out.rstrip().endswith("succeeded, clean")
    assert sorted(shared_stack.services_alive()) == ["s3", "temporal", "worker"], "a guest stops nothing"


def test_a_failed_and_a_rejected_run_exit_1_and_say_why(shared_stack: StackProcess, tmp_path: Path) -> None:
    for name, said in (("fail", "failed, clean"), ("reject", "The run was rejected: hosts.count: must be 2 or more")):
        process = begin(shared_stack, run_file(tmp_path, name))
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 1, out
        assert said in out


def test_text_that_is_not_json_is_refused_by_the_cli(shared_stack: StackProcess, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{nope")
    process = begin(shared_stack, path)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "nothing was started" in out
    assert "not valid JSON" in out


def test_ctrl_c_aborts_the_run_and_shows_its_release(shared_stack: StackProcess, tmp_path: Path) -> None:
    process = begin(shared_stack, run_file(tmp_path, "wait"))
    read_until(process, "train  step")
    process.send_signal(signal.SIGINT)
    seen = read_until(process, "told to abort")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "aborted as asked: Ctrl-C" in out, seen + out
    assert out.rstrip().endswith("aborted, clean")


def test_a_second_ctrl_c_says_what_is_held_and_a_third_leaves(shared_stack: StackProcess, tmp_path: Path) -> None:
    worker = shared_stack.record.services["worker"].process.pid
    process = begin(shared_stack, run_file(tmp_path, "wait"))
    read_until(process, "train  step")
    time.sleep(1.5)  # the run has answered and named its custody
    signals = subprocess.run(["kill", "-STOP", str(worker)], check=True)  # nothing is released meanwhile
    assert signals.returncode == 0
    try:
        process.send_signal(signal.SIGINT)
        read_until(process, "told to abort")
        process.send_signal(signal.SIGINT)
        read_until(process, "A third Ctrl-C leaves at once")
        process.send_signal(signal.SIGINT)
        out = read_until(process, "temporal workflow describe --workflow-id custody-stand-in")
        assert "Leaving" in out
        assert process.wait(30) == 130
    finally:
        subprocess.run(["kill", "-CONT", str(worker)], check=True)
        process.kill()
        process.wait()


def outcomes(of: StackProcess, run_file: Path) -> list[str]:
    """How the runs that were started from this file have ended, or that they have not, by the CLI."""
    text = of.shell("temporal workflow list --query \"WorkflowType = 'GuardedTrain'\" -o json")
    stem = f"demo-{run_file.stem}-"
    mine = [run["execution"] for run in json.loads(text) if run["execution"]["workflowId"].startswith(stem)]
    told = [
        of.shell(f"temporal workflow result -w {run['workflowId']} -r {run['runId']} -o json | cat") for run in mine
    ]
    return [str(json.loads(each).get("result", {}).get("outcome")) for each in told]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_demo_whose_reader_is_gone_aborts_its_run_as_any_other(
    shared_stack: StackProcess, tmp_path: Path, number: signal.Signals
) -> None:
    """`make demo 2>&1 | tee log`: Ctrl-C ends `tee` too, so everything that is said from then on fails."""
    path = run_file(tmp_path, f"wait-{number.name.lower()}")
    process = begin(shared_stack, path)
    read_until(process, "train  step")
    assert process.stdout is not None
    process.stdout.close()
    process.send_signal(number)
    assert process.wait(60) == 1
    assert outcomes(shared_stack, path) == ["aborted"]


def test_a_demo_whose_terminal_closes_aborts_its_run_as_any_other(shared_stack: StackProcess, tmp_path: Path) -> None:
    path = run_file(tmp_path, "wait-closed")
    terminal = Terminal(command(path), shared_stack.environment)
    try:
        terminal.read_until("phase train")
        terminal.close()
        for _ in range(3):  # the shells above repeat it: that is no wish to leave at once
            terminal.process.send_signal(signal.SIGHUP)
        assert terminal.process.wait(60) == 1
    finally:
        terminal.end()
    assert outcomes(shared_stack, path) == ["aborted"]


@pytest.mark.parametrize("columns", [60, 80])
def test_in_a_terminal_every_word_of_a_ctrl_c_can_be_read(
    shared_stack: StackProcess, tmp_path: Path, columns: int
) -> None:
    terminal = Terminal(command(run_file(tmp_path, f"slow-{columns}")), shared_stack.environment, columns, rows=30)
    try:
        terminal.read_until("phase train")
        terminal.press(b"\x03")
        terminal.read_until("Once its training is over, it only finishes. Ctrl-C again says what is left.")
        terminal.press(b"\x03")
        terminal.read_until("still being released: cluster stand-in-0123456789 (local); service")
        terminal.read_until("Waiting for it. A third Ctrl-C leaves at once.")
        terminal.press(b"\x03")
        terminal.read_until("it goes on. To look:")
        assert terminal.process.wait(60) == 130
    finally:
        terminal.end()
