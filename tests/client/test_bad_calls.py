"""Calls that cannot be: refused in the caller's call, which alone fails; what else is on its way
goes on. So it is with addresses that no socket takes."""

from __future__ import annotations

import copy
import pickle
import ssl
from contextlib import ExitStack
from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq_client import (
    BrokerError,
    ClientError,
    CorruptRecordsError,
    Outcome,
    Plain,
    Scram,
    SerializationError,
    TimedOutError,
    UsageError,
)
from raftmq_client.core.call import struct_call
from raftmq_client.core.client import ClientCore, ClientOptions
from raftmq_client.core.security import Security
from tests.client.drivers import Driver
from tests.client.fake_broker import FakeBroker
from tests.client.test_connection import Line

SURROGATE = "t\udc80"
CALLS: dict[str, dict[str, Any]] = {
    "topic with a lone surrogate": {"topic": SURROGATE},
    "topic of 40,000 letters": {"topic": "t" * 40_000},
    "topic of 250 letters": {"topic": "t" * 250},
    "topic with a blank": {"topic": "a b"},
    "topic that is none": {"topic": None},
    "no topic": {"topic": ""},
    "dots": {"topic": ".."},
    "partition True": {"partition": True},
    "partition False": {"partition": False},
    "partition 1.0": {"partition": 1.0},
    "negative partition": {"partition": -1},
    "on_delivery": {"on_delivery": 5},
}
RECORDS: dict[str, dict[str, Any]] = {
    "timestamp True": {"timestamp": True},
    "negative timestamp": {"timestamp": -1},
    "header with a lone surrogate": {"headers": [(SURROGATE, b"")]},
    "header named by bytes": {"headers": [(b"h", b"")]},
    "header of a number": {"headers": [("h", 5)]},
}


@pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS)
def test_a_call_that_cannot_be_fails_alone(
    broker: FakeBroker, driver: Driver, arguments: dict[str, Any]
) -> None:
    fails_alone(broker, driver, arguments, UsageError)


@pytest.mark.parametrize("arguments", RECORDS.values(), ids=RECORDS)
def test_a_record_that_cannot_be_fails_alone(
    broker: FakeBroker, driver: Driver, arguments: dict[str, Any]
) -> None:
    fails_alone(broker, driver, arguments, SerializationError)


def fails_alone(
    broker: FakeBroker, driver: Driver, arguments: dict[str, Any], error: type[ClientError]
) -> None:
    with driver.producer(broker.address, linger_ms=20) as producer:
        before = producer.send("t", b"1", partition=0)
        with pytest.raises(error):
            producer.send(**{"topic": "t", "value": b"x", **arguments})
        after = producer.send("t", b"2", partition=0)
        assert [before.result(10).offset, after.result(10).offset] == [0, 1]


@pytest.mark.parametrize(
    "given", ["text", ["l"], 5, object()], ids=["text", "list", "number", "object"]
)
@pytest.mark.parametrize("which", ["key", "value"])
def test_what_a_serializer_gives_is_looked_at(
    broker: FakeBroker, driver: Driver, which: str, given: object
) -> None:
    def serialize(wanted: object) -> Any:
        return given if wanted == "bad" else b"good"

    options = {f"{which}_serializer": serialize}
    record: dict[str, Any] = {"key": b"k", "value": b"v"}
    with driver.producer(broker.address, linger_ms=20, **options) as producer:
        before = producer.send("t", **{**record, which: "x"}, partition=0)
        with pytest.raises(SerializationError, match=which):
            producer.send("t", **{**record, which: "bad"}, partition=0)
        assert before.result(10).offset == 0


def test_what_is_given_may_be_changed_afterwards(broker: FakeBroker) -> None:
    value, header = bytearray(b"value"), bytearray(b"header")
    with Driver("blocking", None).producer(
        broker.address, linger_ms=50, value_serializer=lambda given: given
    ) as producer:
        receipt = producer.send("t", value, headers=[["h", header]], partition=0)
        value[:], header[:] = b"-----", b"------"
        receipt.result(10)
    (batch,) = broker.logs["t", 0].batches
    assert b"value" in batch
    assert b"header" in batch


def test_a_partitioner_that_says_true_is_refused(broker: FakeBroker, driver: Driver) -> None:
    with driver.producer(broker.address, partitioner=lambda *_: True) as producer:
        with pytest.raises(UsageError, match="the partitioner chose True"):
            producer.send("t", b"x", key=b"k").result(10)
        assert producer.send("t", b"x", partition=0).result(10).offset == 0


@pytest.mark.parametrize("name", [SURROGATE, "n" * 40_000], ids=["surrogate", "long"])
def test_a_question_that_cannot_be_written_fails_alone(
    broker: FakeBroker, driver: Driver, name: str
) -> None:
    with driver.admin(broker.address) as admin:
        for ask in (admin.create_topic, admin.topic, admin.delete_topic, admin.group_offsets):
            with pytest.raises(UsageError):
                ask(name)
        assert admin.topic("t").name == "t"


@pytest.mark.parametrize("name", ["client_id", "group", "instance_id", "rack"])
@pytest.mark.parametrize("text", [SURROGATE, "x" * 40_000, 7], ids=["surrogate", "long", "7"])
def test_settings_that_cannot_be_said_are_refused_by_name(
    driver: Driver, name: str, text: Any
) -> None:
    makers = {"client_id": [driver.producer, driver.consumer, driver.admin]}
    for make in makers.get(name, [driver.consumer]):
        with pytest.raises(UsageError, match=name):
            make("127.0.0.1:1", **{name: text})


@pytest.mark.parametrize("kind", [Plain, Scram])
def test_credentials_that_cannot_be_said_are_refused_without_being_told(kind: Any) -> None:
    for user, password in ((SURROGATE, "x"), ("x", SURROGATE), (None, "x"), ("x", b"secret")):
        with pytest.raises(UsageError) as raised:
            kind(user, password)
        assert "secret" not in str(raised.value)


HOSTS = ["bad\udc80", "x" * 70 + ".example", "two..dots", "a\0b"]


@pytest.mark.parametrize("host", HOSTS, ids=ascii)
def test_a_host_that_no_name_server_takes_counts_as_one_that_does_not_answer(
    broker: FakeBroker, driver: Driver, host: str
) -> None:
    with driver.producer([f"{host}:9092", broker.address]) as producer:
        assert producer.send("t", b"x", partition=0).result(10).offset == 0


NOWHERE = [("x" * 70, 9092), ("127.0.0.1", 70_000), ("127.0.0.1", -5), ("", 1)]


def test_a_broker_that_names_no_address_is_not_reached_and_ends_nothing(driver: Driver) -> None:
    """One for each such address, all at the same time: it takes as long as a record may wait."""
    with ExitStack() as stack:
        brokers = [stack.enter_context(FakeBroker({"t": 2})) for _ in NOWHERE]
        for broker, (host, port) in zip(brokers, NOWHERE, strict=True):
            broker.advertised = (host, port)
        producers = [
            stack.enter_context(driver.producer(broker.address, delivery_timeout_ms=1_500))
            for broker in brokers
        ]
        for receipt in [producer.send("t", b"x", partition=0) for producer in producers]:
            with pytest.raises(TimedOutError) as raised:
                receipt.result(20)
            assert raised.value.outcome is Outcome.FAILED
        for broker in brokers:
            broker.advertised = ("127.0.0.1", broker.port)
        for receipt in [producer.send("t", b"x", partition=0) for producer in producers]:
            assert receipt.result(20).offset == 0


@pytest.mark.parametrize("host", HOSTS, ids=ascii)
def test_a_host_that_no_certificate_can_name_is_not_reached(host: str) -> None:
    security = Security(tls=ssl.create_default_context())
    client = ClientCore(ClientOptions(bootstrap=((host, 1),), security=security))
    failures: list[ClientError | None] = []
    call = struct_call(
        ApiKey.METADATA, lambda _: None, lambda _, error, __: failures.append(error), timeout_ms=100
    )  # type: ignore[arg-type, return-value]  # it is never written
    client.submit(call, 0.0)
    for now in range(0, 2_000, 50):
        client.step(float(now))
    assert [type(error) for error in failures] == [TimedOutError]
    assert "host name" in str(failures[0])


def test_an_answer_that_breaks_its_decoder_ends_one_call_and_its_connection() -> None:
    line = Line()
    line.shake()
    results: list[ClientError | None] = []
    call = line.call()

    def read(_version: int, _body: memoryview) -> None:
        raise ZeroDivisionError("of a kind that no decoder tells")

    call.read = read
    call.finish = lambda _response, error, _now: results.append(error)
    (asked,) = line.asked()
    line.give(b"%b\x00" % asked.to_bytes(4, "big"))
    assert line.core.is_closed
    (error,) = results
    assert error is not None
    assert error.outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    "error",
    [
        TimedOutError("late", sent=True),
        BrokerError(ErrorCode.INVALID_RECORD, "why", about="what"),
        CorruptRecordsError("bad", "t", 1, 5, 9),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_can_be_copied_and_sent_to_other_processes(error: ClientError) -> None:
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error)), error.fresh()):
        assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))
        assert twin.outcome is error.outcome
