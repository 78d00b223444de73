"""One incoming stream of a peer: bytes in, whole and checked frames out, in their order.

Small frames are copied out of one buffer, large ones are received into a buffer of their own. A
stream on which nothing urgent comes can be read at certain moments only (`look`): a wake-up of an
idle node costs more than what it is for, and beats of nodes at rest come twenty times a second from
every peer. Who was not heard at two such moments in a row is listened to until something comes.

Never sends. What is wrong with a frame ends the stream.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from time import perf_counter
from typing import Final

import trio
from crc32c import crc32c

from raftmq.adapters.peer_socket import recv_into, recv_rest
from raftmq.errors import RemoteProtocolError
from raftmq.nap import Sleeper
from raftmq.turns import Lane, Turns
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


class PeerRefusedError(Exception):
    """The two sides cannot talk; the message names what differs."""


class FrameReader:
    """Reads one stream until it ends.

    Args:
        sender: who is at the other end.
        on_frame: takes kind and content of each frame.
        is_blocked: asked for each frame: true while what comes from there is not to be heard.
        may_rest: asked before each wait: true when `look` will be called soon.
        turns: what large frames are charged to.
    """

    __slots__ = (
        "_buffer",
        "_error",
        "_filled",
        "_has_gap",
        "_is_blocked",
        "_is_over",
        "_may_rest",
        "_misses",
        "_on_frame",
        "_parts",
        "_resting",
        "_sender",
        "_sock",
        "_start",
        "_turns",
    )

    def __init__(
        self,
        sock: socket.socket,
        sender: NodeId,
        on_frame: Callable[[int, memoryview], None],
        *,
        is_blocked: Callable[[], bool],
        may_rest: Callable[[], bool],
        turns: Turns,
    ) -> None:
        self._sock = sock
        self._sender = sender
        self._on_frame = on_frame
        self._is_blocked = is_blocked
        self._may_rest = may_rest
        self._turns = turns
        self._buffer = memoryview(bytearray(READ_BUFFER_SIZE))
        self._start = self._filled = 0  # of what was received and not handed on yet
        self._parts: list[memoryview] = []
        self._has_gap = False  # frames were not heard
        self._is_over = False
        self._resting = Sleeper()
        self._misses = 0  # looks at which nothing was there, since something was
        self._error: PeerRefusedError | RemoteProtocolError | None = None

    async def run(self) -> None:
        """Hand on frames; returns where some are missing: the peer shall know, and begin anew.

        Raises:
            EOFError: the other side ended.
            OSError: the connection failed.
            PeerRefusedError, RemoteProtocolError: a frame that cannot be.
        """
        turn_bytes = 0
        while True:
            if self._may_rest():
                await self._until_looked_at()
            else:
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

    async def _receive(self) -> int:
        count = await recv_into(self._sock, self._buffer[self._filled :])
        self._filled += count
        self._misses = 0
        return count

    # ---- at certain moments ----

    def look(self) -> None:
        """Hand on what came since the last look; listen if that was nothing twice.

        Once means little: beats that come at about the time of the looks are there at one of them
        twice and at the next one not.
        """
        if not self._resting.is_asleep:
            return
        try:
            count = self._sock.recv_into(self._buffer[self._filled :])
        except OSError:  # nothing is there, or it failed, which the task meets again
            count = 0
        self._filled += count
        self._misses = 0 if count else self._misses + 1
        try:
            while count and (frame := self._next_small()) is not None:
                self._hand_on(*frame)
        except (PeerRefusedError, RemoteProtocolError) as error:
            self._error = error
        if self._misses > 1 or self._filled or self._is_over or self._error is not None:
            self.attend()

    def attend(self) -> None:
        """Listen from now on."""
        self._resting.wake()

    async def _until_looked_at(self) -> None:
        """Wait until `look` leaves something to do, then for what comes."""
        await self._resting.sleep()
        if self._error is None and not self._is_over and self._filled < READ_BUFFER_SIZE:
            await self._receive()

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
                if not self._turns.try_take(size, Lane.PEERS):
                    await self._turns.take(size, Lane.PEERS)
                    began = perf_counter()
            self._hand_on(*frame)
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
        content = memoryview(bytearray(size))
        have = filled - FRAME_HEADER.size
        content[:have] = self._buffer[FRAME_HEADER.size : filled]
        self._filled = 0
        await recv_rest(self._sock, content[have:])
        return kind, checksum, content

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
            whole = _join_parts(self._parts, content, self._sender)
            if whole is None:
                return
            kind, content = whole
        self._on_frame(kind, content.toreadonly())


def _join_parts(
    parts: list[memoryview], payload: memoryview, sender: NodeId
) -> tuple[int, memoryview] | None:
    """Kind and content of a frame that came in parts, once the last one is there.

    Raises:
        PeerRefusedError: it is too large, or no part.
    """
    if len(payload) < PART_HEADER.size:
        raise PeerRefusedError(f"an empty part from node {sender}")
    kind, is_last = PART_HEADER.unpack_from(payload)
    parts.append(payload[PART_HEADER.size :])
    if sum(map(len, parts)) > WHOLE_BYTES_MAX:
        raise PeerRefusedError(f"parts of more than {WHOLE_BYTES_MAX} bytes")
    if not is_last:
        return None
    whole = memoryview(b"".join(parts))
    parts.clear()
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
