"""Deliveries: the note that a delay partition commits first, and the batch that then leaves it.

A delivery is a handful of entries that are due, in their order. Its note says which they are, where
they go, and under which sequence of the partition's own producer id; it is a record of the delay
partition's log. Only when the note is committed is the batch sent, by whoever leads then, as often
as it takes; the target's table of producers takes it once, since a repetition has the same sequence
and the same number of records. The next note is written when the batch is known to be committed.

So the notes are the one order of what happened: a note that was cut off with its leader's log sent
nothing; a cancellation that was acknowledged stands before every note of what is due later.

A note of no offsets says that all before it was taken: it stands in for one that retention would
have to keep, where a lane has not delivered for long.

A note of version 2 *gives up* entries whose target is gone: its lane is done with them, and they
are dead, due right after the note's own stamp in the order of the other lane. One of version 3 does
so with entries behind a delivery that its target has not taken for long: that one may have arrived,
and stays owed, but those were never sent.

Records of a transaction are pending once its marker says so, due no sooner than right after the
marker's stamp: a cursor is never above the stamp of what was not read, so it has not passed them.

Another target (the topic was made again, or has more partitions) begins a new epoch at sequence 0.

Dead records, where there is a topic for them, go in a `Lane` of their own, with notes and a cursor
of their own: a target that takes nothing holds up its own lane alone, and epochs do not count up to
and fro.

Layout of a note's value: version uint8 (2 or 3 where it gives up, else 1), target's topic id 16
bytes, partition int32, epoch int16, sequence int32, time of delivery int64, cursor (due int64,
offset int64), count uint32, of version 3 how many of these are owed uint32, then as many offsets
int64: of version 2 those that are given up, of version 3 first those that are owed. Its key is
`raftmq-delivery`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Final, TypeAlias
from uuid import UUID

from attrs import evolve, frozen

from raftmq.codec import OUTPUT_MAX, decompress
from raftmq.delays.headers import (
    Headers,
    Kind,
    RetryPolicy,
    Schedule,
    delivered,
    key_digest,
    read_brief,
    read_schedule,
)
from raftmq.delays.pending import Row
from raftmq.delays.runs import Place
from raftmq.errors import AheadError, CorruptBatchError
from raftmq.record_walk import iter_outlines
from raftmq.records import (
    HEADER_SIZE,
    OWN_PRODUCER_ID_MIN,
    SEQUENCE_MODULUS,
    BatchHeader,
    InvalidRecordError,
    NewRecord,
    Record,
    build_batch,
    parse_header,
    parse_marker,
    read_bytes,
    read_headers,
    read_records,
    read_varint,
)
from raftmq.types import Buffer, RaftGroupId, TopicId

NOTE_PRODUCER_ID: Final = OWN_PRODUCER_ID_MIN
"""Notes in a delay partition have this producer id, so its table knows where the last one is."""
NOTE_OF_DEAD_PRODUCER_ID: Final = NOTE_PRODUCER_ID + 1
"""And so have those of dead records. A delay topic is nobody's target, so no delivery has it."""
NOTE_KEY: Final = b"raftmq-delivery"
RECORDS_MAX: Final = 100
"""Records of one delivery."""
BYTES_MAX: Final = 64 << 10
"""Bytes of one delivery's records, unless the first one alone is larger."""
EPOCH_MAX: Final = (1 << 15) - 1

_VERSION: Final = 1
_VERSION_GIVING_UP: Final = 2
_VERSION_GIVING_UP_BEHIND: Final = 3
_NOTE: Final = struct.Struct(">B16sihiqqqI")
_OFFSET: Final = struct.Struct(">q")
_OWED: Final = struct.Struct(">I")
_NO_TOPIC: Final = TopicId(UUID(int=0))
_GROUP: Final = struct.Struct(">16siq")


@frozen(slots=True)
class Lane:
    """Records of a delay partition that are delivered in one order: the ordinary ones, or the dead
    ones.

    Attributes:
        retry: how records are tried again; None: they are not, and dead is only what is given up.
        has_dead: there is a topic for what is dead.
    """

    retry: RetryPolicy | None = None
    is_dead: bool = False
    has_dead: bool = False

    @property
    def note_producer_id(self) -> int:
        """The producer id of its notes."""
        return NOTE_OF_DEAD_PRODUCER_ID if self.is_dead else NOTE_PRODUCER_ID


ORDINARY: Final = Lane()


class NewerNoteError(CorruptBatchError, AheadError):
    """A note that a newer raftmq wrote."""


@frozen(slots=True, kw_only=True)
class Delivery:
    """One delivery, as its note says.

    Attributes:
        at_ms: the time of the records when delivered.
        cursor: all that is pending up to there is done with.
        offsets: of the records, in the order in which they are delivered; empty where the note
            only says that the delivery before was taken.
        given_up: of records that are not delivered, but dead; where there are `offsets` as well,
            those are of a delivery that was noted before.
    """

    topic_id: TopicId
    partition: int
    epoch: int
    sequence: int
    at_ms: int
    cursor: Place
    offsets: tuple[int, ...]
    given_up: tuple[int, ...] = ()

    @property
    def next_sequence(self) -> int:
        """That of the next delivery to the same target."""
        return (self.sequence + len(self.offsets)) % SEQUENCE_MODULUS

    def encode(self) -> bytes:
        """The value of its note."""
        version = _VERSION
        if self.given_up:
            version = _VERSION_GIVING_UP_BEHIND if self.offsets else _VERSION_GIVING_UP
        head = _NOTE.pack(
            version,
            self.topic_id.bytes,
            self.partition,
            self.epoch,
            self.sequence,
            self.at_ms,
            *self.cursor,
            len(self.offsets + self.given_up),
        )
        if version == _VERSION_GIVING_UP_BEHIND:
            head += _OWED.pack(len(self.offsets))
        return head + b"".join(map(_OFFSET.pack, self.offsets + self.given_up))

    @classmethod
    def decode(cls, data: Buffer) -> Delivery:
        """Read what `encode` wrote.

        Raises:
            CorruptBatchError: it is no note, or (`NewerNoteError`) of a newer version.
        """
        if not data or data[0] > _VERSION_GIVING_UP_BEHIND:
            raise NewerNoteError(f"a note of version {data[0] if data else None}")
        try:
            version, topic, partition, epoch, sequence, at_ms, due_ms, offset, count = (
                _NOTE.unpack_from(data)
            )
            owed, rest = count, memoryview(data)[_NOTE.size :]
            if version == _VERSION_GIVING_UP:
                owed = 0
            elif version == _VERSION_GIVING_UP_BEHIND:
                (owed,), rest = _OWED.unpack_from(rest), rest[_OWED.size :]
                if not 0 < owed < count:
                    raise CorruptBatchError(f"a note of {count} offsets, of which {owed} are owed")
            offsets = tuple(row[0] for row in _OFFSET.iter_unpack(rest))
        except struct.error as error:
            raise CorruptBatchError("a note of another size") from error
        if len(offsets) != count:
            raise CorruptBatchError(f"a note of {count} offsets that has {len(offsets)}")
        return cls(
            topic_id=TopicId(UUID(bytes=topic)),
            partition=partition,
            epoch=epoch,
            sequence=sequence,
            at_ms=at_ms,
            cursor=Place(due_ms, offset),
            offsets=offsets[:owed],
            given_up=offsets[owed:],
        )


def plan(
    before: Delivery | None,
    topic_id: TopicId,
    partition: int,
    places: Sequence[Place],
    at_ms: int,
) -> Delivery:
    """The delivery of these entries that follows the one `before`."""
    is_same = before is not None and (before.topic_id, before.partition) == (topic_id, partition)
    epoch = sequence = 0
    if before is not None:
        epoch = before.epoch if is_same else before.epoch + 1
        sequence = before.next_sequence if is_same else 0
    assert epoch <= EPOCH_MAX, "a delay topic gets another target 32,767 times at most"
    return Delivery(
        topic_id=topic_id,
        partition=partition,
        epoch=epoch,
        sequence=sequence,
        at_ms=at_ms,
        cursor=places[-1],
        offsets=tuple(place.offset for place in places),
    )


def nothing_after(before: Delivery) -> Delivery:
    """A delivery of no records: its note says that the one `before` was taken."""
    return evolve(before, sequence=before.next_sequence, offsets=(), given_up=())


def again_for(
    before: Delivery, topic_id: TopicId, partition: int, places: Sequence[Place], at_ms: int
) -> Delivery:
    """What sends the records of `before` to another target, since the one it was for is gone; what
    was given up behind them stays given up."""
    again = plan(before, topic_id, partition, places, at_ms)
    return evolve(again, cursor=max(before.cursor, again.cursor))


def give_up_behind(before: Delivery, places: Sequence[Place]) -> Delivery:
    """What gives these entries up while `before` stays owed, as it was noted."""
    assert before.offsets, "something is owed"
    assert places[-1] > before.cursor, "deliveries go forward"
    offsets = tuple(place.offset for place in places)
    return evolve(before, cursor=places[-1], given_up=offsets)


def give_up(before: Delivery | None, places: Sequence[Place], at_ms: int) -> Delivery:
    """A delivery of no records whose note gives these entries up. The one `before` was taken, or
    its target is gone."""
    offsets = tuple(place.offset for place in places)
    if before is not None:
        cursor = max(before.cursor, places[-1])
        return evolve(nothing_after(before), at_ms=at_ms, cursor=cursor, given_up=offsets)
    return Delivery(
        topic_id=_NO_TOPIC,
        partition=0,
        epoch=0,
        sequence=0,
        at_ms=at_ms,
        cursor=places[-1],
        offsets=(),
        given_up=offsets,
    )


def producer_id_of(source: RaftGroupId) -> int:
    """The producer id under which a delay partition delivers; that of one made again is another."""
    head = _GROUP.pack(source.topic_id.bytes, source.partition, source.creation_epoch)
    number = int.from_bytes(sha256(head).digest()[:8], "big")
    return OWN_PRODUCER_ID_MIN + 1 + number % (OWN_PRODUCER_ID_MIN - 1)


def note_batch(
    delivery: Delivery, number: int, timestamp_ms: int, lane: Lane = ORDINARY
) -> bytearray:
    """The note as a batch of the delay partition's log; `number` is its sequence there."""
    return build_batch(
        [NewRecord(NOTE_KEY, delivery.encode())],
        timestamp=timestamp_ms,
        producer_id=lane.note_producer_id,
        producer_epoch=0,
        base_sequence=number,
    )


def read_note(batch: Buffer) -> Delivery:
    """The delivery that a batch of a delay partition notes.

    Raises:
        CorruptBatchError: it notes none.
    """
    header = parse_header(batch)
    if not _is_note(header):
        raise CorruptBatchError("no note of a delivery")
    for record in read_records(batch):
        return Delivery.decode(record.value or b"")
    raise CorruptBatchError("a note without a record")


def _is_note(header: BatchHeader) -> bool:
    return header.producer_id in (NOTE_PRODUCER_ID, NOTE_OF_DEAD_PRODUCER_ID)


def delivered_batch(
    delivery: Delivery,
    records: Sequence[tuple[Record, int]],
    source: RaftGroupId,
    name: str,
    lane: Lane = ORDINARY,
) -> bytearray:
    """The batch that is sent to the target: of each record with its creation time, in order."""
    assert [record.offset for record, _ in records] == list(delivery.offsets)
    return build_batch(
        [
            delivered(
                record,
                created_ms,
                f"{name}/{source.partition}/{record.offset}",
                *_attempt_to_tell(record, lane),
            )
            for record, created_ms in records
        ],
        timestamp=delivery.at_ms,
        producer_id=producer_id_of(source),
        producer_epoch=delivery.epoch,
        base_sequence=delivery.sequence,
    )


def _attempt_to_tell(record: Record, lane: Lane) -> tuple[int, bool]:
    """The number of the attempt that a record is delivered for, of a dead one that of the last; and
    whether it is dead because it was given up."""
    if lane.retry is None:
        return 0, lane.is_dead
    schedule = _schedule_of(record.key, record.headers, record.timestamp, lane)
    if lane.is_dead:
        return schedule.attempt, not schedule.is_dead
    return schedule.attempt + 1, False


@frozen(slots=True)
class Undecided:
    """A batch of a transaction that has not ended: its records from `offset` on."""

    producer_id: int
    offset: int


@frozen(slots=True)
class Ended:
    """The end of a transaction, at the stamp of its marker."""

    producer_id: int
    is_commit: bool
    at_ms: int


@frozen(slots=True)
class GivenUp:
    """Records from `first` on are given up by the note at `offset`."""

    offset: int
    first: int


@frozen(slots=True)
class Settled:
    """A lane is done with everything up to `cursor`."""

    cursor: Place


Found: TypeAlias = Row | Undecided | Ended | GivenUp | Settled


def read_log(batch: Buffer, start: int, lane: Lane = ORDINARY) -> Iterator[Found]:
    """What one stored batch means to a lane, from offset `start` on."""
    header = parse_header(batch)
    if _is_note(header):
        yield from _rows_of_note(batch, header, lane)
    elif lane.is_dead and lane.retry is None:
        return  # by itself no record is dead there
    elif header.is_control:
        yield Ended(header.producer_id, parse_marker(batch).is_commit, header.max_timestamp)
    elif header.is_transactional:
        yield Undecided(header.producer_id, max(start, header.base_offset))
    else:
        yield from rows_of(batch, start, lane)


def _rows_of_note(batch: Buffer, header: BatchHeader, lane: Lane) -> Iterator[Found]:
    """What a note means to a lane. One of its own settles what it names. What the ordinary lane
    gives up is remembered in that lane, and pending in the lane of the dead."""
    note = None
    if header.producer_id == lane.note_producer_id:
        note = read_note(batch)
        yield Settled(note.cursor)
    if header.producer_id != NOTE_PRODUCER_ID or not lane.has_dead:
        return
    given_up = (note or read_note(batch)).given_up
    if given_up and not lane.is_dead:
        yield GivenUp(header.base_offset, min(given_up))
    elif given_up:
        # Nobody cancels it any more: it is dead at once.
        for offset in given_up:
            yield Row(offset, header.max_timestamp + 1, Kind.ADD, None)


def rows_of(
    batch: Buffer, start: int, lane: Lane = ORDINARY, committed_ms: int = -1
) -> Iterator[Row]:
    """The rows of one stored batch for a lane, from offset `start` on; none of a note. A record of
    the other lane only cancels here. `committed_ms` is the stamp of the marker of a transaction."""
    header = parse_header(batch)
    if _is_note(header) or header.is_control:
        return
    data = _unpacked(batch, header)
    is_brief = lane.retry is None
    offset = header.base_offset - 1
    for position, time_ms, key, headers_at, end in iter_outlines(data, header):
        offset += 1
        if offset < start:
            continue
        appended_ms = header.max_timestamp if header.timestamp_type else time_ms
        due_ms = read_brief(data, headers_at, end, appended_ms) if is_brief else None
        kind, is_dead = Kind.ADD, False
        if due_ms is None:
            headers = _headers_in(data, headers_at, end)
            schedule = _schedule_of(key, headers, appended_ms, lane)
            due_ms, kind, is_dead = schedule.due_ms, schedule.kind, schedule.is_dead
        if due_ms <= committed_ms:
            due_ms = committed_ms + 1
        digest = None if key is None else key_digest(key)
        if kind is Kind.CANCEL or is_dead == lane.is_dead:
            position = -1 if header.codec_number else HEADER_SIZE + position
            yield Row(offset, due_ms, kind, digest, position)
        elif kind is Kind.REPLACE:
            yield Row(offset, due_ms, Kind.CANCEL, digest)


def _headers_in(data: bytes, position: int, end: int) -> Headers:
    """The headers of a record, from their count on."""
    count, position = read_varint(data, position)
    return read_headers(data, position, end, count)[0]


def _schedule_of(key: bytes | None, headers: Headers, appended_ms: int, lane: Lane) -> Schedule:
    """The schedule of a stored record. It was checked when it was produced; should it not be read
    any more, the record is due at once rather than lost."""
    try:
        return read_schedule(key, headers, appended_ms, 1 << 62, lane.retry)
    except InvalidRecordError:
        return Schedule(Kind.ADD, appended_ms)


def _unpacked(batch: Buffer, header: BatchHeader) -> bytes:
    """The records of a batch, decompressed."""
    packed = memoryview(batch)[HEADER_SIZE : header.size]
    return bytes(decompress(header.codec, packed, output_max=OUTPUT_MAX))


def record_at(batch: Buffer, offset: int) -> tuple[Record, int]:
    """One record of a produced batch, and when it was created; passes over those before it.

    Raises:
        CorruptBatchError: it is not there.
    """
    header = parse_header(batch)
    data = _unpacked(batch, header)
    position = 0
    for _ in range(offset - header.base_offset):
        size, position = read_varint(data, position)
        position += size
    return record_in(header, data, position, offset)


def record_in(header: BatchHeader, data: bytes, position: int, offset: int) -> tuple[Record, int]:
    """The record at a position of some bytes of a batch, and when it was created.

    Raises:
        CorruptBatchError: it is not there.
    """
    if not header.base_offset <= offset < header.next_offset:
        raise CorruptBatchError(f"offset {offset} is not in a batch at {header.base_offset}")
    size, position = read_varint(data, position)
    end = position + size
    if size < 0 or end > len(data):
        raise CorruptBatchError("record longer than its batch")
    time_delta, position = read_varint(data, position + 1)
    offset_delta, position = read_varint(data, position)
    if header.base_offset + offset_delta != offset:
        raise CorruptBatchError(f"offset delta {offset_delta} where {offset} should be")
    key, position = read_bytes(data, position, end)
    value, position = read_bytes(data, position, end)
    count, position = read_varint(data, position)
    headers, position = read_headers(data, position, end, count)
    if position != end:
        raise CorruptBatchError("record shorter or longer than it says")
    created_ms = header.base_timestamp + time_delta
    stamp_ms = header.max_timestamp if header.timestamp_type else created_ms
    return Record(offset, stamp_ms, key, value, headers), created_ms
