"""Moves by Kafka's protocol: what the controller is asked, and what clients see meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import MoveRequest, Outcome, PlanMovesCall
from raftmq.metadata.image import LEVEL_OF_MOVES, RAFTMQ_LEVEL, Reassignment, reassignment_of
from raftmq.promise import Promise
from raftmq.protocol import ApiKey, Struct
from raftmq.server.kafka.handlers.reassignments import MOVES_PER_CALL, WAIT_MS_MAX
from raftmq.types import LeaderEpoch, NodeId, TopicId
from tests.server.kafka.test_admin_handlers import decide
from tests.server.kafka.world import NODES, FakeSlot, World, broker_image

ALTER, LIST = ApiKey.ALTER_PARTITION_REASSIGNMENTS, ApiKey.LIST_PARTITION_REASSIGNMENTS


def nodes(*ids: int) -> tuple[NodeId, ...]:
    return tuple(NodeId(node_id) for node_id in ids)


@pytest.fixture
def world() -> World:
    world = World()
    image = world.engine.image
    world.engine.change(
        features=image.features.set(RAFTMQ_LEVEL, LEVEL_OF_MOVES),
        brokers=image.brokers.set(NodeId(4), broker_image(4)),
    )
    world.add_topic("t", 3)
    world.add_topic("u", 1)
    return world


def move(world: World, name: str, index: int, **fields: Any) -> None:
    """What a command made of a partition."""
    image = world.engine.image
    topic = image.topics[name]
    changed = [*topic.partitions]
    changed[index] = evolve(changed[index], **fields)
    world.engine.change(topics=image.topics.set(name, evolve(topic, partitions=tuple(changed))))


def alter(world: World, version: int = 1, **topics: dict[int, list[int] | None]) -> FakeSlot:
    return world.send(
        ALTER,
        version,
        timeout=700,
        topics=[
            {
                "name": name,
                "partitions": [
                    {"partition_index": index, "replicas": replicas}
                    for index, replicas in rows.items()
                ],
            }
            for name, rows in topics.items()
        ],
    )


def turns(world: World) -> None:
    """Long work, until nothing is left or it waits."""
    while world.broker.scheduler:
        world.bench.deadlines.expire(world.bench.clock.monotonic_ms())


def told(answer: Struct) -> dict[tuple[str, int], tuple[int, str | None]]:
    return {
        (topic.name, row.partition_index): (row.error_code, row.error_message)
        for topic in answer.responses
        for row in topic.partitions
    }


def moving(answer: Struct) -> dict[tuple[str, int], tuple[list[int], list[int], list[int]]]:
    return {
        (topic.name, row.partition_index): (
            row.replicas,
            row.adding_replicas,
            row.removing_replicas,
        )
        for topic in answer.topics
        for row in topic.partitions
    }


# ---- asking ----


@pytest.mark.parametrize("version", [0, 1])
def test_the_controller_judges_each_partition(world: World, version: int) -> None:
    slot = alter(world, version, t={0: [2, 3, 4], 7: [1], 1: None}, u={0: [9]})
    assert slot.pieces is None, "it waits for the controller"
    call = decide(
        world,
        Outcome(name="t"),
        Outcome(name="t", code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message="no such"),
        Outcome(name="t", code=ErrorCode.NO_REASSIGNMENT_IN_PROGRESS),
        Outcome(name="u", code=ErrorCode.INVALID_REPLICA_ASSIGNMENT, message="no broker 9"),
    )
    assert call == PlanMovesCall(
        moves=(
            MoveRequest(topic="t", partition=0, replicas=(2, 3, 4)),
            MoveRequest(topic="t", partition=7, replicas=(1,)),
            MoveRequest(topic="t", partition=1),
            MoveRequest(topic="u", partition=0, replicas=(9,)),
        ),
        timeout_ms=700,
    )
    answer = world.read(ALTER, version, slot)
    assert (answer.error_code, answer.error_message) == (0, None)
    assert told(answer) == {
        ("t", 0): (0, None),
        ("t", 7): (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such"),
        ("t", 1): (ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, None),
        ("u", 0): (ErrorCode.INVALID_REPLICA_ASSIGNMENT, "no broker 9"),
    }


def test_a_factor_that_must_stay(world: World) -> None:
    topics = [{"name": "t", "partitions": [{"partition_index": 0, "replicas": [1]}]}]
    slot = world.send(ALTER, 1, topics=topics, allow_replication_factor_change=False, timeout=-1)
    code = ErrorCode.INVALID_REPLICATION_FACTOR
    call = decide(world, Outcome(name="t", code=code))
    assert (call.allow_factor_change, call.timeout_ms) == (False, 0)
    answer = world.read(ALTER, 1, slot)
    assert not answer.allow_replication_factor_change
    assert told(answer) == {("t", 0): (code, None)}


def test_nothing_asked_is_nothing_done(world: World) -> None:
    answer = world.read(ALTER, 1, alter(world))
    assert (answer.error_code, answer.responses) == (0, [])
    assert world.controller.calls == []


def test_a_partition_that_is_named_twice_is_refused(world: World) -> None:
    rows = [{"partition_index": index, "replicas": None} for index in (0, 1, 0, 0)]
    slot = world.send(ALTER, 1, topics=[{"name": "t", "partitions": rows}], timeout=1)
    call = decide(world, Outcome(name="t"))
    assert [one.partition for one in call.moves] == [1]
    assert told(world.read(ALTER, 1, slot)) == {
        ("t", 0): (ErrorCode.INVALID_REQUEST, "named twice in one request"),
        ("t", 1): (0, None),
    }


def test_a_controller_that_cannot_be_reached_is_an_error_of_the_whole(world: World) -> None:
    slot = alter(world, t={0: [2, 3, 4]})
    ((_, promise),) = world.controller.calls
    promise.fail(KafkaError("no controller", code=ErrorCode.REQUEST_TIMED_OUT))
    answer = world.read(ALTER, 1, slot)
    assert (answer.error_code, answer.error_message) == (
        ErrorCode.REQUEST_TIMED_OUT,
        "no controller",
    )
    assert answer.responses == []


def test_a_large_request_is_several_calls_and_one_may_fail(world: World) -> None:
    slot = alter(world, t=dict.fromkeys(range(MOVES_PER_CALL + 2)))
    turns(world)
    first, second = world.controller.calls
    assert (len(first[0].moves), len(second[0].moves)) == (MOVES_PER_CALL, 2)
    first[1].resolve(tuple(Outcome(name="t") for _ in range(MOVES_PER_CALL)))
    second[1].fail(KafkaError("gone", code=ErrorCode.NOT_CONTROLLER))
    turns(world)
    answer = world.read(ALTER, 1, slot)
    assert answer.error_code == 0
    codes = [code for code, _ in told(answer).values()]
    assert codes == [0] * MOVES_PER_CALL + [ErrorCode.NOT_CONTROLLER] * 2


def test_a_cluster_below_the_level_says_what_it_needs(world: World) -> None:
    features = world.engine.image.features.set(RAFTMQ_LEVEL, LEVEL_OF_MOVES - 1)
    world.engine.change(features=features)
    answer = world.read(ALTER, 1, alter(world, t={0: [2, 3, 4]}))
    assert answer.error_code == ErrorCode.UNSUPPORTED_VERSION
    assert "--raise raftmq.level=4" in answer.error_message
    assert world.controller.calls == []
    assert moving(world.ask(LIST, 0, topics=None, timeout=1)) == {}


# ---- what is told of moves ----

THREE = nodes(1, 2, 3)

SHOWN: dict[str, tuple[dict[str, tuple[NodeId, ...]], tuple[NodeId, ...], Reassignment | None]] = {
    "at rest": ({}, THREE, None),
    "planned": (
        {"planned": nodes(2, 3, 4)},
        THREE,
        Reassignment(nodes(2, 3, 4, 1), nodes(4), nodes(1)),
    ),
    "under way": (
        {"replicas": nodes(4, 3, 2), "moving_from": THREE},
        THREE,
        Reassignment(nodes(4, 3, 2, 1), nodes(4), nodes(1)),
    ),
    "all three": (
        {"replicas": nodes(6, 5, 4), "moving_from": THREE},
        nodes(1, 2, 3, 4),
        Reassignment(nodes(6, 5, 4, 1, 2, 3), nodes(4, 5, 6), THREE),
    ),
    "done but for the report": (
        {"replicas": nodes(2, 3, 4), "moving_from": THREE},
        nodes(2, 3, 4),
        Reassignment(nodes(2, 3, 4), nodes(4), ()),
    ),
    "nothing goes, one learns": (
        {"replicas": nodes(2, 3, 4), "moving_from": THREE},
        nodes(2, 3),
        Reassignment(nodes(2, 3, 4), nodes(4), ()),
    ),
    "factor up": (
        {"planned": nodes(1, 2, 3, 4)},
        THREE,
        Reassignment(nodes(1, 2, 3, 4), nodes(4), ()),
    ),
    "factor down": (
        {"replicas": nodes(1), "moving_from": THREE},
        nodes(1, 3),
        Reassignment(nodes(1, 3), (), nodes(3)),
    ),
    "factor down, done but for the report": (
        {"replicas": nodes(1), "moving_from": THREE},
        nodes(1),
        Reassignment(nodes(1), (), ()),
    ),
    "another order": ({"planned": nodes(3, 2, 1)}, THREE, None),
    "changed on the way, the first one votes": (
        {"replicas": nodes(2, 3, 4), "moving_from": THREE, "planned": nodes(2, 3, 5)},
        nodes(1, 2, 3, 4),
        Reassignment(nodes(2, 3, 5, 1, 4), nodes(5), nodes(1, 4)),
    ),
    "changed on the way, the first one learns": (
        {"replicas": nodes(2, 3, 4), "moving_from": THREE, "planned": nodes(2, 3, 5)},
        THREE,
        Reassignment(nodes(2, 3, 5, 1), nodes(5), nodes(1)),
    ),
    "to be brought back before anything was done": (
        {"replicas": nodes(2, 3, 4), "moving_from": THREE, "planned": THREE},
        THREE,
        Reassignment(THREE, (), ()),
    ),
    "to be brought back": (
        {"replicas": nodes(2, 3, 4), "moving_from": THREE, "planned": THREE},
        nodes(1, 2, 3, 4),
        Reassignment(nodes(1, 2, 3, 4), (), nodes(4)),
    ),
}


@pytest.mark.parametrize(("fields", "voters", "wanted"), SHOWN.values(), ids=SHOWN)
def test_what_is_shown_of_a_move(
    world: World,
    fields: dict[str, tuple[NodeId, ...]],
    voters: tuple[NodeId, ...],
    wanted: Reassignment | None,
) -> None:
    """As `kafka-topics` counts: a partition has too few in-sync replicas where these are fewer than
    its replicas without those that come."""
    partition = evolve(world.engine.image.topics["t"].partitions[0], **fields)
    shown = reassignment_of(partition, voters)
    assert shown == wanted
    if shown is not None:
        assert len(shown.replicas) - len(shown.adding) <= len(voters)


def led(world: World, name: str, index: int, *voters: int) -> None:
    topic_id = TopicId(world.engine.image.topics[name].topic_id)
    world.leaders.led(
        topic_id,
        index,
        leader=NodeId(voters[0]),
        leader_epoch=LeaderEpoch(6),
        isr=nodes(*voters),
        voters=nodes(*voters),
    )


def test_moves_are_listed_as_the_leaders_last_named_their_voters(world: World) -> None:
    move(world, "t", 1, planned=nodes(2, 3, 4))
    move(world, "t", 2, planned=nodes(3, 2, 1))
    move(world, "u", 0, replicas=nodes(2, 3, 4), moving_from=THREE)
    both = {("t", 1): ([2, 3, 4, 1], [4], [1]), ("u", 0): ([2, 3, 4, 1], [4], [1])}
    assert moving(world.ask(LIST, 0, topics=None, timeout=1)) == both
    led(world, "u", 0, 2, 3)
    both["u", 0] = ([2, 3, 4], [4], [])
    assert moving(world.ask(LIST, 0, topics=None, timeout=1)) == both
    some = [
        {"name": "t", "partition_indexes": [2, 1, 0, 1, -1, 9]},
        {"name": "x", "partition_indexes": [0]},
    ]
    answer = world.ask(LIST, 0, topics=some, timeout=1)
    assert moving(answer) == {("t", 1): both["t", 1]}
    assert len(answer.topics[0].partitions) == 1
    assert moving(world.ask(LIST, 0, topics=[], timeout=1)) == {}


def test_a_node_that_lags_does_not_say_that_nothing_moves(world: World) -> None:
    barrier: Promise[None] = Promise()
    asked = []

    def read_barrier(**options: Any) -> Promise[None]:
        asked.append(options)
        return barrier

    world.engine.read_barrier = read_barrier  # type: ignore[method-assign]
    slot = world.send(LIST, 0, topics=None, timeout=900)
    assert slot.pieces is None
    assert asked == [{"timeout_ms": 900}]
    move(world, "t", 1, planned=nodes(2, 3, 4))
    barrier.resolve(None)
    assert list(moving(world.read(LIST, 0, slot))) == [("t", 1)]
    for timeout, bound in ((-1, 1), (1 << 30, WAIT_MS_MAX)):
        world.ask(LIST, 0, topics=None, timeout=timeout)
        assert asked[-1] == {"timeout_ms": bound}


def test_a_node_without_a_controller_says_so(world: World) -> None:
    barrier: Promise[None] = Promise()
    barrier.fail(KafkaError("nobody leads", code=ErrorCode.REQUEST_TIMED_OUT))
    world.engine.read_barrier = lambda **_: barrier  # type: ignore[method-assign]
    answer = world.ask(LIST, 0, topics=None, timeout=900)
    assert (answer.error_code, answer.error_message, answer.topics) == (
        ErrorCode.REQUEST_TIMED_OUT,
        "nobody leads",
        [],
    )


def test_metadata_shows_the_target_and_what_goes(world: World) -> None:
    move(world, "t", 0, replicas=nodes(4, 2, 3), moving_from=THREE)
    led(world, "t", 0, 1, 2, 3)
    metadata = world.ask(ApiKey.METADATA, 12, topics=[{"name": "t"}])
    described = world.ask(
        ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[{"name": "t"}], response_partition_limit=9
    )
    for answer in (metadata, described):
        rows = answer.topics[0].partitions
        assert rows[0].replica_nodes == [4, 2, 3, 1]
        assert rows[0].isr_nodes == [1, 2, 3]
        assert rows[0].leader_id == 1
        assert rows[1].replica_nodes == list(NODES)
    led(world, "t", 0, 4, 2, 3)
    answer = world.ask(ApiKey.METADATA, 12, topics=[{"name": "t"}])
    assert answer.topics[0].partitions[0].replica_nodes == [4, 2, 3]
