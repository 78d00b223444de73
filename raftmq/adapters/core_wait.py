"""How long this thread was ready to run and the machine had no core for it.

Linux counts that per thread (`/proc/thread-self/schedstat`, its second figure, in nanoseconds). It
tells a loop that is held up by its own work from one that the machine keeps waiting. Where the
kernel does not count, nothing is told: every wait reads as 0.
"""

from __future__ import annotations

import os
from typing import Final

_SCHEDSTAT: Final = "/proc/thread-self/schedstat"
_READ_BYTES: Final = 128


class CoreWait:
    """The waits of the thread that made this; only that thread may ask."""

    def __init__(self, path: str = _SCHEDSTAT) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1  # no such file here: see above

    def waited_ms(self) -> float:
        """Milliseconds so far; never goes back."""
        if self._fd < 0:
            return 0.0
        fields = os.pread(self._fd, _READ_BYTES, 0).split()
        return int(fields[1]) / 1e6 if len(fields) > 1 else 0.0

    def close(self) -> None:
        """Ask no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
