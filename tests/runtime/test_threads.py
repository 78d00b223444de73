"""Threads that run jobs and bring the news back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio

from raftmq.ports import DiskError
from raftmq.runtime.threads import PATIENCE_S, REPORT_MAX, Flusher


class Job:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.gate = threading.Event()
        self.began = threading.Event()
        self.gate.set()

    def run(self) -> None:
        self.began.set()
        self.gate.wait(60)
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
    with trio.fail_after(30):
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
    with trio.fail_after(30):
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
        with trio.fail_after(30):
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
    await trio.to_thread.run_sync(first.began.wait, 30)
    flusher.submit(second, lambda _: None)

    class Queue(deque[Any]):
        """The first job ends as soon as the queue is dropped, and no sooner."""

        def clear(self) -> None:
            super().clear()
            first.gate.set()

    flusher._jobs = Queue(flusher._jobs)
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
    with trio.fail_after(30):
        stuck.gate.set()
        await done.wait()
    assert flusher.longest_ms() == 0.0
    flusher.close()


async def test_a_flush_waits_from_when_it_was_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is slow for each of many files holds the last of them up for long."""
    now = 100.0
    monkeypatch.setattr("raftmq.runtime.threads.perf_counter", lambda: now)
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
    with trio.fail_after(30):
        await done.wait()
    flusher.close()


class NamedJob(Job):
    """Tells which thread ran it."""

    def run(self) -> None:
        self.thread = threading.current_thread().name
        super().run()


async def test_one_thread_flushes_as_long_as_nothing_waits_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raftmq.runtime.threads.perf_counter", lambda: 100.0)
    flusher = Flusher(4)
    jobs = [NamedJob() for _ in range(50)]
    for job in jobs:
        flusher.submit(job, lambda _: None)
        flusher.longest_ms()
    flusher.close()
    assert {job.thread for job in jobs} == {"flusher-0"}


@pytest.mark.parametrize("is_followed", [True, False], ids=["by-another-job", "by-a-tick"])
async def test_a_job_that_has_waited_calls_another_thread(
    is_followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("raftmq.runtime.threads.perf_counter", lambda: now)
    flusher = Flusher(2)
    stuck, second, third = NamedJob(), NamedJob(), NamedJob()
    stuck.gate.clear()
    flusher.submit(stuck, lambda _: None)
    await trio.to_thread.run_sync(stuck.began.wait, 30)
    flusher.submit(second, lambda _: None)
    assert not second.began.is_set()
    now += PATIENCE_S
    if is_followed:
        flusher.submit(third, lambda _: None)
    else:
        flusher.longest_ms()
    assert await trio.to_thread.run_sync(second.began.wait, 30)
    assert second.thread == "flusher-1"
    assert not third.began.is_set(), "it has not waited"
    stuck.gate.set()
    flusher.close()
    assert not is_followed or third.thread == "flusher-0"


async def test_readers_need_no_patience() -> None:
    flusher = Flusher(2, "reader", patience_s=0.0)
    jobs = [NamedJob(), NamedJob()]
    for job in jobs:
        job.gate.clear()
        flusher.submit(job, lambda _: None)
        assert await trio.to_thread.run_sync(job.began.wait, 30)
    assert {job.thread for job in jobs} == {"reader-0", "reader-1"}
    for job in jobs:
        job.gate.set()
    flusher.close()


async def test_a_job_that_comes_as_a_helper_lies_down_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flusher = Flusher(2, "reader", patience_s=0.0)
    busy, short, late = Job(), Job(), Job()
    for job in (busy, short):
        job.gate.clear()
        flusher.submit(job, lambda _: None)
        assert await trio.to_thread.run_sync(job.began.wait, 30)
    token, lies_down, is_submitted = (
        trio.lowlevel.current_trio_token(),
        trio.Event(),
        threading.Event(),
    )

    class Bed(deque[int]):
        def append(self, number: int) -> None:
            if not is_submitted.is_set():
                token.run_sync_soon(lies_down.set)
                is_submitted.wait(30)
            super().append(number)

    monkeypatch.setattr(flusher, "_helpers_asleep", Bed())
    short.gate.set()
    await lies_down.wait()
    flusher.submit(late, lambda _: None)
    is_submitted.set()
    assert await trio.to_thread.run_sync(late.began.wait, 30)
    busy.gate.set()
    flusher.close()


async def test_nothing_is_forgotten_however_threads_and_loop_meet() -> None:
    """Whoever goes to sleep and whoever submits must see each other."""
    flusher = Flusher(3, patience_s=0.0002)

    async def one_after_the_other() -> None:
        for _ in range(500):
            is_done = trio.Event()
            flusher.submit(Job(), lambda _: is_done.set())  # noqa: B023  # called in this round
            await is_done.wait()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(one_after_the_other)
    flusher.close()
