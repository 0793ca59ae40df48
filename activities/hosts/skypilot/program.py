"""Run in SkyPilot's own environment: one command, JSON on standard input, lines of JSON on the descriptor named last.

The only file that imports sky. It decides nothing: it asks the API server, by exact names, and says what it was told.
Lines: `{"note": text}` on the way, then `{"result": ...}` or `{"error": message, "kind": name, "unreachable": bool}`.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any

LOOK_S = 2.0
LAUNCH = "sky.launch"


class Unreachable(Exception):
    """The API server does not answer."""


def look(told: dict[str, Any]) -> dict[str, Any]:
    """What SkyPilot knows of a cluster: its row, its queue where it is up, launches in flight. With `ssh`, has its ssh
    entry written too."""
    import sky

    row = _row(told["cluster"], ssh=told["ssh"])
    return {
        "version": sky.__version__,
        "row": row,
        "queue": _queue(told["cluster"]) if row and row["status"] == "UP" else [],
        "launches": _launches(told["cluster"]),
    }


def server(told: dict[str, Any]) -> dict[str, Any]:
    """Versions of client and server; starts a local server where none runs."""
    import sky
    from sky.client import sdk
    from sky.server import common

    common.check_server_healthy_or_start_fn()
    return {"client": sky.__version__, "server": sdk.api_info()["version"]}


def enabled(told: dict[str, Any]) -> dict[str, Any]:
    """Whether a cloud is enabled, as a check with its credentials finds now."""
    from sky.client import sdk

    found = sdk.get(sdk.check((told["cloud"],), verbose=False))
    clouds = sorted({cloud for of_workspace in found.values() for cloud, what in of_workspace.items() if what})
    return {"enabled": any(each.lower() == told["cloud"].lower() for each in clouds), "clouds": clouds}


def plan(told: dict[str, Any]) -> dict[str, Any]:
    """Whether SkyPilot could place the task, which raises where it could not, and the accelerator in its own spelling.

    Of the plan itself its API server gives nothing back but a table of text (`/optimize` ignores the return value).
    """
    import sky
    from sky.client import sdk

    with sky.Dag() as dag:
        task = sky.Task.from_yaml_config(told["task"])
    if not dag.tasks:
        dag.add(task)
    sdk.get(sdk.optimize(dag))
    return {
        "accelerators": {name: float(n) for each in task.resources for name, n in (each.accelerators or {}).items()}
    }


def launch(told: dict[str, Any]) -> dict[str, Any]:
    """Send one launch. It goes on without us: the request's id is for who waits, the cluster's name for the rest."""
    import sky
    from sky.client import sdk

    task = sky.Task.from_yaml_config(told["task"])
    return {
        "request": str(
            sdk.launch(
                task,
                cluster_name=told["cluster"],
                idle_minutes_to_autostop=told["autodown_minutes"],
                down=True,
            )
        )
    }


def follow(told: dict[str, Any]) -> dict[str, Any]:
    """Wait for a launch to end, saying what SkyPilot says of it."""
    from sky.client import sdk

    said = ""
    while True:
        found = [each for each in sdk.api_status([told["request"]]) if each.request_id == told["request"]]
        if not found:
            return {"status": "UNKNOWN", "message": "the API server no longer knows the request"}
        if found[0].status not in ("PENDING", "RUNNING"):
            return _outcome(told["request"], found[0].status)
        row = _row(told["cluster"])
        word = (row["word"] or row["status"]) if row else f"launch {found[0].status.lower()}"
        if word != said:
            say({"note": (said := word)})
        time.sleep(LOOK_S)


def cancel_launches(told: dict[str, Any]) -> dict[str, Any]:
    """Cancel every launch of this exact name that is in flight."""
    from sky.client import sdk

    launches = _launches(told["cluster"])
    if launches:
        sdk.get(sdk.api_cancel(launches, silent=True))
    return {"cancelled": launches}


def cancel_service(told: dict[str, Any]) -> dict[str, Any]:
    """Cancel the tasks of exactly this name, and wait until each is over."""
    from sky.client import sdk

    row = _row(told["cluster"])
    if row is None:
        return {"known": False, "jobs": []}
    # Not found to be UP, a cluster may have its head all the same.
    jobs = [each for each in _queue(told["cluster"]) if each["name"] == told["service"]]
    running = [each["id"] for each in jobs if not each["over"]]
    if running:
        sdk.get(sdk.cancel(told["cluster"], job_ids=running, _try_cancel_if_cluster_is_init=True))
    deadline = time.monotonic() + told["seconds"]
    while running and time.monotonic() < deadline:
        jobs = [each for each in _queue(told["cluster"]) if each["name"] == told["service"]]
        running = [each["id"] for each in jobs if not each["over"]]
        if running:
            time.sleep(1.0)
    return {"known": True, "jobs": jobs}


def down(told: dict[str, Any]) -> dict[str, Any]:
    """Take the cluster down; `known` is False where SkyPilot has no such cluster."""
    from sky import exceptions
    from sky.client import sdk

    if _row(told["cluster"]) is None:
        return {"known": False, "status": "", "message": ""}
    try:
        request = str(sdk.down(told["cluster"]))
    except exceptions.ClusterDoesNotExist:
        return {"known": False, "status": "", "message": ""}
    deadline = time.monotonic() + told["seconds"]
    while time.monotonic() < deadline:
        found = [each for each in sdk.api_status([request]) if each.request_id == request]
        if found and found[0].status not in ("PENDING", "RUNNING"):
            return {"known": True, **_outcome(request, found[0].status)}
        time.sleep(0.5)
    return {"known": True, "status": "RUNNING", "message": f"down is still under way after {told['seconds']:.0f} s"}


def log(told: dict[str, Any]) -> dict[str, Any]:
    """The end of a task's log."""
    from sky.client import sdk

    caught = io.StringIO()
    sdk.tail_logs(told["cluster"], told["job"], follow=False, tail=told["lines"], output_stream=caught)
    return {"text": _plain(caught.getvalue())[-4000:]}


def ssh(told: dict[str, Any]) -> dict[str, Any]:
    """Have SkyPilot write its ssh entry of the cluster; where it lies."""
    from sky.client.cli import command
    from sky.utils import cluster_utils

    command._get_cluster_records_and_set_ssh_config([told["cluster"]])
    helper = cluster_utils.SSHConfigHelper
    config = os.path.expanduser(helper.ssh_cluster_path.format(told["cluster"]))
    key = os.path.expanduser(helper.ssh_cluster_key_path.format(told["cluster"]))
    return {"config": config if os.path.exists(config) else "", "key": key if os.path.exists(key) else ""}


def _row(cluster: str, ssh: bool = False) -> dict[str, Any] | None:
    from sky.client import sdk

    if ssh:
        from sky.client.cli import command

        found = command._get_cluster_records_and_set_ssh_config([cluster], verbose=True)
    else:
        found = sdk.get(sdk.status([cluster], all_users=True))
    for each in found:
        if each["name"] == cluster:
            handle = each["handle"]
            return {
                "status": each["status"].value,
                "autodown_minutes": each["autostop"] if each["to_down"] else -1,
                "nodes": each["nodes"],
                "on_cloud": getattr(handle, "cluster_name_on_cloud", None),
                "word": _plain(each["init_status_reason"] or ""),
            }
    return None


def _queue(cluster: str) -> list[dict[str, Any]]:
    from sky import exceptions
    from sky.client import sdk

    try:
        jobs = sdk.get(sdk.queue(cluster, all_users=True))
    except exceptions.ClusterNotUpError:
        return []
    return [
        {
            "id": each["job_id"],
            "name": each["job_name"],
            "status": each["status"].value,
            "over": each["status"].is_terminal(),
        }
        for each in jobs
    ]


def _launches(cluster: str) -> list[str]:
    from sky.client import sdk

    active = sdk.api_status(cluster_name=cluster)
    return [each.request_id for each in active if each.cluster_name == cluster and each.name == LAUNCH]


def _outcome(request: str, status: str) -> dict[str, Any]:
    from sky.client import sdk

    if status == "SUCCEEDED":
        return {"status": status, "message": ""}
    try:
        sdk.get(request)
    except Exception as error:
        return {"status": status, "message": _plain(f"{type(error).__name__}: {error}")}
    return {"status": status, "message": ""}


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).strip()


COMMANDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    each.__name__: each
    for each in (look, server, enabled, plan, launch, follow, cancel_launches, cancel_service, down, log, ssh)
}


def say(line: dict[str, Any]) -> None:
    os.write(int(sys.argv[2]), json.dumps(line).encode() + b"\n")


def main() -> None:
    # Python put this file's directory first, and what lies beside it has names that others may mean.
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    told = json.load(sys.stdin)
    try:
        say({"result": COMMANDS[sys.argv[1]](told)})
    except Exception as error:
        kind = type(error).__name__
        message = _plain(str(error)) or kind
        unreachable = kind in ("ApiServerConnectionError", "ConnectionError", "ConnectTimeout", "ReadTimeout")
        say({"error": message, "kind": kind, "unreachable": unreachable})


if __name__ == "__main__":
    main()
