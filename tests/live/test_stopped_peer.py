"""A peer that takes nothing: what waits for it is bounded, and it catches up from the disk."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import confluent_kafka
import pytest

from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import create_topic, in_sync, leaders

pytestmark = [pytest.mark.live, pytest.mark.slow]

QUEUE_BYTES = 4 << 20
RECENT_BYTES = 4 << 20
PARTITIONS = 6
VALUE = b"v" * 50_000


def metric(node: Node, name: str, **labels: str) -> float:
    """The sum of a metric's rows with these labels."""
    total = 0.0
    for line in node.text("/metrics").splitlines():
        found = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
        if found and all(f'{key}="{value}"' in found[1] for key, value in labels.items()):
            total += float(found[2])
    return total


def memory_bytes(node: Node) -> int:
    text = Path(f"/proc/{node.pid}/status").read_text()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", text)[1])  # type: ignore[index]


def produce(cluster: Cluster, partitions: list[int], size: int) -> None:
    """So many bytes, all acknowledged by a majority."""
    errors: list[str] = []
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": cluster.bootstrap, "acks": "all", "queue.buffering.max.kbytes": 8192}
    )
    for number in range(size // len(VALUE)):
        while True:
            try:
                producer.produce(
                    "t",
                    VALUE,
                    partition=partitions[number % len(partitions)],
                    on_delivery=lambda error, _: errors.append(str(error)) if error else None,
                )
                break
            except BufferError:
                producer.poll(0.05)
    assert producer.flush(60) == 0
    assert errors == []


def test_a_stopped_peer_costs_the_others_no_memory(tmp_path: Path) -> None:
    settings = {"peer_queue_bytes_max": QUEUE_BYTES, "recent_bytes_max": RECENT_BYTES}
    with Cluster(tmp_path, settings=settings) as cluster:
        create_topic(cluster.bootstrap, "t", PARTITIONS)
        everywhere = list(range(PARTITIONS))
        produce(cluster, everywhere, 40_000_000)
        sleeper = cluster[3]
        others = [cluster[1], cluster[2]]
        before = [memory_bytes(node) for node in others]
        sleeper.signal(signal.SIGSTOP)
        wait_until(
            lambda: all(led in (1, 2) for led in leaders(others_of(cluster), "t").values()),
            20,
            "others lead",
        )
        produce(cluster, everywhere, 120_000_000)
        for node, began in zip(others, before, strict=True):
            queued = metric(node, "raftmq_peer_queue_bytes", peer="3")
            assert queued <= 3 * QUEUE_BYTES
            assert memory_bytes(node) - began < 60_000_000
        dropped = sum(metric(node, "raftmq_peer_dropped_frames_total", peer="3") for node in others)
        assert dropped > 0
        sleeper.signal(signal.SIGCONT)
        wait_until(
            lambda: all(isr == {1, 2, 3} for isr in in_sync(cluster.bootstrap, "t").values()),
            60,
            "it has caught up",
        )


def others_of(cluster: Cluster) -> str:
    """Bootstrap servers that answer."""
    return ",".join(f"{node.host}:{node.client_port}" for node in (cluster[1], cluster[2]))
