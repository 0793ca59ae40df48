"""What SkyPilot is asked for: names, the mark, the task, and the private files that it brings to every host. Pure,
but for `write_files`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from activities.hosts import HostsFailed
from trainer import environment
from trainer.private import check_private_directory, create_private_directory, write_private_file
from workflows.evidence import Frozen, HostsOrder, Identity

AUTODOWN_MINUTES: Final = 10
"""SkyPilot takes an idle cluster down after this: the last backstop, when custody and reaper are gone. The service is
what keeps it from being idle, and that ends with its lease."""
GIVEN: Final = re.compile(r"AWS_(ENDPOINT_URL(_S3)?|(DEFAULT_)?REGION|ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN)")
"""What of the worker's environment the hosts need for storage."""
SOURCE: Final = Path(environment.__file__).parent
"""The `trainer` package."""
FIRST_PORTS: Final = range(20_000, 31_990, 10)
"""Above the ports of Ray's workers and of SkyPilot's own Ray, below the usual ephemeral range."""
MARK: Final = re.compile(r"lanyard=([a-z0-9-]{1,32}),run=([a-z0-9-]{1,43}),storage=(s3://\S{1,600})")


class SkyPilotOptions(Frozen):
    """The `skypilot` provider's own part of `hosts` in run.json."""

    infra: str
    accelerators: str | None = None
    image: str | None = None
    accept_licence: bool = False
    cpus: str | None = None
    memory: str | None = None
    require_distinct_hosts: bool = True
    require_distinct_devices: bool = True


def options_of(order: HostsOrder) -> SkyPilotOptions:
    """The provider's options. Raises HostsFailed, naming the field."""
    try:
        return SkyPilotOptions.model_validate(order.options)
    except ValidationError as error:
        first = error.errors()[0]
        raise HostsFailed(f"hosts.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def cluster_name(run_key: str) -> str:
    """At most 30 characters and a letter first, so that no infrastructure shortens it (Kubernetes: 42, of which
    SkyPilot takes 9); the digest makes it unique."""
    slug, _, digest = run_key.rpartition("-")
    return "-".join(part for part in ("ly", slug[:16].strip("-"), digest) if part)


def service_name(run_key: str) -> str:
    """The service task's name in the cluster's queue. SkyPilot's number of it is not known before it is sent."""
    return f"{cluster_name(run_key)}-hosts"


def stem(run_key: str) -> str:
    """Of the run's names on a host; short, because paths of sockets are."""
    return f"ly-{run_key.rpartition('-')[2]}"


def first_port(run_key: str) -> int:
    """The first of the ports, the same on every host. From the digest: two runs that share a machine differ."""
    return FIRST_PORTS[int(run_key.rpartition("-")[2], 16) % len(FIRST_PORTS)]


def mark_text(identity: Identity) -> str:
    """The mark where an infrastructure keeps a line of text. No blanks: SkyPilot does not quote it for Slurm."""
    return f"lanyard={identity.deployment},run={identity.run_key},storage={identity.storage}"


def mark_uri(storage: str) -> str:
    """Where a run's whole mark is: below its own root in storage."""
    return f"{storage}/hosts/mark.json"


def end_uri(storage: str) -> str:
    """What has every host of the run end itself, once the tombstone stands (`trainer.hosting.END`)."""
    return f"{storage}/hosts/end.json"


def brought_to(run_key: str) -> str:
    """The directory on a host that SkyPilot brings, as the task's shell names it."""
    return f"~/.lanyard/{cluster_name(run_key)}"


def task_config(order: HostsOrder, files: Path) -> dict[str, Any]:
    """The task. No secret is in it: SkyPilot keeps its text, `envs` and `secrets` alike, readable in several places."""
    options, key = options_of(order), order.identity.run_key
    resources: dict[str, Any] = {"infra": options.infra}
    if options.accelerators:
        resources["accelerators"] = options.accelerators
    if options.image:
        resources["image_id"] = options.image
    if options.cpus:
        resources["cpus"] = options.cpus
    if options.memory:
        resources["memory"] = options.memory
    where = brought_to(key)
    return {
        "name": service_name(key),
        "num_nodes": order.count,
        "resources": resources,
        "file_mounts": {where: str(files)},
        # exec: SkyPilot's shell is interactive and ignores SIGTERM, so the service takes its place.
        "run": f"cd {where} && exec python3 -B -m trainer.rented_host",
        "config": {"slurm": {"sbatch_options": {"comment": mark_text(order.identity)}}},
    }


def host_order(order: HostsOrder, environments: str) -> dict[str, Any]:
    """`host.json`: see `trainer.rented_host.HOST_FIELDS`."""
    key = order.identity.run_key
    return {
        "schema": 1,
        "run_key": key,
        "stem": stem(key),
        "count": order.count,
        "device": order.device,
        "storage": order.identity.storage,
        "environments": environments,
        "not_after_s": order.not_after_s,
        "first_port": first_port(key),
    }


def storage_keys(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which hosts reach storage."""
    found = {name: value for name, value in environ.items() if GIVEN.fullmatch(name) and value}
    # Arrow, which the hosts use, reads one of the two names.
    if "AWS_ENDPOINT_URL_S3" in found:
        found["AWS_ENDPOINT_URL"] = found.pop("AWS_ENDPOINT_URL_S3")
    return found


def write_files(directory: Path, order: HostsOrder, *, token: str, keys: Mapping[str, str], environments: str) -> None:
    """What SkyPilot brings to every host, in a directory of our own (0700), files 0600. Written again by whoever sends
    the launch again. Raises NotPrivate, OSError."""
    if directory.exists():
        check_private_directory(directory)
    else:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        create_private_directory(directory)
    shutil.copytree(
        SOURCE, directory / "trainer", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    told = host_order(order, environments)
    write_private_file(directory / "host.json", json.dumps(told, indent=1).encode())
    write_private_file(directory / "token", token.encode())
    write_private_file(directory / "storage.json", json.dumps(dict(keys)).encode())
