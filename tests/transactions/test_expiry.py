"""What the controller ends and forgets as time passes."""

from __future__ import annotations

import msgspec

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import UNDATED, ForgetId, InitProducer
from raftmq.metadata.transactions import TransactionState
from raftmq.transactions.coordinator import TransactionConfig
from tests.metadata.transaction_machine import A
from tests.transactions.world import World

ID = "tx"


def pass_time(world: World, milliseconds: float) -> None:
    world.clock.now_ms += milliseconds
    for _ in range(4):  # a round, and what it began
        world.expiry.tick()
        world.run()


def running(timeout_ms: int = 1_000, config: TransactionConfig | None = None) -> World:
    world = World(config)
    result = world.got(world.coordinator.init_producer(ID, timeout_ms))
    add = world.coordinator.add_partitions(
        ID, result.producer_id, result.epoch, protocol=1, partitions={A: [0]}
    )
    assert world.got(add) is ErrorCode.NONE
    pass_time(world, 0)
    return world


def state(world: World) -> TransactionState:
    return world.engine.image.transactions.ids[ID].state


def test_what_runs_for_too_long_is_aborted() -> None:
    world = running()
    epoch = world.engine.image.transactions.ids[ID].epoch
    pass_time(world, 999)
    assert state(world) is TransactionState.ONGOING
    pass_time(world, 1)
    assert state(world) is TransactionState.PREPARE_ABORT
    assert world.engine.image.transactions.ids[ID].epoch == epoch + 1, "its producer is fenced"
    assert world.expiry.aborted_count == 1


def test_a_new_controller_begins_anew() -> None:
    world = running()
    pass_time(world, 900)
    world.engine.is_leader = False
    pass_time(world, 0)
    world.engine.is_leader = True
    pass_time(world, 0)
    pass_time(world, 900)
    assert state(world) is TransactionState.ONGOING
    pass_time(world, 100)
    assert state(world) is TransactionState.PREPARE_ABORT


def test_only_the_controller_does_it() -> None:
    world = running()
    world.engine.is_leader = False
    pass_time(world, 100_000)
    assert state(world) is TransactionState.ONGOING


def test_a_commit_that_was_applied_first_stands() -> None:
    world = running()
    world.engine.is_prompt = False
    known = world.engine.image.transactions.ids[ID]
    pass_time(world, 1_001)
    assert len(world.engine.under_way) == 1, "the abort is under way"
    world.machine.row(world.machine.ending(is_commit=True))
    world.engine.apply_all()
    world.run()
    after = world.engine.image.transactions.ids[ID]
    assert after.state is TransactionState.PREPARE_COMMIT
    assert after.epoch == known.epoch
    assert world.expiry.aborted_count == 0


def test_the_time_of_the_next_transaction_is_its_own() -> None:
    world = running()
    pass_time(world, 900)
    known = world.machine.known()
    world.machine.row(world.machine.ending(is_commit=True))
    world.machine.report_all()
    world.machine.row(world.machine.adding((A, 0)))
    world.engine.show()
    assert world.machine.known().txn_seq == known.txn_seq + 1
    pass_time(world, 0)
    pass_time(world, 900)
    assert state(world) is TransactionState.ONGOING


def test_the_time_of_an_id_that_was_forgotten_is_not_that_of_its_namesake() -> None:
    world = running()
    pass_time(world, 900)
    machine = world.machine
    machine.row(machine.ending(is_commit=True))
    machine.report_all()
    known = machine.known()
    forgotten = ForgetId(
        transactional_id=ID,
        producer_id=known.producer_id,
        epoch=known.epoch,
        txn_seq=known.txn_seq,
        changed_at_ms=known.changed_at_ms,
    )
    if known.changed_at_ms == UNDATED:
        machine.row(forgotten, now_ms=1)
        forgotten = msgspec.structs.replace(forgotten, changed_at_ms=1)
    machine.row(forgotten)
    assert machine.image.transactions.get(ID) is None
    machine.row(InitProducer(transactional_id=ID, timeout_ms=1_000))
    machine.add((A, 0))
    world.engine.show()
    assert machine.known().txn_seq == 1
    pass_time(world, 100)
    assert state(world) is TransactionState.ONGOING


def test_an_id_that_nobody_uses_is_forgotten() -> None:
    world = World(TransactionConfig(id_expiration_ms=10_000))
    world.got(world.coordinator.init_producer(ID, 1_000))
    pass_time(world, 9_999)
    assert world.engine.image.transactions.get(ID) is not None
    pass_time(world, 1)
    assert world.engine.image.transactions.get(ID) is None
    assert world.expiry.forgotten_count == 1
    again = world.got(world.coordinator.init_producer(ID, 1_000))
    assert again.code is ErrorCode.NONE


def test_one_that_runs_is_not_forgotten() -> None:
    world = running(900_000, TransactionConfig(id_expiration_ms=10))
    pass_time(world, 1_000)
    assert state(world) is TransactionState.ONGOING
