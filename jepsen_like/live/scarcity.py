"""How long nodes and clients stood ready and had no core, as the kernel counts it.

Where a host has too few cores, a cluster is late by no fault of its own. `Scarcity` samples what
each thread of the processes it is told of has waited for a core (`/proc/PID/task/*/schedstat`). Of
a stretch of time, the wait of the thread that waited longest does not count towards a bound: a
thread that runs, or sleeps, excuses nothing. A bound is stretched so, and never dropped: by
`STRETCH_MAX` times itself at most.
"""

from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeAlias

SAMPLE_S: Final = 0.5
STRETCH_MAX: Final = 4.0
"""A bound of 5 s ends after 25 s, whatever the machine lacks."""

Thread: TypeAlias = tuple[int, int]
"""A process and one of its threads."""


def waits_of(pid: int) -> dict[Thread, float]:
    """Seconds that each thread of a process has waited for a core so far; none of one that ended.

    A kernel that does not count has no such file: then nobody waited.
    """
    waits: dict[Thread, float] = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                _ran_ns, waited_ns, _slices = (task / "schedstat").read_text().split()
                waits[pid, int(task.name)] = int(waited_ns) / 1e9
    return waits


class Scarcity:
    """What processes waited for cores, by time."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._waits: list[dict[Thread, float]] = []

    def note(self, at: float, waits: dict[Thread, float]) -> None:
        """Take a sample, later than all before it; a thread that is gone keeps its last one."""
        last = self._waits[-1] if self._waits else {}
        self._at.append(at)
        self._waits.append({**last, **waits})

    def waited_s(self, began: float, ended: float) -> float:
        """How long the thread that waited longest between these moments did; a sample's length
        more or less."""
        before = bisect_right(self._at, began) - 1
        after = min(bisect_left(self._at, ended), len(self._at) - 1)
        if after <= max(before, 0):
            return 0.0
        first = self._waits[max(before, 0)]
        waits = self._waits[after].items()
        longest = max((waited - first.get(thread, 0.0) for thread, waited in waits), default=0.0)
        return min(longest, ended - began)

    def counted_s(self, began: float, ended: float) -> float:
        """What counts of a stretch of time where a bound is judged."""
        seconds = ended - began
        waited = self.waited_s(began, ended)
        return max(seconds - waited, seconds / (1 + STRETCH_MAX))


class Sampler:
    """Samples processes in a thread of its own."""

    def __init__(self, scarcity: Scarcity, pids: Callable[[], Iterable[int]]) -> None:
        self._scarcity = scarcity
        self._pids = pids
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scarcity", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            waits: dict[Thread, float] = {}
            for pid in self._pids():
                waits.update(waits_of(pid))
            self._scarcity.note(time.monotonic(), waits)
            if self._is_over.wait(SAMPLE_S):
                return

    def close(self) -> None:
        """Sample no more."""
        self._is_over.set()
        self._thread.join()


class Patience:
    """A bound on a wait that begins now."""

    def __init__(self, seconds: float, scarcity: Scarcity | None = None) -> None:
        self._seconds = seconds
        self._scarcity = scarcity
        self._began = time.monotonic()

    @property
    def is_over(self) -> bool:
        """True once as much time as there was patience for has counted."""
        now = time.monotonic()
        if now - self._began <= self._seconds:
            return False
        if self._scarcity is None:
            return True
        return self._scarcity.counted_s(self._began, now) > self._seconds
