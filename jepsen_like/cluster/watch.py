"""The watch over all replicas of all nodes: what must hold at every step, seen from inside.

Every replica's state machine is wrapped when it begins to take part: the wrapper keeps a chain of
digests over the log and tells `jepsen_like.invariants`, then lets the product's machine do its
work. Observes only. What a replica's state at a log start is, is not judged by its bytes but by
where it stands: the chain below it was committed by somebody.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, Any

from attrs import frozen

from jepsen_like.cluster.commands_watch import CommandsWatch
from jepsen_like.cluster.kafka import NARROW
from jepsen_like.cluster.moves_watch import MovesWatch
from jepsen_like.cluster.seals_watch import SealsWatch, Sequence
from jepsen_like.history_events import NEMESIS
from jepsen_like.invariants import GENESIS, BlindInvariants, DurableView, Invariants, chain
from raftmq.log.folders import FIRST_LIFE, partition_folder
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError, LogEntry
from raftmq.partition.partition import Partition
from raftmq.ports import DiskError, Runnable
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import EntryKind, Role, SoftState
from raftmq.records import parse_header
from raftmq.replication.log_start import decode_proposal
from raftmq.replication.replica import Replica
from raftmq.replication.seals import Seal
from raftmq.types import (
    METADATA_GROUP,
    Buffer,
    NodeId,
    Offset,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
)

if TYPE_CHECKING:
    from jepsen_like.cluster.node import ClusterNode, SimCore
    from jepsen_like.cluster.world import ClusterWorld

ROOT = "data"
CAUGHT_UP_MS = 1_000.0
"""Whoever gets a vote must have what was committed so long ago; leaders want half of it."""
TRANSACTIONS = ("x0-", f"{NARROW}-")
"""How partitions are named that transactions write to."""


@frozen
class LastSeen:
    """A replica as it was when its node went down."""

    identity: ReplicaId
    sure_end: int
    flushed_end: int
    bare_count: int
    high_watermark: int


class Watch:
    """All replicas of the world, by node and group."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self.invariants = BlindInvariants() if world.options.is_black_box else Invariants()
        self.commands = CommandsWatch(
            self.invariants,
            lambda group: world.recorder.note(NEMESIS, "group_gone", group=group),
            lambda: world.now_ms,
        )
        self.moves = MovesWatch(self.invariants)
        self.seals = SealsWatch(self.invariants, self.committed_offset, world.log_start_of)
        self.machines: dict[tuple[NodeId, RaftGroupId], Watcher] = {}
        self._last: dict[tuple[NodeId, RaftGroupId], LastSeen] = {}
        self._holes: dict[tuple[NodeId, RaftGroupId], list[tuple[Offset, Offset]]] = {}
        """What a replica knew to be damaged when it ended."""
        self._gone: dict[tuple[NodeId, RaftGroupId], tuple[ReplicaId, int]] = {}
        """Who ended on a node that goes on, and how much of the log it had flushed."""
        self._lost: dict[tuple[NodeId, RaftGroupId], tuple[ReplicaId, int]] = {}
        """The same of who lost its disk: its leader may not have noticed yet."""
        self._committed: dict[RaftGroupId, tuple[RaftIndex, Configuration]] = {}
        """The newest change of members that anybody knew to be committed."""
        self._ordered_away: dict[RaftGroupId, set[ReplicaId]] = {}
        self._is_missing = False

    def attach(self, node: ClusterNode, core: SimCore) -> None:
        """Be told of every replica that begins on this node."""
        multiraft = core.plane.multiraft
        register = multiraft.register

        def watched(replica: Replica) -> None:
            topic = core.engine.image.topic_by_id(replica.group.topic_id)
            wanted = None if topic is None else topic.of_group(replica.group)
            if wanted is not None and wanted.begins_at:
                self.invariants.begins_at(replica.group, wanted.begins_at)
            kind = SlowWatcher if hasattr(replica.machine, "restoring") else Watcher
            watcher = kind(self._world, self.invariants, replica)
            replica.machine = watcher
            where = (node.node_id, replica.group)
            self.machines[where] = watcher
            self._look_for_damage(node, core, replica)
            last = self._last.pop(where, None)
            if last is not None:
                self.invariants.booted(
                    replica.group,
                    last.identity,
                    replica.self_id,
                    last.sure_end,
                    replica.log.end_index,
                )
                watcher.durable_end = min(last.flushed_end, int(replica.log.end_index))
            self._judge_life(where, replica)
            for partition in core.partitions.registry:
                if partition.group == replica.group:
                    name = f"{partition.name.topic}-{partition.name.partition}"
                    self._world.names[replica.group] = name
                    known = self._world.groups.setdefault(name, replica.group)
                    is_later = replica.group.creation_epoch > known.creation_epoch
                    if is_later and known.topic_id == replica.group.topic_id:
                        self._world.groups[name] = replica.group
            register(replica)

        self.commands.attach(core.machine)
        self.moves.attach(core)
        self.seals.attach(core.machine)
        multiraft.register = watched  # type: ignore[method-assign]  # it tells before it does
        unregister = multiraft.unregister

        def unwatched(group: RaftGroupId) -> Replica | None:
            watcher = self.machines.pop((node.node_id, group), None)
            if watcher is not None:
                replica = watcher.replica
                self._holes[node.node_id, group] = replica.log.damaged
                self._gone[node.node_id, group] = replica.self_id, int(replica.log.flushed_end)
                self._judge_removal(core, replica)
            return unregister(group)

        multiraft.unregister = unwatched  # type: ignore[method-assign]  # as above
        removed = core.control.replica_removed

        def gone(group: RaftGroupId) -> None:
            where = node.node_id, group
            if where in self._last:  # ordered away before it began again
                last = self._last.pop(where)
                self._gone[where] = last.identity, last.flushed_end
            removed(group)

        core.control.replica_removed = gone  # type: ignore[method-assign]  # as above

    def _judge_life(self, where: tuple[NodeId, RaftGroupId], replica: Replica) -> None:
        """Who begins again with less than it had must not go by the same name."""
        known = self._gone.pop(where, None)
        if known is None or known[0] != replica.self_id or replica.log.end_index >= known[1]:
            return
        told = f"{where[1]}: {replica.self_id} is back with less than it had flushed"
        self.invariants.breach("EveryLifeIsNew", told)

    def _judge_removal(self, core: SimCore, replica: Replica) -> None:
        """Data goes by order only where a committed change let its replica go."""
        group, image = replica.group, core.engine.image
        removal = image.removal(group)
        is_ordered = removal is not None and core.plane.node_id in removal.nodes
        known = self._committed.get(group)
        topic = image.topic_by_id(group.topic_id)
        if not is_ordered or known is None or topic is None or not topic.has(group):
            return  # or the partition is wanted no more
        if replica.self_id in known[1].voters:
            self.invariants.breach(
                "VotersKeepTheirData", f"{group}: {replica.self_id} votes, and is ordered to go"
            )
        self._ordered_away.setdefault(group, set()).add(replica.self_id)

    def commits(self, group: RaftGroupId, start: RaftIndex, configuration: Configuration) -> None:
        """A replica knows that this change of members is committed."""
        known = self._committed.get(group)
        if known is not None and start <= known[0]:
            return
        self._committed[group] = start, configuration
        back = self._ordered_away.get(group, set()).intersection(configuration.voters)
        if back:  # a leader let it vote that did not know that it is not wanted
            names = sorted(map(str, back))
            self.invariants.breach("VotersKeepTheirData", f"{group}: {names} vote without data")

    def _look_for_damage(self, node: ClusterNode, core: SimCore, replica: Replica) -> None:
        """What begins damaged must have been spoilt, or was never claimed."""
        state, log = core.plane.journal.get(replica.group), replica.log
        folder = self.folder_of(node.node_id, replica.group)
        is_sound = not any(
            p.startswith(f"{folder}/") for p in node.disk.spoilt if p.endswith("log")
        )
        if state is not None and log.damaged and is_sound:
            # No later than what the claim comes to: all entries without an offset count as below.
            claimed_offset = state.flushed_end - (log.end_index - log.log_end_offset)
            starts = [int(start) for start, _ in log.damaged]
            known = self._holes.get((node.node_id, replica.group), [])
            self.invariants.opened(replica.group, replica.self_id, claimed_offset, starts, known)

    def detach(self, node: ClusterNode, *, in_the_middle: bool) -> None:
        """The node's process ended."""
        core = node.core
        if core is None:
            return
        for group, replica in core.plane.multiraft.replicas.items():
            watcher = self.machines.pop((node.node_id, group), None)
            log = replica.log
            self._holes[node.node_id, group] = log.damaged
            sure_end = int(log.flushed_end)
            if in_the_middle or replica.failure is not None:
                # Perhaps in a truncation, which the log's flushed end does not tell of before it
                # is done. No truncation takes what is known to be committed.
                sure_end = min(sure_end, 0 if watcher is None else watcher.commit_end)
            bare_count = log.end_index - log.log_end_offset
            self._last[node.node_id, group] = LastSeen(
                replica.self_id, sure_end, log.flushed_end, bare_count, replica.high_watermark
            )

    # ---- what the nemesis and the judge want to know ----

    def groups(self) -> list[RaftGroupId]:
        """Every group of which a replica runs, the metadata group first. What only a node that was
        given up still has is no group any more: its topic may have been deleted without it."""
        nodes = self._world.nodes
        found = dict.fromkeys(g for (n, g) in self.machines if nodes[n - 1].is_wanted)
        return sorted(found, key=lambda group: (group != METADATA_GROUP, str(group)))

    def leaders(self, group: RaftGroupId) -> list[ClusterNode]:
        """Nodes that believe that they lead, the latest term first."""
        found = []
        for node in self._world.nodes:
            watcher = self.machines.get((node.node_id, group))
            if watcher is not None and watcher.replica.is_leader:
                found.append((-watcher.replica.leader_epoch, node.node_id, node))
        return [node for *_, node in sorted(found, key=lambda row: row[:2])]

    def newcomers(self) -> list[tuple[ClusterNode, NodeId]]:
        """Leaders and nodes that they have added to a group, which do not hold its log yet."""
        found = []
        for group in self.groups():
            for node in self.leaders(group)[:1]:
                core = self.machines[node.node_id, group].replica.core
                _, committed = core.configurations.committed(core.commit_end)
                for learner in committed.learners:
                    progress = core.progress.get(learner)
                    if progress is not None and progress.match_end < core.commit_end:
                        found.append((node, learner.node_id))
        return found

    def newest_leader(self, group: RaftGroupId) -> NodeId | None:
        """The first of `leaders`."""
        found, latest = None, -1
        for node in self._world.nodes:
            watcher = self.machines.get((node.node_id, group))
            if watcher is not None and (replica := watcher.replica).is_leader:
                epoch = replica.leader_epoch
                if epoch > latest:
                    found, latest = node.node_id, epoch
        return found

    def is_whole(self) -> bool:
        """True when every node serves, and every group has its replicas as voters, caught up."""
        if self.why_not_opened() or not all(node.is_serving for node in self._world.present):
            return False
        return all(not self.why_not_whole(group) for group in self.groups())

    def why_not_opened(self) -> str:
        """What the metadata group has agreed on and is not there yet, "" when all is.

        Of a topic that was created a moment ago, or after the power of all was lost, no replica may
        run that could tell of the others; and a storage that is gone goes on to be named as long as
        its broker is registered under it.
        """
        leader = next(iter(self.leaders(METADATA_GROUP)), None)
        if leader is None or leader.core is None or not leader.core.engine.is_leader:
            return "no controller knows what was agreed on"
        image = leader.core.engine.image
        for node in self._world.present:
            broker = image.brokers.get(node.node_id)
            if broker is not None and broker.storage_id != node.storage_id:
                return f"node {node.node_id} is registered as {broker.replica_id}"
        for topic in image.topics_by_id():
            for partition in topic.held:
                group = topic.group_id(partition.index)
                for node_id in partition.replicas:
                    if (node_id, group) not in self.machines:
                        return f"{topic.name}-{partition.index} does not run on node {node_id}"
        return ""

    def why_not_gone(self) -> str:
        """Which replica runs where nobody wants it any more, "" when none does."""
        leader = next(iter(self.leaders(METADATA_GROUP)), None)
        if leader is None or leader.core is None:
            return "no controller knows who is wanted"
        image = leader.core.engine.image
        for node in self._world.present:
            for number, group in self.machines:
                if number == node.node_id and group != METADATA_GROUP:
                    topic = image.topic_by_id(group.topic_id)
                    partition = None if topic is None else topic.of_group(group)
                    if partition is None:
                        return f"{group} is no more, and runs on node {number}"
                    if number not in partition.replicas:
                        return f"{group} is not wanted on node {number}, and runs there"
        return ""

    def is_storage_missing(self) -> bool:
        """True from a loss or damage on until everybody is back under a sound storage."""
        if self._is_missing and self.may_lose_a_storage():
            self._is_missing = False
        return self._is_missing

    def storage_is_lost(self) -> None:
        """The nemesis took one, or damaged it."""
        self._is_missing = True

    def _joins(self, group: RaftGroupId, configuration: Configuration) -> bool:
        """True when somebody is about to become a voter. Brokers beside the voters of the metadata
        group are its learners for good."""
        if group != METADATA_GROUP:
            return bool(configuration.learners)
        return len(configuration.voters) < self._votes_wanted()

    def _votes_due(self, group: RaftGroupId) -> int:
        """How many it must have in the end. Two vote on metadata once nodes were drained and nobody
        could take their votes."""
        return min(3, self._votes_wanted()) if group == METADATA_GROUP else 3

    def _votes_wanted(self) -> int:
        """How many should vote on metadata."""
        nodes = self._world.options.nodes
        return self._world.newest_image.voters_wanted or nodes

    def may_lose_a_storage(self) -> bool:
        """True when every voter of every group is there under its present storage, undamaged, and
        stays: then the design bears that one of them is lost, however far the others are behind."""
        if self.why_not_opened() or not all(node.is_up for node in self._world.present):
            return False
        for (_, group), watcher in self.machines.items():
            replica = watcher.replica
            configuration = replica.configuration
            if replica.failure is not None or self._joins(group, configuration):
                return False
            if replica.log.damaged or replica.core.claimed_end_floor:
                return False
            for voter in configuration.voters:
                other = self.machines.get((voter.node_id, group))
                if other is None or other.replica.self_id != voter:
                    return False
                if not self._world.node(voter.node_id).is_wanted:
                    return False  # given up while it is up: nobody starts it again
        return True

    def why_not_whole(self, group: RaftGroupId, commit_end: int | None = None) -> str:
        """What a group lacks, "" when nothing.

        Args:
            commit_end: up to where its voters must have it, in place of all that is committed.
        """
        leaders = self.leaders(group)
        if not leaders:
            return "no leader"
        leader = self.machines[leaders[0].node_id, group].replica
        if not leader.is_writable:
            return "its leader is not writable"
        if commit_end is None:
            commit_end = leader.core.commit_end
        configuration = leader.configuration
        if self._joins(group, configuration):
            return f"learners {[str(r) for r in configuration.learners]}"
        if not leader.core.configurations.is_committed(leader.core.commit_end):
            return "its configuration is not committed"
        for voter in configuration.voters:
            watcher = self.machines.get((voter.node_id, group))
            if watcher is None:
                return f"{voter} does not run"
            replica = watcher.replica
            if replica.self_id != voter:
                return f"{voter} is {replica.self_id} now"
            if replica.failure is not None:
                return f"{voter} failed: {replica.failure}"
            if replica.log.flushed_end < commit_end:
                return f"{voter} is behind"
            if replica.log.damaged or replica.core.claimed_end_floor:
                return f"{voter} is damaged"
        if any(not self._world.node(voter.node_id).is_wanted for voter in configuration.voters):
            return f"voters {[str(r) for r in configuration.voters]}, one of which was given up"
        if len(configuration.voters) < min(self._votes_due(group), len(self._world.present)):
            return f"voters {[str(r) for r in configuration.voters]}"
        return ""

    def durable_end(self, group: RaftGroupId, who: ReplicaId) -> int:
        """How much of a group's log a replica has on its disk, or had when its node went down, or
        lost its disk."""
        watcher = self.machines.get((who.node_id, group))
        if watcher is not None and watcher.replica.self_id == who:
            return max(int(watcher.replica.log.flushed_end), watcher.durable_end)
        last = self._last.get((who.node_id, group))
        if last is not None and last.identity == who:
            return last.flushed_end
        for ended in (self._gone, self._lost):
            identity, flushed_end = ended.get((who.node_id, group), (who, 0))
            if identity == who and flushed_end:
                return flushed_end
        return 0

    def folder_of(self, node_id: NodeId, group: RaftGroupId) -> str | None:
        """Where a node keeps a group, None where it has nothing of it."""
        disk = self._world.node(node_id).disk
        if group == METADATA_GROUP:
            return f"{ROOT}/meta"
        files = disk.files(f"{ROOT}/topics")
        for life in (group.creation_epoch, FIRST_LIFE):
            tail = f"-{group.topic_id}/{partition_folder(group.partition, life)}/"
            for path in files:
                if tail in path:
                    return path[: path.index(tail) + len(tail) - 1]
        return None

    def bare_count(self, node_id: NodeId, group: RaftGroupId) -> int:
        """How many entries without an offset a log had when its node went down."""
        last = self._last.get((node_id, group))
        return 0 if last is None else last.bare_count

    def committed_offset(self, group: RaftGroupId) -> int:
        """How far any node, up or down, knows records of a group to be committed."""
        found = [int(w.replica.high_watermark) for (_, g), w in self.machines.items() if g == group]
        found += [last.high_watermark for (_, g), last in self._last.items() if g == group]
        return max(found, default=0)

    def forget(self, node_id: NodeId, group: RaftGroupId | None = None) -> None:
        """What a node kept is lost, all of it or of one group."""
        for where in [w for w in self._last if w[0] == node_id and group in (None, w[1])]:
            last = self._last.pop(where)
            self._lost[where] = last.identity, last.flushed_end


class Watcher:
    """Stands before one replica's state machine."""

    def __init__(self, world: ClusterWorld, invariants: Invariants, replica: Replica) -> None:
        self._world = world
        self._invariants = invariants
        self.group = replica.group
        self.replica = replica
        self.inner: Any = replica.machine
        self.commit_end = 0
        self.stable_end = 0
        # What was flushed before a crash is durable, though the recovered log cannot know it.
        self.durable_end = 0
        self._ends: list[int] = [0]
        self._digests: list[bytes] = [GENESIS]
        self._is_blind = False
        self._was_leader = False
        self._seals: list[tuple[int, bool]] = []
        """Seals and their ends in the log: (end of the entry, whether nothing may follow)."""
        self._proposals: deque[tuple[int, int]] = deque()
        """Log starts that were proposed: (end of the entry, offset)."""
        self._sequences: deque[Sequence] = deque()
        """Batches of idempotent producers, where a topic shrinks; not known to be committed."""
        self._commits: deque[tuple[float, int]] = deque()
        """What was known to be committed, and since when."""
        self._read_log()
        log = replica.log
        truth = invariants.truth(self.group)
        truth.views[replica.self_id] = DurableView(
            lambda: max(log.flushed_end, min(self.durable_end, self._ends[-1])), self.digest_at
        )
        self._read_barrier = replica.read_barrier
        replica.read_barrier = self._judged_barrier  # type: ignore[method-assign]  # it does as well

    def _judged_barrier(self) -> Promise[RaftIndex]:
        """A linearizable read sees all that anybody took for committed before it was asked for."""
        known_end = self._invariants.truth(self.group).commit_end

        def judge(promise: Promise[RaftIndex]) -> None:
            if promise.error is None:
                self._invariants.barrier(self.group, promise.result(), known_end)

        promise = self._read_barrier()
        promise.when_done(judge)
        return promise

    # ---- the chain ----

    @property
    def end(self) -> int:
        """Where the chain ends."""
        return self._ends[-1]

    def _begin_at(self, index: int) -> None:
        """A log begins here."""
        self._is_blind = False
        self._proposals.clear()
        self._seals.clear()
        self._sequences.clear()
        self._ends = [index]
        self._digests = [self._invariants.starts_at(self.group, self.replica.self_id, index)]

    def _read_log(self) -> None:
        """Compute the chain from the log; blind while a part of it is damaged."""
        log = self.replica.log
        self._begin_at(log.log_start.index)
        position = log.log_start.index
        try:
            while position < log.end_index:
                entries = log.entries(RaftIndex(position), 1 << 20)
                assert entries, "what a log holds can be read"
                for entry in entries:
                    self._add(entry)
                    position = entry.end
        except DamagedError:
            self._is_blind = True

    def _can_see(self) -> bool:
        if self._is_blind and not self.replica.log.damaged:
            try:
                self._read_log()
            except DiskError:
                return False
        return not self._is_blind

    def digest_at(self, end: int) -> bytes | None:
        """The digest of the log below `end`; None where this log has no entry's end."""
        self._can_see()
        position = bisect_left(self._ends, end)
        if position < len(self._ends) and self._ends[position] == end:
            return self._digests[position]
        return None

    def _add(self, entry: LogEntry) -> None:
        if entry.kind == EntryKind.LOG_START:
            self._proposals.append((entry.end, decode_proposal(entry.payload)))
        elif entry.kind == EntryKind.SEAL:
            self._seals.append((entry.end, Seal.decode(entry.payload).is_closed))
        elif entry.kind == EntryKind.BATCH and self._seals and self._seals[-1][1]:
            told = f"{self.group}: {self.replica.self_id} has a batch at {entry.start}"
            self._invariants.breach("NothingBehindASeal", told)
        if entry.kind == EntryKind.BATCH and self._world.options.narrow:
            self._note_sequence(entry)
        assert entry.start >= self._ends[-1], "entries overlap"
        head = b"%d %d %d %d " % (entry.start, entry.end, entry.leader_epoch, entry.kind)
        digest = chain(self._digests[-1], head + bytes(entry.payload))
        self._digests.append(digest)
        self._ends.append(entry.end)
        self._invariants.appended(
            self.group, self.replica.self_id, entry.end, entry.leader_epoch, digest
        )

    def _note_sequence(self, entry: LogEntry) -> None:
        header = parse_header(entry.payload)
        if header.producer_id >= 0 and not header.is_control:
            last = header.base_sequence + header.last_offset_delta
            who = header.producer_id, header.producer_epoch
            self._sequences.append(Sequence(int(entry.end), *who, last))

    # ---- StateMachine ----

    def appended(self, entry: LogEntry) -> None:
        """Note an entry."""
        if self._can_see() and self._ends[-1] < entry.end:
            self._add(entry)
        if entry.kind == EntryKind.MEMBERSHIP:
            self._judge_membership(entry)
        elif entry.kind == EntryKind.SEAL:
            self._judge_seal(entry)
        self.inner.appended(entry)

    def _judge_seal(self, entry: LogEntry) -> None:
        """Who writes a seal leaves no transaction open whose end would have to come behind it."""
        partition, core = self.inner, self.replica.core
        is_own = core.term_start is not None and int(entry.leader_epoch) == int(core.term)
        if not is_own or not isinstance(partition, Partition):
            return
        since = partition._producers.table.first_open_offset
        if since is not None and Seal.decode(entry.payload).is_closed:
            told = (
                f"{self.group}: {self.replica.self_id} seals at {entry.start}, open since {since}"
            )
            self._invariants.breach("NothingOpenBehindASeal", told)

    def _judge_membership(self, entry: LogEntry) -> None:
        """Tell of a change that this replica began as a leader."""
        core = self.replica.core
        if core.term_start is None or int(entry.leader_epoch) != int(core.term):
            return  # another one's
        configurations = core.configurations
        start, before = configurations.committed(entry.start)
        after = Configuration.decode(entry.payload)
        is_settled = start == configurations.base_start or start < core.commit_end
        self._invariants.changes_voters(
            self.group,
            self.replica.self_id,
            before.voters,
            after.voters,
            is_settled=is_settled and core.commit_end > core.term_start,
            answering=[
                self.replica.self_id,
                *(
                    peer
                    for peer, progress in core.progress.items()
                    if core.now - progress.last_heard_tick <= core.config.election_ticks
                ),
            ],
        )

        self._judge_successors(before, after)

    def _judge_successors(self, before: Configuration, after: Configuration) -> None:
        """Whoever gets a vote has caught up, and nobody loses one before enough others vote."""
        watch, group, me = self._world.watch, self.group, self.replica.self_id
        since_ms = self._world.now_ms - CAUGHT_UP_MS
        wanted_end = max((end for at_ms, end in self._commits if at_ms <= since_ms), default=0)
        told = f"{group}: {me} changes {list(before.voters)} to {list(after.voters)}"
        for voter in after.voters:
            if voter in before.voters:
                continue
            durable_end = watch.durable_end(group, voter)
            if durable_end < wanted_end:
                more = f"{voter} has it up to {durable_end} of {wanted_end}"
                self._invariants.breach("VotersHaveCaughtUp", f"{told}, {more}")
        wanted = self._voters_wanted()
        # A node may vote twice for a while: under the storage that it lost, and under its new one.
        there, then = ({v.node_id for v in voters} for voters in (before.voters, after.voters))
        if len(then) < min(len(there), wanted):
            name = "VotesPassOn" if group == METADATA_GROUP else "FactorHolds"
            self._invariants.breach(name, f"{told}, wanted are {wanted}")

    def _voters_wanted(self) -> int:
        """How many should vote, by the image that this node has; 0 where it does not know."""
        core = self._world.node(self.replica.self_id.node_id).core
        if core is None:
            return 0
        image = core.engine.image
        if self.group == METADATA_GROUP:
            return image.voters_wanted or self._world.options.nodes
        topic = image.topic_by_id(self.group.topic_id)
        partition = None if topic is None else topic.of_group(self.group)
        return 0 if partition is None else len(partition.replicas)

    def truncated(self, end: RaftIndex) -> None:
        """Forget a suffix."""
        self.durable_end = min(self.durable_end, end)
        self._world.counts.truncations += 1
        if end < self.commit_end:
            self._invariants.breach(
                "MonotonicHighWatermark", f"{self.group}: truncated to {end} below the watermark"
            )
        while self._ends[-1] > end:
            self._ends.pop()
            self._digests.pop()
        while self._proposals and self._proposals[-1][0] > end:
            self._proposals.pop()
        while self._seals and self._seals[-1][0] > end:
            self._seals.pop()
        while self._sequences and self._sequences[-1].end > end:
            self._sequences.pop()
        self.inner.truncated(end)
        self._judge_stable_end()

    def committed(self, high_watermark: Offset, commit_end: RaftIndex) -> None:
        """The high watermark moved."""
        self._judge_commit(commit_end)
        self._world.watch.seals.commits(self.group, high_watermark)
        while self._sequences and self._sequences[0].end <= commit_end:
            self._world.watch.seals.writes(self.group, self._sequences.popleft())
        while self._proposals and self._proposals[0][0] <= commit_end:
            offset = self._proposals.popleft()[1]
            self._judge_log_start(offset)
            self._world.log_start_moves(self.group, offset)
        self.inner.committed(high_watermark, commit_end)
        self._judge_stable_end()

    def _stable_end(self) -> int | None:
        """Where readers of committed records stop who may read up to the high watermark, as at a
        leader; None where nobody asks, or it is not known.

        A follower tells less until it has flushed as much. It may have told more while it led, of
        what others had flushed and it had not.
        """
        partition, group = self.inner, self.group
        is_known = self._world.names.get(group, "").startswith(TRANSACTIONS)
        if not is_known or not isinstance(partition, Partition) or partition._producers._is_hidden:
            return None
        end = self.replica.high_watermark
        return int(partition._stable_end(end, partition._readable_end(end)))

    def _judge_stable_end(self) -> None:
        stable_end = self._stable_end()
        if stable_end is None or self.replica.log.damaged:
            return
        if stable_end < self.stable_end:
            told = f"{self.group}: {self.replica.self_id} fell to {stable_end}"
            self._invariants.breach("MonotonicStableEnd", told)
        self.stable_end = stable_end

    def _judge_log_start(self, offset: int) -> None:
        """Retention takes nothing of a transaction that has not ended; an operator may, who deletes
        records of the topic that shrinks. The leader says: a follower may not have flushed the
        marker yet."""
        is_by_wish = self._world.names.get(self.group, "").startswith(NARROW)
        stable_end = self._stable_end() if self.replica.is_leader and not is_by_wish else None
        if stable_end is not None and offset > max(stable_end, self.replica.log_start_offset):
            told = f"{self.group}: records below {offset} go, stable is {stable_end}"
            self._invariants.breach("RetentionSparesTheOpen", told)

    def _judge_commit(self, commit_end: int) -> None:
        replica, invariants, group = self.replica, self._invariants, self.group
        if commit_end < self.commit_end:
            invariants.breach(
                "MonotonicHighWatermark", f"{group}: {replica.self_id} fell to {commit_end}"
            )
        before, self.commit_end = self.commit_end, commit_end
        self._commits.append((self._world.now_ms, commit_end))
        while self._commits[0][0] < self._world.now_ms - 2 * CAUGHT_UP_MS and (
            len(self._commits) > 1 and self._commits[1][0] <= self._world.now_ms - CAUGHT_UP_MS
        ):
            self._commits.popleft()
        term_start = replica.core.term_start
        if term_start is not None and commit_end > before:
            invariants.leader_commits(group, replica.self_id, commit_end, term_start)
        if not self._can_see():
            return
        first, last = bisect_left(self._ends, before), bisect_left(self._ends, commit_end)
        digest = self.digest_at(commit_end)
        epoch = replica.leader_epoch
        self._world.watch.commits(
            group, *replica.core.configurations.committed(RaftIndex(commit_end))
        )
        invariants.committed(group, replica.self_id, commit_end, digest, replica.voters, epoch)
        invariants.knows_committed(
            group,
            list(zip(self._ends[first : last + 1], self._digests[first : last + 1], strict=True)),
        )

    def role_changed(self, soft: SoftState) -> None:
        """Leaders are watched."""
        world, replica = self._world, self.replica
        is_leader = soft.role is Role.LEADER
        if is_leader or self._was_leader:
            world.note("role", replica.self_id, self.group, soft.role.value, soft.term)
        if is_leader and not self._was_leader:
            world.counts.leader_changes += 1
            world.counts.controllers += self.group == METADATA_GROUP
            if world.keeps_leader(self.group):
                self._invariants.breach(
                    "LeadersAreKept", f"{self.group}: {replica.self_id} took over, for no reason"
                )
            self._invariants.leads(self.group, replica.self_id, soft.term)
            self._world.watch.seals.leads(self.group, soft.term, replica.log.log_end_offset)
            self._judge_sequences()
            self._invariants.holds_committed(self.group, replica.self_id, soft.term, self.digest_at)
        self._was_leader = is_leader
        self.inner.role_changed(soft)

    def _judge_sequences(self) -> None:
        partition = self.inner
        if self._world.options.narrow and isinstance(partition, Partition):
            producers = partition._producers
            if not (partition.is_internal or producers.is_hidden or producers.is_doubtful):
                self._world.watch.seals.knows(self.group, producers.table)

    def progressed(self) -> None:
        """The product's machine is told."""
        self.inner.progressed()

    def state_at(self, offset: Offset, index: RaftIndex) -> bytes | None:
        """Asked of the product's machine."""
        state: bytes | None = self.inner.state_at(offset, index)
        return state

    def restore(self, log_start: LogStart) -> None:
        """Begin at a log start."""
        self._world.counts.log_starts += 1
        self._begin_at(log_start.index)
        self.stable_end = 0
        self.inner.restore(log_start)


class SlowWatcher(Watcher):
    """Before a machine whose state may be large."""

    def restoring(self, state: Buffer) -> Runnable | None:
        """Asked of the product's machine."""
        job: Runnable | None = self.inner.restoring(state)
        return job
