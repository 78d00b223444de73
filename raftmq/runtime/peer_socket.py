"""A socket between two nodes: how it is set up, and how bytes are received from it.

Knows nothing of frames.
"""

from __future__ import annotations

import socket
import sys
from typing import Final

import trio

from raftmq.runtime.low_water import LowWater

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
        # Who only reads sends nothing that could remain unacknowledged.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNHEARD_MS // 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)


async def recv_into(sock: socket.socket, buffer: memoryview) -> int:
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


async def read_exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes, neither more nor less.

    Raises:
        EOFError: the other side has ended.
    """
    buffer = memoryview(bytearray(size))
    have = 0
    while have < size:
        have += await recv_into(sock, buffer[have:])
    return bytes(buffer)
