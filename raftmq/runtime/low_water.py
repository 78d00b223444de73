"""Waking up once for many bytes: the receive low-water mark of a socket.

Whoever waits for the rest of a large frame would else be woken for every packet that arrives: a
megabyte came in some thirty receives, each with a turn of the loop of its own, which cost more than
the bytes. With the mark set, the kernel reports the socket readable only when that much is there
(or the other side has ended), and makes its buffer large enough for it. A leaf for whatever
receives.
"""

from __future__ import annotations

import socket
from typing import Final

MARK_BYTES_MIN: Final = 64 << 10
"""For less a mark is not worth its two system calls."""
MARK_BYTES_MAX: Final = 512 << 10
"""Not more, so that receiving and sending of a large frame overlap."""


LINGER_S: Final = 1.0
"""A sender that takes longer for a mark's worth is slow; it is received as it comes."""


class LowWater:
    """The mark of one socket while it receives a large frame."""

    __slots__ = ("_is_slow", "_mark_bytes", "_sock")

    def __init__(self, sock: socket.socket) -> None:
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
