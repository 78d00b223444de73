"""FastStream over raftmq, unchanged: what a handler cannot process is retried by the broker.

`python examples/faststream_worker.py [host:port]`, after

    raftmq topic create orders && raftmq retry create billing --of orders

FastStream's own nack seeks back, and the same message comes again at once, for ever. The middleware
below makes of it what docs/delays.md promises: the record goes to `orders.billing.retry`, waits
longer after each attempt, comes back in `orders.billing`, and after the last one is in
`orders.billing.dead`. A RejectMessage sends it there at once. FastStream commits once the
middleware has returned, so a record is never committed before it is safe elsewhere.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from faststream import AckPolicy, BaseMiddleware, FastStream
from faststream.exceptions import NackMessage, RejectMessage
from faststream.kafka import KafkaBroker
from faststream.kafka.annotations import KafkaMessage
from faststream.message import StreamMessage

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9092"
TOPIC, GROUP = "orders", "billing"
BACK = f"{TOPIC}.{GROUP}"


class Retries(BaseMiddleware):
    """Sends what was nacked, or raised, to the retry topic, and what was rejected to the dead."""

    async def consume_scope(
        self, call_next: Callable[[Any], Awaitable[Any]], msg: StreamMessage[Any]
    ) -> Any:
        """Call the handler; what it cannot process is safe elsewhere on return."""
        try:
            return await call_next(msg)
        except RejectMessage as error:
            await send_on(f"{BACK}.dead", msg, error)
        except (NackMessage, ValueError, OSError) as error:
            await send_on(f"{BACK}.retry", msg, error)
        return None


async def send_on(topic: str, msg: StreamMessage[Any], error: Exception) -> None:
    """Send key, value and all headers on, and where the record was read first."""
    record = msg.raw_message
    headers = dict(msg.headers)
    headers.setdefault("__dlq.errors.topic", record.topic)
    headers.setdefault("__dlq.errors.partition", str(record.partition))
    headers.setdefault("__dlq.errors.offset", str(record.offset))
    headers["__dlq.errors.message"] = f"{type(error).__name__}: {error}"
    await broker.publish(msg.body, topic, key=record.key, headers=headers)
    print(f"to {topic}: {headers['__dlq.errors.message']}", file=sys.stderr, flush=True)


broker = KafkaBroker(BOOTSTRAP.split(","), middlewares=[Retries])
app = FastStream(broker)


@broker.subscriber(
    TOPIC,
    BACK,
    group_id=GROUP,
    auto_offset_reset="earliest",
    ack_policy=AckPolicy.NACK_ON_ERROR,  # what is neither done nor sent on is read again
)
async def bill(order: dict[str, Any], msg: KafkaMessage) -> None:
    """Bill an order."""
    attempt = int(msg.headers.get("raftmq-attempt", "1"))
    if "customer" not in order:
        raise RejectMessage  # it will never be better
    if order["customer"] == "busy" and attempt < 3:
        raise NackMessage
    if order["customer"] == "nobody":
        raise ValueError("no such customer")
    print(f"billed {order['customer']} at attempt {attempt}", flush=True)


if __name__ == "__main__":
    asyncio.run(app.run())
