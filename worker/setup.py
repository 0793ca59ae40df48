"""What a Temporal namespace needs before Lanyard's runs look their best in it. Safe to repeat."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Final

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
    ScheduleUpdate,
    ScheduleUpdateInput,
)
from temporalio.service import RPCError, RPCStatusCode

from workflows.names import reaper_id
from workflows.timeouts import RUN_QUEUE

SEARCH_ATTRIBUTES: Final = (
    "LanyardPhase",
    "LanyardOutcome",
    "LanyardCleanup",
    "LanyardRunKey",
    "LanyardProvider",
    "LanyardStep",
)
"""All keywords. SQL visibility has room for 10 in a namespace, so six is what one application may take."""

REAPER_EVERY: Final = timedelta(minutes=5)
"""What nobody guards is found within this, and is released after a second look two minutes later."""
_NOT_PERMITTED: Final = (
    RPCStatusCode.PERMISSION_DENIED,
    RPCStatusCode.UNAUTHENTICATED,
    RPCStatusCode.UNIMPLEMENTED,
)

_KEYWORD: Final = IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD


class SetupError(Exception):
    """The namespace could not be prepared; the message says what to do by hand."""


async def setup(client: Client, deployment: str) -> AsyncIterator[str]:
    """Prepare the client's namespace for this deployment, and say what was done, a line each. Raises SetupError."""
    yield await _register_reaper(client, deployment)
    yield await _register_search_attributes(client)


async def _register_reaper(client: Client, deployment: str) -> str:
    """Create the reaper's schedule, or bring it up to date. When it runs, and whether it is paused, is a person's to
    change, and is kept. Where schedules are not permitted everything else works without."""
    name = reaper_id(deployment)
    here = f"schedule {name} in namespace {client.namespace}"
    wanted = Schedule(
        action=ScheduleActionStartWorkflow(
            "Reaper",
            {"deployment": deployment},
            id=name,
            task_queue=RUN_QUEUE,
            static_summary=f"finds what deployment {deployment} made and no custody guards",
        ),
        spec=ScheduleSpec(intervals=[ScheduleIntervalSpec(every=REAPER_EVERY)]),
        policy=SchedulePolicy(
            # Two at once would look at the same things twice; and where no worker is there, one waits, not hundreds.
            overlap=ScheduleOverlapPolicy.SKIP,
            # After an outage of Temporal the next look sees everything that the missed ones would have seen.
            catchup_window=timedelta(minutes=1),
        ),
    )

    def brought_up_to_date(found: ScheduleUpdateInput) -> ScheduleUpdate:
        there = found.description.schedule
        return ScheduleUpdate(Schedule(wanted.action, there.spec, wanted.policy, there.state))

    try:
        try:
            await client.create_schedule(name, wanted)
            return f"{here}: created, every {REAPER_EVERY.total_seconds() / 60:g} minutes"
        except ScheduleAlreadyRunningError:
            await client.get_schedule_handle(name).update(brought_up_to_date)
            return f"{here}: brought up to date; its times are kept"
    except RPCError as error:
        if error.status in _NOT_PERMITTED:
            return (
                f"{here}: not permitted ({error.status.name}: {error.message}). Runs go on without it, guarded by "
                "custody and lease; only what a lost custody leaves is not found. Have an operator run this setup"
            )
        raise SetupError(f"{here} could not be registered ({error.status.name}: {error.message}); try again") from error


async def _register_search_attributes(client: Client) -> str:
    namespace = client.namespace
    try:
        listed = await client.operator_service.list_search_attributes(ListSearchAttributesRequest(namespace=namespace))
    except RPCError as error:
        raise SetupError(_by_hand(namespace, "the search attributes cannot be listed", error)) from error
    known = {**listed.custom_attributes, **listed.system_attributes}
    wrong = [name for name in SEARCH_ATTRIBUTES if known.get(name, _KEYWORD) != _KEYWORD]
    if wrong:
        raise SetupError(
            f"in namespace {namespace}, {', '.join(wrong)} exist with another type than Keyword. Remove them "
            f"(temporal operator search-attribute remove --name {wrong[0]}) or use another namespace; "
            "until then runs go on without search attributes."
        )
    missing = [name for name in SEARCH_ATTRIBUTES if name not in known]
    if not missing:
        return f"search attributes in namespace {namespace}: all {len(SEARCH_ATTRIBUTES)} are there"
    try:
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(namespace=namespace, search_attributes=dict.fromkeys(missing, _KEYWORD))
        )
    except RPCError as error:
        if error.status != RPCStatusCode.ALREADY_EXISTS:  # another worker's setup came first
            raise SetupError(_by_hand(namespace, "search attributes cannot be added", error)) from error
    return f"search attributes in namespace {namespace}: added {', '.join(missing)}"


def _by_hand(namespace: str, what: str, error: RPCError) -> str:
    names = " ".join(f"--name {name} --type Keyword" for name in SEARCH_ATTRIBUTES)
    return (
        f"namespace {namespace}: {what} ({error.status.name}: {error.message}). If these credentials may not do "
        f"that, have an operator run: temporal operator search-attribute create --namespace {namespace} {names}. "
        "Runs go on without them; only the list view shows less."
    )
