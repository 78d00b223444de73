"""The tests of the log are worth something: each planted bug makes the random ones fail."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from raftmq.errors import RaftmqError
from raftmq.log.bare_entries import BareEntries
from raftmq.log.log_start import LocalStart, LogStartFile
from raftmq.log.model import FlushJob
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.segments import Segments
from raftmq.types import RaftIndex
from tests.log.test_log_model import IN_ORDER, STEPS, Machine

SEEDS = 300
Patch = Callable[[pytest.MonkeyPatch], None]


def bare_entries_are_not_awaited(patch: pytest.MonkeyPatch) -> None:
    original = ReplicatedLog.append_bare

    def append_bare(self: ReplicatedLog, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]
        self._flushed_bare = self._bare.dropped + len(self._bare.entries)

    patch.setattr(ReplicatedLog, "append_bare", append_bare)


def the_log_start_is_written_in_place(patch: pytest.MonkeyPatch) -> None:
    def replace(self: LogStartFile, local: LocalStart) -> None:
        file = self._disk.open(self._path, create=True)
        file.truncate(0)
        file.pwrite(local.encode(), 0)
        file.fdatasync()
        self._disk.sync_directory(self._folder)

    patch.setattr(LogStartFile, "replace", replace)


def segments_go_before_the_log_start(patch: pytest.MonkeyPatch) -> None:
    original = ReplicatedLog.move_start

    def move_start(self: ReplicatedLog, log_start: object) -> None:
        self._segments.remove_below(log_start.base_offset)  # type: ignore[attr-defined]
        self._disk.sync_directory(self.folder)
        original(self, log_start)  # type: ignore[arg-type]

    patch.setattr(ReplicatedLog, "move_start", move_start)


def a_job_claims_what_was_written_after_it(patch: pytest.MonkeyPatch) -> None:
    original = ReplicatedLog.complete

    def complete(self: ReplicatedLog, job: FlushJob) -> RaftIndex:
        if not job.is_void:
            job.synced_offset = self._segments.end_offset
        return original(self, job)

    patch.setattr(ReplicatedLog, "complete", complete)


def a_truncation_does_not_cap_the_job(patch: pytest.MonkeyPatch) -> None:
    original = ReplicatedLog._cut

    def cut(self: ReplicatedLog, end: RaftIndex) -> None:
        job, self._job = self._job, None
        original(self, end)
        self._job = job

    patch.setattr(ReplicatedLog, "_cut", cut)


def the_folder_is_not_synced(patch: pytest.MonkeyPatch) -> None:
    original = Segments.take_dirty
    patch.setattr(Segments, "take_dirty", lambda self: (original(self)[0], []))


def a_segment_rolls_before_the_old_one_is_flushed(patch: pytest.MonkeyPatch) -> None:
    def is_roll_pending(self: ReplicatedLog, size: int, next_offset: int) -> bool:
        now_ms = self._clock.wall_ms()
        if self._segments.must_roll(size, next_offset, now_ms):
            self._segments.roll(now_ms)
        return False

    patch.setattr(ReplicatedLog, "_is_roll_pending", is_roll_pending)


def bare_entries_are_cut_without_a_sync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BareEntries, "wipe_tail", lambda _self: None)


BUGS: list[Patch] = [
    bare_entries_are_not_awaited,
    the_log_start_is_written_in_place,
    segments_go_before_the_log_start,
    a_job_claims_what_was_written_after_it,
    a_truncation_does_not_cap_the_job,
    the_folder_is_not_synced,
    a_segment_rolls_before_the_old_one_is_flushed,
    bare_entries_are_cut_without_a_sync,
]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=[bug.__name__ for bug in BUGS])
def test_planted_bugs_are_caught(bug: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    for seed in range(SEEDS):
        random = Random(seed)
        try:
            machine = Machine(seed, IN_ORDER)
            for _ in range(200):
                machine.step(random.choice(STEPS))
        except (AssertionError, RaftmqError, IndexError):
            return
    pytest.fail(f"{SEEDS} seeds do not notice")
