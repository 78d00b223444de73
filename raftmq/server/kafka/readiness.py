"""One epoll under all client connections: who has something to read is told, not woken.

A connection at rest is no task. Its socket stays registered here, level-triggered; one task waits
for all of them (the epoll's own descriptor is registered with trio) and calls each that has bytes.
A request of a client that merely polls so costs a `recv` and no switch between tasks. Who needs to
wait for something (room, memory, the rest of a large frame) leaves the epoll and takes a task.

Those who are ready in the same pass are one piece of work: what they append is drained together, so
the busier a node is, the fewer messages and flushes each of a thousand producers costs it.

Work is charged to `LoopBudget` before it is done. Those for whom a pass has none left stand in
line there, each for itself, and nobody else is asked for before they had their turn: the kernel
would only name them again. Never reads a socket itself, never closes one.
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
"""So many connections are asked for at once; the kernel names the others next time."""


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
        """`together` is entered for all who are called in one pass, where they are several."""
        self._budget = budget
        self._together = together
        self._epoll = select.epoll()
        self._resting: dict[int, Receiver] = {}
        self._behind = 0  # ready ones that stand in line for another pass
        self._runner = Parker()  # waits until nobody is behind

    def __len__(self) -> int:
        return len(self._resting)

    def watch(self, descriptor: int, receiver: Receiver) -> None:
        """Call `receiver` whenever its socket has something to read, or is at its end."""
        self._epoll.register(descriptor, select.EPOLLIN)
        self._resting[descriptor] = receiver

    def unwatch(self, descriptor: int) -> None:
        """Stop calling; harmless when nobody is called. Must come before the socket is closed."""
        if self._resting.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    async def run(self) -> None:
        """Call who is ready, until cancelled."""
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
                continue  # hung up on for what another one asked, in this very pass
            if try_take(RECEIVE_COST):
                receiver.receive()
            else:
                self._behind += 1
                self._budget.wait(RECEIVE_COST, partial(self._receive_late, receiver))

    def close(self) -> None:
        """Give the epoll back; nobody may be watched any more."""
        assert not len(self), "connections are closed first"
        if not self._epoll.closed:
            trio.lowlevel.notify_closing(self._epoll.fileno())
            self._epoll.close()

    def _receive_late(self, receiver: Receiver) -> None:
        self._behind -= 1
        if not self._behind:
            self._runner.unpark()
        receiver.receive()
