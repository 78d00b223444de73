"""Which partition a record goes to.

Pure. `murmur2` hashes keys as the Java client does (so both write a key to the same partition),
`crc32` as librdkafka's `consistent_random`. Records without a key (to librdkafka an empty one is
none) are sticky: all go to one partition until its batch is full (KIP-480). A function of
(topic, key, count) will do as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Final, Literal, Protocol, TypeAlias

from raftmq.ports import Random
from raftmq_client.errors import UsageError

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Kafka's 32-bit murmur2, unsigned."""
    length = len(data)
    h = (_SEED ^ length) & _MASK
    whole = length & ~3
    for position in range(0, whole, 4):
        k = int.from_bytes(data[position : position + 4], "little")
        k = k * _M & _MASK
        k ^= k >> 24
        k = k * _M & _MASK
        h = h * _M & _MASK ^ k
    tail = data[whole:]
    if tail:
        h ^= int.from_bytes(tail, "little")
        h = h * _M & _MASK
    h ^= h >> 13
    h = h * _M & _MASK
    h ^= h >> 15
    return h


class Partitioner(Protocol):
    """Chooses partitions of one topic at a time."""

    is_sticky: bool
    """Records without a key all go to one partition until `batch_closed`."""

    def choose(self, topic: str, key: bytes | None, count: int) -> int:
        """A partition in `[0, count)`."""
        ...

    def batch_closed(self, topic: str, partition: int) -> None:
        """A batch was full or sent: a sticky choice may move on."""
        ...


class _Sticky:
    def __init__(self, random: Random) -> None:
        self._random = random
        self._current: dict[str, int] = {}

    def choose(self, topic: str, count: int) -> int:
        current = self._current.get(topic)
        if current is None or current >= count:
            current = self._current[topic] = self._random.randrange(0, count)
        return current

    def batch_closed(self, topic: str, partition: int) -> None:
        if self._current.get(topic) == partition:
            del self._current[topic]


class HashingPartitioner:
    """Keys by a hash, records without a key sticky."""

    is_sticky = True

    def __init__(
        self, hash_key: Callable[[bytes], int], random: Random, *, hashes_empty: bool = True
    ) -> None:
        self._hash = hash_key
        self._hashes_empty = hashes_empty
        self._sticky = _Sticky(random)

    def choose(self, topic: str, key: bytes | None, count: int) -> int:
        """A partition in `[0, count)`."""
        if key is None or not (key or self._hashes_empty):
            return self._sticky.choose(topic, count)
        return self._hash(key) % count

    def batch_closed(self, topic: str, partition: int) -> None:
        """Move on to another partition for records without a key."""
        self._sticky.batch_closed(topic, partition)


class RoundRobinPartitioner:
    """Every record, with or without a key, to the next partition."""

    is_sticky = False

    def __init__(self) -> None:
        self._next: dict[str, int] = {}

    def choose(self, topic: str, _key: bytes | None, count: int) -> int:
        """A partition in `[0, count)`."""
        current = self._next.get(topic, 0) % count
        self._next[topic] = current + 1
        return current

    def batch_closed(self, _topic: str, _partition: int) -> None:
        """Batches do not matter here."""


@lru_cache(maxsize=4096)  # keys come again and again
def _positive_murmur2(key: bytes) -> int:
    return murmur2(key) & 0x7FFFFFFF


def _crc32(key: bytes) -> int:
    return zlib.crc32(key)


class StickyPartitioner:
    """Every record, with or without a key, to one partition until its batch is full."""

    is_sticky = True

    def __init__(self, random: Random) -> None:
        self._sticky = _Sticky(random)

    def choose(self, topic: str, _key: bytes | None, count: int) -> int:
        """A partition in `[0, count)`."""
        return self._sticky.choose(topic, count)

    def batch_closed(self, topic: str, partition: int) -> None:
        """Move on to another partition."""
        self._sticky.batch_closed(topic, partition)


class RandomPartitioner:
    """Every record, with or without a key, to any partition."""

    is_sticky = False

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, _topic: str, _key: bytes | None, count: int) -> int:
        """A partition in `[0, count)`."""
        return self._random.randrange(0, count)

    def batch_closed(self, _topic: str, _partition: int) -> None:
        """Batches do not matter here."""


class CallingPartitioner:
    """Asks the user's function."""

    is_sticky = False

    def __init__(self, function: PartitionFunction) -> None:
        self._function = function

    def choose(self, topic: str, key: bytes | None, count: int) -> int:
        """A partition, or an error of the function."""
        return self._function(topic, key, count)

    def batch_closed(self, _topic: str, _partition: int) -> None:
        """Batches do not matter here."""


PartitionFunction = Callable[[str, bytes | None, int], int]
"""Of a topic, a key and the topic's number of partitions."""

PartitionerName: TypeAlias = Literal["murmur2", "crc32", "sticky", "random", "round_robin"]
PARTITIONERS: Final = ("murmur2", "crc32", "sticky", "random", "round_robin")


def make_partitioner(name: str | PartitionFunction, random: Random) -> Partitioner:
    """A partitioner by name, or out of a function.

    Raises:
        UsageError: there is none of that name.
    """
    if callable(name):
        return CallingPartitioner(name)
    if name == "murmur2":
        return HashingPartitioner(_positive_murmur2, random)
    if name == "crc32":
        return HashingPartitioner(_crc32, random, hashes_empty=False)
    if name == "sticky":
        return StickyPartitioner(random)
    if name == "random":
        return RandomPartitioner(random)
    if name == "round_robin":
        return RoundRobinPartitioner()
    raise UsageError(f"unknown partitioner {name!r}; one of {', '.join(PARTITIONERS)}")


def check_partition(partition: object) -> None:
    """Whether this may be the number of a partition.

    Raises:
        UsageError: it cannot.
    """
    is_number = isinstance(partition, int) and not isinstance(partition, bool)
    if not is_number or partition < 0:  # type: ignore[operator]  # it is a number
        raise UsageError(f"a partition is a number from 0 on or None, not {partition!r}")


def choose_partition(
    partitioner: Partitioner, topic: str, key: bytes | None, wanted: int | None, count: int
) -> int:
    """The partition that is wanted, or one that the partitioner chooses.

    Raises:
        UsageError: there is no such partition, or the user's function failed.
    """
    if wanted is not None:
        if not 0 <= wanted < count:
            raise UsageError(f"topic {topic!r} has {count} partitions, not {wanted}")
        return wanted
    try:
        chosen = partitioner.choose(topic, key, count)
    except Exception as error:
        raise UsageError(f"the partitioner failed: {error!r}") from error
    if not isinstance(chosen, int) or isinstance(chosen, bool) or not 0 <= chosen < count:
        raise UsageError(f"the partitioner chose {chosen!r} of {count} partitions of {topic!r}")
    return chosen
