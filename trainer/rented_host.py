"""The first thing that runs on a rented host: makes the host's own order and becomes the hosting service.

    python3 -m trainer.rented_host     (in the directory that SkyPilot brought: this package, and the files below)

`host.json` says what all hosts of the run share, `token` is the run's token, `storage.json` the storage's address and
keys as environment variables. All three are private files (0600). Which host this is comes from SKYPILOT_NODE_RANK and
SKYPILOT_NODE_IPS; the first is the head. The keys reach the hosting service by its environment and nothing else:
not by arguments, and not by anything that SkyPilot records. Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from trainer.hosting import REFUSED
from trainer.private import NotPrivate, create_private_directory, read_private_file, write_private_file

HOST_FIELDS: Final[dict[str, type | tuple[type, ...]]] = {
    "schema": int,
    "run_key": str,
    "stem": str,  # of this run's names on a host, at most 13 characters
    "count": int,
    "device": str,  # cpu | cuda
    "storage": str,  # s3://bucket/prefix/<run key>
    "environments": str,  # root of application environments on the host; empty: the default
    "not_after_s": (int, float),
    "first_port": int,  # the same PORTS ports on every host
}
"""`host.json`. It holds no secret."""

PORTS: Final = 5
"""GCS, dashboard, Ray Client's, the runtime environment agent's, the dashboard agent's."""
KEPT: Final = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|LD_LIBRARY_PATH|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|XDG_CACHE_HOME"
    r"|PIP_\w+|NVIDIA_\w+"
)
"""What of SkyPilot's environment the service gets. Nothing of SkyPilot's own Ray."""
GIVEN: Final = re.compile(r"AWS_[A-Z0-9_]+")
"""What `storage.json` may set."""
MOST_OBJECTS: Final = 2 * 10**9
"""Object store of a host, bytes: training data is read from storage, so it holds little."""
LEAST_OBJECTS: Final = 80 * 10**6
_SIOCGIFADDR: Final = 0x8915


class BadHost(Exception):
    """This is not a host as SkyPilot sets one up, or what it brought is not what was sent."""


def main() -> int:
    """Prepare, then become the hosting service; returns only when refused."""
    os.umask(0o077)
    try:
        brought = Path.cwd()
        host = read_host(brought / "host.json")
        index, addresses = whoami(os.environ, host["count"])
        keys = read_keys(brought / "storage.json")
        read_private_file(brought / "token", "the run's token")
        # Node-local: on Slurm the home is one directory for all nodes.
        base = Path(f"/tmp/{host['stem']}-{index}")  # noqa: S108 (fresh, 0700, below a sticky directory)
        create_private_directory(base)
        order = host_order(host, index, addresses, base, brought / "token")
        write_private_file(base / "order.json", json.dumps(order, indent=1).encode())
    except (BadHost, NotPrivate, OSError) as error:
        print(f"refused: {error}", file=sys.stderr, flush=True)
        return REFUSED
    else:
        print(f"host {index} of {len(addresses)}: {order['address']} on {order['interface']}, {base}", flush=True)
        _become(base / "order.json", keys)


def read_host(path: Path) -> dict[str, Any]:
    """Read and check `host.json`. Raises BadHost or NotPrivate."""
    host = _object(path, "the run's order for its hosts")
    for name, kind in HOST_FIELDS.items():
        if not isinstance(host.get(name), kind) or isinstance(host.get(name), bool):
            raise BadHost(f"{path}: {name} is missing or of the wrong type")
    if set(host) != set(HOST_FIELDS) or host["schema"] != 1 or not re.fullmatch(r"[a-z0-9-]{1,13}", host["stem"]):
        raise BadHost(f"{path} is no order of schema 1")
    return host


def read_keys(path: Path) -> dict[str, str]:
    """The storage's address and keys. Raises BadHost or NotPrivate."""
    keys = _object(path, "the storage's keys")
    if not all(GIVEN.fullmatch(name) and isinstance(value, str) for name, value in keys.items()):
        raise BadHost(f"{path} holds something else than AWS_... variables")
    return keys


def _object(path: Path, what: str) -> dict[str, Any]:
    try:
        told = json.loads(read_private_file(path, what))
    except ValueError as error:
        raise BadHost(f"{path} is not JSON") from error
    if not isinstance(told, dict):
        raise BadHost(f"{path} holds no JSON object")
    return told


def whoami(environ: Mapping[str, str], count: int) -> tuple[int, list[str]]:
    """This host's index, and the addresses of all, the head's first. Raises BadHost."""
    rank, listed = environ.get("SKYPILOT_NODE_RANK", ""), environ.get("SKYPILOT_NODE_IPS", "").split()
    if not rank.isdigit() or not listed:
        raise BadHost("SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS are not set; SkyPilot runs this, not a person")
    if len(listed) != count or len(set(listed)) != count or int(rank) >= count:
        # Part of a cluster is not a cluster (skypilot #509, #7254).
        raise BadHost(f"the run wants {count} hosts with an address each; SkyPilot gave {len(listed)}: {listed}")
    return int(rank), listed


def host_order(host: Mapping[str, Any], index: int, addresses: list[str], base: Path, token: Path) -> dict[str, Any]:
    """The order of `trainer.hosting` for this host."""
    store, shared = object_store(Path("/dev/shm"))  # noqa: S108
    first = host["first_port"]
    return {
        "schema": 1,
        "run_key": host["run_key"],
        "index": index,
        "role": "head" if index == 0 else "worker",
        "device": host["device"],
        "storage": host["storage"],
        "private_dir": str(base / "p"),
        "temp_dir": str(base / "t"),
        "shared_memory_dir": f"/dev/shm/{base.name}" if shared else "",  # noqa: S108
        "token_file": str(token),
        "address": addresses[index],
        "interface": interface_of(addresses[index]),
        "gpus": gpus(os.environ) if host["device"] == "cuda" else [],
        "environments": host["environments"],
        "not_after_s": host["not_after_s"],
        "ray": {
            "head_address": addresses[0],
            "gcs_port": first,
            # On the head's own loopback: who wants to reach it comes by SSH.
            "dashboard_host": "127.0.0.1",
            "dashboard_port": first + 1,
            "client_port": first + 2,
            "runtime_env_port": first + 3,
            "agent_port": first + 4,
            "worker_ports": [0, 0],
            "num_cpus": cpus(os.environ),
            "object_store_bytes": store,
        },
    }


def interface_of(address: str) -> str:
    """The name of the interface that has this IPv4 address. Raises BadHost: then the address is not this host's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise BadHost(f"SkyPilot says that this host is {address}, and no interface here has that address")


def gpus(environ: Mapping[str, str]) -> list[str]:
    """The CUDA devices that this host may use."""
    if visible := environ.get("CUDA_VISIBLE_DEVICES", ""):
        return [each.strip() for each in visible.split(",") if each.strip()]
    return sorted(each.name[6:] for each in Path("/dev").glob("nvidia[0-9]*"))


def cpus(environ: Mapping[str, str]) -> int:
    """What Ray is offered: the allocation where Slurm names one, else what this process may run on. At least two, which
    are logical: a training worker and whatever Ray Train runs beside it."""
    allocated = environ.get("SLURM_CPUS_ON_NODE", "")
    return max(2, int(allocated) if allocated.isdigit() else len(os.sched_getaffinity(0)))


def object_store(shared_memory: Path) -> tuple[int, bool]:
    """Bytes for the object store, and whether they fit into shared memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = shutil.disk_usage(shared_memory).free if shared_memory.is_dir() else 0
    size = int(min(MOST_OBJECTS, memory * 0.2, free * 0.8))
    return (size, True) if size >= LEAST_OBJECTS else (2 * LEAST_OBJECTS, False)


def _become(order: Path, keys: Mapping[str, str]) -> NoReturn:
    """The same process, so that whoever ends this task ends the service. It is in the foreground, and `exec` of the
    shell brought it here: SkyPilot's `bash -i` ignores SIGTERM."""
    kept = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    # The environment of applications is made for the host's own interpreter, not for one of SkyPilot's.
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    command = [python, "-B", "-m", "trainer.hosting", "--order", str(order)]
    os.execve(python, command, {**kept, **keys})  # noqa: S606


if __name__ == "__main__":
    sys.exit(main())
