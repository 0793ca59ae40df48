"""The data converter of the worker and its clients: what it cannot decode, it tells instead of raising.

An exception while the inputs of a workflow are decoded fails the workflow *task*, which the server retries
for ever. A payload without a type hint that does not decode therefore becomes an `Undecodable` value, and the
workflow refuses it with a sentence. Values with a type hint decode, and fail, exactly as with
`pydantic_data_converter`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from pydantic import ValidationError
from temporalio.api.common.v1 import Payload
from temporalio.api.sdk.v1.external_storage_pb2 import ExternalStorageReference
from temporalio.contrib.pydantic import PydanticPayloadConverter
from temporalio.converter import DataConverter

from workflows.spec import Undecodable

# What a handler may declare for "whatever was sent": decoded as if nothing were declared.
_UNTYPED = (Any, object)
_REFERENCE = ExternalStorageReference.DESCRIPTOR.full_name.encode()


class OpenPayloadConverter(PydanticPayloadConverter):
    """Pydantic's converter, which turns an untyped payload that does not decode into `Undecodable`."""

    def from_payloads(self, payloads: Sequence[Payload], type_hints: list[type] | None = None) -> list[Any]:
        """The values of the payloads, one each. Raises only for a payload that has a type hint."""
        return [self._value(payload, hint) for payload, hint in zip_longest(payloads, type_hints or [])]

    def _value(self, payload: Payload, hint: type | None) -> Any:
        if hint is not None and hint not in _UNTYPED:
            return super().from_payloads([payload], [hint])[0]
        encoding = payload.metadata.get("encoding", b"")
        name = encoding.decode("utf-8", "replace") or "none"
        if encoding not in self.converters:
            return Undecodable(name, "this encoding is not known here")
        if payload.metadata.get("messageType") == _REFERENCE:
            return Undecodable(name, "it is a reference to external storage, which is not used here")
        try:
            value = super().from_payloads([payload])[0]
            if encoding == b"json/plain":
                json.loads(payload.data, object_pairs_hook=_without_duplicates)
        except Exception as error:  # whatever a converter raises, the task must not fail for it
            return Undecodable(name, _reason(error))
        return value


class _Duplicate(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> None:
    # The JSON parsers keep the last of two equal names and say nothing: the first would be lost silently.
    if len({name for name, _ in pairs}) != len(pairs):
        raise _Duplicate


def _reason(error: Exception) -> str:
    """Why it did not decode, without a byte of the data: messages of parsers quote what they read."""
    if isinstance(error, _Duplicate):
        return "an object has the same field twice"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, ValidationError):
        [first, *_] = error.errors(include_url=False, include_input=False)
        return first["msg"] if first["type"] == "json_invalid" else "it is not valid JSON"
    return "its bytes are not what its encoding says"


class OpenDataConverter(DataConverter):
    """Leaves references to external storage undecoded where none is configured.

    The SDK (1.35) raises for them before a payload converter is asked, again in the workflow task. These two
    methods of its own are the only place to say otherwise; a test holds them to the pinned version.
    """

    async def _decode_reference_payload_sequence(self, payloads: Sequence[Payload]) -> list[Payload]:
        if self.external_storage is None:
            return list(payloads)
        return await super()._decode_reference_payload_sequence(payloads)

    async def _external_retrieve_payload_sequence(self, payloads: Sequence[Payload]) -> list[Payload]:
        if self.external_storage is None:
            return list(payloads)
        return await super()._external_retrieve_payload_sequence(payloads)


data_converter = OpenDataConverter(payload_converter_class=OpenPayloadConverter)
