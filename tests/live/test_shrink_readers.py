"""Our own client reads a topic through a shrink and a growth without being told of either."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
import trio

from raftmq_client import ConsumerRecord, aio
from raftmq_client.blocking import Consumer
from tests.live.harness import Cluster, wait_until
from tests.live.load import create_topic, leaders
from tests.live.test_shrink import Writer, grow, shrink, wait_for

pytestmark = [pytest.mark.live, pytest.mark.slow]

EACH = 30


class Reading:
    """What members of one group, or a reader in none, were given; each record counted."""

    def __init__(self) -> None:
        self.records: Counter[tuple[int, int, bytes]] = Counter()

    def took(self, records: list[ConsumerRecord]) -> None:
        for record in records:
            assert record.topic == "t"
            self.records[record.partition, record.offset, bytes(record.value or b"")] += 1

    def check(self, writer: Writer) -> None:
        """Each acknowledged record once, and nothing else."""
        written = {(*at, offset) for at, offset in writer.offsets.items()}
        assert {(number, value, offset) for number, offset, value in self.records} == written
        assert set(self.records.values()) == {1}


def member(bootstrap: str, assignor: str) -> Consumer:
    return Consumer(
        bootstrap,
        topics="t",
        group="g",
        reset="earliest",
        auto_commit_ms=200,
        assignors=(assignor,),
        metadata_max_age_ms=300,
        heartbeat_interval_ms=200,
    )


@pytest.mark.parametrize(
    "assignor", ["range", pytest.param("cooperative-sticky", marks=pytest.mark.soak)]
)
def test_a_group_reads_on_what_is_listed_no_more(tmp_path: Path, assignor: str) -> None:
    with Cluster(tmp_path) as cluster:
        bootstrap = cluster.bootstrap
        create_topic(bootstrap, "t", 6, retention_ms="3600000")
        writer, reading, alone = Writer(bootstrap, 60_000), Reading(), Reading()
        writer.write(range(6), EACH, "first")
        with member(bootstrap, assignor) as first:

            def take(*members: Consumer, count: int = 20) -> bool:
                """Each member reads some; whether all is read by now."""
                for each in members:
                    reading.took(each.poll(0.1, records_max=count))
                return sum(reading.records.values()) >= len(writer.offsets)

            wait_until(lambda: bool(reading.records) or take(first), 60)
            generation = first.generation
            shrink(cluster)  # it is not refused: all members of the group read on
            wait_for(cluster, "closing", (4, 5))
            writer.write(range(6), EACH, "closing")
            wait_until(lambda: take(first, count=50), 60)
            told = json.loads(cluster.run("topic", "describe", "t", "--json").stdout)["Retired"]
            for row in told["partitions"]:
                assert [w["host"] for w in row["writers"]] == ["127.0.0.1"] * (row["partition"] > 3)
                assert all("confluent" in w["software"] for w in row["writers"])
            assert "confluent" in shrink(cluster, "--now")
            wait_for(cluster, "sealed", (4, 5))
            writer.write(range(4), EACH, "sealed")
            assert first.generation == generation, "nothing was moved"
            with member(bootstrap, assignor) as second:  # it has never seen six

                def is_shared() -> bool:
                    is_read = take(first, second)
                    shares = {len(first.assignment), len(second.assignment)}
                    return is_read and shares == {3}

                wait_until(is_shared, 90)
                assert len({*first.assignment, *second.assignment}) == 6
                trio.run(read_alone, bootstrap, alone, len(writer.offsets))
                alone.check(writer)
                grow(cluster)
                writer.learn(6)
                writer.write(range(6), EACH, "again")
                wait_until(lambda: take(first, second, count=50), 60)
        reading.check(writer)
        assert not writer.errors
        with member(bootstrap, assignor) as third:  # and all of it is committed
            wait_until(lambda: take(third) and len(third.assignment) == 6, 60)
            assert not third.poll(1.0)
        assert set(leaders(bootstrap, "t")) == set(range(6))


async def read_alone(bootstrap: str, alone: Reading, count: int) -> None:
    """All of the topic, in no group."""
    with trio.fail_after(60):
        async with aio.Consumer(bootstrap, topics="t", reset="earliest") as consumer:
            while sum(alone.records.values()) < count:
                alone.took(await consumer.poll(1.0))


@pytest.mark.soak
@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_a_group_goes_on_when_what_it_read_is_gone_and_comes_again(
    tmp_path: Path, assignor: str
) -> None:
    with Cluster(tmp_path, settings={"retention_check_ms": 200}) as cluster:
        bootstrap = cluster.bootstrap
        create_topic(bootstrap, "t", 6, retention_ms="3600000")
        writer, reading, alone = Writer(bootstrap, 60_000), Reading(), Reading()
        writer.write(range(6), EACH, "first")
        with (
            member(bootstrap, assignor) as first,
            member(bootstrap, assignor) as second,
            Consumer(bootstrap, topics="t", reset="earliest", metadata_max_age_ms=300) as third,
        ):

            def take() -> bool:
                for each in (first, second):
                    reading.took(each.poll(0.1))
                alone.took(third.poll(0.1))
                counts = {sum(found.records.values()) for found in (reading, alone)}
                return counts == {len(writer.offsets)}

            def read(width: int) -> set[int]:
                assignment = [key.partition for key in (*first.assignment, *second.assignment)]
                return set(assignment) if take() and len(assignment) == width else set()

            wait_until(lambda: read(6), 90)
            shrink(cluster, "--now")
            wait_for(cluster, "sealed", (4, 5))
            done = cluster.run("topic", "alter", "t", "--set", "retention.ms=1")
            assert done.returncode == 0, done.stderr
            wait_for(cluster, "gone", (4, 5))
            done = cluster.run("topic", "alter", "t", "--set", "retention.ms=3600000")
            assert done.returncode == 0, done.stderr
            writer.write(range(4), EACH, "without")
            assert wait_until(lambda: read(4), 90) == set(range(4))
            grow(cluster)
            writer.learn(6)
            writer.write(range(6), EACH, "again")
            assert wait_until(lambda: read(6), 90) == set(range(6))
            assert writer.offsets[5, b"again/5/0"] == EACH
        reading.check(writer)
        alone.check(writer)


@pytest.mark.soak
def test_in_a_mixed_group_our_members_read_what_is_listed_no_more(tmp_path: Path) -> None:
    """While one of ours leads it: a stock member is given what is listed, and reads that on."""
    with Cluster(tmp_path) as cluster:
        bootstrap = cluster.bootstrap
        create_topic(bootstrap, "t", 6, retention_ms="3600000")
        writer, reading = Writer(bootstrap, 60_000), Reading()
        writer.write(range(6), EACH, "first")
        stock_read: Counter[int] = Counter()
        stock = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "g",
                "auto.offset.reset": "earliest",
                "partition.assignment.strategy": "range",
                "topic.metadata.refresh.interval.ms": 500,
            }
        )
        with member(bootstrap, "range") as ours:

            def has_all() -> bool:
                reading.took(ours.poll(0.2))
                return len(ours.assignment) == 6

            wait_until(has_all, 60)
            stock.subscribe(["t"])

            def take() -> bool:
                reading.took(ours.poll(0.1))
                message: Any = stock.poll(0.1)
                if message is not None and message.error() is None:
                    at = message.partition(), message.offset(), message.value()
                    stock_read[message.partition()] += 1
                    reading.records[at] += 1
                return len(reading.records) == len(writer.offsets)

            try:
                wait_until(lambda: bool(take() and len(stock.assignment()) == 3), 90)
                shrink(cluster, "--now", "--force")
                wait_for(cluster, "sealed", (4, 5))
                wait_until(lambda: take() and {4, 5} <= {k.partition for k in ours.assignment}, 90)
                assert {at.partition for at in stock.assignment()} <= set(range(4))
                stock_read.clear()
                writer.write(range(4), EACH, "after")
                wait_until(take, 90)
                assert set(stock_read) <= set(range(4))
                assert stock_read
            finally:
                stock.close()
        assert {(n, v, o) for n, o, v in reading.records} == {
            (*at, offset) for at, offset in writer.offsets.items()
        }
