"""Every stock client's transactions: each story once for each of them, and all of them together.

Java and franz-go have the marker `polyglot`; they and our own client speak the second protocol.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import confluent_kafka
import pytest

from tests.clients.adapters import Loop
from tests.clients.test_transactions import consumer, producer
from tests.clients.transactional import (
    Client,
    RefusedError,
    Transactor,
    open_client,
    send_plain,
)
from tests.live.harness import Cluster
from tests.live.load import create_topic

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    # kafka-python leaves sockets to the garbage collector when it closes.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

COMMITTED, ALL = "read_committed", "read_uncommitted"
NAMES = ("aiokafka", "kafka-python", "raftmq", "java", "franz")
REMOTE = ("java", "franz")


def param(name: str) -> object:
    return pytest.param(name, marks=[pytest.mark.polyglot] if name in REMOTE else [])


@pytest.fixture(scope="module")
def opened(shared_cluster: Cluster, asyncio_loop: Loop) -> Iterator[Callable[[str], Client]]:
    """Clients by name, each opened once: a program of Java takes a while to begin."""
    clients: dict[str, Client] = {}

    def get(name: str) -> Client:
        if name not in clients:
            clients[name] = open_client(name, shared_cluster.bootstrap, asyncio_loop)
        return clients[name]

    yield get
    for made in clients.values():
        made.close()


@pytest.fixture(params=[param(name) for name in NAMES])
def client(request: pytest.FixtureRequest, opened: Callable[[str], Client]) -> Client:
    return opened(request.param)


@pytest.fixture
def topic(shared_cluster: Cluster, unique: str) -> str:
    create_topic(shared_cluster.bootstrap, unique)
    return unique


def committed_offset(cluster: Cluster, group: str, topic: str) -> int:
    """What the group has committed; waits for what is undecided."""
    at = confluent_kafka.TopicPartition(topic, 0)
    with consumer(cluster, group) as member:
        offset: int = member.committed([at], 60)[0].offset
        return offset


def test_what_is_committed_counts_and_what_is_aborted_does_not(
    shared_cluster: Cluster, client: Client, topic: str
) -> None:
    """Beside them an idempotent producer, whose records always count."""
    made = client.open(topic)
    for number in range(4):
        made.begin()
        made.send_many(topic, [f"{number}-{n}" for n in range(3)])
        send_plain(shared_cluster.bootstrap, topic, f"plain-{number}")
        if number % 2:
            made.abort()
        else:
            made.commit()
    send_plain(shared_cluster.bootstrap, topic, "end")
    everything = [
        value
        for number in range(4)
        for value in (*(f"{number}-{n}" for n in range(3)), f"plain-{number}")
    ]
    counted = [value for value in everything if not value.startswith(("1-", "3-"))]
    assert client.read(topic, "end", COMMITTED) == [*counted, "end"]
    assert client.read(topic, "end", ALL) == [*everything, "end"]


def test_an_open_transaction_holds_back_readers_of_committed_records_alone(
    client: Client, topic: str
) -> None:
    """Two producers take turns in one partition."""
    first, second = client.open(f"{topic}-1"), client.open(f"{topic}-2")
    first.begin()
    second.begin()
    for number in range(2):
        first.send(topic, f"first-{number}")
        second.send(topic, f"second-{number}")
    second.commit()
    assert client.read(topic, None, COMMITTED) == []
    everything = ["first-0", "second-0", "first-1", "second-1"]
    assert client.read(topic, "second-1", ALL) == everything
    first.commit()
    assert client.read(topic, "second-1", COMMITTED) == everything


def test_a_zombie_is_fenced_and_leaves_nothing(client: Client, topic: str) -> None:
    zombie = client.open(topic)
    zombie.begin()
    zombie.send(topic, "zombie")
    successor = client.open(topic)

    def go_on() -> None:
        zombie.send(topic, "still here")
        zombie.commit()

    with pytest.raises(RefusedError):
        go_on()
    successor.begin()
    successor.send(topic, "end")
    successor.commit()
    assert client.read(topic, "end", COMMITTED) == ["end"]


def test_a_transaction_that_runs_for_too_long_is_aborted(
    shared_cluster: Cluster, client: Client, topic: str
) -> None:
    silent = client.open(topic, timeout_ms=1_000)
    silent.begin()
    silent.send(topic, "silent")
    send_plain(shared_cluster.bootstrap, topic, "end")
    assert client.read(topic, "end", COMMITTED) == ["end"]
    with pytest.raises(RefusedError):
        silent.commit()


def test_what_is_read_changed_and_written_is_there_once(
    shared_cluster: Cluster, client: Client, topic: str
) -> None:
    target = f"{topic}-target"
    create_topic(shared_cluster.bootstrap, target)
    values = [f"{number}" for number in range(6)]
    send_plain(shared_cluster.bootstrap, topic, *values)
    client.copy(topic, target, topic, topic, len(values))
    wanted = [f"<{value}>" for value in values]
    assert client.read(target, wanted[-1], COMMITTED) == wanted
    assert client.read(target, wanted[-1], ALL)[:3] == ["<0>", "<1>", "<0>"]
    assert committed_offset(shared_cluster, topic, topic) == len(values)


@pytest.mark.parametrize(
    "name", [param(name) for name in NAMES if name != "franz"]
)  # franz-go has them in its sessions alone
def test_offsets_are_visible_with_the_commit(
    shared_cluster: Cluster, opened: Callable[[str], Client], topic: str, name: str
) -> None:
    made = opened(name).open(topic)
    at = confluent_kafka.TopicPartition(topic, 0)
    made.begin()
    made.send(topic, "aborted")
    made.offsets(topic, topic, 5)
    made.abort()
    assert committed_offset(shared_cluster, topic, topic) < 0
    made.begin()
    made.send(topic, "end")
    made.offsets(topic, topic, 7)
    with consumer(shared_cluster, topic) as member:
        # Who asks for stable offsets waits until it is decided.
        with pytest.raises(confluent_kafka.KafkaException) as caught:
            member.committed([at], 1)
        assert caught.value.args[0].code() == confluent_kafka.KafkaError._TIMED_OUT
        made.commit()
        assert member.committed([at], 60)[0].offset == 7


class ConfluentTransactor:
    """librdkafka behind the same face."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._made = producer(cluster, name)

    def begin(self) -> None:
        self._made.begin_transaction()

    def send(self, topic: str, value: str) -> None:
        self.send_many(topic, [value])

    def send_many(self, topic: str, values: list[str]) -> None:
        for value in values:
            self._made.produce(topic, value.encode(), partition=0)
        assert self._made.flush(60) == 0

    def offsets(self, group: str, topic: str, offset: int) -> None:
        at = [confluent_kafka.TopicPartition(topic, 0, offset)]
        with consumer(self._cluster, group) as member:
            who = member.consumer_group_metadata()
            self._made.send_offsets_to_transaction(at, who, 60)

    def commit(self) -> None:
        self._made.commit_transaction(60)

    def abort(self) -> None:
        self._made.abort_transaction(60)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("aiokafka", "kafka-python", "raftmq"), id="of-python"),
        pytest.param(NAMES, id="all", marks=pytest.mark.polyglot),
    ],
)
def test_all_clients_and_both_protocols_share_a_partition(
    shared_cluster: Cluster, opened: Callable[[str], Client], topic: str, names: tuple[str, ...]
) -> None:
    """Each of them its own transactions at the same time, of which each third is aborted."""
    made: dict[str, Transactor] = {name: opened(name).open(f"{topic}-{name}") for name in names}
    made["librdkafka"] = ConfluentTransactor(shared_cluster, topic)
    failed: list[BaseException] = []

    def work(name: str, mine: Transactor) -> None:
        try:
            for number in range(9):
                mine.begin()
                mine.send_many(topic, [f"{name}-{number}-{n}" for n in range(3)])
                if number % 3 == 2:
                    mine.abort()
                else:
                    mine.commit()
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=pair) for pair in made.items()]
    for thread in threads:
        thread.start()
    send_plain(shared_cluster.bootstrap, topic, *(f"plain-0-{n}" for n in range(50)))
    for thread in threads:
        thread.join(120)
    assert not failed
    send_plain(shared_cluster.bootstrap, topic, "end")
    wanted = {
        name: [f"{name}-{number}-{n}" for number in range(9) if number % 3 < 2 for n in range(3)]
        for name in made
    }
    wanted["plain"] = [f"plain-0-{n}" for n in range(50)]
    for reader in names:
        found = opened(reader).read(topic, "end", COMMITTED)
        for name, values in wanted.items():
            assert [value for value in found if value.startswith(f"{name}-")] == values, reader
        assert len(found) == sum(map(len, wanted.values())) + 1
