"""What a client or an operator asks about the cluster as a whole: ApiVersions and UpdateFeatures,
DescribeQuorum, DescribeLogDirs, ElectLeaders.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final
from uuid import UUID

from raftmq.controller.control_plane import QuorumMember, QuorumState
from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import FeatureRequest, Outcome, Outcomes, UpdateFeaturesCall
from raftmq.metadata.features import SAFE_DOWNGRADE, UPGRADE, Ranges
from raftmq.metadata.image import RAFTMQ_LEVEL, MetadataImage
from raftmq.promise import Promise
from raftmq.protocol import ANNOUNCED, ApiKey, Struct, encode_response
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import TURN_PARTITIONS, Work, all_of, in_turns, then
from raftmq.types import METADATA_TOPIC, TopicPartition

PREFERRED: Final = 0
_SOFTWARE: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_SOFTWARE_FROM: Final = 3
_SOFTWARE_MAX: Final = 100
"""So much of it is kept with the connection."""
_LEVEL_0_FROM: Final = 4
"""Older Java clients cannot read a feature whose lowest level is 0 (KAFKA-17492)."""

_encoded_versions: dict[tuple[object, ...], bytes] = {}
_ENCODED_VERSIONS_MAX: Final = 64
"""Levels change seldom, and only operators change them; still the cache is bounded."""
UPDATES_MAX: Final = 100
_UPGRADE_TYPES_FROM: Final = 1
_ONE_ERROR_FROM: Final = 2


def api_versions(broker: Broker, context: RequestContext, request: Struct) -> bytes:
    """Answer the announced ranges and the levels of features; the same bytes for all clients."""
    version = context.api_version
    code = ErrorCode.NONE
    is_named = version >= _SOFTWARE_FROM
    if is_named and not (
        _SOFTWARE.fullmatch(request.client_software_name)
        and _SOFTWARE.fullmatch(request.client_software_version)
    ):
        code = ErrorCode.INVALID_REQUEST  # KIP-511
        broker.metrics.api("api_versions").error(code)
    elif is_named:
        said = f"{request.client_software_name} {request.client_software_version}"
        context.connection.software = said[:_SOFTWARE_MAX]
    image = broker.image
    key = (version, code, broker.supported_text, image.features, image.features_epoch)
    if key not in _encoded_versions:
        if len(_encoded_versions) >= _ENCODED_VERSIONS_MAX:
            _encoded_versions.clear()
        _encoded_versions[key] = _encode_versions(version, code, broker.supported, image)
    return _encoded_versions[key]


def _encode_versions(
    version: int, code: ErrorCode, supported: Ranges, image: MetadataImage
) -> bytes:
    ranges = ANNOUNCED if code is ErrorCode.NONE else {}
    levels = {RAFTMQ_LEVEL: image.level, **image.features}
    return encode_response(
        ApiKey.API_VERSIONS,
        version,
        Struct(
            error_code=code,
            api_keys=[
                Struct(api_key=int(key), min_version=low, max_version=high)
                for key, (low, high) in ranges.items()
            ],
            throttle_time=0,
            supported_features=[
                Struct(name=name, min_version=low, max_version=high)
                for name, (low, high) in sorted(supported.items())
                if low or version >= _LEVEL_0_FROM
            ],
            # Java ignores levels of an epoch that is not above the last one that it knows.
            finalized_features_epoch=max(image.features_epoch, 0),
            finalized_features=[
                Struct(name=name, max_version_level=levels[name], min_version_level=levels[name])
                for name in sorted(levels)
            ],
        ),
    )


def update_features(
    broker: Broker, context: RequestContext, request: Struct
) -> Promise[dict[str, Any]] | dict[str, Any]:
    """Answer UpdateFeatures: all levels of a request are finalized, or none."""
    version = context.api_version
    if len(request.feature_updates) > UPDATES_MAX:
        code, message = ErrorCode.INVALID_REQUEST, f"more than {UPDATES_MAX} features"
        return _features_answer(version, [], code, message)
    names = [update.feature for update in request.feature_updates]
    call = UpdateFeaturesCall(
        updates=tuple(_feature_request(update, version) for update in request.feature_updates),
        timeout_ms=max(request.timeout, 0),
        validate_only=version >= _UPGRADE_TYPES_FROM and bool(request.validate_only),
    )

    def refused(code: ErrorCode, message: str) -> Outcomes:
        return tuple(Outcome(name=name, code=code, message=message) for name in names)

    def answered(outcomes: Outcomes) -> dict[str, Any]:
        rows = [(outcome.name, outcome.code, outcome.message) for outcome in outcomes]
        return _features_answer(version, rows)

    return then(broker.outcomes(call, context.who, refused), answered)


def _feature_request(update: Struct, version: int) -> FeatureRequest:
    if version >= _UPGRADE_TYPES_FROM:
        return FeatureRequest(update.feature, update.max_version_level, update.upgrade_type)
    kind = SAFE_DOWNGRADE if update.allow_downgrade else UPGRADE
    return FeatureRequest(update.feature, update.max_version_level, kind)


def _features_answer(
    version: int,
    rows: list[tuple[str, ErrorCode, str | None]],
    code: ErrorCode = ErrorCode.NONE,
    message: str | None = None,
) -> dict[str, Any]:
    if version >= _ONE_ERROR_FROM:
        for _, refusal, why in rows:
            if refusal is not ErrorCode.NONE:
                code, message = refusal, why
                break
        return {"throttle_time": 0, "error_code": code, "error_message": message}
    return {
        "throttle_time": 0,
        "error_code": code,
        "error_message": message,
        "results": [
            {"feature": name, "error_code": refusal, "error_message": why}
            for name, refusal, why in rows
        ],
    }


def describe_quorum(
    broker: Broker, context: RequestContext, request: Struct
) -> Work[dict[str, Any]]:
    """Answer DescribeQuorum (KIP-595) about the metadata group; a follower asks its leader."""
    told: dict[tuple[str, int], None] = {}
    count = 0
    for topic in request.topics:
        for part in topic.partitions:
            count += 1
            if count % TURN_PARTITIONS == 0:
                yield None
            told[topic.topic_name, part.partition_index] = None  # once, however often it is named
    state: QuorumState | None = None
    if (METADATA_TOPIC, 0) in told:
        (state,) = yield from all_of([broker.quorum_state()])
    topics: dict[str, list[dict[str, Any]]] = {}
    for count, (name, index) in enumerate(told, 1):
        if count % TURN_PARTITIONS == 0:
            yield None
        fields = _quorum_fields(state if (name, index) == (METADATA_TOPIC, 0) else None)
        topics.setdefault(name, []).append({"partition_index": index, **fields})
    answer: dict[str, Any] = {
        "error_code": 0,
        "error_message": None,
        "topics": [{"topic_name": name, "partitions": rows} for name, rows in topics.items()],
    }
    if context.api_version >= 2:
        answer["nodes"] = [
            {
                "node_id": node.node_id,
                "listeners": [
                    {"name": context.listener_name, "host": node.host, "port": node.port}
                ],
            }
            for node in broker.endpoints(broker.metadata_voters(), context.listener_name)
        ]
    return answer


def _quorum_fields(state: QuorumState | None) -> dict[str, Any]:
    if state is None:
        return {
            "error_code": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            "error_message": None,
            "leader_id": -1,
            "leader_epoch": -1,
            "high_watermark": -1,
            "current_voters": [],
            "observers": [],
        }
    return {
        "error_code": ErrorCode.NONE,
        "error_message": None,
        "leader_id": state.leader_id,
        "leader_epoch": state.leader_epoch,
        "high_watermark": state.high_watermark,
        "current_voters": [_member_row(member) for member in state.voters],
        "observers": [_member_row(member) for member in state.observers],
    }


def _member_row(member: QuorumMember) -> dict[str, Any]:
    return {
        "replica_id": member.node_id,
        "replica_directory_id": UUID(int=member.storage_id),
        "log_end_offset": member.log_end_offset,
        "last_fetch_timestamp": member.last_fetch_ms,
        "last_caught_up_timestamp": member.last_caught_up_ms,
    }


def describe_log_dirs(
    broker: Broker, _context: RequestContext, request: Struct
) -> Work[dict[str, Any]]:
    """Answer DescribeLogDirs for the one data folder of this node."""
    wanted: dict[str, set[int]] | None = None
    if request.topics is not None:
        wanted = {}
        for count, topic in enumerate(request.topics, 1):
            if count % TURN_PARTITIONS == 0:
                yield None
            wanted.setdefault(topic.topic, set()).update(topic.partitions)
    topics: dict[str, list[dict[str, Any]]] = {}
    for count, partition in enumerate(list(broker.partitions), 1):
        if count % TURN_PARTITIONS == 0:
            yield None
        name, index = partition.name
        if wanted is not None and index not in wanted.get(name, ()):
            continue
        topics.setdefault(name, []).append(
            {
                "partition_index": index,
                "partition_size": partition.size_bytes,
                "offset_lag": partition.lag,
                "is_future_key": False,
            }
        )
    total_bytes, usable_bytes = _disk_space(str(broker.config.data))
    return {
        "throttle_time": 0,
        "error_code": 0,
        "results": [
            {
                "error_code": 0,
                "log_dir": str(broker.config.data.absolute()),
                "topics": [{"name": name, "partitions": topics[name]} for name in sorted(topics)],
                "total_bytes": total_bytes,
                "usable_bytes": usable_bytes,
            }
        ],
    }


def _disk_space(folder: str) -> tuple[int, int]:
    try:
        space = os.statvfs(folder)
    except OSError:
        return -1, -1  # Kafka's "unknown"
    return space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail


def elect_leaders(broker: Broker, context: RequestContext, request: Struct) -> Work[dict[str, Any]]:
    """Answer ElectLeaders: hand partitions to their preferred leaders."""
    names, names_all = _named(broker, request)
    is_preferred = context.api_version < 1 or request.election_type == PREFERRED
    timeout_ms = max(request.timeout, 0)

    def elect(name: TopicPartition) -> ErrorCode | Promise[ErrorCode]:
        return broker.elect_preferred(name, timeout_ms) if is_preferred else _unclean(broker, name)

    asked = yield from in_turns(names, elect)
    codes = yield from all_of(asked)
    topics: dict[str, list[dict[str, Any]]] = {}
    for count, (name, code) in enumerate(zip(names, codes, strict=True), 1):
        if count % TURN_PARTITIONS == 0:
            yield None
        if names_all and code is ErrorCode.ELECTION_NOT_NEEDED:
            continue  # as in Kafka: asked for all, told what happened
        topics.setdefault(name.topic, []).append(
            {
                "partition_id": name.partition,
                "error_code": code,
                "error_message": None if code is ErrorCode.NONE else code.name,
            }
        )
    return {
        "throttle_time": 0,
        "error_code": 0,
        "replica_election_results": [
            {"topic": topic, "partition_result": rows} for topic, rows in topics.items()
        ],
    }


def _named(broker: Broker, request: Struct) -> tuple[list[TopicPartition], bool]:
    if request.topic_partitions is None:
        every = [
            TopicPartition(topic.name, partition.index)
            for topic in broker.image.topics_by_id()
            for partition in topic.partitions
        ]
        return every, True
    named = [
        TopicPartition(topic.topic, index)
        for topic in request.topic_partitions
        for index in topic.partitions
    ]
    return list(dict.fromkeys(named)), False


def _unclean(broker: Broker, name: TopicPartition) -> ErrorCode:
    """A Raft group never elects a replica that lacks acknowledged records."""
    found = broker.image.partition(name)
    if found is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    leader = broker.current_leader(name.topic, None, name.partition)
    if leader.leader_id >= 0 and not broker.offline_nodes([leader.leader_id]):
        return ErrorCode.ELECTION_NOT_NEEDED
    return ErrorCode.ELIGIBLE_LEADERS_NOT_AVAILABLE
