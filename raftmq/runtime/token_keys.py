"""The public keys of the issuer of tokens: read from a file, or fetched by https.

Keys are fetched in worker threads, one at a time, within bounds of time and size. They are fetched
when they are old, and when a token names an unknown key; but then, whatever strangers send, not
again within a few seconds, or within half a minute after a failure. A token that comes during a
fetch waits for a moment only, so a hanging issuer holds up one worker at most. A failed fetch
changes nothing: the known keys stay, and the failure is told once, unless it is over by then.

Redirections are not followed: an address that was checked leads nowhere else.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

from raftmq.config import Address, ConfigError, NodeConfig
from raftmq.errors import RaftmqError
from raftmq.runtime.certificates import FileMark, mark_of
from raftmq.sasl.oauthbearer import (
    NoKeysError,
    TokenKey,
    TokenRules,
    VerifiedToken,
    read_keys,
    verify_token,
)

KEYS_BYTES_MAX: Final = 1 << 20
FETCH_S: Final = 5.0
"""How long a fetch may take, all of it."""
WAIT_S: Final = 1.0
"""How long a token with an unknown key waits while keys are fetched for another one."""
UNKNOWN_KEY_S: Final = 5.0
"""A token with an unknown key has keys fetched once in so long at most."""
AGAIN_S: Final = 30.0
"""After a failure nothing is fetched for so long."""
_PIECE_BYTES: Final = 64 << 10
INSTALL: Final = "`pip install 'raftmq[oauth]'`"


class FetchError(RaftmqError):
    """Keys cannot be had; it says why."""


class TokenKeys:
    """The keys of one node, and its judgement of tokens. Its methods are for worker threads."""

    name = "oauth_jwks"

    def __init__(
        self,
        config: NodeConfig,
        *,
        now_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Read the file, where it is one; what is fetched is fetched later.

        Raises:
            ConfigError: a file cannot be used, or PyJWT is not installed.
        """
        try:
            import cryptography  # noqa: F401 - an extra
            import jwt  # noqa: F401 - an extra
        except ModuleNotFoundError as error:
            why = f"OAUTHBEARER needs PyJWT and cryptography ({error}); {INSTALL}"
            raise ConfigError(f"key 'sasl_mechanisms': {why}") from error
        assert config.oauth_issuer is not None, "checked with the configuration"
        self._rules = TokenRules(
            algorithms=config.token_algorithms,
            issuer=config.oauth_issuer,
            audiences=config.audiences,
            principal_claim=config.oauth_principal_claim,
            skew_s=config.oauth_clock_skew_s,
        )
        self._refresh_s = config.oauth_jwks_refresh_ms / 1e3
        self._now_s, self._wall_s = now_s, wall_s
        self._lock = threading.Lock()
        self._keys: tuple[TokenKey, ...] = ()
        self._has_loaded = False
        self._next_s = self._next_unknown_s = now_s()
        self._untold = ""
        self._mark: FileMark | None = None
        self._path = config.oauth_jwks_file
        if self._path is not None:
            self._key = "oauth_jwks_file"
            self._read: Callable[[], bytes] = partial(_read_file, self._path)
            with self._lock:
                self._load()
            if self._untold:
                raise ConfigError(self._untold)
        else:
            self._key = "oauth_jwks_url"
            self._read = partial(_fetch, str(config.oauth_jwks_url), _trust(config))

    def verify(self, token: str) -> VerifiedToken:
        """Who a token says is there.

        Raises:
            InvalidTokenError: it is not believed.
        """
        return verify_token(token, self._rules, self._find, self._wall_s())

    def look(self, *, must_load: bool) -> bool | None:
        """Load keys that are old, or in any case; None where they stay as they are.

        Raises:
            ConfigError: they cannot be had; told once for each try.
        """
        with self._lock:
            if must_load or self._is_old():
                self._load()
            untold, self._untold = self._untold, ""
            is_loaded, self._has_loaded = self._has_loaded, False
        if untold:
            raise ConfigError(untold)
        return True if is_loaded else None

    def take(self, loaded: object) -> None:
        """They are in use already."""

    def _find(self, key_id: str | None) -> Sequence[TokenKey]:
        found = self._named(key_id)
        if found or self._path is not None:
            return found
        if self._lock.acquire(timeout=WAIT_S):
            try:
                # Whoever waited for the lock finds what the one before it fetched.
                if not self._named(key_id) and self._now_s() >= self._next_unknown_s:
                    self._load()
            finally:
                self._lock.release()
        return self._named(key_id)

    def _named(self, key_id: str | None) -> list[TokenKey]:
        return [key for key in self._keys if key_id in (None, key.key_id)]

    def _is_old(self) -> bool:
        if self._path is not None:
            return mark_of(self._path) != self._mark
        return self._now_s() >= self._next_s

    def _load(self) -> None:
        if self._path is not None:
            self._mark = mark_of(self._path)
        try:
            self._keys = read_keys(self._read())
        except (FetchError, NoKeysError) as error:
            self._untold = f"key {self._key!r}: {error}"
            self._next_unknown_s = self._now_s() + AGAIN_S
            self._next_s = self._now_s() + min(AGAIN_S, self._refresh_s)
        else:
            self._untold = ""
            self._has_loaded = True
            self._next_unknown_s = self._now_s() + UNKNOWN_KEY_S
            self._next_s = self._now_s() + self._refresh_s


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return _bounded(file, time.monotonic() + FETCH_S)
    except OSError as error:
        raise FetchError(f"{path}: {error.strerror or error}") from None


def _trust(config: NodeConfig) -> ssl.SSLContext:
    """Whom the address of keys is trusted by.

    Raises:
        ConfigError: the file cannot be used.
    """
    path = config.oauth_jwks_ca_file
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "no certificate in PEM"
        raise ConfigError(f"key 'oauth_jwks_ca_file': {path}: {why}") from None


def _fetch(url: str, context: ssl.SSLContext) -> bytes:
    import http.client  # slow to import, and only nodes that fetch need it
    from urllib import request

    class NoRedirection(request.HTTPRedirectHandler):
        def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
            return None  # which makes an error of it

    handlers: list[Any] = [NoRedirection, request.HTTPSHandler(context=context)]
    host = Address(urlsplit(url).hostname or "", 0)
    if host.is_loopback:
        handlers.append(request.ProxyHandler({}))
    opener = request.build_opener(*handlers)
    wanted = request.Request(url, headers={"Accept": "application/json", "User-Agent": "raftmq"})
    end_s = time.monotonic() + FETCH_S
    try:
        with opener.open(wanted, timeout=FETCH_S) as answer:
            return _bounded(answer, end_s)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FetchError(f"{url}: {error}") from None


def _bounded(source: IO[bytes], end_s: float) -> bytes:
    data = b""
    while piece := source.read1(_PIECE_BYTES):  # type: ignore[attr-defined]  # both sources have it
        data += piece
        if len(data) > KEYS_BYTES_MAX:
            raise FetchError(f"more than {KEYS_BYTES_MAX} bytes")
        if time.monotonic() > end_s:
            raise FetchError(f"not within {FETCH_S:.0f} s")
    return data
