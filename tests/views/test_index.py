"""The index of a view against a list of rows; what a crash or damage leaves of its files."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jepsen_like.disk import SimDisk
from raftmq.ports import DiskError
from raftmq.types import Offset
from raftmq.views import index as module
from raftmq.views.batches import NOTHING, Judged, Kind
from raftmq.views.index import ROW_BYTES, AwayError, BlockJob, Row, ViewIndex

FOLDER = "/data/t-0/views/v"
VIEW = b"v" * 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 rows, files of 3 blocks."""
    monkeypatch.setattr(module, "ROWS_MAX", 4)
    monkeypatch.setattr(module, "BLOCKS_MAX", 3)
    monkeypatch.setattr(module, "BLOCK_BYTES", 8 + 4 * ROW_BYTES)
    monkeypatch.setattr(module, "BLOCKS_POSITION", module.HEADER_SIZE + 3 * 16)


def new_disk() -> SimDisk:
    return SimDisk(Random(0))


def opened(disk: SimDisk, log_start: int = 0, view: bytes = VIEW) -> ViewIndex:
    return ViewIndex(disk, FOLDER, view, Offset(log_start))


def judged(last_match: int, kind: Kind = Kind.WHOLE) -> Judged:
    return Judged(kind, Offset(last_match), 1)


def add(
    index: ViewIndex, base: int, end: int, last_match: int = -1, kind: Kind = Kind.WHOLE
) -> None:
    found = judged(last_match, kind) if last_match >= 0 else NOTHING
    index.add(Offset(base), Offset(end), found)


def fill(index: ViewIndex, count: int, start: int = 0) -> list[Row]:
    """So many batches of 10 offsets, every second with a match at its seventh."""
    rows = []
    for base in range(start, start + 10 * count, 10):
        kind = Kind.MIXED if base % 40 else Kind.WHOLE
        add(index, base, base + 10, base + 7 if base % 20 == 0 else -1, kind)
        if base % 20 == 0:
            rows.append(Row(Offset(base), Offset(base + 7), kind))
    return rows


def rows_of(index: ViewIndex, start: int = 0) -> list[Row]:
    return list(index.rows(Offset(start), Offset(1 << 62)))


def test_it_finds_the_next_match() -> None:
    index = opened(new_disk())
    assert (index.start, index.end, index.examined_end) == (0, 0, 0)
    assert index.next_match(Offset(0)) is None
    rows = fill(index, 60)
    assert (index.start, index.end, index.examined_end) == (0, 588, 600)
    assert rows_of(index) == rows
    for offset in range(600):
        expected = next((row for row in rows if row.last_match >= offset), None)
        assert index.next_match(Offset(offset)) == expected
    index.pass_to(Offset(1000))
    index.pass_to(Offset(900))
    assert (index.end, index.examined_end) == (588, 1000)


def test_a_row_takes_12_bytes() -> None:
    index = opened(new_disk())
    fill(index, 10)
    rest = index._parts[0].rest
    assert len(rest) * ROW_BYTES == sum(len(a) * a.itemsize for a in (rest.bases, rest.codes))


def test_what_was_saved_is_there_again() -> None:
    disk = new_disk()
    index = opened(disk)
    rows = fill(index, 60)
    index.close()
    again = opened(disk)
    assert rows_of(again) == rows
    assert (again.start, again.end, again.examined_end) == (0, 588, 600)
    assert rows_of(again, 300) == [row for row in rows if row.last_match >= 300]
    rows += fill(again, 20, 600)
    again.save()
    assert rows_of(opened(disk)) == rows
    assert len(disk.list(FOLDER)) == 4


def test_what_was_not_saved_is_examined_again() -> None:
    disk = new_disk()
    index = opened(disk)
    rows = fill(index, 60)
    assert opened(disk).examined_end == rows[27].base_offset + 10, "full blocks are written"


def test_far_offsets_and_long_batches() -> None:
    disk = new_disk()
    index = opened(disk, 1 << 60)
    last = (1 << 60) + (1 << 31) - 1
    add(index, 1 << 60, last + 1, last, Kind.MIXED)
    index.save()
    assert rows_of(opened(disk, 1 << 60)) == [Row(Offset(1 << 60), Offset(last), Kind.MIXED)]


def test_a_batch_on_both_sides_of_what_was_examined() -> None:
    index = opened(new_disk(), 5)
    add(index, 0, 10, 3)
    assert index.next_match(Offset(0)) is None, "its matches are gone"
    assert index.examined_end == 10
    other = opened(new_disk(), 5)
    add(other, 0, 10, 7)
    assert other.next_match(Offset(0)) == Row(Offset(0), Offset(7), Kind.WHOLE)


# ---- the log's start ----


@pytest.mark.parametrize("again", [False, True], ids=["open", "opened again"])
def test_the_start_is_one_past_the_last_match_that_is_gone(again: bool) -> None:
    disk = new_disk()
    index = opened(disk)
    fill(index, 60)
    index.save()
    for log_start, start in [(0, 0), (7, 7), (8, 8), (10, 8), (20, 8), (23, 23), (399, 388)]:
        index.drop_before(Offset(log_start))
        index = opened(disk, log_start) if again else index
        assert index.start == start, log_start
    assert disk.list(FOLDER)[0] == f"{240:020d}.rows", "files below are gone"
    assert index.next_match(Offset(388)) == Row(Offset(400), Offset(407), Kind.WHOLE)
    index.drop_before(Offset(600))
    index = opened(disk, 600) if again else index
    assert (index.start, index.end, index.examined_end) == (588, 588, 600)
    assert index.next_match(Offset(588)) is None


def test_a_log_that_starts_beyond_what_was_examined() -> None:
    disk = new_disk()
    index = opened(disk)
    fill(index, 60)
    index.save()
    again = opened(disk, 700)
    assert (again.start, again.end, again.examined_end) == (700, 700, 700)
    assert disk.list(FOLDER) == []
    rows = fill(again, 4, 700)
    assert rows_of(again) == rows


@pytest.mark.parametrize("verb", ["fdatasync", "read"])
@pytest.mark.parametrize("log_start", [410, 700])
def test_a_disk_that_fails_leaves_a_sound_index(verb: str, log_start: int) -> None:
    disk = new_disk()
    index = opened(disk)
    rows = fill(index, 60)
    index.save()
    disk.fail_when(lambda done, _path: verb == done)
    if log_start == 410:
        with pytest.raises(DiskError):
            index.drop_before(Offset(log_start))
    disk.end_faults()
    index.drop_before(Offset(log_start))
    assert rows_of(index, log_start) == [row for row in rows if row.last_match >= log_start]
    assert index.examined_end == max(600, log_start)
    assert rows_of(opened(disk, log_start), log_start) == rows_of(index, log_start)


def test_look_ups_see_all_rows_while_a_thread_saves() -> None:
    """Rows that a full disk held back become full blocks in one go."""
    disk = new_disk()
    disk.capacity_bytes = 0
    index = opened(disk)
    rows = fill(index, 22)
    disk.capacity_bytes = None
    found: list[list[Row | None]] = []

    def look(verb: str, path: str) -> None:
        if verb == "write":
            found.append([index.next_match(row.base_offset) for row in rows])

    disk.crash_when(look)
    index.save()
    disk.end_faults()
    assert len(found) > 3
    assert all(each == rows for each in found)


def test_a_full_disk_keeps_files_and_rows() -> None:
    disk = new_disk()
    index = opened(disk)
    rows = fill(index, 50)
    disk.capacity_bytes = disk.used_bytes()
    rows += fill(index, 30, 500)
    assert opened(disk).examined_end < 500, "nothing more could be written"
    assert [index.next_match(Offset(row.base_offset)) for row in rows[20:]] == rows[20:]
    disk.end_faults()
    index.save()
    assert rows_of(opened(disk)) == rows


# ---- cuts ----


@pytest.mark.parametrize("offset", [0, 1, 10, 20, 27, 28, 240, 241, 399, 400, 480, 500, 599])
@pytest.mark.parametrize("saved", [False, True])
def test_a_cut_is_durable_and_leaves_what_is_below(offset: int, saved: bool) -> None:
    disk = new_disk()
    index = opened(disk)
    rows = fill(index, 60)
    if saved:
        index.save()
    index.truncate(Offset(offset))
    kept = [row for row in rows if row.last_match < offset]
    assert rows_of(index) == kept
    assert index.examined_end <= offset
    disk.crash()
    again = opened(disk)
    assert rows_of(again) == kept[: len(rows_of(again))], "what the crash took was below the cut"
    assert again.examined_end <= index.examined_end


def test_no_row_of_before_a_cut_comes_back() -> None:
    """A block that a crash kept from being written is not the one that stood there before."""
    for seed in range(200):
        disk = SimDisk(Random(seed))
        index = opened(disk)
        fill(index, 24)
        index.save()
        index.truncate(Offset(20))
        for base in range(20, 240, 10):
            add(index, base, base + 10, base + 3)
        index.save()
        disk.crash()
        found = rows_of(opened(disk))
        assert [row.last_match % 10 for row in found[1:]] == [3] * (len(found) - 1)


# ---- damage ----


def test_a_damaged_block_is_let_go_of_with_all_behind_it() -> None:
    disk = new_disk()
    index = opened(disk)
    rows = fill(index, 80)
    index.save()
    (first, second, *_) = disk.list(FOLDER)
    disk.flip(f"{FOLDER}/{second}", module.BLOCKS_POSITION + module.BLOCK_BYTES + 20)
    again = opened(disk)
    assert again.examined_end == 800, "blocks are checked when they are read"
    assert rows_of(again) == rows[:16]
    assert again.examined_end == rows[15].last_match + 1
    assert disk.list(FOLDER) == [first, second]
    again.save()
    assert rows_of(opened(disk)) == rows[:16]
    last = again.examined_end - again.examined_end % 10
    for base in range(last, 800, 10):
        add(again, base, base + 10, base + 7 if base % 20 == 0 else -1)
    assert [row.last_match for row in rows_of(again)] == [row.last_match for row in rows]


def test_damage_is_met_wherever_it_is_read() -> None:
    disk = new_disk()
    index = opened(disk)
    rows = fill(index, 80)
    index.save()
    disk.flip(f"{FOLDER}/{0:020d}.rows", module.BLOCKS_POSITION + 20)
    again = opened(disk, 30)
    assert (again.start, again.examined_end) == (30, 30)
    disk = new_disk()
    index = opened(disk)
    fill(index, 80)
    index.save()
    disk.flip(f"{FOLDER}/{0:020d}.rows", module.BLOCKS_POSITION + module.BLOCK_BYTES + 20)
    again = opened(disk)
    again.truncate(Offset(110))
    assert rows_of(again) == rows[:4]


@pytest.mark.parametrize("position", [0, 4, 8, 30, 76, 79])
def test_a_damaged_header_says_nothing(position: int) -> None:
    disk = new_disk()
    index = opened(disk)
    rows = fill(index, 60)
    index.save()
    disk.flip(f"{FOLDER}/{disk.list(FOLDER)[1]}", position)
    again = opened(disk)
    assert rows_of(again) == rows[:12]
    assert len(disk.list(FOLDER)) == 1


def test_a_table_that_was_lost_is_made_again() -> None:
    disk = new_disk()
    index = opened(disk)
    rows = fill(index, 60)
    index.save()
    for name in disk.list(FOLDER):
        disk.flip(f"{FOLDER}/{name}", module.HEADER_SIZE + 3)
    assert rows_of(opened(disk)) == rows
    disk.flip(f"{FOLDER}/{0:020d}.rows", module.BLOCKS_POSITION + module.BLOCK_BYTES + 20)
    assert rows_of(opened(disk)) == rows[:4]


def test_rows_of_another_view_are_not_believed() -> None:
    disk = new_disk()
    index = opened(disk)
    fill(index, 60)
    index.save()
    assert rows_of(opened(disk, view=b"w" * 16)) == []
    assert disk.list(FOLDER) == []


def test_a_file_that_is_missing_or_cut_off() -> None:
    disk = new_disk()
    index = opened(disk)
    rows = fill(index, 60)
    index.save()
    first, second, _ = disk.list(FOLDER)
    disk.overwrite(f"{FOLDER}/{second}", disk.content(f"{FOLDER}/{second}")[:50])
    assert rows_of(opened(disk)) == rows[:12]
    disk.remove(f"{FOLDER}/{first}")
    assert rows_of(opened(disk)) == []


def test_one_of_a_newer_format_is_made_again() -> None:
    """As after a downgrade: everything in it is in the log."""
    disk = new_disk()
    index = opened(disk)
    fill(index, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "VERSION", 2)
        index.save()
    again = opened(disk)
    assert (rows_of(again), again.examined_end) == ([], 0)
    fill(again, 3)
    again.save()
    assert rows_of(opened(disk)) == rows_of(again) != []


def test_a_view_that_is_gone_leaves_no_files() -> None:
    disk = new_disk()
    index = opened(disk)
    index.remove()
    fill(index, 60)
    index.save()
    index.remove()
    assert not disk.exists(FOLDER)


def test_a_cut_that_the_disk_refuses_is_said() -> None:
    disk = new_disk()
    index = opened(disk)
    fill(index, 20)
    index.save()
    disk.fail_when(lambda verb, _path: verb == "fdatasync")
    with pytest.raises(DiskError):
        index.truncate(Offset(50))


def lacking(index: ViewIndex, offset: int) -> BlockJob:
    """What a look-up lacks that may not wait."""
    with pytest.raises(AwayError) as away:
        index.next_match(Offset(offset), may_wait=False)
    return away.value.job


def test_who_may_not_wait_is_told_which_block_is_away() -> None:
    disk = new_disk()
    index = opened(disk)
    rows = fill(index, 80)
    index.save()
    again = opened(disk)
    for number in (0, 9, 38, 20, 13, 30):
        job = lacking(again, rows[number].base_offset)
        job.run()
        again.take_block(job)
        assert again.next_match(rows[number].base_offset, may_wait=False) == rows[number]
    assert again.next_match(Offset(1 << 40), may_wait=False) is None, "nothing has to be read"
    fill(again, 4, 800)
    assert again.next_match(Offset(801), may_wait=False) is not None, "nor of the last block"


@pytest.mark.parametrize("is_read_before", [True, False])
def test_a_block_that_was_cut_meanwhile_is_not_taken(is_read_before: bool) -> None:
    disk = new_disk()
    index = opened(disk)
    fill(index, 80)
    index.save()
    again = opened(disk)
    job = lacking(again, 0)
    if is_read_before:
        job.run()
    again.truncate(Offset(20))
    for base in range(20, 200, 20):
        add(again, base, base + 20, base + 5)
    again.save()
    job.run()
    again.take_block(job)
    assert [row.last_match for row in rows_of(again)][:3] == [7, 25, 45]


def test_a_damaged_block_that_a_worker_read_goes_with_all_behind_it() -> None:
    disk = new_disk()
    index = opened(disk)
    rows = fill(index, 80)
    index.save()
    disk.flip(f"{FOLDER}/{0:020d}.rows", module.BLOCKS_POSITION + module.BLOCK_BYTES + 20)
    again = opened(disk)
    job = lacking(again, rows[5].base_offset)
    job.run()
    again.take_block(job)
    assert rows_of(again) == rows[:4]
    assert again.examined_end == rows[3].last_match + 1


# ---- against a naive model ----


a_batch = st.tuples(st.integers(1, 9), st.sampled_from(Kind), st.integers(0, 8), st.integers(0, 2))


class Model(RuleBasedStateMachine):
    """A log of batches that grows, starts later and is cut; the index follows, and machines stop.

    The model is the list of all batches of the log and what is in them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        make_small(self.patch)
        self.disk = new_disk()
        self.batches: list[tuple[int, int, Judged]] = []
        self.log_start = self.log_end = self.saved = 0
        self.salt = 0
        self.jobs: list[BlockJob] = []

    def teardown(self) -> None:
        self.patch.undo()

    @initialize(start=st.sampled_from([0, 7, 1 << 40]))
    def begin(self, start: int) -> None:
        self.log_start = self.log_end = start
        self.index = opened(self.disk, start)

    def follow(self) -> None:
        """Examine what is not examined yet."""
        for base, end, found in self.batches:
            if end > self.index.examined_end:
                self.index.add(Offset(base), Offset(end), found)
        self.index.pass_to(Offset(self.log_end))

    @rule(
        sizes=st.lists(
            st.tuples(
                st.integers(1, 9), st.sampled_from(Kind), st.integers(0, 8), st.integers(0, 2)
            ),
            max_size=9,
        )
    )
    def grow(self, sizes: list[tuple[int, Kind, int, int]]) -> None:
        for size, kind, last, gap in sizes:
            base = self.log_end + gap
            self.log_end = base + size
            last_match = base + size - 1 if kind is Kind.WHOLE else base + min(last, size - 1)
            found = NOTHING if kind is Kind.NONE else judged(last_match, kind)
            self.batches.append((base, self.log_end, found))
        self.follow()

    @rule(part=st.floats(0, 1))
    def start_later(self, part: float) -> None:
        ends = [base for base, _, _ in self.batches if base >= self.log_start] + [self.log_end]
        self.log_start = max(self.log_start, ends[int(part * (len(ends) - 1))])
        self.index.drop_before(Offset(self.log_start))

    @precondition(lambda self: self.batches)
    @rule(part=st.floats(0, 1))
    def cut(self, part: float) -> None:
        bases = [base for base, _, _ in self.batches if base >= self.log_start]
        if bases:
            self.log_end = bases[int(part * (len(bases) - 1))]
            self.batches = [each for each in self.batches if each[0] < self.log_end]
            self.index.truncate(Offset(self.log_end))

    @rule()
    def save(self) -> None:
        self.index.save()

    @rule(part=st.floats(0, 1), is_read_at_once=st.booleans())
    def ask(self, part: float, is_read_at_once: bool) -> None:
        try:
            self.index.next_match(Offset(int(part * self.log_end)), may_wait=False)
        except AwayError as away:
            self.jobs.append(away.job)
            if is_read_at_once:
                away.job.run()

    @rule()
    def take(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            if job.index is self.index:
                if job.rows is None:
                    job.run()
                job.index.take_block(job)
        self.follow()

    @rule(seed=st.integers(0, 1 << 30), is_power_loss=st.booleans())
    def stop(self, seed: int, is_power_loss: bool) -> None:
        before = self.index.start
        if is_power_loss:
            self.disk.crash(Random(seed))
        self.index = opened(self.disk, self.log_start)
        self.index.truncate(Offset(self.log_end))
        self.follow()
        assert self.index.start <= max(before, self.log_start)

    @rule(at=st.integers(0, 1000), seed=st.integers(0, 1 << 30))
    def damage(self, at: int, seed: int) -> None:
        files = [path for path, size in self.disk.files(FOLDER).items() if size]
        if files:
            path = files[seed % len(files)]
            self.disk.flip(path, at % len(self.disk.content(path)))
            if seed % 2:
                self.index = opened(self.disk, self.log_start)
                self.index.truncate(Offset(self.log_end))

    @invariant()
    def finds_every_match(self) -> None:
        if not hasattr(self, "index"):
            return
        for _ in range(20):  # damage that is met is mended by another look at the log
            found = [row for row in rows_of(self.index) if row.last_match >= self.log_start]
            if self.index.examined_end >= self.log_end:
                break
            self.follow()
        expected = [
            Row(Offset(base), found.last_match, found.kind)
            for base, _, found in self.batches
            if found.kind is not Kind.NONE and found.last_match >= self.log_start
        ]
        assert found == expected
        if expected:
            assert self.index.end == expected[-1].last_match + 1
        assert self.index.start <= self.log_start
        gone = [f.last_match for _, _, f in self.batches if 0 <= f.last_match < self.log_start]
        assert not gone or self.index.start > max(gone)


TestModel = Model.TestCase
TestModel.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
