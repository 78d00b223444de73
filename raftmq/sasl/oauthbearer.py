"""OAUTHBEARER (RFC 7628, KIP-255, KIP-768): a token of another service says who the client is.

A token is a JWT, signed by a key of the issuer. It is believed only if its algorithm is one of
those that were allowed, all of them with a public key; if it names this issuer and this audience,
has an end and has not reached it, and says the principal in the claim that was named. What else it
says of how to verify it (keys, addresses of keys, critical headers) is not followed.

A token that is not believed is answered by JSON with a status, as the RFC wants, which the client
acknowledges with one byte; then the exchange fails. Why, the log of this node is told and nobody
else. Verifying is work for a worker: the keys may have to be fetched. Nothing here reads files,
clocks or the network. PyJWT is imported at the first use, and is an extra.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import field, frozen

from raftmq.errors import RaftmqError
from raftmq.sasl.exchange import (
    Answer,
    AuthenticationFailedError,
    Step,
    check_identity,
    decode_text,
)
from raftmq.sasl.scram import unescaped

MECHANISM: Final = "OAUTHBEARER"
MESSAGE_BYTES_MAX: Final = 64 << 10
PRINCIPAL_LENGTH_MAX: Final = 256
KEY_ID_LENGTH_MAX: Final = 256
RSA_BITS_MIN: Final = 2_048
KEYS_MAX: Final = 100
ALGORITHMS: Final[Mapping[str, tuple[str, str | None]]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", None)),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
"""Those that may be allowed, with the kind and the curve of their keys (RFC 7518, RFC 8037). None
with a shared secret, and never `none`."""

_END: Final = "\x01"
_HEADER: Final = re.compile(r"n,(?:a=(?P<identity>(?:[^\x00\x01=,]|=2C|=3D)+))?,")
_PAIR: Final = re.compile(r"(?P<key>[A-Za-z]+)=(?P<value>[\x20-\x7e\t\r\n]*)")
_BEARER: Final = re.compile(r"(?i:bearer) +(?P<token>[A-Za-z0-9_.~+/=-]+)")
_INVALID: Final = json.dumps({"status": "invalid_token"})
"""All that a client is told of a token that is not believed (RFC 7628, 3.2.2)."""


class InvalidTokenError(RaftmqError):
    """A token that is not believed; the message is for the log, and says nothing of the token."""


class NoKeysError(RaftmqError):
    """A set of keys that cannot be used."""


@frozen(slots=True, kw_only=True)
class TokenRules:
    """What a token must be.

    Attributes:
        algorithms: some of `ALGORITHMS`.
        issuer: who must have issued it (`iss`).
        audiences: one of these it must be for (`aud`).
        principal_claim: the claim that names the principal.
        skew_s: how far the clocks of both sides may be apart.
    """

    algorithms: tuple[str, ...]
    issuer: str
    audiences: tuple[str, ...]
    principal_claim: str = "sub"
    skew_s: int = 30


@frozen(slots=True)
class TokenKey:
    """One public key of the issuer.

    Attributes:
        key_id: its name (`kid`); None: it has none.
        kind: RSA, EC or OKP.
        curve: of the two latter.
        algorithm: the only one that it is for; None: any of its kind.
    """

    key_id: str | None
    kind: str
    curve: str | None
    algorithm: str | None
    key: Any = field(repr=False)

    def fits(self, algorithm: str) -> bool:
        """True when it may verify a signature of that algorithm."""
        kind, curve = ALGORITHMS[algorithm]
        is_for = self.algorithm in (None, algorithm)
        return is_for and (self.kind, self.curve) == (kind, curve)


FindKeys = Callable[[str | None], Sequence[TokenKey]]
"""The keys of that name; all of them for None. May fetch them, so it is for a worker."""


@frozen(slots=True)
class VerifiedToken:
    """Who a token says is there, and until when, in milliseconds of Unix time."""

    user: str
    expires_ms: int


Verify = Callable[[str], VerifiedToken]
"""verify(token), in a worker; raises InvalidTokenError."""


def read_keys(data: bytes) -> tuple[TokenKey, ...]:
    """The public keys of a JWK set (RFC 7517) that can verify something; others are passed over.

    Raises:
        NoKeysError: it is none, or has no such keys.
    """
    try:
        rows = json.loads(data)["keys"]
        found = [_read_key(row) for row in rows[:KEYS_MAX]]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise NoKeysError("not a JWK set") from None
    keys = tuple(key for key in found if key is not None)
    if not keys:
        raise NoKeysError("no public key in it that verifies signatures")
    return keys


def _read_key(row: Any) -> TokenKey | None:
    import jwt  # an extra

    if not isinstance(row, dict):
        return None
    kind = str(row.get("kty"))
    is_public = "d" not in row and kind in ("RSA", "EC", "OKP")
    verifies = row.get("use", "sig") == "sig" and "verify" in row.get("key_ops", ["verify"])
    if not is_public or not verifies:
        return None
    try:
        key = jwt.PyJWK(row).key
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError):
        return None  # of a kind that this version does not know
    if kind == "RSA" and key.key_size < RSA_BITS_MIN:
        return None
    curve = None if kind == "RSA" else row.get("crv")
    return TokenKey(row.get("kid"), kind, curve, row.get("alg"), key)


def verify_token(token: str, rules: TokenRules, find_keys: FindKeys, now_s: float) -> VerifiedToken:
    """Who a token says is there.

    Raises:
        InvalidTokenError: it is not believed.
    """
    import jwt  # an extra

    try:
        header = jwt.get_unverified_header(token)
    except jwt.PyJWTError:
        raise InvalidTokenError("no JWT") from None
    algorithm, key_id = header.get("alg"), header.get("kid")
    if algorithm not in rules.algorithms:
        raise InvalidTokenError("an algorithm that is not allowed")
    if "crit" in header:
        raise InvalidTokenError("a critical header")
    if key_id is not None and not (isinstance(key_id, str) and len(key_id) <= KEY_ID_LENGTH_MAX):
        raise InvalidTokenError("a key id that is none")
    keys = [key for key in find_keys(key_id) if key.fits(algorithm)]
    if not keys or (key_id is None and len(keys) > 1):
        raise InvalidTokenError("an unknown key" if key_id else "no key id, and not one key")
    for place, key in enumerate(keys, 1):
        try:
            return _believed(_claims(token, key.key, algorithm, rules), rules, now_s)
        except jwt.InvalidSignatureError:
            if place == len(keys):
                raise InvalidTokenError("a wrong signature") from None
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise InvalidTokenError(_REASONS.get(type(error).__name__, "bad claims")) from None
    raise AssertionError("the last key returns or raises")


_REASONS: Final = {
    "InvalidAudienceError": "another audience",
    "InvalidIssuerError": "another issuer",
    "MissingRequiredClaimError": "a claim lacks",
}


def _claims(token: str, key: Any, algorithm: str, rules: TokenRules) -> Mapping[str, Any]:
    import jwt  # an extra

    claims: Mapping[str, Any] = jwt.decode(
        token,
        key,
        algorithms=[algorithm],
        audience=list(rules.audiences),
        issuer=rules.issuer,
        options={
            "require": ["exp", "iss", "aud", rules.principal_claim],
            # Times are judged by the clock that is given, below.
            "verify_exp": False,
            "verify_nbf": False,
            "verify_iat": False,
        },
    )
    return claims


def _believed(claims: Mapping[str, Any], rules: TokenRules, now_s: float) -> VerifiedToken:
    end_s = _time(claims, "exp") + rules.skew_s
    if now_s >= end_s:
        raise InvalidTokenError("it has expired")
    for name in ("nbf", "iat"):
        if name in claims and now_s + rules.skew_s < _time(claims, name):
            raise InvalidTokenError("it is not valid yet")
    user = claims[rules.principal_claim]
    if not isinstance(user, str) or not 0 < len(user) <= PRINCIPAL_LENGTH_MAX:
        raise InvalidTokenError("no name of a principal")
    if not user.isprintable():
        raise InvalidTokenError("a name with characters that do not print")
    return VerifiedToken(user, int(end_s * 1_000))


def _time(claims: Mapping[str, Any], name: str) -> float:
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidTokenError("a time that is none")
    if not 0 <= value < 1 << 40:
        raise InvalidTokenError("a time that is none")
    return value


class OAuthBearerExchange:
    """The server's side of one exchange."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self._failure: AuthenticationFailedError | None = None
        self._is_over = False

    def step(self, token: bytes) -> Step:
        """Take the client's message; the work of judging it.

        Raises:
            AuthenticationFailedError: it is malformed, or acknowledges that its token is not
                believed.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._is_over:
            raise AuthenticationFailedError("a message after the last one")
        self._is_over = True
        wanted, bearer = read_message(token)

        def judge() -> Answer:
            try:
                verified = self._verify(bearer)
            except InvalidTokenError as error:
                reason = f"a token that is not believed: {error}"
                self._failure = AuthenticationFailedError(reason, told=_INVALID)
                return Answer(_INVALID.encode(), failure=self._failure)
            check_identity(wanted, verified.user)
            return Answer(
                b"", verified.user, expires_ms=verified.expires_ms, is_of_this_cluster=False
            )

        return judge


def read_message(token: bytes) -> tuple[str, str]:
    """The identity that a client wants ("" for that of its token), and its token.

    Raises:
        AuthenticationFailedError: it is malformed.
    """
    head, separator, rest = decode_text(token, MESSAGE_BYTES_MAX).partition(_END)
    found = _HEADER.fullmatch(head)
    if found is None or not separator or not rest.endswith(_END * 2):
        raise AuthenticationFailedError("a malformed message")
    values: dict[str, str] = {}
    for pair in rest[:-2].split(_END):
        match = _PAIR.fullmatch(pair)
        if match is None or match["key"] in values:
            raise AuthenticationFailedError("a malformed message")
        values[match["key"]] = match["value"]
    bearer = _BEARER.fullmatch(values.get("auth", ""))
    if bearer is None:
        raise AuthenticationFailedError("a message without a bearer token")
    return unescaped(found["identity"] or ""), bearer["token"]
