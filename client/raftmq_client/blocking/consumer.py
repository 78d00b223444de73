"""The blocking consumer: polls records of assigned partitions, alone or as a member of a group.

Owns waiting and the group's callbacks, which run in the thread that polls and without the lock, so
that heartbeats go on. What was handed out and what is committed decides `core/consumer.py`: a
record is finished once the caller came back for more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Generic, Self, Unpack

from raftmq.types import TopicPartition
from raftmq_client.blocking.engine import Engine, now_ms
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
    Callback,
    ConsumerSettings,
    ignore,
)
from raftmq_client.serializers import K, V

_LAST_COMMIT_MS: Final = 5_000.0
_LEAVE_MS: Final = 5_000.0


class Consumer(Generic[K, V]):
    """Reads records: `with Consumer("localhost:9092", group="g", topics=["t"]) as consumer: ...`.

    With `topics` and `group` a member of the group, with `topics` alone it reads all of them, with
    `assign` what it is told. Not
    thread safe: one thread polls.
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
        self._engine = Engine(parts.client, name=parts.client.options.client_id)
        self._core = parts.core
        self._resender: ProducerCore | None = None
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._on_lost = on_revoked if on_lost is None else on_lost
        self._engine.start()
        if parts.topics:
            self.subscribe(parts.topics)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # A block that ends without an error has finished what it had in hand, as a transaction's.
        self._end(commit=True, is_done=kind is None)

    def __iter__(self) -> Iterator[ConsumerRecord[K, V]]:
        while True:
            with self._engine.lock:
                self._engine.check()
                now = now_ms() if self._core.group is not None else 0.0
                record = self._core.next_record(now)
            if record is None:
                records = self.poll(1.0)
                if not records:
                    continue
                with self._engine.lock:
                    record = self._core.iterate(records)
            yield record

    # What to read.

    def subscribe(self, topics: str | Iterable[str] | re.Pattern[str]) -> None:
        """Read these topics, or all whose name a pattern matches.

        With a group as its member; without one all their partitions, and those that come later.

        Raises:
            UsageError: partitions were assigned by hand.
        """
        with self._engine.lock:
            self._engine.check()
            self._core.subscribe(topics, now_ms())
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
        with self._engine.lock:
            self._engine.check()
            self._core.assign(partitions, now_ms())
            self._engine.wake()

    @property
    def assignment(self) -> tuple[TopicPartition, ...]:
        """The partitions read now."""
        with self._engine.lock:
            return self._core.assignment

    @property
    def trouble(self) -> str:
        """What is waited for, for people: a broker, a topic, the group; empty if for records."""
        with self._engine.lock:
            return self._core.trouble

    @property
    def generation(self) -> int:
        """The group's generation that this member is in; -1 while it is in none."""
        with self._engine.lock:
            return self._core.generation

    def seek(self, partition: TopicPartition, offset: int | None) -> None:
        """Go on at another offset, EARLIEST or LATEST; None starts over by the reset policy.

        Raises:
            UsageError: the partition is not assigned, or this is no offset.
        """
        with self._engine.lock:
            self._engine.check()
            self._core.seek(partition, offset)
            self._engine.wake()

    def position(self, partition: TopicPartition) -> int | None:
        """Offset of the next record to hand out; None while it is not known."""
        with self._engine.lock:
            self._engine.check()
            return self._core.position(partition)

    def lag(self) -> dict[TopicPartition, int | None]:
        """How many offsets each assigned partition has left, as of its last fetch; None: not known.

        With `read_committed` up to the last stable offset, the start of the oldest transaction
        that is open.
        """
        with self._engine.lock:
            self._engine.check()
            return self._core.lag()

    def rewind(self) -> None:
        """Read again what was handed out since the group's last commit.

        A transaction that is not committed does so with the consumers that it knows of.

        Raises:
            UsageError: the consumer has no group.
        """
        with self._engine.lock:
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

    def poll(self, timeout: float = 1.0, records_max: int = 500) -> list[ConsumerRecord[K, V]]:
        """Records that are there, or that come within `timeout` seconds; maybe none.

        Raises:
            ClientError: a partition cannot go on, or the group refused this member.
        """
        deadline = now_ms() + timeout * 1000
        engine, core = self._engine, self._core
        while True:
            self._run_group()
            with engine.lock:
                engine.check()
                engine.pump()
                taken = core.take(records_max, now_ms())
                if taken:
                    if core.options.commits_first and not self._commit_first(taken):
                        continue
                    engine.go_on()  # there is room for more
                    return taken
                engine.wake()  # it receives while nobody polls
                until = core.wait_until(deadline, now_ms())
                if not engine.wait_for(lambda: core.has_news, until) and until == deadline:
                    return []

    def partitions(self, topic: str, timeout: float = 10.0) -> int:
        """How many partitions a topic has.

        Raises:
            BrokerError: the cluster knew no such topic until the time was over.
            TimedOutError: nobody could tell in time.
            AuthenticationError: no broker lets this client in.
        """
        return self._engine.partitions(topic, timeout)

    def offsets(
        self, partitions: Iterable[TopicPartition], which: int, timeout: float = 10.0
    ) -> dict[TopicPartition, OffsetFound]:
        """Look offsets up: by timestamp (ms), EARLIEST (-2) or LATEST (-1)."""
        return self.offsets_for_times(dict.fromkeys(partitions, which), timeout)

    def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int], timeout: float = 10.0
    ) -> dict[TopicPartition, OffsetFound]:
        """The first offset at or after each timestamp (ms); -1 where there is none."""
        flows = AdminFlows(self._engine.client, now_ms, timeout * 1000, is_patient=True)
        isolation = self._core.options.fetching.isolation
        return self._engine.run(flows.list_offsets(timestamps, isolation=isolation))

    # Committing.

    def commit(
        self,
        offsets: Mapping[TopicPartition, int] | ConsumerRecord | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Save positions and wait: those of all records handed out, one record's, or given ones.

        A record's commit is its offset + 1: everything up to and with it is finished.

        Raises:
            ClientError: refused, or unknown at the timeout (see `outcome`).
        """
        with self._engine.lock:
            self._engine.check()
            pending = self._core.commit(offsets, now_ms())
            if pending is not None:
                self._await(pending, timeout)

    def committed(
        self, partitions: Iterable[TopicPartition] | None = None, timeout: float = 30.0
    ) -> dict[TopicPartition, int]:
        """The group's committed offsets, where there are any.

        Args:
            partitions: None asks for all that is assigned.
        """
        with self._engine.lock:
            self._engine.check()
            found = self._await(self._core.committed(partitions, now_ms()), timeout)
        return {key: item.offset for key, item in found.items()}

    def retry(
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
        return self._resend(retried(message, self._core.options.group, reason, after))

    def dead(self, message: ConsumerRecord[K, V], *, reason: str = "") -> RecordMetadata:
        """Have a record not read again: it is sent to the group's dead topic, and is there on
        return. `raftmq dead` shows and replays it.

        Raises:
            BrokerError: no such topic; `raftmq retry create GROUP --of TOPIC` makes it.
            ClientError: it was not, or perhaps not, sent.
            UsageError: the consumer has no group.
        """
        return self._resend(buried(message, self._core.options.group, reason))

    def close(self, *, commit: bool = True) -> None:
        """Commit what is finished (when commits are automatic), leave the group and stop.

        What is in hand is not finished: its next reader gets it again. `commit()` before it, or
        leaving the `with` block without an error, finishes it.
        """
        self._end(commit=commit, is_done=False)

    def _end(self, *, commit: bool, is_done: bool) -> None:
        engine = self._engine
        if engine.is_closed:
            return
        try:
            if self._core.group is not None and engine.crash is None:
                self._leave(commit=commit, is_done=is_done)
        finally:
            engine.close()

    # How it works.

    def _resend(self, resent: Resent) -> RecordMetadata:
        engine = self._engine
        with engine.lock:
            if self._resender is None:
                self._resender = build_resender(engine.client)
        count = self.partitions(resent.topic)
        partition = resent.partition % count
        with engine.lock:
            engine.check()
            receipt, _ = self._resender.send(resent.topic, resent.record, partition, None, now_ms())
            engine.wake()
            engine.wait_for(lambda: receipt.is_done, now_ms() + RESEND_TIMEOUT_MS + 5_000)
        return settled(receipt)

    def _run_group(self) -> None:
        """Do what the group asks; callbacks run without the lock, so that heartbeats go on."""
        engine, core = self._engine, self._core
        while True:
            with engine.lock:
                engine.check()
                event = core.next_event(now_ms())
                engine.wake()
            if event is None:
                return
            try:
                if isinstance(event, GaveUp):
                    self._give_up(event)
                else:
                    self._on_assigned(event.partitions)
            except Exception:
                with engine.lock:
                    core.told(event)
                raise
            except BaseException:
                with engine.lock:
                    core.begin_again(event)  # interrupted
                raise
            with engine.lock:
                core.told(event)
                engine.wake()

    def _give_up(self, event: GaveUp) -> None:
        if not event.is_lost:
            self._last_commit(event.partitions)
        # Looked at again: the commit may have brought the word that they are lost.
        callback = self._on_lost if event.is_lost else self._on_revoked
        callback(event.partitions)

    def _last_commit(self, partitions: Iterable[TopicPartition]) -> None:
        """Commit before giving partitions up; a refusal means that others read them again."""
        with self._engine.lock:
            pending = self._core.last_commit(partitions, now_ms())
            if pending is not None:
                self._engine.wake()
                self._engine.wait_for(lambda: pending.is_done, now_ms() + _LAST_COMMIT_MS)

    def _commit_first(self, taken: Sequence[ConsumerRecord[K, V]]) -> bool:
        """At most once: what does not get committed is not handed out."""
        pending = self._core.commit_first(now_ms())
        try:
            self._await(pending, 30.0)
        except BaseException as error:
            self._core.put_back(taken)
            if isinstance(error, ClientError) and is_outdated(error):
                return False  # these are read on by whoever has the partitions now
            raise
        self._core.committed_first()
        return True

    def _leave(self, *, commit: bool, is_done: bool) -> None:
        with self._engine.lock:
            held = self._core.assignment
            self._core.stop(is_done=is_done)
        try:
            if commit:
                self._last_commit(held)
            if held:
                callback = self._on_lost if self._core.is_lost else self._on_revoked
                callback(held)
        finally:  # whatever a callback raises: others need not wait for the session's end
            self._leave_group()

    def _leave_group(self) -> None:
        done: list[bool] = []
        with self._engine.lock:
            call = self._core.leave(lambda _response, _error, _now: done.append(True))
            if call is not None:
                self._engine.client.submit(call, now_ms())
                self._engine.wake()
                self._engine.wait_for(lambda: bool(done), now_ms() + _LEAVE_MS)

    def _await(self, pending: Pending, timeout: float) -> Any:
        pending.deadline = min(pending.deadline, now_ms() + timeout * 1000)
        self._engine.wake()
        if not self._engine.wait_for(lambda: pending.is_done, pending.deadline + 1_000):
            raise TimedOutError("no answer in time", sent=pending.was_sent)
        if pending.error is not None:
            raise pending.error
        return pending.result

    def _set_paused(self, partitions: Iterable[TopicPartition], is_paused: bool) -> None:
        with self._engine.lock:
            self._engine.check()
            self._core.set_paused(partitions, is_paused)
            self._engine.wake()


__all__ = ["EARLIEST", "LATEST", "Consumer", "ConsumerRecord"]
