"""Stock clients and a topic that shrank: they see fewer partitions, the view, and all of it again.

Metadata tells our own client more of such a topic, in fields that the others must skip.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.clients.adapters import ClientAdapter, Message
from tests.clients.programs import NAMES, Program
from tests.live.harness import Cluster, wait_until
from tests.live.load import create_topic, leaders

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    # kafka-python leaves sockets to the garbage collector when it closes.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

WIDTH, LISTED, EACH = 4, 2, 10


def shrink(cluster: Cluster, topic: str) -> None:
    """List fewer partitions, and wait until the others are sealed on every node."""
    done = cluster.run("topic", "shrink", topic, "-p", str(LISTED), "--now", "--force")
    assert done.returncode == 0, done.stdout + done.stderr

    def are_sealed() -> bool:
        return all(
            [row["state"] for row in node.get(f"/topics?name={topic}")["partitions"]]
            == ["active"] * LISTED + ["sealed"] * (WIDTH - LISTED)
            for node in cluster.nodes.values()
        )

    wait_until(are_sealed, 90)


def grow(cluster: Cluster, topic: str) -> None:
    done = cluster.run("topic", "add-partitions", topic, str(WIDTH))
    assert done.returncode == 0, done.stdout + done.stderr
    wait_until(lambda: len(leaders(cluster.bootstrap, topic)) == WIDTH, 60)


def records(tag: str) -> list[Message]:
    return [
        Message(f"{tag}/{partition}/{number}".encode(), partition=partition)
        for partition in range(WIDTH)
        for number in range(EACH)
    ]


class Reading:
    """What the members of one group were given, one after the other."""

    def __init__(self, client: ClientAdapter, group: str) -> None:
        self._client = client
        self._group = group
        self.values: Counter[bytes] = Counter()

    def take(self, topic: str, count: int) -> None:
        """Read so many more records, and commit them."""
        member = self._client.member(self._group, topic)
        wanted = sum(self.values.values()) + count

        def are_read() -> bool:
            self.values.update(m.value for m in member.poll(0.3) if m.value is not None)
            return sum(self.values.values()) >= wanted

        try:
            wait_until(are_read, 90, f"{count} records of {topic}")
            member.commit()
        finally:
            member.close()


def test_a_stock_client_reads_every_record_once(
    client: ClientAdapter, shared_cluster: Cluster, unique: str
) -> None:
    bootstrap, view = shared_cluster.bootstrap, f"{unique}.retired"
    create_topic(bootstrap, unique, WIDTH, retention_ms="3600000")
    reading, sent = Reading(client, unique), records("before")
    client.produce(unique, sent, codec="none", idempotent=False)
    shrink(shared_cluster, unique)
    wait_until(lambda: client.topics().get(unique) == LISTED, 60)
    assert view not in client.topics()
    reading.take(unique, EACH * LISTED)
    reading.take(view, EACH * (WIDTH - LISTED))
    grow(shared_cluster, unique)
    wait_until(lambda: client.topics().get(unique) == WIDTH, 60)
    again = records("again")
    offsets = client.produce(unique, again, codec="none", idempotent=False)
    assert set(offsets) == set(range(EACH, 2 * EACH))
    reading.take(unique, EACH * WIDTH)
    assert reading.values == Counter(m.value for m in sent + again)


@pytest.fixture(scope="module")
def shrunk(shared_cluster: Cluster) -> str:
    """A topic with ten records in each partition, two of which are retired."""
    topic = "shrunk-for-other-languages"
    create_topic(shared_cluster.bootstrap, topic, WIDTH, retention_ms="3600000")
    program = Program("java")
    for partition in range(WIDTH):
        with program.produce(shared_cluster.bootstrap, topic, partition) as producing:
            for number in range(EACH):
                assert producing.send(f"v{number}", "k") == {"offset": number}
    shrink(shared_cluster, topic)
    return topic


@pytest.mark.polyglot
@pytest.mark.parametrize("name", NAMES)
def test_clients_of_other_languages_read_and_write_it(
    shared_cluster: Cluster, shrunk: str, name: str
) -> None:
    program, bootstrap = Program(name), shared_cluster.bootstrap
    for topic, partition in ((f"{shrunk}.retired", WIDTH - 1), (shrunk, 1)):
        found = program.consume(bootstrap, topic, partition, 0, EACH)
        assert [r["offset"] for r in found][:EACH] == list(range(EACH))
    with program.produce(bootstrap, shrunk, 0) as producing:
        assert "offset" in producing.send("v", "k")
