"""The blocking producer: `send` takes a record and gives a receipt; a thread does the rest. And its
transactions: `with producer.transaction() as tx: ...`.

Owns waiting: for room in the buffer, for receipts, for a flush. Decides nothing about batches,
retries or order (`core/producer.py` does), nor what belongs to a transaction, how it ends and what
an error of it means (`core/transactions.py`). Safe to share between threads, not across a fork.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, Generic, Self, Unpack

from attrs import evolve

from raftmq.types import TopicPartition
from raftmq_client.blocking.consumer import Consumer
from raftmq_client.blocking.engine import Engine, now_ms
from raftmq_client.core.accumulator import Listener, Receipt
from raftmq_client.core.build import build_producer
from raftmq_client.core.group_requests import Identity
from raftmq_client.core.outstanding import report, tell
from raftmq_client.core.partitioners import check_partition
from raftmq_client.core.progress import Places
from raftmq_client.core.transaction_requests import TransactionHandle
from raftmq_client.core.transaction_scope import Scope, explicit_positions
from raftmq_client.core.transactions import OffsetCommit, TransactionCore, unknown_end
from raftmq_client.errors import (
    BufferFullError,
    ClientError,
    EndUnknownError,
    MustAbortError,
    TimedOutError,
    TransactionError,
    UsageError,
)
from raftmq_client.later import with_delay
from raftmq_client.options import DEFAULT_BOOTSTRAP, ProducerSettings
from raftmq_client.serializers import K, V, check_extras, serialize
from raftmq_client.unclosed import watch

_LAST_ABORT_MS: Final = 5_000.0


class Producer(Generic[K, V]):
    """Sends records: `with Producer("localhost:9092") as producer: producer.send("t", b"v")`.

    Thread safe. Idempotent with `acks="all"` (the default): no duplicates, no reordering within a
    partition, whatever is retried. Leaving the `with` block flushes.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str] = DEFAULT_BOOTSTRAP,
        **settings: Unpack[ProducerSettings[K, V]],
    ) -> None:
        parts = build_producer(bootstrap, settings)
        self._encode_key, self._encode_value = parts.encode_key, parts.encode_value
        self._engine = Engine(parts.client, name=parts.client.options.client_id)
        self._core = parts.core
        self._options = parts.core.options
        self._half_full = self._options.buffer_memory // 2
        self._waiter = _Waiter(self)
        self._watch = watch(self, parts.core)
        self._engine.after_turn = self._deliver
        self._engine.after_crash = self._fall
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
        value: V | None,
        key: K | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp: int | None = None,
        *,
        deliver_at: datetime | int | None = None,
        deliver_after: timedelta | float | None = None,
        on_delivery: Listener | None = None,
    ) -> Receipt:
        """Take a record; its receipt tells where it went.

        `on_delivery(receipt)` is called by the background thread once the receipt is settled. It
        must be quick, and may send while there is room, but not wait (`UsageError`). An exception
        in it is logged, and counted in `callback_errors`.

        Into a delay topic with `deliver_at` (a datetime with a zone, or milliseconds since 1970) or
        `deliver_after` (a timedelta, or seconds) it comes to that topic's target when it is due.

        Raises:
            BufferFullError: no room within `max_block_ms`; the record was not taken.
            RecordTooLargeError: it cannot fit into a request.
            TransactionError: its transaction cannot be committed, or the producer is over.
            SerializationError: key, value, headers or timestamp cannot be turned into bytes.
            UsageError: the producer is closed or has no transaction open where it needs one, this
                thread is inside it already (a signal handler), or topic, partition or on_delivery
                are none.
        """
        stamp = int(time.time() * 1000) if timestamp is None else timestamp
        if type(value) is not bytes or self._encode_value is not None:
            value = serialize(self._encode_value, value, "value", topic)
        if key is not None and (type(key) is not bytes or self._encode_key is not None):
            key = serialize(self._encode_key, key, "key", topic)
        if deliver_at is not None or deliver_after is not None:
            headers = with_delay(headers, deliver_at, deliver_after)
        extras = tuple(headers)
        if extras or timestamp is not None:
            extras = check_extras(extras, timestamp, topic)
        if partition is not None and type(partition) is not int:
            check_partition(partition)  # True would be taken for 1 below
        record: Any = key, value, stamp, extras  # bytes by now
        engine = self._engine
        core = self._core
        if engine.is_held():
            engine.refuse_reentry()
        with engine.lock:
            engine.check()
            if core.accumulator.size_bytes >= self._half_full and not core.has_room(topic):
                self._wait_for_room(topic)
            if on_delivery is None:
                receipt: Receipt | None = core.append(topic, record, partition, self._waiter)
                if receipt is not None:
                    return receipt
            receipt, is_due = core.send(
                topic, record, partition, self._waiter, now_ms(), on_delivery
            )
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
        engine.check_wait()
        with engine.lock:
            engine.check()
            outstanding = core.outstanding()
            engine.wake()
            if not engine.wait_for(outstanding.is_over, now_ms() + limit):
                raise TimeoutError(f"{core.pending} records are still on their way")

    def transaction(self, consumer: Consumer[Any, Any] | None = None) -> Transaction[K, V]:
        """A transaction for a `with` block: begun on entry, committed at its end.

        An error in the block aborts it. The positions of `consumer` go along.

        Raises:
            UsageError: the producer has no `transactional_id`.
        """
        return Transaction(self, consumer)

    def begin(self, consumer: Consumer[Any, Any] | None = None) -> Transaction[K, V]:
        """Begin a transaction, to be ended by its `commit` or `abort`.

        Waits until older producers of the same `transactional_id` are fenced and what the last
        transaction left is aborted.

        Raises:
            UsageError: one is open, how the last commit ended was not asked, or there is no
                `transactional_id`.
            TimedOutError: it could not begin within `max_block_ms`.
            TransactionError: the producer is over.
        """
        transaction = self.transaction(consumer)
        transaction._begin()
        return transaction

    def detach(self, timeout: float | None = None) -> TransactionHandle:
        """Leave the open transaction to another process, which ends it by `Admin.end_transaction`.

        Waits until all its records are acknowledged. This producer begins no other: what makes a
        new one with the same `transactional_id` aborts it.

        Raises:
            MustAbortError: it cannot be committed; it is still this producer's.
            TimeoutError: records are still on their way.
            UsageError: no transaction is open.
        """
        transactions = self._transactions
        with self._engine.lock:
            transactions.check_open()
        self.flush(timeout)
        with self._engine.lock:
            handle, left_ms = transactions.detach(now_ms())
        return evolve(handle, deadline_ms=int(time.time() * 1000 + left_ms))

    @property
    def _transactions(self) -> TransactionCore:
        if self._core.transactions is None:
            raise UsageError("transactions need a producer with a transactional_id")
        return self._core.transactions

    def _end_transaction(self) -> None:
        """A producer that ends leaves no transaction open, as far as that can be had quickly."""
        core, engine = self._core, self._engine
        with engine.lock:
            if engine.is_open and core.abort_open():
                engine.wake()
                engine.wait_for(lambda: not core.is_ending, now_ms() + _LAST_ABORT_MS)

    def partitions(self, topic: str, timeout: float = 10.0) -> int:
        """How many partitions a topic has.

        Raises:
            BrokerError: the cluster knew no such topic until the time was over.
            TimedOutError: nobody could tell in time.
            AuthenticationError: no broker lets this client in.
        """
        return self._engine.partitions(topic, timeout)

    def close(self, *, flush: bool = True) -> None:
        """Flush (unless told otherwise) and stop; what is not settled is told as unknown.

        In a fork it does nothing: the records are the parent's.

        Raises:
            UndeliveredError: after a flush, records were not acknowledged and nobody had heard so.
        """
        if self._engine.is_closed or self._engine.is_foreign:
            return
        self._engine.check_wait()
        try:
            self._end_transaction()
            if flush:
                self.flush()
        finally:
            with self._engine.lock:
                self._engine.refuse()  # in one go: nothing is taken that nobody settles
                self._core.give_up(UsageError("the producer was closed"))
                self._engine.changed.notify_all()
            self._engine.close()
            self._deliver()
            self._watch.detach()
            error = report(self._core.untold)
        if flush and error is not None:
            raise error

    @property
    def callback_errors(self) -> int:
        """How many calls of `on_delivery` raised so far."""
        return self._core.callback_errors

    def _deliver(self) -> None:
        """Call what listens, without the lock."""
        with self._engine.lock:
            settled = self._core.listeners.take()
        failed = tell(settled)
        if settled:
            with self._engine.lock:
                self._core.callback_errors += failed
                self._core.listeners.told(len(settled))
                self._engine.changed.notify_all()

    def _fall(self) -> None:
        """The thread died: settle everything, so that nobody waits for ever."""
        self._core.give_up(UsageError("the producer died"))

    def _wait_for_room(self, topic: str) -> None:
        engine, core, limit = self._engine, self._core, self._options.buffer_memory
        engine.refuse_wait()
        engine.wake()
        if not engine.wait_for(lambda: core.has_room(topic), now_ms() + self._options.max_block_ms):
            raise BufferFullError(
                f"the buffer of {limit} bytes (buffer_memory) stayed full for"
                f" {self._options.max_block_ms:.0f} ms (max_block_ms){core.why_full(topic)}"
            )
        self._engine.check()  # the end of a producer makes room, too

    def _wait(self, receipt: Receipt, timeout_s: float | None) -> bool:
        engine = self._engine
        limit = self._options.delivery_timeout_ms + 5_000 if timeout_s is None else timeout_s * 1000
        engine.check_wait()
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


class Transaction(Generic[K, V]):
    """Records and positions that count together, or not at all. Made by a `Producer`.

    Leaving the block commits, an error in it aborts and is raised. With a `consumer` its positions
    go along, and it goes back to what its group has when the transaction is not committed.
    """

    def __init__(
        self, producer: Producer[K, V], consumer: Consumer[Any, Any] | None = None
    ) -> None:
        self._producer = producer
        self._engine = producer._engine
        self._scope = Scope(producer._transactions, consumer)

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._scope.is_open:
            return  # it was ended by word, or its producer is over and has said so
        if kind is None:
            try:
                self.commit()
            except EndUnknownError:
                raise
            except ClientError:
                if self._scope.is_open:
                    self.abort()
                raise
        elif not issubclass(kind, Exception) or not self._engine.is_open:
            self._abort_soon()
        else:
            try:
                self.abort()
            except ClientError as failure:
                assert error is not None
                error.add_note(f"and its transaction was not aborted in time: {failure}")

    def _begin(self) -> None:
        engine, core, scope = self._engine, self._scope.core, self._scope
        engine.check_wait()
        with engine.lock:
            engine.check()
            core.check_begin()
            engine.wake()
            if not engine.wait_for(
                lambda: core.is_ready, now_ms() + self._producer._options.max_block_ms
            ):
                raise TimedOutError(f"no transaction could begin: {core.why_not()}", sent=False)
            core.check_begin()
            scope.begin(now_ms())

    def send(
        self,
        topic: str,
        value: V | None,
        key: K | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp: int | None = None,
        *,
        on_delivery: Listener | None = None,
    ) -> Receipt:
        """As `Producer.send`; the record counts once the transaction is committed.

        Raises:
            MustAbortError: the transaction cannot be committed any more.
            ClientError: as `Producer.send`.
        """
        self._scope.check()
        return self._producer.send(
            topic, value, key, headers, partition, timestamp, on_delivery=on_delivery
        )

    def commit_offsets(
        self,
        source: Consumer[Any, Any] | str,
        offsets: Mapping[TopicPartition, int] | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Have positions become the group's when the transaction is committed.

        Those of all records that a consumer handed out, or given ones; of a consumer's group, which
        fences members that were put out (KIP-447), or of a group by its name.

        Raises:
            MustAbortError: others read these partitions by now, or the group refused.
            UsageError: no transaction is open, or the consumer commits by itself.
        """
        engine, core, scope = self._engine, self._scope.core, self._scope
        engine.check_wait()
        with engine.lock:
            engine.check()
            scope.check()
            core.check_open()
        try:
            who, places = _positions(source, offsets)
        except MustAbortError as error:
            with engine.lock:
                core.must_abort(error)
                engine.wake()
            raise
        if not places:
            return
        with engine.lock:
            commit = OffsetCommit(who, places, now_ms() + timeout * 1000)
            core.commit_offsets(commit)
            if not isinstance(source, str):
                scope.add(source, places)
            engine.wake()
            engine.wait_for(lambda: commit.is_done, commit.deadline + 1_000)
        if commit.error is not None:
            raise commit.error.fresh()

    def commit(self, timeout: float = 60.0) -> None:
        """Wait for all records, and commit. After an `EndUnknownError`, call it again.

        Raises:
            MustAbortError: it cannot be committed: abort it, and do its work again.
            EndUnknownError: nobody answered in time; calling again tells how it ended.
            FencedError: a newer producer has the transactional id.
        """
        scope = self._scope
        with self._engine.lock:
            self._engine.check()
            scope.check()
            consumer = scope.consumer if scope.is_open else None
        if consumer is not None:
            self.commit_offsets(consumer)
        try:
            self._end(commit=True, timeout=timeout)
        except TransactionError:
            if scope.core.fatal is not None:
                self._go_back()  # another producer may go on with them
            raise
        for source, places in scope.committed():
            with source._engine.lock:
                source._core.saved_by_transaction(places)

    def abort(self, timeout: float = 60.0) -> None:
        """Have nothing of it count; consumers go back to what their group has.

        Raises:
            UsageError: it is not open, or its commit may stand.
            EndUnknownError: nobody answered in time; it will be aborted.
            FencedError: a newer producer has the transactional id.
        """
        with self._engine.lock:
            self._engine.check()
            self._scope.check()
        try:
            self._end(commit=False, timeout=timeout)
        finally:
            self._go_back()

    def _end(self, *, commit: bool, timeout: float) -> None:
        engine, core, scope = self._engine, self._scope.core, self._scope
        engine.check_wait()
        with engine.lock:
            ending = scope.ending = self._producer._core.end_transaction(commit=commit)
            engine.wake()
            if not engine.wait_for(lambda: ending.is_done, now_ms() + timeout * 1000):
                raise unknown_end(commit, core.why_not())
            ending.result()

    def _abort_soon(self) -> None:
        """Interrupted: the producer's thread asks for the abort, or its end does."""
        with self._engine.lock:
            if self._engine.is_open:
                self._producer._core.end_transaction(commit=False)
                self._engine.wake()
        self._go_back()

    def _go_back(self) -> None:
        if self._scope.is_committing:
            return
        for consumer in self._scope.given_up():
            if consumer._engine.is_open:
                consumer.rewind()


def _positions(
    source: Consumer[Any, Any] | str, offsets: Mapping[TopicPartition, int] | None
) -> tuple[Identity, Places]:
    if isinstance(source, str):
        return explicit_positions(source, offsets)
    with source._engine.lock:
        source._engine.check()
        return source._core.for_transaction(offsets)
