"""The client of the configured Temporal service."""

from __future__ import annotations

from temporalio.client import Client
from temporalio.runtime import PrometheusConfig, Runtime, TelemetryConfig

from worker.settings import Settings, SettingsError, connection
from workflows.decoding import data_converter


class ConnectError(Exception):
    """The Temporal service does not answer; the message says which, and what to check."""


async def connect(settings: Settings, *, metrics: bool = False) -> Client:
    """A client by profiles and TEMPORAL_* variables; with ``metrics``, this process serves the SDK's and the program's
    own to Prometheus where LANYARD_METRICS_ADDRESS says. Raises SettingsError, ConnectError."""
    try:
        runtime = _serving_metrics(settings) if metrics else None
        return await Client.connect(**connection(), data_converter=data_converter, runtime=runtime)
    except RuntimeError as error:
        raise ConnectError(
            f"Temporal at {settings.temporal_address} (namespace {settings.temporal_namespace}) does not answer: "
            f"{error}. Check TEMPORAL_ADDRESS, TEMPORAL_TLS and TEMPORAL_API_KEY, or start the embedded stack: "
            "make stack, then . .lanyard/env"
        ) from None


def _serving_metrics(settings: Settings) -> Runtime | None:
    address = settings.metrics_address
    if address is None:
        return None
    try:
        return Runtime(telemetry=TelemetryConfig(metrics=PrometheusConfig(bind_address=address)))
    except (RuntimeError, ValueError) as error:
        raise SettingsError(
            f"LANYARD_METRICS_ADDRESS {address} cannot be served: {error}. Give a free address:port of this machine, "
            "127.0.0.1:9464 for example"
        ) from None
