"""What clients are told of one partition: acknowledgements, reads, offsets, epochs, deletions."""

from __future__ import annotations

import pytest
from attrs import evolve

from raftmq.codec import Codec
from raftmq.errors import ErrorCode, StorageError
from raftmq.partition.parked import DELETE_WAIT_MS_MIN
from raftmq.partition.partition import ACKS_ALL
from raftmq.partition.ports import AppendResult, DeleteResult, EpochEnd
from raftmq.partition.settings import PartitionSettings
from raftmq.promise import Promise
from raftmq.records import LOG_APPEND_TIME, NewRecord, build_batch, check_batch, parse_header
from raftmq.types import LeaderEpoch, Offset
from tests.partition.fake_replica import REPLICAS, Bench

TIMEOUT_MS = 1000


def batch(count: int = 1, *, timestamp: int = 1_000_000, **kwargs: object) -> memoryview:
    records = [NewRecord(b"k", b"v%d" % i) for i in range(count)]
    return memoryview(build_batch(records, timestamp=timestamp, **kwargs))  # type: ignore[arg-type]


def append(bench: Bench, records: memoryview | None, acks: int = 1) -> AppendResult:
    result = bench.partition.append(records, acks, TIMEOUT_MS)
    assert isinstance(result, AppendResult)
    return result


def park(bench: Bench, records: memoryview) -> Promise[AppendResult]:
    result = bench.partition.append(records, ACKS_ALL, TIMEOUT_MS)
    assert isinstance(result, Promise)
    return result


def code_of(bench: Bench, records: memoryview | None, acks: int = 1) -> ErrorCode:
    return append(bench, records, acks).code


# ---- acknowledgement ----


def test_acks_1_answers_after_the_append() -> None:
    bench = Bench()
    assert append(bench, batch(3)) == AppendResult(ErrorCode.NONE, Offset(0), -1, Offset(0))
    assert append(bench, batch(2)).base_offset == 3
    assert bench.replica.log_end_offset == 5


def test_acks_all_waits_for_the_high_watermark() -> None:
    bench = Bench()
    first, second = park(bench, batch(3)), park(bench, batch(2))
    bench.replica.commit(3)
    assert first.result() == AppendResult(ErrorCode.NONE, Offset(0), -1, Offset(0))
    assert not second.is_done
    bench.replica.commit(5)
    assert second.result().base_offset == 3
    assert len(bench.deadlines) == 0


def test_acks_all_waits_for_min_insync_replicas_beyond_the_majority() -> None:
    bench = Bench(settings=PartitionSettings(min_insync_replicas=3))
    promise = park(bench, batch())
    bench.replica.commit(1, count=2)
    bench.sleep(50)
    assert not promise.is_done, "two of three flushed it"
    bench.replica.flush(1, 3)
    assert promise.result().code is ErrorCode.NONE
    bench.sleep(2 * TIMEOUT_MS)


def test_too_few_in_sync_replicas_refuse_before_the_append() -> None:
    bench = Bench(settings=PartitionSettings(min_insync_replicas=2))
    bench.replica.in_sync = REPLICAS[:1]
    assert code_of(bench, batch(), ACKS_ALL) is ErrorCode.NOT_ENOUGH_REPLICAS
    assert bench.replica.log_end_offset == 0
    assert code_of(bench, batch(), 1) is ErrorCode.NONE, "acks=1 asks for no one else"


@pytest.mark.parametrize(
    ("min_insync", "code"),
    [(1, ErrorCode.REQUEST_TIMED_OUT), (2, ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND)],
)
def test_a_timeout_leaves_the_record(min_insync: int, code: ErrorCode) -> None:
    bench = Bench(settings=PartitionSettings(min_insync_replicas=min_insync))
    promise = park(bench, batch())
    bench.sleep(TIMEOUT_MS - 1)
    assert not promise.is_done
    bench.sleep(2)
    assert promise.result().code is code
    assert bench.replica.log_end_offset == 1
    later = park(bench, batch())
    bench.replica.commit(2)
    assert later.result().base_offset == 1


def test_lost_leadership_fails_what_is_parked() -> None:
    bench = Bench()
    promise = park(bench, batch())
    bench.replica.follow()
    assert promise.result().code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert code_of(bench, batch()) is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_a_leader_of_an_uncommitted_term_takes_nothing() -> None:
    bench = Bench()
    bench.replica.is_writable = False
    assert code_of(bench, batch()) is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_a_failed_replica_says_so() -> None:
    bench = Bench()
    bench.replica.is_writable = bench.replica.is_leader = False
    bench.replica.failure = "flush failed"
    assert code_of(bench, batch()) is ErrorCode.KAFKA_STORAGE_ERROR


def test_a_full_disk_refuses_and_changes_nothing() -> None:
    bench = Bench()
    bench.replica.refusal = StorageError("disk full")
    assert code_of(bench, batch(), ACKS_ALL) is ErrorCode.KAFKA_STORAGE_ERROR
    bench.replica.refusal = None
    assert append(bench, batch()).base_offset == 0


def test_acks_1_may_wait_for_the_leaders_own_fsync() -> None:
    bench = Bench(settings=PartitionSettings(acks1_fsync=True))
    promise = bench.partition.append(batch(), 1, TIMEOUT_MS)
    assert isinstance(promise, Promise)
    bench.sleep(20)
    assert not promise.is_done
    bench.replica.flush(1, 1)
    assert promise.result().code is ErrorCode.NONE


def test_closing_answers_everything() -> None:
    bench = Bench()
    promise = park(bench, batch())
    bench.partition.close()
    assert promise.result().code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert code_of(bench, batch()) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


# ---- what is refused ----


def flipped(records: memoryview) -> memoryview:
    records[-1] ^= 1
    return records


HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("records", "code"),
    [
        (None, ErrorCode.INVALID_RECORD),
        (memoryview(bytearray()), ErrorCode.INVALID_RECORD),
        (memoryview(bytearray(40)), ErrorCode.CORRUPT_MESSAGE),
        (memoryview(bytearray(b"\2" * 40)), ErrorCode.INVALID_RECORD),
        (flipped(batch()), ErrorCode.CORRUPT_MESSAGE),
        (memoryview(bytearray(batch()) + bytearray(batch())), ErrorCode.INVALID_RECORD),
        (batch(control=True), ErrorCode.INVALID_RECORD),
        (
            batch(transactional=True, producer_id=1, producer_epoch=0, base_sequence=0),
            ErrorCode.INVALID_TXN_STATE,
        ),
        (batch(20), ErrorCode.MESSAGE_TOO_LARGE),
        (batch(timestamp=1_000_000 + HOUR_MS + 1), ErrorCode.INVALID_TIMESTAMP),
        (batch(timestamp=1_000_000 - HOUR_MS - 1), ErrorCode.INVALID_TIMESTAMP),
    ],
    ids=[
        "null",
        "empty",
        "zeros",
        "short",
        "flipped bit",
        "two batches",
        "control",
        "transactional",
        "too large",
        "from the future",
        "from the past",
    ],
)
def test_refused_batches(records: memoryview | None, code: ErrorCode) -> None:
    settings = PartitionSettings(
        max_message_bytes=200, timestamp_after_ms_max=HOUR_MS, timestamp_before_ms_max=HOUR_MS
    )
    bench = Bench(settings=settings)
    assert code_of(bench, records) is code
    assert bench.replica.log_end_offset == 0


@pytest.mark.parametrize("timestamp", [1_000_000 + 2 * HOUR_MS, 1_000_000 - 2 * HOUR_MS])
@pytest.mark.parametrize(
    ("others_right", "code"),
    [
        ([True, True], ErrorCode.NONE),
        ([True], ErrorCode.NONE),
        ([True, False], ErrorCode.INVALID_TIMESTAMP),
        ([False], ErrorCode.INVALID_TIMESTAMP),
        ([], ErrorCode.INVALID_TIMESTAMP),
    ],
)
def test_a_leaders_clock_alone_refuses_no_timestamp(
    timestamp: int, others_right: list[bool], code: ErrorCode
) -> None:
    settings = PartitionSettings(timestamp_after_ms_max=HOUR_MS, timestamp_before_ms_max=HOUR_MS)
    bench = Bench(settings=settings)
    bench.replica.other_clocks_ms = [timestamp if right else 1_000_000 for right in others_right]
    assert code_of(bench, batch(timestamp=timestamp)) is code


def test_a_batch_at_the_limit_is_taken() -> None:
    records = batch(5)
    bench = Bench(settings=PartitionSettings(max_message_bytes=len(records)))
    assert code_of(bench, records) is ErrorCode.NONE


def test_bytes_are_kept_but_for_base_offset_and_leader_epoch() -> None:
    bench = Bench()
    append(bench, batch(3))
    records = batch(2, codec=Codec.LZ4)
    sent = bytes(records)
    append(bench, records)
    _, stored = bench.replica.log.batches[1]
    assert stored[16:] == sent[16:]
    assert parse_header(stored).base_offset == 3
    assert parse_header(stored).leader_epoch == 5
    check_batch(stored)


def test_log_append_time_is_the_brokers() -> None:
    bench = Bench(settings=PartitionSettings(timestamp_type=LOG_APPEND_TIME))
    result = append(bench, batch(timestamp=5))
    assert result.log_append_time_ms == 1_000_000
    header = check_batch(bench.replica.log.batches[0][1])
    assert header.timestamp_type == LOG_APPEND_TIME
    assert header.max_timestamp == 1_000_000


def test_log_append_time_is_not_by_this_brokers_clock_alone() -> None:
    bench = Bench(settings=PartitionSettings(timestamp_type=LOG_APPEND_TIME))
    bench.replica.other_clocks_ms = [9_000_000, 9_000_000]
    result = append(bench, batch(timestamp=5))
    assert result.log_append_time_ms == 9_000_000
    assert check_batch(bench.replica.log.batches[0][1]).max_timestamp == 9_000_000


@pytest.mark.parametrize("codec", list(Codec))
def test_a_topics_own_compression(codec: Codec) -> None:
    bench = Bench(settings=PartitionSettings(compression=codec))
    append(bench, batch(3, codec=Codec.GZIP, producer_id=4, producer_epoch=0, base_sequence=0))
    header = check_batch(bench.replica.log.batches[0][1])
    assert header.codec is codec
    assert (header.producer_id, header.base_sequence, header.record_count) == (4, 0, 3)


# ---- idempotence ----


def sequenced(sequence: int, count: int = 1, epoch: int = 0) -> memoryview:
    return batch(count, producer_id=9, producer_epoch=epoch, base_sequence=sequence)


def test_a_duplicate_waits_for_its_original() -> None:
    bench = Bench()
    original = park(bench, sequenced(0, 2))
    other = park(bench, sequenced(2))
    duplicate = park(bench, sequenced(0, 2))
    assert bench.replica.log_end_offset == 3
    bench.replica.commit(2)
    assert original.is_done
    assert duplicate.result().base_offset == 0
    assert not other.is_done
    answered = bench.partition.append(sequenced(0, 2), ACKS_ALL, TIMEOUT_MS)
    assert isinstance(answered, AppendResult)
    assert answered.base_offset == 0


def test_a_batch_that_stands_in_the_log_is_not_refused_for_its_timestamp() -> None:
    bench = Bench()
    original = batch(producer_id=9, producer_epoch=0, base_sequence=0)
    again = memoryview(bytearray(original))
    append(bench, original)
    bench.clock.now_ms -= 2 * HOUR_MS  # as of another leader, or set right at last
    other = batch(producer_id=9, producer_epoch=0, base_sequence=1)
    assert code_of(bench, other) is ErrorCode.INVALID_TIMESTAMP
    answer = append(bench, again)
    assert (answer.code, answer.base_offset) == (ErrorCode.NONE, 0)


def test_a_gap_in_the_sequence_is_refused() -> None:
    bench = Bench()
    append(bench, sequenced(0))
    assert code_of(bench, sequenced(2)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert code_of(bench, sequenced(0, epoch=1)) is ErrorCode.NONE
    assert code_of(bench, sequenced(1)) is ErrorCode.INVALID_PRODUCER_EPOCH


def test_truncation_forgets_what_it_takes() -> None:
    bench = Bench()
    append(bench, sequenced(0))
    append(bench, sequenced(1))
    bench.replica.truncate(1)
    assert append(bench, sequenced(1)).base_offset == 1, "not taken for a duplicate"


def test_state_at_a_log_start_is_exact() -> None:
    bench = Bench()
    for sequence in range(3):
        append(bench, sequenced(sequence))
    bench.replica.commit(3)
    bench.replica.start_at(2)
    bench.replica.log.batches.clear()  # as a log is that begins anew
    bench.partition.restore(bench.replica.log.log_start)
    assert bench.partition.producers.get(9) is not None
    assert bench.partition.producers.next_offset == 2


# ---- reads ----


def filled(high_watermark: int = 4, ends: tuple[int, ...] = (2, 2, 2)) -> Bench:
    """Batches of two records each; the first ones committed."""
    bench = Bench()
    for i, count in enumerate(ends):
        append(bench, batch(count, timestamp=1_000_000 + i))
    bench.replica.commit(high_watermark)
    return bench


def test_nothing_above_the_high_watermark_is_served() -> None:
    bench = filled()
    result = bench.partition.read(Offset(0), 1 << 20)
    assert result.code is ErrorCode.NONE
    assert (result.high_watermark, len(result.spans)) == (4, 2)
    assert result.size == sum(span.size for span in result.spans)
    assert bench.partition.read(Offset(1), 1 << 20).spans == result.spans, "whole batches"


def test_a_batch_above_the_limit_is_served_alone() -> None:
    bench = filled()
    assert len(bench.partition.read(Offset(0), 1).spans) == 1
    assert len(bench.partition.read(Offset(0), 1, at_least_one=False).spans) == 0


@pytest.mark.parametrize(
    ("offset", "code"),
    [
        (-1, ErrorCode.OFFSET_OUT_OF_RANGE),
        (1, ErrorCode.OFFSET_OUT_OF_RANGE),
        (2, ErrorCode.NONE),
        (4, ErrorCode.NONE),
        (5, ErrorCode.NONE),
        (6, ErrorCode.NONE),
        (7, ErrorCode.OFFSET_OUT_OF_RANGE),
    ],
)
def test_offsets_in_range(offset: int, code: ErrorCode) -> None:
    """Between high watermark and log end a fetch waits: another leader may have committed it."""
    bench = filled()
    bench.replica.start_at(2)
    result = bench.partition.read(Offset(offset), 1 << 20)
    assert result.code is code
    assert result.log_start_offset == 2


@pytest.mark.parametrize(
    ("epoch", "code"),
    [
        (-1, ErrorCode.NONE),
        (4, ErrorCode.FENCED_LEADER_EPOCH),
        (5, ErrorCode.NONE),
        (6, ErrorCode.UNKNOWN_LEADER_EPOCH),
    ],
)
def test_epoch_fencing(epoch: int, code: ErrorCode) -> None:
    bench = filled()
    partition = bench.partition
    assert partition.read(Offset(0), 1, current_epoch=epoch).code is code
    assert partition.list_offset(-1, current_epoch=epoch).code is code
    assert partition.end_offset_for_epoch(5, current_epoch=epoch).code is code


def test_followers_serve_what_they_flushed_and_were_told() -> None:
    bench = filled()
    bench.replica.follow()
    partition = bench.partition
    assert partition.read(Offset(0), 1).code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    result = partition.read(Offset(0), 1 << 20, may_follow=True)
    assert (result.code, result.high_watermark) == (ErrorCode.NONE, 4)
    bench.replica.log.flushed_end_offset = Offset(2)
    assert partition.read(Offset(0), 1 << 20, may_follow=True).high_watermark == 2
    ahead = partition.read(Offset(3), 1 << 20, may_follow=True)
    assert ahead.code is ErrorCode.OFFSET_NOT_AVAILABLE
    bench.replica.leader = None
    lost = partition.read(Offset(0), 1, may_follow=True)
    assert lost.code is ErrorCode.NOT_LEADER_OR_FOLLOWER


@pytest.mark.parametrize("is_leader", [True, False])
@pytest.mark.parametrize(("offset", "end"), [(0, 2), (2, 2), (3, 3), (4, 4)])
def test_a_hole_below_the_high_watermark_is_no_end_to_wait_for(
    offset: int, end: int, is_leader: bool
) -> None:
    """Who is before it is told that the log ends there; who was behind it already, that he is at
    the end: neither waits for records that are gone, nor is anybody out of range."""
    bench = filled()
    bench.replica.log.hole = (2, 4)
    if not is_leader:
        bench.replica.follow()
    partition = bench.partition
    result = partition.read(Offset(offset), 1 << 20, may_follow=True)
    assert (result.code, result.high_watermark) == (ErrorCode.NONE, end)
    assert result.record_count == (2 if offset == 0 else 0)
    if is_leader:
        assert partition.list_offset(-1).offset == 2
    bench.replica.start_at(3)  # records are deleted up to within the hole
    assert partition.readable_end == 3


def test_divergence_is_told() -> None:
    bench = filled()
    partition = bench.partition
    assert partition.read(Offset(2), 1, last_fetched_epoch=5).diverging is None
    bench.replica.leader_epoch = type(bench.replica.leader_epoch)(8)
    append(bench, batch(2))
    bench.replica.commit(8)
    result = partition.read(Offset(7), 1, last_fetched_epoch=5)
    assert (result.diverging, result.spans) == ((5, 6), ())
    assert partition.read(Offset(7), 1, last_fetched_epoch=6).diverging == (5, 6)
    assert partition.read(Offset(7), 1, last_fetched_epoch=8).diverging is None


def test_damaged_bytes_are_not_served() -> None:
    bench = filled()
    bench.replica.log.damaged = True
    assert bench.partition.read(Offset(0), 1).code is ErrorCode.KAFKA_STORAGE_ERROR
    assert bench.replica.damage_count == 1, "its repair begins, even if the group is at rest"


class Waiter:
    def __init__(self) -> None:
        self.wakes = 0

    def woken(self) -> None:
        self.wakes += 1


def test_waiting_fetches_are_woken() -> None:
    bench = filled()
    waiter = Waiter()
    bench.partition.fetches.park(waiter)
    append(bench, batch())
    assert waiter.wakes == 0, "appended is not committed"
    bench.replica.commit(6)
    assert waiter.wakes == 1
    bench.replica.follow()
    assert waiter.wakes == 2
    bench.partition.close()
    assert waiter.wakes == 3
    bench.partition.fetches.unpark(waiter)
    assert len(bench.partition.fetches) == 0


def test_a_follower_wakes_fetches_once_it_flushed() -> None:
    bench = filled()
    bench.replica.follow()
    waiter = Waiter()
    bench.partition.fetches.park(waiter)
    bench.replica.log.flushed_end_offset = Offset(4)
    bench.replica.high_watermark = Offset(6)
    bench.partition.committed(Offset(6), bench.replica.log.index_of(Offset(6)))
    assert (waiter.wakes, bench.partition.readable_end) == (1, 4)
    bench.sleep(20)
    assert waiter.wakes == 1
    bench.replica.flush(6, 2)
    assert waiter.wakes == 2
    bench.sleep(1000)
    assert waiter.wakes == 2


def test_a_crowd_of_fetches_is_woken_bit_by_bit() -> None:
    bench = filled()
    waiters = [Waiter() for _ in range(20)]
    for waiter in waiters:
        bench.partition.fetches.park(waiter)
    bench.replica.commit(6)
    assert [waiter.wakes for waiter in waiters] == [1] * 8 + [0] * 12
    assert bench.deadlines.expire(bench.clock.now_ms, count_max=5)
    assert [waiter.wakes for waiter in waiters] == [1] * 13 + [0] * 7
    assert not bench.deadlines.expire(bench.clock.now_ms)
    assert [waiter.wakes for waiter in waiters] == [1] * 20


# ---- offsets and epochs ----


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        (-1, (4, -1)),
        (-2, (0, -1)),
        (-3, (2, 1_000_001)),
        (-4, (0, -1)),
        (-5, (-1, -1)),
        (0, (0, 1_000_000)),
        (1_000_001, (2, 1_000_001)),
        (1_000_002, (-1, -1)),
    ],
)
def test_list_offsets(timestamp: int, expected: tuple[int, int]) -> None:
    result = filled().partition.list_offset(timestamp)
    assert result.code is ErrorCode.NONE
    assert (result.offset, result.timestamp) == expected


@pytest.mark.parametrize("timestamp", [-1, -3, 5])
def test_a_new_leader_does_not_know_its_end_yet(timestamp: int) -> None:
    bench = filled()
    bench.replica.is_writable = False
    partition = bench.partition
    assert partition.list_offset(timestamp).code is ErrorCode.OFFSET_NOT_AVAILABLE
    assert partition.list_offset(-2).offset == 0
    assert partition.end_offset_for_epoch(5).code is ErrorCode.OFFSET_NOT_AVAILABLE
    assert partition.end_offset_for_epoch(4).code is ErrorCode.OFFSET_NOT_AVAILABLE, "means 5"
    assert len(partition.read(Offset(0), 1).spans) == 1, "the old high watermark holds"
    assert partition.read(Offset(4), 1).code is ErrorCode.NONE
    beyond = partition.read(Offset(9), 1).code
    assert beyond is ErrorCode.OFFSET_NOT_AVAILABLE, "it may have been replaced meanwhile"


def test_a_new_leader_does_not_call_back_what_its_predecessor_committed() -> None:
    bench = filled()  # of epoch 5, all committed
    bench.replica.leader_epoch = LeaderEpoch(7)
    bench.replica.is_writable = False
    bench.replica.high_watermark = Offset(2)  # as far as it was told
    assert bench.partition.end_offset_for_epoch(5).code is ErrorCode.OFFSET_NOT_AVAILABLE
    bench.replica.high_watermark = Offset(4)
    bench.replica.is_writable = True
    assert bench.partition.end_offset_for_epoch(5).end_offset == 4


def test_a_follower_that_is_behind_does_not_tell_of_divergence() -> None:
    bench = filled()
    bench.replica.is_leader = bench.replica.is_writable = False
    ahead = bench.partition.read(Offset(9), 1000, last_fetched_epoch=5, may_follow=True)
    assert (ahead.code, ahead.diverging) == (ErrorCode.OFFSET_NOT_AVAILABLE, None)


def test_end_offset_for_epoch_is_cut_at_the_high_watermark() -> None:
    partition = filled().partition
    found = partition.end_offset_for_epoch(5)
    assert (found.leader_epoch, found.end_offset) == (5, 4)
    assert partition.end_offset_for_epoch(-1).end_offset == -1


@pytest.mark.parametrize("is_cut", [False, True])
def test_epoch_0_is_that_of_the_first_leader(is_cut: bool) -> None:
    """Clients that leave it at its zero value must not be told that their records are lost."""
    bench = Bench()
    bench.replica.leader_epoch = LeaderEpoch(1)
    for _ in range(2):
        append(bench, batch(2))
    bench.replica.commit(4)
    if is_cut:
        bench.replica.start_at(2)
        bench.replica.log.log_start = evolve(
            bench.replica.log.log_start, previous_epoch=LeaderEpoch(1)
        )
    partition = bench.partition
    for epoch in (0, 1):
        found = partition.end_offset_for_epoch(epoch, current_epoch=0)
        assert found == EpochEnd(ErrorCode.NONE, LeaderEpoch(epoch), Offset(4))
        read = partition.read(Offset(4), 1, current_epoch=0, last_fetched_epoch=epoch)
        assert (read.code, read.diverging) == (ErrorCode.NONE, None)
    bench.replica.leader_epoch = LeaderEpoch(2)
    append(bench, batch(2))
    bench.replica.commit(6)
    found = partition.end_offset_for_epoch(0)
    assert (found.leader_epoch, found.end_offset) == (0, 4), "another leader followed"
    assert partition.end_offset_for_epoch(0, current_epoch=0).code is (
        ErrorCode.FENCED_LEADER_EPOCH
    )


def test_nothing_was_read_under_an_epoch_before_the_first_record() -> None:
    """The first elections of a group may come to nothing."""
    partition = filled().partition  # epoch 5
    for epoch in range(6):
        found = partition.end_offset_for_epoch(epoch)
        assert (found.leader_epoch, found.end_offset) == (epoch, 4)
        assert partition.read(Offset(4), 1, last_fetched_epoch=epoch).diverging is None


def test_an_epoch_older_than_the_log_ended_where_it_starts() -> None:
    bench = filled()
    bench.replica.start_at(2)
    found = bench.partition.end_offset_for_epoch(4)
    assert (found.leader_epoch, found.end_offset) == (4, 2)
    assert bench.partition.read(Offset(4), 1, last_fetched_epoch=4).diverging == (4, 2)
    assert bench.partition.read(Offset(2), 1, last_fetched_epoch=4).diverging is None


# ---- deletion ----


def test_delete_records_answers_when_the_log_start_moved() -> None:
    bench = filled()
    promise = bench.partition.delete_records(3, TIMEOUT_MS)
    assert isinstance(promise, Promise)
    assert bench.replica.wished == [3]
    bench.sleep(20)
    assert not promise.is_done
    bench.replica.start_at(3)
    assert promise.result() == DeleteResult(ErrorCode.NONE, Offset(3))
    assert bench.partition.delete_records(2, TIMEOUT_MS) == DeleteResult(ErrorCode.NONE, Offset(3))


def test_delete_records_up_to_the_high_watermark() -> None:
    bench = filled()
    assert isinstance(bench.partition.delete_records(-1, TIMEOUT_MS), Promise)
    assert bench.replica.wished == [4]


@pytest.mark.parametrize("offset", [5, -2])
def test_delete_records_out_of_range(offset: int) -> None:
    result = filled().partition.delete_records(offset, TIMEOUT_MS)
    assert result == DeleteResult(ErrorCode.OFFSET_OUT_OF_RANGE)


@pytest.mark.parametrize("timeout_ms", [0, 1])
def test_delete_records_that_may_not_wait_is_told_what_is_done_in_a_moment(timeout_ms: int) -> None:
    bench = filled()
    promise = bench.partition.delete_records(3, timeout_ms)
    assert isinstance(promise, Promise)
    bench.sleep(20)
    assert not promise.is_done
    bench.replica.start_at(3)
    assert promise.result() == DeleteResult(ErrorCode.NONE, Offset(3))
    late = bench.partition.delete_records(4, timeout_ms)
    assert isinstance(late, Promise)
    bench.sleep(DELETE_WAIT_MS_MIN + 1)
    assert late.result().code is ErrorCode.REQUEST_TIMED_OUT


def test_delete_records_times_out_and_fails() -> None:
    bench = filled()
    first = bench.partition.delete_records(3, 600)
    assert isinstance(first, Promise)
    bench.sleep(599)
    assert not first.is_done
    bench.sleep(2)
    assert first.result().code is ErrorCode.REQUEST_TIMED_OUT
    second = bench.partition.delete_records(3, TIMEOUT_MS)
    assert isinstance(second, Promise)
    bench.replica.follow()
    assert second.result().code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert bench.partition.delete_records(3, 1).code is ErrorCode.NOT_LEADER_OR_FOLLOWER  # type: ignore[union-attr]
