"""Commands about consumer groups, and what they leave in the metadata image.

Owns their shapes alone; `group_image.py` says what each does. A group's state is the queue's
memory of who reads what: generation, members with their assignments, committed offsets.

Invariants: every command but ClaimGroup names the coordinator epoch under which it was made, and
offset commits name generation and member too; all are compared *at apply*, so a coordinator that
was replaced, or a member of an older generation, changes nothing however late its command arrives.
"""

from __future__ import annotations

from typing import Final

import msgspec

from raftmq.types import NodeId

UNDATED: Final = -1
"""A time for expiry that nobody could tell yet; ExpireOffsets tells it later."""


class GroupMember(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One member of a generation, with all that a next coordinator needs to go on with it."""

    member_id: str
    instance_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int
    rebalance_timeout_ms: int
    subscription: bytes = b""
    """The member's metadata for the protocol that the group chose; opaque."""
    assignment: bytes = b""
    """What the leader gave it; opaque."""


class CommittedOffset(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A group's saved position in one partition."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    timestamp_ms: int = 0
    """When it was committed, or a little later, or UNDATED; for expiry alone."""


class ExpiredOffset(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An offset that has expired, unless it was committed anew since `timestamp_ms`."""

    topic: str
    partition: int
    timestamp_ms: int


class GroupCommand(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Base of all group commands."""

    group: str


class ClaimGroup(GroupCommand, frozen=True, kw_only=True):
    """`node_id`, in its incarnation `broker_epoch`, wants to coordinate the group.

    Refused while another live broker holds the claim: a broker that comes back takes nothing away.
    """

    node_id: NodeId
    broker_epoch: int


class ReleaseGroup(GroupCommand, frozen=True, kw_only=True):
    """The holder drains: the claim passes to `successor`, or with -1 to whoever claims next."""

    coordinator_epoch: int
    successor: NodeId = NodeId(-1)


class Generation(GroupCommand, frozen=True, kw_only=True):
    """A generation is complete: these members own these assignments from now on.

    Also says that a group has become empty (no members, a new generation).
    """

    coordinator_epoch: int
    generation: int
    protocol_type: str = ""
    protocol: str | None = None
    leader: str | None = None
    members: tuple[GroupMember, ...] = ()
    timestamp_ms: int = 0


class ReplaceMember(GroupCommand, frozen=True, kw_only=True):
    """A static member has come back under a new member id; its assignment stays (KIP-345)."""

    coordinator_epoch: int
    generation: int
    instance_id: str
    old_member_id: str
    new_member_id: str
    client_id: str = ""
    client_host: str = ""
    session_timeout_ms: int
    rebalance_timeout_ms: int


class CommitOffsets(GroupCommand, frozen=True, kw_only=True):
    """Save positions. Generation -1 with member "" is a consumer outside group management."""

    coordinator_epoch: int
    generation: int = -1
    member_id: str = ""
    instance_id: str | None = None
    offsets: tuple[CommittedOffset, ...] = ()


class CommitMany(GroupCommand, frozen=True, kw_only=True):
    """Commits of several groups and members in one command; each is judged by itself."""

    group: str = ""
    commits: tuple[CommitOffsets, ...]


class DeleteOffsets(GroupCommand, frozen=True, kw_only=True):
    """Forget positions, by order of an operator."""

    coordinator_epoch: int
    partitions: tuple[tuple[str, int], ...]


class ExpireOffsets(GroupCommand, frozen=True, kw_only=True):
    """Forget positions that nobody has used for long, and the group with the last of them.

    `now_ms`: from then on what is UNDATED ages.
    """

    coordinator_epoch: int
    expired: tuple[ExpiredOffset, ...] = ()
    now_ms: int = UNDATED


class DeleteGroup(GroupCommand, frozen=True, kw_only=True):
    """Forget an empty group with its offsets."""

    coordinator_epoch: int


GROUP_COMMANDS: Final = (
    ClaimGroup,
    ReleaseGroup,
    Generation,
    ReplaceMember,
    CommitOffsets,
    CommitMany,
    DeleteOffsets,
    ExpireOffsets,
    DeleteGroup,
)


class Claimed(msgspec.Struct, frozen=True):
    """Result of ClaimGroup."""

    coordinator_epoch: int


class GroupDone(msgspec.Struct, frozen=True):
    """Result of every other command that was accepted."""


class CommitsDone(msgspec.Struct, frozen=True):
    """Result of CommitMany: an ErrorCode for each of its commits, in order."""

    codes: tuple[int, ...]
