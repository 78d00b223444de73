"""Clusters of one, three and five; any order of start, one late; wrong neighbours refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import Load, create_topic, leaders

pytestmark = [pytest.mark.live, pytest.mark.slow]


def produce_some(cluster: Cluster, topic: str, replicas: int) -> None:
    create_topic(cluster.bootstrap, topic, 2, replicas)
    with Load(cluster.bootstrap, topic, 2) as load:
        load.wait_for(300)
    load.reckon().check()


def test_one_node(tmp_path: Path) -> None:
    with Cluster(tmp_path, 1) as cluster:
        produce_some(cluster, "t", 1)
        assert cluster[1].terminate() == 0
        cluster[1].start()
        cluster[1].wait_ready()
        produce_some(cluster, "u", 1)


def test_five_nodes_three_voters_two_observers(tmp_path: Path) -> None:
    with Cluster(tmp_path, 5, voters=3) as cluster:
        create_topic(cluster.bootstrap, "t", 10)
        wait_until(
            lambda: set(leaders(cluster.bootstrap, "t").values()) == {1, 2, 3, 4, 5},
            60,
            "every node leads some of the partitions",
        )
        with Load(cluster.bootstrap, "t", 10) as load:
            load.wait_for(500)
            for victim in (5, 1):  # an observer, then a voter of the metadata group
                cluster[victim].kill()
                load.wait_for(500)
                cluster[victim].start()
                cluster[victim].wait_ready()
                load.wait_for(500)
        load.reckon().check()


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_three_addresses_in_any_order_one_late(tmp_path: Path, order: tuple[int, ...]) -> None:
    cluster = Cluster(tmp_path, hosts=["127.0.0.1", "127.0.0.2", "127.0.0.3"])
    try:
        first, second, late = order
        cluster[first].start()
        cluster[second].start()
        cluster[first].wait_ready()
        cluster[second].wait_ready()
        early = ",".join(f"{n.host}:{n.client_port}" for n in cluster.live)
        create_topic(early, "early", 1, 2)
        cluster[late].start()
        cluster[late].wait_ready()
        produce_some(cluster, "t", 3)
        voters = wait_until(
            lambda: cluster[first].get("/status").get("metadata", {}).get("voters"), 60
        )
        assert sorted(voters) == [1, 2, 3]
    finally:
        cluster.stop()


@pytest.mark.soak
def test_first_voters_that_are_all_empty_form_no_second_cluster(tmp_path: Path) -> None:
    with Cluster(tmp_path, 5, voters=3) as cluster:
        chosen = _chosen(cluster[4])
        assert chosen
        for node_id in (1, 2, 3):
            cluster[node_id].kill()
            cluster[node_id].wipe()
            cluster[node_id].formation_wait_ms = None  # as it is by itself
        for node_id in (1, 2, 3):
            cluster[node_id].start()
        for node_id in (1, 2, 3):
            wait_until(lambda n=node_id: _chosen(cluster[n]), 60, "it learns who formed it")
        assert [_chosen(node) for node in cluster.nodes.values()] == [chosen] * 5


def _chosen(node: Node) -> list[list[int]]:
    path = node.data / "formation.json"
    if not path.exists():
        return []
    voters: list[list[int]] = json.loads(path.read_text())["content"].get("chosen", [])
    return voters


def test_a_mismatch_is_refused_by_name(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        cluster[1].start()
        cluster[2].start()
        cluster[1].wait_ready()
        cluster.cluster_id = "another"
        cluster[3].start()
        wait_until(lambda: "'test-cluster'" in cluster[3].log_tail(), 60, "the refusal names it")
    finally:
        cluster.stop()
