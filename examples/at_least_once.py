"""Each record into a database exactly once, by at-least-once delivery and a unique constraint.

`python examples/at_least_once.py [host:port] [file.db]`. The consumer commits an offset only after
the records below it are in the database, so a crash at any point (try `kill -9`) makes records come
again and never passes one over. A record that comes again meets the unique constraint on its place
(topic, partition, offset) and changes nothing.

The constraint does the work, not the commit: where the effect cannot be made idempotent (a mail,
a card payment), at-least-once means now and then twice.
"""

import signal
import sqlite3
import sys
from types import FrameType

from raftmq_client import Consumer

BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:9092"
DATABASE = sys.argv[2] if len(sys.argv) > 2 else "orders.db"


def stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, stop)
database = sqlite3.connect(DATABASE)
database.execute(
    "CREATE TABLE IF NOT EXISTS orders"
    " (topic TEXT, partition INT, offset INT, value BLOB, UNIQUE (topic, partition, offset))"
)
with Consumer(
    BOOTSTRAP,
    group="warehouse",
    topics="orders",
    delivery="at_least_once",
    auto_commit_ms=None,
    session_timeout_ms=6_000,  # so long the partitions of one that was killed have no reader
) as consumer:
    try:
        while True:
            messages = consumer.poll(1.0)
            if not messages:
                continue
            rows = [(m.topic, m.partition, m.offset, m.value) for m in messages]
            with database:  # one transaction
                database.executemany("INSERT OR IGNORE INTO orders VALUES (?, ?, ?, ?)", rows)
            consumer.commit()  # only now: what comes again does no harm, what is lost would
            print(f"stored up to {rows[-1][:3]}", flush=True)
    except KeyboardInterrupt:
        print("stopped; the next run goes on here")
