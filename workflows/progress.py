"""The mutable state of one run, and what is told of it: progress, claims, verdict."""

from __future__ import annotations

from typing import Any

from workflows.evidence import (
    Artifacts,
    Cleared,
    Commit,
    Deployment,
    Hosts,
    Identity,
    Outcome,
    Phase,
    Proof,
    Release,
    Strike,
    Verdict,
    Victim,
)
from workflows.policy import not_checked, not_proved
from workflows.spec import RunSpec

MAX_EVENTS = 40
"""What `progress` remembers of a run; the rest is in the history."""


class Progress:
    """Everything a run knows of itself. Only the workflow changes it; times are workflow times."""

    def __init__(self) -> None:
        self.identity: Identity | None = None
        self.spec: RunSpec | None = None
        self.deployment: Deployment | None = None
        self.deadline: float | None = None
        self.extended = 0
        self.phases: list[Phase] = []
        self.events: list[dict[str, Any]] = []
        self.as_of = 0.0
        self.cleared: Cleared | None = None
        self.hosts: Hosts | None = None
        self.submissions: list[str] = []
        self.commits: list[Commit] = []
        self.victim: Victim | None = None
        self.strike: Strike | None = None
        self.proof: Proof | None = None
        self.artifacts: Artifacts | None = None
        self.release: Release | None = None
        self.ended: Verdict | None = None
        """The verdict, once there is one."""
        self.owned: list[str] = []
        self.unsaved = ""
        """Why logs were not saved, where they were not."""

    @property
    def phase(self) -> str:
        return self.phases[-1].name if self.phases else "starting"

    @property
    def commit(self) -> Commit | None:
        return self.commits[-1] if self.commits else None

    def enter(self, phase: str, now: float) -> None:
        """Begin a phase; the one before ends now."""
        self.leave(now)
        self.phases.append(Phase(name=phase, started=now))
        self.note(f"{phase} began", now)

    def leave(self, now: float) -> None:
        if self.phases and self.phases[-1].ended is None:
            self.phases[-1] = self.phases[-1].model_copy(update={"ended": now})

    def note(self, what: str, now: float) -> None:
        self.as_of = now
        self.events = [*self.events[-(MAX_EVENTS - 1) :], {"at": now, "what": what}]

    def saw(self, commit: Commit | None, now: float) -> None:
        self.as_of = now
        if commit and (not self.commits or self.commits[-1].step < commit.step):
            self.commits.append(commit)

    def has_recovered(self) -> bool:
        """A commit beyond the one the drill was done after: training goes on again."""
        return bool(
            self.phase == "recover" and self.victim and self.commit and self.commit.step > self.victim.commit.step
        )

    def own(self, *what: str) -> None:
        self.owned = [*self.owned, *(w for w in what if w not in self.owned)]

    def holding(self) -> list[str]:
        """What is still owned, as far as the run knows; custody has the word that counts."""
        return [] if self.release and self.release.cleanup == "clean" else self.owned

    def answer(self) -> dict[str, Any]:
        """What the query `progress` answers. `as_of` says how fresh it is; between milestones the pending watch
        activity's heartbeat is fresher."""
        return {
            "phase": self.phase,
            "step": self.commit.step if self.commit else 0,
            "steps": self.spec.workload.total_steps if self.spec else None,
            "loss": self.commit.loss if self.commit else None,
            "deadline": self.deadline,
            "as_of": self.as_of,
            "run_key": self.identity.run_key if self.identity else None,
            "storage": self.identity.storage if self.identity else None,
            "custody": self.identity.custody_id if self.identity else None,
            "events": self.events,
        }

    def resume_hint(self) -> str:
        """How to go on from here, or nothing when there is nothing to go on from."""
        if not (self.identity and self.commit):
            return ""
        if self.spec and self.commit.step >= self.spec.workload.total_steps:
            return f"every step is committed, the last is {self.commit.step}; there is nothing left to go on from"
        return (
            f'the last commit is step {self.commit.step}; go on from it with "resume": '
            f'{{"from": "{self.identity.storage}"}}'
        )

    def verdict(self, outcome: Outcome, message: str) -> Verdict:
        identity, spec = self.identity, self.spec
        assert identity is not None
        placement = self.proof.placement if self.proof else None
        unproved: tuple[str, ...] = ()
        if placement and spec:
            unproved = not_proved(
                placement.distinct_hosts, placement.distinct_nodes, spec.hosts.count, spec.workload.kind
            )
        if outcome == "succeeded" and spec and spec.drill is None:
            unproved += ("recovery: no drill was asked for",)
        if self.artifacts:
            unproved += not_checked(self.artifacts.not_applicable)
        if self.artifacts and not self.artifacts.ok:
            unproved += ("artifacts: they were verified, and do not hold; see the checks that failed",)
        elif outcome != "succeeded":
            unproved += ("artifacts: not verified, because the run did not succeed",)
        if spec and spec.hosts.require_distinct_devices and spec.hosts.device == "cpu":
            unproved += ("distinct devices: on CPU a device is a machine with all its processors, not a chip",)
        if self.unsaved:
            unproved += (f"logs: not saved ({self.unsaved[:300]})",)
        if self.cleared and not self.cleared.conditional_writes:
            unproved += ("atomic writes: this storage ignores If-None-Match; overwrites were checked by reading back",)
        return Verdict(
            outcome=outcome,
            cleanup=self.release.cleanup if self.release else "unproved",
            message=message,
            run_key=identity.run_key,
            storage=identity.storage,
            workflow_id=identity.workflow_id,
            run_id=identity.run_id,
            steps=spec.workload.total_steps if spec else None,
            phases=tuple(self.phases),
            hosts=self.hosts,
            commits=tuple(self.commits),
            victim=self.victim,
            strike=self.strike,
            drill=self.proof.recovery if self.proof else None,
            placement=placement,
            artifacts=self.artifacts,
            release=self.release,
            resumed=self.cleared.resume if self.cleared else None,
            resume_from=identity.storage if self.commit else None,
            not_proved=unproved,
            versions=dict(self.hosts.hosts[0].versions) if self.hosts and self.hosts.hosts else {},
        )
