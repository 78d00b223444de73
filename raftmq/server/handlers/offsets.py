"""ListOffsets, OffsetForLeaderEpoch, DeleteRecords: questions to partitions about positions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final, TypeAlias

from attrs import evolve, frozen

from raftmq.cluster.partition import EARLIEST_LOCAL, LATEST_TIERED, MAX_TIMESTAMP, Partition
from raftmq.cluster.partition_results import DeleteResult, OffsetResult
from raftmq.errors import ErrorCode
from raftmq.ports import Runnable
from raftmq.promise import Promise
from raftmq.protocol import RequestHeader, Struct
from raftmq.server.broker import Broker
from raftmq.server.slices import TURN_PARTITIONS, Work, all_of, in_turns

Answer: TypeAlias = dict[str, Any]

COLD_ROUNDS_MAX: Final = 4
"""After so many rounds of workers the loop itself reads what is missing still."""
_OFFSET_NOT_AVAILABLE_FROM: Final = 5
_SPECIAL_FROM: Final = {MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9}
"""KIP-734, KIP-405, KIP-1005: which version brought which special timestamp."""


def list_offsets(broker: Broker, header: RequestHeader, request: Struct) -> Work[Answer]:
    """Answer ListOffsets for every partition; workers read what is cold of indexes and batches."""
    version = header.api_version
    topics = []
    cold: list[_Cold] = []
    count = 0
    for topic in request.topics:
        rows: list[Answer] = []
        for part in topic.partitions:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            found, result = _list_one(broker, version, topic.name, part)
            rows.append(_offset_row(version, part, result))
            if result.job is not None:
                assert isinstance(found, Partition)
                cold.append(_Cold(rows, len(rows) - 1, found, part, result.job))
        topics.append({"name": topic.name, "partitions": rows})
    rounds = 0
    while cold:
        rounds += 1
        yield _prepare(broker, cold)
        waiting, cold = cold, []
        for one in waiting:
            result = one.look(may_wait=rounds >= COLD_ROUNDS_MAX)
            if result.job is not None:
                cold.append(evolve(one, job=result.job))
            one.rows[one.at] = _offset_row(version, one.part, result)
            yield None
    return {"throttle_time": 0, "topics": topics}


@frozen(slots=True)
class _Cold:
    """A look-up by time for which something must come into memory first, and where it is told."""

    rows: list[Answer]
    at: int
    partition: Partition
    part: Struct
    job: Runnable

    def look(self, *, may_wait: bool) -> OffsetResult:
        """Ask again."""
        part = self.part
        return self.partition.list_offset(
            part.timestamp, current_epoch=part.current_leader_epoch, may_wait=may_wait
        )


def _prepare(broker: Broker, cold: list[_Cold]) -> Promise[None]:
    """Run all jobs; kept when each has ended, whatever became of it."""
    ended: Promise[None] = Promise()
    left = len(cold)
    broker.metrics.read_aheads += left

    def settled_for(one: _Cold) -> Callable[[Promise[None]], None]:
        def settled(done: Promise[None]) -> None:
            nonlocal left
            left -= 1
            if done.error is None:
                one.partition.prepared(one.job)
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
    broker: Broker, version: int, topic: str, part: Struct
) -> tuple[Partition | ErrorCode, OffsetResult]:
    if version < _SPECIAL_FROM.get(part.timestamp, 0):
        code = ErrorCode.UNSUPPORTED_VERSION
        return code, OffsetResult(code)
    found = broker.find_partition(topic, None, part.partition_index)
    if isinstance(found, ErrorCode):
        return found, OffsetResult(found)
    epoch = part.current_leader_epoch
    return found, found.list_offset(part.timestamp, current_epoch=epoch, may_wait=False)


def _code_for(version: int, code: ErrorCode) -> ErrorCode:
    if code is ErrorCode.OFFSET_NOT_AVAILABLE and version < _OFFSET_NOT_AVAILABLE_FROM:
        return ErrorCode.LEADER_NOT_AVAILABLE  # KIP-207: older clients know no better
    return code


def offset_for_leader_epoch(
    broker: Broker, _header: RequestHeader, request: Struct
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
            found = broker.find_partition(topic.topic, None, part.partition)
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


def delete_records(broker: Broker, _header: RequestHeader, request: Struct) -> Work[Answer]:
    """Answer DeleteRecords once every partition dropped what it was told to drop."""
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
