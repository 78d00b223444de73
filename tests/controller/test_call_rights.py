"""The controller asks for rights itself, whichever node asks for something on whose behalf."""

from __future__ import annotations

from typing import Any, Final, get_args

import pytest
from attrs import evolve

from raftmq.controller.call_rights import (
    CALL_NEEDS,
    NOBODY_ASKS,
    OPERATOR_CALLS,
    CallRefusal,
    call_refusal,
)
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.authority import authority_error
from raftmq.metadata.broker_messages import (
    FORMAT_MAX,
    NODE_ITSELF,
    AdminCall,
    AdminRequest,
    AlterConfigsCall,
    AlterUsersCall,
    Asker,
    BalanceCall,
    ChangeNodesCall,
    ConfigResource,
    CreateAclsCall,
    CreatePartitionsCall,
    CreateTopicsCall,
    DeleteAclsCall,
    DeleteTopicsCall,
    NewPartitions,
    NewTopic,
    PlanMovesCall,
    PreferLeaderCall,
    ReplaceNodeCall,
    Reply,
    ShrinkTopicCall,
    UpdateFeaturesCall,
    Way,
    decode_reply,
    encode,
    encode_admin,
)
from raftmq.metadata.commands import (
    CreateAcls,
    CreateTopics,
    FeatureUpdate,
    ReassignPartition,
    UpdateFeatures,
)
from raftmq.metadata.image import LEVEL_OF_ASKERS, MetadataImage, ViewImage
from raftmq.rights import CLUSTER_NAME, Authorizer, Kind, Operation, Pattern, Permission, Rule
from raftmq.types import NodeId
from tests.controller.metadata_cluster import CLIENT, MetadataCluster
from tests.metadata.metadata_commands import Machine, creation, raised, register, topic_id

SUPER: Final = "User:root"
ALICE: Final = Asker(Way.CLIENT, "User:alice", "10.0.0.9", "CLIENTS", "console")
OPERATOR: Final = Asker(Way.OPERATOR, "token of the admin port", "10.0.0.9", "admin_listener")
_Op: Final = Operation
ALTER: Final = (_Op.ALTER, Kind.CLUSTER, CLUSTER_NAME)
TOPIC = "orders"


def on_topic(operation: Operation, name: str = TOPIC) -> tuple[Operation, Kind, str]:
    return operation, Kind.TOPIC, name


CALLS: Final[dict[str, tuple[AdminRequest, list[tuple[Operation, Kind, str]]]]] = {
    "creates a topic": (
        CreateTopicsCall(topics=(NewTopic(name="new"),)),
        [on_topic(_Op.CREATE, "new")],
    ),
    "creates a delay topic": (
        CreateTopicsCall(
            topics=(
                NewTopic(
                    name="new", configs={"raftmq.delivers.to": TOPIC, "raftmq.dead.to": "dead"}
                ),
            )
        ),
        [on_topic(_Op.CREATE, "new"), on_topic(_Op.WRITE), on_topic(_Op.WRITE, "dead")],
    ),
    "creates a view": (
        CreateTopicsCall(topics=(NewTopic(name="new", configs={"raftmq.view.of": TOPIC}),)),
        [on_topic(_Op.CREATE, "new"), on_topic(_Op.READ)],
    ),
    "deletes by name": (DeleteTopicsCall(names=(TOPIC,)), [on_topic(_Op.DELETE)]),
    "deletes by id": (DeleteTopicsCall(topic_ids=(topic_id(7),)), [on_topic(_Op.DELETE)]),
    "deletes a view by its topic's right": (
        DeleteTopicsCall(names=("orders.retired",)),
        [on_topic(_Op.DELETE)],
    ),
    "adds partitions": (
        CreatePartitionsCall(topics=(NewPartitions(name=TOPIC, count=2),)),
        [on_topic(_Op.ALTER)],
    ),
    "alters a topic's configs": (
        AlterConfigsCall(
            resources=(ConfigResource(resource_type=2, resource_name=TOPIC, operations=()),)
        ),
        [on_topic(_Op.ALTER_CONFIGS)],
    ),
    "alters a broker's configs": (
        AlterConfigsCall(
            resources=(ConfigResource(resource_type=4, resource_name="1", operations=()),)
        ),
        [(_Op.ALTER_CONFIGS, Kind.CLUSTER, CLUSTER_NAME)],
    ),
    "raises levels": (UpdateFeaturesCall(updates=()), [ALTER]),
    "moves": (PlanMovesCall(moves=()), [ALTER]),
    "creates rules": (CreateAclsCall(rules=()), [ALTER]),
    "deletes rules": (DeleteAclsCall(filters=()), [ALTER]),
    "creates users": (AlterUsersCall(users=()), [ALTER]),
    "replaces": (ReplaceNodeCall(old_id=1, new_id=2), [ALTER]),
    "drains": (ChangeNodesCall(node_ids=(1,), change="drain"), [ALTER]),
    "balances": (BalanceCall(), [ALTER]),
    "shrinks": (ShrinkTopicCall(name=TOPIC, partitions=1), [ALTER]),
    "prefers a leader": (PreferLeaderCall(topic=TOPIC, partition=0, to=1), [ALTER]),
}


def world(rules: list[tuple[Operation, Kind, str]]) -> tuple[Authorizer, MetadataImage]:
    machine = Machine()
    machine.apply(register(1))
    machine.apply(CreateTopics(topics=(creation(TOPIC, 7, (1,)),)))
    view = ViewImage(name="orders.retired", topic_id=topic_id(8), source=topic_id(7), width=1)
    image = evolve(machine.image, views=machine.image.views.set(view.name, view))
    image = evolve(image, rules=image.rules.with_rules(rule(*right) for right in rules))
    return Authorizer(lambda: image.rules, [SUPER]), image


def rule(operation: Operation, kind: Kind, name: str) -> Rule:
    return Rule(kind, Pattern.LITERAL, name, "User:alice", "*", operation, Permission.ALLOW)


def test_each_kind_of_call_has_its_row_and_is_tried_here() -> None:
    assert set(CALL_NEEDS) == set(get_args(AdminRequest))
    assert {type(call) for call, _ in CALLS.values()} == set(CALL_NEEDS)


@pytest.mark.parametrize(("call", "rights"), CALLS.values(), ids=CALLS)
def test_a_client_needs_each_of_the_rights(call: Any, rights: list[Any]) -> None:
    authorizer, image = world(rights)
    assert call_refusal(authorizer, image, call, ALICE) is None
    for missing in rights:
        authorizer, image = world([right for right in rights if right != missing])
        refusal = call_refusal(authorizer, image, call, ALICE)
        assert refusal == CallRefusal(*missing)
        named = {Kind.TOPIC: "TOPIC", Kind.CLUSTER: "CLUSTER"}[missing[1]]
        assert refusal.code.name == f"{named}_AUTHORIZATION_FAILED"
    authorizer, image = world([])
    assert call_refusal(authorizer, image, call, evolved(ALICE, SUPER)) is None
    assert call_refusal(None, image, call, ALICE) is None


def evolved(asker: Asker, principal: str) -> Asker:
    return Asker(asker.way, principal, asker.host, asker.listener)


def test_create_on_the_cluster_is_as_good_as_on_each_topic() -> None:
    authorizer, image = world([(_Op.CREATE, Kind.CLUSTER, CLUSTER_NAME)])
    call = CreateTopicsCall(topics=(NewTopic(name="a"), NewTopic(name="b")))
    assert call_refusal(authorizer, image, call, ALICE) is None


def test_a_topic_that_is_there_already_needs_no_right_to_be_named() -> None:
    authorizer, image = world([])
    for is_auto in (True, False):
        call = CreateTopicsCall(topics=(NewTopic(name=TOPIC),), is_auto=is_auto)
        assert (call_refusal(authorizer, image, call, ALICE) is None) is is_auto


@pytest.mark.parametrize(("call", "_rights"), CALLS.values(), ids=CALLS)
def test_the_admin_port_and_the_node_itself_ask_for_their_own_calls(
    call: Any, _rights: list[Any]
) -> None:
    for authorizer, image in (world([]), (None, world([])[1])):
        by_operator = call_refusal(authorizer, image, call, OPERATOR)
        assert (by_operator is None) is (type(call) in OPERATOR_CALLS)
        assert call_refusal(authorizer, image, call, NODE_ITSELF) is not None


def test_the_first_user_is_the_nodes_alone() -> None:
    _, image = world([])
    call = AlterUsersCall(users=(), is_first=True)
    assert call_refusal(None, image, call, NODE_ITSELF) is None
    assert call_refusal(None, image, call, ALICE) is not None
    assert call_refusal(None, image, call, OPERATOR) is not None


# ---- at the controller ----


def ask(cluster: MetadataCluster, data: bytes) -> Reply:
    """What the controller says to node 2."""
    answer = cluster.nodes[1].control.receive(NodeId(2), data)
    cluster.run(1_000)
    return decode_reply(answer.result())


def allowed(*rights: tuple[Operation, Kind, str]) -> MetadataCluster:
    cluster = MetadataCluster.formed(super_users=(SUPER,))
    raise_level(cluster, LEVEL_OF_ASKERS)
    made = cluster.nodes[1].engine.propose(
        CreateAcls(rules=tuple(rule(*right) for right in rights))
    )
    cluster.run(200)
    assert made.error is None
    return cluster


def raise_level(cluster: MetadataCluster, level: int) -> None:
    update = UpdateFeatures(updates=(FeatureUpdate("raftmq.level", level),))
    done = cluster.nodes[1].engine.propose(update)
    cluster.run(200)
    assert done.error is None


CREATE: Final = CreateTopicsCall(topics=(NewTopic(name="new", replication_factor=3),))


def test_the_controller_refuses_what_the_node_let_through_and_tells() -> None:
    cluster = allowed()
    promise = cluster.nodes[2].control.call(CREATE, ALICE)
    cluster.run(500)
    error = promise.error
    assert isinstance(error, KafkaError)
    assert error.code is ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert "new" not in cluster.nodes[1].engine.image.topics
    [(sender, request, asker, refusal)] = cluster.refused
    assert (sender, request, asker) == (2, CREATE, ALICE)
    assert refusal == CallRefusal(*on_topic(_Op.CREATE, "new"))


def test_the_controller_does_what_rules_allow() -> None:
    cluster = allowed(on_topic(_Op.CREATE, "new"))
    promise = cluster.nodes[2].control.call(CREATE, ALICE)
    cluster.run(1_500)
    (outcome,) = promise.result()
    assert outcome.code in (ErrorCode.NONE, ErrorCode.REQUEST_TIMED_OUT)
    assert "new" in cluster.nodes[1].engine.image.topics
    assert cluster.refused == []


def test_a_call_for_nobody_is_done_for_an_older_node_alone() -> None:
    data = encode(AdminCall(encode_admin(CREATE)))
    assert ask(allowed(), data).code is NOBODY_ASKS.code
    for level, version, is_done in (
        (LEVEL_OF_ASKERS - 1, FORMAT_MAX - 1, True),
        (LEVEL_OF_ASKERS - 1, FORMAT_MAX, False),
        (LEVEL_OF_ASKERS, FORMAT_MAX - 1, False),
    ):
        cluster = MetadataCluster.formed(super_users=(SUPER,))
        raise_level(cluster, level)
        cluster.formats[2] = version
        assert (ask(cluster, data).code is ErrorCode.NONE) is is_done
        assert ("new" in cluster.nodes[1].engine.image.topics) is is_done


def test_from_the_level_on_no_node_orders_replicas_itself() -> None:
    order = ReassignPartition(topic_id=topic_id(7), partition=0, replicas=(NodeId(1),))
    _, image = world([])
    assert not authority_error(image, NodeId(2), order)
    assert authority_error(raised(image, LEVEL_OF_ASKERS), NodeId(2), order)


def test_a_preferred_leader_is_one_in_sync() -> None:
    cluster = MetadataCluster.formed()
    made = cluster.nodes[1].control.call(CREATE, CLIENT)
    cluster.run(300)
    image = cluster.nodes[1].engine.image
    topic = image.topics["new"]
    first, second, third = topic.partitions[0].replicas
    node = cluster.nodes[int(first)]
    node.control.partition_led(
        topic.topic_id,
        0,
        leader_epoch=1,
        isr=[cluster.nodes[int(n)].self_id for n in (first, second)],
        voters=[cluster.nodes[int(n)].self_id for n in (first, second, third)],
    )
    cluster.run(1_500)
    assert made.error is None

    def prefer(to: int) -> ErrorCode:
        call = PreferLeaderCall(topic="new", partition=0, to=to)
        promise = cluster.nodes[2].control.call(call, CLIENT)
        cluster.run(300)
        return promise.result()[0].code

    assert prefer(int(third)) is ErrorCode.INELIGIBLE_REPLICA
    assert prefer(99) is ErrorCode.INVALID_REPLICA_ASSIGNMENT
    assert prefer(int(second)) is ErrorCode.NONE
    assert prefer(int(second)) is ErrorCode.NONE
    replicas = cluster.nodes[1].engine.image.topics["new"].partitions[0].replicas
    assert replicas == (second, first, third)
    missing = PreferLeaderCall(topic="none", partition=0, to=1)
    promise = cluster.nodes[2].control.call(missing, CLIENT)
    cluster.run(300)
    assert promise.result()[0].code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
