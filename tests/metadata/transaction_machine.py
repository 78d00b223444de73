"""A machine with two topics, and short words for what happens to transactions in it."""

from __future__ import annotations

from typing import Final

import msgspec
from attrs import evolve

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import (
    UNDATED,
    AbortExpired,
    AddPartitions,
    ClaimGroup,
    CommitOffsets,
    CommittedOffset,
    CreateTopics,
    EndTransaction,
    InitProducer,
    OffsetsTransaction,
    ReportMarkers,
    Row,
    TransactionRows,
)
from raftmq.metadata.results import RowDone
from raftmq.metadata.transactions import Transaction, transactions_of
from raftmq.types import TopicId, TopicPartition
from tests.metadata.metadata_commands import Machine, creation, node, raised, topic_id

A, B = topic_id(1), topic_id(2)
NAMES: Final = {A: "a", B: "b"}
ID = "tx"


class Transactions(Machine):
    """Topics a (3 partitions) and b (1), group g, and whatever rows make of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_all(1)
        self.image = raised(self.image)
        self.apply(
            CreateTopics(topics=(creation("a", 1, (1,), (1,), (1,)), creation("b", 2, (1,))))
        )
        broker_epoch = self.image.brokers[node(1)].epoch
        claim = ClaimGroup(group="g", node_id=node(1), broker_epoch=broker_epoch)
        self.group_epoch = self.apply(claim).coordinator_epoch

    def row(self, row: Row, now_ms: int = UNDATED) -> RowDone:
        """Apply one row by itself."""
        before = self.image.structure_version
        [done] = self.apply(TransactionRows(rows=(row,), now_ms=now_ms)).rows
        assert self.image.structure_version == before
        assert isinstance(done, RowDone)
        return done

    def code(self, row: Row, now_ms: int = UNDATED) -> ErrorCode:
        """What became of one row; a failure has changed nothing."""
        before = self.image.transactions
        code = ErrorCode(self.row(row, now_ms).code)
        if code and not isinstance(row, InitProducer):
            assert self.image.transactions == before
        return code

    def known(self, name: str = ID) -> Transaction:
        known = self.image.transactions.get(name)
        assert known is not None
        return known

    def jump_to(self, epoch: int) -> None:
        """Let the id have come to that epoch."""
        moved = msgspec.structs.replace(self.known(), epoch=epoch)
        transactions = self.image.transactions
        ids = (*transactions.ids.delete(ID).values(), moved)
        self.image = evolve(
            self.image, transactions=transactions_of(ids, transactions.last_decision)
        )

    # ---- rows with the credentials and numbers of now ----

    def init(self, name: str = ID, named: tuple[int, int] = (-1, -1)) -> RowDone:
        return self.row(
            InitProducer(
                transactional_id=name, timeout_ms=60_000, producer_id=named[0], epoch=named[1]
            )
        )

    def adding(self, *at: tuple[TopicId, int], protocol: int = 1, **fields: object) -> Row:
        known = self.known()
        row = AddPartitions(
            transactional_id=ID,
            producer_id=known.producer_id,
            epoch=known.epoch,
            txn_seq=known.txn_seq + (1 if known.state.may_begin else 0),
            protocol=protocol,
            partitions=tuple((one, (number,)) for one, number in at),
        )
        return msgspec.structs.replace(row, **fields)

    def add(self, *at: tuple[TopicId, int], protocol: int = 1, **fields: object) -> None:
        assert self.code(self.adding(*at, protocol=protocol, **fields)) is ErrorCode.NONE

    def ending(self, is_commit: bool, protocol: int = 1, **fields: object) -> Row:
        known = self.known()
        row = EndTransaction(
            transactional_id=ID,
            producer_id=known.producer_id,
            epoch=known.epoch,
            txn_seq=known.txn_seq,
            is_commit=is_commit,
            protocol=protocol,
        )
        return msgspec.structs.replace(row, **fields)

    def end(self, is_commit: bool, protocol: int = 1, **fields: object) -> RowDone:
        done = self.row(self.ending(is_commit, protocol, **fields))
        assert not done.code
        return done

    def expiring(self) -> Row:
        known = self.known()
        return AbortExpired(
            transactional_id=ID,
            producer_id=known.producer_id,
            epoch=known.epoch,
            txn_seq=known.txn_seq,
        )

    def report(
        self,
        topic: TopicId,
        number: int,
        ended: tuple[int, int] | None = None,
        now_ms: int = UNDATED,
    ) -> None:
        known = self.known()
        one = self.image.topic_by_id(topic)
        assert one is not None
        epoch = one.partitions[number].creation_epoch
        ended = ended or (known.marker[0], known.txn_seq)
        row = ReportMarkers(topic_id=topic, partition=number, creation_epoch=epoch, ended=(ended,))
        assert self.code(row, now_ms) is ErrorCode.NONE

    def report_all(self) -> None:
        for topic, number in sorted(self.known().partitions, key=str):
            self.report(topic, number)

    # ---- offsets ----

    def committing(
        self, offset: int, topic: TopicId = A, protocol: int = 1, **fields: object
    ) -> CommitOffsets:
        known = self.known()
        mine = OffsetsTransaction(
            transactional_id=ID,
            producer_id=known.producer_id,
            epoch=known.epoch,
            txn_seq=known.txn_seq + (1 if known.state.may_begin else 0),
            protocol=protocol,
            topic_ids=(topic,),
        )
        return CommitOffsets(
            group="g",
            coordinator_epoch=self.group_epoch,
            offsets=(CommittedOffset(NAMES[topic], 0, offset),),
            transaction=msgspec.structs.replace(mine, **fields),
        )

    def plainly(self, offset: int, topic: TopicId = A) -> CommitOffsets:
        return CommitOffsets(
            group="g",
            coordinator_epoch=self.group_epoch,
            offsets=(CommittedOffset(NAMES[topic], 0, offset),),
        )

    def offset(self, topic: str = "a") -> int | None:
        """The visible one of group g."""
        group = self.image.groups.get("g")
        saved = None if group is None else group.offsets.get(TopicPartition(topic, 0))
        return None if saved is None else saved.offset

    def is_pending(self, topic: str = "a") -> bool:
        group = self.image.groups.get("g")
        return group is not None and group.is_pending(TopicPartition(topic, 0))


def many_ids(count: int, epoch: int = 1) -> list[Transaction]:
    """Ids that did nothing yet."""
    return [
        Transaction(transactional_id=f"id-{n}", producer_id=n, epoch=epoch, timeout_ms=1_000)
        for n in range(count)
    ]
