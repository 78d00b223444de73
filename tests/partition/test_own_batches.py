"""Batches that brokers make (notes and deliveries), and what a delay topic takes of clients."""

from __future__ import annotations

import pytest

from raftmq.codec import Codec
from raftmq.delays.headers import RetryPolicy
from raftmq.errors import ErrorCode
from raftmq.partition.partition import ACKS_ALL
from raftmq.partition.ports import AppendResult, DeleteResult
from raftmq.partition.producer_state import PRODUCERS_KEPT, ProducerStateTable
from raftmq.partition.settings import PartitionSettings
from raftmq.promise import Promise
from raftmq.records import (
    LOG_APPEND_TIME,
    OWN_PRODUCER_ID_MIN,
    NewRecord,
    build_batch,
    parse_header,
    stamp,
)
from tests.partition.fake_replica import Bench

OWN = OWN_PRODUCER_ID_MIN + 7
DELAYS = PartitionSettings.from_configs({"raftmq.delivers.to": "orders"})


def own(sequence: int, count: int = 1, epoch: int = 0, producer_id: int = OWN) -> bytearray:
    return build_batch(
        [NewRecord(b"k", b"v%d" % i) for i in range(count)],
        timestamp=5_000,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
    )


def code_of(answer: AppendResult | Promise[AppendResult]) -> ErrorCode:
    """Of an answer that is there, or NONE where it waits for the commit."""
    if isinstance(answer, Promise):
        return answer.result().code if answer.is_done else ErrorCode.NONE
    return answer.code


def delayed(*headers: tuple[str, bytes], value: bytes = b"v", **fields: int) -> memoryview:
    records = [NewRecord(b"k", value, 1_000, headers)]
    return memoryview(build_batch(records, codec=Codec.NONE, **fields))  # type: ignore[arg-type]


def test_a_repeated_delivery_is_taken_once_and_answered_when_the_first_is_committed() -> None:
    bench = Bench()
    first = bench.partition.append_own(own(0, 3), 1_000)
    again = bench.partition.append_own(own(0, 3), 1_000)
    assert isinstance(first, Promise)
    assert isinstance(again, Promise)
    assert bench.replica.log_end_offset == 3
    assert not again.is_done
    bench.replica.commit(3)
    assert (first.result().base_offset, again.result().base_offset) == (0, 0)


@pytest.mark.parametrize(
    ("then", "code"),
    [
        (own(3), ErrorCode.NONE),
        (own(4), ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER),
        (own(0, 2), ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER),  # another delivery of that number
        (own(0, epoch=1), ErrorCode.NONE),  # of another target before
        (own(3, epoch=1), ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER),
        (own(7, producer_id=OWN + 1), ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER),
        (own(0, producer_id=OWN_PRODUCER_ID_MIN - 1), ErrorCode.INVALID_RECORD),
    ],
)
def test_what_follows_a_delivery(then: bytearray, code: ErrorCode) -> None:
    bench = Bench()
    assert code_of(bench.partition.append_own(own(0, 3), 1_000)) is ErrorCode.NONE
    assert code_of(bench.partition.append_own(then, 1_000)) is code


def test_bytes_that_changed_on_the_way_are_refused() -> None:
    bench, batch = Bench(), own(0)
    batch[-1] ^= 1
    assert code_of(bench.partition.append_own(batch, 1_000)) is ErrorCode.CORRUPT_MESSAGE
    assert bench.replica.log_end_offset == 0


def test_no_client_writes_as_a_broker() -> None:
    bench = Bench()
    assert code_of(bench.partition.append(memoryview(own(0)), 1, 1_000)) is ErrorCode.INVALID_RECORD


def test_a_follower_takes_no_delivery() -> None:
    bench = Bench()
    bench.replica.follow()
    code = code_of(bench.partition.append_own(own(0), 1_000))
    assert code is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_producers_of_brokers_are_never_forgotten() -> None:
    """However long they are silent, and however many others write."""
    table = ProducerStateTable()
    for number in range(2 * PRODUCERS_KEPT):
        batch = build_batch(
            [NewRecord(None, b"")],
            timestamp=number * 86_400_000,
            producer_id=number or OWN,
            producer_epoch=0,
            base_sequence=0,
        )
        stamp(batch, number, 1)
        table.append(parse_header(batch))
    assert len(table) <= PRODUCERS_KEPT
    assert table.get(1) is None
    assert table.get(OWN) is not None
    assert ProducerStateTable.decode(table.encode()) == table


# ---- delay topics ----


def delay_bench(now_ms: int | None) -> tuple[Bench, list[int | None]]:
    bench, now = Bench(settings=DELAYS), [now_ms]
    bench.partition._delay_ms = lambda: now[0]
    return bench, now


def test_appends_of_a_delay_topic_are_stamped_by_a_time_that_never_falls() -> None:
    bench, now = delay_bench(9_000)
    stamps = []
    for told in (9_000, 8_000, 9_500):
        now[0] = told
        result = bench.partition.append(delayed(("deliver-after", b"1s")), 1, 1_000)
        assert isinstance(result, AppendResult)
        assert result.code is ErrorCode.NONE
        stamps.append(result.log_append_time_ms)
    assert stamps == [9_000, 9_000, 9_500]
    assert bench.partition.producers.greatest_timestamp == 9_500


def test_while_the_time_is_unknown_producers_come_again() -> None:
    bench, _ = delay_bench(None)
    code = code_of(bench.partition.append(delayed(), ACKS_ALL, 1_000))
    assert code is ErrorCode.NOT_ENOUGH_REPLICAS


@pytest.mark.parametrize(
    "records",
    [
        delayed(("deliver-afer", b"1s")),
        delayed(("deliver-after", b"31d")),
        delayed(value=b"x" * 1_048_400),  # with its new headers it would be too large
        delayed(transactional=True, producer_id=1, producer_epoch=0, base_sequence=0),
    ],
    ids=["typing error", "too late", "too large", "transaction"],
)
def test_what_a_delay_topic_refuses(records: memoryview) -> None:
    bench, _ = delay_bench(9_000)
    answer = bench.partition.append(records, 1, 1_000)
    assert code_of(answer) in (ErrorCode.INVALID_RECORD, ErrorCode.INVALID_TXN_STATE)
    assert bench.replica.log_end_offset == 0


def test_nothing_is_deleted_from_a_delay_topic_by_wish() -> None:
    bench, _ = delay_bench(9_000)
    bench.partition.append(delayed(), 1, 1_000)
    bench.replica.commit(1)
    assert bench.partition.delete_records(1, 1_000) == DeleteResult(ErrorCode.POLICY_VIOLATION)


def test_the_settings_of_a_delay_topic() -> None:
    assert (DELAYS.compression, DELAYS.timestamp_type) == (Codec.NONE, LOG_APPEND_TIME)
    assert DELAYS.retry is None
    retry = {"raftmq.delivers.to": "orders", "raftmq.dead.to": "dead", "raftmq.retry.factor": "1.5"}
    found = PartitionSettings.from_configs(retry).retry
    assert found == RetryPolicy(attempts=8, min_ms=1_000, max_ms=600_000, factor_percent=150)
    plain = PartitionSettings.from_configs({})
    assert (plain.delivers_to, plain.compression) == ("", None)
