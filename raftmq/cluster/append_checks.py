"""What a replica looks at before it lets a message touch its core or log.

Bytes that a correct leader never sends cost the connection they came on, nothing else; the same
bytes found later would be a broken invariant and stop the replica.
"""

from __future__ import annotations

from raftmq.cluster.peer_messages import PeerMessage, WrongReplica
from raftmq.errors import CorruptBatchError, RemoteProtocolError
from raftmq.log.log_start import LogStart
from raftmq.raft.messages import AppendRequest, EntryKind, Heartbeat, InstallLogStart
from raftmq.records import check_batch
from raftmq.types import ReplicaId, Term


def check_append(request: AppendRequest) -> None:
    """Check every batch: length, checksum, and that it is what its entry says.

    Raises:
        RemoteProtocolError: one is not.
    """
    for entry in request.entries:
        if entry.kind is not EntryKind.BATCH:
            continue
        try:
            header = check_batch(entry.payload)
        except CorruptBatchError as error:
            raise RemoteProtocolError(f"a damaged batch from {request.sender}") from error
        if header.leader_epoch != entry.term or header.offset_count != entry.end - entry.start:
            raise RemoteProtocolError(f"a batch from {request.sender} in a wrong place")


def check_install(install: InstallLogStart) -> None:
    """Check a log start that would replace this replica's log.

    Raises:
        RemoteProtocolError: the tuple contradicts its message.
    """
    log_start = LogStart.decode(install.payload)
    if (
        log_start.index != install.log_start
        or Term(log_start.previous_epoch) != install.previous_term
        or log_start.configuration != install.configuration
    ):
        raise RemoteProtocolError(f"a log start from {install.sender} that contradicts itself")


def answer_to_stray(self_id: ReplicaId, message: PeerMessage) -> WrongReplica | None:
    """What to say to a message that names another storage of this node; nothing else is done."""
    is_leaders = isinstance(message, AppendRequest | Heartbeat | InstallLogStart)
    if message.to.node_id != self_id.node_id or not is_leaders:
        return None
    return WrongReplica(message.term, self_id, message.sender)
