"""Submitting a run's job, adopting it when it is there already, and saving what only its cluster knows."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Final

from temporalio import activity
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from activities.custody import claimed, holder
from activities.heartbeat import beating
from activities.hosts.reach import Providers, reach
from activities.jobs import REQUEST_S, Jobs, JobsError, Package, package
from activities.storage import Storage, StorageError
from workflows import activity_names
from workflows.evidence import Claim, HostsOrder, JobOrder, RecordsOrder, SubmittedJob

SEND_WINDOW_S: Final = 60.0
"""From the claim to the last request of a submission: an upload of a few megabytes and one POST."""


class Submission:
    def __init__(self, client: Client, storage: Storage, providers: Providers, trainer: Path) -> None:
        self._client = client
        self._storage = storage
        self._providers = providers
        self._trainer = trainer

    @activity.defn(name=activity_names.SUBMIT)
    async def submit_job(self, order: JobOrder) -> SubmittedJob:
        """Claim the submission id, then create it or adopt it. Sent twice, there is still one job."""
        async with beating(note="packing the source") as heart:
            source = await asyncio.to_thread(self._source, order)
            mine = self.job_claim(order.hosts, order.submission_id)
            async with (
                reach(self._providers, order.hosts) as endpoint,
                Jobs.at(endpoint) as jobs,
                claimed(self._client, order.identity, mine) as permit,
            ):
                heart.say(note=f"submitting {order.submission_id}")
                found = await jobs.info(order.submission_id)
                if found is None:
                    permit.check()
                    await jobs.deliver(source)
                    permit.check()
                    try:
                        await jobs.submit(
                            order.submission_id,
                            order.entrypoint,
                            env={"LANYARD_JOB": json.dumps(order.order, sort_keys=True)},
                            source=source,
                            metadata={"lanyard_run": order.identity.run_key},
                        )
                        return SubmittedJob(submission_id=order.submission_id, adopted=False)
                    except JobsError:
                        # "Already exists" and a lost answer look alike: maybe it is there. Look it up.
                        found = await jobs.info(order.submission_id)
                        if found is None:
                            raise
                if found.metadata.get("lanyard_run") != order.identity.run_key:
                    raise ApplicationError(
                        f"a job {order.submission_id} exists that is not this run's; it is left alone",
                        type="NotOurs",
                        non_retryable=True,
                    )
                return SubmittedJob(submission_id=order.submission_id, adopted=True)

    @activity.defn(name=activity_names.SAVE_RECORDS)
    async def save_records(self, order: RecordsOrder) -> None:
        """Save each job's log and native status below `logs/`, before the hosts go."""
        root = f"{order.hosts.identity.storage}/logs"
        async with (
            beating(note="saving logs"),
            reach(self._providers, order.hosts) as endpoint,
            Jobs.at(endpoint) as jobs,
        ):
            trouble = []
            for submission in order.submissions:
                try:
                    status = await jobs.raw(submission)
                    if status is not None:
                        await self._storage.put(f"{root}/{submission}.status.json", status)
                    await self._storage.put(f"{root}/{submission}.log", (await jobs.logs(submission)).encode())
                except (JobsError, StorageError) as error:
                    trouble.append(str(error))
            if trouble:
                raise ApplicationError("; ".join(trouble)[:1000], type="NotSaved")

    def job_claim(self, hosts: HostsOrder, submission_id: str) -> Claim:
        """The claim of one submission id on these hosts."""
        return Claim(
            kind="job",
            name=submission_id,
            provider=hosts.provider,
            context=self._providers.of(hosts).context(hosts),
            run_id=hosts.identity.run_id,
            holder=holder(),
            send_window_s=SEND_WINDOW_S,
            longest_request_s=REQUEST_S,
        )

    def _source(self, order: JobOrder) -> Package:
        trees = {"trainer": self._trainer}
        if order.working_dir is not None:
            trees[""] = Path(order.working_dir)
        try:
            return package(trees)
        except (OSError, ValueError) as error:
            raise ApplicationError(f"workload.working_dir: {error}", type="Rejected", non_retryable=True) from error
