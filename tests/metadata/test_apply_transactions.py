"""What each row makes of transactions: the main path of both protocols, then tables of what else
may come, with the code that it is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.apply_transactions import PRODUCER_ID_END, apply_rows
from raftmq.metadata.commands import (
    UNDATED,
    CommitMany,
    CreateTopics,
    DeleteGroup,
    DeleteOffsets,
    DeleteTopics,
    ExpiredOffset,
    ExpireOffsets,
    ForgetId,
    Generation,
    GroupMember,
    InitProducer,
    ReportMarkers,
    TransactionRows,
)
from raftmq.metadata.results import CommitsDone, GroupDone, Rejection
from raftmq.metadata.transactions import EPOCH_LAST, Standing, TransactionState
from tests.metadata.metadata_commands import creation, topic_id
from tests.metadata.transaction_machine import ID, A, B, Transactions

C = topic_id(9)
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


# ---- InitProducer ----


def test_a_fresh_instance_raises_the_epoch_each_time() -> None:
    machine = Transactions()
    number = machine.init().producer_id
    assert [machine.init().epoch for _ in range(3)] == [1, 2, 3]
    assert machine.known().credentials == (number, 3)
    assert machine.init("other").producer_id == number + 1
    assert machine.image.next_producer_id == number + 2


def test_who_names_its_credentials_gets_the_same_answer_again() -> None:
    """KIP-360, and only for the last credentials."""
    machine = Transactions()
    number = machine.init().producer_id
    first = machine.init(named=(number, 0))
    assert (first.code, first.epoch) == (0, 1)
    assert machine.init(named=(number, 0)) == first
    assert machine.init(named=(number, 1)).epoch == 2
    assert machine.init(named=(number, 0)).code == ErrorCode.PRODUCER_FENCED
    machine.init()
    assert machine.init(named=(number, 2)).code == ErrorCode.PRODUCER_FENCED, "somebody else began"
    assert machine.init(named=(number, 3)).epoch == 4


@pytest.mark.parametrize("named", [(7, 0), (0, 5), (0, -1)])
def test_other_credentials_are_fenced(named: tuple[int, int]) -> None:
    machine = Transactions()
    machine.init()
    before = machine.image.transactions
    assert machine.init(named=named).code == ErrorCode.PRODUCER_FENCED
    assert machine.image.transactions == before


def test_of_an_unknown_id_credentials_count_for_nothing() -> None:
    done = Transactions().init(named=(7, 3))
    assert (done.code, done.epoch) == (0, 0)


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_new_instance_aborts_what_runs_and_waits(protocol: int) -> None:
    machine = Transactions()
    number = machine.init().producer_id
    machine.add((A, 0), protocol=protocol, groups=("g",))
    machine.apply(machine.committing(7, protocol=protocol))
    for _ in range(2):
        assert machine.init().code == ErrorCode.CONCURRENT_TRANSACTIONS
        known = machine.known()
        assert (known.state, known.credentials) == (S.PREPARE_ABORT, (number, 1))
        assert known.marker == (number, 1)
    assert (machine.offset(), machine.is_pending()) == (None, False)
    late = machine.ending(True, protocol, producer_id=number, epoch=0)
    assert machine.code(late) is ErrorCode.PRODUCER_FENCED, "nor does it get an answer again"
    machine.report_all()
    assert machine.init().epoch == 2, "1 was given to nobody"


def test_who_names_its_credentials_aborts_its_transaction_and_goes_on() -> None:
    machine = Transactions()
    number = machine.init().producer_id
    machine.add((A, 0))
    before = machine.image.transactions
    assert machine.init(named=(number, 5)).code == ErrorCode.PRODUCER_FENCED
    assert machine.image.transactions == before, "nobody else's word ends it"
    assert machine.init(named=(number, 0)).code == ErrorCode.CONCURRENT_TRANSACTIONS
    machine.report_all()
    for _ in range(2):
        done = machine.init(named=(number, 0))
        assert (done.code, done.epoch, done.state) == (0, 1, S.EMPTY)


def test_a_transaction_that_ends_keeps_the_next_instance_waiting() -> None:
    machine = Transactions()
    number = machine.init().producer_id
    machine.add((A, 0))
    machine.end(True)
    assert machine.init().code == ErrorCode.CONCURRENT_TRANSACTIONS
    assert machine.known().state is S.PREPARE_COMMIT
    machine.report_all()
    assert machine.init().epoch == 1
    assert machine.code(machine.ending(True)) is ErrorCode.INVALID_TXN_STATE, "nothing has begun"
    assert machine.known().credentials == (number, 1)


@pytest.mark.parametrize("is_named", [False, True])
def test_after_the_last_epoch_comes_another_producer_id(is_named: bool) -> None:
    machine = Transactions()
    number = machine.init().producer_id
    machine.jump_to(EPOCH_LAST - 1)
    assert machine.init().epoch == EPOCH_LAST
    named = (number, EPOCH_LAST) if is_named else (-1, -1)
    done = machine.init(named=named)
    assert (done.code, done.producer_id, done.epoch) == (0, number + 1, 0)
    transactions = machine.image.transactions
    assert transactions.of_producer(number) is None
    assert transactions.of_producer(number + 1) == machine.known()
    if is_named:
        assert machine.init(named=named) == done
    stale = machine.adding((A, 0), producer_id=number, epoch=EPOCH_LAST)
    expected = ErrorCode.PRODUCER_FENCED if is_named else ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert machine.code(stale) is expected


def test_producer_ids_that_are_used_up() -> None:
    machine = Transactions()
    machine.init()
    machine.jump_to(EPOCH_LAST)
    machine.add((A, 0), protocol=2)
    machine.image = evolve(machine.image, next_producer_id=PRODUCER_ID_END)
    before = machine.image.transactions
    for done in (machine.init("other"), machine.init()):
        assert done.code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert machine.code(machine.expiring()) is ErrorCode.UNKNOWN_SERVER_ERROR
    assert machine.code(machine.ending(True, 2)) is ErrorCode.UNKNOWN_SERVER_ERROR
    assert machine.image.transactions == before
    machine.end(True)
    machine.report_all()
    assert machine.init().code == ErrorCode.UNKNOWN_SERVER_ERROR


# ---- AddPartitions ----


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"transactional_id": "other"}, ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        ({"producer_id": 9}, ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        ({"epoch": 0}, ErrorCode.PRODUCER_FENCED),
        ({"epoch": 2}, ErrorCode.PRODUCER_FENCED),
        ({"txn_seq": -1}, ErrorCode.INVALID_REQUEST),
        ({"txn_seq": 2}, ErrorCode.CONCURRENT_TRANSACTIONS),
        ({"txn_seq": 0}, ErrorCode.CONCURRENT_TRANSACTIONS),
        ({"partitions": ((A, (0, 3)),)}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ({"partitions": ((A, (0,)), (A, (-1,)))}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ({"partitions": ((A, (0,)), (C, (0,)))}, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        ({"partitions": (), "groups": ()}, ErrorCode.NONE),
    ],
)
@pytest.mark.parametrize("begun", [False, True], ids=["first", "running"])
def test_what_may_not_be_added(fields: dict[str, Any], code: ErrorCode, begun: bool) -> None:
    machine = Transactions()
    machine.init()
    machine.init()
    if begun:
        machine.add((B, 0))
    before = machine.image.transactions
    assert machine.code(machine.adding((A, 0), **fields)) is code
    assert machine.image.transactions == before, "all or nothing"


def test_partitions_are_added_again_and_again() -> None:
    machine = Transactions()
    machine.init()
    machine.add((A, 0), (A, 0))
    row = machine.adding((A, 0))
    before = machine.image.transactions
    assert machine.code(row) is ErrorCode.NONE
    assert machine.image.transactions == before
    machine.add((A, 2), groups=("g", "h", "g"))
    machine.add(groups=("h", "i"))
    known = machine.known()
    assert (sorted(number for _, number in known.partitions), known.txn_seq) == ([0, 2], 1)
    assert known.groups == ("g", "h", "i")
    [topic] = [t for t in machine.image.topics_by_id() if t.topic_id == A]
    assert {*known.partitions.values()} == {topic.partitions[0].creation_epoch}


def test_a_late_addition_begins_no_other_transaction() -> None:
    """Under protocol 1 the credentials stay the same, so only the number tells."""
    machine = Transactions()
    machine.init()
    machine.add((A, 0))
    late = machine.adding((A, 1))
    machine.end(True)
    machine.report_all()
    assert machine.code(late) is ErrorCode.CONCURRENT_TRANSACTIONS
    assert machine.known().state is S.COMPLETE_COMMIT
    machine.add((B, 0))
    assert machine.code(late) is ErrorCode.CONCURRENT_TRANSACTIONS
    late_for_both = machine.adding((A, 1), txn_seq=2)
    assert machine.code(late_for_both) is ErrorCode.NONE, "two brokers may begin the same one"


# ---- EndTransaction ----


@pytest.mark.parametrize("is_commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("complete", [False, True], ids=["prepared", "complete"])
@pytest.mark.parametrize("protocol", [1, 2])
def test_an_end_is_told_again(protocol: int, complete: bool, is_commit: bool) -> None:
    machine = Transactions()
    machine.init()
    machine.add((A, 0), protocol=protocol)
    again, otherwise = machine.ending(is_commit, protocol), machine.ending(not is_commit, protocol)
    first = machine.end(is_commit, protocol)
    if complete:
        machine.report_all()
    before = machine.image.transactions
    done = machine.row(again)
    assert (done.code, done.producer_id, done.epoch) == (0, first.producer_id, first.epoch)
    assert machine.code(otherwise) is ErrorCode.INVALID_TXN_STATE
    assert machine.image.transactions == before
    unnumbered = msgspec.structs.replace(again, txn_seq=-1)
    expected = ErrorCode.NONE if protocol == 2 else ErrorCode.INVALID_REQUEST
    assert machine.code(unnumbered) is expected


def test_a_late_end_ends_no_other_transaction() -> None:
    machine = Transactions()
    machine.init()
    machine.add((A, 0))
    late = machine.ending(True)
    machine.end(True)
    machine.report_all()
    machine.add((A, 1))
    assert machine.code(late) is ErrorCode.CONCURRENT_TRANSACTIONS
    assert machine.known().state is S.ONGOING

    machine = Transactions()
    machine.init()
    machine.add((A, 0), protocol=2)
    late = machine.ending(True, 2, txn_seq=-1)
    machine.end(True, 2)
    machine.report_all()
    machine.add((A, 1), protocol=2)
    assert machine.code(late) is ErrorCode.PRODUCER_FENCED, "under protocol 2 the epoch tells"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"transactional_id": "other"}, ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        ({"producer_id": 9}, ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        ({"epoch": 0}, ErrorCode.PRODUCER_FENCED),
        ({"epoch": 2}, ErrorCode.PRODUCER_FENCED),
        ({"txn_seq": 2}, ErrorCode.CONCURRENT_TRANSACTIONS),
    ],
)
@pytest.mark.parametrize("protocol", [1, 2])
def test_what_ends_nothing(protocol: int, fields: dict[str, Any], code: ErrorCode) -> None:
    machine = Transactions()
    machine.init()
    machine.init()
    machine.add((A, 0), protocol=protocol)
    assert machine.code(machine.ending(True, protocol, **fields)) is code


def test_under_protocol_1_there_is_nothing_to_end_before_the_first() -> None:
    machine = Transactions()
    machine.init()
    for is_commit in (True, False):
        assert machine.code(machine.ending(is_commit)) is ErrorCode.INVALID_TXN_STATE


@pytest.mark.parametrize("after", ["init", "complete"])
def test_under_protocol_2_an_abort_of_nothing_raises_the_epoch(after: str) -> None:
    machine = Transactions()
    number = machine.init().producer_id
    if after == "complete":
        machine.add((A, 0), protocol=2)
        machine.end(True, 2)
        early = machine.ending(False, 2, txn_seq=-1)
        assert machine.code(early) is ErrorCode.CONCURRENT_TRANSACTIONS, "markers are owed"
        machine.report_all()
    epoch = machine.known().epoch
    commit, abort = (machine.ending(is_commit, 2, txn_seq=-1) for is_commit in (True, False))
    assert machine.code(commit) is ErrorCode.INVALID_TXN_STATE
    for _ in range(2):
        done = machine.row(abort)
        assert (done.code, done.producer_id, done.epoch) == (0, number, epoch + 1)
        assert done.state == S.COMPLETE_ABORT
    assert not machine.image.transactions.decided


def test_under_protocol_2_the_last_epoch_ends_with_another_producer_id() -> None:
    machine = Transactions()
    number = machine.init().producer_id
    machine.jump_to(EPOCH_LAST)
    machine.add((A, 0), protocol=2, groups=("g",))
    machine.apply(machine.committing(7, protocol=2))
    again = machine.ending(True, 2)
    done = machine.end(True, 2)
    assert (done.producer_id, done.epoch) == (number + 1, 0)
    assert machine.known().marker == (number, EPOCH_LAST + 1)
    assert machine.offset() == 7
    transactions = machine.image.transactions
    assert transactions.of_producer(number) == transactions.of_producer(number + 1)
    assert transactions.stakes(A, 0) == [machine.known()]
    assert transactions.standing(number, EPOCH_LAST, A, 0) is Standing.FENCED
    assert transactions.standing(number + 1, 0, A, 0) is Standing.ENDING
    machine.report(A, 0, (number + 1, 1))
    assert machine.known().state.is_prepared, "the records have the old producer id"
    machine.report_all()
    assert machine.known().state is S.COMPLETE_COMMIT
    assert machine.image.transactions.of_producer(number) is None
    assert machine.row(again).producer_id == number + 1, "it lost the answer"
    machine.add((A, 0), protocol=2)
    assert machine.code(again) is ErrorCode.PRODUCER_FENCED


def test_an_end_by_the_other_protocol_goes_by_what_it_says() -> None:
    machine = Transactions()
    number = machine.init().producer_id
    machine.add((A, 0), protocol=1)
    assert machine.end(True, 2).epoch == 1
    assert (machine.known().marker, machine.known().protocol) == ((number, 1), 2)
    machine.report_all()
    machine.add((A, 0), protocol=2)
    assert machine.end(True, 1).epoch == 1
    assert (machine.known().marker, machine.known().protocol) == ((number, 1), 1)


# ---- reports ----


def test_only_the_report_that_is_awaited_counts() -> None:
    machine = Transactions()
    number = machine.init().producer_id
    machine.add((A, 0))
    epoch = machine.known().partitions[A, 0]

    def report(partition: int, creation_epoch: int, ended: tuple[int, int]) -> None:
        row = ReportMarkers(
            topic_id=A, partition=partition, creation_epoch=creation_epoch, ended=(ended,)
        )
        assert machine.code(row) is ErrorCode.NONE

    report(0, epoch, (number, 1))
    assert machine.known().partitions, "it is not decided"
    machine.end(True)
    before = machine.image.transactions
    report(1, epoch, (number, 1))
    report(0, epoch + 1, (number, 1))
    report(0, epoch, (number, 0))
    report(0, epoch, (number, 2))
    report(0, epoch, (number + 1, 1))
    assert machine.image.transactions == before
    report(0, epoch, (number, 1))
    assert machine.known().state is S.COMPLETE_COMMIT
    machine.add((A, 0))
    machine.end(True)
    report(0, epoch, (number, 1))
    assert machine.known().state is S.PREPARE_COMMIT, "that was the last one's"


def test_one_report_tells_of_many() -> None:
    machine = Transactions()
    names = [f"t{i}" for i in range(5)]
    for name in names:
        number = machine.init(name).producer_id
        mine = {"transactional_id": name, "producer_id": number, "epoch": 0, "txn_seq": 1}
        machine.init()
        machine.add((A, 0), **mine)
        machine.end(True, **mine)
    owed = machine.image.transactions.stakes(A, 0)
    assert [one.transactional_id for one in owed] == names
    row = ReportMarkers(
        topic_id=A,
        partition=0,
        creation_epoch=owed[0].partitions[A, 0],
        ended=tuple((one.marker[0], one.txn_seq) for one in owed[1:]),
    )
    machine.row(row)
    assert machine.image.transactions.stakes(A, 0) == owed[:1]
    assert [*machine.image.transactions.decided_after(0)] == owed[:1]
    assert [*machine.image.transactions.decided_after(owed[0].decision)] == []


def test_a_decision_without_partitions_is_complete() -> None:
    machine = Transactions()
    machine.init()
    machine.add(groups=("g",))
    machine.apply(machine.committing(7))
    assert machine.end(True).state == S.COMPLETE_COMMIT
    assert machine.offset() == 7
    assert machine.known().groups == ()


@pytest.mark.parametrize("is_decided", [False, True], ids=["running", "decided"])
def test_a_deleted_partition_counts_as_reported(is_decided: bool) -> None:
    machine = Transactions()
    machine.init()
    machine.add((A, 0), (A, 2), (B, 0))
    if is_decided:
        machine.end(True)
    machine.apply(DeleteTopics(topic_ids=(A,)))
    assert sorted(machine.image.transactions.stakes_at) == [(B, 0)]
    if not is_decided:
        assert machine.known().state is S.ONGOING
        machine.end(True)
    machine.apply(DeleteTopics(topic_ids=(B,)))
    assert machine.known().state is S.COMPLETE_COMMIT
    assert not machine.image.transactions.decided
    assert not machine.image.transactions.stakes_at


def test_a_topic_that_is_made_again_owes_nothing() -> None:
    machine = Transactions()
    machine.init()
    machine.add((A, 0), groups=("g",))
    machine.apply(machine.committing(7))
    late = machine.committing(8)
    machine.apply(DeleteTopics(topic_ids=(A,)))
    machine.apply(CreateTopics(topics=(creation("a", 3, (1,)),)))
    assert not machine.is_pending()
    assert isinstance(machine.apply(late), GroupDone), "as if it had come before the deletion"
    assert not machine.is_pending()
    assert machine.end(True).state == S.COMPLETE_COMMIT
    assert machine.offset() is None


# ---- what nobody asked for ----


@pytest.mark.parametrize("protocol", [1, 2])
def test_an_expired_transaction_is_aborted_and_its_producer_fenced(protocol: int) -> None:
    machine = Transactions()
    number = machine.init().producer_id
    machine.add((A, 0), protocol=protocol)
    late = machine.ending(True, protocol)
    abort = machine.ending(False, protocol)
    assert machine.code(machine.expiring()) is ErrorCode.NONE
    known = machine.known()
    assert (known.state, known.credentials) == (S.PREPARE_ABORT, (number, 1))
    assert known.marker == (number, 1)
    if protocol == 1:
        assert machine.code(late) is ErrorCode.PRODUCER_FENCED
        assert machine.code(abort) is ErrorCode.PRODUCER_FENCED
    else:
        assert machine.code(late) is ErrorCode.INVALID_TXN_STATE
        assert machine.row(abort).epoch == 1, "it may abort, and goes on with the new epoch"


def test_expiry_never_beats_a_decision_nor_ends_another_transaction() -> None:
    machine = Transactions()
    machine.init()
    machine.add((A, 0))
    late = machine.expiring()
    machine.end(True)
    assert machine.code(late) is ErrorCode.INVALID_TXN_STATE
    machine.report_all()
    assert machine.code(late) is ErrorCode.INVALID_TXN_STATE
    machine.add((A, 0))
    assert machine.code(late) is ErrorCode.INVALID_TXN_STATE
    assert machine.known().state is S.ONGOING
    unknown = msgspec.structs.replace(late, transactional_id="other")
    assert machine.code(unknown) is ErrorCode.INVALID_PRODUCER_ID_MAPPING


def test_expiry_at_the_last_epoch_gives_another_producer_id() -> None:
    machine = Transactions()
    number = machine.init().producer_id
    machine.jump_to(EPOCH_LAST)
    machine.add((A, 0))
    late = machine.ending(True)
    machine.row(machine.expiring())
    known = machine.known()
    assert (known.marker, known.credentials) == ((number, EPOCH_LAST + 1), (number + 1, 0))
    assert machine.code(late) is ErrorCode.PRODUCER_FENCED
    machine.report_all()
    assert machine.init().epoch == 1


def _forgetting(machine: Transactions, **fields: object) -> ForgetId:
    known = machine.known()
    row = ForgetId(
        transactional_id=ID,
        producer_id=known.producer_id,
        epoch=known.epoch,
        txn_seq=known.txn_seq,
        changed_at_ms=known.changed_at_ms,
    )
    return msgspec.structs.replace(row, **fields)


def test_people_are_told_when_it_began_where_no_majority_tells_the_time() -> None:
    machine = Transactions()
    machine.init()
    rows = (machine.adding((A, 0)),)
    machine.image, _ = apply_rows(
        machine.image, TransactionRows(rows=rows, now_ms=UNDATED, said_ms=70)
    )
    assert machine.known().started_at_ms == 70
    assert machine.known().changed_at_ms == UNDATED, "expiry goes by no single clock"
    rows = (machine.ending(True, protocol=2),)
    machine.image, _ = apply_rows(machine.image, TransactionRows(rows=rows, now_ms=90, said_ms=80))
    assert machine.known().changed_at_ms == 90


def test_an_id_is_forgotten_unless_anything_happened_since() -> None:
    machine = Transactions()
    number = machine.row(InitProducer(transactional_id=ID, timeout_ms=1), now_ms=50).producer_id
    assert machine.known().changed_at_ms == 50
    for other in ({"epoch": 1}, {"producer_id": 9}, {"txn_seq": 1}, {"changed_at_ms": 49}):
        assert machine.code(_forgetting(machine, **other)) is ErrorCode.INVALID_TXN_STATE
    machine.row(machine.adding((A, 0)), now_ms=40)
    assert machine.known().changed_at_ms == 50, "no clock takes it back"
    assert machine.known().started_at_ms == 40
    assert machine.code(_forgetting(machine)) is ErrorCode.INVALID_TXN_STATE
    machine.row(machine.ending(True), now_ms=60)
    assert machine.code(_forgetting(machine)) is ErrorCode.INVALID_TXN_STATE
    machine.report(A, 0, now_ms=65)
    assert machine.known().changed_at_ms == 65
    row = _forgetting(machine)
    for _ in range(2):
        done = machine.row(row, now_ms=70)
        assert (done.code, done.producer_id) == (0, -1)
    transactions = machine.image.transactions
    assert not transactions.ids
    assert not transactions.producers
    assert machine.init().producer_id == number + 1, "whatever comes late is of another"


def test_an_undated_id_is_dated_before_it_ages() -> None:
    machine = Transactions()
    machine.init()
    row = _forgetting(machine)
    assert row.changed_at_ms == UNDATED
    assert machine.row(row).producer_id == machine.known().producer_id
    assert machine.known().changed_at_ms == UNDATED, "nobody knows the time"
    machine.row(row, now_ms=70)
    assert machine.known().changed_at_ms == 70
    assert machine.code(row, now_ms=99) is ErrorCode.INVALID_TXN_STATE
    machine.row(machine.adding(groups=("g",)), now_ms=71)
    machine.row(machine.ending(True))
    assert machine.known().changed_at_ms == UNDATED, "it is not as old as the last date says"
    machine.row(_forgetting(machine), now_ms=90)
    assert machine.row(_forgetting(machine)).producer_id == -1


def test_a_deletion_makes_no_id_younger_and_none_undated() -> None:
    machine = Transactions()
    machine.row(InitProducer(transactional_id=ID, timeout_ms=1), now_ms=50)
    machine.row(machine.adding((A, 0)), now_ms=51)
    machine.row(machine.ending(True), now_ms=52)
    machine.apply(DeleteTopics(topic_ids=(A,)))
    assert machine.known().state is S.COMPLETE_COMMIT
    assert machine.known().changed_at_ms == 52


def test_a_commit_dates_what_it_begins() -> None:
    machine = Transactions()
    machine.row(InitProducer(transactional_id=ID, timeout_ms=1), now_ms=50)
    command = machine.committing(7, protocol=2)
    offsets = (msgspec.structs.replace(command.offsets[0], timestamp_ms=60),)
    machine.apply(msgspec.structs.replace(command, offsets=offsets))
    assert (machine.known().started_at_ms, machine.known().changed_at_ms) == (60, 60)


# ---- rows together ----


def test_rows_of_one_command_follow_each_other() -> None:
    """The reports of one transaction and the beginning of the next travel together."""
    machine = Transactions()
    number = machine.init().producer_id
    machine.add((A, 0))
    machine.end(True)
    epoch = machine.known().partitions[A, 0]
    report = ReportMarkers(topic_id=A, partition=0, creation_epoch=epoch, ended=((number, 1),))
    adding = machine.adding((A, 1), txn_seq=2)
    ending = machine.ending(False, txn_seq=2)
    refused = machine.adding((A, 9), txn_seq=2)
    done = machine.apply(TransactionRows(rows=(adding, report, refused, adding, ending, adding)))
    codes = [ErrorCode(row.code) for row in done.rows]
    assert codes == [
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.NONE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.NONE,
        ErrorCode.NONE,
        ErrorCode.CONCURRENT_TRANSACTIONS,
    ]
    assert [row.txn_seq for row in done.rows] == [1, -1, 1, 2, 2, 2]
    assert machine.known().state is S.PREPARE_ABORT


@pytest.mark.parametrize("level", [1, 2])
def test_below_the_level_nothing_is_done(level: int) -> None:
    machine = Transactions()
    machine.init()
    machine.add(groups=("g",))
    machine.image = evolve(machine.image, features=Map({"raftmq.level": level}))
    before = machine.image
    for command in (TransactionRows(rows=(machine.ending(True),)), machine.committing(7)):
        refused = machine.apply(command)
        assert isinstance(refused, Rejection)
        assert refused.code is ErrorCode.UNSUPPORTED_VERSION
    assert (machine.image.transactions, machine.image.groups) == (
        before.transactions,
        before.groups,
    )


# ---- offsets ----


def test_the_last_commit_of_a_transaction_counts() -> None:
    machine = Transactions()
    machine.init()
    machine.add(groups=("g",))
    machine.apply(machine.plainly(3))
    for offset in (7, 9, 8):
        assert isinstance(machine.apply(machine.committing(offset)), GroupDone)
    machine.apply(machine.committing(5, B))
    assert (machine.offset(), machine.is_pending(), machine.is_pending("b")) == (3, True, True)
    machine.end(True)
    assert (machine.offset(), machine.offset("b")) == (8, 5)
    assert not machine.is_pending()


def test_under_protocol_2_a_commit_begins_a_transaction() -> None:
    machine = Transactions()
    machine.init()
    command = machine.committing(7, protocol=2, txn_seq=-1)
    assert isinstance(machine.apply(command), GroupDone)
    known = machine.known()
    assert (known.state, known.txn_seq, known.groups) == (S.ONGOING, 1, ("g",))
    machine.end(False, 2)
    assert (machine.offset(), machine.is_pending()) == (None, False)
    refused = machine.apply(command)
    assert refused == Rejection(ErrorCode.INVALID_PRODUCER_EPOCH)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"transactional_id": "other"}, ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        ({"producer_id": 9}, ErrorCode.INVALID_PRODUCER_ID_MAPPING),
        ({"epoch": 0}, ErrorCode.INVALID_PRODUCER_EPOCH),
        ({"txn_seq": -1}, ErrorCode.INVALID_TXN_STATE),
        ({"txn_seq": 2}, ErrorCode.CONCURRENT_TRANSACTIONS),
        ({"topic_ids": ()}, ErrorCode.INVALID_REQUEST),
    ],
)
def test_what_may_not_be_committed(fields: dict[str, Any], code: ErrorCode) -> None:
    machine = Transactions()
    machine.init()
    machine.init()
    machine.add(groups=("g",))
    before = machine.image.groups
    command = machine.committing(7, **fields)
    assert machine.apply(command) == Rejection(code)
    many = machine.apply(CommitMany(commits=(command, machine.plainly(1))))
    assert many == CommitsDone((int(code), 0))
    assert machine.image.groups != before
    assert not machine.is_pending()


def test_a_group_that_was_not_added_is_no_part_of_a_transaction() -> None:
    machine = Transactions()
    machine.init()
    refused = Rejection(ErrorCode.INVALID_TXN_STATE)
    assert machine.apply(machine.committing(7)) == refused
    machine.add((A, 0))
    assert machine.apply(machine.committing(7)) == refused
    machine.add(groups=("g",))
    late = machine.committing(7)
    machine.end(True)
    assert machine.apply(late) == Rejection(ErrorCode.CONCURRENT_TRANSACTIONS)
    machine.report_all()
    machine.add((A, 0), groups=("g",))
    assert machine.apply(late) == Rejection(ErrorCode.CONCURRENT_TRANSACTIONS), "of the last one"
    machine.end(True)
    assert machine.offset() is None


def test_who_commits_is_judged_as_a_member() -> None:
    machine = Transactions()
    machine.init()
    machine.add(groups=("g",))
    member = GroupMember(member_id="m", session_timeout_ms=1, rebalance_timeout_ms=1)
    machine.apply(
        Generation(
            group="g", coordinator_epoch=machine.group_epoch, generation=1, members=(member,)
        )
    )
    command = machine.committing(7)
    assert isinstance(machine.apply(command), GroupDone), "aiokafka names no member"
    assert isinstance(machine.apply(machine.plainly(1)), Rejection)
    mine = msgspec.structs.replace(command, member_id="m", generation=1)
    assert isinstance(machine.apply(mine), GroupDone)
    for changed, code in (
        ({"generation": 2}, ErrorCode.ILLEGAL_GENERATION),
        ({"member_id": "n"}, ErrorCode.UNKNOWN_MEMBER_ID),
        ({"coordinator_epoch": 0}, ErrorCode.NOT_COORDINATOR),
        ({"group": "other"}, ErrorCode.NOT_COORDINATOR),
    ):
        refused = machine.apply(msgspec.structs.replace(mine, **changed))
        assert isinstance(refused, Rejection)
        assert refused.code is code


@pytest.mark.parametrize("is_commit", [True, False], ids=["commit", "abort"])
def test_a_pending_offset_yields_to_a_plain_commit_after_it(is_commit: bool) -> None:
    machine = Transactions()
    machine.init()
    machine.add(groups=("g",))
    machine.apply(machine.committing(7))
    machine.apply(machine.committing(8, B))
    machine.apply(machine.plainly(3))
    assert (machine.is_pending(), machine.is_pending("b")) == (False, True)
    machine.end(is_commit)
    assert machine.offset() == 3
    assert machine.offset("b") == (8 if is_commit else None)


def test_whatever_deletes_offsets_takes_pending_ones_away() -> None:
    machine = Transactions()
    machine.init()
    machine.add(groups=("g",))
    epoch = machine.group_epoch
    machine.apply(machine.committing(7))
    machine.apply(DeleteOffsets(group="g", coordinator_epoch=epoch, partitions=(("a", 0),)))
    assert not machine.is_pending()
    machine.apply(machine.committing(7))
    assert isinstance(machine.apply(DeleteGroup(group="g", coordinator_epoch=epoch)), GroupDone)
    assert machine.image.groups.get("g") is None
    machine.end(True)
    assert machine.image.groups.get("g") is None


def test_expiry_spares_pending_offsets_and_their_group() -> None:
    machine = Transactions()
    machine.init()
    machine.add(groups=("g",))
    machine.apply(machine.plainly(3))
    machine.apply(machine.committing(7))
    expired = (ExpiredOffset("a", 0, 0),)
    command = ExpireOffsets(group="g", coordinator_epoch=machine.group_epoch, expired=expired)
    machine.apply(command)
    assert machine.offset() == 3
    machine.apply(DeleteOffsets(group="g", coordinator_epoch=machine.group_epoch, partitions=()))
    machine.end(False)
    machine.apply(command)
    assert machine.image.groups.get("g") is None

    machine = Transactions()
    machine.init()
    machine.add(groups=("g",))
    machine.apply(machine.committing(7))
    machine.apply(msgspec.structs.replace(command, coordinator_epoch=machine.group_epoch))
    machine.end(True)
    assert machine.offset() == 7, "a group without offsets yet"


@pytest.mark.parametrize("protocol", [1, 2])
def test_who_was_too_slow_goes_on_unless_another_began(protocol: int) -> None:
    """Its producer names what it had, and is told who it is now (KIP-360)."""
    machine = Transactions()
    machine.init()
    had = machine.known().credentials
    machine.add((A, 0), protocol=protocol)
    machine.row(machine.expiring())
    machine.report_all()
    now = machine.known().credentials
    assert now == (had[0], had[1] + 1)
    told = machine.init(named=had)
    assert (told.code, told.producer_id, told.epoch) == (0, *now)
    other = machine.init()
    assert other.epoch > told.epoch
    assert machine.init(named=had).code == ErrorCode.PRODUCER_FENCED
