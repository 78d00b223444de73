"""Fetches that wait for records: woken by a partition's high watermark, its leadership, or time.

A fetch may wait for several partitions and a least number of bytes over all of them. A partition
only wakes it; the fetch itself (a callback of its handler) looks whether it now has enough.
"""

from __future__ import annotations

from typing import Protocol


class FetchWaiter(Protocol):
    """Something parked at one or more partitions."""

    def woken(self) -> None:
        """New records, another leader or another log start: look again. May unpark itself."""
        ...


class ParkedFetches:
    """The fetches that wait at one partition."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: dict[int, FetchWaiter] = {}  # by id(); in order of arrival

    def __len__(self) -> int:
        return len(self._waiters)

    def park(self, waiter: FetchWaiter) -> None:
        """Wake `waiter` at every change until it unparks."""
        self._waiters[id(waiter)] = waiter

    def unpark(self, waiter: FetchWaiter) -> None:
        """Forget `waiter`; harmless when it is not parked."""
        self._waiters.pop(id(waiter), None)

    def wake_all(self) -> None:
        """Let every waiter look again."""
        if self._waiters:
            for waiter in list(self._waiters.values()):
                if id(waiter) in self._waiters:
                    waiter.woken()
