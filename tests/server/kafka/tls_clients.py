"""A port that speaks TLS, with certificates made for the test, and clients of it."""

from __future__ import annotations

import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import trio
import trustme
from attrs import define, frozen

from raftmq.config import Address, ClientListener
from raftmq.principals import read_mapping_rules
from raftmq.runtime.certificates import ServerTls, files_of
from raftmq.server.audit import Audit
from raftmq.server.kafka.connection import Begin
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.limits import Limits
from raftmq.server.kafka.listener import ClientPort, Listening, open_listen_socket
from tests.server.auditing import NO_AUDIT
from tests.server.kafka.ports import client_port

HOST = "127.0.0.1"
METADATA = 3


@cache
def authority(name: str = "ours") -> trustme.CA:
    """A CA, made once for all tests."""
    return trustme.CA(organization_name=name)


@frozen
class Files:
    """What a listener is given."""

    certificate: Path
    key: Path
    ca: Path

    @property
    def keys(self) -> dict[str, str]:
        """Of the table of a listener that shows the certificate."""
        return {"certificate_file": str(self.certificate), "key_file": str(self.key)}

    def listener(self, client_certificates: str = "off", **fields: Any) -> ClientListener:
        has_ca = client_certificates != "off"
        return ClientListener(
            name="SECURE",
            address=Address(HOST, 0),
            protocol="SSL",
            certificate_file=self.certificate,
            key_file=self.key,
            client_certificates=client_certificates,
            client_ca_file=self.ca if has_ca else None,
            **fields,
        )


def write_files(folder: Path, ca: trustme.CA | None = None, name: str = HOST) -> Files:
    """A certificate of that name, its key and its CA, as PEM."""
    ca = ca or authority()
    issued = ca.issue_cert(name)
    files = Files(folder / "node.pem", folder / "node.key", folder / "ca.pem")
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    files.key.write_bytes(issued.private_key_pem.bytes())
    files.key.chmod(0o600)
    ca.cert_pem.write_to_path(str(files.ca))
    return files


def client_context(
    certificate: trustme.LeafCert | None = None, *, ca: trustme.CA | None = None
) -> ssl.SSLContext:
    """Of a client that trusts the CA, and shows a certificate if it has one."""
    context = ssl.create_default_context()
    (ca or authority()).configure_trust(context)
    if certificate is not None:
        certificate.configure_cert(context)
    return context


@define
class Secure:
    """The port, and how to reach it."""

    port: ClientPort
    number: int
    metrics: ServerCounts

    async def plain(self) -> trio.SocketStream:
        """A connection on which no TLS was spoken yet."""
        return await trio.open_tcp_stream(HOST, self.number)

    async def connect(self, context: ssl.SSLContext | None = None) -> trio.SSLStream[Any]:
        """A client whose handshake is over."""
        plain = await self.plain()
        stream = trio.SSLStream(plain, context or client_context(), server_hostname=HOST)
        try:
            await stream.do_handshake()
        except BaseException:
            await trio.aclose_forcefully(plain)
            raise
        return stream

    async def ask(self, context: ssl.SSLContext | None = None) -> None:
        """Come, have one request answered, and go."""
        stream = await self.connect(context)
        try:
            await stream.send_all(request(1))
            assert await receive(stream, 8)
        finally:
            await trio.aclose_forcefully(stream)


@asynccontextmanager
async def secure_port(
    begin: Begin,
    listener: ClientListener,
    limits: Limits | None = None,
    *,
    pause: Callable[[float], Awaitable[None]] = trio.sleep,
    audit: Audit = NO_AUDIT,
) -> AsyncIterator[Secure]:
    metrics = ServerCounts()
    port = client_port(begin, limits or Limits(), metrics, pause=pause, audit=audit)
    sock = open_listen_socket(HOST, 0)
    async with trio.open_nursery() as nursery:
        mapper = read_mapping_rules(listener.principal_mapping_rules)
        tls = ServerTls("SECURE", files_of(listener))
        await nursery.start(port.serve, [Listening(sock, "SECURE", tls, mapper)])
        yield Secure(port, sock.getsockname()[1], metrics)
        nursery.cancel_scope.cancel()
    assert (port.connections, len(port.handshakes), port._hosts) == ({}, 0, {})
    assert port.shared.memory.bytes_used == 0, "every byte charged is given back"


def request(correlation_id: int, size: int = 32, api_key: int = METADATA) -> bytes:
    body = struct.pack(">hhi", api_key, 9, correlation_id)
    return struct.pack(">i", size) + body + bytes(size - len(body))


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that comes soon."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110 - nobody tells of it
            await trio.sleep(0.001)


async def receive(stream: trio.abc.ReceiveStream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = await stream.receive_some(size - len(data))
        assert piece, f"closed after {len(data)} of {size} bytes"
        data += piece
    return bytes(data)
