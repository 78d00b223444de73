"""SCRAM as Kafka speaks it (RFC 5802, RFC 7677): credentials, and the server's side of an exchange.

A credential holds what proves a password, never the password: salt, stored key, server key and the
number of iterations. A name that has none gets one that is made up from a secret, the same at each
try, so that an answer does not tell which users there are; its proof never fits.

As in Kafka no text is normalised (no SASLprep) and a channel is not bound: a client that demands it
is refused. Invariants: the nonce of a client's last message is the one that it was sent, all of it
(CVE-2024-56128); what a proof covers are the bytes as they came.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable
from enum import Enum
from typing import Final

from attrs import field, frozen

from raftmq.sasl.exchange import Answer, AuthenticationFailedError, check_identity, decode_text

ITERATIONS_MIN: Final = 4_096
ITERATIONS_MAX: Final = 16_384
ITERATIONS_DEFAULT: Final = 4_096
"""That of Kafka's own tools: users of all tools look alike, and so do those that are made up."""
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
SALT_BITS: Final = 130


@frozen(slots=True)
class ScramMechanism:
    """One of the two; `number` is Kafka's, `digest` the name for hashlib, `size` that of keys."""

    name: str
    number: int
    digest: str
    size: int


SCRAM_SHA_256: Final = ScramMechanism("SCRAM-SHA-256", 1, "sha256", 32)
SCRAM_SHA_512: Final = ScramMechanism("SCRAM-SHA-512", 2, "sha512", 64)
SCRAM_MECHANISMS: Final = {one.name: one for one in (SCRAM_SHA_256, SCRAM_SHA_512)}
SCRAM_BY_NUMBER: Final = {one.number: one for one in (SCRAM_SHA_256, SCRAM_SHA_512)}


@frozen(slots=True)
class ScramCredential:
    """What proves one user's password by one mechanism."""

    salt: bytes = field(repr=False)
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)
    iterations: int


FindCredential = Callable[[str, ScramMechanism], ScramCredential | None]


def salted_password(
    mechanism: ScramMechanism, password: str, salt: bytes, iterations: int
) -> bytes:
    """The password after PBKDF2, which takes milliseconds: not for the loop."""
    return hashlib.pbkdf2_hmac(mechanism.digest, password.encode(), salt, iterations)


def credential_of(
    mechanism: ScramMechanism, salted: bytes, salt: bytes, iterations: int
) -> ScramCredential:
    """The credential of a salted password."""
    digest = mechanism.digest
    client_key = hmac.digest(salted, b"Client Key", digest)
    return ScramCredential(
        salt=salt,
        stored_key=hashlib.new(digest, client_key).digest(),
        server_key=hmac.digest(salted, b"Server Key", digest),
        iterations=iterations,
    )


def proves(mechanism: ScramMechanism, credential: ScramCredential, password: str) -> bool:
    """True when it is that password's credential; takes as long as `salted_password`."""
    salted = salted_password(mechanism, password, credential.salt, credential.iterations)
    found = credential_of(mechanism, salted, credential.salt, credential.iterations)
    return hmac.compare_digest(found.stored_key, credential.stored_key)


def salt_text(number: int) -> bytes:
    """A salt in the form that Kafka's tools give it: 130 random bits as letters and digits."""
    number &= (1 << SALT_BITS) - 1
    text = ""
    while number:
        number, digit = divmod(number, len(_DIGITS))
        text = _DIGITS[digit] + text
    return text.rjust(1, "0").encode()


def made_up_credential(secret: bytes, mechanism: ScramMechanism, user: str) -> ScramCredential:
    """What a user is shown to have who has none; nobody knows its password."""
    seed = hmac.digest(secret, f"{mechanism.name}\0{user}".encode(), "sha512")
    return ScramCredential(
        salt=salt_text(int.from_bytes(seed[:32], "big")),
        stored_key=hmac.digest(secret, b"stored" + seed, mechanism.digest),
        server_key=hmac.digest(secret, b"server" + seed, mechanism.digest),
        iterations=ITERATIONS_DEFAULT,
    )


_NAME: Final = r"(?:[^\x00=,]|=2C|=3D)+"
_NONCE: Final = r"[\x21-\x2b\x2d-\x7e]+"
_EXTENSIONS: Final = r"(?:,[A-Za-z]+=[^\x00,]+)*"
_FIRST: Final = re.compile(
    rf"(?P<header>n,(?:a=(?P<authzid>{_NAME}))?,)"
    rf"(?P<bare>n=(?P<name>{_NAME}),r=(?P<nonce>{_NONCE}){_EXTENSIONS})"
)
_FINAL: Final = re.compile(
    rf"(?P<unproven>c=(?P<binding>[A-Za-z0-9/+=]+),r=(?P<nonce>{_NONCE}){_EXTENSIONS})"
    r",p=(?P<proof>[A-Za-z0-9/+=]+)"
)


def unescaped(name: str) -> str:
    """A name as it was before it was written into a message of SASL."""
    return name.replace("=2C", ",").replace("=3D", "=")


class _State(Enum):
    FIRST = "waits for the client's first message"
    FINAL = "waits for its proof"
    ENDED = "is over"


class ScramExchange:
    """The server's side of one exchange."""

    def __init__(
        self,
        mechanism: ScramMechanism,
        find: FindCredential,
        secret: bytes,
        nonce: str,
    ) -> None:
        """`secret` is what credentials are made up from, `nonce` random text for this once."""
        self._mechanism = mechanism
        self._find = find
        self._secret = secret
        self._nonce = nonce
        self._state = _State.FIRST
        self._user = ""
        self._is_known = False
        self._credential: ScramCredential | None = None
        self._binding = b""
        self._said = b""

    def step(self, token: bytes) -> Answer:
        """Take the client's next message.

        Raises:
            AuthenticationFailedError: it is not who it says it is, or breaks the rules.
        """
        state, self._state = self._state, _State.ENDED
        text = decode_text(token)
        if state is _State.FIRST:
            answer = self._first(text)
            self._state = _State.FINAL
            return answer
        if state is _State.FINAL:
            return self._final(text)
        raise AuthenticationFailedError("a message after the last one")

    def _first(self, text: str) -> Answer:
        if text.startswith(("p=", "y,")):
            raise AuthenticationFailedError("channel binding is not offered")
        match = _FIRST.fullmatch(text)
        if match is None:
            raise AuthenticationFailedError("a malformed first message")
        user = unescaped(match["name"])
        check_identity(unescaped(match["authzid"] or ""), user)
        made_up = made_up_credential(self._secret, self._mechanism, user)
        found = self._find(user, self._mechanism)
        self._user, self._is_known = user, found is not None
        credential = self._credential = made_up if found is None else found
        self._nonce = match["nonce"] + self._nonce
        self._binding = match["header"].encode()
        salt = base64.b64encode(credential.salt).decode()
        challenge = f"r={self._nonce},s={salt},i={credential.iterations}".encode()
        self._said = match["bare"].encode() + b"," + challenge
        return Answer(challenge)

    def _final(self, text: str) -> Answer:
        credential = self._credential
        assert credential is not None, "set by the first message"
        user = self._user if self._is_known else None
        match = _FINAL.fullmatch(text)
        if match is None:
            raise AuthenticationFailedError("a malformed last message", user)
        try:
            binding = base64.b64decode(match["binding"], validate=True)
            proof = base64.b64decode(match["proof"], validate=True)
        except binascii.Error as error:
            raise AuthenticationFailedError("a malformed last message", user) from error
        if binding != self._binding:
            raise AuthenticationFailedError("another channel binding than at first", user)
        if not hmac.compare_digest(match["nonce"].encode(), self._nonce.encode()):
            raise AuthenticationFailedError("another nonce than the one that was sent", user)
        digest = self._mechanism.digest
        said = self._said + b"," + match["unproven"].encode()
        signature = hmac.digest(credential.stored_key, said, digest)
        if len(proof) != len(signature):
            raise AuthenticationFailedError("a proof of another length", user)
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        found = hashlib.new(digest, client_key).digest()
        if not hmac.compare_digest(found, credential.stored_key) or not self._is_known:
            raise AuthenticationFailedError(
                "a wrong password" if self._is_known else "an unknown user", user
            )
        verdict = hmac.digest(credential.server_key, said, digest)
        said = b"v=" + base64.b64encode(verdict)
        return Answer(said, self._user, credential=credential)
