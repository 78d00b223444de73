"""What a view with a condition gives: what matches of the committed records, and where it ends."""

from __future__ import annotations

from random import Random
from typing import Any
from uuid import UUID

import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from jepsen_like.disk import SimDisk
from raftmq.codec import Codec
from raftmq.errors import ErrorCode
from raftmq.partition.filtered import EXAMINED_WAIT_MS, NEAR_MS, FilteredPartition
from raftmq.partition.look_ups import MAX_TIMESTAMP
from raftmq.partition.partition import EARLIEST, LATEST
from raftmq.partition.ports import FileSpan, OffsetResult, ReadResult
from raftmq.promise import Promise
from raftmq.records import (
    Marker,
    NewRecord,
    build_batch,
    build_marker,
    check_batch,
    parse_header,
    read_records,
)
from raftmq.types import Buffer, Offset, TopicId, TopicPartition
from raftmq.views.batches import Judged, Kind, judge
from raftmq.views.conditions import parse_condition
from raftmq.views.filling import JudgeJob, RebuildJob, RebuiltBatches, kept
from raftmq.views.index import BlockJob, ViewIndex
from tests.partition.fake_replica import Bench
from tests.views.test_index import make_small

VIEW = TopicId(UUID(int=77))
TAGGED = parse_condition("tag = 'x'")


@define
class Waiter:
    """Something parked, that counts how often it is woken."""

    woken_count: int = 0

    def woken(self) -> None:
        self.woken_count += 1


@define
class Viewed:
    """A partition and a view of it; what is examined is for the test to say."""

    bench: Bench = field(factory=Bench)
    rebuilt: RebuiltBatches = field(factory=RebuiltBatches)
    view: FilteredPartition = field(init=False)
    disk: SimDisk = field(factory=lambda: SimDisk(Random(1)))
    asked: list[tuple[FilteredPartition, int]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.view = FilteredPartition(
            TopicPartition("v", 0),
            VIEW,
            self.bench.partition,
            TAGGED,
            rebuilt=self.rebuilt,
            look_up=self.look_up,
            deadlines=self.bench.deadlines,
            clock=self.bench.clock,
        )

    def look_up(self, view: FilteredPartition, timestamp: int) -> Promise[OffsetResult]:
        self.asked.append((view, timestamp))
        return Promise()

    def load(self) -> Viewed:
        start = self.bench.replica.log_start_offset
        self.view.take_index(ViewIndex(self.disk, "views", VIEW.bytes, start))
        return self

    def put(self, marks: str, *, pid: int = -1, codec: Codec = Codec.NONE) -> int:
        """A batch with a record for each letter; `x` matches. Its base offset."""
        producer = self.bench.partition.producers.get(pid)
        records = [
            NewRecord(None, mark.encode(), 1_000, (("tag", mark.encode()),)) for mark in marks
        ]
        batch = build_batch(
            records,
            codec=codec,
            producer_id=pid,
            producer_epoch=0 if pid >= 0 else -1,
            base_sequence=-1 if pid < 0 else 0 if producer is None else producer.last_sequence + 1,
            transactional=pid >= 0,
        )
        return int(self.bench.replica.append(batch, parse_header(batch)))

    def end(self, pid: int, *, is_commit: bool) -> None:
        batch = build_marker(Marker(is_commit), producer_id=pid, producer_epoch=0, timestamp=1000)
        self.bench.replica.append(batch, parse_header(batch))

    def commit(self) -> None:
        self.bench.replica.commit(self.bench.replica.log_end_offset)

    def examine(self, *, rebuilds: bool = False) -> None:
        """Do what workers do, until all is examined that is stable."""
        view, base = self.view, self.bench.partition
        assert view.view_index is not None, "it is loaded"
        view.view_index.drop_before(base.replica.log_start_offset)
        view.base_moved()
        while view.examined_end < base.stable_end:
            start = view.examined_end
            result = base.read(start, 200, may_follow=True, committed_only=True)
            assert result.spans
            job = JudgeJob(result.spans, start, result.aborted, TAGGED, rebuilds)
            job.run()
            view.examined(job, Offset(result.spans[-1].end_offset))

    def read(self, offset: int, bytes_max: int = 1 << 20, **how: Any) -> ReadResult:
        """As a fetch does, with a worker for its jobs."""
        while True:
            result = self.view.read(Offset(offset), bytes_max, may_wait=False, **how)
            if result.job is None:
                return result
            result.job.run()
            self.view.prepared(result.job)

    def offsets(self, offset: int = 0, **how: Any) -> list[int]:
        """Offsets of the records in one answer."""
        return [record for record, _ in contents(self.read(offset, **how))]

    def read_all(self, offset: int = 0, bytes_max: int = 300) -> list[int]:
        """As a consumer does that reads to the end."""
        found: list[int] = []
        while True:
            some = [at for at in self.offsets(offset, bytes_max=bytes_max) if at >= offset]
            if not some:
                return found
            found += some
            offset = some[-1] + 1


def contents(result: ReadResult) -> list[tuple[int, bytes | None]]:
    assert result.code is ErrorCode.NONE
    assert not result.spans
    records: list[tuple[int, bytes | None]] = []
    size = 0
    for piece in result.pieces:
        data = bytes_of(piece)
        size += len(data)
        check_batch(data)
        records += [(record.offset, record.value) for record in read_records(data)]
    assert size == result.size
    return records


def bytes_of(piece: FileSpan | Buffer) -> bytes:
    if isinstance(piece, (bytes, bytearray, memoryview)):
        return bytes(piece)
    return piece.file.pread(piece.size, piece.position)


def test_batches_go_whole_or_made_anew() -> None:
    viewed = Viewed().load()
    viewed.put("aa")  # 0
    whole = viewed.put("xx")  # 2
    viewed.put("axbxc")  # 4
    viewed.put("b")  # 9
    viewed.commit()
    viewed.examine(rebuilds=True)
    result = viewed.read(0)
    assert [offset for offset, _ in contents(result)] == [2, 3, 5, 7]
    first, made = result.pieces
    assert not isinstance(first, (bytes, bytearray, memoryview)), "as it lies in the file"
    assert first.base_offset == whole
    assert (result.high_watermark, result.last_stable_offset, result.aborted) == (8, 8, ())
    assert parse_header(bytes_of(made)).next_offset == 8, "one past its last match"
    assert result.record_count == 4
    assert viewed.offsets(4) == [5, 7]
    assert viewed.offsets(7) == [5, 7], "whole batches: the client passes over the first"


@pytest.mark.parametrize("codec", list(Codec))
def test_a_made_batch_keeps_its_codec(codec: Codec) -> None:
    viewed = Viewed().load()
    viewed.put("ax" * 20, codec=codec)
    viewed.commit()
    viewed.examine()
    (piece,) = viewed.read(0).pieces
    assert parse_header(bytes_of(piece)).codec is codec
    assert viewed.offsets() == list(range(1, 40, 2))


def test_every_position_up_to_the_bases_end_is_in_range() -> None:
    viewed = Viewed().load()
    viewed.put("xaaaa")
    viewed.commit()
    viewed.put("a")  # 5, which is not committed
    viewed.examine()
    for offset in range(1, 7):
        result = viewed.read(offset)
        assert (result.code, result.pieces) == (ErrorCode.NONE, ())
        assert result.high_watermark == offset, "beyond the last match a reader is at the end"
    assert viewed.read(7).code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_only_what_was_decided_and_not_aborted_is_shown_at_both_levels() -> None:
    viewed = Viewed().load()
    viewed.put("x", pid=1)  # 0
    viewed.put("x", pid=2)  # 1
    viewed.put("x")  # 2
    viewed.end(2, is_commit=True)  # 3
    viewed.commit()
    viewed.examine()
    assert viewed.read_all() == [], "the first transaction is not decided"
    assert viewed.read(0).high_watermark == 0
    viewed.end(1, is_commit=False)  # 4
    viewed.put("x", pid=1)  # 5
    viewed.put("ax")  # 6
    viewed.end(1, is_commit=True)  # 8
    viewed.commit()
    viewed.examine(rebuilds=True)
    for committed_only in (False, True):
        result = viewed.read(0, committed_only=committed_only)
        assert [offset for offset, _ in contents(result)] == [1, 2, 5, 7]
        assert result.aborted == ()


def test_a_fetch_waits_for_the_views_end() -> None:
    viewed = Viewed().load()
    waiter = Waiter()
    viewed.put("x")
    viewed.commit()
    viewed.examine()
    viewed.view.fetches.park(waiter)
    viewed.put("aaa")
    viewed.commit()
    viewed.examine()
    assert waiter.woken_count == 0, "nothing that it could read"
    viewed.put("ax")
    viewed.commit()
    viewed.examine()
    assert waiter.woken_count == 1


def test_it_is_known_that_the_index_is_behind() -> None:
    viewed = Viewed().load()
    viewed.put("xaa")
    viewed.commit()
    assert viewed.read(1).high_watermark == 3, "there may be matches below"
    viewed.examine()
    assert viewed.read(1).high_watermark == 1
    viewed.put("aaa")
    viewed.commit()
    viewed.view.base_moved()
    assert viewed.read(1).high_watermark == 1, "it is a moment behind"
    viewed.bench.clock.now_ms += NEAR_MS + 1
    assert viewed.read(1).high_watermark == 6, "and more than that"
    viewed.examine()
    assert viewed.read(1).high_watermark == 1


def test_an_index_that_is_always_a_little_behind_is_near() -> None:
    viewed = Viewed().load()
    viewed.commit()
    viewed.examine()
    for turn in range(20):
        start = viewed.view.examined_end
        viewed.put("aa")
        viewed.commit()
        viewed.view.base_moved()
        if turn:
            result = viewed.bench.partition.read(start, 1, committed_only=True)
            job = JudgeJob(result.spans, start, (), TAGGED)
            job.run()
            viewed.view.examined(job, Offset(start + 2))
        viewed.bench.clock.now_ms += NEAR_MS / 4
        assert viewed.view.examined_end == viewed.bench.partition.stable_end - 2
        assert viewed.view.readable_end == 0


def test_latest_waits_until_all_is_examined_that_was_stable_then() -> None:
    viewed = Viewed().load()
    viewed.put("xaa")
    viewed.commit()
    asked = viewed.view.list_offset(LATEST)
    assert asked.later is not None
    viewed.put("x")  # 3
    viewed.commit()
    result = viewed.bench.partition.read(Offset(0), 1, committed_only=True)
    job = JudgeJob(result.spans, 0, (), TAGGED)
    job.run()
    viewed.view.examined(job, Offset(3))
    assert asked.later.result() == OffsetResult(
        ErrorCode.NONE, Offset(1), leader_epoch=viewed.bench.replica.leader_epoch
    )
    viewed.examine()
    assert viewed.view.list_offset(LATEST).offset == 4


def test_latest_does_not_wait_for_ever() -> None:
    viewed = Viewed().load()
    viewed.put("x")
    viewed.commit()
    asked = viewed.view.list_offset(LATEST).later
    assert asked is not None
    viewed.bench.sleep(EXAMINED_WAIT_MS)
    assert asked.result().code is ErrorCode.OFFSET_NOT_AVAILABLE


def test_latest_is_not_told_by_who_was_replaced_meanwhile() -> None:
    viewed = Viewed().load()
    viewed.put("x")
    viewed.commit()
    asked = viewed.view.list_offset(LATEST).later
    assert asked is not None
    viewed.bench.replica.follow()
    viewed.view.base_moved()
    assert asked.result().code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert viewed.view.list_offset(LATEST).code is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_a_new_leader_says_nothing_of_the_end_before_its_term_is_committed() -> None:
    viewed = Viewed().load()
    viewed.put("x")
    viewed.commit()
    viewed.examine()
    viewed.bench.replica.is_writable = False
    assert viewed.view.list_offset(LATEST).code is ErrorCode.OFFSET_NOT_AVAILABLE


def test_a_follower_serves_what_it_examined_and_knows_to_be_committed() -> None:
    viewed = Viewed().load()
    viewed.put("x")
    viewed.put("x")
    viewed.commit()
    viewed.examine()
    viewed.bench.replica.follow()
    assert viewed.view.read(Offset(0), 1 << 20).code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert viewed.offsets(may_follow=True) == [0, 1]
    viewed.bench.replica.high_watermark = Offset(1)  # it was told so far in this term
    assert viewed.offsets(may_follow=True) == [0]
    assert viewed.view.readable_end == 1
    assert viewed.read(2, may_follow=True).code is ErrorCode.OFFSET_NOT_AVAILABLE


def test_the_start_follows_deleted_matches_alone() -> None:
    viewed = Viewed().load()
    viewed.put("a")  # 0
    viewed.put("x")  # 1
    viewed.put("aaaa")  # 2
    viewed.put("x")  # 6
    viewed.commit()
    viewed.examine()
    assert viewed.view.list_offset(EARLIEST).offset == 0
    viewed.bench.replica.start_at(1)
    assert viewed.view.start == 0, "no match is gone"
    assert viewed.offsets(0) == [1, 6]
    viewed.bench.replica.start_at(4)
    assert viewed.view.list_offset(EARLIEST).offset == 2
    assert viewed.read(1).code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert viewed.offsets(2) == [6]
    viewed.bench.replica.start_at(7)
    result = viewed.read(7)
    assert (result.code, result.log_start_offset, result.high_watermark) == (0, 7, 7)


def test_what_was_deleted_before_it_was_examined_may_have_matched() -> None:
    viewed = Viewed().load()
    viewed.put("aa")
    viewed.put("aa")
    viewed.commit()
    viewed.bench.replica.start_at(2)
    viewed.examine()
    assert (viewed.view.start, viewed.view.readable_end) == (2, 2)
    assert viewed.read(1).code is ErrorCode.OFFSET_OUT_OF_RANGE


def test_nothing_is_told_of_the_start_before_the_index_is_loaded() -> None:
    viewed = Viewed()
    viewed.put("xa")
    viewed.commit()
    viewed.bench.replica.start_at(1)
    assert viewed.read(0).code is ErrorCode.OFFSET_NOT_AVAILABLE
    assert viewed.view.list_offset(EARLIEST).code is ErrorCode.OFFSET_NOT_AVAILABLE
    result = viewed.read(1)
    assert (result.code, result.pieces, result.high_watermark) == (ErrorCode.NONE, (), 2)


def test_a_made_batch_is_kept_for_others_and_made_before_for_who_waits() -> None:
    viewed = Viewed().load()
    viewed.put("ax")
    viewed.commit()
    viewed.examine()
    first = viewed.view.read(Offset(0), 1 << 20, may_wait=False)
    assert isinstance(first.job, RebuildJob)
    first.job.run()
    viewed.view.prepared(first.job)
    assert viewed.view.read(Offset(0), 1 << 20, may_wait=False).pieces
    viewed.put("xa")
    viewed.commit()
    viewed.examine(rebuilds=True)
    assert viewed.view.read(Offset(2), 1 << 20, may_wait=False).pieces


def test_a_batch_of_which_nothing_can_be_kept_is_passed_over() -> None:
    viewed = Viewed().load()
    viewed.put("ax")
    viewed.put("xa")
    viewed.commit()
    viewed.examine()
    viewed.rebuilt.put(viewed.view.group, [(0, kept(b"no batch", TAGGED))])
    assert viewed.read_all() == [2]


def test_what_is_away_of_the_index_is_read_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a stretch of whole batches goes on in a block that is not in memory."""
    make_small(monkeypatch)
    viewed = Viewed().load()
    for marks in ("xx", "xx", "xx", "xx", "xx", "ax", "a", "xx", "xa", "xx", "xx", "xx", "xx"):
        viewed.put(marks)
    viewed.commit()
    viewed.examine()
    expected = viewed.read_all()
    index = viewed.view.view_index
    assert index is not None
    index.save()
    viewed.load()
    first = viewed.view.read(Offset(0), 1 << 20, may_wait=False)
    assert isinstance(first.job, BlockJob)
    assert not first.pieces
    assert viewed.read_all() == expected
    viewed.load()
    assert viewed.view.read(Offset(0), 1 << 20).job is None, "who may wait reads it itself"


def test_one_that_may_wait_makes_one_batch_itself() -> None:
    viewed = Viewed().load()
    for _ in range(3):
        viewed.put("ax")
    viewed.commit()
    viewed.examine()
    result = viewed.view.read(Offset(0), 1 << 20)
    assert result.job is None
    assert [offset for offset, _ in contents(result)] == [1]


def test_the_first_batch_goes_along_whatever_its_size() -> None:
    viewed = Viewed().load()
    for _ in range(4):
        viewed.put("xxx")
        viewed.put("axa")
    viewed.commit()
    viewed.examine()
    assert viewed.offsets(0, bytes_max=1) == [0, 1, 2]
    assert viewed.offsets(3, bytes_max=1) == [4]
    assert viewed.read(0, 1, at_least_one=False).pieces == ()
    assert viewed.read_all() == [0, 1, 2, 4, 6, 7, 8, 10, 12, 13, 14, 16, 18, 19, 20, 22]


def test_damage_waits_for_repair() -> None:
    viewed = Viewed().load()
    viewed.put("x")
    viewed.commit()
    viewed.examine()
    viewed.bench.replica.log.damaged = True
    assert viewed.read(0).code is ErrorCode.KAFKA_STORAGE_ERROR
    assert viewed.bench.replica.damage_count == 1


def test_a_view_that_is_gone_answers_who_waits() -> None:
    viewed = Viewed().load()
    viewed.put("xa")
    viewed.commit()
    waiter = Waiter()
    viewed.view.fetches.park(waiter)
    asked = viewed.view.list_offset(LATEST).later
    assert asked is not None
    viewed.view.close()
    assert waiter.woken_count == 1
    assert not viewed.view.serves_fetches
    assert asked.result().code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    for code in (
        viewed.read(0).code,
        viewed.view.list_offset(LATEST).code,
        viewed.view.end_offset_for_epoch(5).code,
    ):
        assert code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_who_waits_hears_of_another_leader_and_of_the_end_of_the_node() -> None:
    viewed = Viewed().load()
    viewed.commit()
    viewed.view.base_moved()
    waiter = Waiter()
    viewed.view.fetches.park(waiter)
    viewed.bench.replica.follow(None)
    viewed.view.base_moved()
    assert (waiter.woken_count, viewed.view.serves_fetches) == (1, False)
    viewed.bench.partition.stop_waiting()
    viewed.view.base_moved()
    assert (waiter.woken_count, viewed.view.fetches.is_over) == (2, True)


def test_epochs_are_the_bases() -> None:
    viewed = Viewed().load()
    viewed.put("xa")
    viewed.commit()
    viewed.examine()
    base = viewed.bench.partition
    for epoch in (1, 5, 6):
        assert viewed.view.end_offset_for_epoch(epoch) == base.end_offset_for_epoch(epoch)
    assert viewed.read(0, current_epoch=4).code is ErrorCode.FENCED_LEADER_EPOCH
    assert viewed.view.list_offset(LATEST, current_epoch=9).code is ErrorCode.UNKNOWN_LEADER_EPOCH
    diverging = viewed.read(5, last_fetched_epoch=5)
    assert diverging.diverging is not None


def test_times_are_looked_up_elsewhere() -> None:
    viewed = Viewed().load()
    viewed.commit()
    for timestamp in (5, MAX_TIMESTAMP):
        assert viewed.view.list_offset(timestamp).later is not None
    assert viewed.asked == [(viewed.view, 5), (viewed.view, MAX_TIMESTAMP)]
    assert viewed.view.list_offset(-7).code is ErrorCode.UNSUPPORTED_VERSION


def test_what_is_kept_of_made_batches_is_bounded() -> None:
    kept = RebuiltBatches(2_000)
    for number in range(100):
        kept.put("v", [(number, bytes(300))])
        assert kept.size_bytes <= 2_000
        assert kept.get("v", number) is not None
    assert kept.get("v", 0) is None
    kept.put("v", [(7, bytes(5_000))])
    assert kept.get("v", 7) is not None, "the newest one stays"
    kept.put("w", [(8, b"b")])
    kept.forget("w")
    assert (kept.get("w", 8), kept.get("v", 7)) == (None, None)
    assert kept.size_bytes == 0


def start_before(viewed: Viewed) -> int:
    return viewed.bench.replica.log_start_offset


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.text("ax", min_size=1, max_size=6), st.integers(-1, 2)),
        st.tuples(st.just("end"), st.booleans(), st.integers(0, 2)),
        st.tuples(st.just("start"), st.integers(0, 8), st.just(0)),
        st.tuples(st.sampled_from(["commit", "examine", "read"]), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@given(STEPS)
def test_it_shows_what_a_filter_over_the_committed_records_gives(
    steps: list[tuple[str, Any, int]],
) -> None:
    viewed = Viewed().load()
    replica = viewed.bench.replica
    batches: list[tuple[int, int, int, bytes]] = []
    aborted: set[tuple[int, int]] = set()
    open_since: dict[int, int] = {}
    for kind, what, pid in steps:
        if kind == "put":
            base = viewed.put(what, pid=pid)
            open_since.setdefault(pid, base)
            batches.append((pid, base, base + len(what), replica.log.batches[-1][1]))
        elif kind == "end" and pid in open_since:
            viewed.end(pid, is_commit=what)
            since = open_since.pop(pid)
            if not what:
                aborted |= {(p, b) for p, b, _, _ in batches if p == pid and b >= since}
        elif kind == "start" and start_before(viewed) < what <= viewed.bench.partition.stable_end:
            replica.start_at(what)
        elif kind == "commit":
            viewed.commit()
        elif kind == "examine":
            viewed.examine()
        elif kind == "read":
            limit = min(viewed.view.examined_end, viewed.bench.partition.readable_end)
            start = replica.log_start_offset
            expected = [
                record.offset
                for p, base, end, data in batches
                if end <= limit and (p, base) not in aborted
                for record in read_records(data)
                if record.headers == (("tag", b"x"),) and record.offset >= start
            ]
            assert viewed.read_all(max(start, viewed.view.start)) == expected
            assert viewed.view.start <= viewed.view.readable_end
    viewed.bench.deadlines.expire(viewed.bench.clock.now_ms)


def test_no_batch_in_an_answer_is_without_a_match() -> None:
    viewed = Viewed().load()
    for marks in ("a", "x", "ax", "aaa", "xa", "xx", "a"):
        viewed.put(marks)
    viewed.commit()
    viewed.examine(rebuilds=True)
    pieces = [bytes_of(piece) for piece in viewed.read(0).pieces]
    assert [judge(piece, TAGGED) for piece in pieces] == [
        Judged(Kind.WHOLE, Offset(1), 1),
        Judged(Kind.WHOLE, Offset(3), 1),
        Judged(Kind.WHOLE, Offset(7), 1),
        Judged(Kind.WHOLE, Offset(10), 2),
    ]
