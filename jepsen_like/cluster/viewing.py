"""Views with conditions: readers of a view and of its base, who compare what they are given.

    ViewEqualsFilter   what a view gave up to an offset is what the condition says of the committed
                       records of its base up to there: none is missing, none is too many
    LatestNeverFalls   the end of a view is behind everything that it gave, and never lower than
                       it was told before, whoever leads

Records have a tag that follows from their value, so that some batches match wholly and others in
part. One view is over a topic that anybody writes to, another over one that transactions write to.
Whoever is told that a position is out of range goes on at the earliest one, as consumers do; what
is passed over then is not compared.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from attrs import define, field, frozen

from jepsen_like.cluster.admins import create_in_turn, topic_row
from jepsen_like.cluster.committed_fetch import committed_rows
from jepsen_like.cluster.fetch_session import FETCH_BYTES, WAIT_MS
from jepsen_like.cluster.kafka import STALE_LEADER, VERSIONS, Kafka, Lost
from jepsen_like.cluster.producers import tag_of
from jepsen_like.cluster.tasks import until
from jepsen_like.cluster.transactional import PARTITIONS, TOPIC
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

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

LATEST: Final = -1
EARLIEST: Final = -2


@frozen
class ViewOf:
    """One view, and the tags of which it has records."""

    name: str
    base: str
    where: str
    tags: frozenset[bytes]

    def has(self, value: int) -> bool:
        """True where the record of that value matches."""
        return tag_of(value) in self.tags


PLAIN: Final = ViewOf("v0", "t0", "tag = 'b'", frozenset({b"b"}))
COMMITTED: Final = ViewOf(
    "v1", TOPIC, "not tag in ('a') and tag is not null", frozenset({b"b", b"c"})
)


def views_of(world: ClusterWorld) -> list[tuple[ViewOf, int]]:
    """The views of a run, each with its number of partitions."""
    if not world.options.views:
        return []
    found = [(PLAIN, world.options.partitions)]
    return [*found, (COMMITTED, PARTITIONS)] if world.options.transactional else found


async def create_views(world: ClusterWorld, process: int) -> None:
    """Create them as any client does."""
    rows = []
    for view, _ in views_of(world):
        configs = {"raftmq.view.of": view.base, "raftmq.view.where": view.where}
        rows.append(topic_row(view.name, -1, configs.items(), replicas=-1))
    await create_in_turn(world, process, rows)


@define(eq=False)
class Stand:
    """How far a topic was read.

    Attributes:
        rows: (offset, value) of the records, in order.
        holes: ranges that were passed over without being read.
    """

    topic: str
    position: int = 0
    rows: list[tuple[int, int]] = field(factory=list)
    holes: list[tuple[int, int]] = field(factory=list)
    is_at_end: bool = False

    def go_to(self, offset: int) -> None:
        """Go on at the earliest position."""
        if offset > self.position:
            self.holes.append((self.position, offset))
            self.position = offset

    def has_passed_over(self, offset: int) -> bool:
        return any(start <= offset < end for start, end in self.holes)


class ViewReader:
    """One process that reads one partition of a view and of its base, and compares."""

    def __init__(self, world: ClusterWorld, process: int, view: ViewOf, partition: int) -> None:
        self._world = world
        self._kafka = Kafka(world, process)
        self._view = view
        self._partition = partition
        self._base = Stand(view.base)
        self._shown = Stand(view.name)
        self._compared = 0
        self._latest = 0

    async def run(self) -> None:
        """Read until everything is written and was read."""
        world, kafka = self._world, self._kafka
        while not (world.is_written and self._base.is_at_end and self._has_all()):
            draw = kafka.random.random()
            if draw < 0.1:
                await self._ask_latest()
            elif draw < 0.5:
                await self._read(self._base)
            else:
                await self._read(self._shown)
            self._compare()
            if kafka.random.random() < 0.5:
                await kafka.sleep(kafka.random.uniform(1.0, 30.0))
        while not await self._ask_latest():
            await kafka.pause()
        kafka.hang_up()

    def _told(self, text: str) -> str:
        return f"{self._view.name}-{self._partition}: {text}"

    def _has_all(self) -> bool:
        """True when the view gave the last match of its base, or passed it over."""
        matches = [offset for offset, value in self._base.rows if self._view.has(value)]
        return not matches or self._shown.position > matches[-1]

    def _compare(self) -> None:
        """Compare both, up to where both were read."""
        end = min(self._base.position, self._shown.position)
        if end <= self._compared:
            return
        start, self._compared = self._compared, end
        if told := difference(self._view, self._base, self._shown, start, end):
            raise InvariantViolation("ViewEqualsFilter", self._told(told))
        if _between(self._shown, start, end):
            self._world.had_effect("a view gave records")

    async def _read(self, stand: Stand) -> None:
        kafka, version = self._kafka, VERSIONS[ApiKey.FETCH]
        wanted = FetchPartition(
            self._partition, fetch_offset=stand.position, partition_max_bytes=FETCH_BYTES
        )
        is_shown = stand is self._shown
        isolation = kafka.random.randrange(2) if is_shown else 1
        request = FetchRequest(
            max_wait_ms=WAIT_MS,
            isolation_level=isolation,
            topics=[FetchTopic(stand.topic, None, [wanted])],
        )
        try:
            leader = await kafka.leader(stand.topic, self._partition)
            body = encode_fetch_request(version, request)
            answer = await until(kafka.request(leader, ApiKey.FETCH, body))
        except Lost:
            kafka.leaders.pop((stand.topic, self._partition), None)
            await kafka.pause()
            return
        part = decode_fetch_response(version, answer).topics[0].partitions[0]
        if part.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
            await self._begin_anew(stand)
        elif part.error_code:
            assert part.error_code in STALE_LEADER, ErrorCode(part.error_code).name
            kafka.leaders.pop((stand.topic, self._partition), None)
            await kafka.pause()
        else:
            self._take(stand, part, is_shown=is_shown)

    def _take(self, stand: Stand, part: FetchPartitionResponse, *, is_shown: bool) -> None:
        position = stand.position
        if is_shown and part.aborted_transactions:
            raise InvariantViolation("ViewEqualsFilter", self._told("an aborted transaction"))
        rows, end = committed_rows(f"{stand.topic}-{self._partition}", position, part)
        for offset, found in rows:
            value = int(found)
            if stand.rows and offset <= stand.rows[-1][0]:
                told = self._told(f"{offset} after {stand.rows[-1][0]}")
                raise InvariantViolation("ViewEqualsFilter", told)
            if is_shown and not self._view.has(value):
                raise InvariantViolation("ViewEqualsFilter", self._told(f"{value} at {offset}"))
            stand.rows.append((offset, value))
        stand.position = max(position, end)
        is_empty = end == position
        stand.is_at_end = self._world.is_written and is_empty and end >= part.high_watermark
        if is_shown and end > position and not rows:
            raise InvariantViolation("ViewEqualsFilter", self._told("a batch without a match"))

    async def _begin_anew(self, stand: Stand) -> None:
        earliest = await self._list(stand.topic, EARLIEST)
        if earliest is not None:
            stand.go_to(earliest)

    async def _ask_latest(self) -> bool:
        """Ask where the view ends; False where nobody says."""
        before = self._latest
        if self._shown.rows:
            before = max(before, self._shown.rows[-1][0] + 1)
        latest = await self._list(self._view.name, LATEST)
        if latest is None:
            return False
        if latest < before:
            raise InvariantViolation("LatestNeverFalls", self._told(f"{latest} after {before}"))
        self._latest = latest
        return True

    async def _list(self, topic: str, timestamp: int) -> int | None:
        kafka = self._kafka
        row = {
            "partition_index": self._partition,
            "current_leader_epoch": -1,
            "timestamp": timestamp,
        }
        try:
            answer = await kafka.ask(
                await kafka.leader(topic, self._partition),
                ApiKey.LIST_OFFSETS,
                replica_id=-1,
                isolation_level=kafka.random.randrange(2),
                topics=[{"name": topic, "partitions": [row]}],
            )
        except Lost:
            kafka.leaders.pop((topic, self._partition), None)
            await kafka.pause()
            return None
        part = answer.topics[0].partitions[0]
        if part.error_code:
            assert part.error_code in STALE_LEADER, ErrorCode(part.error_code).name
            kafka.leaders.pop((topic, self._partition), None)
            await kafka.pause()
            return None
        return int(part.offset)


def difference(view: ViewOf, base: Stand, shown: Stand, start: int, end: int) -> str:
    """How what a view gave in `[start, end)` differs from what its base has there, where both were
    read; "" where it does not."""
    expected = {
        (offset, value)
        for offset, value in _between(base, start, end).items()
        if view.has(value) and not shown.has_passed_over(offset)
    }
    given = {
        (offset, value)
        for offset, value in _between(shown, start, end).items()
        if not base.has_passed_over(offset)
    }
    if expected == given:
        return ""
    missing, extra = sorted(expected - given), sorted(given - expected)
    return f"in [{start}, {end}) {missing} are missing, {extra} too many"


def _between(stand: Stand, start: int, end: int) -> dict[int, int]:
    """Its rows in `[start, end)`."""
    return dict(stand.rows[bisect_left(stand.rows, (start,)) : bisect_left(stand.rows, (end,))])
