"""The value types of run.json: what one field may hold, and what is said when it holds something else.

A validator here raises ValueError with the remedy. It never repeats the value: a bad URI or argument is where
a password turns up.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
)

_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DURATION = r"^(?=.)([0-9]{1,9}d)?([0-9]{1,9}h)?([0-9]{1,9}m)?([0-9]{1,9}s)?$"
_NAME = r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$"
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_SEGMENT = r"[A-Za-z0-9._=-]{1,200}"
_S3_URI = rf"^s3://{_BUCKET}(/{_SEGMENT})+$"
_IMAGE = (
    r"^docker:[a-z0-9]+([.-][a-z0-9]+)*(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?@sha256:[0-9a-f]{64}$"
)
_INFRA = r"^[a-z][a-z0-9]*(/[A-Za-z0-9][A-Za-z0-9._:@-]{0,126}){0,3}$"
_ACCELERATORS = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}:1$"
_AMOUNT = r"^[1-9][0-9]{0,4}\+?$"

# The bound leaves room for the run key and Ray's own names below S3's 1,024 bytes for a key.
_URI_MAX = 512
_PATH_MAX = 1_024
_ARGUMENTS_MAX = 64
_COMMAND_MAX = 4_096
_SHELL_SYNTAX = re.compile(r"[;&|<>`$\n\r()]")
_CREDENTIALS = re.compile(r"://[^/\s@]*@|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Strict(BaseModel):
    """A frozen part of run.json that knows its fields and takes no value for another type's."""

    # strict: "32", 32.0 and true are not 32. By alias only: run.json has one spelling of each field.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, serialize_by_alias=True)


def parse_duration(text: object) -> int:
    """The seconds of a duration such as "90s", "20m", "1h30m" or "3d".

    Raises ValueError for anything else: a bare number too, because its unit would be a guess.
    """
    if not isinstance(text, str):
        raise ValueError('must be text with its unit, such as "90s", "20m", "1h30m" or "3d"')
    match = re.fullmatch(_DURATION, text) if len(text) <= 40 else None
    if match is None:
        raise ValueError(
            'is not a duration: write whole numbers with d, h, m, s in this order, such as "90s" or "1h30m"'
        )
    return sum(int(part[:-1]) * _UNITS[part[-1]] for part in match.groups() if part)


def format_duration(seconds: int) -> str:
    """The shortest text that `parse_duration` reads back as the same seconds (at least 1)."""
    parts = []
    for unit, size in _UNITS.items():
        amount, seconds = divmod(seconds, size)
        if amount:
            parts.append(f"{amount}{unit}")
    return "".join(parts) or "0s"


def duration(low: str, high: str) -> tuple[object, ...]:
    """What makes an int field a duration in seconds, between two durations that are both allowed."""
    least, most = parse_duration(low), parse_duration(high)

    def parse(value: object) -> int:
        seconds = parse_duration(value)
        if not least <= seconds <= most:
            raise ValueError(f'must be between "{low}" and "{high}"')
        return seconds

    return (
        BeforeValidator(parse),
        PlainSerializer(format_duration, return_type=str),
        WithJsonSchema({"type": "string", "pattern": _DURATION}),
    )


def _check_name(value: str) -> str:
    if re.fullmatch(_NAME, value) is None:
        raise ValueError("must be 1 to 40 lower-case letters, digits and '-', with a letter first and no '-' last")
    return value


def check_s3_uri(value: str) -> str:
    """An s3://bucket/prefix that names one place and nothing else; ValueError says what to change."""
    if not value.startswith("s3://"):
        raise ValueError("must start with s3:// (the one kind of storage supported)")
    if len(value) > _URI_MAX:
        raise ValueError(f"must have at most {_URI_MAX} characters: shorten the prefix")
    bucket, _, prefix = value.removeprefix("s3://").partition("/")
    if "@" in bucket or ":" in bucket:
        raise ValueError(
            "must hold no credentials and no endpoint: write s3://bucket/prefix and give both to the worker "
            "and the hosts by their environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
        )
    if "?" in value or "#" in value:
        raise ValueError("must have no query and no fragment: remove everything from the '?' or '#' on")
    if re.fullmatch(_BUCKET, bucket) is None or ".." in bucket or _is_address(bucket):
        raise ValueError(
            "must name a bucket of 3 to 63 lower-case letters, digits, '.' and '-', as in s3://bucket/prefix"
        )
    if not prefix:
        raise ValueError("must name a prefix, as in s3://bucket/prefix: runs never own a whole bucket")
    segments = prefix.split("/")
    if "" in segments:
        raise ValueError("must have no empty part in the prefix: remove the doubled or trailing '/'")
    if "." in segments or ".." in segments:
        raise ValueError("must have no '.' or '..' part in the prefix: write the place itself")
    if any(re.fullmatch(_SEGMENT, segment) is None for segment in segments):
        raise ValueError(
            "must have only letters, digits, '.', '_', '=' and '-' in the prefix, at most 200 between two '/'"
        )
    return value


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _check_endpoint(value: str) -> str:
    remedy = "write https://host:port, or http://127.0.0.1:8265 for a loopback tunnel"
    if len(value) > _URI_MAX or re.search(r"[\s\x00-\x1f\x7f\\]", value):
        raise ValueError(f"is not an address: {remedy}")
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"is not an address: {remedy}") from None
    if "@" in value:
        raise ValueError("must hold no credentials: put the token in a file and name it in token_file")
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise ValueError(f"is not an address: {remedy}")
    if parts.query or parts.fragment or "?" in value or "#" in value or parts.path not in ("", "/"):
        raise ValueError(f"must be an address alone, without path, query or fragment: {remedy}")
    if parts.scheme == "http" and not _is_loopback(host):
        raise ValueError(f"must be https unless it is on loopback: {remedy}")
    return value.removesuffix("/")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _check_path(value: str) -> str:
    if not value or len(value) > _PATH_MAX or _CONTROL.search(value):
        raise ValueError(f"must be a path of 1 to {_PATH_MAX} printable characters")
    if "://" in value:
        raise ValueError("must be a path on the worker's machine, not an address")
    if value.startswith("~"):
        raise ValueError("must be spelled out: '~' is another directory for another worker")
    if ".." in value.split("/"):
        raise ValueError("must have no '..' part: write the path itself")
    return value


def _check_absolute_path(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError("must be an absolute path on the worker's machine, such as /run/secrets/ray-token")
    return _check_path(value)


def parse_entrypoint(value: object) -> tuple[str, ...]:
    """The argument list of an entrypoint given as a list, or as one line without shell syntax."""
    if isinstance(value, str):
        if _SHELL_SYNTAX.search(value):
            raise ValueError('must be free of shell syntax; for a shell, say so as a list: ["bash", "-c", "..."]')
        try:
            value = shlex.split(value)
        except ValueError:
            raise ValueError("has a quotation that does not end; or give a list of arguments") from None
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) for part in value):
        raise ValueError('must be a list of arguments, such as ["python", "train.py"], or one line of text')
    arguments: tuple[str, ...] = tuple(value)
    if not arguments or not arguments[0]:
        raise ValueError('must name a program, such as ["python", "train.py"]')
    if len(arguments) > _ARGUMENTS_MAX or sum(map(len, arguments)) > _COMMAND_MAX:
        raise ValueError(f"must have at most {_ARGUMENTS_MAX} arguments and {_COMMAND_MAX} characters")
    if any("\x00" in part for part in arguments):
        raise ValueError("must have no NUL character")
    if any(_CREDENTIALS.search(part) for part in arguments):
        raise ValueError("must hold no credentials, for everybody who sees the job sees them: use the environment")
    return arguments


def _pattern(pattern: str, remedy: str) -> AfterValidator:
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if compiled.fullmatch(value) is None:
            raise ValueError(remedy)
        return value

    return AfterValidator(check)


# The patterns are also in the JSON Schema; the validators come first so that a person reads a sentence.
Name = Annotated[str, AfterValidator(_check_name), WithJsonSchema({"type": "string", "pattern": _NAME})]
S3Uri = Annotated[
    str,
    AfterValidator(check_s3_uri),
    WithJsonSchema({"type": "string", "pattern": _S3_URI, "maxLength": _URI_MAX}),
]
Endpoint = Annotated[
    str,
    AfterValidator(_check_endpoint),
    WithJsonSchema({"type": "string", "pattern": r"^https?://[^\s/?#@\\]+/?$", "maxLength": _URI_MAX}),
]
DirectoryPath = Annotated[
    str,
    AfterValidator(_check_path),
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": _PATH_MAX}),
]
AbsolutePath = Annotated[
    str,
    AfterValidator(_check_absolute_path),
    WithJsonSchema({"type": "string", "pattern": "^/", "maxLength": _PATH_MAX}),
]
Entrypoint = Annotated[
    tuple[str, ...],
    BeforeValidator(parse_entrypoint),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": _ARGUMENTS_MAX},
                {"type": "string", "minLength": 1, "maxLength": _COMMAND_MAX},
            ]
        }
    ),
]
Image = Annotated[
    str,
    Field(max_length=_URI_MAX),
    _pattern(
        _IMAGE,
        "must be pinned by digest, docker:<repository>@sha256:<64 hexadecimal digits>, for a tag can change "
        "under a run (`docker buildx imagetools inspect <image>` prints the digest)",
    ),
    WithJsonSchema({"type": "string", "pattern": _IMAGE, "maxLength": _URI_MAX}),
]
Infra = Annotated[
    str,
    _pattern(_INFRA, 'must be a place as SkyPilot names it, such as "slurm/cluster" or "nebius"'),
    WithJsonSchema({"type": "string", "pattern": _INFRA}),
]
Accelerators = Annotated[
    str,
    _pattern(
        _ACCELERATORS,
        'must be one accelerator a host, such as "B200:1": each host runs one training worker with one GPU',
    ),
    WithJsonSchema({"type": "string", "pattern": _ACCELERATORS}),
]
Amount = Annotated[
    str,
    _pattern(_AMOUNT, 'must be text with a whole number, such as "16", or "16+" for that many or more'),
    WithJsonSchema({"type": "string", "pattern": _AMOUNT}),
]
