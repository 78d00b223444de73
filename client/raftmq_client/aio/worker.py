"""The async worker: `async for message in worker`, where each message is done, retried, or buried.

Owns waiting, and the one place where its loops ask for records in turn. What is in hand and what
may be saved decides `raftmq_client.in_hand`. A loop that comes back for the next message has done
the one before; `handling` and `run` retry what raised. The positions of what is settled are
committed in order, by the interval, before partitions are given up and at the end; or, exactly
once, each with its message's transaction.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Generic, Self, Unpack

import anyio

from raftmq.types import TopicPartition
from raftmq_client.aio.consumer import Consumer
from raftmq_client.aio.producer import Producer, Transaction
from raftmq_client.core.messages import ConsumerRecord
from raftmq_client.errors import ClientError, EndUnknownError, MustAbortError, UsageError
from raftmq_client.in_hand import (
    COMMIT_MS,
    GRACE_S,
    LAST_COMMIT_MS,
    InHand,
    place_of,
    read_worker,
    reason_of,
)
from raftmq_client.later import Resent, buried, retried
from raftmq_client.options import DEFAULT_BOOTSTRAP, ConsumerSettings
from raftmq_client.serializers import K, V

_LOG: Final = logging.getLogger("raftmq_client.worker")


class Worker(Generic[K, V]):
    """Does the work of a group: `async with Worker(group="g", topics="t") as worker: ...`.

    Each loop `async for message in worker` has one message in hand, which counts as done when the
    loop asks for the next. Several loops share the work.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str] = DEFAULT_BOOTSTRAP,
        *,
        topics: str | Iterable[str],
        transactional_id: str | None = None,
        commit_ms: float = COMMIT_MS,
        grace: float = GRACE_S,
        **settings: Unpack[ConsumerSettings[K, V]],
    ) -> None:
        parts = read_worker(topics, transactional_id, dict(settings))
        self._consumer: Consumer[Any, Any] = Consumer(
            bootstrap,
            topics=parts.topics,
            on_revoked=self._revoked,
            on_lost=self._lost,
            **parts.settings,
        )
        self._producer: Producer[Any, Any] | None = None
        if parts.is_exactly_once:
            self._producer = Producer(
                bootstrap,
                transactional_id=transactional_id,
                security=settings.get("security"),
            )
        self._decode = parts.decode
        self._core = self._consumer._core
        self._engine = self._consumer._engine
        self._in_hand = InHand(self._core, commit_ms)
        self._grace_s = grace
        self._stack = AsyncExitStack()
        self._waiting: anyio.CancelScope | None = None
        self._transaction: Transaction[Any, Any] | None = None
        self._is_stopped = False
        self._is_leaving = False
        self._has_failed = False  # by itself, not by what is done with a message

    async def __aenter__(self) -> Self:
        self._taking, self._settled = anyio.Lock(), anyio.Event()
        async with AsyncExitStack() as stack:
            if self._producer is not None:
                await stack.enter_async_context(self._producer)
            await stack.enter_async_context(self._consumer)
            stack.push_async_exit(self._end)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    def __aiter__(self) -> AsyncIterator[ConsumerRecord[K, V]]:
        return _Loop(self)

    # What becomes of a message.

    @asynccontextmanager
    async def handling(self, message: ConsumerRecord[K, V]) -> AsyncIterator[None]:
        """A block for a message's work: an exception in it is logged and the message retried.

        Raises:
            ClientError: it could not be retried; it is still in hand, and read again.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever the work raises
            _LOG.warning("%s is retried: %r", place_of(message), error, exc_info=error)
            await self.retry(message, reason=reason_of(error))
        else:
            await self._done(message)

    async def run(
        self,
        handle: Callable[[ConsumerRecord[K, V]], Awaitable[object]],
        *,
        in_flight_max: int = 1,
    ) -> None:
        """Have `handle` called with each message until `stop`, so many at once at most.

        What it raises is logged, and its message retried. With more than one at a time the records
        of a partition are begun in their order, and may end in another.

        Raises:
            ClientError: the worker cannot go on.
        """
        if type(in_flight_max) is not int or in_flight_max < 1:
            raise UsageError(f"in_flight_max is a number from 1 on, not {in_flight_max!r}")
        if in_flight_max > 1 and self._producer is not None:
            raise UsageError("exactly once is one message at a time: in_flight_max=1")

        async def loop() -> None:
            async for message in self:
                async with self.handling(message):
                    await handle(message)

        if in_flight_max == 1:
            await loop()
            return
        errors: list[ClientError] = []
        async with anyio.create_task_group() as tasks:

            async def ended() -> None:
                try:
                    await loop()
                except ClientError as error:
                    errors.append(error)
                    tasks.cancel_scope.cancel()

            for _ in range(in_flight_max):
                tasks.start_soon(ended)
        if errors:
            raise errors[0]

    async def retry(
        self,
        message: ConsumerRecord[K, V],
        *,
        reason: str = "",
        after: timedelta | float | None = None,
    ) -> bool:
        """Have a message read again later, as `Consumer.retry`; it is settled by that.

        False: it was not in hand any more, so nothing was sent. Its partition's next reader gets
        it, or it is settled.

        Raises:
            ClientError: it was not, or perhaps not, sent; it is still in hand.
        """
        return await self._send_on(message, retried(message, self._group, reason, after))

    async def dead(self, message: ConsumerRecord[K, V], *, reason: str = "") -> bool:
        """Have a message not read again, as `Consumer.dead`; it is settled by that.

        False: as of `retry`.

        Raises:
            ClientError: it was not, or perhaps not, sent; it is still in hand.
        """
        return await self._send_on(message, buried(message, self._group, reason))

    @property
    def transaction(self) -> Transaction[Any, Any]:
        """Exactly once: the transaction of the message in hand, to send what comes of it. It is
        committed with the message's position; a retry aborts it.

        Raises:
            UsageError: the worker is not exactly once, or has no message in hand.
        """
        if self._transaction is None:
            raise UsageError("a transaction is there with delivery='exactly_once', for a message")
        return self._transaction

    def stop(self) -> None:
        """Hand out nothing more: loops end when they ask for the next message. From the event
        loop, as of a signal's handler there."""
        self._is_stopped = True
        if self._waiting is not None:
            self._waiting.cancel()

    @property
    def assignment(self) -> tuple[TopicPartition, ...]:
        """The partitions read now."""
        return self._consumer.assignment

    @property
    def trouble(self) -> str:
        """What is waited for, for people, as of a consumer."""
        return self._consumer.trouble

    # How it works.

    @property
    def _group(self) -> str | None:
        return self._core.options.group

    async def _next(self) -> ConsumerRecord[K, V] | None:
        """The next message, in hand; None once it is stopped."""
        self._engine.check()
        async with self._taking:
            if self._transaction is not None:
                raise UsageError("exactly once is one message at a time, and one loop")
            while not self._is_stopped:
                record = await self._take()
                if record is None:
                    continue
                try:
                    message: ConsumerRecord[K, V] = self._decode(record)
                except Exception as error:  # noqa: BLE001  # whatever a deserializer raises
                    _LOG.warning("%s cannot be read: %r", place_of(record), error)
                    self._in_hand.take(record)
                    await self._begin()
                    await self.dead(record, reason=f"it cannot be read: {reason_of(error)}")
                    continue
                self._in_hand.take(message)
                await self._begin()
                return message
        return None

    async def _take(self) -> ConsumerRecord | None:
        engine, core = self._engine, self._core
        engine.check()
        self._commit_soon()
        record = core.next_record(engine.now())
        if record is not None:
            return record
        records: list[ConsumerRecord] = []
        # A poll that is cancelled takes nothing.
        with anyio.CancelScope() as self._waiting:
            records = await self._consumer.poll(self._in_hand.wait_ms(engine.now()) / 1000)
        self._waiting = None
        return core.iterate(records) if records else None

    def _commit_soon(self) -> None:
        if self._producer is None and self._in_hand.commit_soon(self._engine.now()):
            self._engine.wake()

    async def _done(self, message: ConsumerRecord[K, V]) -> None:
        """Its work is done."""
        if not self._in_hand.holds(message):
            return
        if self._producer is not None:
            await self._commit(None)
        self._settle(message)

    async def _send_on(self, message: ConsumerRecord[K, V], resent: Resent) -> bool:
        if not self._in_hand.holds(message):
            return False
        try:
            if self._producer is None:
                await self._consumer._resend(resent)
            else:
                await self._commit(resent)
        except ClientError:
            self._has_failed = True
            raise
        return self._settle(message)

    def _settle(self, message: ConsumerRecord[K, V]) -> bool:
        is_ours = self._in_hand.settle(message)
        self._settled.set()
        self._settled = anyio.Event()
        if is_ours:
            self._commit_soon()
        return is_ours

    # Exactly once.

    async def _begin(self) -> None:
        if self._producer is not None:
            self._transaction = await self._producer.begin()

    async def _commit(self, resent: Resent | None) -> None:
        """Commit with the consumer's position; what cannot be committed is read again."""
        assert self._transaction is not None, "a message in hand has one"
        try:
            if resent is not None:
                await self._begin_anew(resent)
            await self._transaction.commit_offsets(self._consumer)
            while True:
                try:
                    await self._transaction.commit()
                    break
                except EndUnknownError as error:
                    _LOG.warning("how a transaction ended is asked for again: %s", error)
        except MustAbortError as error:
            _LOG.warning("a transaction is aborted, its message comes again: %s", error)
            await self._transaction.abort()
            self._consumer.rewind()
            self._in_hand.forget()
        self._transaction = None

    async def _begin_anew(self, resent: Resent) -> None:
        """What the failed attempt has sent does not count; its record goes on in another one."""
        assert self._transaction is not None, "a message in hand has one"
        partition = resent.partition % await self._consumer.partitions(resent.topic)
        await self._transaction.abort()
        await self._begin()
        key, value, _, headers = resent.record
        await self._transaction.send(resent.topic, value, key, headers, partition)

    # Ends.

    async def _revoked(self, partitions: tuple[TopicPartition, ...]) -> None:
        """Partitions go to others: what is in hand of them may still get done."""
        if not self._is_leaving:
            with anyio.move_on_after(self._grace_s):
                while self._in_hand.records(partitions):
                    await self._settled.wait()
        await self._last_commit(partitions)
        self._in_hand.forget(partitions)

    def _lost(self, partitions: tuple[TopicPartition, ...]) -> None:
        """Others read these already."""
        self._in_hand.forget(partitions)

    async def _last_commit(self, partitions: Iterable[TopicPartition]) -> None:
        if self._producer is not None:
            return
        engine = self._engine
        pending = self._in_hand.last_commit(partitions, engine.now())
        if pending is not None:
            engine.wake()
            await engine.wait_for(lambda: pending.is_done, engine.now() + LAST_COMMIT_MS)

    async def _end(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """The block is over, and the consumer still there."""
        self._is_stopped = self._is_leaving = True
        if not self._engine.is_open or self._engine.crash is not None:
            return
        if kind is not None and issubclass(kind, anyio.get_cancelled_exc_class()):
            self._commit_at_once()
            return
        left = self._in_hand.records()
        if error is None:
            for message in left:  # a loop that was left by `break` has done what it had
                await self._done(message)
        elif isinstance(error, Exception) and len(left) == 1 and not self._has_failed:
            try:
                await self.retry(left[0], reason=reason_of(error))
            except ClientError as failure:
                error.add_note(f"and {place_of(left[0])} was not retried: {failure}")
        await self._last_commit(self._core.assignment)

    def _commit_at_once(self) -> None:
        """Have it sent with what the consumer sends when it leaves, right after this."""
        group = self._core.group
        if group is not None and self._producer is None:
            call = group.commit_call(self._in_hand.unsaved())
            if call is not None:
                self._engine.client.submit(call, self._engine.now())


class _Loop(Generic[K, V]):
    """One `async for` over a worker, with at most one message in hand."""

    def __init__(self, worker: Worker[K, V]) -> None:
        self._worker = worker
        self._message: ConsumerRecord[K, V] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ConsumerRecord[K, V]:
        worker = self._worker
        try:
            if self._message is not None:
                await worker._done(self._message)
            self._message = await worker._next()
        except ClientError:
            worker._has_failed = True
            raise
        if self._message is None:
            raise StopAsyncIteration
        return self._message
