"""A consumer of bytes that left memory: a worker waits for the disk, and nobody else does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import confluent_kafka
import pytest

from tests.live.harness import Cluster, Node
from tests.live.load import create_topic, read_numbers

pytestmark = [pytest.mark.live, pytest.mark.slow]

MESSAGES = 20_000


def drop_from_memory(folder: Path) -> None:
    """Let the kernel forget the pages of a partition's files."""
    for path in sorted(folder.iterdir()):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def metric(node: Node, name: str) -> float:
    found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", node.text("/metrics"), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def test_cold_bytes_are_read_by_a_worker(tmp_path: Path) -> None:
    settings = {"recent_bytes_max": 1 << 20}
    with Cluster(tmp_path, nodes=1, settings=settings) as cluster:
        node = cluster[1]
        create_topic(cluster.bootstrap, "cold", 1, 1, segment_bytes=str(4 << 20))
        producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap})
        padding = b" " * 1000
        for number in range(MESSAGES):
            producer.produce("cold", b"%d" % number + padding, partition=0)
            if number % 1000 == 0:
                producer.poll(0)
        assert producer.flush(60) == 0
        for is_new_process in (False, True):
            if is_new_process:  # it has verified nothing and knows no index
                assert node.terminate() == 0
                node.start()
                node.wait_ready()
            before = metric(node, "raftmq_read_aheads_total")
            drop_from_memory(node.partition_folder("cold"))
            read = read_numbers(cluster.bootstrap, "cold", 0)
            assert [value for _, value in read] == list(range(MESSAGES))
            assert metric(node, "raftmq_read_aheads_total") > before
