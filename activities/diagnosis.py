"""Why a training failed or stalled, from what Ray itself says: one message and one diagnosis for a person."""

from __future__ import annotations

import re
import signal
from typing import Any, Final

from activities.jobs import JobInfo, Jobs, JobsError
from workflows.evidence import JobOrder

LAST_LINES: Final = 6
LONGEST_LINE: Final = 300
_ERROR: Final = re.compile(r"(?:\S+\.)?[a-z_]\w*(?:error|exception|failure|exit)\b.*|.*\berror:.*", re.IGNORECASE)
"""No repetition inside a repetition: a line of dots would keep the watcher's event loop busy for years."""
_KEEPER: Final = re.compile(r"lease keeper: (not started|stopped): ")
_EXIT: Final = re.compile(r"exit code (-?\d+)")
LONGEST_LAST: Final = 160
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_OUT_OF_MEMORY: Final = re.compile(
    r"OutOfMemory|NODE_OUT_OF_MEMORY|CUDA out of memory|\bMemoryError\b"
    r"|due to the node running low on memory|due to memory pressure"
)
"""What is only said of memory: Ray's word on any process that died hard names the kernel's OOM killer too."""
_STORE_FULL: Final = re.compile(r"ObjectStoreFull|object store is full|object_store_memory", re.IGNORECASE)


async def diagnose(jobs: Jobs, job: JobOrder, info: JobInfo | None, note: str) -> tuple[str, str]:
    """(what the job said, what the cluster shows). Never raises: what cannot be asked is said to be unknown."""
    try:
        log = await jobs.logs(job.submission_id)
    except JobsError as error:
        log = ""
        note = note or f"its log cannot be read: {error}"
    said = last_error(log or (info.message if info else ""))
    if killed := killed_by(info.message if info else ""):
        said = f"{killed}; the last it said: {said[:LONGEST_LAST]}" if said else killed
    return "; ".join(x for x in (said, note) if x), "; ".join(await _findings(jobs, job, log))


def killed_by(message: str) -> str:
    """The driver's death by a signal, where its exit code tells of one (negative, or a shell's 128 and more)."""
    told = _EXIT.search(message)
    code = int(told[1]) if told else 0
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return ""
    return f"the driver was killed by {name} (exit code {code})"


def last_error(log: str) -> str:
    """The lease keeper's word where it ended the job; else the last line that names an error; else the last lines."""
    lines = [line.strip()[:LONGEST_LINE] for line in _COLOUR.sub("", log).splitlines() if line.strip()]
    for telling in (_KEEPER, _ERROR):
        for line in reversed(lines):
            if telling.match(line):
                return line
    return " | ".join(lines[-LAST_LINES:])[:LONGEST_LINE]


async def _findings(jobs: Jobs, job: JobOrder, log: str) -> list[str]:
    found = []
    if _OUT_OF_MEMORY.search(log):
        found.append("a worker ran out of memory; take smaller batches or larger hosts")
    if _STORE_FULL.search(log):
        found.append("Ray's object store was full")
    try:
        nodes = await jobs.alive_nodes()
        if len(nodes) < job.hosts.count:
            found.append(f"only {len(nodes)} of {job.hosts.count} Ray nodes are alive")
        pending = [g for g in await jobs.state("placement_groups") if g.get("state") in ("PENDING", "RESCHEDULING")]
        found += [_demand(group, list(nodes.values())) for group in pending]
        waiting = [a for a in await jobs.state("actors") if a.get("state") == "PENDING_CREATION"]
        if waiting and not pending:
            found.append(f"{len(waiting)} actor(s) wait to be created, first {waiting[0].get('class_name')}")
    except JobsError as error:
        found.append(f"the cluster's state cannot be read ({error})")
    return found or [
        "every node is alive and nothing waits for resources: see the training's own log, "
        f"{job.order['storage']}/logs/{job.submission_id}.log"
    ]


def _demand(group: dict[str, Any], nodes: list[dict[str, Any]]) -> str:
    """A placement group that waits, and whether any node could ever hold its largest bundle."""
    wants = [b.get("unit_resources") or b.get("resources") or {} for b in group.get("bundles") or ()]
    impossible = [
        f"{key} {amount:g}"
        for want in wants
        for key, amount in want.items()
        if all(float((n.get("resources_total") or {}).get(key, 0)) < float(amount) for n in nodes)
    ]
    text = f"placement group {group.get('placement_group_id')} waits for {len(wants)} bundle(s)"
    return text + (f"; no node can meet {', '.join(sorted(set(impossible)))}" if impossible else "")
