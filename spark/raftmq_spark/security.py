"""How clients of a read reach the cluster: the `kafka.*` options, mapped onto our own client.

Owns the words of Kafka's client configuration that have a meaning here; any other `kafka.*` option
is refused by name, since passing it over in silence would be a lie. Key stores are PEM (KIP-651):
Java's own formats cannot be read without Java. `ClientSettings` is plain data, so that executors
build their own TLS context from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import frozen

from raftmq_client.core.security import Security
from raftmq_client.errors import UsageError
from raftmq_client.security_file import ClientAccess, WordError, read_access
from raftmq_spark.errors import OptionError

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
class ClientSettings:
    """Where the cluster is and who we are."""

    bootstrap: str
    client_id: str = "raftmq-spark"
    rack: str = ""
    fetch_bytes: int = FETCH_BYTES
    """Most bytes of one fetch: `kafka.max.partition.fetch.bytes`."""
    timeout_ms: int = TIMEOUT_MS
    """How long nothing may come before a read or a plan fails: `kafka.request.timeout.ms`."""
    access: ClientAccess = ClientAccess()

    def security(self) -> Security | None:
        """What our client takes as `security=`; None for plain text.

        Raises:
            OptionError: a certificate file cannot be read.
        """
        try:
            return self.access.security()
        except UsageError as error:
            raise OptionError(f"kafka.{error}") from error


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
    words = {
        name.removeprefix("kafka."): text
        for name, text in texts.items()
        if name.startswith(("kafka.security.", "kafka.sasl.", "kafka.ssl."))
    }
    try:
        access = read_access(words)
    except WordError as error:
        raise OptionError(f"option 'kafka.{error.word}' {error.why}") from error
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
        access=access,
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
