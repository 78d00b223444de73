"""The async driver: `Producer`, `Consumer`, `Worker` and `Admin` under trio and under asyncio.

Each runs its tasks in a task group of its own, opened by `async with`. The names and options are
those of `raftmq_client.blocking`; what waits is awaited.
"""

from raftmq_client.aio.admin import Admin
from raftmq_client.aio.consumer import Consumer
from raftmq_client.aio.producer import Producer, Receipt, Transaction
from raftmq_client.aio.worker import Worker

__all__ = ["Admin", "Consumer", "Producer", "Receipt", "Transaction", "Worker"]
