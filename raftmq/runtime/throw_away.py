"""A CA for a day, users and a token: what makes a local cluster a secured one, in one folder.

For `raftmq dev --secure` and for tests of services, never for a cluster that has to last: the CA's
key lies beside what it signs. Made once for each folder, so that clients' files stay valid when the
cluster starts again. Everything in it is for its owner alone.

`cryptography` is imported here when something is signed, and nowhere else.
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from raftmq.errors import RaftmqError
from raftmq.ports import DiskError, replace_file
from raftmq.runtime.disk import RealDisk

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

MODES: Final = ("scram", "mtls", "tls")
"""Passwords under TLS, certificates of clients, encryption alone."""
LISTENER: Final = "CLIENTS"
ADMIN: Final = "admin"
USER: Final = "alice"
MECHANISM: Final = "SCRAM-SHA-512"
INSTALL: Final = 'pip install "raftmq[secure]"'
_NAME: Final = re.compile(r"[\w-]{1,100}", re.ASCII)
_OWN: Final = re.compile(r"(peers-)?ca|(node|peer)-\d+|first-user")
_VALID: Final = timedelta(days=30)
_PASSWORD_BYTES: Final = 18


class NoCryptographyError(RaftmqError):
    """The library that signs certificates is not installed; the message says how it gets there."""


@frozen
class ThrowAwaySecurity:
    """The security of one local cluster: its folder and what clients need to come in."""

    folder: Path
    mode: str

    @classmethod
    def make(cls, folder: Path, mode: str, node_ids: Iterable[int]) -> ThrowAwaySecurity:
        """Make what is not there yet.

        Raises:
            NoCryptographyError: the extra is not installed.
            RaftmqError: the folder was made for another mode.
        """
        found = cls(folder, mode)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = folder / "mode"
        if kept.exists() and kept.read_text().strip() != mode:
            raise RaftmqError(f"{folder} was made for {kept.read_text().strip()}, not {mode}")
        for name in ("ca", "peers-ca"):
            if not (folder / f"{name}.key").exists():
                _make_ca(folder, name)
        for node_id in node_ids:
            found._issue(f"node-{node_id}", f"node-{node_id}", ["localhost", "127.0.0.1"])
            name = f"raftmq-node-{node_id}"
            found._issue(f"peer-{node_id}", name, [name], ca="peers-ca")
        if mode == "scram" and not (folder / "first-user").exists():
            _write(folder / "first-user", f"{ADMIN}:{secrets.token_urlsafe(_PASSWORD_BYTES)}\n")
        if not (folder / "admin.token").exists():
            _write(folder / "admin.token", f"{secrets.token_hex(32)}\n")
        for user in found.users:
            found.add_user(user)
        _write(kept, f"{mode}\n")
        return found

    @classmethod
    def of(cls, folder: Path) -> ThrowAwaySecurity | None:
        """What was made in a folder; None where nothing was."""
        kept = folder / "mode"
        return cls(folder, kept.read_text().strip()) if kept.exists() else None

    @property
    def users(self) -> tuple[str, ...]:
        """Who can log in at first; nobody where nobody is asked."""
        return () if self.mode == "tls" else (ADMIN, USER)

    @property
    def protocol(self) -> str:
        """Kafka's name of what is spoken."""
        return "SASL_SSL" if self.mode == "scram" else "SSL"

    @property
    def ca_file(self) -> Path:
        """Whom clients trust."""
        return self.folder / "ca.pem"

    @property
    def admin_token(self) -> str:
        """The token of admin ports."""
        return (self.folder / "admin.token").read_text().strip()

    def password(self, user: str) -> str:
        """A user's password; "" where there are none."""
        if self.mode != "scram":
            return ""
        if user == ADMIN:
            return (self.folder / "first-user").read_text().strip().partition(":")[2]
        return (self.folder / f"{user}.password").read_text().strip()

    def principal(self, user: str) -> str:
        """How rules call a user."""
        return f"User:CN={user}" if self.mode == "mtls" else f"User:{user}"

    def node_settings(self, node_id: int, address: str) -> dict[str, Any]:
        """Keys of a node's configuration, in place of `client_listener`."""
        listener = {
            "address": address,
            "protocol": self.protocol,
            "certificate_file": str(self.folder / f"node-{node_id}.pem"),
            "key_file": str(self.folder / f"node-{node_id}.key"),
        }
        if self.mode == "mtls":
            listener |= {"client_certificates": "required", "client_ca_file": str(self.ca_file)}
        settings: dict[str, Any] = {
            "listeners": {LISTENER: listener},
            "peer_tls": "required",
            "peer_certificate_file": str(self.folder / f"peer-{node_id}.pem"),
            "peer_key_file": str(self.folder / f"peer-{node_id}.key"),
            "peer_ca_file": str(self.folder / "peers-ca.pem"),
            "admin_token_file": str(self.folder / "admin.token"),
        }
        if self.users:
            settings |= {"authorizer": "acl", "super_users": [self.principal(ADMIN)]}
        if self.mode == "scram":
            settings |= {
                "sasl_mechanisms": "SCRAM-SHA-512,SCRAM-SHA-256,PLAIN",
                "first_user_file": str(self.folder / "first-user"),
            }
        return settings

    def add_user(self, user: str, *, is_expired: bool = False) -> None:
        """Make what a user shows: a password, or a certificate, which may have lapsed already. A
        cluster with passwords has to be told of the user, too.

        Raises:
            RaftmqError: nobody can be called that here: files are called so.
        """
        if not _NAME.fullmatch(user) or _OWN.fullmatch(user):
            raise RaftmqError(f"{user!r} is no name of a user here: letters, digits, - and _")
        if self.mode == "mtls":
            self._issue(user, user, [], valid=-timedelta(minutes=1) if is_expired else _VALID)
        elif self.mode == "scram" and user != ADMIN:
            path = self.folder / f"{user}.password"
            if not path.exists():
                _write(path, f"{secrets.token_urlsafe(_PASSWORD_BYTES)}\n")

    def files_of(self, user: str) -> list[Path]:
        """Whatever was written for a user."""
        ends = ("toml", "properties", "password", "pem", "key")
        return [self.folder / f"{user}.{end}" for end in ends]

    def write_client_files(self, user: str, bootstrap: str) -> None:
        """Write USER.toml for raftmq, with the admin port's token for the admin, and
        USER.properties for clients on librdkafka; what stood there is replaced."""
        words = {
            "bootstrap.servers": bootstrap,
            "security.protocol": self.protocol,
            "ssl.ca.location": str(self.ca_file),
        }
        if self.mode == "scram":
            words |= {
                "sasl.mechanism": MECHANISM,
                "sasl.username": user,
                "sasl.password": self.password(user),
            }
        elif self.mode == "mtls":
            words |= {
                "ssl.certificate.location": str(self.folder / f"{user}.pem"),
                "ssl.key.location": str(self.folder / f"{user}.key"),
            }
        # Below 2.6.1 librdkafka breaks SCRAM, and kcat of most systems is that old.
        plain = {**words, "sasl.mechanism": "PLAIN"} if self.mode == "scram" else words
        text = "".join(f"{word}={value}\n" for word, value in plain.items())
        _write(self.folder / f"{user}.properties", text)
        if user == ADMIN or not self.users:
            words["admin.token_file"] = str(self.folder / "admin.token")
        text = "".join(f"{word} = {toml_text(value)}\n" for word, value in words.items())
        _write(self.folder / f"{user}.toml", text)

    def _issue(
        self,
        file: str,
        name: str,
        hosts: Sequence[str],
        *,
        ca: str = "ca",
        valid: timedelta = _VALID,
    ) -> None:
        """Sign a certificate, unless there is one that has not lapsed."""
        path = self.folder / f"{file}.pem"
        if valid > timedelta() and path.exists() and _is_valid(path):
            return
        _issue(self.folder, ca, file, name, hosts, valid)


def toml_text(value: object) -> str:
    """A value as TOML: tables in one line, everything else as JSON writes it."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{json.dumps(k)} = {toml_text(v)}" for k, v in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_text, value))}]"
    return json.dumps(value)


def _write(path: Path, text: str) -> None:
    """Replace a file, readable by its owner alone from the first byte on, as all of this disk."""
    try:
        replace_file(RealDisk(), str(path.absolute()), text.encode())
    except DiskError as error:
        raise RaftmqError(str(error)) from error


# ---- certificates ----


def _is_valid(path: Path) -> bool:
    x509 = _x509()
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    left: timedelta = certificate.not_valid_after_utc - datetime.now(UTC)
    return left > timedelta(days=1)


def _x509() -> Any:
    try:
        from cryptography import x509
    except ModuleNotFoundError:
        raise NoCryptographyError(
            f"certificates are signed by the library cryptography: {INSTALL}"
        ) from None
    return x509


def _make_ca(folder: Path, name: str) -> None:
    x509 = _x509()
    key = _new_key()
    subject = _subject(f"raftmq throw-away {name} {secrets.token_hex(4)}")
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = (
        _builder(subject, subject, key, 10 * _VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    _write_pair(folder, name, builder, key, key)


def _issue(
    folder: Path, ca: str, file: str, name: str, hosts: Sequence[str], valid: timedelta
) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    x509 = _x509()
    authority = x509.load_pem_x509_certificate((folder / f"{ca}.pem").read_bytes())
    ca_key: Any = load_pem_private_key((folder / f"{ca}.key").read_bytes(), None)
    key = _new_key()
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    uses = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    builder = (
        _builder(_subject(name), authority.subject, key, valid)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(issuer, critical=False)
    )
    if hosts:
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    _write_pair(folder, file, builder, key, ca_key)


def _host(host: str) -> Any:
    x509 = _x509()
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _subject(name: str) -> Any:
    x509 = _x509()
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _builder(subject: Any, issuer: Any, key: EllipticCurvePrivateKey, valid: timedelta) -> Any:
    """A certificate without extensions, valid from a day before it ends or begins."""
    x509 = _x509()
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + valid) - timedelta(days=1))
        .not_valid_after(now + valid)
    )


def _write_pair(
    folder: Path,
    name: str,
    builder: x509.CertificateBuilder,
    key: EllipticCurvePrivateKey,
    signed_by: EllipticCurvePrivateKey,
) -> None:
    from cryptography.hazmat.primitives import hashes, serialization

    certificate = builder.sign(signed_by, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    _write(folder / f"{name}.key", private.decode())
    _write(folder / f"{name}.pem", certificate.public_bytes(serialization.Encoding.PEM).decode())
