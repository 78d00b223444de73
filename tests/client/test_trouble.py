"""A consumer that waits says for what; what waiting cannot help is raised."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.types import TopicPartition
from raftmq_client import BrokerError
from raftmq_client.core.trouble import Trouble
from tests.client.drivers import Driver
from tests.client.fake_broker import FakeBroker


def until(condition: Callable[[], Any], act: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        act()


def said(caplog: pytest.LogCaptureFixture, logger: str, text: str) -> bool:
    return any(
        record.name == f"raftmq_client.{logger}" and text in record.getMessage()
        for record in caplog.records
    )


@pytest.mark.parametrize("group", [None, "g"])
def test_a_wrong_address_is_told(
    driver: Driver, caplog: pytest.LogCaptureFixture, group: str | None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with driver.consumer(address, topics="t", group=group) as consumer:
        until(lambda: consumer.trouble, lambda: consumer.poll(0.05))
        assert address in consumer.trouble
        assert "refused" in consumer.trouble
    assert said(caplog, "connection", address)


def test_an_unknown_topic_is_told_and_waited_for(
    broker: FakeBroker, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "raftmq_client")
    with driver.consumer(broker.address, topics="later", reset="earliest") as consumer:
        until(lambda: consumer.trouble, lambda: consumer.poll(0.05))
        assert "'later' is not there: UNKNOWN_TOPIC_OR_PARTITION" in consumer.trouble
        assert said(caplog, "metadata", "'later' is not there")
        broker.make_topic("later", 1)
        until(lambda: not consumer.trouble, lambda: consumer.poll(0.05))
        assert said(caplog, "metadata", "'later' is there")


@pytest.mark.parametrize("how", ["topics", "assign"])
@pytest.mark.parametrize(
    "code", [ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.INVALID_TOPIC_EXCEPTION]
)
def test_a_topic_that_can_never_be_read_is_raised(
    broker: FakeBroker, driver: Driver, how: str, code: ErrorCode
) -> None:
    for _ in range(3):
        broker.fault(ApiKey.METADATA, "refuse", code)
    with driver.consumer(broker.address, topics="t" if how == "topics" else ()) as consumer:
        if how == "assign":
            consumer.assign([TopicPartition("t", 0)])
        with pytest.raises(BrokerError, match=code.name):
            consumer.poll(20)


def test_a_dead_cluster_and_a_lost_commit_are_told(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "raftmq_client")
    settings = {"group": "g", "topics": "t", "reset": "earliest", "auto_commit_ms": 50}
    with FakeBroker({"t": 1}) as broker:
        consumer = driver.consumer(broker.address, **settings)
        consumer.__enter__()
        broker.fault(ApiKey.OFFSET_COMMIT, "refuse", ErrorCode.INVALID_COMMIT_OFFSET_SIZE)
        until(lambda: said(caplog, "consumer", "did not get through"), lambda: consumer.poll(0.05))
        assert said(caplog, "group", "assigned")
    until(lambda: consumer.trouble, lambda: consumer.poll(0.05))
    assert "no broker answered" in consumer.trouble
    consumer.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert said(caplog, "connection", "no broker can be reached")


def test_what_lasts_is_said_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble(logging.getLogger("raftmq_client.connection"))
    times = []
    for second in range(600):
        before = len(caplog.records)
        trouble.tell("b", "away", second * 1_000.0)
        times += [second] * (len(caplog.records) - before)
    assert times[:7] == [0, 1, 3, 7, 15, 31, 63]
    assert times[7:] == list(range(123, 600, 60))
    caplog.set_level(logging.INFO, "raftmq_client")
    trouble.over("b", "back")
    trouble.over("b", "back")
    assert [record.getMessage() for record in caplog.records].count("back") == 1
