"""Work that no request asks for: retention, the background scrub, reports of failed replicas.

Logs are looked at one after the other, and read in worker threads, so that no turn of the loop is
long. The scrub keeps to its rate and to a small share of one core, whichever is less: batches of a
hundred bytes cost far more to check than their bytes say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from raftmq.counts import ReplicaCounts
from raftmq.logs import structlog
from raftmq.node.data_plane import DataPlane
from raftmq.node.partitions import Partitions
from raftmq.ports import DiskError, DiskFullError
from raftmq.replication.replica import Replica

logger = structlog.get_logger("raftmq.maintenance")

SCRUB_STRETCH_BYTES: Final = 1 << 20
SCRUB_CORE_SHARE_MAX: Final = 0.05
SCRUB_SMALL_BYTES: Final = 64 << 10
SCRUB_PAUSE_S: Final = 0.1
"""The pause after a log with less than that to check: a thousand small ones cost little."""
SCRUB_ROUND_S: Final = 3.0
"""A round through all logs takes at least this long: few small ones are not read continuously."""
RETAIN_TURN: Final = 64
"""Logs that one turn of the loop checks for retention."""
WATCH_INTERVAL_S: Final = 1.0
REOPEN_FREE_BYTES: Final = 16 << 20
"""With less than that free a replica would only stop again."""


async def run_maintenance(plane: DataPlane, partitions: Partitions) -> None:
    """Retain, scrub and watch until cancelled."""
    forever: list[Callable[[], Awaitable[None]]] = [
        lambda: _watch_forever(plane, partitions),
        lambda: _retain_forever(plane, partitions),
    ]
    if plane.config.scrub_bytes_per_s > 0:
        forever.append(lambda: _scrub_forever(plane, partitions.counts))
    await plane.tasks.together(forever)


async def _watch_forever(plane: DataPlane, partitions: Partitions) -> None:
    """Log replicas that stopped; start those again that only lacked space, and delete those that
    could not be deleted before."""
    logged: set[Replica] = set()
    while True:
        failed = [r for r in plane.multiraft.replicas.values() if r.failure is not None]
        logged &= set(failed)
        for replica in failed:
            if replica not in logged:
                logged.add(replica)
                logger.error("replica stopped", group=str(replica.group), reason=replica.failure)
        lacks_space = partitions.lacks_space or any(r.lacks_space for r in failed)
        if lacks_space and plane.free_bytes() >= REOPEN_FREE_BYTES:
            partitions.space_is_back()
        partitions.stop_again()
        await plane.pause(WATCH_INTERVAL_S)


async def _retain_forever(plane: DataPlane, partitions: Partitions) -> None:
    while True:
        await plane.pause(plane.config.retention_check_ms / 1e3)
        replicas = partitions.replicas()
        for first in range(0, len(replicas), RETAIN_TURN):
            some = replicas[first : first + RETAIN_TURN]
            for replica in some:
                _close_aged_segment(replica, plane.clock.wall_ms())
            partitions.retain(some)
            await plane.tasks.sleep(0.0)


def _close_aged_segment(replica: Replica, now_ms: int) -> None:
    """An idle log closes its old segment too; retention never takes the one that is open."""
    if replica.failure is not None:
        return
    try:
        replica.log.roll_if_aged(now_ms)
    except DiskFullError:
        return  # it is tried again at the next check
    except DiskError as error:
        replica.fail(f"could not begin a segment: {error}")


async def _scrub_forever(plane: DataPlane, counts: ReplicaCounts) -> None:
    """Check stored batches in endless rounds; a replica repairs what is damaged."""
    while True:
        clock = plane.clock
        round_end_ms = clock.monotonic_ms() + SCRUB_ROUND_S * 1e3
        for replica in list(plane.multiraft.replicas.values()):
            began_ms = clock.monotonic_ms()
            read_bytes = await _scrub(plane, replica, counts)
            spent_s = (clock.monotonic_ms() - began_ms) / 1e3
            due_s = max(read_bytes / plane.config.scrub_bytes_per_s, spent_s / SCRUB_CORE_SHARE_MAX)
            if read_bytes < SCRUB_SMALL_BYTES:
                await plane.pause(max(due_s, SCRUB_PAUSE_S))
            else:
                await plane.tasks.sleep(due_s)
        left_s = (round_end_ms - clock.monotonic_ms()) / 1e3
        await plane.pause(max(left_s, SCRUB_PAUSE_S))


async def _scrub(plane: DataPlane, replica: Replica, counts: ReplicaCounts) -> int:
    """Check the next stretch of one log; returns how much was read."""
    if replica.failure is not None:
        return 0
    try:
        job = replica.log.scrub_job(min(SCRUB_STRETCH_BYTES, plane.config.scrub_bytes_per_s))
        if job is None:
            return 0
        await plane.tasks.in_thread(job.run)
        found = replica.log.checked(job)
    except DiskError as error:
        if plane.multiraft.replicas.get(replica.group) is replica:  # else closed meanwhile
            replica.fail(f"scrub could not read: {error}")
        return 0
    counts.scrub_read_bytes += job.read_bytes
    counts.scrub_batches += job.sound_count
    counts.scrub_damages += len(found)
    if found and plane.multiraft.replicas.get(replica.group) is replica:
        replica.damage_found()
    return job.read_bytes
