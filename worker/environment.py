"""The environment that makes a process, or a shell, a client of the embedded stack."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from worker.home import Credentials, Home
from worker.services import REGION, Addresses, bare_environment
from worker.settings import DEFAULT_NAMESPACE, Settings

_MISLEADING: Final = (
    *("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN", "AWS_ENDPOINT_URL_S3"),
    *("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"),
    *("TEMPORAL_API_KEY", "TEMPORAL_PROFILE", "TEMPORAL_TLS", "TEMPORAL_TLS_SERVER_NAME"),
    *("TEMPORAL_TLS_SERVER_CA_CERT_PATH", "TEMPORAL_TLS_SERVER_CA_CERT_DATA"),
    *("TEMPORAL_TLS_CLIENT_CERT_PATH", "TEMPORAL_TLS_CLIENT_CERT_DATA"),
    *("TEMPORAL_TLS_CLIENT_KEY_PATH", "TEMPORAL_TLS_CLIENT_KEY_DATA"),
    *("TEMPORAL_CODEC_ENDPOINT", "TEMPORAL_CODEC_AUTH", "TEMPORAL_ENV"),
)
"""What a shell set up for a cloud account may hold and what would send a client elsewhere, or make it speak TLS."""

_DIRECT: Final = "127.0.0.1,localhost"
"""Reached without a proxy."""


def client_variables(home: Home, addresses: Addresses, credentials: Credentials, settings: Settings) -> dict[str, str]:
    """What clients and workers of this stack need. Holds the embedded S3 server's credentials."""
    return {
        "TEMPORAL_ADDRESS": addresses.temporal,
        "TEMPORAL_NAMESPACE": DEFAULT_NAMESPACE,
        "TEMPORAL_CONFIG_FILE": str(home.profiles),
        "AWS_ENDPOINT_URL": addresses.s3,
        "AWS_ACCESS_KEY_ID": credentials.access_key.get_secret_value(),
        "AWS_SECRET_ACCESS_KEY": credentials.secret_key.get_secret_value(),
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        # This server answers the CRC trailers that newer clients send by default with errors.
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "LANYARD_HOME": str(home.root),
        "LANYARD_DEPLOYMENT": settings.deployment or home.deployment(),
        "LANYARD_SECRET_FILE": str(settings.secret_file or home.secret()),
    }


def worker_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the stack's worker: this process's, with other clients' settings left out."""
    ours = {name: value for name, value in os.environ.items() if name.startswith("LANYARD_")}
    environment = {**bare_environment(), **ours, **variables}
    environment["PATH"] = os.pathsep.join((_binaries(), environment.get("PATH", os.defpath)))
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(part for part in (_DIRECT, environment.get(name, "")) if part)
    return environment


def shell_file(variables: Mapping[str, str]) -> str:
    """The text of LANYARD_HOME/env, for sh, bash and zsh."""
    lines = [
        "# Written by `make stack` and removed when it stops: source it to be a client of the embedded stack.",
        "# It holds the embedded S3 server's own credentials, so it is private to you.",
        f"unset {' '.join(_MISLEADING)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        *(f'export {name}="{_DIRECT}${{{name}:+,${name}}}"' for name in ("NO_PROXY", "no_proxy")),
        f'export PATH={shlex.quote(_binaries())}"${{PATH:+:$PATH}}"',
    ]
    return "\n".join(lines) + "\n"


def profile_file(addresses: Addresses) -> str:
    """The text of LANYARD_HOME/temporal.toml: nothing of the user's own default profile applies here."""
    # A JSON string of these characters is a TOML string too.
    return (
        f"[profile.default]\naddress = {json.dumps(addresses.temporal)}\nnamespace = {json.dumps(DEFAULT_NAMESPACE)}\n"
    )


def _binaries() -> str:
    return str(Path(sys.executable).parent)
