"""What commands do: once each, fenced by epochs and versions, pure, never raising."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.apply import PRODUCER_ID_END, STALE_SEQUENCE
from raftmq.metadata.commands import (
    NO_TOPIC_ID,
    AllocateProducerIds,
    AlterConfigs,
    ClaimGroup,
    CommitMany,
    CommitOffsets,
    CommittedOffset,
    ConfigChange,
    ConfirmRemoved,
    CreatePartitions,
    CreateTopics,
    DeleteOffsets,
    DeleteTopics,
    Envelope,
    FenceBroker,
    NodeState,
    NoOperation,
    PartitionAddition,
    ReassignPartition,
    RegisterBroker,
    ReportVoters,
    UnfenceBroker,
    UnregisterBroker,
    VotersReport,
    decode_envelope,
    encode_envelope,
)
from raftmq.metadata.image import (
    LEVEL_OF_MOVES,
    LEVEL_OF_VIEWS,
    MetadataImage,
    PartitionImage,
    all_partitions,
)
from raftmq.metadata.results import (
    Claimed,
    CommitsDone,
    GroupDone,
    ProducerIds,
    Registered,
    Rejection,
)
from raftmq.metadata.snapshot import decode_image, encode_image
from raftmq.types import NodeId, RaftGroupId, TopicId, TopicPartition
from tests.metadata.metadata_commands import (
    ENVELOPES,
    Machine,
    creation,
    node,
    raised,
    register,
    topic_id,
)


@pytest.fixture
def machine() -> Machine:
    machine = Machine()
    machine.register_all(1, 2, 3)
    machine.apply(CreateTopics(topics=(creation("a", 1, (1, 2, 3), (2, 3, 1)),)))
    return machine


def _code(result: object) -> ErrorCode:
    assert isinstance(result, Rejection)
    return result.code


def test_a_sequence_is_applied_once(machine: Machine) -> None:
    command = AllocateProducerIds(node_id=node(1), count=10)
    assert machine.apply(command, submitter=7, sequence=4) == ProducerIds(0, 10)
    assert machine.apply(command, submitter=7, sequence=4) is STALE_SEQUENCE
    assert machine.apply(command, submitter=7, sequence=3) is STALE_SEQUENCE
    assert machine.apply(command, submitter=8, sequence=1) == ProducerIds(10, 20)
    assert machine.apply(command, submitter=7, incarnation=2, sequence=1) == ProducerIds(20, 30)
    assert machine.apply(command, submitter=7, incarnation=1, sequence=9) is STALE_SEQUENCE
    assert machine.image.next_producer_id == 30


def test_commands_of_an_older_registration_are_rejected(machine: Machine) -> None:
    old = machine.image.brokers[node(2)].epoch
    machine.apply(register(2))
    command = AllocateProducerIds(node_id=node(2))
    result = machine.apply(command, submitter=2, incarnation=9, sequence=1, broker_epoch=old)
    assert _code(result) is ErrorCode.STALE_BROKER_EPOCH
    new = machine.image.brokers[node(2)].epoch
    assert new > old
    assert machine.apply(command, submitter=2, incarnation=9, sequence=2, broker_epoch=new)
    result = machine.apply(command, submitter=99, sequence=1, broker_epoch=0)
    assert _code(result) is ErrorCode.STALE_BROKER_EPOCH


def test_commands_computed_from_an_older_state_are_rejected(machine: Machine) -> None:
    version = machine.image.version
    machine.apply(NoOperation())
    machine.apply(AllocateProducerIds(node_id=node(1)))
    assert machine.image.structure_version <= version  # none of these changes the structure
    create = CreateTopics(topics=(creation("b", 2, (1,)),))
    assert machine.apply(create, expected_version=version).topics[0].code is ErrorCode.NONE
    create = CreateTopics(topics=(creation("c", 3, (1,)),))
    result = machine.apply(create, expected_version=version)
    assert _code(result) is ErrorCode.INVALID_UPDATE_VERSION
    assert "c" not in machine.image.topics


def test_registration_fencing_and_return() -> None:
    machine = Machine()
    first = machine.apply(register(1))
    assert first == Registered(0)
    assert machine.image.brokers[node(1)].is_fenced
    assert machine.image.live_epoch(node(1)) is None
    machine.apply(UnfenceBroker(node_id=node(1), broker_epoch=0))
    assert machine.image.live_epoch(node(1)) == 0
    stale = machine.apply(FenceBroker(node_id=node(1), broker_epoch=5))
    assert _code(stale) is ErrorCode.STALE_BROKER_EPOCH
    unknown = machine.apply(FenceBroker(node_id=node(9), broker_epoch=5))
    assert _code(unknown) is ErrorCode.BROKER_ID_NOT_REGISTERED
    twin = machine.apply(register(1, storage=77))
    assert _code(twin) is ErrorCode.DUPLICATE_BROKER_REGISTRATION
    machine.apply(FenceBroker(node_id=node(1), broker_epoch=0))
    assert isinstance(machine.apply(register(1, storage=77)), Registered)
    assert machine.image.brokers[node(1)].storage_id == 77


def test_another_cluster_is_refused(machine: Machine) -> None:
    command = RegisterBroker(node_id=node(9), storage_id="9", cluster_id="elsewhere")
    assert _code(machine.apply(command)) is ErrorCode.INCONSISTENT_CLUSTER_ID


def test_first_voters_are_fixed_at_creation(machine: Machine) -> None:
    before = machine.image.topics["a"].partitions[0].first_voters
    epoch = machine.image.brokers[node(3)].epoch
    machine.apply(FenceBroker(node_id=node(3), broker_epoch=epoch))
    machine.apply(register(3, storage=999))
    assert machine.image.topics["a"].partitions[0].first_voters == before
    assert [voter.storage_id for voter in before] == [101, 102, 103]


def test_creation_and_addition_are_judged_at_apply(machine: Machine) -> None:
    outcomes = machine.apply(
        CreateTopics(
            topics=(
                creation("a", 5, (1,)),
                creation("b", 1, (1,)),
                creation("c", 6),
                creation("d", 7, (1, 1)),
                creation("e", 8, (9,)),
                creation("f", 9, (2, 1)),
                creation("f", 10, (2, 1)),
            )
        )
    )
    assert [o.code for o in outcomes.topics] == [
        ErrorCode.TOPIC_ALREADY_EXISTS,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.INVALID_PARTITIONS,
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        ErrorCode.NONE,
        ErrorCode.TOPIC_ALREADY_EXISTS,
    ]

    def add(number: int, first: int) -> ErrorCode:
        addition = PartitionAddition(
            topic_id=topic_id(number), first_partition=first, replicas=((node(1),),)
        )
        code: ErrorCode = machine.apply(CreatePartitions(additions=(addition,))).topics[0].code
        return code

    assert add(9, 1) is ErrorCode.NONE
    assert add(9, 1) is ErrorCode.INVALID_PARTITIONS
    assert add(44, 1) is ErrorCode.UNKNOWN_TOPIC_ID
    topic = machine.image.topics["f"]
    assert [p.index for p in topic.partitions] == [0, 1]
    assert topic.partitions[1].creation_epoch == machine.image.topics["f"].group_id(1)[2]


def _ordered(machine: Machine, group: RaftGroupId) -> tuple[NodeId, ...]:
    """Who is to delete its data of a group."""
    order = machine.image.removal(group)
    return () if order is None else order.nodes


def test_deletion_orders_every_replica_to_go_until_it_confirms(machine: Machine) -> None:
    topic = machine.image.topics["a"]
    result = machine.apply(DeleteTopics(topic_ids=(topic_id(1), topic_id(44))))
    assert [o.code for o in result.topics] == [ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_ID]
    assert "a" not in machine.image.topics
    assert machine.image.topic_by_id(topic_id(1)) is None
    assert _ordered(machine, topic.group_id(0)) == (1, 2, 3)
    both = ((topic_id(1), 0), (topic_id(1), 1))
    machine.apply(ConfirmRemoved(node_id=node(2), replicas=both))
    assert _ordered(machine, topic.group_id(1)) == (1, 3)
    epoch = machine.image.brokers[node(1)].epoch
    machine.apply(FenceBroker(node_id=node(1), broker_epoch=epoch))
    machine.apply(register(1, storage=999))  # its disk is gone, and the data with it
    assert _ordered(machine, topic.group_id(1)) == (3,)
    machine.apply(ConfirmRemoved(node_id=node(3), replicas=both))
    assert not machine.image.removals


def test_deletion_forgets_offsets_of_the_topic(machine: Machine) -> None:
    epoch = machine.image.brokers[node(1)].epoch
    claimed = machine.apply(ClaimGroup(group="g", node_id=node(1), broker_epoch=epoch))
    assert isinstance(claimed, Claimed)
    offsets = (CommittedOffset("a", 0, 5), CommittedOffset("z", 0, 6))
    commit = CommitOffsets(group="g", coordinator_epoch=claimed.coordinator_epoch, offsets=offsets)
    assert isinstance(machine.apply(commit), GroupDone)
    machine.apply(DeleteTopics(topic_ids=(topic_id(1),)))
    group = machine.image.groups.get("g")
    assert group is not None
    assert list(group.offsets) == [TopicPartition("z", 0)]


@pytest.mark.parametrize("is_many", [False, True])
def test_a_topic_inherits_no_offset_of_one_that_had_its_name(
    machine: Machine, is_many: bool
) -> None:
    """A commit may be applied after the topic that it was for is deleted, and made again."""
    epoch = machine.image.brokers[node(1)].epoch
    claimed = machine.apply(ClaimGroup(group="g", node_id=node(1), broker_epoch=epoch))
    assert isinstance(claimed, Claimed)

    machine.apply(CreateTopics(topics=(creation("b", 3, (1, 2, 3)),)))

    def commit(known_version: int) -> tuple[ErrorCode, list[TopicPartition]]:
        one, other = (
            CommitOffsets(
                group="g",
                coordinator_epoch=claimed.coordinator_epoch,
                offsets=(CommittedOffset(name, 0, 5),),
                known_version=known_version,
            )
            for name in "ab"
        )
        result = machine.apply(CommitMany(commits=(other, one, other)) if is_many else one)
        code = _code(result) if isinstance(result, Rejection) else ErrorCode.NONE
        if is_many:
            assert isinstance(result, CommitsDone)
            assert result.codes[::2] == (0, 0)
            code = ErrorCode(result.codes[1])
        group = machine.image.groups.get("g")
        assert group is not None
        return code, sorted(at for at in group.offsets if at.topic == "a")

    before = machine.image.structure_version
    there, retried = [TopicPartition("a", 0)], ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert commit(before) == (ErrorCode.NONE, there)
    machine.apply(DeleteTopics(topic_ids=(topic_id(1),)))
    assert commit(before) == (retried, [])
    machine.apply(CreateTopics(topics=(creation("a", 2, (1, 2, 3)),)))
    assert commit(before) == (retried, [])
    assert commit(machine.image.structure_version) == (ErrorCode.NONE, there)


def test_a_late_deletion_of_offsets_takes_none_of_the_next_topic_of_that_name(
    machine: Machine,
) -> None:
    machine.image = raised(machine.image)
    epoch = machine.image.brokers[node(1)].epoch
    claimed = machine.apply(ClaimGroup(group="g", node_id=node(1), broker_epoch=epoch))
    epoch = claimed.coordinator_epoch
    machine.apply(DeleteTopics(topic_ids=(topic_id(1),)))
    machine.apply(CreateTopics(topics=(creation("a", 2, (1, 2, 3)),)))
    offsets = (CommittedOffset("a", 0, 5), CommittedOffset("gone", 0, 6))
    machine.apply(CommitOffsets(group="g", coordinator_epoch=epoch, offsets=offsets))

    def delete(*topic_ids: TopicId) -> list[str]:
        partitions = (("a", 0), ("gone", 0))
        done = machine.apply(
            DeleteOffsets(
                group="g", coordinator_epoch=epoch, partitions=partitions, topic_ids=topic_ids
            )
        )
        assert isinstance(done, GroupDone)
        group = machine.image.groups.get("g")
        assert group is not None
        return sorted(at.topic for at in group.offsets)

    assert delete(topic_id(1), topic_id(1)) == ["a", "gone"]
    assert delete(topic_id(1), NO_TOPIC_ID) == ["a"]
    assert delete(topic_id(2), NO_TOPIC_ID) == []


def test_wish_and_fact_of_voters(machine: Machine) -> None:
    machine.register_all(4)
    wish = ReassignPartition(
        topic_id=topic_id(1), partition=0, replicas=(node(2), node(3), node(4))
    )
    machine.apply(wish)
    partition = machine.image.topics["a"].partitions[0]
    assert partition.replicas == (2, 3, 4)
    assert partition.voters == (1, 2, 3)
    assert not machine.image.removals  # still a voter: nothing may go

    def report(epoch: int, *voters: int) -> None:
        row = VotersReport(topic_id(1), 0, epoch, tuple(node(v) for v in voters))
        machine.apply(ReportVoters(reports=(row,)))

    report(4, 1, 2, 3, 4)
    assert not machine.image.removals
    report(5, 2, 3, 4)
    assert _ordered(machine, machine.image.topics["a"].group_id(0)) == (1,)
    report(4, 1, 2, 3)  # late news
    assert machine.image.topics["a"].partitions[0].voters == (2, 3, 4)
    back = ReassignPartition(
        topic_id=topic_id(1), partition=0, replicas=(node(1), node(2), node(3))
    )
    machine.apply(back)
    assert not machine.image.removals  # wanted again before it obeyed


def test_a_broker_goes_for_good_only_without_replicas(machine: Machine) -> None:
    assert _code(machine.apply(UnregisterBroker(node_id=node(1)))) is ErrorCode.POLICY_VIOLATION
    unknown = machine.apply(UnregisterBroker(node_id=node(9)))
    assert _code(unknown) is ErrorCode.BROKER_ID_NOT_REGISTERED
    group = machine.image.topics["a"].group_id(0)
    machine.apply(DeleteTopics(topic_ids=(topic_id(1),)))
    machine.apply(UnregisterBroker(node_id=node(1)))
    assert node(1) not in machine.image.brokers
    assert _ordered(machine, group) == (2, 3)


def test_configs_are_set_and_deleted(machine: Machine) -> None:
    def change(kind: str, name: str, deleted: tuple[str, ...] = (), **values: str) -> object:
        row = ConfigChange(resource_type=kind, resource_name=name, set=values, delete=deleted)
        return machine.apply(AlterConfigs(changes=(row,)))

    change("topic", "a", x="1", y="2")
    change("topic", "a", ("x", "nope"))
    assert dict(machine.image.topics["a"].configs) == {"y": "2"}
    change("broker", "", x="1")
    change("broker", "1", x="2")
    assert machine.image.broker_configs(node(1)) == {"x": "2"}
    assert machine.image.broker_configs(node(2)) == {"x": "1"}
    change("broker", "", ("x",))
    assert machine.image.broker_configs(node(2)) == {}
    assert _code(change("topic", "nope", x="1")) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_producer_ids_end(machine: Machine) -> None:
    image = machine.image
    machine.image = MetadataImage(
        version=image.version, next_producer_id=PRODUCER_ID_END - 5, brokers=image.brokers
    )
    result = machine.apply(AllocateProducerIds(node_id=node(1), count=6))
    assert _code(result) is ErrorCode.UNKNOWN_SERVER_ERROR


@settings(max_examples=200, deadline=None)
@given(
    envelopes=st.lists(ENVELOPES, max_size=40),
    cut=st.integers(0, 40),
    level=st.sampled_from([LEVEL_OF_MOVES, LEVEL_OF_VIEWS]),
)
def test_apply_is_total_pure_and_snapshots_lose_nothing(
    envelopes: list[Envelope], cut: int, level: int
) -> None:
    straight, restored = Machine(), Machine()
    for machine in (straight, restored):
        machine.register_all(1, 2, 3)
        machine.image = raised(evolve(machine.image, submitters=Map()), level)
    for number, envelope in enumerate(envelopes):
        before = straight.image
        frozen = encode_image(before)
        straight.apply_envelope(envelope)
        assert encode_image(before) == frozen  # the old image did not change
        if number == cut:
            restored.image = decode_image(encode_image(restored.image))
        restored.apply_envelope(decode_envelope(encode_envelope(envelope)))
    assert encode_image(straight.image) == encode_image(restored.image)
    assert straight.image == restored.image
    assert straight.results == restored.results
    _check_invariants(straight.image)


def _check_invariants(image: MetadataImage) -> None:
    names = {
        topic_id: topic.name
        for topic in image.topics_by_id()
        for topic_id in (topic.topic_id, *topic.aliases)
    }
    assert names == dict(image.topic_names)
    assert image.structure_version <= image.version
    for topic in image.topics_by_id():
        assert [partition.index for partition in topic.partitions] == [
            *range(len(topic.partitions))
        ]
        for partition in topic.held:
            assert partition.replicas
            assert partition.first_voters
        for key in image.removals:
            removal = image.removals[key]
            assert removal.nodes
            if topic.has(removal.group):
                held = topic.partition(removal.group.partition)
                assert held is not None
                kept = (*held.replicas, *held.voters, *held.dismissed)
                assert not any(n in kept for n in removal.nodes)
    for key, removal in image.removals.items():
        assert key == image.removal_key(removal.group)
    _check_moves(image)


def _check_moves(image: MetadataImage) -> None:
    """Below level 4 there are none, as no snapshot would hold them."""
    for topic, partition in all_partitions(image):
        plain = PartitionImage(
            partition.index,
            partition.creation_epoch,
            partition.replicas,
            partition.first_voters,
            partition.voters,
            partition.voters_epoch,
        )
        if image.level < LEVEL_OF_MOVES:
            assert partition == plain, topic.name
        assert not {*partition.dismissed} & {*partition.replicas, *partition.voters}
        assert partition.replicas not in (partition.moving_from, partition.planned)
        if sorted(partition.voters) == sorted(partition.replicas):
            assert not partition.moving_from
        if partition.origin:
            assert partition.moving_from or partition.planned
        assert partition.target_version <= image.version
        assert all(n in image.brokers for n in partition.planned)
    if image.level < LEVEL_OF_MOVES:
        assert not image.removed
        assert image.voters_wanted == 0
        assert all(b.state is NodeState.ACTIVE for b in image.brokers.values())
    for node_id, broker in image.brokers.items():
        assert broker.storage_id not in image.removed.get(node_id, ())
