"""The ways to SkyPilot and to a cluster's head: what goes along, what comes back, and that each ends with its user."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from activities.hosts import HostsNotReady
from activities.hosts.skypilot import bridge
from activities.hosts.skypilot.bridge import BridgeError, NoSkyPilot, SkyPilot
from activities.hosts.skypilot.tunnel import Entry, listens, tunnel

WORKERS = {
    "PATH": os.environ["PATH"],
    "LANG": "C.UTF-8",
    "AWS_SECRET_ACCESS_KEY": "canary",
    "TEMPORAL_API_KEY": "canary",
    "LANYARD_SECRET_FILE": "canary",
    "RAY_ADDRESS": "canary",
    "SKYPILOT_DEBUG": "canary",
    "HOME": "/root",
}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], SkyPilot]:
    """A program in place of the one that imports sky: what is tested is the way there and back."""

    def make(body: str) -> SkyPilot:
        path = tmp_path / "program.py"
        path.write_text(
            "import json, os, sys, time\ntold = json.load(sys.stdin)\nout = int(sys.argv[2])\n"
            "def say(line):\n    os.write(out, json.dumps(line).encode() + b'\\n')\n" + textwrap.dedent(body)
        )
        monkeypatch.setattr(bridge, "PROGRAM", path)
        return SkyPilot(Path(sys.executable), tmp_path / "home", environ=WORKERS)

    return make


def test_a_call_takes_json_there_and_back_with_notes_on_the_way(program: Callable[[str], SkyPilot]) -> None:
    sky = program("""
        print("whatever SkyPilot prints")
        say({"note": "half way"})
        say({"result": {"command": sys.argv[1], "told": told, "environment": dict(os.environ), "in": os.getcwd()}})
    """)
    notes: list[str] = []
    found = sky.call("look", limit_s=20, note=notes.append, cluster="c")
    assert (found["command"], found["told"], notes) == ("look", {"cluster": "c"}, ["half way"])
    assert found["in"] == found["environment"]["HOME"] == str(sky.home)
    assert "canary" not in json.dumps(found)
    assert found["environment"]["SKYPILOT_DISABLE_USAGE_COLLECTION"] == "1"
    assert 42_000 <= int(found["environment"]["SKYPILOT_API_SERVER_LOCAL_PORT"]) < 46_000


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ('say({"error": "no quota", "kind": "ResourcesUnavailableError"})', BridgeError, "no quota"),
        ('say({"error": "refused", "kind": "X", "unreachable": True})', NoSkyPilot, "refused"),
        ('print("Traceback: no such module"); sys.exit(1)', NoSkyPilot, "without an answer; Traceback: no such"),
        ('os.write(out, b"x" * 5_000_000)', NoSkyPilot, "without an answer"),
        ('os.write(out, b"no JSON\\n")', NoSkyPilot, "is no JSON"),
        ("time.sleep(60)", NoSkyPilot, "within 1 s"),
    ],
)
def test_what_is_no_answer_is_an_error_in_time(
    program: Callable[[str], SkyPilot], body: str, error: type[BridgeError], words: str
) -> None:
    sky = program(body)
    began = time.monotonic()
    with pytest.raises(BridgeError, match=words) as told:
        sky.call("look", limit_s=1 if "sleep" in body else 20)
    assert type(told.value) is error
    assert time.monotonic() - began < 20


def test_an_interpreter_that_is_not_there_is_no_skypilot(tmp_path: Path) -> None:
    with pytest.raises(NoSkyPilot):
        SkyPilot(tmp_path / "python", tmp_path, environ={}).call("look", limit_s=5)


SSH = """#!{python}
# In place of ssh: it listens where it was told to, and says how it was called.
import json, os, re, signal, socket, sys, time
with open({said!r}, "a") as said:
    said.write(json.dumps([os.getpid(), *sys.argv]) + "\\n")
{body}
port = int(re.search(r"127.0.0.1:(\\d+):", " ".join(sys.argv)).group(1))
server = socket.create_server(("127.0.0.1", port))
while True:
    near, _ = server.accept()
    near.sendall(b"far")
    near.close()
"""


class Ssh:
    def __init__(self, place: Path) -> None:
        self.place = place
        self.said = place / "said"

    def write(self, body: str = "") -> None:
        path = self.place / "ssh"
        path.write_text(SSH.format(python=sys.executable, said=str(self.said), body=body))
        path.chmod(0o755)

    def calls(self) -> list[list[str]]:
        return [[str(part) for part in json.loads(line)] for line in self.said.read_text().splitlines()]


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ssh:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = Ssh(tmp_path)
    made.write()
    return made


def entry(place: Path) -> Entry:
    return Entry("ly-x", place / "config", place / "key", place / "known", {"PATH": os.environ["PATH"]})


def answer(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as near:
        return near.recv(10)


def test_a_tunnel_is_open_for_the_block_and_ends_with_it(ssh: Ssh) -> None:
    with tunnel(entry(ssh.place), 8265) as port:
        assert answer(port) == b"far"
        [[pid, _, *arguments]] = ssh.calls()
        assert listens(int(pid), port)
        assert not listens(os.getpid(), port)
        text = " ".join(arguments)
        for each in (f"-F {ssh.place}/config", f"-i {ssh.place}/key", f"-L 127.0.0.1:{port}:127.0.0.1:8265"):
            assert each in text
        for each in ("ExitOnForwardFailure=yes", "StrictHostKeyChecking=accept-new", "HostKeyAlias=ly-x"):
            assert each in text
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ConnectionRefusedError):
        answer(port)


def test_a_tunnel_that_broke_is_opened_anew_on_the_same_port(ssh: Ssh) -> None:
    with tunnel(entry(ssh.place), 8265) as port:
        os.kill(int(ssh.calls()[0][0]), signal.SIGKILL)
        deadline = time.monotonic() + 20
        while len(ssh.calls()) < 2 or not listens(int(ssh.calls()[-1][0]), port):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert answer(port) == b"far"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('Permission denied', file=sys.stderr); sys.exit(255)", "Permission denied"),
        ("time.sleep(60)", "does not open"),
        ("print('Host key verification failed.', file=sys.stderr); sys.exit(255)", "not the one of before"),
    ],
)
def test_what_does_not_open_is_given_up_in_time_and_leaves_no_process(ssh: Ssh, body: str, words: str) -> None:
    ssh.write(body)
    began = time.monotonic()
    with pytest.raises(HostsNotReady, match=words), tunnel(entry(ssh.place), 8265, open_s=3):
        pass
    assert time.monotonic() - began < 20
    for pid, *_ in ssh.calls():
        assert not Path(f"/proc/{pid}").exists()


def test_a_port_of_somebody_else_is_not_the_tunnels(ssh: Ssh) -> None:
    """The token would be sent there."""
    # Its own child stands for the stranger: another process, and it gets there first.
    ssh.write(
        "child = os.fork()\nif child:\n    os.wait()\nelse:\n    import ctypes; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)"
    )
    with pytest.raises(HostsNotReady, match="does not open"), tunnel(entry(ssh.place), 8265, open_s=3):
        pass


def test_a_tunnel_ends_with_the_process_that_uses_it(ssh: Ssh) -> None:
    """However that ends."""
    program = (
        "import sys, time; from pathlib import Path; from activities.hosts.skypilot.tunnel import Entry, tunnel\n"
        "p = Path(sys.argv[1]); e = Entry('x', p, p, p, {})\n"
        "with tunnel(e, 1) as port:\n    print(port, flush=True); time.sleep(60)"
    )
    user = subprocess.Popen([sys.executable, "-c", program, str(ssh.place)], stdout=subprocess.PIPE, text=True)
    assert user.stdout
    port = int(user.stdout.readline())
    assert answer(port) == b"far"
    user.kill()
    user.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{ssh.calls()[0][0]}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
