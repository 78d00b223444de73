"""`raftmq group seek`: new offsets within the log, of the partitions that were named."""

from __future__ import annotations

import json

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from tests.cli.conftest import Call
from tests.client.fake_broker import FakeBroker


def prepare(call: Call, broker: FakeBroker) -> None:
    """Topics t (10 and 4 records) and u (none); group g is at 5, 2 and 0."""
    broker.make_topic("t", 2)
    broker.make_topic("u", 1)
    for partition, count in ((0, 10), (1, 4)):
        call("produce", "t", "-p", str(partition), *map(str, range(count)))
    broker.groups["g"] = {("t", 0): 5, ("t", 1): 2, ("u", 0): 0}


@pytest.mark.parametrize(
    ("words", "moved"),
    [
        (["--to", "earliest"], {("t", 0): 0, ("t", 1): 0, ("u", 0): 0}),
        (["--to", "latest"], {("t", 0): 10, ("t", 1): 4, ("u", 0): 0}),
        (["--to", "3"], {("t", 0): 3, ("t", 1): 3, ("u", 0): 0}),
        (["--to", "7", "-t", "t"], {("t", 0): 7, ("t", 1): 4}),
        (["--to", "7", "-t", "t:0"], {("t", 0): 7}),
        (["--to", "1", "-t", "t:0,1"], {("t", 0): 1, ("t", 1): 1}),
        (["--to", "1", "-t", "t:0", "-t", "u"], {("t", 0): 1, ("u", 0): 0}),
        (["--shift", "-2", "-t", "t"], {("t", 0): 3, ("t", 1): 0}),
        (["--shift", "-9", "-t", "t"], {("t", 0): 0, ("t", 1): 0}),
        (["--shift", "3", "-t", "t"], {("t", 0): 8, ("t", 1): 4}),
        (["--to", "@0", "-t", "t:0"], {("t", 0): 0}),
        (["--to", "2001-01-01T00:00:00Z", "-t", "t:0"], {("t", 0): 0}),
        (["--to", "2999-01-01T00:00:00Z", "-t", "t:0"], {("t", 0): 10}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_offsets_are_moved(
    call: Call, broker: FakeBroker, words: list[str], moved: dict[tuple[str, int], int]
) -> None:
    prepare(call, broker)
    before = dict(broker.groups["g"])
    planned = call("group", "seek", "g", *words, "--dry-run", "--json")
    assert planned.exit_code == 0, planned.output
    assert (broker.groups["g"], broker.commits) == (before, [])
    done = call("group", "seek", "g", *words, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(planned.stdout)
    assert json.loads(done.stdout)[0] == {
        "GROUP": "g",
        "TOPIC": min(moved)[0],
        "PARTITION": min(moved)[1],
        "CURRENT-OFFSET": before[min(moved)],
        "NEW-OFFSET": moved[min(moved)],
    }
    assert broker.commits == [(-1, moved)]
    assert broker.groups["g"] == before | moved


def test_a_new_group_gets_offsets_of_the_topics_named(call: Call, broker: FakeBroker) -> None:
    prepare(call, broker)
    done = call("group", "seek", "new", "--to", "latest", "-t", "t:1")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1].split() == ["new", "t", "1", "-", "4"]
    assert broker.groups["new"] == {("t", 1): 4}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["g"], 2, "one of --to and --shift"),
        (["g", "--to", "1", "--shift", "1"], 2, "one of --to and --shift"),
        (["g", "--to", "yesterday"], 2, "'yesterday'"),
        (["g", "--to", "-3"], 2, "negative"),
        (["g", "--to", "1", "-t", "t:x"], 2, "is not TOPIC[:PARTITION,...]"),
        (["g", "--to", "1", "-t", "t:"], 2, "is not TOPIC[:PARTITION,...]"),
        (["g", "--to", "1", "-t", "nope"], 1, "UNKNOWN_TOPIC_OR_PARTITION"),
        (["g", "--to", "1", "-t", "t:7"], 1, "UNKNOWN_TOPIC_OR_PARTITION"),
        (["nope", "--to", "1"], 1, "has no offsets"),
        (["nope", "--shift", "1", "-t", "t"], 1, "no offset to shift: t-0, t-1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_changes_nothing(
    call: Call, broker: FakeBroker, words: list[str], code: int, says: str
) -> None:
    prepare(call, broker)
    done = call("group", "seek", *words)
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert broker.commits == []


def test_a_group_with_members_is_refused(call: Call, broker: FakeBroker) -> None:
    prepare(call, broker)
    broker.group_states["g"] = "Stable"
    done = call("group", "seek", "g", "--to", "earliest")
    assert done.exit_code == 1
    assert "NON_EMPTY_GROUP" in done.stderr
    assert "Stop its members first" in done.stderr
    assert broker.commits == []


def test_a_member_that_came_meanwhile_is_the_brokers_refusal(
    call: Call, broker: FakeBroker
) -> None:
    prepare(call, broker)
    broker.fault(ApiKey.OFFSET_COMMIT, "refuse", ErrorCode.UNKNOWN_MEMBER_ID)
    done = call("group", "seek", "g", "--to", "earliest")
    assert done.exit_code == 1
    assert "UNKNOWN_MEMBER_ID" in done.stderr


def test_a_lost_answer_is_unknown(call: Call, broker: FakeBroker) -> None:
    prepare(call, broker)
    broker.fault(ApiKey.OFFSET_COMMIT, "drop after")
    assert call("group", "seek", "g", "--to", "earliest").exit_code == 3
