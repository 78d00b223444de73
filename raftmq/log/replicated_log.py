"""A replica's whole log: batches in segments, bare entries beside them, one flushed end.

The only place where `RaftIndex` and `Offset` meet: index = offset + bare entries before it. Writes
reach the page cache at once; `flush_job` says what to sync and may run elsewhere, `complete` moves
the flushed end. It never decides what to append, truncate or drop, and never talks to peers.

Invariants:
- a batch reaches a segment only after every bare entry before it is flushed, and a new segment
  only after the one before it is; until then it is staged in memory. So at recovery no batch
  exists whose index cannot be derived, and a gap between segments is damage.
- `flushed_end` covers a prefix of entries that are durable, bare ones and batches alike.
- truncation is durable on return, segments before bare entries, and finished after a crash.
- the log-start tuple is durable before anything below it goes.
- before a truncation or reset the caller has made durable that no more than the new end is claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from raftmq.errors import CorruptBatchError
from raftmq.log.log_start import LocalStart, LogStart, Pending, no_way_back
from raftmq.log.model import (
    BATCH_KIND,
    BareEntry,
    DamagedError,
    FlushJob,
    LogConfig,
    LogEntry,
    RecoveryReport,
)
from raftmq.log.reader import ReadableLog, StagedBatch
from raftmq.log.recent import RecentBatch, RecentBatches, kept
from raftmq.log.recovery import Recovered, recover
from raftmq.log.repair import Fill, RepairJob
from raftmq.log.segment import fillers
from raftmq.log.segments import is_older, retention_target
from raftmq.log.shared import Shared
from raftmq.ports import Clock, Disk, DiskFullError
from raftmq.records import BatchHeader, parse_header
from raftmq.types import Buffer, LeaderEpoch, Offset, RaftIndex

EXPIRED_KEPT_MS: Final = 300_000
"""How long an active segment stays whose records had expired when they came: Kafka looks for such
every `log.retention.check.interval.ms`."""


class ReplicatedLog(ReadableLog):
    """One log in one folder. Not thread-safe, except `run` of the jobs it hands out.

    Attributes:
        log_start: where it begins.
        log_end_offset: the next offset to assign.
        end_index: the same as a Raft index.
        flushed_end: every entry below it is durable.
        recovery: what opening it found.
    """

    @classmethod
    def open(
        cls,
        disk: Disk,
        folder: str,
        config: LogConfig,
        *,
        claimed_flushed_end: RaftIndex = RaftIndex(0),
        initial: LogStart | None = None,
        clock: Clock,
        shared: Shared | None = None,
        before_cut: Callable[[RaftIndex], None] | None = None,
    ) -> ReplicatedLog:
        """Recover what the folder holds, or begin a log at `initial`.

        `before_cut` is called with the end that a torn tail claims, if any, before it is cut off.

        Raises:
            UnusableLogError: the log start or a bare entry below the claimed end is lost.
            NewerFormatError: a file of a newer raftmq.
            DiskError: the device failed.
        """
        shared = shared or Shared.make(disk)
        recovered = recover(
            shared,
            folder,
            config,
            claimed_end=claimed_flushed_end,
            initial=initial,
            now_ms=clock.wall_ms(),
            before_cut=before_cut,
        )
        return cls(folder, config, shared, clock, recovered)

    def __init__(
        self, folder: str, config: LogConfig, shared: Shared, clock: Clock, found: Recovered
    ) -> None:
        super().__init__(
            config,
            found.local.log_start,
            clock,
            found.bare,
            found.segments,
            RecentBatches(shared.recent, config.recent_bytes_max),
        )
        self.folder = folder
        self.recovery: RecoveryReport = found.report
        self._shared = shared
        self.moves = shared.moves
        """What moves of the log starts of all logs together may take."""
        self._disk = shared.files.disk
        self._clock = clock
        self._start_file = found.start_file
        self._staged_bytes = 0
        self._synced_offset = found.synced_offset
        self._flushed_bare = self._bare.dropped + found.flushed_bare
        self._job: FlushJob | None = None
        self.flushed_end = RaftIndex(0)
        self._recount()

    def _recount(self) -> None:
        """Derive end and flushed end from the parts."""
        end = self._staged[-1].header.next_offset if self._staged else self._segments.end_offset
        self.log_end_offset = Offset(end)
        self.end_index = RaftIndex(self.log_end_offset + self._steps() + len(self._bare.entries))
        flushed = self.index_of(Offset(self._synced_offset))
        unflushed = self._flushed_bare - self._bare.dropped
        if unflushed < len(self._bare.entries):
            flushed = min(flushed, self._bare.entries[unflushed].index)
        self.flushed_end = flushed

    # --- positions --------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> Offset:
        """The first offset that readers may ask for."""
        return self.log_start.offset

    @property
    def flushed_end_offset(self) -> Offset:
        """Batches below it are durable, and so are all entries before them."""
        return self.offset_of(self.flushed_end)

    @property
    def size_bytes(self) -> int:
        """Bytes of batches in segments."""
        return self._segments.size_bytes

    def epochs(self) -> list[tuple[LeaderEpoch, RaftIndex]]:
        """Each leader epoch that has entries here, with the index of the first of them."""
        epochs: list[tuple[LeaderEpoch, RaftIndex]] = []
        entries = self._bare.entries
        first = self.log_start.index
        if self.end_index > first and not (entries and entries[0].index == first):
            epochs.append((self.log_start.previous_epoch, first))
        for entry in entries:
            if not epochs or entry.leader_epoch != epochs[-1][0]:
                epochs.append((entry.leader_epoch, entry.index))
        return epochs

    def bare_entries(self) -> list[BareEntry]:
        """All bare entries at or above the log start."""
        return list(self._bare.entries)

    # --- index and offset -------------------------------------------------------------------

    def offset_of(self, index: RaftIndex) -> Offset:
        """The offset at a Raft index: that of the batch there, or the next one's."""
        return Offset(index - self._steps() - self._bare.count_below(index))

    def index_of(self, offset: Offset) -> RaftIndex:
        """The Raft index at an offset, behind the bare entries that stand before it."""
        return RaftIndex(offset + self._steps() + self._bare.count_up_to(offset))

    @property
    def written_end(self) -> RaftIndex:
        """Everything below it is in files; what is staged above may still find no room."""
        if not self._staged:
            return self.end_index
        return self.index_of(Offset(self._staged[0].header.base_offset))

    def start_at(self, offset: Offset) -> LogStart:
        """A log start from which readers see `offset`: the batch that contains it comes first.

        The index is the lowest for that batch, so that bare entries right before it, which may not
        be committed yet, are kept. The caller fills in configuration and state.
        """
        assert self.log_start.offset <= offset <= self.log_end_offset
        base = int(offset)
        if offset < self.log_end_offset:
            try:
                base = next(self.headers(offset, Offset(offset + 1))).base_offset
            except DamagedError as error:
                base = max(error.start, self.log_start.base_offset)
        index = RaftIndex(base + self._steps() + self._bare.count_before(base))
        index = max(index, self.log_start.index)
        return LogStart(
            offset=offset,
            index=index,
            previous_epoch=self.previous_epoch_at(index),
            base_offset=Offset(base),
        )

    def epoch_at(self, offset: Offset) -> LeaderEpoch:
        """The leader epoch of the batch at `offset`."""
        return LeaderEpoch(self._bare.epochs().at(offset))

    def previous_epoch_at(self, index: RaftIndex) -> LeaderEpoch:
        """The leader epoch of the entry that ends at `index`."""
        count = self._bare.count_below(index)
        if count == 0:
            return self.log_start.previous_epoch
        return self._bare.entries[count - 1].leader_epoch

    def end_offset_for_epoch(self, epoch: LeaderEpoch) -> tuple[LeaderEpoch, Offset] | None:
        """The greatest known epoch not above `epoch`, and where the next one starts (KIP-101)."""
        table = self._bare.epochs()
        ends = [*table.starts[1:], self.log_end_offset]
        found: tuple[LeaderEpoch, Offset] | None = None
        for known, start, end in zip(table.epochs, table.starts, ends, strict=True):
            if known > epoch:
                break
            if known == 0 and start == end:
                continue  # no leader was ever in epoch 0
            found = LeaderEpoch(known), Offset(end)
        return found

    # --- appending --------------------------------------------------------------------------

    def append_batch(self, batch: Buffer, header: BatchHeader | None = None) -> None:
        """Append a stamped, checked batch; durable once `flushed_end` covers it.

        Raises:
            DiskFullError: nothing changed.
            DiskError: fatal.
        """
        if header is None:
            header = parse_header(batch)
        base_offset = header.base_offset
        assert base_offset == self.log_end_offset, "batches are contiguous"
        assert header.leader_epoch == self._bare.last_epoch, "an epoch begins with a bare entry"
        size = len(batch)
        assert header.size == size, "exactly one batch"
        batch = kept(batch)
        start = self.end_index
        next_offset = header.next_offset
        entry = LogEntry(
            start,
            RaftIndex(start + next_offset - base_offset),
            LeaderEpoch(header.leader_epoch),
            BATCH_KIND,
            batch,
        )
        position = base = -1
        if (
            self._staged
            or self._flushed_bare - self._bare.dropped < len(self._bare.entries)
            or self._is_roll_pending(size, next_offset)
        ):
            self._stage(batch, header)
        else:
            position, segment = self._segments.append(batch, header)
            base = segment.base_offset
        self._recent.add(RecentBatch(entry, base_offset, next_offset, position, base, size))
        self.log_end_offset = Offset(next_offset)
        self.end_index = entry.end

    def _is_roll_pending(self, size: int, next_offset: int) -> bool:
        """Roll if it is time for it; True when the batch must wait until the old one is flushed.

        Files reach the device in any order: a new segment that survived a power loss while the end
        of the old one did not would look like damage to something that was promised.
        """
        now_ms = self._clock.wall_ms()
        if not self._segments.must_roll(size, next_offset, now_ms):
            return False
        if self._segments.end_offset > self._synced_offset:
            return True
        self._segments.roll(now_ms)
        return False

    def _stage(self, batch: Buffer, header: BatchHeader) -> None:
        if self._staged_bytes + len(batch) > self.config.staged_bytes_max and self._staged:
            raise DiskFullError(f"{self.folder}: too much waits for a bare entry to be flushed")
        self._staged.append(StagedBatch(header, batch))
        self._staged_bytes += len(batch)

    def append_bare(
        self, index: RaftIndex, leader_epoch: LeaderEpoch, kind: int, payload: bytes
    ) -> None:
        """Append an entry without records; durable once `flushed_end` covers it.

        Raises:
            DiskFullError: the disk is full and the reserve used up; nothing changed.
            DiskError: fatal.
        """
        assert index == self.end_index, "entries are contiguous"
        assert leader_epoch >= self._bare.last_epoch, "epochs never fall"
        assert kind != BATCH_KIND, "a batch is not a bare entry"
        self._bare.append(BareEntry(index, leader_epoch, self.log_end_offset, kind, payload))
        self.end_index = RaftIndex(index + 1)

    # --- flushing ---------------------------------------------------------------------------

    def flush_job(self) -> FlushJob | None:
        """What must be synced now; None when nothing is due or a job is under way."""
        if self._job is not None:
            return None
        bare = self._bare
        bare_count = bare.dropped + len(bare.entries)
        is_bare_dirty = bare_count > self._flushed_bare
        if not is_bare_dirty and self._segments.end_offset <= self._synced_offset:
            return None
        files, folders = self._segments.take_dirty()
        if is_bare_dirty:
            files.append(bare.file)
        self._job = FlushJob(
            self._disk,
            tuple(files),
            tuple(folders),
            synced_offset=self._segments.end_offset,
            bare_count=bare_count,
        )
        return self._job

    def complete(self, job: FlushJob) -> RaftIndex:
        """Take note that `job` ran; write what was staged behind bare entries it made durable.

        Returns the new flushed end. Another job may be due at once.

        Raises:
            DiskFullError: staged batches do not fit; they and what follows them were dropped, as
                if this replica had crashed before it wrote them.
            DiskError: fatal.
        """
        assert job.is_done, "a job completes after it ran"
        if job.is_void:
            return self.flushed_end
        assert job is self._job, "a job completes once"
        self._job = None
        self._synced_offset = max(self._synced_offset, job.synced_offset)
        self._flushed_bare = max(self._flushed_bare, job.bare_count)
        self._recount()
        if self._staged:
            self._write_staged()
        return self.flushed_end

    def _write_staged(self) -> None:
        bare = self._bare
        while self._staged:
            staged = self._staged[0]
            base_offset = staged.header.base_offset
            if bare.dropped + bare.count_up_to(base_offset) > self._flushed_bare:
                return
            try:
                if self._is_roll_pending(len(staged.data), staged.header.next_offset):
                    return
                position, segment = self._segments.append(staged.data, staged.header)
            except DiskFullError:
                self._cut(self.index_of(Offset(base_offset)))
                raise
            self._staged.popleft()
            self._staged_bytes -= len(staged.data)
            self._recent.place(base_offset, position, segment.base_offset)

    # --- truncating -------------------------------------------------------------------------

    def truncate_to(self, end: RaftIndex) -> None:
        """Drop all entries from `end` on, a boundary of entries; durable on return.

        Raises:
            DiskError: fatal; opening the log again finishes the truncation.
        """
        assert self.log_start.index <= end <= self.end_index
        if end < self.end_index:
            self._cut(end)

    def _cut(self, end: RaftIndex) -> None:
        offset = int(self.offset_of(end))
        cuts_segments = offset < self._segments.end_offset
        cuts_bare = self._bare.count_below(end) < len(self._bare.entries)
        if cuts_segments:  # before anything else changes: a full disk may refuse it
            self._start_file.replace(LocalStart(self.log_start, end, Pending.TRUNCATE))
        while self._staged and self._staged[-1].header.base_offset >= offset:
            self._staged_bytes -= len(self._staged.pop().data)
        assert not self._staged or self._staged[-1].header.next_offset <= offset, "not a boundary"
        self._recent.truncate(offset)
        self.aborted.cut(offset)
        self._forget_positions()
        with no_way_back(self.folder):
            if cuts_segments:
                self._segments.truncate_to(offset)
            if cuts_bare:
                self._bare.truncate(end)
            if cuts_segments:
                self._start_file.finish(LocalStart(self.log_start, end))
        count = self._bare.dropped + len(self._bare.entries)
        self._synced_offset = min(self._synced_offset, offset)
        self._flushed_bare = min(self._flushed_bare, count)
        if self._job is not None:
            self._job.synced_offset = min(self._job.synced_offset, offset)
            self._job.bare_count = min(self._job.bare_count, count)
        self._recount()

    # --- log start --------------------------------------------------------------------------

    def retention_target(self, now_ms: int, below: Offset) -> Offset | None:
        """Where age and size would have the log start; None when it may stay.

        Always a segment boundary, at or below `below`, never in the last segment.
        """
        found = retention_target(
            self._segments.all, self.config, now_ms, below, self.log_start.offset
        )
        return None if found is None else Offset(found)

    def configure(self, config: LogConfig) -> None:
        """Obey changed settings from now on; files that are open keep their index interval."""
        self.config = config
        self._segments.configure(config)

    def roll_if_aged(self, now_ms: int) -> bool:
        """Close an idle active segment that is older than `segment_ms`, or all of whose records are
        older than `retention_ms`, so that retention can take it. As in Kafka, records expire also
        when nothing comes after them, and records that are old when they arrive can be read for
        some minutes (Kafka's retention looks every five).

        Raises:
            DiskError: fatal, unless it is a DiskFullError.
        """
        active = self._segments.active
        if active is None or not active.size:
            return False
        retention_ms, age_ms = self.config.retention_ms, now_ms - active.created_ms
        is_expired = is_older(active.max_timestamp, retention_ms, now_ms)
        is_expired = is_expired and age_ms >= min(retention_ms, EXPIRED_KEPT_MS)
        if age_ms < self.config.segment_ms and not is_expired:
            return False
        if self._staged or self._segments.end_offset > self._synced_offset:
            return False  # busy, so the next append rolls it
        self._segments.roll(now_ms)
        return True

    def move_start(self, log_start: LogStart) -> None:
        """Drop what lies below `log_start`, whole segments at a time; the tuple is durable first.

        Raises:
            DiskFullError: nothing changed.
            DiskError: fatal.
        """
        assert self.log_start.index <= log_start.index <= self.end_index
        assert self.log_start.offset <= log_start.offset
        assert self.offset_of(log_start.index) == log_start.base_offset, "not where it says"
        self._start_file.replace(LocalStart(log_start))
        self.log_start = log_start
        base_offset = log_start.base_offset
        self.aborted.first = base_offset
        self._bare.rebase(log_start)
        self._synced_offset = max(self._synced_offset, base_offset)
        self._flushed_bare = max(self._flushed_bare, self._bare.dropped)
        if self._segments.remove_below(base_offset):
            self._forget_positions()
        self._recent.drop_below(base_offset)
        self._recount()
        try:
            self._bare.compact()
        except DiskFullError:
            return  # the old file stays, with more in it than need be

    def reserve_start(self, state_bytes: int) -> None:
        """Have room for a log start with a state of that size, should the disk be full by then.

        Raises:
            DiskFullError: it is; nothing changed.
            DiskError: fatal.
        """
        self._start_file.reserve(state_bytes)

    def reset_to(self, log_start: LogStart) -> None:
        """Begin anew at a leader's log start; durable on return, and then the old data is gone.

        Raises:
            DiskFullError: nothing changed.
            DiskError: fatal; opening the log again finishes the reset.
        """
        self._start_file.replace(LocalStart(log_start, log_start.index, Pending.RESET))
        if self._job is not None:
            self._job.is_void = True
            self._job = None
        self._staged.clear()
        self._staged_bytes = 0
        self._recent.clear()
        self._forget_positions()
        self.log_start = log_start
        self.aborted.clear(log_start.base_offset)
        with no_way_back(self.folder):
            self._segments.clear(log_start.base_offset)
            self._bare.clear(log_start)
            self._disk.sync_directory(self.folder)
            self._start_file.finish(LocalStart(log_start, log_start.index))
        self._synced_offset = log_start.base_offset
        self._flushed_bare = self._bare.dropped
        self._recount()

    # --- repair -----------------------------------------------------------------------------

    def repair(self, start: Offset, batches: Sequence[Buffer]) -> None:
        """Replace the damaged range that begins at `start` by a peer's batches; durable on return.

        Raises:
            CorruptBatchError: the batches do not fill the range, or are wrong.
            DiskFullError: nothing changed.
            DiskError: fatal.
        """
        job = self.repair_job(start, batches)
        job.run()
        self.repaired(job)

    def repair_job(self, start: Offset, batches: Sequence[Buffer]) -> RepairJob:
        """As `repair`, in two steps: `run` it in a worker thread, then hand it to `repaired`.

        Raises:
            CorruptBatchError: the batches do not fill the range, or are wrong.
            DiskFullError: nothing changed.
            DiskError: fatal.
        """
        fill = self.begin_repair(start)
        try:
            for batch in batches:
                fill.add(batch)
            return self.filled_job(fill)
        except (CorruptBatchError, DiskFullError):
            fill.drop()
            raise

    def begin_repair(self, start: Offset) -> Fill:
        """Gather batches for the damaged range that begins at `start`."""
        _, damage = self._segments.damage_at(start, self.log_start.base_offset)
        path = f"{self.folder}/{start:020d}.fill.tmp"
        return Fill(self._disk, path, start, damage.end, self._bare.epochs(), next_offset=start)

    def filled_job(self, fill: Fill) -> RepairJob:
        """Repair with what was gathered: `run` it in a worker thread, then hand it to `repaired`.

        Raises:
            CorruptBatchError: the range is not full, or not the same any more.
            DiskFullError: nothing changed.
            DiskError: fatal.
        """
        start = Offset(fill.start)
        if (start, fill.end) not in self.damaged or not fill.is_full:
            raise CorruptBatchError(f"repair up to {fill.next_offset} of a range up to {fill.end}")
        segment, damage = self._segments.damage_at(start, self.log_start.base_offset)
        if segment.is_active:
            self._segments.roll(self._clock.wall_ms())  # only closed segments are replaced
        return RepairJob(
            disk=self._disk,
            old=segment,
            new=self._segments.new(start if damage.start < start else segment.base_offset),
            damage=damage,
            fill=fill,
            source=None if segment.is_missing else segment.file,
            version=segment.version,
        )

    def accept_loss(self, start: Offset) -> None:
        """Fill the damaged range that begins at `start` with batches without records; durable on
        return. For ranges that no peer can repair, and only when an operator asks for it.

        Raises:
            DiskFullError: nothing changed.
            DiskError: fatal.
        """
        _, damage = self._segments.damage_at(start, self.log_start.base_offset)
        self.repair(start, fillers(start, damage.end, self._bare.epochs()))

    def repaired(self, job: RepairJob) -> bool:
        """Put a repaired segment in place, durably; False when the log was cut meanwhile.

        Raises:
            DiskError: fatal.
        """
        assert job.is_done, "a job is taken over after it ran"
        if job.version != job.old.version or job.old not in self._segments.all:
            job.drop()
            return False
        job.fill.drop()
        self._segments.doubt_aborted(job.damage.start)
        self._disk.rename(job.temporary, job.new.path)
        if job.new.path == job.old.path:
            job.new.aborted = job.old.aborted  # the offsets are the same
            job.old.release()
        else:
            job.old.remove()
        self._disk.sync_directory(self.folder)
        job.new.file.path = job.new.path
        job.new.close()
        self._segments.replace(job.old, job.new)
        self._forget_positions()
        self._recent.clear()
        self._shared.watch.repaired(job.new.path, job.damage.start, job.damage.end)
        return True

    # --- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """Write the indexes and give all files back. What is not flushed is not made durable."""
        self._recent.clear()
        active = self._segments.active
        if active is not None:
            active.write_indexes(is_closed=True)
        self._release()

    def _release(self) -> None:
        """Hold no file any more: an object that is kept must not keep space on the disk."""
        self._job = None
        self._checker.forget()
        self._segments.release()
        self._bare.close()

    def delete(self) -> None:
        """Remove the folder and all in it; durable on return."""
        self._recent.clear()
        self._release()
        self._disk.remove_tree(self.folder)
