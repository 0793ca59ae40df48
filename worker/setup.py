"""What a Temporal namespace needs before Lanyard's runs look their best in it. Safe to repeat."""

from __future__ import annotations

from typing import Final

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

SEARCH_ATTRIBUTES: Final = (
    "LanyardPhase",
    "LanyardOutcome",
    "LanyardCleanup",
    "LanyardRunKey",
    "LanyardProvider",
    "LanyardStep",
)
"""All keywords. SQL visibility has room for 10 in a namespace, so six is what one application may take."""

_KEYWORD: Final = IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD


class SetupError(Exception):
    """The namespace could not be prepared; the message says what to do by hand."""


async def setup(client: Client) -> list[str]:
    """Prepare the client's namespace and say what was done, a line each. Raises SetupError."""
    return await _register_search_attributes(client)


async def _register_search_attributes(client: Client) -> list[str]:
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
        return [f"search attributes in namespace {namespace}: all {len(SEARCH_ATTRIBUTES)} are there"]
    try:
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(namespace=namespace, search_attributes=dict.fromkeys(missing, _KEYWORD))
        )
    except RPCError as error:
        if error.status != RPCStatusCode.ALREADY_EXISTS:  # another worker's setup came first
            raise SetupError(_by_hand(namespace, "search attributes cannot be added", error)) from error
    return [f"search attributes in namespace {namespace}: added {', '.join(missing)}"]


def _by_hand(namespace: str, what: str, error: RPCError) -> str:
    names = " ".join(f"--name {name} --type Keyword" for name in SEARCH_ATTRIBUTES)
    return (
        f"namespace {namespace}: {what} ({error.status.name}: {error.message}). If these credentials may not do "
        f"that, have an operator run: temporal operator search-attribute create --namespace {namespace} {names}. "
        "Runs go on without them; only the list view shows less."
    )
