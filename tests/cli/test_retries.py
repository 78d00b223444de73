"""`raftmq retry` and `raftmq dead`: the topics of retries, and dead records that are sent again."""

from __future__ import annotations

import json

import pytest

from raftmq.types import TopicPartition
from raftmq_client import ConsumerRecord
from raftmq_client.blocking.consumer import Consumer
from raftmq_client.blocking.producer import Producer
from tests.cli.conftest import Call
from tests.client.fake_broker import FakeBroker

TARGET, RETRY, DEAD = "orders.billing", "orders.billing.retry", "orders.billing.dead"
ERRORS = [
    ("__dlq.errors.topic", b"orders"),
    ("__dlq.errors.partition", b"1"),
    ("__dlq.errors.offset", b"7"),
    ("__dlq.errors.message", b"no such customer"),
]


@pytest.fixture
def made(call: Call, broker: FakeBroker) -> FakeBroker:
    broker.make_topic("orders", 2)
    done = call("retry", "create", "billing", "--of", "orders", "--min", "500ms", "--attempts", "3")
    assert done.exit_code == 0, done.output
    return broker


def bury(broker: FakeBroker, *values: str, partition: int = 0) -> None:
    with Producer(broker.address) as producer:
        for value in values:
            headers = [*ERRORS, ("trace", b"x"), ("raftmq-attempt", b"3")]
            producer.send(DEAD, value.encode(), b"k", headers, partition)


def read(broker: FakeBroker, topic: str, partition: int, count: int) -> list[ConsumerRecord]:
    found: list[ConsumerRecord] = []
    with Consumer(broker.address) as consumer:
        consumer.assign({TopicPartition(topic, partition): 0})
        while len(found) < count:
            found += consumer.poll(0.05)
    return found


def test_the_topics_of_a_groups_retries(made: FakeBroker) -> None:
    assert {name: made.configs[name] for name in (TARGET, RETRY, DEAD)} == {
        TARGET: {"max.message.bytes": "1114124"},
        DEAD: {"max.message.bytes": "1114124", "retention.ms": "-1"},
        RETRY: {
            "max.message.bytes": "1114124",
            "raftmq.delivers.to": TARGET,
            "raftmq.dead.to": DEAD,
            "raftmq.retry.attempts": "3",
            "raftmq.retry.min.ms": "500",
            "raftmq.retry.max.ms": "600000",
            "raftmq.retry.factor": "2",
        },
    }
    assert [sum(name == topic for topic, _ in made.logs) for name in (TARGET, RETRY, DEAD)] == [
        2,
        2,
        2,
    ]


def test_making_them_again(call: Call, made: FakeBroker) -> None:
    again = ("retry", "create", "billing", "--of", "orders")
    assert "TOPIC_ALREADY_EXISTS" in call(*again).output
    assert call("topic", "delete", RETRY).exit_code == 0
    assert call(*again, "--if-not-exists", "--json").exit_code == 0
    assert made.configs[RETRY]["raftmq.retry.attempts"] == "8"


@pytest.mark.parametrize("words", [("--min", "soon"), ("--max", "1y"), ("--factor", "0.5")])
def test_a_policy_that_makes_no_sense(call: Call, broker: FakeBroker, words: tuple[str]) -> None:
    broker.make_topic("orders", 1)
    done = call("retry", "create", "billing", "--of", "orders", *words)
    assert done.exit_code == 2, done.output
    assert list(broker.configs) == ["orders"]


def test_they_are_listed_described_and_deleted(call: Call, made: FakeBroker) -> None:
    made.make_topic("plain.retry", 1)
    listed = call("retry", "list").stdout.splitlines()
    assert [line.split() for line in listed[1:]] == [
        [RETRY, TARGET, DEAD, "3", "500", "600000", "2"]
    ]
    bury(made, "a", "b", partition=1)
    told = json.loads(call("retry", "describe", "billing", "--of", "orders", "--json").stdout)
    assert told["Configs"]["raftmq.retry.attempts"] == "3"
    rows = {(row["Role"], row["Partition"]): row["EndOffset"] for row in told["Partitions"]}
    assert rows[("dead", 1)] == 2
    assert len(rows) == 8
    shown = call("retry", "describe", "billing", "--of", "orders").stdout
    assert "Attempts: 3  Wait: 500 to 600000 ms, each 2 times the one before" in shown
    assert call("retry", "delete", "billing", "--of", "orders").exit_code == 0
    assert sorted(made.topic_ids) == ["orders", DEAD, "plain.retry"]
    refused = call("retry", "delete", "x", "--of", "orders")
    assert (refused.exit_code, "is no retry topic" in refused.stderr) == (1, True)


def test_dead_records_are_listed_shown_and_replayed_once(call: Call, made: FakeBroker) -> None:
    bury(made, "a", "b", "c", partition=1)
    assert call("dead", "list").stdout.splitlines()[1].split() == [DEAD, RETRY, "3", "3"]
    shown = json.loads(call("dead", "show", DEAD, "-c", "2", "--json").stdout)
    assert [(row["Partition"], row["Offset"], row["Key"]) for row in shown] == [
        (1, 0, "k"),
        (1, 1, "k"),
    ]
    assert {(row["Attempts"], row["From"], row["Reason"]) for row in shown} == {
        ("3", "orders/1/7", "no such customer")
    }
    planned = json.loads(call("dead", "replay", DEAD, "--dry-run", "--json").stdout)
    assert [(row["Partition"], row["FromOffset"], row["EndOffset"]) for row in planned] == [
        (0, 0, 0),
        (1, 0, 3),
    ]
    assert planned[1]["To"] == f"{TARGET}/1"
    assert made.logs[(TARGET, 1)].end == 0, "a dry run sends nothing"
    assert "2 records sent" in call("dead", "replay", DEAD, "-c", "2").stdout
    assert call("dead", "list").stdout.splitlines()[1].split() == [DEAD, RETRY, "3", "1"]
    assert "1 records sent" in call("dead", "replay", DEAD).stdout
    assert "0 records sent" in call("dead", "replay", DEAD).stdout, "none twice"
    found = read(made, TARGET, 1, 3)
    assert [record.value for record in found] == [b"a", b"b", b"c"]
    headers = (*ERRORS, ("trace", b"x"), ("raftmq-attempt", b"1"))
    assert found[0].headers == headers, "attempts count anew"
    assert len(json.loads(call("dead", "show", DEAD, "--json").stdout)) == 0
    assert len(json.loads(call("dead", "show", DEAD, "--all", "--json").stdout)) == 3


def test_a_replay_of_a_topic_that_nothing_sends_to_wants_to_know_where_to(
    call: Call, made: FakeBroker
) -> None:
    made.make_topic("lost", 1)
    refused = call("dead", "replay", "lost")
    assert (refused.exit_code, "--to says where to" in refused.stderr) == (2, True)
    assert call("dead", "replay", "lost", "--to", "orders").exit_code == 0
