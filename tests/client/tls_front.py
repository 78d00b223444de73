"""TLS before a broker that speaks plain: a certificate of its own, and every byte passed on.

For tests of what clients do with TLS. Nothing of the Kafka protocol is looked at here.
"""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

from tests.client.fake_broker import FakeBroker

CERTIFICATE = Path(__file__).parent / "tls" / "cert.pem"
"""Of 127.0.0.1, signed by itself."""


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, CERTIFICATE.with_name("key.pem"))
    return context


class TlsFront:
    """Takes TLS connections for a broker that speaks plain."""

    def __init__(self, broker: FakeBroker) -> None:
        self._target = broker.port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._context = server_context()
        self._sockets: list[socket.socket] = [self._server]
        broker.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it has ended already
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                plain, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        self._sockets.append(plain)
        try:
            hidden = self._context.wrap_socket(plain, server_side=True)
        except OSError:
            return
        behind = socket.create_connection(("127.0.0.1", self._target))
        self._sockets += [hidden, behind]
        threading.Thread(target=_copy, args=(behind, hidden), daemon=True).start()
        _copy(hidden, behind)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
