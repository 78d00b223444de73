"""Requests about many partitions: done in short turns, and refused as politely as others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raftmq.errors import RemoteProtocolError
from raftmq.ports import DiskError
from raftmq.promise import Promise
from raftmq.protocol import ApiKey, encode_request
from raftmq.records import NewRecord, build_batch
from raftmq.server.kafka.handlers.offsets import COLD_ROUNDS_MAX
from raftmq.server.kafka.work import Work
from tests.server.kafka.world import FakeSlot, World


def world_of_one() -> World:
    world = World()
    world.add_topic("t")
    return world


PARTITIONS = 600


def test_a_fetch_of_many_partitions_takes_turns() -> None:
    world = World()
    world.add_topic("t", PARTITIONS)
    batch = bytes(build_batch([NewRecord(None, b"v")], timestamp=1_000_000))
    wanted = [("t", index, 0) for index in range(PARTITIONS)]

    def turn() -> None:
        world.bench.deadlines.expire(world.bench.clock.monotonic_ms())

    def add(index: int) -> None:
        world.produce(9, [("t", index, bytearray(batch))], acks=1)
        world.replica("t", index).commit(world.replica("t", index).log_end_offset)

    def given(slot: FakeSlot) -> list[int]:
        while slot.pieces is None:
            turn()
        (topic,) = world.fetched(12, slot).topics
        assert len(topic.partitions) == PARTITIONS
        return [row.partition for row in topic.partitions if row.records]

    empty = world.fetch(12, wanted, max_wait_ms=100)  # type: ignore[arg-type]
    while not world.broker.metrics.parked_fetches:
        turn()
    world.bench.sleep(121)
    assert given(empty) == []

    woken = world.fetch(12, wanted, max_wait_ms=500)  # type: ignore[arg-type]
    while not world.broker.metrics.parked_fetches:
        turn()
    add(7)
    assert given(woken) == [7]
    assert world.broker.metrics.parked_fetches == 0

    passed = world.fetch(12, wanted, max_wait_ms=500, min_bytes=len(batch) + 1)  # type: ignore[arg-type]
    turn()
    add(3)  # behind the look, which has passed it
    assert given(passed) == [3, 7]

    gone = world.fetch(12, wanted, max_wait_ms=500, min_bytes=1 << 20)  # type: ignore[arg-type]
    (abandon,) = world.connection.on_close.values()
    abandon()
    while world.broker.scheduler:
        turn()
    assert gone.pieces is not None
    assert world.broker.metrics.parked_fetches == 0

    leaving = world.fetch(12, wanted, max_wait_ms=500, min_bytes=1 << 20)  # type: ignore[arg-type]
    while not world.broker.metrics.parked_fetches:
        turn()
    world.partition("t", 5).stop_waiting()
    assert given(leaving) == [3, 7]


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
    with pytest.raises(RemoteProtocolError):
        world.begin(ApiKey.LIST_OFFSETS, 7, bytes(5) + b"\x00\x00\x00\x07" + bytes(20_000))
    assert world.broker.metrics.api("list_offsets").failures == 1
    part = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": -1}
    fields = {"replica_id": -1, "topics": [{"name": "t", "partitions": [part] * 1000}] * 2}
    slot = world.begin(ApiKey.LIST_OFFSETS, 7, encode_request(ApiKey.LIST_OFFSETS, 7, fields)[:-9])
    while world.broker.scheduler:
        world.bench.deadlines.expire(world.bench.clock.monotonic_ms())
    assert slot.is_failed, "found out in a later turn"
    assert world.broker.metrics.api("list_offsets").failures == 2


@pytest.mark.parametrize("rounds", [1, 2, 100])
def test_a_look_up_by_time_lets_workers_read_what_is_cold(rounds: int) -> None:
    world = World()
    world.add_topic("t")
    for i in range(3):
        batch = build_batch([NewRecord(None, b"v")], timestamp=1_000_000 + i)
        world.produce(9, [("t", 0, batch)], acks=1)
    world.replica("t").commit(2)
    started: list[Promise[None]] = []
    ran: list[int] = []

    def submit(work: Any) -> Promise[None]:
        work()
        started.append(Promise())
        return started[-1]

    world.broker.workers = SimpleNamespace(submit=submit)  # type: ignore[assignment]
    jobs: Any = [SimpleNamespace(run=lambda n=n: ran.append(n)) for n in range(rounds)]
    world.replica("t").log.cold_jobs = jobs
    wishes = [
        {"partition_index": index, "current_leader_epoch": -1, "timestamp": stamp}
        for index, stamp in ((0, 1_000_001), (0, -1), (9, 1_000_001))
    ]
    topics = [{"name": "t", "partitions": wishes}]
    slot = world.send(ApiKey.LIST_OFFSETS, 7, replica_id=-1, topics=topics)
    for number in range(min(rounds, COLD_ROUNDS_MAX)):
        assert slot.pieces is None
        assert len(ran) == number + 1
        if number:
            started[-1].resolve(None)
        else:
            started[-1].fail(DiskError("the device failed"))  # shows when the log is asked
        for _ in range(3):
            world.bench.deadlines.expire(world.bench.clock.now_ms)
    rows = world.read(ApiKey.LIST_OFFSETS, 7, slot).topics[0].partitions
    assert [(row.error_code, row.offset) for row in rows] == [(0, 1), (0, 2), (3, -1)]


class Line:
    def __init__(self) -> None:
        self.told: list[str] = []

    def bar(self) -> None:
        self.told.append("bar")

    def unbar(self) -> None:
        self.told.append("unbar")


@pytest.mark.parametrize(
    ("waits", "told"),
    [
        ([], []),
        ([None, None], ["bar", "unbar"]),
        (["promise", None], []),
        ([None, "promise", None], ["bar", "unbar"]),
        ([None, "error"], ["bar", "unbar"]),
    ],
)
def test_a_line_is_barred_until_its_work_has_asked_for_all(
    waits: list[str | None], told: list[str]
) -> None:
    world, line = World(), Line()
    promise: Promise[None] = Promise()

    def work() -> Work[int]:
        for what in waits:
            if what == "error":
                raise DiskError("gone")
            yield promise if what else None
        return 7

    def turns() -> None:
        while world.broker.scheduler:
            world.bench.deadlines.expire(world.bench.clock.monotonic_ms())

    result = world.broker.scheduler.run(work(), line)
    assert line.told == told[:1]
    turns()
    assert line.told == told, "what it waits for may take long"
    promise.resolve(None)
    turns()
    assert line.told == told
    if isinstance(result, Promise):
        assert result.is_done
        assert isinstance(result.error, DiskError) == ("error" in waits)
