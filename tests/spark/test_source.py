"""The source in a real local Spark, on a real cluster: counts, sums and order per partition."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin, Consumer, Producer
from tests.live.harness import Cluster
from tests.spark.conftest import Produced, produce

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow]
MakeTopic = Callable[..., str]


def frame(spark: Any, cluster: Cluster, **options: Any) -> Any:
    reader = spark.read.format("raftmq").option("kafka.bootstrap.servers", cluster.bootstrap)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


def per_partition(rows: list[Any]) -> Produced:
    """Keys and values by partition, in the order of offsets, which must have no duplicate."""
    found: dict[int, dict[int, tuple[bytes | None, bytes | None]]] = {}
    for row in rows:
        assert row.offset not in found.setdefault(row.partition, {}), f"twice: {row}"
        key = None if row.key is None else bytes(row.key)
        found[row.partition][row.offset] = key, bytes(row.value)
    return {
        partition: [records[offset] for offset in sorted(records)]
        for partition, records in sorted(found.items())
    }


def test_everything_once_in_order(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic(3)
    written = produce(shared_cluster.bootstrap, topic, 30_000, partitions=(0, 1, 2))
    read = frame(spark, shared_cluster, subscribe=topic)
    assert read.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    assert read.count() == 30_000
    rows = read.collect()
    assert per_partition(rows) == written
    assert {(row.topic, row.timestampType) for row in rows} == {(topic, 0)}
    # Spark's own sum of all values is that of what was written.
    sums = read.selectExpr("partition", "offset", "md5(value) sum").orderBy("partition", "offset")
    expected = [
        hashlib.md5(value or b"").hexdigest()
        for _, records in written.items()
        for _, value in records
    ]
    assert [row.sum for row in sums.collect()] == expected


def test_rows_within_a_partition_come_in_offset_order(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic(2)
    produce(shared_cluster.bootstrap, topic, 4_000, partitions=(0, 1))
    read = frame(spark, shared_cluster, subscribe=topic, columns="partition,offset")
    found = read.rdd.mapPartitions(lambda rows: [[tuple(row) for row in rows]]).collect()
    assert sorted(found) == [[(p, offset) for offset in range(2_000)] for p in (0, 1)]


def test_split_ranges_lose_and_repeat_nothing(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic(2)
    written = produce(shared_cluster.bootstrap, topic, 5_001, partitions=(0, 1), compression="zstd")
    read = frame(spark, shared_cluster, subscribe=topic, minPartitions=7)
    assert read.rdd.getNumPartitions() == 7
    assert per_partition(read.collect()) == written
    read = frame(spark, shared_cluster, subscribe=topic, maxRecordsPerPartition=1_000)
    assert read.rdd.getNumPartitions() == 6
    assert per_partition(read.collect()) == written


def test_columns_headers_and_times(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    with Producer(shared_cluster.bootstrap) as producer:
        producer.send(topic, b"a", headers=[("x", b"1"), ("x", None)], timestamp=1_700_000_000_123)
        producer.send(topic, b"b", timestamp=1_700_000_000_124)
    rows = frame(spark, shared_cluster, subscribe=topic, includeHeaders="true").collect()
    assert [(header.key, header.value) for header in rows[0].headers] == [("x", b"1"), ("x", None)]
    assert rows[1].headers is None
    assert rows[0].timestamp == datetime.datetime(2023, 11, 14, 22, 13, 20, 123_000)
    some = frame(spark, shared_cluster, subscribe=topic, columns="offset, headers , value")
    assert some.columns == ["offset", "headers", "value"]
    assert [(row.offset, bytes(row.value)) for row in some.collect()] == [(0, b"a"), (1, b"b")]


def test_what_is_empty_gives_no_rows(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic(2)
    assert frame(spark, shared_cluster, subscribe=topic).collect() == []
    assert frame(spark, shared_cluster, subscribePattern="no-topic-is-called-so").count() == 0


def test_ranges_are_fixed_when_the_frame_is_first_run(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    produce(shared_cluster.bootstrap, topic, 100)
    read = frame(spark, shared_cluster, subscribe=topic)
    assert read.count() == 100
    produce(shared_cluster.bootstrap, topic, 50)
    assert read.count() == 100
    assert frame(spark, shared_cluster, subscribe=topic).count() == 150


def test_offsets_timestamps_and_assignment(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic(2)
    with Producer(shared_cluster.bootstrap) as producer:
        for number in range(20):
            producer.send(topic, b"%d" % number, partition=0, timestamp=1_000 + number)
    chosen = frame(
        spark,
        shared_cluster,
        assign=json.dumps({topic: [0]}),
        STARTINGOFFSETS=json.dumps({topic: {"0": 5}}),
        endingoffsets=json.dumps({topic: {"0": 9}}),
    )
    assert [row.offset for row in chosen.collect()] == [5, 6, 7, 8]
    times = {"startingTimestamp": 1_012, "endingTimestamp": 1_015}
    chosen = frame(spark, shared_cluster, assign=json.dumps({topic: [0]}), **times)
    assert [row.offset for row in chosen.collect()] == [12, 13, 14]


def test_a_group_and_one_that_never_committed(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic, unique: str
) -> None:
    topic = make_topic(2)
    produce(shared_cluster.bootstrap, topic, 100, partitions=(0, 1))
    with Consumer(shared_cluster.bootstrap, group=unique) as consumer:
        consumer.commit({TopicPartition(topic, 1): 30})
    rest = frame(spark, shared_cluster, subscribe=topic, group=unique)
    assert rest.groupBy("partition").count().orderBy("partition").collect() == [(0, 50), (1, 20)]
    done = frame(spark, shared_cluster, subscribe=topic, group=unique, endingOffsets="committed")
    assert done.groupBy("partition").count().collect() == [(1, 30)]
    assert frame(spark, shared_cluster, subscribe=topic, group=f"{unique}-none").count() == 100


def test_a_bad_option_fails_where_the_frame_is_made(spark: Any, shared_cluster: Cluster) -> None:
    with pytest.raises(Exception, match="unknown option 'startingofsets'"):
        frame(spark, shared_cluster, subscribe="t", startingOfsets="earliest")
    with pytest.raises(Exception, match="option 'columns' chooses columns"):
        spark.read.format("raftmq").schema("value string").options(
            **{"kafka.bootstrap.servers": shared_cluster.bootstrap, "subscribe": "t"}
        ).load().count()


def test_a_topic_that_is_not_there(spark: Any, shared_cluster: Cluster, unique: str) -> None:
    with pytest.raises(Exception, match=f"there is no topic '{unique}'"):
        frame(spark, shared_cluster, subscribe=unique).count()


def test_retention_passes_under_the_plan(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    produce(shared_cluster.bootstrap, topic, 1_000)
    asked = frame(spark, shared_cluster, subscribe=topic)
    going_on = frame(spark, shared_cluster, subscribe=topic, failOnDataLoss="false")
    for read in (asked, going_on):
        assert read.count() == 1_000  # planned
    with Admin(shared_cluster.bootstrap) as admin:
        admin.delete_records({TopicPartition(topic, 0): 400})
    expected = rf"partition {topic}-0: offsets \[0, 400\) are gone, its log starts at 400"
    with pytest.raises(Exception, match=expected):
        asked.collect()
    assert [row.offset for row in going_on.collect()] == list(range(400, 1_000))
    # A new plan over offsets that are gone is refused on the driver.
    with pytest.raises(Exception, match=r"offsets \[0, 400\) of the range \[0, 1000\) are gone"):
        frame(
            spark, shared_cluster, subscribe=topic, startingOffsets=json.dumps({topic: {"0": 0}})
        ).count()


def test_a_topic_is_deleted_in_between_or_made_anew(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    produce(shared_cluster.bootstrap, topic, 10)
    read = frame(spark, shared_cluster, subscribe=topic)
    going_on = frame(spark, shared_cluster, subscribe=topic, failOnDataLoss="false")
    assert read.count() == going_on.count() == 10
    with Admin(shared_cluster.bootstrap) as admin:
        admin.delete_topic(topic)
    with pytest.raises(Exception, match="the topic is deleted"):
        read.collect()
    make_topic()
    produce(shared_cluster.bootstrap, topic, 20)
    with pytest.raises(Exception, match="the topic was deleted and created anew"):
        read.collect()
    assert going_on.collect() == []


def test_a_task_that_fails_is_run_again_on_the_same_rows(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic(2)
    written = produce(shared_cluster.bootstrap, topic, 4_000, partitions=(0, 1))
    read = frame(spark, shared_cluster, subscribe=topic)
    assert read.count() == 4_000
    produce(shared_cluster.bootstrap, topic, 1_000, partitions=(0, 1))
    marks = str(tmp_path)

    def die_once(rows: Any) -> Any:
        """End the worker process itself in the middle of each partition's first attempt."""
        import os

        for number, row in enumerate(rows):
            mark = f"{marks}/{row.partition}"
            if number == 1_000 and not os.path.exists(mark):
                open(mark, "w").close()
                os._exit(1)
            yield row

    assert per_partition(read.rdd.mapPartitions(die_once).collect()) == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.fixture
def pushdown(spark: Any) -> Iterator[None]:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def fill_three(cluster: Cluster, topic: str) -> None:
    with Producer(cluster.bootstrap) as producer:
        for number in range(300):
            producer.send(topic, b"v", partition=number % 3, timestamp=1_000 * number)


@pytest.mark.usefixtures("pushdown")
def test_filters_narrow_ranges_where_both_ask_for_it(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic(3)
    fill_three(shared_cluster, topic)

    def filtered(condition: str) -> Any:
        read = frame(spark, shared_cluster, subscribe=topic, pushFilters="true")
        return read.filter(condition)

    some = filtered("partition in (0, 2) and offset >= 90 and offset < 95")
    assert some.rdd.getNumPartitions() == 2
    expected = [(p, offset) for p in (0, 2) for offset in range(90, 95)]
    assert sorted((row.partition, row.offset) for row in some.collect()) == expected
    late = "timestamp >= timestamp_millis(290000) and value = cast('v' as binary)"
    assert filtered(late).count() == 10
    assert filtered("topic = 'another'").collect() == []


@pytest.mark.usefixtures("pushdown")
def test_by_default_scans_of_one_frame_do_not_narrow_each_other(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic(3)
    fill_three(shared_cluster, topic)
    read = frame(spark, shared_cluster, subscribe=topic)
    assert read.filter("offset < 10").count() == 30
    assert read.filter("partition = 1").count() == 100
    assert read.count() == 300
    both = read.filter("offset < 10").unionAll(read.filter("partition = 1"))
    assert both.count() == 130


def test_pushing_filters_needs_sparks_setting(
    spark: Any, shared_cluster: Cluster, make_topic: MakeTopic
) -> None:
    read = frame(spark, shared_cluster, subscribe=make_topic(), pushFilters="true")
    with pytest.raises(Exception, match=r"spark\.sql\.python\.filterPushdown\.enabled"):
        read.count()
