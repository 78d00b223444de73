"""Which committed offsets a group no longer needs.

Owns the rules of expiry (KIP-186, KIP-496) and the little of the consumer protocol's subscription
that groups look at: its topics. Pure; time comes in as wall-clock milliseconds, as in commits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from raftmq.metadata.commands import UNDATED, ExpiredOffset
from raftmq.metadata.image import GroupState

CONSUMER_PROTOCOL: Final = "consumer"

# ConsumerProtocolSubscription => version int16, topics [string], user_data bytes, ...
_VERSION_AND_COUNT: Final = struct.Struct(">hi")
_LENGTH: Final = struct.Struct(">h")


def subscribed_topics(metadata: bytes) -> tuple[str, ...] | None:
    """The topics of one member's subscription; None when it is in no form that we know."""
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
    return tuple(topics)


def is_same_subscription(protocol_type: str, one: bytes, other: bytes) -> bool:
    """True when two subscriptions of a member name the same topics, or are alike."""
    if protocol_type != CONSUMER_PROTOCOL:
        return one == other
    topics, others = subscribed_topics(one), subscribed_topics(other)
    if topics is None or others is None:
        return one == other
    return frozenset(topics) == frozenset(others)


def topics_in_use(protocol_type: str, subscriptions: Iterable[bytes]) -> frozenset[str] | None:
    """All topics that members of a group read; None when that cannot be told."""
    if protocol_type != CONSUMER_PROTOCOL:
        return None
    topics: list[str] = []
    for metadata in subscriptions:
        known = subscribed_topics(metadata)
        if known is None:
            return None
        topics.extend(known)
    return frozenset(topics)


def expired_offsets(state: GroupState, now_ms: int, retention_ms: int) -> tuple[ExpiredOffset, ...]:
    """Offsets that nobody used for `retention_ms`, sorted by partition.

    With members, only topics to which none subscribes; without, everything once the group has been
    empty for that long. What is UNDATED does not age before it is dated.
    """
    topics: frozenset[str] = frozenset()
    idle_since_ms = 0
    if state.members:
        in_use = topics_in_use(state.protocol_type, (m.subscription for m in state.members))
        if in_use is None:
            return ()
        topics = in_use
    elif state.changed_at_ms == UNDATED:
        return ()
    else:
        idle_since_ms = state.changed_at_ms
    expired: list[ExpiredOffset] = []
    for at in sorted(state.offsets):
        saved = state.offsets[at]
        if saved.timestamp_ms == UNDATED:
            continue
        used_at_ms = max(saved.timestamp_ms, idle_since_ms)
        if at.topic not in topics and now_ms - used_at_ms >= retention_ms:
            expired.append(ExpiredOffset(at.topic, at.partition, saved.timestamp_ms))
    return tuple(expired)


def is_undated(state: GroupState) -> bool:
    """True when nobody could tell yet since when some of the group's offsets are unused."""
    if state.offsets and not state.members and state.changed_at_ms == UNDATED:
        return True
    return any(saved.timestamp_ms == UNDATED for saved in state.offsets.values())
