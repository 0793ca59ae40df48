"""How fast the light slice's operator lives: the same code with shorter constants, so that a scenario takes seconds.

Only durations are changed, and each only in the light slice; the real slice runs with the operator's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

LIGHT: Final[Mapping[str, Any]] = {
    "workflows.timeouts.HEARTBEAT": timedelta(seconds=5),
    "workflows.timeouts.RELEASE_AGAIN": timedelta(seconds=5),
    "workflows.custody.KEEPER_GRACE_S": 10.0,
    "activities.heartbeat.BEAT_S": 1.0,
    "activities.checkpoints.LOST_AFTER_S": 12.0,
    "activities.checkpoints.STATUS_EVERY_S": 1.0,
    "activities.keeper.LOOK_S": 2.0,
    "activities.hosts.local.SEND_WINDOW_S": 6.0,
    "activities.hosts.local.LONGEST_REQUEST_S": 6.0,
    "activities.hosts.local.PATIENCE_S": 10.0,
    "activities.hosts.local.KILL_LIMIT_S": 4.0,
    "activities.submission.SEND_WINDOW_S": 6.0,
    "activities.submission.REQUEST_S": 4.0,
    "activities.jobs.REQUEST_S": 4.0,
    "activities.drill.HELPER_S": 20.0,
    "activities.releasing.REMAINS_S": 6.0,
}
"""By full name."""
HEARTBEAT_S: Final = {"light": 5.0, "real": 30.0}
"""After this a silent activity is given to another worker."""
STICKY: Final = timedelta(seconds=1)
"""How long a workflow task waits for the worker that has the run in its cache (the SDK's own: 10 s)."""


def current(name: str) -> Any:
    """The constant's value now. Raises AttributeError for one that is gone."""
    module, _, constant = name.rpartition(".")
    return getattr(importlib.import_module(module), constant)


def live_fast() -> None:
    """Set every constant of LIGHT in this process."""
    for name, value in LIGHT.items():
        module, _, constant = name.rpartition(".")
        if not hasattr(importlib.import_module(module), constant):
            raise AttributeError(f"{name} is gone: correct tests/chaos/tempo.py")
        setattr(importlib.import_module(module), constant, value)
