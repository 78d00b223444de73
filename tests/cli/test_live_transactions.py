"""`raftmq txn` on real nodes: a producer that leaves its transaction open, and its end."""

from __future__ import annotations

import json
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import TopicPartition

from tests.live.forks import run_command
from tests.live.harness import Cluster
from tests.live.load import create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_a_transaction_that_was_left_open(shared_cluster: Cluster, unique: str) -> None:
    create_topic(shared_cluster.bootstrap, unique, 2)
    made = confluent_kafka.Producer(
        {"bootstrap.servers": shared_cluster.bootstrap, "transactional.id": unique}
    )
    made.init_transactions(60)
    made.begin_transaction()
    for _ in range(3):
        made.produce(unique, b"x", partition=0)
    assert made.flush(60) == 0
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": shared_cluster.bootstrap, "group.id": unique}
    )
    consumer.commit(offsets=[TopicPartition(unique, 0, 0)], asynchronous=False)
    made.send_offsets_to_transaction(
        [TopicPartition(unique, 1, 0)], consumer.consumer_group_metadata(), 60
    )
    consumer.close()

    def told(*words: str) -> Any:
        done = run_command([*words, "--json", "-b", shared_cluster.bootstrap])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    listed = told("txn", "list", "--pattern", f"{unique}.*", "--state", "Ongoing")
    (row,) = listed
    assert row["TRANSACTIONAL-ID"] == unique
    assert 0 <= row["RUNNING-S"] < 300
    assert told("txn", "list", "--pattern", unique, "--longer-than", "3000") == []
    found = told("txn", "describe", unique)
    assert (found["STATE"], found["TIMEOUT-MS"]) == ("Ongoing", 60_000)
    assert found["GROUPS"] == [unique]
    (held,) = found["PARTITIONS"]
    assert held.pop("HELD-S") is not None
    assert held == {
        "TOPIC": unique,
        "PARTITION": 0,
        "OPEN-AT": 0,
        "LAST-STABLE": 0,
        "BEHIND": 3,
        "HELD-BY": unique,
    }
    (hanging,) = told("txn", "hanging", "-t", unique, "--longer-than", "0")
    assert (hanging["HELD-BY"], hanging["OPEN-AT"]) == (unique, 0)
    (lag,) = told("group", "describe", unique)["PARTITIONS"]
    assert (lag["LAG"], lag["STABLE-LAG"]) == (3, 0)
    # It is not orphaned: no marker ends it, but a newer producer does.
    done = run_command(["txn", "abort", "-t", f"{unique}:0", "-b", shared_cluster.bootstrap])
    assert done.returncode == 1
    assert f"is no orphan: it belongs to {unique!r}" in done.stderr
    assert told("txn", "abort", unique, "--dry-run")["PARTITIONS"] == 1
    assert told("txn", "describe", unique)["STATE"] == "Ongoing"
    told("txn", "abort", unique)
    assert told("txn", "describe", unique)["STATE"] == "Empty"
    assert told("txn", "hanging", "-t", unique, "--longer-than", "0") == []
    with pytest.raises(confluent_kafka.KafkaException, match="fenced"):
        made.commit_transaction(60)
