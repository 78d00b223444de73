"""The streams between two nodes: an outgoing one with its bounded queue, an incoming one whose
bytes become whole and checked frames in their order.

`PeerStream` sends at once what the socket takes and queues the rest. `ChunkStream` carries frames
whose bytes lie in files, for a peer that is far behind: it never sends from the caller's turn,
moves at most `TURN_BYTES_MAX` by `sendfile` before others have the loop, and lets a worker read
what is not in memory, so that neither a big backlog nor a cold disk delays anything else. Frames
leave whole and in order or the connection ends; what a queue holds is bounded.

`FrameReader` copies small frames out of one buffer and receives large ones into a buffer of their
own, which grows with what comes: what a peer only announces costs nothing beyond `FIRST_BYTES`. All
incoming streams share one budget (`PeerMemory`) of bytes that were received and not handed on yet.
What is wrong with a frame ends the stream, and so does a frame that does not come to its end in
time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Final, Protocol

import trio
from attrs import define, field
from crc32c import crc32c

from raftmq.log.prefetch import is_warm, warm
from raftmq.ports import DiskError, Span
from raftmq.runtime.loop import Lane, LoopBudget
from raftmq.runtime.sockets import recv_rest
from raftmq.runtime.tls import PeerSocket, PeerTlsSocket, recv_hidden_rest
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
    sock: PeerSocket | None = None
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
    dials_plain: bool = False
    """The next dial is without TLS, as the last one found nobody who speaks it."""
    has_failed: bool = False
    """The last try to connect failed."""
    has_stood: bool = False
    """Its last connection came to stand."""
    dialling: trio.CancelScope | None = None
    """While a connection is being asked for."""
    redial: trio.Event = field(factory=trio.Event)
    """Set: do not wait before the next one is asked for."""

    def hurry(self) -> None:
        """The peer can be reached: redial soon. A connection request sent while it could not be
        reached is lost, and the system would send it again after a second or more."""
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
                if isinstance(sock, PeerTlsSocket):  # which encrypted up to a mebibyte for it
                    await trio.lowlevel.checkpoint()

    def end(self) -> None:
        """Let the connection end as if the peer had closed it."""
        if self.sock is not None:
            with contextlib.suppress(OSError):  # the peer was quicker
                self.sock.shutdown(socket.SHUT_RDWR)

    def drop_connection(self) -> None:
        """Close the socket and drop what waited for it."""
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
        """Queue a part of a large frame, beyond the bound, which the caller has checked."""
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
        # The kernel cannot encrypt a file's bytes.
        descriptor = -1 if isinstance(self.sock, PeerTlsSocket) else span.file.fileno()
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
        """Close the socket and drop what waited for it."""
        self.frames.clear()
        PeerStream.drop_connection(self)


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
    """Bytes of frames of all streams that are incomplete, or wait for a pass with budget left.

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
        """Discharge all that a stream holds."""
        self.used_bytes -= self._held.pop(reader, 0)


class FrameReader:
    """Reads one stream until it ends.

    Args:
        sender: the node at the other end.
        on_frame: takes kind and content of each frame.
        is_blocked: asked for each frame: true while frames from there are to be ignored.
        budget: large frames are charged to it.
        memory: bytes of incomplete frames are charged to it.
        takes_parts: messages too large for one frame may come here, in several.
    """

    __slots__ = (
        "_budget",
        "_buffer",
        "_error",
        "_filled",
        "_has_gap",
        "_is_blocked",
        "_is_emptied",
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
        sock: PeerSocket,
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
        self._is_emptied = False  # the last receive took all there was
        self._has_gap = False  # frames were ignored
        self._is_over = False
        self._error: Exception | None = None

    async def run(self) -> None:
        """Hand on frames; returns where some are missing, so that the peer begins a new stream.

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
        """Receive what there is. After a receive that took less than there was room for, nearly
        always nothing is left: to try nevertheless costs more than to wait."""
        while True:
            if self._is_emptied:
                await self._until_readable()
            room = self._buffer[self._filled :]
            try:
                count = self._sock.recv_into(room)
            except BlockingIOError:
                self._is_emptied = True
                continue
            if count == 0:
                raise EOFError
            self._is_emptied = count < len(room)
            self._filled += count
            return count

    async def _until_readable(self) -> None:
        if not self._filled and self._whole is None:
            await trio.lowlevel.wait_readable(self._sock)
            return
        with trio.fail_after(FRAME_S):
            await trio.lowlevel.wait_readable(self._sock)

    # ---- frames ----

    async def _hand_on_all(self) -> int:
        """Hand on each whole frame; returns how many bytes of large ones were received."""
        began = perf_counter()
        large_bytes = 0
        while not self._is_over:
            frame = self._next_small()
            if frame is None:
                frame = await self._next_large() if self._filled else None
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
        if start == self._filled:
            self._start = self._filled = 0
        elif start:
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
        """Content of `size` bytes, the first of which are in the buffer."""
        room = min(size, FIRST_BYTES)
        self._memory.take(self, room)
        content = bytearray(room)
        have = filled - FRAME_HEADER.size
        content[:have] = self._buffer[FRAME_HEADER.size : filled]
        self._filled = 0
        self._is_emptied = False  # what follows it was not looked for
        await self._receive_rest(memoryview(content)[have:])
        while len(content) < size:
            have = len(content)
            more = min(have, size - have)
            self._memory.take(self, more)
            content.extend(bytes(more))
            await self._receive_rest(memoryview(content)[have:])
        return content

    async def _receive_rest(self, rest: memoryview) -> None:
        if isinstance(self._sock, PeerTlsSocket):
            await recv_hidden_rest(self._sock, rest)
        else:
            await recv_rest(self._sock, rest)

    def _let_go(self) -> None:
        """After a large frame was handed on, hold memory only for parts of a larger one."""
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
        PeerRefusedError: it was damaged in transit.
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
