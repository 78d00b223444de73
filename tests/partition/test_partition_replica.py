"""A partition on the real replica, log and journal, over the simulated disk: one voter."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from jepsen_like.disk import SimDisk
from raftmq.errors import ErrorCode
from raftmq.log.journal import TWICE, HardStateJournal
from raftmq.log.model import FlushJob, LogConfig
from raftmq.log.segment import Segment
from raftmq.partition.parked import Deadlines
from raftmq.partition.partition import MEND_AGAIN_MS, Partition
from raftmq.partition.ports import AppendResult
from raftmq.partition.settings import PartitionSettings
from raftmq.partition.transactions import Decided
from raftmq.ports import DiskError, TooManyFilesError
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.records import NewRecord, build_batch, check_batches, parse_header
from raftmq.replication.multiraft import MultiRaft
from raftmq.replication.opening import Opening, open_replica
from raftmq.replication.ports import ReplicaConfig
from raftmq.types import NodeId, Offset, ReplicaId, StorageId
from tests.partition.fake_replica import GROUP, NAME, FakeClock
from tests.replication.inline import InlineCatchUp

SELF = ReplicaId(NodeId(1), StorageId(1))


def batch(sequence: int = -1, *, count: int = 1, timestamp: int = 1_000_000) -> memoryview:
    records = [NewRecord(b"k", b"v") for _ in range(count)]
    producer = -1 if sequence < 0 else 9
    epoch = -1 if sequence < 0 else 0
    return memoryview(
        build_batch(
            records,
            timestamp=timestamp,
            producer_id=producer,
            producer_epoch=epoch,
            base_sequence=sequence,
        )
    )


class Node:
    """One node with one partition; flushes happen when the test says so."""

    def __init__(self, disk: SimDisk, clock: FakeClock) -> None:
        self.disk = disk
        self.clock = clock
        self.flushes: list[tuple[FlushJob, Callable[[DiskError | None], None]]] = []
        self.broken: list[str] = []
        disk.make_directories("data")
        journal = HardStateJournal.open(disk, "data/state.journal")
        self.multiraft = MultiRaft(
            SELF.node_id,
            journal,
            send=lambda _node, _frame, _stream: True,
            send_stored=lambda _node, _head, _chunk: True,
            request_flush=lambda job, done: self.flushes.append((job, done)),
            on_journal_failed=pytest.fail,
            on_broken_invariant=self.broken.append,
        )
        self.deadlines = Deadlines(clock)
        self.partition = Partition(
            NAME,
            GROUP,
            SELF.node_id,
            settings=PartitionSettings(),
            deadlines=self.deadlines,
            clock=clock,
            on_broken_invariant=self.broken.append,
        )
        replica = open_replica(
            Opening(
                node=SELF,
                disk=disk,
                journal=journal,
                host=self.multiraft,
                catch_up=InlineCatchUp(),
                clock=clock,
                random=Random(1),
            ),
            GROUP,
            "data/t",
            initial=Configuration(voters=(SELF,), learners=()),
            machine=self.partition,
            log_config=LogConfig(segment_bytes=4096),
            config=ReplicaConfig(),
        )
        self.partition.attach(replica)
        self.multiraft.register(replica)
        self.replica = replica
        self.journal = journal

    def flush(self) -> None:
        """Let all flushes finish, also those that they cause."""
        while self.flushes:
            job, done = self.flushes.pop(0)
            job.run()
            done(None)

    def elect(self) -> None:
        """Tick until this node leads and has committed its own term."""
        for _ in range(100):
            self.multiraft.tick()
            self.flush()
            if self.partition.is_leader:
                return
        raise AssertionError("no leader")

    def pass_time(self, milliseconds: float) -> None:
        self.clock.now_ms += milliseconds
        self.deadlines.expire(self.clock.now_ms)

    def produce(self, records: memoryview, acks: int = -1) -> Promise[AppendResult]:
        result = self.partition.append(records, acks, 1000)
        return result if isinstance(result, Promise) else Promise.resolved(result)

    def read(self, offset: int) -> list[int]:
        """Base offsets of what is served."""
        result = self.partition.read(Offset(offset), 1 << 20)
        assert result.code is ErrorCode.NONE
        offsets = []
        for span in result.spans:
            data = span.file.pread(span.size, span.position)
            offsets += [header.base_offset for header in check_batches(data)]
        return offsets


def started(disk: SimDisk | None = None) -> Node:
    node = Node(disk or SimDisk(Random(1)), FakeClock())
    node.elect()
    return node


def test_nothing_is_taken_before_the_first_election() -> None:
    node = Node(SimDisk(Random(1)), FakeClock())
    assert node.produce(batch()).result().code is ErrorCode.NOT_LEADER_OR_FOLLOWER


def test_an_acknowledged_record_is_flushed() -> None:
    node = started()
    promise = node.produce(batch(count=3))
    early = node.produce(batch(), acks=1)
    assert early.result().base_offset == 3
    assert not promise.is_done, "the group's only voter has not flushed it"
    assert node.read(0) == []
    node.flush()
    assert promise.result().base_offset == 0
    assert node.read(0) == [0, 3]
    assert node.read(1) == [0, 3], "whole batches"


def test_an_election_takes_no_offset() -> None:
    node = started()
    node.produce(batch())
    node.flush()
    again = started(node.disk)
    assert again.produce(batch(), acks=1).result().base_offset == 1
    again.flush()
    assert again.read(0) == [0, 1]
    assert again.partition.leader_epoch > node.partition.leader_epoch


def test_a_restart_remembers_producers() -> None:
    node = started()
    for sequence in range(3):
        node.produce(batch(sequence))
    node.flush()
    again = started(node.disk)
    duplicate = again.produce(batch(2))
    assert duplicate.result().base_offset == 2
    assert again.produce(batch(4)).result().code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert again.produce(batch(3), acks=1).result().base_offset == 3
    assert again.produce(batch(5)).result().code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_power_loss_takes_only_what_was_not_acknowledged() -> None:
    node = started()
    acknowledged = node.produce(batch(0))
    node.flush()
    assert acknowledged.is_done
    lost = node.produce(batch(1))
    node.disk.crash()
    assert not lost.is_done
    again = started(node.disk)
    assert again.read(0)[0] == 0
    end = again.partition.replica.log_end_offset
    assert end in (1, 2)
    answer = again.produce(batch(1))
    again.flush()
    assert answer.result().base_offset == 1, "once, wherever it comes from"


def test_delete_records_moves_the_log_start_and_keeps_producers() -> None:
    node = started()
    for sequence in range(6):
        node.produce(batch(sequence))
    node.flush()
    result = node.partition.delete_records(4, 1000)
    assert isinstance(result, Promise)
    node.flush()
    node.pass_time(10)
    assert result.result().low_watermark == 4
    assert node.partition.read(Offset(3), 1).code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert node.partition.list_offset(-2).offset == 4
    again = started(node.disk)
    assert again.partition.list_offset(-2).offset == 4
    assert again.read(4) == [4, 5]
    assert again.produce(batch(5)).result().base_offset == 5


def test_deleted_records_are_gone_though_the_disk_is_full() -> None:
    """Others have dropped them: a node without a byte free does the same, and shows none again."""
    node = started()
    for sequence in range(6):
        node.produce(batch(sequence, timestamp=1_000_000 + 100 * sequence))
    node.flush()
    node.disk.capacity_bytes = node.disk.used_bytes()
    result = node.partition.delete_records(4, 1000)
    assert isinstance(result, Promise)
    node.flush()
    node.pass_time(10)
    assert node.replica.log.log_start_offset == 4
    assert result.result().low_watermark == 4
    assert node.partition.read(Offset(3), 1).code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert node.partition.list_offset(-2).offset == 4
    assert node.partition.list_offset(1_000_150).offset == 4
    assert node.partition.list_offset(1_000_450).offset == 5
    node.disk.capacity_bytes = None
    node.produce(batch(6))
    node.flush()
    assert node.replica.log.log_start_offset == 4
    assert node.partition.list_offset(1_000_150).offset == 4


def test_records_of_many_producers_are_deleted_though_the_disk_is_full() -> None:
    """What is known of them has grown tenfold since anything was written of it."""
    node = started()
    for producer_id in range(300):
        for sequence in range(3):
            records = [NewRecord(b"k", b"v")]
            data = build_batch(
                records,
                timestamp=1_000_000,
                producer_id=producer_id,
                producer_epoch=0,
                base_sequence=sequence,
            )
            node.produce(memoryview(data))
        node.flush()
    for _ in range(20):
        node.multiraft.tick()
        node.flush()
    node.disk.capacity_bytes = node.disk.used_bytes()
    result = node.partition.delete_records(900, 1000)
    assert isinstance(result, Promise)
    node.flush()
    assert node.replica.log.log_start_offset == 900
    assert len(node.replica.log.log_start.state) > 20_000
    assert node.disk.used_bytes() < node.disk.capacity_bytes


def test_timestamps_are_found() -> None:
    node = started()
    for i in range(5):
        node.produce(batch(timestamp=1_000_000 + 100 * i))
    node.flush()
    found = node.partition.list_offset(1_000_150)
    assert (found.offset, found.timestamp) == (2, 1_000_200)
    latest = node.partition.list_offset(-3)
    assert (latest.offset, latest.timestamp) == (4, 1_000_400)
    assert node.partition.list_offset(2_000_000).offset == -1


def test_epochs_end_where_the_next_one_begins() -> None:
    node = started()
    node.produce(batch(count=2))
    node.flush()
    first = node.partition.leader_epoch
    again = started(node.disk)
    again.produce(batch(count=3))
    again.flush()
    partition = again.partition
    assert partition.end_offset_for_epoch(first).end_offset == 2
    assert partition.end_offset_for_epoch(partition.leader_epoch).end_offset == 5
    diverged = partition.read(Offset(4), 1 << 20, last_fetched_epoch=first)
    assert diverged.diverging == (first, 2)


def test_cold_bytes_are_checked_before_they_are_served() -> None:
    node = started()
    for _ in range(200):
        node.produce(batch())
    node.flush()
    again = started(node.disk)
    cold = again.partition.read(Offset(0), 1 << 20, may_wait=False)
    assert (cold.code, cold.spans) == (ErrorCode.NONE, ())
    assert cold.job is not None
    cold.job.run()
    again.partition.prepared(cold.job)
    warm = again.partition.read(Offset(0), 100, may_wait=False)
    assert (warm.job, len(warm.spans)) == (None, 1)


def test_bytes_whose_check_is_too_old_are_checked_before_they_are_served() -> None:
    """Though this process wrote them: else a fetch found nothing and waited for its whole time."""
    node = started()
    for _ in range(200):
        node.produce(batch())
    node.flush()
    node.replica.log._recent.clear()
    for _ in range(2):
        node.pass_time(25 * 3_600_000)
        node.replica.log._checker.rotate_if_due()
    cold = node.partition.read(Offset(0), 1 << 20, may_wait=False)
    assert (cold.code, cold.spans) == (ErrorCode.NONE, ())
    assert cold.job is not None
    cold.job.run()
    node.partition.prepared(cold.job)
    warm = node.partition.read(Offset(0), 100, may_wait=False)
    assert (warm.job, len(warm.spans)) == (None, 1)


def test_damage_that_cannot_be_noted_ends_the_replica_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise DiskError("Input/output error")

    node = started()
    for _ in range(200):
        node.produce(batch())
    node.flush()
    again = started(node.disk)
    path = again.replica.log.locate(Offset(0), 1, Offset(1))[0].file.path
    again = started(node.disk)
    node.disk.flip(path, 100)
    cold = again.partition.read(Offset(0), 1 << 20, may_wait=False)
    assert cold.job is not None
    cold.job.run()
    monkeypatch.setattr("raftmq.log.indexes.SparseIndex.write", fails)
    again.partition.prepared(cold.job)
    assert again.replica.failure is not None
    assert again.partition.read(Offset(0), 100).code is ErrorCode.KAFKA_STORAGE_ERROR


def test_closing_fails_what_waits() -> None:
    node = started()
    promise = node.produce(batch())
    node.partition.close()
    assert promise.result().code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    node.flush()


def stopped(node: Node) -> SimDisk:
    """Stop the node cleanly, so that its journal claims all that it flushed."""
    for _ in range(ReplicaConfig().election_ticks):
        node.multiraft.tick()
    for replica in node.multiraft.replicas.values():
        replica.log.close()
    node.journal.close()
    return node.disk


def test_damage_hides_producers_until_it_is_repaired() -> None:
    node = started()
    for sequence in range(6):
        node.produce(batch(sequence))
        node.flush()
    [path] = [path for path in node.disk.files() if path.endswith(".log")]
    sound = node.disk.content(path)
    disk = stopped(node)
    disk.flip(path, len(sound) * 2 // 3)
    again = Node(disk, FakeClock())
    log = again.replica.log
    [(start, end)] = log.damaged
    for _ in range(100):
        again.multiraft.tick()
        again.flush()
    assert not again.partition.is_leader, "it may not lead before it is repaired"
    size = len(sound) // 6
    log.repair(start, [sound[size * i : size * (i + 1)] for i in range(start, end)])
    again.elect()
    assert again.produce(batch(5)).result().base_offset == 5
    assert again.produce(batch(6), acks=1).result().base_offset == 6


def test_what_was_read_of_producers_is_read_again_after_a_repair() -> None:
    """Nothing was surprising about a timestamp that was a little off."""
    node = started()
    for sequence in range(60):
        node.produce(batch(sequence))
        node.flush()
    node.partition.replica.log.close()
    sound = node.partition.producers.encode()
    path, other = sorted(path for path in node.disk.files() if path.endswith(".log"))[:2]
    content = node.disk.content(path)
    count = int(other[-24:-4])
    size = len(content) // count
    disk = stopped(node)
    disk.flip(path, 5 * size + 41, 2)
    again = Node(disk, FakeClock())
    assert again.partition.producers.encode() != sound
    log = again.replica.log
    log.scrub(1 << 20)
    assert log.damaged == [(5, 6)]
    again.partition.doubt(Offset(5))
    log.repair(Offset(5), [content[5 * size : 6 * size]])
    again.pass_time(1.0)
    assert again.partition.producers.encode() == sound


def test_a_transaction_ends_beside_damage_that_nobody_can_repair() -> None:
    node = started()
    for sequence in range(60):
        node.produce(batch(sequence))
        node.flush()
    opened = build_batch(
        [NewRecord(b"k", b"v")],
        timestamp=1_000_000,
        producer_id=9,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
    )
    node.replica.append(opened, parse_header(opened))
    node.flush()
    path, other = sorted(path for path in node.disk.files() if path.endswith(".log"))[:2]
    content = node.disk.content(path)
    size = len(content) // int(other[-24:-4])
    for number in (5, 9):
        node.disk.flip(path, number * size + 41, 2)
    log = node.replica.log
    log.scrub(1 << 20)
    node.partition.doubt(Offset(5))
    log.repair(Offset(5), [content[5 * size : 6 * size]])
    assert log.damaged == [(9, 10)]
    decided = Decided(producer_id=9, producer_epoch=0, txn_seq=1, is_commit=True, protocol=1)
    ended = node.partition.end_transaction(decided)
    node.flush()
    assert ended.result() == 62


def test_what_the_device_failed_to_read_anew_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = started()
    for sequence in range(1_500):
        node.produce(batch(sequence))
    node.flush()
    producers = node.partition._producers
    node.partition.doubt(Offset(5))
    real, fails = Segment.headers_from, [True]

    def headers_from(self: Segment, *given: Any, **named: Any) -> Any:
        if fails:
            raise TooManyFilesError("no descriptor is left")
        return real(self, *given, **named)

    monkeypatch.setattr(Segment, "headers_from", headers_from)
    node.pass_time(1.0)
    assert producers.is_doubtful
    fails.clear()
    for _ in range(3):
        node.pass_time(MEND_AGAIN_MS)
    assert not producers.is_doubtful


def test_a_damaged_journal_costs_the_identity() -> None:
    node = started()
    node.produce(batch(0))
    node.flush()
    disk = stopped(node)
    for position in TWICE.positions(0):
        disk.flip("data/state.journal", position)
    again = Node(disk, FakeClock())
    assert again.replica.self_id.node_id == SELF.node_id
    assert again.replica.self_id != SELF, "it may have voted for anybody"
    for _ in range(100):
        again.multiraft.tick()
        again.flush()
    assert not again.partition.is_leader
    once_more = Node(stopped(again), FakeClock())
    assert once_more.replica.self_id == again.replica.self_id


def test_a_damaged_journal_and_an_unusable_log() -> None:
    node = started()
    disk = stopped(node)
    for position in TWICE.positions(0):
        disk.flip("data/state.journal", position)
    disk.remove("data/t/log-start")
    again = Node(disk, FakeClock())
    assert again.replica.self_id != SELF
    assert again.replica.log.end_index == 0
