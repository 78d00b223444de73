"""Three nodes with one partition on real disks; frames and flushes move when a test lets them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from raftmq.errors import ErrorCode
from raftmq.log.journal import HardStateJournal
from raftmq.log.model import FlushJob, LogConfig
from raftmq.partition.parked import Deadlines
from raftmq.partition.partition import Partition
from raftmq.partition.settings import CheckDepth, PartitionSettings
from raftmq.ports import DiskError
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.replication.multiraft import MultiRaft, Stream
from raftmq.replication.opening import Opening, open_replica
from raftmq.replication.ports import ReplicaConfig
from raftmq.runtime.disk import RealDisk
from raftmq.types import Buffer, NodeId, Offset, ReplicaId, StorageId
from tests.partition.fake_replica import GROUP, NAME, FakeClock
from tests.replication.inline import InlineCatchUp, stored_as_frames

IDS = tuple(ReplicaId(NodeId(number), StorageId(number)) for number in (1, 2, 3))


class ThreeNodes:
    """One group of three; the constructor returns once one leads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock()
        self.frames: list[tuple[NodeId, NodeId, bytes]] = []
        self.flushes: list[tuple[FlushJob, Callable[[DiskError | None], None]]] = []
        self.multirafts: dict[NodeId, MultiRaft] = {}
        self.partitions: dict[NodeId, Partition] = {}
        self.stopped: NodeId | None = None
        """Takes no frame: they gather in `held`."""
        self.held: list[tuple[NodeId, NodeId, bytes]] = []
        for self_id in IDS:
            self._start(self_id)
        while not any(partition.is_leader for partition in self.partitions.values()):
            self.tick()
        self.leader = next(p for p in self.partitions.values() if p.is_leader)

    def _start(self, self_id: ReplicaId) -> None:
        node_id = self_id.node_id
        disk = RealDisk()
        data = f"{self.folder}/{node_id}"
        disk.make_directories(data)
        journal = HardStateJournal.open(disk, f"{data}/state.journal")

        def send(to: NodeId, frame: list[Buffer], stream: Stream) -> bool:
            self.frames.append((node_id, to, b"".join(frame)))
            return True

        multiraft = self.multirafts[node_id] = MultiRaft(
            node_id,
            journal,
            send=send,
            send_stored=stored_as_frames(send),
            request_flush=lambda job, done: self.flushes.append((job, done)),
            on_journal_failed=pytest.fail,
            on_broken_invariant=pytest.fail,
        )
        partition = self.partitions[node_id] = Partition(
            NAME,
            GROUP,
            node_id,
            settings=PartitionSettings(min_insync_replicas=2, check=CheckDepth.CRC),
            deadlines=Deadlines(self.clock),
            clock=self.clock,
            on_broken_invariant=pytest.fail,
        )
        replica = open_replica(
            Opening(
                node=self_id,
                disk=disk,
                journal=journal,
                host=multiraft,
                catch_up=InlineCatchUp(),
                clock=self.clock,
                random=Random(node_id),
            ),
            GROUP,
            f"{data}/t",
            initial=Configuration(voters=IDS, learners=()),
            machine=partition,
            log_config=LogConfig(),
            config=ReplicaConfig(),
        )
        partition.attach(replica)
        multiraft.register(replica)

    def tick(self) -> None:
        """One tick of all nodes that are not stopped, and what follows from it."""
        for node_id, multiraft in self.multirafts.items():
            if node_id != self.stopped:
                multiraft.tick()
                self.settle()

    def settle(self) -> None:
        """Deliver all frames and finish all flushes, also those that they cause."""
        while self.frames or self.flushes:
            while self.frames:
                sender, to, frame = self.frames.pop(0)
                if to == self.stopped:
                    self.held.append((sender, to, frame))
                else:
                    self.multirafts[to].deliver(sender, frame)
            while self.flushes:
                job, done = self.flushes.pop(0)
                job.run()
                done(None)

    def resume(self) -> None:
        """The stopped node goes on, with what was sent to it meanwhile."""
        self.stopped = None
        self.frames, self.held = self.held, []
        self.settle()

    def produce(self, batch: bytes) -> Offset:
        """Append at the leader; returns the base offset once that is acknowledged."""
        result = self.leader.append(memoryview(bytearray(batch)), -1, 1000)
        assert isinstance(result, Promise)
        self.settle()
        assert result.result().code is ErrorCode.NONE
        return result.result().base_offset

    @property
    def ends(self) -> set[Offset]:
        """The log ends of all nodes."""
        return {partition.replica.log_end_offset for partition in self.partitions.values()}
