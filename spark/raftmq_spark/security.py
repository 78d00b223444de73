"""How clients of a read reach the cluster: the `kafka.*` options, mapped onto our own client.

Owns the words of Kafka's client configuration that have a meaning here; any other `kafka.*` option
is refused by name, since passing it over in silence would be a lie. Key stores are PEM (KIP-651):
Java's own formats cannot be read without Java. `ClientSettings` is plain data, so that executors
build their own TLS context from it.
"""

from __future__ import annotations

import re
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from attrs import field, frozen

from raftmq_client.core.security import Plain, Scram, Security
from raftmq_spark.errors import OptionError

_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_PEM_ONLY: Final = ("kafka.ssl.truststore.type", "kafka.ssl.keystore.type")
_KNOWN: Final = (
    "kafka.bootstrap.servers",
    "kafka.client.id",
    "kafka.client.rack",
    "kafka.isolation.level",
    "kafka.request.timeout.ms",
    "kafka.max.partition.fetch.bytes",
    "kafka.security.protocol",
    "kafka.sasl.mechanism",
    "kafka.sasl.jaas.config",
    "kafka.ssl.truststore.type",
    "kafka.ssl.truststore.location",
    "kafka.ssl.truststore.certificates",
    "kafka.ssl.keystore.type",
    "kafka.ssl.keystore.location",
    "kafka.ssl.keystore.certificate.chain",
    "kafka.ssl.keystore.key",
    "kafka.ssl.key.password",
    "kafka.ssl.endpoint.identification.algorithm",
)
FETCH_BYTES: Final = 8 << 20
TIMEOUT_MS: Final = 60_000
_FETCH_BYTES_LIMITS: Final = (64 << 10, 64 << 20)


@frozen
class TlsSettings:
    """Where TLS finds its certificates: PEM text, or the path of a file of it."""

    authorities: str | None = None
    authorities_file: str | None = None
    chain: str | None = None
    key: str | None = field(default=None, repr=False)
    chain_file: str | None = None
    key_password: str | None = field(default=None, repr=False)
    checks_host: bool = True


@frozen
class ClientSettings:
    """Where the cluster is and who we are."""

    bootstrap: str
    client_id: str = "raftmq-spark"
    rack: str = ""
    fetch_bytes: int = FETCH_BYTES
    """Most bytes of one fetch: `kafka.max.partition.fetch.bytes`."""
    timeout_ms: int = TIMEOUT_MS
    """How long nothing may come before a read or a plan fails: `kafka.request.timeout.ms`."""
    tls: TlsSettings | None = None
    mechanism: str | None = None
    username: str = ""
    password: str = field(default="", repr=False)

    def security(self) -> Security | None:
        """What our client takes as `security=`; None for plain text.

        Raises:
            OptionError: a certificate file cannot be read.
        """
        sasl: Plain | Scram | None = None
        if self.mechanism == "PLAIN":
            sasl = Plain(self.username, self.password)
        elif self.mechanism is not None:
            sasl = Scram(self.username, self.password, self.mechanism.removeprefix("SCRAM-"))
        if self.tls is None and sasl is None:
            return None
        return Security(None if self.tls is None else tls_context(self.tls), sasl)


def read_client_settings(texts: Mapping[str, str], bootstrap: str) -> ClientSettings:
    """Read the `kafka.*` options; names are in lower case.

    Raises:
        OptionError: one is unknown here, malformed or contradicts another.
    """
    for name in texts:
        if name.startswith("kafka.") and name not in _KNOWN:
            raise OptionError(f"option {name!r} has no meaning here; known are {', '.join(_KNOWN)}")
    isolation = texts.get("kafka.isolation.level", "read_committed")
    if isolation != "read_committed":
        raise OptionError(
            "option 'kafka.isolation.level' is always read_committed here: ranges end at the"
            " last stable offset"
        )
    protocol = texts.get("kafka.security.protocol", "PLAINTEXT").upper()
    if protocol not in _PROTOCOLS:
        raise OptionError(
            f"option 'kafka.security.protocol' is one of {', '.join(_PROTOCOLS)}, not {protocol!r}"
        )
    mechanism, username, password = _read_sasl(texts, protocol)
    return ClientSettings(
        bootstrap=bootstrap,
        client_id=texts.get("kafka.client.id", "raftmq-spark"),
        rack=texts.get("kafka.client.rack", ""),
        fetch_bytes=_read_within(
            texts, "kafka.max.partition.fetch.bytes", FETCH_BYTES, *_FETCH_BYTES_LIMITS
        ),
        timeout_ms=_read_within(
            texts, "kafka.request.timeout.ms", TIMEOUT_MS, 1_000, 24 * 3_600_000
        ),
        tls=_read_tls(texts, protocol),
        mechanism=mechanism,
        username=username,
        password=password,
    )


def _read_within(
    texts: Mapping[str, str], name: str, default: int, lowest: int, highest: int
) -> int:
    text = texts.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not lowest <= int(text) <= highest:
        raise OptionError(f"option {name!r} is from {lowest} to {highest}, not {text!r}")
    return int(text)


def _read_sasl(texts: Mapping[str, str], protocol: str) -> tuple[str | None, str, str]:
    given = [name for name in texts if name.startswith("kafka.sasl.")]
    if not protocol.startswith("SASL_"):
        if given:
            raise OptionError(f"option {given[0]!r} contradicts kafka.security.protocol {protocol}")
        return None, "", ""
    mechanism = texts.get("kafka.sasl.mechanism", "GSSAPI").upper()
    if mechanism not in _MECHANISMS:
        raise OptionError(
            f"option 'kafka.sasl.mechanism' is one of {', '.join(_MECHANISMS)}, not {mechanism!r}"
        )
    jaas = texts.get("kafka.sasl.jaas.config", "")
    fields = {
        match[1]: match[2] if match[2] is not None else match[3]
        for match in re.finditer(r"(\w+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')", jaas)
    }
    if "username" not in fields or "password" not in fields:
        raise OptionError(
            "option 'kafka.sasl.jaas.config' wants a login module with"
            ' username="..." and password="...";'
        )
    return mechanism, fields["username"], fields["password"]


def _read_tls(texts: Mapping[str, str], protocol: str) -> TlsSettings | None:
    given = [name for name in texts if name.startswith("kafka.ssl.")]
    if not protocol.endswith("SSL"):
        if given:
            raise OptionError(f"option {given[0]!r} contradicts kafka.security.protocol {protocol}")
        return None
    for name in _PEM_ONLY:
        store = name.removesuffix(".type")
        uses = any(other.startswith(store) for other in given)
        if uses and texts.get(name, "JKS").upper() != "PEM":
            raise OptionError(f"option {name!r} must be PEM: Java's key stores cannot be read here")
    chain = texts.get("kafka.ssl.keystore.certificate.chain")
    key = texts.get("kafka.ssl.keystore.key")
    if (chain is None) != (key is None):
        raise OptionError(
            "options 'kafka.ssl.keystore.certificate.chain' and 'kafka.ssl.keystore.key'"
            " go together"
        )
    algorithm = texts.get("kafka.ssl.endpoint.identification.algorithm", "https")
    if algorithm.lower() not in ("https", ""):
        raise OptionError(
            "option 'kafka.ssl.endpoint.identification.algorithm' is https or empty,"
            f" not {algorithm!r}"
        )
    return TlsSettings(
        authorities=texts.get("kafka.ssl.truststore.certificates"),
        authorities_file=texts.get("kafka.ssl.truststore.location"),
        chain=chain,
        key=key,
        chain_file=texts.get("kafka.ssl.keystore.location"),
        key_password=texts.get("kafka.ssl.key.password"),
        checks_host=algorithm != "",
    )


def tls_context(tls: TlsSettings) -> ssl.SSLContext:
    """Build the context; without authorities those of the system are trusted.

    Raises:
        OptionError: what should be PEM is not, or a file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=tls.authorities_file, cadata=tls.authorities)
        context.check_hostname = tls.checks_host
        if tls.chain_file is not None:
            context.load_cert_chain(tls.chain_file, password=tls.key_password)
        elif tls.chain is not None and tls.key is not None:
            _load_chain(context, f"{tls.chain}\n{tls.key}\n", tls.key_password)
    except (OSError, ssl.SSLError) as error:
        files = " or ".join(name for name in (tls.authorities_file, tls.chain_file) if name)
        raise OptionError(f"kafka.ssl.*{f' ({files})' if files else ''}: {error}") from error
    return context


def _load_chain(context: ssl.SSLContext, pem: str, password: str | None) -> None:
    """OpenSSL reads a chain from files alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "chain.pem")
        path.touch(mode=0o600)
        path.write_text(pem)
        context.load_cert_chain(path, password=password)
