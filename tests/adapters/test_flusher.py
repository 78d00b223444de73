"""Threads that run jobs and bring the news back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from raftmq.adapters.flusher import REPORT_MAX, Flusher
from raftmq.ports import DiskError


class Job:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.gate = threading.Event()
        self.began = threading.Event()
        self.gate.set()

    def run(self) -> None:
        self.began.set()
        self.gate.wait(10)
        if self.error is not None:
            raise self.error


async def test_a_failing_disk_is_told_to_whom_it_concerns() -> None:
    flusher = Flusher(2, "worker")
    done = trio.Event()
    errors: list[DiskError | None] = []

    def told(error: DiskError | None) -> None:
        errors.append(error)
        if len(errors) == 2:
            done.set()

    failure = DiskError("gone")
    flusher.submit(Job(), told)
    flusher.submit(Job(failure), told)
    with trio.fail_after(5):
        await done.wait()
    assert set(errors) == {None, failure}
    flusher.close()


async def test_flushes_that_end_together_are_told_together_and_a_turn_has_its_limit() -> None:
    """Many logs are flushed when many groups begin to lead: one round of answers, not hundreds."""
    flusher = Flusher(1)
    turns: list[int] = []
    everything = trio.Event()

    @contextmanager
    def around() -> Iterator[None]:
        turns.append(0)
        yield

    def told(error: DiskError | None) -> None:
        assert error is None
        turns[-1] += 1
        if sum(turns) == 2 * REPORT_MAX:
            everything.set()

    flusher.around = around
    for _ in range(2 * REPORT_MAX):
        flusher.submit(Job(), told)
    flusher.close()  # all have run, and this loop had no turn since
    with trio.fail_after(5):
        await everything.wait()
    assert [count for count in turns if count] == [REPORT_MAX, REPORT_MAX]


@pytest.mark.parametrize(
    ("delay_s", "ours", "wanted"),
    [(0.0, AssertionError("ours"), AssertionError), (float("nan"), None, ValueError)],
    ids=["in-the-job", "before-it"],
)
def test_a_bug_in_a_thread_stops_the_node(
    delay_s: float, ours: Exception | None, wanted: type[Exception]
) -> None:
    """A thread that ended silently would leave whoever waits for it waiting."""

    async def node() -> None:
        flusher = Flusher(1)
        flusher.delay_s = delay_s
        flusher.submit(Job(ours), lambda _: None)
        with trio.fail_after(5):
            await trio.sleep_forever()

    with pytest.raises(trio.TrioInternalError) as raised:
        trio.run(node)
    cause = raised.value.__cause__
    assert isinstance(cause, BaseExceptionGroup)
    assert cause.subgroup(wanted) is not None


async def test_what_is_queued_may_be_dropped_at_the_end() -> None:
    flusher = Flusher(1)
    first, second = Job(), Job()
    first.gate.clear()
    flusher.submit(first, lambda _: None)
    await trio.to_thread.run_sync(first.began.wait, 5)
    flusher.submit(second, lambda _: None)
    threading.Timer(0.05, first.gate.set).start()
    flusher.close(drop=True)
    assert not second.began.is_set()


async def test_how_long_a_disk_has_not_answered_is_known() -> None:
    flusher = Flusher(2)
    assert flusher.longest_ms() == 0.0
    stuck, done = Job(), trio.Event()
    stuck.gate.clear()
    flusher.submit(stuck, lambda _: done.set())
    await trio.to_thread.run_sync(stuck.began.wait)
    assert flusher.longest_ms() > 0.0, "though the other thread is free"
    with trio.fail_after(5):
        stuck.gate.set()
        await done.wait()
    assert flusher.longest_ms() == 0.0
    flusher.close()


async def test_a_flush_waits_from_when_it_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is slow for each of many files holds the last of them up for long."""
    now = 100.0
    monkeypatch.setattr("raftmq.adapters.flusher.perf_counter", lambda: now)
    flusher = Flusher(1)
    first, second, done = Job(), Job(), trio.Event()
    first.gate.clear()
    second.gate.clear()
    flusher.submit(first, lambda _: None)
    flusher.submit(second, lambda _: done.set())
    await trio.to_thread.run_sync(first.began.wait)
    now += 1.5
    first.gate.set()
    await trio.to_thread.run_sync(second.began.wait)
    now += 1.0
    assert flusher.longest_ms() == 2_500.0
    second.gate.set()
    with trio.fail_after(5):
        await done.wait()
    flusher.close()
