"""How a node fills the indexes of views with conditions, and what becomes of their files."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map

from jepsen_like.cluster.tasks import SimTasks
from jepsen_like.disk import SimDisk
from raftmq.codec import Codec
from raftmq.errors import ErrorCode
from raftmq.metadata.image import MetadataImage, PartitionImage, TopicImage, ViewImage
from raftmq.node import views as node_views
from raftmq.node.metrics.families import Ages, Scrape
from raftmq.node.metrics.partitions import GROUPS, LAG, LAG_SECONDS
from raftmq.node.views import NodeViews
from raftmq.partition.filtered import FilteredPartition
from raftmq.partition.look_ups import MAX_TIMESTAMP
from raftmq.partition.partition import EARLIEST, LATEST
from raftmq.partition.ports import NO_OFFSET, OffsetResult
from raftmq.partition.registry import PartitionRegistry
from raftmq.ports import DiskError, DiskFullError
from raftmq.records import (
    HEADER_SIZE,
    NewRecord,
    build_batch,
    parse_header,
    read_records,
    split_batches,
    sum_anew,
)
from raftmq.types import NodeId, Offset, TopicId, TopicPartition
from raftmq.views import index as index_module
from raftmq.views.batches import Judged, Kind
from raftmq.views.index import AwayError, BlockJob, ViewIndex
from tests.partition.test_partition_replica import SELF, started
from tests.views.test_index import make_small

VIEW_ID = TopicId(UUID(int=77))


class Run:
    """A node with one partition, and what fills views of it; time passes when a test says so."""

    def __init__(self, disk: SimDisk | None = None, condition: str = "tag = 'x'") -> None:
        self.node = started(disk)
        self.disk = self.node.disk
        self.threads = 0
        self.is_in_thread = False
        self._soon: list[tuple[float, Callable[[], None]]] = []
        source = self.node.partition.topic_id
        self.view = ViewImage("v", VIEW_ID, source, 0, condition, 1)
        group = self.node.partition.group
        partition = PartitionImage(0, group.creation_epoch, (NodeId(1),), (SELF,), (NodeId(1),))
        topic = TopicImage("t", source, (partition,), Map())
        self.image = MetadataImage(
            topics=Map({"t": topic}),
            topic_names=Map({source: "t"}),
            views=Map({"v": self.view}),
        )
        self.registry = PartitionRegistry()
        self.tasks = SimTasks(self._later, self._in_thread)
        self.views = NodeViews(
            lambda: self.image,
            self.tasks,
            self.node.deadlines,
            self.node.clock,
            self.disk,
            "data",
            self.registry,
        )
        self.tasks.spawn(self.views.run)
        self.registry.add(self.node.partition)

    def _later(self, after_ms: float, call: Callable[[], None]) -> None:
        self._soon.append((self.node.clock.now_ms + after_ms, call))

    def _in_thread(self, work: Callable[[], None]) -> None:
        self.threads += 1

        def run() -> None:
            self.is_in_thread = True
            work()
            self.is_in_thread = False

        self._soon.append((self.node.clock.now_ms, run))

    def without_view(self) -> MetadataImage:
        return attrs.evolve(self.image, views=Map())

    def open(self) -> FilteredPartition:
        self.views.opened(self.node.partition)
        return self.shown

    @property
    def shown(self) -> FilteredPartition:
        shown = self.views.find(VIEW_ID, self.node.partition)
        assert shown is not None
        return shown

    def go(self) -> None:
        """Do all that can be done now."""
        while True:
            due = [one for one in self._soon if one[0] <= self.node.clock.now_ms]
            self._soon = [one for one in self._soon if one[0] > self.node.clock.now_ms]
            for _, call in due:
                call()
            has_more = self.node.deadlines.expire(self.node.clock.now_ms)
            if not due and not has_more:
                return

    def sleep(self, milliseconds: float) -> None:
        end = self.node.clock.now_ms + milliseconds
        self.go()
        while True:
            times = [at for at, _ in self._soon]
            if self.node.deadlines.next_ms is not None:
                times.append(self.node.deadlines.next_ms)
            first = min(times, default=end)
            if first >= end:
                break
            self.node.clock.now_ms = max(self.node.clock.now_ms, first)
            self.go()
        self.node.clock.now_ms = end
        self.go()

    def put(self, marks: str, *, at_ms: int = 1_000_000, codec: Codec = Codec.NONE) -> None:
        records = [NewRecord(None, b"v" * 20, at_ms, (("tag", m.encode()),)) for m in marks]
        self.node.produce(memoryview(build_batch(records, codec=codec)))
        self.node.flush()

    def offsets(self, start: int = 0) -> list[int]:
        found: list[int] = []
        at = start
        while True:
            result = self.shown.read(Offset(at), 1 << 20)
            assert result.code is ErrorCode.NONE
            more = []
            for piece in result.pieces:
                is_made = isinstance(piece, (bytes, bytearray, memoryview))
                data = piece if is_made else piece.file.pread(piece.size, piece.position)  # type: ignore[union-attr]
                for _, batch in split_batches(data):  # type: ignore[arg-type]
                    more += [r.offset for r in read_records(batch) if r.offset >= at]
            if not more:
                return found
            found += more
            at = more[-1] + 1

    def time(self, timestamp: int) -> OffsetResult:
        result = self.shown.list_offset(timestamp)
        if result.later is not None:
            self.sleep(10.0)
            result = result.later.result()
        return result

    def again(self, *, loses_log: bool = False) -> Run:
        """The node starts again."""
        self.node.replica.log.close()
        self.tasks.kill()
        if loses_log:
            self.disk.remove_tree("data/t")
            self.disk.remove("data/state.journal")
        return Run(self.disk)

    @property
    def files(self) -> list[str]:
        """Below the folder of all views."""
        return [
            f"{view}/{group}/{name}"
            for view in self.disk.list("data/views")
            for group in self.disk.list(f"data/views/{view}")
            for name in self.disk.list(f"data/views/{view}/{group}")
        ]


def test_an_index_follows_the_log() -> None:
    run = Run()
    run.put("aax")
    run.open()
    run.go()
    assert run.offsets() == [2]
    for marks in ("a", "xx", "axa"):
        run.put(marks)
        run.go()
    assert run.offsets() == [2, 4, 5, 7]
    assert run.shown.list_offset(LATEST).offset == 8
    assert run.views.judged_count == 4
    assert run.views.matches_count == 4
    assert run.threads > 0, "no batch is judged on the loop"
    (row,) = run.views.rows()
    assert (row["end"], row["examined_end"], row["lacks_bytes"], row["trouble"]) == (8, 9, 0, "")


def test_no_folder_is_synced_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    for _ in range(1_200):  # more than an index keeps in memory
        run.put("x")
    synced: list[bool] = []
    for name in ("make_directories", "sync_directory"):
        real = getattr(run.disk, name)

        def call(path: str, real: Callable[[str], None] = real) -> None:
            if path.startswith("data/views"):
                synced.append(run.is_in_thread)
            real(path)

        monkeypatch.setattr(run.disk, name, call)
    run.open()
    run.go()
    assert len(run.files) == 1
    assert synced
    assert all(synced)


def test_a_topic_without_views_knows_nothing_of_them() -> None:
    run = Run()
    run.image = run.without_view()
    run.views.opened(run.node.partition)
    for _ in range(3):
        run.put("x")
    run.go()
    assert run.threads == 0
    assert len(run.node.partition.fetches) == 0
    assert run.files == []


def test_an_index_is_taken_up_where_its_files_end() -> None:
    run = Run()
    run.open()
    for _ in range(5):
        run.put("ax")
    run.go()
    run.sleep(node_views.SAVE_MS + 1)
    assert len(run.files) == 1
    again = run.again()
    again.open()
    again.go()
    assert again.views.judged_count == 0, "nothing is judged twice"
    again.put("x")
    again.go()
    assert (again.views.judged_count, again.offsets()) == (1, [1, 3, 5, 7, 9, 10])


@pytest.mark.parametrize("place", [0, 20, 40, 60, 90, -5])
def test_damaged_files_are_made_anew(place: int) -> None:
    run = Run()
    run.open()
    for _ in range(5):
        run.put("ax")
    run.go()
    run.sleep(node_views.SAVE_MS + 1)
    (name,) = run.files
    file = run.disk.open(f"data/views/{name}")
    at = place if place >= 0 else file.size() + place
    byte = file.pread(1, at)
    file.pwrite(bytes((byte[0] ^ 0x55,)), at)
    file.close()
    again = run.again()
    again.open()
    again.go()
    assert again.offsets() == [1, 3, 5, 7, 9]
    assert again.views.judged_count > 0 or place == 90


def test_an_index_of_another_log_is_made_anew() -> None:
    run = Run()
    run.open()
    for _ in range(5):
        run.put("ax")
    run.go()
    run.sleep(node_views.SAVE_MS + 1)
    between = run.again(loses_log=True)
    again = between.again()  # a later leader writes it
    for _ in range(6):
        again.put("xa")
    again.open()
    again.go()
    assert again.views.remade_count == 1
    assert again.offsets() == [0, 2, 4, 6, 8, 10]


def test_what_the_log_lost_is_not_believed() -> None:
    run = Run()
    run.open()
    for _ in range(5):
        run.put("ax")
    run.go()
    run.sleep(node_views.SAVE_MS + 1)
    again = run.again(loses_log=True)
    again.put("a")
    again.open()
    again.go()
    assert again.views.remade_count == 1
    assert again.offsets() == []
    assert again.shown.list_offset(LATEST).offset == 0


def test_the_log_start_moves_on_and_beyond_what_was_examined() -> None:
    run = Run()
    run.open()
    for marks in ("xa", "ax", "aa", "xx"):
        run.put(marks)
    run.go()
    run.node.partition.delete_records(2, 1000)
    run.node.flush()
    run.go()
    assert (run.shown.start, run.offsets(1)) == (1, [3, 6, 7])
    run.put("xx")
    run.node.partition.delete_records(9, 1000)
    run.node.flush()
    run.go()
    assert run.offsets(9) == [9]
    assert run.shown.read(Offset(5), 1).code is ErrorCode.OFFSET_OUT_OF_RANGE


# ---- a large index, and the loop ----


class Watch:
    """Notes what is done on the loop with files below `data/views`."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on_loop: list[str] = []
        for verb in ("open", "exists", "remove", "sync_directory"):
            real = getattr(run.disk, verb)

            def call(path: str, *, real: Any = real, verb: str = verb, **how: Any) -> Any:
                if path.startswith("data/views") and not run.is_in_thread:
                    self.on_loop.append(f"{verb} {path}")
                return real(path, **how)

            monkeypatch.setattr(run.disk, verb, call)


def large(monkeypatch: pytest.MonkeyPatch) -> tuple[Run, ViewIndex]:
    """60 batches that match, in blocks of 4 and files of 12, none of which is in memory."""
    make_small(monkeypatch)
    run = Run()
    run.open()
    for _ in range(60):
        run.put("x")
        run.go()
    index = run.shown.view_index
    assert index is not None
    assert len(run.files) == 5
    index._blocks.clear()
    return run, index


def move_start(run: Run, offset: int) -> None:
    """The log starts there now; nobody has looked yet."""
    run.node.partition.delete_records(offset, 1000)
    run.node.flush()
    assert run.node.replica.log_start_offset == offset


def test_no_index_is_read_or_written_on_the_loop_when_the_log_start_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, index = large(monkeypatch)
    watch = Watch(run, monkeypatch)
    move_start(run, 30)
    assert run.shown.start == 0, "as far as is known"
    result = run.shown.read(Offset(7), 1 << 20, may_wait=False)
    assert isinstance(result.job, BlockJob), "whether it lies below the start is not known"
    assert not result.pieces
    listed = run.shown.list_offset(EARLIEST, may_wait=False)
    assert isinstance(listed.job, BlockJob)
    run.go()
    assert (run.shown.start, index.start) == (30, 30)
    code = run.shown.read(Offset(7), 1 << 20, may_wait=False).code
    assert code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert run.shown.list_offset(EARLIEST, may_wait=False).offset == 30
    assert len(run.files) == 3, "files below are gone"
    assert watch.on_loop == []
    assert run.offsets(30) == list(range(30, 60))


def test_one_who_may_wait_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = large(monkeypatch)
    move_start(run, 30)
    assert run.shown.read(Offset(7), 1).code is ErrorCode.OFFSET_OUT_OF_RANGE
    move_start(run, 50)
    assert run.shown.list_offset(EARLIEST).offset == 50


def test_readers_that_wait_are_told_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for any topic: who waits below the new start hears that it is out of range."""
    run, _ = large(monkeypatch)
    woken: list[bool] = []
    waiter: Any = SimpleNamespace(woken=lambda: woken.append(True))
    run.shown.fetches.park(waiter)
    move_start(run, 30)
    woken.clear()
    run.go()
    assert woken
    run.shown.fetches.unpark(waiter)


@pytest.mark.parametrize("error", [DiskFullError, DiskError])
def test_files_stay_until_it_is_durable_where_the_view_starts(
    monkeypatch: pytest.MonkeyPatch, error: type[DiskError]
) -> None:
    run, index = large(monkeypatch)
    save_start = index.save_start

    def fail() -> None:
        raise error("the disk")

    monkeypatch.setattr(ViewIndex, "save_start", lambda _index: fail())
    move_start(run, 30)
    run.sleep(1.0)
    assert run.shown.start == 30, "what readers are told waits for no disk"
    assert len(run.files) == 5
    assert next(run.views.rows())["trouble"] == ("" if error is DiskFullError else "the disk")
    monkeypatch.setattr(ViewIndex, "save_start", lambda _index: save_start())
    move_start(run, 31)
    run.sleep(5_000.0)
    assert len(run.files) == 3
    assert next(run.views.rows())["trouble"] == ""


def test_what_is_damaged_below_the_log_start_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index knows nothing there any more, and the log has nothing: it begins anew."""
    run, index = large(monkeypatch)
    move_start(run, 30)
    run.go()
    index._blocks.clear()
    (name,) = (name for name in run.files if f"{24:020d}" in name)
    # The block of 28 to 31, of which only a part is still in the log.
    at = index_module.BLOCKS_POSITION + index_module.BLOCK_BYTES + 20
    run.disk.flip(f"data/views/{name}", at)
    turns = 0
    judge_on = run.views._judge_on

    async def counted(fill: node_views.Fill, stable: Offset) -> bool:
        nonlocal turns
        turns += 1
        assert turns < 1_000, "it goes round and round"
        return await judge_on(fill, stable)

    monkeypatch.setattr(run.views, "_judge_on", counted)
    result = run.shown.read(Offset(31), 1 << 20, may_wait=False)
    assert result.job is not None
    result.job.run()
    run.shown.prepared(result.job)
    assert run.shown.examined_end == 28
    run.put("x")
    run.go()
    assert run.shown.examined_end == 61
    assert run.offsets(30) == list(range(30, 61))


def collected(run: Run, offset: int) -> tuple[dict[str, float], int]:
    """Lag of a group in the view, and how much of it was work for a thread."""
    committed = {TopicPartition("v", 0): SimpleNamespace(offset=offset)}
    groups = SimpleNamespace(names=lambda: ["g"], groups={"g": SimpleNamespace(offsets=committed)})
    node: Any = SimpleNamespace(
        engine=SimpleNamespace(image=SimpleNamespace(groups=groups)),
        partitions=SimpleNamespace(registry=run.registry, views=run.views),
        config=SimpleNamespace(metrics_groups_max=3),
        plane=SimpleNamespace(clock=SimpleNamespace(wall_ms=lambda: 1_007_000)),
    )
    scrape, works = Scrape(Ages()), 0
    for work in GROUPS.collect(node, scrape):
        if work is not None:
            works += 1
            run.is_in_thread = True
            work()
            run.is_in_thread = False
    found = {metric.name: dict(scrape[metric].rows) for metric in (LAG, LAG_SECONDS)}
    return {name: rows[("g", "v", "0")] for name, rows in found.items() if rows}, works


def test_lag_in_a_view_reads_no_index_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    run, index = large(monkeypatch)
    watch = Watch(run, monkeypatch)
    expected = {"raftmq_group_lag_messages": 53.0, "raftmq_group_lag_seconds": 7.0}
    assert collected(run, 7) == (expected, 2), "of the index, and of the log"
    assert collected(run, 7) == (expected, 1)
    assert collected(run, 60)[1] == 1, "who lags behind nothing needs no look"
    assert watch.on_loop == []
    index._blocks.clear()
    run.disk.fail_when(lambda verb, path: verb == "read" and path.startswith("data/views"))
    assert collected(run, 7)[0] == {"raftmq_group_lag_messages": 53.0}, "its age is not known"
    run.disk.end_faults()
    assert collected(run, 7)[0] == expected


def test_a_large_index_does_not_hold_up_the_loop() -> None:
    """200,000 batches that match: what the loop does when the log start moves, and for a lag."""
    rows = 200_000
    index = ViewIndex(SimDisk(Random(0)), "data/views/v", b"v" * 16, Offset(0))
    for base in range(0, 2 * rows, 2):
        index.add(Offset(base), Offset(base + 1), Judged(Kind.WHOLE, Offset(base), 1))
    assert index.row_count == rows
    turns: list[float] = []
    for number in range(1, 200):
        start = Offset(number * (2 * rows // 200) + 1)
        began = time.thread_time()
        for look in (index.pass_start, index.next_match):
            try:
                look(start, may_wait=False)
            except AwayError as away:
                job = away.job
                turns.append(time.thread_time() - began)
                job.run()  # a worker's
                began = time.thread_time()
                index.take_block(job)
                look(start, may_wait=False)
        turns.append(time.thread_time() - began)
        assert index.start == start
        assert index.has_below(start) is False
    assert sum(turns) / len(turns) < 0.001, "of the processor, in one turn"


def test_times_are_those_of_matches() -> None:
    run = Run()
    run.open()
    for at_ms, marks in ((10, "ax"), (30, "aa"), (20, "xa"), (40, "ax"), (50, "a")):
        run.put(marks, at_ms=at_ms)
    run.go()
    found = {at_ms: run.time(at_ms) for at_ms in (0, 10, 11, 30, 40, 41, 60)}
    assert {at_ms: (int(r.offset), r.timestamp) for at_ms, r in found.items()} == {
        0: (1, 10),
        10: (1, 10),
        11: (4, 20),  # the base's first record of that time is 2, which is no match
        30: (7, 40),
        40: (7, 40),
        41: (NO_OFFSET, -1),
        60: (NO_OFFSET, -1),
    }
    assert all(result.code is ErrorCode.NONE for result in found.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("ax"), st.integers(0, 6)), min_size=1, max_size=4),
        max_size=10,
    ),
    st.integers(0, 12),
)
def test_the_newest_match_is_the_first_of_the_greatest_timestamp(
    batches: list[list[tuple[str, int]]], log_start: int
) -> None:
    """In whatever order times are, and after some of the log was deleted (KIP-734)."""
    run = Run()
    run.open()
    for batch in batches:
        records = [
            NewRecord(None, b"v", 1_000 + at, (("tag", mark.encode()),)) for mark, at in batch
        ]
        run.node.produce(memoryview(build_batch(records)))
        run.node.flush()
    rows = [row for batch in batches for row in batch]
    log_start = min(log_start, len(rows))
    run.node.partition.delete_records(log_start, 1000)
    run.node.flush()
    run.go()
    matches = [
        (1_000 + at, -offset)
        for offset, (mark, at) in enumerate(rows)
        if mark == "x" and offset >= log_start
    ]
    stamp, offset = max(matches, default=(-1, -NO_OFFSET))
    result = run.time(MAX_TIMESTAMP)
    assert (result.code, int(result.offset), result.timestamp) == (ErrorCode.NONE, -offset, stamp)


def test_a_look_up_waits_for_what_is_not_examined() -> None:
    run = Run()
    run.put("ax", at_ms=5)
    run.open()
    result = run.shown.list_offset(1)
    assert result.later is not None
    run.sleep(10.0)
    assert result.later.result().offset == 1


def test_a_view_that_is_deleted_takes_its_files_along() -> None:
    run = Run()
    run.open()
    run.put("x")
    run.go()
    run.sleep(node_views.SAVE_MS + 1)
    shown = run.shown
    before, run.image = run.image, run.without_view()
    run.views.image_changed(before, run.image)
    run.go()
    assert run.files == []
    assert not run.disk.exists(f"data/views/{VIEW_ID}")
    assert run.views.find(VIEW_ID, run.node.partition) is None
    assert not shown.serves_fetches
    assert len(run.node.partition.fetches) == 0, "nothing is woken by the base any more"
    run.put("x")
    run.go()


def test_a_view_that_comes_is_filled_from_the_logs_start() -> None:
    run = Run()
    after = run.image
    before = run.image = run.without_view()
    for _ in range(30):
        run.put("ax" * 10)
    run.image = after
    run.views.image_changed(before, after)
    run.go()
    assert len(run.offsets()) == 300


def test_a_replica_that_goes_takes_the_index_along_unless_it_comes_back() -> None:
    run = Run()
    run.open()
    run.put("x")
    run.sleep(node_views.SAVE_MS + 1)
    run.views.closed(run.node.partition, is_gone=False)
    run.go()
    assert len(run.files) == 1
    run.open()
    run.go()
    assert run.offsets() == [0]
    run.views.closed(run.node.partition, is_gone=True)
    run.go()
    assert run.files == []


def test_what_is_left_of_others_is_swept_away() -> None:
    run = Run()
    group = run.node.partition.group
    kept = f"{group.topic_id}-{group.partition}@{group.creation_epoch}"
    folders = [
        f"data/views/{VIEW_ID}/{kept}",
        f"data/views/{VIEW_ID}/{group.topic_id}-9@1",
        f"data/views/{UUID(int=5)}/{kept}",
    ]
    for folder in folders:
        run.disk.make_directories(folder)
        run.disk.open(f"{folder}/x.rows", create=True).close()
    done = run.tasks.spawn(run.views.sweep)
    run.go()
    assert done.is_done
    assert run.files == [f"{VIEW_ID}/{kept}/x.rows"]


def test_a_disk_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.put("x")
    failures = [DiskError("it failed"), DiskError("again")]

    def list_badly(path: str) -> list[str]:
        if failures:
            raise failures.pop()
        return SimDisk.list(run.disk, path)

    monkeypatch.setattr(run.disk, "exists", lambda path: True)
    monkeypatch.setattr(run.disk, "list", list_badly)
    run.open()
    run.sleep(1.0)
    assert next(run.views.rows())["trouble"] == "again"
    run.sleep(5_000.0)
    assert next(run.views.rows())["trouble"] == ""
    assert run.shown.examined_end == 1


def test_a_batch_that_cannot_be_opened_is_passed_over_and_counted() -> None:
    run = Run()
    run.open()
    records = [NewRecord(None, b"v" * 20, 5, (("tag", b"x"),)) for _ in range(3)]
    batch = build_batch(records)
    run.put("x")
    batch[HEADER_SIZE] ^= 0x3C  # its records are no records, though the sum is right
    sum_anew(batch)
    run.node.replica.append(batch, parse_header(batch))
    run.node.flush()
    run.put("x")
    run.go()
    assert run.offsets() == [0, 4]
    assert run.views.unreadable_count == 1
