"""Stalls of a node's loop that a busy machine explains, though the loop itself had a core.

A loop that is late may have waited for the interpreter, and the thread that had it for a core: the
node counts its loop's own waits alone. So the waits of a node's other threads are sampled, and what
the most starved of them waited within a stall is taken off, as live runs do it (`scarcity.py`).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Final, cast

from attrs import fields, frozen

from jepsen_like.live.scarcity import Scarcity, waits_of
from raftmq.config import NodeConfig
from raftmq.node.loop_watch import STALL_SHARE

SAMPLE_S: Final = 0.05
"""A stall is a tenth of a second or so, and the waits of a sample more on either side count."""
KEPT_S: Final = 30.0
"""Stalls are asked about within seconds."""
_DEFAULTS: Final = fields(NodeConfig)
_ELECTION_MS: Final = cast(int, _DEFAULTS.tick_ms.default) * cast(
    int, _DEFAULTS.election_ticks.default
)
LIMIT_MS: Final = STALL_SHARE * _ELECTION_MS
"""A tick that is later is a stall."""
_FIELD: Final = re.compile(r"(\w+)=(\S+)")


@frozen(slots=True)
class Stall:
    """One that a node logged, in milliseconds, and when it was over, by the wall clock."""

    at: float
    late_ms: float
    ran_ms: float
    no_core_ms: float
    """Of the loop's own thread, and what the host took."""
    had_core: bool


def read_stall(line: str) -> Stall | None:
    """A line of a node's log; None where it is about something else."""
    if "loop stalled" not in line:
        return None
    told = dict(_FIELD.findall(line))
    if "late_ms" not in told:
        return None  # it says how many lines were left out
    return Stall(
        datetime.fromisoformat(line.split(" ", 1)[0]).timestamp(),
        float(told["late_ms"]),
        float(told["ran_ms"]),
        float(told["without_core_ms"]) + float(told["stolen_ms"]),
        told["had_core"] == "True",
    )


class OtherThreads:
    """What the threads of nodes beside their loops wait for cores, sampled by a thread."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """`pids` by node."""
        self._pids = pids
        self._scarcity = {node: Scarcity() for node in pids}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="other-threads", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self.sample()

    def sample(self) -> None:
        """Look once."""
        for node, pid in self._pids.items():
            waits = {thread: s for thread, s in waits_of(pid).items() if thread != (pid, pid)}
            scarcity, now = self._scarcity[node], time.time()
            scarcity.note(now, waits)
            scarcity.forget(now - KEPT_S)

    def explain(self, node: int, stall: Stall) -> bool:
        """True where a node's stall would have been none, had its other threads had a core too; a
        loop that ran for as long as that itself did too much in one turn."""
        if stall.ran_ms > LIMIT_MS:
            return False
        began = stall.at - stall.late_ms / 1e3
        waited_ms = 1e3 * self._scarcity[node].waited_s(began, stall.at)
        return stall.late_ms - stall.no_core_ms - waited_ms <= LIMIT_MS

    def close(self) -> None:
        """Sample no more."""
        self._is_over.set()
        self._thread.join()
