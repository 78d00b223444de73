"""How to test code that sends and reads, with pytest-asyncio.

`pip install raftmq pytest pytest-asyncio`, `pytest examples/test_with_fixtures.py`. Fixtures of
pytest-asyncio are set up and torn down by tasks of their own; `start()` and `close()` may be called
in any task and in any order, in one event loop. The brokers are those of `RAFTMQ=host:port`, or a
cluster that `raftmq.testing` starts for the session.
"""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from raftmq.testing import Cluster
from raftmq_client.aio import Admin, Consumer, Producer


@pytest.fixture(scope="session")
def bootstrap() -> Iterator[str]:
    """Brokers to talk to."""
    if "RAFTMQ" in os.environ:
        yield os.environ["RAFTMQ"]
        return
    with Cluster(nodes=1) as cluster:
        yield cluster.bootstrap


@pytest_asyncio.fixture
async def topic(bootstrap: str) -> AsyncIterator[str]:
    """A topic of its own for each test."""
    name = f"orders-{uuid.uuid4().hex}"
    admin = await Admin(bootstrap).start()
    await admin.create_topic(name, 1)
    yield name
    await admin.delete_topic(name)
    await admin.close()


@pytest_asyncio.fixture
async def producer(bootstrap: str) -> AsyncIterator[Producer]:
    """A producer; closing it raises if a record failed and the test did not look."""
    producer = await Producer(bootstrap, value_serializer="json").start()
    yield producer
    await producer.close()


@pytest_asyncio.fixture
async def consumer(bootstrap: str, topic: str) -> AsyncIterator[Consumer]:
    """A consumer that reads the topic from its beginning."""
    options = {"reset": "earliest", "value_deserializer": "json"}
    consumer = await Consumer(bootstrap, topics=topic, **options).start()  # type: ignore[arg-type]
    yield consumer
    await consumer.close()


@pytest.mark.asyncio
async def test_what_is_sent_is_read(producer: Producer, consumer: Consumer, topic: str) -> None:
    """The whole way."""
    await producer.send(topic, {"item": 7})
    async with asyncio.timeout(30):
        message = await anext(consumer)
    assert message.value == {"item": 7}


@pytest.mark.asyncio
async def test_offsets_count_up(producer: Producer, topic: str) -> None:
    """Each test has a topic of its own."""
    receipts = [await producer.send(topic, number) for number in range(3)]
    assert [(await receipt).offset for receipt in receipts] == [0, 1, 2]
