"""Replicas of some groups on simulated disks and a network, with nothing of a node above them.

Owns what survives a crash (the disk, the storage id) and what does not (all the rest). A power loss
in the middle of an operation becomes a crash. Every replica is watched as in whole simulated nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from attrs import frozen

from jepsen_like.cluster.watch import SlowWatcher, Watcher
from jepsen_like.cluster.world import Counts
from jepsen_like.disk import SimCrash, SimDisk
from jepsen_like.invariants import Invariants
from jepsen_like.virtual_time import EPOCH_MS, VirtualTime
from raftmq.log.journal import HardStateJournal, JournalConfig
from raftmq.log.log_start import LogStart
from raftmq.log.model import FlushJob, LogConfig, LogEntry
from raftmq.log.shared import Shared
from raftmq.ports import DiskError, DiskFullError
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import SoftState
from raftmq.replication.multiraft import MultiRaft, Stream
from raftmq.replication.opening import Opening, open_replica
from raftmq.replication.ports import ReplicaConfig
from raftmq.replication.replica import Replica
from raftmq.types import (
    METADATA_GROUP,
    Buffer,
    NodeId,
    Offset,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    StorageId,
    TopicId,
)
from tests.replication.inline import InlineCatchUp, stored_as_frames

TICK_MS = 25
LATENCY_MS = (0.5, 4.0)
SCRUB_BYTES = 500


def _broken(reason: str) -> None:
    raise AssertionError(reason)


@frozen(kw_only=True)
class Options:
    """What the nodes are like."""

    nodes: int = 3
    groups: int = 1
    election_ticks: int = 8
    heartbeat_ticks: int = 2
    fsync_ms: tuple[float, float] = (0.5, 1.0)
    segment_bytes: int = 1_500
    append_bytes_max: int = 2_000
    quiesce_after_ticks: int = 0
    narrow: bool = False
    """Whether topics shrink; here are none."""


class Machine:
    """A state machine without a state."""

    def __init__(self) -> None:
        self.doubted: list[int] = []

    def appended(self, entry: LogEntry) -> None:
        """Nothing comes of it."""

    def truncated(self, end: RaftIndex) -> None:
        """Nothing comes of it."""

    def committed(self, high_watermark: Offset, commit_end: RaftIndex) -> None:
        """Nothing comes of it."""

    def role_changed(self, soft: SoftState) -> None:
        """Nothing comes of it."""

    def progressed(self) -> None:
        """Nothing comes of it."""

    def state_at(self, offset: Offset, index: RaftIndex) -> bytes:
        """All that was before."""
        return b"%d" % index

    def doubt(self, offset: Offset) -> None:
        """What was damaged is about to be repaired."""
        self.doubted.append(offset)

    def restore(self, log_start: LogStart) -> None:
        """Nothing comes of it."""


class Clock:
    """A node's clocks: the monotonic one is the world's, the other is off."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.skew_ms = 0.0

    def monotonic_ms(self) -> float:
        return self._world.now_ms

    def wall_ms(self) -> int:
        return int(EPOCH_MS + self._world.now_ms + self.skew_ms)


class Network:
    """Frames arrive after a while, where links are not cut."""

    def __init__(self, world: World, random: Random) -> None:
        self._world = world
        self._random = random
        self._cut: dict[tuple[int, int], bool] = {}
        self.sent = 0

    def send(self, sender: int, to: int, frame: Sequence[Buffer]) -> bool:
        self.sent += 1
        data = b"".join(frame)
        delay_ms = self._random.uniform(*LATENCY_MS)
        self._world.schedule(delay_ms, lambda: self._arrive(sender, to, data))
        return True

    def _arrive(self, sender: int, to: int, data: bytes) -> None:
        node = self._world.nodes[to - 1]
        if (sender, to) not in self._cut and node.is_up:
            node.deliver(sender, data)

    def cut(self, sender: int, to: int) -> None:
        self._cut[sender, to] = True

    def mend_all(self) -> None:
        self._cut.clear()


class SimNode:
    """One node of the world."""

    make_machine: Callable[[], Any] = Machine

    def __init__(self, world: World, node_id: int, random: Random) -> None:
        self.world = world
        self.node_id = NodeId(node_id)
        self.disk = SimDisk(random)
        self.storage_id = StorageId(random.getrandbits(63) | 1)
        self.incarnation = 0
        self.is_up = False
        self.multiraft: MultiRaft | None = None
        self.journal: HardStateJournal | None = None
        self.machines: dict[RaftGroupId, Watcher] = {}
        self._flushed: dict[RaftGroupId, tuple[ReplicaId, int]] = {}
        """As whom, and how far, a replica had flushed when its node went down."""
        self._is_inside = False
        self._random = random
        self.clock = Clock(world)

    @property
    def replicas(self) -> dict[RaftGroupId, Replica]:
        """What runs here now; empty when down."""
        return {} if self.multiraft is None else self.multiraft.replicas

    def start(self) -> None:
        """Boot from what the disk holds."""
        assert not self.is_up
        self.incarnation += 1
        self.is_up = True
        try:
            self.run(self._boot)
        except DiskFullError:
            # As a supervisor does: the node cannot start now, try again later.
            self.crash()
            self._restart_in(100.0)
        if self.is_up:
            self._schedule_tick()

    def _boot(self) -> None:
        self.disk.make_directories("data")
        self.journal = HardStateJournal.open(
            self.disk,
            "data/state.journal",
            config=JournalConfig(size_max=16 << 10, reserve_bytes=8 << 10),
        )
        self.multiraft = MultiRaft(
            self.node_id,
            self.journal,
            send=self._send,
            send_stored=stored_as_frames(self._send),
            request_flush=self._request_flush,
            on_journal_failed=lambda _error: self.crash(),
            on_broken_invariant=_broken,
        )
        opening = Opening(
            node=ReplicaId(self.node_id, self.storage_id),
            disk=self.disk,
            journal=self.journal,
            host=self.multiraft,
            catch_up=InlineCatchUp(),
            clock=self.clock,
            random=self._random,
            shared=Shared.make(self.disk),
        )
        self.machines = {}
        with self.multiraft.batch():
            for number, group in enumerate(self.world.groups):
                self.multiraft.register(self._open(opening, number, group))

    def _open(self, opening: Opening, number: int, group: RaftGroupId) -> Replica:
        options = self.world.options
        machine = self.make_machine()
        replica = open_replica(
            opening,
            group,
            f"data/group-{number}",
            initial=self.world.initial,
            machine=machine,
            log_config=LogConfig(
                segment_bytes=options.segment_bytes,
                index_interval_bytes=256,
                bare_reserve_bytes=2048,
            ),
            config=ReplicaConfig(
                election_ticks=options.election_ticks,
                heartbeat_ticks=options.heartbeat_ticks,
                append_bytes_max=options.append_bytes_max,
                inflight_messages_max=8,
                announce_commit=group == METADATA_GROUP,
                replica_lag_time_max_ms=1_000,
                disk_full_backoff_ms=100,
                quiesce_after_ticks=options.quiesce_after_ticks,
            ),
        )
        kind = SlowWatcher if hasattr(machine, "restoring") else Watcher
        world: Any = self.world
        watcher = self.machines[group] = kind(world, self.world.invariants, replica)
        replica.machine = watcher
        identity, flushed_end = self._flushed.get(group, (replica.self_id, 0))
        # In the middle of a truncation nobody could say what must be there afterwards.
        end = replica.log.end_index
        self.world.invariants.booted(group, identity, replica.self_id, flushed_end, end)
        watcher.durable_end = flushed_end
        return replica

    def crash(self) -> None:
        """Lose power: unsynced bytes are kept, lost or torn."""
        if not self.is_up:
            return
        self.is_up = False
        self.incarnation += 1
        for group, replica in self.replicas.items():
            flushed_end = 0 if self._is_inside else int(replica.log.flushed_end)
            self._flushed[group] = replica.self_id, flushed_end
        self.multiraft = None
        self.journal = None
        self.machines = {}
        self.disk.crash(self._random)

    def wipe(self) -> None:
        """Lose the disk as well; the node comes back as another storage."""
        self.crash()
        self.forget()
        self.disk = SimDisk(self._random)
        self.storage_id = StorageId(self._random.getrandbits(63) | 1)

    def forget(self) -> None:
        """What was flushed here need not be there at the next start."""
        self._flushed.clear()

    def lose_folder(self, number: int) -> None:
        """Lose one group's files, and nothing else."""
        self.crash()
        self._flushed.pop(self.world.groups[number], None)
        self.disk.remove_tree(f"data/group-{number}")

    def run(self, action: Callable[[], None]) -> None:
        """Let something happen to this node; a power loss in the middle of it is a crash."""
        was_inside, self._is_inside = self._is_inside, True
        try:
            action()
        except SimCrash:
            self.crash()
        finally:
            self._is_inside = was_inside

    # ---- inputs ----

    def later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do something on this node's loop or in a thread of it, unless it dies before."""
        incarnation = self.incarnation

        def fire() -> None:
            if self.incarnation == incarnation and self.is_up:
                self.run(action)

        self.world.schedule(delay_ms, fire)

    def deliver(self, sender: int, frame: bytes) -> None:
        """A frame arrived."""

        def take() -> None:
            assert self.multiraft is not None
            self.multiraft.deliver(NodeId(sender), memoryview(frame))

        self.later(0.0, take)

    def _schedule_tick(self) -> None:
        self.later(self._random.uniform(0.9, 1.1) * TICK_MS, self._tick)

    def _tick(self) -> None:
        assert self.multiraft is not None
        self._schedule_tick()
        self.multiraft.tick()
        for replica in self.replicas.values():
            replica.scrub(SCRUB_BYTES)
        if any(replica.failure is not None for replica in self.replicas.values()):
            self.crash()  # what a supervisor does about it
            self._restart_in(50.0)

    def _restart_in(self, delay_ms: float) -> None:
        self.world.schedule(delay_ms, lambda: None if self.is_up else self.start())

    # ---- outputs ----

    def _send(self, node_id: NodeId, frame: Sequence[Buffer], _stream: Stream) -> bool:
        return self.world.network.send(self.node_id, node_id, frame)

    def _request_flush(self, job: FlushJob, done: Callable[[DiskError | None], None]) -> None:
        delay_ms = self._random.uniform(*self.world.options.fsync_ms)
        # A flush takes what is written when it begins, at least; where in its time the device
        # really does it is not known.
        begin_ms = delay_ms * self._random.choice((0.0, 0.5, 1.0))

        def sync() -> None:
            error: DiskError | None = None
            try:
                job.run()
            except DiskError as failure:
                error = failure
            self.later(delay_ms - begin_ms, lambda: done(error))

        if begin_ms:
            self.later(begin_ms, sync)
        else:
            sync()


class World(VirtualTime):
    """Nodes and network on virtual time."""

    def __init__(self, seed: int, options: Options) -> None:
        self.counts = Counts()
        super().__init__(seed, self.counts)
        self.options = options
        self.invariants = Invariants()
        # What is judged of whole nodes alone: seals, and whether a new voter has caught up.
        self.watch = SimpleNamespace(
            commits=lambda *_: None,
            seals=SimpleNamespace(commits=lambda *_: None, leads=lambda *_: None),
            durable_end=lambda *_: RaftIndex(1 << 62),
        )
        self.names: dict[RaftGroupId, str] = {}
        self.groups = [METADATA_GROUP] + [
            RaftGroupId(TopicId(UUID(int=number + 10)), number, 7)
            for number in range(1, options.groups)
        ]
        self.network = Network(self, Random(f"network {seed}"))
        self.nodes = [
            SimNode(self, number, Random(f"node {seed} {number}"))
            for number in range(1, options.nodes + 1)
        ]
        first = tuple(ReplicaId(node.node_id, node.storage_id) for node in self.nodes)
        self.initial = Configuration(first)

    def start(self) -> None:
        """Boot all nodes."""
        for node in self.nodes:
            node.start()

    def node(self, node_id: NodeId) -> SimpleNamespace:
        """What a whole node knows of how many voters are wanted: there is none."""
        return SimpleNamespace(core=None)

    def log_start_moves(self, group: RaftGroupId, offset: int) -> None:
        """No client needs to know."""

    def keeps_leader(self, group: RaftGroupId) -> bool:
        """There are reasons for new leaders."""
        return False

    def leaders(self, group: RaftGroupId) -> list[SimNode]:
        """Nodes that believe that they lead, the latest term first."""
        found = [n for n in self.nodes if group in n.replicas and n.replicas[group].is_leader]
        return sorted(found, key=lambda node: -node.replicas[group].leader_epoch)

    def is_whole(self) -> bool:
        """True when every group has all nodes as voters under their present storage, caught up."""
        return all(self._is_group_whole(group) for group in self.groups)

    def _is_group_whole(self, group: RaftGroupId) -> bool:
        leaders = self.leaders(group)
        if not leaders:
            return False
        leader = leaders[0].replicas[group]
        present: list[ReplicaId] = []
        for node in self.nodes:
            replica = node.replicas.get(group)
            if replica is None or replica.log.flushed_end < leader.commit_end:
                return False
            if replica.log.damaged or replica.core.claimed_end_floor:
                return False
            present.append(replica.self_id)
        configuration = leader.configuration
        return (
            configuration.voters == tuple(sorted(present))
            and not configuration.learners
            and leader.core.configurations.is_committed(leader.core.commit_end)
        )
