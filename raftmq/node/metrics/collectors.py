"""All collectors of a scrape, read in turns that the caller paces: a process, or a simulation.

Knows no loop and no thread. The caller of `read` gives the loop to others between its steps, and
runs the work that a step hands out in a worker thread before the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from raftmq.node.metrics.families import Collector, Scrape, Work
from raftmq.node.metrics.groups import GROUPS
from raftmq.node.metrics.node_metrics import NODE_METRICS, PEERS
from raftmq.node.metrics.partitions import PARTITIONS
from raftmq.node.metrics.server import SERVER

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore

COLLECTORS: Final[tuple[Collector, ...]] = (NODE_METRICS, SERVER, PARTITIONS, PEERS, GROUPS)


def read(collectors: Sequence[Collector], node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    """Fill the scrape; yields after each short step, and work for a thread where there is some."""
    for collector in collectors:
        for metric in collector.metrics:
            scrape[metric]  # also those without rows are announced
    for collector in collectors:
        yield from collector.collect(node, scrape)
