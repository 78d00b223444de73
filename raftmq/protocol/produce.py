"""Produce, written by hand: the one request that carries megabytes, and its answer.

Owns Produce v0 to v13 in both directions. Records are never copied: a decoded request holds
views of the frame, an encoded one is a list of pieces with the caller's own buffers in it.
Versions 0 to 2, announced only so that librdkafka goes on compressing (KAFKA-18659), are read and
answered so that they can be refused by UNSUPPORTED_VERSION; clients of ours cannot send them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from attrs import Factory, define

from raftmq.errors import RemoteProtocolError
from raftmq.protocol.api_versions import ANNOUNCED, ApiKey
from raftmq.protocol.compile import decode_response
from raftmq.protocol.wire import (
    ELEMENTS_MAX,
    MALFORMED,
    NO_LEADER,
    CurrentLeader,
    NodeEndpoint,
    bad_length,
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

FLEXIBLE_FROM: Final = 9
TOPIC_IDS_FROM: Final = 13
LEADERS_FROM: Final = 10

_unpack_hi = struct.Struct(">hi").unpack_from
_unpack_i = struct.Struct(">i").unpack_from
_unpack_ii = struct.Struct(">ii").unpack_from
_pack_i = struct.Struct(">i").pack
_pack_hi = struct.Struct(">hi").pack
_pack_ihq = struct.Struct(">ihq").pack
_pack_ihqq = struct.Struct(">ihqq").pack
_pack_ihqqq = struct.Struct(">ihqqq").pack


@define
class ProducePartition:
    """One partition's batches, as bytes."""

    index: int
    records: memoryview | None


@define
class ProduceTopic:
    """A topic, by name or (v13+) by id."""

    name: str | None
    topic_id: UUID | None
    partitions: list[ProducePartition]


@define
class ProduceRequest:
    """A Produce request. `acks`: -1 all, 1 leader, 0 no answer."""

    transactional_id: str | None
    acks: int
    timeout_ms: int
    topics: list[ProduceTopic]


@define
class RecordError:
    """Which record of a batch was refused, and why (v8+)."""

    batch_index: int
    message: str | None = None


@define
class ProducePartitionResponse:
    """The outcome for one partition."""

    index: int
    error_code: int = 0
    base_offset: int = -1
    log_append_time: int = -1
    log_start_offset: int = -1
    record_errors: Sequence[RecordError] = ()
    error_message: str | None = None
    current_leader: CurrentLeader | None = None


@define
class ProduceTopicResponse:
    """The outcomes for one topic, named as the request named it."""

    name: str | None
    topic_id: UUID | None
    partitions: list[ProducePartitionResponse]


@define
class ProduceResponse:
    """The answer to a Produce."""

    topics: list[ProduceTopicResponse] = Factory(list)
    throttle_time_ms: int = 0
    node_endpoints: Sequence[NodeEndpoint] = ()


def decode_produce_request(
    version: int, body: Buffer, *, elements_max: int = ELEMENTS_MAX
) -> ProduceRequest:
    """Decode a request's body; records are views of it.

    Raises:
        RemoteProtocolError: malformed, too many elements, or not an announced version.
    """
    buffer = body if type(body) is memoryview and body.format == "B" else memoryview(body).cast("B")
    try:
        if version >= FLEXIBLE_FROM and version <= ANNOUNCED[ApiKey.PRODUCE][1]:
            return _decode_flexible(version, buffer, elements_max)
        if 0 <= version < FLEXIBLE_FROM:
            return _decode_plain(version, buffer, elements_max)
    except MALFORMED as error:
        raise RemoteProtocolError(f"Produce v{version} request: cut off") from error
    raise RemoteProtocolError(f"Produce v{version} is not an announced version")


def _decode_flexible(version: int, buffer: memoryview, left: int) -> ProduceRequest:
    end = len(buffer)
    transactional_id, position = read_compact_string(buffer, 0, end)
    acks, timeout_ms = _unpack_hi(buffer, position)
    by_id = version >= TOPIC_IDS_FROM
    topic_count, position = read_compact_count(buffer, position + 6, end, 17 if by_id else 3)
    if topic_count < 0:
        bad_length("topic_data", topic_count)
    left -= topic_count
    topics = []
    name: str | None = None
    topic_id: UUID | None = None
    for _ in range(topic_count):
        if by_id:
            if end - position < 16:
                short(16, end - position)
            topic_id = to_uuid(buffer[position : position + 16].tobytes())
            position += 16
        else:
            name, position = read_compact_string(buffer, position, end)
            if name is None:
                bad_length("name", -1)
        count, position = read_compact_count(buffer, position, end, 6)
        if count < 0:
            bad_length("partition_data", count)
        left -= count
        if left < 0:
            too_many()
        partitions = []
        for _ in range(count):
            (index,) = _unpack_i(buffer, position)
            size = buffer[position + 4]
            position += 5
            if size > 127:
                size, position = read_varint(buffer, position, size)
            if size:
                stop = position + size - 1
                if stop > end:
                    short(size - 1, end - position)
                partitions.append(ProducePartition(index, buffer[position:stop]))
                position = stop
            else:
                partitions.append(ProducePartition(index, None))
            tags = buffer[position]
            position += 1
            if tags:
                position = skip_tags(buffer, position, end, tags)
        tags = buffer[position]
        position += 1
        if tags:
            position = skip_tags(buffer, position, end, tags)
        topics.append(ProduceTopic(name, topic_id, partitions))
    tags = buffer[position]
    if tags:
        skip_tags(buffer, position + 1, end, tags)
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def _decode_plain(version: int, buffer: memoryview, left: int) -> ProduceRequest:
    end = len(buffer)
    transactional_id, position = None, 0
    if version >= 3:
        transactional_id, position = read_string(buffer, 0, end)
    acks, timeout_ms = _unpack_hi(buffer, position)
    topic_count, position = read_count(buffer, position + 6, end, 6)
    if topic_count < 0:
        bad_length("topic_data", topic_count)
    left -= topic_count
    topics = []
    for _ in range(topic_count):
        name, position = read_string(buffer, position, end)
        if name is None:
            bad_length("name", -1)
        count, position = read_count(buffer, position, end, 8)
        if count < 0:
            bad_length("partition_data", count)
        left -= count
        if left < 0:
            too_many()
        partitions = []
        for _ in range(count):
            index, size = _unpack_ii(buffer, position)
            position += 8
            if size < 0:
                partitions.append(ProducePartition(index, None))
                continue
            stop = position + size
            if stop > end:
                short(size, end - position)
            partitions.append(ProducePartition(index, buffer[position:stop]))
            position = stop
        topics.append(ProduceTopic(name, None, partitions))
    return ProduceRequest(transactional_id, acks, timeout_ms, topics)


def encode_produce_response(version: int, response: ProduceResponse) -> bytes:
    """Encode an answer's body.

    Raises:
        TypeError: a value does not fit its field.
    """
    try:
        if version >= FLEXIBLE_FROM:
            return _encode_flexible_response(version, response)
        return _encode_plain_response(version, response)
    except (struct.error, AttributeError, ValueError) as error:
        raise TypeError(f"Produce v{version} response: {error}") from error


def _encode_flexible_response(version: int, response: ProduceResponse) -> bytes:
    out = bytearray(varint(len(response.topics) + 1))
    for topic in response.topics:
        if version >= TOPIC_IDS_FROM:
            out += from_uuid(topic.topic_id)
        else:
            out += compact_string(_named(topic.name))
        out += varint(len(topic.partitions) + 1)
        for part in topic.partitions:
            out += _pack_ihqqq(
                part.index,
                part.error_code,
                part.base_offset,
                part.log_append_time,
                part.log_start_offset,
            )
            leader = part.current_leader
            if not part.record_errors and part.error_message is None and leader is None:
                out += b"\x01\x00\x00"  # no record errors, null message, no tags
                continue
            out += varint(len(part.record_errors) + 1)
            for error in part.record_errors:
                out += _pack_i(error.batch_index)
                out += compact_string(error.message)
                out += b"\x00"
            out += compact_string(part.error_message)
            if leader is None or leader == NO_LEADER or version < LEADERS_FROM:
                out += b"\x00"
            else:
                out += tagged((0, current_leader_bytes(leader)))
        out += b"\x00"
    out += _pack_i(response.throttle_time_ms)
    if response.node_endpoints and version >= LEADERS_FROM:
        out += tagged((0, node_endpoints_bytes(response.node_endpoints)))
    else:
        out += b"\x00"
    return bytes(out)


def _encode_plain_response(version: int, response: ProduceResponse) -> bytes:
    out = bytearray(_pack_i(len(response.topics)))
    for topic in response.topics:
        out += plain_string(_named(topic.name))
        out += _pack_i(len(topic.partitions))
        for part in topic.partitions:
            index, code, base = part.index, part.error_code, part.base_offset
            if version < 2:
                out += _pack_ihq(index, code, base)
            elif version < 5:
                out += _pack_ihqq(index, code, base, part.log_append_time)
            else:
                out += _pack_ihqqq(index, code, base, part.log_append_time, part.log_start_offset)
            if version >= 8:
                out += _pack_i(len(part.record_errors))
                for error in part.record_errors:
                    out += _pack_i(error.batch_index)
                    out += plain_string(error.message)
                out += plain_string(part.error_message)
    if version >= 1:
        out += _pack_i(response.throttle_time_ms)
    return bytes(out)


def encode_produce_request(version: int, request: ProduceRequest) -> list[Buffer]:
    """Encode a request's body as pieces to be sent in order; records are the caller's buffers.

    Raises:
        TypeError: a value does not fit its field.
        ValueError: a version below 3, whose records are of another format.
    """
    if version < 3:
        raise ValueError(f"Produce v{version} is not spoken")
    flexible = version >= FLEXIBLE_FROM
    text = compact_string if flexible else plain_string
    try:
        pieces: list[Buffer] = []
        out = bytearray(text(request.transactional_id))
        out += _pack_hi(request.acks, request.timeout_ms)
        out += _length(len(request.topics), flexible)
        for topic in request.topics:
            if version >= TOPIC_IDS_FROM:
                out += from_uuid(topic.topic_id)
            else:
                out += text(_named(topic.name))
            out += _length(len(topic.partitions), flexible)
            for part in topic.partitions:
                out += _pack_i(part.index)
                out += _length(-1 if part.records is None else len(part.records), flexible)
                if part.records is not None:
                    pieces.append(bytes(out))
                    pieces.append(part.records)
                    out = bytearray()
                if flexible:
                    out += b"\x00"
            if flexible:
                out += b"\x00"
        if flexible:
            out += b"\x00"
        if out:
            pieces.append(bytes(out))
    except (struct.error, AttributeError, ValueError) as error:
        raise TypeError(f"Produce v{version} request: {error}") from error
    return pieces


def _length(count: int, flexible: bool) -> bytes:
    return varint(count + 1) if flexible else _pack_i(count)


def _named(name: str | None) -> str:
    if name is None:
        raise TypeError("this version of Produce names topics, the topic has no name")
    return name


def decode_produce_response(version: int, body: Buffer) -> ProduceResponse:
    """Decode an answer's body (v3+).

    Raises:
        RemoteProtocolError: malformed, or not an announced version.
    """
    message = decode_response(ApiKey.PRODUCE, version, body)
    return ProduceResponse(
        topics=[
            ProduceTopicResponse(
                None if version >= TOPIC_IDS_FROM else topic.name,
                topic.topic_id if version >= TOPIC_IDS_FROM else None,
                [
                    ProducePartitionResponse(
                        part.index,
                        part.error_code,
                        part.base_offset,
                        part.log_append_time,
                        part.log_start_offset if version >= 5 else -1,
                        [
                            RecordError(error.batch_index, error.batch_index_error_message)
                            for error in (part.record_errors if version >= 8 else ())
                        ],
                        part.error_message if version >= 8 else None,
                        current_leader_of(part) if version >= LEADERS_FROM else None,
                    )
                    for part in topic.partition_responses
                ],
            )
            for topic in message.responses
        ],
        throttle_time_ms=message.throttle_time,
        node_endpoints=node_endpoints_of(message) if version >= LEADERS_FROM else [],
    )
