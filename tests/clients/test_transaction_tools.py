"""Kafka's own tools for transactions: what they list, describe, find, copy and end."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.clients.programs import kafka_command
from tests.clients.test_transactions import PARTITIONS, producer, read, send
from tests.clients.transactional import send_plain
from tests.live.harness import Cluster, wait_until
from tests.live.load import create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.polyglot]


def attempt(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*kafka_command(), f"org.apache.kafka.tools.{name}", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run(name: str, *words: str) -> str:
    done = attempt(name, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def transactions(cluster: Cluster, *words: str) -> list[dict[str, str]]:
    """Rows of `kafka-transactions`, by the names of their columns."""
    head, *rows = run(
        "TransactionsCommand", "--bootstrap-server", cluster.bootstrap, *words
    ).splitlines()
    names = head.split("\t")
    return [
        dict(zip(map(str.strip, names), map(str.strip, row.split("\t")), strict=True))
        for row in rows
    ]


def test_an_open_transaction_is_listed_described_and_ended(
    shared_cluster: Cluster, unique: str
) -> None:
    create_topic(shared_cluster.bootstrap, unique, PARTITIONS)
    made = producer(shared_cluster, unique)
    made.begin_transaction()
    send(made, unique, "open")

    def listed() -> list[str]:
        rows = transactions(shared_cluster, "list")
        return [row["TransactionState"] for row in rows if row["TransactionalId"] == unique]

    assert listed() == ["Ongoing"]
    (row,) = transactions(shared_cluster, "describe", "--transactional-id", unique)
    assert row["TransactionState"] == "Ongoing"
    assert row["TopicPartitions"] == f"{unique}-0"
    at = ("--topic", unique, "--partition", "0")
    (held,) = transactions(shared_cluster, "describe-producers", *at)
    assert held["ProducerId"] == row["ProducerId"]
    assert held["CurrentTransactionStartOffset"] == "0"
    # It is not orphaned: its coordinator ends it, and nobody else.
    hanging = ("find-hanging", "--topic", unique, "--max-transaction-timeout", "0")
    assert transactions(shared_cluster, *hanging) == []
    abort = ("--bootstrap-server", shared_cluster.bootstrap, "abort", *at, "--start-offset", "0")
    refused = attempt("TransactionsCommand", *abort)
    assert refused.returncode != 0
    assert "attempted a transactional operation in an invalid state" in refused.stderr
    assert listed() == ["Ongoing"]
    end = ("forceTerminateTransaction", "--transactionalId", unique)
    run("TransactionsCommand", "--bootstrap-server", shared_cluster.bootstrap, *end)
    wait_until(lambda: listed() == ["Empty"], 60, "as by a newer producer")
    (held,) = transactions(shared_cluster, "describe-producers", *at)
    assert held["CurrentTransactionStartOffset"] == "None"
    assert read(shared_cluster, unique) == []
    assert read(shared_cluster, unique, "read_uncommitted") == ["open"]


@pytest.mark.parametrize("mode", [(), ("--group-mode", "--use-group-metadata")])
def test_the_copier_copies_each_record_once(
    shared_cluster: Cluster, unique: str, mode: tuple[str, ...]
) -> None:
    """It aborts some of its transactions by chance and reads them again."""
    target = f"{unique}-target"
    create_topic(shared_cluster.bootstrap, unique)
    create_topic(shared_cluster.bootstrap, target, PARTITIONS)
    values = [f"{number:03}" for number in range(200)]
    send_plain(shared_cluster.bootstrap, unique, *values)
    told = run(
        "TransactionalMessageCopier",
        *("--broker-list", shared_cluster.bootstrap, "--enable-random-aborts"),
        *("--input-topic", unique, "--input-partition", "0", "--output-topic", target),
        *("--max-messages", "200", "--transaction-size", "20"),
        *("--consumer-group", unique, "--transactional-id", unique, *mode),
    )
    last = json.loads(told.splitlines()[-1])
    assert last["remaining"] == 0
    assert read(shared_cluster, target) == values


def test_the_console_shows_only_what_is_committed(shared_cluster: Cluster, unique: str) -> None:
    """What Kafka's verifying producer wrote, which has no transactions, and nothing aborted."""
    create_topic(shared_cluster.bootstrap, unique, PARTITIONS)
    made = producer(shared_cluster, unique)
    made.begin_transaction()
    send(made, unique, *(f"aborted-{n}" for n in range(2 * PARTITIONS)))
    made.abort_transaction(60)
    run(
        "VerifiableProducer",
        *("--bootstrap-server", shared_cluster.bootstrap, "--topic", unique),
        *("--max-messages", "30"),
    )
    told = run(
        "consumer.ConsoleConsumer",
        *("--bootstrap-server", shared_cluster.bootstrap, "--topic", unique),
        *("--from-beginning", "--max-messages", "30", "--isolation-level", "read_committed"),
    )
    assert sorted(told.split(), key=int) == [f"{number}" for number in range(30)]
