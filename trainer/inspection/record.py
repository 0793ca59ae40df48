"""Ray Train's commit record against what lies in storage: every commit that Ray keeps, each as it was reported.

Ray appends a commit to its record, drops the oldest beyond the number to keep, writes the record, and only then
deletes the folders of what it dropped. So a commit that is listed is there. That one which is there must be listed
cannot be said of a script, which chooses the number itself; of the regression it can: it commits at every boundary
and keeps the newest ``COMMITS_KEPT``. A folder that is not listed is no fault by itself: its upload was never
committed, or it was dropped and its deletion cut short.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from trainer.constants import COMMITS_KEPT
from trainer.inspection.checklist import Failed, compare, fields, require
from trainer.inspection.checkpoints import (
    JOURNAL_FIELDS,
    JOURNAL_FILE,
    Commit,
    check_journal,
    read_commits,
    record_path,
)
from trainer.inspection.evidence import Attempt, credited
from trainer.inspection.journal import differing, rows_of, spans
from trainer.inspection.storage import Root, Unanswered, read_object

NAME = re.compile(r"checkpoint_step-(\d{9,})_attempt-(\d{3,})")
RESULT_FIELDS = ("version", "checkpoint_dir_name", "metrics")
NEVER_USED = (
    "pending_training_results",
    "pending_validation_specs",
    "validated_checkpoint_dir_names",
    "timed_out_validation_checkpoint_dir_names",
    "failed_validation_checkpoint_dir_names",
)
"""The lists of Ray's record that are of validation, which the regression has none of."""
RECORD_FIELDS = (
    "ray_version",
    "checkpoint_results",
    "checkpoint_report_indices",
    "latest_checkpoint_result",
    "current_report_index",
    *NEVER_USED,
)
REPORTED = ("step", "loss", "samples_per_second", "model_sha256", "momentum_sha256", "attempt", "steps")
"""The metrics of each report of the regression (trainer/training.py, trainer/attempt.py)."""


def check_record(root: Root, train_name: str) -> str:
    """The record does not contradict itself, and everything it lists is in storage. Raises Failed."""
    commits = read_commits(root, train_name)
    path = record_path(train_name)
    record = read_object(root, path)
    indices, following = record.get("checkpoint_report_indices"), record.get("current_report_index")
    names = [commit.name for commit in commits]
    problems = [f"{path} lists {name} {count} times" for name, count in Counter(names).items() if count > 1]
    if (
        not isinstance(indices, list)
        or not all(type(index) is int for index in indices)
        or len(indices) != len(commits)
        or len(set(indices)) != len(indices)
    ):
        problems.append(f"{path} gives no order to its commits: checkpoint_report_indices is {str(indices)[:200]}")
    elif type(following) is not int or following <= max(indices):
        problems.append(f"{path}: current_report_index is {following!r}, not past its commits")
    latest = record.get("latest_checkpoint_result")
    newest = next(each for each in record["checkpoint_results"] if each["checkpoint_dir_name"] == names[0])
    if latest != newest:
        problems.append(f"{path}: latest_checkpoint_result is not the newest commit, {names[0]}")
    problems += [
        f"{name} is listed as committed, and nothing of it is in storage"
        for name in names
        if not root.entries(f"train/{train_name}/{name}")
    ]
    require(problems)
    return f"{len(names)} commits, each of them in storage"


def check_own_record(root: Root, train_name: str, ray_version: Any) -> None:
    """The regression's record holds what Ray of ``ray_version`` writes for it and nothing more, and counts its reports,
    each of which is a commit.

    Raises Failed.
    """
    path = record_path(train_name)
    record = read_object(root, path)
    problems = fields(path, RECORD_FIELDS, record)
    problems += compare(path, {"ray_version": ray_version, **{name: [] for name in NEVER_USED}}, record)
    for each in record["checkpoint_results"]:
        what = f"{path}, {each['checkpoint_dir_name']}"
        problems += fields(what, RESULT_FIELDS, each) + compare(what, {"version": 0}, each)
    following, count = record["current_report_index"], len(record["checkpoint_results"])
    dropped = following - count
    # Ray drops a commit only when there are too many.
    if record["checkpoint_report_indices"] != list(range(dropped, following)) or (dropped and count < COMMITS_KEPT):
        problems.append(f"{path}: current_report_index is {following}, which its commits do not lead up to")
    require(problems)


def check_sequence(commits: Sequence[Commit], attempts: Sequence[Attempt], recipe: Mapping[str, Any]) -> str:
    """The regression's record lists every commit that Ray keeps: one at each boundary, from the oldest kept to the
    newest, and none dropped before there were too many.

    Raises Failed.
    """
    restored = {attempt.number: attempt.restored_step for attempt in attempts}
    kept: list[tuple[str, int, int]] = []
    problems = []
    for commit in reversed(commits):
        match = NAME.fullmatch(commit.name)
        if match is None or int(match[2]) not in restored:
            problems.append(f"{commit.name} is no commit of an attempt that left evidence")
        else:
            kept.append((commit.name, int(match[1]), int(match[2])))
    require(problems)
    for (name, step, attempt), (later, at, by) in pairwise(kept):
        # A new attempt goes on from the newest commit that loads, which is at most the one before.
        before = step if by == attempt else restored[by]
        due = before if before > step else _boundary_after(before, recipe)
        if by < attempt or at != due:
            problems.append(f"the record goes from {name} to {later}: the commit of step {due} is not listed")
    oldest, step, attempt = kept[0]
    first = restored[attempt] == attempts[0].restored_step and step == _boundary_after(restored[attempt], recipe)
    if len(kept) > COMMITS_KEPT or (len(kept) < COMMITS_KEPT and not first):
        listed = f"the record lists {len(kept)} commits, from {oldest} on"
        problems.append(f"{listed}: all since the first are kept, or the newest {COMMITS_KEPT}")
    require(problems)
    return f"steps {spans([step for _, step, _ in kept])}, none left out"


def _boundary_after(step: int, recipe: Mapping[str, Any]) -> int:
    interval, steps = int(recipe["checkpoint_interval"]), int(recipe["steps"])
    return min((step // interval + 1) * interval, steps)


def check_journals(
    root: Root, train_name: str, commits: Sequence[Commit], metrics: Mapping[str, Any], attempts: Sequence[Attempt]
) -> str:
    """The journal of each kept commit is the beginning of the exported one, with each step credited to the attempt that
    had made it by then, and the record repeats its last row.

    Raises Failed.
    """
    rows = {row["step"]: row for row in rows_of(metrics)}
    problems: list[str] = []
    for commit in commits:
        folder = f"train/{train_name}/{commit.name}"
        try:
            problems += _compare_journal(root, folder, commit, metrics, rows, attempts)
        except Unanswered:
            raise
        except Failed as failed:
            problems += failed.problems
    require(problems)
    return f"{len(commits)} journals equal metrics.json and what was reported"


def _compare_journal(
    root: Root,
    folder: str,
    commit: Commit,
    metrics: Mapping[str, Any],
    rows: Mapping[int, Mapping[str, Any]],
    attempts: Sequence[Attempt],
) -> list[str]:
    path = f"{folder}/{JOURNAL_FILE}"
    match = NAME.fullmatch(commit.name)
    if match is None:
        return [f"{commit.name} names no step and attempt"]
    journal = check_journal(root, folder, int(match[1]))
    problems = fields(path, JOURNAL_FIELDS, journal)
    problems += compare(path, {name: metrics.get(name) for name in ("recipe", "world_size")}, journal)
    if different := differing(journal["steps"], rows):
        problems.append(f"{path} differs from metrics.json in step {spans(different)}")
    until = [attempt for attempt in attempts if attempt.number <= int(match[2])]
    problems += [
        f"{path}: step {row['step']} is credited to attempt {row.get('attempt')!r}, not {made}"
        for row in journal["steps"]
        if row.get("attempt") != (made := credited(until, row["step"]))
    ]
    last = journal["steps"][-1]
    expected = {name: last.get(name) for name in ("step", "loss", "samples_per_second")}
    expected |= {"attempt": int(match[2]), "steps": metrics["recipe"]["steps"]}
    what = f"the commit record, {commit.name}"
    return problems + fields(what, REPORTED, commit.metrics) + compare(what, expected, commit.metrics)
