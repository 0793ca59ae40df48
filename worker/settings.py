"""Every setting of the operator, in one place, each with its default and why.

All of them come from the environment, so that a worker is configured the same way under `make stack`,
systemd or Kubernetes. Secrets are named (a file, a variable), never held in a model that could be printed.

LANYARD_HOME (default `<checkout>/.lanyard`)
    State of the embedded stack, logs, downloaded reports. Per checkout, so that two checkouts never meet.
LANYARD_DEPLOYMENT (no default; the stack generates one)
    The mark on everything this deployment creates. It must outlive any machine, so it is explicit.
LANYARD_SECRET_FILE (no default; the stack generates one)
    The key of the per-run tokens. Every worker of a deployment needs the same, so it is named, not made.
LANYARD_METRICS_ADDRESS (no default: nothing is served)
    Where a worker serves its metrics to Prometheus. Figures only, but whoever reaches it can read them.
LANYARD_SKYPILOT_PYTHON (default `<checkout>/.venv-skypilot/bin/python`, which `make skypilot` builds)
    The interpreter of SkyPilot's own environment: its pins are not the operator's. Where there is none, a worker has
    no provider `skypilot`.
LANYARD_SKYPILOT_HOME (default `<LANYARD_HOME>/skypilot`)
    SkyPilot's home: what it calls ~/.sky, ~/.slurm and so on. Apart from the user's own, so that neither disturbs the
    other. A worker that takes over elsewhere needs the same infrastructure configured there.
LANYARD_SKYPILOT_ENVIRONMENTS (default: each host's own, built when it is missing)
    Where on the hosts application environments lie, for sites that keep one on a shared file system.
SKYPILOT_API_SERVER_ENDPOINT (default: a server of that home, on this machine, started when it is needed)
    A remote API server, by SkyPilot's own name for it.
SKYPILOT_API_SERVER_LOCAL_PORT (default: one that follows from the home)
    The local server's port, by SkyPilot's own name for it.
AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, ... (defaults as botocore has them)
    S3, for the worker and for the hosts.
TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, TEMPORAL_API_KEY, TEMPORAL_TLS_*, TEMPORAL_PROFILE, TEMPORAL_CONFIG_FILE
    Any Temporal service, as temporalio.envconfig and the temporal CLI read them (default localhost:7233, default).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field
from temporalio.envconfig import ClientConfig, ClientConnectConfig

CHECKOUT: Final = Path(__file__).resolve().parent.parent
"""The directory that holds workflows/, activities/, worker/ and trainer/."""

DEFAULT_TEMPORAL_ADDRESS: Final = "localhost:7233"
"""What the `temporal` CLI assumes too when nothing is configured."""
DEFAULT_NAMESPACE: Final = "default"

SECRET_BYTES: Final = range(32, 4097)
"""Sizes of a deployment secret that are accepted: at least 256 bits, at most what fits in one read."""

_DEPLOYMENT: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


class SettingsError(Exception):
    """A setting is missing or unusable; the message names it and says what to do."""


class ObjectStorage(BaseModel):
    """What the environment says about S3. Only that credentials are there, never what they are."""

    model_config = ConfigDict(frozen=True)

    endpoint_url: str | None
    """None means AWS itself."""
    region: str | None
    credentials: str
    """Where they come from: `environment`, `profile`, or `none` (then botocore's chain may still find a role)."""


class SkyPilotSettings(BaseModel):
    """Which SkyPilot this worker uses."""

    model_config = ConfigDict(frozen=True)

    python: Path
    home: Path
    environments: str
    """On the hosts; "" for each host's own."""
    endpoint: str | None = Field(repr=False)
    """None: a local server. May hold a password, so it is not shown."""
    port: int
    """The local server's; 0 for one that follows from the home."""


class Settings(BaseModel):
    """Settings of one worker process."""

    model_config = ConfigDict(frozen=True)

    home: Path
    deployment: str | None
    secret_file: Path | None
    metrics_address: str | None
    """`address:port` on which a worker serves Prometheus; None for none."""
    temporal_address: str
    temporal_namespace: str
    storage: ObjectStorage
    skypilot: SkyPilotSettings | None
    """None: this worker has no SkyPilot."""

    @classmethod
    def load(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings from `environment` (default: this process's).

        Raises SettingsError for a value that cannot be used. What only a running worker needs
        (`deployment`, `secret_file`) may be absent here; `require_deployment` and `read_secret` insist.
        """
        values = os.environ if environment is None else environment
        connection = _connection(values)
        return cls(
            home=_home(values),
            deployment=_deployment(values),
            secret_file=_path(values, "LANYARD_SECRET_FILE"),
            metrics_address=_metrics_address(values),
            temporal_address=connection["target_host"],
            temporal_namespace=connection["namespace"],
            storage=_storage(values),
            skypilot=_skypilot(values),
        )

    def require_deployment(self) -> str:
        """The deployment id; SettingsError where none is set."""
        if self.deployment is None:
            raise SettingsError(
                "LANYARD_DEPLOYMENT is not set. It marks everything this deployment creates, so choose one name "
                "(a-z, 0-9, '-', at most 32 characters) and give it to every worker: "
                "export LANYARD_DEPLOYMENT=team-a. `make stack` makes one by itself."
            )
        return self.deployment

    def read_secret(self) -> bytes:
        """The deployment secret's bytes, from a file that only its owner can read.

        Opened once without following a link and checked on the open file, so that what was checked is
        what is read. Raises SettingsError, which names the file and never its content.
        """
        if self.secret_file is None:
            raise SettingsError(
                "LANYARD_SECRET_FILE is not set. Every worker of a deployment needs the same secret: "
                "(umask 077; head -c 32 /dev/urandom | base64 > lanyard.secret), copy that file to each worker, "
                "export LANYARD_SECRET_FILE=/path/to/lanyard.secret. `make stack` makes one by itself."
            )
        return read_private_file(self.secret_file, "LANYARD_SECRET_FILE", SECRET_BYTES)


def connection(environment: Mapping[str, str] | None = None) -> ClientConnectConfig:
    """Keyword arguments for `temporalio.client.Client.connect`, from profiles and TEMPORAL_* variables.

    Holds the API key where one is set: pass it on, do not print it. Raises SettingsError.
    """
    return _connection(os.environ if environment is None else environment)


def read_private_file(path: Path, name: str, sizes: range) -> bytes:
    """Read `path`, refusing a link, another owner, group or world access, or a size outside `sizes` (bytes).

    `name` is what the message calls it. Raises SettingsError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SettingsError(f"{name}: {path} does not exist. Create it with mode 0600, or correct the path.") from None
    except OSError as error:
        if path.is_symlink():
            raise SettingsError(f"{name}: {path} is a symbolic link. Name the file itself.") from None
        raise SettingsError(f"{name}: {path} cannot be opened: {error.strerror}.") from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise SettingsError(f"{name}: {path} is not a regular file.")
        if facts.st_uid != os.geteuid():
            raise SettingsError(
                f"{name}: {path} belongs to user id {facts.st_uid}, this process runs as {os.geteuid()}. "
                f"Make a copy of your own: install -m 600 {path} ~/lanyard.secret"
            )
        if stat.S_IMODE(facts.st_mode) & 0o077:
            raise SettingsError(
                f"{name}: {path} can be read by others (mode {stat.S_IMODE(facts.st_mode):04o}). chmod 600 {path}"
            )
        content = os.read(descriptor, sizes.stop)
    finally:
        os.close(descriptor)
    if len(content) not in sizes:
        raise SettingsError(
            f"{name}: {path} must hold {sizes.start} to {sizes.stop - 1} bytes. "
            f"A good one: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
        )
    return content


def _home(values: Mapping[str, str]) -> Path:
    return _path(values, "LANYARD_HOME") or CHECKOUT / ".lanyard"


def _path(values: Mapping[str, str], name: str) -> Path | None:
    text = values.get(name, "")
    if not text:
        return None
    if "\0" in text or "\n" in text:
        raise SettingsError(f"{name} holds a line break or a zero byte; it must be a path.")
    return Path(os.path.abspath(os.path.expanduser(text)))


def _deployment(values: Mapping[str, str]) -> str | None:
    text = values.get("LANYARD_DEPLOYMENT", "")
    if not text:
        return None
    if not _DEPLOYMENT.fullmatch(text):
        raise SettingsError(
            f"LANYARD_DEPLOYMENT is {text!r}; it must be 1 to 32 characters of a-z, 0-9 and '-', "
            "and neither begin nor end with '-'."
        )
    return text


def _metrics_address(values: Mapping[str, str]) -> str | None:
    text = values.get("LANYARD_METRICS_ADDRESS", "")
    if not text:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SettingsError(
            f"LANYARD_METRICS_ADDRESS is {text!r}; it must be address:port, 127.0.0.1:9464 for example."
        )
    return text


def _connection(values: Mapping[str, str]) -> ClientConnectConfig:
    try:
        found = ClientConfig.load_client_connect_config(override_env_vars=dict(values))
    except Exception as error:
        raise SettingsError(
            f"The Temporal connection is not usable: {error}. Check TEMPORAL_PROFILE, TEMPORAL_CONFIG_FILE and "
            "the other TEMPORAL_* variables (`temporal config list` shows the profiles)."
        ) from None
    found.setdefault("target_host", DEFAULT_TEMPORAL_ADDRESS)
    found.setdefault("namespace", DEFAULT_NAMESPACE)
    return found


def _skypilot(values: Mapping[str, str]) -> SkyPilotSettings | None:
    named = _path(values, "LANYARD_SKYPILOT_PYTHON")
    python = named or CHECKOUT / ".venv-skypilot" / "bin" / "python"
    if not os.access(python, os.X_OK):
        if named is None:
            return None
        raise SettingsError(f"LANYARD_SKYPILOT_PYTHON: {python} cannot be run. Build it with `make skypilot`.")
    environments = values.get("LANYARD_SKYPILOT_ENVIRONMENTS", "")
    if environments and not re.fullmatch(r"/[A-Za-z0-9._/@+-]{1,1000}", environments):
        raise SettingsError("LANYARD_SKYPILOT_ENVIRONMENTS must be an absolute path on the hosts.")
    endpoint = values.get("SKYPILOT_API_SERVER_ENDPOINT") or None
    if endpoint and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
        raise SettingsError("SKYPILOT_API_SERVER_ENDPOINT must be an http:// or https:// address.")
    port = values.get("SKYPILOT_API_SERVER_LOCAL_PORT", "") or "0"
    if not port.isdigit() or int(port) > 65_535:
        raise SettingsError("SKYPILOT_API_SERVER_LOCAL_PORT must be a port number.")
    home = _path(values, "LANYARD_SKYPILOT_HOME") or _home(values) / "skypilot"
    return SkyPilotSettings(python=python, home=home, environments=environments, endpoint=endpoint, port=int(port))


def _storage(values: Mapping[str, str]) -> ObjectStorage:
    if values.get("AWS_ACCESS_KEY_ID") and values.get("AWS_SECRET_ACCESS_KEY"):
        credentials = "environment"
    else:
        credentials = "profile" if values.get("AWS_PROFILE") else "none"
    return ObjectStorage(
        endpoint_url=values.get("AWS_ENDPOINT_URL_S3") or values.get("AWS_ENDPOINT_URL") or None,
        region=values.get("AWS_REGION") or values.get("AWS_DEFAULT_REGION") or None,
        credentials=credentials,
    )
