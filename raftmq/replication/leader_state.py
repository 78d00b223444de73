"""What a replica keeps beside the core while it leads: who is in sync, and reads that wait.

A voter is in sync when its flushed end reached the leader's log end at some moment within
`replica.lag.time.max.ms`. Under constant load no follower ever equals a moving end, and with
megabytes under way an acknowledgement is about an end of a second ago; so the leader remembers
where its log ended when, and a follower was caught up at the last of those moments whose end it has
by now. The in-sync set is a report and serves min.insync.replicas; Raft's commit rule never looks
at it.

A read barrier promises the committed end. A leader's word about that holds only if it still leads,
so each barrier takes a round of heartbeats begun after it was asked for (Raft §8), and waits for
the leader's first commit before that; barriers asked for together share one round.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection
from typing import Final

from attrs import define

from raftmq.promise import Promise
from raftmq.raft.core import RaftCore
from raftmq.types import RaftIndex, ReplicaId

SAMPLES: Final = 64
"""Moments remembered within the allowed lag, so a lag is known to a 64th of that."""


@define(slots=True)
class _Follower:
    caught_up_ms: float


class InSyncTracker:
    """A leader's memory of when each follower was last caught up."""

    __slots__ = ("_ends", "_followers", "_lag_ms_max", "_times")

    def __init__(self, lag_ms_max: float) -> None:
        """Nothing is remembered for longer than `lag_ms_max`."""
        self._lag_ms_max = lag_ms_max
        self._followers: dict[ReplicaId, _Follower] = {}
        self._ends: list[RaftIndex] = []  # where the log ended, rising
        self._times: list[float] = []  # and when

    def reset(self) -> None:
        """A new leadership begins: no follower is known to be caught up."""
        self._followers.clear()
        self._ends.clear()
        self._times.clear()

    def forget(self, replica: ReplicaId) -> None:
        """That storage is known to be gone, however lately it was caught up."""
        self._followers.pop(replica, None)

    def keep(self, members: Collection[ReplicaId]) -> None:
        """Forget who is no member any more: should it become one again, it may be without data."""
        for known in [r for r in self._followers if r not in members]:
            self.forget(known)

    def forget_former(self, replica: ReplicaId) -> None:
        """The node of `replica` runs with that storage now: forget its other ones."""
        for known in [r for r in self._followers if r.node_id == replica.node_id and r != replica]:
            self.forget(known)

    def observe(
        self, replica: ReplicaId, match_end: RaftIndex, log_end: RaftIndex, now_ms: float
    ) -> None:
        """A reply of `replica` came; it has flushed up to `match_end`."""
        follower = self._followers.get(replica)
        if follower is None:
            follower = self._followers[replica] = _Follower(float("-inf"))
        if match_end >= log_end:
            follower.caught_up_ms = now_ms
        else:
            known = bisect_right(self._ends, match_end)
            if known and self._times[known - 1] > follower.caught_up_ms:
                follower.caught_up_ms = self._times[known - 1]
        if not self._times or now_ms - self._times[-1] >= self._lag_ms_max / SAMPLES:
            self._sample(log_end, now_ms)

    def _sample(self, log_end: RaftIndex, now_ms: float) -> None:
        if self._ends and self._ends[-1] == log_end:
            self._times[-1] = now_ms  # nothing was appended: it still ended there
            return
        self._ends.append(log_end)
        self._times.append(now_ms)
        too_old = bisect_right(self._times, now_ms - self._lag_ms_max)
        del self._ends[:too_old], self._times[:too_old]

    def vouch(self, replica: ReplicaId, now_ms: float) -> None:
        """A follower is known to have been caught up until now, though it sent no reply."""
        follower = self._followers.get(replica)
        if follower is not None:
            follower.caught_up_ms = now_ms

    def is_in_sync(self, replica: ReplicaId, now_ms: float, lag_ms_max: float) -> bool:
        """True when it was caught up within the allowed lag."""
        follower = self._followers.get(replica)
        return follower is not None and now_ms - follower.caught_up_ms <= lag_ms_max

    def lag_ms(self, replica: ReplicaId, now_ms: float) -> float | None:
        """How long ago it was caught up; None: never, in this leadership."""
        follower = self._followers.get(replica)
        if follower is None or follower.caught_up_ms == float("-inf"):
            return None
        return now_ms - follower.caught_up_ms


@define(slots=True, eq=False)
class _Barrier:
    promise: Promise[RaftIndex]
    round: int | None = None
    index: RaftIndex = RaftIndex(0)


class ReadBarriers:
    """The barriers of one leadership.

    Attributes:
        waiting: those not kept yet, oldest first; every drain looks whether there are any.
    """

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: deque[_Barrier] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self) -> Promise[RaftIndex]:
        """A new barrier, asked for now."""
        barrier = _Barrier(Promise())
        self.waiting.append(barrier)
        return barrier.promise

    def begin(self, core: RaftCore) -> None:
        """Begin a round for the barriers that have none; to be called before the core's `ready`."""
        for barrier in self.waiting:
            if barrier.round is None:
                asked = core.read_index()
                if asked is None:
                    return  # no entry of this term is committed yet
                barrier.round, barrier.index = asked

    def settle(self, core: RaftCore) -> None:
        """Keep the barriers whose round a quorum has answered."""
        waiting = self.waiting
        while waiting:
            first = waiting[0]
            if first.round is None or not core.read_confirmed(first.round):
                return
            waiting.popleft()
            first.promise.resolve(first.index)

    def fail(self, error: Exception) -> None:
        """Fail all barriers: leadership is lost."""
        waiting, self.waiting = self.waiting, deque()
        for barrier in waiting:
            barrier.promise.fail(error)
