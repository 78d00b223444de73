"""TLS between nodes: both sides show a certificate of the peers' own CA, and it names the node.

The name is a DNS name among the certificate's subject alternative names, `raftmq-node-3` for node
3, and no certificate names two nodes. A node that dials looks whether it reached the node that it
meant before it says anything; what a peer says of itself later must agree with its certificate.
TLS 1.3 alone, without tickets: what can be read on a stream is frames, or its end.

`accept` is for turning it on or off node by node: a listener takes both, told apart by the first
byte, and dials begin with TLS. It is no protection from an attacker on the network: `required` is.

Streams end without a close_notify. Frames have lengths, so a stream that was cut is noticed; and so
its end is seen before the bytes that came with it were decrypted (`peer_links._has_ended`).
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from typing import Final, Protocol

import trio
from attrs import frozen

from raftmq.config import PEER_TLS_ACCEPT, PEER_TLS_OFF, ConfigError, NodeConfig
from raftmq.errors import RemoteProtocolError
from raftmq.runtime.certificates import Certificates, PemFiles, ServerTls, load, show
from raftmq.runtime.handshake import (
    HANDSHAKE_RECORD,
    HandshakeError,
    Turn,
    ignore_turn,
    say_why,
    shake,
)
from raftmq.runtime.peer_streams import PeerRefusedError
from raftmq.runtime.tls import PeerSocket, PeerTlsSocket
from raftmq.tls import TlsLayer
from raftmq.types import NodeId

NAME_PREFIX: Final = "raftmq-node-"
PORT_NAME: Final = "peer_listener"
"""Of this port in the log and in metrics; names of clients' listeners are in capitals."""
DIGITS_MAX: Final = 10
THREADS: Final = 2
"""That make handshakes of strangers and peers that come, and as many for those that are dialled."""


def node_name(node_id: int) -> str:
    """The DNS name in a certificate of this node."""
    return f"{NAME_PREFIX}{node_id}"


def named_node(names: Iterable[str]) -> NodeId | None:
    """The node that a certificate with these DNS names is of; None when it is no node's, or of
    more than one."""
    found = {name.lower() for name in names if name.lower().startswith(NAME_PREFIX)}
    if len(found) != 1:
        return None
    digits = found.pop().removeprefix(NAME_PREFIX)
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= DIGITS_MAX):
        return None
    node_id = int(digits)
    return NodeId(node_id) if node_id < 1 << 31 and digits == str(node_id) else None


@frozen(slots=True)
class PeerCertificates(Certificates):
    """What was loaded of the peers' files.

    Attributes:
        dialling: for new connections to peers.
    """

    dialling: ssl.SSLContext


class PeerGuard(Protocol):
    """What protects the streams between nodes, and says who is a node."""

    @property
    def refusal(self) -> str:
        """The name, in metrics, of its refusals."""

    @property
    def accepts_plain(self) -> bool:
        """True while a peer may speak without TLS."""

    async def accept(self, sock: socket.socket, turn: Turn) -> PeerSocket: ...
    async def dial(self, sock: socket.socket, node_id: NodeId) -> PeerTlsSocket: ...


class PeerHandshakes:
    """Handshakes of TLS at the peer port, and with peers that are dialled; who they are made with
    is for others to say.

    Attributes:
        accepts_plain: while TLS is turned on or off node by node.
    """

    def __init__(self, config: NodeConfig) -> None:
        self.accepts_plain = config.peer_tls == PEER_TLS_ACCEPT
        self._accepting = trio.CapacityLimiter(THREADS)
        self._dialling = trio.CapacityLimiter(THREADS)

    async def accept(
        self, sock: socket.socket, context: ssl.SSLContext, turn: Turn
    ) -> TlsLayer | None:
        """With whoever connected; None where it speaks plain and may do so.

        Args:
            turn: told whose turn it is.

        Raises:
            EOFError, OSError: it went.
            PeerRefusedError: it speaks no TLS, or context does not trust it.
        """
        if self.accepts_plain and await _first_byte(sock) != HANDSHAKE_RECORD:
            return None
        return await _shake(sock, TlsLayer(context, is_server=True), self._accepting, turn)

    async def dial(self, sock: socket.socket, context: ssl.SSLContext) -> TlsLayer:
        """With a node that was connected to.

        Raises:
            EOFError, OSError: it went, or speaks plain only.
            PeerRefusedError: context does not trust it.
        """
        return await _shake(sock, TlsLayer(context), self._dialling)


async def _first_byte(sock: socket.socket) -> int:
    """The byte that is read next, which stays where it is."""
    while True:
        try:
            first = sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            await trio.lowlevel.wait_readable(sock)
            continue
        if not first:
            raise EOFError
        return first[0]


async def _shake(
    sock: socket.socket, layer: TlsLayer, limiter: trio.CapacityLimiter, turn: Turn = ignore_turn
) -> TlsLayer:
    try:
        return await shake(sock, layer, limiter, turn)
    except HandshakeError as error:
        await say_why(sock, error.layer)
        raise PeerRefusedError(str(error)) from None


class PeerTls(ServerTls):
    """The certificates between nodes, and the handshakes made with them."""

    refusal = "certificate"

    def __init__(self, config: NodeConfig) -> None:
        """Load what the configuration names.

        Raises:
            ConfigError: a file cannot be used, or what it holds is not this node's.
        """
        self._own_id = config.node_id
        self._handshakes = PeerHandshakes(config)
        super().__init__(PORT_NAME, peer_files(config))

    @property
    def accepts_plain(self) -> bool:
        """True while a peer may speak without TLS."""
        return self._handshakes.accepts_plain

    def _load(self) -> Certificates:
        return load_peer_files(self.files, self._own_id)

    # ---- connections ----

    async def accept(self, sock: socket.socket, turn: Turn) -> PeerSocket:
        """Make the handshake with whoever connected; the socket itself where it speaks plain and
        may do so.

        Raises:
            EOFError, OSError: it went.
            PeerRefusedError: it is no node.
        """
        layer = await self._handshakes.accept(sock, self.context, turn)
        return sock if layer is None else PeerTlsSocket(sock, layer, self._node_of(layer))

    async def dial(self, sock: socket.socket, node_id: NodeId) -> PeerTlsSocket:
        """Make the handshake with a node that was connected to.

        Raises:
            EOFError, OSError: it went, or speaks plain only.
            PeerRefusedError: it is not that node.
        """
        loaded = self.loaded
        assert isinstance(loaded, PeerCertificates)
        layer = await self._handshakes.dial(sock, loaded.dialling)
        found = self._node_of(layer)
        if found != node_id:
            raise PeerRefusedError(f"its certificate is of node {found}, not {node_id}")
        return PeerTlsSocket(sock, layer, found)

    def _node_of(self, layer: TlsLayer) -> NodeId:
        node_id = named_node(layer.peer_dns_names)
        if node_id is None:
            raise PeerRefusedError(f"its certificate is of no node ({NAME_PREFIX}ID)")
        if self.revoked.has(layer.peer_certificate):  # since the handshake began
            raise PeerRefusedError("its certificate was revoked")
        return node_id


# ---- files ----


def peer_files(config: NodeConfig) -> PemFiles:
    """The files of a configuration that was checked."""
    assert config.peer_tls != PEER_TLS_OFF
    assert config.peer_certificate_file is not None, "checked with the configuration"
    assert config.peer_key_file is not None, "checked with the configuration"
    return PemFiles(
        names="key 'peer_{}':",
        certificate=config.peer_certificate_file,
        key=config.peer_key_file,
        key_password=config.peer_key_password_file,
        ca=config.peer_ca_file,
        ca_key="ca_file",
        crl=config.peer_crl_file,
        crl_key="crl_file",
        verify_mode=ssl.CERT_REQUIRED,
        minimum_version=ssl.TLSVersion.TLSv1_3,
    )


def load_peer_files(files: PemFiles, own_id: int) -> PeerCertificates:
    """Read the peers' files, and try them on themselves: what this node's own CAs do not trust, as
    either side, no other node would.

    Raises:
        ConfigError: they cannot be used, or the certificate does not name this node.
    """
    dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dialling.check_hostname = False  # the node's name is looked for by `named_node`
    server = load(files, dialling)
    show(dialling, files)
    refusal = f"{files.names.format('certificate_file')} {files.certificate}"
    client_end, server_end = TlsLayer(dialling), TlsLayer(server.context, is_server=True)
    try:
        while not (client_end.is_ready and server_end.is_ready):
            for end, other in ((client_end, server_end), (server_end, client_end)):
                end.shake()
                for piece in end.outgoing():
                    other.feed(piece)
    except RemoteProtocolError as error:
        raise ConfigError(f"{refusal}: peers would not trust it: {error}") from None
    if named_node(server_end.peer_dns_names) != own_id:
        raise ConfigError(
            f"{refusal}: it must have the DNS name {node_name(own_id)} as a subject alternative "
            "name, and that of no other node"
        )
    return PeerCertificates(server.context, server.expires_s, server.mark, server.revoked, dialling)
