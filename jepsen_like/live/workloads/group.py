"""Consumer groups: poll with subscribe, commits with a generation, rebalances without end.

Members come and go, some of them without a word. A member that is given partitions asks where the
group committed, notes what it was given with these positions, and reads on from there; it commits
what it polled. So histories show that offsets do not go back, that no generation gives a partition
to two members, and that nobody of an older generation commits.
"""

from __future__ import annotations

import contextlib
import random
import struct
import time
from typing import Any, Final

import confluent_kafka
from attrs import define, field

from jepsen_like.history_events import OFFSET_UNKNOWN
from jepsen_like.live.workloads.base import Around, Crowd, key_of, parts_of
from jepsen_like.live.workloads.poll import POLL_RECORDS_MAX, POLL_S, new_consumer, records_of

GROUP: Final = "subscribed"
MEMBERS: Final = 3
LIFE_S: Final = (10.0, 40.0)
COMMIT_EVERY_S: Final = (0.2, 1.5)
ANSWER_S: Final = 5.0
_METADATA: Final = struct.Struct("=7si")
_MAGIC: Final = b"CGMDv2:"


def generation_of(consumer: confluent_kafka.Consumer) -> int:
    """The generation that a consumer believes to be in, -1 when in none."""
    data: Any = consumer.consumer_group_metadata()
    if not isinstance(data, bytes) or len(data) < _METADATA.size:
        return -1
    magic, generation = _METADATA.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError(f"librdkafka tells of its groups in a new way: {data!r}")
    return int(generation)


def partitions_of(keys: list[str]) -> list[confluent_kafka.TopicPartition]:
    """As the client wants them."""
    return [confluent_kafka.TopicPartition(*parts_of(key)) for key in keys]


def committed(
    around: Around, process: int, consumer: confluent_kafka.Consumer, group: str, keys: list[str]
) -> dict[str, int] | None:
    """Ask what a group committed; None when there was no answer."""
    invoked = around.recorder.invoke(process, "committed", group=group, partitions=keys)
    try:
        told = consumer.committed(partitions_of(keys), timeout=ANSWER_S)
    except confluent_kafka.KafkaException as error:
        around.recorder.info(invoked, group=group, error=str(error))
        return None
    errors = {str(partition.error) for partition in told if partition.error is not None}
    if errors:
        around.recorder.info(invoked, group=group, error="; ".join(sorted(errors)))
        return None
    offsets = {
        key_of(p.topic, p.partition): p.offset if p.offset >= 0 else OFFSET_UNKNOWN for p in told
    }
    around.recorder.ok(invoked, group=group, offsets=offsets)
    return offsets


def commit(
    around: Around,
    process: int,
    consumer: confluent_kafka.Consumer,
    group: str,
    offsets: dict[str, int],
    generation: int,
) -> bool:
    """Commit offsets; True when they certainly are.

    The client's own thread asks with the generation that it is in when the request leaves, which
    may be another than the one that was read before: then nobody can say for which it was accepted.
    """
    recorder = around.recorder
    invoked = recorder.invoke(
        process, "commit", group=group, offsets=offsets, generation=generation
    )
    wanted = [confluent_kafka.TopicPartition(*parts_of(key), offsets[key]) for key in offsets]
    try:
        told = consumer.commit(offsets=wanted, asynchronous=False)
    except confluent_kafka.KafkaException as error:
        # Even a refusal may be that of a second try, after a first one that was answered into
        # the void: nobody knows.
        recorder.info(invoked, group=group, error=str(error))
        return False
    errors = {str(partition.error) for partition in told or () if partition.error is not None}
    if errors:
        recorder.info(invoked, group=group, error="; ".join(sorted(errors)))
        return False
    if generation >= 0 and (now := generation_of(consumer)) != generation:
        recorder.info(
            invoked, group=group, error=f"from generation {generation} to {now} meanwhile"
        )
        return False
    recorder.ok(invoked, group=group)
    return True


@define(eq=False)
class _Membership:
    """What one member was given, by its callbacks; they run within its polls."""

    around: Around
    process: int
    owned: set[str] = field(factory=set)
    positions: dict[str, int] = field(factory=dict)
    moved: set[str] = field(factory=set)
    """Partitions that came or went during this poll."""

    def assigned(
        self, consumer: confluent_kafka.Consumer, parts: list[confluent_kafka.TopicPartition]
    ) -> None:
        """The coordinator handed partitions out."""
        keys = sorted(key_of(part.topic, part.partition) for part in parts)
        self.owned = set(keys)
        self.moved |= self.owned
        generation = generation_of(consumer)
        offsets = committed(self.around, self.process, consumer, GROUP, keys) if keys else {}
        if offsets is None:
            consumer.assign(partitions_of(keys))  # the client asks again by itself
            self.positions = {}
        else:
            self.positions = {key: max(0, offset) for key, offset in offsets.items()}
            consumer.assign(
                [confluent_kafka.TopicPartition(*parts_of(k), self.positions[k]) for k in keys]
            )
        self.around.recorder.note(
            self.process,
            "assigned",
            group=GROUP,
            generation=generation,
            partitions=keys,
            offsets=self.positions,
        )

    def revoked(
        self, consumer: confluent_kafka.Consumer, parts: list[confluent_kafka.TopicPartition]
    ) -> None:
        """The group takes everything back, or gave it to others already."""
        keys = sorted(key_of(part.topic, part.partition) for part in parts)
        self.moved |= set(keys)
        self.owned.clear()
        self.positions = {}
        self.around.recorder.note(self.process, "revoked", group=GROUP, partitions=keys)
        with contextlib.suppress(confluent_kafka.KafkaException):  # it may be lost already
            consumer.unassign()


class GroupMembers(Crowd):
    """Members of one group, each in a thread."""

    def __init__(self, around: Around) -> None:
        super().__init__(around, "member", MEMBERS)

    def _run(self, number: int) -> None:
        around = self._around
        rng = random.Random(around.plan.seed * 99 + number)
        # The first member stays, so that the group has somebody to take partitions from.
        while not around.stop.is_set():
            self._live(rng, float("inf") if number == 0 else rng.uniform(*LIFE_S))
            around.stop.wait(rng.uniform(0.1, 3))

    def _live(self, rng: random.Random, seconds: float) -> None:
        around = self._around
        process = around.process()
        consumer = new_consumer(
            around.plan.bootstrap,
            GROUP,
            **{
                "session.timeout.ms": 6_000,
                "heartbeat.interval.ms": 500,
                "client.id": f"member-{process}",
            },
        )
        membership = _Membership(around, process)
        topics = sorted(around.plan.topics)
        try:
            invoked = around.recorder.invoke(process, "subscribe", group=GROUP, topics=topics)
            consumer.subscribe(topics, on_assign=membership.assigned, on_revoke=membership.revoked)
            around.recorder.ok(invoked, group=GROUP, topics=topics)
            ends_at = time.monotonic() + seconds
            next_commit = time.monotonic()
            while time.monotonic() < ends_at and not around.stop.is_set():
                self._poll(process, consumer, membership)
                if time.monotonic() >= next_commit and membership.positions:
                    next_commit = time.monotonic() + rng.uniform(*COMMIT_EVERY_S)
                    self._commit(process, consumer, membership)
        finally:
            consumer.close()
        around.recorder.note(process, "crash", group=GROUP)

    def _poll(
        self, process: int, consumer: confluent_kafka.Consumer, membership: _Membership
    ) -> None:
        around = self._around
        membership.moved.clear()
        invoked = around.recorder.invoke(process, "poll")
        found, errors = records_of(consumer.consume(POLL_RECORDS_MAX, POLL_S))
        around.polled_records += sum(map(len, found.values()))
        around.recorder.ok(
            invoked,
            records=found,
            error="; ".join(sorted(errors)),
            partitions=sorted(membership.moved),
        )
        for key, records in found.items():
            # What came in the poll of a rebalance may be from before it: the position stays.
            if key in membership.owned and key not in membership.moved:
                membership.positions[key] = records[-1][0] + 1

    def _commit(
        self, process: int, consumer: confluent_kafka.Consumer, membership: _Membership
    ) -> None:
        generation = generation_of(consumer)
        if generation >= 0:
            offsets = dict(sorted(membership.positions.items()))
            commit(self._around, process, consumer, GROUP, offsets, generation)
