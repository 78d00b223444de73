"""How a node fills the indexes of views with conditions, and what becomes of their files."""

from __future__ import annotations

from collections.abc import Callable
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
from raftmq.node.views import NodeViews
from raftmq.partition.filtered import FilteredPartition
from raftmq.partition.look_ups import MAX_TIMESTAMP
from raftmq.partition.partition import LATEST
from raftmq.partition.ports import NO_OFFSET, OffsetResult
from raftmq.partition.registry import PartitionRegistry
from raftmq.ports import DiskError
from raftmq.records import (
    HEADER_SIZE,
    NewRecord,
    build_batch,
    parse_header,
    read_records,
    sum_anew,
)
from raftmq.types import NodeId, Offset, TopicId
from tests.partition.test_partition_replica import SELF, started

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
                more += [r.offset for r in read_records(data) if r.offset >= at]  # type: ignore[arg-type]
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
