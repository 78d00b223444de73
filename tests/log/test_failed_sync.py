"""After a failed fdatasync the system takes the pages for clean: what a process reads back when it
opens the log again may never have reached the device, and another fdatasync would not bring it."""

from __future__ import annotations

import pytest

from jepsen_like.disk import CrashOdds, SimDisk
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.ports import DiskError
from raftmq.types import Offset, RaftIndex
from tests.log.helpers import all_entries, append, elect, flush, open_log, sim_disk

LOSES_ALL = CrashOdds(lose=1.0, prefix=0.0, torn=0.0, sectors=0.0, names=1.0)


def failed_at(disk: SimDisk, log: ReplicatedLog, ending: str) -> None:
    """The flush of a file fails; the process ends, the machine goes on."""
    disk.fail_when(lambda verb, path: verb == "fdatasync" and path.endswith(ending))
    job = log.flush_job()
    assert job is not None
    with pytest.raises(DiskError):
        job.run()
    disk.fail_when(None)
    disk.end_process()


def begin(disk: SimDisk) -> ReplicatedLog:
    disk.make_directories("data/a-0")
    log = open_log(disk)
    elect(log, 1)
    append(log, 1, count=3)
    flush(log)
    return log


def test_a_bare_entry_is_written_again() -> None:
    disk = sim_disk()
    log = begin(disk)
    claimed = log.flushed_end
    elect(log, 2)
    failed_at(disk, log, "bare.entries")
    again = open_log(disk, claimed=claimed)
    held = all_entries(again)
    append(again, 2, count=2)
    end = flush(again)
    held = all_entries(again)
    disk.crash(odds=LOSES_ALL)
    last = open_log(disk, claimed=end)
    assert (last.end_index, all_entries(last)) == (end, held)


@pytest.mark.parametrize("size", [20, 500], ids=["one segment", "several segments"])
def test_batches_are_written_again(size: int) -> None:
    disk = sim_disk()
    log = begin(disk)
    claimed = log.flushed_end
    append(log, 1, count=2, size=size)
    append(log, 1, count=1, size=size)
    failed_at(disk, log, ".log")
    again = open_log(disk, claimed=claimed)
    append(again, 1, count=2, size=size)
    end = flush(again)
    held = all_entries(again)
    disk.crash(odds=LOSES_ALL)
    last = open_log(disk, claimed=end)
    assert not last.damaged
    assert (last.end_index, all_entries(last)) == (end, held)
    assert last.log_end_offset > Offset(RaftIndex(3))
