"""The blocking producer: `send` takes a record and gives a receipt; a thread does the rest.

Owns waiting: for room in the buffer, for receipts, for a flush. Decides nothing about batches,
retries or order (`core/producer.py` does). Safe to share between threads, not across a fork.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from raftmq.codec import Codec
from raftmq.records import NewRecord
from raftmq_client.blocking.engine import Engine, now_ms
from raftmq_client.core.accumulator import Receipt
from raftmq_client.core.partitioners import make_partitioner
from raftmq_client.core.produce_requests import ACKS_ALL, ProducerOptions
from raftmq_client.core.producer import ProducerCore
from raftmq_client.errors import BufferFullError, TimedOutError, UsageError
from raftmq_client.options import client_options


class Producer:
    """Sends records: `with Producer("localhost:9092") as producer: producer.send("t", b"v")`.

    Thread safe. Idempotent with `acks="all"` (the default): no duplicates, no reordering within a
    partition, whatever is retried. Leaving the `with` block flushes.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str] = "127.0.0.1:9092",
        *,
        acks: str | int = "all",
        idempotent: bool | None = None,
        compression: str = "none",
        compression_level: int | None = None,
        linger_ms: float = 5.0,
        batch_bytes: int = 128 * 1024,
        buffer_bytes_max: int = 32 << 20,
        request_bytes_max: int = 1 << 20,
        in_flight_max: int = 5,
        request_timeout_ms: float = 30_000,
        delivery_timeout_ms: float = 120_000,
        max_block_ms: float = 60_000,
        partitioner: str = "murmur2",
        client_id: str = "raftmq-producer",
    ) -> None:
        options = ProducerOptions(
            acks=read_acks(acks),
            idempotent=idempotent,
            codec=read_codec(compression),
            compression_level=compression_level,
            linger_ms=linger_ms,
            batch_bytes=batch_bytes,
            buffer_bytes_max=buffer_bytes_max,
            request_bytes_max=request_bytes_max,
            in_flight_max=in_flight_max,
            request_timeout_ms=request_timeout_ms,
            delivery_timeout_ms=delivery_timeout_ms,
        )
        self._engine = Engine(client_options(bootstrap, client_id), name=client_id)
        client = self._engine.client
        self._core = ProducerCore(
            options,
            client.metadata,
            make_partitioner(partitioner, random.Random()),
            client.backoff_until,
        )
        client.cores.append(self._core)
        self._options = options
        self._max_block_ms = max_block_ms
        self._waiter = _Waiter(self)
        self._engine.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # After an error in the block nobody waits: what is on its way is told as unknown.
        self.close(flush=kind is None)

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> Receipt:
        """Take a record; its receipt tells where it went.

        Raises:
            BufferFullError: no room within `max_block_ms`; the record was not taken.
            RecordTooLargeError: it cannot fit into a request.
            UsageError: the producer is closed.
        """
        stamp = int(time.time() * 1000) if timestamp is None else timestamp
        record = NewRecord(key, value, stamp, tuple(headers))
        engine = self._engine
        core = self._core
        with engine.lock:
            engine.check()
            if core.accumulator.size_bytes >= self._options.buffer_bytes_max:
                self._wait_for_room()
            receipt, is_due = core.send(topic, record, partition, self._waiter, now_ms())
            if is_due:
                engine.wake()
        return receipt

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every record sent so far is settled, well or badly.

        Args:
            timeout: seconds; None waits for the delivery timeout at most.

        Raises:
            TimeoutError: some are still on their way.
        """
        limit = self._options.delivery_timeout_ms + 5_000 if timeout is None else timeout * 1000
        engine, core = self._engine, self._core
        with engine.lock:
            engine.check()
            core.accumulator.is_flushing = True
            engine.wake()
            try:
                if not engine.wait_for(lambda: core.pending == 0, now_ms() + limit):
                    raise TimeoutError(f"{core.pending} records are still on their way")
            finally:
                core.accumulator.is_flushing = False

    def partitions(self, topic: str, timeout: float = 10.0) -> int:
        """How many partitions a topic has.

        Raises:
            TimedOutError: nobody could tell in time.
        """
        engine = self._engine
        with engine.lock:
            engine.check()
            metadata = engine.client.metadata
            metadata.want((topic,))
            engine.wake()
            if not engine.wait_for(
                lambda: metadata.partition_count(topic) is not None, now_ms() + timeout * 1000
            ):
                raise TimedOutError(f"no metadata of topic {topic!r} in time", sent=False)
            return metadata.partition_count(topic) or 0

    def close(self, *, flush: bool = True) -> None:
        """Flush (unless told otherwise) and stop; what is not settled is told as unknown."""
        if self._engine.is_closed:
            return
        try:
            if flush:
                self.flush()
        finally:
            with self._engine.lock:
                self._core.give_up(UsageError("the producer was closed"))
                self._engine.changed.notify_all()
            self._engine.close()

    def _wait_for_room(self) -> None:
        accumulator = self._core.accumulator
        limit = self._options.buffer_bytes_max
        self._engine.wake()
        if not self._engine.wait_for(
            lambda: accumulator.size_bytes < limit, now_ms() + self._max_block_ms
        ):
            raise BufferFullError(f"the buffer of {limit} bytes stayed full")

    def _wait(self, receipt: Receipt, timeout_s: float | None) -> bool:
        engine = self._engine
        limit = self._options.delivery_timeout_ms + 5_000 if timeout_s is None else timeout_s * 1000
        with engine.lock:
            if self._core.hurry(receipt):
                engine.wake()
            return engine.wait_for(lambda: receipt.is_done, now_ms() + limit)


class _Waiter:
    """What receipts hold of their producer."""

    __slots__ = ("_producer",)

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def wait(self, receipt: Receipt, timeout_s: float | None) -> bool:
        """Wait until the receipt is settled; False when the time is over."""
        return self._producer._wait(receipt, timeout_s)


def read_acks(acks: str | int) -> int:
    """Kafka's words for acks.

    Raises:
        UsageError: not 0, 1 or all.
    """
    known = {"0": 0, "1": 1, "all": ACKS_ALL, "-1": ACKS_ALL}
    if str(acks) not in known:
        raise UsageError(f"acks is 0, 1 or all, not {acks!r}")
    return known[str(acks)]


def read_codec(name: str) -> Codec:
    """A codec by Kafka's name.

    Raises:
        UsageError: there is none of that name.
    """
    try:
        return Codec[name.upper()]
    except KeyError:
        names = ", ".join(codec.name.lower() for codec in Codec)
        raise UsageError(f"unknown compression {name!r}; one of {names}") from None
