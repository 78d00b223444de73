"""The Kafka meaning of a replica: acknowledgements, parked requests, offsets, epochs, idempotence.

A Raft group agrees on a log; this says what of it clients may see and what they are told. It is the
state machine of a data partition: the replica tells it what was appended, truncated and committed
and who leads; handlers append to it and read from it. Synchronous: what takes longer is a Promise.

Invariants: nothing at or above the high watermark is served; a produce with acks=all is
acknowledged only when the high watermark covers its end and min.insync.replicas voters flushed it;
when leadership or its term changes every parked produce is failed, its outcome unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from raftmq.counts import ReplicaCounts, TopicCounts
from raftmq.errors import ErrorCode, KafkaError
from raftmq.log.aborted import Aborted
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError, LogEntry
from raftmq.log.prefetch import IndexJob, WarmJob
from raftmq.log.verification import VerifyJob
from raftmq.partition.look_ups import (
    FIRST_EPOCH,
    code_outside,
    diverging_end,
    end_of,
    epoch_at,
    look_up,
)
from raftmq.partition.parked import (
    Deadlines,
    ParkedDeletes,
    ParkedEnds,
    ParkedFetches,
    ParkedProduces,
)
from raftmq.partition.ports import (
    AppendResult,
    DeleteResult,
    EpochEnd,
    FileSpan,
    OffsetResult,
    ReadResult,
    ReplicaPort,
)
from raftmq.partition.produce_checks import (
    MUST_OPEN,
    BatchOpening,
    OpenedBatch,
    OpeningWorkers,
    Waits,
    check_own_batch,
    check_produced_batch,
    check_timestamps,
    prepare,
)
from raftmq.partition.producer_state import (
    NEWEST,
    NO_OFFSET,
    OLDEST,
    Duplicate,
    Producer,
    ProducerCheckpoints,
    ProducerStateTable,
    Verdict,
    check_encoded,
)
from raftmq.partition.producers import PartitionProducers
from raftmq.partition.settings import PartitionSettings
from raftmq.partition.transactions import (
    NEWEST_PRODUCE,
    NO_TRANSACTIONS,
    Decided,
    RunningTransactions,
    TransactionsPort,
)
from raftmq.ports import Buggify, Clock, DiskError, Runnable, never
from raftmq.promise import Promise
from raftmq.raft.messages import EntryKind, Role, SoftState
from raftmq.records import (
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    BatchHeader,
    Marker,
    build_marker,
    parse_header,
    set_log_append_time,
)
from raftmq.replication.broken_invariants import ReportBroken, reports_assertions, reports_bugs
from raftmq.replication.seals import Seal
from raftmq.types import (
    LeaderEpoch,
    NodeId,
    Offset,
    RaftGroupId,
    RaftIndex,
    TopicId,
    TopicPartition,
)

ACKS_ALL: Final = -1
LATEST: Final = -1
EARLIEST: Final = -2
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5

MEND_AGAIN_MS: Final = 5_000.0
"""After so long a table that follows from damage is read anew again, where that failed."""
CHECK_AHEAD_BYTES: Final = 4 << 20


class Partition:
    """One topic partition on this node."""

    def __init__(
        self,
        name: TopicPartition,
        group: RaftGroupId,
        node_id: NodeId,
        *,
        settings: PartitionSettings,
        deadlines: Deadlines,
        clock: Clock,
        on_broken_invariant: ReportBroken,
        checkpoints: ProducerCheckpoints | None = None,
        counts: TopicCounts | None = None,
        replica_counts: ReplicaCounts | None = None,
        workers: OpeningWorkers | None = None,
        transactions: TransactionsPort = NO_TRANSACTIONS,
        stamp_ms: Callable[[], int | None] = lambda: None,
        is_internal: bool = False,
        buggify: Buggify = never,
    ) -> None:
        """Make the state machine; `attach` its replica before any other call.

        `stamp_ms` tells the time of appends to delay topics. An internal partition shows a log that
        another state machine owns (the metadata group's), which wakes fetches; no client writes.
        """
        self.name = name
        self.topic_id: TopicId = group.topic_id
        self.index = group.partition
        self.group = group
        self.node_id = node_id
        self.settings = settings
        self.counts = counts or TopicCounts()
        self.on_broken_invariant = on_broken_invariant
        self._replica_counts = replica_counts or ReplicaCounts()
        self.fetches = ParkedFetches(deadlines)
        self._producers = PartitionProducers(
            checkpoints or ProducerCheckpoints(),
            clock,
            lambda: NEWEST if transactions.is_offered else OLDEST,
        )
        self._produces = ParkedProduces(deadlines)
        self._fsync_produces = ParkedProduces(deadlines)  # acks=1 with raftmq.acks1.fsync
        self._deletes = ParkedDeletes(deadlines)
        self._end_lookups = ParkedProduces(deadlines)  # they wait as a produce would
        self._ends = ParkedEnds()  # of transactions
        self._transactions = RunningTransactions(transactions, group.topic_id, group.partition)
        self._acknowledged_end = Offset(0)  # records below it were, perhaps before a flush
        self._buggify = buggify
        self._delay_ms = stamp_ms
        self._opening = BatchOpening(
            workers,
            clock,
            deadlines,
            self._settings_in_force,
            self._append,
            self._producers.refused,
        )
        self.is_internal = is_internal
        """True for the metadata log, which no client writes."""
        self._deadlines = deadlines
        self._clock = clock
        self._replica: ReplicaPort | None = None
        self._header: BatchHeader | None = None  # of the batch being appended right now
        self._shown_end = Offset(0)  # fetches were woken for records below it
        self._is_closed = False
        self._opened_end = Offset(0)  # where the log ended when it was opened
        self._is_catching_up = False

    def attach(self, replica: ReplicaPort) -> None:
        """Take the opened replica and rebuild the state of producers from its log."""
        self.begin(replica)
        while not self.read_on():
            pass

    def begin(self, replica: ReplicaPort, begins_at: Offset = Offset(0)) -> None:
        """As `attach`, but the state of producers is still to be rebuilt, by `read_on`. The first
        log of the group began at `begins_at`, behind that of another partition of its number."""
        self._producers.begins_at = begins_at
        assert self._replica is None, "a partition has one replica"
        self._replica = replica
        self._opened_end = replica.log_end_offset
        if not self.is_internal:
            self._producers.attach(replica.log)

    def read_on(self) -> bool:
        """Rebuild some more of the state of producers, for milliseconds; True when it is complete.
        Idempotent producers that write before that are told to retry."""
        return self.is_internal or self._producers.read_on()

    @property
    def replica(self) -> ReplicaPort:
        """The copy behind this partition."""
        assert self._replica is not None, "attach() comes first"
        return self._replica

    @property
    def is_leader(self) -> bool:
        """True while this node leads the partition and knows its high watermark."""
        return self.replica.is_writable

    @property
    def takes_records(self) -> bool:
        """True while this node leads the partition and does not hand it over."""
        return self.replica.is_writable and not self.replica.is_handing_over

    @property
    def leader_epoch(self) -> LeaderEpoch:
        """The current leader epoch, as far as known here."""
        return self.replica.leader_epoch

    @property
    def size_bytes(self) -> int:
        """Bytes of its log."""
        return self.replica.log.size_bytes

    @property
    def producers(self) -> ProducerStateTable:
        """The state of idempotent producers."""
        return self._producers.table

    @property
    def knows_producers(self) -> bool:
        """True when `producers` is exact; False while it is replayed."""
        return self.is_internal or self._producers.is_exact

    @property
    def parked_produces_count(self) -> int:
        """Produces that wait to be acknowledged."""
        return len(self._produces) + len(self._fsync_produces)

    @property
    def lag(self) -> int:
        """How many offsets of committed records this replica lacks."""
        replica = self.replica
        return max(0, replica.high_watermark - replica.log_end_offset)

    def configure(self, settings: PartitionSettings) -> None:
        """Apply changed topic configs from now on."""
        self.settings = settings

    def _settings_in_force(self) -> PartitionSettings:
        return self.settings

    def close(self, code: ErrorCode = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION) -> None:
        """Answer everything parked; the partition is going away."""
        self._is_closed = True
        self._fail_parked(code)
        self._opening.look_again()
        self.fetches.wake_all()

    def stop_waiting(self) -> None:
        """Answer parked fetches with what there is; the node is about to hang up."""
        self.fetches.is_over = True
        self.fetches.wake_all()

    # ---- produce ----

    def append(
        self,
        records: memoryview | None,
        acks: int,
        timeout_ms: int,
        version: int = NEWEST_PRODUCE,
    ) -> AppendResult | Promise[AppendResult]:
        """Append one produced batch and say when it is as safe as `acks` asks.

        `records` may be changed in place and is kept: the log and the peers read from it. On the
        returned result the batch is in the page cache of this leader (acks 0 and 1); a promise
        settles once it is durable at a majority, with the result or an error code. `version` is
        that of the request, on which codes depend, and the protocol of a transaction.
        """
        if self._opening.is_busy and records:
            return self._opening.wait(records, acks, timeout_ms, version)
        result = self._append(records, acks, timeout_ms, version, None, False)
        if isinstance(result, Waits):
            assert records is not None, "nothing waits for nothing"
            return self._opening.wait(records, acks, timeout_ms, version, result)
        return result

    @reports_assertions
    def _append(
        self,
        records: memoryview | None,
        acks: int,
        timeout_ms: int,
        version: int,
        opened: OpenedBatch | None,
        is_verified: bool,
    ) -> AppendResult | Promise[AppendResult] | Waits:
        """As `append`; `opened` where the batch was, `is_verified` where it waited for that."""
        if self.is_internal:
            return AppendResult(ErrorCode.INVALID_TOPIC_EXCEPTION)
        if self._is_closed:
            return AppendResult(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        try:
            return self._take(records, acks, timeout_ms, version, opened, is_verified)
        except KafkaError as error:
            return self._producers.refusal(records, error, self.replica)
        finally:
            self._header = None

    def _take(
        self,
        records: memoryview | None,
        acks: int,
        timeout_ms: int,
        version: int,
        opened: OpenedBatch | None,
        is_verified: bool,
    ) -> AppendResult | Promise[AppendResult] | Waits:
        replica, settings = self.replica, self.settings
        if not replica.is_writable:
            raise KafkaError(code=self._no_leader_code())
        if acks == ACKS_ALL and settings.min_insync_replicas > 1:
            in_sync_count = len(replica.in_sync_replicas())
            if in_sync_count < settings.min_insync_replicas:
                raise KafkaError(
                    f"{in_sync_count} replicas in sync, min.insync.replicas is "
                    f"{settings.min_insync_replicas}",
                    code=ErrorCode.NOT_ENOUGH_REPLICAS,
                )
        if not records:
            raise KafkaError("no records", code=ErrorCode.INVALID_RECORD)
        is_stamped = settings.timestamp_type == LOG_APPEND_TIME
        now_ms = self._stamp_ms(settings) if is_stamped else self._clock.wall_ms()
        header = check_produced_batch(records, settings)
        is_transactional = header.attributes & TRANSACTIONAL
        if header.producer_id >= 0:
            if is_transactional:
                verdict = self._judge_transactional(header, version)
            else:
                verdict = self._producers.judge(header, replica.leader_epoch)
            if isinstance(verdict, Duplicate):
                return self._acknowledge_duplicate(verdict, acks, timeout_ms)
        if opened is None or opened.settings is not settings:
            opened = self._opening.now(records, header)
            if opened is None:
                return MUST_OPEN
        check_timestamps(opened, now_ms, replica.voters_clocks_ms)
        if is_transactional:
            known, epoch = self._producers.table.get(header.producer_id), replica.leader_epoch
            settled = self._transactions.verify(header, known, version, epoch, is_again=is_verified)
            if settled is not None:
                return Waits(opened, settled)
        elif header.producer_epoch > 0 and not header.base_sequence:
            self.counts.producer_epochs += 1
        batch, header = prepare(opened, now_ms)
        self._header = header
        base_offset = replica.append(batch, header)
        if not self.is_leader:
            # Lost during the append, and parked produces were failed before this one is parked.
            raise KafkaError(code=self._no_leader_code())
        stamped_ms = now_ms if is_stamped else -1
        result = AppendResult(ErrorCode.NONE, base_offset, stamped_ms, replica.log_start_offset)
        counts = self.counts
        counts.messages_in += header.record_count
        counts.bytes_in += len(batch)
        end = Offset(base_offset + header.offset_count)
        return self._acknowledge(result, end, acks, timeout_ms)

    def _stamp_ms(self, settings: PartitionSettings) -> int:
        """LogAppendTime of what is appended now; in a delay topic it never falls."""
        if not settings.delivers_to:
            return self.replica.append_time_ms()
        now_ms = self._delay_ms()
        if now_ms is None:
            # Clients come again, and so does what ends transactions.
            raise KafkaError("the time is not known yet", code=ErrorCode.NOT_ENOUGH_REPLICAS)
        return max(now_ms, self._producers.exact().greatest_timestamp)

    @reports_assertions
    def append_own(self, batch: bytearray, timeout_ms: int) -> AppendResult | Promise[AppendResult]:
        """Append a batch that a broker made (`delays/deliveries.py`), once under its sequence;
        answered as acks=all. An error that is returned at once means that nothing was appended,
        unless this leadership has ended."""
        try:
            return self._take_own(batch, timeout_ms)
        except KafkaError as error:
            return AppendResult.refused(error)
        finally:
            self._header = None

    def _take_own(self, batch: bytearray, timeout_ms: int) -> AppendResult | Promise[AppendResult]:
        replica, settings = self.replica, self.settings
        if self._is_closed or self.is_internal or not replica.is_writable:
            raise KafkaError(code=self._no_leader_code())
        if len(replica.in_sync_replicas()) < settings.min_insync_replicas:
            raise KafkaError(code=ErrorCode.NOT_ENOUGH_REPLICAS)
        header = check_own_batch(batch)
        verdict = self._producers.judge_own(header)
        if isinstance(verdict, Duplicate):
            return self._acknowledge_duplicate(verdict, ACKS_ALL, timeout_ms)
        if settings.timestamp_type == LOG_APPEND_TIME and not settings.delivers_to:
            set_log_append_time(batch, replica.append_time_ms())
            header = parse_header(batch)
        self._header = header
        base_offset = replica.append(batch, header)
        if not self.is_leader:
            raise KafkaError(code=self._no_leader_code())
        self.counts.messages_in += header.record_count
        self.counts.bytes_in += len(batch)
        end = Offset(base_offset + header.offset_count)
        return self._acknowledge(AppendResult(ErrorCode.NONE, base_offset), end, -1, timeout_ms)

    def _acknowledge(
        self, result: AppendResult, end: Offset, acks: int, timeout_ms: int
    ) -> AppendResult | Promise[AppendResult]:
        if acks == ACKS_ALL:
            if self.replica.high_watermark >= end and self._is_enough(end):
                return result
            timed_out = ErrorCode.REQUEST_TIMED_OUT
            if self.settings.min_insync_replicas > 1:
                timed_out = ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
            return self._produces.park(end, result, timeout_ms, timed_out)
        if acks == 1 and self.settings.acks1_fsync:
            if self.replica.log.flushed_end_offset >= end:
                return result
            return self._fsync_produces.park(end, result, timeout_ms, ErrorCode.REQUEST_TIMED_OUT)
        self._acknowledged_end = max(self._acknowledged_end, end)
        return result

    def _acknowledge_duplicate(
        self, duplicate: Duplicate, acks: int, timeout_ms: int
    ) -> AppendResult | Promise[AppendResult]:
        """Answer a repeated batch as its first copy, and no earlier than that one (KIP-98)."""
        result = AppendResult(
            ErrorCode.NONE,
            duplicate.base_offset,
            duplicate.timestamp if self.settings.timestamp_type == LOG_APPEND_TIME else -1,
            self.replica.log_start_offset,
        )
        return self._acknowledge(result, duplicate.next_offset, acks, timeout_ms)

    def _is_enough(self, end: Offset) -> bool:
        """True when min.insync.replicas voters, this leader among them, flushed all below `end`,
        which is committed."""
        wanted = self.settings.min_insync_replicas
        replica = self.replica
        if wanted <= len(replica.voters) // 2 + 1:
            return True  # a majority flushed it
        return replica.flushed_voters(replica.log.index_of(end)) >= wanted

    def _settle_produces(self) -> None:
        replica = self.replica
        if self._produces.waiting:
            self._produces.acknowledge(replica.high_watermark, self._is_enough)
        if self._fsync_produces.waiting:
            flushed_end = replica.log.flushed_end_offset
            self._fsync_produces.acknowledge(flushed_end, lambda _end: True)
        if self._end_lookups.waiting:
            self._end_lookups.acknowledge(replica.high_watermark, lambda _end: True)
        if self._ends.waiting:
            self._ends.settle(replica.high_watermark)

    # ---- transactions ----

    def _judge_transactional(self, header: BatchHeader, version: int) -> Verdict:
        """As `PartitionProducers.judge`. A batch of a transaction that is over is not told that it
        is out of order, which it may be as well."""
        self._transactions.check_offered(is_delayed=bool(self.settings.delivers_to))
        try:
            return self._producers.judge(header, self.replica.leader_epoch)
        except KafkaError as error:
            if error.code is not ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER:
                raise
            epoch = self.replica.leader_epoch
            refusal = self._transactions.refusal(header, version, epoch)
            if refusal is None:
                raise
            raise refusal from error

    def end_transaction(self, decided: Decided) -> Promise[Offset]:
        """Write the end of a transaction, if something of it is open here.

        Called at the leader, after the read barrier of its term, by an image that shows the
        decision of exactly this `txn_seq` and no report of this partition; any number of times.

        Returns:
            Kept when the marker is committed, or where nothing is open, when all is that the log
            held by then, with the offset after that: the partition may be reported. Broken with a
            KafkaError otherwise: NOT_LEADER_OR_FOLLOWER (what became of it is the next leader's to
            find out), KAFKA_STORAGE_ERROR (nothing was written; later, perhaps),
            INVALID_PRODUCER_EPOCH (what is open is of a later transaction).
        """
        promise: Promise[Offset] = Promise()
        self._end_transaction(decided, promise)
        return promise

    @reports_assertions
    def _end_transaction(self, decided: Decided, promise: Promise[Offset]) -> None:
        try:
            if self._is_closed:
                raise KafkaError(code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            if not self.replica.is_writable:
                raise KafkaError(code=self._no_leader_code())
            producers = self._producers.known()
            if producers is None:
                self._deadlines.soon(partial(self._end_transaction, decided, promise))
                return
            end = self._write_end(decided, producers.get(decided.producer_id))
        except KafkaError as error:
            promise.fail(error)
            return
        self._ends.park(end, promise)
        self._ends.settle(self.replica.high_watermark)

    def _write_end(self, decided: Decided, producer: Producer | None) -> Offset:
        """Write the marker where something is open; where the log ends then.

        Raises:
            KafkaError: this leader cannot tell that it will be committed.
        """
        replica = self.replica
        if producer is None or producer.open_since == NO_OFFSET:
            return replica.log_end_offset
        self._transactions.check_end(decided, producer)
        batch = build_marker(
            Marker(decided.is_commit),
            producer_id=decided.producer_id,
            producer_epoch=decided.producer_epoch,
            timestamp=self._stamp_ms(self.settings),
        )
        self._header = header = parse_header(batch)
        try:
            end = Offset(replica.append(batch, header) + header.offset_count)
        finally:
            self._header = None
        if not self.is_leader:
            # Lost during the append, and what is parked was failed before this is parked.
            raise KafkaError(code=self._no_leader_code())
        self._transactions.ended(decided.producer_id)
        return end

    # ---- fetch ----

    @reports_assertions
    def read(
        self,
        offset: Offset,
        bytes_max: int,
        *,
        current_epoch: int = -1,
        last_fetched_epoch: int = -1,
        may_follow: bool = False,
        at_least_one: bool = True,
        may_wait: bool = True,
        committed_only: bool = False,
    ) -> ReadResult:
        """Find what a consumer may read from `offset` on, as spans of whole batches.

        Args:
            current_epoch: the leader epoch that the client knows, -1 for none (KIP-320).
            last_fetched_epoch: that of the record before `offset`, -1 for unknown (KIP-595).
            may_follow: a follower may answer (KIP-392).
            at_least_one: give the first batch even if it is larger than `bytes_max` (KIP-74).
            may_wait: read from the disk, and check bytes that were not checked since, in this
                call; otherwise the result holds a job for a worker. Several rounds may be needed.
            committed_only: give nothing of a transaction that is not decided, and say which of them
                were aborted. While that is not known, OFFSET_NOT_AVAILABLE.
        """
        replica = self.replica
        code = self._refusal(current_epoch, may_follow=may_follow)
        if code is not ErrorCode.NONE:
            return ReadResult(code)
        start = replica.log_start_offset
        committed_end = self._committed_end
        end = self._readable_end(committed_end)
        if end < offset <= committed_end:
            end = offset  # in a hole, or right behind it: for this reader the log ends there
        if last_fetched_epoch >= 0 and replica.is_leader:  # a follower may merely be behind
            diverging = diverging_end(replica, offset, LeaderEpoch(last_fetched_epoch))
            if diverging is not None:
                return ReadResult(ErrorCode.NONE, end, start, diverging=diverging)
        if not start <= offset <= end:
            return ReadResult(code_outside(replica, offset, start, end), end, start)
        stable = self._stable_end(committed_end, end)
        limit = stable if committed_only else end
        if limit == NO_OFFSET:
            return ReadResult(ErrorCode.OFFSET_NOT_AVAILABLE, end, start)
        if offset >= limit or (bytes_max <= 0 and not at_least_one):
            return ReadResult(ErrorCode.NONE, end, start, last_stable_offset=stable)
        if self._buggify("partition.short_read"):
            bytes_max = min(bytes_max, 1)
        try:
            spans, job = self._spans(offset, bytes_max, limit, at_least_one, may_wait)
            aborted: Sequence[Aborted] | None = ()
            if committed_only and spans:
                aborted, cold = self._aborted(offset, Offset(spans[-1].end_offset), may_wait)
                if cold is not None:
                    return ReadResult(ErrorCode.NONE, end, start, job=cold)
        except KafkaError as error:
            if isinstance(error, DamagedError):
                replica.damage_found()
            return ReadResult(error.code, end, start)
        except DiskError:
            return ReadResult(ErrorCode.KAFKA_STORAGE_ERROR, end, start)
        if aborted is None:
            self._catch_up()
            return ReadResult(ErrorCode.OFFSET_NOT_AVAILABLE, end, start)
        size = record_count = 0
        for span in spans:
            size += span.size
            record_count += span.end_offset - max(span.base_offset, offset)
        return ReadResult(
            ErrorCode.NONE, end, start, spans, size, record_count, None, job, stable, aborted
        )

    def _spans(
        self, offset: Offset, bytes_max: int, limit: Offset, at_least_one: bool, may_wait: bool
    ) -> tuple[tuple[FileSpan, ...], Runnable | None]:
        """What `read` found, and what must come into memory before it finds more.

        Raises:
            KafkaError: DamagedError above all.
            DiskError: the device failed.
        """
        log = self.replica.log
        offset = log.past_holes(offset)
        job = None if may_wait else self._needed_first(offset, bytes_max)
        if job is not None:
            return (), job
        found = log.locate(offset, bytes_max, limit, at_least_one=at_least_one, may_check=may_wait)
        if not found and not may_wait:  # the last check is too old, or damage lies close by
            job = self._needed_first(offset, bytes_max, is_unverified=True)
        return tuple(found), job

    def _aborted(
        self, start: Offset, end: Offset, may_wait: bool
    ) -> tuple[Sequence[Aborted] | None, Runnable | None]:
        """The aborted transactions within `[start, end)`, None while they are not known; or what
        must come into memory first."""
        if not may_wait and (cold := self.replica.log.aborted.cold(start, end)):
            return None, WarmJob(tuple(cold))
        return (() if self.is_internal else self._producers.aborted(start, end)), None

    def _needed_first(
        self, offset: Offset, bytes_max: int, *, is_unverified: bool = False
    ) -> Runnable | None:
        """The job without which these bytes cannot be served: to read or to check them. What was
        appended since the log was opened was checked then."""
        log = self.replica.log
        job = log.read_ahead(offset, bytes_max)
        if job is None and (is_unverified or offset < self._opened_end):
            return log.needs_verification(offset, max(2 * bytes_max, CHECK_AHEAD_BYTES), bytes_max)
        return job

    @reports_bugs
    def prepared(self, job: Runnable) -> None:
        """A worker ran `job`: bytes that it found sound may be served, damaged ones may not."""
        replica = self.replica
        try:
            if isinstance(job, IndexJob):
                is_damaged = job.take()
            else:
                is_damaged = isinstance(job, VerifyJob) and bool(replica.log.checked(job))
        except DiskError as error:
            replica.fail(f"damage could not be noted: {error}")
            return
        if is_damaged:
            replica.damage_found()

    @property
    def readable_end(self) -> Offset:
        """Where consumers must stop: behind the last committed record; on a follower, behind the
        last one that it flushed.

        That is the high watermark, or less where only a hole lies right below it. Clients are told
        it as the high watermark, since no fetch brings them beyond it.
        """
        return self._readable_end(self._committed_end)

    @property
    def stable_end(self) -> Offset:
        """Where consumers of committed records must stop: before the first transaction that is not
        decided, as far as markers are committed; `NO_OFFSET` while that is not known."""
        committed_end = self._committed_end
        return self._stable_end(committed_end, self._readable_end(committed_end))

    @property
    def stable_lag(self) -> int | None:
        """How many offsets consumers of committed records stop before those of all records; None
        while that is not known: looking does not find it out."""
        if not self.is_internal and self._producers.is_hidden:
            return None
        return self.readable_end - self.stable_end

    def _readable_end(self, committed_end: Offset) -> Offset:
        start = min(self.replica.log_start_offset, committed_end)
        return max(start, self.replica.log.records_end(committed_end))

    def _stable_end(self, committed_end: Offset, end: Offset) -> Offset:
        if self.is_internal:
            return end
        stable = self._producers.last_stable_offset(committed_end)
        if stable is None:
            self._catch_up()
            return NO_OFFSET
        if stable == committed_end:
            return end
        return min(end, max(stable, self.replica.log_start_offset))

    def _catch_up(self) -> None:
        """Find out, in turns of the loop, what readers of committed records wait for."""
        if not self._is_catching_up:
            self._is_catching_up = True
            self._deadlines.soon(self._catch_up_on)

    def _catch_up_on(self) -> None:
        self._is_catching_up = False
        if self._is_closed:
            return
        try:
            if self._producers.work_on():
                self._catch_up()
        except (KafkaError, DiskError) as error:
            if isinstance(error, DamagedError):
                self.replica.damage_found()  # whoever reads asks again
            if self._producers.is_doubtful:
                self._deadlines.after(MEND_AGAIN_MS, self._catch_up)

    @property
    def _committed_end(self) -> Offset:
        """The high watermark; on a follower, as far as it has flushed."""
        replica = self.replica
        if replica.is_leader:
            return replica.high_watermark
        return min(replica.high_watermark, replica.log.flushed_end_offset)

    @property
    def serves_fetches(self) -> bool:
        """False when a fetch that waits here must be told to go elsewhere."""
        return not self._is_closed and (self.replica.is_leader or self._follows)

    @property
    def _follows(self) -> bool:
        """True when a leader of the current term told this replica how far it has committed."""
        return self.replica.leader is not None

    def _refusal(self, current_epoch: int, *, may_follow: bool = False) -> ErrorCode:
        """Why a reader who knows that leader epoch is told nothing here; NONE where it is."""
        if self._is_closed:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if current_epoch >= 0:
            current_epoch = max(current_epoch, FIRST_EPOCH)
            known = self.replica.leader_epoch
            if current_epoch < known:
                return ErrorCode.FENCED_LEADER_EPOCH
            if current_epoch > known:
                return ErrorCode.UNKNOWN_LEADER_EPOCH
        if self.replica.is_leader or (may_follow and self._follows):
            return ErrorCode.NONE
        return self._no_leader_code()

    def _no_leader_code(self) -> ErrorCode:
        if self.replica.failure is not None:
            return ErrorCode.KAFKA_STORAGE_ERROR
        return ErrorCode.NOT_LEADER_OR_FOLLOWER

    # ---- offsets and epochs ----

    def acknowledged(self, timeout_ms: int) -> Promise[AppendResult] | None:
        """A promise that is kept once every record that a sole voter acknowledged before its flush
        is committed; None when that is so now.

        A sole replica of Kafka commits as it appends, so the end of its log never lacks what was
        acknowledged. With more replicas it may lack what only the leader has, in Kafka and here.
        """
        replica = self.replica
        # The log may be shorter: this replica led before, and was truncated since.
        end = min(self._acknowledged_end, replica.log_end_offset)
        if end <= replica.high_watermark or not replica.is_writable or len(replica.voters) > 1:
            return None
        result = AppendResult(ErrorCode.NONE)
        return self._end_lookups.park(end, result, timeout_ms, ErrorCode.OFFSET_NOT_AVAILABLE)

    @reports_assertions
    def list_offset(
        self,
        timestamp: int,
        *,
        current_epoch: int = -1,
        may_wait: bool = True,
        committed_only: bool = False,
    ) -> OffsetResult:
        """The offset for a timestamp, or for one of Kafka's special ones (negative).

        Unless it `may_wait` for the disk, the result may hold a job for a worker. For a reader of
        committed records alone the log ends at the last stable offset.
        """
        replica = self.replica
        code = self._refusal(current_epoch)
        if code is not ErrorCode.NONE:
            return OffsetResult(code)
        if timestamp in (EARLIEST, EARLIEST_LOCAL):
            start = replica.log_start_offset
            return OffsetResult(ErrorCode.NONE, start, leader_epoch=epoch_at(replica, start))
        if not replica.is_writable:
            # KIP-207: a new leader may know a lower high watermark than its predecessor gave out.
            return OffsetResult(ErrorCode.OFFSET_NOT_AVAILABLE)
        if timestamp == LATEST_TIERED:
            return OffsetResult(ErrorCode.NONE)  # nothing is tiered
        end = self.stable_end if committed_only else self.readable_end
        if end == NO_OFFSET:
            return OffsetResult(ErrorCode.OFFSET_NOT_AVAILABLE)
        if timestamp == LATEST:
            return OffsetResult(ErrorCode.NONE, end, leader_epoch=replica.leader_epoch)
        return look_up(replica, timestamp, end, may_wait=may_wait)

    @reports_assertions
    def end_offset_for_epoch(self, epoch: int, *, current_epoch: int = -1) -> EpochEnd:
        """Where the greatest known epoch not above `epoch` ended (KIP-101)."""
        replica = self.replica
        code = self._refusal(current_epoch)
        if code is not ErrorCode.NONE:
            return EpochEnd(code)
        if epoch >= replica.leader_epoch and not replica.is_writable:
            return EpochEnd(ErrorCode.OFFSET_NOT_AVAILABLE)
        if epoch < 0:
            return EpochEnd(ErrorCode.NONE)
        known_epoch, end = end_of(replica, LeaderEpoch(epoch))
        if end > replica.high_watermark and not replica.is_writable:
            # The high watermark here may be behind: a consumer that is told it as the end of the
            # epoch would take records that it read for truncated.
            return EpochEnd(ErrorCode.OFFSET_NOT_AVAILABLE)
        return EpochEnd(ErrorCode.NONE, known_epoch, min(end, replica.high_watermark))

    # ---- deletion ----

    @reports_assertions
    def delete_records(self, offset: int, timeout_ms: int) -> DeleteResult | Promise[DeleteResult]:
        """Drop all records below `offset` (-1: the high watermark); answered when that is done."""
        replica = self.replica
        if self.is_internal:
            return DeleteResult(ErrorCode.INVALID_TOPIC_EXCEPTION)
        if self._is_closed:
            return DeleteResult(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if not replica.is_writable:
            return DeleteResult(self._no_leader_code())
        if self.settings.delivers_to:  # something of it may be pending
            return DeleteResult(ErrorCode.POLICY_VIOLATION)
        target = replica.high_watermark if offset == -1 else Offset(offset)
        if not 0 <= target <= replica.high_watermark:
            return DeleteResult(ErrorCode.OFFSET_OUT_OF_RANGE)
        if target <= replica.log_start_offset:
            return DeleteResult(ErrorCode.NONE, replica.log_start_offset)
        try:
            replica.move_log_start(target)
        except KafkaError as error:
            return DeleteResult(error.code)
        if replica.log_start_offset >= target:  # a group of one may be that quick
            return DeleteResult(ErrorCode.NONE, replica.log_start_offset)
        return self._deletes.park(target, timeout_ms)

    # ---- seals ----

    @reports_assertions
    def seal(self, seal: Seal) -> bool:
        """Write a seal into the log, or its end; False when that cannot be done now. A seal waits
        for the ends of open transactions, which could not be written behind it.

        Raises:
            KafkaError: leadership was lost.
        """
        if self._is_closed or not self.replica.is_writable:
            return False
        if seal.is_closed:
            if not self._producers.is_exact:
                return False
            if self._producers.table.first_open_offset is not None:
                return False
        self.replica.seal(seal)
        return True

    @property
    def is_sealed(self) -> bool:
        """True at a leader whose log has a committed seal: where it ends now, it ends for good."""
        replica = self.replica
        seal = replica.newest_seal
        is_closed = seal is not None and seal.is_closed
        return is_closed and replica.is_writable and replica.is_seal_committed

    @property
    def is_empty(self) -> bool:
        """True when such a log has nothing left."""
        return self.is_sealed and self.replica.log_start_offset >= self.replica.log_end_offset

    # ---- the state machine of the replica ----

    def appended(self, entry: LogEntry) -> None:
        """An entry was written here, on leader and follower alike."""
        if entry.kind != EntryKind.BATCH:
            return
        self._replica_counts.appends += 1
        header = self._header
        if header is None:
            header = parse_header(entry.payload)
        else:  # parsed before it was stamped
            base_offset = self.replica.log_end_offset - header.offset_count
            header = header._replace(base_offset=base_offset)
        self._producers.appended(header, entry.payload)

    def truncated(self, _end: RaftIndex) -> None:
        """Entries are gone, and with them what they added to the state of producers."""
        self._producers.truncated()

    def committed(self, _high_watermark: Offset, _commit_end: RaftIndex) -> None:
        """The high watermark moved: acknowledge and wake."""
        if self._replica is None:
            return  # the replica is being opened; nothing can be parked yet
        replica = self._replica
        self._producers.committed(replica.high_watermark, replica.log.flushed_end_offset)
        self._settle_produces()
        self._shown_end = self.readable_end
        self.fetches.wake_all()

    def role_changed(self, soft: SoftState) -> None:
        """Another leader, another term, or none: no parked produce can be acknowledged."""
        if self._replica is None:
            return
        self._transactions.clear()
        if soft.role is not Role.LEADER:
            self._fail_parked(self._no_leader_code())
            self._opening.look_again()
        elif not self.is_internal:
            self._producers.led(is_first=self._is_first_leader())
        self.fetches.wake_all()

    def progressed(self) -> None:
        """The flushed end, here or at a follower, or the log start moved: settle what waits for
        those. (What waits for the high watermark was settled when it moved.)"""
        if self._is_closed:
            return
        if self._produces.waiting or self._fsync_produces.waiting:
            self._settle_produces()
        if self._deletes.waiting:
            self._deletes.settle(self.replica.log_start_offset)
        if self.fetches.waiting:
            end = self.readable_end
            if end > self._shown_end:  # a follower flushed records that it knew to be committed
                self._shown_end = end
                self.fetches.wake_all()

    def _is_first_leader(self) -> bool:
        log = self.replica.log
        before = LeaderEpoch(self.replica.leader_epoch - 1)
        return not log.log_start.index and log.end_offset_for_epoch(before) is None

    def state_at(self, offset: Offset, _index: RaftIndex) -> bytes | None:
        """The state of producers exactly at `offset`; None: not ready, call again."""
        return self._producers.state_at(offset)

    @property
    def state_bytes_max(self) -> int:
        """How large the state at a log start may be by now."""
        return self._producers.table.encoded_bytes_max

    def check_state(self, log_start: LogStart) -> None:
        """Refuse a state that `restore` could not begin with.

        Raises:
            ProducerStateError: it is damaged, or of a newer format.
        """
        check_encoded(log_start.state)

    def doubt(self, offset: Offset) -> None:
        """What was read of the log from `offset` on may be wrong: read it anew soon."""
        if not self.is_internal:
            self._producers.doubt(offset)
            self._catch_up()

    def restore(self, log_start: LogStart) -> None:
        """Begin anew at a log start; at opening, `attach` replays what follows it."""
        self._producers.restore(log_start)
        if self._replica is not None:
            self.fetches.wake_all()

    def _fail_parked(self, code: ErrorCode) -> None:
        self._produces.fail_all(code)
        self._fsync_produces.fail_all(code)
        self._end_lookups.fail_all(code)
        self._ends.fail_all(code)
        self._deletes.fail_all(code)
