"""Snapshots: the same image gives the same bytes, and damage is never read as state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.metadata.commands import CreateTopics, DeleteTopics
from raftmq.metadata.group_commands import ClaimGroup
from raftmq.metadata.metadata_image import EMPTY_IMAGE
from raftmq.metadata.metadata_snapshot import (
    SnapshotEncoder,
    SnapshotError,
    decode_image,
    encode_image,
)
from raftmq.types import TopicPartition
from tests.metadata.metadata_commands import Machine, creation, node, register, topic_id


def _bytes() -> bytes:
    machine = Machine()
    machine.register_all(1, 2, 3)
    machine.apply(CreateTopics(topics=(creation("a", 1, (1, 2), (3, 1)),)))
    return encode_image(machine.image)


SNAPSHOT = _bytes()


def test_no_bytes_are_the_empty_image() -> None:
    assert decode_image(b"") == EMPTY_IMAGE
    assert decode_image(encode_image(EMPTY_IMAGE)) == EMPTY_IMAGE


@given(position=st.integers(0, len(SNAPSHOT) - 1), flip=st.integers(1, 255))
def test_a_damaged_byte_is_noticed(position: int, flip: int) -> None:
    damaged = bytearray(SNAPSHOT)
    damaged[position] ^= flip
    with pytest.raises(SnapshotError):
        decode_image(damaged)


@given(size=st.integers(1, len(SNAPSHOT) - 1))
def test_a_cut_snapshot_is_noticed(size: int) -> None:
    with pytest.raises(SnapshotError):
        decode_image(SNAPSHOT[:size])


def test_a_newer_format_is_refused_by_name() -> None:
    newer = SNAPSHOT[:4] + b"\x00\x09" + SNAPSHOT[6:]
    with pytest.raises(SnapshotError, match="format 9"):
        decode_image(newer)


def test_order_of_creation_does_not_show() -> None:
    one, other = Machine(), Machine()
    for number in (1, 2, 3):
        one.apply(register(number), submitter=number, sequence=1)
    for number in (1, 2, 3):
        other.apply(register(number), submitter=number, sequence=1)
    names = [f"t{i}" for i in range(30)]
    for machine, order in ((one, names), (other, names)):
        machine.apply(
            CreateTopics(topics=tuple(creation(n, 1 + names.index(n), (1, 2)) for n in order)),
            submitter=9,
            sequence=1,
        )
    assert encode_image(one.image) == encode_image(other.image)


def test_lookups() -> None:
    image = decode_image(SNAPSHOT)
    topic = image.topics["a"]
    assert image.topic_by_id(topic.topic_id) is topic
    assert image.partition(TopicPartition("a", 1)) is topic.partitions[1]
    assert image.partition(TopicPartition("a", 2)) is None
    assert image.partition(TopicPartition("b", 0)) is None
    assert topic.replication_factor == 2
    assert topic.partitions[1].preferred_leader == 3
    assert [b.node_id for b in image.live_brokers()] == [1, 2, 3]
    client = image.brokers[node(2)].endpoint("client")
    assert client is not None
    assert client.port == 9002
    assert image.brokers[node(2)].endpoint("nope") is None


def test_an_encoder_that_is_used_again_gives_the_same_bytes() -> None:
    encoder = SnapshotEncoder()
    machine = Machine()
    machine.register_all(1, 2, 3)
    epoch = machine.image.brokers[node(1)].epoch
    for number in range(1, 30):
        machine.apply(CreateTopics(topics=(creation(f"t{number}", number, (1, 2)),)))
        if number % 4 == 0:
            machine.apply(DeleteTopics(topic_ids=(topic_id(number - 1),)))
        machine.apply(ClaimGroup(group=f"g{number % 5}", node_id=node(1), broker_epoch=epoch))
        if number % 3 == 0:
            encoder.warm(machine.image, 7)
        if number % 7 == 0:
            assert encoder.encode(machine.image) == encode_image(machine.image)
    while not encoder.warm(machine.image, 7):
        pass
    data = encoder.encode(machine.image)
    assert data == encode_image(machine.image)
    assert decode_image(data) == machine.image
