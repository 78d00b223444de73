"""What goes into the core and comes out of it: messages, entries, and `Ready`.

Plain values: no encoding (see `replication/messages.py`), no clock, no I/O. Which group a message
belongs to is the envelope's matter. A log is a space of `RaftIndex` positions: a batch of n records
takes n positions, a bare entry takes one. So an entry is a half-open range `[start, end)`, and a
log's end is the next free position.

The core decides, the replica performs what `Ready` holds. The contract of durability (Raft
§5.1-5.3):

1. `hard_state` is written to the journal;
2. `install`, `truncate_end`, then `append` are written to the log, still unflushed;
3. `send_now` may leave at once;
4. `send_after_flush` leaves only when the journal is flushed up to (1) *and* the log up to its end
   at (2), also when this Ready appended nothing; messages of an older term than the hard state's
   are dropped instead.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TypeAlias

from attrs import frozen

from raftmq.ports import Span
from raftmq.types import Buffer, RaftIndex, ReplicaId, Term


class EntryKind(IntEnum):
    """What an entry is; all but BATCH are bare entries."""

    BATCH = 0  # a RecordBatch v2, opaque to the core
    ELECTION = 1  # a leader's first entry of its term (Raft §8)
    MEMBERSHIP = 2  # a new configuration, in force from its append on (Raft thesis §4.1)
    LOG_START = 3  # the leader's proposal to drop a prefix; opaque to the core
    SEAL = 4  # no batch follows, or batches follow again; opaque to the core


@frozen(slots=True)
class Entry:
    """One unit of the log: appended, compared and truncated only as a whole."""

    start: RaftIndex
    end: RaftIndex
    term: Term
    kind: EntryKind
    payload: Buffer

    @property
    def is_bare(self) -> bool:
        """True when it has no records and so takes no Kafka offset."""
        return self.kind is not EntryKind.BATCH


@frozen(slots=True)
class PreVoteRequest:
    """Would you vote for me in `term`, my next one? Changes no state (Raft thesis §9.6)."""

    term: Term
    sender: ReplicaId
    to: ReplicaId
    last_term: Term
    log_end: RaftIndex


@frozen(slots=True)
class PreVoteReply:
    """Answer to a pre-vote; when granted `term` is the term asked for, else the voter's own."""

    term: Term
    sender: ReplicaId
    to: ReplicaId
    granted: bool


@frozen(slots=True)
class VoteRequest:
    """Vote for me in `term` (Raft §5.2). `is_transfer`: the leader asked, so ignore its lease."""

    term: Term
    sender: ReplicaId
    to: ReplicaId
    last_term: Term
    log_end: RaftIndex
    is_transfer: bool = False


@frozen(slots=True)
class VoteReply:
    """A vote, durable before it leaves, or its refusal."""

    term: Term
    sender: ReplicaId
    to: ReplicaId
    granted: bool


@frozen(slots=True)
class StoredChunk:
    """Entries for a replica that is far behind, whose bytes stay in the leader's file until sent.

    Either batches, with empty payloads here and all their bytes in `span`, `sizes` of them one by
    one and `checksum` (CRC-32C) over them all; or bare entries as they are, without a span.
    """

    entries: tuple[Entry, ...]
    size_bytes: int
    span: Span | None = None
    sizes: tuple[int, ...] = ()
    checksum: int = 0


@frozen(slots=True)
class AppendRequest:
    """Entries that follow position `prev_end`, whose last entry had `prev_term` (Raft §5.3).

    Without entries it is a probe. `entries` are contiguous from `prev_end`, except that offsets may
    have gaps below the leader's commit (compaction): an entry may start above the end before it.
    `chunk` is the leader's alone: the entries are its, and it travels apart from live requests.
    """

    term: Term
    sender: ReplicaId
    to: ReplicaId
    prev_end: RaftIndex
    prev_term: Term
    commit_end: RaftIndex
    entries: tuple[Entry, ...] = ()
    chunk: StoredChunk | None = None


@frozen(slots=True)
class AppendReply:
    """What a follower holds.

    Accepted: all below `flushed_end` agrees with the leader's log *and* is flushed here.
    Refused: `hint_end`, `hint_term` name the follower's greatest end of a term not above the
    request's `prev_term`; `refused_prev_end` names the request.
    `is_promise` is False from a damaged replica: the position then only steers the flow of entries
    and counts in no majority.
    `clock_ms` is the follower's wall clock, for retention alone: no clock decides about safety.
    """

    term: Term
    sender: ReplicaId
    to: ReplicaId
    accepted: bool
    flushed_end: RaftIndex
    refused_prev_end: RaftIndex = RaftIndex(0)
    hint_end: RaftIndex = RaftIndex(0)
    hint_term: Term = Term(0)
    is_promise: bool = True
    clock_ms: int = 0


@frozen(slots=True)
class Heartbeat:
    """I lead `term`. `commit_end` is capped at what the follower is known to hold. `round` serves
    check-quorum and read-index: the reply repeats it."""

    term: Term
    sender: ReplicaId
    to: ReplicaId
    commit_end: RaftIndex
    round: int


@frozen(slots=True)
class HeartbeatReply:
    """I hear you.

    `matched_end`: all below it arrived here and agrees with the leader's log, flushed or not. By it
    a leader distinguishes a slow disk from lost messages and from a follower that restarted.
    """

    term: Term
    sender: ReplicaId
    to: ReplicaId
    round: int
    matched_end: RaftIndex = RaftIndex(0)
    clock_ms: int = 0


@frozen(slots=True)
class InstallLogStart:
    """The follower is behind the leader's log start: begin anew at this tuple (Raft §7).

    `payload` is the log-start tuple as the log encodes it, opaque here; the log begins at
    `log_start`, and the entry before it had `previous_term`. `configuration` is the encoded
    `membership.Configuration` in force there.
    """

    term: Term
    sender: ReplicaId
    to: ReplicaId
    log_start: RaftIndex
    previous_term: Term
    payload: Buffer
    configuration: bytes


@frozen(slots=True)
class TimeoutNow:
    """Campaign at once: leadership is being handed to you (Raft thesis §3.10)."""

    term: Term
    sender: ReplicaId
    to: ReplicaId


Message: TypeAlias = (
    PreVoteRequest
    | PreVoteReply
    | VoteRequest
    | VoteReply
    | AppendRequest
    | AppendReply
    | Heartbeat
    | HeartbeatReply
    | InstallLogStart
    | TimeoutNow
)


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
        """Drop the log's suffix from `end` on, beginning with entries the engine has not seen."""
        append = self.append
        engine_end = append[0].start if append else None
        while append and append[-1].end > end:
            append.pop()
        if engine_end is None or end < engine_end:
            self.truncate_end = end if self.truncate_end is None else min(end, self.truncate_end)

    def install_log_start(self, install: InstallLogStart) -> None:
        """Replace the log; changes of the old one that are still due are dropped."""
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
