"""Cuts a byte stream into length-prefixed frames without copying large ones twice.

The driver asks for `buffer()`, receives into it and calls `received(n)`. A frame of known size
gets a buffer of exactly that size, so that a 1 MiB fetch answer is received in place; sizes are
judged before anything is allocated.
"""

from __future__ import annotations

import struct
from typing import Final

from raftmq.errors import RemoteProtocolError

_SIZE: Final = struct.Struct(">i")
_STAGE_BYTES: Final = 64 * 1024
FRAME_BYTES_MAX: Final = 256 << 20


class FrameReader:
    """Receive-side framing of one connection."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._stage = bytearray(_STAGE_BYTES)
        self._stage_end = 0
        self._frame: bytearray | None = None  # a large frame, received in place
        self._frame_end = 0

    def buffer(self) -> memoryview:
        """Where the next received bytes go; never empty."""
        if self._frame is not None:
            return memoryview(self._frame)[self._frame_end :]
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
            return [memoryview(frame).toreadonly()]
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
        self._frame = bytearray(size)
        self._frame[:have] = self._stage[start : self._stage_end]
        self._frame_end = have
