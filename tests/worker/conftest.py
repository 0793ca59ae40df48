"""Stacks as processes of their own, so that they can be killed as a user's would be."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.integration.stack import end_with_us
from worker.home import Home
from worker.processes import alive
from worker.settings import CHECKOUT
from worker.stack import StackRecord

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def hangups_as_usual() -> Iterator[None]:
    """Under nohup SIGHUP is ignored, also by what is started here. A handler is not inherited, and ends nothing."""
    before = signal.getsignal(signal.SIGHUP)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


class Terminal:
    """A command in a terminal of its own, as a person has it before them."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], columns: int = 80, rows: int = 30
    ) -> None:
        self._screen, inside = os.openpty()
        termios.tcsetwinsize(inside, (rows, columns))
        self.process = subprocess.Popen(
            command,
            cwd=CHECKOUT,
            env={**environment, "TERM": "xterm"},
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inside)

    def press(self, keys: bytes) -> None:
        os.write(self._screen, keys)

    def read_until(self, text: str, within_s: float = 60) -> str:
        """What was shown until `text` was, both without any white space: that is where lines break."""
        deadline = time.monotonic() + within_s
        drawn = ""
        while squeezed(text) not in (seen := squeezed(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn))):
            ready, _, _ = select.select([self._screen], [], [], 1)
            assert time.monotonic() < deadline, f"{text!r} was never shown:\n{drawn}"
            if ready:
                drawn += os.read(self._screen, 65536).decode(errors="replace")
        return seen

    def close(self) -> None:
        """Close the terminal, as its window's cross does."""
        os.close(self._screen)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.close()
        self.process.kill()
        self.process.wait()


def squeezed(text: str) -> str:
    """Text without white space."""
    return "".join(text.split())


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
                self.command,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_us,
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
    def command(self) -> Sequence[str]:
        return sys.executable, str(HERE / "supervise.py")

    @property
    def environment(self) -> Mapping[str, str]:
        return {**clean_environment(), "LANYARD_HOME": str(self.home.root)}

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
