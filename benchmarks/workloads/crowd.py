"""Thousands of connections: half produce a record a second, half poll a topic that is quiet.

Raw frames on one epoll, so that the client side is light. The pollers read another topic than is
written: with every record delivered to hundreds of them, delivery would be what is measured.
"""

from __future__ import annotations

import os
import time

from benchmarks.clients import create_topic, delete_topics, new_name
from benchmarks.errors import BenchmarkError
from benchmarks.plan import Metrics, Plan
from benchmarks.processes import CpuWatch, usage
from benchmarks.stats import percentile
from benchmarks.targets import Target
from benchmarks.wire import (
    Line,
    Loop,
    batch_of,
    check_fetched,
    check_produced,
    fetch_frame,
    produce_frame,
    settled_leaders,
)
from benchmarks.workloads.latency import no_collector

_SIZE = 100
_INTERVAL_S = 1.0


def crowd(target: Target, plan: Plan) -> Metrics:
    """Node memory per connection, and the latency that producers see among so many."""
    busy, quiet = new_name("crowd"), new_name("quiet")
    create_topic(target, busy, plan.partitions)
    create_topic(target, quiet, plan.partitions)
    _lead_in(target, plan, busy, quiet)
    before = _memory(target)
    with no_collector(), Loop() as loop:
        crowd_of = _Crowd(target, plan, loop, busy, quiet)
        crowd_of.join(plan.crowd // 2)
        loop.run_until(time.perf_counter() + 2 * _INTERVAL_S)
        crowd_of.times.clear()
        watch = CpuWatch(target.servers)
        begun = time.perf_counter()
        loop.run_until(begun + plan.crowd_s)
        seconds = time.perf_counter() - begun
        cpu, cores = watch.servers_s, watch.client_cores
        grown = _memory(target) - before
    delete_topics(target, busy, quiet)
    times = crowd_of.times
    if len(times) < 0.8 * (plan.crowd // 2) * seconds:
        raise BenchmarkError(f"only {len(times)} records were acknowledged in {seconds:.0f} s")
    return {
        "memory_kib_per_connection": grown / plan.crowd / 1024,
        "p50_ms": percentile(times, 0.5) * 1e3,
        "p99_ms": percentile(times, 0.99) * 1e3,
        "cpu_percent_mean": cpu / seconds / max(1, len(target.pids)) * 100,
        "client_cores": cores,
    }


def _memory(target: Target) -> int:
    return sum(usage(pid).rss_bytes for pid in target.servers)


def _lead_in(target: Target, plan: Plan, busy: str, quiet: str) -> None:
    """A few connections first, so that what is made once is not charged to the crowd."""
    with Loop() as loop:
        small = _Crowd(target, plan, loop, busy, quiet)
        small.join(min(50, plan.crowd))
        loop.run_until(time.perf_counter() + 2 * _INTERVAL_S)


class _Crowd:
    """Producers and pollers on one loop."""

    def __init__(self, target: Target, plan: Plan, loop: Loop, busy: str, quiet: str) -> None:
        self.times: list[float] = []
        self.loop = loop
        batch = batch_of(1, _SIZE, os.urandom(4096))
        self._leaders = settled_leaders(target.bootstrap, busy)
        self._quiet_leaders = settled_leaders(target.bootstrap, quiet)
        self._produce = [produce_frame(busy, part, batch) for part in sorted(self._leaders)]
        self._fetch = [
            fetch_frame(quiet, part, 0, plan.fetch_wait_ms) for part in sorted(self._quiet_leaders)
        ]

    def join(self, count: int) -> None:
        """So many producers and as many pollers, spread over a second."""
        begin = time.perf_counter()
        for number in range(count):
            share = number / count * _INTERVAL_S
            part = number % len(self._produce)
            _Producer(self, self._produce[part], self._leaders[part], begin + share)
            part = number % len(self._fetch)
            line = self.loop.connect(self._quiet_leaders[part], _Poller(self._fetch[part]))
            line.send(self._fetch[part])


class _Producer:
    """A record a second, timed from when it was due: a stall counts for all that it held up."""

    def __init__(
        self, crowd_of: _Crowd, frame: bytes, address: tuple[str, int], first_at: float
    ) -> None:
        self._crowd = crowd_of
        self._frame = frame
        self._due = first_at
        self._line = crowd_of.loop.connect(address, self._answered)
        crowd_of.loop.at(first_at, self._send)

    def _send(self) -> None:
        self._line.send(self._frame)

    def _answered(self, _line: Line, answer: bytes) -> None:
        check_produced(answer)
        self._crowd.times.append(time.perf_counter() - self._due)
        self._due += _INTERVAL_S
        self._crowd.loop.at(self._due, self._send)


class _Poller:
    """Asks again as soon as it is answered."""

    def __init__(self, frame: bytes) -> None:
        self._frame = frame

    def __call__(self, line: Line, answer: bytes) -> None:
        check_fetched(answer)
        line.send(self._frame)
