"""AlterPartitionReassignments and ListPartitionReassignments (KIP-455).

The controller judges each partition by itself and answers once the accepted moves are committed and
every live broker knows of them. It begins them later, a few at a time; both are one thing to a
client, as in Kafka. It plans a call in one go, so a large request becomes several calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import MoveRequest, Outcome, PlanMovesCall
from raftmq.metadata.features import write_error
from raftmq.metadata.image import LEVEL_OF_MOVES, PartitionImage, TopicImage
from raftmq.promise import Promise
from raftmq.protocol import Struct
from raftmq.server.audit import Who
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import TURN_PARTITIONS, Work, all_of
from raftmq.types import TopicPartition

Answer: TypeAlias = dict[str, Any]
Outcomes: TypeAlias = tuple[Outcome, ...]
Wanted: TypeAlias = dict[TopicPartition, MoveRequest | None]
"""What is asked of each partition; None where it is named twice."""

MOVES_PER_CALL: Final = 100
"""A larger request is several calls of the controller, which plans each in one go; all nodes apply
its moves in one go, too, and each move costs as much as its topic has partitions."""
WAIT_MS_MAX: Final = 60_000
_FACTOR_FROM: Final = 1


def alter(broker: Broker, context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer AlterPartitionReassignments."""
    allows = context.api_version < _FACTOR_FROM or bool(request.allow_replication_factor_change)
    reason = write_error("AlterPartitionReassignments", LEVEL_OF_MOVES, broker.image)
    if reason:
        return _altered({}, allows, ErrorCode.UNSUPPORTED_VERSION, reason)
    wanted = yield from _wanted(request)
    moves = [move for move in wanted.values() if move is not None]
    promises: list[Outcomes | Promise[Outcomes]] = []
    errors: list[tuple[ErrorCode, str]] = []
    for start in range(0, len(moves), MOVES_PER_CALL):
        if start:
            yield None
        call = PlanMovesCall(
            moves=tuple(moves[start : start + MOVES_PER_CALL]),
            allow_factor_change=allows,
            timeout_ms=max(request.timeout, 0),
        )
        promises.append(_call(broker, context.who, call, errors))
    outcomes = yield from all_of(promises)
    if errors and len(errors) == len(promises):
        return _altered({}, allows, *errors[0])
    told = iter(outcome for part in outcomes for outcome in part)
    topics: dict[str, list[Answer]] = {}
    for count, (key, move) in enumerate(wanted.items(), 1):
        if count % TURN_PARTITIONS == 0:
            yield None
        code, message = ErrorCode.INVALID_REQUEST, "named twice in one request"
        if move is not None:
            outcome = next(told)
            code, message = outcome.code, outcome.message or ""
        topics.setdefault(key.topic, []).append(
            {
                "partition_index": key.partition,
                "error_code": code,
                "error_message": message or None,
            }
        )
    return _altered(topics, allows)


def _altered(
    topics: dict[str, list[Answer]],
    allows: bool,
    code: ErrorCode = ErrorCode.NONE,
    message: str | None = None,
) -> Answer:
    return {
        "throttle_time": 0,
        "allow_replication_factor_change": allows,
        "error_code": code,
        "error_message": message,
        "responses": [{"name": name, "partitions": rows} for name, rows in topics.items()],
    }


def _wanted(request: Struct) -> Work[Wanted]:
    wanted: Wanted = {}
    count = 0
    for topic in request.topics:
        for row in topic.partitions:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            key = TopicPartition(topic.name, row.partition_index)
            if key in wanted:
                wanted[key] = None
                continue
            wanted[key] = MoveRequest(
                topic=key.topic,
                partition=key.partition,
                replicas=None if row.replicas is None else tuple(row.replicas),
            )
    return wanted


def _call(
    broker: Broker, who: Who, call: PlanMovesCall, errors: list[tuple[ErrorCode, str]]
) -> Promise[Outcomes]:
    """The controller's outcomes; when it cannot be reached each partition gets that error, which
    is also added to `errors`."""

    def refused(code: ErrorCode, message: str) -> Outcomes:
        errors.append((code, message))
        return tuple(Outcome(name=m.topic, code=code, message=message) for m in call.moves)

    return broker.outcomes(call, who, refused)


def list_(broker: Broker, _context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer ListPartitionReassignments; what is not there, or does not move, is left out."""
    # A node that lags must not say that nothing moves: tools take throttles away then.
    barrier = broker.engine.read_barrier(timeout_ms=min(max(request.timeout, 1), WAIT_MS_MAX))
    if not barrier.is_done:
        yield barrier
    if barrier.error is not None:
        code, message = broker.explain(barrier.error)
        return {"throttle_time": 0, "error_code": code, "error_message": message, "topics": []}
    rows = yield from _moving(broker, (yield from _listed(broker, request)))
    return {"throttle_time": 0, "error_code": 0, "error_message": None, "topics": rows}


def _listed(
    broker: Broker, request: Struct
) -> Work[list[tuple[TopicImage, Sequence[PartitionImage]]]]:
    """What a request is about, as far as it is there; each partition once."""
    if request.topics is None:
        return [(topic, topic.held) for topic in broker.image.topics_by_id()]
    named: dict[str, dict[int, PartitionImage]] = {}
    topics = broker.image.topics
    count = 0
    for one in request.topics:
        topic = topics.get(one.name)
        for index in one.partition_indexes or (-1,):
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            known = None if topic is None else topic.partition(index)
            if known is not None:
                named.setdefault(one.name, {})[index] = known
    return [(topics[name], tuple(found.values())) for name, found in named.items()]


def _moving(
    broker: Broker, listed: list[tuple[TopicImage, Sequence[PartitionImage]]]
) -> Work[list[Answer]]:
    rows: list[Answer] = []
    count = 0
    for topic, partitions in listed:
        moving: list[Answer] = []
        for partition in partitions:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            move = broker.reassignment(topic.topic_id, partition)
            if move is not None:
                moving.append(
                    {
                        "partition_index": partition.index,
                        "replicas": list(move.replicas),
                        "adding_replicas": list(move.adding),
                        "removing_replicas": list(move.removing),
                    }
                )
        if moving:
            rows.append({"name": topic.name, "partitions": moving})
    return rows
