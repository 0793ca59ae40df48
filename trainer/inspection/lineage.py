"""Where each attempt's state came from: the commit it names, compared with what the ranks restored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.inspection.checklist import Failed, NotApplicable, compare, require
from trainer.inspection.checkpoints import NATIVE_FILE, Commit, load_archive, read_commits, reload
from trainer.inspection.evidence import Attempt
from trainer.inspection.storage import Root, Unanswered, Unreadable, UnusableInput

# s3://bucket/prefix/<run key>/train/<train name>/<checkpoint>
EARLIER = re.compile(r"(s3://([^/?#@]+)/[^?#@]+)/train/([A-Za-z0-9_-]+)/(checkpoint_[A-Za-z0-9._-]+)")


@dataclass(frozen=True)
class Lineage:
    """What is needed to look up the checkpoints that a training's attempts restored."""

    root: Root
    train_name: str
    recipe: Mapping[str, Any] | None
    """To reload checkpoints with; None where they are a script's own and only their record is compared."""
    ordered: bool
    """Whether the run's order is known, and with it what it was to be continued from."""
    resumed_from: str | None
    elsewhere: Callable[[str], Root]
    """Opens another run's root. Raises UnusableInput."""

    def check(self, attempts: Sequence[Attempt], commits: Sequence[Commit]) -> str:
        """Every restored attempt began with exactly the state of a commit, where that is still kept.

        Raises Failed.
        """
        restored = [attempt for attempt in attempts if attempt.restored_step > 0]
        if not restored:
            raise NotApplicable("no attempt restored a checkpoint")
        by_name = {commit.name: commit for commit in commits}
        kept = {entry.name for entry in self.root.entries(f"train/{self.train_name}")}
        problems: list[str] = []
        notes: list[str] = []
        for attempt in restored:
            source = str(attempt.start[min(attempt.start)].get("restored_from")).rstrip("/")
            what = f"attempt {attempt.number}"
            notes.append(f"{what} from {source} (step {attempt.restored_step})")
            if source.startswith("s3://"):
                found, caveat = self._check_earlier(what, attempt, source)
                problems += found
                notes[-1] += caveat
            elif source in by_name:
                problems += self._compare(what, attempt, self.root, self.train_name, by_name[source])
            elif source in kept:
                problems.append(f"{what} restored {source}, which was never committed")
            else:
                notes[-1] += ", which is no longer kept and was not compared"
        require(problems)
        return "; ".join(notes)

    def _check_earlier(self, what: str, attempt: Attempt, source: str) -> tuple[list[str], str]:
        """Problems with a checkpoint of another run that this one continues, and what could not be looked at.

        It is looked at only where the order names it or it lies in this run's own bucket: an address found in
        evidence is not followed to just anywhere.
        """
        if self.ordered and source != self.resumed_from:
            return [f"{what} restored {source}, the order says {self.resumed_from}"], ""
        match = EARLIER.fullmatch(source)
        if match is None:
            return [f"{what} restored {source!r}, which is no checkpoint's address"], ""
        location, bucket, train_name, name = match.groups()
        if not self.ordered and not self.root.location.startswith(f"s3://{bucket}/"):
            return [], ", which lies elsewhere and was not compared"
        try:
            root = self.elsewhere(location)
            commits = read_commits(root, train_name)
        except Unanswered:
            raise
        except (UnusableInput, Unreadable, Failed) as problem:
            return [], f", which cannot be looked at any more and was not compared ({problem})"
        commit = next((commit for commit in commits if commit.name == name), None)
        if commit is None:
            return [], ", which is no longer kept and was not compared"
        return self._compare(what, attempt, root, train_name, commit), ""

    def _compare(self, what: str, attempt: Attempt, root: Root, train_name: str, commit: Commit) -> list[str]:
        reported = commit.metrics.get("step")
        problems = []
        if reported is not None and reported != attempt.restored_step:
            problems.append(f"{what} restored step {attempt.restored_step}; {commit.name} is of step {reported}")
        if self.recipe is None:
            return problems
        path = f"train/{train_name}/{commit.name}/{NATIVE_FILE}"
        try:
            stored = reload(path, load_archive(root, path), self.recipe)
        except Failed as problem:
            return [*problems, f"{what}: {problem}"]
        expected = {
            "restored_step": stored.step,
            "model_sha256": stored.model_sha256,
            "momentum_sha256": stored.momentum_sha256,
        }
        for rank, start in sorted(attempt.start.items()):
            found = compare(f"{what}, rank {rank}", expected, start)
            problems += [f"{problem} as in {commit.name}" for problem in found]
        return problems
