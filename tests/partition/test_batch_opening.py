"""Batches whose records take long to look at are a worker's, and keep their order."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest

from raftmq.codec import PRODUCED_OUTPUT_MAX, Codec
from raftmq.errors import RETRIABLE, ErrorCode
from raftmq.partition.partition import Partition
from raftmq.partition.ports import AppendResult
from raftmq.partition.produce_checks import INLINE, WINDOW_MS, InlineBudget
from raftmq.partition.settings import CheckDepth, PartitionSettings
from raftmq.ports import DiskError, Runnable
from raftmq.promise import Promise
from raftmq.records import (
    HEADER_SIZE,
    LOG_APPEND_TIME,
    NewRecord,
    assemble_batch,
    build_batch,
    check_batch,
    encode_record,
    read_records,
    set_max_timestamp,
)
from tests.partition.fake_replica import Bench as PartitionBench
from tests.partition.fake_replica import FakeClock
from tests.poison.bytes_of import batch as batch_of
from tests.poison.bytes_of import record, zstd_many_headers

NOW_MS = 1_000_000
ZSTD = PartitionSettings(compression=Codec.ZSTD)
PLAIN = PartitionSettings()
LARGE = 5_000


def batch(key: bytes, size: int = LARGE, codec: Codec = Codec.NONE) -> memoryview:
    return memoryview(build_batch([NewRecord(key, key * size, NOW_MS)], codec=codec))


MANY = INLINE.cost + 100


def slow(key: bytes, count: int = MANY) -> memoryview:
    """Records of changing layouts: no run of them is judged at once."""
    made = [NewRecord(key, bytes(number * 7 % 100), NOW_MS) for number in range(count)]
    return memoryview(build_batch(made))


class Bench:
    """A partition, and workers that work when told to."""

    def __init__(self, settings: PartitionSettings = PLAIN) -> None:
        self.jobs: list[tuple[Runnable, Callable[[DiskError | None], None]]] = []
        self.inline = InlineBudget(FakeClock())
        self.it = PartitionBench(settings=settings, workers=self)

    @property
    def partition(self) -> Partition:
        return self.it.partition

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        self.jobs.append((job, done))

    def work(self, number: int = 0) -> None:
        job, done = self.jobs.pop(number)
        job.run()
        done(None)

    def append(self, records: memoryview, acks: int = 1) -> AppendResult | Promise[AppendResult]:
        return self.partition.append(records, acks, 1_000)

    @property
    def stored(self) -> list[tuple[bytes | None, Codec]]:
        return [
            (next(read_records(data)).key, check_batch(data).codec)
            for _, data in self.it.replica.log.batches
        ]


def promised(result: AppendResult | Promise[AppendResult]) -> Promise[AppendResult]:
    assert isinstance(result, Promise)
    assert not result.is_done
    return result


def code_of(result: AppendResult | Promise[AppendResult]) -> ErrorCode:
    return (result.result() if isinstance(result, Promise) else result).code


@pytest.mark.parametrize(
    ("records", "settings"),
    [
        (batch(b"a", codec=Codec.ZSTD), ZSTD),
        (batch(b"a"), PLAIN),
        (batch(b"a", 10), ZSTD),
        (slow(b"a"), PartitionSettings(check=CheckDepth.CRC)),
        (memoryview(build_batch([NewRecord(b"a", b"v" * 20, NOW_MS)] * 9_000)), PLAIN),
    ],
    ids=["its codec", "plain", "small enough", "not looked into", "many of one layout"],
)
def test_what_is_quick_does_not_wait(records: memoryview, settings: PartitionSettings) -> None:
    bench = Bench(settings)
    assert code_of(bench.append(records)) is ErrorCode.NONE
    assert not bench.jobs


def undated() -> memoryview:
    made = build_batch([NewRecord(b"a", bytes(number % 50), 77) for number in range(MANY)])
    set_max_timestamp(made, -1)
    return memoryview(made)


@pytest.mark.parametrize(
    ("records", "settings"),
    [
        (batch(b"a"), ZSTD),
        (slow(b"a"), PLAIN),
        (memoryview(build_batch([NewRecord(b"a", bytes(100_000))], codec=Codec.LZ4)), PLAIN),
        (memoryview(build_batch([NewRecord(b"a", bytes(2 << 20))])), None),
        (undated(), PartitionSettings(check=CheckDepth.CRC)),
        (slow(b"a", 10_000), PartitionSettings(check=CheckDepth.FRAME)),
    ],
    ids=["another codec", "many", "opens to much", "large", "undated", "many lengths"],
)
def test_what_takes_long_is_a_workers(
    records: memoryview, settings: PartitionSettings | None
) -> None:
    bench = Bench(settings or PartitionSettings(max_message_bytes=4 << 20))
    promise = promised(bench.append(records))
    assert not bench.it.replica.log.batches
    bench.work()
    assert code_of(promise) is ErrorCode.NONE
    stored = bench.it.replica.log.batches[0][1]
    assert check_batch(stored).max_timestamp >= check_batch(stored).base_timestamp


def test_order_is_kept_whoever_is_done_first() -> None:
    bench = Bench(ZSTD)
    first = promised(bench.append(batch(b"a")))
    second = promised(bench.append(batch(b"b", 1, Codec.ZSTD)))
    third = promised(bench.append(batch(b"c")))
    assert len(bench.jobs) == 2, "long work begins at once, quick work when its turn comes"
    bench.work(1)
    assert bench.stored == []
    bench.work()
    assert [key for key, _ in bench.stored] == [b"a", b"b", b"c"]
    assert {codec for _, codec in bench.stored} == {Codec.ZSTD}
    assert [p.result().base_offset for p in (first, second, third)] == [0, 1, 2]
    assert code_of(bench.append(batch(b"d", 1, Codec.ZSTD))) is ErrorCode.NONE


def test_what_turns_out_to_take_long_is_worked_on_when_its_turn_comes() -> None:
    bench = Bench()
    results = [promised(bench.append(slow(key))) for key in (b"a", b"b", b"c")]
    for done in range(3):
        assert len(bench.jobs) == 1
        assert [key for key, _ in bench.stored] == [b"a", b"b", b"c"][:done]
        bench.work()
    assert [code_of(result) for result in results] == [ErrorCode.NONE] * 3
    assert [key for key, _ in bench.stored] == [b"a", b"b", b"c"]


def test_a_pipelining_producer_keeps_its_sequence_behind_a_worker() -> None:
    bench = Bench()
    results = []
    for sequence in range(5):
        made = build_batch(
            [NewRecord(b"k", bytes(100_000 if sequence == 1 else 10), NOW_MS)],
            codec=Codec.GZIP,
            producer_id=7,
            producer_epoch=0,
            base_sequence=sequence,
        )
        results.append(bench.append(memoryview(made), -1))
    assert len(bench.it.replica.log.batches) == 1
    bench.work()
    assert len(bench.it.replica.log.batches) == 5
    bench.it.replica.commit(5)
    assert [code_of(result) for result in results] == [ErrorCode.NONE] * 5


def test_leadership_that_was_lost_meanwhile_takes_nothing() -> None:
    bench = Bench(ZSTD)
    promise = promised(bench.append(batch(b"a")))
    behind = promised(bench.append(batch(b"b", 1, Codec.ZSTD)))
    bench.it.replica.follow()
    bench.work()
    assert code_of(promise) is code_of(behind) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert not bench.stored


def test_who_does_not_lead_does_not_look() -> None:
    bench = Bench(ZSTD)
    bench.it.replica.follow()
    assert code_of(bench.append(batch(b"a"))) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert not bench.jobs


def test_configs_that_changed_meanwhile_are_obeyed() -> None:
    bench = Bench(ZSTD)
    promise = promised(bench.append(batch(b"a")))
    bench.partition.configure(PartitionSettings(compression=Codec.GZIP))
    bench.work()
    assert not promise.is_done
    bench.work()
    assert bench.stored == [(b"a", Codec.GZIP)]
    assert code_of(promise) is ErrorCode.NONE


def test_a_closed_partition_answers_what_was_at_work() -> None:
    bench = Bench(ZSTD)
    promise = promised(bench.append(batch(b"a")))
    bench.partition.close()
    bench.work()
    assert code_of(promise) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_batch_without_its_greatest_timestamp_is_given_it() -> None:
    records = memoryview(build_batch([NewRecord(b"a", b"a" * LARGE, 77)]))
    set_max_timestamp(records, -1)
    bench = Bench(PartitionSettings(check=CheckDepth.CRC))
    assert code_of(bench.append(records)) is ErrorCode.NONE
    assert check_batch(bench.it.replica.log.batches[0][1]).max_timestamp == 77
    stamped = Bench(PartitionSettings(check=CheckDepth.CRC, timestamp_type=LOG_APPEND_TIME))
    assert code_of(stamped.append(undated())) is ErrorCode.NONE, "it is given another"


def test_what_cannot_be_read_fails_alone() -> None:
    bench = Bench(ZSTD)
    payload = bytes(slow(b"a")[HEADER_SIZE:]) + record(0)
    first = promised(bench.append(memoryview(batch_of(payload, NOW_MS, count=MANY + 1))))
    second = promised(bench.append(batch(b"b")))
    bench.work()
    bench.work()
    assert code_of(first) is ErrorCode.INVALID_RECORD
    assert code_of(second) is ErrorCode.NONE


@pytest.mark.parametrize("settings", [ZSTD, PLAIN])
def test_times_beyond_64_bits_cost_their_producer_an_error(settings: PartitionSettings) -> None:
    """A worker's exception would be a bug of ours, and stop the node."""
    bench = Bench(settings)
    made = encode_record(NewRecord(b"a", b"a" * LARGE), (1 << 63) - 1, 0)
    records = memoryview(assemble_batch([made], base_timestamp=1, max_timestamp=-1))
    result = bench.append(records)
    if settings is ZSTD:
        bench.work()
    assert code_of(result) is ErrorCode.INVALID_TIMESTAMP
    assert not bench.stored


def test_what_is_too_large_when_built_anew_is_refused_for_good() -> None:
    bench = Bench(PartitionSettings(compression=Codec.NONE, max_message_bytes=1_000))
    made = build_batch(
        [NewRecord(b"a", b"a" * LARGE, NOW_MS)],
        codec=Codec.ZSTD,
        producer_id=7,
        producer_epoch=0,
        base_sequence=0,
    )
    promise = promised(bench.append(memoryview(made)))
    bench.work()
    assert code_of(promise) is ErrorCode.MESSAGE_TOO_LARGE


def log_lines(size: int) -> bytes:
    line = b"2026-01-01T00:00:00Z INFO request served path=/health status=200 took_ms=1\n"
    return line * (size // len(line))


@pytest.mark.parametrize("compression", [None, Codec.ZSTD])
def test_equal_log_lines_shrink_to_nothing_and_are_taken(compression: Codec | None) -> None:
    """135 KiB of gzip that open to 23 MiB: a ratio is no sign of malice."""
    payload = record(value=log_lines(23 << 20))
    encoder = zlib.compressobj(6, zlib.DEFLATED, 31)
    packed = encoder.compress(payload) + encoder.flush()
    assert len(packed) < len(payload) // 100
    made = batch_of(packed, NOW_MS, count=1, codec=Codec.GZIP, is_packed=True)
    bench = Bench(PartitionSettings(compression=compression))
    promise = promised(bench.append(memoryview(made)))
    bench.work()
    assert code_of(promise) is ErrorCode.NONE
    stored = bench.it.replica.log.batches[0][1]
    assert next(read_records(stored)).value == log_lines(23 << 20)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.LZ4, Codec.ZSTD])
def test_what_opens_to_more_than_can_be_held_ends_the_try(codec: Codec) -> None:
    payload = record(value=bytes(PRODUCED_OUTPUT_MAX))
    made = batch_of(payload, NOW_MS, count=1, codec=codec)
    bench = Bench()
    promise = promised(bench.append(memoryview(made)))
    bench.work()
    assert code_of(promise) is ErrorCode.MESSAGE_TOO_LARGE
    assert ErrorCode.MESSAGE_TOO_LARGE not in RETRIABLE


def test_seven_million_headers_hold_neither_loop_nor_memory() -> None:
    payload = zstd_many_headers(7_000_000)
    assert len(payload) < 2_000
    made = batch_of(payload, NOW_MS, count=1, codec=Codec.ZSTD, is_packed=True, max_time=NOW_MS - 1)
    bench = Bench()
    promise = promised(bench.append(memoryview(made)))
    bench.work()
    assert code_of(promise) is ErrorCode.MESSAGE_TOO_LARGE


def test_no_memory_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    bench = Bench(ZSTD)
    promise = promised(bench.append(batch(b"a")))
    monkeypatch.setattr("raftmq.partition.produce_checks.open_batch", no_memory)
    bench.work()
    assert code_of(promise) is ErrorCode.MESSAGE_TOO_LARGE


def test_all_partitions_share_what_is_walked_on_the_loop() -> None:
    """A request of a thousand small batches must not hold the loop as a large one may not."""
    clock = FakeClock()
    bench = Bench()
    bench.inline = InlineBudget(clock)
    share = INLINE.cost // 4
    results = [bench.append(slow(b"k", share)) for _ in range(6)]
    taken = sum(isinstance(result, AppendResult) for result in results)
    assert 2 <= taken <= 4
    while bench.jobs:
        bench.work()
    assert {code_of(result) for result in results} == {ErrorCode.NONE}
    clock.now_ms += WINDOW_MS
    assert isinstance(bench.append(slow(b"k", share)), AppendResult)


@pytest.mark.parametrize("code", [ErrorCode.NONE, ErrorCode.NOT_LEADER_OR_FOLLOWER])
def test_the_answer_is_the_appends(code: ErrorCode) -> None:
    bench = Bench(ZSTD)
    promise = promised(bench.append(batch(b"a"), -1))
    bench.work()
    assert not promise.is_done
    if code is ErrorCode.NONE:
        bench.it.replica.commit(1)
    else:
        bench.it.replica.follow()
    assert promise.result().code is code
