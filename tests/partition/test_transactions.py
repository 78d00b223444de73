"""Ends of transactions at a leader: what is written, when it counts, and what is refused."""

from __future__ import annotations

import attrs
import pytest

from raftmq.errors import ErrorCode, KafkaError
from raftmq.partition.transactions import (
    Added,
    Decided,
    Ending,
    Fenced,
    NotAdded,
    Unknown,
    Verdict,
    not_taken,
)
from raftmq.promise import Promise
from raftmq.records import Marker, NewRecord, build_batch, parse_header, parse_marker
from raftmq.replication.seals import Seal
from raftmq.types import ProducerId
from tests.partition.fake_replica import Bench

PID = ProducerId(7)


def open_one(bench: Bench, epoch: int = 3, sequence: int = 0, producer_id: int = PID) -> None:
    """A transactional batch gets into the log, as if the leader had taken it."""
    batch = build_batch(
        [NewRecord(None, b"v")],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=True,
    )
    bench.replica.append(batch, parse_header(batch))


def decided(epoch: int = 3, *, seq: int = 1, is_commit: bool = True, protocol: int = 1) -> Decided:
    return Decided(
        producer_id=PID, producer_epoch=epoch, txn_seq=seq, is_commit=is_commit, protocol=protocol
    )


def code_of(promise: Promise[object]) -> ErrorCode:
    assert isinstance(promise.error, KafkaError)
    return promise.error.code


@pytest.mark.parametrize("is_commit", [True, False])
def test_the_marker_counts_once_it_is_committed(is_commit: bool) -> None:
    bench = Bench()
    open_one(bench)
    promise = bench.partition.end_transaction(decided(is_commit=is_commit))
    header, data = bench.replica.log.batches[-1]
    assert header.is_control
    assert header.is_transactional
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (PID, 3, -1)
    assert parse_marker(data) == Marker(is_commit)
    bench.replica.commit(1)
    assert not promise.is_done
    bench.replica.commit(2)
    assert promise.result() == 2


def test_what_is_not_open_waits_for_what_the_log_held() -> None:
    bench = Bench()
    open_one(bench, producer_id=PID + 1)
    promise = bench.partition.end_transaction(decided())
    assert len(bench.replica.log.batches) == 1
    assert not promise.is_done
    bench.replica.commit(1)
    assert promise.result() == 1
    assert bench.partition.end_transaction(decided()).result() == 1


def test_the_same_end_again_writes_nothing() -> None:
    bench = Bench()
    open_one(bench)
    first = bench.partition.end_transaction(decided())
    again = bench.partition.end_transaction(decided())
    assert len(bench.replica.log.batches) == 2
    bench.replica.commit(2)
    assert (first.result(), again.result()) == (2, 2)


@pytest.mark.parametrize(
    ("marker_epoch", "protocol", "is_written"),
    [(3, 1, True), (4, 1, True), (2, 1, False), (3, 2, False), (4, 2, True)],
)
def test_a_later_transaction_is_not_ended(
    marker_epoch: int, protocol: int, is_written: bool
) -> None:
    bench = Bench()
    open_one(bench)
    promise = bench.partition.end_transaction(decided(marker_epoch, protocol=protocol))
    assert len(bench.replica.log.batches) == 1 + is_written
    if not is_written:
        assert code_of(promise) is ErrorCode.INVALID_PRODUCER_EPOCH


def test_a_replaced_leader_knows_nothing_of_its_markers() -> None:
    bench = Bench()
    open_one(bench)
    promise = bench.partition.end_transaction(decided())
    bench.replica.follow()
    assert code_of(promise) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    later = bench.partition.end_transaction(decided())
    assert code_of(later) is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_a_disk_that_refuses_breaks_the_promise() -> None:
    bench = Bench()
    open_one(bench)
    bench.replica.refusal = KafkaError(code=ErrorCode.KAFKA_STORAGE_ERROR)
    promise = bench.partition.end_transaction(decided())
    assert code_of(promise) is ErrorCode.KAFKA_STORAGE_ERROR
    bench.replica.refusal = None
    bench.partition.end_transaction(decided())
    assert len(bench.replica.log.batches) == 2


def test_a_closed_partition_ends_nothing() -> None:
    bench = Bench()
    open_one(bench)
    bench.partition.close()
    promise = bench.partition.end_transaction(decided())
    assert code_of(promise) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


CODES = [
    (Fenced(), 3, ErrorCode.INVALID_PRODUCER_EPOCH),
    (Fenced(), 13, ErrorCode.INVALID_PRODUCER_EPOCH),
    (NotAdded(), 10, ErrorCode.INVALID_TXN_STATE),
    (NotAdded(), 11, ErrorCode.TRANSACTION_ABORTABLE),
    (NotAdded(), 12, ErrorCode.TRANSACTION_ABORTABLE),
    (Ending(), 11, ErrorCode.NOT_ENOUGH_REPLICAS),
    (Ending(), 12, ErrorCode.CONCURRENT_TRANSACTIONS),
    (Unknown(Promise()), 3, ErrorCode.NOT_ENOUGH_REPLICAS),
    (Unknown(Promise()), 13, ErrorCode.NOT_ENOUGH_REPLICAS),
]


@pytest.mark.parametrize(("verdict", "version", "code"), CODES)
def test_codes_by_version(verdict: Verdict, version: int, code: ErrorCode) -> None:
    assert not_taken(verdict, version).code is code


def test_what_is_added_is_no_refusal() -> None:
    with pytest.raises(AssertionError):
        not_taken(Added(1), 12)


def test_a_seal_waits_for_the_ends_of_open_transactions() -> None:
    """Behind it no marker could be written."""
    bench = Bench()
    open_one(bench)
    open_one(bench, producer_id=PID + 1)
    seal = Seal(7, is_closed=True)
    assert not bench.partition.seal(seal)
    bench.partition.end_transaction(decided())
    assert not bench.partition.seal(seal)
    assert bench.replica.newest_seal is None
    other = attrs.evolve(decided(), producer_id=ProducerId(PID + 1))
    bench.partition.end_transaction(other)
    assert bench.partition.seal(seal), "the end is in the log, if not committed"
    assert bench.replica.newest_seal == seal
    assert bench.partition.seal(Seal(9, is_closed=False)), "an opening waits for nothing"
    bench.replica.follow()
    assert not bench.partition.seal(Seal(11, is_closed=True))
