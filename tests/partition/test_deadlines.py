"""Deadlines: the earliest first, never early, and those that are cancelled cost little."""

from __future__ import annotations

from functools import partial

from attrs import define, field

from raftmq.partition import parked
from raftmq.partition.parked import Deadline, Deadlines


@define
class FakeClock:
    now_ms: float = 1000.0

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return int(self.now_ms)


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

    def wait(self, name: str, delay_ms: float) -> Deadline:
        return self.deadlines.after(delay_ms, partial(self.ended.append, name))


def test_waits_end_in_order_and_never_early() -> None:
    table = Table()
    for name, delay_ms in (("b", 500), ("a", 481), ("c", 501), ("d", 501)):
        table.wait(name, delay_ms)
    assert len(table.deadlines) == 4
    assert table.woken == 2, "for each that is the first one"
    assert table.deadlines.next_ms == 1481
    assert not table.deadlines.expire(1480.9)
    assert table.ended == []
    assert not table.deadlines.expire(1500)
    assert table.ended == ["a", "b"]
    table.deadlines.expire(1501)
    assert table.ended == ["a", "b", "c", "d"], "of one time, in the order in which they came"
    assert len(table.deadlines) == 0
    assert table.deadlines.next_ms is None


def test_who_leaves_does_not_expire() -> None:
    table = Table()
    first = table.wait("first", 500)
    second = table.wait("second", 500)
    first.cancel()
    first.cancel()
    assert len(table.deadlines) == 1
    table.deadlines.expire(1500)
    assert table.ended == ["second"]
    second.cancel()
    assert len(table.deadlines) == 0


def test_those_of_one_time_do_not_end_all_at_once() -> None:
    table = Table()
    for number in range(10):
        table.wait(str(number), 500)
    counts = []
    while table.deadlines.expire(1500, count_max=4):
        counts.append(len(table.ended))
    assert counts == [4, 8]
    assert len(table.ended) == 10


def test_one_may_come_and_go_while_others_end() -> None:
    table = Table()

    def leave() -> None:
        table.ended.append("leaver")
        other.cancel()
        table.wait("another", 500)

    table.deadlines.after(500, leave)
    other = table.wait("other", 500)
    table.clock.now_ms = 1500
    table.deadlines.expire(1500)
    assert table.ended == ["leaver"]
    table.deadlines.expire(2000)
    assert table.ended == ["leaver", "another"]


def test_the_dead_are_swept_and_the_living_kept() -> None:
    table = Table()
    table.wait("kept", 500)
    for _ in range(3 * parked._SWEEP_MIN):
        table.wait("dead", 600).cancel()
    assert len(table.deadlines) == 1
    assert len(table.deadlines._heap) <= parked._SWEEP_MIN + 1
    table.deadlines.expire(2000)
    assert table.ended == ["kept"]


def test_soon_is_the_next_time_and_not_this_one() -> None:
    table = Table()

    def again() -> None:
        table.ended.append("again")
        table.deadlines.soon(again)

    table.deadlines.soon(again)
    assert table.woken == 1
    assert table.deadlines.expire(1000), "there is more to do"
    assert table.ended == ["again"]
