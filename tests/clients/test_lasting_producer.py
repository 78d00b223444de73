"""An idempotent producer of each stock client that outlives what its partition knew of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import confluent_kafka
import kafka
import pytest
from aiokafka import AIOKafkaProducer

from tests.clients.adapters import TIMEOUT_S, ClientAdapter, Loop
from tests.live.harness import Cluster, wait_until

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    # kafka-python leaves sockets to the garbage collector when it closes.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Send = Callable[[str, bytes], int]
"""Sends a record to partition 0 of a topic; returns its offset."""


def _of_confluent(bootstrap: str) -> Send:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 0}
    )

    def send(topic: str, value: bytes) -> int:
        told: list[Any] = []
        producer.produce(
            topic, value, partition=0, on_delivery=lambda error, m: told.append(error or m)
        )
        assert producer.flush(TIMEOUT_S) == 0
        assert not isinstance(told[0], confluent_kafka.KafkaError), told[0]
        return int(told[0].offset())

    return send


@pytest.fixture
def send(client: ClientAdapter, shared_cluster: Cluster, asyncio_loop: Loop) -> Iterator[Send]:
    """One producer of the client, for the whole test."""
    bootstrap = shared_cluster.bootstrap
    if client.name == "confluent-kafka":
        yield _of_confluent(bootstrap)
    elif client.name == "kafka-python":
        producer = kafka.KafkaProducer(
            bootstrap_servers=bootstrap.split(","), enable_idempotence=True
        )
        yield lambda topic, value: int(
            producer.send(topic, value, partition=0).get(TIMEOUT_S).offset
        )
        producer.close()
    else:

        async def start() -> AIOKafkaProducer:
            producer = AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True)
            await producer.start()
            return producer

        aio = asyncio_loop.run(start())
        yield lambda topic, value: int(
            asyncio_loop.run(aio.send_and_wait(topic, value, partition=0)).offset
        )
        asyncio_loop.run(aio.stop())


def test_a_topic_that_is_deleted_and_made_again(
    client: ClientAdapter, unique: str, send: Send
) -> None:
    client.create_topic(unique, 1, {})
    assert [send(unique, b"%d" % i) for i in range(5)] == [0, 1, 2, 3, 4]
    client.delete_topic(unique)
    wait_until(lambda: unique not in client.topics(), 60, "the deleted topic left Metadata")
    client.create_topic(unique, 1, {})
    assert [send(unique, b"%d" % i) for i in range(5, 8)] == [0, 1, 2]
    assert [m.value for m in client.read(unique, 0, 0, 3)] == [b"5", b"6", b"7"]
