"""Retention by size and age and DeleteRecords: the log start rises everywhere and stays risen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from tests.live import load
from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import Load, create_topic, leaders

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all: each test has a topic of its own and leaves three running nodes."""
    folder = tmp_path_factory.mktemp("retention")
    with Cluster(folder, settings={"retention_check_ms": 200}) as cluster:
        yield cluster


def watermarks(bootstrap: str, topic: str) -> tuple[int, int]:
    """Log start and high watermark, as a stock consumer sees them."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": "w"})
    try:
        return load.watermarks(consumer, topic)
    finally:
        consumer.close()


def segments(node: Node, topic: str) -> list[Path]:
    """The segments of a partition on one node, oldest first."""
    return sorted(node.partition_folder(topic).glob("*.log"))


def settled_low(cluster: Cluster, topic: str, is_settled: Callable[[list[Path]], bool]) -> int:
    """The log start, once retention has nothing left to do on any node."""

    def settled() -> int:
        kept = [segments(node, topic) for node in cluster.nodes.values()]
        bases = {int(paths[0].stem) for paths in kept if paths}
        try:
            done = len(bases) == 1 and all(paths and is_settled(paths) for paths in kept)
        except FileNotFoundError:  # went while we looked
            return 0
        return bases.pop() if done else 0

    low: int = wait_until(settled, 60, "retention settles")
    assert watermarks(cluster.bootstrap, topic)[0] == low
    return low


def check_reset(bootstrap: str, topic: str, low: int) -> None:
    """A consumer below the log start resets to it."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "r", "auto.offset.reset": "earliest"}
    )
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        message = wait_until(lambda: consumer.poll(0.5), 60)
        assert message.error() is None, message.error()
        assert message.offset() == low
    finally:
        consumer.close()


def test_by_size_across_leader_change_and_restart(cluster: Cluster) -> None:
    create_topic(cluster.bootstrap, "size", 1, segment_bytes="1048576", retention_bytes="2097152")
    with Load(cluster.bootstrap, "size", 1, rate=20_000, size=1000) as numbers:
        numbers.wait_for(8_000, timeout_s=90)
    low = settled_low(
        cluster, "size", lambda paths: sum(p.stat().st_size for p in paths[1:]) < 2_097_152
    )
    assert sum(p.stat().st_size for p in segments(cluster[1], "size")) >= 2_097_152, (
        "no more than due"
    )
    check_reset(cluster.bootstrap, "size", low)
    leader = leaders(cluster.bootstrap, "size")[0]
    cluster[leader].kill()
    live = f"{cluster.live[0].host}:{cluster.live[0].client_port}"
    wait_until(lambda: leaders(live, "size")[0] != leader, 60, "another leader")
    assert watermarks(live, "size")[0] >= low
    cluster[leader].start()
    cluster[leader].wait_ready()
    assert watermarks(cluster.bootstrap, "size")[0] >= low


def test_by_age(cluster: Cluster) -> None:
    """Records stamped three weeks ago are older than two weeks: their closed segments go."""
    create_topic(cluster.bootstrap, "age", 1, segment_bytes="1048576")
    old = int(time.time() * 1e3) - 21 * 24 * 3600 * 1000
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap})
    for i in range(3_000):
        producer.produce("age", bytes(1000), timestamp=old + i)
    for _ in range(10):
        producer.produce("age", b"now")
    assert producer.flush(30) == 0
    low = settled_low(cluster, "age", lambda paths: len(paths) == 1)
    assert watermarks(cluster.bootstrap, "age")[1] == 3_010
    check_reset(cluster.bootstrap, "age", low)


def test_delete_records(cluster: Cluster) -> None:
    create_topic(cluster.bootstrap, "deleted", 1)
    with Load(cluster.bootstrap, "deleted", 1) as numbers:
        numbers.wait_for(1_000)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    where = confluent_kafka.TopicPartition("deleted", 0, 500)
    (future,) = admin.delete_records([where]).values()
    assert future.result(20).low_watermark == 500
    assert watermarks(cluster.bootstrap, "deleted")[0] == 500
    check_reset(cluster.bootstrap, "deleted", 500)
    for node in cluster.nodes.values():
        node.kill()
    for node in cluster.nodes.values():
        node.start()
    for node in cluster.nodes.values():
        node.wait_ready()
    assert watermarks(cluster.bootstrap, "deleted")[0] == 500


def test_added_partitions_under_load(cluster: Cluster) -> None:
    """Stock producers use the new partition; a group reads it from its first record."""
    create_topic(cluster.bootstrap, "added", 1)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": cluster.bootstrap, "topic.metadata.refresh.interval.ms": 500}
    )
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "added",
            "auto.offset.reset": "earliest",
            "topic.metadata.refresh.interval.ms": 500,
        }
    )
    consumer.subscribe(["added"])
    produced: dict[int, list[int]] = {0: [], 1: []}
    consumed: dict[int, list[int]] = {0: [], 1: []}

    def delivered(error: object, message: confluent_kafka.Message) -> None:
        assert error is None
        produced[message.partition()].append(message.offset())

    def step() -> bool:
        for i in range(20):
            producer.produce("added", b"v", key=b"%d" % i, on_delivery=delivered)
        producer.poll(0.01)
        for message in consumer.consume(500, 0.05):
            assert message.error() is None, message.error()
            consumed[message.partition()].append(message.offset())
        return len(consumed[0]) > 200

    wait_until(step, 60)
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    new = confluent_kafka.admin.NewPartitions("added", 2)
    (future,) = admin.create_partitions([new]).values()
    future.result(20)
    wait_until(lambda: step() and len(consumed[1]) > 200, 60, "the group reads the new partition")
    assert consumed[1][:200] == list(range(200)), "from its first record"
    producer.flush(20)
    consumer.close()


def test_idle_segments_are_closed_by_age(cluster: Cluster) -> None:
    """Nothing is produced any more, and still the active segment is closed and retained."""
    create_topic(cluster.bootstrap, "t", 1, segment_ms="1000", retention_ms="1500")
    with Load(cluster.bootstrap, "t", 1) as numbers:
        numbers.wait_for(200)
    end = watermarks(cluster.bootstrap, "t")[1]
    wait_until(lambda: watermarks(cluster.bootstrap, "t") == (end, end), 60)


def test_records_expire_in_silence(cluster: Cluster) -> None:
    """`retention.ms` alone: ten records, and nothing after them. They leave every node's disk."""
    create_topic(cluster.bootstrap, "silence", 1, retention_ms="2000")
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap})
    for _ in range(10):
        producer.produce("silence", b"personal")
    assert producer.flush(30) == 0
    wait_until(lambda: watermarks(cluster.bootstrap, "silence") == (10, 10), 60)
    for node in cluster.live:
        wait_until(
            lambda node=node: not sum(p.stat().st_size for p in segments(node, "silence")), 60
        )
    producer.produce("silence", b"later")
    assert producer.flush(30) == 0
    check_reset(cluster.bootstrap, "silence", 10)
