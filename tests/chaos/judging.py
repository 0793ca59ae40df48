"""Whether what a scenario left is right: the verdict true, nothing done twice, artifacts whole or absent.

Reads Temporal, storage and the hosts' own notes; nothing of the operator's bookkeeping decides.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from tests.chaos.lane import Lane
from tests.chaos.runs import PREFIX
from tests.chaos.scenarios import STATUS, Scenario

BUCKET: Final = "lanyard"


@dataclass
class Ended:
    """How a run and its custody ended, as Temporal has it."""

    status: str = "OPEN"
    verdict: dict[str, Any] = field(default_factory=dict)
    """The result, or the verdict in a failure's details; empty where the run could not speak."""
    message: str = ""
    custody: dict[str, Any] | None = None
    """Custody's result; None where there was no custody, or it is open."""
    custody_open: bool = False


class Left:
    """What the run left in storage and on its hosts."""

    def __init__(self, lane: Lane, key: str) -> None:
        self._s3, self._root = lane.s3, f"{PREFIX}/{key}"
        self._hosts = lane.home.root / "hosts" / key
        self._key = key

    def get(self, name: str) -> bytes | None:
        """An object below the run's root."""
        try:
            return bytes(self._s3.get_object(Bucket=BUCKET, Key=f"{self._root}/{name}")["Body"].read())
        except self._s3.exceptions.NoSuchKey:
            return None

    def document(self, name: str) -> dict[str, Any]:
        """A JSON object, empty where there is none."""
        raw = self.get(name)
        return dict(json.loads(raw)) if raw else {}

    def committed(self) -> int:
        """The newest committed step; 0 before the first."""
        latest = self.document("train/main/checkpoint_manager_snapshot.json").get("latest_checkpoint_result")
        return int(latest["metrics"]["step"]) if latest else 0

    def artifacts(self) -> str:
        """`absent`, `whole`, or what is wrong with an export that calls itself whole."""
        folder = f"exports/{self._key}-train"
        manifest = self.get(f"{folder}/SHA256SUMS")
        if manifest is None:
            return "absent"
        for line in manifest.decode().splitlines():
            digest, _, name = line.partition("  ")
            data = self.get(f"{folder}/{name}")
            if data is None or hashlib.sha256(data).hexdigest() != digest:
                return f"{name} is not what SHA256SUMS says"
        return "whole"

    def done_twice(self) -> list[str]:
        """Jobs that were submitted, and hosts that were begun, more than once."""
        jobs = Counter(each[0] for each in self._jobs() if len(each) == 1)
        found = [f"job {name} was submitted {times} times" for name, times in jobs.items() if times > 1]
        for log in sorted(self._hosts.glob("[0-9]*.log")):
            begun = log.read_text(errors="replace").count(" preparing")
            if begun > 1:
                found.append(f"host {log.stem} was begun {begun} times")
        return found

    def job_ended(self) -> str:
        """The training job's native end as the light cluster noted it, empty where it did not."""
        ends = [each[1] for each in self._jobs() if len(each) == 2 and each[0] == f"{self._key}-train"]
        return ends[-1] if ends else ""

    def _jobs(self) -> list[list[str]]:
        log = self._hosts / "0" / "jobs.log"
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []


def judge(scenario: Scenario, ended: Ended, left: Left) -> tuple[str, list[str]]:
    """The outcome, and everything that is wrong with it."""
    report = left.document("report.json")
    silent = ended.status in ("TERMINATED", "TIMED_OUT")
    outcome = str(ended.verdict.get("outcome") or (report.get("outcome") if report else "") or _of(ended.status))
    wrong: list[str] = []
    if outcome not in scenario.expected:
        wrong.append(f"outcome {outcome}, not {' or '.join(sorted(scenario.expected))}: {ended.message[:300]}")
    if STATUS.get(outcome) != ended.status:
        wrong.append(f"outcome {outcome}, but Temporal shows {ended.status}")
    if ended.custody_open:
        wrong.append("custody has not closed")
    claimed = bool(ended.custody and ended.custody.get("claims"))
    if ended.custody is not None and ended.custody.get("cleanup") != "clean":
        wrong.append(f"custody's last word is {ended.custody.get('cleanup')}")
    if claimed and left.document("release.json").get("cleanup") != "clean":
        wrong.append("release.json does not say clean")
    speaks = claimed and scenario.ending != "non-determinism"
    if speaks and report.get("outcome") != outcome:
        wrong.append(f"report.json says {report.get('outcome')}")
    if silent and claimed and report.get("artifacts"):
        wrong.append("the report of a run that could not speak calls artifacts verified")
    artifacts = left.artifacts()
    if artifacts not in ("absent", "whole"):
        wrong.append(f"artifacts are half and called whole: {artifacts}")
    if outcome == "succeeded":
        if artifacts != "whole":
            wrong.append("succeeded without artifacts")
        if not (ended.verdict.get("drill") or {}).get("proved"):
            wrong.append("succeeded without the proof of its drill")
    trained = left.job_ended() == "SUCCEEDED" and scenario.ending in ("succeeds", "started twice")
    # A drill that was spoilt is told so, and is no word on the training.
    if outcome == "failed" and trained and "drill" not in ended.message:
        wrong.append(f"the training succeeded and the run is called failed: {ended.message[:300]}")
    wrong += left.done_twice()
    return outcome, wrong


def _of(status: str) -> str:
    return {shown: outcome for outcome, shown in STATUS.items() if outcome not in ("rejected", "aborted")}.get(
        status, "none"
    )
