"""The checksum manifest of an export: bare names only, nothing unlisted, nothing missing, no byte changed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from pathlib import Path

from trainer.inspection.checklist import require
from trainer.inspection.storage import BARE_NAME, BLOB_LIMIT, Root, Unanswered, Unreadable

MANIFEST = "SHA256SUMS"
MANIFEST_LIMIT = 1024 * 1024
LINE = re.compile(r"([0-9a-f]{64}) [ *](.*)")


def check_manifest(root: Root, folder: str, required: Collection[str]) -> str:
    """Check ``folder``'s SHA256SUMS against what lies there.

    Raises Failed, or Unreadable without a manifest.
    """
    text = root.fetch(f"{folder}/{MANIFEST}", MANIFEST_LIMIT).read_bytes().decode("utf-8", errors="replace")
    listed, problems = _parse(text)
    for entry in root.entries(folder):
        if entry.kind == "link":
            problems.append(f"{entry.name} is a link")
        elif entry.kind != "file":
            problems.append(f"{entry.name} is a {entry.kind}; an export holds plain files only")
        elif entry.name not in listed and entry.name != MANIFEST:
            problems.append(f"{entry.name} is not listed in {MANIFEST}")
    problems += [f"{name} is required and not listed in {MANIFEST}" for name in required if name not in listed]
    total = 0
    for name, digest in listed.items():
        try:
            path = root.fetch(f"{folder}/{name}", BLOB_LIMIT)
        except Unanswered:
            raise
        except Unreadable as error:
            problems.append(f"{name} is listed in {MANIFEST}: {error}")
            continue
        if file_sha256(path) != digest:
            problems.append(f"{name} differs from its checksum: its bytes are not those that were exported")
        total += path.stat().st_size
    require(problems)
    return f"{len(listed)} files, {total:,} bytes, as listed"


def _parse(text: str) -> tuple[dict[str, str], list[str]]:
    listed: dict[str, str] = {}
    problems: list[str] = []
    lines = text.split("\n")
    if lines[-1] != "":
        problems.append(f"{MANIFEST} does not end in a newline: it is cut off")
    for index, line in enumerate(lines[:-1] if lines[-1] == "" else lines, start=1):
        match = LINE.fullmatch(line)
        if match is None:
            problems.append(f"line {index} of {MANIFEST} is not '<sha256>  <name>': {line[:80]!r}")
            continue
        digest, name = match.groups()
        if not BARE_NAME.fullmatch(name):
            problems.append(f"{MANIFEST} names {name[:200]!r}, which is not a bare file name: a path is refused")
        elif name == MANIFEST:
            problems.append(f"{MANIFEST} lists itself")
        elif name in listed:
            problems.append(f"{name} is listed twice in {MANIFEST}")
        else:
            listed[name] = digest
    if not listed and not problems:
        problems.append(f"{MANIFEST} lists nothing")
    return listed, problems


def file_sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
