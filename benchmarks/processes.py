"""What the kernel knows of server processes: CPU time, memory, bytes written. Reads /proc only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from attrs import frozen

_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
MIB: Final = 1 << 20


@frozen
class Usage:
    """One process at one moment."""

    cpu_s: float
    rss_bytes: int
    pss_bytes: int
    """Memory with shared pages divided among those who share them; 0 where it may not be read."""
    written_bytes: int
    """What it caused to be written to disk; 0 where it may not be read."""


def usage(pid: int) -> Usage:
    """One process with the threads it has and had.

    Raises:
        ProcessLookupError: it ended.
    """
    folder = Path(f"/proc/{pid}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        status = (folder / "status").read_text()
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} ended") from None
    return Usage(
        cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS_PER_S,
        rss_bytes=_kib(status, "VmRSS:") << 10,
        pss_bytes=_kib(_readable(folder / "smaps_rollup"), "Pss:") << 10,
        written_bytes=_field(_readable(folder / "io"), "write_bytes:"),
    )


def _readable(path: Path) -> str:
    try:
        return path.read_text()
    except (PermissionError, FileNotFoundError):
        return ""


def _field(text: str, name: str) -> int:
    for line in text.splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0


_kib = _field


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of these processes so far."""
    return sum(usage(pid).cpu_s for pid in pids)


class CpuWatch:
    """CPU seconds of servers and of this process between two moments."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._servers = cpu_s(self._pids)
        self._client = time.process_time()
        self._started = time.perf_counter()

    @property
    def servers_s(self) -> float:
        """CPU seconds of all servers since the start."""
        return cpu_s(self._pids) - self._servers

    @property
    def client_cores(self) -> float:
        """How many cores the benchmark's own process used: near 1.0 it is the limit."""
        elapsed = time.perf_counter() - self._started
        return (time.process_time() - self._client) / elapsed if elapsed > 0 else 0.0
