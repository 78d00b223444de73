"""What replicas of a group say to each other beyond Raft: who they are, and repair of damage.

Plain values beside `raft/messages.py`; the Raft core never sees them. They carry sender and target
as every peer message does, so that a message for another storage of the same node is told apart.
None of them is a promise: losing, repeating or delaying one costs time, never data.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from attrs import frozen

from raftmq.raft.messages import Message
from raftmq.types import Buffer, NodeId, Offset, RaftIndex, ReplicaId, Term

CONFUSED: Final = -1
"""In place of an incarnation: we do not agree on what is quiescent; unquiesce what we share of
each bucket whose number is not 0."""
QUIESCENCE_BUCKETS: Final = 32
"""Quiescent groups are compared in so many parts."""


@frozen(slots=True)
class WrongReplica:
    """Your message named another storage of this node; `sender` is who really runs here.

    `term` repeats the term of the message that went astray, so that a leader ignores late ones.
    """

    term: Term
    sender: ReplicaId
    to: ReplicaId


@frozen(slots=True)
class RepairRequest:
    """Send me the batches in `[start, end)`; my copy of them is damaged."""

    term: Term
    sender: ReplicaId
    to: ReplicaId
    start: Offset
    end: Offset


@frozen(slots=True)
class RepairReply:
    """Whole, verified batches from `start` on; they may end before the asked range does.

    Where the sender dropped the beginning of the range, its encoded log start instead.
    """

    term: Term
    sender: ReplicaId
    to: ReplicaId
    start: Offset
    batches: tuple[Buffer, ...] = ()
    log_start: Buffer = b""


@frozen(slots=True)
class TailRequest:
    """Do you hold the log up to `floor`? I cut a torn tail that ended there (see `recovery.py`)."""

    term: Term
    sender: ReplicaId
    to: ReplicaId
    floor: RaftIndex


@frozen(slots=True)
class TailReply:
    """My log ends at `log_end`, with an entry of `last_term`; repeats the `floor` asked for."""

    term: Term
    sender: ReplicaId
    to: ReplicaId
    floor: RaftIndex
    log_end: RaftIndex
    last_term: Term


@frozen(slots=True)
class Quiesce:
    """The group is idle and all have everything up to `log_end`: quiesce (see `quiescence.py`).

    Heartbeats up to `round` were sent before.
    """

    term: Term
    sender: ReplicaId
    to: ReplicaId
    log_end: RaftIndex
    round: int


@frozen(slots=True)
class Unquiesce:
    """I am not quiescent any more."""

    term: Term
    sender: ReplicaId
    to: ReplicaId


@frozen(slots=True)
class NodeBeat:
    """This process lives. `quiescent` digests the quiescent groups that it leads and `to` is in,
    one digest (64 bits) for each of `QUIESCENCE_BUCKETS`: so two nodes that disagree know which."""

    sender: NodeId
    to: NodeId
    incarnation: int
    quiescent: tuple[int, ...]


EngineMessage: TypeAlias = (
    WrongReplica | RepairRequest | RepairReply | TailRequest | TailReply | Quiesce | Unquiesce
)
PeerMessage: TypeAlias = Message | EngineMessage
