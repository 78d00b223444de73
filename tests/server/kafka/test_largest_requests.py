"""The largest request of every API is answered in turns that hold nobody up.

A turn is measured in CPU time of the thread, so that a busy machine does not matter.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from raftmq.config import NodeConfig
from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import (
    AdminRequest,
    AlterConfigsCall,
    Asker,
    CreatePartitionsCall,
    CreateTopicsCall,
    DeleteTopicsCall,
    Outcome,
    PlanMovesCall,
)
from raftmq.promise import Promise
from raftmq.protocol import ANNOUNCED, ApiKey, encode_request
from raftmq.server.kafka.handlers.configs import DESCRIBED_BYTES_MAX
from tests.groups.world import Nodes
from tests.server.kafka.largest_requests import BODIES, CONTROL_BYTES_MAX, NAMES, PARTITIONS
from tests.server.kafka.world import FakeSlot, World

TURN_MS_MAX = NodeConfig.__attrs_attrs__.tick_ms.default * 6 / 4  # type: ignore[attr-defined]
"""A quarter of the election timeout."""


def test_every_announced_api_has_a_row() -> None:
    assert {api for api, _ in BODIES} == set(ANNOUNCED)


class Turns:
    """The longest turn so far, in milliseconds of this thread's CPU time."""

    def __init__(self) -> None:
        self.longest_ms = 0.0
        self.count = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.longest_ms = max(self.longest_ms, (time.thread_time() - began) * 1e3)
        self.count += 1


def decided(request: AdminRequest, _asker: Asker) -> Promise[tuple[Outcome, ...]]:
    """What a controller says, without its work."""
    done = ErrorCode.NONE
    if isinstance(request, CreateTopicsCall | CreatePartitionsCall):
        return Promise.resolved(tuple(Outcome(name=one.name, code=done) for one in request.topics))
    if isinstance(request, DeleteTopicsCall):
        keys = [*request.names, *map(str, request.topic_ids)]
        return Promise.resolved(tuple(Outcome(name=key, code=done) for key in keys))
    if isinstance(request, PlanMovesCall):
        return Promise.resolved(tuple(Outcome(name=one.topic) for one in request.moves))
    assert isinstance(request, AlterConfigsCall)
    return Promise.resolved(
        tuple(Outcome(name=one.resource_name, resource_type=2) for one in request.resources)
    )


@pytest.fixture(scope="module")
def world() -> World:
    world = World()
    world.add_topic("t", PARTITIONS)
    nodes = Nodes(1)
    world.broker.coordinator = nodes.coordinators[1]
    world.controller.call = decided  # type: ignore[method-assign]
    return world


@pytest.mark.parametrize(("api", "kind"), BODIES, ids=lambda value: str(value).lower())
def test_its_largest_request_holds_nobody_up(world: World, api: ApiKey, kind: str) -> None:
    version, make = BODIES[api, kind]
    body = make()
    assert len(body) < CONTROL_BYTES_MAX

    def longest_turn_ms() -> float:
        turns = Turns()
        slot = ask(world, turns, api, version, body)
        assert not slot.is_failed
        return turns.longest_ms

    hold_nobody_up(longest_turn_ms, 4)


def test_configs_of_many_topics_hold_nobody_up() -> None:
    """The largest answer, about topics that have nothing in common."""
    world = World()
    names = NAMES[:4_000]
    for number, name in enumerate(names):
        world.add_topic(name, 0, **{"retention.ms": str(number)})
    fields = {
        "resources": [
            {"resource_type": 2, "resource_name": name, "configuration_keys": None}
            for name in names
        ],
        "include_synonyms": True,
        "include_documentation": True,
    }
    body = encode_request(ApiKey.DESCRIBE_CONFIGS, 4, fields)

    def longest_turn_ms() -> float:
        turns = Turns()
        slot = ask(world, turns, ApiKey.DESCRIBE_CONFIGS, 4, body)
        assert slot.pieces is not None
        size = sum(map(len, slot.pieces))
        assert 0 < size < DESCRIBED_BYTES_MAX
        return turns.longest_ms

    hold_nobody_up(longest_turn_ms, 3)


def hold_nobody_up(ask_once: Callable[[], float], tries: int) -> None:
    """Ask until the longest turn is short enough; what is compiled at first use, or what a machine
    does beside, is not the request's."""
    longest: list[float] = []
    while len(longest) < tries:
        longest.append(ask_once())
        if longest[-1] < TURN_MS_MAX:
            return
    pytest.fail(f"turns of {longest} ms")


def ask(world: World, turns: Turns, api: ApiKey, version: int, body: bytes) -> FakeSlot:
    gc.disable()  # a full collection is the process', whoever asked last
    try:
        with turns.turn():
            slot = world.begin(api, version, body)
        deadlines = world.bench.deadlines
        while slot.pieces is None and not slot.is_failed and world.broker.scheduler:
            with turns.turn():
                deadlines.expire(world.bench.clock.monotonic_ms(), count_max=128)
    finally:
        gc.enable()
    for callback in list(world.connection.on_close.values()):
        callback()
    return slot
