"""One TLS handshake over a non-blocking socket, of either side: its costly steps in worker threads.

Bytes that come one by one cost no thread, and more than any handshake needs is refused. Whoever
begins a handshake bounds its time and how many there are.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Final

import trio

from raftmq.errors import RaftmqError, RemoteProtocolError
from raftmq.runtime.sockets import recv_into, send_all
from raftmq.tls import TlsLayer

HELLO_BYTES_MAX: Final = 256 << 10
"""A chain of certificates is smaller by far."""
PART_S: Final = 0.1
"""How long the other side, when it is refused, has to hear why."""
_PIECE_BYTES: Final = 16 << 10
_RECORD_HEAD_BYTES: Final = 5
HANDSHAKE_RECORD: Final = 22
_ALERT_RECORD: Final = 21


class HandshakeError(RaftmqError):
    """A handshake cannot go on; `layer` may still have to say why."""

    def __init__(self, layer: TlsLayer, why: RemoteProtocolError) -> None:
        super().__init__(str(why))
        self.layer = layer
        self.why = why

    @property
    def is_about_certificates(self) -> bool:
        """True when one of both sides did not trust the other, or saw no certificate of it."""
        reason = getattr(self.why.__cause__, "reason", None) or ""
        return "CERTIFICATE" in reason or "UNKNOWN_CA" in reason


Turn = Callable[[bool], None]
"""Told True when it is this side's turn in a handshake, which may be long where many are made, and
False when the other side is waited for again."""


def ignore_turn(_is_ours: bool) -> None:
    """The `Turn` of a handshake for which no other one has to give way."""


class HalfOpen:
    """Connections whose other side is not known yet.

    Where there are too many, the one whose other side has been silent for longest gives way: an
    honest one goes on within milliseconds. One that waits for a thread of this node is not at
    fault, so the oldest of those goes only where all wait for a thread.
    """

    def __init__(self) -> None:
        self._waited: dict[int, trio.CancelScope] = {}  # the one that is waited for longest first
        self._working: dict[int, trio.CancelScope] = {}
        self._evicted: set[int] = set()
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._waited) + len(self._working) - len(self._evicted)

    def enter(self, scope: trio.CancelScope, count_max: int) -> tuple[int, bool]:
        """Another one has come, whose work is in `scope`: its number, and whether one had to go."""
        number = self._next_id
        self._next_id += 1
        is_full = len(self) >= count_max
        if is_full:
            everybody = chain(self._waited, self._working)
            longest = next(each for each in everybody if each not in self._evicted)
            self._evicted.add(longest)
            self._scope(longest).cancel()
        self._waited[number] = scope
        return number, is_full

    def turn(self, number: int, is_ours: bool) -> None:
        """It is this side's turn with it, or the other one's."""
        scope = self._scope(number)
        self._waited.pop(number, None)
        self._working.pop(number, None)
        (self._working if is_ours else self._waited)[number] = scope

    def leave(self, number: int) -> bool:
        """It is known, or gone; True when it gave way."""
        self._waited.pop(number, None)
        self._working.pop(number, None)
        was_evicted = number in self._evicted
        self._evicted.discard(number)
        return was_evicted

    def cancel_all(self) -> None:
        """End the work on all of them."""
        for scope in chain(self._waited.values(), self._working.values()):
            scope.cancel()

    def _scope(self, number: int) -> trio.CancelScope:
        return self._waited.get(number) or self._working[number]


async def shake(
    sock: socket.socket, layer: TlsLayer, limiter: trio.CapacityLimiter, turn: Turn = ignore_turn
) -> TlsLayer:
    """Go on until the handshake is over, and all that it says is with the kernel; returns `layer`.

    Args:
        limiter: of the threads that make handshakes.
        turn: told whose turn it is.

    Raises:
        EOFError, OSError: the other side went.
        HandshakeError: no TLS, too much of it, or nobody who is trusted.
    """
    piece = memoryview(bytearray(_PIECE_BYTES))
    records = _Records()
    if not layer.is_server:
        layer.shake()
        await _send_all(sock, layer)
    while not layer.is_ready:
        count = await recv_into(sock, piece)
        layer.feed(piece[:count])
        try:
            # Before there is nothing to do: bytes that come one by one cost no thread.
            if records.came(piece[:count]):
                turn(True)
                try:
                    why = await trio.to_thread.run_sync(_step, layer, limiter=limiter)
                finally:
                    turn(False)
                if why is not None:
                    raise HandshakeError(layer, why) from why
        except RemoteProtocolError as error:
            raise HandshakeError(layer, error) from error
        await _send_all(sock, layer)
    return layer


def _step(layer: TlsLayer) -> RemoteProtocolError | None:
    """One step in a thread; what is wrong is returned. Raised through the thread's border it would
    be part of a ring of frames, and no collection comes for those soon enough in a flood."""
    try:
        layer.shake()
    except RemoteProtocolError as error:
        error.__traceback__ = None
        if error.__cause__ is not None:
            error.__cause__.__traceback__ = None
        return error
    return None


class _Records:
    """Where the records of TLS end in what came."""

    def __init__(self) -> None:
        self._came = 0
        self._head = bytearray()  # of a record, as far as it came
        self._left = 0  # bytes of the present record's body that are still to come

    def came(self, data: memoryview) -> bool:
        """Take note of what came; True when a record is complete by it.

        Raises:
            RemoteProtocolError: too much, or it does not begin like a handshake.
        """
        if not self._came and data[0] not in (HANDSHAKE_RECORD, _ALERT_RECORD):
            raise RemoteProtocolError("TLS: not a handshake; the other side may speak plain")
        self._came += len(data)
        if self._came > HELLO_BYTES_MAX:
            raise RemoteProtocolError(f"TLS: more than {HELLO_BYTES_MAX} bytes of a handshake")
        position, is_complete = 0, False
        while position < len(data):
            if not self._left:
                self._head.append(data[position])
                position += 1
                if len(self._head) < _RECORD_HEAD_BYTES:
                    continue
                self._left = int.from_bytes(self._head[3:], "big")
                self._head.clear()
            step = min(self._left, len(data) - position)
            self._left -= step
            position += step
            is_complete = is_complete or not self._left
        return is_complete


async def _send_all(sock: socket.socket, layer: TlsLayer) -> None:
    for piece in layer.outgoing():
        await send_all(sock, piece)


async def say_why(sock: socket.socket, layer: TlsLayer) -> None:
    """Send the alert and let the other side hear it: closing with bytes unread would destroy it."""
    with trio.move_on_after(PART_S), suppress(OSError, EOFError):
        await _send_all(sock, layer)
        sock.shutdown(socket.SHUT_WR)
        piece = memoryview(bytearray(_PIECE_BYTES))
        while True:
            await recv_into(sock, piece)
            await trio.lowlevel.checkpoint()  # it may never stop sending
