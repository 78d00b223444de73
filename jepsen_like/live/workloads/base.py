"""What all clients of a run share: settings, the history, and when to stop.

Nothing here needs a Kafka client installed. Times are of CLOCK_MONOTONIC, which all processes of a
machine share; no nemesis touches the load's clocks. Partitions are keyed `topic-partition`, as
everywhere in histories.
"""

from __future__ import annotations

import itertools
import logging
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from attrs import define, field, frozen

from jepsen_like.checkers.views import tag_of
from jepsen_like.history_events import Recorder

T = TypeVar("T")
Headers = Sequence[tuple[str, bytes | None]]

TRANSACTIONS: Final = "transactions"
TRANSACTIONAL: Final = "transactional"
"""The topic that transactions write to, and nobody else."""
VIEWS: Final = "views"
DELAYS: Final = "delays"
WORKLOADS: Final = (
    *("append", "poll", "group", "registers", "topics"),
    *(TRANSACTIONS, VIEWS, DELAYS),
)
RESTS_ON: Final[Mapping[str, str]] = dict.fromkeys(
    ("poll", "group", "registers", "topics", VIEWS), "append"
)
"""Workloads by which no record is acknowledged, for which faults wait; some read what the other one
writes."""
PLANTS: Final[Mapping[str, str]] = {
    "reads-uncommitted": "who is to read committed records alone reads all of them",
    "left-open": "a transaction without an end, that does not expire within the run",
}
"""Faults of the clients, planted to see that the checkers find them: such a run must not be clean.
"""
UNFINISHED: Final = 2
CRASHED: Final = 3
"""Exit codes of a load: the cluster did not answer to the end; a client is broken."""
LAST_ANSWERS_S: Final = 60.0
READ_BACK_S: Final = 120.0

FAST_RETRIES: Final[Mapping[str, Any]] = {
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 200,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 300,
    "topic.metadata.refresh.fast.interval.ms": 50,
    "topic.metadata.refresh.interval.ms": 5_000,
    "socket.timeout.ms": 1_200,
    "log_level": 2,
}
"""A broker that was stopped answers nothing: clients wait for it as long as they are told to."""


@frozen
class Plan:
    """What a load is to do; travels to its process as JSON."""

    bootstrap: str
    topics: Mapping[str, int]
    """Partitions by topic."""
    workloads: tuple[str, ...]
    rate: float
    """Records a second, over all partitions."""
    seed: int
    size: int = 100
    transactional: Mapping[str, int] = field(factory=dict)
    """The same of what transactions write to, and nobody else."""
    due: Mapping[str, int] = field(factory=dict)
    """The same of what delay topics deliver to."""
    replicas: int = 3
    """Of a topic that clients create for what they do."""
    plant: str = ""
    """One of `PLANTS`."""

    @property
    def keys(self) -> list[str]:
        """All partitions."""
        return [key_of(topic, i) for topic, count in self.topics.items() for i in range(count)]

    @property
    def transactional_keys(self) -> list[str]:
        """All partitions that transactions write to."""
        counts = self.transactional.items()
        return [key_of(topic, i) for topic, count in counts for i in range(count)]


@define(eq=False)
class Around:
    """Handed to every client."""

    plan: Plan
    recorder: Recorder
    stop: threading.Event = field(factory=threading.Event)
    """Set when no new operation may begin."""
    is_over: threading.Event = field(factory=threading.Event)
    """Set when what is still under way is given up."""
    numbers: itertools.count[int] = field(factory=lambda: itertools.count(1))
    acked_records: int = 0
    polled_records: int = 0
    hung: list[str] = field(factory=list)
    """Clients that never came back from a call, though all that it waits for has a timeout."""
    unanswered: list[str] = field(factory=list)
    """Those of them whose question our own client got no answer to either: it is the cluster that
    does not answer."""
    fatal: list[str] = field(factory=list)
    """Errors after which a client cannot go on; none is expected, whatever breaks."""
    refused: set[str] = field(factory=set)
    """Why records were refused for good, by partition. None is expected: their producers give
    nothing up, and after such an error one of librdkafka may write others twice."""

    def process(self) -> int:
        """A number for a new client."""
        return next(self.numbers)


class Client(Protocol):
    """Some threads of one kind."""

    def start(self) -> None:
        """Begin."""

    def join(self, timeout_s: float) -> bool:
        """Wait for the last operations after `stop`; False when some did not end."""


class UnansweredError(Exception):
    """Nobody knows what became of a request."""


class HungError(UnansweredError):
    """A client did not come back from a call, and never may: so might its end."""


def unless_hung(around: Around, what: str, seconds: float, ask: Callable[[], T]) -> T:
    """What a call of a client gives or raises, if it comes back within this time.

    Some calls of librdkafka have no timeout, or pass over the one they are given. All that they
    wait for has one, so who is not back after several of these never will be, whatever nodes do.

    Raises:
        HungError: it did not; the client is told of, counted, and left behind.
    """
    answers: list[T] = []
    failures: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # noqa: BLE001  # it is raised where it was asked for
            failures.append(error)

    thread = threading.Thread(target=run, name=f"{what} asks", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        around.hung.append(f"{what} hangs, {seconds:g} s after it was called")
        raise HungError("the client hangs")
    for failure in failures:
        raise failure
    return answers[0]


def join_all(threads: list[threading.Thread], timeout_s: float) -> bool:
    """Join threads within a time for all of them; False when one still runs."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


class ClientLog(logging.Logger):
    """Hands on what a client of librdkafka says; what ends one goes to the load's own log."""

    def __init__(self, name: str, heard: Callable[[str], None]) -> None:
        super().__init__(name, logging.DEBUG)
        handler = logging.Handler()
        handler.emit = lambda record: heard(record.getMessage())  # type: ignore[method-assign]
        self.addHandler(handler)
        told = logging.StreamHandler(sys.stderr)
        told.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        told.addFilter(lambda record: record.getMessage().startswith("FATAL"))
        self.addHandler(told)


class Crowd(ABC):
    """Clients of one workload, each in a thread, numbered from 0."""

    def __init__(self, around: Around, name: str, count: int) -> None:
        self._around = around
        self._threads = [
            # Who hangs in a client's library must not keep the process from its end.
            threading.Thread(target=self._run, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for all of them; False when one still runs."""
        return join_all(self._threads, timeout_s)

    @abstractmethod
    def _run(self, number: int) -> None:
        """Be one of the clients until told to stop."""


class Restarting(Crowd):
    """Clients that now and then begin anew."""

    def __init__(
        self, around: Around, name: str, count: int, salt: int, life_s: tuple[float, float]
    ) -> None:
        """`salt` tells their draws from those of other crowds; a life takes so long."""
        super().__init__(around, name, count)
        self._salt = salt
        self._life_s = life_s

    def _run(self, number: int) -> None:
        rng = random.Random(self._around.plan.seed * self._salt + number)
        while not self._around.stop.is_set():
            self._live(number, time.monotonic() + rng.uniform(*self._life_s))

    @abstractmethod
    def _live(self, number: int, until: float) -> None:
        """Be a new client as long as it goes on."""

    def _goes_on(self, until: float) -> bool:
        """True until that time, unless all are told to stop."""
        return time.monotonic() < until and not self._around.stop.is_set()


def tagged(value: int) -> Headers:
    """The headers of a record that views may show."""
    tag = tag_of(value)
    return [("tag", tag.encode())] if tag else []


def key_of(topic: str | None, partition: int | None) -> str:
    """How histories name a partition."""
    return f"{topic}-{partition}"


def parts_of(key: str) -> tuple[str, int]:
    """The topic and partition of a key."""
    topic, _, partition = key.rpartition("-")
    return topic, int(partition)
