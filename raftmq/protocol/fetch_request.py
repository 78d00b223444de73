"""Reads Fetch requests, by hand.

Owns Fetch v4 to v18 from the client. Counts are checked against the bytes left before anything is
allocated, and topics and partitions are charged to one budget, forgotten ones included.
"""

from __future__ import annotations

import struct
from typing import Final
from uuid import UUID

from raftmq.errors import RemoteProtocolError
from raftmq.protocol.api_versions import ANNOUNCED, ApiKey
from raftmq.protocol.fetch_messages import (
    FLEXIBLE_FROM,
    REPLICA_STATE_FROM,
    TOPIC_IDS_FROM,
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ForgottenTopic,
)
from raftmq.protocol.wire import (
    ELEMENTS_MAX,
    MALFORMED,
    bad_length,
    bad_tag,
    read_compact_count,
    read_compact_string,
    read_count,
    read_string,
    read_varint,
    short,
    skip_tags,
    to_uuid,
    too_many,
)
from raftmq.types import Buffer

_DIRECTORY_FROM: Final = 17
_HIGH_WATERMARK_FROM: Final = 18

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
    """Read what leaves the session; `left` is the budget of elements."""
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
