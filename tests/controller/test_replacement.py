"""Replacing a node: what is to vote, moved, refused and told; all through controllers too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from raftmq.controller import replacement
from raftmq.controller.leaders import LeaderTable
from raftmq.controller.moves import Bounds, Survey, next_moves
from raftmq.controller.replacement import plan_replacement, progress
from raftmq.controller.topic_validation import Settings, load_of, plan_topic
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import CreateTopicsCall, NewTopic, Outcome, ReplaceNodeCall
from raftmq.metadata.commands import (
    ChangeNodes,
    CreateTopics,
    EndReplacement,
    FeatureUpdate,
    FenceBroker,
    MembersReport,
    NodeChange,
    NodeState,
    ReassignPartition,
    ReplaceNode,
    ReportVoters,
    UnregisterBroker,
    VotersReport,
)
from raftmq.metadata.features import SUPPORTED, named
from raftmq.metadata.image import (
    LEVEL_OF_MOVES,
    RAFTMQ_LEVEL,
    MetadataImage,
    partition_target,
)
from raftmq.metadata.results import Rejection
from raftmq.metadata.snapshot import decode_image, encode_image
from raftmq.metadata.voters import metadata_target
from raftmq.raft.membership import Configuration
from raftmq.replication.membership import next_configuration
from raftmq.types import LeaderEpoch, NodeId
from tests.controller.metadata_cluster import CLIENT, MetadataCluster
from tests.metadata.metadata_commands import (
    FIRST,
    Machine,
    creation,
    group_of,
    node,
    raised,
    register,
    replica_of,
    topic_id,
)


@pytest.fixture
def machine() -> Machine:
    """Brokers 1 to 5; a topic of six partitions on 1, 2, 3."""
    machine = Machine()
    machine.register_all(1, 2, 3, 4, 5)
    machine.apply(CreateTopics(topics=(creation("a", 1, *([(1, 2, 3)] * 6)),)))
    return machine


def _fence(machine: Machine, number: int) -> None:
    epoch = machine.image.brokers[node(number)].epoch
    machine.apply(FenceBroker(node_id=node(number), broker_epoch=epoch))


def _move_all(machine: Machine) -> None:
    """Node 4 took over what node 1 held."""
    for index in range(6):
        machine.apply(
            ReassignPartition(
                topic_id=topic_id(1), partition=index, replicas=(node(4), node(2), node(3))
            )
        )
        report = VotersReport(topic_id(1), index, 5, (node(2), node(3), node(4)))
        machine.apply(ReportVoters(reports=(report,)))


def _led(image: MetadataImage, leader: int = 2) -> LeaderTable:
    table = LeaderTable()
    for topic in image.topics_by_id():
        for partition in topic.partitions:
            table.led(
                topic.topic_id,
                partition.index,
                leader=node(leader),
                leader_epoch=LeaderEpoch(1),
                isr=partition.voters,
                voters=partition.voters,
            )
    return table


def _any(_node_id: NodeId) -> int:
    return 20_000


def next_end(
    image: MetadataImage, configuration: Configuration
) -> EndReplacement | UnregisterBroker | None:
    return replacement.next_end(image, configuration, Survey(image).has_any, lambda *_: True)


# ---- apply ----


def test_a_replacement_is_state_and_ends_when_nothing_is_left(machine: Machine) -> None:
    assert not isinstance(machine.apply(ReplaceNode(old_id=node(1), new_id=node(4))), Rejection)
    version = machine.image.structure_version
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    assert machine.image.structure_version == version, "said twice, done once"
    assert decode_image(encode_image(machine.image)) == machine.image
    early = machine.apply(EndReplacement(old_id=node(1)))
    assert isinstance(early, Rejection)
    assert "alive" in early.message
    _fence(machine, 1)
    early = machine.apply(EndReplacement(old_id=node(1)))
    assert isinstance(early, Rejection)
    assert "holds replicas of a" in early.message
    _move_all(machine)
    assert machine.image.removals
    machine.apply(EndReplacement(old_id=node(1)))
    assert node(1) not in machine.image.brokers
    assert not machine.image.removals, "nobody waits for a node that is gone"
    assert machine.image.replacements[node(1)].is_done
    assert decode_image(encode_image(machine.image)) == machine.image
    machine.apply(register(1, storage=7))
    assert node(1) not in machine.image.replacements, "it begins anew"


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        (None, (1, 9), ErrorCode.BROKER_ID_NOT_REGISTERED),
        (None, (1, 1), ErrorCode.INVALID_REQUEST),
        ((4, 5), (1, 4), ErrorCode.INVALID_REQUEST),
    ],
    ids=["unknown", "itself", "who is to go"],
)
def test_what_apply_rejects(
    machine: Machine, first: tuple[int, int] | None, second: tuple[int, int], code: ErrorCode
) -> None:
    if first is not None:
        machine.apply(ReplaceNode(old_id=node(first[0]), new_id=node(first[1])))
    result = machine.apply(ReplaceNode(old_id=node(second[0]), new_id=node(second[1])))
    assert isinstance(result, Rejection)
    assert result.code is code


def test_another_successor_may_be_named(machine: Machine) -> None:
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(5)))
    assert machine.image.leaving() == {1: 5}


def test_producer_ids_are_skipped_after_a_recovery(machine: Machine) -> None:
    before = machine.image.next_producer_id
    machine.apply(replace(register(4), recoveries=1))
    assert machine.image.next_producer_id == before + 1_000_000
    machine.apply(replace(register(5), recoveries=1))
    assert machine.image.next_producer_id == before + 1_000_000, "once for each recovery"
    assert decode_image(encode_image(machine.image)) == machine.image


# ---- target memberships ----


def test_the_metadata_group_targets_what_is_missing(machine: Machine) -> None:
    image = machine.image
    assert metadata_target(group_of("123", "45"), image, FIRST) is None
    _fence(machine, 1)
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    target = metadata_target(group_of("123", "45"), machine.image, FIRST)
    assert target is not None
    assert (target.voters, target.leaving, target.demoted) == ((4, 2, 3), (), (1,))
    assert metadata_target(group_of("234", "5"), machine.image, FIRST) is None
    machine.apply(ReplaceNode(old_id=node(4), new_id=node(5)))
    _fence(machine, 4)
    target = metadata_target(group_of("123", "45"), machine.image, FIRST)
    assert target is not None
    assert target.voters == (5, 2, 3), "a successor that goes itself is passed over"
    assert target.leaving == (4,)
    _move_all(machine)
    target = metadata_target(group_of("123", "45"), machine.image, FIRST)
    assert target is not None
    assert (target.leaving, target.demoted) == ((1,), (4,)), "who holds nothing and is gone may go"


def test_a_node_that_leaves_follows_while_it_holds_anything(machine: Machine) -> None:
    """It may have been silent for a moment only, and lead what it has to hear that it must give."""
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    _fence(machine, 1)
    assert metadata_target(group_of("234", "15"), machine.image, FIRST) is None
    _move_all(machine)
    target = metadata_target(group_of("234", "15"), machine.image, FIRST)
    assert target is not None
    assert target.leaving == (1,)


def test_a_voter_that_lives_follows_until_it_is_stopped(machine: Machine) -> None:
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    target = metadata_target(group_of("1234", "5"), machine.image, FIRST)
    assert target is not None
    assert (target.voters, target.leaving, target.demoted) == ((4, 2, 3), (), (1,))
    live = [replica_of(n) for n in (2, 1, 3, 4, 5)]
    step = next_configuration(group_of("1234", "5"), {}, live, live, target)
    assert step == group_of("234", "15")
    assert metadata_target(step, machine.image, FIRST) is None
    assert next_end(machine.image, step) is None
    _fence(machine, 1)
    _move_all(machine)
    target = metadata_target(step, machine.image, FIRST)
    assert target is not None
    assert next_configuration(step, {}, live, live, target) == group_of("234", "5")


def test_voters_that_were_given_up_are_made_up_for(machine: Machine) -> None:
    for number in (2, 3):
        _fence(machine, number)
    target = metadata_target(group_of("1", "45"), machine.image, FIRST)
    assert target is not None
    assert target.voters == (1, 4, 5)
    machine.apply(ReplaceNode(old_id=node(2), new_id=node(5)))
    target = metadata_target(group_of("1", "45"), machine.image, FIRST)
    assert target is not None
    assert target.voters == (1, 5, 4), "successors first"
    observer = metadata_target(group_of("145"), machine.image, FIRST)
    assert observer is None


def test_an_observer_that_is_replaced_makes_no_voter(machine: Machine) -> None:
    machine.apply(ReplaceNode(old_id=node(4), new_id=node(5)))
    assert metadata_target(group_of("123", "45"), machine.image, FIRST) is None, "it lives"
    _fence(machine, 4)
    target = metadata_target(group_of("123", "45"), machine.image, FIRST)
    assert target is not None
    assert (target.voters, target.leaving) == ((1, 2, 3), (4,))


def test_a_partition_targets_live_brokers_only(machine: Machine) -> None:
    group = machine.image.topics["a"].group_id(0)
    for other in (
        group._replace(topic_id=topic_id(9)),
        group._replace(partition=6),
        group._replace(creation_epoch=group.creation_epoch - 1),  # an earlier life of it
    ):
        assert partition_target(machine.image, other) is None
    _fence(machine, 3)
    target = partition_target(machine.image, group)
    assert target is not None
    assert target.voters == (1, 2, 3)
    assert sorted(target.present) == [1, 2]


# ---- moves ----


def next_move(
    image: MetadataImage,
    leaders: LeaderTable,
    moves_max: int,
    limit_of: Callable[[NodeId], int],
) -> ReassignPartition | None:
    steps = next_moves(Survey(image), leaders, Bounds(moves_max, limit_of))
    assert len(steps) <= 1, "below the level of moves each is compared with the whole state"
    return steps[0].command if steps else None  # type: ignore[return-value]


def test_moves_are_few_at_a_time_and_end(machine: Machine) -> None:
    _fence(machine, 1)
    assert next_move(machine.image, _led(machine.image), 2, _any) is None
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    assert next_move(machine.image, LeaderTable(), 2, _any) is None, "nobody leads"
    for index in range(2):
        move = next_move(machine.image, _led(machine.image), 2, _any)
        assert move is not None
        assert (move.partition, move.replicas) == (index, (4, 2, 3))
        machine.apply(move)
    assert next_move(machine.image, _led(machine.image), 2, _any) is None, "two are on their way"
    report = VotersReport(topic_id(1), 0, 5, (node(1), node(2), node(3), node(4)))
    machine.apply(ReportVoters(reports=(report,)))
    assert next_move(machine.image, _led(machine.image), 2, _any) is None, "one is not gone yet"
    report = VotersReport(topic_id(1), 0, 5, (node(2), node(3), node(4)))
    machine.apply(ReportVoters(reports=(report,)))
    move = next_move(machine.image, _led(machine.image), 2, _any)
    assert move is not None
    assert move.partition == 2


def test_a_successor_that_holds_the_partition_gives_it_to_another(machine: Machine) -> None:
    _fence(machine, 1)
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(2)))
    move = next_move(machine.image, _led(machine.image), 9, _any)
    assert move is not None
    assert move.replicas == (4, 2, 3)
    _fence(machine, 4)
    _fence(machine, 5)
    assert next_move(machine.image, _led(machine.image), 9, _any) is None


def test_a_successor_without_room_is_spared(machine: Machine) -> None:
    """Its descriptors would run out; another node takes what it cannot."""
    _fence(machine, 1)
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))

    def limit_of(node_id: NodeId) -> int:
        return 2 if node_id == 4 else 100

    for _ in range(6):
        move = next_move(machine.image, _led(machine.image), 9, limit_of)
        assert move is not None
        machine.apply(move)
    held = load_of(machine.image).replicas
    assert (held[node(4)], held[node(5)]) == (2, 4)
    assert next_move(machine.image, _led(machine.image), 9, limit_of) is None


def test_a_move_waits_where_nobody_has_room(machine: Machine) -> None:
    _fence(machine, 1)
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    assert next_move(machine.image, _led(machine.image), 9, lambda _node: 0) is None


def test_the_plan_asks_for_room(machine: Machine) -> None:
    _fence(machine, 1)
    limits = {node(4): 4, node(5): 1}
    command, [verdict] = _plan(machine, 1, 4, limit_of=lambda n: limits.get(n, 100))
    assert command is None
    assert "node 4 has no room (replicas_max is 4)" in (verdict.message or "")
    limits[node(5)] = 2
    command, rows = _plan(machine, 1, 4, limit_of=lambda n: limits.get(n, 100))
    assert command is not None
    assert [row.message for row in rows if "replicas go" in (row.message or "")] == [
        "4 partition replicas go from node 1 to node 4",
        "2 partition replicas go from node 1 to node 5",
    ]


def test_new_topics_avoid_who_leaves(machine: Machine) -> None:
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    topic = NewTopic(name="b", partitions=4, replication_factor=3)
    made = plan_topic(
        machine.image, {}, load_of(machine.image), topic, topic_id(2), Settings(node(2), {})
    )
    assert {n for replicas in made.replicas for n in replicas} == {2, 3, 4, 5}


@pytest.mark.parametrize(
    "state", [NodeState.NEW, NodeState.CORDONED, NodeState.DRAINING, NodeState.MAINTENANCE]
)
def test_new_topics_avoid_nodes_that_take_nothing(machine: Machine, state: NodeState) -> None:
    machine.image = raised(machine.image)
    machine.apply(ChangeNodes(changes=(NodeChange(node(5), state),)))
    load = load_of(machine.image)
    topic = NewTopic(name="b", partitions=4, replication_factor=4)
    made = plan_topic(machine.image, {}, load, topic, topic_id(2), Settings(node(2), {}))
    assert {n for replicas in made.replicas for n in replicas} == {1, 2, 3, 4}
    wide = NewTopic(name="b", partitions=1, replication_factor=5)
    with pytest.raises(KafkaError, match="only 4 broker"):
        plan_topic(machine.image, {}, load, wide, topic_id(2), Settings(node(2), {}))


def test_new_nodes_make_no_default_of_replicas() -> None:
    machine = Machine()
    machine.register_all(1, 2, 3)
    machine.image = raised(machine.image)
    changes = tuple(NodeChange(node(n), NodeState.NEW) for n in (2, 3))
    machine.apply(ChangeNodes(changes=changes))
    topic, load = NewTopic(name="b"), load_of(machine.image)
    made = plan_topic(machine.image, {}, load, topic, topic_id(2), Settings(node(1), {}))
    assert made.replicas == ((1,),)


# ---- telling and refusing ----


def _plan(
    machine: Machine,
    old: int,
    new: int,
    configuration: Configuration | None = None,
    limit_of: Callable[[NodeId], int] | None = None,
    **more: Any,
) -> tuple[ReplaceNode | None, list[Outcome]]:
    call = ReplaceNodeCall(old_id=old, new_id=new, **more)
    group = group_of("123", "45") if configuration is None else configuration
    command, outcomes = plan_replacement(
        machine.image, group, FIRST, call, limit_of or _any, lambda *_: False
    )
    return command, list(outcomes)


def test_the_plan_shows_each_quorum(machine: Machine) -> None:
    _fence(machine, 1)
    command, rows = _plan(machine, 1, 4, dry_run=True)
    assert command is None
    assert rows[0].message == "would begin"
    assert [row.message for row in rows[1:]] == [
        "__cluster_metadata: now: voters 1,2,3, 2 of 3 live, quorum 2",
        "__cluster_metadata: let 4 vote once it has caught up: voters 1,2,3,4, 3 of 4 live, "
        "quorum 3",
        "__cluster_metadata: make 1 a learner: voters 2,3,4, 3 of 3 live, quorum 2",
        "6 partition replicas go from node 1 to node 4",
    ]
    command, rows = _plan(machine, 1, 4)
    assert command == ReplaceNode(old_id=node(1), new_id=node(4))
    machine.apply(command)
    assert _plan(machine, 1, 4) == (None, [Outcome(name="verdict", message="goes on")])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (1, 1, "cannot take its own place"),
        (8, 4, "node 8 is not known"),
        (1, 9, "node 9 has not joined"),
        (1, 5, "node 5 is down"),
        (2, 4, "node 2 is alive: stop it, or say --even-if-alive"),
    ],
    ids=["itself", "old unknown", "new unknown", "new down", "old alive"],
)
def test_refusals(machine: Machine, old: int, new: int, says: str) -> None:
    _fence(machine, 1)
    _fence(machine, 5)
    command, [verdict] = _plan(machine, old, new)
    assert command is None
    assert verdict.code is not ErrorCode.NONE
    assert says in (verdict.message or "")


def test_a_step_that_would_lose_the_quorum_is_refused(machine: Machine) -> None:
    _fence(machine, 1)
    _fence(machine, 2)
    command, [verdict] = _plan(machine, 1, 4)
    assert command is None
    assert verdict.code is ErrorCode.INELIGIBLE_REPLICA
    assert "voters 1,2,3 of which only 3 live" in (verdict.message or "")


def test_a_partition_that_nobody_could_take_is_named(machine: Machine) -> None:
    for number in (1, 4, 5):
        _fence(machine, number)
    command, [verdict] = _plan(machine, 1, 2)
    assert command is None
    assert verdict.message == (
        "a-0: no broker can take the replica of node 1: node 2 holds it; node 3 holds it; "
        "node 4 is down; node 5 is down (and 5 more): start another node"
    )


def test_partitions_without_a_majority_are_named(machine: Machine) -> None:
    machine.apply(CreateTopics(topics=(creation("one", 2, (1,)),)))
    _fence(machine, 1)
    _, rows = _plan(machine, 1, 4)
    assert "1 of them have lost their majority" in (rows[-1].message or "")
    assert (rows[-1].message or "").endswith(": one-0")


def test_the_reference_engine_replaces_nobody(machine: Machine) -> None:
    call = ReplaceNodeCall(old_id=1, new_id=4)
    command, [verdict] = plan_replacement(machine.image, None, (), call, _any, lambda *_: False)
    assert command is None
    assert verdict.code is ErrorCode.UNSUPPORTED_VERSION


def test_progress(machine: Machine) -> None:
    machine.apply(CreateTopics(topics=(creation("one", 2, (1,)),)))
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    _fence(machine, 1)
    table = LeaderTable()
    for index in range(6):
        table.led(
            topic_id(1), index, leader=node(2), leader_epoch=LeaderEpoch(1), isr=(), voters=()
        )
    [row] = progress(machine.image, group_of("123", "4"), table)
    assert (row.is_voting_settled, row.partitions, row.stuck) == (False, 7, ("one-0",))
    assert next_end(machine.image, group_of("234")) is None
    lone = Machine()
    lone.register_all(1, 4)
    lone.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    [row] = progress(lone.image, group_of("4"), table)
    assert row.waits_for_end
    assert next_end(lone.image, group_of("4")) is None, "it is alive"
    _fence(lone, 1)
    assert next_end(lone.image, group_of("14")) is None, "it votes"
    assert next_end(lone.image, group_of("4")) == EndReplacement(old_id=node(1))


def test_a_replaced_node_leaves_a_tombstone() -> None:
    machine = Machine()
    machine.register_all(1, 4)
    machine.image = raised(machine.image)
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    _fence(machine, 1)
    ends = []
    while (end := next_end(machine.image, group_of("4"))) is not None:
        ends.append(end)
        assert not isinstance(machine.apply(end), Rejection)
    assert ends == [UnregisterBroker(node_id=node(1)), EndReplacement(old_id=node(1))]
    assert machine.image.replacements[node(1)].is_done
    old, empty = (
        replace(register(1, storage=storage), features=named(SUPPORTED)) for storage in (None, 7)
    )
    refused = machine.apply(old)
    assert isinstance(refused, Rejection)
    assert refused.code is ErrorCode.INCONSISTENT_CLUSTER_ID
    assert not isinstance(machine.apply(empty), Rejection)
    assert node(1) not in machine.image.replacements, "it begins anew"


def test_a_replacement_does_not_end_before_the_groups_leaders_know() -> None:
    """Node 1 was to get a replica. The leader, which does not know of the replacement yet, may have
    let it vote: its disk is not refused before that is certain."""
    machine = Machine()
    machine.register_all(1, 2, 3, 4)
    machine.image = raised(machine.image)
    machine.apply(CreateTopics(topics=(creation("a", 1, (2, 3)),)))
    epoch = machine.image.topics["a"].partitions[0].creation_epoch
    for replicas in ((2, 1), (2, 4)):
        machine.apply(
            ReassignPartition(
                topic_id=topic_id(1),
                partition=0,
                replicas=tuple(map(node, replicas)),
                creation_epoch=epoch,
            )
        )
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    _fence(machine, 1)
    assert not Survey(machine.image).has_any(node(1))
    assert next_end(machine.image, group_of("4")) is None
    now = node(2), node(4)
    report = MembersReport(topic_id(1), 0, epoch, 1, now, now, int(machine.image.version))
    machine.apply(ReportVoters(reports=(), members=(report,)))
    assert next_end(machine.image, group_of("4")) == UnregisterBroker(node_id=node(1))


# ---- through controllers ----


def test_a_replacement_survives_its_controllers() -> None:
    cluster = MetadataCluster.formed(3)
    cluster.auto_lead = True
    cluster.start(4)
    cluster.run(1_000)
    assert cluster.nodes[4].control.lifecycle.is_ready
    topic = NewTopic(name="t", partitions=9, replication_factor=3)
    created = cluster.nodes[2].control.call(CreateTopicsCall(topics=(topic,)), CLIENT)
    cluster.run(300)
    assert created.result()[0].code is ErrorCode.NONE
    cluster.kill(3)
    cluster.run(4_000)
    promise = cluster.nodes[2].control.call(ReplaceNodeCall(old_id=3, new_id=4), CLIENT)
    cluster.run(50)
    verdict, *steps = promise.result()
    assert (verdict.code, verdict.message) == (ErrorCode.NONE, "begun")
    assert steps
    cluster.elect(2)
    cluster.run(200)
    cluster.elect(1)
    cluster.run(3_000)
    image = cluster.nodes[2].engine.image
    assert [v.node_id for v in cluster.configuration.voters] == [1, 2, 4]
    assert NodeId(3) not in image.brokers
    assert image.replacements[NodeId(3)].is_done
    for partition in image.topics["t"].partitions:
        assert sorted(partition.voters) == [1, 2, 4]
    again = cluster.nodes[4].control.call(ReplaceNodeCall(old_id=3, new_id=4), CLIENT)
    cluster.run(50)
    assert again.result()[0].message == "done already"


@pytest.mark.parametrize("is_moved", [False, True], ids=["while it moves", "in the last moment"])
def test_an_empty_disk_waits_until_its_replacement_has_ended(is_moved: bool) -> None:
    """It would stay fenced, or keep the replacement open as a node that lives; and the old disk
    would never be refused."""
    levels = (FeatureUpdate(RAFTMQ_LEVEL, LEVEL_OF_MOVES),)
    cluster = MetadataCluster.formed(3, first_levels=levels)
    cluster.auto_lead = True
    cluster.start(4)
    cluster.run(1_000)
    topic = NewTopic(name="t", partitions=9, replication_factor=3)
    cluster.nodes[2].control.call(CreateTopicsCall(topics=(topic,)), CLIENT)
    cluster.run(300)
    cluster.kill(3)
    cluster.run(4_000)
    cluster.auto_lead = is_moved  # moves are made by leaders
    cluster.nodes[2].control.call(ReplaceNodeCall(old_id=3, new_id=4), CLIENT)
    cluster.run(50)
    cluster.elect(2)  # it counts everybody as heard
    cluster.run(500)
    image = cluster.nodes[2].engine.image
    assert Survey(image).has_any(NodeId(3)) is not is_moved
    assert not image.replacements[NodeId(3)].is_done
    empty = cluster.start(3, storage_id=777)
    cluster.run(1_000)
    cluster.auto_lead = True
    assert "is being replaced by node 4" in str(empty.control.lifecycle.refusal)
    cluster.run(4_000)
    image = cluster.nodes[2].engine.image
    assert image.removed[NodeId(3)] == (103,), "the old disk"
    assert NodeId(3) not in image.replacements, "it began anew"
    broker = image.brokers[NodeId(3)]
    assert (broker.storage_id, broker.state, broker.is_fenced) == (777, NodeState.NEW, False)
    assert empty.control.lifecycle.is_ready
    assert empty.control.lifecycle.refusal is None
    assert [v.node_id for v in cluster.configuration.voters] == [1, 2, 4]
    for partition in image.topics["t"].partitions:
        assert sorted(partition.voters) == [1, 2, 4]
