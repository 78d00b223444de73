"""How sockets are set up for large frames and dead peers, and how bytes are received from them.

The receive low-water mark wakes a task once for many bytes. A task that waits for the rest of a
large frame would else be woken for every packet that arrives: a megabyte came in some thirty
receives, each with a pass of the loop of its own, which cost more than the bytes. With the mark
set, the kernel reports the socket readable only when that much is there (or the other side has
ended), and makes its buffer large enough for it. Knows nothing of frames.
"""

from __future__ import annotations

import socket
import sys
from typing import Final, Protocol

import trio

from raftmq.types import Buffer

MARK_BYTES_MIN: Final = 64 << 10
"""For less a mark is not worth its two system calls."""
MARK_BYTES_MAX: Final = 512 << 10
"""Not more, so that receiving and sending of a large frame overlap."""


LINGER_S: Final = 1.0
"""A sender that takes longer for a mark's worth is slow; it is received as it comes."""


class ByteSocket(Protocol):
    """What a connection needs of its socket, which is non-blocking; TLS has these ways too."""

    def fileno(self) -> int: ...
    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def send(self, data: Buffer, flags: int = 0, /) -> int: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class LowWater:
    """The mark of one socket while it receives a large frame."""

    __slots__ = ("_is_slow", "_mark_bytes", "_sock")

    def __init__(self, sock: ByteSocket) -> None:
        self._sock = sock
        self._mark_bytes = 1
        self._is_slow = False

    def wait_for(self, missing_bytes: int) -> None:
        """Before waiting for the rest of a frame: be woken for much of it at once."""
        wanted = 1 if self._is_slow else min(missing_bytes, MARK_BYTES_MAX)
        # A frame's last bytes must never wait for what follows it.
        self._set(wanted if wanted >= MARK_BYTES_MIN else 1)

    def tolerate(self) -> None:
        """The sender is slow: be woken for every byte, so that its progress is seen."""
        self._is_slow = True
        self._set(1)  # wakes the waiting reader if there is anything

    def end(self) -> None:
        """The frame is complete: the next byte counts again."""
        self._set(1)

    def _set(self, mark_bytes: int) -> None:
        if mark_bytes != self._mark_bytes:
            self._mark_bytes = mark_bytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark_bytes)


UNHEARD_MS: Final = 3_000
"""A connection on which the other kernel acknowledges nothing for so long ends, to be dialled anew.
Left alone, its intervals double: after half a minute's cut it stays silent for another half."""


def tune(sock: socket.socket, unsent_bytes_max: int = 0) -> None:
    """Small messages at once, a death noticed within seconds.

    Args:
        unsent_bytes_max: so much may wait in the kernel before it leaves; 0: the system's own
            bound, which is none. Never less than some segments (64 KiB each on loopback): the tail
            of a sendfile is held back until it fills one, and would wait for what is refused.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    if sys.platform == "linux":
        # In any case: a stream of trio's comes with 16 KiB.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent_bytes_max)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
        # An end that only reads sends nothing that could remain unacknowledged.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNHEARD_MS // 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)


async def send_all(sock: ByteSocket, data: Buffer) -> None:
    """Send all of it; on return the kernel has it.

    Raises:
        OSError: the connection broke.
    """
    rest = memoryview(data)
    while len(rest):
        try:
            rest = rest[sock.send(rest) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)


async def recv_into(sock: ByteSocket, buffer: memoryview) -> int:
    """Receive what there is, at least a byte; how much that was.

    Raises:
        EOFError: the other side has ended.
    """
    while True:
        try:
            count = sock.recv_into(buffer)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(sock)
            continue
        if count == 0:
            raise EOFError
        return count


async def recv_rest(sock: socket.socket, rest: memoryview) -> None:
    """Fill `rest` with a large frame's remaining bytes, in few turns of the loop.

    Raises:
        EOFError: the other side has ended.
    """
    low_water = LowWater(sock)
    while rest:
        try:
            count = sock.recv_into(rest)
        except BlockingIOError:
            low_water.wait_for(len(rest))
            await trio.lowlevel.wait_readable(sock)
            continue
        if count == 0:
            raise EOFError
        rest = rest[count:]
    low_water.end()


async def read_exactly(sock: ByteSocket, size: int) -> bytes:
    """So many bytes, neither more nor less.

    Raises:
        EOFError: the other side has ended.
    """
    buffer = memoryview(bytearray(size))
    have = 0
    while have < size:
        have += await recv_into(sock, buffer[have:])
    return bytes(buffer)
