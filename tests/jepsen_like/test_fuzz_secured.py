"""What the fuzzer says at protected ports is sound where it is not spoiled, so it gets far."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from jepsen_like.fuzz import secured
from jepsen_like.fuzz.secured import (
    FINAL,
    HELLO,
    NONCE,
    PROVED,
    HandshakeMaker,
    LoginMaker,
    login_pieces,
    open_doors,
    proved_pieces,
)
from jepsen_like.fuzz.spoil import Frame
from raftmq.runtime.peer_proofs import NUMBER_BYTES, PROOF_BYTES, StreamProofs
from raftmq.runtime.peer_secret import new_certificate, read_secrets


@pytest.mark.parametrize("maker", [HandshakeMaker, LoginMaker])
def test_inputs_follow_from_their_seed(maker: type[HandshakeMaker | LoginMaker]) -> None:
    def drawn(seed: int) -> list[bytes]:
        return [frame.data for frame in maker(Random(seed)).draw()]

    assert [drawn(seed) for seed in range(50)] == [drawn(seed) for seed in range(50)]
    assert len({tuple(drawn(seed)) for seed in range(50)}) == 50


def test_a_hello_that_is_not_spoiled_is_answered(tmp_path: Path) -> None:
    pem, _ = new_certificate()
    (tmp_path / "n.pem").write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "n.pem")
    answered = 0
    for seed in range(60):
        hello = HandshakeMaker(Random(seed))._hello().data
        received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        received.write(hello)
        with suppress(ssl.SSLError):
            context.wrap_bio(received, sent, server_side=True).do_handshake()
        answer = sent.read()
        answered += answer[:1] == b"\x16" and answer[5:6] == b"\x02"
    assert answered > 40


def test_a_token_has_the_nonce_that_was_said() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"....r=mine+yours,s=c2FsdA==,i=4096")
        frames = [Frame("first", b"first"), Frame(FINAL, b"c=biws,r=" + NONCE + b",p=AA==")]
        first, final = login_pieces(ours, frames)
    assert first == b"first"
    assert b"c=biws,r=mine+yours,p=AA==" in final


def test_a_token_without_an_answer_is_sent_as_well() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        (final,) = login_pieces(ours, [Frame(FINAL, b"r=" + NONCE)])
    assert b"r=none" in final


@pytest.mark.parametrize("label", [HELLO, PROVED, "proof"])
def test_proofs_are_of_this_connection(label: str) -> None:
    certificate, number = b"certificate", bytes(range(NUMBER_BYTES))
    frames = [Frame(label, b"a hello"), Frame("frame", b"more")]
    pieces = list(proved_pieces(certificate, number, "secret", frames))
    if label == "proof":
        assert pieces == [b"a hello", b"more"]
        return
    said, hello, more = pieces
    node = StreamProofs(
        b"secret",
        dialled_number=number,
        dialling_number=said[:NUMBER_BYTES],
        certificate=certificate,
        is_dialling=False,
    )
    assert node.is_known(said[NUMBER_BYTES:])
    assert more == b"more"
    assert hello.startswith(b"a hello")
    assert len(hello) == len(b"a hello") + (PROOF_BYTES if label == HELLO else 0)
    if label == HELLO:
        assert node.is_said(b"a hello", hello[-PROOF_BYTES:])


@pytest.mark.parametrize("port", ["client", "tls", "sasl", "secret"])
def test_doors_leave_nothing_behind(port: str) -> None:
    with open_doors(port) as doors:
        assert bool(doors.ports) == (port in ("tls", "sasl"))
        path = Path(str(doors.settings.get("cluster_secret_file", "absent")))
        if port == "secret":
            assert read_secrets(path).texts == (doors.secret.encode(),)
    assert not path.exists()


def test_every_mechanism_is_spoken() -> None:
    assert set(secured.MECHANISMS) >= {b"SCRAM-SHA-256", b"SCRAM-SHA-512", b"PLAIN"}
    for tokens in secured.MECHANISMS.values():
        assert all(list(tokens(Random(seed))) for seed in range(20))
