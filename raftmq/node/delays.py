"""Delivers what is due: the task of each delay partition that this node leads.

A partition that is led goes through steps: find the last note in its log, and send that delivery
again, for nobody knows whether it arrived; read the committed log into `Pending`; when something is
due, append the note of the next delivery, and once that is committed send the batch to the leader
of the target, until it is taken. A few workers do the steps of all partitions; one partition is
never at two of them. `raftmq/delays` says what a note is, and why nothing leaves twice.

Invariants: nothing is sent before its note is committed, nothing noted before the delivery before
it is known to be committed in the target. A note's cursor is never above the append time of a
record that was not read, and no later record is stamped below the note; so no record is passed
over. What the log holds committed at the time by which something is judged to be due is read first:
a cancellation that was acknowledged by then holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from attrs import define, field

from raftmq.controller.control_plane import ControlPlane
from raftmq.delays.deliveries import (
    BYTES_MAX,
    RECORDS_MAX,
    Delivery,
    Lane,
    again_for,
    delivered_batch,
    give_up,
    give_up_behind,
    note_batch,
    nothing_after,
    plan,
    read_note,
    record_at,
    record_in,
)
from raftmq.delays.pending import ENTRY_BYTES, FIRST
from raftmq.delays.runs import Place
from raftmq.errors import CorruptBatchError, ErrorCode, KafkaError
from raftmq.logs import structlog
from raftmq.metadata.config_keys import DELIVERS_TO
from raftmq.metadata.image import LEVEL_OF_CONDITIONS, LEVEL_OF_DEAD_TOPICS, TopicImage
from raftmq.node.data_plane import DataPlane
from raftmq.node.delay_readings import (
    ENTRIES_MIN,
    Followers,
    LaneItem,
    LaneKey,
    LogReader,
    Reading,
    bytes_of,
    lanes_of,
)
from raftmq.node.environment import Tasks
from raftmq.node.work_queue import RETRY_MS, WorkQueue
from raftmq.partition.parked import Deadlines
from raftmq.partition.partition import Partition
from raftmq.partition.ports import AppendResult, FileSpan
from raftmq.partition.registry import PartitionRegistry
from raftmq.ports import DiskError
from raftmq.promise import Promise
from raftmq.records import (
    HEADER_SIZE,
    SEQUENCE_MODULUS,
    Record,
    parse_header,
    read_varint,
)
from raftmq.replication.clocks import AgreedTime
from raftmq.types import LeaderEpoch, Offset, RaftGroupId, TopicId

logger = structlog.get_logger("raftmq.delays")

WORKERS: Final = 8
MEMORY_BYTES: Final = 128 << 20
RECORD_BYTES: Final = 1 << 10
"""So much is read for a record whose size is not known; of a larger one a second time."""
READ_TURN: Final = 25
"""Batches that are looked up in one turn of the loop."""
FOLLOWER_ENDS_MS: Final = 5.0
CATCH_UP_BYTES: Final = 1 << 20
"""So much of a log is read before another one may have its turn, which has less left."""
NOTE_AGAIN_OFFSETS: Final = 2_000
SEND_TIMEOUT_MS: Final = 2_000
GONE_MS_MIN: Final = 60_000
"""So long has a leader itself seen that a target is gone before it gives up."""
LOOK_MS_MAX: Final = 1_000.0
"""The agreed clock may move against this node's: it is looked at so often."""


@define(eq=False, slots=True)
class Led(LaneItem):
    """A lane of a delay partition under one leadership of this node.

    Attributes:
        reading: None: the last note is still to be found.
        before: the last delivery that is noted.
        is_owed: `before` is not known to be taken by its target.
        batch: what is sent for it, once it was read.
        number: the sequence of the next note.
        note_offset: where the last note is.
        gone_ms: since when this leader sees that the target is gone; None: it is there.
        refused_ms: since when it does not take what this leader sends it; None: it does.
    """

    epoch: LeaderEpoch = field(kw_only=True)
    before: Delivery | None = None
    is_owed: bool = False
    batch: bytearray | None = None
    number: int = 0
    note_offset: int = -1
    gone_ms: int | None = None
    refused_ms: int | None = None
    late_ms: int = 0

    def woken(self) -> None:
        """The partition has something new (`parked.FetchWaiter`)."""
        self.wake()

    @property
    def is_current(self) -> bool:
        """True while this leadership lasts."""
        return self.partition.is_leader and self.partition.leader_epoch == self.epoch

    @property
    def target(self) -> str:
        """The topic that it delivers to."""
        settings = self.partition.settings
        return settings.dead_to if self.lane.is_dead else settings.delivers_to


class Delays:
    """The delay partitions that this node leads.

    Attributes:
        note_again_offsets: so far back may a note be before another one stands in for it.
        entries_max: so many entries of a lane are held; None: as many as its share of the node's.
        delivered_count: records that targets have taken.
        sends_failed_count: batches that they had not, at the first or a later attempt.
        given_up_count: records that are dead because their target was gone.
    """

    def __init__(
        self,
        control: ControlPlane,
        tasks: Tasks,
        deadlines: Deadlines,
        agreed: AgreedTime,
        find: Callable[[TopicId, int], Partition | None],
        touch: Callable[[RaftGroupId], None],
        memory_bytes_max: int = MEMORY_BYTES,
    ) -> None:
        """`find` gives this node's replica of a partition, `touch` ends a group's quiescence."""
        self._control = control
        self._engine = control.engine
        self._tasks = tasks
        self._deadlines = deadlines
        self._agreed = agreed
        self._now_ms = agreed.reached_ms
        self._touch = touch
        self._find = find
        self._led: dict[LaneKey, Led] = {}
        self._behind: dict[Led, None] = {}
        """Those whose reading was not at the end of its log yet."""
        self._queue: WorkQueue[Led] = WorkQueue(tasks, deadlines)
        self._reader = LogReader(tasks, self._room_of)
        self.followers = Followers(tasks, deadlines, self._reader, lambda: self.is_reading)
        self.note_again_offsets = NOTE_AGAIN_OFFSETS
        self.entries_max: int | None = None
        self._node_entries = memory_bytes_max // ENTRY_BYTES
        self.delivered_count = 0
        self.sends_failed_count = 0
        self.given_up_count = 0

    @classmethod
    def on(
        cls,
        plane: DataPlane,
        control: ControlPlane,
        deadlines: Deadlines,
        agreed: AgreedTime,
        registry: PartitionRegistry,
    ) -> Delays:
        """Those of a node."""
        touch, memory = plane.multiraft.touch, plane.config.delay_memory_bytes_max
        return cls(control, plane.tasks, deadlines, agreed, registry.by_id, touch, memory)

    # ---- what others tell and ask ----

    def opened(self, partition: Partition) -> None:
        """A replica is there."""
        if partition.settings.delivers_to:
            self.followers.opened(partition)

    def led(self, partition: Partition) -> None:
        """This node leads a partition; called again and again."""
        if partition.settings.delivers_to:
            for lane in lanes_of(partition):
                self._lead(partition, lane)

    def _lead(self, partition: Partition, lane: Lane) -> None:
        led = Led(partition, lane, epoch=partition.leader_epoch)
        known = self._led.get(led.key)
        if known is not None:
            if known.epoch == partition.leader_epoch and known.partition is partition:
                return
            known.partition.fetches.unpark(known)
            self._behind.pop(known, None)
        self._led[led.key] = led
        self._behind[led] = None
        partition.fetches.park(led)
        self._queue.add(led)

    @property
    def pending_count(self) -> int:
        """Records that wait here, as far as the logs are read."""
        readings = (led.reading for led in self._led.values())
        return sum(reading.pending.count for reading in readings if reading is not None)

    @property
    def held_count(self) -> int:
        """Entries in memory, of what this node leads and follows."""
        return sum(led.held_count for led in self._led.values()) + self.followers.held_count

    @property
    def is_reading(self) -> bool:
        """True while a lane that is led here is not read to the end of its log yet."""
        return any(map(_catches_up, self._behind))

    @property
    def blocked_count(self) -> int:
        """Partitions that cannot deliver."""
        return sum(bool(led.trouble) for led in self._led.values())

    @property
    def late_ms(self) -> int:
        """How late the latest of the last deliveries was."""
        return max((led.late_ms for led in self._led.values()), default=0)

    def rows(self, topic: str | None = None) -> list[dict[str, Any]]:
        """What each lane that is led here does, for people; of one topic, where it is named."""
        return [
            {
                "topic": led.partition.name.topic,
                "partition": led.partition.index,
                "to": led.target,
                "is_dead": led.lane.is_dead,
                "pending": None if (reading := led.reading) is None else reading.pending.count,
                "next_due_ms": None if reading is None else reading.pending.next_due_ms,
                "late_ms": led.late_ms,
                "trouble": led.trouble,
            }
            for led in self._led.values()
            if led.is_current and topic in (None, led.partition.name.topic)
        ]

    def kept_from(self, partition: Partition) -> Offset | None:
        """The first offset that retention has to leave; None: not known yet, nothing may go."""
        needed = [self._needed_from(partition, lane) for lane in lanes_of(partition)]
        known = [offset for offset in needed if offset is not None]
        return min(known) if len(known) == len(needed) else None

    def _needed_from(self, partition: Partition, lane: Lane) -> Offset | None:
        led = self._led.get((partition.group, lane.is_dead))
        if led is None or not led.is_current or led.reading is None:
            return None
        needed = [led.reading.first_needed]
        if led.ahead is not None:
            needed.append(led.ahead.first_needed)
        if led.note_offset >= 0:
            needed.append(Offset(led.note_offset))
        if led.before is not None:
            # A later leader sends it again, since nothing in the log says that it arrived.
            needed += map(Offset, led.before.offsets + led.before.given_up)
        dead = self._led.get((partition.group, True))
        dead_end = -1 if dead is None or dead.reading is None else dead.reading.end
        given_up = led.reading.given_up
        while given_up and dead_end > given_up[0].offset:
            given_up.popleft()  # they are pending there
        needed += [Offset(note.first) for note in given_up]
        return Offset(min(needed))

    def take(self, topic_id: TopicId, index: int, batch: bytes) -> Promise[ErrorCode]:
        """Append a delivery to a partition that this node leads; NONE once it is committed."""
        partition = self._find(topic_id, index)
        taken: Promise[ErrorCode] = Promise()
        if partition is None:
            taken.resolve(ErrorCode.NOT_LEADER_OR_FOLLOWER)
            return taken
        result = partition.append_own(bytearray(batch), SEND_TIMEOUT_MS)
        if isinstance(result, AppendResult):
            taken.resolve(result.code)
        else:
            result.when_done(lambda done: taken.resolve(done.result().code))
        return taken

    # ---- workers ----

    async def run(self) -> None:
        """Deliver until cancelled."""
        workers = [partial(self._queue.work, self._turn)] * WORKERS
        await self._tasks.together([*workers, self.followers.run])

    async def _turn(self, led: Led) -> float | None:
        try:
            return await self._step(led)
        except (KafkaError, DiskError) as error:
            return self._failed(led, str(error) or type(error).__name__)

    def _failed(self, led: Led, why: str) -> float:
        """Remember why it does not go on; how long to wait."""
        if led.is_current and led.trouble != why:
            name = led.partition.name
            logger.warning("a delivery waits", topic=name.topic, partition=name.partition, why=why)
        return led.failed(why)

    # ---- one partition ----

    async def _step(self, led: Led) -> float | None:
        """Do what comes next; when to look again in milliseconds, None: never."""
        if self._led.get(led.key) is not led:
            self._behind.pop(led, None)
            self.followers.give_back(led)
            return None
        if not led.is_current:
            led.partition.fetches.unpark(led)
            del self._led[led.key]
            self._behind.pop(led, None)
            self.followers.give_back(led)
            return None
        if not self._agreed.is_sure:
            # Clocks come with the replies to heartbeats, and a quiescent group has none.
            self._touch(led.partition.group)
            self._agreed.seek()
        # Before the log is read: what was acknowledged by then counts.
        now_ms = self._now_ms()
        if not led.partition.knows_producers:
            return RETRY_MS
        if led.reading is None:
            return await self._find_note(led)
        if led.is_owed:
            pause_ms = await self._send(led)
            if pause_ms and now_ms is not None and self._refuses_for_long(led, now_ms):
                await self._give_up_behind(led, now_ms)
            return pause_ms
        wait_ms = await self._read(led, led.reading)
        if wait_ms is not None:
            return wait_ms
        if now_ms is None:
            return RETRY_MS / 4  # it comes with the first answers of other replicas
        return await self._deliver(led, now_ms)

    async def _read(self, led: Led, reading: Reading) -> float | None:
        """Read all that is committed by now; how long to wait where that cannot be, else None."""
        if reading.is_torn:
            self._read_anew(led, reading.pending.cursor)
            return 0
        self._reader.allow(led, reading)
        if led in self._behind:
            return await self._catch_up(led, reading)
        if not await self._reader.read_on(led, reading):
            return RETRY_MS / 4
        await self._reader.read_ahead(led, reading)
        if led.reading is not None and led.reading.pending.is_exhausted:
            self._read_anew(led, led.reading.pending.cursor)
            return 0
        return None

    async def _catch_up(self, led: Led, reading: Reading) -> float:
        """Read a piece of what was in the log before; the lane that has least left goes first, so
        that most of them deliver soon."""
        left = _left(led)
        if any(_left(other) < left for other in self._behind if _catches_up(other)):
            return LOOK_MS_MAX
        end = led.partition.replica.high_watermark
        if await self._reader.read_on(led, reading, CATCH_UP_BYTES) and reading.end < end:
            return 0
        self._behind.pop(led, None)
        following = min(filter(_catches_up, self._behind), key=_left, default=None)
        if following is not None:
            following.wake()
        return 0

    async def _find_note(self, led: Led) -> float:
        partition = led.partition
        known = partition.producers.get(led.lane.note_producer_id)
        cursor = FIRST
        if known is not None:
            offset = known.batches[-1].base_offset
            if partition.replica.high_watermark <= offset:
                return RETRY_MS / 4  # it may still be cut off
            spans = await self._reader.spans(partition, offset, 1)
            if not spans:
                return RETRY_MS / 4
            data = await self._tasks.in_thread(partial(bytes_of, spans[0]))
            led.before, led.note_offset = read_note(data), offset
            led.number = (known.last_sequence + 1) % SEQUENCE_MODULUS
            led.is_owed, led.batch = bool(led.before.offsets), None
            cursor = led.before.cursor
        if self.followers.is_busy(led.key):
            return FOLLOWER_ENDS_MS
        if led.is_current:
            led.reading = self.followers.take(led, cursor) or self._reader.begin(led, cursor)
        return 0

    def _read_anew(self, led: Led, cursor: Place) -> None:
        led.reading, led.ahead = self._reader.begin(led, cursor), None
        self._behind[led] = None

    def _room_of(self, item: LaneItem) -> int:
        """How many entries a lane may hold: what others leave of the node's, its share at least."""
        if self.entries_max is not None:
            return self.entries_max
        share = self._node_entries // max(1, len(self._led), self.followers.count)
        return max(ENTRIES_MIN, share, self._node_entries - self.held_count + item.held_count)

    async def _deliver(self, led: Led, now_ms: int) -> float | None:
        """Note what is due, and go on to send it."""
        partition, reading = led.partition, led.reading
        assert reading is not None, "the last note comes first"
        pending = reading.pending
        unread_ms = self._first_unread_ms(led)
        at_ms = now_ms if unread_ms is None else min(now_ms, unread_ms)
        places = pending.due(at_ms, RECORDS_MAX)
        if not places:
            led.late_ms = 0
            if led.before is not None and reading.end - led.note_offset > self.note_again_offsets:
                return await self._note_nothing(led, led.before)
            return self._rest(led, now_ms)
        if self._has_given_up(led, places[-1], now_ms):
            return await self._give_up(led, places)
        topic = self._target(led.target)
        wanted = [(place.offset, pending.position_of(place.offset)) for place in places]
        records = _fitting(await self._records(led, wanted))
        places = places[: len(records)]
        stamp_ms = self._now_ms()
        unread_ms = self._first_unread_ms(led)
        if not led.is_current or stamp_ms is None:
            return 0
        if unread_ms is not None and unread_ms < places[-1].due_ms:
            return 0  # it was appended meanwhile, and is to be read first
        index = partition.index % len(topic.partitions)
        delivery = plan(led.before, topic.topic_id, index, places, max(now_ms, stamp_ms))
        if not await self._append_note(led, delivery, stamp_ms):
            return RETRY_MS
        led.late_ms = max(0, now_ms - places[0].due_ms)
        led.batch = _batch_of(led, delivery, records)
        pending.settle(delivery.cursor)
        return 0

    def _has_given_up(self, led: Led, place: Place, now_ms: int) -> bool:
        """True when the target is gone for so long that what is due there is dead instead."""
        topic = self._engine.image.topics.get(led.target)
        if topic is not None and not topic.configs.get(DELIVERS_TO):
            led.gone_ms = None
            return False
        led.gone_ms = now_ms if led.gone_ms is None else led.gone_ms
        limit_ms = led.partition.settings.giveup_ms
        return (
            led.lane.has_dead
            and not led.lane.is_dead
            and self._engine.image.level >= LEVEL_OF_CONDITIONS
            and now_ms - place.due_ms >= limit_ms
            and now_ms - led.gone_ms >= min(limit_ms, GONE_MS_MIN)
        )

    def _refuses_for_long(self, led: Led, now_ms: int) -> bool:
        """True when the target has not taken what it is sent for so long that what waits behind
        that, and was never sent, is dead once it is as late."""
        return (
            led.is_owed
            and led.is_current
            and led.lane.has_dead
            and not led.lane.is_dead
            and self._engine.image.level >= LEVEL_OF_DEAD_TOPICS
            and led.refused_ms is not None
            and now_ms - led.refused_ms >= min(led.partition.settings.giveup_ms, GONE_MS_MIN)
        )

    async def _give_up_behind(self, led: Led, now_ms: int) -> None:
        """Note that what is so late is dead, but for what is owed: that may have arrived."""
        if led.reading is None or await self._read(led, led.reading) is not None:
            return
        late_ms = now_ms - led.partition.settings.giveup_ms
        unread_ms = self._first_unread_ms(led)
        at_ms = late_ms if unread_ms is None else min(late_ms, unread_ms)
        places = led.reading.pending.due(at_ms, RECORDS_MAX)
        if places:
            await self._give_up(led, places, is_behind=True)

    async def _give_up(self, led: Led, places: list[Place], *, is_behind: bool = False) -> float:
        """Note that these are dead: `read_log` tells their other lane."""
        stamp_ms = self._now_ms()
        if stamp_ms is None or not led.is_current:
            return RETRY_MS
        if is_behind and led.before is not None:
            note = give_up_behind(led.before, places)
        else:
            note = give_up(led.before, places, stamp_ms)
            led.batch = None
        if not await self._append_note(led, note, stamp_ms):
            return RETRY_MS
        name = led.partition.name
        logger.warning(
            "deliveries are given up",
            topic=name.topic,
            partition=name.partition,
            to=led.target,
            records=len(places),
        )
        self.given_up_count += len(places)
        if led.reading is not None and note.cursor > led.reading.pending.cursor:
            led.reading.pending.settle(note.cursor)
        return 0

    async def _note_nothing(self, led: Led, before: Delivery) -> float:
        """The last note is so old that retention would keep much for it alone: it gets a successor,
        which says that what it noted was taken."""
        stamp_ms = self._now_ms()
        if stamp_ms is None or not led.is_current:
            return RETRY_MS
        return 0 if await self._append_note(led, nothing_after(before), stamp_ms) else RETRY_MS

    async def _append_note(self, led: Led, delivery: Delivery, now_ms: int) -> bool:
        """Commit a note; False where that is not known: the log says it, later."""
        result = led.partition.append_own(_note_of(led, delivery, now_ms), SEND_TIMEOUT_MS)
        if not isinstance(result, AppendResult):
            result = await self._tasks.wait(result)
        elif result.code is not ErrorCode.NONE and led.is_current:
            raise KafkaError("no note can be written", code=result.code)  # and none was
        if result.code is not ErrorCode.NONE or not led.is_current:
            self.followers.give_back(led)
            return False
        led.before, led.is_owed = delivery, bool(delivery.offsets)
        led.note_offset, led.number = result.base_offset, (led.number + 1) % SEQUENCE_MODULUS
        return True

    def _rest(self, led: Led, now_ms: int) -> float:
        """Wait for news of the partition, or until something is due."""
        assert led.reading is not None, "the last note comes first"
        due_ms = led.reading.pending.next_due_ms
        if led.ahead is not None:
            return 1.0
        if led.partition.replica.high_watermark > led.reading.end:
            return RETRY_MS / 4
        if due_ms is None:
            return LOOK_MS_MAX
        return float(min(LOOK_MS_MAX, max(1, due_ms - now_ms)))

    def _first_unread_ms(self, led: Led) -> int | None:
        """When the first batch that was not read was appended; None: all was read."""
        replica, reading = led.partition.replica, led.reading
        assert reading is not None, "the last note comes first"
        if replica.log_end_offset <= reading.end:
            return None
        for header in replica.log.headers(reading.end, replica.log_end_offset):
            return header.max_timestamp
        return None

    def _target(self, name: str) -> TopicImage:
        """The topic that is delivered to.

        Raises:
            KafkaError: there is none that can be.
        """
        topic = self._engine.image.topics.get(name)
        if topic is None:
            raise KafkaError(f"there is no topic {name}", code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if topic.configs.get(DELIVERS_TO):
            raise KafkaError(f"{name} is a delay topic", code=ErrorCode.INVALID_TOPIC_EXCEPTION)
        return topic

    # ---- sending ----

    async def _send(self, led: Led) -> float:
        """Send what was noted last, once; 0 when it was taken."""
        delivery = led.before
        assert delivery is not None, "something is owed"
        if not self._exists(delivery):
            await self._tasks.wait(self._engine.read_barrier(timeout_ms=SEND_TIMEOUT_MS))
            if not self._exists(delivery):
                return await self._note_again(led, delivery)
        if led.batch is None:
            records = await self._records(led, [(offset, -1) for offset in delivery.offsets])
            led.batch = _batch_of(led, delivery, records)
        code = await self._tasks.wait(self._push(delivery, bytes(led.batch)))
        if code is not ErrorCode.NONE:
            self.sends_failed_count += 1
            if led.refused_ms is None:
                led.refused_ms = self._now_ms()
            return self._failed(led, f"{delivery.partition} of its target: {code.name}")
        self.delivered_count += len(delivery.offsets)
        led.is_owed, led.batch, led.refused_ms = False, None, None
        led.succeeded()
        return 0

    def _exists(self, delivery: Delivery) -> bool:
        topic = self._engine.image.topic_by_id(delivery.topic_id)
        return topic is not None and delivery.partition < len(topic.partitions)

    async def _note_again(self, led: Led, delivery: Delivery) -> float:
        """The target is gone, with what it was given: note the same for the one of its name."""
        partition = led.partition
        stamp_ms = self._now_ms()
        if stamp_ms is None or not led.is_current:
            return RETRY_MS
        places = [Place(delivery.cursor.due_ms, offset) for offset in delivery.offsets]
        if self._has_given_up(led, delivery.cursor, stamp_ms):
            return await self._give_up(led, places)
        topic = self._target(led.target)
        index = partition.index % len(topic.partitions)
        again = again_for(delivery, topic.topic_id, index, places, stamp_ms)
        led.batch = None
        await self._append_note(led, again, stamp_ms)
        return 0

    def _push(self, delivery: Delivery, batch: bytes) -> Promise[ErrorCode]:
        """Ask the target's leader to take a batch; an answer within some seconds in any case."""
        row = self._control.leaders.get(delivery.topic_id, delivery.partition)
        if row is None:
            return Promise.resolved(ErrorCode.LEADER_NOT_AVAILABLE)
        answer: Promise[ErrorCode] = Promise()

        def settle(code: ErrorCode) -> None:
            if not answer.is_done:
                answer.resolve(code)

        give_up = partial(settle, ErrorCode.REQUEST_TIMED_OUT)
        deadline = self._deadlines.after(2 * SEND_TIMEOUT_MS, give_up)
        answer.when_done(lambda _: deadline.cancel())
        taken = self._control.deliver(row.leader_id, delivery.topic_id, delivery.partition, batch)
        taken.when_done(lambda done: settle(done.result()))
        return answer

    # ---- reading ----

    async def _records(self, led: Led, offsets: list[tuple[int, int]]) -> list[tuple[Record, int]]:
        """The records at these offsets, each with its creation time; with the position of each in
        its batch, where that is known."""
        found: dict[int, tuple[FileSpan, int, int]] = {}
        span: FileSpan | None = None
        batches = 0
        # Records that are due together often stand in the same batches, which are looked up once.
        for offset, position in sorted(offsets):
            if span is None or offset >= span.end_offset:
                spans = await self._reader.spans(led.partition, offset, 1)
                if not spans:
                    raise CorruptBatchError(f"no record at {offset}")
                span, batches = spans[0], batches + 1
                if batches % READ_TURN == 0:
                    await self._tasks.sleep(0.0)
            found[offset] = (span, offset, position)
        wanted = [found[offset] for offset, _ in offsets]
        return await self._tasks.in_thread(partial(_records_in, wanted))


def _catches_up(led: Led) -> bool:
    """True while nothing but the length of its log keeps a lane that is behind from delivering."""
    return not (led.reading is None or led.is_owed or led.trouble) and led.is_current


def _left(led: Led) -> int:
    """Offsets of its log that are not read yet."""
    end = led.partition.replica.log_start_offset if led.reading is None else led.reading.end
    return led.partition.replica.high_watermark - end


def _note_of(led: Led, delivery: Delivery, now_ms: int) -> bytearray:
    """The next note, stamped no earlier than what it settles is due, nor than what the log has."""
    greatest_ms = led.partition.producers.greatest_timestamp
    stamp_ms = max(now_ms, delivery.cursor.due_ms, greatest_ms)
    return note_batch(delivery, led.number, stamp_ms, led.lane)


def _batch_of(led: Led, delivery: Delivery, records: list[tuple[Record, int]]) -> bytearray:
    partition = led.partition
    return delivered_batch(delivery, records, partition.group, partition.name.topic, led.lane)


def _records_in(wanted: list[tuple[FileSpan, int, int]]) -> list[tuple[Record, int]]:
    return [_record_in(span, offset, position) for span, offset, position in wanted]


def _record_in(span: FileSpan, offset: int, position: int) -> tuple[Record, int]:
    """One record of the first batch of a span. Of large batches no more is read than has to be:
    records due at the same time stand in as many batches."""
    if position < 0:
        return record_at(bytes_of(span), offset)
    header = parse_header(span.file.pread(HEADER_SIZE, span.position))
    data = span.file.pread(min(RECORD_BYTES, span.size - position), span.position + position)
    size, start = read_varint(data, 0)
    if start + size > len(data):
        data = span.file.pread(start + size, span.position + position)
    return record_in(header, data, 0, offset)


def _fitting(records: list[tuple[Record, int]]) -> list[tuple[Record, int]]:
    """The first ones that go into one delivery, one at least."""
    left = BYTES_MAX
    for number, (record, _) in enumerate(records):
        headers = sum(len(name) + len(content or b"") for name, content in record.headers)
        left -= len(record.key or b"") + len(record.value or b"") + headers
        if left < 0 and number:
            return records[:number]
    return records
