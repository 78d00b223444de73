"""A consumer that names its rack reads from the replica there (KIP-392)."""

from __future__ import annotations

import re
from pathlib import Path

import confluent_kafka
import pytest

from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import Load, create_topic, leaders

pytestmark = [pytest.mark.live, pytest.mark.slow]

RACKS = ["a", "b", "c"]


def fetches(node: Node) -> float:
    """Fetch requests that a node has answered."""
    text = node.text("/metrics")
    found = re.findall(r'^raftmq_requests_total\{[^}]*api="fetch"[^}]*\} ([0-9.e+]+)$', text, re.M)
    return sum(float(n) for n in found)


def test_reads_come_from_the_consumers_rack(tmp_path: Path) -> None:
    with Cluster(tmp_path, racks=RACKS) as cluster:
        create_topic(cluster.bootstrap, "t", 1)
        with Load(cluster.bootstrap, "t", 1, rate=20_000, size=500) as load:
            load.wait_for(20_000)
        leader = leaders(cluster.bootstrap, "t")[0]
        near = next(node for node in cluster.nodes.values() if node.node_id != leader)
        assert fetches(near) == 0
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "group.id": "g",
                "client.rack": near.rack,
                "enable.auto.commit": False,
                "fetch.message.max.bytes": 100_000,
            }
        )
        consumer.assign([confluent_kafka.TopicPartition("t", 0, 0)])
        read: list[int] = []

        def step() -> bool:
            messages = [m for m in consumer.consume(1000, 0.2) if m.error() is None]
            read.extend(int(m.value().split(b" ", 1)[0]) for m in messages)
            return len(read) >= load.count

        wait_until(step, 60)
        consumer.close()
        assert read[: load.count] == sorted(load.acknowledged[0])
        assert fetches(near) > 1, "the replica in the consumer's rack served it"
