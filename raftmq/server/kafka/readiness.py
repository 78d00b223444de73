"""One epoll under all client connections: who has something to read is told, not woken.

A connection at rest is no task. Its socket stays registered here, level-triggered; one task waits
for all of them (the epoll's own descriptor is registered with trio) and calls each that has bytes.
A request of a client that merely polls so costs a `recv` and no switch between tasks. Who needs to
wait for something (room, memory, the rest of a large frame) leaves the epoll and takes a task.

Those who are ready in the same pass are one piece of work: what they append is drained together, so
the busier a node is, the fewer messages and flushes each of a thousand producers costs it.

A client that only waits for records (`idle_poll.py`) is not even told of: it stays in an epoll of
its own, which is asked at certain moments, so that hundreds of polls are one wake-up. What such a
client says instead would have waited behind its poll. That it polls on is seen at these moments:
who has said nothing at the second of them is called like all others again.

Work is charged to `Turns` before it is done. Those for whom a pass has no budget left stand in
line there, each for itself, and nobody else is asked for before they had their turn: the kernel
would only name them again. Never reads a socket itself, never closes one.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final, Protocol

import trio

from raftmq.runtime.nap import Sleeper
from raftmq.runtime.turns import RECEIVE_COST, Turns

EVENTS_MAX: Final = 256
"""So many connections are asked for at once; the kernel names the others next time."""
QUIET_EVENTS_MAX: Final = 1024
"""As many of those that are looked at some times a second."""


class Receiver(Protocol):
    """A connection at rest."""

    def receive(self) -> None:
        """Take in what came; the budget of this pass was charged. Never waits, never raises for
        what the client did; harmless when the connection is not at rest any more."""
        ...

    def listen(self) -> None:
        """It did not poll on: `rouse` it. Never raises."""
        ...


class LookLater(Protocol):
    """Calls `waiter.expire()` at the next of the moments at which the quiet are looked at."""

    def __call__(self, waiter: Readiness) -> object: ...


class Readiness:
    """The sockets of all connections at rest."""

    __slots__ = (
        "_behind",
        "_due",
        "_epoll",
        "_expected",
        "_look_later",
        "_quiet",
        "_quiet_epoll",
        "_resting",
        "_runner",
        "_together",
        "_turns",
    )

    def __init__(
        self,
        turns: Turns,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
        look_later: LookLater | None = None,
    ) -> None:
        """`together` is entered for all who are called in one pass, where they are several. Without
        `look_later` nobody is quiet."""
        self._turns = turns
        self._together = together
        self._epoll = select.epoll()
        self._resting: dict[int, Receiver] = {}
        self._look_later = look_later
        self._quiet_epoll = select.epoll()
        self._quiet: dict[int, Receiver] = {}
        self._due: dict[int, Receiver] = {}  # quiet ones that are to say something by the next look
        self._expected: dict[int, Receiver] = {}  # or by the one after it: hushed since the last
        self._behind = 0  # ready ones that stand in line for another pass
        self._runner = Sleeper()  # waits until nobody is behind

    def __len__(self) -> int:
        return len(self._resting) + len(self._quiet)

    def watch(self, descriptor: int, receiver: Receiver) -> None:
        """Call `receiver` whenever its socket has something to read, or is at its end."""
        self._epoll.register(descriptor, select.EPOLLIN)
        self._resting[descriptor] = receiver

    def unwatch(self, descriptor: int) -> None:
        """Stop calling; harmless when nobody is called. Must come before the socket is closed."""
        if self._resting.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
        elif self._quiet.pop(descriptor, None) is not None:
            self._forget_quiet(descriptor)

    # ---- the quiet ----

    def hush(self, descriptor: int) -> bool:
        """Call this one at certain moments only, from now on: it was answered and is expected to
        ask again at once. False when it is not watched."""
        receiver = self._quiet.get(descriptor)
        if receiver is None:
            if self._look_later is None or descriptor not in self._resting:
                return False
            receiver = self._resting.pop(descriptor)
            self._epoll.unregister(descriptor)
            self._quiet_epoll.register(descriptor, select.EPOLLIN)
            self._quiet[descriptor] = receiver
            if len(self._quiet) == 1:
                self._look_later(self)
        self._expected[descriptor] = receiver
        return True

    def rouse(self, descriptor: int) -> None:
        """Call one that was hushed whenever there is something again."""
        receiver = self._quiet.pop(descriptor)
        self._forget_quiet(descriptor)
        self.watch(descriptor, receiver)

    def _forget_quiet(self, descriptor: int) -> None:
        self._quiet_epoll.unregister(descriptor)
        self._due.pop(descriptor, None)
        self._expected.pop(descriptor, None)

    def expire(self) -> None:
        """Look at the quiet, and again at the next such moment while there are any."""
        if not self._quiet:
            return
        ready = self._quiet_epoll.poll(0, QUIET_EVENTS_MAX)
        silent, self._due, self._expected = self._due, self._expected, {}
        for descriptor, _ in ready:
            silent.pop(descriptor, None)
            self._due.pop(descriptor, None)
        with self._together():
            self._call(ready, self._quiet)
        for descriptor, receiver in silent.items():
            if self._quiet.get(descriptor) is receiver:
                receiver.listen()
        if self._quiet and self._look_later is not None:
            self._look_later(self)

    # ---- all others ----

    async def run(self) -> None:
        """Call who is ready, until cancelled."""
        epoll = self._epoll
        while True:
            await trio.lowlevel.wait_readable(epoll.fileno())
            ready = epoll.poll(0, EVENTS_MAX)
            if len(ready) > 1:
                with self._together():
                    self._call(ready, self._resting)
            else:
                self._call(ready, self._resting)
            if self._behind:
                await self._runner.sleep()

    def _call(self, ready: list[tuple[int, int]], receivers: dict[int, Receiver]) -> None:
        try_take = self._turns.try_take
        for descriptor, _ in ready:
            receiver = receivers.get(descriptor)
            if receiver is None:
                continue  # hung up on for what another one asked, in this very pass
            if try_take(RECEIVE_COST):
                receiver.receive()
            else:
                self._behind += 1
                self._turns.wait(RECEIVE_COST, partial(self._receive_late, receiver))

    def close(self) -> None:
        """Give the epoll back; nobody may be watched any more."""
        assert not len(self), "connections are closed first"
        if not self._epoll.closed:
            trio.lowlevel.notify_closing(self._epoll.fileno())
            self._epoll.close()
            self._quiet_epoll.close()

    def _receive_late(self, receiver: Receiver) -> None:
        self._behind -= 1
        if not self._behind:
            self._runner.wake()
        receiver.receive()
