"""One real server for all tests of the workflows: the dev server.

The older time-skipping server ignores parent close policies. The newer one honours them, but skips no time while an
activity runs, waits to be retried, or a child is open, which is always (tried with SDK 1.35, server 1.32).

`python -m pytest tests/workflows --record-histories` writes the histories that `test_replay.py` replays: new ones, and
those that a new patch changes. What a workflow commands may not change without a patch.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowHandle
from temporalio.common import RetryPolicy, SearchAttributeKey
from temporalio.testing import WorkflowEnvironment

from tests.workflows.fingerprints import change, fingerprint, patches
from tests.workflows.server import Temporal
from tests.workflows.stand_ins import World
from worker.setup import SEARCH_ATTRIBUTES
from workflows import timeouts
from workflows.decoding import data_converter

HISTORIES = Path(__file__).parent / "histories"
EARLIER = HISTORIES / "earlier"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-histories", action="store_true", help="write histories that are new or newly patched")


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


class Keep(Protocol):
    """`keep_history`, below."""

    async def __call__(self, handle: WorkflowHandle[Any, Any], name: str, *, races: bool = False) -> None: ...


@pytest.fixture
def keep_history(pytestconfig: pytest.Config) -> Keep:
    """Compares a closed workflow's commands with those of its recorded history: a change needs a patch.

    When the session records, a new history is written. One that has another patch takes the place of the old one,
    which is kept among the earlier ones; one with other commands and no other patch is refused. What is commanded is
    not compared where it depends on which of two comes first (``races``).
    """

    async def keep(handle: WorkflowHandle[Any, Any], name: str, *, races: bool = False) -> None:
        path = HISTORIES / f"{name}.json"
        events = [without_traces(event) for event in json.loads((await handle.fetch_history()).to_json())["events"]]
        told = recorded_events(path) if path.exists() else None
        if told is not None:
            patched = patches(events) != patches(told)
            changed = change(fingerprint(told), fingerprint(events))
            if not patched:
                assert races or not changed, (
                    f"{name}: other commands than recorded, and no patch: {changed}. Runs under way would not replay; "
                    "put the change behind workflow.patched() and record (--record-histories)"
                )
                return
            assert pytestconfig.getoption("record_histories", default=False), (
                f"{name}: a patch that its recorded history has not; record it (--record-histories), "
                "the earlier one is kept and replayed"
            )
            keep_earlier(path)
        elif not pytestconfig.getoption("record_histories", default=False):
            raise AssertionError(f"{name} has no recorded history; record it (--record-histories)")
        HISTORIES.mkdir(exist_ok=True)
        lines = ",\n".join(json.dumps(event, sort_keys=True) for event in events)
        path.write_text(f'{{"events": [\n{lines}\n]}}\n')

    return keep


def recorded_events(path: Path) -> list[dict[str, Any]]:
    """The events of a recorded history."""
    return list(json.loads(path.read_text())["events"])


def keep_earlier(path: Path) -> None:
    """Move a history to those of earlier versions, under a number of its own."""
    EARLIER.mkdir(exist_ok=True)
    number = 1 + sum(1 for _ in EARLIER.glob(f"{path.stem}.*.json"))
    path.rename(EARLIER / f"{path.stem}.{number}.json")


def without_traces(value: Any) -> Any:
    """The history without stack traces: they name the machine's directories, and no replay reads them."""
    if isinstance(value, dict):
        return {key: without_traces(item) for key, item in value.items() if key != "stackTrace"}
    return [without_traces(item) for item in value] if isinstance(value, list) else value
