"""A client that looks offsets up by time, and checks each answer against the records themselves.

One look-up stays with one leader and its epoch: read everything, ask, read what came meanwhile. If
the log begins where it began before, what was read below the first end is exactly what the leader
had to look through, so the answer can be judged exactly: the first record that is not older
(ListOffsets by timestamp), the first of the newest (-3, KIP-734).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from jepsen_like.cluster.kafka import STALE_LEADER, VERSIONS, Kafka, Lost
from jepsen_like.cluster.request_kinds import OWN
from jepsen_like.cluster.tasks import until
from jepsen_like.invariants import InvariantViolation
from jepsen_like.virtual_time import EPOCH_MS
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.protocol.fetch import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    decode_fetch_response,
    encode_fetch_request,
)
from raftmq.records import LOG_APPEND_TIME, read_records, split_batches

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

EVERY_MS: Final = (300.0, 2_000.0)
LATEST: Final = -1
EARLIEST: Final = -2
NEWEST: Final = -3
READ_BYTES: Final = 1 << 20
FETCHES_MAX: Final = 20
"""So many fetches may come back empty-handed before a look-up is given up."""
_NOT_NOW: Final = STALE_LEADER | {ErrorCode.OFFSET_OUT_OF_RANGE}


class NotNowError(Exception):
    """The leader is another one, or cannot say just now: nothing is judged."""


@frozen
class Dated:
    """Records `[start, end)` of one batch that are as old as each other."""

    start: int
    end: int
    timestamp: int
    leader_epoch: int

    @property
    def answer(self) -> tuple[int, int, int]:
        """What ListOffsets says of the first of them."""
        return self.timestamp, self.start, self.leader_epoch


def first_not_older(records: Iterable[Dated], timestamp: int) -> Dated | None:
    """The first that is not older than a time."""
    return next((dated for dated in records if dated.timestamp >= timestamp), None)


def newest(records: Iterable[Dated]) -> Dated | None:
    """The first of the newest; those without a timestamp do not count."""
    found: Dated | None = None
    for dated in records:
        if dated.timestamp > (-1 if found is None else found.timestamp):
            found = dated
    return found


def is_right(
    timestamp: int, told: tuple[int, int, int] | None, before: list[Dated], after: list[Dated]
) -> bool:
    """True when an answer may be given by who certainly has the records `before`, and has any
    number of those that came `after` them."""
    known = newest(before) if timestamp == NEWEST else first_not_older(before, timestamp)
    if told == (None if known is None else known.answer):
        # By time the first stays the first; what is newer may not have been there yet.
        return True
    if known is not None and timestamp != NEWEST:
        return False
    later = next((dated for dated in after if dated.answer == told), None)
    if later is None:
        return False
    then = [*before, *(dated for dated in after if dated.end <= later.end)]
    found = newest(then) if timestamp == NEWEST else first_not_older(then, timestamp)
    return found is later


class Historian:
    """One process that asks when things were written."""

    def __init__(self, world: ClusterWorld, process: int) -> None:
        self._world = world
        self._kafka = Kafka(world, process)

    async def run(self) -> None:
        """Ask until the world is quiet."""
        world, kafka = self._world, self._kafka
        random = kafka.random
        while not world.is_quiet:
            await kafka.sleep(random.uniform(*EVERY_MS))
            where = (OWN, 0) if random.random() < 0.5 else random.choice(world.partitions)
            try:
                await self._look_up(*where)
            except (Lost, NotNowError):
                continue
        kafka.hang_up()

    async def _look_up(self, topic: str, partition: int) -> None:
        leader = await _Leader.find(self._kafka, topic, partition)
        start = await leader.offset_at(EARLIEST)
        middle = await leader.offset_at(LATEST)
        before = await leader.read(start, middle)
        times = self._times(before)
        told = [await leader.list_offset(timestamp) for timestamp in times]
        end = await leader.offset_at(LATEST)
        after = await leader.read(middle, end)
        if await leader.offset_at(EARLIEST) != start:
            return  # records went meanwhile
        self._world.counts.look_ups += len(times)
        for timestamp, found in zip(times, told, strict=True):
            if not is_right(timestamp, found, before, after):
                raise InvariantViolation(
                    "LookUpsAreRight",
                    f"{topic}-{partition} of [{start}, {middle}..{end}) by {timestamp}: {found}, "
                    f"first {first_not_older(before, timestamp)}, newest {newest(before)}",
                )

    def _times(self, records: list[Dated]) -> list[int]:
        random, now = self._kafka.random, EPOCH_MS + int(self._world.now_ms)
        times = [NEWEST, random.choice((0, now - 500, now + 86_400_000, now - 2 * 86_400_000))]
        if records:
            seen = random.choice(records).timestamp
            times += [max(0, seen), max(0, seen) + 1]
        return times


@frozen
class _Leader:
    """A partition at the leader of one epoch."""

    kafka: Kafka
    node_id: int
    epoch: int
    topic: str
    partition: int

    @classmethod
    async def find(cls, kafka: Kafka, topic: str, partition: int) -> _Leader:
        answer = await kafka.metadata([topic])
        for row in answer.topics[0].partitions:
            if row.partition_index == partition and row.leader_id >= 0:
                return cls(kafka, row.leader_id, row.leader_epoch, topic, partition)
        raise NotNowError

    async def list_offset(self, timestamp: int) -> tuple[int, int, int] | None:
        """Timestamp, offset and leader epoch; None where there is no such record."""
        row: dict[str, Any] = {
            "partition_index": self.partition,
            "current_leader_epoch": self.epoch,
            "timestamp": timestamp,
        }
        answer = await self.kafka.ask(
            self.node_id,
            ApiKey.LIST_OFFSETS,
            replica_id=-1,
            isolation_level=0,
            topics=[{"name": self.topic, "partitions": [row]}],
        )
        part = answer.topics[0].partitions[0]
        self._check(part.error_code)
        return None if part.offset < 0 else (part.timestamp, part.offset, part.leader_epoch)

    async def offset_at(self, timestamp: int) -> int:
        """The earliest or latest offset."""
        found = await self.list_offset(timestamp)
        assert found is not None, "a log has a beginning and an end"
        return found[1]

    async def read(self, start: int, end: int) -> list[Dated]:
        """When the records in `[start, end)` were written, in their order."""
        found: list[Dated] = []
        at = start
        for _ in range(FETCHES_MAX):
            if at >= end:
                return found
            data = await self._fetch(at)
            rows = [row for row in _dated(data, start) if row.start >= at]
            found += [row for row in rows if row.start < end]
            at = rows[-1].end if rows else at
        raise NotNowError

    async def _fetch(self, offset: int) -> memoryview:
        wanted = FetchPartition(
            self.partition,
            current_leader_epoch=self.epoch,
            fetch_offset=offset,
            partition_max_bytes=READ_BYTES,
        )
        request = FetchRequest(topics=[FetchTopic(self.topic, None, [wanted])])
        version = VERSIONS[ApiKey.FETCH]
        body = encode_fetch_request(version, request)
        answer = await until(self.kafka.request(self.node_id, ApiKey.FETCH, body))
        part = decode_fetch_response(version, answer).topics[0].partitions[0]
        self._check(part.error_code)
        return memoryview(b"".join(map(bytes, part.records or ())))

    def _check(self, code: int) -> None:
        if code in _NOT_NOW:
            raise NotNowError
        if code:
            raise InvariantViolation("LookUpsAreRight", f"{self}: {ErrorCode(code).name}")


def _dated(data: memoryview, start: int) -> Iterable[Dated]:
    """Records of whole batches from offset `start` on; bodies are read only where they must be."""
    for header, batch in split_batches(data):
        epoch, stamp = header.leader_epoch, header.max_timestamp
        # Who writes here gives all records of a batch one time, or the later ones later times.
        if header.timestamp_type == LOG_APPEND_TIME or header.base_timestamp == stamp:
            if header.next_offset > start:
                yield Dated(max(start, header.base_offset), header.next_offset, stamp, epoch)
            continue
        for record in read_records(batch):
            if record.offset >= start:
                yield Dated(record.offset, record.offset + 1, record.timestamp, epoch)
