"""The blocking driver: `Producer`, `Consumer`, `Worker` and `Admin` on plain sockets.

Each runs one background thread; no event loop. After a fork make new ones: the old refuse.
"""

from raftmq_client.blocking.admin import Admin
from raftmq_client.blocking.consumer import Consumer
from raftmq_client.blocking.producer import Producer, Transaction
from raftmq_client.blocking.worker import Worker

__all__ = ["Admin", "Consumer", "Producer", "Transaction", "Worker"]
