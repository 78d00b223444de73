"""One client's connection: bytes in, requests begun at once, answers left to the reply queue.

The reader receives small frames through one scratch buffer that all connections share (only between
two awaits, so nobody else can be in it) and a large frame into a buffer of its own size, where the
records stay: a Produce is stamped and appended from there without a copy. A request begins in the
reader's own turn; nothing hops to another task between receive and append.

Never decides anything about a request but its size. What a client does wrong costs this connection.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final, Protocol

import structlog
import trio

from raftmq.errors import RemoteProtocolError
from raftmq.low_water import LINGER_S, LowWater
from raftmq.protocol.fetch import FetchRequest
from raftmq.server.cork import Cork
from raftmq.server.elections import Hold
from raftmq.server.limits import FRAME_HEAD, Limits, RequestMemory, check_frame
from raftmq.server.log_rate import RateLimitedLog
from raftmq.server.metrics import ServerMetrics
from raftmq.server.replies import ReplyQueue, Slot
from raftmq.server.turns import RECEIVE_COST, Turns

SCRATCH_BYTES: Final = 32 << 10
TURN_FRAMES_MAX: Final = 16
TURN_BYTES_MAX: Final = 1 << 20
PART_S: Final = 0.1
"""How long a client is given to hang up after it was told that we do."""

_log = RateLimitedLog(structlog.get_logger("raftmq.server"))


class Begin(Protocol):
    """Starts one request; its answer settles the slot, now or later."""

    def __call__(self, frame: memoryview, slot: Slot, connection: Connection) -> None:
        """Begin the request in `frame` (without its size).

        Raises:
            RemoteProtocolError: bytes that the protocol forbids; the connection is to be closed.
        """
        ...


class Shared:
    """What all connections of a port have in common."""

    __slots__ = ("begin", "cork", "limits", "memory", "metrics", "scratch", "turns")

    def __init__(
        self, begin: Begin, limits: Limits, metrics: ServerMetrics, cork: Cork | None = None
    ) -> None:
        self.begin = begin
        self.cork = cork or Cork()
        self.limits = limits
        self.metrics = metrics
        self.memory = RequestMemory(limits.request_memory_bytes_max)
        self.turns = Turns()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))


class Connection:
    """One client, until it hangs up or is hung up on."""

    __slots__ = (
        "_cancel",
        "_is_finishing",
        "_large",
        "_large_since",
        "_reading",
        "_shared",
        "_sock",
        "_turn_bytes",
        "_turn_frames",
        "client_software",
        "fetch_memo",
        "hold",
        "last_active",
        "on_close",
        "peer",
        "replies",
    )

    def __init__(self, sock: socket.socket, peer: str, shared: Shared) -> None:
        self._sock = sock
        self._shared = shared
        self._cancel = trio.CancelScope()
        self._large: LowWater | None = None  # of a large frame, in part here, in node memory
        self._large_since = 0.0
        self._reading = trio.CancelScope()
        self._is_finishing = False
        self._turn_bytes = 0
        self._turn_frames = 0
        self.peer = peer
        self.client_software = ""
        self.fetch_memo: tuple[int, bytes, FetchRequest] | None = None
        """The last fetch without a session: version, body and what it says."""
        self.hold = Hold()
        self.last_active = trio.current_time()
        self.on_close: dict[int, Callable[[], None]] = {}
        self.replies = ReplyQueue(
            sock, shared.limits, shared.memory, shared.metrics, self._cancel.cancel, shared.cork
        )

    async def serve(self) -> None:
        """Serve until either side ends it; closes the socket."""
        try:
            with self._cancel:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.replies.drain)
                    with self._reading:
                        await self._read_requests()
                    if self._is_finishing:
                        await self._part()
                    nursery.cancel_scope.cancel()
        except* RemoteProtocolError as group:
            self._shared.metrics.protocol_errors += 1
            _log.warning("connection closed: bad request", peer=self.peer, why=_first(group))
        except* (OSError, trio.ClosedResourceError):
            pass  # the client is gone: nobody is left to tell
        finally:
            self.close()

    def close(self) -> None:
        """Hang up: cancel what is parked, give memory back, close the socket."""
        self._cancel.cancel()
        self.replies.close()
        while self.on_close:
            _, callback = self.on_close.popitem()
            callback()
        if self._sock.fileno() >= 0:
            trio.lowlevel.notify_closing(self._sock)
            self._sock.close()

    def finish(self) -> None:
        """Begin no more requests; answer those in hand, then hang up."""
        self._is_finishing = True
        self._reading.cancel()

    async def _part(self) -> None:
        """Answer what was begun; then let the client hang up first, lest unread requests turn our
        end into a reset that takes answers on their way along."""
        await self.replies.idle()
        self._sock.shutdown(socket.SHUT_WR)
        with trio.move_on_after(PART_S):
            while True:
                await trio.lowlevel.wait_readable(self._sock)
                if not self._sock.recv(SCRATCH_BYTES):
                    return

    def hang_up_if_stalled(self, now: float) -> bool:
        """Close when idle, or stuck in the middle of a frame or of an answer, for too long."""
        limits = self._shared.limits
        quiet_ms = (now - self.last_active) * 1000
        stalled_since = self.replies.stalled_since
        if stalled_since is not None:
            is_over = (now - stalled_since) * 1000 > limits.send_stall_ms
        elif self._large is not None:
            since_ms = (now - self._large_since) * 1000
            is_over = quiet_ms > limits.receive_stall_ms or (
                # Others wait for the memory that this frame holds, and it comes in drops.
                self._shared.memory.waiting_count > 0 and since_ms > limits.receive_stall_ms
            )
            if quiet_ms > LINGER_S * 1000:
                self._large.tolerate()
        else:
            is_over = self.replies.is_idle and quiet_ms > limits.connection_idle_ms
        if is_over:
            self._cancel.cancel()
        return is_over

    async def _read_requests(self) -> None:
        replies = self.replies
        sock = self._sock
        scratch = self._shared.scratch
        turns = self._shared.turns
        pending = b""  # received, not begun: incomplete frames, or complete ones without room
        while True:
            if not replies.has_room:
                await replies.room()
            if self._turn_frames >= TURN_FRAMES_MAX or self._turn_bytes >= TURN_BYTES_MAX:
                await trio.lowlevel.checkpoint()
                self._turn_frames = self._turn_bytes = 0
            used = self._begin_complete(memoryview(pending))
            if used:
                pending = pending[used:]
                continue
            size = self._size_of_large(pending)
            if size:
                await self._receive_large(size, pending)
                pending = b""
                continue
            start = len(pending)
            if not turns.try_take(RECEIVE_COST):
                await turns.take(RECEIVE_COST)
            scratch[:start] = pending
            try:
                count = sock.recv_into(scratch[start:])
            except BlockingIOError:
                turns.give_back(RECEIVE_COST)
                self._turn_frames = self._turn_bytes = 0
                await trio.lowlevel.wait_readable(sock)
                continue
            if count == 0:
                return
            self._received(count)
            used = self._begin_complete(scratch[: start + count])
            pending = bytes(scratch[used : start + count])
            if not pending and start + count < SCRATCH_BYTES and replies.has_room:
                # That was all there is: asking the socket again would only tell so.
                self._turn_frames = self._turn_bytes = 0
                await trio.lowlevel.wait_readable(sock)

    def _begin_complete(self, view: memoryview) -> int:
        """Begin the complete frames at the front while there is room; how many bytes they took."""
        if len(view) >= 2 * FRAME_HEAD.size:
            first_end = 4 + FRAME_HEAD.unpack_from(view)[0]
            if first_end + FRAME_HEAD.size <= len(view):
                with self._shared.cork.together():
                    return self._begin_each(view)
        return self._begin_each(view)

    def _begin_each(self, view: memoryview) -> int:
        position = 0
        shared = self._shared
        while len(view) - position >= FRAME_HEAD.size:
            size, api_key, _ = FRAME_HEAD.unpack_from(view, position)
            check_frame(size, api_key, shared.limits)
            end = position + 4 + size
            if end > len(view):
                break
            if not self.replies.has_room or self._turn_frames >= TURN_FRAMES_MAX:
                break
            # A copy of its own: the log and the peers may keep the records for a while.
            frame = bytearray(view[position + 4 : end])
            shared.memory.charge(size)
            self._begin(frame)
            position = end
        return position

    def _begin(self, frame: bytearray) -> None:
        self._turn_frames += 1
        slot = self.replies.open_slot(len(frame))
        try:
            self._shared.begin(memoryview(frame), slot, self)
        except RemoteProtocolError:
            slot.fail()
            raise

    def _size_of_large(self, pending: bytes) -> int:
        """Size of the frame at the front if it does not fit the scratch buffer, else 0."""
        if len(pending) < FRAME_HEAD.size:
            return 0
        size: int = FRAME_HEAD.unpack_from(pending)[0]
        return size if size + 4 > SCRATCH_BYTES else 0

    async def _receive_large(self, size: int, pending: bytes) -> None:
        memory = self._shared.memory
        sock = self._sock
        await memory.charge_when_free(size)
        large = self._large = LowWater(sock)
        self._large_since = trio.current_time()
        try:
            frame = bytearray(size)
            filled = len(pending) - 4
            frame[:filled] = pending[4:]
            view = memoryview(frame)
            while filled < size:
                try:
                    count = sock.recv_into(view[filled:])
                except BlockingIOError:
                    self._turn_frames = self._turn_bytes = 0
                    large.wait_for(size - filled)
                    await trio.lowlevel.wait_readable(sock)
                    continue
                if count == 0:
                    raise ConnectionResetError("closed in the middle of a frame")
                filled += count
                self._received(count)
            large.end()
            if not self._shared.turns.try_take(size):
                await self._shared.turns.take(size)
        except BaseException:
            memory.release(size)
            raise
        finally:
            self._large = None
        self._begin(frame)

    def _received(self, count: int) -> None:
        self._shared.metrics.bytes_in += count
        self._turn_bytes += count
        self.last_active = trio.current_time()


def _first(group: BaseExceptionGroup[RemoteProtocolError]) -> str:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
