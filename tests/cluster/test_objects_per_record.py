"""Stored, replicated and served bytes cost no Python object, and no step, per record.

The same way is gone with batches of one record and of ten thousand, through the real request
codecs, partition, replica, peer codec and log. Calls are counted by the interpreter's own profiler,
kept objects by its allocator, and both are the same; only bytes differ.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

from raftmq.adapters.disk import RealDisk
from raftmq.cluster.deadlines import Deadlines
from raftmq.cluster.multiraft import MultiRaft
from raftmq.cluster.partition import Partition
from raftmq.cluster.partition_settings import PartitionSettings
from raftmq.cluster.recovery import Opening, open_replica
from raftmq.cluster.replica_ports import ReplicaConfig
from raftmq.errors import ErrorCode
from raftmq.log.flush import FlushJob
from raftmq.log.hard_state import HardStateJournal
from raftmq.log.model import LogConfig
from raftmq.ports import DiskError
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.records import NewRecord, build_batch
from raftmq.types import Buffer, NodeId, ReplicaId, StorageId
from tests.cluster.fake_replica import GROUP, NAME, FakeClock
from tests.server.world import World

IDS = tuple(ReplicaId(NodeId(number), StorageId(number)) for number in (1, 2, 3))
RECORDS_MANY = 10_000
Frame = tuple[NodeId, NodeId, bytes]


def batch_of(count: int) -> bytes:
    """Few and long, or many and short: nearly the same bytes, so that no buffer grows between."""
    value = bytes(10 * RECORDS_MANY // count)
    return bytes(build_batch([NewRecord(b"k", value)] * count, timestamp=1_000_000))


class Nodes:
    """Three nodes with one partition; frames and flushes arrive when `settle` lets them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock()
        self.frames: list[Frame] = []
        self.flushes: list[tuple[FlushJob, Callable[[DiskError | None], None]]] = []
        self.multirafts: dict[NodeId, MultiRaft] = {}
        self.partitions: dict[NodeId, Partition] = {}
        for self_id in IDS:
            self._start(self_id)
        while not any(partition.is_leader for partition in self.partitions.values()):
            for multiraft in self.multirafts.values():
                multiraft.tick()
                self.settle()
        self.leader = next(p for p in self.partitions.values() if p.is_leader)

    def _start(self, self_id: ReplicaId) -> None:
        node_id = self_id.node_id
        disk = RealDisk()
        data = f"{self.folder}/{node_id}"
        disk.make_directories(data)
        journal = HardStateJournal.open(disk, f"{data}/state.journal")

        def send(to: NodeId, frame: list[Buffer], *, is_heartbeat: bool) -> bool:
            self.frames.append((node_id, to, b"".join(frame)))
            return True

        multiraft = self.multirafts[node_id] = MultiRaft(
            node_id,
            journal,
            send=send,
            request_flush=lambda job, done: self.flushes.append((job, done)),
            on_journal_failed=pytest.fail,
        )
        partition = self.partitions[node_id] = Partition(
            NAME,
            GROUP,
            node_id,
            settings=PartitionSettings(min_insync_replicas=2),
            deadlines=Deadlines(self.clock),
            clock=self.clock,
        )
        replica = open_replica(
            Opening(
                node=self_id,
                disk=disk,
                journal=journal,
                peers=multiraft,
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

    def settle(self) -> None:
        """Deliver all frames and finish all flushes, also those that they cause."""
        while self.frames or self.flushes:
            while self.frames:
                sender, to, frame = self.frames.pop(0)
                self.multirafts[to].deliver(sender, frame)
            while self.flushes:
                job, done = self.flushes.pop(0)
                job.run()
                done(None)

    def produce(self, batch: bytes) -> None:
        result = self.leader.append(memoryview(bytearray(batch)), -1, 1000)
        assert isinstance(result, Promise)
        self.settle()
        assert result.result().code is ErrorCode.NONE
        read = self.leader.read(result.result().base_offset, 1 << 20)
        assert read.code is ErrorCode.NONE
        assert read.size == len(batch)

    @property
    def is_replicated(self) -> bool:
        return len({p.replica.log_end_offset for p in self.partitions.values()}) == 1


def calls_of(work: Callable[[], object]) -> dict[str, int]:
    """How often `work` calls each function of the product, be it Python's or C's."""
    counts: dict[str, int] = {}

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        if "/raftmq/" not in frame.f_code.co_filename:
            return
        name = argument.__name__ if event == "c_call" else frame.f_code.co_qualname
        counts[name] = counts.get(name, 0) + 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counts


def blocks_kept_by(work: Callable[[], object]) -> int:
    """How many more memory blocks of the interpreter are in use after `work`."""
    gc.collect()
    before = sys.getallocatedblocks()
    work()
    gc.collect()
    return sys.getallocatedblocks() - before


def test_replication_takes_no_step_and_no_object_per_record(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    few, many = batch_of(1), batch_of(RECORDS_MANY)
    for batch in (few, many) * 4:  # tables grow, caches fill
        nodes.produce(batch)
    calls = [calls_of(lambda batch=batch: nodes.produce(batch)) for batch in (few, many)]
    assert nodes.is_replicated
    assert calls[0] == calls[1]
    assert sum(calls[0].values()) > 100, "the profiler saw the work"
    kept = [
        max(blocks_kept_by(lambda batch=batch: nodes.produce(batch)) for _ in range(2))
        for batch in (few, many)
    ]
    assert abs(kept[1] - kept[0]) < RECORDS_MANY // 100, kept


def test_requests_take_no_step_per_record() -> None:
    calls = []
    for count in (1, RECORDS_MANY):
        world = World()
        world.add_topic("t")
        replica, batch = world.replica("t"), batch_of(count)

        def serve(world: World = world, batch: bytes = batch) -> None:
            replica = world.replica("t")
            offset = int(replica.log_end_offset)
            produced = world.produce(9, [("t", 0, batch)])
            replica.commit(replica.log_end_offset)
            assert produced.pieces is not None
            fetched = world.fetch(12, [("t", 0, offset)])
            assert fetched.pieces is not None
            assert any(getattr(piece, "size", 0) == len(batch) for piece in fetched.pieces)

        serve()
        calls.append(calls_of(serve))
        assert replica.high_watermark == 2 * count
    assert calls[0] == calls[1]
    assert sum(calls[0].values()) > 50, "the profiler saw the work"
