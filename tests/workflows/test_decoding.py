"""The data converter: what arrives without a type never raises; what has a type behaves as pydantic's does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from temporalio.api.common.v1 import Payload
from temporalio.common import RawValue
from temporalio.converter import DataConverter

from workflows.decoding import data_converter
from workflows.spec import Limits, RunSpec, SpecError, Undecodable, parse_run

CANARY = "canary-4f1d0c2b9a77"
RUN: dict[str, Any] = {
    "name": "regression",
    "hosts": {"provider": "local"},
    "storage": {"uri": "s3://lanyard/runs"},
    "workload": {"kind": "regression"},
    "drill": {"after_step": 8},
    "resume": {"from": "s3://lanyard/runs/earlier"},
}
REFERENCE = b"temporal.api.sdk.v1.ExternalStorageReference"


def payload(data: bytes, **metadata: bytes) -> Payload:
    return Payload(metadata=metadata, data=data)


async def decoded(*payloads: Payload) -> list[Any]:
    """What workflow code that declares `*args` receives: every step of the worker's decoding, without type hints."""
    return await data_converter.decode(payloads)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (payload(b"{}"), "not known"),
        (payload(b"{}", encoding=b""), "not known"),
        (payload(b"x", encoding=b"binary/encrypted"), "not known"),
        (payload(b"x", encoding=b"\xff\xfe"), "not known"),
        (payload(b"x", encoding=b"json/external-storage-reference"), "not known"),
        (payload(b"{}", encoding=b"json/protobuf", messageType=REFERENCE), "external storage"),
        (payload(b"{}", encoding=b"json/protobuf"), "not what its encoding says"),
        (payload(b"{}", encoding=b"json/protobuf", messageType=b"\xff"), "not what its encoding says"),
        (payload(b"[", encoding=b"json/protobuf", messageType=b"temporal.api.common.v1.Payload"), "not what its"),
        (payload(b"\xff", encoding=b"binary/protobuf", messageType=b"temporal.api.common.v1.Payload"), "not what"),
        (payload(b"x", encoding=b"binary/null"), "not what its encoding says"),
        (payload(b"", encoding=b"json/plain"), "Invalid JSON"),
        (payload(b"{", encoding=b"json/plain"), "Invalid JSON"),
        (payload(b"{} {}", encoding=b"json/plain"), "Invalid JSON"),
        (payload(b"\xef\xbb\xbf{}", encoding=b"json/plain"), "Invalid JSON"),
        (payload(b'{"name":"\xff"}', encoding=b"json/plain"), "Invalid JSON"),
        (payload(b'{"name":"\\ud800"}', encoding=b"json/plain"), "Invalid JSON"),
        (payload(b"[" * 5_000 + b"]" * 5_000, encoding=b"json/plain"), "Invalid JSON: recursion limit"),
        (payload(b"9" * 10_000, encoding=b"json/plain"), "Invalid JSON: number out of range"),
        (payload(b'{"name":"a","name":"b"}', encoding=b"json/plain"), "the same field twice"),
        (payload(b'[{"a":{"b":1,"b":1}}]', encoding=b"json/plain"), "the same field twice"),
    ],
)
async def test_a_payload_that_does_not_decode_arrives_as_undecodable_and_is_refused(sent: Payload, why: str) -> None:
    [value] = await decoded(sent)
    assert isinstance(value, Undecodable)
    assert why in value.why
    with pytest.raises(SpecError, match="cannot be decoded"):
        parse_run((value,))


@given(st.binary(max_size=60), st.sampled_from([b"json/plain", b"json/protobuf", b"binary/protobuf", b"binary/null"]))
async def test_no_bytes_make_the_decoding_raise(data: bytes, encoding: bytes) -> None:
    [value] = await decoded(payload(data, encoding=encoding))
    with pytest.raises(SpecError):
        parse_run((value,))


@pytest.mark.parametrize(
    "sent",
    [
        payload(CANARY.encode(), encoding=b"json/plain"),
        payload(b'{"key":"' + CANARY.encode(), encoding=b"json/plain"),
        payload(f'{{"{CANARY}":1,"{CANARY}":2}}'.encode(), encoding=b"json/plain"),
        payload(CANARY.encode(), encoding=b"json/protobuf", messageType=b"temporal.api.common.v1.Payload"),
        payload(CANARY.encode(), encoding=b"other"),
    ],
)
async def test_what_did_not_decode_is_not_repeated(sent: Payload) -> None:
    [value] = await decoded(sent)
    assert isinstance(value, Undecodable)
    assert CANARY not in value.why


async def test_one_bad_input_does_not_hide_the_others() -> None:
    good = payload(json.dumps(RUN).encode(), encoding=b"json/plain")
    values = await decoded(good, payload(b"x", encoding=b"other"), good)
    assert [type(value) for value in values] == [dict, Undecodable, dict]


@pytest.mark.parametrize("hint", [Any, object])
async def test_a_handler_that_takes_anything_gets_what_does_not_decode(hint: Any) -> None:
    # An exception here would drop a signal: an abort that nobody hears.
    [value] = await data_converter.decode([payload(b"x", encoding=b"other")], [hint])
    assert isinstance(value, Undecodable)


async def test_inputs_without_faults_arrive_as_they_are() -> None:
    values = [None, True, 3, 0.5, "text", [1, {"a": None}], b"bytes", RUN]
    assert await data_converter.decode(await data_converter.encode(values)) == values


async def test_a_number_that_is_not_finite_is_left_to_whoever_reads_it() -> None:
    # Failure details carry losses, and a loss may be NaN: that must not make a verdict unreadable.
    [value] = await decoded(payload(b'{"loss":NaN}', encoding=b"json/plain"))
    assert value["loss"] != value["loss"]


async def test_models_cross_to_an_activity_and_back() -> None:
    spec = parse_run((RUN,))
    sent = await data_converter.encode([spec, spec.limits, [spec.limits]])
    assert await data_converter.decode(sent, [RunSpec, Limits, list[Limits]]) == [spec, spec.limits, [spec.limits]]


class Note(BaseModel):
    text: str


async def test_a_typed_value_that_does_not_fit_raises_as_pydantics_converter_does() -> None:
    with pytest.raises(ValidationError):
        await data_converter.decode([payload(b"{}", encoding=b"json/plain")], [Note])
    with pytest.raises(KeyError, match="Unknown payload encoding"):
        await data_converter.decode([payload(b"{}", encoding=b"other")], [Note])


async def test_a_raw_value_stays_raw() -> None:
    sent = payload(b"\xff", encoding=b"other")
    [value] = await data_converter.decode([sent], [RawValue])
    assert value.payload == sent


async def test_the_pinned_sdk_still_asks_the_methods_that_let_references_through() -> None:
    """The overrides are of the SDK's own methods: if it renames them, this says so before a run hangs."""
    reference = payload(b"{}", encoding=b"json/external-storage-reference")
    for name in ("_decode_reference_payload_sequence", "_external_retrieve_payload_sequence"):
        assert callable(getattr(DataConverter, name))
        assert await getattr(data_converter, name)([reference]) == [reference]
