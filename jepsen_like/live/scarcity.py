"""How long nodes and clients stood ready and had no core, and what they took, as the kernel counts.

Where a host has too few cores, a cluster is late by no fault of its own. `Scarcity` samples what
each thread of the processes it is told of has waited for a core (`/proc/PID/task/*/schedstat`). Of
a stretch of time, the wait of the thread that waited longest does not count towards a bound: a
thread that runs, or sleeps, excuses nothing. A bound is stretched so, and never dropped: by
`STRETCH_MAX` times itself at most. What each kind of process ran (`/proc/PID/stat`) tells who took
the cores.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

SAMPLE_S: Final = 0.5
STRETCH_MAX: Final = 4.0
"""A bound of 5 s ends after 25 s, whatever the machine lacks."""

CLIENTS: Final = "clients"
NODES: Final = "nodes"
LINKS: Final = "links"
OWN: Final = "the run"
OWN_KINDS: Final = frozenset({LINKS, OWN})
"""Kinds of processes that are neither nodes nor clients."""

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


def ran_s(pid: int) -> float | None:
    """Seconds of a core that a process took so far, with its threads that have ended; None once it
    is gone."""
    try:
        # The name, which stands second and in parentheses, may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


class Scarcity:
    """What processes waited for cores and what they took, by time."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._waits: list[dict[Thread, float]] = []
        self._ran: list[dict[str, float]] = []

    def note(
        self, at: float, waits: dict[Thread, float], ran: Mapping[str, float] | None = None
    ) -> None:
        """Take a sample, later than all before it; a thread that is gone keeps its last one.

        Args:
            waits: seconds that each thread has waited for a core so far.
            ran: seconds of a core that each kind of process has taken so far.
        """
        last = self._waits[-1] if self._waits else {}
        self._at.append(at)
        self._waits.append({**last, **waits})
        self._ran.append(dict(ran or {}))

    def forget(self, before: float) -> None:
        """Drop the samples from before a moment, but for the last of them."""
        gone = max(bisect_right(self._at, before) - 1, 0)
        del self._at[:gone], self._waits[:gone], self._ran[:gone]

    def cores(self, began: float, ended: float) -> dict[str, float]:
        """How many cores each kind of process took on average between these moments; a sample's
        length more or less. Empty where nothing was sampled."""
        before = max(bisect_right(self._at, began) - 1, 0)
        after = min(bisect_left(self._at, ended), len(self._at) - 1)
        if after <= before:
            return {}
        seconds = self._at[after] - self._at[before]
        first, last = self._ran[before], self._ran[after]
        return {kind: (last[kind] - first.get(kind, 0.0)) / seconds for kind in sorted(last)}

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

    def __init__(self, scarcity: Scarcity, kinds: Callable[[], Mapping[int, str]]) -> None:
        """`kinds` tells which processes there are now, and what each is; those of `OWN_KINDS` may
        wait for cores without an excuse to anybody."""
        self._scarcity = scarcity
        self._kinds = kinds
        self._ran: defaultdict[str, float] = defaultdict(float)
        self._last: dict[int, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scarcity", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            waits: dict[Thread, float] = {}
            for pid, kind in self._kinds().items():
                if kind not in OWN_KINDS:
                    waits.update(waits_of(pid))
                self._count(pid, kind)
            self._scarcity.note(time.monotonic(), waits, self._ran)
            if self._is_over.wait(SAMPLE_S):
                return

    def _count(self, pid: int, kind: str) -> None:
        ran = ran_s(pid)
        if ran is not None:
            before = self._last.get(pid, 0.0)
            # A process of the same number that ran for less is another one.
            self._ran[kind] += ran - before if ran >= before else ran
            self._last[pid] = ran

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
