"""Watching a training from the outside: progress is what Ray Train itself recorded as committed.

The record is `train/<name>/checkpoint_manager_snapshot.json` in storage. A returned `report()`, a log line or an
uploaded object is not a commit.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any, Final

from temporalio import activity

from activities.diagnosis import diagnose
from activities.heartbeat import Heart, beating
from activities.hosts import HostsError
from activities.hosts.reach import Providers, reach
from activities.jobs import JobInfo, Jobs, JobsError, JobsUnreachable
from activities.storage import Storage, StorageError
from workflows import activity_names
from workflows.evidence import Commit, HostsOrder, JobOrder, WatchEnd, WatchOrder, WatchResult
from workflows.policy import poll_s

STATUS_EVERY_S: Final = 2.0
"""How often the job's native status is asked for."""
UNKNOWN: Final = "what became of the hosts is unknown"
ALL_UP: Final = "every host says that it is up"
LOST_AFTER_S: Final = 60.0
"""The Jobs API silent for this long is lost: a busy head answers well within it, a dead one never."""


class DamagedRecord(Exception):
    """The commit record does not read as one. Unknown is not absent: the caller keeps what it knew."""


def record_uri(storage: str, train_name: str) -> str:
    """Where Ray Train writes its commit record."""
    return f"{storage}/train/{train_name}/checkpoint_manager_snapshot.json"


def commits_of(raw: bytes) -> list[Commit]:
    """All commits in Ray's record, oldest first. Raises DamagedRecord."""
    try:
        told = json.loads(raw)
        latest = told["latest_checkpoint_result"]
        results = list(told["checkpoint_results"])
        if latest is not None and latest not in results:
            results.append(latest)
        index = int(told["current_report_index"])
        found = [_commit(result, index) for result in results]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedRecord(f"the commit record is damaged: {type(error).__name__}: {error}") from error
    return sorted(found, key=lambda c: c.step)


def _commit(result: dict[str, Any], index: int) -> Commit:
    metrics = result["metrics"]
    name, step = result["checkpoint_dir_name"], metrics.get("step")
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ValueError(f"checkpoint_dir_name is {name!r}")
    if not isinstance(step, int) or isinstance(step, bool):
        raise ValueError("a report has no whole number as `step` (see docs/workload-contract.md)")
    loss = metrics.get("loss")
    return Commit(
        checkpoint=name,
        step=step,
        # NaN is no JSON: with it in a heartbeat, the UI could show nothing of the run any more.
        loss=float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None,
        index=index,
        model_sha256=_text(metrics.get("model_sha256")),
        momentum_sha256=_text(metrics.get("momentum_sha256")),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


class Checkpoints:
    def __init__(self, storage: Storage, providers: Providers) -> None:
        self._storage = storage
        self._providers = providers

    @activity.defn(name=activity_names.WATCH)
    async def watch_training(self, order: WatchOrder) -> WatchResult:
        """Return at the next milestone, or when the job ended, stalled or was lost. Async throughout: one worker
        watches a thousand runs."""
        async with beating(steps=order.steps) as heart:
            watch = _Watch(order, heart, self._storage)
            async with reach(self._providers, order.job.hosts) as endpoint, Jobs.at(endpoint) as jobs:
                result = await watch.until_something_happens(jobs)
            if result.end == "lost":
                return result.model_copy(update={"diagnosis": await self._what_became_of_the_hosts(order.job.hosts)})
            if result.end in ("failed", "stalled"):
                word = await self._what_became_of_the_hosts(order.job.hosts)
                if word.startswith(UNKNOWN):
                    return result.model_copy(update={"message": "; ".join(x for x in (word, result.message) if x)})
                if word != ALL_UP:
                    # A host that died is the cause; what Ray says of it at length is only that a node is missing.
                    return result.model_copy(update={"message": word})
            return result

    async def _what_became_of_the_hosts(self, hosts: HostsOrder) -> str:
        """The provider's own word on hosts that no longer answer; a lease that ran out is told there."""
        try:
            await asyncio.to_thread(self._providers.of(hosts).prove, hosts, lambda note: None)
        except HostsError as error:
            return str(error)
        except Exception as error:
            # Whatever is wrong with the question, that the job is lost is to be told.
            return f"{UNKNOWN} ({error})"
        return ALL_UP


class _Watch:
    """One attempt. What must survive the attempt (last commit, when progress was last made) is in the heartbeat."""

    def __init__(self, order: WatchOrder, heart: Heart, storage: Storage) -> None:
        before = heart.last()
        self._order, self._heart, self._storage = order, heart, storage
        self._uri = record_uri(order.job.order["storage"], order.job.train_name)
        self._commit = Commit(**before["commit"]) if before.get("commit") else order.seen
        self._etag = ""
        # The stall deadline is counted on the Temporal server's clock, which all attempts share and no worker can turn.
        self._epoch = activity.info().started_time.timestamp() - time.monotonic()
        self._progress_at = float(before.get("progress_at") or self._now())
        self._between: float | None = None
        self._answered = time.monotonic()
        self._job: JobInfo | None = None
        self._note = ""
        # From the first heartbeat on: an attempt that dies early must not lose what the one before it knew.
        self._say()

    async def until_something_happens(self, jobs: Jobs) -> WatchResult:
        asked = 0.0
        while True:
            await self._look()
            if time.monotonic() - asked >= STATUS_EVERY_S:
                asked = time.monotonic()
                end = await self._ask(jobs)
                if end:
                    return await self._result(end, jobs)
            if self._commit and any(self._commit.step >= m for m in self._order.milestones[:1]):
                return await self._result("milestone", jobs)
            if self._now() - self._progress_at > self._order.stall_s:
                return await self._result("stalled", jobs)
            await asyncio.sleep(poll_s(self._between))

    async def _look(self) -> None:
        """Read the commit record if it changed."""
        try:
            got = await self._storage.get(self._uri, unless=self._etag or None)
            commits = commits_of(got.body) if got and got.body is not None else []
        except (StorageError, DamagedRecord) as error:
            # Unknown is not absent. If it stays unknown, the stall deadline says so.
            self._say(note=str(error))
            return
        if got:
            self._etag = got.etag
        if commits and (self._commit is None or commits[-1].checkpoint != self._commit.checkpoint):
            now = self._now()
            if self._commit:
                self._between = now - self._progress_at
            self._commit, self._progress_at = commits[-1], now
            self._say(note="")

    async def _ask(self, jobs: Jobs) -> WatchEnd | None:
        """The job's native status, and nothing else, says whether it ended."""
        try:
            self._job = await jobs.info(self._order.job.submission_id)
            self._answered = time.monotonic()
        except JobsUnreachable as error:
            silent = time.monotonic() - self._answered
            self._say(note=f"the Jobs API has been silent for {silent:.0f} s ({error})")
            return "lost" if silent > LOST_AFTER_S else None
        except JobsError as error:
            self._say(note=str(error))
            return None
        if self._job is None:
            return "lost"
        if self._job.status != self._heart.details.get("job"):
            self._say(job=self._job.status)
        if not self._job.terminal:
            return None
        await self._look()
        return "finished" if self._job.status == "SUCCEEDED" else "failed"

    async def _result(self, end: WatchEnd, jobs: Jobs) -> WatchResult:
        message = diagnosis = ""
        if end in ("failed", "stalled"):
            message, diagnosis = await diagnose(jobs, self._order.job, self._job, self._note)
        elif end == "lost":
            message = self._note or "the cluster no longer knows the job"
        return WatchResult(
            end=end,
            commit=self._commit,
            job_status=self._job.status if self._job else "UNKNOWN",
            message=message,
            diagnosis=diagnosis,
            at=self._now(),
        )

    def _now(self) -> float:
        return self._epoch + time.monotonic()

    def _say(self, **details: Any) -> None:
        self._note = details.get("note", self._note)
        commit = self._commit
        self._heart.say(
            step=commit.step if commit else 0,
            loss=commit.loss if commit else None,
            commit=commit.model_dump(mode="json") if commit else None,
            progress_at=self._progress_at,
            **details,
        )


async def committed(storage: Storage, job: JobOrder) -> list[Commit]:
    """The job's commits as storage has them now. Raises StorageError or DamagedRecord."""
    got = await storage.get(record_uri(job.order["storage"], job.train_name))
    return commits_of(got.body) if got and got.body is not None else []
