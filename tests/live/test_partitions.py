"""Links cut between real nodes, in one direction or both: who leads, what terms do, what is lost.

A link that is cut is silence: its connections stay open. One cluster serves all tests; each leaves
it whole. A loaded machine may well add elections of its own, now and then; a term that climbs does
so several times a second for as long as anybody looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq.records import NewRecord, build_batch
from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import Load, create_topic, in_sync, leaders
from tests.live.raw import fetch, produce

pytestmark = [pytest.mark.live, pytest.mark.slow]

WATCH_S = 1.5
"""Five to ten election timeouts: a node that raised its term at each would stand out."""
LOOKS = 5
"""A look finds terms at rest on any machine; where a term climbs none of them does."""
SPARE = 2
"""Elections that a slow machine may add to a look."""


@pytest.fixture(scope="module")
def whole_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("partitions"), faults=True) as cluster:
        yield cluster


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    yield whole_cluster
    whole_cluster.heal()


def row(node: Node, topic: str) -> dict[str, Any]:
    """What a node says of a topic's only partition."""
    rows = node.get("/status")["partitions"]
    return next((r for r in rows if r["topic"] == topic), {})


def terms(cluster: Cluster, topic: str) -> dict[str, int]:
    """The greatest term that any node is in: of the partition and of the metadata group."""
    told = [node.get("/status") for node in cluster.live]
    epochs = [r["leader_epoch"] for s in told for r in s["partitions"] if r["topic"] == topic]
    return {
        "partition": max(epochs, default=0),
        "metadata": max(s["metadata"]["leader_epoch"] for s in told),
    }


def watch(cluster: Cluster, topic: str, *, elections: int) -> None:
    """Look on for a while; terms must not rise by more than these elections explain."""
    rises: list[dict[str, int]] = []
    for _ in range(LOOKS):
        before = terms(cluster, topic)
        time.sleep(WATCH_S)
        after = terms(cluster, topic)
        rises.append({group: after[group] - before[group] for group in after})
        if max(rises[-1].values()) <= elections + SPARE:
            return
    pytest.fail(f"terms climb: {rises}")


def agree(cluster: Cluster, topic: str) -> Callable[[], bool]:
    """True when all nodes follow one leader and all replicas are in sync."""

    def check() -> bool:
        rows = [row(node, topic) for node in cluster.live]
        (leader, *others) = {(r.get("leader"), r.get("leader_epoch")) for r in rows}
        return not others and leader[0] is not None and in_sync_all(cluster, topic)

    return check


def in_sync_all(cluster: Cluster, topic: str) -> bool:
    return in_sync(cluster.bootstrap, topic)[0] == set(cluster.nodes)


def begin(cluster: Cluster, topic: str) -> tuple[int, list[int]]:
    """A topic with one partition; its leader and the followers."""
    create_topic(cluster.bootstrap, topic, 1, min_insync_replicas="2")
    wait_until(agree(cluster, topic), 60, "three of three in sync")
    leader = leaders(cluster.bootstrap, topic)[0]
    return leader, [node_id for node_id in cluster.nodes if node_id != leader]


def end(cluster: Cluster, topic: str, load: Load) -> None:
    """Heal; everything converges."""
    cluster.heal()
    load.wait_for(100)
    wait_until(agree(cluster, topic), 60, "one leader, three of three in sync")


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_a_node_that_hears_nothing(cluster: Cluster, unique: str, role: str) -> None:
    """It is heard, but hears nobody. Leading, it steps down and another one leads; following, it
    changes nothing. In neither case does it raise a term."""
    leader, followers = begin(cluster, unique)
    with Load(cluster.bootstrap, unique, 1) as load:
        load.wait_for(100)
        deaf = leader if role == "leader" else followers[0]
        cluster.deafen(deaf)
        watch(cluster, unique, elections=int(role == "leader"))
        load.wait_for(100)
        watch(cluster, unique, elections=0)
        if role == "follower":
            assert row(cluster[leader], unique)["is_leader"]
        end(cluster, unique, load)
        watch(cluster, unique, elections=0)
    load.reckon().check()
    assert load.errors == []


@pytest.mark.parametrize("deaf", ["leader", "follower"])
def test_a_one_way_link(cluster: Cluster, unique: str, deaf: str) -> None:
    """Between leader and one follower only one direction works: nothing needs to change."""
    leader, followers = begin(cluster, unique)
    with Load(cluster.bootstrap, unique, 1) as load:
        load.wait_for(100)
        if deaf == "leader":
            cluster.one_way(followers[0], leader)
        else:
            cluster.one_way(leader, followers[0])
        watch(cluster, unique, elections=0)
        load.wait_for(100)
        end(cluster, unique, load)
    load.reckon().check()
    assert load.errors == []


def test_a_bridge(cluster: Cluster, unique: str) -> None:
    """Two nodes that hear the third but not each other, the leader being one of the two."""
    leader, followers = begin(cluster, unique)
    with Load(cluster.bootstrap, unique, 1) as load:
        load.wait_for(100)
        cluster.partition({leader}, {followers[0]})
        watch(cluster, unique, elections=0)
        load.wait_for(100)
        end(cluster, unique, load)
    load.reckon().check()
    assert load.errors == []


def test_links_that_flap(cluster: Cluster, unique: str) -> None:
    """One-way cuts in turn, each shorter than any client's patience."""
    begin(cluster, unique)
    with Load(cluster.bootstrap, unique, 1) as load:
        for sender, receiver in permutations(cluster.nodes, 2):
            cluster.one_way(sender, receiver)
            time.sleep(0.3)
            cluster.heal()
            load.wait_for(50)
        end(cluster, unique, load)
    load.reckon().check()
    assert load.errors == []


def test_a_leader_without_its_majority(cluster: Cluster, unique: str) -> None:
    """Cut off from both, it acknowledges nothing that the others do not have, shows consumers
    nothing beyond what is committed, and steps down; what it took alone is gone afterwards."""
    leader, followers = begin(cluster, unique)
    node = cluster[leader]
    alone = bytes(build_batch([NewRecord(None, b"-1 taken by a leader alone")]))
    with Load(cluster.bootstrap, unique, 1) as load:
        load.wait_for(100)
        cluster.isolate(leader)
        produce(node, unique, alone, acks=1)  # as long as it leads it takes this
        code, _ = produce(node, unique, alone, acks=-1, timeout_ms=500)
        assert code in {
            ErrorCode.REQUEST_TIMED_OUT,
            ErrorCode.NOT_LEADER_OR_FOLLOWER,
            ErrorCode.NOT_ENOUGH_REPLICAS,
            ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        }
        # By now it has flushed what one of the others had when the links were cut.
        committed = row(node, unique)["high_watermark"]
        assert fetch(node, unique, committed)[1] == b"", "shown what was never committed"
        wait_until(lambda: not row(node, unique)["is_leader"], 60, "it steps down")
        assert fetch(node, unique, committed)[1] == b"", "shown what was never committed"
        assert row(node, unique)["high_watermark"] == committed
        wait_until(
            lambda: any(row(cluster[other], unique)["is_leader"] for other in followers),
            60,
            "another one leads",
        )
        load.wait_for(100)
        watch(cluster, unique, elections=0)
        end(cluster, unique, load)
    load.reckon().check()
    assert load.errors == []

    def ends() -> set[int]:
        return {row(n, unique)["high_watermark"] for n in cluster.nodes.values()}

    wait_until(lambda: len(ends()) == 1, 60, "all know the same end")
    assert ends() == {load.count}, "what the old leader took alone is gone"
