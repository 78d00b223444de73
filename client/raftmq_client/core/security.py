"""TLS and SASL without sockets: who we say we are, and how bytes are hidden.

`security=` takes an `ssl.SSLContext`, a `Plain`, `Scram` or `OAuthBearer`, or a `Security` of both.
TLS itself is `raftmq.tls`, in memory, so every driver gets it from the core.
SCRAM (RFC 5802) also proves that the broker knows the password; a broker that does not is refused.
What an exchange says first may take long to get (a token): `prepare` does it, in a thread.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
import ssl
import struct
import threading
import time
from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType
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
_TOKEN: Final = re.compile(r"[A-Za-z0-9_.~+/-]+=*")
_EXTENSION_NAME: Final = re.compile(r"[A-Za-z]+")
_EXTENSION_VALUE: Final = re.compile(r"[\x20-\x7e\t\r\n]*")
_FRESH_SHARE: Final = 0.6
"""Of its life a token is shown by new connections for so long; then another one is fetched. Less
than the share of a session after which connections authenticate again."""

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


class OAuthBearer:
    """SASL OAUTHBEARER (RFC 7628, KIP-255): shows a token of another service. For use over TLS.

    `token` gives one, as text, and may take its time: it is called in a thread, one call at a time,
    before a connection authenticates for the first time or again (KIP-368). It is asked anew once
    more than half of the last one's life is over, which a JWT says itself; a token that does not is
    asked for each time. An exception of it ends the connection that waited, which is tried again.
    """

    mechanism: Final = "OAUTHBEARER"

    def __init__(
        self, token: Callable[[], str], *, extensions: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`extensions` are said beside the token (KIP-342).

        Raises:
            UsageError: `token` cannot be called, or an extension cannot be said.
        """
        if not callable(token):
            raise UsageError("token is a function without arguments that returns a token")
        for name, value in extensions.items():
            is_said = _EXTENSION_NAME.fullmatch(name) and _EXTENSION_VALUE.fullmatch(value)
            if not is_said or name.lower() == "auth":
                raise UsageError(f"an extension cannot be called or say that: {name!r}")
        self._fetch = token
        self._extensions = dict(extensions)
        self._lock = threading.Lock()
        self._known = ""
        self._fresh_until_s = 0.0

    def prepare(self) -> str:
        """A token to show now: the last one, or another. Takes as long as `token` does.

        Raises:
            AuthenticationError: what `token` gave is none.
            Exception: whatever `token` raises.
        """
        with self._lock:
            if time.time() < self._fresh_until_s:
                return self._known
            token = self._fetch()
            if not isinstance(token, str) or not _TOKEN.fullmatch(token):
                raise AuthenticationError("what the token's function gave is no bearer token")
            self._known, self._fresh_until_s = token, _fresh_until_s(token, time.time())
            return token

    def forget(self) -> None:
        """Have the next one fetched: this one was refused."""
        with self._lock:
            self._fresh_until_s = 0.0

    def exchange(self, token: str) -> Exchange:
        """Show it; a refusal, which comes as JSON, is acknowledged (RFC 7628, 3.2.3).

        Raises:
            AuthenticationError: the broker does not believe it.
        """
        pairs = "".join(f"\x01{name}={value}" for name, value in self._extensions.items())
        told = yield f"n,,\x01auth=Bearer {token}{pairs}\x01\x01".encode()
        if told:
            yield b"\x01"  # the broker says then by an error that it is over
            raise AuthenticationError("the token was refused")


def _fresh_until_s(token: str, now_s: float) -> float:
    """Until when a token is shown by new connections; now where it does not say how long it lives.
    Nothing is verified here: that is for the broker."""
    try:
        body = token.split(".")[1]
        said = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        return now_s + _FRESH_SHARE * (float(said["exp"]) - now_s)
    except (ValueError, LookupError, TypeError):
        return now_s


Sasl: TypeAlias = Plain | Scram | OAuthBearer


@frozen
class Security:
    """TLS, SASL or both."""

    tls: ssl.SSLContext | None = None
    sasl: Sasl | None = None


SecurityChoice = ssl.SSLContext | Plain | Scram | OAuthBearer | Security | None


def read_security(chosen: SecurityChoice) -> Security | None:
    """A choice in full.

    Raises:
        UsageError: it is none.
    """
    if chosen is None or isinstance(chosen, Security):
        return chosen
    if isinstance(chosen, ssl.SSLContext):
        return Security(tls=chosen)
    if isinstance(chosen, Plain | Scram | OAuthBearer):
        return Security(sasl=chosen)
    raise UsageError(
        "security is an ssl.SSLContext, Plain, Scram, OAuthBearer or Security, "
        f"not {type(chosen).__name__}"
    )


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


def decode_token(body: Buffer) -> tuple[int, str, bytes, int]:
    """SaslAuthenticate v1: error code, error message, auth bytes, the session's milliseconds (0: it
    has no end).

    Raises:
        RemoteProtocolError: malformed.
    """
    data = bytes(body)
    try:
        code, length = struct.unpack_from(">hh", data)
        position = 4 + max(0, length)
        message = data[4:position].decode()
        (size,) = struct.unpack_from(">i", data, position)
        position += 4
        token = data[position : position + max(0, size)]
        (lifetime_ms,) = struct.unpack_from(">q", data, position + max(0, size))
    except (struct.error, UnicodeDecodeError) as error:
        raise RemoteProtocolError("a SaslAuthenticate answer is malformed") from error
    return code, message, token, lifetime_ms


def _fields(message: bytes) -> dict[str, str]:
    try:
        parts = message.decode().split(",")
    except UnicodeDecodeError as error:
        raise AuthenticationError("the broker's SCRAM message is no text") from error
    fields = {part[:1]: part[2:] for part in parts if part[1:2] == "="}
    if "e" in fields:
        raise AuthenticationError(f"refused: {fields['e']}")
    return fields
