"""The mark in a run's directory on this machine: whose it is, and the order by which it is released."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from pydantic import ValidationError

from activities.hosts import AbsenceUnknown
from trainer.private import NotPrivate, read_private_file, write_private_file
from workflows.evidence import Mark
from workflows.names import custody_id

FILE = "mark.json"


def write_mark(directory: Path, mark: Mark) -> None:
    """The first writer's stays: whoever comes later comes for the same run."""
    if not os.path.lexists(directory / FILE):
        with contextlib.suppress(FileExistsError):
            write_private_file(directory / FILE, mark.model_dump_json(indent=1).encode(), exclusive=True)


def read_mark(directory: Path) -> Mark | None:
    """The mark, or None where there is none.

    Raises AbsenceUnknown for one that cannot be believed: not private, damaged, or made for a run of another name.
    """
    try:
        if not os.path.lexists(directory / FILE):
            return None
        mark = Mark.model_validate_json(read_private_file(directory / FILE, "the mark"))
    except ValidationError as error:
        raise AbsenceUnknown(f"{directory / FILE} is damaged: {error.errors()[0]['msg']}") from error
    except NotPrivate as error:
        raise AbsenceUnknown(str(error)) from error
    except OSError as error:
        raise AbsenceUnknown(f"{directory / FILE} cannot be read: {error}") from error
    identity = mark.hosts.identity
    if identity.run_key != directory.name or identity.custody_id != custody_id(directory.name):
        raise AbsenceUnknown(f"{directory / FILE} was made for run {identity.run_key}, not for this directory")
    return mark
