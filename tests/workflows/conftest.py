"""One real server for all tests of the workflows: the dev server.

The older time-skipping server ignores parent close policies. The newer one honours them, but skips no time while an
activity runs, waits to be retried, or a child is open, which is always (tried with SDK 1.35, server 1.32).

`python -m pytest tests/workflows --record-histories` writes the histories that `test_replay.py` replays anew.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowHandle
from temporalio.common import RetryPolicy, SearchAttributeKey
from temporalio.testing import WorkflowEnvironment

from tests.workflows.server import Temporal
from tests.workflows.stand_ins import World
from worker.setup import SEARCH_ATTRIBUTES
from workflows import timeouts
from workflows.decoding import data_converter

HISTORIES = Path(__file__).parent / "histories"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-histories", action="store_true", help="write tests/workflows/histories anew")


@pytest.fixture(scope="session")
def impatient_retries() -> Iterator[None]:
    """Every retry policy as it is, but without its waits: what is tested is what is tried, and how often."""
    patch = pytest.MonkeyPatch()
    at_once = timedelta(milliseconds=20)
    for name, policy in vars(timeouts).items():
        if isinstance(policy, RetryPolicy):
            quick = dataclasses.replace(policy, initial_interval=at_once, maximum_interval=5 * at_once)
            patch.setattr(timeouts, name, quick)
    yield
    patch.undo()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def temporal(impatient_retries: None) -> AsyncIterator[Temporal]:
    environment = await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(Path(sys.executable).with_name("temporal")),
        dev_server_log_level="error",
        search_attributes=[SearchAttributeKey.for_keyword(name) for name in SEARCH_ATTRIBUTES],
    )
    async with environment, AsyncExitStack() as opened:
        # A client of its own: the environment's turns failed assertions into failed workflows, production does not.
        client = await Client.connect(
            environment.client.service_client.config.target_host, data_converter=data_converter, identity="test"
        )
        made = Temporal(client)
        for worker in made.others():
            await opened.enter_async_context(worker)
        await made.start_run_worker()
        opened.push_async_callback(made.stop_run_worker)
        yield made


@pytest.fixture
def world(temporal: Temporal, request: pytest.FixtureRequest) -> World:
    """A world of its own for one run."""
    told = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_")).strip("-")
    return temporal.stand_ins.world(told)


Keep = Callable[[WorkflowHandle[Any, Any], str], Coroutine[Any, Any, None]]


@pytest.fixture
def keep_history(pytestconfig: pytest.Config) -> Keep:
    """Writes a closed workflow's history below `histories/`, when the session records; otherwise nothing."""

    async def keep(handle: WorkflowHandle[Any, Any], name: str) -> None:
        if not pytestconfig.getoption("record_histories", default=False):
            return
        history = json.loads((await handle.fetch_history()).to_json())
        HISTORIES.mkdir(exist_ok=True)
        told = ",\n".join(json.dumps(without_traces(event), sort_keys=True) for event in history["events"])
        (HISTORIES / f"{name}.json").write_text(f'{{"events": [\n{told}\n]}}\n')

    return keep


def without_traces(value: Any) -> Any:
    """The history without stack traces: they name the machine's directories, and no replay reads them."""
    if isinstance(value, dict):
        return {key: without_traces(item) for key, item in value.items() if key != "stackTrace"}
    return [without_traces(item) for item in value] if isinstance(value, list) else value
