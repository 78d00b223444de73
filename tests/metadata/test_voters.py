"""How many nodes vote on metadata, which, and each step from one set of voters to another."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from attrs import evolve
from msgspec.structs import replace

from raftmq.errors import KafkaError
from raftmq.metadata.commands import (
    ChangeNodes,
    FenceBroker,
    NodeChange,
    NodeState,
    ReplaceNode,
    UnfenceBroker,
    UnregisterBroker,
)
from raftmq.metadata.features import SUPPORTED, named
from raftmq.metadata.image import MetadataImage, present_nodes
from raftmq.metadata.voters import (
    grown_voters,
    metadata_target,
    shrunk_voters,
    voter_steps,
    voters_for,
    voters_obtainable,
)
from raftmq.raft.membership import Configuration, check_change
from raftmq.replication.membership import keeps_quorum, next_configuration
from raftmq.types import NodeId, ReplicaId, StorageId
from tests.metadata.metadata_commands import (
    FIRST,
    Machine,
    group_of,
    node,
    raised,
    register,
    replica_of,
)


def _machine(*numbers: int, racks: str = "") -> Machine:
    """Brokers of these numbers, at the newest level; `racks` has a letter for each."""
    machine = Machine()
    machine.register_all(*numbers)
    machine.image = raised(machine.image)
    for number, rack in zip(numbers, racks, strict=False):
        broker = machine.image.brokers[node(number)]
        brokers = machine.image.brokers.set(node(number), evolve(broker, rack=rack))
        machine.image = evolve(machine.image, brokers=brokers)
    return machine


def _set(machine: Machine, state: NodeState, *numbers: int) -> None:
    changes = tuple(NodeChange(node(number), state) for number in numbers)
    machine.apply(ChangeNodes(changes=changes))


def _want(machine: Machine, voters: int) -> None:
    machine.apply(ChangeNodes(voters=voters))


def _fence(machine: Machine, *numbers: int) -> None:
    for number in numbers:
        epoch = machine.image.brokers[node(number)].epoch
        machine.apply(FenceBroker(node_id=node(number), broker_epoch=epoch))


def _voters(
    image: MetadataImage, configuration: Configuration, first: Sequence[NodeId] = FIRST
) -> str:
    """The voters of the target, in order; of the configuration where that is reached."""
    target = metadata_target(configuration, image, first)
    if target is None:
        return "".join(str(voter.node_id) for voter in configuration.voters)
    return "".join(map(str, sorted(target.voters)))


# ---- how many ----


@pytest.mark.parametrize(
    ("nodes", "voters"), [(0, 1), (1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (6, 5), (50, 5)]
)
def test_as_many_vote_as_nodes_allow(nodes: int, voters: int) -> None:
    assert voters_for(nodes) == voters


@pytest.mark.parametrize(
    ("wanted", "known", "new", "voters"),
    [
        (0, 3, 1, 3),
        (0, 3, 2, 5),
        (0, 4, 1, 5),
        (0, 5, 1, 3),
        (3, 5, 1, 3),
        (5, 5, 2, 5),
        (1, 1, 1, 1),
        (1, 1, 2, 3),
        (2, 2, 1, 3),
        (2, 4, 1, 5),
        (7, 7, 1, 7),
    ],
    ids=[
        "four nodes: three vote",
        "two more: five",
        "the fifth node: five",
        "it began with three of five: somebody wanted it so",
        "three of five was asked for",
        "five is enough",
        "two nodes: one votes",
        "one grows to three",
        "two, for want of a third",
        "two, which nobody asks for",
        "more than five was asked for",
    ],
)
def test_voters_grow_with_the_nodes(wanted: int, known: int, new: int, voters: int) -> None:
    machine = _machine(*range(1, known + new + 1))
    _set(machine, NodeState.NEW, *range(known + 1, known + new + 1))
    _want(machine, wanted)
    before = machine.image
    _set(machine, NodeState.ACTIVE, *range(known + 1, known + new + 1))
    assert grown_voters(before, machine.image, FIRST) == voters


@pytest.mark.parametrize(
    ("wanted", "voters", "learners", "draining", "shrunk"),
    [
        (3, "123", "4", (3,), 3),
        (3, "123", "", (3,), 2),
        (2, "12", "", (2,), 1),
        (5, "12345", "", (5,), 3),
        (5, "12345", "6", (5,), 5),
        (5, "12345", "", (4, 5), 3),
        (3, "123", "45", (4,), 3),
    ],
    ids=[
        "a successor",
        "none: two voters have two disks",
        "the last but one",
        "four are no better than three",
        "a sixth node",
        "two at once",
        "it has no vote",
    ],
)
def test_voters_become_fewer_only_without_a_successor(
    wanted: int, voters: str, learners: str, draining: tuple[int, ...], shrunk: int
) -> None:
    machine = _machine(*(int(n) for n in voters + learners))
    _want(machine, wanted)
    _set(machine, NodeState.DRAINING, *draining)
    assert shrunk_voters(machine.image, group_of(voters, learners), FIRST) == shrunk


def test_dead_and_new_and_cordoned_nodes_get_no_vote() -> None:
    machine = _machine(1, 2, 3, 4, 5, 6, 7)
    _fence(machine, 4)
    _set(machine, NodeState.NEW, 5)
    _set(machine, NodeState.CORDONED, 6)
    _set(machine, NodeState.MAINTENANCE, 7)
    group = group_of("123", "4567")
    assert voters_obtainable(machine.image, group) == 3
    _want(machine, 5)
    assert _voters(machine.image, group) == "123"
    _set(machine, NodeState.ACTIVE, 6)
    assert _voters(machine.image, group) == "1236"


# ---- which ----


def test_a_draining_node_gives_its_vote_to_a_successor() -> None:
    machine = _machine(1, 2, 3, 4)
    _set(machine, NodeState.DRAINING, 1)
    target = metadata_target(group_of("123", "4"), machine.image, FIRST)
    assert target is not None
    assert (target.voters, target.leaving, target.demoted) == ((2, 3, 4), (), (1,))
    assert _voters(machine.image, group_of("1234")) == "234", "on the way it is the same"
    assert metadata_target(group_of("234", "1"), machine.image, FIRST) is None


def test_a_draining_node_keeps_its_vote_without_a_successor() -> None:
    machine = _machine(1, 2, 3)
    _set(machine, NodeState.DRAINING, 1)
    assert metadata_target(group_of("123"), machine.image, FIRST) is None
    _want(machine, 2)
    assert _voters(machine.image, group_of("123")) == "23"


def test_votes_are_spread_over_racks() -> None:
    machine = _machine(1, 2, 3, 4, 5, 6, racks="aabbcc")
    assert _voters(machine.image, group_of("12", "3456")) == "123"
    _want(machine, 5)
    assert _voters(machine.image, group_of("123", "456")) == "12345"
    assert _voters(machine.image, group_of("124", "56")) == "12456"
    _want(machine, 3)
    assert _voters(machine.image, group_of("12356")) == "135", "of each rack the first"


def test_a_surplus_is_taken_from_those_that_leave_and_then_from_the_dead() -> None:
    machine = _machine(1, 2, 3, 4, 5)
    assert metadata_target(group_of("12345"), machine.image, FIRST) is None, "nobody asked for it"
    _want(machine, 3)
    assert _voters(machine.image, group_of("12345")) == "123"
    _fence(machine, 2)
    assert _voters(machine.image, group_of("12345")) == "134"
    _set(machine, NodeState.DRAINING, 1)
    assert _voters(machine.image, group_of("12345")) == "345"


def test_three_stay_three_though_five_follow() -> None:
    machine = _machine(1, 2, 3, 4, 5)
    _want(machine, 3)
    assert (
        metadata_target(group_of("123", "45"), machine.image, tuple(map(node, range(1, 6)))) is None
    )


def test_the_successor_of_a_replaced_node_comes_first() -> None:
    machine = _machine(1, 2, 3, 4, 5)
    _set(machine, NodeState.DRAINING, 2)
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(5)))
    assert _voters(machine.image, group_of("123", "45")) == "345"


def test_a_removed_node_leaves_the_group_and_another_storage_of_it_does_not() -> None:
    machine = _machine(1, 2, 3, 4)
    _fence(machine, 4)
    machine.apply(UnregisterBroker(node_id=node(4)))
    target = metadata_target(group_of("123", "4"), machine.image, FIRST)
    assert target is not None
    assert (target.voters, target.leaving) == ((1, 2, 3), (4,))
    machine.apply(replace(register(4, storage=7), features=named(SUPPORTED)))
    assert machine.image.brokers[node(4)].state is NodeState.NEW
    anew = Configuration(group_of("123").voters, (ReplicaId(node(4), StorageId(7)),))
    assert metadata_target(anew, machine.image, FIRST) is None


# ---- the way ----


def _lines(machine: Machine, configuration: Configuration) -> list[str]:
    prefix = "__cluster_metadata: "
    texts = voter_steps(machine.image, configuration, FIRST)
    return [text.removeprefix(prefix) for text in texts]


def test_three_to_five_and_back() -> None:
    machine = _machine(1, 2, 3, 4, 5)
    _want(machine, 5)
    assert _lines(machine, group_of("123", "45")) == [
        "now: voters 1,2,3, 3 of 3 live, quorum 2",
        "let 4 vote once it has caught up: voters 1,2,3,4, 4 of 4 live, quorum 3",
        "let 5 vote once it has caught up: voters 1,2,3,4,5, 5 of 5 live, quorum 3",
    ]
    _want(machine, 3)
    assert _lines(machine, group_of("12345")) == [
        "now: voters 1,2,3,4,5, 5 of 5 live, quorum 3",
        "make 4 a learner: voters 1,2,3,5, 4 of 4 live, quorum 3",
        "make 5 a learner: voters 1,2,3, 3 of 3 live, quorum 2",
    ]


def test_the_leader_is_the_last_to_lose_its_vote() -> None:
    machine = _machine(1, 2, 3)
    _want(machine, 1)
    machine.apply(ChangeNodes(changes=(NodeChange(node(3), NodeState.CORDONED),)))
    texts = list(voter_steps(machine.image, group_of("123"), FIRST, node(2)))
    assert [text.split(":")[1] for text in texts] == [
        " now",
        " make 3 a learner",
        " make 2 a learner",
    ]


def test_the_vote_is_given_before_it_is_taken() -> None:
    machine = _machine(1, 2, 3, 4)
    _set(machine, NodeState.DRAINING, 2)
    assert _lines(machine, group_of("123", "4")) == [
        "now: voters 1,2,3, 3 of 3 live, quorum 2",
        "let 4 vote once it has caught up: voters 1,2,3,4, 4 of 4 live, quorum 3",
        "make 2 a learner: voters 1,3,4, 3 of 3 live, quorum 2",
    ]


@pytest.mark.parametrize(
    ("dead", "wanted", "draining", "says"),
    [
        ((1, 2), 5, (), "voters 1,2,3 of which only 3 live"),
        ((1,), 2, (2,), "voters 1,2,3 of which only 2,3 live"),
    ],
    ids=["no majority lives", "the dead one would be half of what stays"],
)
def test_no_step_is_planned_without_a_live_majority(
    dead: tuple[int, ...], wanted: int, draining: tuple[int, ...], says: str
) -> None:
    machine = _machine(1, 2, 3, 4, 5)
    _fence(machine, *dead)
    _set(machine, NodeState.CORDONED, *((4, 5) if draining else ()))
    _set(machine, NodeState.DRAINING, *draining)
    _want(machine, wanted)
    with pytest.raises(KafkaError, match=says):
        list(voter_steps(machine.image, group_of("123", "45"), FIRST))


@pytest.mark.parametrize("seed", range(200))
def test_every_way_is_made_of_single_safe_steps_and_ends(seed: int) -> None:
    """Whatever is wanted, and whatever changes on the way."""
    random = Random(seed)
    count = random.randint(1, 8)
    numbers = range(1, count + 1)
    racks = "".join(random.choice("abc") for _ in numbers)
    machine = _machine(*numbers, racks=racks)
    voting = random.sample(numbers, random.randint(1, min(5, count)))
    configuration = Configuration(
        tuple(map(replica_of, voting)), tuple(replica_of(n) for n in numbers if n not in voting)
    )
    first = tuple(map(node, voting))
    states = (NodeState.ACTIVE, NodeState.ACTIVE, NodeState.CORDONED, NodeState.DRAINING)
    for _ in range(4):
        _want(machine, random.choice((0, 1, 2, 3, 5)))
        for number in numbers:
            _set(machine, random.choice(states), number)
        for _ in range(random.choice((1, 2, 30))):
            target = metadata_target(configuration, machine.image, first)
            if target is None:
                break
            present = present_nodes(machine.image)
            live = [m for m in configuration.members if m.node_id in present]
            step = next_configuration(configuration, {}, live, live, target)
            assert step is not None, "everybody lives: nothing is in the way"
            check_change(configuration, step)
            assert keeps_quorum(step, live)
            configuration = step
        else:
            continue
        wanted = machine.image.voters_wanted or len(first)
        obtainable = voters_obtainable(machine.image, configuration)
        assert len(configuration.voters) >= min(wanted, max(1, obtainable))


@pytest.mark.parametrize("seed", range(200))
def test_deaths_on_the_way_cost_no_quorum_and_returns_let_it_end(seed: int) -> None:
    random = Random(1_000 + seed)
    numbers = range(1, random.randint(4, 7) + 1)
    machine = _machine(*numbers)
    configuration = group_of("123", "".join(str(n) for n in numbers[3:]))
    _want(machine, random.choice((1, 3, 5)))
    _set(machine, NodeState.DRAINING, random.choice((1, 2, 3)))
    dead: list[int] = []
    for turn in range(60):
        if turn < 30 and random.random() < 0.4:
            victim = random.choice(numbers)
            (dead.remove if victim in dead else dead.append)(victim)
        elif turn == 30:
            dead.clear()
        for number in numbers:
            broker = machine.image.brokers[node(number)]
            kind = FenceBroker if number in dead else UnfenceBroker
            machine.apply(kind(node_id=node(number), broker_epoch=broker.epoch))
        target = metadata_target(configuration, machine.image, FIRST)
        live = [m for m in configuration.members if m.node_id not in dead]
        if target is None or not keeps_quorum(configuration, live):
            continue  # it is there, or has no leader
        step = next_configuration(configuration, {}, live, live, target)
        if step is not None:
            check_change(configuration, step)
            assert keeps_quorum(step, live)
            configuration = step
    assert metadata_target(configuration, machine.image, FIRST) is None
    going = [n for n in (1, 2, 3) if machine.image.brokers[node(n)].state is NodeState.DRAINING]
    wanted = machine.image.voters_wanted
    if len(numbers) > wanted:
        assert going[0] not in [v.node_id for v in configuration.voters]
    assert len(configuration.voters) == min(wanted, len(numbers))
