"""What a partition needs of the replica behind it, and what it answers.

`LogPort` and `ReplicaPort` are Protocols: `replication/replica.py` and `log/replicated_log.py` are
real, tests have fakes. The results are in the broker's own words; handlers turn them into Kafka's
structs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from attrs import frozen

from raftmq.errors import ErrorCode, KafkaError, RecordsRefusedError
from raftmq.log.aborted import Aborted, UntoldError
from raftmq.log.log_start import LogStart
from raftmq.log.reader import TimestampJob
from raftmq.log.verification import VerifyJob
from raftmq.ports import File, Runnable, Span
from raftmq.promise import Promise
from raftmq.records import BatchHeader, Marker
from raftmq.replication.seals import Seal
from raftmq.types import Buffer, LeaderEpoch, Offset, RaftIndex, ReplicaId

NO_OFFSET = Offset(-1)
NO_EPOCH = LeaderEpoch(-1)
NO_TIMESTAMP = -1


class AbortedPort(Protocol):
    """Which transactions were aborted, as the log keeps it (`log/aborted.py`)."""

    def tell(self, start: int, end: int, found: Sequence[Aborted] = ()) -> None: ...
    def between(self, start: int, end: int) -> list[Aborted]: ...
    def untold(self) -> UntoldError | None: ...
    def cold(self, start: int, end: int) -> list[tuple[File, int, int]]: ...
    def write(self) -> None: ...


class LogPort(Protocol):
    """What a partition reads of its replica's log."""

    @property
    def log_start(self) -> LogStart: ...
    @property
    def flushed_end_offset(self) -> Offset: ...
    @property
    def log_end_offset(self) -> Offset: ...
    @property
    def size_bytes(self) -> int: ...
    def locate(
        self,
        offset: Offset,
        bytes_max: int,
        end: Offset,
        *,
        at_least_one: bool = True,
        may_check: bool = True,
    ) -> Sequence[FileSpan]: ...
    def past_holes(self, offset: Offset) -> Offset: ...
    def records_end(self, end: Offset) -> Offset: ...
    def end_offset_for_epoch(self, epoch: LeaderEpoch) -> tuple[LeaderEpoch, Offset] | None: ...
    def epoch_at(self, offset: Offset) -> LeaderEpoch: ...
    def offset_for_timestamp(
        self, timestamp_ms: int, end: Offset
    ) -> tuple[int, Offset, LeaderEpoch] | None: ...
    def max_timestamp(self, end: Offset) -> tuple[int, Offset, LeaderEpoch] | None: ...
    def headers(self, start: Offset, end: Offset) -> Iterator[BatchHeader]: ...
    def check_stored(self, offset: Offset) -> None: ...
    def marker(self, offset: Offset) -> Marker: ...
    @property
    def aborted(self) -> AbortedPort: ...
    def index_of(self, offset: Offset) -> RaftIndex: ...
    def read_ahead(self, offset: Offset, bytes_max: int) -> Runnable | None: ...
    def lookup_ahead(self, timestamp_ms: int | None, end: Offset) -> Runnable | None: ...
    def needs_verification(
        self, offset: Offset, bytes_max: int, wanted: int = 1
    ) -> VerifyJob | None: ...
    def checked(self, job: VerifyJob) -> object: ...
    def timestamp_job(self, offset: Offset) -> TimestampJob: ...


class ReplicaPort(Protocol):
    """What a partition needs of its replica (`replication/replica.py`)."""

    @property
    def log(self) -> LogPort: ...
    @property
    def is_leader(self) -> bool: ...
    @property
    def is_writable(self) -> bool: ...
    @property
    def is_handing_over(self) -> bool: ...
    @property
    def leader(self) -> ReplicaId | None: ...
    @property
    def leader_epoch(self) -> LeaderEpoch: ...
    @property
    def high_watermark(self) -> Offset: ...
    @property
    def log_end_offset(self) -> Offset: ...
    @property
    def log_start_offset(self) -> Offset: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def voters(self) -> Sequence[ReplicaId]: ...
    def in_sync_replicas(self) -> Sequence[ReplicaId]: ...
    def voters_clocks_ms(self) -> Sequence[int]: ...
    def append_time_ms(self) -> int: ...
    def flushed_voters(self, end: RaftIndex) -> int: ...
    def append(self, batch: bytearray | memoryview, header: BatchHeader) -> Offset: ...
    def stand_last(self, is_last: bool, /) -> None: ...
    def move_log_start(self, target: Offset) -> object: ...
    def seal(self, seal: Seal) -> object: ...
    @property
    def newest_seal(self) -> Seal | None: ...
    @property
    def is_seal_committed(self) -> bool: ...
    def damage_found(self) -> None: ...
    def fail(self, reason: str) -> None: ...
    def read_barrier(self) -> Promise[RaftIndex]: ...


class FileSpan(Span, Protocol):
    """Whole batches of a segment (`log.FileSpan`)."""

    @property
    def base_offset(self) -> int: ...
    @property
    def end_offset(self) -> int: ...


@frozen(slots=True)
class AppendResult:
    """What a producer is told about one batch."""

    code: ErrorCode
    base_offset: Offset = NO_OFFSET
    log_append_time_ms: int = NO_TIMESTAMP
    log_start_offset: Offset = NO_OFFSET
    message: str | None = None
    record_errors: tuple[tuple[int, str], ...] = ()
    """(index in the batch, reason) of the records for which it was refused, where known."""

    @classmethod
    def refused(cls, error: KafkaError) -> AppendResult:
        """The result for a batch that is refused with this error."""
        records = error.records if isinstance(error, RecordsRefusedError) else ()
        return cls(error.code, message=error.message, record_errors=records)


@frozen(slots=True)
class ReadResult:
    """One partition's part of a Fetch."""

    code: ErrorCode
    high_watermark: Offset = NO_OFFSET
    log_start_offset: Offset = NO_OFFSET
    spans: tuple[FileSpan, ...] = ()
    size: int = 0
    record_count: int = 0
    """How many offsets from the wanted one on `spans` cover."""
    diverging: tuple[LeaderEpoch, Offset] | None = None
    job: Runnable | None = None
    """To be run in a worker, since bytes must be read or checked first; then call
    `Partition.prepared`, and read again."""
    last_stable_offset: Offset = NO_OFFSET
    """Where readers of committed records must stop; `NO_OFFSET` while that is not known."""
    aborted: Sequence[Aborted] = ()
    """What such a reader has to pass over, by first offset."""
    pieces: tuple[FileSpan | Buffer, ...] = ()
    """In the place of `spans`, where batches may have been made anew (`filtered.py`)."""


@frozen(slots=True)
class OffsetResult:
    """One partition's part of a ListOffsets."""

    code: ErrorCode
    offset: Offset = NO_OFFSET
    timestamp: int = NO_TIMESTAMP
    leader_epoch: LeaderEpoch = NO_EPOCH
    job: Runnable | None = None
    """As `ReadResult.job`."""
    later: Promise[OffsetResult] | None = None
    """Settled with the answer, in its place."""


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
