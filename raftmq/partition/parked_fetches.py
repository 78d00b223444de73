"""Fetches that wait for records: woken by a partition's high watermark, its leadership, or time.

A fetch may wait for several partitions and a least number of bytes over all of them. A partition
only wakes it; the fetch itself (a callback of its handler) looks whether it now has enough.
"""

from __future__ import annotations

from functools import partial
from typing import Final, Protocol

from raftmq.partition.deadlines import Deadlines

WOKEN_AT_ONCE: Final = 8


class FetchWaiter(Protocol):
    """Something parked at one or more partitions."""

    def woken(self) -> None:
        """New records, another leader or another log start: look again. May unpark itself."""
        ...


class ParkedFetches:
    """The fetches that wait at one partition."""

    __slots__ = ("_deadlines", "_soon", "_waiters", "is_over", "moves")

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._waiters: dict[int, FetchWaiter] = {}  # by id(); in order of arrival
        self._soon: dict[int, FetchWaiter] = {}  # to be woken soon, each once
        self.is_over = False
        """Nobody shall wait here any more."""
        self.moves = 0
        """How often the partition moved: who looked since the last time need not look again."""

    def __len__(self) -> int:
        return len(self._waiters)

    def park(self, waiter: FetchWaiter) -> None:
        """Wake `waiter` at every change until it unparks."""
        self._waiters[id(waiter)] = waiter

    def unpark(self, waiter: FetchWaiter) -> None:
        """Forget `waiter`; harmless when it is not parked."""
        self._waiters.pop(id(waiter), None)

    def wake_all(self) -> None:
        """The partition moved: let every waiter look again, a few at once, the others soon, since
        each may answer."""
        self.moves += 1
        if not self._waiters:
            return
        waiters = list(self._waiters.values())
        for waiter in waiters[:WOKEN_AT_ONCE]:
            if id(waiter) in self._waiters:
                waiter.woken()
        for waiter in waiters[WOKEN_AT_ONCE:]:
            key = id(waiter)
            if key not in self._soon:
                self._soon[key] = waiter
                self._deadlines.soon(partial(self._wake, key))

    def _wake(self, key: int) -> None:
        self._soon.pop(key).woken()
