"""The subscription of a group's member: the part of the consumer protocol that brokers read."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from raftmq.types import READS_RETIRED

CONSUMER_PROTOCOL: Final = "consumer"

# ConsumerProtocolSubscription => version int16, topics [string], user_data bytes, ...
_VERSION_AND_COUNT: Final = struct.Struct(">hi")
_LENGTH: Final = struct.Struct(">h")
_DATA_SIZE: Final = struct.Struct(">i")


def subscribed_topics(metadata: bytes) -> tuple[str, ...] | None:
    """The topics of one member's subscription; None when it is in no form that we know."""
    read = _topics_and_end(metadata)
    return None if read is None else read[0]


def reads_retired(metadata: bytes) -> bool:
    """True of a member that reads on what a topic lists no more, without being told to."""
    read = _topics_and_end(metadata)
    if read is None or len(metadata) < read[1] + _DATA_SIZE.size:
        return False
    (size,) = _DATA_SIZE.unpack_from(metadata, read[1])
    start = read[1] + _DATA_SIZE.size
    return size > 0 and metadata[start : start + size].endswith(READS_RETIRED)


def _topics_and_end(metadata: bytes) -> tuple[tuple[str, ...], int] | None:
    try:
        version, count = _VERSION_AND_COUNT.unpack_from(metadata)
        position = _VERSION_AND_COUNT.size
        if version < 0 or not 0 <= count <= len(metadata):
            return None
        topics: list[str] = []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(metadata, position)
            position += _LENGTH.size
            if length < 0 or position + length > len(metadata):
                return None
            topics.append(metadata[position : position + length].decode())
            position += length
    except (struct.error, UnicodeDecodeError):
        return None
    return tuple(topics), position


def topics_in_use(protocol_type: str, subscriptions: Iterable[bytes]) -> frozenset[str] | None:
    """All topics that members of a group read; None when that is not known."""
    if protocol_type != CONSUMER_PROTOCOL:
        return None
    topics: list[str] = []
    for metadata in subscriptions:
        known = subscribed_topics(metadata)
        if known is None:
            return None
        topics.extend(known)
    return frozenset(topics)
