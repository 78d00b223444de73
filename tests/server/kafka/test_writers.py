"""Who still writes to what is listed no more: named by its own words, bounded, forgotten soon."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.image import TopicImage, ViewImage
from raftmq.protocol import ApiKey
from raftmq.records import NewRecord, build_batch
from raftmq.server.kafka import writers as module
from raftmq.server.kafka.writers import FORGOTTEN_MS, NAME_MAX, WRITERS_MAX, RetiredWriters
from raftmq.types import TopicId, TopicPartition
from tests.groups.world import FakeClock
from tests.server.kafka.world import World, context_of


def shrunk(world: World) -> TopicImage:
    """A topic of three partitions that lists one."""
    world.add_topic("t", 3)
    topics = world.engine.image.topics
    whole = topics["t"]
    topic = evolve(whole, partitions=whole.partitions[:1], retired=whole.partitions[1:])
    view = ViewImage("t.retired", TopicId(UUID(int=9)), whole.topic_id, 3)
    world.engine.change(topics=topics.set("t", topic), views=Map({view.name: view}))
    return topic


def test_who_writes_to_what_is_listed_no_more_is_noted() -> None:
    world = World()
    topic = shrunk(world)
    name = {"client_software_name": "librdkafka", "client_software_version": "2.16.0"}
    assert world.ask(ApiKey.API_VERSIONS, 3, **name).error_code == ErrorCode.NONE
    bad = {"client_software_name": "-", "client_software_version": "1"}
    world.ask(ApiKey.API_VERSIONS, 3, **bad)
    batch = build_batch([NewRecord(None, b"v")], timestamp=1_000_000)
    world.produce(9, [("t", 0, bytearray(batch)), ("t", 2, bytearray(batch))])
    world.bench.sleep(2_500)
    writers = world.broker.retired_writers
    told = {"client_id": "client", "software": "librdkafka 2.16.0", "host": "10.0.0.9"}
    assert [writers.of(topic, index) for index in (0, 1)] == [[], []]
    assert writers.of(topic, 2) == [told | {"ago_s": 2.5}]
    world.produce(9, [("t", 2, bytearray(batch))])
    assert [row["ago_s"] for row in writers.of(topic, 2)] == [0.0], "one row for one client"
    listed = evolve(topic, partitions=topic.held, retired=())
    assert writers.of(listed, 2) == []
    world.bench.sleep(FORGOTTEN_MS)
    assert writers.of(topic, 2) == []


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARTITIONS_MAX", 2)
    world = World()
    topic = evolve(shrunk(world), partitions=())
    image: Any = SimpleNamespace(topics={"t": topic})
    writers = RetiredWriters(FakeClock())
    for number in range(WRITERS_MAX + 2):
        context = context_of(ApiKey.PRODUCE, 9, client_id=f"{number}" + "x" * 1_000)
        writers.note(image, TopicPartition("t", 0), context)
    told = writers.of(topic, 0)
    assert len(told) == WRITERS_MAX
    assert told[0]["client_id"].startswith(f"{WRITERS_MAX + 1}x"), "the latest"
    assert {len(row["client_id"]) for row in told} == {NAME_MAX}
    for number in (1, 0, 2):
        writers.note(image, TopicPartition("t", number), context)
    assert [bool(writers.of(topic, number)) for number in range(3)] == [True, False, True]
