"""Who may do what at the admin port."""

from __future__ import annotations

import json
import socket
import ssl
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from attrs import field, frozen
from starlette.responses import Response
from structlog.testing import capture_logs

from raftmq.cli.admin_port import (
    ADMIN_CA_FILE,
    ADMIN_CLIENT_FILES,
    ADMIN_TOKEN,
    ADMIN_TOKEN_FILE,
    admin_request,
    open_page,
)
from raftmq.config import Address, ConfigError, NodeConfig
from raftmq.metadata.broker_messages import Way
from raftmq.rights import (
    CLUSTER_NAME,
    NO_RULES,
    Authorizer,
    Kind,
    Operation,
    Pattern,
    Permission,
    Rule,
)
from raftmq.runtime.certificates import PemFiles, ServerTls, admin_files, load
from raftmq.runtime.clock import RealClock
from raftmq.runtime.handshake import shake
from raftmq.server.admin.access import FOREIGN_HOST, NO_TOKEN, READ_ONLY, UNKNOWN_TOKEN, Access
from raftmq.server.admin.connections import OpenConnections, TlsStream
from raftmq.server.admin.http import _subject, checked, serve_admin
from raftmq.server.admin.pages import WAY, WHO
from raftmq.server.audit import Audit
from raftmq.server.kafka.listener import open_listen_socket
from raftmq.tls import TlsLayer
from tests.runtime.test_revocation import crl_of
from tests.server.admin.test_http import NoCluster, sources
from tests.server.auditing import Lines
from tests.server.kafka.tls_clients import authority, write_files

TOKEN = "0123456789abcdef"
HERE, ELSEWHERE = "127.0.0.1", "10.9.9.9"


def access(folder: Path, *, host: str = "127.0.0.1", token: str = TOKEN, **fields: Any) -> Access:
    if token:
        fields["admin_token_file"] = folder / "token"
        fields["admin_token_file"].write_text(token)
        fields["admin_token_file"].chmod(0o600)
    return Access(NodeConfig(node_id=1, data=folder, admin_listener=Address(host, 9292), **fields))


GUARDED: dict[str, Any] = {}
OPEN = {"token": ""}
READING = {"token": "", "host": "10.0.0.1"}
INSECURE = {"token": "", "host": "10.0.0.1", "insecure": True}
RIGHT = {"authorization": f"Bearer {TOKEN}", "host": "anything.example"}
WRONG = {"authorization": "Bearer 0123456789abcdeF"}


@pytest.mark.parametrize(
    ("port", "method", "path", "headers", "client", "refusal"),
    [
        (GUARDED, "POST", "/nodes/change", RIGHT, ELSEWHERE, None),
        (GUARDED, "POST", "/nodes/change", {}, HERE, NO_TOKEN),
        (GUARDED, "POST", "/nodes/change", WRONG, HERE, UNKNOWN_TOKEN),
        (GUARDED, "PUT", "/faults", {}, HERE, NO_TOKEN),
        (GUARDED, "DELETE", "/faults", {}, HERE, NO_TOKEN),
        (GUARDED, "GET", "/status", {}, HERE, None),
        (GUARDED, "GET", "/status", {}, "::1", None),
        (GUARDED, "GET", "/status", {}, "::ffff:127.0.0.1", None),
        (GUARDED, "GET", "/status", {}, ELSEWHERE, NO_TOKEN),
        (GUARDED, "GET", "/status", {}, "::ffff:10.9.9.9", NO_TOKEN),
        (GUARDED, "GET", "/status", {}, "", NO_TOKEN),
        (GUARDED, "GET", "/status", WRONG, HERE, UNKNOWN_TOKEN),
        (GUARDED, "GET", "/status", {"authorization": f"Basic {TOKEN}"}, HERE, UNKNOWN_TOKEN),
        (GUARDED, "GET", "/status", {"authorization": "Bearer "}, HERE, UNKNOWN_TOKEN),
        (GUARDED, "GET", "/health/ready", {"host": "balancer.example"}, ELSEWHERE, None),
        (OPEN, "POST", "/nodes/change", {}, HERE, None),
        (OPEN, "POST", "/nodes/change", WRONG, HERE, None),
        (OPEN, "POST", "/nodes/change", {"host": "evil.example:9292"}, HERE, FOREIGN_HOST),
        (OPEN, "GET", "/status", {"host": "evil.example"}, HERE, FOREIGN_HOST),
        (OPEN, "GET", "/status", {"host": "localhost:9292"}, HERE, None),
        (OPEN, "GET", "/status", {"host": "[::1]:9292"}, HERE, None),
        (OPEN, "GET", "/status", {"host": "192.168.0.7"}, HERE, None),
        (READING, "GET", "/status", {}, ELSEWHERE, None),
        (READING, "POST", "/nodes/change", {}, ELSEWHERE, READ_ONLY),
        (READING, "POST", "/nodes/change", {}, HERE, READ_ONLY),
        (READING, "TRACE", "/status", {}, HERE, READ_ONLY),
        (INSECURE, "POST", "/nodes/change", {}, ELSEWHERE, None),
    ],
)
def test_who_may(
    port: dict[str, Any],
    method: str,
    path: str,
    headers: dict[str, str],
    client: str,
    refusal: object,
    tmp_path: Path,
) -> None:
    said = {"host": "127.0.0.1:9292", **headers}
    assert access(tmp_path, **port).refusal(method, path, said, client) == refusal


def test_names_of_the_configuration_are_its_own(tmp_path: Path) -> None:
    rules = access(tmp_path, advertised_admin=Address("N1.example.org", 80))
    for host in ("n1.example.org", "N1.EXAMPLE.ORG:9292", ""):
        assert rules.refusal("GET", "/status", {"host": host}, HERE) is None


def test_a_token_is_replaced_by_way_of_two(tmp_path: Path) -> None:
    rules = access(tmp_path)
    path = tmp_path / "token"
    new = "f" * 32
    tokens = rules.tokens
    assert tokens is not None

    def known() -> list[bool]:
        headers = [{"authorization": f"Bearer {token}"} for token in (TOKEN, new)]
        return [rules.refusal("POST", "/balance", said, ELSEWHERE) is None for said in headers]

    assert tokens.look(must_load=False) is None
    for text, expected in ((f"{TOKEN}\n{new}\n", [True, True]), (f"\n  {new} \n", [False, True])):
        path.write_text(text)
        loaded = tokens.look(must_load=False)
        assert loaded is not None
        tokens.take(loaded)
        assert known() == expected
        assert TOKEN not in repr(loaded)
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="a token in each line, of 16 characters") as caught:
        tokens.look(must_load=False)
    assert "short" not in str(caught.value)
    assert tokens.look(must_load=False) is None, "told once"
    assert known() == [False, True]


@pytest.mark.parametrize(
    ("text", "mode", "told"),
    [
        (None, 0o600, "No such file"),
        ("", 0o600, "a token in each line"),
        (f"{TOKEN}\nx\n", 0o600, "a token in each line"),
        (TOKEN, 0o604, "everyone may read it"),
    ],
)
def test_a_file_that_cannot_be_used(text: str | None, mode: int, told: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=f"key 'admin_token_file': {path}: {told}"):
        Access(NodeConfig(node_id=1, data=tmp_path, admin_token_file=path))


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Of the command line; none is set."""
    for name in (ADMIN_TOKEN, ADMIN_TOKEN_FILE, ADMIN_CA_FILE, *ADMIN_CLIENT_FILES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def asked(address: str, body: object = None) -> int:
    """The status that the command line gets."""
    try:
        with open_page(admin_request(address, "/status" if body is None else "/balance", body), 10):
            return 200
    except urllib.error.HTTPError as error:
        with error:
            return error.code


class Shrinking(NoCluster):
    """Lets all topics shrink."""

    async def shrink(self, _wanted: Any, _asker: Any) -> dict[str, Any]:
        return {"code": "NONE", "message": ""}


async def test_the_command_line_at_a_port_with_tls(
    tmp_path: Path, variables: pytest.MonkeyPatch
) -> None:
    operators = trustme.CA()
    operators.cert_pem.write_to_path(str(tmp_path / "operators.pem"))
    issued = operators.issue_cert("operator.example.org")
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "me.pem"))
    issued.private_key_pem.write_to_path(str(tmp_path / "me.key"))
    files = write_files(tmp_path)
    config = NodeConfig(
        node_id=1,
        data=tmp_path,
        admin_certificate_file=files.certificate,
        admin_key_file=files.key,
        admin_client_ca_file=tmp_path / "operators.pem",
    )
    pem = admin_files(config)
    assert pem is not None
    lines = Lines()
    audit = Audit(lines, RealClock(), cluster="cluster", node=1)
    tls = ServerTls("admin_listener", pem)
    topics = Shrinking()
    shown = sources(access=Access(config), tls=tls, audit=audit, topics=topics)
    sock = open_listen_socket("127.0.0.1", 0)
    address = f"127.0.0.1:{sock.getsockname()[1]}"
    bugs: list[Exception] = []
    balance = {"dry_run": True, "no such key": 1}
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_admin, sock, shown, bugs.append)
            with pytest.raises(OSError, match=r"closed|reset"):
                await trio.to_thread.run_sync(asked, address)
            variables.setenv(ADMIN_CA_FILE, str(files.ca))
            assert await trio.to_thread.run_sync(asked, address) == 200
            assert await trio.to_thread.run_sync(asked, address, balance) == 401
            variables.setenv(ADMIN_CLIENT_FILES[0], str(tmp_path / "me.pem"))
            variables.setenv(ADMIN_CLIENT_FILES[1], str(tmp_path / "me.key"))
            assert await trio.to_thread.run_sync(asked, address, balance) == 400, "it was let in"
            assert [line["kind"] for line in lines.read] == ["denial", "administration"]
            shrink = {"topic": "t", "partitions": 1}
            page = admin_request(address, "/topics/shrink", shrink)
            with await trio.to_thread.run_sync(open_page, page, 10):
                pass
            (line,) = lines.read[2:]
            assert line["principal"].startswith("User:OU="), "its certificate's subject"
            assert (line["outcome"], line["request"]) == ("ok", "POST /topics/shrink")
            stranger = authority().issue_cert("operator.example.org")
            stranger.cert_chain_pems[0].write_to_path(str(tmp_path / "me.pem"))
            stranger.private_key_pem.write_to_path(str(tmp_path / "me.key"))
            with pytest.raises(OSError, match=r"(?i)unknown ca|closed|reset"):
                await trio.to_thread.run_sync(asked, address)
            nursery.cancel_scope.cancel()
    sock.close()
    assert bugs == []
    assert lines.read[-1]["mechanism"] == "certificate"
    assert lines.read[-1]["outcome"] == "failed"


@frozen
class Port:
    """A request's way in, without a socket."""

    access: Access
    authorizer: Authorizer | None
    asked: list[tuple[Any, Any]] = field(factory=list)
    denied: list[tuple[Kind, Operation]] = field(factory=list)
    lines: Lines = field(factory=Lines)

    async def ask(self, method: str, path: str, subject: str | None, token: str = "") -> int:
        """The status; 200 where it came to the page."""
        audit = Audit(self.lines, RealClock(), cluster="cluster", node=1)

        def denied(kind: Kind, operation: Operation) -> None:
            self.denied.append((kind, operation))

        async def page(scope: Any, _receive: Any, send: Any) -> None:
            self.asked.append((scope[WAY], scope[WHO].principal))
            await Response("")(scope, _receive, send)

        shown = sources(access=self.access, audit=audit, authorizer=self.authorizer, denied=denied)
        headers = [(b"host", b"10.0.0.1")]
        if token:
            headers.append((b"authorization", f"Bearer {token}".encode()))
        codes = []

        async def send(event: Any) -> None:
            codes.extend([event["status"]] if "status" in event else [])

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": headers,
            "client": ("10.0.0.9", 5_000),
        }
        held = _subject.set(subject)
        try:
            await checked(page, shown)(scope, None, send)
        finally:
            _subject.reset(held)
        return codes[0]


def with_rules(folder: Path, *operations: Operation, has_rules: bool = True) -> Port:
    path = folder / "tokens"
    path.write_text(TOKEN)
    path.chmod(0o600)
    certificate = {"admin_certificate_file": path, "admin_key_file": path}
    access = Access(
        NodeConfig(
            node_id=1,
            data=folder,
            admin_listener=Address("10.0.0.1", 9292),
            admin_token_file=path,
            admin_client_ca_file=path,
            **certificate,
        )
    )
    rules = NO_RULES.with_rules(
        Rule(Kind.CLUSTER, Pattern.LITERAL, CLUSTER_NAME, "User:CN=ops", "*", one, Permission.ALLOW)
        for one in operations
    )
    return Port(access, Authorizer(lambda: rules, ["User:CN=root"]) if has_rules else None)


@pytest.mark.parametrize(
    ("operations", "reads", "writes"),
    [((), 403, 403), ((Operation.DESCRIBE,), 200, 403), ((Operation.ALTER,), 200, 200)],
    ids=["none", "describe", "alter"],
)
async def test_a_certificate_has_the_rights_of_its_principal(
    tmp_path: Path, operations: tuple[Operation, ...], reads: int, writes: int
) -> None:
    port = with_rules(tmp_path, *operations)
    assert await port.ask("GET", "/nodes", "CN=ops") == reads
    assert await port.ask("POST", "/nodes/change", "CN=ops") == writes
    codes = {Operation.DESCRIBE: reads, Operation.ALTER: writes}
    refused = [operation for operation, code in codes.items() if code == 403]
    assert port.denied == [(Kind.CLUSTER, operation) for operation in refused]
    told = [(line["principal"], line["operation"], line["resource"]) for line in port.lines.read]
    resource = f"cluster:{CLUSTER_NAME}"
    assert told == [("User:CN=ops", str(operation), resource) for operation in refused]
    assert set(port.asked) <= {(Way.CLIENT, "User:CN=ops")}


async def test_what_needs_no_right_at_the_admin_port(tmp_path: Path) -> None:
    port = with_rules(tmp_path)
    assert await port.ask("POST", "/balance", "CN=root") == 200, "a super user"
    assert await port.ask("POST", "/balance", None, TOKEN) == 200
    assert await port.ask("POST", "/balance", "CN=ops", TOKEN) == 200, "the token is enough"
    assert await port.ask("GET", "/health", "CN=ops") == 200
    assert await port.ask("POST", "/balance", None) == 401
    assert [way for way, _ in port.asked] == [Way.CLIENT, *[Way.OPERATOR] * 3]
    free = with_rules(tmp_path, has_rules=False)
    assert await free.ask("POST", "/balance", "CN=ops") == 200, "rules are off"
    assert free.asked == [(Way.OPERATOR, "User:CN=ops")]


async def test_who_never_stops_sending_under_tls_leaves_the_loop_to_others(tmp_path: Path) -> None:
    """Each piece is there when it is asked for: time limits hold nevertheless."""
    files = write_files(tmp_path)
    server = TlsLayer(
        load(PemFiles(names="{}", certificate=files.certificate, key=files.key)).context,
        is_server=True,
    )
    trusting = ssl.create_default_context(cafile=files.ca)
    trusting.check_hostname = False
    client = TlsLayer(trusting)
    while not (server.is_ready and client.is_ready):
        for end, other in ((client, server), (server, client)):
            end.shake()
            for piece in end.outgoing():
                other.feed(piece)
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        stream = TlsStream(near, server)
        pieces = 0
        with trio.move_on_after(0) as limit:
            while pieces < 3:
                client.write([b"x"])
                far.sendall(b"".join(client.outgoing()))
                assert await stream.receive_some(1) == b"x"
                pieces += 1
        assert limit.cancelled_caught
        assert pieces < 3


@pytest.mark.parametrize(
    "key", ["admin_certificate_file", "admin_key_file", "admin_client_ca_file"]
)
def test_files_that_go_together(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"goes with admin_certificate_file"):
        NodeConfig(node_id=1, data=tmp_path, **{key: tmp_path / "x"})


async def test_a_refusal_at_the_port(tmp_path: Path) -> None:
    """Before the page is looked for; the connection goes on."""
    sock = open_listen_socket("127.0.0.1", 0)
    bugs: list[Exception] = []
    rules = access(tmp_path)
    lines = Lines()
    audit = Audit(lines, RealClock(), cluster="cluster", node=1)
    said = "POST /balance HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n%s\r\n{}"
    with capture_logs() as logged, trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            shown = sources(access=rules, audit=audit)
            nursery.start_soon(serve_admin, sock, shown, bugs.append)
            wrong = "Authorization: bearer " + TOKEN[::-1] + "\r\n"
            right = f"Authorization: bearer {TOKEN}\r\n"
            for more, code in (("", 401), (wrong, 401), (right, 415)):
                stream = await trio.open_tcp_stream(*sock.getsockname())
                async with stream:
                    await stream.send_all((said % more).encode())
                    head, _, body = (await stream.receive_some()).partition(b"\r\n\r\n")
                    while not body.endswith(b"}"):
                        body += await stream.receive_some()
                assert head.startswith(b"HTTP/1.1 %d " % code)
                if code == 401:
                    assert b"www-authenticate: bearer" in head.lower()
                    assert json.loads(body) == {
                        "error": (UNKNOWN_TOKEN if more else NO_TOKEN)[1],
                        "code": "CLUSTER_AUTHORIZATION_FAILED",
                    }
            nursery.cancel_scope.cancel()
    sock.close()
    assert bugs == []
    kinds = [(line["kind"], line["outcome"], line.get("principal")) for line in lines.read]
    assert kinds == [
        ("denial", "denied", None),
        ("authentication", "failed", None),
        ("administration", "failed", "token of the admin port"),
    ]
    assert TOKEN[::-1].encode() not in b"".join(lines.raw)
    assert [(line["event"], line["path"]) for line in logged] in (
        [("an admin request was refused", "/balance")],
        [],  # another test's line came within ten seconds
    )


class Operators:
    """A port with TLS whose operators show certificates, and the list of those that do no more."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        self.ca.cert_pem.write_to_path(str(folder / "operators.pem"))
        self.leaves = {name: self.ca.issue_cert(f"{name}.example.org") for name in ("alice", "bob")}
        self.revoke()
        self.files = write_files(folder)
        config = NodeConfig(
            node_id=1,
            data=folder,
            admin_certificate_file=self.files.certificate,
            admin_key_file=self.files.key,
            admin_client_ca_file=folder / "operators.pem",
            admin_client_crl_file=folder / "operators.crl",
        )
        pem = admin_files(config)
        assert pem is not None
        self.lines = Lines()
        audit = Audit(self.lines, RealClock(), cluster="cluster", node=1)
        self.tls = ServerTls("admin_listener", pem)
        self.connections = OpenConnections()
        self.waiting = trio.Event()
        self.dialled: list[trio.SSLStream[Any]] = []
        fields: dict[str, Any] = {"tls": self.tls, "connections": self.connections, "audit": audit}
        self.sources = sources(access=Access(config), status=self.status, **fields)
        self.sock = open_listen_socket("127.0.0.1", 0)

    async def status(self) -> dict[str, Any]:
        """A page that takes for ever."""
        self.waiting.set()
        await trio.sleep_forever()
        raise AssertionError("it never ends")

    def revoke(self, *names: str) -> None:
        """Publish a list of these."""
        crl = crl_of(self.ca, *[self.leaves[name] for name in names])
        (self.folder / "operators.crl").write_bytes(crl)

    def reload(self) -> int:
        """Load it, as a node does; how many connections end."""
        loaded = self.tls.look(must_load=True)
        assert loaded is not None
        self.tls.take(loaded)
        return self.connections.end_revoked(self.tls.revoked)

    async def dial(self, name: str) -> trio.SSLStream[Any]:
        """A connection by somebody's certificate, by none for ""."""
        context = ssl.create_default_context(cafile=self.files.ca)
        if name:
            self.leaves[name].configure_cert(context)
        plain = await trio.open_tcp_stream(*self.sock.getsockname())
        stream = trio.SSLStream(plain, context, server_hostname="127.0.0.1")
        self.dialled.append(stream)
        await stream.do_handshake()
        return stream

    async def close(self) -> None:
        """Close what was dialled, and the port."""
        for stream in self.dialled:
            await trio.aclose_forcefully(stream)
        self.sock.close()


async def asked_on(stream: trio.SSLStream[Any], path: str = "/health/live") -> bytes:
    """The first line of an answer, on a connection that goes on; nothing where it ended."""
    try:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        data = await stream.receive_some()
        while data and not data.endswith(b"}"):
            data += await stream.receive_some()
    except trio.BrokenResourceError:
        return b""
    return bytes(data.partition(b"\r\n")[0])


async def test_open_connections_end_when_their_certificate_is_revoked(tmp_path: Path) -> None:
    """Idle ones and those whose request is worked on; others go on."""
    port = Operators(tmp_path)
    bugs: list[Exception] = []
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_admin, port.sock, port.sources, bugs.append)
            streams = [await port.dial(name) for name in ("alice", "alice", "bob", "")]
            idle, busy, *others = streams
            for stream in streams:
                assert await asked_on(stream) == b"HTTP/1.1 200 "
            answers: list[bytes] = []

            async def ask_busy() -> None:
                answers.append(await asked_on(busy, "/status"))

            nursery.start_soon(ask_busy)
            await port.waiting.wait()
            assert port.reload() == 0, "nobody was revoked"
            port.revoke("alice")
            assert port.reload() == 2
            assert await asked_on(idle) == b""
            while not answers:
                await trio.lowlevel.checkpoint()
            assert answers == [b""]
            for stream in others:
                assert await asked_on(stream) == b"HTTP/1.1 200 "
            while len(port.connections) > len(others):
                await trio.lowlevel.checkpoint()
            assert port.reload() == 0, "they are gone"
            late = await port.dial("alice")  # of TLS 1.3 a client hears later
            with pytest.raises(trio.BrokenResourceError) as caught:
                await late.receive_some()
            assert "CERTIFICATE_REVOKED" in str(caught.value.__cause__)
            nursery.cancel_scope.cancel()
    await port.close()
    assert bugs == []


async def test_who_is_revoked_during_its_handshake_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = Operators(tmp_path)

    async def shake_late(*args: Any) -> TlsLayer:
        layer = await shake(*args)
        port.revoke("alice")
        assert port.reload() == 0, "it is none of the open ones yet"
        return layer

    monkeypatch.setattr("raftmq.server.admin.connections.shake", shake_late)
    bugs: list[Exception] = []
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve_admin, port.sock, port.sources, bugs.append)
            assert await asked_on(await port.dial("alice")) == b""
            assert await asked_on(await port.dial("bob")) == b"HTTP/1.1 200 "
            nursery.cancel_scope.cancel()
    await port.close()
    assert bugs == []
    (line,) = port.lines.read
    assert (line["mechanism"], line["outcome"]) == ("certificate", "failed")
    assert "revoked" in line["why"]


async def test_an_open_connection_loses_its_rights_with_its_token(tmp_path: Path) -> None:
    rules = access(tmp_path)
    tokens = rules.tokens
    assert tokens is not None
    sock = open_listen_socket("127.0.0.1", 0)
    bugs: list[Exception] = []
    head = "POST /topics/shrink HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = b'{"topic": "t", "partitions": 1}'
    head += f"Authorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"

    async def code_on(stream: trio.SocketStream) -> bytes:
        await stream.send_all(head.encode() + body)
        data = await stream.receive_some()
        while not data.endswith(b"}"):
            data += await stream.receive_some()
        return bytes(data.split()[1])

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            shown = sources(access=rules, topics=Shrinking())
            nursery.start_soon(serve_admin, sock, shown, bugs.append)
            async with await trio.open_tcp_stream(*sock.getsockname()) as stream:
                assert await code_on(stream) == b"200"
                (tmp_path / "token").write_text("f" * 32)
                loaded = tokens.look(must_load=False)
                assert loaded is not None
                tokens.take(loaded)
                assert await code_on(stream) == b"401", "on the same connection"
            nursery.cancel_scope.cancel()
    sock.close()
    assert bugs == []
