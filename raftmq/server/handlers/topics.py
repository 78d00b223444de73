"""CreateTopics, DeleteTopics, CreatePartitions: forwarded to the controller, from any broker.

Which error a topic gets is the controller's matter; here only what it cannot see is judged: the
same name twice in one request. The controller answers when every live broker knows the change, or
at the request's timeout.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final
from uuid import UUID

from raftmq.cluster.broker_messages import (
    CreatePartitionsCall,
    CreateTopicsCall,
    DeleteTopicsCall,
    NewPartitions,
    NewTopic,
    Outcome,
)
from raftmq.errors import ErrorCode
from raftmq.promise import Promise
from raftmq.protocol import RequestHeader, Struct
from raftmq.server.broker import Broker
from raftmq.server.parked import then

_CONFIGS_FROM: Final = 5
_TOPIC_STRUCTS_FROM: Final = 6
_NULL_NAMES_FROM: Final = 6


def create_topics(broker: Broker, header: RequestHeader, request: Struct) -> Any:
    """Answer CreateTopics."""
    counts = Counter(topic.name for topic in request.topics)
    wanted = [topic for topic in request.topics if counts[topic.name] == 1]
    refused = [
        Outcome(name=name, code=ErrorCode.INVALID_REQUEST, message="named twice in one request")
        for name, count in counts.items()
        if count > 1
    ]
    call = CreateTopicsCall(
        topics=tuple(_new_topic(topic) for topic in wanted),
        timeout_ms=max(request.timeout, 0),
        validate_only=bool(request.validate_only),
    )

    def respond(outcomes: tuple[Outcome, ...]) -> dict[str, Any]:
        rows = [_created_row(broker, header.api_version, one) for one in (*outcomes, *refused)]
        return {"throttle_time": 0, "topics": rows}

    return then(_call(broker, call, [topic.name for topic in wanted]), respond)


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


def delete_topics(broker: Broker, header: RequestHeader, request: Struct) -> Any:
    """Answer DeleteTopics, by name or (v6+) by id."""
    version = header.api_version
    keys: list[str | UUID] = []
    if version >= _TOPIC_STRUCTS_FROM:
        for topic in request.topics:
            keys.append(topic.name if topic.name is not None else topic.topic_id or UUID(int=0))
    else:
        keys.extend(request.topic_names)
    # The controller answers names first, then ids.
    unique = sorted(dict.fromkeys(keys), key=lambda key: isinstance(key, UUID))
    call = DeleteTopicsCall(
        names=tuple(key for key in unique if isinstance(key, str)),
        topic_ids=tuple(key for key in unique if isinstance(key, UUID)),
        timeout_ms=max(request.timeout, 0),
    )

    def respond(outcomes: tuple[Outcome, ...]) -> dict[str, Any]:
        rows = []
        for key, outcome in zip(unique, outcomes, strict=True):
            name: str | None = key if isinstance(key, str) else outcome.name or None
            rows.append(
                {
                    "name": name if version >= _NULL_NAMES_FROM else name or "",
                    "topic_id": key if isinstance(key, UUID) else outcome.topic_id,
                    "error_code": outcome.code,
                    "error_message": outcome.message,
                }
            )
        return {"throttle_time": 0, "responses": rows}

    return then(_call(broker, call, [str(key) for key in unique]), respond)


def create_partitions(broker: Broker, _header: RequestHeader, request: Struct) -> Any:
    """Answer CreatePartitions."""
    counts = Counter(topic.name for topic in request.topics)
    wanted = [topic for topic in request.topics if counts[topic.name] == 1]
    refused = [
        Outcome(name=name, code=ErrorCode.INVALID_REQUEST, message="named twice in one request")
        for name, count in counts.items()
        if count > 1
    ]
    call = CreatePartitionsCall(
        topics=tuple(
            NewPartitions(
                name=topic.name,
                count=topic.count,
                assignments=None
                if topic.assignments is None
                else tuple(tuple(one.broker_ids) for one in topic.assignments),
            )
            for topic in wanted
        ),
        timeout_ms=max(request.timeout, 0),
        validate_only=bool(request.validate_only),
    )

    def respond(outcomes: tuple[Outcome, ...]) -> dict[str, Any]:
        return {
            "throttle_time": 0,
            "results": [
                {"name": one.name, "error_code": one.code, "error_message": one.message}
                for one in (*outcomes, *refused)
            ],
        }

    return then(_call(broker, call, [topic.name for topic in wanted]), respond)


def _call(broker: Broker, call: Any, names: list[str]) -> Promise[tuple[Outcome, ...]]:
    """The controller's outcomes; when it cannot be reached each topic gets that error."""
    if not names:
        return Promise.resolved(())
    promise: Promise[tuple[Outcome, ...]] = Promise()

    def settled(done: Promise[tuple[Outcome, ...]]) -> None:
        if done.error is None:
            promise.resolve(done.result())
        else:
            code, message = broker.explain(done.error)
            promise.resolve(tuple(Outcome(name=n, code=code, message=message) for n in names))

    broker.call_controller(call).when_done(settled)
    return promise
