"""What the core wants done: `Ready`, its effects in the order they must happen.

The core decides, the replica engine performs. The contract of durability (Raft §5.1-5.3):

1. `hard_state` is written to the journal;
2. `install`, `truncate_end`, then `append` are written to the log, still unflushed;
3. `send_now` may leave at once;
4. `send_after_flush` leaves only when the journal is flushed up to (1) *and* the log up to its end
   at (2), also when this Ready appended nothing; messages of an older term than the hard state's
   are dropped instead.
"""

from __future__ import annotations

from enum import Enum

from attrs import frozen

from raftmq.raft.messages import Entry, InstallLogStart, Message
from raftmq.types import RaftIndex, ReplicaId, Term


class Role(Enum):
    """What a replica is in its current term. A learner is a FOLLOWER that is no voter."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


@frozen(slots=True)
class HardState:
    """Must be durable before anything that depends on it is sent (Raft §5.1, §5.2)."""

    term: Term = Term(0)
    vote: ReplicaId | None = None


@frozen(slots=True)
class SoftState:
    """Who leads, as this replica knows it; lost at a crash."""

    role: Role
    term: Term
    leader: ReplicaId | None


@frozen(slots=True)
class Ready:
    """Effects owed by the engine, in field order."""

    hard_state: HardState | None = None
    install: InstallLogStart | None = None
    truncate_end: RaftIndex | None = None
    append: tuple[Entry, ...] = ()
    send_now: tuple[Message, ...] = ()
    send_after_flush: tuple[Message, ...] = ()
    soft_state: SoftState | None = None
    commit_end: RaftIndex | None = None


class Effects:
    """Gathers what one Ready will hold; owned by the core, emptied by `take`."""

    __slots__ = ("append", "install", "send_after_flush", "send_now", "truncate_end")

    def __init__(self) -> None:
        self.install: InstallLogStart | None = None
        self.truncate_end: RaftIndex | None = None
        self.append: list[Entry] = []
        self.send_now: list[Message] = []
        self.send_after_flush: list[Message] = []

    def truncate_to(self, end: RaftIndex) -> None:
        """Drop the log's suffix from `end` on: first what the engine has not even seen."""
        append = self.append
        engine_end = append[0].start if append else None
        while append and append[-1].end > end:
            append.pop()
        if engine_end is None or end < engine_end:
            self.truncate_end = end if self.truncate_end is None else min(end, self.truncate_end)

    def install_log_start(self, install: InstallLogStart) -> None:
        """Replace the log: what was to happen to the old one does not matter any more."""
        self.install = install
        self.truncate_end = None
        self.append.clear()

    def take(
        self,
        hard_state: HardState | None,
        soft_state: SoftState | None,
        commit_end: RaftIndex | None,
    ) -> Ready | None:
        """All gathered effects; None when there is nothing to do."""
        if not (
            self.append
            or self.send_now
            or self.send_after_flush
            or self.truncate_end is not None
            or self.install is not None
            or hard_state is not None
            or soft_state is not None
            or commit_end is not None
        ):
            return None
        ready = Ready(
            hard_state,
            self.install,
            self.truncate_end,
            tuple(self.append),
            tuple(self.send_now),
            tuple(self.send_after_flush),
            soft_state,
            commit_end,
        )
        self.install = None
        self.truncate_end = None
        self.append.clear()
        self.send_now.clear()
        self.send_after_flush.clear()
        return ready
