"""How clients of a read reach the cluster: the `kafka.*` options, mapped onto our own client.

Owns the words of Kafka's client configuration that have a meaning here; any other `kafka.*` option
is refused by name, since passing it over in silence would be a lie. Key stores are PEM (KIP-651):
Java's own formats cannot be read without Java. `ClientSettings` is plain data, so that executors
build their own TLS context from it, and get their own tokens: it says where from, and holds no
token, nor the secret by which a server gives one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Final

from attrs import evolve, frozen

from raftmq_client.core.security import OAuthBearer, Security
from raftmq_client.errors import UsageError
from raftmq_client.security_file import ClientAccess, WordError, read_access
from raftmq_client.tokens import TokenSource
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
    "kafka.sasl.login.callback.handler.class",
    "kafka.sasl.oauthbearer.token_file",
    "kafka.sasl.oauthbearer.token.endpoint.url",
    "kafka.sasl.oauthbearer.token.provider",
    "kafka.sasl.oauthbearer.client.id",
    "kafka.sasl.oauthbearer.client.secret_file",
    "kafka.sasl.oauthbearer.scope",
    "kafka.sasl.oauthbearer.extensions",
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
BEARERS_MAX: Final = 64
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

        Tokens are shared by all clients of this process: a worker reads many ranges.

        Raises:
            OptionError: a certificate file cannot be read, or a function for tokens not imported.
        """
        try:
            security = self.access.security()
            if security is None or self.access.tokens is None:
                return security
            return evolve(security, sasl=_bearer(self.access.tokens))
        except UsageError as error:
            raise OptionError(f"kafka.{error}") from error


_bearers: Final[dict[str, OAuthBearer]] = {}
_bearers_lock: Final = threading.Lock()


def _bearer(tokens: TokenSource) -> OAuthBearer:
    """What shows the tokens of that source in this process, with the last one while it is good."""
    with _bearers_lock:
        known = _bearers.get(repr(tokens))  # it shows no secret, and has none here
        if known is None:
            if len(_bearers) >= BEARERS_MAX:
                _bearers.clear()
            known = _bearers[repr(tokens)] = tokens.bearer()
        return known


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
    if access.tokens is not None and access.tokens.client_secret:
        raise OptionError(
            "option 'kafka.sasl.jaas.config' says a clientSecret, which would go to executors with"
            " the plan: name a file there by 'kafka.sasl.oauthbearer.client.secret_file'"
        )
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
