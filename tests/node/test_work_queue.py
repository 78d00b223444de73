"""Items have their turns: one at a time, again when they are called, and when their time comes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jepsen_like.cluster.tasks import SimTasks
from raftmq.node.work_queue import RETRY_MS_MAX, WorkItem, WorkQueue
from raftmq.partition.parked import Deadlines
from raftmq.promise import Promise
from tests.log.helpers import FakeClock


class Run:
    """A queue with two tasks, and an item whose turns end when a test says how."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.deadlines = Deadlines(self.clock)
        self.turns: list[Promise[float | None]] = []
        self.pauses = False
        self._soon: list[Callable[[], None]] = []
        tasks = SimTasks(lambda _ms, call: self._soon.append(call), self._soon.append)
        queue: WorkQueue[WorkItem] = WorkQueue(tasks, self.deadlines)

        async def step(item: WorkItem) -> float | None:
            turn: Promise[float | None] = Promise()
            self.turns.append(turn)
            pause_ms = await tasks.wait(turn)
            item.is_pausing = self.pauses
            return pause_ms

        for _ in range(2):
            tasks.spawn(lambda: queue.work(step))
        self.item = WorkItem()
        queue.add(self.item)
        self.go()

    def go(self, after_ms: float = 0) -> None:
        self.clock.now_ms += after_ms
        self.deadlines.expire(self.clock.now_ms)
        while self._soon:
            self._soon.pop(0)()

    def end(self, pause_ms: float | None) -> None:
        self.turns[-1].resolve(pause_ms)
        self.go()


def test_one_task_is_at_work_on_an_item_however_often_it_is_called() -> None:
    run = Run()
    for _ in range(3):
        run.item.wake()
        run.go()
    assert len(run.turns) == 1
    run.end(None)
    assert len(run.turns) == 2, "it was called meanwhile"
    run.end(None)
    assert len(run.turns) == 2
    run.item.wake()
    run.item.wake()
    run.go()
    assert len(run.turns) == 3


def test_nothing_to_wait_for_is_the_next_turn() -> None:
    run = Run()
    run.end(0)
    assert len(run.turns) == 2


@pytest.mark.parametrize("pauses", [False, True], ids=["hears news", "pauses"])
def test_an_item_that_pauses_is_woken_by_its_time_alone(pauses: bool) -> None:
    run = Run()
    run.pauses = pauses
    run.item.wake()  # while it is at work
    run.end(50.0)
    assert len(run.turns) == (1 if pauses else 2)
    if not pauses:
        run.end(50.0)
    before = len(run.turns)
    run.item.wake()
    run.go()
    assert len(run.turns) == (before if pauses else before + 1)
    run.go(49.0)
    run.go(1.0)
    assert len(run.turns) == before + 1, "a time that an earlier turn named has gone with it"


def test_failures_pause_for_longer_each_time_until_one_succeeds() -> None:
    item = WorkItem()
    pauses = [item.failed("why") for _ in range(7)]
    assert item.trouble == "why"
    assert pauses == [100, 200, 400, 800, 1600, RETRY_MS_MAX, RETRY_MS_MAX]
    item.succeeded()
    assert (item.trouble, item.failed("again")) == ("", 100)
