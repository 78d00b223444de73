"""Errors for people and for machines, short help, and work on several things at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import Result

from raftmq.cli.main import run
from raftmq.protocol import ApiKey
from tests.cli.conftest import Call, command_tree
from tests.client.fake_broker import FakeBroker
from tests.live.harness import RAFTMQ


def commands() -> Iterator[list[str]]:
    """Every command by its words, groups of commands included."""

    found: list[tuple[list[str], Any]] = [([], command_tree())]
    while found:
        words, command = found.pop()
        if words[:1] not in (["start"], ["dev"], ["demo"]):  # argparse's, not typer's
            yield words
        found += [([*words, name], one) for name, one in getattr(command, "commands", {}).items()]


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_has_short_help_like_the_long(call: Call, words: list[str]) -> None:
    short = call(*words, "-h")
    assert short.exit_code == 0, short.output
    assert "Usage: raftmq" in short.stdout.replace("root", "raftmq")
    assert short.stdout == call(*words, "--help").stdout


def test_help_reads_well_at_80_columns(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in commands():
        shown = call(*words, "-h").stdout
        assert max(map(len, shown.splitlines())) <= 80, words
        assert "[[" not in shown, "a word that may be left out has one pair of brackets"
        assert "...}..." not in shown, words
    status = call("cluster", "status", "-h").stdout
    assert "A node that does not answer is shown as such" in status, "lines flow"


@pytest.mark.parametrize("word", ["start", "dev", "demo"])
def test_what_runs_nodes_has_short_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([word, "-h"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: raftmq {word}")


def told(done: Result) -> dict[str, Any]:
    """The error of a command with --json: one object on one line."""
    (line,) = done.stderr.splitlines()
    error: dict[str, Any] = json.loads(line)["error"]
    assert list(error) == ["message", "code", "outcome", "hint"]
    return error


@pytest.mark.parametrize(
    ("words", "exit_code", "code", "says"),
    [
        (["topic", "describe", "nope"], 1, "UNKNOWN_TOPIC_OR_PARTITION", "topic 'nope'"),
        (["topic", "create", "t"], 1, "TOPIC_ALREADY_EXISTS", "topic 't'"),
        (["topic", "alter", "t", "--unset", "bogus"], 1, "INVALID_CONFIG", "no setting"),
        (["topic", "alter", "t"], 2, None, "nothing to change"),
        (["topic", "delete", "nope"], 1, "UNKNOWN_TOPIC_OR_PARTITION", "topic 'nope'"),
        (["topic", "add-partitions", "t", "1"], 1, "INVALID_PARTITIONS", "topic 't'"),
        (["group", "delete", "nope"], 1, "GROUP_ID_NOT_FOUND", "group 'nope'"),
        (["group", "describe", "nope"], 1, None, "no group 'nope'"),
        (["topic", "create"], 2, None, "TOPIC"),
        (["topic", "frobnicate"], 2, None, "frobnicate"),
        (["topic", "list", "-b", "host:port"], 2, None, "is not host:port"),
        (["consume", "nope"], 1, "UNKNOWN_TOPIC_OR_PARTITION", "topic 'nope'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_are_json_where_results_are(
    call: Call,
    broker: FakeBroker,
    words: list[str],
    exit_code: int,
    code: str | None,
    says: str,
) -> None:
    broker.make_topic("t", 1)
    done = call(*words, "--json")
    assert done.exit_code == exit_code, done.output
    assert call(*words).exit_code == exit_code
    error = told(done)
    assert says in error["message"]
    assert (error["code"], error["outcome"]) == (code, "failed")


@pytest.mark.parametrize(
    ("words", "is_json"),
    [
        (["nope", "-J"], True),
        (["nope", "-eJ"], True),
        (["nope", "-eqJ"], True),
        (["nope", "-JC"], True),
        (["nope", "-Je"], True),
        (["nope", "-KJ"], False),
        (["nope", "-eKJ"], False),
        (["nope", "-e"], False),
        (["nope", "-eJ", "-o", "somewhere"], True),
        (["nope", "-eJ", "--bogus"], True),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_letters_in_one_word_ask_for_json_errors_too(
    call: Call, words: list[str], is_json: bool
) -> None:
    done = call("consume", *words)
    assert done.exit_code in (1, 2)
    if is_json:
        assert told(done)["message"]
    else:
        assert done.stderr.startswith("raftmq: topic 'nope'")


def test_an_unknown_outcome_is_told_as_json(call: Call, broker: FakeBroker) -> None:
    broker.fault(ApiKey.CREATE_TOPICS, "drop after")
    done = call("topic", "create", "maybe", "--json")
    assert (done.exit_code, told(done)["outcome"]) == (3, "unknown")


def test_a_name_in_an_error_prints(call: Call) -> None:
    done = call("topic", "describe", "a\x1b[2J\x7f\u202eb", "--json")
    assert done.stderr.rstrip("\n").isprintable()
    assert "\x1b" in told(done)["message"] or "\\x1b" in told(done)["message"]


def test_a_word_after_two_dashes_asks_for_nothing(call: Call) -> None:
    done = call("topic", "delete", "--", "--json")
    assert done.stderr.startswith("raftmq: topic '--json'")


def test_changes_are_told_as_json(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("t", 1)
    broker.groups["g"] = {("t", 0): 0}
    table = {
        ("topic", "alter", "t", "--set", "a=b"): {"Topic": "t", "Changed": {"a": "b"}},
        ("topic", "add-partitions", "t", "3"): {"Topic": "t", "PartitionCount": 3},
        ("group", "delete", "g"): {"Deleted": ["g"]},
        ("topic", "delete", "t"): {"Deleted": ["t"]},
    }
    for words, expected in table.items():
        done = call(*words, "--json")
        assert (done.exit_code, json.loads(done.stdout)) == (0, expected), done.output


def test_trimming_goes_on_past_what_fails_and_tells_each(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("t", 4)
    for partition in (0, 3):
        call("produce", "t", "-p", str(partition), "a", "b")
    done = call("topic", "trim", "t", "--before", "2")
    assert done.exit_code == 1
    assert [broker.logs["t", p].start for p in range(4)] == [2, 0, 0, 2]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[:3] for row in rows[1:]] == [
        ["t", "0", "2"],
        ["t", "1", "-"],
        ["t", "2", "-"],
        ["t", "3", "2"],
    ]
    first, hint = done.stderr.splitlines()
    assert first.startswith("raftmq: 2 of 4 partitions were not trimmed: t-1: OFFSET_OUT_OF_RANGE")
    assert "t-2: OFFSET_OUT_OF_RANGE" in first
    assert "topic describe" in hint
    as_json = call("topic", "trim", "t", "--before", "2", "--json")
    assert [row["LowWatermark"] for row in json.loads(as_json.stdout)] == [2, None, None, 2]
    assert told(as_json)["code"] == "OFFSET_OUT_OF_RANGE"


def test_deleting_goes_on_past_what_fails_and_tells_each(call: Call, broker: FakeBroker) -> None:
    for name in ("a", "c"):
        broker.make_topic(name, 1)
    done = call("topic", "delete", "a", "b", "c", "d")
    assert done.exit_code == 1
    assert done.stdout == "topic a deleted\ntopic c deleted\n"
    assert "2 of 4 topics were not deleted: topic 'b'" in done.stderr
    assert "topic 'd'" in done.stderr
    assert not broker.topic_ids


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "-c", "100"],
        ["topic", "list"],
        ["consume", "t", "--follow"],
        ["group", "list"],
    ],
    ids=lambda words: words[0],
)
def test_ctrl_c_is_130(broker: FakeBroker, words: list[str]) -> None:
    broker.make_topic("t", 1)
    fault = broker.fault(ApiKey.CREATE_TOPICS if words[0] == "bench" else ApiKey.METADATA, "hold")
    with subprocess.Popen(
        [RAFTMQ, *words],
        env={**os.environ, "RAFTMQ_BOOTSTRAP": broker.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert fault.was_met.wait(60)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_ctrl_c_while_modules_are_imported_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raftmq.cli.main._run", interrupt)
    with pytest.raises(SystemExit) as ended:
        run(["topic", "list"])
    assert ended.value.code == 130
