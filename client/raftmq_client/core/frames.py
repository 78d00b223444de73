"""Cuts a byte stream into length-prefixed frames without copying large ones twice.

The driver asks for `buffer()`, receives into it and calls `received(n)`. A frame of known size
gets a buffer of its own, so that a 1 MiB fetch answer is received in place; sizes are judged before
anything is allocated. A few of these buffers are used again once nobody looks into them: new memory
costs a page fault for every 4 KiB, several times what the copy itself does.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import Final

from raftmq.errors import RemoteProtocolError

_SIZE: Final = struct.Struct(">i")
_STAGE_BYTES: Final = 64 * 1024
FRAME_BYTES_MAX: Final = 256 << 20
_KEPT_MIN: Final = 64 * 1024
"""Smaller buffers are not worth keeping."""
_KEPT_MAX: Final = 4 << 20
"""Larger ones are not kept: an idle connection shall not hold much."""
_KEPT_COUNT: Final = 4
_KEPT_STEP: Final = 128 * 1024


class FrameReader:
    """Receive-side framing of one connection."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._stage = bytearray(_STAGE_BYTES)
        self._stage_end = 0
        self._frame: memoryview | None = None  # a large frame, received in place
        self._frame_end = 0
        self._kept: deque[bytearray] = deque()  # of earlier frames, perhaps looked into still

    def buffer(self) -> memoryview:
        """Where the next received bytes go; never empty."""
        if self._frame is not None:
            return self._frame[self._frame_end :]
        return memoryview(self._stage)[self._stage_end :]

    def received(self, count: int) -> list[memoryview]:
        """Account for `count` bytes put into `buffer()`; frames completed by them, in order.

        Raises:
            RemoteProtocolError: a size is negative or above the limit.
        """
        if self._frame is not None:
            self._frame_end += count
            if self._frame_end < len(self._frame):
                return []
            frame, self._frame = self._frame, None
            return [frame.toreadonly()]
        self._stage_end += count
        return self._cut()

    def _cut(self) -> list[memoryview]:
        frames: list[memoryview] = []
        position = 0
        while self._stage_end - position >= 4:
            (size,) = _SIZE.unpack_from(self._stage, position)
            if size < 0 or size > self._frame_bytes_max:
                raise RemoteProtocolError(f"a frame of {size} bytes")
            if self._stage_end - position - 4 < size:
                if size + 4 > len(self._stage) // 2:
                    self._go_direct(position + 4, size)
                    position = self._stage_end
                break
            start = position + 4
            # Copied, since the stage is reused; only frames that fit the stage come here.
            frames.append(memoryview(bytes(memoryview(self._stage)[start : start + size])))
            position = start + size
        rest = self._stage_end - position
        if position and rest:
            self._stage[:rest] = self._stage[position : self._stage_end]
        self._stage_end = rest
        return frames

    def _go_direct(self, start: int, size: int) -> None:
        have = self._stage_end - start
        self._frame = self._memory(size)
        self._frame[:have] = memoryview(self._stage)[start : self._stage_end]
        self._frame_end = have

    def _memory(self, size: int) -> memoryview:
        """So many bytes that nobody else looks into."""
        if not _KEPT_MIN <= size <= _KEPT_MAX:
            return memoryview(bytearray(size))
        for kept in self._kept:
            if len(kept) >= size and _is_free(kept):
                return memoryview(kept)[:size]
        made = bytearray(-(-size // _KEPT_STEP) * _KEPT_STEP)
        if len(self._kept) >= _KEPT_COUNT:
            self._kept.popleft()
        self._kept.append(made)
        return memoryview(made)[:size]


def _is_free(memory: bytearray) -> bool:
    """True when no view of it is held."""
    try:
        memory.append(memory.pop())  # refused while there is one
    except BufferError:
        return False
    return True
