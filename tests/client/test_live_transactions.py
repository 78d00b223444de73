"""Transactions on real brokers, by all drivers and in both protocols (KIP-98, KIP-890).

What a commit says is read back by another client, through kills of those who coordinate.
On raftmq, and with the marker `kafka` on Apache Kafka.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq.types import TopicPartition
from raftmq_client import (
    EndUnknownError,
    FencedError,
    MustAbortError,
    Outcome,
    TransactionError,
    TransactionHandle,
    UsageError,
)
from raftmq_client.core.client import ClientCore
from tests.client.drivers import Driver
from tests.live.harness import wait_until
from tests.live.kafka import KafkaCluster
from tests.tree import PYTHONPATH, ROOT

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Brokers go by the versions of requests; what a cluster has finalized is up to the client."""
    if request.param == 1:
        monkeypatch.setattr(ClientCore, "feature_level", lambda _self, _name: 0)
    number: int = request.param
    return number


ONE_PROTOCOL = [
    pytest.param(1, id="v1", marks=pytest.mark.soak),
    pytest.param(2, id="v2"),
]


@pytest.fixture
def name(topic: str) -> str:
    """A transactional id."""
    return f"id-{topic}"


@pytest.fixture
def admin(driver: Driver, bootstrap: str) -> Iterator[Any]:
    with driver.admin(bootstrap) as opened:
        yield opened


def key(topic: str, partition: int = 0) -> TopicPartition:
    return TopicPartition(topic, partition)


class Reader:
    """What is in a topic, as a consumer of one isolation sees it up to the end."""

    def __init__(self, driver: Driver, bootstrap: str, topic: str) -> None:
        self._make = lambda isolation: driver.consumer(bootstrap, isolation=isolation)
        self._topic = topic

    def read(self, isolation: str = "read_committed") -> list[bytes]:
        found: list[bytes] = []
        keys = [key(self._topic, partition) for partition in range(4)]
        with self._make(isolation) as consumer:
            ends = consumer.offsets(keys, -1)
            consumer.assign(dict.fromkeys(keys, 0))
            deadline = time.monotonic() + 30
            while any(consumer.position(k) < ends[k].offset for k in keys):
                assert time.monotonic() < deadline
                found += [record.value for record in consumer.poll(0.2)]
        return found


@pytest.fixture
def reader(driver: Driver, bootstrap: str, topic: str) -> Reader:
    return Reader(driver, bootstrap, topic)


def test_a_commit_counts_and_an_abort_does_not(
    driver: Driver, bootstrap: str, topic: str, name: str, reader: Reader, protocol: int
) -> None:
    with driver.producer(bootstrap, transactional_id=name) as producer:
        for number in range(6):
            tx = driver.begin(producer)
            for partition in range(4):
                tx.send(topic, b"%d.%d" % (number, partition), partition=partition)
            tx.abort() if number % 2 else tx.commit()
    expected = {b"%d.%d" % (number, partition) for number in (0, 2, 4) for partition in range(4)}
    # An end is told once it is decided; partitions hear of it a moment later.
    wait_until(lambda: len(reader.read()) >= len(expected), 20, "all of it is seen")
    assert sorted(reader.read()) == sorted(expected)
    assert reader.read("read_uncommitted").count(b"0.0") == 1


def test_an_open_transaction_is_not_seen_and_ends_with_its_producer(
    driver: Driver, bootstrap: str, topic: str, name: str, reader: Reader, protocol: int
) -> None:
    with driver.producer(bootstrap, transactional_id=name) as producer:
        tx = driver.begin(producer)
        tx.send(topic, b"open", partition=0).result(20)
        assert reader.read() == []
        assert reader.read("read_uncommitted") == [b"open"]
        producer.close()
    with driver.producer(bootstrap) as plain:
        plain.send(topic, b"after", partition=0).result(20)
    wait_until(lambda: reader.read() == [b"after"], 20, "the close has aborted it")


def test_lag_ends_where_a_reader_has_to(
    driver: Driver, bootstrap: str, topic: str, name: str, protocol: int
) -> None:
    """An open transaction holds readers back; behind it nothing is left for them yet."""
    first = key(topic)
    with (
        driver.producer(bootstrap, transactional_id=name) as producer,
        driver.consumer(bootstrap, isolation="read_committed") as careful,
        driver.consumer(bootstrap, isolation="read_uncommitted") as careless,
    ):
        tx = driver.begin(producer)
        for _ in range(3):
            tx.send(topic, b"x", partition=0)
        tx.commit()
        tx = driver.begin(producer)
        tx.send(topic, b"open", partition=0).result(20)
        for consumer in (careful, careless):
            consumer.assign({first: 0})
        wait_until(lambda: careful.poll(0.2, 1) and careless.poll(0.2, 1), 30, "both read")
        # Three records and the end of their transaction; the fifth is open.
        assert careful.lag() == {first: 3}
        assert careless.lag() == {first: 4}
        while careful.position(first) < 4:
            assert [record.value for record in careful.poll(0.2)] in ([b"x"] * 2, [])
        assert careful.lag() == {first: 0}
        tx.abort()


def test_many_records_under_way_at_once(
    driver: Driver, bootstrap: str, topic: str, name: str, reader: Reader, protocol: int
) -> None:
    with driver.producer(bootstrap, transactional_id=name, batch_bytes=500) as producer:
        for number in range(3):
            tx = driver.begin(producer)
            for item in range(1_000):
                tx.send(topic, b"%d.%04d" % (number, item), partition=item % 4)
            tx.abort() if number == 1 else tx.commit()
    wait_until(lambda: len(reader.read()) >= 2_000, 20, "all of it is seen")
    expected = [b"%d.%04d" % (n, item) for n in (0, 2) for item in range(1_000)]
    assert sorted(reader.read()) == expected


def test_read_process_write(
    driver: Driver, bootstrap: str, topic: str, name: str, admin: Any, protocol: int
) -> None:
    """Every third transaction is aborted, and once the application is gone in the middle of one."""
    source, group = f"{topic}-in", f"g-{topic}"
    admin.create_topic(source, 2)
    with driver.producer(bootstrap) as plain:
        for item in range(300):
            plain.send(source, b"%03d" % item, partition=item % 2)
    rounds = 0
    for life in range(3):
        producer = driver.producer(bootstrap, delivery="exactly_once", transactional_id=name)
        consumer = driver.consumer(
            bootstrap,
            topics=[source],
            group=group,
            delivery="exactly_once",
            session_timeout_ms=6_000,
            heartbeat_interval_ms=500,
        )
        with producer, consumer:
            idle = 0
            while idle < 3:
                tx = driver.begin(producer, consumer)
                records = consumer.poll(1.0, 25)
                idle = 0 if records else idle + 1
                for record in records:
                    tx.send(topic, record.value, partition=record.partition)
                rounds += 1
                if rounds % 3 == 0:
                    tx.abort()
                    continue
                if rounds == 5 and life == 0:
                    tx.commit_offsets(driver.unwrap(consumer))
                    break  # gone: nothing of this may count
                tx.commit()
    copied = Reader(driver, bootstrap, topic)
    wait_until(lambda: len(copied.read()) >= 300, 20, "all of it is seen")
    assert sorted(copied.read()) == [b"%03d" % item for item in range(300)]

    def offsets() -> dict[int, int]:
        return {k.partition: item.offset for k, item in admin.group_offsets(group).items()}

    wait_until(lambda: offsets() == {0: 150, 1: 150}, 10, "the group has read all")
    admin.delete_topic(source)


def test_offsets_are_not_seen_until_the_commit(
    driver: Driver, bootstrap: str, topic: str, name: str, admin: Any, protocol: int
) -> None:
    group = f"g-{topic}"
    with driver.producer(bootstrap, transactional_id=name) as producer:
        for commit in (False, True):
            tx = driver.begin(producer)
            tx.commit_offsets(group, {key(topic): 5, key(topic, 1): 7})
            assert admin.group_offsets(group, [key(topic)]) == {}
            tx.commit() if commit else tx.abort()

    def offsets() -> dict[TopicPartition, int]:
        return {k: item.offset for k, item in admin.group_offsets(group).items()}

    # Kafka answers before the group's coordinator knows; raftmq as it does.
    wait_until(lambda: offsets() == {key(topic): 5, key(topic, 1): 7}, 10, "they are committed")


def test_a_zombie_is_fenced(
    driver: Driver, bootstrap: str, topic: str, name: str, reader: Reader, protocol: int
) -> None:
    with driver.producer(bootstrap, transactional_id=name) as zombie:
        tx = driver.begin(zombie)
        tx.send(topic, b"zombie", partition=0).result(20)
        with driver.producer(bootstrap, transactional_id=name) as producer:
            new = driver.begin(producer)
            with pytest.raises(FencedError) as caught:
                tx.commit()
            assert caught.value.outcome is Outcome.FAILED
            new.send(topic, b"new", partition=0)
            with pytest.raises(FencedError):
                zombie.send(topic, b"more")
            new.commit()
    wait_until(lambda: reader.read() == [b"new"], 20, "it is seen, and the zombie's is not")


def test_a_transaction_that_took_too_long_is_to_be_done_again(
    driver: Driver, bootstrap: str, topic: str, name: str, reader: Reader, protocol: int
) -> None:
    options = {"transactional_id": name, "transaction_timeout_ms": 1_000}
    with driver.producer(bootstrap, **options) as producer:
        tx = driver.begin(producer)
        tx.send(topic, b"late", partition=0).result(20)
        with driver.producer(bootstrap) as plain:
            plain.send(topic, b"after", partition=0).result(20)
        wait_until(lambda: reader.read() == [b"after"], 40, "the cluster aborts it")
        with pytest.raises(MustAbortError) as caught:
            tx.commit()
        assert (caught.value.outcome, caught.value.advice) == (Outcome.FAILED, "abort")
        tx.abort()
        again = driver.begin(producer)
        again.send(topic, b"again", partition=0)
        again.commit()
    wait_until(lambda: reader.read() == [b"after", b"again"], 20, "it is seen")


def test_a_refused_record_dooms_its_transaction_alone(
    driver: Driver, bootstrap: str, topic: str, name: str, reader: Reader, admin: Any, protocol: int
) -> None:
    with driver.producer(bootstrap, transactional_id=name) as producer:
        tx = driver.begin(producer)
        tx.send(topic, b"good", partition=1)
        tx.send(topic, b"bad", partition=0, timestamp=1 << 62)  # a far future
        with pytest.raises(MustAbortError, match="INVALID_TIMESTAMP"):
            tx.commit()
        tx.abort()
        again = driver.begin(producer)
        again.send(topic, b"again", partition=0)
        again.commit()
    wait_until(lambda: reader.read() == [b"again"], 20, "it is seen")


def test_a_detached_transaction_is_ended_by_who_has_its_handle(
    driver: Driver, bootstrap: str, topic: str, name: str, reader: Reader, admin: Any, protocol: int
) -> None:
    handles = []
    for number, commit in enumerate((True, False)):
        with driver.producer(bootstrap, transactional_id=f"{name}-{number}") as producer:
            tx = driver.begin(producer)
            tx.send(topic, b"%d" % number, partition=0)
            text = producer.detach().to_json()
            with pytest.raises(UsageError):
                tx.commit()
        handle = TransactionHandle.from_json(text)
        handles.append(handle)
        assert handle.protocol == protocol
        assert 0 < handle.deadline_ms - time.time() * 1000 <= 60_000
        assert b"%d" % number not in reader.read()
        for _ in range(3):
            admin.end_transaction(handle, commit=commit)
        with pytest.raises(TransactionError):
            admin.end_transaction(handle, commit=not commit)
    wait_until(lambda: reader.read() == [b"0"], 20, "what is committed is seen, and no more")
    with driver.producer(bootstrap, transactional_id=f"{name}-0") as producer:
        tx = driver.begin(producer)
        tx.commit()
    with pytest.raises(FencedError) as caught:
        admin.end_transaction(handles[0], commit=True)
    assert caught.value.outcome is Outcome.UNKNOWN


def test_a_member_that_was_put_out_commits_no_offsets(
    driver: Driver, bootstrap: str, topic: str, name: str, admin: Any, protocol: int
) -> None:
    group = f"g-{topic}"
    options = {"topics": [topic], "group": group, "delivery": "exactly_once"}
    with driver.producer(bootstrap) as plain:
        for partition in range(4):
            plain.send(topic, b"x", partition=partition)
    with (
        driver.producer(bootstrap, transactional_id=name) as producer,
        driver.consumer(bootstrap, max_poll_interval_ms=1_500, **options) as slow,
    ):
        seen: list[Any] = []
        deadline = time.monotonic() + 30
        while len(seen) < 4:
            assert time.monotonic() < deadline
            seen += slow.poll(0.2)
        tx = driver.begin(producer)
        tx.send(f"{topic}", b"made", partition=0)
        with driver.consumer(bootstrap, heartbeat_interval_ms=200, **options) as other:
            wait_until(lambda: other.poll(0.2), 30, "the group went on without it")
        with pytest.raises(MustAbortError):
            tx.commit_offsets(driver.unwrap(slow))
        with pytest.raises(MustAbortError):
            tx.commit()
        tx.abort()
    assert admin.group_offsets(group) == {}


ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH}


def worker(*words: str) -> list[str]:
    return [sys.executable, "-m", "tests.client.transaction_worker", *words]


@pytest.mark.parametrize("protocol", ONE_PROTOCOL, indirect=True)
@pytest.mark.parametrize("driver", ["blocking"], indirect=True)
def test_an_application_is_killed_again_and_again(
    driver: Driver, bootstrap: str, topic: str, reader: Reader, admin: Any, protocol: int
) -> None:
    """Wherever it is killed, its next life begins where the last commit stands."""
    source = f"{topic}-in"
    admin.create_topic(source, 2)
    with driver.producer(bootstrap) as plain:
        for item in range(400):
            plain.send(source, b"%03d" % item, partition=item % 2)
    draw = random.Random(protocol)
    words = worker("copy", str(protocol), bootstrap, source, topic)
    for life in range(6):
        with subprocess.Popen(
            words, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            if life < 5:
                for _ in range(draw.randrange(1, 8)):
                    assert process.stdout.readline(), "it ended before it was killed"
                time.sleep(draw.random() / 20)
                process.kill()
            else:
                process.communicate(timeout=90)
                assert process.returncode == 0
    wait_until(lambda: len(reader.read()) >= 400, 20, "all of it is seen")
    assert sorted(reader.read()) == [b"%03d" % item for item in range(400)]


@pytest.mark.parametrize("driver", ["blocking"], indirect=True)
@pytest.mark.parametrize("how", ["commit", "abort"])
def test_another_process_ends_a_transaction_whose_own_is_gone(
    driver: Driver, bootstrap: str, topic: str, name: str, reader: Reader, protocol: int, how: str
) -> None:
    with driver.producer(bootstrap, transactional_id=name) as producer:
        tx = driver.begin(producer)
        tx.send(topic, b"x", partition=0)
        handle = producer.detach().to_json()
    for _ in range(2):
        subprocess.run(
            worker("end", bootstrap, handle, how), cwd=ROOT, env=ENVIRONMENT, check=True, timeout=60
        )
    expected = [b"x"] if how == "commit" else []
    wait_until(lambda: reader.read() == expected, 20, "it is ended")


@pytest.mark.kafka
@pytest.mark.parametrize("driver", ["blocking", "asyncio"], indirect=True)
def test_coordinators_and_leaders_are_killed(
    driver: Driver, kafka: KafkaCluster, protocol: int
) -> None:
    """Input is copied once, whoever is killed: twice who coordinates, before a commit."""
    name = f"killed-{time.time_ns()}"
    topic, source, group, bootstrap = name, f"{name}-in", f"g-{name}", kafka.bootstrap
    with driver.admin(bootstrap) as admin:
        admin.create_topic(topic, 4)
        admin.create_topic(source, 2)
    with driver.producer(bootstrap) as plain:
        for item in range(400):
            plain.send(source, b"%03d" % item, partition=item % 2)
    options = {"topics": [source], "group": group, "delivery": "exactly_once"}
    killed: list[int] = []

    def strike(producer: Any) -> None:
        node = driver.unwrap(producer)._core.transactions._coordinator
        killed.append(node)
        kafka.signal(node, signal.SIGKILL)

    def end(tx: Any) -> None:
        for _ in range(10):
            try:
                tx.commit(20)
            except EndUnknownError:
                continue
            except MustAbortError:
                tx.abort()
            return
        raise AssertionError("no commit was told")

    with (
        driver.producer(bootstrap, transactional_id=name) as producer,
        driver.consumer(bootstrap, **options) as consumer,
    ):
        rounds = idle = 0
        while idle < 4:
            tx = driver.begin(producer, consumer)
            records = consumer.poll(2.0, 20)
            idle, rounds = 0 if records else idle + 1, rounds + 1
            for record in records:
                tx.send(topic, record.value, partition=record.partition)
            if rounds == 5:
                strike(producer)
            if rounds == 12:
                kafka.heal(killed[-1])
                strike(producer)
            end(tx)
    kafka.heal(killed[-1])
    copied = Reader(driver, bootstrap, topic)
    wait_until(lambda: len(copied.read()) >= 400, 20, "all of it is seen")
    assert sorted(copied.read()) == [b"%03d" % item for item in range(400)]


def test_what_may_not_be_is_said(driver: Driver, bootstrap: str, topic: str, name: str) -> None:
    with driver.producer(bootstrap) as plain, pytest.raises(UsageError, match="transactional_id"):
        plain.begin()
    too_long = {"transaction_timeout_ms": 1 << 30}
    refusal = pytest.raises(TransactionError, match=ErrorCode.INVALID_TRANSACTION_TIMEOUT.name)
    with driver.producer(bootstrap, transactional_id=name, **too_long) as producer, refusal:
        producer.begin()
    with driver.producer(bootstrap, transactional_id=name) as producer:
        with pytest.raises(UsageError, match="no transaction is open"):
            producer.send(topic, b"x")
        with driver.consumer(bootstrap, topics=[topic], group="own") as consumer:
            tx = driver.begin(producer)
            with pytest.raises(UsageError, match="commits by itself"):
                tx.commit_offsets(driver.unwrap(consumer))
            tx.abort()
