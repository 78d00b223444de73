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


# ---- delay topics without retries ----


@pytest.fixture
def undelivered(call: Call, broker: FakeBroker) -> FakeBroker:
    """Two delay topics that share a topic of what they could not deliver."""
    for name in ("orders", "bills", "undelivered"):
        broker.make_topic(name, 2)
    for target in ("orders", "bills"):
        words = (f"{target}.later", "-p", "2", "--delivers-to", target, "--dead-to", "undelivered")
        done = call("topic", "create", *words)
        assert done.exit_code == 0, done.output
    return broker


def give_up(broker: FakeBroker, value: str, source: str, partition: int = 0) -> None:
    own = [
        ("raftmq-created-at", b"1"),
        ("raftmq-delayed-at", f"{source}/{partition}/7".encode()),
        ("raftmq-given-up", b"its target was gone"),
    ]
    with Producer(broker.address) as producer:
        producer.send("undelivered", value.encode(), b"k", [("trace", b"x"), *own], partition)


def test_a_delay_topic_gets_a_dead_topic(call: Call, undelivered: FakeBroker) -> None:
    assert undelivered.configs["orders.later"] == {
        "raftmq.delivers.to": "orders",
        "raftmq.dead.to": "undelivered",
        "raftmq.retry.attempts": "0",
    }
    words = ("x", "--delivers-to", "orders", "--dead-to", "undelivered")
    assert call("topic", "create", *words, "-c", "raftmq.retry.attempts=3").exit_code == 0
    assert undelivered.configs["x"]["raftmq.retry.attempts"] == "3", "as somebody says himself"


def test_what_was_not_delivered_is_listed_shown_and_replayed(
    call: Call, undelivered: FakeBroker
) -> None:
    assert "orders" not in call("retry", "list").stdout
    give_up(undelivered, "a", "orders.later", partition=1)
    give_up(undelivered, "b", "bills.later", partition=1)
    listed = call("dead", "list").stdout.splitlines()[1]
    assert listed.split() == ["undelivered", "bills.later,orders.later", "2", "2"]
    first, second = json.loads(call("dead", "show", "undelivered", "--json").stdout)
    assert (first["From"], first["Reason"]) == ("orders.later/1/7", "its target was gone")
    assert second["From"] == "bills.later/1/7"
    planned = json.loads(call("dead", "replay", "undelivered", "--dry-run", "--json").stdout)
    assert planned[1]["To"] == "bills/1,orders/1"
    assert "2 records sent to bills, orders" in call("dead", "replay", "undelivered").stdout
    for target, value in (("orders", b"a"), ("bills", b"b")):
        (found,) = read(undelivered, target, 1, 1)
        assert (found.value, found.headers) == (value, (("trace", b"x"),)), "nothing counts here"


def test_a_replay_sends_nothing_where_it_does_not_know_where_to(
    call: Call, undelivered: FakeBroker
) -> None:
    give_up(undelivered, "a", "orders.later")
    give_up(undelivered, "b", "gone.later")
    refused = call("dead", "replay", "undelivered")
    assert refused.exit_code == 1
    assert "undelivered/0/1 comes from gone.later, which sends here no more" in refused.stderr
    assert undelivered.logs[("orders", 0)].end == 0
    assert call("dead", "replay", "undelivered", "-c", "1").exit_code == 0, "up to there"
    assert undelivered.logs[("orders", 0)].end == 1


def test_a_replay_to_a_target_that_is_still_gone(call: Call, undelivered: FakeBroker) -> None:
    give_up(undelivered, "a", "orders.later")
    assert call("topic", "delete", "orders").exit_code == 0
    refused = call("dead", "replay", "undelivered")
    assert "was to come to orders, which is not there; --to says where to" in refused.stderr
    assert call("topic", "delete", "bills").exit_code == 0
    refused = call("dead", "replay", "undelivered")
    assert "there is no topic bills, orders; --to says where to" in refused.stderr
    undelivered.make_topic("orders", 1)
    assert "1 records sent to orders" in call("dead", "replay", "undelivered").stdout
    assert undelivered.logs[("orders", 0)].end == 1
