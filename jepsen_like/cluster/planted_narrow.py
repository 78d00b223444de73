"""Bugs planted in how a topic shrinks and grows: seals, what is gone, what is listed anew, what the
view shows."""

from __future__ import annotations

from typing import Final

from attrs import evolve

from jepsen_like.bug import Bug, patching
from jepsen_like.cluster import stress
from raftmq.metadata import apply_topics, apply_views
from raftmq.metadata.image import PartitionImage, TopicImage
from raftmq.partition.partition import Partition
from raftmq.partition.producer_state import NEWEST, ProducerStateTable
from raftmq.replication.seals import Seal, Seals
from raftmq.server.kafka.views import View
from raftmq.types import Buffer, Offset, RaftIndex


def _open(self: Seals, end: RaftIndex, payload: Buffer) -> None:
    """A seal is known, and keeps nothing out."""
    self.newest, self.end = Seal.decode(payload), end


_grown_well = apply_views.grown


def _from_zero(topic: TopicImage, added: tuple[PartitionImage, ...], offset: Offset) -> TopicImage:
    """A number that is listed anew begins with its first offset again."""
    grown = _grown_well(topic, added, offset)
    fresh = {
        p.index: evolve(p, begins_at=0)
        for p in grown.partitions
        if topic.partition(p.index) is None
    }
    return grown.with_partitions(fresh)


def _in_old_epochs(
    topic: TopicImage, added: tuple[PartitionImage, ...], offset: Offset
) -> TopicImage:
    """It has a folder of its own, and the leader epochs that its first one had."""
    grown = _grown_well(topic, added, offset)
    fresh = {
        p.index: evolve(p, after_epoch=0)
        for p in grown.partitions
        if topic.partition(p.index) is None and p.after_epoch > 0
    }
    return grown.with_partitions(fresh)


def _shows_all(self: View, index: int) -> bool:
    """The view has what is listed, too."""
    return self.topic.partition(index) is not None


_seal_well = Partition.seal


def _never_opened(self: Partition, seal: Seal) -> bool:
    """What is listed again stays sealed."""
    return _seal_well(self, seal) if seal.is_closed else False


def _seal_at_once(self: Partition, seal: Seal) -> bool:
    """A seal does not wait for open transactions."""
    if not self.replica.is_writable:
        return False
    self.replica.seal(seal)
    return True


def _nothing_known(self: ProducerStateTable, bytes_max: int, version: int = NEWEST) -> bytes:
    """A number that is gone forgets who wrote to it."""
    return b""


_newest_well = ProducerStateTable.newest


def _all_but_the_last(self: ProducerStateTable, bytes_max: int, version: int = NEWEST) -> bytes:
    """A number that is gone remembers its producers as they were one batch ago."""
    before = self.copy()
    for producer_id, producer in self.producers():
        before._producers[producer_id] = evolve(producer, batches=producer.batches[:-1])
    return _newest_well(before, bytes_max, version)


NARROW_BUGS: Final[dict[str, Bug]] = {
    "seal-keeps-nothing-out": Bug(
        patching((Seals, "note", _open)), stress.narrows, 2, (), ("NothingBehindASeal",)
    ),
    "gone-with-its-records": Bug(
        patching((Partition, "is_empty", Partition.is_sealed)),
        stress.narrows,
        1,
        (),
        ("GoneIsEmpty",),
    ),
    "number-begins-at-zero": Bug(
        patching((apply_topics, "grown", _from_zero)), stress.narrows, 3, (), ("NumbersGoOn",)
    ),
    "number-in-old-epochs": Bug(
        patching((apply_topics, "grown", _in_old_epochs)), stress.narrows, 3, (), ("NumbersGoOn",)
    ),
    "number-forgets-its-producers": Bug(
        patching((ProducerStateTable, "newest", _nothing_known)),
        stress.narrows,
        7,
        (14,),
        ("SequencesGoOn",),
    ),
    "number-knows-all-but-the-last-batch": Bug(
        patching((ProducerStateTable, "newest", _all_but_the_last)),
        stress.narrows,
        7,
        (14,),
        ("SequencesGoOn",),
    ),
    "listed-again-and-sealed": Bug(
        patching((Partition, "seal", _never_opened)), stress.narrows, 10, (), ("Liveness",)
    ),
    "sealed-within-a-transaction": Bug(
        patching((Partition, "seal", _seal_at_once)),
        stress.narrows_in_transactions,
        5,
        (),
        ("NothingOpenBehindASeal",),
    ),
    "view-of-everything": Bug(
        patching((View, "is_retired", _shows_all)), stress.narrows, 2, (), ("ViewIsTheRest",)
    ),
}
