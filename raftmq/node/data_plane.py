"""The data plane of one node: disk, journal, flushes, links and all its replicas.

Owns what moves bytes and time: ticks, frames between nodes, flushes. Knows nothing of topics or
Kafka; the control plane says which replicas run. One slow turn of the loop delays heartbeats of
every group, so the time between ticks is watched and reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from raftmq.config import NodeConfig
from raftmq.errors import RemoteProtocolError
from raftmq.log.journal import HardStateJournal
from raftmq.log.shared import Shared
from raftmq.logs import structlog
from raftmq.node.environment import Environment
from raftmq.node.loop_watch import LoopWatch
from raftmq.ports import DiskError
from raftmq.promise import Promise
from raftmq.replication.catch_up import CatchUpRate
from raftmq.replication.multiraft import MultiRaft, Stream
from raftmq.replication.ports import ReplicaConfig
from raftmq.runtime.peer_hello import PeerIdentity
from raftmq.runtime.peer_links import (
    KIND_BROKER,
    KIND_BROKER_BEAT,
    KIND_FORMATION,
    KIND_HEARTBEATS,
    KIND_METADATA,
    KIND_RAFT,
)
from raftmq.runtime.peer_streams import KIND_STORED
from raftmq.types import Buffer, NodeId, ReplicaId

logger = structlog.get_logger("raftmq.node")

QUIESCE_AFTER_MS: Final = 1_000
"""A group idle for so long quiesces: no heartbeats of its own (`replication/quiescence.py`)."""
_KINDS: Final = {
    Stream.BULK: KIND_RAFT,
    Stream.CONTROL: KIND_METADATA,
    Stream.HEARTBEAT: KIND_HEARTBEATS,
}
"""The frame that carries Raft's messages on each stream."""

FrameReceiver = Callable[[NodeId, memoryview], None]
KindReceiver = Callable[[NodeId, int, memoryview], None]


class DataPlane:
    """Everything below topics, on one loop.

    Attributes:
        failure: why the node must stop, once it must.
        failed: resolves with that reason.
    """

    def __init__(
        self,
        config: NodeConfig,
        environment: Environment,
        journal: HardStateJournal,
        *,
        on_formation: FrameReceiver,
        on_broker: KindReceiver,
        on_identity: Callable[[ReplicaId], None],
        on_lost: Callable[[NodeId], None],
    ) -> None:
        self.config = config
        self.node_id = NodeId(config.node_id)
        self.folder = environment.folder
        self.self_id = ReplicaId(self.node_id, self.folder.storage_id)
        self.disk = environment.disk
        self.clock = environment.clock
        self.random = environment.random
        self.tasks = environment.tasks
        self.buggify = environment.buggify
        self.disk_space = environment.disk_space
        self.shared = Shared.make(
            self.disk,
            files_max=config.open_files_max,
            index_bytes_max=config.index_memory_bytes_max,
            recent_bytes_max=config.recent_bytes_max,
            make_lock=environment.make_lock,
        )
        self.journal = journal
        self.flusher = environment.flusher
        self.links = environment.connect(self)
        self.multiraft = MultiRaft(
            self.node_id,
            journal,
            send=self._send,
            request_flush=self.flusher.submit,
            on_journal_failed=self._on_journal_failed,
            on_broken_invariant=self.fail,
            send_stored=self.links.send_stored,
        )
        rate = CatchUpRate(self.clock, config.replica_catchup_bytes_per_s)
        self.catch_up = environment.make_catch_up(self.links, rate)
        self.batch_openers = environment.batch_openers
        self.failure: str | None = None
        self.failed: Promise[str] = Promise()
        election_ms = config.tick_ms * config.election_ticks
        self.loop_watch = LoopWatch(election_ms, environment.core_times, environment.core_stolen_ms)
        self._on_formation = on_formation
        self._on_broker = on_broker
        self._identity_told = on_identity
        self._lost_told = on_lost
        self.on_tick: list[Callable[[float], None]] = []
        """Called after every tick of the replicas with the monotonic time in milliseconds."""
        self._pauses: list[tuple[float, Promise[None]]] = []

    def replica_config(self, *, announce_commit: bool = False, priority: int = 0) -> ReplicaConfig:
        """Timing of a replica from this node's configuration."""
        return ReplicaConfig(
            election_ticks=self.config.election_ticks,
            heartbeat_ticks=self.config.heartbeat_ticks,
            announce_commit=announce_commit,
            priority=priority,
            replica_lag_time_max_ms=self.config.replica_lag_time_max_ms,
            quiesce_after_ticks=max(1, QUIESCE_AFTER_MS // self.config.tick_ms),
        )

    def fail(self, reason: str) -> None:
        """The node cannot go on without breaking a promise: what runs it must stop it."""
        if self.failure is None:
            self.failure = reason
            logger.error("node must stop", reason=reason)
            self.failed.resolve(reason)

    def free_bytes(self) -> int:
        """Space that is left where the data lies."""
        return self.disk_space()[1]

    def close(self) -> None:
        """End the flusher threads after the flushes they have."""
        self.multiraft.close()
        self.catch_up.close()
        self.batch_openers.close()
        self.flusher.close()

    # ---- ticks ----

    async def tick_forever(self) -> None:
        """Tick until cancelled."""
        tick_ms, clock = self.config.tick_ms, self.clock
        due_ms = clock.monotonic_ms() + tick_ms
        while True:
            # A quiescent node wakes once per heartbeat, and takes all ticks of that time at once.
            ticks = 1
            if self.multiraft.is_quiescent:
                ticks = self.config.heartbeat_ticks
                due_ms += (ticks - 1) * tick_ms
            await self.tasks.sleep((due_ms - clock.monotonic_ms()) / 1e3)
            late_ms = clock.monotonic_ms() - due_ms
            self.loop_watch.ticked(late_ms)
            # After a pause (SIGSTOP, a slow host) missed ticks are not made up for: the leases of
            # other nodes ran on real time, and a burst of ticks here would depose a live leader.
            due_ms = max(due_ms + tick_ms, clock.monotonic_ms())
            for number in range(ticks):
                self.multiraft.tick(0.0 if number else late_ms / tick_ms)
            self.catch_up.rate.tick()
            now_ms = clock.monotonic_ms()
            for callback in self.on_tick:
                callback(now_ms)
            self._end_pauses(now_ms)

    async def pause(self, seconds: float) -> None:
        """Sleep until the first tick after that time: a quiescent node wakes for it anyway, and a
        wake-up of its own would cost more than the work of maintenance."""
        over: Promise[None] = Promise()
        self._pauses.append((self.clock.monotonic_ms() + seconds * 1e3, over))
        await self.tasks.wait(over)

    def _end_pauses(self, now_ms: float) -> None:
        due = [over for at_ms, over in self._pauses if at_ms <= now_ms]
        if due:
            self._pauses = [pause for pause in self._pauses if pause[0] > now_ms]
            for over in due:
                over.resolve(None)

    # ---- peers ----

    def _send(self, node_id: NodeId, frame: list[Buffer], stream: Stream) -> bool:
        if stream is not Stream.HEARTBEAT and self.buggify("links.full_queue"):
            return False
        return self.links.send(node_id, _KINDS[stream], frame)

    def frame_received(self, sender: PeerIdentity, kind: int, payload: memoryview) -> None:
        """Hand a peer's frame to the part that it is for."""
        if kind in (KIND_RAFT, KIND_METADATA, KIND_HEARTBEATS, KIND_STORED):
            self.multiraft.deliver(sender.node_id, payload)
        elif kind in (KIND_BROKER, KIND_BROKER_BEAT):
            self._on_broker(sender.node_id, kind, payload)
        elif kind == KIND_FORMATION:
            self._on_formation(sender.node_id, payload)
        else:
            raise RemoteProtocolError(f"a frame of kind {kind} from node {sender.node_id}")

    def peer_introduced(self, identity: PeerIdentity) -> None:
        """A peer is there."""
        replica_id = ReplicaId(identity.node_id, identity.storage_id)
        self._identity_told(replica_id)

    def peer_lost(self, node_id: NodeId) -> None:
        """A peer is gone."""
        self.multiraft.peer_lost(node_id)
        self._lost_told(node_id)

    # ---- disk ----

    def _on_journal_failed(self, error: DiskError) -> None:
        self.fail(f"the journal of hard states cannot be flushed: {error}")
