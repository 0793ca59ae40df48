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
from trainer.inspection.evidence import Attempt
from trainer.inspection.journal import differing, rows_of, spans
from trainer.inspection.storage import Root, Unanswered, read_object

NAME = re.compile(r"checkpoint_step-(\d{9,})_attempt-(\d{3,})")
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


def check_journals(root: Root, train_name: str, commits: Sequence[Commit], metrics: Mapping[str, Any]) -> str:
    """The journal of each kept commit is the beginning of the exported one, and the record repeats its last row.

    Raises Failed.
    """
    rows = {row["step"]: row for row in rows_of(metrics)}
    recipe = metrics["recipe"]
    problems: list[str] = []
    for commit in commits:
        folder = f"train/{train_name}/{commit.name}"
        try:
            problems += _compare_journal(root, folder, commit, metrics, rows, recipe["steps"])
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
    steps: int,
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
    last = journal["steps"][-1]
    expected = {name: last.get(name) for name in ("step", "loss", "samples_per_second")}
    expected |= {"attempt": int(match[2]), "steps": steps}
    what = f"the commit record, {commit.name}"
    return problems + fields(what, REPORTED, commit.metrics) + compare(what, expected, commit.metrics)
