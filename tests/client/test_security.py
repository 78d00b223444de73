"""TLS and SASL, in memory and over sockets by every driver."""

from __future__ import annotations

import base64
import json
import ssl
import struct
import time
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import (
    ANNOUNCED,
    ApiKey,
    Struct,
    decode_request_header,
    encode_response,
    encode_response_header,
)
from raftmq.records import NewRecord
from raftmq.types import TopicPartition
from raftmq_client import (
    AuthenticationError,
    OAuthBearer,
    Outcome,
    Plain,
    Scram,
    Security,
    UsageError,
)
from raftmq_client.core.call import Call, struct_call
from raftmq_client.core.client import ClientCore, ClientOptions
from raftmq_client.core.connection import SOFTWARE, ConnectionCore
from raftmq_client.core.consumer import ConsumerCore
from raftmq_client.core.partitioners import make_partitioner
from raftmq_client.core.producer import ProducerCore
from raftmq_client.core.security import (
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    read_security,
)
from raftmq_client.options import consumer_options, producer_options
from tests.client.drivers import NAMES, open_driver
from tests.client.fake_broker import FakeBroker
from tests.client.tls_front import CERTIFICATE, TlsFront

NONCE = "rOprNGfwEbeRWgbNEkqO"
CHALLENGE = (
    b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
)
"""Of RFC 7677, section 3, as are the proof and the verdict below."""
PROOF = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
VERDICT = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def pencil() -> Scram:
    return Scram("user", "pencil", "SHA-256", make_nonce=lambda: NONCE)


def client_context() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATE))


class Line:
    """A connection core and a broker that hears it, request by request."""

    def __init__(self, security: Security | None) -> None:
        self.core = ConnectionCore("test", security=security, host="127.0.0.1")
        self.core.start(0)
        self.now = 1.0

    def heard(self) -> tuple[int, int, bytes]:
        """The api, correlation id and body of the one request written since."""
        data = b"".join(bytes(piece) for piece in self.core.outgoing())
        (size,) = struct.unpack_from(">i", data)
        assert len(data) == size + 4
        header, position = decode_request_header(memoryview(data[4:]))
        return header.api_key, header.correlation_id, data[4 + position :]

    def say(self, correlation_id: int, body: bytes, head: bytes = b"") -> None:
        frame = struct.pack(">i", correlation_id) + body if not head else head + body
        data = struct.pack(">i", len(frame)) + frame
        self.core.buffer()[: len(data)] = data
        self.core.received(len(data), self.now)

    def shake(self) -> None:
        api, correlation_id, _ = self.heard()
        assert api == ApiKey.API_VERSIONS
        self.say(0, api_versions(), encode_response_header(api, 3, correlation_id))

    def choose(self, mechanism: bytes, code: int = 0) -> None:
        api, correlation_id, body = self.heard()
        assert (api, body[2:]) == (SASL_HANDSHAKE, mechanism)
        self.say(correlation_id, struct.pack(">hih", code, 1, 5) + b"OTHER")

    def token(
        self, answer: bytes, code: int = 0, message: bytes | None = None, lifetime_ms: int = 0
    ) -> bytes:
        """Answer a SaslAuthenticate; gives what it said."""
        api, correlation_id, body = self.heard()
        assert api == SASL_AUTHENTICATE
        said = struct.pack(">h", -1) if message is None else struct.pack(">h", len(message))
        head = struct.pack(">h", code) + said + (message or b"")
        tail = struct.pack(">i", len(answer)) + answer + struct.pack(">q", lifetime_ms)
        self.say(correlation_id, head + tail)
        return body[4:]


def api_versions(*, has_sasl: bool = True) -> bytes:
    keys = [
        Struct(api_key=api, min_version=low, max_version=high)
        for api, (low, high) in ANNOUNCED.items()
        if api not in (SASL_HANDSHAKE, SASL_AUTHENTICATE)
    ]
    keys += [
        Struct(api_key=api, min_version=0, max_version=1)
        for api in (SASL_HANDSHAKE, SASL_AUTHENTICATE)
        if has_sasl
    ]
    return encode_response(ApiKey.API_VERSIONS, 3, Struct(error_code=0, api_keys=keys))


@pytest.mark.parametrize("way", ["not announced", "refused"])
def test_sasl_at_a_plain_port_says_so(way: str) -> None:
    line = Line(Security(sasl=Plain("user", "pencil")))
    if way == "refused":
        line.shake()
        line.choose(b"PLAIN", ErrorCode.ILLEGAL_SASL_STATE)
    else:
        _, correlation_id, _ = line.heard()
        head = encode_response_header(ApiKey.API_VERSIONS, 3, correlation_id)
        line.say(correlation_id, api_versions(has_sasl=False), head)
    assert isinstance(line.core.error, AuthenticationError)
    assert "the port is plain" in str(line.core.error)


def test_a_port_that_hangs_up_early_is_told_by_its_kind() -> None:
    line = Line(None)
    line.core.received(0, 1)
    assert "may want TLS" in str(line.core.error)
    line = Line(Security(tls=client_context()))
    line.core.received(0, 1)
    assert "may be plain" in str(line.core.error)
    line = Line(Security(tls=client_context()))
    line.core.buffer()[:10] = b"no TLS her"
    line.core.received(10, 1)
    assert "may be plain" in str(line.core.error)


def test_plain_says_name_and_password() -> None:
    line = Line(Security(sasl=Plain("user", "pencil")))
    line.shake()
    assert not line.core.is_ready
    line.choose(b"PLAIN")
    assert line.token(b"") == b"\0user\0pencil"
    assert line.core.is_ready


def test_scram_has_the_vectors_of_its_rfc() -> None:
    line = Line(Security(sasl=pencil()))
    line.shake()
    line.choose(b"SCRAM-SHA-256")
    assert line.token(CHALLENGE) == b"n,,n=user,r=" + NONCE.encode()
    assert line.token(VERDICT) == PROOF
    assert line.core.is_ready


@pytest.mark.parametrize(
    ("challenge", "verdict", "reason"),
    [
        (CHALLENGE, b"v=AAAA", "does not know the password"),
        (CHALLENGE, b"e=other-error", "other-error"),
        (CHALLENGE.replace(b"i=4096", b"i=1"), b"", "out of bounds"),
        (CHALLENGE.replace(b"i=4096", b"i=9999999"), b"", "out of bounds"),
        (CHALLENGE.replace(b"r=r", b"r=x"), b"", "nonce"),
        (CHALLENGE.replace(b"s=", b"x="), b"", "malformed"),
        (b"\xff", b"", "no text"),
    ],
)
def test_a_broker_that_cheats_is_refused(challenge: bytes, verdict: bytes, reason: str) -> None:
    line = Line(Security(sasl=pencil()))
    line.shake()
    line.choose(b"SCRAM-SHA-256")
    line.token(challenge)
    if verdict:
        line.token(verdict)
    assert isinstance(line.core.error, AuthenticationError)
    assert reason in str(line.core.error)
    assert not line.core.error.retriable


def test_a_refusal_says_why() -> None:
    line = Line(Security(sasl=Plain("user", "wrong")))
    line.shake()
    line.choose(b"PLAIN")
    line.token(b"", 58, b"Invalid username or password")
    assert isinstance(line.core.error, AuthenticationError)
    assert "PLAIN: Invalid username or password" in str(line.core.error)
    line = Line(Security(sasl=Plain("user", "x")))
    line.shake()
    line.choose(b"PLAIN", 33)
    assert "the broker offers OTHER" in str(line.core.error)


BEARER_TOKEN = "head.eyJleHAiOjF9.sign"


def bearer(*tokens: str, **extensions: str) -> OAuthBearer:
    """Gives these tokens one after the other."""
    left = iter(tokens)
    return OAuthBearer(lambda: next(left), extensions=extensions)


def opened(sasl: OAuthBearer | Plain, lifetime_ms: int) -> Line:
    """A connection whose session lasts so long from 1 on."""
    line = Line(Security(sasl=sasl))
    line.shake()
    if isinstance(sasl, OAuthBearer):
        bring(line)
    line.choose(sasl.mechanism.encode())
    line.token(b"", lifetime_ms=lifetime_ms)
    assert line.core.is_ready
    return line


def bring(line: Line) -> None:
    """Run the errand, as drivers do."""
    errand = line.core.take_errand()
    assert errand is not None
    assert line.core.take_errand() is None
    line.core.brought(errand(), None, line.now)


def asked(line: Line, done: list[Any]) -> Call:
    """A request that is submitted now."""
    call = struct_call(ApiKey.API_VERSIONS, SOFTWARE, lambda *ended: done.append(ended))
    call.deadline = line.now + 30_000
    line.core.submit(call, line.now)
    return call


def test_a_bearer_token_is_fetched_by_the_driver_and_shown() -> None:
    line = Line(Security(sasl=bearer("a.b.c", pool="x")))
    line.shake()
    assert not line.core.has_outgoing, "nothing is said before there is a token"
    assert line.core.deadline() == pytest.approx(30_001)
    bring(line)
    line.choose(b"OAUTHBEARER")
    assert line.token(b"") == b"n,,\x01auth=Bearer a.b.c\x01pool=x\x01\x01"
    assert line.core.is_ready


def test_a_token_that_is_refused_is_acknowledged_and_not_shown_again() -> None:
    sasl = bearer(far_token(1), far_token(2))
    line = Line(Security(sasl=sasl))
    line.shake()
    bring(line)
    line.choose(b"OAUTHBEARER")
    line.token(b'{"status": "invalid_token"}')
    assert line.token(b"", 58, b"invalid credentials") == b"\x01"
    assert isinstance(line.core.error, AuthenticationError)
    assert "invalid credentials" in str(line.core.error)
    assert sasl.prepare() == far_token(2)


def far_token(number: int) -> str:
    said = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 600, "n": number}).encode())
    return FAR.setdefault(number, f"h.{said.decode().rstrip('=')}.s")


FAR: dict[int, str] = {}


def test_a_token_is_shown_for_most_of_its_life_and_then_another() -> None:
    sasl = bearer(far_token(1), BEARER_TOKEN, far_token(2))
    assert [sasl.prepare() for _ in range(3)] == [far_token(1)] * 3
    sasl.forget()
    assert sasl.prepare() == BEARER_TOKEN, "this one is over already"
    assert [sasl.prepare() for _ in range(2)] == [far_token(2)] * 2


@pytest.mark.parametrize("token", ["", "two words", "a\r\nb", 7])
def test_what_is_no_token_is_not_said(token: Any) -> None:
    with pytest.raises(AuthenticationError, match="no bearer token"):
        OAuthBearer(lambda: token).prepare()


@pytest.mark.parametrize("extensions", [{"auth": "x"}, {"a b": "x"}, {"a": "\x01"}])
def test_what_cannot_be_said_beside_a_token_is_refused(extensions: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        OAuthBearer(lambda: "t", extensions=extensions)


def test_no_token_ends_the_connection() -> None:
    for is_late in (False, True):
        line = Line(Security(sasl=bearer("a")))
        line.shake()
        assert line.core.take_errand() is not None
        if is_late:
            line.core.expire(line.core.deadline())
            line.core.brought("a", None, 40_000)  # which nobody waits for any more
        else:
            line.core.brought(None, OSError("unreachable"), 2)
            assert "unreachable" in str(line.core.error)
        assert isinstance(line.core.error, AuthenticationError)


def test_a_session_is_renewed_once_what_is_in_flight_is_answered() -> None:
    """KIP-368: the broker takes no other request between the two."""
    line = opened(Plain("user", "pencil"), 60_000)
    done: list[Any] = []
    line.now = 40_000
    asked(line, done)
    api, first, _ = line.heard()
    line.now = 49_000
    waits = asked(line, done)
    assert not line.core.has_outgoing
    assert line.core.in_flight == 2
    line.say(first, api_versions(), encode_response_header(api, 3, first))
    assert len(done) == 1
    line.choose(b"PLAIN")
    assert not waits.sent
    assert line.token(b"", lifetime_ms=60_000) == b"\0user\0pencil"
    api, second, _ = line.heard()
    assert api == ApiKey.API_VERSIONS
    line.say(second, api_versions(), encode_response_header(api, 3, second))
    assert [error for _, error, _ in done] == [None, None]
    line.now = 49_000 + 47_000
    asked(line, done)
    line.heard()  # not yet again


def test_requests_go_on_while_a_new_token_is_fetched_but_not_after_the_session() -> None:
    line = opened(bearer(BEARER_TOKEN, "new"), 60_000)
    done: list[Any] = []
    line.now = 50_000
    asked(line, done)
    api, first, _ = line.heard()
    line.say(first, api_versions(), encode_response_header(api, 3, first))
    line.now = 58_000
    asked(line, done)
    assert not line.core.has_outgoing
    bring(line)
    line.choose(b"OAUTHBEARER")
    assert b"Bearer new" in line.token(b"", lifetime_ms=60_000)
    line.heard()


def test_a_token_that_cannot_be_had_is_tried_for_as_long_as_the_session_lasts() -> None:
    line = opened(bearer(BEARER_TOKEN), 60_000)
    done: list[Any] = []
    for line.now in (50_000, 52_000):
        asked(line, done)
        assert line.core.take_errand() is not None
        line.core.brought(None, OSError("unreachable"), line.now)
        asked(line, done)
        assert line.core.take_errand() is None, "not at once again"
        assert not line.core.is_closed
    line.core.outgoing()
    line.now = 58_000
    waits = asked(line, done)
    assert line.core.take_errand() is not None
    line.core.brought(None, OSError("unreachable"), line.now)
    assert isinstance(line.core.error, AuthenticationError)
    assert not waits.sent
    assert waits.is_done


def test_a_connection_that_is_not_used_is_not_renewed() -> None:
    line = opened(Plain("user", "pencil"), 60_000)
    line.now = 500_000
    line.core.expire(line.now)
    assert not line.core.has_outgoing
    asked(line, [])
    line.choose(b"PLAIN")
    line.token(b"", 58, b"gone")
    assert "gone" in str(line.core.error)


def test_passwords_are_not_printed() -> None:
    assert "pencil" not in repr((Plain("user", "pencil"), pencil()))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError):
        Scram("user", "x", "SHA-1")
    with pytest.raises(UsageError):
        read_security("tls")  # type: ignore[arg-type]


@pytest.fixture
def front() -> Iterator[FakeBroker]:
    with FakeBroker({"t": 1}) as broker:
        tls = TlsFront(broker)
        yield broker
        tls.close()


@pytest.mark.parametrize("name", NAMES)
def test_every_driver_speaks_tls(front: FakeBroker, name: str) -> None:
    with open_driver(name) as driver:
        value = bytes(range(256)) * 2_000
        with driver.producer(front.address, security=client_context()) as producer:
            producer.send("t", value, partition=0).result(10)
        with driver.consumer(front.address, security=client_context()) as consumer:
            consumer.assign({TopicPartition("t", 0): 0})
            (message,) = consumer.poll(10)
            assert message.value == value


def test_a_certificate_that_nobody_vouches_for_is_refused(front: FakeBroker) -> None:
    with open_driver("blocking") as driver:
        strange = ssl.create_default_context()
        with (
            driver.admin(front.address, security=strange, timeout_ms=30_000) as admin,
            pytest.raises(AuthenticationError, match=r"not trusted.*CERTIFICATE_VERIFY_FAILED"),
        ):
            admin.brokers()


@pytest.mark.parametrize("name", NAMES)
def test_a_question_about_a_topic_ends_where_nobody_lets_us_in(
    front: FakeBroker, name: str
) -> None:
    """It would have none of its answers later, and its time is not waited for."""
    with open_driver(name) as driver:
        strange = ssl.create_default_context()
        with (
            driver.consumer(front.address, security=strange) as consumer,
            pytest.raises(AuthenticationError, match=r"not trusted.*CERTIFICATE_VERIFY_FAILED"),
        ):
            consumer.partitions("t", 3_600)


def test_who_is_not_let_in_hears_so_at_once() -> None:
    client = ClientCore(ClientOptions(security=Security(sasl=Plain("user", "wrong"))))
    consumer = ConsumerCore(consumer_options(), client)
    producer = ProducerCore(
        producer_options(), client.metadata, make_partitioner("sticky", Random(1)), lambda _: 0.0
    )
    client.cores.append(producer)
    receipt, _ = producer.send("t", NewRecord(None, b"x", 0, ()), None, None, 0)
    client.step(0)
    (link,) = client.take_connects()
    assert link.connection is not None
    client.connected(link, 0)
    reason = AuthenticationError("PLAIN: no")
    link.connection.fail("no", 1, reason)
    client.failed(link, "no", 1)
    assert consumer.has_news
    with pytest.raises(AuthenticationError):
        consumer.take(1, 1)
    client.step(1)
    assert isinstance(receipt.error, AuthenticationError)
    assert str(receipt.error) == str(reason)
    assert receipt.outcome is Outcome.FAILED
