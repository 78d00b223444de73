"""Requests about many partitions: done in short turns, and refused as politely as others."""

from __future__ import annotations

from raftmq.protocol import ApiKey
from tests.server.world import World


def world_of_one() -> World:
    world = World()
    world.add_topic("t")
    return world


def test_many_partitions_are_looked_at_in_short_turns() -> None:
    world = world_of_one()
    offsets = [
        {"partition_index": index, "current_leader_epoch": -1, "timestamp": -1}
        for index in range(700)
    ]
    epochs = [
        {"partition": index, "current_leader_epoch": -1, "leader_epoch": 5} for index in range(700)
    ]
    for api, version, parts in (
        (ApiKey.LIST_OFFSETS, 7, offsets),
        (ApiKey.OFFSET_FOR_LEADER_EPOCH, 4, epochs),
    ):
        name = "name" if api is ApiKey.LIST_OFFSETS else "topic"
        few = world.ask(api, version, replica_id=-1, topics=[{name: "t", "partitions": parts[:3]}])
        slot = world.send(api, version, replica_id=-1, topics=[{name: "t", "partitions": parts}])
        passes = 0
        while slot.pieces is None:
            world.bench.deadlines.expire(world.bench.clock.monotonic_ms())
            passes += 1
        assert passes > 6, "decoded, looked at and encoded, some hundred at a time"
        many = world.read(api, version, slot)
        assert many.topics[0].partitions[:3] == few.topics[0].partitions
        assert len(many.topics[0].partitions) == 700


def test_a_large_request_that_is_malformed_costs_its_connection() -> None:
    world = world_of_one()
    slot = world.begin(ApiKey.LIST_OFFSETS, 7, bytes(5) + b"\x00\x00\x00\x07" + bytes(20_000))
    while world.broker.slices:
        world.bench.deadlines.expire(world.bench.clock.monotonic_ms())
    assert slot.is_failed
    assert world.broker.metrics.api("list_offsets").failures == 1
