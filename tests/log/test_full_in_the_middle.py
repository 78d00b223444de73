"""A disk that fills in the middle of a change of several files: all of it or none, or the replica
stops. Half a truncation that goes on would be finished at the next start, over what came since."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from jepsen_like.disk import SimDisk
from jepsen_like.inode import Inode
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.ports import DiskError, DiskFullError
from raftmq.types import Buffer, Offset, RaftIndex
from tests.log.helpers import all_entries, append, elect, filled, flush, open_log


class FullOnce(SimDisk):
    """Refuses one write or reservation that makes a file larger: the `refuse_at`th from now."""

    refuse_at = 0

    def _refuse(self, path: str) -> None:
        self.refuse_at -= 1
        if self.refuse_at == 0:
            raise DiskFullError(path)

    def write(self, inode: Inode, path: str, data: Buffer, position: int) -> None:
        if position + len(data) > len(inode.cached):
            self._refuse(path)
        super().write(inode, path, data, position)

    def truncate(self, inode: Inode, path: str, size: int, *, reserve: bool = False) -> None:
        if size > len(inode.cached):
            self._refuse(path)
        super().truncate(inode, path, size, reserve=reserve)


def truncate(log: ReplicatedLog) -> None:
    log.truncate_to(RaftIndex(11))


def reset(log: ReplicatedLog) -> None:
    log.reset_to(log.start_at(Offset(20)))


def move(log: ReplicatedLog) -> None:
    log.move_start(log.start_at(Offset(42)))


def busy_log(disk: SimDisk) -> ReplicatedLog:
    """Many elections, so that dropping a prefix is worth a rewrite of the bare entries."""
    log = filled(disk)
    for epoch in range(2, 72):
        elect(log, epoch)
    append(log, 71, 2)
    flush(log)
    return log


@pytest.mark.parametrize("change", [truncate, reset, move])
def test_all_or_nothing_or_the_end(change: Callable[[ReplicatedLog], None]) -> None:
    outcomes = set()
    for step in range(1, 12):
        disk = FullOnce(Random(0))
        log = busy_log(disk)
        if change is move:
            append(log, 71, 2)
            flush(log)
        before = [(e.start, e.end) for e in all_entries(log)]
        disk.refuse_at = step
        try:
            change(log)
        except DiskFullError:
            outcomes.add("refused")
            assert [(e.start, e.end) for e in all_entries(log)] == before
            end = log.end_index
        except DiskError:
            outcomes.add("stopped")
            end = None
        else:
            outcomes.add("done")
            end = log.end_index
        is_over = disk.refuse_at > 0
        disk.refuse_at = 0
        if end is not None:
            append(log, log.epochs()[-1][0] if log.epochs() else int(log.log_start.previous_epoch))
            end = flush(log)
        reopened = open_log(disk, claimed=0 if end is None else end)
        assert not reopened.damaged
        if end is not None:
            assert reopened.end_index == end == log.end_index, f"step {step} took what came later"
            assert len(all_entries(reopened)) == len(all_entries(log))
        if is_over:
            break
    assert "done" in outcomes
