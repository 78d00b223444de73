"""Notes of deliveries, the batches that leave, and the records that are read for them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from uuid import UUID

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.codec import Codec
from raftmq.delays.deliveries import (
    NOTE_PRODUCER_ID,
    ORDINARY,
    Delivery,
    Ended,
    GivenUp,
    Lane,
    NewerNoteError,
    Settled,
    Undecided,
    again_for,
    delivered_batch,
    give_up,
    give_up_behind,
    note_batch,
    nothing_after,
    plan,
    producer_id_of,
    read_log,
    read_note,
    record_at,
    record_in,
    rows_of,
)
from raftmq.delays.headers import (
    ATTEMPT,
    CREATED,
    GIVEN_UP,
    NOT_DELIVERED,
    SOURCE,
    Kind,
    RetryPolicy,
    Schedule,
    key_digest,
    read_schedule,
)
from raftmq.delays.pending import Row
from raftmq.delays.runs import Place
from raftmq.errors import CorruptBatchError
from raftmq.records import (
    HEADER_SIZE,
    LOG_APPEND_TIME,
    SEQUENCE_MODULUS,
    InvalidRecordError,
    Marker,
    NewRecord,
    build_batch,
    build_marker,
    check_batch,
    read_records,
    set_log_append_time,
    stamp,
)
from raftmq.types import RaftGroupId, TopicId

TOPIC = TopicId(UUID(int=7))
SOURCE_GROUP = RaftGroupId(TopicId(UUID(int=9)), 3, 40)
STAMP = 1_700_000_000_000
FIRST = Delivery(
    topic_id=TOPIC,
    partition=1,
    epoch=0,
    sequence=0,
    at_ms=STAMP,
    cursor=Place(STAMP - 5, 12),
    offsets=(14, 12),
)

deliveries = st.builds(
    Delivery,
    topic_id=st.uuids().map(TopicId),
    partition=st.integers(0, 10_000),
    epoch=st.integers(0, (1 << 15) - 1),
    sequence=st.integers(0, SEQUENCE_MODULUS - 1),
    at_ms=st.integers(0, 1 << 60),
    cursor=st.builds(Place, st.integers(0, 1 << 60), st.integers(0, 1 << 60)),
    offsets=st.lists(st.integers(0, 1 << 60), max_size=100).map(tuple),
)
given_ups = st.builds(
    evolve,
    deliveries,
    offsets=st.just(()),
    given_up=st.lists(st.integers(0, 1 << 60), min_size=1, max_size=100).map(tuple),
)
behind = st.builds(
    evolve,
    given_ups,
    offsets=st.lists(st.integers(0, 1 << 60), min_size=1, max_size=100).map(tuple),
)


def stored(records: list[NewRecord], base: int = 10, codec: Codec = Codec.NONE) -> bytearray:
    """A batch as a delay partition stores it: stamped, with the times of creation beneath."""
    batch = build_batch(records, codec=codec, timestamp=STAMP - 1_000, timestamp_type=0)
    set_log_append_time(batch, STAMP)
    stamp(batch, base, 1)
    return batch


def placeless(rows: Iterable[Row]) -> list[Row]:
    """Rows without their positions in the batch."""
    return [row._replace(position=-1) for row in rows]


@given(deliveries | given_ups | behind, st.integers(0, SEQUENCE_MODULUS - 1))
def test_a_note_says_what_was_noted(delivery: Delivery, number: int) -> None:
    batch = note_batch(delivery, number, STAMP)
    header = check_batch(batch)
    assert (header.producer_id, header.base_sequence) == (NOTE_PRODUCER_ID, number)
    assert header.max_timestamp == STAMP
    assert read_note(batch) == delivery
    version = 1 if not delivery.given_up else 3 if delivery.offsets else 2
    assert delivery.encode()[0] == version, "an older node stops at 2, or at 3"
    assert list(rows_of(batch, 0)) == [], "a note asks for nothing"


@given(st.binary(max_size=200))
def test_other_bytes_are_no_note(data: bytes) -> None:
    try:
        found = Delivery.decode(data)
    except CorruptBatchError:
        return
    assert found.encode() == data


def test_a_note_that_is_cut_or_newer_is_refused() -> None:
    data = FIRST.encode()
    for whole in (data, give_up_behind(FIRST, [Place(STAMP, 20), Place(STAMP, 21)]).encode()):
        for size in range(len(whole)):
            with pytest.raises(CorruptBatchError):
                Delivery.decode(whole[:size])
    with pytest.raises(NewerNoteError):
        Delivery.decode(b"\x04" + data[1:])
    with pytest.raises(CorruptBatchError, match="no note"):
        read_note(build_batch([NewRecord(b"raftmq-delivery", data)]))


def test_deliveries_to_one_target_are_numbered_through() -> None:
    places = [Place(1, 5), Place(2, 3)]
    first = plan(None, TOPIC, 1, places, STAMP)
    assert (first.epoch, first.sequence, first.cursor) == (0, 0, Place(2, 3))
    assert first.offsets == (5, 3)
    second = plan(first, TOPIC, 1, places[:1], STAMP)
    assert (second.epoch, second.sequence) == (0, 2)
    high = evolve(first, sequence=SEQUENCE_MODULUS - 1)
    assert plan(high, TOPIC, 1, places, STAMP).sequence == 1
    for topic_id, partition in ((TopicId(UUID(int=8)), 1), (TOPIC, 2)):
        other = plan(second, topic_id, partition, places, STAMP)
        assert (other.epoch, other.sequence) == (1, 0), "another target counts anew"
        assert plan(other, TOPIC, 1, places, STAMP).epoch == 2, "and so does the one before"


def test_each_life_of_a_partition_delivers_as_a_producer_of_its_own() -> None:
    groups = [
        RaftGroupId(TopicId(UUID(int=topic)), partition, epoch)
        for topic in range(5)
        for partition in range(5)
        for epoch in range(5)
    ]
    ids = {producer_id_of(group) for group in groups}
    assert len(ids) == len(groups)
    assert all(NOTE_PRODUCER_ID < number < 1 << 63 for number in ids)
    assert producer_id_of(SOURCE_GROUP) == 9_128_225_826_652_860_458, "it is stored in targets"


@pytest.mark.parametrize("codec", list(Codec))
def test_rows_and_single_records_of_a_stored_batch(codec: Codec) -> None:
    records = [
        NewRecord(b"a", b"1", STAMP - 900, [("deliver-after", b"5s")]),
        NewRecord(None, b"x" * 300, STAMP - 800),
        NewRecord(b"a", None, STAMP - 700, [("deliver-at", b"never"), ("t", None)]),
        NewRecord(b"a", b"2", STAMP - 600, [("deliver-mode", b"replace")]),
        NewRecord(b"b", b"3", STAMP - 500, [("deliver-at", b"nonsense")]),
    ]
    batch = stored(records, codec=codec)
    key = key_digest(b"a")
    rows = [
        Row(10, STAMP + 5_000, Kind.ADD, key),
        Row(11, STAMP, Kind.ADD, None),
        Row(12, STAMP, Kind.CANCEL, key),
        Row(13, STAMP, Kind.REPLACE, key),
        Row(14, STAMP, Kind.ADD, key_digest(b"b")),
    ]
    assert placeless(rows_of(batch, 0)) == rows
    assert placeless(rows_of(batch, 12)) == rows[2:]
    for row in rows_of(batch, 0):
        if codec is Codec.NONE and row.kind is not Kind.CANCEL:
            piece = bytes(batch)[row.position :]
            found = record_in(check_batch(batch), piece, 0, row.offset)
            assert found == record_at(batch, row.offset)
        else:
            assert row.position == -1 or codec is Codec.NONE
    for expected, original in zip(read_records(batch), records, strict=True):
        record, created_ms = record_at(batch, expected.offset)
        assert record[:5] == expected[:5]
        assert created_ms == original.timestamp
    for offset in (9, 15):
        with pytest.raises(CorruptBatchError):
            record_at(batch, offset)


POLICY = RetryPolicy(attempts=3, min_ms=1_000, max_ms=9_000, factor_percent=200)
TRIED, DEAD = Lane(POLICY, has_dead=True), Lane(POLICY, is_dead=True, has_dead=True)
UNTRIED, GIVEN = Lane(has_dead=True), Lane(is_dead=True, has_dead=True)


def rows_by_the_general_way(
    batch: bytearray, start: int, lane: Lane, committed_ms: int
) -> list[Row]:
    """What a batch asks for, by whole records."""
    rows = []
    for record in read_records(batch):
        if record.offset < start:
            continue
        try:
            schedule = read_schedule(
                record.key, record.headers, record.timestamp, 1 << 62, lane.retry
            )
        except InvalidRecordError:
            schedule = Schedule(Kind.ADD, record.timestamp)
        due_ms = max(schedule.due_ms, committed_ms + 1)
        key = None if record.key is None else key_digest(record.key)
        if schedule.kind is Kind.CANCEL or schedule.is_dead == lane.is_dead:
            rows.append(Row(record.offset, due_ms, schedule.kind, key))
        elif schedule.kind is Kind.REPLACE:
            rows.append(Row(record.offset, due_ms, Kind.CANCEL, key))
    return rows


NUMBERS = st.integers(0, 10**16).map(str) | st.integers(STAMP - 9, STAMP + 9).map(str)
HEADERS = (
    st.tuples(st.sampled_from(["deliver-at", "deliver-after"]), NUMBERS.map(str.encode))
    | st.sampled_from(
        [
            ("deliver-at", b"never"),
            ("deliver-at", b" 1700000000500 "),
            ("deliver-at", b"2030-01-31T08:00:00Z"),
            ("deliver-after", b"5s"),
            ("deliver-after", None),
            ("deliver-mode", b"replace"),
            (ATTEMPT, b"2"),
            (ATTEMPT, b"3"),
        ]
    )
    | st.tuples(st.text(max_size=3), st.none() | st.binary(max_size=3))
)
RECORDS = st.builds(
    NewRecord,
    st.none() | st.binary(max_size=3) | st.just(b"k" * 70),
    st.none() | st.sampled_from([b"", b"v", b"v" * 70, b"v" * 9_000]),
    st.sampled_from([STAMP, STAMP - 1, STAMP + 900, STAMP + 100_000, -1]),
    st.lists(HEADERS, max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(
    records=st.lists(RECORDS, min_size=1, max_size=6) | st.lists(RECORDS, min_size=70, max_size=80),
    codec=st.sampled_from([Codec.NONE, Codec.NONE, Codec.GZIP]),
    is_stamped=st.booleans(),
    lane=st.sampled_from([ORDINARY, TRIED, DEAD, UNTRIED, GIVEN]),
    skipped=st.integers(0, 4),
    committed_ms=st.sampled_from([-1, STAMP, STAMP + 50_000]),
)
def test_the_short_way_to_read_a_batch_finds_what_the_general_one_does(
    records: list[NewRecord],
    codec: Codec,
    is_stamped: bool,
    lane: Lane,
    skipped: int,
    committed_ms: int,
) -> None:
    batch = build_batch(records, codec=codec)
    stamp(batch, 10, 1)
    if is_stamped:
        set_log_append_time(batch, STAMP)
    expected = rows_by_the_general_way(batch, 10 + skipped, lane, committed_ms)
    found = list(rows_of(batch, 10 + skipped, lane, committed_ms))
    assert placeless(found) == expected
    for row in found:
        if row.position >= 0:
            piece = bytes(batch)[row.position :]
            record, _ = record_in(check_batch(batch), piece, 0, row.offset)
            assert record[:5] == record_at(batch, row.offset)[0][:5]
        else:
            assert codec is not Codec.NONE or row.kind is Kind.CANCEL


@settings(max_examples=300, deadline=None)
@given(st.lists(RECORDS, min_size=1, max_size=4), st.data())
def test_bytes_that_are_no_records_any_more_are_refused(
    records: list[NewRecord], data: st.DataObject
) -> None:
    """Nothing else is raised, since that would end the node."""
    batch = build_batch(records)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(HEADER_SIZE, len(batch) - 1))
        batch[position] = data.draw(st.integers(0, 255))
    with suppress(CorruptBatchError):
        rows = list(rows_of(batch, 0, data.draw(st.sampled_from([ORDINARY, TRIED]))))
        assert len(rows) <= len(records)


def test_the_batch_that_leaves() -> None:
    records = [
        NewRecord(b"a", b"1", STAMP - 900, [("deliver-after", b"5s"), ("t", b"z")]),
        NewRecord(b"b", None, STAMP - 800),
        NewRecord(b"c", b"3", STAMP - 700),
    ]
    waiting = stored(records, base=12)
    delivery = evolve(FIRST, sequence=8, epoch=2)
    found = [record_at(waiting, offset) for offset in delivery.offsets]
    batch = delivered_batch(delivery, found, SOURCE_GROUP, "orders.later")
    header = check_batch(batch)
    assert header.producer_id == producer_id_of(SOURCE_GROUP)
    assert (header.producer_epoch, header.base_sequence, header.record_count) == (2, 8, 2)
    assert header.timestamp_type != LOG_APPEND_TIME
    last, first = read_records(batch)
    assert (last.key, last.value, last.timestamp) == (b"c", b"3", delivery.at_ms)
    assert (first.key, first.value) == (b"a", b"1")
    assert first.headers == (
        ("t", b"z"),
        (CREATED, str(STAMP - 900).encode()),
        (SOURCE, b"orders.later/3/12"),
    )
    again = delivered_batch(delivery, found, SOURCE_GROUP, "orders.later")
    assert again == batch, "it is sent again as it was"


def test_each_record_of_a_retry_topic_is_in_one_lane_and_cancels_in_both() -> None:
    last = (ATTEMPT, b"3")
    records = [
        NewRecord(b"a", b"1", STAMP),
        NewRecord(b"b", b"2", STAMP, [(ATTEMPT, b"2")]),
        NewRecord(b"c", b"3", STAMP, [last]),
        NewRecord(b"d", b"4", STAMP, [last, ("deliver-mode", b"replace")]),
        NewRecord(b"e", b"5", STAMP, [("deliver-mode", b"replace")]),
        NewRecord(b"f", b"6", STAMP, [last, ("deliver-at", b"never")]),
    ]
    batch = stored(records)
    a, b, c, d, e, f = (key_digest(bytes([letter])) for letter in b"abcdef")
    assert placeless(rows_of(batch, 0, TRIED)) == [
        Row(10, STAMP + 1_000, Kind.ADD, a),
        Row(11, STAMP + 2_000, Kind.ADD, b),
        Row(13, STAMP, Kind.CANCEL, d),
        Row(14, STAMP + 1_000, Kind.REPLACE, e),
        Row(15, STAMP, Kind.CANCEL, f),
    ]
    assert placeless(rows_of(batch, 0, DEAD)) == [
        Row(12, STAMP, Kind.ADD, c),
        Row(13, STAMP, Kind.REPLACE, d),
        Row(14, STAMP + 1_000, Kind.CANCEL, e),
        Row(15, STAMP, Kind.CANCEL, f),
    ]


@pytest.mark.parametrize(
    ("lane", "sent", "told"),
    [(TRIED, None, b"2"), (TRIED, b"2", b"3"), (DEAD, b"3", b"3"), (ORDINARY, b"7", b"7")],
)
def test_a_delivered_record_tells_which_attempt_it_is(
    lane: Lane, sent: bytes | None, told: bytes
) -> None:
    headers = [] if sent is None else [(ATTEMPT, sent)]
    waiting = stored([NewRecord(b"a", b"1", STAMP, headers)], base=12)
    delivery = evolve(FIRST, offsets=(12,))
    batch = delivered_batch(delivery, [record_at(waiting, 12)], SOURCE_GROUP, "o", lane)
    (record,) = read_records(batch)
    assert [text for name, text in record.headers if name == ATTEMPT] == [told]


def test_lanes_have_notes_of_their_own_and_neither_reads_them_as_records() -> None:
    ids = set()
    for lane in (TRIED, DEAD):
        batch = note_batch(FIRST, 4, STAMP, lane)
        ids.add(check_batch(batch).producer_id)
        assert read_note(batch) == FIRST
        for reader in (ORDINARY, TRIED, DEAD):
            assert list(rows_of(batch, 0, reader)) == []
    assert ids == {TRIED.note_producer_id, DEAD.note_producer_id}
    assert ORDINARY.note_producer_id == TRIED.note_producer_id == NOTE_PRODUCER_ID


def test_a_note_of_nothing_goes_on_where_the_delivery_before_it_ended() -> None:
    settled = nothing_after(FIRST)
    assert settled.offsets == ()
    assert settled.cursor == FIRST.cursor
    assert settled.next_sequence == FIRST.next_sequence
    places = [Place(STAMP, 20)]
    assert plan(settled, TOPIC, 1, places, STAMP) == plan(FIRST, TOPIC, 1, places, STAMP)


# ---- given up ----


def test_what_is_given_up_is_done_with_in_its_lane_and_dead_right_after_the_note() -> None:
    places = [Place(STAMP - 4, 21), Place(STAMP - 3, 20)]
    note = give_up(FIRST, places, STAMP)
    assert (note.offsets, note.given_up, note.cursor) == ((), (21, 20), places[-1])
    batch = note_batch(note, 4, STAMP, TRIED)
    stamp(batch, 30, 1)
    assert list(read_log(batch, 0, TRIED)) == [Settled(places[-1]), GivenUp(30, 20)]
    assert list(read_log(batch, 0, DEAD)) == [
        Row(21, STAMP + 1, Kind.ADD, None),
        Row(20, STAMP + 1, Kind.ADD, None),
    ]
    of_dead = note_batch(note, 4, STAMP, DEAD)
    assert list(read_log(of_dead, 0, DEAD)) == [Settled(places[-1])], "of its own lane"
    assert list(read_log(of_dead, 0, ORDINARY)) == []
    assert list(read_log(batch, 0, ORDINARY)) == [Settled(places[-1])]


def test_without_retries_nothing_is_dead_but_what_a_note_gives_up() -> None:
    never = NewRecord(b"a", b"", STAMP, [("deliver-at", b"never")])
    batch = stored([NewRecord(b"a", b"1", STAMP, [(ATTEMPT, b"9")]), never])
    assert len(list(read_log(batch, 0, UNTRIED))) == 2
    assert list(read_log(batch, 0, GIVEN)) == []
    marker = build_marker(Marker(True), producer_id=7, producer_epoch=0, timestamp=STAMP)
    assert list(read_log(marker, 0, GIVEN)) == []
    note = note_batch(give_up(None, [Place(STAMP, 20)], STAMP), 0, STAMP, UNTRIED)
    stamp(note, 30, 1)
    assert list(read_log(note, 0, UNTRIED)) == [Settled(Place(STAMP, 20)), GivenUp(30, 20)]
    assert list(read_log(note, 0, GIVEN)) == [Row(20, STAMP + 1, Kind.ADD, None)]


def test_what_is_given_up_behind_a_delivery_leaves_it_owed() -> None:
    places = [Place(STAMP - 5, 21), Place(STAMP - 3, 20)]
    note = give_up_behind(FIRST, places)
    assert (note.offsets, note.given_up, note.cursor) == (FIRST.offsets, (21, 20), places[-1])
    sent = note.epoch, note.sequence, note.at_ms, note.next_sequence
    assert sent == (FIRST.epoch, FIRST.sequence, FIRST.at_ms, FIRST.next_sequence), "as it was"
    batch = note_batch(note, 4, STAMP, TRIED)
    stamp(batch, 30, 1)
    assert list(read_log(batch, 0, TRIED)) == [Settled(places[-1]), GivenUp(30, 20)]
    assert [row.offset for row in read_log(batch, 0, DEAD) if isinstance(row, Row)] == [21, 20]


def test_a_cursor_never_goes_back_behind_what_was_given_up() -> None:
    """Whatever becomes of the delivery that was owed, whose records were due before."""
    note = give_up_behind(FIRST, [Place(STAMP, 20)])
    owed = [Place(note.cursor.due_ms, offset) for offset in note.offsets]
    assert owed[-1] < note.cursor
    for later in (
        give_up(note, owed, STAMP),
        again_for(note, TopicId(UUID(int=8)), 1, owed, STAMP),
        nothing_after(note),
    ):
        assert later.cursor == note.cursor
    assert again_for(FIRST, TOPIC, 1, [FIRST.cursor], STAMP).cursor == FIRST.cursor


def test_after_it_the_next_target_begins_and_the_same_one_goes_on() -> None:
    places = [Place(STAMP, 20)]
    for before in (FIRST, give_up(FIRST, places, STAMP)):
        assert nothing_after(give_up(before, places, STAMP)).given_up == ()
        again = plan(give_up(before, places, STAMP), TOPIC, 1, places, STAMP)
        assert (again.epoch, again.sequence) == (FIRST.epoch, FIRST.next_sequence)
        assert again.given_up == ()
    first = plan(give_up(None, places, STAMP), TOPIC, 1, places, STAMP)
    assert (first.epoch, first.sequence) == (1, 0)


def test_a_record_that_is_dead_tells_whether_it_was_given_up() -> None:
    gone = [NOT_DELIVERED]
    for lane, attempt, expected in ((DEAD, b"2", gone), (DEAD, b"3", []), (GIVEN, b"3", gone)):
        headers = [(ATTEMPT, attempt), (GIVEN_UP, b"before")]
        waiting = stored([NewRecord(b"a", b"1", STAMP, headers)], base=12)
        delivery = evolve(FIRST, offsets=(12,))
        batch = delivered_batch(delivery, [record_at(waiting, 12)], SOURCE_GROUP, "o", lane)
        (record,) = read_records(batch)
        assert [text for name, text in record.headers if name == GIVEN_UP] == expected
        assert [text for name, text in record.headers if name == ATTEMPT] == [attempt]


# ---- transactions ----


def test_records_of_a_transaction_wait_for_its_marker_and_are_due_after_it() -> None:
    batch = build_batch(
        [NewRecord(b"a", b"1"), NewRecord(b"b", b"2", None, [("deliver-after", b"5s")])],
        timestamp=STAMP - 1_000,
        producer_id=77,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
    )
    set_log_append_time(batch, STAMP)
    stamp(batch, 10, 1)
    assert list(read_log(batch, 0)) == [Undecided(77, 10)]
    assert list(read_log(batch, 11)) == [Undecided(77, 11)]
    for is_commit in (True, False):
        marker = build_marker(
            Marker(is_commit), producer_id=77, producer_epoch=0, timestamp=STAMP + 2_000
        )
        assert list(read_log(marker, 0)) == [Ended(77, is_commit, STAMP + 2_000)]
        assert list(rows_of(marker, 0)) == []
    a, b = key_digest(b"a"), key_digest(b"b")
    assert placeless(rows_of(batch, 0, ORDINARY, STAMP + 2_000)) == [
        Row(10, STAMP + 2_001, Kind.ADD, a),
        Row(11, STAMP + 5_000, Kind.ADD, b),
    ]
