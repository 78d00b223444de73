"""The admin of kafka-python: what it lists, describes, finds and aborts of transactions."""

from __future__ import annotations

import kafka
import pytest
from kafka.admin._transactions import AbortTransactionSpec
from kafka.errors import InvalidTxnStateError

from tests.clients.test_transactions import PARTITIONS, producer, send
from tests.live.harness import Cluster
from tests.live.load import create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow]

SLACK_MS = 5 * 60 * 1000
"""Which it adds to the longest timeout before it calls a transaction hanging."""


def test_an_open_transaction_as_its_admin_sees_it(shared_cluster: Cluster, unique: str) -> None:
    create_topic(shared_cluster.bootstrap, unique, PARTITIONS)
    made = producer(shared_cluster, unique)
    made.begin_transaction()
    send(made, unique, "open")
    admin = kafka.KafkaAdminClient(bootstrap_servers=shared_cluster.bootstrap)
    try:
        listed = admin.list_transactions(
            state_filters=["Ongoing"], transactional_id_pattern=f"{unique}.*"
        )
        ((coordinator, row),) = [(node, row) for node, rows in listed.items() for row in rows]
        assert (row.transactional_id, row.state) == (unique, "Ongoing")
        told = admin.describe_transactions([unique])[unique]
        at = kafka.TopicPartition(unique, 0)
        assert (told.coordinator_id, told.producer_id) == (coordinator, row.producer_id)
        assert told.topic_partitions == {at}
        assert told.transaction_start_time_ms > 0
        (state,) = admin.describe_producers([at])[at].active_producers
        assert state.producer_id == row.producer_id
        assert state.current_transaction_start_offset == 0
        assert unique not in [one["transactional_id"] for one in admin.find_hanging_transactions()]
        # When it began is told as late as any clock may have it, perhaps a second ahead.
        hanging = admin.find_hanging_transactions(max_transaction_timeout_ms=-2 * SLACK_MS)
        (found,) = [one for one in hanging if one["transactional_id"] == unique]
        assert found["topic_partitions"] == [at]
        with pytest.raises(InvalidTxnStateError):  # no orphan
            admin.abort_transaction(
                AbortTransactionSpec(at, state.producer_id, state.producer_epoch)
            )
    finally:
        admin.close()
        made.abort_transaction(60)
