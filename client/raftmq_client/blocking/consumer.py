"""The blocking consumer: polls records of assigned partitions, alone or as a member of a group.

Group callbacks run in the thread that polls. Automatic commits save what earlier polls handed out,
never what the latest one did: a record is committed once the caller came back for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from raftmq.types import TopicPartition
from raftmq_client.blocking.engine import Engine, now_ms
from raftmq_client.core.admin import (
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    OffsetFound,
    list_offsets,
)
from raftmq_client.core.call import Call, Finish, struct_call
from raftmq_client.core.fetcher import ConsumerRecord, FetcherCore, FetcherOptions, Reset
from raftmq_client.core.group import Assigned, GaveUp, GroupCore, GroupOptions, Pending
from raftmq_client.core.group_admin import CommittedOffset
from raftmq_client.errors import ClientError, TimedOutError, UsageError
from raftmq_client.options import client_options

Callback = Callable[[tuple[TopicPartition, ...]], None]


def _ignore(_partitions: tuple[TopicPartition, ...]) -> None:
    return


class Consumer:
    """Reads records: `with Consumer("localhost:9092", group="g", topics=["t"]) as consumer: ...`.

    With `topics` and `group` a member of the group; with `assign` it reads what it is told. Not
    thread safe: one thread polls.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str] = "127.0.0.1:9092",
        *,
        topics: Iterable[str] = (),
        group: str | None = None,
        reset: str = "latest",
        isolation: str = "read_uncommitted",
        auto_commit_ms: float | None = 5_000,
        max_wait_ms: int = 500,
        min_bytes: int = 1,
        max_bytes: int = 50 << 20,
        partition_bytes_max: int = 1 << 20,
        session_timeout_ms: int = 45_000,
        heartbeat_interval_ms: float = 3_000,
        max_poll_interval_ms: float = 300_000,
        assignors: Sequence[str] = ("range", "roundrobin"),
        instance_id: str | None = None,
        rack: str = "",
        on_assigned: Callback = _ignore,
        on_revoked: Callback = _ignore,
        client_id: str = "raftmq-consumer",
    ) -> None:
        if isolation not in ("read_uncommitted", "read_committed"):
            raise UsageError(f"isolation is read_committed or read_uncommitted, not {isolation!r}")
        fetching = FetcherOptions(
            reset=read_reset(reset),
            isolation=READ_COMMITTED if isolation == "read_committed" else READ_UNCOMMITTED,
            max_wait_ms=max_wait_ms,
            min_bytes=min_bytes,
            max_bytes=max_bytes,
            partition_bytes_max=partition_bytes_max,
            rack=rack,
        )
        grouping = GroupOptions(
            session_timeout_ms=session_timeout_ms,
            rebalance_timeout_ms=int(max_poll_interval_ms),
            heartbeat_interval_ms=heartbeat_interval_ms,
            max_poll_interval_ms=max_poll_interval_ms,
            assignors=tuple(assignors),
            instance_id=instance_id,
        )
        options = client_options(bootstrap, client_id)
        options.metadata.allow_auto_create = False
        options.metadata.max_age_ms = 30_000
        self._engine = Engine(options, name=client_id)
        client = self._engine.client
        self._fetcher = FetcherCore(fetching, client.metadata)
        self._group: GroupCore | None = None
        client.cores.append(self._fetcher)
        if group is not None:
            self._group = GroupCore(group, grouping, client.metadata)
            client.cores.append(self._group)
        self._auto_commit_ms = auto_commit_ms if group is not None else None
        self._commit_at = now_ms() + (auto_commit_ms or 0)
        self._commits: list[Pending] = []
        self._committed: dict[TopicPartition, int] = {}
        self._handed_out: dict[TopicPartition, int] = {}
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._engine.start()
        names = tuple(topics)
        if names:
            self.subscribe(names)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # After an error in the block the last records may not have been handled: no commit.
        self.close(commit=kind is None)

    def __iter__(self) -> Iterator[ConsumerRecord]:
        while True:
            yield from self.poll(1.0)

    # What to read.

    def subscribe(self, topics: Iterable[str]) -> None:
        """Read these topics as a member of the group.

        Raises:
            UsageError: the consumer was made without a group.
        """
        if self._group is None:
            raise UsageError("subscribing needs a group; use assign() to read without one")
        with self._engine.lock:
            self._engine.check()
            self._group.subscribe(topics, now_ms())
            self._engine.wake()

    def assign(
        self,
        partitions: Iterable[TopicPartition] | Mapping[TopicPartition, int | None],
    ) -> None:
        """Read exactly these partitions; a mapping gives offsets, None meaning `reset`."""
        positions = partitions if isinstance(partitions, Mapping) else dict.fromkeys(partitions)
        with self._engine.lock:
            self._engine.check()
            self._fetcher.assign(positions)
            for key, offset in positions.items():
                if offset is not None:
                    self._fetcher.seek(key, offset)
                    self._handed_out[key] = offset
            self._engine.wake()

    @property
    def assignment(self) -> tuple[TopicPartition, ...]:
        """The partitions read now."""
        with self._engine.lock:
            return tuple(sorted(self._fetcher.readers))

    def seek(self, partition: TopicPartition, offset: int | None) -> None:
        """Go on at another offset; None starts over by the reset policy."""
        with self._engine.lock:
            self._need(partition)
            self._fetcher.seek(partition, offset)
            if offset is not None:
                self._handed_out[partition] = offset
            self._engine.wake()

    def position(self, partition: TopicPartition) -> int | None:
        """Offset of the next record to hand out; None while it is not known."""
        with self._engine.lock:
            self._need(partition)
            return self._fetcher.readers[partition].position

    def pause(self, *partitions: TopicPartition) -> None:
        """Hand out nothing of these for now."""
        self._set_paused(partitions, True)

    def resume(self, *partitions: TopicPartition) -> None:
        """Undo `pause`."""
        self._set_paused(partitions, False)

    # Reading.

    def poll(self, timeout: float = 1.0, records_max: int = 500) -> list[ConsumerRecord]:
        """Records that are there, or that come within `timeout` seconds; maybe none.

        Raises:
            ClientError: a partition cannot go on, or the group refused this member.
        """
        deadline = now_ms() + timeout * 1000
        engine = self._engine
        while True:
            self._run_group()
            with engine.lock:
                engine.check()
                self._auto_commit()
                taken = self._fetcher.take(records_max)
                if taken:
                    self._note(taken)
                    engine.wake()  # room for more
                    return taken
                if not engine.wait_for(self._has_news, deadline):
                    return []

    def partitions(self, topic: str, timeout: float = 10.0) -> int:
        """How many partitions a topic has.

        Raises:
            TimedOutError: nobody could tell in time.
        """
        engine = self._engine
        metadata = engine.client.metadata
        with engine.lock:
            engine.check()
            metadata.want((topic,))
            engine.wake()
            known = engine.wait_for(
                lambda: metadata.partition_count(topic) is not None, now_ms() + timeout * 1000
            )
            if not known:
                raise TimedOutError(f"no metadata of topic {topic!r} in time", sent=False)
            return metadata.partition_count(topic) or 0

    def offsets(
        self, partitions: Iterable[TopicPartition], which: int, timeout: float = 10.0
    ) -> dict[TopicPartition, OffsetFound]:
        """Look offsets up: by timestamp (ms), EARLIEST (-2) or LATEST (-1)."""
        deadline = now_ms() + timeout * 1000
        found: dict[TopicPartition, OffsetFound] = {}
        for key in partitions:
            self.partitions(key.topic, max(0.1, (deadline - now_ms()) / 1000))
            while key not in found:
                found.update(self._look_up(key, which, deadline))
        return found

    def _look_up(
        self, key: TopicPartition, which: int, deadline: float
    ) -> dict[TopicPartition, OffsetFound]:
        """One try to ask the leader; empty when it should be tried again."""
        engine, metadata = self._engine, self._engine.client.metadata
        with engine.lock:
            engine.wait_for(lambda: metadata.leader(*key) is not None, deadline)
            leader = metadata.leader(*key)
        if leader is None:
            raise TimedOutError(f"{key} has no leader", sent=False)
        operation = list_offsets(leader[0], {key: which})

        def make(finish: Finish) -> Call:
            return struct_call(
                operation.api,
                operation.request,
                finish,
                node=int(operation.target),
                max_version=operation.max_version,
                timeout_ms=max(100.0, deadline - now_ms()),
            )

        try:
            return operation.read(engine.call(make))
        except ClientError as error:
            if not error.retriable or now_ms() >= deadline:
                raise
        with engine.lock:
            metadata.invalidate()
            engine.wake()
            engine.wait_for(lambda: False, now_ms() + 50)
        return {}

    # Committing.

    def commit(
        self,
        offsets: Mapping[TopicPartition, int] | None = None,
        timeout: float = 30.0,
    ) -> None:
        """Save positions and wait; by default those of all records handed out.

        Raises:
            ClientError: refused, or unknown at the timeout (see `outcome`).
        """
        with self._engine.lock:
            self._engine.check()
            group = self._need_group()
            positions = self._handed_out if offsets is None else offsets
            if not positions:
                return
            commit = {key: CommittedOffset(offset) for key, offset in positions.items()}
            pending = group.commit(commit, now_ms())
            self._await(pending, timeout)
            self._committed.update(positions)

    def committed(
        self, partitions: Iterable[TopicPartition], timeout: float = 30.0
    ) -> dict[TopicPartition, int]:
        """The group's committed offsets of these partitions, where there are any."""
        with self._engine.lock:
            self._engine.check()
            pending = self._need_group().committed(list(partitions), now_ms())
            found: Mapping[TopicPartition, CommittedOffset] = self._await(pending, timeout)
        return {key: item.offset for key, item in found.items()}

    def close(self, *, commit: bool = True) -> None:
        """Commit (when commits are automatic), leave the group and stop."""
        engine = self._engine
        if engine.is_closed:
            return
        try:
            if self._group is not None and engine.crash is None:
                self._leave(self._group, commit=commit)
        finally:
            engine.close()

    # How it works.

    def _has_news(self) -> bool:
        group = self._group
        return self._fetcher.has_records or (
            group is not None and (bool(group.events) or group.error is not None)
        )

    def _run_group(self) -> None:
        """Do what the group asks; callbacks run without the lock, so that heartbeats go on."""
        group = self._group
        if group is None:
            return
        while True:
            with self._engine.lock:
                self._engine.check()
                group.polled(now_ms())
                if group.error is not None:
                    error, group.error = group.error, None
                    raise error
                self._engine.wake()
                if not group.events:
                    return
                event = group.events.popleft()
                if isinstance(event, Assigned):
                    self._take_over(event)
            if isinstance(event, GaveUp):
                self._give_up(group, event)
            else:
                self._on_assigned(event.partitions)

    def _give_up(self, group: GroupCore, event: GaveUp) -> None:
        if self._auto_commit_ms is not None and not event.is_lost:
            self._commit_quietly(5.0)
        self._on_revoked(event.partitions)
        with self._engine.lock:
            self._fetcher.assign(())
            self._handed_out.clear()
            self._committed.clear()
            group.gave_up()
            self._engine.wake()

    def _take_over(self, event: Assigned) -> None:
        self._fetcher.assign(event.partitions)
        for key, committed in event.committed.items():
            self._fetcher.seek(key, committed.offset)
            self._handed_out[key] = self._committed[key] = committed.offset

    def _note(self, taken: Sequence[ConsumerRecord]) -> None:
        # Positions, not offsets + 1: they also pass over control batches and compacted gaps.
        readers = self._fetcher.readers
        for topic, partition in {(record.topic, record.partition): None for record in taken}:
            key = TopicPartition(topic, partition)
            position = readers[key].position
            if position is not None:
                self._handed_out[key] = position

    def _auto_commit(self) -> None:
        if self._auto_commit_ms is None or self._group is None or now_ms() < self._commit_at:
            return
        self._commit_at = now_ms() + self._auto_commit_ms
        self._commits = [pending for pending in self._commits if not pending.is_done]
        changed = self._changed()
        if changed and not self._commits:
            commit = {key: CommittedOffset(offset) for key, offset in changed.items()}
            self._commits.append(self._group.commit(commit, now_ms()))
            self._committed.update(changed)
            self._engine.wake()

    def _changed(self) -> dict[TopicPartition, int]:
        return {
            key: offset
            for key, offset in self._handed_out.items()
            if self._committed.get(key) != offset and key in self._fetcher.readers
        }

    def _commit_quietly(self, timeout: float) -> None:
        """Commit before giving partitions up; a refusal means that others read them again."""
        assert self._group is not None
        with self._engine.lock:
            commit = {
                key: CommittedOffset(offset)
                for key, offset in self._handed_out.items()
                if key in self._fetcher.readers
            }
            if not commit:
                return
            pending = self._group.commit(commit, now_ms())
            self._engine.wake()
            self._engine.wait_for(lambda: pending.is_done, now_ms() + timeout * 1000)

    def _leave(self, group: GroupCore, *, commit: bool) -> None:
        if commit and self._auto_commit_ms is not None:
            self._commit_quietly(5.0)
        held = self.assignment
        if held:
            self._on_revoked(held)
        done: list[bool] = []
        with self._engine.lock:
            self._fetcher.assign(())
            call = group.leave(lambda _response, _error, _now: done.append(True))
            if call is not None:
                self._engine.client.submit(call, now_ms())
                self._engine.wake()
                self._engine.wait_for(lambda: bool(done), now_ms() + 5_000)

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
            for key in partitions:
                self._need(key)
                self._fetcher.readers[key].is_paused = is_paused
            self._engine.wake()

    def _need(self, partition: TopicPartition) -> None:
        self._engine.check()
        if partition not in self._fetcher.readers:
            raise UsageError(f"{partition} is not assigned to this consumer")

    def _need_group(self) -> GroupCore:
        if self._group is None:
            raise UsageError("commits need a group")
        return self._group


def read_reset(name: str) -> Reset:
    """A reset policy by Kafka's name.

    Raises:
        UsageError: not earliest, latest or none.
    """
    try:
        return Reset(name)
    except ValueError:
        raise UsageError(f"reset is earliest, latest or none, not {name!r}") from None


__all__ = ["EARLIEST", "LATEST", "Consumer", "ConsumerRecord"]
