"""What is pipelined behind a refused batch is refused as that was, and nothing is out of order.

librdkafka answers OUT_OF_ORDER_SEQUENCE_NUMBER behind a failed request with a new epoch for all its
partitions, and sends under that whatever else has an unknown outcome: second copies.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.errors import ErrorCode, NotLeaderError, StorageError
from raftmq.log.log_start import LogStart
from raftmq.partition.partition import ACKS_ALL
from raftmq.partition.producer_state import BATCHES_REMEMBERED
from raftmq.partition.producers import (
    FIRST_LEADER_MS,
    MISSING_BATCH_MS,
    NEW_LEADER_ANSWERS,
    REFUSED_PRODUCERS_MAX,
    RefusedBatches,
)
from raftmq.partition.settings import PartitionSettings
from raftmq.promise import Promise
from raftmq.records import NewRecord, build_batch, parse_header
from raftmq.replication.seals import Seal
from raftmq.types import LeaderEpoch, Offset, RaftIndex
from tests.partition.fake_replica import REPLICAS, Bench

OUT_OF_ORDER = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
NOT_LEADER = ErrorCode.NOT_LEADER_OR_FOLLOWER
UNKNOWN_PARTITION = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def batch(sequence: int, count: int = 1, *, epoch: int = 0, producer_id: int = 9) -> memoryview:
    built = build_batch(
        [NewRecord(None, b"%d" % (sequence + i)) for i in range(count)],
        timestamp=1_000_000,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
    )
    return memoryview(built)


def send(bench: Bench, records: memoryview) -> ErrorCode:
    """The code; NONE also when it was appended and waits."""
    result = bench.partition.append(records, ACKS_ALL, 1000)
    return ErrorCode.NONE if isinstance(result, Promise) else result.code


def made() -> Bench:
    return Bench(settings=PartitionSettings(min_insync_replicas=2))


def no_leader(bench: Bench, is_well: bool) -> None:
    bench.replica.is_writable = is_well


def too_few(bench: Bench, is_well: bool) -> None:
    bench.replica.in_sync = REPLICAS if is_well else REPLICAS[:1]


def full_disk(bench: Bench, is_well: bool) -> None:
    bench.replica.refusal = None if is_well else StorageError("disk full")


def sealed(bench: Bench, is_well: bool) -> None:
    bench.replica.seal(Seal(8 if is_well else 7, is_closed=not is_well))


REASONS = [
    pytest.param(no_leader, NOT_LEADER, id="not leading yet"),
    pytest.param(too_few, ErrorCode.NOT_ENOUGH_REPLICAS, id="too few in sync"),
    pytest.param(full_disk, ErrorCode.KAFKA_STORAGE_ERROR, id="disk full"),
    pytest.param(sealed, UNKNOWN_PARTITION, id="sealed"),
]


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("turn", "code"), REASONS)
def test_what_follows_a_refused_batch_is_refused_for_the_same_reason(
    turn: Callable[[Bench, bool], None], code: ErrorCode, before: int
) -> None:
    bench = made()
    for sequence in range(before):
        assert send(bench, batch(sequence)) is ErrorCode.NONE
    turn(bench, False)
    assert send(bench, batch(before, 2)) is code
    turn(bench, True)
    following = [batch(before + 2 + i) for i in range(4)]
    assert [send(bench, records) for records in following] == [code] * 4
    assert bench.replica.log_end_offset == before
    again = [batch(before, 2), *following]
    assert [send(bench, records) for records in again] == [ErrorCode.NONE] * 5
    assert bench.replica.log_end_offset == before + 6


def test_behind_a_seal_nothing_is_out_of_order_however_often_it_comes() -> None:
    """Its producer is to look for another partition, not to begin a new epoch for all of them; and
    what the log has is told so, behind the seal as before it."""
    bench = made()
    assert [send(bench, batch(i)) for i in range(2)] == [ErrorCode.NONE] * 2
    sealed(bench, False)
    assert send(bench, batch(2)) is UNKNOWN_PARTITION
    for sequence in range(3, 3 + 3 * BATCHES_REMEMBERED):
        assert send(bench, batch(sequence)) is UNKNOWN_PARTITION
    assert send(bench, batch(2, epoch=1)) is UNKNOWN_PARTITION
    assert send(bench, batch(1)) is ErrorCode.NONE, "it is there"
    assert bench.replica.log_end_offset == 2


def test_several_refused_and_the_last_ones_in_time() -> None:
    bench = made()
    no_leader(bench, False)
    assert [send(bench, batch(i)) for i in range(3)] == [NOT_LEADER] * 3
    no_leader(bench, True)
    assert [send(bench, batch(i)) for i in (3, 4)] == [NOT_LEADER] * 2
    assert [send(bench, batch(i)) for i in range(5)] == [ErrorCode.NONE] * 5


def test_a_batch_that_was_taken_back_is_missed_by_those_behind_it() -> None:
    """Appended, not committed, taken back by another leader; this node leads again, and only now
    looks at what the producer had sent behind it."""
    bench = made()
    first = bench.partition.append(batch(0), ACKS_ALL, 1000)
    bench.replica.commit(1)
    lost = [bench.partition.append(batch(i), ACKS_ALL, 1000) for i in (1, 2)]
    assert isinstance(first, Promise)
    bench.replica.follow()
    bench.replica.truncate(1)
    for promise in lost:
        assert isinstance(promise, Promise)
        assert promise.result().code is NOT_LEADER
    bench.replica.is_leader = bench.replica.is_writable = True
    assert send(bench, batch(3)) is NOT_LEADER
    assert [send(bench, batch(i)) for i in (1, 2, 3)] == [ErrorCode.NONE] * 3


def test_a_gap_of_the_producers_own_making_is_called_so() -> None:
    bench = made()
    assert send(bench, batch(0)) is ErrorCode.NONE
    no_leader(bench, False)
    assert send(bench, batch(1)) is NOT_LEADER
    assert send(bench, batch(5, producer_id=10)) is NOT_LEADER
    no_leader(bench, True)
    assert send(bench, batch(1, epoch=1)) is OUT_OF_ORDER, "of another epoch"
    assert send(bench, batch(7, producer_id=11)) is ErrorCode.NONE, "of another producer"
    assert send(bench, batch(6, producer_id=10)) is NOT_LEADER, "behind the first of an unknown one"
    assert send(bench, batch(1)) is ErrorCode.NONE
    assert send(bench, batch(3)) is OUT_OF_ORDER, "what was refused came again"


def test_a_permanent_refusal_does_leave_a_gap() -> None:
    bench = Bench(settings=PartitionSettings(max_message_bytes=100))
    assert send(bench, batch(0, 9)) is ErrorCode.MESSAGE_TOO_LARGE
    assert send(bench, batch(9)) is OUT_OF_ORDER


def test_a_producer_that_never_comes_back_to_it_learns_the_truth() -> None:
    bench = made()
    no_leader(bench, False)
    assert send(bench, batch(0)) is NOT_LEADER
    no_leader(bench, True)
    answers = [send(bench, batch(1)) for _ in range(BATCHES_REMEMBERED + 2)]
    assert answers == [NOT_LEADER] * BATCHES_REMEMBERED + [OUT_OF_ORDER] * 2


def test_what_is_no_batch_is_remembered_for_nobody() -> None:
    bench = made()
    no_leader(bench, False)
    assert send(bench, memoryview(bytearray(10))) is NOT_LEADER
    assert send(bench, memoryview(bytearray(100))) is NOT_LEADER
    plain = memoryview(build_batch([NewRecord(None, b"v")], timestamp=1_000_000))
    assert send(bench, plain) is NOT_LEADER


def test_few_producers_are_remembered() -> None:
    refused = RefusedBatches()
    for producer_id in range(REFUSED_PRODUCERS_MAX + 10):
        refused.note(producer_id, 0, 0, NOT_LEADER)
    assert len(refused) == REFUSED_PRODUCERS_MAX
    behind = [parse_header(batch(1, producer_id=p)) for p in (9, 10)]
    assert [refused.reason_behind(header, 0) for header in behind] == [None, NOT_LEADER]


def test_repeated_batches_are_acknowledged_in_their_order() -> None:
    """The log has them from the leader before; the first one comes a moment too early. librdkafka
    would believe the second, and have no offset for the first."""
    bench = made()
    assert [send(bench, batch(i)) for i in range(5)] == [ErrorCode.NONE] * 5
    no_leader(bench, False)
    assert [send(bench, batch(i)) for i in (1, 2)] == [NOT_LEADER] * 2
    no_leader(bench, True)
    assert [send(bench, batch(i)) for i in (3, 4)] == [NOT_LEADER] * 2
    assert [send(bench, batch(i)) for i in (0, 1, 2, 3, 4, 5)] == [ErrorCode.NONE] * 6
    assert bench.replica.log_end_offset == 6


def test_a_repeated_batch_is_not_held_back_for_ever() -> None:
    bench = made()
    assert [send(bench, batch(i)) for i in range(3)] == [ErrorCode.NONE] * 3
    no_leader(bench, False)
    assert send(bench, batch(1)) is NOT_LEADER
    no_leader(bench, True)
    answers = [send(bench, batch(2)) for _ in range(BATCHES_REMEMBERED + 1)]
    assert answers == [NOT_LEADER] * BATCHES_REMEMBERED + [ErrorCode.NONE]


@given(st.data())
def test_any_pipeline_ends_in_order_and_never_out_of_order(data: st.DataObject) -> None:
    """Five requests under way; the client sends again, in order, what was refused."""
    bench = made()
    reasons: list[Callable[[Bench, bool], None]] = [no_leader, too_few, full_disk]
    turn = data.draw(st.sampled_from(reasons))
    next_new, waiting = 0, list[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        while len(waiting) < 5:
            waiting.append(next_new)
            next_new += 1
        refused = []
        for sequence in waiting:
            turn(bench, data.draw(st.booleans()))
            code = send(bench, batch(sequence))
            assert code is not OUT_OF_ORDER
            if code is not ErrorCode.NONE:
                refused.append(sequence)
        waiting = refused
    sequences = [header.base_sequence for header, _ in bench.replica.log.batches]
    assert sequences == list(range(len(sequences)))


def test_raised_epochs_are_counted() -> None:
    bench = made()
    assert [send(bench, batch(i)) for i in (0, 1)] == [ErrorCode.NONE] * 2
    assert bench.partition.counts.producer_epochs == 0
    assert [send(bench, batch(i, epoch=1)) for i in (0, 1, 0)] == [ErrorCode.NONE] * 3
    assert bench.partition.counts.producer_epochs == 1, "the last one was a duplicate"


def after_a_leader_change() -> Bench:
    """One batch from each of two leaders before this one; the producer's next sequence is 2."""
    bench = made()
    assert send(bench, batch(0)) is ErrorCode.NONE
    assert send(bench, batch(1)) is ErrorCode.NONE
    bench.replica.leader_epoch = LeaderEpoch(bench.replica.leader_epoch + 1)
    return bench


def test_a_new_leader_waits_for_what_the_old_one_was_sent() -> None:
    """The batch that begins at 2 has no answer from the leader before; the next comes first."""
    bench = after_a_leader_change()
    assert send(bench, batch(3)) is NOT_LEADER
    assert send(bench, batch(3)) is NOT_LEADER
    assert send(bench, batch(2)) is ErrorCode.NONE
    assert send(bench, batch(3)) is ErrorCode.NONE
    assert send(bench, batch(5)) is OUT_OF_ORDER, "this leader has seen the producer begin"


def test_it_waits_for_nothing_that_was_refused_for_good() -> None:
    bench = after_a_leader_change()
    bench.partition.settings = PartitionSettings(max_message_bytes=100, min_insync_replicas=2)
    assert send(bench, batch(2, 9)) is ErrorCode.MESSAGE_TOO_LARGE
    assert send(bench, batch(11)) is OUT_OF_ORDER


def test_what_is_refused_for_good_leaves_what_may_come_again() -> None:
    bench = made()
    assert send(bench, batch(0)) is ErrorCode.NONE
    no_leader(bench, False)
    assert send(bench, batch(1)) is NOT_LEADER
    no_leader(bench, True)
    bench.partition.settings = PartitionSettings(max_message_bytes=100, min_insync_replicas=2)
    assert send(bench, batch(3, 9)) is ErrorCode.MESSAGE_TOO_LARGE
    assert send(bench, batch(2)) is NOT_LEADER
    assert send(bench, batch(1)) is ErrorCode.NONE
    assert send(bench, batch(2)) is ErrorCode.NONE
    assert send(bench, batch(12)) is OUT_OF_ORDER


def test_a_new_epoch_may_begin_there() -> None:
    bench = after_a_leader_change()
    assert send(bench, batch(4, epoch=1)) is NOT_LEADER
    assert send(bench, batch(0, 4, epoch=1)) is ErrorCode.NONE
    assert send(bench, batch(4, epoch=1)) is ErrorCode.NONE


def test_it_tells_the_truth_in_the_end() -> None:
    bench = after_a_leader_change()
    answers = [send(bench, batch(3)) for _ in range(NEW_LEADER_ANSWERS + 2)]
    assert answers == [NOT_LEADER] * NEW_LEADER_ANSWERS + [OUT_OF_ORDER] * 2
    assert send(bench, batch(2)) is ErrorCode.NONE
    assert send(bench, batch(3)) is ErrorCode.NONE


def test_a_producer_that_is_not_known_may_start_anywhere() -> None:
    """It wrote to a topic of the same name that was deleted, or has been idle for days."""
    bench = made()
    assert [send(bench, batch(i)) for i in (5, 6, 7)] == [ErrorCode.NONE] * 3
    assert send(bench, batch(9)) is OUT_OF_ORDER


def test_nor_is_it_forgotten_what_was_refused_before_it() -> None:
    bench = made()
    no_leader(bench, False)
    assert send(bench, batch(10)) is NOT_LEADER
    no_leader(bench, True)
    assert [send(bench, batch(i)) for i in (11, 12)] == [NOT_LEADER] * 2
    assert [send(bench, batch(i)) for i in (10, 11, 12)] == [ErrorCode.NONE] * 3


@pytest.mark.parametrize(
    ("is_first", "wait_ms"), [(True, FIRST_LEADER_MS), (False, MISSING_BATCH_MS)]
)
def test_a_new_leader_lets_nobody_start_above_0_at_once(is_first: bool, wait_ms: float) -> None:
    """The batch before may wait for an answer of another leader, or of the deleted topic's."""
    bench = made()
    if not is_first:
        assert send(bench, batch(0, producer_id=1)) is ErrorCode.NONE
    bench.replica.lead()
    assert send(bench, batch(0, producer_id=2)) is ErrorCode.NONE, "its first"
    assert send(bench, batch(11)) is NOT_LEADER
    bench.sleep(wait_ms - 1)
    assert send(bench, batch(10)) is NOT_LEADER
    bench.sleep(1)
    assert send(bench, batch(11)) is NOT_LEADER, "behind the one refused a moment ago"
    assert [send(bench, batch(i)) for i in (10, 11, 12)] == [ErrorCode.NONE] * 3


def test_sequences_that_were_given_up_while_a_number_was_gone_are_passed_over() -> None:
    """What the log before had is not taken again, and what it lacks is waited for like the first
    batch of a producer that is not known."""
    before = made()
    assert [send(before, batch(i)) for i in range(3)] == [ErrorCode.NONE] * 3
    bench = made()
    bench.replica.log.log_start = LogStart(
        offset=Offset(3),
        index=RaftIndex(3),
        previous_epoch=LeaderEpoch(5),
        state=before.partition.producers.newest(1 << 15),
    )
    bench.partition.restore(bench.replica.log.log_start)
    bench.partition._producers.begins_at = Offset(3)
    bench.replica.lead()
    assert send(bench, batch(2)) is ErrorCode.NONE
    assert bench.replica.log_end_offset == 3, "it stood in the log before"
    for _ in range(2 * NEW_LEADER_ANSWERS):
        assert [send(bench, batch(i)) for i in (7, 8)] == [NOT_LEADER] * 2
    bench.sleep(MISSING_BATCH_MS)
    assert send(bench, batch(8)) is NOT_LEADER, "7 was refused a moment ago"
    assert [send(bench, batch(i)) for i in (7, 8)] == [ErrorCode.NONE] * 2
    assert send(bench, batch(2)) is ErrorCode.NONE, "still known"
    assert bench.replica.log_end_offset == 5
    bench.replica.lead()
    assert send(bench, batch(10)) is NOT_LEADER, "a gap in this log"
    bench.sleep(MISSING_BATCH_MS)
    for _ in range(2 * NEW_LEADER_ANSWERS):
        code = send(bench, batch(10))
    assert code is OUT_OF_ORDER


def test_the_missing_first_batch_ends_the_wait() -> None:
    bench = made()
    assert send(bench, batch(0, producer_id=1)) is ErrorCode.NONE
    bench.replica.lead()
    assert send(bench, batch(2)) is NOT_LEADER
    assert [send(bench, batch(i)) for i in (0, 1, 2)] == [ErrorCode.NONE] * 3


def test_a_log_that_starts_above_0_had_other_leaders() -> None:
    bench = made()
    assert send(bench, batch(0, producer_id=1)) is ErrorCode.NONE
    bench.replica.start_at(1)
    bench.replica.lead()
    bench.sleep(MISSING_BATCH_MS - 1)
    assert send(bench, batch(5)) is NOT_LEADER
    bench.sleep(1)
    assert send(bench, batch(5)) is ErrorCode.NONE


def test_where_more_was_refused_than_is_remembered_nobody_starts_above_0() -> None:
    bench = made()
    no_leader(bench, False)
    for producer_id in range(REFUSED_PRODUCERS_MAX + 1):
        assert send(bench, batch(0, producer_id=producer_id)) is NOT_LEADER
    no_leader(bench, True)
    assert send(bench, batch(1, producer_id=0)) is NOT_LEADER, "nobody knows of its first batch"
    assert [send(bench, batch(i, producer_id=0)) for i in (0, 1)] == [ErrorCode.NONE] * 2
    bench.sleep(MISSING_BATCH_MS)
    assert send(bench, batch(7, producer_id=1_000)) is ErrorCode.NONE


@given(st.data())
def test_the_order_of_a_producer_that_is_not_known_is_kept(data: st.DataObject) -> None:
    """As with a known one: whatever is refused comes again, in order, and nothing is overtaken."""
    bench = made()
    bench.replica.lead()
    first = data.draw(st.integers(1, 3))
    next_new, waiting = first, list[int]()
    for _ in range(data.draw(st.integers(1, 12))):
        while len(waiting) < 5:
            waiting.append(next_new)
            next_new += 1
        refused = []
        for sequence in waiting:
            no_leader(bench, data.draw(st.booleans()))
            bench.sleep(data.draw(st.sampled_from([0, FIRST_LEADER_MS / 3])))
            code = send(bench, batch(sequence))
            assert code is not OUT_OF_ORDER
            if code is not ErrorCode.NONE:
                refused.append(sequence)
        waiting = refused
    sequences = [header.base_sequence for header, _ in bench.replica.log.batches]
    assert sequences == list(range(first, first + len(sequences)))


@pytest.mark.parametrize("is_leader", [True, False])
def test_a_batch_is_out_of_order_only_for_who_is_known_to_lead(is_leader: bool) -> None:
    """One that was replaced and does not know lacks what its successor has taken."""
    bench = made()
    assert send(bench, batch(0)) is ErrorCode.NONE
    barrier = bench.replica.barrier = Promise()
    told = bench.partition.append(batch(5), ACKS_ALL, 1000)
    assert isinstance(told, Promise)
    assert not told.is_done
    if is_leader:
        barrier.resolve(RaftIndex(1))
        assert told.result().code is OUT_OF_ORDER
    else:
        barrier.fail(NotLeaderError())
        assert told.result().code is NOT_LEADER
