"""The connections of clients: bytes in, requests begun at once, answers left to the reply queue.

A connection at rest has no task: `Readiness` calls `receive` when its socket has bytes. Small
frames come through one scratch buffer that all connections share (each only within one call), a
large frame through another one into a buffer that grows with it, where the records stay: a Produce
is stamped and appended from there without a copy. A request begins in that same call; no task
switch lies between receive and append.

A connection that has to wait (for room in the pipeline, for memory, for the rest of a large frame,
for its next turn) leaves `Readiness` for a task, `_read`, which stays while its client is busy: the
connection goes back to rest when the sweep finds it quiet. One of the two reads, never both;
`ConnectionState` has all states, `NEXT` all ways between them. Answers that a socket does not take
at once are sent by a task of their own (`ReplyQueue.drain`), until they are sent.

Decides nothing about a request but whether its size is allowed. What a client does wrong costs this
connection, and so does a bug of ours that one of its requests meets: no exception but the loop's
own leaves this module (`Shared.failed`).
"""

from __future__ import annotations

import select
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from enum import IntEnum
from functools import partial
from typing import Final, Protocol

import structlog
import trio

from raftmq.errors import RemoteProtocolError
from raftmq.logs import RateLimitedLog
from raftmq.ports import DiskError
from raftmq.runtime.loop import (
    RECEIVE_COST,
    SMALL_RECEIVE_BYTES,
    SMALL_RECEIVE_COST,
    LoopBudget,
    Parker,
)
from raftmq.runtime.sockets import LINGER_S, MARK_BYTES_MAX, ByteSocket, LowWater
from raftmq.runtime.tls import TlsLowWater, TlsSocket
from raftmq.server.kafka.authentication import Authentication, Caller
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.leader_waits import Hold
from raftmq.server.kafka.limits import (
    FRAME_HEAD,
    Limits,
    PartialFrame,
    RequestMemory,
    check_frame,
    receive_s_max,
)
from raftmq.server.kafka.replies import ReplyBatch, ReplyQueue, Slot, SpanTruncatedError

EVENTS_MAX: Final = 256
"""Most connections that one `poll` names; the kernel names the others in the next one."""


class Receiver(Protocol):
    """A connection at rest."""

    def receive(self) -> None:
        """Take in what came; the budget of this pass was charged. Never waits, never raises for
        what the client did; harmless when the connection is not at rest any more."""
        ...


class Readiness:
    """The sockets of all connections at rest: one epoll under all of them.

    They stay registered, level-triggered; one task waits for all (the epoll's own descriptor is
    registered with trio) and calls each that has bytes. So a request of a client that merely polls
    costs a `recv` and no switch between tasks. All that are ready in the same pass are one piece of
    work: what they append is drained together, so the busier a node is, the fewer messages and
    flushes each of a thousand producers costs it.

    Work is charged to `LoopBudget` before it is done. Connections for which a pass has none left
    wait in line there, each for itself, and the epoll is not polled before they had their turn: it
    would only name them again. Never reads a socket itself, never closes one.
    """

    __slots__ = (
        "_behind",
        "_budget",
        "_epoll",
        "_resting",
        "_runner",
        "_together",
    )

    def __init__(
        self,
        budget: LoopBudget,
        together: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`together` is entered around the calls of one pass, where they are several."""
        self._budget = budget
        self._together = together
        self._epoll = select.epoll()
        self._resting: dict[int, Receiver] = {}
        self._behind = 0  # ready ones that stand in line for another pass
        self._runner = Parker()  # sleeps while some are behind

    def __len__(self) -> int:
        return len(self._resting)

    def watch(self, descriptor: int, receiver: Receiver) -> None:
        """Call `receiver` whenever its socket has something to read, or is at its end."""
        self._epoll.register(descriptor, select.EPOLLIN)
        self._resting[descriptor] = receiver

    def unwatch(self, descriptor: int) -> None:
        """Stop calling; harmless where nothing is watched. Comes before the socket closes."""
        if self._resting.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    async def run(self) -> None:
        """Call the connections that are ready, until cancelled."""
        epoll = self._epoll
        while True:
            await trio.lowlevel.wait_readable(epoll.fileno())
            ready = epoll.poll(0, EVENTS_MAX)
            if len(ready) > 1:
                with self._together():
                    self._call(ready)
            else:
                self._call(ready)
            if self._behind:
                await self._runner.park()

    def _call(self, ready: list[tuple[int, int]]) -> None:
        receivers, try_take = self._resting, self._budget.try_take
        for descriptor, _ in ready:
            receiver = receivers.get(descriptor)
            if receiver is None:
                continue  # a call of this very pass closed it
            if try_take(RECEIVE_COST):
                receiver.receive()
            else:
                self._behind += 1
                self._budget.wait(RECEIVE_COST, partial(self._receive_late, receiver))

    def close(self) -> None:
        """Close the epoll; no connection may be watched any more."""
        assert not len(self), "connections are closed first"
        if not self._epoll.closed:
            trio.lowlevel.notify_closing(self._epoll.fileno())
            self._epoll.close()

    def _receive_late(self, receiver: Receiver) -> None:
        self._behind -= 1
        if not self._behind:
            self._runner.unpark()
        receiver.receive()


SCRATCH_BYTES: Final = 32 << 10
PIECE_BYTES_MAX: Final = MARK_BYTES_MAX
"""A large frame is received in pieces of at most this many bytes."""
TURN_FRAMES_MAX: Final = 16
TURN_BYTES_MAX: Final = 1 << 20
PART_S: Final = 0.1
"""How long a client has to close its side after this node closed its own."""
QUIET_S: Final = 1.0
"""A connection from which nothing came for this long needs no task."""

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

    __slots__ = (
        "batch",
        "begin",
        "budget",
        "limits",
        "memory",
        "metrics",
        "nursery",
        "piece",
        "readiness",
        "scratch",
    )

    def __init__(
        self,
        begin: Begin,
        limits: Limits,
        metrics: ServerCounts,
        batch: ReplyBatch,
        memory: RequestMemory,
        budget: LoopBudget,
    ) -> None:
        self.begin = begin
        self.batch = batch
        self.limits = limits
        self.metrics = metrics
        self.memory = memory
        self.budget = budget
        self.readiness = Readiness(self.budget, self.batch.together)
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.piece = memoryview(b"")  # made for the first large frame; as `scratch`
        self.nursery: trio.Nursery | None = None
        """Of the tasks that connections need for a while; open for as long as there are any."""

    def spawn(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a task for a connection, which lets no exception out."""
        assert self.nursery is not None, "connections are served within a nursery"
        self.nursery.start_soon(work)

    def refused(self, bound: str) -> None:
        """Count a refusal, by the bound (a config key) that caused it."""
        self.metrics.refuse(bound)

    def failed(self, error: Exception, peer: str) -> None:
        """Log and count a bug of ours that one connection met: it costs that connection alone. Lack
        of memory costs the connection too, but is no bug."""
        if isinstance(error, MemoryError):
            self.refused("memory")
            _log.error("connection closed: no memory for its request", peer=peer)
            return
        self.metrics.bug(error)
        _log.error("connection closed: a bug", peer=peer, why=repr(error), exc_info=error)


class ConnectionState(IntEnum):
    """What a connection does; it begins no request from DRAINING on."""

    NEW = 0
    """Accepted; nothing was received yet."""
    AT_REST = 1
    """No task reads: `Readiness` calls when its socket has bytes."""
    BUSY = 2
    """A task reads: it has to wait for something, or its client sends much."""
    RECEIVING = 3
    """That task receives a large frame, in pieces."""
    DRAINING = 4
    """A task answers what was begun, then hangs up."""
    ENDING = 5
    """Something broke: it is closed as soon as the call that found this has returned."""
    CLOSED = 6


NEXT: Final[Mapping[ConnectionState, frozenset[ConnectionState]]] = {
    ConnectionState.NEW: frozenset(
        {ConnectionState.AT_REST, ConnectionState.ENDING, ConnectionState.CLOSED}
    ),
    ConnectionState.AT_REST: frozenset(
        {
            ConnectionState.BUSY,
            ConnectionState.DRAINING,
            ConnectionState.ENDING,
            ConnectionState.CLOSED,
        }
    ),
    ConnectionState.BUSY: frozenset(
        {
            ConnectionState.AT_REST,
            ConnectionState.RECEIVING,
            ConnectionState.DRAINING,
            ConnectionState.ENDING,
            ConnectionState.CLOSED,
        }
    ),
    ConnectionState.RECEIVING: frozenset(
        {
            ConnectionState.BUSY,
            ConnectionState.DRAINING,
            ConnectionState.ENDING,
            ConnectionState.CLOSED,
        }
    ),
    ConnectionState.DRAINING: frozenset({ConnectionState.ENDING, ConnectionState.CLOSED}),
    ConnectionState.ENDING: frozenset({ConnectionState.CLOSED}),
    ConnectionState.CLOSED: frozenset(),
}
"""All ways from one state to another; only `Connection._become` takes them."""


class Connection:
    """One client, until it hangs up or is hung up on."""

    __slots__ = (
        "_large",
        "_lingering",
        "_on_closed",
        "_partial",
        "_pending",
        "_reading",
        "_shared",
        "_sock",
        "_turn_bytes",
        "_turn_frames",
        "_writing",
        "authentication",
        "caller",
        "hold",
        "last_active",
        "on_close",
        "peer",
        "replies",
        "software",
        "state",
    )

    def __init__(
        self,
        sock: ByteSocket,
        peer: str,
        shared: Shared,
        on_closed: Callable[[], None],
        caller: Caller,
    ) -> None:
        self._sock = sock
        self._shared = shared
        self._on_closed = on_closed
        self._pending = b""  # received, not begun: an incomplete frame; complete ones without room
        self._partial: PartialFrame | None = None  # the frame at the front, while it is incomplete
        self._large: LowWater | None = None  # of that frame, if it is a large one
        self._reading: trio.CancelScope | None = None  # of the task that reads
        self._lingering: trio.CancelScope | None = None  # of its wait for more, in a task
        self._writing: trio.CancelScope | None = None  # of the task that writes
        self._turn_bytes = 0
        self._turn_frames = 0
        self.state = ConnectionState.NEW
        self.peer = peer
        self.caller = caller
        """Who its requests come from; another one once its client has authenticated."""
        self.authentication: Authentication | None = None
        """How its client authenticates; None where the listener has no SASL."""
        self.software = ""
        self.hold = Hold()
        self.last_active = trio.current_time()
        self.on_close: dict[int, Callable[[], None]] = {}
        self.replies = ReplyQueue(
            sock, shared.limits, shared.memory, shared.metrics, self, shared.batch
        )

    # ---- states ----

    @property
    def is_closed(self) -> bool:
        """True once it was hung up."""
        return self.state is ConnectionState.CLOSED

    def _become(self, state: ConnectionState) -> None:
        before = self.state
        assert state in NEXT[before], f"a connection goes from {before.name} to {state.name}"
        self.state = state

    def open(self) -> None:
        """Serve from now on, as one at rest."""
        try:
            self._shared.readiness.watch(self._sock.fileno(), self)
        except OSError as error:  # the kernel has no memory for it, or too many are watched
            _log.error("connection closed: cannot be watched", peer=self.peer, why=error.strerror)
            self.close()
        else:
            self._become(ConnectionState.AT_REST)

    def close(self) -> None:
        """Hang up: drop what is parked, give memory back, end the tasks, close the socket. What
        settles an answer must call `broken` instead."""
        if self.state is ConnectionState.CLOSED:
            return
        self._become(ConnectionState.CLOSED)
        descriptor = self._sock.fileno()
        self._shared.readiness.unwatch(descriptor)
        for scope in (self._reading, self._writing):
            if scope is not None:
                scope.cancel()
        self._drop_partial()
        self.replies.close()
        if self.authentication is not None:
            self.authentication.closed()
        while self.on_close:
            _, callback = self.on_close.popitem()
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - the other callbacks must run too
                self._shared.failed(error, self.peer)
        trio.lowlevel.notify_closing(descriptor)
        self._sock.close()
        self._on_closed()

    def broken(self) -> None:
        """Hang up soon, not in this call, which may come from the Raft engine."""
        if self.state < ConnectionState.ENDING:
            self._become(ConnectionState.ENDING)
            self._shared.readiness.unwatch(self._sock.fileno())
            self._shared.spawn(self._end)

    def failed(self, error: Exception) -> None:
        """A bug of ours in sending an answer: hang up soon."""
        self._shared.failed(error, self.peer)
        self.broken()

    async def _end(self) -> None:
        try:
            self.close()
        except Exception as error:  # noqa: BLE001 - as in receive()
            self._shared.failed(error, self.peer)

    def finish(self) -> None:
        """Begin no more requests; answer those in hand, then hang up."""
        if self.state >= ConnectionState.DRAINING:
            return
        self._become(ConnectionState.DRAINING)
        if self._reading is not None:
            self._reading.cancel()
        else:
            self._begin_task()

    def rest_if_quiet(self, now: float) -> None:
        """End tasks that a busy client needed and that this one no longer needs."""
        if now - self.last_active > QUIET_S:
            if self._lingering is not None:
                self._lingering.cancel()
            self.replies.rest()

    def hang_up_if_stalled(self, now: float) -> bool:
        """Close when idle, or stuck in the middle of a frame or of an answer, for too long."""
        limits = self._shared.limits
        if self.authentication is not None and self.authentication.is_too_slow():
            self._shared.refused("request_receive_timeout_ms")
            self.close()
            return True
        quiet_ms = (now - self.last_active) * 1000
        stalled_since = self.replies.stalled_since
        if stalled_since is not None:
            is_over = (now - stalled_since) * 1000 > limits.send_stall_ms
        elif self._partial is not None:
            is_over = self._is_too_slow(self._partial, now, quiet_ms)
            if self._large is not None and quiet_ms > LINGER_S * 1000:
                self._large.tolerate()
        else:
            is_over = self.replies.is_idle and quiet_ms > limits.connection_idle_ms
        if is_over:
            self.close()
        return is_over

    def _is_too_slow(self, frame: PartialFrame, now: float, quiet_ms: float) -> bool:
        limits = self._shared.limits
        if frame.is_waiting:
            return False  # for memory of this node
        is_over = quiet_ms > limits.request_receive_timeout_ms or frame.age_s(now) > receive_s_max(
            frame.size, limits
        )
        if is_over:
            self._shared.refused("request_receive_timeout_ms")
            _log.warning(
                "connection closed: its request came too slowly",
                peer=self.peer,
                bytes_came=frame.held,
                bytes_announced=frame.size,
            )
        return is_over

    def _evicted(self) -> None:
        """Hang up: other frames wait for the memory that this client's incomplete frame holds."""
        frame = self._partial
        try:
            self._shared.refused("request_memory_bytes_max")
            _log.warning(
                "connection closed: request memory is wanted by others",
                peer=self.peer,
                bytes_came=0 if frame is None else frame.held,
                bytes_announced=0 if frame is None else frame.size,
            )
            self.broken()
        except Exception as error:  # noqa: BLE001 - the frames that want the memory go on
            self.failed(error)

    # ---- reading at rest ----

    def receive(self) -> None:
        """Begin what came, as far as that is possible without waiting."""
        if self.state is not ConnectionState.AT_REST:
            return
        if not self.replies.has_room:
            self._to_task()
            return
        self._turn_frames = self._turn_bytes = 0
        try:
            if not self._receive_now():
                self.close()
            elif self._must_wait() and self.state is ConnectionState.AT_REST:
                self._to_task()
        except RemoteProtocolError as error:
            self._refused(error)
            self.close()
        except OSError:
            self.close()  # the client is gone
        except Exception as error:  # noqa: BLE001 - any bug costs this connection alone
            self._shared.failed(error, self.peer)
            self.close()

    def _receive_now(self) -> bool:
        """Take in what the socket has; False at the end of the stream."""
        shared = self._shared
        scratch = shared.scratch
        while True:
            pending = self._pending
            start = len(pending)
            if start:
                scratch[:start] = pending
            try:
                count = self._sock.recv_into(scratch[start:] if start else scratch)
            except BlockingIOError:
                shared.budget.give_back(RECEIVE_COST)
                return True
            if count == 0:
                return False
            self._received(count)
            end = start + count
            used = self._begin_complete(scratch[:end])
            self._pending = bytes(scratch[used:end]) if used < end else b""
            if used < end or start:
                self._note_pending(used)
            if end <= SMALL_RECEIVE_BYTES and self._turn_frames <= 1:
                shared.budget.give_back(RECEIVE_COST - SMALL_RECEIVE_COST)
                return True
            if end < SCRATCH_BYTES or self.state >= ConnectionState.DRAINING or self._must_wait():
                return True  # the scratch buffer was not filled: the socket has no more
            if self._turn_bytes >= TURN_BYTES_MAX or not shared.budget.try_take(RECEIVE_COST):
                return True  # the epoll names it again in the next pass

    def _must_wait(self) -> bool:
        """True when there is something to do that needs a task."""
        if not self.replies.has_room:
            return True
        pending = self._pending
        if len(pending) < FRAME_HEAD.size:
            return False
        end: int = FRAME_HEAD.unpack_from(pending)[0] + 4
        return end > SCRATCH_BYTES or end <= len(pending)

    def _to_task(self) -> None:
        self._become(ConnectionState.BUSY)
        self._begin_task()

    def _begin_task(self) -> None:
        self._shared.readiness.unwatch(self._sock.fileno())
        self._reading = trio.CancelScope()
        self._shared.spawn(self._read)

    # ---- reading in a task ----

    async def _read(self) -> None:
        """Read until the client is quiet, or either side ends it."""
        if self.state is ConnectionState.CLOSED:
            return  # it was closed after this task was made
        is_over = True
        try:
            scope = self._reading
            assert scope is not None, "set where this task is started"
            if self.state is not ConnectionState.DRAINING:
                with scope:
                    is_over = await self._read_while_busy()
            if self.state is ConnectionState.DRAINING:
                with trio.CancelScope() as self._reading:
                    await self._drain()
                is_over = True
        except RemoteProtocolError as error:
            self._refused(error)
        except (OSError, trio.ClosedResourceError):
            pass  # the client is gone
        except Exception as error:  # noqa: BLE001 - as in receive()
            is_over = True
            self._shared.failed(error, self.peer)
        finally:
            self._reading = self._lingering = None
            if is_over:
                self.close()
        if self.state is ConnectionState.BUSY:
            self.open()

    async def _read_while_busy(self) -> bool:
        """Read; True when the connection is over, False when the client is quiet."""
        replies = self.replies
        sock = self._sock
        scratch = self._shared.scratch
        budget = self._shared.budget
        while self.state < ConnectionState.ENDING:
            if self._turn_frames >= TURN_FRAMES_MAX or self._turn_bytes >= TURN_BYTES_MAX:
                await trio.lowlevel.checkpoint()
                self._turn_frames = self._turn_bytes = 0
            # Checked after the wait above, in which an answer may have taken the room. Without
            # room nothing below would begin, and the task would wait for more bytes instead.
            if not replies.has_room:
                await replies.room()
                if self.state is ConnectionState.CLOSED:
                    break
            pending = self._pending
            used = self._begin_complete(memoryview(pending))
            if used:
                self._pending = pending[used:]
                self._note_pending(used)
                continue
            size = self._size_of_large(pending)
            if size:
                await self._receive_large(size, pending)
                continue
            start = len(pending)
            if not budget.try_take(RECEIVE_COST):
                await budget.take(RECEIVE_COST)
            scratch[:start] = pending
            try:
                count = sock.recv_into(scratch[start:])
            except BlockingIOError:
                budget.give_back(RECEIVE_COST)
                if not await self._linger():
                    return False
                continue
            if count == 0:
                return True
            self._received(count)
            used = self._begin_complete(scratch[: start + count])
            self._pending = pending = bytes(scratch[used : start + count])
            if pending or start:
                self._note_pending(used)
            is_all = not pending and start + count < SCRATCH_BYTES and replies.has_room
            # Then the socket has no more, and another recv would only say so.
            if is_all and not await self._linger():
                return False
        return True

    async def _linger(self) -> bool:
        """Wait until there is more to read; False when that takes too long for a task."""
        self._turn_frames = self._turn_bytes = 0
        with trio.CancelScope() as self._lingering:
            await self._until_readable()
        scope, self._lingering = self._lingering, None
        return not scope.cancelled_caught

    async def _drain(self) -> None:
        """Answer what was begun; then let the client close first. If this node closed with requests
        unread, the kernel would send a reset, which destroys answers still on their way."""
        await self.replies.idle()
        if self.authentication is not None and self.authentication.has_failed:
            # Some clients that see the end at once never look at the answer that says why.
            with trio.move_on_after(PART_S):
                await self._until_readable()
        self._sock.shutdown(socket.SHUT_WR)
        with trio.move_on_after(PART_S):
            while True:
                await self._until_readable()
                if not self._sock.recv(SCRATCH_BYTES):
                    return

    async def _until_readable(self) -> None:
        """Wait for bytes or the end.

        Raises:
            trio.ClosedResourceError: it was hung up on, perhaps before this wait: a task that was
                woken meanwhile is not cancelled any more, and trio must not be told of a descriptor
                that is none.
        """
        if self.is_closed:
            raise trio.ClosedResourceError("hung up on meanwhile")
        await trio.lowlevel.wait_readable(self._sock)

    # ---- writing in a task ----

    def stalled(self) -> None:
        """Answers wait for the socket, or for their bytes: start the task that sends them."""
        self._writing = trio.CancelScope()
        self._shared.spawn(self._write)

    async def _write(self) -> None:
        scope = self._writing
        assert scope is not None, "set where this task is started"
        try:
            with scope:
                await self.replies.drain()
        except (OSError, trio.ClosedResourceError, DiskError, SpanTruncatedError):
            self.close()  # part of an answer may have left: the stream cannot go on
        except Exception as error:  # noqa: BLE001 - as in receive()
            self._shared.failed(error, self.peer)
            self.close()
        finally:
            self._writing = None

    # ---- frames ----

    def _begin_complete(self, view: memoryview) -> int:
        """Begin complete frames at the front while there is room; gives the bytes they took."""
        if len(view) >= 2 * FRAME_HEAD.size:
            first_end = 4 + FRAME_HEAD.unpack_from(view)[0]
            if first_end + FRAME_HEAD.size <= len(view):
                with self._shared.batch.together():
                    return self._begin_each(view)
        return self._begin_each(view)

    def _begin_each(self, view: memoryview) -> int:
        position = 0
        shared = self._shared
        while len(view) - position >= FRAME_HEAD.size:
            size, api_key, _ = FRAME_HEAD.unpack_from(view, position)
            if self.authentication is None or not self.authentication.is_bare:
                check_frame(size, api_key, shared.limits)
            if self.authentication is not None:
                self.authentication.check_frame(size)
            end = position + 4 + size
            if end > len(view) or self.state >= ConnectionState.DRAINING:
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

    def _note_pending(self, used: int) -> None:
        """What is pending changed, after `used` bytes were begun: charge what came of the frame at
        the front, unless it is complete and only waits for its turn."""
        pending = self._pending
        if used:
            self._drop_partial()
        size = 0
        if len(pending) >= FRAME_HEAD.size:
            size = FRAME_HEAD.unpack_from(pending)[0]
        if not pending or 0 < size <= len(pending) - 4 or self.state >= ConnectionState.ENDING:
            self._drop_partial()
            return
        memory = self._shared.memory
        frame = self._partial
        if frame is None:
            frame = self._partial = memory.open(size, trio.current_time(), self._evicted)
        frame.size = size
        memory.hold(frame, len(pending))

    def _low_water(self) -> LowWater:
        return LowWater(self._sock)

    def _drop_partial(self) -> None:
        frame, self._partial = self._partial, None
        if frame is not None:
            self._shared.memory.drop(frame)

    async def _receive_large(self, size: int, pending: bytes) -> None:
        """Receive and begin the frame of which `pending` is all that came so far."""
        shared = self._shared
        memory = shared.memory
        partial = self._partial
        assert partial is not None, "a frame that came in part is charged"
        if not shared.piece:
            shared.piece = memoryview(bytearray(PIECE_BYTES_MAX))
        frame = bytearray(pending[4:])
        self._pending = b""
        self._large = self._low_water()
        self._become(ConnectionState.RECEIVING)
        try:
            memory.shrink(partial, 4)
            while len(frame) < size:
                await self._receive_piece(partial, frame, size - len(frame), self._large)
            self._large.end()
            charge = memory.complete(partial)
            self._partial = None
        finally:
            self._large = None
        if self.state is ConnectionState.RECEIVING:  # else it was closed meanwhile
            self._become(ConnectionState.BUSY)
        try:
            if not shared.budget.try_take(size):
                await shared.budget.take(size)
            if self.state >= ConnectionState.ENDING:
                raise trio.ClosedResourceError("hung up on meanwhile")
        except BaseException:
            memory.release(charge)
            raise
        self._begin(frame)

    async def _receive_piece(
        self, partial: PartialFrame, frame: bytearray, missing: int, large: LowWater
    ) -> None:
        """Add to `frame` the bytes that are there, or wait until there are some."""
        memory, sock = self._shared.memory, self._sock
        wanted = min(missing, PIECE_BYTES_MAX)
        granted = memory.try_grow(partial, wanted)
        if not granted:
            self._turn_frames = self._turn_bytes = 0
            granted = await memory.grow(partial, wanted)
            self.last_active = trio.current_time()  # the wait was for this node's memory
            self._check_open(partial)
        piece = self._shared.piece[:granted]
        try:
            count = sock.recv_into(piece)
        except BlockingIOError:
            memory.shrink(partial, granted)
            memory.pauses(partial)
            self._turn_frames = self._turn_bytes = 0
            large.wait_for(missing)
            await trio.lowlevel.wait_readable(sock)
            self._check_open(partial)
            return
        memory.shrink(partial, granted - count)
        if count == 0:
            raise ConnectionResetError("closed in the middle of a frame")
        frame += piece[:count]  # grows by what came, an eighth more where that is little
        self._received(count)

    def _check_open(self, partial: PartialFrame) -> None:
        if self.state >= ConnectionState.ENDING or not partial.is_open:
            raise trio.ClosedResourceError("hung up on meanwhile")

    def _received(self, count: int) -> None:
        self._shared.metrics.bytes_in += count
        self._turn_bytes += count
        self.last_active = trio.current_time()

    def _refused(self, error: RemoteProtocolError) -> None:
        self._shared.metrics.protocol_errors += 1
        _log.warning("connection closed: bad request", peer=self.peer, why=str(error))


class TlsConnection(Connection):
    """One client whose bytes are encrypted, once its handshake is over.

    What is decrypted and not read yet wakes no epoll. So it rests only where there is none of it; a
    task, which reads until there is none, has no such trouble.
    """

    __slots__ = ("_hidden",)

    def __init__(
        self,
        sock: TlsSocket,
        peer: str,
        shared: Shared,
        on_closed: Callable[[], None],
        caller: Caller,
    ) -> None:
        super().__init__(sock, peer, shared, on_closed, caller)
        self._hidden = sock

    @property
    def certificate(self) -> bytes | None:
        """What its client showed (DER), None where it showed none."""
        return self._hidden.peer_certificate

    def open(self) -> None:
        """Serve from now on; what came with the end of the handshake at once."""
        super().open()
        if self.state is ConnectionState.AT_REST and self._hidden.has_unread:
            self._to_task()

    def _must_wait(self) -> bool:
        return self._hidden.has_unread or super()._must_wait()

    def _low_water(self) -> LowWater:
        return TlsLowWater(self._sock)
