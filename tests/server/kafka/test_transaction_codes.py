"""Error codes of transactions, as each version of a request knows them, and for which transaction
offsets are that come with version 4 or older, where the epoch does not tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raftmq.errors import ErrorCode as E
from raftmq.metadata.commands import CommitOffsets, CommittedOffset, OffsetsTransaction
from raftmq.metadata.results import Rejection
from raftmq.metadata.transactions import TransactionState
from raftmq.promise import Promise
from raftmq.protocol import ApiKey, Struct
from raftmq.server.kafka.handlers.transactions import commit_code, fenced_code, txn_offset_commit
from raftmq.server.kafka.work import Work
from tests.metadata.transaction_machine import ID, A, B
from tests.server.kafka.world import context_of
from tests.transactions.world import World


@pytest.mark.parametrize(
    ("code", "version", "expected"),
    [
        (E.NONE, 0, E.NONE),
        (E.PRODUCER_FENCED, 5, E.INVALID_PRODUCER_EPOCH),
        (E.INVALID_PRODUCER_EPOCH, 0, E.INVALID_PRODUCER_EPOCH),
        (E.INVALID_TXN_STATE, 3, E.INVALID_TXN_STATE),
        (E.INVALID_TXN_STATE, 4, E.TRANSACTION_ABORTABLE),
        (E.REBALANCE_IN_PROGRESS, 1, E.COORDINATOR_NOT_AVAILABLE),
        (E.REBALANCE_IN_PROGRESS, 2, E.COORDINATOR_LOAD_IN_PROGRESS),
        (E.CONCURRENT_TRANSACTIONS, 1, E.COORDINATOR_NOT_AVAILABLE),
        (E.CONCURRENT_TRANSACTIONS, 5, E.COORDINATOR_LOAD_IN_PROGRESS),
        (E.COORDINATOR_LOAD_IN_PROGRESS, 1, E.COORDINATOR_NOT_AVAILABLE),
        (E.NOT_COORDINATOR, 5, E.NOT_COORDINATOR),
    ],
)
def test_codes_of_txn_offset_commit(code: E, version: int, expected: E) -> None:
    assert commit_code(code, version) is expected


def test_a_fenced_producer_as_older_versions_know_it() -> None:
    assert fenced_code(E.PRODUCER_FENCED, 1) is E.INVALID_PRODUCER_EPOCH
    assert fenced_code(E.PRODUCER_FENCED, 2) is E.PRODUCER_FENCED
    assert fenced_code(E.INVALID_TXN_STATE, 1) is E.INVALID_TXN_STATE


class OffsetsOf:
    """A node that coordinates group g, in whose log its commits are at once."""

    def __init__(self) -> None:
        self.world = World()
        self.machine = self.world.machine
        self.machine.init()
        self.world.engine.is_prompt = False
        self.broker: Any = SimpleNamespace(
            transactions=self.world.coordinator,
            coordinator=self,
            views=SimpleNamespace(find=lambda *_: None),
        )

    def commit(
        self,
        group: str,
        _generation: int,
        _member: str,
        _instance: str | None,
        offsets: list[CommittedOffset],
        transaction: OffsetsTransaction,
    ) -> Promise[tuple[E, ...]]:
        command = CommitOffsets(
            group=group,
            coordinator_epoch=self.machine.group_epoch,
            offsets=tuple(offsets),
            transaction=transaction,
        )
        result = self.machine.apply(command)
        is_refused = isinstance(result, Rejection)
        return Promise.resolved((result.code if is_refused else E.NONE,))

    def comes(self, offset: int) -> Work[Struct]:
        """A request of the producer that comes now, and waits for what it must wait for."""
        self.broker.image = self.world.engine.image
        known = self.machine.known()
        partition = Struct(
            partition_index=0,
            committed_offset=offset,
            committed_leader_epoch=-1,
            committed_metadata="",
        )
        request = Struct(
            transactional_id=ID,
            group_id="g",
            producer_id=known.producer_id,
            producer_epoch=known.epoch,
            generation_id=-1,
            member_id="",
            group_instance_id=None,
            topics=[Struct(name="a", partitions=[partition])],
        )
        work = txn_offset_commit(self.broker, context_of(ApiKey.TXN_OFFSET_COMMIT, 3), request)
        assert work.send(None) is not None, "it waits for an image as new as itself"
        return work

    def told(self, work: Work[Struct]) -> E:
        """What it is answered once the node has caught up."""
        self.world.engine.keep_barriers()
        try:
            while True:
                work.send(None)
        except StopIteration as done:
            return E(done.value.topics[0].partitions[0].error_code)


def test_offsets_wait_until_their_node_knows_of_their_transaction() -> None:
    node = OffsetsOf()
    node.world.engine.show()
    node.machine.add((A, 0), groups=("g",))
    assert node.told(node.comes(7)) is E.NONE
    assert node.machine.is_pending()
    node.machine.end(True)
    assert node.machine.offset() == 7


def test_offsets_that_waited_for_their_node_join_no_later_transaction() -> None:
    """The node was cut off: it has seen the transaction, and not that the group is part of it. The
    producer gives the request up, aborts, and commits other offsets in the next transaction."""
    node = OffsetsOf()
    node.machine.add((A, 0))
    node.world.engine.show()
    late = node.comes(7)
    node.machine.add(groups=("g",))
    node.machine.end(False)
    node.machine.report_all()
    node.machine.add((B, 0), groups=("g",))
    assert node.told(late) is E.COORDINATOR_LOAD_IN_PROGRESS, "who still waits comes again"
    assert not node.machine.is_pending()
    node.machine.end(True)
    assert node.machine.offset() is None


def test_offsets_outside_a_transaction_are_refused() -> None:
    node = OffsetsOf()
    node.machine.add((A, 0))
    node.machine.end(True)
    node.machine.report_all()
    node.world.engine.show()
    assert node.told(node.comes(7)) is E.INVALID_TXN_STATE
    assert node.machine.known().state is TransactionState.COMPLETE_COMMIT
    assert node.machine.offset() is None
