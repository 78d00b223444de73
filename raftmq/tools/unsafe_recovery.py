"""Unsafe recovery at an operator's request: offline work on one stopped node's data.

There are two kinds. *A majority is lost* (`report_groups`, `recover_lost_majorities`): every group
that lost most of its voters goes on with the survivors which its own log names. *Damage cannot be
repaired from any replica* (`report_loss`, `accept_loss`): one partition keeps its offsets and loses
the records. Both first report what they would do and what may be lost.

Reading opens the logs as a start of the node would. Writing begins with the journal, which is made
durable: a term above any that a lost node can have known, no vote, no floor. Then the log start and
the membership entries of each log get the same new configuration, so that every later read agrees.
Before all of that, what a replica keeps of producers whose batches are not in its log is dropped.
This is only for logs that no process has open, and whose other copies are lost for good or
rewritten likewise: Raft itself never changes an entry.

Invariants: every step can be repeated, and a repeat finishes what a crash at any point left undone;
a group that keeps a majority is not touched; lost nodes are fenced by a new formation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum
from typing import Final

from attrs import define, evolve, field, frozen

from raftmq.errors import CorruptBatchError, RaftmqError
from raftmq.log.bare_entries import BareEntries, Slot
from raftmq.log.folders import FIRST_LIFE, find_folders
from raftmq.log.journal import GroupState, HardStateJournal
from raftmq.log.log_start import LocalStart, LogStart, LogStartFile, Pending
from raftmq.log.model import DamagedError, LogConfig, UnusableLogError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.metadata.image import MetadataImage, all_partitions
from raftmq.metadata.state_machine import MetadataMachine, Skip, UnappliableCommandError
from raftmq.partition.producer_state import (
    NO_OFFSET,
    ProducerCheckpoints,
    ProducerStateTable,
    at_once,
)
from raftmq.ports import Clock, Disk
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import EntryKind
from raftmq.replication.opening import is_forgotten
from raftmq.types import (
    METADATA_GROUP,
    METADATA_TOPIC,
    NodeId,
    Offset,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
)


def _forget_producers(disk: Disk, folder: str, offset: Offset) -> None:
    """Drop what is kept of producers beyond `offset`, durably: other batches come there.

    Other replicas know those alone, and all are to judge alike. This comes before the other steps:
    after them nothing may be left that says it is needed.
    """
    checkpoints = ProducerCheckpoints(disk, folder)
    checkpoints.load()
    checkpoints.drop_above(offset)


def replace_configuration(disk: Disk, folder: str, kind: int, configuration: bytes) -> None:
    """Put `configuration` into the log start and every entry of `kind`; durable on return.

    Raises:
        UnusableLogError: the log was not recovered before.
        DiskError: the device failed; do it again.
    """
    start_file = LogStartFile(disk, folder)
    local = start_file.read()
    if local is None or local.pending is not Pending.NOTHING:
        raise UnusableLogError(f"{folder}: open the log first, so that it is recovered")
    log_start = evolve(local.log_start, configuration=configuration)
    start_file.replace(LocalStart(log_start, local.truncated_end))
    bare = BareEntries(disk, folder, LogConfig().bare_reserve_bytes)
    try:
        found = bare.read()
        bare.load([_with(slot, kind, configuration) for slot in found.slots], log_start)
        bare.compact(now=True)
    finally:
        bare.close()


def _with(slot: Slot, kind: int, payload: bytes) -> Slot:
    if slot.entry.kind != kind:
        return slot
    return Slot(evolve(slot.entry, payload=payload), slot.position, slot.size, slot.is_whole)


TERM_STEP: Final = 1 << 16
"""More elections than the lost nodes can have held since this disk last heard of them: no entry
gets a position and term that one of theirs has, and clients see the leader epoch rise."""
CHECK_BYTES: Final = 4 << 20


class RecoveryRefusedError(RaftmqError):
    """The request is not needed, or would make things worse; the message says why."""


class Verdict(Enum):
    """What becomes of a group."""

    STAYS = "a majority survives: left alone"
    RECOVERED = "its majority is lost: goes on with those that survive"
    NOT_HELD = "no survivor is a member"
    UNREADABLE = "this replica cannot be read"


@frozen(slots=True)
class OpenTransaction:
    """A transaction that a log does not end."""

    producer_id: int
    epoch: int
    first: Offset


@define(slots=True, kw_only=True)
class GroupReport:
    """One group as this node's disk shows it, and what recovery would change.

    Attributes:
        before: its members, by the newest entry of this log.
        after: its members after recovery; None where nothing changes.
        log_end: the first offset that this replica does not have.
        flushed_end: below it everything was certainly on this disk.
        high_watermark: the last commit this replica recorded; consumers may have read further.
        damaged: offsets whose bytes are damaged here.
        open_transactions: by first offset, where every byte was read.
        is_forgotten: the journal no longer knows what this replica promised, so it has no vote
            until a leader admits it anew.
        note: why it cannot be read.
    """

    name: str
    group: RaftGroupId
    folder: str
    identity: ReplicaId
    verdict: Verdict = Verdict.UNREADABLE
    before: Configuration = field(factory=Configuration)
    after: Configuration | None = None
    log_start: Offset = Offset(0)
    log_end: Offset = Offset(0)
    flushed_end: Offset = Offset(0)
    high_watermark: Offset = Offset(0)
    last_epoch: int = 0
    damaged: tuple[tuple[Offset, Offset], ...] = ()
    open_transactions: tuple[OpenTransaction, ...] = ()
    is_forgotten: bool = False
    note: str = ""


@frozen(slots=True)
class Findings:
    """A node's groups, and partitions of the cluster that no survivor has a replica of.

    Attributes:
        image: the metadata as this node has it; None where it cannot be read.
    """

    groups: tuple[GroupReport, ...]
    gone: tuple[str, ...]
    image: MetadataImage | None

    def of(self, verdict: Verdict) -> list[GroupReport]:
        """The reports with this verdict."""
        return [report for report in self.groups if report.verdict is verdict]

    @property
    def metadata(self) -> GroupReport:
        """The report on the metadata group."""
        return self.groups[0]


@frozen(slots=True)
class Place:
    """A stopped node's data, open nowhere else; reads of the metadata pass over `skips`."""

    disk: Disk
    path: str
    node: ReplicaId
    journal: HardStateJournal
    clock: Clock
    skips: tuple[Skip, ...] = ()


# ---- reports ----


def report_groups(place: Place, survivors: Sequence[NodeId]) -> Findings:
    """Open every log of a node and report on its group; survivors are all nodes that will go on.

    Raises:
        RecoveryRefusedError: this node is not among the survivors, or keeps no metadata.
        DiskError: the device failed.
    """
    if place.node.node_id not in survivors:
        raise RecoveryRefusedError(f"node {place.node.node_id} must be one of the survivors")
    if not place.disk.exists(f"{place.path}/meta/log-start"):
        raise RecoveryRefusedError(f"{place.path} holds no metadata: this node never joined")
    metadata, log = open_group(
        place, METADATA_TOPIC, METADATA_GROUP, f"{place.path}/meta", reads_all=True
    )
    image = None if log is None else _image(log, place.skips)
    _judge(metadata, log, survivors)
    reports = [metadata]
    for name, group, folder in _partition_folders(place, image):
        report, log = open_group(place, name, group, folder)
        _judge(report, log, survivors)
        reports.append(report)
    return Findings(tuple(reports), tuple(_gone(image, survivors)), image)


def _partition_folders(
    place: Place, image: MetadataImage | None
) -> Iterator[tuple[str, RaftGroupId, str]]:
    root = f"{place.path}/topics"
    if not place.disk.exists(root):
        return
    folders = find_folders(place.disk, root)
    groups = set(place.journal.groups())
    later = {folder.key for folder in folders if folder.life != FIRST_LIFE}
    for topic, partition in () if image is None else all_partitions(image):
        group = topic.group_id(partition.index)
        groups.add(group)
        if not partition.is_first_life:
            later.add(group)
    # What is no later life, as far as anything says, is the first one of its number.
    first = {group[:2]: group for group in sorted(groups - later, reverse=True)}
    for folder in folders:
        found = folder.key if folder.key in groups else None
        if folder.life == FIRST_LIFE:
            found = first.get((folder.topic_id, folder.partition))
        if found is not None:
            yield f"{folder.topic}-{folder.partition}", found, f"{root}/{folder.path}"


def partition_group(place: Place, topic: str, partition: int) -> tuple[str, RaftGroupId, str]:
    """Name, group and folder of one partition, the metadata's too.

    Raises:
        RecoveryRefusedError: it is not here.
    """
    if topic == METADATA_TOPIC and partition == 0:
        return METADATA_TOPIC, METADATA_GROUP, f"{place.path}/meta"
    name = f"{topic}-{partition}"
    rows = [row for row in _partition_folders(place, None) if row[0] == name]
    if not rows:
        raise RecoveryRefusedError(f"this node holds no {name}")
    return max(rows, key=lambda row: row[1].creation_epoch)  # an earlier one has ended


def read_image(place: Place) -> MetadataImage | None:
    """The metadata as this node has it; None where it cannot be read to its end."""
    _, log = open_group(place, METADATA_TOPIC, METADATA_GROUP, f"{place.path}/meta")
    return None if log is None else _image(log, place.skips)


def open_group(
    place: Place, name: str, group: RaftGroupId, folder: str, *, reads_all: bool = False
) -> tuple[GroupReport, ReplicatedLog | None]:
    """Recover a log as a start would and report what it holds; only the metadata's stays open."""
    journal = place.journal
    state = journal.get(group) or GroupState()
    identity = ReplicaId(place.node.node_id, state.bootstrapped or place.node.storage_id)
    report = GroupReport(name=name, group=group, folder=folder, identity=identity)
    if not place.disk.exists(f"{folder}/log-start"):
        report.note = "its files are gone"
        return report, None

    def before_cut(floor: RaftIndex) -> None:
        latest = journal.get(group) or state
        journal.put(group, evolve(latest, cut_floor=max(floor, latest.cut_floor)))
        journal.flush_now()

    try:
        log = ReplicatedLog.open(
            place.disk,
            folder,
            LogConfig(),
            claimed_flushed_end=RaftIndex(state.flushed_end),
            clock=place.clock,
            before_cut=before_cut,
        )
    except UnusableLogError as error:
        report.note = str(error)
        return report, None
    if reads_all:
        _check_every_byte(log)
    commit_end = max(min(RaftIndex(state.commit_end), log.flushed_end), log.log_start.index)
    report.before = latest_configuration(log)
    report.is_forgotten = is_forgotten(journal, state, is_empty=False) or (
        identity not in report.before.members
        and identity.node_id in {member.node_id for member in report.before.members}
    )
    report.log_start = log.log_start_offset
    report.log_end = log.log_end_offset
    report.flushed_end = log.offset_of(
        max(log.log_start.index, min(RaftIndex(state.flushed_end), log.end_index))
    )
    report.high_watermark = log.offset_of(commit_end)
    report.last_epoch = max((epoch for epoch, _ in log.epochs()), default=0)
    report.damaged = tuple(log.damaged)
    if (job := log.flush_job()) is not None:
        job.run()
        log.complete(job)
    if group != METADATA_GROUP:
        if reads_all:
            report.open_transactions = _open_transactions(log)
        log.close()
    return report, log


def _open_transactions(log: ReplicatedLog) -> tuple[OpenTransaction, ...]:
    """What the batches that can be read begin and do not end."""
    table = at_once(ProducerStateTable.decoding(log.log_start.state))
    start = log.log_start.base_offset
    for damage in (*log.damaged, (log.log_end_offset, log.log_end_offset)):
        with suppress(DamagedError):  # who walks looks at what comes next, too
            for header in log.headers(start, damage[0]):
                table.end(header) if header.is_control else table.append(header)
        start = damage[1]
    opened = [
        OpenTransaction(int(producer_id), producer.epoch, producer.open_since)
        for producer_id, producer in table.producers()
        if producer.open_since != NO_OFFSET
    ]
    return tuple(sorted(opened, key=lambda one: one.first))


def _check_every_byte(log: ReplicatedLog) -> None:
    offset = Offset(-1)
    while (job := log.scrub_job(CHECK_BYTES)) is not None:
        job.run()
        log.checked(job)
        if job.offset <= offset or job.offset >= log.log_end_offset:
            return
        offset = Offset(job.offset)


def latest_configuration(log: ReplicatedLog) -> Configuration:
    """The members of the group, by the newest entry of its log."""
    payload = log.log_start.configuration
    for entry in log.bare_entries():
        if entry.kind == EntryKind.MEMBERSHIP:
            payload = entry.payload
    return Configuration.decode(payload)


def _image(log: ReplicatedLog, skips: Sequence[Skip]) -> MetadataImage | None:
    """The metadata with everything that this log holds: all of it will count."""
    machine = MetadataMachine(skips)
    machine.attach_log(log)
    machine.restore(log.log_start)
    # A majority that is gone cannot agree to skip a command; skips come after this recovery.
    with suppress(UnappliableCommandError):
        machine.committed(log.log_end_offset, log.end_index)
    is_whole = machine.applied_end == log.end_index
    log.close()
    return machine.image if is_whole else None


def _judge(report: GroupReport, log: ReplicatedLog | None, survivors: Sequence[NodeId]) -> None:
    if log is None:
        return
    after = surviving_configuration(report.before, report.identity, survivors)
    voters = report.before.voters
    alive = [voter for voter in voters if voter.node_id in survivors]
    if report.is_forgotten and len(survivors) == 1:
        alive = []  # no leader is left that could admit it anew
    if after is None:
        report.verdict = Verdict.NOT_HELD
    elif len(alive) > len(voters) // 2:
        report.verdict = Verdict.STAYS
    else:
        report.verdict = Verdict.RECOVERED
        report.after = after


def surviving_configuration(
    before: Configuration, identity: ReplicaId, survivors: Sequence[NodeId]
) -> Configuration | None:
    """The survivors among the members: voters where there are any, else learners take their place.
    Every survivor derives the same from the same log. None: no member survives.

    `identity` is that of the replica at hand; its log may still know it under a former storage.
    """

    def alive(members: Sequence[ReplicaId]) -> dict[NodeId, ReplicaId]:
        found: dict[NodeId, ReplicaId] = {}
        for member in members:
            if member.node_id in survivors:
                found[member.node_id] = identity if member.node_id == identity[0] else member
        return found

    voters, learners = alive(before.voters), alive(before.learners)
    if not voters:
        voters, learners = learners, {}
    if not voters:
        return None
    rest = (learners[node_id] for node_id in sorted(learners) if node_id not in voters)
    return Configuration(tuple(voters[node_id] for node_id in sorted(voters)), tuple(rest))


def _gone(image: MetadataImage | None, survivors: Sequence[NodeId]) -> Iterator[str]:
    if image is None:
        return
    for topic in image.topics_by_id():
        for partition in topic.held:
            if not any(n in survivors for n in (*partition.replicas, *partition.voters)):
                yield f"{topic.name}-{partition.index}"


# ---- a lost majority ----


def check_is_lost(findings: Findings, survivors: Sequence[NodeId]) -> None:
    """Refuse where no group has lost its majority.

    Raises:
        RecoveryRefusedError: there is none.
    """
    if not findings.of(Verdict.RECOVERED):
        ids = ",".join(str(node_id) for node_id in survivors)
        reason = f"with nodes {ids} every group on this node has its majority: start them instead"
        if findings.metadata.is_forgotten:
            reason += (
                "; state.journal of this node is lost, so it votes once it was admitted anew: "
                "where too few others are left for that, go on with those of them alone"
            )
        raise RecoveryRefusedError(reason)


def recover_lost_majorities(place: Place, findings: Findings) -> None:
    """Make the survivors the members of every group that lost its majority, durably.

    Raises:
        DiskError: do it again.
    """
    journal = place.journal
    reports = findings.of(Verdict.RECOVERED)
    for report in reports:
        _forget_producers(place.disk, report.folder, report.log_end)
    for report in reports:
        state = journal.get(report.group) or GroupState()
        term = max(state.term, report.last_epoch)
        journal.put(
            report.group,
            evolve(
                state,
                term=term + TERM_STEP,
                vote=None,
                bootstrapped=report.identity.storage_id,
                cut_floor=0,
            ),
        )
    journal.flush_now()
    for report in reports:
        assert report.after is not None
        replace_configuration(
            place.disk, report.folder, EntryKind.MEMBERSHIP, report.after.encode()
        )


# ---- damage that no replica can repair ----


@frozen(slots=True, kw_only=True)
class Loss:
    """What is lost when the loss of one partition is accepted.

    Attributes:
        damaged: offsets whose bytes are damaged: their records go.
        cut: offsets that a torn end claimed, which this replica may have promised to keep.
        is_anew: nothing of the log can be read; it would begin again at offset 0.
        others: other voters, which may still have what is missing here.
        endless: transactions whose end may be among what is lost. Where it is, nobody ends them
            again: readers of committed records stop there until an operator does.
    """

    report: GroupReport
    damaged: tuple[tuple[Offset, Offset], ...]
    cut: tuple[Offset, Offset] | None
    is_anew: bool
    others: tuple[NodeId, ...]
    endless: tuple[OpenTransaction, ...] = ()


def report_loss(place: Place, topic: str, partition: int) -> Loss:
    """Read one partition and report what would be lost.

    Raises:
        RecoveryRefusedError: it is not here, or there is nothing to accept.
        DiskError: the device failed.
    """
    name, group, folder = partition_group(place, topic, partition)
    report, log = open_group(place, name, group, folder, reads_all=True)
    if log is None:
        raise RecoveryRefusedError(
            f"{name} cannot be read at all ({report.note}): start the node once, which sets the "
            "folder aside, stop it, and accept the loss then"
        )
    if topic == METADATA_TOPIC:
        log.close()
    state = place.journal.get(report.group) or GroupState()
    voters = report.before.voters
    others = tuple(v.node_id for v in voters if v.node_id != place.node.node_id)
    is_anew = not others and report.identity not in voters
    cut = None
    if state.cut_floor:
        floor = max(report.log_end, log.offset_of(RaftIndex(state.cut_floor)))
        cut = report.log_end, floor
    if not (report.damaged or cut or is_anew):
        raise RecoveryRefusedError(f"{name} is whole here: there is no loss to accept")
    if topic == METADATA_TOPIC and others and (report.damaged or is_anew):
        raise RecoveryRefusedError(
            "metadata differs between nodes if one of them leaves commands out: move this node's "
            "data folder away instead, and let it fetch everything from the others"
        )
    lost_end = max(
        (end for _, end in (*report.damaged, *([] if cut is None else [cut]))), default=0
    )
    endless = tuple(one for one in report.open_transactions if one.first < lost_end)
    return Loss(
        report=report,
        damaged=report.damaged,
        cut=cut,
        is_anew=is_anew,
        others=others,
        endless=endless,
    )


def accept_loss(place: Place, loss: Loss) -> None:
    """Do what `report_loss` reported.

    Raises:
        DiskError: do it again.
    """
    report, journal = loss.report, place.journal
    state = journal.get(report.group) or GroupState()
    sound_end = min((start for start, _ in loss.damaged), default=report.log_end)
    _forget_producers(place.disk, report.folder, sound_end)
    journal.put(
        report.group,
        evolve(state, cut_floor=0, bootstrapped=report.identity.storage_id),
    )
    journal.flush_now()
    if loss.is_anew:
        after = Configuration((report.identity,))
        replace_configuration(place.disk, report.folder, EntryKind.MEMBERSHIP, after.encode())
    if not loss.damaged:
        return
    log = ReplicatedLog.open(
        place.disk,
        report.folder,
        LogConfig(),
        claimed_flushed_end=RaftIndex(state.flushed_end),
        initial=LogStart(),
        clock=place.clock,
    )
    try:
        _check_every_byte(log)
        for start, _ in loss.damaged:
            if any(start == damage[0] for damage in log.damaged):  # else an earlier try did it
                log.accept_loss(start)
    except CorruptBatchError as error:
        raise RecoveryRefusedError(f"{report.name}: the damage has changed: {error}") from error
    finally:
        log.close()
