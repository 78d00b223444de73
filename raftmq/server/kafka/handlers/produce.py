"""Produce: append what arrived to each partition, answer when it is as safe as `acks` asks.

Nothing stands between the frame and the partition: records are views of the received buffer, which
the partition stamps and the log keeps.
"""

from __future__ import annotations

from typing import Any, Final

from raftmq.errors import ErrorCode
from raftmq.partition.ports import AppendResult
from raftmq.promise import Promise
from raftmq.protocol.produce import (
    ProducePartition,
    ProducePartitionResponse,
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
    ProduceTopicResponse,
    RecordError,
)
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import (
    TURN_PARTITIONS,
    Work,
    all_at_once,
    all_of,
    chain,
    gather,
    then,
    value_of,
)

SERVED_FROM: Final = 3
_LEADER_HINTS_FROM: Final = 10
APPENDS_PER_TURN: Final = 64
_ACKS: Final = (-1, 0, 1)
_MOVED: Final = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)


def handle(
    broker: Broker, context: RequestContext, request: ProduceRequest
) -> ProduceResponse | Promise[ProduceResponse] | Work[ProduceResponse]:
    """Append every partition's batch; in short turns where there are many."""
    version = context.api_version
    refusal = ErrorCode.NONE
    if version < SERVED_FROM:
        # Announced only because librdkafka needs it (KAFKA-18659); its records have an old format.
        refusal = ErrorCode.UNSUPPORTED_VERSION
    elif request.acks not in _ACKS:
        refusal = ErrorCode.INVALID_REQUIRED_ACKS
    elif request.transactional_id is not None and not broker.transactions.is_offered:
        refusal = ErrorCode.INVALID_TXN_STATE
    if refusal is not ErrorCode.NONE:
        refused = AppendResult(refusal)
        count = sum(len(topic.partitions) for topic in request.topics)
        if count + len(request.topics) > TURN_PARTITIONS:
            return _respond_slowly(broker, context, request, [refused] * count)
        return _respond(broker, context, request, [refused] * count)
    if len(request.topics) == 1 and len(request.topics[0].partitions) == 1:
        topic = request.topics[0]
        result = _append_one(broker, context, request, topic, topic.partitions[0])
        return chain(result, lambda value: _answer(broker, context, request, [value]))
    if sum(len(topic.partitions) for topic in request.topics) > TURN_PARTITIONS:
        return _in_turns(broker, context, request)
    with broker.batch():
        results = [
            _append_one(broker, context, request, topic, part)
            for topic in request.topics
            for part in topic.partitions
        ]
    return chain(
        gather(results, _as_they_are), lambda values: _answer(broker, context, request, values)
    )


def _in_turns(
    broker: Broker, context: RequestContext, request: ProduceRequest
) -> Work[ProduceResponse]:
    """As `handle`, in short turns: the appends of one turn are drained together."""
    results: list[AppendResult | Promise[AppendResult]] = []
    parts = [(topic, part) for topic in request.topics for part in topic.partitions]
    for start in range(0, len(parts), APPENDS_PER_TURN):
        if start:
            yield None
        with broker.batch():
            for topic, part in parts[start : start + APPENDS_PER_TURN]:
                results.append(_append_one(broker, context, request, topic, part))
    values = yield from all_of(results)
    moved = [
        (topic.name, topic.topic_id, part.index)
        for (topic, part), result in zip(parts, values, strict=True)
        if result.code in _MOVED
    ]
    if moved and request.acks and len(moved) <= TURN_PARTITIONS:
        waits = broker.next_leaders(moved, context.hold)
        if waits is not None:
            yield from value_of(waits)
    return (yield from _respond_slowly(broker, context, request, values))


def _as_they_are(values: list[AppendResult]) -> list[AppendResult]:
    return values


def _answer(
    broker: Broker, context: RequestContext, request: ProduceRequest, results: list[AppendResult]
) -> ProduceResponse | Promise[ProduceResponse]:
    """Answer; where this node no longer leads, once the new leader is known, or soon anyway."""
    for result in results:
        if result.code in _MOVED:
            break
    else:
        return _respond(broker, context, request, results)
    if request.acks == 0:
        return _respond(broker, context, request, results)  # it is not sent
    parts = [(topic, part.index) for topic in request.topics for part in topic.partitions]
    moved = [
        (topic.name, topic.topic_id, index)
        for (topic, index), result in zip(parts, results, strict=True)
        if result.code in _MOVED
    ]
    waits: Any = broker.next_leaders(moved, context.hold)
    if waits is None:
        return _respond(broker, context, request, results)
    return then(waits, lambda _: _respond(broker, context, request, results))


def _append_one(
    broker: Broker,
    context: RequestContext,
    request: ProduceRequest,
    topic: ProduceTopic,
    part: ProducePartition,
) -> AppendResult | Promise[AppendResult]:
    found = broker.find_partition(topic.name, topic.topic_id, part.index)
    if isinstance(found, ErrorCode):
        return AppendResult(found)
    image = broker.image
    if image.views and found.is_leader:
        broker.retired_writers.note(image, found.name, context)
    timeout_ms = max(request.timeout_ms, 0)
    return found.append(part.records, request.acks, timeout_ms, context.api_version)


def _respond(
    broker: Broker,
    context: RequestContext,
    request: ProduceRequest,
    results: list[AppendResult],
) -> ProduceResponse:
    return all_at_once(_respond_slowly(broker, context, request, results, is_short=True))


def _respond_slowly(
    broker: Broker,
    context: RequestContext,
    request: ProduceRequest,
    results: list[AppendResult],
    *,
    is_short: bool = False,
) -> Work[ProduceResponse]:
    position, version = 0, context.api_version
    response = ProduceResponse()
    hinted: list[int] = []
    for topic in request.topics:
        rows = []
        for part in topic.partitions:
            result = results[position]
            position += 1
            if position % TURN_PARTITIONS == 0 and not is_short:
                yield None
            if result.code:
                broker.metrics.api("produce").error(result.code)
            row = ProducePartitionResponse(
                part.index,
                result.code,
                result.base_offset,
                result.log_append_time_ms,
                result.log_start_offset,
                [RecordError(*record) for record in result.record_errors],
                result.message,
            )
            if result.code in _MOVED and version >= _LEADER_HINTS_FROM:
                # KIP-951: the client need not ask for metadata first.
                row.current_leader = broker.leader_hint(topic.name, topic.topic_id, part.index)
                hinted.append(row.current_leader.leader_id)
            rows.append(row)
        response.topics.append(ProduceTopicResponse(topic.name, topic.topic_id, rows))
    if hinted:
        response.node_endpoints = broker.endpoints(hinted, context.listener_name)
    return response
