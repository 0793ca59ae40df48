from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker import processes
from worker.processes import ProcessIdentity

LAUNCHER = Path(processes.__file__).with_name("launcher.py")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def identity(pid: int) -> ProcessIdentity:
    found = processes.identify(pid)
    assert found is not None
    return found


def test_a_process_is_its_pid_and_its_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    known = identity(sleeper.pid)
    assert processes.alive(known)
    assert not processes.alive(known.model_copy(update={"start_time": known.start_time - 1}))
    assert not processes.alive(known.model_copy(update={"boot_id": "another boot"}))


def test_a_reused_pid_is_never_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    stranger = identity(sleeper.pid).model_copy(update={"start_time": 1})
    assert not processes.end(stranger, 0.1)
    assert sleeper.poll() is None


def test_a_process_is_ended_once(sleeper: subprocess.Popen[bytes]) -> None:
    known = identity(sleeper.pid)
    assert processes.end(known, 5)
    sleeper.wait(5)
    assert not processes.end(known, 5)


def test_a_zombie_counts_as_gone(sleeper: subprocess.Popen[bytes]) -> None:
    known = identity(sleeper.pid)
    sleeper.kill()
    deadline = time.monotonic() + 5
    while processes.alive(known) and time.monotonic() < deadline:  # not reaped: it is a zombie now
        time.sleep(0.01)
    assert processes.identify(sleeper.pid) is None


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"deaf\n"
    assert processes.end(identity(process.pid), 0.2)
    assert process.wait(5) == -signal.SIGKILL


def test_a_launched_process_ends_when_its_supervisor_is_killed() -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-I', '-S', sys.argv[1], str(os.getpid()), '/bin/sleep', '60'],\n"
        "                         start_new_session=True)\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code, str(LAUNCHER)], stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    child = identity(int(supervisor.stdout.readline()))
    deadline = time.monotonic() + 10
    while b"sleep" not in Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert processes.alive(child), "exec keeps pid and start time"
    supervisor.kill()
    supervisor.wait()
    while processes.alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_launcher_whose_supervisor_is_gone_starts_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid() + 1), "/bin/echo", "started"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "supervisor is gone" in done.stderr
