from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.worker.conftest import StackProcess, clean_environment
from worker.settings import CHECKOUT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def begin(of: StackProcess, run_file: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "worker", "demo", "--run", str(run_file)],
        cwd=CHECKOUT,
        env={**clean_environment(), "LANYARD_HOME": str(of.home.root), "COLUMNS": "120"},
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
