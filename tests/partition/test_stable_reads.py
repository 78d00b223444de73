"""What readers of committed records are told, against brute force over random logs.

A log on a disk that crashes, with segments of a few batches, and what follows it; beside them a
list of rows, from which the last stable offset and the aborted transactions are found by walking
all of it. Both protocols, truncation, log starts that move over open transactions, installed log
starts, restarts with and without a crash, lost and damaged indexes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import attrs
import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from jepsen_like.disk import SimDisk
from raftmq.log.aborted import Aborted
from raftmq.log.log_start import LogStart
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.segment import Segment
from raftmq.log.segments import AbortedTransactions, Segments
from raftmq.partition.producer_state import ProducerCheckpoints, ProducerStateTable
from raftmq.partition.producers import PartitionProducers
from raftmq.records import Marker, NewRecord, build_batch, build_marker, parse_header
from raftmq.types import LeaderEpoch, Offset, RaftIndex
from tests.log.helpers import elect, flush, open_log, sim_disk
from tests.partition.fake_replica import FakeClock

FOLDER = "data/a-0"
STATE = "raftmq.partition.producer_state"
PRODUCERS = {1: 1, 2: 1, 3: 2, 4: 2}
"""Protocols by producer id."""


@pytest.fixture(autouse=True, scope="module")
def small_steps() -> Iterator[None]:
    """Let a few batches be many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raftmq.log.aborted.BLOCK_ENTRIES", 3)
        for name, value in {
            "COPY_BATCHES": 7,
            "CHECKPOINT_BATCHES": 14,
            "TURN_HEADERS": 3,
            "TURNS": 2,
            "COPIES_MAX": 3,
        }.items():
            patch.setattr(f"raftmq.partition.producers.{name}", value)
        yield


@define(frozen=True)
class Row:
    """A batch, as the model knows it."""

    base: int
    end: int
    pid: int  # -1: of no producer
    epoch: int
    sequence: int
    kind: str  # plain, data, commit or abort


@define
class Known:
    """What the rows say of one producer."""

    epoch: int = 0
    sequence: int = 0
    first: int = -1


def walk(rows: list[Row], end: int) -> tuple[dict[int, Known], list[Aborted]]:
    """Producers and aborted transactions, by the rows that end at or below `end`."""
    known = {pid: Known() for pid in PRODUCERS}
    aborted: list[Aborted] = []
    for row in rows:
        if row.end > end or row.pid < 0:
            continue
        producer = known[row.pid]
        if row.kind == "data":
            producer.epoch, producer.sequence = row.epoch, row.sequence + row.end - row.base
            if producer.first < 0:
                producer.first = row.base
            continue
        if producer.first >= 0 and row.kind == "abort":
            aborted.append(Aborted(row.pid, producer.first, row.base))
        producer.first = -1
        if row.epoch != producer.epoch:
            producer.epoch, producer.sequence = row.epoch, 0
    return known, aborted


def stable(rows: list[Row], end: int) -> int:
    known, _ = walk(rows, end)
    return min([end, *(p.first for p in known.values() if p.first >= 0)])


@define
class World:
    random: Random
    disk: SimDisk = field(factory=sim_disk)
    clock: FakeClock = field(factory=FakeClock)
    rows: list[Row] = field(factory=list)
    high_watermark: int = 0
    told: int = 0  # the greatest last stable offset of this life
    data: dict[int, bytes] = field(factory=dict)  # by base offset: what a peer has
    epoch: int = 1
    log: ReplicatedLog = field(init=False)
    producers: PartitionProducers = field(init=False)
    asked: int = 0
    found: int = 0

    def __attrs_post_init__(self) -> None:
        self.open(0)
        elect(self.log, self.epoch)

    def open(self, claimed: int) -> None:
        self.log = open_log(self.disk, claimed=claimed)
        checkpoints = ProducerCheckpoints(self.disk, FOLDER)
        self.producers = PartitionProducers(checkpoints, self.clock)
        self.producers.attach(self.log)

    # ---- what may happen ----

    def make(self, base: int) -> tuple[Row, bytes]:
        """Another batch of a log that ends at `base`."""
        random = self.random
        known, _ = walk(self.rows, base)
        places = {"base_offset": base, "leader_epoch": self.epoch}
        pid = random.choice((-1, *PRODUCERS))
        if pid < 0:
            count = random.randint(1, 3)
            data = build_batch([NewRecord(None, b"p" * 30)] * count, **places)
            return Row(base, base + count, -1, -1, -1, "plain"), bytes(data)
        producer = known[pid]
        if producer.first >= 0 and random.random() < 0.5:
            is_commit = random.random() < 0.4
            epoch = producer.epoch + PRODUCERS[pid] - 1
            data = build_marker(
                Marker(is_commit), producer_id=pid, producer_epoch=epoch, timestamp=0, **places
            )
            kind = "commit" if is_commit else "abort"
            return Row(base, base + 1, pid, epoch, -1, kind), bytes(data)
        count = random.randint(1, 3)
        data = build_batch(
            [NewRecord(None, b"d" * 30)] * count,
            producer_id=pid,
            producer_epoch=producer.epoch,
            base_sequence=producer.sequence,
            transactional=True,
            **places,
        )
        end = base + count
        return Row(base, end, pid, producer.epoch, producer.sequence, "data"), bytes(data)

    def append(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            row, data = self.make(self.log.log_end_offset)
            header = parse_header(data)
            self.log.append_batch(data, header)
            self.rows.append(row)
            self.data[row.base] = data
            self.producers.appended(header, data)

    def elect(self) -> None:
        self.epoch += 1
        elect(self.log, self.epoch)

    def flush(self) -> None:
        flush(self.log)

    def commit(self) -> None:
        end = int(self.log.flushed_end_offset)
        ends = [row.end for row in self.rows if self.high_watermark < row.end <= end]
        if ends:
            self.high_watermark = self.random.choice(ends)
            self.producers.committed(Offset(self.high_watermark), self.log.flushed_end_offset)

    def truncate(self) -> None:
        ends = [row.base for row in self.rows if row.base >= self.high_watermark]
        if ends:
            end = self.random.choice(ends)
            self.log.truncate_to(self.log.index_of(Offset(end)))
            self.rows = [row for row in self.rows if row.end <= end]
            self.producers.truncated()
            self.elect()

    def move_start(self) -> None:
        if self.log.log_start_offset >= self.high_watermark:
            return
        target = self.random.randint(self.log.log_start_offset, self.high_watermark)
        start = self.log.start_at(Offset(target))
        while (state := self.producers.state_at(start.base_offset)) is None:
            pass
        self.log.move_start(attrs.evolve(start, state=state))

    def install(self) -> None:
        """A leader's log start beyond all that is here."""
        for _ in range(self.random.randint(1, 20)):
            row, _ = self.make(self.rows[-1].end if self.rows else 0)
            self.rows.append(row)
        at = Offset(self.rows[-1].end)
        table = ProducerStateTable()
        for row in self.rows:
            header = parse_header(self.data_of(row))
            if header.is_control:
                table.end(header)
            else:
                table.append(header)
        index = RaftIndex(at + self.log.end_index - self.log.log_end_offset)
        epoch = LeaderEpoch(self.epoch)
        log_start = LogStart(at, index, epoch, b"", table.encode(self.random.choice((1, 2))))
        flush(self.log)
        self.log.reset_to(log_start)
        self.producers.restore(log_start)
        self.high_watermark = at
        self.elect()

    def data_of(self, row: Row) -> bytes:
        """A batch that says of its producer what the row does."""
        if row.kind in ("commit", "abort"):
            return bytes(
                build_marker(
                    Marker(row.kind == "commit"),
                    producer_id=row.pid,
                    producer_epoch=row.epoch,
                    timestamp=0,
                    base_offset=row.base,
                )
            )
        return bytes(
            build_batch(
                [NewRecord(None, b"")] * (row.end - row.base),
                producer_id=row.pid,
                producer_epoch=row.epoch,
                base_sequence=row.sequence,
                transactional=row.kind == "data",
                base_offset=row.base,
            )
        )

    def restart(self) -> None:
        flush(self.log)
        claimed = self.log.flushed_end
        self.log.close()
        self.begin_again(claimed)

    def crash(self) -> None:
        claimed = self.log.flushed_end
        self.disk.crash(self.random)
        self.begin_again(claimed)

    def begin_again(self, claimed: int) -> None:
        self.disk.end_faults()
        self.told = 0
        self.open(claimed)
        for start, end in self.log.damaged:  # what the crash took stood before what it left
            bases = [row.base for row in self.rows if start <= row.base < end]
            self.log.repair(start, [self.data[base] for base in bases])
        end = self.log.log_end_offset
        assert end >= self.high_watermark
        self.rows = [row for row in self.rows if row.end <= end]
        self.elect()

    def lose_index(self) -> None:
        """Aborted transactions are to be found again; now, or when the log is opened."""
        paths = [path for path in self.disk.files(FOLDER) if path.endswith(".txnindex")]
        if not paths:
            return
        path = self.random.choice(paths)
        size = len(self.disk.content(path))
        if self.random.random() < 0.3 or not size:
            self.disk.lose(path)
        else:
            self.disk.flip(path, self.random.randrange(size), self.random.randrange(8))

    # ---- what must hold ----

    def check(self) -> None:
        """A reader may be told to come again, and soon is told the truth."""
        end = Offset(self.high_watermark)
        for _ in range(10_000):
            lso = self.producers.last_stable_offset(end)
            if lso is not None:
                break
            self.producers.work_on()
        assert lso == stable(self.rows, end)
        assert lso >= self.told, "it never falls"
        self.told = lso
        start = self.random.randint(min(self.log.log_start_offset, lso), lso)
        stop = self.random.randint(start, lso)
        if start < self.log.log_start_offset or start == stop:
            return
        for _ in range(10_000):
            aborted = self.producers.aborted(Offset(start), Offset(stop))
            if aborted is not None:
                break
            self.producers.work_on()
        _, truth = walk(self.rows, self.log.log_end_offset)
        expected = [row for row in truth if row.marker_offset >= start and row.first_offset < stop]
        assert aborted == sorted(expected, key=lambda row: row.first_offset)
        self.asked += 1
        self.found += len(expected)


STEPS: dict[str, int] = {
    "append": 12,
    "flush": 6,
    "commit": 8,
    "elect": 1,
    "truncate": 1,
    "move_start": 1,
    "install": 1,
    "restart": 1,
    "crash": 1,
    "lose_index": 2,
}


def play(seed: int, steps: int, *, without: tuple[str, ...] = ()) -> World:
    random = Random(seed)
    world = World(random)
    names = [name for name, weight in STEPS.items() for _ in range(weight) if name not in without]
    for _ in range(steps):
        step: Callable[[], None] = getattr(world, random.choice(names))
        step()
        if random.random() < 0.4:
            world.check()
    world.check()
    return world


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_readers_are_told_the_truth(seed: int) -> None:
    play(seed, 60)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_longer_logs(seed: int) -> None:
    world = play(seed, 400, without=("install",) if seed % 2 else ())
    assert world.asked > 30
    assert world.found > 10


# ---- bugs planted on purpose, each of which must be found ----

_settle = ProducerStateTable.settle
_encoding = ProducerStateTable.encoding
_copy = ProducerStateTable.copy


def _settle_all(table: ProducerStateTable, _high_watermark: Offset) -> None:
    """The last stable offset passes markers that are only appended."""
    _settle(table, Offset(1 << 40))


def _encode_without_open(table: ProducerStateTable, *args: Any, **named: Any) -> Any:
    """A log start does not carry what is open."""
    closed = _copy(table)
    closed._open.clear()
    return _encoding(closed, *args, **named)


def _copy_without_ended(table: ProducerStateTable) -> ProducerStateTable:
    """After a truncation nobody knows whose markers are not committed."""
    copy = _copy(table)
    copy._ended.clear()
    return copy


def _open_whatever(recovery: Any, kept: list[Segment]) -> None:
    """An index may say more than its segment holds after a crash."""
    for segment in kept:
        segment.aborted.open()


def _keep_after_cut(_segments: Segments, _segment: Segment, _offset: int) -> None:
    """An index goes on to say what was cut off."""


def _reach_anything(self: AbortedTransactions, start: int, end: int, found: Any) -> None:
    """What is told after a gap closes it."""
    for segment in self._segments.all:
        if segment.end_offset > start and segment.base_offset < end:
            segment.aborted.covered = max(segment.aborted.covered, start)
    _take_one(self, start, end, found)


_take_one = AbortedTransactions._take_one

PLANTED: dict[str, tuple[str, object]] = {
    "appended markers count": (f"{STATE}.ProducerStateTable.settle", _settle_all),
    "a log start without what is open": (
        f"{STATE}.ProducerStateTable.encoding",
        _encode_without_open,
    ),
    "a copy without what ended": (f"{STATE}.ProducerStateTable.copy", _copy_without_ended),
    "an index ahead of its log": (
        "raftmq.log.recovery._Recovery._open_aborted",
        _open_whatever,
    ),
    "an index that is not cut": ("raftmq.log.segments.Segments._cut_aborted", _keep_after_cut),
    "a gap that is forgotten": (
        "raftmq.log.segments.AbortedTransactions._take_one",
        _reach_anything,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[name])
    for seed in range(300):
        try:
            play(seed, 80)
        except AssertionError:
            return
    pytest.fail("not found")
