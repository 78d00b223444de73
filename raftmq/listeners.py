"""Where a node listens: addresses, and the ports for clients, tables `[listeners.NAME]` of a file.

Read and judged as far as one listener goes; what they must be together says `config.py`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import attrs
from attrs import frozen

from raftmq.errors import RaftmqError
from raftmq.principals import DEFAULT_RULES, MappingRuleError, read_mapping_rules

PLAINTEXT: Final = "PLAINTEXT"
"""The name of the listener that `client_listener` is."""
PROTOCOLS: Final = (PLAINTEXT, "SSL", "SASL_PLAINTEXT", "SASL_SSL")
"""Kafka's names of what a listener speaks."""
SERVED_PROTOCOLS: Final = PROTOCOLS
"""Those that this version can speak."""
CLIENT_CERTIFICATES: Final = ("off", "wanted", "required")
"""Whether clients of a listener show certificates: none are asked for; those that are shown must
be trusted; nobody comes in without one."""
_LISTENER_NAME: Final = re.compile(r"[A-Z0-9_-]{1,32}")


class ConfigError(RaftmqError):
    """A configuration that cannot be used; the message names the key and what it wants."""


@frozen(slots=True)
class Address:
    """A TCP address, `host:port`; an IPv6 host stands in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True when only this machine reaches it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `host:port`.

        Raises:
            ConfigError: not of that form.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"{text!r} is not host:port, such as 127.0.0.1:9092")
        return cls(host.strip("[]"), int(port))


@frozen(slots=True, kw_only=True)
class ClientListener:
    """One port for clients: a table `[listeners.NAME]` of a node's file.

    Attributes:
        name: in capitals; clients that come by it are told addresses of this name alone.
        address: where it listens.
        advertised: the address that clients are told; None: `address`.
        protocol: one of `PROTOCOLS`.
        certificate_file: PEM, the node's certificate and those between it and the CA.
        key_file: PEM, its private key.
        key_password_file: what that key is encrypted with; None: it is not.
        client_certificates: one of `CLIENT_CERTIFICATES`.
        client_ca_file: PEM, the CAs whose clients are trusted.
        client_crl_file: PEM, lists of their certificates that are good no more (CRLs).
        principal_mapping_rules: how a certificate's subject becomes a client's name.
    """

    name: str
    address: Address
    advertised: Address | None = None
    protocol: str = PLAINTEXT
    certificate_file: Path | None = None
    key_file: Path | None = None
    key_password_file: Path | None = None
    client_certificates: str = "off"
    client_ca_file: Path | None = None
    client_crl_file: Path | None = None
    principal_mapping_rules: str = DEFAULT_RULES

    def __str__(self) -> str:
        return f"{self.name}={self.protocol}://{self.address}"

    @property
    def told_address(self) -> Address:
        """The address that clients are told."""
        return self.advertised or self.address

    @property
    def has_tls(self) -> bool:
        """True when every byte of it is encrypted."""
        return self.protocol.endswith("SSL")

    @property
    def has_sasl(self) -> bool:
        """True when its clients authenticate by SASL."""
        return self.protocol.startswith("SASL_")


def read_listener(name: str, row: Any) -> ClientListener:
    """Read one table.

    Raises:
        ConfigError: it cannot be; the message names the listener.
    """
    if not _LISTENER_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name of a listener: letters, digits, - and _, up to 32")
    if not isinstance(row, Mapping):
        raise ConfigError(f"{name} is a table with an address and a protocol")
    known = [attribute.name for attribute in attrs.fields(ClientListener)][1:]
    values: dict[str, Any] = {}
    for key, text in row.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{name} takes {', '.join(known)}, not {key!r}{hint}")
        if key in ("address", "advertised"):
            values[key] = Address.parse(str(text))
        elif key.endswith("_file"):
            values[key] = Path(str(text)).expanduser()
        else:
            values[key] = str(text)
    for key in ("address", "protocol"):
        if key not in values:
            raise ConfigError(f"{name}: {key!r} is missing")
    return ClientListener(name=name, **values)


def check_listener(listener: ClientListener) -> None:
    """Judge one listener by itself.

    Raises:
        ConfigError: its settings do not go together.
    """
    if listener.protocol not in PROTOCOLS:
        raise ConfigError(f"protocol is one of {', '.join(PROTOCOLS)}, not {listener.protocol!r}")
    if listener.protocol not in SERVED_PROTOCOLS:
        raise ConfigError(f"protocol {listener.protocol} cannot be served by this version")
    if listener.client_certificates not in CLIENT_CERTIFICATES:
        raise ConfigError(f"client_certificates is one of {', '.join(CLIENT_CERTIFICATES)}")
    files = [name for name in attrs.fields_dict(ClientListener) if name.endswith("_file")]
    try:
        read_mapping_rules(listener.principal_mapping_rules)
    except MappingRuleError as error:
        raise ConfigError(f"principal_mapping_rules: {error}") from None
    if listener.principal_mapping_rules != DEFAULT_RULES and listener.client_certificates == "off":
        raise ConfigError("principal_mapping_rules goes with client_certificates")
    if not listener.has_tls:
        for name in files:
            if getattr(listener, name) is not None:
                raise ConfigError(f"{name}: protocol {listener.protocol} has no certificates")
        if listener.client_certificates != "off":
            raise ConfigError(f"client_certificates: {listener.protocol} has none")
        return
    for name in ("certificate_file", "key_file"):
        if getattr(listener, name) is None:
            raise ConfigError(f"protocol {listener.protocol} needs {name}")
    if (listener.client_ca_file is None) != (listener.client_certificates == "off"):
        raise ConfigError("client_ca_file goes with client_certificates 'wanted' or 'required'")
    if listener.client_crl_file is not None and listener.client_ca_file is None:
        raise ConfigError("client_crl_file goes with client_ca_file")
