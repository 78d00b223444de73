"""Whether bytes of a file are in memory, and bringing them there: `sendfile` of cold ones would
block the loop. A leaf for whatever sends files; reads nothing else and keeps no state.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from raftmq.ports import File

READ_AHEAD_BYTES: Final = 256 << 10

_NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0)


def is_warm(file: File, position: int, size: int) -> bool:
    """True when the last of these bytes is in memory; a cold sendfile would block the loop."""
    descriptor = file.fileno()
    if not _NOWAIT or descriptor < 0 or size == 0:
        return True
    try:
        os.preadv(descriptor, [bytearray(1)], position + size - 1, _NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return True  # this file system cannot tell; it is in memory as tmpfs, or we wait
        raise
    return True


def warm(file: File, position: int, size: int) -> None:
    """Bring bytes into memory; for a worker thread."""
    end = position + size
    while position < end:
        data = file.pread(min(READ_AHEAD_BYTES, end - position), position)
        if not data:
            return  # the send that follows reports the short file
        position += len(data)
