"""What a disk that fails leaves behind in simulation."""

from __future__ import annotations

from jepsen_like.cluster.admins import create_topics
from jepsen_like.cluster.node import ClusterNode
from jepsen_like.cluster.world import ClusterWorld


def topic_that_cannot_begin(world: ClusterWorld, node: ClusterNode, within_ms: float) -> None:
    """A topic of one partition is made meanwhile, whose replica on `node` meets a failing disk; the
    disk is well again after that."""
    node.disk.fail_when(lambda what, path: what == "fdatasync" and "/partition-0/" in path)
    made = world.clients.spawn(lambda: create_topics(world, 90, ["t"], 1))
    world.run_until(world.now_ms + within_ms)
    assert made.is_done
    node.disk.fail_when(None)
    world.counts.faults["failed-sync"] = 1
