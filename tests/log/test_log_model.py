"""The log against a list, under random use, crashes in the middle of anything, and reopening."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jepsen_like.disk import CrashOdds, SimCrash, SimDisk
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError, FlushJob, LogConfig
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.shared import Shared
from raftmq.records import check_batches, read_records
from raftmq.types import LeaderEpoch, Offset, RaftIndex
from tests.log.helpers import (
    ELECTION,
    MEMBERSHIP,
    FakeClock,
    Model,
    ModelEntry,
    all_entries,
    batch,
    open_log,
    span_bytes,
)

STEPS = (
    ["batch"] * 8
    + ["bare", "elect", "job", "job", "run", "run", "complete", "complete", "complete"]
    + ["truncate", "crash", "reopen", "read", "read", "start", "reset", "scrub", "time", "roll"]
)
IN_ORDER = CrashOdds(sectors=0.0)


class Machine:
    """Drives a log and its model; `flushed` is what a completed job promised."""

    def __init__(self, seed: int, odds: CrashOdds) -> None:
        self.random = Random(seed)
        self.odds = odds
        self.disk = SimDisk(Random(seed + 1))
        self.clock = FakeClock()
        self.config = LogConfig(
            segment_bytes=self.random.choice((700, 2000, 6000)),
            segment_ms=5000,
            index_interval_bytes=self.random.choice((1, 300, 4096)),
            bare_reserve_bytes=4096,
            verify_bytes_max=self.random.choice((1, 1000, 1 << 20)),
            verified_ms=3000,
            segment_reserve_bytes=self.random.choice((0, 0, 1024)),
        )
        self.model = Model()
        self.flushed = 0
        self.claimed = 0
        self.job: FlushJob | None = None
        self.log = self._open()

    def _open(self) -> ReplicatedLog:
        shared = Shared.make(self.disk, files_max=3, index_bytes_max=256, recent_bytes_max=9000)
        return open_log(
            self.disk, self.config, claimed=self.claimed, clock=self.clock, shared=shared
        )

    def step(self, name: str) -> None:
        self.clock.now_ms += self.random.randrange(0, 400)
        before = Model(
            list(self.model.entries),
            self.model.start_index,
            self.model.start_offset,
            self.model.previous_epoch,
        )
        if self.random.random() < 0.08 and name not in ("crash", "reopen"):
            self.disk.crash_after(self.random.randrange(1, 12))
        try:
            getattr(self, f"do_{name}")()
        except SimCrash:
            self._recover([before, self.model])
            return
        self.disk.crash_after(None)
        assert self.flushed <= self.log.flushed_end <= self.log.end_index

    def do_batch(self) -> None:
        if self.model.epoch == 0:
            self.do_elect()
        count = self.random.randrange(1, 5)
        size = self.random.choice((0, 30, 200, 900))
        offset = self.model.end_offset
        data = batch(offset, self.model.epoch, count, size, timestamp=self.random.randrange(9999))
        self.model.add(self.model.epoch, 0, data, count)
        self.log.append_batch(data)

    def _bare(self, kind: int, epoch: int) -> None:
        payload = bytes(self.random.randrange(256) for _ in range(self.random.choice((0, 9, 700))))
        index = self.model.end_index
        self.model.add(epoch, kind, payload, 1)
        self.log.append_bare(RaftIndex(index), LeaderEpoch(epoch), kind, payload)

    def do_elect(self) -> None:
        self._bare(ELECTION, self.model.epoch + self.random.randrange(1, 3))

    def do_bare(self) -> None:
        if self.model.epoch:
            self._bare(MEMBERSHIP, self.model.epoch)

    def do_job(self) -> None:
        if self.job is None:
            self.job = self.log.flush_job()

    def do_run(self) -> None:
        if self.job is not None and not self.job.is_done:
            self.job.run()

    def do_complete(self) -> None:
        if self.job is not None and self.job.is_done:
            job, self.job = self.job, None
            self.flushed = max(self.flushed, self.log.complete(job))
            assert self.flushed <= self.model.end_index
            if self.random.random() < 0.7:
                self.claimed = self.flushed

    def do_truncate(self) -> None:
        end = self.random.choice(self.model.boundaries())
        self.claimed = min(self.claimed, end)
        self.flushed = min(self.flushed, end)
        self.model.truncate(end)
        self.log.truncate_to(RaftIndex(end))

    def do_start(self) -> None:
        # The engine moves the start only over committed entries, so over some that were flushed.
        candidates = [b for b in self.model.boundaries() if b <= self.flushed]
        if not candidates:
            return
        index = self.random.choice(candidates)
        offset = Offset(self.model.offset_of(index))
        start = LogStart(
            offset=offset,
            index=RaftIndex(index),
            previous_epoch=self.log.previous_epoch_at(RaftIndex(index)),
            state=b"s" * self.random.choice((0, 900)),
        )
        self.model.drop_below(index)
        self.log.move_start(start)
        self.flushed = max(self.flushed, index)

    def do_reset(self) -> None:
        if self.random.random() < 0.7:
            return
        epoch = self.model.epoch + 1
        index = self.model.end_index + self.random.randrange(-3, 5)
        offset = max(0, min(index, self.model.end_offset + self.random.randrange(-3, 3)))
        index = max(index, offset)
        self.claimed = min(self.claimed, index)
        self.flushed = min(self.flushed, index, self.model.start_index)
        self.model = Model([], index, offset, epoch)
        start = LogStart(Offset(offset), RaftIndex(index), LeaderEpoch(epoch))
        self.job = None
        self.log.reset_to(start)
        self.flushed = index

    def do_read(self) -> None:
        self.model.check(self.log)
        end = self.random.randrange(self.model.start_offset, self.model.end_offset + 1)
        offset = self.random.randrange(self.model.start_offset, self.model.end_offset + 1)
        data, at = b"", offset
        while True:
            spans = self.log.locate(Offset(at), self.random.choice((1, 500, 5000)), Offset(end))
            if not spans:
                break
            piece = span_bytes(spans)
            data += piece
            assert self._next_offset(piece) > at
            at = self._next_offset(piece)
        expected = b""
        written = self.log._segments.end_offset
        for entry in self.model.entries:
            base = self.model.offset_of(entry.start)
            top = base + entry.end - entry.start
            if entry.kind == 0 and top > offset and top <= min(end, written):
                expected += entry.payload
                if not data:
                    pytest.fail("a batch was not located")
        assert data == expected

    def _next_offset(self, piece: bytes) -> int:
        return check_batches(piece)[-1].next_offset

    def do_time(self) -> None:
        end = self.model.offset_of(self.random.choice(self.model.boundaries()))
        written = self.log._segments.end_offset
        end = min(end, written)
        stamp = self.random.randrange(10_000)
        times = self._times(end)
        found = self.log.offset_for_timestamp(stamp, Offset(end))
        expected = next(((t, o) for t, o in times if t >= stamp), None)
        assert (found and found[:2]) == expected
        found = self.log.max_timestamp(Offset(end))
        greatest = max((t for t, _ in times), default=None)
        expected = next(((t, o) for t, o in times if t == greatest), None)
        assert (found and found[:2]) == expected

    def _times(self, end: int) -> list[tuple[int, int]]:
        times: list[tuple[int, int]] = []
        for entry in self.model.entries:
            if entry.kind == 0:
                times += [(r.timestamp, r.offset) for r in read_records(entry.payload)]
        return [(t, o) for t, o in times if o < end]

    def do_scrub(self) -> None:
        assert self.log.scrub(self.random.choice((1, 500, 1 << 20))) == []

    def do_roll(self) -> None:
        self.log.roll_if_aged(self.clock.wall_ms())

    def do_reopen(self) -> None:
        """A clean restart, or a kill: the page cache stays."""
        if self.random.random() < 0.5:
            self.log.close()
        self.job = None
        self._settle_staged()
        self.log = self._open()
        assert self.log.recovery.damaged == []
        self.model.check(self.log)
        self.flushed = min(self.flushed, self.log.flushed_end)

    def _settle_staged(self) -> None:
        """What was staged dies with the process, and so does every bare entry behind it."""
        written = self.log._segments.end_offset
        for entry in self.model.entries:
            if entry.kind == 0 and self.model.offset_of(entry.start) >= written:
                self.model.truncate(entry.start)
                return

    def do_crash(self) -> None:
        raise SimCrash

    def _recover(self, candidates: list[Model]) -> None:
        self.disk.crash(self.random, self.odds)
        self.job = None
        self.log = self._open()
        report = self.log.recovery
        assert report.claimed_end == 0
        assert report.damaged == []
        found = [
            ModelEntry(e.start, e.end, e.leader_epoch, e.kind, bytes(e.payload))
            for e in all_entries(self.log)
        ]
        start = self.log.log_start
        for model in candidates:
            place = (model.start_index, model.start_offset, model.previous_epoch)
            if (
                place == (start.index, start.base_offset, start.previous_epoch)
                and found == model.entries[: len(found)]
            ):
                model.entries = model.entries[: len(found)]
                self.model = model
                break
        else:
            raise AssertionError("neither the log before nor the log after the interrupted step")
        assert self.log.end_index >= self.flushed, "flushed entries are lost"
        self.flushed = self.log.flushed_end
        self.model.check(self.log)


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)
@given(seed=st.integers(0, 1 << 30), steps=st.lists(st.sampled_from(STEPS), max_size=120))
def test_log_equals_a_list(seed: int, steps: list[str]) -> None:
    """Whatever is done, and wherever the power fails, the log is the list or a legal prefix."""
    machine = Machine(seed, IN_ORDER)
    for name in steps:
        machine.step(name)
    machine.do_read()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_long_runs(seed: int) -> None:
    """As above, with longer histories than Hypothesis likes to draw."""
    machine = Machine(seed, IN_ORDER)
    random = Random(seed)
    for _ in range(250):
        machine.step(random.choice(STEPS))
    machine.do_read()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_writes_that_reach_the_device_out_of_order(seed: int) -> None:
    """Sectors that overtake others may look like damage; what can be read is still right."""
    random = Random(seed)
    odds = CrashOdds(lose=0.0, prefix=0.1, torn=0.1, sectors=0.8)
    machine = Machine(seed, odds)
    for _ in range(120):
        name = random.choice(STEPS)
        if name in ("crash", "truncate", "start", "reset"):
            continue
        getattr(machine, f"do_{name}")()
    machine.disk.crash(random, odds)
    log = machine._open()
    assert log.end_index >= machine.flushed
    payloads = {e.start: e.payload for e in machine.model.entries}
    at = log.log_start.index
    while at < log.end_index:
        try:
            entry = log.entries(at, 1)[0]
        except DamagedError as error:
            at = RaftIndex(log.index_of(Offset(error.end - 1)) + 1)
            is_unflushed = at > machine.flushed
            assert is_unflushed, "flushed bytes are not damaged"
            continue
        assert bytes(entry.payload) == payloads[at]
        at = entry.end
