"""Orders as the workflow gives them, for tests of single activities."""

from __future__ import annotations

from workflows.evidence import DrillOrder, HostsOrder, Identity, JobOrder, Victim

IDENTITY = Identity(
    workflow_id="w",
    run_id="r",
    original_run_id="r",
    run_key="w-0123456789",
    custody_id="custody-w-0123456789",
    deployment="tests",
    namespace="default",
    storage="s3://bucket/runs/w-0123456789",
)
HOSTS = HostsOrder(identity=IDENTITY, provider="local", count=2, device="cpu", lease_s=120.0, not_after_s=600.0)
JOB = JobOrder(
    identity=IDENTITY,
    hosts=HOSTS,
    submission_id="w-0123456789-train",
    train_name="main",
    entrypoint="python -m trainer.application",
    order={"storage": IDENTITY.storage},
)


def drill_order(victim: Victim) -> DrillOrder:
    return DrillOrder(job=JOB, commit=victim.commit, victim=victim)
