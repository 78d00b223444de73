"""Linearizable reads that wait: for the leader's first commit, then for a quorum's confirmation.

A leader's word about the committed end holds only if it still leads, so each barrier takes a round
of heartbeats begun after it was asked for (Raft §8); barriers asked for together share one.
"""

from __future__ import annotations

from collections import deque

from attrs import define

from raftmq.promise import Promise
from raftmq.raft.core import RaftCore
from raftmq.types import RaftIndex


@define(slots=True, eq=False)
class _Barrier:
    promise: Promise[RaftIndex]
    round: int | None = None
    index: RaftIndex = RaftIndex(0)


class ReadBarriers:
    """The barriers of one leadership.

    Attributes:
        waiting: those that are not kept yet, oldest first; every drain looks whether there are any.
    """

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: deque[_Barrier] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self) -> Promise[RaftIndex]:
        """A new one, asked for now."""
        barrier = _Barrier(Promise())
        self.waiting.append(barrier)
        return barrier.promise

    def begin(self, core: RaftCore) -> None:
        """Take a round for those that have none yet; before the core's next `ready`."""
        for barrier in self.waiting:
            if barrier.round is None:
                asked = core.read_index()
                if asked is None:
                    return  # no entry of this term is committed yet
                barrier.round, barrier.index = asked

    def settle(self, core: RaftCore) -> None:
        """Keep those whose round a quorum answered."""
        waiting = self.waiting
        while waiting:
            first = waiting[0]
            if first.round is None or not core.read_confirmed(first.round):
                return
            waiting.popleft()
            first.promise.resolve(first.index)

    def fail(self, error: Exception) -> None:
        """Leadership is lost: nothing can be promised."""
        waiting, self.waiting = self.waiting, deque()
        for barrier in waiting:
            barrier.promise.fail(error)
