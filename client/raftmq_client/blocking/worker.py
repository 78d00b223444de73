"""The blocking worker: `for message in worker`, where each message is done, retried, or buried.

One thread has one message in hand; more work is more processes. What is in hand and what may be
saved decides `raftmq_client.in_hand`; the methods are those of `raftmq_client.aio.Worker`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Generic, Self, Unpack

from raftmq.types import TopicPartition
from raftmq_client.blocking.consumer import Consumer
from raftmq_client.blocking.engine import now_ms
from raftmq_client.blocking.producer import Producer, Transaction
from raftmq_client.core.messages import ConsumerRecord
from raftmq_client.errors import ClientError, EndUnknownError, MustAbortError, UsageError
from raftmq_client.in_hand import (
    COMMIT_MS,
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
_LOOK_MS: Final = 250.0
"""How soon `stop` is seen, since a signal's handler may wake nobody."""


class Worker(Generic[K, V]):
    """Does the work of a group: `with Worker(group="g", topics="t") as worker: ...`.

    The message of a loop `for message in worker` counts as done when the loop asks for the next.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str] = DEFAULT_BOOTSTRAP,
        *,
        topics: str | Iterable[str],
        transactional_id: str | None = None,
        commit_ms: float = COMMIT_MS,
        **settings: Unpack[ConsumerSettings[K, V]],
    ) -> None:
        parts = read_worker(topics, transactional_id, dict(settings))
        self._decode = parts.decode
        self._transaction: Transaction[Any, Any] | None = None
        self._is_stopped = False
        self._has_failed = False  # by itself, not by what is done with a message; or it is closed
        self._producer: Producer[Any, Any] | None = None
        with ExitStack() as stack:
            if parts.is_exactly_once:
                self._producer = Producer(
                    bootstrap,
                    transactional_id=transactional_id,
                    security=settings.get("security"),
                )
                stack.enter_context(self._producer)
            self._consumer: Consumer[Any, Any] = Consumer(
                bootstrap,
                topics=parts.topics,
                on_revoked=self._revoked,
                on_lost=self._lost,
                **parts.settings,
            )
            self._core = self._consumer._core
            self._engine = self._consumer._engine
            self._in_hand = InHand(self._core, commit_ms)
            stack.enter_context(self._consumer)
            stack.push(self._end)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._stack.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[ConsumerRecord[K, V]]:
        return _Loop(self)

    # What becomes of a message.

    @contextmanager
    def handling(self, message: ConsumerRecord[K, V]) -> Iterator[None]:
        """A block for a message's work: an exception in it is logged and the message retried.

        Raises:
            ClientError: it could not be retried; it is still in hand, and read again.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever the work raises
            _LOG.warning("%s is retried: %r", place_of(message), error, exc_info=error)
            self.retry(message, reason=reason_of(error))
        else:
            self._done(message)

    def run(self, handle: Callable[[ConsumerRecord[K, V]], object]) -> None:
        """Have `handle` called with each message until `stop`.

        What it raises is logged, and its message retried.

        Raises:
            ClientError: the worker cannot go on.
        """
        for message in self:
            with self.handling(message):
                handle(message)

    def retry(
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
        return self._send_on(message, retried(message, self._group, reason, after))

    def dead(self, message: ConsumerRecord[K, V], *, reason: str = "") -> bool:
        """Have a message not read again, as `Consumer.dead`; it is settled by that.

        False: as of `retry`.

        Raises:
            ClientError: it was not, or perhaps not, sent; it is still in hand.
        """
        return self._send_on(message, buried(message, self._group, reason))

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
        """Hand out nothing more: the loop ends when it asks for the next message. It only sets a
        flag, so any thread and a signal's handler may call it."""
        self._is_stopped = True

    def close(self) -> None:
        """Commit what is done and end; what is in hand is not done, and read again."""
        self._has_failed = True
        self._stack.close()

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

    def _next(self) -> ConsumerRecord[K, V] | None:
        """The next message, in hand; None once it is stopped."""
        if self._transaction is not None:
            raise UsageError("exactly once is one message at a time, and one loop")
        while not self._is_stopped:
            record = self._take()
            if record is None:
                continue
            try:
                message: ConsumerRecord[K, V] = self._decode(record)
            except Exception as error:  # noqa: BLE001  # whatever a deserializer raises
                _LOG.warning("%s cannot be read: %r", place_of(record), error)
                self._in_hand.take(record)
                self._begin()
                self.dead(record, reason=f"it cannot be read: {reason_of(error)}")
                continue
            self._in_hand.take(message)
            self._begin()
            return message
        return None

    def _take(self) -> ConsumerRecord | None:
        with self._engine.lock:
            self._engine.check()
            self._commit_soon()
            record = self._core.next_record(now_ms())
            wait_ms = min(_LOOK_MS, self._in_hand.wait_ms(now_ms()))
        if record is not None:
            return record
        records = self._consumer.poll(wait_ms / 1000)
        if not records:
            return None
        with self._engine.lock:
            return self._core.iterate(records)

    def _commit_soon(self) -> None:
        if self._producer is None and self._in_hand.commit_soon(now_ms()):
            self._engine.wake()

    def _done(self, message: ConsumerRecord[K, V]) -> None:
        """Its work is done."""
        if not self._in_hand.holds(message):
            return
        if self._producer is not None:
            self._commit(None)
        self._settle(message)

    def _send_on(self, message: ConsumerRecord[K, V], resent: Resent) -> bool:
        if not self._in_hand.holds(message):
            return False
        try:
            if self._producer is None:
                self._consumer._resend(resent)
            else:
                self._commit(resent)
        except ClientError:
            self._has_failed = True
            raise
        return self._settle(message)

    def _settle(self, message: ConsumerRecord[K, V]) -> bool:
        if not self._in_hand.settle(message):
            return False
        with self._engine.lock:
            self._commit_soon()
        return True

    # Exactly once.

    def _begin(self) -> None:
        if self._producer is not None:
            self._transaction = self._producer.begin()

    def _commit(self, resent: Resent | None) -> None:
        """Commit with the consumer's position; what cannot be committed is read again."""
        assert self._transaction is not None, "a message in hand has one"
        try:
            if resent is not None:
                self._begin_anew(resent)
            self._transaction.commit_offsets(self._consumer)
            while True:
                try:
                    self._transaction.commit()
                    break
                except EndUnknownError as error:
                    _LOG.warning("how a transaction ended is asked for again: %s", error)
        except MustAbortError as error:
            _LOG.warning("a transaction is aborted, its message comes again: %s", error)
            self._transaction.abort()
            self._consumer.rewind()
            self._in_hand.forget()
        self._transaction = None

    def _begin_anew(self, resent: Resent) -> None:
        """What the failed attempt has sent does not count; its record goes on in another one."""
        assert self._transaction is not None, "a message in hand has one"
        partition = resent.partition % self._consumer.partitions(resent.topic)
        self._transaction.abort()
        self._begin()
        key, value, _, headers = resent.record
        self._transaction.send(resent.topic, value, key, headers, partition)

    # Ends.

    def _revoked(self, partitions: tuple[TopicPartition, ...]) -> None:
        self._last_commit(partitions)
        self._in_hand.forget(partitions)

    def _lost(self, partitions: tuple[TopicPartition, ...]) -> None:
        """Others read these already."""
        self._in_hand.forget(partitions)

    def _last_commit(self, partitions: Iterable[TopicPartition]) -> None:
        if self._producer is not None:
            return
        with self._engine.lock:
            pending = self._in_hand.last_commit(partitions, now_ms())
            if pending is not None:
                self._engine.wake()
                self._engine.wait_for(lambda: pending.is_done, now_ms() + LAST_COMMIT_MS)

    def _end(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """The block is over, and the consumer still there."""
        self._is_stopped = True
        if self._engine.is_closed or self._engine.crash is not None:
            return
        left = self._in_hand.records()
        if error is None and not self._has_failed:
            for message in left:  # a loop that was left by `break` has done what it had
                self._done(message)
        elif isinstance(error, Exception) and left and not self._has_failed:
            try:
                self.retry(left[0], reason=reason_of(error))
            except ClientError as failure:
                error.add_note(f"and {place_of(left[0])} was not retried: {failure}")
        self._last_commit(self._core.assignment)


class _Loop(Generic[K, V]):
    """One `for` over a worker, with at most one message in hand."""

    def __init__(self, worker: Worker[K, V]) -> None:
        self._worker = worker
        self._message: ConsumerRecord[K, V] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ConsumerRecord[K, V]:
        worker = self._worker
        try:
            if self._message is not None:
                worker._done(self._message)
            self._message = worker._next()
        except ClientError:
            worker._has_failed = True
            raise
        if self._message is None:
            raise StopIteration
        return self._message
