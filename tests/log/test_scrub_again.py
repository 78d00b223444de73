"""The scrub begins again at the log start once it has been everywhere."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from jepsen_like.disk import SimDisk
from raftmq.log.model import LogConfig
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.records import NewRecord, build_batch, stamp
from raftmq.runtime.clock import RealClock
from raftmq.runtime.disk import RealDisk
from raftmq.types import LeaderEpoch, RaftIndex


def flush(log: ReplicatedLog) -> None:
    while (job := log.flush_job()) is not None:
        job.run()
        log.complete(job)


def append(log: ReplicatedLog, count: int, epoch: LeaderEpoch) -> None:
    for number in range(count):
        batch = build_batch([NewRecord(b"k", b"%d" % number)])
        stamp(batch, log.log_end_offset, epoch)
        log.append_batch(batch)
    flush(log)


def test_a_second_round_finds_no_damage_in_a_sound_log(tmp_path: Path) -> None:
    """The place where a round ended is no place in the first segment's beginning."""
    log = ReplicatedLog.open(
        RealDisk(),
        str(tmp_path / "p"),
        LogConfig(),
        claimed_flushed_end=RaftIndex(0),
        initial=None,
        clock=RealClock(),
    )
    log.append_bare(log.end_index, LeaderEpoch(1), 1, b"x")
    flush(log)
    append(log, 50, LeaderEpoch(1))
    assert log.scrub(1 << 20) == []
    append(log, 50, LeaderEpoch(1))
    for _ in range(4):
        assert log.scrub(1 << 20) == []
    log.close()


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("ending", ["close", "delete", "move_start"])
def test_no_job_of_the_past_holds_a_dropped_file(ending: str) -> None:
    """Not even while something refers to the log: its space is wanted."""
    disk = SimDisk(Random(1))
    disk.make_directories("d")
    log = ReplicatedLog.open(
        disk,
        "d/p",
        LogConfig(segment_bytes=2_000),
        claimed_flushed_end=RaftIndex(0),
        initial=None,
        clock=RealClock(),
    )
    log.append_bare(log.end_index, LeaderEpoch(1), 1, b"x")
    flush(log)
    append(log, 20, LeaderEpoch(1))
    assert log.scrub(500) == []
    append(log, 20, LeaderEpoch(1))
    if ending == "move_start":
        before = disk.open_files
        log.move_start(log.start_at(log.log_end_offset))
        assert disk.open_files < before
        return
    assert log.flush_job() is None
    append_one = build_batch([NewRecord(b"k", b"last")])
    stamp(append_one, log.log_end_offset, LeaderEpoch(1))
    log.append_batch(append_one)
    job = log.flush_job()
    assert job is not None
    del job
    getattr(log, ending)()
    assert disk.open_files == 0
