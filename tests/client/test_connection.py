"""One connection: answers in order, honest outcomes, and no trust in bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from raftmq.protocol import (
    ANNOUNCED,
    ApiKey,
    Struct,
    decode_request_header,
    encode_response,
    encode_response_header,
)
from raftmq_client.core.call import Call, struct_call
from raftmq_client.core.client import ClientCore, ClientOptions
from raftmq_client.core.connection import ConnectionCore
from raftmq_client.errors import (
    ClientError,
    ConnectionFailedError,
    ConnectionLostError,
    CorruptAnswerError,
    Outcome,
    TimedOutError,
    UnsupportedError,
)


class Line:
    """A connection and what a broker would see and say on it."""

    def __init__(self, versions: dict[ApiKey, tuple[int, int]] | None = None) -> None:
        self.core = ConnectionCore("test")
        self.core.start(0)
        self.versions = versions or ANNOUNCED
        self.results: list[tuple[Any, ClientError | None]] = []

    def shake(self) -> None:
        keys = [
            Struct(api_key=api, min_version=low, max_version=high)
            for api, (low, high) in self.versions.items()
        ]
        (correlation_id,) = self.asked()
        self.say(ApiKey.API_VERSIONS, 3, correlation_id, Struct(error_code=0, api_keys=keys))

    def asked(self) -> list[int]:
        """Correlation ids of the requests written since."""
        data = b"".join(bytes(piece) for piece in self.core.outgoing())
        ids = []
        while data:
            (size,) = struct.unpack_from(">i", data)
            header, _ = decode_request_header(memoryview(data[4 : 4 + size]))
            ids.append(header.correlation_id)
            data = data[4 + size :]
        return ids

    def say(self, api: ApiKey, version: int, correlation_id: int, body: Struct) -> None:
        data = encode_response_header(api, version, correlation_id)
        self.give(data + encode_response(api, version, body))

    def give(self, frame: bytes) -> None:
        data = struct.pack(">i", len(frame)) + frame
        while data:
            buffer = self.core.buffer()
            part = data[: len(buffer)]
            buffer[: len(part)] = part
            self.core.received(len(part), 1)
            data = data[len(part) :]

    def call(self, deadline: float = 1_000, *, is_expendable: bool = False) -> Call:
        call = struct_call(
            ApiKey.HEARTBEAT,
            Struct(group_id="g", generation_id=1, member_id="m"),
            lambda response, error, _now: self.results.append((response, error)),
            is_expendable=is_expendable,
        )
        call.deadline = deadline
        self.core.submit(call, 0)
        return call


def test_calls_wait_for_the_handshake_and_are_answered_in_order() -> None:
    line = Line()
    line.call()
    line.call()
    line.shake()
    first, second = line.asked()
    line.say(ApiKey.HEARTBEAT, 4, first, Struct(error_code=22))
    line.say(ApiKey.HEARTBEAT, 4, second, Struct(error_code=25))
    assert [response.error_code for response, _ in line.results] == [22, 25]


def test_an_answer_out_of_order_ends_the_connection_in_doubt() -> None:
    line = Line()
    line.shake()
    line.call()
    (asked,) = line.asked()
    line.say(ApiKey.HEARTBEAT, 4, asked + 1, Struct(error_code=0))
    assert line.core.is_closed
    ((_, error),) = line.results
    assert isinstance(error, ConnectionLostError)
    assert error.outcome is Outcome.UNKNOWN


@pytest.mark.parametrize(
    "frame",
    [b"", b"\x00\x00", struct.pack(">i", 2), struct.pack(">i", 2) + b"\x00\x00\x00"],
    ids=["empty", "short header", "no body", "short body"],
)
def test_garbage_ends_the_connection_and_nothing_else(frame: bytes) -> None:
    line = Line()
    line.shake()
    line.call()
    line.asked()
    line.give(frame)
    assert line.core.is_closed
    ((_, error),) = line.results
    assert isinstance(error, ConnectionLostError | CorruptAnswerError)


def test_a_lost_connection_tells_what_had_left() -> None:
    line = Line()
    line.call()
    line.core.received(0, 5)
    ((_, error),) = line.results
    assert isinstance(error, ConnectionFailedError)
    assert error.outcome is Outcome.FAILED
    line = Line()
    line.shake()
    line.call()
    line.core.fail("cut", 5)
    ((_, error),) = line.results
    assert isinstance(error, ConnectionLostError)
    line.call()
    assert isinstance(line.results[1][1], ConnectionFailedError)


def test_an_overdue_answer_costs_the_connection() -> None:
    line = Line()
    line.shake()
    line.call(deadline=100)
    line.call(deadline=900)
    assert line.core.deadline() == 100
    line.core.expire(100)
    assert [type(error) for _, error in line.results] == [TimedOutError, ConnectionLostError]


def test_an_expendable_call_is_given_up_alone_and_its_late_answer_dropped() -> None:
    line = Line()
    line.shake()
    line.call(deadline=100, is_expendable=True)
    line.call(deadline=900)
    line.core.expire(100)
    assert not line.core.is_closed
    assert line.core.is_suspect
    assert line.core.deadline() == 900
    first, second = line.asked()
    line.say(ApiKey.HEARTBEAT, 4, first, Struct(error_code=0))
    assert not line.core.is_suspect
    line.say(ApiKey.HEARTBEAT, 4, second, Struct(error_code=0))
    assert [error is None for _, error in line.results] == [False, True]


def test_a_broker_silent_for_long_is_given_up() -> None:
    line = Line()
    line.shake()
    line.call(deadline=100, is_expendable=True)
    line.core.expire(100)
    line.core.expire(line.core.deadline())
    assert line.core.is_closed


def test_an_api_that_is_not_offered_is_refused_without_a_byte() -> None:
    line = Line({ApiKey.FETCH: (4, 4)})
    line.shake()
    line.call()
    ((_, error),) = line.results
    assert isinstance(error, UnsupportedError)
    assert line.asked() == []


Finish = Callable[[Any, ClientError | None, float], None]


def anywhere(finish: Finish) -> Call:
    return struct_call(ApiKey.LIST_GROUPS, Struct(), finish, timeout_ms=5_000)


def test_bootstrap_addresses_are_tried_one_after_the_other() -> None:
    core = ClientCore(ClientOptions(bootstrap=(("a", 1), ("b", 2))))
    core.cores.clear()
    core.submit(anywhere(lambda *_: None), 0)
    core.step(0)
    (first,) = core.take_connects()
    core.step(1)
    assert core.take_connects() == []
    core.failed(first, "refused", 2)
    core.step(2)
    (second,) = core.take_connects()
    assert {first.host, second.host} == {"a", "b"}
    assert core.deadline() > 2


def test_a_broker_that_accepts_but_is_silent_gets_company() -> None:
    core = ClientCore(ClientOptions(bootstrap=(("a", 1), ("b", 2))))
    core.cores.clear()
    core.submit(anywhere(lambda *_: None), 0)
    core.step(0)
    (first,) = core.take_connects()
    core.connected(first, 1)
    core.step(2)
    assert core.take_connects() == []
    core.step(core.deadline())
    (second,) = core.take_connects()
    assert second is not first


def test_when_nobody_answers_the_reason_is_told() -> None:
    core = ClientCore(ClientOptions(bootstrap=(("a", 1),)))
    core.cores.clear()
    results: list[ClientError | None] = []
    core.submit(anywhere(lambda _response, error, _now: results.append(error)), 0)
    now = 0.0
    while not results:
        core.step(now)
        for link in core.take_connects():
            core.failed(link, "connection refused", now)
        assert core.deadline() > now or results, "it must not spin"
        now = core.deadline()
    (error,) = results
    assert isinstance(error, TimedOutError)
    assert error.outcome is Outcome.FAILED
    assert "a:1" in str(error)
    assert "connection refused" in str(error)
