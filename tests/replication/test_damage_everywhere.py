"""Every replica damaged, each somewhere else: nobody may lead, and yet it heals by itself."""

from __future__ import annotations

from random import Random

import pytest

from jepsen_like.cluster.damage import flushed_batches
from raftmq.log.model import DamagedError
from raftmq.raft.messages import Role
from raftmq.types import Offset, RaftIndex
from tests.replication.sim_cluster import SimCluster
from tests.replication.sim_nodes import SimNode


def batches(node: SimNode) -> list[tuple[str, int, int]]:
    """(path, position, size) of every batch, in order."""
    found: list[tuple[str, int, int]] = []
    for path, size in sorted(node.disk.files("data/group-0").items()):
        if path.endswith(".log"):
            data = node.disk.content(path)[:size]
            found += [(path, *batch) for batch in flushed_batches(data, 1 << 62)]
    return found


def contents(cluster: SimCluster, node: SimNode) -> list[tuple[int, bytes]]:
    log = cluster.replica(node).log
    at, found = log.log_start.index, []
    while at < log.end_index:
        entries = log.entries(at, 1 << 20)
        found += [(entry.start, bytes(entry.payload)) for entry in entries]
        at = entries[-1].end
    return found


def rot_everywhere(cluster: SimCluster, random: Random, share: int) -> list[int]:
    """Crash all, then flip bits so that every batch stays whole on one node; how many per node."""
    counts = []
    for node in cluster.nodes:
        node.crash()
    stored = [batches(node) for node in cluster.nodes]
    assert len({len(each) for each in stored}) == 1
    for number, node in enumerate(cluster.nodes):
        # Of any three batches in a row one is damaged here, another one there. Of the newest a
        # journal may not know that they were flushed: damage to them looks like a torn write.
        mine = [i for i in range(len(stored[number]) - 3) if i % 3 == number][-share:]
        for i in mine:
            path, position, size = stored[number][i]
            node.disk.flip(path, position + random.randrange(size), random.randrange(8))
        counts.append(len(mine))
    for node in cluster.nodes:
        node.start()
    return counts


@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize("share", [1, 5, 100], ids=["one", "some", "a third"])
def test_damage_in_other_places_on_every_replica_heals(seed: int, share: int) -> None:
    cluster = SimCluster(seed, segment_bytes=600)
    cluster.commit(24, size=60)
    cluster.settle()
    expected = contents(cluster, cluster.leader)
    assert min(rot_everywhere(cluster, Random(seed), share)) >= 1
    cluster.until(lambda: bool(cluster.leaders()), within_ms=20_000)
    cluster.until(
        lambda: not any(cluster.replica(node).damaged() for node in cluster.nodes), 20_000
    )
    cluster.commit(3)
    cluster.settle()
    bare = cluster.replica(cluster.leader).log.bare_entries()
    assert len(bare) >= 2
    for node in cluster.nodes:
        found = dict(contents(cluster, node))
        assert {index: found[index] for index, _ in expected} == dict(expected)
        assert cluster.replica(node).log.scrub(1 << 30) == []


def test_nobody_leads_over_damage_that_none_can_mend() -> None:
    """The same batch bad everywhere: safety wins, nothing is served and nothing is taken."""
    cluster = SimCluster(segment_bytes=1 << 20)
    cluster.commit(10, size=60)
    cluster.settle()
    for node in cluster.nodes:
        node.crash()
    for node in cluster.nodes:
        path, position, _ = batches(node)[4]
        node.disk.flip(path, position + 70)
    for node in cluster.nodes:
        node.start()
    cluster.run(5_000)
    assert not cluster.leaders()
    for node in cluster.nodes:
        replica = cluster.replica(node)
        assert replica.failure is None
        assert replica.core.role is not Role.LEADER
        assert replica.damaged() == [(4, 5)]
        with pytest.raises(DamagedError):
            replica.log.entries(RaftIndex(5), 1)
        with pytest.raises(DamagedError):
            replica.log.locate(Offset(4), 1, Offset(5))


def test_a_whole_segment_that_is_gone_comes_back() -> None:
    cluster = SimCluster(segment_bytes=4_000)
    cluster.commit(60, size=200)
    cluster.settle()
    node = cluster.followers()[0]
    expected = contents(cluster, node)
    path = batches(node)[0][0]
    node.crash()
    node.disk.remove(path)
    node.disk.spoilt[path] = True
    node.disk.sync_directory("data/group-0")
    node.start()
    assert cluster.replica(node).damaged()
    cluster.until(lambda: not cluster.replica(node).damaged(), 10_000)
    cluster.settle()
    found = dict(contents(cluster, node))
    assert {index: found[index] for index, _ in expected} == dict(expected)
    assert not any(name.endswith(".tmp") for name in node.disk.list("data/group-0"))


def test_the_batch_that_the_log_start_lies_within_is_mended() -> None:
    """Its first records are dropped everywhere, its bytes are not."""
    cluster = SimCluster(segment_bytes=1 << 20)
    for _ in range(4):
        cluster.append(count=5, size=60)
    cluster.settle()
    leader = cluster.replica(cluster.leader)
    leader.move_log_start(Offset(7))
    leader.touch()
    cluster.until(lambda: all(cluster.replica(n).log_start_offset == 7 for n in cluster.nodes))
    cluster.settle()
    node = cluster.followers()[0]
    node.crash()
    path, position, _ = batches(node)[1]
    node.disk.flip(path, position + 70)
    node.start()
    assert cluster.replica(node).damaged() == [(5, 10)]
    cluster.until(lambda: not cluster.replica(node).damaged(), 10_000)
    assert cluster.replica(node).log.scrub(1 << 30) == []
