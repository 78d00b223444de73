"""Declarations of metrics, and the families of samples that one scrape fills.

A `Metric` says what a series means: name, kind, labels, help, unit by its name. A `Family` is one
metric's rows at one moment, copied as plain numbers on the loop, so that a worker thread can turn
them into text without touching the node. A `Scrape` collects families in the order of declaration.

Invariants: counters end in `_total`; a row has as many label values as its metric has labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from attrs import define, field, frozen

from raftmq.counts import Histogram

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore
    from raftmq.node.metrics.partitions import Ages

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
