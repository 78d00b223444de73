"""What is said at ports that are protected, before anybody is somebody: handshakes of TLS, messages
of SASL, and the proofs of a cluster's secret.

The grammar of TLS is written out here, since a library makes nothing that is wrong. What follows an
answer of the node (a nonce, the numbers of a stream) is made when it is there.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Final

from attrs import field, frozen

from jepsen_like.fuzz.peers import PeerFrameMaker
from jepsen_like.fuzz.spoil import Frame, Spot, spoiled
from jepsen_like.live.cluster import free_ports
from raftmq.protocol import ApiKey, encode_request_header
from raftmq.protocol.wire import long_varint
from raftmq.runtime.peer_proofs import NUMBER_BYTES, PROOF_BYTES, StreamProofs
from raftmq.runtime.peer_secret import GREETING, new_certificate

HANDSHAKE, ALERT, CHANGE, DATA = 22, 21, 20, 23
"""The kinds of records in TLS."""
USER: Final = "fuzz"
"""Who there is; its password nobody says."""
ANSWER_S: Final = 0.05
PROVED, HELLO = "proved", "hello"
"""Labels of what is sent at a port with a secret: after the right proof, and with a proof of its
own after it. All else is sent as it is."""
FINAL: Final = "final"
"""The label of a token with `NONCE` in it, which the node has to say first."""
NONCE: Final = b"{nonce}"
_SAID_NONCE: Final = re.compile(rb"r=([\x21-\x2b\x2d-\x7e]+),s=")


@frozen(slots=True)
class Doors:
    """How the protected ports of a run are set up.

    Attributes:
        settings: of the nodes.
        ports: those that are not known otherwise, by the names of runs.
    """

    settings: dict[str, object] = field(factory=dict)
    ports: dict[str, int] = field(factory=dict)
    secret: str = ""


@contextmanager
def open_doors(port: str) -> Iterator[Doors]:
    """What a run needs beside its nodes; gone at the end."""
    if port not in ("tls", "sasl", "secret"):
        yield Doors()
        return
    with TemporaryDirectory(prefix="raftmq-fuzz-") as name:
        folder = Path(name)
        text = secrets.token_hex(32) if port == "secret" else f"{USER}:{secrets.token_hex(16)}"
        file = folder / "secret"
        file.write_text(f"{text}\n")
        file.chmod(0o600)
        if port == "secret":
            settings = {"peer_tls": "required", "cluster_secret_file": str(file)}
            yield Doors(dict(settings), secret=text)
            return
        (number,) = free_ports(1)
        listener = {"address": f"127.0.0.1:{number}", "protocol": "SASL_PLAINTEXT"}
        extra: dict[str, object] = {
            "first_user_file": str(file),
            "sasl_mechanisms": "SCRAM-SHA-512,SCRAM-SHA-256,PLAIN",
            "sasl_plain_without_tls": "true",
            "sasl_failure_delay_ms": 5,
        }
        if port == "tls":
            pair = _certificate(folder)
            listener |= {"protocol": "SSL", "certificate_file": pair, "key_file": pair}
            extra = {}
        yield Doors({"listeners": json.dumps({"DOOR": listener}), **extra}, {port: number})


def _certificate(folder: Path) -> str:
    """A file with a certificate and its key."""
    pem, _ = new_certificate()
    file = folder / "node.pem"
    file.write_bytes(pem)
    file.chmod(0o600)
    return str(file)


# ---- TLS ----


@frozen(slots=True)
class HandshakeMaker:
    """Draws what a client says first at a port with TLS, and what should not follow."""

    random: Random

    def draw(self) -> list[Frame]:
        """The pieces that are sent on one connection."""
        random = self.random
        if random.random() < 0.1:
            return [random.choice((self._plain, self._bytes))()]
        hello = self._hello()
        frames = [spoiled(hello, random) if random.random() < 0.7 else hello]
        for _ in range(random.choice((0, 0, 1, 2, 4))):
            frames.append(spoiled(self._record(), random))
        if random.random() < 0.15:
            return [self._in_pieces(frame) for frame in frames]
        return frames

    def _plain(self) -> Frame:
        request = encode_request_header(ApiKey.API_VERSIONS, 0, 1, "fuzz")
        said = (
            struct.pack(">I", len(request)) + request,
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x80\x2e\x01",
        )
        return spoiled(Frame("plain", self.random.choice(said)), self.random)

    def _bytes(self) -> Frame:
        return Frame("bytes", self.random.randbytes(self.random.choice((1, 5, 700, 20_000))))

    def _in_pieces(self, frame: Frame) -> Frame:
        """The body of a record, in records of a few bytes each."""
        body, size = frame.data[5:2000], self.random.choice((1, 3, 100))
        pieces = (body[at : at + size] for at in range(0, len(body), size))
        return Frame(f"{frame.label} in pieces", b"".join(_record(HANDSHAKE, p) for p in pieces))

    def _record(self) -> Frame:
        random = self.random
        kind = random.choice((HANDSHAKE, ALERT, CHANGE, DATA, random.randrange(256)))
        body = random.choice(
            (
                b"\x01",
                b"\x02\x28",
                b"\x01\x00",
                b"\x18\x00\x00\x01\x01",
                b"\x14\x00\x00\x20" + bytes(32),
                b"\x0b\x00\x00\x04\x00\x00\x00\x00",
                random.randbytes(random.choice((0, 1, 17, 300, 16_400))),
            )
        )
        return Frame(f"record {kind}", _record(kind, body), (Spot(1, 3), Spot(3, 5)))

    def _hello(self) -> Frame:
        """A ClientHello of TLS 1.3 (RFC 8446, 4.1.2) that a node answers, unless it is spoiled."""
        random = self.random
        out, spots = bytearray(), []

        def sized(width: int, body: bytes) -> bytes:
            return len(body).to_bytes(width, "big") + body

        extensions = [
            (0x002B, sized(1, random.choice((b"\x03\x04", b"\x03\x04\x03\x03", b"\x03\x03")))),
            (0x000A, sized(2, b"\x00\x1d\x00\x17")),
            (0x000D, sized(2, b"\x04\x03\x08\x04\x04\x01\x08\x07")),
            (0x0033, sized(2, b"\x00\x1d" + sized(2, random.randbytes(32)))),
            (0x002D, b"\x01\x01"),
        ]
        if random.random() < 0.3:
            name = random.choice((b"n1.example.org", b"", b"a" * 300, b"\x00", b"127.0.0.1"))
            extensions.append((0x0000, sized(2, b"\x00" + sized(2, name))))
        if random.random() < 0.2:
            extensions.append((random.getrandbits(16), random.randbytes(random.randrange(40))))
        if random.random() < 0.1:  # a session that never was
            ticket = sized(2, random.randbytes(64)) + bytes(4)
            extensions.append((0x0029, sized(2, ticket) + sized(2, sized(1, random.randbytes(32)))))
        random.shuffle(extensions)
        out += b"\x03\x03" + random.randbytes(32) + sized(1, random.randbytes(32))
        out += sized(2, b"\x13\x01\x13\x02\x13\x03\xc0\x2b\xc0\x2f\x00\xff") + sized(1, b"\x00")
        at = len(out)
        spots.append(Spot(at, at + 2))
        body = bytearray()
        for kind, content in extensions:
            start = at + 2 + len(body)
            spots += [Spot(start, start + 2), Spot(start + 2, start + 4)]
            body += struct.pack(">H", kind) + sized(2, content)
        out += sized(2, bytes(body))
        head = 9  # of the record, and of the message in it
        moved = [Spot(spot.start + head, spot.end + head) for spot in spots]
        outer = [Spot(0, 1), Spot(1, 3), Spot(3, 5), Spot(6, 9), Spot(43, 44), Spot(76, 78)]
        message = b"\x01" + sized(3, bytes(out))
        return Frame("hello", _record(HANDSHAKE, message), (*outer, *moved))


def _record(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + b"\x03\x01" + struct.pack(">H", len(body) & 0xFFFF) + body


# ---- SASL ----


@frozen(slots=True)
class LoginMaker:
    """Draws how a client authenticates, or does not."""

    random: Random

    def draw(self) -> list[Frame]:
        """The requests of one connection. A token labelled `FINAL` becomes one once the node has
        answered (`login_pieces`)."""
        random = self.random
        mechanism = random.choice(tuple(MECHANISMS))
        frames = [self._handshake(mechanism)]
        if random.random() < 0.2:
            frames.insert(0, self._request(ApiKey.API_VERSIONS, 0, b""))
        tokens = MECHANISMS[random.choice((mechanism, mechanism, *MECHANISMS))]
        for label, token in tokens(random):
            whole = Frame(label, token)
            said = whole if random.random() < 0.4 else spoiled(whole, random)
            frames.append(Frame(FINAL, said.data) if label == FINAL else self._authenticate(said))
        if random.random() < 0.1:
            frames.append(self._request(ApiKey.METADATA, 1, b"\x00\x00\x00\x00"))
        return frames

    def _handshake(self, mechanism: bytes) -> Frame:
        random = self.random
        odd = random.choice((mechanism, b"", b"GSSAPI", b"scram-sha-512", b"\xff\xfe", b"X" * 3000))
        name = mechanism if random.random() < 0.85 else odd
        body = struct.pack(">h", len(name)) + name
        frame = Frame(f"handshake {mechanism.decode()}", body, (Spot(0, 2),))
        whole = spoiled(frame, random) if random.random() < 0.15 else frame
        return self._request(
            ApiKey.SASL_HANDSHAKE, random.choice((0, 1, 1, 1)), whole.data, whole.label
        )

    def _authenticate(self, token: Frame) -> Frame:
        return Frame(token.label, authenticate(token.data, self.random))

    def _request(self, api: ApiKey, version: int, body: bytes, label: str = "request") -> Frame:
        data = encode_request_header(api, version, self.random.getrandbits(31), "fuzz") + body
        return Frame(label, struct.pack(">I", len(data)) + data)


def authenticate(token: bytes, random: Random) -> bytes:
    """A request, or bare, as after the first version of the handshake."""
    if random.random() < 0.15:
        return struct.pack(">I", len(token)) + token
    version = random.choice((0, 1, 2))
    body = struct.pack(">i", len(token)) + token
    if version == 2:
        body = long_varint(len(token) + 1) + token + b"\x00"
    data = encode_request_header(ApiKey.SASL_AUTHENTICATE, version, 7, "fuzz") + body
    return struct.pack(">I", len(data)) + data


def _scram(random: Random) -> Iterator[tuple[str, bytes]]:
    header = random.choice(
        ("n,,", "n,,", "n,,", "y,,", "p=tls-unique,,", "n,a=root,", "n,a=,", ",")
    )
    name = random.choice((USER, USER, "nobody", "=2C=3D", "=", "a" * 3000, "é", "\x00", ""))
    nonce = random.choice(("rOprNGfwEbeRWgbNEkqO", "", "a" * 3000, ",", " ", "é"))
    more = random.choice(("", "", "", ",tokenauth=true", ",m=1", ",x=" + "y" * 2000, ",,"))
    yield "first", f"{header}n={name},r={nonce}{more}".encode()
    binding = random.choice((b"biws", b"biws", b"biws", b"", b"!!", base64.b64encode(b"y,,")))
    proof = base64.b64encode(random.randbytes(random.choice((0, 1, 32, 64, 64, 900))))
    tail = random.choice((b"", b"", b",e=other", b",p=AA=="))
    said = random.choice((NONCE, NONCE, NONCE, b"x" + NONCE, NONCE + b"x", b"mine"))
    yield FINAL, b"c=" + binding + b",r=" + said + b",p=" + proof + tail


def _plain(random: Random) -> Iterator[tuple[str, bytes]]:
    name = random.choice((USER.encode(), b"nobody", b"", b"a" * 300, b"\xff"))
    password = random.choice((b"guess", b"", b"p" * 9000, b"\xff\x00"))
    authzid = random.choice((b"", b"", name, b"root"))
    yield "plain", authzid + b"\0" + name + b"\0" + password


def _bearer(random: Random) -> Iterator[tuple[str, bytes]]:
    parts = [b'{"alg":"none"}', b'{"sub":"fuzz","exp":9999999999}', random.randbytes(32)]
    token = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    token = random.choice((token, token, b"", b"a.b", b"." * 200, token * 20))
    extensions = random.choice((b"", b"\x01a=b", b"\x01=", b"\x01" * 50))
    yield "bearer", b"n,a=fuzz,\x01auth=Bearer " + token + extensions + b"\x01\x01"
    yield "bearer again", b"\x01"


MECHANISMS: Final[dict[bytes, Callable[[Random], Iterator[tuple[str, bytes]]]]] = {
    b"SCRAM-SHA-512": _scram,
    b"SCRAM-SHA-256": _scram,
    b"PLAIN": _plain,
    b"OAUTHBEARER": _bearer,
}


def login_pieces(sock: socket.socket, frames: Sequence[Frame]) -> Iterator[bytes]:
    """What is sent, one after the other: before a last token the node's nonce is waited for."""
    random = Random(frames[-1].data)
    for frame in frames:
        if frame.label != FINAL:
            yield frame.data
            continue
        heard = b""
        sock.settimeout(ANSWER_S)
        with suppress(TimeoutError):
            while (found := _SAID_NONCE.search(heard)) is None and (piece := sock.recv(4096)):
                heard += piece
        found = _SAID_NONCE.search(heard)
        nonce = found[1] if found else b"none"
        yield authenticate(frame.data.replace(NONCE, nonce), random)


# ---- the secret of a cluster ----


@frozen(slots=True)
class ProofMaker:
    """Draws what is said at a peer port with a secret, within TLS."""

    peers: PeerFrameMaker
    random: Random

    def draw(self) -> list[Frame]:
        """Proofs that are none; or the right one, then hellos and frames."""
        random = self.random
        if random.random() < 0.4:
            whole = Frame("proof", random.randbytes(NUMBER_BYTES + PROOF_BYTES))
            said = random.choice((whole, spoiled(whole, random), Frame("proof of 0", bytes(64))))
            return [said, *(self.peers.draw() if random.random() < 0.3 else ())]
        hello, *frames = self.peers.draw()
        if random.random() < 0.2:  # not proved
            return [Frame(PROVED, hello.data), *frames]
        return [Frame(HELLO, hello.data), *frames]


def behind_tls(sock: socket.socket) -> tuple[ssl.SSLSocket, bytes, bytes]:
    """The connection, the certificate that the node shows (DER), and the number that it says."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    hidden = context.wrap_socket(sock)
    greeting = b""
    while len(greeting) < len(GREETING) + NUMBER_BYTES:
        if not (piece := hidden.recv(len(GREETING) + NUMBER_BYTES - len(greeting))):
            raise ConnectionAbortedError("no greeting of a node")
        greeting += piece
    return hidden, hidden.getpeercert(binary_form=True) or b"", greeting[len(GREETING) :]


def proved_pieces(
    certificate: bytes, number: bytes, secret: str, frames: Sequence[Frame]
) -> Iterator[bytes]:
    """What is sent: with the proofs of this connection where the first frame wants them."""
    first = frames[0]
    if first.label in (PROVED, HELLO):
        own = secrets.token_bytes(NUMBER_BYTES)
        proofs = StreamProofs(
            secret.encode(),
            dialled_number=number,
            dialling_number=own,
            certificate=certificate,
            is_dialling=True,
        )
        yield own + proofs.known()
        yield first.data + (proofs.said(first.data) if first.label == HELLO else b"")
    else:
        yield first.data
    for frame in frames[1:]:
        yield frame.data
