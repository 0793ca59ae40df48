"""What a hosts provider must do: create or adopt hosts, prove them, reach their Jobs API, release them exactly.

Every method is synchronous and may block for as long as its provider does; it is called in a thread and says how it
goes through `progress`, which raises when the activity was cancelled. Every mutation may be sent twice, also at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from activities.jobs import Endpoint
from workflows.evidence import Claim, Hosts, HostsOrder, Inventory, StepTaken

Progress = Callable[[str], None]
"""Says what is going on (a heartbeat). Raises when the activity was cancelled."""

MaySend = Callable[[], None]
"""Raises once the send deadline of the claim has passed. Called right before each request that creates something."""


class HostsError(Exception):
    """A provider could not do what was asked. The message says what to do."""


class HostsNotReady(HostsError):
    """Not all hosts are up and proved yet; asking again may help. The message says what is missing."""


class HostsFailed(HostsError):
    """Hosts will not come up, or one of them has ended. Asking again does not help."""


class WrongContext(HostsError):
    """The claim was made somewhere else; absence here would prove nothing (skypilot #2397)."""


class AbsenceUnknown(HostsError):
    """It cannot be told whether something is left. Unknown is not absent."""


@dataclass(frozen=True)
class Offer:
    """What an order comes to."""

    text: str
    """For people: how many hosts, of what, where."""
    price_per_hour: float = 0.0
    """US dollars, of all hosts together."""


class HostsProvider(Protocol):
    """One way to get hosts. Implementations: `activities.hosts.local`, `activities.hosts.existing`."""

    name: str

    def context(self, order: HostsOrder) -> str:
        """Where the names of this order's claims mean something; part of every claim, compared again at release."""
        ...

    def check(self, order: HostsOrder) -> list[str]:
        """Everything that can be found wrong before anything is paid for; one clear message each."""
        ...

    def offer(self, order: HostsOrder) -> Offer:
        """What would be created, and its price. Asked after `check` found nothing wrong; creates nothing. Raises
        HostsError."""
        ...

    def claims(self, order: HostsOrder) -> list[Claim]:
        """What `launch` will touch, in the order in which it is touched; released in reverse."""
        ...

    def launch(self, order: HostsOrder, may_send: MaySend, progress: Progress) -> None:
        """Create or adopt every host by its exact name. Safe to call again, also concurrently.

        Raises HostsFailed when a host has ended or cannot be started, and whatever `may_send` and `progress` raise.
        """
        ...

    def prove(self, order: HostsOrder, progress: Progress) -> Hosts:
        """One look: all hosts are up, each proved itself, the count is right. Raises HostsNotReady or HostsFailed."""
        ...

    def endpoint(self, order: HostsOrder) -> AbstractContextManager[Endpoint]:
        """The head's Jobs API, for as long as the context lasts. Raises HostsError when it cannot be reached."""
        ...

    def release(self, claim: Claim, order: HostsOrder, progress: Progress) -> StepTaken:
        """End exactly what `claim` names. Safe to call again. `ok` is False where something withstood."""
        ...

    def remaining(self, claim: Claim, order: HostsOrder) -> list[str]:
        """What of `claim` is still there, exactly; an empty list proves absence at this moment.

        Raises WrongContext or AbsenceUnknown when it cannot be told.
        """
        ...

    def inventory(self, limit: int) -> Inventory:
        """Everything there is now, half-made and half-released things included, with the mark that each carries; at
        most `limit` of a kind. What was released whole is left out. Changes nothing.

        Everything that `launch` creates carries a `Mark`, written before anything that costs or runs. Raises
        AbsenceUnknown when nothing can be told.
        """
        ...
