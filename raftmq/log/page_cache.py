"""Whether bytes of a file are in memory, and bringing them there: `sendfile` of cold ones would
block the loop. A leaf for whatever sends files; keeps no state.
"""

from __future__ import annotations

from typing import Final

from raftmq.ports import File

READ_AHEAD_BYTES: Final = 256 << 10


def is_warm(file: File, position: int, size: int) -> bool:
    """True when these bytes are in memory; a cold sendfile would block the loop."""
    return size == 0 or file.is_cached(position, size)


def warm(file: File, position: int, size: int) -> None:
    """Bring bytes into memory; for a worker thread."""
    end = position + size
    while position < end:
        data = file.pread(min(READ_AHEAD_BYTES, end - position), position)
        if not data:
            return  # the send that follows reports the short file
        position += len(data)
