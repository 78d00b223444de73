"""What a read tells when a log changes under its plan, step by step against a fake broker."""

from __future__ import annotations

import pickle
from typing import Any
from uuid import UUID

import pytest

from raftmq.codec import Codec
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.records import (
    HEADER_SIZE,
    NewRecord,
    assemble_batch,
    build_batch,
    encode_record,
    set_max_timestamp,
)
from raftmq_client.errors import CorruptRecordsError
from raftmq_spark.errors import DataLossError, ReadError
from raftmq_spark.options import read_options
from raftmq_spark.plan import RangePart
from raftmq_spark.security import ClientSettings
from tests.client.fake_broker import FakeBroker
from tests.spark.conftest import extra

pytestmark = pytest.mark.spark
"""Needs pyarrow, but neither Java nor Spark, except for the last."""
extra("pyarrow")

from raftmq_spark import reader as reading  # noqa: E402


@pytest.fixture(autouse=True)
def be_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_DELETED_S", 0.2)
    monkeypatch.setattr(reading, "_TURN_S", 0.05)


def fill(broker: FakeBroker, *sizes: int, codec: Codec = Codec.NONE) -> None:
    log = broker.logs[("t", 0)]
    for size in sizes:
        records = [NewRecord(None, b"%d" % (log.end + n)) for n in range(size)]
        log.append(memoryview(build_batch(records, codec=codec)))


def part_of(broker: FakeBroker, start: int, end: int) -> RangePart:
    return RangePart("t", 0, start, end, broker.topic_ids["t"])


def read(broker: FakeBroker, part: RangePart, **options: Any) -> list[int]:
    client = ClientSettings(broker.address, timeout_ms=2_000)
    batches = reading.read_range(client, part, columns=("offset", "value"), **options)
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert all(row["value"] == b"%d" % row["offset"] for row in rows)
    return [row["offset"] for row in rows]


@pytest.mark.parametrize("codec", list(Codec))
def test_ranges_cut_batches_where_they_must(codec: Codec) -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 3, 70, 1, 26, codec=codec)
        for start, end in ((0, 100), (1, 2), (2, 74), (73, 74), (99, 100)):
            assert read(broker, part_of(broker, start, end)) == list(range(start, end))
        assert read(broker, part_of(broker, 5, 5)) == []


def test_connections_that_end_are_made_anew() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 10)
        for kind in ("drop", "drop after"):
            fault = broker.fault(ApiKey.FETCH, kind)
            assert read(broker, part_of(broker, 0, 10)) == list(range(10))
            assert fault.was_met.is_set()
        refused = broker.fault(ApiKey.FETCH, "refuse", ErrorCode.NOT_LEADER_OR_FOLLOWER)
        assert read(broker, part_of(broker, 0, 10)) == list(range(10))
        assert refused.was_met.is_set()


def test_gaps_are_no_loss() -> None:
    with FakeBroker({"t": 1}) as broker:
        kept = [encode_record(NewRecord(None, b"%d" % n), 0, n) for n in (2, 5)]
        batch = assemble_batch(kept, base_timestamp=0, max_timestamp=0, offset_count=8)
        log = broker.logs[("t", 0)]
        log.append(memoryview(batch))
        log.end = 8
        fill(broker, 2)
        assert read(broker, part_of(broker, 0, 10)) == [2, 5, 8, 9]
        assert read(broker, part_of(broker, 6, 8)) == []


def test_retention_passes_the_start() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 5, 5)
        broker.logs[("t", 0)].start = 5
        said = r"partition t-0: offsets \[2, 5\) are gone, its log starts at 5 \(range \[2, 9\)\)"
        with pytest.raises(DataLossError, match=said):
            read(broker, part_of(broker, 2, 9))
        with pytest.warns(RuntimeWarning, match=said):
            found = read(broker, part_of(broker, 2, 9), fails_on_data_loss=False)
        assert found == [5, 6, 7, 8]
        with pytest.warns(RuntimeWarning, match=r"offsets \[2, 4\) are gone"):
            assert read(broker, part_of(broker, 2, 4), fails_on_data_loss=False) == []


def test_a_log_start_within_a_batch() -> None:
    """Its bytes are still there, but the records below the log start are not."""
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 10)
        broker.logs[("t", 0)].start = 4
        with pytest.warns(RuntimeWarning, match=r"offsets \[2, 4\) are gone"):
            found = read(broker, part_of(broker, 2, 9), fails_on_data_loss=False)
        assert found == [4, 5, 6, 7, 8]


def test_a_log_that_ends_before_the_range() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 5)
        with pytest.raises(DataLossError, match=r"offsets \[7, 9\) are gone, its log ends at 5"):
            read(broker, part_of(broker, 7, 9))


def test_nothing_comes() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 5)
        with pytest.raises(ReadError, match=r"nothing came at offset 5 of the range \[3, 9\)"):
            read(broker, part_of(broker, 3, 9))


def test_a_deleted_topic() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 5)
        part = part_of(broker, 0, 5)
        del broker.topic_ids["t"], broker.logs[("t", 0)]
        with pytest.raises(DataLossError, match=r"\[0, 5\) are gone: the topic is deleted"):
            read(broker, part)
        with pytest.warns(RuntimeWarning, match="the topic is deleted"):
            assert read(broker, part, fails_on_data_loss=False) == []


def test_a_retired_partition_that_is_gone_meanwhile() -> None:
    with FakeBroker({"t": 2}) as broker:
        fill(broker, 5)
        part = part_of(broker, 0, 5)
        del broker.logs[("t", 0)]
        with pytest.raises(DataLossError, match="or has no such partition any more"):
            read(broker, part)


def test_a_topic_created_anew_is_another_one() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 5)
        part = part_of(broker, 0, 5)
        broker.topic_ids["t"] = UUID(int=99)
        with pytest.raises(DataLossError, match="deleted and created anew"):
            read(broker, part)
        with pytest.warns(RuntimeWarning, match="deleted and created anew"):
            assert read(broker, part, fails_on_data_loss=False) == []


def test_a_topic_created_anew_in_the_middle_of_a_read() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 5, 5, 5)
        client = ClientSettings(broker.address, timeout_ms=2_000)
        part = part_of(broker, 0, 15)
        batches = reading.read_range(client, part, columns=("offset",), rows_min=5)
        assert next(batches).num_rows == 5
        broker.topic_ids["t"] = UUID(int=99)
        with pytest.raises(DataLossError, match="deleted and created anew"):
            list(batches)


def test_damage_never_becomes_a_row() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 5, 5)
        log = broker.logs[("t", 0)]
        damaged = bytearray(log.batches[1])
        damaged[-1] ^= 1
        log.batches[1] = bytes(damaged)
        with pytest.raises(CorruptRecordsError, match="t-0 at offset 5"):
            read(broker, part_of(broker, 0, 10))
        assert read(broker, part_of(broker, 0, 5)) == [0, 1, 2, 3, 4]


def test_what_breaks_its_format_is_told_with_the_batch() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 5)
        wrong = assemble_batch([b"\x09nonsense"], base_timestamp=0, max_timestamp=0)
        broker.logs[("t", 0)].append(memoryview(wrong))
        with pytest.raises(ReadError, match="partition t-0: the batch at offset 5 cannot be read"):
            read(broker, part_of(broker, 0, 6))
        squeezed = build_batch([NewRecord(None, b"v" * 99)], codec=Codec.ZSTD)
        cut = assemble_batch([bytes(squeezed[HEADER_SIZE:-3])], base_timestamp=0, max_timestamp=0)
        cut = bytearray(cut)
        broker.logs[("t", 0)].batches.pop()
        broker.logs[("t", 0)].end = 5
        broker.logs[("t", 0)].append(memoryview(cut))
        with pytest.raises(ReadError, match="the batch at offset 5 cannot be read"):
            read(broker, part_of(broker, 0, 6))


def test_every_attempt_reads_the_same_rows() -> None:
    """As Spark does it: the reader and its parts travel as bytes; records come meanwhile."""
    source = extra("raftmq_spark.source")
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 50, 50)
        options = {
            "kafka.bootstrap.servers": broker.address,
            "subscribe": "t",
            "minPartitions": "3",
            "columns": "offset",
        }
        made = source.RaftmqDataSource(options)
        reader = made.reader(made.schema())
        tasks = [pickle.dumps((reader, part)) for part in reader.partitions()]
        assert len(tasks) == 3
        fill(broker, 50)
        for _ in range(2):
            rows = []
            for task in tasks:
                executor, part = pickle.loads(task)
                rows += [row["offset"] for b in executor.read(part) for row in b.to_pylist()]
            assert rows == list(range(100))
        assert read_options(options).partitions_min == 3


def test_a_plan_without_parts() -> None:
    source = extra("raftmq_spark.source")
    with FakeBroker({"t": 1}) as broker:
        made = source.RaftmqDataSource(
            {"kafka.bootstrap.servers": broker.address, "subscribe": "t"}
        )
        reader = made.reader(made.schema())
        assert list(reader.partitions()) == []
        bare = source.datasource.InputPartition(None)
        assert list(reader.read(bare)) == []


@pytest.mark.parametrize("piles", [{}, {"rows_min": 1}, {"rows_min": 4}])
def test_what_cannot_be_read_is_passed_by_where_it_stands(piles: dict[str, int]) -> None:
    """Two kinds: records that break their format, and some that do not decompress."""
    with FakeBroker({"t": 1}) as broker:
        log = broker.logs[("t", 0)]
        fill(broker, 3)
        log.append(memoryview(assemble_batch([b"\x7f"] * 4, base_timestamp=0, max_timestamp=0)))
        fill(broker, 2)
        torn = bytearray(assemble_batch([b"x"], base_timestamp=0, max_timestamp=0))
        torn[22] = Codec.GZIP
        set_max_timestamp(torn, 0)  # sums it anew
        log.append(memoryview(torn))
        fill(broker, 2)
        passed: list[tuple[int, int]] = []

        def note(start: int, end: int, why: str) -> None:
            assert why
            passed.append((start, end))

        part = part_of(broker, 1, 12)
        with pytest.raises(ReadError, match=r"t-0: the batch at offset 3 .*option skipUnreadable"):
            read(broker, part, **piles)
        assert read(broker, part, passed_by=note, **piles) == [1, 2, 7, 8, 10, 11]
        assert passed == [(3, 7), (9, 10)]
        passed.clear()
        assert read(broker, part_of(broker, 4, 6), passed_by=note) == []
        assert passed == [(4, 6)]
