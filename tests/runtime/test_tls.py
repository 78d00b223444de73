"""TLS over a non-blocking socket: what a hostile other side costs."""

from __future__ import annotations

import hmac
import select
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from raftmq.runtime import tls
from raftmq.runtime.certificates import PemFiles, load
from raftmq.runtime.tls import EMPTY_BYTES_MAX, READS_MAX, STAGE_BYTES, TlsSocket
from raftmq.tls import TlsLayer
from tests.server.kafka.tls_clients import write_files

NEW_KEY = bytes.fromhex("18 000001 00 16")  # KeyUpdate, not asking for one; the record's kind
ASKING = bytes.fromhex("18 000001 01 16")


def expanded(secret: bytes, label: str, size: int) -> bytes:
    """HKDF-Expand-Label of RFC 8446, 7.1, with SHA-384."""
    name = b"tls13 " + label.encode()
    info = size.to_bytes(2, "big") + bytes([len(name)]) + name + b"\0"
    return hmac.digest(secret, info + b"\1", "sha384")[:size]


def new_keys(secret: bytes, *contents: bytes) -> Iterator[bytes]:
    """Records with these contents, the last of which says that the next one has another key."""
    while True:
        key, nonce = expanded(secret, "key", 32), expanded(secret, "iv", 12)
        for number, content in enumerate(contents):
            head = bytes.fromhex("17 0303") + (len(content) + 16).to_bytes(2, "big")
            yield head + AESGCM(key).encrypt(
                nonce[:-1] + bytes([nonce[-1] ^ number]), content, head
            )
        secret = expanded(secret, "traffic upd", 48)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[TlsSocket, socket.socket, TlsLayer, bytes]]:
    """A connection's server; the other side's socket, its TLS and its secret."""
    files = write_files(tmp_path)
    pem = PemFiles(names="{}", certificate=files.certificate, key=files.key)
    server = TlsLayer(load(pem).context, is_server=True)
    trusting = ssl.create_default_context(cafile=files.ca)
    trusting.check_hostname = False
    trusting.keylog_filename = str(tmp_path / "keys")
    client = TlsLayer(trusting)
    while not (server.is_ready and client.is_ready):
        for end, other in ((client, server), (server, client)):
            end.shake()
            for piece in end.outgoing():
                other.feed(piece)
    lines = [line.split() for line in (tmp_path / "keys").read_text().splitlines()]
    (secret,) = [bytes.fromhex(line[2]) for line in lines if line[0] == "CLIENT_TRAFFIC_SECRET_0"]
    near, far = socket.socketpair()
    with near, far:
        for sock in (near, far):
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        yield TlsSocket(near, server), far, client, secret


def test_who_sends_new_keys_without_end_is_hung_up_on(
    ends: tuple[TlsSocket, socket.socket, TlsLayer, bytes],
) -> None:
    """One receive went on for as long as they came, tens of microseconds for each 27 bytes."""
    near, far, _, secret = ends
    keys = new_keys(secret, NEW_KEY)
    buffer = memoryview(bytearray(100))
    assert far.send(next(keys) + next(keys)) > 0
    with pytest.raises(BlockingIOError):
        near.recv_into(buffer)
    flood = b"".join(next(keys) for _ in range(EMPTY_BYTES_MAX // 27 + 1))
    assert far.send(flood) == len(flood)
    with pytest.raises(ConnectionAbortedError, match="new keys"):
        near.recv_into(buffer)


def test_small_records_may_come_without_end(
    ends: tuple[TlsSocket, socket.socket, TlsLayer, bytes],
) -> None:
    """Most of their ciphertext is no plaintext; a large record may come in part."""
    near, far, client, _ = ends
    buffer = memoryview(bytearray(1000))
    for _ in range(3):
        for _ in range(3000):
            client.write([b"x"])
        small = b"".join(client.outgoing())
        client.write([bytes(16 << 10)])
        (large,) = map(bytes, client.outgoing())
        assert len(small) > EMPTY_BYTES_MAX
        assert far.send(small + large[:-1]) == len(small) + len(large) - 1
        assert [near.recv_into(buffer) for _ in range(3)] == [1000] * 3
        with pytest.raises(BlockingIOError):
            near.recv_into(buffer)
        far.send(large[-1:])
        assert sum(near.recv_into(buffer) for _ in range(17)) == 16 << 10


def test_one_receive_does_not_decrypt_small_records_without_end(
    ends: tuple[TlsSocket, socket.socket, TlsLayer, bytes],
) -> None:
    """What it leaves is with the kernel, so an epoll tells of it."""
    near, far, client, _ = ends
    said = bytes(i % 251 for i in range(12_000))
    for i in range(len(said)):
        client.write([said[i : i + 1]])
    hidden = b"".join(client.outgoing())
    assert far.send(hidden) == len(hidden)
    heard, buffer = bytearray(), memoryview(bytearray(64 << 10))
    while len(heard) < len(said):
        assert select.select([near], [], [], 0)[0] == [near]
        count = near.recv_into(buffer)
        assert count <= READS_MAX + STAGE_BYTES // 23
        assert not near.has_unread
        heard += buffer[:count]
    assert heard == said
    assert select.select([near], [], [], 0)[0] == []


def test_who_asks_for_new_keys_and_does_not_take_them_is_hung_up_on(
    ends: tuple[TlsSocket, socket.socket, TlsLayer, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records bring plaintext, so it may ask; each answer took 27 bytes of memory for good."""
    monkeypatch.setattr(tls, "ANSWER_BYTES_MAX", 32 << 10)
    near, far, _, secret = ends
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    records = new_keys(secret, b"x\x17", ASKING)
    buffer = memoryview(bytearray(64 << 10))

    def ask(times: int) -> None:
        for _ in range(times):
            data = b"".join(next(records) for _ in range(500))
            assert far.send(data) == len(data)
            assert near.recv_into(buffer) == 250

    ask(1)
    with pytest.raises(ConnectionAbortedError, match="does not take them"):
        ask(20)
