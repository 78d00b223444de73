"""The quick ways from records to bytes and back do what `raftmq.records` does, whatever comes."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raftmq.codec import Codec
from raftmq.errors import CorruptBatchError
from raftmq.records import (
    LOG_APPEND_TIME,
    NewRecord,
    assemble_batch,
    build_batch,
    encode_record,
    encode_varint,
    parse_header,
    read_records,
)
from raftmq_client.core.messages import ConsumerRecord, decoded, read_messages
from raftmq_client.core.produce_requests import encode_batch

maybe_bytes = st.none() | st.binary(max_size=40)
headers = st.lists(st.tuples(st.text(max_size=8), maybe_bytes), max_size=2)
stamps = st.integers(0, 1 << 45)
records = st.lists(st.builds(NewRecord, maybe_bytes, maybe_bytes, stamps, headers), min_size=1)
sizes = st.none() | st.sampled_from([0, 1, 63, 64, 100, 200, 5_000])


@st.composite
def runs(draw: st.DrawFn) -> list[NewRecord]:
    """Runs of records of one shape, as a program that writes one kind of thing makes them."""
    found: list[NewRecord] = []
    some = random.Random(draw(st.integers(0, 1 << 32)))  # a failure can be run again
    stamp = draw(st.integers(1, 1 << 41))
    for _ in range(draw(st.integers(1, 4))):
        key, value = draw(sizes), draw(sizes)
        step = draw(st.sampled_from([0, 1, 7, 90, 20_000, -3]))
        for _ in range(draw(st.integers(1, 120))):
            stamp = max(0, stamp + step)
            made = [None if size is None else some.randbytes(size) for size in (key, value)]
            found.append(NewRecord(made[0], made[1], stamp))
    return found


def expected(batch: bytes, start: int = 0) -> list[ConsumerRecord]:
    found = [ConsumerRecord("t", 3, *record) for record in read_records(batch)]
    return [message for message in found if message.offset >= start]


@given(records | runs(), st.sampled_from(Codec))
def test_encoded_batches_are_the_same_bytes(some: list[NewRecord], codec: Codec) -> None:
    names = {"codec": codec, "level": None, "producer_id": 7, "producer_epoch": 1}
    quick = encode_batch(some, base_sequence=9, **names)  # type: ignore[arg-type]
    assert quick == build_batch(some, base_sequence=9, **names)  # type: ignore[arg-type]


@given(records | runs(), st.sampled_from(Codec), st.integers(0, 1 << 40), st.integers(0, 300))
def test_read_messages_are_the_same_records(
    some: list[NewRecord], codec: Codec, base: int, skipped: int
) -> None:
    batch = bytes(build_batch(some, codec=codec, base_offset=base, leader_epoch=4))
    found = read_messages(parse_header(batch), memoryview(batch), "t", 3, base + skipped)
    assert found == expected(batch, base + skipped)
    assert all(type(message) is ConsumerRecord for message in found)


def test_the_collector_looks_at_no_record_but_those_that_may_be_in_a_cycle() -> None:
    batch = bytes(build_batch([NewRecord(None, b"x" * 100, 5)] * 200))
    found = read_messages(parse_header(batch), batch, "t", 3)
    assert not any(map(gc.is_tracked, found))

    class Event:
        record: ConsumerRecord

    event = Event()
    event.record = decoded(found[0], None, event)
    assert event.record.value is event
    assert (event.record.value_size, event.record.key_size) == (100, -1)
    gone = weakref.ref(event)
    del event
    gc.collect()
    assert gone() is None


@given(runs())
def test_the_brokers_time_is_every_records(some: list[NewRecord]) -> None:
    batch = bytes(build_batch(some, timestamp_type=LOG_APPEND_TIME))
    assert read_messages(parse_header(batch), batch, "t", 3) == expected(batch)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=300), st.integers(0, 100))
def test_compacted_batches_have_gaps(gaps: list[int], size: int) -> None:
    delta = -1
    encoded = []
    for gap in gaps:
        delta += gap
        encoded.append(encode_record(NewRecord(None, bytes(size)), 5, delta))
    batch = bytes(
        assemble_batch(encoded, base_timestamp=1, max_timestamp=9, offset_count=delta + 1)
    )
    assert read_messages(parse_header(batch), batch, "t", 3) == expected(batch)


@given(runs(), st.integers(0), st.integers(0, 255))
@example([NewRecord(None, b"x" * 100, 5)] * 200, 61 + 109 * 99, 1)
def test_what_is_broken_is_called_broken_or_read_the_same(
    some: list[NewRecord], place: int, byte: int
) -> None:
    """The CRC is not looked at here: bytes that it covers may be anything."""
    batch = build_batch(some)
    batch[61 + place % (len(batch) - 61)] = byte
    try:
        wanted = expected(bytes(batch))
    except CorruptBatchError as refused:
        with pytest.raises(CorruptBatchError, match=f"^{refused}$"):
            read_messages(parse_header(batch), batch, "t", 3)
    else:
        assert read_messages(parse_header(batch), batch, "t", 3) == wanted


def test_a_record_that_says_it_is_one_byte_longer_is_not_read_as_a_column() -> None:
    one = encode_record(NewRecord(None, b"v" * 50), 0, 0)
    longer = encode_varint(len(one)) + one[1:]
    encoded = [encode_record(NewRecord(None, b"v" * 50), 0, number) for number in range(20)]
    encoded[12] = longer[:3] + encoded[12][3:]
    batch = assemble_batch(encoded, base_timestamp=0, max_timestamp=0)
    with pytest.raises(CorruptBatchError):
        read_messages(parse_header(batch), batch, "t", 3)
