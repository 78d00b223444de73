"""Commands do what they say, print what Kafka's tools print, and end with the right code."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from raftmq.cli.common import Bar, progress_bar
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from raftmq.records import parse_header
from raftmq_client import ConsumerRecord
from raftmq_client.blocking.consumer import Consumer
from raftmq_client.core.assignors import encode_assignment
from raftmq_client.errors import BrokerError
from tests.cli.conftest import Call, command_tree, invoke
from tests.client.fake_broker import FakeBroker


def test_a_topics_life(call: Call, broker: FakeBroker) -> None:
    done = call("topic", "create", "orders", "-p", "3", "-c", "retention.ms=1000")
    assert done.exit_code == 0, done.output
    assert done.stdout == "topic orders created: 3 partitions, replication factor 1\n"
    assert broker.configs["orders"] == {"retention.ms": "1000"}
    listed = call("topic", "list").stdout.splitlines()
    assert listed[0].split() == ["Topic", "PartitionCount", "ReplicationFactor"]
    assert listed[1].split() == ["orders", "3", "1"]
    described = call("topic", "describe", "orders").stdout
    assert "PartitionCount: 3" in described
    assert "Configs: retention.ms=1000" in described
    assert (
        call("topic", "alter", "orders", "--set", "a=b", "--unset", "retention.ms").exit_code == 0
    )
    assert broker.configs["orders"] == {"a": "b"}
    assert call("topic", "add-partitions", "orders", "5").exit_code == 0
    assert call("topic", "trim", "orders", "-p", "0", "--before", "-1").exit_code == 0
    assert call("topic", "delete", "orders").stdout == "topic orders deleted\n"
    assert call("topic", "list", "--json").stdout == "[]\n"


def test_describe_as_json(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("t", 1)
    content = json.loads(call("topic", "describe", "t", "--json").stdout)
    assert content["Topic"] == "t"
    assert content["Partitions"] == [
        {
            "Partition": 0,
            "Leader": 1,
            "LeaderEpoch": 0,
            "Replicas": [1],
            "Isr": [1],
            "StartOffset": 0,
            "EndOffset": 0,
        }
    ]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["topic", "describe", "nope"], 1, "UNKNOWN_TOPIC_OR_PARTITION"),
        (["topic", "create", "t"], 1, "TOPIC_ALREADY_EXISTS"),
        (["topic", "create", "t", "--if-not-exists"], 0, ""),
        (["topic", "alter", "t", "--unset", "bogus"], 1, "no setting 'bogus'"),
        (["topic", "alter", "t", "--unset", "kept.mss"], 1, "did you mean kept.ms?"),
        (["leader", "list", "-t", "nope"], 1, "`raftmq topic list` shows"),
        (["produce", "t", "x", "-c", "-1"], 2, "greater than or equal to 0"),
        (["produce", "t", "x", "-p", "-2"], 2, "greater than or equal to -1"),
        (["produce", "t", "x", "--timeout", "0"], 2, "greater than or equal to 0.1"),
        (["consume", "t", "--idle", "-1"], 2, "greater than or equal to 0"),
        (["consume", "nope"], 1, "topic 'nope': UNKNOWN_TOPIC_OR_PARTITION"),
        (["consume", "nope", "-G", "g"], 1, "`raftmq topic list` shows"),
        (["cluster", "status", "--wait", "-1"], 2, "greater than or equal to 0"),
        (["cluster", "status", "--admin", "bogus"], 2, "--admin: 'bogus' is not host:port"),
        (["topic", "delete", "nope", "--if-exists"], 0, ""),
        (["topic", "add-partitions", "t", "1"], 1, "INVALID_PARTITIONS"),
        (["topic", "create", "new", "-c", "novalue"], 2, "'novalue' is not KEY=VALUE"),
        (["topic", "alter", "t"], 2, "nothing to change"),
        (["topic", "create"], 2, "Missing argument"),
        (["topic", "list", "-b", "host:port"], 2, "is not host:port"),
        (["group", "describe", "nope"], 1, "no group 'nope'"),
        (["group", "delete", "nope"], 1, "GROUP_ID_NOT_FOUND"),
        (["consume"], 2, "which topic?"),
        (["produce"], 2, "which topic?"),
        (["consume", "t", "-o", "somewhere"], 2, "'somewhere'"),
        (["consume", "t", "-o", "@yesterday"], 2, "'yesterday'"),
        (["consume", "t", "-p", "7"], 1, "none is 7"),
        (["consume", "t", "-G", "g", "-p", "0"], 2, "leave out --partition"),
        (["consume", "t", "-f", "%q"], 2, "%q"),
        (["config", "check", "/nowhere.toml"], 1, "/nowhere.toml: No such file"),
        (["log", "dump", "/nowhere.log"], 1, "/nowhere.log: No such file"),
        (["frobnicate"], 2, "No such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_exit_codes_and_one_line_errors(
    call: Call, broker: FakeBroker, words: list[str], code: int, says: str
) -> None:
    broker.make_topic("t", 1)
    broker.configs["t"] = {"kept.ms": "1"}
    done = call(*words)
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert "Traceback" not in done.output


def test_an_unknown_outcome_is_3(call: Call, broker: FakeBroker) -> None:
    broker.fault(ApiKey.CREATE_TOPICS, "drop after")
    done = call("topic", "create", "maybe")
    assert done.exit_code == 3
    assert "outcome unknown" in done.stderr
    assert "maybe" in broker.topic_ids


def test_nobody_there_is_1_and_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    done = invoke(["topic", "list", "-b", address, "--timeout", "0.3"])
    assert done.exit_code == 1
    assert address in done.stderr
    assert "raftmq dev" in done.stderr


@pytest.mark.parametrize("words", [["produce", "t", "x", "--timeout", "0.3"], ["consume", "t"]])
def test_records_of_nobody_say_who_was_tried(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    monkeypatch.setattr("raftmq.cli.consume.TOPIC_TIMEOUT_S", 0.3)
    done = invoke([*words, "-b", address])
    assert done.exit_code == 1
    assert f"no broker answered: tried {address} (Connection refused)" in done.stderr
    assert "raftmq dev" in done.stderr


def test_a_topic_that_is_there_already_is_told(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("t", 2)
    words = ("topic", "create", "t", "--if-not-exists")
    assert call(*words).stdout == "topic t is there: 2 partitions, replication factor 1\n"
    assert json.loads(call(*words, "--json").stdout)["PartitionCount"] == 2


def test_a_name_that_is_all_a_broker_says_stands_once() -> None:
    error = BrokerError(3, "UNKNOWN_TOPIC_OR_PARTITION", about="topic 't'")
    assert str(error) == "topic 't': UNKNOWN_TOPIC_OR_PARTITION"


def test_any_partition_in_kcats_words(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("t", 1)
    assert call("produce", "t", "a", "b", "-p", "-1").exit_code == 0
    assert call("consume", "t").stdout == "a\nb\n"


def test_records_from_arguments_and_standard_input(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("t", 1)
    assert call("produce", "t", "one", "two").exit_code == 0
    assert call("produce", "-t", "t", stdin="three\nfour").exit_code == 0
    done = call("consume", "t")
    assert done.stdout == "one\ntwo\nthree\nfour\n"
    assert done.exit_code == 0


def test_kcats_letters(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("t", 2)
    done = call(
        *("produce", "-P", "-t", "t", "-p", "1", "-K", ":", "-D", ";", "-H", "h=1", "-z", "zstd"),
        *("-Z", "-c", "2"),
        stdin="k:v;:;dropped",
    )
    assert done.exit_code == 0, done.output
    assert parse_header(broker.logs[("t", 1)].batches[0]).codec.name == "ZSTD"
    shown = call("consume", "-C", "-t", "t", "-e", "-q", "-f", "%t [%p] %o %K:%k %S:%s %h|")
    assert shown.stdout == "t [1] 0 1:k 1:v h=1|t [1] 1 -1: -1: h=1|"


def test_consume_as_json(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("t", 1)
    call("produce", "t", "-H", "a=b", "-k", "key", stdin=b"\xff\xfe")
    content = json.loads(call("consume", "t", "--json").stdout)
    assert content["key"] == "key"
    assert content["value"] == {"base64": "//4="}
    assert content["headers"] == [["a", "b"]]
    assert content["timestamp_type"] == "CreateTime"


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["-o", "earliest"], "0 1 2 3"),
        (["-o", "beginning"], "0 1 2 3"),
        (["-o", "2"], "2 3"),
        (["-o", "99"], ""),
        (["-o", "-1"], "3"),
        (["-o", "latest"], ""),
        (["-o", "end"], ""),
        (["-c", "2"], "0 1"),
        (["-c", "0"], ""),
        (["-o", "@0"], "0 1 2 3"),
        (["-o", "@2100-01-01T00:00:00Z"], ""),
        (["-K", "="], "=0 =1 =2 =3"),
    ],
    ids=" ".join,
)
def test_where_consuming_starts_and_ends(
    call: Call, broker: FakeBroker, words: list[str], values: str
) -> None:
    broker.make_topic("t", 1)
    call("produce", "t", "0", "1", "2", "3")
    done = call("consume", "t", "-p", "0", *words)
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == values.split()


def test_following_waits_for_more(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("t", 1)
    call("produce", "t", "0", "1")
    assert call("consume", "t", "--follow", "-c", "2").stdout == "0\n1\n"
    assert call("consume", "t", "--follow", "--idle", "0.01").stdout == "0\n1\n"


def test_a_group_resumes_and_its_lag_is_shown(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("t", 1)
    call("produce", "t", "0", "1", "2")
    assert call("consume", "t", "-G", "g", "-c", "2").stdout == "0\n1\n"
    lines = call("group", "describe", "g").stdout.splitlines()
    assert lines[1].split()[:6] == [
        *("GROUP", "TOPIC", "PARTITION", "CURRENT-OFFSET", "LOG-END-OFFSET", "LAG")
    ]
    assert lines[2].split()[:6] == ["g", "t", "0", "2", "3", "1"]
    assert call("consume", "t", "-G", "g").stdout == "2\n"
    assert call("group", "list", "--json").exit_code == 0
    assert call("group", "delete", "g").exit_code == 0
    assert "g" not in broker.groups


def test_a_member_without_a_partition_ends(
    call: Call, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.make_topic("t", 1)
    call("produce", "t", "0")
    nothing = Struct(error_code=ErrorCode.NONE, assignment=encode_assignment(()))
    monkeypatch.setattr(broker, "_on_sync_group", lambda *_: nothing)
    done = call("consume", "t", "-G", "g")
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert "other members of the group read all partitions" in done.stderr


def test_what_a_group_printed_is_committed_at_ctrl_c(
    call: Call, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.make_topic("t", 1)
    call("produce", "t", "0", "1", "2")
    poll, polls = Consumer.poll, iter(range(1_000))

    def interrupted(self: Consumer, timeout: float, records_max: int) -> list[ConsumerRecord]:
        found = poll(self, timeout, records_max)
        if not found and next(polls) > 1:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Consumer, "poll", interrupted)
    done = call("consume", "t", "-G", "g", "--follow")
    assert done.exit_code == 130
    assert done.stdout == "0\n1\n2\n"
    monkeypatch.undo()
    monkeypatch.setenv("RAFTMQ_BOOTSTRAP", broker.address)
    assert call("group", "describe", "g").stdout.splitlines()[2].split()[3] == "3"


def test_refused_records_are_counted_and_told(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("t", 1)
    broker.fault(ApiKey.PRODUCE, "refuse", ErrorCode.INVALID_RECORD)
    done = call("produce", "t", "x")
    assert done.exit_code == 1
    assert "0 records written, 1 failed, 0 unknown" in done.stderr
    broker.fault(ApiKey.PRODUCE, "hold")
    done = call("produce", "t", "x", "--timeout", "0.2")
    assert done.exit_code == 3
    assert "1 unknown" in done.stderr


def test_the_cluster_is_described(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("t", 2)
    status = json.loads(call("cluster", "status", "--json").stdout)
    assert status["Brokers"] == [1]
    assert status["Partitions"] == 2
    assert status["OfflinePartitions"] == []
    assert "LeaderId: 1  LeaderEpoch: 3" in call("cluster", "describe").stdout
    (node,) = json.loads(call("node", "list", "--json").stdout)
    assert node["NodeId"] == 1
    assert node["Leaders"] == 2
    assert node["Controller"] is True


def test_replicas_that_a_move_adds_need_not_be_in_sync(call: Call, broker: FakeBroker) -> None:
    """As `kafka-topics --under-replicated-partitions` counts."""
    broker.make_topic("t", 2)
    broker.moves["t", 1] = [2, 3]

    def under() -> list[int]:
        told = json.loads(call("cluster", "status", "--json").stdout)
        return [row["Partition"] for row in told["UnderReplicatedPartitions"]]

    assert under() == []
    broker.fault(ApiKey.LIST_PARTITION_REASSIGNMENTS, "refuse", ErrorCode.UNKNOWN_SERVER_ERROR)
    assert under() == [1], "nobody could say why"


def test_bench_measures_and_cleans_up(call: Call, broker: FakeBroker) -> None:
    done = call("bench", "-c", "50", "-s", "10", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["Test"] for row in rows] == ["one in flight", "produce", "consume"]
    assert rows[2]["Records"] == 50
    assert broker.topic_ids == {}


HAND_PARSED = ("start", "dev", "demo")


def every_command() -> list[list[str]]:
    """The words of every command, from the application itself."""
    found: list[list[str]] = []

    def walk(command: Any, words: list[str]) -> None:
        if not hasattr(command, "commands"):
            found.append(words)
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, [*words, name])

    walk(command_tree(), [])
    assert len(found) > 30
    return found


def test_bench_shows_how_far_it_is_on_a_terminal(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, int, int]] = []

    class Recorded(Bar):
        def name(self, text: str) -> None:
            shown.append((text, 0, 0))

        def update(self, done: int, of: int, told: str) -> None:
            shown.append((told, done, of))

    @contextmanager
    def recorded(name: str, as_json: bool) -> Iterator[Bar]:
        assert (name, as_json) == ("one in flight", False)
        yield Recorded(None, name)

    monkeypatch.setattr("raftmq.cli.bench.progress_bar", recorded)
    assert call("bench", "-c", "2500", "-s", "10").exit_code == 0
    assert ("1 records", 1, 2000) in shown, "as soon as there is something to tell"
    assert ("produce", 0, 0) in shown
    assert shown.count(("2,500 records", 2500, 2500)) == 2


def test_progress_is_for_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress_bar("work", as_json=False) as bar:
        bar.update(1, 2, "1 of 2")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress_bar("work", as_json=True) as bar:
        bar.update(1, 2, "1 of 2")
    assert capsys.readouterr() == ("", "")
    with progress_bar("work", as_json=False) as bar:
        bar.update(1, 2, "1 of 2")
    told = capsys.readouterr()
    assert told.out == ""
    assert "1 of 2" in told.err


def test_every_command_has_help_with_an_example(call: Call) -> None:
    for words in every_command():
        done = call(*words, "--help")
        assert done.exit_code == 0
        assert "Examples:" in done.stdout or words[0] in HAND_PARSED, words
    assert "unknown outcome" in call("--help").stdout
    assert call("--version").stdout.startswith("raftmq 0.")


def test_completion_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "true")
    command_tree.cache_clear()  # typer looks at that when it makes the commands
    done = invoke(["--show-completion", "bash"])
    command_tree.cache_clear()
    assert "_RAFTMQ_COMPLETE" in done.stdout or "complete" in done.stdout
