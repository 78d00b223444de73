"""Admin requests about consumer groups, as values; see `core/admin.py`.

Owns their bodies in all versions and the reading of answers, for administrators and members alike.
Never routes, sends or repeats anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from attrs import frozen

from raftmq.protocol import ApiKey, Struct
from raftmq.types import TopicPartition
from raftmq_client.core.admin import Operation, Route, by_topic, check_named
from raftmq_client.errors import CorruptAnswerError, check_code

GROUP: Final = 0
TRANSACTIONS: Final = 1
"""What FindCoordinator looks for."""


@frozen
class GroupListing:
    """One line of a list of groups."""

    group: str
    protocol_type: str
    state: str
    group_type: str
    coordinator: int = -1


@frozen
class GroupMember:
    """A member as its coordinator sees it."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    assignment: tuple[TopicPartition, ...]


@frozen
class GroupDescription:
    """A group as its coordinator sees it."""

    group: str
    state: str
    protocol_type: str
    protocol: str
    members: tuple[GroupMember, ...]
    coordinator: int = -1


@frozen
class CommittedOffset:
    """A group's saved position in one partition."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""


def list_groups(node: int) -> Operation[list[GroupListing]]:
    """The groups that one broker coordinates."""

    def read(response: Struct) -> list[GroupListing]:
        check_code(response.error_code, about=f"groups of broker {node}")
        return [
            GroupListing(
                item.group_id,
                item.protocol_type,
                _text(item, "group_state"),
                _text(item, "group_type"),
                node,
            )
            for item in response.groups
        ]

    request = Struct(states_filter=[], types_filter=[])
    return Operation(ApiKey.LIST_GROUPS, lambda _: request, read, Route.NODE, node)


def describe_group(
    group: str, decode: Callable[[bytes], Iterable[TopicPartition]]
) -> Operation[GroupDescription]:
    """A group and its members; `decode` reads a member's assignment."""

    def read(response: Struct) -> GroupDescription:
        item = response.groups[0]
        # v6 says that a group is absent; older answers have a dead group (KIP-1043).
        check_code(item.error_code, _text(item, "error_message"), about=f"group {group!r}")
        members = tuple(
            GroupMember(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host,
                tuple(decode(bytes(member.member_assignment or b""))),
            )
            for member in item.members
        )
        return GroupDescription(
            item.group_id, item.group_state, item.protocol_type, item.protocol_data, members
        )

    request = Struct(groups=[group], include_authorized_operations=False)
    return Operation(ApiKey.DESCRIBE_GROUPS, lambda _: request, read, Route.COORDINATOR, group)


def fetch_offsets(
    group: str, partitions: Iterable[TopicPartition] | None = None
) -> Operation[dict[TopicPartition, CommittedOffset]]:
    """A group's committed offsets; of all partitions for None.

    Offsets of transactions that are not over do not count yet, and are not waited for.
    """
    request, read = offset_fetch(group, partitions, require_stable=False)
    return Operation(
        ApiKey.OFFSET_FETCH,
        request,
        read,
        Route.COORDINATOR,
        group,
        min_version=2 if partitions is None else 1,
    )


def offset_fetch(
    group: str, partitions: Iterable[TopicPartition] | None, *, require_stable: bool = True
) -> tuple[Callable[[int], Struct], Callable[[Struct], dict[TopicPartition, CommittedOffset]]]:
    """Request and reader of OffsetFetch, in the forms before and after v8 (KIP-709).

    `require_stable`: while a transaction that commits offsets is open, the answer is to ask again.
    """
    topics = None
    if partitions is not None:
        topics = [
            Struct(name=topic, partition_indexes=[key.partition for key in keys])
            for topic, keys in by_topic(partitions)
        ]

    def request(version: int) -> Struct:
        if version >= 8:
            item = Struct(group_id=group, member_id=None, member_epoch=-1, topics=topics)
            return Struct(groups=[item], require_stable=require_stable)
        return Struct(group_id=group, topics=topics, require_stable=require_stable)

    def read(response: Struct) -> dict[TopicPartition, CommittedOffset]:
        answer = response.groups[0] if getattr(response, "groups", None) else response
        check_code(answer.error_code or 0, about=f"offsets of group {group!r}")
        found = {}
        for topic in answer.topics or ():
            for item in topic.partitions:
                key = TopicPartition(topic.name, item.partition_index)
                check_code(item.error_code, about=str(key))
                if item.committed_offset >= 0:
                    epoch = getattr(item, "committed_leader_epoch", -1)
                    found[key] = CommittedOffset(item.committed_offset, epoch, item.metadata or "")
        return found

    return request, read


def delete_groups(group: str) -> Operation[None]:
    """Forget an empty group and its offsets."""

    def read(response: Struct) -> None:
        for item in response.results:
            check_code(item.error_code, about=f"group {item.group_id!r}")
        check_named([group], (item.group_id for item in response.results))

    request = Struct(groups_names=[group])
    return Operation(
        ApiKey.DELETE_GROUPS,
        lambda _: request,
        read,
        Route.COORDINATOR,
        group,
        is_repeatable=False,
    )


def find_coordinator(name: str, key_type: int = GROUP) -> Operation[tuple[int, str, int]]:
    """(node, host, port) of the coordinator of a group or transactional id."""
    request, read = coordinator_lookup(name, key_type)
    return Operation(ApiKey.FIND_COORDINATOR, request, read, min_version=min(key_type, 1))


def coordinator_lookup(
    name: str, key_type: int = GROUP
) -> tuple[Callable[[int], Struct], Callable[[Struct], tuple[int, str, int]]]:
    """Request and reader of FindCoordinator, in the forms before and after v4 (KIP-699)."""

    def request(version: int) -> Struct:
        if version >= 4:
            return Struct(coordinator_keys=[name], key_type=key_type)
        if version >= 1:
            return Struct(key=name, key_type=key_type)
        return Struct(key=name)

    def read(response: Struct) -> tuple[int, str, int]:
        several = getattr(response, "coordinators", None)
        answer = several[0] if several else response
        check_code(answer.error_code, answer.error_message, about=f"coordinator of {name!r}")
        if answer.node_id < 0:
            raise CorruptAnswerError(f"coordinator of {name!r}: node {answer.node_id}")
        return answer.node_id, answer.host, answer.port

    return request, read


def _text(item: Struct, name: str) -> str:
    value = getattr(item, name, None)
    return value or ""
