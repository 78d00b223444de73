"""The admin port of any live node, as commands ask it.

Its address is found through the brokers' configurations; what a node answers names the others, so
that a command goes on when the one that it asked first is gone.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

import msgspec

from raftmq.cli.common import CommandError, open_admin, show_json
from raftmq.cli.console import EXIT_FAILED, EXIT_UNKNOWN
from raftmq.cli.picture import admin_refusal, admin_request, find_addresses, open_page
from raftmq_client.blocking.admin import Admin


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
