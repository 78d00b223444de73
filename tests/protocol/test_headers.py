"""Headers of requests and responses, in all their versions."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.request_header.v1.header import RequestHeader as KioHeaderV1
from kio.schema.request_header.v2.header import RequestHeader as KioHeaderV2
from kio.serial import entity_writer
from kio.static.primitive import i16, i32

from raftmq.errors import RemoteProtocolError
from raftmq.protocol import (
    ANNOUNCED,
    ApiKey,
    decode_request_header,
    decode_response,
    decode_response_header,
    encode_request_header,
    encode_response_header,
    encode_unsupported_api_versions,
    is_flexible,
)
from raftmq.protocol.wire import long_varint

APIS = st.sampled_from(list(ANNOUNCED))
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


@given(
    api=APIS,
    data=st.data(),
    correlation_id=INT32,
    client_id=st.none() | st.text(max_size=20),
    body=st.binary(max_size=10),
)
def test_request_headers_agree_with_kio(
    api: ApiKey, data: st.DataObject, correlation_id: int, client_id: str | None, body: bytes
) -> None:
    version = data.draw(st.integers(*ANNOUNCED[api]))
    header = encode_request_header(api, version, correlation_id, client_id)
    kio_class = KioHeaderV2 if is_flexible(api, version) else KioHeaderV1
    out = io.BytesIO()
    entity_writer(kio_class)(
        out,
        kio_class(
            request_api_key=i16(int(api)),
            request_api_version=i16(version),
            correlation_id=i32(correlation_id),
            client_id=client_id,
        ),
    )
    assert header == out.getvalue()
    decoded, position = decode_request_header(memoryview(bytearray(header + body)))
    assert position == len(header)
    assert decoded.api_key == api
    assert decoded.api_version == version
    assert decoded.correlation_id == correlation_id
    assert decoded.client_id == client_id


def test_unknown_tags_of_a_request_header_are_skipped() -> None:
    header = encode_request_header(ApiKey.METADATA, 12, 7, "c")
    tags = b"\x02\x00\x01x" + long_varint(300) + long_varint(150) + bytes(150)
    decoded, position = decode_request_header(header[:-1] + tags + b"body")
    assert decoded.correlation_id == 7
    assert position == len(header) - 1 + len(tags)


def test_headers_of_strangers_can_be_read() -> None:
    """A server has to read the header to say no; newest versions are taken to be flexible."""
    decoded, position = decode_request_header(encode_request_header(9999, 3, 1, None))
    assert (decoded.api_key, position) == (9999, 10)
    frame = encode_request_header(ApiKey.API_VERSIONS, 5, 1, "franz-go")
    decoded, position = decode_request_header(frame)
    assert (decoded.api_version, position) == (5, len(frame))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00\x03\x00\x0c\x00\x00\x00\x01",
        b"\x00\x03\x00\x0c\x00\x00\x00\x01\x00\x05abcd",
        b"\x00\x03\x00\x0c\x00\x00\x00\x01\x00\x02\xff\xfe\x00",
        b"\x00\x03\x00\x0c\x00\x00\x00\x01\xff\xff",
        b"\x00\x03\x00\x0c\x00\x00\x00\x01\xff\xff\x05",
        b"\x00\x03\x00\x0c\x00\x00\x00\x01\xff\xff\x01\x00\x7f",
        b"\x00\x03\x00\x0c\x00\x00\x00\x01\xff\xff\xff\xff\xff\xff\x0f" + bytes(9),
    ],
)
def test_malformed_request_headers(frame: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_request_header(frame)


@given(api=APIS, data=st.data(), correlation_id=INT32)
def test_response_headers_round_trip(api: ApiKey, data: st.DataObject, correlation_id: int) -> None:
    version = data.draw(st.integers(*ANNOUNCED[api]))
    header = encode_response_header(api, version, correlation_id)
    flexible = is_flexible(api, version) and api is not ApiKey.API_VERSIONS
    assert len(header) == (5 if flexible else 4)
    decoded = decode_response_header(api, version, header + b"body")
    assert decoded == (correlation_id, len(header))


def test_unknown_tags_of_a_response_header_are_skipped() -> None:
    frame = bytes(4) + b"\x01\x00\x02xx" + b"body"
    assert decode_response_header(ApiKey.METADATA, 12, frame) == (0, 9)
    with pytest.raises(RemoteProtocolError):
        decode_response_header(ApiKey.METADATA, 12, bytes(4))
    with pytest.raises(RemoteProtocolError):
        decode_response_header(ApiKey.METADATA, 1, bytes(3))


@pytest.mark.parametrize("version", range(5))
def test_api_versions_answers_have_the_oldest_header(version: int) -> None:
    """The client does not know yet which versions are understood."""
    assert encode_response_header(ApiKey.API_VERSIONS, version, 9) == (9).to_bytes(4, "big")
    assert decode_response_header(ApiKey.API_VERSIONS, version, bytes(4)) == (0, 4)


def test_an_api_versions_from_the_future_is_answered_in_version_0() -> None:
    """franz-go opens with v5; Kafka answers error 35 and the range, and is asked again."""
    frame = encode_unsupported_api_versions(77)
    correlation_id, position = decode_response_header(ApiKey.API_VERSIONS, 0, frame)
    answer = decode_response(ApiKey.API_VERSIONS, 0, frame[position:])
    assert correlation_id == 77
    assert answer.error_code == 35
    (only,) = answer.api_keys
    assert (only.api_key, only.min_version, only.max_version) == (18, 0, 4)
