"""Produce and Fetch where rights are asked for: guards as in `guards.py`, of the two APIs with ways
of their own through the dispatcher.

What a caller may not write or read is refused partition by partition, and the rest is served. A
reading asks anew at every look: a fetch of a session names no topics, and a parked one looks again
long after it was begun.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any
from uuid import UUID

from raftmq.errors import ErrorCode
from raftmq.metadata.config_keys import DEAD_TO, DELIVERS_TO
from raftmq.promise import Promise
from raftmq.protocol.fetch import FetchPartitionResponse, FetchRequest, FetchResponse
from raftmq.protocol.produce import (
    ProducePartitionResponse,
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
    ProduceTopicResponse,
)
from raftmq.records import producer_of
from raftmq.rights import Kind, Operation, Rights
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.fetch_sessions import Wanted
from raftmq.server.kafka.guards import NO_ID, NO_TOPIC, denied, rights_of
from raftmq.server.kafka.handlers import fetch, produce
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import Work, chain
from raftmq.types import METADATA_TOPIC, METADATA_TOPIC_ID, TopicId


def handle_produce(
    broker: Broker, context: RequestContext, request: ProduceRequest
) -> ProduceResponse | Promise[ProduceResponse] | Work[ProduceResponse]:
    """As `produce.handle`, of what the caller may write."""
    rights = rights_of(broker, context)
    own = request.transactional_id
    if own is not None and not rights.may(Operation.WRITE, Kind.TRANSACTIONAL_ID, own):
        denied(broker, context, rights, Operation.WRITE, Kind.TRANSACTIONAL_ID, own)
        refused = [_refused_topic(broker, topic, NO_ID) for topic in request.topics]
        return ProduceResponse(topics=refused)
    refused = []
    allowed: list[ProduceTopic] = []
    for topic in request.topics:
        code = _produce_refusal(broker, context, rights, topic)
        if code is ErrorCode.NONE:
            allowed.append(topic)
        else:
            refused.append(_refused_topic(broker, topic, code))
    if not refused:
        return produce.handle(broker, context, request)
    request.topics = allowed
    result = produce.handle(broker, context, request)
    if isinstance(result, Generator):
        return _with_refused_later(result, refused)
    return chain(result, lambda response: _with_refused(response, refused))


def _with_refused_later(
    work: Work[ProduceResponse], refused: list[ProduceTopicResponse]
) -> Work[ProduceResponse]:
    return _with_refused((yield from work), refused)


def _with_refused(
    response: ProduceResponse, refused: list[ProduceTopicResponse]
) -> ProduceResponse:
    response.topics.extend(refused)
    return response


def _refused_topic(broker: Broker, topic: ProduceTopic, code: ErrorCode) -> ProduceTopicResponse:
    for _ in topic.partitions:
        broker.metrics.api("produce").error(code)
    rows = [ProducePartitionResponse(part.index, code) for part in topic.partitions]
    return ProduceTopicResponse(topic.name, topic.topic_id, rows)


def _produce_refusal(
    broker: Broker, context: RequestContext, rights: Rights, topic: ProduceTopic
) -> ErrorCode:
    """Why records of a topic are not taken from a caller; NONE where they are."""
    code = _refusal(broker, context, rights, Operation.WRITE, topic.name, topic.topic_id)
    if code is ErrorCode.NONE:
        code = _target_refusal(broker, context, rights, topic)
    if code is ErrorCode.NONE:
        for part in topic.partitions:
            if part.records is not None and not _owns(broker, context, rights, part.records):
                return NO_ID
    return code


def _target_refusal(
    broker: Broker, context: RequestContext, rights: Rights, topic: ProduceTopic
) -> ErrorCode:
    """Who writes to a delay topic writes to those that it delivers in."""
    image = broker.image
    name = topic.name
    if name is None and topic.topic_id is not None:
        name = image.topic_names.get(TopicId(topic.topic_id))
    known = None if name is None else image.topics.get(name)
    for key in (DELIVERS_TO, DEAD_TO):
        target = "" if known is None else known.configs.get(key, "")
        if target and not rights.may(Operation.WRITE, Kind.TOPIC, target):
            denied(broker, context, rights, Operation.WRITE, Kind.TOPIC, target)
            return NO_TOPIC
    return ErrorCode.NONE


def _owns(broker: Broker, context: RequestContext, rights: Rights, records: memoryview) -> bool:
    """True unless a batch is written under the producer id of a transactional id that the caller
    has no right to: nobody writes as somebody else, within a transaction or without one."""
    producer_id = producer_of(records)
    if producer_id < 0:
        return True
    owner = broker.image.transactions.producers.get(producer_id)
    if owner is None or rights.may(Operation.WRITE, Kind.TRANSACTIONAL_ID, owner):
        return True
    denied(broker, context, rights, Operation.WRITE, Kind.TRANSACTIONAL_ID, owner)
    return False


def _refusal(
    broker: Broker,
    context: RequestContext,
    rights: Rights,
    operation: Operation,
    name: str | None,
    topic_id: UUID | None,
) -> ErrorCode:
    """Why a caller may not do that to a topic by its name or id; NONE where it may."""
    topic = name
    if topic is None and topic_id is not None:
        topic = broker.image.topic_names.get(TopicId(topic_id))
        if topic is None and (view := broker.views.find(None, topic_id)) is not None:
            topic = view.image.name
        if topic_id == METADATA_TOPIC_ID:
            topic = METADATA_TOPIC
        if topic is None:  # also where a replica of a deleted topic is still there
            return ErrorCode.UNKNOWN_TOPIC_ID
    if topic is not None:
        topic = broker.views.source_of(topic)
    if topic is None or rights.may(operation, Kind.TOPIC, topic):
        return ErrorCode.NONE
    denied(broker, context, rights, operation, Kind.TOPIC, topic)
    if name is None and not rights.may(Operation.DESCRIBE, Kind.TOPIC, topic):
        return ErrorCode.UNKNOWN_TOPIC_ID
    return NO_TOPIC


def handle_fetch(
    broker: Broker, context: RequestContext, request: FetchRequest
) -> FetchResponse | Promise[FetchResponse]:
    """As `fetch.handle`, of what the caller may read."""
    return fetch.handle(broker, context, request, GuardedReading)


class GuardedReading(fetch.Reading):
    """A reading that asks for the caller's rights at every look."""

    __slots__ = ("_context",)

    def __init__(self, broker: Broker, context: RequestContext, *rest: Any) -> None:
        super().__init__(broker, context, *rest)
        self._context = context

    def read_one(self, wanted: Wanted, left: int) -> FetchPartitionResponse:
        """Look at one partition, if its topic may be read."""
        broker, context = self._broker, self._context
        name, topic_id = fetch.named(wanted)
        rights = rights_of(broker, context)
        code = _refusal(broker, context, rights, Operation.READ, name, topic_id)
        if code is ErrorCode.NONE:
            return super().read_one(wanted, left)
        return self._refuse(wanted, code)
