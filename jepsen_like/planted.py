"""Bugs planted on purpose, each of which the simulation must find: the test of the tests.

Each bug is a context manager that patches the product's own modules and undoes it, with the options
that stress what it breaks. `hunt` runs seeds until one is caught. A bug that escapes means that the
faults or the invariants of the simulation are too weak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import attrs
from attrs import frozen

from jepsen_like.bug import Bug, Plant, nothing, patching
from jepsen_like.inode import SECTOR
from jepsen_like.options import SimOptions, draw_options
from jepsen_like.sim import Verdict, run_seed
from raftmq.log.bare_entries import BareEntries
from raftmq.log.hard_state import GroupState, HardStateJournal
from raftmq.log.log_start import LocalStart, LogStartFile
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.raft import election, follower, leader
from raftmq.raft.core import RaftCore
from raftmq.raft.leader import Leadership
from raftmq.raft.messages import Message
from raftmq.records import BatchHeader
from raftmq.replication import recovery as cluster_recovery
from raftmq.replication.durability import JournalPlace, Outbox
from raftmq.types import Buffer, RaftGroupId, RaftIndex, Term


@frozen
class Catch:
    """What came of a hunt.

    Attributes:
        found: what caught it.
        others: anomalies that do not count, with their seeds.
        clean_verdict: of the same seed without the bug.
    """

    name: str
    seeds: int
    seconds: float
    found: str = ""
    others: tuple[str, ...] = ()
    clean_verdict: str = ""

    @property
    def is_caught(self) -> bool:
        """True when it was found, and the same seed has no anomaly without it."""
        return bool(self.found) and self.clean_verdict != Verdict.ANOMALY.name

    def __str__(self) -> str:
        told = f"{self.name}: "
        if self.found:
            told += f"caught at seed {self.seeds} by {self.found}"
        else:
            told += f"ESCAPED {self.seeds} seeds"
        told += f" ({self.seconds:.1f} s)"
        if self.found and not self.is_caught:
            told += f"; NOT CLEAN without it: {self.clean_verdict}"
        if self.others:
            told += f"; before that: {', '.join(self.others)}"
        return told


SECONDS_MAX: Final = 60.0
"""Of a core: no bug may take longer to catch."""


class Finding(Protocol):
    """What is asked of a run."""

    verdict: Verdict
    name: str


def hunt_with(
    name: str,
    plant: Plant,
    caught_by: Sequence[str],
    run: Callable[[int], Finding],
    seeds: range,
    seconds_max: float = SECONDS_MAX,
    clock: Callable[[], float] = time.process_time,
) -> Catch:
    """Run seeds with a bug planted until it is caught by one of those that must catch it, or has
    escaped for so many seconds of a core."""
    began = clock()
    others: list[str] = []
    for tried, seed in enumerate(seeds):
        if clock() - began > seconds_max:
            return Catch(name, tried, clock() - began, "", tuple(others))
        with plant():
            result = run(seed)
        if result.verdict is not Verdict.ANOMALY:
            continue
        if result.name in caught_by:
            seconds = clock() - began
            clean = run(seed)
            found = result.name
            return Catch(name, seed, seconds, found, tuple(others), clean.verdict.name)
        others.append(f"{result.name} at {seed}")
    return Catch(name, len(seeds), clock() - began, "", tuple(others))


def hunt(name: str, first: int = 1, seeds: int = 200) -> Catch:
    """Look for one of these bugs."""
    bug = BUGS[name]
    return hunt_with(
        name,
        bug.plant,
        bug.caught_by,
        lambda seed: run_seed(seed, bug.options(seed)),
        range(first, first + seeds),
    )


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
        record = local.record()
        data = record.ljust(len(record) + -len(record) % SECTOR, b"\0") * 2
        file.pwrite(data[: len(data) // 2], 0)
        file.pwrite(data[len(data) // 2 :], len(data) // 2)
        file.fdatasync()
    finally:
        file.close()
    self._disk.sync_directory(self._folder)
    self._local, self._room_bytes = local, len(data) // 2


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


def _never_lost(*_arguments: object, **_named: object) -> bool:
    return False


def _commit_by_those_in_sync(self: Leadership) -> None:
    """Commit what all have who were heard of lately: nobody else counts as a voter."""
    core = self._core
    since = core.now - 2 * core.config.heartbeat_ticks
    ends = [p.match_end for p in self._voting if p.last_heard_tick > since]
    end = min([*ends, core.flushed_end])
    if leader.may_commit(end, core.commit_end, self.term_start):
        core.set_commit_end(end)


_MAJORITY = "CommittedIsDurableAtMajority"
_WATERMARK = "MonotonicHighWatermark"
_ASSERTION = "AssertionError"
"""The product's own: a replica stops rather than go on with what cannot be."""

BUGS: Final[dict[str, Bug[SimOptions]]] = {
    "minority-commit": Bug(
        patching((leader, "quorum_end", _best_of)), _partitions, 1, (9,), (_MAJORITY,)
    ),
    "commit-by-those-in-sync": Bug(
        patching((Leadership, "commit_if_possible", _commit_by_those_in_sync)),
        _partitions,
        1,
        (13,),
        (_MAJORITY, "LeaderCompleteness", "MonotonicHighWatermark"),
    ),
    "vote-forgotten": Bug(
        patching((HardStateJournal, "put", _put_without_vote)),
        _split_votes,
        2,
        (10,),
        ("SingleLeaderPerTerm", "LogMatching"),
    ),
    "ack-before-fsync": Bug(
        patching((Outbox, "release", _release_unflushed)), _crashes, 1, (10,), (_MAJORITY,)
    ),
    "vote-before-fsync": Bug(
        patching((Outbox, "release", _release_before_journal)),
        _split_votes,
        2,
        (10,),
        ("SingleLeaderPerTerm", "LogMatching", "Liveness"),
    ),
    "leader-counts-unflushed": Bug(
        patching((RaftCore, "advance", _advance_to_log_end)), _crashes, 1, (9,), (_MAJORITY,)
    ),
    "old-term-committed-by-count": Bug(
        patching((leader, "may_commit", _commit_anything_new)),
        _partitions,
        2,
        (11,),
        ("LeaderCommitsOwnTerm", "MonotonicHighWatermark"),
    ),
    "agreeing-suffix-truncated": Bug(
        patching((follower, "_merge", _merge_and_cut)), _partitions, 2, (), (_ASSERTION, _WATERMARK)
    ),
    "up-to-date-check-skipped": Bug(
        patching((election, "is_up_to_date", _always)), _partitions, 2, (), ("LeaderCompleteness",)
    ),
    "commit-of-what-may-differ": Bug(
        patching((follower, "_commit", _commit_uncapped)),
        _partitions,
        2,
        (),
        (_ASSERTION, _WATERMARK, _MAJORITY),
    ),
    "log-start-in-place": Bug(
        patching((LogStartFile, "replace", _replace_in_place)),
        _log_starts,
        2,
        (3,),
        ("CrashKeepsIdentity", "FlushedSurvives"),
    ),
    "torn-tail-cut": Bug(
        patching((ReplicatedLog, "open", classmethod(_open_without_claim))),
        _rot,
        4,
        (1,),
        ("FlushedSurvives",),
    ),
    "bare-entry-not-flushed-first": Bug(
        patching((ReplicatedLog, "append_batch", _append_unstaged)),
        _slow_flushes,
        3,
        (2,),
        ("LogMatching",),
    ),
    "bare-entries-outlive-truncation": Bug(
        patching((BareEntries, "truncate", nothing)),
        _truncations,
        3,
        (2,),
        (_ASSERTION, "LogMatching"),
    ),
    "read-without-quorum": Bug(
        patching((RaftCore, "read_confirmed", _always)),
        _deposed,
        6,
        (18,),
        ("LinearizableBarrier",),
    ),
    "claim-not-lowered": Bug(
        patching((JournalPlace, "lower_claim", nothing)),
        _truncations,
        10,
        (1,),
        ("ClaimsAreFlushed",),
    ),
    "wiped-keeps-vote": Bug(
        patching((cluster_recovery, "is_forgotten", _never_lost)),
        _wipes,
        5,
        (6,),
        ("LeaderCompleteness", _MAJORITY),
    ),
}
"""By name. Each must be caught within 200 seeds."""
