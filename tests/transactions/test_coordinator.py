"""What producers are told, on the real state machine."""

from __future__ import annotations

import msgspec
import pytest
from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import UNDATED, AddPartitions
from raftmq.metadata.transactions import Transaction, TransactionState
from raftmq.transactions.coordinator import (
    ID_BYTES_MAX,
    PARKED_MS,
    PARTITIONS_PER_ROW_MAX,
    Filters,
    ProducerResult,
)
from raftmq.types import NodeId
from tests.metadata.transaction_machine import A, B
from tests.server.kafka.world import broker_image
from tests.transactions.world import World

ID = "tx"


def begun(world: World) -> tuple[int, int]:
    result = world.got(world.coordinator.init_producer(ID, 60_000))
    assert result.code is ErrorCode.NONE
    return result.producer_id, result.epoch


def added(world: World, who: tuple[int, int], protocol: int = 1) -> ErrorCode:
    code = world.got(
        world.coordinator.add_partitions(ID, *who, protocol=protocol, partitions={A: [0, 1]})
    )
    assert isinstance(code, ErrorCode)
    return code


def ended(world: World, who: tuple[int, int], *, is_commit: bool, protocol: int = 1) -> ErrorCode:
    result = world.got(world.coordinator.end(ID, *who, is_commit=is_commit, protocol=protocol))
    assert isinstance(result.code, ErrorCode)
    return result.code


def report(world: World) -> None:
    """Other nodes write and report all ends that are owed."""
    world.machine.report_all()
    world.engine.show()
    world.run()


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("is_commit", [True, False])
def test_from_the_beginning_to_the_end(protocol: int, is_commit: bool) -> None:
    world = World()
    who = begun(world)
    assert added(world, who, protocol) is ErrorCode.NONE
    assert ended(world, who, is_commit=is_commit, protocol=protocol) is ErrorCode.NONE
    known = world.engine.image.transactions.get(ID)
    assert known is not None
    assert known.state.is_prepared
    assert known.state.is_commit is is_commit
    assert known.epoch == who[1] + protocol - 1


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_a_timeout_that_is_not_allowed(timeout_ms: int) -> None:
    world = World()
    result = world.got(world.coordinator.init_producer(ID, timeout_ms))
    assert result == ProducerResult(ErrorCode.INVALID_TRANSACTION_TIMEOUT)


@pytest.mark.parametrize("name", ["", "x" * (ID_BYTES_MAX + 1)])
def test_names_that_are_not_allowed(name: str) -> None:
    world = World()
    result = world.got(world.coordinator.init_producer(name, 1_000))
    assert result == ProducerResult(ErrorCode.INVALID_REQUEST)


def test_what_comes_before_the_end_is_complete_waits_for_it() -> None:
    world = World()
    who = begun(world)
    added(world, who)
    ended(world, who, is_commit=True)
    early = world.coordinator.add_partitions(ID, *who, protocol=1, partitions={B: [0]})
    again = world.coordinator.init_producer("other", 1_000)
    world.run()
    assert not early.is_done
    assert again.is_done, "others do not wait"
    report(world)
    assert world.got(early) is ErrorCode.NONE
    known = world.engine.image.transactions.get(ID)
    assert known is not None
    assert (known.txn_seq, known.state) == (2, TransactionState.ONGOING)
    assert world.coordinator.parked_count == 0


def test_the_next_one_begins_with_the_reports_of_the_one_before() -> None:
    """On the controller, in the batch of commands that completes it: not a commit later."""
    world = World()
    who = begun(world)
    added(world, who)
    ended(world, who, is_commit=True)
    early = world.coordinator.add_partitions(ID, *who, protocol=1, partitions={B: [0]})
    world.run()
    world.engine.is_prompt = False
    world.engine.begin_batch(world.engine.image)
    assert world.engine.under_way == [], "nothing in this batch completes it"
    world.machine.report_all()
    world.engine.begin_batch(world.machine.image)
    ((command, _),) = world.engine.under_way
    assert [type(row) for row in command.rows] == [AddPartitions]
    assert not early.is_done
    world.engine.apply_all()
    assert world.got(early) is ErrorCode.NONE
    known = world.engine.image.transactions.get(ID)
    assert known is not None
    assert (known.txn_seq, known.state) == (2, TransactionState.ONGOING)


def test_it_waits_on_where_that_batch_is_lost() -> None:
    world = World()
    who = begun(world)
    added(world, who)
    ended(world, who, is_commit=True)
    early = world.coordinator.add_partitions(ID, *who, protocol=1, partitions={B: [0]})
    world.run()
    image = world.machine.image
    world.machine.report_all()
    reported, world.machine.image = world.machine.image, image
    world.engine.begin_batch(reported)
    world.run()
    assert not early.is_done
    assert world.coordinator.parked_count == 1
    report(world)
    assert world.got(early) is ErrorCode.NONE


def test_producers_are_sent_to_the_controller_while_it_lives() -> None:
    world = World()
    world.engine.image = evolve(world.engine.image, brokers=Map())
    assert world.coordinator.find(ID) is None
    brokers = Map({NodeId(n): broker_image(NodeId(n)) for n in (1, 2, 3)})
    world.engine.image = evolve(world.engine.image, brokers=brokers)
    world.engine.controller_id = None
    named = world.coordinator.find(ID)
    assert named is not None
    other = next(node for node in brokers if node != named)
    world.engine.controller_id = other
    assert world.coordinator.find(ID) == other
    for nobody in (None, NodeId(9)):
        world.engine.controller_id = nobody
        assert world.coordinator.find(ID) == named


def test_it_waits_no_longer_than_clients_do() -> None:
    world = World()
    who = begun(world)
    added(world, who)
    ended(world, who, is_commit=True)
    early = world.coordinator.add_partitions(ID, *who, protocol=1, partitions={B: [0]})
    world.run(PARKED_MS - 1)
    assert not early.is_done
    world.run(2)
    assert world.got(early) is ErrorCode.CONCURRENT_TRANSACTIONS
    assert world.coordinator.parked_count == 0
    report(world)
    known = world.engine.image.transactions.get(ID)
    assert known is not None
    assert known.txn_seq == 1, "what was refused is not done later"


def test_a_new_producer_aborts_what_runs_and_waits_for_its_end() -> None:
    world = World()
    old = begun(world)
    added(world, old)
    new = world.coordinator.init_producer(ID, 60_000)
    world.run()
    assert not new.is_done
    report(world)
    result = world.got(new)
    assert (result.code, result.producer_id) == (ErrorCode.NONE, old[0])
    assert result.epoch > old[1]
    assert added(world, old) is ErrorCode.PRODUCER_FENCED
    assert ended(world, old, is_commit=True) is ErrorCode.PRODUCER_FENCED


def test_an_image_that_is_behind_is_found_out() -> None:
    """The transaction began at another node, which this one has not seen."""
    world = World()
    who = begun(world)
    world.machine.row(world.machine.adding((A, 0)))
    assert ended(world, who, is_commit=True) is ErrorCode.CONCURRENT_TRANSACTIONS
    assert ended(world, who, is_commit=True) is ErrorCode.NONE, "clients ask again"
    known = world.engine.image.transactions.get(ID)
    assert known is not None
    assert known.state is TransactionState.PREPARE_COMMIT


def test_an_end_at_a_node_that_does_not_know_the_id_yet_is_asked_for_again() -> None:
    world = World()
    world.machine.init()
    world.machine.add((A, 0))
    who = world.machine.known().credentials
    assert ended(world, who, is_commit=True) is ErrorCode.CONCURRENT_TRANSACTIONS
    assert ended(world, who, is_commit=True) is ErrorCode.NONE


def test_a_late_end_never_ends_the_next_transaction() -> None:
    """It is on its way while its producer, who gave it up, ends this one elsewhere and goes on."""
    world = World()
    who = begun(world)
    added(world, who)
    world.engine.is_prompt = False
    late = world.coordinator.end(ID, *who, is_commit=True, protocol=1)
    world.run(1)
    world.machine.end(False)
    world.machine.report_all()
    world.machine.add((B, 0))
    world.engine.is_prompt = True
    world.engine.apply_all()
    assert world.got(late).code is ErrorCode.CONCURRENT_TRANSACTIONS
    known = world.machine.known()
    assert (known.txn_seq, known.state) == (2, TransactionState.ONGOING)


@pytest.mark.parametrize("has_next", [False, True], ids=["none since", "the next one runs"])
@pytest.mark.parametrize("is_under_way", [True, False], ids=["under way", "not sent yet"])
def test_what_is_added_late_joins_no_later_transaction(has_next: bool, is_under_way: bool) -> None:
    """Its producer gave it up, aborted and went on at other nodes, under the same epoch. Were its
    group part of the next one, offsets that come as late would be committed with it."""
    world = World()
    who = begun(world)
    added(world, who)
    world.engine.is_prompt = False
    late = world.coordinator.add_partitions(ID, *who, protocol=1, groups=["g"])
    if is_under_way:
        world.run(1)
    world.machine.end(False)
    world.machine.report_all()
    if has_next:
        world.machine.add((B, 0))
    world.engine.is_prompt = True
    world.run(1)
    world.engine.apply_all()
    assert world.got(late) is ErrorCode.CONCURRENT_TRANSACTIONS
    known = world.machine.known()
    is_running = known.state is TransactionState.ONGOING
    assert (known.txn_seq, is_running, known.groups) == (1 + has_next, has_next, ())


def test_all_rows_of_one_request_are_for_one_transaction() -> None:
    world = World()
    who = begun(world)
    many = {A: [number % 3 for number in range(PARTITIONS_PER_ROW_MAX + 1)]}
    world.engine.is_prompt = False
    late = world.coordinator.add_partitions(ID, *who, protocol=1, partitions=many)
    world.run(1)
    [(first, promise)] = world.engine.under_way
    world.engine.under_way.clear()
    result = world.machine.apply(first)
    world.engine.show()
    world.machine.end(False)
    world.machine.report_all()
    world.engine.show()
    promise.resolve(result)
    world.engine.is_prompt = True
    assert world.got(late) is ErrorCode.CONCURRENT_TRANSACTIONS
    assert (world.machine.known().txn_seq, world.machine.known().state) == (
        1,
        TransactionState.COMPLETE_ABORT,
    )


def test_an_end_may_be_asked_for_again() -> None:
    world = World()
    who = begun(world)
    added(world, who)
    assert ended(world, who, is_commit=True) is ErrorCode.NONE
    assert ended(world, who, is_commit=True) is ErrorCode.NONE
    assert ended(world, who, is_commit=False) is ErrorCode.INVALID_TXN_STATE
    report(world)
    assert ended(world, who, is_commit=True) is ErrorCode.NONE


def test_an_unknown_outcome_is_one_that_clients_ask_again_about() -> None:
    world = World()
    who = begun(world)
    world.engine.is_prompt = False
    end = world.coordinator.end(ID, *who, is_commit=True, protocol=1)
    add = world.coordinator.add_partitions(ID, *who, protocol=1, partitions={A: [0]})
    world.run()
    world.engine.lose_all()
    assert world.got(end) == ProducerResult(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    assert world.got(add) is ErrorCode.COORDINATOR_NOT_AVAILABLE


def test_many_partitions_become_several_rows_that_each_take_one_turn() -> None:
    world = World()
    who = begun(world)
    rows_before = world.rows.rows_count
    many = {A: [number % 3 for number in range(2 * PARTITIONS_PER_ROW_MAX + 1)]}
    code = world.got(world.coordinator.add_partitions(ID, *who, protocol=1, partitions=many))
    assert code is ErrorCode.NONE
    assert world.rows.rows_count - rows_before == 3
    known = world.engine.image.transactions.get(ID)
    assert known is not None
    assert (known.txn_seq, len(known.partitions)) == (1, 3)


def test_what_is_described() -> None:
    world = World()
    begun(world)
    told = world.got(world.coordinator.describe([ID, "nobody"]))
    assert isinstance(told[ID], Transaction)
    assert told["nobody"] is ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
    world.engine.is_prompt = False
    told = world.coordinator.describe([ID])
    world.engine.fail_barriers()
    assert world.got(told) == {ID: ErrorCode.COORDINATOR_NOT_AVAILABLE}


def test_what_is_verified() -> None:
    world = World()
    who = begun(world)
    verify = world.coordinator.verify
    assert verify(ID, *who, A, 0) is ErrorCode.TRANSACTION_ABORTABLE
    added(world, who)
    assert verify(ID, *who, A, 0) is ErrorCode.NONE
    assert verify(ID, *who, B, 0) is ErrorCode.TRANSACTION_ABORTABLE
    assert verify(ID, who[0], who[1] + 1, A, 0) is ErrorCode.PRODUCER_FENCED
    assert verify(ID, who[0] + 9, who[1], A, 0) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert verify("nobody", *who, A, 0) is ErrorCode.INVALID_PRODUCER_ID_MAPPING
    ended(world, who, is_commit=True)
    assert verify(ID, *who, A, 0) is ErrorCode.CONCURRENT_TRANSACTIONS


@pytest.mark.parametrize(
    ("filters", "is_listed"),
    [
        (Filters(), True),
        (Filters(states=frozenset({TransactionState.ONGOING})), True),
        (Filters(states=frozenset({TransactionState.EMPTY})), False),
        (Filters(producer_ids=frozenset({7})), True),
        (Filters(producer_ids=frozenset({8})), False),
        (Filters(running_for_ms=999), True),
        (Filters(running_for_ms=1_000), False),
    ],
)
def test_what_is_listed(filters: Filters, is_listed: bool) -> None:
    known = Transaction(
        transactional_id=ID,
        producer_id=7,
        epoch=0,
        timeout_ms=1,
        state=TransactionState.ONGOING,
        started_at_ms=5_000,
    )
    assert filters.lets_through(known, 6_000) is is_listed
    undated = msgspec.structs.replace(known, started_at_ms=UNDATED)
    is_dated = filters.running_for_ms < 0
    assert filters.lets_through(undated, 6_000) is (is_listed and is_dated)
