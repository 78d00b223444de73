"""The data partitions of this node: run what the metadata image says, report leaders, keep logs.

Performs the reconciler's actions one after the other in a task of its own (opening a log may read a
lot, so it happens in a worker thread), and states in the leader table what this node leads. Deletes
data only by an order; what no order explains is moved to `quarantine/`.

Retention, the background scrub and reports of failed replicas are asked for by no request
(`run_maintenance`). Logs are looked at one after the other, and read in worker threads, so that no
turn of the loop is long. The scrub keeps to its rate and to a small share of one core, whichever is
less: batches of a hundred bytes cost far more to check than their bytes say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from typing import Final

from attrs import frozen

from raftmq.controller.control_plane import ControlPlane
from raftmq.controller.leaders import Isolation
from raftmq.controller.reconciler import (
    Action,
    Quarantine,
    StartReplica,
    StopReplica,
    UpdateConfigs,
    UpdateTarget,
    at_start,
    reconcile,
)
from raftmq.counts import ReplicaCounts, TopicCounts
from raftmq.errors import ErrorCode, KafkaError, RaftmqError
from raftmq.log.folders import (
    FIRST_LIFE,
    find_folders,
    partition_folder,
    topic_folder,
)
from raftmq.log.journal import GroupState
from raftmq.log.model import LogConfig
from raftmq.logs import structlog
from raftmq.metadata.config_keys import CATCH_UP_RATE, CLOSING_QUIET, THROTTLED_RATE
from raftmq.metadata.configs import broker_value, effective_topic_configs
from raftmq.metadata.image import MetadataImage, all_partitions
from raftmq.node.data_plane import DataPlane
from raftmq.node.delays import Delays
from raftmq.node.presumed_isr import PresumedIsr
from raftmq.node.retirement import Retirement
from raftmq.node.targets import TargetMemberships
from raftmq.node.views import NodeViews
from raftmq.partition.parked import Deadlines
from raftmq.partition.partition import Partition
from raftmq.partition.ports import NO_OFFSET
from raftmq.partition.producer_state import (
    ProducerCheckpoints,
    ProducerStateError,
    check_beginning,
)
from raftmq.partition.registry import PartitionRegistry
from raftmq.partition.settings import PartitionSettings
from raftmq.ports import DiskError, DiskFullError
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import Role, SoftState
from raftmq.replication.clocks import AgreedTime
from raftmq.replication.durability import JournalFailedError
from raftmq.replication.membership import TargetMembership
from raftmq.replication.opening import (
    Opening,
    ReplicaOpener,
    fresh_storage,
    take_fresh_identity,
)
from raftmq.replication.replica import Replica
from raftmq.transactions.leader import LeaderTransactions
from raftmq.types import (
    METADATA_GROUP,
    NodeId,
    Offset,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    TopicId,
    TopicPartition,
)

logger = structlog.get_logger("raftmq.partitions")

OPENERS: Final = 8
"""Replicas that are opened at the same time."""
LEADERLESS_MAX: Final = 64
CALM_WAIT_S: Final = 2.0
CALM_POLL_S: Final = 0.01
EAGER_CROWD: Final = 32
EAGER_TICKS: Final = 40
"""Ticks in which the preferred leader of a new group stands for election without waiting."""
REPORT_MS: Final = 250.0
"""How often the ISR of what this node leads is looked at."""
SCRUB_STRETCH_BYTES: Final = 1 << 20
SCRUB_CORE_SHARE_MAX: Final = 0.05
SCRUB_SMALL_BYTES: Final = 64 << 10
SCRUB_PAUSE_S: Final = 0.1
"""The pause after a log with less than that to check: a thousand small ones cost little."""
SCRUB_ROUND_S: Final = 3.0
"""A round through all logs takes at least this long, so that few small logs are not read without
pause."""
RETAIN_TURN: Final = 64
"""Logs that one turn of the loop checks for retention."""
MARKS_TURN: Final = 200
"""Groups that one turn of the loop marks in the journal."""
WATCH_INTERVAL_S: Final = 1.0
ORDER_CHECK_MS: Final = 1_000.0
"""For so long at most the metadata group is asked whether an order to delete still stands. What is
to be done next waits as well, so without an answer nothing is asked for as long again."""
REOPEN_FREE_BYTES: Final = 16 << 20
"""With less than this free a replica would only stop again."""


def log_config(configs: dict[str, str]) -> LogConfig:
    """What a topic's effective configs mean to its logs."""
    keeps_all = "delete" not in configs["cleanup.policy"]
    return LogConfig(
        segment_bytes=int(configs["segment.bytes"]),
        segment_ms=int(configs["segment.ms"]),
        index_interval_bytes=int(configs["index.interval.bytes"]),
        retention_bytes=-1 if keeps_all else int(configs["retention.bytes"]),
        retention_ms=-1 if keeps_all else int(configs["retention.ms"]),
    )


def tell_of_term(name: TopicPartition, replica: Replica) -> None:
    """Log that a replica was opened with a term in which it can do nothing."""
    core = replica.core
    if core.is_term_absurd:
        logger.error(
            "no election can have reached this term",
            topic=name.topic,
            partition=name.partition,
            term=core.term,
            last_epoch=core.epochs.last_term,
            way_out=f"`raftmq recover --reset-term {name.topic} {name.partition}` on all of its "
            "stopped voters",
        )


class RoleWatch:
    """A replica's role and leader as last reported, for what reports changes."""

    __slots__ = ("leader", "leaderless_since_ms", "role")

    def __init__(self, leaderless_since_ms: float | None = None) -> None:
        self.role = Role.FOLLOWER
        self.leader: tuple[NodeId, int] | None = None
        self.leaderless_since_ms = leaderless_since_ms


class LedPartition(Partition):
    """A partition that reports when this node begins to lead it, and changes of its role."""

    on_led: Callable[[Partition], None]
    on_role: Callable[[TopicPartition, RoleWatch, SoftState], None]
    role_watch: RoleWatch
    told_epoch: int = -1

    def committed(self, high_watermark: Offset, commit_end: RaftIndex) -> None:
        """The high watermark moved; the first time in a term means that this node leads."""
        super().committed(high_watermark, commit_end)
        if self.told_epoch < 0 and self._replica is not None and self._replica.is_writable:
            self.told_epoch = self._replica.leader_epoch
            self.on_led(self)

    def role_changed(self, soft: SoftState) -> None:
        """Another term or leader."""
        self.told_epoch = -1
        super().role_changed(soft)
        self.on_role(self.name, self.role_watch, soft)


@frozen(slots=True)
class Reopen:
    """Begin again with a replica that stopped for want of disk space."""

    start: StartReplica


class Partitions:
    """Runs the replicas of data partitions.

    Attributes:
        registry: the partitions by name and id, for handlers.
        quarantined: folders moved aside since the start.
    """

    def __init__(
        self,
        plane: DataPlane,
        control: ControlPlane,
        deadlines: Deadlines,
        *,
        on_role: Callable[[TopicPartition, RoleWatch, SoftState], None],
        transactions: LeaderTransactions,
        agreed: AgreedTime,
    ) -> None:
        self._plane = plane
        self._control = control
        self._engine = control.engine
        self._targets = TargetMemberships(control.engine, self._restate)
        self._deadlines = deadlines
        self._transactions = transactions
        self._agreed = agreed
        self._root = f"{plane.folder.path}/topics"
        self._opening = Opening(
            node=plane.self_id,
            disk=plane.disk,
            journal=plane.journal,
            host=plane.multiraft,
            clock=plane.clock,
            random=plane.random,
            shared=plane.shared,
            catch_up=plane.catch_up,
            buggify=plane.buggify,
        )
        self._tasks = plane.tasks
        self._ordered: list[Action | Reopen] = []
        self._has_orders: Promise[None] = Promise()
        self._started: dict[RaftGroupId, StartReplica] = {}
        self._unopened: dict[RaftGroupId, StartReplica] = {}
        self._unstopped: dict[RaftGroupId, StopReplica] = {}
        self._ask_orders_at_ms = 0.0
        self._left: dict[TopicId, set[RaftGroupId]] = {}  # and may come back to
        self._eager: dict[RaftGroupId, int] = {}
        self._replicas: dict[RaftGroupId, Replica] = {}
        self._next_report_ms = 0.0
        self._told_brokers: object = None
        self._presumed = PresumedIsr(plane.config.replica_lag_time_max_ms, self._is_there)
        self._leaderless: list[Replica] = []
        self.registry = PartitionRegistry()
        self.delays = Delays.on(plane, control, deadlines, agreed, self.registry)
        self.views = NodeViews.on(plane, control.engine, deadlines, self.registry)
        self.isolation = Isolation(
            plane.node_id,
            is_isolated=lambda: control.lifecycle.should_not_lead,
            ask=control.ask_contact,
            led=lambda: [r for r in self._replicas.values() if r.is_leader],
        )
        self._retirement = Retirement(
            control.engine,
            self.registry,
            lambda: control.lifecycle.broker_epoch,
            lambda topic: float(self._configs(topic)[CLOSING_QUIET]),
        )
        self.quarantined: list[str] = []
        self.on_role = on_role
        """Called when a replica has another role, term or leader."""
        self.counts = ReplicaCounts()
        self.topic_counts: dict[str, TopicCounts] = {}
        """By topic, as long as a replica of it is here."""

    # ---- actions ----

    async def start(self) -> None:
        """Run all that a current image says this node should run; return when it does."""
        self._plane.disk.make_directories(self._root)
        self._plane.disk.sync_directory(self._root)  # a killed process may have left folders here
        folders = find_folders(self._plane.disk, self._root)
        actions = at_start(self._engine.image, self._plane.node_id, folders)
        self._engine.on_image(self._image_changed)  # `run` does what changes meanwhile
        await self.views.sweep()
        self._obey_configs()
        await self._perform_all(actions)
        wanted = (action.group for action in actions if isinstance(action, StartReplica))
        if self._plane.journal.damaged and all(group in self._replicas for group in wanted):
            # Every group that this node may have promised something has a fresh identity here
            # then, without a vote; those that are created later are new to it.
            await self._mark_former_lives()
            logger.warning("the journal of hard states was damaged: replicas are admitted anew")
            self._plane.journal.accept_damage()
        self._find_left()
        self._forget_gone(self._engine.image)

    async def run(self) -> None:
        """Follow the image until cancelled."""
        while True:
            await self._tasks.wait(self._has_orders)
            self._has_orders = Promise()
            actions, self._ordered = self._ordered, []
            await self._perform_all(actions)

    def _order(self, action: Action | Reopen) -> None:
        self._ordered.append(action)
        if not self._has_orders.is_done:
            self._has_orders.resolve(None)

    def _image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        if before.configs is not after.configs:
            self._obey_configs()
        if before.topic_names is not after.topic_names:
            self._forget_gone(after)
        self.views.image_changed(before, after)
        for action in reconcile(before, after, self._plane.node_id):
            if isinstance(action, StopReplica) and not self._lives(action.group):
                self._close(action.group)  # nothing may write to it while it waits for its turn
            self._order(action)

    async def _perform_all(self, actions: Sequence[Action | Reopen]) -> None:
        """In order, except that replicas which start one after the other open side by side: that
        is mostly waiting for the disk."""
        for is_start, run in groupby(actions, lambda action: isinstance(action, StartReplica)):
            if not is_start:
                for action in run:
                    await self._perform(action)
                continue
            waiting = {action.group: action for action in run if isinstance(action, StartReplica)}
            queue = iter(waiting.values())
            starts = list(waiting.values())
            await self._tasks.in_thread(partial(self._make_topic_folders, starts))

            async def open_some(queue: Iterator[StartReplica] = queue) -> None:
                is_calm = True
                for action in queue:
                    await self._perform(action)
                    is_calm = is_calm and await self._until_calm()

            await self._tasks.together([open_some] * min(OPENERS, len(waiting)))

    async def _until_calm(self) -> bool:
        """Wait while many new groups elect: thousands at once would starve each other. False when
        they get no leaders, for lack of other nodes; then waiting is of no use."""
        clock = self._plane.clock
        give_up_ms = clock.monotonic_ms() + CALM_WAIT_S * 1e3
        while True:
            self._leaderless = [
                r for r in self._leaderless if r.leader is None and r.failure is None
            ]
            if len(self._leaderless) < LEADERLESS_MAX:
                return True
            if clock.monotonic_ms() >= give_up_ms:
                return False
            await self._tasks.sleep(CALM_POLL_S)

    def _make_topic_folders(self, actions: Sequence[StartReplica]) -> None:
        """Before two replicas of a topic are made at once: each may count on its folder's name."""
        folders = {self._folder(action).rpartition("/")[0] for action in actions}
        for folder in sorted(folders):
            with suppress(DiskError):  # each replica's own start meets it again, and reports it
                self._plane.disk.make_directories(folder)

    async def _perform(self, action: Action | Reopen) -> None:
        try:
            if isinstance(action, StartReplica):
                await self._start(action)
            elif isinstance(action, StopReplica):
                await self._stop(action)
            elif isinstance(action, UpdateConfigs):
                self._configure(action)
            elif isinstance(action, UpdateTarget):
                self._follow(action.group)
            elif isinstance(action, Quarantine):
                self._quarantine(action)
            elif isinstance(action, Reopen):
                await self._reopen(action.start)
        except JournalFailedError as error:
            self._plane.fail(f"the journal of hard states cannot be written: {error}")
        except DiskFullError as error:
            logger.error("no space for a partition", action=str(action), error=str(error))
            if isinstance(action, StartReplica | Reopen):
                start = action.start if isinstance(action, Reopen) else action
                self._unopened[start.group] = start
            elif isinstance(action, StopReplica):
                self._unstopped[action.group] = action
        except (DiskError, RaftmqError) as error:
            # A partition that cannot be opened must not stop the other ones of the node.
            logger.error("partition action failed", action=str(action), error=str(error))
            if isinstance(action, StopReplica):
                self._unstopped[action.group] = action

    async def _start(self, action: StartReplica) -> None:
        is_held = self._engine.image.may_hold(self._plane.node_id, action.group)
        if action.group in self._replicas or not is_held:  # deleted since, perhaps to make space
            return
        configs = self._configs(action.name.topic)
        partition = LedPartition(
            action.name,
            action.group,
            self._plane.node_id,
            settings=PartitionSettings.from_configs(configs),
            deadlines=self._deadlines,
            clock=self._plane.clock,
            on_broken_invariant=self._plane.fail,
            checkpoints=ProducerCheckpoints(self._plane.disk, self._folder(action)),
            counts=self.topic_counts.setdefault(action.name.topic, TopicCounts()),
            replica_counts=self.counts,
            workers=self._plane.batch_openers,
            transactions=self._transactions,
            stamp_ms=self._agreed.stamp_ms,
            buggify=self._plane.buggify,
        )
        partition.on_led = self._led
        partition.on_role = self.on_role
        partition.role_watch = RoleWatch(self._plane.clock.monotonic_ms())
        is_preferred = action.preferred_leader == self._plane.node_id
        opener = ReplicaOpener(
            self._opening,
            action.group,
            self._folder(action),
            initial=Configuration(voters=tuple(sorted(action.voters))),
            log_config=log_config(configs),
            is_return=action.is_return,
            begins_at=action.begins_at,
            after_epoch=action.after_epoch,
            state=_known_before(action),
        )
        while not await self._tasks.in_thread(opener.attempt):
            opener.settle()
        replica = opener.replica(partition, self._plane.replica_config(priority=int(is_preferred)))
        partition.begin(replica, action.begins_at)
        while not partition.read_on():
            await self._tasks.sleep(0.0)
        self._replicas[action.group] = replica
        self.registry.add(partition)
        recovery = replica.log.recovery
        if recovery.cut or recovery.damaged:
            logger.warning(
                "log recovered",
                topic=action.name.topic,
                partition=action.name.partition,
                cut=recovery.cut,
                damaged=recovery.damaged,
            )
        tell_of_term(action.name, replica)
        replica.follow_target_membership(partial(self._target_of, action.group))
        if is_preferred and replica.leader_epoch == 0 and replica.self_id in replica.voters:
            self._eager[action.group] = EAGER_TICKS
        self._plane.multiraft.register(replica)
        self._started[action.group] = action
        self._leaderless.append(replica)
        self.views.opened(partition)
        self.delays.opened(partition)
        await self._tasks.sleep(0.0)

    @property
    def lacks_space(self) -> bool:
        """True when a replica could not begin for want of disk space."""
        return bool(self._unopened)

    def space_is_back(self) -> None:
        """Begin again with what stopped or could not begin for want of disk space."""
        for start in self._unopened.values():
            self._order(start)
        self._unopened.clear()
        for replica in self._replicas.values():
            if replica.lacks_space and (start_again := self._started.pop(replica.group, None)):
                self._order(Reopen(start_again))

    def stop_again(self) -> None:
        """Try again to delete what could not be deleted, unless its removal is no longer wanted."""
        unstopped, self._unstopped = self._unstopped, {}
        for group, action in unstopped.items():
            if self._must_go(group):
                self._order(action)

    def _must_go(self, group: RaftGroupId) -> bool:
        """True while there is an order to this node to delete its replica of a group."""
        removal = self._engine.image.removal(group)
        return removal is not None and self._plane.node_id in removal.nodes

    async def _reopen(self, start: StartReplica) -> None:
        replica = self._replicas.get(start.group)
        if replica is None or not replica.lacks_space:
            return
        partition = self.registry.by_group(start.group)
        if partition is not None:
            partition.close(ErrorCode.KAFKA_STORAGE_ERROR)
            self.views.closed(partition, is_gone=False)
            self.delays.followers.closed(partition)
            self._unregister(partition)
        del self._replicas[start.group]
        self._plane.multiraft.unregister(start.group)
        replica.log.close()
        logger.info("replica opens again", topic=start.name.topic, partition=start.name.partition)
        await self._start(start)

    def _close(self, group: RaftGroupId) -> Partition | None:
        partition = self.registry.by_group(group)
        if partition is not None:
            partition.close()
        return partition

    def _unregister(self, partition: Partition) -> None:
        self.registry.remove(partition)
        if self.registry.by_id(partition.topic_id, partition.index) is None:
            self._transactions.removed(partition.topic_id, partition.index)

    def _is_counted_on(self, group: RaftGroupId) -> bool:
        """True while a leader is heard that counts the replica, as far as this one knows. One that
        was removed may not have heard of that, but hears of no leader any more either."""
        replica = self._replicas.get(group)
        if replica is None or replica.failure is not None:
            return False
        return replica.core.is_voter and replica.leader is not None

    async def _is_let_go(self, group: RaftGroupId) -> bool:
        """True when nobody counts on this node's replica, nor will: its data may go, at once.

        The image may be old: the node may be wanted again by now, and the group may have taken the
        replica in. A leader that does has seen that the order was taken back, and counts nothing
        before the replica answered a heartbeat that left after that (`Progress.is_met`). So one
        that answered none since some moment at which the order stood is counted on by nobody.
        """
        if self._is_counted_on(group):
            # The order is of an earlier day: the group has taken this replica in since, and either
            # reports it, which takes the order back, or lets it go.
            return False
        if self._plane.clock.monotonic_ms() < self._ask_orders_at_ms:
            return False
        replica = self._replicas.get(group)
        answered = None if replica is None else replica.core.answered_round
        try:
            await self._tasks.wait(self._engine.read_barrier(timeout_ms=ORDER_CHECK_MS))
        except KafkaError as error:
            self._ask_orders_at_ms = self._plane.clock.monotonic_ms() + ORDER_CHECK_MS
            logger.info("orders to delete wait for metadata", group=str(group), why=str(error))
            return False
        return (
            self._must_go(group)
            and not self._is_counted_on(group)
            and (replica is None or replica.core.answered_round == answered)
        )

    async def _stop(self, action: StopReplica) -> None:
        lives = self._lives(action.group)
        if lives and not self._must_go(action.group):
            return  # wanted again before it came to this
        if lives and not await self._is_let_go(action.group):
            self._unstopped[action.group] = action
            return
        partition = self._close(action.group)
        if partition is not None:
            self.views.closed(partition, is_gone=True)
            self.delays.followers.closed(partition)
            self._unregister(partition)
            self._forget_counts(action.name.topic, self._engine.image)
        replica = self._replicas.pop(action.group, None)
        self._started.pop(action.group, None)
        self._unopened.pop(action.group, None)
        self._plane.multiraft.unregister(action.group)
        self._eager.pop(action.group, None)
        self._targets.forget(action.group)
        self._presumed.forget(action.group)
        if self._engine.image.topic_by_id(action.group.topic_id) is None:
            self._control.leaders.forget(action.group.topic_id)
        if replica is not None:
            replica.fail("deleted")
            replica.log.close()
            replica.retire()
            self._leaderless = [other for other in self._leaderless if other is not replica]
        if lives:
            # Before the data goes: whatever a crash leaves of it must not pass for the old replica.
            take_fresh_identity(self._opening, action.group)
            self._has_left(action.group)
        else:
            self._plane.journal.forget(action.group)
        await self._tasks.in_thread(partial(self._remove_folders, action))
        self._control.replica_removed(action.group)
        logger.info("replica deleted", topic=action.name.topic, partition=action.name.partition)

    # ---- former lives ----

    def _lives(self, group: RaftGroupId) -> bool:
        """True while other nodes may still run the group, so that it may come back to this one."""
        topic = self._engine.image.topic_by_id(group.topic_id)
        return topic is not None and topic.has(group)

    def _find_left(self) -> None:
        """Learn from the journal which groups this node has left, as far as they still matter."""
        journal, holds = self._plane.journal, self._engine.image.holds
        for group in journal.groups():
            state = journal.get(group)
            is_mark = state is not None and state == GroupState(bootstrapped=state.bootstrapped)
            if not is_mark or group == METADATA_GROUP or holds(self._plane.node_id, group):
                continue
            if self._lives(group):
                self._has_left(group)
            else:
                journal.forget(group)  # no node will ever run it again

    def _has_left(self, group: RaftGroupId) -> None:
        self._left.setdefault(group.topic_id, set()).add(group)

    def _forget_gone(self, image: MetadataImage) -> None:
        """No node will ever run a group again whose topic is deleted: its mark may go, and what was
        counted of it."""
        for name in [name for name in self.topic_counts if name not in image.topics]:
            self._forget_counts(name, image)
        for topic_id in [known for known in self._left if known not in image.topic_names]:
            for group in self._left.pop(topic_id):
                self._plane.journal.forget(group)

    def _forget_counts(self, topic: str, image: MetadataImage) -> None:
        """Counters never fall: a topic whose replicas left this node may come back to it."""
        if topic in image.topics:
            return
        if all(other.name.topic != topic for other in self.registry):
            self.topic_counts.pop(topic, None)

    async def _mark_former_lives(self) -> None:
        """The journal has lost which groups this node has left, so it may have left any of them."""
        journal, node_id = self._plane.journal, self._plane.node_id
        image = self._engine.image
        for number, (topic, partition) in enumerate(all_partitions(image)):
            group = topic.group_id(partition.index)
            if journal.get(group) is None and not image.holds(node_id, group):
                storage_id = fresh_storage(self._plane.random)
                journal.put(group, GroupState(bootstrapped=storage_id), lazy=True)
            if number % MARKS_TURN == 0:
                await self._tasks.sleep(0.0)

    def _follow(self, group: RaftGroupId) -> None:
        """Other brokers should hold the partition: a quiescent group must be told."""
        replica = self._replicas.get(group)
        if replica is not None:
            self._plane.multiraft.touch(replica.group)

    def _configure(self, action: UpdateConfigs) -> None:
        partition = self.registry.by_group(action.group)
        replica = self._replicas.get(action.group)
        if partition is None or replica is None:
            return
        configs = self._configs(action.name.topic)
        partition.configure(PartitionSettings.from_configs(configs))
        replica.log.configure(log_config(configs))

    def _quarantine(self, action: Quarantine) -> None:
        disk, path = self._plane.disk, action.folder.path
        source = f"{self._root}/{path}"
        shelf = f"{self._plane.folder.path}/quarantine"
        disk.make_directories(shelf)
        target = f"{shelf}/{path.replace('/', '-')}-{self._plane.clock.wall_ms()}"
        disk.rename(source, target)
        disk.sync_directory(shelf)
        disk.sync_directory(source.rpartition("/")[0])
        self.quarantined.append(target)
        logger.warning("unknown folder moved aside", folder=source, to=target)

    # ---- folders ----

    def _folder(self, action: StartReplica) -> str:
        return self._folder_of(action.group, action.name.topic, action.life)

    def _folder_of(self, group: RaftGroupId, topic: str, life: int) -> str:
        name = topic_folder(topic, group.topic_id)
        return f"{self._root}/{name}/{partition_folder(group.partition, life)}"

    def _remove_folders(self, action: StopReplica) -> None:
        """Delete what an order names. A later life's folder says of which group it is. Where there
        is none, the first life's goes: if that was not meant, it had ended before what was meant
        began, and its end had ordered all of it away."""
        name, group = action.name, action.group
        folder = self._folder_of(group, name.topic, group.creation_epoch)
        if not self._plane.disk.exists(folder):
            folder = self._folder_of(group, name.topic, FIRST_LIFE)
        self._remove_folder(folder)

    def _remove_folder(self, folder: str) -> None:
        disk = self._plane.disk
        if disk.exists(folder):
            disk.remove_tree(folder)
        parent = folder.rpartition("/")[0]
        if disk.exists(parent) and not disk.list(parent):
            disk.remove_tree(parent)

    def _obey_configs(self) -> None:
        """Apply the broker settings that may change while the node runs."""
        plane = self._plane
        static = plane.config.kafka_settings
        values = (
            broker_value(self._engine.image, plane.node_id, static, name)
            for name in (CATCH_UP_RATE, THROTTLED_RATE)
        )
        limits = [int(value) for value in values if value is not None and int(value) > 0]
        plane.catch_up.rate.set_limit(min(limits, default=0))

    def _configs(self, topic: str) -> dict[str, str]:
        return effective_topic_configs(
            self._engine.image, topic, self._plane.node_id, self._plane.config.defaults
        )

    # ---- leading ----

    def _led(self, partition: Partition) -> None:
        """This node leads: report it to all nodes at once, if anything is new."""
        self._eager.pop(partition.group, None)
        self._transactions.led(partition.topic_id, partition.index)
        if partition.settings.delivers_to:
            self.delays.led(partition)
        replica = self._replicas[partition.group]
        brokers = self._engine.image.brokers
        now_ms = self._plane.clock.monotonic_ms()
        last = self._control.leaders.get(partition.topic_id, partition.index)
        if last is None or last.leader_epoch != replica.leader_epoch:
            self._presumed.begin(replica, last, now_ms)
        isr = [
            member
            for member in self._presumed.report(replica, now_ms)
            # A fenced broker is out of sync at once, not only when its lag is long (KIP-841).
            if member == replica.self_id
            or (member.node_id in brokers and not brokers[member.node_id].is_fenced)
        ]
        # Data is ordered away by this; a change that is only appended may yet be taken back.
        committed = replica.committed_configuration
        self._control.partition_led(
            partition.topic_id,
            partition.index,
            leader_epoch=replica.leader_epoch,
            isr=isr,
            voters=committed.voters,
            learners=committed.learners,
            seen_version=self._targets.seen(replica),
            creation_epoch=partition.group.creation_epoch,
        )

    def _is_there(self, follower: ReplicaId) -> bool:
        """True while it may well answer: with the storage that votes, to this node and to all."""
        broker = self._engine.image.brokers.get(follower.node_id)
        return (
            broker is not None
            and not broker.is_fenced
            and broker.storage_id == follower.storage_id
            and self._plane.links.is_connected(follower.node_id)
        )

    def _target_of(self, group: RaftGroupId) -> TargetMembership | None:
        replica = self._replicas.get(group)
        return None if replica is None else self._targets.of(group, replica.core)

    def _restate(self, group: RaftGroupId) -> None:
        """More is known of a group that is led here."""
        replica = self._replicas.get(group)
        partition = self.registry.by_group(group)
        if replica is not None and replica.is_writable and partition is not None:
            self._led(partition)

    def tick(self, now_ms: float) -> None:
        """Stand for election where new groups wait; state what this node leads."""
        self._stand_eagerly()
        self._retirement.tick(now_ms)
        if now_ms < self._next_report_ms:
            return
        self._next_report_ms = now_ms + REPORT_MS
        self.isolation.tick(now_ms)
        for group in self._due_reports():
            replica = self._replicas.get(group)
            if replica is None or not replica.is_writable:
                continue
            partition = self.registry.by_group(group)
            if partition is not None:
                self._led(partition)

    def _due_reports(self) -> list[RaftGroupId]:
        """Groups whose ISR may have changed. A quiescent group was in sync when it quiesced, and is
        so until it unquiesces; but a fenced broker is out of sync everywhere."""
        multiraft, brokers = self._plane.multiraft, self._engine.image.brokers
        quiesced = multiraft.take_quiesced()
        if brokers is not self._told_brokers:
            self._told_brokers = brokers
            return list(self._replicas)
        return [*(replica.group for replica in multiraft.active), *quiesced]

    def _stand_eagerly(self) -> None:
        """The other nodes may not have a new group yet, so its first leader asks more than once;
        of hundreds of groups ever more rarely, since the requests keep all nodes busy."""
        is_crowd = len(self._eager) > EAGER_CROWD
        for group in list(self._eager):
            replica = self._replicas.get(group)
            self._eager[group] -= 1
            asked = EAGER_TICKS - self._eager[group]
            if replica is None or replica.leader is not None or self._eager[group] <= 0:
                del self._eager[group]
            elif not is_crowd or asked & (asked - 1) == 0:
                replica.stand()

    # ---- maintenance ----

    def retain(self, replicas: Sequence[Replica]) -> None:
        """Let the leaders among them move their log start as retention demands."""
        for replica in replicas:
            if replica.failure is not None or not replica.is_writable:
                continue
            partition = self.registry.by_group(replica.group)
            if partition is None or (below := partition.stable_end) == NO_OFFSET:
                continue
            if partition.settings.delivers_to:
                kept_from = self.delays.kept_from(partition)
                if kept_from is None:
                    continue
                below = min(below, kept_from)
            try:
                replica.retain(below)
            except KafkaError as error:
                logger.info("retention waits", group=str(replica.group), why=str(error))

    def replicas(self) -> list[Replica]:
        """All running replicas."""
        return list(self._replicas.values())

    def rows(self) -> list[tuple[Partition, Replica]]:
        """All partitions with their replicas, by name."""
        partitions = sorted(self.registry, key=lambda partition: partition.name)
        return [(partition, self._replicas[partition.group]) for partition in partitions]

    def transfer_all(self) -> int:
        """Hand over every leadership that an in-sync voter can take; how many there still were.

        One that this node is about to win counts too: its leader was asked to hand it over here
        before it could know that this node leaves.
        """
        live = {broker.node_id for broker in self._engine.image.live_brokers()}
        load: dict[NodeId, int] = dict.fromkeys(sorted(live), 0)
        remaining = 0
        for replica in self._replicas.values():
            remaining += replica.is_candidate
            if not replica.is_leader:
                continue
            others = [
                r.node_id
                for r in replica.in_sync_replicas()
                if r.node_id != self._plane.node_id and r.node_id in live
            ]
            if others:
                remaining += 1
                if replica.is_handing_over:
                    continue  # with a second successor two would stand against each other
                close = [node_id for node_id in others if replica.is_close_behind(node_id)]
                chosen = min(close or others, key=lambda node_id: (load[node_id], node_id))
                load[chosen] += 1
                replica.transfer_leadership(chosen)
        return remaining

    def answer_fetches(self) -> None:
        """Answer every parked fetch with what there is: this node is leaving."""
        for partition in self.registry:
            partition.stop_waiting()

    def move(self, topic_id: TopicId, partition: int, to: NodeId) -> bool:
        """Hand the leadership of a partition led here to a node; False if it cannot be."""
        known = self.registry.by_id(topic_id, partition)
        if known is None:
            return False
        replica = self._replicas[known.group]
        return replica.is_close_behind(to) and replica.transfer_leadership(to)


async def run_maintenance(plane: DataPlane, partitions: Partitions) -> None:
    """Retain, scrub and watch until cancelled."""
    forever: list[Callable[[], Awaitable[None]]] = [
        lambda: _watch_forever(plane, partitions),
        lambda: _retain_forever(plane, partitions),
    ]
    if plane.config.scrub_bytes_per_s > 0:
        forever.append(lambda: _scrub_forever(plane, partitions.counts))
    await plane.tasks.together(forever)


async def _watch_forever(plane: DataPlane, partitions: Partitions) -> None:
    """Log replicas that stopped; start those again that only lacked space, and delete those that
    could not be deleted before."""
    logged: set[Replica] = set()
    while True:
        failed = [r for r in plane.multiraft.replicas.values() if r.failure is not None]
        logged &= set(failed)
        for replica in failed:
            if replica not in logged:
                logged.add(replica)
                logger.error("replica stopped", group=str(replica.group), reason=replica.failure)
        lacks_space = partitions.lacks_space or any(r.lacks_space for r in failed)
        if lacks_space and plane.free_bytes() >= REOPEN_FREE_BYTES:
            partitions.space_is_back()
        partitions.stop_again()
        await plane.pause(WATCH_INTERVAL_S)


async def _retain_forever(plane: DataPlane, partitions: Partitions) -> None:
    while True:
        await plane.pause(plane.config.retention_check_ms / 1e3)
        replicas = partitions.replicas()
        for first in range(0, len(replicas), RETAIN_TURN):
            some = replicas[first : first + RETAIN_TURN]
            for replica in some:
                _close_aged_segment(replica, plane.clock.wall_ms())
            partitions.retain(some)
            await plane.tasks.sleep(0.0)


def _known_before(action: StartReplica) -> bytes:
    """What the log of a partition begins with: what the one before it knew of producers."""
    try:
        check_beginning(action.producers, action.begins_at)
    except ProducerStateError as error:
        # It is of the metadata, the same on every node: no replica begins with it.
        logger.error(
            "producers of the former partition are not known",
            topic=action.name.topic,
            partition=action.name.partition,
            error=str(error),
        )
        return b""
    return action.producers


def _close_aged_segment(replica: Replica, now_ms: int) -> None:
    """An idle log closes its old segment too; retention never takes the one that is open."""
    if replica.failure is not None:
        return
    try:
        replica.log.roll_if_aged(now_ms)
    except DiskFullError:
        return  # it is tried again at the next check
    except DiskError as error:
        replica.fail(f"could not begin a segment: {error}")


async def _scrub_forever(plane: DataPlane, counts: ReplicaCounts) -> None:
    """Check stored batches in endless rounds; a replica repairs what is damaged."""
    while True:
        clock = plane.clock
        round_end_ms = clock.monotonic_ms() + SCRUB_ROUND_S * 1e3
        for replica in list(plane.multiraft.replicas.values()):
            began_ms = clock.monotonic_ms()
            read_bytes = await _scrub(plane, replica, counts)
            spent_s = (clock.monotonic_ms() - began_ms) / 1e3
            due_s = max(read_bytes / plane.config.scrub_bytes_per_s, spent_s / SCRUB_CORE_SHARE_MAX)
            if read_bytes < SCRUB_SMALL_BYTES:
                await plane.pause(max(due_s, SCRUB_PAUSE_S))
            else:
                await plane.tasks.sleep(due_s)
        left_s = (round_end_ms - clock.monotonic_ms()) / 1e3
        await plane.pause(max(left_s, SCRUB_PAUSE_S))


async def _scrub(plane: DataPlane, replica: Replica, counts: ReplicaCounts) -> int:
    """Check the next stretch of one log; returns how much was read."""
    if replica.failure is not None:
        return 0
    try:
        job = replica.log.scrub_job(min(SCRUB_STRETCH_BYTES, plane.config.scrub_bytes_per_s))
        if job is None:
            return 0
        await plane.tasks.in_thread(job.run)
        found = replica.log.checked(job)
    except DiskError as error:
        if plane.multiraft.replicas.get(replica.group) is replica:  # else closed meanwhile
            replica.fail(f"scrub could not read: {error}")
        return 0
    counts.scrub_read_bytes += job.read_bytes
    counts.scrub_batches += job.sound_count
    counts.scrub_damages += len(found)
    if found and plane.multiraft.replicas.get(replica.group) is replica:
        replica.damage_found()
    return job.read_bytes
