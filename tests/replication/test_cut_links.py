"""Links cut in one direction or both: no term climbs, nobody who can lead is deposed."""

from __future__ import annotations

import pytest

from tests.replication.sim_cluster import SimCluster
from tests.replication.sim_nodes import SimNode

WATCH_MS = 10_000.0
"""Some forty election timeouts."""


def cut(cluster: SimCluster, *links: tuple[SimNode, SimNode]) -> None:
    for sender, receiver in links:
        cluster.world.network.cut(sender.node_id, receiver.node_id)


def term(cluster: SimCluster) -> int:
    return max(cluster.replica(node).core.term for node in cluster.nodes)


def go_on_and_mend(cluster: SimCluster) -> None:
    """Let the cut links be for a while, in which records are committed; then heal."""
    cluster.run(WATCH_MS)
    cluster.commit()
    cluster.mend()
    cluster.commit()
    cluster.settle()


@pytest.mark.parametrize("seed", range(5))
def test_a_follower_that_hears_nothing_changes_nothing(seed: int) -> None:
    cluster = SimCluster(seed)
    leader, before = cluster.leader, term(cluster)
    deaf = cluster.followers()[0]
    cut(cluster, *((other, deaf) for other in cluster.nodes if other is not deaf))
    go_on_and_mend(cluster)
    assert (cluster.leader, term(cluster)) == (leader, before)


@pytest.mark.parametrize("seed", range(5))
def test_a_leader_that_hears_nothing_gives_way_once(seed: int) -> None:
    cluster = SimCluster(seed)
    deaf = cluster.leader
    cut(cluster, *((other, deaf) for other in cluster.nodes if other is not deaf))
    cluster.until(lambda: any(node is not deaf for node in cluster.leaders()), 3_000)
    cluster.until(lambda: not cluster.replica(deaf).is_leader, 3_000)
    successor, after = cluster.leader, term(cluster)
    go_on_and_mend(cluster)
    assert (cluster.leader, term(cluster)) == (successor, after)


@pytest.mark.parametrize("direction", ["to the leader", "to the follower", "both"])
@pytest.mark.parametrize("seed", range(3))
def test_one_link_of_a_leader_is_not_needed(seed: int, direction: str) -> None:
    cluster = SimCluster(seed)
    leader, before = cluster.leader, term(cluster)
    follower = cluster.followers()[0]
    if direction != "to the follower":
        cut(cluster, (follower, leader))
    if direction != "to the leader":
        cut(cluster, (leader, follower))
    go_on_and_mend(cluster)
    assert (cluster.leader, term(cluster)) == (leader, before)


@pytest.mark.parametrize("seed", range(3))
def test_a_leader_alone_steps_down_and_commits_nothing(seed: int) -> None:
    cluster = SimCluster(seed)
    alone = cluster.leader
    cluster.commit()
    cluster.isolate(alone)
    replica = cluster.replica(alone)
    committed = replica.high_watermark
    cluster.append(alone)
    cluster.until(lambda: not replica.is_leader, 2_000)
    assert replica.high_watermark == committed
    cluster.until(lambda: bool(cluster.leaders()), 3_000)
    cluster.commit()
    after = term(cluster)
    cluster.run(WATCH_MS)
    cluster.mend()
    cluster.commit()
    cluster.settle()
    assert term(cluster) == after
