"""The issuer's keys: out of a file or by HTTP, anew when they are old or a token names others."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from raftmq.config import ConfigError, NodeConfig
from raftmq.runtime import token_keys
from raftmq.runtime.token_keys import AGAIN_S, KEYS_BYTES_MAX, UNKNOWN_KEY_S, TokenKeys
from raftmq.sasl.oauthbearer import InvalidTokenError
from tests.sasl.tokens import AUDIENCE, ISSUER, NOW_S, Issuer

REFRESH_S = 600.0


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class Server:
    """Answers each request with what is set; remembers what it was told, and by whom."""

    def __init__(self, context: Any = None) -> None:
        self.code, self.body, self.headers = 200, b"", {}
        self.asked = 0
        self.told: list[tuple[str, str]] = []
        self.is_asked, self.hold = threading.Event(), threading.Event()
        self.hold.set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked += 1
                if not outer.hold.is_set():
                    outer.is_asked.set()
                    outer.hold.wait(20)
                self.send_response(outer.code)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(outer.body)

            def do_POST(self) -> None:
                form = self.rfile.read(int(self.headers["Content-Length"])).decode()
                outer.told.append((self.headers["Authorization"], form))
                self.do_GET()

            def log_message(self, *_args: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


ISSUED = Issuer()
CLOCK = Clock()


def keys(**fields: Any) -> TokenKeys:
    own: dict[str, Any] = {
        "sasl_mechanisms": "OAUTHBEARER",
        "sasl_plain_without_tls": True,
        "oauth_issuer": ISSUER,
        "oauth_audience": AUDIENCE,
        "oauth_jwks_refresh_ms": int(REFRESH_S * 1e3),
        **fields,
    }
    return TokenKeys(
        NodeConfig(node_id=1, data=Path("d"), **own), now_s=CLOCK, wall_s=lambda: NOW_S
    )


def test_keys_out_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    path.write_bytes(ISSUED.jwks("rsa"))
    known = keys(oauth_jwks_file=path)
    assert known.verify(ISSUED.token()).user == "alice"
    with pytest.raises(InvalidTokenError, match="an unknown key"):
        known.verify(ISSUED.token(key_id="ec"))
    known.look(must_load=False)
    assert known.look(must_load=False) is None
    path.write_bytes(ISSUED.jwks())
    assert known.look(must_load=False) is True
    assert known.verify(ISSUED.token(key_id="ec")).user == "alice"
    path.write_bytes(b"{")
    with pytest.raises(ConfigError, match="key 'oauth_jwks_file': not a JWK set"):
        known.look(must_load=False)
    assert known.look(must_load=False) is None, "told once"
    assert known.verify(ISSUED.token()).user == "alice", "the old ones stay"


@pytest.mark.parametrize(("text", "told"), [(None, "No such file"), (b"x", "not a JWK set")])
def test_a_file_must_be_there_at_the_start(tmp_path: Path, text: bytes | None, told: str) -> None:
    if text is not None:
        (tmp_path / "jwks").write_bytes(text)
    with pytest.raises(ConfigError, match=told):
        keys(oauth_jwks_file=tmp_path / "jwks")


def test_keys_are_fetched_when_a_token_names_one(server: Server) -> None:
    server.body = ISSUED.jwks("rsa")
    known = keys(oauth_jwks_url=f"http://127.0.0.1:{server.port}/keys")
    assert server.asked == 0, "a start does not wait for it"
    assert known.verify(ISSUED.token()).user == "alice"
    assert known.verify(ISSUED.token()).user == "alice"
    assert server.asked == 1
    for _ in range(5):
        with pytest.raises(InvalidTokenError, match="an unknown key"):
            known.verify(ISSUED.token(key_id="ec"))
    assert server.asked == 1, "strangers do not have it fetched at will"
    server.body = ISSUED.jwks()
    CLOCK.now_s += UNKNOWN_KEY_S
    assert known.verify(ISSUED.token(key_id="ec")).user == "alice"
    assert server.asked == 2


def test_keys_are_fetched_when_they_are_old(server: Server) -> None:
    server.body = ISSUED.jwks("rsa")
    known = keys(oauth_jwks_url=f"http://127.0.0.1:{server.port}/keys")
    assert known.look(must_load=False) is True
    assert known.look(must_load=False) is None
    CLOCK.now_s += REFRESH_S - 1
    assert known.look(must_load=False) is None
    server.code = 500
    CLOCK.now_s += 1
    with pytest.raises(ConfigError, match=r"key 'oauth_jwks_url': http://.*: HTTP Error 500"):
        known.look(must_load=False)
    assert known.look(must_load=False) is None
    assert known.verify(ISSUED.token()).user == "alice", "the old ones stay"
    CLOCK.now_s += AGAIN_S - 1
    asked = server.asked
    for _ in range(3):
        with pytest.raises(InvalidTokenError):
            known.verify(ISSUED.token(key_id="ec"))
    assert server.asked == asked, "after a failure strangers wait for longer"
    CLOCK.now_s += 1
    with pytest.raises(InvalidTokenError):
        known.verify(ISSUED.token(key_id="ec"))
    assert server.asked == asked + 1
    server.code = 200
    CLOCK.now_s += AGAIN_S
    assert known.look(must_load=False) is True
    assert known.look(must_load=False) is None
    assert known.look(must_load=True) is True, "SIGHUP"


@pytest.mark.parametrize(
    ("code", "body", "headers", "told"),
    [
        (200, b"x" * (KEYS_BYTES_MAX + 1), {}, "more than"),
        (200, b"<html>", {}, "not a JWK set"),
        (302, b"", {"Location": "http://127.0.0.1:1/"}, "HTTP Error 302"),
        (404, b"", {}, "HTTP Error 404"),
    ],
)
def test_what_cannot_be_fetched(
    server: Server, code: int, body: bytes, headers: dict[str, str], told: str
) -> None:
    server.code, server.body, server.headers = code, body, headers
    known = keys(oauth_jwks_url=f"http://127.0.0.1:{server.port}/")
    with pytest.raises(ConfigError, match=told):
        known.look(must_load=False)
    with pytest.raises(InvalidTokenError, match="an unknown key"):
        known.verify(ISSUED.token())


def test_a_server_that_takes_too_long(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_keys, "FETCH_S", 0.0001)
    server.body = ISSUED.jwks()
    known = keys(oauth_jwks_url=f"http://127.0.0.1:{server.port}/")
    with pytest.raises(ConfigError, match=r"timed out|not within"):
        known.look(must_load=False)


def test_an_issuer_that_hangs_takes_one_worker(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another token with an unknown key gives up soon, one with a known key does not wait."""
    monkeypatch.setattr(token_keys, "WAIT_S", 0.01)
    server.body = ISSUED.jwks("rsa")
    known = keys(oauth_jwks_url=f"http://127.0.0.1:{server.port}/")
    known.look(must_load=True)
    CLOCK.now_s += UNKNOWN_KEY_S
    server.hold.clear()
    errors: list[str] = []

    def ask() -> None:
        with pytest.raises(InvalidTokenError) as caught:
            known.verify(ISSUED.token(key_id="ec"))
        errors.append(str(caught.value))

    first = threading.Thread(target=ask)
    first.start()
    server.is_asked.wait(20)
    ask()
    assert errors == ["an unknown key"]
    assert known.verify(ISSUED.token()).user == "alice"
    server.hold.set()
    first.join(20)
    assert errors == ["an unknown key"] * 2


def test_https_and_whom_it_is_trusted_by(tmp_path: Path) -> None:
    import ssl

    ours = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.issue_cert("127.0.0.1").configure_cert(context)
    ours.cert_pem.write_to_path(str(tmp_path / "ours.pem"))
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "theirs.pem"))
    server = Server(context)
    try:
        server.body = ISSUED.jwks()
        url = f"https://127.0.0.1:{server.port}/"
        known = keys(oauth_jwks_url=url, oauth_jwks_ca_file=tmp_path / "ours.pem")
        assert known.verify(ISSUED.token()).user == "alice"
        wrong = keys(oauth_jwks_url=url, oauth_jwks_ca_file=tmp_path / "theirs.pem")
        with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
            wrong.look(must_load=False)
    finally:
        server.close()
    (tmp_path / "none.pem").write_text("x")
    with pytest.raises(ConfigError, match="key 'oauth_jwks_ca_file'"):
        keys(oauth_jwks_url=url, oauth_jwks_ca_file=tmp_path / "none.pem")
