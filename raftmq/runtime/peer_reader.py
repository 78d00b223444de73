"""One incoming stream of a peer: bytes in, whole and checked frames out, in their order.

Small frames are copied out of one buffer, large ones are received into a buffer of their own, which
grows with what comes: what a peer only announces costs nothing beyond `FIRST_BYTES`. All streams
share one budget (`PeerMemory`) of bytes that were received and not handed on yet.

Never sends. What is wrong with a frame ends the stream, and so does a frame that does not come to
its end in time.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Final

import trio
from crc32c import crc32c

from raftmq.runtime.loop import Lane, LoopBudget
from raftmq.runtime.sockets import recv_into, recv_rest
from raftmq.types import NodeId

FRAME_HEADER: Final = struct.Struct(">IIB")  # bytes after this header, crc32c of them, kind
FRAME_BYTES_MAX: Final = 96 << 20
READ_BUFFER_SIZE: Final = 64 << 10
READ_TURN_BYTES: Final = 256 << 10
READ_TURN_S: Final = 0.005

KIND_STORED: Final = 5
KIND_PART: Final = 6
"""A Raft message whose batches were sent from a file; a part of a frame too large for one."""
PART_HEADER: Final = struct.Struct(">B?")  # kind of the whole, whether this is its last part
STORED_HEADER: Final = struct.Struct(">II")  # bytes of the message, crc of the file's after it
WHOLE_BYTES_MAX: Final = 1 << 30
FIRST_BYTES: Final = (1 << 20) + (256 << 10)
"""A buffer begins with at most so much: an append request of the usual greatest size fits, and is
received without a copy."""
FRAME_S: Final = 30.0
FRAME_BYTES_PER_S: Final = 1 << 20
"""A frame, or the next part of a large one, has so long, and a second more for so many bytes."""


class PeerRefusedError(Exception):
    """The two sides cannot talk; the message names what differs."""


class PeerMemoryError(PeerRefusedError):
    """Its incomplete frames are too large for what all streams may hold together."""


class PeerMemory:
    """Bytes of frames that have not come to their end, or wait for their turn, of all streams.

    When they are too many, the stream that holds most of them ends: its peer dials anew and sends
    again what matters, and all others go on.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: dict[FrameReader, int] = {}
        self.used_bytes = 0

    def take(self, reader: FrameReader, size: int) -> None:
        """Charge a stream.

        Raises:
            PeerMemoryError: it holds more than any other, and there is no room.
        """
        held = self._held.get(reader, 0) + size
        while self.used_bytes + size > self._bytes_max:
            largest = max(self._held, key=self._held.__getitem__, default=reader)
            if largest is reader or self._held[largest] < held:
                raise PeerMemoryError(
                    f"frames that are not complete hold {self.used_bytes} bytes, and another "
                    f"{size} are too many (peer_memory_bytes_max is {self._bytes_max})"
                )
            self.give_back(largest)
            largest.refuse(PeerMemoryError("its frames hold more memory than those of others"))
        self._held[reader] = held
        self.used_bytes += size

    def give_back(self, reader: FrameReader) -> None:
        """A stream holds nothing any more."""
        self.used_bytes -= self._held.pop(reader, 0)


class FrameReader:
    """Reads one stream until it ends.

    Args:
        sender: who is at the other end.
        on_frame: takes kind and content of each frame.
        is_blocked: asked for each frame: true while what comes from there is not to be heard.
        budget: what large frames are charged to.
        memory: what bytes of incomplete frames are charged to.
        takes_parts: a frame too large for one may come here, in several.
    """

    __slots__ = (
        "_budget",
        "_buffer",
        "_error",
        "_filled",
        "_has_gap",
        "_is_blocked",
        "_is_over",
        "_memory",
        "_on_frame",
        "_sender",
        "_sock",
        "_start",
        "_takes_parts",
        "_whole",
        "_whole_kind",
        "has_heard",
    )

    def __init__(
        self,
        sock: socket.socket,
        sender: NodeId,
        on_frame: Callable[[int, memoryview], None],
        *,
        is_blocked: Callable[[], bool],
        budget: LoopBudget,
        memory: PeerMemory,
        takes_parts: bool = False,
    ) -> None:
        self._sock = sock
        self._sender = sender
        self._on_frame = on_frame
        self._is_blocked = is_blocked
        self._budget = budget
        self._buffer = memoryview(bytearray(READ_BUFFER_SIZE))
        self._start = self._filled = 0  # of what was received and not handed on yet
        self._memory = memory
        self._takes_parts = takes_parts
        self._whole: bytearray | None = None  # the parts of a frame too large for one, so far
        self._whole_kind = -1
        self.has_heard = False
        """A sound frame has come."""
        self._has_gap = False  # frames were not heard
        self._is_over = False
        self._error: Exception | None = None

    async def run(self) -> None:
        """Hand on frames; returns where some are missing: the peer shall know, and begin anew.

        Raises:
            EOFError: the other side ended.
            OSError: the connection failed.
            PeerRefusedError, RemoteProtocolError: a frame that cannot be.
            trio.TooSlowError: a frame did not come to its end.
            MemoryError: there is no room for it.
            Exception: whatever the node raised when it took one.
        """
        try:
            await self._run()
        except EOFError:
            if self._error is not None:
                raise self._error from None  # it is why the stream ended
            raise
        finally:
            self._error = None  # its traceback holds this reader, and with it half a frame
            self._memory.give_back(self)

    async def _run(self) -> None:
        turn_bytes = 0
        while True:
            turn_bytes += await self._receive()
            if self._error is not None:
                raise self._error
            if turn_bytes >= READ_TURN_BYTES:
                # A stream that is never empty must not keep ticks and heartbeats waiting.
                await trio.lowlevel.checkpoint()
                turn_bytes = 0
            turn_bytes += await self._hand_on_all()
            if self._is_over:
                return

    def refuse(self, error: PeerRefusedError) -> None:
        """End the stream."""
        self._error = error
        with suppress(OSError):  # the peer was quicker
            self._sock.shutdown(socket.SHUT_RDWR)

    async def _receive(self) -> int:
        try:
            count = self._sock.recv_into(self._buffer[self._filled :])
        except BlockingIOError:
            is_begun = self._filled or self._whole is not None
            with trio.fail_after(FRAME_S if is_begun else math.inf):
                count = await recv_into(self._sock, self._buffer[self._filled :])
        if count == 0:
            raise EOFError
        self._filled += count
        return count

    # ---- frames ----

    async def _hand_on_all(self) -> int:
        """Hand on each whole frame; how many bytes of large ones were received meanwhile."""
        began = perf_counter()
        large_bytes = 0
        while not self._is_over:
            frame = self._next_small()
            if frame is None:
                frame = await self._next_large()
                if frame is None:
                    break
                size = len(frame[2])
                large_bytes += size
                if not self._budget.try_take(size, Lane.PEERS):
                    await self._budget.take(size, Lane.PEERS)
                    began = perf_counter()
            self._hand_on(*frame)
            if frame[0] == KIND_PART or len(frame[2]) > READ_BUFFER_SIZE - FRAME_HEADER.size:
                self._let_go()
            if perf_counter() - began > READ_TURN_S:
                # Thousands of small frames may wait: votes of all groups, after an outage.
                await trio.lowlevel.checkpoint()
                began = perf_counter()
        return large_bytes

    def _next_small(self) -> tuple[int, int, memoryview] | None:
        """Kind, checksum and content of the frame at the front, if all of it is in the buffer."""
        start = self._start
        if self._filled - start >= FRAME_HEADER.size:
            size, checksum, kind = FRAME_HEADER.unpack_from(self._buffer, start)
            body = start + FRAME_HEADER.size
            if body + size <= self._filled:
                self._start = body + size
                return kind, checksum, memoryview(bytes(self._buffer[body : body + size]))
        if start:
            rest = bytes(self._buffer[start : self._filled])
            self._buffer[: len(rest)] = rest
            self._start, self._filled = 0, len(rest)
        return None

    async def _next_large(self) -> tuple[int, int, memoryview] | None:
        """The frame at the front if it does not fit the buffer."""
        filled = self._filled
        if filled < FRAME_HEADER.size:
            return None
        size, checksum, kind = FRAME_HEADER.unpack_from(self._buffer)
        if size > FRAME_BYTES_MAX:
            raise PeerRefusedError(f"a frame of {size} bytes from node {self._sender}")
        if FRAME_HEADER.size + size <= READ_BUFFER_SIZE:
            return None  # wait for the rest, in this buffer
        with trio.fail_after(FRAME_S + size / FRAME_BYTES_PER_S):
            content = await self._receive_large(size, filled)
        if self._error is not None:
            raise self._error
        return kind, checksum, memoryview(content)

    async def _receive_large(self, size: int, filled: int) -> bytearray:
        """Content of `size` bytes, of which the buffer holds the first."""
        room = min(size, FIRST_BYTES)
        self._memory.take(self, room)
        content = bytearray(room)
        have = filled - FRAME_HEADER.size
        content[:have] = self._buffer[FRAME_HEADER.size : filled]
        self._filled = 0
        await recv_rest(self._sock, memoryview(content)[have:])
        while len(content) < size:
            have = len(content)
            more = min(have, size - have)
            self._memory.take(self, more)
            content.extend(bytes(more))
            await recv_rest(self._sock, memoryview(content)[have:])
        return content

    def _let_go(self) -> None:
        """A large frame was handed on; what is left are the parts of a larger one."""
        self._memory.give_back(self)
        if self._whole is not None:
            self._memory.take(self, len(self._whole))

    def _hand_on(self, kind: int, checksum: int, content: memoryview) -> None:
        """Check a frame and give it to the node.

        Raises:
            PeerRefusedError, RemoteProtocolError: a frame that cannot be.
        """
        if self._is_blocked():
            self._has_gap = True
            return
        if self._has_gap:
            self._is_over = True
            return
        if kind == KIND_STORED:
            content = _check_stored(content, checksum, self._sender)
        elif crc32c(content) != checksum:
            raise PeerRefusedError(f"a damaged frame from node {self._sender}")
        elif kind == KIND_PART:
            whole = self._join(content)
            if whole is None:
                self.has_heard = True
                return
            kind, content = whole
        self._on_frame(kind, content.toreadonly())
        self.has_heard = True

    def _join(self, payload: memoryview) -> tuple[int, memoryview] | None:
        """Kind and content of a frame that came in parts, once the last one is there.

        Raises:
            PeerRefusedError: it is too large, or no part.
        """
        if len(payload) < PART_HEADER.size or not self._takes_parts:
            raise PeerRefusedError(f"a part from node {self._sender} that cannot be")
        kind, is_last = PART_HEADER.unpack_from(payload)
        if self._whole is None:
            self._whole, self._whole_kind = bytearray(), kind
        if kind != self._whole_kind:
            raise PeerRefusedError(f"parts of two frames from node {self._sender}")
        size = len(payload) - PART_HEADER.size
        if len(self._whole) + size > WHOLE_BYTES_MAX:
            raise PeerRefusedError(f"parts of more than {WHOLE_BYTES_MAX} bytes")
        self._memory.take(self, size)
        self._whole += payload[PART_HEADER.size :]
        if not is_last:
            return None
        whole, self._whole = memoryview(self._whole), None
        return kind, whole


def _check_stored(payload: memoryview, checksum: int, sender: NodeId) -> memoryview:
    """The message in a frame whose batches came from a file.

    Raises:
        PeerRefusedError: it was damaged on the way.
    """
    size, rest_checksum = 0, 0
    if len(payload) >= STORED_HEADER.size:
        size, rest_checksum = STORED_HEADER.unpack_from(payload)
    summed_end = STORED_HEADER.size + size
    if (
        summed_end > len(payload)
        or crc32c(payload[:summed_end]) != checksum
        or crc32c(payload[summed_end:]) != rest_checksum
    ):
        raise PeerRefusedError(f"a damaged stored frame from node {sender}")
    return payload[STORED_HEADER.size :]
