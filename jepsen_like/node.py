"""A simulated node: the product's journal, logs and replicas on a forgetful disk.

Owns what survives a crash (the disk, the storage id) and what does not (all the rest). The
product's code runs here unchanged. Everything that reaches a node passes `run`, which turns a power
loss in the middle of an operation into a crash and lets any other exception end the run as an
anomaly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

from attrs import frozen

from jepsen_like.disk import SimCrash, SimDisk
from jepsen_like.machine import SimMachine
from jepsen_like.virtual_time import EPOCH_MS
from raftmq.errors import KafkaError
from raftmq.log.flush import FlushJob
from raftmq.log.hard_state import HardStateJournal, JournalConfig
from raftmq.log.model import LogConfig
from raftmq.log.shared import Shared
from raftmq.ports import DiskError, DiskFullError
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import VoteReply
from raftmq.records import HEADER_SIZE, parse_header
from raftmq.replication.multiraft import MultiRaft, Stream
from raftmq.replication.peer_codec import decode
from raftmq.replication.peer_messages import NodeBeat
from raftmq.replication.recovery import Opening, open_replica
from raftmq.replication.replica import Replica, ReplicaConfig
from raftmq.types import METADATA_GROUP, Buffer, NodeId, RaftGroupId, ReplicaId, StorageId

if TYPE_CHECKING:
    from jepsen_like.world import World


SCRUB_BYTES = 500


def _broken(reason: str) -> None:
    raise AssertionError(reason)


@frozen
class LastSeen:
    """A replica as it was when its node went down."""

    identity: ReplicaId
    sure_end: int
    flushed_end: int
    bare_count: int


class SimClock:
    """A node's clocks: the monotonic one is the world's, the other is off by a constant."""

    def __init__(self, world: World, skew_ms: float) -> None:
        self._world = world
        self._skew_ms = skew_ms

    def monotonic_ms(self) -> float:
        """Virtual time."""
        return self._world.now_ms

    def wall_ms(self) -> int:
        """Virtual time of day, skewed."""
        return int(EPOCH_MS + self._world.now_ms + self._skew_ms)


class SimNode:
    """One node of the world."""

    def __init__(self, world: World, node_id: int, random: Random) -> None:
        self.world = world
        self.node_id = NodeId(node_id)
        self.disk = SimDisk(random)
        self.storage_id = StorageId(random.getrandbits(63) | 1)
        self.incarnation = 0
        self.is_up = False
        self.paused_until_ms = 0.0
        self.is_slow = False
        self.must_rot = False
        self.crashes_after_voting = False
        self._is_inside = False
        self._resting = 0
        self._last: dict[RaftGroupId, LastSeen] = {}
        self.multiraft: MultiRaft | None = None
        self.journal: HardStateJournal | None = None
        self.machines: dict[RaftGroupId, SimMachine] = {}
        self._random = random
        skew = world.options.clock_skew_ms
        self.clock = SimClock(world, random.uniform(-skew, skew))

    @property
    def replicas(self) -> dict[RaftGroupId, Replica]:
        """What runs here now; empty when down."""
        return {} if self.multiraft is None else self.multiraft.replicas

    # ---- life ----

    def start(self) -> None:
        """Boot from what the disk holds."""
        assert not self.is_up
        self.incarnation += 1
        self.is_up = True
        self.paused_until_ms = 0.0
        self.world.note("start", self.node_id, self.incarnation)
        try:
            self.run(self._boot)
        except DiskFullError:
            # As a supervisor does: the node cannot start now, try again later.
            self.crash()
            self.world.schedule(100.0, self.world.restart(self))
        if self.is_up:
            self._schedule_tick()

    def _boot(self) -> None:
        world = self.world
        self.disk.make_directories("data")
        self.journal = HardStateJournal.open(
            self.disk,
            "data/state.journal",
            config=JournalConfig(size_max=16 << 10, reserve_bytes=8 << 10),
        )
        multiraft = MultiRaft(
            self.node_id,
            self.journal,
            send=self._send,
            request_flush=self._request_flush,
            on_journal_failed=lambda _error: self.crash(),
            on_broken_invariant=_broken,
        )
        opening = Opening(
            node=ReplicaId(self.node_id, self.storage_id),
            disk=self.disk,
            journal=self.journal,
            peers=multiraft,
            clock=self.clock,
            random=self._random,
            shared=Shared.make(self.disk),
            buggify=world.buggify,
        )
        self.multiraft = multiraft
        self.machines = {}
        if self.must_rot:
            self.must_rot = False
            self._rot()
        with multiraft.batch():
            for number, group in enumerate(world.groups):
                machine = SimMachine(
                    group, world.invariants, world.on_committed, world.on_role_changed
                )
                replica = open_replica(
                    opening,
                    group,
                    f"data/group-{number}",
                    initial=world.initial,
                    machine=machine,
                    log_config=LogConfig(
                        segment_bytes=world.options.segment_bytes,
                        index_interval_bytes=256,
                        bare_reserve_bytes=2048,
                    ),
                    config=self._config(group),
                )
                self._look_for_damage(replica, f"data/group-{number}")
                machine.attach(replica)
                self._compare(group, replica, machine)
                self.machines[group] = machine
                multiraft.register(replica)

    def _look_for_damage(self, replica: Replica, folder: str) -> None:
        assert self.journal is not None
        state = self.journal.get(replica.group)
        if state is not None and not any(p.startswith(f"{folder}/") for p in self.disk.spoilt):
            log = replica.log
            # No later than what the claim comes to: all entries without an offset count as below.
            claimed_offset = state.flushed_end - (log.end_index - log.log_end_offset)
            starts = [int(start) for start, _ in log.damaged]
            self.world.invariants.opened(replica.group, replica.self_id, claimed_offset, starts)

    def _compare(self, group: RaftGroupId, replica: Replica, machine: SimMachine) -> None:
        last = self._last.get(group)
        if last is not None:
            self.world.invariants.booted(
                group,
                last.identity,
                replica.self_id,
                last.sure_end,
                replica.log.end_index,
            )
            machine.durable_end = last.flushed_end

    def _config(self, group: RaftGroupId) -> ReplicaConfig:
        options = self.world.options
        return ReplicaConfig(
            election_ticks=options.election_ticks,
            heartbeat_ticks=options.heartbeat_ticks,
            append_bytes_max=options.append_bytes_max,
            inflight_messages_max=8,
            pre_vote=options.pre_vote,
            check_quorum=options.check_quorum,
            announce_commit=group == METADATA_GROUP,
            replica_lag_time_max_ms=1_000,
            disk_full_backoff_ms=100,
            rest_after_ticks=options.rest_after_ticks,
        )

    def crash(self) -> None:
        """Lose power: unsynced bytes are kept, lost or torn."""
        if not self.is_up:
            return
        self.world.note("crash", self.node_id)
        self.world.summary.crashes += 1
        self._stop()
        self.disk.crash(self._random)

    def _stop(self) -> None:
        self.is_up = False
        self.incarnation += 1
        for group, replica in self.replicas.items():
            log = replica.log
            bare_count = log.end_index - log.log_end_offset
            # In the middle of a truncation nobody can say what must be there afterwards.
            sure_end = 0 if self._is_inside else log.flushed_end
            self._last[group] = LastSeen(replica.self_id, sure_end, log.flushed_end, bare_count)
        self.world.forget(self)
        self.multiraft = None
        self.journal = None

    def wipe(self) -> None:
        """Lose the disk as well; the node comes back as another storage."""
        self.crash()
        self.world.note("wipe", self.node_id)
        self.world.summary.wipes += 1
        self._last.clear()
        self.disk = SimDisk(self._random)
        self.storage_id = StorageId(self._random.getrandbits(63) | 1)

    def lose_folder(self, number: int) -> None:
        """Lose one group's files, and nothing else."""
        self.crash()
        self.world.note("lose folder", self.node_id, number)
        self.world.summary.wipes += 1
        self._last.pop(self.world.groups[number], None)
        self.disk.remove_tree(f"data/group-{number}")

    def _rot(self) -> None:
        """Flip a bit in a batch that the journal knows to be flushed, preferably a late one."""
        assert self.journal is not None
        random = self._random
        number = random.randrange(len(self.world.groups))
        group = self.world.groups[number]
        state = self.journal.get(group)
        # Damage in closed segments is found late, so a second one might meet the only sound copy:
        # more than the design promises to survive. One per group and run.
        if state is None or group in self.world.rotten:
            return
        # Bare entries take no offset: everything below this one is surely below the claimed end.
        last = self._last.get(group)
        sure_end = state.flushed_end - (0 if last is None else last.bare_count)
        found: list[tuple[str, int, int]] = []
        for path, size in self.disk.files(f"data/group-{number}").items():
            if path.endswith(".log"):
                found += _flushed_batches(path, self.disk.content(path)[:size], sure_end)
        if not found:
            return
        path, position, size = found[-1] if random.random() < 0.5 else random.choice(found)
        self.world.note("rot", self.node_id, path, position)
        self.world.summary.rots += 1
        self.world.rotten.append(group)
        self.disk.flip(path, position + random.randrange(size), random.randrange(8))

    def run(self, action: Callable[[], None]) -> None:
        """Let something happen to this node; a power loss in the middle of it is a crash."""
        was_inside, self._is_inside = self._is_inside, True
        try:
            action()
        except SimCrash:
            self.crash()
        finally:
            self._is_inside = was_inside

    # ---- inputs ----

    def later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do something on this node's loop, unless it dies before; a paused node does it late."""
        incarnation = self.incarnation

        def fire() -> None:
            if self.incarnation != incarnation or not self.is_up:
                return
            if self.world.now_ms < self.paused_until_ms:
                self.world.schedule(self.paused_until_ms - self.world.now_ms, fire)
                return
            self.run(action)

        self.world.schedule(delay_ms, fire)

    def deliver(self, sender: int, frame: bytes) -> None:
        """A frame arrived."""
        self.later(0.0, lambda: self._take(sender, frame))

    def _take(self, sender: int, frame: bytes) -> None:
        assert self.multiraft is not None
        self.multiraft.deliver(NodeId(sender), memoryview(frame))

    def _schedule_tick(self) -> None:
        tick_ms = self.world.options.tick_ms
        self.later(self._random.uniform(0.9, 1.1) * tick_ms, self._tick)

    def _tick(self) -> None:
        assert self.multiraft is not None
        self._schedule_tick()
        self.multiraft.tick()
        resting = self.multiraft.resting_count
        self.world.summary.rests += max(0, resting - self._resting)
        self._resting = resting
        for replica in self.replicas.values():
            replica.scrub(SCRUB_BYTES)
        self._restart_if_failed()

    def _restart_if_failed(self) -> None:
        """What an operator's supervisor does about a replica whose disk failed."""
        failures = [r.failure for r in self.replicas.values() if r.failure is not None]
        if failures:
            self.world.note("failed", self.node_id, failures[0])
            self.crash()
            self.world.schedule(50.0, self.world.restart(self))

    # ---- outputs ----

    def _send(self, node_id: NodeId, frame: Sequence[Buffer], stream: Stream) -> bool:
        if self.crashes_after_voting and _is_vote(frame):
            self._in_thread(0.2, self._crash_briefly)
        return self.world.network.send(self.node_id, node_id, frame)

    def _crash_briefly(self) -> None:
        self.crash()
        self.world.schedule(1.0, self.world.restart(self))

    def _request_flush(self, job: FlushJob, done: Callable[[DiskError | None], None]) -> None:
        low, high = self.world.options.fsync_ms
        delay_ms = self._random.uniform(low, high)
        if self.is_slow:
            delay_ms += self._random.uniform(0.0, self.world.options.slow_fsync_ms)
        # A flush takes what is written when it begins, at least; where in its time the device
        # really does it is not known.
        begin_ms = delay_ms * self._random.choice((0.0, 0.5, 1.0))
        error: list[DiskError | None] = [None]

        def sync() -> None:
            try:
                job.run()
            except DiskError as failure:
                error[0] = failure
            self.later(delay_ms - begin_ms, lambda: done(error[0]))

        if begin_ms:
            self._in_thread(begin_ms, sync)
        else:
            sync()

    def _in_thread(self, delay_ms: float, action: Callable[[], None]) -> None:
        """As `later`, but a flusher thread's system call goes on while the process is paused."""
        incarnation = self.incarnation

        def fire() -> None:
            if self.incarnation == incarnation and self.is_up:
                self.run(action)

        self.world.schedule(delay_ms, fire)

    # ---- what clients may ask ----

    def leads(self, group: RaftGroupId) -> Replica | None:
        """The replica here, if it believes that it leads and is awake."""
        replica = self.replicas.get(group)
        if replica is None or not replica.is_leader or self.world.now_ms < self.paused_until_ms:
            return None
        return replica

    def move_log_start(self, group: RaftGroupId, share: float) -> bool:
        """Ask the leader here to drop a share of what is committed."""
        replica = self.leads(group)
        if replica is None or not replica.is_writable:
            return False
        start, end = replica.log_start_offset, replica.high_watermark
        target = start + int((end - start) * share)
        if target <= start:
            return False
        moved: list[bool] = []

        def move() -> None:
            try:
                replica.move_log_start(type(start)(target))
            except KafkaError:
                return
            moved.append(True)

        self.run(move)
        return bool(moved)

    def transfer(self, group: RaftGroupId, node_id: NodeId) -> None:
        """Ask the leader here to hand leadership over."""
        replica = self.leads(group)
        if replica is None:
            return
        try:
            replica.transfer_leadership(node_id)
        except KafkaError:
            return  # that one cannot lead now


def original_configuration(nodes: Sequence[SimNode]) -> Configuration:
    """All nodes as voters, under their first storage."""
    return Configuration(tuple(ReplicaId(node.node_id, node.storage_id) for node in nodes))


def _flushed_batches(path: str, data: bytes, sure_end: int) -> list[tuple[str, int, int]]:
    """Batches of a segment that lie wholly below an offset: (path, position, size)."""
    found: list[tuple[str, int, int]] = []
    position = 0
    while position + HEADER_SIZE <= len(data):
        header = parse_header(data, position)
        if header.batch_length <= 0 or header.next_offset > sure_end:
            break
        found.append((path, position, header.size))
        position += header.size
    return found


def _is_vote(frame: Sequence[Buffer]) -> bool:
    """True for a granted vote on its way out."""
    content = decode(b"".join(frame))
    if isinstance(content, NodeBeat):
        return False
    return any(isinstance(message, VoteReply) and message.granted for _, message in content)
