"""What each command of a consumer group does to the groups of the image: a pure function.

Never raises on any command: a rejection is a value that names a Kafka error. Never looks at a
clock: times are in the commands.

Invariants: coordinator epochs come from one counter that only rises, so none is ever given twice,
not even to a group that was deleted in between; a generation never goes back; offsets change only
under the current coordinator epoch and, for members, the current generation. Offsets of a running
transaction are pending: they count for nothing but expiry before `apply_transactions.py` settles
them with its decision; a plain commit, and whatever deletes offsets, takes the pending ones away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import attrs
import msgspec
from immutables import MapMutation

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import (
    UNDATED,
    ClaimGroup,
    CommitMany,
    CommitOffsets,
    CommittedOffset,
    DeleteGroup,
    DeleteOffsets,
    ExpireOffsets,
    Generation,
    GroupCommand,
    ReleaseGroup,
    ReplaceMember,
)
from raftmq.metadata.image import (
    NO_COORDINATOR,
    NO_OFFSETS,
    GroupImage,
    GroupsImage,
    LiveEpoch,
    OffsetMap,
    holder,
)
from raftmq.metadata.results import Claimed, CommitsDone, GroupDone, Rejection
from raftmq.types import TopicPartition

Applied: TypeAlias = tuple[GroupsImage, Claimed | GroupDone | CommitsDone | Rejection]


def apply_group(image: GroupsImage, command: GroupCommand, live_epoch: LiveEpoch) -> Applied:
    """What `command` makes of `image`, and its result. Pure; never raises."""
    if isinstance(command, ClaimGroup):
        return _claim(image, command, live_epoch)
    if isinstance(command, CommitMany):
        return _commit_many(image, command)
    group = image.get(command.group)
    # Every other command names the epoch it was made under; see the module's invariants.
    epoch: int | None = getattr(command, "coordinator_epoch", None)
    if group is None or group.coordinator == NO_COORDINATOR or group.coordinator_epoch != epoch:
        return image, Rejection(ErrorCode.NOT_COORDINATOR, "coordinator epoch is not current")
    if isinstance(command, Generation):
        return _complete_generation(image, group, command)
    if isinstance(command, CommitOffsets):
        return _commit(image, group, command)
    if isinstance(command, ReplaceMember):
        return _replace_member(image, group, command)
    if isinstance(command, DeleteOffsets):
        return _delete_offsets(image, group, command)
    if isinstance(command, ExpireOffsets):
        return _expire_offsets(image, group, command)
    if isinstance(command, ReleaseGroup):
        return _release(image, group, command, live_epoch)
    if isinstance(command, DeleteGroup):
        if group.members:
            return image, Rejection(ErrorCode.NON_EMPTY_GROUP)
        return attrs.evolve(image, groups=image.groups.delete(group.name)), GroupDone()
    return image, Rejection(ErrorCode.INVALID_REQUEST, f"unknown command {type(command).__name__}")


def remove_topics(image: GroupsImage, names: Iterable[str]) -> GroupsImage:
    """Forget all offsets in deleted topics: a new topic of the same name starts afresh."""
    gone = frozenset(names)
    return _forget(image, lambda at: at.topic in gone)


def remove_partitions(image: GroupsImage, partitions: Iterable[TopicPartition]) -> GroupsImage:
    """Forget all offsets in partitions that are gone."""
    return _forget(image, frozenset(partitions).__contains__)


def _forget(image: GroupsImage, is_gone: Callable[[TopicPartition], bool]) -> GroupsImage:
    for group in image.groups.values():
        offsets = _without(group.offsets, [at for at in group.offsets if is_gone(at)])
        after = group if offsets is group.offsets else attrs.evolve(group, offsets=offsets)
        if group.pending:
            pending = (at for commits in group.pending.values() for at in commits)
            after = _without_pending(after, [at for at in pending if is_gone(at)])
        if after is not group:
            image = image.with_group(after)
    return image


def _claim(image: GroupsImage, command: ClaimGroup, live_epoch: LiveEpoch) -> Applied:
    if live_epoch(command.node_id) != command.broker_epoch:
        return image, Rejection(ErrorCode.STALE_BROKER_EPOCH, "the claimer is fenced")
    group = image.get(command.group) or GroupImage(name=command.group)
    current = holder(group, live_epoch)
    if current is not None and current != command.node_id:
        return image, Rejection(ErrorCode.NOT_COORDINATOR, f"broker {current} holds the claim")
    epoch = image.last_epoch + 1
    claimed = attrs.evolve(
        group,
        coordinator=command.node_id,
        coordinator_broker_epoch=command.broker_epoch,
        coordinator_epoch=epoch,
    )
    return attrs.evolve(image.with_group(claimed), last_epoch=epoch), Claimed(epoch)


def _release(
    image: GroupsImage, group: GroupImage, command: ReleaseGroup, live_epoch: LiveEpoch
) -> Applied:
    successor_epoch = live_epoch(command.successor)
    # A new coordinator epoch fences the old holder; the successor claims before it serves.
    epoch = image.last_epoch + 1
    released = attrs.evolve(
        group,
        coordinator=NO_COORDINATOR if successor_epoch is None else command.successor,
        coordinator_broker_epoch=-1 if successor_epoch is None else successor_epoch,
        coordinator_epoch=epoch,
    )
    return attrs.evolve(image.with_group(released), last_epoch=epoch), GroupDone()


def _complete_generation(image: GroupsImage, group: GroupImage, command: Generation) -> Applied:
    if command.generation <= group.generation:
        return image, Rejection(
            ErrorCode.ILLEGAL_GENERATION, f"generation {group.generation} is complete already"
        )
    completed = attrs.evolve(
        group,
        generation=command.generation,
        protocol_type=command.protocol_type,
        protocol=command.protocol,
        leader=command.leader,
        members=command.members,
        changed_at_ms=command.timestamp_ms,
    )
    return image.with_group(completed), GroupDone()


def _replace_member(image: GroupsImage, group: GroupImage, command: ReplaceMember) -> Applied:
    old = group.static_member(command.instance_id)
    if command.generation != group.generation:
        return image, Rejection(ErrorCode.ILLEGAL_GENERATION)
    if old is None or old.member_id != command.old_member_id:
        return image, Rejection(ErrorCode.FENCED_INSTANCE_ID)
    new = msgspec.structs.replace(
        old,
        member_id=command.new_member_id,
        client_id=command.client_id,
        client_host=command.client_host,
        session_timeout_ms=command.session_timeout_ms,
        rebalance_timeout_ms=command.rebalance_timeout_ms,
    )
    replaced = attrs.evolve(
        group,
        members=tuple(new if member is old else member for member in group.members),
        leader=new.member_id if group.leader == old.member_id else group.leader,
    )
    return image.with_group(replaced), GroupDone()


def _commit(image: GroupsImage, group: GroupImage, command: CommitOffsets) -> Applied:
    rejection = check_commit(group, command.generation, command.member_id, command.instance_id)
    if rejection is not None:
        return image, rejection
    return image.with_group(_with_offsets(group, command)), GroupDone()


def _commit_many(image: GroupsImage, command: CommitMany) -> Applied:
    groups = image.groups.mutate()
    codes = tuple(int(commit_plainly(groups, commit)) for commit in command.commits)
    return attrs.evolve(image, groups=groups.finish()), CommitsDone(codes)


def commit_plainly(groups: MapMutation[str, GroupImage], commit: CommitOffsets) -> ErrorCode:
    """One commit among several; NONE when it was kept."""
    group = current_group(groups, commit)
    if isinstance(group, ErrorCode):
        return group
    rejection = check_commit(group, commit.generation, commit.member_id, commit.instance_id)
    if rejection is not None:
        return rejection.code
    groups[commit.group] = _with_offsets(group, commit)
    return ErrorCode.NONE


def current_group(
    groups: MapMutation[str, GroupImage], commit: CommitOffsets
) -> GroupImage | ErrorCode:
    """The group of a commit, if that was made under its present coordinator epoch."""
    group = groups.get(commit.group)
    if (
        group is None
        or group.coordinator == NO_COORDINATOR
        or group.coordinator_epoch != commit.coordinator_epoch
    ):
        return ErrorCode.NOT_COORDINATOR
    return group


def _with_offsets(group: GroupImage, command: CommitOffsets) -> GroupImage:
    offsets = group.offsets.mutate()
    for entry in command.offsets:
        offsets[TopicPartition(entry.topic, entry.partition)] = entry
    group = attrs.evolve(group, offsets=offsets.finish())
    if not group.pending:
        return group
    # What is pending yields: it was committed before this one, whatever becomes of it.
    return _without_pending(group, [TopicPartition(o.topic, o.partition) for o in command.offsets])


def check_commit(
    group: GroupImage, generation: int, member_id: str, instance_id: str | None
) -> Rejection | None:
    """Why these credentials may not commit, if so."""
    if generation < 0 and not group.members:
        return None  # a consumer outside of group management, by any name
    if instance_id is not None:
        static = group.static_member(instance_id)
        if static is not None and static.member_id != member_id:
            return Rejection(ErrorCode.FENCED_INSTANCE_ID)
    if group.member(member_id) is None:
        return Rejection(ErrorCode.UNKNOWN_MEMBER_ID)
    if generation != group.generation:
        return Rejection(ErrorCode.ILLEGAL_GENERATION, f"the group is at {group.generation}")
    return None


def _delete_offsets(image: GroupsImage, group: GroupImage, command: DeleteOffsets) -> Applied:
    gone = [TopicPartition(*at) for at in command.partitions]
    after = attrs.evolve(group, offsets=_without(group.offsets, gone))
    return image.with_group(_without_pending(after, gone)), GroupDone()


def _expire_offsets(image: GroupsImage, group: GroupImage, command: ExpireOffsets) -> Applied:
    expired: list[TopicPartition] = []
    for entry in command.expired:
        at = TopicPartition(entry.topic, entry.partition)
        saved = group.offsets.get(at)
        # Committed anew while the command was on its way, or about to be: it lives on.
        is_as_told = saved is not None and saved.timestamp_ms == entry.timestamp_ms
        if is_as_told and not group.is_pending(at):
            expired.append(at)
    offsets = _without(group.offsets, expired)
    if not offsets and not group.members and not group.pending:
        return attrs.evolve(image, groups=image.groups.delete(group.name)), GroupDone()
    return image.with_group(
        _dated(attrs.evolve(group, offsets=offsets), command.now_ms)
    ), GroupDone()


def check_transactional_commit(group: GroupImage, commit: CommitOffsets) -> Rejection | None:
    """Why these credentials may not commit within a transaction, if so.

    One that names no member at all may, also where the group has members: older clients name none.
    """
    if commit.generation < 0 and not commit.member_id and commit.instance_id is None:
        return None
    return check_commit(group, commit.generation, commit.member_id, commit.instance_id)


def pend(
    group: GroupImage, producer_id: int, entries: Mapping[TopicPartition, CommittedOffset]
) -> GroupImage:
    """These offsets are pending until the producer's running transaction is decided."""
    mine = group.pending.get(producer_id, NO_OFFSETS).update(entries)
    return attrs.evolve(group, pending=group.pending.set(producer_id, mine)) if mine else group


def settle_pending(group: GroupImage, producer_id: int, is_commit: bool) -> GroupImage:
    """The producer's running transaction is decided: its offsets are visible now, or gone."""
    mine = group.pending.get(producer_id)
    if mine is None:
        return group
    offsets = group.offsets.update(mine) if is_commit else group.offsets
    return attrs.evolve(group, offsets=offsets, pending=group.pending.delete(producer_id))


def _without_pending(group: GroupImage, gone: Iterable[TopicPartition]) -> GroupImage:
    gone = [*gone]
    pending = group.pending
    for producer_id, mine in group.pending.items():
        left = _without(mine, gone)
        if not left:
            pending = pending.delete(producer_id)
        elif left is not mine:
            pending = pending.set(producer_id, left)
    return group if pending is group.pending else attrs.evolve(group, pending=pending)


def _dated(group: GroupImage, now_ms: int) -> GroupImage:
    offsets = group.offsets.mutate()
    for at, saved in group.offsets.items():
        if saved.timestamp_ms == UNDATED:
            offsets[at] = msgspec.structs.replace(saved, timestamp_ms=now_ms)
    changed_at_ms = now_ms if group.changed_at_ms == UNDATED else group.changed_at_ms
    return attrs.evolve(group, offsets=offsets.finish(), changed_at_ms=changed_at_ms)


def _without(offsets: OffsetMap, gone: Iterable[TopicPartition]) -> OffsetMap:
    mutation = None
    for at in gone:
        if at in offsets:
            mutation = mutation or offsets.mutate()
            mutation.pop(at, None)
    return offsets if mutation is None else mutation.finish()
