"""The walk over produced records: it says of every batch what a slow reader says."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.codec import Codec
from raftmq.errors import CorruptBatchError, ErrorCode, KafkaError
from raftmq.record_walk import (
    ELEMENTS_MAX,
    TooManyElementsError,
    UndecidedError,
    iter_brief,
    walk_lengths,
    walk_records,
)
from raftmq.records import (
    HEADER_SIZE,
    InvalidRecordError,
    NewRecord,
    assemble_batch,
    build_batch,
    check_batch,
    parse_header,
    read_records,
)
from tests.poison.bytes_of import long_form, record, records

Headers = list[tuple[str, bytes | None]]


def data_of(batch: bytes | bytearray) -> bytes:
    return bytes(memoryview(batch)[HEADER_SIZE:])


def built(payload: bytes, count: int, base: int = 1_000) -> bytearray:
    return assemble_batch(
        [payload], base_timestamp=base, max_timestamp=base, record_count=count, offset_count=count
    )


def judged_slowly(batch: bytearray) -> tuple[int, int, int] | None:
    """Greatest and least timestamp and first missing key, by the reader; None: it cannot."""
    try:
        found = list(read_records(batch))
    except CorruptBatchError:
        return None
    if [one.offset for one in found] != list(range(len(found))):
        return None
    times = [one.timestamp for one in found]
    unkeyed = [number for number, one in enumerate(found) if one.key is None]
    least = min((time for time in times if time != -1), default=-1)
    return max(-1, *times), least, unkeyed[0] if unkeyed else -1


def judged(batch: bytearray, cost_max: int | None = None) -> tuple[int, int, int] | None:
    try:
        walked = walk_records(data_of(batch), parse_header(batch), cost_max=cost_max)
    except InvalidRecordError:
        return None
    return walked[:3]


SIZES = st.sampled_from([0, 1, 5, 61, 62, 63, 64, 100, 200, 9_000])
ONE_HEADER = st.tuples(st.sampled_from(["", "a", "trace", "é"]), st.none() | st.binary(max_size=3))


@st.composite
def streaks(draw: st.DrawFn) -> list[NewRecord]:
    """Streaks of records of one layout, of any length: most that producers write is that."""
    made: list[NewRecord] = []
    time = 1_000
    for _ in range(draw(st.integers(1, 4))):
        key, size = draw(st.none() | st.binary(max_size=3)), draw(SIZES)
        headers: Headers = draw(st.lists(ONE_HEADER, max_size=3))
        step = draw(st.sampled_from([0, 0, 1, 7, -3, 100, 10_000, 1 << 40]))
        for _ in range(draw(st.sampled_from([1, 2, 7, 8, 9, 60, 70, 600]))):
            made.append(NewRecord(key, bytes(size), time, tuple(headers)))
            time += step
    return made


@settings(max_examples=60, deadline=None)
@given(streaks())
def test_sound_records_are_sound(made: list[NewRecord]) -> None:
    batch = build_batch(made)
    assert judged(batch) == judged_slowly(batch) != None  # noqa: E711
    walk_lengths(data_of(batch), len(made))
    brief = [(i, one.timestamp, one.key is not None) for i, one in enumerate(made)]
    assert list(iter_brief(data_of(batch), parse_header(batch))) == brief


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_damaged_records_are_judged_as_the_reader_does(data: st.DataObject) -> None:
    """One byte of a long streak is another: no column may hide it."""
    key = data.draw(st.none() | st.just(b"key"))
    headers = data.draw(st.sampled_from([(), (("name", b"x"), ("é", None))]))
    count = data.draw(st.sampled_from([1, 9, 70, 700]))
    payload = bytearray(data_of(build_batch([NewRecord(key, b"value", 1_000, headers)] * count)))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] = data.draw(st.integers(0, 255))
    batch = built(bytes(payload), count)
    assert judged(batch) == judged_slowly(batch)


def test_many_equal_records_over_every_size_of_offset() -> None:
    """Deltas of one, two and three bytes, and the timestamps at the ends of a run."""
    count = 20_000
    made = [NewRecord(None, b"v" * 20, 1_000 + number // 70) for number in range(count)]
    walked = walk_records(data_of(build_batch(made)), parse_header(build_batch(made)))
    assert walked[:3] == (made[-1].timestamp, 1_000, 0)
    assert walked.cost < count // 8, "they are judged by columns"
    for at in (63, 64, 8_191, 8_192, count - 1):
        payload = b"".join(record(at if n != at else n + 1) for n in [at])
        head = data_of(build_batch(made[:at])) if at else b""
        batch = built(head + payload, at + 1)
        assert judged(batch) is None


@pytest.mark.parametrize("size", [2, 3, 5])
def test_numbers_in_long_form_are_sound(size: int) -> None:
    payload = b"".join(
        record(number, offset=long_form(number, size), time=long_form(number, size))
        for number in range(40)
    )
    assert judged(built(payload, 40)) == (1_039, 1_000, -1)


def test_what_is_too_much_for_here_is_undecided() -> None:
    made = [NewRecord(b"k", bytes(number % 50)) for number in range(1_000)]
    batch = build_batch(made)
    header = parse_header(batch)
    with pytest.raises(UndecidedError):
        walk_records(data_of(batch), header, cost_max=900)
    with pytest.raises(UndecidedError):
        walk_lengths(data_of(batch), 1_000, cost_max=900)
    assert walk_records(data_of(batch), header, cost_max=1_100).cost <= 1_100
    many = build_batch([NewRecord(b"k", b"v", headers=[("h", b"")] * 500)] * 3)
    with pytest.raises(UndecidedError):
        walk_records(data_of(many), parse_header(many), cost_max=1_000)


def test_elements_are_bounded() -> None:
    many = ELEMENTS_MAX + 1
    body = b"\0\0\0\x01\x01" + long_form(many, 4) + bytes(2 * many)
    batch = built(long_form(len(body), 4) + body, 1)
    tracemalloc.start()
    with pytest.raises(TooManyElementsError) as caught:
        walk_records(data_of(batch), parse_header(batch))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE
    assert peak < 5 * len(body), "a copy of the bytes and no objects"
    seven = bytes(7)
    batch = built(b"\x0c" + seven[1:] * 1, many)
    with pytest.raises(InvalidRecordError):  # not so many in so few bytes
        walk_records(data_of(batch), parse_header(batch))
    with pytest.raises(TooManyElementsError):
        walk_lengths(bytes(7 * many), many)


@pytest.mark.parametrize(
    ("payload", "count"),
    [
        (records(2) + b"\0", 2),
        (records(2), 1),
        (records(2), 3),
        (record() + record(1, size=0), 2),
        (record() + record(1, size=-1), 2),
        (records(100)[:-1], 100),
        (records(100) + b"\x80", 100),
        (bytes(7) + b"\x80", 1),
    ],
)
def test_lengths_alone_find_that(payload: bytes, count: int) -> None:
    with pytest.raises(InvalidRecordError):
        walk_lengths(payload, count)


def test_codecs_do_not_matter_to_it() -> None:
    batch = build_batch([NewRecord(b"k", b"v")], codec=Codec.GZIP)
    assert check_batch(batch).codec is Codec.GZIP
    with pytest.raises(KafkaError):
        walk_records(data_of(batch), parse_header(batch))
