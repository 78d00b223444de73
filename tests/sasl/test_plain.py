"""PLAIN: its one message, judged by the credentials of SCRAM."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.sasl import plain as plain_module
from raftmq.sasl.exchange import Answer, AuthenticationFailedError
from raftmq.sasl.plain import PlainExchange
from raftmq.sasl.scram import (
    SCRAM_BY_NUMBER,
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    ScramCredential,
    ScramMechanism,
    credential_of,
    salted_password,
)


def credential(mechanism: ScramMechanism, password: str) -> ScramCredential:
    salted = salted_password(mechanism, password, b"salt", 4096)
    return credential_of(mechanism, salted, b"salt", 4096)


USERS = {
    ("alice", SCRAM_SHA_256): credential(SCRAM_SHA_256, "secret"),
    ("bob", SCRAM_SHA_512): credential(SCRAM_SHA_512, "pass,word"),
    ("both", SCRAM_SHA_256): credential(SCRAM_SHA_256, "old"),
    ("both", SCRAM_SHA_512): credential(SCRAM_SHA_512, "new"),
}


def judged(token: bytes) -> Answer:
    exchange = PlainExchange(lambda user, mechanism: USERS.get((user, mechanism)), b"s")
    step = exchange.step(token)
    assert not isinstance(step, Answer), "that is work"
    with pytest.raises(AuthenticationFailedError, match="after the last one"):
        exchange.step(token)
    return step()


@pytest.mark.parametrize(
    "token", [b"\0alice\0secret", b"alice\0alice\0secret", b"\0bob\0pass,word", b"\0both\0new"]
)
def test_who_knows_the_password_comes_in(token: bytes) -> None:
    assert judged(token) == Answer(b"", token.split(b"\0")[1].decode())


@pytest.mark.parametrize(
    ("token", "user"),
    [
        (b"\0alice\0secret ", "alice"),
        (b"\0both\0old", "both"),
        (b"\0carol\0secret", None),
        (b"\0secret\0alice", None),
    ],
)
def test_who_does_not_is_refused(token: bytes, user: str | None) -> None:
    with pytest.raises(AuthenticationFailedError, match="a wrong password") as caught:
        judged(token)
    assert (caught.value.user, caught.value.told) == (user, "")


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (b"", "malformed"),
        (b"alice\0secret", "malformed"),
        (b"\0alice\0secret\0", "malformed"),
        (b"\0\0secret", "without a user"),
        (b"\0alice\0", "without a user"),
        (b"bob\0alice\0secret", "another identity"),
        (b"\0alice\0\xff", "no text"),
        (b"\0alice\0" + b"p" * 9_000, "9007 bytes"),
    ],
)
def test_messages_that_are_refused_at_once(token: bytes, why: str) -> None:
    exchange = PlainExchange(lambda user, mechanism: USERS.get((user, mechanism)), b"s")
    with pytest.raises(AuthenticationFailedError, match=why) as caught:
        exchange.step(token)
    assert "secret" not in str(caught.value)


def test_a_user_that_is_not_there_costs_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    salted: list[int] = []

    def proves(_mechanism: ScramMechanism, known: ScramCredential, _password: str) -> bool:
        salted.append(known.iterations)
        return False

    monkeypatch.setattr(plain_module, "proves", proves)
    for token in (b"\0alice\0x", b"\0carol\0x"):
        with pytest.raises(AuthenticationFailedError):
            judged(token)
    assert salted == [4096, 4096]


@given(st.binary(max_size=40))
def test_no_message_makes_it_raise_anything_else(token: bytes) -> None:
    exchange = PlainExchange(lambda *_: None, b"s")
    try:
        step = exchange.step(token)
    except AuthenticationFailedError:
        return
    assert callable(step)


def test_kinds_of_credentials() -> None:
    assert len(SCRAM_BY_NUMBER) == 2, "both are looked for"
