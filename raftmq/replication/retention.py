"""When a leader drops old records, and what time it is for that.

No single node's clock may delete data: the leader takes the least clock that a majority of voters
reports (its own among them), so a minority that is days ahead deletes nothing, and lets it advance
no faster than monotonic time between two looks, so a majority that jumps together deletes nothing
early either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from raftmq.log.replicated_log import ReplicatedLog
from raftmq.ports import Clock
from raftmq.raft.core import RaftCore
from raftmq.replication.quiescence import Quiescence
from raftmq.types import Offset, ReplicaId


class RetentionClock:
    """One replica's view of retention time; kept across leaderships."""

    __slots__ = ("_at_ms", "_now_ms")

    def __init__(self) -> None:
        self._now_ms: float | None = None
        self._at_ms = 0.0

    def read(self, clocks_ms: Sequence[int], quorum: int, monotonic_ms: float) -> int | None:
        """Now, from the clocks that voters reported; None without a majority of them."""
        if len(clocks_ms) < quorum:
            return None
        agreed: float = sorted(clocks_ms, reverse=True)[quorum - 1]
        if self._now_ms is not None:
            agreed = min(agreed, self._now_ms + monotonic_ms - self._at_ms)
        self._now_ms = agreed if self._now_ms is None else max(agreed, self._now_ms)
        self._at_ms = monotonic_ms
        return int(self._now_ms)


def heard_clocks(core: RaftCore) -> Iterator[tuple[ReplicaId, int]]:
    """The clocks of the other voters that this leader heard lately."""
    voters = core.configuration.voters
    for peer, progress in core.progress.items():
        is_heard = core.now - progress.last_heard_tick <= 2 * core.config.election_ticks
        if peer in voters and progress.clock_ms and is_heard:
            yield peer, progress.clock_ms


class RetentionPorts(Protocol):
    """What retention needs of its replica."""

    @property
    def core(self) -> RaftCore: ...
    @property
    def log(self) -> ReplicatedLog: ...
    @property
    def quiescence(self) -> Quiescence: ...
    @property
    def is_writable(self) -> bool: ...
    @property
    def high_watermark(self) -> Offset: ...
    @property
    def log_start_offset(self) -> Offset: ...
    def touch(self) -> None:
        """Unquiesce the group."""
        ...


class Retention:
    """One replica's retention."""

    __slots__ = ("_clock", "_replica", "_time")

    def __init__(self, replica: RetentionPorts, clock: Clock) -> None:
        self._replica = replica
        self._clock = clock
        self._time = RetentionClock()

    def now_ms(self) -> int | None:
        """What time it is for retention; None on any but a leader that can commit."""
        replica = self._replica
        if not replica.is_writable:
            return None
        clocks = [self._clock.wall_ms()]
        voters = replica.core.configuration.voters
        clocks += [
            progress.clock_ms
            for peer, progress in replica.core.progress.items()
            if peer in voters and progress.clock_ms
        ]
        return self._time.read(clocks, len(voters) // 2 + 1, self._clock.monotonic_ms())

    def append_time_ms(self) -> int:
        """What a record appended now is stamped with, where the topic wants that: this leader's
        clock, unless it is behind what retention will judge the record by."""
        wall_ms, now_ms = self._clock.wall_ms(), self.now_ms()
        return wall_ms if now_ms is None else max(wall_ms, now_ms)

    def clocks_ms(self) -> list[int]:
        """The wall clocks of the voters that this leader hears, its own first."""
        replica = self._replica
        if replica.quiescence.is_quiescent:
            replica.touch()  # clocks of a quiescent group stand still: hear them
        return [self._clock.wall_ms(), *(clock_ms for _, clock_ms in heard_clocks(replica.core))]

    def target(self, below: Offset) -> Offset | None:
        """Where the log should start by age and size, never above `below`; None: where it does."""
        replica = self._replica
        now_ms = self.now_ms()
        if now_ms is None:
            return None
        limit = min(below, replica.high_watermark)
        if replica.quiescence.is_quiescent and replica.log.retention_target(
            self._clock.wall_ms(), limit
        ):
            replica.touch()  # clocks of a quiescent group stand still: hear them
        target = replica.log.retention_target(now_ms, limit)
        return None if target is None or target <= replica.log_start_offset else target
