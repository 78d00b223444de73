"""Committed offsets: their way to the metadata group, and which of them a group no longer needs.

`CommitQueue` has one command under way while the next one gathers. While commands are not yet
answered, or one left only a moment ago, all commits that come wait, and the next command carries
them together; a commit after a while without any leaves at once. A commit is judged when it is
applied, each by itself; nothing here decides whether one is allowed.

The rules of expiry (KIP-186, KIP-496) are pure; time comes in as wall-clock milliseconds, as in
commits. With them stands the little of the consumer protocol's subscription that groups look at.

Invariants: what one member commits again before the last was sent replaces it there, and both are
answered together; commits of one member keep their order; groups take turns, so that a storm of one
group costs the others a share of a command and no more; what waits is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any, Final

import msgspec
from attrs import define, field

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import (
    UNDATED,
    CommitMany,
    CommitOffsets,
    CommittedOffset,
    ExpiredOffset,
    GroupCommand,
    OffsetsTransaction,
)
from raftmq.metadata.image import GroupImage
from raftmq.metadata.results import CommitsDone
from raftmq.metadata.subscriptions import CONSUMER_PROTOCOL, subscribed_topics, topics_in_use
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.types import TopicId

OFFSETS_PER_COMMAND_MAX: Final = 2_000
OFFSETS_WAITING_MAX: Final = 200_000
NO_SOURCES: Final[Mapping[str, str]] = {}

Settle = Callable[[ErrorCode], None]
Key = tuple[int, int, str, str | None, tuple[str, int, int, int, int] | None, int]


@define(slots=True, eq=False)
class _Waiting:
    """What one member, one consumer outside of group management, or one transaction wants saved."""

    command: CommitOffsets
    offsets: dict[tuple[str, int], CommittedOffset]
    topic_ids: dict[tuple[str, int], TopicId] = field(factory=dict)
    """Of offsets within a transaction."""
    settles: list[Settle] = field(factory=list)


class CommitQueue:
    """The commits of one coordinator."""

    def __init__(
        self,
        propose: Callable[[GroupCommand], Promise[Any]],
        error_of: Callable[[Promise[Any]], ErrorCode],
        *,
        clock: Clock,
        later: Callable[[float, Callable[[], None]], object] | None,
        linger_ms: float = 0.0,
        in_flight_max: int = 1,
        offsets_per_command_max: int = OFFSETS_PER_COMMAND_MAX,
        offsets_waiting_max: int = OFFSETS_WAITING_MAX,
    ) -> None:
        """`error_of` gives the outcome of a proposed command; `later(delay_ms, callback)` is a
        timer, without which no commit lingers."""
        self._clock = clock
        self._later = later
        self._linger_ms = linger_ms
        self._in_flight_max = in_flight_max
        self._sent_ms = float("-inf")
        self._is_lingering = False
        self._propose = propose
        self._error_of = error_of
        self._per_command_max = offsets_per_command_max
        self._waiting_max = offsets_waiting_max
        self._groups: dict[str, dict[Key, _Waiting]] = {}  # the first one is served next
        self._in_flight = 0
        self.offsets_waiting = 0
        self.commits_count = 0
        self.commands_count = 0

    def __len__(self) -> int:
        return self.offsets_waiting

    def add(self, command: CommitOffsets, settle: Settle) -> None:
        """Save these positions; `settle` is called once, with what became of them."""
        if self.offsets_waiting + len(command.offsets) > self._waiting_max:
            settle(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)  # which every client tries again
            return
        self.commits_count += 1
        key = (
            command.coordinator_epoch,
            command.generation,
            command.member_id,
            command.instance_id,
            _transaction_key(command.transaction),
            command.known_version,
        )
        of_group = self._groups.setdefault(command.group, {})
        waiting = of_group.get(key)
        if waiting is None:
            waiting = of_group[key] = _Waiting(command, {})
        self.offsets_waiting -= len(waiting.offsets)
        topic_ids = () if command.transaction is None else command.transaction.topic_ids
        for entry, topic_id in zip_longest(command.offsets, topic_ids):
            waiting.offsets[entry.topic, entry.partition] = entry
            if topic_id is not None:
                waiting.topic_ids[entry.topic, entry.partition] = topic_id
        self.offsets_waiting += len(waiting.offsets)
        waiting.settles.append(settle)
        self._send_if_due()

    def flush(self, group: str) -> None:
        """Send what a group still waits with ahead of whatever is proposed for it next."""
        of_group = self._groups.pop(group, None)
        if of_group:
            self._send(self._taken(list(of_group.values())))

    def flush_all(self) -> None:
        """Send everything now."""
        while self._groups:
            self._send(self._take())

    def _send_if_due(self) -> None:
        if self._in_flight >= self._in_flight_max or self._is_lingering or not self._groups:
            return
        left_ms = self._sent_ms + self._linger_ms - self._clock.monotonic_ms()
        if left_ms <= 0 or self._later is None:
            self._send(self._take())
            return
        self._is_lingering = True
        self._later(left_ms, self._lingered)

    def _lingered(self) -> None:
        self._is_lingering = False
        if self._in_flight < self._in_flight_max and self._groups:
            self._send(self._take())

    def _take(self) -> list[_Waiting]:
        """The next command's commits: one of each group in turn until it is full."""
        taken: list[_Waiting] = []
        room = self._per_command_max
        while self._groups and room > 0:
            name = next(iter(self._groups))
            of_group = self._groups.pop(name)
            waiting = of_group.pop(next(iter(of_group)))
            if of_group:
                self._groups[name] = of_group  # now the last
            taken.append(waiting)
            room -= len(waiting.offsets)
        return self._taken(taken)

    def _taken(self, taken: list[_Waiting]) -> list[_Waiting]:
        self.offsets_waiting -= sum(len(waiting.offsets) for waiting in taken)
        return taken

    def _send(self, taken: list[_Waiting]) -> None:
        if not taken:
            return
        self._in_flight += 1
        self._sent_ms = self._clock.monotonic_ms()
        self.commands_count += 1
        commits = tuple(_merged(waiting) for waiting in taken)
        command = commits[0] if len(commits) == 1 else CommitMany(commits=commits)

        def done(promise: Promise[Any]) -> None:
            self._in_flight -= 1
            error = self._error_of(promise)
            codes = [error] * len(taken)
            if error is ErrorCode.NONE and isinstance(promise.result(), CommitsDone):
                codes = [ErrorCode(code) for code in promise.result().codes]
            for waiting, code in zip(taken, codes, strict=True):
                for settle in waiting.settles:
                    settle(code)
            self._send_if_due()

        self._propose(command).when_done(done)


def _transaction_key(
    transaction: OffsetsTransaction | None,
) -> tuple[str, int, int, int, int] | None:
    if transaction is None:
        return None
    return (
        transaction.transactional_id,
        transaction.producer_id,
        transaction.epoch,
        transaction.txn_seq,
        transaction.protocol,
    )


def _merged(waiting: _Waiting) -> CommitOffsets:
    if len(waiting.settles) == 1:
        return waiting.command
    transaction = waiting.command.transaction
    if transaction is not None:
        topic_ids = tuple(waiting.topic_ids[at] for at in waiting.offsets)
        transaction = msgspec.structs.replace(transaction, topic_ids=topic_ids)
    return msgspec.structs.replace(
        waiting.command, offsets=tuple(waiting.offsets.values()), transaction=transaction
    )


def is_same_subscription(protocol_type: str, one: bytes, other: bytes) -> bool:
    """True when two subscriptions of a member name the same topics, or are alike."""
    if protocol_type != CONSUMER_PROTOCOL:
        return one == other
    topics, others = subscribed_topics(one), subscribed_topics(other)
    if topics is None or others is None:
        return one == other
    return frozenset(topics) == frozenset(others)


def expired_offsets(
    state: GroupImage,
    now_ms: int,
    retention_ms: int,
    sources: Mapping[str, str] = NO_SOURCES,
) -> tuple[ExpiredOffset, ...]:
    """Offsets that were not used for `retention_ms`, sorted by partition.

    With members, only topics to which none subscribes; without, everything once the group has been
    empty for that long. What is UNDATED does not age before it is dated, and what a running
    transaction may change does not expire.
    """
    topics: frozenset[str] = frozenset()
    idle_since_ms = 0
    if state.members:
        in_use = topics_in_use(state.protocol_type, (m.subscription for m in state.members))
        if in_use is None:
            return ()
        topics = in_use.union(sources[name] for name in in_use if name in sources)
    elif state.changed_at_ms == UNDATED:
        return ()
    else:
        idle_since_ms = state.changed_at_ms
    expired: list[ExpiredOffset] = []
    for at in sorted(state.offsets):
        saved = state.offsets[at]
        if saved.timestamp_ms == UNDATED or state.is_pending(at):
            continue
        used_at_ms = max(saved.timestamp_ms, idle_since_ms)
        if at.topic not in topics and now_ms - used_at_ms >= retention_ms:
            expired.append(ExpiredOffset(at.topic, at.partition, saved.timestamp_ms))
    return tuple(expired)


def is_undated(state: GroupImage) -> bool:
    """True when it is not known yet since when some of the group's offsets are unused."""
    if state.offsets and not state.members and state.changed_at_ms == UNDATED:
        return True
    return any(saved.timestamp_ms == UNDATED for saved in state.offsets.values())
