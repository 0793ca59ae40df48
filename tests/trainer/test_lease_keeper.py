"""The keeper runs its command under a live lease only, ends exactly that, and passes statuses and SIGTERM on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from trainer import lease_keeper, machine

PROGRAM = """
import json, sys
from pathlib import Path
from trainer import lease_keeper
from trainer.lease import LeaseWatch, Observation, UNREADABLE, boot_clock

place = Path(sys.argv[1])

def read():
    if (place / "outage").exists():
        return Observation(UNREADABLE, "unreadable")
    lease = place / "lease.json"
    tombstone = "present" if (place / "tombstone.json").exists() else "absent"
    return Observation(lease.read_bytes() if lease.exists() else None, tombstone)

sys.exit(lease_keeper.keep(
    sys.argv[2:], LeaseWatch(boot_clock, read), first_lease_s=1.0, look_s=0.1, grace_s=1.0
))
"""


class Keeper:
    def __init__(self, place: Path, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(place), *command], stderr=subprocess.PIPE, text=True
        )

    def ends(self, timeout: float = 20) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=timeout)
        return self.process.returncode, errors


def grant(place: Path, sequence: int, duration_s: float) -> None:
    fresh = place / "lease.new"
    fresh.write_text(json.dumps({"schema": 1, "sequence": sequence, "duration_s": duration_s}))
    fresh.rename(place / "lease.json")


def command(place: Path, body: str) -> list[str]:
    """A command that writes its pid to ``place/pid`` once its ``body``'s handlers stand."""
    script = place / "command.py"
    script.write_text("import os, pathlib, signal, subprocess, sys, time\n" + textwrap.dedent(body))
    return [sys.executable, str(script), str(place)]


SLEEPER = """
(pathlib.Path(sys.argv[1]) / "pid").write_text(str(os.getpid()))
time.sleep(60)
"""


def started(place: Path, name: str = "pid") -> int:
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        path = place / name
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError("the command never started")


def gone(pid: int) -> bool:
    ends = time.monotonic() + 5
    while time.monotonic() < ends:
        try:
            machine.start_time(pid)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("status", [0, 3])
def test_the_commands_own_status_is_passed_on(tmp_path: Path, status: int) -> None:
    grant(tmp_path, 1, 60)
    assert Keeper(tmp_path, sys.executable, "-c", f"raise SystemExit({status})").ends()[0] == status


def test_a_command_killed_by_a_signal_is_told_as_a_shell_tells_it(tmp_path: Path) -> None:
    grant(tmp_path, 1, 60)
    assert Keeper(tmp_path, sys.executable, "-c", "import os; os.kill(os.getpid(), 9)").ends()[0] == 137


def test_without_a_lease_nothing_starts(tmp_path: Path) -> None:
    status, errors = Keeper(tmp_path, *command(tmp_path, SLEEPER)).ends()
    assert status == lease_keeper.EXIT_NO_LEASE
    assert "no live lease" in errors
    assert not (tmp_path / "pid").exists()


def test_under_a_tombstone_nothing_starts_even_with_a_lease(tmp_path: Path) -> None:
    grant(tmp_path, 1, 60)
    (tmp_path / "tombstone.json").write_text("{")
    status, errors = Keeper(tmp_path, *command(tmp_path, SLEEPER)).ends()
    assert status == lease_keeper.EXIT_TOMBSTONE
    assert "release" in errors
    assert not (tmp_path / "pid").exists()


def test_a_tombstone_stops_what_runs(tmp_path: Path) -> None:
    grant(tmp_path, 1, 60)
    keeper = Keeper(tmp_path, *command(tmp_path, SLEEPER))
    pid = started(tmp_path)
    (tmp_path / "tombstone.json").write_text("{}")
    status, errors = keeper.ends()
    assert status == lease_keeper.EXIT_TOMBSTONE
    assert "tombstone" in errors
    assert gone(pid)


def test_an_expired_lease_stops_what_runs_and_says_so(tmp_path: Path) -> None:
    grant(tmp_path, 1, 2.0)
    keeper = Keeper(tmp_path, *command(tmp_path, SLEEPER))
    pid = started(tmp_path)
    status, errors = keeper.ends()
    assert status == lease_keeper.EXIT_EXPIRED
    assert "lease expired" in errors
    assert gone(pid)


def test_an_outage_shorter_than_the_lease_stops_nothing(tmp_path: Path) -> None:
    grant(tmp_path, 1, 4.0)
    keeper = Keeper(tmp_path, *command(tmp_path, SLEEPER))
    pid = started(tmp_path)
    (tmp_path / "outage").touch()
    time.sleep(1.5)
    grant(tmp_path, 2, 4.0)
    (tmp_path / "outage").unlink()
    time.sleep(3.0)
    assert not keeper.process.poll()
    assert machine.start_time(pid)
    keeper.process.terminate()
    keeper.ends()


def test_sigterm_is_passed_on_and_what_ignores_it_is_killed_with_its_children(tmp_path: Path) -> None:
    grant(tmp_path, 1, 60)
    body = """
    place = pathlib.Path(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: (place / "told").touch())
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", deaf])
    (place / "grandchild").write_text(str(child.pid))
    time.sleep(0.3)
    (place / "pid").write_text(str(os.getpid()))
    while True:
        time.sleep(60)
    """
    keeper = Keeper(tmp_path, *command(tmp_path, body))
    pid, grandchild = started(tmp_path), started(tmp_path, "grandchild")
    keeper.process.send_signal(signal.SIGTERM)
    status, _ = keeper.ends()
    assert (tmp_path / "told").exists()
    assert status == 128 + signal.SIGKILL
    assert gone(pid)
    assert gone(grandchild)


def test_a_keeper_that_is_killed_takes_its_command_along(tmp_path: Path) -> None:
    grant(tmp_path, 1, 60)
    keeper = Keeper(tmp_path, *command(tmp_path, SLEEPER))
    pid = started(tmp_path)
    keeper.process.kill()
    keeper.ends()
    assert gone(pid)


def test_the_command_shares_the_keepers_process_group(tmp_path: Path) -> None:
    grant(tmp_path, 1, 60)
    keeper = Keeper(tmp_path, *command(tmp_path, SLEEPER))
    assert os.getpgid(started(tmp_path)) == os.getpgid(keeper.process.pid)
    keeper.process.terminate()
    keeper.ends()


@pytest.mark.parametrize("order", [None, "{", '{"storage": "file:///tmp/x"}', '{"storage": "s3://key:secret@b/p"}'])
def test_an_order_without_storage_is_refused_in_words(order: str | None) -> None:
    environ = {**os.environ, **({"LANYARD_JOB": order} if order is not None else {})}
    if order is None:
        environ.pop("LANYARD_JOB", None)
    done = subprocess.run(
        [sys.executable, "-m", "trainer.lease_keeper", "--", "true"], env=environ, capture_output=True, text=True
    )
    assert done.returncode == lease_keeper.EXIT_USAGE
    assert "not started" in done.stderr
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr


def test_a_command_that_does_not_exist_is_said(tmp_path: Path) -> None:
    grant(tmp_path, 1, 60)
    status, errors = Keeper(tmp_path, "/nowhere/at/all").ends()
    assert status == lease_keeper.EXIT_USAGE
    assert "/nowhere/at/all" in errors
