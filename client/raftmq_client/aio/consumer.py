"""The async consumer: `async for message in consumer`, alone or as a member of a group.

Owns waiting and the group's callbacks, which run in the task that polls; heartbeats have a task of
their own, so a slow handler that awaits does not stall them. What was handed out and what is
committed decides `core/consumer.py`: a record is finished once the caller came back for more.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Generic, Self, Unpack

import anyio
import anyio.lowlevel

from raftmq.types import TopicPartition
from raftmq_client.aio.engine import Engine
from raftmq_client.core.accumulator import RecordMetadata
from raftmq_client.core.admin import EARLIEST, LATEST, OffsetFound
from raftmq_client.core.admin_flow import AdminFlows
from raftmq_client.core.build import build_consumer, build_resender
from raftmq_client.core.group_state import GaveUp, Pending, is_outdated
from raftmq_client.core.messages import ConsumerRecord
from raftmq_client.core.producer import ProducerCore
from raftmq_client.errors import ClientError, TimedOutError
from raftmq_client.later import RESEND_TIMEOUT_MS, Resent, buried, retried, settled
from raftmq_client.options import (
    DEFAULT_BOOTSTRAP,
    ConsumerSettings,
    ignore,
)
from raftmq_client.serializers import K, V

_LAST_COMMIT_MS: Final = 5_000.0
_LEAVE_MS: Final = 5_000.0
_POLL_S: Final = 1.0

Callback = Callable[[tuple[TopicPartition, ...]], Awaitable[None] | None]
"""Told of partitions that were assigned or are given up; plain or async."""


class Consumer(Generic[K, V]):
    """Reads records: `async with Consumer("localhost:9092", group="g", topics=["t"]) as c: ...`.

    With `topics` and `group` a member of the group, with `topics` alone it reads all of them, with
    `assign` what it is told. One
    task polls.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str] = DEFAULT_BOOTSTRAP,
        *,
        topics: str | Iterable[str] | re.Pattern[str] = (),
        on_assigned: Callback = ignore,
        on_revoked: Callback = ignore,
        on_lost: Callback | None = None,
        **settings: Unpack[ConsumerSettings[K, V]],
    ) -> None:
        parts = build_consumer(bootstrap, topics, settings)
        self._engine = Engine(parts.client)
        self._core = parts.core
        self._resender: ProducerCore | None = None
        self._topics = parts.topics
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._on_lost = on_revoked if on_lost is None else on_lost

    async def __aenter__(self) -> Self:
        return await self._start(in_block=True)

    async def start(self) -> Self:
        """Begin without a block; then `close` ends it, in any task. Not under trio."""
        return await self._start(in_block=False)

    async def _start(self, *, in_block: bool) -> Self:
        await self._engine.start(in_block=in_block)
        if self._topics:
            self.subscribe(self._topics)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        # A block that ends without an error has finished what it had in hand, as a transaction's.
        try:
            if kind is not None and issubclass(kind, anyio.get_cancelled_exc_class()):
                self._leave_at_once()  # the tasks that would hear the answer are cancelled, too
            else:
                await self._leave(commit=True, is_done=kind is None)
        finally:
            swallowed = await self._engine.stop(kind, error, trace)
        return swallowed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ConsumerRecord[K, V]:
        engine, core = self._engine, self._core
        engine.check()
        record = core.next_record(engine.now() if core.group is not None else 0.0)
        if record is not None:
            return record
        while True:
            records = await self.poll(_POLL_S)
            if records:
                return self._core.iterate(records)

    # What to read.

    def subscribe(self, topics: str | Iterable[str] | re.Pattern[str]) -> None:
        """Read these topics, or all whose name a pattern matches.

        With a group as its member; without one all their partitions, and those that come later.

        Raises:
            UsageError: partitions were assigned by hand.
        """
        self._engine.check()
        self._core.subscribe(topics, self._engine.now())
        self._engine.wake()

    def assign(
        self,
        partitions: Iterable[TopicPartition] | Mapping[TopicPartition, int | None],
    ) -> None:
        """Read exactly these partitions; a mapping gives offsets, or EARLIEST or LATEST.

        Without one, what is new begins where the group committed; without that as `reset` says.
        Where commits are automatic, what is finished of the others is committed.

        Raises:
            UsageError: the consumer reads topics, whose partitions are not chosen by hand, or these
                are no partitions and offsets.
        """
        self._engine.check()
        self._core.assign(partitions, self._engine.now())
        self._engine.wake()

    @property
    def assignment(self) -> tuple[TopicPartition, ...]:
        """The partitions read now."""
        return self._core.assignment

    @property
    def trouble(self) -> str:
        """What is waited for, for people: a broker, a topic, the group; empty if for records."""
        return self._core.trouble

    @property
    def generation(self) -> int:
        """The group's generation that this member is in; -1 while it is in none."""
        return self._core.generation

    def seek(self, partition: TopicPartition, offset: int | None) -> None:
        """Go on at another offset, EARLIEST or LATEST; None starts over by the reset policy.

        Raises:
            UsageError: the partition is not assigned, or this is no offset.
        """
        self._engine.check()
        self._core.seek(partition, offset)
        self._engine.wake()

    def position(self, partition: TopicPartition) -> int | None:
        """Offset of the next record to hand out; None while it is not known."""
        self._engine.check()
        return self._core.position(partition)

    def lag(self) -> dict[TopicPartition, int | None]:
        """How many offsets each assigned partition has left, as of its last fetch; None: not known.

        With `read_committed` up to the last stable offset, the start of the oldest transaction
        that is open.
        """
        self._engine.check()
        return self._core.lag()

    def rewind(self) -> None:
        """Read again what was handed out since the group's last commit.

        A transaction that is not committed does so with the consumers that it knows of.

        Raises:
            UsageError: the consumer has no group.
        """
        self._engine.check()
        self._core.rewind()
        self._engine.wake()

    def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these for now; `pause(*consumer.assignment)` is about all."""
        self._set_paused(partitions, True)

    def resume(self, *partitions: TopicPartition) -> None:
        """Undo `pause`."""
        self._set_paused(partitions, False)

    # Reading.

    async def poll(
        self, timeout: float = 1.0, records_max: int = 500
    ) -> list[ConsumerRecord[K, V]]:
        """Records that are there, or that come within `timeout` seconds; maybe none.

        Raises:
            ClientError: a partition cannot go on, or the group refused this member.
        """
        engine, core = self._engine, self._core
        engine.check()
        await (
            anyio.lowlevel.checkpoint()
        )  # before anything is taken: a cancelled poll takes nothing
        deadline = engine.now() + timeout * 1000
        while True:
            await self._run_group()
            taken = core.take(records_max, engine.now())
            if taken:
                if core.options.commits_first and not await self._commit_first(taken):
                    continue
                engine.wake()  # room for more
                return taken
            until = core.wait_until(deadline, engine.now())
            if not await engine.wait_for(lambda: core.has_news, until) and until == deadline:
                return []

    async def partitions(self, topic: str, timeout: float = 10.0) -> int:
        """How many partitions a topic has.

        Raises:
            BrokerError: the cluster knew no such topic until the time was over.
            TimedOutError: nobody could tell in time.
            AuthenticationError: no broker lets this client in.
        """
        return await self._engine.partitions(topic, timeout)

    async def offsets(
        self, partitions: Iterable[TopicPartition], which: int, timeout: float = 10.0
    ) -> dict[TopicPartition, OffsetFound]:
        """Look offsets up: by timestamp (ms), EARLIEST (-2) or LATEST (-1)."""
        return await self.offsets_for_times(dict.fromkeys(partitions, which), timeout)

    async def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int], timeout: float = 10.0
    ) -> dict[TopicPartition, OffsetFound]:
        """The first offset at or after each timestamp (ms); -1 where there is none."""
        engine = self._engine
        flows = AdminFlows(engine.client, engine.now, timeout * 1000, is_patient=True)
        isolation = self._core.options.fetching.isolation
        return await engine.run(flows.list_offsets(timestamps, isolation=isolation))

    # Committing.

    async def commit(
        self,
        offsets: Mapping[TopicPartition, int] | ConsumerRecord | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Save positions and wait: those of all records handed out, one record's, or given ones.

        A record's commit is its offset + 1: everything up to and with it is finished.

        Raises:
            ClientError: refused, or unknown at the timeout (see `outcome`).
        """
        self._engine.check()
        pending = self._core.commit(offsets, self._engine.now())
        if pending is not None:
            await self._await(pending, timeout)

    async def committed(
        self, partitions: Iterable[TopicPartition] | None = None, timeout: float = 30.0
    ) -> dict[TopicPartition, int]:
        """The group's committed offsets, where there are any.

        Args:
            partitions: None asks for all that is assigned.
        """
        self._engine.check()
        found = await self._await(self._core.committed(partitions, self._engine.now()), timeout)
        return {key: item.offset for key, item in found.items()}

    async def retry(
        self,
        message: ConsumerRecord[K, V],
        *,
        reason: str = "",
        after: timedelta | float | None = None,
    ) -> RecordMetadata:
        """Have the group read a record again later: it is sent to the group's retry topic, and is
        there on return. The wait grows with each attempt; `after` (a timedelta, or seconds) makes
        it longer. After the last attempt the record comes to the dead topic instead.

        Commits nothing: who dies before the commit retries it twice.

        Raises:
            BrokerError: no such topic; `raftmq retry create GROUP --of TOPIC` makes it.
            ClientError: it was not, or perhaps not, sent.
            UsageError: the consumer has no group.
        """
        return await self._resend(retried(message, self._core.options.group, reason, after))

    async def dead(self, message: ConsumerRecord[K, V], *, reason: str = "") -> RecordMetadata:
        """Have a record not read again: it is sent to the group's dead topic, and is there on
        return. `raftmq dead` shows and replays it.

        Raises:
            BrokerError: no such topic; `raftmq retry create GROUP --of TOPIC` makes it.
            ClientError: it was not, or perhaps not, sent.
            UsageError: the consumer has no group.
        """
        return await self._resend(buried(message, self._core.options.group, reason))

    async def close(self, *, commit: bool = True) -> None:
        """Commit what is finished (when commits are automatic), leave the group and stop.

        What is in hand is not finished: its next reader gets it again. `commit()` before it, or
        leaving the `with` block without an error, finishes it.
        """
        try:
            if self._engine.is_open:
                await self._leave(commit=commit, is_done=False)
        finally:
            await self._engine.close()

    # How it works.

    async def _resend(self, resent: Resent) -> RecordMetadata:
        engine = self._engine
        if self._resender is None:
            self._resender = build_resender(engine.client)
        count = await self.partitions(resent.topic)
        partition = resent.partition % count
        engine.check()
        receipt, _ = self._resender.send(resent.topic, resent.record, partition, None, engine.now())
        engine.wake()
        deadline = engine.now() + RESEND_TIMEOUT_MS + 5_000
        await engine.wait_for(lambda: receipt.is_done, deadline)
        return settled(receipt)

    async def _run_group(self) -> None:
        """Do what the group asks."""
        engine, core = self._engine, self._core
        while True:
            engine.check()
            event = core.next_event(engine.now())
            engine.wake()
            if event is None:
                return
            try:
                if isinstance(event, GaveUp):
                    await self._give_up(event)
                else:
                    await self._tell(self._on_assigned, event.partitions)
            except Exception:
                core.told(event)
                raise
            except BaseException:
                core.begin_again(event)  # cancelled
                raise
            core.told(event)
            engine.wake()

    async def _give_up(self, event: GaveUp) -> None:
        if not event.is_lost:
            await self._last_commit(event.partitions)
        # Looked at again: the commit may have brought the word that they are lost.
        callback = self._on_lost if event.is_lost else self._on_revoked
        await self._tell(callback, event.partitions)

    @staticmethod
    async def _tell(callback: Callback, partitions: tuple[TopicPartition, ...]) -> None:
        answer = callback(partitions)
        if inspect.isawaitable(answer):
            await answer

    async def _last_commit(self, partitions: Iterable[TopicPartition]) -> None:
        """Commit before giving partitions up; a refusal means that others read them again."""
        engine = self._engine
        pending = self._core.last_commit(partitions, engine.now())
        if pending is not None:
            engine.wake()
            await engine.wait_for(lambda: pending.is_done, engine.now() + _LAST_COMMIT_MS)

    async def _commit_first(self, taken: Sequence[ConsumerRecord[K, V]]) -> bool:
        """At most once: what does not get committed is not handed out."""
        pending = self._core.commit_first(self._engine.now())
        try:
            await self._await(pending, 30.0)
        except BaseException as error:
            self._core.put_back(taken)
            if isinstance(error, ClientError) and is_outdated(error):
                return False  # these are read on by whoever has the partitions now
            raise
        self._core.committed_first()
        return True

    async def _leave(self, *, commit: bool, is_done: bool) -> None:
        engine, core = self._engine, self._core
        if engine.is_closed or core.group is None or engine.crash is not None:
            return
        held = core.assignment
        core.stop(is_done=is_done)
        try:
            if commit:
                await self._last_commit(held)
            if held:
                await self._tell(self._on_lost if core.is_lost else self._on_revoked, held)
        except BaseException:
            self._leave_at_once()  # cancelled, or the callback's error: others need not wait
            raise
        done: list[bool] = []
        call = core.leave(lambda _response, _error, _now: done.append(True))
        if call is not None:
            engine.client.submit(call, engine.now())
            engine.wake()
            await engine.wait_for(lambda: bool(done), engine.now() + _LEAVE_MS)

    def _leave_at_once(self) -> None:
        engine = self._engine
        if engine.is_closed or engine.crash is not None:
            return
        self._core.stop(is_done=False)
        commit = self._core.parting_commit()
        leave = self._core.leave(lambda _response, _error, _now: None)
        engine.send_last(*(call for call in (commit, leave) if call is not None))

    async def _await(self, pending: Pending, timeout: float) -> Any:
        engine = self._engine
        pending.deadline = min(pending.deadline, engine.now() + timeout * 1000)
        engine.wake()
        if not await engine.wait_for(lambda: pending.is_done, pending.deadline + 1_000):
            raise TimedOutError("no answer in time", sent=pending.was_sent)
        if pending.error is not None:
            raise pending.error
        return pending.result

    def _set_paused(self, partitions: Iterable[TopicPartition], is_paused: bool) -> None:
        self._engine.check()
        self._core.set_paused(partitions, is_paused)
        self._engine.wake()


__all__ = ["EARLIEST", "LATEST", "Consumer", "ConsumerRecord"]
