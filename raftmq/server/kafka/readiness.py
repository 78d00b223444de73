"""One epoll under all client connections: one that has something to read is called, no task wakes.

A connection at rest has no task. Its socket stays registered here, level-triggered; one task waits
for all of them (the epoll's own descriptor is registered with trio) and calls each that has bytes.
So a request of a client that merely polls costs a `recv` and no switch between tasks. A connection
that has to wait (for room, memory, the rest of a large frame) leaves the epoll and takes a task.

All that are ready in the same pass are one piece of work: what they append is drained together, so
the busier a node is, the fewer messages and flushes each of a thousand producers costs it.

Work is charged to `LoopBudget` before it is done. Connections for which a pass has none left wait
in line there, each for itself, and the epoll is not polled before they had their turn: it would
only name them again. Never reads a socket itself, never closes one.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, Protocol

import trio

from raftmq.runtime.loop import RECEIVE_COST, LoopBudget, Parker

EVENTS_MAX: Final = 256
"""Most connections that one `poll` names; the kernel names the others in the next one."""


class Receiver(Protocol):
    """A connection at rest."""

    def receive(self) -> None:
        """Take in what came; the budget of this pass was charged. Never waits, never raises for
        what the client did; harmless when the connection is not at rest any more."""
        ...


class Readiness:
    """The sockets of all connections at rest."""

    __slots__ = (
        "_behind",
        "_budget",
        "_epoll",
        "_resting",
        "_runner",
        "_together",
    )

    def __init__(
        self,
        budget: LoopBudget,
        together: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`together` is entered around the calls of one pass, where they are several."""
        self._budget = budget
        self._together = together
        self._epoll = select.epoll()
        self._resting: dict[int, Receiver] = {}
        self._behind = 0  # ready ones that stand in line for another pass
        self._runner = Parker()  # sleeps while some are behind

    def __len__(self) -> int:
        return len(self._resting)

    def watch(self, descriptor: int, receiver: Receiver) -> None:
        """Call `receiver` whenever its socket has something to read, or is at its end."""
        self._epoll.register(descriptor, select.EPOLLIN)
        self._resting[descriptor] = receiver

    def unwatch(self, descriptor: int) -> None:
        """Stop calling; harmless where nothing is watched. Comes before the socket closes."""
        if self._resting.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    async def run(self) -> None:
        """Call the connections that are ready, until cancelled."""
        epoll = self._epoll
        while True:
            await trio.lowlevel.wait_readable(epoll.fileno())
            ready = epoll.poll(0, EVENTS_MAX)
            if len(ready) > 1:
                with self._together():
                    self._call(ready)
            else:
                self._call(ready)
            if self._behind:
                await self._runner.park()

    def _call(self, ready: list[tuple[int, int]]) -> None:
        receivers, try_take = self._resting, self._budget.try_take
        for descriptor, _ in ready:
            receiver = receivers.get(descriptor)
            if receiver is None:
                continue  # a call of this very pass closed it
            if try_take(RECEIVE_COST):
                receiver.receive()
            else:
                self._behind += 1
                self._budget.wait(RECEIVE_COST, partial(self._receive_late, receiver))

    def close(self) -> None:
        """Close the epoll; no connection may be watched any more."""
        assert not len(self), "connections are closed first"
        if not self._epoll.closed:
            trio.lowlevel.notify_closing(self._epoll.fileno())
            self._epoll.close()

    def _receive_late(self, receiver: Receiver) -> None:
        self._behind -= 1
        if not self._behind:
            self._runner.unpark()
        receiver.receive()
