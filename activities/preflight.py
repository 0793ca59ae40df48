"""Preflight: everything that can fail is tried before anything is paid for."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Final, NoReturn

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.heartbeat import Heart, beating, in_thread
from activities.hosts import Offer
from activities.hosts.reach import Providers
from activities.jobs import package
from activities.storage import Storage, StorageError
from activities.verification import Application
from workflows import activity_names
from workflows.evidence import Cleared, Deployment, Identity, PreflightOrder, ResumePoint
from workflows.policy import budget_lasts_s
from workflows.spec import RunSpec, ScriptWorkload
from workflows.workloads import RegressionWorkload

AMBIENT: Final = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_JOB_SUBMISSION_ID")
"""Ray's native clients let these override an address they were given."""
NONE_LOADS: Final = 3
"""The exit status of `trainer.last_commit` for a run without a commit that loads."""
PROBE: Final = "probe-"
FOREIGN: Final = (".tfstate", ".tfstate.lock.info", "terraform.lock.hcl")
"""Names that say: this prefix is another project's state."""


class Preflight:
    def __init__(
        self,
        storage: Storage,
        providers: Providers,
        application: Application,
        deployment: Deployment,
        threads: Executor,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._storage = storage
        self._providers = providers
        self._application = application
        self._deployment = deployment
        self._threads = threads
        self._environment = environment

    @activity.defn(name=activity_names.ORIENT)
    async def orient(self) -> Deployment:
        """What this deployment is. The answer is recorded in the run's history and not asked for again."""
        return self._deployment

    @activity.defn(name=activity_names.PREFLIGHT)
    async def preflight(self, order: PreflightOrder) -> Cleared:
        """Refuses with one message (type Rejected) that names the field or setting and the remedy."""
        async with beating(note="preflight") as heart:
            self._ambient()
            self._same_deployment(order.deployment)
            provider = self._providers.of(order.hosts)
            await self._prefix_is_free(order.identity, order.spec)
            conditional = await self._probe(order.identity)
            if isinstance(order.spec.workload, ScriptWorkload):
                await in_thread(self._threads, self._source, order.spec.workload)
            heart.say(note=f"checking {order.hosts.provider} hosts")
            problems = await in_thread(self._threads, provider.check, order.hosts)
            if problems:
                _refuse("hosts: " + "; ".join(problems))
            offer = await in_thread(self._threads, provider.offer, order.hosts)
            self._affordable(order.spec, offer)
            resume = await self._resume(order.spec, heart)
            await self._own(order.identity)
            return Cleared(
                conditional_writes=conditional,
                price_per_hour=offer.price_per_hour,
                plan=offer.text,
                resume=resume,
            )

    def _ambient(self) -> None:
        found = [name for name in AMBIENT if self._environment.get(name)]
        if found:
            _refuse(
                f"{', '.join(found)} is set in the worker's environment, and Ray's clients let it override the run's "
                f"own address; unset it and restart the worker"
            )

    def _same_deployment(self, recorded: Deployment) -> None:
        """Any worker may have to stop what another started, so all need the same deployment settings."""
        if recorded.deployment != self._deployment.deployment:
            _refuse(
                f"LANYARD_DEPLOYMENT: workers of {recorded.deployment} and of {self._deployment.deployment} poll the "
                "same task queues; give all of them one deployment, or each a namespace of its own"
            )
        if recorded.secret_fingerprint != self._deployment.secret_fingerprint:
            _refuse(
                "LANYARD_SECRET_FILE: this deployment's workers have different secrets "
                f"(fingerprints {recorded.secret_fingerprint} and {self._deployment.secret_fingerprint}), so one could "
                "not stop another's job; give all of them the same file"
            )

    async def _prefix_is_free(self, identity: Identity, spec: RunSpec) -> None:
        """The run's own root must be empty or ours, and neither it nor what lies above may be a run or a stranger's."""
        uri = spec.storage.uri.rstrip("/")
        try:
            bucket, *parts = uri.removeprefix("s3://").split("/")
            for depth in range(1, len(parts) + 1):
                above = f"s3://{bucket}/{'/'.join(parts[:depth])}"
                if await self._storage.get(f"{above}/owner.json"):
                    _refuse(
                        f"storage.uri: {above} already holds a run; name the prefix above it for a new run, "
                        f'or go on from it with "resume": {{"from": "{above}"}}'
                    )
            beside = await self._storage.names(f"{uri}/", limit=200)
            foreign = [name for name in beside if "/" not in name and name.endswith(FOREIGN)]
            if foreign:
                _refuse(
                    f"storage.uri: {uri} looks like another project's state ({foreign[0]}); use a prefix of your own"
                )
            root = await self._storage.names(f"{identity.storage}/", limit=5)
            owner = await self._storage.get(f"{identity.storage}/owner.json")
        except StorageError as error:
            _refuse(f"storage.uri: {error}")
        ours = owner and owner.body and _custody_in(owner.body) == identity.custody_id
        probes = [name for name in root if name.startswith(PROBE)]
        if not ours and len(probes) < len(root):
            _refuse(f"storage.uri: {identity.storage} already holds {root[0]} and is not this run's")
        for name in probes:
            # Of an attempt of this preflight that was killed.
            with contextlib.suppress(StorageError):
                await self._storage.delete(f"{identity.storage}/{name}")

    async def _probe(self, identity: Identity) -> bool:
        """Write, read back and delete, with the credentials that will be used: a list proves nothing. Returns whether
        conditional writes are honoured."""
        uri = f"{identity.storage}/{PROBE}{secrets.token_hex(4)}"
        body = secrets.token_bytes(32)
        try:
            await self._storage.put(uri, body)
            try:
                got = await self._storage.get(uri)
                if not got or got.body != body:
                    _refuse(f"storage.uri: {uri} does not read back what was written; this storage cannot be used")
                conditional = await self._conditional(uri)
            finally:
                await self._storage.delete(uri)
            if await self._storage.get(uri):
                _refuse(f"storage.uri: {uri} is still there after it was deleted")
        except StorageError as error:
            _refuse(f"storage.uri: {error}")
        return conditional

    async def _conditional(self, uri: str) -> bool:
        try:
            await self._storage.put(uri, b"overwritten", only_if_absent=True)
        except StorageError as error:
            return error.code in ("PreconditionFailed", "412", "ConditionalRequestConflict")
        return False

    def _affordable(self, spec: RunSpec, offer: Offer) -> None:
        """A budget that is spent before the hosts need to be there buys nothing."""
        lasts = budget_lasts_s(spec.limits.budget, offer.price_per_hour)
        if lasts is not None and lasts < spec.limits.provision:
            _refuse(
                f"limits.budget: {spec.limits.budget:g} US dollars last {lasts / 60:.0f} minutes at "
                f"{offer.price_per_hour:.2f} an hour ({offer.text}), less than limits.provision; raise limits.budget"
            )

    def _source(self, workload: ScriptWorkload) -> None:
        try:
            package({"": Path(workload.working_dir)})
        except (OSError, ValueError) as error:
            _refuse(f"workload.working_dir: {error}")
        interpreter, *rest = workload.entrypoint
        script = Path(workload.working_dir, rest[0]) if rest and rest[0].endswith(".py") else None
        if script and Path(interpreter).name.startswith("python") and not script.is_file():
            _refuse(
                f"workload.entrypoint: {rest[0]} is no file in {workload.working_dir}; correct the one or the other"
            )

    async def _resume(self, spec: RunSpec, heart: Heart) -> ResumePoint | None:
        """The newest commit of the earlier run that really loads."""
        if spec.resume is None:
            return None
        source = spec.resume.from_.rstrip("/")
        heart.say(note=f"looking for a commit that loads in {source}")
        asked = [source, "--patient", "--workload", spec.workload.kind]
        if isinstance(spec.workload, RegressionWorkload):
            training = {"recipe": spec.workload.recipe.model_dump(mode="json"), "world_size": spec.hosts.count}
            asked += ["--for", json.dumps(training)]
        code, out, err = await self._application.tool("trainer.last_commit", *asked)
        said = (err.strip().splitlines() or out.strip().splitlines() or [f"exit status {code}"])[-1]
        said = said.removeprefix("last_commit: ")
        if code == NONE_LOADS:
            _refuse(f"resume.from: {said}")
        if code != 0:
            # Storage that is silent says nothing about the run's commits: asked again within preflight's time.
            raise ApplicationError(f"resume.from: {said}", type="ResumeUnknown")
        told = json.loads(out.strip().splitlines()[-1])
        if told["step"] is None:
            # A script that reports no step: what is left to do is its own to know.
            return ResumePoint(source=source, checkpoint=told["checkpoint"], step=None)
        step = int(told["step"])
        if step >= spec.workload.total_steps:
            _refuse(f"{_steps(spec)}: must be more than {step}, the step of the commit to resume from; raise it")
        if spec.drill and spec.drill.after_step <= step:
            _refuse(f"drill.after_step: must be more than {step}, the step of the commit to resume from")
        return ResumePoint(source=source, checkpoint=told["checkpoint"], step=step)

    async def _own(self, identity: Identity) -> None:
        body = {"schema": 1, **identity.model_dump(mode="json", exclude={"storage", "original_run_id"})}
        try:
            await self._storage.put(f"{identity.storage}/owner.json", json.dumps(body, sort_keys=True).encode())
        except StorageError as error:
            _refuse(f"storage.uri: {error}")


def _steps(spec: RunSpec) -> str:
    """Where run.json says how long the training is."""
    return "workload.recipe.steps" if isinstance(spec.workload, RegressionWorkload) else "workload.steps"


def _custody_in(owner: bytes) -> object:
    """Whose root it is; None where that cannot be read, which makes it a stranger's."""
    try:
        told = json.loads(owner)
    except (ValueError, RecursionError):
        return None
    return told.get("custody_id") if isinstance(told, dict) else None


def _refuse(message: str) -> NoReturn:
    raise ApplicationError(message, type="Rejected", non_retryable=True)
