"""The client of the configured Temporal service."""

from __future__ import annotations

from temporalio.client import Client

from worker.settings import Settings, connection
from workflows.decoding import data_converter


class ConnectError(Exception):
    """The Temporal service does not answer; the message says which, and what to check."""


async def connect(settings: Settings) -> Client:
    """A client by profiles and TEMPORAL_* variables. Raises SettingsError, ConnectError."""
    try:
        return await Client.connect(**connection(), data_converter=data_converter)
    except RuntimeError as error:
        raise ConnectError(
            f"Temporal at {settings.temporal_address} (namespace {settings.temporal_namespace}) does not answer: "
            f"{error}. Check TEMPORAL_ADDRESS, TEMPORAL_TLS and TEMPORAL_API_KEY, or start the embedded stack: "
            "make stack, then . .lanyard/env"
        ) from None
