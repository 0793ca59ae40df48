"""S3, as the operator uses it: small objects, awaited, with endpoint and credentials from the environment."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiobotocore.session
import aiohttp
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

MAX_OBJECT = 64 * 1024 * 1024
"""No object that the operator reads is larger; artifacts are read in the application environment."""

_CONFIG = Config(
    connect_timeout=5,
    read_timeout=20,
    retries={"max_attempts": 3, "mode": "standard"},
    # Servers without CRC trailers answer 411 (juicefs, rclone); AWS takes both.
    request_checksum_calculation="when_required",
    response_checksum_validation="when_required",
    max_pool_connections=64,
)


class StorageError(Exception):
    """Storage did not do what was asked. The message names the object, what was answered, and never a credential."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Fetched:
    """An object's bytes and its entity tag; `body` is None when it has not changed since the tag that was given.

    Some servers give no tag (then it is empty, and every read is a whole one).
    """

    body: bytes | None
    etag: str


def split(uri: str) -> tuple[str, str]:
    """`s3://bucket/key` as (bucket, key)."""
    if not uri.startswith("s3://"):
        raise ValueError(f"not an s3:// address: {uri!r}")
    bucket, _, key = uri[5:].partition("/")
    return bucket, key


class Storage:
    """One client for a worker's whole life. `open` it once; all methods raise StorageError."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def open(cls, endpoint_url: str | None, region: str | None) -> AsyncIterator[Storage]:
        session = aiobotocore.session.get_session()
        async with session.create_client(
            "s3", endpoint_url=endpoint_url, region_name=region or "us-east-1", config=_CONFIG
        ) as client:
            yield cls(client)

    async def get(self, uri: str, unless: str | None = None) -> Fetched | None:
        """The object, or None where there is none. `unless` is the entity tag of the bytes the caller has."""
        bucket, key = split(uri)
        asked = {"IfNoneMatch": unless} if unless else {}
        try:
            answer = await self._client.get_object(Bucket=bucket, Key=key, **asked)
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if status == 304:
                return Fetched(None, unless or "")
            if code in ("NoSuchKey", "404"):
                return None
            raise _explained(uri, "read", error) from error
        except (BotoCoreError, OSError) as error:
            raise _explained(uri, "read", error) from error
        if answer["ContentLength"] > MAX_OBJECT:
            answer["Body"].close()
            raise StorageError(f"{uri} holds {answer['ContentLength']} bytes; the operator reads at most {MAX_OBJECT}")
        try:
            async with answer["Body"] as body:
                return Fetched(await body.read(), str(answer.get("ETag") or ""))
        except (BotoCoreError, HTTPClientError, OSError, aiohttp.ClientError) as error:
            raise _explained(uri, "read", error) from error

    async def put(self, uri: str, body: bytes, *, only_if_absent: bool = False) -> None:
        """Write the whole object. `only_if_absent` asks for a conditional write; not every server honours it."""
        bucket, key = split(uri)
        asked = {"IfNoneMatch": "*"} if only_if_absent else {}
        try:
            await self._client.put_object(Bucket=bucket, Key=key, Body=body, **asked)
        except (ClientError, BotoCoreError, OSError) as error:
            raise _explained(uri, "write", error) from error

    async def delete(self, uri: str) -> None:
        bucket, key = split(uri)
        try:
            await self._client.delete_object(Bucket=bucket, Key=key)
        except (ClientError, BotoCoreError, OSError) as error:
            raise _explained(uri, "delete", error) from error

    async def names(self, prefix_uri: str, limit: int = 1000) -> list[str]:
        """Keys below a prefix, relative to it, at most `limit`."""
        bucket, prefix = split(prefix_uri)
        found: list[str] = []
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=bucket, Prefix=prefix, PaginationConfig={"MaxItems": limit}
            )
            async for page in pages:
                found += [item["Key"][len(prefix) :] for item in page.get("Contents", ())]
        except (ClientError, BotoCoreError, OSError) as error:
            raise _explained(prefix_uri, "list", error) from error
        return found[:limit]

    async def abort_uploads(self, prefix_uri: str) -> int:
        """End the multipart uploads below a prefix that nobody will finish (they are listed nowhere else, and cost what
        they hold); how many there were. Only for a prefix whose writers are all gone."""
        bucket, prefix = split(prefix_uri)
        ended = 0
        try:
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix)
            async for page in pages:
                for upload in page.get("Uploads", ()):
                    await self._client.abort_multipart_upload(
                        Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    ended += 1
        except (ClientError, BotoCoreError, OSError) as error:
            raise _explained(prefix_uri, "end unfinished uploads below", error) from error
        return ended


def _explained(uri: str, what: str, error: BaseException) -> StorageError:
    code = str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""
    remedy = {
        "NoSuchBucket": "create the bucket or correct storage.uri",
        "AccessDenied": "give the worker's credentials read, write and delete below this prefix",
        "403": "give the worker's credentials read, write and delete below this prefix",
        "InvalidAccessKeyId": "correct AWS_ACCESS_KEY_ID in the worker's environment",
        "SignatureDoesNotMatch": "correct AWS_SECRET_ACCESS_KEY in the worker's environment",
    }.get(code)
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the worker's environment"
    elif type(error).__name__ in ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError"):
        remedy = "check AWS_ENDPOINT_URL and that the server is up"
    answered = code or type(error).__name__
    return StorageError(f"cannot {what} {uri}: {answered}" + (f"; {remedy}" if remedy else ""), code or answered)
