"""What one replica has promised and claimed durably, and the messages that wait for that.

`JournalPlace` is the replica's place in the node's hard-state journal: term and vote, the storage
that takes part, the floor under votes. Votes and append replies are promises (Raft §5.1-5.3); in
the `Outbox` each waits for the journal sequence and the log position at which it was made, also
when its own Ready wrote nothing: what it promises may rest on an earlier write. Flushed end and
high watermark are written lazily with other records: recovery starts from them.

Invariants: no promise leaves before both are durable; one of an older term never leaves (it was
withdrawn with the term); those held are bounded by the peers' windows. The claimed flushed end
never exceeds what the log really has flushed, not even for a moment around a truncation; the
claimed high watermark lies below it, since above it this disk may still hold another leader's
entries, which a crash would bring back under a watermark that covers them.
"""

from __future__ import annotations

from collections import deque

import attrs
from attrs import define

from raftmq.log.journal import GroupState, HardStateJournal
from raftmq.ports import DiskError, DiskFullError
from raftmq.raft.messages import AppendReply, HardState, Message
from raftmq.types import RaftGroupId, RaftIndex, StorageId, Term


class JournalFailedError(DiskError):
    """The journal failed; votes and terms of all groups rest on it, so the node stops."""


class JournalPlace:
    """One group's state in the journal."""

    __slots__ = ("_group", "_journal", "_sequence", "state")

    def __init__(
        self, journal: HardStateJournal, group: RaftGroupId, storage_id: StorageId
    ) -> None:
        """Take up what the journal knows of the group.

        Raises:
            JournalFailedError: it knew nothing, and cannot be written.
        """
        self._journal = journal
        self._group = group
        self._sequence = 0
        self.state = journal.get(group) or GroupState()
        assert self.state.bootstrapped in (None, storage_id), "another replica's hard state"
        if self.state.bootstrapped is None:
            # Durable before the first vote or acknowledgement: if this folder is ever found empty,
            # the node knows that something was promised here.
            self.put(attrs.evolve(self.state, bootstrapped=storage_id))

    @property
    def sequence(self) -> int:
        """The journal sequence that new promises wait for."""
        return self._sequence

    @property
    def flushed_sequence(self) -> int:
        """The journal sequence up to which all is durable."""
        return self._journal.flushed_sequence

    @property
    def is_durable(self) -> bool:
        """True when no record that promises rest on waits for a flush."""
        return self._journal.flushed_sequence >= self._sequence

    @property
    def hard_state(self) -> HardState:
        """Term and vote."""
        return HardState(Term(self.state.term), self.state.vote)

    def put(self, state: GroupState) -> None:
        """Write a state that promises rest on; new ones wait for `sequence` from now on.

        Raises:
            JournalFailedError: nothing may be promised any more.
        """
        try:
            self._sequence = self._journal.put(self._group, state)
        except DiskError as error:
            raise JournalFailedError(f"journal write failed: {error}") from error
        self.state = state

    def put_hard_state(self, hard_state: HardState) -> None:
        """Write term and vote; see `put`."""
        self.put(attrs.evolve(self.state, term=hard_state.term, vote=hard_state.vote))

    def claim(self, flushed_end: RaftIndex, commit_end: RaftIndex) -> None:
        """Record how far the log is flushed and committed, without a flush of its own.

        Raises:
            JournalFailedError: the device failed.
        """
        state = self.state
        commit_end = max(RaftIndex(state.commit_end), min(commit_end, flushed_end))
        if (flushed_end, commit_end) == (state.flushed_end, state.commit_end):
            return
        state = state.claiming(flushed_end, commit_end)
        try:
            self._journal.put(self._group, state, lazy=True)
        except DiskFullError:
            return  # it is always true to claim less
        except DiskError as error:
            raise JournalFailedError(f"journal write failed: {error}") from error
        self.state = state

    def lower_claim(self, end: RaftIndex) -> None:
        """Make durable that no more than `end` is claimed, before the log may lose the rest.

        Otherwise a crash right after a truncation would look like damage to flushed entries. Rare
        (a deposed leader's suffix), so the flush is awaited here.

        Raises:
            JournalFailedError: the log must stay as it is.
        """
        if end >= self.state.flushed_end:
            return
        self.put(attrs.evolve(self.state, flushed_end=end))
        try:
            self._journal.flush_now()
        except DiskError as error:
            raise JournalFailedError(f"journal flush failed: {error}") from error


@define(slots=True)
class _Held:
    message: Message
    sequence: int
    end: RaftIndex


class Outbox:
    """Messages of one replica that wait for a flush.

    Attributes:
        held: those messages, in their order; every drain looks whether there are any.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: deque[_Held] = deque()

    def __len__(self) -> int:
        return len(self.held)

    def hold(self, message: Message, sequence: int, end: RaftIndex) -> None:
        """Keep `message` until the journal is flushed to `sequence` and the log to `end`."""
        held = self.held
        if held:
            last = held[-1]
            previous = last.message
            # A later acknowledgement to the same leader covers an earlier one that was not sent, so
            # a slow disk answers a burst of appends with one reply.
            if (
                isinstance(message, AppendReply)
                and isinstance(previous, AppendReply)
                and message.accepted
                and previous.accepted
                and (message.term, message.to) == (previous.term, previous.to)
                and message.is_promise == previous.is_promise
                and message.flushed_end >= previous.flushed_end
                and last.end == end
                and last.sequence == sequence
            ):
                last.message = message
                return
        held.append(_Held(message, sequence, end))

    def cap(self, end: RaftIndex) -> None:
        """The log was truncated to `end`: let no message wait for a position that is gone."""
        for held in self.held:
            held.end = min(held.end, end)

    def release(self, sequence: int, flushed_end: RaftIndex, term: Term) -> list[Message]:
        """Take the messages that may leave now; those of a term before `term` are dropped."""
        released: list[Message] = []
        while self.held:
            first = self.held[0]
            if first.message.term < term:
                self.held.popleft()
                continue
            if first.sequence > sequence or first.end > flushed_end:
                break
            released.append(self.held.popleft().message)
        return released

    def clear(self) -> None:
        """Drop everything: the replica stopped."""
        self.held.clear()
