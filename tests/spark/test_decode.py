"""Bulk decoding against `raftmq.records`, which reads record by record."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.codec import Codec
from raftmq.errors import CorruptBatchError
from raftmq.records import (
    CREATE_TIME,
    HEADER_SIZE,
    LOG_APPEND_TIME,
    NewRecord,
    Record,
    assemble_batch,
    build_batch,
    encode_record,
    parse_header,
    read_records,
    set_max_timestamp,
    stamp,
)
from tests.spark.conftest import extra

pytestmark = pytest.mark.spark
pa: Any = extra("pyarrow")

from raftmq_spark import fields  # noqa: E402
from raftmq_spark.decode import COLUMN_TYPES, Pile, UndecodableError, arrow_schema, decode  # noqa: E402
from raftmq_spark.options import COLUMNS  # noqa: E402

BYTES = st.none() | st.binary(max_size=9) | st.integers(60, 70).map(bytes)
HEADERS = st.lists(st.tuples(st.text(max_size=3), BYTES), max_size=3)
RECORDS = st.lists(
    st.builds(NewRecord, BYTES, BYTES, st.integers(0, 1 << 40), HEADERS.map(tuple)),
    min_size=1,
    max_size=90,
)
BATCHES = st.lists(
    st.tuples(
        RECORDS,
        st.sampled_from([Codec.NONE, Codec.NONE, Codec.ZSTD, Codec.LZ4, Codec.SNAPPY, Codec.GZIP]),
        st.sampled_from([CREATE_TIME, LOG_APPEND_TIME]),
        st.integers(0, 5),
    ),
    min_size=1,
    max_size=4,
)


def pile_of(batches: Sequence[bytes | bytearray]) -> Pile:
    pile = Pile()
    for batch in batches:
        pile.add(parse_header(batch), memoryview(batch))
    return pile


def rows_of(batch: Any) -> list[Record]:
    """Arrow's columns as the records that they were."""
    columns = [batch.column(name).to_pylist() for name in ("offset", "key", "value", "headers")]
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    types = batch.column("timestampType").to_pylist()
    return [
        Record(
            offset,
            time // 1000,
            key,
            value,
            tuple((header["key"], header["value"]) for header in headers or ()),
            type_,
        )
        for offset, key, value, headers, time, type_ in zip(*columns, times, types, strict=True)
    ]


@settings(deadline=None)
@given(batches=BATCHES, cut=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_as_record_by_record(batches: Any, cut: tuple[int, int]) -> None:
    made = []
    offset = 100
    for records, codec, type_, gap in batches:
        offset += gap
        batch = build_batch(records, codec=codec, timestamp_type=type_, timestamp=1 << 39)
        stamp(batch, offset, 3)
        offset += len(records)
        made.append(batch)
    start, end = 100 + cut[0], offset - cut[1]
    expected = [
        record._replace(leader_epoch=-1)
        for batch in made
        for record in read_records(batch)
        if start <= record.offset < end
    ]
    found = decode(pile_of(made), "topic", 7, start, end, COLUMNS)
    found.validate(full=True)
    assert rows_of(found) == expected
    assert found.column("topic").to_pylist() == ["topic"] * len(expected)
    assert found.column("partition").to_pylist() == [7] * len(expected)


def test_long_runs_of_equal_records_and_the_ends_of_runs() -> None:
    """Lengths are followed in strides where they are equal; deltas make them grow by themselves."""
    sizes = [100] * 9_000 + [101, 100] * 50 + [8_200] * 70 + [100] + [8_200] * 40 + [3] * 200
    records = [NewRecord(None, bytes([n % 251]) * size, 1_000 + n) for n, size in enumerate(sizes)]
    batch = build_batch(records)
    found = decode(pile_of([batch]), "t", 0, 0, len(records), ("value", "offset", "timestamp"))
    assert found.column("value").to_pylist() == [record.value for record in records]
    assert found.column("offset").to_pylist() == list(range(len(records)))
    assert found.column("timestamp").cast(pa.int64()).to_pylist() == [
        1000 * (1_000 + n) for n in range(len(sizes))
    ]


def test_gaps_of_compaction() -> None:
    kept = [encode_record(NewRecord(None, b"%d" % n), 0, n) for n in (3, 70, 9_000)]
    batch = assemble_batch(kept, base_timestamp=5, max_timestamp=5, offset_count=10_000)
    found = decode(pile_of([batch]), "t", 0, 0, 10_000, ("offset", "value"))
    assert found.to_pylist() == [
        {"offset": n, "value": b"%d" % n} for n in (3, 70, 9_000)
    ]  # fmt: skip


def test_batches_without_records() -> None:
    empty = assemble_batch((), base_timestamp=0, max_timestamp=0, offset_count=9)
    assert decode(pile_of([empty]), "t", 0, 0, 9, COLUMNS).num_rows == 0


@settings(deadline=None)
@given(data=st.data())
def test_any_damage_is_an_error_or_reads_as_record_by_record(data: Any) -> None:
    """A checksum that holds says nothing about a producer's sense."""
    records = data.draw(RECORDS)
    batch = build_batch(records)
    position = data.draw(st.integers(HEADER_SIZE, len(batch) - 1))
    batch[position] = data.draw(st.integers(0, 255))
    try:
        expected = [record._replace(leader_epoch=-1) for record in read_records(batch)]
    except Exception:  # noqa: BLE001 - whatever it is, it must be told
        with pytest.raises(UndecodableError):
            decode(pile_of([batch]), "t", 0, 0, 1 << 40, COLUMNS)
        return
    try:
        found = decode(pile_of([batch]), "t", 0, 0, 1 << 40, COLUMNS)
    except UndecodableError as refused:
        assert "timestamp" in str(refused) or "decoded" in str(refused)  # noqa: PT017
        return
    assert rows_of(found) == expected


def test_what_is_wrong_is_said_with_the_batch() -> None:
    sound = build_batch([NewRecord(None, b"v")])
    broken = build_batch([NewRecord(None, b"w"), NewRecord(None, b"w")])
    stamp(broken, 1, 0)
    broken[HEADER_SIZE] += 2
    with pytest.raises(UndecodableError, match="than it says") as caught:
        decode(pile_of([sound, broken]), "t", 0, 0, 3, COLUMNS)
    assert caught.value.base_offset == 1
    assert str(caught.value).count("CORRUPT_MESSAGE") == 1
    compressed = build_batch([NewRecord(None, b"v" * 99)], codec=Codec.GZIP)
    with pytest.raises(UndecodableError, match="gzip") as caught:
        pile_of([compressed[:-4]])
    assert str(caught.value).count("CORRUPT_MESSAGE") == 1


def test_a_timestamp_beyond_microseconds_names_the_offset() -> None:
    batch = build_batch([NewRecord(None, b"v", 5), NewRecord(None, b"v", 1 << 60)])
    with pytest.raises(UndecodableError, match="at offset 1 does not fit"):
        decode(pile_of([batch]), "t", 0, 0, 2, COLUMNS)
    assert decode(pile_of([batch]), "t", 0, 0, 2, ("value",)).num_rows == 2


def test_types_are_those_that_spark_makes_of_the_schema() -> None:
    types = extra("pyspark.sql.pandas.types")
    source = extra("raftmq_spark.source")
    made = types.to_arrow_schema(source.spark_schema(COLUMNS), timezone="UTC")
    assert arrow_schema(COLUMNS).equals(made)
    assert list(COLUMN_TYPES) == list(COLUMNS)


def test_what_travels_can_be_pickled() -> None:
    source = extra("raftmq_spark.source")
    options = {"kafka.bootstrap.servers": "h:1", "subscribe": "t"}
    made = pickle.loads(pickle.dumps(source.RaftmqDataSource(options)))
    reader = pickle.loads(pickle.dumps(made.reader(made.schema())))
    empty = source.datasource.InputPartition(None)
    assert list(reader.read(empty)) == []


@pytest.mark.parametrize(("rows", "count"), [(1, 30_000), (3, 5_000), (200, 40)])
def test_headers_cost_by_their_bytes(
    rows: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a pass over all columns for each header of the record that has most: a batch of 694
    bytes opens to 300,000 of them."""
    headers = tuple((f"n{n % 7}", None if n % 3 else b"v" * (n % 70)) for n in range(count))
    records = [NewRecord(None, b"v", 0, headers[: max(count - n, 0)]) for n in range(rows)]
    passes = []
    plain = fields.read_varints

    def counted(octets: Any, positions: Any) -> Any:
        passes.append(len(positions))
        return plain(octets, positions)

    monkeypatch.setattr(fields, "read_varints", counted)
    found = decode(pile_of([build_batch(records)]), "t", 0, 0, rows, COLUMNS)
    assert len(passes) <= 6 + 2 * 40
    told = found.column("headers").to_pylist()
    assert [len(row or ()) for row in told] == [max(count - n, 0) for n in range(rows)]
    assert tuple((item["key"], item["value"]) for item in told[0]) == headers


@pytest.mark.parametrize("at", range(1, 40))
def test_headers_that_lie_are_found_one_by_one(at: int) -> None:
    """A byte of a record with few headers changed: as the reader of records says, or refused."""
    batch = bytearray(build_batch([NewRecord(None, b"", 0, (("ab", b"cd"), ("e", None)))]))
    if 61 + at >= len(batch):
        return
    batch[61 + at] ^= 0x05
    set_max_timestamp(batch, 0)
    try:
        wanted = list(read_records(batch))
    except CorruptBatchError:
        wanted = None
    try:
        found = rows_of(decode(pile_of([batch]), "t", 0, 0, 1 << 40, COLUMNS))
    except CorruptBatchError:
        found = None
    assert found is None or [row.headers for row in found] == [row.headers for row in wanted or ()]
