"""Fetch, written by hand: the one answer that carries megabytes, and its request.

Owns Fetch v4 to v18 in both directions. A request's counts are checked against the bytes left
before anything is allocated; topics and partitions are charged to one budget, forgotten ones
included. An encoded answer is a list of pieces: bytes, and between them the caller's own spans
(anything with a `size`), which are sent straight from the log. Records stand inside each
partition's entry, so pieces and spans alternate; no span is ever read here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeAlias
from uuid import UUID

from attrs import Factory, define, frozen

from raftmq.errors import RemoteProtocolError
from raftmq.protocol.api_versions import ANNOUNCED, ApiKey
from raftmq.protocol.compile import decode_response, encode_request
from raftmq.protocol.schema import Struct
from raftmq.protocol.wire import (
    ELEMENTS_MAX,
    MALFORMED,
    NO_LEADER,
    CurrentLeader,
    NodeEndpoint,
    bad_length,
    bad_tag,
    compact_string,
    current_leader_bytes,
    current_leader_of,
    from_uuid,
    node_endpoints_bytes,
    node_endpoints_of,
    plain_string,
    read_compact_count,
    read_compact_string,
    read_count,
    read_string,
    read_varint,
    short,
    skip_tags,
    tagged,
    to_uuid,
    too_many,
    varint,
)
from raftmq.types import Buffer

__all__ = [
    "AbortedTransaction",
    "CurrentLeader",
    "DivergingEpoch",
    "FetchPartition",
    "FetchPartitionResponse",
    "FetchRequest",
    "FetchResponse",
    "FetchTopic",
    "FetchTopicResponse",
    "ForgottenTopic",
    "NodeEndpoint",
    "Piece",
    "Span",
    "decode_fetch_request",
    "decode_fetch_response",
    "encode_fetch_frame",
    "encode_fetch_request",
    "encode_fetch_response",
    "pieces_size",
]

FLEXIBLE_FROM: Final = 12
TOPIC_IDS_FROM: Final = 13
REPLICA_STATE_FROM: Final = 15
ENDPOINTS_FROM: Final = 16
_DIRECTORY_FROM: Final = 17
_HIGH_WATERMARK_FROM: Final = 18
UNKNOWN_HIGH_WATERMARK: Final = (1 << 63) - 1
_BUFFERS: Final = (bytes, bytearray, memoryview)

_pack_i = struct.Struct(">i").pack
_pack_q = struct.Struct(">q").pack
_pack_ihi = struct.Struct(">ihi").pack
_pack_ihqq = struct.Struct(">ihqq").pack
_pack_ihqqq = struct.Struct(">ihqqq").pack
_pack_ihqqqbi = struct.Struct(">ihqqqbi").pack
_pack_qq = struct.Struct(">qq").pack
_pack_qqb = struct.Struct(">qqB").pack


class Span(Protocol):
    """Bytes in a file; only their number matters here."""

    @property
    def size(self) -> int:
        """How many bytes will be sent."""
        ...


Piece: TypeAlias = Buffer | Span


@define
class FetchPartition:
    """What a client wants of one partition."""

    partition: int
    current_leader_epoch: int = -1
    fetch_offset: int = 0
    last_fetched_epoch: int = -1
    log_start_offset: int = -1
    partition_max_bytes: int = 1 << 20
    replica_directory_id: UUID | None = None
    high_watermark: int = UNKNOWN_HIGH_WATERMARK


@define
class FetchTopic:
    """A topic, by name or (v13+) by id."""

    name: str | None
    topic_id: UUID | None
    partitions: list[FetchPartition]


@define
class ForgottenTopic:
    """Partitions that leave a fetch session (v7+)."""

    name: str | None
    topic_id: UUID | None
    partitions: list[int]


@define
class FetchRequest:
    """A Fetch request. `replica_id` is -1 for consumers."""

    replica_id: int = -1
    max_wait_ms: int = 500
    min_bytes: int = 1
    max_bytes: int = 0x7FFFFFFF
    isolation_level: int = 0
    session_id: int = 0
    session_epoch: int = -1
    topics: list[FetchTopic] = Factory(list)
    forgotten: list[ForgottenTopic] = Factory(list)
    rack_id: str = ""
    cluster_id: str | None = None
    replica_epoch: int = -1


@frozen
class AbortedTransaction:
    """An aborted transaction with records in the answer."""

    producer_id: int
    first_offset: int


@frozen
class DivergingEpoch:
    """Where the log of a follower parts from the leader's (v12+)."""

    epoch: int = -1
    end_offset: int = -1


@define
class FetchPartitionResponse:
    """The answer for one partition. `records` are spans or buffers, sent one after the other."""

    partition: int
    error_code: int = 0
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted_transactions: Sequence[AbortedTransaction] | None = None
    preferred_read_replica: int = -1
    records: Sequence[Any] | None = ()
    current_leader: CurrentLeader | None = None
    diverging_epoch: DivergingEpoch | None = None


@define
class FetchTopicResponse:
    """The answer for one topic, named as the request named it."""

    name: str | None
    topic_id: UUID | None
    partitions: list[FetchPartitionResponse]


@define
class FetchResponse:
    """The answer to a Fetch."""

    topics: list[FetchTopicResponse] = Factory(list)
    throttle_time_ms: int = 0
    error_code: int = 0
    session_id: int = 0
    node_endpoints: Sequence[NodeEndpoint] = ()


def encode_fetch_response(version: int, response: FetchResponse) -> list[Piece]:
    """Encode an answer's body as pieces to be sent in order; spans are the caller's own.

    Raises:
        TypeError: a value does not fit its field.
    """
    try:
        if version >= FLEXIBLE_FROM:
            return _encode_flexible_response(version, response)
        return _encode_plain_response(version, response)
    except (struct.error, AttributeError, ValueError) as error:
        raise TypeError(f"Fetch v{version} response: {error}") from error


def encode_fetch_frame(version: int, correlation_id: int, response: FetchResponse) -> list[Piece]:
    """Encode a whole answer: frame size, response header, then the body's pieces.

    Raises:
        TypeError: a value does not fit its field.
    """
    pieces = encode_fetch_response(version, response)
    first = pieces[0]
    assert isinstance(first, bytes)  # a body begins with its throttle time
    header = b"\x00" if version >= FLEXIBLE_FROM else b""
    size = 4 + len(header) + pieces_size(pieces)
    pieces[0] = b"".join((_pack_i(size), _pack_i(correlation_id), header, first))
    return pieces


def pieces_size(pieces: Sequence[Piece]) -> int:
    """How many bytes these pieces are on the wire."""
    size = 0
    for piece in pieces:
        size += len(piece) if isinstance(piece, _BUFFERS) else piece.size
    return size


def _encode_flexible_response(version: int, response: FetchResponse) -> list[Piece]:
    pieces: list[Piece] = []
    write = pieces.append
    out = bytearray(_pack_ihi(response.throttle_time_ms, response.error_code, response.session_id))
    out += varint(len(response.topics) + 1)
    for topic in response.topics:
        if version >= TOPIC_IDS_FROM:
            out += from_uuid(topic.topic_id)
        else:
            out += compact_string(_named(topic.name))
        out += varint(len(topic.partitions) + 1)
        for part in topic.partitions:
            aborted = part.aborted_transactions
            # One pack for the usual case: nothing aborted.
            out += _pack_ihqqqbi(
                part.partition,
                part.error_code,
                part.high_watermark,
                part.last_stable_offset,
                part.log_start_offset,
                0,
                part.preferred_read_replica,
            )
            if aborted is not None:
                _insert_aborted(out, aborted)
            records = part.records
            if records:
                out += varint(pieces_size(records) + 1)
                write(bytes(out))
                pieces += records
                out.clear()
            else:
                out += b"\x00" if records is None else b"\x01"
            if part.current_leader is None and part.diverging_epoch is None:
                out += b"\x00"
            else:
                out += _partition_tags(part)
        out += b"\x00"
    if response.node_endpoints and version >= ENDPOINTS_FROM:
        out += tagged((0, node_endpoints_bytes(response.node_endpoints)))
    else:
        out += b"\x00"
    pieces.append(bytes(out))
    return pieces


def _insert_aborted(out: bytearray, aborted: Sequence[AbortedTransaction]) -> None:
    """Replace the null list of aborted transactions, which stands before the last four bytes."""
    preferred = out[-4:]
    del out[-5:]
    out += varint(len(aborted) + 1)
    for transaction in aborted:
        out += _pack_qqb(transaction.producer_id, transaction.first_offset, 0)
    out += preferred


def _partition_tags(part: FetchPartitionResponse) -> bytes:
    fields = []
    diverging = part.diverging_epoch
    if diverging is not None and diverging != DivergingEpoch():
        fields.append((0, _pack_i(diverging.epoch) + _pack_q(diverging.end_offset) + b"\x00"))
    if part.current_leader is not None and part.current_leader != NO_LEADER:
        fields.append((1, current_leader_bytes(part.current_leader)))
    return tagged(*fields)


def _encode_plain_response(version: int, response: FetchResponse) -> list[Piece]:
    pieces: list[Piece] = []
    if version >= 7:
        throttle = response.throttle_time_ms
        out = bytearray(_pack_ihi(throttle, response.error_code, response.session_id))
    else:
        out = bytearray(_pack_i(response.throttle_time_ms))
    out += _pack_i(len(response.topics))
    for topic in response.topics:
        out += plain_string(_named(topic.name))
        out += _pack_i(len(topic.partitions))
        for part in topic.partitions:
            number, code, high = part.partition, part.error_code, part.high_watermark
            stable = part.last_stable_offset
            if version >= 5:
                out += _pack_ihqqq(number, code, high, stable, part.log_start_offset)
            else:
                out += _pack_ihqq(number, code, high, stable)
            aborted = part.aborted_transactions
            out += _pack_i(-1 if aborted is None else len(aborted))
            for transaction in aborted or ():
                out += _pack_qq(transaction.producer_id, transaction.first_offset)
            if version >= 11:
                out += _pack_i(part.preferred_read_replica)
            records = part.records
            out += _pack_i(-1 if records is None else pieces_size(records))
            if records:
                pieces.append(bytes(out))
                pieces += records
                out = bytearray()
    if out:
        pieces.append(bytes(out))
    return pieces


def _named(name: str | None) -> str:
    if name is None:
        raise TypeError("this version of Fetch names topics, the topic has no name")
    return name


def encode_fetch_request(version: int, request: FetchRequest) -> bytes:
    """Encode a request's body.

    Raises:
        TypeError: a value does not fit its field.
    """
    by_id = version >= TOPIC_IDS_FROM
    message: dict[str, Any] = {
        "max_wait": request.max_wait_ms,
        "min_bytes": request.min_bytes,
        "max_bytes": request.max_bytes,
        "isolation_level": request.isolation_level,
        "session_id": request.session_id,
        "session_epoch": request.session_epoch,
        "rack_id": request.rack_id,
        "cluster_id": request.cluster_id,
        "topics": [
            {
                **({"topic_id": topic.topic_id} if by_id else {"topic": topic.name}),
                "partitions": [_partition_fields(part) for part in topic.partitions],
            }
            for topic in request.topics
        ],
        "forgotten_topics_data": [
            {
                **({"topic_id": topic.topic_id} if by_id else {"topic": topic.name}),
                "partitions": topic.partitions,
            }
            for topic in request.forgotten
        ],
    }
    if version >= REPLICA_STATE_FROM:
        message["replica_state"] = {
            "replica_id": request.replica_id,
            "replica_epoch": request.replica_epoch,
        }
    else:
        message["replica_id"] = request.replica_id
    return encode_request(ApiKey.FETCH, version, message)


def _partition_fields(part: FetchPartition) -> dict[str, Any]:
    return {
        "partition": part.partition,
        "current_leader_epoch": part.current_leader_epoch,
        "fetch_offset": part.fetch_offset,
        "last_fetched_epoch": part.last_fetched_epoch,
        "log_start_offset": part.log_start_offset,
        "partition_max_bytes": part.partition_max_bytes,
        "replica_directory_id": part.replica_directory_id,
        "high_watermark": part.high_watermark,
    }


def decode_fetch_response(version: int, body: Buffer) -> FetchResponse:
    """Decode an answer's body; records are one view of it per partition, or nothing.

    Raises:
        RemoteProtocolError: malformed, or not an announced version.
    """
    message = decode_response(ApiKey.FETCH, version, body)
    by_id = version >= TOPIC_IDS_FROM
    return FetchResponse(
        topics=[
            FetchTopicResponse(
                None if by_id else topic.topic,
                topic.topic_id if by_id else None,
                [_partition_response(version, part) for part in topic.partitions],
            )
            for topic in message.responses
        ],
        throttle_time_ms=message.throttle_time,
        error_code=message.error_code if version >= 7 else 0,
        session_id=message.session_id if version >= 7 else 0,
        node_endpoints=node_endpoints_of(message) if version >= ENDPOINTS_FROM else [],
    )


def _partition_response(version: int, part: Struct) -> FetchPartitionResponse:
    aborted = part.aborted_transactions
    if part.records is None:
        records = None
    else:
        records = [part.records] if len(part.records) else []
    diverging = None
    if version >= FLEXIBLE_FROM:
        diverging = DivergingEpoch(part.diverging_epoch.epoch, part.diverging_epoch.end_offset)
    return FetchPartitionResponse(
        part.partition_index,
        part.error_code,
        part.high_watermark,
        part.last_stable_offset,
        part.log_start_offset if version >= 5 else -1,
        None
        if aborted is None
        else [AbortedTransaction(a.producer_id, a.first_offset) for a in aborted],
        part.preferred_read_replica if version >= 11 else -1,
        records,
        current_leader_of(part) if version >= FLEXIBLE_FROM else None,
        None if diverging == DivergingEpoch() else diverging,
    )


_V4_REQUEST = struct.Struct(">iiiib")
_V7_REQUEST = struct.Struct(">iiiibii")
_V15_REQUEST = struct.Struct(">iiibii")
_V4_PARTITION = struct.Struct(">iqi")
_V5_PARTITION = struct.Struct(">iqqi")
_V9_PARTITION = struct.Struct(">iiqqi")
_V12_PARTITION = struct.Struct(">iiqiqi")
_REPLICA_STATE = struct.Struct(">iq")
_unpack_q = struct.Struct(">q").unpack_from


def decode_fetch_request(
    version: int, body: Buffer, *, elements_max: int = ELEMENTS_MAX
) -> FetchRequest:
    """Decode a request's body.

    Raises:
        RemoteProtocolError: malformed, too many elements, or not an announced version.
    """
    low, high = ANNOUNCED[ApiKey.FETCH]
    if not low <= version <= high:
        raise RemoteProtocolError(f"Fetch v{version} is not an announced version")
    buffer = body if type(body) is memoryview and body.format == "B" else memoryview(body).cast("B")
    try:
        if version >= FLEXIBLE_FROM:
            return _decode_flexible(version, buffer, elements_max)
        return _decode_plain(version, buffer, elements_max)
    except MALFORMED as error:
        raise RemoteProtocolError(f"Fetch v{version} request: cut off") from error


def _decode_flexible(version: int, buffer: memoryview, left: int) -> FetchRequest:
    end = len(buffer)
    if version < REPLICA_STATE_FROM:
        request = FetchRequest(*_V7_REQUEST.unpack_from(buffer))
        position = _V7_REQUEST.size
    else:
        request = FetchRequest(-1, *_V15_REQUEST.unpack_from(buffer))
        position = _V15_REQUEST.size
    by_id = version >= TOPIC_IDS_FROM
    count, position = read_compact_count(buffer, position, end, 18 if by_id else 3)
    if count < 0:
        bad_length("topics", count)
    left -= count
    for _ in range(count):
        name, topic_id, position = _read_topic(buffer, position, end, by_id)
        inner, position = read_compact_count(buffer, position, end, _V12_PARTITION.size + 1)
        if inner < 0:
            bad_length("partitions", inner)
        left -= inner
        if left < 0:
            too_many()
        partitions = []
        for _ in range(inner):
            part = FetchPartition(*_V12_PARTITION.unpack_from(buffer, position))
            position += 32
            partitions.append(part)
            tags = buffer[position]
            position += 1
            if tags:
                position = _read_partition_tags(version, part, buffer, position, tags)
        request.topics.append(FetchTopic(name, topic_id, partitions))
        position = _skip_tags(buffer, position, end)
    position = _decode_forgotten(buffer, position, left, request, by_id)
    rack_id, position = read_compact_string(buffer, position, end)
    if rack_id is None:
        bad_length("rack_id", -1)
    else:
        request.rack_id = rack_id
    tags = buffer[position]
    if tags:
        _read_request_tags(version, request, buffer, position + 1, tags)
    return request


def _read_topic(
    buffer: memoryview, position: int, end: int, by_id: bool
) -> tuple[str | None, UUID | None, int]:
    if by_id:
        stop = position + 16
        if stop > end:
            short(16, end - position)
        return None, to_uuid(buffer[position:stop].tobytes()), stop
    name, position = read_compact_string(buffer, position, end)
    if name is None:
        bad_length("topic", -1)
    return name, None, position


def _skip_tags(buffer: memoryview, position: int, end: int) -> int:
    tags = buffer[position]
    position += 1
    return skip_tags(buffer, position, end, tags) if tags else position


def _decode_forgotten(
    buffer: memoryview, position: int, left: int, request: FetchRequest, by_id: bool
) -> int:
    """Read the partitions that leave the session; `left` is the budget of elements."""
    end = len(buffer)
    count, position = read_compact_count(buffer, position, end, 18 if by_id else 3)
    if count < 0:
        bad_length("forgotten_topics_data", count)
    left -= count
    if left < 0:
        too_many()
    for _ in range(count):
        name, topic_id, position = _read_topic(buffer, position, end, by_id)
        inner, position = read_compact_count(buffer, position, end, 4)
        if inner < 0:
            bad_length("partitions", inner)
        left -= inner
        if left < 0:
            too_many()
        numbers = list(struct.unpack_from(f">{inner}i", buffer, position))
        position = _skip_tags(buffer, position + 4 * inner, end)
        request.forgotten.append(ForgottenTopic(name, topic_id, numbers))
    return position


def _tag(buffer: memoryview, position: int) -> tuple[int, int, int]:
    """A tag, where its content begins, and where it stops."""
    tag = buffer[position]
    position += 1
    if tag > 127:
        tag, position = read_varint(buffer, position, tag)
    size = buffer[position]
    position += 1
    if size > 127:
        size, position = read_varint(buffer, position, size)
    if size > len(buffer) - position:
        short(size, len(buffer) - position)
    return tag, position, position + size


def _tag_count(buffer: memoryview, position: int, count: int) -> tuple[int, int]:
    if count > 127:
        count, position = read_varint(buffer, position, count)
    if count * 2 > len(buffer) - position:
        short(count * 2, len(buffer) - position)
    return count, position


def _read_partition_tags(
    version: int, part: FetchPartition, buffer: memoryview, position: int, count: int
) -> int:
    count, position = _tag_count(buffer, position, count)
    for _ in range(count):
        tag, start, position = _tag(buffer, position)
        if tag == 0 and version >= _DIRECTORY_FROM:
            if position - start != 16:
                bad_tag(tag)
            part.replica_directory_id = to_uuid(buffer[start:position].tobytes())
        elif tag == 1 and version >= _HIGH_WATERMARK_FROM:
            if position - start != 8:
                bad_tag(tag)
            (part.high_watermark,) = _unpack_q(buffer, start)
    return position


def _read_request_tags(
    version: int, request: FetchRequest, buffer: memoryview, position: int, count: int
) -> None:
    count, position = _tag_count(buffer, position, count)
    for _ in range(count):
        tag, start, position = _tag(buffer, position)
        if tag == 0:
            request.cluster_id, stop = read_compact_string(buffer, start, len(buffer))
            if stop != position:
                bad_tag(tag)
        elif tag == 1 and version >= REPLICA_STATE_FROM:
            request.replica_id, request.replica_epoch = _REPLICA_STATE.unpack_from(buffer, start)
            if _skip_tags(buffer, start + _REPLICA_STATE.size, len(buffer)) != position:
                bad_tag(tag)


def _decode_plain(version: int, buffer: memoryview, left: int) -> FetchRequest:
    end = len(buffer)
    shape = _V7_REQUEST if version >= 7 else _V4_REQUEST
    request = FetchRequest(*shape.unpack_from(buffer))
    count, position = read_count(buffer, shape.size, end, 6)
    if count < 0:
        bad_length("topics", count)
    left -= count
    for _ in range(count):
        name, position = read_string(buffer, position, end)
        if name is None:
            bad_length("topic", -1)
        inner, position = read_count(buffer, position, end, 16)
        if inner < 0:
            bad_length("partitions", inner)
        left -= inner
        if left < 0:
            too_many()
        partitions = []
        for _ in range(inner):
            part, position = _read_plain_partition(version, buffer, position)
            partitions.append(part)
        request.topics.append(FetchTopic(name, None, partitions))
    if version >= 7:
        position = _decode_plain_forgotten(buffer, position, left, request)
    if version >= 11:
        rack_id, position = read_string(buffer, position, end)
        if rack_id is None:
            bad_length("rack_id", -1)
        else:
            request.rack_id = rack_id
    return request


def _read_plain_partition(
    version: int, buffer: memoryview, position: int
) -> tuple[FetchPartition, int]:
    epoch, log_start = -1, -1
    if version >= 9:
        number, epoch, offset, log_start, size = _V9_PARTITION.unpack_from(buffer, position)
        position += _V9_PARTITION.size
    elif version >= 5:
        number, offset, log_start, size = _V5_PARTITION.unpack_from(buffer, position)
        position += _V5_PARTITION.size
    else:
        number, offset, size = _V4_PARTITION.unpack_from(buffer, position)
        position += _V4_PARTITION.size
    return FetchPartition(number, epoch, offset, -1, log_start, size), position


def _decode_plain_forgotten(
    buffer: memoryview, position: int, left: int, request: FetchRequest
) -> int:
    end = len(buffer)
    count, position = read_count(buffer, position, end, 6)
    if count < 0:
        bad_length("forgotten_topics_data", count)
    left -= count
    if left < 0:
        too_many()
    for _ in range(count):
        name, position = read_string(buffer, position, end)
        if name is None:
            bad_length("topic", -1)
        inner, position = read_count(buffer, position, end, 4)
        if inner < 0:
            bad_length("partitions", inner)
        left -= inner
        if left < 0:
            too_many()
        numbers = list(struct.unpack_from(f">{inner}i", buffer, position))
        position += 4 * inner
        request.forgotten.append(ForgottenTopic(name, None, numbers))
    return position
