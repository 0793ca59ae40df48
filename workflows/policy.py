"""Pure decisions. No clock, no I/O: everything they look at is an argument."""

from __future__ import annotations

from collections.abc import Sequence

from workflows.evidence import Claim, Commit, NotApplicable, Suspect, Sweep

MILESTONES = 8
"""How often a watch returns by progress alone. Bounds the history whatever a run's length (design: at most 20)."""

BUDGET_GRACE_S = 180.0
"""How long a run that spent its budget may take to save its logs and ask for its release, before custody releases."""

KEEPER_GRACE_S = 120.0
"""How long custody waits, after it released, for the run to close before it closes itself."""


def milestones(steps: int, interval: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """Committed steps at which the watch returns: about every 1/8 of the run, and each of `wanted`.

    Only commits can be milestones, so each is rounded up to a multiple of `interval`; the last step is left out,
    because the end of the job is reported by itself. Each wanted one takes the place of another, so that a run ten
    times longer has no longer a history.
    """
    marks = {min(steps, -(-steps * k // MILESTONES // interval) * interval) for k in range(1, MILESTONES)}
    kept = {m for m in wanted if 0 < m < steps}
    chosen = sorted(m for m in marks | kept if 0 < m < steps)

    def gap_without(mark: int) -> int:
        at = chosen.index(mark)
        return [*chosen, steps][at + 1] - [0, *chosen][at]

    while len(chosen) > max(MILESTONES - 1, len(kept)):
        chosen.remove(min((m for m in chosen if m not in kept), key=gap_without))
    return tuple(chosen)


def next_milestones(marks: Sequence[int], commit: Commit | None) -> tuple[int, ...]:
    """The milestones that are still ahead."""
    done = commit.step if commit else 0
    return tuple(m for m in marks if m > done)


def lease_renewal_s(lease_s: float) -> float:
    """How often the keeper renews a lease: often enough that twenty renewals may be lost, at most once in 5 s."""
    return min(60.0, max(5.0, lease_s / 20))


def custody_deadline(run_deadline: float, teardown_s: float) -> float:
    """Custody's own absolute deadline: the run's, and time for its teardown."""
    return run_deadline + teardown_s


def budget_lasts_s(budget: float | None, price_per_hour: float) -> float | None:
    """How long hosts may be held, from their claim on; None for ever."""
    return None if budget is None or price_per_hour <= 0 else 3600 * budget / price_per_hour


def orphans(first: Sweep, second: Sweep) -> tuple[Suspect, ...]:
    """What nobody guards: the same suspect on both looks. Where its custody or its lease changed in between, somebody
    is at work, and the next sweep looks again."""

    def same(suspect: Suspect) -> tuple[str, ...]:
        return (suspect.hosts.identity.custody_id, suspect.custody, suspect.custody_run_id, suspect.lease)

    before = {same(suspect) for suspect in first.suspects}
    return tuple(suspect for suspect in second.suspects if same(suspect) in before)


def handed_over(suspect: Suspect, closed_by: float) -> tuple[Claim, ...]:
    """An orphan's claims for its new custody. The old one accepted none after `closed_by`, when it was seen to be
    absent or closed, so what was claimed last may appear until the windows from then on have passed."""
    return tuple(
        claim.model_copy(update={"may_appear_until": closed_by + claim.send_window_s + claim.longest_request_s})
        for claim in suspect.claims
    )


def not_proved(distinct_hosts: int, distinct_nodes: int, world_size: int, workload: str) -> tuple[str, ...]:
    """What a run did not prove, in plain words; the reader must not have to infer it."""
    said = []
    if distinct_hosts < world_size:
        said.append(
            f"multi-node: {world_size} ranks ran on {distinct_hosts} physical host(s) "
            f"({distinct_nodes} Ray node(s)); separate machines were not shown"
        )
    if workload == "regression":
        said.append("model quality: a synthetic regression proves execution and recovery, nothing about a policy")
    return tuple(said)


def not_checked(skipped: Sequence[NotApplicable]) -> tuple[str, ...]:
    """What verification had nothing to check for, one sentence a reason."""
    reasons: dict[str, list[str]] = {}
    for check in skipped:
        reasons.setdefault(check.why, []).append(check.name)
    return tuple(
        # A reason that names its only check needs no other name.
        f"not checked: {why}" if names[0] in why else f"not checked: {', '.join(names)} ({why})"
        for why, names in reasons.items()
    )


def poll_s(between_commits_s: float | None) -> float:
    """How long a watch waits between two looks at the commit record: a twentieth of the time between commits, so
    that a commit is seen soon after it was written, and a slow training is not asked for nothing."""
    return 0.4 if between_commits_s is None else min(1.5, max(0.4, between_commits_s / 20))
