"""`raftmq txn`: what runs, what it holds back, and the forced end of what hangs."""

from __future__ import annotations

import json
import time

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from tests.cli.conftest import Call
from tests.client.fake_broker import FakeBroker
from tests.client.fake_transactions import Listed


def prepare(call: Call, broker: FakeBroker) -> None:
    """Topic t with ten records; billing-1 is open from 4 on, an orphan from 6 on; two more ids."""
    broker.make_topic("t", 2)
    call("produce", "t", "-p", "0", *map(str, range(10)))
    now_ms = int(time.time() * 1000)
    broker.listed = {
        "billing-1": Listed(7, started_at_ms=now_ms - 100_000, partitions=[("t", 0), ("t", 1)]),
        "billing-2": Listed(8, "CompleteCommit", started_at_ms=-1),
        "audit": Listed(9, "PrepareAbort", started_at_ms=now_ms - 5_000),
    }
    broker.opened = {("t", 0): {7: 4, 11: 6}}
    broker.epochs = dict.fromkeys(broker.listed, 3)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["audit", "billing-1", "billing-2"]),
        (["--state", "Ongoing"], ["billing-1"]),
        (["--state", "Ongoing", "--state", "PrepareAbort"], ["audit", "billing-1"]),
        (["--producer-id", "8"], ["billing-2"]),
        (["--longer-than", "50"], ["billing-1", "billing-2"]),
        (["--pattern", "bill.*"], ["billing-1", "billing-2"]),
    ],
)
def test_ids_are_listed_by_filters(
    call: Call, broker: FakeBroker, words: list[str], names: list[str]
) -> None:
    prepare(call, broker)
    done = call("txn", "list", *words, "--json")
    assert done.exit_code == 0, done.output
    assert [row["TRANSACTIONAL-ID"] for row in json.loads(done.stdout)] == names


def test_the_list_says_for_how_long(call: Call, broker: FakeBroker) -> None:
    prepare(call, broker)
    lines = call("txn", "list").stdout.splitlines()
    assert lines[0].split() == [
        "TRANSACTIONAL-ID",
        "STATE",
        "RUNNING-S",
        "PRODUCER-ID",
        "COORDINATOR",
    ]
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines[1:]]
    assert rows[0][:2] == ["audit", "PrepareAbort"]
    assert 5 <= int(rows[0][2]) < 60
    assert rows[1][:2] == ["billing-1", "Ongoing"]
    assert 100 <= int(rows[1][2]) < 160
    assert rows[2] == ["billing-2", "CompleteCommit", "-", "8", "1"]


def test_a_state_that_is_none(call: Call) -> None:
    done = call("txn", "list", "--state", "Asleep")
    assert done.exit_code == 2
    assert "no state of transactions: Asleep; Empty, Ongoing" in done.stderr


def test_an_id_is_described_with_what_holds_its_partitions(call: Call, broker: FakeBroker) -> None:
    prepare(call, broker)
    done = call("txn", "describe", "billing-1", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    rows = told.pop("PARTITIONS")
    assert told.pop("SINCE-MS") == broker.listed["billing-1"].started_at_ms
    assert told == {
        "TRANSACTIONAL-ID": "billing-1",
        "STATE": "Ongoing",
        "PRODUCER-ID": 7,
        "PRODUCER-EPOCH": 3,
        "TIMEOUT-MS": 60_000,
        "COORDINATOR": 1,
        "GROUPS": None,
    }
    assert 100 <= rows[0].pop("HELD-S") < 160
    assert rows == [
        {
            "TOPIC": "t",
            "PARTITION": 0,
            "OPEN-AT": 4,
            "LAST-STABLE": 4,
            "BEHIND": 6,
            "HELD-BY": "billing-1",
        },
        {
            "TOPIC": "t",
            "PARTITION": 1,
            "OPEN-AT": None,
            "LAST-STABLE": 0,
            "BEHIND": 0,
            "HELD-BY": None,
            "HELD-S": None,
        },
    ]
    text = call("txn", "describe", "billing-1").stdout
    assert text.startswith("billing-1: Ongoing  COORDINATOR: 1\n")
    assert "TIMEOUT: 60000 ms\nSINCE: 20" in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_id_that_nobody_knows(call: Call) -> None:
    for words in (["describe", "x"], ["abort", "x"], ["abort", "x", "--dry-run"]):
        done = call("txn", *words)
        assert done.exit_code == 1
        assert "transactional id 'x': TRANSACTIONAL_ID_NOT_FOUND" in done.stderr
        assert "`raftmq txn list` shows what there is." in done.stderr


def test_what_hangs_is_found_with_its_owner(call: Call, broker: FakeBroker) -> None:
    prepare(call, broker)

    def found(*words: str) -> list[tuple[str, int, int]]:
        done = call("txn", "hanging", *words, "--json")
        assert done.exit_code == 0, done.output
        return [(r["HELD-BY"], r["OPEN-AT"], r["BEHIND"]) for r in json.loads(done.stdout)]

    assert found() == [("(orphan)", 6, 6)], "billing-1 runs for 100 s only"
    assert found("--longer-than", "60") == [("billing-1", 4, 6), ("(orphan)", 6, 6)]
    assert found("-t", "t:0") == [("(orphan)", 6, 6)]
    assert found("-t", "t:1") == []
    assert max(map(len, call("txn", "hanging").stdout.splitlines())) <= 80
    done = call("txn", "hanging", "-t", "nope")
    assert done.exit_code == 1
    assert "UNKNOWN_TOPIC_OR_PARTITION" in done.stderr


def test_a_producer_is_fenced(call: Call, broker: FakeBroker) -> None:
    prepare(call, broker)
    planned = call("txn", "abort", "billing-1", "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert planned.stdout.startswith(
        "would be aborted: TRANSACTIONAL-ID: billing-1  PRODUCER-ID: 7"
    )
    assert broker.epochs["billing-1"] == 3
    done = call("txn", "abort", "billing-1")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("aborted: TRANSACTIONAL-ID: billing-1")
    assert broker.epochs["billing-1"] == 4


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("billing-2", "nothing runs under 'billing-2' that could be aborted: it is CompleteCommit"),
        ("audit", "`raftmq txn describe` shows which partitions owe their markers."),
    ],
)
def test_what_is_decided_is_not_aborted(
    call: Call, broker: FakeBroker, name: str, says: str
) -> None:
    prepare(call, broker)
    done = call("txn", "abort", name)
    assert done.exit_code == 1
    assert says in done.stderr
    assert broker.epochs[name] == 3


def test_an_orphan_is_ended_by_a_marker(call: Call, broker: FakeBroker) -> None:
    prepare(call, broker)
    planned = call("txn", "abort", "-t", "t:0", "--dry-run", "--json")
    assert planned.exit_code == 0, planned.output
    told = json.loads(planned.stdout)
    assert told.pop("HELD-S") > 1_000_000
    assert told == {"PARTITION": "t-0", "PRODUCER-ID": 11, "EPOCH": 3, "OPEN-AT": 6}
    assert broker.markers == []
    assert call("txn", "abort", "-t", "t:0").exit_code == 0
    assert broker.markers == [("t", 0, 11, 3)]
    done = call("txn", "abort", "-t", "t:0")
    assert done.exit_code == 1
    assert "what is open in t-0 is no orphan: it belongs to 'billing-1'" in done.stderr
    assert len(broker.markers) == 1


def test_one_of_several_orphans_is_named(call: Call, broker: FakeBroker) -> None:
    prepare(call, broker)
    broker.opened["t", 0][12] = 8
    done = call("txn", "abort", "-t", "t:0")
    assert done.exit_code == 2
    assert "2 are open in t-0: --producer-id 11, 12?" in done.stderr
    assert call("txn", "abort", "-t", "t:0", "--producer-id", "12").exit_code == 0
    assert broker.markers == [("t", 0, 12, 3)]
    done = call("txn", "abort", "-t", "t:1", "--producer-id", "12")
    assert done.exit_code == 1
    assert "nothing is open in t-1 of producer id 12" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "which one?"),
        (["x", "-t", "t:0"], "which one?"),
        (["-t", "t"], "is not TOPIC:PARTITION"),
        (["-t", "t:0,1"], "is not TOPIC:PARTITION"),
        (["x", "--producer-id", "1"], "--producer-id goes with -t"),
    ],
)
def test_words_that_name_no_transaction(call: Call, words: list[str], says: str) -> None:
    done = call("txn", "abort", *words)
    assert done.exit_code == 2
    assert says in done.stderr


def test_an_answer_that_is_lost_leaves_it_open(call: Call, broker: FakeBroker) -> None:
    prepare(call, broker)
    broker.fault(ApiKey.INIT_PRODUCER_ID, "refuse", ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    done = call("txn", "abort", "billing-1")
    assert done.exit_code == 1
    for _ in range(20):
        broker.fault(ApiKey.INIT_PRODUCER_ID, "drop after")
    done = call("txn", "abort", "billing-1", "--timeout", "0.5")
    assert done.exit_code == 3
    assert "outcome unknown" in done.stderr


def test_lag_of_a_group_by_isolation(call: Call, broker: FakeBroker) -> None:
    """The lag to the last stable offset is shown beside the other one where they differ."""
    prepare(call, broker)
    broker.groups["g"] = {("t", 0): 3, ("t", 1): 0}
    told = json.loads(call("group", "describe", "g", "--json").stdout)["PARTITIONS"]
    assert [(r["LOG-END-OFFSET"], r["LAG"], r["STABLE-LAG"]) for r in told] == [
        (10, 7, 1),
        (0, 0, 0),
    ]
    lines = call("group", "describe", "g").stdout.splitlines()
    assert lines[1].split()[5:7] == ["LAG", "STABLE-LAG"]
    broker.opened.clear()
    lines = call("group", "describe", "g").stdout.splitlines()
    assert lines[1].split()[5:7] == ["LAG", "CONSUMER-ID"]
