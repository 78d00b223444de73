"""What a group member's state machine is made of: states, events, options, pending requests.

Values only; `core/group.py` moves them. An event tells the consumer what to do with partitions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final, TypeGuard

from attrs import define, frozen

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from raftmq.types import TopicPartition
from raftmq_client.core.call import Call
from raftmq_client.core.group_admin import CommittedOffset
from raftmq_client.core.group_requests import Identity
from raftmq_client.errors import BrokerError, ClientError, Outcome, TimedOutError

COORDINATOR_CODES: Final = frozenset(
    {ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE}
)
FATAL_CODES: Final = frozenset(
    {
        ErrorCode.INVALID_GROUP_ID,
        ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
        ErrorCode.INVALID_SESSION_TIMEOUT,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_MAX_SIZE_REACHED,
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.UNSUPPORTED_VERSION,
    }
)


OUTDATED_CODES: Final = frozenset(
    {
        ErrorCode.REBALANCE_IN_PROGRESS,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.UNKNOWN_MEMBER_ID,
    }
)


UNKNOWN_TOPIC_TRIES: Final = 5
"""A topic that the coordinator does not know may be so new that it will in a moment; or it is gone,
and whatever waits behind its commit waits for nothing."""


def is_final(error: ClientError) -> TypeGuard[BrokerError]:
    """True when this group can never be used so; asking again would never end."""
    return isinstance(error, BrokerError) and error.code in FATAL_CODES


def is_outdated(error: ClientError) -> bool:
    """True when the group went on without this member; it joins again and reads on from there."""
    return isinstance(error, BrokerError) and error.code in OUTDATED_CODES


class MemberState(Enum):
    """Where a member stands."""

    IDLE = "idle"
    """Not subscribed, or left."""
    GIVING_UP = "giving up"
    """Waits until the consumer has given its partitions up."""
    UNJOINED = "unjoined"
    """Wants to join; a JoinGroup is due."""
    JOINING = "joining"
    ASSIGNING = "assigning"
    """Leads the group and waits for metadata of all its topics."""
    SYNCING = "syncing"
    LOOKING_UP = "looking up"
    """Has its partitions, waits for their committed offsets."""
    STABLE = "stable"


@define
class GaveUp:
    """Event: stop reading these."""

    partitions: tuple[TopicPartition, ...]
    is_lost: bool
    """Others may read them already: commit nothing. It may become so while the event is told."""


@frozen
class Assigned:
    """Event: read these from their committed offsets, where they have one."""

    partitions: tuple[TopicPartition, ...]
    committed: Mapping[TopicPartition, CommittedOffset]
    is_incremental: bool = False
    """Cooperative: these come on top of what is read already."""


GroupEvent = GaveUp | Assigned


@frozen
class GroupOptions:
    """How a member behaves. Times in milliseconds, Kafka's defaults."""

    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 60_000
    heartbeat_interval_ms: float = 3_000
    max_poll_interval_ms: float = 300_000
    request_timeout_ms: float = 30_000
    backoff_ms: float = 50
    backoff_max_ms: float = 1_000
    assignors: tuple[str, ...] = ("range", "roundrobin")
    instance_id: str | None = None


@define(eq=False)
class Pending:
    """A commit or a lookup of committed offsets, until it is done."""

    request: Callable[[Identity], Callable[[int], Struct]]
    read: Callable[[Struct], Any]
    api: int
    deadline: float
    partitions: frozenset[TopicPartition] = frozenset()
    """Whose positions a commit saves."""
    is_members: bool = False
    """A commit that the coordinator must be able to fence: it needs a generation."""
    is_done: bool = False
    result: Any = None
    error: ClientError | None = None
    last_error: ClientError | None = None
    call: Call | None = None
    """The last try."""
    was_sent_before: bool = False
    _unknown_topics: int = 0
    then: Callable[[Pending], None] | None = None
    """Told once it is done."""

    @property
    def was_sent(self) -> bool:
        """True when bytes of it have left."""
        return self.was_sent_before or (self.call is not None and self.call.sent)

    def may_try_again(self, error: ClientError) -> bool:
        """Whether it is worth another try after this refusal."""
        if isinstance(error, BrokerError) and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            self._unknown_topics += 1
            return self._unknown_topics < UNKNOWN_TOPIC_TRIES
        return error.retriable

    def settle(self, result: Any, error: ClientError | None) -> None:
        """Finish once."""
        if not self.is_done:
            self.is_done, self.result, self.error = True, result, error
            if self.then is not None:
                self.then(self)


def expire(pending: deque[Pending], now: float) -> float:
    """Finish what was not done in time; when to look again."""
    for item in [item for item in pending if item.deadline <= now]:
        pending.remove(item)
        reason = item.last_error or "no coordinator was reached"
        sent = item.was_sent and item.api == ApiKey.OFFSET_COMMIT
        item.settle(None, TimedOutError(f"not done in time: {reason}", sent=sent))
    return min((item.deadline for item in pending), default=float("inf"))


def refuse(pending: deque[Pending], error: BrokerError) -> None:
    """Finish all of them with what stands against them; of what was sent nobody knows."""
    while pending:
        item = pending.popleft()
        told = BrokerError(error.number, error.message, about=error.about)
        if item.was_sent:
            told.outcome = Outcome.UNKNOWN
        item.settle(None, told)


def fence(pending: deque[Pending], given_up: Iterable[TopicPartition]) -> None:
    """Send no commit of these any more, not even again: they are others', who go on from there.

    In a later generation of this member the coordinator could not tell that it is an old one.
    """
    gone = frozenset(given_up)
    _refuse_outdated(pending, [item for item in pending if item.partitions & gone])


def fence_member(pending: deque[Pending]) -> None:
    """Send no commit of a member that was put out: without a generation nothing would stop it."""
    _refuse_outdated(pending, [item for item in pending if item.is_members])


def outdated(about: str) -> BrokerError:
    """What a commit ends with that the coordinator must not see."""
    return BrokerError(ErrorCode.ILLEGAL_GENERATION, about=about)


def _refuse_outdated(pending: deque[Pending], items: Iterable[Pending]) -> None:
    for item in items:
        pending.remove(item)
        error = outdated("commit of what was given up since")
        if item.was_sent:
            error.outcome = Outcome.UNKNOWN
        item.settle(None, error)
