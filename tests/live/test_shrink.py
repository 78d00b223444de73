"""A topic shrinks under stock clients, is read through the view, goes, and grows again."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from tests.live.harness import Cluster, wait_until
from tests.live.load import create_topic, leaders
from tests.live.test_kill import controller_id

pytestmark = [pytest.mark.live, pytest.mark.slow]

EACH = 50


class Writer:
    """A stock producer that writes by number, and knows what became of each record. It asks for
    metadata where it has to, so it knows of a shrink or a growth once a record was refused, or it
    is told."""

    def __init__(self, bootstrap: str, timeout_ms: int = 10_000, acks: str = "all") -> None:
        self.offsets: dict[tuple[int, bytes], int] = {}
        self.errors: list[tuple[int, str]] = []
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "acks": acks,
                "enable.idempotence": acks == "all",
                "message.timeout.ms": timeout_ms,
            }
        )

    def write(self, partitions: Iterable[int], count: int, tag: str) -> None:
        def told(error: Any, message: Any) -> None:
            if error is not None:
                self.errors.append((message.partition(), error.name()))
            else:
                self.offsets[message.partition(), message.value()] = message.offset()

        for number in range(count):
            for partition in partitions:
                value = f"{tag}/{partition}/{number}".encode()
                try:
                    self._producer.produce("t", value, partition=partition, on_delivery=told)
                except confluent_kafka.KafkaException as error:  # it knows that there is none
                    self.errors.append((partition, error.args[0].name()))
        assert self._producer.flush(90) == 0

    def learn(self, count: int) -> None:
        """Have it ask until it is told of so many partitions."""
        wait_until(lambda: len(self._producer.list_topics("t", 30).topics["t"].partitions) == count)


class Group:
    """Members of one group, one after the other; what they read, and whether any record twice."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.read: dict[tuple[int, int], bytes] = {}
        self.twice: list[tuple[int, int]] = []
        self._settings = {
            "bootstrap.servers": bootstrap,
            "group.id": name,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "topic.metadata.refresh.interval.ms": 500,
        }

    def take(self, topics: list[str], count: int) -> None:
        """Read until so many records were read in all, and commit where that is."""
        consumer = confluent_kafka.Consumer(self._settings)
        try:
            consumer.subscribe(topics)

            def read_some() -> bool:
                for message in consumer.consume(min(500, count - len(self.read)), 0.2):
                    if message.error() is None:
                        number, offset = message.partition(), message.offset()
                        assert number is not None
                        assert offset is not None
                        if (number, offset) in self.read:
                            self.twice.append((number, offset))
                        self.read[number, offset] = message.value() or b""
                return len(self.read) >= count

            wait_until(read_some, 120, f"{count} records")
            consumer.commit(asynchronous=False)
        finally:
            consumer.close()


def states(cluster: Cluster, node_id: int = 1) -> dict[int, str]:
    told = cluster[node_id].get("/topics?name=t")
    found = {row["partition"]: row["state"] for row in told["partitions"]}
    return found | {row["partition"]: "gone" for row in told["gone"]}


def wait_for(cluster: Cluster, state: str, numbers: Iterable[int]) -> None:
    def have() -> bool:
        return all(
            states(cluster, node_id).get(number) == state
            for node_id in cluster.nodes
            for number in numbers
        )

    wait_until(have, 90, f"{state}: {states(cluster)}")


def shrink(cluster: Cluster, *words: str) -> str:
    done = cluster.run("topic", "shrink", "t", "-p", "4", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def grow(cluster: Cluster) -> None:
    done = cluster.run("topic", "add-partitions", "t", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    wait_until(lambda: len(leaders(cluster.bootstrap, "t")) == 6, 60)
    wait_until(lambda: min(leaders(cluster.bootstrap, "t").values()) > 0, 60)


def sealed_ends(cluster: Cluster) -> dict[int, int]:
    told = cluster[1].get("/topics?name=t")["partitions"]
    return {row["partition"]: row["sealed_end"] for row in told if row["sealed_end"] is not None}


def test_a_topic_shrinks_and_grows_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, settings={"retention_check_ms": 200}) as cluster:
        bootstrap = cluster.bootstrap
        create_topic(bootstrap, "t", 6, retention_ms="3600000")
        # It gives up records of a number whose leader may be another one then: that leader refuses
        # what comes behind them for a minute (docs/idempotence.md).
        writer, group = Writer(bootstrap, timeout_ms=80_000), Group(bootstrap, "g")
        writer.write(range(6), EACH, "first")
        group.take(["t"], EACH)
        refused = cluster.run("topic", "shrink", "t", "-p", "4")
        assert refused.returncode == 1
        assert "g: would never see" in refused.stderr
        assert "group g has " in refused.stdout
        assert len(leaders(bootstrap, "t")) == 6
        assert "would begin" in shrink(cluster, "--dry-run", "--force")
        assert "begun" in shrink(cluster, "--force")
        wait_for(cluster, "closing", (4, 5))
        assert set(leaders(bootstrap, "t")) == {0, 1, 2, 3}
        assert set(leaders(bootstrap, "t.retired")) == {0, 1, 2, 3, 4, 5}
        writer.write(range(6), EACH, "closing")  # it knows six, and is still let in
        assert not writer.errors
        shrink(cluster, "--now")
        wait_for(cluster, "sealed", (4, 5))
        ends = sealed_ends(cluster)
        assert ends == dict.fromkeys((4, 5), 2 * EACH)
        check_sealed(cluster.bootstrap, writer, ends)

        leader = leaders(bootstrap, "t.retired")[4]
        cluster[leader].kill()
        cluster.bring_back()
        assert sealed_ends(cluster) == ends
        check_sealed(cluster.bootstrap, writer, ends)

        group.take(["t", "t.retired"], 12 * EACH)
        assert not group.twice
        assert set(group.read.values()) == {value for _, value in writer.offsets}
        told = cluster.run("topic", "describe", "t", "--json")
        assert json.loads(told.stdout)["Retired"]["view"] == "t.retired"

        grow(cluster)
        writer.learn(6)
        before = len(writer.errors)
        writer.write((4, 5), 1, "again")
        assert writer.errors[before:] == []
        assert writer.offsets[5, b"again/5/0"] == 2 * EACH
        check_goes_and_comes_back(cluster, Writer(bootstrap))


def check_sealed(bootstrap: str, writer: Writer, ends: dict[int, int]) -> None:
    """A record for a sealed partition is refused, and its end stays where it is."""
    before = len(writer.errors)
    writer.write((5,), 1, "late")
    assert [number for number, _ in writer.errors[before:]] == [5]
    for number, end in ends.items():
        at = confluent_kafka.TopicPartition("t.retired", number)
        assert watermarks(bootstrap, at) == (0, end)


def watermarks(bootstrap: str, at: confluent_kafka.TopicPartition) -> tuple[int, int]:
    """Start and end of a number of the view. A client that happens to ask for metadata where nobody
    knows of the view goes on asking there, so each attempt is a client of its own."""
    told: list[tuple[int, int]] = []

    def are_told() -> bool:
        consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": "w"})
        try:
            told.append(consumer.get_watermark_offsets(at, timeout=5))
        except confluent_kafka.KafkaException as error:
            if error.args[0].code() != confluent_kafka.KafkaError._UNKNOWN_PARTITION:
                raise
        finally:
            consumer.close()
        return bool(told)

    wait_until(are_told, 60, f"the ends of {at.topic}-{at.partition}")
    return told[0]


def check_goes_and_comes_back(cluster: Cluster, writer: Writer) -> None:
    """What is retired goes with its retention; a number that comes again goes on at its end."""
    end = 2 * EACH + 1
    shrink(cluster, "--now", "--force")
    wait_for(cluster, "sealed", (4, 5))
    epochs = {
        row["partition"]: row["leader_epoch"]
        for row in cluster[1].get("/topics?name=t")["partitions"]
    }
    done = cluster.run("topic", "alter", "t", "--set", "retention.ms=1")
    assert done.returncode == 0, done.stderr
    wait_for(cluster, "gone", (4, 5))
    assert cluster.run("topic", "alter", "t", "--set", "retention.ms=3600000").returncode == 0
    grow(cluster)
    told = {row["partition"]: row for row in cluster[1].get("/topics?name=t")["partitions"]}
    assert told[5]["leader_epoch"] > epochs[5]
    writer.write((4, 5), 1, "new")
    assert writer.offsets[5, b"new/5/0"] == end
    for node in cluster.nodes.values():
        node.kill()
    cluster.bring_back()
    wait_until(lambda: min(leaders(cluster.bootstrap, "t").values()) > 0, 60)
    writer.write((4, 5), 1, "newer")
    assert writer.offsets[5, b"newer/5/0"] == end + 1


@pytest.mark.parametrize("acks", ["1", "all"])
def test_a_leader_that_hears_nothing_of_the_shrink(tmp_path: Path, acks: str) -> None:
    """It is cut off from the controller alone, so it goes on taking records of a partition that is
    to be sealed, and commits them with the third node: metadata cannot stop it, the seal in the log
    does, once it has handed over."""
    with Cluster(tmp_path, faults=True) as cluster:
        bootstrap = cluster.bootstrap
        create_topic(bootstrap, "t", 6, retention_ms="3600000")
        writer, group = Writer(bootstrap, acks=acks), Group(bootstrap, "g")
        writer.write(range(6), EACH, "first")
        controller = controller_id(cluster)
        led = leaders(bootstrap, "t")
        number = next(number for number in (4, 5) if led[number] != controller)
        cluster.cut((led[number], controller), (controller, led[number]))
        shrink(cluster, "--now", "--force")
        writer.write((number,), EACH, "cut off")
        assert not writer.errors, "it does not know better"
        assert states(cluster, led[number])[number] == "active"
        others = [node_id for node_id in cluster.nodes if node_id != led[number]]

        def are_sealed() -> bool:
            return all(states(cluster, i)[n] == "sealed" for i in others for n in (4, 5))

        wait_until(are_sealed, 90, "the others have sealed it")
        told = cluster[controller].get("/topics?name=t")["partitions"]
        ends = {row["partition"]: row["sealed_end"] for row in told if row["state"] == "sealed"}
        assert ends == {4: EACH, 5: EACH} | {number: 2 * EACH}
        check_sealed(cluster.bootstrap_of(others), writer, ends)
        cluster.heal()
        wait_for(cluster, "sealed", (4, 5))
        assert sealed_ends(cluster) == ends
        check_sealed(cluster.bootstrap, writer, ends)
        group.take(["t", "t.retired"], 7 * EACH)
        assert not group.twice
        taken = {(number, offset): value for (number, value), offset in writer.offsets.items()}
        assert group.read == taken
        grow(cluster)
        writer.learn(6)
        writer.write((4, 5), 1, "again")
        assert writer.offsets[number, b"again/%d/0" % number] == 2 * EACH
