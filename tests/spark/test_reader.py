"""Ranges of a real cluster, without Spark: what comes, and what is told when it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jepsen_like.live.cluster import free_ports
from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin
from raftmq_spark.errors import DataLossError, ReadError
from raftmq_spark.options import read_options
from raftmq_spark.plan import RangePart, make_plan, split
from raftmq_spark.security import ClientSettings
from tests.live.harness import Cluster
from tests.spark.conftest import extra, produce

pytestmark = [pytest.mark.spark, pytest.mark.live]
extra("pyarrow")

from raftmq_spark.reader import read_range  # noqa: E402

MakeTopic = Callable[..., str]
COLUMNS = ("key", "value", "offset")


def settings(cluster: Cluster, **changes: Any) -> ClientSettings:
    return ClientSettings(cluster.bootstrap, **{"timeout_ms": 60_000, **changes})


def rows(batches: Iterator[Any]) -> list[tuple[int, bytes | None, bytes | None]]:
    return [(row["offset"], row["key"], row["value"]) for b in batches for row in b.to_pylist()]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_any_range_gives_exactly_its_records(
    shared_cluster: Cluster, make_topic: MakeTopic, compression: str
) -> None:
    topic = make_topic()
    written = produce(shared_cluster.bootstrap, topic, 3_000, compression=compression)[0]
    everything = [(offset, *record) for offset, record in enumerate(written)]
    client = settings(shared_cluster)
    for start, end in ((0, 3_000), (1, 2), (777, 778), (1_234, 2_345), (2_999, 3_000), (5, 5)):
        found = rows(read_range(client, RangePart(topic, 0, start, end), columns=COLUMNS))
        assert found == everything[start:end]


def test_batches_are_large_but_the_last(shared_cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic()
    produce(shared_cluster.bootstrap, topic, 5_000, size=200)
    part = RangePart(topic, 0, 0, 5_000)
    client = settings(shared_cluster, fetch_bytes=64 << 10)
    by_rows = [b.num_rows for b in read_range(client, part, columns=COLUMNS, rows_min=1_000)]
    assert sum(by_rows) == 5_000
    assert all(count >= 1_000 for count in by_rows[:-1])
    assert len(by_rows) > 1
    by_size = [b.nbytes for b in read_range(client, part, columns=COLUMNS, bytes_min=100_000)]
    assert all(size >= 100_000 for size in by_size[:-1])
    assert len(by_size) > 1


def test_a_plan_of_a_cluster_is_read_whole(shared_cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(3)
    written = produce(shared_cluster.bootstrap, topic, 1_000, partitions=(0, 2))
    options = read_options(
        {"kafka.bootstrap.servers": shared_cluster.bootstrap, "subscribePattern": f"{topic}.*"}
    )
    plan = make_plan(options)
    assert plan.ranges == {topic: {0: (0, 500), 1: (0, 0), 2: (0, 500)}}
    assert plan.topic_ids[topic] is not None
    found: dict[int, list[Any]] = {0: [], 2: []}
    for part in split(plan, partitions_min=5):
        found[part.partition] += rows(read_range(options.client, part, columns=COLUMNS))
    assert {p: [record[1:] for record in records] for p, records in found.items()} == written


def test_what_retention_took_before(shared_cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic()
    produce(shared_cluster.bootstrap, topic, 100)
    with Admin(shared_cluster.bootstrap, timeout_ms=60_000) as admin:
        admin.delete_records({TopicPartition(topic, 0): 40})
    client = settings(shared_cluster)
    part = RangePart(topic, 0, 10, 90)
    said = rf"partition {topic}-0: offsets \[10, 40\) are gone, its log starts at 40 \(range \[10"
    with pytest.raises(DataLossError, match=said):
        rows(read_range(client, part, columns=COLUMNS))
    with pytest.warns(RuntimeWarning, match=said):
        found = rows(read_range(client, part, columns=COLUMNS, fails_on_data_loss=False))
    assert [offset for offset, *_ in found] == list(range(40, 90))
    gone = RangePart(topic, 0, 10, 30)
    with pytest.warns(RuntimeWarning, match=r"offsets \[10, 30\) are gone"):
        assert rows(read_range(client, gone, columns=COLUMNS, fails_on_data_loss=False)) == []


def test_what_retention_takes_meanwhile(shared_cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic()
    produce(shared_cluster.bootstrap, topic, 20_000, size=1_000)
    client = settings(shared_cluster, fetch_bytes=64 << 10)
    batches = read_range(client, RangePart(topic, 0, 0, 20_000), columns=COLUMNS, rows_min=10)
    first = next(batches)
    with Admin(shared_cluster.bootstrap, timeout_ms=60_000) as admin:
        admin.delete_records({TopicPartition(topic, 0): 19_000})
    seen = [first]
    with pytest.raises(DataLossError, match=r"offsets \[\d+, 19000\) are gone"):
        seen.extend(batches)
    assert sum(batch.num_rows for batch in seen) < 19_000


def test_a_log_that_ends_below_the_range(shared_cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic()
    produce(shared_cluster.bootstrap, topic, 10)
    client = settings(shared_cluster, timeout_ms=2_000)
    with pytest.raises(DataLossError, match=r"offsets \[50, 60\) are gone, its log ends at 10"):
        rows(read_range(client, RangePart(topic, 0, 50, 60), columns=COLUMNS))
    with pytest.raises(ReadError, match=r"nothing came at offset 10 of the range \[5, 60\)"):
        rows(read_range(client, RangePart(topic, 0, 5, 60), columns=COLUMNS))


def test_nobody_answers() -> None:
    (port,) = free_ports(1)
    client = ClientSettings(f"127.0.0.1:{port}", timeout_ms=1_000)
    with pytest.raises(ReadError, match=r"partition t-0: nothing came at offset 0"):
        rows(read_range(client, RangePart("t", 0, 0, 9), columns=COLUMNS))
