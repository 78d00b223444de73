"""TLS and SASL without sockets: who we say we are, and how bytes are hidden.

`security=` takes an `ssl.SSLContext`, a `Plain` or `Scram`, or a `Security` of both. TLS itself is
`raftmq.tls`, in memory, so every driver gets it from the core.
SCRAM (RFC 5802) also proves that the broker knows the password; a broker that does not is refused.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import ssl
import struct
from collections.abc import Callable, Generator
from typing import Final, TypeAlias

from attrs import field, frozen

from raftmq.errors import RemoteProtocolError
from raftmq.types import Buffer
from raftmq_client.errors import AuthenticationError, UsageError

SASL_HANDSHAKE: Final = 17
SASL_AUTHENTICATE: Final = 36
SASL_VERSION: Final = 1
_ITERATIONS_MIN: Final = 4_096
_ITERATIONS_MAX: Final = 1_000_000

Exchange: TypeAlias = Generator[bytes, bytes, None]
"""Yields what to say and is sent what the broker said."""


@frozen
class Plain:
    """SASL PLAIN: name and password as they are. For use over TLS."""

    username: str
    password: str = field(repr=False)

    mechanism = "PLAIN"

    def __attrs_post_init__(self) -> None:
        check_credentials(self.username, self.password)

    def exchange(self) -> Exchange:
        """Say both."""
        yield f"\0{self.username}\0{self.password}".encode()


@frozen
class Scram:
    """SASL SCRAM-SHA-256 or SCRAM-SHA-512: proves the password without saying it."""

    username: str
    password: str = field(repr=False)
    algorithm: str = "SHA-512"
    make_nonce: Callable[[], str] = field(default=lambda: secrets.token_urlsafe(18), repr=False)

    def __attrs_post_init__(self) -> None:
        if self.algorithm not in ("SHA-256", "SHA-512"):
            raise UsageError(f"algorithm is SHA-256 or SHA-512, not {self.algorithm!r}")
        check_credentials(self.username, self.password)

    @property
    def mechanism(self) -> str:
        """Kafka's name."""
        return f"SCRAM-{self.algorithm}"

    def exchange(self) -> Exchange:
        """Challenge and answer, and the broker's proof.

        Raises:
            AuthenticationError: the broker does not know the password, or breaks the rules.
        """
        name = self.algorithm.replace("-", "").lower()
        nonce = self.make_nonce()
        user = self.username.replace("=", "=3D").replace(",", "=2C")
        first = f"n={user},r={nonce}"
        challenge = yield f"n,,{first}".encode()
        fields = _fields(challenge)
        try:
            salt = base64.b64decode(fields["s"], validate=True)
            iterations = int(fields["i"])
            both = fields["r"]
        except (KeyError, ValueError) as error:
            raise AuthenticationError("the broker's SCRAM challenge is malformed") from error
        if not both.startswith(nonce) or len(both) == len(nonce):
            raise AuthenticationError("the broker's nonce does not continue ours")
        if not _ITERATIONS_MIN <= iterations <= _ITERATIONS_MAX:
            raise AuthenticationError(f"{iterations} iterations of SCRAM are out of bounds")
        salted = hashlib.pbkdf2_hmac(name, self.password.encode(), salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", name)
        last = f"c=biws,r={both}"
        said = b",".join((first.encode(), challenge, last.encode()))
        signature = hmac.digest(hashlib.new(name, client_key).digest(), said, name)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        verdict = yield f"{last},p={base64.b64encode(proof).decode()}".encode()
        expected = hmac.digest(hmac.digest(salted, b"Server Key", name), said, name)
        if not hmac.compare_digest(
            _fields(verdict).get("v", "").encode(), base64.b64encode(expected)
        ):
            raise AuthenticationError("the broker does not know the password either")


def check_credentials(username: str, password: str) -> None:
    """Whether these can be said.

    Raises:
        UsageError: they cannot; the message keeps the password to itself.
    """
    for name, text in (("username", username), ("password", password)):
        if not isinstance(text, str):
            raise UsageError(f"{name} is a str, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{name} has characters that UTF-8 cannot say") from None


@frozen
class Security:
    """TLS, SASL or both."""

    tls: ssl.SSLContext | None = None
    sasl: Plain | Scram | None = None


SecurityChoice = ssl.SSLContext | Plain | Scram | Security | None


def read_security(chosen: SecurityChoice) -> Security | None:
    """A choice in full.

    Raises:
        UsageError: it is none.
    """
    if chosen is None or isinstance(chosen, Security):
        return chosen
    if isinstance(chosen, ssl.SSLContext):
        return Security(tls=chosen)
    if isinstance(chosen, Plain | Scram):
        return Security(sasl=chosen)
    raise UsageError(f"security is an ssl.SSLContext, Plain, Scram or Security, not {chosen!r}")


def encode_mechanism(mechanism: str) -> bytes:
    """SaslHandshake v1: mechanism."""
    data = mechanism.encode()
    return struct.pack(">h", len(data)) + data


def decode_mechanisms(body: Buffer) -> tuple[int, list[str]]:
    """SaslHandshake v1: error code, what the broker offers.

    Raises:
        RemoteProtocolError: malformed.
    """
    data = bytes(body)
    try:
        code, count = struct.unpack_from(">hi", data)
        position, names = 6, []
        for _ in range(min(count, 100)):
            (length,) = struct.unpack_from(">h", data, position)
            names.append(data[position + 2 : position + 2 + length].decode())
            position += 2 + length
    except (struct.error, UnicodeDecodeError) as error:
        raise RemoteProtocolError("a SaslHandshake answer is malformed") from error
    return code, names


def encode_token(token: bytes) -> bytes:
    """SaslAuthenticate v1: auth bytes."""
    return struct.pack(">i", len(token)) + token


def decode_token(body: Buffer) -> tuple[int, str, bytes]:
    """SaslAuthenticate v1: error code, error message, auth bytes.

    Raises:
        RemoteProtocolError: malformed.
    """
    data = bytes(body)
    try:
        code, length = struct.unpack_from(">hh", data)
        position = 4 + max(0, length)
        message = data[4:position].decode()
        (size,) = struct.unpack_from(">i", data, position)
    except (struct.error, UnicodeDecodeError) as error:
        raise RemoteProtocolError("a SaslAuthenticate answer is malformed") from error
    token = data[position + 4 : position + 4 + max(0, size)]
    return code, message, token


def _fields(message: bytes) -> dict[str, str]:
    try:
        parts = message.decode().split(",")
    except UnicodeDecodeError as error:
        raise AuthenticationError("the broker's SCRAM message is no text") from error
    fields = {part[:1]: part[2:] for part in parts if part[1:2] == "="}
    if "e" in fields:
        raise AuthenticationError(f"refused: {fields['e']}")
    return fields
