"""One fetch of committed records, as consumers see them.

What answers call aborted is left out, as every client does. Positions are kept by offsets, control
batches included: what was passed over was read.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from jepsen_like.cluster.fetch_session import FETCH_BYTES, WAIT_MS
from jepsen_like.cluster.kafka import VERSIONS, Kafka, Lost
from jepsen_like.cluster.tasks import until
from jepsen_like.history_events import Event, Value
from jepsen_like.invariants import InvariantViolation
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.protocol.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchTopic,
    decode_fetch_response,
    encode_fetch_request,
)
from raftmq.records import parse_marker, read_records, split_batches

READ_COMMITTED: Final = 1


@frozen
class Fetched:
    """What came of it.

    Attributes:
        code: why nothing was read; NETWORK_EXCEPTION where nobody answered.
        end: behind all that was passed.
        is_at_end: nothing is left below the high watermark.
    """

    code: int
    rows: list[tuple[int, Value]]
    end: int
    is_at_end: bool


async def fetch_committed(
    kafka: Kafka, operation: Event, topic: str, partition: int, position: int
) -> Fetched:
    """Fetch from there and tell the history of it, whose operation began."""
    world, name = kafka.world, f"{topic}-{partition}"
    wanted = FetchPartition(partition, fetch_offset=position, partition_max_bytes=FETCH_BYTES)
    request = FetchRequest(
        max_wait_ms=WAIT_MS,
        isolation_level=READ_COMMITTED,
        topics=[FetchTopic(topic, None, [wanted])],
    )
    version = VERSIONS[ApiKey.FETCH]
    body = encode_fetch_request(version, request)
    try:
        leader = await kafka.leader(topic, partition)
        answer = await until(kafka.request(leader, ApiKey.FETCH, body))
    except Lost:
        world.recorder.fail(operation)
        kafka.leaders.pop((topic, partition), None)
        return Fetched(ErrorCode.NETWORK_EXCEPTION, [], position, False)
    part = decode_fetch_response(version, answer).topics[0].partitions[0]
    if part.error_code:
        world.recorder.fail(operation, code=part.error_code)
        kafka.leaders.pop((topic, partition), None)
        return Fetched(part.error_code, [], position, False)
    rows, end = committed_rows(name, position, part)
    world.counts.acked += 1
    world.recorder.ok(operation, records={name: rows} if rows else {}, offsets={name: end})
    return Fetched(ErrorCode.NONE, rows, end, end == position and end >= part.high_watermark)


def committed_rows(
    name: str, position: int, part: FetchPartitionResponse
) -> tuple[list[tuple[int, Value]], int]:
    """The committed records of an answer, and the offset behind all that it has."""
    data = memoryview(b"".join(map(bytes, part.records or ())))
    aborted = sorted(part.aborted_transactions or (), key=lambda row: -row.first_offset)
    ignored: dict[int, bool] = {}
    rows: list[tuple[int, Value]] = []
    end = position
    for header, batch in split_batches(data):
        while aborted and aborted[-1].first_offset < header.next_offset:
            ignored[aborted.pop().producer_id] = True
        end = max(end, header.next_offset)
        if header.base_offset >= part.last_stable_offset:
            told = f"{name}: {header.base_offset} is told, stable is {part.last_stable_offset}"
            raise InvariantViolation("StableReads", told)
        if header.is_control:
            if not parse_marker(batch).is_commit:
                ignored.pop(header.producer_id, None)
        elif not header.is_transactional or header.producer_id not in ignored:
            for record in read_records(batch):
                if record.offset >= position:
                    assert record.value is not None
                    rows.append((record.offset, int(record.value.partition(b".")[0])))
    return rows, end
