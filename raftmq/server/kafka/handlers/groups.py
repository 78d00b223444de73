"""Consumer groups: from the wire's versions to the coordinator's values and back.

Owns what differs between versions of a request and where each puts its error; decides nothing about
groups. Requests die here: the coordinator sees plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from raftmq.errors import ErrorCode
from raftmq.groups.coordinator import (
    FetchedOffsets,
    GroupDescription,
    LeaveResult,
    OffsetsDeleted,
)
from raftmq.groups.model import JoinRequest, JoinResult, SyncResult
from raftmq.metadata.commands import CommittedOffset
from raftmq.metadata.image import LEVEL_OF_TRANSACTIONS, RAFTMQ_LEVEL
from raftmq.promise import Promise
from raftmq.protocol import ApiKey, Struct
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import TURN_PARTITIONS, Work, all_of, in_turns, then, value_of
from raftmq.types import TopicPartition

Answer = Any  # a Struct, the Promise of one, or work that makes one

GROUPS_PER_TURN: Final = 64

GROUP_KEY: Final = 0
TRANSACTION_KEY: Final = 1
GROUP_TYPE: Final = "classic"
GROUP_OPERATIONS: Final = 0xD48
"""Bits of AclOperation: read, delete, describe, describe configs, alter configs."""
NO_OPERATIONS: Final = -(1 << 31)

_MANY_KEYS_FROM: Final = 4  # FindCoordinator (KIP-699)
_MEMBER_ID_REQUIRED_FROM: Final = 4  # JoinGroup (KIP-394)
_NULL_PROTOCOL_FROM: Final = 7  # JoinGroup (KIP-559)
_SKIP_ASSIGNMENT_FROM: Final = 9  # JoinGroup (KIP-814)
_PROTOCOL_NAMED_FROM: Final = 5  # SyncGroup (KIP-559)
_MANY_MEMBERS_FROM: Final = 3  # LeaveGroup (KIP-345)
_TOP_LEVEL_ERROR_FROM: Final = 2  # OffsetFetch
_MANY_GROUPS_FROM: Final = 8  # OffsetFetch (KIP-709)
_REQUIRE_STABLE_FROM: Final = 7  # OffsetFetch (KIP-447)
_NOT_FOUND_FROM: Final = 6  # DescribeGroups (KIP-1043)


# ---- FindCoordinator ----


def handle_find_coordinator(
    broker: Broker, context: RequestContext, request: Struct
) -> Work[Struct]:
    """Answer FindCoordinator from this node's image."""
    listener = context.listener_name
    if context.api_version >= _MANY_KEYS_FROM:
        kind = request.key_type
        found = yield from in_turns(
            dict.fromkeys(request.coordinator_keys),
            lambda key: _coordinator(broker, kind, key, listener),
        )
        return Struct(coordinators=found)
    one = _coordinator(broker, request.key_type, request.key, listener)
    return Struct(
        error_code=one.error_code,
        error_message=one.error_message,
        node_id=one.node_id,
        host=one.host,
        port=one.port,
    )


def _coordinator(broker: Broker, key_type: int, key: str, listener: str) -> Struct:
    error, message = ErrorCode.COORDINATOR_NOT_AVAILABLE, "no live broker"
    if key_type == TRANSACTION_KEY and not broker.transactions.is_offered:
        # At most errors librdkafka and kafkajs ask again for ever; at this one they give up.
        error = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        message = f"transactions need {RAFTMQ_LEVEL} {LEVEL_OF_TRANSACTIONS}"
    elif key_type not in (GROUP_KEY, TRANSACTION_KEY):
        error, message = ErrorCode.INVALID_REQUEST, f"there are no coordinators of type {key_type}"
    else:
        is_group = key_type == GROUP_KEY
        node_id = broker.coordinator.find(key) if is_group else broker.transactions.find(key)
        for endpoint in broker.endpoints([node_id], listener) if node_id is not None else ():
            return Struct(
                key=key,
                node_id=endpoint.node_id,
                host=endpoint.host,
                port=endpoint.port,
                error_code=int(ErrorCode.NONE),
                error_message=None,
            )
    return Struct(
        key=key, node_id=-1, host="", port=-1, error_code=int(error), error_message=message
    )


# ---- membership ----


def handle_join_group(broker: Broker, context: RequestContext, request: Struct) -> Answer:
    """Answer JoinGroup when the next generation's members are known."""
    version = context.api_version
    session_ms: int = request.session_timeout
    # Version 0 has no rebalance timeout of its own: the session timeout is used (KIP-62).
    rebalance_ms = session_ms if version == 0 else request.rebalance_timeout
    joined: Promise[JoinResult] = broker.coordinator.join(
        request.group_id,
        JoinRequest(
            member_id=request.member_id,
            instance_id=request.group_instance_id,
            client_id=(context.client_id or "")[: broker.config.client_id_length_max],
            client_host=f"/{context.host}",
            session_timeout_ms=session_ms,
            rebalance_timeout_ms=rebalance_ms,
            protocol_type=request.protocol_type,
            protocols=tuple((p.name, bytes(p.metadata)) for p in request.protocols),
            requires_member_id=version >= _MEMBER_ID_REQUIRED_FROM,
            may_skip_assignment=version >= _SKIP_ASSIGNMENT_FROM,
        ),
    )
    return then(joined, partial(_join_answer, version))


def _join_answer(version: int, result: JoinResult) -> Struct:
    protocol = result.protocol
    if protocol is None and version < _NULL_PROTOCOL_FROM:
        protocol = ""
    return Struct(
        error_code=int(result.error),
        generation_id=result.generation,
        protocol_type=result.protocol_type,
        protocol_name=protocol,
        leader=result.leader,
        skip_assignment=result.skip_assignment,
        member_id=result.member_id,
        members=[
            Struct(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                metadata=member.metadata,
            )
            for member in result.members
        ],
    )


def handle_sync_group(broker: Broker, context: RequestContext, request: Struct) -> Answer:
    """Answer SyncGroup when the generation is applied in the metadata group."""
    if context.api_version >= _PROTOCOL_NAMED_FROM and (
        request.protocol_type is None or request.protocol_name is None
    ):
        return _sync_answer(SyncResult(ErrorCode.INCONSISTENT_GROUP_PROTOCOL))
    synced: Promise[SyncResult] = broker.coordinator.sync(
        request.group_id,
        request.generation_id,
        request.member_id,
        request.group_instance_id,
        [(a.member_id, bytes(a.assignment)) for a in request.assignments],
        protocol_type=request.protocol_type,
        protocol=request.protocol_name,
    )
    return then(synced, _sync_answer)


def _sync_answer(result: SyncResult) -> Struct:
    return Struct(
        error_code=int(result.error),
        protocol_type=result.protocol_type,
        protocol_name=result.protocol,
        assignment=result.assignment,
    )


def handle_heartbeat(broker: Broker, context: RequestContext, request: Struct) -> Answer:
    """Answer Heartbeat."""
    heard: Promise[ErrorCode] = broker.coordinator.heartbeat(
        request.group_id, request.generation_id, request.member_id, request.group_instance_id
    )
    return then(heard, _code_answer)


def _code_answer(error: ErrorCode) -> Struct:
    return Struct(error_code=int(error))


def handle_leave_group(broker: Broker, context: RequestContext, request: Struct) -> Answer:
    """Answer LeaveGroup: one member before v3, a list from then on."""
    if context.api_version < _MANY_MEMBERS_FROM:
        left: Promise[LeaveResult] = broker.coordinator.leave(
            request.group_id, [(request.member_id, None)]
        )
        return then(left, _only_answer)
    return _leave_many(broker, request)


def _leave_many(broker: Broker, request: Struct) -> Work[Struct]:
    named: list[tuple[str, str | None]] = yield from in_turns(
        request.members, lambda member: (member.member_id, member.group_instance_id)
    )
    if len(named) > broker.coordinator.config.size_max:
        # No group has so many members, and asking for each of them would take long.
        return Struct(error_code=int(ErrorCode.INVALID_REQUEST), members=[])
    result = yield from value_of(broker.coordinator.leave(request.group_id, named))
    rows = yield from in_turns(
        zip(named, result.members, strict=False),
        lambda one: Struct(
            member_id=one[0][0], group_instance_id=one[0][1], error_code=int(one[1])
        ),
    )
    return Struct(error_code=int(result.error), members=rows)


def _only_answer(result: LeaveResult) -> Struct:
    return _code_answer(result.error or result.members[0])


# ---- offsets ----


def handle_offset_commit(broker: Broker, context: RequestContext, request: Struct) -> Work[Struct]:
    """Answer OffsetCommit when the offsets are applied; unknown partitions are left out."""
    image = broker.image
    known: dict[tuple[str, int], CommittedOffset] = {}  # of one partition the last one counts
    passed_over: dict[tuple[str, int], ErrorCode] = {}
    count = 0
    for topic in request.topics:
        for partition in topic.partitions:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            key = topic.name, partition.partition_index
            at = broker.views.committed_at(*key)
            if not broker.views.takes_commit(*key):
                passed_over[key] = ErrorCode.NONE
            elif image.committed_since(at) is not None:
                known[key] = CommittedOffset(
                    topic=at.topic,
                    partition=at.partition,
                    offset=partition.committed_offset,
                    leader_epoch=partition.committed_leader_epoch,
                    metadata=partition.committed_metadata or "",
                )
    committed: Promise[tuple[ErrorCode, ...]] = broker.coordinator.commit(
        request.group_id,
        request.generation_id_or_member_epoch,
        request.member_id,
        request.group_instance_id,
        list(known.values()),
        known_version=image.structure_version,
    )
    codes = yield from value_of(committed)
    of = {**passed_over, **dict(zip(known, codes, strict=True))}
    return Struct(topics=(yield from per_partition(request.topics, of)))


def per_partition(
    topics: Sequence[Struct], of: Mapping[tuple[str, int], ErrorCode]
) -> Work[list[Struct]]:
    """The rows of an answer with a code for each partition that a request names."""
    missing = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    count = 0
    rows = []
    for topic in topics:
        partitions = []
        for partition in topic.partitions:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            index = partition.partition_index
            code = int(of.get((topic.name, index), missing))
            partitions.append(Struct(partition_index=index, error_code=code))
        rows.append(Struct(name=topic.name, partitions=partitions))
    return rows


def handle_offset_fetch(broker: Broker, context: RequestContext, request: Struct) -> Work[Struct]:
    """Answer OffsetFetch after a read barrier: one group before v8, a list from then on."""
    version = context.api_version
    if version < _MANY_GROUPS_FROM:
        result = yield from value_of(broker.coordinator.fetch_offsets(request.group_id))
        is_old = version < _TOP_LEVEL_ERROR_FROM
        is_strict = version >= _REQUIRE_STABLE_FROM and request.require_stable
        topics = yield from _saved(
            broker, request.topics, result, with_error=is_old, is_strict=is_strict
        )
        return Struct(topics=topics, error_code=int(result.error))
    names = list(dict.fromkeys(group.group_id for group in request.groups))
    fetches = yield from in_turns(names, broker.coordinator.fetch_offsets, GROUPS_PER_TURN)
    results = dict(zip(names, (yield from all_of(fetches)), strict=True))
    groups = []
    for count, group in enumerate(request.groups, 1):
        if count % GROUPS_PER_TURN == 0:
            yield None
        result = results[group.group_id]
        topics = yield from _saved(
            broker, group.topics, result, with_error=False, is_strict=request.require_stable
        )
        groups.append(Struct(group_id=group.group_id, topics=topics, error_code=int(result.error)))
    return Struct(groups=groups)


def _saved(
    broker: Broker,
    topics: Sequence[Struct] | None,
    result: FetchedOffsets,
    *,
    with_error: bool,
    is_strict: bool,
) -> Work[list[Struct]]:
    """The asked partitions' offsets, -1 where there is none; all of them when none is named.

    `is_strict`: where a transaction may change one, that is said instead (KIP-447).
    """
    if result.error is not ErrorCode.NONE and not with_error:
        return []
    wanted: dict[str, list[int]] = {}
    if topics is None:
        for at in map(broker.views.shown_at, sorted(result.offsets)):
            wanted.setdefault(at.topic, []).append(at.partition)
    else:
        for topic in topics:
            wanted.setdefault(topic.name, []).extend(topic.partition_indexes)
    rows = []
    count = 0
    for name, indexes in wanted.items():
        partitions = []
        for index in indexes:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            at = broker.views.committed_at(name, index)
            partitions.append(_saved_one(result, at, must_be_stable=is_strict))
        rows.append(Struct(name=name, partitions=partitions))
    return rows


def _saved_one(result: FetchedOffsets, at: TopicPartition, *, must_be_stable: bool) -> Struct:
    saved = result.offsets.get(at)
    if must_be_stable and not result.is_stable(at):
        return Struct(
            partition_index=at.partition,
            committed_offset=-1,
            committed_leader_epoch=-1,
            metadata="",
            error_code=int(ErrorCode.UNSTABLE_OFFSET_COMMIT),
        )
    return Struct(
        partition_index=at.partition,
        committed_offset=-1 if saved is None else saved.offset,
        committed_leader_epoch=-1 if saved is None else saved.leader_epoch,
        metadata="" if saved is None else saved.metadata,
        error_code=int(result.error),
    )


def handle_offset_delete(broker: Broker, context: RequestContext, request: Struct) -> Work[Struct]:
    """Answer OffsetDelete."""
    image = broker.image
    known: dict[TopicPartition, None] = {}
    count = 0
    for topic in request.topics:
        for partition in topic.partitions:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            at = TopicPartition(topic.name, partition.partition_index)
            if image.committed_since(at) is not None:
                known[at] = None
    asked: Promise[OffsetsDeleted] = broker.coordinator.delete_offsets(
        request.group_id, list(known)
    )
    result = yield from value_of(asked)
    if result.error is not ErrorCode.NONE:
        return Struct(error_code=int(result.error), topics=[])
    of = {(at.topic, at.partition): code for at, code in zip(known, result.partitions, strict=True)}
    return Struct(error_code=0, topics=(yield from per_partition(request.topics, of)))


# ---- operators ----


def handle_describe_groups(
    broker: Broker, context: RequestContext, request: Struct
) -> Work[Struct]:
    """Answer DescribeGroups; a group that is named twice is described once."""
    version = context.api_version
    operations = GROUP_OPERATIONS if request.include_authorized_operations else NO_OPERATIONS
    names = dict.fromkeys(request.groups)
    asked = yield from in_turns(names, broker.coordinator.describe, GROUPS_PER_TURN)
    groups = yield from all_of(asked)
    rows = yield from in_turns(
        groups, lambda group: _described(version, operations, group), GROUPS_PER_TURN
    )
    return Struct(groups=rows)


def _described(version: int, operations: int, group: GroupDescription) -> Struct:
    error, message = group.error, None
    if error is ErrorCode.GROUP_ID_NOT_FOUND:
        message = f"Group {group.name} not found."
        if version < _NOT_FOUND_FROM:
            error = ErrorCode.NONE  # older clients recognize it by its state, Dead
    return Struct(
        error_code=int(error),
        error_message=message,
        group_id=group.name,
        group_state=group.phase.value,
        protocol_type=group.protocol_type,
        protocol_data=group.protocol,
        members=[
            Struct(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.metadata,
                member_assignment=member.assignment,
            )
            for member in group.members
        ],
        authorized_operations=operations,
    )


def handle_list_groups(broker: Broker, context: RequestContext, request: Struct) -> Struct:
    """Answer ListGroups: the groups of this node, as each broker lists its own."""
    states = [state.lower() for state in request.states_filter]
    types = [kind.lower() for kind in request.types_filter]
    if types and GROUP_TYPE not in types:
        return Struct(error_code=0, groups=[])
    return Struct(
        error_code=0,
        groups=[
            Struct(
                group_id=group.name,
                protocol_type=group.protocol_type,
                group_state=group.phase.value,
                group_type=GROUP_TYPE,
            )
            for group in broker.coordinator.list_groups()
            if not states or group.phase.value.lower() in states
        ],
    )


def handle_delete_groups(broker: Broker, context: RequestContext, request: Struct) -> Work[Struct]:
    """Answer DeleteGroups; a group that is named twice is deleted once."""
    names = list(dict.fromkeys(request.groups_names))
    asked = yield from in_turns(names, broker.coordinator.delete, GROUPS_PER_TURN)
    codes = yield from all_of(asked)
    rows = yield from in_turns(
        zip(names, codes, strict=True),
        lambda one: Struct(group_id=one[0], error_code=int(one[1])),
    )
    return Struct(results=rows)


HANDLERS: Final[dict[ApiKey, Callable[[Broker, RequestContext, Struct], Answer]]] = {
    ApiKey.FIND_COORDINATOR: handle_find_coordinator,
    ApiKey.JOIN_GROUP: handle_join_group,
    ApiKey.SYNC_GROUP: handle_sync_group,
    ApiKey.HEARTBEAT: handle_heartbeat,
    ApiKey.LEAVE_GROUP: handle_leave_group,
    ApiKey.OFFSET_COMMIT: handle_offset_commit,
    ApiKey.OFFSET_FETCH: handle_offset_fetch,
    ApiKey.OFFSET_DELETE: handle_offset_delete,
    ApiKey.DESCRIBE_GROUPS: handle_describe_groups,
    ApiKey.LIST_GROUPS: handle_list_groups,
    ApiKey.DELETE_GROUPS: handle_delete_groups,
}
