"""The hand-written Fetch says what the compiled one (and so kio) says."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from attrs import frozen

from raftmq.errors import RemoteProtocolError
from raftmq.protocol import (
    ApiKey,
    Struct,
    decode_request,
    decode_response,
    decode_response_header,
    encode_request,
    encode_response,
)
from raftmq.protocol.fetch import (
    AbortedTransaction,
    CurrentLeader,
    DivergingEpoch,
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    FetchTopicResponse,
    ForgottenTopic,
    NodeEndpoint,
    decode_fetch_request,
    decode_fetch_response,
    encode_fetch_frame,
    encode_fetch_request,
    encode_fetch_response,
    pieces_size,
)
from raftmq.protocol.wire import current_leader_of
from tests.protocol.messages import random_message

VERSIONS = range(4, 19)
SEEDS = range(25)


def request_of(struct: Struct) -> FetchRequest:
    """The same request, from the compiled decoder's words."""
    get = struct.__dict__.get
    replica = get("replica_state") or Struct(replica_id=get("replica_id"), replica_epoch=-1)

    def part_of(part: Any) -> FetchPartition:
        unknown = FetchPartition(0)
        names = [name for name in FetchPartition.__slots__ if not name.startswith("__")]
        return FetchPartition(
            **{name: part.__dict__.get(name, getattr(unknown, name)) for name in names}
        )

    return FetchRequest(
        replica.replica_id,
        struct.max_wait,
        struct.min_bytes,
        struct.max_bytes,
        struct.isolation_level,
        get("session_id", 0),
        get("session_epoch", -1),
        [
            FetchTopic(
                topic.__dict__.get("topic"),
                topic.__dict__.get("topic_id"),
                [part_of(part) for part in topic.partitions],
            )
            for topic in struct.topics
        ],
        [
            ForgottenTopic(
                topic.__dict__.get("topic"), topic.__dict__.get("topic_id"), topic.partitions
            )
            for topic in get("forgotten_topics_data", [])
        ],
        get("rack_id", ""),
        get("cluster_id"),
        replica.replica_epoch,
    )


def response_of(struct: Struct) -> FetchResponse:
    """The same answer, from the compiled decoder's words."""

    def part_of(part: Any) -> FetchPartitionResponse:
        get = part.__dict__.get
        diverging = get("diverging_epoch") or Struct(epoch=-1, end_offset=-1)
        epoch = DivergingEpoch(diverging.epoch, diverging.end_offset)
        aborted = part.aborted_transactions
        return FetchPartitionResponse(
            part.partition_index,
            part.error_code,
            part.high_watermark,
            part.last_stable_offset,
            get("log_start_offset", -1),
            aborted and [AbortedTransaction(one.producer_id, one.first_offset) for one in aborted],
            get("preferred_read_replica", -1),
            None if part.records is None else [part.records] if part.records else [],
            current_leader_of(part) if "current_leader" in part.__dict__ else None,
            None if epoch == DivergingEpoch() else epoch,
        )

    get = struct.__dict__.get
    return FetchResponse(
        [
            FetchTopicResponse(
                topic.__dict__.get("topic"),
                topic.__dict__.get("topic_id"),
                [part_of(part) for part in topic.partitions],
            )
            for topic in struct.responses
        ],
        struct.throttle_time,
        get("error_code", 0),
        get("session_id", 0),
        [
            NodeEndpoint(node.node_id, node.host, node.port, node.rack)
            for node in get("node_endpoints", [])
        ],
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_requests_agree_with_the_compiled(version: int) -> None:
    for seed in SEEDS:
        struct, _ = random_message(ApiKey.FETCH, version, "request", seed)
        body = encode_request(ApiKey.FETCH, version, struct)
        request = request_of(decode_request(ApiKey.FETCH, version, body))
        for buffer in (body, memoryview(bytearray(body)), bytearray(body)):
            assert decode_fetch_request(version, buffer) == request
        assert encode_fetch_request(version, request) == body


@pytest.mark.parametrize("version", VERSIONS)
def test_responses_agree_with_the_compiled(version: int) -> None:
    for seed in SEEDS:
        struct, _ = random_message(ApiKey.FETCH, version, "response", seed)
        for topic in struct.responses:
            for part in topic.partitions:
                part.__dict__.pop("snapshot_id", None)  # for Kafka's own metadata log only
        body = encode_response(ApiKey.FETCH, version, struct)
        response = response_of(decode_response(ApiKey.FETCH, version, body))
        pieces: list[Any] = list(encode_fetch_response(version, response))
        assert b"".join(pieces) == body
        assert pieces_size(pieces) == len(body)
        assert decode_fetch_response(version, body) == response


@frozen
class FakeSpan:
    """Stands for bytes of the log."""

    content: bytes

    @property
    def size(self) -> int:
        """As a span of a file says it."""
        return len(self.content)


@pytest.mark.parametrize("version", VERSIONS)
def test_spans_stand_between_the_pieces_unread(version: int) -> None:
    spans = [FakeSpan(b"a" * 300), FakeSpan(b"b" * 7), FakeSpan(b"c")]
    topic_id = UUID(int=5) if version >= 13 else None
    parts = [
        FetchPartitionResponse(0, records=spans[:2]),
        FetchPartitionResponse(1, records=[]),
        FetchPartitionResponse(2, records=spans[2:]),
        FetchPartitionResponse(3, records=None),
    ]
    topic = FetchTopicResponse(None if topic_id else "t", topic_id, parts)
    frame = encode_fetch_frame(version, 99, FetchResponse([topic], session_id=0))
    assert [piece for piece in frame if isinstance(piece, FakeSpan)] == spans
    contents: list[Any] = [
        piece.content if isinstance(piece, FakeSpan) else piece for piece in frame
    ]
    joined = b"".join(contents)
    assert int.from_bytes(joined[:4], "big") == len(joined) - 4
    correlation_id, position = decode_response_header(ApiKey.FETCH, version, joined[4:])
    assert correlation_id == 99
    answer = decode_fetch_response(version, joined[4 + position :])
    records = [part.records for part in answer.topics[0].partitions]
    assert records == [[b"a" * 300 + b"b" * 7], [], [b"c"], None]


def test_an_empty_answer() -> None:
    assert encode_fetch_frame(12, 1, FetchResponse()) == [
        bytes(3) + b"\x11" + bytes(3) + b"\x01\x00" + bytes(10) + b"\x01\x00"
    ]
    assert encode_fetch_response(4, FetchResponse()) == [bytes(8)]


def test_node_endpoints_are_tagged_from_v16() -> None:
    """KIP-951; the leader itself has its tag since v12."""
    part = FetchPartitionResponse(0, 6, current_leader=CurrentLeader(3, 9))
    nodes = [NodeEndpoint(3, "c", 9092)]
    for version in (12, 15, 16):
        name, topic_id = ("a", None) if version < 13 else (None, UUID(int=1))
        answer = FetchResponse([FetchTopicResponse(name, topic_id, [part])], node_endpoints=nodes)
        pieces: list[Any] = list(encode_fetch_response(version, answer))
        decoded = decode_fetch_response(version, b"".join(pieces))
        assert decoded.topics[0].partitions[0].current_leader == CurrentLeader(3, 9)
        assert decoded.node_endpoints == (nodes if version >= 16 else [])


def a_request(parts: int = 3, topics: int = 2) -> FetchRequest:
    """Some topics of some partitions, one of which leaves its session."""
    return FetchRequest(
        topics=[
            FetchTopic("a", UUID(int=9), [FetchPartition(number) for number in range(parts)])
            for _ in range(topics)
        ],
        forgotten=[ForgottenTopic("b", UUID(int=8), [1, 2])],
    )


@pytest.mark.parametrize("version", [7, 11, 12, 17])
def test_elements_are_limited(version: int) -> None:
    body = encode_fetch_request(version, a_request())
    assert len(decode_fetch_request(version, body, elements_max=11).topics) == 2
    for limit in (1, 2, 7, 8, 10):
        with pytest.raises(RemoteProtocolError, match="too many"):
            decode_fetch_request(version, body, elements_max=limit)


@pytest.mark.parametrize("version", [12, 15, 17, 18])
def test_unknown_tags_are_skipped(version: int) -> None:
    """Also those of later versions: an old version does not know tag 1 of a partition."""
    request = a_request(parts=1, topics=1)
    body = encode_fetch_request(version, request)
    assert body.endswith(b"\x01\x00")  # an empty rack, no tags
    strange = b"\x02\x07\x01x" + b"\xff\x01\xc8\x01" + bytes(200)
    decoded = decode_fetch_request(version, body[:-1] + strange)
    assert decoded == decode_fetch_request(version, body)


def with_partition_tags(version: int, tags: bytes) -> bytes:
    """A request for one partition, whose entry has these tagged fields."""
    body = encode_fetch_request(version, FetchRequest(topics=a_request(1, 1).topics))
    # partition's tags, topic's tags, no forgotten topics, empty rack, no tags
    assert body.endswith(b"\x00\x00\x01\x01\x00")
    return body[:-5] + tags + body[-4:]


def test_partition_tags_by_version() -> None:
    uuid = UUID(int=77)
    tags = b"\x03\x00\x10" + uuid.bytes + b"\x01\x08" + (5).to_bytes(8, "big") + b"\x02\x01x"
    (topic,) = decode_fetch_request(18, with_partition_tags(18, tags)).topics
    assert topic.partitions[0].replica_directory_id == uuid
    assert topic.partitions[0].high_watermark == 5
    (topic,) = decode_fetch_request(15, with_partition_tags(15, tags)).topics
    assert topic.partitions[0] == FetchPartition(0)


@pytest.mark.parametrize(
    "tags",
    [
        b"\x01\x00\x0f" + bytes(15),
        b"\x01\x01\x07" + bytes(7),
        b"\x01\x09\x7f",
        b"\x7f",
        b"\xff\xff\xff\xff\x0f",
        b"\x01\xff\xff\xff\xff\x0f\xff\xff\xff\xff\x0f",
    ],
)
def test_malformed_partition_tags(tags: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_fetch_request(18, with_partition_tags(18, tags))


@pytest.mark.parametrize(
    "tags",
    [
        b"\x01\x00\x05\x02abcd",  # a cluster id shorter than its tag
        b"\x01\x01\x0e" + bytes(14),  # a replica state longer than its fields
        b"\x01\x01\x04" + bytes(4),
        b"\x05",
    ],
)
def test_malformed_request_tags(tags: bytes) -> None:
    body = encode_fetch_request(15, FetchRequest())
    assert decode_fetch_request(15, body) == FetchRequest()
    with pytest.raises(RemoteProtocolError):
        decode_fetch_request(15, body[:-1] + tags)


V4 = bytes(17)
V7 = bytes(25)
ONE = b"\x00\x00\x00\x01"
NULL = b"\xff\xff\xff\xff"


@pytest.mark.parametrize(
    ("version", "body"),
    [
        (4, V4 + NULL),
        (4, V4 + ONE + b"\xff\xff" + bytes(4)),
        (4, V4 + ONE + b"\x00\x01a" + NULL),
        (4, V4 + b"\x7f\xff\xff\xff"),
        (7, V7 + bytes(4) + NULL),
        (7, V7 + bytes(4) + ONE + b"\xff\xff" + bytes(4)),
        (7, V7 + bytes(4) + ONE + b"\x00\x01a" + NULL),
        (11, V7 + bytes(8) + b"\xff\xff"),
        (12, V7 + b"\x00\x01\x01\x00"),
        (12, V7 + b"\x02\x00\x01\x00" + bytes(9)),
        (12, V7 + b"\x02\x02a\x00\x00\x01\x01\x00"),
        (12, V7 + b"\x01\x00\x01\x00"),
        (12, V7 + b"\x01\x02\x02a\x00\x00\x01\x00"),
        (12, V7 + b"\x01\x01\x00\x00"),
        (13, V7 + b"\x02" + bytes(18)),
        (3, b""),
        (19, b""),
    ],
)
def test_malformed_requests(version: int, body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_fetch_request(version, body)


def test_what_cannot_be_encoded() -> None:
    wrong: Any = "x"
    for version in (4, 12):
        for bad in (
            FetchResponse(throttle_time_ms=wrong),
            FetchResponse([FetchTopicResponse(None, None, [])]),
            FetchResponse([FetchTopicResponse("x" * 40_000, None, [])]),
            FetchResponse([FetchTopicResponse("a", None, [FetchPartitionResponse(wrong)])]),
            FetchResponse(
                [FetchTopicResponse("a", None, [FetchPartitionResponse(0, records=[None])])]
            ),
        ):
            with pytest.raises(TypeError):
                encode_fetch_response(version, bad)
        with pytest.raises(TypeError, match=f"Fetch v{version} request: max_wait"):
            encode_fetch_request(version, FetchRequest(max_wait_ms=wrong))
