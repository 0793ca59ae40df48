"""One bring-up of SkyPilot and Slurm for a session of tests, by slurm.sh; and what is on the nodes, from outside."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

from activities.hosts.skypilot.bridge import SkyPilot

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("slurm.sh")
NODES = 2
INFRA = "slurm/netns"


class Site:
    """Names, addresses and ports follow from the checkout, so that two checkouts never meet."""

    def __init__(self) -> None:
        digest = hashlib.sha256(str(CHECKOUT).encode()).digest()
        self.base = Path(os.environ.get("LANYARD_TEST_SLURM") or f"/srv/lanyard-slurm-{digest.hex()[:8]}")
        self.python = Path(os.environ.get("LANYARD_SKYPILOT_PYTHON") or CHECKOUT / ".venv-skypilot" / "bin" / "python")
        self.environments = os.environ.get("LANYARD_TEST_ENVIRONMENTS") or str(self.base / "environments")
        self.subnet = f"10.{64 + digest[0] % 64}.{digest[1]}"
        self.first_port = _free_block(12_000 + digest[2] % 64 * 100)
        self._given = {
            "BASE": str(self.base),
            "SKY_PYTHON": str(self.python),
            "ENVIRONMENTS": self.environments,
            "TAG": f"l{digest.hex()[:4]}",
            "SUBNET": self.subnet,
            "PB": str(self.first_port),
            "JOBUSER": f"lanyard{digest.hex()[:6]}",
            "NODES": str(NODES),
        }

    @property
    def address(self) -> str:
        """This machine's, as the nodes reach it."""
        return f"{self.subnet}.1"

    @property
    def sky(self) -> SkyPilot:
        return SkyPilot(self.python, self.base / "home", port=self.first_port + 80)

    def settings(self) -> dict[str, str]:
        """Of a worker that uses this SkyPilot."""
        return {
            "LANYARD_SKYPILOT_PYTHON": str(self.python),
            "LANYARD_SKYPILOT_HOME": str(self.base / "home"),
            "LANYARD_SKYPILOT_ENVIRONMENTS": self.environments,
            "SKYPILOT_API_SERVER_LOCAL_PORT": str(self.first_port + 80),
        }

    @contextlib.contextmanager
    def up(self) -> Iterator[Site]:
        self.base.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._script("install", within_s=1800)
        try:
            self._script("up", within_s=300)
            yield self
        finally:
            self._script("down", within_s=300)

    def queue(self) -> list[str]:
        """Every job of Slurm that is not over, of whatever user, with its name and comment."""
        asked = ["squeue", "--noheader", "--format=%i %T %j %k"]
        told = subprocess.run(
            asked,
            env={**os.environ, "SLURM_CONF": str(self.base / "slurm/slurm.conf")},
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
        return told.stdout.splitlines()

    def epilog(self) -> str:
        """What Slurm's epilog found at the end of the last job, on each node, and removed."""
        found = []
        for node in (f"n{each + 1}" for each in range(NODES)):
            text = (self.base / "log" / f"epilog.{node}").read_text()
            found.append(text[text.rindex(f"{node}, job") :])
        return "".join(found)

    def kill_api_server(self, *, whole: bool) -> int:
        """SkyPilot's API server, and with `whole` everything below it; how many processes. Its executors survive its
        main process, and hold what they hold."""
        port = self.first_port + 80
        listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN and each.pid]
        server = next(each.pid for each in listening if each.laddr and each.laddr.port == port)
        tree = [psutil.Process(server)]
        if whole:
            tree += tree[0].children(recursive=True)
        for each in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(tree, 10)
        return len(tree)

    def left(self) -> dict[str, list[str]]:
        """What is on the nodes that is not theirs: processes, listeners, files."""
        found = {}
        for node in (f"n{each + 1}" for each in range(NODES)):
            for what in ("processes", "listeners", "files"):
                if lines := self._script(what, node).splitlines():
                    found[f"{what} of {node}"] = lines
        return found

    def shared(self) -> list[str]:
        """Directories of clusters in the home that all nodes share: each holds a run's private files."""
        place = self.base / "jobhome" / ".sky_clusters"
        return sorted(each.name for each in place.iterdir()) if place.exists() else []

    def wait_until_clean(self, seconds: float) -> dict[str, list[str]]:
        """Slurm's own epilog takes a moment after the job."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(1)
        return left

    def _script(self, *asked: str, within_s: float = 60) -> str:
        answer = subprocess.run(
            [str(SCRIPT), *asked],
            env={**os.environ, **self._given},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
        )
        assert answer.returncode == 0, f"slurm.sh {' '.join(asked)}: {answer.stderr[-2000:]}"
        return answer.stdout


@contextlib.contextmanager
def s3_for(site: Site, place: Path) -> Iterator[dict[str, str]]:
    """An S3 server that this machine and the nodes reach by one address; yields the environment that reaches it."""
    juicefs = shutil.which("juicefs", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert juicefs
    meta = f"sqlite3://{place}/meta.db"
    keys = {"MINIO_ROOT_USER": "hosts", "MINIO_ROOT_PASSWORD": f"canary-{os.urandom(8).hex()}"}
    subprocess.run(
        [juicefs, "format", "--no-update", meta, "lanyard", "--storage", "file", "--bucket", f"{place}/data/"],
        check=True,
        capture_output=True,
    )
    url = f"http://{site.address}:{site.first_port + 90}"
    with (place / "log").open("wb") as log:
        command = [juicefs, "--no-agent", "gateway", "--no-usage-report", "--backup-meta", "0"]
        metrics = f"127.0.0.1:{site.first_port + 91}"
        server = subprocess.Popen(
            [*command, "--metrics", metrics, meta, url.removeprefix("http://")],
            env={**os.environ, **keys, "HOME": str(place)},
            stdout=log,
            stderr=log,
        )
    try:
        for _ in range(300):
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(url, trust_env=False)
                break
            time.sleep(0.1)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": keys["MINIO_ROOT_USER"],
            "AWS_SECRET_ACCESS_KEY": keys["MINIO_ROOT_PASSWORD"],
        }
    finally:
        server.terminate()
        server.wait(20)


@contextlib.contextmanager
def forwarded(address: str, port: int, far: int) -> Iterator[str]:
    """What listens on `far` of this machine's loopback, for the nodes too; yields its URL there."""

    class Forward(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", far), timeout=30) as other:
                other.settimeout(None)
                back = threading.Thread(target=_copy, args=(other, self.request), daemon=True)
                back.start()
                _copy(self.request, other)
                back.join(30)

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True
        block_on_close = False

    with Server((address, port), Forward) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{address}:{port}"
        server.shutdown()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(65536):
            other.sendall(data)
    with contextlib.suppress(OSError):
        other.shutdown(socket.SHUT_WR)


def _free_block(first: int) -> int:
    """The first of a hundred ports of which those that are used are free."""
    for start in range(first, 19_900, 100):
        taken = False
        for offset in (17, 18, 22, 80, 90, 91):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("0.0.0.0", start + offset))
                except OSError:
                    taken = True
        if not taken:
            return start
    raise AssertionError("no hundred free ports")
