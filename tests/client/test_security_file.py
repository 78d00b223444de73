"""A client's file: TOML and Kafka's properties, and what is refused in one line."""

from __future__ import annotations

import base64
import pickle
import ssl
from contextlib import closing
from pathlib import Path
from urllib.parse import parse_qs, unquote_plus

import pytest
import trustme

from raftmq_client import AuthenticationError, Plain, Scram, UsageError
from raftmq_client.security_file import (
    ClientAccess,
    SecurityFile,
    WordError,
    read_access,
    read_security_file,
)
from tests.runtime.test_token_keys import Server

SECRET = "pass:w0rd = not; shown"


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def read(folder: Path, text: str, name: str = "client.toml") -> SecurityFile:
    return read_security_file(write(folder / name, text))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA, a certificate of it, and that with its key encrypted."""
    from cryptography.hazmat.primitives import serialization

    folder = tmp_path_factory.mktemp("certificates")
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued = ca.issue_cert("alice@example.org", common_name="alice")
    write(folder / "client.key", issued.private_key_pem.bytes().decode())
    (folder / "client.pem").write_bytes(b"".join(b.bytes() for b in issued.cert_chain_pems))
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(SECRET.encode()),
    )
    write(folder / "locked.key", locked.decode())
    return folder


def test_dotted_names_and_tables_of_toml_are_the_same(tmp_path: Path) -> None:
    write(tmp_path / "alice.txt", f"{SECRET}\nsecond line\n")
    dotted = (
        'bootstrap.servers = "h:1,h:2"\nsecurity.protocol = "SASL_PLAINTEXT"\n'
        'sasl.mechanism = "SCRAM-SHA-256"\nsasl.username = "alice"\n'
        'sasl.password_file = "alice.txt"\n'
    )
    tables = (
        'bootstrap = {servers = "h:1,h:2"}\n[security]\nprotocol = "sasl_plaintext"\n[sasl]\n'
        'mechanism = "SCRAM-SHA-256"\nusername = "alice"\npassword_file = "alice.txt"\n'
    )
    found = read(tmp_path, dotted)
    assert found == read(tmp_path, tables)
    assert found.bootstrap == "h:1,h:2"
    assert (found.access.username, found.access.password) == ("alice", SECRET)
    security = found.access.security()
    assert security is not None
    assert isinstance(security.sasl, Scram)
    assert security.sasl.mechanism == "SCRAM-SHA-256"
    assert security.tls is None
    assert SECRET not in repr(found)
    assert pickle.loads(pickle.dumps(found.access)) == found.access


def test_properties_are_read_as_kafkas_tools_read_them(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "# who we are\n"
        "! and so on\n"
        "\n"
        "  security.protocol = SASL_SSL\n"
        "sasl.mechanism:SCRAM-SHA-256\n"
        "sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule \\\n"
        '   required username="u" \\\n'
        '   password="p=1";\n'
        "ssl.truststore.type PEM\n"
        "ssl.truststore.certificates=-----BEGIN\\n\\u0041\\\\B\n"
        "ssl.endpoint.identification.algorithm=\n",
        "client.properties",
    ).access
    assert (found.username, found.password) == ("u", "p=1")
    assert found.mechanism == "SCRAM-SHA-256"
    assert found.tls is not None
    assert found.tls.authorities == "-----BEGIN\nA\\B"
    assert not found.tls.checks_host


def test_librdkafkas_words_are_those_of_kcat(tmp_path: Path, certificates: Path) -> None:
    found = read(
        tmp_path,
        "security.protocol=sasl_ssl\nsasl.mechanisms=PLAIN\nsasl.username=bob\n"
        f"sasl.password={SECRET}\nssl.ca.location={certificates}/ca.pem\n"
        f"ssl.certificate.location={certificates}/client.pem\n"
        f"ssl.key.location={certificates}/locked.key\nssl.key.password={SECRET}\n",
        "kcat.conf",
    )
    security = found.access.security()
    assert security is not None
    assert security.sasl == Plain("bob", SECRET)
    assert security.tls is not None
    assert len(security.tls.get_ca_certs()) == 1
    assert security.tls.verify_mode is ssl.CERT_REQUIRED
    assert security.tls.check_hostname


def test_paths_of_toml_begin_at_its_folder(tmp_path: Path, certificates: Path) -> None:
    for name in ("ca.pem", "client.pem", "client.key"):
        write(tmp_path / name, (certificates / name).read_text())
    found = read(
        tmp_path,
        'security.protocol = "SSL"\nssl.ca.location = "ca.pem"\n'
        'ssl.certificate.location = "client.pem"\nssl.key.location = "client.key"\n'
        'admin.token = " a-token-of-operators "\nadmin.ca.location = "ca.pem"\n'
        'admin.certificate.location = "client.pem"\nadmin.key.location = "client.key"\n',
    )
    assert found.access.tls is not None
    assert found.access.tls.chain_file == str(tmp_path / "client.pem")
    assert found.access.security() is not None
    assert found.admin.token == "a-token-of-operators"
    assert found.admin.context() is not None
    assert "a-token" not in repr(found)


BEARER = 'security.protocol = "SASL_SSL"\nsasl.mechanism = "OAUTHBEARER"\n'


def test_tokens_come_from_a_file_that_is_read_anew(tmp_path: Path) -> None:
    token = write(tmp_path / "token", "first.token\n")
    for said in ('token_file = "token"', f'token.endpoint.url = "file://{token}"'):
        access = read(tmp_path, f"{BEARER}sasl.oauthbearer.{said}\n").access
        assert access.tokens is not None
        bearer = access.tokens.bearer()
        assert bearer.prepare() == token.read_text().strip()
        token.write_text("second.token\n")
        assert bearer.prepare() == "second.token"
        assert isinstance(pickle.loads(pickle.dumps(access)), ClientAccess)
    token.unlink()
    with pytest.raises(AuthenticationError, match="token"):
        bearer.prepare()


@pytest.mark.parametrize("words", ["librdkafka", "java", "java 4.1"])
def test_tokens_come_from_a_server_for_a_secret(tmp_path: Path, words: str) -> None:
    with closing(Server()) as server:
        server.body = b'{"access_token": "a.token", "expires_in": 300}'
        server.headers = {"Location": f"http://127.0.0.1:{server.port}/elsewhere"}
        said = {
            "librdkafka": "sasl.oauthbearer.method=OIDC\nsasl.oauthbearer.client.id=a b\n"
            f"sasl.oauthbearer.client.secret={SECRET}\nsasl.oauthbearer.scope=kafka\n"
            "sasl.oauthbearer.extensions=logicalCluster=x, pool=y\n",
            "java": "sasl.jaas.config=org.OAuthBearerLoginModule required "
            f'clientId="a b" clientSecret="{SECRET}" scope="kafka" extension_pool="y" '
            'extension_logicalCluster="x";\n'
            "sasl.login.callback.handler.class="
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler\n",
            "java 4.1": "sasl.oauthbearer.client.credentials.client.id=a b\n"
            f"sasl.oauthbearer.client.credentials.client.secret={SECRET}\n"
            "sasl.oauthbearer.scope=kafka\n"
            "sasl.oauthbearer.extensions=pool=y,logicalCluster=x\n",
        }[words]
        url = f"sasl.oauthbearer.token.endpoint.url=http://127.0.0.1:{server.port}/token\n"
        head = "security.protocol=SASL_SSL\nsasl.mechanism=OAUTHBEARER\n"
        found = read(tmp_path, head + url + said, "client.properties")
        assert SECRET not in repr(found)
        tokens = found.access.tokens
        assert tokens is not None
        assert tokens.extensions == {"logicalCluster": "x", "pool": "y"}
        assert tokens.fetch() == "a.token"
        shown, form = server.told[0]
        name, secret = base64.b64decode(shown.removeprefix("Basic ")).decode().split(":")
        assert (unquote_plus(name), unquote_plus(secret)) == ("a b", SECRET)
        assert parse_qs(form) == {"grant_type": ["client_credentials"], "scope": ["kafka"]}
        for code, body, told in (
            (401, b"", "answers 401"),
            (302, b"", "it is somewhere else"),
            (200, b"no JSON", "no access_token"),
            (200, b'{"access_token": 7}', "no access_token"),
        ):
            server.code, server.body = code, body
            with pytest.raises(AuthenticationError, match=told) as caught:
                tokens.fetch()
            assert SECRET not in str(caught.value)
    with pytest.raises(AuthenticationError, match=r"127\.0"):
        tokens.fetch()


def test_a_secret_in_a_file_is_read_whenever_a_token_is_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "secret", "first\n")
    with closing(Server()) as server:
        server.body = b'{"access_token": "a.token"}'
        url = f"http://127.0.0.1:{server.port}/token"
        words = f'{BEARER}sasl.oauthbearer.token.endpoint.url = "{url}"\n'
        words += 'sasl.oauthbearer.client.id = "a"\nsasl.oauthbearer.client.secret_file = "secret"'
        access = read(tmp_path, words).access
        assert b"first" not in pickle.dumps(access)
        assert access.tokens is not None
        for secret in ("first", "second"):
            path.write_text(f"{secret}\n")
            assert access.tokens.fetch() == "a.token"
            shown, _ = server.told[-1]
            assert base64.b64decode(shown.removeprefix("Basic ")).decode() == f"a:{secret}"
        path.unlink()
        with pytest.raises(AuthenticationError, match="secret: No such file"):
            access.tokens.fetch()


def a_token() -> str:
    return "of.a.function"


def test_tokens_come_from_a_function_that_is_named() -> None:
    words = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER"}
    named = {"sasl.oauthbearer.token.provider": f"{__name__}:a_token"}
    tokens = read_access(words | named).tokens
    assert tokens is not None
    assert tokens.fetch() == tokens.bearer().prepare() == "of.a.function"
    for name in ("no.such:f", f"{__name__}:nothing"):
        tokens = read_access({**words, "sasl.oauthbearer.token.provider": name}).tokens
        assert tokens is not None
        with pytest.raises(UsageError, match=f"token.provider: {name}: "):
            tokens.bearer()
    with pytest.raises(WordError, match=r"is module:function, not 'os\.system'"):
        read_access({**words, "sasl.oauthbearer.token.provider": "os.system"})
    with pytest.raises(WordError, match="one of both"):
        read_access(words | named | {"sasl.oauthbearer.token_file": "t"})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            f'{BEARER}sasl.oauthbearer.token.provider = "m:f"',
            "'sasl.oauthbearer.token.provider' has no meaning here",
        ),
        (BEARER, "'sasl.oauthbearer.token_file' or sasl.oauthbearer.token.endpoint.url"),
        (
            f'{BEARER}sasl.oauthbearer.token.endpoint.url = "http://example.org/t"',
            "'sasl.oauthbearer.token.endpoint.url' must be https",
        ),
        (
            f'{BEARER}sasl.oauthbearer.token.endpoint.url = "https://example.org/t"',
            "'sasl.oauthbearer.client.id' is missing",
        ),
        (
            f'{BEARER}sasl.oauthbearer.token.endpoint.url = "file://elsewhere/t"',
            "is file:///PATH, or https",
        ),
        (f'{BEARER}sasl.username = "a"', "'sasl.username' contradicts"),
        (f'{BEARER}sasl.oauthbearer.method = "default"', "'sasl.oauthbearer.method' is oidc"),
        (f'{BEARER}sasl.login.callback.handler.class = "org.Mine"', "cannot run here"),
        (
            'security.protocol = "SASL_SSL"\nsasl.oauthbearer.token_file = "t"',
            "'sasl.oauthbearer.token_file' contradicts",
        ),
        ('sasl.usernam = "a"', "word 'sasl.usernam' has no meaning here; did you mean"),
        ('group.id = "a"', "word 'group.id' has no meaning here; known are admin.ca"),
        ("sasl.username = 5", "'sasl.username' is a text: write it in quotes"),
        ("sasl.username = a", "not TOML: Invalid value"),
        ('security.protocol = "TLS"', "'security.protocol' is one of PLAINTEXT, SSL"),
        ('sasl.username = "a"', "'sasl.username' contradicts security.protocol PLAINTEXT"),
        (
            'security.protocol = "SASL_SSL"\nsasl.mechanism = "GSSAPI"',
            "'sasl.mechanism' is one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER, not ",
        ),
        (
            'security.protocol = "SASL_SSL"\nsasl.mechanism = "PLAIN"\nsasl.username = "a"',
            "'sasl.password' is missing",
        ),
        (
            'security.protocol = "SASL_SSL"\nsasl.mechanism = "PLAIN"\nsasl.username = "a"\n'
            'sasl.password_file = "none.txt"',
            "none.txt: No such file or directory",
        ),
        (
            'security.protocol = "SASL_SSL"\nsasl.mechanism = "PLAIN"\nsasl.username = "a"\n'
            'sasl.password = "b"\nsasl.password_file = "none.txt"',
            "'sasl.password_file' says the same as 'sasl.password'",
        ),
        (
            'security.protocol = "SSL"\nssl.ca.location = "a"\nssl.truststore.location = "b"',
            "'ssl.ca.location' says the same as 'ssl.truststore.location'",
        ),
        (
            'security.protocol = "SSL"\nssl.truststore.location = "b.jks"',
            "'ssl.truststore.type' must be PEM",
        ),
        (
            'security.protocol = "SSL"\nssl.key.location = "b"',
            "'ssl.key.location' wants ssl.certificate.location",
        ),
        (
            'security.protocol = "SSL"\nssl.key.pem = "b"',
            "'ssl.keystore.certificate.chain' and 'ssl.keystore.key'",
        ),
        ('admin.key.location = "b"', "'admin.key.location' wants admin.certificate.location"),
        ('admin.certificate.location = "b"', "'admin.certificate.location' wants admin.ca"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text + "\n")
    message = str(caught.value)
    assert told in message
    assert message.startswith(f"{tmp_path / 'client.toml'}: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("security.protocol=SSL\ngroup.id=g\n", "line 2: 'group.id' has no meaning here"),
        ("security.protocol=SSL\n\nsecurity.protocol=SSL\n", "line 3: .* said twice"),
        ("=SSL\n", "line 1: not of the form"),
    ],
)
def test_nothing_of_properties_is_passed_over(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read(tmp_path, text, "client.properties")


@pytest.mark.parametrize("name", ["client.toml", "client.properties"])
def test_a_secret_that_everyone_may_read_is_refused(tmp_path: Path, name: str) -> None:
    words = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "a"}
    quote = '"' if name.endswith(".toml") else ""
    lines = "".join(f"{word} = {quote}{value}{quote}\n" for word, value in words.items())
    said = lines + f"sasl.password = {quote}{SECRET}{quote}\n"
    path = write(tmp_path / name, said, 0o644)
    with pytest.raises(UsageError, match=r"everyone may read it: chmod o-r"):
        read_security_file(path)
    path.chmod(0o640)
    assert read_security_file(path).access.password == SECRET

    secret = write(tmp_path / "a.txt", SECRET, 0o644)
    named = lines + f"sasl.password_file = {quote}{secret}{quote}\n"
    path = write(tmp_path / name, named, 0o644)  # no secret in it, but in the file that it names
    with pytest.raises(UsageError, match=r"a\.txt: everyone may read it"):
        read_security_file(path)
    secret.chmod(0o600)
    assert read_security_file(path).access.password == SECRET


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"ssl.ca.location": "none.pem"}, "none.pem: No such file or directory"),
        ({"ssl.ca.location": "text.pem"}, "text.pem: no certificate in PEM"),
        (
            {"ssl.certificate.location": "client.pem", "ssl.key.location": "other.key"},
            "other.key: it is not the key of the certificate",
        ),
        (
            {"ssl.certificate.location": "client.pem", "ssl.key.location": "locked.key"},
            "locked.key: it is encrypted; say in ssl.key.password with what",
        ),
        (
            {
                "ssl.certificate.location": "client.pem",
                "ssl.key.location": "locked.key",
                "ssl.key.password": "guess",
            },
            "locked.key: ssl.key.password does not open it",
        ),
        (
            {"ssl.certificate.location": "client.pem", "ssl.key.location": "open.key"},
            "open.key: everyone may read it: chmod o-r",
        ),
        (
            {"ssl.certificate.location": "none.pem", "ssl.key.location": "client.key"},
            "none.pem: No such file or directory",
        ),
    ],
)
def test_certificates_that_cannot_be_used_are_named(
    tmp_path: Path, certificates: Path, words: dict[str, str], told: str
) -> None:
    for name in ("ca.pem", "client.pem", "client.key", "locked.key"):
        write(tmp_path / name, (certificates / name).read_text())
    write(tmp_path / "text.pem", "no certificate")
    other = trustme.CA().issue_cert("b").private_key_pem.bytes().decode()
    write(tmp_path / "other.key", other)
    write(tmp_path / "open.key", (certificates / "client.key").read_text(), 0o644)
    said = {"security.protocol": "SSL", **words}
    text = "".join(f'{word} = "{value}"\n' for word, value in said.items())
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text).access.security()
    assert told in str(caught.value)
    assert "guess" not in str(caught.value)
