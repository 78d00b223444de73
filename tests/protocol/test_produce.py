"""The hand-written Produce says what the compiled one (and so kio) says."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from raftmq.errors import ErrorCode, RemoteProtocolError
from raftmq.protocol import (
    ApiKey,
    Struct,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from raftmq.protocol.produce import (
    ProducePartition,
    ProducePartitionResponse,
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
    ProduceTopicResponse,
    RecordError,
    decode_produce_request,
    decode_produce_response,
    encode_produce_request,
    encode_produce_response,
)
from raftmq.protocol.wire import CurrentLeader, NodeEndpoint, current_leader_of, long_varint
from tests.protocol.messages import random_message

VERSIONS = range(3, 14)
SEEDS = range(25)


def request_of(struct: Struct) -> ProduceRequest:
    """The same request, from the compiled decoder's words."""
    return ProduceRequest(
        struct.transactional_id,
        struct.acks,
        struct.timeout,
        [
            ProduceTopic(
                topic.__dict__.get("name"),
                topic.__dict__.get("topic_id"),
                [ProducePartition(part.index, part.records) for part in topic.partition_data],
            )
            for topic in struct.topic_data
        ],
    )


def response_of(struct: Struct) -> ProduceResponse:
    """The same answer, from the compiled decoder's words."""

    def part_of(part: Any) -> ProducePartitionResponse:
        get = part.__dict__.get
        return ProducePartitionResponse(
            part.index,
            part.error_code,
            part.base_offset,
            part.log_append_time,
            get("log_start_offset", -1),
            [
                RecordError(error.batch_index, error.batch_index_error_message)
                for error in get("record_errors", [])
            ],
            get("error_message"),
            current_leader_of(part) if "current_leader" in part.__dict__ else None,
        )

    return ProduceResponse(
        [
            ProduceTopicResponse(
                topic.__dict__.get("name"),
                topic.__dict__.get("topic_id"),
                [part_of(part) for part in topic.partition_responses],
            )
            for topic in struct.responses
        ],
        struct.throttle_time,
        [
            NodeEndpoint(node.node_id, node.host, node.port, node.rack)
            for node in struct.__dict__.get("node_endpoints", [])
        ],
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_requests_agree_with_the_compiled(version: int) -> None:
    for seed in SEEDS:
        struct, _ = random_message(ApiKey.PRODUCE, version, "request", seed)
        body = encode_request(ApiKey.PRODUCE, version, struct)
        request = request_of(decode_request(ApiKey.PRODUCE, version, body))
        for buffer in (body, memoryview(bytearray(body)), bytearray(body)):
            assert decode_produce_request(version, buffer) == request
        assert b"".join(encode_produce_request(version, request)) == body


@pytest.mark.parametrize("version", VERSIONS)
def test_responses_agree_with_the_compiled(version: int) -> None:
    for seed in SEEDS:
        struct, _ = random_message(ApiKey.PRODUCE, version, "response", seed)
        body = encode_response(ApiKey.PRODUCE, version, struct)
        response = response_of(decode_response(ApiKey.PRODUCE, version, body))
        assert encode_produce_response(version, response) == body
        assert decode_produce_response(version, body) == response


@pytest.mark.parametrize("version", [0, 1, 2])
def test_the_oldest_versions_are_read_to_be_refused(version: int) -> None:
    """Announced for librdkafka's sake; the answer needs the names of topics and partitions."""
    body = (
        b"\xff\xff\x00\x00\x75\x30"
        + b"\x00\x00\x00\x01\x00\x01a"
        + b"\x00\x00\x00\x02\x00\x00\x00\x05\x00\x00\x00\x03abc\x00\x00\x00\x06\xff\xff\xff\xff"
    )
    request = decode_produce_request(version, body)
    assert (request.transactional_id, request.acks, request.timeout_ms) == (None, -1, 30_000)
    (topic,) = request.topics
    assert topic.name == "a"
    assert topic.partitions == [
        ProducePartition(5, memoryview(b"abc")),
        ProducePartition(6, None),
    ]
    refusal = ProducePartitionResponse(5, ErrorCode.UNSUPPORTED_VERSION)
    answer = ProduceResponse([ProduceTopicResponse("a", None, [refusal])])
    expected = b"\x00\x00\x00\x01\x00\x01a\x00\x00\x00\x01\x00\x00\x00\x05\x00\x23" + b"\xff" * 8
    expected += b"\xff" * 8 if version == 2 else b""
    expected += bytes(4) if version >= 1 else b""
    assert encode_produce_response(version, answer) == expected
    with pytest.raises(ValueError, match="not spoken"):
        encode_produce_request(version, request)


def test_records_are_views_of_the_frame_and_the_callers_own_buffers() -> None:
    records = bytearray(b"x" * 1000)
    topic = ProduceTopic("a", None, [ProducePartition(0, memoryview(records))])
    pieces = encode_produce_request(9, ProduceRequest(None, -1, 5, [topic]))
    assert any(isinstance(piece, memoryview) and piece.obj is records for piece in pieces)
    frame = bytearray(b"".join(pieces))
    decoded = decode_produce_request(9, memoryview(frame)).topics[0].partitions[0].records
    assert decoded is not None
    assert decoded.obj is frame
    assert not decoded.readonly  # the leader stamps offsets in place


def test_unknown_tags_are_skipped_at_every_level() -> None:
    tag = b"\x01\x63\x02zz"
    body = b"\x00\xff\xff\x00\x00\x00\x05\x02\x02a\x02\x00\x00\x00\x07\x03xy" + tag + tag + tag
    request = decode_produce_request(9, body)
    assert request.topics[0].partitions == [ProducePartition(7, memoryview(b"xy"))]


def test_leaders_are_tagged_from_v10() -> None:
    """KIP-951; older versions leave them out."""
    part = ProducePartitionResponse(0, 6, record_errors=[], current_leader=CurrentLeader(3, 9))
    nodes = [NodeEndpoint(3, "c", 9092, "r")]
    answer = ProduceResponse([ProduceTopicResponse("a", None, [part])], node_endpoints=nodes)
    old = decode_produce_response(9, encode_produce_response(9, answer))
    assert old.topics[0].partitions[0].current_leader is None
    assert old.node_endpoints == []
    new = decode_produce_response(10, encode_produce_response(10, answer))
    assert new == answer
    part.current_leader = CurrentLeader(-1, -1)
    unknown = decode_produce_response(10, encode_produce_response(10, answer))
    assert unknown.topics[0].partitions[0].current_leader is None


def test_elements_are_limited() -> None:
    parts = [ProducePartition(number, memoryview(b"")) for number in range(5)]
    request = ProduceRequest(None, 1, 5, [ProduceTopic("a", UUID(int=1), parts)] * 2)
    for version in (8, 9, 13):
        body = b"".join(encode_produce_request(version, request))
        assert len(decode_produce_request(version, body, elements_max=12).topics) == 2
        with pytest.raises(RemoteProtocolError, match="too many"):
            decode_produce_request(version, body, elements_max=11)


@pytest.mark.parametrize(
    ("version", "body"),
    [
        (9, b"\x00\xff\xff\x00\x00\x00\x05\x00\x00"),  # null topics
        (9, b"\x00\xff\xff\x00\x00\x00\x05\x02\x00\x01\x00\x00"),  # null name
        (9, b"\x00\xff\xff\x00\x00\x00\x05\x02\x02a\x00\x00\x00"),  # null partitions
        (9, b"\x00\xff\xff\x00\x00\x00\x05\x02\x02a\x02\x00\x00\x00\x00\xff\xff\xff\xff\x0f\x00"),
        (9, long_varint(40_000) + bytes(40_010)),  # a transactional id of 39,999 bytes
        (13, b"\x00\xff\xff\x00\x00\x00\x05\x02" + bytes(17)),  # no partitions after the id
        (8, b"\xff\xff\xff\xff\x00\x00\x00\x05\xff\xff\xff\xff"),
        (8, b"\xff\xff\xff\xff\x00\x00\x00\x05\x00\x00\x00\x01\xff\xff\x00\x00\x00\x00"),
        (8, b"\xff\xff\xff\xff\x00\x00\x00\x05\x00\x00\x00\x01\x00\x01a\xff\xff\xff\xff"),
        (8, b"\xff\xff\xff\xff\x00\x00\x00\x05\x00\x00\x00\x01\x00\x01a\x00\x00\x00\x01"
            b"\x00\x00\x00\x00\x00\x00\x00\x09ab"),
        (14, b""),
        (-1, b""),
    ],
)  # fmt: skip
def test_malformed_requests(version: int, body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_produce_request(version, body)


def test_what_cannot_be_encoded() -> None:
    def answer(part: Any = None, name: Any = "a") -> ProduceResponse:
        parts = [ProducePartitionResponse(0) if part is None else part]
        return ProduceResponse([ProduceTopicResponse(name, None, parts)])

    wrong: Any = "x"
    for version in (3, 9):
        for bad in (
            answer(ProducePartitionResponse(wrong)),
            answer(ProducePartitionResponse(1 << 40)),
            answer(ProducePartitionResponse(0, wrong)),
            answer(name=None),
            answer(name="x" * 40_000),
            answer(name="\ud800"),
        ):
            with pytest.raises(TypeError):
                encode_produce_response(version, bad)
        topic = ProduceTopic(None, None, [])
        with pytest.raises(TypeError, match="names topics"):
            encode_produce_request(version, ProduceRequest(None, 0, 0, [topic]))
        with pytest.raises(TypeError, match=f"Produce v{version} request"):
            encode_produce_request(version, ProduceRequest(None, 1 << 20, 0, []))
