"""Who reads what transactions wrote: committed records as consumers see them, and their offsets.

A reader goes through each partition from its beginning to its end, once, and leaves out what
answers call aborted, as every client does. Positions are kept by offsets, control batches
included: what was passed over was read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jepsen_like.cluster.consumers import EARLIEST
from jepsen_like.cluster.fetch_session import FETCH_BYTES, WAIT_MS
from jepsen_like.cluster.kafka import STALE_LEADER, VERSIONS, Kafka, Lost
from jepsen_like.cluster.tasks import until
from jepsen_like.cluster.transactional import INPUT, PARTITIONS, TOPIC, group_of
from jepsen_like.history_events import Value
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

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

READ_COMMITTED: Final = 1


class CommittedReader:
    """One process that reads committed records of all partitions that transactions write to."""

    def __init__(self, world: ClusterWorld, process: int, ids: list[str]) -> None:
        self._world = world
        self._kafka = Kafka(world, process)
        self._process = process
        self._ids = ids
        self._positions = dict.fromkeys(range(PARTITIONS), 0)
        self._is_at_end = dict.fromkeys(range(PARTITIONS), False)

    async def run(self) -> None:
        """Read until everything is written, and everything was read."""
        world, kafka = self._world, self._kafka
        while not world.is_written:
            await self._once()
        # What was found at the end before may have been all that a leader knew then.
        self._is_at_end = dict.fromkeys(self._positions, False)
        while not all(self._is_at_end.values()):
            await self._once()
        for transactional_id in self._ids:
            while not await self._read_offset(transactional_id):
                await kafka.pause()
        kafka.hang_up()

    async def _once(self) -> None:
        random = self._kafka.random
        if random.random() < 0.15:
            await self._read_offset(random.choice(self._ids))
            return
        behind = [p for p, is_at_end in self._is_at_end.items() if not is_at_end]
        is_last = self._world.is_written
        await self._poll(random.choice(behind if is_last else list(self._positions)))

    async def _poll(self, partition: int) -> None:
        world, kafka = self._world, self._kafka
        name, position = f"{TOPIC}-{partition}", self._positions[partition]
        operation = world.recorder.invoke(self._process, "poll_committed", offsets={name: position})
        wanted = FetchPartition(partition, fetch_offset=position, partition_max_bytes=FETCH_BYTES)
        request = FetchRequest(
            max_wait_ms=WAIT_MS,
            isolation_level=READ_COMMITTED,
            topics=[FetchTopic(TOPIC, None, [wanted])],
        )
        version = VERSIONS[ApiKey.FETCH]
        body = encode_fetch_request(version, request)
        try:
            leader = await kafka.leader(TOPIC, partition)
            answer = await until(kafka.request(leader, ApiKey.FETCH, body))
        except Lost:
            world.recorder.fail(operation)
            kafka.leaders.pop((TOPIC, partition), None)
            await kafka.pause()
            return
        part = decode_fetch_response(version, answer).topics[0].partitions[0]
        if part.error_code:
            world.recorder.fail(operation, code=part.error_code)
            await self._refused(partition, part.error_code)
            return
        rows, end = _committed(name, position, part)
        self._positions[partition] = end
        if end == position and end >= part.high_watermark:
            self._is_at_end[partition] = True
        world.counts.acked += 1
        world.recorder.ok(operation, records={name: rows} if rows else {}, offsets={name: end})
        if end == position:
            await kafka.think(1.0, 20.0)

    async def _refused(self, partition: int, code: int) -> None:
        kafka = self._kafka
        kafka.leaders.pop((TOPIC, partition), None)
        if code != ErrorCode.OFFSET_OUT_OF_RANGE:
            assert code in STALE_LEADER, ErrorCode(code).name
            await kafka.pause()
            return
        row = {"partition_index": partition, "current_leader_epoch": -1, "timestamp": EARLIEST}
        try:
            answer = await kafka.ask(
                await kafka.leader(TOPIC, partition),
                ApiKey.LIST_OFFSETS,
                replica_id=-1,
                isolation_level=READ_COMMITTED,
                topics=[{"name": TOPIC, "partitions": [row]}],
            )
        except Lost:
            await kafka.pause()
            return
        part = answer.topics[0].partitions[0]
        if not part.error_code:
            self._positions[partition] = max(part.offset, self._positions[partition])

    async def _read_offset(self, transactional_id: str) -> bool:
        """What an id's group is told; False when it is told nothing."""
        group = group_of(transactional_id)
        world, kafka = self._world, self._kafka
        operation = world.recorder.invoke(
            self._process, "stable_offset", transactional_id=transactional_id, partitions=[INPUT]
        )
        topic, _, index = INPUT.partition("-")
        try:
            found = await kafka.ask(
                kafka.any_node(), ApiKey.FIND_COORDINATOR, key=group, key_type=0
            )
            if found.error_code:
                world.recorder.fail(operation, code=found.error_code)
                return False
            answer = await kafka.ask(
                found.node_id,
                ApiKey.OFFSET_FETCH,
                group_id=group,
                topics=[{"name": topic, "partition_indexes": [int(index)]}],
                require_stable=True,
            )
        except Lost:
            world.recorder.fail(operation)
            return False
        row = answer.topics[0].partitions[0] if answer.topics else None
        if answer.error_code or row is None or row.error_code:
            code = answer.error_code if row is None else row.error_code
            if code == ErrorCode.UNSTABLE_OFFSET_COMMIT:
                world.had_effect("an offset was unstable")
            world.recorder.fail(operation, code=code)
            return False
        world.recorder.ok(operation, offsets={INPUT: row.committed_offset})
        return True


def _committed(
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
