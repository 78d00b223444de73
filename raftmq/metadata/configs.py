"""What is configured: effective values, where each comes from, and whether a change is valid.

Owns precedence: a topic's own value, then this broker's dynamic one, then the cluster's dynamic
default, then the node's file, then the built-in default. Never stores anything: values live in the
metadata image and in the node's file, keys in `config_keys.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final

from attrs import evolve, frozen
from immutables import Map

from raftmq.errors import ErrorCode, KafkaError
from raftmq.foreign import visible
from raftmq.metadata.config_keys import (
    BROKER_KEYS,
    TOPIC_KEYS,
    VIEW_KEYS,
    VIEW_OF,
    VIEW_WHERE,
    ConfigKey,
    ConfigSource,
    ConfigType,
    invalid,
    split_list,
    string,
)
from raftmq.metadata.image import MetadataImage, ViewImage
from raftmq.types import NodeId

__all__ = [
    "BROKER_KEYS",
    "TOPIC_KEYS",
    "ConfigEntry",
    "ConfigSource",
    "ConfigSynonym",
    "ConfigType",
    "apply_operations",
    "broker_value",
    "check_broker_configs",
    "check_static_configs",
    "check_topic_configs",
    "describe_broker",
    "describe_topic",
    "describe_view",
    "effective_topic_configs",
]

SET, DELETE, APPEND, SUBTRACT = range(4)
DYNAMIC_DEFAULT: Final = ("broker", "")

UNKNOWN_NAME_BYTES_MAX: Final = 255
UNKNOWN_VALUE_BYTES_MAX: Final = 8_192
UNKNOWN_COUNT_MAX: Final = 64
"""Of one broker, or of the defaults of all: they are kept in every node's memory."""


@frozen(slots=True)
class ConfigSynonym:
    """A value that would hold if those before it were unset."""

    name: str
    value: str | None
    source: ConfigSource


@frozen(slots=True)
class ConfigEntry:
    """One key as DescribeConfigs answers it."""

    name: str
    value: str | None
    source: ConfigSource
    is_read_only: bool
    is_sensitive: bool
    type: ConfigType
    documentation: str
    synonyms: tuple[ConfigSynonym, ...]

    @property
    def is_default(self) -> bool:
        """True when it is set nowhere."""
        return self.source is ConfigSource.DEFAULT


def effective_topic_configs(
    image: MetadataImage, topic: str, node_id: NodeId, static: Mapping[str, str]
) -> dict[str, str]:
    """Every topic key with the value in force on one node; an unknown topic has the defaults."""
    known = image.topics.get(topic)
    own: Mapping[str, str] = {} if known is None else known.configs
    values = {}
    for key in TOPIC_KEYS.values():
        value = own.get(key.name)
        if value is None and key.broker_name is not None:
            value = broker_value(image, node_id, static, key.broker_name)
        elif value is None:
            value = key.default
        if value is not None:
            values[key.name] = value
    return values


def broker_value(
    image: MetadataImage, node_id: NodeId, static: Mapping[str, str], name: str
) -> str | None:
    """One broker key's value in force on a node."""
    for synonym in _broker_synonyms(image, node_id, static, BROKER_KEYS[name]):
        return synonym.value
    return None


def describe_topic(
    image: MetadataImage,
    topic: str,
    node_id: NodeId,
    static: Mapping[str, str],
    names: Sequence[str] | None = None,
) -> list[ConfigEntry]:
    """The entries of a topic, sorted; of `names` only, where given.

    Raises:
        KafkaError: UNKNOWN_TOPIC_OR_PARTITION.
    """
    known = image.topics.get(topic)
    if known is None:
        raise KafkaError(code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    entries = []
    for key in _chosen(TOPIC_KEYS, names):
        synonyms = []
        if (own := known.configs.get(key.name)) is not None:
            synonyms.append(ConfigSynonym(key.name, own, ConfigSource.TOPIC))
        if key.broker_name is not None:
            synonyms += _broker_synonyms(image, node_id, static, BROKER_KEYS[key.broker_name])
        elif key.default is not None:
            synonyms.append(ConfigSynonym(key.name, key.default, ConfigSource.DEFAULT))
        entries.append(_entry(key, synonyms))
    return entries


def describe_view(
    image: MetadataImage,
    view: ViewImage,
    node_id: NodeId,
    static: Mapping[str, str],
    names: Sequence[str] | None = None,
) -> list[ConfigEntry]:
    """The entries of a view with a condition, sorted: its topic's, and what makes it a view. None
    of them can be set through it.

    Raises:
        KafkaError: UNKNOWN_TOPIC_OR_PARTITION.
    """
    topic = image.topic_by_id(view.source)
    if topic is None:
        raise KafkaError(code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    own = {VIEW_OF: topic.name, VIEW_WHERE: view.condition}
    entries = [
        _entry(key, [ConfigSynonym(key.name, own[key.name], ConfigSource.TOPIC)])
        for key in _chosen(VIEW_KEYS, names)
    ]
    entries += (
        evolve(entry, is_read_only=True)
        for entry in describe_topic(image, topic.name, node_id, static, names)
    )
    return sorted(entries, key=lambda entry: entry.name)


def describe_broker(
    image: MetadataImage,
    node_id: NodeId | None,
    static: Mapping[str, str],
    names: Sequence[str] | None = None,
) -> list[ConfigEntry]:
    """The entries of a broker; without `node_id` only the cluster's dynamic defaults (as Kafka).
    Names without a definition come last, without their values: those may be secrets."""
    values: Mapping[str, str] = image.configs.get(DYNAMIC_DEFAULT, Map())
    if node_id is None:
        return [
            _entry(
                key,
                [ConfigSynonym(key.name, values[key.name], ConfigSource.DYNAMIC_DEFAULT_BROKER)],
            )
            for key in (*_chosen(BROKER_KEYS, names), *_chosen(_unknown_keys(values), names))
            if key.name in values
        ]
    own: Mapping[str, str] = image.configs.get(("broker", str(node_id)), Map())
    unknown = _unknown_keys({**values, **own})
    return [
        _entry(key, _broker_synonyms(image, node_id, static, key))
        for key in (*_chosen(BROKER_KEYS, names), *_chosen(unknown, names))
    ]


def _unknown_keys(values: Mapping[str, str]) -> dict[str, ConfigKey]:
    """Keys for broker configs without a definition, as Kafka describes them."""
    return {
        name: ConfigKey(
            name, ConfigType.UNKNOWN, None, "", string, is_read_only=True, is_sensitive=True
        )
        for name in sorted(values)
        if name not in BROKER_KEYS
    }


def check_topic_configs(
    configs: Mapping[str, str], *, replication_factor: int | None = None
) -> None:
    """Check values that were set on a topic.

    Raises:
        KafkaError: INVALID_CONFIG, with the key and the reason.
    """
    _check(TOPIC_KEYS, configs, "topic")
    wanted = configs.get("min.insync.replicas")
    if wanted is not None and replication_factor is not None and int(wanted) > replication_factor:
        # Otherwise every acks=all would fail for ever.
        raise invalid(
            "min.insync.replicas", wanted, f"above the replication factor {replication_factor}"
        )
    lag_min, lag_max = configs.get("min.compaction.lag.ms"), configs.get("max.compaction.lag.ms")
    if lag_min is not None and lag_max is not None and int(lag_min) > int(lag_max):
        raise invalid("min.compaction.lag.ms", lag_min, "above max.compaction.lag.ms")


def check_broker_configs(configs: Mapping[str, str]) -> None:
    """Check dynamic values of a broker or of all. A name without a definition is accepted, as by
    Kafka, whose plugins have configs of their own; it has no effect here.

    Raises:
        KafkaError: INVALID_CONFIG, also for a key that only the node's file may set.
    """
    known = {name: configs[name] for name in sorted(configs) if name in BROKER_KEYS}
    _check(BROKER_KEYS, known, "broker")
    for name in known:
        if BROKER_KEYS[name].is_read_only:
            raise KafkaError(
                f"Cannot update these configs dynamically: {{{name}}}",
                code=ErrorCode.INVALID_CONFIG,
            )
    for name in sorted(configs):
        if name not in known:
            _check_unknown(name, configs[name])
    if len(configs) - len(known) > UNKNOWN_COUNT_MAX:
        raise KafkaError(
            f"More than {UNKNOWN_COUNT_MAX} broker configs that are not known here",
            code=ErrorCode.INVALID_CONFIG,
        )


def _check_unknown(name: str, value: str) -> None:
    shown = visible(name[:UNKNOWN_NAME_BYTES_MAX])
    if not name or name != name.strip() or not name.isprintable():
        raise KafkaError(f"No name of a config: '{shown}'", code=ErrorCode.INVALID_CONFIG)
    if len(name.encode()) > UNKNOWN_NAME_BYTES_MAX:
        raise KafkaError(
            f"Unknown broker config name of more than {UNKNOWN_NAME_BYTES_MAX} bytes: {shown}...",
            code=ErrorCode.INVALID_CONFIG,
        )
    if len(value.encode()) > UNKNOWN_VALUE_BYTES_MAX:
        raise KafkaError(
            f"Value of unknown broker config {shown} of more than {UNKNOWN_VALUE_BYTES_MAX} bytes",
            code=ErrorCode.INVALID_CONFIG,
        )


def check_static_configs(configs: Mapping[str, str]) -> None:
    """Check the Kafka settings of a node's file.

    Raises:
        KafkaError: INVALID_CONFIG for an unknown key, with the nearest known one, or a bad value.
    """
    _check(BROKER_KEYS, configs, "broker")


def apply_operations(
    keys: Mapping[str, ConfigKey],
    present: Mapping[str, str],
    operations: Sequence[tuple[str, int, str | None]],
    defaults: Mapping[str, str],
) -> dict[str, str]:
    """The values after (name, operation, value) changes (KIP-339), unchecked.

    Args:
        keys: of topics or of brokers.
        present: what is set now.
        operations: set, delete, append, subtract; each key once.
        defaults: values that append and subtract start from where nothing is set.

    Raises:
        KafkaError: INVALID_REQUEST for a key named twice, a missing value or an unknown operation;
            INVALID_CONFIG for append to what is no list.
    """
    values = dict(present)
    seen: dict[str, bool] = {}
    for name, operation, value in operations:
        if name in seen:
            raise KafkaError(
                f"Error due to duplicate config keys: {name}", code=ErrorCode.INVALID_REQUEST
            )
        seen[name] = True
        if operation == DELETE:
            values.pop(name, None)
            continue
        if value is None:
            raise KafkaError(
                f"Null value not supported for : {name}", code=ErrorCode.INVALID_REQUEST
            )
        if operation == SET:
            values[name] = value.strip()
            continue
        if operation not in (APPEND, SUBTRACT):
            raise KafkaError(f"Unknown operation {operation}", code=ErrorCode.INVALID_REQUEST)
        key = keys.get(name)
        if key is None or not key.is_list:
            raise KafkaError(
                f"Can't {'append to' if operation == APPEND else 'subtract from'} "
                f"key {name} because its type is not LIST.",
                code=ErrorCode.INVALID_CONFIG,
            )
        words = split_list(values.get(name, defaults.get(name, key.default or "")))
        named = split_list(value)
        if operation == APPEND:
            words += [word for word in named if word not in words]
        else:
            words = [word for word in words if word not in named]
        values[name] = ",".join(words)
    return values


def _check(keys: Mapping[str, ConfigKey], configs: Mapping[str, str], kind: str) -> None:
    for name in sorted(configs):
        key = keys.get(name)
        if key is None:
            near = get_close_matches(name, keys, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise KafkaError(
                f"Unknown {kind} config name: {name}{hint}", code=ErrorCode.INVALID_CONFIG
            )
        key.check(name, configs[name])


def _chosen(keys: Mapping[str, ConfigKey], names: Sequence[str] | None) -> list[ConfigKey]:
    return [keys[name] for name in sorted(keys) if names is None or name in names]


def _broker_synonyms(
    image: MetadataImage, node_id: NodeId, static: Mapping[str, str], key: ConfigKey
) -> list[ConfigSynonym]:
    found = []
    for values, source in (
        (image.configs.get(("broker", str(node_id)), {}), ConfigSource.DYNAMIC_BROKER),
        (image.configs.get(DYNAMIC_DEFAULT, {}), ConfigSource.DYNAMIC_DEFAULT_BROKER),
        (static, ConfigSource.STATIC_BROKER),
    ):
        value = values.get(key.name)
        if value is not None:
            found.append(ConfigSynonym(key.name, value, source))
    if key.default is not None:
        found.append(ConfigSynonym(key.name, key.default, ConfigSource.DEFAULT))
    return found


def _entry(key: ConfigKey, synonyms: Sequence[ConfigSynonym]) -> ConfigEntry:
    best = synonyms[0] if synonyms else ConfigSynonym(key.name, None, ConfigSource.DEFAULT)
    return ConfigEntry(
        name=key.name,
        value=None if key.is_sensitive else best.value,
        source=best.source,
        is_read_only=key.is_read_only,
        is_sensitive=key.is_sensitive,
        type=key.type,
        documentation=key.documentation,
        synonyms=tuple(synonyms),
    )
