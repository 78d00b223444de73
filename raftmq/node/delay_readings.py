"""Reads the logs of delay partitions into what is pending there, on each replica.

A `Reading` is one pass over the committed log of a lane, which goes on as the log grows. Whoever
leads delivers from it (`raftmq/node/delays.py`). Replicas that follow keep one as well, a moment
behind, and drop from it what notes say is done with: a million records take ten seconds of a core
to be read, and a new leader is to go on at once. What is read is committed, so it holds for any
leader; one that led before hands its reading back.

Invariants: a reading is at work in one place at a time. One whose next offset is not in the log any
more is thrown away: a cancellation may stand in what was deleted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

from attrs import define, field

from raftmq.delays.deliveries import (
    ORDINARY,
    Ended,
    Found,
    GivenUp,
    Lane,
    Settled,
    Undecided,
    read_log,
    rows_of,
)
from raftmq.delays.pending import FIRST, Pending, Row
from raftmq.delays.runs import Place
from raftmq.errors import ErrorCode, KafkaError
from raftmq.logs import structlog
from raftmq.node.cold_reads import read_cold
from raftmq.node.environment import Tasks
from raftmq.node.work_queue import RETRY_MS, WorkItem, WorkQueue
from raftmq.partition.parked import Deadlines
from raftmq.partition.partition import Partition
from raftmq.partition.ports import FileSpan
from raftmq.ports import DiskError
from raftmq.records import split_batches
from raftmq.types import Offset, RaftGroupId

logger = structlog.get_logger("raftmq.delays")

LaneKey: TypeAlias = tuple[RaftGroupId, bool]

ENTRIES_MIN: Final = 10_000
"""Pending entries that a lane may hold whatever the others do."""
READ_BYTES: Final = 64 << 10
"""Of the log at once: some milliseconds of a thread."""
CATCH_UP_S: Final = 0.005
"""Followers rest so long after each piece, about what that took: a node that begins has all its
logs to read, and records to deliver meanwhile."""
FOLLOW_MS: Final = 200.0
FOLLOW_MS_MAX: Final = 3_200.0
"""Where nothing is new, a follower looks ever less often."""


@define(eq=False, slots=True)
class Reading:
    """One pass over the log, from its start on.

    Attributes:
        pending: of what was read.
        end: the log is read up to there.
        undecided: batches of transactions whose end was not read, by producer id.
        given_up: the notes that gave up, each with the first offset of what it did.
        is_torn: only a part of what is below some offset was taken in, and no more can be.
    """

    pending: Pending
    end: Offset
    undecided: dict[int, list[int]] = field(factory=dict)
    given_up: deque[GivenUp] = field(factory=deque)
    is_torn: bool = False

    @property
    def first_needed(self) -> Offset:
        """The first offset that retention has to leave for it."""
        first = self.pending.first_offset
        offsets = [self.end, *(Offset(held[0]) for held in self.undecided.values())]
        return min(offsets if first is None else [*offsets, Offset(first)])


@define(eq=False, slots=True)
class LaneItem(WorkItem):
    """A lane of a delay partition that has a replica here.

    Attributes:
        reading: None: there is none yet.
        ahead: another pass, begun while less is held than was let go of, to go on without a pause.
    """

    partition: Partition
    lane: Lane = ORDINARY
    reading: Reading | None = field(default=None, kw_only=True)
    ahead: Reading | None = field(default=None, kw_only=True)

    @property
    def key(self) -> LaneKey:
        """What names it among those of its node."""
        return self.partition.group, self.lane.is_dead

    @property
    def held_count(self) -> int:
        """Entries in memory."""
        readings = (self.reading, self.ahead)
        return sum(len(reading.pending) for reading in readings if reading is not None)


def lanes_of(partition: Partition) -> list[Lane]:
    """The lanes of a delay partition: two where there is a topic for what is dead, else one."""
    settings = partition.settings
    if not settings.dead_to:
        return [ORDINARY]
    return [Lane(settings.retry, is_dead, has_dead=True) for is_dead in (False, True)]


class LogReader:
    """Reads committed batches, and what they mean to a lane."""

    def __init__(self, tasks: Tasks, room_of: Callable[[LaneItem], int]) -> None:
        """`room_of` says how many entries a lane may hold."""
        self._tasks = tasks
        self._room_of = room_of

    def begin(self, item: LaneItem, cursor: Place = FIRST) -> Reading:
        """A pass that has read nothing."""
        start = item.partition.replica.log_start_offset
        return Reading(Pending(cursor, entries_max=self._room_of(item)), start)

    async def read_on(self, item: LaneItem, reading: Reading, bytes_max: int | None = None) -> bool:
        """Read all that is committed by now, or so many bytes of it; False when some of that cannot
        be read yet.

        Raises:
            KafkaError: it cannot be read now.
        """
        assert not reading.is_torn, "it is thrown away"
        partition, left = item.partition, bytes_max
        end = _committed_end(partition)
        while reading.end < end and (left is None or left > 0):
            spans = await self.spans(partition, reading.end, READ_BYTES)
            if not spans:
                # Committed by others, it may not be in a file here yet. Or no record is left.
                if partition.readable_end > reading.end:
                    return False
                reading.end = end
            for span in spans:
                found = await self._tasks.in_thread(partial(_read, span, reading.end, item.lane))
                reading.is_torn = True
                for one in found:
                    if isinstance(one, Row):
                        reading.pending.read(one)
                    else:
                        await self._take_in(item, reading, one)
                reading.end, reading.is_torn = Offset(span.end_offset), False
                left = None if left is None else left - span.size
        return True

    def allow(self, item: LaneItem, reading: Reading) -> None:
        """Hold a reading to the room that others leave, where it takes any."""
        if len(reading.pending) > ENTRIES_MIN // 2:
            reading.pending.allow(self._room_of(item))

    async def read_ahead(self, item: LaneItem, reading: Reading) -> None:
        """While little is held of much, go on with another pass, a piece at each step; when it has
        come as far as the one before it takes its place, and nothing due waits for the log."""
        if item.ahead is None or item.ahead.is_torn:
            if not reading.pending.is_low:
                return
            item.ahead = self.begin(item, reading.pending.cursor)
        ahead = item.ahead
        await self.read_on(item, ahead, READ_BYTES)
        if ahead.end >= reading.end and item.ahead is ahead:
            # It may have read newer notes.
            ahead.pending.settle(max(ahead.pending.cursor, reading.pending.cursor))
            item.reading, item.ahead = ahead, None

    async def _take_in(
        self, item: LaneItem, reading: Reading, found: Undecided | Ended | GivenUp | Settled
    ) -> None:
        """What the log holds beside records that are pending by themselves."""
        if isinstance(found, Settled):
            if found.cursor > reading.pending.cursor:
                reading.pending.settle(found.cursor)
        elif isinstance(found, GivenUp):
            reading.given_up.append(found)
        elif isinstance(found, Undecided):
            reading.undecided.setdefault(found.producer_id, []).append(found.offset)
        else:
            offsets = reading.undecided.get(found.producer_id, [])
            for offset in offsets if found.is_commit else ():
                for span in await self.spans(item.partition, offset, 1):
                    rows = partial(_rows_in, span, offset, item.lane, found.at_ms)
                    for row in await self._tasks.in_thread(rows):
                        reading.pending.read(row)
            reading.undecided.pop(found.producer_id, None)

    async def spans(self, partition: Partition, offset: int, bytes_max: int) -> list[FileSpan]:
        """Committed batches from an offset on; none in a hole.

        Raises:
            KafkaError: they cannot be read now.
        """
        read = partial(partition.read, Offset(offset), bytes_max, may_wait=False, may_follow=True)
        result = await read_cold(self._tasks, partition, read)
        if result.code is not ErrorCode.NONE:
            raise KafkaError(code=result.code)
        return list(result.spans)


@define(eq=False, slots=True)
class Followed(LaneItem):
    """A lane whose reading is kept for the next leader.

    Attributes:
        is_at_work: the reading grows just now.
        pause_ms: how long until the log is looked at again.
    """

    is_at_work: bool = field(default=False, init=False)
    pause_ms: float = field(default=FOLLOW_MS, init=False)


class Followers:
    """The readings of all lanes that have a replica here, but for those that lead."""

    def __init__(
        self,
        tasks: Tasks,
        deadlines: Deadlines,
        reader: LogReader,
        must_wait: Callable[[], bool],
    ) -> None:
        """`must_wait`: lanes that this node leads are to be read first."""
        self._tasks = tasks
        self._reader = reader
        self._must_wait = must_wait
        self._items: dict[LaneKey, Followed] = {}
        self._unread: dict[Followed, None] = {}
        """Those whose reading was not at the end of its log yet."""
        self._queue: WorkQueue[Followed] = WorkQueue(tasks, deadlines)

    @property
    def count(self) -> int:
        """How many lanes have a replica here."""
        return len(self._items)

    @property
    def held_count(self) -> int:
        """Entries in memory."""
        return sum(item.held_count for item in self._items.values())

    @property
    def is_reading(self) -> bool:
        """True while a lane that another node leads is not read to the end of its log yet: if this
        node led it, what is due would wait for that."""
        return any(not item.partition.is_leader for item in self._unread)

    def opened(self, partition: Partition) -> None:
        """A replica of a delay partition is there."""
        for lane in lanes_of(partition):
            item = Followed(partition, lane)
            former = self._items.get(item.key)
            if former is not None:
                self._unread.pop(former, None)
            self._items[item.key] = item
            self._set_unread(item)
            self._queue.add(item)

    def _set_unread(self, item: Followed) -> None:
        """A lane is to be read to its end: until then others should lead the partition, where they
        can."""
        self._unread[item] = None
        item.partition.replica.stand_last(True)

    def _set_read(self, item: Followed) -> None:
        """A lane was read to its end."""
        self._unread.pop(item, None)
        is_unread = any(other.partition is item.partition for other in self._unread)
        item.partition.replica.stand_last(is_unread)

    def closed(self, partition: Partition) -> None:
        """It is not there any more."""
        for is_dead in (False, True):
            item = self._items.get((partition.group, is_dead))
            if item is not None and item.partition is partition:
                del self._items[item.key]
                self._unread.pop(item, None)
                item.wake()

    def is_busy(self, key: LaneKey) -> bool:
        """True while the reading of a lane cannot be taken: ask again soon."""
        item = self._items.get(key)
        return item is not None and item.is_at_work

    def take(self, led: LaneItem, cursor: Place) -> Reading | None:
        """The reading of a lane that this node leads now, whose last note says `cursor`; None: the
        log is to be read from its start."""
        item = self._items.get(led.key)
        if item is None or item.partition is not led.partition or item.reading is None:
            return None
        assert not item.is_at_work, "it is waited for"
        reading, item.reading, item.ahead = item.reading, None, None
        self._set_unread(item)
        if not _is_usable(item, reading) or reading.pending.cursor > cursor:
            return None
        reading.pending.settle(cursor)
        return reading

    def give_back(self, led: LaneItem) -> None:
        """This node does not lead a lane any more, or has to find out where it stands."""
        item, reading = self._items.get(led.key), led.reading
        led.reading = led.ahead = None
        if reading is None or item is None or item.partition is not led.partition:
            return
        if not item.is_at_work:
            item.reading = reading
            item.wake()

    async def run(self) -> None:
        """Follow until cancelled."""
        await self._queue.work(self._turn)

    async def _turn(self, item: Followed) -> float | None:
        if self._items.get(item.key) is not item:
            return None
        if item.partition.is_leader:
            return FOLLOW_MS_MAX
        if self._must_wait():
            return FOLLOW_MS
        item.is_at_work = True
        try:
            pause_ms = await self._follow(item)
        except (KafkaError, DiskError) as error:
            return self._failed(item, error)
        finally:
            item.is_at_work = False
        if not pause_ms:
            await self._tasks.sleep(CATCH_UP_S)
        return pause_ms

    def _failed(self, item: Followed, error: KafkaError | DiskError) -> float:
        """What was read stays; how long to wait."""
        if isinstance(error, KafkaError) and error.code is ErrorCode.NOT_LEADER_OR_FOLLOWER:
            return FOLLOW_MS  # there is no leader, and this may be the next one
        why = str(error) or type(error).__name__
        if item.trouble != why:
            name = item.partition.name
            logger.info(
                "a delay partition is not followed",
                topic=name.topic,
                partition=name.partition,
                why=why,
            )
        return item.failed(why)

    async def _follow(self, item: Followed) -> float:
        """Read a piece; how long to wait, 0: there is more."""
        if item.reading is None or not _is_usable(item, item.reading):
            item.reading, item.ahead = self._reader.begin(item), None
            self._set_unread(item)
        reading, before = item.reading, item.reading.end
        self._reader.allow(item, reading)
        if not await self._reader.read_on(item, reading, READ_BYTES):
            return RETRY_MS
        await self._reader.read_ahead(item, reading)
        item.succeeded()
        if item.ahead is not None or _committed_end(item.partition) > reading.end:
            item.pause_ms = FOLLOW_MS
            return 0.0
        self._set_read(item)
        item.pause_ms = FOLLOW_MS if reading.end > before else min(2 * item.pause_ms, FOLLOW_MS_MAX)
        return item.pause_ms


def _is_usable(item: LaneItem, reading: Reading) -> bool:
    """True while the log goes on where this was read to."""
    replica = item.partition.replica
    return not reading.is_torn and replica.log_start_offset <= reading.end <= replica.log_end_offset


def _committed_end(partition: Partition) -> Offset:
    """What is read is on the disk of this replica, too."""
    replica = partition.replica
    if replica.is_leader:
        return replica.high_watermark
    return min(replica.high_watermark, replica.log.flushed_end_offset)


def bytes_of(span: FileSpan) -> bytes:
    """A span of a log, read from its file."""
    return span.file.pread(span.size, span.position)


def _read(span: FileSpan, start: int, lane: Lane) -> list[Found]:
    """What a span of the log means to a lane."""
    batches = split_batches(bytes_of(span))
    return [found for _, batch in batches for found in read_log(batch, start, lane)]


def _rows_in(span: FileSpan, start: int, lane: Lane, committed_ms: int) -> list[Row]:
    """What the records of the first batch of a span ask for, of a transaction that is committed."""
    _, batch = next(iter(split_batches(bytes_of(span))))
    return list(rows_of(batch, start, lane, committed_ms))
