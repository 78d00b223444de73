"""What a leader owes to a partition that its topic lists no more, or lists again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from immutables import Map

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.commands import (
    KNOWN_BYTES_MAX,
    PartitionState,
    ReportGone,
    ReportSealed,
    SealPartitions,
    SealReport,
)
from raftmq.metadata.image import (
    LEVEL_OF_KNOWN_PRODUCERS,
    LEVEL_OF_VIEWS,
    RAFTMQ_LEVEL,
    MetadataImage,
    NumberImage,
    PartitionImage,
    TopicImage,
)
from raftmq.node import retirement
from raftmq.node.retirement import FOLLOW_MS, LOOK_MS, Retirement
from raftmq.partition.producer_state import ProducerStateTable
from raftmq.partition.registry import PartitionRegistry
from raftmq.promise import Promise
from raftmq.records import NewRecord, build_batch, parse_header
from raftmq.replication.seals import Seal
from raftmq.types import Offset
from tests.partition.fake_replica import GROUP, NAME
from tests.replication.three_nodes import IDS, ThreeNodes

BATCH = bytes(build_batch([NewRecord(b"k", b"v")], timestamp=1_000_000))
NUMBERED = bytes(
    build_batch(
        [NewRecord(b"k", b"v")],
        timestamp=1_000_000,
        producer_id=5,
        producer_epoch=0,
        base_sequence=0,
    )
)
QUIET_MS = 1_000.0
NODES = tuple(replica.node_id for replica in IDS)


class World:
    """A leader of the only partition, which metadata says this and that of."""

    def __init__(self, folder: Path) -> None:
        self.nodes = ThreeNodes(folder)
        self.image = MetadataImage()
        self.level = LEVEL_OF_VIEWS
        self.proposed: list[tuple[Any, Promise[Any]]] = []
        registry = PartitionRegistry()
        registry.add(self.nodes.leader)
        self.retirement = Retirement(
            self,  # type: ignore[arg-type]  # as engine
            registry,
            lambda: 3,
            lambda topic: QUIET_MS if topic == NAME.topic else pytest.fail(topic),
        )
        self.now_ms = 0.0

    def propose(self, command: Any, *, broker_epoch: int) -> Promise[Any]:
        assert broker_epoch == 3
        promise: Promise[Any] = Promise()
        self.proposed.append((command, promise))
        return promise

    def order(self, state: PartitionState, version: int) -> None:
        """This is what the partition is to be."""
        row = PartitionImage(0, 1, NODES, IDS, NODES, state=state, state_version=version)
        is_listed = state is PartitionState.ACTIVE
        topic = TopicImage(NAME.topic, GROUP.topic_id, (row,) if is_listed else (), Map())
        topic = topic if is_listed else attrs.evolve(topic, retired=(row,))
        self.image = MetadataImage(
            version=version,
            structure_version=version,
            topics=Map({NAME.topic: topic}),
            topic_names=Map({GROUP.topic_id: NAME.topic}),
            features=Map({RAFTMQ_LEVEL: self.level}),
        )

    def look(self, after_ms: float = LOOK_MS) -> None:
        self.now_ms += after_ms
        self.retirement.tick(self.now_ms)
        self.nodes.settle()

    def said(self, *, is_taken: bool = True) -> Any:
        """The only command that was proposed since."""
        [(command, promise)] = self.proposed
        self.proposed.clear()
        if is_taken:
            promise.resolve(None)
        else:
            promise.fail(KafkaError(code=ErrorCode.REQUEST_TIMED_OUT))
        return command

    @property
    def newest(self) -> Seal | None:
        return self.nodes.leader.replica.newest_seal


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_seal_is_ordered_once_nobody_has_written_for_long_enough(world: World) -> None:
    world.order(PartitionState.CLOSING, 5)
    world.look()
    world.look(QUIET_MS - 1)
    assert not world.proposed
    world.nodes.produce(BATCH)
    world.look()
    world.look(QUIET_MS - 1)
    assert not world.proposed, "that was a writer"
    world.look(LOOK_MS)
    world.look(LOOK_MS)
    assert world.said(is_taken=False) == SealPartitions(
        topic_id=GROUP.topic_id, partitions=((0, 1),)
    )
    world.look()
    assert isinstance(world.said(), SealPartitions), "nobody knows what came of it"
    assert world.newest is None, "it is not ordered yet"


def test_a_seal_is_written_and_reported_once_it_is_committed(world: World) -> None:
    world.nodes.produce(BATCH)
    world.order(PartitionState.SEALING, 6)
    world.retirement.tick(LOOK_MS)
    assert not world.nodes.leader.is_sealed
    world.now_ms = LOOK_MS
    world.retirement.tick(2 * LOOK_MS)
    assert not world.proposed, "it is not committed"
    world.nodes.settle()
    world.look(3 * LOOK_MS)
    assert world.newest == Seal(6, is_closed=True)
    epoch = world.nodes.leader.leader_epoch
    report = SealReport(GROUP.topic_id, 0, 1, 6, 1, epoch)
    assert world.said() == ReportSealed(reports=(report,))
    world.order(PartitionState.SEALED, 6)
    world.look()
    assert not world.proposed, "something is left"
    world.nodes.leader.delete_records(1, 1_000)
    world.nodes.settle()
    world.look()
    assert world.said() == ReportGone(reports=(report,))


@pytest.mark.parametrize("level", [LEVEL_OF_KNOWN_PRODUCERS - 1, LEVEL_OF_KNOWN_PRODUCERS])
def test_what_is_gone_leaves_what_it_knew_of_producers(
    world: World, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.level, leader = level, world.nodes.leader
    world.nodes.produce(NUMBERED)
    world.order(PartitionState.SEALING, 6)
    world.look()
    world.look()
    assert isinstance(world.said(), ReportSealed)
    world.order(PartitionState.SEALED, 6)
    leader.delete_records(1, 1_000)
    world.nodes.settle()
    if level >= LEVEL_OF_KNOWN_PRODUCERS:
        with monkeypatch.context() as patch:
            patch.setattr(type(leader), "knows_producers", property(lambda _: False))
            world.look()
        assert not world.proposed, "its table is read back"
    world.look()
    report = SealReport(GROUP.topic_id, 0, 1, 6, 1, leader.leader_epoch)
    known = ProducerStateTable(Offset(0))
    known.append(parse_header(NUMBERED))
    told = (known.newest(KNOWN_BYTES_MAX),) if level >= LEVEL_OF_KNOWN_PRODUCERS else ()
    assert world.said() == ReportGone(reports=(report,), producers=told)


def test_what_was_known_of_producers_is_not_sent_where_there_is_no_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retirement, "KNOWN_IN_ALL_BYTES_MAX", 90)
    world.level = LEVEL_OF_KNOWN_PRODUCERS
    world.nodes.produce(NUMBERED)
    world.order(PartitionState.SEALING, 6)
    world.look()
    world.look()
    world.said()
    world.order(PartitionState.SEALED, 6)
    world.nodes.leader.delete_records(1, 1_000)
    world.nodes.settle()
    world.look()
    assert world.said(is_taken=False).producers != (), "89 bytes"
    topic = attrs.evolve(
        world.image.topics[NAME.topic], numbers=Map({3: NumberImage(5, 1, b"some")})
    )
    world.image = attrs.evolve(world.image, topics=Map({NAME.topic: topic}))
    world.look()
    assert world.said().producers == ()


def test_what_is_listed_again_is_opened_and_an_older_order_changes_nothing(world: World) -> None:
    world.order(PartitionState.SEALING, 6)
    world.look()
    world.look()
    assert isinstance(world.said(), ReportSealed)
    world.order(PartitionState.ACTIVE, 9)
    world.look()
    assert world.newest == Seal(9, is_closed=False)
    world.nodes.produce(BATCH)
    for state in (PartitionState.SEALING, PartitionState.SEALED, PartitionState.CLOSING):
        world.order(state, 6)
        world.look()
        world.look(2 * QUIET_MS)
        assert not world.proposed
        assert world.newest == Seal(9, is_closed=False), "this node's image was behind"
    world.order(PartitionState.CLOSING, 12)
    world.look()
    world.nodes.produce(BATCH)


def test_a_partition_that_closes_again_takes_records_again(world: World) -> None:
    """It was listed and shrunk again before its leader had opened it."""
    world.order(PartitionState.SEALING, 6)
    world.look()
    world.look()
    world.said()
    world.order(PartitionState.CLOSING, 9)
    world.look()
    assert world.newest == Seal(9, is_closed=False)
    world.nodes.produce(BATCH)


def test_what_has_no_state_costs_nothing(world: World) -> None:
    world.order(PartitionState.ACTIVE, -1)
    world.look()
    assert not world.retirement._watched
    world.order(PartitionState.ACTIVE, 4)
    world.look()
    assert not world.retirement._watched, "without a view topics are looked through seldom"
    world.look(FOLLOW_MS)
    assert list(world.retirement._watched) == [GROUP]
    world.image = attrs.evolve(world.image, topics=Map(), topic_names=Map())
    world.look()
    assert not world.retirement._watched
