"""What a person sees in the Temporal UI: current details in Markdown, and search attributes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from temporalio import workflow
from temporalio.common import SearchAttributeKey, SearchAttributeUpdate
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError

from workflows.evidence import Claim, CustodyOrder, Orphan, Outcome, Reaped, Release, Sweep, WatchResult
from workflows.explain import plain
from workflows.progress import Progress


def clock(at: float | None) -> str:
    """A time for people: `14:03:22 UTC`, with the date when it is not obvious."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if at else "—"


def first_line(error: BaseException | None, limit: int = 300) -> str:
    """The first line of an error, bounded: what fits a summary or a table."""
    text = str(error or "").strip().splitlines()
    return (text[0] if text else type(error).__name__)[:limit]


def show_attributes(known: tuple[str, ...], values: Mapping[str, str | None]) -> None:
    """Upsert keyword search attributes; those the namespace does not know are left out (an unknown one would fail the
    workflow task for ever). One history event, and none when nothing changed."""
    have = workflow.info().typed_search_attributes
    updates: list[SearchAttributeUpdate[str]] = []
    for name, value in values.items():
        key = SearchAttributeKey.for_keyword(name)
        if name in known and value is not None and have.get(key) != value:
            updates.append(key.value_set(value))
    if updates:
        workflow.upsert_search_attributes(updates)


_RESUME = re.compile(r'"resume": \{"from": "[^"]*"\}')


def copyable(message: str) -> list[str]:
    """A message as Markdown, with the line for run.json in a block of its own: elsewhere the UI makes typographic
    quotes of plain ones, and what is copied is no JSON."""
    lines = list(dict.fromkeys(_RESUME.findall(message)))
    said = [_RESUME.sub("the line below", message)]
    return said + (["", "```", *lines, "```"] if lines else [])


def run_details(progress: Progress, stopping: str = "") -> str:
    """The run's page: phase (or how it ended, and why), committed step, loss, deadline, what is owned."""
    told, ended = progress.answer(), progress.ended
    loss = f"{told['loss']:.6g}" if told["loss"] is not None else "—"
    title = f"{told['phase']} — {stopping}" if stopping else told["phase"]
    lines = [f"### {ended.outcome}", "", *copyable(ended.message)] if ended else [f"### {title}"]
    lines += [
        "",
        "| | |",
        "|---|---|",
        f"| committed step | {told['step']} of {told['steps'] or '—'} |",
        f"| loss at that commit | {loss} |",
        f"| as of | {clock(told['as_of'])} |",
    ]
    if not ended:
        lines.append(f"| run deadline | {clock(told['deadline'])} (`extend` moves it) |")
    if cleared := progress.cleared:
        price = f", {cleared.price_per_hour:.2f} US dollars an hour" if cleared.price_per_hour else ""
        lines.append(f"| hosts | {cleared.plan}{price} |")
    lines += [
        f"| artifacts | `{told['storage'] or '—'}` |",
        f"| custody (releases everything) | workflow `{told['custody'] or '—'}` |",
        f"| owned | {', '.join(f'`{o}`' for o in progress.holding()) or 'nothing'} |",
    ]
    if progress.strike and progress.victim:
        lines.append(
            f"| drill | rank {progress.victim.rank} killed after commit {progress.victim.commit.step} at "
            f"{clock(progress.strike.at)} |"
        )
    if progress.release:
        lines.append(f"| cleanup | {progress.release.cleanup} |")
    elif not ended:
        lines += ["", "Second by second: the heartbeat of the activity under *Pending Activities*."]
    lines += ["", "**So far**", ""]
    lines += [f"- {clock(event['at'])} {event['what']}" for event in progress.events[-12:]]
    return "\n".join(lines)


def custody_details(
    order: CustodyOrder,
    claims: tuple[Claim, ...],
    state: str,
    due: str | None,
    struggle: str,
    record: Release | None,
    spent_at: float | None = None,
) -> str:
    """Custody's page: what is held or released, why, and what is still there."""
    lines = [
        f"### {state}" + (f" — {due}" if due else ""),
        "",
        f"Holds what run `{order.identity.workflow_id}` (`{order.identity.run_id}`) claimed, and releases it however "
        "the run ends. Do not terminate this workflow: it is what stops the billing.",
        "",
    ]
    if spent_at and not due:
        budget = f"The budget of {order.budget:g} US dollars lasts until {clock(spent_at)}; then the run is aborted."
        lines += [budget, ""]
    if struggle:
        lines += [f"**Still there:** {struggle}", "", "Retried until it is proved gone; the pending activity says why."]
    lines += ["| claimed | provider | may appear until |", "|---|---|---|"]
    lines += [f"| `{c.id}` | {c.provider} | {clock(c.may_appear_until)} |" for c in claims] or ["| nothing | | |"]
    if record:
        lines += ["", "| release step | on | result |", "|---|---|---|"]
        lines += [f"| {s.action} | `{s.claim}` | {'ok' if s.ok else 'failed'}: {s.detail} |" for s in record.steps]
    return "\n".join(lines)


def reaped(first: Sweep, last: Sweep, orphans: tuple[Orphan, ...]) -> Reaped:
    """What the reaper knows after its last look."""
    return Reaped(
        suspects=len(first.suspects),
        orphans=orphans,
        **last.model_dump(include={"found", "held", "foreign", "unreadable", "left_out", "notes"}),
    )


def reaper_details(found: Reaped, state: str) -> str:
    """The reaper's page: what was found, what was handed over, what cannot be told."""
    lines = [
        f"### {state}",
        "",
        "Looks for what this deployment made and no custody guards. What has no open custody on two looks is given "
        "one, which releases it. What carries another mark, or none, is never touched.",
        "",
        "| | |",
        "|---|---|",
        f"| with this deployment's mark | {found.found} |",
        f"| guarded by an open custody | {found.held} |",
        f"| not guarded at the first look | {found.suspects} |",
        f"| not guarded at both looks | {len(found.orphans)} |",
        f"| another's, or without a mark | {found.foreign} |",
        f"| cannot be read: not touched | {found.unreadable} |",
        f"| left for the next time | {found.left_out} |",
    ]
    if found.orphans:
        lines += ["", "| custody | was | now |", "|---|---|---|"]
        for each in found.orphans:
            now = "started by the reaper, releases" if each.handed_over else "open already"
            lines.append(f"| `{each.custody_id}` | {each.custody} | {now} |")
    if found.notes:
        lines += ["", *(f"- {plain(each, 400)}" for each in found.notes)]
    return "\n".join(lines)


def cause_of(failed: ActivityError) -> str:
    """What an activity's failure was really about: the message a person can act on, bounded."""
    error: BaseException = failed.cause or failed
    # A time-out between retries carries the last failure, which says why.
    while isinstance(error, TimeoutError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, TimeoutError):
        kind = error.type.name.lower() if error.type else "unknown"
        return f"{failed.activity_type} gave no answer in time ({kind})"
    if isinstance(error, ApplicationError) and error.non_retryable:
        return error.message.strip()[:2000]  # raised on purpose: the sentence stands without its type
    return str(error).strip()[:2000] or type(error).__name__


def outcome_of(failed: ActivityError) -> Outcome:
    """An activity that refuses the run's input says so by its type."""
    error = failed.cause
    return "rejected" if isinstance(error, ApplicationError) and error.type == "Rejected" else "failed"


LEASE_EXPIRED = ("lease expired", "lease_expired")
"""How a job's lease keeper, and a hosting service, say why they ended."""


def job_ended_badly(result: WatchResult) -> str:
    """One message for a job that failed, stalled or was lost."""
    what = {
        "failed": f"training failed (job {result.job_status})",
        "stalled": "training stalled: no new commit within limits.stall",
        "lost": "the job's endpoint was lost",
    }[result.end]
    said = "; ".join(part for part in (result.message, result.diagnosis) if part)
    if any(mark in said for mark in LEASE_EXPIRED):
        what = "lease expired while the operator was away: the hosts stopped themselves"
    return (f"{what}; {said}" if said else what)[:2000]


def nothing_claimed(run_key: str, reason: str, now: float) -> Release:
    """The word on cleanup when nothing was ever claimed: there is nothing to release."""
    return Release(
        run_key=run_key,
        cleanup="clean",
        reason=reason,
        claims=(),
        steps=(),
        remaining=(),
        began=now,
        ended=now,
    )


def unfinished_release(run_key: str, now: float) -> Release:
    """What the run says of cleanup when the teardown limit passed before custody was done."""
    return Release(
        run_key=run_key,
        cleanup="releasing",
        reason="teardown limit passed; custody goes on and its result is the final word",
        claims=(),
        steps=(),
        remaining=("see custody",),
        began=now,
        ended=None,
    )
