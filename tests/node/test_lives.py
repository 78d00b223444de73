"""Lives of a partition's number: each is another partition, on disk and in all tables of a node."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import attrs
import pytest
from immutables import Map

from jepsen_like.disk import SimDisk
from raftmq.errors import ErrorCode
from raftmq.log.folders import FIRST_LIFE, find_folders
from raftmq.metadata.image import (
    LEVEL_OF_MOVES,
    RAFTMQ_LEVEL,
    MetadataImage,
    NumberImage,
    PartitionImage,
    RemovalImage,
    TopicImage,
)
from raftmq.node.partitions import Partitions
from raftmq.partition.partition import Partition
from raftmq.partition.ports import AppendResult
from raftmq.ports import DiskError
from raftmq.records import NewRecord, build_batch
from raftmq.types import RaftGroupId, TopicId, TopicPartition
from tests.node.test_partitions import ONE, Bench

TOPIC = TopicId(UUID(int=1))
NAME = TopicPartition("t", 0)
FIRST, SECOND, THIRD = (RaftGroupId(TOPIC, 0, epoch) for epoch in (1, 9, 20))
PLACE = Path("/node")
ROOT = f"/node/topics/t-{TOPIC}"


def picture(version: int, holds: RaftGroupId | None, *orders: RaftGroupId) -> MetadataImage:
    """This node is the only one that has the partition, and has these orders to delete."""
    partitions = ()
    if holds is not None:
        row = PartitionImage(0, holds.creation_epoch, (ONE.node_id,), (ONE,), (ONE.node_id,))
        if holds != FIRST:
            row = attrs.evolve(row, after_epoch=holds.creation_epoch * 1_000)
        partitions = (row,)
    return MetadataImage(
        version=version,
        structure_version=version,
        topics=Map(t=TopicImage("t", TOPIC, partitions, Map())),
        topic_names=Map({TOPIC: "t"}),
        removals=Map({group: RemovalImage("t", group, (ONE.node_id,)) for group in orders}),
        features=Map({RAFTMQ_LEVEL: LEVEL_OF_MOVES}),
    )


class Node(Bench):
    """The partitions of a node on a disk that can lose power."""

    def __init__(self, disk: SimDisk) -> None:
        super().__init__(PLACE, disk)
        self.disk = disk

    @classmethod
    async def begun(cls, disk: SimDisk, image: MetadataImage) -> Node:
        node = cls(disk)
        node.control.engine.image = image
        await node.partitions.start()
        return node

    async def see(self, image: MetadataImage) -> None:
        """The metadata becomes so, and the node does what follows."""
        before = self.control.engine.image
        self.control.engine.image = image
        self.partitions._image_changed(before, image)
        await self.obey()

    async def restart(self, image: MetadataImage, odds: Random | None = None) -> Node:
        """Power is lost; the node comes back when the metadata is so."""
        self.disk.crash(odds)
        return await Node.begun(self.disk, image)

    def partition(self, group: RaftGroupId) -> Partition:
        found = self.partitions.registry.by_group(group)
        assert found is not None
        return found

    def write(self, group: RaftGroupId, count: int) -> None:
        """Lead the group, and have so many records flushed and committed in it."""
        replica = self.multiraft.replicas[group]
        if not replica.is_writable:
            replica.stand()
        self.settle()
        for number in range(count):
            value = f"{group}/{number}".encode()
            batch = memoryview(bytearray(build_batch([NewRecord(None, value)], timestamp=1)))
            answer: Any = self.partition(group).append(batch, -1, 1_000)
            self.settle()
            answer = answer if isinstance(answer, AppendResult) else answer.result()
            assert not answer.code, answer

    def send(self, group: RaftGroupId, sequence: int) -> AppendResult:
        """What the leader answers to a batch of an idempotent producer."""
        replica = self.multiraft.replicas[group]
        if not replica.is_writable:
            replica.stand()
        self.settle()
        record = NewRecord(None, b"%d" % sequence)
        batch = build_batch(
            [record], timestamp=1, producer_id=7, producer_epoch=0, base_sequence=sequence
        )
        answer: Any = self.partition(group).append(memoryview(batch), -1, 1_000)
        self.settle()
        return answer if isinstance(answer, AppendResult) else answer.result()

    def settle(self) -> None:
        for _ in range(3):
            self.multiraft.drain()

    def count(self, group: RaftGroupId) -> int:
        return int(self.multiraft.replicas[group].log.log_end_offset)

    @property
    def lives(self) -> list[int]:
        """Of which folders are on the disk."""
        return [folder.life for folder in find_folders(self.disk, "/node/topics")]

    @property
    def shelved(self) -> list[str]:
        return [name.partition("-partition-")[2].rpartition("-")[0] for name in self._shelf]

    @property
    def _shelf(self) -> list[str]:
        return self.disk.list("/node/quarantine")


@pytest.fixture
async def node() -> Node:
    """It runs the first life, which has three records."""
    disk = SimDisk(Random(1))
    disk.make_directories(str(PLACE))
    node = await Node.begun(disk, picture(1, FIRST))
    node.write(FIRST, 3)
    return node


def next_life(version: int, begins_at: int, producers: bytes, *orders: Any) -> MetadataImage:
    """The second life, whose log goes on with what the first one knew of producers."""
    image = picture(version, SECOND, *orders)
    topic = image.topics["t"]
    row = attrs.evolve(topic.partitions[0], begins_at=begins_at)
    number = NumberImage(begins_at, 8_000, producers)
    topic = attrs.evolve(topic, partitions=(row,), numbers=Map({0: number}))
    return attrs.evolve(image, topics=Map(t=topic))


async def test_a_life_knows_the_producers_of_the_one_before(node: Node) -> None:
    """What was sent to the first one is no second copy in the next, and what follows it is taken at
    once; so it is on a node that begins again, and when the log has moved on."""
    assert [node.send(FIRST, i).base_offset for i in (0, 1)] == [3, 4]
    known = node.partition(FIRST).producers.newest(1 << 15)
    image = next_life(2, 5, known, FIRST)
    await node.see(image)
    again = [node.send(SECOND, i) for i in (0, 1)]
    assert [(sent.code, sent.base_offset) for sent in again] == [
        (ErrorCode.NONE, 3 + i) for i in (0, 1)
    ]
    assert node.count(SECOND) == 5
    assert node.send(SECOND, 3).code is ErrorCode.NOT_LEADER_OR_FOLLOWER, "2 may be under way"
    assert node.send(SECOND, 4).code is ErrorCode.NOT_LEADER_OR_FOLLOWER, "3 was refused"
    assert [node.send(SECOND, i).base_offset for i in (2, 3)] == [5, 6]
    for _ in range(2):
        node = await node.restart(image)
        node.settle()
        assert node.send(SECOND, 1).base_offset == 4
        assert node.send(SECOND, 3).base_offset == 6
    assert node.send(SECOND, 4).base_offset == 7


async def test_a_life_that_knows_nothing_of_the_one_before_lets_wait(node: Node) -> None:
    """Whatever stands in the metadata: it is no reason not to begin."""
    node.send(FIRST, 0)
    elsewhere = node.partition(FIRST).producers.newest(1 << 15)
    node.send(FIRST, 1)
    for version, producers in enumerate((b"", b"damaged", elsewhere), 2):
        await node.see(picture(version, None, FIRST))
        node.control.engine.image = picture(version, None)
        await node.see(next_life(10 + version, 5, producers))
        assert node.send(SECOND, 2).code is ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert node.count(SECOND) == 5
        await node.see(picture(20 + version, None, SECOND))


async def test_the_first_life_is_where_it_always_was(node: Node) -> None:
    assert node.lives == [FIRST_LIFE]
    assert node.disk.exists(f"{ROOT}/partition-0/log-start")
    node = await node.restart(picture(1, FIRST))
    assert node.count(FIRST) == 3
    assert node.lives == [FIRST_LIFE]


async def test_a_life_goes_and_the_next_one_begins_empty(node: Node) -> None:
    await node.see(picture(2, None, FIRST))
    assert node.removed == [FIRST]
    assert node.lives == []
    await node.see(picture(3, SECOND))
    assert node.count(SECOND) == 0
    assert node.lives == [SECOND.creation_epoch]
    replica = node.multiraft.replicas[SECOND]
    assert replica.self_id == ONE, "in this life it has promised nothing yet"
    assert replica.core.is_voter
    node.write(SECOND, 2)
    node = await node.restart(picture(3, SECOND))
    assert node.count(SECOND) == 2


@pytest.mark.parametrize("is_ordered", [True, False])
async def test_a_crash_between_journal_and_folder(
    node: Node, monkeypatch: pytest.MonkeyPatch, is_ordered: bool
) -> None:
    """The first life's folder is still there when the next life begins: it is no part of that."""

    def fails(_self: Partitions, _order: object) -> None:
        raise DiskError("the power goes")

    with monkeypatch.context() as patch:
        patch.setattr(Partitions, "_remove_folders", fails)
        await node.see(picture(2, None, FIRST))
    assert node.lives == [FIRST_LIFE]
    orders = (FIRST,) if is_ordered else ()
    node = await node.restart(picture(3, SECOND, *orders))
    assert node.count(SECOND) == 0
    assert node.multiraft.replicas[SECOND].self_id == ONE
    assert node.lives == [SECOND.creation_epoch]
    assert node.removed == list(orders)
    assert node.shelved == ([] if is_ordered else ["0"])
    node.write(SECOND, 2)


async def test_what_cannot_go_yet_is_not_in_the_way(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses to delete the first life, and the node goes on with the next one."""

    def fails(_self: Partitions, _order: object) -> None:
        raise DiskError("Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Partitions, "_remove_folders", fails)
        await node.see(picture(2, SECOND, FIRST))
    node.write(SECOND, 2)
    assert node.lives == [FIRST_LIFE, SECOND.creation_epoch]
    node.partitions.stop_again()
    await node.obey()
    assert node.removed == [FIRST]
    assert node.lives == [SECOND.creation_epoch]
    assert node.partitions.registry.by_id(TOPIC, 0) is node.partition(SECOND)
    assert node.count(SECOND) == 2


async def test_an_order_of_an_earlier_life_touches_nothing_of_the_next(node: Node) -> None:
    """It comes when the next life is under way: this node had let the first one go before."""
    await node.see(picture(2, None, FIRST))
    await node.see(picture(3, SECOND))
    node.write(SECOND, 2)
    replica = node.multiraft.replicas[SECOND]
    await node.see(picture(4, SECOND, FIRST))
    assert node.removed == [FIRST, FIRST]
    assert node.multiraft.replicas[SECOND] is replica
    assert replica.failure is None
    assert node.partitions.registry.by_name("t", 0) is node.partition(SECOND)
    node.write(SECOND, 1)
    node = await node.restart(picture(4, SECOND, FIRST))
    assert node.count(SECOND) == 3
    assert node.lives == [SECOND.creation_epoch]


async def test_both_lives_are_on_the_disk_at_a_restart(node: Node) -> None:
    """Where nothing orders the first life away it is put aside, and the next one goes on."""
    await node.see(picture(2, SECOND))
    node.write(SECOND, 2)
    assert node.lives == [FIRST_LIFE, SECOND.creation_epoch]
    node = await node.restart(picture(2, SECOND))
    assert node.count(SECOND) == 2
    assert node.shelved == ["0"]
    assert node.lives == [SECOND.creation_epoch]


async def test_the_folders_of_two_lives_are_put_aside_side_by_side(node: Node) -> None:
    await node.see(picture(2, SECOND))
    node.write(SECOND, 2)
    node = await node.restart(picture(3, THIRD))
    assert node.shelved == ["0", f"0@{SECOND.creation_epoch}"]
    assert node.lives == [THIRD.creation_epoch]
    assert node.count(THIRD) == 0
    node.write(THIRD, 1)


async def test_a_later_life_goes_by_its_own_order(node: Node) -> None:
    await node.see(picture(2, SECOND, FIRST))
    node.write(SECOND, 2)
    await node.see(picture(3, THIRD, SECOND))
    assert node.removed == [FIRST, SECOND]
    assert node.lives == [THIRD.creation_epoch]
    assert node.disk.list("/node/quarantine") == []


async def test_an_order_of_a_later_life_leaves_alone_what_it_does_not_name(node: Node) -> None:
    await node.see(picture(2, SECOND))
    node.write(SECOND, 2)
    await node.see(picture(3, THIRD, SECOND))
    assert node.removed == [SECOND]
    assert node.lives == [FIRST_LIFE, THIRD.creation_epoch]


async def test_a_lost_folder_of_a_later_life_is_not_a_new_one(node: Node) -> None:
    """What it promised in this life counts, whatever it had promised in the one before."""
    await node.see(picture(2, SECOND, FIRST))
    node.write(SECOND, 2)
    node.disk.crash()
    node.disk.remove_tree(f"{ROOT}/partition-0@{SECOND.creation_epoch}")
    node = await Node.begun(node.disk, picture(2, SECOND))
    replica = node.multiraft.replicas[SECOND]
    assert replica.self_id != ONE
    assert not replica.core.is_voter


async def test_the_mark_of_a_life_that_is_gone_goes(node: Node) -> None:
    """The group had let this node go before it ended, so that no order was left."""
    left = attrs.evolve(picture(2, FIRST, FIRST))
    row = attrs.evolve(left.topics["t"].partitions[0], replicas=(), voters=())
    topic = attrs.evolve(left.topics["t"], partitions=(row,))
    node.multiraft.replicas[FIRST].core.become_follower(2, None)
    await node.see(attrs.evolve(left, topics=left.topics.set("t", topic)))
    assert node.removed == [FIRST]
    assert node.journal.get(FIRST) is not None, "it may come back, as somebody new"
    node = await node.restart(picture(3, SECOND))
    assert node.journal.get(FIRST) is None
    assert node.multiraft.replicas[SECOND].self_id == ONE


@pytest.mark.parametrize("seed", range(15))
async def test_power_fails_at_any_step(seed: int) -> None:
    """Whatever the disk keeps: each life has what was flushed of it, and nothing of another."""
    draw = Random(seed)
    disk = SimDisk(draw)
    disk.make_directories(str(PLACE))
    groups = [RaftGroupId(TOPIC, 0, epoch) for epoch in (1, 9, 20, 31)]
    held, orders = groups[0], list[RaftGroupId]()
    version = 1
    node = await Node.begun(disk, picture(version, held))
    flushed = 0
    for _ in range(8):
        match draw.randrange(3):
            case 0:
                node.write(held, 1)
                flushed += 1
            case 1 if held != groups[-1]:
                orders = [group for group in orders if group not in node.removed] + [held]
                held, flushed, version = groups[groups.index(held) + 1], 0, version + 1
                if draw.random() < 0.5:
                    await node.see(picture(version, held, *orders))
                else:
                    node = await node.restart(picture(version, held, *orders), draw)
            case _:
                node = await node.restart(picture(version, held, *orders), draw)
        assert node.count(held) == flushed
        assert node.multiraft.replicas[held].self_id == ONE
    node = await node.restart(picture(version, held, *orders), draw)
    assert node.count(held) == flushed
    expected = FIRST_LIFE if held == groups[0] else held.creation_epoch
    assert node.lives == [expected]
    assert node.shelved == []
