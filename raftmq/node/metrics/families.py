"""Declarations of metrics, and the families of samples that one scrape fills.

A `Metric` says what a series means: name, kind, labels, help, unit by its name. A `Family` is one
metric's rows at one moment, copied as plain numbers on the loop, so that a worker thread can turn
them into text without touching the node. A `Scrape` collects families in the order of declaration.

Invariants: counters end in `_total`; a row has as many label values as its metric has labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from attrs import define, field, frozen

from raftmq.counts import Histogram
from raftmq.log.reader import TimestampJob
from raftmq.ports import DiskError
from raftmq.types import Offset, RaftGroupId

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore
    from raftmq.partition.partition import Partition

TURN_S: Final = 0.002
"""About how long reading for a scrape may keep the loop at a time."""

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
OTHER: Final = "(other)"
"""Label of rows that were summed, being too many; no topic or group can have this name."""


@frozen(slots=True)
class Metric:
    """One metric of the exposition."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        assert self.name.startswith("raftmq_"), self.name
        assert self.name.endswith("_total") == (self.kind == "counter"), self.name


@define(slots=True, eq=False)
class Family:
    """A metric and its rows at one moment.

    Labels and values stand in lists of their own: ten thousand pairs would be ten thousand objects
    for the garbage collector to look at, with the loop waiting.
    """

    metric: Metric
    labels: list[tuple[str, ...]] = field(factory=list)
    values: list[float] = field(factory=list)
    histograms: list[tuple[tuple[str, ...], list[tuple[str, float]], float]] = field(factory=list)

    def add(self, labels: tuple[str, ...], value: float) -> None:
        """One row."""
        assert len(labels) == len(self.metric.labels), self.metric.name
        self.labels.append(labels)
        self.values.append(value)

    @property
    def rows(self) -> list[tuple[tuple[str, ...], float]]:
        """Labels with values."""
        return list(zip(self.labels, self.values, strict=True))

    def add_histogram(self, labels: tuple[str, ...], histogram: Histogram) -> None:
        """One histogram, copied."""
        assert len(labels) == len(self.metric.labels), self.metric.name
        self.histograms.append((labels, histogram.cumulative(), histogram.seconds))


class Ages:
    """Timestamps at committed offsets that earlier scrapes looked up."""

    def __init__(self) -> None:
        self._known: dict[tuple[RaftGroupId, int], int] = {}
        self._jobs: dict[tuple[RaftGroupId, int], TimestampJob] = {}

    def want(self, partition: Partition, offset: Offset) -> None:
        """Have the timestamp there looked up, unless it is known."""
        key = (partition.group, offset)
        if key in self._known or key in self._jobs:
            return
        try:
            self._jobs[key] = partition.replica.log.timestamp_job(offset)
        except DiskError:
            return  # a read for a client from there reports it

    def run(self) -> None:
        """Look up what is wanted. Runs in a worker thread."""
        for job in self._jobs.values():
            try:
                job.run()
            except DiskError:
                continue  # as above

    def take(self, wanted: Iterable[tuple[RaftGroupId, int]]) -> None:
        """Keep what was found, of the positions that are still wanted."""
        for key, job in self._jobs.items():
            if job.timestamp is not None:
                self._known[key] = job.timestamp
        self._jobs.clear()
        self._known = {key: self._known[key] for key in wanted if key in self._known}

    def timestamp(self, key: tuple[RaftGroupId, int]) -> int | None:
        """What is known of a position."""
        return self._known.get(key)


class Scrape:
    """The families of one scrape.

    Attributes:
        ages: what earlier scrapes looked up, for the lag of groups in seconds.
    """

    def __init__(self, ages: Ages) -> None:
        self.families: dict[str, Family] = {}
        self.ages = ages

    def __getitem__(self, metric: Metric) -> Family:
        """The family of a metric, begun at first use."""
        family = self.families.get(metric.name)
        if family is None:
            family = self.families[metric.name] = Family(metric)
        return family


Work: TypeAlias = Callable[[], None]
Collect: TypeAlias = Callable[["NodeCore", Scrape], Iterator[Work | None]]
"""Fills a scrape; yields often, so that the loop can turn in between. Work that it yields is run in
a worker thread before it goes on."""


@frozen(slots=True)
class Collector:
    """Metrics that are collected together."""

    metrics: Sequence[Metric]
    collect: Collect
