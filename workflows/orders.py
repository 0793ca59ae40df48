"""Turns a run's spec into the orders given to activities. Pure."""

from __future__ import annotations

import shlex

from workflows.evidence import HostsOrder, Identity, JobOrder, ResumePoint
from workflows.names import submission_id
from workflows.spec import RunSpec, ScriptWorkload

MAIN = "main"
PARITY = "parity"
LEASE_KEEPER = "python -m trainer.lease_keeper --"
"""A job also ends where nobody hosts it for us."""
DRILL_HOLD_S = 180.0
"""How long ranks wait at the drill's commit for the strike. Choosing and striking take seconds; a loaded machine and
a worker that was just replaced get minutes. When it runs out the training goes on, and the drill fails honestly."""
NOT_AFTER_SLACK_S = 600.0
"""A hosting service's hard end lies this far behind custody's own deadline, which normally comes first."""
FAILURES = {"worker": 2, "controller": 1, "preemption": 1}
"""Every class of Train V2's failures has its limit; its defaults retry two of them for ever."""
MAX_EXTENSION_S = 30 * 24 * 3600.0
"""The hard end has to be known when a service starts, so what `extend` may add is counted in."""


def hosts_order(spec: RunSpec, identity: Identity) -> HostsOrder:
    """The hosts a run needs."""
    hosts = spec.hosts
    options = hosts.model_dump(mode="json", exclude={"provider", "count", "device"})
    return HostsOrder(
        identity=identity,
        provider=hosts.provider,
        count=hosts.count,
        device=hosts.device,
        options=options,
        lease_s=spec.limits.lease,
        not_after_s=spec.limits.run + spec.limits.teardown + NOT_AFTER_SLACK_S + MAX_EXTENSION_S,
    )


def job_order(
    spec: RunSpec, identity: Identity, hosts: HostsOrder, train_name: str, resume: ResumePoint | None
) -> JobOrder:
    """The run's training job, or with `train_name` PARITY the uninterrupted run it is compared with."""
    part = "train" if train_name == MAIN else train_name
    submission = submission_id(identity.run_key, part)
    workload = spec.workload
    if isinstance(workload, ScriptWorkload):
        command, working_dir = shlex.join(workload.entrypoint), workload.working_dir
        told = workload.model_dump(mode="json", include={"kind", "steps", "checkpoint_interval"})
    else:
        command, working_dir = "python -m trainer.application", None
        told = workload.model_dump(mode="json")
    drill = spec.drill if train_name == MAIN else None
    return JobOrder(
        identity=identity,
        hosts=hosts,
        submission_id=submission,
        train_name=train_name,
        entrypoint=f"{LEASE_KEEPER} {command}",
        working_dir=working_dir,
        order={
            "schema": 1,
            "run_key": identity.run_key,
            "submission_id": submission,
            "train_name": train_name,
            "storage": identity.storage,
            "workload": told,
            "world_size": spec.hosts.count,
            "device": spec.hosts.device,
            "pins": spec.pins(),
            "drill": {"after_step": drill.after_step, "hold_s": DRILL_HOLD_S} if drill else None,
            "resume": {"checkpoint": resume.checkpoint} if resume else None,
            "failures": FAILURES,
        },
    )
