"""Lists of revoked certificates: who is refused, what cannot be used, and who is hung up on."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from attrs import evolve
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from raftmq.config import ConfigError
from raftmq.runtime import certificates
from raftmq.runtime.certificates import NONE_REVOKED, PemFiles, Revoked, ServerTls, load
from raftmq.runtime.peer_links import PeerLinks
from raftmq.runtime.peer_tls import load_peer_files, node_name
from raftmq.runtime.tls import PeerTlsSocket
from raftmq.tls import TlsLayer, TlsTrustError

DAY = datetime.timedelta(days=1)


def crl_of(ca: trustme.CA, *leaves: trustme.LeafCert, days: float = 1) -> bytes:
    """A CA's list of these, in PEM, good for so many days."""
    issuer = x509.load_pem_x509_certificate(ca.cert_pem.bytes())
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(issuer.subject)
        .last_update(now - 2 * DAY)
        .next_update(now + days * DAY)
    )
    for leaf in leaves:
        row = x509.RevokedCertificateBuilder().serial_number(parsed(leaf).serial_number)
        builder = builder.add_revoked_certificate(row.revocation_date(now - DAY).build())
    key = load_pem_private_key(ca.private_key_pem.bytes(), None)
    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)  # type: ignore[arg-type]


def parsed(leaf: trustme.LeafCert) -> x509.Certificate:
    return x509.load_pem_x509_certificate(leaf.cert_chain_pems[0].bytes())


def der(leaf: trustme.LeafCert) -> bytes:
    return parsed(leaf).public_bytes(Encoding.DER)


def revoked_of(certificate: bytes) -> Revoked:
    """What a list of this one (DER) says."""
    serial, _, issuer, *_ = certificates._fields(certificate)
    return Revoked(frozenset({(issuer, serial)}))


def files(folder: Path, ca: trustme.CA, leaf: trustme.LeafCert, crl: bytes) -> PemFiles:
    leaf.cert_chain_pems[0].write_to_path(str(folder / "pem"))
    leaf.private_key_pem.write_to_path(str(folder / "key"))
    (folder / "key").chmod(0o600)
    ca.cert_pem.write_to_path(str(folder / "ca"))
    (folder / "crl").write_bytes(crl)
    return PemFiles(
        names="key '{}':",
        certificate=folder / "pem",
        key=folder / "key",
        ca=folder / "ca",
        crl=folder / "crl",
        verify_mode=ssl.CERT_REQUIRED,
    )


def meet(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Make a handshake; raises what either side raises."""
    ends = TlsLayer(client), TlsLayer(server, is_server=True)
    while not all(end.is_ready for end in ends):
        for end, other in (ends, ends[::-1]):
            end.shake()
            for piece in end.outgoing():
                other.feed(piece)


def showing(leaf: trustme.LeafCert, version: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = version
    leaf.configure_cert(context)
    return context


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_who_shows_a_revoked_certificate_is_refused(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    ca = trustme.CA()
    mine, good, bad = (ca.issue_cert(f"{name}.example.org") for name in ("n1", "good", "bad"))
    loaded = load(files(tmp_path, ca, mine, crl_of(ca, bad)))
    meet(loaded.context, showing(good, version))
    with pytest.raises(TlsTrustError, match="revoked"):
        meet(loaded.context, showing(bad, version))
    assert loaded.revoked.has(der(bad))
    assert not loaded.revoked.has(der(good))
    assert not loaded.revoked.has(None)
    assert not NONE_REVOKED.has(der(bad))
    # Of the same number, and of another CA.
    other = trustme.CA()
    assert not loaded.revoked.has(der(other.issue_cert("bad.example.org")))


def test_a_list_of_two_cas_and_an_empty_one(tmp_path: Path) -> None:
    ca, other = trustme.CA(), trustme.CA()
    mine, bad, worse = ca.issue_cert("n1"), ca.issue_cert("b"), other.issue_cert("w")
    both = crl_of(ca, bad, days=3) + crl_of(other, worse, days=2)
    loaded = load(files(tmp_path, ca, mine, both))
    assert loaded.revoked.has(der(bad))
    assert loaded.revoked.has(der(worse))
    left_s = loaded.revoked.expires_s - datetime.datetime.now(datetime.UTC).timestamp()
    assert 1.9 * 86_400 < left_s < 2.1 * 86_400, "the first of them"
    empty = load(files(tmp_path, ca, mine, crl_of(ca)))
    assert empty.revoked.keys == frozenset()
    meet(empty.context, showing(bad, ssl.TLSVersion.TLSv1_3))


def test_whose_list_is_missing_or_forged_is_refused(tmp_path: Path) -> None:
    ca, other = trustme.CA(), trustme.CA()
    mine, good = ca.issue_cert("n1"), ca.issue_cert("good")
    loaded = load(files(tmp_path, ca, mine, crl_of(other)))
    with pytest.raises(TlsTrustError, match="CRL"):
        meet(loaded.context, showing(good, ssl.TLSVersion.TLSv1_3))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda _pem: b"", "no CRL in PEM"),
        (lambda pem: pem.replace(b"X509 CRL", b"CERTIFICATE"), "no CRL in PEM"),
        (lambda pem: b"\n".join([*pem.splitlines()[:2], b"-----END X509 CRL-----\n"]), "CRL"),
        (lambda _pem: b"\xff\xfe", "not a text file"),
    ],
    ids=["empty", "certificate", "cut", "bytes"],
)
def test_what_is_no_list_is_refused_by_its_key(tmp_path: Path, damage: object, why: str) -> None:
    ca = trustme.CA()
    pem = damage(crl_of(ca))  # type: ignore[operator]
    with pytest.raises(ConfigError, match=rf"key 'client_crl_file': .*crl: .*{why}"):
        load(files(tmp_path, ca, ca.issue_cert("n1"), pem))


def test_an_expired_list_is_not_loaded_and_the_old_one_stays(tmp_path: Path) -> None:
    ca = trustme.CA()
    mine, bad = ca.issue_cert("n1"), ca.issue_cert("bad")
    tls = ServerTls("CLIENTS", files(tmp_path, ca, mine, crl_of(ca, bad)))
    (tmp_path / "crl").write_bytes(crl_of(ca, days=-1))
    with pytest.raises(ConfigError, match="it has expired: publish a newer one"):
        tls.look(must_load=False)
    assert tls.revoked.has(der(bad))
    (tmp_path / "crl").write_bytes(crl_of(ca, days=9))
    loaded = tls.look(must_load=False)
    assert loaded is not None
    tls.take(loaded)
    assert not tls.revoked.has(der(bad)), "the list alone says it"


def test_nodes_refuse_one_whose_certificate_was_revoked_on_both_sides(tmp_path: Path) -> None:
    ca = trustme.CA()
    one, two = ca.issue_cert(node_name(1)), ca.issue_cert(node_name(2))
    folders = tmp_path / "1", tmp_path / "2"
    loaded = []
    for node_id, folder, leaf in zip((1, 2), folders, (one, two), strict=True):
        folder.mkdir()
        crl = crl_of(ca, two) if node_id == 1 else crl_of(ca)
        pem = evolve(
            files(folder, ca, leaf, crl), minimum_version=ssl.TLSVersion.TLSv1_3, crl_key="crl_file"
        )
        loaded.append(load_peer_files(pem, node_id))
    mine, theirs = loaded
    with pytest.raises(TlsTrustError, match="revoked"):
        meet(mine.context, theirs.dialling)
    with pytest.raises(TlsTrustError, match="revoked"):
        meet(theirs.context, mine.dialling)


def test_cas_and_lists_are_read_once_for_both_directions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a node whose file is replaced meanwhile trusts one thing and looks out for another."""
    ca = trustme.CA()
    one, two = ca.issue_cert(node_name(1)), ca.issue_cert(node_name(2))
    pem = files(tmp_path, ca, one, crl_of(ca, two))
    read = Path.read_text

    def read_and_spoil(path: Path, *how: Any, **named: Any) -> str:
        text = read(path, *how, **named)
        if path in (pem.ca, pem.crl):
            path.write_text("something else")
        return text

    monkeypatch.setattr(Path, "read_text", read_and_spoil)
    loaded = load_peer_files(pem, 1)
    assert loaded.revoked.has(der(two))
    for context in (loaded.context, loaded.dialling):
        assert context.verify_flags & ssl.VERIFY_CRL_CHECK_LEAF
        assert context.cert_store_stats() == {"x509": 1, "crl": 1, "x509_ca": 1}


def test_a_node_that_was_revoked_itself_says_so_at_its_start(tmp_path: Path) -> None:
    ca = trustme.CA()
    one = ca.issue_cert(node_name(1))
    with pytest.raises(ConfigError, match=r"peers would not trust it.*revoked"):
        load_peer_files(files(tmp_path, ca, one, crl_of(ca, one)), 1)


def test_streams_with_a_revoked_node_end_whoever_dialled_them() -> None:
    """Those of others stay, and those without a certificate."""
    ca = trustme.CA()
    one, two = ca.issue_cert(node_name(1)), ca.issue_cert(node_name(2))
    revoked = revoked_of(der(two))
    ended: list[str] = []

    def stream(name: str, certificate: bytes | None) -> Any:
        sock = None
        if certificate is not None:
            sock = PeerTlsSocket.__new__(PeerTlsSocket)
            sock._layer = SimpleNamespace(peer_certificate=certificate)  # type: ignore[assignment]
        return SimpleNamespace(sock=sock, end=lambda: ended.append(name))

    links: Any = PeerLinks.__new__(PeerLinks)
    vars(links).update(
        _streams={0: stream("to one", der(one)), 1: stream("to two", der(two))},
        _accepted={
            "bulk": [SimpleNamespace(back=stream("from two", der(two)))],
            "control": [SimpleNamespace(back=stream("not yet", None))],
        },
    )
    assert PeerLinks.end_revoked(links, certificates.NONE_REVOKED) == 0
    assert PeerLinks.end_revoked(links, revoked) == 2
    assert ended == ["to two", "from two"]
