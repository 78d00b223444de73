"""Every client gets past what an operator gave up: each lost batch leaves a hole that nobody sees.

A node is stopped, batches of three partitions are damaged, and `raftmq recover --accept-loss`
puts empty batches in their place. Some of them are followed by a batch that does not fit into what
the client asks for, twelve stand between batches, one begins a log and one ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import confluent_kafka
import pytest
from attrs import frozen

from raftmq.records import parse_header
from raftmq.types import TopicPartition
from raftmq_client import LATEST
from raftmq_client.blocking import Consumer
from tests.clients.adapters import AioKafka, ClientAdapter, Confluent, KafkaPython, Loop
from tests.clients.programs import NAMES, Program
from tests.clients.test_kcat import kcat
from tests.live.harness import Cluster
from tests.live.load import create_topic
from tests.live.raw import fetch

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    # kafka-python leaves sockets to the garbage collector when it closes.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TOPIC = "holed"
FETCH_BYTES = 64 << 10
SMALL, LARGE, LOST = 100, 300 << 10, -100
"""Bytes of the one record of a batch; those of a negative number are lost."""
PLANS = {
    0: [SMALL, SMALL, LOST, LARGE, *[LOST, SMALL] * 12, LOST, LOST, LARGE, SMALL],
    1: [LOST, LOST, SMALL, LARGE],
    2: [SMALL, SMALL, LOST, LOST, LOST],
}
PASSED = (0, 1)


@frozen
class Holed:
    """A cluster of one node, with holes in its topic."""

    cluster: Cluster

    @property
    def bootstrap(self) -> str:
        return self.cluster.bootstrap


def kept(partition: int, start: int = 0) -> list[tuple[int, str]]:
    """Offset and key of the records that are left."""
    plan = enumerate(PLANS[partition])
    return [(at, f"k{at}") for at, size in plan if size > 0 and at >= start]


def damage(path: Path, plan: list[int]) -> None:
    """Flip a byte in the record of each batch that is to be lost; there is one batch for each."""
    data = bytearray(path.read_bytes())
    position = 0
    for size in plan:
        if size < 0:
            data[position + 61 + 20] ^= 0x40
        position += parse_header(data, position).size
    assert position == len(data)
    path.write_bytes(data)


@pytest.fixture(scope="module")
def holed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Holed]:
    with Cluster(tmp_path_factory.mktemp("holed"), 1) as cluster:
        create_topic(cluster.bootstrap, TOPIC, len(PLANS), 1)
        producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap})
        for partition, plan in PLANS.items():
            for at, size in enumerate(plan):
                producer.produce(TOPIC, b"v" * abs(size), f"k{at}", partition)
                assert producer.flush(60) == 0
        del producer  # it would look for the node that ends now
        (node,) = cluster.nodes.values()
        node.terminate()
        for partition, plan in PLANS.items():
            damage(min(node.partition_folder(TOPIC, partition).glob("*.log")), plan)
            words = ("recover", "--accept-loss", TOPIC, str(partition), "--yes", "--data")
            done = cluster.run(*words, str(node.data))
            assert done.returncode == 0, done.stdout + done.stderr
        node.start()
        node.wait_ready()
        yield Holed(cluster)


@pytest.fixture(params=["confluent-kafka", "kafka-python", "aiokafka"])
def client(request: pytest.FixtureRequest, holed: Holed, asyncio_loop: Loop) -> ClientAdapter:
    make: dict[str, Callable[[str], ClientAdapter]] = {
        "confluent-kafka": Confluent,
        "kafka-python": KafkaPython,
        "aiokafka": lambda bootstrap: AioKafka(bootstrap, asyncio_loop),
    }
    return make[request.param](holed.bootstrap)


STARTS = [(0, 0), (0, 2), (0, 6), (0, 28), (1, 0), (1, 1)]
"""Partition and offset, among the latter those of a hole."""


@pytest.mark.parametrize(("partition", "start"), STARTS)
def test_stock_clients_pass(client: ClientAdapter, partition: int, start: int) -> None:
    wanted = kept(partition, start)
    found = client.read(TOPIC, partition, start, len(wanted), fetch_bytes=FETCH_BYTES)
    assert [(m.offset, (m.key or b"").decode()) for m in found] == wanted


@pytest.mark.parametrize("partition", PLANS)
def test_kcat_passes_and_comes_to_the_end(holed: Holed, partition: int) -> None:
    """At the end it is told so, though the log goes on where nothing is."""
    words = (
        "-C",
        "-t",
        TOPIC,
        "-p",
        str(partition),
        "-o",
        "beginning",
        "-e",
        "-q",
        "-f",
        "%o %k\n",
    )
    told = kcat(holed.cluster, *words, "-X", f"fetch.message.max.bytes={FETCH_BYTES}").decode()
    assert [(int(at), key) for at, key in map(str.split, told.splitlines())] == kept(partition)


@pytest.mark.parametrize(("partition", "start"), STARTS)
def test_our_client_passes(holed: Holed, partition: int, start: int) -> None:
    at = TopicPartition(TOPIC, partition)
    with Consumer(holed.bootstrap, partition_bytes_max=FETCH_BYTES) as consumer:
        consumer.assign({at: start})
        wanted, found = kept(partition, start), []
        while len(found) < len(wanted):
            found += [(r.offset, (r.key or b"").decode()) for r in consumer.poll(10)]
        assert found == wanted
        assert consumer.position(at) == len(PLANS[partition])


def test_no_answer_carries_an_empty_batch(holed: Holed) -> None:
    """And one that must hold the next batch does, whatever its size."""
    (node,) = holed.cluster.nodes.values()
    for partition in PASSED:
        for at in range(len(PLANS[partition])):
            code, data = fetch(node, TOPIC, at, partition)
            assert code == 0
            position, offsets = 0, []
            while position < len(data):
                header = parse_header(data, position)
                assert header.record_count == 1
                offsets.append(header.base_offset)
                position += header.size
            wanted = [offset for offset, _ in kept(partition, at)]
            assert offsets == wanted[: len(offsets)]
            assert offsets


def test_a_log_that_ends_in_a_hole_ends_before_it(holed: Holed) -> None:
    """To a consumer that stood behind what is lost, its own position is the end."""
    (node,) = holed.cluster.nodes.values()
    told = kcat(holed.cluster, "-Q", "-t", f"{TOPIC}:2:-1").decode()
    assert "offset 2" in told
    end = len(PLANS[2])
    for at in range(2, end + 1):
        assert fetch(node, TOPIC, at, 2) == (0, b"")
    with Consumer(holed.bootstrap) as consumer:
        at = TopicPartition(TOPIC, 2)
        assert consumer.offsets([at], LATEST)[at].offset == 2


@pytest.mark.polyglot
@pytest.mark.parametrize("name", NAMES)
def test_clients_of_other_languages_pass(holed: Holed, name: str) -> None:
    program = Program(name)
    for partition, start in STARTS[:1] + STARTS[2:3] + STARTS[4:5]:
        end = len(PLANS[partition])
        found = program.consume(
            holed.bootstrap, TOPIC, partition, start, end, fetch_bytes=FETCH_BYTES
        )
        assert [(r["offset"], r["key"]) for r in found] == kept(partition, start)
