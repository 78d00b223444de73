"""Which views with conditions the controller makes, which topics it keeps as they are for them, and
what is told to whoever takes a view for a topic."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from raftmq.controller.shrinking import plan_shrink
from raftmq.controller.topic_validation import (
    BROKER_RESOURCE,
    NO_ID,
    TOPIC_RESOURCE,
    Settings,
    load_of,
    plan_configs,
    plan_move,
    plan_partitions,
    plan_topic,
)
from raftmq.controller.view_validation import is_view, plan_view
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import (
    ConfigOperation,
    ConfigResource,
    CreateTopicsCall,
    DeleteTopicsCall,
    MoveRequest,
    NewPartitions,
    NewTopic,
    Outcome,
    ShrinkTopicCall,
)
from raftmq.metadata.commands import (
    ConfigChange,
    CreateTopics,
    FeatureUpdate,
    ShrinkTopic,
    ViewCreation,
)
from raftmq.metadata.image import (
    LEVEL_OF_CONDITIONS,
    LEVEL_OF_DELAYS,
    RAFTMQ_LEVEL,
    VIEWS_OF_TOPIC_MAX,
    MetadataImage,
)
from raftmq.types import INTERNAL_TOPICS, METADATA_TOPIC, NodeId
from tests.controller.metadata_cluster import MetadataCluster
from tests.controller.test_controller import _call, _formed
from tests.metadata.metadata_commands import Machine, creation, raised, topic_id

ONE = (1,)
SETTINGS = Settings(NodeId(1), {})
WHERE = "tag in ('refund', 'checkout') and region = \"eu\""
FRESH = topic_id(50)
INTERNAL = sorted(INTERNAL_TOPICS)[-1]


def image(level: int = LEVEL_OF_CONDITIONS) -> MetadataImage:
    """With `orders` of two partitions, which retired a third, a view of it, and topics that can
    have none."""
    machine = Machine()
    machine.register_all(1)
    machine.image = raised(machine.image, level)
    made = {"orders": (ONE, ONE, ONE), "later": (ONE,), "compacted": (ONE,), INTERNAL: (ONE,)}
    machine.apply(
        CreateTopics(
            topics=tuple(creation(name, n, *made[name]) for n, name in enumerate(made, 1)),
            views=(_view("known", 20),),
        )
    )
    machine.apply(
        ShrinkTopic(
            topic_id=topic_id(1), partitions=2, listed=3, view="orders.retired", view_id=topic_id(9)
        )
    )
    topics = machine.image.topics
    for name, key, value in (
        ("later", "raftmq.delivers.to", "orders"),
        ("compacted", "cleanup.policy", "delete, compact"),
    ):
        configs = topics[name].configs.set(key, value)
        topics = topics.set(name, evolve(topics[name], configs=configs))
    return evolve(machine.image, topics=topics)


def _view(name: str, number: int) -> ViewCreation:
    return ViewCreation(name=name, topic_id=topic_id(number), source=topic_id(1), condition=WHERE)


def new(
    name: str = "refunds", *, of: Any = "orders", where: Any = WHERE, **fields: Any
) -> NewTopic:
    configs = {"raftmq.view.of": of, "raftmq.view.where": where} | fields.pop("configs", {})
    return NewTopic(name=name, configs=configs, **fields)


def plan(known: MetadataImage, wanted: NewTopic, *planned: ViewCreation) -> ViewCreation:
    taken = {name.replace(".", "_"): name for name in known.topics}
    return plan_view(known, taken, wanted, FRESH, SETTINGS, planned)[0]


@pytest.mark.parametrize(
    "fields",
    [{}, {"partitions": 2}, {"replication_factor": 1}, {"partitions": 2, "replication_factor": 1}],
)
def test_a_view_is_planned(fields: dict[str, int]) -> None:
    wanted = new(of=" orders ", where=f"  {WHERE}\n", **fields)
    assert is_view(wanted)
    assert plan(image(), wanted) == ViewCreation(
        name="refunds", topic_id=FRESH, source=topic_id(1), condition=WHERE
    )
    assert not is_view(NewTopic(name="refunds", configs={"retention.ms": "1"}))


@pytest.mark.parametrize(
    ("wanted", "code", "why"),
    [
        (new("orders"), ErrorCode.TOPIC_ALREADY_EXISTS, "Topic 'orders' already exists"),
        (new("known"), ErrorCode.TOPIC_ALREADY_EXISTS, "View 'known' already exists"),
        (new("orders.retired"), ErrorCode.TOPIC_ALREADY_EXISTS, "View"),
        (new("or ders"), ErrorCode.INVALID_TOPIC_EXCEPTION, "contains one or more characters"),
        (new(INTERNAL), ErrorCode.INVALID_TOPIC_EXCEPTION, "internal topic"),
        (new(METADATA_TOPIC), ErrorCode.INVALID_REQUEST, "internal topic"),
        (new(of="nope"), ErrorCode.INVALID_CONFIG, "no such topic"),
        (new(of=None), ErrorCode.INVALID_CONFIG, "names"),
        (new(of="  "), ErrorCode.INVALID_CONFIG, "names"),
        (new(of="known"), ErrorCode.INVALID_CONFIG, "a view itself"),
        (new(of="orders.retired"), ErrorCode.INVALID_CONFIG, "a view itself"),
        (new(of=INTERNAL), ErrorCode.INVALID_CONFIG, "internal topic"),
        (new(of=METADATA_TOPIC), ErrorCode.INVALID_CONFIG, "internal topic"),
        (new(of="later"), ErrorCode.INVALID_CONFIG, "comes to orders"),
        (new(of="compacted"), ErrorCode.INVALID_CONFIG, "superseded"),
        (new(configs={"retention.ms": "1"}), ErrorCode.INVALID_CONFIG, "retention.ms"),
        (new(partitions=3), ErrorCode.INVALID_PARTITIONS, "orders has 2, not 3"),
        (new(replication_factor=3), ErrorCode.INVALID_REPLICATION_FACTOR, "orders has 1, not 3"),
        (
            new(assignments={0: (1,)}),
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            "no replicas of its own",
        ),
    ],
)
def test_a_view_that_cannot_be_is_refused(wanted: NewTopic, code: ErrorCode, why: str) -> None:
    with pytest.raises(KafkaError, match=why) as caught:
        plan(image(), wanted)
    assert caught.value.code is code


@pytest.mark.parametrize(
    ("where", "position"), [("tag = ", 6), ("tag == 'a'", 5), ("tag in ('a', b)", 13), ("", 0)]
)
def test_a_mistake_in_a_condition_is_told_with_its_place(where: str, position: int) -> None:
    with pytest.raises(KafkaError, match=f"at position {position}") as caught:
        plan(image(), new(where=where))
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    assert "raftmq.view.where" in caught.value.message
    with pytest.raises(KafkaError, match="at position 0"):
        plan(image(), new(where=None))


def test_names_that_differ_in_dots_alone_collide() -> None:
    taken = {"re_funds": "re_funds"}
    with pytest.raises(KafkaError, match="collides with existing topic: re_funds"):
        plan_view(image(), taken, new("re.funds"), FRESH, SETTINGS)


def test_views_of_one_request_count_too() -> None:
    """One is there."""
    planned = [_view(f"v{n}", 30 + n) for n in range(VIEWS_OF_TOPIC_MAX - 1)]
    assert plan(image(), new(), *planned[:-1])
    with pytest.raises(KafkaError, match="orders has 16 views") as caught:
        plan(image(), new(), *planned)
    assert caught.value.code is ErrorCode.POLICY_VIOLATION


def test_below_its_level_no_view_is_made() -> None:
    with pytest.raises(KafkaError, match=r"needs raftmq\.level 8") as caught:
        plan(image(LEVEL_OF_DELAYS), new())
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION


def test_no_topic_gets_the_name_of_a_view() -> None:
    known = image()
    wanted = NewTopic(name="known", partitions=1, replication_factor=1)
    with pytest.raises(KafkaError, match="View 'known' already exists") as caught:
        plan_topic(known, {}, load_of(known), wanted, FRESH, SETTINGS)
    assert caught.value.code is ErrorCode.TOPIC_ALREADY_EXISTS


# ---- what becomes of the topic, and of what is done to a view ----


def altered(
    known: MetadataImage, kind: int, name: str, *rows: tuple[str, int, str]
) -> ConfigChange:
    operations = tuple(ConfigOperation(*row) for row in rows)
    resource = ConfigResource(resource_type=kind, resource_name=name, operations=operations)
    return plan_configs(known, resource, SETTINGS)


def test_a_topic_with_views_is_not_compacted() -> None:
    known = image()
    for row in (("cleanup.policy", 0, "compact"), ("cleanup.policy", 2, "compact")):
        with pytest.raises(KafkaError, match=r"orders has views, .*: known") as caught:
            altered(known, TOPIC_RESOURCE, "orders", row)
        assert caught.value.code is ErrorCode.INVALID_CONFIG
    assert altered(known, TOPIC_RESOURCE, "orders", ("retention.ms", 0, "5")).set
    free = evolve(known, views=known.views.delete("known"))
    assert altered(free, TOPIC_RESOURCE, "orders", ("cleanup.policy", 0, "compact")).set


@pytest.mark.parametrize("broker", ["", "1"])
def test_nor_by_the_default_of_all_topics(broker: str) -> None:
    known = image()
    row = ("log.cleanup.policy", 0, "compact")
    with pytest.raises(KafkaError, match="orders has views"):
        altered(known, BROKER_RESOURCE, broker, row)
    orders = known.topics["orders"]
    own = evolve(orders, configs=orders.configs.set("cleanup.policy", "delete"))
    known = evolve(known, topics=known.topics.set("orders", own))
    assert altered(known, BROKER_RESOURCE, broker, row).set
    compacted = Settings(NodeId(1), {"log.cleanup.policy": "compact"})
    operations = (ConfigOperation("cleanup.policy", 1, None),)
    resource = ConfigResource(
        resource_type=TOPIC_RESOURCE, resource_name="orders", operations=operations
    )
    with pytest.raises(KafkaError, match="orders has views"):
        plan_configs(known, resource, compacted)


@pytest.mark.parametrize("name", ["known", "orders.retired"])
def test_what_is_done_to_topics_is_not_done_to_views(name: str) -> None:
    known = image()
    load = load_of(known)
    told = f"{name} is a view of orders"
    with pytest.raises(KafkaError, match=told):
        plan_partitions(known, load, NewPartitions(name=name, count=9), SETTINGS)
    move = MoveRequest(topic=name, partition=0, replicas=(1,))
    with pytest.raises(KafkaError, match=told):
        plan_move(known, load, move, SETTINGS, allow_factor_change=True)
    with pytest.raises(KafkaError, match=told) as caught:
        altered(known, TOPIC_RESOURCE, name, ("retention.ms", 0, "5"))
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    wanted = ShrinkTopicCall(name=name, partitions=1)
    command, [verdict, *_] = plan_shrink(known, wanted, (FRESH, FRESH), {})
    assert command is None
    assert told in (verdict.message or "")


# ---- calls ----


@pytest.fixture
def cluster() -> MetadataCluster:
    cluster = _formed(3, first_levels=(FeatureUpdate(RAFTMQ_LEVEL, LEVEL_OF_CONDITIONS),))
    [made] = _create(cluster, NewTopic(name="orders", partitions=2, replication_factor=3))
    assert made.code is ErrorCode.NONE
    return cluster


def _create(cluster: MetadataCluster, *topics: NewTopic, **options: Any) -> tuple[Outcome, ...]:
    return _call(cluster, CreateTopicsCall(topics=topics, **options))


def _delete(cluster: MetadataCluster, *names: str, **fields: Any) -> tuple[Outcome, ...]:
    return _call(cluster, DeleteTopicsCall(names=names, **fields))


def _image(cluster: MetadataCluster) -> MetadataImage:
    return cluster.nodes[1].engine.image


def test_one_call_makes_topics_and_views(cluster: MetadataCluster) -> None:
    rows = _create(
        cluster,
        new("a"),
        NewTopic(name="b", partitions=1, replication_factor=1),
        new("c", where="tag ="),
        new("b"),
        new("d", of="b"),
    )
    assert [row.code for row in rows] == [
        ErrorCode.NONE,
        ErrorCode.NONE,
        ErrorCode.INVALID_CONFIG,
        ErrorCode.TOPIC_ALREADY_EXISTS,
        ErrorCode.INVALID_CONFIG,
    ]
    assert (rows[0].partitions, rows[0].replication_factor) == (2, 3)
    known = _image(cluster)
    assert sorted(known.topics) == ["b", "orders"]
    assert {name: view.topic_id for name, view in known.views.items()} == {"a": rows[0].topic_id}


def test_a_view_is_validated_only(cluster: MetadataCluster) -> None:
    [row] = _create(cluster, new(), validate_only=True)
    assert (row.code, row.partitions, row.topic_id) == (ErrorCode.NONE, 2, NO_ID)
    assert not _image(cluster).views


def test_views_are_deleted_by_name_and_by_id(cluster: MetadataCluster) -> None:
    rows = _create(cluster, new("a"), new("b"), new("c"))
    [row] = _delete(cluster, "a")
    assert (row.code, row.name) == (ErrorCode.NONE, "a")
    assert rows[1].topic_id is not None
    [row] = _delete(cluster, topic_ids=(rows[1].topic_id,))
    assert (row.code, row.name) == (ErrorCode.NONE, "b")
    assert sorted(_image(cluster).views) == ["c"]
    [row] = _delete(cluster, "a")
    assert row.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    both = _delete(cluster, "orders", "c")
    assert [row.code for row in both] == [ErrorCode.NONE, ErrorCode.NONE]
    assert not _image(cluster).views
    assert not _image(cluster).topics


def test_the_view_over_what_is_retired_goes_by_itself_alone(cluster: MetadataCluster) -> None:
    shrink = ShrinkTopicCall(name="orders", partitions=1)
    assert _call(cluster, shrink)[0].code is ErrorCode.NONE
    [row] = _delete(cluster, "orders.retired")
    assert row.code is ErrorCode.INVALID_REQUEST
    assert "what orders has retired" in (row.message or "")
