"""A consumer at the end of its partitions that polls on in the same words.

That is what most consumers do most of the time, so it is made cheap where they wait for long. One
object waits at the partitions from poll to poll: while a request is in hand it is answered when one
of them moves, as every fetch that waits; between two requests nobody listens to the connection but
at certain moments (`Readiness.hush`), since the next one will only begin to wait, too. A partition
that moves ends that: the next poll is taken in as soon as it comes.

Invariants: a poll is answered with "nothing" only by a look that would find nothing now
(`Reading.finds_nothing`); whatever else happens to it happens to an ordinary `ParkedFetch`.
"""

from __future__ import annotations

from typing import Final, Protocol

from raftmq.partition.deadlines import Deadlines, Waiter
from raftmq.partition.partition import Partition
from raftmq.server.kafka.connection import Connection
from raftmq.server.kafka.fetch_memo import FetchMemo
from raftmq.server.kafka.handlers.fetch import (
    MAX_WAIT_MS_MAX,
    ParkedFetch,
    Reading,
    grid_ms,
)
from raftmq.server.kafka.metrics import ApiMetrics
from raftmq.server.kafka.replies import Slot

HEAR_GRID_MS: Final = 100
"""The quiet are heard so far apart, at every second tick of an idle node."""
_SOON_MS: Final = 1.0
"""Later than now, so that who looks again at a moment on the grid gets the next one."""


def hear_later(deadlines: Deadlines, waiter: Waiter) -> None:
    """Let `waiter` expire at the next of the moments at which the quiet are heard."""
    deadlines.together(_SOON_MS, HEAR_GRID_MS, waiter)


class Desk(Protocol):
    """Who began the poll and keeps its books."""

    def observe(self, metrics: ApiMetrics, started_ms: float) -> None:
        """A request that began then was answered now."""
        ...

    def wait_for(
        self,
        parked: ParkedFetch,
        memo: FetchMemo,
        correlation_id: int,
        slot: Slot,
        connection: Connection,
        started_ms: float,
    ) -> None:
        """Answer when `parked` is settled."""
        ...


class IdlePoll:
    """One consumer's polls, for as long as they find nothing."""

    __slots__ = (
        "_connection",
        "_correlation_id",
        "_desk",
        "_grid_ms",
        "_memo",
        "_metrics",
        "_partitions",
        "_reading",
        "_slot",
        "_started_ms",
        "_until_ms",
        "_wait_ms",
    )

    def __init__(
        self,
        desk: Desk,
        memo: FetchMemo,
        reading: Reading,
        connection: Connection,
        metrics: ApiMetrics,
    ) -> None:
        self._desk = desk
        self._memo = memo
        self._reading = reading
        self._connection = connection
        self._metrics = metrics
        self._slot: Slot | None = None  # of the request in hand
        self._correlation_id = 0
        self._started_ms = self._until_ms = 0.0
        self._wait_ms = min(memo.request.max_wait_ms, MAX_WAIT_MS_MAX)
        self._grid_ms = grid_ms(self._wait_ms)
        self._partitions: list[Partition] = [partition for partition, _ in reading.partitions]
        for partition in self._partitions:
            partition.fetches.park(self)
        connection.on_close[id(self)] = self.abandon

    def begin(self, correlation_id: int, slot: Slot, started_ms: float) -> bool:
        """Wait with the next request; False when it must be looked at like any other. What moved
        since the last one would have ended this (`woken`)."""
        broker = self._reading.broker
        metrics = broker.metrics
        if self._slot is not None or metrics.parked_fetches >= broker.config.parked_fetches_max:
            return False
        # The poll of a quiet client came before the moment at which it was to be heard: its wait
        # begins then, and not when all those before it have been heard, since it ends on a grid
        # again. Who waits for half a second is so answered in the pass in which others are heard.
        from_grid_ms = HEAR_GRID_MS if self._connection.is_quiet else None
        self._until_ms = broker.deadlines.together(
            self._wait_ms, self._grid_ms, self, from_grid_ms=from_grid_ms
        )
        self._slot, self._correlation_id, self._started_ms = slot, correlation_id, started_ms
        metrics.parked_fetches += 1
        return True

    def expire(self) -> None:
        """The time of the request in hand is over."""
        try:
            self._expire()
        except Exception as error:  # noqa: BLE001 - the deadlines have no part in it
            self._connection.failed(error)

    def _expire(self) -> None:
        reading, memo = self._reading, self._memo
        if not reading.finds_nothing():
            self._hand_over().expire()
            return
        slot, self._slot = self._slot, None
        assert slot is not None, "a poll expires while it is in hand"
        reading.broker.metrics.parked_fetches -= 1
        slot.answer(memo.encode(memo.header, self._correlation_id, reading.respond_again()))
        self._desk.observe(self._metrics, self._started_ms)
        if self._connection.fetch_memo is memo:
            self._connection.hush()
        else:
            self.end()

    def woken(self) -> None:
        """A partition moved: answer what is in hand if that is enough, listen for what is not."""
        try:
            if self._slot is None:
                self.end()
            elif self._reading.has_news(self._memo.request.min_bytes):
                self._hand_over().answer()
        except Exception as error:  # noqa: BLE001 - nor has the partition
            self._connection.failed(error)

    def replaced(self) -> None:
        """The client asks for something else now: these words are not expected again."""
        if self._slot is None:
            self.end()

    def abandon(self) -> None:
        """The client is gone."""
        self._take()
        self.end()

    def end(self) -> None:
        """Let the next poll be like any other request."""
        assert self._slot is None, "what is in hand is taken over first"
        for partition in self._partitions:
            partition.fetches.unpark(self)
        self._connection.on_close.pop(id(self), None)
        self._connection.listen()
        if self._memo.idle is self:  # not when woken late, after another has begun
            self._memo.idle = None

    def _take(self) -> Slot | None:
        """The request in hand, which is not waited with here any more."""
        slot, self._slot = self._slot, None
        if slot is not None:
            broker = self._reading.broker
            broker.deadlines.leave(self._until_ms, self)
            broker.metrics.parked_fetches -= 1
        return slot

    def _hand_over(self) -> ParkedFetch:
        slot = self._take()
        assert slot is not None, "there is a request in hand"
        self.end()
        memo, reading = self._memo, self._reading
        parked = ParkedFetch(reading, memo.request.min_bytes, memo)
        self._desk.wait_for(
            parked, memo, self._correlation_id, slot, self._connection, self._started_ms
        )
        return parked
