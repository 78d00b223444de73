"""What a worker decides: which records are in hand, what of them may be saved, and when.

A worker takes records one by one and settles each of them in any order: done, sent to be retried,
or buried. What it saves of a partition reaches up to the first record that is still in hand, so
that a crash passes over none. A record of a partition that was given up is nobody's here any more:
settling it saves nothing, and it is not sent on, since its next reader reads it again. Pure; the
drivers wait and send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from attrs import frozen

from raftmq.types import TopicPartition
from raftmq_client.core.consumer import ConsumerCore
from raftmq_client.core.group_state import Pending
from raftmq_client.core.messages import ConsumerRecord, decoded
from raftmq_client.core.metadata import check_topic
from raftmq_client.core.progress import Places
from raftmq_client.errors import UsageError
from raftmq_client.serializers import read_deserializer

POLL_MS: Final = 1_000.0
PAUSE_MS: Final = 50.0
"""So long waits who asks for records at least, however often is committed."""
COMMIT_MS: Final = 1_000.0
GRACE_S: Final = 30.0
LAST_COMMIT_MS: Final = 5_000.0


@frozen
class WorkerParts:
    """A worker's settings, read: the topics of its consumer, and the consumer's own settings."""

    topics: tuple[str, ...]
    is_exactly_once: bool
    settings: dict[str, Any]
    decode: Callable[[ConsumerRecord], ConsumerRecord]


def read_worker(
    topics: str | Iterable[str], transactional_id: str | None, settings: dict[str, Any]
) -> WorkerParts:
    """Check what a worker is given. It reads `TOPIC.GROUP` beside each topic, where its own retries
    come back, and decodes by itself, so that what cannot be read is buried and not in the way.

    Raises:
        UsageError: a setting makes no sense for a worker, or two contradict.
    """
    rest = dict(settings)
    group = rest.get("group")
    if not group:
        raise UsageError("a worker needs a group")
    delivery = rest.setdefault("delivery", "at_least_once")
    if delivery not in ("at_least_once", "exactly_once"):
        raise UsageError(f"a worker's delivery is at_least_once or exactly_once, not {delivery!r}")
    if (delivery == "exactly_once") != (transactional_id is not None):
        raise UsageError("delivery='exactly_once' and a transactional_id go together")
    if "auto_commit_ms" in rest:
        raise UsageError("a worker commits what is done (commit_ms), not by auto_commit_ms")
    if delivery == "at_least_once":
        rest["auto_commit_ms"] = None
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    if not names:
        raise UsageError("a worker needs topics, by their names")
    for name in names:
        check_topic(name)
    decode_key = read_deserializer(rest.pop("key_deserializer", None))
    decode_value = read_deserializer(rest.pop("value_deserializer", None))

    def decode(record: ConsumerRecord) -> ConsumerRecord:
        if decode_key is None and decode_value is None:
            return record
        key, value = record.key, record.value
        if decode_key is not None and key is not None:
            key = decode_key(key)
        if decode_value is not None and value is not None:
            value = decode_value(value)
        return decoded(record, key, value)

    back = tuple(f"{name}.{group}" for name in names)
    return WorkerParts(tuple(dict.fromkeys(names + back)), delivery == "exactly_once", rest, decode)


class InHand:
    """The records of one worker that are not settled, and its commits."""

    def __init__(self, core: ConsumerCore, commit_ms: float) -> None:
        if type(commit_ms) not in (int, float) or not 0 <= commit_ms < 1e9:
            raise UsageError(f"commit_ms is milliseconds from 0 on, not {commit_ms!r}")
        self._core = core
        self._commit_ms = commit_ms
        self._commit_at = 0.0
        self._saving: Pending | None = None
        self._held: dict[TopicPartition, dict[int, ConsumerRecord]] = {}

    def take(self, record: ConsumerRecord) -> None:
        """It was handed out."""
        key = TopicPartition(record.topic, record.partition)
        self._held.setdefault(key, {})[record.offset] = record

    def holds(self, record: ConsumerRecord) -> bool:
        """True while it is neither settled nor somebody else's."""
        held = self._held.get(TopicPartition(record.topic, record.partition), {})
        return held.get(record.offset) is record

    def settle(self, record: ConsumerRecord) -> bool:
        """It is done with; False where it was not in hand any more."""
        if not self.holds(record):
            return False
        key = TopicPartition(record.topic, record.partition)
        del self._held[key][record.offset]
        if not self._held[key]:
            del self._held[key]
        return True

    def records(self, partitions: Iterable[TopicPartition] | None = None) -> list[ConsumerRecord]:
        """What is in hand, of these partitions or of all."""
        keys = self._held if partitions is None else partitions
        return [record for key in keys for record in self._held.get(key, {}).values()]

    def forget(self, partitions: Iterable[TopicPartition] | None = None) -> None:
        """These, or all, are others' now, or are read again."""
        for key in [*self._held] if partitions is None else partitions:
            self._held.pop(key, None)

    # Saving.

    def commit_soon(self, now: float) -> bool:
        """Begin a commit, when its time has come and the last one is over; whether it did. One that
        failed is logged by the consumer's core, and the next one covers it."""
        if now < self._commit_at or (self._saving is not None and not self._saving.is_done):
            return False
        self._commit_at = now + self._commit_ms
        self._saving = self._core.save(self.unsaved(), now)
        return self._saving is not None

    def wait_ms(self, now: float) -> float:
        """How long to wait for records before the next look at what is to be saved."""
        return min(POLL_MS, max(PAUSE_MS, self._commit_at - now))

    def last_commit(self, partitions: Iterable[TopicPartition], now: float) -> Pending | None:
        """The commit before partitions are given up; None: nothing is to be saved."""
        return self._core.save(self.unsaved(partitions), now)

    def unsaved(self, partitions: Iterable[TopicPartition] | None = None) -> Places:
        """What may be saved of these partitions, or of all, and is not."""
        keys = self._core.assignment if partitions is None else partitions
        firsts = {key: min(held) for key, held in self._held.items()}
        return self._core.settled(keys, firsts)


def place_of(message: ConsumerRecord) -> str:
    """Where a message was read, for people."""
    return f"{message.topic}-{message.partition} at offset {message.offset}"


def reason_of(error: BaseException) -> str:
    """Why a message failed, for its header."""
    return f"{type(error).__name__}: {error}"
