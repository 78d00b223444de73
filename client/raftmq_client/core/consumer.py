"""What a consumer decides beside fetching and membership: what was handed out, what to commit.

Joins a `FetcherCore` and, with a group, a `GroupCore`: as its member, or with partitions chosen by
hand, which begin where the group committed. Records handed out one by one are finished one by one,
whole polls as a whole (`core/progress.py`), and whatever is committed by itself covers what is
finished. Drivers run the callbacks, wait, and move bytes; nothing here blocks, reads a clock or a
socket.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from attrs import define, field

from raftmq.types import TopicPartition
from raftmq_client.core.admin import EARLIEST, LATEST
from raftmq_client.core.all_partitions import AllPartitions
from raftmq_client.core.call import Call, Finish
from raftmq_client.core.client import ClientCore
from raftmq_client.core.fetcher import FetcherCore, FetcherOptions
from raftmq_client.core.group import NO_GENERATION, GroupCore
from raftmq_client.core.group_admin import CommittedOffset
from raftmq_client.core.group_requests import Identity
from raftmq_client.core.group_state import Assigned, GaveUp, GroupEvent, GroupOptions, Pending
from raftmq_client.core.messages import ConsumerRecord, decoded
from raftmq_client.core.metadata import check_topic
from raftmq_client.core.progress import Places, Progress
from raftmq_client.errors import DeserializationError, MustAbortError, UsageError

_LOG: Final = logging.getLogger("raftmq_client.consumer")
_COMMIT_PAUSE_MS: Final = 100.0
"""Between two automatic commits while nothing comes, however short their interval is."""


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
        self._open_commits: list[tuple[Pending, dict[TopicPartition, int]]] = []
        self._progress = Progress()
        self._batch: list[ConsumerRecord] = []  # taken for an iteration
        self._batch_next = 0
        self._chosen: tuple[str, ...] = ()
        self._is_by_hand: bool | None = None  # None until something is chosen
        self._unstarted: dict[TopicPartition, None] = {}  # their committed offset is not known yet
        self._starting: Pending | None = None
        self._bases: dict[TopicPartition, CommittedOffset] = {}  # of what was rewound
        self._let_go: tuple[TopicPartition, ...] = ()  # with records that nobody committed

    # What to read.

    def subscribe(self, topics: str | Iterable[str] | re.Pattern[str], now: float) -> None:
        """Read these topics, or all that a pattern matches: with a group as its member, else all.

        Raises:
            UsageError: partitions were assigned by hand, or these are no names.
        """
        wanted: tuple[str, ...] | re.Pattern[str]
        if isinstance(topics, re.Pattern):
            if not isinstance(topics.pattern, str):
                raise UsageError(f"a pattern for topics is one of text, not {topics.pattern!r}")
            wanted = topics
        else:
            wanted = (topics,) if isinstance(topics, str) else tuple(topics)
            for topic in wanted:
                check_topic(topic)
        self._choose(by_hand=False)
        self._chosen = () if isinstance(wanted, re.Pattern) else wanted
        if self.group is None:
            self._everything.want(wanted)
        else:
            self.group.subscribe(wanted, now)

    def assign(
        self,
        partitions: Iterable[TopicPartition] | Mapping[TopicPartition, int | None],
        now: float,
    ) -> None:
        """Read exactly these partitions; a mapping gives offsets, or EARLIEST or LATEST.

        Without one, what is new begins where the group committed; without that as `reset` says.
        Where commits are automatic, what is finished of the others is committed.

        Raises:
            UsageError: the consumer reads topics, whose partitions are not chosen by hand, or these
                are no partitions and offsets.
        """
        positions = partitions if isinstance(partitions, Mapping) else dict.fromkeys(partitions)
        check_partitions(positions)
        for offset in positions.values():
            check_start(offset)
        self._choose(by_hand=True)
        self.end_iteration()
        before = self.fetcher.readers
        unstarted = [key for key in positions if key in self._unstarted or key not in before]
        self._stop_reading([key for key in before if key not in positions], now)
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

    def _stop_reading(self, partitions: Sequence[TopicPartition], now: float) -> None:
        """Partitions chosen by hand are let go, and no rebalance will ask for their commit."""
        if partitions:
            self.last_commit(partitions, now)
            self._forget(partitions)

    def _forget(self, partitions: Iterable[TopicPartition]) -> None:
        gone = list(partitions)
        if not self._commits_by_itself:
            self._let_go += tuple(key for key in gone if self._progress.has_moved(key))
        self._progress.forget(gone)
        for _, positions in self._open_commits:
            for key in gone:
                positions.pop(key, None)

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
        """Go on at another offset, EARLIEST or LATEST; None starts over by the reset policy."""
        check_start(offset)
        self.need(partition)
        self.end_iteration()
        self._unstarted.pop(partition, None)
        self.fetcher.seek(partition, offset)
        if offset is None or offset < 0:
            self._progress.restart(partition)
        else:
            self._progress.begin(partition, CommittedOffset(offset), is_saved=False)

    def position(self, partition: TopicPartition) -> int | None:
        """Offset of the next record to hand out; None while it is not known."""
        self.need(partition)
        for record in self._batch[self._batch_next :]:
            if (record.topic, record.partition) == partition:
                return record.offset
        return self.fetcher.readers[partition].position

    def lag(self) -> dict[TopicPartition, int | None]:
        """How many offsets each assigned partition has left; None where that is not known yet."""
        found: dict[TopicPartition, int | None] = {}
        for key in self.fetcher.readers:
            position = self.position(key)
            found[key] = None if position is None else self.fetcher.lag(key, position)
        return found

    def rewind(self) -> None:
        """Read on from where the group committed; where it never did, from where reading began."""
        self.need_group()
        self._batch, self._batch_next = [], 0
        self._progress.drop()
        self._note_starts()
        self._let_go = ()
        self._starting = None  # what it brings may be older
        for key, reader in self.fetcher.readers.items():
            base = self._progress.base(key)
            if key in self._unstarted or base is None or base.offset == reader.position:
                continue
            self._progress.restart(key)
            self._bases[key] = base
            self.fetcher.seek(key, None)
            reader.is_looking_up = True
            self._unstarted[key] = None

    def set_paused(self, partitions: Iterable[TopicPartition], is_paused: bool) -> None:
        """Hand out nothing of these for now, or again."""
        named = tuple(partitions)
        for key in named:
            self.need(key)
        if is_paused and named:
            self.end_iteration()
        for key in named:
            self.fetcher.readers[key].is_paused = is_paused

    def need(self, partition: TopicPartition) -> None:
        """Refuse what is not assigned.

        Raises:
            UsageError: it is not.
        """
        if partition not in self.fetcher.readers:
            self.check()
            raise UsageError(f"{partition} is not assigned to this consumer")

    # Handing out.

    @property
    def has_news(self) -> bool:
        """True when `take` would give something, or the group asks for something."""
        group = self.group
        if self._metadata.refusal is not None:
            return True
        if self._metadata.final_refusal(self._topics()) is not None:
            return True
        return self.fetcher.has_records or (
            group is not None and (bool(group.events) or group.error is not None)
        )

    def wait_until(self, deadline: float, now: float) -> float:
        """Until when a poll may wait in one go: a group is to hear that it does.

        What is finished is committed when its time has come, also while nothing comes.
        """
        if self.group is None:
            return deadline
        deadline = min(deadline, now + self.options.grouping.max_poll_interval_ms / 2)
        if self._commit_at is not None:
            unsaved = self._unsaved(self.fetcher.readers)
            if unsaved and not self._open_commits:
                deadline = min(deadline, max(self._commit_at, now + _COMMIT_PAUSE_MS))
        return deadline

    def take(self, records_max: int, now: float) -> list[ConsumerRecord]:
        """Records that are there; asking for more finishes the earlier ones.

        Raises:
            UsageError: `records_max` is no number from 1 on.
            ClientError: a partition cannot go on.
        """
        if type(records_max) is not int or records_max < 1:
            raise UsageError(f"records_max is a number from 1 on, not {records_max!r}")
        if self._metadata.refusal is not None:
            raise self._metadata.refusal.fresh()
        refused = self._metadata.final_refusal(self._topics())
        if refused is not None:
            raise refused
        self._finish_all()
        self._auto_commit(now)
        taken = self.fetcher.take(records_max)
        if self.fetcher.touched:
            self._progress.took(self._places(self.fetcher.touched))
        if self.options.decode_key is not None or self.options.decode_value is not None:
            return self._decode(taken)
        return taken

    def _topics(self) -> Iterable[str]:
        """What is to be read, as far as it has names."""
        if not self._metadata.errors:
            return ()
        chosen = [key.topic for key in self.fetcher.readers]
        return dict.fromkeys([*self._chosen, *chosen])

    @property
    def trouble(self) -> str:
        """What is waited for, for people; empty while records may come."""
        metadata = self._metadata
        if metadata.unreachable:
            return metadata.unreachable
        for topic in self._topics():
            if topic in metadata.errors:
                return f"topic {topic!r} is not there: {metadata.why_not(topic)}"
        if self.group is not None and self.group.waits_for:
            return self.group.waits_for
        for key in self.fetcher.readers:
            if metadata.leader(*key) is None:
                return f"{key} has no leader"
        return ""

    def _finish_all(self) -> None:
        """The caller came back for more: what was in hand is finished."""
        batch, handed = self._batch, self._batch_next
        self._batch, self._batch_next = [], 0
        if handed < len(batch):
            if not self.options.commits_first:
                self._progress.hold_first(batch, handed)
            self._read_again(batch[handed:])
        self._progress.finish()
        self._note_starts()

    def _note_starts(self) -> None:
        """A position that a reset chose is committed as any other."""
        starts = self.fetcher.starts
        while starts:
            key, offset = starts.popitem()
            self._progress.begin_by_reset(key, offset)

    def _places(self, keys: Iterable[TopicPartition]) -> Places:
        """Where these stand in what was handed out."""
        readers = self.fetcher.readers
        places = {}
        for key in keys:
            reader = readers[key]
            assert reader.position is not None, "records were taken from it"
            places[key] = CommittedOffset(reader.position, reader.epoch)
        return places

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
                self._progress.hold_first(taken, number)
                self._read_again(taken[number:])
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
                self._progress.finish_first(self._batch, self._batch_next)
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
        """What an iteration has not handed out is read again; its last record stays in hand."""
        batch, handed = self._batch, self._batch_next
        self._batch, self._batch_next = [], 0
        if not batch:
            return
        if not self.options.commits_first:
            self._progress.finish_first(batch, handed - 1)
            self._progress.hold_first(batch, handed)
        self._read_again(batch[handed:])

    def put_back(self, records: Sequence[ConsumerRecord]) -> None:
        """These were taken but not handed out: read them again."""
        self._progress.drop()
        self._read_again(records)

    def _read_again(self, records: Sequence[ConsumerRecord]) -> None:
        first = {(r.topic, r.partition): r.offset for r in reversed(records)}
        for where, offset in first.items():
            key = TopicPartition(*where)
            if key in self.fetcher.readers:
                self.fetcher.seek(key, offset)

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
            error = group.error
            if not group.is_shut:
                group.error = None
            raise error.fresh()
        self._look_starts_up(now)
        if not group.events:
            return None
        self._finish_all()
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
        self._forget(given)
        self.group.gave_up(event)

    def begin_again(self, event: GroupEvent) -> None:
        """The callback was cancelled halfway: the next poll calls it anew."""
        assert self.group is not None
        # Partitions that were lost meanwhile are no longer to be read; that event is waiting.
        if isinstance(event, GaveUp) or set(event.partitions) <= set(self.group.owned):
            self.group.events.appendleft(event)

    def _take_over(self, event: Assigned) -> None:
        kept = [key for key in self.fetcher.readers if event.is_incremental]
        self.fetcher.assign([*kept, *event.partitions])
        for key in event.partitions:
            self._unstarted.pop(key, None)
            if key in event.committed:
                self._begin_at(key, event.committed[key])

    def _begin_at(self, key: TopicPartition, committed: CommittedOffset) -> None:
        self.fetcher.seek(key, committed.offset)
        place = CommittedOffset(committed.offset, committed.leader_epoch)
        self._progress.begin(key, place, is_saved=True)

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
        bases, self._bases = self._bases, {}
        for key in unstarted:
            committed = pending.result.get(key)
            if key not in self.fetcher.readers:
                continue
            if committed is not None:
                self._begin_at(key, committed)
            elif key in bases:
                self.fetcher.seek(key, bases[key].offset)
                self._progress.begin(key, bases[key], is_saved=False)
            else:
                self.fetcher.seek(key, None)

    # Committing.

    def commit(
        self, offsets: Mapping[TopicPartition, int] | ConsumerRecord | None, now: float
    ) -> Pending | None:
        """Begin to save positions: those of all records handed out, one record's, or given ones.

        None when there is nothing to save. A record's commit is its offset + 1. What was handed
        out is saved with the leader epoch of its last record, given offsets without any. All of it
        counts as finished.

        Raises:
            UsageError: the consumer has no group, or these are no partitions and offsets.
        """
        self.need_group()
        if offsets is None:
            self._finish_handed_out()
            return self._save(self._progress.finished, now)
        return self._save(self._finish_given(offsets), now)

    def for_transaction(
        self, offsets: Mapping[TopicPartition, int] | ConsumerRecord | None
    ) -> tuple[Identity, Places]:
        """Positions for a transaction to save, as `commit` has them, and whose they are.

        Raises:
            MustAbortError: partitions were given up whose records went into the transaction.
            UsageError: the consumer has no group, commits by itself, or these are no offsets.
        """
        group = self.need_group()
        if self._commits_by_itself:
            raise UsageError(
                "this consumer commits by itself: auto_commit_ms=None or delivery='exactly_once'"
                " leaves that to the transaction"
            )
        if self._let_go or self.is_lost:
            said = ", ".join(map(str, self._let_go[:5])) or "all partitions"
            raise MustAbortError(f"others read on what was read here, and not committed: {said}")
        if offsets is not None:
            return group.identity, self._finish_given(offsets)
        self._finish_handed_out()
        return group.identity, self._unsaved(self.fetcher.readers)

    def saved_by_transaction(self, places: Places) -> None:
        """The transaction that has these is committed."""
        self._progress.saved(
            {key: place.offset for key, place in places.items() if key in self.fetcher.readers}
        )

    def settled(
        self, partitions: Iterable[TopicPartition], in_hand: Mapping[TopicPartition, int]
    ) -> Places:
        """What of these may be saved and is not, for who settles records in any order: all that was
        handed out, up to the first offset that is still in hand."""
        self._finish_handed_out()
        places = self._unsaved(partitions)
        for key, offset in in_hand.items():
            if key in places:
                places[key] = CommittedOffset(offset)
        return {key: p for key, p in places.items() if not self._progress.is_saved(key, p.offset)}

    def save(self, places: Places, now: float) -> Pending | None:
        """Begin to save these; None: there are none. A member that was put out saves nothing.

        Raises:
            UsageError: the consumer has no group.
        """
        return None if self.is_lost else self._save(places, now)

    def _finish_handed_out(self) -> None:
        if self._batch:
            self._progress.finish_first(self._batch, self._batch_next)
        else:
            self._progress.finish()
        self._note_starts()

    def _finish_given(self, offsets: Mapping[TopicPartition, int] | ConsumerRecord) -> Places:
        places: Places
        if isinstance(offsets, ConsumerRecord):
            key = TopicPartition(offsets.topic, offsets.partition)
            places = {key: CommittedOffset(offsets.offset + 1, offsets.leader_epoch)}
        else:
            check_partitions(offsets)
            for offset in offsets.values():
                check_offset(offset)
            places = {key: CommittedOffset(offset) for key, offset in offsets.items()}
        for key, place in places.items():
            if key in self.fetcher.readers:
                self._progress.finish_up_to(key, place)
        return places

    def commit_first(self, now: float) -> Pending:
        """Begin to save the places behind what was just taken, before it is handed out."""
        self.need_group()
        pending = self._save(self._progress.in_hand, now)
        assert pending is not None, "records were taken"
        return pending

    def committed_first(self) -> None:
        """That commit stands: its records are nobody else's, whatever becomes of them."""
        self._progress.finish()

    def _save(self, places: Places, now: float) -> Pending | None:
        if not places:
            return None
        pending = self.need_group().commit(dict(places), now)
        self._reap_commits()
        positions = {key: place.offset for key, place in places.items()}
        self._open_commits.append((pending, positions))
        return pending

    def stop(self, *, is_done: bool) -> None:
        """Hand out nothing more. `is_done`: what is in hand is finished; else it never will be."""
        self.end_iteration()
        if is_done:
            self._progress.finish()
        else:
            self._progress.drop()

    def last_commit(self, partitions: Iterable[TopicPartition], now: float) -> Pending | None:
        """The commit before partitions are given up; None where only `commit` commits."""
        if self.group is None or not self._commits_by_itself:
            return None
        return self._save(self._unsaved(partitions), now)

    @property
    def _commits_by_itself(self) -> bool:
        return self._auto_commit_ms is not None or self.options.commits_first

    def parting_commit(self) -> Call | None:
        """The last commit as a call, for a consumer that cannot wait for the answer."""
        if self.group is None or not self._commits_by_itself:
            return None
        return self.group.commit_call(self._unsaved(self.fetcher.readers))

    @property
    def is_lost(self) -> bool:
        """True when others may read already what this member still has."""
        return self.group is not None and self.group.is_lost

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
            ClientError: why this member can never be in its group.
        """
        if self.group is None:
            raise UsageError("commits need a group")
        self.check()
        return self.group

    def check(self) -> None:
        """Tell, as often as it is asked, that the group has put this member out for good.

        Raises:
            ClientError: why it did.
        """
        group = self.group
        if group is not None and group.is_shut and group.error is not None and not group.events:
            raise group.error.fresh()

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
        unsaved = self._unsaved(self.fetcher.readers)
        if unsaved and not self._open_commits:
            self._save(unsaved, now)

    def _reap_commits(self) -> None:
        """Remember what got through."""
        for pending, positions in self._open_commits:
            if pending.is_done and pending.error is None:
                self._progress.saved(positions)
            elif pending.is_done:
                _LOG.warning("a commit of %s did not get through: %s", positions, pending.error)
        self._open_commits = [item for item in self._open_commits if not item[0].is_done]

    def _unsaved(self, partitions: Iterable[TopicPartition]) -> Places:
        self._reap_commits()
        self._note_starts()
        readers = self.fetcher.readers
        return self._progress.unsaved(key for key in partitions if key in readers)


def check_partitions(partitions: Iterable[TopicPartition]) -> None:
    """Refuse what names no partitions, before anything is done with it.

    Raises:
        UsageError: the first of them that is none.
    """
    for key in partitions:
        if not isinstance(key, TopicPartition) or type(key.partition) is not int or key[1] < 0:
            raise UsageError(f"not a TopicPartition of a name and a number from 0 on: {key!r}")
        check_topic(key.topic)


def check_offset(offset: int) -> None:
    """Refuse what is no position.

    Raises:
        UsageError: it is none.
    """
    if type(offset) is not int or not 0 <= offset < 1 << 63:
        raise UsageError(f"an offset is a number from 0 on, not {offset!r}")


def check_start(offset: int | None) -> None:
    """Refuse where no reading can begin: None stands for the policy, EARLIEST and LATEST for it.

    Raises:
        UsageError: it is none of these, and no offset.
    """
    if offset is not None and not (type(offset) is int and offset in (EARLIEST, LATEST)):
        check_offset(offset)
