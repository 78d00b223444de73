"""What the tests of the log share: a clock, batches, and a list that a log is compared with."""

from __future__ import annotations

from random import Random

from attrs import Factory, define

from jepsen_like.disk import SimDisk
from raftmq.log.journal import HardStateJournal
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError, FileSpan, LogConfig, LogEntry
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.shared import Shared
from raftmq.ports import Disk
from raftmq.records import NewRecord, build_batch
from raftmq.types import LeaderEpoch, Offset, RaftIndex

ELECTION = 1
MEMBERSHIP = 2
SMALL = LogConfig(
    segment_bytes=2000, index_interval_bytes=300, bare_reserve_bytes=8192, verify_bytes_max=1500
)


@define
class FakeClock:
    """Time that stands still unless a test moves it."""

    now_ms: float = 1_000_000.0

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return int(self.now_ms)


def sim_disk(seed: int = 0) -> SimDisk:
    return SimDisk(Random(seed))


def batch(
    base_offset: int,
    epoch: int,
    count: int = 1,
    size: int = 20,
    timestamp: int = 1000,
    fill: int = 0,
) -> bytes:
    """A sound batch of `count` records with about `size` bytes of value each."""
    value = bytes((base_offset + fill + i) % 251 for i in range(size))
    records = [NewRecord(None, value, timestamp + i) for i in range(count)]
    return bytes(build_batch(records, base_offset=base_offset, leader_epoch=epoch))


def open_log(
    disk: Disk,
    config: LogConfig = SMALL,
    *,
    claimed: int = 0,
    folder: str = "data/a-0",
    clock: FakeClock | None = None,
    initial: LogStart | None = None,
    shared: Shared | None = None,
) -> ReplicatedLog:
    return ReplicatedLog.open(
        disk,
        folder,
        config,
        claimed_flushed_end=RaftIndex(claimed),
        initial=initial,
        clock=clock or FakeClock(),
        shared=shared,
    )


def flush(log: ReplicatedLog) -> RaftIndex:
    """Flush everything."""
    while (job := log.flush_job()) is not None:
        job.run()
        log.complete(job)
    return log.flushed_end


def flush_journal(journal: HardStateJournal) -> None:
    job = journal.flush_job()
    if job is not None:
        job.run()
        journal.complete(job)


def all_entries(log: ReplicatedLog) -> list[LogEntry]:
    """Every entry, read in pieces."""
    entries: list[LogEntry] = []
    at = log.log_start.index
    while at < log.end_index:
        found = log.entries(at, 700)
        assert found
        entries += found
        at = found[-1].end
    return entries


def span_bytes(spans: list[FileSpan]) -> bytes:
    return b"".join(span.file.pread(span.size, span.position) for span in spans)


def append(log: ReplicatedLog, epoch: int, count: int = 1, size: int = 20, **more: int) -> bytes:
    """Append a batch at the end."""
    data = batch(log.log_end_offset, epoch, count, size, **more)
    log.append_batch(data)
    return data


def elect(log: ReplicatedLog, epoch: int) -> None:
    log.append_bare(log.end_index, LeaderEpoch(epoch), ELECTION, b"e%d" % epoch)


def filled(
    disk: Disk, batches: int = 20, config: LogConfig = SMALL, *, count: int = 2, size: int = 60
) -> ReplicatedLog:
    """A flushed log: one election, then batches."""
    log = open_log(disk, config)
    elect(log, 1)
    for number in range(batches):
        append(log, 1, count, size, timestamp=1000 + 10 * number)
    flush(log)
    return log


@define(slots=True, frozen=True)
class ModelEntry:
    start: int
    end: int
    epoch: int
    kind: int
    payload: bytes


@define
class Model:
    """The log as a list."""

    entries: list[ModelEntry] = Factory(list)
    start_index: int = 0
    start_offset: int = 0
    previous_epoch: int = 0

    @property
    def end_index(self) -> int:
        return self.entries[-1].end if self.entries else self.start_index

    @property
    def end_offset(self) -> int:
        return self.start_offset + sum(e.end - e.start for e in self.entries if e.kind == 0)

    @property
    def epoch(self) -> int:
        return self.entries[-1].epoch if self.entries else self.previous_epoch

    def offset_of(self, index: int) -> int:
        return self.start_offset + sum(
            e.end - e.start for e in self.entries if e.kind == 0 and e.start < index
        )

    def add(self, epoch: int, kind: int, payload: bytes, width: int) -> None:
        start = self.end_index
        self.entries.append(ModelEntry(start, start + width, epoch, kind, payload))

    def truncate(self, end: int) -> None:
        self.entries = [e for e in self.entries if e.end <= end]

    def drop_below(self, index: int) -> None:
        self.start_offset = self.offset_of(index)
        gone = [e for e in self.entries if e.end <= index]
        if gone:
            self.previous_epoch = gone[-1].epoch
        self.entries = [e for e in self.entries if e.end > index]
        self.start_index = index

    def boundaries(self) -> list[int]:
        return [self.start_index, *(e.end for e in self.entries)]

    def check(self, log: ReplicatedLog) -> None:
        """Everything the log says of itself agrees with the list."""
        found = [
            ModelEntry(e.start, e.end, e.leader_epoch, e.kind, bytes(e.payload))
            for e in all_entries(log)
        ]
        assert found == self.entries
        assert log.end_index == self.end_index
        assert log.log_end_offset == self.end_offset
        assert log.log_start.index == self.start_index
        for boundary in self.boundaries():
            assert log.offset_of(RaftIndex(boundary)) == self.offset_of(boundary)
        batches = [(self.offset_of(e.start), e) for e in self.entries if e.kind == 0]
        for offset, entry in batches:
            assert log.index_of(Offset(offset)) == entry.start
            assert log.epoch_at(Offset(offset)) == entry.epoch
        headers = list(log.headers(Offset(self.start_offset), Offset(self.end_offset)))
        assert [h.base_offset for h in headers] == [offset for offset, _ in batches]
        self._check_epochs(log)

    def _check_epochs(self, log: ReplicatedLog) -> None:
        first: dict[int, int] = {}
        for entry in self.entries:
            first.setdefault(entry.epoch, entry.start)
        assert dict(log.epochs()) == first
        previous = self.previous_epoch
        for entry in self.entries:
            assert log.previous_epoch_at(RaftIndex(entry.start)) == previous
            previous = entry.epoch
        for asked in range(max(first, default=0) + 2):
            known = [e for e in first if e <= asked]
            if not known:
                continue
            later = [start for e, start in first.items() if e > max(known)]
            end = self.offset_of(min(later)) if later else self.end_offset
            assert log.end_offset_for_epoch(LeaderEpoch(asked)) == (max(known), end)


FOLDER = "data/a-0"
BIG = LogConfig(segment_bytes=1 << 20, index_interval_bytes=300, bare_reserve_bytes=8192)


def segment(base: int = 0, suffix: str = "log") -> str:
    return f"{FOLDER}/{base:020d}.{suffix}"


def model_of(log: ReplicatedLog) -> Model:
    model = Model()
    for e in all_entries(log):
        model.add(e.leader_epoch, e.kind, bytes(e.payload), e.end - e.start)
    return model


def readable(log: ReplicatedLog) -> dict[int, bytes]:
    """Every entry that the log gives out, by index; damaged ones are skipped."""
    found: dict[int, bytes] = {}
    at = log.log_start.index
    while at < log.end_index:
        try:
            for entry in log.entries(at, 1 << 20):
                found[entry.start] = bytes(entry.payload)
                at = entry.end
        except DamagedError as error:
            at = RaftIndex(log.index_of(Offset(error.end - 1)) + 1)
    return found
