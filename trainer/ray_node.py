"""One node of the application's Ray: its command, its environment, and the question whether it really answers.

Kept apart from any other Ray on the machine: own address, ports, temporary directory, object store and environment.
Standard library only.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.constants import TRAIN_SETTINGS
from trainer.processes import dies_with_parent

CUSTODY_MARK = "LANYARD_CUSTODY"
"""Every process of a run carries this variable, with the run's key, by inheritance."""

NODE_SETTINGS: dict[str, str] = {
    # Ray listens on every interface whatever address it is given, so nothing runs without a token.
    "RAY_AUTH_MODE": "token",
    # Logs of Ray's own processes stay small on a run of days: 8 MiB, twice.
    "RAY_ROTATION_MAX_BYTES": str(8 * 2**20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    # A worker node waits this long (one try a second) for a head that is slow to start; Ray's 40 s is too short on a
    # loaded machine. The service itself waits for the head's port first.
    "RAY_NUM_REDIS_GET_RETRIES": "120",
    # Each of the dashboard's modules has this long to start, or the whole head ends; Ray's 30 s is too short on a
    # loaded machine (measured).
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "180",
    # A stopped job gets this long before SIGKILL; Ray's 3 s would end the lease keeper within its own 10 s of grace.
    "RAY_JOB_STOP_WAIT_TIME_S": "15",
    # Ray's Prometheus endpoints bind every interface and ask for no token. The agents' are turned off by this...
    "RAY_enable_metrics_collection": "0",
    # ...and those of autoscaler and dashboard by a port that cannot be bound: Ray logs that, and goes on.
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
    "PYTHONUNBUFFERED": "1",
}


NODE_REFUSED = "refused"
"""What `trainer.node_lookup` prints where the GCS refuses the token."""


def command(python: Path, order: Mapping[str, Any]) -> list[str]:
    """`ray start --block` for a host's order (see `trainer.hosting.Order`)."""
    ray = order["ray"]
    arguments = [
        "--block",
        f"--node-ip-address={order['address']}",
        f"--temp-dir={ray_temp_dir(order)}",
        f"--num-cpus={ray['num_cpus']}",
        f"--num-gpus={len(order['gpus'])}",
        f"--object-store-memory={ray['object_store_bytes']}",
        f"--min-worker-port={ray['worker_ports'][0]}",
        f"--max-worker-port={ray['worker_ports'][1]}",
        # Its default lies in the range of ephemeral ports, and the head's agent also binds it on 127.0.0.1.
        f"--dashboard-agent-listen-port={ray['agent_port']}",
        "--disable-usage-stats",
    ]
    if order["shared_memory_dir"]:
        arguments.append(f"--plasma-directory={order['shared_memory_dir']}")
    if order["role"] == "head":
        arguments += [
            "--head",
            f"--port={ray['gcs_port']}",
            "--include-dashboard=true",
            f"--dashboard-host={ray['dashboard_host']}",
            f"--dashboard-port={ray['dashboard_port']}",
            # Nothing here uses the Ray Client, but its server cannot be turned off, and the default port is everyone's.
            f"--ray-client-server-port={ray['client_port']}",
            # Without it, that server asks the raylet for it, waits 30 s at most and then ends the whole head: measured
            # on a loaded machine.
            f"--runtime-env-agent-port={ray['runtime_env_port']}",
        ]
    else:
        arguments.append(f"--address={gcs_address(order)}")
    return [str(python), str(python.with_name("ray")), "start", *arguments]


def environment(order: Mapping[str, Any], python: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The node's environment: ``base`` without anything that would lead its Ray or its Python elsewhere."""
    foreign = ("RAY_", "PYTHON", "VIRTUAL_ENV", "CONDA", "TEMPORAL_")
    kept = {name: value for name, value in base.items() if not name.startswith(foreign)}
    node = {
        **kept,
        **TRAIN_SETTINGS,
        **NODE_SETTINGS,
        CUSTODY_MARK: str(order["run_key"]),
        "RAY_AUTH_TOKEN_PATH": str(token_path(order)),
        "RAY_TMPDIR": str(ray_temp_dir(order)),
        "TMPDIR": str(order["temp_dir"]),
        # A job's `python` is the application's.
        "PATH": f"{python.parent}{os.pathsep}{base.get('PATH', '/usr/bin:/bin')}",
    }
    if order["interface"]:
        node["GLOO_SOCKET_IFNAME"] = node["NCCL_SOCKET_IFNAME"] = str(order["interface"])
    if order["gpus"]:
        node["CUDA_VISIBLE_DEVICES"] = ",".join(order["gpus"])
    return node


def token_path(order: Mapping[str, Any]) -> Path:
    """Where this host keeps the run's token (0600)."""
    return Path(order["private_dir"]) / "token"


def ray_temp_dir(order: Mapping[str, Any]) -> Path:
    """Ray's own temporary directory. Ray opens it to everybody (mode 0777, measured), so it lies inside of ours, which
    is 0700, and its name is one character because socket paths are short."""
    return Path(order["temp_dir"]) / "r"


def gcs_address(order: Mapping[str, Any]) -> str:
    """`address:port` of the head's GCS."""
    return f"{order['ray']['head_address']}:{order['ray']['gcs_port']}"


def dashboard_url(order: Mapping[str, Any]) -> str:
    """The head's dashboard, which also serves the Jobs and the state API."""
    ray = order["ray"]
    return f"http://{ray['dashboard_host']}:{ray['dashboard_port']}"


def listens(address: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def node_id(order: Mapping[str, Any], token: str, timeout_s: float = 3.0) -> str | None:
    """This host's node id once Ray's own list of nodes shows it alive; None while it does not answer.

    Raises PermissionError when Ray answers and refuses the token: waiting would not help.
    """
    url = f"{dashboard_url(order)}/api/v0/nodes"  # http by construction
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})  # noqa: S310
    # A proxy from the environment must not get between a host and its own head.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            nodes = json.load(answer)["data"]["result"]["result"]
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise PermissionError(
                f"Ray at {dashboard_url(order)} refuses this run's token ({error.code}): another cluster has that "
                "address, or the hosts were given different secrets"
            ) from error
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    alive = [each for each in nodes if each["node_ip"] == order["address"] and each["state"] == "ALIVE"]
    return str(alive[0]["node_id"]) if len(alive) == 1 else None


def asker(order: Mapping[str, Any], python: Path) -> Callable[[str], str | None]:
    """How this host asks for its own node id: the head's dashboard where it can be reached, else the GCS.

    A dashboard on the head's loopback is out of a worker's reach.
    """
    if (
        order["role"] == "worker"
        and _is_loopback(order["ray"]["dashboard_host"])
        and not _is_loopback(order["address"])
    ):
        return GcsAsker(order, python)
    return lambda token: node_id(order, token)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


class GcsAsker:
    """`trainer.node_lookup` in the application's interpreter: started at the first question, read without waiting."""

    def __init__(self, order: Mapping[str, Any], python: Path) -> None:
        self._order, self._python = order, python
        self.output: int | None = None
        self._read = b""
        self._not_before = 0.0

    def __call__(self, token: str) -> str | None:
        """The node id once the GCS shows the node alive, None before. Raises PermissionError as `node_id` does."""
        if self.output is None:
            if time.monotonic() < self._not_before:
                return None
            self._not_before = time.monotonic() + 2.0
            self.output = self._start()
        try:
            while piece := os.read(self.output, 4096):
                self._read += piece
        except BlockingIOError:
            return None
        # It ended. Whoever reaps this process's children has its exit status; what it wrote says as much.
        os.close(self.output)
        said, self.output, self._read = self._read.decode(errors="replace").split(), None, b""
        if said == [NODE_REFUSED]:
            raise PermissionError(
                f"Ray at {gcs_address(self._order)} refuses this run's token: another cluster has that address, or "
                "the hosts were given different secrets"
            )
        return said[0] if len(said) == 1 else None

    def _start(self) -> int:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        command = [str(self._python), "-B", "-m", "trainer.node_lookup", gcs_address(self._order)]
        log = os.open(Path(self._order["private_dir"]) / "lookup.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            started = subprocess.Popen(
                [*dies_with_parent(), *command, self._order["address"]],
                # Below this package, and with nothing of the node's but what its own Ray has.
                env={
                    **environment(self._order, self._python, os.environ),
                    "PYTHONPATH": str(Path(__file__).parents[1]),
                },
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=log,
            )
            started.returncode = 0  # the service reaps it with everything else
        finally:
            os.close(writing)
            os.close(log)
        return reading
