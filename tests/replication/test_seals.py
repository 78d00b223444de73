"""Seals: nothing is appended behind one, on any leader, until the log is opened again."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftmq.errors import ErrorCode, RemoteProtocolError
from raftmq.log.model import NewerFormatError
from raftmq.partition.ports import AppendResult
from raftmq.raft.messages import EntryKind
from raftmq.records import NewRecord, build_batch
from raftmq.replication.replica import Replica
from raftmq.replication.seals import Seal
from tests.replication.sim_cluster import SimCluster
from tests.replication.three_nodes import ThreeNodes

BATCH = bytes(build_batch([NewRecord(b"k", b"v")], timestamp=1_000_000))
CLOSED, OPEN = Seal(7, is_closed=True), Seal(9, is_closed=False)


def refused(nodes: ThreeNodes) -> ErrorCode:
    """What the leader says of one more batch at once."""
    result = nodes.leader.append(memoryview(bytearray(BATCH)), -1, 1000)
    assert isinstance(result, AppendResult)
    return result.code


def elect(nodes: ThreeNodes) -> None:
    """Another node leads."""
    before = nodes.leader
    replica = before.replica
    assert isinstance(replica, Replica)
    other = next(p for p in nodes.partitions.values() if p is not before)
    assert replica.transfer_leadership(other.node_id)
    for _ in range(50):
        nodes.tick()
        if other.is_leader:
            break
    nodes.leader = other
    assert other.is_leader


def test_a_seal_is_what_was_written() -> None:
    for seal in (CLOSED, OPEN):
        assert Seal.decode(seal.encode()) == seal
    with pytest.raises(NewerFormatError):
        Seal.decode(b"\2" + CLOSED.encode()[1:])
    for bad in (b"", CLOSED.encode() + b"\0", b"\1\2" + CLOSED.encode()[2:], b"\1\1" + b"\xff" * 8):
        with pytest.raises(RemoteProtocolError):
            Seal.decode(bad)


def test_nothing_is_appended_behind_a_seal_until_the_log_is_opened_again(tmp_path: Path) -> None:
    nodes = ThreeNodes(tmp_path)
    nodes.produce(BATCH)
    assert nodes.leader.seal(CLOSED)
    assert refused(nodes) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "it is not even flushed"
    assert not nodes.leader.is_sealed
    nodes.settle()
    assert nodes.leader.is_sealed
    assert not nodes.leader.is_empty
    assert refused(nodes) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    for _ in range(10):
        nodes.tick()
    elect(nodes)
    assert nodes.leader.is_sealed
    assert refused(nodes) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert nodes.ends == {1}
    assert nodes.leader.seal(OPEN)
    nodes.settle()
    assert not nodes.leader.is_sealed
    assert nodes.produce(BATCH) == 1


def test_a_seal_stays_when_all_before_it_is_gone(tmp_path: Path) -> None:
    nodes = ThreeNodes(tmp_path)
    for _ in range(3):
        nodes.produce(BATCH)
    assert nodes.leader.seal(CLOSED)
    nodes.settle()
    nodes.leader.delete_records(3, 1_000)
    nodes.settle()
    for _ in range(30):
        nodes.tick()
    assert nodes.leader.is_empty
    for partition in nodes.partitions.values():
        replica = partition.replica
        assert isinstance(replica, Replica)
        assert replica.log.log_start_offset == 3
        kinds = [bare.kind for bare in replica.log.bare_entries()]
        assert EntryKind.SEAL in kinds
        replica._seals.look()
        assert replica.newest_seal == CLOSED


def test_a_seal_goes_with_the_end_of_the_log_that_had_it() -> None:
    cluster = SimCluster()
    cluster.commit()
    old = cluster.leader
    cluster.isolate(old)
    cluster.replica(old).seal(CLOSED)
    cluster.run(50)
    assert cluster.replica(old).newest_seal == CLOSED
    cluster.until(lambda: any(node is not old for node in cluster.leaders()))
    new = next(node for node in cluster.leaders() if node is not old)
    cluster.append(new)
    cluster.mend()
    cluster.settle()
    assert cluster.replica(old).newest_seal is None
    assert cluster.replica(new).newest_seal is None
