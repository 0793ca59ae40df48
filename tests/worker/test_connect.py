"""Connecting, and serving metrics where a variable says so."""

from __future__ import annotations

import asyncio
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
from temporalio.testing import WorkflowEnvironment

from worker.connect import connect
from worker.settings import Settings, SettingsError


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def metrics_at(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


async def test_a_worker_serves_metrics_only_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(Path(sys.executable).with_name("temporal")), dev_server_log_level="error"
    ) as environment:
        monkeypatch.setenv("TEMPORAL_ADDRESS", environment.client.service_client.config.target_host)
        monkeypatch.setenv("LANYARD_METRICS_ADDRESS", address)
        await connect(Settings.load())
        with pytest.raises(OSError, match="refused"):
            await asyncio.to_thread(metrics_at, address)
        client = await connect(Settings.load(), metrics=True)
        await client.count_workflows()
        assert "temporal_request" in await asyncio.to_thread(metrics_at, address)
        with pytest.raises(SettingsError, match=r"LANYARD_METRICS_ADDRESS .* cannot be served: .* in use"):
            await connect(Settings.load(), metrics=True)


@pytest.mark.parametrize("address", ["9464", ":9464", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:0", "127.0.0.1:70000"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(SettingsError, match=r"it must be address:port, 127\.0\.0\.1:9464 for example"):
        Settings.load({"LANYARD_METRICS_ADDRESS": address})
