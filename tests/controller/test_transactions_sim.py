"""Transactions in the metadata group under crashes, partitions and changes of controller: what was
told is what all nodes have, a decision never changes, and every one of them is finished at last."""

from __future__ import annotations

from typing import Any, Final

import pytest

from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import FeatureRequest, UpdateFeaturesCall
from raftmq.metadata.commands import (
    AbortExpired,
    AddPartitions,
    EndTransaction,
    InitProducer,
    ReportMarkers,
    Row,
    TransactionRows,
)
from raftmq.metadata.features import SUPPORTED
from raftmq.metadata.image import LEVEL_OF_TRANSACTIONS, RAFTMQ_LEVEL, MetadataImage
from raftmq.metadata.results import RowsDone
from raftmq.metadata.transactions import Transaction, TransactionState
from raftmq.promise import Promise
from tests.controller.control_world import ControlWorld, WorldNode
from tests.controller.metadata_cluster import CLIENT
from tests.controller.test_metadata_sim import FEW, heal, nemesis

IDS: Final = ("a", "b", "c")
NEWEST: Final = SUPPORTED[RAFTMQ_LEVEL][1]

Name = tuple[int, int]
"""Of a transaction, for ever: the producer id of its records, and its number."""


def decision_of(one: Transaction) -> tuple[Name, bool] | None:
    """What was decided of the running or last transaction of an id, as far as the id shows it."""
    if one.state in (TransactionState.EMPTY, TransactionState.ONGOING):
        return None
    return (one.marker[0], one.txn_seq), one.state.is_commit


class Producers:
    """They live on every node, name what its image shows them, and believe what they are told."""

    def __init__(self, world: ControlWorld) -> None:
        self.world = world
        self.decisions: dict[Name, bool] = {}
        self.told: dict[Name, bool] = {}
        self.given: dict[tuple[int, int], str] = {}
        for node in world.nodes.values():
            self.act(node)

    def act(self, node: WorldNode) -> None:
        """Do something on a node, and again a little later."""
        if self.world.is_over:
            return
        self.world.schedule(self.world.random.uniform(5, 40), lambda: self.act(node))
        if not node.is_up or node.engine.image.level < LEVEL_OF_TRANSACTIONS:
            return
        image = node.engine.image
        self.look(image)
        rows = tuple(row for row in (self.draw(image) for _ in range(2)) if row is not None)
        if rows:
            node.engine.propose(TransactionRows(rows=rows, now_ms=0)).when_done(
                lambda promise: self.answered(rows, promise, node.engine.image)
            )

    def look(self, image: MetadataImage) -> None:
        """No image of any node ever shows another decision."""
        for name in image.transactions.names():
            found = decision_of(image.transactions.ids[name])
            if found is not None:
                assert self.decisions.setdefault(found[0], found[1]) == found[1]

    def draw(self, image: MetadataImage) -> Row | None:
        random = self.world.random
        name = random.choice(IDS)
        known = image.transactions.get(name)
        draw = random.random()
        if known is None or draw < 0.06:
            return InitProducer(transactional_id=name, timeout_ms=1)
        mine: dict[str, Any] = {
            "transactional_id": name,
            "producer_id": known.producer_id,
            "epoch": known.epoch,
        }
        protocol = random.choice((1, 2))
        topics = image.topics_by_id()
        if draw < 0.4 and topics:
            at = ((random.choice(topics).topic_id, (random.randrange(2),)),)
            number = known.txn_seq + (1 if known.state.may_begin else 0)
            return AddPartitions(**mine, txn_seq=number, protocol=protocol, partitions=at)
        if draw < 0.6:
            is_commit = random.random() < 0.7
            return EndTransaction(
                **mine, txn_seq=known.txn_seq, protocol=protocol, is_commit=is_commit
            )
        if draw < 0.65:
            return AbortExpired(**mine, txn_seq=known.txn_seq)
        return self.report(image)

    def report(self, image: MetadataImage) -> Row | None:
        owed = [*image.transactions.decided_after(0)]
        if not owed:
            return None
        one = self.world.random.choice(owed)
        (topic_id, partition), epoch = min(one.partitions.items(), key=str)
        return ReportMarkers(
            topic_id=topic_id,
            partition=partition,
            creation_epoch=epoch,
            ended=((one.marker[0], one.txn_seq),),
        )

    def answered(self, rows: tuple[Row, ...], promise: Promise[Any], image: MetadataImage) -> None:
        if promise.error is not None:
            return
        self.look(image)
        result = promise.result()
        assert isinstance(result, RowsDone)
        for row, done in zip(rows, result.rows, strict=True):
            if done.code != ErrorCode.NONE:
                continue
            if isinstance(row, InitProducer):
                given = (done.producer_id, done.epoch)
                assert given not in self.given, "no credentials are given twice"
                self.given[given] = row.transactional_id
            elif isinstance(row, EndTransaction | AbortExpired):
                is_commit = isinstance(row, EndTransaction) and row.is_commit
                decided = self.told.setdefault((row.producer_id, done.txn_seq), is_commit)
                assert decided == is_commit, "who was told of a decision was told the same"

    def finish(self) -> None:
        """Send every report that is owed; an id whose transaction runs is aborted before."""
        for node in self.world.nodes.values():
            transactions = node.engine.image.transactions
            rows: list[Row] = [
                AbortExpired(
                    transactional_id=name,
                    producer_id=one.producer_id,
                    epoch=one.epoch,
                    txn_seq=one.txn_seq,
                )
                for name, one in sorted(transactions.ids.items())
                if one.state is TransactionState.ONGOING
            ]
            for one in transactions.decided_after(0):
                rows += [
                    ReportMarkers(
                        topic_id=key[0],
                        partition=key[1],
                        creation_epoch=one.partitions[key],
                        ended=((one.marker[0], one.txn_seq),),
                    )
                    for key in sorted(one.partitions, key=str)
                ]
            node.engine.propose(TransactionRows(rows=tuple(rows)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", FEW)
def test_transactions_under_faults(seed: int) -> None:
    world = ControlWorld(4_000 + seed)
    world.run(1_500)
    update = (FeatureRequest(RAFTMQ_LEVEL, NEWEST),)
    world.nodes[1].control.call(UpdateFeaturesCall(updates=update, timeout_ms=1_000), CLIENT)
    world.run(500)
    assert world.nodes[1].engine.image.level == NEWEST
    for node in world.nodes.values():
        world.client(node)  # which makes topics, and deletes them
    producers = Producers(world)
    for _ in range(12):
        nemesis(world, wipes=False)
        world.run(world.random.uniform(200, 900))
    heal(world)
    world.run(3_000)
    world.is_over = True
    for _ in range(3):
        world.run(2_500)
        producers.finish()
    world.run(2_500)
    world.check()
    assert world.is_converged()
    last = world.nodes[1].engine.image.transactions
    producers.look(world.nodes[1].engine.image)
    assert all(one.state.may_begin for one in last.ids.values()), "every one was finished"
    assert not last.decided
    assert not last.stakes_at
    assert len(producers.told) > 50
    assert sorted({*producers.told.values()}) == [False, True]
    for name, is_commit in producers.told.items():
        assert producers.decisions.get(name, is_commit) == is_commit, "as all were told"
    seen = [name for name in producers.told if name in producers.decisions]
    assert len(seen) > len(producers.told) / 2
