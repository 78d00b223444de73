"""How commands find an admin port when nodes are missing."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raftmq.cli.admin_port import ADMIN_KEY, AdminPort
from raftmq.cli.topics import _states
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.admin import ResourceType
from raftmq_client.errors import ConnectionFailedError


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(
            {
                "controller_id": 2,
                "nodes": [
                    {"node_id": 1, "state": "fenced", "admin_address": "127.0.0.1:1"},
                    {"node_id": 2, "state": "live", "admin_address": "127.0.0.1:2"},
                ],
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output to itself."""


@pytest.fixture
def page() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class _Admin:
    """Brokers of which the first does not answer before the client's time is up."""

    def __init__(self, addresses: dict[int, str | None]) -> None:
        self._addresses = addresses

    def brokers(self) -> list[Any]:
        return [SimpleNamespace(node_id=node_id) for node_id in self._addresses]

    def describe_configs(self, resource: ResourceType, name: str) -> list[Any]:
        address = self._addresses[int(name)]
        if address is None:
            raise ConnectionFailedError(f"node {name} does not answer")
        return [SimpleNamespace(name=ADMIN_KEY, value=address)]


def test_brokers_that_do_not_answer_are_passed_over(page: str) -> None:
    admin = cast(Admin, _Admin({1: None, 3: page}))
    found = AdminPort.find(admin, 5.0)
    assert found is not None
    assert found.get("/nodes")["controller_id"] == 2
    assert found._addresses == [page, "127.0.0.1:2"], "and it named the other live one"


def test_nobody_has_an_admin_port() -> None:
    assert AdminPort.find(cast(Admin, _Admin({1: None})), 5.0) is None


def test_orders_go_to_the_controller_and_so_does_what_is_asked_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another node knows of an order a moment later, and would tell that nothing is to be done."""
    controllers = [2, 2, 2, 3]
    asked: list[str] = []

    def ask(_self: AdminPort, request: urllib.request.Request) -> dict[str, Any]:
        asked.append(f"{request.get_method()} {request.host}{request.selector}")
        now = controllers.pop(0) if len(controllers) > 1 else controllers[0]
        nodes = [{"node_id": n, "admin_address": f"node-{n}:1"} for n in (1, 2, 3)]
        return {"controller_id": now, "nodes": nodes}

    monkeypatch.setattr(AdminPort, "_ask", ask)
    port = AdminPort(["node-1:1"], 5.0)
    port.post("/nodes/change", {})
    assert asked[-3:] == ["POST node-2:1/nodes/change", "GET node-2:1/nodes", "GET node-3:1/nodes"]
    port.get("/moves")
    assert asked[-1] == "GET node-3:1/moves", "it is the controller by now"


def test_each_node_tells_who_writes_to_what_it_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is down is passed over."""
    what = {"software": "s 1", "host": "h"}
    late, soon = what | {"client_id": "a", "ago_s": 9.0}, what | {"client_id": "b", "ago_s": 1.0}
    known = {"node-1:1": [[], [late]], "node-3:1": [[], [soon, late | {"ago_s": 20.0}]]}

    def ask(_self: AdminPort, request: urllib.request.Request) -> dict[str, Any]:
        if request.host not in known:
            raise OSError("refused")
        rows = enumerate(known[request.host])
        return {"partitions": [{"partition": n, "writers": writers} for n, writers in rows]}

    monkeypatch.setattr(AdminPort, "_ask", ask)
    told = _states(AdminPort(["node-2:1", "node-1:1", "node-3:1"], 5.0), "t")
    assert [row["writers"] for row in told["partitions"]] == [[], [soon, late]]


def test_the_controller_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(_self: AdminPort, request: urllib.request.Request) -> dict[str, Any]:
        asked.append(f"{request.get_method()} {request.host}")
        if request.host == "node-2:1" or len(asked) > 4:
            raise OSError("refused")
        return {"controller_id": 2, "nodes": [{"node_id": 2, "admin_address": "node-2:1"}]}

    monkeypatch.setattr(AdminPort, "_ask", ask)
    port = AdminPort(["node-1:1"], 5.0)
    assert port.post("/nodes/change", {})["controller_id"] == 2, "what it did is known"
    assert asked[:4] == ["GET node-1:1", "GET node-2:1", "GET node-1:1", "POST node-1:1"]
