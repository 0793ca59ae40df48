"""A run's root, read from a local directory or from S3, within bounds and without following links.

S3 is reached through Arrow, with the endpoint of ``AWS_ENDPOINT_URL`` and the credentials and region of the
environment. Nothing here writes to the root.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from trainer.storage import HASTY_ATTEMPTS, PATIENT_ATTEMPTS, StorageError, filesystem

MiB = 1024 * 1024
# A journal of a million steps is about 200 MiB; whatever is larger than these is not this program's.
DOCUMENT_LIMIT = 512 * MiB
EVIDENCE_LIMIT = 1 * MiB
BLOB_LIMIT = 16 * 1024 * MiB
TOTAL_LIMIT = 64 * 1024 * MiB
ENTRY_LIMIT = 10_000

BARE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class UnusableInput(Exception):
    """What was asked for cannot be inspected at all; the message says what to do."""


class Unreadable(Exception):
    """One object of the run cannot be read; the message says which and why."""


class Missing(Unreadable):
    """Storage answers that the object is not there."""


class Unanswered(Unreadable):
    """Storage did not answer, which says nothing about the run: neither that a thing is there nor that it is
    not.
    """


class NothingStored(UnusableInput):
    """Storage answers that there is nothing at the place."""


@dataclass(frozen=True)
class Entry:
    """One direct child of a folder. ``size`` is in bytes, None for what is not a file."""

    name: str
    kind: Literal["file", "folder", "link", "other"]
    size: int | None


class Root(Protocol):
    """The root of one run."""

    @property
    def location(self) -> str:
        """As the person gave it, without a trailing slash."""

    @property
    def run_key(self) -> str | None:
        """The run key the location itself ends in; None where a location need not (a local copy)."""

    def entries(self, folder: str) -> tuple[Entry, ...]:
        """The direct children of ``folder`` (relative, ``/``-separated), by name; empty where it does not
        exist.

        Raises Unreadable for a folder of over 10,000 entries, for a link, or where storage does not answer.
        """

    def fetch(self, path: str, limit: int) -> Path:
        """A local file with the bytes of ``path`` (relative, ``/``-separated).

        Raises Unreadable where it is missing, no plain file, larger than ``limit`` bytes, or not to be had.
        """


def open_root(location: str, scratch: Path, patient: bool = False) -> Root:
    """The root at a local directory or at ``s3://bucket/prefix``; downloads go below ``scratch``.

    A person wants to know at once that storage does not answer; ``patient`` is for who has to outlive that.
    Raises UnusableInput for a location that is neither, or that does not exist.
    """
    if "://" in location:
        return _S3Root.open(location, scratch, PATIENT_ATTEMPTS if patient else HASTY_ATTEMPTS)
    return _LocalRoot.open(location)


def read_json(root: Root, path: str, limit: int = DOCUMENT_LIMIT) -> Any:
    """The JSON document at ``path``. NaN and infinities are let through, for a check to name; repeated keys
    are not.

    Raises Unreadable.
    """
    raw = root.fetch(path, limit).read_bytes()
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repeats)
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path} is not UTF-8 text: {error}") from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path} is not JSON: {error}") from None


def read_object(root: Root, path: str, limit: int = DOCUMENT_LIMIT) -> dict[str, Any]:
    """The JSON object at ``path``, of schema 1 where it names a schema. Raises Unreadable."""
    document = read_json(root, path, limit)
    if not isinstance(document, dict):
        raise Unreadable(f"{path} holds {_type_name(document)} where an object belongs")
    if document.get("schema", 1) != 1:
        raise Unreadable(f"{path} is of schema {document['schema']!r}; this inspector reads schema 1")
    return document


def number(value: Any) -> float | None:
    """``value`` as a float if it is a JSON number (true and false are not), else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, value in pairs:
        if key in document:
            raise ValueError(f"the key {key!r} is given twice in one object")
        document[key] = value
    return document


def _type_name(value: Any) -> str:
    names = {list: "a list", str: "a string", dict: "an object", bool: "a truth value"}
    return "null" if value is None else names.get(type(value), "a number")


def _parts(path: str) -> list[str]:
    parts = path.split("/")
    if any(not BARE_NAME.fullmatch(part) for part in parts):
        raise Unreadable(f"{path!r} is not a path below the run's root")
    return parts


@dataclass(frozen=True)
class _LocalRoot:
    location: str
    directory: Path

    @property
    def run_key(self) -> str | None:
        return None

    @classmethod
    def open(cls, location: str) -> _LocalRoot:
        directory = Path(location).expanduser()
        try:
            if not directory.is_dir():
                raise UnusableInput(
                    f"{location} is not a directory; give the run's root, which holds exports/ and train/"
                )
        except OSError as error:
            raise UnusableInput(f"{location} cannot be read: {error.strerror}") from None
        return cls(location.rstrip("/") or "/", directory.resolve())

    def entries(self, folder: str) -> tuple[Entry, ...]:
        try:
            target = self._reach(folder)
        except FileNotFoundError:
            return ()
        try:
            with os.scandir(target) as children:
                found = sorted(_bounded(folder, map(_local_entry, children)), key=lambda entry: entry.name)
        except OSError as error:
            raise Unreadable(f"{folder} cannot be listed: {error.strerror}") from None
        return tuple(found)

    def fetch(self, path: str, limit: int) -> Path:
        try:
            target = self._reach(path)
            status = target.lstat()
        except FileNotFoundError:
            raise Missing(f"{path} is missing") from None
        except OSError as error:
            raise Unreadable(f"{path} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable(f"{path} is not a plain file")
        _within(path, status.st_size, limit)
        return target

    def _reach(self, path: str) -> Path:
        """The path below the root, having looked at each part so that no link leads elsewhere."""
        target = self.directory
        for part in _parts(path):
            target = target / part
            if stat.S_ISLNK(target.lstat().st_mode):
                raise Unreadable(f"{path} is reached through a link ({part}); links are not followed")
        return target


def _local_entry(child: os.DirEntry[str]) -> Entry:
    if child.is_symlink():
        return Entry(child.name, "link", None)
    if child.is_file(follow_symlinks=False):
        return Entry(child.name, "file", child.stat(follow_symlinks=False).st_size)
    return Entry(child.name, "folder" if child.is_dir(follow_symlinks=False) else "other", None)


def _bounded(folder: str, entries: Iterator[Entry]) -> Iterator[Entry]:
    for count, entry in enumerate(entries, start=1):
        if count > ENTRY_LIMIT:
            raise Unreadable(f"{folder} holds over {ENTRY_LIMIT:,} entries; that is no run's")
        yield entry


def _within(path: str, size: int, limit: int) -> None:
    if size > limit:
        raise Unreadable(f"{path} is {size:,} bytes, over the limit of {limit:,}; it is not read")


class _S3Root:
    def __init__(self, location: str, base: str, filesystem: pafs.FileSystem, scratch: Path) -> None:
        self._location = location
        self._base = base
        self._filesystem = filesystem
        self._scratch = scratch
        self._fetched: dict[str, Path] = {}
        self._total = 0

    @property
    def location(self) -> str:
        return self._location

    @property
    def run_key(self) -> str | None:
        return self._base.rsplit("/", 1)[-1]

    @classmethod
    def open(cls, location: str, scratch: Path, attempts: int) -> _S3Root:
        parts = urlsplit(location)
        if parts.scheme != "s3":
            raise UnusableInput(f"{location}: only s3:// addresses and local directories can be inspected")
        if parts.username is not None or parts.password is not None or "@" in parts.netloc:
            # Not repeated in the message: it may hold a key.
            raise UnusableInput(
                "the s3:// address holds credentials; leave them to the environment (AWS_ACCESS_KEY_ID)"
            )
        if parts.query or parts.fragment:
            raise UnusableInput(f"{location}: remove the part after '?' or '#'")
        prefix = parts.path.strip("/")
        if not BUCKET.fullmatch(parts.netloc) or not prefix:
            raise UnusableInput(f"{location}: write it as s3://<bucket>/<prefix>/<run key>")
        if any(part in ("", ".", "..") for part in prefix.split("/")):
            raise UnusableInput(f"{location}: remove the empty or dotted parts of the prefix")
        base = f"{parts.netloc}/{prefix}"
        try:
            root = cls(f"s3://{base}", base, filesystem(attempts=attempts), scratch)
        except StorageError as error:
            raise UnusableInput(str(error)) from None
        try:
            found = root._filesystem.get_file_info(base).type
        except (OSError, pa.ArrowException) as error:
            raise UnusableInput(_s3_remedy(location, error)) from None
        if found != pafs.FileType.Directory:
            raise NothingStored(f"nothing is stored under {location}; check the address (it ends in the run key)")
        return root

    def entries(self, folder: str) -> tuple[Entry, ...]:
        _parts(folder)
        selector = pafs.FileSelector(f"{self._base}/{folder}", allow_not_found=True)
        try:
            infos = self._filesystem.get_file_info(selector)
        except (OSError, pa.ArrowException) as error:
            raise Unanswered(f"{folder} cannot be listed: {_one_line(error)}") from None
        entries = (_s3_entry(info) for info in infos if info.base_name)
        return tuple(sorted(_bounded(folder, entries), key=lambda entry: entry.name))

    def fetch(self, path: str, limit: int) -> Path:
        if path in self._fetched:
            return self._fetched[path]
        _parts(path)
        source = f"{self._base}/{path}"
        target = self._scratch / "download" / path
        try:
            info = self._filesystem.get_file_info(source)
            if info.type == pafs.FileType.NotFound:
                raise Missing(f"{path} is missing")
            if info.type != pafs.FileType.File:
                raise Unreadable(f"{path} is not a plain object")
            _within(path, info.size, limit)
            self._total += info.size
            if self._total > TOTAL_LIMIT:
                raise Unreadable(f"{path} would bring the download over {TOTAL_LIMIT:,} bytes in all")
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._download(source, target, info.size)
        except (OSError, pa.ArrowException) as error:
            raise Unanswered(f"{path} cannot be read: {_one_line(error)}") from None
        self._fetched[path] = target
        return target

    def _download(self, source: str, target: Path, size: int) -> None:
        partial = target.with_name(target.name + ".partial")
        with self._filesystem.open_input_stream(source) as stream, partial.open("wb") as file:
            shutil.copyfileobj(stream, file, 4 * MiB)
        if partial.stat().st_size != size:
            raise OSError(f"{partial.stat().st_size:,} of {size:,} bytes arrived")
        partial.rename(target)


def _s3_entry(info: pafs.FileInfo) -> Entry:
    if info.type == pafs.FileType.File:
        return Entry(info.base_name, "file", info.size)
    return Entry(info.base_name, "folder" if info.type == pafs.FileType.Directory else "other", None)


def _s3_remedy(location: str, error: Exception) -> str:
    reason = _one_line(error)
    if not os.environ.get("AWS_ENDPOINT_URL"):
        # Right for AWS; for the embedded server it is what a shell without its variables does.
        remedy = (
            "AWS_ENDPOINT_URL is not set, so AWS itself was asked. If the run is in the embedded S3 server: keep "
            "`make stack` running, do `. .lanyard/env` in this shell, and ask again; for AWS, check the bucket, "
            "AWS_REGION and the keys"
        )
    elif any(sign in reason for sign in ("ACCESS_DENIED", "INVALID_ACCESS_KEY", "SIGNATURE", "Forbidden")):
        remedy = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    elif any(sign in reason for sign in ("NETWORK_CONNECTION", "curl", "connect")):
        remedy = "check that AWS_ENDPOINT_URL is right and the server is up (the embedded one: `make stack`)"
    else:
        remedy = "check the bucket, AWS_REGION and the keys"
    return f"{location} cannot be reached: {reason}; {remedy}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
