"""A worker that ends well: SIGTERM sets a flag, and nothing is lost or done by halves.

`python examples/worker.py [host:port]`. It reads orders, does its work, and sends an invoice for
each. A signal handler runs in the middle of anything, so it only sets a flag (a call of the client
there would be refused); the loop looks at it between two polls. An order counts as finished once
its invoice is acknowledged: `commit()` comes after `flush()`, and what `kill -9` leaves unfinished
is read again. A callback tells what failed, since receipts are not kept.
"""

import signal
import sys
from types import FrameType

from raftmq_client import Consumer, Outcome, Producer, Receipt

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9092"


class Stop:
    """Whether to go on."""

    is_set = False


def stop(_number: int, _frame: FrameType | None) -> None:
    """Take note; the loop does the rest."""
    Stop.is_set = True


signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
failed: list[Receipt] = []


def look(receipt: Receipt) -> None:
    """Called by the producer's thread, so quick; it may not wait."""
    if receipt.outcome is not Outcome.OK:
        failed.append(receipt)


with (
    Producer(BOOTSTRAP, delivery="at_least_once", value_serializer="json") as producer,
    Consumer(
        BOOTSTRAP,
        group="billing",
        topics="orders",
        delivery="at_least_once",
        auto_commit_ms=None,
        value_deserializer="json",
    ) as consumer,
):
    print("works", flush=True)
    while not Stop.is_set:
        orders = consumer.poll(0.5)
        for order in orders:
            invoice = {"order": order.value, "sum": 5}
            producer.send("invoices", invoice, key=order.key, on_delivery=look)
        if not orders:
            continue
        producer.flush()
        if failed:
            raise SystemExit(f"an invoice was not acknowledged: {failed[0].error}")
        consumer.commit()
        print(f"billed up to {orders[-1].offset} of partition {orders[-1].partition}", flush=True)
print("stopped; the next run goes on here")
