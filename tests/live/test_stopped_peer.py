"""A peer that takes nothing: what waits for it is bounded, and it catches up from the disk.

Which way its bytes are held back (its sockets' buffers, a full queue, the window of a group, the
catch-up stream) is a matter of timing; that all of it together is bounded is not.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import confluent_kafka
import pytest

from raftmq.replication.ports import ReplicaConfig
from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import create_topic, in_sync, leaders
from tests.node.exposition import Page

pytestmark = [pytest.mark.live, pytest.mark.slow]

QUEUE_BYTES = 4 << 20
RECENT_BYTES = 4 << 20
PARTITIONS = 6
VALUE = b"v" * 50_000
SLICES = 13
SLICE_BYTES = 10_000_000
MEMORY_BYTES = 60_000_000
"""What a node may grow by: half of what is produced meanwhile."""
REPLICAS = ReplicaConfig()
WINDOWS_BYTES = PARTITIONS * (REPLICAS.inflight_bytes_max + 2 * REPLICAS.append_bytes_max)
"""A window per group, the request that overfills it and the first one of a leader before."""


def memory_bytes(node: Node) -> int:
    text = Path(f"/proc/{node.pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]


def sent_bytes(nodes: list[Node], **labels: str) -> float:
    """What these nodes gave to the sleeper's streams, what waits in queues included."""
    pages = [Page(node.text("/metrics")) for node in nodes]
    return sum(page.sum("raftmq_peer_sent_bytes_total", peer="3", **labels) for page in pages)


def produce(bootstrap: str, size: int) -> None:
    """So many bytes to all partitions in turn, all acknowledged by a majority."""
    errors: list[str] = []
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "acks": "all", "queue.buffering.max.kbytes": 8192}
    )
    for number in range(size // len(VALUE)):
        while True:
            try:
                producer.produce(
                    "t",
                    VALUE,
                    partition=number % PARTITIONS,
                    on_delivery=lambda error, _: errors.append(str(error)) if error else None,
                )
                break
            except BufferError:
                producer.poll(0.05)
    assert producer.flush(90) == 0
    assert errors == []


def test_a_stopped_peer_costs_the_others_no_memory(tmp_path: Path) -> None:
    settings = {"peer_queue_bytes_max": QUEUE_BYTES, "recent_bytes_max": RECENT_BYTES}
    with Cluster(tmp_path, settings=settings) as cluster:
        create_topic(cluster.bootstrap, "t", PARTITIONS)
        produce(cluster.bootstrap, 4 * SLICE_BYTES)
        sleeper, others = cluster[3], [cluster[1], cluster[2]]
        bootstrap = ",".join(node.address for node in others)
        before = [memory_bytes(node) for node in others]
        sleeper.signal(signal.SIGSTOP)
        wait_until(
            lambda: all(led in (1, 2) for led in leaders(bootstrap, "t").values()),
            60,
            "others lead",
        )
        sent = sent_bytes(others)
        for _ in range(SLICES):
            produce(bootstrap, SLICE_BYTES)
            for node, began in zip(others, before, strict=True):
                queues = Page(node.text("/metrics")).rows("raftmq_peer_queue_bytes", peer="3")
                assert {labels["stream"] for labels, _ in queues} >= {"bulk", "catch-up"}
                assert all(waiting <= QUEUE_BYTES for _, waiting in queues)
                assert memory_bytes(node) - began < MEMORY_BYTES
        assert SLICES * SLICE_BYTES > 2 * WINDOWS_BYTES, "enough to tell"
        assert sent_bytes(others) - sent <= WINDOWS_BYTES, "the rest is on disk alone"
        caught_up = sent_bytes(others, stream="catch-up")
        sleeper.signal(signal.SIGCONT)
        # A short stop leaves it in sync by the clock, so that alone says nothing.
        wait_until(
            lambda: sent_bytes(others, stream="catch-up") > caught_up, 60, "sent from the disk"
        )
        wait_until(
            lambda: all(isr == {1, 2, 3} for isr in in_sync(bootstrap, "t").values()),
            90,
            "it has caught up",
        )
