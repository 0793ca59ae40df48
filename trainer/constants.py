"""Every setting of Ray and of the process that the training application depends on: its value and why.

Only the standard library is used: the hosting service imports this to set up ``ray start``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

COMMITS_KEPT: Final = 8
"""Commits kept in storage, the newest last: more than one, so that a damaged one does not strand the run."""

COLLECTIVE_TIMEOUT_S: Final = 600
"""Longest wait of one rank for another in a torch collective (torch's own default is 1800)."""

TRAIN_SETTINGS: Final[dict[str, str]] = {
    # This application is written for Train V2; its name space is chosen by this switch.
    "RAY_TRAIN_V2_ENABLED": "1",
    # The controller's poll. It notices a dead worker, takes a report and so commits a checkpoint only once an
    # interval; each report() waits for it. Ray's 2 s costs about 2 s a checkpoint and 1 s a recovery.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    # A worker that does not answer a poll for this long is dead. Ray's 600 s outlasts the operator's stall deadline.
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "180",
    # STRICT_SPREAD waits this long for a second host before a start counts as failed (Ray's default, said aloud).
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
    # A rank that waits for the others in report() gives up after this; Ray waits for ever.
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "900",
    # Destroying the process group blocks while a dead peer's sockets linger. Ray's 30 s would be lost at each recovery.
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",
    # A host's announced end (spot reclaim, drain) is noticed within this; Ray's 5 s.
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "5",
    # No usage report leaves the hosts.
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Set in the driver before Ray Train is imported; Ray carries the RAY_TRAIN_* ones to controller and workers."""


def apply_train_settings(environ: MutableMapping[str, str]) -> None:
    """Set every one of TRAIN_SETTINGS in ``environ``, over whatever is there: a run's behaviour is the code's."""
    environ.update(TRAIN_SETTINGS)
