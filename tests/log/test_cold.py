"""What left memory is read by a worker first: the loop itself never waits for the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jepsen_like.disk import SimDisk
from raftmq.log.cold import WarmJob
from raftmq.log.model import LogConfig
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.segment import Segment
from raftmq.ports import File
from raftmq.types import Offset
from tests.log.helpers import batch, filled, open_log, sim_disk, span_bytes

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
        if not isinstance(job, WarmJob):
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
