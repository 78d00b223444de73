"""Who reads which partition: the consumer protocol's bytes and three assignors.

Pure. Every member that leads a group with these names must come to the same result as Kafka's own
clients would accept: `range` splits each topic's partitions in contiguous runs, `roundrobin` deals
all partitions one by one. What a topic lists no more (`Retired`) goes to members that say that they
can read it, under the topic's name; then nobody is given the view that shows the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from raftmq.errors import RemoteProtocolError
from raftmq.types import READS_RETIRED, TopicPartition

PROTOCOL_TYPE = "consumer"
_VERSION = 1


@frozen
class Subscription:
    """What a member says when it joins."""

    topics: tuple[str, ...]
    user_data: bytes = b""
    owned: tuple[TopicPartition, ...] = ()

    @property
    def reads_retired(self) -> bool:
        """True of a member that can be given partitions that no broker lists."""
        return self.user_data.endswith(READS_RETIRED)


@frozen
class Retired:
    """What a topic lists no more, and the view that shows it under the same numbers."""

    view: str
    numbers: tuple[int, ...]


Readers = dict[TopicPartition, Sequence[str]]
"""The members that may read each partition, sorted; nobody else may."""
_NOTHING: Mapping[str, Retired] = {}


def encode_subscription(subscription: Subscription) -> bytes:
    """ConsumerProtocolSubscription v1: topics, user data, owned partitions."""
    out = bytearray(struct.pack(">hi", _VERSION, len(subscription.topics)))
    for topic in subscription.topics:
        _put_string(out, topic)
    _put_bytes(out, subscription.user_data)
    _put_partitions(out, subscription.owned)
    return bytes(out)


def decode_subscription(data: bytes) -> Subscription:
    """Read any version; later versions only append fields.

    Raises:
        RemoteProtocolError: the bytes are not a subscription.
    """
    reader = _Reader(data)
    version = reader.int16()
    topics = tuple(reader.string() for _ in range(reader.count(2)))
    user_data = reader.nullable_bytes()
    owned = reader.partitions() if version >= 1 and not reader.at_end else ()
    return Subscription(topics, user_data, owned)


def encode_assignment(partitions: Iterable[TopicPartition]) -> bytes:
    """ConsumerProtocolAssignment v1: partitions by topic, user data."""
    out = bytearray(struct.pack(">h", _VERSION))
    _put_partitions(out, partitions)
    _put_bytes(out, b"")
    return bytes(out)


def decode_assignment(data: bytes) -> tuple[TopicPartition, ...]:
    """Read an assignment; empty bytes (a member left out) are an empty one.

    Raises:
        RemoteProtocolError: the bytes are not an assignment.
    """
    if not data:
        return ()
    reader = _Reader(data)
    reader.int16()
    return reader.partitions()


def assign_range(
    members: Mapping[str, Subscription], counts: Mapping[str, int]
) -> dict[str, list[TopicPartition]]:
    """Contiguous runs of each topic's partitions; the first members get one more."""
    result: dict[str, list[TopicPartition]] = {member: [] for member in members}
    for topic in sorted({topic for item in members.values() for topic in item.topics}):
        readers = sorted(member for member, item in members.items() if topic in item.topics)
        count = counts.get(topic, 0)
        base, extra = divmod(count, len(readers))
        start = 0
        for number, member in enumerate(readers):
            size = base + (1 if number < extra else 0)
            result[member].extend(TopicPartition(topic, p) for p in range(start, start + size))
            start += size
    return result


def assign_round_robin(
    members: Mapping[str, Subscription], counts: Mapping[str, int]
) -> dict[str, list[TopicPartition]]:
    """Deal all partitions in order, passing over members that do not read the topic."""
    result: dict[str, list[TopicPartition]] = {member: [] for member in members}
    order = sorted(members)
    turn = 0
    for topic in sorted({topic for item in members.values() for topic in item.topics}):
        for partition in range(counts.get(topic, 0)):
            while topic not in members[order[turn % len(order)]].topics:
                turn += 1
            result[order[turn % len(order)]].append(TopicPartition(topic, partition))
            turn += 1
    return result


def readers_of(
    members: Mapping[str, Subscription],
    counts: Mapping[str, int],
    retired: Mapping[str, Retired] = _NOTHING,
) -> Readers:
    """All partitions that are to be read, in order, and who may: while this stays as it is, so may
    an assignment."""
    found: Readers = {}
    rest = _readers_of_retired(members, retired)
    views = {retired[key.topic].view for key in rest}
    for topic in sorted({topic for item in members.values() for topic in item.topics}):
        if topic not in views:
            readers = sorted(member for member, item in members.items() if topic in item.topics)
            keys = (TopicPartition(topic, number) for number in range(counts.get(topic, 0)))
            found.update(dict.fromkeys(keys, readers))
    return found | rest


def _readers_of_retired(
    members: Mapping[str, Subscription], retired: Mapping[str, Retired]
) -> Readers:
    found: Readers = {}
    for topic, rest in sorted(retired.items()):
        readers = sorted(
            member
            for member, item in members.items()
            if topic in item.topics and item.reads_retired
        )
        if readers:
            found |= dict.fromkeys((TopicPartition(topic, n) for n in rest.numbers), readers)
    return found


def assign_cooperative(
    members: Mapping[str, Subscription],
    counts: Mapping[str, int],
    retired: Mapping[str, Retired] = _NOTHING,
) -> dict[str, list[TopicPartition]]:
    """Everybody keeps what he has as far as that is even; what moves is first given up (KIP-429).

    A partition that is to move is in nobody's assignment until its owner has joined without it.
    """
    readers = readers_of(members, counts, retired)
    owners = _owners(members, readers, retired)
    result: dict[str, list[TopicPartition]] = {member: [] for member in sorted(members)}
    for key, member in owners.items():
        if member in readers[key]:
            result[member].append(key)
    for key, able in readers.items():
        if owners.get(key) not in able:
            result[min(able, key=lambda member: len(result[member]))].append(key)
    _even_out(result, readers)
    for member, keys in result.items():
        keys[:] = sorted(key for key in keys if owners.get(key, member) == member)
    return result


def _owners(
    members: Mapping[str, Subscription], readers: Readers, retired: Mapping[str, Retired]
) -> dict[TopicPartition, str]:
    """Who has what: the claim of the latest generation counts; a tie of two, none.

    Who reads a number of a view has that of its topic.
    """
    sources = {rest.view: topic for topic, rest in retired.items()}
    claims: dict[TopicPartition, tuple[int, str | None]] = {}
    for member in sorted(members):
        subscription = members[member]
        generation = decode_generation(subscription.user_data)
        for claimed in subscription.owned:
            key = claimed
            if key not in readers and key.topic in sources:
                key = TopicPartition(sources[key.topic], key.partition)
            if claimed.topic not in subscription.topics or key not in readers:
                continue
            known = claims.get(key)
            if known is None or generation > known[0]:
                claims[key] = (generation, member)
            elif generation == known[0]:
                claims[key] = (generation, None)
    return {key: member for key, (_, member) in sorted(claims.items()) if member is not None}


def _even_out(result: dict[str, list[TopicPartition]], readers: Readers) -> None:
    """Move partitions from those with many to those with fewer by two or more."""
    for giver in sorted(result, key=lambda member: (-len(result[member]), member)):
        for key in reversed([*result[giver]]):
            taker = min(readers[key], key=lambda member: len(result[member]))
            if len(result[giver]) - len(result[taker]) >= 2:
                result[giver].remove(key)
                result[taker].append(key)


def member_data(generation: int | None) -> bytes:
    """The user data of our own members; a cooperative one tells in which generation it has what it
    has."""
    return (b"" if generation is None else encode_generation(generation)) + READS_RETIRED


def encode_generation(generation: int) -> bytes:
    """The user data of a cooperative member, as Kafka's own assignor writes it."""
    return struct.pack(">i", generation)


def decode_generation(user_data: bytes) -> int:
    """A member's generation; -1 where it does not say."""
    return int.from_bytes(user_data[:4], "big", signed=True) if len(user_data) >= 4 else -1


_EAGER = {"range": assign_range, "roundrobin": assign_round_robin}
ASSIGNORS = (*_EAGER, "cooperative-sticky")
"""By the name that members agree on."""

COOPERATIVE = frozenset({"cooperative-sticky"})
"""Those whose members read on through a rebalance; not to be mixed with others."""


def assign(
    name: str,
    members: Mapping[str, Subscription],
    counts: Mapping[str, int],
    retired: Mapping[str, Retired] = _NOTHING,
) -> dict[str, list[TopicPartition]]:
    """Run the assignor that the group agreed on.

    Raises:
        RemoteProtocolError: the coordinator chose a name that nobody here offered.
    """
    if name not in ASSIGNORS:
        raise RemoteProtocolError(f"unknown assignor {name!r}")
    if name not in _EAGER:
        return assign_cooperative(members, counts, retired)
    rest = _readers_of_retired(members, retired)
    views = {retired[key.topic].view for key in rest}
    listed = {topic: count for topic, count in counts.items() if topic not in views}
    result = _EAGER[name](members, listed)
    for key, able in rest.items():
        result[min(able, key=lambda member: len(result[member]))].append(key)
    return result


def _put_string(out: bytearray, text: str) -> None:
    data = text.encode()
    out += struct.pack(">h", len(data)) + data


def _put_bytes(out: bytearray, data: bytes) -> None:
    out += struct.pack(">i", len(data)) + data


def _put_partitions(out: bytearray, partitions: Iterable[TopicPartition]) -> None:
    topics: dict[str, list[int]] = {}
    for key in sorted(partitions):
        topics.setdefault(key.topic, []).append(key.partition)
    out += struct.pack(">i", len(topics))
    for topic, numbers in topics.items():
        _put_string(out, topic)
        out += struct.pack(f">i{len(numbers)}i", len(numbers), *numbers)


class _Reader:
    """Reads another member's bytes; every length is checked against what is left."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def at_end(self) -> bool:
        return self._position >= len(self._data)

    def int16(self) -> int:
        return int.from_bytes(self._take(2), "big", signed=True)

    def int32(self) -> int:
        return int.from_bytes(self._take(4), "big", signed=True)

    def count(self, size_min: int) -> int:
        count = self.int32()
        if count < 0 or count * size_min > len(self._data) - self._position:
            raise RemoteProtocolError(f"a count of {count} in a member's bytes")
        return count

    def string(self) -> str:
        try:
            return self._take(self.int16()).decode()
        except UnicodeDecodeError as error:
            raise RemoteProtocolError("a name that is not UTF-8") from error

    def nullable_bytes(self) -> bytes:
        size = self.int32()
        return b"" if size == -1 else self._take(size)

    def partitions(self) -> tuple[TopicPartition, ...]:
        found: list[TopicPartition] = []
        for _ in range(self.count(6)):
            topic = self.string()
            found.extend(TopicPartition(topic, self.int32()) for _ in range(self.count(4)))
        return tuple(found)

    def _take(self, size: int) -> bytes:
        end = self._position + size
        if size < 0 or end > len(self._data):
            raise RemoteProtocolError("a member's bytes end early")
        data = self._data[self._position : end]
        self._position = end
        return data


def partition_counts(
    members: Iterable[Subscription], count_of: Mapping[str, int]
) -> dict[str, int]:
    """The partition counts of all topics that members read, as far as they are known."""
    topics: Sequence[str] = sorted({topic for item in members for topic in item.topics})
    return {topic: count_of[topic] for topic in topics if topic in count_of}
