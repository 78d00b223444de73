"""What handlers are told of a request: its own facts, also when others began meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from attrs.exceptions import FrozenInstanceError

from raftmq.promise import Promise
from raftmq.protocol import ApiKey, encode_request, encode_request_header
from raftmq.server.kafka.authentication import Caller
from raftmq.server.kafka.dispatch import Dispatcher
from raftmq.server.kafka.leader_waits import Hold
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import Work, value_of
from tests.server.kafka.world import FakeSlot, World

ANSWER = {"throttle_time": 0, "error_code": 0, "error_message": None}


class Asked:
    """A handler that is told its contexts, before it waits and after."""

    def __init__(self) -> None:
        self.before: list[RequestContext] = []
        self.after: list[RequestContext] = []
        self.waits: list[Promise[None]] = []

    def __call__(
        self, _broker: object, context: RequestContext, _request: object
    ) -> Work[dict[str, Any]]:
        self.before.append(context)
        wait: Promise[None] = Promise()
        self.waits.append(wait)
        yield from value_of(wait)
        self.after.append(context)
        return {**ANSWER, "topics": []}


def connected(world: World, peer: str, caller: Caller) -> Any:
    fields = {"peer": peer, "hold": Hold(), "caller": caller, "on_close": {}}
    return SimpleNamespace(**{**vars(world.connection), **fields})


def asked(dispatcher: Dispatcher, connection: Any, correlation_id: int, client_id: str) -> FakeSlot:
    api, version = ApiKey.LIST_PARTITION_REASSIGNMENTS, 0
    head = encode_request_header(api, version, correlation_id, client_id)
    body = encode_request(api, version, {"timeout": 1000, "topics": None})
    slot: Any = FakeSlot()
    dispatcher.begin(memoryview(bytearray(head + body)), slot, connection)
    found: FakeSlot = slot
    return found


def test_each_request_keeps_its_own_facts() -> None:
    world = World()
    handler = Asked()
    dispatcher = Dispatcher(world.broker, {ApiKey.LIST_PARTITION_REASSIGNMENTS: handler})
    first = connected(world, "10.0.0.1:1", Caller("User:a", "10.0.0.1", "SECURE"))
    second = connected(world, "[::1]:2", Caller(host="[::1]"))
    known = set(vars(world.broker))
    began_ms = world.bench.clock.now_ms
    asked(dispatcher, first, 7, "one")
    world.bench.sleep(5)
    asked(dispatcher, second, 8, "two")
    first.caller = Caller("User:b", "10.0.0.1", "SECURE")  # which later requests of it have
    for wait in handler.waits:
        wait.resolve(None)
    world.bench.sleep(5)
    assert handler.after == handler.before
    one, two = handler.after
    assert (one.connection, one.host, one.client_id) == (first, "10.0.0.1", "one")
    assert (two.connection, two.host, two.client_id) == (second, "[::1]", "two")
    assert (one.hold, two.hold) == (first.hold, second.hold)
    assert (one.principal, two.principal) == ("User:a", "User:ANONYMOUS")
    assert (one.correlation_id, two.correlation_id) == (7, 8)
    assert (one.received_ms, two.received_ms) == (began_ms, began_ms + 5)
    assert {context.api_version for context in handler.after} == {0}
    assert (one.listener_name, two.listener_name) == ("SECURE", "PLAINTEXT")
    assert set(vars(world.broker)) == known, "nothing of a request is kept there"


def test_a_context_is_frozen() -> None:
    world = World()
    context = RequestContext(world.connection, 3, 12, 1, "c", Caller(), 0.0)
    with pytest.raises(FrozenInstanceError):
        context.caller = Caller("User:x")  # type: ignore[misc]
