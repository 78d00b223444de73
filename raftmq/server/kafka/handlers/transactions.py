"""Producers and transactions: from the wire's versions to the coordinator's values and back
(KIP-98, KIP-890).

Owns what differs between versions of a request and the error codes that each of them knows; decides
nothing. Without a transactional id InitProducerId gives a fresh id of the broker's block; with one
the metadata group says who the producer is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import re2

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import CommittedOffset, OffsetsTransaction
from raftmq.metadata.transactions import Transaction, TransactionState
from raftmq.partition.partition import Partition
from raftmq.partition.transactions import WHATEVER_SEQ, Decided
from raftmq.promise import Promise
from raftmq.protocol import ApiKey, Struct
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.handlers.groups import per_partition
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import TURN_PARTITIONS, Work, all_of, in_turns, then, value_of
from raftmq.transactions.coordinator import Filters, ProducerResult
from raftmq.types import ProducerId, TopicId

WAITING_MAX: Final = 10_000
NO_TIMESTAMP: Final = -1
_NAMES_PRODUCER_FROM: Final = 3  # InitProducerId (KIP-360)
_INIT_FENCED_FROM: Final = 4  # InitProducerId (KIP-588)
_FENCED_FROM: Final = 2  # AddPartitionsToTxn, AddOffsetsToTxn, EndTxn (KIP-588)
_BATCHED_FROM: Final = 4  # AddPartitionsToTxn: of brokers (KIP-890)
_SECOND_PROTOCOL_FROM: Final = 5  # EndTxn, TxnOffsetCommit (KIP-890)
_MEMBER_NAMED_FROM: Final = 3  # TxnOffsetCommit (KIP-447)
_LEADER_EPOCH_FROM: Final = 2  # TxnOffsetCommit
_LOADING_FROM: Final = 2  # TxnOffsetCommit
_ABORTABLE_FROM: Final = 4  # TxnOffsetCommit (KIP-890)
_DURATION_FROM: Final = 1  # ListTransactions (KIP-994)
_PATTERN_FROM: Final = 2  # ListTransactions (KIP-1152)
_QUIET: Final = re2.Options()
_QUIET.log_errors = False
_QUIET.max_mem = 1 << 20
_NOT_OFFERED: Final = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
"""The one code at which every client gives up."""


def fenced_code(code: ErrorCode, version: int, fenced_from: int = _FENCED_FROM) -> ErrorCode:
    """A code as older versions of a request know it."""
    if code is ErrorCode.PRODUCER_FENCED and version < fenced_from:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return code


# ---- AddPartitionsToTxn ----


def add_partitions(broker: Broker, context: RequestContext, request: Struct) -> Work[Struct]:
    """Answer AddPartitionsToTxn: of a client, or (from v4 on) of a broker for many of them."""
    version = context.api_version
    if version < _BATCHED_FROM:
        codes = yield from _added(
            broker,
            version,
            request.v3_and_below_transactional_id,
            request.v3_and_below_producer_id,
            request.v3_and_below_producer_epoch,
            request.v3_and_below_topics,
        )
        rows = yield from _partition_rows(request.v3_and_below_topics, codes)
        return Struct(results_by_topic_v3_and_below=rows)
    results = []
    is_current = True
    if any(one.verify_only for one in request.transactions):
        is_current = yield from value_of(broker.transactions.catch_up())
    for one in request.transactions:
        if one.verify_only:
            codes = yield from _verified(broker, one, is_current=is_current)
        else:
            codes = yield from _added(
                broker,
                version,
                one.transactional_id,
                one.producer_id,
                one.producer_epoch,
                one.topics,
            )
        rows = yield from _partition_rows(one.topics, codes)
        results.append(Struct(transactional_id=one.transactional_id, topic_results=rows))
    return Struct(error_code=int(ErrorCode.NONE), results_by_transaction=results)


def _added(
    broker: Broker,
    version: int,
    transactional_id: str,
    producer_id: int,
    epoch: int,
    topics: Sequence[Struct],
) -> Work[dict[tuple[str, int], ErrorCode]]:
    """Add partitions, all of them or none; the code of each."""
    image = broker.image
    codes: dict[tuple[str, int], ErrorCode] = {}
    partitions: dict[TopicId, list[int]] = {}
    count = 0
    for topic in topics:
        known = image.topics.get(topic.name)
        is_view = known is None and broker.views.find(topic.name, None) is not None
        for index in topic.partitions:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            if is_view:  # which clients would wait for, were it unknown
                codes[topic.name, index] = ErrorCode.INVALID_TOPIC_EXCEPTION
                continue
            partition = None if known is None else known.partition(index)
            if known is None or partition is None or not partition.takes_records:
                codes[topic.name, index] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            elif (topic.name, index) not in codes:
                codes[topic.name, index] = ErrorCode.NONE
                partitions.setdefault(known.topic_id, []).append(index)
    if not broker.transactions.is_offered:
        return dict.fromkeys(codes, _NOT_OFFERED)
    if any(codes.values()):
        return {at: code or ErrorCode.OPERATION_NOT_ATTEMPTED for at, code in codes.items()}
    protocol = 1 if version < _BATCHED_FROM else 2
    code = yield from value_of(
        broker.transactions.add_partitions(
            transactional_id, producer_id, epoch, protocol=protocol, partitions=partitions
        )
    )
    return dict.fromkeys(codes, fenced_code(code, version))


def _verified(
    broker: Broker, one: Struct, *, is_current: bool
) -> Work[dict[tuple[str, int], ErrorCode]]:
    codes: dict[tuple[str, int], ErrorCode] = {}
    for topic in one.topics:
        known = broker.image.topics.get(topic.name)
        for index in topic.partitions:
            if len(codes) % TURN_PARTITIONS == 0:
                yield None
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            if not is_current:
                code = ErrorCode.COORDINATOR_NOT_AVAILABLE
            elif known is not None:
                code = broker.transactions.verify(
                    one.transactional_id,
                    one.producer_id,
                    one.producer_epoch,
                    known.topic_id,
                    index,
                )
            codes[topic.name, index] = code
    return codes


def _partition_rows(
    topics: Sequence[Struct], codes: Mapping[tuple[str, int], ErrorCode]
) -> Work[list[Struct]]:
    rows = []
    count = 0
    for topic in topics:
        partitions = []
        for index in topic.partitions:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            code = int(codes[topic.name, index])
            partitions.append(Struct(partition_index=index, partition_error_code=code))
        rows.append(Struct(name=topic.name, results_by_partition=partitions))
    return rows


# ---- offsets ----


def add_offsets(broker: Broker, context: RequestContext, request: Struct) -> Work[Struct]:
    """Answer AddOffsetsToTxn."""
    if not broker.transactions.is_offered:
        return Struct(error_code=int(_NOT_OFFERED))
    if not request.group_id:
        return Struct(error_code=int(ErrorCode.INVALID_GROUP_ID))
    code = yield from value_of(
        broker.transactions.add_partitions(
            request.transactional_id,
            request.producer_id,
            request.producer_epoch,
            protocol=1,
            groups=[request.group_id],
        )
    )
    return Struct(error_code=int(fenced_code(code, context.api_version)))


def txn_offset_commit(broker: Broker, context: RequestContext, request: Struct) -> Work[Struct]:
    """Answer TxnOffsetCommit when the offsets are pending; unknown partitions are left out."""
    version = context.api_version
    protocol = 2 if version >= _SECOND_PROTOCOL_FROM else 1
    image = broker.image
    known: dict[tuple[str, int], tuple[CommittedOffset, TopicId]] = {}
    passed_over: dict[tuple[str, int], ErrorCode] = {}
    count = 0
    for topic in request.topics:
        view = broker.views.find(topic.name, None)
        found = image.topics.get(topic.name) if view is None else view.topic
        name = topic.name if view is None else view.source_name
        kept_in = image.committed_id(name)
        for partition in topic.partitions:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            index = partition.partition_index
            if view is not None and view.ignores_commits(index):
                passed_over[topic.name, index] = ErrorCode.NONE
                continue
            if found is None or kept_in is None or found.partition(index) is None:
                continue
            has_epoch = version >= _LEADER_EPOCH_FROM
            entry = CommittedOffset(
                topic=name,
                partition=index,
                offset=partition.committed_offset,
                leader_epoch=partition.committed_leader_epoch if has_epoch else -1,
                metadata=partition.committed_metadata or "",
            )
            known[topic.name, index] = entry, kept_in
    codes = dict.fromkeys(known, _NOT_OFFERED)
    if broker.transactions.is_offered:
        codes = yield from _commit(broker, version, protocol, request, known)
    return Struct(topics=(yield from per_partition(request.topics, {**passed_over, **codes})))


def _commit(
    broker: Broker,
    version: int,
    protocol: int,
    request: Struct,
    known: Mapping[tuple[str, int], tuple[CommittedOffset, TopicId]],
) -> Work[dict[tuple[str, int], ErrorCode]]:
    who = request.transactional_id, request.producer_id, request.producer_epoch
    is_named = version >= _MEMBER_NAMED_FROM
    # Before anything is waited for: what comes of it may be another transaction's by then.
    txn_seq = broker.transactions.meant_seq(request.transactional_id, protocol)
    if protocol == 1 and not broker.transactions.has_group(*who, request.group_id):
        # It is part of the transaction in an image as new as the answer of AddOffsetsToTxn.
        yield from value_of(broker.transactions.catch_up())
    elif protocol == 2 and broker.transactions.is_ending(request.transactional_id):
        # The commit itself would add the group, but it would not wait for that end.
        code = yield from value_of(
            broker.transactions.add_partitions(*who, protocol=2, groups=[request.group_id])
        )
        if code is not ErrorCode.NONE:
            return dict.fromkeys(known, commit_code(code, version))
    codes: Promise[tuple[ErrorCode, ...]] = broker.coordinator.commit(
        request.group_id,
        request.generation_id if is_named else -1,
        request.member_id if is_named else "",
        request.group_instance_id if is_named else None,
        [entry for entry, _ in known.values()],
        OffsetsTransaction(
            transactional_id=request.transactional_id,
            producer_id=request.producer_id,
            epoch=request.producer_epoch,
            txn_seq=txn_seq,
            protocol=protocol,
            topic_ids=tuple(topic_id for _, topic_id in known.values()),
        ),
    )
    result = yield from value_of(codes)
    return {at: commit_code(code, version) for at, code in zip(known, result, strict=True)}


def commit_code(code: ErrorCode, version: int) -> ErrorCode:
    """A code as clients take it in an answer to TxnOffsetCommit."""
    if code is ErrorCode.PRODUCER_FENCED:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    if code is ErrorCode.INVALID_TXN_STATE and version >= _ABORTABLE_FROM:
        return ErrorCode.TRANSACTION_ABORTABLE
    if code in (ErrorCode.REBALANCE_IN_PROGRESS, ErrorCode.CONCURRENT_TRANSACTIONS):
        # Over in a moment, but fatal to Java's producers, or to older ones of them.
        code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    if code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS and version < _LOADING_FROM:
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    return code


# ---- the end ----


def end_txn(broker: Broker, context: RequestContext, request: Struct) -> Work[Struct]:
    """Answer EndTxn once the decision is applied."""
    version = context.api_version
    result = ProducerResult(_NOT_OFFERED)
    if broker.transactions.is_offered:
        result = yield from value_of(
            broker.transactions.end(
                request.transactional_id,
                request.producer_id,
                request.producer_epoch,
                is_commit=request.committed,
                protocol=2 if version >= _SECOND_PROTOCOL_FROM else 1,
            )
        )
    return Struct(
        error_code=int(fenced_code(result.code, version)),
        producer_id=result.producer_id,
        producer_epoch=result.epoch,
    )


def write_markers(broker: Broker, _context: RequestContext, request: Struct) -> Work[Struct]:
    """Answer WriteTxnMarkers of an operator: the abort of what nobody will end any more."""
    is_current = yield from value_of(broker.transactions.catch_up())
    markers = []
    for marker in request.markers:
        ends: dict[tuple[str, int], ErrorCode | Promise[ErrorCode]] = {}
        for name, index in _named(marker.topics):
            if len(ends) % TURN_PARTITIONS == 0:
                yield None
            if (name, index) not in ends:
                unknown = ErrorCode.COORDINATOR_NOT_AVAILABLE
                end = _abort_orphan(broker, marker, name, index) if is_current else unknown
                ends[name, index] = end
        codes = dict(zip(ends, (yield from all_of(list(ends.values()))), strict=True))
        topics = []
        for topic in marker.topics:
            rows = yield from in_turns(
                topic.partition_indexes,
                lambda index, name=topic.name, codes=codes: Struct(  # type: ignore[misc]
                    partition_index=index, error_code=int(codes[name, index])
                ),
            )
            topics.append(Struct(name=topic.name, partitions=rows))
        markers.append(Struct(producer_id=marker.producer_id, topics=topics))
    return Struct(markers=markers)


def _named(topics: Sequence[Struct]) -> Iterator[tuple[str, int]]:
    for topic in topics:
        for index in topic.partition_indexes:
            yield topic.name, index


def _abort_orphan(
    broker: Broker, marker: Struct, name: str, index: int
) -> ErrorCode | Promise[ErrorCode]:
    found = broker.find_partition(name, None, index)
    if not isinstance(found, Partition):
        return found
    if not found.is_leader:
        return ErrorCode.NOT_LEADER_OR_FOLLOWER
    stakes = broker.image.transactions.stakes(found.topic_id, index)
    is_known = any(known.records_producer_id == marker.producer_id for known in stakes)
    if marker.transaction_result or is_known:
        # Decisions are the metadata group's; this only ends what it does not know.
        return ErrorCode.INVALID_TXN_STATE
    told: Promise[ErrorCode] = Promise()
    decided = Decided(
        producer_id=ProducerId(marker.producer_id),
        producer_epoch=marker.producer_epoch,
        txn_seq=WHATEVER_SEQ,
        is_commit=False,
        protocol=1,
    )

    def done(written: Promise[Any]) -> None:
        told.resolve(broker.explain(written.error)[0] if written.error else ErrorCode.NONE)

    found.end_transaction(decided).when_done(done)
    return told


# ---- operators ----


def describe(broker: Broker, _context: RequestContext, request: Struct) -> Work[Struct]:
    """Answer DescribeTransactions (KIP-664)."""
    names = list(dict.fromkeys(request.transactional_ids))
    found = yield from value_of(broker.transactions.describe(names))
    rows = []
    for count, name in enumerate(names):
        if count % TURN_PARTITIONS == 0:
            yield None
        known = found[name]
        if isinstance(known, ErrorCode):
            rows.append(_unknown(name, known))
        else:
            rows.append((yield from _described(broker, known)))
    return Struct(transaction_states=rows)


def _unknown(name: str, code: ErrorCode) -> Struct:
    return Struct(
        error_code=int(code),
        transactional_id=name,
        transaction_state="",
        transaction_timeout=0,
        transaction_start_time=-1,
        producer_id=-1,
        producer_epoch=-1,
        topics=[],
    )


def _described(broker: Broker, known: Transaction) -> Work[Struct]:
    topics: dict[str, list[int]] = {}
    image = broker.image
    for count, (topic_id, index) in enumerate(sorted(known.partitions)):
        if count % TURN_PARTITIONS == 0:
            yield None
        topic = image.topic_by_id(topic_id)
        if topic is not None:
            topics.setdefault(topic.name, []).append(index)
    return Struct(
        error_code=int(ErrorCode.NONE),
        transactional_id=known.transactional_id,
        transaction_state=known.state.label,
        transaction_timeout=known.timeout_ms,
        transaction_start_time=-1 if known.state.may_begin else known.started_at_ms,
        producer_id=known.producer_id,
        producer_epoch=known.epoch,
        topics=[Struct(topic=name, partitions=indexes) for name, indexes in topics.items()],
    )


def list_transactions(broker: Broker, context: RequestContext, request: Struct) -> Work[Struct]:
    """Answer ListTransactions: ids whose coordinator this broker is, else Java shows each several
    times."""
    version = context.api_version
    labels = {state.label: state for state in TransactionState}
    unknown = [name for name in request.state_filters if name not in labels]
    states = frozenset(labels[name] for name in request.state_filters if name in labels)
    pattern = None
    text = request.transactional_id_pattern if version >= _PATTERN_FROM else None
    if text:
        try:
            pattern = re2.compile(text, _QUIET)
        except re2.error:
            return Struct(
                error_code=int(ErrorCode.INVALID_REGULAR_EXPRESSION),
                unknown_state_filters=unknown,
                transaction_states=[],
            )
    filters = Filters(
        states,
        frozenset(request.producer_id_filters),
        request.duration_filter if version >= _DURATION_FROM else -1,
        pattern,
    )
    rows = []
    if states or not unknown:
        now_ms = broker.clock.wall_ms()
        ids = broker.image.transactions.ids
        for count, name in enumerate(sorted(ids)):
            if count % TURN_PARTITIONS == 0:
                yield None
            known = ids[name]
            if filters.lets_through(known, now_ms) and (
                broker.transactions.find(name) == broker.node_id
            ):
                rows.append(
                    Struct(
                        transactional_id=name,
                        producer_id=known.producer_id,
                        transaction_state=known.state.label,
                    )
                )
    return Struct(
        error_code=int(ErrorCode.NONE), unknown_state_filters=unknown, transaction_states=rows
    )


def init_producer_id(broker: Broker, context: RequestContext, request: Struct) -> Any:
    """Answer InitProducerId."""
    if request.transactional_id is not None:
        return _init_transactional(broker, context.api_version, request)
    blocks = broker.producer_ids
    if blocks.waiting_count >= WAITING_MAX:
        return _producer_id(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    answer: Promise[Any] = Promise()

    def settled(promise: Promise[int]) -> None:
        if promise.error is None:
            answer.resolve(_producer_id(ErrorCode.NONE, promise.result(), 0))
        else:
            # Librdkafka and Java ask again at this code, whatever the cause was.
            answer.resolve(_producer_id(ErrorCode.COORDINATOR_NOT_AVAILABLE))

    blocks.take().when_done(settled)
    return answer


def _init_transactional(broker: Broker, version: int, request: Struct) -> Any:
    if not request.transactional_id:
        return _producer_id(ErrorCode.INVALID_REQUEST)
    if not broker.transactions.is_offered:
        return _producer_id(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    is_named = version >= _NAMES_PRODUCER_FROM
    begun = broker.transactions.init_producer(
        request.transactional_id,
        request.transaction_timeout,
        request.producer_id if is_named else -1,
        request.producer_epoch if is_named else -1,
    )

    def answer(result: ProducerResult) -> dict[str, Any]:
        code = fenced_code(result.code, version, _INIT_FENCED_FROM)
        return _producer_id(code, result.producer_id, result.epoch)

    return then(begun, answer)


def _producer_id(code: ErrorCode, producer_id: int = -1, epoch: int = -1) -> dict[str, Any]:
    return {
        "throttle_time": 0,
        "error_code": code,
        "producer_id": producer_id,
        "producer_epoch": epoch,
    }


def describe_producers(
    broker: Broker, _context: RequestContext, request: Struct
) -> Work[dict[str, Any]]:
    """Answer DescribeProducers (KIP-664)."""
    topics = []
    told: dict[tuple[str, int], dict[str, Any]] = {}
    count = 0
    for topic in request.topics:
        rows = []
        for index in topic.partition_indexes:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            if (topic.name, index) in told:
                continue  # named twice
            found = broker.find_partition(topic.name, None, index)
            if isinstance(found, Partition) and not found.is_leader:
                found = ErrorCode.NOT_LEADER_OR_FOLLOWER
            if isinstance(found, Partition) and not found.knows_producers:
                found = ErrorCode.NOT_LEADER_OR_FOLLOWER  # soon: what the log says is replayed
            is_partition = isinstance(found, Partition)
            row = told[topic.name, index] = {
                "partition_index": index,
                "error_code": ErrorCode.NONE if is_partition else found,
                "error_message": None,
                "active_producers": _producer_rows(found) if is_partition else [],
            }
            rows.append(row)
        topics.append({"name": topic.name, "partitions": rows})
    return {"throttle_time": 0, "topics": topics}


def _producer_rows(partition: Any) -> list[dict[str, Any]]:
    return [
        {
            "producer_id": producer_id,
            "producer_epoch": producer.epoch,
            "last_sequence": producer.last_sequence,
            "last_timestamp": producer.batches[-1].timestamp if producer.batches else NO_TIMESTAMP,
            "coordinator_epoch": -1,
            "current_txn_start_offset": producer.open_since,
        }
        for producer_id, producer in partition.producers.producers()
    ]


HANDLERS: Final[dict[ApiKey, Callable[..., Any]]] = {
    ApiKey.INIT_PRODUCER_ID: init_producer_id,
    ApiKey.DESCRIBE_PRODUCERS: describe_producers,
    ApiKey.ADD_PARTITIONS_TO_TXN: add_partitions,
    ApiKey.ADD_OFFSETS_TO_TXN: add_offsets,
    ApiKey.END_TXN: end_txn,
    ApiKey.WRITE_TXN_MARKERS: write_markers,
    ApiKey.TXN_OFFSET_COMMIT: txn_offset_commit,
    ApiKey.DESCRIBE_TRANSACTIONS: describe,
    ApiKey.LIST_TRANSACTIONS: list_transactions,
}
