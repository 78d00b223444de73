"""OAUTHBEARER: which tokens are believed, and the exchange around them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, Final

import jwt
import pytest
from cryptography.hazmat.primitives import serialization

from raftmq.config import OAUTH_ALGORITHMS, SASL_OAUTHBEARER
from raftmq.sasl.exchange import Answer, AuthenticationFailedError
from raftmq.sasl.oauthbearer import (
    ALGORITHMS,
    KEYS_MAX,
    MECHANISM,
    MESSAGE_BYTES_MAX,
    InvalidTokenError,
    NoKeysError,
    OAuthBearerExchange,
    TokenKey,
    TokenRules,
    VerifiedToken,
    read_keys,
    read_message,
    verify_token,
)
from tests.sasl.tokens import AUDIENCE, ISSUER, NOW_S, Issuer, message

ISSUED = Issuer()
STRANGER = Issuer()
KEYS: Final = read_keys(ISSUED.jwks())
RULES = TokenRules(
    algorithms=("RS256", "PS256", "ES256", "EdDSA"), issuer=ISSUER, audiences=(AUDIENCE, "other")
)


def find(key_id: str | None) -> list[TokenKey]:
    return [key for key in KEYS if key_id in (None, key.key_id)]


def verified(token: str, **rules: Any) -> VerifiedToken:
    chosen = TokenRules(
        **{name: getattr(RULES, name) for name in RULES.__slots__ if not name.startswith("__")}
        | rules
    )
    return verify_token(token, chosen, find, NOW_S)


def test_words_are_those_of_the_configuration() -> None:
    assert MECHANISM == SASL_OAUTHBEARER
    assert set(ALGORITHMS) == set(OAUTH_ALGORITHMS)
    assert not [name for name in ALGORITHMS if name.startswith("HS") or name == "none"]


@pytest.mark.parametrize(
    ("key_id", "algorithm"), [("rsa", "RS256"), ("rsa", "PS256"), ("ec", "ES256"), ("ed", "EdDSA")]
)
def test_tokens_that_are_believed(key_id: str, algorithm: str) -> None:
    token = ISSUED.token(key_id=key_id, algorithm=algorithm)
    assert verified(token) == VerifiedToken("alice", (NOW_S + 330) * 1_000)


@pytest.mark.parametrize(
    ("said", "rules", "user"),
    [
        ({"aud": ["x", "other"]}, {}, "alice"),
        ({"azp": "app-7"}, {"principal_claim": "azp"}, "app-7"),
        ({"exp": NOW_S - 29}, {}, "alice"),
        ({"nbf": NOW_S + 30, "iat": NOW_S + 30}, {}, "alice"),
        ({"iat": None}, {}, "alice"),
        ({"exp": NOW_S + 0.5}, {"skew_s": 0}, "alice"),
    ],
)
def test_what_may_be_in_them(said: dict[str, Any], rules: dict[str, Any], user: str) -> None:
    assert verified(ISSUED.token(**said), **rules).user == user


def forged(alg: str) -> str:
    """Signed by nobody, or with the public key as a shared secret."""
    head, body, _ = ISSUED.token().split(".")
    header = json.loads(base64.urlsafe_b64decode(head + "=="))
    header["alg"] = alg
    head = base64.urlsafe_b64encode(json.dumps(header).encode()).rstrip(b"=").decode()
    if not alg.startswith("HS"):
        return f"{head}.{body}."
    import hashlib
    import hmac

    public = ISSUED.keys["rsa"][1].public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    secret = public.public_bytes(serialization.Encoding.PEM, form)
    mac = hmac.digest(secret, f"{head}.{body}".encode(), hashlib.sha256)
    return f"{head}.{body}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"


def tampered() -> str:
    head, body, signature = ISSUED.token().split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    claims["sub"] = "root"
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"{head}.{body}.{signature}"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (STRANGER.token, "a wrong signature"),
        (tampered, "a wrong signature"),
        (lambda: forged("none"), "an algorithm that is not allowed"),
        (lambda: forged("None"), "an algorithm that is not allowed"),
        (lambda: forged("HS256"), "an algorithm that is not allowed"),
        (lambda: ISSUED.token(algorithm="RS512"), "an algorithm that is not allowed"),
        (lambda: ISSUED.token(header={"kid": "gone"}), "an unknown key"),
        (lambda: ISSUED.token(header={"kid": "ec"}), "an unknown key"),
        (lambda: ISSUED.token(header={"kid": "x" * 300}), "a key id that is none"),
        (lambda: ISSUED.token(header={"crit": ["b64"], "b64": True}), "no JWT"),
        (lambda: ISSUED.token(header={"crit": ["x"], "x": 1}), "no JWT"),
        (lambda: ISSUED.token(aud="elsewhere"), "another audience"),
        (lambda: ISSUED.token(aud=None), "a claim lacks"),
        (lambda: ISSUED.token(iss="https://evil.example"), "another issuer"),
        (lambda: ISSUED.token(iss=None), "a claim lacks"),
        (lambda: ISSUED.token(exp=None), "a claim lacks"),
        (lambda: ISSUED.token(exp=NOW_S - 30), "it has expired"),
        (lambda: ISSUED.token(exp=1 << 60), "a time that is none"),
        (lambda: ISSUED.token(exp="soon"), "a time that is none"),
        (lambda: ISSUED.token(exp=True), "a time that is none"),
        (lambda: ISSUED.token(exp=float("nan")), "a time that is none"),
        (lambda: ISSUED.token(nbf=NOW_S + 31), "it is not valid yet"),
        (lambda: ISSUED.token(iat=NOW_S + 31), "it is not valid yet"),
        (lambda: ISSUED.token(None), "a claim lacks"),
        (lambda: ISSUED.token(""), "no name of a principal"),
        (lambda: ISSUED.token("x" * 257), "no name of a principal"),
        (lambda: ISSUED.token("a\nb"), "a name with characters that do not print"),
        (lambda: "x", "no JWT"),
        (lambda: "a.b.c", "no JWT"),
        (lambda: "eyJhbGciOiJSUzI1NiJ9.e30.", "no key id, and not one key"),
    ],
)
def test_tokens_that_are_not(make: Callable[[], str], why: str) -> None:
    if why == "no key id, and not one key":  # RSA alone fits, and there is one such key
        why = "a wrong signature"
    with pytest.raises(InvalidTokenError) as caught:
        verified(make())
    assert str(caught.value) == why


def test_a_key_that_is_for_another_algorithm_is_not_used() -> None:
    rows = [ISSUED.row("rsa", alg="RS512")]
    keys = read_keys(json.dumps({"keys": rows}).encode())
    with pytest.raises(InvalidTokenError, match="an unknown key"):
        verify_token(ISSUED.token(), RULES, lambda _key_id: keys, NOW_S)


def test_a_token_without_a_key_id_needs_a_set_of_one() -> None:
    ISSUED.add("rsa2", "RS256")
    token = ISSUED.token(header={"kid": None})
    try:
        two, one = read_keys(ISSUED.jwks()), read_keys(ISSUED.jwks("rsa", "ec"))
    finally:
        del ISSUED.keys["rsa2"]
    assert verify_token(token, RULES, lambda _key_id: one, NOW_S).user == "alice"
    with pytest.raises(InvalidTokenError, match="no key id, and not one key"):
        verify_token(token, RULES, lambda _key_id: two, NOW_S)


def test_of_two_keys_of_one_name_either_may_verify() -> None:
    keys = (*read_keys(STRANGER.jwks("rsa")), *read_keys(ISSUED.jwks("rsa")))
    assert verify_token(ISSUED.token(), RULES, lambda _key_id: keys, NOW_S).user == "alice"


def test_sets_of_keys() -> None:
    rows = [
        ISSUED.row("rsa"),
        ISSUED.row("ec", use="enc"),
        ISSUED.row("ed", key_ops=["sign"]),
        {"kty": "oct", "k": "c2VjcmV0", "kid": "secret"},
        {"kty": "RSA", "n": "x", "kid": "broken"},
        {"kty": "new", "kid": "new"},
        json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(ISSUED.keys["rsa"][1])),
    ]
    keys = read_keys(json.dumps({"keys": rows}).encode())
    assert [key.key_id for key in keys] == ["rsa"]
    small = Issuer()
    small.add("rsa", "RS256", rsa_bits=1_024)
    for text in (
        b"",
        b"{}",
        b"[]",
        b'{"keys": 7}',
        b'{"keys": ["x"]}',
        b'{"keys": []}',
        b"[" * 100_000,
        small.jwks("rsa"),
        json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}).encode(),
    ):
        with pytest.raises(NoKeysError):
            read_keys(text)
    many = read_keys(json.dumps({"keys": [ISSUED.row("ec")] * (KEYS_MAX + 5)}).encode())
    assert len(many) == KEYS_MAX


# ---- the exchange ----


def exchange() -> OAuthBearerExchange:
    return OAuthBearerExchange(verified)


def answer(one: OAuthBearerExchange, token: bytes) -> Answer:
    step = one.step(token)
    assert not isinstance(step, Answer), "verifying is work for a worker"
    return step()


@pytest.mark.parametrize("identity", ["", "alice"])
def test_a_client_comes_in(identity: str) -> None:
    one = exchange()
    found = answer(one, message(ISSUED.token(), identity=identity, traceId="7"))
    assert (found.user, found.token, found.failure) == ("alice", b"", None)
    assert found.expires_ms == (NOW_S + 330) * 1_000
    assert not found.is_of_this_cluster
    with pytest.raises(AuthenticationFailedError, match="after the last one"):
        one.step(b"\x01")


@pytest.mark.parametrize("last", [b"\x01", b"", b"anything"])
def test_a_failure_is_acknowledged_before_it_ends_the_exchange(last: bytes) -> None:
    one = exchange()
    found = answer(one, message(STRANGER.token()))
    assert json.loads(found.token) == {"status": "invalid_token"}
    assert found.user is None
    assert found.failure is not None
    assert found.failure.user is None, "nobody has proved to be anyone"
    assert found.failure.reason == "a token that is not believed: a wrong signature"
    with pytest.raises(AuthenticationFailedError) as caught:
        one.step(last)
    assert caught.value.told == '{"status": "invalid_token"}'
    with pytest.raises(AuthenticationFailedError):
        one.step(message(ISSUED.token()))


def test_nobody_acts_for_another_one() -> None:
    with pytest.raises(AuthenticationFailedError, match="another identity"):
        answer(exchange(), message(ISSUED.token(), identity="root"))


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x01",
        b"n,,",
        b"n,,\x01\x01",
        b"n,,\x01\x01\x01",
        b"n,,\x01auth=Bearer x\x01",
        b"n,,auth=Bearer x\x01\x01",
        b"y,,\x01auth=Bearer x\x01\x01",
        b"p=tls-unique,,\x01auth=Bearer x\x01\x01",
        b"n,a=,\x01auth=Bearer x\x01\x01",
        b"n,,\x01auth=Basic x\x01\x01",
        b"n,,\x01auth=Bearer \x01\x01",
        b"n,,\x01auth=Bearer x y\x01\x01",
        b"n,,\x01host=a\x01\x01",
        b"n,,\x01auth=Bearer x\x01auth=Bearer y\x01\x01",
        b"n,,\x01auth=Bearer x\x011=2\x01\x01",
        b"n,,\x01auth=Bearer x\x01a=\x00\x01\x01",
        b"n,,\x01auth=Bearer \xff\x01\x01",
        b"n,,\x01auth=Bearer " + b"x" * MESSAGE_BYTES_MAX + b"\x01\x01",
    ],
)
def test_malformed_messages(said: bytes) -> None:
    with pytest.raises(AuthenticationFailedError):
        read_message(said)


def test_messages() -> None:
    assert read_message(b"n,a=a=2Cb,\x01host=h\x01port=1\x01auth=bearer x.y-z_~+/=\x01\x01") == (
        "a,b",
        "x.y-z_~+/=",
    )
