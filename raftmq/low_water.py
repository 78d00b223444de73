"""Waking up once for many bytes: the receive low-water mark of a socket.

Whoever waits for the rest of a large frame would else be woken for every packet that arrives: a
megabyte came in some thirty receives, each with a turn of the loop of its own, which cost more than
the bytes. With the mark set, the kernel reports the socket readable only when that much is there
(or the other side has ended), and makes its buffer large enough for it. A leaf for whatever
receives; keeps no state.
"""

from __future__ import annotations

import socket
from typing import Final

MARK_BYTES_MIN: Final = 64 << 10
"""For less a mark is not worth its two system calls."""
MARK_BYTES_MAX: Final = 512 << 10
"""Not more, so that receiving and sending of a large frame overlap."""


def raise_mark(sock: socket.socket, missing_bytes: int, mark_bytes: int) -> int:
    """Before waiting for the rest of a frame: be woken for much of it at once.

    `mark_bytes` is the mark that is set now; returns the new one.
    """
    wanted = min(missing_bytes, MARK_BYTES_MAX)
    if wanted < MARK_BYTES_MIN:
        wanted = 1  # the last bytes: a frame's end must never wait for what follows it
    if wanted != mark_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
    return wanted


def reset_mark(sock: socket.socket, mark_bytes: int) -> None:
    """The frame is complete: the next byte counts again."""
    if mark_bytes != 1:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
