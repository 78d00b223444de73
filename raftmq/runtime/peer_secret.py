"""A secret of the cluster instead of certificates: it proves that a process is a node, not which.

Each process makes a certificate of its own, which nobody trusts and which ends with it. After the
handshake of TLS both sides prove the secret (`peer_proofs.py`), the dialling one first:

1. The dialled side says what it speaks, and a number that it draws for this connection.
2. The dialling side says a number of its own, and the proof that it knows the secret.
3. The dialled side says its proof, or that it refuses.
4. Each hello (`peer_hello.py`) is followed by a proof of it.

The proofs cover the certificate that the dialled side showed, and the handshake has shown that the
dialled side has its key. So a man in the middle, whose certificate is another one, cannot pass the
proofs on. Cluster and nodes are named only after step 3: a stranger who dials learns a number and
that it is refused, a stranger that was dialled learns a number and a proof.

Several secrets may be known while one is replaced. The dialling side proves the first of its file;
the dialled side looks for it among all of its own, and proves the same one.
"""

from __future__ import annotations

import secrets
import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from attrs import field, frozen

from raftmq.config import PEER_TLS_OFF, ConfigError, NodeConfig
from raftmq.runtime.certificates import Mark, Watched, as_file, mark_of, new_server_context
from raftmq.runtime.handshake import Turn
from raftmq.runtime.peer_proofs import NUMBER_BYTES, PROOF_BYTES, StreamProofs
from raftmq.runtime.peer_streams import PeerRefusedError
from raftmq.runtime.peer_tls import PORT_NAME, PeerHandshakes, PeerTls
from raftmq.runtime.sockets import read_exactly, send_all
from raftmq.runtime.tls import PeerSocket, PeerTlsSocket
from raftmq.secret_file import SecretFileError, read_secret
from raftmq.types import NodeId

SECRETS_MAX: Final = 8
"""In one file: each is tried for each stranger."""
SECRET_LENGTHS: Final = 43, 1_024
"""Characters of 32 random bytes as base64; the most that a line may have."""
HEXADECIMAL_LENGTH_MIN: Final = 64
"""Characters of 32 random bytes as hexadecimal digits."""
CHARACTERS_MIN: Final = 8
"""Different ones in a secret. Of 64 that are random nobody sees fewer."""
GREETING: Final = b"RMQS\x01"
"""What the dialled side says first: by a secret, in the first version of this protocol."""
REFUSED: Final = bytes(PROOF_BYTES)
"""Instead of its proof."""
_HEXADECIMAL: Final = frozenset(b"0123456789abcdefABCDEF")


@frozen
class Secrets:
    """What was read of a file; `mark` tells that it changed."""

    texts: tuple[bytes, ...] = field(repr=False)
    mark: Mark


def read_secrets(path: Path) -> Secrets:
    """Read a file with a secret in each line.

    Raises:
        ConfigError: it cannot be used; it says why, and nothing of what stands there.
    """
    mark = (mark_of(path),)
    try:
        lines = read_secret(path).splitlines()
    except SecretFileError as error:
        raise _refusal(path, str(error)) from None
    texts = tuple(dict.fromkeys(filter(None, map(bytes.strip, lines))))
    if not texts:
        raise _refusal(path, "it has no secret in it (openssl rand -hex 32)")
    if len(texts) > SECRETS_MAX:
        raise _refusal(path, f"more than {SECRETS_MAX} secrets")
    for number, line in enumerate(map(bytes.strip, lines), 1):
        if line and not _may_be_random(line):
            wanted = "32 random bytes, as 64 hexadecimal digits or 43 characters of base64"
            raise _refusal(path, f"line {number} is not {wanted} (openssl rand -hex 32)")
    return Secrets(texts, mark)


def _may_be_random(text: bytes) -> bool:
    """False for what cannot hold 32 random bytes; nobody can tell whether others do."""
    least = HEXADECIMAL_LENGTH_MIN if _HEXADECIMAL.issuperset(text) else SECRET_LENGTHS[0]
    return least <= len(text) <= SECRET_LENGTHS[1] and len(set(text)) >= CHARACTERS_MIN


def _refusal(path: Path, why: str) -> ConfigError:
    return ConfigError(f"key 'cluster_secret_file': {path}: {why}")


class SecretTls(Watched[Secrets]):
    """The secrets of the cluster as they were loaded last, and the handshakes made with them."""

    refusal = "secret"
    expires_s = None
    """Its certificate ends with the process."""

    def __init__(self, config: NodeConfig) -> None:
        """Read what the configuration names, and make a certificate.

        Raises:
            ConfigError: the file cannot be used, or cryptography is not installed.
        """
        assert config.cluster_secret_file is not None, "checked with the configuration"
        self.path = path = config.cluster_secret_file
        super().__init__(PORT_NAME, lambda: read_secrets(path), lambda: (mark_of(path),))
        self._handshakes = PeerHandshakes(config)
        self.context, self._certificate = _own_context()
        self.dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.dialling.minimum_version = ssl.TLSVersion.TLSv1_3
        self.dialling.check_hostname = False
        self.dialling.verify_mode = ssl.CERT_NONE  # the secret tells who it is

    @property
    def accepts_plain(self) -> bool:
        """True while a peer may speak without TLS."""
        return self._handshakes.accepts_plain

    @property
    def secrets_count(self) -> int:
        """How many are known: two while one is replaced."""
        return len(self.loaded.texts)

    # ---- connections ----

    async def accept(self, sock: socket.socket, turn: Turn) -> PeerSocket:
        """Let whoever connected prove the secret, then prove it; the socket itself where the other
        side speaks plain and may do so.

        Raises:
            EOFError, OSError: it went.
            PeerRefusedError: it is no node.
        """
        layer = await self._handshakes.accept(sock, self.context, turn)
        if layer is None:
            return sock
        hidden = PeerTlsSocket(sock, layer, None)
        number = secrets.token_bytes(NUMBER_BYTES)
        await send_all(hidden, GREETING + number)
        said = await read_exactly(hidden, NUMBER_BYTES + PROOF_BYTES)
        theirs, proof = said[:NUMBER_BYTES], said[NUMBER_BYTES:]
        candidates = [
            StreamProofs(
                secret,
                dialled_number=number,
                dialling_number=theirs,
                certificate=self._certificate,
                is_dialling=False,
            )
            for secret in self.loaded.texts
        ]
        # All of them are tried: the time does not tell which it was.
        known = [proofs for proofs in candidates if proofs.is_known(proof)]
        if not known:
            await send_all(hidden, REFUSED)
            raise PeerRefusedError("it does not know the cluster's secret")
        hidden.proofs = known[0]
        await send_all(hidden, hidden.proofs.known())
        return hidden

    async def dial(self, sock: socket.socket, node_id: NodeId) -> PeerTlsSocket:
        """Prove the secret to whoever was connected to, and let it do so; that it is the node
        `node_id` it says in its hello.

        Raises:
            EOFError, OSError: it went, or speaks plain only.
            PeerRefusedError: it knows no secret, or another one.
        """
        layer = await self._handshakes.dial(sock, self.dialling)
        certificate = layer.peer_certificate
        if certificate is None:  # OpenSSL refuses that by itself
            raise PeerRefusedError("it showed no certificate")
        hidden = PeerTlsSocket(sock, layer, None)
        try:
            greeting = await read_exactly(hidden, len(GREETING) + NUMBER_BYTES)
        except ConnectionAbortedError as error:
            # It looked at certificates, after this side was done.
            raise PeerRefusedError(f"it does not go by the cluster's secret: {error}") from None
        if not greeting.startswith(GREETING):
            raise PeerRefusedError("it does not go by the cluster's secret, or by a newer protocol")
        number = secrets.token_bytes(NUMBER_BYTES)
        proofs = StreamProofs(
            self.loaded.texts[0],
            dialled_number=greeting[len(GREETING) :],
            dialling_number=number,
            certificate=certificate,
            is_dialling=True,
        )
        await send_all(hidden, number + proofs.known())
        proof = await read_exactly(hidden, PROOF_BYTES)
        if proof == REFUSED:
            raise PeerRefusedError(
                "it does not accept the first secret of this node's cluster_secret_file"
            )
        if not proofs.is_known(proof):
            raise PeerRefusedError("it does not know the cluster's secret")
        hidden.proofs = proofs
        return hidden


def peer_guard(config: NodeConfig) -> PeerTls | SecretTls | None:
    """What protects a node's links to others; None: nothing.

    Raises:
        ConfigError: a file cannot be used.
    """
    if config.peer_tls == PEER_TLS_OFF:
        return None
    return PeerTls(config) if config.cluster_secret_file is None else SecretTls(config)


# ---- a certificate that says nothing ----


def _own_context() -> tuple[ssl.SSLContext, bytes]:
    """A context that shows a new certificate, and that certificate (DER)."""
    pem, certificate = new_certificate()
    context = new_server_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with as_file(pem) as path:
        context.load_cert_chain(path)
    return context, certificate


def new_certificate() -> tuple[bytes, bytes]:
    """A certificate and its key as PEM, and the certificate as DER.

    Raises:
        ConfigError: the library for it is not installed.
    """
    try:  # an extra, and a long import
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
        )
        from cryptography.x509.oid import NameOID
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"key 'cluster_secret_file': cryptography is not installed ({error}); "
            "`pip install 'raftmq[secure]'`"
        ) from error

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "raftmq")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))  # nobody asks, whatever the clock says
        .not_valid_after(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private + certificate.public_bytes(Encoding.PEM), certificate.public_bytes(Encoding.DER)
