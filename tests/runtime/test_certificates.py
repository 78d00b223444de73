"""Files of certificates: loaded, refused by name, loaded again when they change; what they say."""

from __future__ import annotations

import os
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID as Oid

from raftmq.config import ConfigError
from raftmq.runtime.certificates import ServerTls, files_of, load, not_after, subject
from tests.server.kafka.tls_clients import Files, authority, write_files


def test_what_is_loaded_speaks_1_2_and_newer_and_keeps_no_sessions(tmp_path: Path) -> None:
    loaded = load(files_of(write_files(tmp_path).listener("required")))
    context = loaded.context
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.num_tickets == 0
    assert context.options & ssl.OP_NO_TICKET
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert (
        load(files_of(write_files(tmp_path).listener("wanted"))).context.verify_mode
        is ssl.CERT_OPTIONAL
    )
    assert load(files_of(write_files(tmp_path).listener())).context.verify_mode is ssl.CERT_NONE


def encrypt(files: Files, password: bytes) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password),
        )
    )


def test_a_key_may_be_encrypted(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    encrypt(files, b"a pass phrase")
    secret = tmp_path / "secret"
    secret.write_text("a pass phrase\n")
    assert load(files_of(files.listener(key_password_file=secret))).expires_s


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("no certificate file", "certificate_file {0}/node.pem: No such file or directory"),
        ("no key file", "key_file {0}/node.key: No such file or directory"),
        ("no ca file", "client_ca_file {0}/ca.pem: No such file or directory"),
        ("empty certificate", "certificate_file {0}/node.pem: no certificate in PEM"),
        ("bytes", "certificate_file {0}/node.pem: not a text file"),
        ("half a certificate", "certificate_file {0}/node.pem: no certificate in PEM"),
        ("empty key", "key_file {0}/node.key: no private key in PEM"),
        ("empty ca", "client_ca_file {0}/ca.pem: no certificate in PEM"),
        ("another key", "key_file {0}/node.key: it is not the key of the certificate"),
        ("encrypted key", "key_file {0}/node.key: it is encrypted; say in key_password_file"),
        ("wrong password", "key_file {0}/node.key: key_password_file does not open it"),
        ("no password", "key_password_file {0}/secret: No such file or directory"),
        ("open key", "key_file {0}/node.key: everyone may read it"),
    ],
)
def test_refusals_name_the_listener_the_key_and_the_file(
    tmp_path: Path, wrong: str, told: str
) -> None:
    files = write_files(tmp_path)
    fields: dict[str, Any] = {}
    secret = tmp_path / "secret"
    match wrong.split():
        case ["no", "password"]:
            fields["key_password_file"] = secret
        case ["no", what, _]:
            getattr(files, what).unlink()
        case ["empty", what]:
            getattr(files, what).write_text("")
        case ["bytes"]:
            files.certificate.write_bytes(b"\xff\xfe")
        case ["half", *_]:
            text = files.certificate.read_text().splitlines()
            files.certificate.write_text("\n".join([*text[:3], text[-1], ""]))
        case ["another", _]:
            files.key.write_bytes(authority().issue_cert("x").private_key_pem.bytes())
        case ["encrypted", _]:
            encrypt(files, b"secret")
        case ["wrong", _]:
            encrypt(files, b"secret")
            secret.write_text("another")
            fields["key_password_file"] = secret
        case _:
            files.key.chmod(0o644)
    with pytest.raises(ConfigError) as caught:
        load(files_of(files.listener("required", **fields)))
    text = str(caught.value)
    assert text.startswith("key 'listeners': SECURE: " + told.format(tmp_path))
    assert "another" not in text or wrong != "wrong password", "no secret is told"


# ---- files that change ----


def test_files_are_loaded_again_once_they_changed(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    tls = ServerTls("SECURE", files_of(files.listener()))
    before = tls.context
    assert tls.look(must_load=False) is None
    write_files(tmp_path)
    loaded = tls.look(must_load=False)
    assert loaded is not None
    assert tls.context is before, "taken on the loop, not in the thread that looks"
    tls.take(loaded)
    assert tls.context is loaded.context is not before
    assert tls.look(must_load=False) is None


def test_files_are_loaded_again_when_asked_to(tmp_path: Path) -> None:
    tls = ServerTls("SECURE", files_of(write_files(tmp_path).listener()))
    assert tls.look(must_load=True) is not None


def test_a_pair_that_is_replaced_one_after_the_other_replaces_nothing_in_between(
    tmp_path: Path,
) -> None:
    files = write_files(tmp_path)
    tls = ServerTls("SECURE", files_of(files.listener()))
    before = tls.context
    (tmp_path / "new").mkdir()
    new = write_files(tmp_path / "new")
    os.replace(new.certificate, files.certificate)
    with pytest.raises(ConfigError, match="not the key of the certificate"):
        tls.look(must_load=False)
    assert tls.look(must_load=False) is None, "told once"
    assert tls.context is before
    os.replace(new.key, files.key)
    assert tls.look(must_load=False) is not None


# ---- what stands in a certificate ----

KEY = ec.generate_private_key(ec.SECP256R1())
END = datetime(2031, 2, 3, 4, 5, 6)


def certificate(*names: list[tuple[x509.ObjectIdentifier, str]], end: datetime = END) -> bytes:
    name = x509.Name(
        x509.RelativeDistinguishedName([x509.NameAttribute(oid, text) for oid, text in part])
        for part in names
    )
    builder = x509.CertificateBuilder(name, name, KEY.public_key(), 7)
    builder = builder.not_valid_before(datetime(2020, 1, 1)).not_valid_after(end)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


@pytest.mark.parametrize(
    ("names", "java"),
    [
        (
            [
                [(Oid.COUNTRY_NAME, "AT")],
                [(Oid.ORGANIZATION_NAME, 'Ex, "quoted" + <a> = #1; back\\slash')],
                [(Oid.COMMON_NAME, " app ")],
            ],
            r"CN=\ app\ ,O=Ex\, \"quoted\" \+ \<a\> \= \#1\; back\\slash,C=AT",
        ),
        (
            [
                [(Oid.DOMAIN_COMPONENT, "example")],
                [(Oid.COMMON_NAME, "müller ünï"), (Oid.USER_ID, "u1")],
                [(Oid.EMAIL_ADDRESS, "a@b.c")],
                [(Oid.SERIAL_NUMBER, "77")],
            ],
            "2.5.4.5=#13023737,1.2.840.113549.1.9.1=#16056140622e63,"
            "UID=u1+CN=müller ünï,DC=example",
        ),
        (
            [
                [(Oid.STATE_OR_PROVINCE_NAME, "st")],
                [(Oid.LOCALITY_NAME, "l")],
                [(Oid.STREET_ADDRESS, "street 1")],
                [(Oid.ORGANIZATIONAL_UNIT_NAME, "#ou")],
                [(Oid.COMMON_NAME, "x#y  ")],
            ],
            r"CN=x\#y\ \ ,OU=\#ou,STREET=street 1,L=l,ST=st",
        ),
        (
            [[(Oid.TITLE, "boss")], [(Oid.COMMON_NAME, "   ")]],
            r"CN=\ \ \ ,2.5.4.12=#0c04626f7373",
        ),
        (
            [[(x509.ObjectIdentifier("1.3.6.1.4.1.55555.1"), "v" * 150)]],
            "1.3.6.1.4.1.55555.1=#0c8196" + "76" * 150,
        ),
    ],
    ids=["escapes", "numbers", "keywords", "spaces", "long"],
)
def test_a_subject_is_written_as_java_writes_it(
    names: list[list[tuple[x509.ObjectIdentifier, str]]], java: str
) -> None:
    """What `X500Principal.getName()` of OpenJDK 17 gave for these certificates."""
    assert subject(certificate(*names)) == java


@pytest.mark.parametrize("end", [END, datetime(2049, 12, 31), datetime(2050, 1, 1, 0, 0, 1)])
def test_the_end_of_validity_is_found(end: datetime) -> None:
    der = certificate([(Oid.COMMON_NAME, "a")], end=end)
    assert not_after(der) == end.replace(tzinfo=UTC).timestamp()


def test_the_first_end_of_a_chain_counts(tmp_path: Path) -> None:
    early, late = datetime(2030, 1, 1, tzinfo=UTC), datetime(2040, 1, 1, tzinfo=UTC)
    ca = trustme.CA()
    files = write_files(tmp_path)
    for first, second in ((early, late), (late, early)):
        issued = ca.issue_cert("a", not_after=first)
        other = ca.issue_cert("b", not_after=second).cert_chain_pems[0].bytes()
        files.certificate.write_bytes(issued.cert_chain_pems[0].bytes() + other)
        files.key.write_bytes(issued.private_key_pem.bytes())
        assert load(files_of(files.listener())).expires_s == early.timestamp()


@pytest.mark.parametrize("read", [not_after, subject])
def test_what_is_no_certificate_is_refused(read: Any) -> None:
    der = certificate([(Oid.COMMON_NAME, "a")])
    for end in range(0, len(der), 7):
        with pytest.raises((ValueError, IndexError)):
            read(der[:end])
