"""What a port with TLS shows and whom it trusts: PEM files become a context, anew when they change.

A context is replaced as a whole, so new connections are made by the new one and those that are open
go on as they are. What cannot be loaded replaces nothing: a pair of files is often replaced one
after the other. Every refusal names its key and its file, and never says what is in it.

Reads of a certificate only what is to be known beside OpenSSL's verdict: until when it is valid,
and its subject as Java writes it. Only files of operators come here, and what OpenSSL verified.
"""

from __future__ import annotations

import os
import re
import ssl
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from time import time
from typing import Final, Generic, Protocol, TypeVar

from attrs import frozen

from raftmq.config import ClientListener, ConfigError, NodeConfig
from raftmq.secret_file import SecretFileError, check_private
from raftmq.tls import key_trouble

_CRL: Final = re.compile(r"-----BEGIN X509 CRL-----\r?\n(.+?)-----END X509 CRL-----", re.DOTALL)
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----\r?\n.+?-----END CERTIFICATE-----", re.DOTALL)
_VERIFY: Final = {
    "off": ssl.CERT_NONE,
    "wanted": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
T = TypeVar("T")
FileMark = tuple[int, int, int]
"""Inode, size and time of change of a file."""
Mark = tuple[FileMark, ...]
"""Those of each file of a port."""
NO_FILE: Final = 0, 0, 0


@frozen(slots=True, kw_only=True)
class PemFiles:
    """The files of one port.

    Attributes:
        names: how refusals name a key of them, with its own name at `{}`.
        ca_key: the key of `ca`.
        crl: certificates of those CAs that are good no more.
        crl_key: the key of `crl`.
        verify_mode: whether the other side has to show a certificate.
        minimum_version: of TLS.
    """

    names: str
    certificate: Path
    key: Path
    key_password: Path | None = None
    ca: Path | None = None
    ca_key: str = "client_ca_file"
    crl: Path | None = None
    crl_key: str = "client_crl_file"
    verify_mode: ssl.VerifyMode = ssl.CERT_NONE
    minimum_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2


def files_of(listener: ClientListener) -> PemFiles:
    """The files of a listener for clients, whose configuration was checked."""
    assert listener.certificate_file is not None, "checked with the configuration"
    assert listener.key_file is not None, "checked with the configuration"
    return PemFiles(
        names=f"key 'listeners': {listener.name}: {{}}",
        certificate=listener.certificate_file,
        key=listener.key_file,
        key_password=listener.key_password_file,
        ca=listener.client_ca_file,
        crl=listener.client_crl_file,
        verify_mode=_VERIFY[listener.client_certificates],
    )


def admin_files(config: NodeConfig) -> PemFiles | None:
    """The files of the admin port; None where it speaks plain HTTP."""
    if config.admin_certificate_file is None or config.admin_key_file is None:
        return None
    has_ca = config.admin_client_ca_file is not None
    return PemFiles(
        names="key 'admin_{}':",
        certificate=config.admin_certificate_file,
        key=config.admin_key_file,
        ca=config.admin_client_ca_file,
        crl=config.admin_client_crl_file,
        verify_mode=_VERIFY["wanted" if has_ca else "off"],
    )


@frozen(slots=True)
class Revoked:
    """Certificates that are good no more.

    Attributes:
        keys: issuer and serial number of each, as they are encoded.
        expires_s: when the first of the lists has to be replaced, in Unix time; infinite for never.
    """

    keys: frozenset[tuple[bytes, bytes]] = frozenset()
    expires_s: float = inf

    def has(self, certificate: bytes | None) -> bool:
        """True of a certificate (DER) that is in one of the lists."""
        if not self.keys or certificate is None:
            return False
        serial, _, issuer, *_ = _fields(certificate)
        return (issuer, serial) in self.keys


NONE_REVOKED: Final = Revoked()


@frozen(slots=True)
class Certificates:
    """What was loaded of a port's files.

    Attributes:
        context: for new connections, as the server of them.
        expires_s: when the first certificate of the node's chain ceases to be valid, in Unix time.
        mark: of the files, as they were before they were read.
        revoked: what the other side may show no more.
    """

    context: ssl.SSLContext
    expires_s: float
    mark: Mark
    revoked: Revoked


class Marked(Protocol):
    """What was read of files."""

    @property
    def mark(self) -> Mark:
        """Of the files, as they were before they were read."""
        ...


M = TypeVar("M", bound=Marked)


class Watched(Generic[M]):
    """Files of one port as they were loaded last; loaded anew when they change."""

    def __init__(self, name: str, load_now: Callable[[], M], mark_now: Callable[[], Mark]) -> None:
        """Load them.

        Args:
            name: of the port, in the log and in metrics.

        Raises:
            ConfigError: a file cannot be used.
        """
        self.name = name
        self._load_now = load_now
        self._mark_now = mark_now
        self.loaded = load_now()
        self._failed: Mark = ()

    def look(self, *, must_load: bool) -> M | None:
        """Load the files if they changed, or in any case; None where nothing has to be done. In a
        worker thread: a disk may be slow, a key long.

        Raises:
            ConfigError: a file cannot be used; told once for each state of the files.
        """
        mark = self._mark_now()
        if not must_load and mark in (self.loaded.mark, self._failed):
            return None
        self._failed = mark
        return self._load_now()

    def take(self, loaded: M) -> None:
        """Use these from now on."""
        self.loaded = loaded
        self._failed = ()


class ServerTls(Watched[Certificates]):
    """The certificates of one port, as they were loaded last."""

    def __init__(self, name: str, files: PemFiles) -> None:
        """Load them.

        Args:
            name: of the port, in the log and in metrics.

        Raises:
            ConfigError: a file cannot be used.
        """
        self.files = files
        super().__init__(name, self._load, lambda: _mark(files))

    @property
    def context(self) -> ssl.SSLContext:
        """For a connection that begins now."""
        return self.loaded.context

    @property
    def revoked(self) -> Revoked:
        """What the other side may show no more."""
        return self.loaded.revoked

    @property
    def expires_s(self) -> float:
        """When the first certificate of the chain ceases to be valid, in Unix time."""
        return self.loaded.expires_s

    def _load(self) -> Certificates:
        return load(self.files)


def load(files: PemFiles, *others: ssl.SSLContext) -> Certificates:
    """Read a port's files.

    Args:
        others: contexts of the same port that are to trust the same.

    Raises:
        ConfigError: one cannot be used; it names the key and the file.
    """
    mark = _mark(files)
    context = new_server_context()
    expires_s = show(context, files)
    revoked = _trust([context, *others], files)
    return Certificates(context, expires_s, mark, revoked)


def new_server_context() -> ssl.SSLContext:
    """For the dialled side of connections; it shows nothing yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # What a session would save is a handshake in a worker, for connections that last for hours;
    # and a resumed one would not be asked again for a certificate that was withdrawn.
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.num_tickets = 0
    return context


def show(context: ssl.SSLContext, files: PemFiles) -> float:
    """Let a context show the certificate of these files; until when it is valid, in Unix time.

    Raises:
        ConfigError: as `load`.
    """
    certificate, key = files.certificate, files.key
    context.minimum_version = files.minimum_version
    text = _text(files, "certificate_file", certificate)
    try:
        check_private(key)
    except SecretFileError as error:
        raise _refusal(files, "key_file", key, str(error)) from None
    try:
        expires_s = min(not_after(der) for der in _certificates(text))
    except (ValueError, IndexError):
        raise _refusal(files, "certificate_file", certificate, "no certificate in PEM") from None
    is_encrypted = "ENCRYPTED" in _text(files, "key_file", key)
    password = ""  # never asked for on a terminal, which OpenSSL would do by itself
    if files.key_password is not None:
        password = _text(files, "key_password_file", files.key_password)
    try:
        context.load_cert_chain(certificate, key, password.rstrip("\r\n"))
    except ssl.SSLError as error:
        why = key_trouble(error, "key_password_file", is_encrypted, bool(password))
        raise _refusal(files, "key_file", key, f"{why} (certificate: {certificate})") from None
    except OSError as error:
        raise _refusal(files, "key_file", key, error.strerror or str(error)) from None
    return expires_s


def _trust(contexts: Sequence[ssl.SSLContext], files: PemFiles) -> Revoked:
    """Let contexts trust the CAs of these files, less the certificates that they revoked. Each file
    is read once, so all of them, and what is returned, are of one state of it.

    Raises:
        ConfigError: as `load`.
    """
    ca_text = None if files.ca is None else _text(files, files.ca_key, files.ca)
    for context in contexts:
        context.verify_mode = files.verify_mode
        if files.ca is None or ca_text is None:
            continue
        try:
            context.load_verify_locations(cadata=ca_text)
        except (ssl.SSLError, ValueError):
            raise _refusal(files, files.ca_key, files.ca, "no certificate in PEM") from None
    if files.crl is None:
        return NONE_REVOKED
    crl_text = _text(files, files.crl_key, files.crl)
    revoked = _revoked(files, files.crl, crl_text)
    try:
        with as_file(crl_text.encode()) as path:
            for context in contexts:
                context.load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError):
        raise _refusal(files, files.crl_key, files.crl, "no CRL in PEM") from None
    for context in contexts:
        # The list of a certificate's issuer has to be there and has to be good: OpenSSL refuses
        # what it cannot look up.
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return revoked


@contextmanager
def as_file(pem: bytes) -> Iterator[str]:
    """The path of a file in memory that no other process sees: OpenSSL takes certificates with
    their keys, and CRLs, from files alone."""
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(pem)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _revoked(files: PemFiles, path: Path, text: str) -> Revoked:
    """What a file of CRLs says; whether a CA has signed them is found at each handshake."""
    try:
        lists = [_read_crl(b64decode("".join(block.split()))) for block in _CRL.findall(text)]
    except (ValueError, IndexError):
        raise _refusal(files, files.crl_key, path, "not a CRL") from None
    if not lists:
        raise _refusal(files, files.crl_key, path, "no CRL in PEM (BEGIN X509 CRL)")
    expires_s = min(one.expires_s for one in lists)
    if expires_s < time():
        raise _refusal(files, files.crl_key, path, "it has expired: publish a newer one")
    return Revoked(frozenset().union(*(one.keys for one in lists)), expires_s)


def _text(files: PemFiles, key: str, path: Path) -> str:
    try:
        return _read(files, key, path, path.read_text)
    except UnicodeDecodeError:
        raise _refusal(files, key, path, "not a text file") from None


def _read(files: PemFiles, key: str, path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except OSError as error:
        raise _refusal(files, key, path, error.strerror or str(error)) from None


def _refusal(files: PemFiles, key: str, path: Path, why: str) -> ConfigError:
    return ConfigError(f"{files.names.format(key)} {path}: {why}")


def _mark(files: PemFiles) -> Mark:
    paths = (files.certificate, files.key, files.key_password, files.ca, files.crl)
    return tuple(NO_FILE if path is None else mark_of(path) for path in paths)


def mark_of(path: Path) -> FileMark:
    """What tells that a file was replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return NO_FILE  # whoever loads it says so
    return found.st_ino, found.st_size, found.st_mtime_ns


# ---- what stands in a certificate ----

_INTEGER, _SEQUENCE, _SET, _OID, _VERSION = 0x02, 0x30, 0x31, 0x06, 0xA0
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18
_KEYWORDS: Final = {
    "2.5.4.3": "CN",
    "2.5.4.6": "C",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.9": "STREET",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "0.9.2342.19200300.100.1.1": "UID",
    "0.9.2342.19200300.100.1.25": "DC",
}
"""Of RFC 2253; Java writes any other attribute as its number and the bytes of its value."""
_ENCODINGS: Final = {
    0x0C: "utf-8",
    0x13: "ascii",
    0x14: "latin-1",
    0x16: "ascii",
}
"""Of a value's kinds of text; any other is written as bytes."""
_ESCAPED: Final = ',=+<>#;"\\'
"""As Java does it, some more than RFC 2253 asks for."""


def _certificates(pem: str) -> Iterator[bytes]:
    for block in _PEM.findall(pem):
        yield ssl.PEM_cert_to_DER_cert(block)


def not_after(der: bytes) -> float:
    """Until when a certificate is valid, in Unix time.

    Raises:
        ValueError: it is no certificate; also IndexError.
    """
    _, end_of_validity = _items(_fields(der)[3])
    return _time(*end_of_validity)


def _read_crl(der: bytes) -> Revoked:
    """One list (RFC 5280, 5.1).

    Raises:
        ValueError: it is none; also IndexError.
    """
    ((_, whole),) = _items(der)
    fields = _items(_items(whole)[0][1])
    if fields[0][0] == _INTEGER:
        del fields[0]  # the version
    issuer = fields[1][1]
    rest = fields[3:]
    expires_s = inf
    if rest and rest[0][0] in (_UTC_TIME, _GENERALIZED_TIME):
        expires_s = _time(*rest.pop(0))
    rows = _items(rest[0][1]) if rest and rest[0][0] == _SEQUENCE else []
    return Revoked(frozenset((issuer, _items(row)[0][1]) for _, row in rows), expires_s)


def _time(tag: int, value: bytes) -> float:
    text = value.decode("ascii")
    if tag == _UTC_TIME:
        text = ("20" if int(text[:2]) < 50 else "19") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("no time")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def subject(der: bytes) -> str:
    """The subject of a certificate as Java's `X500Principal.getName()` writes it (RFC 2253).

    Raises:
        ValueError: it is no certificate; also IndexError.
    """
    names = []
    for tag, part in _items(_fields(der)[4]):
        if tag != _SET:
            raise ValueError("no part of a name")
        names.append("+".join(_attribute(value) for _, value in _items(part)))
    return ",".join(reversed(names))


def _attribute(data: bytes) -> str:
    (oid_tag, oid), (tag, value) = _items(data)
    if oid_tag != _OID:
        raise ValueError("no attribute of a name")
    number = _dotted(oid)
    keyword = _KEYWORDS.get(number)
    if keyword is None or tag not in _ENCODINGS:
        return f"{keyword or number}=#{(bytes([tag]) + _length(len(value)) + value).hex()}"
    text = value.decode(_ENCODINGS[tag])
    escaped = "".join(f"\\{c}" if c in _ESCAPED else c.replace("\0", "\\00") for c in text)
    start = len(escaped) - len(escaped.lstrip(" "))
    inner = escaped.strip(" ")
    end = len(escaped) - start - len(inner)
    space = "\\ "
    return f"{keyword}={space * start}{inner}{space * end}"


def _fields(der: bytes) -> list[bytes]:
    """Of the certificate: serial number, algorithm, issuer, validity, subject, and what follows."""
    ((_, certificate),) = _items(der)
    fields = _items(_items(certificate)[0][1])
    if fields[0][0] == _VERSION:
        del fields[0]
    return [value for _, value in fields]


def _items(data: bytes) -> list[tuple[int, bytes]]:
    """The (tag, value) of each element of DER, one after the other."""
    items = []
    position = 0
    while position < len(data):
        tag, size = data[position], data[position + 1]
        position += 2
        if size & 0x80:
            width = size & 0x7F
            size = int.from_bytes(data[position : position + width], "big")
            position += width
        if position + size > len(data):
            raise ValueError("cut off")
        items.append((tag, data[position : position + size]))
        position += size
    return items


def _length(size: int) -> bytes:
    if size < 0x80:
        return bytes([size])
    width = (size.bit_length() + 7) // 8
    return bytes([0x80 | width]) + size.to_bytes(width, "big")


def _dotted(oid: bytes) -> str:
    first = min(oid[0] // 40, 2)
    numbers = [first, oid[0] - 40 * first]
    value = 0
    for byte in oid[1:]:
        value = value << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(value)
            value = 0
    return ".".join(map(str, numbers))
