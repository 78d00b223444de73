"""One replica's place in the node's hard-state journal: what it promised, and what it claims.

Term and vote, the storage that takes part, the floor under votes: promises wait until these are
durable. The flushed end and the high watermark ride along lazily: recovery starts from them.

Invariants: the claimed flushed end never exceeds what the log really has flushed, not even for a
moment around a truncation; the claimed high watermark lies below it, since above it this disk may
still hold another leader's entries, which a crash would bring back under a watermark that covers
them.
"""

from __future__ import annotations

import attrs

from raftmq.log.hard_state import GroupState, HardStateJournal
from raftmq.ports import DiskError, DiskFullError
from raftmq.raft.ready import HardState
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
        """What new promises wait for."""
        return self._sequence

    @property
    def flushed_sequence(self) -> int:
        """How far the journal is durable."""
        return self._journal.flushed_sequence

    @property
    def is_durable(self) -> bool:
        """True when nothing that promises rest on waits for a flush."""
        return self._journal.flushed_sequence >= self._sequence

    @property
    def hard_state(self) -> HardState:
        """Term and vote."""
        return HardState(Term(self.state.term), self.state.vote)

    def put(self, state: GroupState) -> None:
        """Write what promises rest on; they wait for `sequence` from now on.

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
            return  # to claim less is always true
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
