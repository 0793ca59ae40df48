"""Check what a run left in storage, from storage alone.

    python -m trainer.inspect_results s3://bucket/prefix/<run key> [--submission ID] [--expect order.json]
        [--require-distinct-devices] [--require-distinct-hosts] [--json FILE|-] [--patient]

The place is a run's root, in S3 (endpoint, region and keys from AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY; `. .lanyard/env` sets those of the embedded stack) or copied to a local directory. Of several
exports the run's own training is inspected. Exit status 0 when every check holds, 1 when one does not, 2 when the place
or a file given cannot be used, or storage does not answer.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.inspection.checklist import Checklist
from trainer.inspection.inspector import Question, choose_submission, inspect
from trainer.inspection.storage import UnusableInput, open_root

HOLDS, FAILS, UNUSABLE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="lanyard-inspect-") as scratch:
            root = open_root(options.place, Path(scratch), options.patient)
            order = None if options.expect is None else _read_order(options.expect)
            asked = options.submission or (order or {}).get("submission_id")
            submission, others = choose_submission(root, asked)
            if others:
                print(
                    f"inspect_results: inspecting the run's own export, {submission}; for another use --submission: "
                    f"{', '.join(others)}",
                    file=sys.stderr,
                )
            question = Question(
                submission,
                lambda location: open_root(location, Path(tempfile.mkdtemp(dir=scratch)), options.patient),
                order,
                options.require_distinct_devices,
                options.require_distinct_hosts,
            )
            checklist = inspect(root, question)
            document = as_document(root.location, question.submission, checklist)
        if options.json == "-":
            print(json.dumps(document, indent=2))
        else:
            print(as_table(root.location, question.submission, checklist))
            if options.json is not None:
                _write(Path(options.json), document)
    except UnusableInput as problem:
        print(f"inspect_results: {problem}", file=sys.stderr)
        return UNUSABLE
    if checklist.unanswered:
        print(
            f"inspect_results: storage did not answer ({checklist.unanswered[0]}); nothing is proved, inspect again",
            file=sys.stderr,
        )
        return UNUSABLE
    return HOLDS if checklist.ok else FAILS


def as_document(location: str, submission: str, checklist: Checklist) -> dict[str, Any]:
    """The outcome for machines: ``{"schema", "ok", "location", "submission_id", "checks", "not_applicable",
    "figures"}``.

    Figures that are no finite numbers, which JSON has no word for, are given as text.
    """
    return {
        "schema": 1,
        "ok": checklist.ok,
        "location": location,
        "submission_id": submission,
        "checks": [{"name": check.name, "ok": check.ok, "detail": check.detail} for check in checklist.checks],
        "not_applicable": [{"name": check.name, "why": check.detail} for check in checklist.not_applicable],
        "figures": {name: _plain(value) for name, value in checklist.figures.items()},
    }


def as_table(location: str, submission: str, checklist: Checklist) -> str:
    """The outcome for people, as wide as the terminal."""
    width = max(60, min(shutil.get_terminal_size((110, 24)).columns, 140))
    rows = [(check.name, "ok" if check.ok else "FAILED", check.detail) for check in checklist.checks]
    rows += [(check.name, "n/a", check.detail) for check in checklist.not_applicable]
    names = max(len(name) for name, _, _ in rows)
    indent = " " * (names + 10)
    lines = [f"{location}, export {submission}", ""]
    for name, state, detail in rows:
        filled = textwrap.fill(_printable(detail), width, initial_indent=indent, subsequent_indent=indent)
        lines.append(f"{name:<{names}}  {state:<6}  {filled.lstrip()}")
    failed = sum(not check.ok for check in checklist.checks)
    total = len(checklist.checks)
    lines += ["", f"all {total} checks hold" if checklist.ok else f"{failed} of {total} checks FAILED"]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.inspect_results",
        description="Check what a run left in storage, from storage alone.",
    )
    parser.add_argument("place", help="the run's root: s3://bucket/prefix/<run key>, or a local copy of it")
    parser.add_argument("--submission", metavar="ID", help="which export; default: the run's own training")
    parser.add_argument(
        "--json", metavar="FILE", help="write the outcome as JSON too; '-' prints it instead of the table"
    )
    parser.add_argument("--patient", action="store_true", help="outlive a storage outage of a minute and a half")
    parser.add_argument("--require-distinct-devices", action="store_true", help="ranks must have a device each")
    parser.add_argument("--require-distinct-hosts", action="store_true", help="ranks must have a host each")
    parser.add_argument(
        "--expect",
        metavar="ORDER.json",
        help="the job's order (LANYARD_JOB) that the run must have followed; '-' reads it from stdin",
    )
    return parser


def _read_order(path: str) -> dict[str, Any]:
    try:
        order = json.loads(sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes())
    except OSError as error:
        raise UnusableInput(f"--expect {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UnusableInput(f"--expect {path} is not JSON: {error}") from None
    if not isinstance(order, dict) or order.get("schema") != 1:
        raise UnusableInput(f"--expect {path} is no job order of schema 1")
    return order


def _write(path: Path, document: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise UnusableInput(f"--json {path} cannot be written: {error.strerror}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _printable(text: str) -> str:
    # What is inspected is untrusted: it must not speak to the terminal.
    return "".join(character if character.isprintable() else "?" for character in text)


if __name__ == "__main__":
    sys.exit(main())
