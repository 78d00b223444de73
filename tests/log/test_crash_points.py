"""Power fails in the middle of every step of every operation of several steps; or the process dies
there, the next one goes on with what it sees, and power fails after that.

Each scenario runs once per change that it makes to the disk, and with several fates of what was not
synced. Whatever happened, the log opens as it was before or after, and nothing flushed is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from random import Random

import attrs
import pytest

from jepsen_like.disk import CrashOdds, SimCrash, SimDisk
from raftmq.log.journal import GroupState, HardStateJournal, JournalConfig
from raftmq.log.log_start import LogStart
from raftmq.log.model import LogConfig
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.types import METADATA_TOPIC_ID, LeaderEpoch, Offset, RaftGroupId, RaftIndex
from tests.log.helpers import (
    SMALL,
    all_entries,
    append,
    elect,
    flush,
    flush_journal,
    open_log,
    sim_disk,
)

FATES = [
    CrashOdds(lose=1, names=1),
    CrashOdds(lose=0, prefix=0, torn=0, sectors=0, names=0),
    CrashOdds(lose=1, names=0),
    CrashOdds(lose=0, prefix=0, torn=0, sectors=0, names=1),
    *[CrashOdds(lose=0.2, prefix=0.4, torn=0.4, sectors=0, names=0.5)] * 6,
]
NO_RECENT_SEGMENTS = attrs.evolve(SMALL, segment_bytes=600)

Contents = list[tuple[int, int, bytes]]


def contents(log: ReplicatedLog) -> Contents:
    return [(e.start, e.kind, bytes(e.payload)) for e in all_entries(log)]


def prepared(disk: SimDisk, config: LogConfig = NO_RECENT_SEGMENTS) -> ReplicatedLog:
    """Three epochs over several segments, all flushed."""
    log = open_log(disk, config)
    for epoch in (1, 2, 3):
        elect(log, epoch)
        for _ in range(4):
            append(log, epoch, count=2, size=70)
        flush(log)
    return log


def roll(log: ReplicatedLog) -> None:
    for _ in range(3):
        append(log, 3, size=300)
        flush(log)


def roll_idle(log: ReplicatedLog) -> None:
    assert log.roll_if_aged(1 << 50)


def expire_all(log: ReplicatedLog) -> None:
    """Nothing is left but an empty segment."""
    roll_idle(log)
    log.move_start(log.start_at(log.log_end_offset))


def bare_then_batches(log: ReplicatedLog) -> None:
    elect(log, 4)
    append(log, 4, size=300)
    log.append_bare(log.end_index, LeaderEpoch(4), 2, b"m" * 700)
    append(log, 4, size=300)
    flush(log)


def truncate_in_active(log: ReplicatedLog) -> None:
    log.truncate_to(RaftIndex(log.end_index - 2))


def truncate_across(log: ReplicatedLog) -> None:
    log.truncate_to(RaftIndex(10))


def truncate_and_go_on(log: ReplicatedLog) -> None:
    log.truncate_to(RaftIndex(5))
    elect(log, 7)
    append(log, 7)
    flush(log)


def move_start(log: ReplicatedLog) -> None:
    log.move_start(attrs.evolve(log.start_at(Offset(13)), state=b"s" * 900))


def reset(log: ReplicatedLog) -> None:
    log.reset_to(LogStart(Offset(50), RaftIndex(60), LeaderEpoch(5)))


def reset_and_go_on(log: ReplicatedLog) -> None:
    reset(log)
    elect(log, 6)
    append(log, 6)
    flush(log)


SCENARIOS: list[tuple[Callable[[ReplicatedLog], None], int]] = [
    (roll, 27),
    (roll_idle, 27),
    (expire_all, 27),
    (bare_then_batches, 27),
    (truncate_in_active, 25),
    (truncate_across, 10),
    (truncate_and_go_on, 5),
    (move_start, 27),
    (reset, 0),
    (reset_and_go_on, 0),
]


@pytest.mark.parametrize(
    ("operation", "kept"), SCENARIOS, ids=[operation.__name__ for operation, _ in SCENARIOS]
)
def test_a_crash_at_every_step(operation: Callable[[ReplicatedLog], None], kept: int) -> None:
    """`kept` is how far the log must reach afterwards; the caller claims no more than that."""
    is_done = False
    step = 0
    while not is_done:
        step += 1
        for seed, fate in enumerate(FATES):
            disk = sim_disk(seed)
            log = prepared(disk)
            before = contents(log)
            disk.crash_after(step)
            try:
                operation(log)
                is_done = True
            except SimCrash:
                pass
            disk.crash(Random(seed), fate)
            check_reopened(disk, operation, before, kept)
    assert step > (2 if operation is roll_idle else 5)


@pytest.mark.parametrize(
    ("operation", "kept"), SCENARIOS, ids=[operation.__name__ for operation, _ in SCENARIOS]
)
def test_a_process_dies_at_every_step_and_power_fails_later(
    operation: Callable[[ReplicatedLog], None], kept: int
) -> None:
    """What the next process sees need not be on the device, names least of all; what it flushes
    is."""
    is_done = False
    step = 0
    while not is_done:
        step += 1
        for seed, fate in enumerate(FATES):
            disk = sim_disk(seed)
            log = prepared(disk)
            disk.crash_after(step)
            try:
                operation(log)
                is_done = True
            except SimCrash:
                pass
            disk.end_process()
            go_on_and_lose_power(disk, kept, seed, fate)


def go_on_and_lose_power(disk: SimDisk, kept: int, seed: int, fate: CrashOdds) -> None:
    log = open_log(disk, NO_RECENT_SEGMENTS, claimed=kept)
    assert log.damaged == []
    elect(log, 9)
    append(log, 9)
    claimed = flush(log)
    assert claimed == log.end_index
    flushed = contents(log)
    disk.crash(Random(seed), fate)
    log = open_log(disk, NO_RECENT_SEGMENTS, claimed=claimed)
    assert log.damaged == []
    assert log.end_index == claimed
    assert contents(log) == flushed


@pytest.mark.parametrize(("operation", "kept"), [(move_start, 27), (reset, 0)])
def test_a_process_dies_and_power_fails_while_the_next_one_opens_the_log(
    operation: Callable[[ReplicatedLog], None], kept: int
) -> None:
    """What recovery takes away because of what it read must not be gone before that is durable."""
    for step in range(1, 16):
        for seed in range(12):
            disk = sim_disk(seed)
            log = prepared(disk)
            disk.crash_when(lambda verb, _: 0 if verb == "sync directory" else None)
            with pytest.raises(SimCrash):
                operation(log)  # the new log start has its name, which is not durable
            disk.end_process()
            disk.crash_after(step)
            with suppress(SimCrash):
                open_log(disk, NO_RECENT_SEGMENTS, claimed=kept)
            disk.crash(Random(seed), CrashOdds(lose=0, prefix=0, torn=0, sectors=0, names=0.5))
            log = open_log(disk, NO_RECENT_SEGMENTS, claimed=kept)
            assert log.damaged == []
            assert log.recovery.claimed_end == 0


def check_reopened(
    disk: SimDisk, operation: Callable[[ReplicatedLog], None], before: Contents, kept: int
) -> None:
    for _ in range(2):  # what recovery did must itself be durable
        log = open_log(disk, NO_RECENT_SEGMENTS, claimed=kept)
        assert log.damaged == []
        assert log.recovery.claimed_end == 0
        found = contents(log)
        if log.log_start.index == 60:
            assert operation in (reset, reset_and_go_on)
            assert all(start >= 60 for start, _, _ in found)
        else:
            assert log.end_index >= kept
            old = [entry for entry in before if entry[0] >= log.log_start.index]
            common = [entry for entry in found if entry[0] < 5 or entry in old]
            assert found[: len(old)] == old[: len(found)] or operation is truncate_and_go_on
            assert len(common) >= len([e for e in old if e[0] < kept])
        disk.crash(Random(1), FATES[0])
    epoch = max(9, *(e for e, _ in log.epochs())) if log.epochs() else 9
    log = open_log(disk, NO_RECENT_SEGMENTS, claimed=kept)
    elect(log, epoch)
    append(log, epoch)
    assert flush(log) == log.end_index


def test_a_crash_during_recovery() -> None:
    """Recovery cuts, drops and finishes; being interrupted in that must not matter."""
    for step in range(1, 40):
        for seed, fate in enumerate(FATES):
            disk = sim_disk(seed)
            log = prepared(disk)
            before = contents(log)
            elect(log, 4)
            append(log, 4, size=300)
            flush(log)
            disk.crash_after(6)
            with pytest.raises(SimCrash):
                log.truncate_to(RaftIndex(14))
            disk.crash(Random(seed), FATES[1])
            disk.crash_after(step)
            with suppress(SimCrash):
                open_log(disk, NO_RECENT_SEGMENTS, claimed=14)
            disk.crash(Random(seed), fate)
            log = open_log(disk, NO_RECENT_SEGMENTS, claimed=14)
            assert log.damaged == []
            found = contents(log)
            assert found == before[: len(found)] or found[: len(before)] == before
            assert log.end_index >= 14


class HalfRepaired:
    """A log with a damaged segment, whose repair a crash interrupts after so many disk changes."""

    def __init__(self, disk: SimDisk, step: int) -> None:
        log = prepared(disk)
        self.before = contents(log)
        first = log._segments.all[0]
        position = first.size - 30
        log.close()
        disk.flip(first.path, position)
        disk.remove(first.offset_index.path)
        disk.sync_directory(log.folder)
        log = open_log(disk, NO_RECENT_SEGMENTS, claimed=27)
        start, end = self.damage = log.damaged[0]
        index = log.index_of(start)
        self.good = [p for s, k, p in self.before if k == 0 and index <= s < index + end - start]
        disk.crash_after(step)
        self.is_done = False
        with suppress(SimCrash):
            log.repair(start, self.good)
            self.is_done = True


def test_a_crash_during_repair() -> None:
    step = 0
    is_done = False
    while not is_done:
        step += 1
        for seed, fate in enumerate(FATES):
            disk = sim_disk(seed)
            half = HalfRepaired(disk, step)
            is_done |= half.is_done
            disk.crash(Random(seed), fate)
            log = open_log(disk, NO_RECENT_SEGMENTS, claimed=27)
            if log.damaged:
                assert log.damaged == [half.damage]
                log.repair(half.damage[0], half.good)
            assert contents(log) == half.before
    assert step > 5


def test_a_process_dies_during_repair_and_power_fails_later() -> None:
    """The next one finds no damage, and promises all that it holds."""
    step = 0
    is_done = False
    while not is_done:
        step += 1
        disk = sim_disk(step)
        half = HalfRepaired(disk, step)
        is_done = half.is_done
        disk.end_process()
        log = open_log(disk, NO_RECENT_SEGMENTS, claimed=27)
        if log.damaged:
            continue
        disk.crash(Random(step), FATES[0])
        log = open_log(disk, NO_RECENT_SEGMENTS, claimed=27)
        assert log.damaged == []
        assert contents(log) == half.before
    assert step > 5


def group(number: int) -> RaftGroupId:
    return RaftGroupId(METADATA_TOPIC_ID, number, 1)


def test_a_crash_at_every_step_of_the_journal() -> None:
    """Votes that were flushed stay, through any number of rewritten files."""
    config = JournalConfig(size_max=2048, reserve_bytes=512)
    for step in range(1, 120):
        for seed, fate in enumerate(FATES):
            disk = sim_disk(seed)
            disk.make_directories("data")
            disk.crash_after(step)
            promised: dict[int, int] = {}
            written: dict[int, int] = {}
            try:
                journal = HardStateJournal.open(disk, "data/state.journal", config=config)
                for term in range(1, 25):
                    number = term % 3
                    written[number] = term
                    sequence = journal.put(group(number), GroupState(term=term))
                    journal.put(group(number), GroupState(term=term, flushed_end=term), lazy=True)
                    if term % 5 == 0:
                        job = journal.flush_job()
                        journal.flush_now()
                        promised = dict(written)
                        if job is not None:
                            job.run()
                            journal.complete(job)
                    elif term % 2:
                        flush_journal(journal)
                        if journal.flushed_sequence >= sequence:
                            promised = dict(written)
            except SimCrash:
                pass
            disk.crash(Random(seed), fate)
            journal = HardStateJournal.open(disk, "data/state.journal", config=config)
            assert not journal.damaged
            for number, term in promised.items():
                state = journal.get(group(number))
                assert state is not None
                assert term <= state.term <= written[number]
