"""One scrape: read the node in short turns on the loop, write the text in a worker thread.

A scrape of thousands of partitions must not delay a heartbeat: reading goes on for at most
`TURN_S`, then the loop turns. Scrapes follow one another; a second scraper waits. The text is in
the format that the scraper asks for (`text.py`); the numbers of the process (memory, CPU,
descriptors) are those of prometheus_client's process collector.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import trio
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from raftmq.node.metrics.ages import Ages
from raftmq.node.metrics.collectors import COLLECTORS, read
from raftmq.node.metrics.families import TURN_S, Family, Scrape
from raftmq.node.metrics.node_metrics import SCRAPE_TURN
from raftmq.node.metrics.text import write

if TYPE_CHECKING:
    from raftmq.node.composition import NodeCore


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
