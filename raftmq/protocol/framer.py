"""Cuts a byte stream into Kafka's frames: four bytes of size, then that many bytes.

Owns the bytes not yet handed out, never more than one incomplete frame plus what arrived with it.
Sans-IO; for clients and tests. A server reads each size itself and receives into a buffer of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from raftmq.errors import RemoteProtocolError
from raftmq.types import Buffer

_SIZE: Final = struct.Struct(">i")
SIZE_BYTES: Final = 4


def check_frame_size(size: int, size_max: int) -> int:
    """The size, if it may be.

    Raises:
        RemoteProtocolError: negative or above the limit.
    """
    if not 0 <= size <= size_max:
        raise RemoteProtocolError(f"a frame of {size} bytes; the limit is {size_max}")
    return size


def frame(*parts: Buffer) -> bytes:
    """One frame of these parts, its size first."""
    return b"".join((_SIZE.pack(sum(len(part) for part in parts)), *parts))


class Framer:
    """Bytes in, frames out. After an error the stream is lost: close it."""

    def __init__(self, *, size_max: int = 100 << 20) -> None:
        self._size_max = size_max
        self._pending = bytearray()

    def feed(self, data: Buffer) -> None:
        """Add received bytes."""
        self._pending += data

    def frames(self) -> Iterator[bytes]:
        """Yield the complete frames, without their sizes.

        Raises:
            RemoteProtocolError: a size is negative or above the limit.
        """
        pending = self._pending
        start = 0
        try:
            while len(pending) - start >= SIZE_BYTES:
                size = check_frame_size(_SIZE.unpack_from(pending, start)[0], self._size_max)
                end = start + SIZE_BYTES + size
                if len(pending) < end:
                    break
                with memoryview(pending) as view:
                    found = bytes(view[start + SIZE_BYTES : end])
                start = end
                yield found
        finally:
            del pending[:start]

    @property
    def pending_bytes(self) -> int:
        """Bytes received and not yet handed out."""
        return len(self._pending)
