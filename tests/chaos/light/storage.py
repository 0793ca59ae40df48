"""The part of `trainer.storage` that the light slice needs, without Arrow: S3 by hand (Signature Version 4).

Takes `trainer/storage.py`'s place in the delivered source, so that the real lease keeper runs on it.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

from trainer.lease import UNREADABLE, Observation, Tombstone, Unreadable

PATIENCE_S = 20.0
"""How long a request of a training goes on against a server that does not answer, or has no room."""


PATIENT_ATTEMPTS = 12
HASTY_ATTEMPTS = 3


class StorageError(RuntimeError):
    """Storage is not usable as configured."""


class Store:
    """One S3 endpoint. Paths are `bucket/key`. Methods raise OSError where storage does not answer or refuses."""

    def __init__(self, environ: Mapping[str, str], timeout_s: float, patience_s: float) -> None:
        parts = urlsplit(environ["AWS_ENDPOINT_URL"])
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._key, self._secret = environ["AWS_ACCESS_KEY_ID"], environ["AWS_SECRET_ACCESS_KEY"]
        self._region = environ.get("AWS_REGION", "us-east-1")
        self._timeout_s, self._patience_s = timeout_s, patience_s

    def get(self, path: str) -> bytes | None:
        """The object's bytes, None when there is none."""
        status, body = self._ask("GET", path)
        return None if status == 404 else body

    def put(self, path: str, data: bytes) -> None:
        """Write the whole object."""
        self._ask("PUT", path, data)

    def names(self, folder: str) -> list[str]:
        """Keys below a folder, relative to it, at most 1000."""
        bucket, _, prefix = folder.partition("/")
        prefix = prefix.rstrip("/") + "/"
        query = f"list-type=2&prefix={quote(prefix, safe='')}"
        _, body = self._ask("GET", bucket, query=query)
        return [found[len(prefix) :] for found in re.findall(r"<Key>([^<]*)</Key>", body.decode())]

    def _ask(self, method: str, path: str, data: bytes = b"", query: str = "") -> tuple[int, bytes]:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                status, body = self._once(method, path, data, query)
                if status < 300 or (status == 404 and b"NoSuchKey" in body):
                    return status, body
                raise OSError(f"{method} {path}: {status} {body[:200].decode(errors='replace')}")
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() > deadline:
                    raise OSError(str(error) or type(error).__name__) from error
                time.sleep(0.2)

    def _once(self, method: str, path: str, data: bytes, query: str) -> tuple[int, bytes]:
        target = "/" + quote(path, safe="/-_.~")
        host, at = f"{self._host}:{self._port}", datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        digest = hashlib.sha256(data).hexdigest()
        headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": at}
        signed = ";".join(headers)
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        canonical = "\n".join((method, target, query, lines, signed, digest))
        scope = f"{at[:8]}/{self._region}/s3/aws4_request"
        text = "\n".join(("AWS4-HMAC-SHA256", at, scope, hashlib.sha256(canonical.encode()).hexdigest()))
        key = f"AWS4{self._secret}".encode()
        for part in (at[:8], self._region, "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        headers["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self._key}/{scope}, SignedHeaders={signed}, Signature={signature}"
        )
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, target + (f"?{query}" if query else ""), body=data or None, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def filesystem(
    environ: Mapping[str, str] | None = None,
    *,
    connect_timeout_s: float = 10,
    request_timeout_s: float = 60,
    attempts: int = PATIENT_ATTEMPTS,
) -> Store:
    """A store at AWS_ENDPOINT_URL. A reader that is hasty gets one answer or an error; a training goes on asking for
    PATIENCE_S. Raises StorageError."""
    source = os.environ if environ is None else environ
    try:
        return Store(source, min(5.0, request_timeout_s), PATIENCE_S if attempts >= PATIENT_ATTEMPTS else 0.0)
    except KeyError as missing:
        raise StorageError(f"{missing} is not set") from missing


def join(*parts: str) -> str:
    """Object path from its parts."""
    return "/".join(part.strip("/") for part in parts)


def observe_lease(store: Store, root: str) -> Observation:
    """One look at the lease and the tombstone under ``root``. Never raises OSError."""
    lease: bytes | Unreadable | None
    try:
        lease = store.get(join(root, "custody/lease.json"))
    except OSError:
        lease = UNREADABLE
    tombstone: Tombstone
    try:
        tombstone = "absent" if store.get(join(root, "custody/tombstone.json")) is None else "present"
    except OSError:
        tombstone = "unreadable"
    return Observation(lease, tombstone)


def put_once(store: Store, path: str, data: bytes) -> bool:
    """Write an object that never changes. Raises OSError when other bytes are there."""
    present = store.get(path)
    if present is not None and present != data:
        raise OSError(f"{path} already holds other bytes")
    if present is None:
        store.put(path, data)
    return present is None
