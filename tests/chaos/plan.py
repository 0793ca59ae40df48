"""The one point at which the operator's worker is to be held, told through files: a plan, `reached`, `go`.

The controller writes the plan and waits for `reached`; the worker that comes to the point first writes it, and goes on
when it finds `go` (unless it was killed meanwhile). Whoever comes later goes on at once.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Final

HELD_AT_MOST_S: Final = 90.0
LOOK_S: Final = 0.02


class Plan:
    """Both sides of it. ``folder`` belongs to one lane."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "plan.json"

    # the controller's side

    def arm(self, name: str, point: dict[str, Any]) -> None:
        """Have the worker held at this point. ``name`` is new each time."""
        temporary = self._folder / ".plan.json"
        temporary.write_text(json.dumps({"name": name, **point}))
        temporary.replace(self._file)

    def disarm(self, name: str) -> None:
        """Nobody is held any more."""
        self._file.unlink(missing_ok=True)
        self.go(name)

    def reached(self, name: str) -> int | None:
        """The pid of the worker that is held there, None while nobody came."""
        try:
            text = (self._folder / f"{name}.reached").read_text()
        except FileNotFoundError:
            return None
        return int(text) if text else None

    def go(self, name: str) -> None:
        """Let it go on."""
        (self._folder / f"{name}.go").touch()

    # the worker's side

    def armed(self) -> dict[str, Any] | None:
        """The point, None where nobody waits for one."""
        try:
            told: dict[str, Any] = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return None
        return None if (self._folder / f"{told['name']}.reached").exists() else told

    def reach(self, name: str) -> bool:
        """Say that it is reached; False when another came before."""
        try:
            descriptor = os.open(self._folder / f"{name}.reached", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(str(os.getpid()))
        return True

    def may_go(self, name: str) -> bool:
        """Whether whoever is held may go on."""
        return (self._folder / f"{name}.go").exists()

    def hold(self, name: str) -> None:
        """Wait, blocking this thread."""
        deadline = time.monotonic() + HELD_AT_MOST_S
        while not self.may_go(name) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
