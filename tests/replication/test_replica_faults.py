"""Faults where a replica meets its core and its log: each costs the replica at most, never more."""

from __future__ import annotations

from raftmq.types import Offset
from tests.replication.sim_cluster import SimCluster


def test_leadership_is_not_handed_to_a_replica_that_cannot_promise() -> None:
    cluster = SimCluster()
    cluster.commit(2)
    leader = cluster.replica(cluster.leader)
    follower = cluster.followers()[0]
    progress = leader.core.progress[cluster.replica(follower).self_id]
    progress.is_promising = False  # damaged, as its last answer said
    assert not leader.transfer_leadership(follower.node_id)
    assert leader.is_writable


def test_a_disk_that_cannot_be_read_while_the_log_start_moves() -> None:
    cluster = SimCluster()
    cluster.commit(5)
    node = cluster.leader
    leader = cluster.replica(node)
    leader.move_log_start(Offset(3))
    node.disk.fail_when(lambda verb, path: verb == "read" and path.endswith(".log"))
    cluster.until(lambda: leader.failure is not None)
    node.disk.fail_when(None)
    cluster.until(lambda: bool(cluster.leaders()))
    cluster.commit(1)
