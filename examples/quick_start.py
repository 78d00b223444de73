"""Send a record and read it back: `python examples/quick_start.py [host:port]`.

Any brokers will do: `raftmq dev` starts three nodes on this machine.
"""

import asyncio
import sys

from raftmq_client.aio import Consumer, Producer

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9092"


async def main() -> None:
    async with Producer(BOOTSTRAP, key_serializer="str", value_serializer="json") as producer:
        receipt = await producer.send("orders", {"item": 7}, key="customer-1")
        place = await receipt
        print(f"sent to partition {place.partition}, offset {place.offset}")
    async with Consumer(
        BOOTSTRAP,
        group="shop",
        topics="orders",
        reset="earliest",
        key_deserializer="str",
        value_deserializer="json",
    ) as consumer:
        async for message in consumer:
            print(f"read {message.value} of {message.key}")
            break


asyncio.run(main())
