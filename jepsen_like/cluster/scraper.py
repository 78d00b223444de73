"""Scrapes nodes now and then, as Prometheus would, and judges every answer.

Reads by the product's own tables (`raftmq/node/metrics/exposition.py`), in turns of the node's loop
and with its work in a thread. Draws from a stream of its own and sends nothing over the wires, so
that a run goes on as if nothing had been scraped.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Final

from attrs import define, field

from jepsen_like.cluster.transactional import VOLATILE
from jepsen_like.invariants import InvariantViolation
from raftmq.log.model import DamagedError
from raftmq.node.metrics.exposition import COLLECTORS, read, write
from raftmq.node.metrics.families import OTHER, Ages, Family, Scrape, Work
from raftmq.records import LOG_APPEND_TIME
from raftmq.types import Offset, RaftGroupId

if TYPE_CHECKING:
    from jepsen_like.cluster.node import ClusterNode
    from jepsen_like.cluster.world import ClusterWorld
    from raftmq.partition.partition import Partition

EVERY_MS: Final = (300.0, 1_500.0)
_LINE: Final = re.compile(r'raftmq_\w+(\{(\w+="[^"\\]*",?)+\})? [-+.\deInf]+')

Labels = tuple[str, ...]


class SeenAges(Ages):
    """Remembers of which positions a scrape wanted to know the age."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted: dict[tuple[RaftGroupId, int], Partition] = {}

    def want(self, partition: Partition, offset: Offset) -> None:
        """As the product's."""
        self.wanted[partition.group, offset] = partition
        super().want(partition, offset)


@define(eq=False)
class Process:
    """What one process answered so far."""

    node: ClusterNode
    life: int
    ages: SeenAges = field(factory=SeenAges)
    counters: dict[tuple[str, Labels], float] = field(factory=dict)
    is_asked: bool = False


class Scraper:
    """Asks one node after the other."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._random = Random(f"cluster scraper {world.seed}")
        self._processes: dict[int, Process] = {}

    async def run(self) -> None:
        """Ask until the world is quiet."""
        world, random = self._world, self._random
        while not world.is_quiet:
            node = random.choice(world.nodes)
            if node.is_serving:
                self._ask(node)
            await world.clients.sleep(random.uniform(*EVERY_MS) / 1e3)

    def _ask(self, node: ClusterNode) -> None:
        process = self._processes.get(node.node_id)
        if process is None or process.life != node.life:
            process = self._processes[node.node_id] = Process(node, node.life)
        if not process.is_asked:  # a second scraper waits
            process.is_asked = True
            process.ages.wanted.clear()
            node.later(0.0, partial(self._begin, process))

    def _begin(self, process: Process) -> None:
        core = process.node.core
        assert core is not None
        scrape = Scrape(process.ages)
        self._go_on(process, scrape, read(COLLECTORS, core, scrape))

    def _go_on(self, process: Process, scrape: Scrape, steps: Iterator[Work | None]) -> None:
        node, random = process.node, self._random
        for work in steps:
            go_on = partial(self._go_on, process, scrape, steps)
            if work is not None:
                work_ms = random.uniform(0.05, 1.0)
                node.in_thread(work_ms, partial(_work, node, work, go_on))
                return
            if random.random() < 0.05:
                node.later(0.0, go_on)  # others have the loop in between
                return
        process.is_asked = False
        self._judge(process, scrape)

    # ---- what must hold ----

    def _judge(self, process: Process, scrape: Scrape) -> None:
        families = scrape.families
        self._world.counts.scrapes += 1
        for family in families.values():
            _check_numbers(process, family)
        _check_partitions(process, families)
        _check_ages(process)
        if self._random.random() < 0.2:
            _check_text(process, list(families.values()), self._random.random() < 0.5)


def _work(node: ClusterNode, work: Work, go_on: Work) -> None:
    work()
    node.later(0.0, go_on)


def _breach(process: Process, detail: str) -> None:
    raise InvariantViolation("MetricsAreTrue", f"node {process.node.node_id}: {detail}")


def _check_numbers(process: Process, family: Family) -> None:
    """Finite and never below zero, each row once; counters only rise while a process lives."""
    name, counters = family.metric.name, process.counters
    is_counter = family.metric.kind == "counter"
    if len({*family.labels}) < len(family.labels):
        _breach(process, f"{name} has rows twice: {family.labels}")
    for labels, value in zip(family.labels, family.values, strict=True):
        if not (math.isfinite(value) and value >= 0):
            _breach(process, f"{name}{labels} is {value}")
        if is_counter:
            # A topic that is made again counts anew.
            if VOLATILE not in labels and value < counters.get((name, labels), 0.0):
                _breach(process, f"{name}{labels} fell from {counters[name, labels]} to {value}")
            counters[name, labels] = value
    for labels, buckets, seconds in family.histograms:
        counts = [count for _, count in buckets]
        if counts != sorted(counts) or seconds < 0:
            _breach(process, f"{name}{labels} is {buckets}, {seconds} s")
        if counts[-1] < counters.get((name, labels), 0.0):
            _breach(process, f"{name}{labels} fell to {counts[-1]}")
        counters[name, labels] = counts[-1]


def _check_partitions(process: Process, families: dict[str, Family]) -> None:
    """Rows of partitions agree with each other, and with their sums."""

    def rows(name: str) -> dict[Labels, float]:
        return dict(families[f"raftmq_{name}"].rows)

    starts, marks = rows("partition_log_start_offset"), rows("partition_high_watermark")
    ends, leads = rows("partition_log_end_offset"), rows("partition_is_leader")
    in_sync, replicas = rows("partition_in_sync_replicas"), rows("partition_replicas")
    for where, mark in marks.items():
        messages = rows("partition_messages")[where]
        if not starts[where] <= ends[where] or messages != max(0, mark - starts[where]):
            told = f"start {starts[where]}, mark {mark}, end {ends[where]}, {messages} messages"
            _breach(process, f"{where}: {told}")
        if leads[where] and not 1 <= in_sync[where] <= replicas[where]:
            _breach(process, f"{where}: {in_sync[where]} of {replicas[where]} in sync")
    led = sum(leads.values())
    if rows("partitions")[()] != len(marks) or rows("partitions_led")[()] != led:
        _breach(process, f"{len(marks)} partitions, {led} led: {rows('partitions')}")
    lags = {
        labels: lag for labels, lag in rows("group_lag_messages").items() if OTHER not in labels
    }
    for labels, seconds in rows("group_lag_seconds").items():
        if labels not in lags or (seconds > 0 and not lags[labels]):
            _breach(process, f"{labels}: {seconds} s behind, {lags.get(labels)} messages")


def _check_ages(process: Process) -> None:
    """What an age was told for is what the batch there says."""
    if process.node.disk.spoilt:
        return  # looking would find damage before those who have to do with it
    for (group, offset), partition in process.ages.wanted.items():
        stamp, replica = process.ages.timestamp((group, offset)), partition.replica
        if stamp is None or not replica.log_start_offset <= offset < replica.log_end_offset:
            continue
        try:
            header = next(replica.log.headers(Offset(offset), Offset(offset + 1)))
        except DamagedError:
            continue
        is_first = header.base_offset == offset and header.timestamp_type != LOG_APPEND_TIME
        wanted = header.base_timestamp if is_first else header.max_timestamp
        if stamp != wanted:
            _breach(process, f"{partition.name} at {offset} is of {wanted}, not of {stamp}")


def _check_text(process: Process, families: list[Family], is_openmetrics: bool) -> None:
    """Every line is a comment or a sample, no sample is there twice."""
    lines = write(families, is_openmetrics=is_openmetrics).splitlines()
    samples = [line for line in lines if not line.startswith("# ")]
    for line in samples:
        if _LINE.fullmatch(line) is None:
            _breach(process, f"a line of the page is {line!r}")
    twice = [name for name, n in Counter(s.rpartition(" ")[0] for s in samples).items() if n > 1]
    if twice:
        _breach(process, f"the page tells twice of {twice}")
