"""The trio task that lets deadlines pass: sleeps until the earliest one, wakes when it moves up."""

from __future__ import annotations

import math
from typing import Final

import trio

from raftmq.partition.deadlines import Deadlines
from raftmq.ports import Clock
from raftmq.runtime.nap import Nap

CALLBACKS_PER_PASS: Final = 128


async def run_deadlines(
    deadlines: Deadlines,
    clock: Clock,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call back what is due until cancelled."""
    nap = Nap()
    deadlines.on_earlier = nap.wake
    task_status.started()
    try:
        while True:
            if deadlines.expire(clock.monotonic_ms(), count_max=CALLBACKS_PER_PASS):
                # A thousand fetches that end at once are a thousand answers: heartbeats go first.
                await trio.lowlevel.checkpoint()
                continue
            next_ms = deadlines.next_ms
            left_s = math.inf if next_ms is None else (next_ms - clock.monotonic_ms()) / 1e3
            await nap.until(trio.current_time() + left_s)
    finally:
        deadlines.on_earlier = None
