"""TLS over a non-blocking socket that behaves like the socket itself.

Who reads and writes goes on as with a plain one: `recv_into`, `send` and BlockingIOError mean what
they mean there. Three promises make that true:

- A receive that fills less than the buffer, or raises BlockingIOError, leaves nothing in memory:
  what is with the kernel, or comes next, wakes whoever waits for the descriptor. One that fills the
  buffer may leave plaintext in memory, of which no epoll knows (`has_unread`).
- What `send` reports as sent is with the kernel. What is encrypted and did not fit there is
  reported by a later call, which begins with the same bytes: as they are not taken back, so the
  order of bytes is kept, and who waits until the socket is writable wakes for them.
- Not more is encrypted in one call than a turn of the loop may take.

Handshakes are not made here (`handshake.py`). Renegotiation is off in the contexts.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import trio

from raftmq.errors import RemoteProtocolError
from raftmq.runtime.peer_proofs import StreamProofs
from raftmq.runtime.sockets import LowWater
from raftmq.tls import TlsEndedError, TlsLayer
from raftmq.types import Buffer, NodeId

STAGE_BYTES: Final = 64 << 10
"""Ciphertext is received in pieces of this many bytes, through one buffer of all connections."""
CHUNK_BYTES: Final = 64 << 10
"""So much is encrypted at a time: it stays in the processor's cache."""
SEND_BYTES_MAX: Final = 1 << 20
"""And so much in one call."""
RECEIVE_BYTES_MAX: Final = 1 << 20
"""So much of a large frame is decrypted in one turn."""
RECORD_BYTES_MAX: Final = (16 << 10) + 512
"""Ciphertext of one record, which may have come in part and lies in memory."""
READS_MAX: Final = 1024
"""After so many records no more ciphertext is received in one call: each may hold a single byte."""
ANSWER_BYTES_MAX: Final = 256 << 10
"""Ciphertext that waits behind what the kernel did not take: a chunk, and answers of TLS itself.
Who asks for these and never takes them would have the memory."""
RECORD_BYTES_MORE: Final = 128
"""Of ciphertext than of plaintext, for each receive: head, tag and padding of a record are less."""
EMPTY_BYTES_MAX: Final = 64 << 10
"""Ciphertext beyond that, without plaintext. New keys and empty records cost much and say nothing:
who sends no end of them would have the loop alone."""

_stage: Final = memoryview(bytearray(STAGE_BYTES))


class TlsSocket:
    """A connected socket whose handshake is over."""

    __slots__ = ("_empty_bytes", "_has_ended", "_layer", "_sealed", "_sock", "_taken")

    def __init__(self, sock: socket.socket, layer: TlsLayer) -> None:
        assert layer.is_ready, "handshakes are made elsewhere"
        self._sock = sock
        self._layer = layer
        self._sealed = memoryview(b"")  # ciphertext that the kernel did not take yet
        self._taken = 0  # bytes of plaintext that it hides at its end, not reported as sent yet
        self._has_ended = False
        self._empty_bytes = 0  # of ciphertext, without plaintext so far

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self._sock.fileno()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """As the socket's."""
        self._sock.setsockopt(level, option, value)

    @property
    def peer_certificate(self) -> bytes | None:
        """What the other side showed (DER), None where it showed none."""
        return self._layer.peer_certificate

    @property
    def has_unread(self) -> bool:
        """True when `recv_into` may find something that no epoll tells of."""
        return self._layer.has_unread

    def recv_into(self, buffer: memoryview) -> int:
        """Plaintext that is there, at least a byte; 0 at the end of the stream.

        Raises:
            BlockingIOError: there is none.
            OSError: the connection broke, or what came is no TLS of this connection.
        """
        count, reads, is_dry = 0, 0, False
        while count < len(buffer):
            try:
                # To ask where there is nothing costs an exception, more than a frame's decryption.
                got = self._layer.read_into(buffer[count:]) if self._layer.has_unread else 0
            except TlsEndedError:
                self._has_ended = True
                return count
            except RemoteProtocolError as error:
                raise ConnectionAbortedError(str(error)) from error
            if got:
                count += got
                reads += 1
                self._empty_bytes -= got + RECORD_BYTES_MORE
                continue
            if self._empty_bytes > EMPTY_BYTES_MAX:
                raise ConnectionAbortedError("TLS: new keys and empty records without end")
            self._empty_bytes = max(0, self._empty_bytes)
            if is_dry or self._has_ended or reads >= READS_MAX:
                break
            try:
                came = self._sock.recv_into(_stage)
            except BlockingIOError:
                break
            self._has_ended = came == 0
            is_dry = came < STAGE_BYTES
            self._empty_bytes += came
            self._layer.feed(_stage[:came])
        if self._layer.has_outgoing:  # an answer of TLS itself, such as a new key
            with suppress(BlockingIOError):
                self._flush(0)
            if self._layer.outgoing_bytes > ANSWER_BYTES_MAX:
                raise ConnectionAbortedError("TLS: it asks for new keys and does not take them")
        if count == 0 and not self._has_ended:
            raise BlockingIOError
        return count

    def recv(self, size: int) -> bytes:
        """Ciphertext, to be thrown away: for who only waits for the other side's end."""
        return self._sock.recv(size)

    def send(self, data: Buffer, flags: int = 0) -> int:
        """Send from the front of `data`; how many bytes the kernel has.

        Raises:
            BlockingIOError: none yet; call again with the same bytes at the front.
            OSError: the connection broke.
        """
        sent = 0
        if self._taken:
            self._flush(flags)
            sent, self._taken = self._taken, 0
        view = memoryview(data)
        end = min(len(view), SEND_BYTES_MAX)
        while sent < end:
            piece = view[sent : min(sent + CHUNK_BYTES, end)]
            self._layer.write([piece])
            self._taken = len(piece)
            try:
                self._flush(flags)
            except BlockingIOError:
                if not sent:
                    raise
                break
            sent += self._taken
            self._taken = 0
        return sent

    def _flush(self, flags: int) -> None:
        """Give the kernel all ciphertext.

        Raises:
            BlockingIOError: it does not take all.
        """
        while True:
            if not self._sealed:
                pieces = self._layer.outgoing()
                if not pieces:
                    return
                self._sealed = memoryview(pieces[0])
            count = self._sock.send(self._sealed, flags)
            self._sealed = self._sealed[count:]

    def shutdown(self, how: int) -> None:
        """Say goodbye and end the stream, in the direction `how`."""
        self._part()
        self._sock.shutdown(how)

    def close(self) -> None:
        """Say goodbye if that needs no waiting, and close the socket."""
        if self._sock.fileno() >= 0:
            self._part()
        self._sock.close()

    def _part(self) -> None:
        if self._taken or self._has_ended:
            return
        self._has_ended = True
        # The other side may be gone already: then there is nobody to take leave of.
        with suppress(OSError, RemoteProtocolError):
            self._layer.end()
            self._flush(0)


class PeerTlsSocket(TlsSocket):
    """An encrypted stream to or from a peer, whose certificate was checked, or which has proved the
    cluster's secret."""

    __slots__ = ("node_id", "proofs")

    def __init__(
        self,
        sock: socket.socket,
        layer: TlsLayer,
        node_id: NodeId | None,
        proofs: StreamProofs | None = None,
    ) -> None:
        super().__init__(sock, layer)
        self.node_id = node_id
        """The node that the other side's certificate names; None where the secret is known, which
        any node knows."""
        self.proofs = proofs
        """By which hellos are proved, where the secret is known."""

    def sendmsg(self, pieces: Sequence[Buffer]) -> int:
        """As `send` of all pieces, one after the other."""
        if len(pieces) == 1:
            return self.send(pieces[0])
        size, some = 0, []
        for piece in pieces:
            view = memoryview(piece)[: SEND_BYTES_MAX - size]
            some.append(view)
            size += len(view)
        return self.send(b"".join(some))

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Ciphertext: to look whether the stream has ended."""
        return self._sock.recv(size, flags)

    def getpeername(self) -> tuple[str, int]:
        """As the socket's."""
        host, port = self._sock.getpeername()[:2]
        return host, port

    def _part(self) -> None:
        """End without a word."""


PeerSocket = socket.socket | PeerTlsSocket


class TlsLowWater(LowWater):
    """The mark of a socket on which plaintext of a known size is still to come.

    Part of it may lie in memory as an incomplete record, and so much less is to come of the socket:
    a mark for all of it would never be reached.
    """

    __slots__ = ()

    def wait_for(self, missing_bytes: int) -> None:
        """Before waiting for the rest of a frame: be woken for much of it at once."""
        super().wait_for(max(1, missing_bytes - RECORD_BYTES_MAX))


async def recv_hidden_rest(sock: TlsSocket, rest: memoryview) -> None:
    """Fill `rest` with a large frame's remaining bytes; others have the loop between pieces, since
    to decrypt takes longer than to receive.

    Raises:
        EOFError: the other side has ended.
    """
    low_water = TlsLowWater(sock)
    while rest:
        try:
            count = sock.recv_into(rest[:RECEIVE_BYTES_MAX])
        except BlockingIOError:
            low_water.wait_for(len(rest))
            await trio.lowlevel.wait_readable(sock)
            continue
        if count == 0:
            raise EOFError
        rest = rest[count:]
        if count == RECEIVE_BYTES_MAX:
            await trio.lowlevel.checkpoint()
    low_water.end()
