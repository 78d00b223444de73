"""What each row makes of transactions: the main path of both protocols, then tables of what else
may come, with the code that it is told."""

from __future__ import annotations

import pytest

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import GroupDone
from raftmq.metadata.transactions import Standing, TransactionState
from tests.metadata.transaction_machine import ID, A, B, Transactions

S = TransactionState


@pytest.mark.parametrize("is_commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("protocol", [1, 2])
def test_a_transaction_from_begin_to_end(protocol: int, is_commit: bool) -> None:
    machine = Transactions()
    first = machine.init()
    assert (first.code, first.epoch, first.txn_seq, first.state) == (0, 0, 0, S.EMPTY)
    machine.add((A, 0), (B, 0), protocol=protocol, groups=("g",))
    running = machine.known()
    assert (running.state, running.txn_seq, running.groups) == (S.ONGOING, 1, ("g",))
    assert isinstance(machine.apply(machine.committing(7, protocol=protocol)), GroupDone)
    assert (machine.offset(), machine.is_pending()) == (None, True)

    done = machine.end(is_commit, protocol)
    raised = protocol - 1
    assert (done.producer_id, done.epoch) == (first.producer_id, raised)
    decided = machine.known()
    assert decided.state is (S.PREPARE_COMMIT if is_commit else S.PREPARE_ABORT)
    assert decided.marker == (first.producer_id, raised), "under protocol 2 above its records"
    assert (machine.offset(), machine.is_pending()) == (7 if is_commit else None, False)
    assert [*machine.image.transactions.decided_after(0)] == [decided]
    assert [*machine.image.transactions.decided_after(decided.decision)] == []

    machine.report(A, 0)
    assert machine.known().state.is_prepared
    assert machine.image.transactions.stakes(A, 0) == []
    assert machine.image.transactions.stakes(B, 0) == [machine.known()]
    machine.report(B, 0)
    complete = machine.known()
    assert complete.state is (S.COMPLETE_COMMIT if is_commit else S.COMPLETE_ABORT)
    transactions = machine.image.transactions
    assert not transactions.stakes_at
    assert not transactions.decided

    machine.add((A, 1), protocol=protocol)
    assert (machine.known().txn_seq, machine.known().state) == (2, S.ONGOING)


def test_the_next_transaction_waits_for_all_reports() -> None:
    machine = Transactions()
    machine.init()
    machine.add((A, 0), (A, 1))
    machine.end(True)
    following = machine.adding((A, 2), txn_seq=2)
    machine.report(A, 0)
    assert machine.code(following) is ErrorCode.CONCURRENT_TRANSACTIONS
    machine.report(A, 1)
    assert machine.code(following) is ErrorCode.NONE


def test_what_a_leader_is_told_of_a_batch() -> None:
    machine = Transactions()
    number = machine.init().producer_id

    def standing(epoch: int, partition: int = 0) -> Standing:
        return machine.image.transactions.standing(number, epoch, A, partition)

    assert machine.image.transactions.standing(99, 0, A, 0) is Standing.UNKNOWN
    assert (standing(0), standing(1)) == (Standing.NOT_ADDED, Standing.UNKNOWN)
    machine.add((A, 0))
    assert (standing(0), standing(0, 1)) == (Standing.ADDED, Standing.NOT_ADDED)
    machine.end(True)
    assert standing(0) is Standing.ENDING
    machine.report_all()
    assert standing(0) is Standing.NOT_ADDED
    machine.init()
    assert standing(0) is Standing.FENCED


def test_names_of_states_are_those_of_kafka() -> None:
    assert [state.label for state in S] == [
        "Empty",
        "Ongoing",
        "PrepareCommit",
        "PrepareAbort",
        "CompleteCommit",
        "CompleteAbort",
    ]


def test_an_id_is_found_by_name_and_producer() -> None:
    machine = Transactions()
    done = machine.init()
    transactions = machine.image.transactions
    assert transactions.names() == [ID]
    assert transactions.of_producer(done.producer_id) == transactions.get(ID) == machine.known()
    assert transactions.of_producer(5) is None
    assert transactions.get("other") is None
