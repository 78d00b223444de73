"""Deadlines: single ones, and those that share a time on a grid."""

from __future__ import annotations

import pytest
from attrs import define, field

from raftmq.partition.deadlines import ALIGNED_MS, Deadlines


@define
class FakeClock:
    now_ms: float = 1000.0

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return int(self.now_ms)


@define(eq=False)
class Waiting:
    name: str
    ended: list[str]

    def expire(self) -> None:
        self.ended.append(self.name)


class RunningClock(FakeClock):
    """Goes on between one reading and the next, as a real one does."""

    def monotonic_ms(self) -> float:
        self.now_ms += 0.01
        return self.now_ms


@define
class Table:
    clock: FakeClock = field(factory=FakeClock)
    ended: list[str] = field(factory=list)
    woken: int = 0
    deadlines: Deadlines = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.deadlines = Deadlines(self.clock)
        self.deadlines.on_earlier = self._wake

    def _wake(self) -> None:
        self.woken += 1

    def wait(
        self, name: str, delay_ms: float, grid_ms: float = 20, from_grid_ms: float | None = None
    ) -> tuple[float, Waiting]:
        waiting = Waiting(name, self.ended)
        at_ms = self.deadlines.together(delay_ms, grid_ms, waiting, from_grid_ms=from_grid_ms)
        return at_ms, waiting


def test_waits_end_together_and_never_early() -> None:
    table = Table()
    for name, delay_ms in (("a", 481), ("b", 500), ("c", 490), ("d", 501)):
        at_ms, _ = table.wait(name, delay_ms)
        assert 0 <= at_ms - (1000 + delay_ms) < 20
    assert len(table.deadlines) == 4
    assert table.woken == 1, "one entry, and the later one is not the first"
    assert table.deadlines.next_ms == 1500
    assert not table.deadlines.expire(1499.9)
    assert table.ended == []
    assert not table.deadlines.expire(1500)
    assert sorted(table.ended) == ["a", "b", "c"]
    assert len(table.deadlines) == 1
    table.deadlines.expire(1520)
    assert sorted(table.ended) == ["a", "b", "c", "d"]
    assert len(table.deadlines) == 0
    assert table.deadlines.next_ms is None


def test_the_grid_begins_with_the_node() -> None:
    """Nodes of one machine are not all busy at the same moments."""
    table = Table(FakeClock(1007.5))
    table.clock.now_ms = 5000.0
    at_ms, _ = table.wait("a", 5000, 200)
    assert at_ms == 10_007.5


@pytest.mark.parametrize("origin_ms", [1000.0, 12_345.678_9, 987_654_321.123_456])
def test_waits_from_one_time_on_the_grid_to_another_one_end_at_that_very_time(
    origin_ms: float,
) -> None:
    """However late each begins, and whatever the arithmetic of floats makes of it."""
    table = Table(RunningClock(origin_ms))
    origin_ms = table.clock.now_ms
    for number in range(200):
        table.clock.now_ms = origin_ms + 700 + number * 49.9 / 200
        table.wait(str(number), 500, 50, from_grid_ms=100)
    assert table.woken == 1, "one entry"
    assert table.deadlines.next_ms == pytest.approx(origin_ms + 1200, abs=1e-6)


def test_the_grid_goes_through_the_time_it_is_told() -> None:
    table = Table()
    table.deadlines.align(9_030, 50)
    at_ms, _ = table.wait("a", 500, 50)
    assert at_ms == 1530
    at_ms, _ = table.wait("b", 531, 50)
    assert at_ms == 1580
    at_ms, _ = table.wait("c", 1000, 200)
    assert (at_ms - 9_030) % 200 == 0, "and so do wider ones"
    table.deadlines.align(1007.5, 50)
    at_ms, _ = table.wait("d", 500, 50)
    assert at_ms == 1507.5, "each time anew, earlier or later"


@pytest.mark.parametrize("off_ms", [0.0, 0.4, ALIGNED_MS, -0.4, -ALIGNED_MS])
def test_the_grid_does_not_follow_what_is_no_shift(off_ms: float) -> None:
    """Ticks come a little early or late; waits until the same time must find each other."""
    table = Table()
    at_ms, _ = table.wait("before", 500, 50)
    for number in range(20):
        table.deadlines.align(1000 + 50 * number + off_ms, 50)
        assert table.wait(str(number), 500, 50)[0] == at_ms
    assert len(table.deadlines) == 21
    assert table.woken == 1, "one entry"


@pytest.mark.parametrize("shift_ms", [1.5, 25, 48.5, -1.5])
def test_the_grid_follows_a_shift(shift_ms: float) -> None:
    table = Table()
    table.deadlines.align(1000 + shift_ms, 50)
    at_ms, _ = table.wait("a", 500, 50)
    assert at_ms == 1500 + shift_ms % 50


def test_waits_that_began_end_as_they_were_to() -> None:
    table = Table()
    at_ms, first = table.wait("first", 500, 50)
    table.wait("second", 500, 50)
    table.deadlines.align(1010, 50)
    later_ms, _ = table.wait("third", 500, 50)
    assert (at_ms, later_ms) == (1500, 1510)
    assert table.deadlines.next_ms == 1500
    table.deadlines.leave(at_ms, first)
    assert len(table.deadlines) == 2
    table.deadlines.expire(1505)
    assert table.ended == ["second"]
    table.deadlines.expire(1510)
    assert table.ended == ["second", "third"]


def test_who_leaves_does_not_expire() -> None:
    table = Table()
    at_ms, first = table.wait("first", 500)
    _, second = table.wait("second", 500)
    table.deadlines.leave(at_ms, first)
    table.deadlines.leave(at_ms, first)
    assert len(table.deadlines) == 1
    table.deadlines.expire(1500)
    assert table.ended == ["second"]
    table.deadlines.leave(at_ms, second)
    assert len(table.deadlines) == 0
    table.wait("third", 500)
    table.deadlines.expire(1500)
    assert table.ended == ["second", "third"], "the time may be waited for again"


def test_those_of_one_time_do_not_end_all_at_once() -> None:
    table = Table()
    for number in range(10):
        table.wait(str(number), 500)
    table.deadlines.after(500, lambda: table.ended.append("alone"))
    counts = []
    while table.deadlines.expire(1500, count_max=4):
        counts.append(len(table.ended))
    assert counts[:2] == [4, 8]
    assert len(table.ended) == 11


def test_one_may_join_and_leave_while_others_end() -> None:
    table = Table()
    deadlines = table.deadlines

    @define(eq=False)
    class Leaver:
        def expire(self) -> None:
            table.ended.append("leaver")
            deadlines.leave(at_ms, other)
            deadlines.together(500, 20, other)

    at_ms, other = table.wait("other", 500)
    deadlines.together(500, 20, Leaver())
    table.clock.now_ms = 1500
    deadlines.expire(1500)
    assert table.ended == ["leaver"]
    deadlines.expire(2000)
    assert table.ended == ["leaver", "other"]


def test_a_sweep_of_dead_ones_keeps_groups() -> None:
    table = Table()
    table.wait("kept", 500)
    for _ in range(3000):
        table.deadlines.after(600, lambda: table.ended.append("dead")).cancel()
    assert len(table.deadlines) == 1
    table.deadlines.expire(2000)
    assert table.ended == ["kept"]
