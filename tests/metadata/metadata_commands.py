"""Commands for tests: short builders, and a Hypothesis strategy over all of them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
from attrs import evolve
from hypothesis import strategies as st
from immutables import Map

from raftmq.metadata.apply import apply
from raftmq.metadata.commands import (
    NO_TOPIC_ID,
    AbortExpired,
    AddPartitions,
    AllocateProducerIds,
    AlterConfigs,
    AlterUsers,
    ChangeNodes,
    ClaimGroup,
    CommitMany,
    CommitOffsets,
    CommittedOffset,
    ConfigChange,
    ConfirmRemoved,
    CreateAcls,
    CreatePartitions,
    CreateTopics,
    DeleteAcls,
    DeleteGroup,
    DeleteOffsets,
    DeleteTopics,
    Endpoint,
    EndReplacement,
    EndTransaction,
    Envelope,
    FenceBroker,
    ForgetId,
    Generation,
    GroupMember,
    InitProducer,
    MembersReport,
    NodeChange,
    NodeState,
    NoOperation,
    OffsetsTransaction,
    Origin,
    PartitionAddition,
    PlanMoves,
    PlannedMove,
    ReassignPartition,
    RegisterBroker,
    ReleaseGroup,
    ReplaceNode,
    ReportGone,
    ReportMarkers,
    ReportSealed,
    ReportVoters,
    Row,
    SealPartitions,
    SealReport,
    ShrinkTopic,
    TopicCreation,
    TransactionRows,
    UnfenceBroker,
    UnregisterBroker,
    ViewCreation,
    VotersReport,
    version_of,
)
from raftmq.metadata.credentials import ScramDeletion, ScramUpsertion
from raftmq.metadata.features import SUPPORTED, named
from raftmq.metadata.image import EMPTY_IMAGE, RAFTMQ_LEVEL, MetadataImage
from raftmq.metadata.results import Result
from raftmq.raft.membership import Configuration
from raftmq.rights import Kind, Operation, Pattern, Permission, Rule
from raftmq.types import NodeId, Offset, ReplicaId, StorageId, TopicId


def node(number: int) -> NodeId:
    return NodeId(number)


FIRST = tuple(node(n) for n in (1, 2, 3))


def replica_of(number: int) -> ReplicaId:
    """A node as a member of a group, with the storage that `register` gives it."""
    return ReplicaId(node(number), StorageId(100 + number))


def group_of(voters: str, learners: str = "") -> Configuration:
    """A configuration by node numbers of one digit."""
    return Configuration(
        tuple(replica_of(int(n)) for n in voters), tuple(replica_of(int(n)) for n in learners)
    )


def topic_id(number: int) -> TopicId:
    return TopicId(UUID(int=number, version=4))


def register(number: int, *, storage: int | None = None, rack: str | None = None) -> RegisterBroker:
    return RegisterBroker(
        node_id=node(number),
        storage_id=f"{storage or 100 + number:x}",
        cluster_id="test",
        rack=rack,
        endpoints=(Endpoint("client", "127.0.0.1", 9000 + number),),
    )


def creation(name: str, number: int, *replicas: tuple[int, ...]) -> TopicCreation:
    return TopicCreation(
        name=name,
        topic_id=topic_id(number),
        replicas=tuple(tuple(node(n) for n in nodes) for nodes in replicas),
    )


class Machine:
    """An image and what was told about each command."""

    def __init__(self) -> None:
        self.image: MetadataImage = EMPTY_IMAGE
        self.results: list[Result] = []
        self.sequence = 0

    def apply(
        self,
        command: msgspec.Struct,
        *,
        submitter: int = 1,
        incarnation: int = 1,
        sequence: int | None = None,
        broker_epoch: int = -1,
        expected_version: int = -1,
    ) -> Result:
        if sequence is None:
            self.sequence += 1
            sequence = self.sequence
        envelope = Envelope(
            version=version_of(command),
            node_id=node(submitter),
            incarnation=incarnation,
            sequence=sequence,
            broker_epoch=broker_epoch,
            expected_version=expected_version,
            command=command,
        )
        return self.apply_envelope(envelope)

    def apply_envelope(self, envelope: Envelope) -> Result:
        offset = Offset(self.image.version + 1)
        self.image, result = apply(self.image, envelope, offset)
        self.results.append(result)
        return result

    def register_all(self, *numbers: int) -> None:
        for number in numbers:
            epoch = self.apply(register(number)).broker_epoch
            self.apply(UnfenceBroker(node_id=node(number), broker_epoch=epoch))


def raised(image: MetadataImage, level: int = SUPPORTED[RAFTMQ_LEVEL][1]) -> MetadataImage:
    """The same at a level; else at the newest that this version offers."""
    return evolve(image, features=Map({RAFTMQ_LEVEL: level}), features_epoch=0)


NODES = st.integers(1, 5).map(node)
NAMES = st.sampled_from(["a", "b", "c.d", "e_f"])
TOPIC_IDS = st.integers(0, 6).map(topic_id)
REPLICAS = st.lists(NODES, min_size=0, max_size=3).map(tuple)
PLACEMENT = st.lists(REPLICAS, max_size=3).map(tuple)
GROUPS = st.sampled_from(["g", "h"])
CONFIGS = st.dictionaries(
    st.sampled_from(["retention.ms", "segment.bytes"]), st.sampled_from(["1", "2"]), max_size=2
)
MEMBERS = st.lists(
    st.builds(
        GroupMember,
        member_id=st.sampled_from(["m", "n"]),
        session_timeout_ms=st.just(10_000),
        rebalance_timeout_ms=st.just(10_000),
        assignment=st.binary(max_size=3),
    ),
    max_size=2,
).map(tuple)
EPOCHS = st.integers(-1, 12)
ORIGINS = st.sampled_from(list(Origin))

CREDENTIALS: dict[str, st.SearchStrategy[Any]] = {
    "transactional_id": st.sampled_from(["t", "u"]),
    "producer_id": st.integers(-1, 2),
    "epoch": st.integers(-1, 3),
}
TXN_SEQS = st.integers(-1, 3)
PROTOCOLS = st.integers(1, 2)
ROWS: st.SearchStrategy[Row] = st.one_of(
    st.builds(InitProducer, **CREDENTIALS, timeout_ms=st.just(1_000)),
    st.builds(
        AddPartitions,
        **CREDENTIALS,
        txn_seq=TXN_SEQS,
        protocol=PROTOCOLS,
        partitions=st.lists(
            st.tuples(TOPIC_IDS, st.lists(st.integers(-1, 2), max_size=2).map(tuple)), max_size=2
        ).map(tuple),
        groups=st.lists(GROUPS, max_size=2).map(tuple),
    ),
    st.builds(
        EndTransaction,
        **CREDENTIALS,
        is_commit=st.booleans(),
        txn_seq=TXN_SEQS,
        protocol=PROTOCOLS,
    ),
    st.builds(
        ReportMarkers,
        topic_id=TOPIC_IDS,
        partition=st.integers(0, 2),
        creation_epoch=st.integers(0, 12),
        ended=st.lists(st.tuples(st.integers(0, 2), TXN_SEQS), max_size=3).map(tuple),
    ),
    st.builds(AbortExpired, **CREDENTIALS, txn_seq=TXN_SEQS),
    st.builds(ForgetId, **CREDENTIALS, txn_seq=TXN_SEQS, changed_at_ms=st.integers(-1, 3)),
)
SEAL_REPORTS = st.lists(
    st.builds(
        SealReport,
        TOPIC_IDS,
        st.integers(0, 2),
        EPOCHS,
        EPOCHS,
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    max_size=3,
).map(tuple)

RULES = st.lists(
    st.builds(
        Rule,
        st.sampled_from(list(Kind)),
        st.sampled_from(list(Pattern)),
        NAMES,
        st.sampled_from(["User:a", "User:*"]),
        st.sampled_from(["*", "10.0.0.0/8"]),
        st.sampled_from([Operation.READ, Operation.ALL]),
        st.sampled_from(list(Permission)),
    ),
    max_size=3,
).map(tuple)

COMMANDS = st.one_of(
    st.builds(
        RegisterBroker,
        node_id=NODES,
        storage_id=st.sampled_from(["1", "ffffffffffffffff"]),
        cluster_id=st.sampled_from(["test", "test", "test", "other"]),
        rack=st.sampled_from([None, "r"]),
        features=st.sampled_from([(), named(SUPPORTED), named(SUPPORTED)]),
        takes_no_data=st.booleans(),
    ),
    st.builds(FenceBroker, node_id=NODES, broker_epoch=EPOCHS),
    st.builds(UnfenceBroker, node_id=NODES, broker_epoch=EPOCHS),
    st.builds(UnregisterBroker, node_id=NODES),
    st.builds(ReplaceNode, old_id=NODES, new_id=NODES),
    st.builds(EndReplacement, old_id=NODES),
    st.builds(
        CreateTopics,
        topics=st.lists(
            st.builds(
                TopicCreation, name=NAMES, topic_id=TOPIC_IDS, replicas=PLACEMENT, configs=CONFIGS
            ),
            max_size=3,
        ).map(tuple),
        views=st.lists(
            st.builds(
                ViewCreation,
                name=st.sampled_from(["a", "v", "x", "y"]),
                topic_id=st.integers(4, 12).map(topic_id),
                source=TOPIC_IDS,
                condition=st.sampled_from(["tag = 'a'", "KEY is not null"]),
            ),
            max_size=2,
        ).map(tuple),
    ),
    st.builds(
        DeleteTopics,
        topic_ids=st.lists(TOPIC_IDS, max_size=2).map(tuple),
        views=st.lists(st.integers(4, 12).map(topic_id), max_size=2).map(tuple),
    ),
    st.builds(
        CreatePartitions,
        additions=st.lists(
            st.builds(
                PartitionAddition,
                topic_id=TOPIC_IDS,
                first_partition=st.integers(0, 4),
                replicas=PLACEMENT,
            ),
            max_size=2,
        ).map(tuple),
    ),
    st.builds(
        ReassignPartition, topic_id=TOPIC_IDS, partition=st.integers(-1, 3), replicas=REPLICAS
    ),
    st.builds(
        ReassignPartition,
        topic_id=TOPIC_IDS,
        partition=st.integers(0, 1),
        replicas=REPLICAS,
        creation_epoch=st.sampled_from([-1, -1, 3]),
        expected=st.sampled_from([(), (), (1, 2)]),
        origin=ORIGINS,
    ),
    st.builds(
        PlanMoves,
        moves=st.lists(
            st.builds(
                PlannedMove,
                topic_id=TOPIC_IDS,
                partition=st.integers(0, 1),
                creation_epoch=EPOCHS,
                replicas=REPLICAS,
                expected=st.sampled_from([(), (), (1, 2)]),
            ),
            max_size=2,
        ).map(tuple),
        origin=ORIGINS,
    ),
    st.builds(
        ShrinkTopic,
        topic_id=TOPIC_IDS,
        partitions=st.integers(-1, 2),
        listed=st.integers(1, 3),
        view=st.sampled_from(["a", "v", "w"]),
        view_id=st.integers(5, 9).map(topic_id),
        alias=st.sampled_from([NO_TOPIC_ID, NO_TOPIC_ID, topic_id(8), topic_id(9)]),
    ),
    st.builds(
        SealPartitions,
        topic_id=TOPIC_IDS,
        partitions=st.lists(st.tuples(st.integers(-1, 2), EPOCHS), max_size=2).map(tuple),
    ),
    st.builds(ReportSealed, reports=SEAL_REPORTS),
    st.builds(
        ReportGone,
        reports=SEAL_REPORTS,
        producers=st.lists(st.sampled_from([b"", b"known"]), max_size=2).map(tuple),
    ),
    st.builds(
        ChangeNodes,
        changes=st.lists(
            st.builds(NodeChange, NODES, st.sampled_from(list(NodeState))), max_size=2
        ).map(tuple),
        voters=st.sampled_from([None, 0, 3]),
    ),
    st.builds(
        ReportVoters,
        reports=st.just(()),
        members=st.lists(
            st.builds(
                MembersReport,
                TOPIC_IDS,
                st.integers(0, 1),
                EPOCHS,
                EPOCHS,
                REPLICAS,
                REPLICAS,
                st.integers(-1, 20),
            ),
            max_size=2,
        ).map(tuple),
    ),
    st.builds(
        ConfirmRemoved,
        node_id=NODES,
        replicas=st.just(()),
        groups=st.lists(st.tuples(TOPIC_IDS, st.integers(0, 1), EPOCHS), max_size=3).map(tuple),
    ),
    st.builds(
        DeleteOffsets,
        group=GROUPS,
        coordinator_epoch=EPOCHS,
        partitions=st.just((("a", 0), ("b", 1))),
        topic_ids=st.tuples(TOPIC_IDS, TOPIC_IDS),
    ),
    st.builds(
        ReportVoters,
        reports=st.lists(
            st.builds(VotersReport, TOPIC_IDS, st.integers(-1, 3), EPOCHS, REPLICAS), max_size=2
        ).map(tuple),
    ),
    st.builds(
        ConfirmRemoved,
        node_id=NODES,
        replicas=st.lists(st.tuples(TOPIC_IDS, st.integers(0, 3)), max_size=3).map(tuple),
    ),
    st.builds(
        AlterConfigs,
        changes=st.lists(
            st.builds(
                ConfigChange,
                resource_type=st.sampled_from(["topic", "broker"]),
                resource_name=st.sampled_from(["a", "b", "", "1"]),
                set=CONFIGS,
                delete=st.lists(st.sampled_from(["retention.ms"]), max_size=1).map(tuple),
            ),
            max_size=2,
        ).map(tuple),
    ),
    st.builds(
        AlterUsers,
        upsertions=st.lists(
            st.builds(
                ScramUpsertion,
                user=NAMES,
                mechanism=st.integers(1, 2),
                iterations=st.integers(1, 3),
                scram_salt=st.binary(max_size=3),
                scram_stored_key=st.binary(max_size=3),
                scram_server_key=st.binary(max_size=3),
            ),
            max_size=2,
        ).map(tuple),
        deletions=st.lists(
            st.builds(ScramDeletion, user=NAMES, mechanism=st.integers(1, 2)), max_size=2
        ).map(tuple),
        scram_secret=st.binary(max_size=2),
    ),
    st.builds(AllocateProducerIds, node_id=NODES, count=st.integers(-3, 5)),
    st.builds(CreateAcls, rules=RULES),
    st.builds(DeleteAcls, rules=RULES),
    st.builds(NoOperation),
    st.builds(ClaimGroup, group=GROUPS, node_id=NODES, broker_epoch=EPOCHS),
    st.builds(ReleaseGroup, group=GROUPS, coordinator_epoch=EPOCHS),
    st.builds(
        Generation,
        group=GROUPS,
        coordinator_epoch=EPOCHS,
        generation=st.integers(0, 4),
        members=MEMBERS,
    ),
    st.builds(
        CommitOffsets,
        group=GROUPS,
        coordinator_epoch=EPOCHS,
        offsets=st.lists(
            st.builds(CommittedOffset, NAMES, st.integers(0, 2), st.integers(0, 99)), max_size=3
        ).map(tuple),
    ),
    st.builds(
        CommitMany,
        commits=st.lists(
            st.builds(
                CommitOffsets,
                group=GROUPS,
                coordinator_epoch=EPOCHS,
                offsets=st.lists(
                    st.builds(CommittedOffset, NAMES, st.integers(0, 2), st.integers(0, 99)),
                    max_size=2,
                ).map(tuple),
            ),
            max_size=3,
        ).map(tuple),
    ),
    st.builds(DeleteGroup, group=GROUPS, coordinator_epoch=EPOCHS),
    st.builds(
        TransactionRows,
        rows=st.lists(ROWS, max_size=6).map(tuple),
        now_ms=st.integers(-1, 3),
    ),
    st.builds(
        CommitOffsets,
        group=GROUPS,
        coordinator_epoch=EPOCHS,
        offsets=st.builds(CommittedOffset, NAMES, st.integers(0, 2), st.integers(0, 99)).map(
            lambda offset: (offset,)
        ),
        transaction=st.builds(
            OffsetsTransaction,
            **CREDENTIALS,
            txn_seq=TXN_SEQS,
            protocol=PROTOCOLS,
            topic_ids=TOPIC_IDS.map(lambda one: (one,)),
        ),
    ),
)

ENVELOPES = st.builds(
    lambda command, **fields: Envelope(version=version_of(command), command=command, **fields),
    node_id=NODES,
    incarnation=st.integers(1, 2),
    sequence=st.integers(1, 12),
    broker_epoch=st.sampled_from([-1, -1, -1, 0, 1, 2]),
    expected_version=st.sampled_from([-1, -1, -1, 3, 9]),
    command=COMMANDS,
)
