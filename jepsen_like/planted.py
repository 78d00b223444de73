"""Bugs planted on purpose, each of which the simulation must find: the test of the tests.

Each bug is a context manager that patches the product's own modules and undoes it, with the options
that stress what it breaks. `hunt` runs seeds until one is caught. A bug that escapes means that the
faults or the invariants of the simulation are too weak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final
from unittest.mock import patch

import attrs
from attrs import frozen

from jepsen_like.options import SimOptions, draw_options
from jepsen_like.sim import Verdict, run_seed
from raftmq.cluster import recovery as cluster_recovery
from raftmq.cluster.journal_place import JournalPlace
from raftmq.cluster.outbox import Outbox
from raftmq.log.hard_state import GroupState, HardStateJournal
from raftmq.log.log_start import LocalStart, LogStartFile
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.raft import election, follower, leader
from raftmq.raft.core import RaftCore
from raftmq.raft.messages import Message
from raftmq.records import BatchHeader
from raftmq.types import Buffer, RaftGroupId, RaftIndex, Term

Plant = Callable[[], AbstractContextManager[None]]


@frozen
class Bug:
    """A planted bug and where to look for it."""

    plant: Plant
    options: Callable[[int], SimOptions]


@frozen
class Catch:
    """What came of a hunt."""

    name: str
    seeds: int
    is_caught: bool
    found: str = ""

    def __str__(self) -> str:
        if self.is_caught:
            return f"{self.name}: caught at seed {self.seeds} by {self.found}"
        return f"{self.name}: ESCAPED {self.seeds} seeds"


def hunt(name: str, first: int = 1, seeds: int = 200) -> Catch:
    """Run seeds with the bug planted until one is caught."""
    bug = BUGS[name]
    for number in range(seeds):
        seed = first + number
        with bug.plant():
            result = run_seed(seed, bug.options(seed))
        if result.verdict is Verdict.ANOMALY:
            return Catch(name, number + 1, True, result.name)
    return Catch(name, seeds, False)


# ---- options that stress ----


def _drawn(seed: int, **changes: Any) -> SimOptions:
    return attrs.evolve(draw_options(seed), nodes=3, groups=1, safety_ms=5_000, **changes)


def _crashes(seed: int) -> SimOptions:
    """Much power loss, short outages."""
    return _drawn(
        seed,
        fsync_ms=(1.0, 15.0),
        fault_every_ms=(80.0, 400.0),
        fault_lasts_ms=(20.0, 300.0),
    ).with_weights(crash=2, crash_leader=3, crash_all=2, crash_point=3, isolate_leader=1)


def _partitions(seed: int) -> SimOptions:
    """Leaders cut off again and again."""
    return _drawn(
        seed,
        drop=0.02,
        straggler=0.05,
        fault_every_ms=(80.0, 500.0),
        fault_lasts_ms=(100.0, 900.0),
    ).with_weights(isolate_leader=4, halves=2, one_way=2, crash_leader=2, isolate=1, storm=1)


def _split_votes(seed: int) -> SimOptions:
    """Candidates that compete, and voters that crash right after they voted."""
    return _drawn(
        seed,
        pre_vote=False,
        check_quorum=False,
        tick_ms=10,
        election_ticks=3,
        heartbeat_ticks=1,
        latency_ms=(0.5, 15.0),
        straggler=0.2,
        straggler_ms=60,
        fsync_ms=(0.5, 3.0),
        fault_every_ms=(30.0, 100.0),
        fault_lasts_ms=(20.0, 200.0),
    ).with_weights(crash_voter=6, isolate_leader=2, crash_leader=1)


def _log_starts(seed: int) -> SimOptions:
    """The log start moves and the power goes."""
    return _drawn(
        seed, fault_every_ms=(40.0, 200.0), fault_lasts_ms=(20.0, 200.0), segment_bytes=600
    ).with_weights(log_start=4, crash_point=5, crash=1, crash_leader=1)


def _slow_flushes(seed: int) -> SimOptions:
    """Bare entries with records right behind them, long flushes, and the power goes."""
    return _drawn(
        seed,
        fsync_ms=(15.0, 50.0),
        think_ms=(2.0, 10.0),
        fault_every_ms=(20.0, 90.0),
        fault_lasts_ms=(20.0, 120.0),
        segment_bytes=1 << 20,
    ).with_weights(log_start=4, crash=3, crash_leader=2)


def _deposed(seed: int) -> SimOptions:
    """Leaders that others have replaced and that do not know it yet."""
    return _drawn(
        seed, check_quorum=False, fault_every_ms=(200.0, 600.0), fault_lasts_ms=(500.0, 1_500.0)
    ).with_weights(isolate_leader=5, halves=1)


def _truncations(seed: int) -> SimOptions:
    """Deposed leaders whose suffix goes, and the power right after."""
    return _drawn(
        seed,
        think_ms=(2.0, 15.0),
        fault_every_ms=(60.0, 250.0),
        fault_lasts_ms=(100.0, 700.0),
    ).with_weights(isolate_leader=5, crash=2, crash_point=3, crash_all=1)


def _rot(seed: int) -> SimOptions:
    """Flushed bytes go bad while a node is down."""
    return _drawn(seed, fault_every_ms=(80.0, 400.0), fault_lasts_ms=(50.0, 400.0)).with_weights(
        rot=3, crash_leader=2, isolate_leader=2, isolate=1
    )


def _wipes(seed: int) -> SimOptions:
    """Storages are lost while elections are held."""
    return _drawn(seed, fault_every_ms=(80.0, 400.0), fault_lasts_ms=(20.0, 500.0)).with_weights(
        lose_folder=4, isolate_leader=2, crash_leader=2, isolate=2
    )


# ---- bugs ----


def _patching(target: object, name: str, replacement: object) -> Plant:
    @contextmanager
    def plant() -> Iterator[None]:
        with patch.object(target, name, replacement):
            yield

    return plant


def _best_of(ends: Sequence[RaftIndex]) -> RaftIndex:
    return max(ends)


def _always(*_arguments: object, **_named: object) -> bool:
    return True


def _commit_anything_new(end: RaftIndex, commit_end: RaftIndex, _term_start: RaftIndex) -> bool:
    return end > commit_end


_put = HardStateJournal.put
_get = HardStateJournal.get


def _put_without_vote(
    journal: HardStateJournal, group: RaftGroupId, state: GroupState, *, lazy: bool = False
) -> int:
    return _put(journal, group, attrs.evolve(state, vote=None), lazy=lazy)


_release = Outbox.release


def _release_unflushed(
    outbox: Outbox, sequence: int, _flushed_end: RaftIndex, term: Term
) -> list[Message]:
    return _release(outbox, sequence, RaftIndex(1 << 62), term)


def _release_before_journal(
    outbox: Outbox, _sequence: int, flushed_end: RaftIndex, term: Term
) -> list[Message]:
    return _release(outbox, 1 << 62, flushed_end, term)


_advance = RaftCore.advance


def _advance_to_log_end(core: RaftCore, _flushed_end: RaftIndex) -> None:
    _advance(core, core.log_end)


def _merge_and_cut(
    core: RaftCore, agreed_end: RaftIndex, _term: Term, entries: Sequence[Any]
) -> RaftIndex:
    """Everything after the request's position goes, whether it agrees or not."""
    if core.log_end > agreed_end and entries:
        core.matched_end = min(core.matched_end, agreed_end)
        core.truncate_to(agreed_end)
    if entries and core.log_end == agreed_end:
        follower._append(core, tuple(entries))
    return core.log_end if entries else agreed_end


def _commit_uncapped(core: RaftCore, leader_commit_end: RaftIndex) -> None:
    """The leader's word is taken for entries that may not be its own."""
    commit_end = min(leader_commit_end, core.log_end)
    if commit_end > core.commit_end:
        core.set_commit_end(commit_end)


def _replace_in_place(self: LogStartFile, local: LocalStart) -> None:
    """The tuple is written over the old one, in two steps, and synced at the end."""
    file = self._disk.open(self._path, create=True)
    try:
        file.truncate(0)
        data = local.encode()
        file.pwrite(data[: len(data) // 2], 0)
        file.pwrite(data[len(data) // 2 :], len(data) // 2)
        file.fdatasync()
    finally:
        file.close()
    self._disk.sync_directory(self._folder)


_open = ReplicatedLog.open.__func__  # type: ignore[attr-defined]  # a classmethod's function
_append_batch = ReplicatedLog.append_batch


def _open_without_claim(cls: type[ReplicatedLog], *args: Any, **named: Any) -> ReplicatedLog:
    """Whatever looks torn is cut, although it was flushed; nobody remembers."""
    named["claimed_flushed_end"] = RaftIndex(0)
    log: ReplicatedLog = _open(cls, *args, **named)
    log.recovery.cut_claimed_end = RaftIndex(0)
    return log


def _append_unstaged(log: ReplicatedLog, batch: Buffer, header: BatchHeader | None = None) -> None:
    """The batch is written while a bare entry before it may not be flushed."""
    flushed = log._flushed_bare
    log._flushed_bare = log._bare.dropped + len(log._bare.entries)
    try:
        _append_batch(log, batch, header)
    finally:
        log._flushed_bare = flushed


def _nothing(*_arguments: object, **_named: object) -> None:
    return None


def _never_lost(*_arguments: object, **_named: object) -> bool:
    return False


BUGS: Final[dict[str, Bug]] = {
    "minority-commit": Bug(_patching(leader, "quorum_end", _best_of), _partitions),
    "vote-forgotten": Bug(_patching(HardStateJournal, "put", _put_without_vote), _split_votes),
    "ack-before-fsync": Bug(_patching(Outbox, "release", _release_unflushed), _crashes),
    "vote-before-fsync": Bug(_patching(Outbox, "release", _release_before_journal), _split_votes),
    "leader-counts-unflushed": Bug(_patching(RaftCore, "advance", _advance_to_log_end), _crashes),
    "old-term-committed-by-count": Bug(
        _patching(leader, "may_commit", _commit_anything_new), _partitions
    ),
    "agreeing-suffix-truncated": Bug(_patching(follower, "_merge", _merge_and_cut), _partitions),
    "up-to-date-check-skipped": Bug(_patching(election, "is_up_to_date", _always), _partitions),
    "commit-of-what-may-differ": Bug(_patching(follower, "_commit", _commit_uncapped), _partitions),
    "log-start-in-place": Bug(_patching(LogStartFile, "replace", _replace_in_place), _log_starts),
    "torn-tail-cut": Bug(_patching(ReplicatedLog, "open", classmethod(_open_without_claim)), _rot),
    "bare-entry-not-flushed-first": Bug(
        _patching(ReplicatedLog, "append_batch", _append_unstaged), _slow_flushes
    ),
    "read-without-quorum": Bug(_patching(RaftCore, "read_confirmed", _always), _deposed),
    "claim-not-lowered": Bug(_patching(JournalPlace, "lower_claim", _nothing), _truncations),
    "wiped-keeps-vote": Bug(_patching(cluster_recovery, "is_forgotten", _never_lost), _wipes),
}
"""By name. Each must be caught within 200 seeds."""
