"""Transactions as a reader of the rules would write them down: dicts that change, whole histories
instead of states where those tell more, no index. For comparison with `apply_transactions.py`.

It knows one group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import (
    AbortExpired,
    AddPartitions,
    CommitOffsets,
    EndTransaction,
    ForgetId,
    InitProducer,
    ReportMarkers,
    Row,
)
from raftmq.types import TopicId

E = ErrorCode
Key = tuple[TopicId, int]


@dataclass
class Cycle:
    """One transaction, from its beginning to its end."""

    number: int
    protocol: int
    producer_id: int
    epoch: int
    """Of its records."""
    added: dict[Key, bool] = field(default_factory=dict)
    """True once it owes nothing any more."""
    has_group: bool = False
    decision: bool | None = None
    marker_epoch: int = -1
    pending: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.decision is not None and all(self.added.values())


@dataclass
class Id:
    """One transactional id with its whole history."""

    given: list[tuple[int, int]]
    """All credentials, the last ones are the present."""
    may_ask_again: bool = False
    """The holder of those before the last may."""
    is_begun: bool = False
    """A producer has begun since the last transaction: there is no end to be told again."""
    cycles: list[Cycle] = field(default_factory=list)

    @property
    def now(self) -> tuple[int, int]:
        return self.given[-1]

    @property
    def before(self) -> tuple[int, int] | None:
        return self.given[-2] if self.may_ask_again else None

    @property
    def running(self) -> Cycle | None:
        return self.cycles[-1] if self.cycles and self.cycles[-1].decision is None else None

    @property
    def ending(self) -> Cycle | None:
        last = self.cycles[-1] if self.cycles else None
        return (
            last
            if last is not None and last.decision is not None and not last.is_complete
            else None
        )

    @property
    def number(self) -> int:
        return len(self.cycles)


class Naive:
    """All ids, and what is visible of the group's offsets."""

    def __init__(
        self, topics: dict[TopicId, str], partitions: dict[TopicId, int], next_producer_id: int
    ) -> None:
        self.topics = topics
        self.partitions = partitions
        self.ids: dict[str, Id] = {}
        self.offsets: dict[tuple[str, int], int] = {}
        self.next_producer_id = next_producer_id
        self.last_epoch = 32_766

    def row(self, row: Row) -> E:
        """Do what a row says."""
        does: dict[type, Any] = {
            InitProducer: self.init,
            AddPartitions: self.add,
            EndTransaction: self.end,
            ReportMarkers: self.report,
            AbortExpired: self.expire,
            ForgetId: self.forget,
        }
        code = does[type(row)](row)
        assert isinstance(code, E)
        return code

    def fresh(self) -> tuple[int, int]:
        self.next_producer_id += 1
        return self.next_producer_id - 1, 0

    def raise_epoch(self, one: Id, *, may_ask_again: bool) -> None:
        producer_id, epoch = one.now
        one.given.append(self.fresh() if epoch >= self.last_epoch else (producer_id, epoch + 1))
        one.may_ask_again = may_ask_again

    def decide(self, one: Id, cycle: Cycle, is_commit: bool, marker_epoch: int) -> None:
        assert cycle.decision is None
        cycle.decision = is_commit
        cycle.marker_epoch = marker_epoch
        if is_commit:
            self.offsets |= cycle.pending
        cycle.pending = {}
        one.is_begun = False

    def init(self, row: InitProducer) -> E:
        one = self.ids.get(row.transactional_id)
        if one is None:
            self.ids[row.transactional_id] = Id([self.fresh()])
            return E.NONE
        named = (row.producer_id, row.epoch) if row.producer_id >= 0 else None
        knows_last = named is not None and named == one.before and one.running is None
        if named is not None and named != one.now and not knows_last:
            return E.PRODUCER_FENCED
        if one.ending is not None:
            return E.CONCURRENT_TRANSACTIONS
        if one.running is not None:
            cycle = one.running
            self.raise_epoch(one, may_ask_again=named is not None)
            self.decide(one, cycle, False, cycle.epoch + 1)
            return E.CONCURRENT_TRANSACTIONS
        if not knows_last:
            self.raise_epoch(one, may_ask_again=named is not None)
        one.is_begun = True
        return E.NONE

    def join(self, row: Any) -> Cycle | E:
        """The transaction that something is meant for; one that begins is not kept yet."""
        one = self.ids.get(row.transactional_id)
        if one is None:
            return E.INVALID_PRODUCER_ID_MAPPING
        if (row.producer_id, row.epoch) != one.now:
            return self.fence(one, row.producer_id)
        if row.protocol == 1 and row.txn_seq < 0:
            return E.INVALID_REQUEST
        if one.running is not None:
            fits = row.txn_seq in (-1, one.number)
            return one.running if fits else E.CONCURRENT_TRANSACTIONS
        if one.ending is not None or row.txn_seq not in (-1, one.number + 1):
            return E.CONCURRENT_TRANSACTIONS
        return Cycle(one.number + 1, row.protocol, *one.now)

    def fence(self, one: Id, producer_id: int) -> E:
        """A producer id that was never this one's, or long ago, is another's for all we know."""
        known = [one.now[0], one.before[0] if one.before else -2]
        if one.cycles and one.cycles[-1].decision is not None:
            known.append(one.cycles[-1].producer_id)
        elif len(one.cycles) > 1:
            known.append(one.cycles[-2].producer_id)
        return E.PRODUCER_FENCED if producer_id in known else E.INVALID_PRODUCER_ID_MAPPING

    def keep(self, name: str, cycle: Cycle) -> None:
        one = self.ids[name]
        if one.running is not cycle:
            one.cycles.append(cycle)
            one.is_begun = False

    def add(self, row: AddPartitions) -> E:
        cycle = self.join(row)
        if isinstance(cycle, E):
            return cycle
        keys = [(topic, number) for topic, numbers in row.partitions for number in numbers]
        if any(t not in self.topics or number >= self.partitions[t] for t, number in keys):
            return E.UNKNOWN_TOPIC_OR_PARTITION
        if keys or row.groups:
            self.keep(row.transactional_id, cycle)
        cycle.added |= dict.fromkeys(keys, False)
        cycle.has_group = cycle.has_group or bool(row.groups)
        return E.NONE

    def end(self, row: EndTransaction) -> E:
        one = self.ids.get(row.transactional_id)
        if one is None:
            return E.INVALID_PRODUCER_ID_MAPPING
        named = (row.producer_id, row.epoch)
        is_over = one.running is None and bool(one.cycles) and not one.is_begun
        is_told_again = is_over and one.cycles[-1].decision == row.is_commit
        again = E.NONE if is_told_again else E.INVALID_TXN_STATE
        if row.protocol == 2 and named == one.before and is_over:
            return again
        if named != one.now:
            return self.fence(one, row.producer_id)
        if row.protocol == 1 and row.txn_seq < 0:
            return E.INVALID_REQUEST
        if row.txn_seq not in (-1, one.number):
            return E.CONCURRENT_TRANSACTIONS
        cycle = one.running
        if row.protocol == 1:
            if cycle is None:
                return again
            self.decide(one, cycle, row.is_commit, cycle.epoch)
            return E.NONE
        if one.ending is not None:
            return E.CONCURRENT_TRANSACTIONS
        if cycle is None:
            if row.is_commit:
                return E.INVALID_TXN_STATE
            cycle = Cycle(one.number + 1, 2, *one.now)
            one.cycles.append(cycle)
        self.raise_epoch(one, may_ask_again=True)
        self.decide(one, cycle, row.is_commit, cycle.epoch + 1)
        return E.NONE

    def report(self, row: ReportMarkers) -> E:
        for producer_id, number in row.ended:
            for one in self.ids.values():
                cycle = one.ending
                is_meant = cycle and (cycle.producer_id, cycle.number) == (producer_id, number)
                if cycle and is_meant and (row.topic_id, row.partition) in cycle.added:
                    cycle.added[row.topic_id, row.partition] = True
        return E.NONE

    def expire(self, row: AbortExpired) -> E:
        one = self.ids.get(row.transactional_id)
        if one is None:
            return E.INVALID_PRODUCER_ID_MAPPING
        cycle = one.running
        if cycle is None or (row.producer_id, row.epoch, row.txn_seq) != (*one.now, cycle.number):
            return E.INVALID_TXN_STATE
        self.raise_epoch(one, may_ask_again=True)
        self.decide(one, cycle, False, cycle.epoch + 1)
        return E.NONE

    def forget(self, row: ForgetId) -> E:
        one = self.ids.get(row.transactional_id)
        if one is None:
            return E.NONE
        named = (row.producer_id, row.epoch, row.txn_seq)
        if one.running or one.ending or named != (*one.now, one.number):
            return E.INVALID_TXN_STATE
        del self.ids[row.transactional_id]
        return E.NONE

    def commit(self, command: CommitOffsets) -> E:
        entries = {(o.topic, o.partition): o.offset for o in command.offsets}
        mine = command.transaction
        if mine is None:
            self.offsets |= entries
            for one in self.ids.values():
                for cycle in one.cycles:
                    for at in entries:
                        cycle.pending.pop(at, None)
            return E.NONE
        cycle = self.join(mine)
        if isinstance(cycle, E):
            unlike = {
                E.PRODUCER_FENCED: E.INVALID_PRODUCER_EPOCH,
                E.INVALID_REQUEST: E.INVALID_TXN_STATE,
            }
            return unlike.get(cycle, cycle)
        if mine.protocol == 1 and not cycle.has_group:
            return E.INVALID_TXN_STATE
        self.keep(mine.transactional_id, cycle)
        cycle.has_group = True
        names = [self.topics.get(topic_id) for topic_id in mine.topic_ids]
        kept = [o for o, name in zip(command.offsets, names, strict=True) if o.topic == name]
        cycle.pending |= {(o.topic, o.partition): o.offset for o in kept}
        return E.NONE

    def delete_topic(self, topic_id: TopicId) -> None:
        name = self.topics.pop(topic_id)
        self.offsets = {at: offset for at, offset in self.offsets.items() if at[0] != name}
        for one in self.ids.values():
            for cycle in one.cycles:
                cycle.pending = {at: o for at, o in cycle.pending.items() if at[0] != name}
                for key in [key for key in cycle.added if key[0] == topic_id]:
                    cycle.added[key] = True
