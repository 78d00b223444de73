"""Replicas go to other nodes and come back, and nothing is lost by it."""

from __future__ import annotations

import pytest

from jepsen_like.cluster.options import ClusterOptions
from jepsen_like.cluster.run import Verdict, run_cluster_seed
from jepsen_like.cluster.stress import moves
from jepsen_like.cluster.watch import LastSeen
from jepsen_like.cluster.world import ClusterWorld
from raftmq.types import METADATA_GROUP, NodeId, ReplicaId, StorageId


@pytest.mark.slow
def test_replicas_that_come_and_go_lose_nothing() -> None:
    done = 0
    for seed in range(1, 5):
        result = run_cluster_seed(seed, moves(seed))
        assert result.verdict is not Verdict.ANOMALY, f"{seed}: {result.name}: {result.detail}"
        done += result.counts.moves
    assert done >= 10


def test_a_disk_that_is_lost_had_what_it_had() -> None:
    """Its leader may let it vote before it can have noticed (seed 267)."""
    watch = ClusterWorld(1, ClusterOptions()).watch
    lost = ReplicaId(NodeId(3), StorageId(7))
    watch._last[lost.node_id, METADATA_GROUP] = LastSeen(lost, 5, 9, 0, 0)
    watch.forget(lost.node_id)
    assert watch.durable_end(METADATA_GROUP, lost) == 9
    assert watch.durable_end(METADATA_GROUP, ReplicaId(NodeId(3), StorageId(8))) == 0
