"""Find the newest committed checkpoint of a run that really loads, for another run to continue from.

    python -m trainer.last_commit s3://bucket/prefix/<run key> [--workload regression|script] [--for TRAINING]
        [--patient]

Prints ``{"schema":1, "checkpoint": "s3://...", "step": N, "skipped": [{"checkpoint", "why"}]}``. Exit status 0 when one
loads, 3 when none does or the newest is of another training than TRAINING (the reason on stderr), 2 for an address that
cannot be used or storage that does not answer. ``step`` is null where neither the checkpoint nor the metrics reported
with it say one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoints import CheckpointForeign, must_match
from trainer.inspection.checklist import Failed
from trainer.inspection.checkpoints import check_journal, check_loads, read_commits
from trainer.inspection.storage import NothingStored, Root, Unanswered, Unreadable, UnusableInput, open_root

TRAIN_NAME = "main"

FOUND, UNUSABLE, NONE_LOADS = 0, 2, 3


@dataclass(frozen=True)
class Skipped:
    """A committed checkpoint newer than the one found, and why it does not load."""

    checkpoint: str
    why: str


@dataclass(frozen=True)
class LastCommit:
    """The newest commit that loads: its address and step, and what was skipped to reach it."""

    checkpoint: str
    step: int | None
    skipped: tuple[Skipped, ...]
    schema: int = 1


class NoneLoads(Exception):
    """The run has no commit that loads; the message says why."""


def find_last_commit(root: Root, native: bool = True) -> LastCommit:
    """The newest of the run's commits that loads. ``native`` as in ``check_loads``.

    Raises NoneLoads, and Unanswered where storage does not say: an older commit is not taken for that.
    """
    try:
        commits = read_commits(root, TRAIN_NAME)
    except Unanswered:
        raise
    except (Failed, Unreadable) as problem:
        raise NoneLoads(f"{root.location} has no commit to continue from: {problem}") from None
    skipped: list[Skipped] = []
    for commit in commits:
        folder = f"train/{TRAIN_NAME}/{commit.name}"
        address = f"{root.location}/{folder}"
        reported = commit.metrics.get("step")
        try:
            step = check_loads(root, folder, native)
        except Unanswered:
            raise
        except (Failed, Unreadable) as problem:
            skipped.append(Skipped(address, str(problem)))
            continue
        if step is not None and type(reported) is int and reported != step:
            skipped.append(Skipped(address, f"it holds step {step}, committed as step {reported}"))
            continue
        if step is None and type(reported) is int:
            step = reported
        return LastCommit(address, step, tuple(skipped))
    reasons = "; ".join(item.why for item in skipped)
    raise NoneLoads(f"none of the {len(skipped)} commits of {root.location} loads: {reasons}")


@dataclass(frozen=True)
class _Made:
    name: str
    step: int
    recipe: Mapping[str, Any]
    world_size: int


def check_continues(root: Root, found: LastCommit, training: Mapping[str, Any]) -> None:
    """Raise CheckpointForeign where the training (``recipe``, ``world_size``) would refuse to go on from this commit of
    the regression's."""
    assert found.step is not None
    name = found.checkpoint.rsplit("/", 1)[-1]
    journal = check_journal(root, f"train/{TRAIN_NAME}/{name}", found.step)
    made = _Made(name, found.step, journal["recipe"], journal["world_size"])
    must_match(made, training["recipe"], training["world_size"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.last_commit",
        description="The newest commit of a run that really loads, as JSON.",
    )
    parser.add_argument("root", help="the run's root: s3://bucket/prefix/<run key>, or a local copy")
    parser.add_argument(
        "--workload",
        choices=("regression", "script"),
        default="regression",
        help="who wrote the checkpoints; a script's are looked at less closely",
    )
    parser.add_argument(
        "--for",
        dest="training",
        type=json.loads,
        metavar="TRAINING",
        help='JSON of the regression that is to continue: {"recipe": {...}, "world_size": N}',
    )
    parser.add_argument("--patient", action="store_true", help="outlive a storage outage of a minute and a half")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="lanyard-last-commit-") as scratch:
        try:
            root = open_root(options.root, Path(scratch), options.patient)
            found = find_last_commit(root, options.workload == "regression")
            if options.training:
                check_continues(root, found, options.training)
        except (NoneLoads, NothingStored, CheckpointForeign) as problem:
            print(f"last_commit: {problem}", file=sys.stderr)
            return NONE_LOADS
        except UnusableInput as problem:
            print(f"last_commit: {problem}", file=sys.stderr)
            return UNUSABLE
        except Unanswered as problem:
            print(f"last_commit: storage did not answer ({problem}); try again", file=sys.stderr)
            return UNUSABLE
    print(json.dumps(asdict(found)))
    return FOUND


if __name__ == "__main__":
    sys.exit(main())
