"""Checks of a leader's messages before they touch the core or the log.

Bytes that a correct leader never sends cost the connection they came on, nothing else; found later
they would be a broken invariant, and stop the replica.
"""

from __future__ import annotations

from raftmq.errors import CorruptBatchError, RemoteProtocolError
from raftmq.foreign import (
    BARE_PAYLOAD_BYTES_MAX,
    NODE_ID_MAX,
    POSITION_MAX,
    TERM_MAX,
    check_bounds,
    decode_foreign,
)
from raftmq.log.log_start import LogStart
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import AppendRequest, Effects, Entry, EntryKind, InstallLogStart
from raftmq.records import check_batch
from raftmq.replication.log_start import decode_proposal
from raftmq.replication.ports import StateChecker
from raftmq.replication.seals import Seal
from raftmq.types import Buffer, Offset, RaftIndex, Term


def check_append(request: AppendRequest) -> list[int]:
    """Check every entry: that it follows the one before it, and that its payload is what it says.

    Returns the base offset of each batch.

    Raises:
        RemoteProtocolError: one does not, or is not.
    """
    end, term = request.prev_end, request.prev_term
    base_offsets = []
    for entry in request.entries:
        if entry.start != end:
            raise RemoteProtocolError(f"a gap before the entry at {entry.start}")
        if entry.kind is EntryKind.BATCH:
            base_offsets.append(_check_batch(request, entry, begins_term=entry.term != term))
        else:
            _check_bare(entry)
        end, term = entry.end, entry.term
    return base_offsets


def _check_batch(request: AppendRequest, entry: Entry, *, begins_term: bool) -> int:
    try:
        header = check_batch(entry.payload)
    except CorruptBatchError as error:
        raise RemoteProtocolError(f"a damaged batch from {request.sender}") from error
    if header.leader_epoch != entry.term or header.offset_count != entry.end - entry.start:
        raise RemoteProtocolError(f"a batch from {request.sender} in a wrong place")
    if begins_term:
        raise RemoteProtocolError(
            f"a batch begins term {entry.term}; its election entry is missing"
        )
    return header.base_offset


def _check_bare(entry: Entry) -> None:
    if len(entry.payload) > BARE_PAYLOAD_BYTES_MAX:
        raise RemoteProtocolError(f"an entry without records of {len(entry.payload)} bytes")
    if entry.kind is EntryKind.MEMBERSHIP:
        _check_configuration(entry.payload)
    elif entry.kind is EntryKind.LOG_START:
        target = decode_foreign("log-start proposal", decode_proposal, entry.payload)
        check_bounds("log start", target, POSITION_MAX)
    elif entry.kind is EntryKind.SEAL:
        decode_foreign("seal", Seal.decode, entry.payload)


def _check_configuration(encoded: Buffer) -> None:
    configuration = decode_foreign("configuration", Configuration.decode, encoded)
    if not configuration.voters:
        raise RemoteProtocolError("a configuration without voters")
    for member in configuration.members:
        check_bounds("node", member.node_id, NODE_ID_MAX)


def check_place(
    request: AppendRequest, base_offsets: list[int], log: ReplicatedLog, effects: Effects
) -> None:
    """Check that the offsets of the batches follow those of this log.

    Args:
        request: its entries passed `check_append`; the position before them agrees with the log,
            or lies below its start.
        base_offsets: as `check_append` returned them.
        effects: those of the core that were not performed yet.

    Raises:
        RemoteProtocolError: an offset is not the next one.
    """
    assert effects.install is None, "only the end of the log may be about to change"
    bases = iter(base_offsets)
    log_start = log.log_start
    is_below = request.prev_end < log_start.index
    offset = None if is_below else _offset_of(request.prev_end, log, effects)
    for entry in request.entries:
        if entry.start == log_start.index:
            offset = log_start.base_offset
        if entry.kind is not EntryKind.BATCH:
            continue
        base_offset = next(bases)
        if offset is not None:
            if base_offset != offset:
                raise RemoteProtocolError(f"a batch at offset {base_offset}, next is {offset}")
            offset = Offset(offset + entry.end - entry.start)


def _offset_of(end: RaftIndex, log: ReplicatedLog, effects: Effects) -> Offset:
    """The offset at a position of the log as it will be after `effects`."""
    log_end = log.end_index if effects.truncate_end is None else effects.truncate_end
    if end <= log_end:
        return log.offset_of(end)
    offset = log.offset_of(log_end)
    for entry in effects.append:
        if entry.start >= end:
            break
        if entry.kind is EntryKind.BATCH:
            offset = Offset(offset + entry.end - entry.start)
    return offset


def check_install(install: InstallLogStart, machine: object) -> LogStart:
    """Check a log start that would replace this replica's log, and return it.

    Raises:
        RemoteProtocolError: it contradicts its message, or its state cannot be restored.
    """
    log_start = read_log_start(install.payload, machine)
    if (
        log_start.index != install.log_start
        or Term(log_start.previous_epoch) != install.previous_term
        or log_start.configuration != install.configuration
    ):
        raise RemoteProtocolError(f"a log start from {install.sender} that contradicts itself")
    return log_start


def read_log_start(encoded: Buffer, machine: object) -> LogStart:
    """Decode a log start that a peer sent.

    Raises:
        RemoteProtocolError: it is none, or `machine` could not begin with it.
    """
    log_start = decode_foreign("log start", LogStart.decode, encoded)
    check_bounds("log start", log_start.offset, POSITION_MAX)
    check_bounds("log start", log_start.index, POSITION_MAX)
    check_bounds("leader epoch", log_start.previous_epoch, TERM_MAX)
    _check_configuration(log_start.configuration)
    if isinstance(machine, StateChecker):
        decode_foreign("state of a log start", lambda _: machine.check_state(log_start), b"")
    return log_start
