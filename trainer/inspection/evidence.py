"""The evidence that ranks left: who trained, on what, restored from where, ended with which parameters.

Files ``evidence/<train name>/attempt-<NNN>/rank-<r>.{start,first-step,final}.json``, written by the ranks
themselves. An attempt is one start of the whole worker group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from trainer.inspection.checklist import Failed, NotApplicable, compare, fields, require
from trainer.inspection.journal import rows_of, spans
from trainer.inspection.storage import EVIDENCE_LIMIT, Root, read_object

ATTEMPT = re.compile(r"attempt-(\d{3,6})")
RANK = re.compile(r"rank-(0|[1-9]\d{0,5})\.(start|first-step|final)\.json")

MARK_FIELDS = {
    "first-step": ("schema", "attempt", "rank", "step", "at"),
    "final": ("schema", "attempt", "rank", "step", "model_sha256", "momentum_sha256", "at"),
}
CLOCK_SET_BACK = timedelta(days=1, hours=1)
"""A host's clock may be set back by a day while it trains, and the run is as good as before (nothing that decides
compares wall clocks). A date further back was not written by this attempt."""

# SHA-256 of nothing: the momentum of an optimizer that has taken no step (trainer/hashing.py).
NO_MOMENTUM = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@dataclass(frozen=True)
class Attempt:
    """One attempt's files, by rank."""

    number: int
    start: dict[int, dict[str, Any]] = field(default_factory=dict)
    first_step: dict[int, dict[str, Any]] = field(default_factory=dict)
    final: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def restored_step(self) -> int:
        """The step most ranks say they restored, 0 for none; whether all say so is a check of its own."""
        steps = [step for step in (start.get("restored_step") for start in self.start.values()) if type(step) is int]
        return max(set(steps), key=steps.count) if steps else 0


@dataclass(frozen=True)
class Evidence:
    """All attempts of one training, in order, and the odd files found among them."""

    attempts: tuple[Attempt, ...]
    world_size: int
    problems: tuple[str, ...]
    unstarted: tuple[int, ...]

    @property
    def last(self) -> Attempt:
        """The attempt that finished the training."""
        return self.attempts[-1]


def read_evidence(root: Root, train_name: str, world_size: int | None) -> Evidence:
    """Read every attempt. ``world_size`` None takes what rank 0 of the last attempt says.

    An attempt in which some rank never started and none took a step is set aside (``unstarted``): a crash
    during the start leaves that, and nothing of it is in the result. The last attempt never is. Raises Failed
    where there is none, Unreadable.
    """
    folder = f"evidence/{train_name}"
    attempts: list[Attempt] = []
    problems: list[str] = []
    for entry in root.entries(folder):
        match = ATTEMPT.fullmatch(entry.name)
        if match is None or entry.kind != "folder":
            problems.append(f"{folder}/{entry.name} is no attempt's folder")
        else:
            attempts.append(_read_attempt(root, f"{folder}/{entry.name}", int(match[1]), problems))
    if not attempts:
        raise Failed([f"{folder} holds no attempt: the ranks left no evidence"])
    attempts.sort(key=lambda attempt: attempt.number)
    numbers = [attempt.number for attempt in attempts]
    if numbers != list(range(1, len(numbers) + 1)):
        problems.append(f"attempts are numbered {spans(numbers)}, not 1 to {len(numbers)}")
    size = world_size if world_size is not None else attempts[-1].start.get(0, {}).get("world_size")
    if type(size) is not int or not 1 <= size <= 100_000:
        raise Failed([f"attempt {numbers[-1]}: the world size is {size!r}"])
    unstarted = [a for a in attempts[:-1] if not set(range(size)) <= set(a.start) and not a.first_step and not a.final]
    counted = tuple(attempt for attempt in attempts if attempt not in unstarted)
    return Evidence(counted, size, tuple(problems), tuple(attempt.number for attempt in unstarted))


def _read_attempt(root: Root, folder: str, number: int, problems: list[str]) -> Attempt:
    attempt = Attempt(number)
    files = {"start": attempt.start, "first-step": attempt.first_step, "final": attempt.final}
    for entry in root.entries(folder):
        match = RANK.fullmatch(entry.name)
        if match is None or entry.kind != "file":
            problems.append(f"{folder}/{entry.name} is no rank's evidence")
            continue
        rank = int(match[1])
        document = read_object(root, f"{folder}/{entry.name}", EVIDENCE_LIMIT)
        problems += compare(f"{folder}/{entry.name}", {"rank": rank, "attempt": number}, document)
        files[match[2]][rank] = document
    return attempt


def check_ranks(evidence: Evidence, train_name: str, submission: str) -> str:
    """Ranks 0 to world size - 1 each exactly once per attempt, of the right world size and training.

    Raises Failed.
    """
    problems = list(evidence.problems)
    size = evidence.world_size
    for attempt in evidence.attempts:
        missing = sorted(set(range(size)) - set(attempt.start))
        extra = sorted(set(attempt.start) - set(range(size)))
        if missing:
            problems.append(f"attempt {attempt.number}: rank {spans(missing)} is missing (world size {size})")
        if extra:
            problems.append(f"attempt {attempt.number}: rank {spans(extra)} is outside the world of {size}")
        # A driver may have been resubmitted between attempts, but the export is the last one's.
        expected = submission if attempt is evidence.last else next(iter(_values(attempt, "submission_id")), submission)
        processes: dict[str, int] = {}
        for rank, start in sorted(attempt.start.items()):
            what = f"attempt {attempt.number}, rank {rank}"
            expectation = {"world_size": size, "train_name": train_name, "submission_id": expected}
            problems += compare(what, expectation, start)
            process = repr([start.get(part) for part in ("host", "ray", "process")])
            if process in processes:
                problems.append(f"{what} is the same process as rank {processes[process]}")
            processes[process] = rank
    require(problems)
    note = f"; attempt {spans(evidence.unstarted)} never took a step" if evidence.unstarted else ""
    return f"{size} ranks in each of {len(evidence.attempts)} attempts{note}"


def check_journal_evidence(evidence: Evidence, metrics: Mapping[str, Any]) -> str:
    """metrics.json repeats the ranks' own evidence, and credits each step to the right attempt.

    Raises Failed.
    """
    problems = compare("metrics.json", {"world_size": evidence.world_size}, metrics)
    listed = metrics.get("attempts")
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    wanted = {attempt.number: attempt for attempt in evidence.attempts}
    for number in sorted(set(wanted) - {row.get("attempt") for row in rows}):
        problems.append(f"metrics.json: attempt {number} is missing")
    seen: list[Any] = []
    for row in rows:
        listed_as = row.get("attempt")
        what = f"metrics.json, attempt {listed_as}"
        if listed_as in seen:
            problems.append(f"{what} is listed twice")
        seen.append(listed_as)
        attempt = wanted.get(listed_as) if type(listed_as) is int else None
        if attempt is None:
            if listed_as not in evidence.unstarted:
                problems.append(f"{what} has no evidence in storage")
            continue
        problems += compare(what, {"restored_step": attempt.restored_step}, row)
        problems += _compare_ranks(what, attempt, row.get("ranks"))
    problems += _compare_credits(evidence, metrics)
    require(problems)
    return f"{len(seen)} attempts as their ranks recorded them; each step credited to its attempt"


def _compare_ranks(what: str, attempt: Attempt, ranks: Any) -> list[str]:
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        return [f"{what} lists no ranks"]
    numbers = [rank.get("rank") for rank in ranks]
    problems = [
        f"{what}: rank {number} is {'missing' if number not in numbers else 'doubled'}"
        for number in sorted(attempt.start)
        if numbers.count(number) != 1
    ]
    for rank in ranks:
        start = attempt.start.get(rank["rank"]) if type(rank.get("rank")) is int else None
        if start is None:
            problems.append(f"{what}: rank {rank.get('rank')!r} left no evidence")
        elif rank != start:
            differing = sorted(key for key in {*rank, *start} if rank.get(key) != start.get(key))
            problems.append(f"{what}: rank {rank['rank']} differs from its own evidence in {', '.join(differing)}")
    return problems


def _compare_credits(evidence: Evidence, metrics: Mapping[str, Any]) -> list[str]:
    problems = []
    for row in rows_of(metrics):
        made = credited(evidence.attempts, row["step"])
        if row.get("attempt") != made:
            problems.append(f"step {row['step']} is credited to attempt {row.get('attempt')!r}, not {made}")
    return problems


def credited(attempts: Sequence[Attempt], step: int) -> int:
    """The attempt that made a step last: the last of ``attempts`` to begin before it; 0 stands for an earlier run's."""
    return next((attempt.number for attempt in reversed(attempts) if attempt.restored_step < step), 0)


def check_restored(evidence: Evidence, resumed: bool | None, momentum: bool | None) -> str:
    """In each attempt all ranks restored the same step, model and momentum. Raises Failed.

    ``resumed`` says whether the run was to continue an earlier run's checkpoint, ``momentum`` whether its
    optimizer has any after the first step; None where that is not known.
    """
    problems = []
    before = 0
    for attempt in evidence.attempts:
        step = attempt.restored_step
        for key in ("restored_step", "restored_from", "model_sha256", "momentum_sha256"):
            if len(values := _values(attempt, key)) > 1:
                by_rank = ", ".join(f"rank {rank}: {start.get(key)!r}" for rank, start in sorted(attempt.start.items()))
                problems.append(f"attempt {attempt.number}: ranks differ in {key} ({by_rank})")
            elif key.endswith("sha256") and not all(isinstance(value, str) and len(value) == 64 for value in values):
                problems.append(f"attempt {attempt.number}: {key} is {values}")
        for rank, start in sorted(attempt.start.items()):
            problems += _check_restored_rank(f"attempt {attempt.number}, rank {rank}", start, momentum)
        if step < before:
            problems.append(f"attempt {attempt.number} restored step {step}, behind attempt before it ({before})")
        before = max(before, step)
    first = evidence.attempts[0].restored_step
    if resumed is True and first == 0:
        problems.append("attempt 1 restored nothing, although the run was to continue an earlier one")
    if resumed is False and first > 0:
        problems.append(f"attempt 1 restored step {first}, although the run was to start afresh")
    require(problems)
    return "restored steps " + ", ".join(str(attempt.restored_step) for attempt in evidence.attempts)


def _check_restored_rank(what: str, start: Mapping[str, Any], has_momentum: bool | None) -> list[str]:
    step, source, momentum = (start.get(key) for key in ("restored_step", "restored_from", "momentum_sha256"))
    if type(step) is not int or step < 0:
        return [f"{what}: restored_step is {step!r}"]
    problems = []
    if step == 0 and source is not None:
        problems.append(f"{what}: restored step 0, yet restored_from is {source!r}")
    if step > 0 and not source:
        problems.append(f"{what}: restored step {step} from no checkpoint")
    if step == 0 and has_momentum is not None and momentum != NO_MOMENTUM:
        problems.append(f"{what}: restored step 0, yet has momentum")
    if step > 0 and has_momentum and momentum == NO_MOMENTUM:
        problems.append(f"{what}: restored step {step} without any momentum")
    return problems


def check_first_steps(evidence: Evidence, metrics: Mapping[str, Any] | None, final_step: int | None) -> str:
    """Each rank's first step of an attempt is the restored step + 1. Raises Failed.

    An attempt that ended before a rank's first step has nothing to show, unless the journal credits it with
    steps.
    """
    problems = []
    with_steps = None if metrics is None else {row.get("attempt") for row in rows_of(metrics)}
    for attempt in evidence.attempts:
        if with_steps is None:
            # One that was killed after its last step has nothing left to do when it starts again.
            took_steps = attempt is evidence.last and attempt.restored_step != final_step
        else:
            took_steps = attempt.number in with_steps
        for rank in sorted({*attempt.start, *attempt.first_step}):
            what = f"attempt {attempt.number}, rank {rank}"
            record = attempt.first_step.get(rank)
            if record is None:
                if took_steps:
                    problems.append(f"{what}: its first step is not recorded")
            elif record.get("step") != attempt.restored_step + 1:
                wanted = f"{attempt.restored_step + 1}, the step after the restored one"
                problems.append(f"{what}: its first step is {record.get('step')!r}, not {wanted}")
    require(problems)
    return "first steps " + ", ".join(str(attempt.restored_step + 1) for attempt in evidence.attempts)


def check_marks(evidence: Evidence, kind: Literal["first-step", "final"]) -> None:
    """What the regression's ranks leave of their first step, or of their end, is that and nothing more, and was
    written after the start.

    Raises Failed.
    """
    problems = []
    for attempt in evidence.attempts:
        for rank, document in sorted((attempt.first_step if kind == "first-step" else attempt.final).items()):
            what = f"attempt {attempt.number}, rank {rank}, {kind}"
            problems += fields(what, MARK_FIELDS[kind], document)
            began, at = (_moment(each.get("at")) for each in (attempt.start.get(rank, {}), document))
            if at is None:
                problems.append(f"{what}: at is {document.get('at')!r}, no time in UTC")
            elif began is not None and at < began - CLOCK_SET_BACK:
                problems.append(f"{what}: at is {document['at']}, before the attempt began")
    require(problems)


def _moment(value: Any) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return moment if moment is not None and moment.utcoffset() == timedelta(0) else None


def check_final(evidence: Evidence, final_step: int | None, result: Mapping[str, Any] | None) -> str:
    """All ranks ended at the same step with equal parameters and momentum, as the result claims.

    Raises Failed.
    """
    last = evidence.last
    problems = [
        f"attempt {last.number}: rank {rank} left no final evidence"
        for rank in range(evidence.world_size)
        if rank not in last.final
    ]
    for key, words in (
        ("model_sha256", "parameters"),
        ("momentum_sha256", "momentum"),
        ("step", "last step"),
    ):
        found = {rank: record.get(key) for rank, record in sorted(last.final.items())}
        if len({repr(value) for value in found.values()}) > 1:
            by_rank = ", ".join(f"rank {rank}: {value}" for rank, value in found.items())
            problems.append(f"ranks ended with different {words} ({by_rank})")
    for rank, record in sorted(last.final.items()):
        if final_step is not None and record.get("step") != final_step:
            problems.append(f"rank {rank} ended at step {record.get('step')!r}, not {final_step}")
    if result is not None and "ranks_final" in result:
        problems += _compare_final(last, result)
    require(problems)
    return f"{len(last.final)} ranks equal at step {next(iter(last.final.values())).get('step')}"


def _compare_final(last: Attempt, result: Mapping[str, Any]) -> list[str]:
    listed = result["ranks_final"]
    claimed = (
        {repr(row.get("rank")): row for row in listed if isinstance(row, dict)} if isinstance(listed, list) else {}
    )
    problems = []
    if not isinstance(listed, list) or len(claimed) != len(listed) or set(claimed) != {repr(r) for r in last.final}:
        problems.append(f"result.json: ranks_final does not list rank {spans(sorted(last.final))} once each")
    for rank, record in sorted(last.final.items()):
        row = claimed.get(repr(rank), {})
        expected = {key: record.get(key) for key in ("model_sha256", "momentum_sha256")}
        if "step" in row:
            expected["step"] = record.get("step")
        problems += compare(f"result.json, rank {rank}", expected, row)
    return problems


def check_versions(evidence: Evidence, pins: Mapping[str, Any] | None, device: Any) -> str:
    """All ranks ran the same versions, the pinned ones where pins are known, on the device asked for.

    Raises Failed.
    """
    problems = []
    reference = evidence.last.start.get(0, {}).get("versions")
    if not isinstance(reference, dict):
        raise Failed([f"attempt {evidence.last.number}, rank 0 names no versions"])
    pinned = {name: pin for name, pin in (pins or {}).items() if name in reference}
    for attempt in evidence.attempts:
        for rank, start in sorted(attempt.start.items()):
            what = f"attempt {attempt.number}, rank {rank}"
            versions = start.get("versions")
            problems += compare(what, {**reference, **pinned}, versions if isinstance(versions, dict) else {})
            kind = _part(start, "device", "type")
            if device is not None and kind != device:
                problems.append(f"{what} trained on {kind!r}, not on {device!r}")
    require(problems)
    shown = ", ".join(f"{name} {version}" for name, version in sorted(reference.items()))
    return f"{shown}{', as pinned' if pinned else ''}; {device or 'no device asked for'}"


def versions(attempt: Attempt) -> dict[str, Any]:
    """What rank 0 of an attempt says that it ran."""
    told = attempt.start.get(0, {}).get("versions")
    return told if isinstance(told, dict) else {}


def check_distinct(evidence: Evidence, part: str, asked: bool) -> str:
    """In every attempt each rank had its own ``device`` or ``host``, by fingerprint; a CPU is known by its host's.
    Raises Failed.
    """
    if not asked:
        raise NotApplicable(f"distinct {part}s were not asked for ({distinct(evidence.last, part)} seen)")
    problems = []
    for attempt in evidence.attempts:
        ranks: dict[str, list[int]] = {}
        for rank, start in sorted(attempt.start.items()):
            fingerprint = _fingerprint(start, part)
            if not isinstance(fingerprint, str) or not fingerprint:
                problems.append(f"attempt {attempt.number}, rank {rank} names no {part} fingerprint")
            else:
                ranks.setdefault(fingerprint, []).append(rank)
        problems += [
            f"attempt {attempt.number}: ranks {spans(same)} share one {part} ({fingerprint[:16]}...)"
            for fingerprint, same in ranks.items()
            if len(same) > 1
        ]
    require(problems)
    return f"{evidence.world_size} ranks on {distinct(evidence.last, part)} {part}s"


def distinct(attempt: Attempt, part: str) -> int:
    """How many different devices or hosts an attempt's ranks name."""
    return len({repr(_fingerprint(start, part)) for start in attempt.start.values()})


def _fingerprint(start: Mapping[str, Any], part: str) -> Any:
    """Of a rank's device or host. Ranks of one machine share its processors, whatever Ray nodes they run on, so only
    an accelerator has a fingerprint that counts beside its host's.
    """
    own = part == "host" or _part(start, "device", "type") == "cuda"
    return _part(start, part if own else "host", "fingerprint")


def _part(document: Mapping[str, Any], *keys: str) -> Any:
    value: Any = document
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _values(attempt: Attempt, key: str) -> Sequence[Any]:
    """The different values of a key among an attempt's ranks, in the order of ranks."""
    values: list[Any] = []
    for _, start in sorted(attempt.start.items()):
        if start.get(key) not in values:
            values.append(start.get(key))
    return values
