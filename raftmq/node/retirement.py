"""What this node owes as the leader of partitions that close, are sealed, or are listed again.

Metadata holds the order, the partition's own log the fact. A leader compares the two: it orders the
seal once nobody has written for the quiet time, writes it, or its end, into the log, and reports
what is committed there, up to the moment when nothing is left. Nothing is remembered that the next
leader would miss: it finds the order in its image and the seal in its log, and gives writers the
whole quiet time again.

Invariants: what is reported is committed, by a leader that knows its high watermark; a report names
the order that it obeyed. An order that is older than the newest seal of the log is not obeyed: this
node's image is behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from attrs import frozen

from raftmq.errors import KafkaError
from raftmq.logs import structlog
from raftmq.metadata.commands import (
    KNOWN_BYTES_MAX,
    AnyCommand,
    PartitionState,
    ReportGone,
    ReportSealed,
    SealPartitions,
    SealReport,
)
from raftmq.metadata.engine import MetadataEngine
from raftmq.metadata.image import (
    EMPTY_IMAGE,
    KNOWN_IN_ALL_BYTES_MAX,
    LEVEL_OF_KNOWN_PRODUCERS,
    LEVEL_OF_VIEWS,
    MetadataImage,
    PartitionImage,
)
from raftmq.partition.partition import Partition
from raftmq.partition.registry import PartitionRegistry
from raftmq.promise import Promise
from raftmq.replication.seals import Seal
from raftmq.types import Offset, RaftGroupId

LOOK_MS: Final = 250.0
"""How often what this node leads is looked at."""
FOLLOW_MS: Final = 2_000.0
"""How often topics that changed are looked through where there is no view: a node that was away may
have missed that one came and went."""
_OPEN: Final = (PartitionState.ACTIVE, PartitionState.CLOSING)

logger = structlog.get_logger("raftmq.partitions")


@frozen(slots=True)
class _Writes:
    """Where a closing partition's log ended in a term, and since when."""

    leader_epoch: int
    state_version: int
    end: Offset
    since_ms: float


class Retirement:
    """Of all partitions of one node."""

    def __init__(
        self,
        engine: MetadataEngine,
        registry: PartitionRegistry,
        broker_epoch: Callable[[], int],
        quiet_ms: Callable[[str], float],
    ) -> None:
        """`quiet_ms` tells of a topic for how long nobody must have written before the seal."""
        self._engine = engine
        self._registry = registry
        self._broker_epoch = broker_epoch
        self._quiet_ms = quiet_ms
        self._image: MetadataImage = EMPTY_IMAGE
        self._watched: dict[RaftGroupId, PartitionImage] = {}
        """Those whose state was ever changed, by group."""
        self._writes: dict[RaftGroupId, _Writes] = {}
        self._under_way: set[RaftGroupId] = set()
        self._look_at_ms = self._follow_at_ms = 0.0

    def tick(self, now_ms: float) -> None:
        """Do what is due."""
        if now_ms < self._look_at_ms:
            return
        self._look_at_ms = now_ms + LOOK_MS
        self._follow(now_ms)
        for group, wanted in self._watched.items():
            partition = self._registry.by_group(group)
            if partition is None or not partition.is_leader:
                self._writes.pop(group, None)
            elif group not in self._under_way:
                self._look(group, wanted, partition, now_ms)

    def _follow(self, now_ms: float) -> None:
        """Learn which partitions have a state; seldom, where nobody shrinks a topic."""
        before, image = self._image, self._engine.image
        if image.level < LEVEL_OF_VIEWS or before.topics is image.topics:
            return
        is_shrinking = image.has_retired or before.has_retired or self._watched
        if not is_shrinking and now_ms < self._follow_at_ms:
            return
        self._image, self._follow_at_ms = image, now_ms + FOLLOW_MS
        gone = [group for group in self._watched if not self._is_there(group)]
        for group in gone:
            del self._watched[group]
            self._writes.pop(group, None)
        for name, topic in image.topics.items():
            if before.topics.get(name) is topic:
                continue
            for partition in topic.held:
                if partition.state_version >= 0:
                    self._watched[topic.group_id(partition.index)] = partition

    def _is_there(self, group: RaftGroupId) -> bool:
        topic = self._image.topic_by_id(group.topic_id)
        return topic is not None and topic.has(group)

    def _look(
        self, group: RaftGroupId, wanted: PartitionImage, partition: Partition, now_ms: float
    ) -> None:
        newest, state = partition.replica.newest_seal, wanted.state
        known = -1 if newest is None else newest.version
        if known > wanted.state_version:
            return  # this node's image is behind
        is_closed = newest is not None and newest.is_closed
        if state in _OPEN and is_closed:
            self._write(partition, Seal(wanted.state_version, is_closed=False))
        elif state is PartitionState.CLOSING:
            self._close(group, wanted, partition, now_ms)
        elif known < wanted.state_version:
            # Of one that is sealed only unsafe recovery can have lost the seal.
            if state not in _OPEN:
                self._write(partition, Seal(wanted.state_version, is_closed=True))
        elif state is PartitionState.SEALING:
            self._report_sealed(group, wanted, partition)
        elif state is PartitionState.SEALED and partition.is_empty:
            self._report_gone(group, wanted, partition)

    # ---- closing ----

    def _close(
        self, group: RaftGroupId, wanted: PartitionImage, partition: Partition, now_ms: float
    ) -> None:
        """Order the seal once nobody has written for long enough, as far as this leader saw."""
        replica = partition.replica
        seen = self._writes.get(group)
        now = (replica.leader_epoch, wanted.state_version, replica.log_end_offset)
        if seen is None or (seen.leader_epoch, seen.state_version, seen.end) != now:
            self._writes[group] = _Writes(*now, now_ms)
        elif now_ms - seen.since_ms >= self._quiet_ms(partition.name.topic):
            chosen = ((group.partition, group.creation_epoch),)
            command = SealPartitions(topic_id=group.topic_id, partitions=chosen)
            self._propose(group, partition, command, "seal ordered")

    # ---- the log ----

    def _write(self, partition: Partition, seal: Seal) -> None:
        try:
            if partition.seal(seal):
                self._tell("sealed" if seal.is_closed else "opened again", partition)
        except KafkaError as error:
            logger.info("a seal waits", partition=str(partition.name), why=str(error))

    # ---- reports ----

    def _report_sealed(
        self, group: RaftGroupId, wanted: PartitionImage, partition: Partition
    ) -> None:
        if partition.is_sealed:
            report = _report(group, wanted, partition)
            self._propose(group, partition, ReportSealed(reports=(report,)), "seal committed")

    def _report_gone(
        self, group: RaftGroupId, wanted: PartitionImage, partition: Partition
    ) -> None:
        """With what the log knows of producers where it ends, which nothing can change any more:
        that of the next partition of this number begins with it."""
        producers: tuple[bytes, ...] = ()
        if self._engine.image.level >= LEVEL_OF_KNOWN_PRODUCERS:
            if not partition.knows_producers:
                return  # it is read back meanwhile
            known = partition.producers.newest(KNOWN_BYTES_MAX)
            producers = (known,) if known and self._has_room(partition, len(known)) else ()
        command = ReportGone(reports=(_report(group, wanted, partition),), producers=producers)
        self._propose(group, partition, command, "nothing is left")

    def _has_room(self, partition: Partition, size_bytes: int) -> bool:
        """Metadata decides that for itself; what it would not keep is not sent."""
        if self._engine.image.known_bytes + size_bytes <= KNOWN_IN_ALL_BYTES_MAX:
            return True
        logger.warning(
            "no room for the producers of a partition that is gone",
            topic=partition.name.topic,
            partition=partition.name.partition,
        )
        return False

    def _propose(
        self, group: RaftGroupId, partition: Partition, command: AnyCommand, what: str
    ) -> None:
        self._under_way.add(group)

        def done(promise: Promise[Any]) -> None:
            # Whatever came of it: the next look compares again.
            self._under_way.discard(group)
            if promise.error is None:
                self._tell(what, partition)

        epoch = self._broker_epoch()
        self._engine.propose(command, broker_epoch=epoch).when_done(done)

    def _tell(self, what: str, partition: Partition) -> None:
        name = partition.name
        logger.info("partition retires", topic=name.topic, partition=name.partition, step=what)


def _report(group: RaftGroupId, wanted: PartitionImage, partition: Partition) -> SealReport:
    return SealReport(
        group.topic_id,
        group.partition,
        group.creation_epoch,
        wanted.state_version,
        partition.replica.log_end_offset,
        partition.replica.leader_epoch,
    )
