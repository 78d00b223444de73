"""What others may read of a replica, at any time and without effect.

Positions of the log are offsets here, terms are leader epochs. What only a leader can know is empty
or unknown on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from raftmq.log.replicated_log import ReplicatedLog
from raftmq.ports import Clock
from raftmq.raft.core import RaftCore
from raftmq.raft.membership import Configuration
from raftmq.raft.progress import ProgressState
from raftmq.raft.ready import Role
from raftmq.replication.durability import JournalPlace, Outbox
from raftmq.replication.in_sync import InSyncTracker
from raftmq.replication.log_start_moves import LogStartMoves
from raftmq.replication.read_barriers import ReadBarriers
from raftmq.replication.readmission import Readmission, Wish
from raftmq.replication.replica_ports import ReplicaConfig
from raftmq.replication.resting import Resting
from raftmq.types import LeaderEpoch, NodeId, Offset, RaftIndex, ReplicaId

CLOSE_BYTES: Final = 4 << 20
"""A follower with no more than this to flush takes over at once."""


DISK_FULL: Final = "disk full"
"""Begins the failure of a replica that stopped for want of space, and may begin again with it."""


class ReplicaView:
    """The reading side of `Replica`, which sets the attributes."""

    self_id: ReplicaId
    log: ReplicatedLog
    core: RaftCore
    config: ReplicaConfig
    failure: str | None
    resting: Resting
    place: JournalPlace
    _outbox: Outbox
    _barriers: ReadBarriers
    _moves: LogStartMoves
    _readmission: Readmission
    high_watermark: Offset
    _commit_end: RaftIndex
    _in_sync: InSyncTracker
    _clock: Clock

    @property
    def lacks_space(self) -> bool:
        """True when it stopped because the disk was full: opened again, it goes on."""
        return self.failure is not None and self.failure.startswith(DISK_FULL)

    @property
    def is_leader(self) -> bool:
        """True while this replica believes that it leads."""
        return self.failure is None and self.core.role is Role.LEADER

    @property
    def is_candidate(self) -> bool:
        """True while this replica asks for votes in earnest."""
        return self.failure is None and self.core.role is Role.CANDIDATE

    @property
    def is_writable(self) -> bool:
        """True for a leader whose own term has a committed entry: its high watermark is known."""
        return self.is_leader and self.core.has_committed_own_term

    @property
    def is_handing_over(self) -> bool:
        """True while leadership is being transferred: nothing is taken in meanwhile."""
        return self.core.transferee is not None

    @property
    def leader(self) -> ReplicaId | None:
        """Who leads the current term, as far as known here."""
        return None if self.failure is not None else self.core.leader

    @property
    def leader_epoch(self) -> LeaderEpoch:
        """The current term, as Kafka clients see it."""
        return LeaderEpoch(self.core.term)

    @property
    def log_end_offset(self) -> Offset:
        """The next offset to assign."""
        return self.log.log_end_offset

    @property
    def log_start_offset(self) -> Offset:
        """The first offset that readers may ask for."""
        return max(self.log.log_start_offset, self._moves.owed)

    @property
    def commit_end(self) -> RaftIndex:
        """Everything below is committed, as far as known here."""
        return self._commit_end

    @property
    def configuration(self) -> Configuration:
        """The replicas of this group, as the newest entry of this log has it."""
        return self.core.configuration

    @property
    def voters(self) -> tuple[ReplicaId, ...]:
        """Who counts in the quorum."""
        return self.core.configuration.voters

    @property
    def learners(self) -> tuple[ReplicaId, ...]:
        """Who only copies."""
        return self.core.configuration.learners

    def follower_end_offset(self, replica: ReplicaId) -> Offset | None:
        """Up to where another replica is known to have flushed; None when nothing is known."""
        progress = self.core.progress.get(replica)
        if progress is None or progress.match_end < self.log.log_start.index:
            return None
        return self.log.offset_of(min(progress.match_end, self.log.end_index))

    def in_sync_replicas(self) -> tuple[ReplicaId, ...]:
        """Leader and voters caught up within the allowed lag; only a leader knows."""
        if not self.is_leader:
            return ()
        if self.resting.is_resting:
            # It began with all of them caught up, but for the absent, and ends with any silence.
            return tuple(voter for voter in self.voters if voter not in self.resting.absent)
        now_ms = self._clock.monotonic_ms()
        lag_ms = self.config.replica_lag_time_max_ms
        return tuple(
            voter
            for voter in self.voters
            if voter == self.self_id or self._in_sync.is_in_sync(voter, now_ms, lag_ms)
        )

    def catching_up(self) -> list[ReplicaId]:
        """Replicas that answer and lack what they should have; only a leader knows."""
        if not self.is_leader or self.resting.is_resting:
            return []
        core = self.core
        in_sync = self.in_sync_replicas()
        found = []
        for replica in self.configuration.members:
            progress = core.progress.get(replica)
            if progress is None or replica == self.self_id or replica in in_sync:
                continue
            is_heard = core.now - progress.last_heard_tick <= self.config.election_ticks
            if is_heard and progress.match_end < core.commit_end:
                found.append(replica)
        return found

    def bytes_behind(self, follower: ReplicaId) -> int:
        """About how many bytes of this log another replica is not known to have."""
        offset = self.follower_end_offset(follower)
        return self.log.bytes_from(self.log.log_start_offset if offset is None else offset)

    def is_close_behind(self, node_id: NodeId) -> bool:
        """True for a voter that was sent everything and has little left to flush: it could take
        over in a moment. Only a leader knows; nothing is taken in while it hands over."""
        for voter, progress in self.core.progress.items():
            if voter.node_id == node_id and voter in self.voters:
                return (
                    progress.state is ProgressState.REPLICATE
                    and progress.next_end == self.core.log_end
                    and progress.inflight_bytes <= CLOSE_BYTES
                )
        return False

    def flushed_voters(self, end: RaftIndex) -> int:
        """How many voters are known to have flushed everything below `end`; only a leader knows."""
        return sum(1 for voter in self.voters if self.flushed_end_of(voter) >= end)

    def flushed_end_of(self, replica: ReplicaId) -> RaftIndex:
        """What a replica is known to have flushed; of others only a leader knows."""
        if replica == self.self_id:
            return self.log.flushed_end
        progress = self.core.progress.get(replica)
        return RaftIndex(0) if progress is None else progress.match_end

    @property
    def is_settled(self) -> bool:
        """True when all there is is committed, flushed and fulfilled, and nothing waits."""
        core = self.core
        return (
            core.log_end == core.commit_end == core.flushed_end == self._commit_end
            and not (core.suspended or core.claimed_end_floor)
            and not (len(self._outbox) or len(self._barriers) or len(self._moves))
            and self.place.is_durable
        )

    @property
    def waits_for_journal(self) -> bool:
        """True when a journal flush would let something go on."""
        return not self.place.is_durable

    def has_all_of(self, follower: ReplicaId, lag_ms_max: float) -> bool:
        """True when a follower, learners included, had everything within that time."""
        return self._in_sync.is_in_sync(follower, self._clock.monotonic_ms(), lag_ms_max)

    def follow_wish(self, wish: Callable[[], Wish | None]) -> None:
        """Work, while leading, towards the membership that `wish()` gives."""
        self._readmission.wish = wish

    @property
    def is_wish_pending(self) -> bool:
        """True on a leader whose group is not made up yet as it should be."""
        return self.is_leader and self._readmission.is_pending

    def vouch(self, follower: ReplicaId) -> None:
        """A follower was in sync until now, although it said nothing."""
        self._in_sync.vouch(follower, self._clock.monotonic_ms())

    def damaged(self) -> Sequence[tuple[Offset, Offset]]:
        """Offset ranges whose bytes are damaged here and not served."""
        return self.log.damaged
