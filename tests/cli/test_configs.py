"""`node config` and `cluster config`: what holds, where it is set, and what cannot be set here."""

from __future__ import annotations

import json

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from tests.cli.conftest import Call
from tests.client.fake_broker import FakeBroker


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_a_nodes_settings_with_default_and_source(call: Call, broker: FakeBroker) -> None:
    broker.broker_configs = {"1": {"num.partitions": "5"}, "": {"num.partitions": "4"}}
    assert table(call("node", "config", "show", "1").stdout) == [
        ["Name", "Value", "Default", "Source"],
        ["log.retention.ms", "60", "1209600000", "file:", "defaults"],
        ["max.connections", "7", "10000", "file:", "connections_max"],
        ["num.partitions", "5", "1", "node"],
    ]
    every = call("node", "config", "show", "1", "--all").stdout
    assert ["log.roll.ms", "604800000", "default"] in table(every)
    one = call("node", "config", "show", "1", "num.partitions").stdout.splitlines()
    assert one[1].split() == ["num.partitions", "5", "1", "node"]
    assert one[3:] == [
        "num.partitions: what num.partitions is",
        "  hides 4 (cluster)",
        "  hides 1 (default)",
    ]
    (told,) = json.loads(call("node", "config", "show", "1", "max.connections", "--json").stdout)
    assert told == {
        "Name": "max.connections",
        "Value": "7",
        "Default": "10000",
        "Source": "STATIC_BROKER_CONFIG",
        "FileKey": "connections_max",
        "ReadOnly": True,
        "Hidden": [{"Value": "10000", "Source": "DEFAULT_CONFIG"}],
        "Documentation": "what max.connections is",
    }


def test_set_and_unset_for_a_node(call: Call, broker: FakeBroker) -> None:
    words = ("node", "config", "set", "1", "num.partitions=3")
    assert call(*words, "--dry-run").stdout == (
        "node 1: num.partitions = 3, was not set (dry run)\n"
    )
    assert not broker.broker_configs.get("1")
    assert call(*words).stdout == "node 1: num.partitions = 3, was not set\n"
    assert broker.broker_configs["1"] == {"num.partitions": "3"}
    done = call("node", "config", "unset", "1", "num.partitions")
    assert done.stdout == "node 1: num.partitions unset, was 3\n"
    assert broker.broker_configs["1"] == {}


def test_set_for_the_cluster_names_the_nodes_that_keep_their_own(
    call: Call, broker: FakeBroker
) -> None:
    broker.broker_configs = {"1": {"num.partitions": "5"}}
    done = call("cluster", "config", "set", "num.partitions=3", "log.roll.ms=9")
    assert done.stdout == (
        "all nodes: num.partitions = 3, was not set\nall nodes: log.roll.ms = 9, was not set\n"
    )
    assert "node 1 keeps its own num.partitions=5" in done.stderr
    assert broker.broker_configs[""] == {"num.partitions": "3", "log.roll.ms": "9"}
    assert table(call("cluster", "config", "show").stdout)[1:] == [
        ["log.retention.ms", "60", "1209600000", "file", "all"],
        ["log.roll.ms", "9", "604800000", "cluster", "all"],
        ["num.partitions", "5", "1", "node", "all"],
    ]
    done = call("cluster", "config", "unset", "log.roll.ms", "--json")
    assert json.loads(done.stdout) == {
        "NodeId": None,
        "DryRun": False,
        "Changes": [{"Name": "log.roll.ms", "Value": None, "Before": "9", "OwnValues": {}}],
    }


def test_a_name_of_a_plugin_that_somebody_set_can_be_unset(call: Call, broker: FakeBroker) -> None:
    broker.broker_configs = {"": {"plugin.key": "x"}}
    assert call("cluster", "config", "unset", "plugin.key").exit_code == 0
    assert broker.broker_configs[""] == {}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["cluster", "config", "set", "num.partition=3"], 1, "did you mean num.partitions?"),
        (["cluster", "config", "unset", "num.partition"], 1, "did you mean num.partitions?"),
        (["cluster", "config", "show", "num.partition"], 1, "did you mean num.partitions?"),
        (["node", "config", "show", "1", "log.retention"], 1, "did you mean log.retention.ms?"),
        (["cluster", "config", "set", "max.connections=3"], 1, "key connections_max of the node"),
        (["node", "config", "show", "9"], 1, "node 9 is not alive; alive are 1"),
        (["node", "config", "set", "9", "num.partitions=3"], 1, "node 9 is not alive"),
        (["node", "config", "set", "1", "num.partitions"], 2, "is not KEY=VALUE"),
        (["cluster", "config", "set"], 2, "Missing argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_refused(call: Call, words: list[str], code: int, says: str) -> None:
    done = call(*words)
    assert done.exit_code == code, done.output
    assert says in done.stderr
    told = json.loads(call(*words, "--json").stderr)["error"]
    assert told["outcome"] == "failed"


def test_a_broker_that_refuses_a_value_is_quoted(call: Call, broker: FakeBroker) -> None:
    broker.fault(ApiKey.INCREMENTAL_ALTER_CONFIGS, "refuse", ErrorCode.INVALID_CONFIG)
    done = call("cluster", "config", "set", "num.partitions=0")
    assert done.exit_code == 1
    assert "INVALID_CONFIG" in done.stderr
    assert "`raftmq cluster config show --all`" in done.stderr
