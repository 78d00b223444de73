"""A topic that shrinks and grows while power is lost, and what hundreds of producers ask then."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from tests.live.harness import Cluster
from tests.live.load import create_topic
from tests.live.test_power import PowerDisk, lose_power, power_disk
from tests.live.test_shrink import grow, shrink, states, wait_for

pytestmark = [pytest.mark.live, pytest.mark.soak, pytest.mark.timeout(1_800)]

__all__ = ["power_disk"]

KEYS = 1_000
PRODUCERS = 200
EACH_S = 40.0
"""For so long CPU and requests are counted, before and after."""
GIVEN_UP_S = 20
CORE_SHARE_MAX = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")


class KeyedWriter:
    """A stock producer of keyed records in a thread of its own; it knows what was acknowledged."""

    def __init__(self, bootstrap: str) -> None:
        self.acknowledged: dict[bytes, tuple[int, int]] = {}
        self.failed: dict[bytes, int] = {}
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "message.timeout.ms": 20_000,
                "topic.metadata.refresh.interval.ms": 1_000,
            }
        )
        self._is_over = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> KeyedWriter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Write no more, and hear of everything that was written."""
        self._is_over = True
        self._thread.join()
        assert self._producer.flush(60) == 0

    def wait_for(self, more: int) -> None:
        """Until so many more are acknowledged."""
        wanted = len(self.acknowledged) + more
        deadline = time.monotonic() + 120
        while len(self.acknowledged) < wanted:
            assert time.monotonic() < deadline, "nothing is acknowledged"
            time.sleep(0.05)

    def _run(self) -> None:
        number = 0
        while not self._is_over:
            for _ in range(20):
                value = b"%d" % number
                key = b"key-%d" % (number % KEYS)
                self._producer.produce("t", value, key, on_delivery=self._told)
                number += 1
            self._producer.poll(0.02)

    def _told(self, error: Any, message: Any) -> None:
        if error is None:
            self.acknowledged[message.value()] = message.partition(), message.offset()
        else:
            self.failed[message.value()] = message.partition()


def read_all(cluster: Cluster) -> dict[tuple[int, int], bytes]:
    """Every record of the topic and its view, by partition and offset."""
    retired = [number for number, state in states(cluster).items() if state == "sealed"]
    found: dict[tuple[int, int], bytes] = {}
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": cluster.bootstrap, "group.id": "all", "enable.partition.eof": True}
    )
    try:
        for number in range(6):
            topic = "t.retired" if number in retired else "t"
            consumer.assign([confluent_kafka.TopicPartition(topic, number, 0)])
            while True:
                message = consumer.poll(30)
                assert message is not None, f"{topic}-{number} comes to no end"
                if message.error() is not None:
                    assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
                    break
                found[number, message.offset()] = message.value()
    finally:
        consumer.close()
    return found


@pytest.mark.root
def test_power_is_lost_while_a_topic_shrinks_and_grows(
    tmp_path: Path, power_disk: PowerDisk
) -> None:
    data = {i: power_disk.mount_point / f"node-{i}" for i in (1, 2, 3)}
    with Cluster(tmp_path, data=data) as cluster:
        create_topic(cluster.bootstrap, "t", 6, retention_ms="3600000")
        with KeyedWriter(cluster.bootstrap) as writer:
            for number in range(4):
                writer.wait_for(500)
                shrink(cluster, "--now", "--force")
                if number % 2 == 0:
                    lose_power(power_disk, cluster)
                writer.wait_for(500)
                wait_for(cluster, "sealed", (4, 5))
                lose_power(power_disk, cluster)
                if number < 3:
                    grow(cluster)
            writer.wait_for(500)
        found = read_all(cluster)
    values = list(found.values())
    assert len(values) == len(set(values)), "a record is there twice"
    lost = {v: at for v, at in writer.acknowledged.items() if found.get(at) != v}
    assert not lost, f"{len(lost)} of {len(writer.acknowledged)} acknowledged: {list(lost)[:9]}"
    print(  # noqa: T201  # its purpose
        f"{len(writer.acknowledged)} acknowledged, {len(writer.failed)} failed, none lost or twice"
    )


def cpu_s(cluster: Cluster) -> dict[int, float]:
    """What each node has used, in seconds of a core."""
    found = {}
    for node_id, node in cluster.nodes.items():
        words = Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()
        found[node_id] = (int(words[11]) + int(words[12])) / _TICKS
    return found


def asked(cluster: Cluster, api: str) -> int:
    """How many requests of one API all nodes have answered."""
    lines = [line for node in cluster.nodes.values() for line in node.text("/metrics").splitlines()]
    wanted = f'raftmq_requests_total{{api="{api}"'.lower()
    return int(
        sum(float(line.rpartition(" ")[2]) for line in lines if line.lower().startswith(wanted))
    )


@pytest.mark.parametrize("is_at_once", [False, True], ids=["when nobody writes", "at once"])
def test_two_hundred_producers_ask_little_after_a_shrink(tmp_path: Path, is_at_once: bool) -> None:
    """Producers that ask now and then find out before the seal; who is sealed out tries again until
    its records are given up, and that is only told of."""
    with Cluster(tmp_path) as cluster:
        create_topic(cluster.bootstrap, "t", 6, raftmq_closing_quiet_ms="15000")
        settings: dict[str, str | int] = {
            "bootstrap.servers": cluster.bootstrap,
            "message.timeout.ms": GIVEN_UP_S * 1_000,
            "topic.metadata.refresh.interval.ms": 5_000,
            "log_level": 0,
        }
        producers = [confluent_kafka.Producer(settings) for _ in range(PRODUCERS)]

        def measure(seconds: float) -> tuple[dict[int, float], float]:
            before, requests, began = cpu_s(cluster), asked(cluster, "metadata"), time.monotonic()
            number, past_s = 0, 0.0
            while past_s < seconds:
                for producer in producers:
                    producer.produce("t", b"value", b"key-%d" % (number % KEYS))
                    producer.poll(0)
                    number += 1
                time.sleep(max(0.0, 1.0 - (time.monotonic() - began - past_s)))
                past_s = time.monotonic() - began
            after = cpu_s(cluster)
            rate = (asked(cluster, "metadata") - requests) / past_s
            return {node: (after[node] - before[node]) / past_s for node in after}, rate

        measure(10.0)  # all know the topic
        told = {"before": measure(EACH_S)}
        shrink(cluster, "--force", *(["--now"] if is_at_once else []))
        told["meanwhile"] = measure(GIVEN_UP_S + 10.0)
        wait_for(cluster, "sealed", (4, 5))
        told["after"] = measure(EACH_S)
        print(json.dumps(told))  # noqa: T201  # its purpose
        for producer in producers:
            producer.flush(GIVEN_UP_S)
    shares = {name: shares for name, (shares, _) in told.items()}
    judged = ["after"] if is_at_once else ["meanwhile", "after"]
    for name in judged:
        more = max(shares[name][node] - shares["before"][node] for node in shares[name])
        assert more < CORE_SHARE_MAX, (name, told)
