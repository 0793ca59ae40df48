"""What is decided once for a run's hosts on this machine: addresses, ports, directories; and what it has to offer."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
import socket
import time
from pathlib import Path

from pydantic import Field, TypeAdapter, ValidationError

from activities.hosts import AbsenceUnknown, HostsFailed
from trainer.machine import boot_id
from trainer.private import write_private_file
from trainer.processes import this_process
from workflows.evidence import Frozen, HostsOrder

PORTS = range(20_000, 32_000)
"""Below the kernel's usual ephemeral range, so that nothing takes a chosen port by accident before Ray binds it."""


class LocalOptions(Frozen):
    """The size of a local host. run.json leaves it at the defaults; tests of the provider alone set it."""

    cpus: int = Field(default=2, ge=1, le=1024)
    """Logical CPUs that each host offers to Ray."""
    object_store_mb: int = Field(default=200, ge=80, le=1_000_000)
    """Object store of each host, MB."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Decided once for a run on this machine."""

    boot_id: str
    since_tick: int
    """No process of the run started before this tick of this boot."""
    addresses: tuple[str, ...]
    temp_dirs: tuple[str, ...]
    shared_memory_dirs: tuple[str, ...]
    """Empty where /dev/shm is too small: then Ray chooses."""
    ports: tuple[int, ...]
    """GCS, dashboard, Ray Client's, the runtime environment agent's, then one agent port per host."""

    @property
    def directories(self) -> list[Path]:
        """What exists outside of the run's own directory, by exact name."""
        return [Path(each) for each in (*self.temp_dirs, *self.shared_memory_dirs) if each]

    @property
    def since(self) -> int | None:
        """`since_tick`, or None when the machine was started again since: then nothing of the run can run."""
        return self.since_tick if self.boot_id == boot_id() else None


def read_plan(directory: Path) -> Plan | None:
    """The plan recorded in a run's directory, None when there is none. Raises AbsenceUnknown."""
    path = directory / "plan.json"
    try:
        return TypeAdapter(Plan).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise AbsenceUnknown(f"{path} cannot be read: {error}") from error


def make_plan(directory: Path, order: HostsOrder) -> Plan:
    """The recorded plan, recorded now if there is none: the first writer wins, everyone else follows."""
    if (found := read_plan(directory)) is not None:
        return found
    fresh = json.dumps(dataclasses.asdict(_new_plan(directory, order)), indent=1).encode()
    with contextlib.suppress(FileExistsError):
        write_private_file(directory / "plan.json", fresh, exclusive=True)
    recorded = read_plan(directory)
    assert recorded is not None
    return recorded


def _new_plan(directory: Path, order: HostsOrder) -> Plan:
    digest = hashlib.sha256(str(directory).encode())
    second, third = digest.digest()[0] % 254 + 1, digest.digest()[1]
    short = f"ly-{digest.hexdigest()[:10]}"
    enough = shutil.disk_usage("/dev/shm").free > order.count * options_of(order).object_store_mb * 1.2e6  # noqa: S108
    return Plan(
        boot_id=boot_id(),
        since_tick=_now_tick(),
        # 127.0.0.1 is rewritten by Ray to the machine's address; any other in 127.0.0.0/8 is kept.
        addresses=tuple(f"127.{second}.{third}.{2 + index}" for index in range(order.count)),
        temp_dirs=tuple(f"/tmp/{short}-{index}" for index in range(order.count)),  # noqa: S108
        shared_memory_dirs=tuple(f"/dev/shm/{short}-{index}" if enough else "" for index in range(order.count)),  # noqa: S108
        ports=free_ports(4 + order.count),
    )


def options_of(order: HostsOrder) -> LocalOptions:
    """The provider's options. Raises HostsFailed, naming the field."""
    try:
        return LocalOptions.model_validate(order.options)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(each) for each in first["loc"])
        raise HostsFailed(f"hosts.{field} is not usable with the local provider: {first['msg']}") from error


def machine_id() -> str:
    """The machine's id, kept across boots; its name where it has none."""
    with contextlib.suppress(OSError):
        if found := Path("/etc/machine-id").read_text().strip():
            return found
    return f"hostname {socket.gethostname()}"


def free_ports(count: int) -> tuple[int, ...]:
    """Ports nobody listens on, on any address. Held until all are chosen, so that they differ."""
    chosen: dict[int, socket.socket] = {}
    candidates = random.SystemRandom().sample(PORTS, k=len(PORTS))
    try:
        for port in candidates:
            if len(chosen) == count:
                break
            probe = socket.socket()
            try:
                probe.bind(("0.0.0.0", port))  # noqa: S104 (a probe: Ray itself binds all addresses)
                chosen[port] = probe
            except OSError:
                probe.close()
    finally:
        for probe in chosen.values():
            probe.close()
    if len(chosen) < count:
        raise HostsFailed(f"no {count} free ports within {PORTS.start}..{PORTS.stop}")
    return tuple(chosen)


def _now_tick() -> int:
    """A clock tick that is certainly before anything started from now on."""
    born = this_process().start_time
    now = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")) - 1
    return max(born, now)


def available_memory_bytes() -> int:
    """Memory that can be had without swapping."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found.group(1)) * 1024 if found else 0
