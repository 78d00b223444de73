"""The controller: validation with Kafka's codes, waiting, liveness, registration."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import pytest

from raftmq.controller.broker_lifecycle import (
    BEAT_NEXT,
    REGISTRATION_NEXT,
    Beat,
    Registration,
)
from raftmq.controller.topic_validation import load_of
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import (
    FORMAT_MAX,
    AdminRequest,
    AlterConfigsCall,
    ConfigOperation,
    ConfigResource,
    CreatePartitionsCall,
    CreateTopicsCall,
    DeleteTopicsCall,
    NewPartitions,
    NewTopic,
    Outcome,
    Reply,
    encode,
)
from raftmq.metadata.commands import (
    AnyCommand,
    ChangeNodes,
    CreateTopics,
    FeatureUpdate,
    NodeChange,
    NodeState,
    ReassignPartition,
    ReportVoters,
)
from raftmq.metadata.image import LEVEL_OF_MOVES, RAFTMQ_LEVEL, PartitionImage
from raftmq.metadata.snapshot import encode_image
from raftmq.promise import Promise
from raftmq.types import LeaderEpoch, NodeId
from tests.controller.metadata_cluster import CLIENT, MetadataCluster


def _call(
    cluster: MetadataCluster, request: AdminRequest, *, via: int = 2, ms: float = 300
) -> list[Outcome]:
    promise = cluster.nodes[via].control.call(request, CLIENT)
    cluster.run(ms)
    return list(promise.result())


def _create(cluster: MetadataCluster, *topics: NewTopic, **options: Any) -> list[Outcome]:
    return _call(cluster, CreateTopicsCall(topics=topics, **options))


def _formed(voters: int = 3, **options: Any) -> MetadataCluster:
    cluster = MetadataCluster.formed(voters, **options)
    cluster.auto_lead = True
    return cluster


def test_a_topic_is_known_and_led_everywhere_when_it_is_answered() -> None:
    cluster = _formed()
    [outcome] = _create(cluster, NewTopic(name="a", partitions=3, replication_factor=3))
    assert outcome.code is ErrorCode.NONE
    assert outcome.is_led
    assert (outcome.partitions, outcome.replication_factor) == (3, 3)
    for node_id in cluster.voters:
        topic = cluster.nodes[node_id].engine.image.topics["a"]
        assert topic.topic_id == outcome.topic_id
        assert topic.topic_id.version == 4
        leaders = cluster.nodes[node_id].control.leaders
        rows = [leaders.get(topic.topic_id, i) for i in range(3)]
        assert sorted(r.leader_id for r in rows if r is not None) == [1, 2, 3]


def test_defaults_are_three_replicas_and_one_partition() -> None:
    cluster = _formed()
    [outcome] = _create(cluster, NewTopic(name="a"))
    assert (outcome.partitions, outcome.replication_factor) == (1, 3)
    cluster = _formed(1)
    [outcome] = _call(cluster, CreateTopicsCall(topics=(NewTopic(name="a"),)), via=1)
    assert (outcome.partitions, outcome.replication_factor) == (1, 1)
    cluster = _formed(static={"num.partitions": "4", "default.replication.factor": "2"})
    [outcome] = _create(cluster, NewTopic(name="a"))
    assert (outcome.partitions, outcome.replication_factor) == (4, 2)


def test_no_broker_holds_more_replicas_than_it_may() -> None:
    """Each keeps files open; without descriptors a node could not even roll a segment."""
    cluster = _formed(replicas_max=4)
    three = {"partitions": 3, "replication_factor": 3}
    [outcome, beyond] = _create(cluster, NewTopic(name="a", **three), NewTopic(name="b", **three))
    assert outcome.code is ErrorCode.NONE
    assert beyond.code is ErrorCode.POLICY_VIOLATION
    assert beyond.message == "Broker 1 would hold 6 partition replicas; replicas_max is 4."
    more = CreatePartitionsCall(topics=(NewPartitions(name="a", count=5),))
    assert _call(cluster, more)[0].code is ErrorCode.POLICY_VIOLATION
    more = CreatePartitionsCall(topics=(NewPartitions(name="a", count=4),))
    assert _call(cluster, more)[0].code is ErrorCode.NONE


def test_each_broker_has_room_of_its_own() -> None:
    """One says that it has little, one nothing of it: there the controller goes by its own."""
    cluster = _formed(replicas_max=8, reported_max={2: 2, 3: 100})
    for number in range(8):
        topic = NewTopic(name=f"t{number}", partitions=2, replication_factor=1)
        [outcome] = _create(cluster, topic)
        assert outcome.code is ErrorCode.NONE, outcome.message
    load = load_of(cluster.nodes[1].engine.image).replicas
    assert load[NodeId(2)] == 2
    assert load[NodeId(1)] <= 8
    [outcome] = _create(cluster, NewTopic(name="a", partitions=1, replication_factor=3))
    assert outcome.code is ErrorCode.POLICY_VIOLATION
    assert outcome.message == "Broker 2 would hold 3 partition replicas; replicas_max is 2."
    manual = NewTopic(name="b", assignments={0: (NodeId(2),)})
    assert _create(cluster, manual)[0].code is ErrorCode.POLICY_VIOLATION
    cluster.elect(3)
    cluster.run(100)
    [outcome] = _create(cluster, NewTopic(name="c", partitions=4, replication_factor=1))
    assert outcome.code is ErrorCode.NONE
    assert load_of(cluster.nodes[1].engine.image).replicas[NodeId(2)] == 2


def test_partitions_added_in_one_call_count_together() -> None:
    cluster = _formed(replicas_max=3)
    _create(cluster, *(NewTopic(name=name, replication_factor=3) for name in "ab"))
    added = tuple(NewPartitions(name=name, count=2) for name in "ab")
    codes = [outcome.code for outcome in _call(cluster, CreatePartitionsCall(topics=added))]
    assert codes == [ErrorCode.NONE, ErrorCode.POLICY_VIOLATION]


def _outdate(cluster: MetadataCluster, times: int) -> list[int]:
    """Let plans of topics be overtaken by other commands so many times; returns what is left."""
    left = [times]

    def outdated(propose: Callable[..., Any]) -> Callable[..., Any]:
        def proposed(command: AnyCommand, **options: Any) -> Any:
            if isinstance(command, CreateTopics) and left[0] > 0:
                left[0] -= 1
                options["expected_version"] = 0
            return propose(command, **options)

        return proposed

    for node in cluster.nodes.values():
        node.engine.propose = outdated(node.engine.propose)  # type: ignore[method-assign]
    return left


def test_a_plan_that_is_overtaken_is_made_again_until_the_client_gives_up() -> None:
    cluster = _formed()
    left = _outdate(cluster, 40)
    request = CreateTopicsCall(topics=(NewTopic(name="a"),), timeout_ms=5_000)
    [outcome] = _call(cluster, request, ms=3_000)
    assert left == [0]
    assert outcome.code is ErrorCode.NONE
    _outdate(cluster, 10_000)
    request = CreateTopicsCall(topics=(NewTopic(name="b"),), timeout_ms=500)
    promise = cluster.nodes[2].control.call(request, CLIENT)
    cluster.run(5_000)
    assert isinstance(promise.error, KafkaError)
    assert promise.error.code is ErrorCode.REQUEST_TIMED_OUT
    assert all("b" not in cluster.nodes[n].engine.image.topics for n in cluster.voters)


WRONG_TOPICS = {
    "empty name": (NewTopic(name=""), ErrorCode.INVALID_TOPIC_EXCEPTION),
    "dot": (NewTopic(name="."), ErrorCode.INVALID_TOPIC_EXCEPTION),
    "dots": (NewTopic(name=".."), ErrorCode.INVALID_TOPIC_EXCEPTION),
    "long": (NewTopic(name="x" * 250), ErrorCode.INVALID_TOPIC_EXCEPTION),
    "characters": (NewTopic(name="a b"), ErrorCode.INVALID_TOPIC_EXCEPTION),
    "collision": (NewTopic(name="taken_name"), ErrorCode.INVALID_TOPIC_EXCEPTION),
    "exists": (NewTopic(name="taken.name"), ErrorCode.TOPIC_ALREADY_EXISTS),
    "metadata topic": (NewTopic(name="__cluster_metadata"), ErrorCode.INVALID_REQUEST),
    "no partitions": (NewTopic(name="a", partitions=0), ErrorCode.INVALID_PARTITIONS),
    "negative partitions": (NewTopic(name="a", partitions=-2), ErrorCode.INVALID_PARTITIONS),
    "too many partitions": (NewTopic(name="a", partitions=10_001), ErrorCode.INVALID_PARTITIONS),
    "no replicas": (
        NewTopic(name="a", replication_factor=0),
        ErrorCode.INVALID_REPLICATION_FACTOR,
    ),
    "negative replicas": (
        NewTopic(name="a", replication_factor=-2),
        ErrorCode.INVALID_REPLICATION_FACTOR,
    ),
    "too few brokers": (
        NewTopic(name="a", replication_factor=4),
        ErrorCode.INVALID_REPLICATION_FACTOR,
    ),
    "unknown config": (NewTopic(name="a", configs={"nope": "1"}), ErrorCode.INVALID_CONFIG),
    "bad config": (NewTopic(name="a", configs={"retention.ms": "x"}), ErrorCode.INVALID_CONFIG),
    "null config": (NewTopic(name="a", configs={"retention.ms": None}), ErrorCode.INVALID_CONFIG),
    "min isr above factor": (
        NewTopic(name="a", replication_factor=2, configs={"min.insync.replicas": "3"}),
        ErrorCode.INVALID_CONFIG,
    ),
    "assignment and partitions": (
        NewTopic(name="a", partitions=1, assignments={0: (1,)}),
        ErrorCode.INVALID_REQUEST,
    ),
    "assignment and factor": (
        NewTopic(name="a", replication_factor=1, assignments={0: (1,)}),
        ErrorCode.INVALID_REQUEST,
    ),
    "assignment with gap": (
        NewTopic(name="a", assignments={0: (1,), 2: (1,)}),
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
    ),
    "assignment twice": (
        NewTopic(name="a", assignments={0: (1, 1)}),
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
    ),
    "assignment to nobody": (
        NewTopic(name="a", assignments={0: ()}),
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
    ),
    "assignment uneven": (
        NewTopic(name="a", assignments={0: (1, 2), 1: (1,)}),
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
    ),
    "assignment unknown broker": (
        NewTopic(name="a", assignments={0: (9,)}),
        ErrorCode.INVALID_REPLICA_ASSIGNMENT,
    ),
}


def test_wrong_topics_get_kafkas_codes_and_the_others_are_made() -> None:
    cluster = _formed()
    _create(cluster, NewTopic(name="taken.name"))
    wishes = [wish for wish, _ in WRONG_TOPICS.values()]
    outcomes = _create(cluster, *wishes, NewTopic(name="good", assignments={0: (3, 1), 1: (2, 3)}))
    for (label, (wish, code)), outcome in zip(WRONG_TOPICS.items(), outcomes, strict=False):
        assert (outcome.name, outcome.code) == (wish.name, code), label
    assert outcomes[-1].code is ErrorCode.NONE
    image = cluster.nodes[3].engine.image
    assert sorted(image.topics) == ["good", "taken.name"]
    assert [p.replicas for p in image.topics["good"].partitions] == [(3, 1), (2, 3)]


def test_two_of_one_request_may_not_collide() -> None:
    cluster = _formed()
    outcomes = _create(cluster, NewTopic(name="a.b"), NewTopic(name="a_b"))
    assert [o.code for o in outcomes] == [ErrorCode.NONE, ErrorCode.INVALID_TOPIC_EXCEPTION]


def test_validate_only_changes_nothing() -> None:
    cluster = _formed()
    [outcome] = _create(cluster, NewTopic(name="a"), validate_only=True)
    assert outcome.code is ErrorCode.NONE
    assert outcome.partitions == 1
    assert not cluster.nodes[1].engine.image.topics


def test_two_creations_at_once_have_one_winner() -> None:
    cluster = _formed()
    call = CreateTopicsCall(topics=(NewTopic(name="a"),))
    promises = [cluster.nodes[n].control.call(call, CLIENT) for n in cluster.voters]
    cluster.run(300)
    codes = sorted(p.result()[0].code for p in promises)
    assert codes == [ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS, ErrorCode.TOPIC_ALREADY_EXISTS]


def test_auto_creation_finds_an_existing_topic() -> None:
    cluster = _formed()
    [first] = _create(cluster, NewTopic(name="a"), is_auto=True)
    [again] = _create(cluster, NewTopic(name="a"), is_auto=True)
    assert first.code is again.code is ErrorCode.NONE
    assert first.topic_id == again.topic_id


def test_creation_waits_for_every_live_broker_and_says_when_one_is_behind() -> None:
    cluster = _formed()
    cluster.lost_replies_from = []
    promise = cluster.nodes[1].control.call(
        CreateTopicsCall(topics=(NewTopic(name="a", replication_factor=2),), timeout_ms=400), CLIENT
    )
    cluster.cut = [3]
    cluster.run(200)
    assert not promise.is_done  # node 3 is live as far as anybody knows
    cluster.run(400)
    assert promise.result()[0].code is ErrorCode.REQUEST_TIMED_OUT
    assert "a" in cluster.nodes[1].engine.image.topics


def test_a_fenced_broker_is_not_waited_for_and_topics_can_still_be_made() -> None:
    cluster = _formed()
    cluster.kill(3)
    cluster.run(2_500)
    assert [b.node_id for b in cluster.nodes[1].engine.image.live_brokers()] == [1, 2]
    [outcome] = _create(cluster, NewTopic(name="a", partitions=6, replication_factor=3))
    assert outcome.code is ErrorCode.NONE
    partitions = cluster.nodes[1].engine.image.topics["a"].partitions
    assert all(sorted(p.replicas) == [1, 2, 3] for p in partitions)
    assert {p.preferred_leader for p in partitions} == {1, 2}
    cluster.kill(2)
    cluster.elect(1)


def test_without_leaders_creation_answers_after_its_wait() -> None:
    cluster = _formed()
    cluster.auto_lead = False
    promise = cluster.nodes[2].control.call(CreateTopicsCall(topics=(NewTopic(name="a"),)), CLIENT)
    cluster.run(900)
    assert not promise.is_done
    cluster.run(300)
    [outcome] = promise.result()
    assert outcome.code is ErrorCode.NONE
    assert not outcome.is_led


def test_deletion_by_name_and_id() -> None:
    cluster = _formed()
    created = _create(cluster, NewTopic(name="a"), NewTopic(name="b"))
    unknown = UUID(int=77)
    second = created[1].topic_id
    assert second is not None
    call = DeleteTopicsCall(names=("a", "nope"), topic_ids=(second, unknown))
    outcomes = _call(cluster, call)
    assert [(o.name, o.code) for o in outcomes] == [
        ("a", ErrorCode.NONE),
        ("nope", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ("b", ErrorCode.NONE),
        ("", ErrorCode.UNKNOWN_TOPIC_ID),
    ]
    assert not cluster.nodes[3].engine.image.topics
    cluster = _formed(static={"delete.topic.enable": "false"})
    _create(cluster, NewTopic(name="a"))
    [outcome] = _call(cluster, DeleteTopicsCall(names=("a",)))
    assert outcome.code is ErrorCode.TOPIC_DELETION_DISABLED


def test_partitions_are_added_with_kafkas_codes() -> None:
    cluster = _formed()
    _create(cluster, NewTopic(name="a", partitions=2, replication_factor=2), NewTopic(name="b"))
    wishes = (
        NewPartitions(name="a", count=6),
        NewPartitions(name="nope", count=6),
    )
    outcomes = _call(cluster, CreatePartitionsCall(topics=wishes))
    assert [o.code for o in outcomes] == [ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]
    partitions = cluster.nodes[2].engine.image.topics["a"].partitions
    assert len(partitions) == 6
    counts = [sum(n in p.replicas for p in partitions) for n in cluster.voters]
    assert counts == [4, 4, 4]
    assert partitions[5].creation_epoch > partitions[0].creation_epoch
    for wish, code in [
        (NewPartitions(name="a", count=6), ErrorCode.INVALID_PARTITIONS),
        (NewPartitions(name="a", count=1), ErrorCode.INVALID_PARTITIONS),
        (NewPartitions(name="a", count=10_001), ErrorCode.INVALID_PARTITIONS),
        (
            NewPartitions(name="a", count=8, assignments=((1, 2),)),
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        ),
        (
            NewPartitions(name="a", count=7, assignments=((1, 2, 3),)),
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
        ),
        (NewPartitions(name="a", count=7, assignments=((3, 1),)), ErrorCode.NONE),
    ]:
        [outcome] = _call(cluster, CreatePartitionsCall(topics=(wish,)))
        assert outcome.code is code, wish
    assert cluster.nodes[2].engine.image.topics["a"].partitions[6].replicas == (3, 1)


def _alter(
    kind: int, name: str, *operations: tuple[str, int, str | None], **options: Any
) -> AlterConfigsCall:
    rows = tuple(ConfigOperation(*op) for op in operations)
    resource = ConfigResource(resource_type=kind, resource_name=name, operations=rows, **options)
    return AlterConfigsCall(resources=(resource,))


def test_configs_are_altered_with_kafkas_codes() -> None:
    cluster = _formed()
    _create(cluster, NewTopic(name="a", configs={"retention.ms": "1000"}))
    for call, code in [
        (_alter(2, "a", ("segment.bytes", 0, "1048576")), ErrorCode.NONE),
        (_alter(2, "a", ("cleanup.policy", 2, "compact")), ErrorCode.NONE),
        (_alter(2, "nope", ("segment.bytes", 0, "1048576")), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (_alter(2, "a", ("segment.bytes", 2, "1")), ErrorCode.INVALID_CONFIG),
        (_alter(2, "a", ("nope", 0, "1")), ErrorCode.INVALID_CONFIG),
        (_alter(2, "a", ("retention.ms", 0, None)), ErrorCode.INVALID_REQUEST),
        (
            _alter(2, "a", ("retention.ms", 0, "1"), ("retention.ms", 1, None)),
            ErrorCode.INVALID_REQUEST,
        ),
        (_alter(2, "a", ("retention.ms", 7, "1")), ErrorCode.INVALID_REQUEST),
        (_alter(2, "a", ("min.insync.replicas", 0, "4")), ErrorCode.INVALID_CONFIG),
        (_alter(2, "a", ("unclean.leader.election.enable", 0, "true")), ErrorCode.INVALID_CONFIG),
        (_alter(4, "", ("log.retention.ms", 0, "5000")), ErrorCode.NONE),
        (_alter(4, "2", ("log.segment.bytes", 0, "2097152")), ErrorCode.NONE),
        (_alter(4, "9", ("log.segment.bytes", 0, "2097152")), ErrorCode.INVALID_REQUEST),
        (_alter(4, "x", ("log.segment.bytes", 0, "2097152")), ErrorCode.INVALID_REQUEST),
        (_alter(4, "", ("broker.id", 0, "7")), ErrorCode.INVALID_CONFIG),
        (_alter(4, "2", ("plugin.key", 0, "7")), ErrorCode.NONE),
        (_alter(4, "2", ("plugin.other", 0, "7")), ErrorCode.NONE),
        (_alter(4, "2", ("plugin.other", 1, None)), ErrorCode.NONE),
        (_alter(4, "2", ("plugin.key", 2, "7")), ErrorCode.INVALID_CONFIG),
        (_alter(4, "2", ("plugin\n", 0, "7")), ErrorCode.INVALID_CONFIG),
        (_alter(8, "", ("x", 0, "7")), ErrorCode.INVALID_REQUEST),
    ]:
        [outcome] = _call(cluster, call)
        assert outcome.code is code, call
    image = cluster.nodes[3].engine.image
    assert dict(image.topics["a"].configs) == {
        "retention.ms": "1000",
        "segment.bytes": "1048576",
        "cleanup.policy": "delete,compact",
    }
    assert image.broker_configs(NodeId(2)) == {
        "log.retention.ms": "5000",
        "log.segment.bytes": "2097152",
        "plugin.key": "7",
    }
    [outcome] = _call(cluster, _alter(2, "a", ("segment.ms", 0, "7"), replaces_all=True))
    assert outcome.code is ErrorCode.NONE
    assert dict(cluster.nodes[1].engine.image.topics["a"].configs) == {"segment.ms": "7"}


def test_a_dead_broker_is_out_within_three_seconds_and_back_within_one() -> None:
    cluster = _formed()
    cluster.kill(3)
    cluster.run(3_000)
    assert [b.node_id for b in cluster.nodes[2].engine.image.live_brokers()] == [1, 2]
    old_epoch = cluster.nodes[1].engine.image.brokers[NodeId(3)].epoch
    cluster.start(3)
    cluster.run(1_000)
    for node_id in cluster.voters:
        live = cluster.nodes[node_id].engine.image.live_brokers()
        assert [b.node_id for b in live] == [1, 2, 3]
    assert cluster.nodes[1].engine.image.brokers[NodeId(3)].epoch > old_epoch


def test_a_dead_controller_is_fenced_by_its_successor_in_time() -> None:
    cluster = _formed()
    cluster.kill(1)
    cluster.run(500)  # the election
    cluster.elect(2)
    cluster.run(2_400)
    assert [b.node_id for b in cluster.nodes[3].engine.image.live_brokers()] == [2, 3]


def test_a_frozen_broker_is_fenced_and_let_back() -> None:
    cluster = _formed()
    cluster.cut = [3]
    cluster.run(3_000)
    assert NodeId(3) not in [b.node_id for b in cluster.nodes[1].engine.image.live_brokers()]
    assert cluster.nodes[3].control.lifecycle.isolated_ms() > 2_000
    cluster.cut = []
    cluster.run(1_000)
    assert cluster.nodes[3].control.lifecycle.is_ready
    assert cluster.nodes[3].control.lifecycle.isolated_ms() < 1_000


class _Unanswered:
    """What is sent is never answered, nor told to be lost."""

    def version(self, _node_id: NodeId) -> int:
        return FORMAT_MAX

    def send(self, _node_id: NodeId, _payload: bytes, *, is_beat: bool = False) -> Promise[bytes]:
        return Promise()


@pytest.mark.parametrize("silent_ms", [3_000, 3_300, 3_600, 3_900])
def test_coming_back_takes_as_long_as_a_few_heartbeats(silent_ms: int) -> None:
    """The last heartbeat that was lost held back the next one for a second."""
    cluster = _formed()
    lifecycle = cluster.nodes[3].control.lifecycle
    forwarder, lifecycle._forwarder = lifecycle._forwarder, _Unanswered()
    cluster.run(silent_ms)
    assert cluster.nodes[1].engine.image.brokers[NodeId(3)].is_fenced
    lifecycle._forwarder = forwarder
    heartbeat_ms = lifecycle._heartbeat_ms
    cluster.run(int(3 * heartbeat_ms))
    assert not cluster.nodes[1].engine.image.brokers[NodeId(3)].is_fenced


class _Holding(_Unanswered):
    """What is sent is answered when the test says so."""

    def __init__(self) -> None:
        self.sent: list[Promise[bytes]] = []

    def send(self, _node_id: NodeId, _payload: bytes, *, is_beat: bool = False) -> Promise[bytes]:
        self.sent.append(Promise())
        return self.sent[-1]


def test_a_heartbeat_that_was_taken_for_lost_is_answered_after_all() -> None:
    cluster = _formed()
    lifecycle = cluster.nodes[3].control.lifecycle
    holding = _Holding()
    forwarder, lifecycle._forwarder = lifecycle._forwarder, holding
    cluster.run(300)
    assert lifecycle._beat is Beat.UNDER_WAY
    cluster.cut = [3]  # it knows no controller, so that no other one follows
    cluster.run(5_000)
    assert lifecycle._beat is Beat.AT_REST
    [*_, last] = holding.sent
    last.resolve(encode(Reply(ErrorCode.STALE_BROKER_EPOCH, NodeId(1))))
    assert (lifecycle._beat, lifecycle.isolated_ms()) == (Beat.AT_REST, 0.0)
    lifecycle._forwarder = forwarder
    cluster.cut = []
    cluster.run(3_000)
    assert lifecycle.is_ready


@pytest.mark.parametrize("table", [REGISTRATION_NEXT, BEAT_NEXT], ids=["registration", "beat"])
def test_every_state_of_a_broker_is_left_and_reached(table: Mapping[Any, frozenset[Any]]) -> None:
    states = set(type(next(iter(table))))
    assert set(table) == states
    assert all(table[state] - {state} for state in states), "none is the last"
    first = {Registration.UNINFORMED}  # where a new node begins
    assert set().union(*table.values()) >= states - first


def test_a_broker_without_metadata_for_ten_seconds_is_isolated() -> None:
    cluster = _formed()
    cluster.cut = [3]

    def isolated() -> list[int]:
        return [n for n in cluster.voters if cluster.nodes[n].control.lifecycle.is_isolated]

    cluster.run(9_000)
    assert isolated() == []
    cluster.run(1_500)
    assert isolated() == [3]


def test_draining_leaves_metadata_at_once() -> None:
    cluster = _formed()
    promise = cluster.nodes[3].control.lifecycle.drain()
    cluster.turn()
    assert promise.is_done
    assert cluster.nodes[1].engine.image.brokers[NodeId(3)].is_fenced


def test_an_observer_joins_registers_and_holds_replicas() -> None:
    cluster = _formed()
    cluster.start(4)
    cluster.run(1_500)
    assert cluster.nodes[4].control.lifecycle.is_ready
    assert [r.node_id for r in cluster.configuration.learners] == [4]
    [outcome] = _create(cluster, NewTopic(name="a", partitions=1, replication_factor=4))
    assert outcome.code is ErrorCode.NONE
    assert "a" in cluster.nodes[4].engine.image.topics


@pytest.mark.parametrize("cluster_id", ["other"])
def test_a_node_of_another_cluster_is_refused(cluster_id: str) -> None:
    cluster = _formed()
    cluster.kill(3)
    node = cluster.start(3)
    object.__setattr__(node.control.lifecycle._info, "cluster_id", cluster_id)
    cluster.run(1_000)
    assert not node.control.lifecycle.is_ready
    assert "other" in str(node.control.lifecycle.refusal)


def test_a_number_that_is_taken_is_refused_until_its_holder_is_gone() -> None:
    cluster = _formed(1)
    cluster.start(4)
    cluster.run(1_000)
    cluster.kill(4)
    twin = cluster.start(4, storage_id=999)
    cluster.configuration = type(cluster.configuration)(
        cluster.configuration.voters, (twin.self_id,)
    )
    cluster.run(1_000)
    assert "other storage" in str(twin.control.lifecycle.refusal)
    cluster.run(2_000)
    assert twin.control.lifecycle.is_ready
    assert twin.control.lifecycle.refusal is None


def test_calls_find_the_next_controller() -> None:
    cluster = _formed()
    cluster.kill(1)
    call = CreateTopicsCall(topics=(NewTopic(name="a", replication_factor=1),))
    promise = cluster.nodes[2].control.call(call, CLIENT)
    cluster.run(200)
    assert not promise.is_done
    cluster.elect(3)
    cluster.run(2_600)
    assert promise.result()[0].code is ErrorCode.NONE


def test_a_call_without_any_controller_times_out() -> None:
    cluster = _formed()
    cluster.kill(1)
    call = CreateTopicsCall(topics=(NewTopic(name="a"),), timeout_ms=500)
    promise = cluster.nodes[2].control.call(call, CLIENT)
    cluster.run(600)
    assert isinstance(promise.error, KafkaError)
    assert promise.error.code is ErrorCode.REQUEST_TIMED_OUT


def test_voters_that_a_leader_states_are_recorded() -> None:
    cluster = _formed()
    [outcome] = _create(cluster, NewTopic(name="a", replication_factor=2, partitions=1))
    assert outcome.topic_id is not None
    partition = cluster.nodes[1].engine.image.topics["a"].partitions[0]
    cluster.auto_lead = False
    cluster.nodes[2].control.partition_led(
        outcome.topic_id,
        0,
        leader_epoch=9,  # type: ignore[arg-type]
        isr=[cluster.nodes[2].self_id],
        voters=[cluster.nodes[n].self_id for n in (1, 2, 3)],
    )
    cluster.run(200)
    after = cluster.nodes[3].engine.image.topics["a"].partitions[0]
    assert after.replicas == partition.replicas
    assert after.voters == (1, 2, 3)
    assert after.voters_epoch == 9


def test_from_level_4_on_members_are_reported_of_their_group_and_again_for_another_target() -> None:
    levels = (FeatureUpdate(RAFTMQ_LEVEL, LEVEL_OF_MOVES),)
    cluster = _formed(4, first_levels=levels)
    [outcome] = _create(cluster, NewTopic(name="a", assignments={0: (1, 2, 3)}))
    assert outcome.topic_id is not None
    cluster.auto_lead = False
    engine = cluster.nodes[1].engine

    def partition() -> PartitionImage:
        return engine.image.topics["a"].partitions[0]

    def reassign(*replicas: int) -> None:
        nodes = tuple(map(NodeId, replicas))
        engine.propose(
            ReassignPartition(topic_id=outcome.topic_id, partition=0, replicas=nodes)  # type: ignore[arg-type]
        )
        cluster.run(50)

    def led(epoch: int, seen_version: int, creation_epoch: int) -> None:
        cluster.nodes[1].control.partition_led(
            outcome.topic_id,  # type: ignore[arg-type]  # it was made
            0,
            leader_epoch=LeaderEpoch(epoch),
            isr=[cluster.nodes[1].self_id],
            voters=[cluster.nodes[n].self_id for n in (1, 2, 3)],
            seen_version=seen_version,
            creation_epoch=creation_epoch,
        )
        cluster.run(300)

    reassign(4, 2, 3)
    creation_epoch = partition().creation_epoch
    led(9, engine.image.version + 1_000, creation_epoch - 1)
    reassign(1, 2, 3)
    assert partition().dismissed == (4,)
    assert partition().voters_epoch < 9, "that was another group"
    led(10, engine.image.version + 1_000, creation_epoch)
    assert (partition().dismissed, partition().voters_epoch) == ((), 10)
    reassign(4, 2, 3)
    reassign(1, 2, 3)  # what its leader has stated already is news for this target
    cluster.run(300)
    assert partition().dismissed == ()


def test_brokers_that_take_no_replicas_get_none_and_are_named_where_they_are_missed() -> None:
    cluster = _formed(4, first_levels=(FeatureUpdate(RAFTMQ_LEVEL, LEVEL_OF_MOVES),))
    states = {2: NodeState.CORDONED, 4: NodeState.DRAINING}
    changes = tuple(NodeChange(NodeId(n), state) for n, state in states.items())
    cluster.nodes[1].engine.propose(ChangeNodes(changes=changes))
    cluster.run(100)
    three = {"partitions": 4, "replication_factor": 3}
    [refused] = _create(cluster, NewTopic(name="a", **three))
    assert refused.code is ErrorCode.INVALID_REPLICATION_FACTOR
    assert refused.message == (
        "The target replication factor of 3 cannot be reached because only 2 broker(s) take new "
        "replicas: broker 2 is cordoned, broker 4 is draining."
    )
    [by_hand] = _create(cluster, NewTopic(name="a", assignments={0: (1, 2)}))
    assert by_hand.code is ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert by_hand.message == "Broker 2 takes no replicas, since it is cordoned."
    [made] = _create(cluster, NewTopic(name="a", partitions=4, replication_factor=2))
    assert made.code is ErrorCode.NONE
    partitions = cluster.nodes[1].engine.image.topics["a"].partitions
    assert {n for partition in partitions for n in partition.replicas} == {1, 3}


def test_the_newest_row_decides_what_is_reported_of_voters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A report that waits, or is on its way, must not stand for what its partition says no more:
    data is ordered away by it."""
    cluster = _formed()
    _create(cluster, NewTopic(name="a", assignments={0: (1, 2, 3), 1: (1, 2, 3)}))
    cluster.auto_lead = False
    engine, control = cluster.nodes[1].engine, cluster.nodes[1].control
    topic_id = engine.image.topics["a"].topic_id
    held: list[tuple[ReportVoters, Promise[Any]]] = []
    propose = engine.propose

    def hold(command: Any, **named: Any) -> Promise[Any]:
        if not isinstance(command, ReportVoters):
            return propose(command, **named)
        held.append((command, Promise()))
        return held[-1][1]

    def led(partition: int, epoch: int, *voters: int) -> None:
        ids = [cluster.nodes[n].self_id for n in voters]
        where = topic_id, partition
        control.partition_led(*where, leader_epoch=LeaderEpoch(epoch), isr=ids, voters=ids)

    monkeypatch.setattr(engine, "propose", hold)
    led(0, 9, 1, 2)
    cluster.run(100)
    led(1, 9, 1, 2)  # waits for its turn
    led(1, 10, 1, 2, 3)  # which the image says
    led(0, 10, 1, 2, 3)  # as well, but not once the first report is applied
    monkeypatch.undo()
    [(command, promise)] = held
    assert [row.partition for row in command.reports] == [0]
    propose(command, may_resend=False).when_done(lambda done: promise.resolve(done.result()))
    voters: list[tuple[int, ...]] = []
    engine.on_image(lambda _, after: voters.append(after.topics["a"].partitions[1].voters))
    cluster.run(500)
    first, second = engine.image.topics["a"].partitions
    assert first.voters == (1, 2, 3)
    assert first.voters_epoch == 10
    assert second.voters_epoch == -1
    assert voters == [(1, 2, 3)] * len(voters)


def test_everything_is_the_same_on_every_node_in_the_end() -> None:
    cluster = _formed(racks={1: "a", 2: "b", 3: "b"})
    for number in range(12):
        _create(cluster, NewTopic(name=f"t{number}", partitions=number + 1, replication_factor=2))
    for partition in cluster.nodes[1].engine.image.topics["t11"].partitions:
        assert 1 in partition.replicas  # the only broker of its rack
    cluster.kill(1)
    cluster.elect(2)
    cluster.start(1)
    cluster.run(2_000)
    images = [encode_image(cluster.nodes[n].engine.image) for n in cluster.voters]
    assert images[0] == images[1] == images[2]


def test_preferred_leaders_get_their_partitions_back_when_things_are_quiet() -> None:
    cluster = _formed()
    [outcome] = _create(cluster, NewTopic(name="a", assignments={0: (3, 1, 2), 1: (2, 1, 3)}))
    assert outcome.topic_id is not None
    cluster.auto_lead = False

    def led(epoch: int, leader: int, isr: tuple[int, ...]) -> None:
        cluster.nodes[leader].control.partition_led(
            outcome.topic_id,  # type: ignore[arg-type]
            0,
            leader_epoch=epoch,  # type: ignore[arg-type]
            isr=[cluster.nodes[n].self_id for n in isr],
            voters=[cluster.nodes[n].self_id for n in (1, 2, 3)],
        )

    led(5, 2, (1, 2))
    cluster.run(5_000)
    assert cluster.nodes[2].moves == []  # the preferred one is not in sync
    led(6, 2, (1, 2, 3))
    cluster.run(2_000)
    assert cluster.nodes[2].moves == []  # too fresh
    cluster.run(2_500)
    assert cluster.nodes[2].moves == [(outcome.topic_id, 0, 3)]
    cluster.run(5_000)
    assert len(cluster.nodes[2].moves) == 1  # not again at once
    _call(cluster, _alter(4, "", ("auto.leader.rebalance.enable", 0, "false")))
    cluster.run(40_000)
    assert len(cluster.nodes[2].moves) == 1


@pytest.mark.parametrize("trouble", ["has_full_disk", "has_stuck_disk"])
def test_a_broker_whose_disk_fails_gets_no_leadership_back_until_it_works(trouble: str) -> None:
    """It would refuse records, hand the partition over, and get it again, without end."""
    cluster = _formed()
    [outcome] = _create(cluster, NewTopic(name="a", assignments={0: (3, 1, 2)}))
    assert outcome.topic_id is not None
    cluster.auto_lead = False
    lifecycle = cluster.nodes[3].control.lifecycle
    setattr(lifecycle, trouble, True)
    cluster.nodes[2].control.partition_led(
        outcome.topic_id,
        0,
        leader_epoch=LeaderEpoch(5),
        isr=[cluster.nodes[n].self_id for n in (1, 2, 3)],
        voters=[cluster.nodes[n].self_id for n in (1, 2, 3)],
    )
    cluster.run(20_000)
    assert lifecycle.is_ready, "it serves on"
    assert cluster.nodes[2].moves == []
    cluster.kill(1)
    cluster.elect(2)
    cluster.run(20_000)
    assert cluster.nodes[2].moves == [], "the next controller knows it as well"
    setattr(lifecycle, trouble, False)
    cluster.run(2_000)
    assert cluster.nodes[2].moves == []
    cluster.run(3_000)
    assert cluster.nodes[2].moves == [(outcome.topic_id, 0, 3)]


def test_limits_of_one_call_and_of_the_queue() -> None:
    cluster = _formed()
    wide = NewTopic(name="wide", partitions=6_000, replication_factor=1)
    wider = NewTopic(name="wider", partitions=6_000, replication_factor=1)
    outcomes = _create(cluster, wide, wider, validate_only=True)
    assert [o.code for o in outcomes] == [ErrorCode.NONE, ErrorCode.POLICY_VIOLATION]
    controller = cluster.nodes[1].control.controller
    calls = [
        controller.call(CreateTopicsCall(topics=(NewTopic(name=f"t{i}"),))) for i in range(1_100)
    ]
    refused = [c for c in calls if c.is_done and c.error is not None]
    assert len(refused) == 100
    assert isinstance(refused[0].error, KafkaError)
    assert refused[0].error.code is ErrorCode.THROTTLING_QUOTA_EXCEEDED


def test_a_call_costs_what_it_may_create() -> None:
    """A thousand topics of a thousand partitions each: what is refused for their number is not
    placed first, and what the brokers hold is counted once."""
    cluster = _formed()
    topics = [NewTopic(name=f"t{i}", partitions=1_000, replication_factor=1) for i in range(1_000)]
    began = time.thread_time()
    outcomes = _create(cluster, *topics, validate_only=True)
    taken = [o for o in outcomes if o.code is ErrorCode.NONE]
    assert len(taken) == 10
    assert time.thread_time() - began < 1, "it took eleven seconds"


def test_many_calls_that_change_nothing_are_answered() -> None:
    cluster = _formed()
    cluster.nodes[1].control.call(CreateTopicsCall(topics=(NewTopic(name="a"),)), CLIENT)
    calls = [
        cluster.nodes[1].control.call(
            CreateTopicsCall(topics=(NewTopic(name="."),), validate_only=True), CLIENT
        )
        for _ in range(900)
    ]
    cluster.run(300)
    assert all(c.result()[0].code is ErrorCode.INVALID_TOPIC_EXCEPTION for c in calls)
