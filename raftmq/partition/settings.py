"""A topic's configs as one partition uses them: parsed once, not at every request."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from attrs import frozen

from raftmq.codec import Codec
from raftmq.delays.headers import DELAY_MAX_MS, RetryPolicy
from raftmq.metadata.config_keys import (
    DEAD_TO,
    DELAY_MAX,
    DELIVERS_TO,
    DELIVERY_GIVEUP,
    RETRY_ATTEMPTS,
    RETRY_FACTOR,
    RETRY_MAX,
    RETRY_MIN,
    TOPIC_KEYS,
    retries_nothing,
    split_list,
)
from raftmq.records import CREATE_TIME, LOG_APPEND_TIME

_CODECS: Final = {
    "producer": None,
    "uncompressed": Codec.NONE,
    "none": Codec.NONE,
    "gzip": Codec.GZIP,
    "snappy": Codec.SNAPPY,
    "lz4": Codec.LZ4,
    "zstd": Codec.ZSTD,
}


class CheckDepth(Enum):
    """How much of a produced batch is checked before it is stored (`raftmq.produce.check`)."""

    RECORDS = "records"
    FRAME = "frame"
    CRC = "crc"


@frozen(slots=True, kw_only=True)
class PartitionSettings:
    """The topic configs that a partition applies itself; those of storage are in `LogConfig`."""

    max_message_bytes: int = 1_048_588
    segment_bytes: int = 1 << 30
    min_insync_replicas: int = 1
    compression: Codec | None = None  # None: as the producer sent it
    timestamp_type: int = CREATE_TIME
    timestamp_before_ms_max: int = (1 << 63) - 1
    timestamp_after_ms_max: int = 3_600_000
    acks1_fsync: bool = False
    check: CheckDepth = CheckDepth.RECORDS
    is_compacted: bool = False
    delivers_to: str = ""  # of a delay topic: the topic in which its records are delivered
    delay_max_ms: int = DELAY_MAX_MS
    giveup_ms: int = 86_400_000  # so late is dead what no target takes
    dead_to: str = ""  # of a delay topic: where what is dead comes
    retry: RetryPolicy | None = None

    @classmethod
    def from_configs(cls, configs: Mapping[str, str]) -> PartitionSettings:
        """Read effective topic configs (already checked); an absent one has its default."""
        default = _DEFAULT

        def number(key: str, otherwise: int) -> int:
            text = configs.get(key)
            return otherwise if text is None else int(text)

        delivers_to = configs.get(DELIVERS_TO, "")
        is_append_time = configs.get("message.timestamp.type") == "LogAppendTime"
        codec = _CODECS[configs.get("compression.type", "producer")]
        return cls(
            max_message_bytes=number("max.message.bytes", default.max_message_bytes),
            segment_bytes=number("segment.bytes", default.segment_bytes),
            min_insync_replicas=number("min.insync.replicas", default.min_insync_replicas),
            # A delay topic is read record by record, in the order of its appends.
            compression=Codec.NONE if delivers_to else codec,
            timestamp_type=LOG_APPEND_TIME if is_append_time or delivers_to else CREATE_TIME,
            timestamp_before_ms_max=number(
                "message.timestamp.before.max.ms", default.timestamp_before_ms_max
            ),
            timestamp_after_ms_max=number(
                "message.timestamp.after.max.ms", default.timestamp_after_ms_max
            ),
            acks1_fsync=configs.get("raftmq.acks1.fsync", "false").lower() == "true",
            check=CheckDepth(configs.get("raftmq.produce.check", default.check.value)),
            is_compacted="compact" in split_list(configs.get("cleanup.policy", "")),
            delivers_to=delivers_to,
            delay_max_ms=number(DELAY_MAX, default.delay_max_ms),
            giveup_ms=number(DELIVERY_GIVEUP, default.giveup_ms),
            dead_to=configs.get(DEAD_TO, ""),
            retry=_retry_policy(configs) if configs.get(DEAD_TO) else None,
        )


def _retry_policy(configs: Mapping[str, str]) -> RetryPolicy | None:
    """That of a delay topic with a dead topic; None where it retries nothing."""

    def text(key: str) -> str:
        return configs.get(key) or TOPIC_KEYS[key].default or ""

    if retries_nothing(configs.get(RETRY_ATTEMPTS)):
        return None
    return RetryPolicy(
        attempts=int(text(RETRY_ATTEMPTS)),
        min_ms=int(text(RETRY_MIN)),
        max_ms=int(text(RETRY_MAX)),
        factor_percent=round(float(text(RETRY_FACTOR)) * 100),
    )


_DEFAULT: Final = PartitionSettings()
