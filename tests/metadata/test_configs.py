"""Configs: every key's default is valid, precedence, and Kafka's messages for what is wrong."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from raftmq.config import KAFKA_FILE_KEYS, NodeConfig
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.commands import AlterConfigs, ConfigChange, CreateTopics
from raftmq.metadata.config_keys import BROKER_KEYS, TOPIC_KEYS, ConfigSource, ConfigType
from raftmq.metadata.configs import (
    APPEND,
    DELETE,
    SET,
    SUBTRACT,
    UNKNOWN_COUNT_MAX,
    UNKNOWN_NAME_BYTES_MAX,
    UNKNOWN_VALUE_BYTES_MAX,
    apply_operations,
    broker_value,
    check_broker_configs,
    check_static_configs,
    check_topic_configs,
    describe_broker,
    describe_topic,
    effective_topic_configs,
)
from raftmq.metadata.image import MetadataImage
from tests.metadata.metadata_commands import Machine, creation, node

KAFKA_TOPIC_CONFIGS = [
    "cleanup.policy",
    "compression.gzip.level",
    "compression.lz4.level",
    "compression.type",
    "compression.zstd.level",
    "delete.retention.ms",
    "file.delete.delay.ms",
    "flush.messages",
    "flush.ms",
    "follower.replication.throttled.replicas",
    "index.interval.bytes",
    "leader.replication.throttled.replicas",
    "max.compaction.lag.ms",
    "max.message.bytes",
    "message.timestamp.after.max.ms",
    "message.timestamp.before.max.ms",
    "message.timestamp.type",
    "min.cleanable.dirty.ratio",
    "min.compaction.lag.ms",
    "min.insync.replicas",
    "preallocate",
    "remote.storage.enable",
    "retention.bytes",
    "retention.ms",
    "segment.bytes",
    "segment.index.bytes",
    "segment.jitter.ms",
    "segment.ms",
    "unclean.leader.election.enable",
]


def _image(**configs: dict[str, str]) -> MetadataImage:
    machine = Machine()
    machine.register_all(1, 2)
    machine.apply(CreateTopics(topics=(creation("a", 1, (1, 2)),)))
    names = {"topic": ("topic", "a"), "all": ("broker", ""), "one": ("broker", "1")}
    for key, values in configs.items():
        kind, name = names[key]
        change = ConfigChange(resource_type=kind, resource_name=name, set=values)
        machine.apply(AlterConfigs(changes=(change,)))
    return machine.image


def test_every_topic_config_of_kafka_is_known_and_documented() -> None:
    own = [name for name in TOPIC_KEYS if not name.startswith("raftmq.")]
    assert sorted(own) == KAFKA_TOPIC_CONFIGS
    for key in (*TOPIC_KEYS.values(), *BROKER_KEYS.values()):
        assert len(key.documentation) > 15, key.name
        assert key.type is not ConfigType.UNKNOWN
    for key in TOPIC_KEYS.values():
        assert key.broker_name is None or BROKER_KEYS[key.broker_name].default == key.default


def test_precedence_and_synonyms() -> None:
    static = {"log.retention.ms": "4"}
    image = _image(
        topic={"retention.ms": "1"},
        one={"log.retention.ms": "2"},
        all={"log.retention.ms": "3"},
    )
    [entry] = describe_topic(image, "a", node(1), static, ["retention.ms"])
    assert [(s.name, s.value, s.source) for s in entry.synonyms] == [
        ("retention.ms", "1", ConfigSource.TOPIC),
        ("log.retention.ms", "2", ConfigSource.DYNAMIC_BROKER),
        ("log.retention.ms", "3", ConfigSource.DYNAMIC_DEFAULT_BROKER),
        ("log.retention.ms", "4", ConfigSource.STATIC_BROKER),
        ("log.retention.ms", "1209600000", ConfigSource.DEFAULT),
    ]
    assert (entry.value, entry.source, entry.is_default) == ("1", ConfigSource.TOPIC, False)
    assert effective_topic_configs(image, "a", node(1), static)["retention.ms"] == "1"
    assert effective_topic_configs(image, "b", node(1), static)["retention.ms"] == "2"
    assert effective_topic_configs(image, "b", node(2), static)["retention.ms"] == "3"
    assert effective_topic_configs(_image(), "b", node(2), static)["retention.ms"] == "4"
    assert effective_topic_configs(_image(), "b", node(2), {})["retention.ms"] == "1209600000"
    assert broker_value(image, node(1), static, "log.retention.ms") == "2"


def test_describing_brokers() -> None:
    image = _image(all={"num.partitions": "3"})
    entries = {e.name: e for e in describe_broker(image, node(1), {"broker.id": "1"})}
    assert sorted(entries) == sorted(BROKER_KEYS)
    assert entries["num.partitions"].value == "3"
    assert entries["broker.id"].is_read_only
    assert entries["broker.id"].source is ConfigSource.STATIC_BROKER
    assert entries["broker.rack"].value is None
    assert not entries["num.partitions"].is_read_only
    [entry] = describe_broker(image, None, {})
    assert (entry.name, entry.source) == ("num.partitions", ConfigSource.DYNAMIC_DEFAULT_BROKER)
    with pytest.raises(KafkaError) as caught:
        describe_topic(image, "nope", node(1), {})
    assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cleanup.policy", "compact"),
        ("cleanup.policy", "compact,delete"),
        ("compression.type", "zstd"),
        ("retention.ms", "-1"),
        ("min.cleanable.dirty.ratio", "0.1"),
        ("preallocate", "TRUE"),
        ("message.timestamp.type", "LogAppendTime"),
        ("leader.replication.throttled.replicas", "*"),
        ("leader.replication.throttled.replicas", "0:1,1:2"),
        ("follower.replication.throttled.replicas", ""),
        ("segment.bytes", "1024"),
    ],
)
def test_valid_values(name: str, value: str) -> None:
    check_topic_configs({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cleanup.policy", "shred"),
        ("cleanup.policy", ""),
        ("compression.type", "brotli"),
        ("compression.zstd.level", "23"),
        ("retention.ms", "-2"),
        ("retention.ms", "soon"),
        ("retention.ms", str(2**63)),
        ("min.cleanable.dirty.ratio", "1.5"),
        ("min.cleanable.dirty.ratio", "half"),
        ("preallocate", "yes"),
        ("message.timestamp.type", "Whenever"),
        ("leader.replication.throttled.replicas", "0-1"),
        ("segment.bytes", "13"),
        ("min.insync.replicas", "0"),
        ("remote.storage.enable", "true"),
        ("nope", "1"),
    ],
)
def test_invalid_values(name: str, value: str) -> None:
    with pytest.raises(KafkaError) as caught:
        check_topic_configs({name: value})
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    assert name in caught.value.message


def test_values_are_checked_against_each_other() -> None:
    check_topic_configs({"min.insync.replicas": "3"}, replication_factor=3)
    with pytest.raises(KafkaError, match="replication factor 2"):
        check_topic_configs({"min.insync.replicas": "3"}, replication_factor=2)
    with pytest.raises(KafkaError, match="above max"):
        check_topic_configs({"min.compaction.lag.ms": "3", "max.compaction.lag.ms": "2"})
    with pytest.raises(KafkaError, match="dynamically"):
        check_broker_configs({"node.id": "3"})
    with pytest.raises(KafkaError, match=r"retention\.m; did you mean retention\.ms\?"):
        check_topic_configs({"retention.m": "3"})


def test_broker_configs_that_nobody_knows_are_taken() -> None:
    """As by Kafka, whose plugins bring their own; of topics it takes only what it knows."""
    names = {f"plugin.{i}": "x" for i in range(UNKNOWN_COUNT_MAX)}
    check_broker_configs({**names, "num.partitions": "3"})
    check_broker_configs({"n" * UNKNOWN_NAME_BYTES_MAX: "v" * UNKNOWN_VALUE_BYTES_MAX})
    with pytest.raises(KafkaError, match="at least 1"):
        check_broker_configs({**names, "num.partitions": "0"})


THROTTLES = (
    "leader.replication.throttled.rate",
    "follower.replication.throttled.rate",
    "replica.alter.log.dirs.io.max.bytes.per.second",
)


@pytest.mark.parametrize("name", THROTTLES)
def test_throttles_of_moves_are_set_described_and_deleted(name: str) -> None:
    """kafka-reassign-partitions sets them for each broker, shows them, and deletes them again."""
    check_broker_configs({name: "5000000"})
    with pytest.raises(KafkaError, match="at least 0"):
        check_broker_configs({name: "-1"})
    image = _image(one={name: "5000000"})
    [entry] = describe_broker(image, node(1), {}, [name])
    assert (entry.value, entry.source) == ("5000000", ConfigSource.DYNAMIC_BROKER)
    assert not entry.is_read_only
    assert broker_value(image, node(2), {}, name) == str(2**63 - 1), "none"
    rows = [(name, DELETE, None)]
    assert apply_operations(BROKER_KEYS, {name: "5000000"}, rows, {}) == {}
    assert apply_operations(BROKER_KEYS, {}, rows, {}) == {}


@pytest.mark.parametrize(
    ("configs", "why"),
    [
        ({f"plugin.{i}": "x" for i in range(UNKNOWN_COUNT_MAX + 1)}, "More than 64"),
        ({"n" * (UNKNOWN_NAME_BYTES_MAX + 1): "x"}, "more than 255 bytes"),
        ({"plugin": "x" * (UNKNOWN_VALUE_BYTES_MAX + 1)}, "more than 8192 bytes"),
        ({"": "x"}, "No name"),
        ({" plugin": "x"}, "No name"),
        ({"plug\nin": "x"}, r"No name of a config: 'plug\\nin'"),
    ],
)
def test_what_nobody_knows_has_bounds(configs: dict[str, str], why: str) -> None:
    with pytest.raises(KafkaError, match=why) as caught:
        check_broker_configs(configs)
    assert caught.value.code is ErrorCode.INVALID_CONFIG


def test_broker_configs_that_nobody_knows_are_told_without_their_values() -> None:
    """Kafka cannot say whether they are secrets, so they are (`KafkaConfig.maybeSensitive`)."""
    image = _image(one={"plugin.b": "2"}, all={"plugin.b": "1", "plugin.a": "1"})
    entries = {e.name: e for e in describe_broker(image, node(1), {})}
    assert sorted(set(entries) - set(BROKER_KEYS)) == ["plugin.a", "plugin.b"]
    entry = entries["plugin.b"]
    assert (entry.value, entry.source) == (None, ConfigSource.DYNAMIC_BROKER)
    assert (entry.type, entry.is_sensitive, entry.is_read_only) == (ConfigType.UNKNOWN, True, True)
    assert [s.source for s in entry.synonyms] == [
        ConfigSource.DYNAMIC_BROKER,
        ConfigSource.DYNAMIC_DEFAULT_BROKER,
    ]
    assert [e.name for e in describe_broker(image, node(1), {}, ["plugin.a"])] == ["plugin.a"]
    assert [e.name for e in describe_broker(image, node(2), {}, ["plugin.b", "no"])] == ["plugin.b"]
    assert [e.name for e in describe_broker(image, None, {})] == ["plugin.a", "plugin.b"]


def test_operations() -> None:
    present = {"cleanup.policy": "delete", "retention.ms": "5"}
    rows = [
        ("cleanup.policy", APPEND, "compact,delete"),
        ("retention.ms", DELETE, None),
        ("segment.ms", SET, " 7 "),
    ]
    assert apply_operations(TOPIC_KEYS, present, rows, {}) == {
        "cleanup.policy": "delete,compact",
        "segment.ms": "7",
    }
    rows = [("cleanup.policy", SUBTRACT, "delete")]
    start = {"cleanup.policy": "delete,compact"}
    assert apply_operations(TOPIC_KEYS, {}, rows, start) == {"cleanup.policy": "compact"}
    assert apply_operations(TOPIC_KEYS, {}, [("retention.ms", DELETE, None)], {}) == {}


def test_a_nodes_file_is_checked_by_name_and_value() -> None:
    check_static_configs({"num.partitions": "3", "group.max.size": "7"})
    with pytest.raises(KafkaError, match=r"did you mean num\.partitions"):
        check_static_configs({"num.partition": "3"})
    with pytest.raises(KafkaError, match="at least 1"):
        check_static_configs({"num.partitions": "0"})


def test_what_a_node_tells_of_its_file_are_known_keys() -> None:
    config = NodeConfig(node_id=1, data=Path("data"), rack="r")
    check_static_configs(config.kafka_settings)
    entries = {e.name: e for e in describe_broker(_image(), node(1), config.kafka_settings)}
    assert entries["node.id"].value == "1"
    assert not entries["replica.catchup.bytes.per.s"].is_read_only
    assert entries["listeners"].value == "PLAINTEXT://127.0.0.1:9092"


def test_what_a_node_tells_as_set_was_set() -> None:
    plain = NodeConfig(node_id=1, data=Path("data"))
    told = {"node.id", "broker.id", "log.dirs", "listeners", "advertised.listeners"}
    assert set(plain.kafka_settings) == {*told, "raftmq.admin.listener"}
    other = NodeConfig(node_id=1, data=Path("data"), connections_max=7, connections_per_ip_max=5)
    assert other.kafka_settings["max.connections"] == "7"
    assert other.kafka_settings["max.connections.per.ip"] == "5"


@pytest.mark.parametrize("name", sorted(KAFKA_FILE_KEYS))
def test_a_setting_has_the_default_of_its_key_in_the_file(name: str) -> None:
    default = attrs.fields_dict(NodeConfig)[KAFKA_FILE_KEYS[name]].default
    if isinstance(default, int | str):
        assert BROKER_KEYS[name].default == str(default)
    else:
        assert BROKER_KEYS[name].default in (None, "", "-1"), "each node has its own"
