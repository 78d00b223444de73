"""What left memory is read by a worker first: the loop itself never waits for the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jepsen_like.disk import SimDisk
from raftmq.log.model import LogConfig
from raftmq.log.prefetch import IndexJob, WarmJob
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.segment import Segment
from raftmq.ports import DiskError, File
from raftmq.types import Offset
from tests.log.helpers import append, batch, filled, flush, open_log, sim_disk, span_bytes

PAGE = 4096
CONFIG = LogConfig(segment_bytes=400_000, index_interval_bytes=4096, bare_reserve_bytes=8192)


class ColdFile:
    """A file that knows which of its pages are in memory, and who may wait for the others."""

    def __init__(self, disk: ColdDisk, file: File) -> None:
        self._disk = disk
        self._file = file
        self.path = file.path

    def is_cached(self, position: int, size: int) -> bool:
        return not self._missing(position, size)

    def pread(self, size: int, position: int) -> bytes:
        disk = self._disk
        size = min(size, max(0, self._file.size() - position))
        missing = self._missing(position, size)
        if missing:
            assert not disk.is_loop, f"the loop waits for {self.path} at {position}"
            disk.waits += 1
            disk.pages |= missing
        return self._file.pread(size, position)

    def _missing(self, position: int, size: int) -> set[tuple[str, int]]:
        wanted = range(position // PAGE, -(-(position + size) // PAGE))
        return {(self.path, page) for page in wanted} - self._disk.pages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class ColdDisk:
    """A disk whose page cache a test empties."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self.pages: set[tuple[str, int]] = set()
        self.is_loop = False
        self.waits = 0

    def open(self, path: str, *, create: bool = False) -> ColdFile:
        return ColdFile(self, self._disk.open(path, create=create))

    @contextmanager
    def on_the_loop(self) -> Iterator[None]:
        self.is_loop = True
        try:
            yield
        finally:
            self.is_loop = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


def cold_log(batches: int = 300) -> tuple[ColdDisk, ReplicatedLog]:
    """A log of several segments of which nothing is in memory."""
    inner = sim_disk()
    filled(inner, batches, CONFIG, count=3, size=1000)
    disk = ColdDisk(inner)
    log = open_log(disk, CONFIG)  # type: ignore[arg-type]  # what it lacks comes from the inner one
    disk.pages.clear()
    for segment in log._segments.all:
        segment.verified.clear()
    log._segments._shared.indexes._tables.clear()
    log._segments._shared.indexes.used_bytes = 0
    return disk, log


def serve(disk: ColdDisk, log: ReplicatedLog, offset: int, size: int) -> tuple[bytes, int]:
    """What a fetch does: jobs until nothing is cold, then the look-up; and how many jobs."""
    jobs = 0
    while True:
        with disk.on_the_loop():
            job: Any = log.read_ahead(Offset(offset), size)
            if job is None:
                job = log.needs_verification(Offset(offset), 2 * size, size)
            if job is None:
                spans = log.locate(Offset(offset), size, log.log_end_offset, may_check=False)
                return span_bytes(spans), jobs
        jobs += 1
        assert jobs < 5, "a worker's reading helps nobody"
        job.run()
        if isinstance(job, IndexJob):
            job.take()
        elif not isinstance(job, WarmJob):
            log.checked(job)


@pytest.mark.parametrize("offset", [0, 1, 299, 300, 601, 899])
@pytest.mark.parametrize("size", [1, 5_000, 150_000, 1 << 20])
def test_the_loop_never_waits(offset: int, size: int) -> None:
    disk, log = cold_log()
    data, jobs = serve(disk, log, offset, size)
    first = offset // 3 * 3
    expected = batch(first, 1, 3, 1000, timestamp=1000 + 10 * (first // 3))
    assert data.startswith(expected)
    # The index, the bytes, their check; where a file begins no index is needed.
    assert jobs == (2 if offset in (0, 899) else 3)
    assert disk.waits


def test_who_reads_on_needs_no_index() -> None:
    disk, log = cold_log()
    data, _ = serve(disk, log, 0, 50_000)
    read = len(data) // len(batch(0, 1, 3, 1000)) * 3
    disk.pages.clear()
    data, jobs = serve(disk, log, read, 50_000)
    assert jobs == 1, "the bytes; their check went on ahead"
    assert len(data) > 45_000


def test_what_is_in_memory_needs_no_worker() -> None:
    inner = sim_disk()
    disk = ColdDisk(inner)
    log = filled(disk, 50, CONFIG)  # type: ignore[arg-type]  # as above
    disk.pages.clear()
    assert log.read_ahead(Offset(3), 1000) is None, "a recent batch was written just now"
    assert log.read_ahead(log.log_end_offset, 1000) is None


def test_a_missing_segment_is_not_waited_for() -> None:
    disk, log = cold_log()
    segment: Segment = log._segments.all[0]
    segment.is_missing = True
    with disk.on_the_loop():
        assert log.read_ahead(Offset(0), 1000) is None


def test_an_index_that_is_gone_is_nobodys_to_read() -> None:
    disk, log = cold_log()
    index = log._segments.all[0].offset_index
    assert index.unloaded_file() is not None
    index._files.forget(index.path)
    disk.remove(index.path)
    assert index.unloaded_file() is None


def test_damage_ahead_is_no_reason_to_check_again() -> None:
    disk, log = cold_log()
    segment: Segment = log._segments.all[0]
    position = next(p for p, h in segment.headers_from(30) if h.base_offset == 30)
    segment.file.pwrite(b"damaged", position + 100)
    data, _ = serve(disk, log, 0, 100_000)
    assert len(data) == position
    _, jobs = serve(disk, log, 0, 100_000)
    assert jobs == 0


def look_up(disk: ColdDisk, log: ReplicatedLog, stamp: int | None) -> tuple[Any, list[type]]:
    """What ListOffsets does: jobs until nothing is cold, then the look-up; and the jobs."""
    jobs: list[type] = []
    while True:
        with disk.on_the_loop():
            job: Any = log.lookup_ahead(stamp, log.log_end_offset)
            if job is None:
                if stamp is None:
                    return log.max_timestamp(log.log_end_offset), jobs
                return log.offset_for_timestamp(stamp, log.log_end_offset), jobs
        jobs.append(type(job))
        assert len(jobs) < 5, "a worker's reading helps nobody"
        job.run()
        if isinstance(job, IndexJob):
            with disk.on_the_loop():
                assert not job.take(), "nothing is damaged"


def numbers_of(log: ReplicatedLog) -> list[int]:
    """The first batch of each segment, and some within."""
    firsts = [segment.base_offset // 3 for segment in log._segments.all]
    return sorted({*firsts, 1, 50, 99, 101, 298, 299})


def test_the_loop_never_waits_for_a_look_up_by_time() -> None:
    _, whole = cold_log()
    for number in numbers_of(whole):
        disk, log = cold_log()
        found, jobs = look_up(disk, log, 1001 + 10 * number)
        assert found == (1001 + 10 * number, 3 * number + 1, 1)
        assert jobs in ([WarmJob, WarmJob], [WarmJob]), (
            "indexes where they are not held, then bytes"
        )
    disk, log = cold_log()
    found, _ = look_up(disk, log, None)
    assert found == (1002 + 10 * 299, 899, 1)
    assert look_up(disk, log, 1_000_000) == (None, [])


def lose_indexes(disk: ColdDisk, segment: Segment, *, damaged: bool = False) -> None:
    for index in (segment.offset_index, segment.time_index):
        if damaged:
            index.file().pwrite(b"damaged", 70)
        else:
            index._files.forget(index.path)
            disk.remove(index.path)
    disk.pages.clear()


@pytest.mark.parametrize("damaged", [False, True])
def test_lost_indexes_are_made_by_a_worker(damaged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole = cold_log()
    twin = whole._segments.all[0]
    twin.rebuild()
    pairs = twin.time_index.pairs(), twin.offset_index.pairs()
    monkeypatch.setattr(Segment, "rebuild", lambda _: pytest.fail("rebuilt on the loop"))
    disk, log = cold_log()
    segment = log._segments.all[0]
    lose_indexes(disk, segment, damaged=damaged)
    found, jobs = look_up(disk, log, 1001 + 10 * 20)
    assert found == (1201, 61, 1)
    assert IndexJob in jobs
    assert (segment.time_index.pairs(), segment.offset_index.pairs()) == pairs
    again = open_log(disk, CONFIG)  # type: ignore[arg-type]  # as above
    assert not again.recovery.damaged
    assert again.offset_for_timestamp(1201, again.log_end_offset) == found


def test_a_fetch_lets_a_worker_make_lost_indexes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Segment, "rebuild", lambda _: pytest.fail("rebuilt on the loop"))
    disk, log = cold_log()
    lose_indexes(disk, log._segments.all[0])
    data, _ = serve(disk, log, 61, 5_000)
    assert data.startswith(batch(60, 1, 3, 1000, timestamp=1200))


def test_what_was_appended_meanwhile_is_in_the_new_indexes() -> None:
    inner = sim_disk()
    disk = ColdDisk(inner)
    log = filled(disk, 100, CONFIG, count=3, size=1000)  # type: ignore[arg-type]  # as above
    segment = log._segments.all[-1]
    pairs = segment.offset_index.count
    job = IndexJob.of(segment)
    for number in range(100, 120):
        append(log, 1, 3, 1000, timestamp=1000 + 10 * number)
    flush(log)
    job.run()
    assert not job.take()
    assert segment.offset_index.count > pairs
    assert segment.max_timestamp == 1000 + 10 * 119 + 2
    end = log.log_end_offset
    for number in (90, 100, 119):
        stamp = 1001 + 10 * number
        assert log.offset_for_timestamp(stamp, end) == (stamp, 3 * number + 1, 1)


def test_a_worker_that_looked_at_what_was_cut_since_is_not_heard() -> None:
    _, log = cold_log()
    segment = log._segments.all[0]
    job = IndexJob.of(segment)
    job.run()
    segment.version += 1
    job.twin.max_timestamp = 7
    assert not job.take()
    assert segment.max_timestamp != 7


def test_damage_that_a_worker_meets_is_remembered() -> None:
    _, log = cold_log()
    segment = log._segments.all[0]
    position = next(p for p, h in segment.headers_from(30) if h.base_offset == 30)
    segment.file.pwrite(b"damaged", position + 100)
    job = IndexJob.of(segment)
    job.run()
    assert job.take()
    assert log.damaged == [(30, 33)]


@pytest.mark.parametrize("what", ["remove", "release"])
def test_a_worker_that_looked_at_what_is_gone_is_not_heard(what: str) -> None:
    """Retention, repair or the end of the topic came first; files of its names may be others'."""
    disk, log = cold_log()
    segment = log._segments.all[0]
    lose_indexes(disk, segment)
    job = IndexJob.of(segment)
    job.run()
    getattr(segment, what)()
    assert not job.take()
    for index in (segment.offset_index, segment.time_index):
        assert not disk.exists(index.path), "an index outlives its segment"


def test_who_is_second_does_not_look_again() -> None:
    disk, log = cold_log()
    segment = log._segments.all[0]
    first, second = IndexJob.of(segment), IndexJob.of(segment)
    first.run()
    assert not first.take()
    disk.pages.clear()
    waits = disk.waits
    second.run()
    assert disk.waits == waits, "it would read the whole segment"
    assert not second.take()


def test_a_failing_disk_leaves_the_end_of_the_segment_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next batch is written there."""
    inner = sim_disk()
    log = filled(inner, 100, CONFIG, count=3, size=1000)
    segment = log._segments.all[-1]
    job = IndexJob.of(segment)
    for number in range(100, 120):
        append(log, 1, 3, 1000, timestamp=1000 + 10 * number)
    job.run()
    size, end = segment.size, segment.end_offset

    def fail(*_: object) -> Any:
        raise DiskError("the device failed")

    with monkeypatch.context() as patch:
        patch.setattr("raftmq.log.segment.walk_headers", fail)
        assert not job.take(), "who settles a promise raises nothing"
    assert (segment.size, segment.end_offset) == (size, end)
