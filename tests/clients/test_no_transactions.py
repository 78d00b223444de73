"""Transactions are not offered: a client that wants them is told so at once."""

from __future__ import annotations

import time

import confluent_kafka
import pytest

from tests.live.harness import Cluster

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_init_transactions_fails_at_once(shared_cluster: Cluster, unique: str) -> None:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": shared_cluster.bootstrap, "transactional.id": unique}
    )
    began = time.monotonic()
    with pytest.raises(confluent_kafka.KafkaException) as caught:
        producer.init_transactions(60)
    assert time.monotonic() - began < 20, "librdkafka went on asking"
    error = caught.value.args[0]
    assert error.code() == confluent_kafka.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert not error.retriable()
