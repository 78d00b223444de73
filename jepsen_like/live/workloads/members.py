"""Consumers with a group, of both client libraries: what the workloads on groups ask of them.

Partitions are keyed as in histories. What a client cannot tell for certain is an `UnansweredError`.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

import confluent_kafka

from jepsen_like.history_events import OFFSET_UNKNOWN
from jepsen_like.live.workloads.base import (
    Around,
    ClientLog,
    HungError,
    UnansweredError,
    key_of,
    parts_of,
    unless_hung,
)
from jepsen_like.live.workloads.poll import (
    POLL_RECORDS_MAX,
    POLL_S,
    Records,
    new_consumer,
    poll_own,
    records_of,
)
from raftmq.types import TopicPartition
from raftmq_client.blocking import Consumer
from raftmq_client.errors import ClientError

ANSWER_S: Final = 5.0
HANG_S: Final = 45.0
"""librdkafka's commit has no timeout, and may try for ever. One that waits to be sent fails when
the coordinator's address becomes known, as the connection that has none yet is closed for that. It
fails as if that coordinator were gone, which is asked for anew then, and its address forgotten. It
gets out where the answer comes sooner than the next try (`retry.backoff.ms`)."""
RETRY_MS: Final = 500
SESSION_MS: Final = 6_000
HEARTBEAT_MS: Final = 500
POLLS_MS: Final = 60_000
"""One that hangs leaves the group then."""
SENT_MANY: Final = 9
"""Told of a commit that hangs: it may go on and be sent more often than any that ends."""
_SENT: Final = "Sent OffsetCommitRequest"
_METADATA: Final = struct.Struct("=7si")
_MAGIC: Final = b"CGMDv2:"

Handed = Callable[[list[str]], None]
"""Told of keys that were handed out or taken back."""


class GroupConsumer(Protocol):
    """A consumer of one group; a member once it subscribes."""

    @property
    def sent(self) -> int:
        """How often the request of the last commit left, as far as that is told, at least once:
        after a lost answer it is sent again."""

    def generation(self) -> int:
        """The generation that it believes to be in, -1 when in none."""

    def committed(self, keys: list[str]) -> dict[str, int]:
        """What the group committed, `OFFSET_UNKNOWN` where nothing."""

    def commit(self, offsets: dict[str, int]) -> None:
        """Commit these."""

    def subscribe(self, topics: list[str], given: Handed, taken: Handed) -> None:
        """Be a member; `given` and `taken` are called within `take`."""

    def start(self, positions: dict[str, int] | None, keys: list[str]) -> None:
        """Within `given`: read these, from these positions or, without any, from the commits."""

    def take(self) -> tuple[Records, set[str]]:
        """What there is, and what went wrong."""

    def close(self) -> None:
        """Leave, and end it."""


def group_consumer(
    around: Around, number: int, group: str, client_id: str, *, is_member: bool = True
) -> GroupConsumer:
    """Every third one is of our own client library. One that is no member never subscribes."""
    if number % 3 == 2:
        return OwnClient(around, group, client_id)
    return Librdkafka(around, group, client_id, is_member=is_member)


def _partitions(keys: list[str]) -> list[confluent_kafka.TopicPartition]:
    return [confluent_kafka.TopicPartition(*parts_of(key)) for key in keys]


def _check(told: list[confluent_kafka.TopicPartition] | None) -> None:
    errors = {str(partition.error) for partition in told or () if partition.error is not None}
    if errors:
        raise UnansweredError("; ".join(sorted(errors)))


class Librdkafka:
    """One of confluent-kafka.

    It tells in its log alone what it sends, and hands that out in polls alone. So only who is no
    member, whose polls bring nothing else, knows how often a commit left. A member's commits of a
    partition never overlap, and other generations' are fenced: sent twice says no more there.
    """

    def __init__(
        self, around: Around, group: str, client_id: str, *, is_member: bool = True
    ) -> None:
        self._around = around
        self._counts = not is_member
        self._sent = 0
        self.sent = 1
        self._name = client_id
        self._is_hung = False
        told: dict[str, Any] = {}
        if self._counts:
            logger = ClientLog(client_id, self._heard)
            told = {"debug": "protocol", "log_level": 7, "logger": logger}
        self._consumer = new_consumer(
            around.plan.bootstrap,
            group,
            **{
                "session.timeout.ms": SESSION_MS,
                "heartbeat.interval.ms": HEARTBEAT_MS,
                "max.poll.interval.ms": POLLS_MS,
                "retry.backoff.ms": RETRY_MS,
                "retry.backoff.max.ms": 2 * RETRY_MS,
                "client.id": client_id,
                **told,
            },
        )

    def generation(self) -> int:
        """As its opaque metadata has it."""
        data: Any = self._consumer.consumer_group_metadata()
        if not isinstance(data, bytes) or len(data) < _METADATA.size:
            return -1
        magic, generation = _METADATA.unpack_from(data)
        if magic != _MAGIC:
            raise ValueError(f"librdkafka tells of its groups in a new way: {data!r}")
        return int(generation)

    def committed(self, keys: list[str]) -> dict[str, int]:
        """What the group committed."""
        try:
            told = self._consumer.committed(_partitions(keys), timeout=ANSWER_S)
        except confluent_kafka.KafkaException as error:
            raise UnansweredError(str(error)) from error
        _check(told)
        return {
            key_of(p.topic, p.partition): p.offset if p.offset >= 0 else OFFSET_UNKNOWN
            for p in told
        }

    def commit(self, offsets: dict[str, int]) -> None:
        """Commit these."""
        wanted = [confluent_kafka.TopicPartition(*parts_of(key), offsets[key]) for key in offsets]
        ask = partial(self._consumer.commit, offsets=wanted, asynchronous=False)
        self._sent = 0
        self.sent = SENT_MANY if self._counts else 1
        try:
            told = unless_hung(self._around, f"commit of {self._name}", HANG_S, ask)
        except confluent_kafka.KafkaException as error:
            raise UnansweredError(str(error)) from error
        except HungError:
            self._is_hung = True
            raise
        finally:
            self._count()
        _check(told)

    def _count(self) -> None:
        """Have the log handed out; what was sent before a call ended is in it by then."""
        if self._counts and not self._is_hung:
            self._consumer.poll(0)
            self.sent = max(1, self._sent)

    def _heard(self, text: str) -> None:
        self._sent += _SENT in text

    def subscribe(self, topics: list[str], given: Handed, taken: Handed) -> None:
        """Be a member."""

        def assigned(_: object, parts: list[confluent_kafka.TopicPartition]) -> None:
            given(sorted(key_of(part.topic, part.partition) for part in parts))

        def revoked(_: object, parts: list[confluent_kafka.TopicPartition]) -> None:
            taken(sorted(key_of(part.topic, part.partition) for part in parts))
            with contextlib.suppress(confluent_kafka.KafkaException):  # it may be lost already
                self._consumer.unassign()

        self._consumer.subscribe(topics, on_assign=assigned, on_revoke=revoked)

    def start(self, positions: dict[str, int] | None, keys: list[str]) -> None:
        """Without positions it asks again by itself."""
        parts = _partitions(keys)
        for part in parts if positions is not None else ():
            part.offset = (positions or {})[key_of(part.topic, part.partition)]
        self._consumer.assign(parts)

    def take(self) -> tuple[Records, set[str]]:
        """What there is."""
        return records_of(self._consumer.consume(POLL_RECORDS_MAX, POLL_S))

    def close(self) -> None:
        """Leave. One that hangs would hang here, too: its thread holds it for ever."""
        if not self._is_hung:
            self._consumer.close()


class OwnClient:
    """One of `raftmq_client`."""

    def __init__(self, around: Around, group: str, client_id: str) -> None:
        self._stop = around.stop
        self.sent = 1
        self._given: Handed = _nobody
        self._taken: Handed = _nobody
        self._consumer = Consumer(
            around.plan.bootstrap,
            group=group,
            client_id=client_id,
            reset="earliest",
            auto_commit_ms=None,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            max_wait_ms=200,
            metadata_max_age_ms=5_000,
            on_assigned=lambda parts: self._given(_keys(parts)),
            on_revoked=lambda parts: self._taken(_keys(parts)),
        )

    def generation(self) -> int:
        """As the member knows it."""
        return self._consumer.generation

    def committed(self, keys: list[str]) -> dict[str, int]:
        """What the group committed."""
        parts = [TopicPartition(*parts_of(key)) for key in keys]
        try:
            told = self._consumer.committed(parts, timeout=ANSWER_S)
        except ClientError as error:
            raise UnansweredError(str(error)) from error
        return {key: told.get(TopicPartition(*parts_of(key)), OFFSET_UNKNOWN) for key in keys}

    def commit(self, offsets: dict[str, int]) -> None:
        """Commit these."""
        wanted = {TopicPartition(*parts_of(key)): offset for key, offset in offsets.items()}
        group = self._consumer._core.need_group()
        before = group.commits_sent
        try:
            self._consumer.commit(wanted, timeout=ANSWER_S)
        except ClientError as error:
            raise UnansweredError(str(error)) from error
        finally:
            self.sent = max(1, group.commits_sent - before)

    def subscribe(self, topics: list[str], given: Handed, taken: Handed) -> None:
        """Be a member."""
        self._given, self._taken = given, taken
        self._consumer.subscribe(topics)

    def start(self, positions: dict[str, int] | None, keys: list[str]) -> None:
        """Without positions it begins where it asked itself."""
        for key in keys if positions is not None else ():
            self._consumer.seek(TopicPartition(*parts_of(key)), (positions or {})[key])

    def take(self) -> tuple[Records, set[str]]:
        """What there is."""
        return poll_own(self._consumer, self._stop)

    def close(self) -> None:
        """Leave."""
        self._consumer.close()


def _keys(parts: tuple[TopicPartition, ...]) -> list[str]:
    return sorted(key_of(part.topic, part.partition) for part in parts)


def _nobody(_keys: list[str]) -> None:
    """Told of nothing before it subscribes."""
