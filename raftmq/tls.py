"""One TLS connection in memory: ciphertext goes in, plaintext comes out, and the other way round.

Knows no socket, no thread and no certificate file: a context says whom to trust and what to show.
Both sides use it, a client's core and a node's listeners; each performs what it asks for. What the
other side does wrong is a `RemoteProtocolError`, and what there is to be said about it (an alert)
stands in `outgoing` nevertheless.
"""

from __future__ import annotations

import ssl
from typing import Any, Final

from attrs import define, field

from raftmq.errors import RemoteProtocolError
from raftmq.types import Buffer

_STAGE_BYTES: Final = 64 * 1024


class TlsEndedError(RemoteProtocolError):
    """The other side said goodbye: no plaintext will come any more."""


class TlsTrustError(RemoteProtocolError):
    """A certificate is not trusted, the other side's or ours: trying again does not help."""


_REFUSALS: Final = (
    "ALERT_ACCESS_DENIED",
    "ALERT_BAD_CERTIFICATE",
    "ALERT_CERTIFICATE_EXPIRED",
    "ALERT_CERTIFICATE_REQUIRED",
    "ALERT_CERTIFICATE_REVOKED",
    "ALERT_CERTIFICATE_UNKNOWN",
    "ALERT_UNKNOWN_CA",
    "ALERT_UNSUPPORTED_CERTIFICATE",
)
"""Ends of the reasons by which OpenSSL tells that the other side refuses our certificate."""


def _fault(error: ssl.SSLError) -> RemoteProtocolError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsTrustError(f"TLS: the certificate is not trusted: {error}")
    if (error.reason or "").endswith(_REFUSALS):
        return TlsTrustError(f"TLS: our certificate is refused: {error}")
    return RemoteProtocolError(f"TLS: {error}")


def key_trouble(
    error: ssl.SSLError, password_key: str, is_encrypted: bool, has_password: bool
) -> str:
    """Why a certificate and its private key could not be loaded.

    Args:
        password_key: the setting that says with what the key is encrypted.
    """
    if error.reason == "KEY_VALUES_MISMATCH":
        return "it is not the key of the certificate"
    if is_encrypted and has_password:
        return f"{password_key} does not open it"
    if is_encrypted:
        return f"it is encrypted; say in {password_key} with what"
    return "no private key in PEM, or not one that can be used"


@define(eq=False)
class TlsLayer:
    """One TLS connection in memory, of a client unless `is_server`."""

    context: ssl.SSLContext
    host: str = ""
    is_server: bool = False
    is_ready: bool = False
    """True once the handshake is over."""
    _stage: bytearray = field(factory=bytearray)
    _received: ssl.MemoryBIO = field(factory=ssl.MemoryBIO)
    _to_send: ssl.MemoryBIO = field(factory=ssl.MemoryBIO)
    _tls: ssl.SSLObject = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._tls = self.context.wrap_bio(
            self._received,
            self._to_send,
            server_side=self.is_server,
            server_hostname=self.host or None,
        )

    # ---- the handshake ----

    def shake(self) -> None:
        """Go on with the handshake, as far as what came allows. The costly part of a connection: a
        node calls it in a worker thread.

        Raises:
            TlsTrustError: a certificate is not trusted.
            RemoteProtocolError: no TLS.
        """
        try:
            self._tls.do_handshake()
            self.is_ready = True
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise _fault(error) from error

    @property
    def peer_certificate(self) -> bytes | None:
        """The other side's certificate (DER), if it showed one: of a client only what the context
        asked for and verified, of a server any."""
        return self._tls.getpeercert(binary_form=True)

    @property
    def peer_dns_names(self) -> tuple[str, ...]:
        """The DNS names in the other side's certificate, of its subject alternative names; none
        where it was not verified."""
        certificate: dict[str, Any] = self._tls.getpeercert() or {}
        found = certificate.get("subjectAltName", ())
        return tuple(str(name) for kind, name in found if kind == "DNS")

    @property
    def version(self) -> str:
        """The protocol that was agreed on, such as TLSv1.3; "" before."""
        return self._tls.version() or ""

    # ---- ciphertext ----

    def buffer(self) -> memoryview:
        """Where the next ciphertext may be put, for `received`."""
        if not self._stage:
            self._stage = bytearray(_STAGE_BYTES)
        return memoryview(self._stage)

    def received(self, count: int) -> None:
        """Take ciphertext from `buffer()`, and go on with the handshake.

        Raises:
            RemoteProtocolError: as `shake`.
        """
        self.feed(memoryview(self._stage)[:count])
        if not self.is_ready:
            self.shake()

    def feed(self, data: Buffer) -> None:
        """Take ciphertext."""
        self._received.write(data)

    @property
    def has_outgoing(self) -> bool:
        """True when ciphertext waits to be sent."""
        return self._to_send.pending > 0

    @property
    def outgoing_bytes(self) -> int:
        """Bytes of ciphertext that wait to be sent."""
        return self._to_send.pending

    def outgoing(self) -> list[Buffer]:
        """Take the ciphertext."""
        return [self._to_send.read()] if self._to_send.pending else []

    # ---- plaintext ----

    def read_into(self, buffer: memoryview) -> int:
        """Plaintext that is there; 0 when there is none.

        Raises:
            TlsEndedError: the other side said goodbye.
            RemoteProtocolError: the ciphertext is broken.
        """
        if not self.is_ready:
            return 0
        try:
            answer: Any = self._tls.read(len(buffer), buffer)
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            raise _fault(error) from error
        count: int = answer  # of bytes put into the buffer
        if count == 0:
            raise TlsEndedError("TLS: the other side closed the connection")
        return count

    @property
    def has_unread(self) -> bool:
        """True when `read_into` may find something without more ciphertext."""
        return self._tls.pending() > 0 or self._received.pending > 0

    def write(self, pieces: list[Buffer]) -> None:
        """Hide what is to be sent."""
        assert self.is_ready
        for piece in pieces:
            view = memoryview(piece)
            while len(view):
                view = view[self._tls.write(view) :]

    def end(self) -> None:
        """Say goodbye: nothing can be written any more."""
        try:
            self._tls.unwrap()
        except ssl.SSLWantReadError:
            return  # it was said; the other side's is not waited for
        except ssl.SSLError as error:
            raise _fault(error) from error
