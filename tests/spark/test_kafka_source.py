"""Spark's own Kafka source and sink work against raftmq: users can choose."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from raftmq.types import TopicPartition
from raftmq_client.blocking import Consumer
from tests.live.harness import Cluster, lack
from tests.spark.conftest import produce
from tests.spark.connector import connector_jars
from tests.spark.test_source import frame, per_partition

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow]
MakeTopic = Callable[..., str]


@pytest.fixture(autouse=True)
def needs_connector(spark: Any) -> None:
    if not connector_jars():
        lack("needs Spark's Kafka connector, which Maven fetches")


def kafka(spark: Any, cluster: Cluster, **options: Any) -> Any:
    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", cluster.bootstrap)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


@pytest.mark.parametrize("compression", ["none", "zstd", "lz4", "snappy", "gzip"])
def test_both_sources_read_the_same(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic, compression: str
) -> None:
    topic = make_topic(3)
    written = produce(
        shared_cluster.bootstrap,
        topic,
        3_000,
        partitions=(0, 1, 2),
        headers=[("h", b"1"), ("none", None)],
        compression=compression,
    )
    chosen = {"subscribe": topic, "includeHeaders": "true"}
    theirs = kafka(spark, shared_cluster, **chosen)
    ours = frame(spark, shared_cluster, **chosen)
    assert theirs.schema == ours.schema
    assert per_partition(theirs.collect()) == written
    # Spark compares no arrays of structs with binary in exceptAll; as text it does.
    as_text = [
        read.selectExpr("hex(key)", "hex(value)", "topic", "partition", "offset", "timestamp",
                        "timestampType", "to_json(headers)")
        for read in (theirs, ours)
    ]  # fmt: skip
    assert as_text[0].exceptAll(as_text[1]).count() == 0
    assert as_text[1].exceptAll(as_text[0]).count() == 0


def test_the_same_options_choose_the_same_rows(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic(2)
    produce(shared_cluster.bootstrap, topic, 1_000, partitions=(0, 1))
    for options in (
        {
            "assign": json.dumps({topic: [1]}),
            "startingOffsets": json.dumps({topic: {"1": 17}}),
            "endingOffsets": json.dumps({topic: {"1": 170}}),
        },
        {"subscribePattern": f"{topic}.*", "minPartitions": "5"},
        {"subscribe": topic, "startingTimestamp": "1"},
        {"subscribe": topic, "endingTimestamp": "1"},
    ):
        found = [
            sorted((row.partition, row.offset) for row in read(spark, shared_cluster, **options)
                   .select("partition", "offset").collect())
            for read in (kafka, frame)
        ]  # fmt: skip
        assert found[0] == found[1], options


def test_the_sink_writes_what_our_source_reads(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic(2)
    rows = spark.range(2_000).selectExpr(
        "cast(id as string) as key",
        "concat('value ', id) as value",
        "cast(id % 2 as int) as partition",
    )
    sink = rows.write.format("kafka").option("kafka.bootstrap.servers", shared_cluster.bootstrap)
    sink.option("topic", topic).save()
    read = frame(spark, shared_cluster, subscribe=topic)
    found = read.selectExpr("cast(key as string)", "cast(value as string)", "partition").collect()
    assert sorted((int(row.key), row.value, row.partition) for row in found) == [
        (number, f"value {number}", number % 2) for number in range(2_000)
    ]
    with Consumer(shared_cluster.bootstrap) as consumer:
        consumer.assign({TopicPartition(topic, 0): 0})
        assert consumer.poll(30.0)[0].value.startswith(b"value ")
