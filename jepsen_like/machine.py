"""The simulation's state machine: a chain of digests over the log, which tells the invariants.

Stands where a partition stands in the product. Its state at a log start is the digest of everything
before, so that a replica which begins there can be compared with those that read it all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from jepsen_like.invariants import GENESIS, DurableView, Invariants, InvariantViolation, chain
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError, LogEntry
from raftmq.raft.ready import Role, SoftState
from raftmq.replication.replica import Replica
from raftmq.types import Offset, RaftGroupId, RaftIndex, ReplicaId


class SimMachine:
    """One replica's machine."""

    def __init__(
        self,
        group: RaftGroupId,
        invariants: Invariants,
        on_committed: Callable[[SimMachine], None],
        on_role: Callable[[SimMachine, SoftState], None],
    ) -> None:
        self.group = group
        self.replica: Replica | None = None
        self.commit_end = 0
        self.truncations = 0
        # What was flushed before a crash is durable, though the recovered log cannot know it.
        self.durable_end = 0
        self._invariants = invariants
        self._on_committed = on_committed
        self._on_role = on_role
        self._ends: list[int] = [0]
        self._digests: list[bytes] = [GENESIS]
        self._is_blind = False

    def attach(self, replica: Replica) -> None:
        """Read what the recovered log holds."""
        self.replica = replica
        self._read_log()
        log = replica.log
        self._invariants.truth(self.group).views[replica.self_id] = DurableView(
            lambda: max(log.flushed_end, min(self.durable_end, self.end)), self.digest_at
        )

    def _read_log(self) -> None:
        """Compute the chain from the log; blind while a part of it is damaged."""
        assert self.replica is not None
        log = self.replica.log
        start = log.log_start
        self._ends = [start.index]
        self._digests = [start.state or GENESIS]
        self._is_blind = False
        position = start.index
        try:
            while position < log.end_index:
                entries = log.entries(position, 1 << 20)
                assert entries, "what a log holds can be read"
                for entry in entries:
                    self._add(entry)
                    position = entry.end
                    self._invariants.appended(
                        self.group, self.identity, entry.end, entry.leader_epoch, self._digests[-1]
                    )
        except DamagedError:
            self._is_blind = True

    def _can_see(self) -> bool:
        """False while damage hides a part of the log, and so the digests after it."""
        if self._is_blind and self.replica is not None and not self.replica.log.damaged:
            self._read_log()
        return not self._is_blind

    @property
    def identity(self) -> ReplicaId:
        """Whose machine it is."""
        assert self.replica is not None
        return self.replica.self_id

    @property
    def end(self) -> int:
        """Where the chain ends."""
        return self._ends[-1]

    def digest_at(self, end: int) -> bytes | None:
        """The digest of the log below `end`; None where this log has no entry's end."""
        self._can_see()
        position = bisect_left(self._ends, end)
        if position < len(self._ends) and self._ends[position] == end:
            return self._digests[position]
        return None

    # ---- StateMachine ----

    def appended(self, entry: LogEntry) -> None:
        """Note an entry."""
        if not self._can_see() or self.end >= entry.end:
            return
        self._add(entry)
        self._invariants.appended(
            self.group, self.identity, entry.end, entry.leader_epoch, self._digests[-1]
        )

    def truncated(self, end: RaftIndex) -> None:
        """Forget a suffix."""
        self.durable_end = min(self.durable_end, end)
        self.truncations += 1
        if end < self.commit_end:
            raise InvariantViolation(
                "MonotonicHighWatermark", f"{self.group}: truncated to {end} below the watermark"
            )
        while self._ends[-1] > end:
            self._ends.pop()
            self._digests.pop()

    def committed(self, high_watermark: Offset, commit_end: RaftIndex) -> None:
        """The high watermark moved."""
        replica = self.replica
        assert replica is not None
        if commit_end < self.commit_end:
            raise InvariantViolation(
                "MonotonicHighWatermark", f"{self.group}: {self.identity} fell to {commit_end}"
            )
        before, self.commit_end = self.commit_end, commit_end
        term_start = replica.core.term_start
        if term_start is not None and commit_end > before:
            self._invariants.leader_commits(self.group, self.identity, commit_end, term_start)
        if not self._can_see():
            return
        first = bisect_left(self._ends, before)
        last = bisect_left(self._ends, commit_end)
        self._invariants.committed(
            self.group,
            self.identity,
            commit_end,
            self.digest_at(commit_end),
            replica.voters,
            replica.leader_epoch,
        )
        self._invariants.knows_committed(
            self.group,
            list(zip(self._ends[first : last + 1], self._digests[first : last + 1], strict=True)),
        )
        self._on_committed(self)

    def role_changed(self, soft: SoftState) -> None:
        """Leaders are watched."""
        if self.replica is not None and soft.role is Role.LEADER:
            self._invariants.leads(self.group, self.identity, soft.term)
            self._invariants.holds_committed(self.group, self.identity, soft.term, self.digest_at)
        self._on_role(self, soft)

    def state_at(self, offset: Offset, index: RaftIndex) -> bytes:
        """The digest below `index`."""
        digest = self.digest_at(index)
        if self._is_blind:
            raise DamagedError(offset, offset)
        assert digest is not None, "a log starts at an entry"
        return digest

    def restore(self, log_start: LogStart) -> None:
        """Begin at a log start."""
        digest = log_start.state or GENESIS
        self._ends = [log_start.index]
        self._digests = [digest]
        self._is_blind = False
        if self.replica is not None:
            self._invariants.starts_at(self.group, self.identity, log_start.index, digest)

    def _add(self, entry: LogEntry) -> None:
        assert entry.start >= self._ends[-1], "entries overlap"
        head = b"%d %d %d %d " % (entry.start, entry.end, entry.leader_epoch, entry.kind)
        self._digests.append(chain(self._digests[-1], head + bytes(entry.payload)))
        self._ends.append(entry.end)
