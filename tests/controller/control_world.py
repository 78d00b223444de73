"""The whole control plane on virtual time: engine, controller, replica, log, journal, all real.

One seed, one run: nodes crash and lose unsynced bytes, links are cut, frames and calls are lost or
late. Clients on every node propose commands, read behind barriers and create topics meanwhile. The
world notes what was promised and what each node's machine applied, and compares. A node may run a
version from before there were levels (`OLDER`); one that finds the cluster ahead of it stops, and
comes back as the newer version.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from random import Random
from zlib import crc32

import pytest
from attrs import define

from jepsen_like.disk import SimCrash, SimDisk
from raftmq.controller.broker_lifecycle import BrokerInfo
from raftmq.controller.control_plane import ControlPlane
from raftmq.controller.controller import ControllerConfig
from raftmq.controller.reconciler import Action, StopReplica, at_start, reconcile
from raftmq.errors import AheadError, ErrorCode, KafkaError
from raftmq.log.journal import HardStateJournal, JournalConfig
from raftmq.log.model import FlushJob, LogConfig
from raftmq.log.shared import Shared
from raftmq.metadata.apply import STALE_SEQUENCE
from raftmq.metadata.broker_messages import CreateTopicsCall, DeleteTopicsCall, NewTopic
from raftmq.metadata.commands import AllocateProducerIds, Envelope
from raftmq.metadata.engine import CommandNotAppliedError, EngineConfig
from raftmq.metadata.features import FORMATS, SUPPORTED, Ranges, named
from raftmq.metadata.image import RAFTMQ_LEVEL, MetadataImage
from raftmq.metadata.raft_engine import RaftMetadataEngine
from raftmq.metadata.results import Result
from raftmq.metadata.snapshot import SnapshotEncoder, encode_image
from raftmq.metadata.state_machine import AHEAD, MetadataMachine, Skip, UnappliableCommandError
from raftmq.ports import Disk, DiskError
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import SoftState
from raftmq.replication.multiraft import MultiRaft, Stream
from raftmq.replication.opening import Opening, open_replica
from raftmq.replication.ports import ReplicaConfig
from raftmq.types import (
    METADATA_GROUP,
    Buffer,
    LeaderEpoch,
    NodeId,
    Offset,
    RaftIndex,
    ReplicaId,
    StorageId,
    TopicId,
)
from tests.controller.metadata_cluster import CLIENT
from tests.replication.inline import InlineCatchUp, stored_as_frames

TICK_MS = 10.0
OLDER: Ranges = {RAFTMQ_LEVEL: (1, 1)}
"""What a version supports that knows no levels, and registers none."""


class WorldClock:
    """A node's clocks."""

    def __init__(self, world: ControlWorld, skew_ms: float) -> None:
        self._world = world
        self._skew_ms = skew_ms

    def monotonic_ms(self) -> float:
        return self._world.now_ms

    def wall_ms(self) -> int:
        return int(1_700_000_000_000 + self._world.now_ms + self._skew_ms)


@define
class Operation:
    """A command that a client proposed."""

    key: tuple[int, int, int]  # node, incarnation, sequence
    promise: Promise[object]


class Observer:
    """Notes what one process's machine applied."""

    def __init__(self, world: ControlWorld, machine: MetadataMachine) -> None:
        self._world = world
        self._machine = machine
        self._version = -1
        self._encoder = SnapshotEncoder()

    def command_applied(self, envelope: Envelope, result: Result, offset: Offset) -> None:
        if result is not STALE_SEQUENCE:
            key = (envelope.node_id, envelope.incarnation, envelope.sequence)
            self._world.saw_applied(key, offset)

    def command_skipped(self, skip: Skip) -> None:
        pass

    def state_restored(self, image: MetadataImage) -> None:
        pass

    def image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        assert after.version >= self._version, "images never go back"
        self._version = after.version
        self._world.saw_image(after.version, crc32(self._encoder.encode(after)))

    def advanced(self, applied_end: RaftIndex) -> None:
        pass

    def role_changed(self, soft: SoftState) -> None:
        pass


def _journal(disk: Disk) -> HardStateJournal:
    config = JournalConfig(size_max=16 << 10, reserve_bytes=8192)
    return HardStateJournal.open(disk, "data/state.journal", config=config)


class WorldNode:
    """One node: its disk survives a crash, the rest does not."""

    def __init__(self, world: ControlWorld, node_id: int) -> None:
        self.world = world
        self.node_id = NodeId(node_id)
        self.random = Random(f"{world.seed} node {node_id}")
        self.disk = SimDisk(self.random)
        self.storage_id = StorageId(self.random.getrandbits(63) | 1)
        self.clock = WorldClock(world, self.random.uniform(-5_000, 5_000))
        self.life = 0
        self.is_up = False
        self.is_gone = False
        """Never to be started again."""
        self.ranges: Ranges = SUPPORTED
        """What its version supports, from the next start on."""
        self.stops = 0
        """How often it stopped because the cluster was ahead of its version."""
        self.control: ControlPlane
        self.engine: RaftMetadataEngine
        self.multiraft: MultiRaft

    def boot(self) -> None:
        if self.is_gone:
            return
        try:
            self._boot()
        except (UnappliableCommandError, AheadError) as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        """The cluster is ahead of this version: somebody starts the newer one."""
        assert self.ranges is OLDER, error
        assert not isinstance(error, UnappliableCommandError) or error.is_newer, error
        self.crash()
        self.stops += 1
        self.ranges = SUPPORTED
        self.world.schedule(
            self.random.uniform(50, 500), lambda: None if self.is_up else self.boot()
        )

    @property
    def formats(self) -> tuple[int, int]:
        """The oldest and the newest format that it speaks now."""
        low, high = self.ranges[RAFTMQ_LEVEL]
        return FORMATS[max(low, self.engine.image.level)], FORMATS[high]

    def _broken(self, reason: str) -> None:
        if not reason.startswith(AHEAD):
            pytest.fail(reason)

    def _boot(self) -> None:
        self.life += 1
        self.is_up = True
        disk, world = self.disk, self.world
        disk.make_directories("data")
        journal = _journal(disk)
        self.multiraft = MultiRaft(
            self.node_id,
            journal,
            send=self._send,
            send_stored=stored_as_frames(self._send),
            request_flush=self._flush,
            on_journal_failed=lambda _error: self.crash(),
            on_broken_invariant=self._broken,
        )
        machine = MetadataMachine(supported=self.ranges)
        machine.add_listener(Observer(world, machine))
        self_id = ReplicaId(self.node_id, self.storage_id)
        self.engine = RaftMetadataEngine(
            self_id=self.node_id,
            incarnation=self.clock.wall_ms(),
            machine=machine,
            forwarder=_Calls(self),
            clock=self.clock,
            on_broken_invariant=self._broken,
            wake=self._wake,
            drain_later=self._drain_later,
            on_unauthorized=lambda *_refused: None,
            config=EngineConfig(timeout_ms=2_000, resend_ms=300, snapshot_bytes_min=6_000),
        )
        self.control = self._new_control(self_id)
        self.replica = replica = open_replica(
            Opening(
                node=self_id,
                disk=disk,
                journal=journal,
                host=self.multiraft,
                catch_up=InlineCatchUp(),
                clock=self.clock,
                random=self.random,
                shared=Shared.make(disk),
            ),
            METADATA_GROUP,
            "data/meta",
            initial=world.initial,
            machine=machine,
            log_config=LogConfig(segment_bytes=4_000, index_interval_bytes=256, retention_ms=-1),
            config=ReplicaConfig(
                election_ticks=10, heartbeat_ticks=2, append_bytes_max=2_000, announce_commit=True
            ),
        )
        self.engine.attach(replica, world.voters)
        self.control.lifecycle.on_ready(self._reconcile_at_start)
        self.multiraft.register(replica)
        self.later(TICK_MS, self._tick)

    def _wake(self) -> None:
        self._drain_later()
        self.multiraft.touch(METADATA_GROUP)

    def _drain_later(self) -> None:
        self.multiraft.after_round(self.control.drain)

    def _new_control(self, self_id: ReplicaId) -> ControlPlane:
        return ControlPlane(
            BrokerInfo(
                self_id, "world", None, (), () if self.ranges is OLDER else named(self.ranges)
            ),
            self.engine,
            _Calls(self),
            clock=self.clock,
            random=self.random,
            config=ControllerConfig(
                session_ms=1_000, create_wait_ms=200, voters_count=3, supported=self.ranges
            ),
            heartbeat_ms=150,
            bootstrap=self.world.voters,
            move_locally=lambda *_args: False,
            learn_address=lambda _node_id, _where: None,  # no address is needed here
            quorum_view=lambda: None,
            sizes_here=tuple,
            authorizer=None,
            call_refused=lambda *_refused: None,
            request_refused=lambda *_refused: None,
            drain_later=self._drain_later,
        )

    def _reconcile_at_start(self) -> None:
        self._perform(at_start(self.engine.image, self.node_id, []))
        self.engine.on_image(self._reconcile)

    def _reconcile(self, before: MetadataImage, after: MetadataImage) -> None:
        self._perform(reconcile(before, after, self.node_id))

    def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, StopReplica):
                self.control.replica_removed(action.group)

    def crash(self, *, wipe: bool = False) -> None:
        if self.is_up:
            self.is_up = False
            self.life += 1
            self.disk.crash(self.random)
        if wipe:
            self.disk = SimDisk(self.random)
            self.storage_id = StorageId(self.random.getrandbits(63) | 1)

    def later(self, delay_ms: float, action: Callable[[], None]) -> None:
        life = self.life

        def fire() -> None:
            if self.is_up and self.life == life:
                try:
                    action()
                except SimCrash:
                    self.crash()
                except UnappliableCommandError as error:
                    self._stop(error)

        self.world.schedule(delay_ms, fire)

    def _tick(self) -> None:
        self.later(self.random.uniform(0.9, 1.1) * TICK_MS, self._tick)
        self.multiraft.tick()
        self.control.tick()
        if self.world.has_leaders and self.control.lifecycle.is_ready:
            self._lead()

    def _lead(self) -> None:
        """State what this node leads of the pretended partitions: they follow every wish at once,
        led by the first of their replicas that is up."""
        world, brokers = self.world, self.engine.image.brokers
        for topic in self.engine.image.topics_by_id():
            for partition in topic.partitions:
                live = [n for n in partition.replicas if world.nodes[n].is_up]
                if live[:1] != [self.node_id]:
                    continue
                key = (topic.topic_id, partition.index)
                leader, epoch = world.leaderships.get(key, (NodeId(0), 0))
                if leader != self.node_id:
                    epoch += 1
                    world.leaderships[key] = self.node_id, epoch
                self.control.partition_led(
                    *key,
                    leader_epoch=LeaderEpoch(epoch),
                    isr=[brokers[n].replica_id for n in live if n in brokers],
                    voters=[brokers[n].replica_id for n in partition.replicas if n in brokers],
                    seen_version=partition.target_version,
                    creation_epoch=partition.creation_epoch,
                )

    def _send(self, node_id: NodeId, frame: Sequence[Buffer], stream: Stream) -> bool:
        world = self.world
        data = b"".join(frame)
        if world.is_lost(self.node_id, node_id):
            return True
        target = world.nodes[node_id]
        sender = self.node_id
        world.schedule(
            world.delay_ms(),
            lambda: target.later(0, lambda: target.multiraft.deliver(sender, memoryview(data))),
        )
        return True

    def _flush(self, job: FlushJob, done: Callable[[DiskError | None], None]) -> None:
        job.run()
        self.later(self.random.uniform(0.1, 3.0), lambda: done(None))


class _Calls:
    """Requests to other nodes; each is answered, fails or is never heard of again."""

    def __init__(self, node: WorldNode) -> None:
        self._node = node

    def version(self, node_id: NodeId) -> int:
        return self._node.world.common_format(self._node.node_id, node_id)

    def send(self, node_id: NodeId, payload: bytes, *, is_beat: bool = False) -> Promise[bytes]:
        node, world = self._node, self._node.world
        promise: Promise[bytes] = Promise()
        target = world.nodes[node_id]
        if not target.is_up or (node.node_id, node_id) in world.cut:
            promise.fail(KafkaError("not reached", code=ErrorCode.NETWORK_EXCEPTION))
            return promise

        def answer(reply: Promise[bytes]) -> None:
            if not world.is_lost(node_id, node.node_id):
                data = reply.result()
                world.schedule(
                    world.delay_ms(), lambda: node.later(0, lambda: promise.resolve(data))
                )

        def serve() -> None:
            target.control.receive(node.node_id, payload).when_done(answer)

        if not world.is_lost(node.node_id, node_id):
            world.schedule(world.delay_ms(), lambda: target.later(0, serve))
        return promise


def _view_of(topic: str) -> dict[str, str | None]:
    return {"raftmq.view.of": topic, "raftmq.view.where": "tag = 'a'"}


class ControlWorld:
    """Nodes, links, time, clients, and what was seen."""

    def __init__(self, seed: int, voters: int = 3, observers: int = 1) -> None:
        self.seed = seed
        self.random = Random(f"{seed} world")
        self.now_ms = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.cut: dict[tuple[int, int], bool] = {}
        self.loss = self.random.choice((0.0, 0.01, 0.05))
        self.voters = tuple(NodeId(n) for n in range(1, voters + 1))
        self.nodes = {NodeId(n): WorldNode(self, n) for n in range(1, voters + observers + 1)}
        self.initial = Configuration(
            tuple(ReplicaId(n, self.nodes[n].storage_id) for n in self.voters), ()
        )
        self.images: dict[int, int] = {}
        self.applied: dict[tuple[int, int, int], int] = {}
        self.operations: list[Operation] = []
        self.acknowledged_version = -1
        self.is_over = False
        """True once clients do nothing more."""
        self.barriers = 0
        self.topics = 0
        self.views_max = 0
        self.has_leaders = False
        self.leaderships: dict[tuple[TopicId, int], tuple[NodeId, int]] = {}
        for node in self.nodes.values():
            self.schedule(self.random.uniform(0, 200), node.boot)

    # ---- time and links ----

    def schedule(self, delay_ms: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_ms + delay_ms, self._count, action))

    def run(self, ms: float) -> None:
        end = self.now_ms + ms
        while self._events and self._events[0][0] <= end:
            self.now_ms, _, action = heapq.heappop(self._events)
            action()
        self.now_ms = end

    def delay_ms(self) -> float:
        if self.random.random() < self.loss:
            return self.random.uniform(5, 80)
        return self.random.uniform(0.1, 3)

    def is_lost(self, sender: int, to: int) -> bool:
        is_cut = (sender, to) in self.cut or self.random.random() < self.loss
        return is_cut or not self.common_format(sender, to)

    def common_format(self, one: int, other: int) -> int:
        """What two nodes say to each other is of this format; 0: they turn each other away."""
        nodes = self.nodes[NodeId(one)], self.nodes[NodeId(other)]
        if not all(node.is_up for node in nodes):
            return 0
        low = max(node.formats[0] for node in nodes)
        high = min(node.formats[1] for node in nodes)
        return high if low <= high else 0

    # ---- what is seen ----

    def saw_applied(self, key: tuple[int, int, int], offset: int) -> None:
        known = self.applied.setdefault(key, offset)
        assert known == offset, f"{key} was applied at {known} and at {offset}"

    def saw_image(self, version: int, digest: int) -> None:
        known = self.images.setdefault(version, digest)
        assert known == digest, f"two images of version {version}"

    # ---- clients ----

    def client(self, node: WorldNode) -> None:
        """Do something on a node, and again a little later."""
        if self.is_over:
            return
        self.schedule(self.random.uniform(5, 60), lambda: self.client(node))
        if not node.is_up:
            return
        self.views_max = max(self.views_max, len(node.engine.image.views))
        draw = self.random.random()
        if draw < 0.55:
            self._allocate(node)
        elif draw < 0.8:
            self._read(node)
        elif draw < 0.9:
            self.topics += 1
            name = f"t{self.random.randrange(12)}"
            wish = NewTopic(name=name, partitions=2, replication_factor=self.random.randint(1, 3))
            if draw > 0.88:
                wish = NewTopic(name=f"v{name}", configs=_view_of(name))
            node.control.call(CreateTopicsCall(topics=(wish,), timeout_ms=600), CLIENT)
        else:
            name = f"t{self.random.randrange(12)}"
            if draw > 0.99:
                name = f"v{name}"
            node.control.call(DeleteTopicsCall(names=(name,), timeout_ms=600), CLIENT)

    def _allocate(self, node: WorldNode) -> None:
        engine = node.engine
        promise = engine.propose(AllocateProducerIds(node_id=node.node_id, count=1))
        key = (node.node_id, engine.incarnation, engine._submissions.last_sequence)
        self.operations.append(Operation(key, promise))

        def done(promise: Promise[object]) -> None:
            if promise.error is None:
                image = node.engine.image
                assert key in self.applied
                assert self.applied[key] <= image.version, "read your writes"
                self.acknowledged_version = max(self.acknowledged_version, self.applied[key])

        promise.when_done(done)

    def _read(self, node: WorldNode) -> None:
        floor = self.acknowledged_version

        def done(promise: Promise[None]) -> None:
            if promise.error is None:
                self.barriers += 1
                assert node.engine.image.version >= floor, "a barrier showed an older state"

        node.engine.read_barrier().when_done(done)

    def check(self) -> None:
        """What was promised against what was applied."""
        taken: dict[int, tuple[int, int, int]] = {}
        for operation in self.operations:
            promise, key = operation.promise, operation.key
            if not promise.is_done:
                continue  # its process died: unknown
            if promise.error is None:
                assert key in self.applied, f"{key} was acknowledged and never applied"
                block = promise.result()
                start: int = block.start  # type: ignore[attr-defined]
                assert start not in taken, f"{key} and {taken[start]} got the same ids"
                taken[start] = key
            elif isinstance(promise.error, CommandNotAppliedError):
                assert key not in self.applied, f"{key} failed for certain, yet was applied"

    def is_converged(self) -> bool:
        nodes = [node for node in self.nodes.values() if not node.is_gone]
        images = [encode_image(node.engine.image) for node in nodes if node.is_up]
        return (
            len(images) == len(nodes)
            and all(image == images[0] for image in images)
            and all(node.control.lifecycle.is_ready for node in nodes)
        )
