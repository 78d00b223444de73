"""Preferred leaders get their partitions back: late enough, few at a time, and only in sync."""

from __future__ import annotations

from uuid import UUID

from attrs import define, evolve, field
from immutables import Map

from raftmq.controller.leaders import (
    COOL_DOWN_MAX_MS,
    COOL_DOWN_MS,
    LOST_SOON_MS,
    MOVES_MAX,
    QUIET_MS,
    LeaderBalance,
    LeaderRow,
    LeaderTable,
)
from raftmq.metadata.config_keys import DELIVERS_TO
from raftmq.metadata.image import (
    EMPTY_IMAGE,
    BrokerImage,
    MetadataImage,
    PartitionImage,
    TopicImage,
)
from raftmq.types import LeaderEpoch, NodeId, StorageId, TopicId

TOPIC = TopicId(UUID(int=7))
ALL = (NodeId(1), NodeId(2), NodeId(3))


def broker(node_id: int, epoch: int = 1, *, is_fenced: bool = False) -> BrokerImage:
    return BrokerImage(
        node_id=NodeId(node_id),
        storage_id=StorageId(node_id),
        epoch=epoch,
        incarnation=1,
        rack=None,
        endpoints=(),
        features=(),
        is_fenced=is_fenced,
    )


@define
class World:
    partitions: int = 1
    brokers: dict[NodeId, BrokerImage] = field(factory=dict)
    leaders: LeaderTable = field(factory=LeaderTable)
    balance: LeaderBalance = field(factory=LeaderBalance)
    unfit: set[NodeId] = field(factory=set)
    reading: set[NodeId] = field(factory=set)
    configs: Map[str, str] = field(factory=Map)
    now_ms: float = 0.0
    _epoch: int = 0

    def __attrs_post_init__(self) -> None:
        self.brokers = {NodeId(n): broker(n) for n in ALL}
        for index in range(self.partitions):
            self.lead(index, 2)

    def lead(self, index: int, node: int, isr: tuple[NodeId, ...] = ALL) -> None:
        self._epoch += 1
        row = LeaderRow(TOPIC, index, LeaderEpoch(self._epoch), 0, NodeId(node), isr, ALL)
        self.leaders.merge([row])

    @property
    def image(self) -> MetadataImage:
        partitions = tuple(
            PartitionImage(index, 1, ALL, (), ALL) for index in range(self.partitions)
        )
        topic = TopicImage("t", TOPIC, partitions, self.configs)
        return evolve(
            EMPTY_IMAGE,
            structure_version=sum(2 * b.epoch + b.is_fenced for b in self.brokers.values()),
            brokers=Map(self.brokers),
            topics=Map({"t": topic}),
            topic_names=Map({TOPIC: "t"}),
        )

    def due(self, after_ms: float = 0.0) -> list[int]:
        """Partitions that are to go to their preferred leader, node 1."""
        self.now_ms += after_ms
        moves = self.balance.due(
            self.image,
            self.leaders,
            self.now_ms,
            unfit=self.unfit,
            reading_delays=self.reading,
        )
        assert all(move.to == 1 for move in moves)
        return [move.partition for move in moves]


def test_moves_once_all_has_been_quiet() -> None:
    world = World()
    assert world.due() == []
    assert world.due(QUIET_MS - 1) == []
    assert world.due(1) == [0]
    world.lead(0, 1)
    assert world.due(10 * COOL_DOWN_MS) == [], "it is led by the preferred one"


def test_a_move_that_did_not_work_is_tried_again_after_a_while() -> None:
    world = World()
    world.due()
    assert world.due(QUIET_MS) == [0]
    assert world.due(COOL_DOWN_MS - 1) == []
    assert world.due(1) == [0]


def test_never_to_a_replica_out_of_sync() -> None:
    world = World()
    world.lead(0, 2, isr=(NodeId(2), NodeId(3)))
    world.due()
    assert world.due(100_000) == []
    world.lead(0, 2)
    assert world.due() == [], "quiet counts from the new leadership"
    assert world.due(QUIET_MS) == [0]


def test_a_broker_that_restarts_again_and_again_gets_nothing() -> None:
    world = World()
    for epoch in range(2, 12):
        assert world.due(QUIET_MS / 2) == []
        world.brokers[NodeId(1)] = broker(1, epoch)
    world.brokers[NodeId(1)] = broker(1, 12, is_fenced=True)
    assert world.due(100_000) == []
    world.brokers[NodeId(1)] = broker(1, 12)
    assert world.due() == []
    assert world.due(QUIET_MS) == [0]


def test_an_unfit_broker_gets_nothing_until_it_has_been_fit_for_a_while() -> None:
    world = World(unfit={NodeId(1)})
    for _ in range(100):
        assert world.due(1_000) == []
    world.unfit.clear()
    assert world.due() == []
    assert world.due(QUIET_MS - 1) == [], "it may fail again at once"
    assert world.due(1) == [0]


def test_a_delay_partition_waits_until_its_preferred_leader_has_read_it() -> None:
    world = World(reading={NodeId(1)}, configs=Map({DELIVERS_TO: "due"}))
    for _ in range(100):
        assert world.due(1_000) == []
    world.reading.clear()
    assert world.due() == [0]


def test_other_partitions_do_not_wait_for_what_is_pending() -> None:
    world = World(reading={NodeId(1)})
    world.due()
    assert world.due(QUIET_MS) == [0]


def test_an_unfit_broker_that_is_nobodys_preferred_one_is_no_hindrance() -> None:
    world = World(unfit={NodeId(2), NodeId(3)})
    world.due()
    assert world.due(QUIET_MS) == [0]


def _until_due(world: World) -> float:
    """Milliseconds until the partition is moved, with the controller's pace."""
    began_ms = world.now_ms
    while not world.due(1_000):
        assert world.now_ms - began_ms <= 2 * COOL_DOWN_MAX_MS
    return world.now_ms - began_ms


def test_a_leadership_that_is_lost_again_soon_comes_back_later_each_time() -> None:
    """A node that fails in a way that nobody sees costs its clients less and less."""
    world = World()
    _until_due(world)
    waits = []
    for _ in range(8):
        world.lead(0, 1)
        assert world.due(2_000) == []
        world.lead(0, 2)
        waits.append(_until_due(world) - 1_000)  # noticed with the first look
    doubled = [COOL_DOWN_MS * 2**n for n in range(1, 9)]
    assert waits == [min(wait, COOL_DOWN_MAX_MS) for wait in doubled]
    assert waits[-1] == COOL_DOWN_MAX_MS


def test_a_leadership_that_comes_and_goes_between_two_looks_was_lost_too() -> None:
    world = World()
    _until_due(world)
    world.lead(0, 1)
    world.lead(0, 2)
    assert _until_due(world) - 1_000 == 2 * COOL_DOWN_MS


def test_a_leadership_that_was_kept_for_long_comes_back_as_the_first_time() -> None:
    world = World()
    first_ms = _until_due(world)
    for _ in range(3):
        world.lead(0, 1)
        assert world.due(2_000) == []
        world.lead(0, 2)
        assert _until_due(world) > first_ms
    world.lead(0, 1)
    assert world.due(LOST_SOON_MS) == []
    world.lead(0, 2)
    assert _until_due(world) == first_ms
    world.lead(0, 1)
    world.lead(0, 2)
    assert _until_due(world) - 1_000 == 2 * COOL_DOWN_MS, "it begins anew"


def test_each_partition_waits_for_itself() -> None:
    world = World(partitions=2)
    world.due()
    assert world.due(QUIET_MS) == [0, 1]
    for index in range(2):
        world.lead(index, 1)
    assert world.due(1_000) == []
    world.lead(0, 2)
    assert world.due(1_000) == []
    assert world.due(LOST_SOON_MS) == [0]
    world.lead(0, 1)
    world.lead(1, 2)
    assert world.due(1_000) == []
    assert world.due(QUIET_MS) == [1]


def test_a_few_at_a_time_and_all_in_the_end() -> None:
    world = World(partitions=3 * MOVES_MAX)
    world.due()
    moved = world.due(QUIET_MS)
    assert len(moved) == MOVES_MAX
    for index in moved:
        world.lead(index, 1)
    for _ in range(2):
        more = world.due(1_000)
        assert len(more) == MOVES_MAX
        for index in more:
            world.lead(index, 1)
        moved += more
    assert sorted(moved) == list(range(3 * MOVES_MAX))
    assert world.due(100_000) == []


def test_a_balanced_cluster_is_looked_at_only_after_a_change() -> None:
    world = World(partitions=2)
    image = world.image
    for index in range(2):
        world.lead(index, 1)
    assert world.balance.due(image, world.leaders, 0.0) == []
    looked: list[object] = []
    of = world.leaders.of
    world.leaders.of = lambda *key: looked.append(key) or of(*key)  # type: ignore[assignment,func-returns-value]
    assert world.balance.due(image, world.leaders, 60_000.0) == []
    assert not looked
    fewer = evolve(image, brokers=image.brokers.delete(ALL[2]), structure_version=1)
    assert world.balance.due(fewer, world.leaders, 0.0) == []
    assert len(looked) == 2
    world.lead(1, 2)
    assert world.balance.due(image, world.leaders, 70_000.0) == []
    assert world.balance.due(image, world.leaders, 70_000.0 + QUIET_MS), "later, without a change"


def test_while_the_preferred_broker_is_away_nothing_is_looked_at_again() -> None:
    world = World(partitions=3)
    world.brokers[NodeId(1)] = broker(1, is_fenced=True)
    assert world.due(100_000) == []
    looks = []
    of = world.leaders.of

    def counted(topic_id: TopicId, partition: PartitionImage) -> LeaderRow | None:
        looks.append(partition.index)
        return of(topic_id, partition)

    world.leaders.of = counted  # type: ignore[method-assign]
    assert world.due(100_000) == []
    assert looks == []
    world.unfit = {NodeId(3)}
    world.due()
    assert looks == [0, 1, 2], "another set of brokers may lead"
