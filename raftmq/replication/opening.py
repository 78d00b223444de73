"""Opens a replica: its identity after a restart, and what it may still promise.

A voter is a node with its storage. Where the journal says that something was promised for this
group and the folder is empty or unreadable, or where the journal itself was lost, the promises are
forgotten. The replica then takes a fresh identity; no configuration names that, so it neither votes
nor counts until the leader admits it (see `membership.py`). So does one that comes back to a node
which it had left. Where bytes are damaged it keeps its log's end and its promises.

Invariant: the same identity never votes or acknowledges with less than it promised before.
"""

from __future__ import annotations

import attrs
from attrs import field, frozen

from raftmq.log.journal import GroupState, HardStateJournal
from raftmq.log.log_start import LogStart
from raftmq.log.model import LogConfig, UnusableLogError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.log.shared import Shared
from raftmq.ports import Buggify, Clock, Disk, DiskError, Random, never
from raftmq.raft.membership import Configuration
from raftmq.replication.catch_up import CatchUp
from raftmq.replication.durability import JournalFailedError
from raftmq.replication.ports import ReplicaConfig, ReplicaHost, StateMachine
from raftmq.replication.replica import Replica
from raftmq.types import LeaderEpoch, Offset, RaftGroupId, RaftIndex, ReplicaId, StorageId


@frozen(slots=True, kw_only=True)
class Opening:
    """What all replicas of a node need to be opened."""

    node: ReplicaId
    disk: Disk
    journal: HardStateJournal
    host: ReplicaHost
    clock: Clock
    random: Random
    catch_up: CatchUp
    shared: Shared | None = None
    buggify: Buggify = field(default=never)


def is_forgotten(journal: HardStateJournal, state: GroupState | None, *, is_empty: bool) -> bool:
    """True when a promise made under this identity may be forgotten."""
    if state is None or state.bootstrapped is None:
        # Nothing was promised before the journal knew of it, unless the journal was lost. Then an
        # empty folder may be a lost one, too, until the node has opened all replicas that it had.
        return journal.damaged
    return is_empty


def take_fresh_identity(opening: Opening, group: RaftGroupId) -> ReplicaId:
    """Durably end this node's life in `group`: what it runs of it from now on is somebody new.

    Raises:
        JournalFailedError: the node cannot go on.
    """
    storage_id = fresh_storage(opening.random)
    try:
        opening.journal.put(group, GroupState(bootstrapped=storage_id))
        opening.journal.flush_now()
    except DiskError as error:
        raise JournalFailedError(f"journal write failed: {error}") from error
    return ReplicaId(opening.node.node_id, storage_id)


def fresh_storage(random: Random) -> StorageId:
    """A storage that no configuration names."""
    return StorageId(random.getrandbits(63) | 1)


class ReplicaOpener:
    """Opens one replica of `group` in `folder`, in turns of a worker thread and of the loop.

    `initial` is the configuration with which the group was created; empty for a replica that joins
    later. `is_return`: the group has let this node go since, so the node may have forgotten what it
    promised, even where the journal knows of nothing. Its log begins at `begins_at`, behind
    `after_epoch`, with this state of its machine, the same on every node: terms of the group are
    above that.
    """

    def __init__(
        self,
        opening: Opening,
        group: RaftGroupId,
        folder: str,
        *,
        initial: Configuration,
        log_config: LogConfig,
        is_return: bool = False,
        begins_at: Offset = Offset(0),
        after_epoch: LeaderEpoch = LeaderEpoch(0),
        state: bytes = b"",
    ) -> None:
        self._opening = opening
        self._group = group
        self._folder = folder
        self._begin = _begin_at(initial, begins_at, after_epoch, state)
        self._log_config = log_config
        self._state = opening.journal.get(group)
        self._identity: ReplicaId | None = None
        self._kept_floor = RaftIndex(0)
        self._floor = RaftIndex(0)
        self._is_lost = is_return and (self._state is None or self._state.bootstrapped is None)
        self._aside_count = 0
        self._log: ReplicatedLog | None = None

    def attempt(self) -> bool:
        """Read and recover the log, in any thread. After False call `settle`, then this again.

        Raises:
            DiskError: the disk failed; nothing was promised.
            NewerFormatError: a file of a newer raftmq.
        """
        if not self._is_lost:
            is_empty = not self._opening.disk.list(self._folder)
            self._is_lost = is_forgotten(self._opening.journal, self._state, is_empty=is_empty)
        if self._is_lost and self._identity is None:
            return False
        claimed = self._state.flushed_end if self._state is not None and not self._is_lost else 0
        try:
            self._log = ReplicatedLog.open(
                self._opening.disk,
                self._folder,
                self._log_config,
                claimed_flushed_end=RaftIndex(claimed),
                initial=self._begin,
                clock=self._opening.clock,
                shared=self._opening.shared,
                before_cut=None if self._is_lost else self._before_cut,
            )
        except UnusableLogError:
            self._aside_count += 1
            stamp = f"{self._opening.clock.wall_ms():x}-{self._aside_count}"
            self._opening.disk.rename(self._folder, f"{self._folder}.unusable-{stamp}")
            self._opening.disk.sync_directory(self._folder.rpartition("/")[0])
            self._is_lost = True
            return False
        except _CutAhead as cut:
            self._floor = cut.floor
            return False
        return True

    def _before_cut(self, floor: RaftIndex) -> None:
        if floor > self._kept_floor:
            raise _CutAhead(floor)

    def settle(self) -> None:
        """Make durable in the journal what has to be before the next attempt; on the loop.

        Raises:
            JournalFailedError: the node cannot go on.
            DiskError: this replica cannot be opened.
        """
        journal, group = self._opening.journal, self._group
        if self._is_lost and self._identity is None:
            # No configuration names it, so it cannot vote; the leader hears of it by its answers.
            # Written before the new log: a folder with files must not pass for the old replica's.
            self._identity = take_fresh_identity(self._opening, group)
        elif self._floor > self._kept_floor:
            # Durable before the tail is gone: otherwise a crash in between would forget that this
            # replica may have promised it.
            latest = journal.get(group) or GroupState()
            kept = max(self._floor, latest.cut_floor)
            journal.put(group, attrs.evolve(latest, cut_floor=kept))
            journal.flush_now()
            self._kept_floor = self._floor

    def replica(self, machine: StateMachine, config: ReplicaConfig) -> Replica:
        """The replica, once an attempt succeeded; on the loop.

        `replica.log.recovery` and `replica.log.damaged` say what was lost or damaged.
        """
        assert self._log is not None, "an attempt succeeded"
        opening, known = self._opening, self._state or GroupState()
        identity = self._identity or opening.node
        if self._identity is None and known.bootstrapped is not None:
            identity = ReplicaId(identity.node_id, known.bootstrapped)
        replica = Replica(
            self._group,
            identity,
            self._log,
            opening.journal,
            machine=machine,
            host=opening.host,
            clock=opening.clock,
            random=opening.random,
            config=config,
            catch_up=opening.catch_up,
            buggify=opening.buggify,
        )
        if not self._is_lost:
            replica.keep_claims(RaftIndex(known.cut_floor))
        return replica


class _CutAhead(Exception):
    """Recovery is about to cut a tail that claims to end at `floor`."""

    def __init__(self, floor: RaftIndex) -> None:
        super().__init__(floor)
        self.floor = floor


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
    """Open or create a replica at once.

    Raises:
        JournalFailedError: the node cannot go on.
        DiskError: the disk failed; nothing was promised.
    """
    opener = ReplicaOpener(opening, group, folder, initial=initial, log_config=log_config)
    while not opener.attempt():
        opener.settle()
    return opener.replica(machine, config)


def _begin_at(
    initial: Configuration, begins_at: Offset, after_epoch: LeaderEpoch, state: bytes
) -> LogStart:
    return LogStart(
        offset=begins_at,
        index=RaftIndex(begins_at),
        previous_epoch=after_epoch,
        configuration=initial.encode(),
        state=state,
    )
