"""Transactions of clients whose requests come late, and whose brokers die."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

from raftmq.errors import ErrorCode
from raftmq.protocol import Struct
from raftmq.protocol.api_versions import ApiKey
from raftmq.records import NewRecord, build_batch
from tests.clients.adapters import Loop
from tests.clients.held_end import HeldEnd
from tests.clients.test_transactions import PARTITIONS, consumer, producer, read, send
from tests.clients.test_transactions_of_clients import COMMITTED, committed_offset, param
from tests.clients.transactional import RefusedError, Transactor, open_client, send_plain
from tests.live.harness import Cluster, Node
from tests.live.load import create_topic, leaders
from tests.live.raw import ask, ask_at_once

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    # kafka-python leaves sockets to the garbage collector when it closes.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SECOND_PROTOCOL = [param(name) for name in ("raftmq", "java", "franz")]
FSYNC_MS = 100


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes to be slowed down and killed."""
    with Cluster(tmp_path_factory.mktemp("fragile"), faults=True) as cluster:
        yield cluster


@pytest.mark.parametrize("name", SECOND_PROTOCOL)
def test_an_end_that_comes_late_does_not_end_the_next_transaction(
    tmp_path: Path, asyncio_loop: Loop, unique: str, name: str
) -> None:
    """In the second protocol each transaction has an epoch of its own; the late one's is over."""
    with (
        HeldEnd() as held,
        Cluster(tmp_path, 1, settings={"advertised_client": held.address}) as cluster,
    ):
        (node,) = cluster.nodes.values()
        held.serve(node.host, node.client_port)
        create_topic(held.address, unique, 1, 1)
        client = open_client(name, held.address, asyncio_loop)
        try:
            made = client.open(unique, request_ms=1_000)
            wanted = _commit_late(made, held, unique)
            made.begin()
            made.send(unique, "next")
            code = held.release()
            assert code in (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED)
            assert client.read(unique, None, COMMITTED) == wanted, "the next one is still open"
            made.abort()
            send_plain(held.address, unique, "end")
            assert client.read(unique, "end", COMMITTED) == [*wanted, "end"]
        finally:
            client.close()


def _commit_late(made: Transactor, held: HeldEnd, topic: str) -> list[str]:
    """Commit by a second request, while the first is held; what readers must see of it."""
    made.begin()
    made.send(topic, "late")
    held.arm()
    try:
        made.commit()
    except RefusedError:
        # franz-go does not ask twice: it wants the transaction aborted.
        made.abort()
        return []
    finally:
        held.wait_held()
    return ["late"]


@pytest.mark.parametrize("name", SECOND_PROTOCOL)
def test_batches_behind_a_slow_verification_keep_their_order(
    fragile: Cluster, asyncio_loop: Loop, unique: str, name: str
) -> None:
    """The first batch adds its partition to the transaction; four more wait behind it."""
    create_topic(fragile.bootstrap, unique)
    client = open_client(name, fragile.bootstrap, asyncio_loop)
    try:
        made = client.open(unique)
        for node in fragile.nodes.values():
            node.fault(fsync_delay_ms=FSYNC_MS)
        values = [f"{number}" for number in range(15)]
        for is_commit in (False, True):
            made.begin()
            made.send_many(unique, values)
            if is_commit:
                made.commit()
            else:
                made.abort()
        assert client.read(unique, values[-1], COMMITTED) == values
    finally:
        for node in fragile.nodes.values():
            node.fault()
        client.close()


def test_five_batches_behind_a_slow_verification_are_all_taken_in_their_order(
    fragile: Cluster, unique: str
) -> None:
    """As a client with five requests under way sends them, with nothing sent a second time."""
    create_topic(fragile.bootstrap, unique)
    leader = fragile[leaders(fragile.bootstrap, unique)[0]]
    wanted = Struct(
        transactional_id=unique, transaction_timeout=60_000, producer_id=-1, producer_epoch=-1
    )
    made = ask(leader, ApiKey.INIT_PRODUCER_ID, 5, wanted)
    assert made.error_code == ErrorCode.NONE

    def request(sequence: int) -> Struct:
        batch = build_batch(
            [NewRecord(None, b"%d" % sequence)],
            timestamp=int(time.time() * 1000),
            producer_id=made.producer_id,
            producer_epoch=made.producer_epoch,
            base_sequence=sequence,
            transactional=True,
        )
        topics = [Struct(name=unique, partition_data=[Struct(index=0, records=memoryview(batch))])]
        return Struct(transactional_id=unique, acks=-1, timeout=10_000, topic_data=topics)

    for node in fragile.nodes.values():
        node.fault(fsync_delay_ms=FSYNC_MS)
    try:
        began = time.monotonic()
        answers = ask_at_once(leader, ApiKey.PRODUCE, 12, [request(n) for n in range(5)])
        assert time.monotonic() - began > 2 * FSYNC_MS / 1000, "an Add, then the batches"
    finally:
        for node in fragile.nodes.values():
            node.fault()
    parts = [answer.responses[0].partition_responses[0] for answer in answers]
    assert [(p.error_code, p.base_offset) for p in parts] == [(0, n) for n in range(5)]


def coordinator(cluster: Cluster, name: str) -> Node:
    """The node that clients ask about a transactional id."""
    request = Struct(key_type=1, coordinator_keys=[name])
    told = ask(cluster.live[0], ApiKey.FIND_COORDINATOR, 4, request)
    node: Node = cluster[told.coordinators[0].node_id]
    return node


FIRST_PROTOCOL = [pytest.param("aiokafka", marks=[pytest.mark.soak])]
"""Not kafka-python: 3.0.12 forgets its EndTxn when the coordinator refuses the connection (its
`Sender` puts a request back only where it had no node to send it to), and `commit_transaction`
waits for ever. librdkafka is killed in `tests/live/test_pipeline.py`."""


@pytest.mark.parametrize("name", [*SECOND_PROTOCOL, *FIRST_PROTOCOL])
@pytest.mark.parametrize("victim", ["leader", "coordinator"])
def test_a_kill_in_the_middle_leaves_all_or_nothing(
    fragile: Cluster, asyncio_loop: Loop, unique: str, victim: str, name: str
) -> None:
    """Once before the commit is asked for, once while it is under way."""
    topics = [f"{unique}-{n}" for n in range(2)]
    for topic in topics:
        create_topic(fragile.bootstrap, topic)
    client = open_client(name, fragile.bootstrap, asyncio_loop)
    try:
        made, counted = client.open(unique), []
        for turn in ("before", "during"):
            made.begin()
            for topic in topics:
                made.send(topic, turn)
            if name != "franz":
                made.offsets(unique, topics[0], 1)
            node = coordinator(fragile, unique)
            if victim == "leader":
                node = fragile[leaders(fragile.bootstrap, topics[0])[0]]
            outcome = _commit_around(made, node, is_before=turn == "before")
            fragile.bring_back()
            counted.append((turn, outcome))
            if outcome is None:
                made = client.open(unique)
        for topic in topics:
            send_plain(fragile.bootstrap, topic, "end")
        first, second = (client.read(topic, "end", COMMITTED) for topic in topics)
        assert first == second
        for turn, outcome in counted:
            assert outcome is None or (turn in first) == outcome
        if name != "franz":
            offset = committed_offset(fragile, unique, topics[0])
            assert (offset == 1) == (len(first) > 1)
    finally:
        client.close()


def _commit_around(made: Transactor, node: Node, *, is_before: bool) -> bool | None:
    """Commit while a node dies; True when it is committed, None when the client cannot tell."""
    killer = threading.Thread(target=node.kill)
    killer.start()
    if is_before:
        killer.join()
    try:
        made.commit()
    except RefusedError:
        return None
    finally:
        killer.join()
    return True


def test_the_power_of_all_nodes_lost_in_the_middle_of_ten_transactions(
    fragile: Cluster, unique: str
) -> None:
    """Each is wholly there or wholly not, its offsets with it; what was acknowledged is there."""
    create_topic(fragile.bootstrap, unique, PARTITIONS)
    names = [f"{unique}-{number}" for number in range(10)]
    producers = {name: producer(fragile, name) for name in names}
    for name, made in producers.items():
        made.begin_transaction()
        send(made, unique, *(f"{name}/{n}" for n in range(2 * PARTITIONS)))
        with consumer(fragile, name) as member:
            at = [TopicPartition(unique, 0, 2)]
            made.send_offsets_to_transaction(at, member.consumer_group_metadata(), 60)
    asked: list[str] = []
    committed: list[str] = []
    four, is_over = threading.Event(), threading.Event()

    def commit() -> None:
        for name in names:
            if is_over.is_set():
                return
            asked.append(name)
            producers[name].commit_transaction(120)
            committed.append(name)
            if len(committed) == 4:
                four.set()

    committing = threading.Thread(target=commit)
    committing.start()
    assert four.wait(60)
    for node in fragile.nodes.values():
        node.signal(signal.SIGKILL)
    is_over.set()
    promised = list(committed)
    for node in fragile.nodes.values():
        node.wait_end()
    fragile.bring_back()
    committing.join(120)
    assert not committing.is_alive()
    for name in names:
        producer(fragile, name)  # aborts what was not decided
    found = read(fragile, unique)
    for name in names:
        mine = [value for value in found if value.startswith(f"{name}/")]
        assert mine in ([], sorted(f"{name}/{n}" for n in range(2 * PARTITIONS))), "torn"
        is_there = bool(mine)
        assert (committed_offset(fragile, name, unique) == 2) == is_there, "offsets go along"
        assert is_there or name not in promised
        assert name in asked or not is_there
    assert len(promised) >= 4
    assert len(asked) < len(names), "some were open"
