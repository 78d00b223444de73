"""An asyncio service that takes orders and answers only when they are safe.

`python examples/service.py [host:port] [port]`. Clients send one JSON object per line and get one
per line: `{"offset": 4, "partition": 0}` once a majority of the replicas has the order on disk,
`{"error": ..., "outcome": "failed" | "unknown"}` otherwise. Try `nc 127.0.0.1 8400`.

One producer serves all connections: it gathers what they send into batches. SIGTERM stops taking
connections and leaves the `async with` block, which sends what is still on its way.
"""

import asyncio
import json
import signal
import sys

from raftmq_client import ClientError
from raftmq_client.aio import Producer

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9092"
PORT = int(sys.argv[2]) if len(sys.argv) > 2 else 8400


async def take_order(producer: Producer, line: bytes) -> dict[str, object]:
    """Store one order; what is answered is true whatever happens to the brokers."""
    try:
        order = json.loads(line)
        customer = str(order["customer"])
    except (ValueError, KeyError, TypeError):
        return {"error": "an order is a JSON object with a customer", "outcome": "failed"}
    try:
        place = await (await producer.send("orders", order, key=customer))
    except ClientError as error:
        return {"error": str(error), "outcome": error.outcome.value}
    return {"partition": place.partition, "offset": place.offset}


async def main() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with Producer(
        BOOTSTRAP,
        key_serializer="str",
        value_serializer="json",
        delivery="at_least_once",
        delivery_timeout_ms=10_000,
    ) as producer:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                answer = await take_order(producer, line)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", PORT)
        print(f"takes orders at 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await stop.wait()
        server.close()


asyncio.run(main())
