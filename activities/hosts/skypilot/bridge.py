"""The way to SkyPilot: `program.py`, run by the interpreter of SkyPilot's own environment, one process for each call.

SkyPilot pins what the operator needs in other versions, and reads settings from places of its own, so it never shares
a process, an environment or a home directory with the worker. A call gets JSON on its standard input and answers with
lines of JSON on a descriptor that nothing of SkyPilot's prints to.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainer.processes import dies_with_parent

VERSION: Final = "0.14.1"
"""The SkyPilot that this was written and measured against."""
PROGRAM: Final = Path(__file__).with_name("program.py")
LONGEST_ANSWER: Final = 4 * 2**20
LONGEST_WORD: Final = 600
INHERITED: Final = re.compile(
    r"PATH|USER|LOGNAME|LANG|LC_\w+|TZ|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|(https?|no)_proxy|(HTTPS?|NO)_PROXY"
    r"|KUBECONFIG|SKYPILOT_(SERVICE_ACCOUNT_TOKEN|USER_ID|USER)"
)
"""What of the worker's environment SkyPilot gets. Not the storage's AWS keys: it would take them for a cloud's, and
bring them to every host in clear."""


class BridgeError(Exception):
    """SkyPilot answered with an error, or with none. ``kind`` is the name of its exception."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class NoSkyPilot(BridgeError):
    """Nothing answers: no interpreter, no server, or none in time. What SkyPilot knows is unknown."""


@dataclass(frozen=True)
class SkyPilot:
    """One SkyPilot: its interpreter, its home directory, and its API server."""

    python: Path
    home: Path
    endpoint: str | None = field(default=None, repr=False)
    """A remote API server's. None: a server of this home, on this machine, started when it is needed."""
    port: int = 0
    """The local server's; 0: one that follows from the home."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    @property
    def local_port(self) -> int:
        return self.port or 42_000 + int.from_bytes(hashlib.sha256(str(self.home).encode()).digest()[:4], "big") % 4000

    def environment(self) -> dict[str, str]:
        """Of everything that is SkyPilot's, its ssh included."""
        kept = {name: value for name, value in self.environ.items() if INHERITED.fullmatch(name)}
        given = {
            **kept,
            "HOME": str(self.home),
            "PATH": f"{self.python.parent}{os.pathsep}{kept.get('PATH', '/usr/bin:/bin')}",
            "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(self.local_port),
        }
        if self.endpoint:
            given["SKYPILOT_API_SERVER_ENDPOINT"] = self.endpoint
        return given

    def call(
        self, command: str, *, limit_s: float, note: Callable[[str], None] = lambda text: None, **asked: Any
    ) -> Any:
        """One command of `program.py`; returns its result. Raises BridgeError, NoSkyPilot, and whatever `note` does."""
        return _call(
            [str(self.python), "-B", str(PROGRAM), command],
            self.environment(),
            self.home,
            json.dumps(asked).encode(),
            limit_s,
            note,
        )


def _call(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    asked: bytes,
    limit_s: float,
    note: Callable[[str], None],
) -> Any:
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as said:
            question.write(asked)
            question.seek(0)
            try:
                process = subprocess.Popen(
                    # From this very thread, which waits for it: the kernel ends it together with the thread.
                    [*dies_with_parent(), *command, str(writing)],
                    env=dict(environment),
                    cwd=directory,
                    stdin=question,
                    stdout=said,
                    stderr=said,
                    pass_fds=(writing,),
                )
            finally:
                os.close(writing)
                writing = -1
            try:
                return _answer(reading, time.monotonic() + limit_s, note, lambda: _word(said))
            except TimeoutError:
                raise NoSkyPilot("Timeout", f"SkyPilot did not answer within {limit_s:.0f} s; {_word(said)}") from None
            finally:
                # What it had asked of the API server goes on there, and is looked up by the cluster's name.
                process.kill()
                process.wait()
    except OSError as error:
        raise NoSkyPilot("OSError", f"{command[0]} cannot be run: {error}") from error
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def _answer(reading: int, deadline: float, note: Callable[[str], None], word: Callable[[], str]) -> Any:
    read, held = 0, b""
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            piece = os.read(reading, 65_536)
            read += len(piece)
            if not piece or read > LONGEST_ANSWER:
                raise NoSkyPilot("NoAnswer", f"SkyPilot's program ended without an answer; {word()}")
            *lines, held = (held + piece).split(b"\n")
            for line in lines:
                try:
                    told = json.loads(line)
                except ValueError:
                    raise NoSkyPilot("NoAnswer", f"SkyPilot's program said what is no JSON; {word()}") from None
                if "note" in told:
                    note(str(told["note"])[:LONGEST_WORD])
                elif "error" in told:
                    kind, message = str(told["kind"]), str(told["error"])[-4 * LONGEST_WORD :]
                    raise (NoSkyPilot if told.get("unreachable") else BridgeError)(kind, message)
                else:
                    return told["result"]


def _word(said: Any) -> str:
    """The last lines of what was printed: SkyPilot's own words."""
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - 4 * LONGEST_WORD))
    plain = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", said.read()).decode(errors="replace")
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-LONGEST_WORD:] or "it said nothing"
