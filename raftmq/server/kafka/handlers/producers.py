"""InitProducerId and DescribeProducers.

Without a transactional id every producer gets a fresh id of the broker's block; with one the
metadata group says who it is.
"""

from __future__ import annotations

from typing import Any, Final

from raftmq.errors import ErrorCode
from raftmq.partition.partition import Partition
from raftmq.promise import Promise
from raftmq.protocol import Struct
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.handlers.transactions import fenced_code
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import TURN_PARTITIONS, Work, then
from raftmq.transactions.coordinator import ProducerResult

WAITING_MAX: Final = 10_000
_NAMES_PRODUCER_FROM: Final = 3  # InitProducerId (KIP-360)
_FENCED_FROM: Final = 4  # InitProducerId (KIP-588)
NO_TIMESTAMP: Final = -1


def init_producer_id(broker: Broker, context: RequestContext, request: Struct) -> Any:
    """Answer InitProducerId."""
    if request.transactional_id is not None:
        return _init_transactional(broker, context.api_version, request)
    blocks = broker.producer_ids
    if blocks.waiting_count >= WAITING_MAX:
        return _answer(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    answer: Promise[Any] = Promise()

    def settled(promise: Promise[int]) -> None:
        if promise.error is None:
            answer.resolve(_answer(ErrorCode.NONE, promise.result(), 0))
        else:
            # Librdkafka and Java ask again at this code, whatever the cause was.
            answer.resolve(_answer(ErrorCode.COORDINATOR_NOT_AVAILABLE))

    blocks.take().when_done(settled)
    return answer


def _init_transactional(broker: Broker, version: int, request: Struct) -> Any:
    if not request.transactional_id:
        return _answer(ErrorCode.INVALID_REQUEST)
    if not broker.transactions.is_offered:
        return _answer(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    is_named = version >= _NAMES_PRODUCER_FROM
    begun = broker.transactions.init_producer(
        request.transactional_id,
        request.transaction_timeout,
        request.producer_id if is_named else -1,
        request.producer_epoch if is_named else -1,
    )

    def answer(result: ProducerResult) -> dict[str, Any]:
        code = fenced_code(result.code, version, _FENCED_FROM)
        return _answer(code, result.producer_id, result.epoch)

    return then(begun, answer)


def _answer(code: ErrorCode, producer_id: int = -1, epoch: int = -1) -> dict[str, Any]:
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
