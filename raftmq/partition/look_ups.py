"""Look-ups in a replica's log: offsets by time, where epochs begin and end, and what that means to
a reader whose position does not fit."""

from __future__ import annotations

from typing import Final

from raftmq.errors import ErrorCode, KafkaError
from raftmq.partition.ports import OffsetResult, ReplicaPort
from raftmq.ports import DiskError
from raftmq.types import LeaderEpoch, Offset

MAX_TIMESTAMP: Final = -3
FIRST_EPOCH: Final = 1
"""No leader is ever elected in term 0. On Kafka 0 is the epoch of a partition's first leader, and
some clients send 0 where they set none; so here it means the same as 1."""


def look_up(replica: ReplicaPort, timestamp: int, end: Offset, *, may_wait: bool) -> OffsetResult:
    """The first offset below `end` whose record has that timestamp or a later one; with
    MAX_TIMESTAMP the one that has the greatest."""
    log = replica.log
    try:
        if not may_wait and timestamp >= MAX_TIMESTAMP:
            job = log.lookup_ahead(None if timestamp == MAX_TIMESTAMP else timestamp, end)
            if job is not None:
                return OffsetResult(ErrorCode.NONE, job=job)
        if timestamp == MAX_TIMESTAMP:
            found = log.max_timestamp(end)
        elif timestamp >= 0:
            found = log.offset_for_timestamp(timestamp, end)
        else:
            return OffsetResult(ErrorCode.UNSUPPORTED_VERSION)
    except KafkaError as error:
        return OffsetResult(error.code)
    except DiskError:
        return OffsetResult(ErrorCode.KAFKA_STORAGE_ERROR)
    if found is None:
        return OffsetResult(ErrorCode.NONE)
    found_timestamp, offset, epoch = found
    if offset < replica.log_start_offset:
        # It is deleted and still in the log, and the first one that stays is not known yet.
        return OffsetResult(ErrorCode.OFFSET_NOT_AVAILABLE)
    return OffsetResult(ErrorCode.NONE, offset, found_timestamp, epoch)


def end_of(replica: ReplicaPort, epoch: LeaderEpoch) -> tuple[LeaderEpoch, Offset]:
    """The greatest known epoch not above `epoch`, and its end.

    An epoch older than the whole log ended where the log starts, as in Kafka. Where nothing was
    cut from the log no record had an older epoch than the first one, so an older epoch means
    that record's.
    """
    log = replica.log
    first = FIRST_EPOCH if log.log_start.index else epoch_at(replica, log.log_start.base_offset)
    found = log.end_offset_for_epoch(LeaderEpoch(max(epoch, first)))
    if found is None:
        return epoch, replica.log_start_offset
    return min(epoch, found[0]), found[1]


def diverging_end(
    replica: ReplicaPort, offset: Offset, epoch: LeaderEpoch
) -> tuple[LeaderEpoch, Offset] | None:
    """Where a reader's log and this one part, by epoch and end; None where they agree (KIP-595).

    Args:
        offset: where the reader stands.
        epoch: of its record before that.
    """
    # Not cut at the high watermark: a new leader may not know yet how far its log is committed,
    # and that log agrees with everything that a consumer was given.
    known_epoch, end = end_of(replica, epoch)
    return (known_epoch, end) if known_epoch < epoch or end < offset else None


def code_outside(replica: ReplicaPort, offset: Offset, start: Offset, end: Offset) -> ErrorCode:
    """What a reader at an offset outside `[start, end]` is told."""
    if start <= offset <= replica.log_end_offset:
        return ErrorCode.NONE if replica.is_leader else ErrorCode.OFFSET_NOT_AVAILABLE
    if offset > end and not replica.is_writable:
        # It may be behind: a follower, or a leader that was replaced and does not know it.
        return ErrorCode.OFFSET_NOT_AVAILABLE
    return ErrorCode.OFFSET_OUT_OF_RANGE


def epoch_at(replica: ReplicaPort, offset: Offset) -> LeaderEpoch:
    """The epoch of the record at an offset, or that of the next one."""
    if offset >= replica.log_end_offset:
        return replica.leader_epoch
    return replica.log.epoch_at(offset)
