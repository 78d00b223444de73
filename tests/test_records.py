"""Record batches: round trips, every flipped bit, refusals, and batches made by stock clients."""

from __future__ import annotations

import contextlib
import socket
import struct
import warnings
from typing import Any

import pytest
from confluent_kafka import Producer
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.codec import Codec
from raftmq.errors import CorruptBatchError, ErrorCode
from raftmq.records import (
    CREATE_TIME,
    HEADER_SIZE,
    LOG_APPEND_TIME,
    InvalidRecordError,
    Marker,
    NewRecord,
    OldFormatError,
    build_batch,
    build_marker,
    check_batch,
    check_batches,
    check_produced,
    encode_varint,
    find_timestamp,
    parse_header,
    parse_marker,
    read_records,
    read_varint,
    set_log_append_time,
    split_batches,
    stamp,
    validate_records,
)

with warnings.catch_warnings():
    # Python clients read their schemas by a deprecated call while they are imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from aiokafka.record import default_records as aio
    from kafka.record import default_records as pure
    from kafka.record.legacy_records import LegacyRecordBatchBuilder

maybe_bytes = st.none() | st.binary(max_size=40)
headers = st.lists(st.tuples(st.text(max_size=8), maybe_bytes), max_size=3)
new_records = st.lists(
    st.builds(NewRecord, maybe_bytes, maybe_bytes, st.integers(0, 1 << 45), headers),
    min_size=1,
    max_size=12,
)
SIMPLE = [NewRecord(b"k", b"v", 1000), NewRecord(None, None, 1005, [("h", None)])]


@given(new_records, st.sampled_from(Codec), st.integers(0, 1 << 60), st.integers(0, (1 << 31) - 1))
def test_round_trip(records: list[NewRecord], codec: Codec, offset: int, epoch: int) -> None:
    batch = build_batch(records, codec=codec, base_offset=offset, leader_epoch=epoch)
    header = validate_records(batch)
    assert header == parse_header(batch)
    assert (header.base_offset, header.leader_epoch) == (offset, epoch)
    assert header.next_offset == offset + len(records) == offset + header.offset_count
    assert header.size == len(batch)
    assert header.codec is codec
    assert header.max_timestamp == max(r.timestamp or 0 for r in records)
    got = list(read_records(memoryview(batch)))
    assert [(r.key, r.value, r.timestamp, list(r.headers)) for r in got] == [
        (r.key, r.value, r.timestamp, list(r.headers)) for r in records
    ]
    assert [r.offset for r in got] == list(range(offset, offset + len(records)))
    assert {r.leader_epoch for r in got} == {epoch}


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_varints(value: int) -> None:
    encoded = encode_varint(value)
    assert read_varint(encoded, 0) == (value, len(encoded))
    assert read_varint(b"abc" + encoded, 3) == (value, 3 + len(encoded))
    with pytest.raises(CorruptBatchError):
        read_varint(encoded[:-1], 0)


@pytest.mark.parametrize("data", [b"\xff" * 11, b"\xff" * 9 + b"\x7f"], ids=["long", "65 bits"])
def test_endless_varints(data: bytes) -> None:
    with pytest.raises(CorruptBatchError):
        read_varint(data, 0)


def test_attributes() -> None:
    batch = build_batch(
        SIMPLE,
        producer_id=7,
        producer_epoch=3,
        base_sequence=(1 << 31) - 1,
        transactional=True,
        control=True,
    )
    header = check_batch(batch)
    assert header.is_transactional
    assert header.is_control
    assert header.has_producer_id
    assert (header.producer_id, header.producer_epoch) == (7, 3)
    assert header.last_sequence == 0  # sequences start over after 2^31 - 1
    plain = check_batch(build_batch(SIMPLE))
    assert not plain.is_transactional
    assert not plain.is_control
    assert not plain.has_producer_id
    assert plain.last_sequence == -1


def test_stamp_leaves_the_checksum_valid() -> None:
    batch = build_batch(SIMPLE)
    before = bytes(batch)
    stamp(batch, 123_456_789_012, 42)
    header = check_batch(batch)
    assert (header.base_offset, header.leader_epoch) == (123_456_789_012, 42)
    assert batch[8:12] == before[8:12]
    assert batch[16:] == before[16:]
    stamp(memoryview(batch), 0, 0)
    assert bytes(batch) == before


def test_log_append_time() -> None:
    batch = build_batch(SIMPLE, codec=Codec.ZSTD)
    assert check_batch(batch).timestamp_type == CREATE_TIME
    set_log_append_time(batch, 99_999)
    header = validate_records(batch)
    assert header.timestamp_type == LOG_APPEND_TIME
    assert header.max_timestamp == 99_999
    assert header.codec is Codec.ZSTD
    assert [r.timestamp for r in read_records(batch)] == [99_999, 99_999]


def test_find_timestamp() -> None:
    batch = build_batch([NewRecord(None, b"", t) for t in (10, 30, 20, 40)], base_offset=5)
    assert find_timestamp(batch, 0) == (10, 5)
    assert find_timestamp(batch, 11) == (30, 6)
    assert find_timestamp(batch, 31) == (40, 8)
    assert find_timestamp(batch, 41) is None


# ---- damage ----


@pytest.mark.parametrize("codec", Codec)
def test_every_flipped_bit_below_the_checksum_is_detected(codec: Codec) -> None:
    batch = build_batch(SIMPLE, codec=codec, producer_id=1, producer_epoch=0, base_sequence=0)
    for position in range(16, len(batch)):  # magic, the CRC itself, all that it covers
        for bit in range(8):
            batch[position] ^= 1 << bit
            with pytest.raises(CorruptBatchError):
                check_batch(batch)
            batch[position] ^= 1 << bit
    check_batch(batch)


def test_flipped_length_is_detected() -> None:
    batch = build_batch(SIMPLE)
    for position in range(8, 12):
        for bit in range(8):
            batch[position] ^= 1 << bit
            with pytest.raises(CorruptBatchError):
                check_batch(batch)
            batch[position] ^= 1 << bit


def test_every_truncation_is_detected() -> None:
    batch = bytes(build_batch(SIMPLE))
    for size in range(len(batch)):
        with pytest.raises(CorruptBatchError):
            check_batch(batch[:size])
    with pytest.raises(CorruptBatchError):
        check_batch(batch + b"\x00")
    with pytest.raises(CorruptBatchError):
        parse_header(batch[:60])


def resum(batch: bytearray) -> bytearray:
    """Make the checksum fit whatever was written."""
    from crc32c import crc32c

    struct.pack_into(">I", batch, 17, crc32c(bytes(batch[21:])))
    return batch


@settings(max_examples=300)
@given(st.data())
def test_records_under_a_matching_checksum_never_crash(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(Codec))
    batch = build_batch(SIMPLE * 2, codec=codec)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(21, len(batch) - 1))
        batch[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptBatchError, InvalidRecordError):
        validate_records(resum(batch), output_max=10_000)
        list(read_records(batch))


def broken_body(body: bytes, count: int = 1) -> bytearray:
    batch = build_batch([NewRecord(None, None, 0)] * count)
    batch[HEADER_SIZE:] = body
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    return resum(batch)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="no record"),
        pytest.param(b"\x01", id="negative length"),
        pytest.param(b"\x7e" + b"\x00" * 5, id="longer than the batch"),
        pytest.param(b"\x0c\x00\x00\x02\x01\x01\x00", id="delta above the last"),
        pytest.param(b"\x0c\x00\x00\x00\x03\x01\x00", id="key length -2"),
        pytest.param(b"\x0c\x00\x00\x00\x10\x01\x00", id="key past the record"),
        pytest.param(b"\x0c\x00\x00\x00\x01\x01\x02", id="header count without headers"),
        pytest.param(b"\x0c\x00\x00\x00\x01\x01\x01", id="negative header count"),
        pytest.param(b"\x10\x00\x00\x00\x01\x01\x02\x01\x01", id="header without name"),
        pytest.param(b"\x12\x00\x00\x00\x01\x01\x02\x02\xff\x01", id="name not UTF-8"),
        pytest.param(b"\x0e\x00\x00\x00\x01\x01\x00\x00", id="bytes after the fields"),
        pytest.param(b"\x0c\x00\x00\x00\x01\x01\x00\x00", id="bytes after the record"),
    ],
)
def test_broken_records(body: bytes) -> None:
    batch = broken_body(body)
    check_batch(batch)
    with pytest.raises(CorruptBatchError):
        validate_records(batch)


def test_validate_notices_what_the_header_says_wrongly() -> None:
    batch = build_batch(SIMPLE)
    struct.pack_into(">q", batch, 35, 77)
    with pytest.raises(InvalidRecordError, match="timestamp"):
        validate_records(resum(batch))
    gap = build_batch([NewRecord(None, None, 0)] * 2)
    gap[HEADER_SIZE + 7 + 3] = 2 << 1  # the second record's offset delta: 2 instead of 1
    struct.pack_into(">i", gap, 23, 2)
    with pytest.raises(InvalidRecordError, match="offset delta"):
        validate_records(resum(gap))


def test_counts_must_fit() -> None:
    for count in (-1, 3, 1 << 30):
        batch = build_batch(SIMPLE)
        struct.pack_into(">i", batch, 57, count)
        with pytest.raises(CorruptBatchError, match="records"):
            check_batch(resum(batch))
    batch = build_batch(SIMPLE)
    struct.pack_into(">h", batch, 21, 6)
    with pytest.raises(CorruptBatchError, match="codec"):
        check_batch(resum(batch))
    with pytest.raises(CorruptBatchError, match="codec"):
        _ = parse_header(batch).codec


def test_check_batches() -> None:
    one, two = bytes(build_batch(SIMPLE)), bytes(build_batch(SIMPLE, base_offset=2))
    assert [h.base_offset for h in check_batches(one + two)] == [0, 2]
    for broken in (b"", one + two[:-1], one + b"x", one + two[:30]):
        with pytest.raises(CorruptBatchError):
            check_batches(broken)


def test_split_batches_of_a_fetch() -> None:
    one, two = bytes(build_batch(SIMPLE)), bytes(build_batch(SIMPLE, base_offset=2))
    for end in range(len(two)):
        (got,) = split_batches(one + two[:end])
        assert got[1] == one
    assert [bytes(b) for _h, b in split_batches(one + two)] == [one, two]
    with pytest.raises(CorruptBatchError):
        list(split_batches(bytes(100)))


# ---- what a client may send ----


def test_check_produced() -> None:
    check_produced(check_batch(build_batch(SIMPLE)))
    check_produced(
        check_batch(build_batch(SIMPLE, producer_id=1, producer_epoch=0, base_sequence=0))
    )
    refused = [
        build_batch(SIMPLE, control=True),
        build_batch(SIMPLE, producer_id=1, producer_epoch=0),
        build_batch(SIMPLE, transactional=True),
    ]
    gap = build_batch(SIMPLE)
    struct.pack_into(">i", gap, 23, 5)
    refused.append(resum(gap))
    for batch in refused:
        with pytest.raises(InvalidRecordError):
            check_produced(check_batch(batch))


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("value", [b"", b"x" * 200])
def test_old_message_sets_are_refused(magic: int, value: bytes) -> None:
    builder = LegacyRecordBatchBuilder(magic=magic, compression_type=0, batch_size=4096)
    builder.append(0, timestamp=1, key=b"", value=value)
    with pytest.raises(OldFormatError) as caught:
        check_batch(bytes(builder.build()))
    assert caught.value.code is ErrorCode.INVALID_RECORD
    with pytest.raises(OldFormatError):
        check_batches(bytes(builder.build()))


# ---- batches of stock clients ----


# kafka-python leaves snappy to an optional library that needs a compiler: python-snappy.
LIBRARIES = [
    pytest.param(library, codec, id=f"{name}-{codec.name.lower()}")
    for name, library in (("kafka-python", pure), ("aiokafka", aio))
    for codec in Codec
    if (library, codec) != (pure, Codec.SNAPPY)
]


def python_batch(library: Any, codec: Codec) -> bytes:
    builder = library.DefaultRecordBatchBuilder(
        magic=2,
        compression_type=int(codec),
        is_transactional=0,
        producer_id=5,
        producer_epoch=1,
        base_sequence=9,
        batch_size=1 << 20,
    )
    for delta, (key, value, record_headers) in enumerate(CONTENT):
        assert builder.append(delta, 1000 + delta, key, value, record_headers) is not None
    return bytes(builder.build())


CONTENT: list[tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]] = [
    (b"key", b"value", []),
    (None, b"v" * 5000, [("name", b"content"), ("empty", b""), ("näme", None)]),
    (b"", None, []),
    (b"key", b"v" * 5000, [("name", b"content")]),
]


@pytest.mark.parametrize(("library", "codec"), LIBRARIES)
def test_reads_batches_of_python_clients(library: Any, codec: Codec) -> None:
    batch = python_batch(library, codec)
    header = validate_records(batch)
    assert header.codec is codec
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (5, 1, 9)
    got = [(r.key, r.value, list(r.headers)) for r in read_records(batch)]
    assert got == CONTENT
    assert [r.timestamp for r in read_records(batch)] == [1000, 1001, 1002, 1003]


@pytest.mark.parametrize(("library", "codec"), LIBRARIES)
def test_python_clients_read_our_batches(library: Any, codec: Codec) -> None:
    batch = bytes(build_batch([NewRecord(k, v, 1000, h) for k, v, h in CONTENT], codec=codec))
    theirs = library.DefaultRecordBatch(batch)
    assert theirs.validate_crc()
    got = [(r.key, r.value, list(r.headers), r.timestamp) for r in theirs]
    assert got == [(k, v, h, 1000) for k, v, h in CONTENT]


def test_uncompressed_batches_equal_those_of_python_clients() -> None:
    ours = build_batch(
        [NewRecord(k, v, 1000 + i, h) for i, (k, v, h) in enumerate(CONTENT)],
        producer_id=5,
        producer_epoch=1,
        base_sequence=9,
    )
    for library in (pure, aio):
        theirs = bytearray(python_batch(library, Codec.NONE))
        stamp(theirs, 0, 0)
        assert theirs == ours


def fetch_from_mock(host: str, port: int, topic: str) -> bytes:
    """The stored bytes of partition 0, by a hand-made Fetch v4."""
    name = topic.encode()
    body = struct.pack(">hhih", 1, 4, 7, -1) + struct.pack(">iiiib", -1, 100, 1, 1 << 24, 0)
    body += struct.pack(">ih", 1, len(name)) + name + struct.pack(">iiqi", 1, 0, 0, 1 << 24)
    with socket.create_connection((host, port)) as connection:
        connection.sendall(struct.pack(">i", len(body)) + body)
        (size,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
        answer = connection.recv(size, socket.MSG_WAITALL)
    # correlation, throttle | one topic, its name | one partition: index, error, watermarks
    position = 8 + 4 + 2 + len(name) + 4 + 4 + 2 + 8 + 8
    (aborted,) = struct.unpack_from(">i", answer, position)
    position += 4 + max(aborted, 0) * 16
    (size,) = struct.unpack_from(">i", answer, position)
    return answer[position + 4 : position + 4 + size]


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("none", Codec.NONE),
        ("gzip", Codec.GZIP),
        ("snappy", Codec.SNAPPY),
        ("lz4", Codec.LZ4),
        ("zstd", Codec.ZSTD),
    ],
)
@pytest.mark.slow
def test_reads_batches_of_librdkafka(name: str, codec: Codec) -> None:
    producer = Producer(
        {
            "bootstrap.servers": "127.0.0.1:1",
            "test.mock.num.brokers": 1,
            "compression.type": name,
            "enable.idempotence": True,
            "linger.ms": 20,
            "log_level": 0,
        }
    )
    (broker,) = producer.list_topics(timeout=10).brokers.values()
    for key, value, record_headers in CONTENT:
        producer.produce("t", value, key, partition=0, timestamp=1000, headers=list(record_headers))
    assert producer.flush(10) == 0
    stored = fetch_from_mock(broker.host, broker.port, "t")
    got = []
    for header, batch in split_batches(stored):
        assert validate_records(batch) == header
        assert header.codec is codec
        assert header.has_producer_id
        got += [(r.key, r.value, list(r.headers), r.timestamp) for r in read_records(batch)]
    # librdkafka's binding sends an empty key as an empty key, None as null.
    assert got == [(k, v, h, 1000) for k, v, h in CONTENT]


# Made by MemoryRecords.withEndTransactionMarker of Kafka 4.1.1.
KAFKA_MARKERS = [
    (
        Marker(is_commit=False, coordinator_epoch=7),
        "00000000000004d2000000420000000502b1e113330030000000000000018bcfe5687b0000018bcfe5687b"
        "0000000000001267000cffffffff000000012000000008000000000c00000000000700",
    ),
    (
        Marker(is_commit=True, coordinator_epoch=300),
        "00000000000004d200000042000000050236e6df260030000000000000018bcfe5687b0000018bcfe5687b"
        "0000000000001267000cffffffff000000012000000008000000010c00000000012c00",
    ),
]


@pytest.mark.parametrize(("marker", "theirs"), KAFKA_MARKERS, ids=["abort", "commit"])
def test_markers_are_those_of_kafka(marker: Marker, theirs: str) -> None:
    data = bytes.fromhex(theirs)
    header = check_batch(data)
    assert header.is_control
    assert header.is_transactional
    assert parse_marker(data) == marker
    assert data == build_marker(
        marker,
        producer_id=4711,
        producer_epoch=12,
        timestamp=1_700_000_000_123,
        base_offset=1234,
        leader_epoch=5,
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (struct.pack(">hh", 0, 2), struct.pack(">hi", 0, 0)),  # KRaft's leader change
        (struct.pack(">hh", -1, 0), struct.pack(">hi", 0, 0)),
        (b"\0\0\0", struct.pack(">hi", 0, 0)),
        (struct.pack(">hh", 0, 1), b"\0\0"),
        (None, struct.pack(">hi", 0, 0)),
        (struct.pack(">hh", 0, 1), None),
    ],
)
def test_what_is_no_marker(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(CorruptBatchError):
        parse_marker(build_batch([NewRecord(key, value)], control=True))


def test_a_marker_of_a_later_version_is_longer() -> None:
    key = struct.pack(">hhb", 1, 1, 9)
    value = struct.pack(">hib", 1, 5, 9)
    batch = build_batch([NewRecord(key, value)], control=True)
    assert parse_marker(batch) == Marker(is_commit=True, coordinator_epoch=5)
