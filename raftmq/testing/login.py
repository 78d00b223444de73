"""Who a client of a test cluster is, and the settings by which it comes in.

The same for every kind of cluster: where nothing is secured, the settings hold addresses alone, so
that one test fits all. What is changed on purpose (`login.but(password="guess")`) shows how a
service behaves whose configuration is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

if TYPE_CHECKING:
    from raftmq_client import Security

JAAS = "org.apache.kafka.common.security"


@frozen
class Login:
    """A user of a cluster, as clients are told.

    Attributes:
        bootstrap: `127.0.0.1:PORT,...`.
        protocol: Kafka's name: PLAINTEXT, SSL or SASL_SSL.
        mechanism: SCRAM-SHA-512, SCRAM-SHA-256 or PLAIN; "" where nobody is asked for a password.
        ca_file: whom the client trusts; None where nothing is encrypted.
        certificate_file: what the client shows, with its key in `key_file`.
        toml: a file of all this for `raftmq --security`.
    """

    bootstrap: str
    protocol: str = "PLAINTEXT"
    mechanism: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    toml: Path | None = None

    def but(self, **changes: Any) -> Login:
        """The same with some attributes changed, such as a wrong password."""
        return evolve(self, **changes)

    @property
    def confluent(self) -> dict[str, Any]:
        """For confluent-kafka, and whatever else is built on librdkafka."""
        conf: dict[str, Any] = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self.protocol,
        }
        if self.mechanism:
            conf |= {
                "sasl.mechanism": self.mechanism,
                "sasl.username": self.username,
                "sasl.password": self.password,
            }
        if self.ca_file is not None:
            conf["ssl.ca.location"] = str(self.ca_file)
        if self.certificate_file is not None:
            conf["ssl.certificate.location"] = str(self.certificate_file)
            conf["ssl.key.location"] = str(self.key_file)
        return conf

    @property
    def kafka_python(self) -> dict[str, Any]:
        """For kafka-python."""
        return self._words(
            {
                "ssl_cafile": self.ca_file,
                "ssl_certfile": self.certificate_file,
                "ssl_keyfile": self.key_file,
            }
        )

    @property
    def aiokafka(self) -> dict[str, Any]:
        """For aiokafka, which wants a TLS context instead of files."""
        security = self.security
        context = None if security is None else security.tls
        return self._words({"ssl_context": context})

    def _words(self, tls: dict[str, Any]) -> dict[str, Any]:
        words: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "security_protocol": self.protocol,
        }
        if self.mechanism:
            words |= {
                "sasl_mechanism": self.mechanism,
                "sasl_plain_username": self.username,
                "sasl_plain_password": self.password,
            }
        found = {name: value for name, value in tls.items() if value is not None}
        return words | {k: str(v) if isinstance(v, Path) else v for k, v in found.items()}

    @property
    def java(self) -> dict[str, str]:
        """Properties of a Java client."""
        words = {"bootstrap.servers": self.bootstrap, "security.protocol": self.protocol}
        if self.mechanism:
            module = "plain.Plain" if self.mechanism == "PLAIN" else "scram.Scram"
            words["sasl.mechanism"] = self.mechanism
            words["sasl.jaas.config"] = (
                f'{JAAS}.{module}LoginModule required username="{self.username}" '
                f'password="{self.password}";'
            )
        if self.ca_file is not None:
            words |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(self.ca_file)}
        if self.certificate_file is not None and self.key_file is not None:
            words |= {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.certificate.chain": self.certificate_file.read_text(),
                "ssl.keystore.key": self.key_file.read_text(),
            }
        return words

    @property
    def security(self) -> Security | None:
        """For our own client: `Producer(login.bootstrap, security=login.security)`."""
        from raftmq_client.security_file import ClientAccess, TlsSettings

        tls = None
        if self.ca_file is not None:
            tls = TlsSettings(
                authorities_file=str(self.ca_file),
                chain_file=None if self.certificate_file is None else str(self.certificate_file),
                key_file=None if self.key_file is None else str(self.key_file),
            )
        access = ClientAccess(tls, self.mechanism or None, self.username, self.password)
        return access.security()
