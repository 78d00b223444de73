"""What the coordinator tells of its groups: values for handlers, without a protocol version."""

from __future__ import annotations

from attrs import frozen

from raftmq.errors import ErrorCode
from raftmq.groups.group import Group
from raftmq.groups.membership import Phase
from raftmq.metadata.image import GroupState, OffsetMap


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
    offsets: OffsetMap


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


def describe_saved(state: GroupState) -> GroupDescription:
    """A group that nobody has spoken to since its coordinator went."""
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
