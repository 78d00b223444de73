"""Coroutines on virtual time: `raftmq.node.environment.Tasks` without trio.

A coroutine waits by yielding a promise; whoever settles it lets the coroutine go on. Nothing here
knows of nodes: the given `later` drops what belongs to a process that is gone, so a coroutine of a
crashed node is never resumed, only closed.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from functools import partial
from typing import Any, TypeVar

from raftmq.promise import Promise

T = TypeVar("T")
Later = Callable[[float, Callable[[], None]], None]


@types.coroutine
def until(promise: Promise[T]) -> Generator[Promise[T], None, T]:
    """The promise's value, or what it failed with, at the very moment when it is settled."""
    if not promise.is_done:
        yield promise
    return promise.result()


class SimTasks:
    """Runs the coroutines of one process.

    Attributes:
        running: those that have not ended, by number.
    """

    def __init__(self, later: Later, run_in_thread: Callable[[Callable[[], None]], None]) -> None:
        """`run_in_thread` runs something some time later, whether the process is paused or not."""
        self._later = later
        self._run_in_thread = run_in_thread
        self._started = 0
        self.running: dict[int, Coroutine[Any, Any, Any]] = {}

    # ---- Tasks ----

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        promise: Promise[None] = Promise()
        self._later(max(0.0, seconds * 1e3), partial(promise.resolve, None))
        await until(promise)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Let a thread do it: it takes time, and others run meanwhile."""
        promise: Promise[T] = Promise()

        def run() -> None:
            error: Exception | None = None
            value: T | None = None
            try:
                value = work()
            except Exception as caught:  # noqa: BLE001  # it is raised where it was asked for
                error = caught
            if error is not None:
                failure = error
                self._later(0.0, lambda: promise.fail(failure))
            else:
                self._later(0.0, lambda: promise.resolve(value))  # type: ignore[arg-type]

        self._run_in_thread(run)
        return await until(promise)

    async def wait(self, promise: Promise[T]) -> T:
        """Sleep until the promise is settled."""
        woken: Promise[None] = Promise()
        promise.when_done(lambda _: self._later(0.0, lambda: woken.resolve(None)))
        await until(woken)
        return promise.result()

    async def together(self, tasks: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Run all of them at once, until the last one ends."""
        begun = [self.spawn(task) for task in tasks]
        for end in begun:
            await until(end)

    # ---- for the simulation ----

    def spawn(self, task: Callable[[], Awaitable[T]]) -> Promise[T]:
        """Begin a coroutine; what it raises is raised by whoever resumed it."""
        self._started += 1
        number = self._started
        end: Promise[T] = Promise()
        awaitable = task()
        coroutine = awaitable if inspect.iscoroutine(awaitable) else _as_coroutine(awaitable)
        self.running[number] = coroutine
        self._step(number, coroutine, end)
        return end

    def _step(self, number: int, coroutine: Coroutine[Any, Any, T], end: Promise[T]) -> None:
        try:
            promise: Promise[Any] = coroutine.send(None)
        except StopIteration as stop:
            del self.running[number]
            end.resolve(stop.value)
            return
        promise.when_done(partial(self._resume, number, coroutine, end))

    def _resume(
        self, number: int, coroutine: Coroutine[Any, Any, T], end: Promise[T], _: Promise[Any]
    ) -> None:
        if number in self.running:
            self._step(number, coroutine, end)

    def kill(self) -> None:
        """The process is gone: nothing of it is resumed."""
        coroutines = list(self.running.values())
        self.running.clear()
        for coroutine in coroutines:
            if inspect.getcoroutinestate(coroutine) != inspect.CORO_RUNNING:
                coroutine.close()


async def _as_coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable
