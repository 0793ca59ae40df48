"""LANYARD_HOME: where the embedded stack keeps its state, and the private things it generates once."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from worker.settings import SECRET_BYTES, SettingsError, read_private_file

_LOG_LIMIT: Final = 20_000_000
"""Bytes after which a log is moved aside at the next start."""

_Model = TypeVar("_Model", bound=BaseModel)


class Credentials(BaseModel):
    """The embedded S3 server's own credentials; its printed form shows neither."""

    model_config = ConfigDict(frozen=True)

    access_key: SecretStr
    secret_key: SecretStr


class Home:
    """The paths under LANYARD_HOME, and what is generated there once and kept: the deployment id, the deployment
    secret, the S3 credentials. All of it is private to this user."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lock = root / "stack.lock"
        self.guests = root / "guests.lock"
        self.record = root / "stack.json"
        self.env = root / "env"
        self.profiles = root / "temporal.toml"
        self.temporal = root / "temporal"
        self.s3 = root / "s3"
        self.logs = root / "logs"
        self.reports = root / "reports"

    def prepare(self) -> None:
        """Make the directories, or check them. Raises SettingsError."""
        try:
            for path in (self.root, self.temporal, self.s3, self.logs, self.reports):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.root.stat()
            if facts.st_uid != os.geteuid():
                raise SettingsError(
                    f"LANYARD_HOME {self.root} belongs to user id {facts.st_uid}, this process runs as "
                    f"{os.geteuid()}. Set LANYARD_HOME to a directory of your own."
                )
            self.root.chmod(0o700)
        except OSError as error:
            raise SettingsError(
                f"LANYARD_HOME {self.root} cannot be used: {error.strerror}. "
                "Set LANYARD_HOME to a directory that you can write to."
            ) from None

    def log(self, name: str) -> Path:
        """The log of one service."""
        return self.logs / f"{name}.log"

    def open_log(self, name: str) -> int:
        """A descriptor to append to that log with; a large old log is moved to `<name>.log.1` first."""
        path = self.log(name)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size > _LOG_LIMIT:
                path.replace(path.with_suffix(".log.1"))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def deployment(self) -> str:
        """This home's own deployment id: random, because two checkouts are two deployments."""
        path = self.root / "deployment"
        if not path.exists():
            write_private(path, f"local-{secrets.token_hex(4)}\n")
        return read_private_file(path, "the deployment id", range(1, 64)).decode().strip()

    def secret(self) -> Path:
        """The file of this home's own deployment secret."""
        path = self.root / "secret"
        if not path.exists():
            write_private(path, secrets.token_urlsafe(48) + "\n")
        read_private_file(path, "the deployment secret", SECRET_BYTES)
        return path

    def credentials(self) -> Credentials:
        """The embedded S3 server's credentials."""
        path = self.s3 / "credentials.json"
        if not path.exists():
            fresh = {"access_key": secrets.token_hex(10), "secret_key": secrets.token_hex(20)}
            write_private(path, json.dumps(fresh))
        return _parse(Credentials, path, read_private_file(path, "the S3 credentials", range(1, 4096)))


def write_private(path: Path, content: str) -> None:
    """Replace `path` by `content`, mode 0600, in one step: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _parse(model: type[_Model], path: Path, content: bytes) -> _Model:
    try:
        return model.model_validate_json(content)
    except ValidationError:
        raise SettingsError(f"{path} is damaged. Move it away; `make stack` makes a new one.") from None
