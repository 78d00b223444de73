"""A Fetch that cannot be answered at once: it waits for workers, for records, or for its time.

Its states are `FetchState`, the ways between them `NEXT`. What it finally answers was read at that
moment, once (`fetch_reading.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Concatenate, Final, ParamSpec

from raftmq.partition.parked import Deadline
from raftmq.partition.partition import Partition
from raftmq.ports import Runnable
from raftmq.promise import Promise
from raftmq.protocol.fetch import (
    FetchResponse,
)
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.fetch_reading import Reading
from raftmq.server.kafka.work import Abandonable
from raftmq.types import RaftIndex

COLD_ROUNDS_MAX: Final = 4
"""Index, bytes, their check, and once more where memory is so short that they left it again."""


P = ParamSpec("P")
Step = Callable[Concatenate["ParkedFetch", P], None]


def _costs_its_fetch(step: Step[P]) -> Step[P]:
    """Let a fault in a step fail that fetch: what called the step may be the engine, which has
    nothing to do with it."""

    def guarded(fetch: ParkedFetch, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            step(fetch, *args, **kwargs)
        except Exception as error:
            if fetch.is_done:
                raise  # of what was to be done with the answer
            fetch._become(FetchState.ANSWERED)
            fetch.fail(error)

    return guarded


class FetchState(Enum):
    """What a fetch that could not be answered at once does."""

    LOOKING = "partitions are read, or workers make them ready for that"
    PARKED = "it waits at its partitions, and for its time"
    CONFIRMING = "it waits to learn who leads, or that this node did when it looked"
    ANSWERED = "nothing is done for it any more"


NEXT: Final[Mapping[FetchState, frozenset[FetchState]]] = {
    FetchState.LOOKING: frozenset({FetchState.PARKED, FetchState.CONFIRMING, FetchState.ANSWERED}),
    FetchState.PARKED: frozenset({FetchState.LOOKING, FetchState.ANSWERED}),
    FetchState.CONFIRMING: frozenset({FetchState.CONFIRMING, FetchState.ANSWERED}),
    FetchState.ANSWERED: frozenset(),
}
"""All ways from one state to another; `ParkedFetch._become` alone takes them."""


class ParkedFetch(Abandonable[FetchResponse]):
    """A fetch that waits for `min_bytes`, a change of leadership, or its time."""

    __slots__ = (
        "_broker",
        "_min_bytes",
        "_parked_at",
        "_reading",
        "_rounds",
        "_until_ms",
        "_wait",
        "state",
    )

    def __init__(self, broker: Broker, reading: Reading, min_bytes: int) -> None:
        super().__init__()
        self._broker = broker
        self._reading = reading
        self._min_bytes = min_bytes
        self._parked_at: list[Partition] = []
        self._wait: Deadline | None = None
        self._rounds = 0
        self._until_ms = 0.0
        self.state = FetchState.LOOKING

    def _become(self, state: FetchState) -> None:
        assert state in NEXT[self.state], f"a fetch goes from {self.state} to {state}"
        if self.state is FetchState.PARKED:
            self._unpark()
        self.state = state

    def _settle(self, response: FetchResponse) -> None:
        self._become(FetchState.ANSWERED)
        self.resolve(response)

    def check(self, wait_ms: float) -> None:
        """Let workers read and check what is cold, then look again."""
        left = len(self._reading.jobs)
        self._rounds += 1

        def settled_for(partition: Partition, job: Runnable) -> Callable[[Promise[None]], None]:
            def settled(done: Promise[None]) -> None:
                nonlocal left
                left -= 1
                if done.error is None:
                    partition.prepared(job)
                # An error of the disk shows again when the partition is read.
                if left == 0 and self.state is FetchState.LOOKING:
                    self._look(wait_ms)

            return settled

        self._broker.metrics.read_aheads += left
        for partition, job in self._reading.jobs:
            promise = self._broker.workers.submit(job.run)
            promise.when_done(settled_for(partition, job))

    @_costs_its_fetch
    def _look(self, wait_ms: float) -> None:
        reading = self._reading
        if reading.is_large:
            self.look(self._broker.clock.monotonic_ms() + wait_ms)
            return
        # An index that was cold says now where the cold bytes are, and these may need a check.
        reading.read(may_wait=self._rounds >= COLD_ROUNDS_MAX)
        self._judge(wait_ms)

    def look(self, until_ms: float) -> None:
        """Look at many partitions in short turns, and again for as long as there is too little."""
        reading = self._reading

        def looked(done: Promise[None]) -> None:
            if self.state is not FetchState.LOOKING:
                return
            if done.error is not None:
                self._become(FetchState.ANSWERED)
                self.fail(done.error)
            else:
                self._judge(until_ms - self._broker.clock.monotonic_ms())

        self._until_ms = until_ms
        work = reading.steps(may_wait=self._rounds >= COLD_ROUNDS_MAX)
        result = self._broker.scheduler.run(work)
        assert isinstance(result, Promise), "so many partitions take more than a turn"
        result.when_done(looked)

    @_costs_its_fetch
    def _judge(self, wait_ms: float) -> None:
        reading = self._reading
        if reading.jobs:
            self.check(wait_ms)
        elif reading.is_urgent or reading.size >= self._min_bytes or wait_ms <= 0:
            self.answer()
        else:
            self.park(wait_ms)

    def park(self, wait_ms: float) -> None:
        """Wait at every partition; where too many wait already, answer what there is."""
        broker = self._broker
        if broker.metrics.parked_fetches >= broker.config.parked_fetches_max:
            self._settle(self._reading.respond())
            return
        self._become(FetchState.PARKED)
        self._parked_at = [partition for partition, _ in self._reading.partitions]
        for partition in self._parked_at:
            partition.fetches.park(self)
        self._wait = broker.deadlines.after(wait_ms, self.expire)
        broker.metrics.parked_fetches += 1
        if self._reading.is_large and self._reading.has_moved():
            self.woken()  # while the others were looked at

    @_costs_its_fetch
    def woken(self) -> None:
        """A partition moved: answer if that is enough. Harmless when it does not wait there any
        more: of many, a partition wakes some soon, not at once."""
        if self.state is not FetchState.PARKED:
            return
        reading = self._reading
        if reading.is_large:
            is_over = any(p.fetches.is_over for p, _ in reading.partitions)
            self._become(FetchState.LOOKING)
            self.look(0.0 if is_over else self._until_ms)
        elif reading.has_news(self._min_bytes):
            self._become(FetchState.LOOKING)
            self.answer()

    def await_leaders(self, waits: Promise[None]) -> None:
        """Answer when it is known who leads what this node does not lead any more."""

        def known(_done: Promise[None]) -> None:
            if self.state is FetchState.CONFIRMING:
                self._reading.read(may_wait=True)
                self.finish()

        self._become(FetchState.CONFIRMING)
        waits.when_done(known)

    @_costs_its_fetch
    def finish(self) -> None:
        """Answer what was read last.

        A leader that was replaced and does not know lacks what its successor has; a consumer that
        it told "out of range" would begin elsewhere, at the risk of records read twice or never.
        So that is said of what is beyond a log's end only when a read barrier proves that this
        leader was one when it looked.
        """
        reading = self._reading
        left = len(reading.beyond)
        if not left:
            self._settle(reading.respond())
            return

        def settled_at(place: int) -> Callable[[Promise[RaftIndex]], None]:
            def settled(barrier: Promise[RaftIndex]) -> None:
                nonlocal left
                left -= 1
                if barrier.error is not None:
                    reading.not_leading(place)
                if left == 0 and self.state is FetchState.CONFIRMING:
                    reading.beyond = {}
                    self.answer()

            return settled

        self._become(FetchState.CONFIRMING)
        for place, partition in reading.beyond.items():
            partition.replica.read_barrier().when_done(settled_at(place))

    @_costs_its_fetch
    def answer(self) -> None:
        """Answer what was read last, once clients can be told where to go with what is not here."""
        waits = self._reading.next_leaders()
        if waits is None:
            self.finish()
        else:
            self.await_leaders(waits)

    def abandon(self) -> None:
        """The client is gone."""
        if self.state is not FetchState.ANSWERED:
            self._settle(FetchResponse())

    @_costs_its_fetch
    def expire(self) -> None:
        """Its time is over."""
        reading = self._reading
        self._become(FetchState.LOOKING)
        if reading.is_large:
            self.answer()
            return
        reading.has_news(0)  # reads again where that can change the answer
        self.finish()

    def _unpark(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.cancel()
        for partition in self._parked_at:
            partition.fetches.unpark(self)
        self._parked_at = []
        self._broker.metrics.parked_fetches -= 1
