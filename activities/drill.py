"""The drill's strike: choose one training worker, then SIGKILL exactly that process through the cluster."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import time
from typing import Any, Final

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from activities.checkpoints import committed
from activities.custody import claimed
from activities.heartbeat import beating
from activities.hosts.reach import Providers, reach
from activities.jobs import Jobs, JobsError
from activities.proof import evidence_in
from activities.storage import Storage
from activities.submission import Submission
from workflows import activity_names
from workflows.evidence import DrillOrder, Strike, Victim
from workflows.names import submission_id

HELPER_S: Final = 90.0
"""The helper job starts in about 4 s; a loaded head takes longer."""
MAX_EVIDENCE: Final = 50_000
"""Objects listed: three a rank and attempt, of up to 64 ranks."""
_RESULT: Final = "LANYARD_STRIKE "
"""The helper's one line of answer, in its log."""


class Drill:
    def __init__(self, client: Client, storage: Storage, providers: Providers, submission: Submission) -> None:
        self._client = client
        self._storage = storage
        self._providers = providers
        self._submission = submission

    @activity.defn(name=activity_names.CHOOSE)
    async def choose_victim(self, order: DrillOrder) -> Victim:
        """The highest rank of the newest attempt, by its own evidence. Rank 0 writes checkpoints and is spared, so
        that the drill shows a lost worker and not only a lost writer."""
        root = f"{order.job.order['storage']}/evidence/{order.job.train_name}/"
        async with beating(note="choosing a victim"):
            names = await self._storage.names(root, limit=MAX_EVIDENCE)
            starts = sorted(n for n in names if n.endswith(".start.json"))
            if not starts:
                raise ApplicationError("no training worker has left evidence of its start yet", type="NoVictimYet")
            newest = starts[-1].split("/")[0]
            told = [await self._read(root + name) for name in starts if name.startswith(newest + "/")]
            if len(told) < int(told[0]["world_size"]):
                raise ApplicationError("not every rank of the newest attempt has started yet", type="NoVictimYet")
            chosen = max(told, key=lambda t: int(t["rank"]))
            # The commit may have moved on since the watch returned; the proof is held against the newest one seen.
            commits = await committed(self._storage, order.job)
            return Victim(
                rank=chosen["rank"],
                node_id=chosen["ray"]["node_id"],
                address=chosen["ray"]["address"],
                attempt=chosen["attempt"],
                pid=chosen["process"]["pid"],
                start_time=chosen["process"]["start_time"],
                boot_id=chosen["process"]["boot_id"],
                commit=commits[-1] if commits else order.commit,
            )

    @activity.defn(name=activity_names.STRIKE)
    async def strike_victim(self, order: DrillOrder) -> Strike:
        """Strike by a helper job that Ray places on the victim's node. Its id is derived and claimed, so striking
        twice adopts the first strike, and the helper compares pid *and* start time: killed once, or gone already."""
        victim, job = order.victim, order.job
        assert victim is not None
        helper = submission_id(job.identity.run_key, "strike")
        async with (
            beating(note=f"striking rank {victim.rank}, pid {victim.pid}") as heart,
            reach(self._providers, job.hosts) as endpoint,
            Jobs.at(endpoint) as jobs,
            claimed(self._client, job.identity, self._submission.job_claim(job.hosts, helper)) as permit,
        ):
            if await jobs.info(helper) is None:
                permit.check()
                try:
                    await jobs.submit(
                        helper,
                        _command(victim),
                        resources={f"node:{victim.address}": 0.001},
                        metadata={"lanyard_run": job.identity.run_key},
                    )
                except JobsError:
                    if await jobs.info(helper) is None:
                        raise
            deadline = time.monotonic() + HELPER_S
            while (info := await jobs.info(helper)) is None or not info.terminal:
                if time.monotonic() > deadline:
                    raise ApplicationError(f"the strike's helper job {helper} did not end in {HELPER_S:.0f} s")
                heart.say(helper=info.status if info else "unknown")
                await asyncio.sleep(0.3)
            return _answer(await jobs.logs(helper), helper, info.message)

    async def _read(self, uri: str) -> dict[str, Any]:
        got = await self._storage.get(uri)
        if got is None or got.body is None:
            raise ApplicationError(f"evidence {uri} is gone", type="NoVictimYet")
        try:
            return evidence_in(uri, got.body)
        except ValueError as error:
            raise ApplicationError(f"evidence {uri}: {error}", type="NoEvidence", non_retryable=True) from error


def _command(victim: Victim) -> str:
    """A program of the standard library alone: no Ray, no environment to prepare. It answers before it strikes: one
    helper was seen to end without its answer right after the strike. What follows proves that the victim died."""
    program = _STRIKE.format(pid=victim.pid, start=victim.start_time, boot=victim.boot_id, mark=_RESULT)
    return f"python -S -c {shlex.quote(program)}"


_STRIKE: Final = """
import json, os, signal, time
def start_time():
    with open("/proc/{pid}/stat") as f:
        return int(f.read().rsplit(")", 1)[1].split()[19])
def answer(outcome):
    print("{mark}" + json.dumps(dict(outcome=outcome, at=time.time())), flush=True)
try:
    with open("/proc/sys/kernel/random/boot_id") as f:
        same_boot = f.read().strip() == "{boot}"
    fd = os.pidfd_open({pid})
    if same_boot and start_time() == {start}:
        answer("killed")
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    else:
        answer("already_gone")
except (ProcessLookupError, FileNotFoundError):
    answer("already_gone")
"""


def _answer(log: str, helper: str, message: str) -> Strike:
    # The log begins with the entrypoint itself, in which the words stand too: only a whole answer counts, the last one.
    found = re.findall(_RESULT + r"(\{.*\})$", log, re.MULTILINE)
    if not found:
        tail = " | ".join(log.strip().splitlines()[-3:])[-300:]
        raise ApplicationError(
            f"the log of the strike's helper job {helper} holds no answer (yet): {message[-200:]}; it ends: {tail}",
            type="NoStrike",
        )
    told = json.loads(found[-1])
    return Strike(outcome=told["outcome"], at=told["at"], helper=helper)
