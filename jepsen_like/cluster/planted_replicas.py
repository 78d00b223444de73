"""Bugs planted in the replicas of Raft groups: elections, commits, flushes, logs on disk.

Each patches the product's own modules and undoes it, with the options that stress what it breaks,
what it breaks, and what it must be caught by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs

from jepsen_like.bug import Bug, nothing, patching
from jepsen_like.cluster import stress
from jepsen_like.inode import SECTOR
from raftmq.log.bare_entries import BareEntries
from raftmq.log.journal import GroupState, HardStateJournal
from raftmq.log.log_start import LocalStart, LogStartFile
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.raft import election, follower, leader
from raftmq.raft.core import RaftCore
from raftmq.raft.leader import Leadership
from raftmq.raft.messages import Message
from raftmq.records import BatchHeader
from raftmq.replication import opening
from raftmq.replication.durability import JournalPlace, Outbox
from raftmq.types import Buffer, RaftGroupId, RaftIndex, Term


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
    self._local, self._room_bytes = local, len(data) // 2
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

REPLICA_BUGS: Final[dict[str, Bug]] = {
    "minority-commit": Bug(
        patching((leader, "quorum_end", _best_of)), stress.leaders, 1, (9,), (_MAJORITY,)
    ),
    "commit-by-those-in-sync": Bug(
        patching((Leadership, "commit_if_possible", _commit_by_those_in_sync)),
        stress.leaders,
        1,
        (13,),
        (_MAJORITY, "LeaderCompleteness", "MonotonicHighWatermark"),
    ),
    "vote-forgotten": Bug(
        patching((HardStateJournal, "put", _put_without_vote)),
        stress.split_votes,
        2,
        (10,),
        ("SingleLeaderPerTerm", "OneControllerPerEpoch", "LogMatching"),
        begins_at=173,
    ),
    "ack-before-fsync": Bug(
        patching((Outbox, "release", _release_unflushed)), stress.power, 1, (10,), (_MAJORITY,)
    ),
    "vote-before-fsync": Bug(
        patching((Outbox, "release", _release_before_journal)),
        stress.split_votes,
        2,
        (10,),
        ("SingleLeaderPerTerm", "OneControllerPerEpoch", "LogMatching", "Liveness"),
    ),
    "leader-counts-unflushed": Bug(
        patching((RaftCore, "advance", _advance_to_log_end)), stress.power, 1, (9,), (_MAJORITY,)
    ),
    "old-term-committed-by-count": Bug(
        patching((leader, "may_commit", _commit_anything_new)),
        stress.leaders,
        2,
        (11,),
        ("LeaderCommitsOwnTerm", "MonotonicHighWatermark"),
    ),
    "agreeing-suffix-truncated": Bug(
        patching((follower, "_merge", _merge_and_cut)),
        stress.leaders,
        2,
        (),
        (_ASSERTION, _WATERMARK),
    ),
    "up-to-date-check-skipped": Bug(
        patching((election, "is_up_to_date", _always)),
        stress.leaders,
        2,
        (),
        ("LeaderCompleteness",),
    ),
    "commit-of-what-may-differ": Bug(
        patching((follower, "_commit", _commit_uncapped)),
        stress.leaders,
        2,
        (),
        (_ASSERTION, _WATERMARK, _MAJORITY),
    ),
    "log-start-in-place": Bug(
        patching((LogStartFile, "replace", _replace_in_place)),
        stress.log_starts,
        2,
        (3,),
        ("CrashKeepsIdentity", "FlushedSurvives"),
    ),
    "torn-tail-cut": Bug(
        patching((ReplicatedLog, "open", classmethod(_open_without_claim))),
        stress.rot,
        4,
        (1,),
        ("FlushedSurvives",),
    ),
    "bare-entry-not-flushed-first": Bug(
        patching((ReplicatedLog, "append_batch", _append_unstaged)),
        stress.slow_flushes,
        3,
        (2,),
        ("LogMatching",),
    ),
    "bare-entries-outlive-truncation": Bug(
        patching((BareEntries, "truncate", nothing)),
        stress.leaders,
        3,
        (2,),
        (_ASSERTION, "LogMatching"),
    ),
    "read-without-quorum": Bug(
        patching((RaftCore, "read_confirmed", _always)),
        stress.astray,
        6,
        (18,),
        ("LinearizableBarrier",),
    ),
    "claim-not-lowered": Bug(
        patching((JournalPlace, "lower_claim", nothing)),
        stress.leaders_and_power,
        10,
        (1,),
        ("ClaimsAreFlushed",),
    ),
    "wiped-keeps-vote": Bug(
        patching((opening, "is_forgotten", _never_lost)),
        stress.lost_folders,
        5,
        (6,),
        ("LeaderCompleteness", _MAJORITY),
    ),
}
"""By name. Each must be caught within 200 seeds."""
