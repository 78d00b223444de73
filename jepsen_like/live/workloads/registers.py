"""Committed offsets as registers: clients without a membership write and read one group's offsets.

Both client libraries send a commit again whose answer was lost, and a broker cannot know it for the
same one: each is a write. So a history says how often the request of a commit left.

Every write is of a value of its own, so a read tells which write it saw; the checkers search for an
order in which each read sees the last write before it.
"""

from __future__ import annotations

import itertools
import random
from typing import Final

from jepsen_like.live.workloads.base import Around, Crowd, HungError
from jepsen_like.live.workloads.group import commit, committed
from jepsen_like.live.workloads.members import GroupConsumer, group_consumer

GROUP: Final = "registers"
CLIENTS: Final = 3
REGISTERS: Final = 2
PAUSE_S: Final = (0.1, 0.6)
WRITES: Final = 0.5


class Registers(Crowd):
    """Clients that commit and ask."""

    def __init__(self, around: Around) -> None:
        super().__init__(around, "register", CLIENTS)
        self._values = itertools.count(1)

    def _run(self, number: int) -> None:
        around = self._around
        rng = random.Random(around.plan.seed * 55 + number)
        keys = around.plan.keys[:REGISTERS]
        process = around.process()
        consumer = self._client(number)
        try:
            while not around.stop.wait(rng.uniform(*PAUSE_S)):
                key = rng.choice(keys)
                try:
                    if rng.random() < WRITES:
                        offsets = {key: next(self._values)}
                        certain = commit(around, process, consumer, GROUP, offsets, -1)
                    else:
                        certain = committed(around, process, consumer, GROUP, [key]) is not None
                except HungError:
                    certain = False
                    consumer = self._client(number)
                if not certain:
                    process = around.process()  # the old one may still be at it
        finally:
            consumer.close()

    def _client(self, number: int) -> GroupConsumer:
        return group_consumer(self._around, number, GROUP, f"register-{number}", is_member=False)
