"""librdkafka and the second id of a topic that has shrunk: its consumers, its transactions, and a
load of keyed records through restarts and leaders that change."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from raftmq.protocol import ApiKey, Struct
from tests.clients.keyed import KEYS, KeyedLoad, OfConfluent
from tests.clients.test_shrunk_under_load import (
    RETIRED,
    Shrink,
    be_gone,
    check_read,
    check_told,
    ends,
    wait_for_six,
)
from tests.live.harness import Cluster, wait_until
from tests.live.load import create_topic, leaders
from tests.live.raw import ask_each
from tests.live.test_kill import controller_id
from tests.live.test_shrink import Group, Writer, grow, shrink, states, wait_for

pytestmark = [pytest.mark.live, pytest.mark.slow]

EACH = 40


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings={"retention_check_ms": 200}) as started:
        create_topic(
            started.bootstrap, "t", 6, retention_ms="3600000", raftmq_closing_quiet_ms="2000"
        )
        yield started


def told_ids(cluster: Cluster, software: str, *, creates: bool = True) -> set[UUID]:
    """The ids of the topic that nodes tell a client that says it is that, and that may create
    topics by asking for them, or not."""
    found: set[UUID] = set()
    name, version = software.split()
    first = Struct(client_software_name=name, client_software_version=version)
    wanted = Struct(
        topics=[Struct(topic_id=None, name="t")],
        allow_auto_topic_creation=creates,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )
    for node in cluster.live:
        both = [(ApiKey.API_VERSIONS, 3, first), (ApiKey.METADATA, 12, wanted)]
        _, answer = ask_each(node, both)
        found.update(topic.topic_id for topic in answer.topics)
    return found


def test_all_nodes_tell_the_same_ids_also_after_a_restart(cluster: Cluster) -> None:
    Writer(cluster.bootstrap).write(range(6), 1, "kept")  # what is empty would be gone at once
    [own] = told_ids(cluster, "librdkafka 2.16.0")
    aliases = []
    for _ in range(2):
        shrink(cluster, "--now", "--force")
        wait_for(cluster, "sealed", RETIRED)
        [alias] = told_ids(cluster, "librdkafka 2.16.0")
        assert told_ids(cluster, "confluent-kafka-go 2.16.0") == {alias}
        assert told_ids(cluster, "librdkafka 2.16.0", creates=False) == {own}
        assert told_ids(cluster, "kgo 1.22.3") == {own}
        aliases.append(alias)
        grow(cluster)
        assert told_ids(cluster, "librdkafka 2.16.0") == {alias}
    assert len({own, *aliases}) == 3
    known = cluster[1].get("/topics?name=t")
    assert [UUID(known["topic_id"]), *map(UUID, known["aliases"])] == [own, *aliases]
    for node in cluster.nodes.values():
        node.kill()
    cluster.bring_back()
    wait_until(lambda: told_ids(cluster, "librdkafka 2.16.0") == {aliases[-1]})
    assert told_ids(cluster, "kgo 1.22.3") == {own}


class Assigned:
    """A consumer that is assigned all six partitions by number; what it read, and what it was told
    beside records."""

    def __init__(self, bootstrap: str) -> None:
        self.read: Counter[tuple[int, bytes]] = Counter()
        self.errors: Counter[tuple[int, str]] = Counter()
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "assigned",
                "enable.auto.commit": False,
                "topic.metadata.refresh.interval.ms": 500,
            }
        )
        self._consumer.assign([TopicPartition("t", number, 0) for number in range(6)])

    def take(self) -> None:
        message = self._consumer.poll(0.1)
        if message is None:
            return
        number = message.partition()
        assert number is not None
        error = message.error()
        if error is None:
            self.read[number, message.value() or b""] += 1
        else:
            self.errors[number, error.name()] += 1

    def close(self) -> None:
        self._consumer.close()


def test_an_assigned_reader_reads_retired_partitions_on(cluster: Cluster) -> None:
    """It is told the topic's own id: under another one it would stand still there, in silence."""
    writer, reader = Writer(cluster.bootstrap), Assigned(cluster.bootstrap)

    def has_all() -> bool:
        for _ in range(20):
            reader.take()
        return set(reader.read) == set(writer.offsets)

    writer.write(range(6), EACH, "first")
    wait_until(has_all)
    writer.write(range(6), EACH, "before")
    shrink(cluster, "--now", "--force")
    wait_for(cluster, "sealed", RETIRED)
    writer.learn(4)
    writer.write(range(4), EACH, "shrunk")
    wait_until(has_all)
    grow(cluster)
    writer.learn(6)
    writer.write(range(6), EACH, "grown")
    wait_until(has_all)
    reader.close()
    assert not writer.errors
    assert set(reader.read.values()) == {1}
    assert not reader.errors


class Transactions:
    """A transactional producer that writes one record to each partition that it knows, and begins
    anew where one of them failed."""

    def __init__(self, bootstrap: str) -> None:
        self.committed: list[tuple[int, bytes]] = []
        self.aborted = 0
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": "x",
                "topic.metadata.refresh.interval.ms": 500,
                "message.timeout.ms": 20_000,
                "transaction.timeout.ms": 30_000,
            }
        )
        self._producer.init_transactions(60)
        self._count = 0

    def run_one(self) -> None:
        """One transaction, whatever comes of it."""
        self._count += 1
        value = b"%d" % self._count
        failed: list[str] = []
        taken: list[tuple[int, bytes]] = []

        def told(error: Any, message: Any) -> None:
            if error is None:
                taken.append((message.partition(), value))
            else:
                failed.append(error.name())

        self._producer.begin_transaction()
        try:
            for key in range(24):
                self._producer.produce("t", value, b"key-%d" % key, on_delivery=told)
            assert self._producer.flush(60) == 0
            self._producer.commit_transaction(60)
        except KafkaException as error:
            known = error.args[0]
            assert not known.fatal(), known
            assert known.txn_requires_abort(), known
            self._producer.abort_transaction(60)
            self.aborted += 1
            return
        assert not failed, "it was committed without them"
        self.committed += taken


def test_transactions_go_on_through_shrinks_and_growths(cluster: Cluster) -> None:
    """The producer finds out while the partitions close, so no transaction is open at the seal."""
    bootstrap = cluster.bootstrap
    writer, is_over = Transactions(bootstrap), threading.Event()
    broken: list[BaseException] = []

    def write() -> None:
        try:
            while not is_over.is_set():
                writer.run_one()
        except BaseException as error:  # noqa: BLE001  # told below
            broken.append(error)

    def wait_for_numbers(*numbers: int) -> None:
        since = len(writer.committed)

        def are_written() -> bool:
            assert not broken, broken
            return set(numbers) <= {number for number, _ in writer.committed[since:]}

        wait_until(are_written, 120, f"transactions in {numbers}")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        wait_for_numbers(*range(6))
        for is_gone in (False, True):
            shrink(cluster, "--force")
            wait_for(cluster, "sealed", RETIRED)
            wait_for_numbers(*range(4))
            wait_for_numbers(*range(4))
            if is_gone:
                is_over.set()
                thread.join()
                kept = read_committed(cluster, ends(cluster, RETIRED))
                be_gone(cluster)
            grow(cluster)
            if not is_gone:
                wait_for_numbers(*range(6))
    finally:
        is_over.set()
        thread.join()
    assert not broken, broken
    assert kept == Counter(writer.committed)
    print(f"{len(writer.committed)} committed, {writer.aborted} aborted")  # noqa: T201  # told once

    def writes_to_six() -> bool:
        writer.run_one()
        return set(RETIRED) <= {number for number, _ in writer.committed[-24:]}

    wait_until(writes_to_six)
    again = read_committed(cluster, ends(cluster, ()))
    after = Counter(writer.committed)
    # The retention that ends what is retired may take what was there before of the others too.
    since = after - kept
    assert not since - again
    assert all(count == after[at] for at, count in again.items() if at[0] < 4)
    assert {at: count for at, count in again.items() if at[0] in RETIRED} == {
        at: count for at, count in since.items() if at[0] in RETIRED
    }


def read_committed(cluster: Cluster, until: dict[int, int]) -> Counter[tuple[int, bytes]]:
    """How often each committed record is there, by partition; what is retired through the view."""
    found: Counter[tuple[int, bytes]] = Counter()
    retired = set(range(6)) - set(leaders(cluster.bootstrap, "t"))
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": cluster.bootstrap, "group.id": "r", "enable.partition.eof": True}
    )
    try:
        for number in until:
            topic = "t.retired" if number in retired else "t"
            consumer.assign([TopicPartition(topic, number, confluent_kafka.OFFSET_BEGINNING)])
            while True:
                message = consumer.poll(30)
                assert message is not None, f"{topic}-{number} comes to no end"
                error = message.error()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    break
                found[number, message.value() or b""] += 1
    finally:
        consumer.close()
    return found


def test_keyed_records_through_restarts_and_other_leaders(cluster: Cluster) -> None:
    bootstrap = cluster.bootstrap
    near = Group(bootstrap, "near")
    with KeyedLoad(lambda tell: OfConfluent(bootstrap, "t", tell), 100) as load:
        load.wait_for_keys()
        wait_for_six(load)
        one = Shrink(cluster, load)
        for node in cluster.nodes.values():
            node.kill()
            cluster.bring_back()
            load.wait_for(lambda told: not told.error, 50, "records are taken")
        load.pause()
        one.grows()
        before = ends(cluster, RETIRED)
        near.take(["t", "t.retired"], sum(before.values()))
        grow(cluster)
        load.go_on()
        wait_for_six(load)
        one.is_over()
        load.stop()
        near.take(["t"], sum(ends(cluster, ()).values()))
    check_told(load, [one], hashes_anew=True, has_new_leaders=True)
    assert not near.twice
    check_read(load, near.read)


def test_a_node_that_has_not_heard_of_the_shrink_sends_producers_back_and_nothing_more(
    tmp_path: Path,
) -> None:
    """It tells the topic's own id and six partitions for as long as it is cut off from the
    controller. What is lost by that has failed, and was placed on a retired partition."""
    with Cluster(tmp_path, faults=True) as cluster:
        bootstrap = cluster.bootstrap
        create_topic(bootstrap, "t", 6, retention_ms="3600000")
        group = Group(bootstrap, "g")
        with KeyedLoad(lambda tell: OfConfluent(bootstrap, "t", tell), 100) as load:
            wait_for_six(load)
            controller = controller_id(cluster)
            behind = next(node_id for node_id in cluster.nodes if node_id != controller)
            cluster.cut((behind, controller), (controller, behind))
            shrink(cluster, "--force")
            load.wait_for(lambda told: not told.error, 800, "records are taken")
            assert states(cluster, behind)[5] == "active", "it has heard nothing"
            cluster.heal()
            wait_for(cluster, "closing", RETIRED)
            shrink(cluster, "--now", "--force")
            wait_for(cluster, "sealed", RETIRED)
            load.wait_for(lambda told: not told.error, 100, "records are taken")
            load.stop()
        failed = [told for told in load.told.values() if told.error]
        back = sum(
            one.partition in RETIRED and before.partition not in RETIRED
            for before, one in pairwise(load.told[n] for n in range(load.sent) if n % KEYS == 0)
        )
        why = Counter((told.partition, told.error) for told in failed)
        print(f"{load.sent} sent, {dict(why)} failed, {back} times back")  # noqa: T201  # told once
        assert not load.twice
        # Others may run out of time for as long as their leader is not found through the cut.
        unknown = {told.partition for told in failed if told.error == "_UNKNOWN_PARTITION"}
        assert unknown <= set(RETIRED)
        group.take(["t", "t.retired"], sum(ends(cluster, RETIRED).values()))
        assert not group.twice
        check_read(load, group.read)
