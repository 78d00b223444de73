"""A transaction under trio and asyncio: `async with producer.transaction() as tx: ...`.

Owns waiting. What belongs to it, how it ends and what an error means is decided by
`core/transactions.py`; the methods are those of `raftmq_client.blocking.Transaction`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self

import anyio

from raftmq.types import TopicPartition
from raftmq_client.aio.consumer import Consumer
from raftmq_client.aio.receipt import Receipt
from raftmq_client.core.transaction_scope import Scope, explicit_positions
from raftmq_client.core.transactions import OffsetCommit, unknown_end
from raftmq_client.errors import (
    ClientError,
    EndUnknownError,
    MustAbortError,
    TimedOutError,
    TransactionError,
)
from raftmq_client.serializers import K, V

if TYPE_CHECKING:
    from raftmq_client.aio.producer import Producer


class Transaction(Generic[K, V]):
    """Records and positions that count together, or not at all. Made by a `Producer`.

    Leaving the block commits, an error in it aborts and is raised. With a `consumer` its positions
    go along, and it goes back to what its group has when the transaction is not committed.
    """

    def __init__(self, producer: Any, consumer: Any = None) -> None:
        self._producer: Producer[K, V] = producer
        self._engine = self._producer._engine
        self._scope: Scope[Consumer[Any, Any]] = Scope(self._producer._transactions, consumer)

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
