"""The values of a group's state machine: limits, requests, results, members, phases.

Owns values only; `group.py` says how they change. A handler makes a request of the wire's form, and
the wire's form of a result; so nothing here knows a version of the protocol.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from attrs import define, field, frozen

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import GroupCommand
from raftmq.promise import Promise


@frozen(slots=True, kw_only=True)
class GroupConfig:
    """Limits and times of consumer groups: Kafka's names and meanings, in its order.

    `initial_rebalance_delay_ms` is 500 where Kafka has 3000: the first members of a group wait that
    long for each other, which spares a large group many rebalances but makes every small one, and
    every test, start late.
    """

    session_timeout_ms_min: int = 6_000  # group.min.session.timeout.ms
    session_timeout_ms_max: int = 1_800_000  # group.max.session.timeout.ms
    initial_rebalance_delay_ms: int = 500  # group.initial.rebalance.delay.ms
    size_max: int = 10_000  # group.max.size, there without a limit
    new_member_join_timeout_ms: int = 300_000  # a constant there
    bytes_max: int = 4 << 20  # group_bytes_max: of all members' subscriptions; of all assignments
    offset_metadata_chars_max: int = 4_096  # offset.metadata.max.bytes, chars of Java in truth
    commit_metadata_bytes_max: int = 1 << 20  # of all offsets of one request, in one command
    commit_linger_ms: int = 5  # group.coordinator.append.linger.ms
    offsets_retention_ms: int = 7 * 86_400_000  # offsets.retention.minutes
    retention_check_ms: int = 600_000  # offsets.retention.check.interval.ms
    group_id_bytes_max: int = 4_096  # a key of the metadata state, so it has a limit
    instance_id_length_max: int = 249  # of group.instance.id, as Kafka's own client has it
    member_id_length_max: int = 1_024  # no longer one is given out, so none can be meant


class Phase(Enum):
    """Kafka's names of the states of a group."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"  # members are asked to join again
    COMPLETING = "CompletingRebalance"  # joined; the leader's assignment is awaited
    STABLE = "Stable"
    DEAD = "Dead"


TRANSITIONS: Final[dict[Phase, tuple[Phase, ...]]] = {
    Phase.EMPTY: (Phase.PREPARING, Phase.DEAD),
    Phase.PREPARING: (Phase.COMPLETING, Phase.EMPTY, Phase.DEAD),
    Phase.COMPLETING: (Phase.STABLE, Phase.PREPARING, Phase.DEAD),
    Phase.STABLE: (Phase.PREPARING, Phase.DEAD),
    Phase.DEAD: (),
}

Protocols = tuple[tuple[str, bytes], ...]


@frozen(slots=True)
class JoinRequest:
    """What a consumer says when it joins."""

    member_id: str = ""
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int = 45_000
    rebalance_timeout_ms: int = 300_000
    protocol_type: str = "consumer"
    protocols: Protocols = ()
    requires_member_id: bool = False  # JoinGroup v4 and later (KIP-394)
    may_skip_assignment: bool = False  # JoinGroup v9 and later (KIP-814)

    @property
    def size_bytes(self) -> int:
        """Bytes of it that the group keeps."""
        words = len(self.protocol_type) + len(self.instance_id or "")
        return words + sum(len(name) + len(content) for name, content in self.protocols)


@frozen(slots=True)
class JoinedMember:
    """A member, as JoinGroup describes it to the leader."""

    member_id: str
    instance_id: str | None
    metadata: bytes


@frozen(slots=True)
class JoinResult:
    """The answer to JoinGroup."""

    error: ErrorCode = ErrorCode.NONE
    member_id: str = ""
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False


@frozen(slots=True)
class SyncResult:
    """The answer to SyncGroup."""

    error: ErrorCode = ErrorCode.NONE
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


@define(slots=True, eq=False)
class Member:
    """One consumer of the group."""

    member_id: str
    request: JoinRequest
    deadline_ms: float = 0.0
    """When its session ends, unless it is heard before."""
    assignment: bytes = b""
    join: Promise[JoinResult] | None = None
    sync: Promise[SyncResult] | None = None
    is_new: bool = True
    has_synced: bool = False

    @property
    def instance_id(self) -> str | None:
        """Its group.instance.id, None for a dynamic member."""
        return self.request.instance_id

    def metadata(self, protocol: str | None) -> bytes:
        """Its subscription for one protocol."""
        for name, content in self.request.protocols:
            if name == protocol:
                return content
        return b""

    @property
    def is_waiting(self) -> bool:
        """True while a request of its own is parked here: its session does not run out."""
        return self.sync is not None or (self.join is not None and not self.is_new)

    def hear(self, now_ms: float) -> None:
        """The member was heard; the first deadline of a new member, a longer one, still holds."""
        heard_ms = now_ms + self.request.session_timeout_ms
        self.deadline_ms = max(self.deadline_ms, heard_ms) if self.is_new else heard_ms


@define(slots=True)
class Effects:
    """What a step leaves to do: commands to propose first, then answers to give."""

    commands: list[GroupCommand] = field(factory=list)
    answers: list[tuple[Promise[Any], Any]] = field(factory=list)


def common_protocols(lists: list[Protocols]) -> list[str]:
    """Protocols that every list has, in the order of the first."""
    first, *others = lists
    return [
        name for name, _ in first if all(name in [other for other, _ in rest] for rest in others)
    ]
