"""The async producer: `await send(...)` takes a record and gives a receipt; tasks do the rest. And
its transactions, under trio and asyncio: `async with producer.transaction() as tx: ...`.

Owns waiting: for room in the buffer, for receipts, for a flush. Decides nothing about batches,
retries or order (`core/producer.py` does), nor what belongs to a transaction, how it ends and what
an error of it means (`core/transactions.py`). Belongs to the loop that entered it; not for threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Final, Generic, Self, Unpack

import anyio
import anyio.lowlevel
from attrs import evolve

from raftmq.types import TopicPartition
from raftmq_client.aio.consumer import Consumer
from raftmq_client.aio.engine import Engine
from raftmq_client.core.accumulator import Receipt as CoreReceipt
from raftmq_client.core.accumulator import RecordMetadata
from raftmq_client.core.build import build_producer
from raftmq_client.core.outstanding import report, tell
from raftmq_client.core.partitioners import check_partition
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


class Receipt(CoreReceipt, eq=False):
    """The promise of a record's place: `place = await receipt`."""

    def __await__(self) -> Generator[Any, Any, RecordMetadata]:
        return self.result().__await__()

    async def result(  # type: ignore[override] # an async driver's receipt is awaited
        self, timeout: float | None = None
    ) -> RecordMetadata:
        """Wait until the record is acknowledged.

        Args:
            timeout: seconds; None waits for the producer's delivery timeout.

        Raises:
            ClientError: failed or unknown, see its `outcome`.
            TimeoutError: nothing is settled yet; the record is still on its way.
        """
        if not self.is_done:
            await self._waiter._settle(self, timeout)
        if not self.is_done:
            raise TimeoutError("the record is still on its way")
        return CoreReceipt.result(self)


class Producer(Generic[K, V]):
    """Sends records: `async with Producer("localhost:9092") as producer: ...`.

    Idempotent with `acks="all"` (the default): no duplicates, no reordering within a partition,
    whatever is retried. Leaving the block flushes.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str] = DEFAULT_BOOTSTRAP,
        **settings: Unpack[ProducerSettings[K, V]],
    ) -> None:
        parts = build_producer(bootstrap, settings)
        self._encode_key, self._encode_value = parts.encode_key, parts.encode_value
        self._engine = Engine(parts.client)
        self._core = parts.core
        self._core.receipt_class = Receipt
        self._options = parts.core.options
        self._half_full = self._options.buffer_memory // 2
        self._must_yield = False
        self._watch = watch(self, parts.core)
        self._engine.after_turn = self._deliver
        self._engine.after_crash = self._fall

    async def __aenter__(self) -> Self:
        await self._engine.start(in_block=True)
        return self

    async def start(self) -> Self:
        """Begin without a block; then `close` ends it, in any task. Not under trio."""
        await self._engine.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        # After an error in the block nobody waits: what is on its way is told as unknown.
        is_open = self._engine.is_open
        try:
            if kind is not None and issubclass(kind, anyio.get_cancelled_exc_class()):
                self._end_transaction_at_once()
            elif is_open:
                await self._end_transaction()
            if kind is None and is_open:
                await self.flush()
        finally:
            self._give_up()
            swallowed = await self._engine.stop(kind, error, trace)
        if is_open:
            self._report(must_raise=kind is None)
        return swallowed

    async def send(
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
        on_delivery: Callable[[Receipt], None] | None = None,
    ) -> Receipt:
        """Take a record; its receipt tells where it went.

        Waits only for room in the buffer, and lets other tasks run at least once per batch. A
        cancelled `send` has taken nothing. `on_delivery(receipt)` is called once the receipt is
        settled, by the loop: it must be quick. An exception in it is logged, and counted in
        `callback_errors`.

        Into a delay topic with `deliver_at` (a datetime with a zone, or milliseconds since 1970) or
        `deliver_after` (a timedelta, or seconds) it comes to that topic's target when it is due.

        Raises:
            BufferFullError: no room within `max_block_ms`; the record was not taken.
            RecordTooLargeError: it cannot fit into a request.
            TransactionError: its transaction cannot be committed, or the producer is over.
            SerializationError: key, value, headers or timestamp cannot be turned into bytes.
            UsageError: the producer is not open or has no transaction open where it needs one, or
                topic, partition or on_delivery are none.
        """
        engine, core = self._engine, self._core
        engine.check()
        if self._must_yield:
            self._must_yield = False
            await anyio.lowlevel.checkpoint()
            engine.check()
        if core.accumulator.size_bytes >= self._half_full and not core.has_room(topic):
            await self._wait_for_room(topic)
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
        receipt: Receipt | None = None
        if on_delivery is None:
            receipt = core.append(topic, record, partition, self)
        if receipt is None:
            receipt, is_due = core.send(topic, record, partition, self, engine.now(), on_delivery)
            if is_due:
                engine.check_loop()
                self._must_yield = True
                engine.wake()
        return receipt

    async def flush(self, timeout: float | None = None) -> None:
        """Wait until every record sent so far is settled, well or badly.

        Args:
            timeout: seconds; None waits for the delivery timeout at most.

        Raises:
            TimeoutError: some are still on their way.
        """
        limit = self._options.delivery_timeout_ms + 5_000 if timeout is None else timeout * 1000
        engine, core = self._engine, self._core
        engine.check()
        outstanding = core.outstanding()
        engine.wake()
        if not await engine.wait_for(outstanding.is_over, engine.now() + limit):
            raise TimeoutError(f"{core.pending} records are still on their way")

    def transaction(self, consumer: Consumer[Any, Any] | None = None) -> Transaction[K, V]:
        """A transaction for an `async with` block: begun on entry, committed at its end.

        An error in the block aborts it. The positions of `consumer` go along.

        Raises:
            UsageError: the producer has no `transactional_id`.
        """
        return Transaction(self, consumer)

    async def begin(self, consumer: Consumer[Any, Any] | None = None) -> Transaction[K, V]:
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
        await transaction._begin()
        return transaction

    async def detach(self, timeout: float | None = None) -> TransactionHandle:
        """Leave the open transaction to another process, which ends it by `Admin.end_transaction`.

        Waits until all its records are acknowledged. This producer begins no other: what makes a
        new one with the same `transactional_id` aborts it.

        Raises:
            MustAbortError: it cannot be committed; it is still this producer's.
            TimeoutError: records are still on their way.
            UsageError: no transaction is open.
        """
        transactions = self._transactions
        transactions.check_open()
        await self.flush(timeout)
        handle, left_ms = transactions.detach(self._engine.now())
        return evolve(handle, deadline_ms=int(time.time() * 1000 + left_ms))

    @property
    def _transactions(self) -> TransactionCore:
        if self._core.transactions is None:
            raise UsageError("transactions need a producer with a transactional_id")
        return self._core.transactions

    async def _end_transaction(self) -> None:
        """A producer that ends leaves no transaction open, as far as that can be had quickly."""
        core, engine = self._core, self._engine
        if core.abort_open():
            engine.wake()
            await engine.wait_for(lambda: not core.is_ending, engine.now() + _LAST_ABORT_MS)

    def _end_transaction_at_once(self) -> None:
        engine = self._engine
        if engine.is_open and engine.crash is None and self._core.abort_open():
            engine.send_last(*self._core.calls(engine.now()))

    async def partitions(self, topic: str, timeout: float = 10.0) -> int:
        """How many partitions a topic has.

        Raises:
            BrokerError: the cluster knew no such topic until the time was over.
            TimedOutError: nobody could tell in time.
            AuthenticationError: no broker lets this client in.
        """
        return await self._engine.partitions(topic, timeout)

    async def close(self, *, flush: bool = True) -> None:
        """Flush (unless told otherwise) and stop; what is not settled is told as unknown.

        Raises:
            UndeliveredError: after a flush, records were not acknowledged and nobody had heard so.
        """
        engine = self._engine
        if engine.is_closed or engine.is_foreign:
            return
        engine.check_loop()
        try:
            if engine.is_open:
                await self._end_transaction()
            if flush and engine.is_open:
                await self.flush()
        finally:
            self._give_up()
            await engine.close()
        self._report(must_raise=flush)

    @property
    def callback_errors(self) -> int:
        """How many calls of `on_delivery` raised so far."""
        return self._core.callback_errors

    def _give_up(self) -> None:
        if self._engine.is_foreign:
            return  # the records are the parent's, and so is who listens
        self._core.give_up(UsageError("the producer was closed"))
        self._deliver()

    def _report(self, *, must_raise: bool) -> None:
        self._watch.detach()
        error = report(self._core.untold)
        if must_raise and error is not None:
            raise error

    def _deliver(self) -> None:
        """Call what listens; no core is at work."""
        settled = self._core.listeners.take()
        self._core.callback_errors += tell(settled)
        self._core.listeners.told(len(settled))

    def _fall(self) -> None:
        """The engine died: settle everything, so that nobody waits for ever."""
        self._core.give_up(UsageError("the producer died"))
        self._deliver()

    async def _wait_for_room(self, topic: str) -> None:
        engine, core, limit = self._engine, self._core, self._options.buffer_memory
        engine.wake()
        if not await engine.wait_for(
            lambda: core.has_room(topic), engine.now() + self._options.max_block_ms
        ):
            raise BufferFullError(
                f"the buffer of {limit} bytes (buffer_memory) stayed full for"
                f" {self._options.max_block_ms:.0f} ms (max_block_ms){core.why_full(topic)}"
            )
        engine.check()  # the end of a producer makes room, too

    async def _settle(self, receipt: CoreReceipt, timeout_s: float | None) -> None:
        """Wait until a receipt is settled or the time is over."""
        if receipt.is_done:
            return
        engine = self._engine
        engine.check()
        engine.check_loop()
        if self._core.hurry(receipt):
            engine.wake()
        limit = self._options.delivery_timeout_ms / 1000 + 5 if timeout_s is None else timeout_s
        settled = anyio.Event()
        receipt.listen(lambda _receipt: settled.set())
        with anyio.move_on_after(limit):
            await settled.wait()


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

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._scope.is_open:
            return  # it was ended by word, or its producer is over and has said so
        if kind is None:
            try:
                await self.commit()
            except EndUnknownError:
                raise
            except ClientError:
                if self._scope.is_open:
                    await self.abort()
                raise
        elif issubclass(kind, anyio.get_cancelled_exc_class()) or not self._engine.is_open:
            self._abort_soon()
        else:
            try:
                await self.abort()
            except ClientError as failure:
                assert error is not None
                error.add_note(f"and its transaction was not aborted in time: {failure}")

    async def _begin(self) -> None:
        engine, core, scope = self._engine, self._scope.core, self._scope
        engine.check()
        core.check_begin()
        engine.wake()
        deadline = engine.now() + self._producer._options.max_block_ms
        if not await engine.wait_for(lambda: core.is_ready, deadline):
            raise TimedOutError(f"no transaction could begin: {core.why_not()}", sent=False)
        core.check_begin()
        scope.begin(engine.now())

    async def send(
        self,
        topic: str,
        value: V | None,
        key: K | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        partition: int | None = None,
        timestamp: int | None = None,
        *,
        on_delivery: Callable[[Receipt], None] | None = None,
    ) -> Receipt:
        """As `Producer.send`; the record counts once the transaction is committed.

        Raises:
            MustAbortError: the transaction cannot be committed any more.
            ClientError: as `Producer.send`.
        """
        self._scope.check()
        return await self._producer.send(
            topic, value, key, headers, partition, timestamp, on_delivery=on_delivery
        )

    async def commit_offsets(
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
        engine.check()
        scope.check()
        core.check_open()
        try:
            if isinstance(source, str):
                who, places = explicit_positions(source, offsets)
            else:
                source._engine.check()
                who, places = source._core.for_transaction(offsets)
        except MustAbortError as error:
            core.must_abort(error)
            engine.wake()
            raise
        if not places:
            return
        commit = OffsetCommit(who, places, engine.now() + timeout * 1000)
        core.commit_offsets(commit)
        if not isinstance(source, str):
            scope.add(source, places)
        engine.wake()
        await engine.wait_for(lambda: commit.is_done, commit.deadline + 1_000)
        if commit.error is not None:
            raise commit.error.fresh()

    async def commit(self, timeout: float = 60.0) -> None:
        """Wait for all records, and commit. After an `EndUnknownError`, call it again.

        Raises:
            MustAbortError: it cannot be committed: abort it, and do its work again.
            EndUnknownError: nobody answered in time; calling again tells how it ended.
            FencedError: a newer producer has the transactional id.
        """
        scope = self._scope
        self._engine.check()
        scope.check()
        if scope.consumer is not None and scope.is_open:
            await self.commit_offsets(scope.consumer)
        try:
            await self._end(commit=True, timeout=timeout)
        except TransactionError:
            if scope.core.fatal is not None:
                self._go_back()  # another producer may go on with them
            raise
        for consumer, places in scope.committed():
            consumer._core.saved_by_transaction(places)

    async def abort(self, timeout: float = 60.0) -> None:
        """Have nothing of it count; consumers go back to what their group has.

        Raises:
            UsageError: it is not open, or its commit may stand.
            EndUnknownError: nobody answered in time; it will be aborted.
            FencedError: a newer producer has the transactional id.
        """
        self._engine.check()
        self._scope.check()
        try:
            await self._end(commit=False, timeout=timeout)
        finally:
            self._go_back()

    async def _end(self, *, commit: bool, timeout: float) -> None:
        engine, core, scope = self._engine, self._scope.core, self._scope
        ending = scope.ending = self._producer._core.end_transaction(commit=commit)
        engine.wake()
        if not await engine.wait_for(lambda: ending.is_done, engine.now() + timeout * 1000):
            raise unknown_end(commit, core.why_not())
        ending.result()

    def _abort_soon(self) -> None:
        """Cancelled: the producer's task asks for the abort, or its end does."""
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
