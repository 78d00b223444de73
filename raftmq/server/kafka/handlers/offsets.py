"""ListOffsets, OffsetForLeaderEpoch, DeleteRecords: questions to partitions about positions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final, TypeAlias

from attrs import frozen

from raftmq.errors import ErrorCode
from raftmq.partition.look_ups import MAX_TIMESTAMP
from raftmq.partition.partition import (
    EARLIEST,
    EARLIEST_LOCAL,
    LATEST_TIERED,
    Partition,
)
from raftmq.partition.ports import AppendResult, DeleteResult, OffsetResult
from raftmq.ports import Runnable
from raftmq.promise import Promise
from raftmq.protocol import Struct
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import TURN_PARTITIONS, Work, all_of, in_turns, value_of

Answer: TypeAlias = dict[str, Any]

COLD_ROUNDS_MAX: Final = 4
"""After so many rounds of workers the loop itself reads what is still missing."""
ACKNOWLEDGED_WAIT_MS: Final = 5_000
"""How long a request waits for the flush of what a partition's only replica acknowledged; from
version 10 on as long as the client says, within the next two bounds."""
ACKNOWLEDGED_WAIT_MS_MIN: Final = 500
ACKNOWLEDGED_WAIT_MS_MAX: Final = 30_000
READ_COMMITTED: Final = 1
_ISOLATION_FROM: Final = 2
_TIMEOUT_FROM: Final = 10
"""KIP-1075."""
_STARTS: Final = (EARLIEST, EARLIEST_LOCAL, LATEST_TIERED)
"""Positions that do not depend on the end of the log."""
_OFFSET_NOT_AVAILABLE_FROM: Final = 5
_SPECIAL_FROM: Final = {MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9}
"""KIP-734, KIP-405, KIP-1005: which version brought which special timestamp."""


def list_offsets(broker: Broker, context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer ListOffsets; workers read indexes and batches that are not in memory."""
    version = context.api_version
    committed_only = version >= _ISOLATION_FROM and request.isolation_level == READ_COMMITTED
    wait_ms = ACKNOWLEDGED_WAIT_MS
    if version >= _TIMEOUT_FROM:
        wait_ms = min(max(request.timeout, ACKNOWLEDGED_WAIT_MS_MIN), ACKNOWLEDGED_WAIT_MS_MAX)
    topics = []
    waiting: list[tuple[_Asked, Promise[AppendResult]]] = []
    later: list[tuple[_Asked, Promise[OffsetResult]]] = []
    cold: list[_Cold] = []
    count = 0
    for topic in request.topics:
        rows: list[Answer] = []
        for part in topic.partitions:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            found, result = _list_one(broker, version, topic.name, part, committed_only)
            rows.append(_offset_row(version, part, result))
            if result.code is not ErrorCode.NONE:
                continue
            assert isinstance(found, Partition)
            asked = _Asked(rows, len(rows) - 1, found, part, committed_only)
            if result.later is not None:
                later.append((asked, result.later))
                continue
            wait = None if part.timestamp in _STARTS else found.acknowledged(wait_ms)
            if wait is not None:
                waiting.append((asked, wait))
            elif result.job is not None:
                cold.append(_Cold(asked, result.job))
        topics.append({"name": topic.name, "partitions": rows})
    for asked, wait in waiting:
        code = (yield from value_of(wait)).code
        result = asked.look(may_wait=False) if code is ErrorCode.NONE else OffsetResult(code)
        asked.rows[asked.at] = _offset_row(version, asked.part, result)
        if result.job is not None:
            cold.append(_Cold(asked, result.job))
    for asked, answer in later:
        result = yield from value_of(answer)
        asked.rows[asked.at] = _offset_row(version, asked.part, result)
    yield from _look_up(broker, version, cold)
    return {"throttle_time": 0, "topics": topics}


def _look_up(broker: Broker, version: int, cold: list[_Cold]) -> Work[None]:
    """Write the rows of the look-ups for which workers read."""
    rounds = 0
    while cold:
        rounds += 1
        yield _prepare(broker, cold)
        read, cold = cold, []
        for one in read:
            asked = one.asked
            result = asked.look(may_wait=rounds >= COLD_ROUNDS_MAX)
            if result.job is not None:
                cold.append(_Cold(asked, result.job))
            asked.rows[asked.at] = _offset_row(version, asked.part, result)
            yield None


@frozen(slots=True)
class _Asked:
    """A question that cannot be answered at once, and where its answer is written."""

    rows: list[Answer]
    at: int
    partition: Partition
    part: Struct
    committed_only: bool

    def look(self, *, may_wait: bool) -> OffsetResult:
        """Ask again."""
        part = self.part
        return self.partition.list_offset(
            part.timestamp,
            current_epoch=part.current_leader_epoch,
            may_wait=may_wait,
            committed_only=self.committed_only,
        )


@frozen(slots=True)
class _Cold:
    """A look-up by time for which something must come into memory first."""

    asked: _Asked
    job: Runnable


def _prepare(broker: Broker, cold: list[_Cold]) -> Promise[None]:
    """Run all jobs; resolves when each has ended, also by an error."""
    ended: Promise[None] = Promise()
    left = len(cold)
    broker.metrics.read_aheads += left

    def settled_for(one: _Cold) -> Callable[[Promise[None]], None]:
        def settled(done: Promise[None]) -> None:
            nonlocal left
            left -= 1
            if done.error is None:
                one.asked.partition.prepared(one.job)
            # An error of the disk shows again when the partition is asked.
            if not left:
                ended.resolve(None)

        return settled

    for one in cold:
        broker.workers.submit(one.job.run).when_done(settled_for(one))
    return ended


def _offset_row(version: int, part: Struct, result: OffsetResult) -> Answer:
    return {
        "partition_index": part.partition_index,
        "error_code": _code_for(version, result.code),
        "timestamp": result.timestamp,
        "offset": result.offset,
        "leader_epoch": result.leader_epoch,
    }


def _list_one(
    broker: Broker, version: int, topic: str, part: Struct, committed_only: bool
) -> tuple[Partition | ErrorCode, OffsetResult]:
    if version < _SPECIAL_FROM.get(part.timestamp, 0):
        code = ErrorCode.UNSUPPORTED_VERSION
        return code, OffsetResult(code)
    found = broker.find_readable(topic, None, part.partition_index)
    if isinstance(found, ErrorCode):
        return found, OffsetResult(found)
    epoch = part.current_leader_epoch
    return found, found.list_offset(
        part.timestamp, current_epoch=epoch, may_wait=False, committed_only=committed_only
    )


def _code_for(version: int, code: ErrorCode) -> ErrorCode:
    if code is ErrorCode.OFFSET_NOT_AVAILABLE and version < _OFFSET_NOT_AVAILABLE_FROM:
        return ErrorCode.LEADER_NOT_AVAILABLE  # KIP-207: older clients do not know the new code
    return code


def offset_for_leader_epoch(
    broker: Broker, _context: RequestContext, request: Struct
) -> Work[Answer]:
    """Answer OffsetForLeaderEpoch (KIP-320) for every partition."""
    topics = []
    count = 0
    for topic in request.topics:
        rows = []
        for part in topic.partitions:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            found = broker.find_readable(topic.topic, None, part.partition)
            code, epoch, end = ErrorCode.NONE, -1, -1
            if isinstance(found, ErrorCode):
                code = found
            else:
                result = found.end_offset_for_epoch(
                    part.leader_epoch, current_epoch=part.current_leader_epoch
                )
                code, epoch, end = result.code, result.leader_epoch, result.end_offset
            rows.append(
                {
                    "error_code": code,
                    "partition": part.partition,
                    "leader_epoch": epoch,
                    "end_offset": end,
                }
            )
        topics.append({"topic": topic.topic, "partitions": rows})
    return {"throttle_time": 0, "topics": topics}


def delete_records(broker: Broker, _context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer DeleteRecords once every partition has dropped its records."""
    timeout_ms = max(request.timeout, 0)
    parts = [(topic.name, part) for topic in request.topics for part in topic.partitions]

    def delete(named: tuple[str, Struct]) -> DeleteResult | Promise[DeleteResult]:
        name, part = named
        found = broker.find_partition(name, None, part.partition_index)
        if isinstance(found, Partition):
            return found.delete_records(part.offset, timeout_ms)
        return DeleteResult(found)

    results = yield from in_turns(parts, delete)
    values = yield from all_of(results)
    rows = yield from in_turns(
        zip(parts, values, strict=True), lambda one: _deleted_row(one[0][1].partition_index, one[1])
    )
    left = iter(rows)
    return {
        "throttle_time": 0,
        "topics": [
            {"name": topic.name, "partitions": list(islice(left, len(topic.partitions)))}
            for topic in request.topics
        ],
    }


def _deleted_row(index: int, result: DeleteResult) -> dict[str, Any]:
    return {
        "partition_index": index,
        "low_watermark": result.low_watermark,
        "error_code": result.code,
    }
