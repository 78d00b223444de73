"""The producer state of one partition, kept in step with its log, and what it says of new batches.

`producer_state.py` is the pure table; this follows the log with it: forward at each append, back at
a truncation, to any offset for a log start. Checkpoints at committed offsets bound how much of the
log is read again for that. A batch behind a refused one is refused as that was; so is one behind a
gap that the leader before may still fill (`refused_batches.py`), and the first batch of a producer
that the log does not know while one before it may be under way.

Invariant: the table given out is exactly what the batches of the log say; while damage hides some
of them there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

from raftmq.cluster.parked_produces import AppendResult
from raftmq.cluster.producer_checkpoints import ProducerCheckpoints
from raftmq.cluster.producer_state import ACCEPT, ProducerStateTable, Verdict
from raftmq.cluster.refused_batches import RefusedBatches
from raftmq.errors import CorruptBatchError, ErrorCode, KafkaError
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.records import HEADER_SIZE, BatchHeader, parse_header
from raftmq.types import LeaderEpoch, Offset, RaftIndex

CHECKPOINT_BATCHES: Final = 4_000
"""So many headers are replayed at most when a log start moves or a suffix is truncated."""
CHECKPOINT_PRODUCERS_MAX: Final = 2_000
"""Beyond this taking the state costs more than replaying does."""

MISSING_BATCH_MS: Final = 60_000.0
"""So long may a batch wait for the answer of a leader before this one until its producer sends it
here: `socket.timeout.ms` of librdkafka, the longest of the clients' defaults."""
FIRST_LEADER_MS: Final = 1_000.0
"""The same where there was no leader before: what a producer had under way to a topic of the same
name that was deleted is refused within moments, and comes again."""

COMES_AGAIN: Final = frozenset(
    {
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.CORRUPT_MESSAGE,
    }
)
"""After these a client sends the batch again as it is."""
_OUT_OF_ORDER: Final = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


class BehindRefusedError(KafkaError):
    """The batch follows one that was refused; its code is that one's."""


class HeaderLog(Protocol):
    """What is read of the log."""

    @property
    def log_start(self) -> LogStart: ...
    @property
    def log_end_offset(self) -> Offset: ...
    def headers(self, start: Offset, end: Offset) -> Iterator[BatchHeader]: ...
    def check_stored(self, offset: Offset) -> None: ...


class PartitionProducers:
    """The table of one partition's idempotent producers, and its past."""

    def __init__(self, checkpoints: ProducerCheckpoints, clock: Clock) -> None:
        self._clock = clock
        self.table = ProducerStateTable()
        """What `current` gives; without what damage hides, while there is damage."""
        self._is_hidden = False
        self._refused = RefusedBatches()
        self._leader_epoch = LeaderEpoch(-1)  # of the leadership whose batches were judged last
        self._leads_from = Offset(0)  # the log's end when its first one was
        # Until then a batch may be missing of which nothing is known here.
        self._complete_from_ms = 0.0
        self._checkpoints = checkpoints
        self._log: HeaderLog | None = None
        self._batches_since = 0
        self._planned: tuple[Offset, bytes] | None = None  # kept once it is committed

    def attach(self, log: HeaderLog) -> None:
        """Catch up with an opened log."""
        self._log = log
        self._checkpoints.load()
        self._replay()

    def current(self) -> ProducerStateTable:
        """The table, exact.

        Raises:
            DamagedError: a part of the log that is not repaired yet hides it.
        """
        if self._is_hidden:
            assert self._log is not None
            self.table = self._at(self._log.log_end_offset)
            self._is_hidden = False
        return self.table

    def judge(self, header: BatchHeader, leader_epoch: LeaderEpoch) -> Verdict:
        """Judge a batch of an idempotent producer, as `ProducerStateTable.check`.

        Raises:
            BehindRefusedError: one before it is missing or was refused, and may come again.
            KafkaError: what is wrong with it; DamagedError as `current`.
        """
        table = self.current()
        if leader_epoch != self._leader_epoch:
            self._leader_epoch, self._leads_from = leader_epoch, table.next_offset
        if header.base_sequence > 0 and table.get(header.producer_id) is None:
            self._check_first(header)
        try:
            verdict = table.check(header)
        except KafkaError as error:
            if error.code is not _OUT_OF_ORDER:
                raise
            expected = table.next_sequence(header.producer_id, header.producer_epoch)
            if self._is_new_here(header.producer_id):
                self._refused.await_missing(header.producer_id, header.producer_epoch, expected)
            code = self._refused.reason_behind(header, expected)
            if code is None:
                raise
            raise BehindRefusedError(
                f"{error.message}; sequence {expected} may come again", code=code
            ) from error
        if len(self._refused):
            if verdict is ACCEPT:
                self._refused.forget(header.producer_id)
            else:
                self._check_order(header)
        return verdict

    def led(self, *, is_first: bool) -> None:
        """This node leads from now on; the first to lead this log ever, or not."""
        self._doubt_for(FIRST_LEADER_MS if is_first else MISSING_BATCH_MS)

    def _doubt_for(self, milliseconds: float) -> None:
        end_ms = self._clock.monotonic_ms() + milliseconds
        self._complete_from_ms = max(self._complete_from_ms, end_ms)

    def _check_first(self, header: BatchHeader) -> None:
        """Refuse a batch above sequence 0 of a producer that the log does not know, where one
        before it may come. Else it may start anywhere: it wrote to a topic of the same name, or was
        idle for longer than it is remembered."""
        code = self._refused.reason_first(header)
        if code is _OUT_OF_ORDER:
            raise KafkaError(f"sequence {header.base_sequence} follows a refused one", code=code)
        if code is None and self._clock.monotonic_ms() < self._complete_from_ms:
            code = ErrorCode.NOT_LEADER_OR_FOLLOWER
            batch = header.producer_id, header.producer_epoch, header.base_sequence
            self._refused.note(*batch, code)  # what follows waits for it
        if code is not None:
            raise BehindRefusedError("one before it may come", code=code)

    def _check_order(self, header: BatchHeader) -> None:
        """Refuse a batch that the log has, where one before it was refused and comes again."""
        producer = self.table.get(header.producer_id)
        assert producer is not None, "whose batch is known is known"
        known = [batch.base_sequence for batch in producer.batches]
        earlier = known[: known.index(header.base_sequence)]
        code = self._refused.reason_before(header, earlier)
        if code is not None:
            raise BehindRefusedError("one before it was refused, and comes again", code=code)

    def _is_new_here(self, producer_id: int) -> bool:
        """True while all that the log holds of a producer was taken by leaders before this one."""
        producer = self.table.get(producer_id)
        if producer is None or not producer.batches:
            return False
        return producer.batches[-1].base_offset < self._leads_from

    def refused(self, records: memoryview | None, error: KafkaError) -> None:
        """A produced batch was refused: remember it when it may come again."""
        if error.code is _OUT_OF_ORDER or isinstance(error, BehindRefusedError):
            return
        if records is None or len(records) < HEADER_SIZE:
            return
        try:
            header = parse_header(records)
        except CorruptBatchError:
            return  # nobody's
        if header.producer_id >= 0:
            batch = header.producer_id, header.producer_epoch, header.base_sequence
            forgotten_count = self._refused.forgotten_count
            if error.code in COMES_AGAIN:
                self._refused.note(*batch, error.code)
            else:
                self._refused.refuse_for_good(*batch)
            if self._refused.forgotten_count > forgotten_count:
                self._doubt_for(MISSING_BATCH_MS)

    def refusal(
        self,
        records: memoryview | None,
        error: KafkaError,
        confirm: Callable[[], Promise[RaftIndex]],
    ) -> AppendResult | Promise[AppendResult]:
        """What to tell of a batch that is refused, which is remembered as `refused` does.

        A leader that was replaced and does not know lacks what its successor took, and finds the
        batch after it out of order; librdkafka then begins a new epoch of its producer id, at
        the risk of second copies. So that is said only when `confirm` (a read barrier) proves that
        this leader was one when it looked.
        """
        self.refused(records, error)
        refusal = AppendResult.refused(error)
        if error.code is not _OUT_OF_ORDER:
            return refusal
        told: Promise[AppendResult] = Promise()

        def confirmed(barrier: Promise[RaftIndex]) -> None:
            not_leader = AppendResult(ErrorCode.NOT_LEADER_OR_FOLLOWER)
            told.resolve(refusal if barrier.error is None else not_leader)

        confirm().when_done(confirmed)
        return told.result() if told.is_done else told

    def appended(self, header: BatchHeader) -> None:
        """A batch was written at the log's end."""
        if self._is_hidden:
            return  # it is read back with the others
        self.table.append(header)
        self._batches_since += 1
        if self._batches_since < CHECKPOINT_BATCHES:
            return
        self._batches_since = 0
        if self._planned is None and len(self.table) <= CHECKPOINT_PRODUCERS_MAX:
            self._planned = self.table.next_offset, self.table.encode()

    def truncated(self) -> None:
        """The log's end moved back; what is gone was not acknowledged, and may come again."""
        assert self._log is not None
        end = self._log.log_end_offset
        for producer_id, producer in self.table.producers():
            lost = [batch for batch in producer.batches if batch.base_offset >= end]
            if lost:
                batch = producer_id, producer.epoch, lost[0].base_sequence
                self._refused.note(*batch, ErrorCode.NOT_LEADER_OR_FOLLOWER)
        self._replay()
        if self._planned is not None and self._planned[0] > self._log.log_end_offset:
            self._planned = None

    def committed(self, high_watermark: Offset) -> None:
        """What lies below will never change."""
        if self._planned is not None and self._planned[0] <= high_watermark:
            self._checkpoints.add(*self._planned)
            self._planned = None

    def state_at(self, offset: Offset) -> bytes:
        """What the batches that end at or below `offset` say, encoded."""
        assert self._log is not None
        self._checkpoints.drop_below(self._log.log_start.base_offset)
        return self._at(offset).encode()

    def restore(self, log_start: LogStart) -> None:
        """Begin anew at a log start."""
        self.table = ProducerStateTable.decode(log_start.state)
        self._is_hidden = False
        self._planned = None

    def _replay(self) -> None:
        self._is_hidden = True
        try:
            self.current()
        except DamagedError:
            return  # repaired before this replica may lead; whoever asks looks again

    def _at(self, end: Offset) -> ProducerStateTable:
        assert self._log is not None
        log_start = self._log.log_start
        start, state = log_start.base_offset, log_start.state
        checkpoint = self._checkpoints.best(end, start)
        if checkpoint is not None:
            start, state = checkpoint
        table = ProducerStateTable.decode(state)
        for header in self._log.headers(start, end):
            if table.next_offset <= header.base_offset and header.next_offset <= end:
                if not table.expects(header):
                    # Headers are read without their bodies, so their sums are not checked: what is
                    # surprising is believed only after that. It is rare, and all cannot be read.
                    self._log.check_stored(Offset(header.base_offset))
                table.append(header)
        return table
