"""What a replica needs: its state machine, the node that runs it, its settings."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from attrs import frozen

from raftmq.log.log_start import LogStart
from raftmq.log.model import LogEntry
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.ports import DiskError, Runnable
from raftmq.raft.messages import SoftState
from raftmq.raft.replica_state import RaftConfig
from raftmq.replication.broken_invariants import ReportBroken
from raftmq.replication.messages import PeerMessage
from raftmq.types import Buffer, Offset, RaftGroupId, RaftIndex, ReplicaId


class StateMachine(Protocol):
    """What a group replicates: a partition with Kafka's meaning, or the metadata image."""

    def appended(self, entry: LogEntry) -> None:
        """An entry was written, on leader and follower alike, in log order; not yet committed."""
        ...

    def truncated(self, end: RaftIndex) -> None:
        """Entries from `end` on are gone."""
        ...

    def committed(self, high_watermark: Offset, commit_end: RaftIndex) -> None:
        """The high watermark moved up."""
        ...

    def role_changed(self, soft: SoftState) -> None:
        """This replica leads, follows another leader, or stopped."""
        ...

    def progressed(self) -> None:
        """A flushed end, here or at a follower, or the log start moved. Called after `committed`,
        once for all that one input caused."""
        ...

    def state_at(self, offset: Offset, index: RaftIndex) -> bytes | None:
        """The state exactly at a committed offset, for a log start there. None when that takes
        longer than a few milliseconds: called for the same offset again, it goes on."""
        ...

    def restore(self, log_start: LogStart) -> None:
        """Begin anew at a log start: at opening, and when a leader installs one."""
        ...


@runtime_checkable
class LogReader(Protocol):
    """A state machine that reads what was committed back from the log (the metadata image)."""

    def attach_log(self, log: ReplicatedLog) -> None:
        """The log is open; called before `restore`."""
        ...


@runtime_checkable
class StateChecker(Protocol):
    """A state machine that can tell whether it could begin with a state that a peer sent."""

    def check_state(self, log_start: LogStart) -> None:
        """Raise whatever `restore` would. A large state that the work of `restoring` is still to
        decode passes; it is checked again after that."""
        ...


@runtime_checkable
class GrowingState(Protocol):
    """A state machine that can tell how large its state might be by now (a partition)."""

    @property
    def state_bytes_max(self) -> int:
        """No fewer than `state_at` would return."""
        ...


@runtime_checkable
class UncheckedReader(Protocol):
    """A state machine that reads headers of stored batches without their sums (a partition)."""

    def doubt(self, offset: Offset) -> None:
        """From `offset` on the log was damaged, and is about to be repaired. Raises DiskError."""
        ...


@runtime_checkable
class SlowRestorer(Protocol):
    """A state machine whose state may be large (the metadata image)."""

    def restoring(self, state: Buffer) -> Runnable | None:
        """Work for another thread, after which `restore` from this state is quick; None: it is so
        without any."""
        ...


class ReplicaHost(Protocol):
    """The node that runs a replica, beside others (`MultiRaft`)."""

    @property
    def on_broken_invariant(self) -> ReportBroken: ...

    def send(self, group: RaftGroupId, message: PeerMessage) -> None:
        """Send to another node without blocking; may drop when its bounded queue is full."""
        ...

    def touch(self, group: RaftGroupId) -> None:
        """Something happened to the group's replica from outside a `drain`: drain it soon, and end
        its quiescence."""
        ...

    def journal_failed(self, error: DiskError) -> None:
        """The journal that all groups share cannot be written: the node must stop."""
        ...


@frozen(slots=True, kw_only=True)
class ReplicaConfig:
    """The settings of one replica."""

    election_ticks: int = 6
    heartbeat_ticks: int = 2
    append_bytes_max: int = 1 << 20
    inflight_bytes_max: int = 8 << 20
    inflight_messages_max: int = 64
    pre_vote: bool = True
    check_quorum: bool = True
    priority: int = 0
    announce_commit: bool = False
    replica_lag_time_max_ms: float = 10_000
    disk_full_backoff_ms: float = 500
    repair_bytes_max: int = 1 << 20
    quiesce_after_ticks: int = 0
    """Quiesce the group after so many idle ticks; 0 means never."""

    def raft(self, self_id: ReplicaId) -> RaftConfig:
        """The settings of its core."""
        return RaftConfig(
            self_id=self_id,
            election_ticks=self.election_ticks,
            heartbeat_ticks=self.heartbeat_ticks,
            append_bytes_max=self.append_bytes_max,
            inflight_bytes_max=self.inflight_bytes_max,
            inflight_messages_max=self.inflight_messages_max,
            pre_vote=self.pre_vote,
            check_quorum=self.check_quorum,
            priority=self.priority,
            announce_commit=self.announce_commit,
        )
