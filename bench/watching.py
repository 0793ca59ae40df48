"""What is seen from outside while a run trains: commits as storage dates them, heartbeats as Temporal dates them.

Both dates are of this machine's clock: S3's listing gives the time at which the commit record was written in
milliseconds, and describe gives the time at which the server took the watch's last heartbeat. Looking four times a
second misses neither (a heartbeat is passed on at most once a second, and a commit record is asked for its step as soon
as its date changes), and hardly disturbs a training that shares the machine.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import psutil
from botocore.exceptions import ClientError

from bench.guarded import GuardedRun
from workflows.activity_names import WATCH

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from temporalio.client import Client

LOOK_S: Final = 0.25


class RunEnded(Exception):
    """The run closed before enough was seen."""


@dataclass
class Seen:
    """What was seen so far; times are Unix seconds."""

    commits: dict[int, float] = field(default_factory=dict)
    """Committed step to the time at which its record was written."""
    heartbeats: dict[int, float] = field(default_factory=dict)
    """Step to the time of the first heartbeat seen that told it."""
    memory: list[float] = field(default_factory=list)
    """The worker's resident memory, MB."""

    def latencies(self) -> list[float]:
        """Seconds from each commit's record to the first heartbeat that told this commit or a later one."""
        found = []
        for step, written in sorted(self.commits.items()):
            told = [at for other, at in self.heartbeats.items() if other >= step]
            if told:
                found.append(round(min(told) - written, 3))
        return found


async def watch(
    client: Client, s3: S3Client, run: GuardedRun, root: str, worker_pid: int, commits: int, within_s: float
) -> Seen:
    """Look until ``commits`` commits were told by heartbeats. Raises RunEnded, and TimeoutError."""
    seen = Seen()
    record = _Record(s3, root)
    worker = psutil.Process(worker_pid)
    async with asyncio.timeout(within_s):
        while len(seen.latencies()) < commits:
            began = time.monotonic()
            _, training = await asyncio.gather(
                asyncio.to_thread(record.look, seen.commits), _heartbeat(client, run, seen.heartbeats)
            )
            if training:
                seen.memory.append(worker.memory_info().rss / 1e6)
            await asyncio.sleep(max(0.0, LOOK_S - (time.monotonic() - began)))
    return seen


class _Record:
    """Ray's commit record in storage."""

    def __init__(self, s3: S3Client, root: str) -> None:
        parts = urlsplit(root)
        self._s3, self._bucket = s3, parts.netloc
        self._key = f"{parts.path.lstrip('/')}/train/main/checkpoint_manager_snapshot.json"
        self._written = 0.0

    def look(self, commits: dict[int, float]) -> None:
        written = self._date()
        if written in (None, self._written):
            return
        try:
            latest = json.loads(self._s3.get_object(Bucket=self._bucket, Key=self._key)["Body"].read())
        except (ClientError, ValueError):
            return
        if self._date() != written:
            return  # written again meanwhile: the next look takes that one
        assert written is not None
        self._written = written
        if latest["latest_checkpoint_result"] is not None:
            commits.setdefault(int(latest["latest_checkpoint_result"]["metrics"]["step"]), written)

    def _date(self) -> float | None:
        listed = self._s3.list_objects_v2(Bucket=self._bucket, Prefix=self._key, MaxKeys=1).get("Contents", [])
        return listed[0]["LastModified"].timestamp() if listed else None


async def _heartbeat(client: Client, run: GuardedRun, heartbeats: dict[int, float]) -> bool:
    """Note the step of the watch's last heartbeat; whether there is a watch."""
    description = await run.handle.describe()
    if description.close_time is not None:
        raise RunEnded
    watching = [each for each in description.raw_description.pending_activities if each.activity_type.name == WATCH]
    for each in watching:
        if each.heartbeat_details.payloads:
            [told] = await client.data_converter.decode(each.heartbeat_details.payloads)
            if told.get("step"):
                heartbeats.setdefault(int(told["step"]), each.last_heartbeat_time.ToNanoseconds() / 1e9)
    return bool(watching)
