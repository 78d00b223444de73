"""SCRAM's server side: the exchanges of RFC 7677 and of our own client, and what it refuses."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.sasl.exchange import Answer, AuthenticationFailedError
from raftmq.sasl.scram import (
    ITERATIONS_DEFAULT,
    SCRAM_BY_NUMBER,
    SCRAM_MECHANISMS,
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    ScramCredential,
    ScramExchange,
    ScramMechanism,
    credential_of,
    made_up_credential,
    proves,
    salt_text,
    salted_password,
)
from raftmq_client import AuthenticationError, Scram

SECRET = b"s" * 32
FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
CHALLENGE = (
    b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
)
FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
VERDICT = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
"""Of RFC 7677, section 3: user and pencil."""


def credential(
    mechanism: ScramMechanism, password: str, salt: bytes = b"salt", iterations: int = 4096
) -> ScramCredential:
    salted = salted_password(mechanism, password, salt, iterations)
    return credential_of(mechanism, salted, salt, iterations)


PENCIL = credential(SCRAM_SHA_256, "pencil", base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="))


def exchange(nonce: str = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0") -> ScramExchange:
    def find(user: str, _mechanism: ScramMechanism) -> ScramCredential | None:
        return PENCIL if user == "user" else None

    return ScramExchange(SCRAM_SHA_256, find, SECRET, nonce)


def test_the_exchange_of_the_rfc() -> None:
    server = exchange()
    assert server.step(FIRST) == Answer(CHALLENGE)
    assert server.step(FINAL) == Answer(VERDICT, "user")
    with pytest.raises(AuthenticationFailedError, match="after the last one"):
        server.step(FINAL)


def test_mechanisms_are_kafkas() -> None:
    assert list(SCRAM_MECHANISMS) == ["SCRAM-SHA-256", "SCRAM-SHA-512"]
    assert list(SCRAM_BY_NUMBER) == [1, 2]
    for mechanism in SCRAM_BY_NUMBER.values():
        assert hashlib.new(mechanism.digest).digest_size == mechanism.size


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (b"", "malformed first"),
        (b"p=tls-unique,,n=user,r=abc", "channel binding"),
        (b"y,,n=user,r=abc", "channel binding"),
        (b"n,,m=must,n=user,r=abc", "malformed first"),
        (b"n,,n=,r=abc", "malformed first"),
        (b"n,,n=us=er,r=abc", "malformed first"),
        (b"n,,n=user,r=", "malformed first"),
        (b"n,,n=user,r=a b", "malformed first"),
        (b"n,,n=user,r=abc\0", "malformed first"),
        (b"n,a=other,n=user,r=abc", "another identity"),
        (b"\xff\xfe", "no text"),
        (b"n,,n=" + b"u" * 9_000 + b",r=abc", "9011 bytes"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_first_messages_that_are_refused(first: bytes, why: str) -> None:
    with pytest.raises(AuthenticationFailedError, match=re.escape(why)):
        exchange().step(first)


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (b"c=biws", b"c=eSws", "another channel binding"),
        (b"c=biws", b"c=!", "malformed last"),
        (b"r=rOprNG", b"r=xOprNG", "another nonce"),
        (b"%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0", b"", "another nonce"),
        (b"%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0", b"%", "another nonce"),
        (b"p=dHz", b"p=dHx", "a wrong password"),
        (b"p=dHzb", b"p=", "a proof of another length"),
        (b"p=dHz", b"p=dH", "malformed last"),
        (b",p=", b",x=", "malformed last"),
        (b",p=", b",x=1,p=", "a wrong password"),
    ],
)
def test_last_messages_that_are_refused(before: bytes, after: bytes, why: str) -> None:
    server = exchange()
    server.step(FIRST)
    assert before in FINAL
    with pytest.raises(AuthenticationFailedError, match=why) as caught:
        server.step(FINAL.replace(before, after))
    assert caught.value.user == "user", "a user that is there may stand in the log"
    assert caught.value.told == "", "and clients learn nothing"
    with pytest.raises(AuthenticationFailedError, match="after the last one"):
        server.step(FINAL)


def test_a_failed_first_message_ends_it() -> None:
    server = exchange()
    with pytest.raises(AuthenticationFailedError):
        server.step(b"x")
    with pytest.raises(AuthenticationFailedError, match="after the last one"):
        server.step(FIRST)


def test_an_identity_of_its_own_and_extensions_are_taken() -> None:
    first = b"n,a=user,n=user,r=abc,tokenauth=false"
    server = exchange("def")
    challenge = server.step(first).token
    assert challenge.startswith(b"r=abcdef,s=")
    with pytest.raises(AuthenticationFailedError, match="another channel binding"):
        server.step(FINAL.replace(b"rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0", b"abcdef"))


def test_an_unknown_user_looks_like_any_other_until_the_end() -> None:
    def challenge(user: str, secret: bytes = SECRET) -> dict[str, str]:
        server = ScramExchange(SCRAM_SHA_512, lambda *_: None, secret, "n")
        said = server.step(f"n,,n={user},r=abc".encode()).token.decode()
        proof = base64.b64encode(bytes(64)).decode()
        with pytest.raises(AuthenticationFailedError) as caught:
            server.step(f"c=biws,r=abcn,p={proof}".encode())
        assert caught.value.user is None, "what was typed as a name may be a password"
        assert "nobody" not in str(caught.value)
        return dict(part.split("=", 1) for part in said.split(","))

    known = challenge("nobody")
    assert challenge("nobody") == known, "the same at each try"
    assert challenge("nobody", b"t" * 32)["s"] != known["s"]
    assert challenge("somebody")["s"] != known["s"]
    assert int(known["i"]) == ITERATIONS_DEFAULT
    assert re.fullmatch(rb"[0-9a-z]{20,26}", base64.b64decode(known["s"]))


def test_made_up_credentials_differ_by_mechanism_and_fit_no_password() -> None:
    made_up = [made_up_credential(SECRET, one, "u") for one in SCRAM_BY_NUMBER.values()]
    assert made_up[0].salt != made_up[1].salt
    for mechanism, one in zip(SCRAM_BY_NUMBER.values(), made_up, strict=True):
        assert len(one.stored_key) == len(one.server_key) == mechanism.size
        assert not proves(mechanism, one, "u")


def test_salts_have_the_form_of_kafkas_tools() -> None:
    assert salt_text(0) == b"0"
    assert salt_text(35 * 36 + 1) == b"z1"
    assert salt_text(1 << 130) == b"0"


def test_nothing_that_is_shown_has_a_secret() -> None:
    assert repr(PENCIL) == "ScramCredential(iterations=4096)"


@given(
    user=st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=20),
    password=st.text(st.characters(codec="utf-8"), min_size=1, max_size=10),
    number=st.sampled_from([1, 2]),
)
def test_our_client_and_our_server_agree(user: str, password: str, number: int) -> None:
    mechanism = SCRAM_BY_NUMBER[number]
    known = credential(mechanism, password)
    server = ScramExchange(
        mechanism, lambda name, _: known if name == user else None, SECRET, "server-nonce"
    )
    client = Scram(user, password, mechanism.name.removeprefix("SCRAM-")).exchange()
    answer = server.step(next(client))
    answer = server.step(client.send(answer.token))
    assert answer.user == user
    with pytest.raises(StopIteration):
        client.send(answer.token)


def test_our_client_refuses_a_server_that_does_not_know_the_password() -> None:
    client = Scram("user", "other", "SHA-256").exchange()
    server = exchange("x")
    proof = client.send(server.step(next(client)).token)
    with pytest.raises(AuthenticationFailedError, match="a wrong password"):
        server.step(proof)
    with pytest.raises(AuthenticationError):
        client.send(VERDICT)


MESSAGES = st.one_of(
    st.binary(max_size=60),
    st.builds(
        lambda data, at, junk: data[: at % len(data)] + junk + data[at % len(data) :],
        st.sampled_from([FIRST, FINAL, CHALLENGE]),
        st.integers(0, 200),
        st.binary(max_size=4),
    ),
)


@given(st.lists(MESSAGES, max_size=3), st.booleans())
def test_no_message_makes_it_raise_anything_else(messages: list[bytes], is_begun: bool) -> None:
    server = exchange()
    for message in [FIRST, *messages] if is_begun else messages:
        try:
            answer = server.step(message)
        except AuthenticationFailedError:
            continue
        assert answer.user is None or message == FINAL
