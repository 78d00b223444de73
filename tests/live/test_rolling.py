"""All nodes restarted one after the other under load: applications notice nothing."""

from __future__ import annotations

from pathlib import Path

import confluent_kafka
import pytest

from benchmarks.rolling import TOPIC, Application
from raftmq.protocol import ApiKey, Struct
from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import create_topic, in_sync
from tests.live.raw import ask

pytestmark = [pytest.mark.live, pytest.mark.slow]

PARTITIONS = 4
MEMBERS = 2
PATIENT = {"shutdown_timeout_ms": 60_000}
"""Handing over takes its turns on a busy machine; a node that gives up on it would tell."""


def is_whole(cluster: Cluster) -> bool:
    told = in_sync(cluster.bootstrap, TOPIC)
    return len(told) == PARTITIONS and all(nodes == {1, 2, 3} for nodes in told.values())


def metadata(node: Node, topic: str) -> Struct:
    """Metadata as one node tells it."""
    request = Struct(
        topics=[Struct(name=topic)],
        allow_auto_topic_creation=False,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )
    return ask(node, ApiKey.METADATA, 9, request)


def everybody_names(cluster: Cluster, node_id: int) -> bool:
    told = [metadata(node, TOPIC).brokers for node in cluster.nodes.values()]
    return all(node_id in {broker.node_id for broker in brokers} for brokers in told)


def preferred_lead(cluster: Cluster) -> bool:
    (topic,) = metadata(cluster[1], TOPIC).topics
    return all(p.leader_id == p.replica_nodes[0] for p in topic.partitions)


def test_rolling_restart(tmp_path: Path) -> None:
    with Cluster(tmp_path, settings=PATIENT) as cluster:
        create_topic(cluster.bootstrap, TOPIC, PARTITIONS, min_insync_replicas="2")
        application = Application(cluster.bootstrap, PARTITIONS, rate=200)
        application.begin()
        try:
            wait_until(lambda: application.committed > 4, 60, "the group commits")
            before = application.rebalances
            for node in cluster.nodes.values():
                assert node.terminate(90) == 0
                handed_over = node.log_tail()
                assert "not everything was handed over" not in handed_over
                acked, committed = len(application.acked_at), application.committed
                wait_until(lambda n=acked: len(application.acked_at) > n + 50, 60, "more records")
                wait_until(lambda n=committed: application.committed > n + 2, 60, "more commits")
                node.start()
                node.wait_ready()
                wait_until(lambda n=node.node_id: everybody_names(cluster, n), 10, "it is named")
                wait_until(lambda: is_whole(cluster), 60, "the returned node is caught up")
            wait_until(lambda: preferred_lead(cluster), 60, "leadership balances itself")
        finally:
            application.end()
        assert application.errors == []
        assert application.lost == 0
        # Claims are handed over with their groups. A member that finds the next coordinator only
        # after its session joins again, which costs the group one rebalance and nothing else.
        assert application.rebalances - before <= MEMBERS * len(cluster.nodes), "the group went on"
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": cluster.bootstrap, "group.id": "rolling"}
        )
        asked = [confluent_kafka.TopicPartition(TOPIC, p) for p in application.positions]
        for found in consumer.committed(asked, timeout=20):
            assert found.offset >= application.positions[found.partition], "a commit was lost"
        consumer.close()
