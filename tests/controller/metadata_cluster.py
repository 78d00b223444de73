"""A control plane on every node over a pretended Raft; time, network, elections in the test's hand.

Everything above the replica is the real code. The pretended group copies the leader's log to all
nodes that are up and connected whenever it is told to, and commits with a majority.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Final

import pytest
from attrs import evolve

from raftmq.controller.broker_lifecycle import BrokerInfo
from raftmq.controller.control_plane import ControlPlane
from raftmq.controller.controller import ControllerConfig
from raftmq.errors import ErrorCode, KafkaError, NotLeaderError
from raftmq.log.log_start import LogStart
from raftmq.log.model import LogEntry
from raftmq.metadata.broker_messages import FORMAT_MAX, Asker, PartitionSize, Way
from raftmq.metadata.commands import Endpoint, FeatureUpdate
from raftmq.metadata.engine import EngineConfig
from raftmq.metadata.features import SUPPORTED, Ranges, named
from raftmq.metadata.raft_engine import RaftMetadataEngine
from raftmq.metadata.state_machine import MetadataMachine
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import EntryKind, Role, SoftState
from raftmq.records import BatchHeader, stamp
from raftmq.replication.membership import TargetMembership, next_configuration
from raftmq.rights import Authorizer
from raftmq.types import (
    LeaderEpoch,
    NodeId,
    Offset,
    RaftIndex,
    ReplicaId,
    StorageId,
    Term,
    TopicId,
)

TICK_MS = 25.0


class FakeClock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now_ms = 1_000.0

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + int(self.now_ms)


CLIENT: Final = Asker(Way.CLIENT, "User:ANONYMOUS", "10.0.0.9", "PLAINTEXT")


class FakeReplica:
    """One node's copy of the pretended group."""

    def __init__(self, cluster: MetadataCluster, self_id: ReplicaId, machine: MetadataMachine):
        self.cluster = cluster
        self.self_id = self_id
        self.machine = machine
        self.log: list[LogEntry] = []
        self.offsets: list[int] = []  # offset after each entry
        self.commit_end = 0
        self.barriers: list[Promise[RaftIndex]] = []
        self.snapshots: list[tuple[int, bytes]] = []
        self.target: Callable[[], TargetMembership | None] = lambda: None
        machine.attach_log(self)

    # what the machine reads

    log_start = LogStart()

    def entries(self, start: RaftIndex, bytes_max: int) -> tuple[LogEntry, ...]:
        return tuple(entry for entry in self.log if entry.start >= start)

    # what the engine sees

    @property
    def is_leader(self) -> bool:
        return (
            self.cluster.leader == self.self_id.node_id and self.self_id.node_id in self.cluster.up
        )

    @property
    def is_writable(self) -> bool:
        return self.is_leader and self.commit_end >= self.cluster.term_start

    @property
    def leader(self) -> ReplicaId | None:
        return self.cluster.known_leader(self.self_id.node_id)

    @property
    def leader_epoch(self) -> LeaderEpoch:
        return LeaderEpoch(self.cluster.epoch)

    @property
    def log_end_offset(self) -> Offset:
        return Offset(self.offsets[-1] if self.offsets else 0)

    @property
    def end(self) -> RaftIndex:
        return RaftIndex(self.log[-1].end if self.log else 0)

    @property
    def configuration(self) -> Configuration:
        return self.cluster.configuration

    def change_membership(self, configuration: Configuration) -> None:
        if not self.is_writable:
            raise NotLeaderError()
        self.cluster.configuration = configuration
        self._add(EntryKind.MEMBERSHIP, b"", 1, 0)

    def follow_target_membership(self, target: Callable[[], TargetMembership | None]) -> None:
        self.target = target

    def step_towards_target(self) -> None:
        """Take the next step of the membership, as a leader does."""
        target = self.target() if self.is_writable else None
        if target is None:
            return
        configuration = self.cluster.configuration
        live = [m for m in configuration.members if m.node_id in self.cluster.up]
        step = next_configuration(configuration, {}, live, live, target)
        if step is not None:
            self.change_membership(step)

    def append(self, batch: bytearray, header: BatchHeader) -> Offset:
        if not self.is_leader:
            raise NotLeaderError()
        base = self.log_end_offset
        stamp(batch, base, self.cluster.epoch)
        self._add(EntryKind.BATCH, bytes(batch), header.offset_count, header.offset_count)
        return base

    def read_barrier(self) -> Promise[RaftIndex]:
        promise: Promise[RaftIndex] = Promise()
        if self.is_leader:
            self.barriers.append(promise)
        else:
            promise.fail(NotLeaderError())
        return promise

    def move_log_start(self, target: Offset) -> None:
        assert target == self.log_end_offset
        self._add(EntryKind.LOG_START, str(target).encode(), 1, 0)

    def _add(self, kind: EntryKind, payload: bytes, width: int, records: int) -> None:
        start = self.end
        epoch = LeaderEpoch(self.cluster.epoch)
        offset = self.log_end_offset + records
        entry = LogEntry(start, RaftIndex(start + width), epoch, int(kind), payload)
        self._take(entry, offset)

    def _take(self, entry: LogEntry, offset: int) -> None:
        self.log.append(entry)
        self.offsets.append(offset)
        self.machine.appended(entry)

    def follow(self, leader: FakeReplica) -> None:
        """Copy the leader's log."""
        same = 0
        while same < min(len(self.log), len(leader.log)) and self.log[same] == leader.log[same]:
            same += 1
        if same < len(self.log):
            end = self.log[same].start
            assert end >= self.commit_end
            del self.log[same:], self.offsets[same:]
            self.machine.truncated(end)
        for entry, offset in zip(leader.log[same:], leader.offsets[same:], strict=True):
            self._take(entry, offset)

    def commit(self, end: int) -> None:
        """Everything below `end` is committed."""
        if end <= self.commit_end:
            return
        before, self.commit_end = self.commit_end, end
        offsets = [o for e, o in zip(self.log, self.offsets, strict=True) if e.end <= end]
        self.machine.committed(Offset(offsets[-1]), RaftIndex(end))
        for entry in self.log:
            if before < entry.end <= end and entry.kind == EntryKind.LOG_START:
                target = int(bytes(entry.payload))
                index = RaftIndex(entry.start)
                self.snapshots.append((target, self.machine.state_at(Offset(target), index)))


class Node:
    """One node's control plane."""

    def __init__(self, cluster: MetadataCluster, node_id: int, storage_id: int, incarnation: int):
        self.node_id = NodeId(node_id)
        self.self_id = ReplicaId(self.node_id, StorageId(storage_id))
        supported = cluster.supported.get(node_id, SUPPORTED)
        self.wants_drain = False
        """Asked for a drain; `turn` drains the nodes that did until nothing is left to do."""
        self.machine = MetadataMachine(supported=supported)
        self.replica = FakeReplica(cluster, self.self_id, self.machine)
        self.engine = RaftMetadataEngine(
            self_id=self.node_id,
            incarnation=incarnation,
            machine=self.machine,
            forwarder=cluster.forwarder(self.node_id),
            clock=cluster.clock,
            on_broken_invariant=pytest.fail,
            wake=self._drain_later,
            drain_later=self._drain_later,
            on_unauthorized=lambda *refused: cluster.unauthorized.append(refused),
            config=cluster.engine_config,
            first_levels=lambda: cluster.first_levels,
        )
        self.moves: list[tuple[TopicId, int, NodeId]] = []
        self.sizes: tuple[PartitionSize, ...] = ()
        self.control = ControlPlane(
            BrokerInfo(
                self.self_id,
                "test",
                cluster.racks.get(node_id),
                (
                    Endpoint("client", "127.0.0.1", 9000 + node_id),
                    Endpoint("peer", "127.0.0.1", 9100 + node_id),
                ),
                features=named(supported),
                replicas_max=cluster.reported_max.get(node_id, 0),
            ),
            self.engine,
            cluster.forwarder(self.node_id),
            clock=cluster.clock,
            random=Random(f"{node_id}"),
            config=evolve(cluster.controller_config, supported=supported),
            heartbeat_ms=250,
            bootstrap=cluster.voters,
            move_locally=self._move,
            learn_address=lambda _node_id, _where: None,  # no address is needed here
            quorum_view=lambda: None,
            sizes_here=lambda: self.sizes,
            authorizer=cluster.authorizer_of(self),
            call_refused=lambda *refused: cluster.refused.append(refused),
            request_refused=lambda *refused: cluster.refused.append(refused),
            drain_later=self._drain_later,
        )
        self.engine.attach(self.replica, cluster.voters)

    def _drain_later(self) -> None:
        self.wants_drain = True

    def _move(self, topic_id: TopicId, partition: int, to: NodeId) -> bool:
        self.moves.append((topic_id, partition, to))
        return True


class _Forwarder:
    def __init__(self, cluster: MetadataCluster, node_id: NodeId) -> None:
        self._cluster = cluster
        self._node_id = node_id

    def version(self, node_id: NodeId) -> int:
        return self._cluster.formats.get(node_id, FORMAT_MAX)

    def send(self, node_id: NodeId, payload: bytes, *, is_beat: bool = False) -> Promise[bytes]:
        return self._cluster.send(self._node_id, node_id, payload)


class MetadataCluster:
    """Nodes, network and the pretended group."""

    def __init__(
        self,
        voters: int = 3,
        *,
        racks: dict[int, str] | None = None,
        engine_config: EngineConfig | None = None,
        static: dict[str, str] | None = None,
        replicas_max: int = 20_000,
        reported_max: dict[int, int] | None = None,
        supported: dict[int, Ranges] | None = None,
        formats: dict[int, int] | None = None,
        first_levels: tuple[FeatureUpdate, ...] = (),
        super_users: tuple[str, ...] | None = None,
    ) -> None:
        """`super_users`: of an authorizer; None: there is none."""
        self.first_levels = first_levels
        self.super_users = super_users
        self.refused: list[tuple[Any, ...]] = []
        self.unauthorized: list[tuple[Any, ...]] = []
        self.supported = supported or {}
        self.formats = formats or {}
        self.clock = FakeClock()
        self.voters = tuple(NodeId(n) for n in range(1, voters + 1))
        self.racks = racks or {}
        self.reported_max = reported_max or {}
        self.engine_config = engine_config or EngineConfig()
        self.controller_config = ControllerConfig(
            static=static or {}, voters_count=voters, replicas_max=replicas_max
        )
        self.leader: int | None = None
        self.epoch = 0
        self.term_start = 0
        self.up: list[int] = []
        self.cut: list[int] = []
        self.lost_replies_from: list[int] = []
        self.configuration = Configuration(
            tuple(ReplicaId(n, StorageId(100 + n)) for n in self.voters), ()
        )
        self.nodes: dict[int, Node] = {}
        self._mail: deque[tuple[NodeId, NodeId, bytes, Promise[bytes]]] = deque()
        self.auto_lead = False
        self._incarnation = 0
        for node_id in self.voters:
            self.start(node_id)

    def authorizer_of(self, node: Node) -> Authorizer | None:
        if self.super_users is None:
            return None
        return Authorizer(lambda: node.engine.image.rules, self.super_users)

    # ---- nodes ----

    def start(self, node_id: int, storage_id: int | None = None) -> Node:
        """Start a node's process (again): its log is what the group has committed."""
        self._incarnation += 1
        node = Node(self, node_id, storage_id or 100 + node_id, self._incarnation)
        self.nodes[node_id] = node
        self.up = sorted({*self.up, node_id})
        return node

    def kill(self, node_id: int) -> None:
        """End a node's process."""
        self.up.remove(node_id)
        if self.leader == node_id:
            self.leader = None
            for other in self.up:
                self._tell_role(other)

    def elect(self, node_id: int) -> None:
        """Make a node the leader of the group."""
        self.epoch += 1
        self.leader = node_id
        replica = self.nodes[node_id].replica
        for other in self.up:
            self._tell_role(other)
        replica._add(EntryKind.ELECTION, b"", 1, 0)
        self.term_start = replica.end

    def _tell_role(self, node_id: int) -> None:
        role = Role.LEADER if node_id == self.leader else Role.FOLLOWER
        soft = SoftState(role, Term(self.epoch), self.known_leader(node_id))
        self.nodes[node_id].machine.role_changed(soft)

    def known_leader(self, node_id: int) -> ReplicaId | None:
        if self.leader is None or node_id in self.cut:
            return None
        members = (*self.configuration.voters, *self.configuration.learners)
        if node_id not in [m.node_id for m in members]:
            return None
        return self.nodes[self.leader].self_id

    # ---- network ----

    def forwarder(self, node_id: NodeId) -> _Forwarder:
        return _Forwarder(self, node_id)

    def send(self, sender: NodeId, to: NodeId, payload: bytes) -> Promise[bytes]:
        promise: Promise[bytes] = Promise()
        if to not in self.up or to in self.cut or sender in self.cut:
            promise.fail(KafkaError("not reached", code=ErrorCode.NETWORK_EXCEPTION))
        else:
            self._mail.append((sender, to, payload, promise))
        return promise

    def deliver(self) -> None:
        """Deliver all mail and its replies."""
        while self._mail:
            sender, to, payload, promise = self._mail.popleft()
            if to not in self.up or sender not in self.up or to in self.cut:
                promise.fail(KafkaError("lost", code=ErrorCode.NETWORK_EXCEPTION))
                continue
            answer = self.nodes[to].control.receive(sender, payload)
            is_lost = to in self.lost_replies_from

            def reply(
                done: Promise[bytes], promise: Promise[bytes] = promise, is_lost: bool = is_lost
            ) -> None:
                if promise.is_done:
                    return
                if is_lost:
                    promise.fail(KafkaError("lost", code=ErrorCode.NETWORK_EXCEPTION))
                else:
                    promise.resolve(done.result())

            answer.when_done(reply)

    # ---- the group ----

    def replicate(self) -> None:
        """Copy the leader's log to whoever is reachable; commit with a majority."""
        if self.leader is None or self.leader in self.cut:
            return
        leader = self.nodes[self.leader].replica
        members = (*self.configuration.voters, *self.configuration.learners)
        reached = [n for n in self.up if n not in self.cut]
        for node_id in reached:
            if self.nodes[node_id].self_id in members and node_id != self.leader:
                self.nodes[node_id].replica.follow(leader)
        voters = [v.node_id for v in self.configuration.voters]
        if len([n for n in reached if n in voters]) * 2 <= len(voters):
            return
        end = leader.end
        leader.commit(end)
        barriers, leader.barriers = leader.barriers, []
        for promise in barriers:
            promise.resolve(RaftIndex(end))
        leader.step_towards_target()
        for node_id in reached:
            if self.nodes[node_id].self_id in members and node_id != self.leader:
                self.nodes[node_id].replica.commit(end)

    def turn(self) -> None:
        """Let everything happen that needs no time."""
        for _ in range(30):
            self.replicate()
            for node_id in list(self.up):
                node = self.nodes[node_id]
                if node.wants_drain:
                    node.wants_drain = False
                    node.control.drain()
            if self.auto_lead:
                self.lead_all()
            idle = not self._mail and all(
                self.nodes[n].replica.end == self.nodes[n].replica.commit_end
                and not self.nodes[n].replica.barriers
                for n in self.up
            )
            self.deliver()
            if idle and not self._mail:
                return

    def run(self, ms: float) -> None:
        """Let time pass."""
        end = self.clock.now_ms + ms
        self.turn()
        while self.clock.now_ms < end:
            self.clock.now_ms += TICK_MS
            for node_id in list(self.up):
                self.nodes[node_id].control.tick()
            self.turn()

    def lead_all(self) -> None:
        """Give every partition its preferred leader, as elections of partitions would."""
        for node_id in self.up:
            node = self.nodes[node_id]
            for topic in node.engine.image.topics_by_id():
                for partition in topic.partitions:
                    live = [n for n in partition.replicas if n in self.up]
                    if live and live[0] == node_id:
                        node.control.partition_led(
                            topic.topic_id,
                            partition.index,
                            leader_epoch=LeaderEpoch(1),
                            isr=[self.nodes[n].self_id for n in live],
                            voters=[self.nodes[n].self_id for n in partition.replicas],
                            seen_version=partition.target_version,
                            creation_epoch=partition.creation_epoch,
                        )

    @classmethod
    def formed(cls, voters: int = 3, **options: object) -> MetadataCluster:
        """A cluster with a controller (node 1) and all brokers ready."""
        cluster = cls(voters, **options)  # type: ignore[arg-type]  # passed through
        cluster.elect(1)
        cluster.run(300)
        for node_id in cluster.voters:
            assert cluster.nodes[node_id].control.lifecycle.is_ready
        return cluster
