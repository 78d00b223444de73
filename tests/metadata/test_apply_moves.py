"""Moves of replicas, states of nodes, and who is ordered to delete what, from level 4 on."""

from __future__ import annotations

import msgspec
import pytest
from attrs import evolve

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import (
    ChangeNodes,
    ConfirmRemoved,
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
    RegisterBroker,
    ReplaceNode,
    ReportVoters,
    UnregisterBroker,
)
from raftmq.metadata.features import SUPPORTED, named
from raftmq.metadata.image import PartitionImage
from raftmq.metadata.results import Done, MoveOutcome, MoveOutcomes, Registered, Rejection
from raftmq.types import NodeId, RaftGroupId, StorageId
from tests.metadata.metadata_commands import Machine, creation, node, raised, register, topic_id

UNKNOWN = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


class Moving(Machine):
    """Topic `a` with two partitions on the nodes 1, 2 and 3; nodes 4, 5 and 6 hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_all(1, 2, 3, 4, 5, 6)
        self.apply(CreateTopics(topics=(creation("a", 1, (1, 2, 3), (3, 2, 1)),)))
        self.image = raised(self.image)

    @property
    def partition(self) -> PartitionImage:
        """Partition 0, as it is now."""
        return self.image.topics["a"].partitions[0]

    @property
    def group(self) -> RaftGroupId:
        return self.image.topics["a"].group_id(0)

    @property
    def ordered(self) -> tuple[NodeId, ...]:
        """Who is to delete its data of partition 0."""
        order = self.image.removal(self.group)
        return () if order is None else order.nodes

    def reassign(
        self,
        *replicas: int,
        origin: Origin = Origin.OPERATOR,
        expected: tuple[int, ...] = (),
        creation_epoch: int = -1,
    ) -> object:
        command = ReassignPartition(
            topic_id=topic_id(1),
            partition=0,
            replicas=tuple(map(node, replicas)),
            creation_epoch=creation_epoch,
            expected=tuple(map(node, expected)),
            origin=origin,
        )
        return self.apply(command)

    def plan(
        self,
        *replicas: int,
        origin: Origin = Origin.OPERATOR,
        expected: tuple[int, ...] = (),
        creation_epoch: int | None = None,
    ) -> ErrorCode:
        epoch = self.partition.creation_epoch if creation_epoch is None else creation_epoch
        move = PlannedMove(
            topic_id=topic_id(1),
            partition=0,
            creation_epoch=epoch,
            replicas=tuple(map(node, replicas)),
            expected=tuple(map(node, expected)),
        )
        result = self.apply(PlanMoves(moves=(move,), origin=origin))
        assert isinstance(result, MoveOutcomes)
        [outcome] = result.moves
        return outcome.code

    def report(
        self,
        *voters: int,
        learners: tuple[int, ...] = (),
        epoch: int = 5,
        seen: int | None = None,
        group: RaftGroupId | None = None,
    ) -> None:
        """The leader says so; `seen` None: it has seen all."""
        report = MembersReport(
            *(group or self.group),
            epoch,
            tuple(map(node, voters)),
            tuple(map(node, sorted((*voters, *learners)))),
            self.image.version if seen is None else seen,
        )
        self.apply(ReportVoters(reports=(), members=(report,)))

    def change(self, number: int, state: NodeState) -> object:
        return self.apply(ChangeNodes(changes=(NodeChange(node(number), state),)))

    def fence(self, number: int) -> None:
        epoch = self.image.brokers[node(number)].epoch
        self.apply(FenceBroker(node_id=node(number), broker_epoch=epoch))

    def rejection(self, command: object) -> Rejection:
        result = self.apply(command)  # type: ignore[arg-type]  # any command
        assert isinstance(result, Rejection), result
        return result


@pytest.fixture
def machine() -> Moving:
    return Moving()


# ---- targets ----


def test_a_move_keeps_where_it_came_from_until_the_voters_are_its_replicas(
    machine: Moving,
) -> None:
    machine.reassign(4, 2, 3, origin=Origin.DRAIN)
    began = machine.image.version
    assert machine.partition.replicas == (4, 2, 3)
    assert machine.partition.moving_from == (1, 2, 3)
    assert (machine.partition.origin, machine.partition.target_version) == ("drain", began)
    machine.reassign(4, 5, 3, origin=Origin.REPAIR)
    assert machine.partition.moving_from == (1, 2, 3), "from where all of it began"
    assert machine.partition.origin is Origin.REPAIR
    machine.report(1, 2, 3, 4, 5)
    assert machine.partition.moving_from
    machine.report(3, 4, 5)
    assert machine.partition.moving_from == ()
    assert machine.partition.origin is Origin.NONE
    assert machine.ordered == (1, 2)


def test_replicas_in_another_order_are_no_move(machine: Moving) -> None:
    machine.reassign(3, 1, 2)
    assert machine.partition.replicas == (3, 1, 2)
    assert (machine.partition.moving_from, machine.partition.origin) == ((), Origin.NONE)


def test_a_move_that_is_ordered_back_is_none_any_more(machine: Moving) -> None:
    machine.reassign(4, 2, 3)
    machine.reassign(1, 2, 3)
    assert (machine.partition.moving_from, machine.partition.dismissed) == ((), (4,))


def test_a_move_is_compared_with_what_its_planner_saw(machine: Moving) -> None:
    drain = Origin.DRAIN
    assert isinstance(machine.reassign(4, 2, 3, expected=(1, 2, 3), origin=drain), Done)
    late = machine.reassign(5, 2, 3, expected=(1, 2, 3), origin=drain)
    assert isinstance(late, Rejection)
    assert late.code is ErrorCode.INVALID_UPDATE_VERSION
    assert machine.partition.replicas == (4, 2, 3)
    assert machine.plan(5, 2, 3, expected=(1, 2, 3)) is ErrorCode.INVALID_UPDATE_VERSION
    other = machine.reassign(5, 2, 3, creation_epoch=machine.partition.creation_epoch + 1)
    assert isinstance(other, Rejection)
    assert other.code is UNKNOWN
    machine.report(2, 3, 4)
    again = machine.reassign(5, 2, 3, expected=(4, 2, 3), origin=drain)
    assert isinstance(again, Done), "a report is no change"


def test_a_move_that_begins_is_planned_no_more(machine: Moving) -> None:
    assert machine.plan(4, 2, 3) is ErrorCode.NONE
    assert (machine.partition.planned, machine.partition.replicas) == ((4, 2, 3), (1, 2, 3))
    assert machine.partition.origin is Origin.OPERATOR
    machine.reassign(5, 2, 3, origin=Origin.REPAIR)
    assert machine.partition.planned == (4, 2, 3), "that was another one"
    machine.reassign(4, 2, 3)
    assert machine.partition.planned == ()
    machine.report(2, 3, 4)
    assert machine.partition.origin is Origin.NONE


@pytest.mark.parametrize("origin", [Origin.OPERATOR, Origin.BALANCE])
@pytest.mark.parametrize("then", [(), (5, 2, 3), (1, 2, 3)], ids=["cancelled", "other", "back"])
def test_what_is_planned_no_more_does_not_begin(
    machine: Moving, origin: Origin, then: tuple[int, ...]
) -> None:
    """The planner's order was on its way when the plan was taken back."""
    machine.plan(4, 2, 3, origin=origin)
    assert machine.plan(*then, origin=origin) is ErrorCode.NONE
    before = machine.partition
    late = machine.reassign(4, 2, 3, expected=(1, 2, 3), origin=origin)
    assert isinstance(late, Rejection)
    assert late.code is ErrorCode.INVALID_UPDATE_VERSION
    assert machine.partition == before
    machine.plan(4, 2, 3, origin=origin)
    begun = machine.reassign(4, 2, 3, expected=(1, 2, 3), origin=origin)
    assert isinstance(begun, Done)


def test_what_is_planned_has_an_owner_while_another_move_ends(machine: Moving) -> None:
    machine.reassign(4, 2, 3, origin=Origin.DRAIN)
    machine.plan(5, 2, 3)
    machine.report(2, 3, 4)
    assert machine.partition.moving_from == ()
    assert (machine.partition.planned, machine.partition.origin) == ((5, 2, 3), "operator")


def test_a_cancelled_move_goes_back_exactly(machine: Moving) -> None:
    machine.reassign(4, 2, 3)
    machine.reassign(4, 5, 3)
    machine.report(1, 2, 3, 4)
    machine.report(2, 3, 4, epoch=6)
    assert machine.ordered == (1,)
    machine.plan(6, 5, 3)
    assert machine.plan() is ErrorCode.NONE
    partition = machine.partition
    assert partition.replicas == (1, 2, 3)
    assert (partition.moving_from, partition.planned, partition.origin) == ((), (), "")
    assert machine.ordered == (), "it is wanted again"
    assert partition.dismissed == (5,), "4 votes, and goes by the next report"
    assert machine.plan() is ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
    machine.report(1, 2, 3, epoch=6)
    assert machine.ordered == (4, 5)


def test_a_move_that_has_not_begun_is_cancelled_without_a_trace(machine: Moving) -> None:
    before = machine.partition
    machine.plan(4, 2, 3)
    assert machine.plan() is ErrorCode.NONE
    assert machine.partition == before
    machine.plan(4, 2, 3)
    assert machine.plan(1, 2, 3) is ErrorCode.NONE, "to where it is"
    assert machine.partition == before


def test_planned_moves_are_judged_one_by_one(machine: Moving) -> None:
    assert machine.plan(4, 2, 9) is ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert machine.plan(4, 4, 2) is ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert machine.plan(4, 2, 3, creation_epoch=0) is UNKNOWN
    good = PlannedMove(
        topic_id=topic_id(1),
        partition=1,
        creation_epoch=machine.partition.creation_epoch,
        replicas=(node(4),),
    )
    bad = PlannedMove(topic_id=topic_id(8), partition=0, creation_epoch=1)
    assert machine.apply(PlanMoves(moves=(bad, good))) == MoveOutcomes(
        (MoveOutcome(UNKNOWN), MoveOutcome())
    )
    assert machine.image.topics["a"].partitions[1].planned == (4,)
    structure = machine.image.structure_version
    machine.apply(PlanMoves(moves=(bad, good)))
    assert machine.image.structure_version == structure, "nothing was changed"


def test_a_balance_moves_nothing_that_moves_for_another_reason(machine: Moving) -> None:
    assert machine.plan(4, 2, 3, origin=Origin.BALANCE) is ErrorCode.NONE
    assert machine.plan(5, 2, 3, origin=Origin.BALANCE) is ErrorCode.NONE
    assert machine.plan(6, 2, 3) is ErrorCode.NONE
    late = machine.plan(4, 2, 3, origin=Origin.BALANCE)
    assert late is ErrorCode.REASSIGNMENT_IN_PROGRESS
    assert (machine.partition.planned, machine.partition.origin) == ((6, 2, 3), "operator")


# ---- who deletes its data ----


def test_a_learner_that_is_not_wanted_any_more_goes_once_its_leader_knows(machine: Moving) -> None:
    """Whoever leads without knowing of it may let the learner vote at any moment."""
    machine.reassign(4, 2, 3)
    machine.reassign(5, 2, 3)
    target = machine.partition.target_version
    assert machine.partition.dismissed == (4,)
    machine.report(1, 2, 3, seen=target - 1)
    assert machine.ordered == (), "its leader may be about to add it"
    machine.report(1, 2, 3, learners=(4,), seen=target)
    assert machine.ordered == (), "it is a member still"
    machine.report(1, 2, 3, 4, seen=target - 1, epoch=6)
    assert machine.partition.dismissed == (), "it votes: a leader did not know"
    machine.report(1, 2, 3, seen=target - 1, epoch=7)
    assert (machine.ordered, machine.partition.dismissed) == ((), (4,)), "nor does this one"
    machine.report(1, 2, 3, learners=(5,), seen=target, epoch=6)
    assert machine.ordered == (), "said by a leader of before"
    machine.report(1, 2, 3, learners=(5,), seen=target, epoch=7)
    assert (machine.ordered, machine.partition.dismissed) == ((4,), ())
    machine.report(1, 2, 3, 5, seen=target, epoch=7)
    machine.report(2, 3, 5, seen=target, epoch=7)
    assert machine.ordered == (1, 4)


def test_a_voter_that_left_goes_once_its_leader_knows_that_it_is_not_wanted(
    machine: Moving,
) -> None:
    machine.reassign(4, 2, 3)
    machine.report(1, 2, 3, 4)
    seen = machine.image.version
    machine.reassign(1, 2, 3)
    machine.reassign(4, 2, 3)
    machine.report(2, 3, 4, seen=seen)
    assert (machine.ordered, machine.partition.dismissed) == ((), (1,))
    machine.report(2, 3, 4)
    assert (machine.ordered, machine.partition.dismissed) == ((1,), ())


def test_who_is_dismissed_and_wanted_again_keeps_its_data(machine: Moving) -> None:
    machine.reassign(4, 2, 3)
    machine.reassign(5, 2, 3)
    machine.reassign(4, 2, 3)
    assert machine.partition.dismissed == (5,)
    machine.report(1, 2, 3)
    assert machine.ordered == (5,)


def test_orders_and_confirmations_are_of_one_raft_group(machine: Moving) -> None:
    """A topic that is made again under its id inherits nothing, and nothing is taken from it."""
    former = machine.group
    machine.apply(DeleteTopics(topic_ids=(topic_id(1),)))
    machine.apply(CreateTopics(topics=(creation("a", 1, (4, 5, 6)),)))
    machine.reassign(1, 5, 6)
    machine.report(1, 5, 6)
    first = machine.image.removal(former)
    assert first is not None
    assert first.nodes == (1, 2, 3), "wanted in the next life, its data of the last one goes"
    assert machine.ordered == (4,)
    machine.report(1, 2, 3, group=former)
    assert machine.partition.voters == (1, 5, 6)
    old, new = (
        ConfirmRemoved(node_id=node(n), replicas=(), groups=((*group,),))
        for n, group in ((1, former), (4, machine.group))
    )
    wrong = ConfirmRemoved(node_id=node(4), replicas=((topic_id(1), 0),))
    machine.apply(wrong)
    assert machine.ordered == (4,), "it names no group, and none of that time is left"
    machine.apply(old)
    machine.apply(new)
    left = machine.image.removal(former)
    assert left is not None
    assert (left.nodes, machine.ordered) == ((2, 3), ())


def test_with_a_topic_goes_what_the_dismissed_have_of_it(machine: Moving) -> None:
    machine.reassign(4, 2, 3)
    machine.reassign(5, 2, 3)
    group = machine.group
    machine.apply(DeleteTopics(topic_ids=(topic_id(1),)))
    order = machine.image.removal(group)
    assert order is not None
    assert order.nodes == (1, 2, 3, 4, 5)


def test_nobody_waits_for_what_went_with_a_storage(machine: Moving) -> None:
    machine.reassign(4, 2, 3)
    machine.reassign(5, 2, 3)
    machine.fence(4)
    machine.apply(_newest(4, 9))
    assert machine.partition.dismissed == ()


# ---- nodes ----


def test_states_of_nodes_outlive_their_restarts(machine: Moving) -> None:
    assert isinstance(machine.change(4, NodeState.CORDONED), Done)
    machine.apply(_newest(4))
    assert machine.image.brokers[node(4)].state is NodeState.CORDONED
    assert not machine.image.brokers[node(4)].takes_replicas
    machine.fence(4)
    machine.apply(_newest(4, 9))  # its disk was lost, and what was wanted of it was not
    assert machine.image.brokers[node(4)].state is NodeState.CORDONED


def test_nodes_are_changed_all_or_none(machine: Moving) -> None:
    changes = tuple(NodeChange(node(n), NodeState.DRAINING) for n in (4, 9))
    refused = machine.rejection(ChangeNodes(changes=changes, voters=3))
    assert refused.code is ErrorCode.BROKER_ID_NOT_REGISTERED
    assert "node 9" in refused.message
    assert machine.image.brokers[node(4)].state is NodeState.ACTIVE
    assert machine.image.voters_wanted == 0
    machine.apply(ChangeNodes(changes=changes[:1], voters=3))
    assert machine.image.brokers[node(4)].state is NodeState.DRAINING
    structure = machine.image.structure_version
    machine.apply(ChangeNodes(changes=changes[:1]))
    assert (machine.image.voters_wanted, machine.image.structure_version) == (3, structure)


def _newest(number: int, storage: int | None = None) -> RegisterBroker:
    command = register(number, storage=storage)
    return msgspec.structs.replace(command, features=named(SUPPORTED))


def _newcomer(number: int) -> RegisterBroker:
    return msgspec.structs.replace(_newest(number), takes_no_data=True)


def test_a_node_that_joins_is_new_until_it_is_added(machine: Moving) -> None:
    machine.apply(_newcomer(7))
    assert machine.image.brokers[node(7)].state is NodeState.NEW
    machine.change(7, NodeState.ACTIVE)
    machine.apply(_newcomer(7))
    assert machine.image.brokers[node(7)].state is NodeState.ACTIVE
    machine.apply(_newcomer(1))
    assert machine.image.brokers[node(1)].state is NodeState.ACTIVE, "known for long"


def test_a_node_that_joins_to_replace_another_one_takes_data(machine: Moving) -> None:
    machine.apply(_newcomer(7))
    machine.apply(ReplaceNode(old_id=node(4), new_id=node(7)))
    assert machine.image.brokers[node(7)].state is NodeState.ACTIVE
    machine.change(5, NodeState.CORDONED)
    machine.apply(ReplaceNode(old_id=node(4), new_id=node(5)))
    assert machine.image.brokers[node(5)].state is NodeState.CORDONED, "as an operator wants it"


def test_below_level_4_nodes_have_no_states() -> None:
    machine = Machine()
    machine.register_all(1)
    machine.apply(_newcomer(2))
    assert machine.image.brokers[node(2)].state is NodeState.ACTIVE
    change = ChangeNodes(changes=(NodeChange(node(1), NodeState.CORDONED),))
    for command in (change, PlanMoves(moves=())):
        before = machine.image
        result = machine.apply(command)
        assert isinstance(result, Rejection)
        assert result.code is ErrorCode.UNSUPPORTED_VERSION
        assert evolve(machine.image, version=0, submitters=before.submitters) == evolve(
            before, version=0
        )
    machine.apply(FenceBroker(node_id=node(1), broker_epoch=0))
    machine.apply(UnregisterBroker(node_id=node(1)))
    assert isinstance(machine.apply(register(1)), Registered), "it left no tombstone"


def test_a_node_that_was_removed_comes_back_with_an_empty_disk_alone(machine: Moving) -> None:
    alive = machine.rejection(UnregisterBroker(node_id=node(6)))
    assert (alive.code, alive.message) == (ErrorCode.POLICY_VIOLATION, "broker 6 is alive")
    held = machine.rejection(UnregisterBroker(node_id=node(1)))
    assert held.message == "broker 1 holds replicas of a-0"
    machine.plan(6, 2, 3)
    machine.fence(6)
    assert isinstance(machine.apply(UnregisterBroker(node_id=node(6))), Done)
    assert machine.partition.planned == (), "nothing is to go there any more"
    assert machine.partition.origin is Origin.NONE
    assert machine.image.removed[node(6)] == (StorageId(106),)
    refused = machine.rejection(_newest(6))
    assert refused.code is ErrorCode.INCONSISTENT_CLUSTER_ID
    assert "node 6 was removed from this cluster, and the storage 6a with it" in refused.message
    assert isinstance(machine.apply(_newest(6, 9)), Registered)
    assert machine.image.brokers[node(6)].state is NodeState.NEW
    machine.apply(UnregisterBroker(node_id=node(6)))
    assert machine.image.removed[node(6)] == (StorageId(106), StorageId(9))


def test_a_node_is_not_removed_while_a_move_may_still_go_back_to_it(machine: Moving) -> None:
    machine.reassign(4, 5, 3)
    machine.report(1, 2, 3, 4)
    machine.report(2, 3, 4)
    machine.fence(1)
    bound = machine.rejection(UnregisterBroker(node_id=node(1)))
    assert bound.message == "a move of a-0 away from broker 1 may still be cancelled"
    machine.report(2, 3, 4, 5)
    machine.report(3, 4, 5)
    machine.apply(ReassignPartition(topic_id=topic_id(1), partition=1, replicas=(node(3), node(2))))
    report = MembersReport(
        *machine.image.topics["a"].group_id(1), 5, (node(2), node(3)), (node(2), node(3)), 99
    )
    machine.apply(ReportVoters(reports=(), members=(report,)))
    assert isinstance(machine.apply(UnregisterBroker(node_id=node(1))), Done)
    assert machine.ordered == (2,), "nobody waits for it any more"
