"""Views with conditions by a stock client: what matches and nothing else, whatever happens."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from raftmq.records import read_records, split_batches
from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import create_topic, leaders
from tests.live.raw import fetch

pytestmark = [pytest.mark.live, pytest.mark.slow]

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
BEGAN_MS = int(time.time() * 1e3) - 3_600_000
"""The time of record 0; much older ones would be taken by retention."""
WHERE = "tag in ('refund', 'checkout') and region = 'eu'"


def create_view(cluster: Cluster, name: str, of: str, where: str = WHERE) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    config = {"raftmq.view.of": of, "raftmq.view.where": where}
    admin.create_topics([NewTopic(name, config=config)])[name].result(60)


def is_match(number: int) -> bool:
    return 3_000 <= number % 10_000 < 3_100 or number % 97 == 0


class Writer:
    """Produces numbers, of which some match; batches of all codecs; some are aborted."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.topic = topic
        self.bootstrap = cluster.bootstrap
        self.numbers = itertools.count()
        self.committed: list[int] = []
        self.forced: set[int] = set()
        """Numbers that match though they would not otherwise."""

    def write(self, count: int, codec: str = "none") -> None:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "compression.type": codec,
                "linger.ms": 5,
                "enable.idempotence": True,
            }
        )
        numbers = list(itertools.islice(self.numbers, count))
        self._send(producer, numbers)
        assert producer.flush(120) == 0
        self.committed += numbers

    def transact(self, count: int, *, is_commit: bool) -> None:
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": self.bootstrap, "transactional.id": f"of-{self.topic}"}
        )
        producer.init_transactions(60)
        producer.begin_transaction()
        numbers = list(itertools.islice(self.numbers, count))
        self._send(producer, numbers, matches=True)
        assert producer.flush(120) == 0
        if is_commit:
            producer.commit_transaction(60)
            self.committed += numbers
            self.forced |= set(numbers)
        else:
            producer.abort_transaction(60)

    def _send(
        self, producer: confluent_kafka.Producer, numbers: list[int], *, matches: bool = False
    ) -> None:
        for number in numbers:
            headers: dict[str, str | bytes | None] = {
                "region": "eu",
                "tag": "refund" if number % 2 else "checkout",
            }
            if not (matches or is_match(number)):
                headers = {"region": "us" if number % 3 else "eu", "tag": "order"}
            while True:
                try:
                    producer.produce(
                        self.topic,
                        str(number),
                        headers=headers,
                        partition=number % 2,
                        timestamp=BEGAN_MS + number,
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)

    @property
    def matching(self) -> set[int]:
        return {n for n in self.committed if n in self.forced or is_match(n)}


def consumer(
    cluster: Cluster, group: str, settings: Mapping[str, str] | None = None
) -> confluent_kafka.Consumer:
    return confluent_kafka.Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": group,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            **(settings or {}),
        }
    )


def read_to_end(
    cluster: Cluster, topic: str, start: int = 0, settings: Mapping[str, str] | None = None
) -> dict[int, list[tuple[int, int]]]:
    """(offset, number) of each partition, up to where the client says that it ends."""
    reader = consumer(cluster, "reader", settings)
    reader.assign([confluent_kafka.TopicPartition(topic, n, start) for n in range(2)])
    found: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    ended: set[int] = set()

    def has_ended() -> bool:
        for message in reader.consume(1_000, 0.2):
            error = message.error()
            if error is not None:
                assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF, error
                ended.add(message.partition() or 0)
            else:
                row = message.offset() or 0, int(message.value() or b"")
                found[message.partition() or 0].append(row)
        return len(ended) == 2

    wait_until(has_ended, 120, "the end of both partitions")
    reader.close()
    for rows in found.values():
        assert rows == sorted(set(rows)), "in order, and each once"
    return found


def numbers_of(found: dict[int, list[tuple[int, int]]]) -> set[int]:
    return {number for rows in found.values() for _, number in rows}


def examined(node: Node) -> dict[tuple[str, int], float]:
    """Of each partition of a view, how many bytes a node has yet to examine."""
    rows: dict[tuple[str, int], float] = {}
    for line in node.text("/metrics").splitlines():
        if line.startswith("raftmq_view_lacks_bytes{"):
            labels, _, value = line.partition("} ")
            parts = dict(one.split("=") for one in labels.partition("{")[2].split(","))
            rows[parts["view"].strip('"'), int(parts["partition"].strip('"'))] = float(value)
    return rows


def wait_filled(cluster: Cluster, view: str) -> None:
    def is_filled() -> bool:
        for node in cluster.live:
            rows = {key: value for key, value in examined(node).items() if key[0] == view}
            if len(rows) != 2 or any(rows.values()):
                return False
        return True

    wait_until(is_filled, 120, f"{view} is filled on all nodes")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("views"), racks=["a", "b", "c"]) as cluster:
        yield cluster


def test_a_view_gives_what_a_filter_gives(cluster: Cluster) -> None:
    create_topic(cluster.bootstrap, "orders", 2)
    writer = Writer(cluster, "orders")
    writer.write(4_000)
    create_view(cluster, "refunds", "orders")
    for codec in CODECS:
        writer.write(500, codec)
    writer.transact(60, is_commit=False)
    writer.write(1_000)
    writer.transact(40, is_commit=True)
    writer.write(3_000)
    wait_filled(cluster, "refunds")
    for isolation in ("read_committed", "read_uncommitted"):
        found = read_to_end(cluster, "refunds", settings={"isolation.level": isolation})
        assert numbers_of(found) == writer.matching
    base = read_to_end(cluster, "orders", settings={"isolation.level": "read_committed"})
    rows = {p: [row for row in base[p] if row[1] in writer.matching] for p in base}
    assert found == rows, "at the same offsets"
    near = read_to_end(cluster, "refunds", settings={"client.rack": "b"})
    assert near == rows, "by the closest replica as well"


def test_the_end_of_a_view_is_behind_its_last_match(cluster: Cluster) -> None:
    create_topic(cluster.bootstrap, "ends", 2)
    writer = Writer(cluster, "ends")
    create_view(cluster, "some", "ends")
    writer.write(3_500)
    wait_filled(cluster, "some")
    rows = read_to_end(cluster, "some")
    reader = consumer(cluster, "lag")
    for partition in (0, 1):
        last = rows[partition][-1][0]
        at = confluent_kafka.TopicPartition("some", partition, last + 1)
        low, high = reader.get_watermark_offsets(at, timeout=60)
        assert (low, high) == (0, last + 1)
        base = confluent_kafka.TopicPartition("ends", partition)
        assert reader.get_watermark_offsets(base, timeout=60)[1] > last + 1
        (first,) = reader.offsets_for_times(
            [confluent_kafka.TopicPartition("some", partition, BEGAN_MS + 2_000)], timeout=60
        )
        expected = next(offset for offset, number in rows[partition] if number >= 2_000)
        assert first.offset == expected, "the first match that is not older"
        reader.commit(offsets=[at], asynchronous=False)
    committed = reader.committed([confluent_kafka.TopicPartition("some", 0)], timeout=60)
    assert committed[0].offset == rows[0][-1][0] + 1, "lag 0"
    reader.close()
    again = read_to_end(cluster, "some", start=rows[0][10][0])
    assert again[0] == rows[0][10:]


def test_who_waits_in_a_view_is_told_that_it_is_deleted(cluster: Cluster) -> None:
    create_topic(cluster.bootstrap, "gone", 2)
    create_view(cluster, "parked", "gone")
    writer = Writer(cluster, "gone")
    writer.write(200)
    wait_filled(cluster, "parked")
    leader = cluster[leaders(cluster.bootstrap, "parked")[0]]
    codes: list[int] = []

    def wait_there() -> None:
        for _ in range(200):
            code, data = fetch(leader, "parked", 100)
            assert not data
            codes.append(code)
            if code:
                return

    thread = threading.Thread(target=wait_there)
    thread.start()
    wait_until(lambda: codes, what="a fetch that waited")
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    admin.delete_topics(["parked"])["parked"].result(60)
    thread.join(60)
    assert codes[-1] == 3, "UNKNOWN_TOPIC_OR_PARTITION"
    for node in cluster.nodes.values():
        wait_until(partial(has_no_index, node, "parked"), what="its indexes are gone")
    assert numbers_of(read_to_end(cluster, "gone")) == set(range(200))


def has_no_index(node: Node, view: str) -> bool:
    return all(name != view for name, _ in examined(node))


def test_a_view_survives_kills_restarts_and_damaged_indexes(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        create_topic(cluster.bootstrap, "orders", 2)
        create_view(cluster, "refunds", "orders")
        writer = Writer(cluster, "orders")
        for codec in ("none", "zstd"):
            writer.write(4_000, codec)
            victim = cluster[leaders(cluster.bootstrap, "orders")[0]]
            wait_until(partial(files_of, victim), what="indexes are written now and then")
            victim.kill()
            writer.write(500)
            assert numbers_of(read_to_end(cluster, "refunds")) >= writer.matching - set(
                writer.committed[-500:]
            )
            damage(victim)
            cluster.bring_back()
            wait_filled(cluster, "refunds")
            assert numbers_of(read_to_end(cluster, "refunds")) == writer.matching
        for node in cluster.nodes.values():  # each must have the whole view in its own index
            found = []
            for partition in (0, 1):
                offset = 0
                while True:
                    code, data = fetch(node, "refunds", offset, partition)
                    assert code == 0
                    rows = [
                        (record.offset, int(record.value or b""))
                        for _, batch in split_batches(data)
                        for record in read_records(batch)
                        if record.offset >= offset
                    ]
                    if not rows:
                        break
                    found += [number for _, number in rows]
                    offset = rows[-1][0] + 1
            assert sorted(found) == sorted(writer.matching)


def files_of(node: Node) -> list[Path]:
    return sorted(node.data.glob("views/*/*/*.rows"))


def damage(node: Node) -> None:
    """Spoil the files of the indexes that a stopped node has: one byte here, half of one there."""
    for number, path in enumerate(files_of(node)):
        data = bytearray(path.read_bytes())
        if number % 2:
            path.write_bytes(data[: len(data) // 2])
        else:
            data[len(data) * 3 // 4] ^= 0xFF
            path.write_bytes(data)
