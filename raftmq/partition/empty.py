"""A number of a view under which there is nothing to read.

Clients take a topic with a hole for a broken one, so a view has all numbers from 0 on. Wherever a
reader of such a number stands, its log ends there: it is never sent elsewhere, since the number may
have records again, from where that reader stands or after it.
"""

from __future__ import annotations

from typing import Any, Final, cast
from uuid import UUID

from raftmq.errors import ErrorCode
from raftmq.partition.parked import Deadlines
from raftmq.partition.partition import Partition
from raftmq.partition.ports import (
    NO_OFFSET,
    AppendResult,
    EpochEnd,
    OffsetResult,
    ReadResult,
    ReplicaPort,
)
from raftmq.partition.settings import PartitionSettings
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.types import LeaderEpoch, NodeId, Offset, RaftGroupId, TopicId, TopicPartition

_FAR: Final = Offset((1 << 63) - 1)
_NO_GROUP: Final = TopicId(UUID(int=0))


class _Nothing:
    """What readers ask of a replica."""

    leader_epoch: Final = LeaderEpoch(1)
    log_start_offset: Final = Offset(0)


class EmptyPartition(Partition):
    """Stands for every number that would have its log end at `end`."""

    def __init__(self, index: int, end: Offset, deadlines: Deadlines, clock: Clock) -> None:
        super().__init__(
            TopicPartition("", index),
            RaftGroupId(_NO_GROUP, index, 0),
            NodeId(-1),
            settings=PartitionSettings(),
            deadlines=deadlines,
            clock=clock,
            on_broken_invariant=lambda _why: None,
            is_internal=True,
        )
        self._end = end

    @property
    def replica(self) -> ReplicaPort:
        """There is none: only what readers ask of it."""
        return cast(ReplicaPort, _Nothing())

    @property
    def is_leader(self) -> bool:
        """True: every node can tell that there is nothing."""
        return True

    @property
    def serves_fetches(self) -> bool:
        """True, likewise."""
        return True

    @property
    def readable_end(self) -> Offset:
        """Before every reader."""
        return Offset(0)

    @property
    def stable_end(self) -> Offset:
        """Before every reader."""
        return Offset(0)

    def read(self, offset: Offset, bytes_max: int, **_how: Any) -> ReadResult:
        """Nothing, and no reason to go elsewhere."""
        return ReadResult(ErrorCode.NONE, offset, Offset(0), last_stable_offset=offset)

    def list_offset(self, timestamp: int, **_how: Any) -> OffsetResult:
        """Begin and end are one; no record has a time."""
        return OffsetResult(ErrorCode.NONE, self._end if timestamp < 0 else NO_OFFSET)

    def end_offset_for_epoch(self, epoch: int, **_how: Any) -> EpochEnd:
        """No epoch contradicts a reader's position."""
        return EpochEnd(ErrorCode.NONE, LeaderEpoch(max(epoch, 0)), _FAR)

    def acknowledged(self, _timeout_ms: int) -> Promise[AppendResult] | None:
        """None: there is nothing to wait for."""
        return None
