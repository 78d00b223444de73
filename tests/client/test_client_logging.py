"""What clients log: once for each change, under documented names, nothing when all is well."""

from __future__ import annotations

import logging
import re
import socket
from pathlib import Path

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq_client import AuthenticationError, Plain, Producer, Security, UndeliveredError
from raftmq_client.core.client import ClientCore, ClientOptions
from tests.client.drivers import Driver
from tests.client.fake_broker import FakeBroker
from tests.client.test_producer_core import World

ROOT = Path(__file__).parent.parent.parent


def said(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[tuple[str, str]]:
    """(logger, level) of what the client said."""
    return [
        (item.name, item.levelname)
        for item in caplog.records
        if item.name.startswith("raftmq_client") and item.levelno >= level
    ]


def test_nothing_is_said_while_all_is_well(
    broker: FakeBroker, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with driver.producer(broker.address) as producer:
        producer.send("t", b"x", partition=0).result(10)
    assert said(caplog) == []
    assert ("raftmq_client.connection", "DEBUG") in said(caplog, logging.DEBUG)


def test_an_address_where_nobody_is_is_told_once(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with driver.producer(f"127.0.0.1:{port}", delivery_timeout_ms=700) as producer:
        assert producer.send("t", b"x").error is None
        with pytest.raises(UndeliveredError):
            producer.close()
    warnings = [item for item in caplog.records if item.levelno == logging.WARNING]
    assert [item.name for item in warnings] == [
        "raftmq_client.connection",
        "raftmq_client.producer",
    ]
    assert f"tried 127.0.0.1:{port}" in warnings[0].getMessage()
    assert "records of 't' are not delivered" in warnings[1].getMessage()


def test_a_lost_connection_is_told_once_and_so_is_its_return(
    broker: FakeBroker, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with driver.producer(broker.address) as producer:
        producer.send("t", b"x", partition=0).result(10)
        broker.fault(ApiKey.PRODUCE, "drop")
        producer.send("t", b"y", partition=0).result(10)
    text = caplog.text
    assert text.count("lost the connection to '127.0.0.1'") == 1
    assert "can be reached (again)" in text or "no broker can be reached" not in text


def test_a_broker_that_was_not_tried_may_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    """The end of one broker is no end of all: others may have had no connection yet."""
    client = ClientCore(ClientOptions(bootstrap=(("127.0.0.1", 1), ("127.0.0.1", 2))))
    first, second = client.links
    client.failed(first, "refused", 0.0)
    assert "no broker can be reached" not in caplog.text
    client.failed(second, "refused", 0.0)
    assert caplog.text.count("no broker can be reached") == 1


def test_wrong_credentials_are_an_error(caplog: pytest.LogCaptureFixture) -> None:
    options = ClientOptions(security=Security(sasl=Plain("u", "hidden")))
    client = ClientCore(options)
    (link,) = client.links
    client._connect(link, 0.0)
    assert link.connection is not None
    link.connection.fail("who is that?", 0.0, AuthenticationError("who is that?"))
    client.failed(link, "who is that?", 0.0)
    assert ("raftmq_client.connection", "ERROR") in said(caplog)
    assert "hidden" not in caplog.text


def test_a_topic_that_does_not_get_on_is_told_once_and_when_it_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    world = World()
    world.send(b"x")
    world.step()
    for _ in range(100):
        while world.calls:
            world.refuse(world.calls.popleft(), ErrorCode.NOT_ENOUGH_REPLICAS)
        world.later(100)
    assert caplog.text.count("topic t does not get on") == 1
    assert "NOT_ENOUGH_REPLICAS" in caplog.text
    while not world.calls:
        world.later(100)
    world.serve(world.calls.popleft())
    world.later(100)
    assert caplog.text.count("topic t gets on again") == 1


def test_a_topic_that_waits_alone_is_told_by_its_own_timer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    world.metadata.topics.clear()
    world.core.send("u", (None, b"x", 1, ()), None, None, 0.0)
    world.core.calls(0.0)
    at = world.core.deadline()
    world.core.calls(at)
    assert "topic u does not get on" in caplog.text


def test_the_names_are_documented() -> None:
    sources = [*(ROOT / "client").rglob("*.py")]
    names = {
        name for path in sources for name in re.findall(r'getLogger\("([^"]+)"\)', path.read_text())
    }
    page = (ROOT / "docs" / "client.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
    assert len(names) >= 3


def test_a_producer_as_logging_handler_does_not_enter_itself(broker: FakeBroker) -> None:
    """Who sends logs to the cluster meets records that the producer itself logs."""
    failures: list[BaseException] = []

    class Sending(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                producer.send("t", record.getMessage().encode(), partition=1)
            except Exception as error:  # noqa: BLE001 - looked at below
                failures.append(error)

    handler = Sending(logging.DEBUG)
    log = logging.getLogger("raftmq_client")
    before = log.level
    producer = Producer(broker.address)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        for number in range(5):
            broker.fault(ApiKey.PRODUCE, "drop")
            assert producer.send("t", b"%d" % number, partition=0).result(10).partition == 0
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        producer.close()
    assert all("inside the client already" in str(error) for error in failures)
