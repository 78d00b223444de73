"""Stored batches for a replica that is far behind: found, checked and summed, never read here."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from jepsen_like.disk import SimDisk
from raftmq.log.model import DamagedError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.shared import Shared
from raftmq.log.verification import STORED_BATCHES_MAX, StoredJob
from raftmq.types import RaftIndex
from tests.log.helpers import SMALL, append, elect, flush, open_log, sim_disk


def reopened(disk: SimDisk) -> ReplicatedLog:
    """The same log with nothing in memory."""
    return open_log(disk, claimed=0, shared=Shared.make(disk, recent_bytes_max=0))


def run(log: ReplicatedLog, start: int, bytes_max: int = 1 << 20) -> StoredJob:
    job = log.stored_job(RaftIndex(start), bytes_max)
    assert job is not None
    job.run()
    return job


def read_all(log: ReplicatedLog, start: int = 0, bytes_max: int = 700) -> list[bytes]:
    """Every entry by chunks: payloads of bare ones, bytes of batches."""
    found: list[bytes] = []
    at = start
    while at < log.end_index:
        bare = log.bare_run(RaftIndex(at))
        if bare:
            found += [bytes(entry.payload) for entry in bare]
            at = bare[-1].end
            continue
        job = run(log, at, bytes_max)
        assert log.checked(job) == []
        assert job.batches
        span = job.span
        data = span.file.pread(span.size, span.position)
        assert crc32c(data) == job.checksum
        position = 0
        for base, end, _, size in job.batches:
            assert base == log.offset_of(RaftIndex(at))
            found.append(data[position : position + size])
            position += size
            at += end - base
    return found


def test_chunks_are_what_entries_would_be() -> None:
    disk = sim_disk()
    log = open_log(disk)
    elect(log, 1)
    flush(log)
    for size in (20, 500, 900, 10, 3000, 40):
        append(log, 1, 3, size)
        flush(log)
    elect(log, 2)
    elect(log, 3)
    flush(log)
    for _ in range(20):
        append(log, 3, 1, 30)
        flush(log)
    expected = [bytes(entry.payload) for entry in log.entries(RaftIndex(0), 1 << 30)]
    log.close()
    log = reopened(disk)
    assert read_all(log) == expected
    assert read_all(log, 1, 1 << 20) == expected[1:]
    log.close()


def test_a_chunk_is_bounded_in_batches_and_holds_one_at_least() -> None:
    disk = sim_disk()
    log = open_log(disk, SMALL.__class__())
    elect(log, 1)
    flush(log)
    for _ in range(STORED_BATCHES_MAX + 5):
        append(log, 1, 1, 10)
    flush(log)
    assert len(run(log, 1).batches) == STORED_BATCHES_MAX
    assert len(run(log, 1, bytes_max=1).batches) == 1
    log.close()


def test_what_is_at_hand() -> None:
    disk = sim_disk()
    log = open_log(disk)
    elect(log, 1)
    flush(log)
    append(log, 1)
    append(log, 1)
    assert log.is_at_hand(RaftIndex(0))
    assert log.is_at_hand(RaftIndex(2))
    flush(log)
    log.close()
    log = reopened(disk)
    assert not log.is_at_hand(RaftIndex(0))
    assert not log.is_at_hand(RaftIndex(2))
    assert log.is_at_hand(log.end_index)
    assert log.stored_job(log.end_index, 100) is None
    log.close()


def test_damage_is_reported_and_never_in_a_chunk() -> None:
    disk = sim_disk()
    log = open_log(disk)
    elect(log, 1)
    flush(log)
    for _ in range(6):
        append(log, 1, 1, 100)
    flush(log)
    job = run(log, 4)
    position = job.span.position + 80
    file = job.span.file
    file.pwrite(bytes([file.pread(1, position)[0] ^ 1]), position)
    first = run(log, 1)
    assert [base for base, *_ in first.batches] == [0, 1, 2]
    assert log.checked(first) == []
    second = run(log, 4)
    assert second.batches == []
    assert log.checked(second) == [(3, 4)]
    with pytest.raises(DamagedError):
        log.stored_job(RaftIndex(4), 100)
    # What is known to be damaged ends a chunk before it, and the next begins behind it.
    assert [base for base, *_ in run(log, 1).batches] == [0, 1, 2]
    assert [base for base, *_ in run(log, 5).batches] == [4, 5]
    log.close()


def test_a_chunk_of_a_file_that_was_cut_tells_nothing() -> None:
    disk = sim_disk()
    log = open_log(disk)
    elect(log, 1)
    flush(log)
    for _ in range(4):
        append(log, 1, 1, 100)
    flush(log)
    job = log.stored_job(RaftIndex(1), 1 << 20)
    assert job is not None
    log.truncate_to(RaftIndex(3))
    job.run()
    assert log.checked(job) == []
    assert [base for base, *_ in run(log, 1).batches] == [0, 1]
    log.close()
