"""What `node add`, `drain`, `remove`, `cordon` and `maintenance` do to the state, and refuse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from raftmq.controller.broker_lifecycle import Registration
from raftmq.controller.leaders import LeaderTable
from raftmq.controller.moves import Bounds, Survey
from raftmq.controller.node_changes import (
    STATES,
    Change,
    ChangeProgress,
    changes_under_way,
    drain_steps,
    plan_change,
)
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import (
    AdminRequest,
    BrokerHeartbeat,
    ChangeNodesCall,
    CreateTopicsCall,
    NewTopic,
    Outcome,
    ReplaceNodeCall,
)
from raftmq.metadata.commands import (
    ChangeNodes,
    ClaimGroup,
    CreateTopics,
    FeatureUpdate,
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
    UnregisterBroker,
)
from raftmq.metadata.features import SUPPORTED, named
from raftmq.metadata.image import LEVEL_OF_MOVES, RAFTMQ_LEVEL, MetadataImage
from raftmq.metadata.voters import metadata_target
from raftmq.raft.membership import Configuration
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
    topic_id,
)


@pytest.fixture
def machine() -> Machine:
    """Brokers 1 to 5, of which 5 is new; a topic of two partitions on 1, 2, 3."""
    machine = Machine()
    machine.register_all(1, 2, 3, 4, 5)
    machine.image = raised(machine.image)
    machine.apply(CreateTopics(topics=(creation("a", 1, *([(1, 2, 3)] * 2)),)))
    _set(machine, NodeState.NEW, 5)
    return machine


def _set(machine: Machine, state: NodeState, *numbers: int) -> None:
    changes = tuple(NodeChange(node(number), state) for number in numbers)
    machine.apply(ChangeNodes(changes=changes))


def _fence(machine: Machine, *numbers: int) -> None:
    for number in numbers:
        epoch = machine.image.brokers[node(number)].epoch
        machine.apply(FenceBroker(node_id=node(number), broker_epoch=epoch))


def _moves(image: MetadataImage, node_ids: tuple[NodeId, ...]) -> Iterable[str]:
    return [f"replicas of {', '.join(map(str, node_ids))} move"]


def _silence(_node_id: NodeId, _broker_epoch: int) -> bool:
    return False


def _plan(
    machine: Machine,
    change: str,
    *ids: int,
    configuration: Configuration | None = None,
    **more: Any,
) -> tuple[ChangeNodes | UnregisterBroker | None, list[Outcome]]:
    call = ChangeNodesCall(node_ids=ids, change=change, **more)
    group = group_of("123", "45") if configuration is None else configuration
    command, outcomes = plan_change(machine.image, group, FIRST, call, _moves, _silence)
    return command, list(outcomes)


def _words(rows: list[Outcome]) -> list[str]:
    return [(row.message or "").removeprefix("__cluster_metadata: ") for row in rows]


# ---- states ----


@pytest.mark.parametrize("change", [c for c in Change if c in STATES], ids=lambda c: c.value)
@pytest.mark.parametrize("state", list(NodeState), ids=lambda s: s.value)
def test_from_state_to_state(machine: Machine, change: Change, state: NodeState) -> None:
    """Either it leads to the new state, or it is there, or the way out is named."""
    sources, wanted = STATES[change]
    _set(machine, state, 4)
    command, rows = _plan(machine, change.value, 4)
    if state is wanted:
        assert (command, _words(rows)) == (None, ["done already"])
    elif state in sources:
        voters = 3 if change is Change.CANCEL_DRAIN else None
        assert command == ChangeNodes(changes=(NodeChange(node(4), wanted),), voters=voters)
        assert rows[0].code is ErrorCode.NONE
    else:
        assert command is None
        assert rows[0].code is ErrorCode.INVALID_REQUEST
        assert state is NodeState.ACTIVE or "`raftmq node " in (rows[0].message or "")


def test_a_dry_run_shows_all_and_does_nothing(machine: Machine) -> None:
    told = _plan(machine, "drain", 3, dry_run=True)
    assert told[0] is None
    command, rows = _plan(machine, "drain", 3)
    assert command == ChangeNodes(changes=(NodeChange(node(3), NodeState.DRAINING),))
    assert (told[1][0].message, rows[0].message) == ("would begin", "begun")
    assert told[1][1:] == rows[1:]
    assert _words(rows)[1:] == [
        "now: voters 1,2,3, 3 of 3 live, quorum 2",
        "let 4 vote once it has caught up: voters 1,2,3,4, 4 of 4 live, quorum 3",
        "make 3 a learner: voters 1,2,4, 3 of 3 live, quorum 2",
        "replicas of 3 move",
    ]


def test_a_cluster_grows_to_five_voters(machine: Machine) -> None:
    command, rows = _plan(machine, "add", 5)
    assert command == ChangeNodes(changes=(NodeChange(node(5), NodeState.ACTIVE),), voters=5)
    assert _words(rows)[-2:] == [
        "let 5 vote once it has caught up: voters 1,2,3,4,5, 5 of 5 live, quorum 3",
        "replicas of 5 move",
    ]
    command, rows = _plan(machine, "add", 5, voters=3)
    assert command == ChangeNodes(changes=(NodeChange(node(5), NodeState.ACTIVE),))


def test_votes_become_fewer_when_nobody_can_take_one(machine: Machine) -> None:
    _set(machine, NodeState.CORDONED, 4)
    command, rows = _plan(machine, "drain", 3)
    assert command == ChangeNodes(changes=(NodeChange(node(3), NodeState.DRAINING),), voters=2)
    assert "make 3 a learner: voters 1,2, 2 of 2 live, quorum 2" in _words(rows)
    assert isinstance(command, ChangeNodes)
    machine.apply(command)
    _set(machine, NodeState.ACTIVE, 4)
    command, rows = _plan(machine, "cancel-drain", 3, configuration=group_of("12", "345"))
    assert command == ChangeNodes(changes=(NodeChange(node(3), NodeState.ACTIVE),), voters=3)


@pytest.mark.parametrize(
    ("state", "change"),
    [(NodeState.CORDONED, "uncordon"), (NodeState.MAINTENANCE, "end-maintenance")],
    ids=["cordoned", "in maintenance"],
)
def test_a_node_that_is_back_gives_the_votes_back(
    machine: Machine, state: NodeState, change: str
) -> None:
    """Two of two voters survive no loss, however many nodes there are beside them."""
    _set(machine, state, 4)
    command, _ = _plan(machine, "drain", 3)
    assert command is not None
    machine.apply(command)
    assert machine.image.voters_wanted == 2
    command, _ = _plan(machine, change, 4, configuration=group_of("12", "345"))
    assert command == ChangeNodes(changes=(NodeChange(node(4), NodeState.ACTIVE),), voters=3)


def test_a_cancelled_drain_takes_the_vote_of_the_successor_back(machine: Machine) -> None:
    _set(machine, NodeState.DRAINING, 3)
    command, _ = _plan(machine, "cancel-drain", 3, configuration=group_of("1234", "5"))
    assert command is not None
    machine.apply(command)
    target = metadata_target(group_of("1234", "5"), machine.image, FIRST)
    assert target is not None
    assert sorted(target.voters) == [1, 2, 3]


def test_a_surplus_of_voters_goes_when_their_number_is_named(machine: Machine) -> None:
    command, _ = _plan(machine, "", voters=3, configuration=group_of("1234", "5"))
    assert command == ChangeNodes(changes=(), voters=3)
    assert _plan(machine, "", voters=3)[0] is None


def test_a_cancelled_drain_makes_no_more_voters_than_were_asked_for(machine: Machine) -> None:
    """There were five nodes and three votes, and then four nodes, for which three are right."""
    _set(machine, NodeState.ACTIVE, 5)
    machine.apply(ChangeNodes(voters=3))
    _set(machine, NodeState.DRAINING, 5)
    command, _ = _plan(machine, "cancel-drain", 5)
    assert command == ChangeNodes(changes=(NodeChange(node(5), NodeState.ACTIVE),))


@pytest.mark.parametrize(
    ("voters", "says"),
    [(2, "an odd number from 1 to 9"), (11, "an odd number"), (5, "only 4 nodes could vote")],
    ids=["even", "too many", "more than there are"],
)
def test_numbers_of_voters_that_are_refused(machine: Machine, voters: int, says: str) -> None:
    command, [verdict] = _plan(machine, "", voters=voters)
    assert command is None
    assert verdict.code is not ErrorCode.NONE
    assert says in (verdict.message or "")


def test_voters_alone(machine: Machine) -> None:
    command, rows = _plan(machine, "", voters=1)
    assert command == ChangeNodes(voters=1)
    assert _words(rows)[-1] == "make 3 a learner: voters 1, 1 of 1 live, quorum 1"
    assert _plan(machine, "", voters=3)[0] is None, "there are three"


# ---- refusals ----


@pytest.mark.parametrize(
    ("change", "ids", "code", "says"),
    [
        ("wash", (4,), ErrorCode.INVALID_REQUEST, "no change of nodes named 'wash'"),
        ("drain", (), ErrorCode.INVALID_REQUEST, "which nodes?"),
        ("", (), ErrorCode.INVALID_REQUEST, "neither a node nor a number"),
        ("add", (9,), ErrorCode.BROKER_ID_NOT_REGISTERED, "node 9 has not joined"),
        ("drain", (4, 9), ErrorCode.BROKER_ID_NOT_REGISTERED, "node 9 has not joined"),
        ("remove", (3, 4), ErrorCode.INVALID_REQUEST, "one node at a time"),
        ("cordon", (5,), ErrorCode.INVALID_REQUEST, "`raftmq node add 5` first"),
    ],
)
def test_refusals(
    machine: Machine, change: str, ids: tuple[int, ...], code: ErrorCode, says: str
) -> None:
    command, [verdict] = _plan(machine, change, *ids)
    assert command is None
    assert verdict.code is code
    assert says in (verdict.message or "")


def test_a_new_node_that_is_down_is_not_added(machine: Machine) -> None:
    _fence(machine, 5)
    command, [verdict] = _plan(machine, "add", 5)
    assert command is None
    assert verdict.code is ErrorCode.BROKER_NOT_AVAILABLE


def test_a_dead_node_drains(machine: Machine) -> None:
    _fence(machine, 3)
    command, rows = _plan(machine, "drain", 3)
    assert command is not None
    assert "let 4 vote once it has caught up: voters 1,2,3,4, 3 of 4 live, quorum 3" in _words(rows)


def test_a_drain_that_would_lose_the_quorum_is_refused(machine: Machine) -> None:
    _fence(machine, 1, 2)
    command, [verdict] = _plan(machine, "drain", 3)
    assert command is None
    assert verdict.code is ErrorCode.INELIGIBLE_REPLICA
    assert "the next step would lose the quorum" in (verdict.message or "")


def test_a_drain_without_a_place_for_a_replica_is_refused(machine: Machine) -> None:
    def nowhere(_image: MetadataImage, _node_ids: tuple[NodeId, ...]) -> Iterable[str]:
        raise KafkaError("a-0 has nowhere to go", code=ErrorCode.INVALID_REPLICA_ASSIGNMENT)

    call = ChangeNodesCall(node_ids=(3,), change="drain")
    command, [verdict] = plan_change(
        machine.image, group_of("123", "45"), FIRST, call, nowhere, _silence
    )
    assert command is None
    assert verdict.message == "a-0 has nowhere to go"


def test_the_last_nodes_do_not_drain(machine: Machine) -> None:
    command, [verdict] = _plan(machine, "drain", 1, 2, 3, 4)
    assert command is None
    assert "no active node would be left" in (verdict.message or "")


def test_replaced_nodes_and_their_successors_are_let_alone(machine: Machine) -> None:
    machine.apply(ReplaceNode(old_id=node(1), new_id=node(4)))
    for change, number, says in (
        ("drain", 1, "is being replaced by node 4"),
        ("drain", 4, "is about to take another node's place"),
        ("remove", 4, "is about to take the place of node 1"),
        ("remove", 1, "is being replaced by node 4"),
    ):
        command, [verdict] = _plan(machine, change, number)
        assert command is None
        assert says in (verdict.message or "")


def test_below_its_level_nothing_changes_and_the_way_there_is_named() -> None:
    machine = Machine()
    machine.register_all(1, 2, 3, 4)
    command, [verdict] = _plan(machine, "drain", 3)
    assert command is None
    assert verdict.code is ErrorCode.UNSUPPORTED_VERSION
    assert "`raftmq cluster features --raise raftmq.level=4`" in (verdict.message or "")


def test_the_reference_engine_changes_no_nodes(machine: Machine) -> None:
    call = ChangeNodesCall(node_ids=(4,), change="drain")
    command, [verdict] = plan_change(machine.image, None, (), call, _moves, _silence)
    assert command is None
    assert verdict.code is ErrorCode.UNSUPPORTED_VERSION


# ---- the end of a node ----


def test_a_node_is_removed_only_when_nothing_holds_it(machine: Machine) -> None:
    command, [verdict] = _plan(machine, "remove", 3)
    assert command is None
    assert verdict.code is ErrorCode.POLICY_VIOLATION
    text = verdict.message or ""
    assert "it holds replicas of 2 partitions (a-0, a-1)" in text
    assert "it votes on metadata" in text
    assert "`raftmq node drain 3`" in text
    assert "it lives" in text
    command, [verdict] = _plan(machine, "remove", 4)
    assert (verdict.message or "").startswith("node 4 cannot be removed: it lives")
    _fence(machine, 4)
    command, rows = _plan(machine, "remove", 4)
    assert command == UnregisterBroker(node_id=node(4))
    assert "its storage 0000000000000068 refused" in (rows[1].message or "")
    machine.apply(command)
    assert _words(_plan(machine, "remove", 4)[1]) == ["done already"]
    assert "node 4 was removed" in (_plan(machine, "drain", 4)[1][0].message or "")


def test_a_node_is_not_removed_before_its_groups_leaders_know(machine: Machine) -> None:
    """Node 4 was to get a replica, and caught up before the target changed: the leader, which does
    not know that yet, may have made it a voter."""
    three, four = (tuple(map(node, numbers)) for numbers in ((1, 2, 3), (1, 2, 4)))
    epoch = machine.image.topics["a"].partitions[0].creation_epoch
    named = {"topic_id": topic_id(1), "partition": 0, "creation_epoch": epoch}
    move = ReassignPartition(**named, replicas=four, expected=three, origin=Origin.DRAIN)
    machine.apply(move)
    machine.apply(PlanMoves(moves=(PlannedMove(**named),), origin=Origin.OPERATOR))
    partition = machine.image.topics["a"].partitions[0]
    assert node(4) in partition.dismissed
    assert node(4) not in (*partition.replicas, *partition.voters, *partition.moving_from)
    _fence(machine, 4)
    command, [verdict] = _plan(machine, "remove", 4)
    assert command is None
    assert "it was to hold 1 partition (a-0), and no leader has said yet" in (verdict.message or "")
    report = MembersReport(topic_id(1), 0, epoch, 1, three, three, int(machine.image.version))
    machine.apply(ReportVoters(reports=(), members=(report,)))
    assert _plan(machine, "remove", 4)[0] == UnregisterBroker(node_id=node(4))


# ---- maintenance and progress ----


def test_maintenance_says_what_stopping_would_cost(machine: Machine) -> None:
    machine.apply(CreateTopics(topics=(creation("one", 2, (2,)),)))
    _fence(machine, 3)
    command, rows = _plan(machine, "maintenance", 2)
    assert command == ChangeNodes(changes=(NodeChange(node(2), NodeState.MAINTENANCE),))
    assert [row.message for row in rows[1:]] == [
        "no other node has 1 partition (one-0): unavailable once it is stopped",
        "once it is stopped no majority is left of 2 partitions (a-0, a-1)",
        "__cluster_metadata: once it is stopped no majority of voters is left",
    ]


def _led(table: LeaderTable, topic: int, index: int, leader: int, *isr: int) -> None:
    table.led(
        topic_id(topic),
        index,
        leader=node(leader),
        leader_epoch=LeaderEpoch(1),
        isr=[node(n) for n in isr],
        voters=[node(n) for n in (1, 2, 3)],
    )


def test_progress_names_what_is_left_and_what_waits(machine: Machine) -> None:
    machine.apply(CreateTopics(topics=(creation("one", 2, (3,)),)))
    epoch = machine.image.brokers[node(3)].epoch
    machine.apply(ClaimGroup(group="g", node_id=node(3), broker_epoch=epoch), submitter=3)
    table = LeaderTable()
    _led(table, 1, 0, 3, 1, 3)
    _led(table, 1, 1, 2, 2, 3)
    _led(table, 2, 0, 3, 3)
    _set(machine, NodeState.DRAINING, 3)

    def told(controller: int, group: Configuration) -> dict[NodeId, ChangeProgress]:
        survey = Survey(machine.image)
        rows = changes_under_way(survey, group, table, node(controller))
        return {row.node_id: row for row in rows}

    row = told(3, group_of("123", "45"))[node(3)]
    assert (row.partitions, row.leaders, row.kept_leaders, row.groups) == (3, 2, 1, 1)
    assert row.is_voter
    assert row.is_controller
    assert not row.is_empty
    assert not row.is_idle
    assert row.stuck == (), "the leadership of what has no other replica goes with the replica"
    _set(machine, NodeState.CORDONED, 4)
    row = told(1, group_of("123", "45"))[node(3)]
    assert [(s.topic, s.partition) for s in row.stuck] == [
        ("a", 0),
        ("a", 1),
    ]
    assert "node 4 is cordoned; node 5 is new (`raftmq node add 5`)" in row.stuck[0].reason
    _set(machine, NodeState.MAINTENANCE, 3)
    rows = told(1, group_of("123", "45"))
    assert set(rows) == {3, 4, 5}
    assert rows[node(5)].is_empty
    assert rows[node(5)].is_idle


def test_nobody_misses_a_node_that_is_down_for_what_it_alone_has(machine: Machine) -> None:
    machine.apply(CreateTopics(topics=(creation("one", 2, (3,)),)))
    table = LeaderTable()
    _led(table, 2, 0, 3, 3)
    _set(machine, NodeState.MAINTENANCE, 3)
    _fence(machine, 3)
    (row,) = (
        row
        for row in changes_under_way(Survey(machine.image), group_of("12"), table, node(1))
        if row.node_id == 3
    )
    assert (row.leaders, row.kept_leaders) == (0, 0)
    assert row.is_idle


def test_replicas_that_have_no_place_to_go_to_are_named(machine: Machine) -> None:
    table = LeaderTable()
    _led(table, 1, 0, 1, 1, 2, 3)
    _set(machine, NodeState.DRAINING, 3)
    steps = drain_steps(machine.image, table, Bounds(), [node(3)])
    assert steps == [
        "2 partition replicas go from node 3 to node 4",
        "1 partition (a-1) must wait: it has no leader",
    ]
    _set(machine, NodeState.CORDONED, 4)
    with pytest.raises(KafkaError) as refusal:
        drain_steps(machine.image, table, Bounds(), [node(3)])
    assert "2 partitions (a-0, a-1) cannot go: no broker can take" in refusal.value.message
    assert "node 4 is cordoned" in refusal.value.message


# ---- through controllers ----


def _grown() -> MetadataCluster:
    """Nodes 1 to 3, and node 4 that has joined and is new; a topic on the first three."""
    levels = (FeatureUpdate(RAFTMQ_LEVEL, LEVEL_OF_MOVES),)
    cluster = MetadataCluster.formed(3, first_levels=levels)
    cluster.auto_lead = True
    joiner = cluster.start(4)
    object.__setattr__(joiner.control.lifecycle._info, "takes_no_data", True)
    joiner.control.lifecycle.registration = Registration.UNINFORMED
    cluster.run(2_000)
    assert joiner.engine.image.brokers[node(4)].state is NodeState.NEW
    _ask(
        cluster, CreateTopicsCall(topics=(NewTopic(name="a", partitions=4, replication_factor=3),))
    )
    assert _holders(cluster) == {1, 2, 3}
    return cluster


def _ask(cluster: MetadataCluster, request: AdminRequest) -> list[Outcome]:
    promise = cluster.nodes[2].control.call(request, CLIENT)
    cluster.run(1_000)
    return list(promise.result())


def _holders(cluster: MetadataCluster) -> set[int]:
    topics = cluster.nodes[1].engine.image.topics_by_id()
    return {n for topic in topics for p in topic.partitions for n in (*p.replicas, *p.voters)}


def test_a_node_is_added_another_drained_and_removed() -> None:
    cluster = _grown()
    verdict, *_ = _ask(cluster, ChangeNodesCall(node_ids=(3,), change="drain"))
    assert verdict.code is ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert "node 4 is new (`raftmq node add 4`)" in (verdict.message or "")
    verdict, *_ = _ask(cluster, ChangeNodesCall(node_ids=(4,), change="add"))
    assert verdict.message == "added"
    verdict, *_ = _ask(cluster, ChangeNodesCall(node_ids=(3,), change="drain"))
    assert verdict.message == "begun"
    cluster.run(5_000)
    assert _holders(cluster) == {1, 2, 4}
    assert [v.node_id for v in cluster.configuration.voters] == [1, 2, 4]
    assert [v.node_id for v in cluster.configuration.learners] == [3], "it has to hear what goes"
    verdict, *_ = _ask(cluster, ChangeNodesCall(node_ids=(3,), change="remove"))
    assert "it lives" in (verdict.message or "")
    cluster.kill(3)
    cluster.run(10_000)
    verdict, *_ = _ask(cluster, ChangeNodesCall(node_ids=(3,), change="remove"))
    assert verdict.message == "removed"
    cluster.run(1_000)
    assert [m.node_id for m in cluster.configuration.members] == [1, 2, 4]
    old = cluster.start(3)
    cluster.run(5_000)
    assert old.control.lifecycle.is_replaced
    assert "node 3 was removed from this cluster" in str(old.control.lifecycle.refusal)
    assert 3 in cluster.nodes[1].control.turned_away
    cluster.kill(3)
    anew = cluster.start(3, storage_id=999)
    cluster.run(5_000)
    assert not anew.control.lifecycle.is_replaced
    assert anew.engine.image.brokers[node(3)].state is NodeState.NEW
    assert 3 not in cluster.nodes[1].control.turned_away, "it is told of no more: it did as asked"
    assert _holders(cluster) == {1, 2, 4}


def test_a_node_that_was_replaced_comes_back_with_an_empty_disk_alone() -> None:
    cluster = _grown()
    cluster.kill(3)
    cluster.run(10_000)
    verdict, *_ = _ask(cluster, ReplaceNodeCall(old_id=3, new_id=4))
    assert verdict.message == "begun"
    cluster.run(5_000)
    image = cluster.nodes[1].engine.image
    assert image.replacements[node(3)].is_done
    assert len(image.removed[node(3)]) == 1
    old = cluster.start(3)
    cluster.run(5_000)
    assert old.control.lifecycle.is_replaced
    assert "node 3 was replaced by node 4" in str(old.control.lifecycle.refusal)
    assert "was replaced" in cluster.nodes[1].control.turned_away[node(3)]
    cluster.kill(3)
    anew = cluster.start(3, storage_id=999)
    cluster.run(5_000)
    assert not anew.control.lifecycle.is_replaced
    assert anew.engine.image.brokers[node(3)].state is NodeState.NEW
    assert _holders(cluster) == {1, 2, 4}


def test_a_fenced_node_that_is_heard_is_not_removed() -> None:
    """It came with an empty disk, which would be refused for good, and has not caught up yet."""
    cluster = _grown()
    cluster.kill(3)
    cluster.run(10_000)
    controller, engine = cluster.nodes[1].control.controller, cluster.nodes[1].engine
    empty = replace(register(3, storage=999), features=named(SUPPORTED))
    registered = engine.propose(empty)
    cluster.run(50)
    beat = BrokerHeartbeat(node(3), registered.result().broker_epoch, applied_version=0)
    assert controller.heartbeat(beat).is_fenced
    for call in (
        ReplaceNodeCall(old_id=3, new_id=4),
        ChangeNodesCall(node_ids=(3,), change="remove"),
    ):
        refused, *_ = _ask(cluster, call)
        assert refused.code is ErrorCode.POLICY_VIOLATION
        assert "alive" in (refused.message or "") or "it lives" in (refused.message or "")
        assert controller.heartbeat(beat).code is ErrorCode.NONE
    controller.peer_lost(node(3))
    refused, *_ = _ask(cluster, ChangeNodesCall(node_ids=(3,), change="remove"))
    assert "it lives" not in (refused.message or ""), "its connection has ended"
    controller.heartbeat(beat)
    verdict, *_ = _ask(cluster, ReplaceNodeCall(old_id=3, new_id=4, even_if_alive=True))
    assert verdict.message == "begun"
    for _ in range(10):
        cluster.run(500)
        assert controller.heartbeat(beat).code is ErrorCode.NONE
    assert _holders(cluster) == {1, 2, 4}
    assert not engine.image.replacements[node(3)].is_done
    cluster.elect(2)
    cluster.run(1_000)
    assert node(3) in engine.image.brokers, "a new controller has not heard it yet"
    cluster.run(2_000)
    assert engine.image.replacements[node(3)].is_done


def test_a_drain_that_is_cancelled_brings_back_what_has_not_moved() -> None:
    cluster = _grown()
    _ask(cluster, ChangeNodesCall(node_ids=(4,), change="add"))
    cluster.kill(4)
    cluster.run(10_000)
    verdict, *_ = _ask(cluster, ChangeNodesCall(node_ids=(3,), change="drain"))
    assert verdict.code is ErrorCode.INVALID_REPLICA_ASSIGNMENT, "node 4 is down"
    cluster.start(4)
    cluster.run(2_000)
    before = [p.replicas for p in cluster.nodes[1].engine.image.topics["a"].partitions]
    cluster.auto_lead = False  # nothing that is ordered comes true
    _ask(cluster, ChangeNodesCall(node_ids=(3,), change="drain"))
    moving = cluster.nodes[1].engine.image.topics["a"].partitions
    assert any(p.moving_from for p in moving)
    _ask(cluster, ChangeNodesCall(node_ids=(3,), change="cancel-drain"))
    cluster.run(2_000)
    for was, partition in zip(
        before, cluster.nodes[1].engine.image.topics["a"].partitions, strict=True
    ):
        assert partition.replicas == was


def test_a_node_that_was_removed_while_it_was_cut_off_ends() -> None:
    """It was cut off, and taken for dead."""
    cluster = _grown()
    cluster.cut.append(4)
    cluster.run(10_000)
    verdict, *_ = _ask(cluster, ChangeNodesCall(node_ids=(4,), change="remove"))
    assert verdict.message == "removed"
    lifecycle = cluster.nodes[4].control.lifecycle
    assert not lifecycle.is_replaced
    cluster.cut.clear()
    cluster.run(15_000)
    assert lifecycle.is_replaced
