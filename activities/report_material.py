"""What a report shows beside the verdict, distilled from what a run left in storage. Pure, and bounded in size.

Everything here comes from outside: text is cut, numbers must be finite, and what does not read as it should is left
out and said. A missing or damaged object never fails a report.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from activities.checkpoints import DamagedRecord, commits_of
from workflows.evidence import Commit, Release, Verdict
from workflows.names import submission_id
from workflows.orders import MAIN, PARITY

MAX_POINTS: Final = 2000
"""Points of the loss curve. Spikes survive: of each bucket of steps the lowest and the highest are kept."""
MAX_COMMITS: Final = 500
MAX_RANKS: Final = 400
"""Rows of the placement table: a rank in an attempt each."""
MAX_TEXT: Final = 300
MAX_SMALL: Final = 256 * 1024
"""Evidence, receipts and checksums are far smaller; larger ones are not what they claim to be."""

RELEASE: Final = "release.json"
RECEIPT: Final = re.compile(r"hosts/(\d{1,6})/receipt\.json")
_EVIDENCE: Final = re.compile(
    r"evidence/(?P<train>main|parity)/attempt-(?P<attempt>\d{3,9})/rank-(?P<rank>\d{1,6})"
    r"\.(?P<kind>start|first-step|final)\.json"
)
_CHECKSUM: Final = re.compile(r"([0-9a-f]{64}) [ *](\S.{0,255})")


@dataclass(frozen=True)
class Found:
    """Objects of a run by their name below its root, and why others could not be had."""

    objects: Mapping[str, bytes]
    missing: Mapping[str, str] = field(default_factory=dict)


class _Step(NamedTuple):
    step: Any
    loss: Any


class _Unreadable(Exception):
    """An object is not what its name says."""


def is_evidence(name: str) -> bool:
    """Whether this is the name of a rank's evidence."""
    return _EVIDENCE.fullmatch(name) is not None


def record_name(train_name: str) -> str:
    """Ray Train's commit record, below the run's root."""
    return f"train/{train_name}/checkpoint_manager_snapshot.json"


def export_names(submission: str) -> tuple[str, str]:
    """The journal and the checksums of an export, below the run's root."""
    return f"exports/{submission}/metrics.json", f"exports/{submission}/SHA256SUMS"


def exported(verdict: Verdict) -> str:
    """The submission whose export counts."""
    return verdict.artifacts.submission_id if verdict.artifacts else submission_id(verdict.run_key, "train")


def distil(verdict: Verdict, found: Found) -> dict[str, Any]:
    """The report's section `material`: commits, loss curve, placement, attempts, hosts, checksums, release, and
    what was not available. The same verdict and objects give an equal value."""
    missing = dict(found.missing)
    metrics_name, sums_name = export_names(exported(verdict))
    commits = _commits(verdict, found, missing)
    curve, held_out = _journal(metrics_name, found, missing)
    if curve is None:
        points = [[c["step"], c["loss"]] for c in commits if c["train"] == MAIN and c["loss"] is not None]
        curve = {"source": "commits", "steps": len(points), "points": thin(points, MAX_POINTS)} if points else None
    rows = _ranks(verdict, found, missing)
    return {
        "commits": _spread(commits, MAX_COMMITS, verdict.victim.commit.step if verdict.victim else None),
        # A run notes down some of its commits only, and Ray keeps the last ones; its index counts them all.
        "commits_total": max([len(commits), *(c.index for c in (*verdict.commits, *last_commits(found)))]),
        "loss": curve,
        "held_out": held_out,
        "placement": rows[:MAX_RANKS],
        "placement_total": len(rows),
        "attempts": _attempts(rows),
        "hosts": _hosts(found, missing),
        "checksums": _checksums(sums_name, found, missing),
        "release": _release(verdict, found, missing),
        "not_available": [{"what": name, "why": _text(why)} for name, why in sorted(missing.items())],
    }


def last_commits(found: Found) -> tuple[Commit, ...]:
    """The main training's commits, oldest first; none where the record is missing or damaged."""
    raw = found.objects.get(record_name(MAIN))
    try:
        return tuple(commits_of(raw)) if raw is not None else ()
    except (DamagedRecord, ArithmeticError, RecursionError):
        return ()


def total_steps(found: Found) -> int | None:
    """How many steps the training was to make, as its own reports say."""
    try:
        told = json.loads(found.objects.get(record_name(MAIN), b"null"))
        steps = told["latest_checkpoint_result"]["metrics"]["steps"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return whole(steps)


def thin(points: Sequence[list[float]], limit: int) -> list[list[float]]:
    """At most `limit` of these `[step, loss]`, in their order; of each bucket the lowest and the highest loss, and
    always the first and the last point."""
    if len(points) <= limit:
        return list(points)
    buckets = max(1, (limit - 2) // 2)
    kept = {0, len(points) - 1}
    for bucket in range(buckets):
        inside = range(bucket * len(points) // buckets, (bucket + 1) * len(points) // buckets)
        kept.add(min(inside, key=lambda i: points[i][1]))
        kept.add(max(inside, key=lambda i: points[i][1]))
    return [points[i] for i in sorted(kept)]


def number(value: Any) -> float | None:
    """A finite number, or nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        told = float(value)
    except OverflowError:
        return None
    return told if math.isfinite(told) else None


def whole(value: Any) -> int | None:
    """A whole number of a size that a step, a rank or a pid can have, or nothing."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def finite(value: Any) -> Any:
    """The same JSON value with numbers that JSON has no word for told as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {str(name): finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _commits(verdict: Verdict, found: Found, missing: dict[str, str]) -> list[dict[str, Any]]:
    """Of both trainings, by step. What the run saw counts also where Ray's record no longer has it."""
    by_name = {(MAIN, c.checkpoint): c for c in verdict.commits}
    for train_name in (MAIN, PARITY):
        name = record_name(train_name)
        if name not in found.objects:
            continue
        try:
            by_name |= {(train_name, c.checkpoint): c for c in commits_of(found.objects[name])}
        except (DamagedRecord, ArithmeticError, RecursionError) as error:
            missing[name] = str(error)
    rows = [
        {"train": train, "step": c.step, "checkpoint": _text(c.checkpoint), "loss": number(c.loss)}
        for (train, _), c in by_name.items()
    ]
    return sorted(rows, key=lambda row: (row["train"], row["step"], row["checkpoint"]))


def _journal(
    name: str, found: Found, missing: dict[str, str]
) -> tuple[dict[str, Any] | None, dict[str, float | None] | None]:
    """The loss curve and the held-out loss."""
    if name not in found.objects:
        return None, None
    try:
        # Steps are slimmed while they are read: a long journal is many times larger as dictionaries.
        told = json.loads(found.objects[name], object_hook=_slim)
        steps = told["steps"]
        points = [
            [step, loss]
            for entry in steps
            if (step := whole(entry.step)) is not None and (loss := number(entry.loss)) is not None
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        missing[name] = f"damaged: {_why(error)}"
        return None, None
    if len(points) < len(steps):
        missing[name] = f"in part: {len(steps) - len(points)} of {len(steps)} steps have no finite loss"
    points.sort(key=lambda point: point[0])
    held_out = told.get("held_out")
    return (
        {"source": name, "steps": len(points), "points": thin(points, MAX_POINTS)} if points else None,
        {key: number(held_out.get(key)) for key in ("initial_loss", "final_loss")}
        if isinstance(held_out, dict)
        else None,
    )


def _slim(read: dict[str, Any]) -> Any:
    return _Step(read["step"], read["loss"]) if "step" in read and "loss" in read else read


def _ranks(verdict: Verdict, found: Found, missing: dict[str, str]) -> list[dict[str, Any]]:
    """One row for each rank of each attempt: where it ran, what it restored, its first step and how it ended."""
    told: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for start in verdict.placement.ranks if verdict.placement else ():
        attempt, rank = whole(start.get("attempt")), whole(start.get("rank"))
        if attempt is not None and rank is not None:
            told.setdefault((MAIN, attempt, rank), {})["start"] = start
    for name in sorted(found.objects):
        match = _EVIDENCE.fullmatch(name)
        if match is None:
            continue
        try:
            document = _object(found.objects[name])
        except _Unreadable as error:
            missing[name] = str(error)
            continue
        key = (match["train"], int(match["attempt"]), int(match["rank"]))
        told.setdefault(key, {})[match["kind"]] = document
    return [_rank(*key, told[key]) for key in sorted(told)]


def _rank(train: str, attempt: int, rank: int, told: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    start, first, final = (told.get(kind, {}) for kind in ("start", "first-step", "final"))
    device, host, ray, process = (_inner(start, key) for key in ("device", "host", "ray", "process"))
    return {
        "train": train,
        "attempt": attempt,
        "rank": rank,
        "node_id": _text(ray.get("node_id")),
        "address": _text(ray.get("address")),
        "hostname": _text(host.get("hostname")),
        "host_fingerprint": _text(host.get("fingerprint")),
        "device": _text(device.get("type")),
        "device_name": _text(device.get("name")),
        "device_fingerprint": _text(device.get("fingerprint")),
        "pid": whole(process.get("pid")),
        "restored_step": whole(start.get("restored_step")),
        "restored_from": _text(start.get("restored_from")),
        "model_sha256": _text(start.get("model_sha256")),
        "momentum_sha256": _text(start.get("momentum_sha256")),
        "started": _when(start.get("at")),
        "first_step": whole(first.get("step")),
        "first_step_at": _when(first.get("at")),
        "final_step": whole(final.get("step")),
        "final_model_sha256": _text(final.get("model_sha256")),
        "final_momentum_sha256": _text(final.get("momentum_sha256")),
        "final_at": _when(final.get("at")),
    }


def _attempts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the ranks of each attempt say together; times are their hosts' clocks."""
    made = []
    for train, attempt in sorted({(row["train"], row["attempt"]) for row in rows}):
        ranks = [row for row in rows if (row["train"], row["attempt"]) == (train, attempt)]

        def known(key: str, ranks: Sequence[Mapping[str, Any]] = ranks) -> list[Any]:
            return [row[key] for row in ranks if row[key] is not None]

        made.append(
            {
                "train": train,
                "attempt": attempt,
                "ranks": len(ranks),
                "restored_step": min(known("restored_step"), default=None),
                "restored_from": next(iter(known("restored_from")), None),
                "first_step": min(known("first_step"), default=None),
                "started": min(known("started"), default=None),
                "first_step_at": max(known("first_step_at"), default=None),
                "final_step": max(known("final_step"), default=None),
                "final_at": max(known("final_at"), default=None),
            }
        )
    return made[:MAX_RANKS]


def _hosts(found: Found, missing: dict[str, str]) -> list[dict[str, Any]]:
    """Every host's own description, from its preparation receipt."""
    rows: list[dict[str, Any]] = []
    for name in found.objects:
        match = RECEIPT.fullmatch(name)
        if match is None:
            continue
        try:
            receipt = _object(found.objects[name])
        except _Unreadable as error:
            missing[name] = str(error)
            continue
        versions = _inner(receipt, "versions")
        rows.append(
            {
                "index": int(match[1]),
                "role": _text(receipt.get("role")),
                "address": _text(receipt.get("address")),
                "hostname": _text(_inner(receipt, "host").get("hostname")),
                "host_fingerprint": _text(_inner(receipt, "host").get("fingerprint")),
                "node_id": _text(_inner(receipt, "ray").get("node_id")),
                "pid": whole(_inner(receipt, "process").get("pid")),
                "environment": _text(receipt.get("environment")),
                "freeze_sha256": _text(receipt.get("freeze_sha256")),
                "versions": {str(k)[:64]: _text(v) for k, v in sorted(versions.items())[:30]},
                "at": _when(receipt.get("at")),
            }
        )
    return sorted(rows, key=lambda row: row["index"])


def _checksums(name: str, found: Found, missing: dict[str, str]) -> list[dict[str, str]]:
    raw = found.objects.get(name)
    if raw is None:
        return []
    if len(raw) > MAX_SMALL:
        missing[name] = f"{len(raw)} bytes are too many for what it should be"
        return []
    lines = raw.decode("utf-8", "replace").splitlines()
    matched = [match for line in lines[:200] if (match := _CHECKSUM.fullmatch(line))]
    if len(matched) < len(lines):
        missing[name] = f"in part: {len(lines) - len(matched)} of {len(lines)} lines are not `<sha256>  <name>`"
    return [{"name": match[2], "sha256": match[1]} for match in matched]


def _release(verdict: Verdict, found: Found, missing: dict[str, str]) -> dict[str, Any] | None:
    """Custody's own record where it can be had, else what the run was told of it."""
    told = verdict.release
    raw = found.objects.get(RELEASE)
    if raw is not None:
        try:
            record = Release.model_validate_json(raw)
            if record.run_key == verdict.run_key:
                told = record
            else:
                missing[RELEASE] = "it is another run's"
        except ValidationError as error:
            missing[RELEASE] = f"damaged: {error.error_count()} fields are not as they should be"
    return told.model_dump(mode="json") if told else None


def _spread(rows: list[dict[str, Any]], limit: int, wanted_step: int | None) -> list[dict[str, Any]]:
    """At most `limit` rows, evenly over all of them, with the first, the last and those of the wanted step."""
    if len(rows) <= limit:
        return rows
    even = limit - 4
    kept = {i * (len(rows) - 1) // (even - 1) for i in range(even)}
    kept |= set([i for i, row in enumerate(rows) if row["step"] == wanted_step][:4])
    return [rows[i] for i in sorted(kept)]


def _object(raw: bytes) -> dict[str, Any]:
    if len(raw) > MAX_SMALL:
        raise _Unreadable(f"{len(raw)} bytes are too many for what it should be")
    try:
        told = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"damaged: {_why(error)}") from error
    if not isinstance(told, dict):
        raise _Unreadable("damaged: not a JSON object")
    return told


def _inner(told: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = told.get(key)
    return value if isinstance(value, Mapping) else {}


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, dict | list):
        return None
    text = str(value)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _when(at: Any) -> float | None:
    """POSIX seconds of an ISO time in UTC."""
    if not isinstance(at, str):
        return None
    try:
        return number(datetime.fromisoformat(at).timestamp())
    except (ValueError, OverflowError, OSError):
        return None


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]
