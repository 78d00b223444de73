"""Batches whose producers do not say how new their newest record is."""

from __future__ import annotations

import pytest

from raftmq.codec import Codec
from raftmq.errors import ErrorCode
from raftmq.partition.ports import AppendResult
from raftmq.records import NewRecord, build_batch, check_batch, set_max_timestamp
from tests.partition.fake_replica import Bench

HOUR_MS = 3_600_000


def undated(codec: Codec, times: list[int]) -> memoryview:
    """A batch as Sarama made it before 1.46: Kafka's broker writes the greatest timestamp."""
    records = [NewRecord(b"k", b"v" * 10, time) for time in times]
    made = build_batch(records, codec=codec)
    set_max_timestamp(made, -1)
    return memoryview(made)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.GZIP])
@pytest.mark.parametrize("is_readonly", [False, True])
def test_a_batch_without_its_greatest_timestamp_is_given_it(
    codec: Codec, is_readonly: bool
) -> None:
    bench = Bench()
    records = undated(codec, [999_000, 1_000_000, 998_000])
    bench.partition.append(records.toreadonly() if is_readonly else records, 1, 1_000)
    header = check_batch(bench.replica.log.batches[0][1])
    assert (header.base_timestamp, header.max_timestamp) == (999_000, 1_000_000)
    assert header.codec is codec
    late = undated(codec, [1_000_000, 1_000_000 + 2 * HOUR_MS])
    refused = bench.partition.append(late, 1, 1_000)
    assert isinstance(refused, AppendResult)
    assert refused.code is ErrorCode.INVALID_TIMESTAMP


def test_records_without_timestamps_are_left_so() -> None:
    bench = Bench()
    bench.partition.append(undated(Codec.NONE, [-1, -1]), 1, 1_000)
    assert check_batch(bench.replica.log.batches[0][1]).max_timestamp == -1
