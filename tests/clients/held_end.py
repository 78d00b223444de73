"""A proxy before one node that holds an EndTxn back and hands it over when it is told to.

The client, which waits no longer, opens another connection and asks again; what was held arrives
afterwards on the old one, as from a network that took its time.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

from raftmq.protocol.api_versions import ApiKey

WAIT_S = 60.0
_HEAD = struct.Struct(">ihhi")
"""Size, api key, version and correlation id."""


class HeldEnd:
    """Between all clients and a node's port."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._target: tuple[str, int] | None = None
        self._is_armed = False
        self._is_held = threading.Event()
        self._held: tuple[socket.socket, bytes] | None = None
        self._answered = threading.Event()
        self._code: int | None = None
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
        for sock in [self._listener, *self._sockets]:
            sock.close()

    def serve(self, host: str, port: int) -> None:
        """Begin to pass everything on."""
        self._target = (host, port)
        self._run(self._accept)

    def arm(self) -> None:
        """Hold the next EndTxn, and no other."""
        self._is_armed = True

    def wait_held(self) -> None:
        """Return once one is held."""
        assert self._is_held.wait(WAIT_S)

    def release(self) -> int:
        """Hand over what was held; its error code."""
        assert self._held is not None
        sock, frame = self._held
        sock.sendall(frame)
        assert self._answered.wait(WAIT_S)
        assert self._code is not None
        return self._code

    def _run(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        assert self._target is not None
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            self._run(self._forth, near, far)
            self._run(self._back, far, near)

    def _forth(self, near: socket.socket, far: socket.socket) -> None:
        while frame := _frame(near):
            _, api, version, _ = _HEAD.unpack_from(frame)
            if api == ApiKey.END_TXN and self._is_armed:
                assert version == 5, "the second protocol"
                self._is_armed = False
                self._held = (far, frame)
                self._is_held.set()
                continue
            with contextlib.suppress(OSError):
                far.sendall(frame)
        # A connection with a request that is still on its way is not over for the node.
        if self._held is None or self._held[0] is not far:
            with contextlib.suppress(OSError):
                far.shutdown(socket.SHUT_WR)

    def _back(self, far: socket.socket, near: socket.socket) -> None:
        while frame := _frame(far):
            if self._held is not None and self._held[0] is far:
                wanted = self._held[1][8:12]
                if frame[4:8] == wanted:
                    # Correlation id, no tags, throttle time, error code.
                    self._code = struct.unpack_from(">h", frame, 13)[0]
                    self._answered.set()
            with contextlib.suppress(OSError):
                near.sendall(frame)
        with contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_WR)


def _frame(sock: socket.socket) -> bytes:
    """The next frame with its size; nothing at the end."""
    data, wanted = b"", 4
    while len(data) < wanted:
        try:
            piece = sock.recv(wanted - len(data))
        except OSError:
            return b""
        if not piece:
            return b""
        data += piece
        if len(data) == 4 and wanted == 4:
            wanted += struct.unpack(">i", data)[0]
    return data
