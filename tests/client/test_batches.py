"""Whole batches of one partition, as bulk decoders want them."""

from __future__ import annotations

import pytest

from raftmq.protocol import ApiKey
from raftmq.records import NewRecord, build_batch, parse_header
from raftmq.types import TopicPartition
from raftmq_client.blocking.batches import BatchReader
from raftmq_client.errors import BrokerError, CorruptRecordsError, NoOffsetError
from tests.client.fake_broker import FakeBroker

KEY = TopicPartition("t", 0)


def fill(broker: FakeBroker, *sizes: int) -> None:
    for size in sizes:
        batch = build_batch([NewRecord(None, b"v%d" % n) for n in range(size)])
        broker.logs[KEY].append(memoryview(batch))


def read_until(reader: BatchReader, end: int) -> list[tuple[int, int]]:
    """Offsets of the batches up to `end`."""
    found = []
    while reader.position < end:
        found += [(header.base_offset, header.next_offset) for header, _ in reader.read(10)]
    return found


def test_batches_come_whole_and_in_order() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 3, 4, 5)
        with BatchReader(broker.address, KEY, 4) as reader:
            assert reader.position == 4
            assert read_until(reader, 12) == [(3, 7), (7, 12)]
            reader.seek(0)
            assert read_until(reader, 12) == [(0, 3), (3, 7), (7, 12)]
            assert reader.bounds() == (0, 12)
            assert reader.topic_id() == broker.topic_ids["t"]


def test_fetching_stops_at_the_end_of_what_is_wanted() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 3, 4)
        with BatchReader(broker.address, KEY, 0, end=5) as reader:
            assert read_until(reader, 5) == [(0, 3), (3, 7)]
            # One more round of the broker's, after which a fetch would have come.
            reader.bounds()
            asked = broker.count(ApiKey.FETCH)
            reader.bounds()
            assert broker.count(ApiKey.FETCH) == asked


def test_out_of_range_is_told_and_nothing_is_reset() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 5, 5)
        broker.logs[KEY].start = 5
        with BatchReader(broker.address, KEY, 2) as reader:
            with pytest.raises(NoOffsetError):
                reader.read(10)
            assert reader.position == 2
            assert reader.bounds() == (5, 10)


def test_damage_is_told_with_its_offset() -> None:
    with FakeBroker({"t": 1}) as broker:
        fill(broker, 3, 4)
        damaged = bytearray(broker.logs[KEY].batches[1])
        damaged[-1] ^= 1
        broker.logs[KEY].batches[1] = bytes(damaged)
        with BatchReader(broker.address, KEY, 0) as reader:
            ((header, batch),) = reader.read(10)
            assert parse_header(batch) == header
            with pytest.raises(CorruptRecordsError, match="t-0 at offset 3"):
                reader.read(10)


def test_a_topic_that_nobody_knows() -> None:
    with FakeBroker() as broker, BatchReader(broker.address, KEY, 0) as reader:
        while not reader.is_unknown:
            assert reader.read(0.01) == []
        assert "UNKNOWN_TOPIC_OR_PARTITION" in reader.trouble
        with pytest.raises(BrokerError, match="UNKNOWN_TOPIC_OR_PARTITION"):
            reader.topic_id()
