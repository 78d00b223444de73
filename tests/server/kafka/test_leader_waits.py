"""Metadata waits for the next leader after a loss, and never for long."""

from __future__ import annotations

from uuid import UUID

from immutables import Map

from raftmq.controller.leaders import LeaderRow, LeaderTable
from raftmq.metadata.image import PartitionImage, TopicImage
from raftmq.partition.parked import Deadlines
from raftmq.server.kafka.leader_waits import LOOK_MS, REST_FACTOR, WAIT_MS, Hold, LeaderWaits
from raftmq.types import LeaderEpoch, NodeId, TopicId

TOPIC = TopicId(UUID(int=7))
IMAGE = TopicImage(
    "t", TOPIC, tuple(PartitionImage(i, 1, (NodeId(1),), (), (NodeId(1),)) for i in (0, 1)), Map()
)

SELF = NodeId(1)


class FakeClock:
    now_ms = 1_000.0

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return int(self.now_ms)


class World:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.deadlines = Deadlines(self.clock)
        self.hold = Hold()  # of the connection that asks
        self.leaders = LeaderTable()
        self.ended: set[NodeId] = set()
        self.left: set[int] = set()
        self.leader_waits = LeaderWaits(
            self.leaders,
            self.deadlines,
            self.clock,
            has_ended=self.ended.__contains__,
            has_left=lambda row: row.leader_id == SELF and row.partition in self.left,
        )
        self.lead(0, 1, 1)
        self.lead(1, 2, 1)

    def lead(self, partition: int, node: int, epoch: int) -> None:
        row = LeaderRow(TOPIC, partition, LeaderEpoch(epoch), 0, NodeId(node), (), ())
        self.leaders.merge([row])


def test_nothing_lost_nothing_waited_for() -> None:
    assert World().leader_waits.next_leaders([IMAGE], Hold()) is None


def test_waits_until_each_lost_partition_has_its_next_leader() -> None:
    world = World()
    world.lead(1, 1, 2)
    world.leader_waits.node_lost(NodeId(1))
    promise = world.leader_waits.next_leaders([IMAGE], world.hold)
    assert promise is not None
    world.lead(0, 3, 2)
    assert not promise.is_done
    world.lead(1, 2, 3)
    assert promise.is_done
    assert world.leader_waits.next_leaders([IMAGE], world.hold) is None, "led again"


def test_gives_up_and_keeps_nobody_waiting_later() -> None:
    world = World()
    world.leader_waits.node_lost(NodeId(1))
    promise = world.leader_waits.next_leaders([IMAGE], world.hold)
    assert promise is not None
    world.clock.now_ms += WAIT_MS
    world.deadlines.expire(world.clock.now_ms)
    assert promise.is_done
    assert world.leader_waits.next_leaders([IMAGE], world.hold) is None


def test_a_connection_that_just_ended_counts_before_anybody_is_told() -> None:
    world = World()
    world.ended.add(NodeId(2))
    assert world.leader_waits.next_leaders([IMAGE], world.hold) is not None


def test_a_node_that_is_back_is_not_waited_for() -> None:
    world = World()
    world.leader_waits.node_lost(NodeId(1))
    world.leader_waits.node_connected(NodeId(1))
    assert world.leader_waits.next_leaders([IMAGE], world.hold) is None


def test_a_new_partition_is_given_time_for_its_first_election() -> None:
    world = World()
    more = PartitionImage(2, 1, (NodeId(1),), (), (NodeId(1),))
    image = TopicImage("t", TOPIC, (*IMAGE.partitions, more), Map())
    promise = world.leader_waits.next_leaders([image], world.hold)
    assert promise is not None
    world.lead(2, 3, 1)
    assert promise.is_done
    assert world.leader_waits.next_leaders([image], world.hold) is None


def test_a_partition_that_nobody_can_lead_delays_answers_only_at_first() -> None:
    world = World()
    more = PartitionImage(2, 1, (NodeId(1),), (), (NodeId(1),))
    image = TopicImage("t", TOPIC, (*IMAGE.partitions, more), Map())
    assert world.leader_waits.next_leaders([image], world.hold) is not None
    world.clock.now_ms += WAIT_MS
    assert world.leader_waits.next_leaders([image], world.hold) is None


def test_who_hands_over_says_so_together_with_who_leads_now() -> None:
    world = World()
    assert world.leader_waits.next_leaders_of([(TOPIC, 0)], world.hold) is None, "it leads"
    world.left.add(0)
    promise = world.leader_waits.next_leaders_of([(TOPIC, 0), (TOPIC, 1)], world.hold)
    assert promise is not None
    world.lead(0, 1, 1)
    assert not promise.is_done
    world.lead(0, 3, 2)
    assert promise.is_done
    assert world.leader_waits.next_leaders_of([(TOPIC, 0)], world.hold) is None


def test_a_leadership_that_stays_after_all_keeps_nobody_waiting() -> None:
    world = World()
    world.left.add(0)
    promise = world.leader_waits.next_leaders_of([(TOPIC, 0)], world.hold)
    assert promise is not None
    world.clock.now_ms += LOOK_MS
    world.deadlines.expire(world.clock.now_ms)
    assert not promise.is_done
    world.left.clear()
    world.clock.now_ms += LOOK_MS
    world.deadlines.expire(world.clock.now_ms)
    assert promise.is_done


def test_a_deposed_leader_without_a_successor_answers_after_a_while_and_then_at_once() -> None:
    world = World()
    world.left.add(0)
    promise = world.leader_waits.next_leaders_of([(TOPIC, 0)], world.hold)
    assert promise is not None
    for _ in range(int(WAIT_MS / LOOK_MS) + 1):
        world.clock.now_ms += LOOK_MS
        world.deadlines.expire(world.clock.now_ms)
    assert promise.is_done
    assert world.leader_waits.next_leaders_of([(TOPIC, 0)], world.hold) is None


def test_a_connection_that_was_held_up_is_left_alone_for_a_while() -> None:
    """Answers leave in order: parked ones hold up acknowledgements of other partitions."""
    world = World()
    world.leader_waits.node_lost(NodeId(1))
    first = world.leader_waits.next_leaders([IMAGE], world.hold)
    second = world.leader_waits.next_leaders([IMAGE], world.hold)
    assert first is not None
    assert second is not None, "the one is held up by the other anyway"
    world.clock.now_ms += 200
    world.lead(0, 3, 2)
    assert first.is_done
    assert second.is_done
    world.clock.now_ms += REST_FACTOR * 200 - 1
    world.leader_waits.node_lost(NodeId(3))
    assert world.leader_waits.next_leaders([IMAGE], world.hold) is None, (
        "held up for 200 ms, free for 800"
    )
    assert world.leader_waits.next_leaders([IMAGE], Hold()) is not None, "another one is not"
    world.clock.now_ms += 1
    assert world.leader_waits.next_leaders([IMAGE], world.hold) is not None


def test_a_wait_in_vain_counts_as_well() -> None:
    world = World()
    world.leader_waits.node_lost(NodeId(1))
    promise = world.leader_waits.next_leaders([IMAGE], world.hold)
    assert promise is not None
    world.clock.now_ms += WAIT_MS
    world.deadlines.expire(world.clock.now_ms)
    assert promise.is_done
    world.leader_waits.node_lost(NodeId(2))
    assert world.leader_waits.next_leaders([IMAGE], world.hold) is None
    world.clock.now_ms += REST_FACTOR * WAIT_MS
    world.leader_waits.node_lost(NodeId(2))
    assert world.leader_waits.next_leaders([IMAGE], world.hold) is not None
