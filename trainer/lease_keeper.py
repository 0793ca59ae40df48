"""``python -m trainer.lease_keeper -- CMD...``: CMD runs only while the run's lease is live and no tombstone stands.

This is the kill-cord of a job: it also ends where nobody hosts it for us. The keeper reads the lease and the tombstone
from the storage named in LANYARD_JOB every few seconds and counts on the boot clock. A storage outage shorter than the
lease stops nothing. CMD's own exit status is passed on; the keeper's own endings have statuses of their own.

CMD stays in the keeper's process group, which Ray kills as a whole when its job supervisor dies, and is tied to the
keeper's life by the kernel. It is ended by exact identity: pid and start time, its descendants included.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

from trainer import job, processes
from trainer.lease import LeaseWatch, Standing, boot_clock

# Outside the shell's, Python's and Ray's own statuses.
EXIT_USAGE: Final = 64
EXIT_NO_LEASE: Final = 81
EXIT_TOMBSTONE: Final = 82
EXIT_EXPIRED: Final = 83

FIRST_LEASE_S: Final = 60.0
"""The operator writes the first lease before it submits; this covers a storage hiccup, not a forgotten lease."""
LOOK_S: Final = 3.0
TICK_S: Final = 0.1
GRACE_S: Final = 10.0
"""From SIGTERM to SIGKILL."""
_PR_SET_PDEATHSIG: Final = 1


class Child:
    """The command, known by pid and start time, and whatever it started."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it. Raises OSError when it cannot be."""
        libc = ctypes.CDLL(None, use_errno=True)
        keeper = os.getpid()

        def tie() -> None:
            # A keeper that is killed outright takes its child along; one that died before this line did already.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != keeper:
                os._exit(EXIT_NO_LEASE)

        self._process = subprocess.Popen(list(command), preexec_fn=tie)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit status as a shell gives it (128 + signal), None while it runs."""
        status = self._process.poll()
        return None if status is None else status if status >= 0 else 128 - status

    def end(self, grace_s: float) -> int:
        """SIGTERM to it and its descendants, SIGKILL to what is left after ``grace_s`` seconds; returns its status."""
        # Listed before the child goes: its orphans would no longer be found below it.
        members = processes.descendants(self.pid)
        self._process.send_signal(signal.SIGTERM)
        for member in members:
            processes.send(member, signal.SIGTERM)
        ends = time.monotonic() + grace_s
        while time.monotonic() < ends and (self.poll() is None or _any_left(members)):
            time.sleep(TICK_S)
        members += processes.descendants(self.pid)
        if self.poll() is None:
            self._process.kill()
        for member in members:
            processes.send(member, signal.SIGKILL)
        self._process.wait()
        return self.poll() or 0


def main(arguments: Sequence[str]) -> int:
    """Wait for a live lease, run the command under it, return the exit status."""
    command = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not command:
        return _say(EXIT_USAGE, "usage: python -m trainer.lease_keeper -- COMMAND [ARGUMENT...]")
    # Arrow only where it is needed: the decision itself is plain Python.
    from trainer import storage

    try:
        root = job.storage_path("storage", job.storage_in(os.environ))[1]
        store = storage.filesystem(connect_timeout_s=3, request_timeout_s=5, attempts=storage.HASTY_ATTEMPTS)
    except (job.JobError, storage.StorageError) as error:
        return _say(EXIT_USAGE, f"not started: {error}")
    return keep(command, LeaseWatch(boot_clock, lambda: storage.observe_lease(store, root)))


def keep(
    command: Sequence[str],
    watch: LeaseWatch,
    *,
    first_lease_s: float = FIRST_LEASE_S,
    look_s: float = LOOK_S,
    grace_s: float = GRACE_S,
) -> int:
    """Run ``command`` under ``watch``; returns the exit status. Call it from the main thread."""
    asked_to_stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _setter(asked_to_stop))
    standing = watch.look()
    ends = time.monotonic() + first_lease_s
    while not standing.may_start and standing.state != "tombstoned" and time.monotonic() < ends:
        if asked_to_stop.wait(min(look_s, 1.0)):
            return _say(128 + signal.SIGTERM, "not started: stopped while waiting for a lease")
        standing = watch.look()
    if standing.state == "tombstoned":
        return _say(EXIT_TOMBSTONE, f"not started: {standing.detail}; start a new run (resume takes its last commit)")
    if not standing.may_start:
        reason = f"{standing.state}: {standing.detail}"
        return _say(EXIT_NO_LEASE, f"not started: no live lease ({reason}); is the operator up?")
    try:
        child = Child(command)
    except OSError as error:
        return _say(EXIT_USAGE, f"not started: {command[0]}: {error.strerror}")
    _look_on(watch, look_s)
    return _supervise(child, watch.standing, asked_to_stop, grace_s)


def _supervise(child: Child, standing: Callable[[], Standing], asked_to_stop: threading.Event, grace_s: float) -> int:
    while (status := child.poll()) is None:
        if asked_to_stop.wait(TICK_S):
            return _say(child.end(grace_s), "stopped as asked (SIGTERM passed on)")
        now = standing()
        if now.state == "tombstoned":
            child.end(grace_s)
            return _say(EXIT_TOMBSTONE, f"stopped: {now.detail}")
        if now.state != "live":
            child.end(grace_s)
            return _say(EXIT_EXPIRED, f"stopped: lease expired: {now.detail}; start again with resume to go on")
    return status


def _look_on(watch: LeaseWatch, look_s: float) -> None:
    """Keep looking from a thread of its own: storage that hangs must not delay an expiry."""

    def run() -> None:
        while True:
            time.sleep(look_s)
            watch.look()

    threading.Thread(target=run, name="lease", daemon=True).start()


def _setter(event: threading.Event) -> Callable[[int, FrameType | None], None]:
    return lambda _number, _frame: event.set()


def _any_left(members: Sequence[processes.Process]) -> bool:
    return any(processes.is_alive(member.pid, member.start_time) for member in members)


def _say(status: int, message: str) -> int:
    print(f"lease keeper: {message}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
