"""What the controller accepts of AlterPartitionReassignments, with Kafka's codes."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from raftmq.controller.topic_validation import Settings, plan_move, planned_load_of
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import MoveRequest, NewTopic, Outcome, PlanMovesCall
from raftmq.metadata.commands import (
    CreateTopics,
    FeatureUpdate,
    NodeState,
    Origin,
    PlannedMove,
    ReassignPartition,
)
from raftmq.metadata.image import (
    LEVEL_OF_MOVES,
    RAFTMQ_LEVEL,
    MetadataImage,
    PartitionImage,
    ReplacementImage,
)
from raftmq.types import NodeId
from tests.controller.metadata_cluster import MetadataCluster
from tests.controller.test_controller import _call, _create
from tests.metadata.metadata_commands import Machine, creation, topic_id


def nodes(*ids: int) -> tuple[NodeId, ...]:
    return tuple(NodeId(node_id) for node_id in ids)


THREE = nodes(1, 2, 3)


def state(**fields: Any) -> MetadataImage:
    """Six brokers, a topic of two partitions on the first three, and what a move made of its first:
    broker 5 is new, 6 is being replaced by 4."""
    machine = Machine()
    machine.register_all(1, 2, 3, 4, 5, 6)
    machine.apply(CreateTopics(topics=(creation("t", 1, THREE, THREE),)))
    image = machine.image
    topic = image.topics["t"]
    first = evolve(topic.partitions[0], **fields)
    topic = evolve(topic, partitions=(first, *topic.partitions[1:]))
    new = evolve(image.brokers[NodeId(5)], state=NodeState.NEW)
    return evolve(
        image,
        topics=image.topics.set("t", topic),
        brokers=image.brokers.set(NodeId(5), new),
        replacements=image.replacements.set(NodeId(6), ReplacementImage(NodeId(6), NodeId(4))),
    )


def planned(
    image: MetadataImage,
    replicas: tuple[int, ...] | None,
    *,
    topic: str = "t",
    partition: int = 0,
    allow: bool = True,
    static: dict[str, str] | None = None,
    replicas_max: int = 100,
) -> PlannedMove | None:
    wanted = MoveRequest(topic=topic, partition=partition, replicas=replicas)
    settings = Settings(NodeId(1), static or {}, replicas_max=replicas_max)
    load = planned_load_of(image)
    return plan_move(image, load, wanted, settings, allow_factor_change=allow)


def refusal(image: MetadataImage, replicas: tuple[int, ...] | None, **options: Any) -> KafkaError:
    with pytest.raises(KafkaError) as caught:
        planned(image, replicas, **options)
    return caught.value


MOVING = {"replicas": nodes(2, 3, 4), "moving_from": THREE}
WAITING = {"planned": nodes(2, 3, 4)}

ACCEPTED: dict[str, tuple[dict[str, Any], tuple[int, ...] | None]] = {
    "elsewhere": ({}, (2, 3, 4)),
    "another order": ({}, (3, 2, 1)),
    "factor up": ({}, (1, 2, 3, 4)),
    "factor down": ({}, (1, 2)),
    "cancelled while it waits": (WAITING, None),
    "cancelled on the way": (MOVING, None),
    "changed while it waits": (WAITING, (1, 2, 4)),
    "back again by name": (MOVING, (1, 2, 3)),
    "back again before it begins": (WAITING, (1, 2, 3)),
    "changed on the way": (MOVING, (4, 2, 1)),
}


@pytest.mark.parametrize(("fields", "replicas"), ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_accepted(fields: dict[str, Any], replicas: tuple[int, ...] | None) -> None:
    image = state(**fields)
    partition: PartitionImage = image.topics["t"].partitions[0]
    move = planned(image, replicas)
    assert move == PlannedMove(
        topic_id=topic_id(1),
        partition=0,
        creation_epoch=partition.creation_epoch,
        replicas=nodes(*replicas or ()),
    )


@pytest.mark.parametrize(
    ("fields", "replicas"), [({}, THREE), (MOVING, (2, 3, 4)), (WAITING, (2, 3, 4))]
)
def test_what_is_so_already_needs_no_command(
    fields: dict[str, Any], replicas: tuple[int, ...]
) -> None:
    assert planned(state(**fields), replicas) is None


ASSIGNMENT = ErrorCode.INVALID_REPLICA_ASSIGNMENT
FACTOR = ErrorCode.INVALID_REPLICATION_FACTOR
UNKNOWN = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...] | None, ErrorCode, str]] = {
    "nothing to cancel": ({}, None, ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, "in progress"),
    "no such topic": ({"topic": "x"}, THREE, UNKNOWN, "a topic named x"),
    "no such partition": ({"partition": 2}, THREE, UNKNOWN, "partition t:2"),
    "a negative partition": ({"partition": -1}, None, UNKNOWN, "partition t:-1"),
    "nobody": ({}, (), ASSIGNMENT, "empty replica list"),
    "an unknown broker": ({}, (1, 2, 9), ASSIGNMENT, "broker 9, but no such"),
    "a negative broker": ({}, (1, 2, -1), ASSIGNMENT, "broker -1, but no such"),
    "a broker twice": ({}, (1, 2, 1), ASSIGNMENT, "broker 1 more than once"),
    "a new broker": ({}, (1, 2, 5), ASSIGNMENT, "`raftmq node add 5`"),
    "a broker that goes": ({}, (1, 2, 6), ASSIGNMENT, "is being replaced by broker 4"),
    "factor up where it must stay": ({"allow": False}, (1, 2, 3, 4), FACTOR, "from 3 to 4"),
    "factor down where it must stay": ({"allow": False}, (1,), FACTOR, "from 3 to 1"),
    "no room": ({"replicas_max": 0}, (2, 3, 4), ErrorCode.POLICY_VIOLATION, "Broker 4 would hold"),
}


@pytest.mark.parametrize(("options", "replicas", "code", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(
    options: dict[str, Any], replicas: tuple[int, ...] | None, code: ErrorCode, why: str
) -> None:
    error = refusal(state(), replicas, **options)
    assert error.code is code
    assert why in error.message


def test_the_factor_that_must_stay_is_that_of_before_the_move() -> None:
    image = state(replicas=nodes(1, 2, 3, 4), moving_from=THREE)
    assert planned(image, (2, 3, 4), allow=False) is not None
    error = refusal(image, (1, 2, 3, 5), allow=False)
    assert error.code is FACTOR


@pytest.mark.parametrize("where", ["topic", "default"])
def test_no_factor_below_the_replicas_that_must_be_in_sync(where: str) -> None:
    image, static = state(), {"min.insync.replicas": "2"}
    if where == "topic":
        topic = image.topics["t"]
        topic = evolve(topic, configs=topic.configs.set("min.insync.replicas", "2"))
        image, static = evolve(image, topics=image.topics.set("t", topic)), {}
    assert planned(image, (1, 4), static=static) is not None
    error = refusal(image, (1,), static=static)
    assert error.code is FACTOR
    assert "min.insync.replicas of topic t is 2" in error.message
    # Where it was below already, a move makes nothing worse.
    low = evolve(
        image.topics["t"], partitions=(evolve(image.topics["t"].partitions[0], replicas=nodes(1)),)
    )
    image = evolve(image, topics=image.topics.set("t", low))
    assert planned(image, (2,), static=static) is not None


def test_brokers_that_hold_it_may_keep_it() -> None:
    """A new or full broker that has it is no reason against another order or a way back."""
    image = state(replicas=nodes(1, 2, 5), moving_from=THREE)
    assert planned(image, (5, 1, 2), replicas_max=0) is not None
    assert planned(image, (3, 2, 1), replicas_max=0) is not None


def test_moves_of_one_call_count_together() -> None:
    image = state()
    load = planned_load_of(image)
    settings = Settings(NodeId(1), {}, replicas_max=1)
    for partition, is_last in ((0, False), (1, True)):
        wanted = MoveRequest(topic="t", partition=partition, replicas=(2, 3, 4))
        if is_last:
            with pytest.raises(KafkaError, match="would hold 2 partition replicas"):
                plan_move(image, load, wanted, settings, allow_factor_change=True)
        else:
            assert plan_move(image, load, wanted, settings, allow_factor_change=True)


def test_what_waits_counts_as_load() -> None:
    image = state(planned=nodes(2, 3, 4))
    assert planned_load_of(image).replicas[NodeId(4)] == 1
    assert planned_load_of(image).replicas[NodeId(1)] == 2, "it is there until it is gone"


# ---- through the controller ----


def _formed(level: int = LEVEL_OF_MOVES) -> MetadataCluster:
    levels = (FeatureUpdate(RAFTMQ_LEVEL, level),)
    cluster = MetadataCluster.formed(3, first_levels=levels)
    cluster.auto_lead = True
    _create(cluster, NewTopic(name="t", assignments=dict.fromkeys(range(3), (1, 2))))
    return cluster


def _alter(cluster: MetadataCluster, *rows: tuple[int, tuple[int, ...] | None]) -> list[Outcome]:
    moves = tuple(
        MoveRequest(topic="t", partition=partition, replicas=replicas)
        for partition, replicas in rows
    )
    return _call(cluster, PlanMovesCall(moves=moves, timeout_ms=5_000))


def _partitions(cluster: MetadataCluster, node_id: int) -> tuple[PartitionImage, ...]:
    return cluster.nodes[node_id].engine.image.topics["t"].partitions


def test_a_plan_is_committed_and_known_everywhere_when_it_is_answered() -> None:
    cluster = _formed()
    cluster.auto_lead = False  # no leader tells that a move is done
    outcomes = _alter(cluster, (0, (2, 3)), (1, (9,)), (2, None), (1, (3, 1)))
    assert [outcome.code for outcome in outcomes] == [
        ErrorCode.NONE,
        ASSIGNMENT,
        ErrorCode.NO_REASSIGNMENT_IN_PROGRESS,
        ErrorCode.NONE,
    ]
    for node_id in cluster.voters:
        wanted = [(p.planned or p.replicas) for p in _partitions(cluster, node_id)]
        assert wanted == [(2, 3), (3, 1), (1, 2)]
        assert _partitions(cluster, node_id)[0].origin is Origin.OPERATOR


def test_below_its_level_nothing_is_planned() -> None:
    cluster = _formed(LEVEL_OF_MOVES - 1)
    with pytest.raises(KafkaError, match=r"needs raftmq\.level 4, this cluster is at 3") as caught:
        _alter(cluster, (0, (2, 3)))
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION


def test_a_dry_run_plans_nothing() -> None:
    cluster = _formed()
    move = MoveRequest(topic="t", partition=0, replicas=(2, 3))
    [outcome] = _call(cluster, PlanMovesCall(moves=(move,), dry_run=True))
    assert outcome.code is ErrorCode.NONE
    first = _partitions(cluster, 1)[0]
    assert (first.planned, first.replicas) == ((), (1, 2))


def test_a_cancelled_move_is_back_exactly_where_it_was() -> None:
    cluster = _formed()
    cluster.auto_lead = False  # no leader tells of other voters than the first ones
    assert _alter(cluster, (0, (3, 2)))[0].code is ErrorCode.NONE
    first = _partitions(cluster, 1)[0]
    if first.planned:  # nobody has begun it
        command = ReassignPartition(
            topic_id=cluster.nodes[1].engine.image.topics["t"].topic_id,
            partition=0,
            replicas=first.planned,
            creation_epoch=first.creation_epoch,
            expected=first.replicas,
            origin=Origin.OPERATOR,
        )
        done = cluster.nodes[1].engine.propose(command)
        cluster.run(300)
        assert done.error is None
    first = _partitions(cluster, 1)[0]
    assert (first.replicas, first.moving_from, first.planned) == ((3, 2), (1, 2), ())
    assert _alter(cluster, (0, None))[0].code is ErrorCode.NONE
    first = _partitions(cluster, 1)[0]
    assert first.replicas == (1, 2)
    assert _alter(cluster, (0, None), (0, (3, 9)))[-1].code is ASSIGNMENT


def test_reports_of_leaders_do_not_hold_up_a_plan() -> None:
    """Many moves mean many reports, each of which is a newer state than the plan was made from."""
    cluster = _formed()
    asked = []
    node = cluster.nodes[1]
    propose = node.engine.propose

    def proposed(command: Any, **options: Any) -> Any:
        asked.append((type(command).__name__, options.get("expected_version", -1)))
        return propose(command, **options)

    node.engine.propose = proposed  # type: ignore[method-assign]
    _alter(cluster, (0, (2, 3)))
    assert ("PlanMoves", -1) in asked
