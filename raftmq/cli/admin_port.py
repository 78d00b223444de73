"""The admin ports of nodes, as commands ask them: addresses, requests, tokens and certificates.

An address is found through the brokers' configurations; what a node answers names the others, so
that a command goes on when the one that it asked first is gone.
"""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import msgspec

from raftmq.cli.common import CommandError, admin_access, open_admin, show_json
from raftmq.cli.console import EXIT_FAILED, EXIT_UNKNOWN, EXIT_USAGE
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.admin import ResourceType
from raftmq_client.errors import ClientError

ADMIN_KEY: Final = "raftmq.admin.listener"
ADMIN_TOKEN: Final = "RAFTMQ_ADMIN_TOKEN"
ADMIN_TOKEN_FILE: Final = "RAFTMQ_ADMIN_TOKEN_FILE"
"""Variables with the token of admin ports, or a file whose first line it is."""
ADMIN_CA_FILE: Final = "RAFTMQ_ADMIN_CA_FILE"
"""The variable that names the CAs of admin ports; without it they speak plain HTTP."""
ADMIN_CLIENT_FILES: Final = (
    "RAFTMQ_ADMIN_CLIENT_CERTIFICATE_FILE",
    "RAFTMQ_ADMIN_CLIENT_KEY_FILE",
)
"""Variables that name an operator's certificate and its key, if ports want one."""


def open_admin_port(bootstrap: str, timeout_s: float) -> AdminPort:
    """The admin port of this cluster.

    Raises:
        CommandError: no node names one.
        UsageError, ConnectionFailedError: as `open_admin`.
    """
    with open_admin(bootstrap, timeout_s) as admin:
        port = AdminPort.find(admin, timeout_s)
    if port is None:
        raise CommandError("no node of this cluster names an admin port")
    return port


def give_order(
    port: AdminPort,
    path: str,
    body: dict[str, Any],
    timeout_s: float,
    *,
    as_json: bool,
    ends_here: bool,
) -> dict[str, Any]:
    """Have the controller do something, and return its answer, which is not a refusal.

    Args:
        as_json: a refusal is shown as it came.
        ends_here: so is any answer, being all that the command has to show.

    Raises:
        CommandError: it was refused, or nobody knows what came of it.
    """
    answer = port.post(path, {**body, "timeout_ms": round(timeout_s * 1000)})
    code = answer.get("code", "UNKNOWN_SERVER_ERROR")
    if as_json and (ends_here or code != "NONE"):
        show_json(answer)
    if code != "NONE":
        is_unknown = code == "REQUEST_TIMED_OUT"
        raise CommandError(
            f"{answer.get('message') or answer.get('error') or code} ({code})",
            EXIT_UNKNOWN if is_unknown else EXIT_FAILED,
        )
    return answer


class AdminPort:
    """The admin ports of live nodes: the first that answers is asked.

    Orders go to the controller, and what is asked after them: any other node may know of them only
    a moment later, and would tell that nothing is to be done.
    """

    def __init__(self, addresses: list[str], timeout_s: float) -> None:
        self._addresses = addresses
        self._timeout_s = timeout_s

    @classmethod
    def find(cls, admin: Admin, timeout_s: float) -> AdminPort | None:
        """Find a port that answers by the brokers' configurations, and the others by its answer;
        None where no broker names one.

        Brokers that are gone or hang are passed over: operators often come when nodes are missing.
        """
        silent = []
        for address in find_addresses(admin):
            try:
                told = cls([address], timeout_s).get("/nodes")
            except CommandError:
                silent.append(address)
                continue
            others = [n.get("admin_address") for n in told["nodes"] if n["state"] == "live"]
            rest = [other for other in others if other and other != address]
            return cls([address, *rest], timeout_s)
        return cls(silent, timeout_s) if silent else None

    def get(self, path: str) -> dict[str, Any]:
        """The answer of any node.

        Raises:
            CommandError: no node answers.
        """
        failures = []
        for address in list(self._addresses):
            try:
                return self._ask(admin_request(address, path))
            except OSError as error:
                failures.append(f"{address}: {error}")
                self._addresses.append(self._addresses.pop(0))  # another one first, next time
        raise CommandError(f"no admin port answers: {'; '.join(failures)}", EXIT_UNKNOWN)

    def get_each(self, path: str) -> list[dict[str, Any]]:
        """The answers of all nodes that answer.

        Raises:
            CommandError: none does.
        """
        found = [self.get(path)]
        for address in self._addresses[1:]:
            with suppress(OSError):
                found.append(self._ask(admin_request(address, path)))
        return found

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Have the controller do something, once; it is asked first from now on.

        Raises:
            CommandError: no node was reached, or the answer was lost.
        """
        self._turn_to_controller()
        try:
            answer = self._ask(admin_request(self._addresses[0], path, body))
        except OSError as error:
            raise CommandError(f"outcome unknown: {error}", EXIT_UNKNOWN) from error
        with suppress(CommandError):  # what it did is known, whoever answers now
            self._turn_to_controller()  # by now that may be another node
        return answer

    def _turn_to_controller(self) -> None:
        """Bring a node that answers to the front, the controller where it does."""
        told = self.get("/nodes")
        for node in told["nodes"]:
            address = node.get("admin_address")
            if address and node["node_id"] == told["controller_id"]:
                self._addresses = [address, *(a for a in self._addresses if a != address)]
                self.get("/nodes")

    def _ask(self, request: urllib.request.Request) -> dict[str, Any]:
        try:
            with open_page(request, self._timeout_s + 5) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                if refusal := admin_refusal(error):
                    raise CommandError(f"{request.host}: {refusal}") from error
                body = error.read()
            if error.code == 404:
                raise CommandError(
                    "that node has no page /nodes: is it an older raftmq?"
                ) from error
        parsed: dict[str, Any] = msgspec.json.decode(body)
        return parsed


# ---- requests ----


def find_addresses(admin: Admin) -> Iterator[str]:
    """Admin ports as brokers' configurations name them, one broker asked after the other."""
    for broker in admin.brokers():
        try:
            entries = admin.describe_configs(ResourceType.BROKER, str(broker.node_id))
        except ClientError:
            continue  # gone, hanging or no raftmq: another broker knows its registration
        yield from (e.value for e in entries if e.name == ADMIN_KEY and e.value)


def admin_request(address: str, path: str, body: object = None) -> urllib.request.Request:
    """A request for a page of an admin port, with the token that the file of --security or the
    environment names; a body makes it a POST.

    Raises:
        CommandError: the file of the token cannot be read.
    """
    has_tls = admin_access().tls is not None or os.environ.get(ADMIN_CA_FILE)
    scheme = "https" if has_tls else "http"
    request = urllib.request.Request(f"{scheme}://{address}{path}")
    if body is not None:
        request.data = msgspec.json.encode(body)
        request.add_header("Content-Type", "application/json")
    if token := _admin_token():
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return request


def open_page(request: urllib.request.Request, timeout_s: float) -> Any:
    """The answer, to be closed.

    Raises:
        OSError: none, or one that refuses (urllib.error.HTTPError).
        CommandError: the environment names files that cannot be used.
    """
    return urllib.request.urlopen(request, timeout=timeout_s, context=_admin_context())


def _admin_context() -> ssl.SSLContext | None:
    if (said := admin_access().context()) is not None:
        return said
    ca = os.environ.get(ADMIN_CA_FILE)
    if not ca:
        return None
    pair = [os.environ.get(name) for name in ADMIN_CLIENT_FILES]
    try:
        context = ssl.create_default_context(cafile=ca)
        if pair[0]:
            context.load_cert_chain(pair[0], pair[1])
    except OSError as error:
        names = ", ".join((ADMIN_CA_FILE, *ADMIN_CLIENT_FILES))
        raise CommandError(f"{names}: {error}", EXIT_USAGE) from error
    return context


def _admin_token() -> str:
    if said := admin_access().token:
        return said
    path = os.environ.get(ADMIN_TOKEN_FILE)
    if not path:
        return os.environ.get(ADMIN_TOKEN, "").strip()
    try:
        with open(path, encoding="utf-8") as lines:
            return lines.readline().strip()
    except (OSError, ValueError) as error:
        raise CommandError(f"{ADMIN_TOKEN_FILE}: {path}: {error}", EXIT_USAGE) from error


def admin_refusal(error: urllib.error.HTTPError) -> str:
    """What a port said that refuses a caller; "" for any other error."""
    if error.code not in (401, 403):
        return ""
    try:
        told = msgspec.json.decode(error.read(), type=dict[str, Any]).get("error", "")
    except (OSError, msgspec.MsgspecError):
        told = ""
    why = str(told) or f"HTTP {error.code}"
    where = f"admin.token_file of --security FILE, or {ADMIN_TOKEN_FILE}, names a file with it"
    return f"{why}; {where}" if error.code == 401 else why
