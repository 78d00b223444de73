"""What a follower does when its leader asks: append, commit, begin anew at a log start.

The core has noted before that the leader lives. Accepting a request means that its entries, and all
before them, agree with the leader's log (Raft §5.3); the reply that says so leaves after the flush.
Never drops a suffix that agrees, never touches anything below commit_end.
"""

from __future__ import annotations

from raftmq.errors import RemoteProtocolError
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import (
    AppendReply,
    AppendRequest,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    InstallLogStart,
)
from raftmq.raft.replica_state import ReplicaState
from raftmq.types import RaftIndex, ReplicaId, Term


def on_append_request(core: ReplicaState, request: AppendRequest) -> None:
    """Append what follows our log, repair what differs, answer with what agrees."""
    epochs = core.epochs
    entries = request.entries
    if request.prev_end == epochs.log_end and request.prev_term == epochs.last_term:
        _append(core, entries)
        matched_end = epochs.log_end
    elif request.prev_end < epochs.log_start:
        # Our log starts at something committed, which agrees with every leader's log.
        kept = tuple(entry for entry in entries if entry.end > epochs.log_start)
        matched_end = _merge(core, epochs.log_start, epochs.previous_term, kept)
    elif epochs.matches(request.prev_end, request.prev_term):
        matched_end = _merge(core, request.prev_end, request.prev_term, entries)
    else:
        _refuse(core, request)
        return
    if matched_end > core.matched_end:
        core.matched_end = matched_end
    _commit(core, request.commit_end)
    _accept(core, request.sender)


def on_heartbeat(core: ReplicaState, heartbeat: Heartbeat) -> None:
    """Note that the leader lives, and what it committed of what we are known to hold.

    One of a round that was answered only announces a commit: a reply would say nothing new, and
    cost the leader more than the announcement. Lost replies are made good by the next round.
    """
    before = core.commit_end
    _commit(core, heartbeat.commit_end)
    is_announcement = core.answered_round == (core.term, heartbeat.round)
    if not is_announcement or core.commit_end == before:
        core.effects.send_now.append(heartbeat_reply(core, heartbeat))


def heartbeat_reply(core: ReplicaState, heartbeat: Heartbeat) -> HeartbeatReply:
    """Say what of the leader's log has arrived here."""
    core.answered_round = (core.term, heartbeat.round)
    return HeartbeatReply(
        core.term,
        core.self_id,
        heartbeat.sender,
        heartbeat.round,
        core.matched_end,
        core.clock_ms,
    )


def on_install_log_start(core: ReplicaState, install: InstallLogStart) -> None:
    """Begin anew at the leader's log start, unless our log reaches it and agrees there (§7)."""
    log_start = install.log_start
    if log_start > core.commit_end:
        if core.epochs.matches(log_start, install.previous_term):
            # What follows may agree too, and may have been acknowledged: keep it.
            core.matched_end = max(core.matched_end, log_start)
            core.set_commit_end(log_start)
        else:
            _begin_anew(core, install)
    _accept(core, install.sender)


def _begin_anew(core: ReplicaState, install: InstallLogStart) -> None:
    if install.log_start <= core.matched_end:
        raise RemoteProtocolError(
            f"a log start at {install.log_start} from {install.sender} contradicts what agrees"
        )
    configuration = Configuration.decode(install.configuration)
    core.epochs.reset(install.log_start, install.previous_term)
    core.configurations.reset(configuration, install.log_start)
    core.flushed_end = min(core.flushed_end, install.log_start)
    core.commit_end = install.log_start
    core.matched_end = install.log_start
    core.effects.install_log_start(install)


def _append(core: ReplicaState, entries: tuple[Entry, ...]) -> None:
    epochs = core.epochs
    for entry in entries:
        epochs.append(entry.term, entry.start, entry.end)
        if entry.kind is EntryKind.MEMBERSHIP:
            core.configurations.append(entry.start, Configuration.decode(entry.payload))
    core.effects.append.extend(entries)


def _merge(
    core: ReplicaState, agreed_end: RaftIndex, agreed_term: Term, entries: tuple[Entry, ...]
) -> RaftIndex:
    """Skip what we have, replace our suffix from the first that differs; returns what agrees."""
    epochs = core.epochs
    for position, entry in enumerate(entries):
        if epochs.matches(entry.end, entry.term):
            agreed_end, agreed_term = entry.end, entry.term
            continue
        # Below a compaction's gap our log may hold entries that the leader's no longer does.
        gap_end = min(entry.start, epochs.log_end)
        if gap_end > agreed_end and epochs.matches(gap_end, agreed_term):
            agreed_end = gap_end
        if entry.start < agreed_end or entry.term < agreed_term:
            raise RemoteProtocolError(f"an entry at {entry.start} overlaps what is before it")
        if epochs.log_end > agreed_end:
            if agreed_end < max(core.commit_end, core.matched_end):
                raise RemoteProtocolError(
                    f"another entry at {entry.start} than the one that is committed, or was sent"
                )
            core.truncate_to(agreed_end)
        _append(core, entries[position:])
        return epochs.log_end
    return agreed_end


def _commit(core: ReplicaState, leader_commit_end: RaftIndex) -> None:
    commit_end = min(leader_commit_end, core.matched_end)
    if commit_end > core.commit_end:
        core.set_commit_end(commit_end)


def _accept(core: ReplicaState, leader: ReplicaId) -> None:
    reply = AppendReply(
        core.term,
        core.self_id,
        leader,
        True,
        core.matched_end,
        is_promise=not core.suspended,
        clock_ms=core.clock_ms,
    )
    waiting = core.effects.send_after_flush
    last = waiting[-1] if waiting else None
    if type(last) is AppendReply and last.term == reply.term:
        waiting[-1] = reply  # says all that the earlier one said, after the same flush
    else:
        waiting.append(reply)


def _refuse(core: ReplicaState, request: AppendRequest) -> None:
    if request.prev_end <= core.commit_end:
        raise RemoteProtocolError(
            f"{request.sender} has another entry before {request.prev_end}, which is committed here"
        )
    hint_end, hint_term = core.epochs.hint(request.prev_end, request.prev_term)
    core.effects.send_now.append(
        AppendReply(
            core.term,
            core.self_id,
            request.sender,
            False,
            RaftIndex(0),
            request.prev_end,
            hint_end,
            hint_term,
            not core.suspended,
            core.clock_ms,
        )
    )
