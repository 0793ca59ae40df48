"""Writing a run's report: `report.json` for programs, `report.html` for people, beside everything else it left."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities import report_material as material
from activities.heartbeat import Heart, beating
from activities.report_material import Found
from activities.report_page import render
from activities.storage import Storage, StorageError
from workflows import activity_names
from workflows.evidence import Phase, UnspokenOrder, Verdict
from workflows.names import run_key
from workflows.orders import MAIN, PARITY

MAX_EVIDENCE: Final = 1500
"""Objects of evidence read for a report: three for each rank of each attempt, and attempts are few."""
MAX_RECEIPTS: Final = 200
AT_ONCE: Final = 16
"""Reads under way at the same time: many small objects, and a storage that others use too."""
REPORT: Final = "report"
UNSPOKEN: Final = ("terminated", "timed_out")
LAST_COMMITS: Final = 20
"""Commits in the verdict of a run that could not speak; the material lists more."""


class Reporting:
    """Reports on runs, from their verdict and from what lies in storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @activity.defn(name=activity_names.REPORT)
    async def write_report(self, verdict: Verdict) -> None:
        """Write both files. Material that is missing or damaged is said in them, and fails nothing."""
        if verdict.storage is None:
            raise ApplicationError("the run has no storage to write its report to", non_retryable=True)
        async with beating(note="gathering what the run left") as heart:
            found = await self._gather(verdict.storage, material.exported(verdict))
            await self._write(heart, verdict.storage, verdict, found)

    @activity.defn(name=activity_names.REPORT_UNSPOKEN)
    async def report_unspoken(self, order: UnspokenOrder) -> None:
        """Write the same two files for a run that was terminated or timed out, from storage alone."""
        root = order.identity.storage
        async with beating(note="gathering what the run left") as heart:
            silent = Verdict(
                outcome=order.status,
                cleanup=order.release.cleanup,
                message="",
                run_key=order.identity.run_key,
                storage=root,
                workflow_id=order.identity.workflow_id,
                run_id=order.identity.run_id,
                release=order.release,
            )
            found = await self._gather(root, material.exported(silent))
            await self._write(heart, root, unspoken(silent, found), found)

    async def _gather(self, root: str, submission: str) -> Found:
        """Read what a report shows, each object once; what cannot be read is told by name and reason."""
        missing: dict[str, str] = {}
        evidence = await self._list(root, "evidence/", MAX_EVIDENCE, missing)
        receipts = await self._list(root, "hosts/", MAX_RECEIPTS * 10, missing)
        expected = [material.record_name(MAIN), *material.export_names(submission)]
        optional = [material.record_name(PARITY), material.RELEASE]
        wanted = [
            *expected,
            *optional,
            *(name for name in evidence if material.is_evidence(name)),
            *[name for name in receipts if material.RECEIPT.fullmatch(name)][:MAX_RECEIPTS],
        ]
        objects: dict[str, bytes] = {}
        gate = asyncio.Semaphore(AT_ONCE)

        async def read(name: str) -> None:
            async with gate:
                try:
                    got = await self._storage.get(f"{root}/{name}")
                except StorageError as error:
                    missing[name] = str(error)
                    return
            if got is not None and got.body is not None:
                objects[name] = got.body
            elif name in expected:
                missing[name] = "not there"

        await asyncio.gather(*(read(name) for name in wanted))
        for folder, names in (("evidence/", evidence), ("hosts/", receipts)):
            if not names and folder not in missing:
                missing[folder] = "nothing there"
        return Found(objects, missing)

    async def _list(self, root: str, folder: str, limit: int, missing: dict[str, str]) -> list[str]:
        try:
            names = await self._storage.names(f"{root}/{folder}", limit=limit + 1)
        except StorageError as error:
            missing[folder] = str(error)
            return []
        if len(names) > limit:
            missing[folder] = f"in part: more than {limit} objects, of which the first {limit} were looked at"
        return sorted(folder + name for name in names[:limit])

    async def _write(self, heart: Heart, root: str, verdict: Verdict, found: Found) -> None:
        heart.say(note="writing the report")
        # A long journal takes seconds to read: not on the loop that keeps everybody's heartbeats.
        files = await asyncio.to_thread(_files, verdict, found)
        if verdict.outcome in UNSPOKEN:
            await self._put(root, REPORT, files)
            await self._give_way(root)
            return
        beside = f"{REPORT}-{verdict.run_id[:8]}"
        another_spoke = await self._another_spoke(root, verdict)
        if another_spoke or _is_of_a_reset(verdict):
            await self._put(root, beside, files)
        if not another_spoke:
            await self._put(root, REPORT, files)

    async def _put(self, root: str, name: str, files: tuple[bytes, bytes]) -> None:
        for kind, body in zip(("json", "html"), files, strict=True):
            await self._storage.put(f"{root}/{name}.{kind}", body)

    async def _another_spoke(self, root: str, verdict: Verdict) -> bool:
        """Whether another execution of this run has its word in `report`: a reset run shares its storage, and what the
        first one proved must not be lost. What custody wrote for an execution that could not speak gives way."""
        got = await self._storage.get(f"{root}/{REPORT}.json")
        try:
            there = json.loads(got.body or b"{}") if got else {}
            return there["run_id"] != verdict.run_id and there["outcome"] not in UNSPOKEN
        except (ValueError, LookupError, TypeError, RecursionError):
            return False

    async def _give_way(self, root: str) -> None:
        """After custody's word for an execution that was reset: the word of the one that went on stands.

        Both may write at once, and no storage here has conditional writes. A reset run's own word is beside `report`
        before it is there, so whoever comes last leaves that one.
        """
        names = await self._storage.names(f"{root}/{REPORT}-")
        spoken = sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))
        for kind in ("json", "html") if spoken else ():
            got = await self._storage.get(f"{root}/{REPORT}-{spoken[0]}.{kind}")
            if got is not None and got.body is not None:
                await self._storage.put(f"{root}/{REPORT}.{kind}", got.body)


def _is_of_a_reset(verdict: Verdict) -> bool:
    """A run's key is made of its first execution's id."""
    return run_key(verdict.workflow_id, activity.info().namespace, verdict.run_id) != verdict.run_key


def report(verdict: Verdict, found: Found) -> dict[str, Any]:
    """The verdict as JSON, with `schema` and `material`. No clock: the same input gives an equal report."""
    told = {"schema": 1, **verdict.model_dump(mode="json"), "material": material.distil(verdict, found)}
    return dict(material.finite(told))


def unspoken(silent: Verdict, found: Found) -> Verdict:
    """The verdict of a run that could not give one, as far as storage and custody's release tell."""
    said = silent.outcome.replace("_", " ")
    what = {"terminated": "the run was terminated", "timed_out": "the run's execution timed out"}[silent.outcome]
    message = f"{what}, so it could give no verdict; custody released its hosts and wrote this report"
    commits = material.last_commits(found)
    if commits:
        message += (
            f' (the last commit is step {commits[-1].step}; go on from it with "resume": '
            f'{{"from": "{silent.storage}"}})'
        )
    return silent.model_copy(
        update={
            "message": message,
            "steps": material.total_steps(found),
            "phases": _phases(silent, found),
            "commits": commits[-LAST_COMMITS:],
            "resume_from": silent.storage if commits else None,
            "not_proved": (
                f"artifacts: not verified, because the run was {said}",
                f"placement and recovery: not judged, because the run was {said}; evidence is shown as the ranks "
                "left it",
                "phases: known to the run's history only; times shown here are from evidence and from custody",
            ),
        }
    )


def _phases(silent: Verdict, found: Found) -> tuple[Phase, ...]:
    """Attempts by their ranks' own times, then the release by custody's."""
    release = silent.release
    attempts = [a for a in material.distil(silent, found)["attempts"] if a["started"] is not None]
    ends = [a["started"] for a in attempts[1:]] + [release.began if release else None]
    phases = [
        Phase(
            name=f"{'training' if a['train'] == MAIN else a['train']}, attempt {a['attempt']}",
            started=a["started"],
            ended=a["final_at"] or (max(end, a["started"]) if end is not None else None),
            note="" if a["final_at"] else "its own end is not recorded",
        )
        for a, end in zip(attempts, ends, strict=False)
    ]
    if release:
        phases.append(Phase(name="release", started=release.began, ended=release.ended))
    return tuple(phases)


def _files(verdict: Verdict, found: Found) -> tuple[bytes, bytes]:
    told = report(verdict, found)
    as_json = json.dumps(told, indent=1, allow_nan=False).encode() + b"\n"
    # Evidence may hold half a surrogate pair, which no encoding has.
    return as_json, render(told).encode("utf-8", "replace")
