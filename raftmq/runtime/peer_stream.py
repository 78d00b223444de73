"""One outgoing stream to a peer: its bounded queue and, while connected, its socket.

`PeerStream` sends at once what the socket takes and queues the rest. `ChunkStream` carries frames
whose bytes lie in files, for a peer that is far behind: it never sends from the caller's turn,
moves at most `TURN_BYTES_MAX` by `sendfile` before others have the loop, and lets a worker read
what is not in memory, so that neither a big backlog nor a cold disk delays anything else.

Invariants: frames leave whole and in order or the connection ends; what a queue holds is bounded.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

import trio
from attrs import define, field

from raftmq.log.prefetch import is_warm, warm
from raftmq.ports import DiskError, Span
from raftmq.types import Buffer, NodeId

TURN_BYTES_MAX: Final = 1 << 20
CHUNKS_BYTES_MAX: Final = 4 << 20
"""Chunks that wait for a peer, of all groups. What waits for seconds is taken for lost and sent
again, and a slow line does nothing else then; a fast one needs no more to be always busy."""
UNSENT_CHUNK_BYTES_MAX: Final = 1 << 20
"""And so much more in the kernel, for the same reason."""
READ_PIECE_BYTES: Final = 64 << 10
CONNECTED_S: Final = 0.25
"""A peer that can be reached is connected in less."""


class StreamCounts(Protocol):
    """Numbers of one outgoing stream, for metrics."""

    queued_bytes: int
    sent_bytes: int
    dropped_frames: int


@define(eq=False)
class PeerStream:
    """One outgoing stream: its queue and, while connected, its socket."""

    node_id: NodeId
    name: str
    queue_bytes_max: int
    sock: socket.socket | None = None
    version: int = 0
    """The format that its present or last connection has."""
    process_id: str = ""
    """The process at its other end, "" for one that does not say."""
    queue: deque[memoryview] = field(factory=deque)
    queued_bytes: int = 0
    sent_bytes: int = 0
    dropped_frames: int = 0
    wake: trio.Event = field(factory=trio.Event)
    is_torn: bool = False
    dials: int = 0
    has_failed: bool = False
    """The last try to connect failed."""
    has_stood: bool = False
    """Its last connection came to stand."""
    dialling: trio.CancelScope | None = None
    """While a connection is being asked for."""
    redial: trio.Event = field(factory=trio.Event)
    """Set: do not wait before the next one is asked for."""

    def hurry(self) -> None:
        """The peer can be reached: a connection comes soon, or what asked for it was lost when it
        could not, and the system would ask again after a second or more."""
        self.redial.set()
        if self.dialling is not None:
            soon = trio.current_time() + CONNECTED_S
            self.dialling.deadline = min(self.dialling.deadline, soon)

    def send(self, pieces: Sequence[Buffer]) -> bool:
        """Send what the socket takes and queue the rest; False when the frame was dropped."""
        if self.sock is None:
            return False
        size = sum(len(piece) for piece in pieces)
        if self.queue:
            if self.queued_bytes + size > self.queue_bytes_max:
                return False
            self.sent_bytes += size
            self._enqueue(pieces, 0)
            return True
        try:
            sent = self.sock.sendmsg(pieces)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.wake.set()  # the writer task meets the same error and reconnects
            return False
        self.sent_bytes += size
        if sent < size:
            self._enqueue(pieces, sent)
            self.wake.set()
        return True

    def _enqueue(self, pieces: Sequence[Buffer], skip: int) -> None:
        for piece in pieces:
            view = memoryview(piece)
            if skip >= len(view):
                skip -= len(view)
                continue
            self.queue.append(view[skip:])
            self.queued_bytes += len(view) - skip
            skip = 0

    async def drain(self) -> None:
        """Write what did not fit at once; return when the connection fails."""
        sock = self.sock
        assert sock is not None, "a stream is drained while it is connected"
        while True:
            self.wake = trio.Event()
            if self.queue:
                await trio.lowlevel.wait_writable(sock)
            else:
                await self.wake.wait()
            while self.queue:
                pieces = [self.queue[i] for i in range(min(len(self.queue), 64))]
                try:
                    sent = sock.sendmsg(pieces)
                except BlockingIOError:
                    break
                except OSError:
                    return
                self.queued_bytes -= sent
                while sent and sent >= len(self.queue[0]):
                    sent -= len(self.queue.popleft())
                if sent:
                    self.queue[0] = self.queue[0][sent:]

    def end(self) -> None:
        """Let the connection end as if the peer had closed it."""
        if self.sock is not None:
            with contextlib.suppress(OSError):  # the peer was quicker
                self.sock.shutdown(socket.SHUT_RDWR)

    def drop_connection(self) -> None:
        """Close the socket; what waited for it helps nobody any more."""
        if self.sock is not None:
            self.sock.close()
        self.sock = None
        self.queue.clear()
        self.queued_bytes = 0
        self.is_torn = False


@define(eq=False)
class ChunkStream(PeerStream):
    """The stream for peers that are far behind."""

    frames: deque[tuple[Buffer, Buffer | Span | None]] = field(factory=deque)

    def room_for(self, size_bytes: int) -> bool:
        """True when a frame of about this size would be taken; where nothing waits, any is."""
        if self.sock is None:
            return False
        bound = min(self.queue_bytes_max, CHUNKS_BYTES_MAX)
        return not self.queued_bytes or self.queued_bytes + size_bytes <= bound

    def send_chunk(self, head: Buffer, span: Span | None) -> bool:
        """Queue a frame; False when it was dropped."""
        size = len(head) + (0 if span is None else span.size)
        if not self.room_for(size):
            return False
        self.frames.append((head, span))
        self.queued_bytes += size
        self.sent_bytes += size
        self.wake.set()
        return True

    def send_part(self, head: Buffer, part: Buffer) -> None:
        """Queue a part of a large frame, beyond the bound: whoever sends it looked before."""
        self.frames.append((head, part))
        self.queued_bytes += len(head) + len(part)
        self.sent_bytes += len(head) + len(part)
        self.wake.set()

    async def drain(self) -> None:
        """Send frame by frame; return when the connection fails or a file cannot be read."""
        while True:
            self.wake = trio.Event()
            if not self.frames:
                await self.wake.wait()
            head, body = self.frames.popleft()
            try:
                await self._send_bytes(memoryview(head), 0 if body is None else socket.MSG_MORE)
                if isinstance(body, bytes | bytearray | memoryview):
                    await self._send_bytes(memoryview(body))
                elif body is not None:
                    await self._send_span(body)
            except (OSError, DiskError):
                return  # half a frame may have left: the connection ends with it

    async def _send_bytes(self, data: memoryview, flags: int = 0) -> None:
        assert self.sock is not None
        while data:
            try:
                sent = self.sock.send(data, flags)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self.sock)
                continue
            self.queued_bytes -= sent
            data = data[sent:]

    async def _send_span(self, span: Span) -> None:
        """Send a file's bytes; others have the loop after each piece.

        Raises:
            OSError: the connection failed, or the file ended early.
            DiskError: the file cannot be read.
        """
        assert self.sock is not None
        position, end = span.position, span.position + span.size
        descriptor = span.file.fileno()
        while position < end:
            size = min(end - position, TURN_BYTES_MAX)
            if not is_warm(span.file, position, size):
                await trio.to_thread.run_sync(warm, span.file, position, size)
            if descriptor < 0:
                data = span.file.pread(min(size, READ_PIECE_BYTES), position)
                await self._send_bytes(memoryview(data))
                sent = len(data)
            else:
                try:
                    sent = os.sendfile(self.sock.fileno(), descriptor, position, size)
                except BlockingIOError:
                    await trio.lowlevel.wait_writable(self.sock)
                    continue
                self.queued_bytes -= sent
            if sent == 0:
                raise OSError(f"{span.file.path} ends before {end}")
            position += sent
            await trio.lowlevel.checkpoint()

    def drop_connection(self) -> None:
        """Close the socket; what waited for it helps nobody any more."""
        self.frames.clear()
        PeerStream.drop_connection(self)
