"""Fills the indexes of views with conditions: one for each view and each replica of its topic here.

An index is loaded when replica and view are there, compared with the log, and then kept behind the
base's last stable offset: some batches are read, a worker thread judges them, the loop takes over
what it found. A few workers do this for all indexes in turn, one stretch each time; one that is far
behind works half of the time, so that a new view on an old topic does not take a core from those
who write. Damage waits for the replica's repair. A topic without such a view knows nothing of this.

The files lie below `views/` in the data folder, apart from the replicas' own: a folder of a view
has one for each partition, named by its Raft group. They hold nothing that the logs do not, and are
removed with the view or with the replica, at the next start where the node was down then.

Invariants: only what is committed and stable is judged; of one index one stretch is judged at a
time; what was judged is taken over only into the index for which it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto
from functools import partial
from typing import Any, Final, TypeAlias

from attrs import define

from raftmq.counts import TopicCounts
from raftmq.errors import ErrorCode, KafkaError
from raftmq.logs import structlog
from raftmq.metadata.engine import DrivenEngine
from raftmq.metadata.image import MetadataImage, ViewImage
from raftmq.node.cold_reads import read_cold
from raftmq.node.data_plane import DataPlane
from raftmq.node.environment import Tasks
from raftmq.node.work_queue import RETRY_MS, WorkItem, WorkQueue
from raftmq.partition.filtered import FilteredPartition
from raftmq.partition.look_ups import MAX_TIMESTAMP, look_up
from raftmq.partition.parked import Deadline, Deadlines
from raftmq.partition.partition import Partition
from raftmq.partition.ports import NO_OFFSET, OffsetResult, ReadResult
from raftmq.partition.registry import PartitionRegistry
from raftmq.ports import Clock, Disk, DiskError, DiskFullError
from raftmq.promise import Promise
from raftmq.types import LeaderEpoch, Offset, RaftGroupId, TopicId, TopicPartition
from raftmq.views.conditions import parse_condition
from raftmq.views.filling import JudgeJob, RebuiltBatches, TimeJob
from raftmq.views.index import AwayError, Row, ViewIndex

logger = structlog.get_logger("raftmq.views")

FillKey: TypeAlias = tuple[TopicId, RaftGroupId]

WORKERS: Final = 2
LOOK_UPS: Final = 2
READ_BYTES: Final = 128 << 10
"""Of the log at once: some milliseconds of a thread."""
PACED_BYTES: Final = 1 << 20
"""An index that lacks more than this pauses between stretches."""
SAVE_MS: Final = 10_000.0
LOOK_MS: Final = 1_000.0
STAGED_MS: Final = 25.0
"""What waits in memory for a flush is in its file soon."""
LOOK_UP_MS: Final = 30_000.0


class Ended(Enum):
    """What becomes of the files of an index that is filled no more."""

    FILES_STAY = auto()
    """View and replica may come back."""
    FILES_GO = auto()
    """A worker removes them."""


@define(eq=False, slots=True)
class Fill(WorkItem):
    """The index of one view at one replica.

    Attributes:
        shown: what readers are given.
        saved_end: the index's files say what it knew below.
        kept_start: files below that start of the base's log were to go, on a disk that may be full.
        ended: None while it is filled.
    """

    view: ViewImage
    shown: FilteredPartition
    folder: str
    saved_end: Offset = NO_OFFSET
    saved_ms: float = 0.0
    kept_start: Offset = NO_OFFSET
    ended: Ended | None = None

    def woken(self) -> None:
        """The base moved (`parked.FetchWaiter`)."""
        self.shown.base_moved()
        self.wake()

    @property
    def base(self) -> Partition:
        """The replica whose records are judged."""
        return self.shown.base

    @property
    def is_open(self) -> bool:
        """True while it is to be filled."""
        return self.ended is None

    @property
    def key(self) -> FillKey:
        """What names it among those of its node."""
        return self.view.topic_id, self.base.group


@define(eq=False, slots=True)
class _Asked(WorkItem):
    """A look-up by time that waits for its answer."""

    shown: FilteredPartition
    timestamp: int
    promise: Promise[OffsetResult]
    deadline: Deadline | None = None

    def settle(self, result: OffsetResult) -> None:
        if not self.promise.is_done:
            if self.deadline is not None:
                self.deadline.cancel()
            self.promise.resolve(result)


class NodeViews:
    """The views with conditions, as far as replicas of their topics are on this node.

    Attributes:
        judged_bytes: bytes of batches that were judged.
        judged_count: those batches.
        matches_count: records among them that match.
        unreadable_count: batches that could not be opened.
        remade_count: indexes that did not fit to their logs, or were damaged.
        counts: of each view, what clients read.
    """

    def __init__(
        self,
        image_of: Callable[[], MetadataImage],
        tasks: Tasks,
        deadlines: Deadlines,
        clock: Clock,
        disk: Disk,
        folder: str,
        registry: PartitionRegistry,
    ) -> None:
        """`folder` is the node's data folder."""
        self._image_of = image_of
        self._tasks = tasks
        self._deadlines = deadlines
        self._clock = clock
        self._disk = disk
        self._root = f"{folder}/views"
        self._registry = registry
        self._rebuilt = RebuiltBatches()
        self._fills: dict[FillKey, Fill] = {}
        self._queue: WorkQueue[Fill] = WorkQueue(tasks, deadlines)
        self._look_ups: WorkQueue[_Asked] = WorkQueue(tasks, deadlines)
        self.judged_bytes = 0
        self.judged_count = 0
        self.matches_count = 0
        self.unreadable_count = 0
        self.remade_count = 0
        self.counts: dict[str, TopicCounts] = {}

    @classmethod
    def on(
        cls,
        plane: DataPlane,
        engine: DrivenEngine,
        deadlines: Deadlines,
        registry: PartitionRegistry,
    ) -> NodeViews:
        """Those of a node."""
        return cls(
            lambda: engine.image,
            plane.tasks,
            deadlines,
            plane.clock,
            plane.disk,
            plane.folder.path,
            registry,
        )

    # ---- what others tell and ask ----

    def opened(self, partition: Partition) -> None:
        """A replica is there."""
        for view in self._image_of().conditions_of(partition.topic_id):
            self._begin(view, partition)

    def closed(self, partition: Partition, *, is_gone: bool) -> None:
        """A replica is not there any more; `is_gone`: and does not come back."""
        for fill in [fill for fill in self._fills.values() if fill.base is partition]:
            self._end(fill, Ended.FILES_GO if is_gone else Ended.FILES_STAY)

    def image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """Begin and end with views."""
        if before.views is after.views:
            return
        known = {view.topic_id for view in after.views.values() if view.condition}
        for fill in list(self._fills.values()):
            if fill.view.topic_id not in known:
                self._end(fill, Ended.FILES_GO)
        for name in [name for name in self.counts if name not in after.views]:
            del self.counts[name]
        old = {view.topic_id for view in before.views.values()}
        for view in after.views.values():
            if view.condition and view.topic_id not in old:
                for partition in self._registry:
                    if partition.topic_id == view.source:
                        self._begin(view, partition)

    def find(self, view_id: TopicId, base: Partition) -> FilteredPartition | None:
        """What readers of a view are given over this replica."""
        fill = self._fills.get((view_id, base.group))
        return None if fill is None or fill.base is not base else fill.shown

    def fills(self) -> list[Fill]:
        """All of them."""
        return list(self._fills.values())

    def rows(self, topic: str | None = None) -> Iterator[dict[str, Any]]:
        """How far each index is, for people; of the views of one topic, where it is named."""
        return (
            {
                "view": fill.view.name,
                "topic": fill.base.name.topic,
                "partition": fill.base.index,
                "start": int(fill.shown.start),
                "end": int(fill.shown.readable_end),
                "examined_end": int(fill.shown.examined_end),
                "lacks_bytes": self.lacks_bytes(fill),
                "trouble": fill.trouble,
            }
            for fill in self.fills()
            if topic in (None, fill.base.name.topic)
        )

    # ---- beginning and ending ----

    def _begin(self, view: ViewImage, base: Partition) -> None:
        if (view.topic_id, base.group) in self._fills:
            return
        shown = FilteredPartition(
            TopicPartition(view.name, base.index),
            view.topic_id,
            base,
            parse_condition(view.condition),
            rebuilt=self._rebuilt,
            look_up=self._ask,
            deadlines=self._deadlines,
            clock=self._clock,
            counts=self.counts.setdefault(view.name, TopicCounts()),
        )
        fill = Fill(view, shown, f"{self._root}/{view.topic_id}/{_folder_of(base.group)}")
        self._fills[fill.key] = fill
        base.fetches.park(fill)
        self._queue.add(fill)

    def _end(self, fill: Fill, ended: Ended) -> None:
        del self._fills[fill.key]
        fill.base.fetches.unpark(fill)
        fill.ended, fill.is_pausing = ended, False
        fill.shown.close()
        fill.wake()

    async def sweep(self) -> None:
        """Remove what is left of views and replicas that went while this node was down; call it
        with a current image, before any replica is opened."""
        image = self._image_of()
        wanted = {
            (str(view.topic_id), _folder_of(topic.group_id(partition.index)))
            for view in image.views.values()
            if view.condition and (topic := image.topic_by_id(view.source)) is not None
            for partition in topic.held
        }
        await self._tasks.in_thread(partial(self._remove_others, wanted))

    def _remove_others(self, wanted: Iterable[tuple[str, str]]) -> None:
        wanted = set(wanted)
        views = {view for view, _ in wanted}
        for view in self._disk.list(self._root):
            if view not in views:
                self._disk.remove_tree(f"{self._root}/{view}")
                continue
            for name in self._disk.list(f"{self._root}/{view}"):
                if (view, name) not in wanted:
                    self._disk.remove_tree(f"{self._root}/{view}/{name}")

    # ---- workers ----

    async def run(self) -> None:
        """Fill indexes and look up times until cancelled."""
        fills = [partial(self._queue.work, self._turn)] * WORKERS
        look_ups = [partial(self._look_ups.work, self._answer)] * LOOK_UPS
        await self._tasks.together([*fills, *look_ups])

    async def _turn(self, fill: Fill) -> float | None:
        try:
            pause_ms = await self._step(fill)
        except (KafkaError, DiskError) as error:
            return self._failed(fill, error)
        fill.succeeded()
        return pause_ms

    def _failed(self, fill: Fill, error: KafkaError | DiskError) -> float | None:
        """Remember why it does not go on; how long to wait."""
        if not fill.is_open:
            if fill.ended is Ended.FILES_GO:
                logger.warning("files of a view are left", folder=fill.folder, error=str(error))
            return None
        if isinstance(error, KafkaError) and error.code is ErrorCode.NOT_LEADER_OR_FOLLOWER:
            return LOOK_MS  # the base tells when it hears of a leader
        why = str(error) or type(error).__name__
        if fill.trouble != why:
            name = fill.shown.name
            logger.warning("a view waits", view=name.topic, partition=name.partition, why=why)
        fill.is_pausing = True
        return fill.failed(why)

    async def _step(self, fill: Fill) -> float | None:
        """Do what comes next; when to look again in milliseconds, None: when the base moves."""
        shown, base = fill.shown, fill.base
        if not fill.is_open:
            if fill.ended is Ended.FILES_GO:
                await self._tasks.in_thread(partial(self._remove, fill.folder))
            return None
        if shown.view_index is None:
            await self._load(fill)
            return 0
        await self._drop(fill)
        shown.base_moved()
        stable = base.stable_end
        if stable == NO_OFFSET:
            return RETRY_MS
        if shown.examined_end >= stable:
            return await self._rest(fill)
        began_ms = self._clock.monotonic_ms()
        if not await self._judge_on(fill, stable):
            return STAGED_MS
        await self._save_if_due(fill)
        if not fill.is_open or self.lacks_bytes(fill) <= PACED_BYTES:
            return 0
        fill.is_pausing = True
        return self._clock.monotonic_ms() - began_ms

    async def _rest(self, fill: Fill) -> float | None:
        """All is examined: write what is known when it is time."""
        await self._save_if_due(fill)
        if fill.saved_end == fill.shown.examined_end:
            return None
        return max(1.0, fill.saved_ms + SAVE_MS - self._clock.monotonic_ms())

    # ---- files ----

    async def _load(self, fill: Fill) -> None:
        """Take over what the files say, if it is about this log."""
        base = fill.base
        index = await self._tasks.in_thread(partial(self._open, fill))
        if not fill.is_open:
            return
        log, end = base.replica.log, index.examined_end
        is_known = end <= base.replica.log_start_offset or (
            end <= log.log_end_offset and log.epoch_at(Offset(end - 1)) == index.epoch
        )
        if not is_known:
            # The log lost what it had, or is another one's: what the index says is not about it.
            name = fill.shown.name
            logger.warning(
                "the index of a view is made anew", view=name.topic, partition=name.partition
            )
            self.remade_count += 1
            await self._tasks.in_thread(partial(self._remove, fill.folder))
            index = await self._tasks.in_thread(partial(self._open, fill))
        fill.saved_end, fill.saved_ms = index.examined_end, self._clock.monotonic_ms()
        if fill.is_open:
            fill.shown.take_index(index)

    def _open(self, fill: Fill) -> ViewIndex:
        """Load an index; runs in a thread. Its folder is made here, since the loop writes there."""
        identity = fill.view.topic_id.bytes
        start = fill.base.replica.log_start_offset
        index = ViewIndex(self._disk, fill.folder, identity, start)
        index.save()
        return index

    def _remove(self, folder: str) -> None:
        if self._disk.exists(folder):
            self._disk.remove_tree(folder)
        parent = folder.rpartition("/")[0]
        if self._disk.exists(parent) and not self._disk.list(parent):
            self._disk.remove_tree(parent)

    async def _drop(self, fill: Fill) -> None:
        """Find where the view starts, and let go of what the index says below, with its files.

        Raises:
            DiskError: the device failed.
        """
        shown = fill.shown
        while (job := shown.follow_start()) is not None:
            await self._tasks.in_thread(job.run)
            shown.prepared(job)
        index, log_start = shown.view_index, fill.base.replica.log_start_offset
        if index is None or not index.has_below(log_start):
            return
        if log_start <= index.examined_end:
            if log_start == fill.kept_start:
                return
            fill.kept_start = log_start
            try:
                await self._tasks.in_thread(index.save_start)
            except DiskFullError:
                return  # they go when the log starts further on
        if not fill.is_open:
            return
        gone = index.let_go_before(log_start)
        await self._tasks.in_thread(partial(index.remove_files, gone))

    async def _save_if_due(self, fill: Fill) -> None:
        index, now_ms = fill.shown.view_index, self._clock.monotonic_ms()
        is_due = now_ms >= fill.saved_ms + SAVE_MS
        if index is None or not fill.is_open or not is_due or fill.saved_end == index.examined_end:
            return
        end = index.examined_end
        await self._tasks.in_thread(index.save)
        fill.saved_end, fill.saved_ms = end, now_ms

    # ---- judging ----

    async def _judge_on(self, fill: Fill, stable: Offset) -> bool:
        """Judge one stretch below the stable end; False where it cannot be read yet.

        Raises:
            KafkaError: it cannot be read now; DamagedError above all.
            DiskError: the device failed.
        """
        shown, base = fill.shown, fill.base
        start = shown.examined_end
        result = await self._read(base, start)
        if not fill.is_open or shown.examined_end != start:
            return True
        if result.code is not ErrorCode.NONE:
            if base.replica.log_start_offset > start:
                return True  # deleted meanwhile
            raise KafkaError(code=result.code)
        if not result.spans:
            if base.replica.log.past_holes(start) < stable:
                return False  # it waits in memory, to be written
            shown.examined(JudgeJob((), start, (), shown.condition), stable)
            return True
        job = JudgeJob(
            result.spans, start, result.aborted, shown.condition, rebuilds=len(shown.fetches) > 0
        )
        await self._tasks.in_thread(job.run)
        self.judged_bytes += job.size
        self.judged_count += len(job.judged)
        self.matches_count += job.matches_count
        if job.unreadable:
            self._tell_unreadable(fill, job)
        if fill.is_open and shown.examined_end == start:
            shown.examined(job, Offset(result.spans[-1].end_offset))
        return True

    async def _read(self, base: Partition, offset: Offset) -> ReadResult:
        """Stable batches from an offset on, in memory and checked."""
        read = partial(
            base.read, offset, READ_BYTES, may_follow=True, may_wait=False, committed_only=True
        )
        return await read_cold(self._tasks, base, read)

    def _tell_unreadable(self, fill: Fill, job: JudgeJob) -> None:
        self.unreadable_count += len(job.unreadable)
        name = fill.shown.name
        logger.error(
            "a batch cannot be opened, so a view does not show it",
            view=name.topic,
            partition=name.partition,
            offset=job.unreadable[0],
            count=len(job.unreadable),
        )

    def lacks_bytes(self, fill: Fill) -> int:
        """About how many bytes are yet to be judged."""
        base, examined_end = fill.base, fill.shown.examined_end
        lacking = base.readable_end - examined_end
        if lacking <= 0:
            return 0
        held = base.replica.log_end_offset - base.replica.log_start_offset
        return base.size_bytes * lacking // max(held, 1)

    # ---- times ----

    def _ask(self, shown: FilteredPartition, timestamp: int) -> Promise[OffsetResult]:
        """As `FilteredPartition.list_offset`, for a time."""
        asked = _Asked(shown, timestamp, Promise())
        late = OffsetResult(ErrorCode.OFFSET_NOT_AVAILABLE)
        asked.deadline = self._deadlines.after(LOOK_UP_MS, partial(asked.settle, late))
        self._look_ups.add(asked)
        return asked.promise

    async def _answer(self, asked: _Asked) -> None:
        try:
            result = await self._look_up(asked)
        except KafkaError as error:
            result = OffsetResult(error.code)
        except DiskError:
            result = OffsetResult(ErrorCode.KAFKA_STORAGE_ERROR)
        asked.settle(result)

    async def _look_up(self, asked: _Asked) -> OffsetResult:
        """What is asked for.

        Raises:
            KafkaError: something cannot be read now.
            DiskError: the device failed.
        """
        if asked.timestamp != MAX_TIMESTAMP:
            return await self._first_since(asked, asked.timestamp)
        return await self._newest(asked)

    async def _newest(self, asked: _Asked) -> OffsetResult:
        """The first of the matches that have the greatest timestamp (KIP-734): in a log that is in
        the order of time it is in the last batch with a match, and what is newer than that one
        stands behind the first record of the base that is."""
        shown, base = asked.shown, asked.shown.base
        examined = shown.when_examined()
        await self._tasks.wait(examined)
        if (result := examined.result()).code is not ErrorCode.NONE:
            return result
        index, end = shown.view_index, base.stable_end
        row = None if index is None else await self._row_from(shown, Offset(index.end - 1))
        if row is None or end == NO_OFFSET:
            code = ErrorCode.NONE if row is None else ErrorCode.OFFSET_NOT_AVAILABLE
            return OffsetResult(code)
        last = await self._time_job(shown, row, 0, is_newest=True)
        newest_ms = -1 if last.found is None else last.found[0]
        look = partial(look_up, base.replica, newest_ms + 1, end, may_wait=False)
        newer = await read_cold(self._tasks, base, look)
        if newer.code is not ErrorCode.NONE:
            return newer
        at = end if newer.offset == NO_OFFSET else newer.offset
        while (row := await self._row_from(shown, at)) is not None and not asked.promise.is_done:
            job = await self._time_job(shown, row, newest_ms + 1, is_newest=True)
            newest_ms = newest_ms if job.found is None else job.found[0]
            at = Offset(row.last_match + 1)
        if newest_ms < 0:
            return OffsetResult(ErrorCode.NONE)
        return await self._first_since(asked, newest_ms)

    async def _first_since(self, asked: _Asked, timestamp: int) -> OffsetResult:
        """The first match that is not older than a time.

        Raises:
            KafkaError: something cannot be read now.
            DiskError: the device failed.
        """
        shown = asked.shown
        base = shown.base
        examined = shown.when_examined()
        end = base.stable_end
        if end == NO_OFFSET:
            return OffsetResult(ErrorCode.OFFSET_NOT_AVAILABLE)
        look = partial(look_up, base.replica, timestamp, end, may_wait=False)
        first = await read_cold(self._tasks, base, look)
        if first.code is not ErrorCode.NONE or first.offset == NO_OFFSET:
            return first
        at = first.offset  # all that is before it is older
        while not asked.promise.is_done:
            row = await self._row_from(shown, at)
            if row is None and examined.is_done:
                result = examined.result()
                # What was judged since is newer than the question.
                return result if result.code is not ErrorCode.NONE else OffsetResult(ErrorCode.NONE)
            if row is None:
                await self._tasks.wait(examined)
                continue
            job = await self._time_job(shown, row, timestamp)
            if job.found is not None:
                stamp, offset, epoch = job.found
                return OffsetResult(ErrorCode.NONE, Offset(offset), stamp, LeaderEpoch(epoch))
            at = Offset(row.last_match + 1)
        return OffsetResult(ErrorCode.OFFSET_NOT_AVAILABLE)

    async def _row_from(self, shown: FilteredPartition, offset: Offset) -> Row | None:
        """As `FilteredPartition.row_from`, without a wait for the disk on the loop."""
        while True:
            try:
                return shown.row_from(offset, may_wait=False)
            except AwayError as away:
                await self._tasks.in_thread(away.job.run)
                shown.prepared(away.job)

    async def _time_job(
        self, shown: FilteredPartition, row: Row, timestamp: int, *, is_newest: bool = False
    ) -> TimeJob:
        """Look into one batch.

        Raises:
            KafkaError: it cannot be read now.
            DiskError: the device failed.
        """
        while True:
            spans, job = shown.batch_of(row)
            if spans or job is None:
                break
            await self._tasks.in_thread(job.run)
            shown.base.prepared(job)
        start = shown.base.replica.log_start_offset
        look = TimeJob(spans, row.base_offset, start, timestamp, shown.condition, is_newest)
        await self._tasks.in_thread(look.run)
        return look


def _folder_of(group: RaftGroupId) -> str:
    return f"{group.topic_id}-{group.partition}@{group.creation_epoch}"
