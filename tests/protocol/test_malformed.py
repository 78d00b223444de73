"""Bytes from outside can only ever raise RemoteProtocolError, and cost memory of their own size."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.errors import RemoteProtocolError
from raftmq.protocol import (
    ANNOUNCED,
    ApiKey,
    decode_request,
    decode_request_header,
    decode_response,
    decode_response_header,
    encode_request,
)
from raftmq.protocol.fetch import decode_fetch_request
from raftmq.protocol.produce import decode_produce_request
from raftmq.protocol.wire import long_varint, read_varint
from tests.protocol.fuzz_frames import (
    every_version,
    good_body,
    malformed_bodies,
    malformed_requests,
)

VERSIONS = [pytest.param(*each, id=f"{each[0].title}-v{each[1]}") for each in every_version()]
BY_HAND: dict[int, Callable[..., Any]] = {
    ApiKey.PRODUCE: decode_produce_request,
    ApiKey.FETCH: decode_fetch_request,
}


def refuses_or_reads(decode: Callable[[], Any]) -> bool:
    """True if read; any exception other than RemoteProtocolError comes through."""
    try:
        decode()
    except RemoteProtocolError:
        return False
    return True


@pytest.mark.parametrize(("api", "version"), VERSIONS)
def test_spoiled_bodies_never_do_worse_than_refuse(api: ApiKey, version: int) -> None:
    refused = 0
    for body in malformed_bodies(api, version, "request"):
        refused += not refuses_or_reads(partial(decode_request, api, version, body))
        if api in BY_HAND:
            refuses_or_reads(partial(BY_HAND[api], version, body))
    for body in malformed_bodies(api, version, "response"):
        refused += not refuses_or_reads(partial(decode_response, api, version, body))
    assert refused > 0


@pytest.mark.parametrize(("api", "version"), VERSIONS)
def test_a_body_that_is_cut_off_is_refused(api: ApiKey, version: int) -> None:
    """Every proper prefix: no field has been made up for bytes that never came."""
    body = good_body(api, version, "request", 7)
    stops = range(len(body))
    if len(body) > 60:
        stops = sorted(Random(1).sample(stops, 60))  # type: ignore[assignment]
    for stop in stops:
        with pytest.raises(RemoteProtocolError):
            decode_request(api, version, body[:stop])
        if api in BY_HAND:
            with pytest.raises(RemoteProtocolError):
                BY_HAND[api](version, body[:stop])


@pytest.mark.parametrize(("api", "version"), VERSIONS)
def test_spoiled_frames_never_do_worse_than_refuse(api: ApiKey, version: int) -> None:
    """As a server reads them: the header first."""

    def serve(frame: bytes) -> None:
        header, position = decode_request_header(memoryview(frame))
        decode_request(header.api_key, header.api_version, memoryview(frame)[position:])

    for frame in malformed_requests(api, version, seed=1, variants=4):
        refuses_or_reads(partial(serve, frame))


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=200), data=st.data())
def test_rubbish_never_does_worse_than_be_refused(body: bytes, data: st.DataObject) -> None:
    api = data.draw(st.sampled_from(list(ANNOUNCED)))
    version = data.draw(st.integers(*ANNOUNCED[api]))
    refuses_or_reads(lambda: decode_request(api, version, body))
    refuses_or_reads(lambda: decode_response(api, version, body))
    refuses_or_reads(lambda: decode_produce_request(version, body))
    refuses_or_reads(lambda: decode_fetch_request(version, body))
    refuses_or_reads(lambda: decode_request_header(body))
    refuses_or_reads(lambda: decode_response_header(api, version, body))


def peak_of(decode: Callable[[], Any]) -> int:
    """The most bytes that were allocated at once, the least of three times.

    Threads of the test run's own are counted with it; what the decoding
    itself allocates comes every time.
    """

    def once() -> int:
        tracemalloc.start()
        try:
            refuses_or_reads(decode)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return min(once() for _ in range(3))


SLACK = 64 << 10
"""For the exception, its traceback and what a handful of small objects take."""


@pytest.mark.parametrize("api", list(ANNOUNCED), ids=lambda api: api.title)
def test_lying_lengths_allocate_nothing(api: ApiKey) -> None:
    version = ANNOUNCED[api][1]
    for body in malformed_bodies(api, version, "request", variants=2):
        decode_request_of(api, version, body)  # compiled before it is measured
        break
    for body in malformed_bodies(api, version, "request", seed=3, variants=6):
        peak = peak_of(partial(decode_request, api, version, body))
        assert peak <= 4 * len(body) + SLACK, body.hex()
        if api in BY_HAND:
            peak = peak_of(partial(BY_HAND[api], version, body))
            assert peak <= 4 * len(body) + SLACK, body.hex()


def decode_request_of(api: ApiKey, version: int, body: bytes) -> None:
    with suppress(RemoteProtocolError):
        decode_request(api, version, body)


BOMBS = {
    "strings": b"\x00" + long_varint((1 << 20) + 1),
    "arrays": long_varint((1 << 20) + 1),
    "int32 count": (1 << 20).to_bytes(4, "big"),
}


@pytest.mark.parametrize("version", [8, 12])
@pytest.mark.parametrize("kind", BOMBS)
def test_many_tiny_elements_are_refused_before_they_are_made(kind: str, version: int) -> None:
    """A megabyte of nothing claims a million topics: the limit of elements is what stops it."""
    body = BOMBS[kind] + bytes(1 << 20)
    decode_request_of(ApiKey.METADATA, version, body)
    peak = peak_of(lambda: decode_request(ApiKey.METADATA, version, body))
    assert peak <= 4 * len(body) + SLACK


def test_bodies_with_too_many_elements_are_refused() -> None:
    topics = [{"name": f"t{number}"} for number in range(11)]
    body = encode_request(ApiKey.METADATA, 12, {"topics": topics})
    assert len(decode_request(ApiKey.METADATA, 12, body, elements_max=11).topics) == 11
    with pytest.raises(RemoteProtocolError, match="too many array elements"):
        decode_request(ApiKey.METADATA, 12, body, elements_max=10)


def test_elements_are_counted_over_all_arrays() -> None:
    topics = [{"name": "t", "partitions": [{"partition_index": n} for n in range(5)]}] * 4
    body = encode_request(ApiKey.LIST_OFFSETS, 7, {"topics": topics})
    decode_request(ApiKey.LIST_OFFSETS, 7, body, elements_max=24)
    with pytest.raises(RemoteProtocolError, match="too many"):
        decode_request(ApiKey.LIST_OFFSETS, 7, body, elements_max=23)


def test_the_body_that_aborts_a_native_reader() -> None:
    body = b"\xff\xff\xff\xff\x0f" + bytes(20)
    with pytest.raises(RemoteProtocolError, match="Metadata v9 request: a field claims"):
        decode_request(ApiKey.METADATA, 9, body)


@pytest.mark.parametrize(
    ("api", "version", "body"),
    [
        (ApiKey.FIND_COORDINATOR, 0, b"\xff\xff"),
        (ApiKey.FIND_COORDINATOR, 3, b"\x00\x00\x00"),
        (ApiKey.DELETE_GROUPS, 0, b"\xff\xff\xff\xff"),
        (ApiKey.DELETE_GROUPS, 2, b"\x00\x00"),
    ],
)
def test_null_where_null_is_not_allowed(api: ApiKey, version: int, body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="impossible length -1"):
        decode_request(api, version, body)


@pytest.mark.parametrize("version", [0, 3])
def test_text_that_is_not_utf8(version: int) -> None:
    body = (b"\x00\x02" if version == 0 else b"\x03") + b"\xff\xfe" + b"\x00\x00"
    with pytest.raises(RemoteProtocolError, match="utf-8"):
        decode_request(ApiKey.FIND_COORDINATOR, version, body)


def test_varints_of_more_than_32_bits() -> None:
    for raw in (b"\xff\xff\xff\xff\xff\x01", b"\xff\xff\xff\xff\x1f"):
        with pytest.raises(RemoteProtocolError, match="varint"):
            read_varint(raw, 1, raw[0])
    assert read_varint(b"\xff\xff\xff\xff\x0f", 1, 0xFF) == (0xFFFFFFFF, 5)
