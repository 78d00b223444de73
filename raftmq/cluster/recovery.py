"""Opening a replica: who it is after a restart, and what it may still promise.

A voter is a node with its storage. Where the journal says that something was promised for this
group and the folder is empty or unreadable, or where the journal itself was lost, the promises are
forgotten; this replica then takes a fresh identity and, being named by no configuration, neither
votes nor counts until the leader admits it (see `readmission.py`). Where bytes are damaged it keeps
its end, and its word.

Invariant: the same identity never votes or acknowledges with less than it promised before.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from attrs import field, frozen

from raftmq.cluster.journal_place import JournalFailedError
from raftmq.cluster.replica import Peers, Replica, ReplicaConfig, StateMachine
from raftmq.log.hard_state import GroupState, HardStateJournal
from raftmq.log.log_start import LogStart
from raftmq.log.model import LogConfig, UnusableLogError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.shared import Shared
from raftmq.ports import Buggify, Clock, Disk, DiskError, Random, never
from raftmq.raft.membership import Configuration
from raftmq.types import LeaderEpoch, Offset, RaftGroupId, RaftIndex, ReplicaId, StorageId


@frozen(slots=True, kw_only=True)
class Opening:
    """What all replicas of a node are opened with."""

    node: ReplicaId
    disk: Disk
    journal: HardStateJournal
    peers: Peers
    clock: Clock
    random: Random
    shared: Shared | None = None
    buggify: Buggify = field(default=never)


def is_forgotten(journal: HardStateJournal, state: GroupState | None, *, is_empty: bool) -> bool:
    """True when something may have been promised under this identity that is not known any more."""
    if state is None or state.bootstrapped is None:
        # Nothing was promised before the journal knew it, unless the journal was lost. Then an
        # empty folder may be a lost one, too: until the node has opened all that it had.
        return journal.damaged
    return is_empty


def open_replica(
    opening: Opening,
    group: RaftGroupId,
    folder: str,
    *,
    initial: Configuration,
    machine: StateMachine,
    log_config: LogConfig,
    config: ReplicaConfig,
) -> Replica:
    """Open or create one replica of `group` in `folder`.

    `initial` is the configuration the group was created with; empty for one that joins later. What
    was lost or damaged is told by `replica.log.recovery` and `replica.log.damaged`.

    Raises:
        JournalFailedError: the node cannot go on.
        DiskError: the disk failed; nothing was promised.
    """
    journal = opening.journal
    state = journal.get(group)
    is_lost = is_forgotten(journal, state, is_empty=not opening.disk.list(folder))
    log: ReplicatedLog | None = None
    known = state or GroupState()
    if not is_lost:

        def before_cut(floor: RaftIndex) -> None:
            # Durable before the tail is gone: else a crash in between would forget that this
            # replica may have promised what it held.
            latest = journal.get(group) or known
            journal.put(group, attrs.evolve(latest, cut_floor=max(floor, latest.cut_floor)))
            journal.flush_now()

        claimed = RaftIndex(known.flushed_end)
        try:
            log = _open_log(opening, folder, log_config, claimed, initial, before_cut)
        except UnusableLogError:
            is_lost = True
            _set_aside(opening, folder)
    identity = opening.node
    if is_lost:
        # Named by no configuration, so it cannot vote; the leader learns of it by its answers.
        identity = ReplicaId(identity.node_id, StorageId(opening.random.getrandbits(63) | 1))
        # Before the new log: a folder that is no longer empty must not look like the old one's.
        _bootstrap(journal, group, identity)
        try:
            log = _open_log(opening, folder, log_config, RaftIndex(0), initial, None)
        except UnusableLogError:
            _set_aside(opening, folder)
            log = _open_log(opening, folder, log_config, RaftIndex(0), initial, None)
    elif state is not None and state.bootstrapped is not None:
        identity = ReplicaId(identity.node_id, state.bootstrapped)
    assert log is not None
    replica = Replica(
        group,
        identity,
        log,
        journal,
        machine=machine,
        peers=opening.peers,
        clock=opening.clock,
        random=opening.random,
        config=config,
        buggify=opening.buggify,
    )
    if not is_lost:
        replica.keep_claims(RaftIndex(known.cut_floor))
    return replica


def _bootstrap(journal: HardStateJournal, group: RaftGroupId, identity: ReplicaId) -> None:
    try:
        journal.put(group, GroupState(bootstrapped=identity.storage_id))
        journal.flush_now()
    except DiskError as error:
        raise JournalFailedError(f"journal write failed: {error}") from error


def _set_aside(opening: Opening, folder: str) -> None:
    opening.disk.rename(folder, f"{folder}.unusable-{opening.random.getrandbits(32):08x}")


def _open_log(
    opening: Opening,
    folder: str,
    config: LogConfig,
    claimed: RaftIndex,
    initial: Configuration,
    before_cut: Callable[[RaftIndex], None] | None,
) -> ReplicatedLog:
    first = LogStart(
        offset=Offset(0),
        index=RaftIndex(0),
        previous_epoch=LeaderEpoch(0),
        configuration=initial.encode(),
        state=b"",
    )
    return ReplicatedLog.open(
        opening.disk,
        folder,
        config,
        claimed_flushed_end=claimed,
        initial=first,
        clock=opening.clock,
        shared=opening.shared,
        before_cut=before_cut,
    )
