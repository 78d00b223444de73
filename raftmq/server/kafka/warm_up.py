"""Compiles what stock clients are known to ask, before the first of them does.

A codec's first use costs milliseconds of the loop, and the very first one the import of the
schemas: time in which heartbeats wait. So this runs in a thread before the node registers: later it
would slow down a loop that others count on.
"""

from __future__ import annotations

from typing import Final

from raftmq.protocol import ApiKey, warm

COMMON: Final[dict[ApiKey, tuple[int, ...]]] = {
    ApiKey.API_VERSIONS: (0, 3, 4),
    ApiKey.METADATA: (1, 4, 5, 8, 9, 10, 12, 13),
    ApiKey.LIST_OFFSETS: (2, 3, 7, 9, 10),
    ApiKey.INIT_PRODUCER_ID: (0, 4, 5),
    ApiKey.FIND_COORDINATOR: (1, 2, 6),
    ApiKey.JOIN_GROUP: (5, 7, 9),
    ApiKey.SYNC_GROUP: (3, 5),
    ApiKey.HEARTBEAT: (1, 3, 4),
    ApiKey.LEAVE_GROUP: (1, 5),
    ApiKey.OFFSET_COMMIT: (3, 7, 8, 9),
    ApiKey.OFFSET_FETCH: (3, 7, 8, 9),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: (4,),
    ApiKey.CREATE_TOPICS: (3, 4, 7),
    ApiKey.DELETE_TOPICS: (3, 4, 6),
    ApiKey.CREATE_PARTITIONS: (2, 3),
    ApiKey.DESCRIBE_CONFIGS: (1, 4),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: (1,),
    ApiKey.DELETE_RECORDS: (2,),
    ApiKey.DESCRIBE_GROUPS: (5, 6),
    ApiKey.LIST_GROUPS: (4, 5),
    ApiKey.DESCRIBE_CLUSTER: (1, 2),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: (0,),
}
"""What Java, librdkafka, kafka-python, aiokafka and franz-go sent to a Kafka 4.1 broker."""


def warm_up() -> None:
    """Compile the codecs of `COMMON`; for a thread."""
    warm((api, version) for api, versions in COMMON.items() for version in versions)
