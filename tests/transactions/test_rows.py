"""Rows leave together, in order, and each has its outcome."""

from __future__ import annotations

import pytest

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.commands import UNDATED, InitProducer, TransactionRows
from raftmq.transactions.rows import COMMANDS_IN_FLIGHT_MAX, RowQueue
from tests.transactions.world import World


def row(name: str) -> InitProducer:
    return InitProducer(transactional_id=name, timeout_ms=1)


def test_rows_of_one_turn_leave_together() -> None:
    world = World()
    world.engine.is_prompt = False
    promises = [world.rows.add(row(f"x{number}")) for number in range(5)]
    assert world.engine.under_way == []
    world.run()
    [(command, _)] = world.engine.under_way
    assert isinstance(command, TransactionRows)
    assert [one.transactional_id for one in command.rows] == [f"x{n}" for n in range(5)]  # type: ignore[union-attr]
    assert command.now_ms == world.clock.wall_ms()
    world.engine.apply_all()
    assert [promise.result().producer_id for promise in promises] == [0, 1, 2, 3, 4]


def test_what_comes_while_commands_are_under_way_gathers() -> None:
    world = World()
    world.engine.is_prompt = False
    for number in range(COMMANDS_IN_FLIGHT_MAX + 3):
        world.rows.add(row(f"x{number}"))
        world.run()
    assert len(world.engine.under_way) == COMMANDS_IN_FLIGHT_MAX
    assert len(world.rows) == 3
    world.engine.apply_all()
    world.run()
    world.engine.apply_all()
    assert len(world.rows) == 0
    assert world.rows.commands_count == COMMANDS_IN_FLIGHT_MAX + 1


def test_a_batch_that_is_about_to_enter_the_log_takes_what_waits() -> None:
    world = World()
    world.engine.is_prompt = False
    for number in range(COMMANDS_IN_FLIGHT_MAX + 3):
        world.rows.add(row(f"x{number}"))
        world.run()
    world.rows.add(row("due"))
    world.rows.send_now()
    assert [len(command.rows) for command, _ in world.engine.under_way] == [1, 1, 4]
    world.rows.send_now()
    world.run()
    assert len(world.engine.under_way) == COMMANDS_IN_FLIGHT_MAX + 1, "no command without rows"
    world.engine.apply_all()
    late = world.rows.add(row("late"))
    world.run()
    world.engine.apply_all()
    assert late.is_done


def test_what_is_lost_is_unknown() -> None:
    world = World()
    world.engine.is_prompt = False
    promise = world.rows.add(row("x"))
    world.run()
    world.engine.lose_all()
    with pytest.raises(KafkaError) as caught:
        promise.result()
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT


def test_what_the_nodes_clock_says_travels_beside_the_agreed_time() -> None:
    world = World()
    world.engine.is_prompt = False
    rows = RowQueue(world.engine, world.deadlines, lambda: None, world.clock.wall_ms)
    rows.add(row("x"))
    world.run()
    ((command, _),) = world.engine.under_way
    assert (command.now_ms, command.said_ms) == (UNDATED, world.clock.wall_ms())


def test_what_waits_is_bounded() -> None:
    world = World()
    clock = world.clock.wall_ms
    rows = RowQueue(world.engine, world.deadlines, lambda: None, clock, rows_waiting_max=2)
    promises = [rows.add(row(f"x{number}")) for number in range(3)]
    with pytest.raises(KafkaError) as caught:
        promises[2].result()
    assert caught.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    world.run()
    assert all(promise.is_done for promise in promises)
