"""All areas of a scrape, read in turns that somebody else paces: a process, or a simulation.

Knows no loop and no thread. Whoever goes through `read` lets others have the loop between its
steps, and runs the work that a step hands out in a worker thread before the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from raftmq.node.metrics.families import Area, Scrape, Work
from raftmq.node.metrics.groups import GROUPS
from raftmq.node.metrics.partitions import PARTITIONS
from raftmq.node.metrics.peers import PEERS
from raftmq.node.metrics.server import SERVER
from raftmq.node.metrics.whole import WHOLE

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore

AREAS: Final[tuple[Area, ...]] = (WHOLE, SERVER, PARTITIONS, PEERS, GROUPS)


def read(areas: Sequence[Area], node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    """Fill the scrape; yields after each short step, and work for a thread where there is some."""
    for area in areas:
        for metric in area.metrics:
            scrape[metric]  # also those without rows are announced
    for area in areas:
        yield from area.collect(node, scrape)
