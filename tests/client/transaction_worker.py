"""An application of exactly-once processing, and one that ends what another began; to be killed.

    python -m tests.client.transaction_worker copy PROTOCOL BOOTSTRAP SOURCE TARGET
    python -m tests.client.transaction_worker end BOOTSTRAP HANDLE commit|abort

`copy` copies a topic of two partitions in transactions of a few records, says how many after each,
and ends when nothing has come for a while.
"""

from __future__ import annotations

import sys

from raftmq.types import TopicPartition
from raftmq_client import Admin, Consumer, Producer, TransactionHandle
from raftmq_client.core.client import ClientCore


def copy(protocol: str, bootstrap: str, source: str, target: str) -> None:
    if protocol == "1":
        ClientCore.feature_level = lambda _self, _name: 0  # type: ignore[method-assign]
    with (
        Producer(bootstrap, delivery="exactly_once", transactional_id=target) as producer,
        Consumer(bootstrap, delivery="exactly_once", group=target) as consumer,
    ):
        consumer.assign([TopicPartition(source, partition) for partition in range(2)])
        idle = 0
        while idle < 3:
            with producer.transaction(consumer) as tx:
                records = consumer.poll(1.0, 10)
                for record in records:
                    tx.send(target, record.value, partition=record.partition)
            idle = 0 if records else idle + 1
            sys.stdout.write(f"{len(records)}\n")
            sys.stdout.flush()


def end(bootstrap: str, handle: str, how: str) -> None:
    with Admin(bootstrap) as admin:
        admin.end_transaction(TransactionHandle.from_json(handle), commit=how == "commit")


if __name__ == "__main__":
    {"copy": copy, "end": end}[sys.argv[1]](*sys.argv[2:])
