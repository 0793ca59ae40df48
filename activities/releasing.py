"""Releasing: end exactly what was claimed, last first, and prove each thing absent twice, apart in time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable
from concurrent.futures import Executor
from typing import Final

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.checkpoints import DamagedRecord, commits_of, record_uri
from activities.heartbeat import Heart, beating, in_thread
from activities.hosts import HostsProvider
from activities.hosts.reach import Providers, reach
from activities.jobs import Jobs, JobsError
from activities.storage import Storage, StorageError
from workflows import activity_names
from workflows.evidence import Claim, Commit, Release, ReleaseOrder, StepTaken
from workflows.orders import MAIN

BETWEEN_PROOFS_S: Final = 2.0
"""The two proofs of absence lie at least this far apart, and the second after every claim's `may_appear_until`."""
REMAINS_S: Final = 20.0
"""How long actors and placement groups of a stopped job may take to go."""


class Releasing:
    def __init__(self, storage: Storage, providers: Providers, threads: Executor) -> None:
        self._storage = storage
        self._providers = providers
        self._threads = threads

    @activity.defn(name=activity_names.RELEASE)
    async def release(self, order: ReleaseOrder) -> Release:
        """Every step is tried even if the one before failed. Returns only when all is proved absent twice; until
        then it fails, saying what is still there, and is retried for as long as custody wants."""
        try:
            provider = self._providers.of(order.hosts)
        except ApplicationError as missing:
            raise ApplicationError(f"nothing was released: {missing}", type="NoProvider") from missing
        steps: list[StepTaken] = []
        began = time.monotonic()
        async with beating(note="release begins") as heart:
            steps.append(await self._step("tombstone", "custody", self._raise_tombstone(order)))
            for claim in reversed(order.claims):
                heart.say(note=f"releasing {claim.id}")
                steps.append(await self._release_one(provider, claim, order, heart))
            await self._prove_absent(provider, order, heart, steps, "first proof of absence")
            steps.append(await self._step("end unfinished uploads", "storage", self._end_uploads(order)))
            pause = max(BETWEEN_PROOFS_S, _may_still_appear_s(order) - (time.monotonic() - began))
            heart.say(note=f"second proof of absence in {pause:.0f} s")
            await asyncio.sleep(pause)
            await self._prove_absent(provider, order, heart, steps, "second proof of absence")
            record = Release(
                run_key=order.identity.run_key,
                cleanup="clean",
                reason=order.reason,
                claims=order.claims,
                steps=tuple(steps),
                remaining=(),
                began=order.began,
                ended=activity.info().started_time.timestamp() + time.monotonic() - began,
                last_commit=await self._last_commit(order),
            )
            noted = await self._step("release.json", "custody", self._write(order, record))
        return record if noted.ok else record.model_copy(update={"steps": (*record.steps, noted)})

    async def _release_one(self, provider: HostsProvider, claim: Claim, order: ReleaseOrder, heart: Heart) -> StepTaken:
        here = provider.context(order.hosts)
        if claim.provider != provider.name or claim.context != here:
            return StepTaken(
                claim=claim.id,
                action="refused",
                ok=False,
                detail=f"claimed in {claim.provider} {claim.context}, but this worker has {here}; run a worker there",
                seconds=0.0,
            )
        if claim.kind == "job":
            return await self._step("stop", claim.id, self._stop_job(claim, order))
        try:
            return await in_thread(self._threads, provider.release, claim, order.hosts, lambda note: None)
        except Exception as error:
            return StepTaken(claim=claim.id, action="release", ok=False, detail=str(error)[:500], seconds=0.0)

    async def _stop_job(self, claim: Claim, order: ReleaseOrder) -> str:
        """Stop to a terminal native status, then until no actor and no placement group of the cluster is left."""
        async with reach(self._providers, order.hosts) as endpoint, Jobs.at(endpoint) as jobs:
            info = await jobs.stop_to_terminal(claim.name)
            if info is None:
                return "the cluster knows no such job"
            deadline = time.monotonic() + REMAINS_S
            while left := await jobs.remains(claim.name, info.ray_job_id):
                if time.monotonic() > deadline:
                    raise JobsError(f"{info.status}, but left {'; '.join(left[:3])}")
                await asyncio.sleep(0.3)
            return f"{info.status}; no actor and no placement group left"

    async def _prove_absent(
        self, provider: HostsProvider, order: ReleaseOrder, heart: Heart, steps: list[StepTaken], what: str
    ) -> None:
        """Ask the infrastructure about every claim. What cannot be asked is not absent."""
        heart.say(note=what)
        began = time.monotonic()
        left: list[str] = []
        for claim in order.claims:
            if claim.provider != provider.name or claim.context != provider.context(order.hosts):
                left.append(f"{claim.id}: in {claim.context}, which this worker cannot see")
                continue
            try:
                left += await in_thread(self._threads, provider.remaining, claim, order.hosts)
            except Exception as error:
                left.append(f"{claim.id}: unknown ({error})")
        if left:
            failed = [f"{s.action} {s.claim}: {s.detail}" for s in steps if not s.ok]
            raise ApplicationError(
                f"still there: {'; '.join(left)[:1000]}" + (f" (failed: {'; '.join(failed)[:500]})" if failed else ""),
                type="StillThere",
            )
        steps.append(
            StepTaken(claim="all", action=what, ok=True, detail="nothing left", seconds=time.monotonic() - began)
        )

    async def _raise_tombstone(self, order: ReleaseOrder) -> str:
        """Hosts and drivers that start from now on stop at once."""
        uri = f"{order.identity.storage}/custody/tombstone.json"
        body = json.dumps({"schema": 1, "reason": order.reason}, sort_keys=True).encode()
        await self._storage.put(uri, body)
        return "raised"

    async def _end_uploads(self, order: ReleaseOrder) -> str:
        """A rank that is ended while it writes a checkpoint leaves an upload that nobody sees and somebody pays for.
        Whoever could finish it is gone by now."""
        return f"{await self._storage.abort_uploads(f'{order.identity.storage}/')} ended"

    async def _last_commit(self, order: ReleaseOrder) -> Commit | None:
        """What a later run can resume from. Where storage does not say, nothing is claimed and nothing waits for it."""
        try:
            got = await self._storage.get(record_uri(order.identity.storage, MAIN))
            commits = commits_of(got.body) if got and got.body is not None else []
        except (StorageError, DamagedRecord):
            return None
        return commits[-1] if commits else None

    async def _write(self, order: ReleaseOrder, record: Release) -> str:
        await self._storage.put(
            f"{order.identity.storage}/release.json", record.model_dump_json(indent=2).encode() + b"\n"
        )
        return "written"

    async def _step(self, action: str, on: str, work: Awaitable[str]) -> StepTaken:
        """Take one step; a failure is a finding, and the next step is tried all the same."""
        began = time.monotonic()
        try:
            detail, ok = await work, True
        except Exception as error:
            detail, ok = str(error)[:500], False
        return StepTaken(claim=on, action=action, ok=ok, detail=detail, seconds=time.monotonic() - began)


def _may_still_appear_s(order: ReleaseOrder) -> float:
    """How long, from the start of this attempt, something claimed may still appear. Custody's times and the start are
    both the Temporal server's, so this machine's clock may be wrong."""
    return max(c.may_appear_until for c in order.claims) - activity.info().started_time.timestamp()
