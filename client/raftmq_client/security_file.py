"""How a cluster is reached, from a file: TLS, SASL, and the admin port; Kafka's words for it.

    security.protocol = "SASL_SSL"
    sasl.mechanism = "SCRAM-SHA-512"
    sasl.username = "alice"
    sasl.password_file = "alice.txt"
    ssl.ca.location = "ca.pem"

A file, so that no password stands in a command line. One whose name ends with `.toml` is TOML, and
paths in it begin at its folder; any other holds Kafka's properties (`name=value`), as librdkafka
(`kcat -F`) and Java read them, and paths begin where the program runs. Nothing is passed over in
silence. Key stores are PEM (KIP-651): Java's own formats cannot be read without Java.

What comes out is plain data; a TLS context is built when a client is.
"""

from __future__ import annotations

import difflib
import os
import re
import ssl
import tempfile
import tomllib
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from raftmq.secret_file import SecretFileError, check_private, first_line, read_secret
from raftmq.tls import key_trouble
from raftmq_client.core.security import Plain, Sasl, Scram, Security
from raftmq_client.errors import UsageError
from raftmq_client.tokens import TokenSource, endpoint_error

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
_BEARER: Final = "sasl.oauthbearer."
_HANDLER: Final = "OAuthBearerLoginCallbackHandler"
_STORES: Final = ("ssl.truststore", "ssl.keystore")
_FILES: Final = frozenset(
    {"sasl.password_file", "sasl.oauthbearer.token_file", "sasl.oauthbearer.client.secret_file"}
    | {"ssl.ca.location", "ssl.certificate.location", "ssl.key.location"}
    | {"ssl.key.password_file", "ssl.truststore.location", "ssl.keystore.location"}
    | {"admin.token_file", "admin.ca.location", "admin.certificate.location"}
    | {"admin.key.location"}
)
_SECRETS: Final = frozenset(
    {"sasl.password", "sasl.jaas.config", "ssl.key.password", "ssl.key.pem", "ssl.keystore.key"}
    | {"admin.token", "sasl.oauthbearer.client.secret"}
    | {"sasl.oauthbearer.client.credentials.client.secret"}
)
"""Words whose values nobody else may read."""
KNOWN: Final = (
    _FILES
    | _SECRETS
    | {"bootstrap.servers", "security.protocol"}
    | {"sasl.mechanism", "sasl.mechanisms", "sasl.username"}
    | {"sasl.oauthbearer.token.endpoint.url", "sasl.oauthbearer.client.id"}
    | {"sasl.oauthbearer.scope", "sasl.oauthbearer.extensions", "sasl.oauthbearer.method"}
    | {"sasl.oauthbearer.client.credentials.client.id", "sasl.login.callback.handler.class"}
    | {"ssl.ca.pem", "ssl.certificate.pem", "ssl.endpoint.identification.algorithm"}
    | {"ssl.truststore.type", "ssl.truststore.certificates"}
    | {"ssl.keystore.type", "ssl.keystore.certificate.chain"}
)
_SAME: Final = {
    "sasl.mechanisms": "sasl.mechanism",
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
    "ssl.ca.pem": "ssl.truststore.certificates",
    "ssl.ca.location": "ssl.truststore.location",
    "ssl.certificate.pem": "ssl.keystore.certificate.chain",
    "ssl.certificate.location": "ssl.keystore.location",
    "ssl.key.pem": "ssl.keystore.key",
}
"""Words of one of librdkafka and Java for what the other one calls otherwise."""
_PROVIDER: Final = re.compile(r"\w+(\.\w+)*:\w+")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}


class WordError(UsageError):
    """A word of a client's configuration makes no sense here; `word` is its name."""

    def __init__(self, word: str, why: str) -> None:
        self.word = word
        self.why = why
        super().__init__(f"{word!r} {why}")


@frozen
class TlsSettings:
    """Where TLS finds its certificates: PEM text, or the paths of files of it. The key is in a file
    of its own or beside the chain; without authorities those of the system are trusted."""

    authorities: str | None = None
    authorities_file: str | None = None
    chain: str | None = None
    key: str | None = field(default=None, repr=False)
    chain_file: str | None = None
    key_file: str | None = None
    key_password: str | None = field(default=None, repr=False)
    checks_host: bool = True

    def context(self) -> ssl.SSLContext:
        """What a client's connections are made with.

        Raises:
            UsageError: what should be PEM is not, or a file cannot be read; it names the file.
        """
        context = _trusting(self.authorities, self.authorities_file)
        context.check_hostname = self.checks_host
        if self.chain_file is not None:
            _show(context, self.chain_file, self.key_file, self.key_password)
        elif self.chain is not None and self.key is not None:
            _show_text(context, f"{self.chain}\n{self.key}\n", self.key_password)
        return context


@frozen
class ClientAccess:
    """Who a client says it is, and whom it trusts; nothing of either where there is no security."""

    tls: TlsSettings | None = None
    mechanism: str | None = None
    username: str = ""
    password: str = field(default="", repr=False)
    tokens: TokenSource | None = None
    """For OAUTHBEARER, in place of name and password."""

    def security(self) -> Security | None:
        """What our clients take as `security=`; None for plain text.

        Raises:
            UsageError: a certificate file cannot be used.
        """
        sasl: Sasl | None = None
        if self.tokens is not None:
            sasl = self.tokens.bearer()
        elif self.mechanism == "PLAIN":
            sasl = Plain(self.username, self.password)
        elif self.mechanism is not None:
            sasl = Scram(self.username, self.password, self.mechanism.removeprefix("SCRAM-"))
        if self.tls is None and sasl is None:
            return None
        return Security(None if self.tls is None else self.tls.context(), sasl)


@frozen
class AdminAccess:
    """How the administrators' ports are asked; without `tls` they speak plain HTTP."""

    token: str = field(default="", repr=False)
    tls: TlsSettings | None = None

    def context(self) -> ssl.SSLContext | None:
        """For HTTPS; None for plain HTTP.

        Raises:
            UsageError: a certificate file cannot be used.
        """
        return None if self.tls is None else self.tls.context()


@frozen
class SecurityFile:
    """What a file says."""

    access: ClientAccess = ClientAccess()
    admin: AdminAccess = AdminAccess()
    bootstrap: str = ""


def read_security_file(path: str | Path) -> SecurityFile:
    """Read a file, and the files of secrets that it names.

    Raises:
        UsageError: it cannot be used; one line that names the file, and shows no secret.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_bytes().decode()
        is_toml = path.suffix == ".toml"
        words = _words_of_toml(text, path.parent) if is_toml else _words_of_properties(text)
        if _SECRETS & words.keys():
            check_private(path)
        return SecurityFile(
            read_access(words), _read_admin(words), words.get("bootstrap.servers", "")
        )
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is no text") from None
    except (SecretFileError, UsageError) as error:
        raise UsageError(f"{path}: {error}") from None


def read_access(words: Mapping[str, str]) -> ClientAccess:
    """Read the words `security.*`, `sasl.*` and `ssl.*`, Java's or librdkafka's.

    Raises:
        WordError: one makes no sense, or contradicts another; it names the word.
    """
    protocol = words.get("security.protocol", "PLAINTEXT").upper()
    if protocol not in PROTOCOLS:
        raise WordError("security.protocol", f"is one of {', '.join(PROTOCOLS)}, not {protocol!r}")
    words = _in_javas_words(words)
    tls = _read_tls(words, protocol)
    if not protocol.startswith("SASL_"):
        _refuse_all(words, "sasl.", protocol)
        return ClientAccess(tls)
    if words.get("sasl.mechanism", "").upper() == "OAUTHBEARER":
        return ClientAccess(tls, "OAUTHBEARER", tokens=_read_tokens(words))
    _refuse_all(words, _BEARER, f"{protocol} without sasl.mechanism OAUTHBEARER")
    return ClientAccess(tls, *_read_sasl(words))


# ---- what the words mean ----


def _in_javas_words(words: Mapping[str, str]) -> dict[str, str]:
    """With Java's words alone; PEM is understood where librdkafka's were said."""
    found = dict(words)
    for ours, javas in _SAME.items():
        if ours not in words:
            continue
        if javas in words:
            raise WordError(ours, f"says the same as {javas!r}: leave one out")
        found[javas] = found.pop(ours)
        for store in _STORES:
            if javas.startswith(store):
                found.setdefault(f"{store}.type", "PEM")
    return found


def _refuse_all(words: Mapping[str, str], prefix: str, protocol: str) -> None:
    for word in words:
        if word.startswith(prefix):
            raise WordError(word, f"contradicts security.protocol {protocol}")


def _read_tokens(words: Mapping[str, str]) -> TokenSource:
    """Where tokens come from."""
    for word in ("sasl.username", "sasl.password", "sasl.password_file"):
        if word in words:
            raise WordError(word, "contradicts sasl.mechanism OAUTHBEARER")
    handler = words.get("sasl.login.callback.handler.class", _HANDLER)
    if not handler.endswith(f".{_HANDLER}") and handler != _HANDLER:
        raise WordError("sasl.login.callback.handler.class", "is Java, which cannot run here")
    method = words.get("sasl.oauthbearer.method", "oidc").lower()
    if method != "oidc":
        raise WordError("sasl.oauthbearer.method", f"is oidc, not {method!r}")
    jaas = _jaas_fields(words.get("sasl.jaas.config", ""))
    file: str | None = words.get(f"{_BEARER}token_file")
    url: str | None = words.get(f"{_BEARER}token.endpoint.url")
    if url is not None and url.startswith("file:"):
        file, url = _path_of(url), None
    provider = words.get(f"{_BEARER}token.provider")
    if (file, url, provider).count(None) != 2:
        raise WordError(
            f"{_BEARER}token_file", f"or {_BEARER}token.endpoint.url is wanted, one of both"
        )
    extensions = {
        k.removeprefix("extension_"): v for k, v in jaas.items() if k[:10] == "extension_"
    }
    for pair in filter(None, words.get(f"{_BEARER}extensions", "").split(",")):
        name, _, value = pair.partition("=")
        extensions[name.strip()] = value
    if url is None:
        if provider is not None and not _PROVIDER.fullmatch(provider):
            raise WordError(f"{_BEARER}token.provider", f"is module:function, not {provider!r}")
        return TokenSource(file=file, extensions=extensions, provider=provider)
    if why := endpoint_error(url):
        raise WordError(f"{_BEARER}token.endpoint.url", why)
    client_id = words.get(f"{_BEARER}client.id", jaas.get("clientId"))
    secret = _secret(words, f"{_BEARER}client.secret") or jaas.get("clientSecret")
    for missing, said in (("client.id", client_id), ("client.secret", secret)):
        if not said:
            raise WordError(f"{_BEARER}{missing}", "is missing")
    scope = words.get(f"{_BEARER}scope", jaas.get("scope", ""))
    secret_file = words.get(f"{_BEARER}client.secret_file")
    said_secret = "" if secret_file is not None else secret or ""
    return TokenSource(None, url, client_id or "", said_secret, scope, extensions, secret_file)


def _path_of(url: str) -> str:
    """The path that a URL of a file names."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        parts = urllib.parse.SplitResult("file", "?", "", "", "")
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise WordError(f"{_BEARER}token.endpoint.url", "is file:///PATH, or https")
    return urllib.parse.unquote(parts.path)


def _jaas_fields(text: str) -> dict[str, str]:
    """NAME="VALUE" of a login module."""
    return {
        match[1]: match[2] if match[2] is not None else match[3]
        for match in re.finditer(r"(\w+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')", text)
    }


def _read_sasl(words: Mapping[str, str]) -> tuple[str, str, str]:
    """Mechanism, name, password."""
    mechanism = words.get("sasl.mechanism", "GSSAPI").upper()
    if mechanism not in MECHANISMS:
        raise WordError("sasl.mechanism", f"is one of {', '.join(MECHANISMS)}, not {mechanism!r}")
    jaas = words.get("sasl.jaas.config")
    username, password = words.get("sasl.username"), _secret(words, "sasl.password")
    if jaas is not None:
        if username is not None or password is not None:
            raise WordError("sasl.jaas.config", "and sasl.username, sasl.password say the same")
        said = _jaas_fields(jaas)
        username, password = said.get("username"), said.get("password")
    if username is None or password is None:
        wanted = 'wants a login module with username="..." and password="...";'
        if jaas is None and (username is not None or password is not None):
            missing = "sasl.username" if username is None else "sasl.password"
            raise WordError(missing, "is missing")
        raise WordError("sasl.jaas.config", f"{wanted} or say sasl.username and sasl.password")
    return mechanism, username, password


def _secret(words: Mapping[str, str], word: str) -> str | None:
    """A secret that is said, or stands in the first line of the file that is."""
    path = words.get(f"{word}_file")
    if path is None:
        return words.get(word)
    if word in words:
        raise WordError(f"{word}_file", f"says the same as {word!r}: leave one out")
    try:
        return first_line(read_secret(Path(path)))
    except SecretFileError as error:
        raise WordError(f"{word}_file", f"{path}: {error}") from None


def _read_tls(words: Mapping[str, str], protocol: str) -> TlsSettings | None:
    if not protocol.endswith("SSL"):
        _refuse_all(words, "ssl.", protocol)
        return None
    for store in _STORES:
        uses = any(word.startswith(store) for word in words)
        if uses and words.get(f"{store}.type", "JKS").upper() != "PEM":
            raise WordError(f"{store}.type", "must be PEM: Java's key stores cannot be read here")
    chain, key = words.get("ssl.keystore.certificate.chain"), words.get("ssl.keystore.key")
    chain_file, key_file = words.get("ssl.keystore.location"), words.get("ssl.key.location")
    if (chain is None) != (key is None):
        raise WordError(
            "ssl.keystore.certificate.chain", "and 'ssl.keystore.key' (ssl.key.pem) go together"
        )
    if key_file is not None and chain_file is None:
        raise WordError("ssl.key.location", "wants ssl.certificate.location beside it")
    algorithm = words.get("ssl.endpoint.identification.algorithm", "https").lower()
    if algorithm not in ("https", "", "none"):
        raise WordError(
            "ssl.endpoint.identification.algorithm", f"is https or empty, not {algorithm!r}"
        )
    return TlsSettings(
        authorities=words.get("ssl.truststore.certificates"),
        authorities_file=words.get("ssl.truststore.location"),
        chain=chain,
        key=key,
        chain_file=chain_file,
        key_file=key_file,
        key_password=_secret(words, "ssl.key.password"),
        checks_host=algorithm == "https",
    )


def _read_admin(words: Mapping[str, str]) -> AdminAccess:
    ca, chain = words.get("admin.ca.location"), words.get("admin.certificate.location")
    key = words.get("admin.key.location")
    if chain is not None and ca is None:
        raise WordError("admin.certificate.location", "wants admin.ca.location beside it")
    if key is not None and chain is None:
        raise WordError("admin.key.location", "wants admin.certificate.location beside it")
    tls = None
    if ca is not None:
        tls = TlsSettings(authorities_file=ca, chain_file=chain, key_file=key)
    return AdminAccess((_secret(words, "admin.token") or "").strip(), tls)


# ---- the form of the file ----


def _words_of_toml(text: str, folder: Path) -> dict[str, str]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"not TOML: {error}") from None
    words = {}
    for word, value in _flat(tables):
        _check_known(word, f"word {word!r}")
        if not isinstance(value, str):
            raise WordError(word, "is a text: write it in quotes")
        words[word] = str(folder / Path(value).expanduser()) if word in _FILES else value
    return words


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _words_of_properties(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, line in _logical_lines(text):
        where = f"line {number}"
        match = re.fullmatch(r"((?:\\.|[^\\=:\s])+)\s*[=:]?\s*(.*)", line, re.DOTALL)
        if match is None:
            raise UsageError(f"{where}: not of the form name=value")
        word, value = _unescape(match[1]), _unescape(match[2]).rstrip()
        _check_known(word, f"{where}: {word!r}")
        if word in found:
            raise UsageError(f"{where}: {word!r} is said twice")
        found[word] = os.path.expanduser(value) if word in _FILES else value
    return found


def _check_known(word: str, named: str) -> None:
    """Raise `UsageError` for a word that has no meaning here."""
    if word in KNOWN:
        return
    close = difflib.get_close_matches(word, KNOWN, 1)
    meant = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(KNOWN))}"
    raise UsageError(f"{named} has no meaning here{meant}")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with those that a backslash continues, without comments; and where each begins."""
    begun, parts = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        line = line.lstrip()
        if not parts:
            if not line or line[0] in "#!":
                continue
            begun = number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            parts.append(line[:-1])
            continue
        yield begun, "".join([*parts, line])
        parts = []


def _unescape(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        if match[1] is not None:
            return chr(int(match[1], 16))
        return _ESCAPES.get(match[2], match[2])

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))", one, text, flags=re.DOTALL)


# ---- OpenSSL ----


def _trusting(text: str | None, path: str | None) -> ssl.SSLContext:
    is_folder = path is not None and os.path.isdir(path)
    try:
        return ssl.create_default_context(
            cafile=None if is_folder else path, capath=path if is_folder else None, cadata=text
        )
    except ssl.SSLError:
        raise UsageError(f"ssl.*: {path or 'the text of the CA'}: no certificate in PEM") from None
    except OSError as error:
        raise UsageError(f"ssl.*: {path}: {error.strerror or error}") from None


def _show(context: ssl.SSLContext, chain: str, key: str | None, password: str | None) -> None:
    """Let a context show a certificate. Nobody is asked for a password, as OpenSSL would."""
    secret = key or chain
    try:
        check_private(Path(secret))
        is_encrypted = "ENCRYPTED" in Path(secret).read_text(errors="replace")
        context.load_cert_chain(chain, key, password or "")
    except SecretFileError as error:
        raise UsageError(f"ssl.*: {secret}: {error}") from None
    except ssl.SSLError as error:
        why = key_trouble(error, "ssl.key.password", is_encrypted, bool(password))
        raise UsageError(f"ssl.*: {secret}: {why} (certificate: {chain})") from None
    except OSError as error:
        raise UsageError(f"ssl.*: {chain}: {error.strerror or error}") from None


def _show_text(context: ssl.SSLContext, pem: str, password: str | None) -> None:
    """OpenSSL reads a chain from files alone."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "chain.pem")
        path.touch(mode=0o600)
        path.write_text(pem)
        _show(context, str(path), None, password)
