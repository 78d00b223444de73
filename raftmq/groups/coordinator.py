"""The group coordinator of one node: what handlers ask of groups, and what time does to them.

A synchronous shell: each request becomes a step of `group.py` on a group that `owned_groups.py` has
claimed and loaded, or a command to the metadata group. Answers are promises of plain values.

Invariants: an assignment or a committed offset is answered only after it was applied; OffsetFetch
waits for a read barrier, so it shows every commit that was answered before it was asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import msgspec
from attrs import frozen
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.groups.group import Group
from raftmq.groups.model import GroupConfig, JoinRequest, JoinResult, Phase, SyncResult
from raftmq.groups.offsets import expired_offsets, is_undated
from raftmq.groups.owned_groups import (
    BARRIER_INTERVAL_MS,
    COMMAND_TIMEOUT_MS,
    CommandSink,
    OwnedGroups,
)
from raftmq.metadata.commands import (
    NO_TOPIC_ID,
    CommitOffsets,
    CommittedOffset,
    DeleteGroup,
    DeleteOffsets,
    ExpireOffsets,
    GroupCommand,
    OffsetsTransaction,
)
from raftmq.metadata.image import LEVEL_OF_MOVES, LEVEL_OF_TRANSACTIONS, GroupImage, OffsetMap
from raftmq.metadata.subscriptions import topics_in_use
from raftmq.partition.parked import Deadlines
from raftmq.ports import Clock, Random
from raftmq.promise import Promise
from raftmq.types import NodeId, TopicId, TopicPartition

__all__ = ["CommandSink", "Coordinator"]

T = TypeVar("T")

_EXPIRIES_AT_ONCE: Final = 100
_LOOKED_AT_ONCE: Final = 2_000
"""Groups and offsets: some milliseconds."""
_NO_OFFSETS: Final[OffsetMap] = Map()


@frozen(slots=True)
class MemberDescription:
    """One member, for DescribeGroups."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


@frozen(slots=True)
class GroupDescription:
    """One group, for DescribeGroups; an unknown one is Dead."""

    error: ErrorCode
    name: str
    phase: Phase = Phase.DEAD
    protocol_type: str = ""
    protocol: str = ""
    members: tuple[MemberDescription, ...] = ()


@frozen(slots=True)
class GroupListing:
    """One group, for ListGroups."""

    name: str
    protocol_type: str
    phase: Phase


@frozen(slots=True)
class LeaveResult:
    """The answer to LeaveGroup: one for all, and one for each member named."""

    error: ErrorCode = ErrorCode.NONE
    members: tuple[ErrorCode, ...] = ()


@frozen(slots=True)
class FetchedOffsets:
    """The answer to OffsetFetch for one group."""

    error: ErrorCode
    group: GroupImage | None = None

    @property
    def offsets(self) -> OffsetMap:
        """What is committed."""
        return _NO_OFFSETS if self.group is None else self.group.offsets

    def is_stable(self, at: TopicPartition) -> bool:
        """False while a running transaction may change the offset there (KIP-447)."""
        return self.group is None or not self.group.is_pending(at)


@frozen(slots=True)
class OffsetsDeleted:
    """The answer to OffsetDelete: one for all, and one for each partition."""

    error: ErrorCode = ErrorCode.NONE
    partitions: tuple[ErrorCode, ...] = ()


def describe_live(group: Group) -> GroupDescription:
    """A group that this node coordinates."""
    is_stable = group.phase is Phase.STABLE
    return GroupDescription(
        ErrorCode.NONE,
        group.name,
        group.phase,
        group.protocol_type,
        (group.protocol or "") if is_stable else "",
        tuple(
            MemberDescription(
                member.member_id,
                member.instance_id,
                member.request.client_id,
                member.request.client_host,
                member.metadata(group.protocol) if is_stable else b"",
                member.assignment if is_stable else b"",
            )
            for member in group.members.values()
        ),
    )


def describe_saved(state: GroupImage) -> GroupDescription:
    """A group as it is stored: no node has loaded it."""
    return GroupDescription(
        ErrorCode.NONE,
        state.name,
        Phase.STABLE if state.members else Phase.EMPTY,
        state.protocol_type,
        state.protocol or "",
        tuple(
            MemberDescription(
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host,
                member.subscription,
                member.assignment,
            )
            for member in state.members
        ),
    )


class Coordinator(OwnedGroups):
    """All groups that this node coordinates."""

    def __init__(
        self,
        node_id: NodeId,
        engine: CommandSink,
        clock: Clock,
        config: GroupConfig | None = None,
        *,
        random: Random,
        retention_now_ms: Callable[[], int | None],
        latest_now_ms: Callable[[], int | None],
        deadlines: Deadlines | None,
    ) -> None:
        """A coordinator.

        Args:
            retention_now_ms: what time it is at the earliest, for what expires; None: unknown.
            latest_now_ms: what time it is at the latest, for what begins to age; None: unknown.
            deadlines: None: offset commits do not wait for each other, and sessions end at ticks.
        """
        super().__init__(node_id, engine, clock, config or GroupConfig(), deadlines, latest_now_ms)
        self._random = random
        # No single clock may delete offsets: the node brings what a majority of clocks says.
        self._retention_now_ms = retention_now_ms
        self._next_retention_ms = clock.monotonic_ms() + self.config.retention_check_ms
        self._unchecked: deque[str] = deque()  # groups whose offsets are to be looked at
        self._next_expiry_ms = 0.0

    # ---- members ----

    def join(self, name: str, request: JoinRequest) -> Promise[JoinResult]:
        """A consumer joins; kept when the members of the next generation are known."""

        def refuse(error: ErrorCode) -> JoinResult:
            return JoinResult(error, request.member_id)

        def act(group: Group) -> Promise[JoinResult]:
            now_ms = self._clock.monotonic_ms()
            promise = group.join(request, self._new_member_id(request), now_ms)
            self._note_session(group)
            self._perform(group)
            return promise

        if not name:
            return Promise.resolved(refuse(ErrorCode.INVALID_GROUP_ID))
        if len(request.instance_id or "") > self.config.instance_id_length_max:
            return Promise.resolved(refuse(ErrorCode.INVALID_REQUEST))
        if self._is_too_long(request.member_id, None):
            return Promise.resolved(refuse(ErrorCode.UNKNOWN_MEMBER_ID))
        low, high = self.config.session_timeout_ms_min, self.config.session_timeout_ms_max
        if not low <= request.session_timeout_ms <= high:
            return Promise.resolved(refuse(ErrorCode.INVALID_SESSION_TIMEOUT))
        missing = ErrorCode.UNKNOWN_MEMBER_ID if request.member_id else None
        return self._serve(name, act, refuse, missing)

    def _new_member_id(self, request: JoinRequest) -> str:
        bits = self._random.getrandbits(128)
        head = request.instance_id or request.client_id or "consumer"
        return f"{head[: self.config.member_id_length_max - 33]}-{bits:032x}"

    def _is_too_long(self, member_id: str, instance_id: str | None) -> bool:
        """True of ids longer than any member can have."""
        return (
            len(member_id) > self.config.member_id_length_max
            or len(instance_id or "") > self.config.instance_id_length_max
        )

    def sync(
        self,
        name: str,
        generation: int,
        member_id: str,
        instance_id: str | None,
        assignments: Sequence[tuple[str, bytes]],
        *,
        protocol_type: str | None = None,
        protocol: str | None = None,
    ) -> Promise[SyncResult]:
        """A member asks for its assignment; kept once the generation is applied."""

        def act(group: Group) -> Promise[SyncResult]:
            promise = group.sync(
                generation,
                member_id,
                instance_id,
                assignments,
                self._clock.monotonic_ms(),
                protocol_type=protocol_type,
                protocol=protocol,
            )
            self._perform(group)
            return promise

        if not name:
            return Promise.resolved(SyncResult(ErrorCode.INVALID_GROUP_ID))
        if self._is_too_long(member_id, instance_id):
            return Promise.resolved(SyncResult(ErrorCode.UNKNOWN_MEMBER_ID))
        return self._serve(name, act, SyncResult, ErrorCode.UNKNOWN_MEMBER_ID)

    def heartbeat(
        self, name: str, generation: int, member_id: str, instance_id: str | None
    ) -> Promise[ErrorCode]:
        """A member is alive."""

        def act(group: Group) -> Promise[ErrorCode]:
            now_ms = self._clock.monotonic_ms()
            return Promise.resolved(group.heartbeat(generation, member_id, instance_id, now_ms))

        if not name:
            return Promise.resolved(ErrorCode.INVALID_GROUP_ID)
        if self._is_too_long(member_id, instance_id):
            return Promise.resolved(ErrorCode.UNKNOWN_MEMBER_ID)
        return self._serve(name, act, _same, ErrorCode.UNKNOWN_MEMBER_ID)

    def leave(self, name: str, members: Sequence[tuple[str, str | None]]) -> Promise[LeaveResult]:
        """Members go: each a member id, or an instance id with an empty member id."""

        def act(group: Group) -> Promise[LeaveResult]:
            now_ms = self._clock.monotonic_ms()
            errors = tuple(group.leave(*member, now_ms) for member in members)
            self._perform(group)
            return Promise.resolved(LeaveResult(ErrorCode.NONE, errors))

        def refuse(error: ErrorCode) -> LeaveResult:
            if error is ErrorCode.UNKNOWN_MEMBER_ID:
                return LeaveResult(ErrorCode.NONE, (error,) * len(members))
            return LeaveResult(error)

        if not name:
            return Promise.resolved(LeaveResult(ErrorCode.INVALID_GROUP_ID))
        return self._serve(name, act, refuse, ErrorCode.UNKNOWN_MEMBER_ID)

    # ---- offsets ----

    def _size_codes(self, offsets: Sequence[CommittedOffset]) -> list[ErrorCode]:
        """For each offset, whether its metadata is too long, or that of all others together."""
        limit = self.config.offset_metadata_chars_max
        are_long = [_java_length(entry.metadata) > limit for entry in offsets]
        size = sum(
            len(entry.metadata.encode())
            for entry, is_long in zip(offsets, are_long, strict=True)
            if not is_long
        )
        is_too_much = size > self.config.commit_metadata_bytes_max
        other = ErrorCode.INVALID_COMMIT_OFFSET_SIZE if is_too_much else ErrorCode.NONE
        return [ErrorCode.OFFSET_METADATA_TOO_LARGE if is_long else other for is_long in are_long]

    def commit(
        self,
        name: str,
        generation: int,
        member_id: str,
        instance_id: str | None,
        offsets: Sequence[CommittedOffset],
        transaction: OffsetsTransaction | None = None,
        known_version: int = -1,
    ) -> Promise[tuple[ErrorCode, ...]]:
        """Save positions; kept, one code each, once they are applied.

        Within a `transaction`, which has a topic id for each of them, they are pending then.
        Otherwise `known_version` is the structure version in which the caller saw the partitions.
        """
        if self._engine.image.level < LEVEL_OF_TRANSACTIONS:
            known_version = -1  # nodes that read no more than this level would stop
        codes = self._size_codes(offsets)
        fitting = [entry for entry, code in zip(offsets, codes, strict=True) if not code]
        if transaction is not None:
            ids = zip(transaction.topic_ids, codes, strict=True)
            topic_ids = tuple(topic_id for topic_id, code in ids if not code)
            transaction = msgspec.structs.replace(transaction, topic_ids=topic_ids)
        # Older clients name no member in a transaction, also in a group that has some.
        is_unnamed = generation < 0 and not member_id and instance_id is None

        def result(error: ErrorCode) -> tuple[ErrorCode, ...]:
            return tuple(code or error for code in codes)

        def act(group: Group) -> Promise[tuple[ErrorCode, ...]]:
            now_ms = self._clock.monotonic_ms()
            error = ErrorCode.NONE
            if transaction is None or not is_unnamed or group.phase is Phase.DEAD:
                error = group.check_commit(generation, member_id, instance_id, now_ms)
            if error is not ErrorCode.NONE or not fitting:
                return Promise.resolved(result(error))
            timestamp_ms = self._stamp_ms()
            command = CommitOffsets(
                group=name,
                coordinator_epoch=group.coordinator_epoch,
                generation=generation,
                member_id=member_id,
                instance_id=instance_id,
                offsets=tuple(
                    msgspec.structs.replace(entry, timestamp_ms=timestamp_ms) for entry in fitting
                ),
                transaction=transaction,
                known_version=known_version,
            )
            group.quiet_since_ms = now_ms
            answer: Promise[tuple[ErrorCode, ...]] = Promise()

            def settle(error: ErrorCode) -> None:
                if error is ErrorCode.NOT_COORDINATOR:
                    self._drop(group, error)
                answer.resolve(result(error))

            self.commits.add(command, settle)
            return answer

        if self._is_too_long(member_id, instance_id):
            return Promise.resolved(result(ErrorCode.UNKNOWN_MEMBER_ID))
        missing = ErrorCode.ILLEGAL_GENERATION if generation >= 0 else None
        return self._serve(name, act, result, missing)

    def _finish(
        self, group: Group, command: GroupCommand, result: Callable[[ErrorCode], T]
    ) -> Promise[T]:
        """Propose a command whose outcome one client waits for."""
        answer: Promise[T] = Promise()

        def done(outcome: Promise[ErrorCode]) -> None:
            error = outcome.result()
            if error is ErrorCode.NOT_COORDINATOR:
                self._drop(group, error)
            answer.resolve(result(error))

        self._propose(command).when_done(done)
        return answer

    def fetch_offsets(self, name: str) -> Promise[FetchedOffsets]:
        """All committed offsets of a group, as of some moment after the call."""
        if not self._is_mine(name):
            return Promise.resolved(FetchedOffsets(ErrorCode.NOT_COORDINATOR))
        answer: Promise[FetchedOffsets] = Promise()
        asked_at_ms = self._clock.monotonic_ms()

        def done(barrier: Promise[None]) -> None:
            # The image is as new as the request, whichever node holds the claim: none is needed.
            # Without a barrier NOT_COORDINATOR is what every client's OffsetFetch retries.
            if barrier.error is not None:
                answer.resolve(FetchedOffsets(ErrorCode.NOT_COORDINATOR))
                return
            self._confirm(asked_at_ms)
            state = self._engine.image.groups.get(name)
            answer.resolve(FetchedOffsets(ErrorCode.NONE, state))

        self._engine.read_barrier(timeout_ms=COMMAND_TIMEOUT_MS).when_done(done)
        return answer

    def delete_offsets(
        self, name: str, partitions: Sequence[TopicPartition]
    ) -> Promise[OffsetsDeleted]:
        """Forget positions in topics that no member reads."""

        def act(group: Group) -> Promise[OffsetsDeleted]:
            in_use: frozenset[str] | None = frozenset()
            if group.members:
                subscriptions = [m.metadata(group.protocol) for m in group.members.values()]
                in_use = topics_in_use(group.protocol_type, subscriptions)
            if in_use is None:
                return Promise.resolved(OffsetsDeleted(ErrorCode.NON_EMPTY_GROUP))
            codes = [
                ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if at.topic in in_use else ErrorCode.NONE
                for at in partitions
            ]
            free = [at for at, code in zip(partitions, codes, strict=True) if not code]
            if not free:
                return Promise.resolved(OffsetsDeleted(ErrorCode.NONE, tuple(codes)))
            command = DeleteOffsets(
                group=name,
                coordinator_epoch=group.coordinator_epoch,
                partitions=tuple((at.topic, at.partition) for at in free),
                topic_ids=self._topic_ids(free),
            )
            return self._finish(group, command, lambda error: OffsetsDeleted(error, tuple(codes)))

        if not name:
            return Promise.resolved(OffsetsDeleted(ErrorCode.INVALID_GROUP_ID))
        return self._serve(name, act, OffsetsDeleted, ErrorCode.GROUP_ID_NOT_FOUND)

    def _topic_ids(self, partitions: Sequence[TopicPartition]) -> tuple[TopicId, ...]:
        """Of each of them the topic, or view; none where the cluster's level is too low."""
        image = self._engine.image
        if image.level < LEVEL_OF_MOVES:
            return ()
        return tuple(image.committed_id(at.topic) or NO_TOPIC_ID for at in partitions)

    # ---- operators ----

    def describe(self, name: str) -> Promise[GroupDescription]:
        """One group; GROUP_ID_NOT_FOUND with the phase Dead when there is none."""
        group = self._current(name)
        if group is not None and self._is_confirmed():
            return Promise.resolved(describe_live(group))
        if not self._is_mine(name):
            return Promise.resolved(GroupDescription(ErrorCode.NOT_COORDINATOR, name))
        answer: Promise[GroupDescription] = Promise()

        def done(barrier: Promise[None]) -> None:
            state = self._engine.image.groups.get(name)
            if barrier.error is not None:
                answer.resolve(GroupDescription(ErrorCode.COORDINATOR_NOT_AVAILABLE, name))
            elif state is None:
                answer.resolve(GroupDescription(ErrorCode.GROUP_ID_NOT_FOUND, name))
            else:
                answer.resolve(describe_saved(state))

        self._engine.read_barrier(timeout_ms=COMMAND_TIMEOUT_MS).when_done(done)
        return answer

    def list_groups(self) -> list[GroupListing]:
        """The groups of this node: those it coordinates or would claim, by name."""
        listings: list[GroupListing] = []
        image = self._engine.image.groups
        for name in image.names():
            if not self._is_mine(name):
                continue
            group = self._groups.get(name)
            state = image.groups[name]
            if group is not None:
                listings.append(GroupListing(name, group.protocol_type, group.phase))
            else:
                phase = Phase.STABLE if state.members else Phase.EMPTY
                listings.append(GroupListing(name, state.protocol_type, phase))
        return listings

    def delete(self, name: str) -> Promise[ErrorCode]:
        """Forget an empty group with its offsets."""

        def act(group: Group) -> Promise[ErrorCode]:
            if not group.is_quiet:
                return Promise.resolved(ErrorCode.NON_EMPTY_GROUP)
            command = DeleteGroup(group=name, coordinator_epoch=group.coordinator_epoch)
            return self._finish(group, command, _same)

        if not name:
            return Promise.resolved(ErrorCode.INVALID_GROUP_ID)
        return self._serve(name, act, _same, ErrorCode.GROUP_ID_NOT_FOUND)

    # ---- time ----

    def tick(self, now_ms: float) -> None:
        """Let time pass: sessions, rebalances, barriers, expiry. Call it every 50 ms or so."""
        self._latest_now_ms()  # a node that leads nothing later uses what it heard now
        super().tick(now_ms)
        if now_ms >= self._next_retention_ms:
            self._next_retention_ms = now_ms + self.config.retention_check_ms
            self._unchecked = deque(self._engine.image.groups.names())
        if self._unchecked and now_ms >= self._next_expiry_ms:
            self._expire(now_ms)

    def _expire(self, now_ms: float) -> None:
        """Drop offsets that are no longer used; a part of the groups at each call, so that none
        takes long, and a limited number of commands at a time."""
        retention_now_ms = self._retention_now_ms()
        if retention_now_ms is None:
            self._unchecked.clear()
            return  # this node does not know the time; it may at the next check
        image = self._engine.image.groups
        begun = looked = 0
        while self._unchecked and looked < _LOOKED_AT_ONCE:
            name = self._unchecked.popleft()
            state = image.get(name)
            if state is None:
                continue
            looked += 1 + len(state.offsets)
            expired = expired_offsets(
                state,
                retention_now_ms,
                self.config.offsets_retention_ms,
                self._engine.image.sources(),
            )
            is_unused = not state.members and len(expired) == len(state.offsets)
            is_due = expired or is_unused or is_undated(state)
            if not is_due or not self._is_mine(name):
                continue
            if begun == _EXPIRIES_AT_ONCE:
                self._unchecked.appendleft(name)
                self._next_expiry_ms = now_ms + BARRIER_INTERVAL_MS
                return
            begun += 1
            expire = partial(self._expire_group, now_ms, retention_now_ms)
            self._serve(name, expire, _same, ErrorCode.NONE)

    def _expire_group(
        self, checked_at_ms: float, retention_now_ms: int, group: Group
    ) -> Promise[ErrorCode]:
        state = self._engine.image.groups.get(group.name)
        if state is None or (not group.is_quiet and not state.members):
            return Promise.resolved(ErrorCode.NONE)  # gone, or its first members are just joining
        expired = expired_offsets(
            state, retention_now_ms, self.config.offsets_retention_ms, self._engine.image.sources()
        )
        idle_ms = checked_at_ms - group.quiet_since_ms
        is_idle = group.is_quiet and idle_ms >= self.config.retention_check_ms
        if not expired and not is_undated(state) and (state.offsets or not is_idle):
            return Promise.resolved(ErrorCode.NONE)
        command = ExpireOffsets(
            group=group.name,
            coordinator_epoch=group.coordinator_epoch,
            expired=expired,
            now_ms=self._stamp_ms(),
        )
        return self._finish(group, command, _same)


def _same(error: ErrorCode) -> ErrorCode:
    return error


def _java_length(text: str) -> int:
    """What `String.length` says, by which Kafka judges: UTF-16 code units."""
    return len(text) + sum(letter > "\uffff" for letter in text)
