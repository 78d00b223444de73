"""What a partition answers, in the cluster's own words; handlers turn them into Kafka's structs."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from raftmq.errors import ErrorCode
from raftmq.ports import Runnable, Span
from raftmq.types import LeaderEpoch, Offset

NO_OFFSET = Offset(-1)
NO_EPOCH = LeaderEpoch(-1)
NO_TIMESTAMP = -1


class FileSpan(Span, Protocol):
    """Whole batches of a segment (`log.FileSpan`)."""

    @property
    def base_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...


@frozen(slots=True)
class ReadResult:
    """One partition's part of a Fetch."""

    code: ErrorCode
    high_watermark: Offset = NO_OFFSET
    log_start_offset: Offset = NO_OFFSET
    spans: tuple[FileSpan, ...] = ()
    size: int = 0
    record_count: int = 0
    """Offsets from the wanted one on that `spans` cover."""
    diverging: tuple[LeaderEpoch, Offset] | None = None
    job: Runnable | None = None
    """Bytes must be read or checked first, in a worker; then `Partition.prepared`, and again."""


@frozen(slots=True)
class OffsetResult:
    """One partition's part of a ListOffsets."""

    code: ErrorCode
    offset: Offset = NO_OFFSET
    timestamp: int = NO_TIMESTAMP
    leader_epoch: LeaderEpoch = NO_EPOCH
    job: Runnable | None = None
    """As `ReadResult.job`."""


@frozen(slots=True)
class EpochEnd:
    """One partition's part of an OffsetForLeaderEpoch."""

    code: ErrorCode
    leader_epoch: LeaderEpoch = NO_EPOCH
    end_offset: Offset = NO_OFFSET


@frozen(slots=True)
class DeleteResult:
    """One partition's part of a DeleteRecords."""

    code: ErrorCode
    low_watermark: Offset = NO_OFFSET
