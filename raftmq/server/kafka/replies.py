"""Answers of one connection, leaving in the order of their requests.

An answer is a list of pieces: bytes, or spans of files that `sendfile` moves without a copy.
An answer whose turn it is is sent at once, in the call that settles it, as long as the socket takes
it (a switch to another task costs more than the send). What remains (socket full, bytes not in
memory, a turn of sendfile used up) is left to a writer task, which is made when it is needed first,
sleeps between stalls and ends when its client has been quiet for a while.

A drain of the replicas may settle many answers of one connection, and one receive may hold many
requests. Sent one by one each answer costs a system call and a packet, drained one by one each
append costs a message to every peer. So while the replicas drain, or while the requests of one
receive are begun, answers gather (`ReplyBatch`), and leave when that is done, still in the same
turn of the loop.

Invariants: slots leave from the front only; bytes of two answers never mix; a failing socket never
raises into the caller that settled an answer (it may be the Raft engine), it ends the connection.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Final, Protocol, TypeAlias

import trio

from raftmq.errors import RaftmqError
from raftmq.log.prefetch import is_warm, warm
from raftmq.ports import DiskError, File, Span
from raftmq.runtime.loop import Parker
from raftmq.runtime.sockets import ByteSocket
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.limits import Limits, RequestMemory
from raftmq.types import Buffer

SENDFILE_TURN_BYTES_MAX: Final = 1 << 20
"""A connection yields after so many bytes of spans: a cold or fast one must not own the loop."""
SPAN_JOIN_BYTES_MAX: Final = 16 << 10
"""A smaller span is read and joined with the bytes before it: one call beats three."""
JOIN_BYTES_MAX: Final = 64 << 10
WARM_S: Final = 1.0
"""What was found in memory is taken to be there still for so long."""


Piece: TypeAlias = Buffer | Span
Pieces: TypeAlias = Sequence[Piece]


class Drains(Protocol):
    """What the server knows of the engine of all replicas (`replication/multiraft.py`)."""

    @property
    def is_draining(self) -> bool:
        """True while effects of replicas are performed; what waits for `after_round` follows."""
        ...

    def after_round(self, call: Callable[[], None]) -> None:
        """Call this once, after this round of drains or the next one."""
        ...

    def batch(self) -> AbstractContextManager[None]:
        """Do several things to replicas and drain each of them once, at the end."""
        ...


class BatchedReplies(Protocol):
    """Answers of one connection, as far as a batch knows them."""

    def flush(self) -> None:
        """Send what is ready."""
        ...


class ReplyBatch:
    """Holds answers back for the rest of the present piece of work."""

    __slots__ = ("_depth", "_drains", "_waiting")

    def __init__(self, drains: Drains) -> None:
        self._depth = 0
        self._drains = drains
        self._waiting: dict[int, BatchedReplies] = {}

    @property
    def is_open(self) -> bool:
        """True while answers are held back; `flush` is certain to follow."""
        return self._depth > 0 or self._drains.is_draining

    def hold(self, replies: BatchedReplies) -> None:
        """Let `replies` send when the work is done."""
        if not self._waiting:
            self._drains.after_round(self.flush)
        self._waiting[id(replies)] = replies

    def flush(self) -> None:
        """Send everything held."""
        while self._waiting:
            waiting, self._waiting = self._waiting, {}
            for replies in waiting.values():
                replies.flush()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Begin several requests as one piece of work."""
        self._depth += 1
        try:
            with self._drains.batch():
                yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.flush()


class SpanTruncatedError(RaftmqError):
    """A span's file ended early: the answer under way cannot be completed."""


class ReplyConnection(Protocol):
    """The connection that these answers leave by."""

    def stalled(self) -> None:
        """Run `drain` in a task."""
        ...

    def broken(self) -> None:
        """End the connection, soon: the caller may be in the middle of anything."""
        ...

    def failed(self, error: Exception) -> None:
        """As `broken`, for a bug of ours."""
        ...


class _Stall(Enum):
    FULL = "the socket is full"
    COLD = "the next bytes are not in memory"
    TURN = "its turn of the loop is used up"


class Slot:
    """The place of one answer in the order; settled once, by `answer`."""

    __slots__ = ("_queue", "charge", "pieces")

    def __init__(self, queue: ReplyQueue, charge: int) -> None:
        self._queue = queue
        self.charge = charge
        self.pieces: Pieces | None = None

    def answer(self, pieces: Pieces) -> None:
        """Settle; () sends nothing (Produce with acks=0). Never raises for a dead connection."""
        assert self.pieces is None, "an answer is settled once"
        self.pieces = pieces
        self._queue.settled(self)

    def fail(self) -> None:
        """End the connection: there is no answer to this request."""
        self._queue.broken()
        if self.pieces is None:
            self.answer(())  # goes nowhere; gives the request's bytes back


class _EndedConnection:
    """Stands in for a connection that ended: the two would keep each other alive."""

    def stalled(self) -> None:
        """No answer leaves any more."""

    def broken(self) -> None:
        """It has ended already."""

    def failed(self, error: Exception) -> None:
        """It has ended already; nothing more can fail."""


_ENDED: Final = _EndedConnection()


class ReplyQueue:
    """Ordered answers of one connection."""

    __slots__ = (
        "_batch",
        "_bytes",
        "_connection",
        "_has_sendfile",
        "_is_barred",
        "_is_closed",
        "_is_pumping",
        "_limits",
        "_memory",
        "_metrics",
        "_outbox",
        "_outbox_charge",
        "_reader",
        "_slots",
        "_sock",
        "_span_sent",
        "_stall",
        "_wants_idle",
        "_warm_end",
        "_writer",
        "stalled_since",
    )

    def __init__(
        self,
        sock: ByteSocket,
        limits: Limits,
        memory: RequestMemory,
        metrics: ServerCounts,
        connection: ReplyConnection,
        batch: ReplyBatch,
    ) -> None:
        self._sock = sock
        self._has_sendfile = isinstance(sock, socket.socket)  # else each byte is encrypted here
        self._limits = limits
        self._memory = memory
        self._metrics = metrics
        self._connection = connection
        self._batch = batch
        self._slots: list[Slot] = []  # few: the pipeline has a depth
        # The answer under way, its front piece partly sent; made when there is one of many pieces,
        # or one that the socket does not take at once (an empty deque is 600 bytes).
        self._outbox: deque[Piece] | None = None
        self._outbox_charge = 0
        self._span_sent = 0  # of the front span
        self._warm_end = 0  # of the front span: up to there it was found in memory
        self._bytes = 0  # charged and not yet given back: requests unanswered, answers unsent
        self._stall: _Stall | None = None  # set: the writer task alone may send
        self._is_pumping = False
        self._is_closed = False
        self._is_barred = False  # the last request begun is still asking for what it wants
        self._wants_idle = False
        # Made for those that sleep: most connections never have a writer, nor a reader that waits.
        self._writer: Parker | None = None  # set while there is a writer task, asleep or not
        self._reader: Parker | None = None  # set until the reader is woken
        self.stalled_since: float | None = None

    @property
    def depth(self) -> int:
        """Requests whose answer has not been handed to the socket."""
        return len(self._slots)

    @property
    def unanswered_bytes(self) -> int:
        """Bytes charged to this connection."""
        return self._bytes

    @property
    def is_idle(self) -> bool:
        """True when nothing is owed to the client."""
        return not self._slots and not self._outbox

    @property
    def has_room(self) -> bool:
        """True when another request may be read."""
        limits = self._limits
        return (
            len(self._slots) < limits.pipeline_depth_max
            and self._bytes < limits.pipeline_bytes_max
            and not self._is_barred
        )

    def bar(self) -> None:
        """Read no request before `unbar`."""
        self._is_barred = True

    def unbar(self) -> None:
        """Go on reading."""
        self._is_barred = False
        self._wake_reader()

    def open_slot(self, charge: int) -> Slot:
        """Take the next place in the order; `charge` bytes were charged to node memory before."""
        slot = Slot(self, charge)
        self._slots.append(slot)
        self._bytes += charge
        return slot

    def settled(self, slot: Slot) -> None:
        """An answer is ready: send it if it is its turn."""
        pieces = slot.pieces
        assert pieces is not None
        size = 0
        for piece in pieces:
            if isinstance(piece, (bytes, bytearray, memoryview)):
                size += len(piece)
        # The request's bytes are done with; the answer's own are held until the client took them.
        self._memory.release(slot.charge)
        if self._is_closed:
            return
        self._memory.charge(size)
        self._bytes += size - slot.charge
        slot.charge = size
        if self._slots[0] is slot and self._stall is None and not self._is_pumping:
            if self._batch.is_open:
                self._batch.hold(self)
            else:
                self.flush()

    def flush(self) -> None:
        """Send what is ready, here and now, as far as the socket takes it."""
        if self._is_closed or self._stall is not None or self._is_pumping:
            return
        if self._reader is None and not self._outbox and self._slots:
            # One small answer, and no reader that waits for its end: the case of most requests.
            try:
                is_done = self._send_alone(self._slots[0])
            except OSError:
                self.broken()
                return
            except Exception as error:  # noqa: BLE001 - what settled the answer must go on
                self._failed(error)
                return
            if is_done:
                self._metrics.direct_sends += 1
                return
            self._take_ready()  # as `_send_ready` goes on where that did not do
        self._pump()
        if self._stall is None:
            self._metrics.direct_sends += 1

    def broken(self) -> None:
        """End the connection."""
        self._connection.broken()
        self.close()

    def _failed(self, error: Exception) -> None:
        self._connection.failed(error)
        self.close()

    async def room(self) -> None:
        """Wait until another request may be read: a slow client stops its own reader."""
        while not self.has_room:
            await self._reader_sleeps()

    async def idle(self) -> None:
        """Wait until every request that was begun is answered, and the answers are with the kernel.
        No request may be read meanwhile."""
        while not self.is_idle:
            self._wants_idle = True
            await self._reader_sleeps()

    async def _reader_sleeps(self) -> None:
        self._reader = Parker()
        try:
            await self._reader.park()
        finally:
            self._reader = None

    def rest(self) -> None:
        """End the writer task if it sleeps: the next stall makes another."""
        if self._writer is not None:
            self._writer.unpark()
        if not self._outbox:
            self._outbox = None

    async def drain(self) -> None:
        """The writer task: goes on where a direct send could not; ends at `rest`."""
        assert self._writer is not None, "set where this task is started"
        try:
            await self._drain(self._writer)
        finally:
            self._writer = None

    async def _drain(self, writer: Parker) -> None:
        while not self._is_closed:  # which it may be since this task was made
            if self._stall is None:
                await writer.park()
                if self._stall is None:
                    return
            self._metrics.writer_wakes += 1
            if self._stall is _Stall.FULL:
                self.stalled_since = trio.current_time()
                await trio.lowlevel.wait_writable(self._sock)
                if trio.current_time() - self.stalled_since > WARM_S:
                    self._warm_end = 0
                self.stalled_since = None
            elif self._stall is _Stall.COLD:
                await self._read_ahead()
            else:
                await trio.lowlevel.checkpoint()
            self._stall = None
            if not self._is_closed:
                self._pump()

    def close(self) -> None:
        """Give all charges back; answers that settle later go nowhere."""
        if self._is_closed:
            return
        self._is_closed = True
        self._connection = _ENDED
        self._stall = None  # a writer that was woken finds nothing to do, and perhaps no socket
        self._memory.release(self._outbox_charge)
        self._outbox_charge = 0
        for slot in self._slots:
            if slot.pieces is not None:
                self._memory.release(slot.charge)
        self._outbox = None
        self._slots.clear()

    def _pump(self) -> None:
        self._is_pumping = True
        try:
            self._stall = self._send_ready()
        except (OSError, DiskError, SpanTruncatedError):
            # The client is gone, or the answer under way cannot be completed: either ends the
            # connection, and does not concern what settled this answer.
            self.broken()
        except Exception as error:  # noqa: BLE001 - as in flush()
            self._failed(error)
        finally:
            self._is_pumping = False
        if self._stall is not None:
            if self._writer is not None:
                self._writer.unpark()
            else:
                self._writer = Parker()
                self._connection.stalled()
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and (self.is_idle if self._wants_idle else self.has_room):
            reader, self._reader = self._reader, None
            reader.unpark()

    def _send_ready(self) -> _Stall | None:
        turn_bytes = SENDFILE_TURN_BYTES_MAX
        slots = self._slots
        while True:
            outbox = self._outbox
            if not outbox:
                if self._outbox_charge:
                    self._memory.release(self._outbox_charge)
                    self._bytes -= self._outbox_charge
                    self._outbox_charge = 0
                if not slots or slots[0].pieces is None:
                    return None
                if not self._send_alone(slots[0]):
                    self._take_ready()
                continue
            front = outbox[0]
            if isinstance(front, (bytes, bytearray, memoryview)):
                stall = self._send_bytes(outbox, front)
                if stall is not None:
                    return stall
                continue
            if turn_bytes <= 0:
                return _Stall.TURN
            sent = self._send_span(outbox, front, turn_bytes)
            if isinstance(sent, _Stall):
                return sent
            turn_bytes -= sent

    def _send_alone(self, slot: Slot) -> bool:
        """Send an answer that is one piece of bytes with none ready behind it; True when the
        socket took all of it, and else nothing happened but that the first bytes left."""
        pieces, slots = slot.pieces, self._slots
        if pieces is None or len(pieces) != 1 or (len(slots) > 1 and slots[1].pieces is not None):
            return False
        data = pieces[0]
        if not isinstance(data, (bytes, bytearray, memoryview)):
            return False
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            return False
        self._metrics.bytes_out += sent
        if sent < len(data):
            slot.pieces = (memoryview(data)[sent:],)
            return False
        del slots[0]
        self._memory.release(slot.charge)
        self._bytes -= slot.charge
        return True

    def _take_ready(self) -> None:
        """Move answers whose turn it is to the outbox: several small ones leave as one piece."""
        slots = self._slots
        outbox = self._outbox
        if outbox is None:
            outbox = self._outbox = deque()
        count = 0
        for slot in slots:
            if slot.pieces is None or self._outbox_charge >= JOIN_BYTES_MAX:
                break
            self._outbox_charge += slot.charge
            outbox.extend(slot.pieces)
            count += 1
        del slots[:count]

    def _send_bytes(self, outbox: deque[Piece], data: Buffer) -> _Stall | None:
        if len(outbox) > 1:
            joined, count = self._join_front(outbox)
            if count > 1:
                for _ in range(count):
                    outbox.popleft()
                outbox.appendleft(joined)
                data = joined
        # Bytes before a span wait in the kernel for it: one packet fewer on the wire.
        flags = socket.MSG_MORE if len(outbox) > 1 else 0
        try:
            sent = self._sock.send(data, flags)
        except (BlockingIOError, InterruptedError):
            return _Stall.FULL
        self._metrics.bytes_out += sent
        if sent == len(data):
            outbox.popleft()
            return None
        outbox[0] = memoryview(data)[sent:]
        return _Stall.FULL

    def _join_front(self, outbox: deque[Piece]) -> tuple[bytes, int]:
        """Small pieces at the front as one, with how many they are."""
        parts: list[Buffer] = []
        total = 0
        for piece in outbox:
            if isinstance(piece, (bytes, bytearray, memoryview)):
                size = len(piece)
                if total + size > JOIN_BYTES_MAX:
                    break
                parts.append(piece)
            else:
                size = piece.size
                if size > SPAN_JOIN_BYTES_MAX or total + size > JOIN_BYTES_MAX:
                    break
                if not is_warm(piece.file, piece.position, size):
                    break
                parts.append(_read_span(piece.file, piece.position, size))
            total += size
        return (b"".join(parts), len(parts)) if len(parts) > 1 else (b"", len(parts))

    def _send_span(self, outbox: deque[Piece], span: Span, bytes_max: int) -> int | _Stall:
        left = span.size - self._span_sent
        if left == 0:
            outbox.popleft()
            self._span_sent = self._warm_end = 0
            return 0
        size = min(left, bytes_max)
        position = span.position + self._span_sent
        if self._span_sent + size > self._warm_end:
            if not is_warm(span.file, position, size):
                return _Stall.COLD
            self._warm_end = self._span_sent + size
        try:
            descriptor = span.file.fileno()
            if descriptor >= 0 and self._has_sendfile:
                sent = os.sendfile(self._sock.fileno(), descriptor, position, size)
                self._metrics.bytes_sendfile += sent
            else:
                sent = self._sock.send(_read_span(span.file, position, min(size, 64 << 10)))
        except (BlockingIOError, InterruptedError):
            return _Stall.FULL
        if sent == 0:
            raise SpanTruncatedError(f"{span.file.path} ends before {position + size}")
        self._metrics.bytes_out += sent
        self._span_sent += sent
        if self._span_sent == span.size:
            outbox.popleft()
            self._span_sent = self._warm_end = 0
        return sent

    async def _read_ahead(self) -> None:
        """Let a worker thread bring the next span's bytes into memory."""
        self._metrics.read_aheads += 1
        for number, piece in enumerate(self._outbox or ()):
            if not isinstance(piece, (bytes, bytearray, memoryview)):
                sent = self._span_sent if number == 0 else 0
                size = min(piece.size - sent, SENDFILE_TURN_BYTES_MAX)
                await trio.to_thread.run_sync(warm, piece.file, piece.position + sent, size)
                return
        await trio.lowlevel.checkpoint()


def _read_span(file: File, position: int, size: int) -> bytes:
    data = file.pread(size, position)
    if len(data) != size:
        raise SpanTruncatedError(f"{file.path} ends before {position + size}")
    return data
