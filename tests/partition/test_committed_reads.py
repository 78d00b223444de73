"""What a partition gives readers of committed records, and where it says that the log ends."""

from __future__ import annotations

import pytest

from raftmq.errors import ErrorCode
from raftmq.log.aborted import Aborted
from raftmq.log.prefetch import WarmJob
from raftmq.partition.look_ups import MAX_TIMESTAMP
from raftmq.partition.partition import EARLIEST, LATEST
from raftmq.partition.ports import NO_OFFSET, ReadResult
from raftmq.records import Marker, NewRecord, build_batch, build_marker, parse_header
from raftmq.types import Offset
from tests.partition.fake_replica import Bench, FakeReplica

A, B = 1, 2


def data(bench: Bench, pid: int, *, at_ms: int = 1000) -> int:
    """A transactional batch of one record; its offset."""
    producer = bench.partition.producers.get(pid)
    batch = build_batch(
        [NewRecord(None, b"v", at_ms)],
        producer_id=pid,
        producer_epoch=0,
        base_sequence=0 if producer is None else producer.last_sequence + 1,
        transactional=True,
    )
    return int(bench.replica.append(batch, parse_header(batch)))


def plain(bench: Bench, *, at_ms: int = 1000) -> int:
    batch = build_batch([NewRecord(None, b"p", at_ms)])
    return int(bench.replica.append(batch, parse_header(batch)))


def end(bench: Bench, pid: int, *, is_commit: bool) -> int:
    batch = build_marker(Marker(is_commit), producer_id=pid, producer_epoch=0, timestamp=1000)
    return int(bench.replica.append(batch, parse_header(batch)))


def read(bench: Bench, offset: int = 0, *, committed_only: bool = True) -> ReadResult:
    return bench.partition.read(Offset(offset), 1 << 20, committed_only=committed_only)


def offsets(result: ReadResult) -> list[int]:
    return [span.base_offset for span in result.spans]


def test_what_is_open_is_read_by_others_alone() -> None:
    bench = Bench()
    plain(bench)  # 0
    data(bench, A)  # 1
    plain(bench)  # 2
    bench.replica.commit(3)
    one = read(bench)
    assert (one.high_watermark, one.last_stable_offset, offsets(one)) == (3, 1, [0])
    other = read(bench, committed_only=False)
    assert (other.high_watermark, other.last_stable_offset, offsets(other)) == (3, 1, [0, 1, 2])
    for offset in (1, 2, 3):
        beyond = read(bench, offset)
        assert (beyond.code, offsets(beyond), beyond.aborted) == (ErrorCode.NONE, [], ())
    assert read(bench, 4).code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_marker_counts_once_it_is_committed() -> None:
    bench = Bench()
    data(bench, A)  # 0
    end(bench, A, is_commit=False)  # 1
    bench.replica.commit(1)
    assert read(bench).last_stable_offset == 0
    bench.replica.commit(2)
    result = read(bench)
    assert (result.last_stable_offset, offsets(result)) == (2, [0, 1])
    assert result.aborted == [Aborted(A, 0, 1)]
    assert read(bench, committed_only=False).aborted == ()


def test_those_aborted_come_by_their_first_offset_and_as_far_as_they_concern() -> None:
    bench = Bench()
    data(bench, A)  # 0
    data(bench, B)  # 1
    end(bench, B, is_commit=False)  # 2
    end(bench, A, is_commit=False)  # 3
    data(bench, B)  # 4
    end(bench, B, is_commit=True)  # 5
    data(bench, A)  # 6
    end(bench, A, is_commit=False)  # 7
    bench.replica.commit(8)
    assert read(bench).aborted == [Aborted(A, 0, 3), Aborted(B, 1, 2), Aborted(A, 6, 7)]
    assert read(bench, 3).aborted == [Aborted(A, 0, 3), Aborted(A, 6, 7)]
    first = bench.partition.read(Offset(0), 1, committed_only=True)
    assert offsets(first) == [0]
    assert first.aborted == [Aborted(A, 0, 3)]


def test_a_follower_goes_by_what_it_flushed() -> None:
    bench = Bench()
    data(bench, A)  # 0
    end(bench, A, is_commit=True)  # 1
    plain(bench)  # 2
    bench.replica.follow()
    bench.replica.high_watermark = Offset(3)
    for flushed, expected in ((1, 0), (2, 2), (3, 3)):
        bench.replica.log.flushed_end_offset = Offset(flushed)
        result = bench.partition.read(Offset(0), 1 << 20, may_follow=True, committed_only=True)
        assert (result.high_watermark, result.last_stable_offset) == (flushed, expected)


def test_a_log_start_within_a_transaction_is_stable() -> None:
    bench = Bench()
    data(bench, A)  # 0
    plain(bench)  # 1
    data(bench, A)  # 2
    bench.replica.commit(3)
    bench.replica.start_at(2)
    assert bench.partition.stable_end == 2, "max(first open, log start)"
    end(bench, A, is_commit=False)
    bench.replica.commit(4)
    result = read(bench, 2)
    assert result.last_stable_offset == 4
    assert result.aborted == [Aborted(A, 0, 3)], "it began below, its marker is above"


class Slow:
    """The replay of a log takes more than a turn."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("raftmq.partition.producers.TURN_HEADERS", 1)
        monkeypatch.setattr("raftmq.partition.producers.TURNS", 1)
        self.bench = bench

    def turns(self) -> int:
        """Turns of the loop until nothing is left to do."""
        count = 0
        while self.bench.partition._is_catching_up:
            count += 1
            assert count < 1000
            self.bench.deadlines.expire(self.bench.clock.now_ms)
        return count


def filled(bench: Bench) -> FakeReplica:
    for _ in range(50):
        data(bench, A)
        end(bench, A, is_commit=False)
    bench.replica.commit(100)
    return bench.replica


def test_while_it_is_replayed_what_is_stable_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    slow = Slow(bench, monkeypatch)
    replica = filled(bench)
    data(bench, A)
    replica.truncate(100)
    result = read(bench)
    assert (result.code, offsets(result)) == (ErrorCode.OFFSET_NOT_AVAILABLE, [])
    assert bench.partition.stable_end == NO_OFFSET
    assert not bench.partition.knows_producers
    other = read(bench, committed_only=False)
    assert (other.last_stable_offset, len(other.spans)) == (NO_OFFSET, 100)
    asked = bench.partition.list_offset(LATEST, committed_only=True)
    assert asked.code is ErrorCode.OFFSET_NOT_AVAILABLE
    assert bench.partition.list_offset(LATEST).offset == 100
    assert slow.turns() > 3
    assert read(bench).last_stable_offset == 100
    assert bench.partition.knows_producers


def test_a_lost_index_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    slow = Slow(bench, monkeypatch)
    filled(bench)
    before = read(bench).aborted
    assert len(before) == 50
    bench.replica.log.aborted.lose()
    result = read(bench)
    assert (result.code, offsets(result)) == (ErrorCode.OFFSET_NOT_AVAILABLE, [])
    assert read(bench, committed_only=False).code is ErrorCode.NONE
    assert slow.turns() > 3
    assert read(bench).aborted == before


def test_a_closed_partition_finds_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    slow = Slow(bench, monkeypatch)
    filled(bench)
    bench.replica.log.aborted.lose()
    read(bench)
    bench.partition.close()
    assert slow.turns() == 1


def test_a_cold_index_is_a_workers() -> None:
    bench = Bench()
    filled(bench)
    bench.replica.log.aborted.cold_stretches = [(None, 0, 64)]  # type: ignore[list-item]
    result = bench.partition.read(Offset(0), 1 << 20, committed_only=True, may_wait=False)
    assert isinstance(result.job, WarmJob)
    assert not result.spans
    assert read(bench).spans, "unless it may wait"


def test_offsets_by_time_are_stable_ones() -> None:
    bench = Bench()
    plain(bench, at_ms=100)  # 0
    data(bench, A, at_ms=200)  # 1
    plain(bench, at_ms=300)  # 2
    bench.replica.commit(3)
    partition = bench.partition
    assert partition.list_offset(LATEST).offset == 3
    assert partition.list_offset(LATEST, committed_only=True).offset == 1
    assert partition.list_offset(EARLIEST, committed_only=True).offset == 0
    assert partition.list_offset(200).offset == 1
    assert partition.list_offset(200, committed_only=True).offset == NO_OFFSET
    assert partition.list_offset(50, committed_only=True).offset == 0
    assert partition.list_offset(MAX_TIMESTAMP).offset == 2
    assert partition.list_offset(MAX_TIMESTAMP, committed_only=True).offset == 0
