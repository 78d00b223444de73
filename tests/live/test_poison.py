"""A producer of batches that lie, on a live cluster: it is told so, and nobody else notices."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import confluent_kafka
import kafka
import pytest

from raftmq.errors import ErrorCode
from raftmq_client import Admin, Consumer, Producer, TopicPartition
from tests.live.harness import Cluster, need
from tests.poison.asking import Asker
from tests.poison.kinds import DIFFERENT, KINDS, TOPICS

pytestmark = [pytest.mark.live, pytest.mark.slow]

RECORDED = json.loads((Path(__file__).parents[1] / "poison" / "kafka.json").read_text())
PRODUCED = [
    "sound",
    "offset delta again",
    "record length 0, gzip",
    "null header name",
    "sound zstd",
    "header name not UTF-8",
    "bytes behind the last record",
    "one record told of two",
    "zstd: one byte cut",
    "lz4 of linked blocks",
    "control batch",
    "checksum",
    "base offset 7",
    "two hours ahead, told of now",
    "seven million headers, packed",
    "headers",
    "32 MiB in one record, gzip",
    "sound lz4",
]


def expected(name: str) -> ErrorCode:
    if name in DIFFERENT:
        return ErrorCode[DIFFERENT[name].code]
    code = ErrorCode[RECORDED[name][0]]
    return ErrorCode.INVALID_RECORD if code is ErrorCode.UNKNOWN_SERVER_ERROR else code


@contextmanager
def asking(cluster: Cluster) -> Iterator[Asker]:
    asker = Asker(cluster.bootstrap)
    try:
        yield asker
    finally:
        asker.close()


def by_kcat(cluster: Cluster, topic: str) -> list[int]:
    done = subprocess.run(
        [
            *(need("kcat"), "-b", cluster.bootstrap, "-C", "-t", topic, "-o", "beginning"),
            *("-e", "-q", "-f", "%o\n"),
        ],
        capture_output=True,
        timeout=60,
        check=True,
    )
    return [int(line) for line in done.stdout.split()]


def by_librdkafka(cluster: Cluster, topic: str) -> list[int]:
    client = confluent_kafka.Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": topic,
            "enable.partition.eof": True,
            "check.crcs": True,
        }
    )
    client.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    found: list[int] = []
    while (message := client.poll(30)) is not None:
        if (error := message.error()) is not None:
            assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF, error
            break
        offset = message.offset()
        assert offset is not None
        found.append(offset)
    client.close()
    return found


def by_kafka_python(cluster: Cluster, topic: str) -> list[int]:
    client = kafka.KafkaConsumer(bootstrap_servers=cluster.bootstrap, group_id=None)
    try:
        partition = kafka.TopicPartition(topic, 0)
        client.assign([partition])
        client.seek_to_beginning(partition)
        end = client.end_offsets([partition])[partition]
        found: list[int] = []
        while len(found) < end:
            batch = client.poll(30_000).get(partition)
            assert batch, f"nothing after {found[-1:]}"
            found += [record.offset for record in batch]
        return found
    finally:
        client.close()


def by_our_own(cluster: Cluster, topic: str) -> list[int]:
    found: list[int] = []
    partition = TopicPartition(topic, 0)
    with Admin(cluster.bootstrap) as admin, Consumer(cluster.bootstrap) as consumer:
        end = admin.list_offsets({partition: -1})[partition]
        consumer.assign({partition: 0})
        while len(found) < end.offset:
            taken = consumer.poll(30.0)
            assert taken, f"nothing after {found[-1:]}"
            found += [record.offset for record in taken]
    return found


def test_poison_is_refused_and_consumers_read_on(shared_cluster: Cluster, unique: str) -> None:
    with asking(shared_cluster) as asker, Producer(shared_cluster.bootstrap) as producer:
        asker.create(unique, {})
        count = 0
        for name in PRODUCED:
            answer = asker.ask(KINDS[name], unique)
            assert (name, ErrorCode[answer.code]) == (name, expected(name))
            if expected(name) is ErrorCode.NONE:
                count += 2 if name.startswith("sound") else 1
            producer.send(unique, b"after %s" % name.encode(), partition=0).result()
            count += 1
    readers: list[Callable[[Cluster, str], list[int]]] = [
        by_kcat,
        by_librdkafka,
        by_kafka_python,
        by_our_own,
    ]
    for read in readers:
        assert read(shared_cluster, unique) == list(range(count)), read.__name__


def test_how_deep_is_looked_is_a_topics_choice(shared_cluster: Cluster, unique: str) -> None:
    kinds = ("sound", "null header name", "bytes behind the last record")
    taken = {"records": 1, "frame": 2, "crc": 3}
    with asking(shared_cluster) as asker, Admin(shared_cluster.bootstrap) as admin:
        for depth, count in taken.items():
            topic = f"{unique}-{depth}"
            asker.create(topic, {"raftmq.produce.check": depth})
            codes = [asker.ask(KINDS[name], topic).code for name in kinds]
            assert codes == ["NONE"] * count + ["INVALID_RECORD"] * (3 - count)
        with pytest.raises(Exception, match="must be one of"):
            admin.create_topic(f"{unique}-x", configs={"raftmq.produce.check": "all"})


@pytest.mark.parametrize("topic", ["compacted", "stamped"])
def test_records_are_named(shared_cluster: Cluster, unique: str, topic: str) -> None:
    with asking(shared_cluster) as asker:
        asker.create(unique, TOPICS[topic])
        for kind in KINDS.values():
            if kind.topic == topic:
                answer = asker.ask(kind, unique)
                assert [answer.code, list(answer.records)] == RECORDED[kind.name]
