"""Work that no request asks for: retention and the background scrub.

Both look at one log after the other with checkpoints between, so that no turn of the loop is long.
"""

from __future__ import annotations

from typing import Final

import trio

from raftmq.logs import structlog
from raftmq.node.data_plane import DataPlane
from raftmq.node.partitions import Partitions
from raftmq.ports import DiskError

logger = structlog.get_logger("raftmq.upkeep")

SCRUB_INTERVAL_S: Final = 0.25


async def run_upkeep(plane: DataPlane, partitions: Partitions) -> None:
    """Retain and scrub until cancelled."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_retain_forever, plane, partitions)
        if plane.config.scrub_bytes_per_s > 0:
            nursery.start_soon(_scrub_forever, plane, partitions)


async def _retain_forever(plane: DataPlane, partitions: Partitions) -> None:
    while True:
        await trio.sleep(plane.config.retention_check_ms / 1e3)
        partitions.retain()


async def _scrub_forever(plane: DataPlane, partitions: Partitions) -> None:
    """Check stored batches at the configured rate; what is damaged is repaired by its replica."""
    budget = int(plane.config.scrub_bytes_per_s * SCRUB_INTERVAL_S)
    while True:
        for replica in partitions.replicas():
            if replica.failure is not None:
                continue
            try:
                findings = replica.log.scrub(budget)
            except DiskError as error:
                replica.fail(f"scrub could not read: {error}")
                continue
            for finding in findings:
                logger.warning("damage found", group=str(replica.group), finding=str(finding))
            await trio.sleep(SCRUB_INTERVAL_S)
        await trio.sleep(SCRUB_INTERVAL_S)
