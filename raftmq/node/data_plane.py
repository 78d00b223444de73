"""The data plane of one node: disk, journal, flusher threads, peer links and all its replicas.

Owns what moves bytes and time: ticks, frames between nodes, flushes. Knows nothing of topics or
Kafka; the control plane tells it which replicas to run. One slow turn of the loop delays heartbeats
of every group, so the time between ticks is watched and told.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from random import Random
from typing import Final

import trio

from raftmq.adapters.catch_up import NodeCatchUp
from raftmq.adapters.clock import RealClock
from raftmq.adapters.data_folder import DataFolder
from raftmq.adapters.disk import RealDisk
from raftmq.adapters.flusher import Flusher
from raftmq.adapters.peer_links import (
    KIND_BROKER,
    KIND_FORMATION,
    KIND_HEARTBEATS,
    KIND_RAFT,
    KIND_STORED,
    PeerIdentity,
    PeerLinks,
)
from raftmq.cluster.catch_up import CatchUpRate
from raftmq.cluster.multiraft import MultiRaft
from raftmq.cluster.replica import ReplicaConfig
from raftmq.config import NodeConfig
from raftmq.counts import Histogram
from raftmq.errors import RemoteProtocolError
from raftmq.log.flush import FlushJob
from raftmq.log.hard_state import HardStateJournal
from raftmq.log.shared import Shared
from raftmq.logs import structlog
from raftmq.ports import DiskError
from raftmq.server.log_rate import RateLimitedLog
from raftmq.types import Buffer, NodeId, ReplicaId

logger = structlog.get_logger("raftmq.node")
stalls = RateLimitedLog(logger)

REST_AFTER_MS: Final = 1_000
"""A group idle for so long rests: no heartbeats of its own (`cluster/resting.py`)."""
STALL_SHARE: Final = 0.25
"""A tick later than this share of the election timeout counts as a stall of the loop."""

FrameReceiver = Callable[[NodeId, memoryview], None]


class DataPlane:
    """Everything below topics, on one trio loop.

    Attributes:
        failure: why the node must stop, once it must.
    """

    def __init__(
        self,
        config: NodeConfig,
        disk: RealDisk,
        folder: DataFolder,
        journal: HardStateJournal,
        *,
        on_formation: FrameReceiver,
        on_broker: FrameReceiver,
        on_identity: Callable[[ReplicaId], None],
        on_lost: Callable[[NodeId], None],
    ) -> None:
        """Must be made inside the trio run that will drive it."""
        self.config = config
        self.node_id = NodeId(config.node_id)
        self.self_id = ReplicaId(self.node_id, folder.storage_id)
        self.folder = folder
        self.disk = disk
        self.clock = RealClock()
        self.random = Random()
        self.shared = Shared.make(
            disk,
            files_max=config.open_files_max,
            index_bytes_max=config.index_memory_bytes_max,
            recent_bytes_max=config.recent_bytes_max,
            make_lock=threading.Lock,
        )
        self.journal = journal
        self.flusher = Flusher(config.flusher_threads)
        self.links = PeerLinks(
            cluster_id=config.cluster_id,
            node_id=self.node_id,
            storage_id=folder.storage_id,
            address=config.peer_address,
            queue_bytes_max=config.peer_queue_bytes_max,
            on_frame=self._on_frame,
            on_identity=self._on_identity,
            on_lost=self._on_lost,
            random=self.random,
        )
        self.multiraft = MultiRaft(
            self.node_id,
            journal,
            send=self._send,
            request_flush=self._request_flush,
            on_journal_failed=self._on_journal_failed,
            send_stored=self.links.send_stored,
        )
        self.catch_up = NodeCatchUp(
            self.links, CatchUpRate(self.clock, config.replica_catchup_bytes_per_s)
        )
        self.failure: str | None = None
        self.failed = trio.Event()
        self.loop_lag = Histogram()
        self.loop_stalls_count = 0
        self._on_formation = on_formation
        self._on_broker = on_broker
        self._identity_told = on_identity
        self._lost_told = on_lost
        self.on_tick: list[Callable[[float], None]] = []
        """Called after every tick of the replicas with the monotonic time in milliseconds."""

    def replica_config(self, *, announce_commit: bool = False, priority: int = 0) -> ReplicaConfig:
        """Timing of a replica from this node's configuration."""
        return ReplicaConfig(
            election_ticks=self.config.election_ticks,
            heartbeat_ticks=self.config.heartbeat_ticks,
            announce_commit=announce_commit,
            priority=priority,
            replica_lag_time_max_ms=self.config.replica_lag_time_max_ms,
            rest_after_ticks=max(1, REST_AFTER_MS // self.config.tick_ms),
        )

    async def run(self, peer_listener: socket.socket, task_status: trio.TaskStatus[None]) -> None:
        """Tick, and talk to peers, until cancelled."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.links.run, peer_listener)
            nursery.start_soon(self._tick_forever)
            task_status.started()

    def fail(self, reason: str) -> None:
        """The node cannot go on without breaking a promise; whoever runs it must stop it."""
        if self.failure is None:
            self.failure = reason
            logger.error("node must stop", reason=reason)
            self.failed.set()

    def free_bytes(self) -> int:
        """Space that is left where the data lies."""
        space = os.statvfs(self.folder.path)
        return space.f_frsize * space.f_bavail

    def close(self) -> None:
        """End the flusher threads after the flushes they have."""
        self.multiraft.close()
        self.catch_up.close()
        self.flusher.close()

    # ---- ticks ----

    async def _tick_forever(self) -> None:
        interval_s = self.config.tick_ms / 1e3
        stall_ms = STALL_SHARE * self.config.tick_ms * self.config.election_ticks
        due = trio.current_time() + interval_s
        while True:
            await trio.sleep_until(due)
            late_ms = (trio.current_time() - due) * 1e3
            self.loop_lag.observe(max(0.0, late_ms / 1e3))
            if late_ms > stall_ms:
                self.loop_stalls_count += 1
                stalls.warning("loop stalled", late_ms=round(late_ms, 1))
            # After a pause (SIGSTOP, a slow host) ticks are not made up for: others' leases ran on
            # real time, and a burst of ticks here would depose a leader that is alive.
            due = max(due + interval_s, trio.current_time())
            self.multiraft.tick()
            now_ms = self.clock.monotonic_ms()
            for callback in self.on_tick:
                callback(now_ms)

    # ---- peers ----

    def _send(self, node_id: NodeId, frame: list[Buffer], *, is_heartbeat: bool) -> bool:
        return self.links.send(node_id, KIND_HEARTBEATS if is_heartbeat else KIND_RAFT, frame)

    def _on_frame(self, sender: PeerIdentity, kind: int, payload: memoryview) -> None:
        if kind in (KIND_RAFT, KIND_HEARTBEATS, KIND_STORED):
            self.multiraft.deliver(sender.node_id, payload)
        elif kind == KIND_BROKER:
            self._on_broker(sender.node_id, payload)
        elif kind == KIND_FORMATION:
            self._on_formation(sender.node_id, payload)
        else:
            raise RemoteProtocolError(f"a frame of kind {kind} from node {sender.node_id}")

    def _on_identity(self, identity: PeerIdentity) -> None:
        replica_id = ReplicaId(identity.node_id, identity.storage_id)
        self._identity_told(replica_id)

    def _on_lost(self, node_id: NodeId) -> None:
        self.multiraft.peer_lost(node_id)
        self._lost_told(node_id)

    # ---- disk ----

    def _request_flush(self, job: FlushJob, done: Callable[[DiskError | None], None]) -> None:
        self.flusher.submit(job, done)

    def _on_journal_failed(self, error: DiskError) -> None:
        self.fail(f"the journal of hard states cannot be flushed: {error}")
