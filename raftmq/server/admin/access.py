"""Access to the admin port: by a token, by a certificate, or without either.

Where there is a token (`admin_token_file`), pages that change something need it; other pages can be
read without it, from this machine only. A certificate of operators (`admin_client_ca_file`) serves
as the token does, as far as rules let its principal alter or describe the cluster (`http.checked`).
Without either, this machine may do everything if the port is on the loopback; elsewhere the port is
for reading, unless `insecure` says otherwise. /health is open to all, since load balancers carry no
tokens.

A web page of another site, open in a browser on this machine, is a stranger: it may reach the port
by a name of its own that points here (DNS rebinding). So a request without a token must name the
port by an IP address, as localhost, or by a name of the configuration.

A file holds a token in each line, so that one can be replaced: first both, then the new one.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from attrs import field, frozen

from raftmq.config import ConfigError, NodeConfig
from raftmq.rights import address_of
from raftmq.runtime.certificates import Mark, Watched, mark_of
from raftmq.secret_file import SecretFileError, read_secret

TOKEN_LENGTH_MIN: Final = 16
_SCHEME: Final = "bearer "
_HEALTH: Final = frozenset(("/health", "/health/ready", "/health/live"))
READS: Final = frozenset(("GET", "HEAD", "OPTIONS"))

TOKEN_HOLDER: Final = "token of the admin port"
"""Whoever has one; which of them it was cannot be told without telling of it."""
ANONYMOUS: Final = "User:ANONYMOUS"
UNKNOWN_TOKEN: Final = 401, "no token of this port"
NO_TOKEN: Final = (
    401,
    "this port wants the token of admin_token_file (Authorization: Bearer ...), or a certificate",
)
READ_ONLY: Final = (
    403,
    "this port is for reading: it is not on the loopback, and has no admin_token_file or "
    "admin_client_ca_file",
)
PORT_NAME: Final = "admin_listener"
FOREIGN_HOST: Final = (
    403,
    "Host is no number and no name of this port (admin_listener, advertised_admin)",
)

Refusal = tuple[int, str]
"""Status and text."""


@frozen
class Tokens:
    """What was read of a file; `mark` tells that it changed."""

    texts: tuple[bytes, ...] = field(repr=False)
    mark: Mark


class Access:
    """The rules of one port."""

    def __init__(self, config: NodeConfig) -> None:
        """Read the tokens, if there are any.

        Raises:
            ConfigError: the file cannot be used.
        """
        self.name = PORT_NAME
        self.tokens: Watched[Tokens] | None = None
        if (path := config.admin_token_file) is not None:
            load = partial(read_tokens, path)
            self.tokens = Watched(PORT_NAME, load, lambda: (mark_of(path),))
        self._takes_certificates = config.admin_client_ca_file is not None
        self._is_open = config.admin_listener.is_loopback or config.insecure
        addresses = (config.admin_listener, config.admin_address)
        self._hosts = frozenset(["localhost", *(one.host.lower() for one in addresses)])

    @property
    def is_guarded(self) -> bool:
        """True when nobody without a token changes anything."""
        return self.tokens is not None or self._takes_certificates

    def refusal(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        client: str,
    ) -> Refusal | None:
        """Why a request is refused that shows no certificate; None when it is served.

        Args:
            headers: by their names in small letters.
            client: the address that it came from.
        """
        if self.tokens is not None and (said := headers.get("authorization", "")):
            return None if self._knows(said, self.tokens.loaded) else UNKNOWN_TOKEN
        if path in _HEALTH:
            return None
        if not self._is_own(headers.get("host", "")):
            return FOREIGN_HOST
        is_read = method in READS
        if self.is_guarded:
            return None if is_read and _is_loopback(client) else NO_TOKEN
        return None if is_read or self._is_open else READ_ONLY

    def principal_of(self, headers: Mapping[str, str], subject: str | None) -> str:
        """Who sent a request that is served, as far as this port can tell."""
        if subject is not None:
            return f"User:{subject}"
        has_token = self.tokens is not None and headers.get("authorization")
        return TOKEN_HOLDER if has_token else ANONYMOUS

    def _knows(self, said: str, tokens: Tokens) -> bool:
        if not said.lower().startswith(_SCHEME):
            return False
        token = said[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape")
        # All of them are compared: the time tells nothing.
        return sum(hmac.compare_digest(token, known) for known in tokens.texts) > 0

    def _is_own(self, host: str) -> bool:
        """True for a Host that no stranger's name server decides on; browsers always send one."""
        if not host:
            return True
        if host.startswith("["):
            name = host[1:].partition("]")[0]
        else:
            name = host.rpartition(":")[0] or host
        if name.lower() in self._hosts:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True


def _is_loopback(client: str) -> bool:
    address = address_of(client)
    return address is not None and address.is_loopback


def read_tokens(path: Path) -> Tokens:
    """Read a file of tokens.

    Raises:
        ConfigError: it cannot be used; it says why, and nothing of what stands there.
    """
    mark = (mark_of(path),)
    try:
        text = read_secret(path)
    except SecretFileError as error:
        raise _refusal(path, str(error)) from None
    tokens = tuple(filter(None, map(bytes.strip, text.splitlines())))
    if not tokens or min(map(len, tokens)) < TOKEN_LENGTH_MIN:
        wanted = f"of {TOKEN_LENGTH_MIN} characters or more (openssl rand -hex 32)"
        raise _refusal(path, f"a token in each line, {wanted}")
    return Tokens(tokens, mark)


def _refusal(path: Path, why: str) -> ConfigError:
    return ConfigError(f"key 'admin_token_file': {path}: {why}")
