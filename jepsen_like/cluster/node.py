"""A simulated machine with one node on it: the product's own composition on a forgetful disk.

Owns what survives a process (the disk, the clocks) and what does not (all the rest). Everything
that reaches the node passes `run`, which turns a power loss in the middle of an operation into a
crash; any other exception is a finding and ends the run. A supervisor restarts what has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import attrs

from jepsen_like.cluster.options import ClusterOptions
from jepsen_like.cluster.pauses import Pauses
from jepsen_like.cluster.port import SimPort
from jepsen_like.cluster.tasks import SimTasks
from jepsen_like.cluster.wires import SimLinks
from jepsen_like.disk import SimCrash, SimDisk
from jepsen_like.virtual_time import EPOCH_MS
from raftmq.config import Address, NodeConfig, PeerAddress
from raftmq.counts import Histogram
from raftmq.errors import RemoteProtocolError
from raftmq.groups.model import GroupConfig
from raftmq.log.journal import HardStateJournal, JournalConfig
from raftmq.log.model import LogConfig
from raftmq.metadata.engine import DrivenEngine, EngineConfig
from raftmq.metadata.raft_engine import RaftMetadataEngine
from raftmq.node.composition import NodeCore, Shutdown
from raftmq.node.environment import Environment, Links, PeerEvents
from raftmq.partition.produce_checks import InlineBudget
from raftmq.ports import DiskError, DiskFullError, Runnable
from raftmq.promise import Promise
from raftmq.replication.catch_up import CatchUpRate
from raftmq.runtime.clock import CoreTimes
from raftmq.runtime.data_folder import DataFolder, DataFolderError
from raftmq.runtime.peer_hello import PeerIdentity
from raftmq.types import NodeId, StorageId

if TYPE_CHECKING:
    from jepsen_like.cluster.world import ClusterWorld

NOTE_AGAIN_OFFSETS: Final = 30
"""So far behind a lane's last note is seldom here, in logs so short."""
ENTRIES_MAX: Final = 12
"""Few, so that logs of delay partitions are read anew, and ahead."""

ROOT = "data"
DISK_BYTES = 1 << 40
SUPERVISOR_MS = (50.0, 400.0)
VOTE_LEAVES_MS = 0.2


class SimClock:
    """A node's clocks: the monotonic one is the world's, the other may say anything."""

    def __init__(self, world: ClusterWorld, skew_ms: float) -> None:
        self._world = world
        self.skew_ms = skew_ms
        self.strobe_ms = 0.0

    def monotonic_ms(self) -> float:
        """Virtual time."""
        return self._world.now_ms

    def wall_ms(self) -> int:
        """Virtual time of day, skewed."""
        now_ms = self._world.now_ms
        swing = self.strobe_ms if int(now_ms / 10) % 2 else 0.0
        return int(EPOCH_MS + now_ms + self.skew_ms + swing)


class SimFlusher:
    """Flusher threads: each flush takes its time, and happens somewhere in it."""

    def __init__(self, node: ClusterNode, random: Random) -> None:
        self._node = node
        self._random = random
        self.latency = Histogram()
        self._began: dict[int, float] = {}
        self._count = 0

    def longest_ms(self) -> float:
        """For how long the oldest flush has not come back; 0 where none is under way."""
        now_ms = self._node.world.now_ms
        return max((now_ms - began for began in self._began.values()), default=0.0)

    def submit(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """Run the job later, then `done` on the loop."""
        node, random = self._node, self._random
        low, high = node.world.options.fsync_ms
        delay_ms = random.uniform(low, high)
        if node.is_slow:
            delay_ms += random.uniform(0.0, node.world.options.slow_fsync_ms)
            node.world.had_effect("flushed slowly")
        # A flush takes what is written when it begins, at least; where in its time the device
        # really does it is not known.
        begin_ms = delay_ms * random.choice((0.0, 0.5, 1.0))

        def sync() -> None:
            error: DiskError | None = None
            try:
                job.run()
            except DiskError as failure:
                error = failure
            node.later(delay_ms - begin_ms, lambda: tell(error))

        def tell(error: DiskError | None) -> None:
            del self._began[number]
            done(error)

        self._count += 1
        number = self._count
        self._began[number] = node.world.now_ms
        node.in_thread(begin_ms, sync)

    def close(self) -> None:
        """Nothing to end."""


class SimThreads:
    """Worker threads that do a job and tell the loop."""

    def __init__(self, node: ClusterNode) -> None:
        self._node = node

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """Run it some time later."""
        node = self._node

        def work() -> None:
            error: DiskError | None = None
            try:
                job.run()
            except DiskError as failure:
                error = failure
            node.later(0.0, lambda: done(error))

        node.in_thread(node.thread_ms(), work)

    run_long = run

    def close(self) -> None:
        """Nothing to end."""


class SimCatchUp(SimThreads):
    """For replicas that are far behind."""

    def __init__(self, node: ClusterNode, links: Links, rate: CatchUpRate) -> None:
        super().__init__(node)
        self._links = links
        self.rate = rate

    def has_room(self, to: NodeId, size_bytes: int) -> bool:
        """True when the stream to that node would take a chunk."""
        return self._links.has_room_for_stored(to, size_bytes)


class SimBatchOpening(SimThreads):
    """For produced batches that are looked into."""

    def __init__(self, node: ClusterNode) -> None:
        super().__init__(node)
        self.inline = InlineBudget(node.clock)


class SimWorkers:
    """The server's workers."""

    def __init__(self, node: ClusterNode) -> None:
        self._node = node

    def submit(self, work: Callable[[], Any]) -> Promise[Any]:
        """Run `work` some time later."""
        promise: Promise[Any] = Promise()
        node = self._node

        def run() -> None:
            error: Exception | None = None
            value: Any = None
            try:
                value = work()
            except Exception as caught:  # noqa: BLE001  # it concerns whoever asked
                error = caught
            if error is None:
                node.later(0.0, lambda: promise.resolve(value))
            else:
                failure = error
                node.later(0.0, lambda: promise.fail(failure))

        node.in_thread(node.thread_ms(), run)
        return promise


class SimCore(NodeCore):
    """The product's node, with a metadata log small enough to see snapshots."""

    def __init__(self, config: NodeConfig, options: ClusterOptions) -> None:
        super().__init__(config)
        self._options = options
        self.metadata_log = LogConfig(
            segment_bytes=options.snapshot_bytes,
            retention_ms=-1,
            segment_reserve_bytes=4_096,
            bare_reserve_bytes=2_048,
        )

    def _group_config(self) -> GroupConfig:
        return attrs.evolve(
            super()._group_config(),
            offsets_retention_ms=self._options.offsets_retention_ms,
            retention_check_ms=300,
        )

    def _make_engine(self) -> DrivenEngine:
        return RaftMetadataEngine(
            self_id=self.node_id,
            incarnation=self.plane.clock.wall_ms(),
            machine=self.machine,
            forwarder=self.calls,
            clock=self.plane.clock,
            on_broken_invariant=self.plane.fail,
            config=EngineConfig(
                snapshot_bytes_min=self._options.snapshot_bytes,
                snapshot_factor=1,
                buggify=self.plane.buggify,
            ),
            wake=self._wake,
            drain_later=self._drain_later,
            on_unauthorized=self._command_refused,
            first_levels=self._first_levels,
        )


class ClusterNode:
    """One machine of the world.

    Attributes:
        life: rises with every process and with its end.
        core: the product, while a process runs.
        is_listening: peers can connect.
    """

    def __init__(self, world: ClusterWorld, node_id: NodeId, random: Random) -> None:
        self.world = world
        self.node_id = node_id
        self.disk = SimDisk(random, tears=self._loses_power)
        self.identity = PeerIdentity(node_id, StorageId(0))
        """As whom its peers know it."""
        self.life = 0
        self._quiescent = 0
        self._leaving_life = -1
        self.is_up = False
        self.is_listening = False
        self.is_wanted = node_id <= world.options.nodes
        """False before a spare node is taken, and after a node was given up."""
        self.is_held = False
        """Down, and not to be started before its time."""
        self.is_inside = False
        self.pauses = Pauses(world)
        self.is_slow = False
        self.crashes_after_voting = False
        self.must_start: list[Callable[[], object]] = []
        """Done to the disk before the next start."""
        self.core: SimCore | None = None
        self.links: SimLinks | None = None
        self.port: SimPort | None = None
        self._tasks: SimTasks | None = None
        self._journal: HardStateJournal | None = None
        self._random = random
        self._deadline_ms: float | None = None
        # Retention goes by most clocks of a partition, of which there are three.
        self.may_be_far_off = node_id == 1
        skew = world.options.clock_skew_ms if self.may_be_far_off else 0.0
        self.clock = SimClock(world, random.uniform(-skew, skew))

    # ---- life ----

    @property
    def storage_id(self) -> StorageId:
        """Under which its replicas are known."""
        return self.identity.storage_id

    @property
    def is_paused(self) -> bool:
        """True while the process is stopped."""
        return self.pauses.is_paused

    @property
    def is_serving(self) -> bool:
        """True while clients can connect."""
        return self.core is not None and self.core.is_serving

    def start(self) -> None:
        """Boot from what the disk holds."""
        assert not self.is_up
        self.life += 1
        self.is_up = True
        self.pauses.end()
        self.world.note("start", self.node_id, self.life)
        self.run(self._boot)

    def _boot(self) -> None:
        first, self.must_start = self.must_start, []
        try:
            for action in first:
                action()
            self._compose()
        except DataFolderError as error:
            # What an operator does about a folder that cannot be used: a new disk.
            self.world.note("unusable", self.node_id, error)
            self.wipe()
            self.restart_later()
        except DiskFullError:
            self.kill("no space to start")
            self.restart_later()
        except DiskError as error:
            self.kill(f"the disk failed: {error}")
            self.restart_later()

    def _compose(self) -> None:
        world, disk = self.world, self.disk
        disk.make_directories(ROOT)
        folder = DataFolder.unlocked(
            disk,
            ROOT,
            cluster_id="sim",
            node_id=self.node_id,
            draw=self._random.getrandbits(63),
        )
        folder.check_recovered()
        journal = self._journal = self.open_journal(is_expected=not folder.is_new)
        folder.take()
        self.identity = PeerIdentity(self.node_id, folder.storage_id)
        life = self.life

        def connect(peer_events: PeerEvents) -> SimLinks:
            self.links = SimLinks(world, self, peer_events)
            return self.links

        tasks = self._tasks = SimTasks(
            self.later, lambda work: self.in_thread(self.thread_ms(), work)
        )
        environment = Environment(
            disk=disk,
            folder=folder,
            clock=self.clock,
            random=self._random,
            tasks=tasks,
            flusher=SimFlusher(self, self._random),
            workers=SimWorkers(self),
            connect=connect,
            make_catch_up=lambda links, rate: SimCatchUp(self, links, rate),
            batch_openers=SimBatchOpening(self),
            disk_space=self._disk_space,
            make_lock=nullcontext,
            core_times=CoreTimes,
            core_stolen_ms=lambda: 0.0,
            audit_sink=None,
            buggify=world.buggify,
        )
        core = SimCore(self._config(), world.options)
        core.compose(environment, journal)
        core.partitions.delays.note_again_offsets = NOTE_AGAIN_OFFSETS
        core.partitions.delays.entries_max = ENTRIES_MAX
        self.core = core
        self.port = SimPort(world, self, core)
        world.watch.attach(self, core)
        core.deadlines.on_earlier = self._deadline_moved
        core.plane.on_tick.append(partial(self._look_at_quiescence, core))
        core.plane.failed.when_done(lambda reason: self._failed(life, reason.result()))
        self.is_listening = True
        for other in world.nodes:
            if other.links is not None and other is not self:
                other.links.peer_up(self.node_id)
        tasks.spawn(core.plane.tick_forever)
        tasks.spawn(self._come_up)

    def open_journal(
        self, *, is_expected: bool = True, disk: SimDisk | None = None
    ) -> HardStateJournal:
        """The journal of hard states on this machine's disk, or on a copy of it."""
        return HardStateJournal.open(
            disk or self.disk,
            f"{ROOT}/state.journal",
            config=JournalConfig(size_max=32 << 10, reserve_bytes=8 << 10),
            is_expected=is_expected,
        )

    async def _come_up(self) -> None:
        core, tasks = self.core, self._tasks
        assert core is not None
        assert tasks is not None
        await core.join()
        tasks.spawn(core.live)
        await core.until_ready()
        core.is_serving = True
        self.world.note("ready", self.node_id)

    def _config(self) -> NodeConfig:
        options = self.world.options
        voters = range(1, options.nodes + 1)
        return NodeConfig(
            node_id=self.node_id,
            cluster_id="sim",
            rack=f"rack{self.node_id % options.racks if options.racks else self.node_id}",
            data=Path("/" + ROOT),
            client_listener=Address(f"node{self.node_id}", 9092),
            peer_listener=Address(f"node{self.node_id}", 9192),
            peers=tuple(PeerAddress(n, f"node{n}", 9192) for n in voters),
            formation_wait_ms=0,
            tick_ms=options.tick_ms,
            election_ticks=options.election_ticks,
            heartbeat_ticks=options.heartbeat_ticks,
            broker_session_ms=options.broker_session_ms,
            replica_lag_time_max_ms=1_000,
            retention_check_ms=500,
            scrub_bytes_per_s=1 << 20,
            replica_catchup_bytes_per_s=options.catch_up_bytes_per_s,
            topic_create_wait_ms=500,
            open_files_max=options.open_files_max,
            shutdown_timeout_ms=3_000,
            defaults={
                "log.segment.bytes": str(options.segment_bytes),
                "log.retention.bytes": str(options.retention_bytes),
                "log.index.interval.bytes": "256",
                # Clocks are days apart here, and what a client says is the time is not the point.
                "log.message.timestamp.after.max.ms": str((1 << 63) - 1),
                "replica.replace.after.ms": str(options.replace_after_ms),
                "group.min.session.timeout.ms": "500",
                "group.initial.rebalance.delay.ms": "100",
            },
        )

    def _look_at_quiescence(self, core: SimCore, _now_ms: float) -> None:
        count = core.plane.multiraft.quiescent_count
        if count > self._quiescent:
            self.world.had_effect("came to rest")
        self._quiescent = count

    def _failed(self, life: int, reason: str) -> None:
        def stop() -> None:
            if self.life == life:
                self.kill(reason)
                self.restart_later()

        self.world.schedule(0.0, stop)

    def restart_later(self) -> None:
        self.world.schedule(self._random.uniform(*SUPERVISOR_MS), self.world.restart(self))

    def crash(self) -> None:
        """Lose power: unsynced bytes are kept, lost or torn.

        While a storage is missing, only the process ends: a tail that is torn now is a second copy
        that nobody can vouch for, and then the design puts safety before progress.
        """
        if not self.is_up:
            return
        if not self._loses_power():
            self.kill("as a storage is missing, power stays")
            return
        self.world.note("crash", self.node_id)
        self._stop(is_told=self._random.random() < 0.5)
        self.disk.crash(self._random)

    def voted(self) -> None:
        """A vote is on its way: where that is wanted power goes, and is back at once."""
        if self.crashes_after_voting:
            self.in_thread(VOTE_LEAVES_MS, self._crash_briefly)

    def _crash_briefly(self) -> None:
        self.world.had_effect("crashed after voting")
        self.crash()
        self.world.schedule(1.0, self.world.restart(self))

    def _loses_power(self) -> bool:
        return not self.world.watch.is_storage_missing()

    def kill(self, reason: str) -> None:
        """The process ends, the machine goes on: what was written is written."""
        if not self.is_up:
            return
        self.world.note("kill", self.node_id, reason)
        self._stop(is_told=True)
        self.disk.end_process()

    def _stop(self, *, is_told: bool) -> None:
        world = self.world
        world.counts.crashes += 1
        self.is_up = self.is_listening = False
        self.life += 1
        world.watch.detach(self, in_the_middle=self.is_inside)
        if self.port is not None:
            self.port.die(is_told=is_told)
        if self._tasks is not None:
            self._tasks.kill()
        self.core = self.links = self.port = self._tasks = self._journal = None
        self._deadline_ms = None
        for other in world.nodes:
            if other.links is not None and other is not self:
                other.links.peer_down(self.node_id, is_told=is_told)

    def wipe(self) -> None:
        """Lose the disk as well; the node comes back as another storage."""
        self.crash()
        self.world.note("wipe", self.node_id)
        self.world.counts.wipes += 1
        self.world.watch.forget(self.node_id)
        self.disk = SimDisk(self._random, tears=self._loses_power)

    def shut_down(self) -> None:
        """End as an operator would: hand everything over first."""
        core, tasks = self.core, self._tasks
        if core is None or tasks is None or not core.is_serving:
            return
        life = self._leaving_life = self.life

        async def leave() -> None:
            await Shutdown(core).run()

            def end() -> None:
                if self.life == life:
                    self.world.had_effect("shut down")
                    self.kill("asked to")
                    self.restart_later()

            self.world.schedule(0.0, end)

        self.run(lambda: tasks.spawn(leave) and None)

    def heal(self) -> None:
        """Nothing is wrong with this machine any more, and nobody wants it to leave."""
        if self._leaving_life == self.life:
            self.kill("asked to")
        self.is_slow = self.crashes_after_voting = False
        self.pauses.end()
        self.disk.end_faults()
        self.clock.strobe_ms = 0.0
        self.is_held = False
        if not self.is_up:
            self.start()

    def close(self) -> None:
        """The world ends."""
        self.life += 1
        if self._tasks is not None:
            self._tasks.kill()

    def run(self, action: Callable[[], Any]) -> None:
        """Let something happen to this node; it may end in the middle of a change to its disk."""
        was_inside, self.is_inside = self.is_inside, True
        try:
            action()
        except SimCrash:
            self._end_within()
        except DiskError as error:
            # Nothing in the product caught it: it ends the process (`node/process.py`).
            self.kill(f"the disk failed: {error}")
            self.restart_later()
        finally:
            self.is_inside = was_inside

    def _end_within(self) -> None:
        if self.world.options.kills_within and self._random.random() < 0.5:
            self.world.had_effect("killed in the middle")
            self.kill("in the middle of a change")
        else:
            self.world.had_effect("power lost in the middle")
            self.crash()

    # ---- its loop and threads ----

    def later(self, delay_ms: float, action: Callable[[], None]) -> None:
        """Do something on this node's loop, unless it dies before; a paused node does it late."""
        self.world.schedule(delay_ms, partial(self._turn, self.life, action))

    def _turn(self, life: int, action: Callable[[], None]) -> None:
        if self.life != life:
            return
        if self.pauses.is_paused:
            self.pauses.defer(partial(self._turn, life, action))
        else:
            self.run(action)

    def in_thread(self, delay_ms: float, action: Callable[[], None]) -> None:
        """As `later`, but a thread's system call goes on while the process is paused."""
        self.world.schedule(delay_ms, partial(self._work, self.life, action))

    def _work(self, life: int, action: Callable[[], None]) -> None:
        if self.life == life:
            self.run(action)

    def thread_ms(self) -> float:
        """How long a worker takes."""
        return self._random.uniform(0.05, 1.0)

    def deliver(self, sender: NodeId, kind: int, data: bytes) -> None:
        """A frame arrived."""
        identity = self.world.nodes[sender - 1].identity
        self.later(0.0, partial(self._take, identity, kind, data))

    def _take(self, identity: PeerIdentity, kind: int, data: bytes) -> None:
        assert self.core is not None
        try:
            self.core.plane.frame_received(identity, kind, memoryview(data))
        except RemoteProtocolError as error:
            # A process hangs up; nothing here spoils what travels between nodes.
            self.world.watch.invariants.breach("PeersAreSound", str(error))

    def introduced(self, peer: ClusterNode) -> None:
        """A peer dialled this node."""
        identity = peer.identity

        def take() -> None:
            assert self.core is not None
            assert self.links is not None
            self.links.set_addresses({identity.node_id: Address(f"node{identity.node_id}", 9192)})
            self.links.dialled_by(identity.node_id)
            self.core.plane.peer_introduced(identity)

        self.later(0.0, take)

    # ---- deadlines ----

    def _deadline_moved(self) -> None:
        """Somebody has another first deadline, or wants a turn of its own."""
        if self._deadline_ms != self.world.now_ms:
            self._look_at_deadlines(self.world.now_ms)

    def _look_at_deadlines(self, at_ms: float) -> None:
        self._deadline_ms = at_ms

        def look() -> None:
            if self._deadline_ms != at_ms:
                return  # another look was wanted earlier, and went on from there
            assert self.core is not None
            deadlines, now_ms = self.core.deadlines, self.world.now_ms
            self._deadline_ms = None
            is_more = deadlines.expire(now_ms, count_max=32)
            if self._deadline_ms is None:
                if is_more:
                    self._look_at_deadlines(now_ms)
                elif deadlines.next_ms is not None:
                    self._look_at_deadlines(max(now_ms, deadlines.next_ms))

        self.later(at_ms - self.world.now_ms, look)

    def _disk_space(self) -> tuple[int, int]:
        used = self.disk.used_bytes()
        size = DISK_BYTES if self.disk.capacity_bytes is None else self.disk.capacity_bytes
        return size, max(0, size - used)
