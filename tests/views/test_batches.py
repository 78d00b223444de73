"""What of a batch matches and what is kept of it, against the decoder of records and stock ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.codec import Codec
from raftmq.errors import CorruptBatchError, KafkaError
from raftmq.records import (
    CREATE_TIME,
    HEADER_SIZE,
    LOG_APPEND_TIME,
    TIMESTAMP_MAX,
    Marker,
    NewRecord,
    Record,
    assemble_batch,
    build_batch,
    build_marker,
    check_batch,
    encode_record,
    parse_header,
    read_records,
    sum_anew,
)
from raftmq.types import Offset
from raftmq.views import batches
from raftmq.views.batches import NOTHING, Judged, Kind, judge, keep_matches
from raftmq.views.conditions import Condition, parse_condition

REFUND = parse_condition("tag = 'refund'")
CONDITIONS = [
    parse_condition(text)
    for text in (
        "tag = 'refund'",
        "tag <> 'refund'",
        "not tag = 'refund'",
        "tag is null",
        "tag in ('refund', 'checkout') and region = 'eu'",
        "key like 'user-1%'",
        "key is null",
        "key = 'user-1' or tag like 'ch%'",
        "not (key is null) and trace is not null",
    )
]
TAGS = (b"refund", b"checkout", b"order", None)

record = st.builds(
    NewRecord,
    st.sampled_from([None, b"", b"user-1", b"user-12", b"user-2", b"k" * 90]),
    st.sampled_from([None, b"", b"v", b"w" * 70, b"refund" * 30]),
    st.integers(-1, 5) | st.integers(0, 1 << 41),
    st.lists(
        st.tuples(st.sampled_from(["tag", "region", "trace"]), st.sampled_from([*TAGS, b"eu"])),
        max_size=3,
    ),
)
alike = st.builds(  # runs of records of one layout
    lambda keys, tags, count: [
        NewRecord(keys[n % len(keys)], b"x" * 60, n, [("tag", tags[n % len(tags)])])
        for n in range(count)
    ],
    st.lists(st.sampled_from([b"user-1", b"user-2", b"user-3"]), min_size=1, max_size=3),
    st.lists(st.sampled_from([b"refund", b"orders", b"orderz"]), min_size=1, max_size=5),
    st.integers(0, 700),
)
lists = st.builds(
    lambda *parts: [r for part in parts for r in part][:1500],
    *[st.lists(record, max_size=20) | alike for _ in range(3)],
).filter(bool)


def is_match(record: Record, condition: Condition) -> bool:
    return condition.matches(record.key, [(n.encode(), v) for n, v in record.headers])


def check(batch: bytes, condition: Condition) -> None:
    """`judge` and `keep_matches` against all records, decoded."""
    everything = list(read_records(batch))
    kept = [each for each in everything if is_match(each, condition)]
    judged = judge(batch, condition)
    if not kept:
        assert judged == NOTHING
        return
    kind = Kind.WHOLE if len(kept) == len(everything) else Kind.MIXED
    assert judged == Judged(kind, Offset(kept[-1].offset), len(kept))
    made = bytes(keep_matches(memoryview(batch), condition))
    assert list(read_records(made)) == kept
    before, after = parse_header(batch), check_batch(made)
    if kind is Kind.WHOLE:
        assert made == batch
        return
    assert after.next_offset == kept[-1].offset + 1
    assert after.record_count == len(kept)
    times = [each.timestamp for each in kept]
    greatest = before.max_timestamp if before.timestamp_type else max(-1, *times)
    same = before._replace(
        batch_length=after.batch_length,
        crc=after.crc,
        last_offset_delta=after.last_offset_delta,
        max_timestamp=greatest,
        record_count=len(kept),
    )
    assert after == same


@settings(deadline=None)
@given(
    lists,
    st.sampled_from(CONDITIONS),
    st.sampled_from(Codec),
    st.sampled_from([CREATE_TIME, LOG_APPEND_TIME]),
    st.booleans(),
)
def test_what_is_kept_is_what_matches(
    records: list[NewRecord], condition: Condition, codec: Codec, kind: int, transactional: bool
) -> None:
    batch = build_batch(
        records,
        codec=codec,
        timestamp_type=kind,
        producer_id=77,
        producer_epoch=3,
        base_sequence=11,
        transactional=transactional,
        base_offset=1 << 40,
        leader_epoch=9,
    )
    check(bytes(batch), condition)


@settings(deadline=None)
@given(st.lists(st.tuples(record, st.integers(1, 300)), min_size=1, max_size=40))
def test_gaps_between_offsets_stay(steps: list[tuple[NewRecord, int]]) -> None:
    deltas = [sum(step for _, step in steps[: n + 1]) - 1 for n in range(len(steps))]
    pieces = [encode_record(r, 7, delta) for (r, _), delta in zip(steps, deltas, strict=True)]
    batch = assemble_batch(pieces, base_timestamp=5, max_timestamp=12, offset_count=deltas[-1] + 9)
    check(bytes(batch), REFUND)


def test_a_time_beyond_64_bits_is_the_last_one_there_is() -> None:
    tags = [[("tag", tag)] for tag in (b"refund", b"order")]
    pieces = [
        encode_record(NewRecord(None, b"", None, headers), 1 << 62, delta)
        for delta, headers in enumerate(tags)
    ]
    batch = assemble_batch(pieces, base_timestamp=1 << 62, max_timestamp=1 << 62)
    assert judge(batch, REFUND).kind is Kind.MIXED
    assert parse_header(keep_matches(batch, REFUND)).max_timestamp == TIMESTAMP_MAX


def many(
    tags: Sequence[str], size: int = 60, codec: Codec = Codec.NONE, base_offset: int = 0
) -> bytes:
    records = [
        NewRecord(b"k", b"v" * size, n, [("tag", tag.encode())]) for n, tag in enumerate(tags)
    ]
    return bytes(build_batch(records, codec=codec, base_offset=base_offset))


@pytest.mark.parametrize("count", [1, 8, 63, 64, 65, 512, 513, 9000, 17_000])
@pytest.mark.parametrize("size", [10, 60, 5000], ids=["short", "usual", "long"])
def test_long_batches(count: int, size: int) -> None:
    count = min(count, 600) if size == 5000 else count
    tags = ["refund" if n % 97 == 3 or 200 < n < 900 else "orders" for n in range(count)]
    check(many(tags, size), REFUND)
    check(many(["refund"] * count, size), REFUND)
    check(many(["orders"] * count, size), REFUND)


def test_a_word_in_the_value_is_no_match() -> None:
    records = [NewRecord(b"tag", b"refund tag refund", 1, [("tag", b"order")])] * 20
    assert judge(build_batch(records), REFUND).kind is Kind.NONE


def test_markers_and_batches_without_records_match_nothing() -> None:
    everything = parse_condition("not x = 'y'")
    marker = build_marker(Marker(True), producer_id=4, producer_epoch=0, timestamp=1)
    assert judge(marker, everything).kind is Kind.NONE
    empty = assemble_batch([], base_timestamp=-1, max_timestamp=-1, offset_count=5)
    assert judge(empty, everything).kind is Kind.NONE


def test_nothing_that_was_found_grows_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_VERDICTS_MAX", 50)
    condition = parse_condition("not tag = 'x'")
    for n in range(300):
        check(many([f"{n}-{m}" for m in range(7)]), condition)
        assert len(condition.verdicts) <= 50
    big = build_batch([NewRecord(None, b"", 1, [("tag", b"x" * 1000)])])
    condition.verdicts.clear()
    assert judge(big, condition).kind is Kind.WHOLE
    assert not condition.verdicts


# ---- what is broken ----


def broken(change: Callable[[bytearray], None], count: int = 3) -> bytes:
    batch = bytearray(many(["refund"] * count))
    change(batch)
    sum_anew(batch)
    return bytes(batch)


def set_byte(position: int, value: int) -> Callable[[bytearray], None]:
    def change(batch: bytearray) -> None:
        batch[HEADER_SIZE + position] = value

    return change


# length at 0 and 1, attributes 2, timestamp 3, offset 4, key's length 5, key 6, value's length 7
@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize(
    "change",
    [
        set_byte(0, 0x03),
        set_byte(1, 0x7E),
        set_byte(5, 0x7E),
        set_byte(7, 0x7E),
        lambda batch: batch.__setitem__(slice(-30, None), b"\xff" * 30),
        lambda batch: batch.__setitem__(slice(57, 61), (2).to_bytes(4, "big")),
        lambda batch: batch.__setitem__(slice(57, 61), (90).to_bytes(4, "big")),
    ],
    ids=["odd length", "long", "key", "value", "end", "few", "many"],
)
def test_broken_records_are_refused_not_believed(
    change: Callable[[bytearray], None], count: int
) -> None:
    batch = broken(change, count)
    try:
        sound = list(read_records(batch))
    except CorruptBatchError:
        with pytest.raises(KafkaError):
            judge(batch, parse_condition("tag = 'refund' or not tag = 'refund'"))
    else:
        assert sound  # pragma: no cover


def test_a_wrong_offset_delta_is_refused_where_it_is_read() -> None:
    batch = broken(set_byte(4, 0x7D), 1)
    with pytest.raises(CorruptBatchError, match="offset delta -63"):
        judge(batch, REFUND)
    mixed = bytearray(many(["refund", "orders", "refund"]))
    mixed[HEADER_SIZE + 4] = 0x7D
    for refuses in (judge, keep_matches):
        with pytest.raises(CorruptBatchError, match="offset delta -63"):
            refuses(mixed, REFUND)
    mixed[HEADER_SIZE + 4] = 0x04
    for refuses in (judge, keep_matches):
        with pytest.raises(CorruptBatchError, match="offset delta 2 after 2"):
            refuses(mixed, REFUND)


def test_what_cannot_be_opened_is_refused() -> None:
    batch = bytearray(many(["refund"] * 9, codec=Codec.ZSTD))
    batch[-3] ^= 0xFF
    with pytest.raises(CorruptBatchError):
        judge(batch[:-1], REFUND)
    batch = bytearray(many(["refund"] * 9, codec=Codec.GZIP))
    with pytest.raises(CorruptBatchError):
        judge(batch[:-10], REFUND)
    batch[22] |= 7
    with pytest.raises(CorruptBatchError):
        judge(batch, REFUND)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.integers(1, 40), st.sampled_from(CONDITIONS))
def test_any_bytes_are_refused_or_judged(data: bytes, count: int, condition: Condition) -> None:
    batch = assemble_batch([data], base_timestamp=0, max_timestamp=0, record_count=count)
    try:
        judged = judge(batch, condition)
    except KafkaError:
        return
    assert judged.count <= count
    if judged.kind is not Kind.NONE:
        keep_matches(batch, condition)  # what is judged can be made anew


# ---- stock decoders ----


def of_kafka_python(batch: bytes) -> list[tuple[int, int, bytes | None, list[tuple[str, bytes]]]]:
    from kafka.record import MemoryRecords

    records = MemoryRecords(batch)
    found = []
    while records.has_next():
        one = records.next_batch()
        assert one.validate_crc()
        found += [(r.offset, r.timestamp, r.key, list(r.headers)) for r in one]
    return found


def of_aiokafka(batch: bytes) -> list[tuple[int, int, bytes | None, list[tuple[str, bytes]]]]:
    from aiokafka.record.default_records import DefaultRecordBatch

    one = DefaultRecordBatch(batch)
    assert one.validate_crc()
    return [(r.offset, r.timestamp, r.key, list(r.headers)) for r in one]


@pytest.mark.parametrize(
    ("decode", "codec"),
    [
        *((of_aiokafka, codec) for codec in Codec),
        *((of_kafka_python, codec) for codec in Codec if codec is not Codec.SNAPPY),
    ],
    ids=lambda each: getattr(each, "name", None) or each.__name__,
)
def test_stock_clients_read_what_was_kept(
    decode: Callable[[bytes], list[tuple[int, int, bytes | None, list[tuple[str, bytes]]]]],
    codec: Codec,
) -> None:
    tags = ["refund" if n % 7 == 3 else "orders" for n in range(200)]
    batch = many(tags, codec=codec, base_offset=1000)
    made = bytes(keep_matches(batch, REFUND))
    expected = [
        (1000 + n, n, b"k", [("tag", b"refund")]) for n, tag in enumerate(tags) if tag == "refund"
    ]
    assert decode(made) == expected
    assert len(made) < len(batch)
