"""The trio task that lets deadlines pass: sleeps until the earliest one, wakes when it moves up."""

from __future__ import annotations

from typing import Final

import trio

from raftmq.cluster.deadlines import Deadlines
from raftmq.ports import Clock

CALLBACKS_PER_PASS: Final = 128


async def run_deadlines(
    deadlines: Deadlines,
    clock: Clock,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Call back what is due until cancelled."""
    moved_up = trio.Event()

    def wake() -> None:
        moved_up.set()

    deadlines.on_earlier = wake
    task_status.started()
    try:
        while True:
            if deadlines.expire(clock.monotonic_ms(), count_max=CALLBACKS_PER_PASS):
                # A thousand fetches that end at once are a thousand answers: heartbeats go first.
                await trio.lowlevel.checkpoint()
                continue
            if moved_up.is_set():
                moved_up = trio.Event()
            next_ms = deadlines.next_ms
            if next_ms is None:
                await moved_up.wait()
            else:
                with trio.move_on_after(max(0.0, (next_ms - clock.monotonic_ms()) / 1000)):
                    await moved_up.wait()
    finally:
        deadlines.on_earlier = None
