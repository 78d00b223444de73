"""The machine's clocks behind `ports.Clock`, and how long a thread had a core.

Monotonic for intervals, wall for timestamps only. Linux counts per thread how long it ran and how
long it was ready and had no core (`/proc/thread-self/schedstat`, its first two figures, in
nanoseconds), and what a hypervisor took per core (`/proc/stat`, `steal`). They tell a loop that is
held up by its own work from one that is kept waiting. Where the kernel does not count, every time
reads as 0.
"""

from __future__ import annotations

import os
import time
from typing import Final, NamedTuple


class RealClock:
    """Reads the operating system's clocks."""

    def monotonic_ms(self) -> float:
        """Milliseconds since some start; never goes back."""
        return time.monotonic() * 1e3

    def wall_ms(self) -> int:
        """Milliseconds since the epoch; may jump."""
        return time.time_ns() // 1_000_000


_SCHEDSTAT: Final = "/proc/thread-self/schedstat"
_STAT: Final = "/proc/stat"
_READ_BYTES: Final = 128
_STOLEN_FIELD: Final = 8
_STAT_TICK_MS: Final = 1e3 / os.sysconf("SC_CLK_TCK")


class CoreTimes(NamedTuple):
    """Milliseconds that a thread ran, and that it was ready and had no core."""

    ran_ms: float = 0.0
    waited_ms: float = 0.0


class CoreWait:
    """The times of the thread that made this; only that thread may ask."""

    def __init__(self, schedstat: str = _SCHEDSTAT, stat: str = _STAT) -> None:
        self._own = _open(schedstat)
        self._machine = _open(stat)
        self._cores = os.cpu_count() or 1

    def times(self) -> CoreTimes:
        """What this thread had so far; never goes back."""
        fields = _fields(self._own)
        if len(fields) <= 1:
            return CoreTimes()
        return CoreTimes(int(fields[0]) / 1e6, int(fields[1]) / 1e6)

    def stolen_ms(self) -> float:
        """Milliseconds so far that the host kept its cores to itself: the mean over all cores.

        The kernel makes up the whole file for each reading (7 us with two cores, more with many).
        """
        fields = _fields(self._machine)
        if len(fields) <= _STOLEN_FIELD:
            return 0.0
        return int(fields[_STOLEN_FIELD]) * _STAT_TICK_MS / self._cores

    def close(self) -> None:
        """Ask no more."""
        for fd in (self._own, self._machine):
            if fd >= 0:
                os.close(fd)
        self._own = self._machine = -1


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1  # no such file here: see above


def _fields(fd: int) -> list[bytes]:
    return os.pread(fd, _READ_BYTES, 0).split() if fd >= 0 else []
