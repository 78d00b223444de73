"""The log as the core sees it: entries with terms, and the state a core begins with.

Together with `replica.py` the only place where leader epochs become terms.
"""

from __future__ import annotations

from collections.abc import Callable

from raftmq.log.model import DamagedError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.ports import Buggify, DiskError, Random
from raftmq.raft.core import RaftConfig, RaftCore
from raftmq.raft.epochs import EpochHistory
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import Entry, EntryKind, HardState, StoredChunk
from raftmq.replication.catch_up import CatchUp, StoredReader
from raftmq.types import Buffer, RaftIndex, ReplicaId, Term


class LogSource:
    """The core's `EntrySource` over one log."""

    __slots__ = ("_log", "_on_damaged", "_on_failed", "_stored", "forget_stored")

    def __init__(
        self,
        log: ReplicatedLog,
        on_damaged: Callable[[], None],
        on_failed: Callable[[DiskError], None],
        on_prepared: Callable[[], None],
        catch_up: CatchUp,
    ) -> None:
        self._log = log
        self._on_damaged = on_damaged
        self._on_failed = on_failed
        self._stored = StoredReader(log, catch_up, on_prepared, on_damaged, on_failed)
        self.forget_stored = self._stored.forget

    def stored(
        self, start: RaftIndex, bytes_max: int, to: ReplicaId, *, is_needed: bool
    ) -> StoredChunk | None:
        """Entries that are not in memory, for a replica that is far behind."""
        return self._stored.take(start, bytes_max, to.node_id, is_needed=is_needed)

    def entries(self, start: RaftIndex, bytes_max: int) -> tuple[Entry, ...]:
        """Entries from `start`; () when they are not in memory, or cannot be read now."""
        if not self._log.is_at_hand(start):
            return ()
        try:
            found = self._log.entries(start, bytes_max)
        except DamagedError:
            self._on_damaged()
            return ()
        except DiskError as error:
            self._on_failed(error)
            return ()
        return tuple(
            Entry(e.start, e.end, Term(e.leader_epoch), EntryKind(e.kind), e.payload) for e in found
        )

    def log_start_payload(self) -> Buffer:
        """The log-start tuple for a follower that is behind it."""
        return self._log.log_start.encode()

    def new_core(
        self,
        config: RaftConfig,
        hard_state: HardState,
        commit_end: RaftIndex,
        random: Random,
        buggify: Buggify,
    ) -> RaftCore:
        """A core that goes on where the log ends."""
        log = self._log
        log_start = log.log_start
        epochs = EpochHistory(
            [(Term(epoch), start) for epoch, start in log.epochs()],
            log_start=log_start.index,
            previous_term=Term(log_start.previous_epoch),
            log_end=log.end_index,
        )
        history = [
            (RaftIndex(bare.index), Configuration.decode(bare.payload))
            for bare in log.bare_entries()
            if bare.kind == EntryKind.MEMBERSHIP
        ]
        return RaftCore(
            config,
            hard_state=hard_state,
            epochs=epochs,
            configuration=Configuration.decode(log_start.configuration),
            configuration_history=history,
            flushed_end=log.flushed_end,
            commit_end=min(commit_end, log.flushed_end),
            source=self,
            random=random,
            buggify=buggify,
        )
