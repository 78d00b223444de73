"""Which handler serves which API, and ApiVersions, which tells clients of them.

Produce and Fetch have their own way through `dispatch.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from raftmq.errors import ErrorCode
from raftmq.metadata.features import Ranges
from raftmq.metadata.image import RAFTMQ_LEVEL, MetadataImage
from raftmq.protocol import ANNOUNCED, ApiKey, Struct, encode_response
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.handlers import (
    cluster,
    configs,
    features,
    groups,
    metadata,
    offsets,
    producers,
    topics,
)
from raftmq.server.kafka.request_context import RequestContext

_SOFTWARE: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_SOFTWARE_FROM: Final = 3

_encoded: dict[tuple[object, ...], bytes] = {}
_ENCODED_MAX: Final = 64
"""Levels change seldom, and only operators change them; still, what is kept is bounded."""


def api_versions(broker: Broker, context: RequestContext, request: Struct) -> bytes:
    """Answer the announced ranges and the levels of features; the same bytes for everybody."""
    version = context.api_version
    code = ErrorCode.NONE
    if version >= _SOFTWARE_FROM and not (
        _SOFTWARE.fullmatch(request.client_software_name)
        and _SOFTWARE.fullmatch(request.client_software_version)
    ):
        code = ErrorCode.INVALID_REQUEST  # KIP-511
        broker.metrics.api("api_versions").error(code)
    image = broker.image
    key = (version, code, broker.supported_text, image.features, image.features_epoch)
    if key not in _encoded:
        if len(_encoded) >= _ENCODED_MAX:
            _encoded.clear()
        _encoded[key] = _encode(version, code, broker.supported, image)
    return _encoded[key]


def _encode(version: int, code: ErrorCode, supported: Ranges, image: MetadataImage) -> bytes:
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
            ],
            # Java believes no levels of an epoch that is not above the last one it knows.
            finalized_features_epoch=max(image.features_epoch, 0),
            finalized_features=[
                Struct(name=name, max_version_level=levels[name], min_version_level=levels[name])
                for name in sorted(levels)
            ],
        ),
    )


HANDLERS: Final[dict[ApiKey, Callable[..., Any]]] = {
    ApiKey.API_VERSIONS: api_versions,
    ApiKey.METADATA: metadata.handle,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: metadata.describe_topic_partitions,
    ApiKey.DESCRIBE_CLUSTER: metadata.describe_cluster,
    ApiKey.LIST_OFFSETS: offsets.list_offsets,
    ApiKey.OFFSET_FOR_LEADER_EPOCH: offsets.offset_for_leader_epoch,
    ApiKey.DELETE_RECORDS: offsets.delete_records,
    ApiKey.CREATE_TOPICS: topics.create_topics,
    ApiKey.DELETE_TOPICS: topics.delete_topics,
    ApiKey.CREATE_PARTITIONS: topics.create_partitions,
    ApiKey.DESCRIBE_CONFIGS: configs.describe_configs,
    ApiKey.ALTER_CONFIGS: configs.alter_configs,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: configs.incremental_alter_configs,
    ApiKey.UPDATE_FEATURES: features.update_features,
    ApiKey.DESCRIBE_QUORUM: cluster.describe_quorum,
    ApiKey.DESCRIBE_LOG_DIRS: cluster.describe_log_dirs,
    ApiKey.ELECT_LEADERS: cluster.elect_leaders,
    ApiKey.LIST_PARTITION_REASSIGNMENTS: cluster.list_partition_reassignments,
    ApiKey.INIT_PRODUCER_ID: producers.init_producer_id,
    ApiKey.DESCRIBE_PRODUCERS: producers.describe_producers,
    **groups.HANDLERS,
}
