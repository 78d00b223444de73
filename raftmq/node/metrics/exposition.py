"""One scrape: read the node in short turns on the loop, write the text in a worker thread.

A scrape of thousands of partitions must not delay a heartbeat: reading goes on for at most
`TURN_S`, then the loop turns. Scrapes follow one another; a second scraper waits. `read` knows no
loop and no thread: its caller, a process or a simulation, gives the loop to others between its
steps, and runs the work that a step hands out in a worker thread before the next one.

The text is Prometheus' own format or OpenMetrics, as the scraper asks. It is the same bytes as
prometheus_client's encoders write (a test compares them), in a quarter of their time or less: names
are known to be plain, and a partition's labels are joined once for all its metrics. The encoders
take the interpreter from the loop for longer than a scrape may
(`docs/decisions/0015-own-writer-of-metrics-text.md`). The numbers of the process (memory, CPU,
descriptors) are those of prometheus_client's process collector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Final

import trio
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.utils import floatToGoString

from raftmq.node.metrics.families import TURN_S, Ages, Collector, Family, Scrape, Work
from raftmq.node.metrics.node import NODE_METRICS, PEERS, SCRAPE_TURN, SERVER
from raftmq.node.metrics.partitions import GROUPS, PARTITIONS
from raftmq.node.metrics.transactions import TRANSACTIONS
from raftmq.node.metrics.views import VIEWS

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore


COLLECTORS: Final[tuple[Collector, ...]] = (
    NODE_METRICS,
    SERVER,
    PARTITIONS,
    PEERS,
    GROUPS,
    TRANSACTIONS,
    VIEWS,
)


def read(collectors: Sequence[Collector], node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    """Fill the scrape; yields after each short step, and work for a thread where there is some."""
    for collector in collectors:
        for metric in collector.metrics:
            scrape[metric]  # also those without rows are announced
    for collector in collectors:
        yield from collector.collect(node, scrape)


class Exposition:
    """The /metrics page of a node."""

    def __init__(self, node: NodeCore) -> None:
        self._node = node
        self._lock = trio.Lock()
        self._ages = Ages()
        self._process = ProcessCollector(registry=None)
        self.turn_seconds_max = 0.0
        """The longest that reading kept the loop in one turn."""

    async def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type."""
        async with self._lock:
            families = await self._read()
        return await trio.to_thread.run_sync(self._write, families, accept)

    async def _read(self) -> list[Family]:
        scrape = Scrape(self._ages)
        began = perf_counter()
        for work in read(COLLECTORS, self._node, scrape):
            spent = perf_counter() - began
            self.turn_seconds_max = max(self.turn_seconds_max, spent)
            if work is not None:
                await trio.to_thread.run_sync(work)
            elif spent > TURN_S:
                await trio.lowlevel.checkpoint()
            else:
                continue
            began = perf_counter()
        scrape[SCRAPE_TURN].add((), self.turn_seconds_max)
        return list(scrape.families.values())

    def _write(self, families: list[Family], accept: str) -> tuple[bytes, str]:
        encoder, content_type = choose_encoder(accept)
        text = write(families, is_openmetrics="openmetrics" in content_type)
        registry = CollectorRegistry()
        registry.register(self._process)
        return text.encode() + encoder(registry), content_type


_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_PLAIN_MAX: Final = 1_000_000
"""Whole numbers below it are written as they are; Go switches to exponents above."""

Labels = dict[tuple[tuple[str, ...], tuple[str, ...]], str]


def write(families: Iterable[Family], *, is_openmetrics: bool) -> str:
    """The lines of all families, without an end mark."""
    known: Labels = {}
    lines: list[str] = []
    for family in families:
        metric = family.metric
        name = metric.name
        if is_openmetrics and metric.kind == "counter":
            name = name.removesuffix("_total")
        help_text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
        if is_openmetrics:
            help_text = help_text.replace('"', r"\"")
        lines.append(f"# HELP {name} {help_text}\n# TYPE {name} {metric.kind}\n")
        for labels, value in zip(family.labels, family.values, strict=True):
            lines.append(f"{metric.name}{_labels(known, metric.labels, labels)} {_number(value)}\n")
        for labels, buckets, seconds in family.histograms:
            lines += _histogram(known, family, labels, buckets, seconds)
    return "".join(lines)


def _histogram(
    known: Labels,
    family: Family,
    labels: tuple[str, ...],
    buckets: list[tuple[str, float]],
    seconds: float,
) -> Iterable[str]:
    name, names = family.metric.name, family.metric.labels
    for edge, count in buckets:
        text = _labels(known, (*names, "le"), (*labels, edge))
        yield f"{name}_bucket{text} {_number(count)}\n"
    text = _labels(known, names, labels)
    yield f"{name}_count{text} {_number(buckets[-1][1])}\n"
    yield f"{name}_sum{text} {_number(seconds)}\n"


def _labels(known: Labels, names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    text = known.get((names, values))
    if text is None:
        pairs = sorted(zip(names, values, strict=True))
        inner = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
        text = known[names, values] = f"{{{inner}}}"
    return text


def _number(value: float) -> str:
    whole = int(value) if -_PLAIN_MAX < value < _PLAIN_MAX else None
    if whole == value:
        return f"{whole}.0"
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
