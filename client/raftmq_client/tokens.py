"""Where tokens for OAUTHBEARER come from, by configuration: a file, an OAuth server, a function.

A file holds a token that something else renews (an agent, a projected volume); it is read anew
whenever a token is needed. A server gives tokens for a client's id and secret (RFC 6749, 4.4;
`sasl.oauthbearer.token.endpoint.url` of KIP-768). A function is named by its import path, and is
imported where tokens are needed. `TokenSource` is plain data without a token; its `fetch` is what
`OAuthBearer` takes. It opens files and the network, and takes its time: for a thread.
"""

from __future__ import annotations

import base64
import importlib
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from attrs import field, frozen

from raftmq.secret_file import SecretFileError, first_line, read_secret
from raftmq_client.core.security import OAuthBearer
from raftmq_client.errors import AuthenticationError, UsageError

TIMEOUT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 64 << 10
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@frozen
class TokenSource:
    """One of three: the path of a file, the address of a server with an id and a secret, or a
    function.

    Attributes:
        client_secret_file: holds the secret in its first line, in place of `client_secret`; read
            anew whenever a token is needed.
        provider: `module:function`, which takes nothing and returns a token.
        scope: what the token shall be for; "" leaves it to the server.
        extensions: said to brokers beside the token (KIP-342).
    """

    file: str | None = None
    endpoint: str | None = None
    client_id: str = ""
    client_secret: str = field(default="", repr=False)
    scope: str = ""
    extensions: Mapping[str, str] = field(factory=dict)
    client_secret_file: str | None = None
    provider: str | None = None

    def bearer(self) -> OAuthBearer:
        """For a client's `security=`.

        Raises:
            UsageError: an extension cannot be said, or there is no such function.
        """
        fetch = self.fetch if self.provider is None else _function(self.provider)
        return OAuthBearer(fetch, extensions=self.extensions)

    def fetch(self) -> str:
        """A token.

        Raises:
            AuthenticationError: there is none now; the message says why, and shows no secret.
            UsageError: there is no such function.
            Exception: whatever the function raises.
        """
        if self.provider is not None:
            return _function(self.provider)()
        if self.file is not None:
            return _line_of(self.file)
        assert self.endpoint is not None
        return self._ask(self.endpoint)

    def _ask(self, endpoint: str) -> str:
        form = {"grant_type": "client_credentials"}
        if self.scope:
            form["scope"] = self.scope
        path = self.client_secret_file
        secret = self.client_secret if path is None else _line_of(path)
        # RFC 6749, 2.3.1: both are encoded as in forms before they are joined.
        shown = ":".join(map(urllib.parse.quote_plus, (self.client_id, secret)))
        request = urllib.request.Request(
            endpoint,
            data=urllib.parse.urlencode(form).encode(),
            headers={
                "Accept": "application/json",
                "Authorization": f"Basic {base64.b64encode(shown.encode()).decode()}",
            },
        )
        opener = urllib.request.build_opener(_NoRedirection())
        try:
            with opener.open(request, timeout=TIMEOUT_S) as answer:
                body = answer.read(ANSWER_BYTES_MAX)
        except urllib.error.HTTPError as error:
            with error:
                raise AuthenticationError(f"{endpoint} answers {error.code}") from None
        except (OSError, ValueError) as error:
            raise AuthenticationError(f"{endpoint}: {error}") from None
        try:
            token = json.loads(body)["access_token"]
        except (ValueError, LookupError, TypeError):
            token = None
        if not isinstance(token, str):
            raise AuthenticationError(f"{endpoint} gives no access_token") from None
        return token


def _line_of(path: str) -> str:
    try:
        return first_line(read_secret(Path(path)))
    except (SecretFileError, OSError) as error:
        raise AuthenticationError(f"{path}: {error}") from None


def _function(named: str) -> Callable[[], str]:
    """Import what `module:function` names."""
    module, _, name = named.partition(":")
    try:
        found: Callable[[], str] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"sasl.oauthbearer.token.provider: {named}: {error}") from error
    return found


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """A secret is said to the server that was named and to nobody else."""

    def redirect_request(self, req: Any, fp: Any, code: int, *_more: Any) -> NoReturn:
        raise AuthenticationError(f"{req.full_url} answers {code}: it is somewhere else")


def endpoint_error(url: str) -> str:
    """Say why a secret must not be sent there; "" when it may be."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname
    except ValueError:
        return "is no address of a server"
    if parts.scheme not in ("http", "https") or not host:
        return "is an https address"
    if parts.scheme == "http" and host not in LOOPBACK:
        return "must be https: a secret is sent there"
    return ""
