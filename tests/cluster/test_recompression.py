"""Batches under a topic's own compression are built anew off the loop, and keep their order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftmq.cluster.parked_produces import AppendResult
from raftmq.cluster.partition_settings import PartitionSettings
from raftmq.cluster.recompression import INLINE_BYTES_MAX, Recompression
from raftmq.codec import Codec
from raftmq.errors import ErrorCode, KafkaError
from raftmq.ports import DiskError, Runnable
from raftmq.promise import Promise
from raftmq.records import (
    LOG_APPEND_TIME,
    NewRecord,
    assemble_batch,
    build_batch,
    check_batch,
    encode_record,
    parse_header,
    read_records,
    set_max_timestamp,
)
from raftmq.types import Offset

ZSTD = PartitionSettings(compression=Codec.ZSTD)


def batch(value: bytes, size: int = 5_000, codec: Codec = Codec.NONE) -> memoryview:
    return memoryview(build_batch([NewRecord(value, value * size)], codec=codec))


class Bench:
    """A partition that notes what is appended; workers that work when told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Runnable, Callable[[DiskError | None], None]]] = []
        self.appended: list[tuple[bytes | None, Codec]] = []
        self.parked: list[Promise[AppendResult]] = []
        self.must_park = False
        self.refused: list[tuple[memoryview, KafkaError]] = []
        self.it = Recompression(self, self.append, lambda *batch: self.refused.append(batch))

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        self.jobs.append((job, done))

    def work(self, number: int = 0) -> None:
        job, done = self.jobs.pop(number)
        job.run()
        done(None)

    def append(
        self, records: memoryview, _acks: int, _timeout_ms: int
    ) -> AppendResult | Promise[AppendResult]:
        [record] = read_records(records)
        self.appended.append((record.key, parse_header(records).codec))
        if self.must_park:
            self.parked.append(Promise())
            return self.parked[-1]
        return AppendResult(ErrorCode.NONE, Offset(len(self.appended) - 1))


def test_what_may_stay_as_it_is_does_not_wait() -> None:
    it = Bench().it
    assert not it.takes(batch(b"a", codec=Codec.ZSTD), ZSTD)
    assert not it.takes(batch(b"a"), PartitionSettings())
    assert not it.takes(batch(b"a", 10), ZSTD), "too small to be worth another thread"
    assert it.takes(batch(b"a", INLINE_BYTES_MAX), ZSTD)
    unknown = batch(b"a")
    unknown[22] |= 7
    assert not it.takes(unknown, ZSTD), "the append refuses it by name"
    assert not it.takes(None, ZSTD)
    assert not Recompression(None, Bench().append, lambda *_: None).takes(batch(b"a"), ZSTD)


def test_order_is_kept_whoever_is_built_first() -> None:
    bench = Bench()
    first = bench.it.append(batch(b"a"), -1, 100, ZSTD)
    small = batch(b"b", 1, Codec.ZSTD)
    assert bench.it.takes(small, ZSTD), "nothing passes what is at work"
    second = bench.it.append(small, -1, 100, ZSTD)
    third = bench.it.append(batch(b"c"), -1, 100, ZSTD)
    bench.work(1)
    assert bench.appended == []
    bench.work()
    assert [key for key, _ in bench.appended] == [b"a", b"b", b"c"]
    assert {codec for _, codec in bench.appended} == {Codec.ZSTD}
    assert [p.result().base_offset for p in (first, second, third)] == [0, 1, 2]
    assert not bench.it.takes(small, ZSTD)


def test_a_batch_without_its_greatest_timestamp_is_read_elsewhere() -> None:
    bench = Bench()
    records = memoryview(build_batch([NewRecord(b"a", b"a" * 5_000, 77)]))
    set_max_timestamp(records, -1)
    by_append_time = PartitionSettings(timestamp_type=LOG_APPEND_TIME)
    assert not bench.it.takes(records, by_append_time), "it is given another"
    assert bench.it.takes(records, PartitionSettings())
    promise = bench.it.append(records, -1, 100, PartitionSettings())
    bench.work()
    assert promise.result().code is ErrorCode.NONE
    assert check_batch(records).max_timestamp == 77


def test_one_batch_and_no_more() -> None:
    bench = Bench()
    two = memoryview(bytes(batch(b"a")) + bytes(batch(b"b")))
    assert bench.it.takes(two, ZSTD)
    promise = bench.it.append(two, -1, 100, ZSTD)
    bench.work()
    assert promise.result().code is ErrorCode.INVALID_RECORD
    assert not bench.appended


def test_what_cannot_be_read_fails_alone() -> None:
    bench = Bench()
    broken = memoryview(bytearray(batch(b"a")))
    broken[-1] ^= 1
    first = bench.it.append(broken, -1, 100, ZSTD)
    second = bench.it.append(batch(b"b"), -1, 100, ZSTD)
    bench.work()
    bench.work()
    assert first.result().code is ErrorCode.CORRUPT_MESSAGE
    assert second.result().code is ErrorCode.NONE


@pytest.mark.parametrize("settings", [ZSTD, PartitionSettings()])
def test_times_beyond_64_bits_cost_their_producer_an_error(settings: PartitionSettings) -> None:
    """A worker's exception would be a bug of ours, and stop the node."""
    bench = Bench()
    record = encode_record(NewRecord(b"a", b"a" * 5_000), (1 << 63) - 1, 0)
    records = memoryview(assemble_batch([record], base_timestamp=1, max_timestamp=-1))
    promise = bench.it.append(records, -1, 100, settings)
    bench.work()
    assert promise.result().code is ErrorCode.INVALID_RECORD
    assert not bench.appended


def test_what_is_too_large_when_built_anew_is_refused() -> None:
    settings = PartitionSettings(compression=Codec.NONE, max_message_bytes=1_000)
    bench = Bench()
    records = batch(b"a", 5_000, Codec.ZSTD)
    promise = bench.it.append(records, -1, 100, settings)
    bench.work()
    assert promise.result().code is ErrorCode.MESSAGE_TOO_LARGE
    [(refused, error)] = bench.refused  # what its producer sends next is judged by that
    assert refused is records
    assert error.code is ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize("code", [ErrorCode.NONE, ErrorCode.REQUEST_TIMED_OUT])
def test_the_answer_is_the_appends(code: ErrorCode) -> None:
    bench = Bench()
    bench.must_park = True
    promise = bench.it.append(batch(b"a"), -1, 100, ZSTD)
    bench.work()
    assert not promise.is_done
    bench.parked[0].resolve(AppendResult(code))
    assert promise.result().code is code
