"""Bodies of group requests, by version.

Pure: what a member says of itself is frozen in an `Identity` when a request is made, so that one
that leaves late still carries the generation it was meant for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from raftmq.protocol import ApiKey, Struct
from raftmq.types import TopicPartition
from raftmq_client.core.admin import Operation, Route, by_topic, check_named
from raftmq_client.core.assignors import PROTOCOL_TYPE
from raftmq_client.core.group_admin import CommittedOffset
from raftmq_client.errors import BrokerError

_NO_GENERATION: Final = -1
"""Of commits by nobody's member (Kafka's OffsetCommit, "simple consumers")."""


@frozen
class Identity:
    """Who speaks: the fencing fields of every group request."""

    group: str
    generation: int
    member_id: str
    instance_id: str | None = None

    def fields(self, version: int, *, instance_from: int) -> dict[str, Any]:
        """The fields as most group requests name them."""
        fields: dict[str, Any] = {
            "group_id": self.group,
            "generation_id": self.generation,
            "member_id": self.member_id,
        }
        if version >= instance_from:
            fields["group_instance_id"] = self.instance_id
        return fields


def join_request(
    who: Identity,
    assignors: Sequence[str],
    metadata: bytes,
    *,
    session_timeout_ms: int,
    rebalance_timeout_ms: int,
) -> Callable[[int], Struct]:
    """JoinGroup."""
    protocols = [Struct(name=name, metadata=metadata) for name in assignors]

    def request(version: int) -> Struct:
        fields = who.fields(version, instance_from=5)
        del fields["generation_id"]
        fields["session_timeout"] = session_timeout_ms
        fields["protocol_type"] = PROTOCOL_TYPE
        fields["protocols"] = protocols
        if version >= 1:
            fields["rebalance_timeout"] = rebalance_timeout_ms
        return Struct(**fields)

    return request


def sync_request(
    who: Identity, protocol: str, assignments: Sequence[Struct]
) -> Callable[[int], Struct]:
    """SyncGroup; `assignments` is empty but for the leader."""

    def request(version: int) -> Struct:
        fields = who.fields(version, instance_from=3)
        fields["assignments"] = list(assignments)
        if version >= 5:
            fields["protocol_type"] = PROTOCOL_TYPE
            fields["protocol_name"] = protocol
        return Struct(**fields)

    return request


def heartbeat_request(who: Identity) -> Callable[[int], Struct]:
    """Heartbeat."""
    return lambda version: Struct(**who.fields(version, instance_from=3))


def leave_request(who: Identity) -> Callable[[int], Struct]:
    """LeaveGroup, of one member."""

    def request(version: int) -> Struct:
        if version >= 3:
            return Struct(group_id=who.group, members=[Struct(member_id=who.member_id)])
        return Struct(group_id=who.group, member_id=who.member_id)

    return request


def commit_request(
    who: Identity, offsets: Mapping[TopicPartition, CommittedOffset]
) -> Callable[[int], Struct]:
    """OffsetCommit."""

    def request(version: int) -> Struct:
        fields = who.fields(version, instance_from=7)
        fields["generation_id_or_member_epoch"] = fields.pop("generation_id")
        fields["topics"] = [
            Struct(
                name=topic,
                partitions=[_committed(version, key, offsets[key]) for key in keys],
            )
            for topic, keys in by_topic(offsets)
        ]
        return Struct(**fields)

    return request


def read_commit(response: Struct) -> None:
    """Raise what refused a commit.

    Raises:
        BrokerError: the first refusal.
    """
    for topic in response.topics:
        for item in topic.partitions:
            if item.error_code:
                about = f"commit of {topic.name}-{item.partition_index}"
                raise BrokerError(item.error_code, about=about)


def alter_offsets(group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> Operation[None]:
    """Commit for a group as nobody's member; brokers refuse that while it has members."""

    def read(response: Struct) -> None:
        read_commit(response)
        check_named(
            offsets,
            (
                TopicPartition(topic.name, item.partition_index)
                for topic in response.topics
                for item in topic.partitions
            ),
        )

    nobody = Identity(group, _NO_GENERATION, "")
    return Operation(
        ApiKey.OFFSET_COMMIT,
        commit_request(nobody, offsets),
        read,
        Route.COORDINATOR,
        group,
        is_repeatable=False,
    )


def _committed(version: int, key: TopicPartition, offset: CommittedOffset) -> Struct:
    fields: dict[str, Any] = {
        "partition_index": key.partition,
        "committed_offset": offset.offset,
        "committed_metadata": offset.metadata,
    }
    if version >= 6:
        fields["committed_leader_epoch"] = offset.leader_epoch
    return Struct(**fields)
