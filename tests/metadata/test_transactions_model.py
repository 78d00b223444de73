"""Rows in any order, made by two submitters from images of any age, with snapshots in between: each
is told what the naive model says, and what was promised of transactions holds after every one."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Final

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.errors import ErrorCode
from raftmq.metadata import apply_transactions
from raftmq.metadata.commands import (
    AbortExpired,
    AddPartitions,
    CommitOffsets,
    CommittedOffset,
    DeleteTopics,
    EndTransaction,
    ForgetId,
    InitProducer,
    OffsetsTransaction,
    ReportMarkers,
    Row,
    TransactionRows,
)
from raftmq.metadata.image import MetadataImage
from raftmq.metadata.results import GroupDone, Rejection, RowDone
from raftmq.metadata.snapshot import decode_image, encode_image
from raftmq.metadata.transactions import (
    Transaction,
    TransactionState,
    transactions_of,
)
from raftmq.types import TopicPartition
from tests.metadata.naive_transactions import Id, Naive
from tests.metadata.transaction_machine import NAMES, A, B, Transactions

EPOCH_LAST: Final = 4
"""So that epochs end while a test lasts."""
TOPICS: Final = (A, B)
SEEDS: Final = st.integers(0, 1 << 32)
KINDS: Final = (
    *("init", "init again"),
    *("add", "add", "add", "commit", "commit"),
    *("end", "end", "end", "end"),
    *("report", "report", "report", "report", "report"),
    *("expire", "forget", "plain", "delete", "restore"),
)


@attrs.frozen
class Move:
    """What somebody does, by what it saw `age` moves ago."""

    kind: str
    age: int
    name: str
    topic: int
    partition: int
    protocol: int
    is_commit: bool
    off: int
    """By so much a producer id, an epoch or a number is wrong, in this order."""


def moves(seed: int) -> list[Move]:
    """Many of them, after both ids have begun."""
    random = Random(seed)
    begun = [Move("init", 0, name, 0, 0, 1, True, 0) for name in ("t", "u")]
    return begun + [
        Move(
            kind=random.choice(KINDS),
            age=random.choice((0, 0, 0, 0, 0, 1, 2, 3, 5)),
            name=random.choice("tttu"),
            topic=random.randrange(2),
            partition=random.choice((0, 0, 0, 0, 1, 2, 3)),
            protocol=random.randrange(1, 3),
            is_commit=random.random() < 0.5,
            off=random.choice((*[0] * 12, 1, 2, 3, 4, 5)),
        )
        for _ in range(random.randrange(20, 120))
    ]


class Race:
    """The product and the naive model, side by side."""

    def __init__(self) -> None:
        self.machine = Transactions()
        self.naive = Naive(dict(NAMES), {A: 3, B: 1}, self.machine.image.next_producer_id)
        self.naive.last_epoch = EPOCH_LAST
        self.seen: list[MetadataImage] = [self.machine.image]
        self.decisions: dict[tuple[int, int], bool] = {}
        self.sequences = {1: 100, 2: 0}
        self.offset = 0

    def do(self, move: Move) -> None:
        """Make the move, and hold what came of it against the model."""
        image = self.seen[max(0, len(self.seen) - 1 - move.age)]
        if move.kind == "restore":
            self.machine.image = decode_image(encode_image(self.machine.image))
        elif move.kind == "delete":
            if move.off and TOPICS[move.topic] in self.naive.topics:
                delete = DeleteTopics(topic_ids=(TOPICS[move.topic],))
                self.machine.apply(delete, submitter=3)
                self.naive.delete_topic(TOPICS[move.topic])
        elif move.kind in ("commit", "plain"):
            self.commit(self.committing(move, image))
        else:
            for row in self.rows(move, image):
                self.row(row, 1 + move.age % 2)
        self.seen.append(self.machine.image)
        self.check()

    def row(self, row: Row, submitter: int) -> None:
        self.sequences[submitter] += 1
        command = TransactionRows(rows=(row,), now_ms=0)
        result = self.machine.apply(
            command, submitter=submitter, sequence=self.sequences[submitter]
        )
        [done] = result.rows
        assert ErrorCode(done.code) is self.naive.row(row), row
        if not isinstance(row, ReportMarkers):
            one = self.naive.ids.get(row.transactional_id)
            told = (done.producer_id, done.epoch, done.txn_seq)
            assert told == ((-1, -1, -1) if one is None else (*one.now, one.number))

    def commit(self, command: CommitOffsets) -> None:
        if command.transaction is None and command.offsets[0].topic not in {
            *self.naive.topics.values()
        }:
            return
        self.sequences[1] += 1
        result = self.machine.apply(command, submitter=1, sequence=self.sequences[1])
        code = result.code if isinstance(result, Rejection) else ErrorCode.NONE
        assert isinstance(result, Rejection | GroupDone)
        assert code is self.naive.commit(command), command

    # ---- what is made by an image ----

    def numbers(self, move: Move, image: MetadataImage) -> tuple[int, int, int]:
        """Producer id, epoch and number as that image has them, or nearly so."""
        known = image.transactions.get(move.name)
        found = [0, 0, 0] if known is None else [known.producer_id, known.epoch, known.txn_seq]
        if move.off in (1, 2, 3):
            found[move.off - 1] = max(0, found[move.off - 1] - 1)
        if move.off == 4:
            found[2] += 1
        if move.off == 5 and known is not None:
            found[:2] = known.last if known.last[0] >= 0 else found[:2]
        return found[0], found[1], found[2]

    def next_number(self, number: int, move: Move, image: MetadataImage) -> int:
        known = image.transactions.get(move.name)
        return number + (1 if known is None or known.state.may_begin else 0)

    def rows(self, move: Move, image: MetadataImage) -> Iterator[Row]:
        producer_id, epoch, number = self.numbers(move, image)
        mine = {"transactional_id": move.name, "producer_id": producer_id, "epoch": epoch}
        unnumbered = move.protocol == 2 and move.is_commit
        key = TOPICS[move.topic], move.partition
        if move.kind == "init":
            yield InitProducer(transactional_id=move.name, timeout_ms=1)
        elif move.kind == "init again":
            yield InitProducer(**mine, timeout_ms=1)
        elif move.kind == "add":
            number = -1 if unnumbered else self.next_number(number, move, image)
            yield AddPartitions(
                **mine,
                txn_seq=number,
                protocol=move.protocol,
                partitions=((key[0], (key[1],)),),
                groups=("g",) if move.is_commit else (),
            )
        elif move.kind == "end":
            number = -1 if move.protocol == 2 and move.topic else number
            yield EndTransaction(
                **mine, txn_seq=number, protocol=move.protocol, is_commit=move.is_commit
            )
        elif move.kind == "expire":
            yield AbortExpired(**mine, txn_seq=number)
        elif move.kind == "forget":
            if move.off:
                return
            yield ForgetId(**mine, txn_seq=number, changed_at_ms=0)
        else:
            yield from self.reports(key, number, move, image)

    def reports(
        self, key: tuple[object, int], number: int, move: Move, image: MetadataImage
    ) -> Iterator[Row]:
        """What the leader of a partition says, by the markers that it sees owed."""
        topic = image.topic_by_id(TOPICS[move.topic])
        if topic is None or move.partition >= len(topic.partitions):
            return
        owed = image.transactions.stakes(topic.topic_id, move.partition)
        if move.off:
            ended = [(max(0, one.records_producer_id), one.txn_seq + move.off - 2) for one in owed]
        else:
            ended = [(one.marker[0], one.txn_seq) for one in owed if one.state.is_prepared]
        yield ReportMarkers(
            topic_id=topic.topic_id,
            partition=move.partition,
            creation_epoch=topic.partitions[0].creation_epoch,
            ended=tuple(ended),
        )

    def committing(self, move: Move, image: MetadataImage) -> CommitOffsets:
        producer_id, epoch, number = self.numbers(move, image)
        self.offset += 1
        unnumbered = move.protocol == 2 and move.is_commit
        topic_id = TOPICS[move.topic]
        mine = OffsetsTransaction(
            transactional_id=move.name,
            producer_id=producer_id,
            epoch=epoch,
            txn_seq=-1 if unnumbered else self.next_number(number, move, image),
            protocol=move.protocol,
            topic_ids=(topic_id,),
        )
        return CommitOffsets(
            group="g",
            coordinator_epoch=self.machine.group_epoch,
            offsets=(CommittedOffset(NAMES[topic_id], 0, self.offset),),
            transaction=None if move.kind == "plain" else mine,
        )

    # ---- what always holds ----

    def check(self) -> None:
        image = self.machine.image
        transactions = image.transactions
        ids = (transactions.ids[name] for name in transactions.names())
        assert transactions == transactions_of(ids, transactions.last_decision)
        owed = {known.decision: known for known in transactions.ids.values() if known.decision}
        for after in (0, transactions.last_decision // 2, transactions.last_decision - 1):
            later = [owed[number] for number in sorted(owed) if number > after]
            assert [*transactions.decided_after(after)] == later
        assert sorted(transactions.ids) == sorted(self.naive.ids)
        assert image.next_producer_id == self.naive.next_producer_id
        for name, one in self.naive.ids.items():
            self.check_id(transactions.ids[name], one)
        group = image.groups.get("g")
        assert group is not None
        visible = {(at.topic, at.partition): o.offset for at, o in group.offsets.items()}
        assert visible == self.naive.offsets, "what is visible was committed"
        for name in NAMES.values():
            is_pending = any(
                (name, 0) in cycle.pending
                for one in self.naive.ids.values()
                for cycle in one.cycles
            )
            assert group.is_pending(TopicPartition(name, 0)) == is_pending

    def check_id(self, known: Transaction, one: Id) -> None:
        assert known.credentials == one.now
        assert known.last == (one.before or (-1, -1))
        assert known.txn_seq == one.number
        assert len({*one.given}) == len(one.given), "no credentials are given twice"
        state = known.state
        if state is TransactionState.ONGOING:
            assert one.running is not None
        if not one.cycles:
            assert state is TransactionState.EMPTY
            return
        cycle = one.cycles[-1]
        owed = {key for key, is_settled in cycle.added.items() if not is_settled}
        assert {*known.partitions} == owed
        assert state.is_prepared == (one.ending is not None) == bool(known.decision)
        if state.is_prepared:
            assert owed, "complete after the last report, and not before it"
        if cycle.decision is None:
            assert state is TransactionState.ONGOING
            return
        assert self.decisions.setdefault((cycle.producer_id, cycle.number), cycle.decision) == (
            cycle.decision
        )
        assert known.marker == (cycle.producer_id, cycle.marker_epoch)
        if state is not TransactionState.EMPTY:
            assert state.is_commit == cycle.decision, "a decision is never changed"


@given(seed=SEEDS)
def test_every_row_does_what_the_naive_model_says(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(apply_transactions, "EPOCH_LAST", EPOCH_LAST)
        race = Race()
        for move in moves(seed):
            race.do(move)


@given(seed=SEEDS)
def test_rows_do_the_same_together_as_one_by_one(seed: int) -> None:
    random = Random(seed)
    one_by_one, together = Transactions(), Transactions()
    race = Race()
    rows: list[Row] = []
    for move in moves(seed):
        more = [*race.rows(move, one_by_one.image)]
        rows += more
        for row in more:
            one_by_one.row(row)
    told: list[RowDone] = []
    while len(told) < len(rows):
        taken = rows[len(told) : len(told) + random.randrange(1, 8)]
        told += together.apply(TransactionRows(rows=tuple(taken))).rows
    assert together.image.transactions == one_by_one.image.transactions
    alone = Transactions()
    assert told == [alone.row(row) for row in rows]
