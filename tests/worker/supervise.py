"""`make stack` with the stand-in worker: `python tests/worker/supervise.py`, configured by LANYARD_HOME."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from worker.__main__ import leave
from worker.foreground import run_stack
from worker.output import outlive_readers
from worker.services import Addresses, Service, worker_service
from worker.settings import Settings
from worker.stack import StackError


def stand_in(environment: Mapping[str, str], addresses: Addresses) -> Service:
    """The real worker's service with another command."""
    command = (sys.executable, str(Path(__file__).with_name("stand_in.py")))
    return dataclasses.replace(worker_service(environment, addresses), command=command)


if __name__ == "__main__":
    outlive_readers()
    try:
        leave(asyncio.run(run_stack(Settings.load(), stand_in)))
    except StackError as error:
        print(f"error: {error}", file=sys.stderr)
        leave(1)
