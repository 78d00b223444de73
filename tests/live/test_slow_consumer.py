"""Slow consumers cost others nothing: the end-to-end time of one group, with and without them.

Run by hand on a quiet machine (`pytest -m soak -s`); it prints the figures.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka
import pytest

from raftmq.protocol import encode_request_header
from raftmq.protocol.api_versions import ApiKey
from raftmq.protocol.fetch import FetchPartition, FetchRequest, FetchTopic, encode_fetch_request
from tests.live.harness import Cluster, Node
from tests.live.load import create_topic, leaders

pytestmark = [pytest.mark.live, pytest.mark.soak]

PHASE_S = 6.0
ROUNDS = 4
RATE = 200
SLOW = 40
RATIO_MAX = 1.10


@contextmanager
def slow_consumers(node: Node, topic: str) -> Iterator[None]:
    """Clients of another group that ask for megabytes and take a kilobyte now and then."""
    wanted = FetchTopic(topic, None, [FetchPartition(0, -1, 0, -1, -1, 50 << 20)])
    body = encode_fetch_request(
        12, FetchRequest(max_wait_ms=500, min_bytes=1, max_bytes=50 << 20, topics=[wanted])
    )
    head = encode_request_header(ApiKey.FETCH, 12, 1, "slow")
    frame = struct.pack(">i", len(head) + len(body)) + head + body
    socks = []
    for _ in range(SLOW):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((node.host, node.client_port))
        sock.sendall(frame)
        socks.append(sock)
    is_over = threading.Event()

    def sip() -> None:
        while not is_over.wait(0.1):
            for sock in socks:
                assert sock.recv(1024), "a slow reader is not hung up on while it reads"

    thread = threading.Thread(target=sip)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        for sock in socks:
            sock.close()


def p99_ms(bootstrap: str, topic: str) -> float:
    """End-to-end times of a paced producer and a consumer that keeps up."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "fast", "enable.auto.commit": False}
    )
    _, end = consumer.get_watermark_offsets(confluent_kafka.TopicPartition(topic, 0), timeout=20)
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, end)])
    consumer.poll(0.5)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0}
    )
    taken: list[float] = []
    start = time.perf_counter()
    sent = 0
    while time.perf_counter() - start < PHASE_S or len(taken) < sent:
        now = time.perf_counter()
        if now - start < PHASE_S and now >= start + sent / RATE:
            producer.produce(topic, repr(now).encode(), partition=0)
            producer.poll(0)
            sent += 1
        message = consumer.poll(0.0005)
        if message is not None and message.error() is None:
            taken.append((time.perf_counter() - float(message.value())) * 1e3)
    consumer.close()
    taken.sort()
    return taken[int(len(taken) * 0.99)]


def test_slow_consumers_slow_nobody(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=3) as cluster:
        create_topic(cluster.bootstrap, "big", 1)
        create_topic(cluster.bootstrap, "fast", 1)
        producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap})
        for _ in range(60):
            producer.produce("big", os.urandom(900_000))
            producer.poll(0.01)
        assert producer.flush(60) == 0
        node = cluster[leaders(cluster.bootstrap, "big")[0]]
        p99_ms(cluster.bootstrap, "fast")  # warm
        alone, beside = [], []
        for _ in range(ROUNDS):
            alone.append(p99_ms(cluster.bootstrap, "fast"))
            with slow_consumers(node, "big"):
                beside.append(p99_ms(cluster.bootstrap, "fast"))
        print(f"\np99 alone {alone} ms, beside {SLOW} slow consumers {beside} ms")  # noqa: T201  # its purpose
        ratio = statistics.median(beside) / statistics.median(alone)
        print(f"ratio of medians {ratio:.3f}")  # noqa: T201
        assert ratio < RATIO_MAX
