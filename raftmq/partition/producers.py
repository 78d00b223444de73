"""The producer state of one partition, kept in step with its log, and what it says of new batches.

`producer_state.py` is the pure table; `PartitionProducers` follows the log with it: forward at each
append, back at a truncation, to any offset for a log start. Copies of the table, and checkpoints at
committed offsets, bound how much of the log is read again for that. What takes longer than some
milliseconds (much to read back, the state of many producers) is done in turns; while the table is
read back, idempotent producers are told to come again.

`RefusedBatches` remembers which sequences were refused lately and why. A producer has up to five
requests under way. When the first is refused because this node is not (yet) the leader, or too few
replicas are in sync, and the reason is gone before the second is looked at, that one leaves a gap
in the sequence. To call it out of order would be true and do harm: librdkafka then begins a new
epoch of its producer id, for all its partitions, and sends under that whatever has an unknown
outcome anywhere, which no broker can tell from new records (Kafka has the same gap, and its users
the second copies). So what follows a refused batch is refused for the same reason, and both come
again in their order.

A new leader sees the same without having refused anything: the first of several batches still waits
for an answer of the leader before it, or for its time to run out, when the next one is sent here.
The missing batch is then waited for by refusing what follows it, as if it were refused here.

The same holds for a repeated batch behind a refused one, both of which the log has: told that the
second is there and the first is refused, librdkafka believes in the first as well, but has no
offset of it to tell. And a producer that the log does not know may start at any sequence, as in
Kafka, unless a batch before is remembered as refused, or may be under way: that one comes first.

Headers are read without their bodies, so without their sums: a damaged one may pass for sound. One
that is surprising (`ProducerStateTable.expects`) is believed only once its sum is right. What is
not surprising takes no batch for another's, but may move a timestamp a little: as soon as damage is
known and about to be repaired, all that followed from it is forgotten, and the table is read anew
beside the one in use.

Invariants: the table given out is exactly what the batches of the log say, and once damage is known
what their headers seemed to say before, until the next one is read; while damage hides some of them
there is none. What is remembered of refusals takes no batch, it only names the reason; it
is bounded in producers, and in answers per refusal, so that a producer that never sends the refused
batch again is told the truth in the end; it is lost with the process, as the connections are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, Protocol

from attrs import define

from raftmq.errors import CorruptBatchError, ErrorCode, KafkaError
from raftmq.log.aborted import Aborted, UntoldError
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError
from raftmq.partition.ports import AbortedPort, AppendResult, ReplicaPort
from raftmq.partition.producer_state import (
    ACCEPT,
    BATCHES_REMEMBERED,
    NEWEST,
    NO_OFFSET,
    EndedTransactionError,
    InTurns,
    ProducerCheckpoints,
    ProducerStateTable,
    Verdict,
)
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.records import (
    CONTROL,
    HEADER_SIZE,
    SEQUENCE_MODULUS,
    BatchHeader,
    Marker,
    parse_header,
    parse_marker,
)
from raftmq.types import Buffer, LeaderEpoch, Offset, ProducerId, RaftIndex

REFUSED_PRODUCERS_MAX: Final = 100
"""Producers remembered per partition; the one refused longest ago is forgotten first."""
NEW_LEADER_ANSWERS: Final = 100
"""How often a new leader refuses batches behind a missing one: clients retry after 20 ms to a
second each time, and give a silent leader 30 seconds (`request.timeout.ms`)."""


@define(slots=True)
class _Refused:
    epoch: int
    sequences: tuple[int, ...]  # first sequences of the last refused batches
    code: ErrorCode
    answers_left: int


class RefusedBatches:
    """The batches that were refused lately, by producer id."""

    __slots__ = ("_refused", "forgotten_count")

    def __init__(self) -> None:
        self._refused: dict[int, _Refused] = {}
        self.forgotten_count = 0
        """How many producers were forgotten to make room for others."""

    def __len__(self) -> int:
        return len(self._refused)

    def note(
        self,
        producer_id: int,
        epoch: int,
        sequence: int,
        code: ErrorCode,
        answers: int = BATCHES_REMEMBERED,
    ) -> None:
        """The batch that begins at `sequence` was refused, or truncated, and may come again. Until
        then `answers` batches behind it are refused: by default as many as can be under way."""
        known = self._refused.get(producer_id)
        if known is not None and known.epoch > epoch:
            return  # a late one, of a producer that is fenced
        self._refused.pop(producer_id, None)
        sequences: tuple[int, ...] = (sequence,)
        if known is not None and known.epoch == epoch:
            others = [other for other in known.sequences if other != sequence]
            sequences = (*others[1 - BATCHES_REMEMBERED :], sequence)
        while len(self._refused) >= REFUSED_PRODUCERS_MAX:
            del self._refused[next(iter(self._refused))]
            self.forgotten_count += 1
        self._refused[producer_id] = _Refused(epoch, sequences, code, answers)

    def await_missing(self, producer_id: int, epoch: int, sequence: int) -> None:
        """The batch that begins at `sequence` may be sent here next: the leader before this one had
        not answered it. That is assumed once; when all answers were given, the producer is told
        that it is out of order.
        """
        known = self._refused.get(producer_id)
        if known is not None and known.epoch == epoch and sequence in known.sequences:
            return
        code = ErrorCode.NOT_LEADER_OR_FOLLOWER
        self.note(producer_id, epoch, sequence, code, NEW_LEADER_ANSWERS)

    def refuse_for_good(self, producer_id: int, epoch: int, sequence: int) -> None:
        """The batch that begins at `sequence` will not come again, so what follows it is out of
        order; unless another refused batch, which comes first, still may."""
        known = self._refused.get(producer_id)
        if known is None or known.epoch != epoch or not known.answers_left:
            code = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
            self.note(producer_id, epoch, sequence, code, 0)

    def reason_behind(self, header: BatchHeader, expected: int) -> ErrorCode | None:
        """Why the batch that the log expects next, and this one follows, was refused; None when it
        was not refused."""
        known = self._refused.get(header.producer_id)
        if known is None or known.epoch != header.producer_epoch:
            return None
        if expected not in known.sequences or not known.answers_left:
            return None
        known.answers_left -= 1
        return known.code

    def reason_first(self, header: BatchHeader) -> ErrorCode | None:
        """Why to refuse the first batch of a producer that the log does not know: one before it was
        refused, and may come again (or will not: then this one is out of order). None otherwise."""
        known = self._refused.get(header.producer_id)
        if known is None or known.epoch != header.producer_epoch:
            return None
        ahead = ((header.base_sequence - other) % SEQUENCE_MODULUS for other in known.sequences)
        if not any(0 < distance < SEQUENCE_MODULUS // 2 for distance in ahead):
            return None
        if not known.answers_left:
            return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        known.answers_left -= 1
        return known.code

    def reason_before(self, header: BatchHeader, earlier: Iterable[int]) -> ErrorCode | None:
        """Why to refuse a repeated batch: another one at one of the `earlier` sequences, which the
        log has as well, was refused and has not come again. None otherwise; this one counts as come
        again then."""
        known = self._refused.get(header.producer_id)
        if known is None or known.epoch != header.producer_epoch:
            return None
        if known.answers_left and any(other in known.sequences for other in earlier):
            known.answers_left -= 1
            return known.code
        if header.base_sequence in known.sequences:
            left = tuple(other for other in known.sequences if other != header.base_sequence)
            known.sequences = left
            if not left:
                self.forget(header.producer_id)
        return None

    def forget(self, producer_id: int) -> None:
        """The batch that the log expected of this producer was appended."""
        self._refused.pop(producer_id, None)


CHECKPOINT_BATCHES: Final = 4_000
"""A checkpoint is made after so many batches, or half as many as there are producers if that is
more: encoding two producers a batch suffices, and it bounds how many headers are replayed."""
COPY_BATCHES: Final = 1_000
"""A copy of the table is kept after so many, to go back to when a suffix is truncated."""
COPIES_MAX: Final = 8
TURN_HEADERS: Final = 200
"""Headers replayed in one turn: one or two milliseconds."""
TURN_CHECKED_BYTES: Final = 1 << 20
"""A turn ends as well once so much was read to check the sums of batches."""
TURNS: Final = 8
"""Turns done at once, where a request waits for the outcome."""
ENCODED_PER_BATCH: Final = 32
"""Producers of a checkpoint that are encoded with each batch that is appended."""

MISSING_BATCH_MS: Final = 60_000.0
"""How long a producer may wait for the former leader's answer until it sends a batch here:
`socket.timeout.ms` of librdkafka, the longest of the clients' defaults."""
FIRST_LEADER_MS: Final = 1_000.0
"""The same where there was no leader before: batches under way to a deleted topic of the same name
are refused within moments, and sent again."""

COMES_AGAIN: Final = frozenset(
    {
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,  # behind a seal, which may end
    }
)
"""After these codes a client sends the same batch again."""
_OUT_OF_ORDER: Final = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


class BehindRefusedError(KafkaError):
    """The batch follows one that was refused; its code is that one's."""


class HeaderLog(Protocol):
    """The log, as far as the state of producers follows from it."""

    @property
    def log_start(self) -> LogStart: ...
    @property
    def log_end_offset(self) -> Offset: ...
    def headers(self, start: Offset, end: Offset) -> Iterator[BatchHeader]: ...
    def check_stored(self, offset: Offset) -> None: ...
    def marker(self, offset: Offset) -> Marker: ...
    @property
    def aborted(self) -> AbortedPort: ...


class PartitionProducers:
    """The table of one partition's idempotent producers, kept in step with the log."""

    def __init__(
        self,
        checkpoints: ProducerCheckpoints,
        clock: Clock,
        version: Callable[[], int] = lambda: NEWEST,
    ) -> None:
        """`version` says in which format states are to be written."""
        self._clock = clock
        self._version = version
        self.table = ProducerStateTable()
        """The state that `current` returns; while `_is_hidden` it may be out of date."""
        self.begins_at = Offset(0)
        """Where this log went on from that of another partition of its number."""
        self._is_hidden = False
        self._refused = RefusedBatches()
        self._leader_epoch = LeaderEpoch(-1)  # of the leadership whose batches were judged last
        self._leads_from = Offset(0)  # the log's end when the first of those was
        # Before this time batches may be under way of which nothing is known here.
        self._complete_from_ms = 0.0
        self._checkpoints = checkpoints
        self._log: HeaderLog | None = None
        self._batches_since = 0
        self._copies: list[ProducerStateTable] = []  # by offset, none beyond the log's end
        self._is_doubtful = False  # the table, not hidden, follows from what was damaged
        self._reading: InTurns[ProducerStateTable] | None = None  # the next table, under way
        self._encoding: tuple[Offset, InTurns[bytes]] | None = None  # the next checkpoint
        self._planned: tuple[Offset, bytes] | None = None  # kept once it is committed
        self._start: tuple[Offset, InTurns[bytes]] | None = None  # the state at a log start
        self._told_end = Offset(0)  # the log was told below it which transactions were aborted
        self._telling: InTurns[None] | None = None  # what is missing of that, from the log
        # Batches that truncations took; they are noted as refused before any batch is judged.
        self._lost: deque[Iterator[list[tuple[ProducerId, int, int]]]] = deque()

    def attach(self, log: HeaderLog) -> None:
        """Take an opened log and begin to replay it: see `read_on`."""
        self._log = log
        self._checkpoints.load()
        self._is_hidden = True
        self.read_on()

    def current(self) -> ProducerStateTable:
        """The exact table, however long its replay takes.

        Raises:
            DamagedError: a part of the log that it follows from is damaged and not repaired yet.
        """
        while not self._read_on() or self._mend_on():
            pass
        return self.table

    def read_on(self, turns: int = TURNS) -> bool:
        """Continue the replay; True when nothing is left to do: the table is exact, or damage stops
        the replay, which is repaired before this replica may lead."""
        try:
            return self._read_on(turns)
        except DamagedError:
            return True  # every use of the table tries again

    def known(self) -> ProducerStateTable | None:
        """The table, as requests go by it; None while more is to be read back than in a few turns.

        Raises:
            DamagedError: a part of the log that it follows from is damaged and not repaired yet.
        """
        return self.table if self._read_on() else None

    def _read_on(self, turns: int = TURNS) -> bool:
        if self._is_hidden:
            self._replace_table(turns)
        return not self._is_hidden

    def _mend_on(self) -> bool:
        """Go on to replace a doubtful table; True while there is more to do."""
        if self._is_doubtful:
            self._replace_table(TURNS)
        return self._is_doubtful

    def _replace_table(self, turns: int) -> None:
        """Go on to read the table that takes the place of the present one."""
        for _ in range(turns):
            if self._reading is None:
                self._reading = self._read_back()
            try:
                next(self._reading)
            except StopIteration as done:
                self._reading = None
                self._is_hidden = self._is_doubtful = False
                self.table = done.value
                self._told_end = self.table.next_offset
                if not self._copies:
                    self._keep_copy()
                break
            except Exception:
                self._reading = None  # it has ended: another one begins
                raise

    def doubt(self, offset: Offset) -> None:
        """What the log said from `offset` on was perhaps read off damaged batches, which are about
        to be repaired: forget what follows from it. `work_on` reads it again.

        Raises:
            DiskError: the device failed.
        """
        self._checkpoints.drop_above(offset)
        self._copies = [copy for copy in self._copies if copy.next_offset <= offset]
        self._encoding = self._planned = self._start = self._telling = None
        self._reading = None
        self._is_doubtful = not self._is_hidden

    @property
    def is_doubtful(self) -> bool:
        """True while the table follows from what may have been damaged: see `work_on`."""
        return self._is_doubtful

    def judge(self, header: BatchHeader, leader_epoch: LeaderEpoch) -> Verdict:
        """Judge a batch of an idempotent producer, as `ProducerStateTable.check`.

        Raises:
            BehindRefusedError: a batch before it is missing or was refused, and may come again.
            KafkaError: why it is refused; DamagedError as `current`.
        """
        table = self.known()
        if table is None:
            raise KafkaError(
                "the state of producers is still being replayed",
                code=ErrorCode.NOT_LEADER_OR_FOLLOWER,
            )
        if leader_epoch != self._leader_epoch:
            self._leader_epoch, self._leads_from = leader_epoch, table.next_offset
        if header.base_sequence > 0 and table.get(header.producer_id) is None:
            self._check_first(header)
        verdict: Verdict
        try:
            verdict = table.check(header)
        except KafkaError as error:
            if error.code is not _OUT_OF_ORDER or isinstance(error, EndedTransactionError):
                raise
            expected = table.next_sequence(header.producer_id, header.producer_epoch)
            if self._passes_over(header, expected):
                self._check_first(header)
                return ACCEPT
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

    def exact(self) -> ProducerStateTable:
        """The exact table.

        Raises:
            KafkaError: it is not replayed yet; DamagedError as `current`.
        """
        if not self._read_on():
            raise KafkaError(
                "the state of producers is still being replayed",
                code=ErrorCode.NOT_LEADER_OR_FOLLOWER,
            )
        return self.table

    def judge_own(self, header: BatchHeader) -> Verdict:
        """Judge a batch of a broker. Its producers are never forgotten, so one that is not known
        begins here, and nothing of it can have been appended before.

        Raises:
            KafkaError: as `ProducerStateTable.check`, or OUT_OF_ORDER_SEQUENCE_NUMBER.
        """
        table = self.exact()
        if header.base_sequence and table.get(header.producer_id) is None:
            raise KafkaError("it is not the first of its producer", code=_OUT_OF_ORDER)
        return table.check(header)

    def led(self, *, is_first: bool) -> None:
        """This node leads from now on; `is_first` when no leader was before it."""
        self._doubt_for(FIRST_LEADER_MS if is_first else MISSING_BATCH_MS)

    def _doubt_for(self, milliseconds: float) -> None:
        end_ms = self._clock.monotonic_ms() + milliseconds
        self._complete_from_ms = max(self._complete_from_ms, end_ms)

    def _check_first(self, header: BatchHeader) -> None:
        """Refuse a batch above sequence 0 of a producer that the log does not know, if a batch
        before it may be under way. Otherwise it may start anywhere: the producer wrote to a deleted
        topic of the same name, or was idle for longer than it is remembered."""
        code = self._refused.reason_first(header)
        if code is _OUT_OF_ORDER:
            raise KafkaError(f"sequence {header.base_sequence} follows a refused one", code=code)
        if code is None and self._clock.monotonic_ms() < self._complete_from_ms:
            code = ErrorCode.NOT_LEADER_OR_FOLLOWER
            batch = header.producer_id, header.producer_epoch, header.base_sequence
            self._refused.note(*batch, code)  # what follows waits for it
        if code is not None:
            raise BehindRefusedError("a batch before it may be under way", code=code)

    def _passes_over(self, header: BatchHeader, expected: int) -> bool:
        """True for the first batch in this log of a producer that wrote to the one before, under
        the number that this partition has, and gave up sequences in between: no leader took any
        while the number was sealed or gone, and the log before had none above what is known. What
        it gave up may be under way yet, as that of one that is not known."""
        producer = self.table.get(header.producer_id)
        if producer is None or producer.epoch != header.producer_epoch or not producer.batches:
            return False
        is_of_before = producer.batches[-1].base_offset < self.begins_at
        ahead = (header.base_sequence - expected) % SEQUENCE_MODULUS
        return is_of_before and 0 < ahead < SEQUENCE_MODULUS // 2

    def _check_order(self, header: BatchHeader) -> None:
        """Refuse a repeated batch if one before it was refused and may come again."""
        producer = self.table.get(header.producer_id)
        assert producer is not None, "a duplicate is of a known producer"
        known = [batch.base_sequence for batch in producer.batches]
        earlier = known[: known.index(header.base_sequence)]
        code = self._refused.reason_before(header, earlier)
        if code is not None:
            raise BehindRefusedError("a batch before it was refused, and may come again", code=code)

    def _is_new_here(self, producer_id: int) -> bool:
        """True while all batches of a producer in the log were appended by former leaders. After a
        marker that raised its epoch there are none of that, and the first may be under way."""
        producer = self.table.get(producer_id)
        if producer is None:
            return False
        if not producer.batches:
            return self._clock.monotonic_ms() < self._complete_from_ms
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
            return  # no producer can be told from it
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
        replica: ReplicaPort,
    ) -> AppendResult | Promise[AppendResult]:
        """What to answer to a batch that is refused; remembers it as `refused` does.

        A leader that was replaced and does not know it lacks the batches that its successor
        appended, and finds the one after those out of order; librdkafka then begins a new epoch of
        its producer id, at the risk of second copies. So OUT_OF_ORDER_SEQUENCE_NUMBER is answered
        only when a read barrier proves that this replica led when it judged. Behind a seal nothing
        is out of order, since nothing is taken: the producer is to look for another partition.
        """
        seal, is_over = replica.newest_seal, isinstance(error, EndedTransactionError)
        if error.code is _OUT_OF_ORDER and seal is not None and seal.is_closed and not is_over:
            error = KafkaError("it is sealed", code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        self.refused(records, error)
        refusal = AppendResult.refused(error)
        if error.code is not _OUT_OF_ORDER:
            return refusal
        told: Promise[AppendResult] = Promise()

        def confirmed(barrier: Promise[RaftIndex]) -> None:
            not_leader = AppendResult(ErrorCode.NOT_LEADER_OR_FOLLOWER)
            told.resolve(refusal if barrier.error is None else not_leader)

        replica.read_barrier().when_done(confirmed)
        return told.result() if told.is_done else told

    def appended(self, header: BatchHeader, batch: Buffer = b"") -> None:
        """A batch was written at the log's end."""
        if self._is_hidden:
            if self._reading is not None:
                self.read_on(1)  # this batch is replayed with the others
            return
        if header.attributes & CONTROL:
            self._ended(header, batch)
        else:
            self.table.append(header)
        self._batches_since += 1
        if self._batches_since % COPY_BATCHES == 0 and not self._is_doubtful:
            self._keep_copy()
            if self._batches_since >= max(CHECKPOINT_BATCHES, len(self.table) // 2):
                self._batches_since = 0
                if self._encoding is None and self._planned is None:
                    copy = self._copies[-1]  # which nothing is appended to
                    encoding = copy.encoding(self._version(), turn=ENCODED_PER_BATCH)
                    self._encoding = copy.next_offset, encoding
        if self._encoding is not None:
            offset, encoding = self._encoding
            try:
                next(encoding)
            except StopIteration as done:
                self._planned = offset, done.value
                self._encoding = None

    def _ended(self, header: BatchHeader, batch: Buffer) -> None:
        first = self.table.end(header)
        if first != NO_OFFSET and not parse_marker(batch).is_commit:
            self._tell((Aborted(header.producer_id, first, header.base_offset),))

    def _tell(self, found: Sequence[Aborted] = ()) -> None:
        assert self._log is not None
        end = self.table.next_offset
        self._log.aborted.tell(self._told_end, end, found)
        self._told_end = end

    def _keep_copy(self) -> None:
        self._copies.append(self.table.copy())
        if self._log is not None:
            self._tell()
            self._log.aborted.write()  # no checkpoint is newer
        if len(self._copies) > COPIES_MAX:
            del self._copies[1:-1:2]  # little is committed: keep every other one

    def truncated(self) -> None:
        """The log's end moved back; the batches that are gone were not acknowledged, and may come
        again."""
        assert self._log is not None
        end = self._log.log_end_offset
        self._lost.append(self.table.lost_from(end))  # nothing is appended to a hidden table
        while self._copies and self._copies[-1].next_offset > end:
            self._copies.pop()
        if self._planned is not None and self._planned[0] > end:
            self._planned = None
        if self._encoding is not None and self._encoding[0] > end:
            self._encoding = None
        self._hide()
        self.read_on()

    def committed(self, high_watermark: Offset, flushed_end: Offset) -> None:
        """The log below `high_watermark` will never change; below `flushed_end` it is on the disk,
        and a follower reads no further."""
        if self._planned is not None and self._planned[0] <= high_watermark:
            self._checkpoints.add(*self._planned)
            self._planned = None
        else:
            self._checkpoints.write_on()
        self.table.settle(min(high_watermark, flushed_end))
        while len(self._copies) > 1 and self._copies[1].next_offset <= high_watermark:
            del self._copies[0]

    def state_at(self, offset: Offset) -> bytes | None:
        """The state after the batches that end at or below a committed `offset`, encoded.

        None when it takes longer: called for the same offset again, it goes on.

        Raises:
            DamagedError: a part of the log that it follows from is damaged and not repaired yet.
        """
        assert self._log is not None
        self._checkpoints.drop_below(self._log.log_start.base_offset)
        if self._start is None or self._start[0] != offset:
            self._start = offset, self._encoded_at(offset)
        try:
            for _ in range(TURNS):
                next(self._start[1])
        except StopIteration as done:
            self._start = None
            state: bytes = done.value
            return state
        except DamagedError:
            self._start = None
            raise
        return None

    def restore(self, log_start: LogStart) -> None:
        """Begin anew at a log start, which the log has begun with if it is attached."""
        self.table = ProducerStateTable(log_start.base_offset)
        self._copies.clear()
        self._encoding = self._planned = self._start = None
        self._hide()
        if self._log is not None:
            self.read_on()

    def _hide(self) -> None:
        self._is_hidden, self._is_doubtful = True, False
        self._reading = self._telling = None

    def _encoded_at(self, offset: Offset) -> InTurns[bytes]:
        table = yield from self._at(offset)
        return (yield from table.encoding(self._version()))

    def _read_back(self) -> InTurns[ProducerStateTable]:
        while self._lost:
            for lost in self._lost[0]:
                for batch in lost:
                    self._refused.note(*batch, ErrorCode.NOT_LEADER_OR_FOLLOWER)
                yield
            self._lost.popleft()
        return (yield from self._at(None))

    # ---- what is stable ----

    @property
    def is_exact(self) -> bool:
        """True when `table` is what the log says, after some more of its replay."""
        if self._is_hidden:
            self.read_on()
        return not self._is_hidden

    @property
    def is_hidden(self) -> bool:
        """True while what the log says is not known; looking does not read it."""
        return self._is_hidden

    def last_stable_offset(self, end: Offset) -> Offset | None:
        """Where read_committed consumers must stop, where all below `end` is committed; None while
        that cannot be told: see `work_on`."""
        if self._is_hidden and not self.is_exact:
            return None
        return self.table.last_stable_offset(end)

    def aborted(self, start: Offset, end: Offset) -> list[Aborted] | None:
        """The aborted transactions of which something may lie in `[start, end)`, below the last
        stable offset; None while that cannot be told: see `work_on`.

        Raises:
            DiskError: the device failed.
        """
        assert self._log is not None
        if self._is_hidden:
            return None
        self._tell()
        try:
            return self._log.aborted.between(start, end)
        except UntoldError:
            if self._telling is None:
                self._telling = self._tell_missing()
            return None

    def work_on(self) -> bool:
        """Go on with what readers wait for; True while there is more to do.

        Raises:
            DamagedError: a part of the log that it follows from is damaged and not repaired yet.
        """
        if not self._read_on():
            return True
        try:
            is_mending = self._mend_on()
        except DamagedError:
            if self._telling is None:
                raise
            is_mending = False  # who reads what is sound does not wait for its repair
        return self._tell_on() or is_mending

    def _tell_on(self) -> bool:
        try:
            for _ in range(TURNS if self._telling is not None else 0):
                assert self._telling is not None
                next(self._telling)
        except StopIteration:
            self._telling = None
        except DamagedError:
            self._telling = None
            raise
        return self._telling is not None

    def _tell_missing(self) -> InTurns[None]:
        """Tell the log of the aborted transactions of which it does not know any more."""
        log = self._log
        assert log is not None
        before = None
        while (missing := log.aborted.untold()) is not None:
            at = missing.start, missing.end
            if at == before:
                return  # it is not to be had; whoever reads asks again
            before = at
            table = yield from self._at(Offset(missing.start))
            yield from self._follow(table, Offset(missing.end), tells=True)

    def _at(self, end: Offset | None) -> InTurns[ProducerStateTable]:
        """The table at an offset, or at the log's end, wherever that is by then."""
        log = self._log
        assert log is not None
        limit = log.log_end_offset if end is None else end
        start, state = log.log_start.base_offset, log.log_start.state
        checkpoint = self._checkpoints.best(limit, start)
        if checkpoint is not None:
            start, state = checkpoint
        table = None
        copies = [copy for copy in self._copies if start <= copy.next_offset <= limit]
        if copies:
            start, table = copies[-1].next_offset, (yield from copies[-1].copying())
        if table is None:
            table = yield from ProducerStateTable.decoding(state)
        table.next_offset = Offset(max(table.next_offset, start))
        if (yield from self._follow(table, end, tells=end is None)):
            return table
        return (yield from self._at(end))

    def _follow(
        self, table: ProducerStateTable, end: Offset | None, *, tells: bool
    ) -> InTurns[bool]:
        """Bring a table up to an offset, or to the log's end, wherever that is by then; False where
        the log begins beyond it by now.

        Args:
            tells: tell the log of the aborted transactions that are met.
        """
        log = self._log
        assert log is not None
        seen = table.next_offset
        while seen < (limit := log.log_end_offset if end is None else end):
            # Begun anew in each turn: files may have been rolled or dropped meanwhile.
            if seen < log.log_start.base_offset:
                return False
            before = seen
            found: list[Aborted] = []
            checked_bytes = 0
            for header in islice(log.headers(seen, limit), TURN_HEADERS):
                seen = Offset(max(seen, header.next_offset))
                if table.next_offset <= header.base_offset and header.next_offset <= limit:
                    checked_bytes += self._replay(table, header, found)
                    if checked_bytes >= TURN_CHECKED_BYTES:
                        break
            if seen == before:
                break  # a hole up to there
            if tells:
                log.aborted.tell(before, min(seen, limit), found)
            if seen < limit:
                yield
        return True

    def _replay(self, table: ProducerStateTable, header: BatchHeader, found: list[Aborted]) -> int:
        """Add one batch to a table; how many bytes had to be read for it."""
        log = self._log
        assert log is not None
        offset = Offset(header.base_offset)
        if header.attributes & CONTROL:
            marker = log.marker(offset)
            first = table.end(header)
            if first != NO_OFFSET and not marker.is_commit:
                found.append(Aborted(header.producer_id, first, offset))
            return 0
        is_surprising = not table.expects(header)
        if is_surprising:
            # Headers are read without their bodies, so their sums are not checked. A surprising
            # one, which is rare, is believed only once its sum is.
            log.check_stored(offset)
        table.append(header)
        return header.size if is_surprising else 0
