"""The spare process: when it counts as ready. That Ray hands it out is shown by `make bench` (recovery-ratio)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer import standby


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def another() -> Iterator[int]:
    """The pid of a process that is not this one."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate(b"\n", timeout=10)


def test_another_process_that_is_ready_is_a_spare(temporary: Path, another: int) -> None:
    (temporary / f"{standby.READY}{another}").touch()
    assert standby.wait_until_ready(0.0)


def test_neither_this_process_nor_one_that_ended_is_a_spare(temporary: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(10)
    for pid in (os.getpid(), ended.pid):
        (temporary / f"{standby.READY}{pid}").touch()
    assert not standby.wait_until_ready(0.2)


def test_only_a_training_worker_says_that_it_is_ready(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "WORKER_MODULES", ("json",))
    monkeypatch.delenv(standby.MARK, raising=False)
    standby.prepare_process()
    assert not list(temporary.iterdir())
    monkeypatch.setenv(standby.MARK, "1")
    standby.prepare_process()
    assert [each.name for each in temporary.iterdir()] == [f"{standby.READY}{os.getpid()}"]
