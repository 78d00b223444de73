"""A follower that answers nothing (SIGSTOP, a dead switch) must not cost the others anything."""

from __future__ import annotations

from pathlib import Path

from raftmq.partition.settings import PartitionSettings
from raftmq.records import NewRecord, build_batch
from raftmq.replication.ports import ReplicaConfig
from tests.replication.three_nodes import ThreeNodes

BATCH = bytes(build_batch([NewRecord(None, bytes(1 << 20))], timestamp=1_000_000))
ROUNDS = 24


def test_a_stopped_follower_is_sent_one_window_and_catches_up(tmp_path: Path) -> None:
    nodes = ThreeNodes(tmp_path)
    for partition in nodes.partitions.values():
        partition.configure(PartitionSettings(max_message_bytes=2 << 20))
    nodes.produce(BATCH)
    nodes.stopped = next(
        node_id for node_id, partition in nodes.partitions.items() if partition is not nodes.leader
    )
    leader_epoch = nodes.leader.leader_epoch
    for _ in range(ROUNDS):
        nodes.produce(BATCH)  # acknowledged all the same
        nodes.tick()
    window = ReplicaConfig().inflight_bytes_max + 2 * len(BATCH)
    assert ROUNDS * len(BATCH) > 2 * window, "enough to tell"
    assert sum(len(frame) for _, _, frame in nodes.held) <= window, "one window and no more"
    assert nodes.leader.is_leader
    assert nodes.leader.leader_epoch == leader_epoch
    nodes.resume()
    for _ in range(100):
        if len(nodes.ends) == 1:
            break
        nodes.tick()
    assert len(nodes.ends) == 1, "it has everything"
    assert nodes.leader.leader_epoch == leader_epoch, "and nobody was disturbed"
