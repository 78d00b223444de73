"""Which handler serves which API. Produce and Fetch have their own way through `dispatch.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from raftmq.protocol import ApiKey
from raftmq.server.kafka.handlers import (
    api_versions,
    cluster,
    configs,
    features,
    groups,
    metadata,
    offsets,
    producers,
    topics,
)

HANDLERS: Final[dict[ApiKey, Callable[..., Any]]] = {
    ApiKey.API_VERSIONS: api_versions.handle,
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
