"""Moves of replicas: where each goes, in which order they begin, what holds them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.controller.leaders import LeaderTable
from raftmq.controller.moves import (
    LONG_MS,
    LOOKS_MAX,
    Bounds,
    DeadBrokers,
    Figures,
    MoveRow,
    Step,
    Survey,
    Targets,
    figures,
    find_dead_brokers,
    forecast,
    is_moving,
    move_rows,
    next_moves,
    node_progress,
)
from raftmq.errors import ErrorCode
from raftmq.metadata.commands import (
    ChangeNodes,
    ClaimGroup,
    CreateTopics,
    DeleteTopics,
    FenceBroker,
    MembersReport,
    NodeChange,
    NodeState,
    Origin,
    PlanMoves,
    PlannedMove,
    ReassignPartition,
    ReplaceNode,
    ReportVoters,
    UnfenceBroker,
)
from raftmq.metadata.image import MetadataImage, PartitionImage, all_partitions
from raftmq.metadata.results import MoveOutcomes, Rejection
from raftmq.types import LeaderEpoch, NodeId
from tests.metadata.metadata_commands import (
    Machine,
    creation,
    node,
    raised,
    register,
    topic_id,
)

Nodes = tuple[int, ...]


def drained(image: MetadataImage, number: int) -> MetadataImage:
    """The image as it would be with this broker draining."""
    broker = evolve(image.brokers[node(number)], state=NodeState.DRAINING)
    return evolve(image, brokers=image.brokers.set(broker.node_id, broker))


class World:
    """A cluster whose leaders carry moves out when they are told to."""

    def __init__(self, racks: Sequence[str | None], *topics: Sequence[Nodes]) -> None:
        self.machine = Machine()
        for number, rack in enumerate(racks, 1):
            epoch = self.machine.apply(register(number, rack=rack)).broker_epoch  # type: ignore[union-attr]
            self.machine.apply(UnfenceBroker(node_id=node(number), broker_epoch=epoch))
        for number, replicas in enumerate(topics, 1):
            self.machine.apply(CreateTopics(topics=(creation(f"t{number}", number, *replicas),)))
        self.machine.image = raised(self.machine.image)
        self.leaders = LeaderTable()
        self.survey = Survey()
        self.bounds = Bounds()
        self.now_ms = 0.0
        self.led_epoch = 0
        self.lead()

    @property
    def image(self):  # type: ignore[no-untyped-def]
        return self.machine.image

    def partition(self, index: int = 0, topic: int = 1) -> PartitionImage:
        return self.image.topics[f"t{topic}"].partitions[index]

    def is_up(self, number: int) -> bool:
        return self.image.live_epoch(node(number)) is not None

    def lead(self) -> None:
        """Partitions are led by their first voter that is up, where a majority is."""
        self.led_epoch += 1
        for topic, partition in all_partitions(self.image):
            up = [n for n in partition.voters if self.is_up(n)]
            if len(up) > len(partition.voters) // 2:
                self.leaders.led(
                    topic.topic_id,
                    partition.index,
                    leader=up[0],
                    leader_epoch=LeaderEpoch(self.led_epoch),
                    isr=up,
                    voters=partition.voters,
                )

    def kill(self, number: int) -> None:
        epoch = self.image.brokers[node(number)].epoch
        self.machine.apply(FenceBroker(node_id=node(number), broker_epoch=epoch))
        self.lead()

    def revive(self, number: int) -> None:
        epoch = self.image.brokers[node(number)].epoch
        self.machine.apply(UnfenceBroker(node_id=node(number), broker_epoch=epoch))
        self.lead()

    def set_state(self, number: int, state: NodeState) -> None:
        change = NodeChange(node(number), state)
        assert not isinstance(self.machine.apply(ChangeNodes(changes=(change,))), Rejection)

    def plan(
        self, index: int, replicas: Nodes, origin: Origin = Origin.OPERATOR, topic: int = 1
    ) -> None:
        move = PlannedMove(
            topic_id=topic_id(topic),
            partition=index,
            creation_epoch=self.partition(index, topic).creation_epoch,
            replicas=tuple(map(node, replicas)),
        )
        result = self.machine.apply(PlanMoves(moves=(move,), origin=origin))
        assert isinstance(result, MoveOutcomes)
        assert not result.moves[0].code, result

    def look(self) -> list[Step]:
        self.survey.see(self.image, self.bounds.dead, self.now_ms)
        return next_moves(self.survey, self.leaders, self.bounds, self.now_ms)

    def step(self) -> list[Step]:
        """Look, and apply what is due."""
        steps = self.look()
        for each in steps:
            assert not isinstance(self.machine.apply(each.command), Rejection), each
        self.survey.see(self.image, self.bounds.dead, self.now_ms)
        return steps

    def report(self, index: int, voters: Nodes, topic: int = 1) -> None:
        """What the leader of a partition says of its members."""
        partition = self.partition(index, topic)
        report = MembersReport(
            topic_id(topic),
            index,
            partition.creation_epoch,
            partition.voters_epoch + 1,
            tuple(sorted(map(node, voters))),
            tuple(sorted(map(node, voters))),
            int(self.image.version),
        )
        self.machine.apply(ReportVoters(reports=(), members=(report,)))
        self.lead()

    def carry_out(self) -> None:
        """Every leader makes true what it can: arrivals first, then departures."""
        for topic, partition in list(all_partitions(self.image)):
            row = self.leaders.get(topic.topic_id, partition.index)
            if row is None or not self.is_up(row.leader_id) or not is_moving(partition):
                continue
            arriving = [n for n in partition.replicas if n not in partition.voters]
            here = [n for n in arriving if self.is_up(n)]
            number = int(topic.name[1:])
            if here == arriving:
                self.report(partition.index, partition.replicas, number)
            elif here:  # nobody goes before the others are there as well
                self.report(partition.index, (*partition.voters, *here), number)

    def settle(self) -> list[Step]:
        """Until nothing is due any more."""
        told = []
        for _ in range(200):
            steps = self.step()
            told += steps
            moving = sum(is_moving(p) for _, p in all_partitions(self.image))
            if not steps and not moving:
                return told
            before = self.image.version
            self.carry_out()
            if not steps and self.image.version == before:
                return told
        raise AssertionError("it goes on for ever")

    def replicas(self) -> list[Nodes]:
        return [tuple(partition.replicas) for _, partition in all_partitions(self.image)]


def whats(steps: list[Step]) -> list[tuple[int, str, Origin, Nodes]]:
    return [(s.key[1], s.what, s.origin, tuple(s.after)) for s in steps]


# ---- where replicas go ----


def moved(world: World, *going: int) -> tuple[Nodes, dict[NodeId, str]]:
    """Where the first partition's replicas would go."""
    for number in going:
        world.set_state(number, NodeState.DRAINING)
    survey = Survey(world.image)
    result = Targets(survey, world.bounds).moved(world.partition())
    return tuple(result.replicas), dict(result.stuck)


def test_the_least_loaded_broker_takes_it_in_the_same_place() -> None:
    world = World([None] * 5, [(1, 2, 3), (4, 1, 2)])
    assert moved(world, 1) == ((5, 2, 3), {})


def test_a_free_rack_comes_before_load() -> None:
    world = World(["a", "b", "c", "c", "b"], [(1, 2, 3), (4, 1, 2), (4, 1, 2)])
    assert moved(world, 3)[0] == (1, 2, 4), "node 5 has fewer, and is in rack b"


def test_two_replicas_in_one_rack_only_where_racks_are_too_few() -> None:
    world = World(["a", "b", "c", "b"], [(1, 2, 3)])
    assert moved(world, 3)[0] == (1, 2, 4), "two racks are left for three replicas"
    world = World(["a", "b", "c", "b", "c"], [(1, 2, 3)])
    world.kill(5)
    replicas, stuck = moved(world, 3)
    assert replicas == (1, 2, 3)
    assert stuck[node(3)] == (
        "no broker can take the replica of node 3: node 1 holds it; node 2 holds it; "
        "node 4 is in rack b like node 2; node 5 is down"
    )


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (NodeState.NEW, "node 4 is new (`raftmq node add 4`)"),
        (NodeState.CORDONED, "node 4 is cordoned"),
        (NodeState.MAINTENANCE, "node 4 is in maintenance"),
        (NodeState.DRAINING, "node 4 is being drained"),
    ],
)
def test_only_active_brokers_are_given_any(state: NodeState, says: str) -> None:
    world = World([None] * 4, [(1, 2, 3)])
    world.set_state(4, state)
    replicas, stuck = moved(world, 3)
    assert replicas == (1, 2, 3)
    assert stuck[node(3)].endswith(says)


def test_a_full_broker_is_given_none() -> None:
    world = World([None] * 4, [(1, 2, 3)], [(4,), (4,)])
    world.bounds = Bounds(limit_of=lambda _node: 2)
    assert moved(world, 3)[1][node(3)].endswith("node 4 has no room (replicas_max is 2)")


def test_a_broker_that_still_has_the_data_is_preferred() -> None:
    world = World([None] * 5, [(1, 2, 3)], [(3,)] * 5)
    world.machine.apply(
        ReassignPartition(topic_id=topic_id(1), partition=0, replicas=(node(1), node(2), node(4)))
    )
    assert moved(world, 4)[0] == (1, 2, 3)


def test_a_named_successor_is_preferred_where_its_rack_is_free() -> None:
    world = World(["a", "b", "c", "b", "c"], [(1, 2, 3)], [(5,), (5,)])
    world.machine.apply(ReplaceNode(old_id=node(3), new_id=node(4)))
    survey = Survey(world.image)
    assert Targets(survey, world.bounds).moved(world.partition()).replicas == (1, 2, 5)
    world.set_state(5, NodeState.CORDONED)
    survey = Survey(world.image)
    assert Targets(survey, world.bounds).moved(world.partition()).replicas == (1, 2, 4)


def test_what_can_go_goes_although_another_replica_cannot() -> None:
    world = World([None] * 4, [(1, 2, 3)])
    assert moved(world, 2, 3)[0] == (1, 4, 3)


def test_the_dead_come_first_where_places_are_too_few() -> None:
    world = World([None] * 4, [(1, 2, 3)])
    world.kill(3)
    world.set_state(1, NodeState.DRAINING)
    world.bounds = Bounds(dead=(node(3),))
    assert whats(world.look()) == [(0, "begun", Origin.REPAIR, (1, 2, 4))]
    world = World([None] * 5, [(1, 2, 3)])
    world.kill(3)
    world.set_state(1, NodeState.DRAINING)
    world.bounds = Bounds(dead=(node(3),))
    assert whats(world.look()) == [(0, "begun", Origin.REPAIR, (5, 2, 4))]


def test_where_racks_are_too_few_the_one_with_fewer_replicas_takes_it() -> None:
    world = World(["a", "a", "b", "c", "a", "b"], [(1, 2, 3, 4)], [(6,)] * 3)
    assert moved(world, 4)[0] == (1, 2, 3, 6)


def test_moves_that_begin_together_are_spread() -> None:
    world = World([None] * 5, [(1, 2, 3)] * 4)
    world.set_state(1, NodeState.DRAINING)
    assert [s.after[0] for s in world.look()] == [4, 5, 4, 5]


# ---- order, places, progress ----


def test_moves_are_few_at_a_time_and_end() -> None:
    world = World([None] * 4, [(1, 2, 3)] * 6)
    world.bounds = Bounds(moves_max=2)
    world.set_state(1, NodeState.DRAINING)
    assert whats(world.step()) == [
        (0, "begun", Origin.DRAIN, (4, 2, 3)),
        (1, "begun", Origin.DRAIN, (4, 2, 3)),
    ]
    assert world.step() == []
    world.report(0, (1, 2, 3, 4))
    assert world.step() == [], "one is not gone yet"
    world.report(0, (2, 3, 4))
    assert whats(world.step()) == [(2, "begun", Origin.DRAIN, (4, 2, 3))]
    world.settle()
    assert world.replicas() == [(4, 2, 3)] * 6


def test_what_cannot_go_on_gives_its_place_up() -> None:
    world = World([None] * 5, [(1, 2, 3), (1, 2, 3), (1, 4, 5)])
    world.bounds = Bounds(moves_max=1)
    world.plan(0, (1, 2, 4))
    world.plan(1, (1, 2, 5))
    assert len(world.step()) == 1
    assert world.step() == []
    world.kill(4)
    assert whats(world.step()) == [(1, "begun", Origin.OPERATOR, (1, 2, 5))]
    world.survey.see(world.image, (), 0)
    rows = list(move_rows(world.survey, world.leaders, world.bounds))
    assert rows[0] == MoveRow(
        "t1", 0, Origin.OPERATOR, (node(1), node(2), node(3)), (node(1), node(2), node(4)), True,
        "it waits for what is to hold it: node 4 is down",
    )  # fmt: skip
    assert rows[1].reason == ""
    assert figures(world.survey, world.leaders)[Origin.OPERATOR] == Figures(2, 0, 1)


def test_a_move_that_takes_long_holds_a_quarter_of_a_place() -> None:
    world = World([None] * 4, [(1, 2, 3)] * 12)
    world.bounds = Bounds(moves_max=2)
    world.set_state(1, NodeState.DRAINING)
    counts = []
    for _ in range(8):
        counts.append(len(world.step()))
        world.now_ms += LONG_MS
    assert counts == [2, 2, 1, 1, 1, 1, 0, 0], "never more than four for each place"


def test_partitions_without_a_leader_hold_nobody_up() -> None:
    world = World([None] * 4, [(1, 2)], [(1,)] * 3)
    world.bounds = Bounds(moves_max=1)
    world.kill(1)
    world.set_state(1, NodeState.DRAINING)
    world.leaders.led(
        topic_id(1), 0, leader=node(2), leader_epoch=LeaderEpoch(99), isr=(), voters=(1, 2)
    )
    assert [s.key for s in world.step()] == [(topic_id(1), 0)]
    progress = node_progress(world.survey, world.leaders, world.bounds, node(1))
    assert [(s.topic, s.reason) for s in progress.stuck] == [
        ("t2", "it has no leader: of its voters 1, node 1 is down")
    ] * 3


def test_what_waits_does_not_hide_what_could_move() -> None:
    world = World([None] * 5, [(1,)] * (LOOKS_MAX + 1), [(1, 2), (2, 3)])
    world.kill(1)
    world.leaders.led(
        topic_id(2), 0, leader=node(2), leader_epoch=LeaderEpoch(99), isr=(), voters=(1, 2)
    )
    world.set_state(1, NodeState.DRAINING)
    assert world.look() == []
    assert [s.key for s in world.look()] == [(topic_id(2), 0)]


def test_plans_that_wait_do_not_hide_one_that_could_begin() -> None:
    world = World([None] * 5, [(1, 2)] * (LOOKS_MAX + 1), [(1, 2)])
    for index in range(LOOKS_MAX + 1):
        world.plan(index, (1, 4))
    world.plan(0, (1, 3), topic=2)
    world.kill(4)
    assert world.look() == []
    assert [s.key for s in world.look()] == [(topic_id(2), 0)]


def test_another_target_begins_another_minute() -> None:
    world = World([None] * 5, [(1, 2, 3)] * 2)
    world.bounds = Bounds(moves_max=1)
    world.plan(0, (1, 2, 4))
    world.step()
    world.now_ms += LONG_MS
    world.plan(0, (1, 2, 5))
    assert [s.what for s in world.step()] == ["changed"]
    world.plan(1, (1, 2, 4))
    assert world.step() == []
    world.now_ms += LONG_MS
    assert [s.what for s in world.step()] == ["begun"]


def test_repair_comes_first_and_the_balance_last() -> None:
    world = World([None] * 6, [(1, 2, 3)] * 4, [(2, 3, 4)])
    world.plan(1, (6, 2, 3), Origin.BALANCE)
    world.plan(2, (5, 2, 3), Origin.OPERATOR)
    world.kill(4)
    world.bounds = Bounds(moves_max=1, dead=(node(4),))
    begun = []
    for _ in range(3):
        begun += [s.origin for s in world.step()]
        world.carry_out()
    assert begun == [Origin.REPAIR, Origin.OPERATOR, Origin.BALANCE]


def test_the_balance_waits_while_an_operators_moves_run() -> None:
    world = World([None] * 6, [(1, 2, 3)] * 2)
    world.plan(0, (6, 2, 3), Origin.BALANCE)
    world.plan(1, (5, 2, 3), Origin.OPERATOR)
    assert [s.origin for s in world.step()] == [Origin.OPERATOR]
    assert world.step() == []
    world.carry_out()
    assert [s.origin for s in world.step()] == [Origin.BALANCE]


def test_each_command_names_what_it_was_computed_from() -> None:
    world = World([None] * 5, [(1, 2, 3)])
    world.set_state(1, NodeState.DRAINING)
    [step] = world.look()
    world.machine.apply(
        ReassignPartition(topic_id=topic_id(1), partition=0, replicas=(node(1), node(2), node(5)))
    )
    assert isinstance(world.machine.apply(step.command), Rejection)
    world.settle()
    assert world.replicas() == [(3, 2, 5)], "node 3 still has the data"


# ---- plans ----


def test_a_plan_that_the_drain_wants_too_is_carried_out() -> None:
    world = World([None] * 6, [(1, 2, 3)])
    world.plan(0, (6, 2, 3))
    world.set_state(1, NodeState.DRAINING)
    assert whats(world.step()) == [(0, "begun", Origin.OPERATOR, (6, 2, 3))]


def test_a_plan_that_names_a_drained_broker_is_dropped() -> None:
    world = World([None] * 6, [(1, 2, 3), (1, 2, 3)])
    world.plan(0, (1, 2, 5))
    world.plan(1, (6, 2, 3))
    world.set_state(5, NodeState.DRAINING)
    world.set_state(1, NodeState.DRAINING)
    [dropped, begun] = world.step()
    assert (dropped.what, dropped.reason) == ("dropped", "node 1 is being drained")
    assert (begun.what, begun.key[1]) == ("begun", 1)
    assert world.partition().planned == ()
    assert whats(world.step()) == [(0, "begun", Origin.DRAIN, (4, 2, 3))]


@pytest.mark.parametrize(("origin", "what"), [(Origin.OPERATOR, []), (Origin.BALANCE, ["dropped"])])
def test_a_plan_onto_a_cordoned_broker_waits_or_is_dropped(origin: Origin, what: list[str]) -> None:
    world = World([None] * 4, [(1, 2, 3)])
    world.plan(0, (1, 2, 4), origin)
    world.set_state(4, NodeState.CORDONED)
    assert [s.what for s in world.look()] == what
    [row] = move_rows(world.survey, world.leaders, world.bounds)
    assert (row.is_running, row.reason) == (False, "node 4 is cordoned")
    world.set_state(4, NodeState.ACTIVE)
    assert [s.what for s in world.look()] == ["begun"]


def test_a_move_is_changed_on_its_way() -> None:
    world = World([None] * 5, [(1, 2, 3)])
    world.bounds = Bounds(moves_max=1)
    world.plan(0, (1, 2, 4))
    world.step()
    world.plan(0, (1, 2, 5))
    assert whats(world.step()) == [(0, "changed", Origin.OPERATOR, (1, 2, 5))]
    assert world.partition().moving_from == (1, 2, 3)


def test_a_plan_that_is_over_cancels_no_move_that_runs() -> None:
    world = World([None] * 5, [(1, 2, 3)])
    world.plan(0, (1, 2, 4))
    world.step()
    world.plan(0, (1, 2, 5))
    world.set_state(5, NodeState.DRAINING)
    assert world.step() == []
    assert world.partition().replicas == (1, 2, 4)


def test_a_move_whose_target_is_drained_gets_another() -> None:
    world = World([None] * 5, [(1, 2, 3)])
    world.set_state(3, NodeState.DRAINING)
    world.step()
    assert world.partition().replicas == (1, 2, 4)
    world.set_state(4, NodeState.DRAINING)
    assert whats(world.step()) == [(0, "changed", Origin.DRAIN, (1, 2, 5))]


# ---- dead brokers ----


def test_a_dead_brokers_replicas_are_made_again_over_racks() -> None:
    world = World(["a", "b", "c", "c"], [(1, 2, 3), (2, 3, 1), (3, 1, 2)])
    world.kill(3)
    world.bounds = Bounds(dead=(node(3),))
    world.settle()
    assert world.replicas() == [(1, 2, 4), (2, 4, 1), (4, 1, 2)]
    assert not world.survey.holds_any(node(3))


def test_a_plan_that_names_a_dead_broker_does_not_undo_its_repair() -> None:
    world = World([None] * 6, [(1, 2, 3)])
    world.plan(0, (1, 4, 3), Origin.BALANCE)
    world.kill(3)
    world.bounds = Bounds(dead=(node(3),))
    assert [s.origin for s in world.step()] == [Origin.REPAIR]
    assert node(3) not in world.partition().replicas
    assert world.step() == []
    assert node(3) not in world.partition().replicas


def test_a_plan_goes_on_under_its_own_name_after_a_repair() -> None:
    """Node 3 has the replica still, is down and in maintenance: its repair began, an operator wants
    it back there."""
    world = World([None] * 4, [(3, 1, 2)])
    world.kill(3)
    world.bounds = Bounds(dead=(node(3),))
    world.plan(0, (1, 2, 3))
    assert [s.origin for s in world.step()] == [Origin.REPAIR]
    world.set_state(3, NodeState.MAINTENANCE)
    world.bounds = Bounds()
    [step] = world.look()
    assert (step.origin, step.after) == (Origin.OPERATOR, (1, 2, 3))
    epoch = world.partition().creation_epoch
    cancel = PlannedMove(topic_id=topic_id(1), partition=0, creation_epoch=epoch)
    world.machine.apply(PlanMoves(moves=(cancel,), origin=Origin.OPERATOR))
    late = world.machine.apply(step.command)
    assert isinstance(late, Rejection)
    assert late.code is ErrorCode.INVALID_UPDATE_VERSION


def dead(world: World, after_ms: float | None = 100.0, now_ms: float = 100.0) -> DeadBrokers:
    down = {n: 0.0 for n in sorted(world.image.brokers) if world.image.brokers[n].is_fenced}
    world.survey.see(world.image, (), now_ms)
    return find_dead_brokers(world.survey, down, after_ms, now_ms)


def test_a_broker_is_dead_after_the_set_time_only() -> None:
    world = World([None] * 4, [(1, 2, 3)])
    world.kill(3)
    assert dead(world, now_ms=99.0) == DeadBrokers()
    assert dead(world) == DeadBrokers((node(3),))
    assert dead(world, after_ms=None) == DeadBrokers()
    world.kill(4)
    assert dead(world) == DeadBrokers((node(3),)), "node 4 holds nothing"


def test_more_than_one_dead_broker_is_rather_the_network() -> None:
    world = World(["a", "b", "c", "d"], [(1, 2, 3), (1, 2, 4)])
    world.kill(3)
    world.kill(4)
    assert dead(world) == DeadBrokers(held_back="nodes 3,4 are down (racks c,d), more than one")
    world.set_state(4, NodeState.MAINTENANCE)
    assert dead(world) == DeadBrokers((node(3),)), "an operator knows of node 4"
    world.set_state(3, NodeState.DRAINING)
    assert dead(world) == DeadBrokers(), "its drain sees to it"


@pytest.mark.parametrize("alone", [(1,), (1, 3)], ids=["one replica", "two replicas"])
def test_what_cannot_be_made_again_keeps_no_other_broker_from_it(alone: tuple[int, ...]) -> None:
    """It counted as missing for ever, and no later death was seen to until it was drained."""
    world = World([None] * 6, [(2, 3, 1), (2, 3, 4)], [alone])
    world.kill(1)
    assert dead(world) == DeadBrokers((node(1),))
    world.kill(4)
    assert dead(world).held_back == "nodes 1,4 are down, more than one"
    world.revive(4)
    world.bounds = Bounds(dead=(node(1),))
    world.settle()
    assert world.partition(0).replicas == (2, 3, 5)
    assert world.survey.holds_any(node(1))
    world.kill(4)
    assert dead(world) == DeadBrokers((node(1), node(4)))
    world.bounds = Bounds(dead=(node(1), node(4)))
    world.settle()
    assert world.partition(1).replicas == (2, 3, 6)
    world.kill(6)
    world.kill(5)
    assert dead(world).held_back == "nodes 5,6 are down, more than one"


def test_the_survey_of_what_can_be_made_again_keeps_up() -> None:
    world = World([None] * 4, [(1, 2, 3), (3,), (2, 3)])
    world.settle()
    assert set(world.survey.mendable[node(3)]) == {(topic_id(1), 0)}
    world.plan(1, (3, 1, 2))
    world.settle()
    assert set(world.survey.mendable[node(3)]) == {(topic_id(1), 0), (topic_id(1), 1)}
    world.plan(0, (1, 2, 4))
    world.settle()
    assert set(world.survey.mendable[node(3)]) == {(topic_id(1), 1)}


def test_a_broker_that_comes_back_gets_its_unfinished_moves_back() -> None:
    world = World([None] * 4, [(1, 2, 3), (1, 2, 3)])
    world.kill(3)
    world.bounds = Bounds(dead=(node(3),))
    assert len(world.step()) == 2
    world.report(0, (1, 2, 3, 4))  # it has caught up: to finish is the cheaper
    world.bounds = Bounds()
    assert world.step() == [], "it is still down, though a new controller does not call it dead"
    world.revive(3)
    assert whats(world.step()) == [(1, "cancelled", Origin.REPAIR, (1, 2, 3))]
    assert world.partition(1).moving_from == ()
    assert world.step() == []
    world.settle()
    assert world.replicas() == [(1, 2, 4), (1, 2, 3)]


def test_a_broker_that_comes_back_empty_changes_nothing() -> None:
    world = World([None] * 4, [(1, 2, 3)])
    world.kill(3)
    world.bounds = Bounds(dead=(node(3),))
    world.step()
    world.bounds = Bounds(emptied=(node(3),))
    world.revive(3)
    assert world.step() == []


def test_a_cancelled_drain_takes_back_what_has_not_caught_up() -> None:
    world = World([None] * 4, [(1, 2, 3)])
    world.set_state(3, NodeState.DRAINING)
    world.step()
    world.set_state(3, NodeState.CORDONED)
    assert whats(world.step()) == [(0, "cancelled", Origin.DRAIN, (1, 2, 3))]
    world.plan(0, (1, 2, 4))
    world.step()
    assert world.step() == [], "what an operator planned lapses by no change of states"


# ---- foresight and progress ----


def test_what_is_foreseen_is_what_happens() -> None:
    world = World(["a", "b", "c", "a", "b", "c"], [(1, 2, 3), (3, 1, 2), (4, 2, 3)] * 7)
    seen = forecast(drained(world.image, 3), world.leaders, world.bounds, [node(3)])
    assert seen.stuck == seen.leaderless == ()
    world.set_state(3, NodeState.DRAINING)
    steps = world.settle()
    assert [(s.key[1], s.before, s.after) for s in steps] == [
        (row.partition, row.before, row.after) for row in seen.moves
    ]
    assert len(steps) == 21


def test_what_cannot_go_is_foreseen_by_name() -> None:
    world = World([None] * 3, [(1, 2, 3)], [(1,)])
    world.kill(1)
    after = drained(world.image, 1)
    seen = forecast(after, world.leaders, world.bounds, [node(1)])
    assert [(s.topic, s.partition) for s in seen.stuck] == [("t1", 0)]
    assert [(s.topic, s.partition) for s in seen.leaderless] == [("t2", 0)]
    assert [(row.topic, row.after) for row in seen.moves] == [("t2", (2,))]


def test_progress_of_a_drain_and_of_a_maintenance() -> None:
    world = World([None] * 4, [(1, 2, 3)] * 2)
    epoch = world.image.brokers[node(1)].epoch
    world.machine.apply(ClaimGroup(group="g", node_id=node(1), broker_epoch=epoch))
    world.set_state(1, NodeState.MAINTENANCE)

    def progress() -> tuple[int, int, int, bool]:
        world.survey.see(world.image, (), 0)
        seen = node_progress(world.survey, world.leaders, world.bounds, node(1))
        return seen.replicas, seen.leaderships, seen.claims, seen.is_done

    assert progress() == (2, 2, 1, False)
    world.kill(1)
    assert progress() == (2, 0, 0, True)
    world.revive(1)
    world.set_state(1, NodeState.DRAINING)
    assert progress()[0] == 2
    world.settle()
    assert progress() == (0, 0, 1, False)
    world.kill(1)
    assert progress() == (0, 0, 0, True)


def test_a_leadership_that_nobody_could_take_is_named() -> None:
    world = World([None] * 3, [(1, 2)], [(1,)])
    world.set_state(1, NodeState.MAINTENANCE)
    world.survey.see(world.image, (), 0)
    progress = node_progress(world.survey, world.leaders, world.bounds, node(1))
    assert [(s.topic, s.reason) for s in progress.stuck] == [
        ("t2", "no other replica is in sync on a broker that may lead")
    ]


# ---- cost ----


def test_a_look_costs_what_has_changed() -> None:
    """Ten thousand partitions are looked at once; then each look takes as many as have changed or
    wait, up to a bound, however many there are."""
    world = World([None] * 5, [(1, 2, 3)] * 10_000)
    world.bounds = Bounds(moves_max=10)
    survey = world.survey
    world.step()
    assert survey.looked_count == 10_000
    world.look()
    assert survey.looked_count == 10_000
    world.set_state(1, NodeState.DRAINING)
    world.step()
    assert survey.looked_count == 20_000 + 20, "the queue is made once"
    for index in range(10):
        before = survey.looked_count
        world.report(index, world.partition(index).replicas)
        assert len(world.step()) == 1
        assert survey.looked_count - before <= 40
    world.kill(2)
    world.kill(3)  # nobody leads any more
    before = survey.looked_count
    world.step()
    assert survey.looked_count - before <= LOOKS_MAX + 40


def test_a_deleted_topic_leaves_nothing_behind() -> None:
    world = World([None] * 4, [(1, 2, 3)] * 3, [(1, 2, 3)])
    world.set_state(1, NodeState.DRAINING)
    world.plan(0, (1, 2, 4), topic=2)
    world.step()
    world.machine.apply(DeleteTopics(topic_ids=(topic_id(1), topic_id(2))))
    world.survey.see(world.image, (), 0)
    survey = world.survey
    assert not any((survey.partitions, survey.moving, survey.due, survey.holds_any(node(4))))
    assert not any(survey.planned.values())


# ---- properties ----


@st.composite
def clusters(draw: st.DrawFn) -> World:
    """Brokers in racks, with states, and partitions on them."""
    count = draw(st.integers(3, 7))
    racks = draw(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=count, max_size=count))
    factor = st.integers(1, 3)
    placements = st.lists(
        factor.flatmap(
            lambda size: st.permutations(range(1, count + 1)).map(lambda p: tuple(p[:size]))
        ),
        min_size=1,
        max_size=8,
    )
    return World(racks, draw(placements), draw(placements))


def rack_of(world: World, number: int) -> object:
    return world.image.brokers[node(number)].rack or number


@settings(deadline=None, max_examples=150)
@given(clusters(), st.integers(0, 1 << 30))
def test_whatever_happens_factor_and_racks_hold_and_all_ends(world: World, seed: int) -> None:
    random = Random(seed)
    factors = [len(replicas) for replicas in world.replicas()]
    world.bounds = Bounds(moves_max=random.randint(1, 4))
    count = len(world.image.brokers)
    for _ in range(12):
        number = random.randint(1, count)
        draw = random.random()
        if draw < 0.3:
            world.set_state(number, random.choice(list(NodeState)))
        elif draw < 0.45:
            world.kill(number)
        elif draw < 0.6:
            world.revive(number)
        elif draw < 0.75:
            down = [n for n in sorted(world.image.brokers) if not world.is_up(n)]
            world.bounds = evolve(world.bounds, dead=tuple(down[:1]))
        else:
            world.now_ms += random.choice((1.0, LONG_MS))
        steps = world.step()
        check_steps(world, steps)
        assert [len(replicas) for replicas in world.replicas()] == factors
        check_survey(world)
        if random.random() < 0.5:
            world.carry_out()
            world.survey.see(world.image, world.bounds.dead, world.now_ms)
    world.settle()
    check_end(world)


def check_steps(world: World, steps: list[Step]) -> None:
    going = world.survey.going
    for step in steps:
        assert len(set(step.after)) == len(step.after) == len(step.before)
        arriving = [n for n in step.after if n not in step.before]
        if step.what in ("cancelled", "dropped"):
            continue
        for number in arriving:
            broker = world.survey.image.brokers[number]
            assert broker.takes_replicas
            assert not broker.is_fenced
            assert number not in going
        kept = [n for n in step.after if n in step.before and n not in going]
        racks = Counter(rack_of(world, n) for n in kept)
        is_open = {
            rack_of(world, b.node_id)
            for b in world.survey.image.brokers.values()
            if b.takes_replicas and b.node_id not in going
        }
        if len(is_open | set(racks)) >= len(step.after):
            for number in arriving:
                rack = rack_of(world, number)
                assert racks[rack] == 0, "two in one rack although racks suffice"
                racks[rack] += 1


def check_survey(world: World) -> None:
    """What is kept up says the same as what is made anew."""
    world.survey.see(world.image, world.bounds.dead, world.now_ms)
    kept, fresh = world.survey, Survey(world.image, world.bounds.dead, world.now_ms)
    assert kept.partitions == fresh.partitions
    assert kept.going == fresh.going
    assert {n: set(k) for n, k in kept.held.items() if k} == {
        n: set(k) for n, k in fresh.held.items()
    }
    assert {n: set(k) for n, k in kept.named.items() if k} == {
        n: set(k) for n, k in fresh.named.items()
    }
    assert set(kept.moving) == set(fresh.moving)
    assert set(kept.due) == set(fresh.due)
    assert {o: set(k) for o, k in kept.planned.items()} == {
        o: set(k) for o, k in fresh.planned.items()
    }


def check_end(world: World) -> None:
    """What is still on a broker that must go has a reason."""
    world.survey.see(world.image, world.bounds.dead, world.now_ms)
    for number in world.survey.going:
        progress = node_progress(world.survey, world.leaders, world.bounds, number)
        named = {(s.topic, s.partition) for s in progress.stuck}
        for topic, partition in all_partitions(world.image):
            if number in partition.replicas:
                assert (topic.name, partition.index) in named
