"""What the core wants done: `Ready`, its effects in the order they must happen.

The core decides, the replica engine performs. The contract of durability (Raft §5, hazards 9, 10):

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
