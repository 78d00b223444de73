"""What a partition remembers of its idempotent producers, so that a retry is not a second copy.

`ProducerStateTable` maps producer ids to epoch, last sequences and open transaction. It is a pure
function of the log below `next_offset`: `append` is called with every batch, in log order, on
leader and followers alike, so a new leader that replayed its log decides as the old one would have.
`check` never changes anything. The table is rolled back by taking an older one and appending again.
A `Producer` is never changed in place, so copies of the table share it; methods that walk all
producers (`encoding`, `decoding`) are generators, so that they can run in short turns.

Invariants: a known producer's batches continue its sequence without a gap, or start at 0 under a
higher epoch (but for what it gave up while its partition's number was gone: `producers.py`); one
that is not known may start anywhere, as in Kafka (KIP-360): it may have written to a deleted topic
of the same name, or have been forgotten. (`producers.py` judges whether a batch before it may still
be under way.) The last five batches of each producer are recognized as duplicates (a producer may
have five requests in flight). Idle producers expire by the log's own greatest timestamp, never by a
clock, so that all replicas forget the same ones at the same offset; the last ones to write never
expire, since one client or leader whose clock is days ahead makes all others look idle. Neither do
those with an open transaction, whose end is judged by it, nor those of brokers: what a delay
partition sends again, perhaps after days, must be known (`delays/`).

A transaction is open from its first batch to its marker, and holds the last stable offset back
until that marker is committed. Where the first one begins is known at any time: those that are
open stand in the order in which they began.

`ProducerCheckpoints` keeps encoded tables at chosen offsets, so that nobody has to replay a whole
log: a cache beside the log (`producers.snapshot`), never a source of truth. Whatever is missing or
damaged is replayed from the log. Only states at *committed* offsets are kept; that prefix of a
group never changes, so a checkpoint is right on this replica for ever, also after a crash that took
the end of the log, and it needs no fsync; what was read off damaged batches is to be dropped
(`drop_above`). Bounded in bytes: when full, every other one goes. One of many producers is written
in pieces (`write_on`); until it is there as a whole it is a bad one.
Layout: "RQPC", version uint16; then per checkpoint: size uint32, offset int64, CRC-32C uint32 over
offset and data, data. A bad checkpoint ends the file.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Generator, Iterator
from heapq import heappop, heappush
from itertools import chain, islice
from typing import Final, TypeAlias, TypeVar

from attrs import define, evolve, field, frozen
from crc32c import crc32c

from raftmq.errors import AheadError, ErrorCode, KafkaError, RaftmqError
from raftmq.ports import Disk, DiskError
from raftmq.records import (
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    OWN_PRODUCER_ID_MIN,
    SEQUENCE_MODULUS,
    BatchHeader,
)
from raftmq.types import Buffer, Offset, ProducerId

BATCHES_REMEMBERED: Final = 5
EXPIRATION_MS: Final = 86_400_000
EXPECTED_MS: Final = 3_600_000
"""A batch that makes the log's greatest timestamp greater by more is looked at twice."""
PRODUCERS_KEPT: Final = 1_000
"""The last ones to write are remembered whatever timestamps say: a retry may be under way."""
PRODUCERS_MAX: Final = 200_000
"""Beyond this the longest idle ones are forgotten, the same ones on every replica."""

TURN_PRODUCERS: Final = 100
"""Producers encoded or decoded in one turn: less than a millisecond."""
TURN_LOOKED_AT: Final = 1_000
"""Producers looked at in one turn, where most are passed over."""
TURN_COPIED: Final = 4_000
"""Producers copied in one turn."""

NO_OFFSET: Final = Offset(-1)

_Result = TypeVar("_Result")
InTurns: TypeAlias = Generator[None, None, _Result]
"""Work in turns of a millisecond or so; the generator returns the result."""


def at_once(work: InTurns[_Result]) -> _Result:
    """Do all turns of the work now."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: _Result = done.value
            return result


_MAGIC: Final = b"RQPS"
OLDEST: Final = 1
NEWEST: Final = 2
OPEN_FROM: Final = 2
"""From this format on producers with an open transaction come last, in the order in which it
began; before it there were none."""
# magic, version u16, producer count u32, next offset, greatest timestamp, number of producers with
# an open transaction (format 1: -1, once the greatest expired id)
_HEADER: Final = struct.Struct(">4sHIqqq")
# producer id, epoch, batch count u8, seen at, first offset of the open transaction or -1
_PRODUCER: Final = struct.Struct(">qhBqq")
# base sequence, base offset, last offset delta, timestamp
_BATCH: Final = struct.Struct(">iqiq")
_CRC: Final = struct.Struct(">I")


class ProducerStateError(RaftmqError):
    """Bytes that are no producer state, damaged, or of a newer format."""


class NewerProducerStateError(ProducerStateError, AheadError):
    """Producer state that a newer raftmq wrote."""


@frozen(slots=True)
class Accept:
    """The batch continues its producer's sequence, or has no producer id."""


@frozen(slots=True)
class Duplicate:
    """The batch is in the log already; it is acknowledged when its first copy is committed."""

    base_offset: Offset
    next_offset: Offset
    timestamp: int


class EndedTransactionError(KafkaError):
    """A batch at the sequence of one whose transaction has ended: another batch, as it seems.

    A client that dropped batches with an aborted transaction may give their sequences to the next
    one's records. Were it told that they are there already, it would commit without them.
    """


ACCEPT: Final = Accept()
Verdict: TypeAlias = Accept | Duplicate


@frozen(slots=True)
class KnownBatch:
    """One of the last batches of a producer."""

    base_sequence: int
    base_offset: Offset
    last_offset_delta: int
    timestamp: int

    @property
    def last_sequence(self) -> int:
        """The sequence of its last record."""
        return (self.base_sequence + self.last_offset_delta) % SEQUENCE_MODULUS


@frozen(slots=True)
class Producer:
    """What is known of one producer id; copies of a table share it."""

    epoch: int
    seen_at: int  # the log's greatest timestamp when it last wrote
    batches: tuple[KnownBatch, ...] = ()  # oldest first
    open_since: Offset = NO_OFFSET  # first offset of its open transaction
    is_transactional: bool | None = field(default=None, eq=False)
    """Whether its last batch was; None where only the encoded state is known: it does not say."""

    @property
    def last_sequence(self) -> int:
        """The sequence of its last record under this epoch, or NO_SEQUENCE."""
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE


@define(slots=True)
class ProducerStateTable:
    """All producers of one partition, exactly as of `next_offset`."""

    next_offset: Offset = Offset(0)
    expiration_ms: int = EXPIRATION_MS
    _greatest_timestamp: int = -1
    # In the order of their last batch, so that the longest idle one stands first.
    # (The first of a plain dict is behind the places of all that were taken out before it.)
    _producers: OrderedDict[ProducerId, Producer] = field(factory=OrderedDict)
    # Those with an open transaction, in the order of its first batch, so that the oldest is first.
    _open: OrderedDict[ProducerId, Producer] = field(factory=OrderedDict)
    # A heap of (first offset, offset of the marker) of transactions that ended; what is committed
    # goes when it is met at the top.
    _ended: list[tuple[Offset, Offset]] = field(factory=list, eq=False)

    def __len__(self) -> int:
        return len(self._producers) + len(self._open)

    def get(self, producer_id: int) -> Producer | None:
        """What is known of a producer id."""
        producer = self._producers.get(ProducerId(producer_id))
        if producer is None and self._open:
            return self._open.get(ProducerId(producer_id))
        return producer

    def next_sequence(self, producer_id: int, epoch: int) -> int:
        """The sequence that a producer's next batch under this epoch must begin with."""
        producer = self.get(producer_id)
        if producer is None or producer.epoch != epoch:
            return 0
        return (producer.last_sequence + 1) % SEQUENCE_MODULUS

    def producers(self) -> list[tuple[ProducerId, Producer]]:
        """All producers by id, for DescribeProducers."""
        return sorted(chain(self._producers.items(), self._open.items()))

    def check(self, header: BatchHeader) -> Verdict:
        """Judge a batch that a client wants to append at the log's end.

        Raises:
            KafkaError: INVALID_PRODUCER_EPOCH, OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_TXN_STATE.
        """
        if header.producer_id < 0:
            return ACCEPT
        if header.producer_epoch < 0:
            raise _refusal(ErrorCode.INVALID_PRODUCER_EPOCH, header, "has no epoch")
        producer = self.get(header.producer_id)
        if producer is None:
            return ACCEPT
        if header.producer_epoch < producer.epoch:
            raise _refusal(
                ErrorCode.INVALID_PRODUCER_EPOCH, header, f"is fenced by epoch {producer.epoch}"
            )
        if header.producer_epoch > producer.epoch:
            if header.base_sequence != 0:
                raise _refusal(
                    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, header, "starts a new epoch above 0"
                )
            _check_kind(header, producer)
            return ACCEPT
        for batch in reversed(producer.batches):
            if (
                batch.base_sequence == header.base_sequence
                and batch.last_offset_delta == header.last_offset_delta
            ):
                if header.is_transactional and not _is_open(producer, batch):
                    raise EndedTransactionError(
                        f"batch of producer {header.producer_id} at sequence "
                        f"{header.base_sequence} repeats one of a transaction that has ended",
                        code=ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                    )
                next_offset = Offset(batch.base_offset + batch.last_offset_delta + 1)
                return Duplicate(batch.base_offset, next_offset, batch.timestamp)
        if header.base_sequence != (producer.last_sequence + 1) % SEQUENCE_MODULUS:
            raise _refusal(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                header,
                f"follows sequence {producer.last_sequence}",
            )
        _check_kind(header, producer)
        return ACCEPT

    def expects(self, header: BatchHeader) -> bool:
        """True for a batch of nearly the log's time that has no producer, or continues its
        producer's sequence and is of the same kind as the one before."""
        if header.max_timestamp - self._greatest_timestamp > EXPECTED_MS:
            return False
        if header.producer_id == NO_PRODUCER_ID:
            return True
        producer = self.get(header.producer_id)
        return (
            producer is not None
            and producer.epoch == header.producer_epoch
            and header.base_sequence == (producer.last_sequence + 1) % SEQUENCE_MODULUS
            and producer.is_transactional is header.is_transactional
        )

    def append(self, header: BatchHeader) -> None:
        """Note a batch of records that the log now holds, whatever `check` would say of it."""
        assert header.base_offset >= self.next_offset, "batches come in log order"
        self.next_offset = Offset(header.next_offset)
        self._greatest_timestamp = max(self._greatest_timestamp, header.max_timestamp)
        if header.producer_id >= 0:
            self._note(header)
        self._expire()

    def end(self, header: BatchHeader) -> Offset:
        """Note a control batch that the log now holds; the first offset of the transaction that it
        ends, `NO_OFFSET` where none is open."""
        assert header.base_offset >= self.next_offset, "batches come in log order"
        assert header.is_control, "records end nothing"
        self.next_offset = Offset(header.next_offset)
        self._greatest_timestamp = max(self._greatest_timestamp, header.max_timestamp)
        producer_id = ProducerId(header.producer_id)
        if producer_id < 0:
            return NO_OFFSET
        before = self._open.pop(producer_id, None)
        first = NO_OFFSET
        if before is not None:
            first = before.open_since
            heappush(self._ended, (first, Offset(header.base_offset)))
        else:
            before = self._producers.pop(producer_id, None)
        batches: tuple[KnownBatch, ...] = ()
        if before is not None and before.epoch == header.producer_epoch:
            batches = before.batches
        self._producers[producer_id] = Producer(
            header.producer_epoch, self._greatest_timestamp, batches, is_transactional=True
        )
        self._expire()
        return first

    def _note(self, header: BatchHeader) -> None:
        producer_id = ProducerId(header.producer_id)
        # Taken out and put back at the end: see `_producers`.
        before = self._producers.pop(producer_id, None)
        if before is None and self._open:
            before = self._open.get(producer_id)
        batches: tuple[KnownBatch, ...] = ()
        open_since = NO_OFFSET if before is None else before.open_since
        if before is not None and before.epoch == header.producer_epoch:
            batches = before.batches
        if header.is_transactional and open_since == NO_OFFSET:
            open_since = Offset(header.base_offset)
        batch = KnownBatch(
            header.base_sequence,
            Offset(header.base_offset),
            header.last_offset_delta,
            header.max_timestamp,
        )
        batches = (*batches[1 - BATCHES_REMEMBERED :], batch)
        rows = self._producers if open_since == NO_OFFSET else self._open
        rows[producer_id] = Producer(
            header.producer_epoch,
            self._greatest_timestamp,
            batches,
            open_since,
            header.is_transactional,
        )

    def _expire(self) -> None:
        idle_before = self._greatest_timestamp - self.expiration_ms
        producers = self._producers
        own_left = PRODUCERS_KEPT
        while len(producers) > PRODUCERS_KEPT:
            producer_id = next(iter(producers))
            producer = producers[producer_id]
            if producer.seen_at > idle_before and len(producers) <= PRODUCERS_MAX:
                return
            del producers[producer_id]
            if producer_id >= OWN_PRODUCER_ID_MIN:
                # Never forgotten: it counts as one that wrote just now.
                producers[producer_id] = evolve(producer, seen_at=self._greatest_timestamp)
                own_left -= 1
                if not own_left:
                    return

    @property
    def greatest_timestamp(self) -> int:
        """Of all batches of the log; -1 where there was none."""
        return self._greatest_timestamp

    @property
    def first_open_offset(self) -> Offset | None:
        """Where the oldest open transaction starts."""
        for producer in self._open.values():
            return producer.open_since
        return None

    @property
    def oldest_open(self) -> tuple[ProducerId, Producer] | None:
        """Whose transaction has been open for longest, as offsets go; None: no one's."""
        return next(iter(self._open.items()), None)

    def settle(self, end: Offset) -> None:
        """All below is committed, markers among it, and nobody reads less than that any more."""
        ended = self._ended
        while ended and ended[0][1] < end:
            heappop(ended)

    def last_stable_offset(self, end: Offset) -> Offset:
        """Where read_committed consumers must stop: before the first transaction whose marker is
        not below `end`, below which all is committed."""
        # Nothing is forgotten here: a leader that is deposed reads less than before, for what it
        # has not flushed itself.
        undecided = [first for first, marker in self._ended if marker >= end]
        if undecided:
            end = min(end, *undecided)
        for producer in self._open.values():
            return min(end, producer.open_since)
        return end

    def copy(self) -> ProducerStateTable:
        """An independent table of the same state: a few milliseconds for 100,000 producers."""
        return ProducerStateTable(
            self.next_offset,
            self.expiration_ms,
            self._greatest_timestamp,
            self._producers.copy(),
            self._open.copy(),
            self._ended.copy(),
        )

    def copying(self) -> InTurns[ProducerStateTable]:
        """As `copy`, in turns; nothing may be appended meanwhile."""
        table = ProducerStateTable(self.next_offset, self.expiration_ms, self._greatest_timestamp)
        for theirs, ours in ((self._producers, table._producers), (self._open, table._open)):
            rows = iter(theirs.items())
            while part := list(islice(rows, TURN_COPIED)):
                ours.update(part)
                if len(part) == TURN_COPIED:
                    yield
        table._ended = self._ended.copy()
        return table

    def lost_from(self, end: Offset) -> Iterator[list[tuple[ProducerId, int, int]]]:
        """(producer id, epoch, sequence) of the first known batch at or above `end`, of each
        producer that has one; `TURN_LOOKED_AT` producers at a time."""
        rows = chain(self._producers.items(), self._open.items())
        while part := list(islice(rows, TURN_LOOKED_AT)):
            yield [
                (
                    producer_id,
                    producer.epoch,
                    next(b.base_sequence for b in producer.batches if b.base_offset >= end),
                )
                for producer_id, producer in part
                if producer.batches and producer.batches[-1].base_offset >= end
            ]

    def newest(self, bytes_max: int, version: int = NEWEST) -> bytes:
        """The state with the last producers to write alone, as many as have room, encoded: what a
        log that goes on where this one ends begins with. Whatever timestamps say, as where the
        table forgets. None with an open transaction, whose marker no later log has."""
        left = bytes_max - _HEADER.size - _CRC.size
        chosen: list[tuple[ProducerId, Producer]] = []
        for producer_id, producer in reversed(self._producers.items()):
            left -= _PRODUCER.size + len(producer.batches) * _BATCH.size
            if left < 0:
                break
            chosen.append((producer_id, producer))
        table = ProducerStateTable(self.next_offset, self.expiration_ms, self._greatest_timestamp)
        table._producers.update(reversed(chosen))
        return table.encode(version) if chosen else b""

    @property
    def encoded_bytes_max(self) -> int:
        """No fewer bytes than `encode` returns."""
        each = _PRODUCER.size + BATCHES_REMEMBERED * _BATCH.size
        return _HEADER.size + len(self) * each + _CRC.size

    def encode(self, version: int = NEWEST) -> bytes:
        """The state as versioned bytes with a checksum; equal states give equal bytes."""
        return at_once(self.encoding(version))

    def encoding(self, version: int = NEWEST, *, turn: int = TURN_PRODUCERS) -> InTurns[bytes]:
        """As `encode`, `turn` producers at a time; nothing may be appended meanwhile.

        Only what all nodes can read may be written (level 3 of `raftmq.level` for format 2).
        """
        head = (_MAGIC, version, len(self))
        open_count = -1 if version < OPEN_FROM else len(self._open)
        body = bytearray(
            _HEADER.pack(*head, self.next_offset, self._greatest_timestamp, open_count)
        )
        rows = chain(self._producers.items(), self._open.items())
        while part := list(islice(rows, turn)):
            pieces = []
            for producer_id, producer in part:
                batches = producer.batches
                row = producer.epoch, len(batches), producer.seen_at, producer.open_since
                pieces.append(_PRODUCER.pack(producer_id, *row))
                pieces.extend(
                    _BATCH.pack(b.base_sequence, b.base_offset, b.last_offset_delta, b.timestamp)
                    for b in batches
                )
            body += b"".join(pieces)
            if len(part) == turn:
                yield
        body += _CRC.pack(crc32c(body))
        return bytes(body)

    @classmethod
    def decode(cls, data: Buffer, *, expiration_ms: int = EXPIRATION_MS) -> ProducerStateTable:
        """Read what `encode` wrote; no bytes at all are the state of an empty log.

        Raises:
            ProducerStateError: damaged, or of a newer format.
        """
        return at_once(cls.decoding(data, expiration_ms=expiration_ms))

    @classmethod
    def decoding(
        cls, data: Buffer, *, expiration_ms: int = EXPIRATION_MS
    ) -> InTurns[ProducerStateTable]:
        """As `decode`, some producers at a time."""
        if not len(data):
            return cls(expiration_ms=expiration_ms)
        body, count, next_offset, timestamp, _ = _opened(data)
        table = cls(Offset(next_offset), expiration_ms, timestamp)
        unordered: list[tuple[Offset, ProducerId, Producer]] = []
        position = _HEADER.size
        for number in range(1, count + 1):
            producer_id, epoch, batches, seen_at, since = _PRODUCER.unpack_from(body, position)
            position += _PRODUCER.size
            end = position + batches * _BATCH.size
            known = tuple(KnownBatch(*row) for row in _BATCH.iter_unpack(body[position:end]))
            if since == NO_OFFSET:
                table._producers[producer_id] = Producer(epoch, seen_at, known)
            else:
                producer = Producer(epoch, seen_at, known, since, is_transactional=True)
                unordered.append((since, producer_id, producer))
            position = end
            if number % TURN_PRODUCERS == 0:
                yield
        # Those of format 2 stand in this order already.
        table._open.update((row[1], row[2]) for row in sorted(unordered, key=lambda row: row[0]))
        return table


def check_encoded(data: Buffer) -> None:
    """Refuse bytes that `decode` could not read.

    Raises:
        ProducerStateError: damaged, or of a newer format.
    """
    if not len(data):
        return
    body, count, next_offset, _, open_count = _opened(data)
    position = _HEADER.size
    first_open, before = count - open_count, NO_OFFSET
    for number in range(count):
        if position + _PRODUCER.size > len(body):
            break
        _, _, batches, _, since = _PRODUCER.unpack_from(body, position)
        position += _PRODUCER.size + batches * _BATCH.size
        if open_count >= 0:
            is_open = number >= first_open
            if is_open != (before < since < next_offset) or (not is_open and since != NO_OFFSET):
                raise ProducerStateError("open transactions are not in the order of their starts")
            before = since
    if position != len(body):
        raise ProducerStateError("producer state is not as long as it says")


def check_beginning(data: Buffer, begins_at: Offset) -> None:
    """Refuse bytes with which a log cannot begin at this offset.

    Raises:
        ProducerStateError: damaged, of a newer format, or of another place or log.
    """
    check_encoded(data)
    table = ProducerStateTable.decode(data)
    if len(data) and (table.next_offset != begins_at or table.first_open_offset is not None):
        raise ProducerStateError("producer state of another place, or with open transactions")


def _opened(data: Buffer) -> tuple[memoryview, int, int, int, int]:
    """Check encoded state; its body, number of producers, next offset, greatest timestamp, number
    of open transactions (-1 where the format does not say)."""
    view = memoryview(data)
    if len(view) < _HEADER.size + _CRC.size:
        raise ProducerStateError("producer state is cut short")
    body = view[: -_CRC.size]
    if _CRC.unpack(view[-_CRC.size :])[0] != crc32c(body):
        raise ProducerStateError("producer state is damaged")
    magic, version, count, next_offset, timestamp, open_count = _HEADER.unpack_from(body)
    if magic != _MAGIC or not OLDEST <= version <= NEWEST:
        told = f"producer state of format {version}, known is {NEWEST}"
        raise (NewerProducerStateError if version > NEWEST else ProducerStateError)(told)
    if version < OPEN_FROM:
        open_count = -1
    elif not 0 <= open_count <= count:
        raise ProducerStateError("more open transactions than producers")
    return body, count, next_offset, timestamp, open_count


def _is_open(producer: Producer, batch: KnownBatch) -> bool:
    """True for a batch of the transaction that the producer has open."""
    return producer.open_since != NO_OFFSET and batch.base_offset >= producer.open_since


def _check_kind(header: BatchHeader, producer: Producer) -> None:
    if producer.open_since != NO_OFFSET and not header.is_transactional:
        raise _refusal(
            ErrorCode.INVALID_TXN_STATE, header, "is not of the transaction that is open"
        )


def _refusal(code: ErrorCode, header: BatchHeader, why: str) -> KafkaError:
    return KafkaError(
        f"producer {header.producer_id} epoch {header.producer_epoch} "
        f"sequence {header.base_sequence} {why}",
        code=code,
    )


assert NO_SEQUENCE == -1, "a producer without batches goes on at sequence 0"
assert NO_PRODUCER_EPOCH < 0, "no epoch is below every epoch"


FILE_NAME: Final = "producers.snapshot"
BYTES_MAX: Final = 1 << 20
PIECE_BYTES: Final = 256 * 1024
"""Bytes written at once: less than a millisecond."""
_FILE_HEADER: Final = struct.Struct(">4sH")
_FILE_MAGIC: Final = b"RQPC"
_FILE_VERSION: Final = 1
_CHECKPOINT: Final = struct.Struct(">IqI")
_CHECKPOINT_OFFSET: Final = struct.Struct(">q")


class ProducerCheckpoints:
    """Encoded producer states by offset; on disk where a folder is given."""

    def __init__(self, disk: Disk | None = None, folder: str = "") -> None:
        self._disk = disk
        self._folder = folder
        self._path = f"{folder}/{FILE_NAME}"
        self._offsets: list[Offset] = []
        self._states: list[bytes] = []
        self._bytes = 0
        self._position = 0  # where the next piece is written; 0: the file is to be written anew
        self._unwritten: deque[memoryview] = deque()
        self._is_read = False  # else the file may hold more than is known here

    def __len__(self) -> int:
        return len(self._offsets)

    def load(self) -> None:
        """Read what an earlier process kept; whatever cannot be read counts as absent."""
        if self._disk is None or not self._disk.exists(self._path):
            return
        try:
            file = self._disk.open(self._path)
            try:
                data = file.pread(file.size(), 0)
            finally:
                file.close()
        except (DiskError, FileNotFoundError):
            return  # it is a cache
        if len(data) < _FILE_HEADER.size or _FILE_HEADER.unpack_from(data) != (
            _FILE_MAGIC,
            _FILE_VERSION,
        ):
            return
        position = _FILE_HEADER.size
        while position + _CHECKPOINT.size <= len(data):
            size, offset, crc = _CHECKPOINT.unpack_from(data, position)
            start = position + _CHECKPOINT.size
            state = data[start : start + size]
            if len(state) != size or crc != _checkpoint_sum(offset, state):
                break
            if self._offsets and offset <= self._offsets[-1]:
                break
            self._keep(Offset(offset), state)
            position = start + size
        self._position = position
        self._is_read = position == len(data)

    def best(self, at_most: Offset, at_least: Offset) -> tuple[Offset, bytes] | None:
        """The latest state at an offset within these bounds, both included."""
        i = bisect_right(self._offsets, at_most) - 1
        if i < 0 or self._offsets[i] < at_least:
            return None
        return self._offsets[i], self._states[i]

    def add(self, offset: Offset, state: bytes) -> None:
        """Keep the state at a committed offset."""
        if self._offsets and offset <= self._offsets[-1]:
            return
        self._keep(offset, state)
        if self._bytes > BYTES_MAX:
            # Every other one goes; the newest always stays.
            self._offsets = self._offsets[::-1][::2][::-1]
            self._states = self._states[::-1][::2][::-1]
            self._bytes = sum(map(len, self._states))
            self._begin_anew()
        self._plan_writes()
        self.write_on()

    def drop_below(self, offset: Offset) -> None:
        """Forget what lies below the log start."""
        count = bisect_right(self._offsets, offset - 1)
        if count:
            del self._offsets[:count]
            del self._states[:count]
            self._bytes = sum(map(len, self._states))
            self._begin_anew()  # when the next one is added

    def drop_above(self, offset: Offset) -> None:
        """Forget what lies above an offset, durably; also what could not be read.

        Raises:
            DiskError: the device failed; another try begins anew.
        """
        count = bisect_right(self._offsets, offset)
        if count == len(self._offsets) and self._is_read:
            return
        self._begin_anew()
        if self._disk is not None:
            # The file goes first: what is forgotten here already is not looked for again.
            self._disk.remove(self._path)
            self._disk.sync_directory(self._folder)
        del self._offsets[count:]
        del self._states[count:]
        self._bytes = sum(map(len, self._states))

    def _keep(self, offset: Offset, state: bytes) -> None:
        self._offsets.append(offset)
        self._states.append(state)
        self._bytes += len(state)

    def write_on(self) -> None:
        """Write the next piece that is not in the file yet."""
        if not self._unwritten:
            return
        assert self._disk is not None, "without a disk nothing is planned"
        pieces: list[memoryview] = []
        left = PIECE_BYTES
        while self._unwritten and left:
            whole = self._unwritten.popleft()
            pieces.append(whole[:left])
            if len(whole) > left:
                self._unwritten.appendleft(whole[left:])
            left -= len(pieces[-1])
        try:
            file = self._disk.open(self._path, create=True)
            try:
                if not self._position:
                    file.truncate(0)
                file.pwritev(pieces, self._position)
            finally:
                file.close()
        except DiskError:
            # A full or failing disk. The log's own writes report it; a cache need not.
            self._begin_anew()
            return
        self._position += PIECE_BYTES - left

    def _plan_writes(self) -> None:
        if self._disk is None:
            return
        is_new = not self._position
        if is_new:
            self._unwritten.append(memoryview(_FILE_HEADER.pack(_FILE_MAGIC, _FILE_VERSION)))
        first = 0 if is_new else len(self._offsets) - 1
        for offset, state in zip(self._offsets[first:], self._states[first:], strict=True):
            head = _CHECKPOINT.pack(len(state), offset, _checkpoint_sum(offset, state))
            self._unwritten += [memoryview(head), memoryview(state)]

    def _begin_anew(self) -> None:
        self._position = 0
        self._unwritten.clear()


def _checkpoint_sum(offset: int, state: bytes) -> int:
    checksum: int = crc32c(state, crc32c(_CHECKPOINT_OFFSET.pack(offset)))
    return checksum
