"""Thousands of connections: half produce a record a second, half poll a topic that is quiet.

Raw frames on one epoll, so that the client side is light. The pollers read another topic than is
written: with every record delivered to hundreds of them, delivery would be what is measured. A
leadership that moves is followed, as a client library would, and counted.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from typing import Final

from benchmarks.clients import create_topic, delete_topics, new_name
from benchmarks.errors import BenchmarkError
from benchmarks.plan import Metrics, Plan
from benchmarks.processes import CpuWatch, usage
from benchmarks.stats import percentile
from benchmarks.targets import Target
from benchmarks.wire import (
    AnswerError,
    Line,
    Loop,
    batch_of,
    check_fetched,
    check_produced,
    fetch_frame,
    leader_addresses,
    produce_frame,
    settled_leaders,
)
from benchmarks.workloads.latency import no_collector
from raftmq.errors import ErrorCode

_SIZE: Final = 100
_INTERVAL_S: Final = 1.0
_JOINS_PER_S: Final = 500
_RETRY_S: Final = 0.1


def crowd(target: Target, plan: Plan) -> Metrics:
    """Node memory per connection, and the latency that producers see among so many."""
    busy, quiet = new_name("crowd"), new_name("quiet")
    create_topic(target, busy, plan.partitions)
    create_topic(target, quiet, plan.partitions)
    with Loop() as loop:  # what is made once is not charged to the crowd
        _Crowd(target, plan, loop, busy, quiet).join(min(50, plan.crowd // 2))
        loop.run_until(time.perf_counter() + 2 * _INTERVAL_S)
    before = _memory(target)
    with no_collector(), Loop() as loop:
        clients = _Crowd(target, plan, loop, busy, quiet)
        clients.join(plan.crowd // 2)
        loop.run_until(time.perf_counter() + 2 * _INTERVAL_S)
        moved_before = clients.moved
        clients.times.clear()
        watch = CpuWatch(target.servers)
        begun = time.perf_counter()
        loop.run_until(begun + plan.crowd_s)
        seconds = time.perf_counter() - begun
        cpu, cores = watch.servers_s, watch.client_cores
        grown = _memory(target) - before
    delete_topics(target, busy, quiet)
    times = clients.times
    if len(times) < 0.5 * (plan.crowd // 2) * seconds:
        raise BenchmarkError(f"only {len(times)} records were acknowledged in {seconds:.0f} s")
    return {
        "memory_kib_per_connection": grown / plan.crowd / 1024,
        "p50_ms": percentile(times, 0.5) * 1e3,
        "p99_ms": percentile(times, 0.99) * 1e3,
        "acknowledged_per_s": len(times) / seconds,
        "cpu_percent_mean": cpu / seconds / max(1, len(target.pids)) * 100,
        "client_cores": cores,
        "moved": float(clients.moved - moved_before),
        "moved_while_joining": float(moved_before),
    }


def _memory(target: Target) -> int:
    return sum(usage(pid).rss_bytes for pid in target.servers)


class _Topic:
    """Where a topic's partitions are led, asked again when somebody was sent away."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.name = name
        self.leaders = settled_leaders(bootstrap, name)
        self._bootstrap = bootstrap
        self._asked_at = 0.0

    def look_again(self) -> None:
        now = time.perf_counter()
        if now - self._asked_at >= _RETRY_S:
            self._asked_at = now
            with contextlib.suppress(AnswerError):  # an election goes on: asked again soon
                self.leaders = leader_addresses(self._bootstrap, self.name)


class _Crowd:
    """Producers and pollers on one loop."""

    def __init__(self, target: Target, plan: Plan, loop: Loop, busy: str, quiet: str) -> None:
        self.times: list[float] = []
        self.moved = 0
        """How often a client was told that it asks the wrong node."""
        self.loop = loop
        self._busy = _Topic(target.bootstrap, busy)
        self._quiet = _Topic(target.bootstrap, quiet)
        batch = batch_of(1, _SIZE, os.urandom(4096))
        self._produce = [produce_frame(busy, part, batch) for part in sorted(self._busy.leaders)]
        self._fetch = [
            fetch_frame(quiet, part, 0, plan.fetch_wait_ms) for part in sorted(self._quiet.leaders)
        ]

    def join(self, count: int) -> None:
        """So many producers and as many pollers, one after the other."""
        begin = time.perf_counter()
        for number in range(count):
            part = number % len(self._produce)
            _Producer(self, self._busy, part, self._produce[part])
            part = number % len(self._fetch)
            _Poller(self, self._quiet, part, self._fetch[part])
            self.loop.run_until(begin + 2 * (number + 1) / _JOINS_PER_S)


class _Client(ABC):
    """One connection that follows its partition's leader."""

    def __init__(self, crowd_of: _Crowd, topic: _Topic, part: int, frame: bytes) -> None:
        self.crowd = crowd_of
        self._topic = topic
        self._part = part
        self._frame = frame
        self._address = topic.leaders[part]
        self._line = crowd_of.loop.connect(self._address, self._heard)
        self.begin()

    def begin(self) -> None:
        """Send the first request, now or when it is due."""
        self.send()

    def send(self) -> None:
        """Send the request to whom leads the partition, as far as is known."""
        address = self._topic.leaders[self._part]
        if address != self._address:
            self.crowd.loop.disconnect(self._line)
            self._address = address
            self._line = self.crowd.loop.connect(address, self._heard)
        self._line.send(self._frame)

    def _heard(self, _line: Line, answer: bytes) -> None:
        try:
            self.check(answer)
        except AnswerError as error:
            if error.code != ErrorCode.NOT_LEADER_OR_FOLLOWER:
                raise
            self.crowd.moved += 1
            self._topic.look_again()
            self.crowd.loop.at(time.perf_counter() + _RETRY_S, self.send)
            return
        self.answered()

    @abstractmethod
    def check(self, answer: bytes) -> None:
        """Raise AnswerError where the request was refused."""

    @abstractmethod
    def answered(self) -> None:
        """Go on after an answer."""


class _Producer(_Client):
    """A record a second, timed from when it was due: a stall counts for all that it held up."""

    def begin(self) -> None:
        self._due = time.perf_counter()
        self.send()

    def check(self, answer: bytes) -> None:
        check_produced(answer)

    def answered(self) -> None:
        self.crowd.times.append(time.perf_counter() - self._due)
        self._due += _INTERVAL_S
        self.crowd.loop.at(self._due, self.send)


class _Poller(_Client):
    """Asks again as soon as it is answered."""

    def check(self, answer: bytes) -> None:
        check_fetched(answer)

    def answered(self) -> None:
        self.send()
