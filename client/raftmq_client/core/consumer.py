"""What a consumer decides beside fetching and membership: what was handed out, what to commit.

Joins a `FetcherCore` and, with a group, a `GroupCore`: as its member, or with partitions chosen by
hand, which begin where the group committed. Records handed out one by one count one by one, whole
polls as a whole; a commit covers what was handed out and nothing behind it. Drivers run
the callbacks, wait, and move bytes; nothing here blocks, reads a clock or a socket.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field

from raftmq.types import TopicPartition
from raftmq_client.core.all_partitions import AllPartitions
from raftmq_client.core.call import Call, Finish
from raftmq_client.core.client import ClientCore
from raftmq_client.core.fetcher import FetcherCore, FetcherOptions
from raftmq_client.core.group import NO_GENERATION, GroupCore
from raftmq_client.core.group_admin import CommittedOffset
from raftmq_client.core.group_state import Assigned, GaveUp, GroupEvent, GroupOptions, Pending
from raftmq_client.core.messages import ConsumerRecord, decoded
from raftmq_client.errors import DeserializationError, UsageError


@define
class ConsumerOptions:
    """How a consumer behaves. Times in milliseconds."""

    fetching: FetcherOptions = field(factory=FetcherOptions)
    grouping: GroupOptions = field(factory=GroupOptions)
    group: str | None = None
    auto_commit_ms: float | None = 5_000
    """None: nothing is committed but by `commit`."""
    decode_key: Callable[[bytes], Any] | None = None
    decode_value: Callable[[bytes], Any] | None = None
    commits_first: bool = False
    """At most once: a record is handed out only after its commit stands."""


class ConsumerCore:
    """One consumer's deciding code."""

    def __init__(self, options: ConsumerOptions, client: ClientCore) -> None:
        self.options = options
        self._metadata = client.metadata
        self.fetcher = FetcherCore(options.fetching, client.metadata)
        self._everything = AllPartitions(self.fetcher, client.metadata)
        client.cores += [self._everything, self.fetcher]
        self.group: GroupCore | None = None
        if options.group is not None:
            self.group = GroupCore(options.group, options.grouping, client.metadata)
            client.cores.append(self.group)
        self._auto_commit_ms = options.auto_commit_ms if self.group is not None else None
        self._commit_at: float | None = None  # the first records set it
        self._open_commits: list[tuple[Pending, Mapping[TopicPartition, int]]] = []
        self._handed_out: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._epochs: dict[TopicPartition, int] = {}  # of the last record handed out (KIP-320)
        self._epochs_before: dict[TopicPartition, int] = {}  # the last `take`
        self._batch: list[ConsumerRecord] = []  # taken for an iteration
        self._batch_next = 0
        self._is_by_hand: bool | None = None  # None until something is chosen
        self._unstarted: dict[TopicPartition, None] = {}  # their committed offset is not known yet
        self._starting: Pending | None = None

    # What to read.

    def subscribe(self, topics: str | Iterable[str] | re.Pattern[str], now: float) -> None:
        """Read these topics, or all that a pattern matches: with a group as its member, else all.

        Raises:
            UsageError: partitions were assigned by hand.
        """
        self._choose(by_hand=False)
        wanted = (topics,) if isinstance(topics, str) else topics
        if self.group is None:
            self._everything.want(wanted)
        else:
            self.group.subscribe(wanted, now)

    def assign(
        self, partitions: Iterable[TopicPartition] | Mapping[TopicPartition, int | None]
    ) -> None:
        """Read exactly these partitions; a mapping gives offsets.

        Without one, what is new begins where the group committed; without that as `reset` says.

        Raises:
            UsageError: the consumer reads topics, whose partitions are not chosen by hand.
        """
        self._choose(by_hand=True)
        positions = partitions if isinstance(partitions, Mapping) else dict.fromkeys(partitions)
        self.end_iteration()
        before = self.fetcher.readers
        unstarted = [key for key in positions if key in self._unstarted or key not in before]
        self.fetcher.assign(positions)
        self._unstarted.clear()
        for key, offset in positions.items():
            if offset is not None:
                self.seek(key, offset)
        if self.group is not None:
            self._unstarted = dict.fromkeys(key for key in unstarted if positions[key] is None)
            self._starting = None  # what it brings is not for these
            for key in self._unstarted:
                self.fetcher.readers[key].is_looking_up = True

    def _choose(self, *, by_hand: bool) -> None:
        if self._is_by_hand not in (None, by_hand):
            raise UsageError("a consumer reads topics or assigned partitions, not both by turns")
        self._is_by_hand = by_hand

    @property
    def assignment(self) -> tuple[TopicPartition, ...]:
        """The partitions read now."""
        return tuple(sorted(self.fetcher.readers))

    @property
    def generation(self) -> int:
        """Of the group, as this member knows it; `NO_GENERATION` while it is in none."""
        return NO_GENERATION if self.group is None else self.group.generation

    def seek(self, partition: TopicPartition, offset: int | None) -> None:
        """Go on at another offset; None starts over by the reset policy."""
        self.need(partition)
        self.end_iteration()
        self._unstarted.pop(partition, None)
        self.fetcher.seek(partition, offset)
        if offset is not None:
            self._handed_out[partition] = offset
            self._epochs.pop(partition, None)

    def position(self, partition: TopicPartition) -> int | None:
        """Offset of the next record to hand out; None while it is not known."""
        self.need(partition)
        for record in self._batch[self._batch_next :]:
            if (record.topic, record.partition) == partition:
                return record.offset
        return self.fetcher.readers[partition].position

    def set_paused(self, partitions: Iterable[TopicPartition], is_paused: bool) -> None:
        """Hand out nothing of these for now, or again; without any named, of all."""
        if is_paused:
            self.end_iteration()
        for key in tuple(partitions) or self.assignment:
            self.need(key)
            self.fetcher.readers[key].is_paused = is_paused

    def need(self, partition: TopicPartition) -> None:
        """Refuse what is not assigned.

        Raises:
            UsageError: it is not.
        """
        if partition not in self.fetcher.readers:
            raise UsageError(f"{partition} is not assigned to this consumer")

    # Handing out.

    @property
    def has_news(self) -> bool:
        """True when `take` would give something, or the group asks for something."""
        group = self.group
        if self._metadata.refusal is not None:
            return True
        return self.fetcher.has_records or (
            group is not None and (bool(group.events) or group.error is not None)
        )

    def wait_until(self, deadline: float, now: float) -> float:
        """Until when a poll may wait in one go: a group is to hear that it does."""
        if self.group is None:
            return deadline
        return min(deadline, now + self.options.grouping.max_poll_interval_ms / 2)

    def take(self, records_max: int, now: float) -> list[ConsumerRecord]:
        """Records that are there; asking for more counts the earlier ones as handled.

        Raises:
            ClientError: a partition cannot go on.
        """
        if self._metadata.refusal is not None:
            raise self._metadata.refusal
        self.end_iteration()
        self._auto_commit(now)
        taken = self.fetcher.take(records_max)
        self._epochs_before = {key: self._epochs.get(key, -1) for key in self.fetcher.touched}
        self._note(self.fetcher.touched, ())
        if self.options.decode_key is not None or self.options.decode_value is not None:
            return self._decode(taken)
        return taken

    def _decode(self, taken: list[ConsumerRecord]) -> list[ConsumerRecord]:
        """Keys and values by the user's functions; what fails stays where it is."""
        decode_key, decode_value = self.options.decode_key, self.options.decode_value
        found: list[ConsumerRecord] = []
        for number, record in enumerate(taken):
            key, value = record.key, record.value
            try:
                if decode_key is not None and key is not None:
                    key = decode_key(key)
                if decode_value is not None and value is not None:
                    value = decode_value(value)
            except Exception as error:
                self.put_back(taken[number:], taken[:number])
                if found:
                    break  # told by the next call
                where = f"{record.topic}-{record.partition} at offset {record.offset}"
                place = record.topic, record.partition, record.offset
                raise DeserializationError(f"{where}: {error}", *place) from error
            found.append(decoded(record, key, value))
        return found

    def next_record(self, now: float) -> ConsumerRecord | None:
        """The next record of an iteration; None when the driver has to look after the rest."""
        group = self.group
        if group is not None:
            if group.events or group.error is not None:
                return None
            group.polled(now)
            if self._commit_at is not None and now >= self._commit_at:
                self.note_iterated()
                self._auto_commit(now)
        if self._batch_next >= len(self._batch):
            return None
        record = self._batch[self._batch_next]
        self._batch_next += 1
        return record

    def iterate(self, records: list[ConsumerRecord]) -> ConsumerRecord:
        """Hand these out one by one, beginning now; they came from `take`."""
        assert records
        self._batch, self._batch_next = records, 1
        return records[0]

    def end_iteration(self) -> None:
        """What an iteration has not handed out is read again."""
        handed, rest = self._batch[: self._batch_next], self._batch[self._batch_next :]
        self._batch, self._batch_next = [], 0
        if rest:
            self.put_back(rest, handed)

    def put_back(
        self, records: Sequence[ConsumerRecord], handed: Sequence[ConsumerRecord] = ()
    ) -> None:
        """These were taken but not handed out: read them again. `handed` were taken with them."""
        first = {TopicPartition(r.topic, r.partition): r.offset for r in reversed(records)}
        for key, offset in first.items():
            if key in self.fetcher.readers:
                self.fetcher.seek(key, offset)
                self._handed_out[key] = offset
                self._epochs[key] = self._epochs_before.get(key, -1)
        for record in handed:
            key = TopicPartition(record.topic, record.partition)
            if key in first:
                self._epochs[key] = record.leader_epoch

    def note_iterated(self) -> None:
        """Count what an iteration has handed out, and no more."""
        if self._batch and not self.options.commits_first:
            handed = self._batch[: self._batch_next]
            seen = {(record.topic, record.partition): record.leader_epoch for record in handed}
            epochs = {TopicPartition(*key): epoch for key, epoch in seen.items()}
            self._note(epochs, self._batch[self._batch_next :])
            self._epochs.update(epochs)

    def _note(self, keys: Iterable[TopicPartition], rest: Sequence[ConsumerRecord]) -> None:
        """Count records of these as handed out; of partitions in `rest` more will come.

        With nothing left behind them positions count, not offsets + 1: they also pass over control
        batches and compacted gaps.
        """
        readers = self.fetcher.readers
        for key in keys:
            position = readers[key].position if key in readers else None
            if position is not None:
                self._handed_out[key] = position
                self._epochs[key] = readers[key].epoch
        for record in reversed(rest):
            key = TopicPartition(record.topic, record.partition)
            if key in readers:
                self._handed_out[key] = record.offset
                self._epochs[key] = self._epochs_before.get(key, -1)

    # The group.

    def next_event(self, now: float) -> GroupEvent | None:
        """What the group asks for, already taken over as far as it concerns positions.

        After an event and its callback the driver calls `told`, or `begin_again`.

        Raises:
            ClientError: why this member cannot be in its group.
        """
        group = self.group
        if group is None:
            return None
        group.polled(now)
        if group.error is not None and not (
            group.events and isinstance(group.events[0], GaveUp)  # told before the reason
        ):
            error, group.error = group.error, None
            raise error
        self._look_starts_up(now)
        if not group.events:
            return None
        self.end_iteration()
        event = group.events.popleft()
        if isinstance(event, Assigned):
            self._take_over(event)
        return event

    def told(self, event: GroupEvent) -> None:
        """The driver's callback for `event` is over, well or not: stop reading what is given up."""
        if isinstance(event, Assigned):
            return
        assert self.group is not None
        given = dict.fromkeys(event.partitions)
        self.fetcher.assign([key for key in self.fetcher.readers if key not in given])
        for key in given:
            self._handed_out.pop(key, None)
            self._committed.pop(key, None)
            self._epochs.pop(key, None)
        self.group.gave_up()

    def begin_again(self, event: GroupEvent) -> None:
        """The callback was cancelled halfway: the next poll calls it anew."""
        assert self.group is not None
        # Partitions that were lost meanwhile are no longer to be read; that event is waiting.
        if isinstance(event, GaveUp) or set(event.partitions) <= set(self.group.owned):
            self.group.events.appendleft(event)

    def _take_over(self, event: Assigned) -> None:
        kept = [key for key in self.fetcher.readers if event.is_incremental]
        self.fetcher.assign([*kept, *event.partitions])
        for key, committed in event.committed.items():
            self._begin_at(key, committed)

    def _begin_at(self, key: TopicPartition, committed: CommittedOffset) -> None:
        self.fetcher.seek(key, committed.offset)
        self._handed_out[key] = self._committed[key] = committed.offset
        self._epochs[key] = committed.leader_epoch

    def _look_starts_up(self, now: float) -> None:
        """Ask where the group committed, for partitions assigned by hand that begin there."""
        if self._unstarted and self._starting is None:
            self._starting = self.need_group().committed(tuple(self._unstarted), now)
            self._starting.then = self._started

    def _started(self, pending: Pending) -> None:
        if pending is not self._starting:
            return
        self._starting = None
        if pending.error is not None:
            self.need_group().error = pending.error  # told by this poll; the next one asks again
            return
        unstarted, self._unstarted = self._unstarted, {}
        for key in unstarted:
            committed = pending.result.get(key)
            if committed is None:
                self.fetcher.seek(key, None)
            else:
                self._begin_at(key, committed)

    # Committing.

    def commit(
        self, offsets: Mapping[TopicPartition, int] | ConsumerRecord | None, now: float
    ) -> Pending | None:
        """Begin to save positions: those of all records handed out, one record's, or given ones.

        None when there is nothing to save. A record's commit is its offset + 1. What was handed
        out is saved with the leader epoch of its last record, given offsets without any.

        Raises:
            UsageError: the consumer has no group.
        """
        self.need_group()
        self.note_iterated()
        if offsets is None:
            return self._save(self._handed_out, self._epochs, now)
        if isinstance(offsets, ConsumerRecord):
            key = TopicPartition(offsets.topic, offsets.partition)
            return self._save({key: offsets.offset + 1}, {key: offsets.leader_epoch}, now)
        return self._save(offsets, {}, now)

    def _save(
        self,
        positions: Mapping[TopicPartition, int],
        epochs: Mapping[TopicPartition, int],
        now: float,
    ) -> Pending | None:
        if not positions:
            return None
        commit = {
            key: CommittedOffset(offset, epochs.get(key, -1)) for key, offset in positions.items()
        }
        pending = self.need_group().commit(commit, now)
        self._reap_commits()
        self._open_commits.append((pending, dict(positions)))
        return pending

    def last_commit(self, partitions: Iterable[TopicPartition], now: float) -> Pending | None:
        """The commit before partitions are given up; None where commits are not automatic."""
        if self._auto_commit_ms is None or self.group is None:
            return None
        self.note_iterated()
        return self._save(self._changed(partitions), self._epochs, now)

    def committed(self, partitions: Iterable[TopicPartition] | None, now: float) -> Pending:
        """Begin to look committed offsets up: of these, or of all that is assigned.

        Raises:
            UsageError: the consumer has no group.
        """
        wanted = self.assignment if partitions is None else tuple(partitions)
        return self.need_group().committed(wanted, now)

    def need_group(self) -> GroupCore:
        """The membership.

        Raises:
            UsageError: the consumer has no group.
        """
        if self.group is None:
            raise UsageError("commits need a group")
        return self.group

    def leave(self, finish: Finish) -> Call | None:
        """Stop reading and leave the group; the call to send, if any."""
        self.fetcher.assign(())
        self._unstarted, self._starting = {}, None
        return self.group.leave(finish) if self.group is not None else None

    def _auto_commit(self, now: float) -> None:
        if self._auto_commit_ms is None:
            return
        if self._commit_at is None:
            self._commit_at = now + self._auto_commit_ms
        if now < self._commit_at:
            return
        self._commit_at = now + self._auto_commit_ms
        changed = self._changed(self.fetcher.readers)
        if changed and not self._open_commits:
            self._save(changed, self._epochs, now)

    def _reap_commits(self) -> None:
        """Remember what got through."""
        for pending, positions in self._open_commits:
            if pending.is_done and pending.error is None:
                self._committed.update(positions)
        self._open_commits = [item for item in self._open_commits if not item[0].is_done]

    def _changed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        self._reap_commits()
        return {
            key: self._handed_out[key]
            for key in partitions
            if key in self._handed_out
            and key in self.fetcher.readers
            and self._committed.get(key) != self._handed_out[key]
        }
