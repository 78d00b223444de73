"""What every stock client must be able to do, unmodified."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from raftmq.codec import Codec
from raftmq.records import parse_header
from tests.clients.adapters import ClientAdapter, GroupMember, Message
from tests.live.harness import Cluster, wait_until

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    # kafka-python leaves sockets to the garbage collector when it closes.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CODECS = {
    "none": Codec.NONE,
    "gzip": Codec.GZIP,
    "snappy": Codec.SNAPPY,
    "lz4": Codec.LZ4,
    "zstd": Codec.ZSTD,
}


def numbered(count: int, partition: int = 0, start: int = 0) -> list[Message]:
    return [Message(b"%d" % i, partition=partition) for i in range(start, start + count)]


def stored_codecs(cluster: Cluster, topic: str, partition: int = 0) -> set[Codec]:
    """The codec bits of every stored batch, on every node."""
    found = set()
    for node in cluster.nodes.values():
        for segment in node.partition_folder(topic, partition).glob("*.log"):
            data = segment.read_bytes()
            position = 0
            while position + 61 <= len(data):
                header = parse_header(data, position)
                if header.batch_length <= 0:
                    break
                found.add(header.codec)
                position += header.size
    return found


def test_topics(client: ClientAdapter, unique: str) -> None:
    client.create_topic(unique, 3, {"retention.ms": "60000"})
    assert client.topics()[unique] == 3
    client.delete_topic(unique)
    wait_until(lambda: unique not in client.topics(), 60, "the deleted topic left Metadata")


@pytest.mark.parametrize("codec", CODECS)
def test_codecs(client: ClientAdapter, unique: str, codec: str, shared_cluster: Cluster) -> None:
    if codec not in client.codecs:
        pytest.skip(f"{client.name} lacks {codec} without further packages")
    client.create_topic(unique, 1, {})
    messages = [Message(b"the same words again and again " * 8 + b"%d" % i) for i in range(200)]
    client.produce(unique, messages, codec=codec, idempotent=False)
    read = client.read(unique, 0, 0, len(messages))
    assert [m.value for m in read] == [m.value for m in messages]
    assert stored_codecs(shared_cluster, unique) == {CODECS[codec]}, "stored as it was sent"


def test_headers_nulls_and_timestamps(client: ClientAdapter, unique: str) -> None:
    client.create_topic(unique, 1, {})
    messages = [
        Message(b"v", b"k", (("a", b"1"), ("a", b"2"), ("empty", b"")), 0, 1_700_000_000_123),
        Message(None, b"tombstone", (), 0, 1_700_000_000_456),
        Message(b"", None, (), 0, 1_700_000_000_789),
    ]
    client.produce(unique, messages, codec="none", idempotent=False)
    read = client.read(unique, 0, 0, 3)
    assert [(m.value, m.key, m.headers, m.timestamp) for m in read] == [
        (m.value, m.key, m.headers, m.timestamp) for m in messages
    ]
    assert [m.offset for m in read] == [0, 1, 2]


def test_messages_of_a_megabyte(client: ClientAdapter, unique: str) -> None:
    client.create_topic(unique, 1, {})
    size = 1_000_000
    messages = [Message(bytes([65 + i]) * size) for i in range(3)]
    client.produce(unique, messages, codec="none", idempotent=False)
    assert [m.value for m in client.read(unique, 0, 0, 3)] == [m.value for m in messages]


def test_reading_again_from_zero_and_from_a_timestamp(client: ClientAdapter, unique: str) -> None:
    client.create_topic(unique, 1, {})
    base = 1_700_000_000_000
    messages = [Message(b"%d" % i, timestamp=base + 1000 * i) for i in range(50)]
    client.produce(unique, messages, codec="none", idempotent=False)
    for _ in range(2):
        assert [m.value for m in client.read(unique, 0, 0, 50)] == [m.value for m in messages]
    offset = client.offset_at(unique, 0, base + 19_500)
    assert offset == 20
    assert client.read(unique, 0, offset, 30)[0].value == b"20"
    assert client.offset_at(unique, 0, base + 10**9) is None


def test_idempotent_producer(client: ClientAdapter, unique: str) -> None:
    client.create_topic(unique, 2, {})
    messages = numbered(500) + numbered(500, partition=1)
    client.produce(unique, messages, codec="none", idempotent=True)
    for partition in (0, 1):
        read = client.read(unique, partition, 0, 500)
        assert [m.value for m in read] == [b"%d" % i for i in range(500)]


def drain(member: GroupMember, count: int, timeout_s: float = 30.0) -> list[Message]:
    """Poll until `count` messages came."""
    found: list[Message] = []
    wait_until(lambda: found.extend(member.poll(0.2)) or len(found) >= count, timeout_s)
    return found


def test_two_groups_each_get_every_record(client: ClientAdapter, unique: str) -> None:
    client.create_topic(unique, 2, {})
    client.produce(unique, numbered(100) + numbered(100, 1, 100), codec="none", idempotent=False)
    for group in ("a", "b"):
        member = client.member(f"{unique}-{group}", unique)
        try:
            values = Counter(m.value for m in drain(member, 200))
        finally:
            member.close()
        assert values == Counter(b"%d" % i for i in range(200))


def test_commit_and_resume(client: ClientAdapter, unique: str) -> None:
    client.create_topic(unique, 1, {})
    client.produce(unique, numbered(60), codec="none", idempotent=False)
    first = client.member(unique, unique)
    try:
        assert len(drain(first, 60)) == 60
        first.commit()
    finally:
        first.close()
    client.produce(unique, numbered(10, start=60), codec="none", idempotent=False)
    second = client.member(unique, unique)
    try:
        assert [m.value for m in drain(second, 10)] == [b"%d" % i for i in range(60, 70)]
    finally:
        second.close()


class Runner:
    """Polls a member in a thread, as a service would, and remembers what came."""

    def __init__(self, make: Callable[[], GroupMember]) -> None:
        self._make = make
        self._stop = threading.Event()
        self.values: list[bytes | None] = []
        self.partitions: set[int] = set()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            member = self._make()
            try:
                while not self._stop.is_set():
                    found = member.poll(0.1)
                    self.values += [m.value for m in found]
                    self.partitions = member.assignment()
                    if found:
                        member.commit()
            finally:
                member.close()
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            self.error = error

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def owned_once(runners: list[Runner], partitions: int) -> bool:
    for runner in runners:
        runner.check()
    owned = [p for runner in runners for p in runner.partitions]
    return sorted(owned) == list(range(partitions))


def is_shared_evenly(runners: list[Runner], partitions: int) -> bool:
    each = partitions // len(runners)
    return owned_once(runners, partitions) and {len(r.partitions) for r in runners} == {each}


def test_four_members_over_four_partitions(client: ClientAdapter, unique: str) -> None:
    client.create_topic(unique, 4, {})
    runners = [Runner(lambda: client.member(unique, unique)) for _ in range(4)]
    try:
        wait_until(partial(is_shared_evenly, runners, 4), 60, "each member owns one partition")
        messages = [m for p in range(4) for m in numbered(25, p, 100 * p)]
        client.produce(unique, messages, codec="none", idempotent=False)
        wait_until(lambda: sum(len(r.values) for r in runners) >= 100, 60)
    finally:
        for runner in runners:
            runner.stop()
    values = [v for r in runners for v in r.values]
    assert Counter(values) == Counter(m.value for m in messages)


def test_three_members_rebalance(client: ClientAdapter, unique: str) -> None:
    client.create_topic(unique, 6, {})
    runners: list[Runner] = []
    try:
        for count in (1, 2, 3):
            runners.append(Runner(lambda: client.member(unique, unique)))
            wait_until(
                partial(is_shared_evenly, runners, 6), 60, f"{count} members share six partitions"
            )
        runners.pop().stop()
        wait_until(lambda: owned_once(runners, 6), 60, "two members took over")
        messages = [m for p in range(6) for m in numbered(10, p, 100 * p)]
        client.produce(unique, messages, codec="none", idempotent=False)
        wait_until(lambda: sum(len(r.values) for r in runners) >= 60, 60)
    finally:
        for runner in runners:
            runner.stop()
