"""Two Ray nodes on loopback the way a person starts them: `ray start`, `ray job submit`, SIGTERM to exact pids.

For the peers of the benchmarks, in the application's Python. Nothing here is the operator's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainer.processes import Process, become_subreaper, descendants, send

START_LIMIT_S = 180.0
JOB_LIMIT_S = 600.0
WORKER_TRIES = 3
STOP_GRACE_S = 6.0
"""From SIGTERM to SIGKILL, as a hosting service has it. Left alone, Ray's nodes take 32 s to stop (measured): nobody
who stops them by hand waits that long, and to compare with it would flatter the guarded run."""
STOP_LIMIT_S = 30.0
PORTS = range(20_000, 32_000)
"""Below the kernel's ephemeral range, so that nothing takes one by accident before Ray binds it."""


class Trouble(Exception):
    """The peer could not be measured; the message says why."""


class PlainCluster:
    """A head and a worker node with token authentication, each a child process of this one."""

    def __init__(self, scratch: Path, settings: Mapping[str, str] | None = None) -> None:
        """``scratch``: an empty private directory with a short path (Ray's sockets lie below it); ``settings``: more of
        the nodes' environment."""
        become_subreaper()
        self._scratch = scratch
        self._binaries = Path(sys.executable).parent
        network = f"127.{random.SystemRandom().randrange(2, 255)}.{random.SystemRandom().randrange(256)}"
        self._head, self._worker = f"{network}.2", f"{network}.3"
        self._gcs, self._dashboard, self._client, *agents = free_ports(7)
        self._agents = agents[:2]
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._token = secrets.token_hex(32)
        token = scratch / "token"
        token.touch(mode=0o600)
        token.write_text(self._token)
        foreign = ("RAY_", "PYTHON", "VIRTUAL_ENV", "TEMPORAL_", "LANYARD_DEPLOYMENT", "LANYARD_SECRET", "LANYARD_HOME")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(foreign)},
            "PATH": f"{self._binaries}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "GLOO_SOCKET_IFNAME": "lo",
            "AUTOSCALER_METRIC_PORT": str(agents[2]),
            "DASHBOARD_METRIC_PORT": str(agents[3]),
            **(settings or {}),
        }

    @property
    def dashboard(self) -> str:
        return f"http://{self._head}:{self._dashboard}"

    def start(self) -> None:
        """Start both nodes and wait until the head lists both. Raises Trouble."""
        head = ["--head", f"--port={self._gcs}", f"--dashboard-host={self._head}", "--include-dashboard=true"]
        head += [f"--dashboard-port={self._dashboard}", f"--ray-client-server-port={self._client}"]
        self._start_node(0, self._head, head)
        deadline = time.monotonic() + START_LIMIT_S
        while not listens(self._head, self._gcs):
            self._wait_a_moment(deadline, "the head to listen")
        worker = [f"--address={self._head}:{self._gcs}"]
        self._start_node(1, self._worker, worker)
        again = WORKER_TRIES - 1
        while self._alive() != 2:
            if again and self._nodes[1].poll() is not None:
                # It gives up on a head that is slow to register; whoever sees that starts it again.
                again -= 1
                self._nodes.pop()
                self._start_node(1, self._worker, worker)
            self._wait_a_moment(deadline, "both nodes to be listed")

    def submit(self, submission: str, entrypoint: Sequence[str], source: Path, variables: Mapping[str, str]) -> None:
        """`ray job submit`, which returns when the job has succeeded. Raises Trouble."""
        done = self._submit(submission, entrypoint, source, variables, [])
        if done.returncode != 0:
            raise Trouble(f"ray job submit ended with {done.returncode}; the end of its log:\n{tail(done.args[-1])}")

    def submit_only(
        self, submission: str, entrypoint: Sequence[str], source: Path, variables: Mapping[str, str]
    ) -> None:
        """`ray job submit --no-wait`. Raises Trouble."""
        done = self._submit(submission, entrypoint, source, variables, ["--no-wait"])
        if done.returncode != 0:
            raise Trouble(f"ray job submit ended with {done.returncode}")

    def stop_job(self, submission: str) -> None:
        """`ray job stop`; what it does not end goes with the nodes."""
        command = [str(self._binaries / "ray"), "job", "stop", "--address", self.dashboard, submission]
        subprocess.run(command, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)

    def stop(self) -> None:
        """SIGTERM to exactly the two nodes, then SIGKILL to what is left. Raises Trouble when anything stays."""
        for node in reversed(self._nodes):
            node.send_signal(signal.SIGTERM)
        kill_at = time.monotonic() + STOP_GRACE_S
        while self._below():
            if time.monotonic() > kill_at:
                for process in self._below():
                    send(process, signal.SIGKILL)
            if time.monotonic() > kill_at + STOP_LIMIT_S:
                raise Trouble(f"{len(self._below())} processes of the nodes withstood SIGKILL")
            time.sleep(0.05)
        self._nodes.clear()

    def _below(self) -> list[Process]:
        for node in self._nodes:
            node.poll()
        return descendants(os.getpid())

    def _submit(
        self,
        submission: str,
        entrypoint: Sequence[str],
        source: Path,
        variables: Mapping[str, str],
        options: Sequence[str],
    ) -> subprocess.CompletedProcess[bytes]:
        command = [str(self._binaries / "ray"), "job", "submit", "--address", self.dashboard, *options]
        command += ["--submission-id", submission, "--working-dir", str(source)]
        command += ["--runtime-env-json", json.dumps({"env_vars": dict(variables)}), "--", *entrypoint]
        log = self._scratch / "job.log"
        with log.open("wb") as output:
            done = subprocess.run(
                command,
                cwd=self._scratch,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=JOB_LIMIT_S,
            )
        return subprocess.CompletedProcess([*command, str(log)], done.returncode)

    def _start_node(self, index: int, address: str, options: Sequence[str]) -> None:
        place = self._scratch / str(index)
        command = [str(self._binaries / "ray"), "start", "--block", f"--node-ip-address={address}", *options]
        command += [f"--temp-dir={place}", "--num-cpus=2", "--object-store-memory=200000000", "--disable-usage-stats"]
        # The default port of agents is one for all nodes of a machine.
        command.append(f"--dashboard-agent-listen-port={self._agents[index]}")
        with (self._scratch / f"node-{index}.log").open("wb") as log:
            node = subprocess.Popen(
                command, cwd=self._scratch, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._nodes.append(node)

    def _alive(self) -> int:
        request = urllib.request.Request(
            f"{self.dashboard}/api/v0/nodes", headers={"Authorization": f"Bearer {self._token}"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=5) as answer:
                nodes = json.load(answer)["data"]["result"]["result"]
        except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError):
            return 0
        return sum(node["state"] == "ALIVE" for node in nodes)

    def _wait_a_moment(self, deadline: float, what: str) -> None:
        for index, node in enumerate(self._nodes):
            if node.poll() is not None:
                log = self._scratch / f"node-{index}.log"
                raise Trouble(f"node {index} ended with {node.returncode}; the end of its log:\n{tail(log)}")
        if time.monotonic() > deadline:
            raise Trouble(f"{START_LIMIT_S:.0f} s passed waiting for {what}")
        time.sleep(0.1)


def order(run_key: str, storage: str, recipe: Mapping[str, Any], pins: Mapping[str, str]) -> dict[str, Any]:
    """The training application's order (LANYARD_JOB), as its own documentation describes it."""
    return {
        "schema": 1,
        "run_key": run_key,
        "submission_id": f"{run_key}-train",
        "train_name": "main",
        "storage": f"{storage}/{run_key}",
        "workload": {"kind": "regression", "recipe": dict(recipe)},
        "world_size": 2,
        "device": "cpu",
        "pins": dict(pins),
        "drill": None,
        "resume": None,
        "failures": {"worker": 2, "controller": 1, "preemption": 1},
    }


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What every peer is told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--scratch", type=Path, required=True, help="an empty private directory with a short path")
    parser.add_argument("--source", type=Path, required=True, help="a directory that holds the `trainer` package")
    parser.add_argument("--storage", required=True, help="s3:// prefix; endpoint and keys come from the environment")
    parser.add_argument("--recipe", type=json.loads, required=True, help="workload.recipe, complete, JSON")
    parser.add_argument("--pins", type=json.loads, required=True, help="versions to enforce, JSON")
    return parser


def end_on_sigterm() -> None:
    """SIGTERM becomes SystemExit, so that `finally` stops the nodes."""

    def leave(_number: int, _frame: object) -> NoReturn:
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, leave)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now, held until all are chosen."""
    held: list[socket.socket] = []
    try:
        for port in random.SystemRandom().sample(PORTS, k=len(PORTS)):
            probe = socket.socket()
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                probe.close()
                continue
            held.append(probe)
            if len(held) == count:
                return [each.getsockname()[1] for each in held]
    finally:
        for probe in held:
            probe.close()
    raise Trouble(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")


def listens(address: str, port: int) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False


def tail(log: str | Path) -> str:
    """The last lines of a log."""
    return "\n".join(Path(log).read_text(errors="replace").splitlines()[-12:])
