"""CreateTopics, DeleteTopics, CreatePartitions: forwarded to the controller, from any broker.

The controller decides which error a topic gets; only what it cannot see is judged here: the same
name twice in one request. It answers when every live broker knows the change, or at the request's
timeout. It plans a call in one go, so a large request becomes several calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, TypeVar
from uuid import UUID

from raftmq.controller.controller import PARTITIONS_PER_CALL_MAX, TOPICS_PER_CALL_MAX
from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import (
    CreatePartitionsCall,
    CreateTopicsCall,
    DeleteTopicsCall,
    NewPartitions,
    NewTopic,
    Outcome,
)
from raftmq.promise import Promise
from raftmq.protocol import Struct
from raftmq.server.audit import Who
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import TURN_PARTITIONS, Work, all_of, in_turns

Answer: TypeAlias = dict[str, Any]
Outcomes: TypeAlias = tuple[Outcome, ...]
T = TypeVar("T")

TOPICS_PER_PART: Final = 100
PARTITIONS_PER_PART: Final = 1_000
"""A larger request is several calls of the controller, which plans each in one go."""
ROWS: Final = 16
"""Rows encoded in one turn: that of a created topic has all its configs."""
_CONFIGS_FROM: Final = 5
_TOPIC_STRUCTS_FROM: Final = 6
_NULL_NAMES_FROM: Final = 6


def create_topics(broker: Broker, context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer CreateTopics."""
    wanted, refused = _each_once(request.topics)
    refused += [
        Outcome(name=topic.name, code=ErrorCode.POLICY_VIOLATION, message="too many topics")
        for topic in wanted[TOPICS_PER_CALL_MAX:]
    ]
    calls: list[tuple[CreateTopicsCall, list[str]]] = []
    topics: list[NewTopic] = []
    count = left = 0
    for topic in wanted[:TOPICS_PER_CALL_MAX]:
        new = _new_topic(topic)
        weight = max(1, new.partitions, len(new.assignments))
        # A topic that is too large by itself is refused by the controller, in Kafka's words.
        if weight <= PARTITIONS_PER_CALL_MAX:
            left += weight
        if left > PARTITIONS_PER_CALL_MAX:
            left -= weight
            message = "Excessively large number of partitions per request."
            refused.append(Outcome(name=new.name, code=ErrorCode.POLICY_VIOLATION, message=message))
            continue
        if topics and (len(topics) >= TOPICS_PER_PART or count + weight > PARTITIONS_PER_PART):
            calls.append(_create_call(topics, request))
            topics, count = [], 0
        topics.append(new)
        count += weight
        if weight > TURN_PARTITIONS:
            yield None
    calls.append(_create_call(topics, request))
    outcomes = yield from _call_each(broker, context.who, calls)
    rows = yield from in_turns(
        (*outcomes, *refused), lambda one: _created_row(broker, context.api_version, one), ROWS
    )
    return {"throttle_time": 0, "topics": rows}


def _each_once(topics: Sequence[Struct]) -> tuple[list[Struct], list[Outcome]]:
    """The topics that are named once, and refusals of those that are named more often."""
    counts = Counter(topic.name for topic in topics)
    wanted = [topic for topic in topics if counts[topic.name] == 1]
    refused = [
        Outcome(name=name, code=ErrorCode.INVALID_REQUEST, message="named twice in one request")
        for name, count in counts.items()
        if count > 1
    ]
    return wanted, refused


def _create_call(topics: list[NewTopic], request: Struct) -> tuple[CreateTopicsCall, list[str]]:
    call = CreateTopicsCall(
        topics=tuple(topics),
        timeout_ms=max(request.timeout, 0),
        validate_only=bool(request.validate_only),
    )
    return call, [topic.name for topic in topics]


def _new_topic(topic: Struct) -> NewTopic:
    return NewTopic(
        name=topic.name,
        partitions=topic.num_partitions,
        replication_factor=topic.replication_factor,
        assignments={one.partition_index: tuple(one.broker_ids) for one in topic.assignments or ()},
        configs={one.name: one.value for one in topic.configs or ()},
    )


def _created_row(broker: Broker, version: int, outcome: Outcome) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": outcome.name,
        "topic_id": outcome.topic_id,
        "error_code": outcome.code,
        "error_message": outcome.message,
        "topic_config_error_code": 0,
        "num_partitions": outcome.partitions,
        "replication_factor": outcome.replication_factor,
        "configs": None,
    }
    if version >= _CONFIGS_FROM and outcome.code is ErrorCode.NONE:
        row["configs"] = broker.created_topic_configs(outcome.name)
    return row


def delete_topics(broker: Broker, context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer DeleteTopics, by name or (v6+) by id."""
    version = context.api_version
    keys: list[str | UUID] = []
    if version >= _TOPIC_STRUCTS_FROM:
        for topic in request.topics:
            keys.append(topic.name if topic.name is not None else topic.topic_id or UUID(int=0))
    else:
        keys.extend(request.topic_names)
    # The controller answers names first, then ids.
    unique = sorted(dict.fromkeys(keys), key=lambda key: isinstance(key, UUID))
    calls = []
    for some in _parts(unique):
        call = DeleteTopicsCall(
            names=tuple(key for key in some if isinstance(key, str)),
            topic_ids=tuple(key for key in some if isinstance(key, UUID)),
            timeout_ms=max(request.timeout, 0),
        )
        calls.append((call, [str(key) for key in some]))

    def row(one: tuple[str | UUID, Outcome]) -> dict[str, Any]:
        key, outcome = one
        name: str | None = key if isinstance(key, str) else outcome.name or None
        return {
            "name": name if version >= _NULL_NAMES_FROM else name or "",
            "topic_id": key if isinstance(key, UUID) else outcome.topic_id,
            "error_code": outcome.code,
            "error_message": outcome.message,
        }

    outcomes = yield from _call_each(broker, context.who, calls)
    rows = yield from in_turns(zip(unique, outcomes, strict=True), row)
    return {"throttle_time": 0, "responses": rows}


def create_partitions(broker: Broker, context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer CreatePartitions."""
    wanted, refused = _each_once(request.topics)
    calls = []
    for count, some in enumerate(_parts(wanted)):
        if count:
            yield None
        call = CreatePartitionsCall(
            topics=tuple(_new_partitions(topic) for topic in some),
            timeout_ms=max(request.timeout, 0),
            validate_only=bool(request.validate_only),
        )
        calls.append((call, [topic.name for topic in some]))
    outcomes = yield from _call_each(broker, context.who, calls)
    rows = yield from in_turns(
        (*outcomes, *refused),
        lambda one: {"name": one.name, "error_code": one.code, "error_message": one.message},
    )
    return {"throttle_time": 0, "results": rows}


def _new_partitions(topic: Struct) -> NewPartitions:
    return NewPartitions(
        name=topic.name,
        count=topic.count,
        assignments=None
        if topic.assignments is None
        else tuple(tuple(one.broker_ids) for one in topic.assignments),
    )


def _parts(items: list[T]) -> list[list[T]]:
    """The items, so many in a call."""
    return [
        items[start : start + TOPICS_PER_PART] for start in range(0, len(items), TOPICS_PER_PART)
    ]


def _call_each(
    broker: Broker, who: Who, calls: Sequence[tuple[Any, list[str]]]
) -> Work[list[Outcome]]:
    """The outcomes of all calls, each made in a turn of its own: the controller may be here."""
    promises: list[Outcomes | Promise[Outcomes]] = []
    for count, (call, names) in enumerate(calls):
        if count:
            yield None
        promises.append(_call(broker, who, call, names))
    parts = yield from all_of(promises)
    return [outcome for part in parts for outcome in part]


def _call(broker: Broker, who: Who, call: Any, names: list[str]) -> Promise[tuple[Outcome, ...]]:
    """The controller's outcomes; when it cannot be reached each topic gets that error."""
    if not names:
        return Promise.resolved(())
    return broker.outcomes(
        call,
        who,
        lambda code, message: tuple(Outcome(name=n, code=code, message=message) for n in names),
    )
