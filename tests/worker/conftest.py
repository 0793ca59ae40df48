"""Stacks as processes of their own, so that they can be killed as a user's would be."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from worker.home import Home
from worker.processes import alive
from worker.stack import StackRecord

HERE = Path(__file__).parent


class StackProcess:
    """A supervisor with the stand-in worker, in `root`."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root)
        self.output = root.parent / f"{root.name}.out"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        before = self.output.read_text() if self.output.exists() else ""
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "supervise.py")],
                env={**clean_environment(), "LANYARD_HOME": str(self.home.root)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_for(lambda: "Ctrl-C here stops" in self.text()[len(before) :])

    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, holds: Callable[[], object], within_s: float = 60) -> None:
        deadline = time.monotonic() + within_s
        while not holds():
            assert self.process.poll() is None, f"the supervisor ended:\n{self.text()}"
            assert time.monotonic() < deadline, f"not within {within_s} s:\n{self.text()}"
            time.sleep(0.05)

    def wait_to_say(self, text: str) -> None:
        self.wait_for(lambda: text in self.text())

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def record(self) -> StackRecord:
        record = StackRecord.read(self.home)
        assert record is not None
        return record

    def send(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)

    def services_alive(self) -> list[str]:
        return [name for name, service in self.record.services.items() if alive(service.process)]

    def shell(self, script: str) -> str:
        """What `script` prints in a fresh bash that has sourced the env file."""
        done = subprocess.run(
            ["bash", "-euc", f'. "$1"\n{script}', "bash", str(self.home.env)],
            env={"PATH": os.defpath, "HOME": str(self.home.root)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            self._process.kill()
            self._process.wait()


def clean_environment() -> dict[str, str]:
    """This process's, without settings of another stack that the person testing may have sourced."""
    prefixes = ("LANYARD_", "TEMPORAL_", "AWS_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[Callable[[str], StackProcess]]:
    made: list[StackProcess] = []

    def make(name: str) -> StackProcess:
        made.append(StackProcess(tmp_path / name))
        return made[-1]

    yield make
    for stack in made:
        stack.close()


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackProcess]:
    stack = StackProcess(tmp_path_factory.mktemp("shared") / "home")
    stack.start()
    yield stack
    stack.close()
