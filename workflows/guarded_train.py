"""GuardedTrain: one guarded training run, told as a story."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ActivityError, ApplicationError, FailureError, WorkflowAlreadyStartedError
from temporalio.workflow import ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from workflows import activity_names as names
    from workflows import presentation, timeouts
    from workflows.custody import Custody
    from workflows.evidence import (
        Artifacts,
        Cleared,
        CustodyOrder,
        Deployment,
        DrillOrder,
        Hosts,
        HostsOrder,
        Identity,
        JobOrder,
        Outcome,
        PreflightOrder,
        Proof,
        ProofOrder,
        RecordsOrder,
        Release,
        Strike,
        SubmittedJob,
        Verdict,
        VerifyOrder,
        Victim,
        WatchOrder,
        WatchResult,
    )
    from workflows.names import custody_id, run_key, run_root
    from workflows.orders import MAIN, PARITY, hosts_order, job_order
    from workflows.policy import custody_deadline, milestones, next_milestones
    from workflows.progress import Progress
    from workflows.spec import RunSpec, SpecError, parse_run
    from workflows.stories import outlive

T = TypeVar("T")

MAX_EXTENSIONS = 20
MAX_EXTENSION_MINUTES = 24 * 60


class Stopped(Exception):
    """The run was told to stop: aborted, cancelled, out of time, or its hosts were released."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class Failed(Exception):
    """The run cannot go on."""

    def __init__(self, message: str, outcome: Outcome = "failed") -> None:
        super().__init__(message)
        self.outcome = outcome


@workflow.defn(name="GuardedTrain", failure_exception_types=[Exception])
class GuardedTrain:
    """Preflight, hosts, job, commits, drill, exports, release, verification, report.

    A bug here ends the run Failed, and that releases what it claimed.
    """

    def __init__(self) -> None:
        self._progress = Progress()
        self._stop: Stopped | None = None
        self._custody: workflow.ExternalWorkflowHandle[Custody] | None = None
        self._verdict: Verdict | None = None
        self._closing = False

    @workflow.run
    async def run(self, *args: Any) -> Verdict:
        try:
            spec = parse_run(args)
        except SpecError as refused:
            self._reject(str(refused))
        deadline = asyncio.create_task(self._keep_the_deadline(spec.limits.run))
        training = asyncio.create_task(self._train(spec))
        outcome, message = await self._ending_of(training)
        deadline.cancel()
        self._verdict = await outlive(asyncio.create_task(self._close(spec, outcome, message)), self._cancelled)
        await workflow.wait_condition(workflow.all_handlers_finished)
        return self._speak(self._verdict)

    # The story

    async def _train(self, spec: RunSpec) -> None:
        """Everything up to a finished training whose exports lie in storage."""
        identity = await self._introduce(spec)
        hosts = hosts_order(spec, identity)
        await self._start_custody(identity, hosts, spec)
        await self._preflight(spec, identity, hosts)
        await self._provision(spec, hosts)
        await self._run_job(spec, self._job(spec, hosts, MAIN))
        if spec.parity:
            await self._run_job(spec, self._job(spec, hosts, PARITY))
        await self._prove(spec, identity)

    async def _close(self, spec: RunSpec, outcome: Outcome, message: str) -> Verdict:
        """Save what only the hosts know, release everything, verify from storage alone, report."""
        self._closing = True
        await self._save_records(spec)
        await self._release(spec, outcome, message)
        if outcome == "succeeded":
            outcome, message = await self._verify(spec, message)
        return await self._report(outcome, message)

    # Its chapters

    async def _introduce(self, spec: RunSpec) -> Identity:
        """Who this run is, and where it is operated from. The first activity's answer is the recorded one."""
        info = workflow.info()
        key = run_key(info.workflow_id, info.namespace, info.original_execution_run_id)
        identity = Identity(
            workflow_id=info.workflow_id,
            run_id=info.run_id,
            original_run_id=info.original_execution_run_id,
            run_key=key,
            custody_id=custody_id(key),
            deployment="",
            namespace=info.namespace,
            storage=run_root(spec.storage.uri, key),
        )
        # Known before anything can fail, so that every ending has a verdict.
        self._progress.spec, self._progress.identity = spec, identity
        self._show()
        place = await self._unless_stopped(
            self._act(names.ORIENT, None, Deployment, timeouts.SHORT, "find out about this deployment")
        )
        self._progress.deployment = place
        identity = self._progress.identity = identity.model_copy(update={"deployment": place.deployment})
        self._show()
        return identity

    async def _start_custody(self, identity: Identity, hosts: HostsOrder, spec: RunSpec) -> None:
        assert self._progress.deployment
        assert self._progress.deadline
        order = CustodyOrder(
            identity=identity,
            hosts=hosts,
            deadline=custody_deadline(self._progress.deadline, spec.limits.teardown),
            budget=spec.limits.budget,
            search_attributes=self._progress.deployment.search_attributes,
        )
        # Not the child's own handle: the server delivers nothing through it once the run was reset.
        custody = workflow.get_external_workflow_handle_for(Custody.run, identity.custody_id)
        try:
            await workflow.start_child_workflow(
                Custody.run,
                order,
                id=identity.custody_id,
                task_queue=timeouts.RUN_QUEUE,
                parent_close_policy=ParentClosePolicy.REQUEST_CANCEL,
                cancellation_type=workflow.ChildWorkflowCancellationType.ABANDON,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
                static_summary=f"custody of {identity.workflow_id}",
            )
        except WorkflowAlreadyStartedError as reset:
            raise Failed("this run was reset to before its custody began") from reset
        finally:
            self._custody = custody
        # An extension that came while custody was being started could not be passed on.
        deadline = custody_deadline(self._progress.deadline, spec.limits.teardown)
        if deadline != order.deadline:
            await custody.signal(Custody.move_deadline, deadline)

    async def _preflight(self, spec: RunSpec, identity: Identity, hosts: HostsOrder) -> None:
        self._enter("preflight")
        place = self._progress.deployment
        assert place
        self._progress.cleared = await self._unless_stopped(
            self._act(
                names.PREFLIGHT,
                PreflightOrder(identity=identity, spec=spec, hosts=hosts, deployment=place),
                Cleared,
                timeouts.PREFLIGHT,
                f"try everything that can fail before {spec.hosts.count} hosts are paid for",
            )
        )

    async def _provision(self, spec: RunSpec, hosts: HostsOrder) -> None:
        assert self._progress.cleared
        hosts = hosts.model_copy(update={"price_per_hour": self._progress.cleared.price_per_hour})
        limit = spec.limits.provision
        self._enter("provision")
        await self._unless_stopped(self._launch(spec, hosts), limit, "provision")

    async def _launch(self, spec: RunSpec, hosts: HostsOrder) -> None:
        if spec.hosts.owned:
            await self._act(
                names.LAUNCH,
                hosts,
                type(None),
                timeouts.LONG,
                f"claim, then create {hosts.count} {hosts.provider} hosts",
                retry=timeouts.MUTATE,
            )
            self._progress.own(f"cluster {hosts.identity.run_key}")
        self._enter("serve")
        self._progress.hosts = await self._act(
            names.PROVE_HOSTS,
            hosts,
            Hosts,
            timeouts.LONG,
            "all hosts up, each has proved itself",
            queue=timeouts.WATCH_QUEUE,
        )

    def _job(self, spec: RunSpec, hosts: HostsOrder, train_name: str) -> JobOrder:
        resume = self._progress.cleared.resume if self._progress.cleared else None
        return job_order(spec, hosts.identity, hosts, train_name, resume)

    async def _run_job(self, spec: RunSpec, job: JobOrder) -> None:
        """Submit the job and watch it to its end; in the main one, with a drill, kill a worker on the way."""
        parity = job.train_name == PARITY
        self._enter("submit" if not parity else "parity")
        await self._unless_stopped(
            self._act(
                names.SUBMIT,
                job,
                SubmittedJob,
                timeouts.SUBMIT,
                f"submit Ray Job {job.submission_id}",
                retry=timeouts.MUTATE,
            )
        )
        self._progress.submissions.append(job.submission_id)
        self._progress.own(f"job {job.submission_id}")
        if not parity:
            self._enter("train")
        drill = None if parity else spec.drill
        interval, steps = spec.workload.commit_interval, spec.workload.total_steps
        marks = milestones(steps, interval, (drill.after_step, drill.after_step + interval) if drill else ())
        seen = None
        while True:
            watch = WatchOrder(
                job=job, steps=steps, stall_s=spec.limits.stall, milestones=next_milestones(marks, seen), seen=seen
            )
            result = await self._unless_stopped(
                self._act(
                    names.WATCH,
                    watch,
                    WatchResult,
                    timeouts.LONG,
                    f"watch {job.submission_id} for commits" + (f" after step {seen.step}" if seen else ""),
                    queue=timeouts.WATCH_QUEUE,
                )
            )
            seen = result.commit or seen
            if not parity:
                self._progress.saw(result.commit, workflow.time())
            if result.end == "finished":
                break
            if result.end != "milestone":
                raise Failed(presentation.job_ended_badly(result))
            self._show()
            if self._progress.has_recovered():
                self._enter("train")
            if drill and self._progress.strike is None and seen and seen.step >= drill.after_step:
                await self._drill(DrillOrder(job=job, commit=seen))
        if drill and self._progress.strike is None:
            raise Failed(
                f"the drill was not done: training finished before a commit at step {drill.after_step} was seen; "
                "let training take longer or drill earlier"
            )

    async def _drill(self, order: DrillOrder) -> None:
        """Choose one training worker, then strike exactly that."""
        self._enter("drill")
        self._progress.victim = victim = await self._unless_stopped(
            self._act(
                names.CHOOSE,
                order,
                Victim,
                timeouts.STRIKE,
                f"choose the worker to kill after step {order.commit.step}",
            )
        )
        self._progress.strike = await self._unless_stopped(
            self._act(
                names.STRIKE,
                order.model_copy(update={"victim": victim}),
                Strike,
                timeouts.STRIKE,
                f"SIGKILL rank {victim.rank} (pid {victim.pid}) on {victim.address}",
                retry=timeouts.MUTATE,
            )
        )
        self._enter("recover")

    async def _prove(self, spec: RunSpec, identity: Identity) -> None:
        """Placement and, after a drill, exact recovery: from evidence, or it did not happen."""
        self._enter("prove")
        order = ProofOrder(
            identity=identity,
            world_size=spec.hosts.count,
            victim=self._progress.victim,
            strike=self._progress.strike,
            parity=spec.parity,
        )
        proof = self._progress.proof = await self._unless_stopped(
            self._act(names.PROVE, order, Proof, timeouts.SHORT, "prove placement and recovery from evidence")
        )
        if proof.recovery and not proof.recovery.proved:
            raise Failed("the drill failed: " + "; ".join(proof.recovery.problems))

    async def _save_records(self, spec: RunSpec) -> None:
        identity = self._progress.identity
        if not (identity and self._progress.submissions):
            return
        self._enter("save records")
        order = RecordsOrder(hosts=hosts_order(spec, identity), submissions=tuple(self._progress.submissions))
        try:
            await self._act(
                names.SAVE_RECORDS, order, type(None), timeouts.RECORDS, "save logs and status", retry=timeouts.FEW
            )
        except ActivityError as failed:
            self._progress.unsaved = presentation.cause_of(failed)
            self._note(f"logs were not saved: {self._progress.unsaved}")

    async def _release(self, spec: RunSpec, outcome: Outcome, message: str) -> None:
        """Ask custody, and wait for its word within the teardown limit. It goes on without us if need be."""
        identity = self._progress.identity
        if self._custody is None:
            self._progress.release = presentation.nothing_claimed(
                identity.run_key if identity else "", f"the run {outcome}", workflow.time()
            )
            return
        self._enter("release")
        if self._progress.release is None:
            try:
                await self._custody.signal(Custody.release, f"the run {outcome}")
                await workflow.wait_condition(
                    lambda: self._progress.release is not None,
                    timeout=spec.limits.teardown,
                    timeout_summary="teardown deadline",
                )
            except TimeoutError:
                self._note("the teardown limit passed; custody goes on releasing")
                self._progress.release = presentation.unfinished_release(
                    identity.run_key if identity else "", workflow.time()
                )
            except FailureError as gone:
                self._note(f"custody could not be told: {presentation.first_line(gone)}")
        self._show()

    async def _verify(self, spec: RunSpec, message: str) -> tuple[Outcome, str]:
        """Download again from storage alone and check everything. The hosts are gone by now."""
        identity = self._progress.identity
        assert identity is not None
        self._enter("verify")
        order = VerifyOrder(
            identity=identity,
            submission_id=self._progress.submissions[0],
            distinct_hosts=spec.hosts.require_distinct_hosts,
            distinct_devices=spec.hosts.require_distinct_devices,
            expect=self._job(spec, hosts_order(spec, identity), MAIN).order,
        )
        try:
            artifacts = self._progress.artifacts = await self._act(
                names.VERIFY, order, Artifacts, timeouts.VERIFY, "verify artifacts from storage alone"
            )
        except ActivityError as failed:
            return "failed", f"artifacts could not be verified: {presentation.cause_of(failed)}"
        if not artifacts.ok:
            bad = "; ".join(f"{c.name}: {c.detail}" for c in artifacts.checks if not c.ok)
            return "failed", f"artifacts do not hold after teardown: {bad[:1500]}"
        return "succeeded", message

    async def _report(self, outcome: Outcome, message: str) -> Verdict:
        if self._progress.release:
            # The watch told of milestones only; this is what was committed until the end.
            self._progress.saw(self._progress.release.last_commit, workflow.time())
        if outcome != "succeeded" and (hint := self._progress.resume_hint()):
            message = f"{message} ({hint})"
        self._enter("report")
        self._progress.leave(workflow.time())
        verdict = self._progress.ended = self._progress.verdict(outcome, message)
        self._show()
        if self._progress.identity and self._custody and outcome != "rejected":
            try:
                await self._act(
                    names.REPORT, verdict, type(None), timeouts.REPORT, "write the report", retry=timeouts.FEW
                )
            except ActivityError as failed:
                self._note(f"the report was not written: {presentation.cause_of(failed)}")
        return verdict

    # How it ends

    async def _ending_of(self, training: asyncio.Task[None]) -> tuple[Outcome, str]:
        """Outcome and message. A stop that was asked for is looked at before anything else (sdk-python #620)."""
        try:
            await outlive(training, self._cancelled)
        except (Stopped, Failed) as known:
            outcome, message = known.outcome, str(known)
        except ActivityError as failed:
            outcome, message = presentation.outcome_of(failed), presentation.cause_of(failed)
        except Exception as bug:
            workflow.logger.exception("GuardedTrain: unexpected")
            outcome, message = "failed", f"unexpected {type(bug).__name__}: {presentation.first_line(bug)}"
        else:
            outcome, message = "succeeded", "trained, exported and verified"
        info = workflow.info()
        if outcome == "failed" and info.run_id != info.original_execution_run_id:
            message = f"reset after release; start again with resume ({message})"
        return outcome, message

    def _reject(self, message: str) -> NoReturn:
        raise ApplicationError(
            f"rejected: {message}", {"outcome": "rejected", "cleanup": "clean", "message": message}, type="rejected"
        )

    def _speak(self, verdict: Verdict) -> Verdict:
        """Completed = succeeded or aborted as asked; Failed = rejected or failed; Canceled = cancelled."""
        if verdict.outcome in ("succeeded", "aborted"):
            return verdict
        if verdict.outcome == "cancelled":
            raise asyncio.CancelledError(verdict.message)
        raise ApplicationError(f"{verdict.outcome}: {verdict.message}", verdict, type=verdict.outcome)

    # What the outside may say and ask

    @workflow.signal
    def abort(self, *reason: Any) -> None:
        """Stop, release everything, and end Completed with outcome `aborted`. Works in every phase, with whatever
        was sent as a reason: a signal that does not decode would be dropped, or end the run Failed."""
        self._stop_for("aborted", "aborted as asked" + (f": {str(reason[0])[:500]}" if reason and reason[0] else ""))

    @workflow.signal
    def released(self, *told: Any) -> None:
        """Custody's word. When nobody asked for it, the run has lost its hosts."""
        identity = self._progress.identity
        try:
            [record] = [Release.model_validate(word) for word in told]
        except ValueError:
            return
        if identity is None or record.run_key != identity.run_key:
            return
        self._progress.release = record
        if not self._closing:
            self._stop_for("failed", f"custody released the hosts: {record.reason}")

    @workflow.update
    async def extend(self, *told: Any) -> str:
        """Move the run's deadline by this many minutes; answers the new deadline. At most 20 times."""
        assert self._progress.deadline is not None
        [minutes] = told
        self._progress.extended += 1
        self._progress.deadline += float(minutes) * 60
        self._note(f"deadline extended by {minutes} minutes")
        if self._custody and self._progress.spec:
            teardown = self._progress.spec.limits.teardown
            await self._custody.signal(Custody.move_deadline, custody_deadline(self._progress.deadline, teardown))
        return presentation.clock(self._progress.deadline)

    @extend.validator
    def _may_extend(self, *told: Any) -> None:
        minutes = told[0] if len(told) == 1 and not isinstance(told[0], bool) else None
        if not isinstance(minutes, int | float) or not 1 <= minutes <= MAX_EXTENSION_MINUTES:
            raise ApplicationError(f"extend takes a number of minutes from 1 to {MAX_EXTENSION_MINUTES}")
        if self._progress.extended >= MAX_EXTENSIONS:
            raise ApplicationError(f"extended {MAX_EXTENSIONS} times already; start a new run with resume")
        if self._closing or self._stop or self._progress.deadline is None:
            raise ApplicationError("this run is ending; there is nothing to extend")

    @workflow.query
    def progress(self) -> dict[str, Any]:
        return self._progress.answer()

    @workflow.query
    def claims(self) -> dict[str, Any]:
        """What is owned as far as the run knows; custody (`claims`, `state`) has the word that counts."""
        return {
            "custody": self._progress.answer()["custody"],
            "owned": self._progress.holding(),
            "release": self._progress.release,
        }

    @workflow.query
    def verdict(self) -> Verdict | None:
        return self._verdict

    # Plumbing

    def _stop_for(self, outcome: Outcome, message: str) -> None:
        if self._closing:
            self._note(f"too late to change the outcome: {message}")
        elif self._stop is None:
            self._stop = Stopped(outcome, message)
            self._note(message)

    def _cancelled(self) -> None:
        self._stop_for("cancelled", "cancelled as asked")

    async def _keep_the_deadline(self, limit_s: float) -> None:
        self._progress.deadline = workflow.time() + limit_s
        while (left := self._progress.deadline - workflow.time()) > 0:
            await workflow.sleep(left, summary="run deadline")
        more = f", {self._progress.extended} times extended" if self._progress.extended else ""
        self._stop_for("failed", f"the run's limit of {limit_s / 60:g} minutes (limits.run{more}) passed")

    async def _unless_stopped(self, work: Coroutine[Any, Any, T], limit_s: float | None = None, limit: str = "") -> T:
        """Do one thing of the story unless the run is told to stop first; with a limit, a durable timer of its own."""
        if self._stop:
            work.close()
            raise self._stop
        task = asyncio.create_task(work)
        try:
            await workflow.wait_condition(
                lambda: task.done() or self._stop is not None,
                timeout=limit_s,
                timeout_summary=f"{limit} deadline" if limit else None,
            )
        except TimeoutError:
            task.cancel()
            raise Failed(
                f"{limit} took longer than {(limit_s or 0) / 60:g} minutes (limits.{limit}); "
                "raise the limit or see the activity's last failure and heartbeat for the reason"
            ) from None
        if self._stop:
            task.cancel()
            raise self._stop
        return task.result()

    async def _act(
        self,
        name: str,
        order: Any,
        result: type[T],
        within: timedelta,
        summary: str,
        *,
        queue: str = timeouts.RUN_QUEUE,
        retry: RetryPolicy = timeouts.RETRY,
    ) -> T:
        args = [] if order is None else [order]
        done: T = await workflow.execute_activity(
            name,
            args=args,
            result_type=result,
            task_queue=queue,
            schedule_to_close_timeout=within,
            heartbeat_timeout=timeouts.HEARTBEAT,
            retry_policy=retry,
            summary=summary[:200],
        )
        return done

    def _enter(self, phase: str) -> None:
        self._progress.enter(phase, workflow.time())
        self._show()

    def _note(self, what: str) -> None:
        self._progress.note(what, workflow.time())
        self._show()

    def _show(self) -> None:
        verdict = self._progress.ended
        workflow.set_current_details(presentation.run_details(self._progress, str(self._stop or "")))
        place, identity, commit = self._progress.deployment, self._progress.identity, self._progress.commit
        if place and identity:
            presentation.show_attributes(
                place.search_attributes,
                {
                    "LanyardPhase": self._progress.phase,
                    "LanyardRunKey": identity.run_key,
                    "LanyardStep": f"{commit.step}/{self._progress.answer()['steps']}" if commit else None,
                    "LanyardOutcome": verdict.outcome if verdict else None,
                    "LanyardCleanup": verdict.cleanup if verdict else None,
                    "LanyardProvider": self._progress.spec.hosts.provider if self._progress.spec else None,
                },
            )
