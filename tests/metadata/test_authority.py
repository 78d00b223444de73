"""Who may send which command: a row for each kind, and what other nodes may not send is refused."""

from __future__ import annotations

from typing import Any, Final, get_args

import pytest
from attrs import evolve

from raftmq.errors import ErrorCode
from raftmq.metadata.authority import WHO_MAY, WHO_MAY_ASK, Authority, authority_error
from raftmq.metadata.broker_messages import ForwardCommands, Request
from raftmq.metadata.commands import (
    ALL_COMMANDS,
    AbortExpired,
    AddPartitions,
    AllocateProducerIds,
    AlterConfigs,
    AlterUsers,
    ChangeNodes,
    ClaimGroup,
    CommitMany,
    CommitOffsets,
    ConfirmRemoved,
    CreateAcls,
    CreatePartitions,
    CreateTopics,
    DeleteAcls,
    DeleteGroup,
    DeleteOffsets,
    DeleteTopics,
    EndReplacement,
    EndTransaction,
    Envelope,
    ExpireOffsets,
    FenceBroker,
    ForgetId,
    Generation,
    InitProducer,
    NodeChange,
    NodeState,
    NoOperation,
    PlanMoves,
    ReassignPartition,
    ReleaseGroup,
    ReplaceMember,
    ReplaceNode,
    ReportGone,
    ReportMarkers,
    ReportSealed,
    ReportVoters,
    Row,
    SealPartitions,
    SealReport,
    ShrinkTopic,
    TransactionRows,
    UnfenceBroker,
    UnregisterBroker,
    UpdateFeatures,
    encode_envelope,
)
from raftmq.metadata.image import GroupImage, MetadataImage
from tests.controller.metadata_cluster import MetadataCluster
from tests.metadata.metadata_commands import Machine, creation, node, register, topic_id

ROWS: Final = get_args(Row)
ME, VICTIM = node(2), node(1)
TOPIC: Final = topic_id(7)


def transaction(*rows: Row) -> TransactionRows:
    return TransactionRows(rows=rows)


def report(number: int) -> SealReport:
    return SealReport(TOPIC, number, 0, 0, 0, 0)


def group(kind: type, **fields: Any) -> Any:
    return kind(group="g", coordinator_epoch=5, **fields)


def markers(number: int) -> ReportMarkers:
    return ReportMarkers(topic_id=TOPIC, partition=number, creation_epoch=0, ended=())


MINE, OTHERS = 0, 1
"""Partitions: node 2 holds the first one alone, node 1 the second one."""

ABUSE: Final[dict[str, Any]] = {
    "registers another": register(1),
    "confirms for another": ConfirmRemoved(node_id=VICTIM, replicas=()),
    "takes another's producer ids": AllocateProducerIds(node_id=VICTIM),
    "claims for another": ClaimGroup(group="g", node_id=VICTIM, broker_epoch=1),
    "fences": FenceBroker(node_id=VICTIM, broker_epoch=1),
    "unfences": UnfenceBroker(node_id=ME, broker_epoch=1),
    "unregisters": UnregisterBroker(node_id=VICTIM),
    "replaces": ReplaceNode(old_id=VICTIM, new_id=ME),
    "ends a replacement": EndReplacement(old_id=VICTIM),
    "drains": ChangeNodes(changes=(NodeChange(VICTIM, NodeState.DRAINING),)),
    "takes voters away": ChangeNodes(voters=1),
    "creates topics": CreateTopics(topics=(creation("t", 8, (2,)),)),
    "deletes topics": DeleteTopics(topic_ids=(TOPIC,)),
    "adds partitions": CreatePartitions(additions=()),
    "shrinks": ShrinkTopic(topic_id=TOPIC, partitions=1, listed=2, view="v", view_id=topic_id(9)),
    "moves": ReassignPartition(topic_id=TOPIC, partition=OTHERS, replicas=(ME,)),
    "plans moves": PlanMoves(moves=()),
    "reports voters": ReportVoters(reports=()),
    "alters configs": AlterConfigs(changes=()),
    "raises levels": UpdateFeatures(updates=()),
    "creates rules": CreateAcls(rules=()),
    "deletes rules": DeleteAcls(rules=()),
    "creates users": AlterUsers(),
    "seals another's": SealPartitions(topic_id=TOPIC, partitions=((OTHERS, 0),)),
    "seals its own and another's": SealPartitions(
        topic_id=TOPIC, partitions=((MINE, 0), (OTHERS, 0))
    ),
    "says that another's is sealed": ReportSealed(reports=(report(OTHERS),)),
    "says that another's is gone": ReportGone(reports=(report(MINE), report(OTHERS))),
    "releases another's group": group(ReleaseGroup),
    "empties another's group": group(Generation, generation=9),
    "replaces a member": group(
        ReplaceMember,
        generation=1,
        instance_id="i",
        old_member_id="a",
        new_member_id="b",
        session_timeout_ms=1,
        rebalance_timeout_ms=1,
    ),
    "commits to another's group": group(CommitOffsets),
    "commits to another's among others": CommitMany(
        commits=(CommitOffsets(group="mine", coordinator_epoch=6), group(CommitOffsets))
    ),
    "deletes offsets": group(DeleteOffsets, partitions=()),
    "expires offsets": group(ExpireOffsets),
    "deletes a group": group(DeleteGroup),
    "reports another's markers": transaction(
        InitProducer(transactional_id="a", timeout_ms=1), markers(OTHERS)
    ),
}
USE: Final[dict[str, Any]] = {
    "registers": register(2),
    "confirms": ConfirmRemoved(node_id=ME, replicas=()),
    "takes producer ids": AllocateProducerIds(node_id=ME),
    "claims": ClaimGroup(group="g", node_id=ME, broker_epoch=1),
    "does nothing": NoOperation(),
    "prefers a leader": ReassignPartition(topic_id=TOPIC, partition=MINE, replicas=(ME,)),
    "seals its own": SealPartitions(topic_id=TOPIC, partitions=((MINE, 0),)),
    "says that its own is sealed": ReportSealed(reports=(report(MINE),)),
    "says that its own is gone": ReportGone(reports=(report(MINE),)),
    "speaks of what is no more": ReportGone(reports=(report(44),)),
    "commits to its group": CommitOffsets(group="mine", coordinator_epoch=6),
    "deletes its group": DeleteGroup(group="mine", coordinator_epoch=6),
    "comes too late": DeleteGroup(group="g", coordinator_epoch=4),
    "commits to no group": CommitOffsets(group="none", coordinator_epoch=1),
    "serves producers": transaction(
        InitProducer(transactional_id="a", timeout_ms=1),
        AddPartitions(transactional_id="a", producer_id=1, epoch=0),
        EndTransaction(transactional_id="a", producer_id=1, epoch=0, is_commit=True),
        AbortExpired(transactional_id="a", producer_id=1, epoch=0, txn_seq=1),
        ForgetId(transactional_id="a", producer_id=1, epoch=0, txn_seq=1, changed_at_ms=1),
        markers(MINE),
    ),
}


def image_of_two() -> MetadataImage:
    """Topic 7 with a partition of each of two nodes, and a group that each coordinates."""
    machine = Machine()
    for number in (1, 2):
        machine.apply(register(number))
    machine.apply(CreateTopics(topics=(creation("t", 7, (2,), (1,)),)))
    groups = machine.image.groups
    for name, node_id, epoch in (("g", VICTIM, 5), ("mine", ME, 6)):
        groups = groups.with_group(
            GroupImage(name=name, coordinator=node_id, coordinator_epoch=epoch)
        )
    return evolve(machine.image, groups=groups)


def test_each_kind_has_its_row() -> None:
    assert set(WHO_MAY) == {*ALL_COMMANDS, *ROWS}


def test_each_request_has_its_row() -> None:
    assert set(WHO_MAY_ASK) == {*get_args(Request)}


def test_each_kind_that_is_not_every_nodes_is_abused_here() -> None:
    tried = {type(command) for command in ABUSE.values()}
    tried |= {type(row) for c in ABUSE.values() if isinstance(c, TransactionRows) for row in c.rows}
    free = {kind for kind, authority in WHO_MAY.items() if authority is Authority.ANY_NODE}
    assert tried | free == set(WHO_MAY)


@pytest.mark.parametrize("command", ABUSE.values(), ids=ABUSE)
def test_what_is_not_its_own_is_refused(command: Any) -> None:
    why = authority_error(image_of_two(), ME, command)
    assert why.startswith("node 2 may not send ")


@pytest.mark.parametrize("command", USE.values(), ids=USE)
def test_what_is_its_own_is_taken(command: Any) -> None:
    assert not authority_error(image_of_two(), ME, command)


def test_whoever_may_lead_a_partition_that_moves_may_speak_for_it() -> None:
    machine = Machine()
    for number in (1, 2, 3):
        machine.apply(register(number))
    machine.apply(CreateTopics(topics=(creation("t", 7, (1, 2)),)))
    machine.apply(ReassignPartition(topic_id=TOPIC, partition=0, replicas=(node(3),)))
    command = ReportSealed(reports=(report(0),))
    for number in (1, 2, 3):
        assert not authority_error(machine.image, node(number), command)
    assert authority_error(machine.image, node(4), command)


def test_the_controller_refuses_it_by_name_counts_it_and_takes_what_came_before() -> None:
    cluster = MetadataCluster.formed()
    leader = cluster.nodes[1].engine
    before = leader.image.version

    def envelope(sequence: int, command: Any) -> bytes:
        return encode_envelope(
            Envelope(
                version=1,
                node_id=ME,
                incarnation=9_000_000_000_000,
                sequence=sequence,
                command=command,
            )
        )

    abuse = DeleteTopics(topic_ids=(TOPIC,))
    commands = (envelope(1, NoOperation()), envelope(2, abuse), envelope(3, NoOperation()))
    reply = leader.receive_commands(ME, ForwardCommands(commands))
    assert (reply.code, reply.index) == (ErrorCode.INVALID_REQUEST, 1)
    assert "node 2 may not send DeleteTopics: the controller alone" in reply.message
    assert leader.unauthorized == {"DeleteTopics": 1}
    assert cluster.unauthorized == [(ME, "DeleteTopics", reply.message)], "and tells"
    cluster.turn()
    assert leader.image.version == before + 1


def test_its_own_commands_are_the_controllers_business() -> None:
    cluster = MetadataCluster.formed()
    promise = cluster.nodes[1].engine.propose(CreateTopics(topics=()))
    cluster.run(100)
    assert promise.is_done
    assert promise.error is None
    refused = cluster.nodes[2].engine.propose(CreateTopics(topics=()))
    cluster.run(100)
    assert "node 2 may not send CreateTopics" in str(refused.error)
