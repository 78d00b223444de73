"""Thousands of connections: half produce a record a second, half poll a topic that is quiet.

Raw frames on one epoll, so that the client side is light. The pollers read another topic than is
written: with every record delivered to hundreds of them, delivery would be what is measured. A
leadership that moves is followed, as a client library would, and counted.
"""

from __future__ import annotations

import os
import time
from typing import Final

from benchmarks.clients import create_topic, delete_topics, new_name
from benchmarks.errors import BenchmarkError
from benchmarks.loop_clients import Poller, Punctual, Tally, TopicLeaders
from benchmarks.plan import Metrics, Plan
from benchmarks.processes import CpuWatch, usage
from benchmarks.stats import percentile
from benchmarks.targets import Target
from benchmarks.wire import Loop, batch_of, fetch_frame, produce_frame
from benchmarks.workloads.latency import no_collector

_SIZE: Final = 100
_INTERVAL_S: Final = 1.0
_JOINS_PER_S: Final = 500


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
        moved_before = clients.tally.moved
        clients.times.clear()
        clients.is_measured = True
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
        "moved": float(clients.tally.moved - moved_before),
        "moved_while_joining": float(moved_before),
    }


def _memory(target: Target) -> int:
    return sum(usage(pid).rss_bytes for pid in target.servers)


class _Crowd:
    """Producers and pollers on one loop."""

    def __init__(self, target: Target, plan: Plan, loop: Loop, busy: str, quiet: str) -> None:
        self.times: list[float] = []
        self.tally = Tally()
        self.is_measured = False
        """Until then, nobody makes up for what the rush of joining held up."""
        self._loop = loop
        self._busy = TopicLeaders(target.bootstrap, busy)
        self._quiet = TopicLeaders(target.bootstrap, quiet)
        batch = batch_of(1, _SIZE, os.urandom(4096))
        self._produce = [produce_frame(busy, part, batch) for part in sorted(self._busy.addresses)]
        self._fetch = [
            fetch_frame(quiet, part, 0, plan.fetch_wait_ms)
            for part in sorted(self._quiet.addresses)
        ]

    def join(self, count: int) -> None:
        """So many producers and as many pollers, one after the other."""
        begin = time.perf_counter()
        for number in range(count):
            part = number % len(self._produce)
            _Producer(self, self._loop, self._busy, part, self._produce[part])
            part = number % len(self._fetch)
            Poller(self._loop, self.tally, self._quiet, part, self._fetch[part]).send()
            self._loop.run_until(begin + 2 * (number + 1) / _JOINS_PER_S)


class _Producer(Punctual):
    """A record a second."""

    def __init__(
        self, crowd_of: _Crowd, loop: Loop, leaders: TopicLeaders, part: int, frame: bytes
    ) -> None:
        due = time.perf_counter()
        super().__init__(
            loop, crowd_of.tally, leaders, part, frame, due=due, interval_s=_INTERVAL_S
        )
        self._crowd = crowd_of

    def acknowledged(self, now: float, taken_s: float) -> None:
        """Until all is measured, nobody makes up for what was held up."""
        self._crowd.times.append(taken_s)
        if not self._crowd.is_measured:
            self.due = max(self.due, now)
