"""The run's storage, reached through Arrow with the environment's credentials, and the rules for writing to it.

No key is ever passed to the filesystem object: what it is pickled into (checkpoints' metadata, Ray's object store)
would carry it. Objects are written whole, read back and compared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs as pafs

from trainer.lease import UNREADABLE, Observation, Tombstone, Unreadable

PATIENT_ATTEMPTS = 12
"""The waits between them double from 25 ms: a server that is away for a minute and a half ends no training."""
HASTY_ATTEMPTS = 3
"""For who looks again anyway."""


class StorageError(RuntimeError):
    """Storage is not usable as configured; the message says what to do."""


class DifferingBytes(StorageError):
    """An object that must never change already holds other bytes."""


class EnvironmentS3(pafs.S3FileSystem):
    """S3 as the environment says. Ray carries it to its controller and workers by pickle, and Arrow's own would lose
    the retries on the way: a pickle of this one holds nothing, and each process makes it anew from its environment."""

    def __reduce__(self) -> tuple[object, ...]:
        return filesystem, ()


def filesystem(
    environ: Mapping[str, str] | None = None,
    *,
    connect_timeout_s: float = 10,
    request_timeout_s: float = 60,
    attempts: int = PATIENT_ATTEMPTS,
) -> pafs.S3FileSystem:
    """S3 at AWS_ENDPOINT_URL (AWS itself where unset) in AWS_REGION; the keys stay in the environment.

    Raises StorageError when the endpoint is no http(s) address or holds credentials.
    """
    source = os.environ if environ is None else environ
    region = source.get("AWS_REGION") or source.get("AWS_DEFAULT_REGION") or "us-east-1"
    options: dict[str, object] = {
        "region": region,
        "connect_timeout": connect_timeout_s,
        "request_timeout": request_timeout_s,
        "retry_strategy": pafs.AwsDefaultS3RetryStrategy(max_attempts=attempts),
    }
    endpoint = source.get("AWS_ENDPOINT_URL")
    if endpoint:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StorageError("AWS_ENDPOINT_URL is no http:// or https:// address; correct or unset it")
        if "@" in parts.netloc:
            raise StorageError("AWS_ENDPOINT_URL holds credentials; put them in AWS_ACCESS_KEY_ID and its companion")
        options |= {"endpoint_override": parts.netloc, "scheme": parts.scheme}
    return EnvironmentS3(**options)


def join(*parts: str) -> str:
    """Object path from its parts."""
    first, *others = parts
    return "/".join([first.rstrip("/"), *(part.strip("/") for part in others)])


def read(store: pafs.FileSystem, path: str) -> bytes:
    """All bytes of the object. Raises FileNotFoundError, or OSError where storage does not answer."""
    with store.open_input_stream(path) as stream:
        return bytes(stream.read())


def read_optional(store: pafs.FileSystem, path: str) -> bytes | None:
    """All bytes of the object, None when there is none. Raises OSError where storage does not answer."""
    try:
        return read(store, path)
    except FileNotFoundError:
        return None


def exists(store: pafs.FileSystem, path: str) -> bool:
    """Whether the object is there. Raises OSError where storage does not answer."""
    return bool(store.get_file_info(path).type != pafs.FileType.NotFound)


def names(store: pafs.FileSystem, folder: str) -> list[str]:
    """The names directly under ``folder``, sorted; empty when there is nothing. Raises OSError."""
    infos = store.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    return sorted(info.base_name for info in infos if info.base_name)


def put_once(store: pafs.FileSystem, path: str, data: bytes) -> bool:
    """Write an object that never changes, read it back and compare. True when it was written now, False when the same
    bytes were there (an upload that is being finished).

    Raises DifferingBytes when other bytes are there, and OSError where storage does not answer or altered them.
    """
    present = read_optional(store, path)
    if present == data:
        return False
    if present is not None:
        raise DifferingBytes(
            f"{path} already holds other bytes ({len(present)}, not {len(data)}); nothing was overwritten. "
            "Submit under a new submission id"
        )
    # One write of complete bytes: Arrow commits what it has even when an exception ends the stream.
    stream = store.open_output_stream(path)
    stream.write(data)
    stream.close()
    if read(store, path) != data:
        raise OSError(f"{path} was read back and differs from what was written; storage cannot be trusted")
    return True


def observe_lease(store: pafs.FileSystem, root: str) -> Observation:
    """One look at the lease and the tombstone under ``root`` (``bucket/prefix/<run key>``). Never raises OSError."""
    lease: bytes | Unreadable | None
    try:
        lease = read_optional(store, join(root, "custody/lease.json"))
    except (OSError, pa.ArrowException):
        lease = UNREADABLE
    tombstone: Tombstone
    try:
        # The object's presence speaks; its bytes may be half-written and it stands all the same.
        info = store.get_file_info(join(root, "custody/tombstone.json"))
        tombstone = "absent" if info.type == pafs.FileType.NotFound else "present"
    except (OSError, pa.ArrowException):
        tombstone = "unreadable"
    return Observation(lease, tombstone)
