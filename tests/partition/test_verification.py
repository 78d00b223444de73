"""Batches of transactions are verified before they are appended, and keep their order meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raftmq.codec import Codec
from raftmq.errors import ErrorCode, KafkaError
from raftmq.partition.ports import AppendResult
from raftmq.partition.produce_checks import VERIFIED_WITHIN_MS_MAX, InlineBudget
from raftmq.partition.settings import PartitionSettings
from raftmq.partition.transactions import (
    WHATEVER_SEQ,
    Added,
    Asked,
    Decided,
    Ending,
    Fenced,
    NotAdded,
    TransactionsPort,
    Unknown,
    Verdict,
)
from raftmq.ports import DiskError, Runnable
from raftmq.promise import Promise
from raftmq.records import NO_SEQUENCE, BatchHeader, NewRecord, build_batch, read_records
from raftmq.types import Offset, ProducerId
from tests.partition.fake_replica import Bench as PartitionBench
from tests.partition.fake_replica import FakeClock

PID = 7
TIMEOUT_MS = 1_000


class Transactions:
    """Says what a test wants it to say, and remembers what it was asked."""

    def __init__(self) -> None:
        self.is_offered = True
        self.may_wait = False
        self.verdicts: dict[int, Verdict] = {}
        self.asked: list[Asked] = []

    def verify(self, asked: Asked) -> Verdict:
        self.asked.append(asked)
        return self.verdicts.get(asked.producer_id, Added(1))


class Bench:
    """A partition, what knows transactions, and a worker that works when it is told to."""

    def __init__(self, settings: PartitionSettings | None = None) -> None:
        self.transactions = Transactions()
        self.inline = InlineBudget(FakeClock())
        self.jobs: list[tuple[Runnable, Callable[[DiskError | None], None]]] = []
        port: TransactionsPort = self.transactions
        self.it = PartitionBench(
            settings=settings or PartitionSettings(), workers=self, transactions=port
        )
        self.partition, self.replica = self.it.partition, self.it.replica

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        self.jobs.append((job, done))

    def work(self) -> None:
        job, done = self.jobs.pop(0)
        job.run()
        done(None)

    def produce(
        self,
        key: bytes,
        sequence: int = 0,
        *,
        pid: int = PID,
        epoch: int = 0,
        version: int = 13,
        size: int = 1,
        transactional: bool = True,
    ) -> AppendResult | Promise[AppendResult]:
        batch = build_batch(
            [NewRecord(key, bytes(size), 1_000_000)],
            producer_id=pid,
            producer_epoch=epoch if pid >= 0 else -1,
            base_sequence=sequence if pid >= 0 else NO_SEQUENCE,
            transactional=transactional and pid >= 0,
        )
        return self.partition.append(memoryview(batch), 1, TIMEOUT_MS, version)

    def hold(self, pid: int = PID) -> Promise[None]:
        """From now on nobody can tell of this producer, until the promise is kept."""
        settled: Promise[None] = Promise()
        self.transactions.verdicts[pid] = Unknown(settled)
        return settled

    def end(self, seq: int = 1, epoch: int = 0, protocol: int = 1) -> Promise[object]:
        decided = Decided(
            producer_id=ProducerId(PID),
            producer_epoch=epoch,
            txn_seq=seq,
            is_commit=True,
            protocol=protocol,
        )
        return self.partition.end_transaction(decided)  # type: ignore[return-value]

    @property
    def stored(self) -> list[bytes]:
        """Keys of records, "end" for markers."""
        return [
            b"end" if header.is_control else next(read_records(data)).key or b""
            for header, data in self.replica.log.batches
        ]


def code(result: AppendResult | Promise[AppendResult]) -> ErrorCode:
    return result.result().code if isinstance(result, Promise) else result.code


NONE = ErrorCode.NONE


def test_what_is_added_is_appended_at_once() -> None:
    bench = Bench()
    assert code(bench.produce(b"a", version=11)) is NONE
    assert code(bench.produce(b"b", 1, version=12)) is NONE
    assert bench.stored == [b"a", b"b"]
    first, second = bench.transactions.asked
    assert (first.producer_id, first.producer_epoch, first.partition) == (PID, 0, 0)
    assert first.topic_id == bench.partition.topic_id
    assert first.leader_epoch == bench.replica.leader_epoch
    assert (first.adds, second.adds) == (False, True)
    assert not first.is_again


def test_others_are_not_asked_about() -> None:
    bench = Bench()
    assert code(bench.produce(b"a", transactional=False)) is NONE
    assert code(bench.produce(b"b", pid=-1)) is NONE
    assert bench.transactions.asked == []


@pytest.mark.parametrize(
    ("verdict", "version", "expected"),
    [
        (NotAdded(), 10, ErrorCode.INVALID_TXN_STATE),
        (NotAdded(), 11, ErrorCode.TRANSACTION_ABORTABLE),
        (Ending(), 11, ErrorCode.NOT_ENOUGH_REPLICAS),
        (Ending(), 12, ErrorCode.CONCURRENT_TRANSACTIONS),
        (Fenced(), 12, ErrorCode.INVALID_PRODUCER_EPOCH),
    ],
)
def test_what_is_not_added_is_refused(verdict: Verdict, version: int, expected: ErrorCode) -> None:
    bench = Bench()
    bench.transactions.verdicts[PID] = verdict
    assert code(bench.produce(b"a", version=version)) is expected
    assert bench.stored == []
    bench.transactions.verdicts[PID] = Added(1)
    assert code(bench.produce(b"a", version=version)) is NONE


@pytest.mark.parametrize("verdict", [NotAdded(), Fenced(), Ending()])
def test_a_batch_behind_is_told_the_same_and_not_that_it_is_out_of_order(
    verdict: Verdict,
) -> None:
    bench = Bench()
    bench.transactions.verdicts[PID] = verdict
    first = code(bench.produce(b"a", 0))
    assert code(bench.produce(b"b", 1)) is first
    assert bench.stored == []


def test_a_batch_out_of_order_in_a_running_transaction_is_told_so() -> None:
    bench = Bench()
    bench.produce(b"a", 0)
    assert code(bench.produce(b"c", 2)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_repeated_batch_of_a_transaction_that_is_over_is_refused() -> None:
    bench = Bench()
    first = bench.produce(b"a")
    assert bench.produce(b"a") == first
    bench.end()
    assert code(bench.produce(b"a")) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    bench.transactions.verdicts[PID] = NotAdded()
    assert code(bench.produce(b"a")) is ErrorCode.TRANSACTION_ABORTABLE
    assert code(bench.produce(b"b", 1)) is ErrorCode.TRANSACTION_ABORTABLE
    assert bench.stored == [b"a", b"end"]


def test_without_transactions_such_batches_are_refused() -> None:
    bench = Bench()
    bench.transactions.is_offered = False
    assert code(bench.produce(b"a")) is ErrorCode.INVALID_TXN_STATE
    assert bench.transactions.asked == []


# ---- batches that wait ----


def test_five_batches_behind_a_slow_verification_keep_their_order() -> None:
    bench = Bench()
    settled = bench.hold()
    results = [bench.produce(bytes([65 + n]), n) for n in range(5)]
    assert bench.stored == []
    bench.transactions.verdicts[PID] = Added(1)
    settled.resolve(None)
    assert [code(result) for result in results] == [NONE] * 5
    assert bench.stored == [b"A", b"B", b"C", b"D", b"E"]
    assert [asked.is_again for asked in bench.transactions.asked] == [False, True, *[False] * 4]


def test_others_do_not_wait_for_it() -> None:
    bench = Bench()
    settled = bench.hold()
    held = bench.produce(b"a")
    assert code(bench.produce(b"p", pid=-1)) is NONE
    assert code(bench.produce(b"q", pid=8, transactional=False)) is NONE
    assert code(bench.produce(b"r", pid=9)) is NONE
    assert bench.stored == [b"p", b"q", b"r"]
    bench.transactions.verdicts[PID] = Added(1)
    settled.resolve(None)
    assert code(held) is NONE
    assert bench.stored == [b"p", b"q", b"r", b"a"]


def test_two_producers_are_verified_each_for_itself() -> None:
    bench = Bench()
    one, two = bench.hold(1), bench.hold(2)
    for number in range(2):
        bench.produce(b"1%d" % number, number, pid=1)
        bench.produce(b"2%d" % number, number, pid=2)
    bench.transactions.verdicts[2] = Added(5)
    two.resolve(None)
    assert bench.stored == [b"20", b"21"]
    bench.transactions.verdicts[1] = Added(4)
    one.resolve(None)
    assert bench.stored == [b"20", b"21", b"10", b"11"]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_verification_that_comes_to_nothing_may_come_again(is_kept: bool) -> None:
    bench = Bench()
    settled = bench.hold()
    first = bench.produce(b"a", version=12)
    if is_kept:
        settled.resolve(None)
    else:
        settled.fail(KafkaError(code=ErrorCode.NOT_CONTROLLER))
    assert code(first) is ErrorCode.NOT_ENOUGH_REPLICAS
    assert code(bench.produce(b"b", 1, version=12)) is ErrorCode.NOT_ENOUGH_REPLICAS
    bench.transactions.verdicts[PID] = Added(1)
    assert code(bench.produce(b"a", version=12)) is NONE
    assert code(bench.produce(b"b", 1, version=12)) is NONE
    assert bench.stored == [b"a", b"b"]


def test_nothing_waits_for_ever() -> None:
    bench = Bench()
    bench.hold()
    first = bench.produce(b"a")
    bench.it.sleep(TIMEOUT_MS - 1)
    assert isinstance(first, Promise)
    assert not first.is_done
    bench.it.sleep(2)
    assert code(first) is ErrorCode.NOT_ENOUGH_REPLICAS
    assert VERIFIED_WITHIN_MS_MAX < 10_000
    assert not bench.partition._opening.is_busy


def test_an_answer_that_comes_late_changes_nothing() -> None:
    bench = Bench()
    settled = bench.hold()
    first = bench.produce(b"a")
    bench.it.sleep(TIMEOUT_MS + 1)
    assert code(first) is ErrorCode.NOT_ENOUGH_REPLICAS
    settled.resolve(None)
    assert bench.stored == []


def test_an_answer_that_has_come_already_is_taken_at_once() -> None:
    bench = Bench()
    bench.transactions.verdicts[PID] = Unknown(Promise.resolved(None))
    assert code(bench.produce(b"a")) is ErrorCode.NOT_ENOUGH_REPLICAS


def test_who_does_not_lead_any_more_says_so_at_once() -> None:
    bench = Bench()
    bench.hold()
    results = [bench.produce(b"a"), bench.produce(b"b", 1)]
    bench.replica.follow()
    assert [code(r) for r in results] == [ErrorCode.NOT_LEADER_OR_FOLLOWER] * 2
    assert not bench.partition._opening.is_busy


def test_a_partition_that_goes_away_leaves_nobody_waiting() -> None:
    bench = Bench()
    bench.hold()
    result = bench.produce(b"a")
    bench.partition.close()
    assert code(result) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_the_marker_comes_before_what_waited_too_long() -> None:
    """Verified when its turn comes, not when it came."""
    bench = Bench()
    bench.produce(b"a")
    settled = bench.hold()
    late = bench.produce(b"b", 1)
    bench.end()
    bench.transactions.verdicts[PID] = NotAdded()
    settled.resolve(None)
    assert code(late) is ErrorCode.TRANSACTION_ABORTABLE
    assert bench.stored == [b"a", b"end"]


# ---- one queue for both ----

ZSTD = PartitionSettings(compression=Codec.ZSTD)
LARGE = 5_000


def test_a_batch_is_opened_first_and_verified_then() -> None:
    bench = Bench(ZSTD)
    settled = bench.hold()
    first = bench.produce(b"a", size=LARGE)
    second = bench.produce(b"b", 1)
    plain = bench.produce(b"p", pid=-1)
    assert bench.transactions.asked == []
    bench.work()
    assert bench.stored == [b"p"], "plain ones wait for the worker alone"
    bench.transactions.verdicts[PID] = Added(1)
    settled.resolve(None)
    assert bench.stored == [b"p", b"a", b"b"]
    assert [code(r) for r in (first, second, plain)] == [NONE] * 3
    assert not bench.jobs, "it is not opened twice"


def test_what_a_worker_has_holds_back_what_comes_after_it() -> None:
    bench = Bench(ZSTD)
    settled = bench.hold()
    bench.produce(b"a")
    bench.produce(b"w", pid=-1, size=LARGE)
    bench.produce(b"p", pid=-1)
    bench.transactions.verdicts[PID] = Added(1)
    settled.resolve(None)
    assert bench.stored == [b"a"]
    bench.work()
    assert bench.stored == [b"a", b"w", b"p"]


# ---- what is open ----


def test_a_batch_under_a_higher_epoch_waits_for_the_marker() -> None:
    bench = Bench()
    bench.produce(b"a")
    assert code(bench.produce(b"b", epoch=1)) is ErrorCode.CONCURRENT_TRANSACTIONS
    bench.end(epoch=1, protocol=2)
    assert code(bench.produce(b"b", epoch=1)) is NONE
    assert bench.stored == [b"a", b"end", b"b"]


def test_a_batch_of_the_next_transaction_waits_for_the_marker() -> None:
    bench = Bench()
    bench.produce(b"a")
    bench.transactions.verdicts[PID] = Added(2)
    assert code(bench.produce(b"b", 1)) is ErrorCode.CONCURRENT_TRANSACTIONS
    bench.end(seq=1)
    assert code(bench.produce(b"b", 1)) is NONE
    assert bench.stored == [b"a", b"end", b"b"]


def test_the_end_of_an_earlier_transaction_does_not_end_a_later_one() -> None:
    bench = Bench()
    bench.transactions.verdicts[PID] = Added(2)
    bench.produce(b"a")
    refused = bench.end(seq=1)
    assert isinstance(refused.error, KafkaError)
    assert refused.error.code is ErrorCode.INVALID_PRODUCER_EPOCH
    assert bench.stored == [b"a"]
    bench.end(seq=2)
    assert bench.stored == [b"a", b"end"]


def test_plain_batches_of_a_producer_with_an_open_transaction_are_refused() -> None:
    bench = Bench()
    bench.produce(b"a")
    refused = bench.produce(b"b", 1, transactional=False)
    assert code(refused) is ErrorCode.INVALID_TXN_STATE


# ---- a new leader ----


def test_the_first_batch_of_a_new_epoch_may_be_under_way_at_a_new_leader() -> None:
    """Behind it others are told to come again: out of order would end the producer."""
    bench = Bench()
    bench.produce(b"a")
    bench.end(epoch=1, protocol=2)
    bench.replica.follow()
    bench.replica.lead()
    assert code(bench.produce(b"c", 1, epoch=1)) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert code(bench.produce(b"b", 0, epoch=1)) is NONE
    assert code(bench.produce(b"c", 1, epoch=1)) is NONE
    bench.end(epoch=2, protocol=2)
    bench.it.sleep(61_000)
    late = bench.produce(b"e", 1, epoch=2)
    assert code(late) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, "not for ever"


def test_a_fenced_batch_does_not_make_a_leader_forget_the_newer_one() -> None:
    bench = Bench()
    bench.produce(b"a")
    bench.end(epoch=1, protocol=2)
    bench.transactions.verdicts[PID] = Unknown(Promise.failed(KafkaError()))
    assert code(bench.produce(b"b", 0, epoch=1)) is ErrorCode.NOT_ENOUGH_REPLICAS
    assert code(bench.produce(b"z", 1, epoch=0)) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert code(bench.produce(b"c", 1, epoch=1)) is ErrorCode.NOT_ENOUGH_REPLICAS


def test_what_follows_one_that_came_too_early_waits_for_it() -> None:
    bench = Bench()
    bench.transactions.verdicts[PID] = Ending()
    assert code(bench.produce(b"a", 0)) is ErrorCode.CONCURRENT_TRANSACTIONS
    bench.transactions.verdicts[PID] = Added(1)
    assert code(bench.produce(b"b", 1)) is ErrorCode.CONCURRENT_TRANSACTIONS
    assert code(bench.produce(b"a", 0)) is NONE
    assert code(bench.produce(b"b", 1)) is NONE


def test_leadership_that_ends_in_an_append_ends_all_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.hold()
    held = bench.produce(b"a")
    append = bench.replica.append

    def losing(batch: bytearray | memoryview, header: BatchHeader) -> Offset:
        base = append(batch, header)
        bench.replica.follow()
        return base

    monkeypatch.setattr(bench.replica, "append", losing)
    plain = bench.produce(b"p", pid=-1)
    assert code(plain) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert code(held) is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_an_orphan_that_this_leader_took_is_ended_too() -> None:
    """The metadata group shows no transaction there any more, whatever the leader remembers."""
    bench = Bench()
    assert code(bench.produce(b"a")) is NONE
    bench.end(seq=0)
    assert bench.stored == [b"a"], "an end of an earlier transaction does not"
    bench.end(seq=WHATEVER_SEQ)
    assert bench.stored == [b"a", b"end"]


def test_a_delay_topic_takes_transactions_from_a_level_on_and_nothing_is_called_back_in_one() -> (
    None
):
    bench = Bench(PartitionSettings.from_configs({"raftmq.delivers.to": "orders"}))
    bench.partition._delay_ms = lambda: 5_000

    def code(sequence: int, *headers: tuple[str, bytes]) -> ErrorCode:
        batch = build_batch(
            [NewRecord(b"k", b"v", None, headers)],
            timestamp=0,
            producer_id=PID,
            producer_epoch=0,
            base_sequence=sequence,
            transactional=True,
        )
        found = bench.partition.append(memoryview(batch), 1, TIMEOUT_MS, 13)
        assert isinstance(found, AppendResult)
        return found.code

    later = ("deliver-after", b"1s")
    assert code(0, later) is ErrorCode.INVALID_RECORD
    bench.transactions.may_wait = True
    assert code(0, ("deliver-at", b"never")) is ErrorCode.INVALID_RECORD
    assert code(0, ("deliver-mode", b"replace")) is ErrorCode.INVALID_RECORD
    assert code(0, later) is ErrorCode.NONE
    decided = Decided(
        producer_id=ProducerId(PID), producer_epoch=0, txn_seq=1, is_commit=True, protocol=1
    )
    bench.partition._delay_ms = lambda: None
    ended = bench.partition.end_transaction(decided)
    assert isinstance(ended.error, KafkaError)
    assert ended.error.code is ErrorCode.NOT_ENOUGH_REPLICAS, "asked for again, by who leads"
    bench.partition._delay_ms = lambda: 4_000
    bench.partition.end_transaction(decided)
    *_, marker = bench.replica.log.headers(Offset(0), bench.replica.log_end_offset)
    assert marker.is_control
    assert marker.max_timestamp == 5_000, "the time of a delay topic never falls"
