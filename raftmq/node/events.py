"""The log of a node's state changes: one event per change, named by topic, partition, leader epoch.

Some changes are reported by the part that changes (replicas' roles, the leader table, applied
commands, segment files), others are seen when the node ticks (the controller, disk space, replicas
that catch up). Decides nothing; counts elections as well. An event that happens to a thousand
partitions at once is limited to `LINES_MAX` lines in ten seconds and a count of the rest.
"""

from __future__ import annotations

from typing import Final, Protocol

from raftmq.controller.control_plane import ControlPlane
from raftmq.controller.leaders import Key, LeaderRow
from raftmq.log.folders import read_partition_folder
from raftmq.logs import RateLimitedLog, flush_all, structlog
from raftmq.metadata.commands import ClaimGroup, Envelope, ReleaseGroup
from raftmq.metadata.engine import DrivenEngine
from raftmq.metadata.image import MetadataImage
from raftmq.metadata.results import Claimed, GroupDone, Result
from raftmq.metadata.state_machine import MetadataMachine, Skip
from raftmq.node.data_plane import DataPlane
from raftmq.node.partitions import Partitions, RoleWatch
from raftmq.raft.messages import Role, SoftState
from raftmq.runtime.disk import DISK_FULL
from raftmq.server.audit import Audit
from raftmq.types import METADATA_TOPIC, NodeId, Offset, RaftIndex, ReplicaId, TopicPartition

LINES_MAX: Final = 50
LOOK_MS: Final = 250.0
FOLLOWERS_MS: Final = 1_000.0
SETTLE_MS: Final = 1_000.0
"""A new leader learns within this time which replicas are in sync; until then none is logged as
having left the ISR."""
FREE_BYTES_MIN: Final = 1 << 20
FULL_QUIET_MS: Final = 2_000.0
STUCK_MS: Final = 2_000.0
"""A disk whose flush takes longer does not answer: leaderships are handed over."""

logger = structlog.get_logger("raftmq.events")


class Watched(Protocol):
    """The parts of a node in which something happens."""

    node_id: NodeId
    is_serving: bool
    plane: DataPlane
    control: ControlPlane
    engine: DrivenEngine
    machine: MetadataMachine
    partitions: Partitions
    audit: Audit


class Events:
    """Watches one node; `attach` when it is composed."""

    def __init__(self, node: Watched) -> None:
        self._node = node
        self._log = RateLimitedLog(logger, lines_max=LINES_MAX)
        self._counts = node.partitions.counts
        self._metadata_role = RoleWatch()
        self._in_sync: dict[Key, tuple[NodeId, ...]] = {}
        self._unsettled: dict[Key, tuple[LeaderRow, float]] = {}
        self._catching_up: dict[tuple[Key, ReplicaId], float] = {}
        self._controller: tuple[NodeId | None, int] = (None, -1)
        self._next_ms = self._followers_ms = 0.0
        self._full_count = DISK_FULL.count
        self._full_since_ms: float | None = None
        self._full_seen_ms = 0.0
        self._stuck_since_ms: float | None = None
        self._fenced_since_ms: dict[NodeId, float] = {}

    def attach(self) -> None:
        """Listen from now on."""
        node = self._node
        node.control.leaders.on_change(self._row_changed)
        node.engine.on_image(self._image_changed)
        node.machine.add_listener(self)
        node.plane.shared.watch.on_event = self._file_event

    # ---- roles ----

    def replica_changed(self, name: TopicPartition, watch: RoleWatch, soft: SoftState) -> None:
        """A replica here has another role, term or leader."""
        before, watch.role = watch.role, soft.role
        if soft.leader is not None:
            watch.leaderless_since_ms = None
        elif watch.leaderless_since_ms is None:
            watch.leaderless_since_ms = self._node.plane.clock.monotonic_ms()
        fields = {"topic": name.topic, "partition": name.partition, "leader_epoch": soft.term}
        if soft.role is Role.CANDIDATE and before is not Role.CANDIDATE:
            self._counts.elections += 1
            self._log.debug("election", **fields)
        if soft.role is Role.LEADER and before is not Role.LEADER:
            self._counts.elections += before is not Role.CANDIDATE
            self._counts.elections_won += 1
            self._log.info("leader elected", **fields)
        elif before is Role.LEADER and soft.role is not Role.LEADER:
            leader = None if soft.leader is None else soft.leader.node_id
            self._log.info("leadership lost", leader=leader, **fields)
        if soft.leader is not None and (soft.leader.node_id, soft.term) != watch.leader:
            self._counts.leader_changes += watch.leader is not None
            watch.leader = (soft.leader.node_id, soft.term)

    # ---- in-sync replicas ----

    def _row_changed(self, row: LeaderRow, is_own: bool) -> None:
        key = row.key
        if not is_own:
            self._in_sync.pop(key, None)
            self._unsettled.pop(key, None)
            return
        waiting = self._unsettled.get(key)
        if waiting is not None and waiting[0].leader_epoch == row.leader_epoch:
            due_ms = waiting[1]
        elif key in self._in_sync:
            due_ms = 0.0
        else:
            self._in_sync[key] = row.voters
            due_ms = self._node.plane.clock.monotonic_ms() + SETTLE_MS
        self._unsettled[key] = (row, due_ms)

    def _settle_rows(self, now_ms: float) -> None:
        for key, (row, due_ms) in list(self._unsettled.items()):
            if now_ms < due_ms:
                continue
            del self._unsettled[key]
            before = self._in_sync.get(key, row.voters)
            self._in_sync[key] = row.isr
            fields = self._name(key)
            if fields is None:
                self._in_sync.pop(key)
                continue
            fields |= {"leader_epoch": row.leader_epoch, "isr": list(row.isr)}
            for node_id in before:
                if node_id not in row.isr:
                    self._log.warning("replica left the ISR", replica=node_id, **fields)
            for node_id in row.isr:
                if node_id not in before:
                    self._log.info("replica joined the ISR", replica=node_id, **fields)

    def _name(self, key: Key) -> dict[str, object] | None:
        topic = self._node.engine.image.topic_by_id(key[0])
        return None if topic is None else {"topic": topic.name, "partition": key[1]}

    # ---- catching up ----

    def _look_at_followers(self, now_ms: float) -> None:
        """Log when a replica that is out of sync, but heard from, begins and ends to catch up."""
        behind: set[tuple[Key, ReplicaId]] = set()
        for replica in self._node.partitions.replicas():
            if replica.quiescence.is_quiescent or not replica.is_leader:
                continue
            key = (replica.group.topic_id, replica.group.partition)
            if not (replica.learners or self._is_short(key)):
                continue
            for follower in replica.catching_up():
                where = (key, follower)
                bytes_left = replica.bytes_behind(follower)
                if where not in self._catching_up and bytes_left:
                    self._catching_up[where] = now_ms
                    self._tell_catch_up("catch-up began", where, bytes_left)
                behind.add(where)
        for where in [w for w in self._catching_up if w not in behind]:
            took_ms = round(now_ms - self._catching_up.pop(where))
            self._tell_catch_up("catch-up ended", where, 0, took_ms=took_ms)

    def _is_short(self, key: Key) -> bool:
        row = self._node.control.leaders.get(*key)
        return row is not None and len(row.isr) < len(row.voters)

    def _tell_catch_up(
        self, event: str, where: tuple[Key, ReplicaId], bytes_left: int, **fields: object
    ) -> None:
        named = self._name(where[0])
        if named is not None:
            follower = where[1].node_id
            self._log.info(event, replica=follower, bytes_left=bytes_left, **named, **fields)

    # ---- brokers, controller, groups ----

    def _image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        if before.brokers is after.brokers:
            return
        own_id = self._node.node_id
        for node_id in sorted(after.brokers):
            now, was = after.brokers[node_id], before.brokers.get(node_id)
            if not now.is_fenced:
                self._fenced_since_ms.pop(node_id, None)
            elif node_id not in self._fenced_since_ms:
                self._fenced_since_ms[node_id] = self._node.plane.clock.monotonic_ms()
            if was is None or was.is_fenced == now.is_fenced:
                continue
            if node_id != own_id and not self._node.engine.is_leader:
                continue  # that node and the controller log it
            event = "broker fenced" if now.is_fenced else "broker unfenced"
            self._log.warning(event, broker=node_id, broker_epoch=now.epoch)

    def fenced_ms(self, node_id: NodeId) -> int | None:
        """For how long this node has seen a broker fenced; None while it is not."""
        since_ms = self._fenced_since_ms.get(node_id)
        return None if since_ms is None else round(self._node.plane.clock.monotonic_ms() - since_ms)

    def _look_at_controller(self) -> None:
        engine = self._node.control.engine
        now = (engine.controller_id, engine.controller_epoch)
        if now != self._controller and now[0] is not None:
            self._controller = now
            self._log.info("controller changed", controller=now[0], leader_epoch=now[1])

    def command_applied(self, envelope: Envelope, result: Result, _offset: Offset) -> None:
        """Log claims of groups that this node gains or gives away."""
        command = envelope.command
        if not isinstance(command, ClaimGroup | ReleaseGroup) or not self._node.is_serving:
            return
        if isinstance(result, Claimed) and isinstance(command, ClaimGroup):
            if command.node_id == self._node.node_id:
                self._log.info(
                    "group claimed",
                    group=command.group,
                    coordinator_epoch=result.coordinator_epoch,
                )
        elif isinstance(result, GroupDone) and envelope.node_id == self._node.node_id:
            successor = getattr(command, "successor", -1)
            self._log.info("group released", group=command.group, successor=successor)

    def command_skipped(self, skip: Skip) -> None:
        """A metadata command was passed over."""
        self._log.warning(
            "metadata command skipped",
            offset=skip.offset,
            leader_epoch=skip.leader_epoch,
            sha256=skip.sha256,
        )

    def state_restored(self, image: MetadataImage) -> None:
        """A snapshot was taken over."""
        if image.version >= 0:  # else the log begins with nothing
            self._log.info("metadata snapshot restored", version=image.version)

    def image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """Seen by `_image_changed` with either engine."""

    def advanced(self, applied_end: RaftIndex) -> None:
        """Nothing to log."""

    def role_changed(self, soft: SoftState) -> None:
        """The metadata group has another leader or term."""
        self.replica_changed(TopicPartition(METADATA_TOPIC, 0), self._metadata_role, soft)

    # ---- files ----

    def _file_event(self, what: str, path: str, start: int, end: int) -> None:
        topic, partition = _partition_of(path)
        if what == "rolled":
            self._log.debug("segment rolled", topic=topic, partition=partition, base_offset=start)
            return
        event = "damage found" if what == "damaged" else "damage repaired"
        self._log.warning(event, topic=topic, partition=partition, start=start, end=end)

    def _look_at_disk(self, now_ms: float) -> None:
        if DISK_FULL.count != self._full_count:
            self._full_count = DISK_FULL.count
            self._full_seen_ms = now_ms
            if self._full_since_ms is None:
                self._full_since_ms = now_ms
                free = self.disk_space()[1]
                logger.error("disk full: produces are refused until space is free", free_bytes=free)
        elif self._full_since_ms is not None and now_ms - self._full_seen_ms > FULL_QUIET_MS:
            free = self.disk_space()[1]
            if free >= FREE_BYTES_MIN:
                took_ms = round(now_ms - self._full_since_ms)
                logger.warning("disk has space again", free_bytes=free, took_ms=took_ms)
                self._full_since_ms = None

    def _look_at_flushes(self, now_ms: float) -> None:
        longest_ms = self._node.plane.flusher.longest_ms()
        if longest_ms > STUCK_MS:
            if self._stuck_since_ms is None:
                self._stuck_since_ms = now_ms - longest_ms
                logger.error("the disk does not answer", flush_ms=round(longest_ms))
        elif self._stuck_since_ms is not None:
            took_ms = round(now_ms - self._stuck_since_ms)
            self._stuck_since_ms = None
            logger.warning("the disk answers again", took_ms=took_ms)

    @property
    def is_disk_stuck(self) -> bool:
        """True while a flush has not come back for long."""
        return self._stuck_since_ms is not None

    @property
    def is_disk_full(self) -> bool:
        """True from the first refused write until there is space again."""
        return self._full_since_ms is not None

    def disk_space(self) -> tuple[int, int]:
        """(size, free) of the data folder's file system, in bytes."""
        return self._node.plane.disk_space()

    # ---- driven by the node ----

    def tick(self, now_ms: float) -> None:
        """Look for the changes that no part reports."""
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + LOOK_MS
        self._settle_rows(now_ms)
        if now_ms >= self._followers_ms:
            self._followers_ms = now_ms + FOLLOWERS_MS
            self._look_at_followers(now_ms)
        self._look_at_controller()
        self._look_at_disk(now_ms)
        self._look_at_flushes(now_ms)
        self._node.audit.tick()
        flush_all()


def _partition_of(path: str) -> tuple[str, int]:
    """Topic and partition of a file: .../topics/NAME-TOPICID/partition-N/FILE, or .../meta/FILE."""
    *_, folder, partition, _ = path.split("/")
    if partition == "meta":
        return METADATA_TOPIC, 0
    read = read_partition_folder(partition)
    assert read is not None, path
    return folder[:-37], read[0]
